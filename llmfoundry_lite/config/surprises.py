"""Find settings of a training configuration that are allowed but perhaps not meant, and warn of them.

`check.py` refuses what does not go together. Nothing here refuses anything.
"""

import dataclasses
import json
import shlex
from collections.abc import Iterator, Sequence

from llmfoundry_lite.config.counted_model import counted_model
from llmfoundry_lite.config.fields import as_yaml
from llmfoundry_lite.config.layers import ConfigLayer, source_of
from llmfoundry_lite.config.layout import DEGREE_KEYS
from llmfoundry_lite.config.optimizer_schema import SchedulerConfig
from llmfoundry_lite.config.schedules import SCHEDULES
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.config.uses import note_unused_keys
from llmfoundry_lite.own_code import is_own

TOKENIZER_OPTIONS = ("model_max_length", "pad_token", "padding_side", "use_fast")
"""LLM Foundry's options that are checked, or that change no token id."""

ALERT_SECONDS = 5
"""Time that the end of a launch waits for its last alert, after `preemption_grace_seconds`."""
MAX_GRACE_SECONDS = 25
"""`composer` (its launcher's CLEANUP_TIMEOUT) and torchrun give their ranks 30 seconds from the first signal."""

Surprise = tuple[str, str]
"""A dotted key, and what is surprising about it: the text that follows the key in the warning."""


def find_surprises(
    config: TrainConfig, layers: Sequence[ConfigLayer], *, under_srun: bool = False, has_several_ranks: bool = False
) -> list[str]:
    """Return a warning for each setting that is allowed but perhaps not meant, with the file that sets it.

    `under_srun` says whether SLURM's srun has started the ranks. Other launchers kill their ranks soon after a signal.
    A warning about a model that is not sharded is only for a launch that `has_several_ranks`.
    """
    surprises = [
        *_find_bare_numbers(config, layers),
        *_find_long_spans(config.max_duration, config.scheduler),
        *_find_late_sizes(config),
        *_find_ignored_options(config),
        *_find_small_shuffles(config),
        *_find_needs_of_fsdp(config),
        *_find_evaluations_elsewhere(config),
    ]
    if not under_srun:
        surprises += _find_long_grace(config)
    if has_several_ranks:
        surprises += _find_copied_layers(config)
    warnings = [f"{source_of(key, layers)}: {key}{text}" for key, text in surprises]

    warnings += note_unused_keys(config, layers)
    # A user who has not asked for compilation wonders why the first batch takes minutes.
    layers_with_compilation = [layer for layer in layers if "compile_config" in layer.values]
    if layers_with_compilation and config.compile_config is not None:
        last_layer = layers_with_compilation[-1]
        if last_layer.is_overlay:
            warnings.append(
                f"{last_layer.source}: compile_config: compiles during the first batch; without: compile_config=null"
            )
    return warnings


def _find_bare_numbers(config: TrainConfig, layers: Sequence[ConfigLayer]) -> Iterator[Surprise]:
    """Yield durations without a unit, such as `max_duration: 5`. They count epochs, and batches may be meant."""
    for key in ("max_duration", "eval_interval", "save_interval"):
        value = getattr(config, key).written
        is_given = any(key in layer.values for layer in layers)
        if is_given and isinstance(value, int) and value > 0:
            yield key, f": {value} counts epochs; {value} batches are {value}ba"


def _find_long_spans(run: Duration, schedule: SchedulerConfig) -> Iterator[Surprise]:
    """Yield durations of the schedule that are longer than the run, so that a part of the schedule is never reached."""
    meanings = {"t_warmup": "the learning rate never reaches lr", "t_max": "the schedule does not end"}
    if schedule.name in SCHEDULES and not SCHEDULES[schedule.name].has_end:
        del meanings["t_max"]
    for key, meaning in meanings.items():
        duration: Duration = getattr(schedule, key)
        is_fraction_above_1 = duration.unit == "dur" and duration.value > 1
        is_longer = duration.unit == run.unit and duration.value > run.value
        if is_fraction_above_1 or is_longer:
            yield f"scheduler.{key}", f": {duration} is longer than the run, {run}: {meaning}"


def _find_late_sizes(config: TrainConfig) -> Iterator[Surprise]:
    """Yield sizes of batches, and lengths of rows, that begin when the run has ended."""
    if config.max_duration.unit != "ba":
        return
    for key in ("batch_size_schedule", "seq_len_schedule"):
        schedule = getattr(config, key)
        steps = () if schedule is None else schedule.steps
        for first_batch, value in steps:
            if first_batch >= config.max_duration.value:
                yield key, f": {value} from {first_batch}ba on has no effect: the run ends at {config.max_duration}"


def _find_copied_layers(config: TrainConfig) -> Iterator[Surprise]:
    """Yield a layer of the user's own in a model that is not sharded, by a default that counts it like a layer of ours.

    Unless its class says what it is like, its size is not known before it is built, and a large one may not fit on a
    device.
    """
    if config.fsdp_config is not None or config.sharding.sharding_strategy != "NO_SHARD":
        return
    unknown_parts = counted_model(config.model).own_parts
    for key in ("attn_config.attn_type", "ffn_config.ffn_type"):
        name = unknown_parts.get(key)
        if name is not None:
            yield (
                f"model.{key}",
                f": {name} is taken to be as large as a layer of ours, with which each device has the whole model; if "
                "it is much larger, set fsdp_config.sharding_strategy=FULL_SHARD",
            )


