"""Ranks of one launch on one node tell each other how they end, with or without a process group. No torch.

When one rank has failed, its launcher ends the others with the signal of a scheduler that preempts. So a rank notes its
end before it ends, which is before its launcher can know of it, and a rank that is asked to leave looks here first. A
rank that ends without a note was killed.

The notes of all launches lie in one file per user. Those of launches that are over are dropped with the next note.
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
from typing import Any, NamedTuple

from llmfoundry_lite.errors import EXIT_DONE, EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_PREEMPTED
from llmfoundry_lite.files import open_own
from llmfoundry_lite.ranks.identity import describe_process, lives, start_ticks
from llmfoundry_lite.ranks.rank import this_rank
from llmfoundry_lite.retry import Budget, keep_trying

MAX_LAUNCHES = 100
MAX_TEXT = 2000
LOCK_SECONDS = 2.0
FILE_BYTES = 1 << 16
"""Least size of the file, which spaces fill: a rank that fails because the disk is full has room for its note."""


class FirstError(NamedTuple):
    """The first failure of a launch."""

    rank: int
    code: int
    text: str


_launch: str | None = None
"""An id that this launch's ranks on this node share; None: this process is alone, or nothing can be noted here."""
failure_elsewhere: Callable[[], FirstError | None] = lambda: None  # noqa: E731
"""Reads the failure of a rank on another node; `ranks.status` sets it."""


def enrol() -> None:
    """Let this launch's other ranks here know of this one, once its rank is known."""
    global _launch
    _launch = _identify_launch() if this_rank().local_world_size > 1 else None
    with suppress(OSError), _notes() as ranks:
        ranks[str(this_rank().rank)] = [os.getpid(), start_ticks(os.getpid()), None, ""]


def note_end(code: int, text: str = "") -> FirstError:
    """Note that this rank is about to end; with a `text`, because it has failed. Returns the node's first failure."""
    mine = FirstError(this_rank().rank, code, text)
    with suppress(OSError), _notes() as ranks:
        pid, started, _, noted = ranks.get(str(mine.rank)) or [os.getpid(), None, None, ""]
        if text and not noted:
            ranks.pop(str(mine.rank), None)  # keeps the ranks in the order in which they failed
        ranks[str(mine.rank)] = [pid, started, code, noted or text[:MAX_TEXT]]
        return next((_read(rank, note) for rank, note in ranks.items() if note[3]), mine)
    return mine if this_rank().local_rank == 0 else mine._replace(rank=mine.rank - this_rank().local_rank, text="")


def failure_of_another() -> FirstError | None:
    """Return the first failure that another rank here has noted; else one that has ended without a note; else
    one of another node."""
    with suppress(OSError), _notes() as ranks:
        others = [(rank, note) for rank, note in ranks.items() if rank != str(this_rank().rank)]
        for rank, note in others:
            if note[3]:
                return _read(rank, note)
        for rank, (pid, started, code, _) in others:
            if code is None and start_ticks(pid) != started:
                words = "has ended without a word: it was killed, perhaps for want of memory, or has crashed"
                return FirstError(int(rank), EXIT_FAILURE, f"error: rank {rank} {words}")
            if code not in (None, EXIT_DONE, EXIT_PREEMPTED, EXIT_INTERRUPTED):
                return FirstError(int(rank), code, f"error: rank {rank} has left with exit code {code}")
    return failure_elsewhere()


def _read(rank: str, note: list[Any]) -> FirstError:
    return FirstError(int(rank), note[2], note[3])


def _identify_launch() -> str | None:
    """Return the launcher's process and the number of its try. The launcher is the first ancestor that does not have
    this rank in its environment: a script may stand between."""
    pid = os.getppid()
    with suppress(OSError, ValueError):
        own = Path("/proc/self/environ").read_bytes().split(b"\0")
        place = [text for text in own if text.startswith(b"RANK=")] or [b"SLURM_PROCID=%d" % this_rank().rank]
        while place[0] in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    launcher = describe_process(pid)
    tried = [os.environ.get(name, "") for name in ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")]
    return json.dumps([launcher, tried]) if launcher["started"] is not None else None


@contextmanager
def _notes() -> Iterator[dict[str, list[Any]]]:
    """Read this launch's notes, rank -> pid, start in ticks, exit code, text; write them back after the block. Raises
    OSError where there are none, and for a file of somebody else."""
    if _launch is None:
        raise OSError
    path = Path(tempfile.gettempdir(), f"llmfoundry_lite_ranks_{os.getuid()}.json")
    with open(open_own(path, os.O_RDWR | os.O_CREAT), "r+b") as file, _without_signals():  # handlers read the file
        _lock(file.fileno())
        launches: dict[str, dict[str, list[Any]]] = {}
        with suppress(ValueError):
            launches = json.loads(file.read())
        before = json.dumps(launches)
        ranks = launches.setdefault(_launch, {})
        yield ranks
        running = [key for key in launches if key == _launch or lives(json.loads(key)[0]) is not False]
        content = json.dumps({key: launches[key] for key in running[-MAX_LAUNCHES:]})
        if content != before:
            file.seek(0)
            file.write(content.encode().ljust(FILE_BYTES))  # in place, then cut: the disk may be full by now
            file.truncate()


@contextmanager
def _without_signals() -> Iterator[None]:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _lock(descriptor: int) -> None:
    """Lock a file. Raises OSError if another process holds it for long: it is frozen."""
    budget = Budget([0.005], seconds=LOCK_SECONDS, began=time.monotonic())
    lock = partial(fcntl.flock, descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    keep_trying(lock, budget, lambda error: isinstance(error, BlockingIOError))
