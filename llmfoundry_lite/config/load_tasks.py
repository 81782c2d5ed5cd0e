"""Load the tasks of an evaluation or of a training run: the entries of `icl_tasks` become frozen `TaskConfig`s.

`load_tasks` is the top function. Most entries name a file in a task folder. `list_available_tasks` finds the tasks of
an evaluation that names none. Nothing here imports torch.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from yaml import YAMLError

from llmfoundry_lite.bounded import MAX_YAML_BYTES, read_at_most
from llmfoundry_lite.config.build import build_block, is_import_path
from llmfoundry_lite.config.data_schema import HELD_OUT_TEXT
from llmfoundry_lite.config.eval_schema import LETTERS, EvalConfig, TaskConfig, result_name
from llmfoundry_lite.config.fields import keys_of
from llmfoundry_lite.config.layers import ConfigLayer, read_file, source_of
from llmfoundry_lite.config.merge import merge_layers
from llmfoundry_lite.config.own_arguments import move_arguments
from llmfoundry_lite.config.part_names import find_names, spell_out_names
from llmfoundry_lite.config.scalars import TASK_SYNONYMS
from llmfoundry_lite.config.shipped import find_task_folder
from llmfoundry_lite.config.task_types import METRICS, MULTIPLE_CHOICE, TASK_TYPES, TEXT
from llmfoundry_lite.config.uses import find_unused_keys
from llmfoundry_lite.config.yaml_text import read_record
from llmfoundry_lite.errors import ConfigError, find_nearest
from llmfoundry_lite.files import exists
from llmfoundry_lite.own_code import is_own, trust_code

TASK_WITHOUT_EFFECT = ("batch_size", "pad_tok_id", "max_seq_len", "padding_size", "destination_path")
"""LLM Foundry's keys of a task that are ignored here."""
THEIR_METRICS = {task_type.foundry_metric for task_type in TASK_TYPES.values() if task_type.foundry_metric}
"""LLM Foundry's metrics that are always computed here for tasks of their type."""


def load_tasks(
    entries: Sequence[Any] | str,
    task_folder: str,
    layers: Sequence[ConfigLayer] = (),
    notes: list[str] | None = None,
    form: str | None = None,
) -> list[TaskConfig]:
    """Load the tasks of `icl_tasks`. Each entry is a name, a file, or a block that describes the task or changes one:

        icl_tasks:
        - arc_easy                                  # <task_folder>/arc_easy.yaml
        - my_tasks.yaml                             # one task, or a list of them under icl_tasks
        - {label: arc_easy, num_fewshot: [5]}       # the task of that name, with another number of examples
        - {label: mine, icl_task_type: multiple_choice, dataset_uri: mine.jsonl}

    A single name or file need not be in a list. An entry may also be a loaded task, which is used as it is. `layers`
    are the files that the entries come from, for errors. Lines are added to `notes` for metrics that are not computed,
    and for keys without effect. `form` is that of multiple-choice tasks that do not set their own.

    Raises ConfigError for tasks that do not exist, that are not valid, or that are listed twice.
    """
    # Load the tasks. Metrics that are not computed are collected, with the labels of the tasks that ask for them.
    if isinstance(entries, str):
        entries = [entries]
    unknown_metrics: dict[str, list[str]] = {}
    short_names: dict[str, str] = {}
    tasks = _load_entries(entries, task_folder, layers, unknown_metrics, short_names)
    if form is not None:
        tasks = [_with_form(task, form) for task in tasks]
    if notes is not None:
        for metric_name, labels in unknown_metrics.items():
            notes.append(
                f"icl_tasks: metric_names: {metric_name} is not computed ({_name_some(labels)}); metric has "
                f"{', '.join([*METRICS, *find_names('metrics')])}"
            )
        for import_path, written in short_names.items():
            notes.append(f"{written} is {import_path}")
        notes += _note_unused_keys(tasks)

    # Results are named by label, number of examples and form, so these together may only be there once.
    known_names: set[str] = set()
    for task in tasks:
        for name in result_names(task):
            if name in known_names:
                raise ConfigError(f"icl_tasks: {name} is listed twice; remove one, or give it another label")
            known_names.add(name)
    return tasks


