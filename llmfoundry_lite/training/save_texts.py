"""Texts about the saves of a launch: what is saved, what is not, and why. They change nothing.

`Checkpointing` and `preemption.py` print them, and `status.json` has the fields of `describe_saves`. The ranks exchange
nothing here.
"""

from typing import TYPE_CHECKING, Any

from composer.core import State

from llmfoundry_lite.ranks.status import HAS_OTHER_LAUNCHES, WAITS_FOR_SAVE

if TYPE_CHECKING:  # it imports this module
    from llmfoundry_lite.training.checkpointing import Checkpointing


def describe_saves(checkpointing: "Checkpointing") -> dict[str, Any]:
    """Return the fields of status.json about saves."""
    fields: dict[str, Any] = {
        "last_saved": f"ba{checkpointing.published_batch}" if checkpointing.published_batch > 0 else None,
        "failed_saves": checkpointing.failed_saves.count,
        "save_error": checkpointing.failed_saves.reason or checkpointing.second_place.error or None,
        **checkpointing.second_place.describe(),
    }
    if checkpointing.waits_for_save:
        fields[WAITS_FOR_SAVE] = checkpointing.waits_for_save
    if not checkpointing.config.trains_alone:
        fields[HAS_OTHER_LAUNCHES] = True
    return fields


def describe_remaining(checkpointing: "Checkpointing", state: State) -> str:
    """Return which batches no save holds, and which checkpoint remains, if this process ends now.

    It is a part of rank 0's exit message, such as "batches 5 to 8 are in no save; ba4 stands". It may be called
    from any thread, because the main thread may hang.
    """
    if not checkpointing.role.writes_checkpoints:
        return "what was saved stands"

    # A save that is published during a batch is in `durable_batch` first.
    newest_batch = max(checkpointing.published_batch, checkpointing.durable_batch)
    if newest_batch <= 0:
        again = "" if checkpointing.config.autoresume else " with autoresume=true"
        return f"nothing was saved yet, and the same command{again} starts over"
    unsaved = describe_unsaved(state, max(newest_batch, checkpointing.first_batch - 1))
    stands = f"ba{newest_batch} stands{checkpointing.second_place.suffix}"
    return f"{unsaved}; {stands}" if unsaved else stands


def describe_unsaved(state: State, saved_batch: int) -> str:
    """Return in words which batches after `saved_batch` have been trained; empty if none have.

    For example, "batches 5 to 8 are in no save" or "batch 5 is in no save".
    """
    first_unsaved = saved_batch + 1
    last_trained = int(state.timestamp.batch)
    if first_unsaved > last_trained:
        return ""
    if first_unsaved == last_trained:
        return f"batch {last_trained} is in no save"
    return f"batches {first_unsaved} to {last_trained} are in no save"


def describe_preemption(checkpointing: "Checkpointing", state: State) -> str:
    """Return the exit message of a launch that leaves early: why, at which batch, what is saved, how to carry on.

    For example, "preempted by SIGTERM at batch 12, saved as ba12; run the same command again". The ranks exchange
    nothing.
    """
    saved = "nothing to save yet"
    if checkpointing.published_batch > 0:
        saved = f"saved as ba{checkpointing.published_batch}{checkpointing.second_place.suffix}"
    if not checkpointing.role.writes_checkpoints:
        saved = checkpointing.role.instead_of_saving
    again = "run the same command again"
    if not checkpointing.config.autoresume:
        again += " with autoresume=true"
    reason = checkpointing.preemption.describe_reason(checkpointing.was_preempted_by)
    return f"{reason} at batch {int(state.timestamp.batch)}, {saved}; {again}"


def describe_newest_save(checkpointing: "Checkpointing") -> str:
    """Return which checkpoint the run has, for a message about a save that has failed."""
    if checkpointing.published_batch <= 0:
        return "there is no save yet"
    return f"ba{checkpointing.published_batch} stands{checkpointing.second_place.suffix}"


def describe_failed_saves(checkpointing: "Checkpointing") -> str:
    """Return why the last save has failed, which checkpoint remains, and how many saves have failed in a row.

    For example, "disk full; ba200 stands; 3 saves in a row have failed".
    """
    parts = [checkpointing.failed_saves.describe(), describe_newest_save(checkpointing)]
    if checkpointing.failed_saves.count > 1:
        parts.append(f"{checkpointing.failed_saves.count} saves in a row have failed")
    return "; ".join(parts)
