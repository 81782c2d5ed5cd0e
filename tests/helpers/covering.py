"""Few cases that have every pair of settings: a pairwise-covering set, by a seeded greedy search."""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(case: Mapping[str, Any]) -> set[Pair]:
    return set(itertools.combinations(case.items(), 2))


def all_cases(factors: Mapping[str, Sequence[Any]], is_valid: Callable[[Case], bool]) -> list[Case]:
    cases = (dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values()))
    return [case for case in cases if is_valid(case)]


def cover(factors: Mapping[str, Sequence[Any]], is_valid: Callable[[Case], bool], seed: int) -> list[Case]:
    """Valid cases that together have every pair of two factors' values that any valid case has. The same seed gives
    the same cases; another may give fewer."""
    candidates = all_cases(factors, is_valid)
    random.Random(seed).shuffle(candidates)
    missing = set().union(*map(pairs_of, candidates))
    chosen = []
    while missing:
        best = max(candidates, key=lambda case: len(pairs_of(case) & missing))
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen
