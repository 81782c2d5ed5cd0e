"""status.json in the run directory: how the last launch ended. launches.jsonl: each launch's beginning and end.

status.json has `running | done | stopped | preempted | failed`, the last batch, the reason and, while a run runs, its
process: a launch that is refused must not touch it then. A process that is killed or aborted writes nothing, so a
reader has to check whether the recorded process is gone:

    {"status": "running", "batch": 40, "reason": null, "last_saved": "ba40", "process": {"host": "gpu003", …}}

`write_status` and `read_status` are for a launch that trains. `write_ended_early` and `refusals_recorded` are for one
that ends before. The last functions let ranks on several nodes find each other's failures in the file.
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
from llmfoundry_lite.ranks.identity import boot_id, describe_this_process, is_alive, uptime
from llmfoundry_lite.ranks.rank import step_over_nodes, this_rank
from llmfoundry_lite.ranks.siblings import FirstError

STATUS = "status.json"
MAX_BATCH = 1 << 53
"""Limit of the number of a batch: floats hold whole numbers below it."""
SAVES_STAND = "the newest save stands, if there is one"
HAS_OTHER_LAUNCHES = "has_other_launches"
"""Key of status.json, true for a launch that trains a run together with others, such as an island."""
SAVED_IN = "last_saved_in"
"""Key of status.json, the path or URL of `save_fallback` while the newest save is there, and not in `save_folder`."""
WAITS_FOR_SAVE = "waits_for_save"
"""Key of status.json, a text while training waits for a save that takes long: which one, and where it goes."""
SAVES = ("last_saved", SAVED_IN, "saved_at", "failed_saves", "save_error", HAS_OTHER_LAUNCHES)
"""Keys of status.json about saves that stay when a launch has ended: the newest one, where it is, when it was published
(in seconds since 1970; null if an earlier launch did), how many have failed since, why the last of them did, and
whether another launch may have made later ones. WAITS_FOR_SAVE is about a launch that runs."""
TRY_AGAIN = "try_again"
"""Key of status.json, true where a `failed` launch met a fault that may pass and should be launched again, because it
had saved something before, or could not even begin. Batch scripts read it. A launch that trained and saved nothing
would only repeat itself."""
HAS_SAVED = "has_saved"
"""Key of status.json, true while a launch runs that has published a save, from which the next launch resumes if this
one is killed."""
is_observed = False
"""Whether a process beside this launch tells the user how it ends. A refusal of a new run is then recorded too."""
LAUNCHES = "launches.jsonl"
"""{"time": seconds since 1970, "boot", "uptime", "status", "batch", "reason", "has_begun", "host"} in each line.
`has_begun`: the launch had started to train before it ended. `time` is for people; `uptime` counts within one boot.
The line of a launch that begins also has "launch", its number in metrics.jsonl."""


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
) -> float:
    """Write a run's status into status.json, and append the beginning or the end of a launch to launches.jsonl.

    `status` is running, done, stopped, preempted or failed. `batch` is the last batch that was trained. `reason` says
    why the launch ended, or while it is running, why it was asked to leave. `more` are further keys of status.json.

    `has_begun` says whether the launch had started to train before it ended, and `launch` is its number in
    metrics.jsonl. Both go into launches.jsonl alone.

    `is_update`: the launch has neither begun nor ended, so that only status.json is written. It is assumed if the
    file already says that this process is running, and this call says so too.

    Returns the time of the call in seconds since 1970, as launches.jsonl has it. Raises OSError if launches.jsonl is a
    link, through which another file would be written. A link in the place of status.json is replaced.
    """
    # Build the line for launches.jsonl.
    reason = mask_credentials(reason or "") or None
    outcome = {"status": status, "batch": batch, "reason": reason}
    event: dict[str, Any] = {"time": time.time(), "boot": boot_id(), "uptime": uptime()}
    event |= {**outcome, "has_begun": has_begun, "host": socket.gethostname()}
    if launch is not None:
        event["launch"] = launch

    # Build the content of status.json.
    content: dict[str, Any] = dict(outcome)
    for key, value in more.items():
        content[key] = mask_credentials(value) if isinstance(value, str) else value
    if status == "running":
        content["process"] = describe_this_process()
        is_update = is_update or (read_status(folder) or {}).get("process") == content["process"]

    write_atomically(folder / STATUS, json.dumps(content) + "\n")
    if not is_update:
        with open(folder / LAUNCHES, "a", opener=open_no_link) as file:
            file.write(json.dumps(event) + "\n")
    return event["time"]


def read_status(folder: Path) -> dict[str, Any] | None:
    """Read the status of a run's last launch; None if there is none.

    A launch that is recorded as running and whose process is gone was killed. Its status is returned as failed, or as
    preempted if it had been asked to leave and its saves did not fail. The file is not changed.
    """
    content = _read(folder)
    if content is None or content.get("status") != "running" or is_running(content):
        return content

    # The launch was killed. Build the status that it would have written.
    reason = f"the process of rank 0 is gone without a word, killed or aborted; {SAVES_STAND}"
    reason_to_leave = content.get("reason")
    if reason_to_leave:
        reason = f"{reason_to_leave}: {reason}"
    ended: dict[str, Any] = {"status": "failed", "batch": content.get("batch", 0), "reason": reason}
    ended |= {key: content[key] for key in SAVES if key in content}
    if reason_to_leave and ended.get("failed_saves"):
        # Its last batches are in no save, so it would have reported a failure itself when it left.
        if content.get(HAS_SAVED) is True:
            ended[TRY_AGAIN] = True
    elif reason_to_leave:
        ended["status"] = "preempted"
    return ended


def write_ended_early(folder: Path, status: str, reason: str, **more: Any) -> None:
    """Write the status of a launch that ended before it trained. The last batch and the saves stay as they were.

    Nothing is written if another launch still runs, or if the run is done and this launch has failed, because a
    mistake in a later launch does not undo that. The status is the one that `status_of_early_end` returns. `more` are
    further keys of status.json.
    """
    before = read_status(folder) or {}
    is_done = before.get("status") == "done"
    if is_running(before) or (is_done and status == "failed"):
        return

    status_of_run = status_of_early_end(status, before)
    if status_of_run != status:
        more[TRY_AGAIN] = True  # a script that launches preempted runs again may launch this one again too
    saves = {key: before[key] for key in SAVES if key in before}
    write_status(folder, status_of_run, before.get("batch", 0), reason, has_begun=False, **saves, **more)


def status_of_early_end(status: str, before: dict[str, Any]) -> str:
    """Return the status of a run whose launch has ended with `status` before it trained.

    `before` is the content of status.json by the launch before, or as this launch has left it. If that launch has
    failed and lost batches, the run stays failed even if this one was preempted, because a launch has to train the lost
    batches again first.
    """
    if status == "preempted" and has_lost_batches(before):
        return "failed"
    return status


def has_lost_batches(status: dict[str, Any]) -> bool:
    """Return whether the launch with this status has failed, and has trained batches that no save holds.

    `status` is the content of status.json. The newest save is named for its batch, and is None before the first: with
    {"status": "failed", "batch": 230, "last_saved": "ba200"}, 30 batches are lost. The batches of a launch with
    other launches are not lost with it, because others hold and save them.
    """
    if status.get(HAS_OTHER_LAUNCHES):
        return False
    if status.get("status") != "failed" or "last_saved" not in status:
        return False
    last_saved = status["last_saved"]
    saved_batch = "0" if last_saved is None else str(last_saved).removeprefix("ba")
    return not saved_batch.isdecimal() or status["batch"] > int(saved_batch)


@contextlib.contextmanager
def refusals_recorded(
    find_folder: Callable[[], Path | None],
    publish: Callable[[str, str], None] = lambda status, reason: None,
    *,
    creates_folder: bool = False,
) -> Iterator[None]:
    """Record in status.json why the block fails, for a launch that has not written its own status yet.

    Each rank runs the block. Where it fails, the first rank of its node to fail records the reason, rank 0 or not,
    because the launcher ends the others, which may never fail themselves. The error is raised again.

    `find_folder` returns the run directory, or None to record nothing. Without a status of an earlier launch, nothing
    is recorded either, with three exceptions: a launch that is observed; a launch over several nodes by `srun`, because
    the ranks of the other nodes read there that this one has failed; and a block that may create the run directory
    (`creates_folder`), because the configuration, which names it, is known to be right.

    `publish` is called on the same rank with the run's status and the reason, unless `find_folder` returns None.
    """
    try:
        yield
    except (Exception, ending.AnotherFailedError) as error:
        with contextlib.suppress(OSError, RuntimeError):  # a disk or the process group's store may be gone
            _record_refusal(error, find_folder(), publish, creates_folder=creates_folder)
        raise


def _record_refusal(
    error: BaseException, folder: Path | None, publish: Callable[[str, str], None], *, creates_folder: bool
) -> None:
    """Write this launch's early end into the run directory `folder`, and publish it, if this rank is to do it.

    `refusals_recorded` explains which rank does, and when nothing is recorded. Sets `error.has_lost` of a UserError on
    every rank: whether an earlier launch has lost batches, on which the exit code depends.

    Raises OSError, and RuntimeError if the process group's store is gone.
    """
    before = {} if folder is None else read_status(folder) or {}
    if isinstance(error, UserError) and folder is not None:
        error.has_lost = has_lost_batches(before)
    rank = this_rank().rank
    is_first = ending.claim_first_error(error).rank == rank
    if not is_first or folder is None:
        return

    # The first rank that has failed on its node goes on.
    step = step_over_nodes()
    if failure_on_another_node(folder):
        return
    is_transient = isinstance(error, UserError) and error.is_transient
    status = "preempted" if is_transient else "failed"
    reason = ending.describe_cause(error)

    is_known_run = (folder / STATUS).exists()
    if step or is_known_run or is_observed or creates_folder:
        more = {}
        if step:
            more = {"step": step, "rank": rank, "exit_code": ending.exit_code_of(error)}
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            write_ended_early(folder, status, reason, **more)
    publish(status_of_early_end(status, before), reason)


def watch_for_failures_on_other_nodes(folder: Path) -> None:
    """Let this rank, when it is asked to leave, look in the run directory `folder` for a failure on another node.

    A rank that fails records it there before it exits, and `srun` ends the ranks of other nodes afterwards. So the
    record is there by the time the signal comes.
    """
    siblings.find_failure_on_other_nodes = lambda: failure_on_another_node(folder)


def failure_on_another_node(folder: Path) -> FirstError | None:
    """Return the failure that a rank of this launch over several nodes has recorded in the run directory `folder`.

    It is in status.json, as `_record_refusal` writes it:

        {"status": "failed", "batch": 0, "reason": "…", "step": "4711.0.2.0", "rank": 5, "exit_code": 2}

    None if there is none, or the record is of another attempt (its `step`), or the launch is on one node.
    """
    step = step_over_nodes()
    if step is None:
        return None
    content = _read(folder)
    if content is None or content["status"] != "failed" or content.get("step") != step:
        return None
    rank, exit_code = content.get("rank"), content.get("exit_code")
    if not isinstance(rank, int) or not isinstance(exit_code, int):
        return None
    return FirstError(rank, exit_code, f"error: {content.get('reason')}")


def is_running(content: dict[str, Any]) -> bool:
    """Return whether the process that a status names is alive; true where that cannot be told from this machine.

    `content` is that of status.json. A status without a process is that of a launch that has ended.
    """
    process = content.get("process")
    return process is not None and is_alive(process) is not False


def is_sound(content: Any) -> bool:
    """Return whether JSON has the keys and types that a launch writes into status.json.

    The file may be written by anybody, so that code that reads it relies on this check. It covers `status`, `reason`,
    `batch`, and `process` if it is there. Values of other keys are not checked.
    """
    if not isinstance(content, dict) or not isinstance(content.get("status"), str):
        return False
    if not isinstance(content.get("reason"), str | None):
        return False
    batch = content.get("batch")
    if type(batch) is not int or not 0 <= batch < MAX_BATCH:
        return False
    if "process" not in content:
        return True
    process = content["process"]
    if not isinstance(process, dict):
        return False
    return isinstance(process.get("host"), str) and isinstance(process.get("pid"), int)


def _read(folder: Path) -> dict[str, Any] | None:
    """Read status.json as it was written; None if it is missing, too large, or no status that a launch writes."""
    try:
        content = parse_json(read_at_most(folder / STATUS, MAX_NOTE_BYTES, STATUS))
    except (OSError, ValueError):
        return None
    return content if is_sound(content) else None
