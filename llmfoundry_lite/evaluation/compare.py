"""Comparison of several models' results, item by item, each with the first.

A difference counts as significant when its p, corrected for the number of tests (Holm), is below 0.05. Its interval is
at the level that its p is compared with, so it excludes 0 exactly when the difference is significant.

Items, or clusters of them, count as independent. An item that several tasks ask (with other examples, prompts or
labels, but from the same data) is one item: in the mean, its differences in all tasks are added up first.

`acc_per_token` divides an answer's log-probability by its number of tokens, so with two tokenizers the same
distribution over texts can choose different answers. Models with different tokenizers are compared by `acc_norm` (per
character) instead.
"""

import math
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmfoundry_lite.data.spelling import percent
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation import significance
from llmfoundry_lite.evaluation.pairs import ComparedNumber, Comparison
from llmfoundry_lite.evaluation.records import (
    ACCURACIES,
    BITS,
    Record,
    bits_per_byte,
    by_document,
    cut_at,
    has_categories,
    lost_share,
    text_row,
    weights_of,
)
from llmfoundry_lite.evaluation.results import Results, load_any
from llmfoundry_lite.evaluation.significance import MIN_DOCUMENTS, MIN_UNITS, Floats

Unit = tuple[str, int | str]
"""(data, index of an item or name of a cluster): the unit that is independent of others."""


def compare(results: Sequence[Results], *, skip: Sequence[str] = (), all_metrics: bool = False) -> list[Comparison]:
    """Compare each result with the first. Raises DataError for results that cannot be compared, naming task and
    reason."""
    known = {task for result in results for task in result.items}
    for task in skip:
        if task not in known:
            raise DataError(f"--skip {task}: no result has that task; they have {', '.join(sorted(known))}")
    pairs = [_compare_two(results[0], other, skip, all_metrics) for other in results[1:]]
    # Each family is corrected as a whole, because a reader will look at its best number.
    for family in (
        [paired for pair in pairs for paired in pair.tasks],
        [pair.mean for pair in pairs if pair.mean is not None],
        [paired for pair in pairs for paired in pair.more],
    ):
        corrected, levels = significance.holm([paired.p for paired in family])
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
) -> Comparison:
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


def _compare_two(first: Results, other: Results, skip: Sequence[str], all_metrics: bool) -> Comparison:
    common = [task for task in first.items if task in other.items and task not in skip]
    if not common:
        raise DataError(
            f"{first.name} and {other.name} have no task in common: {', '.join(first.items)} against "
            f"{', '.join(other.items)}"
        )
    for task in common:
        refuse_if_different(task, first, other)
    metrics = {task: str(first.tasks[task]["metric"]) for task in common}
    if other_tokenizer := has_other_tokenizer(first, other):
        metrics = {task: "acc_norm" if metric == "acc_per_token" else metric for task, metric in metrics.items()}
    tasks = [_pair_task(task, metric, first, other) for task, metric in metrics.items()]
    more = [
        _pair_task(task, metric, first, other)
        for task in common
        for metric in first.tasks[task].get("metrics", ACCURACIES)
        if all_metrics and metric != metrics[task]
        if metric in first.tasks[task] and metric in other.tasks[task]
        if not (other_tokenizer and metric == "acc_per_token")
    ]
    accuracies = [(task, metric) for task, metric in metrics.items() if metric != BITS]
    return Comparison(
        first=first.name,
        other=other.name,
        tasks=tasks,
        mean=_pair_answers(accuracies, first, other) if len(accuracies) > 1 else None,
        more=more,
        notes=notes_on(first, other, tasks, skip),
    )


# --------------------------------------------------------------------------------------------------------- refusals


