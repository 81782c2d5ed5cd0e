"""How long a training step takes: a roofline for what a device computes, rings for what it exchanges. No torch.

A device computes matrix products at a share of its peak, attention at a smaller one, and all else at the rate of its
memory. What it exchanges beside that, FSDP's gathers and reductions, is hidden as far as the computing of the same
block lasts; what it exchanges in between, for tensor, context and pipeline parallelism, is not.

A batch is read while the one before it is computed, where the loader has workers. Saves hold every step up by their
share of the run's interval.

Left out: stragglers, the host's own time, congestion by other jobs, storage slower than the loader.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from llmfoundry_lite.config.layout import Layout
from llmfoundry_lite.config.schema import ContextParallelConfig, ModelConfig, PipelineConfig
from llmfoundry_lite.config.stages import block_and_head, stages_of
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.hardware import Accelerator
from llmfoundry_lite.models.flops import count_flops_per_token, count_parameters
from llmfoundry_lite.plan.exchanges import (
    ParameterExchanges,
    context_exchanges,
    parameter_exchanges,
    stage_sends,
    stream_reductions,
)
from llmfoundry_lite.plan.network import Group, Node, group_of, send_seconds
from llmfoundry_lite.plan.schedule import simulate_bubble

FP32_BYTES = 4
MEMORY_SHARE = 0.85
"""Of the memory's bandwidth that kernels reach."""
STREAM_BYTES = 220
"""Read and written for each token and number of the residual stream in one block, forward and backward, by norms,
activation functions, residual sums and copies between them, in 16 bits. Fitted, as the shares below."""
LOGIT_BYTES = 30
"""Read and written for each logit by the loss, forward and backward."""
OPTIMIZER_BYTES = 40
"""Read and written for each parameter by AdamW and by clipping its gradient."""
READ_TOKENS_PER_SECOND = 7e6
"""By one process of the loader, from local shards of token ids: 8,000 samples of 2,048 took 2.3 s of an AMD EPYC core,
2026-11-22."""
OVERLAP_COST = 0.15
"""Of a hidden exchange's time that it costs all the same: it takes units and bandwidth from the products beside it."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Shares:
    """Of the peak that kernels reach."""

    products: float
    attention: float
    source: str


_FITTED = "fitted to LLM Foundry's published throughput of MPT on 8 devices"
SHARES: Mapping[str, Shares] = {
    "A100": Shares(products=0.74, attention=0.3, source=_FITTED),
    "H100": Shares(products=0.56, attention=0.2, source=_FITTED),
    "MI250": Shares(products=0.495, attention=0.25, source="fitted to MPT-7B on 4 MI250, MosaicML 2023"),
    "MI250X": Shares(products=0.59, attention=0.25, source="fitted to 175 billion parameters on Frontier, 2023"),
}
"""By the beginning of an accelerator's name, the longest that fits."""
GUESSED = Shares(products=0.55, attention=0.2, source="no published run: those of the H100, rounded down")


