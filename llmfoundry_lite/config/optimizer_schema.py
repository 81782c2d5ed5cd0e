"""The blocks `optimizer` and `scheduler` of a training run: how weights are updated, and at which learning rate."""

from dataclasses import dataclass
from typing import Any

from llmfoundry_lite.config.fields import (
    NON_NEGATIVE,
    POSITIVE,
    REQUIRED,
    Use,
    duration_setting,
    only_with,
    only_with_own,
    setting,
    validator,
)
from llmfoundry_lite.config.spans import TIME_UNITS, Duration

NEWTON_SCHULZ_STEPS = 5
"""Default of muon's ns_steps, the iterations of Newton and Schulz's method."""
COMPOSERS_WEIGHT_DECAY = 1e-5
"""Default of Composer's DecoupledAdamW."""
FRACTION_OF_RUN = (*TIME_UNITS, "dur")
"""Units of durations that may also be a fraction of the run, such as 0.1dur."""

MUON = (only_with("muon"),)
LINEAR_DECAY = (only_with("linear_decay_with_warmup"),)
STABLE_DECAY = (only_with("warmup_stable_decay"),)
INVERSE_SQUARE_ROOT = (only_with("inv_sqrt_with_warmup"),)
OWN_OPTIMIZER = only_with_own("optimizer")
OWN_SCHEDULE = only_with_own("schedule")


@dataclass(kw_only=True, slots=True, frozen=True)
class OptimizerConfig:
    """The optimizer, and its settings."""

    name: str = setting(
        choices="decoupled_adamw adamw lion decoupled_lionw muon python:",
        instead="expected decoupled_adamw, adamw, lion, decoupled_lionw, muon or python:",
    )
    lr: float = setting(REQUIRED, POSITIVE, change="logged")
    """Learning rate. With muon, the rate of the blocks' matrices."""
    adamw_lr: float | None = setting(None, POSITIVE, change="logged", uses=MUON)
    """Rate of embeddings, head, norms and biases, which AdamW updates. Default: lr."""
    betas: tuple[float, float] | None = setting(None, validator("0 <= beta < 1", lambda value: 0 <= value < 1))
    """Default (0.9, 0.95) for the AdamWs, (0.9, 0.99) for the Lions."""
    momentum: float | None = setting(None, validator("0 <= momentum < 1", lambda value: 0 <= value < 1), uses=MUON)
    """Momentum of the matrices' gradients; default 0.95."""
    ns_steps: int | None = setting(None, POSITIVE, uses=MUON)
    """Iterations of Newton and Schulz; default 5."""
    ns_dtype: str | None = setting(None, choices="bf16 fp32", change="logged", uses=MUON)
    """Precision of these iterations; default bf16."""
    adjust_lr_fn: str | None = setting(None, choices="match_rms_adamw original", uses=MUON)
    """torch's option. match_rms_adamw, the default, makes updates as large as AdamW's; original is Jordan's scale."""
    eps: float = setting(
        1e-8,
        POSITIVE,
        uses=(Use(has_effect=lambda optimizer, _: "lion" not in optimizer.name, reason="{block.name} has none"),),
    )
    weight_decay: float | None = setting(None, NON_NEGATIVE, change="logged")
    """Decoupled optimizers multiply it by lr / initial lr, the others by lr. Default: 1e-5 for decoupled_adamw, as in
    Composer, 0 for the others."""
    kwargs: dict[str, Any] = setting(dict, uses=(OWN_OPTIMIZER,))
    """Arguments of a `python:` optimizer."""

    @property
    def decay(self) -> float:
        """The weight decay, or its default for this optimizer."""
        if self.weight_decay is not None:
            return self.weight_decay
        return COMPOSERS_WEIGHT_DECAY if self.name == "decoupled_adamw" else 0.0


@dataclass(kw_only=True, slots=True, frozen=True)
class SchedulerConfig:
    """The schedule of the learning rate."""

    name: str = setting(
        choices="constant_with_warmup cosine_with_warmup linear_decay_with_warmup inv_sqrt_with_warmup "
        "warmup_stable_decay python:"
    )
    t_warmup: Duration = duration_setting("0ba", FRACTION_OF_RUN, may_be_zero=True)
    """Linear warm-up from 0."""
    t_max: Duration = duration_setting(
        "1dur",
        FRACTION_OF_RUN,
        uses=(
            Use(
                has_effect=lambda schedule, _: schedule.name != "constant_with_warmup",
                reason="{block.name} has no end",
            ),
        ),
    )
    alpha_i: float = setting(1.0, NON_NEGATIVE, uses=LINEAR_DECAY)
    """Multiplier after warm-up."""
    alpha_f: float = setting(
        0.0,
        NON_NEGATIVE,
        uses=(only_with("cosine_with_warmup", "linear_decay_with_warmup", "warmup_stable_decay", is_refused=False),),
    )
    """cosine, linear, warmup_stable_decay: the multiplier at t_max."""
    t_decay: Duration = duration_setting("0.1dur", FRACTION_OF_RUN, uses=STABLE_DECAY)
    """Span of the decay, which ends at t_max. Until then the rate is lr."""
    decay: str | None = setting(None, choices="linear cosine 1-sqrt", uses=STABLE_DECAY)
    """Shape of the decay; default linear."""
    t_scale: Duration = duration_setting("1ba", FRACTION_OF_RUN, uses=INVERSE_SQUARE_ROOT)
    """Time scale of the decay."""
    t_cooldown: Duration = duration_setting("0ba", FRACTION_OF_RUN, may_be_zero=True, uses=INVERSE_SQUARE_ROOT)
    """Linear decay over the last span before t_max."""
    alpha_f_decay: float = setting(0.0, NON_NEGATIVE, uses=INVERSE_SQUARE_ROOT)
    """Multiplier that the decay tends to."""
    alpha_f_cooldown: float = setting(0.0, NON_NEGATIVE, uses=INVERSE_SQUARE_ROOT)
    """Multiplier at the end of the cool-down."""
    kwargs: dict[str, Any] = setting(dict, uses=(OWN_SCHEDULE,))
    """Arguments of a `python:` schedule."""
