"""Results of a model on a suite, and the files that hold them: `<suite>/<model>.json` and `.items.jsonl`.

`ResultFiles` writes them: it keeps the results of earlier launches, asks nothing twice, and refuses to replace a
finished task. `load_results` reads them for a comparison. `records` has the schema.
"""

import contextlib
import fcntl
import functools
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from llmfoundry_lite import companions
from llmfoundry_lite.bounded import MAX_LOG_BYTES, read_json, read_lines_at_most
from llmfoundry_lite.config.eval_schema import TaskConfig
from llmfoundry_lite.errors import ConfigError, DataError
from llmfoundry_lite.evaluation.records import RESULT, Record, check_items, check_result, cut_at, is_accuracy, score_of
from llmfoundry_lite.evaluation.tasks import (
    TEXT_SETTINGS,
    NothingToAsk,
    Prepared,
    data_fingerprint,
    find_askable,
    limit_that_cuts,
    read_rows,
    resolve_settings,
    settings_of,
)
from llmfoundry_lite.files import write_atomically
from llmfoundry_lite.release import read_release

LOGS = ", or a folder with samples_*.jsonl of lm_eval --log_samples or with logs of Inspect"


@dataclass(kw_only=True)
class Results:
    """A model's results on a suite."""

    model: str
    suite: str
    source: str
    save_id: str | None = None
    num_tokens_trained: int | None = None
    num_parameters: int | None = None
    tokenizer: str = ""
    precision: str = "fp32"
    tasks: dict[str, Record] = field(default_factory=dict)
    """Records of tasks: those asked for, in that order, then those of earlier launches."""
    items: dict[str, list[Record]] = field(default_factory=dict)
    """Items of each task in the file's order, if the results were loaded from files."""
    path: Path = Path()
    name: str = ""  # distinguishes it from results of models of the same name

    @property
    def averaged(self) -> list[str]:
        """Names of the tasks whose number is an accuracy."""
        return [name for name, record in self.tasks.items() if is_accuracy(record)]

    @property
    def average(self) -> float | None:
        """The mean of the tasks' accuracies, with equal weights; None without any."""
        values = [score_of(self.tasks[name])[0] for name in self.averaged]
        return sum(values) / len(values) if values else None

    def as_json(self) -> Record:
        return {**{key: getattr(self, key) for key in RESULT}, "average": self.average, "tasks": self.tasks}


@functools.cache
def code_version() -> str:
    """Return the release, and in a clone the commit, with + where files that git tracks are changed."""
    release, commit = read_release().version, ""
    for command in (
        ("ls-files", "--error-unmatch", Path(__file__).name),  # our clone, not one that we are installed in
        ("describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+"),
    ):
        try:
            commit = subprocess.run(
                ["git", *command], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=20, check=True
            ).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return release
    return f"{release} {commit}"


# ---------------------------------------------------------------------------------------------------------- reading


def load_any(paths: Sequence[Path], cluster: str | None = None) -> list[Results]:
    """Load our results, or logs of another tool, which a companion reads. `cluster` is a field of their rows.

    Raises DataError for what cannot be read, or cannot be compared item by item.
    """
    ours = [_ours_at(path) for path in paths]
    if cluster is None and all(ours):
        return load_results([path for path in ours if path])
    try:
        load_logs = companions.load("llmfoundry_formats.logs:load_logs", "logs of lm-eval and Inspect")
    except ConfigError as missing:
        if cluster is not None:
            raise
        try:
            return load_results([found or path for found, path in zip(ours, paths, strict=True)])
        except DataError as error:
            raise DataError(f"{error}; {missing}") from error
    return load_logs(paths, cluster)


def _ours_at(path: Path) -> Path | None:
    """Return the result at `path`, or the one within an output folder; None for logs, several results or none."""
    if not path.is_dir():
        return path if _items_path(path).exists() else None
    files = [file for depth in ("", "*/", "*/*/") for file in path.glob(f"{depth}*") if not file.is_dir()]
    logs = [file for file in files if file.match("samples_*.jsonl") or file.suffix == ".eval"]
    found = [file for file in files if file.suffix == ".json" and _items_path(file) in files]
    return found[0] if len(found) == 1 and not logs else None


def load_results(paths: Sequence[Path], read: Callable[[Path], Results] | None = None) -> list[Results]:
    """Load results with their items, and give them distinct names. `read` reads those of another tool.

    Raises DataError for a file that is no result, or whose items are missing, truncated or another evaluation's.
    """
    for i, path in enumerate(paths):
        if any(path.resolve() == earlier.resolve() for earlier in paths[:i]):
            raise DataError(f"{path} is given twice; name another result to compare it with")
    found = list(map(read or _read_with_items, paths))
    names = [results.model for results in found]
    if len(set(names)) < len(names):
        common = os.path.commonpath([path.resolve().parent for path in paths])
        names = [str(path.resolve().with_suffix("").relative_to(common)) for path in paths]
    return [replace(one, name=name) for one, name in zip(found, names, strict=True)]


