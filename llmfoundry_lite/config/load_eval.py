"""YAML files and `key=value` arguments -> a checked, frozen `EvalConfig` and its tasks. No torch."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from yaml import YAMLError

from llmfoundry_lite import companions
from llmfoundry_lite.bounded import MAX_YAML_BYTES, read_at_most
from llmfoundry_lite.config import foundry
from llmfoundry_lite.config.build import build_block, refuse_unknown_keys
from llmfoundry_lite.config.data_schema import HELD_OUT_TEXT
from llmfoundry_lite.config.eval_schema import EvalConfig, GauntletConfig, TaskConfig
from llmfoundry_lite.config.layers import (
    ConfigLayer,
    is_key_value,
    is_yaml,
    merge_layers,
    naming_source,
    read_file,
    read_layers,
    source_of,
)
from llmfoundry_lite.config.scalars import EVAL_SYNONYMS, TASK_SYNONYMS
from llmfoundry_lite.config.shipped import find_task_folder, find_yaml
from llmfoundry_lite.config.uses import find_unused_keys
from llmfoundry_lite.config.yaml_text import read_record
from llmfoundry_lite.errors import ConfigError, find_nearest
from llmfoundry_lite.files import exists

TASK_WITHOUT_EFFECT = ("batch_size", "metric_names", "pad_tok_id", "max_seq_len", "padding_size", "destination_path")
THEIR_METRICS = {
    "InContextLearningMultipleChoiceAccuracy",
    "InContextLearningLMAccuracy",
    "InContextLearningGenerationExactMatchAccuracy",
}
"""LLM Foundry's metrics that every task of their type has here anyway."""
PRECISIONS = {"amp_bf16": "bf16", "amp_fp16": "fp16"}
"""LLM Foundry's word -> ours."""


class LoadedEval(NamedTuple):
    """Meaning of the command-line arguments of an evaluation."""

    config: EvalConfig
    tasks: list[TaskConfig]
    notes: list[str]
    """Lines to print before anything starts: keys without effect, tasks and categories that are left out."""


def load_eval_config(arguments: Sequence[str], given: Mapping[str, Any] | None = None) -> LoadedEval:
    """Read the arguments of `scripts/eval.py`: YAML files, `key=value` pairs, and `--all-checkpoints` with its runs.
    They are laid over a program's configuration, if `given`.

    Without a YAML file the tasks are all those in task_folder whose data are here. Raises ConfigError in one line.
    """
    flags = [argument for argument in arguments if argument.startswith("-")]
    for flag in flags:
        if flag != "--all-checkpoints":
            raise ConfigError(
                f"command line: unknown option {flag}; expected YAML files, key=value pairs or --all-checkpoints"
            )
    positional = [argument for argument in arguments if argument not in flags]
    runs = [argument for argument in positional if not is_yaml(argument) and not is_key_value(argument)]
    if runs and not flags:
        suggestion = f"models.{_name_of_run(runs[0])}={runs[0]}"
        raise ConfigError(
            f"command line: {runs[0]!r} is neither a .yaml file nor key=value; a model is given as {suggestion}"
        )
    layers = read_layers([argument for argument in positional if argument not in runs], for_training=False, given=given)
    values = merge_layers(layers, EvalConfig) if layers else {}
    foundry.refuse_left_out_keys(values, layers, foundry.EVAL_LEFT_OUT)
    notes = _translate(values, layers)
    foundry.drop_variables(values, layers, EvalConfig)
    refuse_unknown_keys(EvalConfig, values, "", layers)

    if flags:
        values |= {"all_checkpoints": True, "models": _add_runs(values.get("models") or {}, runs)}
    has_file = given is not None or any(is_yaml(argument) for argument in arguments)
    if not values.get("models"):
        if flags:
            raise ConfigError("--all-checkpoints: no run given; name one, such as --all-checkpoints runs/mpt-1b")
        if has_file:
            raise ConfigError("models: none given; name one on the command line, such as models.ours=runs/mpt-1b")
        raise ConfigError("command line: no YAML file given; try icl-zero-shot models.ours=runs/mpt-1b")
    lacks_tasks = given is not None and not values.get("icl_tasks")
    if not has_file or lacks_tasks:
        layers.insert(0, _find_available_tasks(values))
        values = {**layers[0].values, **values}
    values.setdefault("suite", "tasks" if given is not None else Path(layers[0].source).stem)
    config = build_block(EvalConfig, values, "", layers)
    with naming_source(layers):
        _check(config)

    tasks = []
    for task in load_tasks(config.icl_tasks, config.task_folder, layers, notes):
        tasks.append(replace(task, dataset_uri=_find(task.dataset_uri, config.data_root)))
    notes_on_missing: list[str] = []
    if config.skip_missing_tasks:
        tasks, notes_on_missing = _without_missing(tasks)
    for task in tasks:
        if task.dataset_uri.startswith("hf://"):
            companions.require("llmfoundry_formats", f"{task.label}: {task.dataset_uri}")
    if config.eval_gauntlet is not None:
        notes += _check_gauntlet(config.eval_gauntlet, layers)
        notes += _note_incomplete(config.eval_gauntlet, tasks)
    return LoadedEval(config, tasks, notes + notes_on_missing)


