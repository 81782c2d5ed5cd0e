"""Keys of a configuration: the values of each, whether it may change in mid-run, and whether hardware may set it.

`setting` writes these rules beside the key in a schema; `keys_of` and the walks below read them.
"""

import dataclasses
import functools
import os
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from typing import Any, Literal

from llmfoundry_lite.config.spans import TIME_UNITS, Duration, describe_span
from llmfoundry_lite.errors import REFERENCE, nearest
from llmfoundry_lite.files import meant_url

Rule = Literal["freely", "logged", "never"]
"""How a key may change in mid-run. logged: a change takes effect, is printed, and is recorded in the new segment."""

Replay = Literal["used", "trusted", "left out"]
"""How `replay` treats the key of a recorded run. used: it decides arithmetic or data. trusted: it runs code."""

REQUIRED = MISSING

Check = Callable[[Any], Any]
"""Function that raises ValueError, whose text says what was expected."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Use:
    """Where a key has an effect, for a key that does not have one everywhere.

    Elsewhere a value that a user wrote is noted. It is refused where the run would not be the one that the user asks
    for, unless checkpoints hold runs to the key's value, or LLM Foundry's own YAMLs have it there.
    """

    where: Callable[[Any, Any], Any]
    """Function that is given the key's block and the whole configuration: whether the key has an effect there."""
    elsewhere: str
    """Reason why the key has no effect elsewhere. `{block.name}` and `{run.precision}` stand for their values, `{path}`
    for the block's place."""
    is_refused: bool = False
    even_default: bool = False
    """Whether the default, too, asks for an effect, so that it is noted where a user wrote it."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Setting:
    """Metadata of a key."""

    checks: Sequence[Check] = ()
    choices: Sequence[str] = ()
    """Values that are allowed. `python:` stands for any import path."""
    instead: str = ""
    """Advice in the error for a value that is not among the choices. Default: their list."""
    expected: str = ""
    """Description of a value in errors. Default: its type."""
    change: Rule | None = None
    """Rule for changes in mid-run. Default: that of the block around the key. Not looked at beside `hardware=True`."""
    uses: Sequence[Use] = ()
    """Conditions, all of which must hold where the key has an effect."""
    uses_inside: Mapping[str, Use] = field(default_factory=dict)
    """Dotted key within the block -> condition that holds for the block in this place only."""
    shapes_dropout: bool = False
    """Log a change in a run with attn_pdrop, because the masks depend on which heads and rows a kernel is given."""
    written: Any = None
    """The type by which its scalars are read, for a field whose own type takes anything. Default: the field's own."""
    is_place: bool = False
    """Whether it is a folder or a URL, in which `~` stands for the user's home folder."""
    hardware: bool = False
    """Whether an overlay may set the key. Such a key changes freely: it says how and where the run is computed."""

    replay: Replay = "left out"
    """How `replay` treats the key. Blocks are taken whole."""

    keys: "Callable[[], dict[str, Key]] | None" = None
    """Set for a field that is no key itself: it holds the values of these keys, which companions add beside it."""

    @property
    def rule(self) -> Rule | None:
        return "freely" if self.hardware else self.change


def setting(default: Any = MISSING, *checks: Check, choices: str = "", **metadata: Any) -> Any:
    """Make a dataclass field. A callable default is a factory. `metadata`: other fields of Setting."""
    made: dict[str, Any] = {"metadata": {"setting": Setting(checks=checks, choices=choices.split(), **metadata)}}
    if default is not MISSING:
        made["default_factory" if callable(default) else "default"] = default
    return field(**made)


def span(default: Any = MISSING, units: Sequence[str] = TIME_UNITS, *, may_be_zero: bool = False, **metadata) -> Any:
    """Make the field of a span of training."""

    def check(value: str | int) -> None:
        if Duration.parse(value, units).value == 0 and not may_be_zero:
            raise ValueError("more than 0")

    return setting(default, check, expected=describe_span(units), **metadata)


# --------------------------------------------------------------------------------------------------- uses


def only_with(*names: str, is_refused: bool = True) -> Use:
    """Return the use of a key that belongs to blocks of some names, such as a schedule's."""
    *some, last = names
    owners = f"{', '.join(some)} and {last} use" if some else f"{last} uses"
    remedy = "; remove it" if is_refused else ""
    return Use(
        where=lambda block, _: block.name in names,
        elsewhere=f"only {owners} it, and {{path}}.name is {{block.name}}{remedy}",
        is_refused=is_refused,
    )


# ------------------------------------------------------------------------------------------------- checks


def must_be(expected: str, holds: Callable[[Any], Any]) -> Check:
    def check(value: Any) -> None:
        if not holds(value):
            raise ValueError(expected)

    return check


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


POSITIVE = must_be("a number above 0", lambda value: value > 0)
NON_NEGATIVE = must_be("0 or more", lambda value: value >= 0)
PROBABILITY = must_be("a probability, 0 <= p < 1", lambda value: 0 <= value < 1)
RUN_NAME = "{run_name}"
"""Placeholder for the run's name in the folders of a run's YAML, the only one there is."""


