"""What a rank exchanges in a step: how often, and how many numbers a whole message has. Arithmetic, no torch.

`step.py` makes seconds of it, the preflight warns with it. Tests count the same on real ranks.
"""

from typing import NamedTuple

from llmfoundry_lite.config.schema import ContextParallelConfig, ModelConfig


class ParameterExchanges(NamedTuple):
    """How often in a step, for each block and for all that is outside of blocks."""

    forward_gathers: int
    """Before forward passes; each gathers all shares of a copy."""
    backward_gathers: int
    """Of a block, again before backward passes. What is outside stays whole between the two."""
    reductions: int
    """Of gradients, over the shares of a copy."""
    copy_reductions: int
    """Of each share of the gradient, over copies."""


def parameter_exchanges(
    num_rounds: int, *, reshards: bool, reduces_every_round: bool, reduces_in_fp32: bool
) -> ParameterExchanges:
    """`num_rounds`: microbatches, or 1 in a pipeline, where parameters and gradients are whole until its schedule is
    done. A gradient that is summed in fp32 goes over copies once; PURE's, which would lose digits, each time."""
    reductions = num_rounds if reduces_every_round else 1
    return ParameterExchanges(
        forward_gathers=num_rounds,
        backward_gathers=num_rounds if reshards else 0,
        reductions=reductions,
        copy_reductions=1 if reduces_in_fp32 else reductions,
    )


def stage_sends(num_runs: int, num_ends: int = 0) -> int:
    """How often in a microbatch a device of a pipeline with so many runs of blocks sends a stream to another one, and
    as often receives one. `num_ends`: it has the first stage, the last or both, which send one fewer each."""
    return 2 * num_runs - num_ends


def stream_reductions(num_blocks: float, is_recomputed: bool, num_stages: int = 1) -> float:
    """How often a tensor group adds up a microbatch's stream: an all-reduce, or a reduce-scatter and an all-gather.

    Twice a block forward, twice backward, and once more where the block is computed again, for nobody needs the last
    sum then; and once each for the embeddings and the gradient at the head. The logits, which stay divided, take two
    numbers a token.
    """
    return num_blocks * (5 if is_recomputed else 4) + 2 / num_stages


def context_exchanges(
    model: ModelConfig, context: ContextParallelConfig, num_tokens: int, is_recomputed: bool
) -> tuple[int, int]:
    """(numbers that attention exchanges in one pass of a block on a rank with so many tokens, how often it does).

    heads: all-to-alls of queries, keys, values and of what is made of them. gather: an all-gather of all ranks' keys
    and values. The backward pass exchanges as much, and so does a block that is computed again, `selective` too.
    """
    kv_dim = model.num_kv_heads * model.head_dim
    if context.kind == "gather":
        numbers = 2 * kv_dim * num_tokens * context.context_parallel_degree
    else:
        numbers = 2 * (model.d_model + kv_dim) * num_tokens
    return numbers, 3 if is_recomputed else 2
