"""Tasks whose rows are a data set of the Hugging Face Hub, or of a folder in its format: `dataset_uri: hf://NAME`."""

from typing import Any

import datasets

from llmfoundry_formats.hub_folders import without_magic
from llmfoundry_lite.config.eval_schema import TaskConfig
from llmfoundry_lite.errors import DataError, list_names


def read_hub(config: TaskConfig) -> list[dict[str, Any]]:
    """Return the rows of the task's data set, through the map of its columns. Raises DataError."""
    name = config.dataset_uri.removeprefix("hf://")
    try:
        with without_magic(name) as plain:
            options: dict[str, Any] = {} if plain == name else {"cache_dir": f"{plain}/.cache"}
            found = datasets.load_dataset(plain, **config.hf_loading_vars, **options)
            rows = _plain(found.to_list()) if isinstance(found, datasets.Dataset) else []
    except Exception as error:  # whatever the Hub or its scripts raise
        raise DataError(f"{config.label}: {config.dataset_uri} cannot be loaded: {error}") from error
    if not isinstance(found, datasets.Dataset):
        raise DataError(
            f"{config.label}: {config.dataset_uri} has splits {list_names(found)}; "
            "choose one: hf_loading_vars: {split: …}"
        )
    for ours, theirs in config.hf_parsing_map.items():
        if missing := [column for column in theirs if column not in found.column_names]:
            raise DataError(
                f"{config.label}: hf_parsing_map: {ours}: {config.dataset_uri} has no column {missing[0]!r}; "
                f"there are: {list_names(found.column_names)}"
            )
    if not config.hf_parsing_map:
        return rows
    return [
        # A single column as it is, a list or a number too; several as one text.
        {o: row[t[0]] if len(t) == 1 else " ".join(str(row[c]) for c in t) for o, t in config.hf_parsing_map.items()}
        for row in rows
    ]


def _plain(value: Any) -> Any:
    """Turn what JSON has no word for into text: dates, times, decimals and bytes, at any depth."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, str | int | float) else str(value)
