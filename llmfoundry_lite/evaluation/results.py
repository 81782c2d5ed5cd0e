"""Results of a model on a suite, read from files: `<suite>/<model>.json` and `<model>.items.jsonl`.

`load_any` and `load_results` read them with their items, for a comparison. `read_results` reads the numbers alone, for
a table. `records.py` has the schema, and `result_files.py` writes them.
"""

import contextlib
import functools
import json
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from llmfoundry_lite import companions
from llmfoundry_lite.bounded import MAX_LOG_BYTES, read_json, read_lines_at_most
from llmfoundry_lite.errors import ConfigError, DataError
from llmfoundry_lite.evaluation.records import RESULT, Record, check_items, check_result, is_accuracy, score_of
from llmfoundry_lite.release import read_release

LOGS = ", or a folder with samples_*.jsonl of lm_eval --log_samples or with logs of Inspect"
"""Files that a companion reads besides our results, for an error."""
GIT_SECONDS = 20
"""Time that a git command may take on a slow file system."""


@dataclass(kw_only=True)
class Results:
    """A model's results on a suite."""

    model: str
    suite: str
    source: str
    """Where the model's weights were read: a checkpoint, a folder or a name on the Hub."""
    save_id: str | None = None
    num_tokens_trained: int | None = None
    num_parameters: int | None = None
    tokenizer: str = ""
    """The tokenizer's fingerprint."""
    precision: str = "fp32"
    tasks: dict[str, Record] = field(default_factory=dict)
    """Records of tasks: those asked for, in that order, then those of earlier launches."""
    items: dict[str, list[Record]] = field(default_factory=dict)
    """Items of each task in the file's order, if the results were loaded with them."""
    path: Path = Path()
    name: str = ""
    """Distinguishes these results from those of models of the same name."""

    @property
    def averaged(self) -> list[str]:
        """Names of the tasks whose number is an accuracy."""
        return [name for name, record in self.tasks.items() if is_accuracy(record)]

    @property
    def average(self) -> float | None:
        """The mean of the tasks' accuracies, with equal weights; None without any."""
        scores = [score_of(self.tasks[name])[0] for name in self.averaged]
        return sum(scores) / len(scores) if scores else None

    def as_json(self) -> Record:
        """Return what `<model>.json` holds."""
        facts = {key: getattr(self, key) for key in RESULT}
        return {**facts, "average": self.average, "tasks": self.tasks}


@functools.cache
def code_version() -> str:
    """Return the release, and in a clone the commit, with + where files that git tracks are changed."""
    release = read_release().version
    is_tracked = ("ls-files", "--error-unmatch", Path(__file__).name)  # fails in a clone that we are only installed in
    describe = ("describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+")
    try:
        _git(*is_tracked)
        commit = _git(*describe)
    except (OSError, subprocess.SubprocessError):
        return release
    return f"{release} {commit}"


def _git(*arguments: str) -> str:
    """Run git beside this file, and return what it prints. Raises SubprocessError if it fails."""
    finished = subprocess.run(
        ["git", *arguments],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=GIT_SECONDS,
        check=True,
    )
    return finished.stdout.strip()


# ------------------------------------------------------------------------------------------------------- with items


def load_any(paths: Sequence[Path], cluster: str | None = None) -> list[Results]:
    """Load our results, or logs of another tool, which a companion reads. `cluster` is a field of their rows.

    Raises DataError for what cannot be read, or cannot be compared item by item.
    """
    our_paths = [find_result(path) for path in paths]
    if cluster is None and None not in our_paths:
        return load_results([path for path in our_paths if path is not None])
    try:
        load_logs = companions.load("llmfoundry_formats.logs:load_logs", "logs of lm-eval and Inspect")
    except ConfigError as missing:
        if cluster is not None:
            raise
        # Without that companion everything is read as ours, so that the error says what is wrong with it.
        try:
            return load_results([ours or path for ours, path in zip(our_paths, paths, strict=True)])
        except DataError as error:
            raise DataError(f"{error}; {missing}") from error
    return load_logs(paths, cluster)


