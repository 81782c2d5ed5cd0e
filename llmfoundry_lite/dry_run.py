"""Describe what a launch would do: the output of `--dry-run`, in lines of a heading and a value.

`describe_launch` is the top function, and each `_describe_…` function returns the text of one heading. They read the
manifest of the checkpoint from which the launch would start, but no tensor. `preflight.py` has made the checks whose
results are printed here.
"""

import os
from collections.abc import Sequence
from dataclasses import replace

from llmfoundry_lite import companions
from llmfoundry_lite.checkpoint.manifest import HIDDEN
from llmfoundry_lite.checkpoint.start import Start, choose_start, has_reached
from llmfoundry_lite.config.blocks import given_blocks
from llmfoundry_lite.config.data_schema import LoaderConfig
from llmfoundry_lite.config.data_stages import distinct_streams, first_batches
from llmfoundry_lite.config.layout import Layout, describe_layout
from llmfoundry_lite.config.scalars import FromEnvironment
from llmfoundry_lite.config.schema import TrainConfig, as_dict, data_label
from llmfoundry_lite.config.yaml_text import dump_record
from llmfoundry_lite.data.tokenizer import (
    find_fingerprints,
)
from llmfoundry_lite.errors import (
    CheckpointError,
    is_secret_name,
    printable,
)
from llmfoundry_lite.estimate.memory import estimate_training_memory
from llmfoundry_lite.estimate.model_memory import knows_optimizer
from llmfoundry_lite.models.flops import count_flops_per_token, count_parameters
from llmfoundry_lite.preflight import Preflight, count_epoch_samples

MANY_EPOCHS = 100
"""Number of epochs from which a dry run warns."""
MAX_LISTED = 8
"""Most streams, stages or ranks of a context group that a dry run lists."""


def describe_launch(
    config: TrainConfig, layout: Layout, result: Preflight, *, is_for_here: bool = False, with_yaml: bool = False
) -> str:
    """Return the output of `--dry-run`: what a launch would do, in lines of a heading and a value.

        run            mpt-1b in runs/mpt-1b
        start          batch 1, from initial weights
        …

    `result` is the result of `preflight.check`. `is_for_here` says whether this machine has been checked too. With
    `with_yaml`, the resolved configuration comes first, as YAML.
    """
    model = config.model
    tokens_per_batch = config.global_train_batch_size * config.max_seq_len
    flops_per_token = count_flops_per_token(model, config.max_seq_len)
    flops = f"{_with_prefix(flops_per_token)} per token, {_with_prefix(flops_per_token * tokens_per_batch)} per batch"
    start, not_checked_at_start = _describe_start(config, is_for_here=is_for_here)
    other_launches = "".join(block.describe(config) for block in given_blocks(config.blocks).values())
    lines = [
        f"run            {config.run_name} in {config.run_folder}{other_launches}",
        f"start          {start}",
        f"model          {count_parameters(model):,} parameters, {model.n_layers} blocks of width {model.d_model}",
        f"model FLOPs    {flops}",
        *_with_heading("devices", describe_layout(layout)),
        *_with_heading("batch", _describe_batch(config, layout)),
        *_with_heading("samples", describe_division("samples", config, layout)),
        *_with_heading("stages", describe_division("stages", config, layout)),
        f"duration       {config.max_duration.written}{_describe_duration(config, result)}",
        *_describe_data(config, result),
        f"precision      {_describe_precision(config)}",
        f"optimizer      {_describe_optimizer(config)}",
        *_with_heading("memory", _describe_memory(config, layout)),
        f"saves          {_describe_saves(config)}",
        f"logs           {_describe_logs(config)}",
    ]
    lines += [f"warning        {text}" for text in describe_division("warning", config, layout)]
    lines += [f"environment    {_describe_variable(name, value)}" for name, value in config.environment.items()]

    # Name what a real launch may still find wrong.
    not_checked = [*result.not_checked, *not_checked_at_start]
    if not is_for_here:
        not_checked.append("the memory of this machine's devices; --dry-run=here also checks that, data, tokenizer")
    lines += [f"not checked    {note}" for note in not_checked]

    paragraphs = [printable(line) for line in lines]
    if with_yaml:
        paragraphs.insert(0, dump_record(as_dict(config)))
    return "\n".join(paragraphs)


