"""What the train benchmark reports of what it has measured."""

import contextlib
import json
import tempfile

import pytest

from benchmarks.__main__ import run_benchmark
from benchmarks.train import growth, train
from llmfoundry_lite.hardware import PRODUCTS
from llmfoundry_machines.bench import mfu, steps
from tests.helpers.launch import launch


def flops_of(task):
    """The model FLOPs of a step of this task."""
    return growth.count_step_flops(task["shape"], task["seq_len"], task["batch_size"])


# ------------------------------------------------------------------------------------------------- growth of a step

FLOPS_PER_SECOND = 1e12


def run_growth(seconds_of, out):
    """Run the benchmark of growth, where a step of a task takes `seconds_of(task)`, and return the report."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(growth, "measure_in_a_process", lambda task: {"step_seconds": [seconds_of(task)]})
        return growth.run(dtype="bf16", num_steps=1, num_rounds=1, out=out)


@pytest.fixture(scope="module")
def folder_of_line(tmp_path_factory):
    return tmp_path_factory.mktemp("line")


@pytest.fixture(scope="module")
def report_of_line(folder_of_line):
    """The report where each step takes as long as its FLOPs. Its files are in `folder_of_line`."""
    return run_growth(lambda task: flops_of(task) / FLOPS_PER_SECOND, folder_of_line)


def test_a_step_that_is_its_flops_stays_on_the_line(report_of_line):
    for row in report_of_line["rows"]:
        assert row["seconds"] == pytest.approx(row["line_seconds"])
        assert growth.explain(row) == ""


def test_parameters_sequence_and_batch_grow(report_of_line):
    assert {row["grows"] for row in report_of_line["rows"]} == {"parameters", "sequence", "batch"}


def test_the_growth_of_a_step_is_written_down_and_drawn(report_of_line, folder_of_line):
    written = json.loads((folder_of_line / "growth-bf16.json").read_text())
    assert written["rows"] == report_of_line["rows"]
    assert (folder_of_line / "growth-bf16.png").stat().st_size > 10_000


def seconds_of_slow_products(task):
    """Products at half their rate beyond 1,000 tokens in a sample; all else takes a second in each batch."""
    products_seconds = flops_of(task) / FLOPS_PER_SECOND
    if task["seq_len"] > 1000:
        products_seconds *= 2
    if task["side"].startswith("matmul"):
        return products_seconds
    return products_seconds + 1


def test_off_the_line_it_is_told_what_the_products_have_to_do_with_it(tmp_path):
    report = run_growth(seconds_of_slow_products, tmp_path)
    first, *_, last = [row for row in report["rows"] if row["grows"] == "sequence"]
    assert last["seq_len"] == 2048
    growth_of_flops = last["flops"] / first["flops"]

    # On the line, the products would keep their rate, and the second of all else would grow with them.
    products_seconds_on_line = last["flops"] / FLOPS_PER_SECOND
    line_seconds = products_seconds_on_line + 1 * growth_of_flops
    # The products take twice what they would on the line, and all else still a second.
    by_products = (2 * products_seconds_on_line - products_seconds_on_line) / line_seconds
    by_rest = (1 - growth_of_flops) / line_seconds
    assert growth.explain(last) == f"{by_products:+.0%} the products' own rate, {by_rest:+.0%} all else"


# -------------------------------------------------------------------------------------------------- utilisation

SETTINGS_OF_MFU = {"seq_len": 64, "batch_size": 8, "num_steps": 1}
OUT_OF_MEMORY = "plain bf16: CUDA out of memory."


def measure_without_a_device(turns, index, left_seconds):
    """In the place of `Turns.measure`: the Trainer has half the rate of the products, and the plain model fails."""
    assert 0 < left_seconds <= 60
    task = turns._tasks[index]
    side, _ = task["side"].split()
    if side == "plain":
        raise RuntimeError(OUT_OF_MEMORY)

    flops_per_second = {"trainer": 1e13, "matmul": 2e13}[side]
    measurements = {
        "step_seconds": [flops_of(task) / flops_per_second],
        "peak_bytes": 1 << 30,
        "microbatch_size": 2,
    }
    if side == "matmul":
        measurements["flops"] = flops_of(task)
    return measurements


@pytest.fixture(scope="module")
def folder_of_mfu(tmp_path_factory):
    return tmp_path_factory.mktemp("mfu")


@pytest.fixture(scope="module")
def mfu_columns(folder_of_mfu):
    """The table of the shapes tiny and 10m: heading -> the cells below it. Its file is in `folder_of_mfu`."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(mfu.Turns, "measure", measure_without_a_device)
        report = mfu.run(["tiny", "10m"], **SETTINGS_OF_MFU, minutes=1, out=folder_of_mfu)
    table = mfu.build_table(report)
    return {heading: [row[i] for row in table.rows] for i, heading in enumerate(table.columns)}


