"""relay.jsonl in the run directory: which site had the run, from when to when, and how that ended. Append-only.

    {"number": 3, "site": "mi250", "turn": 1, "began": 1700000000.0, "from_batch": 400, "host": "login", …}
    {"number": 3, "over": 1700003600.0, "to_batch": 600, "code": 0, "ended": "stopped", "reason": null}

An allocation is one launch at one site. It has a line when it is about to begin, and another of the same number when it
has ended.
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
"""Ends of an allocation. `refused` is exit code 2 or a missing command; a `lost` launch left no exit code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    number: int
    """From 1 on."""
    site: str
    turn: int
    """Index in the order of sites."""
    began: float
    """Seconds since 1970."""
    from_batch: int
    """Batch of the newest save then."""
    host: str
    """The machine of the relay that began it."""
    price: float | None = None
    """Price of an hour of the site."""
    status_before: dict[str, Any] | None = None
    """status.json as it was then."""
    over: float | None = None
    """Seconds since 1970. None: it runs, or the relay was killed."""
    to_batch: int | None = None
    """Batch of the newest save at the end."""
    code: int | None = None
    """Exit code of the launch command; None if it was killed before it could write one."""
    ended: str | None = None
    reason: str | None = None

    @property
    def is_early(self) -> bool:
        return self.ended in (PREEMPTED, FAILED, LOST)

    @property
    def is_in_vain(self) -> bool:
        """Whether it ended early and saved nothing."""
        return self.is_early and (self.to_batch or 0) <= self.from_batch


MAX_NUMBER = 1e12
"""Limit of all numbers: of seconds since 1970, of batches, of a price. It is the year 33,658."""
BEGUN = {"number", "site", "turn", "began", "from_batch", "host"}
"""Keys that the first line of every allocation has."""


def read_allocations(folder: Path) -> list[Allocation]:
    """Return the allocations in order, without lines that a crash has cut off.

    Raises OSError where the file cannot be read, and ConfigError for a whole line that is not the relay's: without it,
    its launch might be launched again.
    """
    try:
        lines = list(read_lines_at_most(folder / JOURNAL, MAX_JSON_BYTES, JOURNAL))
    except FileNotFoundError:
        return []
    events: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if problem := _problem_of(event):
            raise ConfigError(f"{folder / JOURNAL}: line {number}: {problem}; mend the line, or remove it")
        events[event["number"]] = events.get(event["number"], {}) | event
    return [Allocation(**event) for event in events.values() if event.keys() >= BEGUN]  # else nothing was begun


def _problem_of(event: Any) -> str | None:
    if not isinstance(event, dict) or "number" not in event:
        return "expected a block with the number of an allocation"
    hints = get_type_hints(Allocation)
    for key, value in event.items():
        if key not in hints:
            return f"{key}: unknown key"
        kinds = [get_origin(kind) or kind for kind in get_args(hints[key]) or (hints[key],)]
        if not isinstance(value, (*kinds, *([int] if float in kinds else []))):
            words = {int: "a whole number", float: "a number", str: "text", dict: "a block"}[kinds[0]]
            return f"{key}: {value!r} given, expected {words}"
        if isinstance(value, int | float) and not abs(value) < MAX_NUMBER:
            return f"{key}: {shorten(value)} given, expected a number below {MAX_NUMBER:.0e}"
    return None


def append(folder: Path, **event: Any) -> None:
    """Write a line, which is on disk when this returns: an unknown launch would be launched twice. Raises OSError."""
    with open(folder / JOURNAL, "ab+", opener=open_no_link) as file:
        file.seek(0, os.SEEK_END)
        if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
            file.write(b"\n")  # after a line that was cut off
        file.write(mask_urls(json.dumps(event)).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
