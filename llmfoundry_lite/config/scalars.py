"""Scalars of a YAML, read by the types of a schema.

YAML reads the git hash 5e12345 as infinity, and only the schema knows that it is a name. A scalar without quotes is
therefore kept as it was written, with the number or truth value that YAML reads in it (`PlainScalar`), while files are
merged and `${…}` is resolved. `read_scalars` then takes one of the two, by the type of the scalar's key.

Text from an environment variable is marked, too (`FromEnvironment`). It may be a secret, so it is recorded as
`${oc.env:…}`. `yaml_text.py` makes the first mark, and `resolve.py` the second. A place in the user's home folder gets
the second mark here.
"""

import dataclasses
import os
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from llmfoundry_lite.config.fields import Rule, Setting, join_key, keys_of
from llmfoundry_lite.errors import ConfigError, is_masked, is_secret_name, remember_secret, remember_url_secrets


class PlainScalar(str):
    """Text without quotes in which YAML reads a number or a truth value."""

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
        marked = super().__new__(cls, text)
        marked.written = written
        return marked

    def __getnewargs__(self) -> tuple[str, str]:
        return str(self), self.written

    def __repr__(self) -> str:
        return repr(self.written)

    def replace(self, old: str, new: str, count: typing.SupportsIndex = -1, /) -> "FromEnvironment":
        """Replace in the text that is used, as for `{run_name}`. The text as it was written stays."""
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
"""Pattern of text in which YAML 1.1 reads an octal number (010), or one to base 60 (1:30). Few writers expect that."""


def hint_at_number(text: str) -> str:
    """Return advice for an error on text that stands where a number is expected; empty if there is none.

    A variable is always text. 010 and 1:30 have two meanings, so both are named.
    """
    if isinstance(text, FromEnvironment):
        return f"; a variable is text, so write ${{oc.decode:{text.written}}}"
    if not AMBIGUOUS.fullmatch(text):
        return ""

    sign = -1 if text.startswith("-") else 1
    digits = text.lstrip("-+").replace("_", "")
    if ":" in digits:
        value = 0.0
        for part in digits.split(":"):
            value = value * 60 + float(part)
        return f"; YAML 1.1 reads it to base 60, so write {sign * value:g}"
    return f"; YAML 1.1 reads it as octal, {sign * int(digits, 8)}, so write that or {sign * int(digits)}"


# -------------------------------------------------------------------------------------- reading by a schema

TASK_SYNONYMS = {"question_prelimiter": "prelimiter"}
EVAL_SYNONYMS = {"icl_tasks_str": "icl_tasks", "eval_gauntlet_str": "eval_gauntlet"}
SYNONYMS = TASK_SYNONYMS | EVAL_SYNONYMS
"""Keys of LLM Foundry's older YAMLs -> our keys, whose types say how to read their scalars."""


def read_scalars(block: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with each scalar read by the type of its key in `block`: as text, or as a number or truth value.

    Where the schema has no type, such as among variables, standard YAML rules hold. No type is checked here:
    `build.py` does that.

    Places get the user's home folder for `~`.

    Text from the environment stays marked, so that it is recorded as it was written, if its key may change freely in
    mid-run: paths, URLs, names, arguments of loggers and callbacks. Everything else decides what is trained, a user's
    own optimizer and loader too. It is recorded as the text that was used, or another variable would change a run
    unnoticed. A secret, by the name of its key or variable, is never recorded as the text that was used.

    Secrets and credentials are learned, so that no message quotes them. Raises ConfigError for a URL whose credentials
    were masked when it was recorded.
    """
    return _read_block(block, values, "", "freely")


def _read_block(block: type, values: Mapping[str, Any], path: str, rule: Rule) -> dict[str, Any]:
    """Read the scalars of the block at `path`. `rule` says how keys without a rule of their own may change."""
    keys = keys_of(block)
    read = {}
    for name, value in values.items():
        key = keys.get(SYNONYMS.get(name, name))
        hint: Any = Any
        setting = Setting()
        rule_here = rule
        if key is not None:
            hint, setting = key.hint, key.setting
            rule_here = setting.rule or rule
            if setting.written is not None and setting.parse is None:
                # Tasks, models and a gauntlet, as they are listed: their text is names and paths.
                hint, rule_here = setting.written, "freely"
        read[name] = _read(hint, value, join_key(path, name), rule_here, setting)
    return read


def _read(hint: Any, value: Any, path: str, rule: Rule, setting: Setting) -> Any:
    """Read the scalars in a value whose type is `hint`."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if isinstance(value, dict):
        for option in options:
            if dataclasses.is_dataclass(option):
                return _read_block(typing.cast(type, option), value, path, rule)
        inner = _type_inside(options, dict)
        return {name: _read(inner, item, f"{path}.{name}", rule, setting) for name, item in value.items()}
    if isinstance(value, list):
        inner = _type_inside(options, list)
        return [_read(inner, item, f"{path}[{index}]", rule, setting) for index, item in enumerate(value)]

    if isinstance(value, PlainScalar):
        is_text = str in options and not _takes(options, value.value)
        return str(value) if is_text else value.value
    if not isinstance(value, str):
        return value

    if is_masked(value):
        raise ConfigError(f"{path}: {value}: credentials are not recorded; give them here, by ${{oc.env:NAME}}")
    remember_url_secrets(value)
    if setting.is_path_or_url:
        value = expand_home(value)
    if isinstance(value, FromEnvironment):
        return _read_variable(options, value, path, rule, setting)
    return value


def _read_variable(options: tuple[Any, ...], value: FromEnvironment, path: str, rule: Rule, setting: Setting) -> str:
    """Return text from the environment, marked only if it is recorded as it was written."""
    variables = VARIABLE.findall(value.written)
    is_secret = is_secret_name(path) or any(is_secret_name(variable) for variable in variables)
    if is_secret:
        remember_secret(value)
    if str not in options and Any not in options:
        return value  # `build.py` refuses it, and quotes it as it was written

    is_plain_text = not setting.choices and not {int, float, bool} & set(options)
    is_recorded_as_written = is_plain_text and (rule == "freely" or is_secret)
    return value if is_recorded_as_written else str(value)


def _takes(options: tuple[Any, ...], value: bool | int | float) -> bool:
    """Return whether one of several types takes a number or a truth value, where text would do as well."""
    if type(value) in options:
        return True
    if type(value) is int:
        return float in options
    return isinstance(value, float) and value.is_integer() and int in options


def _type_inside(options: tuple[Any, ...], container: type) -> Any:
    """Return the type of a dict's values, or of a list's items, by that of several types which is such a container."""
    for option in options:
        if typing.get_origin(option) is container:
            return typing.get_args(option)[-1]
    return Any
