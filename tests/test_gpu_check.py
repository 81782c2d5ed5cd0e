"""scripts/gpu_check.py: it ends in time, whatever hangs, and its proof has what came to an end before."""

import json
import os
import re
import subprocess
import sys
import threading
import time

import pytest

from scripts import gpu_check, gpu_part, gpu_predictions, gpu_steps
from tests.helpers.launch import ROOT

processes = pytest.importorskip("llmfoundry_ops.processes", reason="gpu_check measures with the companions")

TESTS = """
import time, pytest
def test_one(): pass
def test_two(): assert 1 == 2, "one is not two"
def test_three(): pytest.skip("not today")
@pytest.fixture
def broken(): raise OSError("no fixture")
def test_four(broken): pass
def test_five(): time.sleep(99)
def test_six(): pass
"""
ESCAPES = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"], start_new_session=True).pid)
"""


@pytest.fixture
def part(tmp_path):
    return gpu_part.Part("device", 4, tmp_path / "out")


def give_seconds(part, seconds):
    part.deadline = time.monotonic() + gpu_part.RESERVE_SECONDS + seconds


def seconds_of(part, name):
    """Seconds after which a step was ended, by the last problem."""
    found = re.fullmatch(rf"{name}: ended after (\d+) s, when its time was up", part.proof["problems"][-1])
    assert found is not None, part.proof["problems"]
    return int(found[1])


@pytest.mark.slow
def test_every_test_has_an_outcome_though_one_hangs_when_the_time_is_up(part, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # it is no worker of the session that started it
    (tmp_path / "test_them.py").write_text(TESTS)
    outcomes = tmp_path / "outcomes.jsonl"
    arguments = ["-m", "pytest", "-q", "-p", "tests.helpers.outcomes", str(tmp_path / "test_them.py")]
    arguments += ["-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), f"--rootdir={tmp_path}"]
    give_seconds(part, 12.1)
    part.run("pytest", arguments, OUTCOMES=str(outcomes))
    assert part.left() > 0
    found = {name.split("::")[1]: test for name, test in gpu_steps.read_outcomes(outcomes).items()}
    assert {name: test["outcome"] for name, test in found.items()} == {
        "test_one": "passed",
        "test_two": "failed",
        "test_three": "skipped",
        "test_four": "failed",
        "test_five": "no time",
        "test_six": "no time",
    }
    assert "one is not two" in found["test_two"]["why"] and "not today" in found["test_three"]["why"]
    assert "no fixture" in found["test_four"]["why"]
    assert 11 < seconds_of(part, "pytest") < 18
    assert json.loads(part.path.read_text())["problems"] == part.proof["problems"]


def test_what_fails_is_a_problem_with_its_last_line_and_what_has_no_time_is_left_out(part, capfd):
    assert part.run("step", ["-c", "print('so far'); raise SystemExit('error: no such thing')"]).returncode == 1
    give_seconds(part, 60)
    assert part.run("long", ["-c", "print('never')"], needs=61).returncode == 1
    give_seconds(part, -1)
    assert part.run("late", ["-c", "print('never')"]).returncode == 1
    assert part.proof["problems"] == ["step: exit code 1: error: no such thing"]
    assert part.proof["left_out"] == ["long: no time for it", "late: no time for it"]
    printed = capfd.readouterr().out
    assert "step: so far\n" in printed and ": never" not in printed


@pytest.mark.multiprocess
@pytest.mark.parametrize("then", ["", "time.sleep(99)"], ids=["it ends", "it hangs"])
def test_a_step_leaves_no_process_behind_in_whichever_session(part, then):
    give_seconds(part, 5)
    found = part.run("step", ["-c", ESCAPES + then])
    assert found.returncode == (1 if then else 0)
    assert not processes.is_running(int(found.stdout))


@pytest.mark.multiprocess
def test_all_ends_with_the_script(tmp_path):
    command = [sys.executable, "-u", "scripts/gpu_check.py", "runs", "--out", str(tmp_path)]
    script = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert script.stdout is not None and "facts" in script.stdout.readline()
    mark = f"{script.pid} facts"
    while not processes.find(mark, gpu_part.MARK):
        assert script.poll() is None
    script.terminate()
    assert "problem: ended by SIGTERM" in script.communicate()[0]
    assert script.returncode == 1 and not processes.find(mark, gpu_part.MARK)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_step_that_hangs_leaves_a_third_of_the_time_to_those_that_wait(part, monkeypatch):
    monkeypatch.setattr(gpu_part, "NUM_AT_ONCE", 1)
    part.runs_at_once, found = False, []
    give_seconds(part, 9)
    hang, end = ["-c", "import time; time.sleep(99)"], ["-c", "print('so soon')"]
    part.together(
        {"one": lambda: found.append(part.run("one", hang)), "two": lambda: found.append(part.run("two", end))}
    )
    assert [step.returncode for step in found] == [1, 0] and part.left() > 0
    assert 5 < seconds_of(part, "one") < 8
    give_seconds(part, 3)
    part.together({"last": lambda: found.append(part.run("last", hang))})
    assert 2 < seconds_of(part, "last") < 7


def test_steps_run_at_once_and_one_that_raises_costs_no_other(part):
    part.runs_at_once, met = True, threading.Barrier(3)

    def meet():
        met.wait(60)

    def fail():
        meet()
        raise KeyError("rows")

    part.together({"one": meet, "two": fail, "three": meet})
    assert not met.broken and part.proof["problems"] == ["two: KeyError('rows')"]


def test_what_is_missing_is_named_before_anything_starts(monkeypatch, capsys, tmp_path):
    assert gpu_check.main(["ready"]) == 0
    monkeypatch.setitem(gpu_check.NEEDED, "no_such_module", "its-package==1.0")
    assert gpu_check.main(["device", "--out", str(tmp_path / "out")]) == 2
    assert "missing: no_such_module (its-package==1.0); docs/hardware.md says" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_programs_of_packages_that_were_brought_are_on_the_path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/brought")
    environment = gpu_part.environment_of_steps()
    assert environment["PYTHONPATH"] == os.pathsep.join([str(ROOT), str(ROOT / "companions"), "/brought"])
    assert environment["PATH"].split(os.pathsep)[2] == "/brought/bin"


def test_speed_is_held_against_the_products_the_datasheet_and_the_prediction(part):
    pytest.importorskip("llmfoundry_planner")
    row = {"microbatch_size": 8, "seconds": 1.0}
    rows = [
        {**row, "shape": "1b", "step": "matrix products", "flops_per_sec": 6e14},
        {**row, "shape": "1b", "step": "sdpa, compiled", "flops_per_sec": 4.5e14},
        {"shape": "1b", "step": "flex, compiled", "error": "trainer bf16: ended after 9 s, no time is left"},
    ]
    path = part.out / "mfu.json"
    path.write_text(json.dumps({"rows": rows, "peak_flops": 9e14, "left_out": ["1b, flex, not compiled"]}))
    products, sdpa, flex = gpu_steps.list_mfu(gpu_steps.read_report(part, "mfu", path), "H200")
    assert part.proof["left_out"] == ["mfu: 1b, flex, not compiled: no time for it"]
    assert (sdpa["share_of_products"], sdpa["share_of_peak"]) == (0.75, 0.5)
    assert 0.3 < sdpa["predicted_share_of_peak"] < 0.7
    words = gpu_steps.describe_mfu(sdpa)
    shares = "75.0% of its products, 50.0% of the datasheet"
    assert words.startswith(f"1b, sdpa, compiled: 450.00 TFLOP/s, {shares}; predicted ")
    assert "predicted" not in gpu_steps.describe_mfu(products) and "no time is left" in gpu_steps.describe_mfu(flex)
    assert gpu_steps.list_mfu(gpu_steps.read_report(part, "mfu", part.out / "none.json"), "H200") == []
    assert gpu_predictions.predict("1b", None, "") is None and gpu_predictions.predict("10m", "H200", "") is None


def test_a_save_its_restore_and_the_energy_are_read_from_the_log():
    records = [
        {"batch": batch, "time/elapsed_seconds": 9 + 2.0 * batch, "time/token": 100 * batch, "energy/joules": 500.0}
        for batch in range(1, 9)
    ]
    records[5] |= {"checkpoint/bytes": 8, "checkpoint/stall_seconds": 1.0, "checkpoint/durable_seconds": 4.0}
    records[6]["checkpoint/restore_seconds"] = 2.0
    records[7] |= {"checkpoint/bytes": 9, "checkpoint/stall_seconds": 2.0, "checkpoint/durable_seconds": 5.0}
    seconds = {"stall_seconds": 1.0, "durable_seconds": 4.0, "restore_seconds": 2.0}
    assert gpu_steps.sum_up_saves(records) == {"bytes": 8, **seconds} and gpu_steps.sum_up_saves([]) == {}
    seconds_of_launches = [{"time/batch_seconds": each} for each in (9, 9, 2, 2, 2, 2, 9, 9, 9, 9, 3, 3, 3)]
    assert gpu_steps.sum_up_saves(seconds_of_launches) == {"deterministic_price": 1.5}
    assert gpu_steps.sum_up_energy(records) == {"joules": 2000.0, "seconds": 8.0, "tokens": 400}
    assert gpu_steps.sum_up_energy(records[:2]) is None
    del records[3]["energy/joules"]
    assert gpu_steps.sum_up_energy(records) is None


def test_without_lm_eval_nothing_stands_beside_it(part, monkeypatch):
    monkeypatch.setattr(gpu_steps.importlib.util, "find_spec", lambda name: None)
    gpu_steps.check_evaluation(part)
    assert part.proof["left_out"] == ["evaluation beside lm_eval --model hf: lm_eval is not installed"]


def test_the_page_of_predictions_is_what_plan_predicts():
    pytest.importorskip("llmfoundry_planner")
    lines = gpu_predictions.list_predictions()
    assert (ROOT / "docs/measurements/mfu-predicted.md").read_text().splitlines() == lines
    predicted = gpu_predictions.predict("1b", "H200", "sdpa, compiled")
    assert f"| h200-8 | mpt-1b | 1 | 73%, 37% | 43.9% | {predicted:.1%} |" in "\n".join(lines)
