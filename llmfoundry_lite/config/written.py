"""Text as it was written, kept beside the value that YAML reads in it or `${oc.env:…}` resolves to.

YAML reads the git hash 5e12345 as infinity. Only the schema knows that it is a name, so both readings are kept until
`choose_readings` takes one. The text of an environment variable may be a secret, so it is recorded as `${oc.env:…}`.
"""

import dataclasses
import os
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from llmfoundry_lite.config.fields import Rule, Setting, keys_of
from llmfoundry_lite.errors import ConfigError, is_masked, is_secret_name, learn_credentials, learn_secret


class PlainScalar(str):
    """Text without quotes that YAML reads as a number or a truth value."""

    value: bool | int | float

    def __new__(cls, text: str, value: bool | int | float) -> "PlainScalar":
        scalar = super().__new__(cls, text)
        scalar.value = value
        return scalar


class FromEnvironment(str):
    """Text that depends on who starts the run: of an environment variable, or a place in the user's home folder."""

    written: str
    """The text as it was written, with `${oc.env:…}` for the variable, or with `~`."""

    def __new__(cls, text: str, written: str) -> "FromEnvironment":
        made = super().__new__(cls, text)
        made.written = written
        return made

    def __getnewargs__(self) -> tuple[str, str]:
        return str(self), self.written

    def __repr__(self) -> str:
        return repr(self.written)

    def replace(self, old: str, new: str, count: typing.SupportsIndex = -1, /) -> "FromEnvironment":
        return FromEnvironment(super().replace(old, new, count), self.written)


def expand_home(place: str) -> str:
    """Return a folder or URL with the user's home folder for `~`, marked with the text as it was written."""
    expanded = os.path.expanduser(place)
    return place if expanded == place else FromEnvironment(expanded, getattr(place, "written", place))


VARIABLE = re.compile(r"\$\{oc\.env:([^,{}]+)")
"""Pattern of a reference to an environment variable, with its name."""


def map_texts(values: Any, change: Callable[[str], str]) -> Any:
    """Return `values` with `change` applied to every text, and lists in place of tuples."""
    if isinstance(values, dict):
        return {key: map_texts(value, change) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [map_texts(value, change) for value in values]
    return change(values) if isinstance(values, str) else values


AMBIGUOUS = re.compile(r"[-+]?(?:0[0-7_]+|[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?)")


def hint_at_number(text: str) -> str:
    """Return advice on text where a number is expected: a variable's value is text; 010 and 1:30 have two meanings."""
    if isinstance(text, FromEnvironment):
        return f"; a variable is text, so write ${{oc.decode:{text.written}}}"
    if not AMBIGUOUS.fullmatch(text):
        return ""
    sign, digits = (-1 if text.startswith("-") else 1), text.lstrip("-+").replace("_", "")
    if ":" not in digits:
        return f"; YAML 1.1 reads it as octal, {sign * int(digits, 8)}, so write that or {sign * int(digits)}"
    value = 0.0
    for part in digits.split(":"):
        value = value * 60 + float(part)
    return f"; YAML 1.1 reads it to base 60, so write {sign * value:g}"


# ---------------------------------------------------------------------------------- the reading that a schema wants


def choose_readings(block: type, values: dict[str, Any]) -> dict[str, Any]:
    """Return `values` with each scalar read as `block` says: as text, or as its number or truth value.

    Text from the environment stays marked, and is recorded as it was written, where it may change freely in mid-run:
    paths, URLs, names, arguments of loggers and callbacks. So does a secret, by its key's name. Everything else, a
    user's own optimizer and loader too, decides what is trained. It is recorded resolved, or another variable would
    change a run unnoticed. Secrets are learned, so that no message quotes them. Raises ConfigError for a URL whose
    credentials were masked when it was recorded.
    """
    return _choose_in_block(block, values, "", "freely")


TASK_SYNONYMS = {"question_prelimiter": "prelimiter"}
EVAL_SYNONYMS = {"icl_tasks_str": "icl_tasks", "eval_gauntlet_str": "eval_gauntlet"}
SYNONYMS = TASK_SYNONYMS | EVAL_SYNONYMS
"""Keys of LLM Foundry's older YAMLs -> our keys, whose types say how to read their scalars."""


def _choose_in_block(block: type, values: Mapping[str, Any], path: str, rule: Rule) -> dict[str, Any]:
    keys, chosen = keys_of(block), {}
    for name, value in values.items():
        place, key = f"{path}.{name}" if path else name, keys.get(SYNONYMS.get(name, name))
        setting = key.setting if key else Setting()
        hint, inner = (key.hint, setting.rule or rule) if key else (Any, rule)
        if setting.written is not None and setting.parse is None:
            hint, inner = setting.written, "freely"
        chosen[name] = _choose(hint, value, place, inner, setting)
    return chosen


def _choose(hint: Any, value: Any, path: str, rule: Rule, setting: Setting) -> Any:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if isinstance(value, dict):
        if block := next(filter(dataclasses.is_dataclass, options), None):
            return _choose_in_block(typing.cast(type, block), value, path, rule)
        inner = _inside(options, dict)
        return {name: _choose(inner, one, f"{path}.{name}", rule, setting) for name, one in value.items()}
    if isinstance(value, list):
        inner = _inside(options, list)
        return [_choose(inner, one, f"{path}[{index}]", rule, setting) for index, one in enumerate(value)]
    if isinstance(value, PlainScalar):
        is_text = str in options and not _takes(options, value.value)
        return str(value) if is_text else value.value
    if isinstance(value, str) and is_masked(value):
        raise ConfigError(f"{path}: {value}: credentials are not recorded; give them here, by ${{oc.env:NAME}}")
    if isinstance(value, str):
        learn_credentials(value)
    if setting.is_place and isinstance(value, str):
        value = expand_home(value)
    if isinstance(value, FromEnvironment):
        is_secret = is_secret_name(path) or any(map(is_secret_name, VARIABLE.findall(value.written)))
        if is_secret:
            learn_secret(value)
        if {str, Any} & set(options):
            is_text = not setting.choices and not {int, float, bool} & set(options)
            return value if is_text and (rule == "freely" or is_secret) else str(value)
    return value


def _takes(options: tuple[Any, ...], value: bool | int | float) -> bool:
    is_whole = isinstance(value, float) and value.is_integer()
    return type(value) in options or (type(value) is int and float in options) or (is_whole and int in options)


def _inside(options: tuple[Any, ...], container: type) -> Any:
    return next((typing.get_args(one)[-1] for one in options if typing.get_origin(one) is container), Any)
