"""Saves, failures, budgets and second clusters, beside formulas and published figures."""

import random

import pytest

from llmfoundry_lite.checkpoint.save_interval import suggest_save_interval
from llmfoundry_planner.plan.cost import compute_optimal, cost_of, lost_share
from llmfoundry_planner.plan.network import find_node


def test_the_interval_loses_least():
    for save, between in ((0.5, 3600.0), (30.0, 7200.0), (300.0, 3600.0)):
        every = suggest_save_interval(save, between)
        least = lost_share(every, save, between, 300)
        tried = [lost_share(every * factor, save, between, 300) for factor in (0.5, 0.9, 1.1, 2.0)]
        assert all(least < other for other in tried)
    assert suggest_save_interval(1.0, 1e12) > 1e6 and lost_share(1e6, 1.0, 1e12, 300) < 1e-5
    assert suggest_save_interval(10.0, 4.0) == 4.0


def test_the_lost_share_is_what_a_simulated_run_loses():
    """Failures at random times, in training, saves and restarts; a long run's share of lost time."""
    every, save, between, restart = 600.0, 20.0, 5000.0, 100.0
    draw = random.Random(1)
    clock, trained = 0.0, 0.0
    failure = draw.expovariate(1 / between)
    while trained < 4e6:
        if clock + every + save <= failure:
            clock, trained = clock + every + save, trained + every
            continue
        clock = failure
        failure += draw.expovariate(1 / between)
        while clock + restart > failure:  # a failure while restarting
            clock, failure = failure, failure + draw.expovariate(1 / between)
        clock += restart
    assert 1 - trained / clock == pytest.approx(lost_share(every, save, between, restart), abs=0.01)


def test_a_budget_is_spent_as_hoffmann_says():
    """Chinchilla: 70 billion parameters, 1.4 trillion tokens, 5.88e23 FLOPs."""
    num_parameters, num_tokens = compute_optimal(6 * 70e9 * 1.4e12)
    assert (num_parameters, num_tokens) == (pytest.approx(70e9), pytest.approx(1.4e12))


def test_days_energy_and_money():
    cost = cost_of(8.64e12 / 2, 1e6, 1000, find_node("H100-80GB"), dollars_per_device_hour=2.0, save_seconds=1.0)
    assert cost.days == pytest.approx(50 / (1 - cost.lost_share))
    assert cost.device_hours == pytest.approx(cost.days * 24 * 1000)
    assert cost.dollars == pytest.approx(2 * cost.device_hours)
    assert cost.energy_kwh == pytest.approx(cost.device_hours * 10.2 / 8)
    assert cost.hours_between_failures == 50
    assert 0 < cost.lost_share < 0.02
