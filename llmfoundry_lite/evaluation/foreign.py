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

import zstandard

from llmfoundry_lite.errors import ConfigError, DataError, UserError
from llmfoundry_lite.evaluation.records import BITS, Record, bits_per_byte, by_document, hash_of, mean_and_error
from llmfoundry_lite.evaluation.results import Results, load_results, read_results
from llmfoundry_lite.evaluation.tasks import fingerprint, join_rows

OURS, LM_EVAL, INSPECT = "llmfoundry-lite", "lm-eval", "Inspect"
SAMPLES = re.compile(r"samples_(?P<task>.+)_(?P<date>\d{4}-\d\d-\d\dT[\d.-]+)\.jsonl")
NO_METRICS = {
    *("doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics", "doc_hash"),
    *("prompt_hash", "target_hash"),
}
"""Keys of a sample of lm-eval's that are no metric. Releases before `metrics` do not list those."""
LETTERS = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
"""Inspect's values for correct, partial, incorrect and no answer, and the words that it counts as such."""
ZSTANDARD = 93
"""The ZIP format's number for it; Python's zipfile knows it from 3.14 on."""


class Row(NamedTuple):
    """A row of a log: which it is, what it asks, and what it scored."""

    index: int
    id: str  # as a message names it
    row: str  # hash of the data's row
    prompt: str  # hash of all that the model was given; empty where the settings tell it
    group: str | None  # the field that related rows share
    values: dict[str, float]  # metric -> 0 to 1; empty for a row that was not scored
    text: tuple[float, int] | None = None  # (nats, bytes) of a held-out text


def load_any(paths: Sequence[Path], cluster: str | None = None) -> list[Results]:
    """Load results of one tool, whichever it is; `cluster` is a field of the rows of another tool than ours.

    Raises DataError for what cannot be read, or cannot be compared item by item.
    """
    tools = {path: tool_of(path) for path in paths}
    first = paths[0]
    if other := next((path for path in paths if tools[path] != tools[first]), None):
        for path in paths:
            if tools[path] == OURS:
                read_results(path)  # or it says why it is nobody's
        raise DataError(
            f"{first} is of {tools[first]}, {other} of {tools[other]}: tools ask and score in ways of their own; "
            "compare results of one tool"
        )
    if tools[first] == OURS:
        if cluster is not None:
            raise ConfigError(
                f"--cluster {cluster}: {first} is a result of ours, which knows its clusters; name the column in the "
                f"task file: cluster: {cluster}"
            )
        return load_results(paths)
    found = load_results(paths, partial(_read_lm_eval if tools[first] == LM_EVAL else _read_inspect, cluster=cluster))
    for results in found if cluster is not None else ():
        if not any("cluster" in task["settings"] for task in results.tasks.values()):
            raise DataError(f"--cluster {cluster}: no row of {results.path} has that field as a text or a whole number")
    return found


def tool_of(path: Path) -> str:
    """Return the tool whose results are at `path`, by its names and keys; ours unless it is seen to be another's."""
    if path.is_dir():
        if any(path.glob("samples_*.jsonl")):
            return LM_EVAL
        if _inspect_logs(path):
            return INSPECT
        return OURS  # whose reader says what is expected
    if path.suffix in (".jsonl", ".eval") and not path.name.endswith(".items.jsonl"):
        return LM_EVAL if path.suffix == ".jsonl" else INSPECT
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return OURS
    if not isinstance(facts, dict):
        return OURS
    if isinstance(facts.get("eval"), dict):
        return INSPECT
    return LM_EVAL if "results" in facts and "configs" in facts else OURS


# --------------------------------------------------------------------------------------------- lm-evaluation-harness


def _read_lm_eval(path: Path, cluster: str | None) -> Results:
    files = sorted(path.glob("samples_*.jsonl")) if path.is_dir() else [path]
    if path.suffix == ".json":
        date = path.stem.rsplit("_", 1)[-1]
        files = [file for file in sorted(path.parent.glob("samples_*.jsonl")) if file.stem.endswith(f"_{date}")]
        if not files:
            raise DataError(
                f"{path} has averages alone, and no samples_*_{date}.jsonl lies beside it; run lm_eval again with "
                "--log_samples"
            )
    tasks: dict[str, tuple[Path, Record, list[Record]]] = {}
    facts: Record = {}
    models: dict[str, None] = {}
    for file in files:
        named = SAMPLES.fullmatch(file.name)
        task = named["task"] if named else file.stem.removeprefix("samples_")
        facts = _results_beside(file, named["date"]) if named else {}
        if task in tasks:
            raise DataError(
                f"{path} has two logs of {task}, {tasks[task][0].name} and {file.name}; give one file, or move one away"
            )
        with _refuse_other_layouts(file, LM_EVAL):
            tasks[task] = (file, *_lm_eval_task(task, file, facts, cluster))
        models |= {str(facts["model_name"]): None} if facts.get("model_name") else {}
    if len(models) > 1:
        raise DataError(f"{path} has logs of {' and '.join(models)}; expected a folder for each model, or files")
    settings = facts.get("config") if isinstance(facts.get("config"), dict) else {}
    assert settings is not None
    folder = path if path.is_dir() else path.parent
    return Results(
        model=str(facts.get("model_name") or folder.name or path.stem),
        suite=LM_EVAL,
        source=str(path),
        save_id=settings.get("model_sha") or None,
        num_parameters=settings.get("model_num_parameters"),
        precision=str(settings.get("model_dtype", "")).removeprefix("torch."),
        tasks={task: record for task, (_, record, _) in tasks.items()},
        items={task: items for task, (_, _, items) in tasks.items()},
        path=path,
    )


