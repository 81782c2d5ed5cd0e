"""The table of optimizers: what the package knows of each one, by the name that a YAML gives it.

The schema of the block `optimizer`, the builders, the estimates of memory and time, the logs and the pages read a row
of `OPTIMIZERS` instead of asking for a name. A builder is named by its address, so that reading the table imports no
torch. To add an optimizer, write a function that builds it and a row; docs/training.md and
docs/coming-from-llm-foundry.md list the names.

An optimizer of the user's own (`python:package.module:Thing`) has no row.
"""

from dataclasses import dataclass
from typing import NamedTuple


class FoundryOptimizer(NamedTuple):
    """The optimizer of LLM Foundry that takes the same steps as one of ours, but for rounding."""

    name: str
    """Its name in LLM Foundry's registry."""
    class_name: str
    """Its class, which LLM Foundry writes into the names of metrics."""


@dataclass(kw_only=True, slots=True, frozen=True)
class OptimizerRow:
    """An optimizer: who builds it, what a YAML may say of it, and what a step takes."""

    builder: str
    """Address of the function that builds it, `module:function`. Its signature is `training.optimizers.Builder`."""
    keys: tuple[str, ...]
    """Keys of the block `optimizer` that it takes besides `name` and `lr`. All others are refused, or noted."""
    betas: tuple[float, float] | None = None
    """Default of `betas`; None if it takes none."""
    weight_decay: float = 0.0
    """Default of `weight_decay`."""
    decay_follows_schedule: bool = False
    """Whether a step shrinks weights by weight_decay * (lr / initial lr), as Composer's decoupled optimizers do.
    Otherwise it shrinks them by weight_decay * lr, as torch's do."""

    slots: tuple[str, ...]
    """Names of the fp32 tensors that it keeps for each parameter, of the parameter's shape."""
    slots_of_matrices: tuple[str, ...] | None = None
    """The same for the matrices of the blocks; None if they have the same slots as other parameters."""
    num_scratch: int = 0
    """Number of temporary fp32 elements for each parameter in a step."""
    moved_bytes: int
    """Bytes that a step reads and writes for each parameter: counted, operation by operation."""
    moved_bytes_of_matrices: int | None = None
    """The same for the matrices of the blocks; None if it is the same."""
    multiplies_matrices: bool = False
    """Whether a step orthogonalises whole matrices by products, as Muon does. Such a step takes time of its own, and is
    not for a host's processor."""
    sums_exactly: bool = True
    """Whether its arithmetic does not depend on how parameters are divided among ranks, as `exact_sums` needs."""

    foundry: FoundryOptimizer | None = None
    """LLM Foundry's, for the names of metrics; None if LLM Foundry has none that takes the same steps."""
    other_words: tuple[str, ...] = ()
    """Names that other libraries have for it, for suggestions."""


ADAMW_KEYS = ("betas", "eps", "weight_decay")
ADAMW_BETAS = (0.9, 0.95)
"""LLM Foundry's default for its AdamW."""
ADAMW_SLOTS = ("exp_avg", "exp_avg_sq")
ADAMW_MOVED_BYTES = 28
"""The fused kernel reads weight, gradient and two moments, and writes all but the gradient."""
LION_BETAS = (0.9, 0.99)
"""The default of Chen et al. 2023."""
LION_MOVED_BYTES = 52
"""Five operations over whole tensors: update from moment and gradient (12), its sign (8), decay (8), step (12), and the
new moment (12)."""
MUON_MOVED_BYTES = 48
"""For a matrix, besides its products: new momentum (12), look-ahead (12), in bf16 (6), decay (8), step (10)."""

OPTIMIZERS: dict[str, OptimizerRow] = {
    "decoupled_adamw": OptimizerRow(
        builder="llmfoundry_lite.training.optimizers:build_adamw",
        keys=ADAMW_KEYS,
        betas=ADAMW_BETAS,
        weight_decay=1e-5,  # Composer's
        decay_follows_schedule=True,
        slots=ADAMW_SLOTS,
        moved_bytes=ADAMW_MOVED_BYTES,
        foundry=FoundryOptimizer("decoupled_adamw", "DecoupledAdamW"),
    ),
    "adamw": OptimizerRow(
        builder="llmfoundry_lite.training.optimizers:build_adamw",
        keys=ADAMW_KEYS,
        betas=ADAMW_BETAS,
        slots=ADAMW_SLOTS,
        moved_bytes=ADAMW_MOVED_BYTES,
        other_words=("adam",),
    ),
    "lion": OptimizerRow(
        builder="llmfoundry_lite.training.optimizers:build_lion",
        keys=("betas", "weight_decay"),
        betas=LION_BETAS,
        slots=("exp_avg",),
        num_scratch=1,
        moved_bytes=LION_MOVED_BYTES,
    ),
    "decoupled_lionw": OptimizerRow(
        builder="llmfoundry_lite.training.optimizers:build_lion",
        keys=("betas", "weight_decay"),
        betas=LION_BETAS,
        decay_follows_schedule=True,
        slots=("exp_avg",),
        num_scratch=1,
        moved_bytes=LION_MOVED_BYTES,
        foundry=FoundryOptimizer("decoupled_lionw", "DecoupledLionW"),
        other_words=("decoupled_lion",),
    ),
    "muon": OptimizerRow(
        builder="llmfoundry_lite.training.muon:build_muon",
        keys=(*ADAMW_KEYS, "adamw_lr", "momentum", "ns_steps", "ns_dtype", "adjust_lr_fn"),
        betas=ADAMW_BETAS,
        slots=ADAMW_SLOTS,
        slots_of_matrices=("momentum_buffer",),
        moved_bytes=ADAMW_MOVED_BYTES,
        moved_bytes_of_matrices=MUON_MOVED_BYTES,
        multiplies_matrices=True,
    ),
}
"""Name in a YAML -> the optimizer."""

ASSUMED_OPTIMIZER = OPTIMIZERS["adamw"]
"""The row that estimates use for an optimizer of the user's own, since they import no code. Its class may tell how much
it keeps (`estimate/own_optimizer.py`)."""


def estimated_optimizer(name: str) -> OptimizerRow:
    """Return the row by which estimates count an optimizer: its own, or AdamW's for one of the user's own."""
    return OPTIMIZERS.get(name, ASSUMED_OPTIMIZER)


def optimizers_with(key: str) -> list[str]:
    """Return the names of the optimizers that take a key of the block `optimizer`."""
    return [name for name, row in OPTIMIZERS.items() if key in row.keys]
