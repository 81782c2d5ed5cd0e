"""YAML files and `key=value` arguments -> a checked, frozen `TrainConfig`.

`layers` reads what was given, `foundry` LLM Foundry's other words, `build` makes the dataclasses, `check` compares
them. `preflight` checks data, tokenizer and machine. No torch here: a wrong key is answered in under a second.
"""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llmfoundry_lite.config import foundry
from llmfoundry_lite.config.blocks import given_blocks, missing_blocks
from llmfoundry_lite.config.build import build_block, check_import_path, refuse_other_kinds
from llmfoundry_lite.config.check import check_together, find_surprises
from llmfoundry_lite.config.data_schema import LoaderConfig
from llmfoundry_lite.config.fields import RUN_NAME, keys_of
from llmfoundry_lite.config.layers import ConfigLayer, find_value, merge_layers, naming_source, read_layers, source_of
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.errors import ConfigError, join_with_or

FOLDERS_WITH_RUN_NAME = (
    *("run_folder", "save_folder", "load_path", "loggers.tensorboard.log_dir"),
    *("callbacks.hf_checkpointer.save_folder", "callbacks.profiler.folder"),
)
"""Keys of folders in which `{run_name}` stands for the run's name."""
DRY_RUNS = {"--dry-run": "plan", "--dry-run=full": "full", "--dry-run=here": "here"}


class LoadedTrain(NamedTuple):
    """Meaning of the command-line arguments of a training launch."""

    config: TrainConfig
    dry_run: str
    """Empty for a launch. `plan` and `full` check the configuration alone, `here` also this machine."""
    notes: list[str]
    """Lines to print: the overlay that `hardware=auto` has chosen; keys that have no effect (in a dry run, a line and a
    reason for each); and keys that may not do what they seem to."""


def load_train_config(
    arguments: Sequence[str], environ: Mapping[str, str] = os.environ, given: Mapping[str, Any] | None = None
) -> LoadedTrain:
    """Turn the arguments of a training launch into a checked configuration.

    `arguments` are YAML files, `key=value` pairs and the options of DRY_RUNS. Later files override earlier ones,
    `key=value` pairs override all files, and all of them override `given`, the configuration of a program.

    Raises ConfigError, in one line: the file, the key, what was given, what was expected, the nearest valid key.
    """
    options = [argument for argument in arguments if argument.startswith("-")]
    for option in options:
        if option not in DRY_RUNS:
            raise ConfigError(
                f"command line: unknown option {option}; expected YAML files, key=value pairs, "
                f"{join_with_or([*DRY_RUNS])}"
            )
    dry_run = DRY_RUNS[options[-1]] if options else ""
    layers = read_layers([argument for argument in arguments if argument not in options], given=given)
    values = merge_layers(layers, TrainConfig)
    notes = [layer.note for layer in layers if layer.note]

    # Keys of LLM Foundry that this package does not have are refused, translated, or dropped with a note.
    with naming_source(layers):
        foundry.refuse_fine_tuning(values)
        refuse_other_kinds(values)
    without_effect = foundry.drop_keys(values, layers) + foundry.drop_values_without_effect(values, layers)
    is_launch = not dry_run
    if is_launch and len(without_effect) > 1:
        notes.append(foundry.in_one_line(without_effect))
    else:
        notes += without_effect
    foundry.refuse_left_out_keys(values, layers)
    foundry.drop_variables(values, layers, TrainConfig)

    if values.get("run_name") is None and "RUN_NAME" in environ:
        name = environ["RUN_NAME"]
        notes.append(f"run_name: {name}, by the environment variable RUN_NAME; run_name=NAME names another")
    _set_names(values, layers, environ)
    _collect_own_arguments(values)
    config = build_block(TrainConfig, values, "", layers)
    with naming_source(layers):
        for import_path in config.callbacks.extra:
            check_import_path("callbacks", import_path)
    check_together(config, layers)
    notes += find_surprises(config, layers, under_srun=_is_under_srun(environ))
    return LoadedTrain(config, dry_run=dry_run, notes=notes)


def _is_under_srun(environ: Mapping[str, str]) -> bool:
    """Return whether srun has started all ranks itself, so that no launcher on each node kills them by its own clock.

    `adopt_srun` sets WORLD_SIZE where there are several tasks. With one task, only another launcher sets it.
    """
    num_tasks = environ.get("SLURM_STEP_NUM_TASKS")
    if num_tasks is None:
        return False
    world_size_by_srun = None if num_tasks == "1" else num_tasks
    return environ.get("WORLD_SIZE") == world_size_by_srun


