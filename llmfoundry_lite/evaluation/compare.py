"""Results of several models -> what can be said of their differences, item by item, each against the first.

A difference is called one when its p, corrected for the number of tests (Holm), is below 0.05. Its interval is at the
level that its p is held against, so that it excludes 0 exactly where a difference is called one.

Items, or clusters of them, are independent. An item that several tasks ask (with other examples, prompts or labels, but
of the same data) is one item: in the mean, what all of them say of it is added up first.

In a sequential comparison (`sequential.py`) a task's p and interval are of its look, and hold at all looks together.

`acc_per_token` divides an answer's log-probability by its number of tokens, so two tokenizers can make one distribution
over texts choose differently. Models with different tokenizers are compared by `acc_norm` (per character) in its place.
"""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation import paired as statistics
from llmfoundry_lite.evaluation.comparable import (
    answers_of,
    has_other_tokenizer,
    is_reference,
    note_on_unshared,
    notes_on,
    refuse_if_different,
    refuse_partial,
    text_units,
)
from llmfoundry_lite.evaluation.records import ACCURACIES, BITS, Record, bits_per_byte, has_categories
from llmfoundry_lite.evaluation.results import Results
from llmfoundry_lite.evaluation.sequential import (
    Plan,
    Rule,
    Stage,
    cut_to,
    from_record,
    in_order,
    noun_of,
    plan_task,
    unit_of_record,
)

SIGNIFICANT = 0.05
SEED = 17


@dataclass(slots=True, kw_only=True)
class Paired:
    """One number of two models over the items that both were asked; differences are `other` less `first`."""

    task: str
    metric: str
    n: int  # items; documents or windows of text for bits per byte
    first: float
    other: float
    difference: float
    low: float | None = None  # interval at `confidence`; None where too few items are independent
    high: float | None = None
    confidence: float = 0.95
    wins: int  # items on which `other` did better
    losses: int
    ties: int
    p: float
    test: str
    p_corrected: float = math.nan
    needed: int | None = None  # items that find a difference of 0.01 with 80 % power, in a test of its own
    error: float  # standard error of the difference
    interval: Callable[[float], tuple[float, float] | None] = field(repr=False)  # at a level, such as 0.05 for 95 %
    is_detected: bool = False
    stage: Stage | None = None  # the look at which a sequential comparison stopped

    @property
    def detectable(self) -> float | None:
        """The difference that so many items find with 80 % power at `confidence`."""
        return (statistics.z_of(1 - self.confidence) + statistics.Z_POWER) * self.error or None

    def settle(self, p_corrected: float, level: float) -> None:
        """Take the interval at its level, now that it is known how many tests there are."""
        self.p_corrected, self.confidence, self.is_detected = p_corrected, 1 - level, self.p < level
        if (found := self.interval(level)) is not None:
            self.low, self.high = found

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
        if self.low is None or self.high is None:
            return text
        if self.stage is not None:  # the interval of a look lies to one side of its difference
            ends = (abs(end) for end in sorted((self.low, self.high), key=abs))
            return f"{text} ({' to '.join(f'{end:.{self.digits}f}' for end in ends)})"
        return f"{text} ± {(self.high - self.low) / 2:.{self.digits}f}"

    @property
    def verdict(self) -> str:
        if self.is_detected:
            return f"{'better' if self.is_better else 'worse'} by {self.margin}"
        if self.stage is not None and is_within(self.stage.plan.margin, self.low, self.high):
            return f"no difference larger than {self.stage.plan.margin:g}"
        return "the same on every item" if self.ties == self.n else "no detectable difference"


@dataclass(slots=True, kw_only=True)
class Pair:
    """One result against the first."""

    first: str
    other: str
    tasks: list[Paired]  # each by its main metric
    mean: Paired | None  # the mean of the accuracies, each task counting the same
    more: list[Paired]  # the other metrics, if they were asked for
    notes: list[str] = field(default_factory=list)

    @property
    def rows(self) -> list[Paired]:
        """The tasks, and the mean if there is one."""
        return [*self.tasks, *filter(None, [self.mean])]

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


def is_within(margin: float | None, low: float | None, high: float | None) -> bool:
    return margin is not None and low is not None and high is not None and -margin < low and high < margin


