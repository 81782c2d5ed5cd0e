"""May two results be compared, and what must a reader of the comparison know?

Only what was asked in the same way: the same items, prompts and scoring, which each task's fingerprint vouches for.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.paired import MIN_DOCUMENTS, MIN_UNITS, Floats, effective_units
from llmfoundry_lite.evaluation.records import (
    BITS,
    by_document,
    cut_at,
    has_categories,
    num_unasked,
    text_row,
    weights_of,
)
from llmfoundry_lite.evaluation.results import Results


def refuse_if_different(task: str, first: Results, other: Results, left_out_by: str = "") -> None:
    """Raises DataError where the two were not asked the same, in the same way."""
    leave_out = f"leave the task out: {left_out_by or f'--skip {task}'}"
    a, b = first.tasks[task], other.tasks[task]
    ours, theirs = a["settings"], b["settings"]
    facts = [key for key in ("type", "num_fewshot", "tokenization", "metric") if a.get(key) != b.get(key)]
    found = [f"{key} {a.get(key)!r} against {b.get(key)!r}" for key in facts]
    for key in {**ours, **theirs}:
        if ours.get(key) != theirs.get(key) and key not in facts:
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
        found.append(f"the data ({a['n']:,} items against {b['n']:,})")
    same_fingerprint = a["fingerprint"] == b["fingerprint"]
    if not found and not same_fingerprint and not (is_text and other_tokenizer):
        found.append(f"fingerprint {a['fingerprint']} against {b['fingerprint']}")
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


def refuse_partial(task: str, first: Results, other: Results) -> None:
    """Raises DataError where a result has only the items that decided its difference to another than `first`."""
    for result in (first, other):
        record = result.tasks[task]
        if num_unasked(record) and not (result is other and is_reference(task, first, other)):
            told = record["sequential"]
            raise DataError(
                f"{task}: {result.name} was asked {record['n']:,} of {told['num_items']:,} items, until its difference "
                f"to {told['against']} was decided; give that result first, evaluate {result.name} without against, "
                f"or leave the task out: --skip {task}"
            )


def is_reference(task: str, first: Results, other: Results) -> bool:
    """Return whether `other` was asked look by look, against these very items of `first`."""
    told = other.tasks[task].get("sequential")
    return bool(told) and told["against_items"] == first.tasks[task]["items_hash"]


def has_other_tokenizer(first: Results, other: Results) -> bool:
    return bool(first.tokenizer and other.tokenizer) and first.tokenizer != other.tokenizer


FACTS = {
    "num_tokens_trained": "warning: token budgets differ: {} {:,} tokens, {} {:,}; more training is one reason to be "
    "better",
    "num_parameters": "warning: sizes differ: {} {:,} parameters, {} {:,}",
    "precision": "precision differs: {} {}, {} {}",
}
"""Facts of two results -> what a reader must know where they differ."""


def notes_on(first: Results, other: Results, common: Sequence[str], skip: Sequence[str]) -> list[str]:
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
    ours, theirs = (", ".join(sorted({result.tasks[task]["code"] for task in common})) for result in (first, other))
    if ours != theirs:
        notes.append(f"evaluated by different code: {first.name} by {ours}, {other.name} by {theirs}")
    for one, two in ((first, other), (other, first)):
        if alone := [task for task in one.items if task not in two.items]:
            notes.append(f"only in {one.name}, left out: {', '.join(alone)}")
    if skip:
        notes.append(f"left out, as asked: {', '.join(skip)}")
    return notes + [f"{task}: {note}" for task in common for note in _notes_on_task(task, first, other)]


def _notes_on_task(task: str, first: Results, other: Results) -> list[str]:
    notes, (a, b) = [], (first.tasks[task], other.tasks[task])
    if limit := cut_at(a):
        notes.append(f"only its first {limit:,} items (limit): a try, not a result")
    ours, theirs = a.get("beginning", []), b.get("beginning", [])
    if ours != theirs and not has_other_tokenizer(first, other):
        notes.append(f"prompts begin with tokens {ours} for {first.name}, {theirs} for {other.name}")
    ours, theirs = a.get("num_trimmed", 0), b.get("num_trimmed", 0)
    if ours != theirs:
        notes.append(f"contexts cut to fit: {ours:,} of {first.name}, {theirs:,} of {other.name}")
    if a["metric"] == BITS:
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
    answers = answers_of(task, first, other, a["metric"])
    shares: dict[object, float] = {}
    for unit, weight in zip(answers.clusters or answers.items, answers.weights, strict=True):
        shares[unit] = shares.get(unit, 0.0) + weight
    effective = effective_units(np.array(list(shares.values())))
    if effective < MIN_UNITS:
        noun = _count(len(shares), "cluster" if answers.clusters else "item")
        if len(shares) >= MIN_UNITS:
            noun += f", of such different weight that they are worth {effective:.1f} equal ones"
        notes.append(f"{noun}: no interval and no verdict below {MIN_UNITS}")
    elif answers.clusters:
        notes.append(f"{len(answers.items):,} items in {len(shares):,} clusters, which are what is independent")
    return notes


def note_on_unshared(task: str, first: Results, other: Results) -> str | None:
    """Return nothing for a result that was stopped: what it left out was not asked on purpose."""
    asked = [{item["index"] for item in result.items[task]} for result in (first, other)]
    alone = 0 if is_reference(task, first, other) else len(asked[0] ^ asked[1])
    return f"{alone:,} items that only one could be asked are left out" if alone else None


def _count(number: int, noun: str) -> str:
    return f"one {noun}" if number == 1 else f"{number} {noun}s"


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
        return np.array(rows[0]), np.array(rows[1]), "windows"
    return by_document(first.items[task]), by_document(other.items[task]), "documents"
