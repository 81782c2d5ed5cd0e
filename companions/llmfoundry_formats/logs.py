"""Logs of lm-evaluation-harness and Inspect as Results, so that `compare` tests what other tools have measured.

lm-evaluation-harness writes `samples_TASK_DATE.jsonl` with --log_samples. The `results_DATE.json` beside it has the
model, its size, the limit, and whether a chat template was used. Inspect writes an `.eval` or a `.json` for each task.
A folder is a model: all of its logs are read. Neither tool is needed for that, and no torch.

An item is one row of the data, with a number from 0 to 1 for each metric. Other metrics are left out. `compare` matches
items by the hash of their row, and checks that their prompts are the same, unless a chat template made these: then the
prompts of two models are expected to differ. Equal rows make a cluster, and so do rows that share the field that the
user names with --cluster.

In this file: `load_logs` finds out which tool wrote a path, one section for each tool turns its logs into `Row`s, and
`_build` turns rows into the records of a task.
"""

import io
import json
import math
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from llmfoundry_lite.bounded import (
    MAX_JSON_BYTES,
    MAX_LOG_BYTES,
    TooLargeError,
    open_unpacked,
    parse_json,
    read_at_most,
    read_file_at_most,
    read_lines_at_most,
    too_large,
)
from llmfoundry_lite.errors import ConfigError, DataError, UserError
from llmfoundry_lite.evaluation.items import fingerprint
from llmfoundry_lite.evaluation.means import bits_per_byte, by_document, mean_and_error
from llmfoundry_lite.evaluation.prompts import find_connected_rows
from llmfoundry_lite.evaluation.records import BITS, Record
from llmfoundry_lite.evaluation.results import Results, load_results, read_results
from llmfoundry_lite.evaluation.summaries import hash_of
from llmfoundry_lite.files import open_regular

OURS, LM_EVAL, INSPECT = "llmfoundry-lite", "lm-eval", "Inspect"
SAMPLES = re.compile(r"samples_(?P<task>.+)_(?P<date>\d{4}-\d\d-\d\dT[\d.-]+)\.jsonl")
KEYS_WITHOUT_METRICS = {
    *("doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics", "doc_hash"),
    *("prompt_hash", "target_hash"),
}
"""Keys of lm-eval's samples that are not metrics, for its older releases, which do not list a sample's `metrics`."""
NUMBERS_OF_WORDS = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
"""Inspect's letters for correct, partly correct, incorrect and no answer, and the words that it counts like them."""
INDEX_DIGITS = 12
"""Hexadecimal digits of a hash that is the index of a sample whose id is not a number."""
CONVERSION_HINT = (
    "convert a log of Inspect, to be read sample by sample: inspect log convert --to eval --output-dir FOLDER FILE"
)
ZSTANDARD = 93
"""The ZIP format's number of the compression Zstandard, which Python's zipfile can read from 3.14 on."""
ZIP_LOCAL_HEADER_BYTES = 30
"""Size of the fixed part of the header before each file of a ZIP archive (APPNOTE.TXT, section 4.3.7)."""
MAX_NAMED_RESULTS = 6
"""Number of results that an error names."""
OLDER_RELEASE = "of an unknown release"
NO_FILTER = "none"
"""lm-eval's name of the filter that leaves answers unchanged."""


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
    """Of a held-out text: minus its log-probability, and its size."""


def load_logs(paths: Sequence[Path], cluster: str | None) -> list[Results]:
    """Load results, all of one tool: ours, lm-eval or Inspect.

    `cluster` is the user's --cluster: the field of the data's rows that related rows share. Raises DataError for
    results that cannot be read or cannot be compared item by item, and ConfigError for --cluster with our own results.
    """
    paths = [find_result(path) for path in paths]
    tools = {path: tool_of(path) for path in paths}
    first = paths[0]
    first_tool = tools[first]

    other = next((path for path in paths if tools[path] != first_tool), None)
    if other is not None:
        for path in paths:
            if tools[path] == OURS:
                read_results(path)  # raises DataError if the file is not ours either, and says what is wrong with it
        raise DataError(
            f"{first} is of {first_tool}, {other} of {tools[other]}: each tool prompts and scores in its own way; "
            "compare results of one tool"
        )

    if first_tool == OURS:
        if cluster is not None:
            raise ConfigError(
                f"--cluster {cluster}: {first} is a result of ours, which knows its clusters; name the column in the "
                f"task file: cluster: {cluster}"
            )
        return load_results(paths)

    all_results = load_results(paths, partial(_read_logs, tool=first_tool, cluster=cluster))
    if cluster is not None:
        for results in all_results:
            if not any("cluster" in task["settings"] for task in results.tasks.values()):
                raise DataError(
                    f"--cluster {cluster}: no row of {results.path} has that field as a text or a whole number"
                )
    return all_results


