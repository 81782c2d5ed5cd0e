"""Load the configuration of an evaluation: YAML files and `key=value` arguments become a frozen `EvalConfig`.

`load_eval_config` is the top function. It reads and merges the files (`layers.py`), translates LLM Foundry's keys,
completes the values, builds the `EvalConfig`, and then loads its tasks (`load_tasks.py`). Nothing here imports torch.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from llmfoundry_lite import companions
from llmfoundry_lite.config import foundry
from llmfoundry_lite.config.build import build_block, refuse_unknown_keys
from llmfoundry_lite.config.eval_schema import LETTERS, EvalConfig, GauntletConfig, TaskConfig
from llmfoundry_lite.config.layers import (
    COMMAND_LINE,
    GIVEN,
    ConfigLayer,
    find_value,
    is_key_value,
    is_yaml,
    naming_source,
    read_file,
    read_layers,
    source_of,
)
from llmfoundry_lite.config.load_tasks import list_available_tasks, load_tasks, result_names, without_missing_data
from llmfoundry_lite.config.merge import merge_layers
from llmfoundry_lite.config.scalars import EVAL_SYNONYMS
from llmfoundry_lite.config.shipped import find_yaml
from llmfoundry_lite.config.task_types import MULTIPLE_CHOICE
from llmfoundry_lite.config.uses import find_unused_keys
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.files import exists

SHOW = "--show"
"""Option that prints prompts in place of an evaluation."""
PRECISIONS = {"amp_bf16": "bf16", "amp_fp16": "fp16"}
"""LLM Foundry's name of a precision -> ours, in an evaluation."""


class LoadedEval(NamedTuple):
    """Meaning of the command-line arguments of an evaluation."""

    config: EvalConfig
    tasks: list[TaskConfig]
    """Tasks to evaluate, whose data can be found."""
    notes: list[str]
    """Lines to print before anything starts: keys without effect, tasks and categories that are left out."""
    num_shown: int | None = None
    """Number of prompts of each task to print with `--show`, in place of an evaluation; None evaluates."""


def load_eval_config(arguments: Sequence[str], given: Mapping[str, Any] | None = None) -> LoadedEval:
    """Turn the arguments of an evaluation into a checked configuration and its tasks.

        load_eval_config(["icl-zero-shot", "models.ours=runs/mpt-1b", "limit=100"])
        load_eval_config(["--all-checkpoints", "runs/mpt-1b"])
        load_eval_config(["icl-zero-shot", "models.ours=runs/mpt-1b", "--show", "3"])

    `arguments` are YAML files, `key=value` pairs, `--all-checkpoints` with the runs whose checkpoints are evaluated,
    and `--show` with the number of prompts to print. They override `given`, the configuration of a program that calls
    the library. Without a YAML file, the tasks are those in the task folder whose data is on this machine.

    Raises ConfigError, in one line.
    """
    # Read the arguments, and merge the files and `key=value` pairs.
    arguments, num_shown = _take_show(arguments)
    files_and_settings, runs = _split_arguments(arguments)
    layers = read_layers(files_and_settings, for_training=False, given=given)
    _refuse_trust_of_files(layers)
    values = merge_layers(layers, EvalConfig) if layers else {}

    # Translate LLM Foundry's keys, and refuse those that are unknown.
    foundry.refuse_left_out_keys(values, layers, foundry.EVAL_LEFT_OUT)
    notes = _translate(values, layers)
    foundry.drop_variables(values, layers, EvalConfig)
    refuse_unknown_keys(EvalConfig, values, "", layers)

    # Complete the values, and build the dataclasses.
    if runs is not None:
        values |= {"all_checkpoints": True, "models": _add_runs(values.get("models") or {}, runs)}
    has_yaml = any(is_yaml(argument) for argument in arguments)
    names_tasks = has_yaml or given is not None or bool(values.get("icl_tasks"))
    _check_that_models_are_given(values, with_option=runs is not None, names_tasks=names_tasks)
    lacks_tasks = given is not None and not values.get("icl_tasks")
    if lacks_tasks or (given is None and not has_yaml):
        available_tasks = list_available_tasks(values)
        layers.insert(0, available_tasks)  # first, so that all other layers override it
        values = {**available_tasks.values, **values}
    default_suite = "tasks" if given is not None else Path(layers[0].source).stem
    values.setdefault("suite", default_suite)
    config = build_block(EvalConfig, values, "", layers)
    with naming_source(layers):
        _check(config)
    notes += [f"{unused.key} has no effect: {unused.reason}" for unused in find_unused_keys(config, config)]

    # Load the tasks, and find their data, whose paths may begin at data_root.
    tasks = []
    for task in load_tasks(config.icl_tasks, config.task_folder, layers, notes, config.form):
        dataset_uri = _find_file(task.dataset_uri, config.data_root)
        tasks.append(replace(task, dataset_uri=dataset_uri))
    if config.form == LETTERS and not any(task.form == LETTERS for task in tasks):
        notes.append(f"form: letters has no effect: no {MULTIPLE_CHOICE} task is without a form of its own")
    notes_on_missing: list[str] = []
    if config.skip_missing_tasks:
        tasks, notes_on_missing = without_missing_data(tasks)
    for task in tasks:
        if task.dataset_uri.startswith("hf://"):
            companions.require("llmfoundry_formats", f"{task.label}: {task.dataset_uri}")

    # A gauntlet averages the results of tasks by category.
    if config.eval_gauntlet is not None:
        notes += _check_gauntlet(config.eval_gauntlet, layers)
        notes += _note_incomplete(config.eval_gauntlet, tasks)
    return LoadedEval(config, tasks, notes + notes_on_missing, num_shown)