def _describe_start(config: TrainConfig, *, is_for_here: bool) -> tuple[str, list[str]]:
    """Describe where a launch begins: at a save of this run, at `load_path`, or at batch 1. Reads no tensor.

    Returns the description, and a line for each thing that could not be checked. If a launch would be refused, the
    description says why; with `is_for_here`, raises CheckpointError instead.
    """
    folder = config.checkpoint_folder
    load_path = config.load_path
    beginning = "batch 1, from initial weights"
    if load_path is not None:
        state = "weights" if config.load_weights_only else "whole state"
        beginning = f"the {state} of {load_path}"

    # A remote folder is not opened.
    is_remote = "://" in folder
    if is_remote:
        not_checked = [f"{folder}: what it holds, and whether that fits this configuration"]
        description = f"the newest save in {folder}, else {beginning}" if config.autoresume else beginning
        return description, not_checked

    # Choose the start as the launch would.
    is_missing = load_path is not None and not os.path.exists(os.path.expanduser(load_path.removeprefix("file://")))
    try:
        # A load_path of another machine is left out, so that the saves of this run can be looked at.
        config_here = replace(config, load_path=None) if is_missing else config
        start = choose_start(config_here, find_fingerprints(config.tokenizer.name))
        if start.is_run_folder and not start.checkpoint_name:
            raise CheckpointError(f"{folder}: no checkpoint can be read; `llmfoundry-lite checkpoint ls` says why")
    except CheckpointError as error:
        if is_for_here:
            raise
        return f"refused: {error}", []

    if start.is_run_folder:
        not_checked = [
            f"the tensors and the data of {start.checkpoint_name}: the launch compares them with what is here"
        ]
        return f"carries on from {folder}/{start.checkpoint_name}{_describe_end(config, start)}", not_checked
    not_checked = [f"load_path: {load_path}, and whether it fits this configuration"] if is_missing else []
    return beginning, not_checked


def _describe_end(config: TrainConfig, start: Start) -> str:
    """Say that a launch trains nothing, if the checkpoint is already at the run's end or at `stop_at`; else empty."""
    for key, words in {"max_duration": "where the run is done", "stop_at": "where stop_at ends this launch"}.items():
        span = getattr(config, key)
        if span is not None and has_reached(span, start.training_done):
            return f", {words}: nothing is trained"
    return ""