def refuse_if_different(task: str, first: Results, other: Results) -> None:
    """Raise DataError unless both models were asked the same questions in the same way."""
    leave_out = f"leave the task out: --skip {task}"
    a, b = first.tasks[task], other.tasks[task]
    ours, theirs = a["settings"], b["settings"]
    facts = [key for key in ("type", "num_fewshot", "tokenization", "metric") if a.get(key) != b.get(key)]
    found = [f"{key} {a.get(key)!r} against {b.get(key)!r}" for key in facts]
    other_rows = _first_different("row", task, first, other)
    for key in {**ours, **theirs}:
        if key == "prompts" and all(str(one.get(key)).startswith("sha256:") for one in (ours, theirs)):
            if ours[key] != theirs[key] and not other_rows:  # other rows have other prompts
                found.append(f"their prompts{_first_different('prompt', task, first, other)}")
        elif ours.get(key) != theirs.get(key) and key not in facts and key != "stop_tokens":  # a property of the model
            counts = f" ({a['n']:,} items against {b['n']:,})" if key == "limit" else ""
            # max_seq_len is recorded only where it cut a prompt.
            found.append(f"{key} {ours.get(key)!r} against {theirs.get(key)!r}{counts}")
    is_text, other_tokenizer = a["type"] == "perplexity", has_other_tokenizer(first, other)
    limit, is_cut_elsewhere = ours.get("limit"), ours.get("limit") != theirs.get("limit")
    if is_text and other_tokenizer and limit is not None and not is_cut_elsewhere:
        found.append(f"their tokenizers differ, so that limit {limit!r}, of windows, ends elsewhere in the text")
        is_cut_elsewhere = True
    # The fingerprint covers a text only up to its limit, so other limits give other fingerprints.
    if a["data_fingerprint"] != b["data_fingerprint"] and not (is_text and is_cut_elsewhere):
        found.append(f"the data ({a['n']:,} items against {b['n']:,}{other_rows})")
    same_fingerprint = a["fingerprint"] == b["fingerprint"]
    if not found and not same_fingerprint and not (is_text and other_tokenizer):
        found.append(f"what no setting tells (fingerprint {a['fingerprint']} against {b['fingerprint']})")
    if found:
        remedy = "evaluate both without limit" if is_cut_elsewhere else "evaluate both with one task file"
        raise DataError(
            f"{task}: {first.name} and {other.name} were not asked the same: {'; '.join(found)}; {remedy}, "
            f"or {leave_out}"
        )
    if is_text and other_tokenizer and same_fingerprint:
        # Windows depend on the tokenizer, but their bytes add up to the same text.
        sizes = [by_document(result.items[task])[:, 1] for result in (first, other)]
        if not np.array_equal(sizes[0], sizes[1]):
            raise DataError(
                f"{task}: the data are token ids, and {first.name} and {other.name} have different tokenizers; "
                f"evaluate both on a text file, or {leave_out}"
            )


def _first_different(what: str, task: str, first: Results, other: Results) -> str:
    """Name the first item whose row or prompt differs. Logs of other tools have hashes of both. Our items are compared
    by the lengths, positions or texts of their answers."""

    def facts_of(item: Record) -> object:
        if what == "prompt" or "row" in item:
            return item.get(what)
        return [item.get(key) for key in ("gold", "num_characters", "answers", "category")]

    is_text = first.tasks[task]["type"] == "perplexity"  # whose windows depend on the tokenizer
    theirs = {item["index"]: item for item in other.items.get(task, [])}
    for item in first.items.get(task, []):
        found = theirs.get(item["index"])
        if found is not None and ("row" in item or not is_text) and facts_of(item) != facts_of(found):
            noun = "question" if what == "row" else "prompt"
            return f"; {item.get('id') or 'row ' + str(item['index'] + 1)} is the first with another {noun}"
    return ""


def has_other_tokenizer(first: Results, other: Results) -> bool:
    return bool(first.tokenizer and other.tokenizer) and first.tokenizer != other.tokenizer


# ---------------------------------------------------------------------------------------------------------- numbers


def _pair_task(task: str, metric: str, first: Results, other: Results) -> ComparedNumber:
    return _pair_texts(task, first, other) if metric == BITS else _pair_answers([(task, metric)], first, other)


def _pair_answers(asked: Sequence[tuple[str, str]], first: Results, other: Results) -> ComparedNumber:
    """Compare the mean of the accuracies of each (task, metric), with equal weights."""
    parts: list[tuple[list[Unit], Floats, Floats, Floats]] = []
    unit_of: dict[Unit, Unit] = {}
    for task, metric in asked:
        theirs = {item["index"]: item for item in other.items[task]}
        ours = [item for item in first.items[task] if item["index"] in theirs]
        if not ours:
            raise DataError(f"{task}: {first.name} and {other.name} were asked no item in common")
        data = first.tasks[task]["data_fingerprint"]
        items: list[Unit] = [(data, item["index"]) for item in ours]  # the same in every task that asks them
        # A cluster that one task knows holds for every task on the same data.
        unit_of |= {(data, item["index"]): (data, item["cluster"]) for item in ours if "cluster" in item}
        first_i = np.array([item[metric] for item in ours], np.float64)
        other_i = np.array([theirs[item["index"]][metric] for item in ours], np.float64)
        parts.append((items, weights_of(ours, has_categories(first.tasks[task])), first_i, other_i))
    added, share = dict[Unit, float](), dict[Unit, float]()
    for items, weights_i, first_i, other_i in parts:
        weights_i = weights_i / len(parts)
        for item, change, weight in zip(items, weights_i * (other_i - first_i), weights_i, strict=True):
            unit = unit_of.get(item, item)
            added[unit] = added.get(unit, 0.0) + change
            share[unit] = share.get(unit, 0.0) + weight
    # Rounded, so that differences that cancel out are exactly 0.
    counts = significance.count(np.round(list(added.values()), 15), np.array(list(share.values())))
    ours = sum(float(weights_i @ first_i) for _, weights_i, first_i, _ in parts) / len(parts)
    theirs = sum(float(weights_i @ other_i) for _, weights_i, _, other_i in parts) / len(parts)
    name, metric = asked[0] if len(asked) == 1 else (f"mean of {len(asked)} tasks", "mean")
    return ComparedNumber(
        task=name,
        metric=metric,
        first=ours,
        other=theirs,
        difference=theirs - ours,
        **_count_won(np.concatenate([other_i - first_i for *_, first_i, other_i in parts])),
        p=significance.score_p(counts),
        test="score",
        error=math.sqrt(max(0.0, float(counts.variance))),
        interval=lambda level: significance.score_interval(counts, level),
        counts=counts,
    )