def _take_show(arguments: Sequence[str]) -> tuple[list[str], int | None]:
    """Take the option `--show N` or `--show=N` out of the arguments. Returns the other arguments and N, or None.

    Raises ConfigError unless N is a whole number above 0.
    """
    others: list[str] = []
    given: str | None = None
    remaining = iter(arguments)
    for argument in remaining:
        if argument == SHOW:
            given = next(remaining, "")
        elif argument.startswith(f"{SHOW}="):
            given = argument.partition("=")[2]
        else:
            others.append(argument)

    if given is None:
        return others, None
    if not given.isdecimal() or int(given) == 0:
        raise ConfigError(f"{SHOW}: {given!r} given, expected a number of prompts of each task, such as {SHOW} 3")
    return others, int(given)


def _split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Split the arguments of an evaluation into YAML files and `key=value` pairs, and the runs of `--all-checkpoints`.

    The second is None without that option, and empty if no run follows it. `["a.yaml", "--all-checkpoints", "runs/x"]`
    gives `(["a.yaml"], ["runs/x"])`. Raises ConfigError for unknown options, and for runs without the option.
    """
    options = [argument for argument in arguments if argument.startswith("-")]
    for option in options:
        if option == "--dry-run":
            raise ConfigError(
                f"command line: {option} is an option of train; to see what an evaluation asks, use {SHOW} 3, which "
                "prints the first prompts of each task and evaluates nothing"
            )
        if option != "--all-checkpoints":
            raise ConfigError(
                f"command line: unknown option {option}; expected YAML files, key=value pairs, --all-checkpoints or "
                f"{SHOW}"
            )

    files_and_settings = []
    runs = []
    for argument in arguments:
        if argument in options:
            continue
        if is_yaml(argument) or is_key_value(argument):
            files_and_settings.append(argument)
        else:
            runs.append(argument)
    if runs and not options:
        suggestion = f"models.{_name_of_run(runs[0])}={runs[0]}"
        raise ConfigError(
            f"command line: {runs[0]!r} is neither a .yaml file nor key=value; a model is given as {suggestion}"
        )
    return files_and_settings, runs if options else None


def _check_that_models_are_given(values: Mapping[str, Any], *, with_option: bool, names_tasks: bool) -> None:
    """Raise ConfigError, with an example, if the merged `values` name no model to evaluate.

    The example depends on how the evaluation was called: with the option `--all-checkpoints` (`with_option`), with
    tasks, by a YAML file, a program's configuration or `icl_tasks` (`names_tasks`), or with neither.
    """
    if values.get("models"):
        return
    if with_option:
        raise ConfigError("--all-checkpoints: no run given; name one, such as --all-checkpoints runs/mpt-1b")
    if names_tasks:
        raise ConfigError("models: none given; name one on the command line, such as models.ours=runs/mpt-1b")
    raise ConfigError("command line: no YAML file given; try icl-zero-shot models.ours=runs/mpt-1b")


def _refuse_trust_of_files(layers: Sequence[ConfigLayer]) -> None:
    """Raise ConfigError if a YAML file has `trust_code`, by which its author would decide whose code this user runs."""
    for layer in layers:
        is_given, value = find_value(layer.values, "trust_code")
        if is_given and value is not False and layer.source not in (COMMAND_LINE, GIVEN):
            raise ConfigError(
                f"{layer.source}: trust_code: {value} given, which a file cannot decide for its user; remove it, and "
                "give trust_code=true on the command line if you trust the authors of the models"
            )


def _check(config: EvalConfig) -> None:
    """Raise ConfigError if the suite or a model has a name that cannot be a file's, or if there is no task.

    The name of the suite becomes a folder of results, and the name of a model becomes a file in it.
    """
    if not re.fullmatch(r"\w[\w. \-]{0,150}", config.suite):
        folder = f"a folder in results_folder ({config.results_folder}), without slashes"
        raise ConfigError(f"suite: {config.suite!r} given, expected the name of {folder}")
    for name in config.models:
        if not re.fullmatch(r"\w[\w.\-]{0,150}", name):
            raise ConfigError(f"models: {name!r} given, expected the name of a file")
    if not config.icl_tasks:
        raise ConfigError("icl_tasks: no task given, expected names or files of tasks")
    if config.follow:
        _check_follow(config)


def _check_follow(config: EvalConfig) -> None:
    """Raise ConfigError unless the runs of a configuration with `follow` can be followed."""
    companions.require("llmfoundry_studies", "follow=true")
    interval = config.follow_interval
    patience = config.follow_patience
    # Between two looks the ranks wait for each other no longer than this.
    if interval.seconds >= config.dist_timeout:
        raise ConfigError(
            f"follow_interval: {interval.written} given, expected less than dist_timeout, {config.dist_timeout:g} s"
        )
    if interval.seconds <= 0:
        raise ConfigError(f"follow_interval: {interval.written} given, expected more than 0")
    if patience.seconds < interval.seconds:
        raise ConfigError(
            f"follow_patience: {patience.written} given, expected at least follow_interval, {interval.written}"
        )
    for name, source in config.models.items():
        if source.startswith("hf:"):
            raise ConfigError(
                f"models.{name}: {source} is not a run, and follow=true evaluates the checkpoints of runs; evaluate "
                "it by a command of its own, in the same suite"
            )


def _name_of_run(run: str) -> str:
    """Return the name of a run's folder: `mpt-1b` for `runs/mpt-1b`, `runs/mpt-1b/` and `runs/mpt-1b/checkpoints`."""
    return run.rstrip("/").removesuffix("/checkpoints").split("/")[-1]


