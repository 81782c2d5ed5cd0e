"""Measurements that tests of turns start in new processes, which import this module: it imports no torch."""

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil

from benchmarks import wait_for
from llmfoundry_lite.errors import ConfigError
from llmfoundry_machines.bench.turns import READY, STEPS, TIMED

LONG_SECONDS = 300.0


def lost() -> AssertionError:
    return AssertionError("what was waited for did not come")


def status_of(pid: int) -> str:
    return psutil.Process(pid).status() if psutil.pid_exists(pid) else psutil.STATUS_DEAD


def measure_beside(task, mark):
    """Do not end before the next has begun; the next asks for the device when this one is gone."""
    first, second = (Path(task["folder"], name) for name in ("first", "second"))
    own = Path(task["folder"], task["name"])
    own.with_suffix(".part").write_text(str(os.getpid()))
    own.with_suffix(".part").rename(own)
    mark(READY)
    found = {}
    if own == first:
        wait_for(second.exists, LONG_SECONDS, lost)
        mark(STEPS)
        mark(TIMED)
        wait_for(lambda: status_of(int(second.read_text())) == psutil.STATUS_STOPPED, LONG_SECONDS, lost)
    else:
        found["before"] = status_of(int(first.read_text()))
        mark(STEPS)
        mark(TIMED)
    return found


def hang(task, mark):
    subprocess.run(f"sleep 999 & echo $! > {task['told']}", shell=True)
    mark(READY)
    time.sleep(999)


def time_for_ever(task, mark):
    mark(READY)
    mark(STEPS)
    Path(task["told"]).with_suffix(f".{task['name']}").write_text(str(os.getpid()))
    mark(TIMED)
    time.sleep(999)


def fail(task, mark):
    if task["how"] == "refused":
        raise ConfigError("no such\nsetting")
    if task["how"] == "broken":
        raise ValueError("no such value")
    if task["how"] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    print("the last words", flush=True)
    os._exit(3)