def _check(config: EvalConfig) -> None:
    """Check combinations of keys, and names that become files. Raises ConfigError."""
    if not re.fullmatch(r"\w[\w. \-]{0,150}", config.suite):
        folder = f"a folder in results_folder ({config.results_folder}), without slashes"
        raise ConfigError(f"suite: {config.suite!r} given, expected the name of {folder}")
    for name in config.models:
        if not re.fullmatch(r"\w[\w.\-]{0,150}", name):
            raise ConfigError(f"models: {name!r} given, expected the name of a file")
    if not config.icl_tasks:
        raise ConfigError("icl_tasks: no task given, expected names or files of tasks")


def _name_of_run(run: str) -> str:
    """Return the name of a run's folder, which may be given with its `checkpoints`."""
    return run.rstrip("/").removesuffix("/checkpoints").split("/")[-1]


def _add_runs(models: Any, runs: Sequence[str]) -> Any:
    """Return the models and the runs, each by its folder's name. Raises ConfigError for a name that is there twice."""
    if not isinstance(models, dict):
        return models  # the schema refuses it
    for run in runs:
        name = _name_of_run(run)
        if name in models:
            raise ConfigError(
                f"models: {models[name]} and {run} are both {name}; name one otherwise: models.NAME={run}"
            )
        models = {**models, name: run}
    return models


# ------------------------------------------------------------------------------- LLM Foundry's evaluations


def _translate(values: dict[str, Any], layers: Sequence[ConfigLayer]) -> list[str]:
    """Translate LLM Foundry's keys into ours, in place. Returns a note for each that has no effect.

    Raises ConfigError for a model that is not evaluated here.
    """
    notes = foundry.drop_keys(values, layers, foundry.EVAL_WITHOUT_EFFECT)
    for theirs, ours in EVAL_SYNONYMS.items():
        if theirs in values and values.get(ours) is None:
            values[ours] = values.pop(theirs)
    precision = values.get("precision")
    if isinstance(precision, str):  # the schema refuses a list or a block
        values["precision"] = PRECISIONS.get(precision, precision)
    for key in ("icl_tasks", "eval_gauntlet"):
        file = values.get(key)
        if isinstance(file, str) and file.endswith((".yaml", ".yml")) and find_yaml(file) is None:
            values[key] = path = _find(file, str(values.get("data_root") or "."))
            if not exists(path):
                place = f"{source_of(key, layers)}: {key}"
                raise ConfigError(f"{place}: {path} does not exist; data_root=FOLDER says where its path begins")
    if isinstance(values.get("eval_gauntlet"), str):
        layer = read_file(values["eval_gauntlet"])
        is_block = "eval_gauntlet" not in layer.values
        inside = merge_layers([layer], GauntletConfig if is_block else EvalConfig)
        values["eval_gauntlet"] = inside if is_block else inside["eval_gauntlet"]
    if isinstance(values.get("model"), dict) and not values.get("models"):  # the one model of an older YAML
        keys = ["model", "load_path", *(["tokenizer"] if isinstance(values.get("tokenizer"), dict) else [])]
        values["models"] = [{key: values.pop(key) for key in keys if key in values}]
    if isinstance(values.get("models"), list):
        values["models"] = _name_models(values["models"], source_of("models", layers), notes)
    return notes


def _find(path: str, root: str) -> str:
    """Return the path of a file that a YAML names: here, or below `data_root`."""
    return path if "://" in path or exists(path) else str(Path(root) / path)


