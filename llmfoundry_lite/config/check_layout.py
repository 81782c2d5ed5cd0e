"""Whether a run can be divided as tp_config, cp_config and pp_config ask, and its batch among so many devices.

Leaves the arithmetic of a division to `layout.py`, and that of stages to `stages.py`.
"""

import dataclasses
import math
from collections.abc import Sequence

from llmfoundry_lite.config.check_values import Refuse, either
from llmfoundry_lite.config.layout import DEGREE_KEYS, Layout, divisors, name_data_ranks
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.config.stages import takes_microbatches
from llmfoundry_lite.errors import ConfigError


def check_layout(config: TrainConfig, refuse: Refuse) -> None:
    """What holds on any number of devices; `check_batch` knows how many there are."""
    if config.tensor_parallel_degree > 1:
        _check_tensor_parallel(config, refuse)
    if config.context.context_parallel_degree > 1:
        _check_context_parallel(config, refuse)
    if config.pp_config is not None:
        _check_pipeline(config, refuse)


def find_undivided(config: TrainConfig) -> dict[str, str]:
    """Block -> what it says about a division that a degree of 1 does not make.

    Allowed, for the same YAML may run on a smaller cluster with nothing but its degree set to 1.
    """
    found = {}
    for degree_key in DEGREE_KEYS.values():
        block, _, degree = degree_key.partition(".")
        section = getattr(config, block)
        if section is not None and getattr(section, degree) == 1:
            fields = [field for field in dataclasses.fields(section) if field.name != degree]
            idle = [field.name for field in fields if getattr(section, field.name) != field.default]
            if idle:
                found[block] = f"{', '.join(idle)} without effect, for {degree} is 1"
    return found


