"""Results of a model on a suite, and the files that hold them: `<suite>/<model>.json` and `.items.jsonl`.

Owns what is kept of earlier launches, what is not done again, and what is refused because a finished task would be
lost. Reading results of which nothing is written is `reading`'s.
"""

import contextlib
import fcntl
import functools
import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from llmfoundry_lite.config.schema import TaskConfig
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.reading import Record, cut_at, num_unasked, read_facts
from llmfoundry_lite.evaluation.rows import read_rows
from llmfoundry_lite.evaluation.tasks import (
    TEXT_SETTINGS,
    Prepared,
    data_fingerprint,
    find_askable,
    limit_that_cuts,
    settings_of,
)
from llmfoundry_lite.files import write_atomically
from llmfoundry_lite.ranks.exchange import rank_and_size


@dataclass(kw_only=True)
class Results:
    """What one model did on a suite; `tasks` are those asked for, in that order, then those of earlier launches."""

    model: str
    suite: str
    source: str
    save_id: str | None = None
    num_tokens_trained: int | None = None
    num_parameters: int | None = None
    tokenizer: str = ""
    precision: str = "fp32"
    tasks: dict[str, Record] = field(default_factory=dict)

    @property
    def average(self) -> float | None:
        """The mean of the tasks' accuracies, each counting the same; None where one was not asked whole."""
        if any(map(num_unasked, self.tasks.values())):
            return None
        values = [task[task["metric"]] for task in self.tasks.values() if task["metric"].startswith("acc")]
        return sum(values) / len(values) if values else None

    def as_json(self) -> Record:
        return {
            "model": self.model,
            "suite": self.suite,
            "source": self.source,
            "save_id": self.save_id,
            "num_tokens_trained": self.num_tokens_trained,
            "num_parameters": self.num_parameters,
            "tokenizer": self.tokenizer,
            "precision": self.precision,
            "average": self.average,
            "tasks": self.tasks,
        }


@functools.cache
def code_version() -> str:
    """The release, and in a clone the commit, with + where files that git tracks are changed."""
    release, told = version("llmfoundry-lite"), []
    for command in (
        ("ls-files", "--error-unmatch", Path(__file__).name),  # the clone is ours, not one that we are installed in
        ("rev-parse", "--short=12", "HEAD"),
        ("status", "--porcelain", "--untracked-files=no"),
    ):
        try:
            done = subprocess.run(
                ["git", *command], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=20
            )
        except (OSError, subprocess.TimeoutExpired):
            return release
        if done.returncode:
            return release
        told.append(done.stdout.strip())
    return f"{release} {told[1]}{'+' if told[2] else ''}"


class Outline(NamedTuple):
    """What a task asks, as far as it is known."""

    name: str
    settings: Record
    data_fingerprint: str | None
    prepared: Prepared | None = None


def outline_tasks(tasks: Sequence[TaskConfig], tokenization: str, limit: int | None) -> list[Outline]:
    """What can be told without a tokenizer, so that a launch that would be refused is refused before a model is loaded.

    Raises DataError for a file that cannot be read or lacks a column."""
    found = []
    for config in tasks:
        if config.icl_task_type == "perplexity":
            found.append(Outline(f"{config.label}/0-shot", {**TEXT_SETTINGS, "limit": limit}, None))
            continue
        rows = read_rows(config)
        data = data_fingerprint(rows)
        for shots in config.num_fewshot:
            cut = limit_that_cuts(limit, len(find_askable(config, rows, shots)))
            settings = settings_of(config, shots, tokenization, cut)
            found.append(Outline(f"{config.label}/{shots}-shot", settings, data))
    return found


def outline(task: Prepared) -> Outline:
    return Outline(task.name, task.settings, task.data_fingerprint, task)