def _name_models(models: Sequence[Any], source: str, notes: list[str]) -> dict[str, str]:
    """Turn `[{model_name, model: {name, pretrained_model_name_or_path}, tokenizer, load_path}]` into name -> place.

    Notes each tokenizer that is not the model's own.
    """
    places: dict[str, str] = {}
    for index, entry in enumerate(models):
        place = _find_model(entry)
        if place is None:
            name = entry.get("model_name") if isinstance(entry, dict) else entry
            raise ConfigError(
                f"{source}: models[{index}]: {name!r} is not evaluated here; expected an MPT's load_path, "
                "or model.pretrained_model_name_or_path under hf_causal_lm, not in 8 bits and without adapters"
            )
        name = str(entry.get("model_name") or place).rstrip("/").rsplit("/", 1)[-1]
        name = re.sub(r"[^\w.\-]", "_", name)
        if name in places:
            raise ConfigError(f"{source}: models[{index}]: there are two models named {name}; rename one")
        places[name] = place

        tokenizer = entry.get("tokenizer")
        own_tokenizer = entry["model"].get("pretrained_model_name_or_path")
        if isinstance(tokenizer, dict) and tokenizer.get("name") not in (None, "", own_tokenizer):
            notes.append(
                f"{source}: models[{index}].tokenizer {str(tokenizer['name'])!r} has no effect: a model has its own; "
                "tokenizer=PATH names one for all of them"
            )
    return places


def _find_model(entry: Any) -> str | None:
    """Return where the model of LLM Foundry's list lies: a folder, a URL or hf:NAME. None if none is evaluated here."""
    model = entry.get("model") if isinstance(entry, dict) else None
    if not isinstance(model, dict):
        return None
    if entry.get("load_path"):
        return str(entry["load_path"])

    pretrained = model.get("pretrained_model_name_or_path")
    is_changed = model.get("peft_config") or model.get("load_in_8bit")
    if model.get("name") != "hf_causal_lm" or not pretrained or is_changed:
        return None
    is_folder = re.match(r"[./~]|\w+:", str(pretrained)) or os.path.isdir(str(pretrained))
    return str(pretrained) if is_folder else f"hf:{pretrained}"


# ----------------------------------------------------------------------------------------------- gauntlet


def _check_gauntlet(gauntlet: GauntletConfig, layers: Sequence[ConfigLayer]) -> list[str]:
    """Check that the gauntlet's parts fit together. Raises ConfigError; returns notes."""
    notes = []
    place = f"{source_of('eval_gauntlet', layers)}: eval_gauntlet"
    if gauntlet.rescale_accuracy and not gauntlet.subtract_random_baseline:
        raise ConfigError(f"{place}.rescale_accuracy: true given, which needs subtract_random_baseline: true")
    names = [category.name for category in gauntlet.categories]
    for category in gauntlet.categories:
        if names.count(category.name) > 1 or not category.benchmarks:
            problem = "is there twice" if category.benchmarks else "has no benchmark"
            raise ConfigError(f"{place}.categories: {category.name} {problem}")
    for average, categories in (gauntlet.averages or {}).items():
        if average in names:
            raise ConfigError(f"{place}.averages: {average} is a category's name; choose another")
        unknown = [category for category in categories if category not in names]
        if unknown and len(unknown) == len(categories):
            raise ConfigError(f"{place}.averages.{average}: no category {unknown[0]!r}; there are: {', '.join(names)}")
        # LLM Foundry ignores unknown categories, and some of its YAMLs have them.
        notes += [f"eval_gauntlet: {average} is without {name!r}, which is no category here" for name in unknown]
    return notes


def _note_incomplete(gauntlet: GauntletConfig, tasks: Sequence[TaskConfig]) -> list[str]:
    """Return a note for each category that lacks a task, before hours are spent on the others."""
    asked = {f"{task.label}/{shots}-shot" for task in tasks for shots in task.num_fewshot}
    notes = []
    for category in gauntlet.categories:
        missing = [benchmark.task for benchmark in category.benchmarks if benchmark.task not in asked]
        if missing:
            notes.append(
                f"eval_gauntlet: {category.name} needs {', '.join(missing)}, not asked for now; without an earlier "
                "result it is left out"
            )
    return notes


# -------------------------------------------------------------------------------------------------- tasks


