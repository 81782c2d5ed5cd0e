"""How often ranks exchange something in a step, and how much. Arithmetic, no torch; tests count on real ranks."""

from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.schema import ContextParallelConfig


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