def _count_won(gains: significance.Floats) -> dict[str, Any]:
    wins, losses = int((gains > 0).sum()), int((gains < 0).sum())
    return {"n": len(gains), "wins": wins, "losses": losses, "ties": len(gains) - wins - losses}


def _pair_texts(task: str, first: Results, other: Results) -> ComparedNumber:
    """Compare bits per byte, resampling documents, or the windows of a single document."""
    a, b, _ = text_units(task, first, other)
    bits = np.array([1 / math.log(2), 1.0])
    # The seed depends on the task alone, so that another task or result changes no other number.
    generator = np.random.default_rng([significance.SEED, zlib.crc32(f"{task} {BITS}".encode())])
    found = significance.difference_of_ratios(a * bits, b * bits, generator)
    return ComparedNumber(
        task=task,
        metric=BITS,
        first=float(bits_per_byte(a.sum(axis=0))),
        other=float(bits_per_byte(b.sum(axis=0))),
        difference=found.difference,
        **_count_won(a[:, 0] / a[:, 1] - b[:, 0] / b[:, 1]),
        p=found.p,
        test="studentised bootstrap",
        error=found.error,
        interval=found.interval,
        # Equal tokenizers lose the same text. A byte that is not predicted counts 8 bits.
        lost_text=8
        * (lost_share(first.tasks[task]) + lost_share(other.tasks[task]))
        * has_other_tokenizer(first, other),
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
"""Fact of a result -> note for the reader where two results differ in it."""
TASK_FACTS = {
    "beginning": ([], "prompts begin with tokens {1} for {0}, {3} for {2}"),
    "generation": (None, "warning: answers are generated with {1} by {0}, {3} by {2}"),
    "num_trimmed": (0, "contexts cut to fit: {1:,} of {0}, {3:,} of {2}"),
}
"""The same for facts of a task, each with the value that a record without it has."""


def notes_on(first: Results, other: Results, tasks: Sequence[ComparedNumber], skip: Sequence[str]) -> list[str]:
    """Return notes that a reader of the numbers needs."""
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


def _notes_on_task(paired: ComparedNumber, first: Results, other: Results) -> Iterator[str]:
    task, counts = paired.task, paired.counts
    if limit := cut_at(first.tasks[task]):
        yield f"only its first {limit:,} items (limit): a try, not a result"
    for key, (default, text) in TASK_FACTS.items():
        ours, theirs = (result.tasks[task].get(key, default) for result in (first, other))
        if ours != theirs and not (key == "beginning" and has_other_tokenizer(first, other)):
            yield text.format(first.name, ours, other.name, theirs)
    for result in (first, other):
        if share := lost_share(result.tasks[task]):
            yield f"warning: the tokenizer of {result.name} loses {percent(share)} of the text"
    if counts is None:
        found, _, unit = text_units(task, first, other)
        if len(found) < MIN_DOCUMENTS:
            is_cut = unit == "windows" and len(found) > 1
            noun = f"one document of {len(found)} windows" if is_cut else _count(len(found), "document")
            yield f"{noun}: no interval and no verdict below {MIN_DOCUMENTS}"
        elif unit == "windows":
            yield "one document: its windows are resampled, as if they were independent"
        return
    asked = [{item["index"] for item in result.items[task]} for result in (first, other)]
    if alone := len(asked[0] ^ asked[1]):
        yield f"{alone:,} items that only one could be asked are left out"
    has_clusters = "cluster" in first.items[task][0]
    if counts.num_effective < MIN_UNITS:
        noun = _count(counts.num_units, "cluster" if has_clusters else "item")
        if counts.num_units >= MIN_UNITS:
            noun += f", of such different weight that they are worth {counts.num_effective:.1f} equal ones"
        yield f"{noun}: no interval and no verdict below {MIN_UNITS}"
    elif has_clusters:
        yield f"{paired.n:,} items in {counts.num_units:,} clusters, which are what is independent"


def _count(number: int, noun: str) -> str:
    return f"one {noun}" if number == 1 else f"{number} {noun}s"
