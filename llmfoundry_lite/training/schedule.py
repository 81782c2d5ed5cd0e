"""Progress of a run, and the learning rate, which is a function of progress: it has no state to save or restore."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from composer.core import Callback, State, Timestamp
from composer.loggers import Logger

from llmfoundry_lite.config.optimizer_schema import SchedulerConfig
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.data.dataset import TextDataset
from llmfoundry_lite.errors import ConfigError


class OwnSchedule(Protocol):
    """A schedule of the user's own, as LLM Foundry and Composer have them: `Thing(**kwargs)` returns one.

    It must be a function of the progress alone. It has no state that a checkpoint would hold, and a run that resumes
    calls it with the batches that are left.
    """

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor of the learning rate for the next batch.

        `state.timestamp` has what was trained before it and `state.max_duration` the length of the run, both as
        Composer counts them. `ssr` is 1.
        """
        ...


Clock = Callable[[str], float]
"""A unit (ba, ep, sp or tok) -> how much of it has been trained."""


def learning_rate_multiplier(
    schedule: SchedulerConfig, max_duration: Duration, elapsed: Clock, batches_per_epoch: int = 1
) -> float:
    """Return the factor of the learning rate for the next batch, by the formulas of Composer and LLM Foundry.

    `elapsed(unit)` returns what has been trained, and `batches_per_epoch` converts batches and epochs. All durations of
    the schedule are counted in the unit of `max_duration`, the length of the run; `config.check` checks that they can
    be.

    All schedules rise linearly during t_warmup. Then, with f the fraction of the time between t_warmup and t_max
    that has passed:

    constant_with_warmup: 1
    linear_decay_with_warmup: alpha_i + f (alpha_f - alpha_i)
    cosine_with_warmup: alpha_f + (1 - alpha_f) (1 + cos(pi f)) / 2
    inv_sqrt_with_warmup and warmup_stable_decay: see `_inverse_square_root` and `_stable_then_decayed`

    For example, cosine_with_warmup with t_warmup 10ba, t_max 110ba and alpha_f 0.1 gives 0.5 after 5 batches, 1 after
    10, 0.55 after 60 and 0.1 after 110.
    """

    def convert(duration: Duration, *, is_whole: bool = True) -> float:
        return convert_duration(duration, max_duration, batches_per_epoch, is_whole=is_whole)

    t = elapsed(max_duration.unit)
    t_warmup = convert(schedule.t_warmup)
    t_max = convert(schedule.t_max)
    is_warming_up = t < t_warmup

    # Two schedules do not follow from f alone.
    if schedule.name == "inv_sqrt_with_warmup":
        if is_warming_up:
            return t / t_warmup
        t_scale = convert(schedule.t_scale, is_whole=False)
        return _inverse_square_root(schedule, t, t_warmup, t_max, t_scale, convert(schedule.t_cooldown))
    if schedule.name == "warmup_stable_decay" and not is_warming_up:
        return _stable_then_decayed(schedule, t, t_max, convert(schedule.t_decay))

    # The warm-up ends at the value that the schedule begins with.
    peak = 1.0
    if schedule.name == "linear_decay_with_warmup":
        peak = schedule.alpha_i
    if is_warming_up:
        return peak * t / t_warmup

    fraction = 1.0  # f; a warm-up may take the whole run
    if t_max > t_warmup:
        fraction = min(1.0, (t - t_warmup) / (t_max - t_warmup))
    if schedule.name == "cosine_with_warmup":
        return schedule.alpha_f + (1.0 - schedule.alpha_f) * 0.5 * (1.0 + math.cos(math.pi * fraction))
    if schedule.name == "linear_decay_with_warmup":
        return peak + fraction * (schedule.alpha_f - peak)
    return 1.0


