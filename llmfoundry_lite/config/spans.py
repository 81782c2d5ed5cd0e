"""Spans of training (`4800ba`), save intervals and times (`3h55m`): text -> numbers."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

TIME_UNITS = ("ba", "ep", "sp", "tok")


@dataclass(frozen=True, slots=True)
class Duration:
    """A span of training: `4800ba`, `1ep`, `2.5e9tok`, `1000sp`, or a fraction of the run, `0.1dur`."""

    value: float
    unit: str

    @classmethod
    def parse(cls, text: str | int, units: Sequence[str] = (*TIME_UNITS, "dur")) -> "Duration":
        """Read `4800ba`; a bare integer counts epochs, as in Composer. Raises ValueError, saying what was expected."""
        if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
            return cls(text, "ep")
        match = re.fullmatch(r"\s*([0-9_]+(?:\.[0-9]+)?(?:[eE][+]?[0-9]+)?)\s*([a-z]+)\s*", str(text))
        if match is None or match[2] not in units:
            raise ValueError(describe_span(units))
        value = float(match[1].replace("_", ""))
        if not math.isfinite(value):
            raise ValueError("a finite number")
        if match[2] != "dur" and value != int(value):
            raise ValueError(f"a whole number of {match[2]}")
        return cls(value if match[2] == "dur" else int(value), match[2])

    def __str__(self) -> str:
        return f"{self.value}{self.unit}"


@dataclass(frozen=True, slots=True)
class SaveInterval:
    """A span of training, a time, or `auto`, which has neither."""

    span: Duration | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, text: str | int) -> "SaveInterval":
        """Read `1000ba`, `5m`, `90s`, `1h30m` or `auto`. Raises ValueError, saying what was expected."""
        if text == "auto":
            return cls()
        is_time = isinstance(text, str) and re.fullmatch(r"\s*(\d+(\.\d+)?[dhms]\s*)+", text)
        try:
            found = cls(seconds=parse_seconds(text)) if is_time else cls(span=Duration.parse(text, TIME_UNITS))
        except ValueError:
            raise ValueError("a span such as 1000ba, a time such as 5m, 90s or 1h, or auto") from None
        if (found.span.value if found.span else found.seconds) == 0:
            raise ValueError("more than 0")
        return found


def parse_limit(text: str | int) -> SaveInterval:
    """Read a span of training or a time: `200ba`, `30m`. Raises ValueError, saying what was expected."""
    expected = "a time such as 30m, 90s or 1h, or a span such as 200ba"
    try:
        limit = SaveInterval.parse(text)
    except ValueError:
        raise ValueError(expected) from None
    if limit == SaveInterval():  # auto
        raise ValueError(expected)
    return limit


def describe_span(units: Sequence[str]) -> str:
    *others, last = units
    listed = f"{', '.join(others)} or {last}" if others else last
    return f"a number with a unit, {listed}, such as 100{units[0]}"


def parse_seconds(time: str | int | float) -> float:
    """Read `3h55m`, `3:55:00` or a number of seconds. Raises ValueError, saying what was expected."""
    text = str(time).strip()
    units = re.fullmatch(r"(?:(\d+)d)?\s*(?:(\d+)h)?\s*(?:(\d+)m)?\s*(?:(\d+(?:\.\d+)?)s?)?", text)
    clock = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", text)
    match = clock or units
    if match is None or not any(match.groups()):
        raise ValueError("a time such as 3h55m, 90s, 3:55:00 or a number of seconds")
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
