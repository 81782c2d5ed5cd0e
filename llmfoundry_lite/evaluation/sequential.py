"""Group-sequential comparison: items in random order, until the difference to a stored result is decided.

The order is a function of seed and item, the same for every model. Items of a cluster, and windows of a document, are
asked together.

At each look the p of `compare` is held against a group-sequential boundary. The interval is the repeated confidence
interval (Jennison and Turnbull, Journal of the Royal Statistical Society B 51, 1989): what the boundary of that look
would not reject. It holds at all looks together, whatever made the asking stop. With a `margin`, asking also stops when
that interval lies within it: then the difference is no larger.

The boundaries are Lan and DeMets's (Biometrika 70, 1983), which neither scipy nor statsmodels has: a function says how
much of the error is spent by the time a share t of the information is there. The boundary at a look is where exactly
what is spent by then has been crossed, given that nothing was crossed before. That chance is Armitage, McPherson and
Rowe's recursion (Journal of the Royal Statistical Society A 132, 1969): the density of a sum that is still inside,
carried from look to look, here on Gauss-Legendre nodes. Boundaries are two-sided and symmetric.

Legend: i nodes of the look before, j of this one.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from statistics import NormalDist
from typing import Self

import numpy as np

from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.records import BITS, Record
from llmfoundry_lite.evaluation.results import Results
from llmfoundry_lite.evaluation.significance import MIN_DOCUMENTS, MIN_UNITS

OBRIEN_FLEMING, POCOCK = "obrien_fleming", "pocock"
SPENDING: dict[str, Callable[[float, float], float]] = {
    # next to nothing at first, and nearly a single test's boundary at the end
    OBRIEN_FLEMING: lambda share, level: 2 * math.erfc(-NormalDist().inv_cdf(level / 4) / math.sqrt(2 * share)),
    # nearly the same boundary at every look
    POCOCK: lambda share, level: level * math.log(1 + (math.e - 1) * share),
}
"""(share of the information, level) -> what of the level is spent."""
NUM_NODES = 96
"""Enough for 20 looks at any level: more change no boundary by 1e-12."""
MAX_DEVIATIONS = 9.0
"""Standard deviations beyond which nothing is left to integrate."""
MIN_SPENT = 1e-250
"""A look that may spend less than this decides nothing."""
LOOKS = tuple(number / 10 for number in range(1, 11))
"""Shares of the items after which it is seen whether enough are asked."""
TEXT_CAUTION = 3.0
"""Before the last look the p of bits per byte is multiplied by it: at small levels few documents do not show a long
tail. Of equal models with 50 skewed documents 5.7 % are called different, 5.0 % by the single test (2,500 draws).
Without it they are 6.9 %, where the single test has 4.3 % (1,500 of them)."""
SEED = 17
"""Seed of the order. It is fixed: who may choose a seed may choose until the answer suits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Error level, spending function and margin at which a task has been asked enough."""

    level: float = 0.05  # the chance that equal models are called different, at whichever look
    spending: str = OBRIEN_FLEMING
    margin: float | None = None  # A difference that does not matter, in accuracy or bits per byte

    def among(self, num_tests: int) -> Self:
        """Share the error between so many tests (Bonferroni)."""
        return replace(self, level=self.level / max(num_tests, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A rule applied to one task: the units after which it looks at the difference."""

    looks: tuple[int, ...]  # units, ascending up to all
    num_items: int
    level: float
    spending: str
    margin: float | None
    caution: float = 1.0  # factor of p at looks before the last
    seed: int = SEED

    def shares(self, look: int) -> tuple[float, ...]:
        return tuple(num / self.looks[-1] for num in self.looks[:look])

    def nominal(self, look: int, level: float) -> float:
        """Return what a single test's p must be below at this look, counted from 1, for `level` at all looks."""
        return nominal_level(self.shares(look), level, self.spending) / self._caution_at(look)

    def adjusted(self, p: float, look: int) -> float:
        """Return the level that a single test's p just reaches at this look."""
        return adjusted_p(min(1.0, p * self._caution_at(look)), self.shares(look), self.spending)

    def _caution_at(self, look: int) -> float:
        return self.caution if look < len(self.looks) else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The look at which the asking stopped."""

    plan: Plan
    look: int  # counted from 1
    num_asked: int  # items

    @property
    def words(self) -> str:
        return (
            f"{self.num_asked:,} of {self.plan.num_items:,} items asked, look {self.look} of {len(self.plan.looks)} "
            f"({self.plan.spending.replace('_', ' ')}, level {self.plan.level:.2g})"
        )


def unit_of(item: Record) -> str:
    """Name the unit that is asked as a whole."""
    return f"cluster {item['cluster']}" if "cluster" in item else f"item {item['index']}"


def in_order(units: Sequence[str]) -> list[str]:
    """Return the distinct units in the order in which they are asked."""
    return sorted(set(units), key=lambda unit: hashlib.blake2b(f"{SEED} {unit}".encode(), digest_size=16).digest())


def plan_task(name: str, noun: str, units: Sequence[str], rule: Rule) -> Plan:
    """Plan a task whose items belong to these units, each a `noun`. Raises DataError for too few for any verdict."""
    num_units, minimum = len(set(units)), MIN_DOCUMENTS if noun == "document" else MIN_UNITS
    if num_units < minimum:
        raise DataError(
            f"{name}: {num_units} {noun}{'' if num_units == 1 else 's'}, too few to be asked until a difference is "
            f"decided, which takes {minimum}; leave the task out"
        )
    numbers = sorted({math.ceil(share * num_units - 1e-9) for share in LOOKS})
    return Plan(
        looks=tuple(number for number in numbers if number >= minimum),
        num_items=len(units),
        caution=TEXT_CAUTION if noun == "document" else 1.0,
        **asdict(rule),
    )


def noun_of(items: Sequence[Record], metric: str) -> str:
    return "document" if metric == BITS else "cluster" if "cluster" in items[0] else "item"


def cut_to(result: Results, task: str, units: Sequence[str]) -> Results:
    """Return the result with the items of these units of this task alone."""
    wanted = set(units)
    return replace(result, items={task: [item for item in result.items[task] if unit_of(item) in wanted]})


def describe_plan(plan: Plan, reference: Results, task: str) -> Record:
    """Return what a task's record says of its plan. Equal plans are the same comparison."""
    return {"against_items": reference.tasks[task]["items_hash"], **asdict(plan), "looks": list(plan.looks)}


