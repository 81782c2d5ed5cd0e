"""Progress of a run, and the learning rate, which is a function of progress: it has no state to save or restore."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from composer.core import Callback, State, Timestamp
from composer.loggers import Logger

from llmfoundry_lite.companions import import_address
from llmfoundry_lite.config.optimizer_schema import SchedulerConfig
from llmfoundry_lite.config.schedules import SCHEDULES
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


@dataclass(kw_only=True, slots=True, frozen=True)
class Times:
    """Where a run is in its schedule. All times are in the unit of the run's length.

    A schedule has those of its durations that its row in the table names; the others are 0.
    """

    t: float
    """The part of the run that has been trained."""
    t_warmup: float
    t_max: float = 0.0
    t_scale: float = 0.0
    t_cooldown: float = 0.0
    t_decay: float = 0.0

    @property
    def fraction(self) -> float:
        """The fraction of the time between t_warmup and t_max that has passed; 1 after t_max."""
        if self.t_max <= self.t_warmup:  # a warm-up may take the whole run
            return 1.0
        return min(1.0, (self.t - self.t_warmup) / (self.t_max - self.t_warmup))


class Formula(Protocol):
    """The function that a row of the table of schedules names."""

    def __call__(self, schedule: SchedulerConfig, times: Times) -> float:
        """Return the learning rate's factor after the warm-up."""
        ...


@cache
def find_formula(name: str) -> Formula:
    """Import the formula of one of our schedules, which the table of schedules names."""
    return import_address(SCHEDULES[name].formula)


def learning_rate_multiplier(
    schedule: SchedulerConfig, max_duration: Duration, elapsed: Clock, batches_per_epoch: int = 1
) -> float:
    """Return the factor of the learning rate for the next batch, by the formulas of Composer and LLM Foundry.

    `elapsed(unit)` returns what has been trained, and `batches_per_epoch` converts batches and epochs. All durations of
    the schedule are counted in the unit of `max_duration`, the length of the run; `config.check` checks that they can
    be.

    All schedules rise linearly during t_warmup, up to `alpha_i` if they have that key, otherwise to 1. For example,
    cosine_with_warmup with t_warmup 10ba, t_max 110ba and alpha_f 0.1 gives 0.5 after 5 batches, 1 after 10, 0.55 after
    60 and 0.1 after 110.
    """
    row = SCHEDULES[schedule.name]
    lengths: dict[str, float] = {}
    for key in row.durations:
        is_time = key != "t_scale"  # which is a parameter of a curve
        lengths[key] = convert_duration(getattr(schedule, key), max_duration, batches_per_epoch, is_whole=is_time)
    times = Times(t=elapsed(max_duration.unit), **lengths)

    if times.t < times.t_warmup:
        peak = schedule.alpha_i if "alpha_i" in row.keys else 1.0
        return peak * times.t / times.t_warmup
    return find_formula(schedule.name)(schedule, times)


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


def constant(schedule: SchedulerConfig, times: Times) -> float:
    """Return the factor of a constant learning rate."""
    return 1.0


def cosine(schedule: SchedulerConfig, times: Times) -> float:
    """Return the factor of Composer's cosine, which falls from 1 after the warm-up to `alpha_f` at t_max."""
    return schedule.alpha_f + (1.0 - schedule.alpha_f) * 0.5 * (1.0 + math.cos(math.pi * times.fraction))


def linear_decay(schedule: SchedulerConfig, times: Times) -> float:
    """Return the factor of Composer's linear decay, from `alpha_i` after the warm-up to `alpha_f` at t_max."""
    return schedule.alpha_i + times.fraction * (schedule.alpha_f - schedule.alpha_i)


