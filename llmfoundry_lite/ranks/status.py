"""status.json in the run directory: how the last launch ended. launches.jsonl: each launch's beginning and end.

status.json has `running | done | stopped | preempted | failed`, the last batch, the reason and, while a run runs, its
process: a launch that is refused must not touch it then. A process that is killed or aborted writes nothing: whoever
reads sees that it is gone.
"""

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llmfoundry_lite.bounded import MAX_NOTE_BYTES, parse_json, read_at_most
from llmfoundry_lite.errors import UserError, mask_credentials
from llmfoundry_lite.files import open_no_link, write_atomically
from llmfoundry_lite.ranks import ending, siblings
from llmfoundry_lite.ranks.identity import boot_id, describe_this_process, lives, uptime
from llmfoundry_lite.ranks.rank import step_over_nodes, this_rank
from llmfoundry_lite.ranks.siblings import FirstError

STATUS = "status.json"
MAX_BATCH = 1 << 53
"""Limit of the number of a batch: floats hold whole numbers below it."""
SAVES_STAND = "the newest save stands, if there is one"
SAVES = ("last_saved", "failed_saves", "save_error")
"""Keys of status.json about saves: the newest one, how many have failed since, and why the last of them did."""
TRY_AGAIN = "try_again"
"""Key of status.json, true where a `failed` launch met a fault that may pass, and is to be launched again: it had saved
something before, or it could not even begin. Batch scripts read it. A launch that trained and saved nothing would only
repeat itself."""
LAUNCHES = "launches.jsonl"
"""{"time": seconds since 1970, "boot", "uptime", "status", "batch", "reason", "has_begun", "host"} in each line.
`has_begun`: the launch had carried on before it ended. `time` is for people; `uptime` counts within one boot. The line
of a launch that begins also has "launch", its number in metrics.jsonl."""


def write_status(
    folder: Path,
    status: str,
    batch: int,
    reason: str | None = None,
    *,
    has_begun: bool = True,
    launch: int | None = None,
    is_update: bool = False,
    **more: Any,
) -> None:
    """Write both files, of an update status.json alone: the launch has neither begun nor ended, even if somebody has
    removed status.json meanwhile. `launch` goes into launches.jsonl alone, `more` into status.json. The `reason` of a
    `running` run is why it was asked to leave."""
    content: dict[str, Any] = {"status": status, "batch": batch, "reason": mask_credentials(reason or "") or None}
    event = {"time": time.time(), "boot": boot_id(), "uptime": uptime()}
    event |= {**content, "has_begun": has_begun, "host": socket.gethostname()}
    if launch is not None:
        event["launch"] = launch
    content |= {key: mask_credentials(value) if isinstance(value, str) else value for key, value in more.items()}
    if status == "running":
        content["process"] = describe_this_process()
        is_update = is_update or (read_status(folder) or {}).get("process") == content["process"]
    write_atomically(folder / STATUS, json.dumps(content) + "\n")
    if not is_update:
        with open(folder / LAUNCHES, "a", opener=open_no_link) as file:
            file.write(json.dumps(event) + "\n")


def read_status(folder: Path) -> dict[str, Any] | None:
    """Return the last launch's status; None if there is none. A launch whose process is gone has failed, or was
    preempted if it had been asked to leave and its saves did not fail."""
    content = _read(folder)
    if content is None or content.get("status") != "running" or is_running(content):
        return content
    asked = content.get("reason")
    gone = f"the process of rank 0 is gone without a word, killed or aborted; {SAVES_STAND}"
    status, reason = ("preempted", f"{asked}: {gone}") if asked else ("failed", gone)
    ended = {"status": status, "batch": content.get("batch", 0), "reason": reason}
    ended |= {key: content[key] for key in SAVES if key in content}
    if asked and ended.get("failed_saves"):  # as it would have said itself: its last batches are in no save
        ended |= {"status": "failed", TRY_AGAIN: True}
    return ended