def _with_form(task: TaskConfig, form: str) -> TaskConfig:
    """Return a task with a form, if it is a multiple-choice task that does not set its own."""
    is_open = task.icl_task_type == MULTIPLE_CHOICE and task.form is None
    return replace(task, form=form) if is_open else task


def trust_code_of(tasks: Sequence[TaskConfig]) -> None:
    """Let code that tasks name be imported from now on. Call it for tasks that the user of this process has named."""
    trust_code(name for task in tasks for _, name in task.own_code)


def result_names(task: TaskConfig) -> list[str]:
    """Return the names of a task's results, one for each number of examples: `arc_easy/0-shot`, `arc_easy/5-shot`."""
    return [result_name(task.label, num_examples, task.form) for num_examples in task.num_fewshot]


def _note_unused_keys(tasks: Sequence[TaskConfig]) -> list[str]:
    """Return a note for each key without effect. Tasks with the same key and the same reason share a note."""
    labels_by_key_and_reason: dict[tuple[str, str], list[str]] = {}
    for task in tasks:
        for unused in find_unused_keys(task, task):
            labels = labels_by_key_and_reason.setdefault((unused.key, unused.reason), [])
            labels.append(task.label)
    notes = []
    for (key, reason), labels in labels_by_key_and_reason.items():
        notes.append(f"icl_tasks: {key} has no effect ({_name_some(labels)}): {reason}")
    return notes


def _name_some(labels: Sequence[str]) -> str:
    """Return the first label and the number of further ones, for a message: `arc_easy and 3 more`."""
    return f"{labels[0]} and {len(labels) - 1} more" if len(labels) > 1 else labels[0]


def without_missing_data(tasks: Sequence[TaskConfig]) -> tuple[list[TaskConfig], list[str]]:
    """Return the tasks whose data is on this machine or has a URL, and a note for each task that is left out.

    Raises ConfigError if the data of every task is missing.
    """
    available = [task for task in tasks if "://" in task.dataset_uri or exists(task.dataset_uri)]
    missing = [task for task in tasks if task not in available]
    if not available:
        raise ConfigError(
            f"skip_missing_tasks: the data of every task is missing here; {missing[0].dataset_uri} is the first"
        )
    return available, [f"{task.label} is left out: {task.dataset_uri} is not here" for task in missing]


def list_available_tasks(values: Mapping[str, Any]) -> ConfigLayer:
    """Return a configuration layer that lists every task whose data is on this machine.

    It is used when the command line names models but no YAML file. The tasks are those of the task folder, and the text
    that `data prepare` held out from the data of each run among the models. `values` is the merged configuration. The
    layer is empty if `icl_tasks` is set there already. Raises ConfigError if no task is found.
    """
    folder = str(values.get("task_folder") or "evals")
    if values.get("icl_tasks"):
        return ConfigLayer(folder, {})

    tasks = find_available_tasks(folder)
    # A perplexity task for the held-out text of each run. Two runs may have the same data.
    models = values["models"].values() if isinstance(values["models"], dict) else ()
    text_by_model = [find_held_out_text(str(model)) for model in models]
    text_paths = dict.fromkeys(path for path in text_by_model if path is not None)
    text_tasks: list[dict[str, str]] = []
    for path in text_paths:
        text_tasks.append({"label": _label_of(path), "icl_task_type": TEXT, "dataset_uri": path})
    if not (tasks or text_tasks):
        raise ConfigError(
            f"command line: no YAML file given, and the data of every task in {folder}/ is missing; in a clone, "
            "`python scripts/fetch_tasks.py` fetches the public ones, `python scripts/make_tasks.py` makes our own"
        )
    return ConfigLayer(folder, {"icl_tasks": [*text_tasks, *tasks]})


def find_available_tasks(task_folder: str) -> list[TaskConfig]:
    """Return the tasks in a folder whose data is on this machine. A file is left out unless all of its tasks are there.

    Tasks that name code are left out, because the folder may be somebody else's. A user who names such a task runs it.
    The result has the loaded tasks, which `load_tasks` takes as entries, so that what was checked is what is used.
    """
    tasks: list[TaskConfig] = []
    for path in sorted(find_task_folder(task_folder).glob("*.yaml")):
        tasks_of_file = load_tasks([str(path)], task_folder)
        names_code = any(task.own_code for task in tasks_of_file)
        if not names_code and all(exists(task.dataset_uri) for task in tasks_of_file):
            tasks += tasks_of_file
    return tasks


