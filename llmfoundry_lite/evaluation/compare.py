"""Results of several models -> what can be said of their differences, item by item, each against the first.

Owns the numbers and the words for what was found: a difference is called one when its p, corrected for the number of
tests, is below 0.05, and not otherwise.

Accuracies of models with different tokenizers: `acc_per_token` divides an answer's log-probability by its number of
tokens, so two tokenizers can make one distribution over texts choose differently. `acc_norm` (per character) is
compared in its place; the sum, exact answers and bits per byte are of texts as well.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation import paired as statistics
from llmfoundry_lite.evaluation.comparable import has_other_tokenizer, notes_on, refuse_if_different, text_units
from llmfoundry_lite.evaluation.paired import Floats
from llmfoundry_lite.evaluation.reading import ACCURACIES, BITS, Loaded, bits_per_byte

SIGNIFICANT = 0.05
SEED = 17


@dataclass(slots=True, kw_only=True)
class Paired:
    """One number of two models over the items that both were asked; differences are `other` less `first`."""

    task: str
    metric: str
    n: int
    """Items; documents or windows of text for bits per byte."""
    first: float
    other: float
    difference: float
    low: float | None
    """95 % interval; None when it cannot be had."""
    high: float | None
    wins: int
    """Items on which `other` did better."""
    losses: int
    ties: int
    p: float
    test: str
    p_corrected: float = math.nan
    needed: int | None
    """Items to find a difference of 0.01 with 80 % power."""
    detectable: float | None
    """The difference that this many items find with 80 % power."""

    @property
    def is_detected(self) -> bool:
        return self.p_corrected < SIGNIFICANT

    @property
    def is_better(self) -> bool:
        """Whether `other` has the better number."""
        return (self.difference < 0) == (self.metric == BITS)

    @property
    def digits(self) -> int:
        return 4 if self.metric == BITS else 3

    @property
    def margin(self) -> str:
        """The difference without its sign, as text."""
        text = f"{abs(self.difference):.{self.digits}f}"
        return (
            text if self.low is None or self.high is None else f"{text} ± {(self.high - self.low) / 2:.{self.digits}f}"
        )

    @property
    def verdict(self) -> str:
        if self.is_detected:
            return f"{'better' if self.is_better else 'worse'} by {self.margin}"
        return "the same on every item" if self.ties == self.n else "no detectable difference"


@dataclass(slots=True, kw_only=True)
class Pair:
    """One result against the first."""

    first: str
    other: str
    tasks: list[Paired]
    """By each task's main metric."""
    mean: Paired | None
    """Of the accuracies, each task counting the same."""
    more: list[Paired]
    """By the other metrics, if they were asked for."""
    notes: list[str] = field(default_factory=list)

    @property
    def sentence(self) -> str:
        if self.mean is None:
            return ""
        where = f"on the {self.mean.task} (p {p_text(self.mean.p_corrected)})"
        if not self.mean.is_detected:
            if self.mean.detectable is None:
                return f"{self.other} and {self.first}: the same answers {where}"
            least = f"one of {self.mean.detectable:.3f} would be found four times in five"
            return f"{self.other} and {self.first}: no detectable difference {where}; {least}"
        direction = "better" if self.mean.is_better else "worse"
        return f"{self.other} is {direction} than {self.first} by {self.mean.margin} {where}"


def compare(results: Sequence[Loaded], *, skip: Sequence[str] = (), all_metrics: bool = False) -> list[Pair]:
    """Each result against the first. Raises DataError for results that cannot be compared, naming task and reason."""
    known = {task for result in results for task in result.items}
    for task in skip:
        if task not in known:
            raise DataError(f"--skip {task}: no result has that task; they have {', '.join(sorted(known))}")
    pairs = [_compare_two(results[0], other, skip, all_metrics) for other in results[1:]]
    # Whoever looks at all of these will look at the best of them.
    for family in (
        [paired for pair in pairs for paired in pair.tasks],
        [pair.mean for pair in pairs if pair.mean is not None],
        [paired for pair in pairs for paired in pair.more],
    ):
        for paired, p in zip(family, statistics.holm([paired.p for paired in family]), strict=True):
            paired.p_corrected = p
    return pairs


def _compare_two(first: Loaded, other: Loaded, skip: Sequence[str], all_metrics: bool) -> Pair:
    common = [task for task in first.items if task in other.items and task not in skip]
    if not common:
        raise DataError(
            f"{first.name} and {other.name} have no task in common: {', '.join(first.items)} against "
            f"{', '.join(other.items)}"
        )
    texts_alone = has_other_tokenizer(first, other)
    for task in common:
        refuse_if_different(task, first, other)
    tasks = [_pair_task(task, first, other, main_metric(first, task, texts_alone)) for task in common]
    more = [
        _pair_task(task.task, first, other, metric)
        for task in tasks
        for metric in ACCURACIES
        if all_metrics and metric != task.metric and metric in first.facts["tasks"][task.task]
        if not (texts_alone and metric == "acc_per_token")
    ]
    accuracies = [task for task in tasks if task.metric != BITS]
    return Pair(
        first=first.name,
        other=other.name,
        tasks=tasks,
        mean=_pair_mean(accuracies, first, other) if len(accuracies) > 1 else None,
        more=more,
        notes=notes_on(first, other, common, skip),
    )


def main_metric(result: Loaded, task: str, texts_alone: bool) -> str:
    metric: str = result.facts["tasks"][task]["metric"]
    return "acc_norm" if texts_alone and metric == "acc_per_token" else metric


# ---------------------------------------------------------------------------------------------------------- numbers


