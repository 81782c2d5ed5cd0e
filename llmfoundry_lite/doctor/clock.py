"""The wall clock: does it run evenly, is it kept right, does the folder's server agree with it?

Logs of several machines are merged by time, and left-over parts of checkpoints are told from live ones by their age.
"""

import ctypes
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterator

from llmfoundry_lite.doctor.finding import Finding, Machine, Status

MOST_DRIFT_SECONDS = 0.01
"""Between two clocks that count seconds. The kernel corrects by at most 0.5 ms in each second, so this is a jump."""
MOST_FILE_SECONDS = 2.0
"""FAT, the coarsest of file systems, counts in two seconds."""
STA_UNSYNC = 0x40

SET_CLOCK = "timedatectl set-ntp true, or start chronyd (in a container or virtual machine: on its host)"


def check(
    machine: Machine, wall: Callable[[], float] = time.time, kernel_status: Callable[[], int | None] | None = None
) -> Iterator[Finding]:
    yield _check_pace(0.2 if machine.quick else 1.0, wall)
    yield _check_synchronisation((kernel_status or _kernel_status)())
    yield _check_file_times(machine, wall)


def _check_pace(seconds: float, wall: Callable[[], float]) -> Finding:
    before = wall() - time.monotonic()
    time.sleep(seconds)
    drift = wall() - time.monotonic() - before
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


def _check_file_times(machine: Machine, wall: Callable[[], float]) -> Finding:
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
        check="clock of the folder",
        status=Status.WARN if wrong else Status.PASS,
        value=difference * 1e3,
        unit="ms",
        detail=f"a new file in {machine.folder.resolve()} against the local clock",
        fix=f"synchronise this machine and the file server: {SET_CLOCK}" if wrong else "",
    )
