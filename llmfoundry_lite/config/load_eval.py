"""YAML files and `key=value` arguments -> a checked, frozen `EvalConfig` and its tasks. No torch."""

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llmfoundry_lite.config.build import build_block, refuse_unknown_keys
from llmfoundry_lite.config.foundry import EVAL_LEFT_OUT, refuse_left_out_keys
from llmfoundry_lite.config.foundry_eval import translate_evaluation
from llmfoundry_lite.config.layers import Layer, is_key_value, is_yaml, merge_layers, read_layers, source_of
from llmfoundry_lite.config.schema import EvalConfig, GauntletConfig, TaskConfig
from llmfoundry_lite.config.shipped import find_task_folder
from llmfoundry_lite.errors import ConfigError

EVAL_CHOICES = {
    "tokenization": ("separate", "joint"),
    "precision": ("fp32", "tf32", "bf16", "fp16"),
    "spending": ("obrien_fleming", "pocock"),
}


TASK_CHOICES = {
    "icl_task_type": (
        *("multiple_choice", "schema", "language_modeling"),
        *("generation_task_with_answers", "perplexity"),
    ),
    "tokenization": ("separate", "joint"),
}


WEIGHTINGS = ("EQUAL", "SAMPLE_SZ", "LOG_SAMPLE_SZ")


TASK_SYNONYMS = {"question_prelimiter": "prelimiter"}
"""Keys of older task lists."""


TASK_WITHOUT_EFFECT = ("batch_size", "metric_names", "pad_tok_id", "max_seq_len", "padding_size", "destination_path")


class LoadedEval(NamedTuple):
    config: EvalConfig
    tasks: list[TaskConfig]
    notes: list[str]
    """What is said before anything starts: keys without effect, tasks and categories that are left out."""


def load_eval_config(arguments: Sequence[str]) -> LoadedEval:
    """Read the arguments of `scripts/eval.py`: YAML files and `key=value` pairs, and `--all-checkpoints`, which the
    runs may follow that it is meant for. Without a YAML file the tasks are all those in task_folder whose data are
    here. Raises ConfigError in one line."""
    flags = [argument for argument in arguments if argument.startswith("-")]
    for flag in flags:
        if flag != "--all-checkpoints":
            raise ConfigError(
                f"command line: unknown option {flag}; expected YAML files, key=value pairs or --all-checkpoints"
            )
    runs = [a for a in arguments if a not in flags and not is_yaml(a) and not is_key_value(a)]
    if runs and not flags:
        named = f"models.{_name_of_run(runs[0])}={runs[0]}"
        raise ConfigError(
            f"command line: {runs[0]!r} is neither a .yaml file nor key=value; a model is given as {named}"
        )
    layers = read_layers([a for a in arguments if a not in flags and a not in runs], needs_file=False)
    values = merge_layers(layers) if layers else {}
    refuse_left_out_keys(values, layers, EVAL_LEFT_OUT)
    notes = translate_evaluation(values, layers)
    refuse_unknown_keys(EvalConfig, values, "", layers)
    has_file = any(is_yaml(argument) for argument in arguments)
    if flags:
        values |= {"all_checkpoints": True, "models": _add_runs(values.get("models") or {}, runs)}
    if not values.get("models") and flags:
        raise ConfigError("--all-checkpoints: no run given; name one, such as --all-checkpoints runs/mpt-1b")
    if not values.get("models") and has_file:
        raise ConfigError("models: none given; name one on the command line, such as models.ours=runs/mpt-1b")
    if not values.get("models"):
        raise ConfigError("command line: no YAML file given; try icl-zero-shot models.ours=runs/mpt-1b")
    if not has_file:
        layers.insert(0, _tasks_at_hand(values))
        values = {**layers[0].values, **values}
    values.setdefault("suite", Path(layers[0].source).stem)
    config = build_block(EvalConfig, values, "", layers)
    for key, choices in EVAL_CHOICES.items():
        if getattr(config, key) not in choices:
            raise ConfigError(
                f"{source_of(key, layers)}: {key}: {getattr(config, key)!r} is not known; "
                f"expected {' or '.join(choices)}"
            )
    for key in ("device_batch_tokens", "max_seq_len", "limit"):
        value = getattr(config, key)
        if value is not None and value < 1:
            raise ConfigError(f"{source_of(key, layers)}: {key}: {value} given, expected a number above 0")
    if config.margin is not None and (config.against is None or not 0 < config.margin < math.inf):
        expected = "a number above 0" if config.against else "one only beside against=RESULT.json"
        raise ConfigError(f"{source_of('margin', layers)}: margin: {config.margin:g} given, expected {expected}")
    if config.against is not None and config.all_checkpoints:
        raise ConfigError(
            f"{source_of('against', layers)}: against: a learning curve needs whole results; remove it, or "
            "all_checkpoints"
        )
    if not re.fullmatch(r"\w[\w. \-]{0,150}", config.suite):
        raise ConfigError(
            f"{source_of('suite', layers)}: suite: {config.suite!r} given, expected the name of a folder in "
            f"results_folder ({config.results_folder}), without slashes"
        )
    if "://" in config.results_folder:
        raise ConfigError(
            f"{source_of('results_folder', layers)}: results_folder: {config.results_folder!r} given, expected a "
            "folder of this machine"
        )
    for name in config.models:
        if not re.fullmatch(r"\w[\w.\-]{0,150}", name):
            raise ConfigError(f"{source_of('models', layers)}: models: {name!r} given, expected the name of a file")
    if not config.icl_tasks:
        raise ConfigError(
            f"{source_of('icl_tasks', layers)}: icl_tasks: no task given, expected names or files of tasks"
        )
    tasks = load_tasks(config.icl_tasks, config.task_folder, layers)
    missing: list[str] = []
    if config.skip_missing_tasks:
        tasks, missing = _without_missing(tasks)
    if config.eval_gauntlet is not None:
        notes += _check_gauntlet(config.eval_gauntlet, layers)
        notes += _note_incomplete(config.eval_gauntlet, tasks)
    notes += missing
    return LoadedEval(config, tasks, notes)


