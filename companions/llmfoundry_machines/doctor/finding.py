"""The options that every check gets, and the findings that it yields. No torch.

Checks build most findings with `make_finding`, which chooses between a pass and a problem with its remedy. `examine.py`
runs the checks and prints what they found.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

INSTALL_FIX = "make install, or pip install --no-deps -r requirements-without-torch.txt where the image brings torch"


class Status(StrEnum):
    """The result of a check, as the table and the JSON show it."""

    PASS = "pass"
    WARN = "warn"
    """A run works, but slower or with less than it could have."""
    FAIL = "fail"
    """A run would crash, hang or compute wrong results."""
    SKIP = "skip"
    """There is nothing to check on this machine, or the system does not allow the check."""


@dataclass(kw_only=True, slots=True, frozen=True)
class CheckOptions:
    """Options that the user gave. Every check gets the same options and finds out everything else itself."""

    folder: Path | str = Path(".")
    """The folder for checkpoints: a Path on this machine, or text if it is a URL."""
    num_ranks: int | None = None
    """Number of ranks that test the collectives; None is one per device, or 2 on CPUs."""
    quick: bool = False
    """Use less memory, smaller files and shorter measurements: under 10 s without a GPU."""
    limit_seconds: float = 120
    """Time limit of one check."""
    ranks_limit_seconds: float = 90
    """Time limit of the ranks that a check starts. It is below `limit_seconds`, so that the check can report on
    them."""


@dataclass(slots=True, frozen=True)
class Finding:
    """One row of the table, and one object of the JSON."""

    check: str
    status: Status
    value: float | str | None = None
    """The measurement: a number in `unit`, or a text such as a version."""
    unit: str | None = None
    detail: str = ""
    fix: str = ""
    """The remedy, or the command to type; required for warn and fail."""
    seconds: float = 0.0
    """Time that it took, from the start of the check or from its previous finding."""


def make_finding(
    check: str,
    problems: Sequence[str],
    fix: str,
    severity: Status = Status.FAIL,
    *,
    value: float | str | None = None,
    unit: str | None = None,
    detail: str = "",
    pass_detail: str = "",
) -> Finding:
    """Build a finding that passes if there are no problems, and that has `severity` and `fix` otherwise.

    The finding's text is `detail`, followed by the problems, or by `pass_detail` if there are none:

        make_finding("disk", [], "free space", detail="/data", pass_detail="enough")      pass: "/data; enough"
        make_finding("disk", ["full"], "free space", detail="/data", pass_detail="enough")  fail: "/data; full"
    """
    outcome = shorten(problems) or pass_detail
    text = "; ".join(filter(None, (detail, outcome)))
    if problems:
        return Finding(check, severity, value, unit, text, fix)
    return Finding(check, Status.PASS, value, unit, text)


def shorten(problems: Sequence[str], limit: int = 3) -> str:
    """Join the first `limit` problems with semicolons and count the others: "a; b; c; and 2 more"."""
    joined = "; ".join(problems[:limit])
    num_more = len(problems) - limit
    return f"{joined}; and {num_more} more" if num_more > 0 else joined
