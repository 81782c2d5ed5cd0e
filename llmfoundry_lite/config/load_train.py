"""Load the configuration of a training launch: YAML files and `key=value` arguments become a frozen `TrainConfig`.

`load_train_config` is the top function. It calls `layers.py` to read and merge the files, `foundry.py` for keys of LLM
Foundry that this package does not have, `build.py` to make the dataclasses, and `check.py` to compare their keys.
`preflight.py` checks data, tokenizer and machine later. Nothing here imports torch, so that a wrong key is answered in
less than a second.
"""

import contextlib
import copy
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llmfoundry_lite.config import foundry
from llmfoundry_lite.config.blocks import given_blocks, missing_blocks
from llmfoundry_lite.config.build import build_block, check_import_path, refuse_other_kinds
from llmfoundry_lite.config.callbacks_schema import AlertsConfig
from llmfoundry_lite.config.check import check_together
from llmfoundry_lite.config.fields import RUN_NAME, keys_of
from llmfoundry_lite.config.layers import (
    ConfigLayer,
    find_value,
    naming_source,
    read_layers,
    refuse_code_of_overlays,
    source_of,
)
from llmfoundry_lite.config.merge import merge_layers
from llmfoundry_lite.config.own_arguments import collect_own_arguments, collect_part_arguments, drop_keys_of_other_parts
from llmfoundry_lite.config.part_names import spell_out_names
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.config.surprises import find_surprises
from llmfoundry_lite.errors import ConfigError, join_with_or
from llmfoundry_lite.own_code import is_own

FOLDERS_WITH_RUN_NAME = (
    *("run_folder", "save_folder", "save_fallback", "load_path", "loggers.tensorboard.log_dir"),
    *("callbacks.hf_checkpointer.save_folder", "callbacks.profiler.folder"),
)
"""Dotted keys of folders and URLs in which `{run_name}` is replaced by the run's name."""
DRY_RUNS = {"--dry-run": "plan", "--dry-run=full": "full", "--dry-run=here": "here"}
"""Option of the command line -> `LoadedTrain.dry_run`."""


class Observed(NamedTuple):
    """A launch that a process beside it observes, to send alerts or to serve metrics."""

    run_name: str
    run_folder: Path
    alerts: AlertsConfig | None
    metrics_port: int | None
    metrics_host: str


class MergedFiles(NamedTuple):
    """The files and arguments of a launch after they were read and merged, and before their keys are checked."""

    layers: list[ConfigLayer]
    values: dict[str, Any]
    names: dict[str, str]
    """Import path -> the short name of a companion's part that it stands for, with its key: `model.norm_type: tilted`.
    """


class LoadedTrain(NamedTuple):
    """Meaning of the command-line arguments of a training launch."""

    config: TrainConfig
    dry_run: str
    """Kind of dry run, empty for a launch. `plan` and `full` check the configuration, and `here` also this machine."""
    notes: list[str]
    """Lines to print: the overlay that `hardware=auto` has chosen, keys that have no effect (in a dry run, a line and a
    reason for each), and keys that may not do what they seem to."""


def merge_files(arguments: Sequence[str], given: Mapping[str, Any] | None = None) -> MergedFiles:
    """Read and merge the files and arguments of a launch, for `read_unchecked` and `load_train_config`.

    The arguments are those of `load_train_config`. Raises ConfigError if they cannot be read and merged, or if an
    overlay sets a key that it may not set.
    """
    layers = []
    names: dict[str, str] = {}
    for layer in read_layers(_without_options(arguments), given=given):
        values, names_in_layer = spell_out_names(layer.values)
        layers.append(layer._replace(values=values))
        names |= names_in_layer
    # A reference `${…}` to a short name is one only when it is resolved.
    values, referenced_names = spell_out_names(merge_layers(layers, TrainConfig))
    return MergedFiles(layers, values, names | referenced_names)


