"""Files into which ranks other than 0 print: `logs/rank1.txt` and so on, in the run folder. No torch.

Each covers all tries of a launch. `rank1.before.txt` is from the launch before. A file that becomes large is rotated:
`rank1.1.txt` has what it held before, `rank1.2.txt` what was older, and so on.
"""

import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.files import open_no_link

MAX_LOG_BYTES = 64 << 20
"""Size of a log from which on it is rotated: about half a million lines."""
KEPT_LOGS = 3
"""Number of older parts of each log that are kept."""
ROTATION_SECONDS = 10.0
"""Time between two checks of the sizes."""


def make_room_for_logs(folder: Path) -> None:
    """Rename the logs of the launch before, whose ranks may still write them, and check that the folder can be written.

    Logs of launches before that one are removed. Raises ConfigError.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        logs = [*folder.glob("rank*[0-9].txt")]
        # If the launch before has written no logs, those of the one before it are the newest.
        if logs:
            for path in folder.glob("rank*.before.txt"):
                path.unlink(missing_ok=True)
        for path in logs:
            os.replace(path, path.with_suffix(".before.txt"))
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"{folder}: ranks cannot write their logs there: {error.strerror}; name another folder with --log-dir"
        ) from error


def log_of(logs: Path, rank: int) -> Path:
    """Return the log of a rank other than 0."""
    return logs / f"rank{rank}.txt"


class Rotation:
    """Rotates the logs of a launch that are large, from time to time."""

    def __init__(self, logs: Path, num_ranks: int):
        """Set the first check to ROTATION_SECONDS from now. Nothing is read before."""
        self._paths = [log_of(logs, rank) for rank in range(1, num_ranks)]
        self._next_check_at = time.monotonic() + ROTATION_SECONDS

    def rotate_large_logs(self) -> None:
        """Rotate the logs that are large, if it is time. A log that cannot be rotated goes on to grow."""
        now = time.monotonic()
        if now < self._next_check_at:
            return
        self._next_check_at = now + ROTATION_SECONDS
        for path in self._paths:
            with suppress(OSError):
                if path.stat().st_size >= MAX_LOG_BYTES:
                    rotate(path)


def rotate(log: Path) -> None:
    """Copy a log into a file beside it, and cut it off.

    It is not renamed, because a rank and its child processes hold it open. All of them append, so they go on at its
    beginning, and so does `tail -F`. What they write in the moment between the copy and the cut is lost. If the copy
    fails, as on a full disk, nothing is cut, but the oldest part may be gone. Raises OSError.
    """
    copy = log.with_suffix(".part")
    with open(log, "r+b", opener=open_no_link) as source:
        # The oldest part is replaced first, so that its room is free for the copy. If an earlier copy has failed since,
        # there is no newest part, and no further part is given up.
        if _older(log, 1).exists():
            _renumber(log)

        try:
            with open(copy, "wb", opener=open_no_link) as target:
                shutil.copyfileobj(source, target)
                target.flush()
                # Little has been written meanwhile, so the moment until the cut is short.
                shutil.copyfileobj(source, target)
        except OSError:
            copy.unlink(missing_ok=True)
            raise
        os.ftruncate(source.fileno(), 0)
    os.replace(copy, _older(log, 1))


def _renumber(log: Path) -> None:
    """Give each older part of a log the next number. The last one is replaced."""
    for number in range(KEPT_LOGS, 1, -1):
        with suppress(FileNotFoundError):
            os.replace(_older(log, number - 1), _older(log, number))


def _older(log: Path, number: int) -> Path:
    """Return the path of an older part of a log; number 1 is the newest."""
    return log.with_suffix(f".{number}.txt")