def read_results(path: Path) -> Results:
    try:
        facts = read_json(path, "a result")
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; expected a MODEL.json that scripts/eval.py has written") from None
    except DataError:
        raise
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read as JSON: {error}; expected a MODEL.json{LOGS * path.is_dir()}"
        ) from error
    check_result(facts, path)
    return Results(**{key: facts.get(key) for key in RESULT}, tasks=facts["tasks"], path=path, name=facts["model"])


def _read_with_items(path: Path) -> Results:
    results, beside, found = read_results(path), _items_path(path), {}
    try:
        lines_of = _lines_by_task(beside)
    except OSError as error:
        reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        raise DataError(
            f"{beside} {reason}, and results are compared item by item; keep it beside {path.name}, or evaluate again"
        ) from error
    for task, record in results.tasks.items():
        lines = lines_of.get(task, [])
        if len(lines) != record["n"]:
            raise DataError(
                f"{beside} has {len(lines):,} of the {record['n']:,} items of {task}; evaluate again: what is whole is "
                "not done twice"
            )
        found[task] = check_items(record, lines, f"{beside}: the items of {task}")
    return replace(results, items=found)


def _items_path(path: Path) -> Path:
    return path.with_name(f"{path.stem}.items.jsonl")


def _lines_by_task(path: Path) -> dict[str, list[str]]:
    """Return the lines of each task, without truncated ones."""
    found: dict[str, list[str]] = {}
    for content in read_lines_at_most(path, MAX_LOG_BYTES, "a result's items"):
        line = content.decode(errors="replace").rstrip("\r\n")
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            found.setdefault(json.loads(line)["task"], []).append(line)
    return found


def read_others(folder: Path, known: Sequence[str]) -> tuple[list[Results], list[str]]:
    """Return the results of other models in a suite's folder, and a line for each that cannot be read."""
    found, notes = [], []
    for path in sorted(folder.glob("*.json")):
        if path.stem in known or not _items_path(path).exists():  # compare.json is no result
            continue
        try:
            found.append(read_results(path))
        except DataError as error:
            notes.append(f"{error}; left out of the table")
    return found, notes


# ---------------------------------------------------------------------------------------------- what a task asks


class Outline(NamedTuple):
    """Facts about a task's questions that are known before a model is loaded."""

    name: str
    settings: Record
    data_fingerprint: str | None


def outline_tasks(
    tasks: Sequence[TaskConfig], tokenization: str, limit: int | None, *, skips_empty: bool = False
) -> list[Outline]:
    """Outline every task. Raises DataError for a file that cannot be read, or is empty."""
    found = []
    for config in tasks:
        if config.icl_task_type == "perplexity":
            found.append(Outline(f"{config.label}/0-shot", {**TEXT_SETTINGS, "limit": limit}, None))
            continue
        try:
            rows = read_rows(config)
        except NothingToAsk:
            if not skips_empty:
                raise
            continue
        for shots in config.num_fewshot:
            cut = limit_that_cuts(limit, len(find_askable(config, rows, shots)))
            settings = settings_of(resolve_settings(config, shots, tokenization), shots, cut)
            found.append(Outline(f"{config.label}/{shots}-shot", settings, data_fingerprint(rows)))
    return found


def differences(record: Record, task: Outline | Prepared) -> list[str]:
    """Describe how a finished task differs from `task`, as it is asked for now; empty if it is the same."""
    stored, asked, is_exact = record["settings"], dict(task.settings), isinstance(task, Prepared)
    if isinstance(task, Prepared) and record["fingerprint"] == task.fingerprint:
        begins, now = record.get("beginning", []), task.beginning
        return [] if begins == now else [f"texts that begin with {begins}, not {now} as asked for now"]
    # The outline does not know how many windows a text has.
    if asked.get("icl_task_type") == "perplexity" and not is_exact and stored.get("limit") is None:
        asked["limit"] = limit_that_cuts(asked.get("limit"), record["n"])
    unknown = () if is_exact else ("max_seq_len", "stop_tokens")  # unknown before tokenising
    keys = [key for key in {**stored, **asked} if key not in unknown]
    changed = [
        f"{key} {stored.get(key)!r}, not {asked.get(key)!r}" for key in keys if stored.get(key) != asked.get(key)
    ]
    found = [f"{'; '.join(changed)} as asked for now"] if changed else []
    if task.data_fingerprint not in (None, record["data_fingerprint"]):
        found.append("other data than asked for now")
    return found or (["another fingerprint than asked for now"] if is_exact else [])


# ---------------------------------------------------------------------------------------------------------- writing