def check_batch(config: TrainConfig, layout: Layout) -> None:
    """Check that the devices can share a batch. Raises ConfigError."""
    batch, microbatch = config.global_train_batch_size, config.device_train_microbatch_size
    num_ranks, devices = layout.num_data_ranks, name_data_ranks(layout)
    if batch % num_ranks:
        divisors = [str(n) for n in range(1, min(batch, 4 * num_ranks) + 1) if batch % n == 0]
        raise ConfigError(
            f"global_train_batch_size: {batch} cannot be shared evenly by {num_ranks} {devices}; "
            f"start with a number of {devices} that divides it ({', '.join(divisors)}) or change the batch size"
        )
    if isinstance(microbatch, int) and microbatch > batch // num_ranks:
        raise ConfigError(
            f"device_train_microbatch_size: {microbatch} is more than the {batch // num_ranks} samples "
            f"each device gets ({batch} / {num_ranks} {devices}); set it to {batch // num_ranks} or less"
        )
    if layout.pipeline > 1:
        _check_microbatches(config, layout, batch // num_ranks)


def _check_microbatches(config: TrainConfig, layout: Layout, num_samples: int) -> None:
    """A schedule needs as many microbatches as there are stages; interleaved ones, the same number in each round."""
    pipeline, size = config.pipeline, config.device_train_microbatch_size
    what = f"{num_samples} samples of a data rank through {layout.pipeline} stages of {pipeline.schedule}"
    fitting = [count for count in divisors(num_samples) if takes_microbatches(pipeline, count)]
    count = -(-num_samples // config.first_microbatch_size(num_samples))
    if size == "auto":
        fits = any(takes_microbatches(pipeline, n) for n in range(1, count + 1))
    elif size is None and pipeline.num_microbatches is not None:
        count, fits = pipeline.num_microbatches, pipeline.num_microbatches in fitting
    else:
        fits = takes_microbatches(pipeline, count)
    if fits:
        return
    fitting_sizes = [n for n in range(num_samples, 0, -1) if takes_microbatches(pipeline, -(-num_samples // n))]
    if not fitting_sizes:
        raise ConfigError(
            f"global_train_batch_size: {what} fit no number of microbatches; use a batch that gives a data rank a "
            f"multiple of {layout.pipeline} samples, or schedule: gpipe"
        )
    sizes = either([str(n) for n in [num_samples // count for count in reversed(fitting)] or fitting_sizes[:8]])
    if size is None:
        counts = either([str(n) for n in fitting]) if fitting else f"device_train_microbatch_size: {sizes}"
        raise ConfigError(f"pp_config.num_microbatches: {count} does not fit {what}; use {counts}")
    raise ConfigError(
        f"device_train_microbatch_size: {size} makes {count} microbatch(es) of {what}, which does not fit; use {sizes}"
    )


def _check_tensor_parallel(config: TrainConfig, refuse: Refuse) -> None:
    """Layers are divided by heads, and by the feed-forward layer's width; each device gets as many as the others. Of
    the vocabulary the last one may get less."""
    model, degree = config.model, config.tensor_parallel_degree
    sizes = {"model.n_heads": model.n_heads, "the heads of keys and values": model.num_kv_heads}
    for name, size in (*sizes.items(), ("the width of the feed-forward layer", model.ffn_dim)):
        if size % degree:
            most = math.gcd(model.n_heads, model.num_kv_heads, model.ffn_dim)
            divisors = either([str(n) for n in range(1, most + 1) if most % n == 0])
            refuse("tp_config.tensor_parallel_degree", f"{degree} does not divide {name}, {size}; use {divisors}")
    if (degree - 1) * -(-model.vocab_size // degree) >= model.vocab_size:
        refuse(
            "tp_config.tensor_parallel_degree", f"{degree} devices cannot share model.vocab_size, {model.vocab_size}"
        )
    parts = config.context.context_parallel_degree
    for name, length in lengths_of(config).items() if config.sequence_parallel else ():
        if length % (parts * degree):
            among = f"{degree} and cp_config's {parts}" if parts > 1 else str(degree)
            refuse(
                "tp_config.sequence_parallel",
                f"sequences of {name}, {length}, cannot be divided by {among}; change the length or the degree, or "
                "remove it",
            )
    if model.attn_config.qk_ln:
        refuse(
            "model.attn_config.qk_ln",
            "a norm over all heads, which tp_config divides among devices; use qk_gn: true, a norm over each head",
        )
    if config.compile_config is not None and model.attn_config.attn_pdrop and not config.sequence_parallel:
        refuse(
            "model.attn_config.attn_pdrop",
            "cannot be compiled where tp_config divides layers and not the stream; set it to 0, or "
            "tp_config.sequence_parallel to true, or use no compile_config",
        )
    _check_shared_loaders(config, "tp_config", "neighbouring devices", refuse)


def _check_context_parallel(config: TrainConfig, refuse: Refuse) -> None:
    """Samples are cut into equal pieces; `heads` also gives each device equally many heads."""
    model, context, tensor = config.model, config.context, config.tensor_parallel_degree
    degree, key = context.context_parallel_degree, "cp_config.context_parallel_degree"
    lengths = lengths_of(config)
    shortest = math.gcd(*lengths.values())
    for name, length in lengths.items():
        if length % context.num_pieces:
            pieces = f"{degree}, of which each has two pieces," if context.kind == "gather" else str(degree)
            heads = math.gcd(model.n_heads, model.num_kv_heads) // tensor if context.kind == "heads" else shortest
            shares = divisors(math.gcd(shortest, heads))[1:]
            fitting = [str(n) for n in shares if shortest % (n * context.num_pieces // degree) == 0]
            refuse(key, f"{pieces} does not divide {name}, {length}; use {either(fitting[:8] or ['another length'])}")
    sizes = {"model.n_heads": model.n_heads, "the heads of keys and values": model.num_kv_heads}
    for name, size in sizes.items() if context.kind == "heads" else ():
        if size % (tensor * degree):
            among = f"{degree}" if tensor == 1 else f"{degree} x {tensor} of tp_config"
            fitting = [str(n) for n in divisors(math.gcd(*sizes.values()) // tensor)[1:]]
            smaller = f", or a degree of {either(fitting)}" if fitting else ""
            refuse(key, f"{among} does not divide {name}, {size}; use cp_config.kind: gather{smaller}")
    _check_shared_loaders(config, "cp_config", "the devices of a sample", refuse)


def lengths_of(config: TrainConfig) -> dict[str, int]:
    """Tokens of the sequences that there will be, by the key that says so."""
    lengths = {"max_seq_len": config.max_seq_len}
    for block, loader in config.loaders.items():
        if loader.dataset.max_seq_len is not None:
            lengths[f"{block}.dataset.max_seq_len"] = loader.dataset.max_seq_len
    return lengths


def _check_pipeline(config: TrainConfig, refuse: Refuse) -> None:
    """Schedules against stages, and what does not go with stages."""
    pipeline, fsdp = config.pipeline, config.sharding
    degree, schedule, num_runs = pipeline.pipeline_parallel_degree, pipeline.schedule, pipeline.num_runs
    most = {"gpipe": 1, "1f1b": 1, "zbv": 2}.get(schedule, num_runs)
    least = {"interleaved": 2, "zbv": 2}.get(schedule, 1)
    if not least <= num_runs <= most:
        expected = str(least) if least == most else f"{least} or more"
        refuse("pp_config.virtual_stages", f"{num_runs} given, {schedule} has {expected}; change it or the schedule")
    if pipeline.blocks is not None:
        _check_blocks(pipeline.blocks, config.model.n_layers, refuse)
    if degree == 1:
        return
    if degree * num_runs > config.model.n_layers:
        refuse(
            "pp_config.pipeline_parallel_degree",
            f"{degree} x {num_runs} runs of blocks are more than model.n_layers, {config.model.n_layers}; "
            f"use a smaller degree{'' if num_runs == least else ' or fewer virtual_stages'}",
        )
    if pipeline.blocks is not None and len(pipeline.blocks) != degree * num_runs:
        what = f"{degree} stages" if num_runs == 1 else f"{degree} x {num_runs} runs of blocks"
        refuse("pp_config.blocks", f"{pipeline.blocks} given, expected {degree * num_runs} counts, for {what}")
    if pipeline.num_microbatches is not None and config.device_train_microbatch_size is not None:
        refuse("pp_config.num_microbatches", "both it and device_train_microbatch_size given; use one of them")
    if pipeline.splits_backward and config.compile_config is not None:
        refuse(
            "pp_config.schedule",
            f"{schedule} computes the weights' gradients apart, which torch cannot compile; use interleaved or 1f1b, "
            "or no compile_config",
        )
    if pipeline.splits_backward and fsdp.activation_checkpointing:
        refuse(
            "pp_config.schedule",
            f"{schedule} computes the weights' gradients apart, and activation_checkpointing would compute each block "
            "twice for that; use interleaved or 1f1b, or no activation_checkpointing",
        )
    if schedule == "zbv" and config.model.tie_word_embeddings:
        refuse(
            "pp_config.schedule",
            "zbv has the first and the last stage on one device, where tied embeddings would be two; use zero_bubble",
        )
    if fsdp.reduce_every_microbatch:
        refuse(
            "fsdp_config.reduce_every_microbatch",
            "a stage sums its gradients over devices once, when its schedule is done; remove it, or pp_config",
        )
    for key in ("offload_optimizer", "activation_checkpointing_reentrant"):
        if getattr(fsdp, key):
            refuse(f"fsdp_config.{key}", "does not go with pp_config; remove one of them")
    _check_shared_loaders(config, "pp_config", "the devices of all stages", refuse)


def _check_blocks(blocks: Sequence[int], n_layers: int, refuse: Refuse) -> None:
    """What holds for any degree."""
    given = f"{list(blocks)} given"
    if min(blocks, default=0) < 1:
        refuse("pp_config.blocks", f"{given}, expected 1 or more for each")
    if sum(blocks) != n_layers:
        refuse(
            "pp_config.blocks", f"{given}, {sum(blocks)} in all, and model.n_layers is {n_layers}; change one of them"
        )


def _check_shared_loaders(config: TrainConfig, cause: str, readers: str, refuse: Refuse) -> None:
    for block, loader in config.loaders.items():
        if loader.name.startswith("python:"):
            refuse(
                f"{block}.name",
                f"{loader.name} cannot know that with {cause} {readers} must read the same samples; "
                f"use text, or no {cause}",
            )