def load_tasks(
    entries: Sequence[Any] | str, task_folder: str, layers: Sequence[ConfigLayer] = (), notes: list[str] | None = None
) -> list[TaskConfig]:
    """Load tasks written out, or named: `arc_easy` is `<task_folder>/arc_easy.yaml`, and a .yaml file is itself.

    A file holds one task, or a list of them under `icl_tasks`. An entry with a label but no type, such as
    `{label: arc_easy, num_fewshot: [5], dataset_uri: my.jsonl}`, is laid over the task that the label names.
    `notes` gets a line for metrics that are not computed, and for keys without effect. Raises ConfigError.
    """
    metrics: dict[str, list[str]] = {}
    """Metric that is not computed -> labels of the tasks that ask for it."""
    tasks = _load_entries([entries] if isinstance(entries, str) else entries, task_folder, layers, metrics)
    if notes is not None:
        for name, labels in metrics.items():
            notes.append(
                f"icl_tasks: metric_names: {name} is not computed ({_name_some(labels)}); metric has acc_per_token, "
                "acc or acc_norm"
            )
        notes += _note_unused_keys(tasks)

    results: set[str] = set()
    for task in tasks:
        for shots in task.num_fewshot:
            name = f"{task.label}/{shots}-shot"
            if name in results:
                raise ConfigError(f"icl_tasks: {name} is listed twice; remove one, or give it another label")
            results.add(name)
    return tasks


def _note_unused_keys(tasks: Sequence[TaskConfig]) -> list[str]:
    """Return a note for each key without effect, and each reason, with the tasks that have it."""
    labels: dict[tuple[str, str], list[str]] = {}
    for task in tasks:
        for unused in find_unused_keys(task, task):
            labels.setdefault((unused.key, unused.reason), []).append(task.label)
    notes = []
    for (key, reason), labels_of_key in labels.items():
        notes.append(f"icl_tasks: {key} has no effect ({_name_some(labels_of_key)}): {reason}")
    return notes


def _name_some(labels: Sequence[str]) -> str:
    """Return the first label, and the number of further ones, for a message."""
    return f"{labels[0]} and {len(labels) - 1} more" if len(labels) > 1 else labels[0]


def _without_missing(tasks: Sequence[TaskConfig]) -> tuple[list[TaskConfig], list[str]]:
    """Return the tasks whose data are here or on the Hub, and a note on each other. Raises ConfigError for none."""
    here = [task for task in tasks if "://" in task.dataset_uri or exists(task.dataset_uri)]
    missing = [task for task in tasks if task not in here]
    if not here:
        raise ConfigError(
            f"skip_missing_tasks: the data of every task is missing here; {missing[0].dataset_uri} is the first"
        )
    return here, [f"{task.label} is left out: {task.dataset_uri} is not here" for task in missing]


def _find_available_tasks(values: Mapping[str, Any]) -> ConfigLayer:
    """Return a configuration layer that lists every task whose data is on this machine.

    Used when the command line names models but no YAML file. The tasks are those of the task folder, and the text that
    `data prepare` held out from the data of each run among the models. The layer is empty if `icl_tasks` is set
    already. Raises ConfigError if no task is found.
    """
    folder = str(values.get("task_folder") or "evals")
    if values.get("icl_tasks"):
        return ConfigLayer(folder, {})

    names = []
    for path in sorted(find_task_folder(folder).glob("*.yaml")):
        tasks_of_file = load_tasks([str(path)], folder)
        if all(exists(task.dataset_uri) for task in tasks_of_file):
            names.append(path.stem)

    models = values["models"].values() if isinstance(values["models"], dict) else ()
    found_texts = [find_held_out_text(str(model)) for model in models]
    text_paths = dict.fromkeys(path for path in found_texts if path is not None)  # two runs may have the same data
    text_tasks: list[dict[str, str]] = []
    for path in text_paths:
        text_tasks.append({"label": _label_of(path), "icl_task_type": "perplexity", "dataset_uri": path})
    if not (names or text_tasks):
        raise ConfigError(
            f"command line: no YAML file given, and the data of every task in {folder}/ is missing; in a clone, "
            "`python scripts/fetch_tasks.py` fetches the public ones, `python scripts/make_tasks.py` makes our own"
        )
    return ConfigLayer(folder, {"icl_tasks": [*text_tasks, *names]})


def _label_of(path: str) -> str:
    """Return the name of the prepared folder, which holds val/text.jsonl."""
    return re.sub(r"[^\w.-]+", "-", f"{Path(path).absolute().parent.parent.name}_text")


def find_held_out_text(model: str) -> str | None:
    """Return the text that `data prepare` held out from a run's data, if both are here."""
    run = Path(model).parent.parent if Path(model).parent.name == "checkpoints" else Path(model)
    try:
        config = read_record(read_at_most(run / "config.yaml", MAX_YAML_BYTES, "a configuration"))
        dataset = config["eval_loader"]["dataset"]
        path = Path(dataset["local"], dataset["split"], HELD_OUT_TEXT)
    except (OSError, LookupError, TypeError, ValueError, RecursionError, YAMLError):
        return None
    return str(path) if path.is_file() else None


