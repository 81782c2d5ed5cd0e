"""Learning curves: the scores of a run's checkpoints on each task, over the tokens that had been trained.

    all_results, notes = read_folder(Path("results/icl-zero-shot"))
    gathered = gather_curves(all_results)
    plot_curves(Path("curves.png"), gathered.curves, title="mpt-1b")       # curve_figure.py

`eval --all-checkpoints RUN` writes a result for each checkpoint, `NAME-ba200.json`. `gather_curves` collects those of
each run. A task has a curve of its score, and another one of bits per byte if its records have them.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmfoundry_lite.checkpoint.commit import SAVE_ID, lease_epoch_of
from llmfoundry_lite.evaluation.metrics import by_metrics, choose_metrics, describe_choice
from llmfoundry_lite.evaluation.records import BITS_METRICS, MAX_MAGNITUDE, Record, is_accuracy
from llmfoundry_lite.evaluation.results import Results, read_others

MIN_POINTS = 2
"""Checkpoints of a run from which there is a curve."""
NAME_OF_CHECKPOINT = re.compile(r"(.+)-ba(\d+)")
"""A model's name in the results of `all_checkpoints`: NAME-ba200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The score of one checkpoint."""

    num_tokens: int
    """Tokens that had been trained."""
    score: float
    error: float | None
    """The standard error of the score. None if the record has none."""
    model: str
    """The checkpoint's name in the results, such as `base-ba200`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningCurve:
    """The scores of one run's checkpoints on one task, by one metric. There are at least MIN_POINTS."""

    run: str
    """The run's name in the results: `base` for `base-ba200`."""
    task: str
    metric: str
    points: list[Point]
    """Ascending in `num_tokens`, which no two have in common."""
    chance: float | None = None
    """The score of guessing. None for a metric or a task without one."""
    num_averaged: int = 1
    """Checkpoints whose mean each point is; see `smooth`. 1 for scores as they were measured."""

    @property
    def is_in_bits(self) -> bool:
        """Whether the scores are bits per byte, of which fewer are better."""
        return self.metric in BITS_METRICS

    @property
    def digits(self) -> int:
        """Decimals to show: three of an accuracy, four of bits per byte."""
        return 4 if self.is_in_bits else 3


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredCurves:
    """The curves of one or several runs, and what they leave out."""

    curves: list[LearningCurve]
    """Grouped by run, then by task, both in the order of the results."""
    notes: list[str]
    """Lines for the reader: results that are left out, and how metrics were chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """A checkpoint's record of one task."""

    num_tokens: int
    results: Results
    record: Record


def read_folder(folder: Path) -> tuple[list[Results], list[str]]:
    """Read all results in a suite's folder, without their items.

    Returns the results, and a note for each file that cannot be read.
    """
    return read_others(folder, [])


def gather_curves(all_results: Sequence[Results], metric: str | None = None) -> GatheredCurves:
    """Gather the learning curves of all runs that several of these results belong to.

    all_results: results of checkpoints, in any order, of one run or of several. Results of other models are left out.
    metric: the metric of the scores that the user asks for; None lets `metrics.choose_metrics` choose.

    Checkpoints with the same number of trained tokens are points of one curve only once: the one that a later launch
    saved counts. A curve has only checkpoints that were asked the same, and a note names the others.
    """
    # One rule chooses the metrics for all runs, so that their curves can be compared.
    metrics = choose_metrics(all_results, metric)
    gathered = build_curves(group_by_run(by_metrics(all_results, metrics)))
    notes = [*describe_choice(all_results, metrics, metric), *gathered.notes]
    return GatheredCurves(curves=gathered.curves, notes=notes)


def build_curves(checkpoints_of_run: Mapping[str, Sequence[Results]]) -> GatheredCurves:
    """Build the curves of runs by the main metric of each record, and in bits per byte; see `gather_curves`.

    `checkpoints_of_run` maps a run's name to the results of its checkpoints.
    """
    curves: list[LearningCurve] = []
    notes: list[str] = []
    for run, checkpoints in checkpoints_of_run.items():
        tasks = dict.fromkeys(task for results in checkpoints for task in results.tasks)
        for task in tasks:
            found = _find_records(checkpoints, task)
            comparable = _keep_comparable(run, task, found, notes)
            points_in_order = _keep_newest_saves(comparable)
            curves += _build_curves_of_task(run, task, points_in_order)
    return GatheredCurves(curves=curves, notes=notes)


def group_by_run(all_results: Sequence[Results]) -> dict[str, list[Results]]:
    """Group the results of checkpoints by run. Returns the run's name in the results -> its checkpoints' results.

    A result named NAME-ba200 belongs to the run NAME. One with another name, as `models.ours=runs/mpt-1b` gives,
    belongs to the run whose checkpoints lie in the same folder, which is named after its folder if there is no other
    result of it. Results of other models, such as those of an exported folder, are left out.
    """
    checkpoints = [results for results in all_results if tokens_of(results) is not None]
    run_of_folder: dict[str, str] = {}
    for results in checkpoints:
        match = NAME_OF_CHECKPOINT.fullmatch(results.model)
        if match is not None:
            run_of_folder.setdefault(folder_of_checkpoint(results), match[1])

    groups: dict[str, list[Results]] = {}
    for results in checkpoints:
        match = NAME_OF_CHECKPOINT.fullmatch(results.model)
        folder = folder_of_checkpoint(results)
        if match is not None:
            run = match[1]
        else:
            name = folder.removesuffix("/checkpoints").rpartition("/")[2]
            is_taken = name in run_of_folder.values()
            run = run_of_folder.setdefault(folder, folder if is_taken else name)
        groups.setdefault(run, []).append(results)
    return groups


