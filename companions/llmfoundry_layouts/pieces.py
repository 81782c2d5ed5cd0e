"""Pieces of a sample: which of its tokens each rank of a context group has. Arithmetic, without torch."""

from llmfoundry_lite.config.sharding_schema import ContextParallelConfig


def count_pieces(context: ContextParallelConfig) -> int:
    """Return the number of equal pieces that a sample is cut into."""
    return context.context_parallel_degree * (2 if context.kind == "gather" else 1)


def pieces_of(context: ContextParallelConfig, rank: int) -> list[int]:
    """Return the pieces of a rank of the group. gather: one from the beginning and one from the end, so that under
    a causal mask all ranks see equally many tokens."""
    return [rank] if context.kind == "heads" else [rank, count_pieces(context) - 1 - rank]
