"""How often ranks exchange parameters, gradients and activations in a step, and how much. Arithmetic, no torch.

`step.py` multiplies these counts by the time of one exchange. Tests compare them with what real ranks exchange.
"""

from typing import NamedTuple

from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.sharding_schema import ContextParallelConfig
from llmfoundry_lite.estimate.portion import FP32_BYTES, Portion


class ParameterExchanges(NamedTuple):
    """Exchanges of parameters and gradients in a step: of each block, and of all layers outside of blocks together."""

    forward_gathers: int
    """All-gathers before forward passes, which make the parameters of a copy whole."""
    backward_gathers: int
    """All-gathers of a block before backward passes. Layers outside of blocks stay whole between both passes."""
    reductions: int
    """Reduce-scatters of gradients among the shards of a copy."""
    copy_reductions: int
    """All-reduces of a shard's gradients among the copies."""


def parameter_exchanges(p: Portion, num_rounds: int) -> ParameterExchanges:
    """Count a step's exchanges of parameters and gradients.

    num_rounds: how often the parameters are gathered and freed again in a step. Once for each microbatch; once in a
    pipeline, which keeps them whole for all microbatches.

    Gradients are reduced in each round or only in the last one, as the run says. Copies add up gradients in fp32 or
    float64 once a step. In 16 bits (mixed precision PURE) a local sum would lose digits, so copies add up each time.
    """
    num_reductions = num_rounds if p.config.reduces_every_microbatch else 1
    sums_exactly = p.reduction_bytes >= FP32_BYTES
    return ParameterExchanges(
        forward_gathers=num_rounds,
        backward_gathers=num_rounds if p.reshards else 0,
        reductions=num_reductions,
        copy_reductions=1 if sums_exactly else num_reductions,
    )


def stage_sends(num_runs: int, num_ends: int = 0) -> int:
    """Return how often a device of a pipeline sends one microbatch's activations or their gradients to a neighbour.

    Each of the device's runs of consecutive blocks, its virtual stages, sends activations on and gradients back. The
    device receives as often.

    num_runs: runs of blocks on the device.
    num_ends: 1 if the device has the model's first or last run, 2 if it has both. Each of these sends once only.
    """
    return 2 * num_runs - num_ends


def stream_reductions(num_blocks: float, is_recomputed: bool, num_stages: int = 1) -> float:
    """Return how often a tensor parallel group adds up one microbatch's residual stream, on a device with these blocks.

    Each is an all-reduce, or with sequence parallelism a reduce-scatter and an all-gather, which cost as much. A block
    has 2 in the forward pass, after attention and after the feed-forward layer, and 2 in the backward pass. If the
    block is computed again, the first of its forward pass is repeated; the last is not needed. The embeddings have 1
    and the gradient at the head has 1, here spread over the stages. The loss exchanges two numbers for each token,
    which are left out.
    """
    reductions_per_block = 5 if is_recomputed else 4
    return num_blocks * reductions_per_block + 2 / num_stages


def context_exchanges(
    model: ModelConfig, context: ContextParallelConfig, num_tokens: int, is_recomputed: bool
) -> tuple[int, int]:
    """Return (elements, passes): what attention exchanges in a context parallel group, for one block and microbatch.

    elements: elements that a rank with `num_tokens` tokens exchanges in one pass. With `kind: heads` these are
        all-to-alls of queries, keys, values and attention's output. With `gather` it is an all-gather, counted with the
        keys and values of all ranks.
    passes: the forward and the backward pass, and one more if attention is computed again, also with selective
        checkpointing.
    """
    if context.kind == "gather":
        num_elements = 2 * model.kv_dim * num_tokens * context.context_parallel_degree
    else:
        num_elements = 2 * (model.q_dim + model.kv_dim) * num_tokens
    num_passes = 3 if is_recomputed else 2
    return num_elements, num_passes
