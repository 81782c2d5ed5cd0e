"""Reads the results of a model on a suite from files: `<suite>/<model>.json` and `<model>.items.jsonl`.

`load_any` and `load_results` read results with their items, for a comparison. `read_results` reads the numbers alone,
for a table. `records.py` has the schema, and `result_files.py` writes the files.
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
from llmfoundry_lite.config.task_types import BPB
from llmfoundry_lite.errors import ConfigError, DataError
from llmfoundry_lite.evaluation.means import weights_of_tasks
from llmfoundry_lite.evaluation.records import RESULT, Record, check_result, is_accuracy, score_of
from llmfoundry_lite.evaluation.summaries import check_items
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
    """Task -> its record. The tasks of this launch come first, in their order, then those of earlier launches."""
    items: dict[str, list[Record]] = field(default_factory=dict)
    """Task -> the records of its items in the file's order, if the results were loaded with them."""
    path: Path = Path()
    """The JSON file, as an absolute path; empty for results that are in no file."""
    name: str = ""
    """Distinguishes these results from those of models of the same name."""

    @property
    def averaged(self) -> list[str]:
        """Names of the tasks in the average: those whose number is an accuracy, or else those shown by `bpb`."""
        accuracies = [name for name, record in self.tasks.items() if is_accuracy(record)]
        return accuracies or [name for name, record in self.tasks.items() if record["metric"] == BPB]

    @property
    def average(self) -> float | None:
        """The mean of the tasks' accuracies, or of their bits per byte by `bpb`; None without any.

        Every task counts the same, also one with several numbers of examples.
        """
        if not self.averaged:
            return None
        weights = weights_of_tasks(self.averaged)
        return sum(weight * score_of(self.tasks[name])[0] for name, weight in weights.items())

    def as_json(self) -> Record:
        """Return what `<model>.json` holds."""
        facts = {key: getattr(self, key) for key in RESULT}
        return {**facts, "average": self.average, "tasks": self.tasks}


@functools.cache
def code_version() -> str:
    """Return the version of this library's code: the release and, in a git clone of it, the commit.

    A "+" after the commit says that tracked files have been changed, as in "0.9.0 1f2e3d4c5b6a+".
    """
    release = read_release().version
    try:
        # Fails if the package is only installed inside another project's clone, where the commit is not ours.
        _git("ls-files", "--error-unmatch", Path(__file__).name)
        commit = _git("describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+")
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
    """Load the results of several models with their items, whichever tool wrote them.

    paths: result files of this library, folders with one of them, or logs of lm-evaluation-harness or Inspect, which a
        companion package reads.
    cluster: a field of another tool's rows whose value names the item's cluster; None for results of this library.

    Raises DataError for files that cannot be read, or results that cannot be compared item by item, and ConfigError if
    `cluster` is given and the companion is not installed.
    """
    # Results of this library need no companion.
    our_paths = [find_result(path) for path in paths]
    if cluster is None and None not in our_paths:
        return load_results([path for path in our_paths if path is not None])

    try:
        load_logs = companions.load("llmfoundry_formats.logs:load_logs", "logs of lm-eval and Inspect")
    except ConfigError as missing_companion:
        if cluster is not None:
            raise
        # Read everything as results of this library, so that the error says what is wrong with the files, and add that
        # the companion is missing.
        try:
            return load_results([our_path or path for our_path, path in zip(our_paths, paths, strict=True)])
        except DataError as error:
            raise DataError(f"{error}; {missing_companion}") from error
    return load_logs(paths, cluster)


def find_result(path: Path) -> Path | None:
    """Return the path of this library's result file that `path` is, or that is the only one in the folder `path`.

    A result file is a JSON file with a file of items beside it, such as `base.json` and `base.items.jsonl`. Folders are
    searched three levels deep. Returns None if there is no result, if there are several, or if the folder has logs of
    other tools: samples_*.jsonl of lm-evaluation-harness, or *.eval of Inspect.
    """
    if not path.is_dir():
        return path if items_path_of(path).exists() else None

    # The depth is limited, because a folder that is given by mistake may hold very many files.
    files: list[Path] = []
    for pattern in ("*", "*/*", "*/*/*"):
        files += [file for file in path.glob(pattern) if not file.is_dir()]
    has_logs = any(file.match("samples_*.jsonl") or file.suffix == ".eval" for file in files)
    results = [file for file in files if file.suffix == ".json" and items_path_of(file) in files]
    if has_logs or len(results) != 1:
        return None
    return results[0]


