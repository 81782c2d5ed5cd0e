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
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmfoundry_lite.data.spelling import percent
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation import significance
from llmfoundry_lite.evaluation.records import (
    ACCURACIES,
    BITS,
    Record,
    bits_per_byte,
    by_document,
    cut_at,
    has_categories,
    lost_share,
    num_unasked,
    text_row,
    weights_of,
)
from llmfoundry_lite.evaluation.results import Results, load_any
from llmfoundry_lite.evaluation.sequential import (
    Plan,
    Rule,
    Stage,
    cut_to,
    from_record,
    in_order,
    noun_of,
    plan_task,
    unit_of,
)
from llmfoundry_lite.evaluation.significance import MIN_DOCUMENTS, MIN_UNITS, Floats

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
    counts: significance.Counts | None = field(default=None, repr=False)  # of accuracies
    is_detected: bool = False
    lost_text: float = 0.0  # bits per byte that text may be worth which one of two tokenizers does not spell
    is_comparable: bool = True
    stage: Stage | None = None  # the look at which a sequential comparison stopped

    @property
    def detectable(self) -> float | None:
        """The difference that so many items find with 80 % power at `confidence`."""
        return (significance.z_of(1 - self.confidence) + significance.Z_POWER) * self.error or None

    def decide(self, p_corrected: float, level: float) -> None:
        """Take the interval at its level, now that it is known how many tests there are."""
        self.p_corrected, self.confidence, self.is_detected = p_corrected, 1 - level, self.p < level
        if (found := self.interval(level)) is not None:
            self.low, self.high = found
        low, high = found or (self.difference, self.difference)
        room = min(abs(low), abs(high)) if self.is_detected else max(abs(self.difference), (high - low) / 2)
        self.is_comparable = not self.lost_text or self.lost_text < room
        self.is_detected = self.is_detected and self.is_comparable

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
        if not self.is_comparable:
            return "not comparable: text is lost"
        if self.is_detected:
            return f"{'better' if self.is_better else 'worse'} by {self.margin}"
        if self.stage is not None and is_within(self.stage.plan.margin, self.low, self.high):
            return f"no difference larger than {self.stage.plan.margin:g}"
        return "the same on every item" if self.ties == self.n else "no detectable difference"


@dataclass(slots=True, kw_only=True, repr=False)
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

    def __repr__(self) -> str:
        """Return the table that `llmfoundry-lite compare` prints."""
        from llmfoundry_lite.evaluation.tables import text_of  # which imports this module

        return text_of([self])


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
        corrected, levels = significance.holm([paired.p for paired in family], SIGNIFICANT)
        for paired, *found in zip(family, corrected, levels, strict=True):
            paired.decide(*found)
    return pairs


