"""Muon's keys in the block `optimizer`, and what the core must know of it. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from llmfoundry_lite.config.fields import POSITIVE, must_be, setting
from llmfoundry_lite.config.optimizers import AddedOptimizer


@dataclass(kw_only=True, slots=True, frozen=True)
class MuonConfig:
    """`lr` is the rate of the blocks' matrices; `betas` and `eps` are AdamW's."""

    adamw_lr: float | None = setting(None, POSITIVE, change="logged")
    """Rate of embeddings, head, norms and biases, which AdamW updates. Default: lr."""
    momentum: float = setting(0.95, must_be("0 <= momentum < 1", lambda value: 0 <= value < 1))
    """Momentum of the matrices' gradients."""
    ns_steps: int = setting(5, POSITIVE)
    """Iterations of Newton and Schulz."""
    ns_dtype: str = setting("bf16", choices="bf16 fp32", change="logged")
    """Precision of these iterations."""
    adjust_lr_fn: str = setting("match_rms_adamw", choices="match_rms_adamw original")
    """torch's option. match_rms_adamw makes updates as large as AdamW's; original is Jordan's scale."""

    def problems(self) -> Iterator[str]:
        """Yield `key: what is wrong` for keys that do not go together."""
        if self.adjust_lr_fn == "original" and self.adamw_lr is None:
            yield "adamw_lr: missing; adjust_lr_fn: original scales updates differently from AdamW"


MUON = AddedOptimizer(
    settings=MuonConfig,
    build="llmfoundry_muon.muon:build_muon",
    slots=(1, 2),
    problems=MuonConfig.problems,
    refuses_offload="muon multiplies matrices in its step, which would be the host's work",
)
