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
    """Describe this process, so that another one can ask `is_alive` whether it still runs."""
    return describe_process(os.getpid())


def describe_process(pid: int) -> dict[str, Any]:
    """Describe a process of this machine, so that it can be told from all others, also after a reboot and elsewhere.

    The result can be written as JSON:

        {"host": "gpu003", "boot": "8ebf…", "namespace": "pid:[4026531836]", "pid": 4711, "started": 93012}

    `started` is in clock ticks since the machine started, and None if there is no such process.
    """
    return {
        "host": socket.gethostname(),
        "boot": boot_id(),
        "namespace": pid_namespace(),
        "pid": pid,
        "started": start_ticks(pid),
    }


def is_alive(process: dict[str, Any]) -> bool | None:
    """Return whether a process that `describe_process` has described still runs.

    Returns None if that cannot be told from here, because it is a process of another machine or container. A process
    with the same pid that started at another time is not the same process.
    """
    is_on_this_host = process.get("host") == socket.gethostname()
    boot = process.get("boot")
    if boot is None or boot_id() is None:  # not Linux, or written by an earlier release
        import psutil  # takes a moment

        return psutil.pid_exists(process["pid"]) if is_on_this_host else None

    if boot != boot_id():
        # Either this machine has rebooted since, or it is another machine.
        return False if is_on_this_host else None
    if process.get("namespace") != pid_namespace():
        return None  # a container's, where this pid is another process
    started = start_ticks(process["pid"])
    return started is not None and started == process.get("started")


def uptime() -> float:
    """Return seconds since this machine started, by a clock that all its processes share and that is never set."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


def age_seconds(pid: int) -> float:
    """Return the seconds since a process of this machine started; 0 if that is unknown."""
    started = start_ticks(pid)
    if started is None:
        return 0.0
    ticks_per_second = os.sysconf("SC_CLK_TCK")
    return max(0.0, uptime() - started / ticks_per_second)


def boot_id() -> str | None:
    """Return an id that changes with each start of the machine; None where there is none, as on macOS."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None


def pid_namespace() -> str | None:
    """Return the name of this process's pid namespace, in which a pid is unique; None where there is none."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return None


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since the machine did; None if it does not run or is a zombie.

    It tells a process from a later one with the same pid.
    """
    with suppress(OSError, ValueError, IndexError):
        # The second field, the name in parentheses, may contain spaces. See proc_pid_stat(5).
        fields_after_name = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        state, started = fields_after_name[0], fields_after_name[19]
        is_gone = state in "ZX"  # zombie, dead
        return None if is_gone else int(started)
    return None
