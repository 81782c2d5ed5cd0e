"""relay.jsonl in the run folder: which site had the run, from when to when, and how that ended. Append-only.

    {"number": 3, "site": "mi250", "turn": 1, "began": 1700000000.0, "from_batch": 400, "host": "login", …}
    {"number": 3, "over": 1700003600.0, "to_batch": 600, "code": 0, "ended": "stopped", "reason": null}

An allocation is one launch at one site. A line is written when it is about to begin, and another with the same number
when it has ended. A relay that is killed and started again learns from these lines which launch may still be running.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from llmfoundry_lite.bounded import MAX_JSON_BYTES, read_lines_at_most
from llmfoundry_lite.errors import ConfigError, mask_urls
from llmfoundry_lite.files import open_no_link
from llmfoundry_lite.ranks.codec import shorten

JOURNAL = "relay.jsonl"
DONE, STOPPED, PREEMPTED, FAILED, REFUSED, LOST = "done", "stopped", "preempted", "failed", "refused", "lost"
"""Ends of an allocation. `refused` is exit code 2 or a missing command; a `lost` launch has no exit code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One launch at one site. Fields are the keys of the journal's two lines; the second line has `over` and below."""

    number: int
    """Allocations are numbered from 1."""
    site: str
    turn: int
    """Index in the order of sites."""
    began: float
    """Seconds since 1970."""
    from_batch: int
    """Batch of the newest save when it began."""
    host: str
    """The machine of the relay that began it."""
    price: float | None = None
    """Price of an hour of the site."""
    status_before: dict[str, Any] | None = None
    """Content of status.json when it began."""
    over: float | None = None
    """Seconds since 1970 at the end. None: it runs, or the relay was killed."""
    to_batch: int | None = None
    """Batch of the newest save at the end."""
    code: int | None = None
    """Exit code of the launch command; None if it was killed before it could write one."""
    ended: str | None = None
    """One of the ends above."""
    reason: str | None = None

    @property
    def is_early(self) -> bool:
        """Whether it ended before its batches were trained."""
        return self.ended in (PREEMPTED, FAILED, LOST)

    @property
    def saved_nothing(self) -> bool:
        """Whether it ended early, without a save after the one from which it began."""
        return self.is_early and (self.to_batch or 0) <= self.from_batch


MAX_NUMBER = 1e12
"""Limit of all numbers: seconds since 1970 (1e12 is the year 33,658), batches, a price."""
KEYS_OF_BEGINNING = {"number", "site", "turn", "began", "from_batch", "host"}
"""Keys that the first line of every allocation has."""
TYPE_NAMES = {int: "a whole number", float: "a number", str: "text", dict: "a block"}


def read_allocations(folder: Path) -> list[Allocation]:
    """Return the allocations in the journal of a run folder, in order. The list is empty without a journal.

    Lines that a crash has cut off are not JSON, and are skipped: whatever they announced had not happened. Raises
    OSError if the file cannot be read, and ConfigError for a whole line that the relay cannot have written. Without
    that line, a launch might be launched again.
    """
    try:
        lines = list(read_lines_at_most(folder / JOURNAL, MAX_JSON_BYTES, JOURNAL))
    except FileNotFoundError:
        return []
    allocations: dict[int, dict[str, Any]] = {}
    for line_number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        problem = _problem_of(event)
        if problem is not None:
            raise ConfigError(f"{folder / JOURNAL}: line {line_number}: {problem}; mend the line, or remove it")
        allocations.setdefault(event["number"], {}).update(event)
    # An allocation whose first line was cut off never began.
    return [Allocation(**fields) for fields in allocations.values() if fields.keys() >= KEYS_OF_BEGINNING]


def _problem_of(event: Any) -> str | None:
    """Return what is wrong with a line of the journal; None if it is one that the relay writes.

    Every key must be a field of Allocation, and its value must have the field's type.
    """
    if not isinstance(event, dict) or "number" not in event:
        return "expected a block with the number of an allocation"
    hints = get_type_hints(Allocation)
    for key, value in event.items():
        if key not in hints:
            return f"{key}: unknown key"
        # `dict[str, Any] | None` becomes [dict, NoneType], and `int` becomes [int].
        members = get_args(hints[key]) or (hints[key],)
        types = [get_origin(member) or member for member in members]
        # JSON has no difference between 3 and 3.0.
        is_whole_as_float = float in types and isinstance(value, int)
        if not isinstance(value, tuple(types)) and not is_whole_as_float:
            return f"{key}: {value!r} given, expected {TYPE_NAMES[types[0]]}"
        if isinstance(value, int | float) and not abs(value) < MAX_NUMBER:  # NaN is not below it either
            return f"{key}: {shorten(value)} given, expected a number below {MAX_NUMBER:.0e}"
    return None


def append(folder: Path, **event: Any) -> None:
    """Add a line to the journal of a run folder. Credentials in URLs are masked.

    The line is on disk when this returns, because a launch that nobody knows of would be launched twice. Raises
    OSError.
    """
    with open(folder / JOURNAL, "ab+", opener=open_no_link) as file:
        # A crash may have cut off the last line. The new one must not continue it.
        file.seek(0, os.SEEK_END)
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(mask_urls(json.dumps(event)).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
