"""Progress of a run, and the learning rate, which is a function of progress: no state to save or restore."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from composer.core import Callback, State, Timestamp
from composer.loggers import Logger

from llmfoundry_lite.config.schema import SchedulerConfig, TrainConfig
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.data.dataset import TextDataset
from llmfoundry_lite.errors import ConfigError

Clock = Callable[[str], float]
"""Unit (ba, ep, sp, tok) -> how much of it has been trained."""


def learning_rate_multiplier(
    schedule: SchedulerConfig, max_duration: Duration, elapsed: Clock, batches_per_epoch: int = 1
) -> float:
    """Return the factor of the learning rate for the next batch. Formulas as in Composer and LLM Foundry.

    All spans are counted in the unit of `max_duration` (config.check checks that they can be). An epoch's length
    converts batches and epochs. A fraction of the run is cut to a whole number of units, or of batches where the unit
    is epochs, as in Composer's `_convert_time`. `t_scale` is no span, and stays a fraction.
    """

    def span(duration: Duration, *, is_cut: bool = True) -> float:
        if duration.unit == max_duration.unit:
            return duration.value
        if duration.unit == "ep" and max_duration.unit == "ba":
            return duration.value * batches_per_epoch
        steps = batches_per_epoch if max_duration.unit == "ep" else 1
        if duration.unit != "dur":
            return duration.value / steps
        length = duration.value * steps * max_duration.value
        return (int(length) if is_cut else length) / steps

    t, t_warmup, t_max = elapsed(max_duration.unit), span(schedule.t_warmup), span(schedule.t_max)
    if schedule.name == "inv_sqrt_with_warmup":
        if t < t_warmup:
            return t / t_warmup
        t_scale, t_cooldown = span(schedule.t_scale, is_cut=False), span(schedule.t_cooldown)
        return _inverse_square_root(schedule, t, t_warmup, t_max, t_scale, t_cooldown)

    if schedule.name == "warmup_stable_decay" and t >= t_warmup:
        return _stable_then_decayed(schedule, t, t_max, span(schedule.t_decay))

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


def _stable_then_decayed(schedule: SchedulerConfig, t: float, t_max: float, t_decay: float) -> float:
    """Follow MiniCPM's schedule (Hu et al. 2024); 1-sqrt is the decay of Hägele et al. 2024.

    Before t_max - t_decay nothing depends on when the run ends. So any checkpoint from before it can be carried on
    with another end, or decay at once.
    """
    # A short run's decay may be cut to no step at all.
    fraction = min(1.0, max(0.0, (t - (t_max - t_decay)) / t_decay)) if t_decay else float(t >= t_max)
    left = {
        "linear": 1.0 - fraction,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * fraction)),
        "1-sqrt": 1.0 - math.sqrt(fraction),
    }[schedule.decay or "linear"]
    return schedule.alpha_f + (1.0 - schedule.alpha_f) * left


@dataclass(eq=False)
class LearningRate(Callback):
    """Sets the learning rate of every batch from the progress before it. Composer steps its schedulers before it counts
    the batch, so its second batch repeats the first one's rate, and their state has to be saved. This has no state."""

    schedule: SchedulerConfig
    max_duration: Duration

    def fit_start(self, state: State, logger: Logger) -> None:
        """Raise ConfigError if spans need the length of an epoch and the data does not have one."""
        if state.dataloader_len is not None:
            return
        run, is_constant = self.max_duration, self.schedule.name == "constant_with_warmup"
        for key in ("t_warmup",) if is_constant else ("t_warmup", "t_max"):
            span: Duration = getattr(self.schedule, key)
            if span.value > 0 and (run.unit, span.unit) in (("ep", "ba"), ("ep", "dur"), ("ba", "ep")):
                raise ConfigError(
                    f"scheduler.{key}: {span} of a run of {run} needs the number of batches in an epoch, and "
                    f"train_loader does not tell it; write both in ba"
                )

    def batch_start(self, state: State, logger: Logger) -> None:
        num_batches = int(state.dataloader_len or 1)
        multiplier = learning_rate_multiplier(
            self.schedule, self.max_duration, lambda unit: elapsed(state, unit), num_batches
        )
        for group in state.optimizers[0].param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * multiplier


def progress_of(state: State, max_duration: Duration) -> float:
    """Return the fraction of the run that is done."""
    return elapsed(state, max_duration.unit) / max_duration.value


def is_evaluation_due(config: TrainConfig, state: State) -> bool:
    """Return whether an evaluation follows this batch: every `eval_interval`, and after the last batch."""
    if not config.evaluates or not (config.validation or config.icl_tasks):
        return False
    is_over = progress_of(state, config.max_duration) >= 1
    return is_over or has_passed(state, config.eval_interval)


def has_passed(state: State, span: Duration) -> bool:
    """Return whether a multiple of the span was reached in the last batch."""
    before = elapsed(state, span.unit, state.previous_timestamp) // span.value
    return elapsed(state, span.unit) // span.value > before


def elapsed(state: State, unit: str, at: Timestamp | None = None) -> float:
    """Return how much has been trained, in `unit`, now or `at` a time. Epochs count in fractions."""
    stamp = at or state.timestamp
    if unit == "ep":
        epoch, length = int(stamp.epoch), state.dataloader_len
        if length is None:  # with stages, each epoch has a length of its own
            dataset = getattr(state.train_dataloader, "dataset", None)
            length = dataset.stages.num_batches(epoch) if isinstance(dataset, TextDataset) else None
        return epoch + int(stamp.batch_in_epoch) / int(length or 1)
    return int(stamp.get(unit))
