import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.__main__ import run_benchmark
from benchmarks.checkpoint import checkpoint as bench
from benchmarks.checkpoint.meters import drop_from_cache, resident_pages
from benchmarks.checkpoint.plan import run as walk
from benchmarks.checkpoint.report import (
    ASYNC_SAVE,
    OURS,
    SIDES,
    judge,
    table_of_growth,
    table_of_intervals,
    table_of_targets,
)
from llmfoundry_lite.errors import DataError, UserError
from tests.helpers.launch import ROOT


def report_with(**changes: Any) -> dict[str, Any]:
    """A report in which ours meets every target, but for `changes` in its warm round."""
    side = {"stall_seconds": 1.0, "durable_seconds": 6.0, "extra_bytes": 1000}
    found: dict[str, Any] = {
        **{name: dict(side) for name in SIDES},
        "copy_seconds": 0.8,
        "write_seconds": 5.0,
        "read_seconds": 1.0,
        "load_verified_seconds": 1.2,
        "load_unverified_seconds": 1.0,
    }
    warm = {**found, **changes}
    return {"parameters": 10, "rounds": [found, warm], "local_bytes": [1000, 990], "resident_after_drop": 0.0}


def missed(**changes: Any) -> list[int]:
    return [i for i, row in enumerate(judge(report_with(**changes))) if not row["met"]]


def test_each_target_is_judged_by_its_own_numbers() -> None:
    ours = {"stall_seconds": 1.0, "durable_seconds": 6.0, "extra_bytes": 1000}
    assert missed() == []
    assert missed(copy_seconds=0.7) == [0]
    assert missed(**{ASYNC_SAVE: {**ours, "stall_seconds": 0.9}}) == [1]
    assert missed(**{OURS: {**ours, "durable_seconds": 7.0}}) == [3]
    assert missed(**{OURS: {**ours, "durable_seconds": 8.0}}) == [2, 3]
    assert missed(load_verified_seconds=1.4) == [4]
    assert missed(**{OURS: {**ours, "extra_bytes": 1100}}) == [5]


def test_a_missed_target_is_said_in_the_table() -> None:
    report = report_with(copy_seconds=0.25)
    report["targets"] = judge(report)
    rows = table_of_targets(report).rows
    assert rows[0] == ["stall / copying the local state in memory", "4.00", "<= 1.3", "MISSED"]
    assert {row[3] for row in rows[1:]} == {"met"}


def test_a_size_without_memory_for_it_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "available_bytes", lambda: 5 << 30)
    assert bench._missing_memory("10m") is None
    reason = bench._missing_memory("350m")
    assert reason == "needs about 12 GiB of memory, 5 are available"
    rows = table_of_growth({"growth": {"350m": {"left_out": reason}}}).rows
    assert rows[0][:2] == ["350m", f"left out: {reason}"]


def test_sizes_are_what_their_names_say() -> None:
    millions = {
        size: bench.size_bytes(size) / bench.BYTES_PER_PARAMETER / 1e6 for size in ("10m", "40m", "125m", "350m")
    }
    assert all(abs(found / int(size[:-1]) - 1) < 0.03 for size, found in millions.items()), millions


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sizes": ("10m", "11m")}, "--sizes: '11m' given, expected one of tiny, 10m, 40m, 125m, 350m"),
        ({"folder": Path("/proc/bench")}, "--folder: /proc/bench cannot be written"),
        ({"out": Path("/proc/bench")}, "--out: /proc/bench cannot be written"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(tmp_path: Path, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        bench.run(**{"num_rounds": 1, "sizes": ("tiny",), "out": None, "folder": tmp_path, "quick": False, **arguments})


def test_a_disk_that_is_too_small_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 1 << 30}))
    with pytest.raises(UserError, match=r"has 1\.0 GiB free and 8\.0 are needed"):
        bench.run(num_rounds=1, sizes=("350m",), out=None, folder=tmp_path, quick=False)


