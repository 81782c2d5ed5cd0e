"""A log of one task of Inspect, an `.eval` or a `.json`, as the record and items of a task.

An `.eval` is a ZIP archive, whose files are read by `read_member`. `read_inspect` reads either.
"""

import io
import json
import math
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmfoundry_formats.log_rows import OLDER_RELEASE, Log, Row, as_number, build_task, group_of, read_object
from llmfoundry_lite.bounded import (
    MAX_JSON_BYTES,
    MAX_LOG_BYTES,
    open_unpacked,
    read_at_most,
    read_file_at_most,
    too_large,
)
from llmfoundry_lite.errors import DataError, UserError
from llmfoundry_lite.evaluation.items import fingerprint
from llmfoundry_lite.evaluation.records import Record
from llmfoundry_lite.files import open_regular

NUMBERS_OF_WORDS = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
"""Inspect's letters for correct, partly correct, incorrect and no answer, and the words that it counts like them."""
INDEX_DIGITS = 12
"""Hexadecimal digits of a hash that is the index of a sample whose id is not a number."""
ZSTANDARD = 93
"""The ZIP format's number of the compression Zstandard, which Python's zipfile can read from 3.14 on."""
ZIP_LOCAL_HEADER_BYTES = 30
"""Size of the fixed part of the header before each file of a ZIP archive (APPNOTE.TXT, section 4.3.7)."""


def read_inspect(file: Path, cluster: str | None) -> Log:
    """Read a log of Inspect. The epochs of a sample, which ask it again, become one row. Raises DataError."""
    rows_by_sample: dict[str, list[Row]] = {}
    with open_log(file) as (header, samples):
        spec = header["eval"]
        config = spec.get("config") or {}
        reducers = config.get("epochs_reducer")
        if reducers and "mean" not in reducers:
            raise DataError(
                f"{file}: epochs_reducer is {', '.join(reducers)}; compare takes the mean of a sample's epochs"
            )
        for sample in samples:
            row = read_row(sample, str(file), cluster)
            sample_key = json.dumps(sample["id"])  # 1 and "1" are two samples
            rows_by_sample.setdefault(sample_key, []).append(row)
    if not rows_by_sample:
        raise DataError(f"{file} has no samples; log them: inspect eval without --no-log-samples")
    rows = [mean_of_epochs(epochs) for epochs in rows_by_sample.values()]

    task = str(spec.get("task"))
    release = (spec.get("packages") or {}).get("inspect_ai", OLDER_RELEASE)
    settings = settings_of(header, len(rows))
    record, items = build_task(task, str(file), rows, settings, f"Inspect {release}", cluster)
    generation = (header.get("plan") or {}).get("config") or {}
    record["generation"] = {key: value for key, value in generation.items() if value is not None}
    return Log(task, str(spec.get("model")), record, items, {"precision": ""})


@contextmanager
def open_log(file: Path) -> Iterator[tuple[Record, Iterator[Record]]]:
    """Yield a finished log's header, and its samples one by one.

    An `.eval` is a ZIP archive with `header.json` and a file for each sample. A `.json` has everything in one object.
    Raises DataError.
    """
    try:
        if file.suffix == ".json":
            log = read_object(read_at_most(file, MAX_JSON_BYTES, "a log in JSON"), str(file))
            check_header(log, file)
            yield log, iter(log.get("samples") or [])
            return

        with open(file, "rb", opener=open_regular) as raw_file, zipfile.ZipFile(raw_file) as archive:
            if "header.json" not in archive.namelist():
                raise DataError(f"{file} has no header.json: the evaluation did not end; run it again")
            header = read_object(read_member(archive, "header.json"), f"{file}: header.json")
            check_header(header, file)
            yield header, read_samples(archive, str(file))
    except UserError:
        raise
    except (OSError, EOFError, RuntimeError, zlib.error, zipfile.BadZipFile) as error:
        raise DataError(f"{file} cannot be read as an Inspect log: {error}") from error


def check_header(header: Record, file: Path) -> None:
    """Raise DataError unless this is the header of a log whose evaluation has finished."""
    if not isinstance(header.get("eval"), dict):
        raise DataError(f"{file} is not a log of Inspect: it has no 'eval'")
    if header.get("status") != "success":
        raise DataError(
            f"{file}: the evaluation has status {header.get('status')!r}, expected 'success'; finish it: inspect "
            "eval-retry"
        )


def read_samples(archive: zipfile.ZipFile, file: str) -> Iterator[Record]:
    """Yield the samples of an `.eval`. Raises TooLargeError if they are too large together; each has a limit too."""
    remaining_bytes = MAX_LOG_BYTES
    for name in archive.namelist():
        if not name.startswith("samples/"):
            continue
        content = read_member(archive, name)
        remaining_bytes -= len(content)
        if remaining_bytes < 0:
            raise too_large(file, MAX_LOG_BYTES, "a log, unpacked")
        yield read_object(content, f"{file}: {name}")


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


def settings_of(header: Record, num_rows: int) -> Record:
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


def read_row(sample: Record, file: str, cluster: str | None) -> Row:
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
            values |= read_values(scorer, score)

    sample_id = sample["id"]
    is_index = type(sample_id) is int and sample_id >= 0
    if is_index:
        index = sample_id
    else:
        digits = fingerprint(str(sample_id)).removeprefix("sha256:")[:INDEX_DIGITS]
        index = int(digits, base=16)
    row_hash = fingerprint([sample["input"], sample.get("choices"), sample["target"]])
    group = group_of(sample.get("metadata"), cluster)
    return Row(index, f"sample {sample_id}", row_hash, "", group, values)


def read_values(scorer: str, score: Any) -> dict[str, float]:
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
        number = as_number(part)
        if number is not None:
            numbers[metric] = number
    return numbers


def mean_of_epochs(epochs: Sequence[Row]) -> Row:
    """Return one row for the epochs of a sample, with the mean of each metric that every scored epoch has."""
    scored = [row.values for row in epochs if row.values]
    means = {}
    for metric in scored[0] if scored else ():
        if all(metric in values for values in scored):
            means[metric] = sum(values[metric] for values in scored) / len(scored)
    return epochs[0]._replace(values=means)
