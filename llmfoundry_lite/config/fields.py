"""Keys of a configuration: the values that each may have, whether it may change in mid-run, and who may set it.

A schema is a set of frozen dataclasses, one for each block of the YAML. `setting`, `duration_setting` and `parsed` make
their fields, and store the rules of a key (a `Setting`) in the field's metadata:

    lr: float = setting(REQUIRED, POSITIVE, change="logged")

`keys_of` and the functions at the end of this file read the rules back. `build.py` applies them to the values of a
YAML.
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

from llmfoundry_lite.config.spans import TIME_UNITS, Duration, Parsed, Scalar, describe_span
from llmfoundry_lite.errors import REFERENCE, find_nearest
from llmfoundry_lite.files import guess_url

Rule = Literal["freely", "logged", "never"]
"""How a key may change in mid-run. logged: a change takes effect, is printed, and is recorded in the new segment."""

Replay = Literal["used", "trusted", "left out"]
"""How `replay` treats the key of a recorded run. used: it decides arithmetic or data. trusted: it runs code."""

REQUIRED = MISSING
"""Default of a key that must be given."""

Check = Callable[[Any], Any]
"""Function that raises ValueError, whose text says what was expected."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Use:
    """Condition under which a key has an effect, for a key that does not have one everywhere.

    Where it has none, a value that a user wrote is noted. It is refused where the run would not be the one that the
    user asks for, unless checkpoints hold runs to the key's value, or LLM Foundry's own YAMLs have it there.
    """

    has_effect: Callable[[Any, Any], Any]
    """Function that is given the key's block and the whole configuration, and says whether the key has an effect."""
    reason: str
    """Why the key has no effect otherwise. `{block.name}` and `{run.precision}` stand for their values, `{path}` for
    the block's place."""
    is_refused: bool = False
    even_default: bool = False
    """Whether the default, too, asks for an effect, so that it is noted where a user wrote it."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Setting:
    """The rules of a key, which are the metadata of its field."""

    checks: Sequence[Check] = ()
    """Conditions of the value as a YAML has it."""
    choices: Sequence[str] = ()
    """Values that are allowed. `python:` stands for any import path."""
    instead: str = ""
    """Advice in the error for a value that is not among the choices. Default: their list."""
    expected: str = ""
    """Description of a value in errors. Default: its type."""
    parse: Callable[[Any], Any] | None = None
    """Function from the value in a YAML to the one that the configuration holds, such as a `Duration`. Raises
    ValueError, whose text says what was expected. Default: both are the same."""
    written: Any = None
    """Type of the value in a YAML, for a field with `parse`, or one whose own type takes anything. Default: the field's
    own type."""
    change: Rule | None = None
    """Rule for changes in mid-run. Default: that of the block around the key. Ignored beside `hardware=True`."""
    uses: Sequence[Use] = ()
    """Conditions, all of which must hold where the key has an effect."""
    uses_inside: Mapping[str, Use] = field(default_factory=dict)
    """Dotted key within the block -> condition that holds for the block in this place only."""
    shapes_dropout: bool = False
    """Log a change in a run with attn_pdrop, because the masks depend on which heads and rows a kernel is given."""
    is_path_or_url: bool = False
    """Whether it is a folder or a URL, in which `~` stands for the user's home folder."""
    hardware: bool = False
    """Whether an overlay may set the key. Such a key changes freely: it says how and where the run is computed."""

    replay: Replay = "left out"
    """How `replay` treats the key. Blocks are taken whole."""

    keys: "Callable[[], dict[str, Key]] | None" = None
    """Set for a field that is no key itself: it holds the values of these keys, which companions add beside it."""

    @property
    def rule(self) -> Rule | None:
        """The key's own rule for changes in mid-run; None if that of the block around it holds."""
        return "freely" if self.hardware else self.change


# ------------------------------------------------------------------------------------------- fields of a schema


def setting(default: Any = MISSING, *checks: Check, choices: str = "", **metadata: Any) -> Any:
    """Return a dataclass field for a key of the configuration, with the rules for its values.

    A `default` that can be called is a factory, such as `dict`; without one, the key must be given. `checks` are
    functions that raise ValueError for a bad value. `choices` are the allowed values, separated by spaces. `metadata`
    are other fields of `Setting`.
    """
    rules = {"setting": Setting(checks=checks, choices=choices.split(), **metadata)}
    if default is MISSING:
        return field(metadata=rules)
    if callable(default):
        return field(default_factory=default, metadata=rules)
    return field(default=default, metadata=rules)


