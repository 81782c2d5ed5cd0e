"""The rows of a task: a file of questions, or a data set of the Hub, checked column by column."""

import json
from pathlib import Path
from typing import Any, TypeGuard

from llmfoundry_lite.config.schema import TaskConfig
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.files import open_regular, without_magic

COLUMNS = {
    "multiple_choice": ("query", "choices", "gold"),
    "schema": ("context_options", "continuation", "gold"),
    "language_modeling": ("context", "continuation"),
    "generation_task_with_answers": ("context", "answer"),
}

GENERATION = ("generation_task_with_answers",)


def read_rows(config: TaskConfig) -> list[dict[str, Any]]:
    """The file's rows, checked. Raises DataError naming file, line and column."""
    where = config.dataset_uri
    rows = _read_hub(config) if where.startswith("hf://") else _read_jsonl(Path(where), config.label)
    if not rows:
        raise DataError(f"{config.label}: {where} has no rows")
    for number, row in enumerate(rows, start=1):
        _check_row(row, config, f"{config.label}: {where}, line {number}")
    return [{key: strip(value) for key, value in row.items()} for row in rows] if config.strip_dataset else rows


def strip(value: Any) -> Any:
    return value.strip() if isinstance(value, str) else value


def _read_jsonl(path: Path, label: str) -> list[dict[str, Any]]:
    try:
        # Not splitlines(), which also splits at characters that JSON allows inside a text, such as U+2028.
        with open(path, "rb", opener=open_regular) as file:
            lines = file.read().decode("utf-8-sig").split("\n")
    except FileNotFoundError:
        raise DataError(
            f"{label}: {path} does not exist; `llmfoundry-lite data fetch-tasks` fetches the public tasks, "
            "`llmfoundry-lite data make-tasks` makes our own"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{label}: {path} cannot be read: {error}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = "too deep" if isinstance(error, RecursionError) else error
            raise DataError(f"{label}: {path}, line {number} is not JSON: {reason}") from None
        if not isinstance(row, dict):
            raise DataError(f"{label}: {path}, line {number} is not a JSON object")
        if is_broken_text(line):
            raise DataError(f"{label}: {path}, line {number} has half a character, such as \\ud83d alone")
        rows.append(row)
    return rows


def is_broken_text(line: str) -> bool:
    """JSON can escape half of a surrogate pair, which no tokenizer takes."""
    if "\\ud" not in line.lower():
        return False
    try:
        json.dumps(json.loads(line), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _read_hub(config: TaskConfig) -> list[dict[str, Any]]:
    import datasets

    name = config.dataset_uri.removeprefix("hf://")
    rows: list[dict[str, Any]] = []
    try:
        with without_magic(name) as plain:
            options: dict[str, Any] = config.hf_loading_vars | (
                {} if plain == name else {"cache_dir": f"{plain}/.cache"}
            )
            found = datasets.load_dataset(plain, **options)
            if isinstance(found, datasets.Dataset):
                rows = [{key: _plain(value) for key, value in row.items()} for row in found.to_list()]
    except Exception as error:  # whatever the Hub or its scripts raise
        raise DataError(f"{config.label}: {config.dataset_uri} cannot be loaded: {error}") from error
    if not isinstance(found, datasets.Dataset):
        raise DataError(
            f"{config.label}: {config.dataset_uri} has splits {', '.join(found)}; "
            "choose one: hf_loading_vars: {split: …}"
        )
    if not config.hf_parsing_map:
        return rows
    for ours, theirs in config.hf_parsing_map.items():
        for column in theirs:
            if column not in found.column_names:
                raise DataError(
                    f"{config.label}: hf_parsing_map: {ours}: {config.dataset_uri} has no column {column!r}; "
                    f"there are: {', '.join(found.column_names)}"
                )
    return [{ours: _join(row, theirs) for ours, theirs in config.hf_parsing_map.items()} for row in rows]


def _plain(value: Any) -> Any:
    """What JSON has no word for as text: dates, times, decimals and bytes, wherever in a column they stand."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _join(row: dict[str, Any], columns: list[str]) -> Any:
    """A single column as it is, a list or a number too; several as one text."""
    return row[columns[0]] if len(columns) == 1 else " ".join(str(row[column]) for column in columns)


def _check_row(row: dict[str, Any], config: TaskConfig, where: str) -> None:
    expected = COLUMNS[config.icl_task_type]
    for column in expected:
        if column not in row:
            raise DataError(f"{where}: no column {column!r}; a {config.icl_task_type} task has {', '.join(expected)}")
    for column in ("query", "context", "continuation", "answer"):
        if column in expected and not isinstance(row[column], str):
            raise DataError(f"{where}: {column} is {row[column]!r}, expected a text")
    aliases = row.get("aliases") or []
    if config.icl_task_type in GENERATION and not _are_texts(aliases):
        raise DataError(f"{where}: aliases is {aliases!r}, expected texts")
    if config.has_categories and "category" not in row:
        raise DataError(f"{where}: no column 'category', which has_categories asks for")
    grouping = [("category", "has_categories asks for")] if config.has_categories else []
    grouping += [(config.cluster, "cluster names")] if config.cluster is not None else []
    for column, why in grouping:
        if not isinstance(row.get(column), (str, int)):
            raise DataError(
                f"{where}: {column} is {row.get(column)!r}, expected a text or a whole number, because {why} this "
                "column"
            )
    options = row.get({"multiple_choice": "choices", "schema": "context_options"}.get(config.icl_task_type, ""))
    if options is None and "gold" not in expected:
        return
    if not _are_texts(options) or len(options) < 2:
        raise DataError(f"{where}: {options!r} given, expected two or more texts to choose from")
    gold = row["gold"]
    if not isinstance(gold, int) or isinstance(gold, bool) or not 0 <= gold < len(options):
        raise DataError(f"{where}: gold is {gold!r}, expected 0 to {len(options) - 1}")


def _are_texts(values: Any) -> TypeGuard[list[str]]:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)
