"""Checks that tp_config, cp_config and pp_config can divide a model. No torch.

`config/layout.py` has the arithmetic of a division, `stages.py` that of stages.
"""

import math
from collections.abc import Iterator

from llmfoundry_layouts.pieces import count_pieces
from llmfoundry_lite.config.check import raise_first_problem
from llmfoundry_lite.config.layout import Layout
from llmfoundry_lite.config.model_schema import divisors
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.config.sharding_schema import FSDPConfig, PipelineConfig
from llmfoundry_lite.errors import ConfigError, join_with_or
from llmfoundry_lite.own_code import is_own

MAX_SUGGESTIONS = 8
"""Numbers that an error suggests."""


def check_division(config: TrainConfig) -> None:
    """Check the rules that hold on any number of devices. Raises ConfigError."""
    if config.tensor_parallel_degree > 1:
        _check_tensor_parallel(config)
    if config.context.context_parallel_degree > 1:
        _check_context_parallel(config)
    raise_first_problem(find_problems(config.pipeline, config.model.n_layers), "pp_config")
    if config.pipeline.pipeline_parallel_degree > 1:
        _check_beside_pipeline(config, config.pipeline, config.sharding)


def check_microbatches(config: TrainConfig, layout: Layout, num_samples: int) -> None:
    """Check that the schedule takes the number of microbatches into which a batch is cut.

    `num_samples` is the number of a batch's samples on one data rank. The number of microbatches follows from
    `device_train_microbatch_size` or from `pp_config.num_microbatches`. Most schedules need at least as many as there
    are stages, and interleaved ones need rounds of equal size.

    Raises ConfigError that names the numbers that fit.
    """
    pipeline = config.pipeline
    size = config.device_train_microbatch_size
    num_microbatches = -(-num_samples // config.first_microbatch_size(num_samples))
    fitting_counts = [count for count in divisors(num_samples) if pipeline.takes_microbatches(count)]
    if size == "auto":
        # The run measures which size fits, beginning with one sample. So one number that the schedule takes is enough.
        fits = any(pipeline.takes_microbatches(count) for count in range(1, num_microbatches + 1))
    elif size is None and pipeline.num_microbatches is not None:
        num_microbatches = pipeline.num_microbatches
        fits = num_microbatches in fitting_counts
    else:
        fits = pipeline.takes_microbatches(num_microbatches)
    if fits:
        return

    subject = f"{num_samples} samples of a data rank through {layout.pipeline} stages of {pipeline.schedule}"
    fitting_sizes: list[int] = []
    for candidate in range(num_samples, 0, -1):
        if pipeline.takes_microbatches(-(-num_samples // candidate)):
            fitting_sizes.append(candidate)
    if not fitting_sizes:
        raise ConfigError(
            f"global_train_batch_size: {subject} fit no number of microbatches; use a batch that gives a data rank a "
            f"multiple of {layout.pipeline} samples, or schedule: gpipe"
        )

    # Sizes that divide the samples evenly are better, because the others need rows of padding.
    even_sizes = [num_samples // count for count in reversed(fitting_counts)]
    sizes = join_with_or(even_sizes or fitting_sizes[:MAX_SUGGESTIONS])
    if size is None:
        remedy = join_with_or(fitting_counts) if fitting_counts else f"device_train_microbatch_size: {sizes}"
        raise ConfigError(f"pp_config.num_microbatches: {num_microbatches} does not fit {subject}; use {remedy}")
    raise ConfigError(
        f"device_train_microbatch_size: {size} makes {num_microbatches} microbatch(es) of {subject}, which does not "
        f"fit; use {sizes}"
    )


# ------------------------------------------------------------------------------------- tensors and tokens


def _check_tensor_parallel(config: TrainConfig) -> None:
    """Check that tp_config can divide the model. Raises ConfigError.

    Every device of a group gets equally many heads, an equal part of the feed-forward width and, with sequence
    parallelism, of each sequence. The last device may get less of the vocabulary, but not nothing.
    """
    model = config.model
    degree = config.tensor_parallel_degree
    key = "tp_config.tensor_parallel_degree"
    sizes = _count_heads(config) | {"the width of the feed-forward layer": model.ffn_dim}
    for name, size in sizes.items():
        if size % degree:
            fitting = join_with_or(divisors(math.gcd(*sizes.values())))
            raise ConfigError(f"{key}: {degree} does not divide {name}, {size}; use {fitting}")

    rows_per_device = -(-model.vocab_size // degree)
    is_last_device_empty = (degree - 1) * rows_per_device >= model.vocab_size
    if is_last_device_empty:
        raise ConfigError(f"{key}: {degree} devices cannot share model.vocab_size, {model.vocab_size}")

    if config.sequence_parallel:
        context_degree = config.context.context_parallel_degree
        for name, length in lengths_of(config).items():
            if length % (context_degree * degree):
                divisor = str(degree)
                if context_degree > 1:
                    divisor = f"{degree} and cp_config's {context_degree}"
                raise ConfigError(
                    f"tp_config.sequence_parallel: sequences of {name}, {length}, cannot be divided by {divisor}; "
                    "change the length or the degree, or remove it"
                )

    if model.attn_config.qk_ln:
        raise ConfigError(
            "model.attn_config.qk_ln: a norm over all heads, which tp_config divides among devices; use qk_gn: true, a "
            "norm over each head"
        )
    seeds_dropout_by_rank = bool(model.attn_config.attn_pdrop) and not config.sequence_parallel
    if config.compile_config is not None and seeds_dropout_by_rank:
        raise ConfigError(
            "model.attn_config.attn_pdrop: cannot be compiled where tp_config divides layers and not the stream; set "
            "it to 0, or tp_config.sequence_parallel to true, or use compile_config: null"
        )
    _check_shared_loaders(config, "tp_config", "neighbouring devices")


def _check_context_parallel(config: TrainConfig) -> None:
    """Check that cp_config can divide samples. Raises ConfigError.

    All samples are cut into equal pieces. With kind `heads`, each device of a context group also gets equally many of
    the heads that tensor parallelism leaves to the group.
    """
    context = config.context
    degree = context.context_parallel_degree
    tensor_degree = config.tensor_parallel_degree
    key = "cp_config.context_parallel_degree"
    heads = _count_heads(config)
    num_common_heads = math.gcd(*heads.values()) // tensor_degree
    lengths = lengths_of(config)
    num_pieces = count_pieces(context)

    for name, length in lengths.items():
        if length % num_pieces:
            # Suggest degrees that divide all lengths, and with kind `heads` the heads, too.
            common_length = math.gcd(*lengths.values())
            pieces_per_device = num_pieces // degree
            candidates = divisors(common_length)
            divisor = f"{degree}, of which each has two pieces,"
            if context.kind == "heads":
                candidates = divisors(math.gcd(common_length, num_common_heads))
                divisor = str(degree)
            fitting = [n for n in candidates[1:] if common_length % (n * pieces_per_device) == 0]
            remedy = join_with_or(fitting[:MAX_SUGGESTIONS] or ["another length"])
            raise ConfigError(f"{key}: {divisor} does not divide {name}, {length}; use {remedy}")

    if context.kind == "heads":
        for name, num_heads in heads.items():
            if num_heads % (tensor_degree * degree):
                divisor = str(degree)
                if tensor_degree > 1:
                    divisor = f"{degree} x {tensor_degree} of tp_config"
                remedy = "use cp_config.kind: gather"
                fitting = divisors(num_common_heads)[1:]
                if fitting:
                    remedy += f", or a degree of {join_with_or(fitting)}"
                raise ConfigError(f"{key}: {divisor} does not divide {name}, {num_heads}; {remedy}")
    _check_shared_loaders(config, "cp_config", "the devices of a sample")


def _count_heads(config: TrainConfig) -> dict[str, int]:
    """Return the number of heads of queries, and of keys and values, by the words for them in an error."""
    return {"model.n_heads": config.model.n_heads, "the heads of keys and values": config.model.num_kv_heads}


def lengths_of(config: TrainConfig) -> dict[str, int]:
    """Return the length of sequences in tokens for each key that sets one: max_seq_len, and those of data loaders."""
    lengths = {"max_seq_len": config.max_seq_len}
    for block, loader in config.loaders.items():
        if loader.dataset.max_seq_len is not None:
            lengths[f"{block}.dataset.max_seq_len"] = loader.dataset.max_seq_len
    return lengths


# ------------------------------------------------------------------------------------------------ stages


def find_problems(pipeline: PipelineConfig, n_layers: int) -> Iterator[str]:
    """Yield `key: what is wrong` for each key of pp_config that does not suit the schedule or the number of layers.

    Each rank has `pipeline.num_runs` stages, which errors call runs of blocks if there may be several. `blocks` lists
    the number of blocks of each.
    """
    degree = pipeline.pipeline_parallel_degree
    num_runs = pipeline.num_runs
    num_stages = degree * num_runs
    blocks = pipeline.blocks

    min_runs = {"interleaved": 2, "zbv": 2}.get(pipeline.schedule, 1)
    max_runs = {"gpipe": 1, "1f1b": 1, "zbv": 2}.get(pipeline.schedule, num_runs)
    if not min_runs <= num_runs <= max_runs:
        expected = str(min_runs) if min_runs == max_runs else f"{min_runs} or more"
        yield f"virtual_stages: {num_runs} given, {pipeline.schedule} has {expected}; change it or the schedule"

    if blocks is not None:
        if min(blocks, default=0) < 1:
            yield f"blocks: {blocks} given, expected 1 or more for each"
        if sum(blocks) != n_layers:
            total = f"{sum(blocks)} in all, and model.n_layers is {n_layers}"
            yield f"blocks: {blocks} given, {total}; change one of them"

    if degree <= 1:
        return
    if num_stages > n_layers:
        remedy = "use a smaller degree"
        if num_runs != min_runs:
            remedy += " or fewer virtual_stages"
        runs = f"{degree} x {num_runs} runs of blocks"
        yield f"pipeline_parallel_degree: {runs} are more than model.n_layers, {n_layers}; {remedy}"
    if blocks is not None and len(blocks) != num_stages:
        stages = f"{degree} stages" if num_runs == 1 else f"{degree} x {num_runs} runs of blocks"
        yield f"blocks: {blocks} given, expected {num_stages} counts, for {stages}"


def _check_beside_pipeline(config: TrainConfig, pipeline: PipelineConfig, fsdp: FSDPConfig) -> None:
    """Check that the run's other settings can be used with pp_config. Raises ConfigError."""
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
    """Refuse data loaders of the user's own, which cannot give several ranks the same samples. Raises ConfigError.

    `cause` is the block that needs this, and `readers` names the ranks in the error.
    """
    for block, loader in config.loaders.items():
        if is_own(loader.name):
            raise ConfigError(
                f"{block}.name: {loader.name} cannot know that with {cause} {readers} must read the same samples; "
                f"use text, or no {cause}"
            )