def _without_missing(tasks: Sequence[TaskConfig]) -> tuple[list[TaskConfig], list[str]]:
    """The tasks whose data are here or come from elsewhere, and a note for each other. Raises ConfigError for none."""
    here = [task for task in tasks if "://" in task.dataset_uri or Path(task.dataset_uri).exists()]
    missing = [task for task in tasks if task not in here]
    if not here:
        raise ConfigError(f"skip_missing_tasks: the data of no task are here; {missing[0].dataset_uri} is the first")
    return here, [f"{task.label} is left out: {task.dataset_uri} is not here" for task in missing]


def _note_incomplete(gauntlet: GauntletConfig, tasks: Sequence[TaskConfig]) -> list[str]:
    """A note for each category that lacks a task, which would be known only when all has been asked."""
    asked = {f"{task.label}/{shots}-shot" for task in tasks for shots in task.num_fewshot}
    lacking = {
        category.name: [b.task for b in category.benchmarks if b.task not in asked] for category in gauntlet.categories
    }
    return [
        f"eval_gauntlet: {name} needs {', '.join(lacks)}, not asked for now; without an earlier result it is left out"
        for name, lacks in lacking.items()
        if lacks
    ]


def _check_gauntlet(gauntlet: GauntletConfig, layers: Sequence[Layer]) -> list[str]:
    """What the types do not say. Raises ConfigError; returns notes."""
    notes = []
    where = f"{source_of('eval_gauntlet', layers)}: eval_gauntlet"
    if gauntlet.weighting not in WEIGHTINGS:
        raise ConfigError(f"{where}.weighting: {gauntlet.weighting!r} given, expected {', '.join(WEIGHTINGS)}")
    if gauntlet.rescale_accuracy and not gauntlet.subtract_random_baseline:
        raise ConfigError(f"{where}.rescale_accuracy: true given, which needs subtract_random_baseline: true")
    names = [category.name for category in gauntlet.categories]
    for category in gauntlet.categories:
        if names.count(category.name) > 1 or not category.benchmarks:
            problem = "is there twice" if category.benchmarks else "has no benchmark"
            raise ConfigError(f"{where}.categories: {category.name} {problem}")
        for benchmark in category.benchmarks:
            if not 0 <= benchmark.random_baseline < 1:
                raise ConfigError(
                    f"{where}: {benchmark.name}: random_baseline: {benchmark.random_baseline:g} given, expected a "
                    "number from 0 to less than 1"
                )
    for average, categories in (gauntlet.averages or {}).items():
        if average in names:
            raise ConfigError(f"{where}.averages: {average} is a category's name; choose another")
        unknown = [category for category in categories if category not in names]
        if unknown and len(unknown) == len(categories):
            raise ConfigError(f"{where}.averages.{average}: no category {unknown[0]!r}; there are: {', '.join(names)}")
        # LLM Foundry passes over them, and has YAMLs with some.
        notes += [f"eval_gauntlet: {average} is without {name!r}, which is no category here" for name in unknown]
    return notes


