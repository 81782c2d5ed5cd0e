"""Logs of lm-evaluation-harness and Inspect -> Results, so that `compare` tests what other tools have measured.

lm-evaluation-harness: `samples_TASK_DATE.jsonl`, which --log_samples writes. The `results_DATE.json` beside it tells
the model, its size, the limit and whether a chat template was used. Inspect: `.eval` or `.json`, a task each. A folder
is a model: all its logs are read. No torch, and neither tool, is needed.

An item is one row of the data, with a number from 0 to 1 for each metric. Other metrics are left out. Rows are compared
by hash, and so are prompts, unless a chat template made them: those of two models differ rightly. Equal rows are one
cluster, and so are those that share a field that the user names.
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
from llmfoundry_lite.evaluation.prompts import find_connected_rows
from llmfoundry_lite.evaluation.records import BITS, Record, bits_per_byte, by_document, hash_of, mean_and_error
from llmfoundry_lite.evaluation.results import Results, load_results, read_results
from llmfoundry_lite.files import open_regular

OURS, LM_EVAL, INSPECT = "llmfoundry-lite", "lm-eval", "Inspect"
SAMPLES = re.compile(r"samples_(?P<task>.+)_(?P<date>\d{4}-\d\d-\d\dT[\d.-]+)\.jsonl")
NO_METRICS = {
    *("doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics", "doc_hash"),
    *("prompt_hash", "target_hash"),
}
"""Keys of lm-eval's samples that are no metrics, for its older releases, which do not list a sample's `metrics`."""
LETTERS = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
"""Inspect's values for correct, partial, incorrect and no answer, and the words that it counts as such."""
INDEX_DIGITS = 12
"""Hexadecimal digits of a hash that stand for a sample whose id is no number."""
IN_PARTS = (
    "convert a log of Inspect, to be read sample by sample: inspect log convert --to eval --output-dir FOLDER FILE"
)
ZSTANDARD = 93
"""The ZIP format's number for Zstandard, which Python's zipfile knows from 3.14 on."""


class Row(NamedTuple):
    """A row of a log: which it is, what it asks, and what it scored."""

    index: int
    id: str  # as a message names it
    row: str  # hash of the data's row
    prompt: str  # hash of all that the model was given; empty where the settings tell it
    group: str | None  # the field that related rows share
    values: dict[str, float]  # metric -> 0 to 1; empty for a row that was not scored
    text: tuple[float, int] | None = None  # (nats, bytes) of a held-out text


def load_logs(paths: Sequence[Path], cluster: str | None) -> list[Results]:
    """Load results of one tool, whichever it is; `cluster` is a field of the rows of another tool than ours.

    Raises DataError for what cannot be read, or cannot be compared item by item.
    """
    paths = [result_in(path) for path in paths]
    tools = {path: tool_of(path) for path in paths}
    first = paths[0]
    if other := next((path for path in paths if tools[path] != tools[first]), None):
        for path in paths:
            if tools[path] == OURS:
                read_results(path)  # raises DataError, which says why no tool's reader fits
        raise DataError(
            f"{first} is of {tools[first]}, {other} of {tools[other]}: each tool prompts and scores in its own way; "
            "compare results of one tool"
        )
    if tools[first] == OURS:
        if cluster is not None:
            raise ConfigError(
                f"--cluster {cluster}: {first} is a result of ours, which knows its clusters; name the column in the "
                f"task file: cluster: {cluster}"
            )
        return load_results(paths)
    found = load_results(paths, partial(_read_logs, tool=tools[first], cluster=cluster))
    for results in found if cluster is not None else ():
        if not any("cluster" in task["settings"] for task in results.tasks.values()):
            raise DataError(f"--cluster {cluster}: no row of {results.path} has that field as a text or a whole number")
    return found


def result_in(path: Path) -> Path:
    """Return the one result within an output folder: lm_eval writes OUT/MODEL/samples_*, we SUITE/MODEL.json.

    Any other path is returned as it is. Raises DataError for a folder with several, and for averages without samples.
    """
    if not path.is_dir() or tool_of(path) != OURS:
        return path
    files = [file for depth in ("", "*/", "*/*/") for file in sorted(path.glob(f"{depth}*")) if file.is_file()]
    averages = [file for file in files if file.match("results_*.json")]
    found = [file.parent for file in files if file.match("samples_*.jsonl") or file.suffix == ".eval"]
    found += [file for file in files if file.with_name(f"{file.stem}.items.jsonl") in files and file.suffix == ".json"]
    found = list(dict.fromkeys(found))
    if len(found) > 1:
        names = ", ".join(str(one.relative_to(path)) for one in found[:6]) + ", …" * (len(found) > 6)
        raise DataError(f"{path} holds {len(found)} results: {names}; name one of them")
    if not found and averages:
        raise DataError(
            f"{path}: {averages[0].relative_to(path)} has only averages, and there is no samples_*.jsonl beside it; "
            "run lm_eval again with --log_samples"
        )
    return found[0] if found else path


