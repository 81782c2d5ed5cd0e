"""The learning-rate multiplier as a pure function of how far a run has come: nothing to save, nothing to restore."""

import math
from collections.abc import Callable

from llmfoundry_lite.config.schema import Duration, SchedulerConfig

Clock = Callable[[str], float]
"""Unit (ba, ep, sp, tok) -> how much of it has been trained."""


def learning_rate_multiplier(schedule: SchedulerConfig, max_duration: Duration, elapsed: Clock) -> float:
    """What the learning rate is multiplied by for the next batch. Formulas as in Composer and LLM Foundry.

    All spans are counted in the unit of `max_duration` (config.check checks that they can be).
    """

    def span(text: str | int) -> float:
        duration = Duration.parse(text)
        return duration.value * max_duration.value if duration.unit == "dur" else duration.value

    t, t_warmup, t_max = elapsed(max_duration.unit), span(schedule.t_warmup), span(schedule.t_max)
    if schedule.name == "inv_sqrt_with_warmup":
        if t < t_warmup:
            return t / t_warmup
        return _inverse_square_root(schedule, t, t_warmup, t_max, span(schedule.t_scale), span(schedule.t_cooldown))

    start = schedule.alpha_i if schedule.name == "linear_decay_with_warmup" else 1.0
    if t < t_warmup:
        return start * t / t_warmup
    fraction = min(1.0, (t - t_warmup) / (t_max - t_warmup)) if t_max > t_warmup else 1.0
    if schedule.name == "cosine_with_warmup":
        return schedule.alpha_f + (1.0 - schedule.alpha_f) * 0.5 * (1.0 + math.cos(math.pi * fraction))
    if schedule.name == "linear_decay_with_warmup":
        return start + fraction * (schedule.alpha_f - start)
    return 1.0


def _inverse_square_root(
    schedule: SchedulerConfig, t: float, t_warmup: float, t_max: float, t_scale: float, t_cooldown: float
) -> float:
    def decayed(t: float) -> float:
        root = 1.0 / math.sqrt((t - t_warmup + t_scale) / t_scale)
        return schedule.alpha_f_decay + (1.0 - schedule.alpha_f_decay) * root

    cooldown_start = max(t_warmup, t_max - t_cooldown)
    if t < cooldown_start or t_cooldown == 0:
        return decayed(min(t, cooldown_start))
    fraction = min(1.0, (t - cooldown_start) / t_cooldown)
    peak = decayed(cooldown_start)
    return peak + fraction * (schedule.alpha_f_cooldown - peak)