def _describe_batch(config: TrainConfig, layout: Layout) -> list[str]:
    """Return two lines for a dry run: the size of a batch, and how devices and microbatches divide it."""
    batch_size = config.global_train_batch_size
    length = config.max_seq_len
    num_groups = layout.num_data_ranks
    group_size = layout.ranks_per_data_rank
    device_batch_size = batch_size // num_groups

    groups = f"{num_groups} group(s) of {group_size} devices" if group_size > 1 else f"{num_groups} device(s)"
    if config.device_train_microbatch_size == "auto":
        microbatches = "microbatches as large as fit"
    else:
        microbatch_size = config.first_microbatch_size(device_batch_size)
        num_microbatches = -(-device_batch_size // microbatch_size)  # rounded up
        microbatches = f"{num_microbatches} microbatch(es) of up to {microbatch_size}"
    return [
        f"{batch_size} samples x {length} tokens = {batch_size * length:,} tokens",
        f"{groups} x {device_batch_size} samples in {microbatches}",
    ]


def _describe_data(config: TrainConfig, result: Preflight) -> list[str]:
    """Return a line for each data set for a dry run: its samples, its folders, and how they are used."""
    batch_size = config.global_train_batch_size
    lines = []
    for key, loader in config.loaders.items():
        label = data_label(key)
        facts = _describe_source(loader)
        if label in result.num_samples:
            facts.insert(0, f"{result.num_samples[label]:,} samples")

        if label != "train":
            facts.append(_describe_evaluation_interval(config))
        else:
            num_samples = count_epoch_samples(config, result)
            if num_samples is not None and loader.drop_last:
                facts.append(f"{num_samples % batch_size} of them left out of each epoch")
        if loader.dataset.stages:
            begins = first_batches(
                loader.dataset, f"{key}.dataset", config.max_duration, batch_size, config.max_seq_len
            )
            numbers = " and ".join(f"{begin + 1:,}" for begin in begins)
            facts.append(f"{len(begins)} stages, from batches {numbers}")
        lines.append(f"{label + ' data':<14} {', '.join(facts)}")
    return lines


def _describe_source(loader: LoaderConfig) -> list[str]:
    """Return the folders of a loader's data set, their number if there are many, or the name of a user's own loader."""
    if loader.name != "text":
        return [loader.name]
    dataset = loader.dataset
    streams = distinct_streams(dataset).values()
    if len(streams) > MAX_LISTED:
        return [f"{len(streams)} streams"]
    folders = []
    for stream in streams:
        parts = (stream.local or stream.remote, stream.split or dataset.split)
        folders.append("/".join(part for part in parts if part))
    return folders


def _describe_evaluation_interval(config: TrainConfig) -> str:
    """Say how often the validation loss is computed, and on how many samples if not on all."""
    if not config.evaluates:
        return "never evaluated"
    subset = f", the first {config.eval_subset_samples:,} samples" if config.eval_subset_samples else ""
    return f"every {config.eval_interval}{subset}"


def _describe_precision(config: TrainConfig) -> str:
    """Describe the precision, mixed precision and exactness of a run, for a dry run."""
    facts = [config.precision, f"mixed_precision {config.sharding.mixed_precision}"]
    if config.exact_sums:
        facts.append("exact sums")
    if config.deterministic:
        facts.append("deterministic kernels")
    if config.compile_config is not None:
        facts.append("compiled blocks")
    return ", ".join(facts)


def _describe_optimizer(config: TrainConfig) -> str:
    """Describe the optimizer, the learning rate and its schedule, and gradient clipping, for a dry run."""
    optimizer = config.optimizer
    facts = [f"{optimizer.name}, lr {optimizer.lr:g}"]
    if optimizer.adamw_lr is not None:
        facts.append(f"adamw_lr {optimizer.adamw_lr:g}")
    if optimizer.name.startswith("python:"):
        arguments = as_dict(config)["optimizer"]["kwargs"]
        facts += [f"{key} {value}" for key, value in arguments.items()]
        facts.append("its own defaults for all else")
    else:
        facts.append(f"weight decay {optimizer.decay:g}")

    facts.append(config.scheduler.name)
    if config.scheduler.t_warmup.value:
        facts.append(f"warm-up {config.scheduler.t_warmup.written}")
    clipping = config.algorithms.gradient_clipping
    if clipping:
        facts.append(f"gradients clipped at {clipping.clipping_threshold:g}")
    return ", ".join(facts)


def _describe_memory(config: TrainConfig, layout: Layout) -> list[str]:
    """Return lines for a dry run with the estimated memory of a device, and what the estimate assumes."""
    is_measured_later = config.device_train_microbatch_size == "auto"
    assumption = " (microbatches of 1 sample)" if is_measured_later else ""
    lines = [f"{estimate_training_memory(config, layout)}{assumption}"]
    if not knows_optimizer(config):
        lines.append(
            f"how much {config.optimizer.name} keeps is not known; `optimizer` is assumed to be two numbers for each "
            "parameter, as of AdamW"
        )
    return lines


def _describe_saves(config: TrainConfig) -> str:
    """Describe for a dry run where and how often a run saves, how many saves stay, and when failing saves end it."""
    interval = config.save_interval
    num_kept = config.save_num_checkpoints_to_keep
    frequency = "as often as costs 2 %" if interval.is_auto else f"every {interval.span or interval.written}"
    kept = "all" if num_kept == -1 else f"the newest {num_kept}"
    limit = f"the run ends when saves fail for {config.max_unsaved.written}"
    return f"{config.checkpoint_folder}, {frequency} and at the end, {kept} kept; {limit}"


def _describe_logs(config: TrainConfig) -> str:
    """List for a dry run where a run logs: its metrics.jsonl, the terminal, and trackers."""
    names = [f"{config.run_folder}/metrics.jsonl"]
    if config.progress_bar:
        names.append("progress bar")
    elif config.log_to_console:
        names.append("console")
    for tracker in ("wandb", "tensorboard"):
        if getattr(config.loggers, tracker) is not None:
            names.append(tracker)
    return ", ".join(names)


def _with_heading(heading: str, lines: Sequence[str]) -> list[str]:
    """Indent lines by 15 columns, the width of a dry run's headings, and write the heading before the first line."""
    return [f"{'' if number else heading:<15}{line}" for number, line in enumerate(lines)]


def describe_division(topic: str, config: TrainConfig, layout: Layout) -> list[str]:
    """Describe how ranks that see the same samples divide the work; empty if there are none.

    The topic `samples` says which tokens each rank has, `stages` which blocks, and `warning` warns of ranks that
    exchange data across nodes in every block.
    """
    if layout.ranks_per_data_rank == 1:
        return []
    needed_for = "tp_config, cp_config and pp_config"
    descriptions = companions.load("llmfoundry_layouts.description:DESCRIPTIONS", needed_for)
    return descriptions[topic](config, layout)


def _describe_variable(name: str, value: str) -> str:
    """Describe an environment variable that the configuration sets to `value`, as NAME=VALUE, secrets hidden.

    A variable that the shell has set keeps the shell's value, which the description then says.
    """
    if isinstance(value, FromEnvironment):
        return f"{name}={value.written}"
    value_in_effect = os.environ.get(name, value)
    is_as_configured = value_in_effect == value
    if is_secret_name(name):
        origin = "" if is_as_configured else ", as the shell has it"
        return f"{name}={HIDDEN}{origin}"
    if is_as_configured:
        return f"{name}={value}"
    return f"{name}={value_in_effect}, as the shell has it, not {value}"


def _describe_duration(config: TrainConfig, result: Preflight) -> str:
    """Return max_duration in other units, to be appended to its own text: ` = 4,800 batches, 10.07 G tokens, …`.

    Epochs are included if the samples could be counted, and hours if the YAML has a variable tokens_per_second. The
    text is empty if the number of batches is unknown, as for epochs of data that is not on this machine.
    """
    # Convert to batches, rounded up.
    duration = config.max_duration
    batch_size = config.global_train_batch_size
    tokens_per_batch = batch_size * config.max_seq_len
    num_samples = count_epoch_samples(config, result) or 0
    batches_per_epoch = num_samples // batch_size if config.train_loader.drop_last else -(-num_samples // batch_size)
    num_batches = {
        "ba": duration.value,
        "sp": -(-duration.value // batch_size),
        "tok": -(-duration.value // tokens_per_batch),
        "ep": duration.value * batches_per_epoch,
    }[duration.unit]
    if not num_batches:
        return ""

    description = f" = {int(num_batches):,} batches, {_with_prefix(num_batches * tokens_per_batch)} tokens"
    if num_samples:
        num_epochs = num_batches * batch_size / num_samples
        description += f", {num_epochs:,.2f} epochs"
        if num_epochs > MANY_EPOCHS:
            description += ", which learn this text by heart: it is too short for the run"
    tokens_per_second = config.variables.get("tokens_per_second")  # `init --hours` has measured it
    if isinstance(tokens_per_second, int | float) and tokens_per_second > 0:
        num_hours = num_batches * tokens_per_batch / tokens_per_second / 3600
        description += f", {num_hours:,.2g} hours at {tokens_per_second:,} tokens per second"
    return description


def _with_prefix(number: float) -> str:
    """Return a number as text with a metric prefix and two decimals: `1.23 M` for 1234567."""
    for prefix, factor in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= factor:
            return f"{number / factor:,.2f} {prefix}"
    return f"{number:,.0f}"