def _label_of(path: str) -> str:
    """Return the label of a held-out text: `c4_text` for `data/c4/val/text.jsonl`."""
    data_folder = Path(path).absolute().parent.parent
    return re.sub(r"[^\w.-]+", "-", f"{data_folder.name}_text")


def find_held_out_text(model: str) -> str | None:
    """Return the path of the validation text that `data prepare` held out from the data of a run.

    `model` is the run's folder or a checkpoint in it. Returns None if the run has no readable record, or if the text is
    not on this machine.
    """
    path_of_model = Path(model)
    is_checkpoint = path_of_model.parent.name == "checkpoints"
    run = path_of_model.parent.parent if is_checkpoint else path_of_model
    try:
        config = read_record(read_at_most(run / "config.yaml", MAX_YAML_BYTES, "a configuration"))
        dataset = config["eval_loader"]["dataset"]
        path = Path(dataset["local"], dataset["split"], HELD_OUT_TEXT)
    except (OSError, LookupError, TypeError, ValueError, RecursionError, YAMLError):
        return None
    return str(path) if path.is_file() else None


def _load_entries(
    entries: Sequence[Any],
    task_folder: str,
    layers: Sequence[ConfigLayer],
    unknown_metrics: dict[str, list[str]],
    short_names: dict[str, str],
) -> list[TaskConfig]:
    """Load the tasks of a list, whose entries are as in `load_tasks`.

    `unknown_metrics` maps each metric that is not computed to the labels of the tasks that ask for it. `short_names`
    maps each import path to the short name of a companion's part that it stands for, with its key. Both are extended
    in place.
    """
    tasks: list[TaskConfig] = []
    for index, entry in enumerate(entries):
        path = f"icl_tasks[{index}]"
        if isinstance(entry, TaskConfig):
            tasks.append(entry)
            _collect_unknown_metrics(entry, unknown_metrics)
            continue
        if isinstance(entry, str):
            tasks += _load_task_file(entry, task_folder, unknown_metrics, short_names)
            continue

        # A block without a type changes some keys of the task that its label names.
        is_variant = isinstance(entry, dict) and "label" in entry and "icl_task_type" not in entry
        if is_variant:
            layer = _read_named_task(str(entry["label"]), path, task_folder, layers)
            if "icl_tasks" in layer.values:
                raise ConfigError(f"{layer.source} holds a list of tasks; {path}: change them there")
            changes = {key: value for key, value in entry.items() if key != "label"}
            entry = {**merge_layers([layer], TaskConfig), **changes}

        # From here on, a companion's type or metric is code of the user's own, by its import path.
        spelled_out, replaced = spell_out_names({"icl_tasks": [entry]})
        (entry,) = spelled_out["icl_tasks"]

        task = _build_task(entry, path, layers)  # refuses an entry that is not a block
        tasks.append(task)
        for import_path, written in replaced.items():
            short_names[import_path] = f"icl_tasks: {task.label}: {written.partition('.')[2]}"

        _collect_unknown_metrics(task, unknown_metrics)
    return tasks


def _collect_unknown_metrics(task: TaskConfig, unknown_metrics: dict[str, list[str]]) -> None:
    """Add the label of a task to each metric that it asks for and that is not computed. Others are computed anyway."""
    for metric_name in task.metric_names:
        if metric_name not in THEIR_METRICS and not is_own(metric_name):
            unknown_metrics.setdefault(metric_name, []).append(task.label)


def _load_task_file(
    name: str, task_folder: str, unknown_metrics: dict[str, list[str]], short_names: dict[str, str]
) -> list[TaskConfig]:
    """Load the tasks of a file, which holds the keys of one task, or a list of tasks under `icl_tasks`.

    `name` is a path, or the name of a file in the task folder. The dictionaries are those of `_load_entries`.
    """
    layer = _read_task_file(name, task_folder)
    if "icl_tasks" in layer.values:
        entries = merge_layers([layer], EvalConfig)["icl_tasks"]
    else:
        entries = [merge_layers([layer], TaskConfig)]
    if not isinstance(entries, list):
        raise ConfigError(f"{layer.source}: icl_tasks: {entries!r} given, expected a list of tasks")
    return _load_entries(entries, task_folder, [layer], unknown_metrics, short_names)


