"""Checks that tp_config, cp_config and pp_config can divide a model. No torch.

`config/layout.py` has the arithmetic of a division, `stages.py` that of stages.
"""

import math
from collections.abc import Iterator

from llmfoundry_layouts.pieces import count_pieces
from llmfoundry_lite.config.check import refuse
from llmfoundry_lite.config.layout import Layout
from llmfoundry_lite.config.model_schema import divisors
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.config.sharding_schema import FSDPConfig, PipelineConfig
from llmfoundry_lite.errors import ConfigError, either


def check_division(config: TrainConfig) -> None:
    """Check the rules that hold on any number of devices. Raises ConfigError."""
    if config.tensor_parallel_degree > 1:
        _check_tensor_parallel(config)
    if config.context.context_parallel_degree > 1:
        _check_context_parallel(config)
    refuse(find_problems(config.pipeline, config.model.n_layers), "pp_config")
    if config.pipeline.pipeline_parallel_degree > 1:
        _check_beside_pipeline(config, config.pipeline, config.sharding)


def check_microbatches(config: TrainConfig, layout: Layout, num_samples: int) -> None:
    """Check that there are microbatches for all stages; interleaved schedules need equal rounds."""
    pipeline, size = config.pipeline, config.device_train_microbatch_size
    what = f"{num_samples} samples of a data rank through {layout.pipeline} stages of {pipeline.schedule}"
    fitting = [count for count in divisors(num_samples) if pipeline.takes_microbatches(count)]
    count = -(-num_samples // config.first_microbatch_size(num_samples))
    if size == "auto":
        fits = any(pipeline.takes_microbatches(n) for n in range(1, count + 1))
    elif size is None and pipeline.num_microbatches is not None:
        count, fits = pipeline.num_microbatches, pipeline.num_microbatches in fitting
    else:
        fits = pipeline.takes_microbatches(count)
    if fits:
        return
    fitting_sizes = [n for n in range(num_samples, 0, -1) if pipeline.takes_microbatches(-(-num_samples // n))]
    if not fitting_sizes:
        raise ConfigError(
            f"global_train_batch_size: {what} fit no number of microbatches; use a batch that gives a data rank a "
            f"multiple of {layout.pipeline} samples, or schedule: gpipe"
        )
    sizes = either([num_samples // count for count in reversed(fitting)] or fitting_sizes[:8])
    if size is None:
        counts = either(fitting) if fitting else f"device_train_microbatch_size: {sizes}"
        raise ConfigError(f"pp_config.num_microbatches: {count} does not fit {what}; use {counts}")
    raise ConfigError(
        f"device_train_microbatch_size: {size} makes {count} microbatch(es) of {what}, which does not fit; use {sizes}"
    )


# ------------------------------------------------------------------------------------- tensors and tokens


def _check_tensor_parallel(config: TrainConfig) -> None:
    """Check that devices get equally many heads and equal feed-forward widths; the last may get less vocabulary."""
    model, degree, key = config.model, config.tensor_parallel_degree, "tp_config.tensor_parallel_degree"
    sizes = _heads(config) | {"the width of the feed-forward layer": model.ffn_dim}
    for name, size in sizes.items():
        if size % degree:
            raise ConfigError(
                f"{key}: {degree} does not divide {name}, {size}; use {either(divisors(math.gcd(*sizes.values())))}"
            )
    if (degree - 1) * -(-model.vocab_size // degree) >= model.vocab_size:
        raise ConfigError(f"{key}: {degree} devices cannot share model.vocab_size, {model.vocab_size}")
    parts = config.context.context_parallel_degree
    for name, length in lengths_of(config).items() if config.sequence_parallel else ():
        if length % (parts * degree):
            among = f"{degree} and cp_config's {parts}" if parts > 1 else str(degree)
            raise ConfigError(
                f"tp_config.sequence_parallel: sequences of {name}, {length}, cannot be divided by {among}; change "
                "the length or the degree, or remove it"
            )
    if model.attn_config.qk_ln:
        raise ConfigError(
            "model.attn_config.qk_ln: a norm over all heads, which tp_config divides among devices; use qk_gn: true, a "
            "norm over each head"
        )
    if config.compile_config is not None and model.attn_config.attn_pdrop and not config.sequence_parallel:
        raise ConfigError(
            "model.attn_config.attn_pdrop: cannot be compiled where tp_config divides layers and not the stream; set "
            "it to 0, or tp_config.sequence_parallel to true, or use compile_config: null"
        )
    _check_shared_loaders(config, "tp_config", "neighbouring devices")


def _check_context_parallel(config: TrainConfig) -> None:
    """Check that samples are cut into equal pieces; with `heads` devices also get equally many heads."""
    context, tensor = config.context, config.tensor_parallel_degree
    degree, key = context.context_parallel_degree, "cp_config.context_parallel_degree"
    lengths, heads, num_pieces = lengths_of(config), _heads(config), count_pieces(context)
    num_heads, shortest = math.gcd(*heads.values()) // tensor, math.gcd(*lengths.values())
    for name, length in lengths.items():
        if length % num_pieces:
            pieces = f"{degree}, of which each has two pieces," if context.kind == "gather" else str(degree)
            shares = divisors(math.gcd(shortest, num_heads) if context.kind == "heads" else shortest)[1:]
            fitting = [n for n in shares if shortest % (n * num_pieces // degree) == 0][:8]
            raise ConfigError(
                f"{key}: {pieces} does not divide {name}, {length}; use {either(fitting or ['another length'])}"
            )
    for name, size in heads.items() if context.kind == "heads" else ():
        if size % (tensor * degree):
            among = f"{degree}" if tensor == 1 else f"{degree} x {tensor} of tp_config"
            fitting = divisors(num_heads)[1:]
            smaller = f", or a degree of {either(fitting)}" if fitting else ""
            raise ConfigError(f"{key}: {among} does not divide {name}, {size}; use cp_config.kind: gather{smaller}")
    _check_shared_loaders(config, "cp_config", "the devices of a sample")


def _heads(config: TrainConfig) -> dict[str, int]:
    return {"model.n_heads": config.model.n_heads, "the heads of keys and values": config.model.num_kv_heads}


def lengths_of(config: TrainConfig) -> dict[str, int]:
    """Return key -> tokens, for each key that decides the length of some sequences."""
    lengths = {f"{block}.dataset.max_seq_len": loader.dataset.max_seq_len for block, loader in config.loaders.items()}
    return {"max_seq_len": config.max_seq_len} | {key: length for key, length in lengths.items() if length is not None}


# ------------------------------------------------------------------------------------------------ stages


def find_problems(pipeline: PipelineConfig, n_layers: int) -> Iterator[str]:
    """Yield `key: what is wrong` for runs of blocks that do not suit the schedule or the number of layers."""
    degree, num_runs, blocks = pipeline.pipeline_parallel_degree, pipeline.num_runs, pipeline.blocks
    most = {"gpipe": 1, "1f1b": 1, "zbv": 2}.get(pipeline.schedule, num_runs)
    least = {"interleaved": 2, "zbv": 2}.get(pipeline.schedule, 1)
    if not least <= num_runs <= most:
        expected = str(least) if least == most else f"{least} or more"
        yield f"virtual_stages: {num_runs} given, {pipeline.schedule} has {expected}; change it or the schedule"
    if blocks is not None and min(blocks, default=0) < 1:
        yield f"blocks: {blocks} given, expected 1 or more for each"
    if blocks is not None and sum(blocks) != n_layers:
        remedy = "change one of them"
        yield f"blocks: {blocks} given, {sum(blocks)} in all, and model.n_layers is {n_layers}; {remedy}"
    if degree > 1 and degree * num_runs > n_layers:
        remedy = "use a smaller degree" + ("" if num_runs == least else " or fewer virtual_stages")
        runs = f"{degree} x {num_runs} runs of blocks"
        yield f"pipeline_parallel_degree: {runs} are more than model.n_layers, {n_layers}; {remedy}"
    if degree > 1 and blocks is not None and len(blocks) != degree * num_runs:
        what = f"{degree} stages" if num_runs == 1 else f"{degree} x {num_runs} runs of blocks"
        yield f"blocks: {blocks} given, expected {degree * num_runs} counts, for {what}"


def _check_beside_pipeline(config: TrainConfig, pipeline: PipelineConfig, fsdp: FSDPConfig) -> None:
    schedule = pipeline.schedule
    if pipeline.num_microbatches is not None and config.device_train_microbatch_size is not None:
        raise ConfigError("pp_config.num_microbatches: both it and device_train_microbatch_size given; use one of them")
    if pipeline.splits_backward and config.compile_config is not None:
        raise ConfigError(
            f"pp_config.schedule: {schedule} computes the weights' gradients apart, which torch cannot compile; use "
            "interleaved or 1f1b, or compile_config: null"
        )
    if pipeline.splits_backward and fsdp.activation_checkpointing:
        raise ConfigError(
            f"pp_config.schedule: {schedule} computes the weights' gradients apart, and activation_checkpointing would "
            "compute each block twice for that; use interleaved or 1f1b, or no activation_checkpointing"
        )
    if schedule == "zbv" and config.model.tie_word_embeddings:
        raise ConfigError(
            "pp_config.schedule: zbv has the first and the last stage on one device, where tied embeddings would be "
            "two; use zero_bubble"
        )
    if fsdp.reduce_every_microbatch:
        raise ConfigError(
            "fsdp_config.reduce_every_microbatch: a stage sums its gradients over devices once, when its schedule is "
            "done; remove it, or pp_config"
        )
    for key in ("offload_optimizer", "activation_checkpointing_reentrant"):
        if getattr(fsdp, key):
            raise ConfigError(f"fsdp_config.{key}: does not go with pp_config; remove one of them")
    _check_shared_loaders(config, "pp_config", "the devices of all stages")


def _check_shared_loaders(config: TrainConfig, cause: str, readers: str) -> None:
    for block, loader in config.loaders.items():
        if loader.name.startswith("python:"):
            raise ConfigError(
                f"{block}.name: {loader.name} cannot know that with {cause} {readers} must read the same samples; "
                f"use text, or no {cause}"
            )
