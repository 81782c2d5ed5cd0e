"""Check by simulation that intervals and verdicts of `compare` keep what they promise, where the truth is known.

    python -m benchmarks intervals --out docs/measurements

Items are drawn many times from two models whose difference is set. Counted are: how often the 95 % interval contains
the true difference (coverage), how often a difference is claimed where there is none (size) or one (power), and how
often interval and verdict contradict each other. No model or GPU is needed.

`items` and `means` draw answers that are right or wrong, `texts` draws documents with bits per byte. In lambdas of this
file, `g` is the random generator and `d` the true difference.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llmfoundry_lite.evaluation import significance
from llmfoundry_lite.evaluation.significance import MIN_DOCUMENTS, MIN_UNITS, Counts, Floats
from llmfoundry_lite.tables import Table
from llmfoundry_machines.bench.frame import describe_conditions, measured_table, open_console, tell

LEVEL, SEED, NUM_TESTS = 0.05, 17, (1, 5, 10, 20)
TEXT_DRAWS = 10
"""A draw of texts costs 10,000 bootstrap resamples, so this many times fewer of them are made."""


class Row(NamedTuple):
    """Result of all draws of one case."""

    case: str
    size: str
    difference: float
    """The true one."""
    coverage: float
    """Share of the draws whose interval contains the true difference."""
    claimed: float
    """Share of the draws with a significant difference: size if the true difference is 0, otherwise power."""
    num_contradictions: int
    num_draws: int


def run(*, num_draws: int = 20_000, out: Path | None = None) -> list[Row]:
    """Simulate all cases, print the tables, return their rows, and write intervals.json and .md to `out`.

    `num_draws` is the number of draws of a case with one task; the other cases are slower and have fewer.
    """
    console, rows = open_console(), []
    for row in [*items(num_draws), *means(num_draws), *texts(max(1, num_draws // TEXT_DRAWS))]:
        console.print(f"{row.case}, {row.size}: {row.difference:+.2f}", markup=False)
        rows.append(row)
    levels = list(texts_among_others(max(1, num_draws // TEXT_DRAWS)))
    tables = table_of_cases(rows), table_of_levels(levels)
    report = describe_conditions() | {"cases": [row._asdict() for row in rows], "levels": levels}
    heading = "How reliable the intervals and decisions of `compare` are"
    command = "python -m benchmarks intervals"
    tell(report, *tables, [PROMISE], name="intervals", heading=heading, command=command, out=out)
    return rows


# ------------------------------------------------------------------------------------------------- right and wrong


def items(num_draws: int) -> Iterator[Row]:
    """Yield cases of one task. `discordance` is the share of items that only one of the models answers."""
    generator = np.random.default_rng(SEED)
    for n, discordance, difference in (
        *((20, q, 0.0) for q in (0.05, 0.2, 0.5)),
        *((20, 0.3, d) for d in (0.1, 0.25)),
        *((100, q, 0.0) for q in (0.02, 0.1, 0.4)),
        *((100, 0.1, d) for d in (0.05, 0.1)),
        *((273, q, 0.0) for q in (0.05, 0.2)),
        (273, 0.2, 0.08),
        *((2000, q, 0.0) for q in (0.01, 0.1, 0.4)),
        *((2000, 0.2, d) for d in (0.02, 0.05)),
    ):
        # The items that only one model answers are shared so that the difference is the true one.
        won, lost = (discordance + difference) / 2, (discordance - difference) / 2
        counts = generator.multinomial(n, [won, lost, 1 - discordance], num_draws).astype(np.float64)
        ones = np.ones(num_draws)
        case = f"one task, {discordance:.0%} discordant"
        yield judged(case, f"{n:,} items", difference, Counts(counts[:, 0], counts[:, 1], n, ones))


def means(num_draws: int) -> Iterator[Row]:
    """Yield cases of means over tasks, and of units that have several items each."""
    generator = np.random.default_rng(SEED + 1)
    for case, size, num_units, shares, draw in SCENES:
        for difference in (0.0, 0.1):
            counts_of_draws = [significance.count(draw(generator, difference), shares) for _ in range(num_draws // 2)]
            # Columns over the draws, as `judged` takes them.
            wins, losses, jumps = (
                np.array(column)
                for column in zip(*((counts[0], counts[1], counts[3]) for counts in counts_of_draws), strict=True)
            )
            yield judged(case, size, difference, Counts(wins, losses, num_units, jumps))


def answers(generator: np.random.Generator, shape: tuple[int, ...], difference: float, likeness: float) -> Floats:
    """Draw the difference of two models' answers, other less first, as [items, repetitions] with -1, 0 and 1.

    An item is drawn once. Another repetition of it (another prompt, or number of examples) repeats this draw with the
    probability `likeness`, and is drawn anew otherwise. The expected value of every element is `difference`.
    """

    def drawn(shape: tuple[int, ...]) -> Floats:
        """Draw independently: 1 with probability 0.15 + difference / 2, -1 with 0.15 - difference / 2, otherwise 0."""
        uniform = generator.random(shape)
        is_win = uniform < 0.15 + difference / 2
        is_loss = uniform > 0.85 + difference / 2
        return np.where(is_win, 1.0, np.where(is_loss, -1.0, 0.0))

    repeats_item = generator.random(shape) < likeness
    item_draw = drawn((*shape[:-1], 1))
    own_draw = drawn(shape)
    return np.where(repeats_item, item_draw, own_draw)


Scene = tuple[str, str, int, Floats, Callable[[np.random.Generator, float], Floats]]
"""Case, size, number of units, each unit's share of the mean, and a function that draws each unit's contribution to the
difference, given a generator and the true difference."""


def _scenes() -> Iterator[Scene]:
    """Yield the scenes that `means` simulates."""

    def equal(num_units: int) -> Floats:
        """Return equal shares for this number of units."""
        return np.full(num_units, 1 / num_units)

    for num_units, likeness in ((60, 0.6), (300, 0.6), (300, 1.0)):
        yield (
            f"mean of three prompts over one file, {likeness:.0%} the same",
            f"{num_units} items",
            num_units,
            equal(num_units),
            lambda g, d, num=num_units, likeness=likeness: answers(g, (num, 3), d, likeness).sum(axis=1) / (3 * num),
        )

    # Each task counts a third, so an item of a small task counts more.
    sizes = (40, 100, 1000)
    yield (
        "mean of three tasks of different sizes",
        "40, 100 and 1,000 items",
        sum(sizes),
        np.concatenate([np.full(n, 1 / (3 * n)) for n in sizes]),
        lambda g, d: np.concatenate([answers(g, (n, 1), d, 0.0)[:, 0] / (3 * n) for n in sizes]),
    )

    for num_units, items_per_unit in ((10, 20), (40, 5), (200, 5)):
        yield (
            "clusters, 50% of whose items say the same",
            f"{num_units} of {items_per_unit} items",
            num_units,
            equal(num_units),
            lambda g, d, num=num_units, of=items_per_unit: answers(g, (num, of), d, 0.5).sum(axis=1) / (num * of),
        )

    # Clusters are drawn with 29 items each, of which only the first ones count.
    cluster_sizes = np.random.default_rng(SEED).integers(1, 30, 40)
    yield (
        "clusters of 1 to 29 items, 50% of whose items say the same",
        f"40 clusters, {cluster_sizes.sum()} items",
        40,
        cluster_sizes / cluster_sizes.sum(),
        lambda g, d: (
            np.where(np.arange(29) < cluster_sizes[:, None], answers(g, (40, 29), d, 0.5), 0).sum(axis=1)
            / cluster_sizes.sum()
        ),
    )

    # 10 categories of each size. Each category counts the same, however many items it has.
    categories = np.repeat([5, 10, 100], 10)
    shares = np.repeat(1 / (30 * categories), categories)
    yield (
        "mean of 30 categories of 5 to 100 items",
        f"{categories.sum():,} items",
        int(categories.sum()),
        shares,
        lambda g, d: answers(g, (len(shares), 1), d, 0.0)[:, 0] * shares,
    )


SCENES: list[Scene] = list(_scenes())


def judged(case: str, size: str, difference: float, counts: Counts) -> Row:
    """Count how often interval and verdict are right in the draws of one case.

    `counts` has arrays, with one element for each draw: wins, losses, and jump, the largest contribution of one unit.
    """
    wins, losses, jumps = (np.asarray(part, np.float64) for part in (counts.wins, counts.losses, counts.jump))
    z, num_units = significance.z_of(LEVEL), counts.num_units
    high = jumps * significance.upper_limit(wins, losses, num_units, z)
    low = -jumps * significance.upper_limit(losses, wins, num_units, z)
    claimed = np.array(
        [
            significance.score_p(Counts(draw_wins, draw_losses, num_units, 1.0)) < LEVEL
            for draw_wins, draw_losses in zip(wins, losses, strict=True)
        ]
    )
    interval_excludes_zero = (low > 0) | (high < 0)
    return Row(
        case=case,
        size=size,
        difference=difference,
        coverage=float(((low <= difference) & (difference <= high)).mean()),
        claimed=float(claimed.mean()),
        num_contradictions=int((interval_excludes_zero != claimed).sum()),
        num_draws=len(wins),
    )


# ----------------------------------------------------------------------------------------------------------- texts


def texts(num_draws: int) -> Iterator[Row]:
    """Yield cases of bits per byte over documents whose lengths differ by factors.

    The cases differ in the distribution of the documents' differences around the mean, see TAILS.
    """
    generator = np.random.default_rng(SEED + 2)
    for name in TAILS:
        for num_documents in (20, 50, 100):
            for difference in (0.0, 0.05):
                # Covered, claimed, and contradictory draws.
                num_draws_with = np.zeros(3)
                for _ in range(num_draws):
                    result = text_of(name, num_documents, difference, generator)
                    interval = result.interval(LEVEL)
                    assert interval is not None
                    low, high = interval
                    is_claimed = result.p < LEVEL
                    num_draws_with += [low <= difference <= high, is_claimed, is_claimed == (low <= 0 <= high)]
                shares = num_draws_with / num_draws
                yield Row(
                    f"bits per byte, {name}",
                    f"{num_documents} documents",
                    difference,
                    shares[0],
                    shares[1],
                    int(num_draws_with[2]),
                    num_draws,
                )


# Distribution -> function that draws this many differences of documents, with a mean of 0.
SKEWED = "skewed (log-normal, sigma 1)"
TAILS: dict[str, Callable[[np.random.Generator, int], Floats]] = {
    "normal": lambda generator, n: generator.normal(0, 0.1, n),
    "heavy tails (Student's t, 3 degrees)": lambda generator, n: 0.06 * generator.standard_t(3, n),
    SKEWED: lambda generator, n: 0.05 * (generator.lognormal(0, 1, n) - math.exp(0.5)),
}


def text_of(
    tails: str, n: int, difference: float, generator: np.random.Generator, num_tests: int = 1
) -> significance.BootstrapResult | significance.NormalResult:
    """Draw `n` documents for two models, and compare the models as one of `num_tests` tests would."""
    rows = text_of_rows(tails, n, difference, generator)
    return significance.difference_of_ratios(*rows, generator, smallest_level=LEVEL / num_tests)


def text_of_rows(tails: str, n: int, difference: float, generator: np.random.Generator) -> tuple[Floats, Floats]:
    """Draw the [nats, bytes] of each document for two models, whose nats per byte differ by `difference` on average."""
    document_bytes = generator.lognormal(6, 0.7, n)
    nats_per_byte = 1 + generator.normal(0, 0.3, n)
    first = np.stack([document_bytes * nats_per_byte, document_bytes], axis=1)
    other = np.stack(
        [document_bytes * (nats_per_byte + difference + TAILS[tails](generator, n)), document_bytes], axis=1
    )
    return first, other


def texts_among_others(num_draws: int) -> Iterator[tuple[int, int, float, int]]:
    """Yield how often one of several tests claims a difference where there is none: (documents, tests, share, draws).

    Holm's correction compares the smallest of several p with 0.05 divided by their number. This tests the far tails of
    the distribution, which `texts` does not, so only the skewed texts are drawn.
    """
    generator = np.random.default_rng(SEED + 4)
    for num_documents in (20, 50, 100):
        texts = (text_of(SKEWED, num_documents, 0.0, generator, max(NUM_TESTS)) for _ in range(num_draws))
        p = np.array([text.p for text in texts])
        for num_tests in NUM_TESTS:
            yield num_documents, num_tests, float((p < LEVEL / num_tests).mean()), num_draws


PROMISE = (
    "These figures come from simulation. An interval should contain the true difference in 95 % of draws. If "
    "there is no difference, at most 5 % of draws may report one. A contradiction is an interval that excludes 0 "
    f"although no difference is reported, or the reverse. Below {MIN_UNITS} items or clusters, or {MIN_DOCUMENTS} "
    "documents, no difference is reported."
)


def table_of_cases(rows: list[Row]) -> Table:
    """Return a table of coverage and claims, one row for each case."""
    headings = ["case", "size", "difference", "covered by 95 % interval", "called different", "contradictions", "draws"]
    cells = [
        [
            *(row.case, row.size, f"{row.difference:.2f}", f"{row.coverage:.3f}", f"{row.claimed:.3f}"),
            *(str(row.num_contradictions), f"{row.num_draws:,}"),
        ]
        for row in rows
    ]
    return measured_table("coverage and claims", headings, cells)


def table_of_levels(levels: list[tuple[int, int, float, int]]) -> Table:
    """Return a table of how often a difference is claimed among several tests, relative to Holm's first level."""
    title = "skewed texts among several tests: how often one is called different from its like, at Holm's first level"
    rows = [
        [
            str(num_documents),
            str(num_tests),
            f"{LEVEL / num_tests:.4f}",
            f"{share:.4f}",
            f"{share * num_tests / LEVEL:.1f}",
            f"{num_draws:,}",
        ]
        for num_documents, num_tests, share, num_draws in levels
    ]
    return measured_table(title, ["documents", "tests", "level", "found", "found / level", "draws"], rows)