def find_run_folder(
    arguments: Sequence[str], environ: Mapping[str, str] = os.environ, given: Mapping[str, Any] | None = None
) -> Path | None:
    """Return the run folder that the arguments of a launch lead to, even if the launch is refused for another reason.

    The reason can then be recorded there. Returns None if the arguments cannot be read as far as the name of the run,
    or if a companion that is not installed would choose a folder within the run's.
    """
    try:
        files_and_settings = [argument for argument in arguments if not argument.startswith("-")]
        layers = read_layers(files_and_settings, check_overlays=False, given=given)
        values = merge_layers(layers, TrainConfig)
        _set_names(values, layers, environ)
    except ConfigError:
        return None
    if missing_blocks(values):
        return None
    return Path(values["run_folder"])


def _set_names(values: dict[str, Any], layers: Sequence[ConfigLayer], environ: Mapping[str, str]) -> None:
    """Set `run_name` and `run_folder` in the values of a configuration, and the run's name in other folders, in place.

    The name is that of the configuration, of the environment variable RUN_NAME, or of the first YAML file. Every rank
    must come to the same name, so nothing here is random. Raises ConfigError for a name that cannot be a folder's.
    """
    name = values.get("run_name")
    source = f"{source_of('run_name', layers)}: run_name"
    if name is None:
        name = environ.get("RUN_NAME")
        source = "the environment: RUN_NAME"
    if name is None:
        name = Path(layers[0].source).stem
        source = f"{layers[0].source}: run_name"
    if not re.fullmatch(r"\w[\w.\-]*", str(name)):
        raise ConfigError(
            f"{source}: {name!r} given, expected the name of a folder: letters and digits, and . _ - after the first"
        )
    # As plain text, even if they come from an environment variable, because the record of the run is in this folder.
    values["run_name"] = str(name)
    values["run_folder"] = str(values.get("run_folder") or _default_run_folder(values))

    for folder_key in FOLDERS_WITH_RUN_NAME:
        block_key, _, key = folder_key.rpartition(".")
        block = values
        if block_key:
            _, block = find_value(values, block_key)
        if isinstance(block, dict) and isinstance(block.get(key), str):
            block[key] = block[key].replace(RUN_NAME, str(name))


def _default_run_folder(values: Mapping[str, Any]) -> str:
    """Return the default of run_folder: `runs/{run_name}`, in which `{run_name}` will be replaced.

    Where several launches train one run together, each has its own folder in it, which the companion's block names.
    """
    parts = [f"runs/{RUN_NAME}"]
    for key, block in given_blocks(values).items():
        own_folder = values[key].get(block.folder_key) if isinstance(values[key], dict) else None
        if own_folder:
            parts.append(str(own_folder))
    return "/".join(parts)


def _collect_own_arguments(values: dict[str, Any]) -> None:
    """Move the arguments of a user's own `python:` objects into `kwargs` or `extra`, whose keys are not checked.

    Changes the values of a configuration in place. Objects are optimizers, loaders and callbacks.
    """
    # A user's optimizer may have betas, or a momentum, of its own. A loader's keys may come from a hardware overlay.
    _move_arguments(values.get("optimizer"), {"name", "lr", "kwargs"})
    loaders = [values.get("train_loader"), values.get("eval_loader")]
    named_loaders = values.get("eval_loaders")
    if isinstance(named_loaders, dict):
        loaders += named_loaders.values()
    for loader in loaders:
        _move_arguments(loader, keys_of(LoaderConfig))

    callbacks = values.get("callbacks")
    if isinstance(callbacks, dict):
        import_paths = [key for key in callbacks if str(key).startswith("python:")]
        if import_paths:
            own_callbacks = {path: callbacks.pop(path) or {} for path in import_paths}
            callbacks["extra"] = {**callbacks.get("extra", {}), **own_callbacks}


def _move_arguments(block: Any, known_keys: Collection[str]) -> None:
    """Move all but the known keys of a block into its `kwargs`, in place, if its name is a user's own `python:` object.

    Other blocks, and values that are no blocks, stay as they are.
    """
    is_own_object = isinstance(block, dict) and str(block.get("name", "")).startswith("python:")
    if not is_own_object:
        return
    arguments = {key: block.pop(key) for key in list(block) if key not in known_keys}
    block["kwargs"] = {**block.get("kwargs", {}), **arguments}