def compare(
    results: Sequence[Results], *, skip: Sequence[str] = (), all_metrics: bool = False, sequential: Rule | None = None
) -> list[Pair]:
    """Compare each result with the first; with a `sequential` rule, by the items that it would have asked. Raises
    DataError for results that cannot be compared, naming task and reason."""
    known = {task for result in results for task in result.items}
    for task in skip:
        if task not in known:
            raise DataError(f"--skip {task}: no result has that task; they have {', '.join(sorted(known))}")
    commons = [[task for task in results[0].items if task in other.items and task not in skip] for other in results[1:]]
    rule = sequential and sequential.among(sum(map(len, commons)))
    pairs = [
        _compare_two(results[0], other, common, skip, all_metrics, rule)
        for other, common in zip(results[1:], commons, strict=True)
    ]
    # Whoever looks at all of these will look at the best of them.
    for family in (
        [paired for pair in pairs for paired in pair.tasks],
        [pair.mean for pair in pairs if pair.mean is not None],
        [paired for pair in pairs for paired in pair.more],
    ):
        corrected, levels = statistics.holm([paired.p for paired in family], SIGNIFICANT)
        for paired, *found in zip(family, corrected, levels, strict=True):
            paired.settle(*found)
    return pairs


def _compare_two(
    first: Results, other: Results, common: Sequence[str], skip: Sequence[str], all_metrics: bool, rule: Rule | None
) -> Pair:
    if not common:
        raise DataError(
            f"{first.name} and {other.name} have no task in common: {', '.join(first.items)} against "
            f"{', '.join(other.items)}"
        )
    texts_alone = has_other_tokenizer(first, other)
    for task in common:
        refuse_if_different(task, first, other)
        refuse_partial(task, first, other)
    tasks, stages = [], dict[str, Stage]()
    first_items, other_items = dict(first.items), dict(other.items)
    for task in common:
        metric = main_metric(first, task, texts_alone)
        stage = _find_stage(task, first, other, metric, rule)
        if stage is None:
            tasks.append(_pair_task(task, first, other, metric))
            continue
        ours, theirs = ({unit_of_record(item) for item in result.items[task]} for result in (first, other))
        units = in_order(list(ours & theirs))[: stage.plan.looks[stage.look - 1]]
        ours, theirs = cut_to(first, task, units), cut_to(other, task, units)
        tasks.append(_at_stage(_pair_task(task, ours, theirs, metric), stage))
        first_items |= ours.items
        other_items |= theirs.items
        stages[task] = stage
    more = [
        _pair_task(task.task, first, other, metric)
        for task in tasks
        for metric in ACCURACIES
        if all_metrics and not task.stage and metric != task.metric and metric in first.tasks[task.task]
        if not (texts_alone and metric == "acc_per_token")
    ]
    accuracies = [(task.task, task.metric) for task in tasks if task.metric != BITS]
    return Pair(
        first=first.name,
        other=other.name,
        tasks=tasks,
        mean=_pair_answers(accuracies, first, other)[0] if len(accuracies) > 1 and not stages else None,
        more=more,
        notes=[
            *notes_on(replace(first, items=first_items), replace(other, items=other_items), common, skip),
            *(f"{task}: {note}" for task in stages if (note := note_on_unshared(task, first, other))),
            *(f"{task}: {stage.words}" for task, stage in stages.items()),
        ],
    )


def main_metric(result: Results, task: str, texts_alone: bool) -> str:
    metric: str = result.tasks[task]["metric"]
    return "acc_norm" if texts_alone and metric == "acc_per_token" else metric


# ------------------------------------------------------------------------------------------------------- sequential


def _find_stage(task: str, first: Results, other: Results, metric: str, rule: Rule | None) -> Stage | None:
    """Return where `other` stopped when it was asked against `first`; of whole results where `rule` would have."""
    if is_reference(task, first, other):
        return from_record(other.tasks[task])
    if rule is None:
        return None
    theirs = {item["index"] for item in other.items[task]}
    units = [unit_of_record(item) for item in first.items[task] if item["index"] in theirs]
    plan = plan_task(task, noun_of(first.items[task], metric), units, rule)
    answer = lambda wanted: cut_to(other, task, wanted).items[task]  # noqa: E731
    return look_until_decided(plan, task, first, other, metric, units, answer)[0]


def look_until_decided(
    plan: Plan,
    task: str,
    first: Results,
    other: Results,
    metric: str,
    units: Sequence[str],
    answer: Callable[[Sequence[str]], list[Record]],
) -> tuple[Stage, str]:
    """Return where the plan stops, and what was decided. `answer` gives the items of `other` in these units."""
    ordered = in_order(units)
    for look, num in enumerate(plan.looks, start=1):
        items = answer(ordered[:num])
        now = replace(other, items={task: items})
        decision = _decide(plan, look, task, cut_to(first, task, ordered[:num]), now, metric, first)
        if decision or look == len(plan.looks):
            return Stage(plan=plan, look=look, num_asked=len(items)), decision
    raise AssertionError("a plan has a look")


