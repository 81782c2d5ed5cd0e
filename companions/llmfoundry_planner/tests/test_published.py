"""The planner beside what was published. `tests/rehearse` runs the tightest microbatches."""

import json
import re
from statistics import median

import pytest

from benchmarks.papers.published import (
    FAMILIES,
    FITTED,
    Figure,
    errors_by_kind,
    errors_on_more_devices,
    figures,
    mean_error,
    newer_figures,
    published,
    read_rows,
    table_of_errors,
    table_of_far,
    table_of_papers,
)
from llmfoundry_lite.config.layout import layout_of
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.estimate.memory import estimate_training_memory
from llmfoundry_lite.hardware import ACCELERATORS
from llmfoundry_lite.models.flops import count_parameters
from llmfoundry_planner.plan import rates, step
from llmfoundry_planner.plan.search import usable_bytes
from llmfoundry_planner.plan.step import find_hardware
from tests.helpers.launch import ROOT


def test_no_published_microbatch_is_said_to_be_out_of_memory():
    rows = published()
    assert len(rows) == 144
    sizes = set()
    for row in rows:
        config = load_train_config(row.arguments).config
        estimate = estimate_training_memory(config, layout_of(config, row.num_devices, 8))
        assert estimate.total_bytes <= usable_bytes(ACCELERATORS[row.device]), row.name
        sizes.add(count_parameters(config.model))
    assert {64_862_437_376, 29_975_214_080} <= sizes, "as published, with biases"


@pytest.fixture(scope="module")
def rows():
    return read_rows()


def test_rows_that_were_held_out_are_predicted(rows):
    """`docs/measurements/published.md` has the same numbers, by kind."""
    held_out = [row for row in rows if row.published.is_held_out]
    assert len(rows) == 139 and 0.4 < len(held_out) / len(rows) < 0.6
    errors = [row.error() for row in held_out]
    assert median(map(abs, errors)) < 0.03
    for family in FAMILIES:
        low, high = rates.PUBLISHED[family].interval
        own = [row.error() for row in held_out if row.published.device.startswith(family)]
        assert high - low < 0.15 and sum(low <= 1 / (1 + error) <= high for error in own) / len(own) >= 0.88


def test_the_constants_are_the_least_of_their_fit(rows):
    """Each of them, changed by a tenth, fits the other rows 1.5 % worse; the jitter, none or twice as much."""
    fitted = [row for row in rows if not row.published.is_held_out]
    values = {name: float(getattr(rates, name)) for name in FITTED}
    for family in FAMILIES:
        values |= {f"{family}.{kind}": getattr(rates.PUBLISHED[family], kind) for kind in ("products", "attention")}
    least = mean_error(fitted, values)
    for name in values:
        factors = (0, 2) if name == "JITTER" else (0.9, 1.1)
        assert min(mean_error(fitted, values | {name: values[name] * by}) for by in factors) > 1.015 * least, name


def test_newer_rates_are_inside_the_intervals_that_plan_prints():
    for figure in newer_figures():
        found = re.search(r" on (\d+) ([^ ,]+)", figure.about)
        assert found
        low, high = find_hardware(ACCELERATORS[found[2]]).interval(int(found[1]))
        assert low <= figure.published / figure.predicted <= high, figure.about


@pytest.mark.parametrize(
    ("case", "compiled_share", "error"),
    [
        ("125m_sdpa_eager", None, -0.034),
        ("1b_eager_prof", None, -0.016),
        ("125m_sdpa_compiled", 0.70, -0.060),
        ("1b_sdpa_compiled", 0.60, 0.027),
    ],
)
def test_steps_of_one_h100_are_predicted_by_rates_that_they_did_not_fit(monkeypatch, case, compiled_share, error):
    """The errors are those that `rates.MEASURED` states."""
    cases = (ROOT / "benchmarks/results/h100/cases.jsonl").read_text().splitlines()
    measured = {row["name"]: row["median_s"] for row in map(json.loads, cases) if "median_s" in row}
    size = case.partition("_")[0]
    num_samples, microbatch_size = {"1b": (16, 8), "125m": (64, 32)}[size]
    arguments = [f"global_train_batch_size={num_samples}", f"device_train_microbatch_size={microbatch_size}"]
    if compiled_share is None:
        arguments.append("compile_config=null")
    else:
        monkeypatch.setattr(step, "COMPILED_SHARE", compiled_share)
    config = load_train_config([f"mpt-{size}", "h100-8", "max_seq_len=2048", *arguments]).config
    predicted = step.step_time(config, layout_of(config, 1, 1), find_hardware(ACCELERATORS["H100-80GB"]))
    assert measured[case] / predicted.seconds - 1 == pytest.approx(error, abs=6e-4)


@pytest.fixture(scope="module")
def far(rows):
    return list(errors_on_more_devices(rows))


def test_rows_on_few_devices_predict_more_by_the_path_of_a_user_s_report(far):
    """One row of MPT-7B on 8 devices does; half of all rows fitted the constants of any device."""
    assert len(far) == 6 and sum(found["steps"] == 1 for found in far) == 2
    for found in far:
        assert found["rows"] >= 5 and found["median"] < 0.03 and found["within"] >= 0.9, found


def test_a_figure_is_a_hit_a_miss_or_proves_nothing():
    assert Figure("rate", "", 100, 105, "TFLOP/s").verdict == "hit"
    assert Figure("rate", "", 60, 64, "TFLOP/s").verdict == "MISS"
    assert Figure("share", "", 90, 94.9, "%").verdict == "hit"
    assert Figure("rate", "", 60, 60, "TFLOP/s", True).verdict == "fitted"


def test_the_page_has_what_the_benchmark_prints(rows, far):
    page = (ROOT / "docs/measurements/published.md").read_text()
    report = {"errors": list(errors_by_kind(rows)), "papers": list(figures()), "far": far}
    for table in (table_of_errors(report), table_of_far(report), table_of_papers(report)):
        for line in table.markdown():
            assert line in page