class ResultFiles:
    """`<folder>/<suite>/<model>.json` and `.items.jsonl`, which rank 0 writes.

    Finished tasks that are not asked for now are kept. Those that are asked for in the same way are not done again.
    Replacing any needs `redo`.
    """

    def __init__(self, folder: Path, suite: str, model: str, *, redo: bool = False):
        """Raise DataError if the folder cannot be written, or an existing file is no result."""
        from llmfoundry_lite.ranks.exchange import rank_and_size  # imports torch, which comparing does not need

        self.path = folder / suite / f"{model}.json"
        self.items_path = _items_path(self.path)
        self.own_lines: dict[str, list[str]] = {}
        """Task -> items, of each task in this launch's results. The files may be removed in mid-run."""
        self.redo = redo
        self.is_main = rank_and_size(None)[0] == 0
        existing = next(place for place in self.path.absolute().parents if place.exists())
        if self.is_main and not (existing.is_dir() and os.access(existing, os.W_OK)):  # refuse now, not after a task
            raise DataError(f"results_folder: {existing} is no folder that can be written to")
        self._read()

    def _read(self) -> None:
        self.known = Results(model="", suite="", source="")
        self.lines: dict[str, list[str]] = {}
        try:
            if self.is_main and self.path.exists():
                known = read_results(self.path)
                self.lines = _lines_by_task(self.items_path) if self.items_path.exists() else {}
                self.known = known
        except (DataError, OSError) as error:
            if not self.redo:
                raise DataError(f"{error}; it would be replaced: move it away, or say redo=true") from error

    def refuse_to_replace(self, results: Results, asked: Sequence[Outline | Prepared]) -> None:
        """Raise DataError where a finished task would be lost. It names what exists and what is asked."""
        if self.redo:
            return
        remedy = "name it otherwise, models.NAME=…, choose another results_folder, or replace {}: redo=true"
        finished = [name for name, record in self.known.tasks.items() if cut_at(record) is None]  # others were trials
        if finished and (other := self._other_model(results)):
            tasks, them = ("task", "it") if len(finished) == 1 else ("tasks", "them")
            raise DataError(f"{self.path} holds {len(finished)} finished {tasks} of {other}; {remedy.format(them)}")
        for task in asked:
            is_whole = task.name in finished and self._is_whole(task.name)
            if is_whole and (found := differences(self.known.tasks[task.name], task)):
                raise DataError(f"{self.path} holds {task.name} with {', and '.join(found)}; {remedy.format('it')}")

    def _other_model(self, results: Results) -> str:
        """Describe the file's model and the one evaluated now, if they differ; else empty."""
        keys = ("save_id", "tokenizer", "precision") if results.save_id else ("source", "tokenizer", "precision")
        for key in keys:
            stored, now = getattr(self.known, key), getattr(results, key)
            if stored != now:
                if key == "source" or (key == "save_id" and self.known.source != results.source):
                    return f"{self.known.source}, and {results.source} is to be evaluated"
                return f"{self.known.source} with {key.replace('save_id', 'save')} {stored}, not {now} as now"
        return ""

    def _is_whole(self, name: str) -> bool:
        return len(self.lines.get(name, [])) == self.known.tasks[name]["n"]

    def finished_record(self, task: Prepared, results: Results) -> Record | None:
        """Return the finished result of this very task on this very model."""
        record: Record | None = None if self.redo else self.kept(results).get(task.name)
        if record is None or not self._is_whole(task.name) or differences(record, task):
            return None
        self.own_lines[task.name] = self.lines[task.name]
        return record

    def kept(self, results: Results) -> dict[str, Record]:
        """Return all finished tasks of the same model, asked for now or not."""
        return {} if self._other_model(results) else self.known.tasks

    def add(self, results: Results, task: Outline | Prepared, items: Sequence[Record]) -> None:
        """Add a task and write the files. Raises DataError if that fails, or if a finished task would be lost."""
        if not self.is_main:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with lock_folder(self.path.parent):
                self._read()  # other launches may have finished other tasks meanwhile
                self.refuse_to_replace(results, [task])
                tasks = results.tasks | {k: v for k, v in self.kept(results).items() if k not in results.tasks}
                self.own_lines[task.name] = [json.dumps(item) for item in items]
                lines = {**self.lines, **self.own_lines}
                # Items first: a task counts as finished when the JSON has it.
                text = "".join(line + "\n" for name in tasks for line in lines.get(name, []))
                write_atomically(self.items_path, text)
                write_atomically(self.path, json.dumps(replace(results, tasks=tasks).as_json(), indent=1) + "\n")
        except OSError as error:
            raise DataError(f"results_folder: {self.path} cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold a lock on the folder, if its file system can lock, so that one launch at a time writes."""
    place = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(place, fcntl.LOCK_EX)
        yield
    finally:
        os.close(place)