def _read_task_file(name: str, task_folder: str) -> ConfigLayer:
    """Read the YAML of a task. `name` is a path that ends in .yaml, or the name of a file in the task folder."""
    is_path = name.endswith((".yaml", ".yml"))
    return read_file(name if is_path else f"{find_task_folder(task_folder)}/{name}.yaml")


def _read_named_task(label: str, path: str, task_folder: str, layers: Sequence[ConfigLayer]) -> ConfigLayer:
    """Read the YAML of the task that a label in `icl_tasks` names. `path` is the entry's dotted key, for errors.

    Raises ConfigError, which suggests the nearest name, if the task folder has no such task.
    """
    names = sorted(file.stem for file in find_task_folder(task_folder).glob("*.y*ml"))
    if label.endswith((".yaml", ".yml")) or label in names:
        return _read_task_file(label, task_folder)

    # A task of the user's own would have a type, so this one is misspelt or incomplete.
    nearest_name = find_nearest(label, names)
    hint = "one of your own says icl_task_type and dataset_uri"
    if nearest_name:
        hint = f"did you mean {nearest_name}?"
    elif names:
        hint += f"; there are: {', '.join(names)}"
    raise ConfigError(f"{source_of(path, layers)}: {path}.label: {task_folder} has no task {label!r}; {hint}")


def _build_task(entry: Any, path: str, layers: Sequence[ConfigLayer]) -> TaskConfig:
    """Build a task from its block in `icl_tasks`, whose keys are ours or LLM Foundry's. `path` is its dotted key.

    Raises ConfigError for an entry that is not a block, and for keys that are unknown, not valid, or do not go with the
    type of the task.
    """
    values = entry
    if isinstance(entry, dict):
        values = {}
        for key, value in entry.items():
            if key not in TASK_WITHOUT_EFFECT:
                our_key = TASK_SYNONYMS.get(key, key)
                values[our_key] = value
        # `num_fewshot: 5` means [5], and a metric alone a list of it.
        if isinstance(values.get("num_fewshot"), int):
            values["num_fewshot"] = [values["num_fewshot"]]
        if isinstance(values.get("metric_names"), str):
            values["metric_names"] = [values["metric_names"]]
        move_arguments(values, "icl_task_type", keys_of(TaskConfig))
    task = build_block(TaskConfig, values, path, layers)
    problem = _problem_of(task)
    if problem:
        raise ConfigError(f"{source_of(path, layers)}: {task.label}: {problem}")
    return task


def _problem_of(task: TaskConfig) -> str:
    """Return `key: what is wrong` for the first key of a task that does not go with its type; empty if all do."""
    is_text = task.task_type.answer == "text"
    if task.own_metrics and is_text:
        return f"metric_names: {task.own_metrics[0]} given, and a text has no questions; remove it"
    for name in task.own_metrics:
        if not is_import_path(name):
            return f"metric_names: {name!r} given, expected python:package.module:function"
    if is_own(task.metric) and task.metric not in task.metric_names:
        return f"metric: {task.metric} is not among metric_names; add it there"
    if task.metric is not None and task.metric not in (*task.task_type.metrics, *task.own_metrics):
        if is_text:
            return f"metric: {task.metric} given, and a text has {', '.join(task.task_type.metrics)}; remove it"
        return f"metric: {task.metric} needs choices, and a {task.icl_task_type} task has none"

    if task.form == LETTERS and task.icl_task_type != MULTIPLE_CHOICE:
        return f"form: letters needs {MULTIPLE_CHOICE}, and this is a {task.icl_task_type} task; remove it"

    # A perplexity task reads a text, which has no items with examples or categories.
    if not is_text:
        return ""
    if task.num_fewshot != [0]:
        return f"num_fewshot: {task.num_fewshot} given, and a text has no examples; remove it"
    if task.cluster is not None:
        return f"cluster: {task.cluster!r} given, but documents are a text's clusters; remove it"
    if task.has_categories:
        return "has_categories: a text has none; remove it"
    if task.fewshot_split is not None:
        return f"fewshot_split: {task.fewshot_split!r} given, and a text has no examples; remove it"
    return ""