def _pair_task(task: str, first: Loaded, other: Loaded, metric: str) -> Paired:
    if metric == BITS:
        return _pair_texts(task, first, other)
    a, b = _answers(task, first, other, metric)
    difference, n = b - a, len(a)
    wins, losses = int((difference > 0).sum()), int((difference < 0).sum())
    mean = float(difference.mean())
    low, high = (
        statistics.interval(statistics.bootstrap_sums(difference[:, None], _generator(task, metric))[:, 0] / n)
        if n > 1
        else (None, None)
    )
    return Paired(
        task=task,
        metric=metric,
        n=n,
        first=float(a.mean()),
        other=float(b.mean()),
        difference=mean,
        low=low,
        high=high,
        wins=wins,
        losses=losses,
        ties=n - wins - losses,
        p=statistics.mcnemar_p(wins, losses),
        test="McNemar",
        needed=statistics.items_needed((wins + losses) / n) if wins + losses else None,
        detectable=_detectable(float(difference.std()) / math.sqrt(n)),
    )


def _answers(task: str, first: Loaded, other: Loaded, metric: str) -> tuple[Floats, Floats]:
    """(of the first, of the other), over the items that both have."""
    a = {item["index"]: item[metric] for item in first.items[task]}
    b = {item["index"]: item[metric] for item in other.items[task]}
    common = [index for index in a if index in b]
    if not common:
        raise DataError(f"{task}: {first.name} and {other.name} were asked no item in common")
    return np.array([a[i] for i in common], float), np.array([b[i] for i in common], float)


def _pair_texts(task: str, first: Loaded, other: Loaded) -> Paired:
    """Bits per byte, resampled by document; within a single document by window."""
    a, b, _ = text_units(task, first, other)
    ours, theirs = bits_per_byte(a.sum(axis=0)), bits_per_byte(b.sum(axis=0))
    n = len(a)
    # `added`: what each unit adds to the difference; `residual`: beyond what the mean rates give for its bytes, which
    # is how far a ratio of sums moves with the unit.
    share_a, share_b = a / a[:, 1].mean(), b / b[:, 1].mean()
    added = (share_b[:, 0] - share_a[:, 0]) / math.log(2)
    residual = added - (theirs * share_b[:, 1] - ours * share_a[:, 1])
    rates = b[:, 0] / b[:, 1] - a[:, 0] / a[:, 1]
    low, high, p = None, None, 1.0
    if n > 1:
        draws = statistics.bootstrap_sums(np.concatenate([a, b], axis=1), _generator(task, BITS))
        low, high = statistics.interval(bits_per_byte(draws[:, 2:]) - bits_per_byte(draws[:, :2]))
        p = statistics.sign_flip_p(added, _generator(task, "flips"))
    deviation = float(residual.std(ddof=1)) if n > 1 else 0.0
    return Paired(
        task=task,
        metric=BITS,
        n=n,
        first=float(ours),
        other=float(theirs),
        difference=float(theirs - ours),
        low=low,
        high=high,
        wins=int((rates < 0).sum()),
        losses=int((rates > 0).sum()),
        ties=int((rates == 0).sum()),
        p=p,
        test="sign flips",
        needed=statistics.documents_needed(deviation) if n > 1 and deviation else None,
        detectable=_detectable(deviation / math.sqrt(n)),
    )


def _pair_mean(tasks: Sequence[Paired], first: Loaded, other: Loaded) -> Paired:
    """The mean of the tasks' accuracies. Tasks are strata; those that differ in their number of examples alone ask the
    same items, which are therefore drawn together."""
    strata: dict[str, dict[int, float]] = {}
    for task in tasks:
        stratum = strata.setdefault(task.task.rsplit("/", 1)[0], {})
        theirs = {item["index"]: item[task.metric] for item in other.items[task.task]}
        for item in first.items[task.task]:
            if (index := item["index"]) in theirs:
                added = (theirs[index] - item[task.metric]) / task.n / len(tasks)
                stratum[index] = stratum.get(index, 0.0) + added
    # Rounding, so that sums of the same parts count as one value.
    values: dict[str, Floats] = {
        name: np.array([round(added, 15) for added in stratum.values()], np.float64) for name, stratum in strata.items()
    }
    draws, flips = np.zeros(statistics.NUM_RESAMPLES), np.zeros(statistics.NUM_RESAMPLES)
    for name, added in values.items():
        draws += statistics.bootstrap_sums(added[:, None], _generator(name, "mean"))[:, 0]
        flips += statistics.flipped_sums(added, _generator(name, "flips of the mean"))
    difference = sum(task.difference for task in tasks) / len(tasks)
    low, high = statistics.interval(draws)
    return Paired(
        task=f"mean of {len(tasks)} tasks",
        metric="mean",
        n=sum(task.n for task in tasks),
        first=sum(task.first for task in tasks) / len(tasks),
        other=sum(task.other for task in tasks) / len(tasks),
        difference=difference,
        low=low,
        high=high,
        wins=sum(task.wins for task in tasks),
        losses=sum(task.losses for task in tasks),
        ties=sum(task.ties for task in tasks),
        p=statistics.p_among(flips, difference),
        test="sign flips",
        needed=None,
        detectable=_detectable(float(draws.std())),
    )


def _detectable(error: float) -> float | None:
    return (statistics.Z_TWO_SIDED + statistics.Z_POWER) * error or None


def _generator(task: str, purpose: str) -> np.random.Generator:
    """A function of task and purpose, so that one more task or result changes no other number."""
    return np.random.default_rng([SEED, zlib.crc32(f"{task} {purpose}".encode())])


def p_text(p: float) -> str:
    return "<.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"
