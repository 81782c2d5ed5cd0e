"""Describe what a launch would do: the output of `--dry-run`, in lines of a heading and a value.

`describe_launch` is the top function, and each `_describe_…` function returns the text of one heading. Nothing is
checked here: `preflight.py` has made the checks, and its findings are printed. `_describe_start` reads the manifests of
the checkpoints from which the launch could start, but no tensor.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from llmfoundry_lite import companions
from llmfoundry_lite.checkpoint.manifest import HIDDEN
from llmfoundry_lite.checkpoint.start import Start, choose_start, has_reached
from llmfoundry_lite.config.blocks import given_blocks
from llmfoundry_lite.config.counted_model import counted_model, describe_told_parts, read_told_layer
from llmfoundry_lite.config.data_schema import LoaderConfig
from llmfoundry_lite.config.data_stages import distinct_streams, first_batches
from llmfoundry_lite.config.layout import Layout, describe_layout
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.mup import factors_of_kind, initial_std_factor, kind_by_name
from llmfoundry_lite.config.parameter_groups import Factors, FactorsOf, divide_parameters
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
from llmfoundry_lite.estimate.own_optimizer import read_told_state
from llmfoundry_lite.models.flops import count_flops_per_token, count_parameters
from llmfoundry_lite.models.names import is_matrix_of_block, list_parameters
from llmfoundry_lite.own_code import is_own
from llmfoundry_lite.preflight import Preflight, count_epoch_samples

MANY_EPOCHS = 100
"""A dry run warns of a run with more epochs than this, which memorises its text instead of learning from it."""
MAX_LISTED = 8
"""Maximum number of streams, stages or ranks of a context group that a dry run lists one by one."""


def describe_launch(
    config: TrainConfig, layout: Layout, findings: Preflight, *, is_for_here: bool = False, with_yaml: bool = False
) -> str:
    """Return the output of `--dry-run`: what a launch would do, in lines of a heading and a value.

        run            mpt-1b in runs/mpt-1b
        start          batch 1, from initial weights
        …

    findings: what `preflight.check` has returned for the same configuration and layout.
    is_for_here: whether `preflight.check_here` has checked this machine too, as for `--dry-run=here`.
    with_yaml: whether the resolved configuration comes first, as YAML, as for `--dry-run=full`.

    Raises CheckpointError, only with `is_for_here`, if the launch would be refused because of a checkpoint.
    """
    # Describe what needs more than the configuration.
    model = config.model
    counted = counted_model(model)
    tokens_per_batch = config.global_train_batch_size * config.max_seq_len
    flops_per_token = count_flops_per_token(counted, config.max_seq_len)
    flops_per_batch = flops_per_token * tokens_per_batch
    which_batch = "batch" if config.largest_batch_size == config.global_train_batch_size else "smallest batch"
    flops = f"{_with_prefix(flops_per_token)} per token, {_with_prefix(flops_per_batch)} per {which_batch}"
    start, not_checked_at_start = _describe_start(config, is_for_here=is_for_here)
    other_launches = ""
    lines_of_blocks = []
    for key, block in given_blocks(config.blocks).items():
        if block.shared_run is not None:
            other_launches += block.describe(config)
        else:
            lines_of_blocks += _with_heading(key, [block.describe(config) or "on"])

    # Lines without a value, such as those of a layout that divides nothing, are left out by `_with_heading`.
    lines = [
        f"run            {config.run_name} in {config.run_folder}{other_launches}",
        f"start          {start}",
        f"model          {count_parameters(counted):,} parameters, {model.n_layers} blocks of width {model.d_model}",
        f"model FLOPs    {flops}",
        *_with_heading("own parts", _describe_own_parts(model)),
        *_with_heading("loss", _describe_own_loss(config)),
        *_with_heading("muP", _describe_mup(config)),
        *_with_heading("devices", describe_layout(layout)),
        *_with_heading("batch", _describe_batch(config, layout)),
        *_with_heading("batches", _describe_stretches(config, layout, findings)),
        *_with_heading("samples", describe_division("samples", config, layout)),
        *_with_heading("stages", describe_division("stages", config, layout)),
        f"duration       {config.max_duration.written}{_describe_duration(config, findings)}",
        *_describe_data(config, findings),
        f"precision      {_describe_precision(config)}",
        f"optimizer      {_describe_optimizer(config)}",
        *_with_heading("groups", _describe_groups(config)),
        *_with_heading("memory", _describe_memory(config, layout)),
        f"saves          {_describe_saves(config)}",
        f"logs           {_describe_logs(config)}",
        *lines_of_blocks,
    ]
    lines += [f"warning        {text}" for text in describe_division("warning", config, layout)]
    lines += [f"environment    {_describe_variable(name, value)}" for name, value in config.environment.items()]

    # Name what a launch may still find wrong, because it was not checked.
    not_checked = [*findings.not_checked, *not_checked_at_start]
    if not is_for_here:
        not_checked.append("the memory of this machine's devices; --dry-run=here also checks that, data, tokenizer")
    lines += [f"not checked    {note}" for note in not_checked]

    paragraphs = [printable(line) for line in lines]
    if with_yaml:
        paragraphs.insert(0, dump_record(as_dict(config)))
    return "\n".join(paragraphs)


def _describe_start(config: TrainConfig, *, is_for_here: bool) -> tuple[str, list[str]]:
    """Describe where a launch begins: at a save of this run, at `load_path`, or at batch 1. Reads no tensor.

    Returns the description, such as `carries on from runs/mpt-1b/checkpoints/ba400`, and a line for each thing that
    could not be checked. If a launch would be refused, the description is `refused: ` and the reason. With
    `is_for_here`, that raises CheckpointError instead.
    """
    # Without a save of this run, a launch begins with these weights.
    folder = config.checkpoint_folder
    load_path = config.load_path
    beginning = "batch 1, from initial weights"
    if load_path is not None:
        state = "weights" if config.load_weights_only else "whole state"
        beginning = f"the {state} of {load_path}"

    # A remote folder is not opened, because a dry run needs no network and no credentials.
    places = [folder] if config.save_fallback is None else [folder, config.save_fallback]
    is_remote = any("://" in place for place in places)
    if is_remote:
        place_names = " and ".join(places)
        contents = "what it holds" if len(places) == 1 else "what they hold"
        not_checked = [f"{place_names}: {contents}, and whether that fits this configuration"]
        description = f"the newest save in {place_names}, else {beginning}" if config.autoresume else beginning
        return description, not_checked

    # Choose the start as the launch would.
    load_path_is_missing = False
    if load_path is not None:
        local_path = os.path.expanduser(load_path.removeprefix("file://"))
        load_path_is_missing = not os.path.exists(local_path)
    try:
        # Without a load_path that is on another machine, or at a URL, the saves of this run can still be looked at.
        config_here = replace(config, load_path=None) if load_path_is_missing else config
        start = choose_start(config_here, find_fingerprints(config.tokenizer))
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
        return f"carries on from {start.checkpoint_url}{_describe_end(config, start)}", not_checked

    if load_path_is_missing:
        return beginning, [f"load_path: {load_path}, and whether it fits this configuration"]
    return beginning, []


def _describe_end(config: TrainConfig, start: Start) -> str:
    """Return the end of the start's description: that a launch trains nothing, or empty text if it trains.

    A launch trains nothing if its checkpoint, `start`, is already at `max_duration` or at `stop_at`.
    """
    for key, words in {"max_duration": "where the run is done", "stop_at": "where stop_at ends this launch"}.items():
        span = getattr(config, key)
        if span is not None and has_reached(span, start.training_done):
            return f", {words}: nothing is trained"
    return ""


def _describe_own_parts(model: ModelConfig) -> list[str]:
    """Return lines about how parts of the model that are the user's own code are counted; none without such parts."""
    lines: list[str] = []
    told_parts = describe_told_parts(model)
    if told_parts:
        lines.append(f"counted as the class says: {told_parts}")
    for key, name in counted_model(model).own_parts.items():
        reason = read_told_layer(key, name).explanation
        lines.append(f"{name} (model.{key}): not counted in parameters, FLOPs and memory, because {reason}")
    return lines