def _results_beside(file: Path, date: str) -> Record:
    """Return what lm_eval wrote about all tasks of that run; nothing where it was moved away."""
    found = sorted(file.parent.glob(f"*_{date}.json"))
    return _read_json(found[0].read_bytes(), str(found[0])) if found else {}


def _lm_eval_task(task: str, file: Path, facts: Record, cluster: str | None) -> tuple[Record, list[Record]]:
    samples = [_read_json(line, f"{file}, line {number}") for number, line in _lines(file)]
    if not samples:
        raise DataError(f"{file} has no samples; expected a line for each item, as lm_eval --log_samples writes them")
    filters = list(dict.fromkeys(str(sample.get("filter", "none")) for sample in samples))
    directions = (facts.get("higher_is_better") or {}).get(task) or {}
    rows: dict[int, Row] = {}
    seen: set[tuple[int, str]] = set()
    for sample in samples:
        row = _lm_eval_row(sample, str(file), len(filters) > 1, directions, cluster)
        key = (row.index, str(sample.get("filter", "none")))
        if key in seen:
            raise DataError(f"{file} has {row.id} twice; is it two logs in one? Give a log of one evaluation")
        seen.add(key)
        rows[row.index] = row._replace(values={**(rows[row.index].values if row.index in rows else {}), **row.values})
    sizes = (facts.get("n-samples") or {}).get(task) or {}
    is_cut = sizes.get("effective", 0) < sizes.get("original", 0)
    settings = {
        "limit": sizes["effective"] if is_cut else None,
        "prompts": "by a chat template" if facts.get("chat_template") else None,
    }
    code = f"lm-eval {facts.get('lm_eval_version', 'of an unknown release')}"
    version = (facts.get("versions") or {}).get(task)
    return _build(task, str(file), list(rows.values()), settings, f"{code}, task version {version}", cluster)


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    try:
        # Not splitlines(), which also splits at characters that JSON allows inside a text, such as U+2028.
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read: {error}") from error
    return ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def _lm_eval_row(sample: Record, where: str, names_filter: bool, directions: Record, cluster: str | None) -> Row:
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
            values[f"{name},{row_filter}" if names_filter else name] = number
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


def _inspect_logs(folder: Path) -> list[Path]:
    logs = sorted(folder.glob("*.eval"))
    return logs + [path for path in sorted(folder.glob("*.json")) if path.name != "logs.json" and _is_inspect(path)]


def _is_inspect(path: Path) -> bool:
    return tool_of(path) == INSPECT


def _read_inspect(path: Path, cluster: str | None) -> Results:
    files = _inspect_logs(path) if path.is_dir() else [path]
    tasks: dict[str, tuple[Path, Record, list[Record]]] = {}
    models: dict[str, Path] = {}
    for file in files:
        with _refuse_other_layouts(file, INSPECT):
            header, samples = _open_inspect(file)
            task, model = str(header["eval"].get("task")), str(header["eval"].get("model"))
            if task in tasks:
                raise DataError(
                    f"{path} has two logs of {task}, {tasks[task][0].name} and {file.name}; give one file, or move one "
                    "away"
                )
            models.setdefault(model, file)
            tasks[task] = (file, *_inspect_task(task, file, header, samples, cluster))
    if len(models) > 1:
        raise DataError(f"{path} has logs of {' and '.join(models)}; expected a folder for each model, or files")
    return Results(
        model=next(iter(models)),
        suite=INSPECT,
        source=str(path),
        precision="",
        tasks={task: record for task, (_, record, _) in tasks.items()},
        items={task: items for task, (_, _, items) in tasks.items()},
        path=path,
    )


