"""Does stopping when decided keep what it promises? Simulated where the truth is known, and on pairs of real results.

python -m benchmarks sequential --out docs/measurements
python -m benchmarks sequential results/suite/ba100.json results/suite/ba200.json   # every two of them, besides

Counted: how often equal models are called different, how often a verdict is the one that all items would have given,
how often the repeated confidence interval holds the true difference, and the share of the items that were asked. A
pair's items are also drawn anew: as they are, and with the two models exchanged at random, which makes them equal.
Nothing here needs a model or a GPU.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.intervals import SCENES, SKEWED, text_of_rows
from llmfoundry_lite.evaluation import significance
from llmfoundry_lite.evaluation.compare import Paired, compare
from llmfoundry_lite.evaluation.records import ACCURACIES
from llmfoundry_lite.evaluation.results import load_results
from llmfoundry_lite.evaluation.sequential import LOOKS, OBRIEN_FLEMING, SPENDING, Rule, boundaries, plan_task
from llmfoundry_lite.evaluation.significance import Counts, Floats
from llmfoundry_lite.report.tables import Table
from llmfoundry_machines.bench.frame import describe_conditions, measured_table, open_console, tell

LEVEL, SEED = 0.05, 17
SIZES = (0.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
"""Size of a difference, in standard errors of all items."""
FEWER_DRAWS = 20
"""There are so many times fewer draws of clusters and of texts, which cost 10,000 resamples a look."""


class Row(NamedTuple):
    case: str
    spending: str
    size: float
    """The difference in standard errors of all items."""
    difference: float
    better: float
    worse: float
    by_all: float
    """How often the single test of all items claims the true direction; either, where there is no difference."""
    same: float
    """Share of the claims that all items make as well; NaN without any."""
    covered: float
    asked: float
    num_draws: int


def run(results: Sequence[Path] = (), *, num_draws: int = 20_000, out: Path | None = None) -> list[Row]:
    """Simulate, print tables, write sequential.json and .md to `out`."""
    console, rows = open_console(), []
    pairs = list(real_pairs(results))
    for row in [*items(num_draws), *clusters(num_draws // FEWER_DRAWS), *texts(num_draws // FEWER_DRAWS)]:
        console.print(f"{row.case}, {row.spending}, {row.size:.1f} errors: {row.asked:.0%} asked", markup=False)
        rows.append(row)
    drawn_anew = list(anew(pairs, num_draws))
    tables = [table_of_rows("simulated tasks", rows)]
    if pairs:
        tables += [table_of_pairs(pairs), table_of_rows("the items of those pairs, drawn anew", by_size(drawn_anew))]
    notes = summary([*rows, *drawn_anew], pairs)
    report = describe_conditions() | {"cases": [row._asdict() for row in rows]}
    report |= {"anew": [row._asdict() for row in drawn_anew], "pairs": [pair._asdict() for pair in pairs]}
    tell(
        report,
        *tables,
        [PROMISE, *notes],
        name="sequential",
        heading="Stopping when decided: what is promised, and what is kept",
        command="python -m benchmarks sequential" + (" RESULT.json ..." if pairs else ""),
        out=out,
    )
    return rows


# ------------------------------------------------------------------------------------------------------- simulated


def items(num_draws: int) -> Iterator[Row]:
    """One task of so many items, of which a share is right in one model alone."""
    generator = np.random.default_rng(SEED)
    for (n, discordance), spending in itertools.product(((273, 0.2), (1000, 0.1), (4000, 0.3)), SPENDING):
        for size in SIZES:
            difference = size * math.sqrt(discordance / n)
            if difference < discordance:
                won, lost = (discordance + difference) / 2, (discordance - difference) / 2
                case = f"{n:,} items, {discordance:.0%} discordant"
                yield drawn(case, spending, n, won, lost, num_draws, generator)


def drawn(
    case: str, spending: str, n: int, won: float, lost: float, num_draws: int, generator: np.random.Generator
) -> Row:
    """Items of which the other model alone is right in a share `won`, and the first in `lost`."""
    looks = np.ceil(np.array(LOOKS) * n - 1e-9).astype(int)
    steps = np.stack(
        [generator.multinomial(num, [won, lost, 1 - won - lost], num_draws) for num in np.diff([0, *looks])], axis=1
    )
    counts = np.cumsum(steps, axis=1).astype(np.float64)
    shares = tuple((looks / n).tolist())
    limits = np.array(boundaries(shares, LEVEL, spending))
    wins, losses = counts[:, :, 0], counts[:, :, 1]
    with np.errstate(divide="ignore", invalid="ignore"):
        distances = np.maximum(np.abs(wins - losses) - significance.CORRECTION, 0) / np.sqrt(wins + losses)
    is_beyond = np.nan_to_num(distances) > limits
    last = np.where(is_beyond.any(axis=1), is_beyond.argmax(axis=1), len(looks) - 1)
    each = np.arange(num_draws)
    low, high = np.empty(num_draws), np.empty(num_draws)
    for look in np.unique(last).tolist():
        of = last == look
        limit = (wins[of, look], losses[of, look], int(looks[look]), float(limits[look]))
        high[of] = significance.upper_limit(*limit)
        low[of] = -significance.upper_limit(limit[1], limit[0], *limit[2:])
    verdicts = np.where(is_beyond[each, last], np.sign(wins - losses)[each, last], 0)
    full = np.where(np.nan_to_num(distances[:, -1]) > significance.z_of(LEVEL), np.sign(wins - losses)[:, -1], 0)
    return judged(
        case, spending, n, won - lost, math.sqrt((won + lost) / n), verdicts, full, (low, high), looks[last] / n
    )


def judged(
    case: str,
    spending: str,
    n: int,
    difference: float,
    error: float,
    verdicts: Floats,
    full: Floats,
    interval: tuple[Floats, Floats],
    asked: Floats,
) -> Row:
    claims = verdicts != 0
    return Row(
        case=case,
        spending=spending.replace("_", " "),
        size=difference / error,
        difference=difference,
        better=float((verdicts > 0).mean()),
        worse=float((verdicts < 0).mean()),
        by_all=float((full * (np.sign(difference) or full) > 0).mean()),
        same=float((verdicts == full)[claims].mean()) if claims.any() else math.nan,
        covered=float(((interval[0] <= difference) & (difference <= interval[1])).mean()),
        asked=float(asked.mean()),
        num_draws=len(verdicts),
    )


def clusters(num_draws: int) -> Iterator[Row]:
    """Items that belong together, as `python -m benchmarks intervals` draws them: they come together."""
    generator = np.random.default_rng(SEED + 1)
    scenes = [scene for scene in SCENES if scene[0].startswith("clusters") and scene[2] >= 40]
    for (case, size, num_units, shares, draw), difference in itertools.product(scenes, (0.0, 0.1)):
        looks = [math.ceil(share * num_units - 1e-9) for share in LOOKS]
        limits = boundaries(tuple(look / num_units for look in looks), LEVEL)
        found = []
        for _ in range(num_draws):
            added = draw(generator, difference)
            prefixes = [_counts(added[:look], shares[:look]) for look in looks]
            z = [significance.z_of(significance.score_p(counts)) for counts in prefixes]
            last = next((k for k in range(len(looks)) if z[k] > limits[k]), len(looks) - 1)
            sign = np.sign(prefixes[last].wins - prefixes[last].losses)
            full = np.sign(added.sum()) * (z[-1] > significance.z_of(LEVEL))
            interval = significance.score_interval(prefixes[last], math.erfc(limits[last] / math.sqrt(2)))
            low, high = interval or (-math.inf, math.inf)
            found.append((sign * (z[last] > limits[last]), full, low, high, shares[: looks[last]].sum()))
        verdicts, full, low, high, asked = np.array(found).T
        error = float(np.std([draw(generator, difference).sum() for _ in range(200)]))
        yield judged(
            f"{case}, {size}", OBRIEN_FLEMING, num_units, difference, error, verdicts, full, (low, high), asked
        )


def _counts(added: Floats, shares: Floats) -> Counts:
    return significance.count(added / shares.sum(), shares / shares.sum())


def texts(num_draws: int) -> Iterator[Row]:
    """Bits per byte of 50 documents that scatter with a long tail."""
    generator = np.random.default_rng(SEED + 2)
    plan = plan_task("texts", "document", [str(i) for i in range(50)], Rule(level=LEVEL))
    looks, levels = plan.looks, [plan.nominal(k + 1, LEVEL) for k in range(len(plan.looks))]
    for difference in (0.0, 0.05):
        found = []
        for _ in range(num_draws):
            first, other = text_of_rows(SKEWED, 50, difference, generator)
            at = [significance.difference_of_ratios(first[:look], other[:look], generator) for look in looks]
            last = next((k for k, level in enumerate(levels) if at[k].p < level), len(looks) - 1)
            low, high = at[last].interval(levels[last]) or (-math.inf, math.inf)
            verdict = np.sign(at[last].difference) * (at[last].p < levels[last])
            full = np.sign(at[-1].difference) * (at[-1].p < LEVEL)
            found.append((verdict, full, low, high, looks[last] / 50, at[-1].error))
        verdicts, full, low, high, asked, errors = np.array(found).T
        name = f"bits per byte, {SKEWED}, 50 documents"
        error = float(np.median(errors))
        yield judged(name, OBRIEN_FLEMING, 50, difference, error, verdicts, full, (low, high), asked)


# ------------------------------------------------------------------------------------------------------ real pairs


class RealPair(NamedTuple):
    first: str
    other: str
    task: str
    metric: str
    n: int
    won: float
    """Shares of the items."""
    lost: float
    size: float
    """The difference in its standard errors."""
    by_all: str
    """Verdict of the single test."""
    sequential: str
    asked: float


def real_pairs(paths: Sequence[Path]) -> Iterator[RealPair]:
    """Every two of the results and each of their tasks, as a comparison of its own."""
    for first, other in itertools.combinations(load_results(paths), 2):
        for task in first.items:
            if task not in other.items:
                continue
            skip = [name for name in {*first.items, *other.items} if name != task]
            ((full,), (found,)) = (
                pair.tasks for rule in (None, Rule()) for pair in compare([first, other], skip=skip, sequential=rule)
            )
            assert found.stage is not None
            yield RealPair(
                first=first.name,
                other=other.name,
                task=task,
                metric=full.metric,
                n=full.n,
                won=full.wins / full.n,
                lost=full.losses / full.n,
                size=abs(full.difference) / full.error if full.error else 0.0,
                by_all=_verdict(full),
                sequential=_verdict(found),
                asked=found.stage.num_asked / found.stage.plan.num_items,
            )


def _verdict(found: Paired) -> str:
    return ("better" if found.is_better else "worse") if found.is_detected else "none"


def anew(pairs: Sequence[RealPair], num_draws: int) -> Iterator[Row]:
    """Each pair's right and wrong answers, drawn with replacement: as they are, and with the models exchanged at random
    for each item."""
    generator = np.random.default_rng(SEED + 3)
    for pair, spending in itertools.product(pairs, SPENDING):
        if pair.metric not in ACCURACIES or not pair.won + pair.lost:
            continue
        name, half = f"{pair.other} against {pair.first}, {pair.task}", (pair.won + pair.lost) / 2
        more, less = max(pair.won, pair.lost), min(pair.won, pair.lost)
        yield drawn(name, spending, pair.n, half, half, num_draws, generator)
        yield drawn(name, spending, pair.n, more, less, num_draws, generator)


BANDS = ((0.0, 0.0), (0.0, 1.0), (1.0, 2.0), (2.0, 3.0), (3.0, 5.0), (5.0, 8.0), (8.0, math.inf))


def by_size(rows: Sequence[Row]) -> list[Row]:
    """Means over the rows of a size."""
    found = []
    for spending, (low, high) in itertools.product(dict.fromkeys(row.spending for row in rows), BANDS):
        those = [
            row for row in rows if row.spending == spending and (low < row.size <= high or row.size == low == high)
        ]
        if not those:
            continue
        mean = {key: float(np.mean([getattr(row, key) for row in those])) for key in Row._fields[2:-1] if key != "same"}
        of = "exchanged at random" if low == high else f"{low:g} to {high:g} errors apart"
        found.append(
            Row(
                case=f"{of}: {len(those)} pair{'' if len(those) == 1 else 's'}",
                spending=spending,
                **mean,
                same=mean_same(those, [(row.better + row.worse) * row.num_draws for row in those]),
                num_draws=sum(row.num_draws for row in those),
            )
        )
    return found


def mean_same(rows: Sequence[Row], claims: Sequence[float]) -> float:
    """Return the share of the rows' claims that all items make as well; NaN without any."""
    same = sum(row.same * claim for row, claim in zip(rows, claims, strict=True) if claim)
    return same / sum(claims) if sum(claims) else math.nan