def _describe_own_loss(config: TrainConfig) -> list[str]:
    """Return a line about the user's own loss; none for the cross-entropy."""
    name = config.model.loss_fn
    if not is_own(name):
        return []
    arguments = as_dict(config)["model"].get("loss_kwargs", {})
    words = ", ".join([name, *(f"{key} {value}" for key, value in arguments.items())])
    return [f"{words}: counted as cross-entropy in memory and FLOPs, because a dry run imports no code"]


def _describe_mup(config: TrainConfig) -> list[str]:
    """Return the table of muP: initial weights and learning rates beside the base model's, and multipliers.

        m = 4, width 256 over the base width 64
        kind     parameters              initial std   learning rate   multiplier
        input    embeddings              x 1           0.01            x 1
        hidden   matrices of the blocks  x 0.5         0.0025          scores of attention x 0.25
        vector   norms, biases           x 1           0.01
        output   tied to the input                                     logits x 0.25

    With `optimizer.param_groups`, which may have rates of their own, learning rates are factors, such as x 0.25, and
    `_describe_groups` has the rates. Empty without muP.
    """
    model = config.model
    if model.mup is None:
        return []
    width_mult = model.width_mult
    optimizer = config.optimizer
    rates = {}
    for kind in ("input", "hidden", "vector", "output"):
        factor = factors_of_kind(kind, optimizer, width_mult, is_matrix_of_block=kind == "hidden").lr
        base_rate = optimizer.lr if kind == "hidden" else optimizer.adamw_lr or optimizer.lr
        rates[kind] = f"x {factor:.4g}" if optimizer.param_groups else f"{base_rate * factor:g}"
    scale = model.softmax_scale or model.head_dim**-0.5
    output = ("lm_head", "x 1", rates["output"])
    if model.tie_word_embeddings:
        output = ("tied to the input", "", "")

    rows = [
        ("kind", "parameters", "initial std", "learning rate", "multiplier"),
        ("input", "embeddings", "x 1", rates["input"], f"x {model.embedding_multiplier:g}"),
        (
            "hidden",
            "matrices of the blocks",
            f"x {initial_std_factor('hidden', width_mult):.4g}",
            rates["hidden"],
            f"scores of attention x {scale:.4g}",
        ),
        ("vector", "norms, biases", "x 1", rates["vector"], ""),
        ("output", *output, f"logits x {model.logit_multiplier or 1:.4g}"),
    ]
    title = f"m = {width_mult:g}, width {model.d_model} over the base width {model.mup.base_width}"
    lines = [f"{kind:<9}{names:<24}{std:<14}{rate:<16}{multiplier}" for kind, names, std, rate, multiplier in rows]
    return [title, *(line.rstrip() for line in lines)]