def compare_files(
    first: str | os.PathLike[str],
    other: str | os.PathLike[str],
    *,
    skip: str | Sequence[str] = (),
    all_metrics: bool = False,
    cluster: str | None = None,
) -> Pair:
    """Compare two evaluation results item by item, as `llmfoundry-lite compare` does.

    The result prints as that table. Differences are `other` less `first`. "Better" is said only where a corrected test
    supports it.

    >>> pair = lf.compare("results/base.json", "results/ours.json")
    >>> pair.sentence
    'ours is better than base by 0.150 ± 0.047 on the mean of 2 tasks (p <.001)'
    >>> task = pair.tasks[0]
    >>> task.task, task.n, task.wins, task.losses, task.verdict
    ('arc_easy/0-shot', 100, 20, 0, 'better by 0.200 ± 0.093')

    Both may be logs of lm-evaluation-harness or of Inspect; `cluster` names a field that their related rows share. A
    folder stands for the one result in it. `skip` leaves a task or several out. Raises DataError for results that
    cannot be compared; it names task and reason.
    """
    left_out = [skip] if isinstance(skip, str) else skip or ()
    return compare(load_any([Path(first), Path(other)], cluster), skip=left_out, all_metrics=all_metrics)[0]


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
        ours, theirs = ({unit_of(item) for item in result.items[task]} for result in (first, other))
        units = in_order(list(ours & theirs))[: stage.plan.looks[stage.look - 1]]
        ours, theirs = cut_to(first, task, units), cut_to(other, task, units)
        tasks.append(_at_stage(_pair_task(task, ours, theirs, metric), stage))
        first_items |= ours.items
        other_items |= theirs.items
        stages[task] = stage
    more = [
        _pair_task(task.task, first, other, metric)
        for task in tasks
        for metric in first.tasks[task.task].get("metrics", ACCURACIES)
        if all_metrics and not task.stage and metric != task.metric
        if metric in first.tasks[task.task] and metric in other.tasks[task.task]
        if not (texts_alone and metric == "acc_per_token")
    ]
    accuracies = [(task.task, task.metric) for task in tasks if task.metric != BITS]
    return Pair(
        first=first.name,
        other=other.name,
        tasks=tasks,
        mean=_pair_answers(accuracies, first, other) if len(accuracies) > 1 and not stages else None,
        more=more,
        notes=[
            *notes_on(replace(first, items=first_items), replace(other, items=other_items), tasks, skip),
            *(f"{task}: {note}" for task in stages if (note := note_on_unshared(task, first, other))),
            *(f"{task}: {stage.words}" for task, stage in stages.items()),
        ],
    )


def main_metric(result: Results, task: str, texts_alone: bool) -> str:
    metric: str = result.tasks[task]["metric"]
    return "acc_norm" if texts_alone and metric == "acc_per_token" else metric


# --------------------------------------------------------------------------------------------------------- refusals


def refuse_if_different(task: str, first: Results, other: Results, left_out_by: str = "") -> None:
    """Raise DataError where the two were not asked the same, in the same way."""
    leave_out = f"leave the task out: {left_out_by or f'--skip {task}'}"
    a, b = first.tasks[task], other.tasks[task]
    ours, theirs = a["settings"], b["settings"]
    facts = [key for key in ("type", "num_fewshot", "tokenization", "metric") if a.get(key) != b.get(key)]
    found = [f"{key} {a.get(key)!r} against {b.get(key)!r}" for key in facts]
    other_rows = _first_different("row", task, first, other)
    for key in {**ours, **theirs}:
        if key == "prompts" and all(str(one.get(key)).startswith("sha256:") for one in (ours, theirs)):
            if ours[key] != theirs[key] and not other_rows:  # other rows have other prompts
                found.append(f"their prompts{_first_different('prompt', task, first, other)}")
        elif ours.get(key) != theirs.get(key) and key not in facts and key != "stop_tokens":  # the model's own
            counts = f" ({a['n']:,} items against {b['n']:,})" if key == "limit" else ""
            # max_seq_len is a setting only where a prompt did not fit into it.
            found.append(f"{key} {ours.get(key)!r} against {theirs.get(key)!r}{counts}")
    is_text, other_tokenizer = a["type"] == "perplexity", has_other_tokenizer(first, other)
    limits = (ours.get("limit"), theirs.get("limit"))
    same_limit = limits[0] == limits[1]
    if is_text and other_tokenizer and same_limit and limits[0] is not None:
        found.append(f"their tokenizers differ, so that limit {limits[0]!r}, of windows, ends elsewhere in the text")
        same_limit = False
    # What is beyond the limit of a text was not read, so that other limits make other data.
    is_cut_elsewhere = is_text and any(limits) and (limits[0] != limits[1] or other_tokenizer)
    if a["data_fingerprint"] != b["data_fingerprint"] and not is_cut_elsewhere:
        found.append(f"the data ({a['n']:,} items against {b['n']:,}{other_rows})")
    same_fingerprint = a["fingerprint"] == b["fingerprint"]
    if not found and not same_fingerprint and not (is_text and other_tokenizer):
        found.append(f"what no setting tells (fingerprint {a['fingerprint']} against {b['fingerprint']})")
    if found:
        remedy = "evaluate both with one task file" if same_limit else "evaluate both without limit"
        raise DataError(
            f"{task}: {first.name} and {other.name} were not asked the same: {'; '.join(found)}; {remedy}, "
            f"or {leave_out}"
        )
    if is_text and other_tokenizer and same_fingerprint:
        # Every tokenizer has the same bytes of a text, in windows of its own.
        sizes = [by_document(result.items[task])[:, 1] for result in (first, other)]
        if not np.array_equal(sizes[0], sizes[1]):
            raise DataError(
                f"{task}: the data are token ids, and {first.name} and {other.name} have different tokenizers; "
                f"evaluate both on a text file, or {leave_out}"
            )