def find_result(path: Path) -> Path:
    """Return the one result within the output folder of a tool.

    lm-eval writes OUT/MODEL/samples_*, and we write OUT/MODEL.json. A file, and a folder that directly contains logs,
    is returned unchanged, and so is a folder without results, which a reader will report. Raises DataError for a
    folder with several results, and for one whose only results are lm-eval's averages.
    """
    if not path.is_dir() or tool_of(path) != OURS:
        return path

    # Results are in the folder or up to two levels below.
    files: list[Path] = []
    for pattern in ("*", "*/*", "*/*/*"):
        files += [file for file in sorted(path.glob(pattern)) if file.is_file()]
    results = [file.parent for file in files if file.match("samples_*.jsonl") or file.suffix == ".eval"]
    for file in files:
        has_items = file.with_name(f"{file.stem}.items.jsonl") in files
        if file.suffix == ".json" and has_items:
            results.append(file)
    results = list(dict.fromkeys(results))  # a folder once, however many logs it has

    if len(results) > 1:
        names = ", ".join(str(result.relative_to(path)) for result in results[:MAX_NAMED_RESULTS])
        if len(results) > MAX_NAMED_RESULTS:
            names += ", …"
        raise DataError(f"{path} holds {len(results)} results: {names}; name one of them")
    if results:
        return results[0]

    averages = [file for file in files if file.match("results_*.json")]
    if averages:
        raise DataError(
            f"{path}: {averages[0].relative_to(path)} has only averages, and there is no samples_*.jsonl beside it; "
            "run lm_eval again with --log_samples"
        )
    return path


def tool_of(path: Path) -> str:
    """Return the tool that wrote the results at `path`: OURS, LM_EVAL or INSPECT.

    Names of files decide, or the keys of a JSON file. Anything that is not clearly another tool's is taken for ours,
    because our own reader then says what is wrong with it. Raises TooLargeError.
    """
    if path.is_dir():
        if any(path.glob("samples_*.jsonl")):
            return LM_EVAL
        return INSPECT if _inspect_logs(path) else OURS

    if path.suffix == ".eval":
        return INSPECT
    if path.suffix == ".jsonl" and not path.name.endswith(".items.jsonl"):
        return LM_EVAL

    try:
        content = parse_json(read_at_most(path, MAX_JSON_BYTES, "results in JSON", CONVERSION_HINT))
    except TooLargeError:
        raise
    except (OSError, ValueError):
        return OURS
    if not isinstance(content, dict):
        return OURS
    if isinstance(content.get("eval"), dict):
        return INSPECT
    return LM_EVAL if "results" in content and "configs" in content else OURS


class Log(NamedTuple):
    """A log of one task, as the records of our own evaluations."""

    task: str
    model: str | None
    """None if the log does not name its model."""
    record: Record
    items: list[Record]
    model_facts: Record
    """Fields of Results about the model."""


def _read_logs(path: Path, tool: str, cluster: str | None) -> Results:
    """Read the logs of one model at `path`, a file or a folder that `tool` has written. Raises DataError."""
    list_logs = _lm_eval_logs if tool == LM_EVAL else _inspect_logs
    read_log = _read_lm_eval if tool == LM_EVAL else _read_inspect
    logs: dict[str, Log] = {}
    files: dict[str, Path] = {}
    """Both by the name of the task."""
    for file in list_logs(path):
        with _unexpected_values_as_data_errors(file, tool):
            log = read_log(file, cluster)
        if log.task in logs:
            raise DataError(
                f"{path} has two logs of {log.task}, {files[log.task].name} and {file.name}; give one file, or move "
                "one away"
            )
        logs[log.task] = log
        files[log.task] = file

    models = list(dict.fromkeys(log.model for log in logs.values() if log.model is not None))
    if len(models) > 1:
        raise DataError(f"{path} has logs of {' and '.join(models)}; expected a folder for each model, or files")
    folder = path if path.is_dir() else path.parent
    return Results(
        model=models[0] if models else folder.name or path.stem,
        suite=tool,
        source=str(path),
        tasks={task: log.record for task, log in logs.items()},
        items={task: log.items for task, log in logs.items()},
        path=path,
        **log.model_facts,
    )