def convert_duration(
    duration: Duration, max_duration: Duration, batches_per_epoch: int, *, is_whole: bool = True
) -> float:
    """Convert a duration of a schedule to the unit of `max_duration`, which is the length of the run.

    For example, with a run of 4ep of 250 batches each, 500ba are 2 epochs and 0.1dur are 0.4 epochs; with a run of
    1000ba, 1ep is 250 batches and 0.1dur are 100.

    A fraction of the run (`dur`) is cut to a whole number of units, or of batches if the unit is epochs, as Composer's
    `_convert_time` does. With `is_whole` False it stays a fraction: `t_scale` is a parameter of a curve, not a time.
    """
    if duration.unit == max_duration.unit:
        return duration.value
    if duration.unit == "ep" and max_duration.unit == "ba":
        return duration.value * batches_per_epoch

    # What remains is batches in a run of epochs, or a fraction of any run.
    steps_per_unit = batches_per_epoch if max_duration.unit == "ep" else 1
    if duration.unit != "dur":
        return duration.value / steps_per_unit
    num_steps = duration.value * steps_per_unit * max_duration.value
    if is_whole:
        num_steps = int(num_steps)
    return num_steps / steps_per_unit


def _inverse_square_root(
    schedule: SchedulerConfig, t: float, t_warmup: float, t_max: float, t_scale: float, t_cooldown: float
) -> float:
    """Return the learning rate's factor in LLM Foundry's inverse square root schedule, after the warm-up.

    The factor first decays from 1 towards `alpha_f_decay`, as 1 / sqrt((t - t_warmup + t_scale) / t_scale) goes from 1
    to 0. During the last `t_cooldown` before `t_max`, it falls linearly from where the decay has got to, and ends at
    `alpha_f_cooldown`. `t` is the time trained. All times are in the unit of the run's length.
    """

    def decayed(t: float) -> float:
        root = 1.0 / math.sqrt((t - t_warmup + t_scale) / t_scale)
        return schedule.alpha_f_decay + (1.0 - schedule.alpha_f_decay) * root

    # Before the cooldown. Without one, the factor stays where it was at the end.
    cooldown_start = max(t_warmup, t_max - t_cooldown)
    if t < cooldown_start or t_cooldown == 0:
        return decayed(min(t, cooldown_start))

    fraction = min(1.0, (t - cooldown_start) / t_cooldown)
    start = decayed(cooldown_start)
    return start + fraction * (schedule.alpha_f_cooldown - start)


def _stable_then_decayed(schedule: SchedulerConfig, t: float, t_max: float, t_decay: float) -> float:
    """Return the learning rate's factor in MiniCPM's schedule (Hu et al. 2024), after the warm-up.

    It is 1 until t_max - t_decay, and then decays to `alpha_f` at t_max: linearly, as a cosine, or as 1 - sqrt(f)
    (Hägele et al. 2024), where f is the fraction of the decay that has passed. `t` is the time trained. All times are
    in the unit of the run's length.

    Before the decay, nothing depends on when the run ends. So a checkpoint from before it can be carried on with
    another end, or decayed at once.
    """
    if t_decay:
        fraction = min(1.0, max(0.0, (t - (t_max - t_decay)) / t_decay))
    else:  # a short run's decay may be cut to no step at all
        fraction = float(t >= t_max)
    remaining = {
        "linear": 1.0 - fraction,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * fraction)),
        "1-sqrt": 1.0 - math.sqrt(fraction),
    }[schedule.decay or "linear"]
    return schedule.alpha_f + (1.0 - schedule.alpha_f) * remaining