def _add_runs(models: Any, runs: Sequence[str]) -> Any:
    """Return `models` (name -> path or URL) with an entry for each run, by the name of the run's folder.

    With the run `runs/mpt-1b`, `{}` becomes `{"mpt-1b": "runs/mpt-1b"}`. Models that are not a dictionary are
    returned unchanged, because the schema will refuse them. Raises ConfigError if two have the same name.
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

    Afterwards `values` has our keys and names, `models` is a dictionary, and `eval_gauntlet` is a block instead of the
    path of its file. Keys that are ours already are not changed. Values of a wrong type are left for the schema to
    refuse. `layers` are the files that the values come from, for errors.

    Raises ConfigError for a model that cannot be evaluated here, and for a file that does not exist.
    """
    # Keys and names that only differ in spelling.
    notes = foundry.drop_keys(values, layers, foundry.EVAL_WITHOUT_EFFECT)
    for their_key, our_key in EVAL_SYNONYMS.items():
        if their_key in values and values.get(our_key) is None:
            values[our_key] = values.pop(their_key)
    precision = values.get("precision")
    if isinstance(precision, str):  # the schema refuses a list or a block
        values["precision"] = PRECISIONS.get(precision, precision)

    # Tasks and the gauntlet may be YAML files. A gauntlet's block is read here, tasks are read by `load_tasks`.
    for key in ("icl_tasks", "eval_gauntlet"):
        path = values.get(key)
        if isinstance(path, str):
            values[key] = _find_yaml_of(key, path, values, layers)
    if isinstance(values.get("eval_gauntlet"), str):
        values["eval_gauntlet"] = _read_gauntlet(values["eval_gauntlet"])

    # Older YAMLs have a single model in the keys of a training run, newer ones have a list of models.
    if isinstance(values.get("model"), dict) and not values.get("models"):
        keys = ["model", "load_path"]
        if isinstance(values.get("tokenizer"), dict):
            keys.append("tokenizer")
        values["models"] = [{key: values.pop(key) for key in keys if key in values}]
    if isinstance(values.get("models"), list):
        values["models"] = _name_models(values["models"], source_of("models", layers), notes)
    return notes