# --------------------------------------------------------------------------------------------- lm-evaluation-harness


def _lm_eval_logs(path: Path) -> list[Path]:
    """Return the sample files of a folder, or those beside a `results_DATE.json`; any other file is one itself.

    Raises DataError for a results file without samples.
    """
    if path.is_dir():
        return sorted(path.glob("samples_*.jsonl"))
    if path.suffix != ".json":
        return [path]
    date = path.stem.rsplit("_", 1)[-1]
    files = [file for file in sorted(path.parent.glob("samples_*.jsonl")) if file.stem.endswith(f"_{date}")]
    if not files:
        raise DataError(
            f"{path} has only averages, and there is no samples_*_{date}.jsonl beside it; run lm_eval again with "
            "--log_samples"
        )
    return files


def _read_lm_eval(file: Path, cluster: str | None) -> Log:
    """Read `samples_TASK_DATE.jsonl`, and what the `results_DATE.json` beside it says, if that is there.

    The samples become the rows of the result. Releases, settings and the model's name are only in the other file.
    Raises DataError.
    """
    file_name = SAMPLES.fullmatch(file.name)
    task = file_name["task"] if file_name else file.stem.removeprefix("samples_")
    averages: Record = {}
    averages_files = sorted(file.parent.glob(f"*_{file_name['date']}.json")) if file_name else []
    if averages_files:
        averages = _read_json(read_at_most(averages_files[0], MAX_JSON_BYTES, "results"), str(averages_files[0]))

    higher_is_better = (averages.get("higher_is_better") or {}).get(task) or {}
    rows = _read_lm_eval_rows(file, higher_is_better, cluster)

    # Settings by which two results are compared.
    num_samples = (averages.get("n-samples") or {}).get(task) or {}
    is_limited = num_samples.get("effective", 0) < num_samples.get("original", 0)
    settings = {
        "limit": num_samples["effective"] if is_limited else None,
        "prompts": "by a chat template" if averages.get("chat_template") else None,
    }
    version = (averages.get("versions") or {}).get(task)
    code = f"lm-eval {averages.get('lm_eval_version', OLDER_RELEASE)}, task version {version}"
    record, items = _build(task, str(file), rows, settings, code, cluster)

    # The model.
    config = averages["config"] if isinstance(averages.get("config"), dict) else {}
    model_facts = {
        "save_id": config.get("model_sha") or None,
        "num_parameters": config.get("model_num_parameters"),
        "precision": str(config.get("model_dtype", "")).removeprefix("torch."),
    }
    model = str(averages["model_name"]) if averages.get("model_name") else None
    return Log(task, model, record, items, model_facts)


def _read_lm_eval_rows(file: Path, higher_is_better: Record, cluster: str | None) -> list[Row]:
    """Return the rows of a file of samples.

    A task may extract answers from the model's text by several filters, and then has a sample for each item and filter.
    Their metrics become one row, named "METRIC,FILTER", or "METRIC" if there is a single filter.

    higher_is_better, cluster: as for `_lm_eval_row`. Raises DataError for a file without samples, and for two samples
    of the same item and filter.
    """
    rows: dict[int, Row] = {}
    seen: set[tuple[int, str]] = set()
    # One sample at a time, because as Python objects, all of them take many times the file's bytes.
    for sample in _lm_eval_samples(file):
        row = _lm_eval_row(sample, str(file), higher_is_better, cluster)
        key = (row.index, _filter_of(sample))
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


def _lm_eval_samples(file: Path) -> Iterator[Record]:
    """Yield the samples of a file, one in each line. Raises DataError."""
    try:
        for number, line in enumerate(read_lines_at_most(file, MAX_LOG_BYTES, "a log"), start=1):
            if line.strip():
                yield _read_json(line, f"{file}, line {number}")
    except TooLargeError:
        raise
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error}") from error