def inverse_square_root(schedule: SchedulerConfig, times: Times) -> float:
    """Return the learning rate's factor in LLM Foundry's inverse square root schedule.

    The factor first decays from 1 towards `alpha_f_decay`, as 1 / sqrt((t - t_warmup + t_scale) / t_scale) goes from 1
    to 0. During the last `t_cooldown` before `t_max`, it falls linearly from where the decay has got to, and ends at
    `alpha_f_cooldown`.
    """

    def decayed(t: float) -> float:
        root = 1.0 / math.sqrt((t - times.t_warmup + times.t_scale) / times.t_scale)
        return schedule.alpha_f_decay + (1.0 - schedule.alpha_f_decay) * root

    # Before the cooldown. Without one, the factor stays where it was at the end.
    cooldown_start = max(times.t_warmup, times.t_max - times.t_cooldown)
    if times.t < cooldown_start or times.t_cooldown == 0:
        return decayed(min(times.t, cooldown_start))

    fraction = min(1.0, (times.t - cooldown_start) / times.t_cooldown)
    start = decayed(cooldown_start)
    return start + fraction * (schedule.alpha_f_cooldown - start)


def stable_then_decayed(schedule: SchedulerConfig, times: Times) -> float:
    """Return the learning rate's factor in MiniCPM's schedule (Hu et al. 2024).

    It is 1 until t_max - t_decay, and then decays to `alpha_f` at t_max: linearly, as a cosine, or as 1 - sqrt(f)
    (Hägele et al. 2024), where f is the fraction of the decay that has passed.

    Before the decay, nothing depends on when the run ends. So a checkpoint from before it can be carried on with
    another end, or decayed at once.
    """
    if times.t_decay:
        fraction = min(1.0, max(0.0, (times.t - (times.t_max - times.t_decay)) / times.t_decay))
    else:  # a short run's decay may be cut to no step at all
        fraction = float(times.t >= times.t_max)
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
    logs_groups: bool = False
    """Whether the rates of all groups but the first, whose rate is `lr`, are logged as `lr/groupN`."""

    def fit_start(self, state: State, logger: Logger) -> None:
        """Raise ConfigError if the schedule needs the number of batches in an epoch, and the data does not have it.

        A user's own loader, for example, may have no length. Then durations in epochs and in batches cannot be
        converted into each other.
        """
        if state.dataloader_len is not None or self.own_schedule is not None:
            return
        units_to_convert = (("ep", "ba"), ("ep", "dur"), ("ba", "ep"))  # of the run, and of a duration of the schedule
        for key in SCHEDULES[self.schedule.name].durations:
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
        groups = state.optimizers[0].param_groups
        for group in groups:
            initial_lr = group.setdefault("initial_lr", group["lr"])
            group["lr"] = initial_lr * multiplier

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Log the learning rates of the groups, with the number of the batch that has been trained.

        Composer logs at `batch_start` with the number before it, and some loggers drop a step that is less than the
        last one. So nothing is logged with the new number before the loss is.
        """
        if self.logs_groups:
            groups = state.optimizers[0].param_groups
            rates = {f"lr/group{index}": groups[index]["lr"] for index in range(1, len(groups))}
            logger.log_metrics(rates, step=int(state.timestamp.batch) + 1)

    def _multiplier(self, state: State) -> float:
        """Return the factor of the learning rate for the batch that begins.

        Raises ConfigError if the user's own schedule returns no number of 0 or more.
        """
        if self.own_schedule is None:
            batches_per_epoch = int(state.dataloader_len or 1)
            return learning_rate_multiplier(
                self.schedule, self.max_duration, lambda unit: elapsed(state, unit), batches_per_epoch
            )

        multiplier: Any = self.own_schedule(state, 1.0)
        if getattr(multiplier, "ndim", None) == 0:  # a number of torch or NumPy
            multiplier = multiplier.item()
        is_factor = isinstance(multiplier, int | float) and math.isfinite(multiplier) and multiplier >= 0
        if not is_factor:
            raise ConfigError(
                f"scheduler.name: {self.schedule.name} returns {multiplier!r} for batch "
                f"{int(state.timestamp.batch) + 1}, expected a finite number of 0 or more, such as a float"
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
    dataset = getattr(state.train_dataloader, "dataset", None)
    if isinstance(dataset, TextDataset):
        if dataset.joins_batches:  # a batch may have samples of two epochs
            return dataset.count_epochs(int(timestamp.batch))
        if num_batches is None:  # each epoch of a run with stages has a length of its own
            num_batches = dataset.stages.num_batches(epoch)
    return epoch + int(timestamp.batch_in_epoch) / int(num_batches or 1)
