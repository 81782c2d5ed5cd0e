"""Pieces of a sample: which of its tokens each rank of a context group has. Arithmetic, without torch."""

from llmfoundry_lite.config.sharding_schema import ContextParallelConfig


def count_pieces(context: ContextParallelConfig) -> int:
    """Return the number of equal pieces into which each sample is cut: one for each rank, or two with kind `gather`."""
    pieces_per_rank = 2 if context.kind == "gather" else 1
    return pieces_per_rank * context.context_parallel_degree


def pieces_of(context: ContextParallelConfig, rank: int) -> list[int]:
    """Return the indices of the pieces of each sample that a rank of the context group has.

    With kind `gather`, a rank has one piece from the beginning and the one that is as far from the end. Under a causal
    mask later tokens see more keys than earlier ones, and this gives all ranks the same work.
    """
    if context.kind == "heads":
        return [rank]
    return [rank, count_pieces(context) - 1 - rank]
