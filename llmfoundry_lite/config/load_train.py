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
from llmfoundry_lite.config.layers import Layer, get, merge_layers, naming_source, read_layers, source_of
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.errors import ConfigError, either

PLACES = (
    *("run_folder", "save_folder", "load_path", "loggers.tensorboard.log_dir"),
    *("callbacks.hf_checkpointer.save_folder", "callbacks.profiler.folder"),
)
"""Keys of folders in which `{run_name}` stands for the run's name."""
DRY_RUNS = {"--dry-run": "plan", "--dry-run=full": "full", "--dry-run=here": "here"}


class LoadedTrain(NamedTuple):
    """What the arguments of a training launch stand for."""

    config: TrainConfig
    dry_run: str
    """Empty for a launch. `plan` and `full` check the configuration alone, `here` also this machine."""
    notes: list[str]
    """Lines to print: the overlay that `hardware=auto` has chosen; keys that have no effect (in a dry run, a line and a
    reason for each); and keys that may not do what they seem to."""


def load_train_config(
    arguments: Sequence[str], environ: Mapping[str, str] = os.environ, given: Mapping[str, Any] | None = None
) -> LoadedTrain:
    """Read the arguments of `scripts/train.py`: YAML files, `key=value` pairs and `DRY_RUNS`. They override `given`, a
    program's configuration.

    Raises ConfigError, in one line: the file, the key, what was given, what was expected, the nearest valid key.
    """
    flags = [argument for argument in arguments if argument.startswith("-")]
    for flag in flags:
        if flag not in DRY_RUNS:
            raise ConfigError(
                f"command line: unknown option {flag}; expected YAML files, key=value pairs, {either([*DRY_RUNS])}"
            )
    layers = read_layers([argument for argument in arguments if argument not in flags], given=given)
    values = merge_layers(layers, TrainConfig)
    notes = [layer.note for layer in layers if layer.note]
    dry_run = DRY_RUNS[flags[-1]] if flags else ""

    # Words of LLM Foundry that are none of ours: refused, translated, or dropped with a note.
    with naming_source(layers):
        foundry.refuse_fine_tuning(values)
        refuse_other_kinds(values)
    without_effect = foundry.drop_keys(values, layers) + foundry.drop_values_without_effect(values, layers)
    is_short = not dry_run and len(without_effect) > 1
    notes += [foundry.in_one_line(without_effect)] if is_short else without_effect
    foundry.refuse_left_out_keys(values, layers)
    foundry.drop_variables(values, layers, TrainConfig)

    if values.get("run_name") is None and "RUN_NAME" in environ:
        name = environ["RUN_NAME"]
        notes.append(f"run_name: {name}, by the environment variable RUN_NAME; run_name=NAME names another")
    _fill_in_names(values, layers, environ)
    _gather_extras(values)
    config = build_block(TrainConfig, values, "", layers)
    with naming_source(layers):
        for path in config.callbacks.extra:
            check_import_path("callbacks", path)
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
    """Return the run folder that these arguments lead to, even if they are refused; None if it cannot be told."""
    try:
        layers = read_layers([a for a in arguments if not a.startswith("-")], check_overlays=False, given=given)
        values = merge_layers(layers, TrainConfig)
        _fill_in_names(values, layers, environ)
    except ConfigError:
        return None
    return None if missing_blocks(values) else Path(values["run_folder"])  # a block may name a folder within it


def _fill_in_names(values: dict[str, Any], layers: Sequence[Layer], environ: Mapping[str, str]) -> None:
    """Name the run and its folders, in place. Every rank must come to the same names, so nothing here is random.

    Name and run folder are recorded resolved, even if they contain variables, because the record lies there.
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
    values["run_name"] = str(name)

    if not values.get("run_folder"):
        values["run_folder"] = _default_run_folder(values)
    values["run_folder"] = str(values["run_folder"])
    for place in PLACES:
        block, _, key = place.rpartition(".")
        inside = get(values, block)[1] if block else values
        if isinstance(inside, dict) and isinstance(inside.get(key), str):
            inside[key] = inside[key].replace(RUN_NAME, str(name))


def _default_run_folder(values: Mapping[str, Any]) -> str:
    """Return the run's folder, in which a launch that trains the run with others has a folder of its own."""
    parts = [f"runs/{RUN_NAME}"]
    for key, block in given_blocks(values).items():
        own_folder = values[key].get(block.folder_key) if isinstance(values[key], dict) else None
        if own_folder:
            parts.append(str(own_folder))
    return "/".join(parts)


def _gather_extras(values: dict[str, Any]) -> None:
    """Move the arguments of a user's own `python:` object into a block whose keys are not checked, in place."""
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
        names = [key for key in callbacks if str(key).startswith("python:")]
        if names:
            own_callbacks = {name: callbacks.pop(name) or {} for name in names}
            callbacks["extra"] = {**callbacks.get("extra", {}), **own_callbacks}


def _move_arguments(block: Any, known_keys: Collection[str]) -> None:
    """Move all but the known keys of a user's own object into its `kwargs`, in place. Other blocks stay as they are."""
    if not isinstance(block, dict) or not str(block.get("name", "")).startswith("python:"):
        return
    arguments = {key: block.pop(key) for key in list(block) if key not in known_keys}
    block["kwargs"] = {**block.get("kwargs", {}), **arguments}