# ---------------------------------------------------------------------------------------------------------- report

PROMISE = (
    "After each tenth of the items there is a look, from 6 items or clusters, or 20 documents, on. All looks together "
    "should call equal models different in at most 5 % of draws: 2.5 % better, 2.5 % worse. The interval of the look "
    "at which a task stops should hold the true difference in 95 %. By all items: the single test at 5 %, which looks "
    "once. The same verdict: of the claims, those that all items make too."
)


MIN_DRAWS = 1000
"""With fewer draws, the largest of several shares is mostly chance."""


def summary(rows: Sequence[Row], pairs: Sequence[RealPair]) -> list[str]:
    """Sum the tables up in sentences."""
    nothing = [row for row in rows if row.size == 0 and row.num_draws >= MIN_DRAWS]
    notes = []
    if nothing:
        better, either = max(row.better for row in nothing), max(row.better + row.worse for row in nothing)
        notes.append(
            f"No difference, {len(nothing)} cases of {MIN_DRAWS:,} draws and more: called better in at most "
            f"{better:.1%}, called different in at most {either:.1%}."
        )
    for spending in dict.fromkeys(row.spending for row in rows):
        those = [row for row in rows if row.spending == spending and row.size > 0]
        same = mean_same(those, [row.better + row.worse for row in those])
        large = [row for row in those if row.size >= 8]
        notes.append(
            f"{spending}: where there is a difference, {same:.1%} of the claims are those of all items; of differences "
            f"of 8 standard errors and more it asks {np.mean([row.asked for row in large]):.0%} of the items."
        )
    if pairs:
        decided = [pair for pair in pairs if pair.sequential != "none"]
        agree = sum(pair.sequential == pair.by_all for pair in decided)
        same_in_all = sum(pair.sequential == pair.by_all for pair in pairs)
        notes.append(
            f"Real pairs: {len(decided)} of {len(pairs)} are decided, {agree} of them as by all items; of all pairs "
            f"{same_in_all} have the verdict of all items."
        )
    return notes


def table_of_rows(title: str, rows: Sequence[Row]) -> Table:
    headings = ["case", "spending", "errors apart", "difference", "better", "worse", "by all items"]
    headings += ["same verdict", "covered", "items asked", "draws"]
    cells = [
        [
            *(r.case, r.spending, f"{r.size:.1f}", f"{r.difference:.3f}", f"{r.better:.3f}", f"{r.worse:.3f}"),
            *(f"{r.by_all:.3f}", "" if math.isnan(r.same) else f"{r.same:.3f}", f"{r.covered:.3f}"),
            *(f"{r.asked:.0%}", f"{r.num_draws:,}"),
        ]
        for r in rows
    ]
    return measured_table(title, headings, cells, num_keys=4)


def table_of_pairs(pairs: Sequence[RealPair]) -> Table:
    headings = ["pair", "task", "items", "errors apart", "by all items", "sequential", "items asked"]
    rows = [
        [f"{p.other} against {p.first}", p.task, f"{p.n:,}", f"{p.size:.1f}", p.by_all, p.sequential, f"{p.asked:.0%}"]
        for p in sorted(pairs, key=lambda pair: pair.size)
    ]
    return measured_table("real pairs, obrien fleming", headings, rows, num_keys=2)
