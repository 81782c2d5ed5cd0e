"""How the ranks of one launch on one node learn how the others end, with or without a process group. No torch.

When one rank has failed, its launcher ends the others with the same signal as a scheduler that preempts. To tell the
two apart, a rank records its end before it exits, which is before its launcher can know of it. A rank that gets a
signal first reads the others' records. A rank that is gone without a record of its end was killed.

The records of all launches are in one file per user. Those of launches that are over are dropped by the next write. The
file is JSON, from a launch's id to its ranks, and from a rank to the fields of its RankRecord:

    {"<id of a launch>": {"0": [4711, 93012, null, ""], "1": [4712, 93015, 2, "error: no space left"]}}

`register_rank` must be called first, `record_end` before a rank exits, and `find_recorded_failure` when a signal comes.
"""

import fcntl
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from llmfoundry_lite.errors import EXIT_DONE, EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_PREEMPTED
from llmfoundry_lite.files import open_own
from llmfoundry_lite.ranks.identity import describe_process, is_alive, start_ticks
from llmfoundry_lite.ranks.rank import this_rank
from llmfoundry_lite.retry import Budget, keep_trying

MAX_LAUNCHES = 100
"""Most launches whose records are kept, the newest ones."""
MAX_TEXT_CHARACTERS = 2000
LOCK_SECONDS = 2.0
"""Time for which a rank waits for another process's lock on the file. It is held for milliseconds, unless its holder is
frozen."""
MIN_FILE_BYTES = 1 << 16
"""The file is padded to this size with spaces, so that a rank which fails because the disk is full can still write to
it."""


class FirstError(NamedTuple):
    """The first failure of a launch."""

    rank: int
    code: int
    text: str


class RankRecord(NamedTuple):
    """A rank's process, and how it has ended. The file has it as a list."""

    pid: int
    started: int | None
    """Time at which the process started, in clock ticks, which tells it from a later process with the same pid."""
    exit_code: int | None
    """None while the rank has not recorded its end."""
    error_text: str
    """Empty unless the rank has failed."""


Records = dict[str, RankRecord]
"""Rank, as text -> its record. Ranks that have failed are in the order in which they failed."""

_launch_id: str | None = None
"""An id that this launch's ranks on this node share; None if this process is alone, or no file of records can be
used."""
find_failure_on_other_nodes: Callable[[], FirstError | None] = lambda: None  # noqa: E731
"""Returns the failure of a rank on another node, if one is known; `ranks.status` sets it."""


def register_rank() -> None:
    """Record that this rank runs, so that the other ranks on this node notice if it is killed.

    To be called once this process's rank is known. Sets `_launch_id`, without which the other functions of this module
    record and find nothing. Without other ranks on this node, or a usable file, nothing is recorded.
    """
    global _launch_id
    _launch_id = _identify_launch() if this_rank().local_world_size > 1 else None
    with suppress(OSError), _open_records() as records:
        records[str(this_rank().rank)] = RankRecord(os.getpid(), start_ticks(os.getpid()), None, "")


def record_end(exit_code: int, error_text: str = "") -> FirstError:
    """Record that this rank is about to exit, with an `error_text` if it has failed.

    A rank may call this several times, for example when it exits after it has reported an error. The last code and the
    first text stay.

    Returns the first failure among the ranks of this node, or this rank's end if none has failed. If no records can
    be used, the node's first rank counts as the first that has failed, on each rank of the node, so that only that one
    reports its error.
    """
    this = this_rank()
    end_of_this_rank = FirstError(this.rank, exit_code, error_text)
    with suppress(OSError), _open_records() as records:
        record = records.get(str(this.rank)) or RankRecord(os.getpid(), None, None, "")
        if error_text and not record.error_text:
            records.pop(str(this.rank), None)  # inserted again below, after the ranks that failed before
        first_text = record.error_text or error_text[:MAX_TEXT_CHARACTERS]
        records[str(this.rank)] = record._replace(exit_code=exit_code, error_text=first_text)
        return _first_reported_failure(records) or end_of_this_rank

    # The records cannot be used.
    if this.local_rank == 0:
        return end_of_this_rank
    first_rank_of_node = this.rank - this.local_rank
    return FirstError(first_rank_of_node, exit_code, "")