def parsed(default: Any, parse: Callable[[Any], Any], written: Any = str | int, **metadata: Any) -> Any:
    """Return a dataclass field for a key whose value is parsed, such as `5m` into a time.

    `parse` gets the value of the YAML, whose type is `written`, and returns what the field holds. It is applied to
    `default` too. None stays None. `metadata` are other fields of `Setting`.
    """
    if default is not MISSING and default is not None:
        default = parse(default)
    return setting(default, parse=parse, written=written, **metadata)


def duration_setting(
    default: Any = MISSING, units: Sequence[str] = TIME_UNITS, *, may_be_zero: bool = False, **metadata
) -> Any:
    """Return a dataclass field for a key that is a span of training, such as `100ba`, which becomes a `Duration`.

    `units` are those that it may have. `default` is given as in a YAML; without one, the key must be given. `metadata`
    are other fields of `Setting`.
    """

    def parse(written: Scalar) -> Duration:
        """Parse a span. Raises ValueError, whose text says what was expected, also for 0 if it may not be."""
        duration = Duration.parse(written, units)
        if duration.value == 0 and not may_be_zero:
            raise ValueError("more than 0")
        return duration

    return parsed(default, parse, expected=describe_span(units), **metadata)


def only_with(*names: str, is_refused: bool = True) -> Use:
    """Return the condition for a key that has an effect only where the `name` in its block is one of these.

    An example is `t_decay`, which only one of the schedules has. With `is_refused`, the key raises an error elsewhere;
    otherwise it is noted.
    """
    *others, last = names
    owners = f"{', '.join(others)} and {last} use" if others else f"{last} uses"
    remedy = "; remove it" if is_refused else ""
    return Use(
        has_effect=lambda block, _: block.name in names,
        reason=f"only {owners} it, and {{path}}.name is {{block.name}}{remedy}",
        is_refused=is_refused,
    )


# ------------------------------------------------------------------------------------------------- checks


def validator(expected: str, holds: Callable[[Any], Any]) -> Check:
    """Return a check of values, which raises ValueError with the text `expected` if `holds(value)` is false."""

    def check(value: Any) -> None:
        """Raise ValueError, whose text says what was expected, unless the condition holds for the value."""
        if not holds(value):
            raise ValueError(expected)

    return check


def is_number(value: Any) -> bool:
    """Return whether a value is a number. True and False are not, though Python makes them integers."""
    return isinstance(value, int | float) and not isinstance(value, bool)


POSITIVE = validator("a number above 0", lambda value: value > 0)
NON_NEGATIVE = validator("0 or more", lambda value: value >= 0)
PROBABILITY = validator("a probability, 0 <= p < 1", lambda value: 0 <= value < 1)
RUN_NAME = "{run_name}"
"""Placeholder for the run's name in the folders of a run's YAML, the only one there is."""


def check_path_or_url(value: str, kind: str = "a folder or a URL") -> None:
    """Check a folder or URL that is used as it is written.

    Raises ValueError for a misspelt URL, which would be a local folder, and for a placeholder that nothing replaces.
    `kind` says in the error what was expected.
    """
    # The text of an environment variable may be a secret, so messages quote the value as it was written.
    written = getattr(value, "written", value)
    url = guess_url(value)
    if url:
        meant = url if written == value else f"{url.partition('://')[0]}://…"
        raise ValueError(f"{kind}; did you mean {meant}? A folder of that name is given as ./{written}")

    for placeholder in re.findall(r"\{[^{}]*\}", re.sub(REFERENCE, "", written)):
        is_replaced = placeholder not in value
        if is_replaced:
            continue
        word = re.sub(r"[\W_]", "", placeholder).lower()
        hint = ""
        if placeholder != RUN_NAME and find_nearest(word, ["runname"]):
            hint = f"; did you mean {RUN_NAME}?"
        raise ValueError(f"{kind}, in which nothing replaces {placeholder}{hint}")


def check_source_path_or_url(value: str) -> None:
    """Check a folder or URL that is read, such as a checkpoint to load.

    Raises ValueError for a misspelt URL, and for a placeholder in braces that nothing replaces, unless a folder of this
    very name exists.
    """
    if guess_url(value) or not os.path.exists(os.path.expanduser(value)):
        check_path_or_url(value)


def local_folder(url_key: str = "", *, is_read: bool = False) -> Check:
    """Return a check for keys that take a folder of this machine, and no URL.

    `url_key` is another key that takes a URL, which the error names. With `is_read`, an existing folder may have braces
    in its name, in which otherwise only `{run_name}` is allowed.
    """
    kind = "a folder of this machine"
    if url_key:
        kind += f"; {url_key} takes a URL"

    def check(value: str) -> None:
        if "://" in value:
            raise ValueError(kind)
        if not is_read or guess_url(value) or not os.path.exists(value):
            check_path_or_url(value, kind)

    return check