def _name_of_run(run: str) -> str:
    return run.rstrip("/").removesuffix("/checkpoints").split("/")[-1]


def _add_runs(models: Any, runs: Sequence[str]) -> Any:
    """Each by its folder's name."""
    if not isinstance(models, dict):
        return models  # and is refused as what it is
    for run in runs:
        if (name := _name_of_run(run)) in models:
            raise ConfigError(
                f"models: {models[name]} and {run} are both {name}; name one otherwise: models.NAME={run}"
            )
        models = {**models, name: run}
    return models


def _tasks_at_hand(values: Mapping[str, Any]) -> Layer:
    """Instead of a YAML file."""
    folder = str(values.get("task_folder") or "evals")
    if values.get("icl_tasks"):
        return Layer(folder, {})
    names = [
        path.stem
        for path in sorted(find_task_folder(folder).glob("*.yaml"))
        if all(Path(task.dataset_uri).exists() for task in load_tasks([str(path)], folder))
    ]
    if not names:
        raise ConfigError(
            f"command line: no YAML file given, and of no task in {folder}/ are the data here; `llmfoundry-lite data "
            "fetch-tasks` fetches the public ones, `llmfoundry-lite data make-tasks` makes our own"
        )
    return Layer(folder, {"icl_tasks": names})


def load_tasks(entries: Sequence[Any] | str, task_folder: str, layers: Sequence[Layer] = ()) -> list[TaskConfig]:
    """Tasks written out, or named: `arc_easy` is `<task_folder>/arc_easy.yaml`, and a .yaml file is itself.

    A file holds one task, or a list of them under `icl_tasks`. What says a label but no type, such as
    `{label: arc_easy, num_fewshot: [5], dataset_uri: my.jsonl}`, is laid over the task that the label names. Raises
    ConfigError.
    """
    tasks = _load_entries([entries] if isinstance(entries, str) else entries, task_folder, layers)
    asked: set[str] = set()
    for task in tasks:
        for name in (f"{task.label}/{shots}-shot" for shots in task.num_fewshot):
            if name in asked:
                raise ConfigError(f"icl_tasks: {name} is asked for twice; remove one, or give it another label")
            asked.add(name)
    return tasks


def _load_entries(entries: Sequence[Any], task_folder: str, layers: Sequence[Layer]) -> list[TaskConfig]:
    tasks: list[TaskConfig] = []
    for number, entry in enumerate(entries):
        path = f"icl_tasks[{number}]"
        if isinstance(entry, str):
            layer = _read_task_file(entry, task_folder)
            inside = layer.values.get("icl_tasks")
            values = [merge_layers([layer])] if inside is None else inside
            if not isinstance(values, list):
                raise ConfigError(f"{layer.source}: icl_tasks: {values!r} given, expected a list of tasks")
            tasks += _load_entries(values, task_folder, [layer])
        elif isinstance(entry, dict) and "label" in entry and "icl_task_type" not in entry:
            layer = _read_named_task(entry, path, task_folder, layers)
            if "icl_tasks" in layer.values:
                raise ConfigError(f"{layer.source} holds a list of tasks; {path}: change them there")
            changes = {key: value for key, value in entry.items() if key != "label"}
            tasks.append(_build_task({**merge_layers([layer]), **changes}, path, layers))
        else:
            tasks.append(_build_task(entry, path, layers))
    return tasks


