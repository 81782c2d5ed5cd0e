"""A log of one task of lm-evaluation-harness, `samples_TASK_DATE.jsonl`, as the record and items of a task.

The `results_DATE.json` beside it has the model, its size, the limit, and whether a chat template was used.
`read_lm_eval` reads both.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from llmfoundry_formats.log_rows import OLDER_RELEASE, Log, Row, as_number, build_task, group_of, is_finite, read_object
from llmfoundry_lite.bounded import MAX_JSON_BYTES, MAX_LOG_BYTES, TooLargeError, read_at_most, read_lines_at_most
from llmfoundry_lite.config.task_types import BITS
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.items import fingerprint
from llmfoundry_lite.evaluation.records import Record

SAMPLES = re.compile(r"samples_(?P<task>.+)_(?P<date>\d{4}-\d\d-\d\dT[\d.-]+)\.jsonl")
KEYS_WITHOUT_METRICS = {
    *("doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics", "doc_hash"),
    *("prompt_hash", "target_hash"),
}
"""Keys of lm-eval's samples that are not metrics, for its older releases, which do not list a sample's `metrics`."""
NO_FILTER = "none"
"""lm-eval's name of the filter that leaves answers unchanged."""


def read_lm_eval(file: Path, cluster: str | None) -> Log:
    """Read `samples_TASK_DATE.jsonl`, and what the `results_DATE.json` beside it says, if that is there.

    The samples become the rows of the result. Releases, settings and the model's name are only in the other file.
    Raises DataError.
    """
    file_name = SAMPLES.fullmatch(file.name)
    task = file_name["task"] if file_name else file.stem.removeprefix("samples_")
    averages: Record = {}
    averages_files = sorted(file.parent.glob(f"*_{file_name['date']}.json")) if file_name else []
    if averages_files:
        averages = read_object(read_at_most(averages_files[0], MAX_JSON_BYTES, "results"), str(averages_files[0]))

    higher_is_better = (averages.get("higher_is_better") or {}).get(task) or {}
    rows = read_rows(file, higher_is_better, cluster)

    # Settings by which two results are compared.
    num_samples = (averages.get("n-samples") or {}).get(task) or {}
    is_limited = num_samples.get("effective", 0) < num_samples.get("original", 0)
    settings = {
        "limit": num_samples["effective"] if is_limited else None,
        "prompts": "by a chat template" if averages.get("chat_template") else None,
    }
    version = (averages.get("versions") or {}).get(task)
    code = f"lm-eval {averages.get('lm_eval_version', OLDER_RELEASE)}, task version {version}"
    record, items = build_task(task, str(file), rows, settings, code, cluster)

    # The model.
    config = averages["config"] if isinstance(averages.get("config"), dict) else {}
    model_facts = {
        "save_id": config.get("model_sha") or None,
        "num_parameters": config.get("model_num_parameters"),
        "precision": str(config.get("model_dtype", "")).removeprefix("torch."),
    }
    model = str(averages["model_name"]) if averages.get("model_name") else None
    return Log(task, model, record, items, model_facts)


def read_rows(file: Path, higher_is_better: Record, cluster: str | None) -> list[Row]:
    """Return the rows of a file of samples.

    A task may extract answers from the model's text by several filters, and then has a sample for each item and filter.
    Their metrics become one row, named "METRIC,FILTER", or "METRIC" if there is a single filter.

    higher_is_better, cluster: as for `read_row`. Raises DataError for a file without samples, and for two samples
    of the same item and filter.
    """
    rows: dict[int, Row] = {}
    seen: set[tuple[int, str]] = set()
    # One sample at a time, because as Python objects, all of them take many times the file's bytes.
    for sample in read_samples(file):
        row = read_row(sample, str(file), higher_is_better, cluster)
        key = (row.index, filter_of(sample))
        if key in seen:
            raise DataError(f"{file} has {row.id} twice; is it two logs in one? Give a log of one evaluation")
        seen.add(key)
        earlier_values = rows[row.index].values if row.index in rows else {}
        rows[row.index] = row._replace(values={**earlier_values, **row.values})
    if not rows:
        raise DataError(f"{file} has no samples; expected a line for each item, as lm_eval --log_samples writes them")

    filters = {filter_name for _, filter_name in seen}
    if len(filters) == 1:
        suffix = f",{filters.pop()}"
        for index, row in rows.items():
            rows[index] = row._replace(values={name.removesuffix(suffix): row.values[name] for name in row.values})
    return list(rows.values())


def read_samples(file: Path) -> Iterator[Record]:
    """Yield the samples of a file, one in each line. Raises DataError."""
    try:
        for number, line in enumerate(read_lines_at_most(file, MAX_LOG_BYTES, "a log"), start=1):
            if line.strip():
                yield read_object(line, f"{file}, line {number}")
    except TooLargeError:
        raise
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error}") from error


def filter_of(sample: Record) -> str:
    """Return the name of the filter that extracted a sample's answer. Older releases do not write it."""
    return str(sample.get("filter", NO_FILTER))


def read_row(sample: Record, file: str, higher_is_better: Record, cluster: str | None) -> Row:
    """Return the row of one sample of lm-eval. Its metrics are named "METRIC,FILTER".

    file: the log, for errors.
    higher_is_better: metric -> whether a higher value is better. Metrics for which it is not are left out.
    cluster: field of the document that related samples share, or None.

    Raises DataError if the sample lacks a key by which items are told apart.
    """
    for key in ("doc_id", "doc", "doc_hash", "arguments"):
        if key not in sample:
            raise DataError(
                f"{file}: a sample has no {key}, by which items are told apart; log them with lm-eval 0.4.3 or newer"
            )
    index = sample["doc_id"]
    if type(index) is not int or index < 0:
        raise DataError(f"{file}: doc_id is {index!r}, expected a whole number")

    metrics = sample.get("metrics") or [key for key in sample if key not in KEYS_WITHOUT_METRICS]
    values = {}
    nats_and_bytes = None
    for metric in metrics:
        value = sample.get(metric)
        if metric == BITS and isinstance(value, list) and len(value) == 2 and all(map(is_finite, value)):
            nats_and_bytes = (-value[0], value[1])
        elif higher_is_better.get(metric, True):
            number = as_number(value)
            if number is not None:
                values[f"{metric},{filter_of(sample)}"] = number
    return Row(
        index=index,
        id=f"item {index}",
        row_hash=fingerprint([sample["doc_hash"], sample.get("target_hash")]),
        prompt_hash=fingerprint(sample["arguments"]),
        group=group_of(sample["doc"], cluster),
        values=values,
        nats_and_bytes=nats_and_bytes,
    )