def _filter_of(sample: Record) -> str:
    """Return the name of the filter that extracted a sample's answer. Older releases do not write it."""
    return str(sample.get("filter", NO_FILTER))


def _lm_eval_row(sample: Record, file: str, higher_is_better: Record, cluster: str | None) -> Row:
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
        if metric == BITS and isinstance(value, list) and len(value) == 2 and all(map(_is_finite, value)):
            nats_and_bytes = (-value[0], value[1])
        elif higher_is_better.get(metric, True):
            number = _number(value)
            if number is not None:
                values[f"{metric},{_filter_of(sample)}"] = number
    return Row(
        index=index,
        id=f"item {index}",
        row_hash=fingerprint([sample["doc_hash"], sample.get("target_hash")]),
        prompt_hash=fingerprint(sample["arguments"]),
        group=_group_of(sample["doc"], cluster),
        values=values,
        nats_and_bytes=nats_and_bytes,
    )


# -------------------------------------------------------------------------------------------------------- Inspect


def _inspect_logs(path: Path) -> list[Path]:
    """Return the logs of a folder; any other path is a log itself."""
    if not path.is_dir():
        return [path]
    eval_files = sorted(path.glob("*.eval"))
    # Inspect writes a list of the folder's logs into logs.json.
    json_files = [file for file in sorted(path.glob("*.json")) if file.name != "logs.json"]
    return eval_files + [file for file in json_files if tool_of(file) == INSPECT]


@contextmanager
def _open_inspect(file: Path) -> Iterator[tuple[Record, Iterator[Record]]]:
    """Yield a finished log's header, and its samples one by one.

    An `.eval` is a ZIP archive with `header.json` and a file for each sample. A `.json` has everything in one object.
    Raises DataError.
    """
    try:
        if file.suffix == ".json":
            log = _read_json(read_at_most(file, MAX_JSON_BYTES, "a log in JSON"), str(file))
            _check_header(log, file)
            yield log, iter(log.get("samples") or [])
            return

        with open(file, "rb", opener=open_regular) as raw_file, zipfile.ZipFile(raw_file) as archive:
            if "header.json" not in archive.namelist():
                raise DataError(f"{file} has no header.json: the evaluation did not end; run it again")
            header = _read_json(read_member(archive, "header.json"), f"{file}: header.json")
            _check_header(header, file)
            yield header, _samples_in(archive, str(file))
    except UserError:
        raise
    except (OSError, EOFError, RuntimeError, zlib.error, zipfile.BadZipFile) as error:
        raise DataError(f"{file} cannot be read as an Inspect log: {error}") from error


def _check_header(header: Record, file: Path) -> None:
    """Raise DataError unless this is the header of a log whose evaluation has finished."""
    if not isinstance(header.get("eval"), dict):
        raise DataError(f"{file} is not a log of Inspect: it has no 'eval'")
    if header.get("status") != "success":
        raise DataError(
            f"{file}: the evaluation has status {header.get('status')!r}, expected 'success'; finish it: inspect "
            "eval-retry"
        )


def _samples_in(archive: zipfile.ZipFile, file: str) -> Iterator[Record]:
    """Yield the samples of an `.eval`. Raises TooLargeError if they are too large together; each has a limit too."""
    remaining_bytes = MAX_LOG_BYTES
    for name in archive.namelist():
        if not name.startswith("samples/"):
            continue
        content = read_member(archive, name)
        remaining_bytes -= len(content)
        if remaining_bytes < 0:
            raise too_large(file, MAX_LOG_BYTES, "a log, unpacked")
        yield _read_json(content, f"{file}: {name}")


def read_member(archive: zipfile.ZipFile, name: str) -> bytes:
    """Return the content of a file of a ZIP archive, which newer releases of Inspect compress with Zstandard.

    Raises DataError for more than MAX_JSON_BYTES, and for a compression that Inspect does not use: Python unpacks a
    block of bzip2 whole, and 4 kB of it may become gigabytes.
    """
    member = archive.getinfo(name)
    location = f"{archive.filename}: {name}"
    if member.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with archive.open(member) as content:
            return read_file_at_most(content, MAX_JSON_BYTES, location, "a sample")
    if member.compress_type != ZSTANDARD:
        raise DataError(
            f"{location} is compressed by ZIP's method {member.compress_type}, expected deflate or Zstandard"
        )

    # Find the compressed bytes by hand. A name and an extra field stand before them. Their lengths are taken from the
    # local header, because those in the archive's directory may differ.
    file = archive.fp
    assert file is not None
    file.seek(member.header_offset)
    local_header = file.read(ZIP_LOCAL_HEADER_BYTES)
    name_length = int.from_bytes(local_header[26:28], "little")
    extra_length = int.from_bytes(local_header[28:30], "little")
    file.seek(name_length + extra_length, io.SEEK_CUR)
    compressed = file.read(min(member.compress_size, MAX_JSON_BYTES))
    with open_unpacked(io.BytesIO(compressed), "zstd") as content:
        return read_file_at_most(content, MAX_JSON_BYTES, location, "a sample")


