"""The blocks `optimizer` and `scheduler` of a training run: how weights are updated, and at which learning rate."""

import re
from dataclasses import dataclass, fields
from typing import Any

from llmfoundry_lite.config.fields import (
    NON_NEGATIVE,
    POSITIVE,
    REQUIRED,
    Use,
    duration_setting,
    not_empty,
    only_with,
    only_with_own,
    setting,
    validator,
)
from llmfoundry_lite.config.optimizers import OPTIMIZERS, optimizers_with
from llmfoundry_lite.config.schedules import SCHEDULES, schedules_with
from llmfoundry_lite.config.spans import TIME_UNITS, Duration
from llmfoundry_lite.errors import join_with_or
from llmfoundry_lite.own_code import PREFIX, is_own

NEWTON_SCHULZ_STEPS = 5
"""Default of muon's ns_steps, the iterations of Newton and Schulz's method."""
MAX_PATTERN_LENGTH = 1000
"""Maximum length of a `param_str_match`, in characters."""
FRACTION_OF_RUN = (*TIME_UNITS, "dur")
"""Units of durations that may also be a fraction of the run, such as 0.1dur."""

OWN_OPTIMIZER = only_with_own("optimizer")
OWN_SCHEDULE = only_with_own("schedule")


OPTIMIZER_NAMES = (*OPTIMIZERS, PREFIX)
SCHEDULE_NAMES = (*SCHEDULES, PREFIX)


def _with_optimizers(key: str) -> tuple[Use, ...]:
    """Return the condition for a key that not all optimizers take: it is refused beside another one."""
    names = optimizers_with(key)
    return () if len(names) == len(OPTIMIZERS) else (only_with(*names),)


def _with_schedules(key: str, *, is_refused: bool = True) -> tuple[Use, ...]:
    """Return the condition for a key that some schedules use: it is refused, or noted, beside another one."""
    return (only_with(*schedules_with(key), is_refused=is_refused),)


def _with_optimizers_of_run(key: str) -> tuple[Use, ...]:
    """Return the condition for a key of a group that not all optimizers take: it is refused beside another one."""
    names = optimizers_with(key)
    if len(names) == len(OPTIMIZERS):
        return ()
    return (
        Use(
            has_effect=lambda _, run: is_own(run.optimizer.name) or run.optimizer.name in names,
            reason="{run.optimizer.name} does not take it; remove it",
            is_refused=True,
        ),
    )


OWN_OPTIMIZER_OF_RUN = Use(
    has_effect=lambda _, run: is_own(run.optimizer.name),
    reason="{run.optimizer.name} is no optimizer of your own; remove it",
    is_refused=True,
)
VALID_BETA = validator("0 <= beta < 1", lambda value: 0 <= value < 1)
VALID_MOMENTUM = validator("0 <= momentum < 1", lambda value: 0 <= value < 1)


def _check_expression(value: str) -> None:
    """Check a regular expression. Raises ValueError for one that is too long or that Python's `re` does not compile."""
    if len(value) > MAX_PATTERN_LENGTH:
        raise ValueError(f"a regular expression of at most {MAX_PATTERN_LENGTH} characters")
    try:
        re.compile(value)
    except (re.error, OverflowError, RecursionError) as error:  # the last two for a{99999999999} and many brackets
        raise ValueError(f"a regular expression; Python's re says: {error}") from None


@dataclass(kw_only=True, slots=True, frozen=True)
class ParameterGroupConfig:
    """A group of parameters with settings of its own. Those that it leaves out are the optimizer's."""

    param_str_match: str = setting(REQUIRED, not_empty("a regular expression"), _check_expression)
    """Regular expression that is searched for in names such as model.transformer.blocks.0.norm_1.weight. A parameter is
    in the first group that matches it."""
    lr: float | None = setting(None, POSITIVE, change="logged")
    weight_decay: float | None = setting(None, NON_NEGATIVE, change="logged")
    betas: tuple[float, float] | None = setting(None, VALID_BETA, uses=_with_optimizers_of_run("betas"))
    eps: float | None = setting(None, POSITIVE, uses=_with_optimizers_of_run("eps"))
    adamw_lr: float | None = setting(None, POSITIVE, change="logged", uses=_with_optimizers_of_run("adamw_lr"))
    """With muon, the rate of what is no matrix. Default: lr of the group, if it has one."""
    momentum: float | None = setting(None, VALID_MOMENTUM, uses=_with_optimizers_of_run("momentum"))
    kwargs: dict[str, Any] = setting(dict, uses=(OWN_OPTIMIZER_OF_RUN,))
    """Settings that a `python:` optimizer has for its groups. Keys of the group that are not ours are moved here."""

    @property
    def our_settings(self) -> dict[str, Any]:
        """The group's own settings that have keys of ours, by key."""
        names = [key.name for key in fields(self) if key.name not in ("param_str_match", "kwargs")]
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def own_settings(self) -> dict[str, Any]:
        """All settings that the group has itself, by key."""
        return {**self.our_settings, **self.kwargs}


