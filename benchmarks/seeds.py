"""Check by simulation that `compare` of recipes keeps its promises, and how many runs a recipe needs.

    python -m benchmarks seeds --out docs/measurements

Two recipes are trained several times each and evaluated on one set of items, many times over, with a difference that is
set. Counted are: how often equal recipes are called different, how often the 95 % interval contains the true
difference, and how often a difference of the size that `compare` states as detectable is found. No model or GPU is
needed. `benchmarks/intervals.py` does the same for single models.

A run's score depends on its seed, and a recipe's score on the items. Cases differ in the ratio of both variances:

    run variance: of a run's score, among seeds, on all items that there could be
    item variance: of the difference of the two recipes, among sets of items, with all seeds that there could be

Legend: r runs, i items, u units.
"""

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmfoundry_lite.evaluation.significance import LEVEL, Floats
from llmfoundry_lite.tables import Table
from llmfoundry_machines.bench.frame import describe_conditions, open_console, tabulate, tell
from llmfoundry_studies.seeds import Estimate, difference_of_sides

SEED = 23
NUM_RUNS = ((2, 2), (3, 3), (5, 5), (2, 5))
"""Runs of the first recipe and of the other one."""
RATIOS = (0.0, 1.0, 4.0, 16.0)
"""Run variance over item variance."""
NUM_TESTS = (1, 10, 50, 200)
"""Holm's correction compares the smallest p-value of this many tests with 0.05 divided by their number."""
LEVEL_DRAWS = 10
"""Small levels need this many times more draws."""
LEVEL_UNITS = 100
LEVEL_RATIO = 16.0
"""Number of items, and run variance over item variance, with which small levels are simulated."""
POWER_DRAWS = 5
"""Power and coverage need this many times fewer draws, because their rates are not small."""
DETECTABLE_DRAWS = 200
"""Draws whose median detectable difference becomes the true difference of a case."""
FEW_SEEDS = (2, 3, 4, 5, 10)
"""Numbers of runs a side for which the page says how large a difference must be."""

DIFFICULTY = 1.5
"""Standard deviation of the items' difficulty, in units of a probit."""
TASTE = 0.5
"""Standard deviation of what a recipe, with any seed, finds easier or harder about an item."""
NOISE = 0.7
"""Standard deviation of what a single run finds easier or harder about an item."""
MAX_ACCURACY = 0.999
"""Accuracy of the better recipe, if a larger difference is asked for than there can be."""
TAIL = 0.05
"""Scale of the documents' differences, in bits per byte: a log-normal distribution with sigma 1."""
DOCUMENT_NOISE = 0.05
"""Standard deviation of a single run's bits per byte on a document."""
SIGMA_OF_BYTES = 0.7
"""Standard deviation of the logarithm of a document's bytes."""


class Draw(NamedTuple):
    """Scores of two recipes on one set of items, as `difference_of_sides` takes them."""

    weights_u: Floats
    first_ru: Floats
    other_ru: Floats


Drawer = Callable[[np.random.Generator, int, tuple[int, int], float, float], Draw]
"""Function that draws from a generator, given the number of units, the runs of both recipes, the ratio of run variance
to item variance, and the true difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Result of all draws of one case."""

    metric: str
    num_units: int
    runs: str
    """Runs of both recipes, such as "3 + 3"."""
    ratio: float
    claimed: float
    """Share of the draws in which equal recipes are called different."""
    num_draws: int
    detectable: float
    """Median of the difference that is stated as detectable."""
    power: float
    """Share of the draws in which a true difference of that size is found."""
    coverage: float
    """Share of the draws whose interval contains it."""
    num_power_draws: int


def run(*, num_draws: int = 10_000, out: Path | None = None) -> list[Row]:
    """Simulate all cases, print the tables, return their rows, and write seeds.json and .md to `out`.

    `num_draws` is the number of draws of equal recipes in each case.
    """
    conditions = describe_conditions()
    console = open_console()
    rows: list[Row] = []
    for row in simulate_cases(num_draws):
        console.print(f"{row.metric}, {row.num_units}, {row.runs} runs, ratio {row.ratio}", markup=False)
        rows.append(row)
    levels = list(simulate_small_levels(LEVEL_DRAWS * num_draws))

    report = conditions | {"cases": [asdict(row) for row in rows], "levels": levels}
    tell(
        report,
        PROMISE,
        describe_rates(rows),
        table_of_cases(rows),
        describe_few_seeds(),
        table_of_few_seeds(),
        describe_levels(levels),
        table_of_levels(levels),
        name="seeds",
        heading="How reliable comparisons of recipes with several runs are",
        command="python -m benchmarks seeds",
        out=out,
    )
    return rows