@dataclass(kw_only=True, slots=True, frozen=True)
class Work:
    """What is computed, whatever the hardware."""

    model: ModelConfig
    seq_len: int
    global_batch_size: int
    """Samples of a step."""
    microbatch_size: int
    """Samples that a data rank computes at once."""
    dtype: str = "bf16"
    """Of matrix products: a column of the accelerators' peaks."""
    reduction_bytes: int = FP32_BYTES
    """Of each number while gradients are added up."""
    activation_checkpointing: bool | str = False
    reshard_after_forward: bool = True
    reduces_every_microbatch: bool = True
    """Gradients are added up over devices after each microbatch, not after the last one."""
    is_sharded: bool = True
    """False: data ranks keep whole copies and add up gradients once a step (NO_SHARD)."""
    shares_optimizer: bool = False
    """Copies of the model divide the optimizer's step, and gather what it has changed (ZERO_1)."""
    sequence_parallel: bool = False
    """Where layers are divided, the stream between them is too."""
    context: ContextParallelConfig = dataclasses.field(default_factory=ContextParallelConfig)
    pipeline: PipelineConfig = dataclasses.field(default_factory=PipelineConfig)
    """Schedule and blocks of stages, of which the layout says how many there are."""
    newton_schulz_steps: int = 0
    """Of Muon, for each matrix of the blocks; 0: another optimizer."""
    newton_schulz_dtype: str = "bf16"
    num_workers: int = 0
    """Processes that read ahead for each data rank; 0: the rank itself reads between two batches."""

    def num_microbatches(self, layout: Layout) -> int:
        """Of one data rank in a step. Raises ConfigError where they do not come out even."""
        device_batch_size, rest = divmod(self.global_batch_size, layout.num_data_ranks)
        if rest or not device_batch_size:
            raise ConfigError(
                f"global_train_batch_size: {self.global_batch_size} does not divide over {layout.num_data_ranks} "
                "data ranks"
            )
        return -(-device_batch_size // self.microbatch_size)

    def parameter_exchanges(self, num_rounds: int) -> ParameterExchanges:
        return parameter_exchanges(
            num_rounds,
            reshards=self.reshard_after_forward,
            reduces_every_round=self.reduces_every_microbatch,
            reduces_in_fp32=self.reduction_bytes == FP32_BYTES,
        )


@dataclass(kw_only=True, slots=True, frozen=True)
class StepTime:
    """Seconds of one step on one device, by what it does."""

    products: float
    attention: float
    memory: float
    """Norms, activation functions, the loss: bound by memory."""
    optimizer: float
    tensor: float
    """Collectives of tensor parallelism, none of them hidden."""
    context: float
    sharding: float
    """FSDP's gathers and reductions, as far as they are not hidden."""
    pipeline: float
    """Sending between stages."""
    bubble: float
    """Waiting for other stages."""
    data: float = 0.0
    """Waiting for the loader."""
    saves: float = 0.0
    """A step's share of what saves hold the run up."""
    num_tokens: int
    """Of the whole step."""

    @property
    def seconds(self) -> float:
        computing = self.products + self.attention + self.memory + self.optimizer
        exchanging = self.tensor + self.context + self.sharding + self.pipeline
        return computing + exchanging + self.bubble + self.data + self.saves

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    def parts(self) -> dict[str, float]:
        """Name -> share of the step, the largest first."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "num_tokens"]
        shares = {name: getattr(self, name) / self.seconds for name in names}
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    def mfu(self, work: Work, accelerator: Accelerator, num_devices: int) -> float:
        """Model FLOP/s over the peak of all devices."""
        peak = accelerator.peak_flops(work.dtype)
        assert peak is not None
        return count_flops_per_token(work.model, work.seq_len) * self.tokens_per_second / (peak * num_devices)


def find_shares(accelerator: Accelerator) -> Shares:
    fitting = [name for name in SHARES if accelerator.name.startswith(name)]
    return SHARES[max(fitting, key=len)] if fitting else GUESSED


def step_time(
    work: Work, layout: Layout, accelerator: Accelerator, node: Node, shares: Shares | None = None
) -> StepTime:
    """Raises ConfigError for a batch that does not divide and a dtype whose peak is not known."""
    model, shares = work.model, shares or find_shares(accelerator)
    peak = accelerator.peak_flops(work.dtype)
    if peak is None:
        known = ", ".join(accelerator.peak_teraflops)
        raise ConfigError(f"{accelerator.name}: no {work.dtype} peak is published for it (known: {known})")
    memory_rate = MEMORY_SHARE * accelerator.memory_bandwidth_bytes_per_second
    num_bytes = FP32_BYTES if work.dtype in ("fp32", "tf32") else 2

    num_microbatches = work.num_microbatches(layout)
    seq_len = work.seq_len // layout.context
    num_tokens = work.microbatch_size * seq_len
    loads = find_loads(model, work.pipeline, layout.pipeline)
    num_blocks = loads.num_blocks
    num_block, num_outside = count_block_and_outside(model)
    is_recomputed = work.activation_checkpointing is True
    passes = 4 if is_recomputed else 3

    # One microbatch on one device, of the stage that computes the longest.
    block_products = 2 * num_tokens * num_block / layout.tensor * passes / (shares.products * peak)
    num_logits = num_tokens * model.vocab_size / layout.tensor * loads.has_head
    head_products = 3 * 2 * num_logits * model.d_model / (shares.products * peak)
    window = model.attn_config.sliding_window_size
    num_keys = work.seq_len if window < 0 else min(work.seq_len, 2 * (window + 1))
    # A causal kernel computes half of the square; its backward pass has five products where the forward pass has two.
    square = 2 * num_tokens * num_keys * model.d_model / layout.tensor
    block_attention = square * (2.5 + (2 if work.activation_checkpointing else 1)) / (shares.attention * peak)
    stream = STREAM_BYTES * num_bytes / 2 * num_tokens * model.d_model * (passes / 3)
    # Tensor parallelism divides the feed-forward layer's half of it; the norms' half is computed by all, unless the
    # stream is divided too.
    norms_degree = layout.tensor if work.sequence_parallel else 1
    block_memory = stream * (1 / norms_degree + 1 / layout.tensor) / 2 / memory_rate
    head_memory = LOGIT_BYTES * num_logits / memory_rate
    block_seconds = block_products + block_attention + block_memory

    tensor = group_of(layout, "tensor", node)
    stream_bytes = num_tokens * model.d_model * num_bytes
    reductions = stream_reductions(num_blocks, is_recomputed, layout.pipeline)
    tensor_seconds = reductions * tensor.reduce_seconds(stream_bytes)
    context = group_of(layout, "context", node)
    num_numbers, num_exchanges = context_exchanges(model, work.context, num_tokens, bool(work.activation_checkpointing))
    context_bytes = num_numbers * num_bytes / layout.tensor
    is_gathered = work.context.kind == "gather"
    one_context = context.gather_seconds(context_bytes) if is_gathered else context.exchange_seconds(context_bytes)
    context_seconds = num_blocks * num_exchanges * one_context
    send = send_seconds(layout, "pipeline", node, stream_bytes / norms_degree)
    pipeline_seconds = stage_sends(work.pipeline.num_runs) * send

    num_local, num_outside = num_block / layout.tensor, num_outside // layout.tensor
    sharding_seconds = _sharding_seconds(
        work,
        layout.of_parameters,
        node,
        num_blocks=num_blocks,
        num_block=num_local,
        num_outside=num_outside,
        num_rounds=num_microbatches if layout.pipeline == 1 else 1,
        num_bytes=num_bytes,
        forward_seconds=block_seconds / passes,
        backward_seconds=block_seconds * (passes - 1) / passes,
    )
    parts = layout.of_parameters
    share = parts.shard if work.is_sharded else parts.replicate if work.shares_optimizer else 1
    optimizer = OPTIMIZER_BYTES * (num_blocks * num_local + num_outside) / share / memory_rate
    if work.newton_schulz_steps:
        optimizer += _newton_schulz_seconds(work, layout, num_blocks, accelerator, node, shares)
    per_microbatch = {
        "products": num_blocks * block_products + head_products,
        "attention": num_blocks * block_attention,
        "memory": num_blocks * block_memory + head_memory,
        "tensor": tensor_seconds,
        "context": context_seconds,
        "pipeline": pipeline_seconds if layout.pipeline > 1 else 0.0,
    }
    waiting = 0.0
    if layout.pipeline > 1:
        waiting = simulate_bubble(
            *(work.pipeline.schedule, layout.pipeline, num_microbatches, work.pipeline.num_runs),
            loads=loads.of_runs,
            in_few_rounds=True,
        )
    seconds = {name: num_microbatches * value for name, value in per_microbatch.items()}
    if layout.pipeline > 1 and model.tie_word_embeddings:  # both ends have them, and pass each other their gradient
        num_tied = model.vocab_size * model.d_model / layout.tensor / (parts.shard if work.is_sharded else 1)
        seconds["pipeline"] += send_seconds(layout, "pipeline", node, num_tied * FP32_BYTES)
    time = StepTime(
        **seconds,
        optimizer=optimizer,
        sharding=sharding_seconds,
        bubble=waiting * num_microbatches * sum(per_microbatch.values()),
        num_tokens=work.global_batch_size * work.seq_len,
    )
    return dataclasses.replace(time, data=_data_seconds(work, layout, time.seconds))


class Loads(NamedTuple):
    """What the stages of a pipeline compute."""

    num_blocks: int
    """Of the device that computes the longest."""
    has_head: bool
    of_runs: tuple[float, ...]
    """Time of each run of blocks, as a multiple of their mean."""


def find_loads(model: ModelConfig, pipeline: PipelineConfig, degree: int) -> Loads:
    """Counted in parameters; looking up embeddings takes no time."""
    if degree == 1:
        return Loads(model.n_layers, True, (1.0,))
    blocks = None if pipeline.blocks is None else tuple(pipeline.blocks)
    return _loads_of_stages(model, degree, pipeline.schedule, pipeline.num_runs, blocks)


@functools.cache  # a search asks thousands of times
def _loads_of_stages(
    model: ModelConfig, degree: int, schedule: str, num_runs: int, blocks: tuple[int, ...] | None
) -> Loads:
    pipeline = PipelineConfig(
        pipeline_parallel_degree=degree,
        schedule=schedule,
        virtual_stages=num_runs,
        blocks=None if blocks is None else list(blocks),
    )
    block, head = block_and_head(model)
    stages_of_ranks = stages_of(model, pipeline)
    loads: dict[int, float] = {}
    for stages in stages_of_ranks:
        for stage in stages:
            loads[stage.index] = len(stage.blocks) + (head / block if stage.is_last else 0)
    busiest = max(stages_of_ranks, key=lambda stages: sum(loads[stage.index] for stage in stages))
    mean = sum(loads.values()) / len(loads)
    return Loads(
        num_blocks=sum(len(stage.blocks) for stage in busiest),
        has_head=busiest[-1].is_last,
        of_runs=tuple(loads[index] / mean for index in range(len(loads))),
    )


def newton_schulz_flops(rows: int, columns: int, num_steps: int) -> int:
    """Of a matrix: each iteration multiplies it by its transpose, that product by itself, and both by the matrix."""
    short, long = sorted((rows, columns))
    return num_steps * (4 * short * short * long + 2 * short**3)


def _newton_schulz_seconds(
    work: Work, layout: Layout, num_blocks: int, accelerator: Accelerator, node: Node, shares: Shares
) -> float:
    """The ranks that have the same blocks take turns: in each round every one owns a whole matrix, the largest first.

    It gets the parts of its matrix from the others, and sends back what it has made of them.
    """
    model = work.model
    d, kv_dim = model.d_model, model.num_kv_heads * model.head_dim
    num_up = 2 if model.ffn_config.ffn_type == "mptglu" else 1
    # Of each parameter the shapes that it stands for.
    qkv = [(d, d), (kv_dim, d), (kv_dim, d)]
    parameters = [qkv] if model.attn_config.fused_qkv else [[shape] for shape in qkv]
    parameters += [[(d, d)], *[[(model.ffn_dim, d)]] * num_up, [(d, model.ffn_dim)]]
    parameters.sort(key=lambda shapes: -sum(map(math.prod, shapes)))
    peak = accelerator.peak_flops(work.newton_schulz_dtype) or accelerator.peak_flops(work.dtype)
    assert peak is not None
    num_bytes = 2 if work.newton_schulz_dtype == "bf16" else FP32_BYTES
    num_ranks = layout.world_size // layout.pipeline
    group = Group(size=num_ranks, in_node=min(num_ranks, node.num_devices), node=node)
    seconds = 0.0
    for first in range(0, num_blocks * len(parameters), num_ranks):
        shapes = parameters[first // num_blocks]
        flops = sum(newton_schulz_flops(*shape, work.newton_schulz_steps) for shape in shapes)
        exchange = group.exchange_seconds(sum(map(math.prod, shapes)) * num_bytes)
        seconds += flops / (shares.products * peak) + 2 * exchange
    return seconds


def _data_seconds(work: Work, layout: Layout, beside: float) -> float:
    """What a data rank waits for its samples of a step, of which `beside` seconds are computed meanwhile."""
    reading = work.global_batch_size * work.seq_len / layout.num_data_ranks / READ_TOKENS_PER_SECOND
    return max(0.0, reading / work.num_workers - beside) if work.num_workers else reading


def count_block_and_outside(model: ModelConfig) -> tuple[int, int]:
    """Parameters of one block, and of all that is outside of blocks."""
    num_outside = count_parameters(dataclasses.replace(model, n_layers=0))
    return (count_parameters(model) - num_outside) // model.n_layers, num_outside


def _sharding_seconds(
    work: Work,
    layout: Layout,
    node: Node,
    *,
    num_blocks: int,
    num_block: float,
    num_outside: int,
    num_rounds: int,
    num_bytes: int,
    forward_seconds: float,
    backward_seconds: float,
) -> float:
    """What a step's gathers and reductions of parameters and gradients take beyond the products that hide them.

    A block's gather runs beside the block before it, its reduction beside the block after; the first gather and the
    last reduction have nothing to hide behind, nor has what is outside of blocks. Copies of the model add up their
    shares behind the last backward pass. `num_rounds`: as `parameter_exchanges` has it.
    """
    shard = group_of(layout, "shard", node)
    replicate = group_of(layout, "replicate", node)
    times = work.parameter_exchanges(num_rounds)
    seconds = 0.0
    if work.is_sharded and shard.size > 1:
        gather = shard.gather_seconds(num_block * num_bytes)
        reduce = shard.gather_seconds(num_block * work.reduction_bytes)
        seconds += times.forward_gathers * (num_blocks * _exposed(gather, forward_seconds) + gather)
        again = gather if times.backward_gathers else 0.0
        seconds += times.reductions * (num_blocks * _exposed(again + reduce, backward_seconds) + reduce)
        seconds += (num_rounds - times.reductions) * num_blocks * _exposed(again, backward_seconds)
        seconds += times.forward_gathers * shard.gather_seconds(num_outside * num_bytes)
        seconds += times.reductions * shard.gather_seconds(num_outside * work.reduction_bytes)
    if replicate.size > 1:
        # Where nothing is sharded, the whole gradient; else this rank's share of it.
        part = layout.shard if work.is_sharded else 1
        whole = (num_blocks * num_block + num_outside) / part * work.reduction_bytes
        seconds += times.copy_reductions * _exposed(replicate.reduce_seconds(whole), num_blocks * backward_seconds)
        if work.shares_optimizer:
            seconds += replicate.gather_seconds((num_blocks * num_block + num_outside) * FP32_BYTES)
    return seconds


def _exposed(exchange: float, beside: float) -> float:
    """The part of an exchange that is not hidden by `beside` seconds of computing."""
    hidden = min(exchange, beside)
    return exchange - hidden + OVERLAP_COST * hidden