def _find_yaml_of(key: str, path: str, values: Mapping[str, Any], layers: Sequence[ConfigLayer]) -> str:
    """Return the path of the YAML file that `key` names, which may begin at data_root, such as LLM Foundry's `scripts`.

    A file that is found already, and a name without the suffix .yaml, are returned unchanged. Raises ConfigError if
    there is no such file.
    """
    has_suffix = path.endswith((".yaml", ".yml"))
    if not has_suffix or find_yaml(path) is not None:
        return path
    data_root = str(values.get("data_root") or ".")
    path_below_root = _find_file(path, data_root)
    if not exists(path_below_root):
        raise ConfigError(
            f"{source_of(key, layers)}: {key}: {path_below_root} does not exist; data_root=FOLDER says where its path "
            "begins"
        )
    return path_below_root


def _read_gauntlet(path: str) -> Any:
    """Return the block of a gauntlet from its file, which holds the block itself or has it under `eval_gauntlet`."""
    layer = read_file(path)
    if "eval_gauntlet" in layer.values:
        return merge_layers([layer], EvalConfig)["eval_gauntlet"]
    return merge_layers([layer], GauntletConfig)


def _find_file(path: str, data_root: str) -> str:
    """Return `path` if it exists or is a URL, and otherwise the path below `data_root`, which need not exist."""
    if "://" in path or exists(path):
        return path
    return str(Path(data_root) / path)