def _read_task_file(name: str, task_folder: str) -> Layer:
    is_file = name.endswith((".yaml", ".yml"))
    return read_layers([name if is_file else f"{find_task_folder(task_folder)}/{name}.yaml"])[0]


def _read_named_task(entry: dict[str, Any], path: str, task_folder: str, layers: Sequence[Layer]) -> Layer:
    """The task that the label of `entry` names. Raises ConfigError with what was probably meant."""
    label = str(entry["label"])
    names = sorted(file.stem for file in find_task_folder(task_folder).glob("*.y*ml"))
    if label.endswith((".yaml", ".yml")) or label in names:
        return _read_task_file(label, task_folder)
    near = difflib.get_close_matches(label, names, n=1, cutoff=0.6)
    if near:
        hint = f"did you mean {near[0]}?"
    else:
        hint = "one of your own says icl_task_type and dataset_uri" + (
            f"; there are: {', '.join(names)}" if names else ""
        )
    raise ConfigError(f"{source_of(path, layers)}: {path}.label: {task_folder} has no task {label!r}; {hint}")


def _build_task(entry: Any, path: str, layers: Sequence[Layer]) -> TaskConfig:
    values = dict(entry) if isinstance(entry, dict) else entry
    if isinstance(values, dict):
        for key in TASK_WITHOUT_EFFECT:
            values.pop(key, None)
        for theirs, ours in TASK_SYNONYMS.items():
            if theirs in values:
                values[ours] = values.pop(theirs)
        if isinstance(values.get("num_fewshot"), int):
            values["num_fewshot"] = [values["num_fewshot"]]
    task = build_block(TaskConfig, values, path, layers)
    where = f"{source_of(path, layers)}: {task.label}"
    for key, choices in TASK_CHOICES.items():
        value = getattr(task, key)
        if value is not None and value not in choices:
            raise ConfigError(f"{where}: {key}: {value!r} is not known; expected {', '.join(choices)}")
    if task.metric is not None and task.metric not in ("acc_per_token", "acc", "acc_norm"):
        raise ConfigError(f"{where}: metric: {task.metric!r} is not known; expected acc_per_token, acc, acc_norm")
    if task.metric not in (None, "acc") and task.icl_task_type not in ("multiple_choice", "schema"):
        raise ConfigError(f"{where}: metric: {task.metric} needs choices, and a {task.icl_task_type} task has none")
    if not task.num_fewshot or min(task.num_fewshot) < 0:
        raise ConfigError(f"{where}: num_fewshot: {task.num_fewshot} given, expected one number or more, 0 or above")
    if task.icl_task_type == "perplexity" and task.num_fewshot != [0]:
        raise ConfigError(f"{where}: num_fewshot: {task.num_fewshot} given, and a text has no examples; remove it")
    if task.icl_task_type == "perplexity" and task.cluster is not None:
        raise ConfigError(f"{where}: cluster: {task.cluster!r} given, but documents are a text's clusters; remove it")
    if task.icl_task_type == "perplexity" and task.has_categories:
        raise ConfigError(f"{where}: has_categories: a text has none; remove it")
    if task.max_new_tokens is not None and task.max_new_tokens < 1:
        raise ConfigError(f"{where}: max_new_tokens: {task.max_new_tokens} given, expected a number above 0")
    if "" in task.early_stopping_criteria:
        raise ConfigError(f"{where}: early_stopping_criteria: an empty text given, at which every answer would end")
    return task
