"""The table of schedules of the learning rate: what the package knows of each one, by the name that a YAML gives it.

The schema of the block `scheduler`, its checks, and `training/schedule.py` read a row of `SCHEDULES` instead of asking
for a name. A formula is named by its address, so that reading the table imports no torch. To add a schedule, write a
function that computes it and a row; docs/training.md and docs/coming-from-llm-foundry.md list the names.

A schedule of the user's own (`python:package.module:Thing`) has no row.
"""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True, frozen=True)
class ScheduleRow:
    """A schedule: the function that computes it, and what a YAML may say of it."""

    formula: str
    """Address of the function that computes the learning rate's factor after the warm-up, `module:function`. Its
    signature is `training.schedule.Formula`."""
    keys: tuple[str, ...] = ()
    """Keys of the block `scheduler` that it uses besides `name` and `t_warmup`. All others are refused, or noted."""
    mixes_batches_and_epochs: bool = False
    """Whether its durations may be in batches and epochs side by side, as Composer's may. A launch converts them."""
    foundry_class: str | None = None
    """Composer's or LLM Foundry's class that has the same formula; None if there is none."""
    other_words: tuple[str, ...] = ()
    """Names that other libraries have for it, for suggestions."""

    @property
    def has_end(self) -> bool:
        """Whether it ends at `t_max`."""
        return "t_max" in self.keys

    @property
    def durations(self) -> tuple[str, ...]:
        """The keys that are durations, `t_warmup` first."""
        return ("t_warmup", *[key for key in self.keys if key.startswith("t_")])


SCHEDULES: dict[str, ScheduleRow] = {
    "constant_with_warmup": ScheduleRow(
        formula="llmfoundry_lite.training.schedule:constant",
        mixes_batches_and_epochs=True,
        foundry_class="ConstantWithWarmupScheduler",
    ),
    "cosine_with_warmup": ScheduleRow(
        formula="llmfoundry_lite.training.schedule:cosine",
        keys=("t_max", "alpha_f"),
        mixes_batches_and_epochs=True,
        foundry_class="CosineAnnealingWithWarmupScheduler",
    ),
    "linear_decay_with_warmup": ScheduleRow(
        formula="llmfoundry_lite.training.schedule:linear_decay",
        keys=("t_max", "alpha_i", "alpha_f"),
        mixes_batches_and_epochs=True,
        foundry_class="LinearWithWarmupScheduler",
    ),
    "inv_sqrt_with_warmup": ScheduleRow(
        formula="llmfoundry_lite.training.schedule:inverse_square_root",
        keys=("t_max", "t_scale", "t_cooldown", "alpha_f_decay", "alpha_f_cooldown"),
        foundry_class="InverseSquareRootWithWarmupScheduler",
    ),
    "warmup_stable_decay": ScheduleRow(
        formula="llmfoundry_lite.training.schedule:stable_then_decayed",
        keys=("t_max", "alpha_f", "t_decay", "decay"),
        other_words=("wsd",),
    ),
}
"""Name in a YAML -> the schedule."""


def schedules_with(key: str) -> list[str]:
    """Return the names of the schedules that use a key of the block `scheduler`."""
    return [name for name, row in SCHEDULES.items() if key in row.keys]
