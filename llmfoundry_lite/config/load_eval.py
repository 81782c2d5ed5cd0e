"""Load the configuration of an evaluation: YAML files and `key=value` arguments become a frozen `EvalConfig`.

`load_eval_config` is the top function. It reads and merges the files (`layers.py`), translates LLM Foundry's keys,
builds the `EvalConfig`, and then loads its tasks, most of which are named files in a task folder. Training runs with
`icl_tasks` use `load_tasks`, too. Nothing here imports torch.
"""

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
"""LLM Foundry's keys of a task that are ignored here."""
THEIR_METRICS = {
    "InContextLearningMultipleChoiceAccuracy",
    "InContextLearningLMAccuracy",
    "InContextLearningGenerationExactMatchAccuracy",
}
"""LLM Foundry's metrics that are always computed here for tasks of their type."""
PRECISIONS = {"amp_bf16": "bf16", "amp_fp16": "fp16"}
"""LLM Foundry's name of a precision -> ours, in an evaluation."""


class LoadedEval(NamedTuple):
    """Meaning of the command-line arguments of an evaluation."""

    config: EvalConfig
    tasks: list[TaskConfig]
    notes: list[str]
    """Lines to print before anything starts: keys without effect, tasks and categories that are left out."""


def load_eval_config(arguments: Sequence[str], given: Mapping[str, Any] | None = None) -> LoadedEval:
    """Turn the arguments of an evaluation into a checked configuration and its tasks.

        load_eval_config(["icl-zero-shot", "models.ours=runs/mpt-1b", "limit=100"])
        load_eval_config(["--all-checkpoints", "runs/mpt-1b"])

    `arguments` are YAML files, `key=value` pairs, and `--all-checkpoints` with the runs whose checkpoints are
    evaluated. They override `given`, the configuration of a program that calls the library. Without a YAML file, the
    tasks are those in the task folder whose data is on this machine.

    Raises ConfigError, in one line.
    """
    # Read the arguments, and merge the files and `key=value` pairs.
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

    # Translate LLM Foundry's keys, and refuse those that are unknown.
    foundry.refuse_left_out_keys(values, layers, foundry.EVAL_LEFT_OUT)
    notes = _translate(values, layers)
    foundry.drop_variables(values, layers, EvalConfig)
    refuse_unknown_keys(EvalConfig, values, "", layers)

    # Complete the values: models from the command line, available tasks if no file names any, and the suite's name.
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

    # Load the tasks, and find their data.
    tasks = []
    for task in load_tasks(config.icl_tasks, config.task_folder, layers, notes):
        tasks.append(replace(task, dataset_uri=_find_file(task.dataset_uri, config.data_root)))
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
    """Raise ConfigError if the suite or a model has a name that cannot name a file, or if there is no task."""
    if not re.fullmatch(r"\w[\w. \-]{0,150}", config.suite):
        folder = f"a folder in results_folder ({config.results_folder}), without slashes"
        raise ConfigError(f"suite: {config.suite!r} given, expected the name of {folder}")
    for name in config.models:
        if not re.fullmatch(r"\w[\w.\-]{0,150}", name):
            raise ConfigError(f"models: {name!r} given, expected the name of a file")
    if not config.icl_tasks:
        raise ConfigError("icl_tasks: no task given, expected names or files of tasks")


def _name_of_run(run: str) -> str:
    """Return the name of a run's folder: `mpt-1b` for `runs/mpt-1b`, `runs/mpt-1b/` and `runs/mpt-1b/checkpoints`."""
    return run.rstrip("/").removesuffix("/checkpoints").split("/")[-1]