def test_all_steps_of_a_shape_stand_together(mfu_columns):
    num_steps_of_shape = len(mfu.variants())
    assert mfu_columns["model"] == ["tiny"] * num_steps_of_shape + ["10m"] * num_steps_of_shape


def test_utilisation_is_held_against_the_products_of_the_same_shapes(mfu_columns):
    shares_of_trainer = set()
    other_shares = set()
    for step, share in zip(mfu_columns["step"], mfu_columns["of its products"], strict=True):
        if step == PRODUCTS or step.startswith(mfu.PLAIN):
            other_shares.add(share)
        else:
            shares_of_trainer.add(share)
    assert shares_of_trainer == {"50.0%"}
    assert other_shares == {""}


def test_a_step_that_fails_has_its_error_in_its_row(mfu_columns):
    assert f"{mfu.PLAIN}: {OUT_OF_MEMORY}" in mfu_columns["step"]


@pytest.mark.usefixtures("mfu_columns")
def test_utilisation_is_written_down(folder_of_mfu):
    assert "| tiny | matrix products |" in (folder_of_mfu / "mfu.md").read_text()


def test_steps_without_time_are_named_as_left_out():
    report = mfu.run(["tiny"], **SETTINGS_OF_MFU, minutes=0)
    assert report["left_out"] == [f"tiny, {variant}" for variant in mfu.variants()]


# -------------------------------------------------------------------------------------------- measurements themselves


def measure_trainer_in(folder: str) -> None:
    """Measure one step of the Trainer, with its files in `folder` rather than a temporary one. Print the steps."""
    tempfile.TemporaryDirectory = lambda: contextlib.nullcontext(folder)  # type: ignore[assignment, misc]
    settings = {"shape": "tiny", "seq_len": 32, "batch_size": 2, "num_steps": 1}
    measurements = steps.measure_trainer(settings, "fp32", lambda stage: None)
    print(len(measurements["step_seconds"]))


@pytest.mark.multiprocess
def test_a_run_that_is_measured_saves_nothing(tmp_path):
    """It has logged, but it has no checkpoint."""
    launched = launch(measure_trainer_in, (str(tmp_path),), tmp_path).check()
    assert launched.output.splitlines()[-1] == "1"
    assert (tmp_path / "run/metrics.jsonl").is_file()
    assert list(tmp_path.rglob("*.safetensors")) == []


def test_products_of_a_gpu_are_enqueued_between_events_and_waited_for_once(monkeypatch):
    calls = []

    class Event:
        """In the place of torch.cuda.Event. Any two are 2,000 milliseconds apart."""

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            calls.append("event")

        def synchronize(self):
            calls.append("waits")

        def elapsed_time(self, other):
            return 2000.0

    monkeypatch.setattr(steps, "device_type", lambda: "cuda")
    monkeypatch.setattr("torch.cuda.Event", Event)
    seconds = steps.time_calls(lambda: calls.append("product"), 2)
    assert calls == ["event", "product", "event", "product", "event", "waits"]
    assert seconds == [2.0, 2.0]


@pytest.mark.long
def test_all_sides_are_measured_and_written_down(tmp_path):
    options = ["--shape", "tiny", "--seq-len", "32", "--num-steps", "1", "--num-rounds", "1"]
    assert run_benchmark(["train", *options, "--out", str(tmp_path)]) == 0

    report = json.loads((tmp_path / "train-tiny-32.json").read_text())
    assert list(report["sides"]) == [
        "matmul fp32",
        "plain fp32",
        "bare fp32",
        "trainer fp32",
        "matmul bf16",
        "plain bf16",
        "bare bf16",
        "trainer bf16",
    ]
    for name, side in report["sides"].items():
        assert side["step_seconds"] > 0, name
    text = (tmp_path / "train-tiny-32.md").read_text()
    for note in train.notes_of(report):
        assert note in text
