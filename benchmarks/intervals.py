"""Do intervals and verdicts of `compare` keep what they promise? Simulated where the truth is known.

python -m benchmarks intervals --out docs/measurements

Items are drawn anew many times from two models whose difference is set. Counted: how often the 95 % interval holds the
true difference (coverage), how often a difference is claimed where there is none (size) or one (power), and how often
interval and verdict contradict each other. Nothing here needs a model or a GPU.
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
"""A draw of texts costs 10,000 resamples: there are so many times fewer of them."""


class Row(NamedTuple):
    case: str
    size: str
    difference: float
    coverage: float
    claimed: float
    """Size where the difference is 0, power elsewhere."""
    num_contradictions: int
    num_draws: int


def run(*, num_draws: int = 20_000, out: Path | None = None) -> list[Row]:
    """Simulate, print tables, write intervals.json and .md to `out`."""
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
    """One task; `discordance` is the share of items that one model alone answers."""
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
        won, lost = (discordance + difference) / 2, (discordance - difference) / 2
        counts = generator.multinomial(n, [won, lost, 1 - discordance], num_draws).astype(np.float64)
        ones = np.ones(num_draws)
        case = f"one task, {discordance:.0%} discordant"
        yield judged(case, f"{n:,} items", difference, Counts(counts[:, 0], counts[:, 1], n, ones))


def means(num_draws: int) -> Iterator[Row]:
    """Means of tasks, and units of several items."""
    generator = np.random.default_rng(SEED + 1)
    for case, size, num_units, shares, draw in SCENES:
        for difference in (0.0, 0.1):
            found = [significance.count(draw(generator, difference), shares) for _ in range(num_draws // 2)]
            wins, losses, jumps = (
                np.array(column) for column in zip(*((c[0], c[1], c[3]) for c in found), strict=True)
            )
            yield judged(case, size, difference, Counts(wins, losses, num_units, jumps))


def answers(generator: np.random.Generator, shape: tuple[int, ...], difference: float, likeness: float) -> Floats:
    """(items, askings): other less first. An item is a draw of two models' answers; another asking of it (a prompt, a
    number of examples) says the same with the probability `likeness`, and is drawn anew otherwise."""

    def drawn(shape: tuple[int, ...]) -> Floats:
        uniform = generator.random(shape)
        return np.where(uniform < 0.15 + difference / 2, 1.0, np.where(uniform > 0.85 + difference / 2, -1.0, 0.0))

    return np.where(generator.random(shape) < likeness, drawn((*shape[:-1], 1)), drawn(shape))


Scene = tuple[str, str, int, Floats, Callable[[np.random.Generator, float], Floats]]


def _scenes() -> Iterator[Scene]:
    def equal(num: int) -> Floats:
        return np.full(num, 1 / num)

    for num, likeness in ((60, 0.6), (300, 0.6), (300, 1.0)):
        yield (
            f"mean of three prompts over one file, {likeness:.0%} the same",
            f"{num} items",
            num,
            equal(num),
            lambda g, d, num=num, likeness=likeness: answers(g, (num, 3), d, likeness).sum(axis=1) / (3 * num),
        )
    sizes = (40, 100, 1000)
    yield (
        "mean of three tasks of different sizes",
        "40, 100 and 1,000 items",
        sum(sizes),
        np.concatenate([np.full(n, 1 / (3 * n)) for n in sizes]),
        lambda g, d: np.concatenate([answers(g, (n, 1), d, 0.0)[:, 0] / (3 * n) for n in sizes]),
    )
    for num, of in ((10, 20), (40, 5), (200, 5)):
        yield (
            "clusters, 50% of whose items say the same",
            f"{num} of {of} items",
            num,
            equal(num),
            lambda g, d, num=num, of=of: answers(g, (num, of), d, 0.5).sum(axis=1) / (num * of),
        )
    many = np.random.default_rng(SEED).integers(1, 30, 40)
    yield (
        "clusters of 1 to 29 items, 50% of whose items say the same",
        f"40 clusters, {many.sum()} items",
        40,
        many / many.sum(),
        lambda g, d: np.where(np.arange(29) < many[:, None], answers(g, (40, 29), d, 0.5), 0).sum(axis=1) / many.sum(),
    )
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
    """`counts` of arrays: one element for each draw."""
    wins, losses, jumps = (np.asarray(part, np.float64) for part in (counts.wins, counts.losses, counts.jump))
    z, num_units = significance.z_of(LEVEL), counts.num_units
    high = jumps * significance.upper_limit(wins, losses, num_units, z)
    low = -jumps * significance.upper_limit(losses, wins, num_units, z)
    claimed = np.array(
        [significance.score_p(Counts(a, b, num_units, 1.0)) < LEVEL for a, b in zip(wins, losses, strict=True)]
    )
    excludes = (low > 0) | (high < 0)
    return Row(
        case=case,
        size=size,
        difference=difference,
        coverage=float(((low <= difference) & (difference <= high)).mean()),
        claimed=float(claimed.mean()),
        num_contradictions=int((excludes != claimed).sum()),
        num_draws=len(wins),
    )


# ----------------------------------------------------------------------------------------------------------- texts


def texts(num_draws: int) -> Iterator[Row]:
    """Bits per byte over documents whose lengths differ by factors; `tails`: how documents scatter about the mean."""
    generator = np.random.default_rng(SEED + 2)
    for name in TAILS:
        for n in (20, 50, 100):
            for difference in (0.0, 0.05):
                tally = np.zeros(3)
                for _ in range(num_draws):
                    found = text_of(name, n, difference, generator)
                    interval = found.interval(LEVEL)
                    assert interval is not None
                    low, high = interval
                    is_claimed = found.p < LEVEL
                    tally += [low <= difference <= high, is_claimed, is_claimed == (low <= 0 <= high)]
                share = tally / num_draws
                yield Row(
                    f"bits per byte, {name}", f"{n} documents", difference, share[0], share[1], int(tally[2]), num_draws
                )


SKEWED = "skewed (log-normal, sigma 1)"
TAILS: dict[str, Callable[[np.random.Generator, int], Floats]] = {
    "normal": lambda generator, n: generator.normal(0, 0.1, n),
    "heavy tails (Student's t, 3 degrees)": lambda generator, n: 0.06 * generator.standard_t(3, n),
    SKEWED: lambda generator, n: 0.05 * (generator.lognormal(0, 1, n) - math.exp(0.5)),
}


def text_of(tails: str, n: int, difference: float, generator: np.random.Generator) -> significance.BootstrapResult:
    return significance.difference_of_ratios(*text_of_rows(tails, n, difference, generator), generator)


def text_of_rows(tails: str, n: int, difference: float, generator: np.random.Generator) -> tuple[Floats, Floats]:
    """(documents, [nats, bytes]) of two models."""
    sizes = generator.lognormal(6, 0.7, n)
    rates = 1 + generator.normal(0, 0.3, n)
    first = np.stack([sizes * rates, sizes], axis=1)
    other = np.stack([sizes * (rates + difference + TAILS[tails](generator, n)), sizes], axis=1)
    return first, other


def texts_among_others(num_draws: int) -> Iterator[tuple[int, int, float, int]]:
    """(documents, tests, share claimed where there is no difference, draws): Holm holds the smallest of several p
    against 0.05 over their number. Of the texts above, the skewed alone: it is far tails that they do not show."""
    generator = np.random.default_rng(SEED + 4)
    for n in (20, 50, 100):
        p = np.array([text_of(SKEWED, n, 0.0, generator).p for _ in range(num_draws)])
        for num_tests in NUM_TESTS:
            yield n, num_tests, float((p < LEVEL / num_tests).mean()), num_draws


PROMISE = (
    "These figures come from simulation. An interval should contain the true difference in 95 % of draws. If "
    "there is no difference, at most 5 % of draws may report one. A contradiction is an interval that excludes 0 "
    f"although no difference is reported, or the reverse. Below {MIN_UNITS} items or clusters, or {MIN_DOCUMENTS} "
    "documents, no difference is reported."
)


def table_of_cases(rows: list[Row]) -> Table:
    headings = ["case", "size", "difference", "covered by 95 % interval", "called different", "contradictions", "draws"]
    cells = [
        [
            *(r.case, r.size, f"{r.difference:.2f}", f"{r.coverage:.3f}", f"{r.claimed:.3f}"),
            *(str(r.num_contradictions), f"{r.num_draws:,}"),
        ]
        for r in rows
    ]
    return measured_table("coverage and claims", headings, cells)


def table_of_levels(levels: list[tuple[int, int, float, int]]) -> Table:
    title = "skewed texts among several tests: how often one is called different from its like, at Holm's first level"
    rows = [
        [str(n), str(tests), f"{LEVEL / tests:.4f}", f"{share:.4f}", f"{share * tests / LEVEL:.1f}", f"{num:,}"]
        for n, tests, share, num in levels
    ]
    return measured_table(title, ["documents", "tests", "level", "found", "found / level", "draws"], rows)
