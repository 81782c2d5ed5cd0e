"""Turns on the device: the next process gets ready meanwhile, stands still while steps are timed, and none is left."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys

import psutil
import pytest

from benchmarks import wait_for
from llmfoundry_machines.bench import turns
from llmfoundry_machines.bench.turns import IMPORTS, Turns
from llmfoundry_machines.tests.bench.measured import (
    LONG_SECONDS,
    fail,
    hang,
    lost,
    measure_beside,
    status_of,
    time_for_ever,
)
from tests.helpers.launch import PATHS, ROOT

FRESH = {"side": "matmul fp32"}
"""A process that does not wait for the server."""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_next_gets_ready_meanwhile_and_stands_still_while_steps_are_timed(tmp_path):
    tasks = [FRESH | {"folder": str(tmp_path), "name": name} for name in ("first", "second")]
    with Turns(measure_beside, tasks) as measured:
        first, second = (measured.measure(number, LONG_SECONDS) for number in range(2))
    assert second["before"] in (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE)
    assert first["ready_seconds"] > 0 < first["steps_seconds"] and second["ready_seconds"] > 0
    assert second["steps_seconds"] < 60, "the wait for the device counts as neither"


@pytest.mark.multiprocess
def test_one_that_hangs_is_ended_with_all_that_it_has_started(monkeypatch, tmp_path):
    told = tmp_path / "told"
    monkeypatch.setattr(turns, "limit_of_turn", lambda left: 1.0)
    with Turns(hang, [FRESH | {"told": str(told)}]) as measured:
        with pytest.raises(RuntimeError, match=r"matmul fp32: ended after 1 s .*, and no time is left"):
            measured.measure(0, LONG_SECONDS)
        wait_for(lambda: status_of(int(told.read_text())) in ("dead", "zombie"), 60, lost)


def be_measured(told):
    """Measure as a bench does: one process is timed while the next stands still."""
    with Turns(time_for_ever, [FRESH | {"told": told, "name": str(number)} for number in range(2)]) as measured:
        measured.measure(0, LONG_SECONDS)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_one_that_is_ended_by_a_signal_leaves_nothing_that_stands_still(tmp_path):
    told = tmp_path / "told"
    bench = multiprocessing.get_context("spawn").Process(target=be_measured, args=(str(told),))
    bench.start()
    try:
        started = psutil.Process(bench.pid)
        wait_for(
            lambda: psutil.STATUS_STOPPED in [one.status() for one in started.children(recursive=True)],
            LONG_SECONDS,
            lost,
        )
        children = started.children(recursive=True)
        bench.terminate()
        bench.join(LONG_SECONDS)
        _, left = psutil.wait_procs(children, LONG_SECONDS)
    finally:
        bench.kill()
    assert not left and bench.exitcode == 128 + signal.SIGTERM


@pytest.mark.parametrize(("left", "limit"), [(480, 240), (100, 60), (70, 60), (30, 30), (0, 0)])
def test_a_turn_is_half_of_what_is_left_but_long_enough_to_compile(left, limit):
    assert turns.limit_of_turn(left) == limit


@pytest.mark.multiprocess
def test_how_one_fails_is_told_in_a_line():
    words = {
        "refused": "no such setting",
        "broken": "ValueError: no such value",
        "killed": "killed, usually for lack of memory",
        "crashed": "exit code 3: the last words",
    }
    with Turns(fail, [FRESH | {"how": how} for how in words]) as measured:
        for number, said in enumerate(words.values()):
            with pytest.raises(RuntimeError) as error:
                measured.measure(number, LONG_SECONDS)
            assert str(error.value) == f"matmul fp32: {said}"


SLOW_START = """
import os, sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "composer":
            sys.meta_path.remove(self)
            with open(os.environ["SLOW_LOG"], "a") as log:
                log.write(f"{os.getpid()}\\n")
            time.sleep(float(os.environ["SLOW_SECONDS"]))
sys.meta_path.insert(0, Slow())
"""


@pytest.mark.long
def test_a_slow_start_is_paid_once_for_all_cases(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SLOW_START)
    log, caches = tmp_path / "log", {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    slow = {"PYTHONPATH": f"{tmp_path}:{PATHS}", "SLOW_LOG": str(log), "SLOW_SECONDS": "5"}
    options = ["--shapes", "tiny", "--seq-len", "32", "--batch-size", "2", "--num-steps", "1", "--minutes", "20"]
    command = [sys.executable, "-m", "llmfoundry_lite", "bench", "mfu", *options, "--out", str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, **slow, **caches}, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    products, first, *others = json.loads((tmp_path / "mfu.json").read_text())["rows"]
    assert not [row for row in (products, first, *others) if "error" in row]
    assert len(log.read_text().split()) == 1
    assert first["ready_seconds"] > 5 and min(row["ready_seconds"] for row in others) < first["ready_seconds"]
    assert first["config"]["compile_config"] == {} and first["config"]["device_train_microbatch_size"] == 2
    assert (first["num_devices"], first["hardware"]) == (1, None) and "config" not in products


@pytest.mark.slow
def test_what_the_server_imports_survives_a_fork():
    program = """
import importlib, threading, torch
def refuse(*given): raise SystemExit("a device was asked for")
torch._C._cuda_getDeviceCount = torch.cuda._lazy_init = refuse
for name in NAMES: importlib.import_module(name)
assert threading.active_count() == 1, threading.enumerate()
""".replace("NAMES", repr(IMPORTS))
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=os.environ | {"PYTHONPATH": PATHS}, check=True)