def tokens_of(results: Results) -> int | None:
    """Return how many tokens had been trained when a checkpoint was saved. None if the model is no checkpoint."""
    match = SAVE_ID.fullmatch(results.save_id or "")
    if match is None:
        return None
    is_before_training = int(match[2]) == 0  # such a checkpoint records no tokens
    return 0 if is_before_training else results.num_tokens_trained


def folder_of_checkpoint(results: Results) -> str:
    """Return the folder or URL that holds the checkpoint that was evaluated."""
    return results.source.rstrip("/").rpartition("/")[0]


def _find_records(checkpoints: Sequence[Results], task: str) -> list[CheckpointRecord]:
    """Return the records of one task, of all checkpoints that have it, in order of trained tokens."""
    found: list[CheckpointRecord] = []
    for results in checkpoints:
        num_tokens = tokens_of(results)
        if num_tokens is not None and task in results.tasks:
            found.append(CheckpointRecord(num_tokens=num_tokens, results=results, record=results.tasks[task]))
    return sorted(found, key=lambda one: one.num_tokens)


def _keep_comparable(
    run: str, task: str, records: Sequence[CheckpointRecord], notes: list[str]
) -> list[CheckpointRecord]:
    """Return the records whose questions and settings most of the checkpoints have; of equally many, the last one's.

    For instance, a checkpoint that was tried with `limit=10` has no point in a curve of all items. A note about the
    records that are left out is added to `notes`.
    """
    counts = Counter(one.record["fingerprint"] for one in records)
    most = max(counts.values())
    commonest = [one.record["fingerprint"] for one in records if counts[one.record["fingerprint"]] == most][-1]
    kept = [one for one in records if one.record["fingerprint"] == commonest]
    left_out = [one.results.model for one in records if one.record["fingerprint"] != commonest]
    if left_out:
        notes.append(f"warning: {run}: {task}: {', '.join(left_out)} not asked the same as the others; left out")
    return kept


def _keep_newest_saves(records: Sequence[CheckpointRecord]) -> list[CheckpointRecord]:
    """Return the records with one for each number of tokens: that of the save with the highest lease epoch.

    A run that went back to an earlier checkpoint saves the same batch again, in a later launch.
    """
    newest: dict[int, CheckpointRecord] = {}
    for one in records:
        known = newest.get(one.num_tokens)
        is_newer = known is None or _epoch_of(one) > _epoch_of(known)
        if is_newer:
            newest[one.num_tokens] = one
    return [*newest.values()]


def _epoch_of(one: CheckpointRecord) -> int:
    """Return the lease epoch of the launch that saved a checkpoint. Later launches have higher ones."""
    return lease_epoch_of(one.results.save_id or "")


def _build_curves_of_task(run: str, task: str, records: Sequence[CheckpointRecord]) -> list[LearningCurve]:
    """Return the curves of a task: one by its main metric, and one in bits per byte if that is another.

    `records` has one for each number of tokens, ascending. There is no curve by a metric that fewer than MIN_POINTS of
    the records have.
    """
    metrics = dict.fromkeys([*(one.record["metric"] for one in records), *BITS_METRICS])
    curves: list[LearningCurve] = []
    for metric in metrics:
        points: list[Point] = []
        for one in records:
            point = _point_of(one, metric)
            if point is not None:
                points.append(point)
        if len(points) < MIN_POINTS:
            continue
        has_chance = is_accuracy(records[-1].record) and metric not in BITS_METRICS
        chance = _number_in(records[-1].record, "chance") if has_chance else None
        curves.append(LearningCurve(run=run, task=task, metric=metric, points=points, chance=chance))
    return curves


def _point_of(one: CheckpointRecord, metric: str) -> Point | None:
    """Return a checkpoint's point by a metric. None if its record has no number for it."""
    score = _number_in(one.record, metric)
    if score is None:
        return None
    error = _number_in(one.record, f"{metric}_stderr")
    return Point(num_tokens=one.num_tokens, score=score, error=error, model=one.results.model)


def _number_in(record: Record, key: str) -> float | None:
    """Return a number of a record, which comes from a file and may have anything there. None if it is no number."""
    value = record.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    is_finite = -MAX_MAGNITUDE <= value <= MAX_MAGNITUDE
    return float(value) if is_finite else None


def smooth(curve: LearningCurve, num_checkpoints: int) -> LearningCurve:
    """Return a curve whose points are means over a checkpoint and those before it, `num_checkpoints` in all.

    The first points are means over fewer. The scores 1, 2, 6, 3 smoothed over two are 1, 1.5, 4, 4.5.

    The error of a mean is the mean of the errors. That is the largest that it can be: all checkpoints answered the same
    items, so their errors are correlated, and the records do not say how strongly.
    """
    points: list[Point] = []
    for i, last in enumerate(curve.points):
        window = curve.points[max(0, i + 1 - num_checkpoints) : i + 1]
        errors = [point.error for point in window if point.error is not None]
        error = sum(errors) / len(errors) if len(errors) == len(window) else None
        score = sum(point.score for point in window) / len(window)
        points.append(replace(last, score=score, error=error))
    return replace(curve, points=points, num_averaged=num_checkpoints)