def find_recorded_failure() -> FirstError | None:
    """Return the failure of another rank, because of which a launcher may be ending this one; None if none is known.

    These are looked for in order: an error that a rank on this node has reported, a rank on this node that was killed
    or has exited with an error code, and a failure on another node.
    """
    with suppress(OSError), _open_records() as records:
        other_records = {rank: record for rank, record in records.items() if rank != str(this_rank().rank)}
        reported_failure = _first_reported_failure(other_records)
        if reported_failure is not None:
            return reported_failure

        # No other rank has reported an error. Look for one that has ended without a report.
        for rank, record in other_records.items():
            was_killed = record.exit_code is None and start_ticks(record.pid) != record.started
            if was_killed:
                cause = "has ended without a message: it was killed, perhaps for lack of memory, or has crashed"
                return FirstError(int(rank), EXIT_FAILURE, f"error: rank {rank} {cause}")
            if record.exit_code not in (None, EXIT_DONE, EXIT_PREEMPTED, EXIT_INTERRUPTED):
                text = f"error: rank {rank} has left with exit code {record.exit_code}"
                return FirstError(int(rank), record.exit_code, text)
    return find_failure_on_other_nodes()


def _first_reported_failure(records: Records) -> FirstError | None:
    """Return the failure of the first rank that has recorded an error's text; None if no rank has."""
    for rank, record in records.items():
        if record.error_text and record.exit_code is not None:
            return FirstError(int(rank), record.exit_code, record.error_text)
    return None


def _identify_launch() -> str | None:
    """Return an id of this launch: its launcher's process, and the launcher's attempt at starting ranks.

    The launcher is the nearest ancestor that does not have this rank in its environment, because a script may stand
    between it and this process. The attempt is known by the port and by torchrun's number of restarts. All ranks of a
    launch on this node compute the same id, without asking each other.

    Returns None if the system does not tell when the launcher started.
    """
    # Go up from the parent, as long as a process has the same RANK=… as this one (under srun, SLURM_PROCID=…).
    pid = os.getppid()
    with suppress(OSError, ValueError):
        own_variables = Path("/proc/self/environ").read_bytes().split(b"\0")
        rank_variables = [variable for variable in own_variables if variable.startswith(b"RANK=")]
        rank_variable = rank_variables[0] if rank_variables else b"SLURM_PROCID=%d" % this_rank().rank
        while rank_variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            fields_after_name = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            pid = int(fields_after_name[1])  # the parent

    launcher = describe_process(pid)
    if launcher["started"] is None:
        return None
    attempt = [os.environ.get(name, "") for name in ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")]
    return json.dumps([launcher, attempt])


@contextmanager
def _open_records() -> Iterator[Records]:
    """Lock the file of records, and yield those of this launch. Changes that the block makes are written at its end.

    Signals are delayed until then, because their handlers open the file too, and would wait for the lock. Raises
    OSError if this rank is not registered, if the file belongs to somebody else, or if another process keeps it locked.
    """
    if _launch_id is None:
        raise OSError

    # Read the records of all launches.
    path = Path(tempfile.gettempdir(), f"llmfoundry_lite_ranks_{os.getuid()}.json")
    with open(open_own(path, os.O_RDWR | os.O_CREAT), "r+b") as file, _blocked_signals():
        _lock(file.fileno())
        launches: dict[str, dict[str, list]] = {}
        with suppress(ValueError):  # a new file is empty
            launches = json.loads(file.read())
        content_before = json.dumps(launches)

        records = {rank: RankRecord(*values) for rank, values in launches.get(_launch_id, {}).items()}
        yield records

        # Write them again, without launches that are over: those whose launcher, the first part of an id, has ended.
        launches[_launch_id] = {rank: list(record) for rank, record in records.items()}
        current = [key for key in launches if key == _launch_id or is_alive(json.loads(key)[0]) is not False]
        content = json.dumps({key: launches[key] for key in current[-MAX_LAUNCHES:]})
        if content != content_before:
            # Written over the old content, and cut afterwards: a new file may have no room on a full disk.
            file.seek(0)
            file.write(content.encode().ljust(MIN_FILE_BYTES))
            file.truncate()


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Block all signals in this thread during a block. Those that come meanwhile are handled at its end."""
    mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask_before)


def _lock(descriptor: int) -> None:
    """Lock a file until it is closed. Raises OSError if another process holds the lock for LOCK_SECONDS."""
    budget = Budget([0.005], seconds=LOCK_SECONDS, began=time.monotonic())
    lock = partial(fcntl.flock, descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    keep_trying(lock, budget, lambda error: isinstance(error, BlockingIOError))
