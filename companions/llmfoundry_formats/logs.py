"""Logs of lm-evaluation-harness and Inspect as Results, so that `compare` tests what other tools have measured.

lm-evaluation-harness writes `samples_TASK_DATE.jsonl` with --log_samples. The `results_DATE.json` beside it has the
model, its size, the limit, and whether a chat template was used. Inspect writes an `.eval` or a `.json` for each task.
A folder is a model: all of its logs are read. Neither tool is needed for that, and no torch.

An item is one row of the data, with a number from 0 to 1 for each metric. Other metrics are left out. `compare` matches
items by the hash of their row, and checks that their prompts are the same, unless a chat template made these: then the
prompts of two models are expected to differ. Equal rows make a cluster, and so do rows that share the field that the
user names with --cluster.

`load_logs` finds out which tool wrote a path, and which logs are there. `lm_eval_logs.py` and `inspect_logs.py` turn a
log into `Row`s, and `log_rows.py` turns rows into the records of a task.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from llmfoundry_formats.inspect_logs import read_inspect
from llmfoundry_formats.lm_eval_logs import read_lm_eval
from llmfoundry_formats.log_rows import Log
from llmfoundry_lite.bounded import (
    MAX_JSON_BYTES,
    TooLargeError,
    parse_json,
    read_at_most,
)
from llmfoundry_lite.errors import ConfigError, DataError, UserError
from llmfoundry_lite.evaluation.results import Results, load_results, read_results

OURS, LM_EVAL, INSPECT = "llmfoundry-lite", "lm-eval", "Inspect"
CONVERSION_HINT = (
    "convert a log of Inspect, to be read sample by sample: inspect log convert --to eval --output-dir FOLDER FILE"
)
MAX_NAMED_RESULTS = 6
"""Number of results that an error names."""


def load_logs(paths: Sequence[Path], cluster: str | None) -> list[Results]:
    """Load results, all of one tool: ours, lm-eval or Inspect.

    `cluster` is the user's --cluster: the field of the data's rows that related rows share. Raises DataError for
    results that cannot be read or cannot be compared item by item, and ConfigError for --cluster with our own results.
    """
    paths = [find_result(path) for path in paths]
    tools = {path: tool_of(path) for path in paths}
    first = paths[0]
    first_tool = tools[first]

    other = next((path for path in paths if tools[path] != first_tool), None)
    if other is not None:
        for path in paths:
            if tools[path] == OURS:
                read_results(path)  # raises DataError if the file is not ours either, and says what is wrong with it
        raise DataError(
            f"{first} is of {first_tool}, {other} of {tools[other]}: each tool prompts and scores in its own way; "
            "compare results of one tool"
        )

    if first_tool == OURS:
        if cluster is not None:
            raise ConfigError(
                f"--cluster {cluster}: {first} is a result of ours, which knows its clusters; name the column in the "
                f"task file: cluster: {cluster}"
            )
        return load_results(paths)

    all_results = load_results(paths, partial(_read_logs, tool=first_tool, cluster=cluster))
    if cluster is not None:
        for results in all_results:
            if not any("cluster" in task["settings"] for task in results.tasks.values()):
                raise DataError(
                    f"--cluster {cluster}: no row of {results.path} has that field as a text or a whole number"
                )
    return all_results


def find_result(path: Path) -> Path:
    """Return the one result within the output folder of a tool.

    lm-eval writes OUT/MODEL/samples_*, and we write OUT/MODEL.json. A file, and a folder that directly contains logs,
    is returned unchanged, and so is a folder without results, which a reader will report. Raises DataError for a
    folder with several results, and for one whose only results are lm-eval's averages.
    """
    if not path.is_dir() or tool_of(path) != OURS:
        return path

    # Results are in the folder or up to two levels below.
    files: list[Path] = []
    for pattern in ("*", "*/*", "*/*/*"):
        files += [file for file in sorted(path.glob(pattern)) if file.is_file()]
    results = [file.parent for file in files if file.match("samples_*.jsonl") or file.suffix == ".eval"]
    for file in files:
        has_items = file.with_name(f"{file.stem}.items.jsonl") in files
        if file.suffix == ".json" and has_items:
            results.append(file)
    results = list(dict.fromkeys(results))  # a folder once, however many logs it has

    if len(results) > 1:
        names = ", ".join(str(result.relative_to(path)) for result in results[:MAX_NAMED_RESULTS])
        if len(results) > MAX_NAMED_RESULTS:
            names += ", …"
        raise DataError(f"{path} holds {len(results)} results: {names}; name one of them")
    if results:
        return results[0]

    averages = [file for file in files if file.match("results_*.json")]
    if averages:
        raise DataError(
            f"{path}: {averages[0].relative_to(path)} has only averages, and there is no samples_*.jsonl beside it; "
            "run lm_eval again with --log_samples"
        )
    return path


def tool_of(path: Path) -> str:
    """Return the tool that wrote the results at `path`: OURS, LM_EVAL or INSPECT.

    Names of files decide, or the keys of a JSON file. Anything that is not clearly another tool's is taken for ours,
    because our own reader then says what is wrong with it. Raises TooLargeError.
    """
    if path.is_dir():
        if any(path.glob("samples_*.jsonl")):
            return LM_EVAL
        return INSPECT if _inspect_logs(path) else OURS

    if path.suffix == ".eval":
        return INSPECT
    if path.suffix == ".jsonl" and not path.name.endswith(".items.jsonl"):
        return LM_EVAL

    try:
        content = parse_json(read_at_most(path, MAX_JSON_BYTES, "results in JSON", CONVERSION_HINT))
    except TooLargeError:
        raise
    except (OSError, ValueError):
        return OURS
    if not isinstance(content, dict):
        return OURS
    if isinstance(content.get("eval"), dict):
        return INSPECT
    return LM_EVAL if "results" in content and "configs" in content else OURS


def _read_logs(path: Path, tool: str, cluster: str | None) -> Results:
    """Read the logs of one model at `path`, a file or a folder that `tool` has written. Raises DataError."""
    list_logs = _lm_eval_logs if tool == LM_EVAL else _inspect_logs
    read_log = read_lm_eval if tool == LM_EVAL else read_inspect
    logs: dict[str, Log] = {}
    files: dict[str, Path] = {}
    """Both by the name of the task."""
    for file in list_logs(path):
        with _unexpected_values_as_data_errors(file, tool):
            log = read_log(file, cluster)
        if log.task in logs:
            raise DataError(
                f"{path} has two logs of {log.task}, {files[log.task].name} and {file.name}; give one file, or move "
                "one away"
            )
        logs[log.task] = log
        files[log.task] = file

    models = list(dict.fromkeys(log.model for log in logs.values() if log.model is not None))
    if len(models) > 1:
        raise DataError(f"{path} has logs of {' and '.join(models)}; expected a folder for each model, or files")
    folder = path if path.is_dir() else path.parent
    return Results(
        model=models[0] if models else folder.name or path.stem,
        suite=tool,
        source=str(path),
        tasks={task: log.record for task, log in logs.items()},
        items={task: log.items for task, log in logs.items()},
        path=path,
        **log.model_facts,
    )


def _lm_eval_logs(path: Path) -> list[Path]:
    """Return the sample files of a folder, or those beside a `results_DATE.json`; any other file is one itself.

    Raises DataError for a results file without samples.
    """
    if path.is_dir():
        return sorted(path.glob("samples_*.jsonl"))
    if path.suffix != ".json":
        return [path]
    date = path.stem.rsplit("_", 1)[-1]
    files = [file for file in sorted(path.parent.glob("samples_*.jsonl")) if file.stem.endswith(f"_{date}")]
    if not files:
        raise DataError(
            f"{path} has only averages, and there is no samples_*_{date}.jsonl beside it; run lm_eval again with "
            "--log_samples"
        )
    return files


def _inspect_logs(path: Path) -> list[Path]:
    """Return the logs of a folder; any other path is a log itself."""
    if not path.is_dir():
        return [path]
    eval_files = sorted(path.glob("*.eval"))
    # Inspect writes a list of the folder's logs into logs.json.
    json_files = [file for file in sorted(path.glob("*.json")) if file.name != "logs.json"]
    return eval_files + [file for file in json_files if tool_of(file) == INSPECT]


@contextmanager
def _unexpected_values_as_data_errors(file: Path, tool: str) -> Iterator[None]:
    """Raise DataError for a log with a value of another type than the tool writes, which no reader checks for."""
    try:
        yield
    except UserError:
        raise
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise DataError(
            f"{file} is not as {tool} writes its logs ({error}); expected one that was not edited"
        ) from error