def _open_inspect(file: Path) -> tuple[Record, list[Record]]:
    """Return a finished log's header, and its samples. Raises DataError."""
    try:
        if file.suffix == ".json":
            header = _read_json(file.read_bytes(), str(file))
            samples = header.get("samples") or []
        else:
            with zipfile.ZipFile(file) as archive:
                names = archive.namelist()
                if "header.json" not in names:
                    raise DataError(f"{file} has no header.json: the evaluation did not end; run it again")
                read = partial(read_member, archive)
                header = _read_json(read("header.json"), f"{file}: header.json")
                found = [name for name in names if name.startswith("samples/")]
                samples = [_read_json(read(name), f"{file}: {name}") for name in found]
    except (OSError, EOFError, RuntimeError, zlib.error, zipfile.BadZipFile, zstandard.ZstdError) as error:
        raise DataError(f"{file} cannot be read as a log of Inspect: {error}") from error
    if not isinstance(header.get("eval"), dict):
        raise DataError(f"{file} is no log of Inspect: it has no 'eval'")
    if header.get("status") != "success":
        raise DataError(
            f"{file}: the evaluation has status {header.get('status')!r}, expected 'success'; finish it: inspect "
            "eval-retry"
        )
    return header, samples


def read_member(archive: zipfile.ZipFile, name: str) -> bytes:
    """Return the content of a file of a ZIP archive, which newer releases of Inspect compress with Zstandard."""
    info = archive.getinfo(name)
    if info.compress_type != ZSTANDARD:
        return archive.read(info)
    file = archive.fp
    assert file is not None
    file.seek(info.header_offset)
    local = file.read(30)  # whose name and extra field may be of other lengths than the directory's
    file.seek(int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little"), io.SEEK_CUR)
    packed = file.read(info.compress_size)
    return zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True).read()


def _inspect_task(
    task: str, file: Path, header: Record, samples: Sequence[Record], cluster: str | None
) -> tuple[Record, list[Record]]:
    spec = header["eval"]
    config, plan = spec.get("config") or {}, header.get("plan") or {}
    if not samples:
        raise DataError(f"{file} has no samples; log them: inspect eval without --no-log-samples")
    reducers = config.get("epochs_reducer")
    if reducers and "mean" not in reducers:
        raise DataError(f"{file}: epochs_reducer is {', '.join(reducers)}; compare takes the mean of a sample's epochs")
    epochs: dict[str, list[Row]] = {}
    for sample in samples:
        row = _inspect_row(sample, str(file), cluster)
        epochs.setdefault(json.dumps(sample["id"]), []).append(row)  # 1 and "1" are two samples
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
    record, items = _build(task, str(file), rows, settings, f"Inspect {release}", cluster)
    return {**record, "generation": generation}, items


def _inspect_row(sample: Record, where: str, cluster: str | None) -> Row:
    for key in ("id", "input", "target"):
        if key not in sample:
            raise DataError(f"{where}: a sample has no {key}, by which samples are told apart")
    name = f"sample {sample['id']}"
    row = fingerprint([sample["input"], sample.get("choices"), sample["target"]])
    values: dict[str, float] = {}
    for scorer, score in (sample.get("scores") or {}).items() if not sample.get("error") else ():
        value = score.get("value") if isinstance(score, dict) else None
        for key, part in value.items() if isinstance(value, dict) else [("", value)]:
            if (number := _number(LETTERS.get(part, part) if isinstance(part, str) else part)) is not None:
                values[f"{scorer}/{key}" if key else scorer] = number
    numbered = sample["id"] if type(sample["id"]) is int and sample["id"] >= 0 else None
    index = int(fingerprint(str(sample["id"])).removeprefix("sha256:")[:12], 16) if numbered is None else numbered
    return Row(index, name, row, "", _field(sample.get("metadata"), cluster), values)


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
    texts = [row.text for row in rows]
    is_text = bool(scored) and all(text is not None for text in texts)
    metrics = [BITS] if is_text else [name for name in (scored[0].values if scored else ()) if _all_have(name, scored)]
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
    first = join_rows(keys)
    of_row = {row.index: str(groups[found] or rows[found].index) for row, found in zip(rows, first, strict=True)}
    has_clusters = any(groups) or first != list(range(len(rows)))
    items: list[Record] = []
    for row in scored:
        item: Record = {"task": task, "index": row.index, "id": row.id, "row": row.row}
        item |= {"cluster": of_row[row.index]} if has_clusters else {}
        item |= {name: row.values[name] for name in metrics} if not is_text else {}
        if is_text and row.text is not None:
            item |= {"log_probability": [-row.text[0]], "num_characters": [row.text[1]]}
        items.append(item)
    asked = [[row.index, row.prompt] for row in rows]
    prompts = settings.get("prompts") or (fingerprint(asked) if all(row.prompt for row in rows) else None)
    record: Record = {
        "n": len(items),
        "type": "perplexity" if is_text else code.split()[0],
        "metric": metrics[0],
        "metrics": metrics,
        "settings": {**settings, "prompts": prompts, **({"cluster": cluster} if any(groups) else {})},
        "data_fingerprint": fingerprint([[row.index, row.row] for row in rows]),
        "fingerprint": fingerprint([settings, prompts, [[row.index, row.row] for row in rows]]),
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


def _all_have(name: str, rows: Sequence[Row]) -> bool:
    return all(name in row.values for row in rows)


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
    """Turn what a value of another kind than the tool writes would raise into a DataError."""
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
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise DataError(f"{where} is no JSON object")
    return found
