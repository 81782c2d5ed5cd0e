"""The machine that a check examines, and the findings that it yields. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

INSTALL = "make install, or pip install --no-deps -r requirements-without-torch.txt where the image brings torch"


class Status(StrEnum):
    PASS = "pass"
    WARN = "warn"
    """A run works, but slower or with less than it could have."""
    FAIL = "fail"
    """A run would crash, hang or compute something else."""
    SKIP = "skip"
    """Nothing to check on this machine, or no permission."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Machine:
    """The user's choices; a check finds out the rest itself."""

    folder: Path | str = Path(".")
    """The folder for checkpoints; text if it is a URL."""
    num_ranks: int | None = None
    """Processes of the collectives; None is one per device, or 2 on CPUs."""
    quick: bool = False
    """Less memory, smaller files, shorter measurements: under 10 s without a GPU."""
    limit_seconds: float = 120
    """Time for one check."""
    ranks_limit_seconds: float = 90
    """Time for the ranks that a check starts; less, so that the check can report on them."""


@dataclass(slots=True, frozen=True)
class Finding:
    """One line of the table."""

    check: str
    status: Status
    value: float | str | None = None
    """The measurement."""
    unit: str | None = None
    detail: str = ""
    fix: str = ""
    """The remedy, or the command to type; required for warn and fail."""
    seconds: float = 0.0
    """Time that the check took."""


def judge(
    check: str,
    problems: Sequence[str],
    fix: str,
    severity: Status = Status.FAIL,
    *,
    value: float | str | None = None,
    unit: str | None = None,
    detail: str = "",
    sound: str = "",
) -> Finding:
    """Return a pass, or with problems a finding of `severity` with the fix. The text is `detail`, then the problems, or
    `sound` where there are none."""
    text = "; ".join(filter(None, (detail, shorten(problems) or sound)))
    if problems:
        return Finding(check, severity, value, unit, text, fix)
    return Finding(check, Status.PASS, value, unit, text)


def shorten(problems: Sequence[str], limit: int = 3) -> str:
    """Join the first problems to one sentence, with a count of the others."""
    more = f"; and {len(problems) - limit} more" if len(problems) > limit else ""
    return "; ".join(problems[:limit]) + more