def write_ended_early(folder: Path, status: str, reason: str, **more: Any) -> None:
    """Write the status of a launch that ended before it carried on; the batch stays.

    A script that reads `preempted` would launch a refused run again for ever. The status of another launch that still
    runs stays, and so does `done`, which a mistake in a later launch does not undo.
    """
    before = read_status(folder) or {}
    if is_running(before) or (before.get("status") == "done" and status == "failed"):
        return
    if status == "preempted" and has_lost_batches(before):
        status = "failed"  # batches that no save holds are no preemption, though this launch has lost none itself
        more[TRY_AGAIN] = True
    saves = {key: before[key] for key in SAVES if key in before}
    write_status(folder, status, before.get("batch", 0), reason, has_begun=False, **saves, **more)


def has_lost_batches(status: dict[str, Any]) -> bool:
    """Return whether the launch with this status has failed, and has trained batches that no save holds."""
    if status.get("status") != "failed" or "last_saved" not in status:
        return False
    last_saved = status["last_saved"]
    saved_batch = str(last_saved).removeprefix("ba") if last_saved is not None else "0"
    return not saved_batch.isdecimal() or status["batch"] > int(saved_batch)


@contextlib.contextmanager
def refusals_recorded(find_folder: Callable[[], Path | None]) -> Iterator[None]:
    """Record why the block fails in the status of an earlier launch of the run: this launch has not set its own up yet.

    The first rank to fail on a node records it: others may not fail, and the launcher then ends rank 0. Over several
    nodes it writes into a new folder too: `srun` ends the other nodes' ranks, which read the reason there.
    """
    try:
        yield
    except (Exception, ending.AnotherFailedError) as error:
        with contextlib.suppress(OSError, RuntimeError):
            folder = find_folder()
            if isinstance(error, UserError) and folder is not None:
                error.has_lost = has_lost_batches(read_status(folder) or {})
            if ending.first_error(error).rank != this_rank().rank:
                folder = None
            step = step_over_nodes()
            if folder is not None and (step or (folder / STATUS).exists()) and not failure_on_another_node(folder):
                folder.mkdir(parents=True, exist_ok=True)
                may_pass = isinstance(error, UserError) and error.is_transient
                more = {"step": step, "rank": this_rank().rank, "exit_code": ending.exit_code_of(error)} if step else {}
                write_ended_early(folder, "preempted" if may_pass else "failed", ending.cause_of(error), **more)
        raise


def hear_of_other_nodes(folder: Path) -> None:
    """Make this rank, when it is asked to leave, look here for a failure of a rank on another node. That rank records
    it before it ends, and `srun` ends the others afterwards, so nobody has to wait for the record."""
    siblings.failure_elsewhere = lambda: failure_on_another_node(folder)


def failure_on_another_node(folder: Path) -> FirstError | None:
    """Return the failure that a rank of this very step has recorded."""
    step = step_over_nodes()
    content = _read(folder) if step is not None else None
    if content is None or content["status"] != "failed" or content.get("step") != step:
        return None
    rank, code = content.get("rank"), content.get("exit_code")
    if not (isinstance(rank, int) and isinstance(code, int)):
        return None
    return FirstError(rank, code, f"error: {content.get('reason')}")


def is_running(content: dict[str, Any]) -> bool:
    """Return whether the process that wrote it is alive; true where that cannot be told from here."""
    process = content.get("process")
    return process is not None and lives(process) is not False


def is_sound(content: Any) -> bool:
    """Return whether a launch can have written this; other content counts as no status."""
    if not isinstance(content, dict) or not isinstance(content.get("status"), str):
        return False
    if not isinstance(content.get("reason"), str | None):
        return False
    kinds = {"host": str, "pid": int}
    process = content.get("process", dict.fromkeys(kinds))
    is_known = isinstance(process, dict) and all(isinstance(process.get(key), kind) for key, kind in kinds.items())
    batch = content.get("batch")
    is_batch = type(batch) is int and 0 <= batch < MAX_BATCH
    return is_batch and (is_known or "process" not in content)


def _read(folder: Path) -> dict[str, Any] | None:
    try:
        content = parse_json(read_at_most(folder / STATUS, MAX_NOTE_BYTES, STATUS))
    except (OSError, ValueError):
        return None
    return content if is_sound(content) else None