def tool_of(path: Path) -> str:
    """Return the tool whose results are at `path`, by its names and keys; ours unless it is seen to be another's."""
    if path.is_dir():
        if any(path.glob("samples_*.jsonl")):
            return LM_EVAL
        if _inspect_logs(path):
            return INSPECT
        return OURS  # our reader says what is expected
    if path.suffix in (".jsonl", ".eval") and not path.name.endswith(".items.jsonl"):
        return LM_EVAL if path.suffix == ".jsonl" else INSPECT
    try:
        facts = parse_json(read_at_most(path, MAX_JSON_BYTES, "results in JSON", IN_PARTS))
    except TooLargeError:
        raise
    except (OSError, ValueError):
        return OURS  # our reader says what is wrong
    if not isinstance(facts, dict):
        return OURS
    if isinstance(facts.get("eval"), dict):
        return INSPECT
    return LM_EVAL if "results" in facts and "configs" in facts else OURS


class Log(NamedTuple):
    """A log of one task."""

    task: str
    model: str | None  # None: the log does not say
    record: Record
    items: list[Record]
    facts: Record  # of the model, as Results has them


def _read_logs(path: Path, tool: str, cluster: str | None) -> Results:
    """Read the logs of one model at `path`. Raises DataError."""
    logs: dict[str, tuple[Path, Log]] = {}
    for file in (_lm_eval_logs if tool == LM_EVAL else _inspect_logs)(path):
        with _refuse_other_layouts(file, tool):
            log = (_read_lm_eval if tool == LM_EVAL else _read_inspect)(file, cluster)
        if log.task in logs:
            raise DataError(
                f"{path} has two logs of {log.task}, {logs[log.task][0].name} and {file.name}; give one file, or move "
                "one away"
            )
        logs[log.task] = file, log
    models = list(dict.fromkeys(log.model for _, log in logs.values() if log.model is not None))
    if len(models) > 1:
        raise DataError(f"{path} has logs of {' and '.join(models)}; expected a folder for each model, or files")
    folder = path if path.is_dir() else path.parent
    return Results(
        model=models[0] if models else folder.name or path.stem,
        suite=tool,
        source=str(path),
        tasks={task: log.record for task, (_, log) in logs.items()},
        items={task: log.items for task, (_, log) in logs.items()},
        path=path,
        **log.facts,
    )


# --------------------------------------------------------------------------------------------- lm-evaluation-harness


def _lm_eval_logs(path: Path) -> list[Path]:
    if path.suffix != ".json":
        return sorted(path.glob("samples_*.jsonl")) if path.is_dir() else [path]
    date = path.stem.rsplit("_", 1)[-1]
    files = [file for file in sorted(path.parent.glob("samples_*.jsonl")) if file.stem.endswith(f"_{date}")]
    if not files:
        raise DataError(
            f"{path} has only averages, and there is no samples_*_{date}.jsonl beside it; run lm_eval again with "
            "--log_samples"
        )
    return files


