"""Rates, the time that is left, and the seed of a batch's dropout, on ranks that are not there."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from composer.core import Timestamp

from llmfoundry_lite.config.batch_schedule import PerBatch, Steps
from llmfoundry_lite.config.layout import Coordinates, DataRanks
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.training import monitor
from llmfoundry_lite.training.launch_role import LaunchRole
from llmfoundry_lite.training.monitor import DropoutSeed, RunMonitor


def state_at(batch: int, seconds: float = 0.0) -> Any:
    stamp = Timestamp(batch=batch, token=100 * batch)
    wall = SimpleNamespace(total_seconds=lambda: seconds)
    return SimpleNamespace(timestamp=SimpleNamespace(get=stamp.get, batch=batch, token=100 * batch, total_wct=wall))


@pytest.mark.parametrize(
    ("larger_sizes", "remaining_batches"),
    [
        pytest.param({}, 37, id="one size"),
        pytest.param({"80ba": 16}, 17 + 2 * 20, id="the last 20 batches are as much work as 40"),
    ],
)
def test_the_time_that_is_left_is_by_the_pace_of_this_launch(monkeypatch, larger_sizes, remaining_batches):
    """A run that carries on at batch 60 of 100 has trained those in other launches."""
    clock, found = SimpleNamespace(seconds=1000.0), {}
    monkeypatch.setattr(monitor, "time", SimpleNamespace(monotonic=lambda: clock.seconds))
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    logger: Any = SimpleNamespace(log_metrics=found.update)
    batch_sizes = PerBatch.build(8, Steps.parse(larger_sizes))
    run = RunMonitor(2, PerBatch.build(6, None), Duration.parse("100ba"), "fp32", LaunchRole(), batch_sizes)
    run.fit_start(state_at(60, 500.0), logger)
    for batch, seconds in ((61, 502.0), (62, 505.0), (63, 509.0)):
        clock.seconds = 500.0 + seconds
        run.batch_end(state_at(batch, seconds), logger)
    assert found["time/elapsed_seconds"] == 9.0
    assert found["time/remaining_seconds"] == pytest.approx(9.0 / 3 * remaining_batches)
    assert found["time/batch_seconds"] == 4.0
    assert found["throughput/tokens_per_sec"] == pytest.approx(200 / 7)  # of the two batches in the window
    assert found["throughput/device/tokens_per_sec"] == pytest.approx(100 / 7)
    assert found["throughput/device/flops_per_sec"] == pytest.approx(600 / 7)


def seed_of(*, batch: int = 5, rank: int = 1, sequence_parallel: bool = False, **place: int) -> int:
    coordinates = Coordinates(**{**dict.fromkeys(Coordinates._fields, 0), **place})
    ranks = DataRanks(rank=rank, size=2, is_counted=True)
    callback = DropoutSeed(17, SimpleNamespace(), ranks, coordinates, sequence_parallel)  # type: ignore[arg-type]
    callback.batch_start(state_at(batch), None)  # type: ignore[arg-type]
    return torch.initial_seed()


def test_ranks_that_divide_layers_share_a_seed_and_those_with_other_tokens_or_stages_do_not():
    assert seed_of(tensor=1) == seed_of(tensor=0)
    others = [seed_of(), seed_of(batch=6), seed_of(rank=0), seed_of(pipeline=1), seed_of(context=1)]
    others.append(seed_of(tensor=1, sequence_parallel=True))
    assert len(set(others)) == 6
