"""Shares of the sum over islands, beside every other division of a coarse grid."""

import itertools
import random

import pytest

from llmfoundry_islands.coordination.owners import PARTS, busy_seconds, divide_rows, divide_sum, sent_gradients

STEP = 4


def every_division(names):
    for cuts in itertools.product(range(0, PARTS + 1, STEP), repeat=len(names) - 1):
        if sum(cuts) <= PARTS:
            yield dict(zip(names, (*cuts, PARTS - sum(cuts)), strict=True))


@pytest.mark.parametrize("seed", range(30))
def test_no_division_is_faster_on_the_slowest_link(seed):
    chance = random.Random(seed)
    names = "abcd"[: chance.choice((3, 4))]
    rates = {name: 10 ** chance.uniform(-1, 1.5) for name in names}
    best = min(busy_seconds(shares, rates) for shares in every_division(names))
    shares = divide_sum(rates)
    assert sum(shares.values()) == PARTS and min(shares.values()) >= 0
    assert busy_seconds(shares, rates) <= best * (1 + 1 / PARTS)


def test_equal_links_reach_the_bound_of_all_reduce():
    rates = dict.fromkeys("abcd", 1.0)
    assert busy_seconds(divide_sum(rates), rates) == 2 * 3 / 4
    assert [sent_gradients({}, "a", count) for count in (2, 3, 4)] == [1, 2, 3], "all to all"


def test_an_island_on_a_slow_link_owns_nothing_and_sends_its_gradient_once():
    rates = {"a": 10.0, "b": 10.0, "slow": 1.0}
    shares = divide_sum(rates)
    assert shares["slow"] == 0 and sent_gradients(shares, "slow", 3) == 1
    assert busy_seconds(shares, rates) == 1.0


def test_two_islands_swap():
    assert divide_sum({"a": 1.0, "b": 2.0}) == {}


@pytest.mark.parametrize("num_rows", [0, 1, 5, 64, 50368])
def test_every_row_has_one_owner(num_rows):
    found = divide_rows(range(3, 3 + num_rows), {"a": 21, "b": 0, "c": 43})
    assert [row for rows in found.values() for row in rows] == list(range(3, 3 + num_rows))
    assert len(found["b"]) == 0
