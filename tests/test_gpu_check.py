"""scripts/gpu_check.py: it ends in time, whatever hangs, and its proof has what came to an end before."""

import json
import time

import pytest

from scripts import gpu_check
from tests.helpers.launch import ROOT

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


@pytest.fixture
def part(tmp_path):
    return gpu_check.Part("tests", 8, tmp_path / "out")


@pytest.mark.slow
def test_every_test_has_an_outcome_though_one_hangs_when_the_time_is_up(part, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # it is no worker of the session that started it
    (tmp_path / "test_them.py").write_text(TESTS)
    outcomes = tmp_path / "outcomes.jsonl"
    arguments = ["-m", "pytest", "-q", "-p", "tests.helpers.outcomes", str(tmp_path / "test_them.py")]
    arguments += ["-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), f"--rootdir={tmp_path}"]
    began = time.monotonic()
    part.run("pytest", arguments, 20, OUTCOMES=str(outcomes))
    assert time.monotonic() - began < 60
    found = {name.split("::")[1]: test for name, test in gpu_check.read_outcomes(outcomes).items()}
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
    assert part.proof["problems"] == ["pytest: ended after 20 s, when the time was up"]
    assert json.loads(part.path.read_text())["problems"] == part.proof["problems"]


def test_what_fails_is_a_problem_with_its_last_line_and_what_comes_too_late_is_not_begun(part, capfdbinary):
    assert part.run("step", ["-c", "print('so far'); raise SystemExit('error: no such thing')"]).returncode == 1
    part.deadline = time.monotonic()
    assert part.run("late", ["-c", "print('never')"]).returncode == 1
    assert part.proof["problems"] == ["step: exit code 1: error: no such thing", "late: no time for it"]
    printed = capfdbinary.readouterr().out.decode()
    assert "so far" in printed and "\nnever" not in printed and "[0:00 left] late" in printed


def test_what_is_missing_is_named_before_anything_starts(monkeypatch, capsys, tmp_path):
    assert gpu_check.main(["ready"]) == 0
    monkeypatch.setitem(gpu_check.NEEDED, "no_such_module", "its-package==1.0")
    assert gpu_check.main(["speed", "--out", str(tmp_path / "out")]) == 2
    assert "missing: no_such_module (its-package==1.0); docs/hardware.md says" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_speed_is_held_against_the_products_the_datasheet_and_the_prediction(tmp_path):
    pytest.importorskip("llmfoundry_planner")
    row = {"microbatch_size": 8, "seconds": 1.0}
    rows = [
        {**row, "shape": "1b", "step": "matrix products", "flops_per_sec": 6e14},
        {**row, "shape": "1b", "step": "sdpa, compiled", "flops_per_sec": 4.5e14},
        {"shape": "1b", "step": "flex, compiled", "error": "trainer bf16: ended after 9 s, no time is left"},
    ]
    (tmp_path / "mfu.json").write_text(json.dumps({"rows": rows, "peak_flops": 9e14}))
    products, sdpa, flex = gpu_check.list_mfu(tmp_path / "mfu.json", "H200")
    assert (sdpa["share_of_products"], sdpa["share_of_peak"]) == (0.75, 0.5)
    assert 0.3 < sdpa["predicted_share_of_peak"] < 0.7
    words = gpu_check.describe_mfu(sdpa)
    shares = "75.0% of its products, 50.0% of the datasheet"
    assert words.startswith(f"1b, sdpa, compiled: 450.00 TFLOP/s, {shares}; predicted ")
    assert "predicted" not in gpu_check.describe_mfu(products) and "no time is left" in gpu_check.describe_mfu(flex)
    assert gpu_check.list_mfu(tmp_path / "none.json", "H200") == []
    assert gpu_check.predict("1b", None, "") is None and gpu_check.predict("10m", "H200", "") is None


def test_the_page_of_predictions_is_what_plan_predicts():
    pytest.importorskip("llmfoundry_planner")
    lines = gpu_check.list_predictions()
    assert (ROOT / "docs/measurements/mfu-predicted.md").read_text().splitlines() == lines
    predicted = gpu_check.predict("1b", "H200", "sdpa, compiled")
    assert f"| h200-8 | mpt-1b | 1 | 73%, 37% | 43.9% | {predicted:.1%} |" in "\n".join(lines)
