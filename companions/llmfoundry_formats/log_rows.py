"""Rows of another tool's log -> a task's record and its items, as our own evaluation would write them.

`lm_eval_logs.py` and `inspect_logs.py` read a log into `Row`s. `build_task` makes the records of them, so that
`compare` tests them like our own. The functions at the end read single values of a log.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from llmfoundry_lite.bounded import parse_json
from llmfoundry_lite.config.task_types import BITS, TEXT
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.items import fingerprint
from llmfoundry_lite.evaluation.means import bits_per_byte, by_document, mean_and_error
from llmfoundry_lite.evaluation.prompts import find_connected_rows
from llmfoundry_lite.evaluation.records import Record
from llmfoundry_lite.evaluation.summaries import hash_of

OLDER_RELEASE = "of an unknown release"


class Row(NamedTuple):
    """A row of a log: which row of the data it is, what the model was asked, and what it scored."""

    index: int
    id: str
    """Name of the row in messages."""
    row_hash: str
    """Hash of the data's row."""
    prompt_hash: str
    """Hash of all that the model was given; empty if the settings of the task decide it."""
    group: str | None
    """Value of the field that related rows share."""
    values: dict[str, float]
    """Metric -> number from 0 to 1; empty for a row that was not scored."""
    nats_and_bytes: tuple[float, int] | None = None
    """Minus the log-probability of a held-out text, and its size in bytes; None for other rows."""


class Log(NamedTuple):
    """A log of one task, as the records of our own evaluations."""

    task: str
    model: str | None
    """None if the log does not name its model."""
    record: Record
    items: list[Record]
    model_facts: Record
    """Fields of Results about the model."""


def build_task(
    task: str, file: str, rows: list[Row], settings: Record, code: str, cluster: str | None
) -> tuple[Record, list[Record]]:
    """Return a task's record and its items, as our own evaluation would write them.

    file: the log, for errors.
    rows: all rows of the log, also those that were not scored.
    settings: what must be equal for two results to be comparable.
    code: the tool and its release, such as "lm-eval 0.4.9, task version 1.0".
    cluster: the user's --cluster, or None.

    Raises DataError if no metric has a number for every scored row, or if only some rows have the field of --cluster.
    """
    # Choose the metrics: bits per byte for held-out texts, and otherwise those that every scored row has.
    rows = sorted(rows, key=lambda row: row.index)
    scored = [row for row in rows if row.values or row.nats_and_bytes is not None]
    is_text = bool(scored) and all(row.nats_and_bytes is not None for row in rows)
    metrics = [BITS] if is_text else find_shared_metrics(scored)
    if not metrics:
        partial_metrics = ",".join(sorted({metric for row in rows for metric in row.values}))
        only_for_some = f", only for some of them: {partial_metrics}" if partial_metrics else ""
        raise DataError(
            f"{file}: {task} has no metric with a number from 0 to 1 for each item{only_for_some}; compare needs one: "
            "leave this log out"
        )

    clusters = find_clusters(rows, file)
    items = [build_item(task, row, [] if is_text else metrics, clusters) for row in scored]

    # If the settings do not decide the prompts, two results are comparable only with the same ones.
    prompts = settings.get("prompts")
    if prompts is None and all(row.prompt_hash for row in rows):
        prompts = fingerprint([[row.index, row.prompt_hash] for row in rows])
    cluster_setting = {"cluster": cluster} if any(row.group for row in rows) else {}
    data = [[row.index, row.row_hash] for row in rows]
    num_skipped = len(rows) - len(items)
    record: Record = {
        "n": len(items),
        "type": TEXT if is_text else code.split()[0],
        "metric": metrics[0],
        "metrics": metrics,
        "settings": {**settings, "prompts": prompts, **cluster_setting},
        "data_fingerprint": fingerprint(data),
        "fingerprint": fingerprint([settings, prompts, data]),
        "items_hash": hash_of(items),
        "code": code,
        "skipped": {"not scored": num_skipped} if num_skipped else None,
    }
    if is_text:
        record[BITS] = float(bits_per_byte(by_document(items).sum(axis=0)))
    else:
        for metric in metrics:
            record[metric], record[f"{metric}_stderr"] = mean_and_error(items, metric)
    return record, items


def build_item(task: str, row: Row, metrics: Sequence[str], clusters: Mapping[int, str]) -> Record:
    """Return the item of a scored row, with the cluster that `clusters` has for its index.

    An item has the values of `metrics`. Without any, it is of a held-out text, and has its log-probability and size.
    """
    item: Record = {"task": task, "index": row.index, "id": row.id, "row": row.row_hash, "prompt": row.prompt_hash}
    if clusters:
        item["cluster"] = clusters[row.index]

    item |= {metric: row.values[metric] for metric in metrics}
    if not metrics and row.nats_and_bytes is not None:
        nats, num_bytes = row.nats_and_bytes
        item |= {"log_probability": [-nats], "num_characters": [num_bytes]}
    return item


def find_shared_metrics(scored: Sequence[Row]) -> list[str]:
    """Return the metrics that every scored row has, in the order of the first one."""
    if not scored:
        return []
    return [metric for metric in scored[0].values if all(metric in row.values for row in scored)]


def find_clusters(rows: Sequence[Row], file: str) -> dict[int, str]:
    """Return index of a row -> name of its cluster. Empty if every row is a cluster of its own.

    Rows are in one cluster if their data is equal, or if they share the value of the user's --cluster. Raises DataError
    if only some rows have this field.
    """
    groups = [row.group for row in rows]
    has_groups = any(groups)
    if has_groups and None in groups:
        raise DataError(
            f"{file}: {rows[groups.index(None)].id} lacks the field that --cluster names, which others have"
        )

    keys = []
    for row in rows:
        row_keys = [("row", row.row_hash)]
        if row.group is not None:
            row_keys.append(("group", row.group))
        keys.append(row_keys)
    first_connected = find_connected_rows(keys)
    are_all_apart = first_connected == list(range(len(rows)))
    if are_all_apart and not has_groups:
        return {}

    clusters = {}
    for row, first_index in zip(rows, first_connected, strict=True):
        first_row = rows[first_index]
        clusters[row.index] = str(first_row.group or first_row.index)
    return clusters


def as_number(value: Any) -> float | None:
    """Return a number from 0 to 1, also if it is written as a text; None for anything else.

    Other values of metrics are pairs, perplexities, texts and NaN.
    """
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    return float(value) if is_finite(value) and 0 <= value <= 1 else None


def is_finite(value: Any) -> bool:
    """Return whether a value is a number, and neither NaN nor infinite."""
    return isinstance(value, bool | int | float) and math.isfinite(value)


def group_of(row: Any, field_name: str | None) -> str | None:
    """Return the field of a row that related rows share; None without --cluster, and if the row has no such field."""
    if field_name is None or not isinstance(row, Mapping):
        return None
    value = row.get(field_name)
    return str(value) if isinstance(value, str | int) else None


def read_object(text: str | bytes, location: str) -> Record:
    """Parse a JSON object. `location` is where the text is, for errors. Raises DataError."""
    try:
        content = parse_json(text)
    except ValueError as error:
        raise DataError(f"{location} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise DataError(f"{location} is not a JSON object")
    return content
