"""Texts about the saves of a launch: what is saved, what is not, and why. They change nothing.

`Checkpointing` and `preemption.py` print them, and `status.json` has the fields of `describe_saves`. The ranks exchange
nothing here.
"""

from typing import Any, Protocol

from composer.core import State

from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.ranks.status import HAS_PARTNERS, WAITS_FOR_SAVE
from llmfoundry_lite.training.failed_saves import FailedSaves
from llmfoundry_lite.training.partners import Partners
from llmfoundry_lite.training.preemption import Preemption
from llmfoundry_lite.training.second_place import SecondPlace


class Saves(Protocol):
    """The parts of `Checkpointing` that the texts are about. A protocol, because `Checkpointing` imports the texts."""

    config: TrainConfig
    partners: Partners
    preemption: Preemption
    failed_saves: FailedSaves
    second_place: SecondPlace
    first_batch: int
    published_batch: int
    durable_batch: int
    was_preempted_by: str
    waits_for_save: str


def describe_saves(saves: Saves) -> dict[str, Any]:
    """Return the fields of status.json about saves."""
    fields: dict[str, Any] = {
        "last_saved": f"ba{saves.published_batch}" if saves.published_batch > 0 else None,
        "failed_saves": saves.failed_saves.count,
        "save_error": saves.failed_saves.reason or saves.second_place.error or None,
        **saves.second_place.describe(),
    }
    if saves.waits_for_save:
        fields[WAITS_FOR_SAVE] = saves.waits_for_save
    if not saves.config.trains_alone:
        fields[HAS_PARTNERS] = True
    return fields


def describe_remaining(saves: Saves, state: State) -> str:
    """Return which batches no save holds, and which checkpoint remains, if this process ends now.

    It is a part of rank 0's exit message, such as "batches 5 to 8 are in no save; ba4 stands". It may be called
    from any thread, because the main thread may hang.
    """
    if not saves.partners.writes_checkpoints:
        return "what was saved stands"

    # A save that is published during a batch is in `durable_batch` first.
    newest_batch = max(saves.published_batch, saves.durable_batch)
    if newest_batch <= 0:
        again = "" if saves.config.autoresume else " with autoresume=true"
        return f"nothing was saved yet, and the same command{again} starts over"
    unsaved = describe_unsaved(state, max(newest_batch, saves.first_batch - 1))
    stands = f"ba{newest_batch} stands{saves.second_place.suffix}"
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


def describe_preemption(saves: Saves, state: State) -> str:
    """Return the exit message of a launch that leaves early: why, at which batch, what is saved, how to carry on.

    For example, "preempted by SIGTERM at batch 12, saved as ba12; run the same command again". The ranks exchange
    nothing.
    """
    saved = "nothing to save yet"
    if saves.published_batch > 0:
        saved = f"saved as ba{saves.published_batch}{saves.second_place.suffix}"
    if not saves.partners.writes_checkpoints:
        saved = saves.partners.instead_of_saving
    again = "run the same command again"
    if not saves.config.autoresume:
        again += " with autoresume=true"
    reason = saves.preemption.describe_reason(saves.was_preempted_by)
    return f"{reason} at batch {int(state.timestamp.batch)}, {saved}; {again}"


def describe_newest_save(saves: Saves) -> str:
    """Return which checkpoint the run has, for a message about a save that has failed."""
    if saves.published_batch <= 0:
        return "there is no save yet"
    return f"ba{saves.published_batch} stands{saves.second_place.suffix}"


def describe_failed_saves(saves: Saves) -> str:
    """Return why the last save has failed, which checkpoint remains, and how many saves have failed in a row.

    For example, "disk full; ba200 stands; 3 saves in a row have failed".
    """
    parts = [saves.failed_saves.describe(), describe_newest_save(saves)]
    if saves.failed_saves.count > 1:
        parts.append(f"{saves.failed_saves.count} saves in a row have failed")
    return "; ".join(parts)
