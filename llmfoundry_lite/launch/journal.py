"""relay.jsonl in the run directory: which place had the run, from when to when, and how that ended. Only appended to.

    {"number": 3, "place": "mi250", "turn": 1, "began": 1700000000.0, "from_batch": 400, "host": "login", …}
    {"number": 3, "over": 1700003600.0, "to_batch": 600, "code": 0, "ended": "stopped", "reason": null}

A leg is one launch at one place: a line when it is about to begin, another when it has ended, of the same number. The
relay writes them; the relay, when it is started again, and `report` read them.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmfoundry_lite.errors import ConfigError

JOURNAL = "relay.jsonl"
DONE, STOPPED, PREEMPTED, FAILED, REFUSED, LOST = "done", "stopped", "preempted", "failed", "refused", "lost"
"""How a leg ends. `refused` is exit code 2, or a command that is not there; `lost` is a launch that left no word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    number: int
    """From 1 on."""
    place: str
    turn: int
    """Its index in the order of places."""
    began: float
    """Seconds since 1970."""
    from_batch: int
    """Of the newest save then."""
    host: str
    """Where the relay began it."""
    price: float | None = None
    """Of an hour of the place."""
    status_before: dict[str, Any] | None = None
    """status.json as it was then."""
    over: float | None = None
    """None: it runs, or the relay was killed."""
    to_batch: int | None = None
    """Of the newest save at the end."""
    code: int | None = None
    """Of the launch command; None: it left none."""
    ended: str | None = None
    reason: str | None = None

    @property
    def is_early(self) -> bool:
        return self.ended in (PREEMPTED, FAILED, LOST)

    @property
    def is_in_vain(self) -> bool:
        """It ended early and saved nothing."""
        return self.is_early and (self.to_batch or 0) <= self.from_batch


KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    **dict.fromkeys(("number", "turn", "from_batch", "to_batch", "code"), (int, "a whole number")),
    **dict.fromkeys(("began", "over", "price"), ((int, float), "a number")),
    **dict.fromkeys(("place", "host", "ended", "reason"), (str, "text")),
    "status_before": (dict, "a block"),
}
OPTIONAL = ("price", "status_before", "to_batch", "code", "ended", "reason")
"""May be null."""


def read_legs(folder: Path) -> list[Leg]:
    """In order. A line that a crash has cut off is passed over. Raises OSError where the file cannot be read, and
    ConfigError for a line that is whole and not the relay's: passed over, its launch might be launched again."""
    try:
        lines = (folder / JOURNAL).read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    events: dict[int, dict[str, Any]] = {}
    for place, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if problem := _problem_of(event):
            raise ConfigError(f"{folder / JOURNAL}: line {place}: {problem}; mend the line, or remove it")
        events[event["number"]] = events.get(event["number"], {}) | event
    legs = []
    for event in events.values():
        try:
            legs.append(Leg(**event))
        except TypeError:  # the line of its beginning was cut off, and nothing was begun
            continue
    return legs


def _problem_of(event: Any) -> str | None:
    if not isinstance(event, dict) or "number" not in event:
        return "expected a block with the number of a leg"
    for key, value in event.items():
        if key not in KINDS:
            return f"{key}: unknown key"
        kind, words = KINDS[key]
        if (value is None and key not in OPTIONAL) or (value is not None and not isinstance(value, kind)):
            return f"{key}: {value!r} given, expected {words}"
    return None


def append(folder: Path, **event: Any) -> None:
    """On disk when this returns: a launch that the journal does not know would be launched twice. Raises OSError."""
    with (folder / JOURNAL).open("ab+") as file:
        file.seek(0, os.SEEK_END)
        if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
            file.write(b"\n")  # after a line that was cut off
        file.write(json.dumps(event).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