def _decide(plan: Plan, look: int, task: str, first: Results, other: Results, metric: str, whole: Results) -> str:
    """Return what the items asked so far say: better, worse, no difference larger than the margin; empty: ask more."""
    if has_categories(whole.tasks[task]):
        shown, known = ({item["category"] for item in result.items[task]} for result in (first, whole))
        if shown != known:  # a mean of categories is another number while one of them has no item yet
            return ""
    level = plan.nominal(look, plan.level)
    if level < (1 / statistics.NUM_RESAMPLES if metric == BITS else 0):  # no bootstrap could be as sure
        return ""
    paired = _pair_task(task, first, other, metric)
    if paired.p < level:
        return "better" if paired.is_better else "worse"
    interval = paired.interval(level) if plan.margin is not None and level > 0 else None
    return f"no difference larger than {plan.margin:g}" if is_within(plan.margin, *(interval or (None, None))) else ""


def _at_stage(paired: Paired, stage: Stage) -> Paired:
    """Return the same numbers, with p and interval of that look."""

    def repeated(level: float) -> tuple[float, float] | None:
        nominal = stage.plan.nominal(stage.look, level)
        return paired.interval(nominal) if nominal > 0 else None

    p = stage.plan.adjusted(paired.p, stage.look)
    return replace(paired, p=p, test=f"{paired.test}, sequential", interval=repeated, stage=stage)


# ---------------------------------------------------------------------------------------------------------- numbers


def _pair_task(task: str, first: Results, other: Results, metric: str) -> Paired:
    if metric == BITS:
        return _pair_texts(task, first, other)
    paired, counts = _pair_answers([(task, metric)], first, other)
    if discordant := counts.wins + counts.losses:
        units = statistics.items_needed(float(discordant) / counts.num_units, 0.01 / float(counts.jump))
        paired.needed = math.ceil(units * paired.n / counts.num_units)
    return paired


def _pair_answers(asked: Sequence[tuple[str, str]], first: Results, other: Results) -> tuple[Paired, statistics.Counts]:
    """Compare the mean of the accuracies by (task, metric), each counting the same."""
    answers = [answers_of(task, first, other, metric) for task, metric in asked]
    unit_of: dict[tuple[str, int], tuple[str, int | str]] = {}
    for task in answers:  # clusters that one task knows hold for all of the same data
        if task.clusters is not None:
            unit_of |= {item: (item[0], cluster) for item, cluster in zip(task.items, task.clusters, strict=True)}
    added: dict[tuple[str, int | str], float] = {}
    share: dict[tuple[str, int | str], float] = {}
    for task in answers:
        weights = task.weights / len(answers)
        for item, change, weight in zip(task.items, weights * (task.other - task.first), weights, strict=True):
            unit = unit_of.get(item, item)
            added[unit] = added.get(unit, 0.0) + change
            share[unit] = share.get(unit, 0.0) + weight
    # Rounded, so that what cancels out is 0.
    counts = statistics.count(np.round(list(added.values()), 15), np.array(list(share.values())))
    ours = sum(float(task.weights @ task.first) for task in answers) / len(answers)
    theirs = sum(float(task.weights @ task.other) for task in answers) / len(answers)
    name, metric = asked[0] if len(asked) == 1 else (f"mean of {len(asked)} tasks", "mean")
    paired = Paired(
        task=name,
        metric=metric,
        first=ours,
        other=theirs,
        difference=theirs - ours,
        **_count_won(np.concatenate([task.other - task.first for task in answers])),
        p=statistics.score_p(counts),
        test="score",
        error=math.sqrt(max(0.0, float(counts.variance))),
        interval=lambda level: statistics.score_interval(counts, level),
    )
    return paired, counts


def _count_won(gains: statistics.Floats) -> dict[str, Any]:
    wins, losses = int((gains > 0).sum()), int((gains < 0).sum())
    return {"n": len(gains), "wins": wins, "losses": losses, "ties": len(gains) - wins - losses}


def _pair_texts(task: str, first: Results, other: Results) -> Paired:
    """Compare bits per byte, resampled by document; within a single document by window."""
    a, b, _ = text_units(task, first, other)
    bits = np.array([1 / math.log(2), 1.0])
    # A function of the task, so that one more task or result changes no other number.
    generator = np.random.default_rng([SEED, zlib.crc32(f"{task} {BITS}".encode())])
    found = statistics.difference_of_ratios(a * bits, b * bits, generator)
    deviation = found.error * math.sqrt(len(a))
    return Paired(
        task=task,
        metric=BITS,
        first=float(bits_per_byte(a.sum(axis=0))),
        other=float(bits_per_byte(b.sum(axis=0))),
        difference=found.difference,
        **_count_won(a[:, 0] / a[:, 1] - b[:, 0] / b[:, 1]),
        p=found.p,
        test="studentised bootstrap",
        needed=statistics.documents_needed(deviation) if len(a) > 1 and deviation else None,
        error=found.error,
        interval=found.interval,
    )


def p_text(p: float) -> str:
    return "<.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"
