"""The papers' own benchmarks: ALCF's on this machine, Frontier's by the planner."""

import json

import pytest

from benchmarks.__main__ import run_benchmark
from benchmarks.papers import alcf, frontier
from llmfoundry_lite.errors import DataError


class Launched:
    """A launch that takes 1 s for its start and 1 s for each sample of a device, 2 on several devices."""

    def __init__(self, num_devices: int, settings: dict, dtype: str):
        self.seconds = 1 + settings["batch_size"] / num_devices * min(num_devices, 2)


def test_batches_accumulation_and_devices_are_each_held_against_their_first(tmp_path, monkeypatch, capsys):
    launched = []

    def launch(num_devices, settings, dtype):
        launched.append((num_devices, settings["batch_size"], dtype, *settings["overrides"]))
        return Launched(num_devices, settings, dtype)

    monkeypatch.setattr(alcf, "launch", launch)
    options = "--shape tiny --seq-len 64 --num-steps 1 --num-rounds 1 --batches 1,4 --dtypes fp32,bf16"
    options += " --accumulations 1,4 --devices 1,2"
    assert run_benchmark(["alcf", *options.split(), "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith(f"\nwritten: {tmp_path}\n")
    rows = json.loads((tmp_path / "alcf.json").read_text())["rows"]
    found = [(row["part"], row["dtype"], row["num_devices"], row["samples"], round(row["gain"], 3)) for row in rows]
    assert found == [
        *(("batch size", dtype, 1, size, gain) for dtype in ("fp32", "bf16") for size, gain in ((1, 1), (4, 1.6))),
        ("accumulation", "bf16", 2, 1, 1),
        ("accumulation", "bf16", 2, 4, 1.333),
        ("scaling", "bf16", 1, 1, 1),
        ("scaling", "bf16", 2, 1, 1.333),
    ]
    assert rows[-1]["efficiency"] == pytest.approx(2 / 3)
    # A microbatch stays one sample, and what two parts share is launched once.
    assert (2, 8, "bf16", "device_train_microbatch_size=1") in launched
    assert (1, 4, "bf16", "device_train_microbatch_size=4") in launched
    assert len(launched) == len(set(launched)) == 6
    assert f"`python -m benchmarks alcf {options}`" in (tmp_path / "alcf.md").read_text()
    assert (tmp_path / "alcf.png").stat().st_size > 10_000


def test_a_launch_that_fails_is_named(monkeypatch):
    def fail(*arguments):
        raise RuntimeError("exit code 2\nout of memory")

    monkeypatch.setattr(alcf, "launch", fail)
    words = "^alcf: fp32, 1 devices x 2 samples in 1 microbatches: out of memory; "
    with pytest.raises(DataError, match=words):
        alcf.run("tiny", 64, [2], ["fp32"], [1], [1])


def test_frontiers_runs_stand_beside_what_was_published(tmp_path):
    report = frontier.run(tmp_path)
    rates = {row["model"]: row for row in report["models"]}
    # The paper counts nominal parameters: 0.308, 2.45 and 14 TB.
    assert [round(row["state_tb"], 2) for row in rates.values()] == [0.31, 2.44, 14.11]
    # Strong scaling: each count of devices leaves less of the first one's rate.
    for model in frontier.COUNTS:
        left = [row["left"] for row in report["scaling"] if row["model"] == model]
        assert left[0] == 1 and left == sorted(left, reverse=True) and left[-1] < left[0]
    assert report["scaling"][-1]["batch_size"] == 7998  # six copies do not divide 8,000
    assert (tmp_path / "frontier.png").stat().st_size > 10_000