def load_train_config(
    arguments: Sequence[str],
    environ: Mapping[str, str] = os.environ,
    given: Mapping[str, Any] | None = None,
    merged: MergedFiles | None = None,
) -> LoadedTrain:
    """Turn the arguments of a training launch into a checked configuration.

        load_train_config(["mpt-1b", "my.yaml", "optimizer.lr=2e-3", "--dry-run"])

    `arguments` are YAML files, `key=value` pairs and the options of DRY_RUNS. Later files override earlier ones,
    `key=value` pairs override all files, and all of them override `given`, the configuration of a program that calls
    the library. `environ` are the environment variables. `merged` is what `merge_files` has returned for these
    arguments, so that they are not read again; its values are changed.

    Raises ConfigError, whose line names the file, the key, what was given, and what was expected.
    """
    # Read and merge the files and arguments.
    dry_run = _read_options(arguments)
    layers, values, names = merged or merge_files(arguments, given)
    notes = [layer.note for layer in layers if layer.note]

    refuse_code_of_overlays(layers, values)

    # Arguments of the user's own parts of the model may have the names of keys that are dropped or refused next.
    notes += drop_keys_of_other_parts(values, layers)
    collect_part_arguments(values)

    # Refuse keys of LLM Foundry that this package does not have, or drop them with a note.
    with naming_source(layers):
        foundry.refuse_fine_tuning(values)
        refuse_other_kinds(values)
    without_effect = foundry.drop_keys(values, layers) + foundry.drop_values_without_effect(values, layers)
    if len(without_effect) > 1 and not dry_run:
        notes.append(foundry.in_one_line(without_effect))
    else:
        notes += without_effect
    foundry.refuse_left_out_keys(values, layers)
    foundry.drop_variables(values, layers, TrainConfig)

    # Complete the values with the run's name and folder.
    if values.get("run_name") is None and "RUN_NAME" in environ:
        name = environ["RUN_NAME"]
        notes.append(f"run_name: {name}, by the environment variable RUN_NAME; run_name=NAME names another")
    _set_names(values, layers, environ)

    # Build the dataclasses, which checks each key by itself. Arguments of the user's own objects have no schema.
    collect_own_arguments(values)
    config = build_block(TrainConfig, values, "", layers)
    with naming_source(layers):
        if is_own(config.tokenizer.name):
            check_import_path("tokenizer.name", config.tokenizer.name)
        for import_path in config.callbacks.extra:
            check_import_path("callbacks", import_path)
        for import_path in config.loggers.extra:
            check_import_path("loggers", import_path)

    paths_of_run = {import_path for _, import_path in config.own_code}
    for import_path, written in names.items():
        if import_path in paths_of_run or written.startswith("icl_tasks"):
            notes.append(f"{written} is {import_path}")

    # Check the keys together.
    check_together(config, layers)
    has_several_ranks = environ.get("WORLD_SIZE", "1") != "1"
    notes += find_surprises(config, layers, under_srun=_is_under_srun(environ), has_several_ranks=has_several_ranks)
    return LoadedTrain(config, dry_run=dry_run, notes=notes)


def _read_options(arguments: Sequence[str]) -> str:
    """Return the kind of dry run that the options ask for, a value of DRY_RUNS; empty without options.

    The last option counts. Raises ConfigError for an option that training does not have.
    """
    dry_run = ""
    for argument in arguments:
        if not argument.startswith("-"):
            continue
        if argument not in DRY_RUNS:
            raise ConfigError(
                f"command line: unknown option {argument}; expected YAML files, key=value pairs, "
                f"{join_with_or([*DRY_RUNS])}"
            )
        dry_run = DRY_RUNS[argument]
    return dry_run


def _without_options(arguments: Sequence[str]) -> list[str]:
    """Return the YAML files and `key=value` pairs among the arguments of a launch."""
    return [argument for argument in arguments if not argument.startswith("-")]


def _is_under_srun(environ: Mapping[str, str]) -> bool:
    """Return whether SLURM's `srun` has started the ranks itself, instead of a launcher such as composer on each node.

    A launcher kills its ranks some seconds after a signal; srun leaves them more time.
    """
    num_tasks = environ.get("SLURM_STEP_NUM_TASKS")
    if num_tasks is None:
        return False
    # With several tasks, `adopt_srun` has set WORLD_SIZE to their number. With one task, only a launcher sets it.
    world_size_by_srun = None if num_tasks == "1" else num_tasks
    return environ.get("WORLD_SIZE") == world_size_by_srun


