"""Durations of training (`4800ba`), times (`3h55m`) and intervals between saves, parsed from the text of a YAML.

`Duration`, `Time` and `SaveInterval` are the parsed values that a configuration holds. Each has a `parse` method, which
raises ValueError for text that it cannot read. The error's text says what was expected; `build.py` adds the key. Each
value also remembers the text that it was parsed from, because a run records its configuration as the user wrote it.

`fields.duration_setting` and `fields.parsed` make fields of a schema that hold these values.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from llmfoundry_lite.errors import join_with_or

TIME_UNITS = ("ba", "ep", "sp", "tok")
"""Units of a duration, in Composer's words: batches, epochs, samples and tokens."""

Scalar = str | int | float
"""A value as a YAML has it, before it is parsed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """Base class of parsed values. They are compared by their meaning: `1000ba` equals `1_000ba`."""

    text: Scalar | None = field(default=None, compare=False, repr=False)
    """Text or number of the YAML that the value was parsed from; None if it was constructed by a program."""

    @property
    def written(self) -> Scalar:
        """The value as a YAML has it: the text that it was parsed from, or its usual spelling if there is none."""
        return str(self) if self.text is None else self.text


@dataclass(frozen=True, slots=True)
class Duration(Parsed):
    """A length of training: `4800ba`, `1ep`, `2.5e9tok`, `1000sp`, or a fraction of the run, `0.1dur`."""

    value: float
    """A whole number, except in `dur`, where it is a fraction of the run's max_duration."""
    unit: str
    """One of TIME_UNITS, or `dur`."""

    @classmethod
    def parse(cls, written: Scalar, units: Sequence[str] = (*TIME_UNITS, "dur")) -> "Duration":
        """Read a number with a unit, which must be one of `units`. A bare integer counts epochs, as in Composer.

        >>> Duration.parse("2.5e9tok")
        Duration(value=2500000000, unit='tok')
        >>> Duration.parse(3)
        Duration(value=3, unit='ep')

        Raises ValueError, whose text says what was expected.
        """
        # Python's True is an int, too.
        if isinstance(written, int) and not isinstance(written, bool) and written >= 0:
            return cls(written, "ep", text=written)

        match = re.fullmatch(r"\s*([0-9_]+(?:\.[0-9]+)?(?:[eE][+]?[0-9]+)?)\s*([a-z]+)\s*", str(written))
        if match is None or match[2] not in units:
            raise ValueError(describe_span(units))
        value = float(match[1].replace("_", ""))
        unit = match[2]

        # 1e999ba matches the pattern, and float reads it as infinity.
        if not math.isfinite(value):
            raise ValueError("a finite number")
        # Only fractions of the run may have digits after the point. Half a batch cannot be trained.
        if unit == "dur":
            return cls(value, unit, text=written)
        if value != int(value):
            raise ValueError(f"a whole number of {unit}")
        return cls(int(value), unit, text=written)

    def __str__(self) -> str:
        return f"{self.value}{self.unit}"


@dataclass(frozen=True, slots=True)
class Time(Parsed):
    """A length of time on the clock: `3h55m`, `90s`, `3:55:00` or a number of seconds."""

    seconds: float

    @classmethod
    def parse(cls, written: Scalar) -> "Time":
        """Read a time such as `3h55m`. Raises ValueError, whose text says what was expected."""
        return cls(parse_seconds(written), text=written)

    def __str__(self) -> str:
        return f"{self.seconds:g}s"


@dataclass(frozen=True, slots=True)
class SaveInterval(Parsed):
    """The interval between two saves: a duration of training, a time on the clock, or `auto`.

    At most one of `span` and `seconds` is set. With `auto`, both are None.
    """

    span: Duration | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, written: Scalar) -> "SaveInterval":
        """Read `1000ba`, `5m`, `90s`, `1h30m` or `auto`.

        >>> SaveInterval.parse("1h30m").seconds
        5400.0
        >>> SaveInterval.parse("1000ba").span
        Duration(value=1000, unit='ba')

        Raises ValueError, whose text says what was expected, also for an interval of 0.
        """
        if written == "auto":
            return cls(text=written)

        # A bare number is not a time here: 5 means 5 epochs, as in every other duration.
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
        """Whether the run chooses the interval itself, by the measured cost of its saves."""
        return self.span is None and self.seconds is None

    def __str__(self) -> str:
        if self.span is not None:
            return str(self.span)
        return "auto" if self.seconds is None else f"{self.seconds:g}s"


def parse_limit(written: Scalar) -> SaveInterval:
    """Read a duration of training or a time, such as `200ba` or `30m`, but not `auto`.

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
    """Return what a duration in one of `units` looks like, for errors.

    >>> describe_span(("ba", "ep"))
    'a number with a unit, ba or ep, such as 100ba'
    """
    return f"a number with a unit, {join_with_or(units)}, such as 100{units[0]}"


def parse_seconds(written: Scalar) -> float:
    """Return the seconds of a time: `3h55m`, `3:55:00`, SLURM's `1-12:00:00` (1 day and 12 hours), or a bare number.

    >>> parse_seconds("3h55m")
    14100.0

    Raises ValueError, whose text says what was expected.
    """
    text = str(written).strip()
    # Both patterns have four groups: days, hours, minutes and seconds. Parts that the text leaves out are None.
    with_colons = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", text)
    with_units = re.fullmatch(r"(?:(\d+)d)?\s*(?:(\d+)h)?\s*(?:(\d+)m)?\s*(?:(\d+(?:\.\d+)?)s?)?", text)
    match = with_colons or with_units
    if match is None or not any(match.groups()):
        raise ValueError("a time such as 3h55m, 90s, 3:55:00 or a number of seconds")
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
