"""May two results be compared, and what must a reader of the comparison know?

Only what was asked in the same way: the same items, prompts and scoring, which each task's fingerprint vouches for.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.paired import MIN_DOCUMENTS, MIN_UNITS, Floats, effective_units
from llmfoundry_lite.evaluation.reading import (
    BITS,
    Loaded,
    Record,
    by_document,
    cut_at,
    has_categories,
    num_unasked,
    text_row,
    weights_of,
)


def refuse_if_different(task: str, first: Loaded, other: Loaded, left_out_by: str = "") -> None:
    """Raises DataError where the two were not asked the same, in the same way."""
    leave_out = f"leave the task out: {left_out_by or f'--skip {task}'}"
    a, b = first.facts["tasks"][task], other.facts["tasks"][task]
    found = [
        f"{key} {a.get(key)!r} against {b.get(key)!r}"
        for key in ("type", "num_fewshot", "tokenization", "metric")
        if a.get(key) != b.get(key)
    ]
    ours, theirs = a.get("settings") or {}, b.get("settings") or {}
    if ours and theirs:
        for key in {**ours, **theirs}:
            if ours.get(key) != theirs.get(key) and not any(text.startswith(f"{key} ") for text in found):
                found.append(_setting(key, ours.get(key), theirs.get(key), first, other, task))
    is_text = a.get("type") == "perplexity"
    other_tokenizer = has_other_tokenizer(first, other)
    limits = (ours.get("limit"), theirs.get("limit"))
    remedy = "evaluate both with one task file" if limits[0] == limits[1] else "evaluate both without limit"
    if is_text and other_tokenizer and limits[0] == limits[1] is not None:
        found.append(f"their tokenizers differ, so that limit {limits[0]!r}, of windows, ends elsewhere in the text")
        remedy = "evaluate both without limit"
    # Of a text what is beyond its limit was not read, so that other limits make other data.
    is_cut_elsewhere = is_text and any(limits) and (limits[0] != limits[1] or other_tokenizer)
    if a.get("data_fingerprint") != b.get("data_fingerprint") and not is_cut_elsewhere:
        found.append(f"the data ({a['n']:,} items against {b['n']:,})")
    if not found and a["fingerprint"] != b["fingerprint"] and not (is_text and other_tokenizer):
        found.append(f"fingerprint {a['fingerprint']} against {b['fingerprint']}")
    if found:
        raise DataError(
            f"{task}: {first.name} and {other.name} were not asked the same: {'; '.join(found)}; {remedy}, "
            f"or {leave_out}"
        )
    if is_text and other_tokenizer and a["fingerprint"] == b["fingerprint"]:
        # Of a text every tokenizer has the same bytes, in windows of its own.
        sizes = [by_document(result.items[task])[:, 1] for result in (first, other)]
        if not np.array_equal(sizes[0], sizes[1]):
            raise DataError(
                f"{task}: the data are token ids, and {first.name} and {other.name} have different tokenizers; "
                f"evaluate both on a text file, or {leave_out}"
            )


def share_clusters(tasks: Sequence[str], first: Loaded, other: Loaded) -> tuple[Loaded, Loaded]:
    """Both with the clusters that either knows: a result of an earlier release does not say which items repeat one."""
    found = []
    for one, two in ((first, other), (other, first)):
        items = dict(one.items)
        for task in tasks:
            known = {item["index"]: item["cluster"] for item in two.items[task] if "cluster" in item}
            if known and not any("cluster" in item for item in items[task]):
                items[task] = [
                    {**item, "cluster": known.get(item["index"], str(item["index"]))} for item in items[task]
                ]
        found.append(replace(one, items=items))
    return found[0], found[1]


def refuse_partial(task: str, first: Loaded, other: Loaded) -> None:
    """Raises DataError where a result has only the items that decided its difference to another than `first`."""
    for result in (first, other):
        record = result.facts["tasks"][task]
        if num_unasked(record) and not (result is other and is_reference(task, first, other)):
            told = record["sequential"]
            raise DataError(
                f"{task}: {result.name} was asked {record['n']:,} of {told['num_items']:,} items, until its difference "
                f"to {told['against']} was decided; give that result first, evaluate {result.name} without against, "
                f"or leave the task out: --skip {task}"
            )


def is_reference(task: str, first: Loaded, other: Loaded) -> bool:
    """Whether `other` was asked look by look, against these very items of `first`."""
    told = other.facts["tasks"][task].get("sequential")
    return bool(told) and told["against_items"] == first.facts["tasks"][task].get("items_hash")


def _setting(key: str, ours: Any, theirs: Any, first: Loaded, other: Loaded, task: str) -> str:
    """How a setting differs, in words where the bare values would not tell."""
    if key == "limit":
        counts = [result.facts["tasks"][task]["n"] for result in (first, other)]
        return f"limit {ours!r} against {theirs!r} ({counts[0]:,} items against {counts[1]:,})"
    if key == "max_seq_len" and None in (ours, theirs):  # a setting only where something did not fit
        cut, whole = (first, other) if theirs is None else (other, first)
        return f"{cut.name} had prompts that did not fit into its {ours or theirs} tokens, {whole.name} had none"
    return f"{key} {ours!r} against {theirs!r}"


def notes_on(first: Loaded, other: Loaded, common: Sequence[str], skip: Sequence[str]) -> list[str]:
    """What a reader of the numbers must know."""
    names = f"{first.name} and {other.name}"
    notes = []
    budgets = [result.facts.get("num_tokens_trained") for result in (first, other)]
    if None not in budgets and budgets[0] != budgets[1]:
        notes.append(
            f"warning: token budgets differ: {first.name} {budgets[0]:,} tokens, {other.name} {budgets[1]:,}; "
            "more training is one reason to be better"
        )
    sizes = [result.facts.get("num_parameters") for result in (first, other)]
    if None not in sizes and sizes[0] != sizes[1]:
        notes.append(f"warning: sizes differ: {first.name} {sizes[0]:,} parameters, {other.name} {sizes[1]:,}")
    if has_other_tokenizer(first, other):
        notes.append(
            f"{names} have different tokenizers: acc_norm (per character) stands for acc_per_token, which depends on "
            "how a tokenizer divides an answer"
        )
    precisions = [result.facts.get("precision") for result in (first, other)]
    if precisions[0] != precisions[1]:
        notes.append(f"precision differs: {first.name} {precisions[0]}, {other.name} {precisions[1]}")
    save_ids = [result.facts.get("save_id") for result in (first, other)]
    if save_ids[0] is not None and save_ids[0] == save_ids[1]:
        notes.append(f"{names} are the same checkpoint")
    codes = [sorted({code_of(result.facts["tasks"][task]) for task in common}) for result in (first, other)]
    if codes[0] != codes[1]:
        notes.append(
            f"evaluated by different code: {first.name} by {', '.join(codes[0])}, {other.name} by {', '.join(codes[1])}"
        )
    for one, two in ((first, other), (other, first)):
        if alone := [task for task in one.items if task not in two.items]:
            notes.append(f"only in {one.name}, left out: {', '.join(alone)}")
    if skip:
        notes.append(f"left out, as asked: {', '.join(skip)}")
    for task in common:
        notes += [f"{task}: {note}" for note in _notes_on_task(task, first, other)]
    return notes


def _notes_on_task(task: str, first: Loaded, other: Loaded) -> list[str]:
    notes = []
    records = [result.facts["tasks"][task] for result in (first, other)]
    if limit := cut_at(records[0]):
        notes.append(f"only its first {limit:,} items (limit): a try, not a result")
    beginnings = [record.get("beginning", []) for record in records]
    if beginnings[0] != beginnings[1] and not has_other_tokenizer(first, other):
        notes.append(f"prompts begin with tokens {beginnings[0]} for {first.name}, {beginnings[1]} for {other.name}")
    trimmed = [record.get("num_trimmed", 0) for record in records]
    if trimmed[0] != trimmed[1]:
        notes.append(f"contexts cut to fit: {trimmed[0]:,} of {first.name}, {trimmed[1]:,} of {other.name}")
    if records[0]["metric"] == BITS:
        n, unit = len((found := text_units(task, first, other))[0]), found[2]
        if n >= MIN_DOCUMENTS and unit == "windows":
            notes.append("one document: its windows are resampled, as if they were independent")
        if n < MIN_DOCUMENTS:
            noun = f"one document of {n} windows" if unit == "windows" and n > 1 else _count(n, "document")
            notes.append(f"{noun}: no interval and no verdict below {MIN_DOCUMENTS}")
        return notes
    if note := note_on_unshared(task, first, other):
        notes.append(note)
    answers = answers_of(task, first, other, records[0]["metric"])
    if answers.clusters is None and (repeated := records[0].get("num_repeated")):
        notes.append(
            f"warning: {repeated:,} items repeat an earlier one and count as independent, as an earlier release does "
            "not say which; evaluate again with redo=true"
        )
    shares: dict[object, float] = {}
    for unit, weight in zip(answers.clusters or answers.items, answers.weights, strict=True):
        shares[unit] = shares.get(unit, 0.0) + weight
    num_units, effective = len(shares), effective_units(np.array(list(shares.values())))
    if effective < MIN_UNITS:
        noun = _count(num_units, "cluster" if answers.clusters else "item")
        worth = (
            ""
            if num_units < MIN_UNITS
            else f", of such different weight that they are worth {effective:.1f} equal ones"
        )
        notes.append(f"{noun}{worth}: no interval and no verdict below {MIN_UNITS}")
    elif answers.clusters:
        notes.append(f"{len(answers.items):,} items in {num_units:,} clusters, which are what is independent")
    return notes


def note_on_unshared(task: str, first: Loaded, other: Loaded) -> str | None:
    """Not of a result that was stopped: what it left out was not asked on purpose."""
    if is_reference(task, first, other):
        return None
    asked = [{item["index"] for item in result.items[task]} for result in (first, other)]
    alone = len(asked[0] ^ asked[1])
    return f"{alone:,} items that only one could be asked are left out" if alone else None


def _count(number: int, noun: str) -> str:
    return f"one {noun}" if number == 1 else f"{number} {noun}s"


def has_other_tokenizer(first: Loaded, other: Loaded) -> bool:
    ours, theirs = first.facts.get("tokenizer"), other.facts.get("tokenizer")
    return bool(ours and theirs) and ours != theirs


def code_of(record: Record) -> str:
    return record.get("code") or "an earlier release"


class Answers(NamedTuple):
    """Of two models to the items of a task that both have."""

    first: Floats
    other: Floats
    weights: Floats
    """They add up to 1."""
    items: list[tuple[str, int]]
    """(data, index) of each: the same in every task that asks it."""
    clusters: list[str] | None


def answers_of(task: str, first: Loaded, other: Loaded, metric: str) -> Answers:
    theirs = {item["index"]: item for item in other.items[task]}
    ours = [item for item in first.items[task] if item["index"] in theirs]
    if not ours:
        raise DataError(f"{task}: {first.name} and {other.name} were asked no item in common")
    record = first.facts["tasks"][task]
    data = str(record.get("data_fingerprint", task))
    return Answers(
        first=np.array([item[metric] for item in ours], np.float64),
        other=np.array([theirs[item["index"]][metric] for item in ours], np.float64),
        weights=weights_of(ours, has_categories(record)),
        items=[(data, item["index"]) for item in ours],
        clusters=[item["cluster"] for item in ours] if "cluster" in ours[0] else None,
    )


def text_units(task: str, first: Loaded, other: Loaded) -> tuple[Floats, Floats, str]:
    """((n, [nats, bytes]) of the first, of the other, what the n are)"""
    rows = [[text_row(item) for item in result.items[task]] for result in (first, other)]
    documents = [sorted({item["index"] for item in result.items[task]}) for result in (first, other)]
    if documents[0] != documents[1]:
        raise DataError(f"{task}: {first.name} and {other.name} did not read the same documents")
    same_windows = [row[1] for row in rows[0]] == [row[1] for row in rows[1]]
    if len(documents[0]) == 1 and same_windows and not has_other_tokenizer(first, other):
        return np.array(rows[0]), np.array(rows[1]), "windows"
    return by_document(first.items[task]), by_document(other.items[task]), "documents"
