"""Tasks whose rows are a data set of the Hugging Face Hub, or a folder in its format: `dataset_uri: hf://NAME`."""

from collections.abc import Mapping, Sequence
from typing import Any

import datasets

from llmfoundry_formats.hub_folders import without_pattern
from llmfoundry_lite.config.eval_schema import TaskConfig
from llmfoundry_lite.errors import DataError, list_names


def read_hub(config: TaskConfig) -> list[dict[str, Any]]:
    """Return the rows of a task's data set, with the columns renamed as the task's `hf_parsing_map` says.

    Example of a map: {"query": ["passage", "question"], "answer": ["label"]}. The `query` of a row is the text of both
    columns with a space between them, and its `answer` is the value of `label`, of any type. Without a map, rows are
    returned unchanged. Raises DataError if the data set cannot be loaded, has several splits, or lacks a column.
    """
    name = config.dataset_uri.removeprefix("hf://")
    try:
        with without_pattern(name) as safe_name:
            # The cache of a temporary folder goes with it.
            options: dict[str, Any] = {} if safe_name == name else {"cache_dir": f"{safe_name}/.cache"}
            dataset = datasets.load_dataset(safe_name, **config.hf_loading_vars, **options)
            rows = _json_values(dataset.to_list()) if isinstance(dataset, datasets.Dataset) else []
    except Exception as error:  # whatever the Hub or its scripts raise
        raise DataError(f"{config.label}: {config.dataset_uri} cannot be loaded: {error}") from error
    if not isinstance(dataset, datasets.Dataset):
        raise DataError(
            f"{config.label}: {config.dataset_uri} has splits {list_names(dataset)}; "
            "choose one: hf_loading_vars: {split: …}"
        )

    for task_field, columns in config.hf_parsing_map.items():
        for column in columns:
            if column not in dataset.column_names:
                raise DataError(
                    f"{config.label}: hf_parsing_map: {task_field}: {config.dataset_uri} has no column {column!r}; "
                    f"there are: {list_names(dataset.column_names)}"
                )
    if not config.hf_parsing_map:
        return rows
    return [_map_columns(row, config.hf_parsing_map) for row in rows]


def _map_columns(row: dict[str, Any], parsing_map: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return a row with the task's fields. A single column keeps its value; several are joined to one text."""
    mapped = {}
    for task_field, columns in parsing_map.items():
        if len(columns) == 1:
            mapped[task_field] = row[columns[0]]
        else:
            mapped[task_field] = " ".join(str(row[column]) for column in columns)
    return mapped


def _json_values(value: Any) -> Any:
    """Turn values that JSON does not have (dates, times, decimals, bytes) into text, at any depth."""
    if isinstance(value, dict):
        return {str(key): _json_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_values(item) for item in value]
    if value is None or isinstance(value, str | int | float):
        return value
    return str(value)