def _add_runs(models: Any, runs: Sequence[str]) -> Any:
    """Return `models` (name -> place) with an entry for each run, by the name of the run's folder.

    Raises ConfigError if two have the same name. Models that are not a dictionary are returned unchanged, because the
    schema will refuse them.
    """
    if not isinstance(models, dict):
        return models
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
    """Translate LLM Foundry's keys of an evaluation into ours, in place. Returns a note for each without effect.

    Raises ConfigError for a model that cannot be evaluated here, and for a file that does not exist.
    """
    notes = foundry.drop_keys(values, layers, foundry.EVAL_WITHOUT_EFFECT)
    for their_key, our_key in EVAL_SYNONYMS.items():
        if their_key in values and values.get(our_key) is None:
            values[our_key] = values.pop(their_key)
    precision = values.get("precision")
    if isinstance(precision, str):  # the schema refuses a list or a block
        values["precision"] = PRECISIONS.get(precision, precision)

    # Tasks and the gauntlet may be files. Their paths may begin at data_root, such as `scripts` in LLM Foundry's clone.
    for key in ("icl_tasks", "eval_gauntlet"):
        file = values.get(key)
        if isinstance(file, str) and file.endswith((".yaml", ".yml")) and find_yaml(file) is None:
            path = _find_file(file, str(values.get("data_root") or "."))
            values[key] = path
            if not exists(path):
                raise ConfigError(
                    f"{source_of(key, layers)}: {key}: {path} does not exist; data_root=FOLDER says where its path "
                    "begins"
                )
    # A gauntlet's file holds the block itself, or has it under the key eval_gauntlet.
    if isinstance(values.get("eval_gauntlet"), str):
        layer = read_file(values["eval_gauntlet"])
        is_block = "eval_gauntlet" not in layer.values
        values_of_file = merge_layers([layer], GauntletConfig if is_block else EvalConfig)
        values["eval_gauntlet"] = values_of_file if is_block else values_of_file["eval_gauntlet"]

    # Older YAMLs have a single model in the keys of a training run, newer ones have a list of models.
    if isinstance(values.get("model"), dict) and not values.get("models"):
        keys = ["model", "load_path"]
        if isinstance(values.get("tokenizer"), dict):
            keys.append("tokenizer")
        values["models"] = [{key: values.pop(key) for key in keys if key in values}]
    if isinstance(values.get("models"), list):
        values["models"] = _name_models(values["models"], source_of("models", layers), notes)
    return notes


def _find_file(path: str, data_root: str) -> str:
    """Return `path` if it exists or is a URL, and otherwise the path below `data_root`, which need not exist."""
    if "://" in path or exists(path):
        return path
    return str(Path(data_root) / path)


def _name_models(models: Sequence[Any], source: str, notes: list[str]) -> dict[str, str]:
    """Turn LLM Foundry's list of models into ours, name -> where the model is.

    `[{model_name: opt, model: {name: hf_causal_lm, pretrained_model_name_or_path: facebook/opt-125m}}]` becomes
    `{"opt": "hf:facebook/opt-125m"}`. `source` is the list's file, for messages. A note is added to `notes` for each
    tokenizer that is not the model's own. Raises ConfigError for models that cannot be evaluated, and names given
    twice.
    """
    locations: dict[str, str] = {}
    for index, entry in enumerate(models):
        location = _locate_model(entry)
        if location is None:
            name = entry.get("model_name") if isinstance(entry, dict) else entry
            raise ConfigError(
                f"{source}: models[{index}]: {name!r} is not evaluated here; expected an MPT's load_path, "
                "or model.pretrained_model_name_or_path under hf_causal_lm, not in 8 bits and without adapters"
            )
        # The name becomes the name of a file: facebook/opt-125m becomes opt-125m.
        name = str(entry.get("model_name") or location).rstrip("/").rsplit("/", 1)[-1]
        name = re.sub(r"[^\w.\-]", "_", name)
        if name in locations:
            raise ConfigError(f"{source}: models[{index}]: there are two models named {name}; rename one")
        locations[name] = location

        tokenizer = entry.get("tokenizer")
        own_tokenizer = entry["model"].get("pretrained_model_name_or_path")
        if isinstance(tokenizer, dict) and tokenizer.get("name") not in (None, "", own_tokenizer):
            notes.append(
                f"{source}: models[{index}].tokenizer {str(tokenizer['name'])!r} has no effect: a model has its own; "
                "tokenizer=PATH names one for all of them"
            )
    return locations


def _locate_model(entry: Any) -> str | None:
    """Return the folder, the URL or `hf:NAME` of a model in LLM Foundry's list; None if it cannot be evaluated here.

    An MPT has a load_path. Other models have a name on the Hub or a folder (`pretrained_model_name_or_path`), and are
    evaluated unless they have adapters or are quantized.
    """
    model = entry.get("model") if isinstance(entry, dict) else None
    if not isinstance(model, dict):
        return None
    if entry.get("load_path"):
        return str(entry["load_path"])

    pretrained = model.get("pretrained_model_name_or_path")
    is_modified = model.get("peft_config") or model.get("load_in_8bit")
    if model.get("name") != "hf_causal_lm" or not pretrained or is_modified:
        return None
    is_path_or_url = re.match(r"[./~]|\w+:", str(pretrained)) or os.path.isdir(str(pretrained))
    return str(pretrained) if is_path_or_url else f"hf:{pretrained}"


# ----------------------------------------------------------------------------------------------- gauntlet


