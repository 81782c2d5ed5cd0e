"""What a check is told, and what it answers. No torch."""

from dataclasses import dataclass, replace
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
    """This machine has nothing to check here, or does not let us look."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Machine:
    """What the user chose; a check finds out the rest itself."""

    folder: Path = Path(".")
    """Where checkpoints will go."""
    num_ranks: int | None = None
    """Processes of the collectives; None is one per device, or 2 on CPUs."""
    quick: bool = False
    """Less memory, smaller files, shorter measurements: under 10 s without a GPU."""
    limit_seconds: float = 120
    """Of one check."""
    ranks_limit_seconds: float = 90
    """Of the ranks that a check starts; less, so that the check can say what it saw."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Finding:
    """One line of the table."""

    check: str
    status: Status
    value: float | str | None = None
    """What was measured."""
    unit: str | None = None
    """Of a value that is a number."""
    detail: str = ""
    fix: str = ""
    """What to do, or to type; of every finding that is neither pass nor skip."""
    seconds: float = 0.0
    """How long it took."""

    def with_seconds(self, seconds: float) -> "Finding":
        return replace(self, seconds=round(seconds, 3))


def judge(problems: list[str], otherwise: Status = Status.PASS) -> Status:
    """Any problem is a failure."""
    return Status.FAIL if problems else otherwise


def shorten(problems: list[str], limit: int = 3) -> str:
    """The first problems as one sentence, with a count of the others."""
    more = f"; and {len(problems) - limit} more" if len(problems) > limit else ""
    return "; ".join(problems[:limit]) + more
