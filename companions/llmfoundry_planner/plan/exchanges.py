"""How often ranks exchange parameters, gradients and streams of stages in a step. Tests count on real ranks."""

from typing import NamedTuple

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
