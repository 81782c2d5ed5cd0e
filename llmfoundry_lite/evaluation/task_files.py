"""Reads the file of a task, which has rows of questions or held-out text, and checks it.

`read_rows` returns the rows of a task of questions, each with the columns that the task's type needs
(`config/task_types.py`).
`read_texts` yields held-out texts. Every error names the file and, for a row, its line and column.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

from llmfoundry_lite import companions
from llmfoundry_lite.bounded import MAX_LINE_BYTES, MAX_LOG_BYTES, read_at_most, read_lines_at_most
from llmfoundry_lite.config.eval_schema import LETTERS, TaskConfig
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.items import EmptyTaskError, fingerprint
from llmfoundry_lite.evaluation.questions import check_question
from llmfoundry_lite.own_code import is_own

TEXT_COLUMNS = ("query", "context", "continuation", "answer")
"""Columns that hold one text."""
MAX_LETTERS = 26
"""Number of choices that can have a letter of their own."""
LINE_SUFFIXES = (".jsonl", ".json", ".ndjson")
"""Suffixes of files with a JSON object on each line, as `data prepare` reads them."""

Row = dict[str, Any]


def read_rows(config: TaskConfig) -> list[Row]:
    """Return the checked rows of a task's file, or of its data set on the Hugging Face Hub (hf://NAME).

    With the setting `strip_dataset`, texts have no white space around them. Raises DataError if the file cannot be read
    or if any row lacks what the task's type needs, and EmptyTaskError if there are no rows.
    """
    # Read the rows. A companion reads data sets of the Hub.
    source = config.dataset_uri
    if source.startswith("hf://"):
        read_hub = companions.load("llmfoundry_formats.hub_tasks:read_hub", f"{config.label}: {source}")
        rows = read_hub(config)
    else:
        rows = [row for row, _ in read_json_lines(config)]
    if not rows:
        raise EmptyTaskError(f"{config.label}: {source} has no rows")

    # Check the rows before their texts are stripped, so that errors show them as the file has them. A user's own type
    # may read the same row in another way once it is stripped, so it gets the row that the model is asked with.
    asked_rows = [strip_row(row) for row in rows] if config.strip_dataset else rows
    for number, (row, asked_row) in enumerate(zip(rows, asked_rows, strict=True), start=1):
        place = f"{config.label}: {source}, line {number}"
        _check_row(row, config, place)
        if is_own(config.icl_task_type):
            check_question(config, asked_row, place)
    if config.fewshot_split is not None:
        _check_splits(config, rows)
    return asked_rows


def strip_row(row: Row) -> Row:
    """Return a copy of a row without white space around its texts. Lists, such as choices, are not changed."""
    return {key: value.strip() if isinstance(value, str) else value for key, value in row.items()}


def data_fingerprint(rows: list[Row]) -> str:
    """Return a hash of the rows without white space around texts, so that `strip_dataset` makes no difference to it."""
    return fingerprint([strip_row(row) for row in rows])


def read_json_lines(config: TaskConfig) -> Iterator[tuple[Row, str]]:
    """Yield each row of a file of JSON lines, together with its place for error messages.

    A place is such as "arc_easy: tasks/arc_easy.jsonl, line 3". Empty lines are passed over. Raises DataError if the
    file cannot be read, or if a line is not a JSON object.
    """
    with _naming_the_file(config):
        lines = read_lines_at_most(config.dataset_uri, MAX_LOG_BYTES, "a task")
        for number, content in enumerate(lines, start=1):
            encoding = "utf-8-sig" if number == 1 else "utf-8"  # the first line may begin with a byte-order mark
            line = content.decode(encoding)
            if not line.strip():
                continue
            place = f"{config.label}: {config.dataset_uri}, line {number}"
            yield _parse_row(line, place), place


def _parse_row(line: str, place: str) -> Row:
    """Parse one line of a task's file as a JSON object. `place` names the line in errors.

    Raises DataError if the line is something else, or has text that cannot be encoded in UTF-8.
    """
    try:
        row = json.loads(line)
        # JSON can escape half of a surrogate pair, which tokenizers refuse. Encoding finds it now.
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise DataError(f"{place} has half of a surrogate pair, such as \\ud83d alone") from None
    except RecursionError:  # lists or objects that are nested too deeply for the parser
        raise DataError(f"{place} is not JSON: too deep") from None
    except ValueError as error:
        raise DataError(f"{place} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise DataError(f"{place} is not a JSON object")
    return row


def read_texts(config: TaskConfig) -> Iterator[str]:
    """Yield the held-out texts of a task's file.

    In a file of JSON lines, each row's `text` is one text. Any other file is read as one text. Raises DataError if the
    file cannot be read, or if a row has no text.
    """
    is_one_text = Path(config.dataset_uri).suffix not in LINE_SUFFIXES
    if is_one_text:
        with _naming_the_file(config):
            content = read_at_most(config.dataset_uri, MAX_LINE_BYTES, "a text").decode("utf-8-sig")
        yield content
        return

    for row, place in read_json_lines(config):
        text = row.get("text")
        if not isinstance(text, str):
            raise DataError(f"{place}: text is {text!r}, expected a text")
        yield text


@contextlib.contextmanager
def _naming_the_file(config: TaskConfig) -> Iterator[None]:
    """Turn errors of reading the task's file in the block into a DataError that names the task and the file."""
    label = config.label
    path = config.dataset_uri
    try:
        yield
    except FileNotFoundError:
        raise DataError(
            f"{label}: {path} does not exist; in a clone, `python scripts/fetch_tasks.py` fetches the public tasks, "
            "`python scripts/make_tasks.py` makes our own, data_root=…/llm-foundry/scripts finds LLM Foundry's, "
            "skip_missing_tasks=true leaves it out"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{label}: {path} cannot be read: {error}") from error


def _check_row(row: Row, config: TaskConfig, place: str) -> None:
    """Raise DataError unless a row has the columns that a task of its type needs, with values of the right type.

    `place` names the row in errors, such as "arc_easy: tasks/arc_easy.jsonl, line 3".
    """
    task_type = config.task_type
    for column in task_type.columns:
        if column not in row:
            raise DataError(
                f"{place}: no column {column!r}; a {task_type.name} task has {', '.join(task_type.columns)}"
            )
        if column in TEXT_COLUMNS and not isinstance(row[column], str):
            raise DataError(f"{place}: {column} is {row[column]!r}, expected a text")

    # The column of other accepted answers may be absent or null.
    if task_type.answer == "generation":
        aliases = row.get("aliases") or []
        if not _are_texts(aliases):
            raise DataError(f"{place}: aliases is {aliases!r}, expected texts")

    # Columns that divide the rows into categories or clusters are needed only if the task's settings ask for them.
    if config.has_categories:
        if "category" not in row:
            raise DataError(f"{place}: no column 'category', which has_categories asks for")
        _check_group_column(row, "category", "has_categories asks for", place)
    if config.cluster is not None:
        _check_group_column(row, config.cluster, "cluster names", place)
    if config.fewshot_split is not None and not isinstance(row.get("split"), str):
        expected = "expected a text, because fewshot_split asks for this column"
        raise DataError(f"{place}: split is {row.get('split')!r}, {expected}")

    if task_type.answer == "choices":
        _check_options(row, "choices" if "choices" in task_type.columns else "context_options", place)
    if config.form == LETTERS and len(row["choices"]) > MAX_LETTERS:
        raise DataError(
            f"{place}: {len(row['choices'])} choices given, expected at most {MAX_LETTERS} for form: letters"
        )


def _check_group_column(row: Row, column: str, reason: str, place: str) -> None:
    """Raise DataError unless a column that groups rows holds a text or a whole number.

    `reason` is the setting that needs the column, as part of the error: "cluster names" or "has_categories asks for".
    """
    if not isinstance(row.get(column), str | int):
        expected = f"expected a text or a whole number, because {reason} this column"
        raise DataError(f"{place}: {column} is {row.get(column)!r}, {expected}")


def _check_splits(config: TaskConfig, rows: list[Row]) -> None:
    """Raise DataError unless some rows are of the split that examples are taken from, and others are questions."""
    splits = dict.fromkeys(row["split"] for row in rows)
    if config.fewshot_split in splits and len(splits) > 1:
        return
    raise DataError(
        f"{config.label}: {config.dataset_uri} has rows of the split {', '.join(splits)} alone; "
        f"fewshot_split: {config.fewshot_split} needs some of that split and some of another"
    )


def _check_options(row: Row, column: str, place: str) -> None:
    """Raise DataError unless a row has at least two options, and `gold` is the index of one of them.

    `column` has the options: `choices` of a multiple-choice question, or `context_options` of a schema question.
    """
    options = row[column]
    if not _are_texts(options) or len(options) < 2:
        raise DataError(f"{place}: {options!r} given, expected two or more texts to choose from")

    gold = row["gold"]
    is_whole_number = isinstance(gold, int) and not isinstance(gold, bool)  # Python's bool is an int
    if not is_whole_number or not 0 <= gold < len(options):
        raise DataError(f"{place}: gold is {gold!r}, expected 0 to {len(options) - 1}")


def _are_texts(values: Any) -> TypeGuard[list[str]]:
    """Return whether a value is a list of texts."""
    return isinstance(values, list) and all(isinstance(value, str) for value in values)