def find_result(path: Path) -> Path | None:
    """Return the path of the result of ours that `path` stands for: a result file, or a folder with only one in it.

    A result is a JSON file with a file of items beside it. Folders are searched three levels deep. Returns None if
    there is no result, if there are several, or if the folder has logs of other tools: samples_*.jsonl of
    lm-evaluation-harness, or *.eval of Inspect.
    """
    if not path.is_dir():
        return path if items_path_of(path).exists() else None

    files: list[Path] = []
    for pattern in ("*", "*/*", "*/*/*"):
        files += [file for file in path.glob(pattern) if not file.is_dir()]
    has_logs = any(file.match("samples_*.jsonl") or file.suffix == ".eval" for file in files)
    results = [file for file in files if file.suffix == ".json" and items_path_of(file) in files]
    if has_logs or len(results) != 1:
        return None
    return results[0]


def load_results(paths: Sequence[Path], read: Callable[[Path], Results] | None = None) -> list[Results]:
    """Load results with their items, and give them distinct names. `read` reads those of another tool.

    Raises DataError for a file that is no result, or whose items are missing, truncated or another evaluation's.
    """
    seen: set[Path] = set()
    for path in paths:
        if path.resolve() in seen:
            raise DataError(f"{path} is given twice; name another result to compare it with")
        seen.add(path.resolve())

    read = read or _read_with_items
    all_results = [read(path) for path in paths]
    names = [results.model for results in all_results]
    if len(set(names)) < len(names):
        common = os.path.commonpath([path.resolve().parent for path in paths])
        names = [str(path.resolve().with_suffix("").relative_to(common)) for path in paths]
    return [replace(results, name=name) for results, name in zip(all_results, names, strict=True)]


def _read_with_items(path: Path) -> Results:
    """Read a model's results together with the items that they were computed from.

    Raises DataError if the file of items is missing, has too few or too many lines of a task, or belongs to another
    evaluation.
    """
    results = read_results(path)
    items_path = items_path_of(path)
    try:
        lines_by_task = read_lines_by_task(items_path)
    except OSError as error:
        reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        raise DataError(
            f"{items_path} {reason}, and results are compared item by item; keep it beside {path.name}, or evaluate "
            "again"
        ) from error

    items: dict[str, list[Record]] = {}
    for task, record in results.tasks.items():
        lines = lines_by_task.get(task, [])
        if len(lines) != record["n"]:
            raise DataError(
                f"{items_path} has {len(lines):,} of the {record['n']:,} items of {task}; evaluate again: "
                "finished tasks are not repeated"
            )
        items[task] = check_items(record, lines, f"{items_path}: the items of {task}")
    return replace(results, items=items)


def items_path_of(path: Path) -> Path:
    """Return the file of items that belongs to a result's JSON file."""
    return path.with_name(f"{path.stem}.items.jsonl")


def read_lines_by_task(items_path: Path) -> dict[str, list[str]]:
    """Return the lines of each task. Truncated lines are left out. Raises OSError."""
    lines_by_task: dict[str, list[str]] = {}
    for content in read_lines_at_most(items_path, MAX_LOG_BYTES, "a result's items"):
        line = content.decode(errors="replace").rstrip("\r\n")
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            task = json.loads(line)["task"]
            lines_by_task.setdefault(task, []).append(line)
    return lines_by_task


# ----------------------------------------------------------------------------------------------------- numbers alone


def read_results(path: Path) -> Results:
    """Read a model's JSON file, without its items. Raises DataError for a file that is no result."""
    try:
        facts = read_json(path, "a result")
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; expected a MODEL.json that scripts/eval.py has written") from None
    except DataError:
        raise
    except (OSError, ValueError) as error:
        expected = f"expected a MODEL.json{LOGS if path.is_dir() else ''}"
        raise DataError(f"{path} cannot be read as JSON: {error}; {expected}") from error
    check_result(facts, path)
    return Results(**{key: facts.get(key) for key in RESULT}, tasks=facts["tasks"], path=path, name=facts["model"])


def read_others(folder: Path, known: Sequence[str]) -> tuple[list[Results], list[str]]:
    """Return the results of models that are not `known` in a suite's folder, and a line for each that cannot be
    read."""
    others: list[Results] = []
    notes: list[str] = []
    for path in sorted(folder.glob("*.json")):
        is_result = items_path_of(path).exists()  # compare.json is none
        if path.stem in known or not is_result:
            continue
        try:
            others.append(read_results(path))
        except DataError as error:
            notes.append(f"{error}; left out of the table")
    return others, notes
