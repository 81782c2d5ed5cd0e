"""Results of clean items and of marked ones apart, by what `data overlap` has found (`overlap.py`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmfoundry_lite.bounded import read_json
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.records import Record
from llmfoundry_lite.evaluation.results import Results
from llmfoundry_studies.overlap import SUMMARY_FILE


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Results of several models, divided by whether an item occurs in the training data."""

    clean: list[Results]
    marked: list[Results]
    notes: list[str]
    """A line for each task that could not be divided."""


def divide_results(all_results: Sequence[Results], folder: Path) -> Parts:
    """Divide results, which were loaded with their items, by the marks in a folder of `data overlap`.

    A task that has no clean or no marked items is left out of that part. Tasks that the folder does not know are left
    out of both, with a note. Raises DataError if the folder cannot be read, or was made from other rows of a task.
    """
    marks = read_marks(folder)
    clean: list[Results] = []
    marked: list[Results] = []
    notes: dict[str, None] = {}
    for results in all_results:
        clean_items: dict[str, list[Record]] = {}
        marked_items: dict[str, list[Record]] = {}
        for task, items in results.items.items():
            label = task.rpartition("/")[0]
            if label not in marks:
                notes[f"{task}: not checked by data overlap, left out"] = None
                continue
            _check_same_rows(task, results.tasks[task], marks[label], folder)
            marked_indices = set(marks[label]["marked"])
            clean_items[task] = [item for item in items if item["index"] not in marked_indices]
            marked_items[task] = [item for item in items if item["index"] in marked_indices]
        clean.append(_with_items(results, clean_items))
        marked.append(_with_items(results, marked_items))
    return Parts(clean=clean, marked=marked, notes=list(notes))


def _with_items(results: Results, items_of: Mapping[str, list[Record]]) -> Results:
    """Return results that have only these items, and only the tasks that have any."""
    items = {task: items for task, items in items_of.items() if items}
    tasks = {task: results.tasks[task] for task in items}
    return replace(results, items=items, tasks=tasks)


def read_marks(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what `data overlap` found of each task, by its label. Raises DataError for another folder."""
    path = folder / SUMMARY_FILE
    try:
        tasks = read_json(path, "the summary of an overlap")["tasks"]
        for label, facts in tasks.items():
            are_indices = all(type(index) is int for index in facts["marked"])
            if not are_indices or not isinstance(facts["data_fingerprint"], str):
                raise ValueError(f"the record of {label}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is not a summary that `data overlap` has written ({error})") from error
    return tasks


def _check_same_rows(task: str, record: Record, marks: Mapping[str, Any], folder: Path) -> None:
    """Raise DataError if a task was evaluated on other rows than those that were looked for in the data."""
    if record["data_fingerprint"] != marks["data_fingerprint"]:
        raise DataError(
            f"{task}: evaluated on other rows than those in {folder} (data_fingerprint {record['data_fingerprint']}, "
            f"there {marks['data_fingerprint']}); run `data overlap` again with the task's present file"
        )