def _check_gauntlet(gauntlet: GauntletConfig, layers: Sequence[ConfigLayer]) -> list[str]:
    """Raise ConfigError for a gauntlet whose categories and averages do not fit together.

    Returns a note for each average that names a category which does not exist beside others that do.
    """
    notes = []
    key = f"{source_of('eval_gauntlet', layers)}: eval_gauntlet"
    if gauntlet.rescale_accuracy and not gauntlet.subtract_random_baseline:
        raise ConfigError(f"{key}.rescale_accuracy: true given, which needs subtract_random_baseline: true")

    names = [category.name for category in gauntlet.categories]
    for category in gauntlet.categories:
        if names.count(category.name) > 1 or not category.benchmarks:
            problem = "is there twice" if category.benchmarks else "has no benchmark"
            raise ConfigError(f"{key}.categories: {category.name} {problem}")

    # Results have averages and categories in one table, so their names must differ.
    for average, categories in (gauntlet.averages or {}).items():
        if average in names:
            raise ConfigError(f"{key}.averages: {average} is a category's name; choose another")
        unknown = [category for category in categories if category not in names]
        if unknown and len(unknown) == len(categories):
            raise ConfigError(f"{key}.averages.{average}: no category {unknown[0]!r}; there are: {', '.join(names)}")
        # LLM Foundry ignores unknown categories, and some of its YAMLs have them.
        notes += [f"eval_gauntlet: {average} is without {name!r}, which is no category here" for name in unknown]
    return notes