def simulate_cases(num_draws: int) -> Iterator[Row]:
    """Yield the result of each case."""
    for metric, draw, sizes in (
        ("accuracy", draw_answers, (100, 1000)),
        ("bits per byte, skewed", draw_documents, (50, 200)),
    ):
        for num_units in sizes:
            for runs in NUM_RUNS:
                for ratio in RATIOS:
                    yield simulate(metric, draw, num_units, runs, ratio, num_draws)


def simulate(metric: str, draw: Drawer, num_units: int, runs: tuple[int, int], ratio: float, num_draws: int) -> Row:
    """Draw equal recipes, then recipes that differ by what is stated as detectable, and count what is found."""
    generator = np.random.default_rng([SEED, num_units, *runs, round(100 * ratio)])
    is_text = draw is draw_documents

    def estimate(difference: float) -> Estimate:
        """Draw two recipes with this true difference, and compare them."""
        return difference_of_sides(*draw(generator, num_units, runs, ratio, difference), is_text=is_text)

    # Equal recipes.
    num_claimed = 0
    detectable: list[float] = []
    for _ in range(num_draws):
        found = estimate(0.0)
        num_claimed += found.p < LEVEL
        if len(detectable) < DETECTABLE_DRAWS:
            detectable.append(found.detectable(LEVEL))

    # Recipes with a difference of the size that these comparisons state as detectable.
    difference = statistics.median(detectable)
    num_power_draws = max(1, num_draws // POWER_DRAWS)
    num_found = 0
    num_covered = 0
    for _ in range(num_power_draws):
        found = estimate(difference)
        num_found += found.p < LEVEL
        num_covered += _covers(found, difference)
    return Row(
        metric=metric,
        num_units=num_units,
        runs=describe_runs(runs),
        ratio=ratio,
        claimed=num_claimed / num_draws,
        num_draws=num_draws,
        detectable=difference,
        power=num_found / num_power_draws,
        coverage=num_covered / num_power_draws,
        num_power_draws=num_power_draws,
    )


def _covers(found: Estimate, difference: float) -> bool:
    """Return whether the 95 % interval contains a difference, which is if the test does not reject it.

    This is quicker than to compute the interval, which needs a quantile of Student's t.
    """
    distance = Estimate(
        difference=found.difference - difference,
        error=found.error,
        df=found.df,
        num_effective=found.num_effective,
        tail_correction=found.tail_correction,
    )
    return distance.p >= LEVEL


# ---------------------------------------------------------------------------------------------------------- drawing


def draw_answers(
    generator: np.random.Generator, num_units: int, runs: tuple[int, int], ratio: float, difference: float
) -> Draw:
    """Draw right and wrong answers. An answer is right if a sum of normal variables is above 0 (a probit model).

    The sum has the item's difficulty, which both recipes share, the recipe's taste for the item, the luck of the run's
    seed, and noise. Without a difference, half of the answers are right.
    """
    item_variance, slope = probit_constants()
    luck = math.sqrt(ratio * item_variance / num_units) / slope
    total_deviation = math.sqrt(DIFFICULTY**2 + TASTE**2 + NOISE**2 + luck**2)
    accuracy = min(0.5 + difference, MAX_ACCURACY)
    skill = total_deviation * statistics.NormalDist().inv_cdf(accuracy)

    difficulty_i = generator.normal(0, DIFFICULTY, num_units)
    sides: list[Floats] = []
    for num_runs, skill_of_side in zip(runs, (0.0, skill), strict=True):
        recipe_i = difficulty_i + generator.normal(0, TASTE, num_units) + skill_of_side
        luck_r1 = generator.normal(0, luck, (num_runs, 1))
        noise_ri = generator.standard_normal((num_runs, num_units), dtype=np.float32) * NOISE
        is_right_ri = recipe_i + luck_r1 + noise_ri > 0
        sides.append(is_right_ri / num_units)
    return Draw(np.full(num_units, 1 / num_units), *sides)


@cache
def probit_constants() -> tuple[float, float]:
    """Return the item variance of `draw_answers` with a single item, and how much accuracy a unit of skill adds."""
    generator = np.random.default_rng(SEED)
    num_items = 200_000
    normal = statistics.NormalDist()
    difficulty_i = generator.normal(0, DIFFICULTY, num_items)
    probability_of_side: list[Floats] = []
    for _ in range(2):
        margins_i = (difficulty_i + generator.normal(0, TASTE, num_items)) / NOISE
        probability_of_side.append(np.array([normal.cdf(margin) for margin in margins_i]))
    item_variance = float((probability_of_side[1] - probability_of_side[0]).var())

    total_deviation = math.sqrt(DIFFICULTY**2 + TASTE**2 + NOISE**2)
    slope = normal.pdf(0) / total_deviation
    return item_variance, slope


def draw_documents(
    generator: np.random.Generator, num_units: int, runs: tuple[int, int], ratio: float, difference: float
) -> Draw:
    """Draw bits per byte of documents of different lengths, whose differences have a long tail.

    The tail belongs to the other recipe, with any seed. Documents are weighted by their bytes.
    """
    document_bytes = generator.lognormal(6, SIGMA_OF_BYTES, num_units)
    weights_u = document_bytes / document_bytes.sum()
    # The variance of a log-normal variable is (exp(s^2) - 1) exp(s^2), and weights differ as much as lengths do.
    variance_of_document = TAIL**2 * (math.e - 1) * math.e
    item_variance = variance_of_document * math.exp(SIGMA_OF_BYTES**2) / num_units
    luck = math.sqrt(ratio * item_variance)

    tail_u = TAIL * (generator.lognormal(0, 1, num_units) - math.exp(0.5))
    bits_u = 1 + generator.normal(0, 0.3, num_units)
    sides: list[Floats] = []
    for num_runs, recipe_u in zip(runs, (bits_u, bits_u + tail_u + difference), strict=True):
        luck_r1 = generator.normal(0, luck, (num_runs, 1))
        noise_ru = generator.normal(0, DOCUMENT_NOISE, (num_runs, num_units))
        sides.append(weights_u * (recipe_u + luck_r1 + noise_ru))
    return Draw(weights_u, *sides)


def simulate_small_levels(num_draws: int) -> Iterator[dict[str, Any]]:
    """Yield how often equal recipes with few noisy runs are called different at the levels of several tests."""
    for runs in NUM_RUNS:
        generator = np.random.default_rng([SEED, *runs])
        p_values = np.zeros(num_draws)
        for number in range(num_draws):
            draw = draw_answers(generator, LEVEL_UNITS, runs, LEVEL_RATIO, 0.0)
            p_values[number] = difference_of_sides(*draw).p
        for num_tests in NUM_TESTS:
            level = LEVEL / num_tests
            share = float((p_values < level).mean())
            yield {
                "runs": describe_runs(runs),
                "num_tests": num_tests,
                "level": level,
                "share": share,
                "num_draws": num_draws,
            }


def describe_runs(runs: tuple[int, int]) -> str:
    """Return the numbers of runs of both recipes, such as "3 + 3"."""
    return f"{runs[0]} + {runs[1]}"


# ----------------------------------------------------------------------------------------------------------- the page


PROMISE = (
    "These figures come from simulation. If recipes are equal, at most 5 % of draws may call them different. An "
    "interval should contain the true difference in 95 % of draws. `compare` states the smallest difference that would "
    "be found four times in five; recipes that differ by the median of this statement should be found in 80 % of "
    "draws. Run variance is that of a run's score among seeds. Item variance is that of the difference of the recipes "
    "among sets of items."
)


def table_of_cases(rows: list[Row]) -> Table:
    """Return a table with a row for each case."""
    columns = (
        ("metric", "{metric}"),
        ("items or documents", "{num_units:,}"),
        ("runs", "{runs}"),
        ("run variance / item variance", "{ratio:g}"),
        ("equal: called different", "{claimed:.4f}"),
        ("draws", "{num_draws:,}"),
        ("stated as detectable", "{detectable:.4f}"),
        ("found, if so large", "{power:.3f}"),
        ("covered by 95 % interval", "{coverage:.3f}"),
        ("draws ", "{num_power_draws:,}"),
    )
    return tabulate("", columns, [asdict(row) for row in rows], num_keys=4)


def describe_rates(rows: list[Row]) -> str:
    """Return the paragraph that says which rates the table has, with two runs on a side and with more."""
    with_two = [row for row in rows if row.runs.startswith("2")]
    with_more = [row for row in rows if row not in with_two]

    def errors(rows: list[Row]) -> str:
        """Return the largest share of draws in which equal recipes are called different."""
        return f"at most {100 * max(row.claimed for row in rows):.1f} %"

    def found(rows: list[Row]) -> str:
        """Return the least and the largest share of draws in which a difference of the stated size is found."""
        shares = [100 * row.power for row in rows]
        return f"{min(shares):.0f} to {max(shares):.0f} %"

    return (
        f"With three or more runs a side, {errors(with_more)} of draws call equal recipes different, and a difference "
        f"of the stated size is found in {found(with_more)} of draws. With two runs on a side, it is "
        f"{errors(with_two)}, and {found(with_two)}: two runs often look alike by chance, and the statement is then "
        "too small."
    )


def detectable_by_seeds(num_runs: int) -> float:
    """Return the smallest difference that runs alone allow to find, in standard deviations of a run's score.

    Items are so many that only seeds matter: the error of the difference is sqrt(2 / runs), with 2 (runs - 1) degrees
    of freedom.
    """
    seeds_alone = Estimate(difference=0.0, error=math.sqrt(2 / num_runs), df=2 * (num_runs - 1), num_effective=math.inf)
    return seeds_alone.detectable(LEVEL)


def describe_few_seeds() -> str:
    """Return the paragraph that says when three runs are too few."""
    return (
        "**When three seeds are too few.** More items do not help against the noise of seeds. The column `sd of runs` "
        "of `compare` shows it. With three runs a side, only a difference of "
        f"{detectable_by_seeds(3):.1f} times the sd of runs is found four times in five, however many items there are, "
        "and with several tests only a larger one. If the difference that matters is smaller than that, train more "
        "runs; the table says how many:"
    )


def table_of_few_seeds() -> Table:
    """Return a table with the smallest difference that each number of runs finds."""
    rows = [{"runs": num_runs, "detectable": detectable_by_seeds(num_runs)} for num_runs in FEW_SEEDS]
    columns = (("runs a side", "{runs}"), ("found four times in five, in sd of runs", "{detectable:.1f}"))
    return tabulate("", columns, rows)


def describe_levels(levels: list[dict[str, Any]]) -> str:
    """Return the paragraph about small levels, with the rates at the smallest one."""
    smallest = min(level["level"] for level in levels)
    times = {row["runs"]: row["share"] / smallest for row in levels if row["level"] == smallest}
    return (
        "**When there are many tests.** Holm's correction compares the smallest of several p-values with 0.05 divided "
        "by their number. If seeds scatter far more than items, few runs sometimes look alike by chance, and at such "
        f"levels that matters more. At 0.05 / {max(NUM_TESTS)}, equal recipes with two runs a side are called "
        f"different {times['2 + 2']:.0f} times as often as the level allows, with three runs {times['3 + 3']:.1f} "
        f"times, and with five {times['5 + 5']:.1f} times. With ten tests or more, train five runs a side. Equal "
        f"recipes on {LEVEL_UNITS} items, with a run variance of {LEVEL_RATIO:g} times the item variance:"
    )


def table_of_levels(levels: list[dict[str, Any]]) -> Table:
    """Return a table of how often equal recipes are called different at each level, relative to the level."""
    rows = [{**level, "ratio": level["share"] / level["level"]} for level in levels]
    columns = (
        ("runs", "{runs}"),
        ("tests", "{num_tests}"),
        ("level", "{level:.5f}"),
        ("called different", "{share:.5f}"),
        ("called different / level", "{ratio:.2f}"),
        ("draws", "{num_draws:,}"),
    )
    return tabulate("", columns, rows, num_keys=2)