def _read_inspect(file: Path, cluster: str | None) -> Log:
    """Read a log of Inspect. The epochs of a sample, which ask it again, become one row. Raises DataError."""
    rows_by_sample: dict[str, list[Row]] = {}
    with _open_inspect(file) as (header, samples):
        spec = header["eval"]
        config = spec.get("config") or {}
        reducers = config.get("epochs_reducer")
        if reducers and "mean" not in reducers:
            raise DataError(
                f"{file}: epochs_reducer is {', '.join(reducers)}; compare takes the mean of a sample's epochs"
            )
        for sample in samples:
            row = _inspect_row(sample, str(file), cluster)
            sample_key = json.dumps(sample["id"])  # 1 and "1" are two samples
            rows_by_sample.setdefault(sample_key, []).append(row)
    if not rows_by_sample:
        raise DataError(f"{file} has no samples; log them: inspect eval without --no-log-samples")
    rows = [_mean_of(epochs) for epochs in rows_by_sample.values()]

    task = str(spec.get("task"))
    release = (spec.get("packages") or {}).get("inspect_ai", OLDER_RELEASE)
    settings = _inspect_settings(header, len(rows))
    record, items = _build(task, str(file), rows, settings, f"Inspect {release}", cluster)
    generation = (header.get("plan") or {}).get("config") or {}
    record["generation"] = {key: value for key, value in generation.items() if value is not None}
    return Log(task, str(spec.get("model")), record, items, {"precision": ""})


def _inspect_settings(header: Record, num_rows: int) -> Record:
    """Return the settings of a log of Inspect that must be equal for two results to be comparable."""
    spec = header["eval"]
    config = spec.get("config") or {}
    dataset = spec.get("dataset") or {}
    plan = header.get("plan") or {}
    # A limit as large as the data set is none.
    is_limited = config.get("limit") is not None and num_rows < (dataset.get("samples") or math.inf)
    return {
        "limit": num_rows if is_limited else None,
        "sample_id": config.get("sample_id"),
        "epochs": config.get("epochs"),
        "task_version": spec.get("task_version"),
        "task_args": spec.get("task_args"),
        "solver": [{key: step.get(key) for key in ("solver", "params")} for step in plan.get("steps") or []],
        "scorers": [{key: scorer.get(key) for key in ("name", "options")} for scorer in spec.get("scorers") or []],
    }


def _inspect_row(sample: Record, file: str, cluster: str | None) -> Row:
    """Return the row of one sample of an Inspect log.

    A sample that ended with an error has no values. The row's index is the sample's id, if that is a whole number, and
    otherwise a hash of the id. The prompt is left empty, because the settings of the task decide it.

    file: the log, as errors name it.
    cluster: field of the sample's metadata that related samples share, or None.

    Raises DataError if the sample lacks its id, input or target.
    """
    for key in ("id", "input", "target"):
        if key not in sample:
            raise DataError(f"{file}: a sample has no {key}, by which samples are told apart")

    values: dict[str, float] = {}
    if not sample.get("error"):
        for scorer, score in (sample.get("scores") or {}).items():
            values |= _inspect_values(scorer, score)

    sample_id = sample["id"]
    is_index = type(sample_id) is int and sample_id >= 0
    if is_index:
        index = sample_id
    else:
        digits = fingerprint(str(sample_id)).removeprefix("sha256:")[:INDEX_DIGITS]
        index = int(digits, base=16)
    row_hash = fingerprint([sample["input"], sample.get("choices"), sample["target"]])
    group = _group_of(sample.get("metadata"), cluster)
    return Row(index, f"sample {sample_id}", row_hash, "", group, values)