def _note_incomplete(gauntlet: GauntletConfig, tasks: Sequence[TaskConfig]) -> list[str]:
    """Return a note for each category of a gauntlet that needs a task which is not evaluated.

    The user can then stop before hours are spent on the other tasks.
    """
    evaluated_tasks = {f"{task.label}/{shots}-shot" for task in tasks for shots in task.num_fewshot}
    notes = []
    for category in gauntlet.categories:
        missing = [benchmark.task for benchmark in category.benchmarks if benchmark.task not in evaluated_tasks]
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
    """Load the tasks of `icl_tasks`. Each entry is a name, a file, or a block that describes the task or changes one:

        icl_tasks:
        - arc_easy                                  # <task_folder>/arc_easy.yaml
        - my_tasks.yaml                             # one task, or a list of them under icl_tasks
        - {label: arc_easy, num_fewshot: [5]}       # the task of that name, with another number of examples
        - {label: mine, icl_task_type: multiple_choice, dataset_uri: mine.jsonl}

    `layers` are the files that the entries come from, for errors. Lines are added to `notes` for metrics that are not
    computed, and for keys without effect.

    Raises ConfigError for tasks that do not exist, that are not valid, or that are listed twice.
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
    """Return a note for each key without effect. Tasks with the same key and the same reason share a note."""
    labels_by_problem: dict[tuple[str, str], list[str]] = {}
    for task in tasks:
        for unused in find_unused_keys(task, task):
            labels_by_problem.setdefault((unused.key, unused.reason), []).append(task.label)
    notes = []
    for (key, reason), labels in labels_by_problem.items():
        notes.append(f"icl_tasks: {key} has no effect ({_name_some(labels)}): {reason}")
    return notes


def _name_some(labels: Sequence[str]) -> str:
    """Return the first label and the number of further ones, for a message: `arc_easy and 3 more`."""
    return f"{labels[0]} and {len(labels) - 1} more" if len(labels) > 1 else labels[0]


def _without_missing(tasks: Sequence[TaskConfig]) -> tuple[list[TaskConfig], list[str]]:
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


def _find_available_tasks(values: Mapping[str, Any]) -> ConfigLayer:
    """Return a configuration layer that lists every task whose data is on this machine.

    Used when the command line names models but no YAML file. The tasks are those of the task folder, and the text that
    `data prepare` held out from the data of each run among the models. The layer is empty if `icl_tasks` is set
    already. Raises ConfigError if no task is found.
    """
    folder = str(values.get("task_folder") or "evals")
    if values.get("icl_tasks"):
        return ConfigLayer(folder, {})

    # Tasks of the task folder whose data files exist.
    names = []
    for path in sorted(find_task_folder(folder).glob("*.yaml")):
        tasks_of_file = load_tasks([str(path)], folder)
        if all(exists(task.dataset_uri) for task in tasks_of_file):
            names.append(path.stem)

    # A perplexity task for the held-out text of each run. Two runs may have the same data.
    models = values["models"].values() if isinstance(values["models"], dict) else ()
    text_by_model = [find_held_out_text(str(model)) for model in models]
    text_paths = dict.fromkeys(path for path in text_by_model if path is not None)
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
    """Return the label of a held-out text: `c4_text` for `data/c4/val/text.jsonl`."""
    return re.sub(r"[^\w.-]+", "-", f"{Path(path).absolute().parent.parent.name}_text")


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
    entries: Sequence[Any], task_folder: str, layers: Sequence[ConfigLayer], metrics: dict[str, list[str]]
) -> list[TaskConfig]:
    """Load the tasks of a list, whose entries are as in `load_tasks`.

    `metrics` maps each metric that is not computed to the labels of the tasks that ask for it. It is extended in place.
    """
    tasks: list[TaskConfig] = []
    for index, entry in enumerate(entries):
        path = f"icl_tasks[{index}]"
        if isinstance(entry, str):
            tasks += _load_task_file(entry, task_folder, metrics)
            continue

        # A block without a type changes some keys of the task that its label names.
        is_variant = isinstance(entry, dict) and "label" in entry and "icl_task_type" not in entry
        if is_variant:
            layer = _read_named_task(str(entry["label"]), path, task_folder, layers)
            if "icl_tasks" in layer.values:
                raise ConfigError(f"{layer.source} holds a list of tasks; {path}: change them there")
            changes = {key: value for key, value in entry.items() if key != "label"}
            entry = {**merge_layers([layer], TaskConfig), **changes}

        task = _build_task(entry, path, layers)
        tasks.append(task)

        metric_names = entry.get("metric_names") or [] if isinstance(entry, dict) else []
        if isinstance(metric_names, str):
            metric_names = [metric_names]
        for metric_name in metric_names:
            if metric_name not in THEIR_METRICS:
                metrics.setdefault(str(metric_name), []).append(task.label)
    return tasks


def _load_task_file(name: str, task_folder: str, metrics: dict[str, list[str]]) -> list[TaskConfig]:
    """Load the tasks of a file, which holds the keys of one task, or a list of tasks under `icl_tasks`.

    `name` is a path, or the name of a file in the task folder. `metrics` is as in `_load_entries`.
    """
    layer = _read_task_file(name, task_folder)
    if "icl_tasks" in layer.values:
        entries = merge_layers([layer], EvalConfig)["icl_tasks"]
    else:
        entries = [merge_layers([layer], TaskConfig)]
    if not isinstance(entries, list):
        raise ConfigError(f"{layer.source}: icl_tasks: {entries!r} given, expected a list of tasks")
    return _load_entries(entries, task_folder, [layer], metrics)


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
    near = find_nearest(label, names)
    hint = "one of your own says icl_task_type and dataset_uri"
    if near:
        hint = f"did you mean {near}?"
    elif names:
        hint += f"; there are: {', '.join(names)}"
    raise ConfigError(f"{source_of(path, layers)}: {path}.label: {task_folder} has no task {label!r}; {hint}")


def _build_task(entry: Any, path: str, layers: Sequence[ConfigLayer]) -> TaskConfig:
    """Build a task from its block in `icl_tasks`, whose keys are ours or LLM Foundry's. `path` is its dotted key.

    Raises ConfigError for keys that are unknown or not valid, or that do not go with the type of the task.
    """
    values = entry
    if isinstance(entry, dict):
        values = {TASK_SYNONYMS.get(key, key): value for key, value in entry.items() if key not in TASK_WITHOUT_EFFECT}
        # `num_fewshot: 5` means [5].
        if isinstance(values.get("num_fewshot"), int):
            values["num_fewshot"] = [values["num_fewshot"]]
    task = build_block(TaskConfig, values, path, layers)
    problem = _problem_of(task)
    if problem:
        raise ConfigError(f"{source_of(path, layers)}: {task.label}: {problem}")
    return task


def _problem_of(task: TaskConfig) -> str:
    """Return `key: what is wrong` for the first key of a task that does not go with its type; empty if all do."""
    has_choices = task.icl_task_type in ("multiple_choice", "schema")
    if task.metric not in (None, "acc") and not has_choices:
        return f"metric: {task.metric} needs choices, and a {task.icl_task_type} task has none"

    # A perplexity task reads a text, which has no items with examples or categories.
    if task.icl_task_type != "perplexity":
        return ""
    if task.num_fewshot != [0]:
        return f"num_fewshot: {task.num_fewshot} given, and a text has no examples; remove it"
    if task.cluster is not None:
        return f"cluster: {task.cluster!r} given, but documents are a text's clusters; remove it"
    if task.has_categories:
        return "has_categories: a text has none; remove it"
    return ""