def _describe_batch(config: TrainConfig, layout: Layout) -> list[str]:
    """Return two lines: the size of a batch, and how it is divided between devices and then into microbatches.

        512 samples x 2048 tokens = 1,048,576 tokens
        8 device(s) x 64 samples in 4 microbatch(es) of up to 16

    Devices that divide the model or a sample between them see the same samples, and count as one group.
    """
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


def _describe_stretches(config: TrainConfig, layout: Layout, findings: Preflight) -> list[str]:
    """Return a line for each stretch of batches of one size and length; none for a run whose batches are all alike.

    1 to 500: 64 samples in rows of 256 tokens, 65,536 tokens, 4 microbatch(es)
    501 to 3,000: 128 samples in rows of 1,024 tokens, 131,072 tokens, 8 microbatch(es)
    """
    num_batches = _count_batches(config, findings)
    has_short_rows = config.seq_lens.smallest < config.max_seq_len
    are_alike = config.parts_of_batches.largest == 1 and not has_short_rows
    if are_alike or not num_batches:
        return []
    stretches = [*config.batch_sizes.stretches(num_batches), *config.seq_lens.stretches(num_batches)]
    first_batches = sorted({stretch.first_batch for stretch in stretches})
    device_batch_size = config.global_train_batch_size // layout.num_data_ranks
    microbatch_size = config.first_microbatch_size(device_batch_size)

    lines: list[str] = []
    for first_batch, end_batch in pairwise([*first_batches, num_batches]):
        size = config.batch_sizes.of(first_batch)
        length = config.seq_lens.of(first_batch)
        line = f"{first_batch + 1:,} to {end_batch:,}: {size:,} samples"
        if has_short_rows:
            line += f" in rows of {length:,} tokens"
        line += f", {size * config.max_seq_len:,} tokens"
        if config.device_train_microbatch_size != "auto":
            num_microbatches = -(-(size // layout.num_data_ranks) // microbatch_size)  # rounded up
            line += f", {num_microbatches} microbatch(es)"
        lines.append(line)
    return lines


def _describe_data(config: TrainConfig, findings: Preflight) -> list[str]:
    """Return a line for each data set, with its heading: its samples, its folders, and how they are used.

    train data     131,072 samples, data/c4/train, 0 of them left out of each epoch
    eval data      2,048 samples, data/c4/val, every 1000ba
    """
    batch_size = config.global_train_batch_size
    lines = []
    for key, loader in config.loaders.items():
        label = data_label(key)
        facts = _describe_source(loader)
        if label in findings.num_samples:
            facts.insert(0, f"{findings.num_samples[label]:,} samples")

        if label != "train":
            facts.append(_describe_evaluation_interval(config))
        else:
            # With drop_last, the samples of an epoch that do not fill a batch are left out.
            num_samples = count_epoch_samples(config, findings)
            if num_samples is not None and loader.drop_last:
                facts.append(f"{num_samples % batch_size} of them left out of each epoch")
        if loader.dataset.stages:
            first_batch_of_stages = first_batches(
                loader.dataset, f"{key}.dataset", config.max_duration, config.batch_sizes, config.max_seq_len
            )
            # They count from 0, and users count batches from 1.
            batch_numbers = " and ".join(f"{batch + 1:,}" for batch in first_batch_of_stages)
            facts.append(f"{len(first_batch_of_stages)} stages, from batches {batch_numbers}")
        lines.append(f"{label + ' data':<14} {', '.join(facts)}")
    return lines


def _describe_source(loader: LoaderConfig) -> list[str]:
    """Return a text for each folder of a loader's data set, such as `data/c4/train`.

    With more than MAX_LISTED folders, the only text is their number. For a user's own loader, it is the loader's name.
    """
    if loader.name != "text":
        return [loader.name]
    dataset = loader.dataset
    streams = distinct_streams(dataset).values()
    if len(streams) > MAX_LISTED:
        return [f"{len(streams)} streams"]
    folders = []
    for stream in streams:
        root_and_split = (stream.local or stream.remote, stream.split or dataset.split)
        folders.append("/".join(part for part in root_and_split if part))
    return folders


def _describe_evaluation_interval(config: TrainConfig) -> str:
    """Return how often the validation loss is computed, and on how many samples if not on all of them."""
    if not config.evaluates:
        return "never evaluated"
    subset = f", the first {config.eval_subset_samples:,} samples" if config.eval_subset_samples else ""
    return f"every {config.eval_interval}{subset}"


def _describe_precision(config: TrainConfig) -> str:
    """Describe the precision and exactness of a run: `amp_bf16, mixed_precision PURE, deterministic kernels`."""
    facts = [config.precision, f"mixed_precision {config.sharding.mixed_precision}"]
    if config.exact_sums:
        facts.append("exact sums")
    if config.deterministic:
        facts.append("deterministic kernels")
    if config.compile_config is not None:
        facts.append("compiled blocks")
    return ", ".join(facts)


def _describe_optimizer(config: TrainConfig) -> str:
    """Describe the optimizer, the schedule of its learning rate, and gradient clipping.

    decoupled_adamw, lr 0.0002, weight decay 1e-05, cosine_with_warmup, warm-up 100ba, gradients clipped at 1
    """
    optimizer = config.optimizer
    recorded = as_dict(config)  # arguments of the user's own parts are shown as they are recorded, without secrets
    facts = [f"{optimizer.name}, lr {optimizer.lr:g}"]
    if optimizer.adamw_lr is not None:
        facts.append(f"adamw_lr {optimizer.adamw_lr:g}")
    if is_own(optimizer.name):
        facts += [f"{key} {value}" for key, value in recorded["optimizer"]["kwargs"].items()]
        facts.append("its own defaults for all else")
    else:
        facts.append(f"weight decay {optimizer.decay:g}")

    facts.append(config.scheduler.name)
    if is_own(config.scheduler.name):
        facts += [f"{key} {value}" for key, value in recorded["scheduler"].get("kwargs", {}).items()]
    if config.scheduler.t_warmup.value:
        facts.append(f"warm-up {config.scheduler.t_warmup.written}")
    clipping = config.algorithms.gradient_clipping
    if clipping:
        facts.append(f"gradients clipped at {clipping.clipping_threshold:g}")
    return ", ".join(facts)


def _describe_groups(config: TrainConfig) -> list[str]:
    """Return a line for each group of `optimizer.param_groups`, that of the other parameters first.

    0  the others              124,337,664 parameters of 50 tensors, lr 0.0006, weight decay 1e-05
    1  'norm|bias'                 121,344 parameters of 98 tensors, lr 0.0006, weight decay 0

    With muP, the parameters of a group that have a rate of their own are a group of their own.
    """
    if not config.optimizer.param_groups:
        return []
    shapes = list_parameters(config.model)
    groups = divide_parameters(shapes, config.optimizer, _mup_factors(config, shapes))
    width = max(len(str(group)) for group in groups)
    counts = [f"{sum(math.prod(shapes[name]) for name in group.names):,}" for group in groups]
    count_width = max(map(len, counts))

    lines: list[str] = []
    for index, (group, count) in enumerate(zip(groups, counts, strict=True)):
        settings = group.settings
        facts = [f"{count:>{count_width}} parameters of {len(group.names)} tensor(s), lr {settings.lr:g}"]
        if settings.adamw_lr is not None:
            facts.append(f"adamw_lr {settings.adamw_lr:g}")
        if not is_own(settings.name):
            facts.append(f"weight decay {settings.decay:g}")
        if group.index > 0:
            given = config.optimizer.param_groups[group.index - 1].own_settings
            if is_own(settings.name):
                facts += [f"{key} {value}" for key, value in given.items() if key not in ("lr", "adamw_lr")]
            else:
                facts += [f"{key} {getattr(settings, key)}" for key in given if key in ("betas", "eps", "momentum")]
        lines.append(f"{index}  {group!s:<{width}}  {', '.join(facts)}")
    if config.model.own_parts:
        lines.append("parameters of your own parts are not counted: a dry run imports no code")
    return lines


def _mup_factors(config: TrainConfig, shapes: Mapping[str, Sequence[int]]) -> FactorsOf | None:
    """Return the factors of muP of parameters of our own layers, whose shapes are given by name; None without muP."""
    width_mult = config.model.width_mult
    if width_mult == 1:
        return None

    def factors_of(name: str) -> Factors:
        num_dimensions = len(shapes[name])
        kind = kind_by_name(name, num_dimensions)
        is_matrix = is_matrix_of_block(name, num_dimensions)
        return factors_of_kind(kind, config.optimizer, width_mult, is_matrix_of_block=is_matrix)

    return factors_of


def _describe_memory(config: TrainConfig, layout: Layout) -> list[str]:
    """Return the estimated memory of a device and what the estimate assumes, in one or two lines."""
    is_measured_later = config.device_train_microbatch_size == "auto"
    assumption = " (microbatches of 1 sample)" if is_measured_later else ""
    lines = [f"{estimate_training_memory(config, layout)}{assumption}"]
    if is_own(config.optimizer.name):
        told = read_told_state(config.optimizer.name)
        if told.bytes_per_parameter is None:
            lines.append(
                f"how much {config.optimizer.name} keeps is not known; `optimizer` is assumed to be two numbers for "
                f"each parameter, as of AdamW; {told.explanation}"
            )
        else:
            lines.append(
                f"{config.optimizer.name} keeps {told.bytes_per_parameter:g} bytes for each parameter; "
                f"{told.explanation}"
            )
    return lines


def _describe_saves(config: TrainConfig) -> str:
    """Describe where and how often a run saves, how many saves it keeps, and when failing saves end it."""
    interval = config.save_interval
    num_kept = config.save_num_checkpoints_to_keep
    frequency = "as often as costs 2 %" if interval.is_auto else f"every {interval.span or interval.written}"
    kept = "all" if num_kept == -1 else f"the newest {num_kept}"
    limit = f"the run ends when saves fail for {config.max_unsaved.written}"
    place = config.checkpoint_folder
    if config.save_fallback is not None:
        place += f" (while saves there fail: {config.save_fallback})"
    return f"{place}, {frequency} and at the end, {kept} kept; {limit}"


def _describe_logs(config: TrainConfig) -> str:
    """List where a run logs: its metrics.jsonl, the terminal (as a progress bar or as lines), and trackers."""
    names = [f"{config.run_folder}/metrics.jsonl"]
    if config.progress_bar:
        names.append("progress bar")
    elif config.log_to_console:
        names.append("console")
    for tracker in ("wandb", "tensorboard"):
        if getattr(config.loggers, tracker) is not None:
            names.append(tracker)
    names += config.loggers.extra
    return ", ".join(names)


def _with_heading(heading: str, lines: Sequence[str]) -> list[str]:
    """Return the lines of a heading: the heading is before the first line, and further lines are indented as far.

    Headings are 15 columns wide. Without any lines, the heading is left out.
    """
    texts = []
    for index, line in enumerate(lines):
        text_before = heading if index == 0 else ""
        texts.append(f"{text_before:<15}{line}")
    return texts


def describe_division(topic: str, config: TrainConfig, layout: Layout) -> list[str]:
    """Describe how ranks that see the same samples divide the work, in lines; empty if every rank has its own samples.

    The topic "samples" says which tokens each rank has, and "stages" which blocks of the model. "warning" warns of
    ranks that exchange data in every block and are on different nodes. The companion llmfoundry_layouts, which divides
    models and samples, has the texts.
    """
    if layout.ranks_per_data_rank == 1:
        return []
    needed_for = "tp_config, cp_config and pp_config"
    descriptions = companions.load("llmfoundry_layouts.description:DESCRIPTIONS", needed_for)
    return descriptions[topic](config, layout)


def _describe_variable(name: str, value: str) -> str:
    """Describe an environment variable that the configuration sets to `value`, as NAME=VALUE.

    A variable that the shell has set keeps the shell's value, which the description then says. The values of secrets
    are hidden.
    """
    # A value that the YAML takes from another variable is described as it was written: ${oc.env:NAME}.
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


def _describe_duration(config: TrainConfig, findings: Preflight) -> str:
    """Return max_duration in other units, to be appended to its own text: ` = 4,800 batches, 10.07 G tokens, …`.

    Epochs are included if the samples could be counted, and hours if the YAML has a variable tokens_per_second. The
    text is empty if the number of batches is unknown, as for epochs of data that is not on this machine.
    """
    num_batches = _count_batches(config, findings)
    if not num_batches:
        return ""

    num_samples_of_run = config.batch_sizes.sum_before(num_batches)
    num_tokens = num_samples_of_run * config.max_seq_len
    description = f" = {num_batches:,} batches, {_with_prefix(num_tokens)} tokens"
    num_samples = count_epoch_samples(config, findings)
    if num_samples:
        num_epochs = num_samples_of_run / num_samples
        description += f", {num_epochs:,.2f} epochs"
        if num_epochs > MANY_EPOCHS:
            description += ", which learn this text by heart: it is too short for the run"

    # `llmfoundry-lite init --hours` measures the speed, and writes it into the YAML. Users may write anything there.
    tokens_per_second = config.variables.get("tokens_per_second")
    if isinstance(tokens_per_second, int | float) and tokens_per_second > 0:
        num_hours = num_tokens / tokens_per_second / 3600
        description += f", {num_hours:,.2g} hours at {tokens_per_second:,} tokens per second"
    return description


def _count_batches(config: TrainConfig, findings: Preflight) -> int:
    """Return the number of batches of a run, or 0 if it is unknown, as for epochs of data that is not on this machine.

    A last batch that is not full counts as one.
    """
    if config.num_batches is not None:
        return config.num_batches

    num_samples = count_epoch_samples(config, findings) or 0
    if not config.train_loader.drop_last:
        num_samples += config.global_train_batch_size - 1
    return int(config.max_duration.value) * (num_samples // config.global_train_batch_size)


def _with_prefix(number: float) -> str:
    """Return a number as text with a metric prefix and two decimals: `1.23 M` for 1234567."""
    for prefix, factor in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= factor:
            return f"{number / factor:,.2f} {prefix}"
    return f"{number:,.0f}"