def load_results(paths: Sequence[Path], read: Callable[[Path], Results] | None = None) -> list[Results]:
    """Load results with their items, and give them distinct names.

    read: function that reads one result with its items. None reads those of this library.

    A result is named after its model. If two models have the same name, all results are named after their paths below
    the folder that they have in common: `a/base.json` and `b/base.json` are named "a/base" and "b/base".

    Raises DataError for a path that is given twice, for a file that is not a result, and for items that are missing,
    truncated or from another evaluation.
    """
    # A result that is compared with itself would only look like a perfect tie.
    seen_paths: set[Path] = set()
    for path in paths:
        if path.resolve() in seen_paths:
            raise DataError(f"{path} is given twice; name another result to compare it with")
        seen_paths.add(path.resolve())

    read = read or read_with_items
    all_results = [read(path) for path in paths]

    # Names are distinct, because a comparison refers to results by name.
    names = [results.model for results in all_results]
    has_repeated_names = len(set(names)) < len(names)
    if has_repeated_names:
        common_folder = os.path.commonpath([path.resolve().parent for path in paths])
        names = [str(path.resolve().with_suffix("").relative_to(common_folder)) for path in paths]
    return [replace(results, name=name) for results, name in zip(all_results, names, strict=True)]


def read_with_items(path: Path) -> Results:
    """Read a model's results together with the items that they were computed from.

    `path` is that of the model's JSON file; the file of items is beside it. Raises DataError if the file of items is
    missing, has too few or too many lines of a task, or belongs to another evaluation.
    """
    # Read both files.
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

    # Each task must have all of its items, and they must give the score that its record has.
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
    """Return the lines of a file of items, by the task that each line names, in the file's order.

    Lines without a task or that are not JSON are left out, such as one that was truncated when the disk was full.
    Raises OSError if the file cannot be read.
    """
    lines_by_task: dict[str, list[str]] = {}
    for content in read_lines_at_most(items_path, MAX_LOG_BYTES, "a result's items"):
        line = content.decode(errors="replace").rstrip("\r\n")
        # These are the errors of anything but a JSON object whose `task` is a text.
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            task = json.loads(line)["task"]
            lines_by_task.setdefault(task, []).append(line)
    return lines_by_task


# ----------------------------------------------------------------------------------------------------- numbers alone


def read_results(path: Path) -> Results:
    """Read a model's JSON file, and return its results without their items.

    Raises DataError if the file does not exist, cannot be read, or is not a result that an evaluation wrote.
    """
    try:
        facts = read_json(path, "a result")
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; expected a MODEL.json that scripts/eval.py has written") from None
    except DataError:  # such as a file that is too large, whose message says so already
        raise
    except (OSError, ValueError) as error:
        expected = f"expected a MODEL.json{LOGS if path.is_dir() else ''}"
        raise DataError(f"{path} cannot be read as JSON: {error}; {expected}") from error
    check_result(facts, path)

    facts_of_model = {key: facts.get(key) for key in RESULT}
    # Absolute, because the items may be read later, when a program works in another folder.
    return Results(**facts_of_model, tasks=facts["tasks"], path=path.absolute(), name=facts["model"])


def read_others(folder: Path, known: Sequence[str]) -> tuple[list[Results], list[str]]:
    """Read the results of other models in a suite's folder, without their items.

    `known` names models to leave out, whose results the caller has. Returns the results in order of their file names,
    and a note for each file that cannot be read.
    """
    other_results: list[Results] = []
    notes: list[str] = []
    for path in sorted(folder.glob("*.json")):
        is_result = items_path_of(path).exists()  # compare.json, which may be in the folder too, has no items
        if path.stem in known or not is_result:
            continue
        try:
            other_results.append(read_results(path))
        except DataError as error:
            notes.append(f"{error}; left out of the table")
    return other_results, notes
