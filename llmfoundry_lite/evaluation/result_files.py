"""Writes a model's results on a suite. No finished task is run twice, and none is replaced unless the user asks for it.

`outline_tasks` describes tasks before a model is loaded, so that an evaluation which would replace results is refused
early. `describe_differences` compares a finished task with the task that is to be run now. `ResultFiles` keeps the
results of earlier launches, and adds those of this launch.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from llmfoundry_lite.config.eval_schema import TaskConfig, result_name
from llmfoundry_lite.config.task_types import TEXT
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.documents import TEXT_SETTINGS
from llmfoundry_lite.evaluation.items import EmptyTaskError, PreparedTask
from llmfoundry_lite.evaluation.prompts import (
    effective_limit,
    find_question_rows,
    fingerprinted_settings,
    resolve_settings,
)
from llmfoundry_lite.evaluation.records import Record, limit_of_trial
from llmfoundry_lite.evaluation.results import Results, items_path_of, read_lines_by_task, read_results
from llmfoundry_lite.evaluation.task_files import data_fingerprint, read_rows
from llmfoundry_lite.files import write_atomically

# ------------------------------------------------------------------------------------------------- what a task asks


class Outline(NamedTuple):
    """Facts about a task that are known before a model is loaded: its name, its settings and a hash of its data."""

    name: str
    settings: Record
    data_fingerprint: str | None
    """None: not known yet, for held-out text."""


UNKNOWN_IN_OUTLINES = ("max_seq_len", "stop_tokens")
"""Settings that are known only after the questions have been tokenised."""


def outline_tasks(
    tasks: Sequence[TaskConfig], tokenization: str, limit: int | None, *, skips_empty: bool = False
) -> list[Outline]:
    """Return an outline of every task, once for each of its numbers of few-shot examples.

    tokenization: "separate" or "joint", for tasks that do not set it themselves.
    limit: the largest number of items of a task; None for all.
    skips_empty: leave out tasks whose file has no rows, instead of raising EmptyTaskError.

    An outline has the settings that the task's record would have, as far as they are known without a tokenizer. Raises
    DataError for a file that cannot be read.
    """
    outlines: list[Outline] = []
    for config in tasks:
        # Held-out text has no examples. Its file is not read yet, because it may be large.
        if config.task_type.answer == "text":
            outlines.append(Outline(f"{config.label}/0-shot", {**TEXT_SETTINGS, "limit": limit}, None))
            continue

        try:
            rows = read_rows(config)
        except EmptyTaskError:
            if not skips_empty:
                raise
            continue

        for num_fewshot in config.num_fewshot:
            num_questions = len(find_question_rows(config, rows, num_fewshot))
            task = resolve_settings(config, num_fewshot, tokenization)
            settings = fingerprinted_settings(task, num_fewshot, effective_limit(limit, num_questions))
            name = result_name(config.label, num_fewshot, config.form)
            outlines.append(Outline(name, settings, data_fingerprint(rows)))
    return outlines


def describe_differences(record: Record, task: Outline | PreparedTask) -> list[str]:
    """Describe how the task of a finished record differs from the task that is to be run now.

    record: the record of the task in the result files.
    task: the task that is to be run. An outline has no fingerprint and no settings that follow from tokenised prompts,
        so less can be compared with it than with a prepared task.

    Returns phrases such as "num_fewshot 0, not 5 as asked for now", or an empty list if nothing is known to differ.
    """
    # Equal fingerprints cover everything but the tokens that the tokenizer puts before each text.
    if isinstance(task, PreparedTask) and record["fingerprint"] == task.fingerprint:
        beginning = record.get("beginning", [])
        if beginning == task.beginning:
            return []
        return [f"texts that begin with {beginning}, not {task.beginning} as asked for now"]

    is_prepared = isinstance(task, PreparedTask)
    old_settings = record["settings"]
    new_settings = dict(task.settings)
    is_text = new_settings.get("icl_task_type") == TEXT
    if is_text and not is_prepared and old_settings.get("limit") is None:
        # The outline does not know how many windows the text has, but the record does.
        new_settings["limit"] = effective_limit(new_settings.get("limit"), record["n"])

    # Compare every setting that either of the two has.
    changes: list[str] = []
    for key in {**old_settings, **new_settings}:
        is_known = is_prepared or key not in UNKNOWN_IN_OUTLINES
        if is_known and old_settings.get(key) != new_settings.get(key):
            changes.append(f"{key} {old_settings.get(key)!r}, not {new_settings.get(key)!r}")

    descriptions: list[str] = []
    if changes:
        descriptions.append(f"{'; '.join(changes)} as asked for now")
    is_data_known = task.data_fingerprint is not None
    if is_data_known and task.data_fingerprint != record["data_fingerprint"]:
        descriptions.append("other data than asked for now")
    # The fingerprints of a prepared task differ, as was seen above, so there must be a difference.
    if is_prepared and not descriptions:
        descriptions.append("another fingerprint than asked for now")
    return descriptions


# ---------------------------------------------------------------------------------------------------------- writing


class ResultFiles:
    """The result files of a model: `<folder>/<suite>/<model>.json` and `<model>.items.jsonl`, which rank 0 writes.

    Finished tasks that are not asked for now are kept. Tasks that are asked for in the same way are not run again. A
    finished task is replaced only with `redo`.

    All ranks have such an object and call the same methods. On ranks other than 0 it holds nothing and writes nothing.
    """

    def __init__(self, folder: Path, suite: str, model: str, *, redo: bool = False):
        """Read the existing files of a model, if there are any.

        folder: the folder of all suites' results.
        redo: run all tasks again and replace their results, even in a file that is not a result.

        Raises DataError if the folder cannot be written to, or if an existing file is not a result.
        """
        from llmfoundry_lite.ranks.exchange import rank_and_size  # imports torch, which comparing does not need

        self.path = folder / suite / f"{model}.json"
        self.items_path = items_path_of(self.path)
        self.redo = redo
        rank, _ = rank_and_size(None)
        self.is_main = rank == 0
        self.stored_results = Results(model="", suite="", source="")
        """Content of the result file; without tasks if there is no file, and on ranks other than 0."""
        self.stored_item_lines: dict[str, list[str]] = {}
        """Task -> its lines in the file of items."""
        self.new_item_lines: dict[str, list[str]] = {}
        """Task -> its lines, for the tasks of this launch. They are kept, so that they are not lost if the files are
        removed in the meantime."""

        if self.is_main:
            self._check_writable()
        self._read_files()

    def _check_writable(self) -> None:
        """Raise DataError if the results folder, or the nearest existing folder above it, cannot be written to.

        This is checked at the beginning, so that the mistake does not show only after the first task.
        """
        nearest_existing = next(parent for parent in self.path.absolute().parents if parent.exists())
        if not nearest_existing.is_dir() or not os.access(nearest_existing, os.W_OK):
            raise DataError(f"results_folder: {nearest_existing} is not a folder that can be written to")

    def _read_files(self) -> None:
        """Set `stored_results` and `stored_item_lines` to the content of the files.

        The files are read again before each write, because other launches may write them, too. On ranks other than 0
        both attributes are empty. Raises DataError for a file that is not a result. With `redo` such a file may be
        replaced, so it counts as absent.
        """
        self.stored_results = Results(model="", suite="", source="")
        self.stored_item_lines = {}
        if not self.is_main:
            return  # only rank 0 needs the files, and the others may not see them

        try:
            if self.path.exists():
                results = read_results(self.path)
                item_lines = read_lines_by_task(self.items_path) if self.items_path.exists() else {}
                # Set both only after both could be read, so that they belong together.
                self.stored_results = results
                self.stored_item_lines = item_lines
        except (DataError, OSError) as error:
            if not self.redo:
                raise DataError(f"{error}; it would be replaced: move it away, or set redo=true") from error

    def refuse_to_replace(self, results: Results, tasks: Sequence[Outline | PreparedTask]) -> None:
        """Raise DataError if writing the results of `tasks` would replace a finished task that differs from them.

        results: facts of the model that is evaluated now. Its records are not read.
        tasks: the tasks that are to be run, or that are to be written.

        The error names the difference and says how to avoid or allow the replacement. With `redo`, any task may be
        replaced. So may a task that was cut short by a limit, because that was only a trial.
        """
        if self.redo:
            return
        remedy = "name it otherwise, models.NAME=…, choose another results_folder, or replace {}: redo=true"
        finished = [name for name, record in self.stored_results.tasks.items() if limit_of_trial(record) is None]

        # The files of another model would be replaced as a whole.
        other_model = self._other_model(results)
        if finished and other_model:
            noun, pronoun = ("task", "it") if len(finished) == 1 else ("tasks", "them")
            raise DataError(
                f"{self.path} holds {len(finished)} finished {noun} of {other_model}; {remedy.format(pronoun)}"
            )

        # In files of the same model, only tasks of the same name would be. One whose items are incomplete has to be run
        # again in any case.
        for task in tasks:
            if task.name not in finished or not self._is_whole(task.name):
                continue
            changes = describe_differences(self.stored_results.tasks[task.name], task)
            if changes:
                raise DataError(f"{self.path} holds {task.name} with {', and '.join(changes)}; {remedy.format('it')}")

    def _other_model(self, results: Results) -> str:
        """Describe how the model in the files differs from the model that is evaluated now, to say it in an error.

        Returns for instance "runs/base with tokenizer 3f2a, not 9c1d as now", or an empty text if they are the same
        model: the same checkpoint, tokenizer and precision. A checkpoint is the same if its save id is, even if it has
        been moved.
        """
        identity_key = "save_id" if results.save_id else "source"
        for key in (identity_key, "tokenizer", "precision"):
            stored_fact = getattr(self.stored_results, key)
            new_fact = getattr(results, key)
            if stored_fact == new_fact:
                continue

            # Two different sources say more than their save ids.
            has_other_source = self.stored_results.source != results.source
            if key == identity_key and has_other_source:
                return f"{self.stored_results.source}, and {results.source} is to be evaluated"
            noun = "save" if key == "save_id" else key
            return f"{self.stored_results.source} with {noun} {stored_fact}, not {new_fact} as now"
        return ""

    def _is_whole(self, name: str) -> bool:
        """Return whether the file of items has every item of the task `name`, which the result file must have."""
        return len(self.stored_item_lines.get(name, [])) == self.stored_results.tasks[name]["n"]

    def finished_record(self, task: PreparedTask, results: Results) -> Record | None:
        """Return the record of this task if an earlier launch has finished it for the same model; otherwise None.

        `results` has the facts of the model that is evaluated now. The lines of the task's items are added to
        `new_item_lines`, so that `add` writes them again with the tasks of this launch.
        """
        if self.redo:
            return None
        record = self.records_of_same_model(results).get(task.name)
        if record is None or not self._is_whole(task.name) or describe_differences(record, task):
            return None

        self.new_item_lines[task.name] = self.stored_item_lines[task.name]
        return record

    def has_finished(self, results: Results, outlines: Sequence[Outline]) -> bool:
        """Return whether the files have all these tasks, which an earlier launch has finished for the same model.

        `results` has the facts of the model that is evaluated now. Unlike `finished_record`, this needs no prepared
        task and no loaded model, so a held-out text whose file has changed since is not noticed.
        """
        if self.redo:
            return False
        records = self.records_of_same_model(results)
        for outline in outlines:
            record = records.get(outline.name)
            if record is None or not self._is_whole(outline.name) or describe_differences(record, outline):
                return False
        return True

    def records_of_same_model(self, results: Results) -> dict[str, Record]:
        """Return the records in the files, by task, or none if they are of another model than `results`."""
        return {} if self._other_model(results) else self.stored_results.tasks

    def add(self, results: Results, task: Outline | PreparedTask, items: Sequence[Record]) -> None:
        """Add a task that this launch has finished, and write both files. Ranks other than 0 do nothing.

        results: the results of this launch so far, with the record of `task`.
        items: the records of the items of `task`.

        Changes `stored_results` and `stored_item_lines`, which are read again, and `new_item_lines`. Raises DataError
        if the files cannot be written, or if a finished task in them would be lost.
        """
        if not self.is_main:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with lock_folder(self.path.parent):
                self._read_files()  # other launches may have finished other tasks meanwhile
                self.refuse_to_replace(results, [task])
                self.new_item_lines[task.name] = [json.dumps(item) for item in items]
                self._write(results)
        except OSError as error:
            raise DataError(f"results_folder: {self.path} cannot be written: {error.strerror or error}") from error

    def _write(self, results: Results) -> None:
        """Write both files: the tasks of this launch, then other tasks of the same model that the files already hold.

        `_read_files` must have been called before, with the folder locked, so that tasks of other launches are kept.
        """
        # Records and items of this launch replace those in the files.
        tasks = dict(results.tasks)
        for name, record in self.records_of_same_model(results).items():
            tasks.setdefault(name, record)
        lines_by_task = {**self.stored_item_lines, **self.new_item_lines}

        items_text = ""
        for name in tasks:
            items_text += "".join(f"{line}\n" for line in lines_by_task.get(name, []))

        # The items come first, because a task counts as finished as soon as the JSON file has it.
        write_atomically(self.items_path, items_text)
        write_atomically(self.path, json.dumps(replace(results, tasks=tasks).as_json(), indent=1) + "\n")


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder while the block runs, so that only one launch at a time writes there.

    On file systems that cannot lock, the block runs without a lock.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