def find_run_folder(
    arguments: Sequence[str], environ: Mapping[str, str] = os.environ, given: Mapping[str, Any] | None = None
) -> Path | None:
    """Return the run folder of a launch, even if its configuration is refused, so that the reason is recorded there.

    The arguments are those of `load_train_config`. Returns None if the files cannot be read and merged, if the run has
    no valid name, or if a companion that is not installed would choose a folder within the run's folder.
    """
    values = read_unchecked(arguments, environ, given)
    return None if values is None else Path(values["run_folder"])


def find_observed(values: Mapping[str, Any]) -> Observed | None:
    """Return what a process beside a launch needs to send alerts and to serve metrics; None if the run has neither.

    `values` are those of `read_unchecked`. Other keys are not checked, so that a refused launch sends an alert too.
    Keys of these two that are not valid count as left out; `load_train_config` refuses them.
    """
    alerts = None
    if values.get("alerts") is not None:
        with contextlib.suppress(ConfigError):
            alerts = build_block(AlertsConfig, values["alerts"], "alerts")
    port = values.get("metrics_port")
    metrics_port = port if type(port) is int and 0 < port < 65536 else None
    if alerts is None and metrics_port is None:
        return None

    host = values.get("metrics_host") or keys_of(TrainConfig)["metrics_host"].default
    return Observed(values["run_name"], Path(values["run_folder"]), alerts, metrics_port, str(host))


def is_console_json(values: Mapping[str, Any]) -> bool:
    """Return whether the `console_format` of a launch is json.

    `values` are those of `read_unchecked`. Other keys are not checked, so that the line that refuses one is JSON too.
    """
    return values.get("console_format") == "json"


def read_unchecked(
    arguments: Sequence[str],
    environ: Mapping[str, str] = os.environ,
    given: Mapping[str, Any] | None = None,
    merged: MergedFiles | None = None,
) -> dict[str, Any] | None:
    """Return the merged values of a launch's files and arguments, with its name and folder, without checking them.

    The arguments are those of `load_train_config`. The values are a copy of those in `merged`, or are read.
    `run_name` and `run_folder` are among them. Returns None if the files cannot be read and merged, if the run
    has no valid name, or if a companion that is not installed would choose a folder within the run's folder.
    """
    try:
        if merged is not None:
            layers, values = merged.layers, copy.deepcopy(merged.values)
        else:
            layers = read_layers(_without_options(arguments), check_overlays=False, given=given)
            values = merge_layers(layers, TrainConfig)
        _set_names(values, layers, environ)
    except ConfigError:
        return None
    return None if missing_blocks(values) else values


def _set_names(values: dict[str, Any], layers: Sequence[ConfigLayer], environ: Mapping[str, str]) -> None:
    """Set `run_name` and `run_folder` in `values`, and replace `{run_name}` in the folders of FOLDERS_WITH_RUN_NAME.

    The name is the configuration's run_name, or else the environment variable RUN_NAME, or else the name of the first
    YAML file: `mpt-1b.yaml` gives `mpt-1b`. Every rank calls this and has to find the same name, so it is never random.

    Raises ConfigError for a name that cannot be the name of a folder.
    """
    # Find the name, and where it comes from, for the error.
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

    # Plain text instead of FromEnvironment, so that the record has the name and the folder that were used.
    values["run_name"] = str(name)
    values["run_folder"] = str(values.get("run_folder") or _default_run_folder(values))

    # A dotted key is split into its block and the key in it. Blocks that the YAML leaves out are skipped.
    for folder_key in FOLDERS_WITH_RUN_NAME:
        block_key, _, key = folder_key.rpartition(".")
        block = values
        if block_key:
            _, block = find_value(values, block_key)
        if isinstance(block, dict) and isinstance(block.get(key), str):
            block[key] = block[key].replace(RUN_NAME, str(name))


def _default_run_folder(values: Mapping[str, Any]) -> str:
    """Return the default of run_folder, `runs/{run_name}`. The caller replaces `{run_name}`.

    If several launches train one run together, as the block of a companion in `values` says, each has a folder of its
    own, such as `runs/{run_name}/island0`. The block names it.
    """
    parts = [f"runs/{RUN_NAME}"]
    for key, block in given_blocks(values).items():
        if block.shared_run is None or not isinstance(values[key], dict):
            continue  # the schema refuses a value that is no block later
        folder_of_launch = values[key].get(block.shared_run.folder_key)
        if folder_of_launch:
            parts.append(str(folder_of_launch))
    return "/".join(parts)
