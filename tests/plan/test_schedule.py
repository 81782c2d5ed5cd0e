"""Pipelines' bubbles: formulas, the same schedules played, and what papers print."""

import pytest

from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.plan.schedule import SCHEDULES, Costs, bubble, simulate_bubble


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_played_waits_as_long_as_its_formula_says(schedule):
    runs = (2, 4) if schedule == "interleaved" else (1,)
    for stages in (1, 2, 4, 8, 16):
        for microbatches in (stages, 2 * stages, 64):
            for virtual in runs:
                played = simulate_bubble(schedule, stages, microbatches, virtual)
                assert played == pytest.approx(bubble(schedule, stages, microbatches, virtual)), (stages, microbatches)


def test_costs_that_are_not_alike_are_played_too():
    costs = Costs(forward=1.0, backward=1.4, weights=0.8)
    for schedule in ("gpipe", "1f1b", "zero_bubble"):
        assert simulate_bubble(schedule, 4, 16, costs=costs) == pytest.approx(bubble(schedule, 4, 16, costs=costs))


def test_frontiers_bubbles():
    """arXiv 2312.12705, figure 6's setting: 32 microbatches."""
    assert [round(bubble("1f1b", stages, 32), 3) for stages in (8, 16, 32)] == [0.219, 0.469, 0.969]


def test_zero_bubble_waits_a_third_as_long():
    assert bubble("zero_bubble", 8, 32) == pytest.approx(bubble("1f1b", 8, 32) / 3)


def test_what_cannot_be_played_is_refused():
    with pytest.raises(ConfigError, match="'dualpipe' is none of gpipe, 1f1b, interleaved, zero_bubble"):
        bubble("dualpipe", 4, 8)
    with pytest.raises(ConfigError, match="10 microbatches are no multiple of 4 stages"):
        bubble("interleaved", 4, 10, 2)
