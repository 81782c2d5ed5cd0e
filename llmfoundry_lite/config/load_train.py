"""YAML files and `key=value` arguments -> a checked, frozen `TrainConfig`.

`layers` reads what was given, `foundry` LLM Foundry's other words, `build` makes the dataclasses, `check` compares
them. `preflight` checks data, tokenizer and machine. No torch here: a wrong key is answered in under a second.
"""

import os
import re
from collections.abc import Mapping, Sequence
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
    with naming_source(layers):
        foundry.refuse_fine_tuning(values)
        refuse_other_kinds(values)
    notes = [layer.note for layer in layers if layer.note]
    dry_run = DRY_RUNS[flags[-1]] if flags else ""
    without_effect = foundry.drop_keys(values, layers) + foundry.drop_values_without_effect(values, layers)
    notes += without_effect if dry_run or len(without_effect) < 2 else [foundry.in_one_line(without_effect)]
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
    # srun has started all ranks itself: a launcher on each node would kill them by a clock of its own.
    # `adopt_srun` sets WORLD_SIZE where there are several tasks. With one task, only another launcher sets it.
    tasks = environ.get("SLURM_STEP_NUM_TASKS")
    under_srun = tasks is not None and environ.get("WORLD_SIZE") == (None if tasks == "1" else tasks)
    notes += find_surprises(config, layers, under_srun=under_srun)
    return LoadedTrain(config, dry_run=dry_run, notes=notes)


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
    name, source = values.get("run_name"), f"{source_of('run_name', layers)}: run_name"
    if name is None:
        name, source = environ.get("RUN_NAME"), "the environment: RUN_NAME"
    if name is None:
        name, source = Path(layers[0].source).stem, f"{layers[0].source}: run_name"
    if not re.fullmatch(r"\w[\w.\-]*", str(name)):
        raise ConfigError(
            f"{source}: {name!r} given, expected the name of a folder: letters and digits, and . _ - after the first"
        )
    values["run_name"] = str(name)
    given = [(key, block) for key, block in given_blocks(values).items() if isinstance(values[key], dict)]
    own = [values[key].get(block.folder_key) for key, block in given]
    folder = "/".join(["runs/{run_name}", *map(str, filter(None, own))])
    values["run_folder"] = str(values.get("run_folder") or folder)
    for place in PLACES:
        block, _, key = place.rpartition(".")
        inside = get(values, block)[1] if block else values
        if isinstance(inside, dict) and isinstance(inside.get(key), str):
            inside[key] = inside[key].replace(RUN_NAME, str(name))


def _gather_extras(values: dict[str, Any]) -> None:
    """Move the arguments of a user's own `python:` object into a block whose keys are not checked, in place."""
    several = values.get("eval_loaders")
    loaders = [values.get("train_loader"), values.get("eval_loader")]
    loaders += several.values() if isinstance(several, dict) else ()
    # A user's optimizer may have betas, or a momentum, of its own. A loader's keys may come from a hardware overlay.
    own = [(values.get("optimizer"), {"name", "lr", "kwargs"}), *((one, keys_of(LoaderConfig)) for one in loaders)]
    for block, known in own:
        if isinstance(block, dict) and str(block.get("name", "")).startswith("python:"):
            extra = {key: block.pop(key) for key in list(block) if key not in known}
            block["kwargs"] = {**block.get("kwargs", {}), **extra}
    callbacks = values.get("callbacks")
    if isinstance(callbacks, dict):
        extra = {key: callbacks.pop(key) or {} for key in list(callbacks) if str(key).startswith("python:")}
        if extra:
            callbacks["extra"] = {**callbacks.get("extra", {}), **extra}