def _name_models(models: Sequence[Any], source: str, notes: list[str]) -> dict[str, str]:
    """Turn LLM Foundry's list of models into ours, name -> where the model is.

    `[{model_name: opt, model: {name: hf_causal_lm, pretrained_model_name_or_path: facebook/opt-125m}}]` becomes
    `{"opt": "hf:facebook/opt-125m"}`. `source` is the list's file, for messages. A note is added to `notes` for each
    tokenizer that is not the model's own, because it has no effect.

    Raises ConfigError for models that cannot be evaluated, and for two models of the same name.
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
        # A result's file has the model's name, so the name has to fit one: facebook/opt-125m becomes opt-125m.
        given_name = str(entry.get("model_name") or location)
        last_part = given_name.rstrip("/").rsplit("/", 1)[-1]
        name = re.sub(r"[^\w.\-]", "_", last_part)
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
    # `a/b` may be a name on the Hub or a folder of this machine. If there is such a folder, it takes precedence.
    is_path_or_url = re.match(r"[./~]|\w+:", str(pretrained)) or os.path.isdir(str(pretrained))
    return str(pretrained) if is_path_or_url else f"hf:{pretrained}"


# ----------------------------------------------------------------------------------------------- gauntlet


def _check_gauntlet(gauntlet: GauntletConfig, layers: Sequence[ConfigLayer]) -> list[str]:
    """Check that the categories and averages of a gauntlet fit together. Raises ConfigError.

    A gauntlet has categories of tasks (benchmarks), and averages over categories. Returns a note for each average that
    names a category which does not exist beside others that do.
    """
    notes = []
    key = f"{source_of('eval_gauntlet', layers)}: eval_gauntlet"
    if gauntlet.rescale_accuracy and not gauntlet.subtract_random_baseline:
        raise ConfigError(f"{key}.rescale_accuracy: true given, which needs subtract_random_baseline: true")

    category_names = [category.name for category in gauntlet.categories]
    for category in gauntlet.categories:
        if not category.benchmarks:
            raise ConfigError(f"{key}.categories: {category.name} has no benchmark")
        if category_names.count(category.name) > 1:
            raise ConfigError(f"{key}.categories: {category.name} is there twice")

    averages = gauntlet.averages or {}
    for average_name, categories in averages.items():
        # Results have averages and categories in one table, so their names must differ.
        if average_name in category_names:
            raise ConfigError(f"{key}.averages: {average_name} is a category's name; choose another")
        unknown_names = [name for name in categories if name not in category_names]
        if unknown_names and len(unknown_names) == len(categories):
            raise ConfigError(
                f"{key}.averages.{average_name}: no category {unknown_names[0]!r}; there are: "
                f"{', '.join(category_names)}"
            )
        # LLM Foundry ignores unknown categories, and some of its YAMLs have them.
        for name in unknown_names:
            notes.append(f"eval_gauntlet: {average_name} is without {name!r}, which is no category here")
    return notes


def load_gauntlet(name: str) -> tuple[GauntletConfig, list[str]]:
    """Load a gauntlet from its YAML file, or from the YAML of an evaluation that has or names one.

    Returns the gauntlet, and a note for each average that names an unknown category. Raises ConfigError, which names
    the file.
    """
    values = read_file(name).values
    if "eval_gauntlet" not in values and "categories" not in values:
        raise ConfigError(f"{name}: no gauntlet; expected a YAML with `categories`, or one with `eval_gauntlet`")
    named_file = values.get("eval_gauntlet")
    path = named_file if isinstance(named_file, str) else name
    layers = [ConfigLayer(path, {"eval_gauntlet": _read_gauntlet(path)})]
    gauntlet = build_block(GauntletConfig, layers[0].values["eval_gauntlet"], "eval_gauntlet", layers)
    return gauntlet, _check_gauntlet(gauntlet, layers)


def _note_incomplete(gauntlet: GauntletConfig, tasks: Sequence[TaskConfig]) -> list[str]:
    """Return a note for each category of a gauntlet that needs a task which is not evaluated.

    The user can then stop before hours are spent on the other tasks. A benchmark is named by a task and its number of
    examples: `arc_easy/5-shot`.
    """
    evaluated_tasks = {name for task in tasks for name in result_names(task)}
    notes = []
    for category in gauntlet.categories:
        missing = [benchmark.task for benchmark in category.benchmarks if benchmark.task not in evaluated_tasks]
        if missing:
            notes.append(
                f"eval_gauntlet: {category.name} needs {', '.join(missing)}, not asked for now; without an earlier "
                "result it is left out"
            )
    return notes
