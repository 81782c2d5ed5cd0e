"""Spans of training (`4800ba`), times (`3h55m`) and intervals between saves: what a YAML writes, and what it means.

A configuration holds these values parsed. Each remembers how it was written, because a run records its configuration
as the user wrote it.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

TIME_UNITS = ("ba", "ep", "sp", "tok")
"""Batches, epochs, samples and tokens."""

Scalar = str | int | float
"""A value as a YAML has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """Base of values that a YAML writes as text. They compare by what they mean: `1000ba` equals `1_000ba`."""

    text: Scalar | None = field(default=None, compare=False, repr=False)
    """Text that the value was parsed from; None if a program has made the value."""

    @property
    def written(self) -> Scalar:
        """The value as a YAML has it: what it was parsed from, or else its usual spelling."""
        return str(self) if self.text is None else self.text


@dataclass(frozen=True, slots=True)
class Duration(Parsed):
    """A span of training: `4800ba`, `1ep`, `2.5e9tok`, `1000sp`, or a fraction of the run, `0.1dur`."""

    value: float
    """A whole number, except in `dur`."""
    unit: str

    @classmethod
    def parse(cls, written: Scalar, units: Sequence[str] = (*TIME_UNITS, "dur")) -> "Duration":
        """Read `4800ba`. A bare integer counts epochs, as in Composer.

        Raises ValueError, whose text says what was expected.
        """
        if isinstance(written, int) and not isinstance(written, bool) and written >= 0:
            return cls(written, "ep", text=written)

        match = re.fullmatch(r"\s*([0-9_]+(?:\.[0-9]+)?(?:[eE][+]?[0-9]+)?)\s*([a-z]+)\s*", str(written))
        if match is None or match[2] not in units:
            raise ValueError(describe_span(units))
        value, unit = float(match[1].replace("_", "")), match[2]

        if not math.isfinite(value):
            raise ValueError("a finite number")
        if unit == "dur":
            return cls(value, unit, text=written)
        if value != int(value):
            raise ValueError(f"a whole number of {unit}")
        return cls(int(value), unit, text=written)

    def __str__(self) -> str:
        return f"{self.value}{self.unit}"


@dataclass(frozen=True, slots=True)
class Time(Parsed):
    """A length of time: `3h55m`, `90s`, `3:55:00` or a number of seconds."""

    seconds: float

    @classmethod
    def parse(cls, written: Scalar) -> "Time":
        """Read a time. Raises ValueError, whose text says what was expected."""
        return cls(parse_seconds(written), text=written)

    def __str__(self) -> str:
        return f"{self.seconds:g}s"


@dataclass(frozen=True, slots=True)
class SaveInterval(Parsed):
    """A span of training, a time, or `auto`, which has neither."""

    span: Duration | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, written: Scalar) -> "SaveInterval":
        """Read `1000ba`, `5m`, `90s`, `1h30m` or `auto`. Raises ValueError, whose text says what was expected."""
        if written == "auto":
            return cls(text=written)

        is_time = isinstance(written, str) and re.fullmatch(r"\s*(\d+(\.\d+)?[dhms]\s*)+", written)
        try:
            if is_time:
                interval = cls(seconds=parse_seconds(written), text=written)
            else:
                interval = cls(span=Duration.parse(written, TIME_UNITS), text=written)
        except ValueError:
            raise ValueError("a span such as 1000ba, a time such as 5m, 90s or 1h, or auto") from None

        length = interval.seconds if interval.span is None else interval.span.value
        if length == 0:
            raise ValueError("more than 0")
        return interval

    @property
    def is_auto(self) -> bool:
        """Whether the run chooses the interval itself, by the cost of its saves."""
        return self.span is None and self.seconds is None

    def __str__(self) -> str:
        if self.span is not None:
            return str(self.span)
        return "auto" if self.seconds is None else f"{self.seconds:g}s"


def parse_limit(written: Scalar) -> SaveInterval:
    """Read a span of training or a time, but not `auto`: `200ba`, `30m`.

    Raises ValueError, whose text says what was expected.
    """
    expected = "a time such as 30m, 90s or 1h, or a span such as 200ba"
    try:
        limit = SaveInterval.parse(written)
    except ValueError:
        raise ValueError(expected) from None
    if limit.is_auto:
        raise ValueError(expected)
    return limit


def describe_span(units: Sequence[str]) -> str:
    """Say what a span in one of `units` looks like, for errors."""
    *others, last = units
    listed = f"{', '.join(others)} or {last}" if others else last
    return f"a number with a unit, {listed}, such as 100{units[0]}"


def parse_seconds(written: Scalar) -> float:
    """Read `3h55m`, `3:55:00` or a number of seconds. Raises ValueError, whose text says what was expected."""
    text = str(written).strip()
    clock = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", text)
    units = re.fullmatch(r"(?:(\d+)d)?\s*(?:(\d+)h)?\s*(?:(\d+)m)?\s*(?:(\d+(?:\.\d+)?)s?)?", text)
    match = clock or units
    if match is None or not any(match.groups()):
        raise ValueError("a time such as 3h55m, 90s, 3:55:00 or a number of seconds")
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