@dataclass(kw_only=True, slots=True, frozen=True)
class OptimizerConfig:
    """The optimizer, and its settings."""

    name: str = setting(
        choices=" ".join(OPTIMIZER_NAMES),
        instead=f"expected {join_with_or(OPTIMIZER_NAMES)}",
    )
    lr: float = setting(REQUIRED, POSITIVE, change="logged")
    """Learning rate. With muon, the rate of the blocks' matrices."""
    adamw_lr: float | None = setting(None, POSITIVE, change="logged", uses=_with_optimizers("adamw_lr"))
    """Rate of embeddings, head, norms and biases, which AdamW updates. Default: lr."""
    betas: tuple[float, float] | None = setting(None, VALID_BETA, uses=_with_optimizers("betas"))
    """Default (0.9, 0.95) for the AdamWs, (0.9, 0.99) for the Lions."""
    momentum: float | None = setting(None, VALID_MOMENTUM, uses=_with_optimizers("momentum"))
    """Momentum of the matrices' gradients; default 0.95."""
    ns_steps: int | None = setting(None, POSITIVE, uses=_with_optimizers("ns_steps"))
    """Iterations of Newton and Schulz; default 5."""
    ns_dtype: str | None = setting(None, choices="bf16 fp32", change="logged", uses=_with_optimizers("ns_dtype"))
    """Precision of these iterations; default bf16."""
    adjust_lr_fn: str | None = setting(None, choices="match_rms_adamw original", uses=_with_optimizers("adjust_lr_fn"))
    """torch's option. match_rms_adamw, the default, makes updates as large as AdamW's; original is Jordan's scale."""
    eps: float = setting(
        1e-8,
        POSITIVE,
        uses=(
            Use(
                has_effect=lambda optimizer, _: is_own(optimizer.name) or "eps" in OPTIMIZERS[optimizer.name].keys,
                reason="{block.name} has none",
            ),
        ),
    )
    weight_decay: float | None = setting(None, NON_NEGATIVE, change="logged", uses=_with_optimizers("weight_decay"))
    """Decoupled optimizers multiply it by lr / initial lr, the others by lr. Default: 1e-5 for decoupled_adamw, as in
    Composer, 0 for the others."""
    param_groups: list[ParameterGroupConfig] = setting(list)
    """Groups of parameters with settings of their own, chosen by name."""
    kwargs: dict[str, Any] = setting(dict, uses=(OWN_OPTIMIZER,))
    """Arguments of a `python:` optimizer."""

    @property
    def decay(self) -> float:
        """The weight decay, or its default for this optimizer."""
        if self.weight_decay is not None:
            return self.weight_decay
        return 0.0 if is_own(self.name) else OPTIMIZERS[self.name].weight_decay

    @property
    def decay_by_rate(self) -> float:
        """The weight decay for an optimizer of torch, which shrinks weights by lr * weight_decay in a step.

        Composer's decoupled optimizers shrink them by weight_decay * (lr / initial lr) instead (Loshchilov and Hutter
        2019, with the schedule alone as multiplier), so for these it is weight_decay / initial lr.
        """
        return self.decay / self.lr if OPTIMIZERS[self.name].decay_follows_schedule else self.decay

    @property
    def moment_betas(self) -> tuple[float, float]:
        """The betas, or their default for this optimizer, which takes betas."""
        betas = self.betas or OPTIMIZERS[self.name].betas
        assert betas is not None
        return betas


@dataclass(kw_only=True, slots=True, frozen=True)
class SchedulerConfig:
    """The schedule of the learning rate."""

    name: str = setting(choices=" ".join(SCHEDULE_NAMES))
    t_warmup: Duration = duration_setting("0ba", FRACTION_OF_RUN, may_be_zero=True)
    """Linear warm-up from 0."""
    t_max: Duration = duration_setting(
        "1dur",
        FRACTION_OF_RUN,
        uses=(
            Use(
                has_effect=lambda schedule, _: is_own(schedule.name) or SCHEDULES[schedule.name].has_end,
                reason="{block.name} has no end",
            ),
        ),
    )
    alpha_i: float = setting(1.0, NON_NEGATIVE, uses=_with_schedules("alpha_i"))
    """Multiplier after warm-up."""
    alpha_f: float = setting(
        0.0,
        NON_NEGATIVE,
        uses=_with_schedules("alpha_f", is_refused=False),
    )
    """cosine, linear, warmup_stable_decay: the multiplier at t_max."""
    t_decay: Duration = duration_setting("0.1dur", FRACTION_OF_RUN, uses=_with_schedules("t_decay"))
    """Span of the decay, which ends at t_max. Until then the rate is lr."""
    decay: str | None = setting(None, choices="linear cosine 1-sqrt", uses=_with_schedules("decay"))
    """Shape of the decay; default linear."""
    t_scale: Duration = duration_setting("1ba", FRACTION_OF_RUN, uses=_with_schedules("t_scale"))
    """Time scale of the decay."""
    t_cooldown: Duration = duration_setting(
        "0ba", FRACTION_OF_RUN, may_be_zero=True, uses=_with_schedules("t_cooldown")
    )
    """Linear decay over the last span before t_max."""
    alpha_f_decay: float = setting(0.0, NON_NEGATIVE, uses=_with_schedules("alpha_f_decay"))
    """Multiplier that the decay tends to."""
    alpha_f_cooldown: float = setting(0.0, NON_NEGATIVE, uses=_with_schedules("alpha_f_cooldown"))
    """Multiplier at the end of the cool-down."""
    kwargs: dict[str, Any] = setting(dict, uses=(OWN_SCHEDULE,))
    """Arguments of a `python:` schedule."""