def _read_lm_eval(file: Path, cluster: str | None) -> Log:
    named, facts = SAMPLES.fullmatch(file.name), {}
    task = named["task"] if named else file.stem.removeprefix("samples_")
    if named and (about_all := sorted(file.parent.glob(f"*_{named['date']}.json"))):  # somebody may have moved it
        facts = _read_json(read_at_most(about_all[0], MAX_JSON_BYTES, "results"), str(about_all[0]))
    directions = (facts.get("higher_is_better") or {}).get(task) or {}
    rows: dict[int, Row] = {}
    seen: set[tuple[int, str]] = set()
    for sample in _lm_eval_samples(file):  # one at a time: as objects, all take many times the file's bytes
        row = _lm_eval_row(sample, str(file), directions, cluster)
        key = (row.index, str(sample.get("filter", "none")))
        if key in seen:
            raise DataError(f"{file} has {row.id} twice; is it two logs in one? Give a log of one evaluation")
        seen.add(key)
        rows[row.index] = row._replace(values={**(rows[row.index].values if row.index in rows else {}), **row.values})
    if not rows:
        raise DataError(f"{file} has no samples; expected a line for each item, as lm_eval --log_samples writes them")
    if len(filters := {name for _, name in seen}) == 1:  # where there is one filter, metrics are not named after it
        suffix = f",{filters.pop()}"
        for index, row in rows.items():
            rows[index] = row._replace(values={key.removesuffix(suffix): one for key, one in row.values.items()})
    sizes = (facts.get("n-samples") or {}).get(task) or {}
    settings = {
        "limit": sizes["effective"] if sizes.get("effective", 0) < sizes.get("original", 0) else None,
        "prompts": "by a chat template" if facts.get("chat_template") else None,
    }
    version = (facts.get("versions") or {}).get(task)
    code = f"lm-eval {facts.get('lm_eval_version', 'of an unknown release')}, task version {version}"
    about = facts["config"] if isinstance(facts.get("config"), dict) else {}
    model = {
        "save_id": about.get("model_sha") or None,
        "num_parameters": about.get("model_num_parameters"),
        "precision": str(about.get("model_dtype", "")).removeprefix("torch."),
    }
    built = _build(task, str(file), list(rows.values()), settings, code, cluster)
    return Log(task, str(facts["model_name"]) if facts.get("model_name") else None, *built, model)


def _lm_eval_samples(file: Path) -> Iterator[Record]:
    try:
        for number, line in enumerate(read_lines_at_most(file, MAX_LOG_BYTES, "a log"), start=1):
            if line.strip():
                yield _read_json(line, f"{file}, line {number}")
    except TooLargeError:
        raise
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error}") from error


def _lm_eval_row(sample: Record, where: str, directions: Record, cluster: str | None) -> Row:
    for key in ("doc_id", "doc", "doc_hash", "arguments"):
        if key not in sample:
            raise DataError(
                f"{where}: a sample has no {key}, by which items are told apart; log them with lm-eval 0.4.3 or newer"
            )
    index, row_filter = sample["doc_id"], str(sample.get("filter", "none"))
    if type(index) is not int or index < 0:
        raise DataError(f"{where}: doc_id is {index!r}, expected a whole number")
    names = sample.get("metrics") or [key for key in sample if key not in NO_METRICS]
    values, text = {}, None
    for name in names:
        value = sample.get(name)
        if name == BITS and isinstance(value, list) and len(value) == 2 and all(map(_is_finite, value)):
            text = (-value[0], value[1])
        elif directions.get(name, True) and (number := _number(value)) is not None:
            values[f"{name},{row_filter}"] = number
    return Row(
        index=index,
        id=f"item {index}",
        row=fingerprint([sample["doc_hash"], sample.get("target_hash")]),
        prompt=fingerprint(sample["arguments"]),
        group=_field(sample["doc"], cluster),
        values=values,
        text=text,
    )


# -------------------------------------------------------------------------------------------------------- Inspect


