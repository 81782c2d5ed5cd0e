"""Pipelines' bubbles: formulas, the same schedules played, and what papers print."""

import pytest

from llmfoundry_lite.errors import ConfigError
from llmfoundry_planner.plan.bubble import SCHEDULES, simulate_bubble


def bubble(schedule: str, num_stages: int, num_microbatches: int, virtual_stages: int = 1) -> float:
    """Return the time that a device waits over the time that it computes, by the formulas of the module."""
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


def test_what_cannot_be_played_is_refused():
    with pytest.raises(ConfigError, match="'dualpipe' is none of gpipe, 1f1b, interleaved, zero_bubble"):
        simulate_bubble("dualpipe", 4, 8)