def _first_different(what: str, task: str, first: Results, other: Results) -> str:
    """Name the first item whose row, or prompt, is another. Logs of other tools have a hash of either; items of ours
    have the length, place or text of their answers."""

    def facts_of(item: Record) -> object:
        if what == "prompt" or "row" in item:
            return item.get(what)
        return [item.get(key) for key in ("gold", "num_characters", "answers", "category")]

    is_text = first.tasks[task]["type"] == "perplexity"  # in windows, which are a tokenizer's
    theirs = {item["index"]: item for item in other.items.get(task, [])}
    for item in first.items.get(task, []):
        found = theirs.get(item["index"])
        if found is not None and ("row" in item or not is_text) and facts_of(item) != facts_of(found):
            noun = "question" if what == "row" else "prompt"
            return f"; {item.get('id') or 'row ' + str(item['index'] + 1)} is the first with another {noun}"
    return ""


def refuse_partial(task: str, first: Results, other: Results) -> None:
    """Raise DataError where a result has only the items that decided its difference to another than `first`."""
    for result in (first, other):
        record = result.tasks[task]
        if num_unasked(record) and not (result is other and is_reference(task, first, other)):
            part = record["sequential"]
            raise DataError(
                f"{task}: {result.name} was asked {record['n']:,} of {part['num_items']:,} items, until its difference "
                f"to {part['against']} was decided; give that result first, evaluate {result.name} without against, "
                f"or leave the task out: --skip {task}"
            )


def is_reference(task: str, first: Results, other: Results) -> bool:
    """Return whether `other` was asked look by look, against these very items of `first`."""
    stopped = other.tasks[task].get("sequential")
    return bool(stopped) and stopped["against_items"] == first.tasks[task]["items_hash"]


def has_other_tokenizer(first: Results, other: Results) -> bool:
    return bool(first.tokenizer and other.tokenizer) and first.tokenizer != other.tokenizer


# ------------------------------------------------------------------------------------------------------- sequential


def _find_stage(task: str, first: Results, other: Results, metric: str, rule: Rule | None) -> Stage | None:
    """Return where `other` stopped when it was asked against `first`; of whole results where `rule` would have."""
    if is_reference(task, first, other):
        return from_record(other.tasks[task])
    if rule is None:
        return None
    theirs = {item["index"] for item in other.items[task]}
    units = [unit_of(item) for item in first.items[task] if item["index"] in theirs]
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
    if level < (1 / significance.NUM_RESAMPLES if metric == BITS else 0):  # no bootstrap could be as sure
        return ""
    paired = _pair_task(task, first, other, metric)
    if paired.lost_text:  # all that is there may not be enough to tell
        return ""
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
    paired = _pair_answers([(task, metric)], first, other)
    counts = paired.counts
    if counts is not None and (discordant := counts.wins + counts.losses):
        units = significance.items_needed(float(discordant) / counts.num_units, 0.01 / float(counts.jump))
        paired.needed = math.ceil(units * paired.n / counts.num_units)
    return paired