def _inspect_values(scorer: str, score: Any) -> dict[str, float]:
    """Return metric -> number from 0 to 1 of what one scorer of Inspect gave a sample.

    The metric is the scorer's name, or `scorer/key` if the score has several values. Values that are not such a number,
    and have no meaning as one (NUMBERS_OF_WORDS), are left out.
    """
    value = score.get("value") if isinstance(score, dict) else None
    values_by_metric: dict[str, Any] = {scorer: value}
    if isinstance(value, dict):
        values_by_metric = {f"{scorer}/{key}" if key else scorer: part for key, part in value.items()}

    numbers: dict[str, float] = {}
    for metric, part in values_by_metric.items():
        if isinstance(part, str):
            part = NUMBERS_OF_WORDS.get(part, part)
        number = _number(part)
        if number is not None:
            numbers[metric] = number
    return numbers


def _mean_of(epochs: Sequence[Row]) -> Row:
    """Return one row for the epochs of a sample, with the mean of each metric that every scored epoch has."""
    scored = [row.values for row in epochs if row.values]
    means = {}
    for metric in scored[0] if scored else ():
        if all(metric in values for values in scored):
            means[metric] = sum(values[metric] for values in scored) / len(scored)
    return epochs[0]._replace(values=means)


# ------------------------------------------------------------------------------------------------------ both tools


def _build(
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
    metrics = [BITS] if is_text else _shared_metrics(scored)
    if not metrics:
        partial_metrics = ",".join(sorted({metric for row in rows for metric in row.values}))
        only_for_some = f", only for some of them: {partial_metrics}" if partial_metrics else ""
        raise DataError(
            f"{file}: {task} has no metric with a number from 0 to 1 for each item{only_for_some}; compare needs one: "
            "leave this log out"
        )

    clusters = _clusters_of(rows, file)
    items = [_build_item(task, row, [] if is_text else metrics, clusters) for row in scored]

    # If the settings do not decide the prompts, two results are comparable only with the same ones.
    prompts = settings.get("prompts")
    if prompts is None and all(row.prompt_hash for row in rows):
        prompts = fingerprint([[row.index, row.prompt_hash] for row in rows])
    cluster_setting = {"cluster": cluster} if any(row.group for row in rows) else {}
    data = [[row.index, row.row_hash] for row in rows]
    num_skipped = len(rows) - len(items)
    record: Record = {
        "n": len(items),
        "type": "perplexity" if is_text else code.split()[0],
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


def _build_item(task: str, row: Row, metrics: Sequence[str], clusters: Mapping[int, str]) -> Record:
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


def _shared_metrics(scored: Sequence[Row]) -> list[str]:
    """Return the metrics that every scored row has, in the order of the first one."""
    if not scored:
        return []
    return [metric for metric in scored[0].values if all(metric in row.values for row in scored)]


def _clusters_of(rows: Sequence[Row], file: str) -> dict[int, str]:
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


def _number(value: Any) -> float | None:
    """Return a number from 0 to 1, also if it is written as a text; None for anything else.

    Other values of metrics are pairs, perplexities, texts and NaN.
    """
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    return float(value) if _is_finite(value) and 0 <= value <= 1 else None


def _is_finite(value: Any) -> bool:
    """Return whether a value is a number, and neither NaN nor infinite."""
    return isinstance(value, bool | int | float) and math.isfinite(value)


def _group_of(row: Any, field_name: str | None) -> str | None:
    """Return the field of a row that related rows share; None without --cluster, and if the row has no such field."""
    if field_name is None or not isinstance(row, Mapping):
        return None
    value = row.get(field_name)
    return str(value) if isinstance(value, str | int) else None


@contextmanager
def _unexpected_values_as_data_errors(file: Path, tool: str) -> Iterator[None]:
    """Raise DataError for a log with a value of another type than the tool writes, which no reader checks for."""
    try:
        yield
    except UserError:
        raise
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise DataError(
            f"{file} is not as {tool} writes its logs ({error}); expected one that was not edited"
        ) from error


def _read_json(text: str | bytes, location: str) -> Record:
    """Parse a JSON object. `location` is where the text is, for errors. Raises DataError."""
    try:
        content = parse_json(text)
    except ValueError as error:
        raise DataError(f"{location} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise DataError(f"{location} is not a JSON object")
    return content