def _inspect_logs(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    others = (file for file in sorted(path.glob("*.json")) if file.name != "logs.json")
    return [*sorted(path.glob("*.eval")), *(file for file in others if tool_of(file) == INSPECT)]


@contextmanager
def _open_inspect(file: Path) -> Iterator[tuple[Record, Iterator[Record]]]:
    """Yield a finished log's header, and its samples one by one. Raises DataError."""
    try:
        if file.suffix == ".json":
            header = _read_json(read_at_most(file, MAX_JSON_BYTES, "a log in JSON"), str(file))
            yield _check_header(header, file), iter(header.get("samples") or [])
            return
        with open(file, "rb", opener=open_regular) as packed, zipfile.ZipFile(packed) as archive:
            names = archive.namelist()
            if "header.json" not in names:
                raise DataError(f"{file} has no header.json: the evaluation did not end; run it again")
            header = _read_json(read_member(archive, "header.json"), f"{file}: header.json")
            yield _check_header(header, file), _samples_of(archive, str(file))
    except UserError:
        raise
    except (OSError, EOFError, RuntimeError, zlib.error, zipfile.BadZipFile) as error:
        raise DataError(f"{file} cannot be read as a log of Inspect: {error}") from error


def _check_header(header: Record, file: Path) -> Record:
    if not isinstance(header.get("eval"), dict):
        raise DataError(f"{file} is not a log of Inspect: it has no 'eval'")
    if header.get("status") != "success":
        raise DataError(
            f"{file}: the evaluation has status {header.get('status')!r}, expected 'success'; finish it: inspect "
            "eval-retry"
        )
    return header


def _samples_of(archive: zipfile.ZipFile, where: str) -> Iterator[Record]:
    room = MAX_LOG_BYTES
    for name in archive.namelist():
        if name.startswith("samples/"):
            content = read_member(archive, name)
            if (room := room - len(content)) < 0:
                raise too_large(where, MAX_LOG_BYTES, "a log, unpacked")
            yield _read_json(content, f"{where}: {name}")


def read_member(archive: zipfile.ZipFile, name: str) -> bytes:
    """Return the content of a file of a ZIP archive, which newer releases of Inspect compress with Zstandard.

    Raises DataError for more than MAX_JSON_BYTES, and for a compression that Inspect does not use: Python unpacks a
    block of bzip2 whole, and 4 kB of it may become gigabytes.
    """
    info, where = archive.getinfo(name), f"{archive.filename}: {name}"
    if info.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with archive.open(info) as content:
            return read_file_at_most(content, MAX_JSON_BYTES, where, "a sample")
    if info.compress_type != ZSTANDARD:
        raise DataError(f"{where} is compressed by ZIP's method {info.compress_type}, expected deflate or Zstandard")
    file = archive.fp
    assert file is not None
    file.seek(info.header_offset)
    local = file.read(30)  # its name and extra field may be longer or shorter than the directory's
    file.seek(int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little"), io.SEEK_CUR)
    packed = file.read(min(info.compress_size, MAX_JSON_BYTES))
    with open_unpacked(io.BytesIO(packed), "zstd") as content:
        return read_file_at_most(content, MAX_JSON_BYTES, where, "a sample")


def _read_inspect(file: Path, cluster: str | None) -> Log:
    epochs: dict[str, list[Row]] = {}
    with _open_inspect(file) as (header, samples):
        spec, plan = header["eval"], header.get("plan") or {}
        config = spec.get("config") or {}
        reducers = config.get("epochs_reducer")
        if reducers and "mean" not in reducers:
            raise DataError(
                f"{file}: epochs_reducer is {', '.join(reducers)}; compare takes the mean of a sample's epochs"
            )
        for sample in samples:
            row = _inspect_row(sample, str(file), cluster)
            epochs.setdefault(json.dumps(sample["id"]), []).append(row)  # 1 and "1" are two samples
    if not epochs:
        raise DataError(f"{file} has no samples; log them: inspect eval without --no-log-samples")
    rows = [_mean_of(rows) for rows in epochs.values()]
    is_cut = config.get("limit") is not None and len(rows) < ((spec.get("dataset") or {}).get("samples") or math.inf)
    settings = {
        "limit": len(rows) if is_cut else None,
        "sample_id": config.get("sample_id"),
        "epochs": config.get("epochs"),
        "task_version": spec.get("task_version"),
        "task_args": spec.get("task_args"),
        "solver": [{key: step.get(key) for key in ("solver", "params")} for step in plan.get("steps") or []],
        "scorers": [{key: one.get(key) for key in ("name", "options")} for one in spec.get("scorers") or []],
    }
    generation = {key: value for key, value in (plan.get("config") or {}).items() if value is not None}
    release = (spec.get("packages") or {}).get("inspect_ai", "of an unknown release")
    task = str(spec.get("task"))
    record, items = _build(task, str(file), rows, settings, f"Inspect {release}", cluster)
    return Log(task, str(spec.get("model")), {**record, "generation": generation}, items, {"precision": ""})


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
    group = _field(sample.get("metadata"), cluster)
    return Row(index, f"sample {sample_id}", row_hash, "", group, values)


def _inspect_values(scorer: str, score: Any) -> dict[str, float]:
    """Return metric -> number from 0 to 1 of what one scorer of Inspect gave a sample.

    The metric is the scorer's name, or `scorer/key` if the score has several values. Values that are no such number,
    and have no meaning as one (LETTERS), are left out.
    """
    value = score.get("value") if isinstance(score, dict) else None
    values_by_metric: dict[str, Any] = {scorer: value}
    if isinstance(value, dict):
        values_by_metric = {f"{scorer}/{key}" if key else scorer: part for key, part in value.items()}

    numbers: dict[str, float] = {}
    for metric, part in values_by_metric.items():
        if isinstance(part, str):
            part = LETTERS.get(part, part)
        number = _number(part)
        if number is not None:
            numbers[metric] = number
    return numbers


def _mean_of(epochs: Sequence[Row]) -> Row:
    """Return one row for the epochs of a sample: the mean of each metric that all scored epochs have."""
    scored = [row.values for row in epochs if row.values]
    shared = [name for name in scored[0] if all(name in values for values in scored)] if scored else []
    return epochs[0]._replace(values={name: sum(v[name] for v in scored) / len(scored) for name in shared})


# ------------------------------------------------------------------------------------------------------------ both


def _build(
    task: str, where: str, rows: list[Row], settings: Record, code: str, cluster: str | None
) -> tuple[Record, list[Record]]:
    """Return a task's record and items, as an evaluation of ours would have them. Raises DataError."""
    rows = sorted(rows, key=lambda row: row.index)
    scored = [row for row in rows if row.values or row.text is not None]
    is_text = bool(scored) and all(row.text is not None for row in rows)
    named = scored[0].values if scored else ()
    metrics = [BITS] if is_text else [name for name in named if all(name in row.values for row in scored)]
    if not metrics:
        names = sorted({name for row in rows for name in row.values})
        raise DataError(
            f"{where}: {task} has no metric with a number from 0 to 1 for each item"
            f"{f', only for some of them: {chr(44).join(names)}' if names else ''}; compare needs one: leave this log "
            "out"
        )
    groups = [row.group for row in rows]
    if None in groups and any(groups):
        raise DataError(f"{where}: {rows[groups.index(None)].id} lacks the field of --cluster, which others have")
    keys = [[("row", row.row), *([("group", row.group)] if row.group is not None else [])] for row in rows]
    first = find_connected_rows(keys)
    of_row = {row.index: str(groups[found] or rows[found].index) for row, found in zip(rows, first, strict=True)}
    has_clusters = any(groups) or first != list(range(len(rows)))
    items: list[Record] = []
    for row in scored:
        item: Record = {"task": task, "index": row.index, "id": row.id, "row": row.row, "prompt": row.prompt}
        item |= {"cluster": of_row[row.index]} if has_clusters else {}
        item |= {name: row.values[name] for name in metrics} if not is_text else {}
        if is_text and row.text is not None:
            item |= {"log_probability": [-row.text[0]], "num_characters": [row.text[1]]}
        items.append(item)
    data = [[row.index, row.row] for row in rows]
    prompts = settings.get("prompts")
    if prompts is None and all(row.prompt for row in rows):
        prompts = fingerprint([[row.index, row.prompt] for row in rows])
    record: Record = {
        "n": len(items),
        "type": "perplexity" if is_text else code.split()[0],
        "metric": metrics[0],
        "metrics": metrics,
        "settings": {**settings, "prompts": prompts, **({"cluster": cluster} if any(groups) else {})},
        "data_fingerprint": fingerprint(data),
        "fingerprint": fingerprint([settings, prompts, data]),
        "items_hash": hash_of(items),
        "code": code,
        "skipped": {"not scored": len(rows) - len(items)} if len(items) < len(rows) else None,
    }
    if is_text:
        record[BITS] = float(bits_per_byte(by_document(items).sum(axis=0)))
    else:
        for name in metrics:
            record[name], record[f"{name}_stderr"] = mean_and_error(items, name)
    return record, items


def _number(value: Any) -> float | None:
    """Return a number from 0 to 1, or None for anything else: a pair, a perplexity, a text, NaN."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    return float(value) if _is_finite(value) and 0 <= value <= 1 else None


def _is_finite(value: Any) -> bool:
    return isinstance(value, bool | int | float) and math.isfinite(value)


def _field(row: Any, name: str | None) -> str | None:
    value = row.get(name) if name is not None and isinstance(row, Mapping) else None
    return str(value) if isinstance(value, str | int) else None


@contextmanager
def _refuse_other_layouts(file: Path, tool: str) -> Iterator[None]:
    """Raise DataError where a log has a value of another kind than the tool writes."""
    try:
        yield
    except UserError:
        raise
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise DataError(
            f"{file} is not as {tool} writes its logs ({error}); expected one that was not edited"
        ) from error


def _read_json(text: str | bytes, where: str) -> Record:
    try:
        found = parse_json(text)
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise DataError(f"{where} is not a JSON object")
    return found
