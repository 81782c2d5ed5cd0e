"""Pipelines' bubbles: formulas, the same schedules played, and what papers print."""

import re
from functools import partial
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

from llmfoundry_lite.config.schema import PipelineConfig
from llmfoundry_lite.config.stages import takes_microbatches
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.estimate.schedule import SCHEDULES, order_of, simulate_bubble
from llmfoundry_lite.parallel.pipeline import SCHEDULES as SCHEDULE_OF_TORCH


def bubble(schedule: str, num_stages: int, num_microbatches: int, virtual_stages: int = 1) -> float:
    """Time that a device waits over time that it computes, by the formulas of the module."""
    share = (num_stages - 1) / num_microbatches
    return share / {"interleaved": virtual_stages, "zero_bubble": 3}.get(schedule, 1)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_a_schedule_played_waits_as_long_as_its_formula_says(schedule):
    runs = (2, 4) if schedule == "interleaved" else (1,)
    for stages in (1, 2, 4, 8, 16):
        for microbatches in (stages, 2 * stages, 64):
            for virtual in runs:
                played = simulate_bubble(schedule, stages, microbatches, virtual)
                assert played == pytest.approx(bubble(schedule, stages, microbatches, virtual)), stages


def test_zero_bubble_waits_half_as_long_with_two_runs_of_blocks_on_each_device():
    assert simulate_bubble("zero_bubble", 4, 16, 2) == pytest.approx(bubble("zero_bubble", 4, 16) / 2)
    late = [1.0] * 4 + [3.0] * 4  # the second runs of all devices
    assert simulate_bubble("zero_bubble", 4, 16, 2, loads=late) > simulate_bubble("zero_bubble", 4, 16, 2)


def test_zbv_waits_half_as_long_as_zero_bubble():
    """Qi et al. 2024, "Pipeline Parallelism with Controllable Memory": from 2p - 1 microbatches on."""
    assert simulate_bubble("zbv", 8, 32, 2) == pytest.approx(bubble("zero_bubble", 8, 32) / 2)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("uneven", [False, True])
def test_a_few_rounds_tell_what_all_of_them_wait(schedule, uneven):
    virtual = 2 if schedule in ("interleaved", "zbv") else 1
    loads = [0.5 + 0.25 * run for run in range(4 * virtual)] if uneven else None
    whole = simulate_bubble(schedule, 4, 96, virtual, loads=loads)
    few = simulate_bubble(schedule, 4, 96, virtual, loads=loads, in_few_rounds=True)
    assert few == pytest.approx(whole, rel=0.01)


@pytest.mark.parametrize(
    ("schedule", "loads"),
    [
        ("zero_bubble", (1, 3, 1.5, 3, 1, 0.5, 3, 1.5)),
        ("interleaved", (1, 1, 3, 0.5, 3, 2, 1, 2)),
        ("zbv", (0.5, 1.5, 1, 1, 3, 1, 1, 2)),
    ],
)
def test_uneven_runs_wait_in_every_round_and_a_few_tell_how_long(schedule, loads):
    for microbatches in (16, 48, 96):
        whole = simulate_bubble(schedule, 4, microbatches, 2, loads=loads)
        few = simulate_bubble(schedule, 4, microbatches, 2, loads=loads, in_few_rounds=True)
        assert few == pytest.approx(whole, rel=1e-6)


def test_the_stage_that_computes_the_longest_waits_for_the_others():
    """1F1B: two stages of 1, one of 2: the last waits for the first microbatch's way to it and back."""
    assert simulate_bubble("1f1b", 3, 8, loads=[1, 1, 2]) == pytest.approx(2 / 16)


def test_frontiers_bubbles():
    """arXiv 2312.12705, figure 6's setting: 32 microbatches."""
    assert [round(simulate_bubble("1f1b", stages, 32), 3) for stages in (8, 16, 32)] == [0.219, 0.469, 0.969]


@pytest.mark.parametrize(
    ("schedule", "num_runs"), [("interleaved", 3), ("zero_bubble", 1), ("zero_bubble", 2), ("zbv", 2)]
)
def test_devices_do_what_they_do_in_torchs_schedules(schedule, num_runs):
    """Of gpipe and 1f1b torch has no list; each is a line or two."""
    for num_stages in (2, 3, 4):
        pipeline = PipelineConfig(pipeline_parallel_degree=num_stages, schedule=schedule, virtual_stages=num_runs)
        for num_microbatches in filter(partial(takes_microbatches, pipeline), range(num_stages, 4 * num_stages)):
            for rank in range(num_stages):
                theirs = order_of_torch(schedule, rank, num_stages, num_microbatches, num_runs)
                ours = order_of(schedule, rank, num_stages, num_microbatches, num_runs)
                assert [(one.kind, one.run, one.microbatch) for one in ours] == theirs


def order_of_torch(schedule, rank, num_stages, num_microbatches, num_runs) -> list[tuple[str, int, int]]:
    dist.init_process_group("fake", rank=rank, world_size=num_stages, store=dist.HashStore())
    runs = [rank, 2 * num_stages - 1 - rank] if schedule == "zbv" else range(rank, num_stages * num_runs, num_stages)
    try:
        stages = [PipelineStage(torch.nn.Identity(), run, num_stages * num_runs, torch.device("cpu")) for run in runs]
        made = SCHEDULE_OF_TORCH[schedule](stages, num_microbatches, loss_fn=torch.nn.functional.l1_loss)
    finally:
        dist.destroy_process_group()
    kinds = {"I": "B"}  # the gradient of the inputs alone
    actions = (re.fullmatch(r"(\d+)([FIBW])(\d+)", str(action)) for action in made.pipeline_order[rank] if action)
    return [(kinds.get(found[2], found[2]), int(found[1]), int(found[3])) for found in actions if found]


@pytest.mark.parametrize(
    ("schedule", "num_runs", "expected"),
    [
        *(("gpipe", 1, [8, 8, 8, 8]), ("1f1b", 1, [4, 3, 2, 1]), ("interleaved", 2, [11, 9, 7, 5])),
        *(("zero_bubble", 1, [4, 4, 4, 4]), ("zbv", 2, [8, 8, 8, 8])),
    ],
)
def test_so_many_microbatches_are_kept_until_their_last_pass(schedule, num_runs, expected):
    """Counted in runs of blocks, of which zbv and interleaved have two on each device."""
    last = "W" if schedule in ("zero_bubble", "zbv") else "B"
    kept = [
        list(accumulate((one.kind == "F") - (one.kind == last) for one in order_of(schedule, rank, 4, 8, num_runs)))
        for rank in range(4)
    ]
    assert [max(counts) for counts in kept] == expected


def test_what_cannot_be_played_is_refused():
    with pytest.raises(ConfigError, match="'dualpipe' is none of gpipe, 1f1b, interleaved, zero_bubble"):
        simulate_bubble("dualpipe", 4, 8)