@dataclass(eq=False)
class LearningRate(Callback):
    """Sets the learning rate of every batch from the progress before it. It has no state.

    Composer steps its schedulers before it counts the batch, so that its second batch repeats the first one's rate, and
    their state has to be saved.
    """

    schedule: SchedulerConfig
    max_duration: Duration
    own_schedule: OwnSchedule | None = None
    """The user's own, if `schedule` names it."""

    def fit_start(self, state: State, logger: Logger) -> None:
        """Raise ConfigError if the schedule needs the number of batches in an epoch, and the data does not have it.

        A user's own loader, for example, may have no length. Then durations in epochs and in batches cannot be
        converted into each other.
        """
        if state.dataloader_len is not None or self.own_schedule is not None:
            return
        units_to_convert = (("ep", "ba"), ("ep", "dur"), ("ba", "ep"))  # of the run, and of a duration of the schedule
        keys = ("t_warmup", "t_max")
        if self.schedule.name == "constant_with_warmup":  # which does not use t_max
            keys = ("t_warmup",)
        for key in keys:
            duration: Duration = getattr(self.schedule, key)
            if duration.value > 0 and (self.max_duration.unit, duration.unit) in units_to_convert:
                raise ConfigError(
                    f"scheduler.{key}: {duration} of a run of {self.max_duration} needs the number of batches in an "
                    f"epoch, and train_loader does not tell it; write both in ba"
                )

    def batch_start(self, state: State, logger: Logger) -> None:
        """Set the learning rate of each group of parameters for the batch that begins.

        A group's rate is its `initial_lr`, which is set here in the first batch if a checkpoint has not restored it,
        times the schedule's factor.
        """
        multiplier = self._multiplier(state)
        for group in state.optimizers[0].param_groups:
            initial_lr = group.setdefault("initial_lr", group["lr"])
            group["lr"] = initial_lr * multiplier

    def _multiplier(self, state: State) -> float:
        """Return the factor of the learning rate for the batch that begins.

        Raises ConfigError if the user's own schedule returns no number of 0 or more.
        """
        if self.own_schedule is None:
            batches_per_epoch = int(state.dataloader_len or 1)
            return learning_rate_multiplier(
                self.schedule, self.max_duration, lambda unit: elapsed(state, unit), batches_per_epoch
            )

        multiplier = self.own_schedule(state, 1.0)
        is_factor = isinstance(multiplier, int | float) and math.isfinite(multiplier) and multiplier >= 0
        if not is_factor:
            raise ConfigError(
                f"scheduler.name: {self.schedule.name} returns {multiplier!r} for batch "
                f"{int(state.timestamp.batch) + 1}, expected a finite number of 0 or more"
            )
        return float(multiplier)


def progress_of(state: State, max_duration: Duration) -> float:
    """Return the fraction of the run that is done; 1 at its end."""
    return elapsed(state, max_duration.unit) / max_duration.value


def is_evaluation_due(config: TrainConfig, state: State) -> bool:
    """Return whether an evaluation follows the last batch: every `eval_interval`, and after the run's last batch."""
    if not config.evaluates or not (config.validation or config.icl_tasks):
        return False
    is_over = progress_of(state, config.max_duration) >= 1
    return is_over or has_passed(state, config.eval_interval)


def has_passed(state: State, span: Duration) -> bool:
    """Return whether the run has reached a multiple of `span` in its last batch."""
    before = elapsed(state, span.unit, state.previous_timestamp) // span.value
    return elapsed(state, span.unit) // span.value > before


def elapsed(state: State, unit: str, at: Timestamp | None = None) -> float:
    """Return how much has been trained until now, or until `at`, an earlier time of the run.

    `unit` is ba, ep, sp or tok: batches, epochs, samples or tokens. Epochs are counted in fractions, such as 1.5 in the
    middle of the second one, if the number of their batches is known.
    """
    timestamp = at or state.timestamp
    if unit != "ep":
        return int(timestamp.get(unit))

    epoch = int(timestamp.epoch)
    num_batches = state.dataloader_len
    if num_batches is None:  # each epoch of a run with stages has a length of its own
        dataset = getattr(state.train_dataloader, "dataset", None)
        if isinstance(dataset, TextDataset):
            num_batches = dataset.stages.num_batches(epoch)
    return epoch + int(timestamp.batch_in_epoch) / int(num_batches or 1)