def _pair_answers(asked: Sequence[tuple[str, str]], first: Results, other: Results) -> Paired:
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
    counts = significance.count(np.round(list(added.values()), 15), np.array(list(share.values())))
    ours = sum(float(task.weights @ task.first) for task in answers) / len(answers)
    theirs = sum(float(task.weights @ task.other) for task in answers) / len(answers)
    name, metric = asked[0] if len(asked) == 1 else (f"mean of {len(asked)} tasks", "mean")
    return Paired(
        task=name,
        metric=metric,
        first=ours,
        other=theirs,
        difference=theirs - ours,
        **_count_won(np.concatenate([task.other - task.first for task in answers])),
        p=significance.score_p(counts),
        test="score",
        error=math.sqrt(max(0.0, float(counts.variance))),
        interval=lambda level: significance.score_interval(counts, level),
        counts=counts,
    )


def _count_won(gains: significance.Floats) -> dict[str, Any]:
    wins, losses = int((gains > 0).sum()), int((gains < 0).sum())
    return {"n": len(gains), "wins": wins, "losses": losses, "ties": len(gains) - wins - losses}


def _pair_texts(task: str, first: Results, other: Results) -> Paired:
    """Compare bits per byte, resampled by document; within a single document by window."""
    a, b, _ = text_units(task, first, other)
    bits = np.array([1 / math.log(2), 1.0])
    # A function of the task, so that one more task or result changes no other number.
    generator = np.random.default_rng([SEED, zlib.crc32(f"{task} {BITS}".encode())])
    found = significance.difference_of_ratios(a * bits, b * bits, generator)
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
        needed=significance.documents_needed(deviation) if len(a) > 1 and deviation else None,
        error=found.error,
        interval=found.interval,
        # Equal tokenizers lose the same. A byte takes 8 bits where nothing is predicted.
        lost_text=8
        * (lost_share(first.tasks[task]) + lost_share(other.tasks[task]))
        * has_other_tokenizer(first, other),
    )


class Answers(NamedTuple):
    """Two models' scores on the items of a task that both have."""

    first: Floats
    other: Floats
    weights: Floats  # they add up to 1
    items: list[tuple[str, int]]  # (data, index) of each: the same in every task that asks it
    clusters: list[str] | None


def answers_of(task: str, first: Results, other: Results, metric: str) -> Answers:
    theirs = {item["index"]: item for item in other.items[task]}
    ours = [item for item in first.items[task] if item["index"] in theirs]
    if not ours:
        raise DataError(f"{task}: {first.name} and {other.name} were asked no item in common")
    record = first.tasks[task]
    return Answers(
        first=np.array([item[metric] for item in ours], np.float64),
        other=np.array([theirs[item["index"]][metric] for item in ours], np.float64),
        weights=weights_of(ours, has_categories(record)),
        items=[(record["data_fingerprint"], item["index"]) for item in ours],
        clusters=[item["cluster"] for item in ours] if "cluster" in ours[0] else None,
    )


def text_units(task: str, first: Results, other: Results) -> tuple[Floats, Floats, str]:
    """Return ((n, [nats, bytes]) of the first, of the other, what the n are)."""
    rows = [[text_row(item) for item in result.items[task]] for result in (first, other)]
    documents = [sorted({item["index"] for item in result.items[task]}) for result in (first, other)]
    if documents[0] != documents[1]:
        raise DataError(f"{task}: {first.name} and {other.name} did not read the same documents")
    same_windows = [row[1] for row in rows[0]] == [row[1] for row in rows[1]]
    if len(documents[0]) == 1 and same_windows and not has_other_tokenizer(first, other):
        return np.maximum(rows[0], [-math.inf, 1]), np.maximum(rows[1], [-math.inf, 1]), "windows"
    return by_document(first.items[task]), by_document(other.items[task]), "documents"


# ------------------------------------------------------------------------------------------------------------ notes


FACTS = {
    "num_tokens_trained": "warning: token budgets differ: {} {:,} tokens, {} {:,}; more training is one reason to be "
    "better",
    "num_parameters": "warning: sizes differ: {} {:,} parameters, {} {:,}",
    "precision": "precision differs: {} {}, {} {}",
}
"""Facts of two results -> what a reader must know where they differ."""