def from_record(record: Record) -> Stage:
    found = record["sequential"]
    plan = Plan(**{key: found[key] for key in Plan.__dataclass_fields__ if key != "looks"}, looks=tuple(found["looks"]))
    return Stage(plan=plan, look=found["look"], num_asked=record["n"])


@lru_cache(maxsize=1024)
def boundaries(shares: tuple[float, ...], level: float, spending: str = OBRIEN_FLEMING) -> tuple[float, ...]:
    """Return for each look the standard errors that a difference must exceed; inf where it may spend nothing yet.

    `shares` are those of the information at each look.
    """
    found: list[float] = []
    nodes_i, mass_i = np.zeros(1), np.ones(1)
    spent = before = 0.0
    unit_nodes, unit_weights = np.polynomial.legendre.leggauss(NUM_NODES)
    for share in shares:
        to_spend = SPENDING[spending](share, level) - spent
        deviation = math.sqrt(share - before)
        limit = _crossed_with(to_spend, nodes_i, mass_i, deviation, math.sqrt(share))
        found.append(limit / math.sqrt(share))
        spent, before = spent + to_spend, share
        inside = min(limit, MAX_DEVIATIONS * math.sqrt(share))
        steps_ji = (inside * unit_nodes[:, None] - nodes_i) / deviation
        density_j = np.exp(-(steps_ji**2) / 2) @ mass_i / (deviation * math.sqrt(2 * math.pi))
        nodes_i, mass_i = inside * unit_nodes, inside * unit_weights * density_j
    return tuple(found)


def _crossed_with(chance: float, nodes_i: np.ndarray, mass_i: np.ndarray, deviation: float, whole: float) -> float:
    """Return the limit that a step of this deviation crosses, on either side, with `chance`.

    `whole` is the deviation of the sum. Found by Newton's method on the logarithm, which converges from outside,
    because the tail is log-concave.
    """
    if chance < MIN_SPENT:
        return math.inf
    limit = -NormalDist().inv_cdf(chance / 2) * whole
    for _ in range(100):
        distances = (limit - nodes_i) / deviation
        crossed = float(mass_i @ np.array([math.erfc(distance / math.sqrt(2)) for distance in distances.tolist()]))
        slope = -2 * float(mass_i @ np.exp(-(distances**2) / 2)) / (deviation * math.sqrt(2 * math.pi))
        step = math.log(crossed / chance) * crossed / slope
        limit -= step
        if abs(step) < 1e-10:
            break
    return limit


def nominal_level(shares: tuple[float, ...], level: float, spending: str = OBRIEN_FLEMING) -> float:
    """Return the level of a single test at the last of these looks."""
    return math.erfc(boundaries(shares, level, spending)[-1] / math.sqrt(2))


def adjusted_p(p: float, shares: tuple[float, ...], spending: str = OBRIEN_FLEMING) -> float:
    """Return the smallest level at which a single test's `p` is significant at the last of these looks.

    This p-value stays valid under optional stopping (Liu and Anderson, Journal of the American Statistical Association
    103, 2008). Found by bisection of the level's logarithm.
    """
    if p in (0.0, 1.0) or nominal_level(shares, p, spending) >= p:  # a single look
        return p
    low, high = math.log(p), math.log(0.999)  # looking often never makes it smaller
    if nominal_level(shares, math.exp(high), spending) <= p:
        return 1.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (low, middle) if nominal_level(shares, math.exp(middle), spending) > p else (middle, high)
    return math.exp(high)
