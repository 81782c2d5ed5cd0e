"""How often ranks exchange something in a step, and how much. Arithmetic, no torch; tests count on real ranks."""

from typing import NamedTuple

from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.sharding_schema import ContextParallelConfig
from llmfoundry_lite.estimate.portion import FP32_BYTES, Portion


class ParameterExchanges(NamedTuple):
    """Exchanges in a step, for each block and for all that is outside of blocks."""

    forward_gathers: int
    """All-gathers before forward passes; each gathers all shares of a copy."""
    backward_gathers: int
    """All-gathers of a block before backward passes. Parameters outside of blocks stay whole between the two."""
    reductions: int
    """Reduce-scatters of gradients, over the shares of a copy."""
    copy_reductions: int
    """All-reduces of each share of the gradient, over copies."""


def parameter_exchanges(p: Portion, num_rounds: int) -> ParameterExchanges:
    """Count exchanges. `num_rounds`: microbatches, or 1 in a pipeline, which keeps parameters whole until its end.

    A gradient summed in fp32 or float64 goes over copies once; PURE's, which would lose digits, each time.
    """
    reductions = num_rounds if p.config.reduces_every_microbatch else 1
    return ParameterExchanges(
        forward_gathers=num_rounds,
        backward_gathers=num_rounds if p.reshards else 0,
        reductions=reductions,
        copy_reductions=1 if p.reduction_bytes >= FP32_BYTES else reductions,
    )


def stage_sends(num_runs: int, num_ends: int = 0) -> int:
    """Count sends of a microbatch's stream by a pipeline's device with so many runs of blocks; it receives as often.

    `num_ends`: it has the first stage, the last or both, which send one fewer each.
    """
    return 2 * num_runs - num_ends


def stream_reductions(num_blocks: float, is_recomputed: bool, num_stages: int = 1) -> float:
    """Count sums of a microbatch's stream in a tensor group: an all-reduce, or a reduce-scatter and an all-gather.

    Twice a block forward, twice backward, and once more if the block is computed again, which does not need the last
    sum; and once each for the embeddings and the gradient at the head. The logits, which stay divided, take two
    numbers a token.
    """
    return num_blocks * (5 if is_recomputed else 4) + 2 / num_stages


def context_exchanges(
    model: ModelConfig, context: ContextParallelConfig, num_tokens: int, is_recomputed: bool
) -> tuple[int, int]:
    """Return (numbers that attention exchanges in one pass of a block on a rank with so many tokens, passes).

    heads: all-to-alls of queries, keys, values and attention's output. gather: an all-gather of all ranks' keys
    and values. The backward pass exchanges as much, and so does a block that is computed again, `selective` too.
    """
    if context.kind == "gather":
        numbers = 2 * model.kv_dim * num_tokens * context.context_parallel_degree
    else:
        numbers = 2 * (model.q_dim + model.kv_dim) * num_tokens
    return numbers, 3 if is_recomputed else 2