def matches(expected: str, pattern: str) -> Check:
    """Return a check of text that the whole of a regular expression must match. `expected` is the error's text."""
    return validator(expected, lambda value: re.fullmatch(pattern, value))


def not_empty(expected: str) -> Check:
    """Return a check of text that must not be blank. `expected` is the error's text."""
    return validator(expected, lambda value: value.strip())


# -------------------------------------------------------------------------------------------------- walks


@dataclass(slots=True, frozen=True)
class Key:
    """A key of a configuration's block, as its dataclass describes it."""

    hint: Any
    """Type of the value in a YAML."""
    default: Any
    """Default as a YAML has it; MISSING for a key that must be given."""
    setting: Setting
    block: type | None
    """The dataclass of the block, or blocks, in the field; None for a plain value."""
    container: type | None
    """dict or list for a field of several blocks, else None."""

    @property
    def allows_none(self) -> bool:
        """Whether null is a value of the key, rather than the wish for its default."""
        return self.hint is Any or type(None) in typing.get_args(self.hint)

    def blocks(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Yield the dotted key and the value of each block that this key holds: one, or those of a dictionary or list.

        `path` is the dotted key of this key, and `value` its value. Nothing is yielded for a plain value.
        """
        if self.container is dict and isinstance(value, dict):
            for name, block in value.items():
                yield f"{path}.{name}", block
        elif self.container is list and isinstance(value, list):
            for index, block in enumerate(value):
                yield f"{path}[{index}]", block
        elif self.block is not None:
            yield path, value


def as_yaml(value: Any) -> Any:
    """Return a value of a configuration as a YAML has it, except that tuples stay tuples.

    Blocks are dictionaries, and spans and times are as they were written.
    """
    if isinstance(value, Parsed):
        return value.written
    if dataclasses.is_dataclass(value):
        return {one.name: as_yaml(getattr(value, one.name)) for one in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: as_yaml(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(as_yaml(inner) for inner in value)
    return value


def join_key(path: str, name: object) -> str:
    """Return `path.name`: the dotted key of `name` in the block with the dotted key `path`, empty for the top level."""
    return f"{path}.{name}" if path else str(name)


@functools.cache
def keys_of(block: type) -> dict[str, Key]:
    """Return the keys of a block's dataclass by name, with those that companions add."""
    hints = typing.get_type_hints(block)
    keys: dict[str, Key] = {}
    for schema_field in dataclasses.fields(block):
        name = schema_field.name
        rules = schema_field.metadata.get("setting", Setting())
        if rules.keys is not None:
            keys |= rules.keys()
        else:
            keys[name] = _key_of(schema_field, hints[name], rules)
    return keys


def _key_of(schema_field: dataclasses.Field, hint: Any, rules: Setting) -> Key:
    """Return the description of a dataclass field as a key. `hint` is its type, and `rules` are its settings."""
    default = schema_field.default
    if schema_field.default_factory is not MISSING:
        default = schema_field.default_factory()
    if rules.parse is not None:
        allows_none = type(None) in typing.get_args(hint)
        hint = rules.written | None if allows_none else rules.written

    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        container = typing.get_origin(option)
        inner = typing.get_args(option)[-1] if container in (dict, list) else option
        if dataclasses.is_dataclass(inner):
            return Key(hint, as_yaml(default), rules, typing.cast(type, inner), container)
    return Key(hint, as_yaml(default), rules, None, None)


def schema_keys(block: type, prefix: str = "") -> Iterator[str]:
    """Yield every key that a YAML of `block` may have; `*` stands for names of the user's choice."""
    for name, key in keys_of(block).items():
        is_value = key.block is None or key.container is not None or key.allows_none
        if is_value:
            yield prefix + name
        if key.block is not None:
            inside = f"{prefix}{name}.*." if key.container else f"{prefix}{name}."
            yield from schema_keys(key.block, inside)


def settings_along(block: type, dotted_key: str) -> list[Setting]:
    """Return the settings of a dotted key and of the blocks around it, from the outermost one on.

    `block` is the dataclass of the whole configuration. The list ends before the first name that is unknown.
    """
    settings: list[Setting] = []
    names = iter(dotted_key.split("."))
    for name in names:
        key = keys_of(block).get(name)
        if key is None:
            break
        settings.append(key.setting)
        if key.block is None:
            break
        block = key.block
        if key.container is not None:
            next(names, None)  # the name, or the number, of one of several blocks
    return settings
