"""The wall clock: does it run evenly, is it kept right, and is it right?

Left-over parts of checkpoints are told from live ones by their age, and clusters that share a folder compare times.
A machine cannot tell from its own clock that it is wrong. So it is compared with whatever keeps time apart from it: the
server of the folder's files, the board's own clock, and files that are there already, none of which can be newer than
now. Where there is none of these, the finding says that nothing was compared. (The ranks' clocks: `collectives.py`.)
"""

import ctypes
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from llmfoundry_lite.doctor.disk import is_shared
from llmfoundry_lite.doctor.finding import Finding, Machine, Status

MOST_DRIFT_SECONDS = 0.01
"""Between two clocks that count seconds. The kernel corrects by at most 0.5 ms in each second, so this is a jump."""
MOST_FILE_SECONDS = 2.0
"""FAT, the coarsest of file systems, counts in two seconds."""
MOST_BOARD_SECONDS = 60.0
"""The board's clock drifts by seconds in a week, and the kernel sets it where the clock is kept right."""
MOST_FILES = 20_000
STA_UNSYNC = 0x40

SET_CLOCK = "timedatectl set-ntp true, or start chronyd (in a container or virtual machine: on its host)"


def check(
    machine: Machine,
    wall: Callable[[], float] = time.time,
    kernel_status: Callable[[], int | None] | None = None,
    board: Callable[[], float | None] | None = None,
    is_shared: Callable[[Path], bool] = is_shared,
    dated: Sequence[Path] = (Path("/var/log"), Path("/var/lib"), Path("/tmp")),
) -> Iterator[Finding]:
    yield _check_pace(0.2 if machine.quick else 1.0, wall)
    yield _check_synchronisation((kernel_status or _kernel_status)())
    yield _check_server(machine, wall, is_shared)
    yield _check_board(wall, board or _board_clock)
    yield _check_newest_file([machine.folder, *dated], wall)


def _check_pace(seconds: float, wall: Callable[[], float]) -> Finding:
    before = _read_offset(wall)
    time.sleep(seconds)
    drift = _read_offset(wall) - before
    jumped = abs(drift) > MOST_DRIFT_SECONDS
    return Finding(
        check="clock pace",
        status=Status.WARN if jumped else Status.PASS,
        value=drift * 1e3,
        unit="ms",
        detail=f"wall clock against monotonic clock over {seconds:g} s"
        + ("; it was set or it jumps" if jumped else ""),
        fix=SET_CLOCK if jumped else "",
    )


def _read_offset(wall: Callable[[], float]) -> float:
    """The wall clock less the monotonic one, of the readings with the least time in between: on a busy machine another
    process may have the processor just then."""
    readings = []
    for _ in range(5):
        began = time.monotonic()
        now = wall()
        seconds = time.monotonic() - began
        readings.append((seconds, now - began - seconds / 2))
    return min(readings)[1]


def _check_synchronisation(status: int | None) -> Finding:
    if status is None:
        return Finding(check="clock", status=Status.SKIP, detail="the kernel does not say whether it is kept right")
    if status & STA_UNSYNC:
        detail = "the kernel says that nothing keeps the clock right"
        return Finding(check="clock", status=Status.WARN, value="not synchronised", detail=detail, fix=SET_CLOCK)
    return Finding(check="clock", status=Status.PASS, value="synchronised", detail="by the kernel's own account")


def _kernel_status() -> int | None:
    """`status` of adjtimex(2), which asks without setting; None where it cannot be asked.

    struct timex of 64-bit Linux: unsigned modes; long offset, freq, maxerror, esterror; int status.
    """
    try:
        function = ctypes.CDLL(None).adjtimex
    except (AttributeError, OSError):
        return None
    buffer = ctypes.create_string_buffer(512)
    return None if function(buffer) < 0 else struct.unpack_from("@iqqqqi", buffer.raw)[5]


def _check_server(machine: Machine, wall: Callable[[], float], is_shared: Callable[[Path], bool]) -> Finding:
    name = "clock of the folder"
    if not is_shared(machine.folder):
        detail = f"nothing was compared: {machine.folder.resolve()} gets its times from this machine's own clock"
        return Finding(check=name, status=Status.SKIP, detail=detail)
    before = wall()
    with tempfile.TemporaryFile(dir=machine.folder) as file:
        file.write(b"now")
        file.flush()
        os.fsync(file.fileno())
        written = os.fstat(file.fileno()).st_mtime
    after = wall()
    difference = written - before if written < before else max(0.0, written - after)
    wrong = abs(difference) > MOST_FILE_SECONDS
    return Finding(
        check=name,
        status=Status.WARN if wrong else Status.PASS,
        value=difference * 1e3,
        unit="ms",
        detail=f"the file server's time of a new file in {machine.folder.resolve()} against the local clock",
        fix=f"synchronise this machine and the file server: {SET_CLOCK}" if wrong else "",
    )


def _check_board(wall: Callable[[], float], board: Callable[[], float | None]) -> Finding:
    name = "clock of the board"
    shown = board()
    if shown is None:
        detail = "nothing was compared: no hardware clock to be read here, as in containers"
        return Finding(check=name, status=Status.SKIP, detail=detail)
    difference = shown - wall()
    wrong = abs(difference) > MOST_BOARD_SECONDS
    return Finding(
        check=name,
        status=Status.WARN if wrong else Status.PASS,
        value=difference,
        unit="s",
        detail="the hardware clock against the local clock" + ("; one of the two is wrong" if wrong else ""),
        fix=f"{SET_CLOCK}; then hwclock --systohc" if wrong else "",
    )


def _board_clock(root: Path = Path("/")) -> float | None:
    """What the hardware clock shows, as seconds since 1970; None where there is none.

    It counts UTC, or local time if the third line of /etc/adjtime says so (hwclock(8)).
    """
    try:
        shown = float((root / "sys/class/rtc/rtc0/since_epoch").read_text())
    except (OSError, ValueError):
        return None
    try:
        is_local = (root / "etc/adjtime").read_text().splitlines()[2].strip() == "LOCAL"
    except (OSError, IndexError):
        is_local = False
    return shown - time.localtime(shown).tm_gmtoff if is_local else shown


def _check_newest_file(folders: Sequence[Path], wall: Callable[[], float]) -> Finding:
    """A file from the future: the clock has been set back, or another machine that writes here is ahead."""
    newest, path, count = 0.0, None, 0
    for file in islice(_files(folders), MOST_FILES):
        with suppress(OSError):
            modified = file.stat(follow_symlinks=False).st_mtime
            count += 1
            if modified > newest:
                newest, path = modified, file.path
    ahead = newest - wall()
    wrong = ahead > MOST_FILE_SECONDS
    detail = f"the newest of {count:,} files in {', '.join(str(folder) for folder in folders)} against the local clock"
    return Finding(
        check="clock and files",
        status=Status.WARN if wrong else Status.PASS,
        value=max(0.0, ahead),
        unit="s ahead",
        detail=f"{detail}; {path} was written {ahead:,.0f} s in the future" if wrong else detail,
        fix=f"compare `date -u` with other machines; {SET_CLOCK}" if wrong else "",
    )


def _files(folders: Sequence[Path]) -> Iterator[os.DirEntry[str]]:
    """Those in the folders and one level below; what may not be read is passed over."""
    for folder in folders:
        for entry in _entries(folder):
            if entry.is_dir(follow_symlinks=False):
                yield from (file for file in _entries(entry.path) if file.is_file(follow_symlinks=False))
            elif entry.is_file(follow_symlinks=False):
                yield entry


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []
