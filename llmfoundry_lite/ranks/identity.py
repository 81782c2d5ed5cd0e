"""Identity of a process, without the wall clock: boot, pid namespace, pid and start in ticks. No torch.

The wall clock may step, and dates computed from it move along. Containers of one machine share its boot, and each
counts processes anew. A machine may get another name while it runs.
"""

import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any


def describe_this_process() -> dict[str, Any]:
    return describe_process(os.getpid())


def describe_process(pid: int) -> dict[str, Any]:
    """Return host, boot, pid namespace, pid and start of a process of this machine, as `lives` takes them."""
    return {
        "host": socket.gethostname(),
        "boot": boot_id(),
        "namespace": pid_namespace(),
        "pid": pid,
        "started": start_ticks(pid),
    }


def lives(process: dict[str, Any]) -> bool | None:
    """Return whether the described process still runs; None where another machine or container must tell."""
    boot, is_of_this_host = process.get("boot"), process.get("host") == socket.gethostname()
    if boot is None or boot_id() is None:  # not Linux, or written by an earlier release
        import psutil  # takes a moment

        return psutil.pid_exists(process["pid"]) if is_of_this_host else None
    if boot != boot_id():
        return False if is_of_this_host else None  # this machine has rebooted since
    if process.get("namespace") != pid_namespace():
        return None
    started = start_ticks(process["pid"])
    return started is not None and started == process.get("started")


def uptime() -> float:
    """Return seconds since this machine started, by a clock that all its processes share and that is never set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def age_seconds(pid: int) -> float:
    """Return seconds since that process began; 0 where it cannot be told."""
    started = start_ticks(pid)
    return max(0.0, uptime() - started / os.sysconf("SC_CLK_TCK")) if started is not None else 0.0


def boot_id() -> str | None:
    """Return an id that changes with each start of the machine; None where there is none, as on macOS."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None


def pid_namespace() -> str | None:
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return None


def start_ticks(pid: int) -> int | None:
    """Return when a process began, so that a reused pid is not taken for it; None if it does not run, or is a
    zombie."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return None if fields[0] in "ZX" else int(fields[19])
    return None