def notes_on(first: Results, other: Results, tasks: Sequence[Paired], skip: Sequence[str]) -> list[str]:
    """Return what a reader of the numbers must know."""
    names, notes = f"{first.name} and {other.name}", []
    for key, text in FACTS.items():
        ours, theirs = getattr(first, key), getattr(other, key)
        if None not in (ours, theirs) and ours != theirs:
            notes.append(text.format(first.name, ours, other.name, theirs))
    if has_other_tokenizer(first, other):
        notes.append(
            f"{names} have different tokenizers: acc_norm (per character) stands for acc_per_token, which depends on "
            "how a tokenizer divides an answer"
        )
    if first.save_id is not None and first.save_id == other.save_id:
        notes.append(f"{names} are the same checkpoint")
    ours, theirs = (", ".join(sorted({result.tasks[one.task]["code"] for one in tasks})) for result in (first, other))
    if ours != theirs:
        notes.append(f"evaluated by different code: {first.name} by {ours}, {other.name} by {theirs}")
    for one, two in ((first, other), (other, first)):
        if alone := [task for task in one.items if task not in two.items]:
            notes.append(f"only in {one.name}, left out: {', '.join(alone)}")
    if skip:
        notes.append(f"left out, as asked: {', '.join(skip)}")
    return notes + [f"{paired.task}: {note}" for paired in tasks for note in _notes_on_task(paired, first, other)]


def _notes_on_task(paired: Paired, first: Results, other: Results) -> list[str]:
    task, counts, notes = paired.task, paired.counts, list[str]()
    a, b = first.tasks[task], other.tasks[task]
    if limit := cut_at(a):
        notes.append(f"only its first {limit:,} items (limit): a try, not a result")
    ours, theirs = a.get("beginning", []), b.get("beginning", [])
    if ours != theirs and not has_other_tokenizer(first, other):
        notes.append(f"prompts begin with tokens {ours} for {first.name}, {theirs} for {other.name}")
    ours, theirs = a.get("generation"), b.get("generation")
    if ours != theirs:
        notes.append(f"warning: answers are generated with {ours} by {first.name}, {theirs} by {other.name}")
    ours, theirs = a.get("num_trimmed", 0), b.get("num_trimmed", 0)
    if ours != theirs:
        notes.append(f"contexts cut to fit: {ours:,} of {first.name}, {theirs:,} of {other.name}")
    for result in (first, other):
        if share := lost_share(result.tasks[task]):
            notes.append(f"warning: the tokenizer of {result.name} loses {percent(share)} of the text")
    if counts is None:
        found, _, unit = text_units(task, first, other)
        if len(found) < MIN_DOCUMENTS:
            is_cut = unit == "windows" and len(found) > 1
            noun = f"one document of {len(found)} windows" if is_cut else _count(len(found), "document")
            notes.append(f"{noun}: no interval and no verdict below {MIN_DOCUMENTS}")
        elif unit == "windows":
            notes.append("one document: its windows are resampled, as if they were independent")
        return notes
    if note := note_on_unshared(task, first, other):
        notes.append(note)
    has_clusters = "cluster" in first.items[task][0]
    if counts.num_effective < MIN_UNITS:
        noun = _count(counts.num_units, "cluster" if has_clusters else "item")
        if counts.num_units >= MIN_UNITS:
            noun += f", of such different weight that they are worth {counts.num_effective:.1f} equal ones"
        notes.append(f"{noun}: no interval and no verdict below {MIN_UNITS}")
    elif has_clusters:
        notes.append(f"{paired.n:,} items in {counts.num_units:,} clusters, which are what is independent")
    return notes


def note_on_unshared(task: str, first: Results, other: Results) -> str | None:
    """Return nothing for a result that was stopped: what it left out was not asked on purpose."""
    asked = [{item["index"] for item in result.items[task]} for result in (first, other)]
    alone = 0 if is_reference(task, first, other) else len(asked[0] ^ asked[1])
    return f"{alone:,} items that only one could be asked are left out" if alone else None


def _count(number: int, noun: str) -> str:
    return f"one {noun}" if number == 1 else f"{number} {noun}s"


def p_text(p: float) -> str:
    return "<.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"