class ResultFiles:
    """`<folder>/<suite>/<model>.json` and `.items.jsonl`; rank 0's.

    Finished tasks that are not asked for now stay, those that are asked for in the same way are not done again, and
    those that would be replaced are refused, but with `redo`.
    """

    def __init__(self, folder: Path, suite: str, model: str, *, redo: bool = False):
        """Raises DataError where nothing can be written, or for a file that is there and no result."""
        self.path = folder / suite / f"{model}.json"
        self.items_path = folder / suite / f"{model}.items.jsonl"
        self.redo = redo
        self.is_main = rank_and_size(None)[0] == 0
        self.known: Record = {}
        self.num_lines: Counter[str] = Counter()
        if not self.is_main:
            return
        there = next(place for place in self.path.absolute().parents if place.exists())
        if not (there.is_dir() and os.access(there, os.W_OK)):  # known now, not after the first task
            raise DataError(f"results_folder: {there} is no folder that can be written to")
        self.known = self._read_known()
        self.num_lines = Counter(task for task, _ in self._read_lines())

    def _read_known(self) -> Record:
        if not self.path.exists():
            return {}
        try:
            return read_facts(self.path)
        except DataError as error:
            if self.redo:
                return {}
            raise DataError(f"{error}; it would be replaced: move it away, or say redo=true") from error

    def _read_lines(self) -> Iterator[tuple[str, str]]:
        """(task, line) of the items that are here and of a result."""
        if not self.known or not self.items_path.is_file():
            return
        with self.items_path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                # A torn line belongs to a task that is done again.
                with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                    yield json.loads(line)["task"], line.rstrip("\n")

    def refuse_to_replace(self, results: Results, asked: Sequence[Outline]) -> None:
        """Raises DataError, naming what is there and what is asked, where a finished task would be lost."""
        if not self.known or self.redo:
            return
        remedy = "name it otherwise, models.NAME=…, choose another results_folder, or replace {}: redo=true"
        finished = self._finished()
        if finished and (other := self._other_model(results)):
            count = len(finished)
            tasks = f"{count} finished task{'' if count == 1 else 's'}"
            raise DataError(f"{self.path} holds {tasks} of {other}; {remedy.format('them' if count > 1 else 'it')}")
        for task in asked:
            record = self.known["tasks"].get(task.name)
            if task.name in finished and self._is_whole(task.name) and (differs := differences(record, task)):
                raise DataError(
                    f"{self.path} holds {task.name} with {'; '.join(differs)} asked for now; {remedy.format('it')}"
                )

    def _finished(self) -> set[str]:
        """Tasks that must not be lost. One with a `limit` is a try, and one that stopped when it was decided has few
        of its items: whoever asks again would not have it kept."""
        tasks = self.known.get("tasks", {}).items()
        return {name for name, record in tasks if cut_at(record) is None and not num_unasked(record)}

    def _other_model(self, results: Results) -> str:
        """What the file is of, beside what is evaluated now, if that is another model."""
        keys = ("save_id", "tokenizer", "precision") if results.save_id else ("source", "tokenizer", "precision")
        for key in keys:
            if self.known.get(key) != getattr(results, key):
                of, now = self.known.get("source"), results.source
                if key == "source" or (key == "save_id" and of != now):
                    return f"{of}, and {now} is to be evaluated"
                told = f"{key.replace('save_id', 'save')} {self.known.get(key)}, not {getattr(results, key)}"
                return f"{of} with {told} as now"
        return ""

    def _is_whole(self, name: str) -> bool:
        return self.num_lines[name] == self.known["tasks"][name]["n"]

    def find(self, task: Prepared, results: Results, told: Record | None = None) -> Record | None:
        """The finished result of this very task on this very model, if it is here. One that stopped when it was decided
        is finished where it says what is `told`: the same comparison."""
        record: Record | None = None if self.redo else self.kept(results).get(task.name)
        if record is None or not self._is_whole(task.name) or differences(record, outline(task)):
            return None
        if num_unasked(record) and (told is None or any(record["sequential"][key] != told[key] for key in told)):
            return None
        return record

    def kept(self, results: Results) -> dict[str, Record]:
        """What is here of the same model, asked for now or not."""
        return {} if not self.known or self._other_model(results) else self.known["tasks"]

    def add(self, results: Results, name: str, items: Sequence[Record]) -> None:
        """Raises DataError where it cannot be written, or another launch has meanwhile finished what would be lost."""
        if not self.is_main:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with alone_in(self.path.parent):
                self.known = self._read_known()  # other launches may have finished other tasks meanwhile
                self._write(results, name, items)
        except OSError as error:
            raise DataError(f"results_folder: {self.path} cannot be written: {error.strerror or error}") from error

    def _write(self, results: Results, name: str, items: Sequence[Record]) -> None:
        if not self.redo and self._finished() and (other := self._other_model(results)):
            raise DataError(f"{self.path} was written by another launch meanwhile, and is of {other}")
        tasks = {**results.tasks, **{k: v for k, v in self.kept(results).items() if k not in results.tasks}}
        lines: dict[str, list[str]] = {task: [] for task in tasks}
        for task, line in self._read_lines():
            lines.get(task, []).append(line)
        if not self.redo and name in self._finished():
            there = self.known["tasks"][name]
            if len(lines[name]) == there["n"] and there["fingerprint"] != results.tasks[name]["fingerprint"]:
                raise DataError(f"{self.path}: another launch finished {name} meanwhile, with other settings or data")
        lines[name] = [json.dumps(item) for item in items]
        # Items first: a task counts as finished when the JSON has it.
        write_atomically(self.items_path, "".join(line + "\n" for task in lines.values() for line in task))
        write_atomically(self.path, json.dumps(replace(results, tasks=tasks).as_json(), indent=1) + "\n")


def read_others(folder: Path, known: Sequence[str]) -> tuple[list[Results], list[str]]:
    """The results in a suite's folder of models that are not `known`, by name, and a line for each that cannot be
    read."""
    found, notes = [], []
    for path in sorted(folder.glob("*.json")):
        if path.stem in known or not path.with_name(f"{path.stem}.items.jsonl").exists():  # compare.json is no result
            continue
        try:
            facts = read_facts(path)
        except DataError as error:
            notes.append(f"{error}; left out of the table")
            continue
        named = {"suite": folder.name, "source": "", **facts}
        found.append(Results(**{key.name: named[key.name] for key in fields(Results) if key.name in named}))
    return found, notes


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """One launch at a time, where the file system can lock."""
    place = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(place, fcntl.LOCK_EX)
        yield
    finally:
        os.close(place)


def differences(record: Record, task: Outline) -> list[str]:
    """What of a finished task is not as `task` asks it; nothing for the same."""
    there = record.get("settings") or {}
    exact = task.prepared
    if exact and record["fingerprint"] == exact.fingerprint:
        same_start = record.get("beginning", []) == exact.beginning
        return [] if same_start else [f"texts that begin with {record.get('beginning', [])}, not {exact.beginning} as"]
    keys = [key for key in {**there, **task.settings} if exact or key != "max_seq_len"]  # unknown before tokenising
    asked = dict(task.settings)
    is_text = asked.get("icl_task_type") == "perplexity"
    if (
        is_text and not exact and there.get("limit") is None
    ):  # how many windows a text has is known where it was evaluated
        asked["limit"] = limit_that_cuts(asked.get("limit"), record["n"])
    found = [f"{key} {there.get(key)!r}, not {asked.get(key)!r} as" for key in keys if there.get(key) != asked.get(key)]
    if task.data_fingerprint not in (None, record.get("data_fingerprint")):
        found.append("other data than")
    return found or (["another fingerprint than"] if exact else [])