def _find_evaluations_elsewhere(config: TrainConfig) -> Iterator[Surprise]:
    """Yield LLM Foundry's `async_eval`, which starts no job here, with the command to run instead."""
    if config.callbacks.async_eval is not None:
        command = describe_follow_command(config)
        yield (
            "callbacks.async_eval",
            f" starts no evaluation here; on any machine that can read the checkpoints, run: {command}",
        )


def describe_follow_command(config: TrainConfig) -> str:
    """Return the command that evaluates the checkpoints of a run on its `icl_tasks`, as they appear.

    It can be pasted into a shell: `llmfoundry-lite eval follow=true models.mpt-1b=runs/mpt-1b icl_tasks=…`.
    """
    name = config.run_name.replace(".", "_")  # a dot would begin another key
    source = config.save_folder or config.run_folder
    tasks = config.icl_tasks if isinstance(config.icl_tasks, str) else json.dumps(as_yaml(config.icl_tasks))
    words = ["llmfoundry-lite", "eval", "follow=true", f"models.{name}={source}", f"icl_tasks={tasks}"]
    if config.icl_task_folder != "evals":
        words.append(f"task_folder={config.icl_task_folder}")
    if config.icl_limit is not None:
        words.append(f"limit={config.icl_limit}")
    if config.model.own_parts:
        words.append("trust_code=true")  # the checkpoints name the user's own code
    return shlex.join(words)


def _find_ignored_options(config: TrainConfig) -> Iterator[Surprise]:
    """Yield options of the tokenizer that are ignored, and options of parallelism whose degree is 1."""
    for name in config.tokenizer.kwargs:
        is_argument = is_own(config.tokenizer.name)
        if name not in TOKENIZER_OPTIONS and not is_argument:
            yield f"tokenizer.kwargs.{name}", " has no effect: the tokenizer's own files decide"
    for block, text in _find_undivided(config).items():
        yield block, f": {text}"


def _find_undivided(config: TrainConfig) -> dict[str, str]:
    """Return block name -> text about its keys without effect, for tp_config, cp_config and pp_config at degree 1.

    Such keys are allowed, so that setting the degree to 1 is enough to run the same YAML on a smaller cluster.
    """
    text_by_block = {}
    for degree_key in DEGREE_KEYS.values():
        block_name, _, degree = degree_key.partition(".")
        block = getattr(config, block_name)
        if block is None or getattr(block, degree) != 1:
            continue
        other_fields = [field for field in dataclasses.fields(block) if field.name != degree]
        changed_keys = [field.name for field in other_fields if getattr(block, field.name) != field.default]
        if changed_keys:
            text_by_block[block_name] = f"{', '.join(changed_keys)} without effect, for {degree} is 1"
    return text_by_block


def _find_small_shuffles(config: TrainConfig) -> Iterator[Surprise]:
    """Yield a shuffle_block_size of less than two batches, with which a batch's samples are neighbours in a shard."""
    dataset, batch_size = config.train_loader.dataset, config.global_train_batch_size
    block_size = dataset.shuffle_block_size
    if dataset.shuffle and block_size is not None and block_size < 2 * batch_size:
        yield (
            "train_loader.dataset.shuffle_block_size",
            f": {block_size} is less than two batches of {batch_size}: shards are shuffled, their samples "
            f"are not; set it to {100 * batch_size} or more, or leave it out",
        )


def _find_needs_of_fsdp(config: TrainConfig) -> Iterator[Surprise]:
    """Yield `plain_on_one_device`, which does without FSDP2 on one device, for each setting that needs FSDP2 there."""
    if not config.sharding.plain_on_one_device:
        return
    is_16_bits = config.precision.startswith("amp_") and config.sharding.mixed_precision != "FULL"
    needs_fsdp = {
        "fsdp_config.offload_optimizer": config.sharding.offload_optimizer,
        "exact_sums in 16 bits": config.exact_sums and is_16_bits,
        "pp_config": config.pipeline.pipeline_parallel_degree > 1,
        "activation_checkpointing of compiled blocks": (
            config.sharding.activation_checkpointing and config.compile_config is not None
        ),
    }
    for setting, is_asked_for in needs_fsdp.items():
        if is_asked_for:
            yield "fsdp_config.plain_on_one_device", f" has no effect: {setting} needs FSDP2 on one device too"


def _find_long_grace(config: TrainConfig) -> Iterator[Surprise]:
    """Yield a preemption_grace_seconds that is longer than launchers wait before they kill their ranks."""
    grace_seconds = config.preemption_grace_seconds
    max_seconds = MAX_GRACE_SECONDS
    reason = "leaves them time"
    if config.alerts is not None:
        max_seconds -= ALERT_SECONDS
        reason += " for the last alert"
    if grace_seconds > max_seconds:
        yield (
            "preemption_grace_seconds",
            f": {grace_seconds:g} is for srun alone; `composer` and `torchrun` kill after 30 s ({max_seconds} or less "
            f"{reason})",
        )
