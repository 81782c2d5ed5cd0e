"""What the train benchmark reports of what it has measured."""

import contextlib
import json
import tempfile

import pytest

from benchmarks.__main__ import run_benchmark
from benchmarks.train import growth, train
from llmfoundry_machines.bench import mfu, steps
from tests.helpers.launch import launch


def rows_where(measure, monkeypatch, tmp_path):
    monkeypatch.setattr(growth, "measure_in_a_process", lambda task: {"step_seconds": [measure(task)]})
    report = growth.run("bf16", 1, 1, tmp_path)
    assert json.loads((tmp_path / "growth-bf16.json").read_text())["rows"] == report["rows"]
    assert (tmp_path / "growth-bf16.png").stat().st_size > 10_000
    return report["rows"]


def flops_of(task):
    return growth.count_step_flops(task["shape"], task["seq_len"], task["batch_size"])


def test_a_step_that_is_its_flops_stays_on_the_line(monkeypatch, tmp_path):
    rows = rows_where(lambda task: flops_of(task) / 1e12, monkeypatch, tmp_path)
    assert {row["grows"] for row in rows} == {"parameters", "sequence", "batch"}
    for row in rows:
        assert row["seconds"] == pytest.approx(row["line_seconds"])
        assert growth.explain(row) == ""


def test_off_the_line_it_is_told_what_the_products_have_to_do_with_it(monkeypatch, tmp_path):
    def measure(task):
        """Products at half their rate beyond 1,000 tokens in a sample; of all else a second in each batch."""
        products = flops_of(task) / 1e12 * (2 if task["seq_len"] > 1000 else 1)
        return products if task["side"].startswith("matmul") else products + 1

    rows = rows_where(measure, monkeypatch, tmp_path)
    last = next(row for row in rows if row["grows"] == "sequence" and row["seq_len"] == 2048)
    first = next(row for row in rows if row["grows"] == "sequence")
    times = last["flops"] / first["flops"]
    line = (first["flops"] / 1e12 + 1) * times
    by_products, by_rest = last["flops"] / 1e12 / line, (1 - times) / line
    assert growth.explain(last) == f"{by_products:+.0%} the products' own rate, {by_rest:+.0%} all else"


def test_utilisation_is_held_against_the_products_of_the_same_shapes(monkeypatch, tmp_path):
    def measure(turns, number, left_seconds):
        task = turns._tasks[number]
        assert 0 < left_seconds <= 60
        if task["side"].startswith("plain"):
            raise RuntimeError("plain bf16: CUDA out of memory.")
        seconds = flops_of(task) / (1e13 if task["side"].startswith("trainer") else 2e13)
        flops = {"flops": flops_of(task)} if task["side"].startswith("matmul") else {}
        return {"step_seconds": [seconds], "peak_bytes": 1 << 30, "microbatch_size": 2, **flops}

    monkeypatch.setattr(mfu.Turns, "measure", measure)
    report = mfu.run(["tiny", "10m"], 64, 8, 1, minutes=1, out=tmp_path)
    cells = mfu.build_table(report).rows
    assert [row[0] for row in cells] == ["tiny"] * (len(cells) // 2) + ["10m"] * (len(cells) // 2)
    assert {row[mfu.build_table(report).columns.index("of its products")] for row in cells} == {"", "50.0%"}
    assert f"{mfu.PLAIN}: plain bf16: CUDA out of memory." in [row[1] for row in cells]
    assert "| tiny | matrix products |" in (tmp_path / "mfu.md").read_text()
    assert mfu.run(["tiny"], 64, 8, 1, minutes=0)["left_out"] == [f"tiny, {name}" for name in mfu.variants()]


def measure_in(folder: str) -> None:
    tempfile.TemporaryDirectory = lambda: contextlib.nullcontext(folder)  # type: ignore[assignment, misc]
    task = {"shape": "tiny", "seq_len": 32, "batch_size": 2, "num_steps": 1}
    print(len(steps.measure_trainer(task, "fp32", lambda stage: None)["step_seconds"]))


@pytest.mark.multiprocess
def test_a_run_that_is_measured_saves_nothing(tmp_path):
    assert launch(measure_in, (str(tmp_path),), tmp_path).check().output.splitlines()[-1] == "1"
    assert (tmp_path / "run/metrics.jsonl").is_file() and not list(tmp_path.rglob("*.safetensors"))


def test_products_of_a_gpu_are_enqueued_between_events_and_waited_for_once(monkeypatch):
    done = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            done.append("event")

        def synchronize(self):
            done.append("waits")

        def elapsed_time(self, other):
            return 2000.0

    monkeypatch.setattr(steps, "device_type", lambda: "cuda")
    monkeypatch.setattr("torch.cuda.Event", Event)
    assert steps.time_calls(lambda: done.append("product"), 2) == [2.0, 2.0]
    assert done == ["event", "product", "event", "product", "event", "waits"]


@pytest.mark.long
def test_all_sides_are_measured_and_written_down(tmp_path):
    options = ["--shape", "tiny", "--seq-len", "32", "--num-steps", "1", "--num-rounds", "1"]
    assert run_benchmark(["train", *options, "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "train-tiny-32.json").read_text())
    assert list(report["sides"]) == [
        f"{side} {dtype}" for dtype in ("fp32", "bf16") for side in ("matmul", "plain", "bare", "trainer")
    ]
    assert all(side["step_seconds"] > 0 for side in report["sides"].values())
    text = (tmp_path / "train-tiny-32.md").read_text()
    assert all(line in text for line in train.notes_of(report))