def _load_entries(
    entries: Sequence[Any], task_folder: str, layers: Sequence[ConfigLayer], metrics: dict[str, list[str]]
) -> list[TaskConfig]:
    """Load tasks. `metrics` gets, for each metric that is not computed, the labels of the tasks that ask for it."""
    tasks: list[TaskConfig] = []
    for index, entry in enumerate(entries):
        path = f"icl_tasks[{index}]"
        if isinstance(entry, str):
            tasks += _load_task_file(entry, task_folder, metrics)
            continue
        if isinstance(entry, dict) and "label" in entry and "icl_task_type" not in entry:
            layer = _read_named_task(str(entry["label"]), path, task_folder, layers)
            if "icl_tasks" in layer.values:
                raise ConfigError(f"{layer.source} holds a list of tasks; {path}: change them there")
            changes = {key: value for key, value in entry.items() if key != "label"}
            entry = {**merge_layers([layer], TaskConfig), **changes}

        task = _build_task(entry, path, layers)
        tasks.append(task)
        names = entry.get("metric_names") or [] if isinstance(entry, dict) else []
        for name in [names] if isinstance(names, str) else names:
            if name not in THEIR_METRICS:
                metrics.setdefault(str(name), []).append(task.label)
    return tasks


def _load_task_file(name: str, task_folder: str, metrics: dict[str, list[str]]) -> list[TaskConfig]:
    """Load the task, or the list of tasks under `icl_tasks`, of a file."""
    layer = _read_task_file(name, task_folder)
    if "icl_tasks" in layer.values:
        entries = merge_layers([layer], EvalConfig)["icl_tasks"]
    else:
        entries = [merge_layers([layer], TaskConfig)]
    if not isinstance(entries, list):
        raise ConfigError(f"{layer.source}: icl_tasks: {entries!r} given, expected a list of tasks")
    return _load_entries(entries, task_folder, [layer], metrics)


def _read_task_file(name: str, task_folder: str) -> ConfigLayer:
    """Read a task's YAML: a file by its path, or one of the folder by its name."""
    is_file = name.endswith((".yaml", ".yml"))
    return read_file(name if is_file else f"{find_task_folder(task_folder)}/{name}.yaml")


def _read_named_task(label: str, path: str, task_folder: str, layers: Sequence[ConfigLayer]) -> ConfigLayer:
    """Read the task that a label names. Raises ConfigError, which suggests the nearest name."""
    names = sorted(file.stem for file in find_task_folder(task_folder).glob("*.y*ml"))
    if label.endswith((".yaml", ".yml")) or label in names:
        return _read_task_file(label, task_folder)
    near = find_nearest(label, names)
    hint = "one of your own says icl_task_type and dataset_uri"
    if near:
        hint = f"did you mean {near}?"
    elif names:
        hint += f"; there are: {', '.join(names)}"
    raise ConfigError(f"{source_of(path, layers)}: {path}.label: {task_folder} has no task {label!r}; {hint}")


def _build_task(entry: Any, path: str, layers: Sequence[ConfigLayer]) -> TaskConfig:
    """Make the task of an entry, in LLM Foundry's words or ours, which stands at `path`. Raises ConfigError."""
    values = entry
    if isinstance(entry, dict):
        values = {TASK_SYNONYMS.get(key, key): value for key, value in entry.items() if key not in TASK_WITHOUT_EFFECT}
        if isinstance(values.get("num_fewshot"), int):
            values["num_fewshot"] = [values["num_fewshot"]]
    task = build_block(TaskConfig, values, path, layers)
    problem = _problem_of(task)
    if problem:
        raise ConfigError(f"{source_of(path, layers)}: {task.label}: {problem}")
    return task


def _problem_of(task: TaskConfig) -> str:
    """Return which keys of a task do not go with its type; empty if all do."""
    has_choices = task.icl_task_type in ("multiple_choice", "schema")
    if task.metric not in (None, "acc") and not has_choices:
        return f"metric: {task.metric} needs choices, and a {task.icl_task_type} task has none"
    if task.icl_task_type != "perplexity":
        return ""
    if task.num_fewshot != [0]:
        return f"num_fewshot: {task.num_fewshot} given, and a text has no examples; remove it"
    if task.cluster is not None:
        return f"cluster: {task.cluster!r} given, but documents are a text's clusters; remove it"
    if task.has_categories:
        return "has_categories: a text has none; remove it"
    return ""