def check_place(value: str, kind: str = "a folder or a URL") -> None:
    """Check a folder or URL that is taken as it stands: it is no misspelt URL, which would be a local folder, and has
    no placeholder that nothing replaces. Raises ValueError."""
    # Text of an environment variable may be a secret, so messages have it as it was written.
    written = getattr(value, "written", value)
    if url := meant_url(value):
        meant = url if written == value else f"{url.partition('://')[0]}://…"
        raise ValueError(f"{kind}; did you mean {meant}? A folder of that name is given as ./{written}")
    for placeholder in re.findall(r"\{[^{}]*\}", re.sub(REFERENCE, "", written)):
        if placeholder not in value:  # it has been replaced, and is recorded as it was written
            continue
        is_near = nearest(re.sub(r"[\W_]", "", placeholder).lower(), ["runname"])
        meant = f"; did you mean {RUN_NAME}?" if is_near and placeholder != RUN_NAME else ""
        raise ValueError(f"{kind}, in which nothing replaces {placeholder}{meant}")


def check_source(value: str) -> None:
    """Check a folder or URL that is read. One with braces in its name may be there."""
    if meant_url(value) or not os.path.exists(os.path.expanduser(value)):
        check_place(value)


def local_folder(url_key: str = "", *, is_read: bool = False) -> Check:
    """Make the check of a folder of this machine; `url_key` is the key that takes a URL instead."""
    kind = "a folder of this machine" + (f"; {url_key} takes a URL" if url_key else "")

    def check(value: str) -> None:
        if "://" in value:
            raise ValueError(kind)
        if not is_read or meant_url(value) or not os.path.exists(value):
            check_place(value, kind)

    return check


def matches(expected: str, pattern: str) -> Check:
    return must_be(expected, lambda value: re.fullmatch(pattern, value))


def not_empty(meaning: str) -> Check:
    return must_be(meaning, lambda value: value.strip())


# -------------------------------------------------------------------------------------------------- walks


@dataclass(slots=True, frozen=True)
class Key:
    """A field of a block."""

    hint: Any
    default: Any
    """Default value; MISSING for a key that must be given."""
    setting: Setting
    block: type | None
    """The dataclass of the block, or blocks, in the field; None for a plain value."""
    container: type | None
    """dict or list for a field of several blocks, else None."""

    @property
    def allows_none(self) -> bool:
        return self.hint is Any or type(None) in typing.get_args(self.hint)

    def blocks(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Yield the path and the value of each block in a key that stands at `path`."""
        if self.container is dict and isinstance(value, dict):
            yield from ((f"{path}.{name}", block) for name, block in value.items())
        elif self.container is list and isinstance(value, list):
            yield from ((f"{path}[{number}]", block) for number, block in enumerate(value))
        elif self.block is not None:
            yield path, value


def join(path: str, name: object) -> str:
    """Return the dotted key of `name` in the block at `path`, which is empty for the top."""
    return f"{path}.{name}" if path else str(name)


@functools.cache
def keys_of(block: type) -> dict[str, Key]:
    hints, found = typing.get_type_hints(block), dict[str, Key]()
    for one in dataclasses.fields(block):
        brought = one.metadata.get("setting", Setting()).keys
        found |= brought() if brought else {one.name: _key_of(one, hints[one.name])}
    return found


def _key_of(one: dataclasses.Field, hint: Any) -> Key:
    default = one.default if one.default_factory is MISSING else one.default_factory()
    if dataclasses.is_dataclass(default):
        default = dataclasses.asdict(default)  # type: ignore[arg-type]
    metadata = one.metadata.get("setting", Setting())
    for option in typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,):
        container = typing.get_origin(option)
        inner = typing.get_args(option)[-1] if container in (dict, list) else option
        if dataclasses.is_dataclass(inner):
            return Key(hint, default, metadata, typing.cast(type, inner), container)
    return Key(hint, default, metadata, None, None)


def schema_keys(block: type, prefix: str = "") -> Iterator[str]:
    """Yield every key that a YAML of `block` may have; `*` stands for names of the user's choice."""
    for name, key in keys_of(block).items():
        if key.block is None or key.container or key.allows_none:
            yield prefix + name
        if key.block is not None:
            yield from schema_keys(key.block, f"{prefix}{name}.*." if key.container else f"{prefix}{name}.")


def settings_along(block: type, key: str) -> list[Setting]:
    """Return the settings of a dotted key, from the outermost block on. An unknown part ends them."""
    found: list[Setting] = []
    parts, inside = iter(key.split(".")), block
    for part in parts:
        known = keys_of(inside).get(part)
        if known is None:
            break
        found.append(known.setting)
        if known.block is None:
            break
        inside = known.block
        if known.container:
            next(parts, None)
    return found