def test_a_save_after_every_batch_is_judged_where_batches_are_long_and_elsewhere_the_interval_is_named() -> None:
    """Blocks of three batches, two of them followed by a save. The larger of time lost and processor time counts."""
    report = {
        "batches": {
            "24 x 512": [
                {"plain": 90.0, "saving": 90.9, "processor": 0.4},
                {"plain": 96.0, "saving": 97.4, "processor": 0.3},
                {"plain": 93.0, "saving": 94.0, "processor": 0.2},
            ],
            "4 x 512": [{"plain": 15.0, "saving": 14.0, "processor": 0.25}],
        }
    }
    long, short = table_of_intervals(report).rows
    assert long[1:5] == ["31.00", "0.45 / 0.50", "0.20 / 0.30", "1.6%"] and long[6:] == ["met", "1ba"]
    assert short[1:5] == ["5.00", "-0.50 / -0.50", "0.25 / 0.25", "5.0%"] and short[6:] == ["not judged", "3ba"]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_files_are_dropped_from_the_page_cache_and_this_is_seen(tmp_path: Path, alone: None) -> None:
    path = tmp_path / "saved" / "file"
    path.parent.mkdir()
    with path.open("wb") as file:
        file.write(os.urandom(1 << 20))
        file.flush()
        assert all(resident_pages(path))
        os.fsync(file.fileno())
    if drop_from_cache(path.parent) == 1.0:
        pytest.skip("this file system keeps its files in memory")
    assert not any(resident_pages(path))


MEMORY = """
from benchmarks.checkpoint.meters import Memory
memory, kept = Memory(0), []
for _ in range(2):
    with memory.watched():
        if not kept:
            kept.append(b"\\1" * (64 << 20))
        passing = b"\\1" * (32 << 20)
        del passing
    print(memory.extra_bytes >> 20)
"""


@pytest.mark.slow
def test_memory_counts_what_is_kept_and_what_was_needed_for_a_moment() -> None:
    """In a process of its own: one that has run many tests has memory to spare that nobody sees it take."""
    result = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert all(90 < int(mebibytes) < 110 for mebibytes in result.stdout.split()), result.stdout


@pytest.mark.long
@pytest.mark.multiprocess
def test_a_rank_that_fails_ends_the_measurement_with_its_words(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a rank failed: KeyError: 'no such size'"):
        bench._measure_on_ranks("growth", "no such size", 1, str(tmp_path))
    assert not list(tmp_path.iterdir())


def die_on_the_second() -> None:
    if dist.get_rank():
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_rank_that_is_killed_has_no_words_and_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "partial", lambda *arguments: die_on_the_second)
    with pytest.raises(DataError, match="process 1 terminated with signal SIGKILL; Linux does so where memory runs"):
        bench._measure_on_ranks("growth", "tiny", 1, "")


@pytest.mark.long
@pytest.mark.multiprocess
def test_all_sides_are_measured_and_nothing_is_left_behind(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder, out = tmp_path / "disk", tmp_path / "out"
    options = ["--quick", "--num-rounds", "1", "--folder", str(folder), "--out", str(out)]
    assert run_benchmark(["checkpoint", *options]) == 0
    printed = capfd.readouterr().out
    assert "round 1 of 1: ours " in printed and "262,464 parameters" in printed
    report = json.loads((out / "checkpoint.json").read_text())
    assert all(one[side]["durable_seconds"] >= one[side]["stall_seconds"] for one in report["rounds"] for side in SIDES)
    assert sum(report["local_bytes"]) == bench.size_bytes("tiny")
    assert "| ours |" in (out / "checkpoint.md").read_text()
    assert not list(folder.iterdir())


@pytest.mark.parametrize("sharding", ["FULL_SHARD", "HYBRID_SHARD"])
def test_a_large_run_is_walked_by_one_process_that_plays_all_ranks(
    tmp_path: Path, sharding: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "yamls/pretrain/mpt-125m.yaml").read_text()
    for name, value in {"d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 512}.items():
        text = re.sub(rf"(?m)^  {name}: \d+", f"  {name}: {value}", text)
    (tmp_path / "tiny.yaml").write_text(text)
    work, out = tmp_path / "work", tmp_path / "out"
    report = walk(plan=tmp_path / "tiny.yaml", num_ranks=16, sharding=sharding, folder=work, out=out)
    figures = report["figures"]
    assert figures["state"] >= report["parameters"] * 12 / 1e6
    assert figures["requests of a save, beside one a file"] <= 10
    assert 0 < figures["manifest"] < 0.02
    assert "tiny on 16 ranks" in capsys.readouterr().out
    written = json.loads((out / "checkpoint-plan.json").read_text())
    assert {key: written[key] for key in report} == report
    assert list(work.iterdir()) == []
