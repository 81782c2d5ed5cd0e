"""Decide for each scalar of a YAML whether it is text, a number or a truth value, by the type of its key in the schema.

YAML reads the git hash 5e12345 as infinity, and only the schema knows that the key holds a name. `yaml_text.py`
therefore reads a scalar without quotes as a `PlainScalar`, which has both its text and the number or truth value that
YAML reads in it. After files are merged and `${…}` is resolved, `read_scalars` takes one of the two.

Text from an environment variable may be a secret, so it is recorded as `${oc.env:NAME}`. `resolve.py` makes such text a
`FromEnvironment`, which remembers how it was written. `expand_home` here does so for a path that begins with `~`.
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
    """Text without quotes in which YAML reads a number or a truth value: `1e-3`, `12`, `true`."""

    value: bool | int | float
    """The number or truth value that YAML reads."""

    def __new__(cls, text: str, value: bool | int | float) -> "PlainScalar":
        scalar = super().__new__(cls, text)
        scalar.value = value
        return scalar


class FromEnvironment(str):
    """Text that depends on who starts the run, because it has an environment variable or the user's home folder in it.

    For example, `${oc.env:DATA}/c4` is the text `/data/c4`, with `written` as in the YAML.
    """

    written: str
    """The text as the YAML has it, with `${oc.env:NAME}` for the variable, or with `~`."""

    def __new__(cls, text: str, written: str) -> "FromEnvironment":
        marked = super().__new__(cls, text)
        marked.written = written
        return marked

    def __getnewargs__(self) -> tuple[str, str]:
        return str(self), self.written

    def __repr__(self) -> str:
        return repr(self.written)

    def replace(self, old: str, new: str, count: typing.SupportsIndex = -1, /) -> "FromEnvironment":
        """Replace `old`, such as `{run_name}`, in the text that is used, but not in the text as it was written."""
        return FromEnvironment(super().replace(old, new, count), self.written)


def expand_home(path_or_url: str) -> str:
    """Return a path with the user's home folder in place of `~`, as a `FromEnvironment`. Other text stays unchanged."""
    expanded = os.path.expanduser(path_or_url)
    if expanded == path_or_url:
        return path_or_url
    written = getattr(path_or_url, "written", path_or_url)
    return FromEnvironment(expanded, written)


VARIABLE = re.compile(r"\$\{oc\.env:([^,{}]+)")
"""Pattern of a reference to an environment variable; its group is the variable's name."""


def map_texts(values: Any, convert: Callable[[str], str | None]) -> Any:
    """Return `values` with `convert` applied to every text in dictionaries and lists, and with lists for tuples."""
    if isinstance(values, dict):
        return {key: map_texts(value, convert) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [map_texts(item, convert) for item in values]
    return convert(values) if isinstance(values, str) else values


AMBIGUOUS_NUMBER = re.compile(r"[-+]?(?:0[0-7_]+|[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?)")
"""Pattern of text in which YAML 1.1 reads an octal number (010), or a number to base 60 (1:30). Few authors of a YAML
expect that, so `yaml_text.py` leaves it text."""


def hint_at_number(text: str) -> str:
    """Return the end of an error message about text where a number is expected: how to write the number.

    >>> hint_at_number("1:30")
    '; YAML 1.1 reads it to base 60, so write 90'
    >>> hint_at_number("010")
    '; YAML 1.1 reads it as octal, 8, so write that or 10'

    Returns empty text if there is no advice.
    """
    if isinstance(text, FromEnvironment):
        return f"; a variable is text, so write ${{oc.decode:{text.written}}}"
    if not AMBIGUOUS_NUMBER.fullmatch(text):
        return ""

    sign = -1 if text.startswith("-") else 1
    digits = text.lstrip("-+").replace("_", "")
    # 1:30:00 has digits to base 60.
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
"""Keys of LLM Foundry's older YAMLs -> our keys. Their scalars are read by the types of our keys."""


def read_scalars(block: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with each scalar read by the type of its key in the dataclass `block`.

    `run_name: 5e3` gives the text "5e3", because run_name is text, and `max_seq_len: 2e3` gives the number 2000.0. If
    the schema has no type for a key, as among `variables`, the rules of YAML apply. Types are not checked here, but in
    `build.py`. In paths and URLs, `~` becomes the user's home folder.

    Text from the environment stays a `FromEnvironment`, so that the run records it as it was written, if its key may
    change freely in mid-run. These are paths, URLs, names, and arguments of loggers and callbacks. All other keys
    decide what is trained. Their text becomes ordinary text, which the run records, because otherwise another value of
    the variable would change the run unnoticed. A secret, by the name of its key or of its variable, always stays
    marked.

    Secrets and credentials are remembered, so that every later message masks them. Raises ConfigError for a URL that
    was recorded with masked credentials.
    """
    return _read_block(block, values, "", "freely")


def _read_block(block: type, values: Mapping[str, Any], path: str, rule: Rule) -> dict[str, Any]:
    """Return the values of the block at the dotted key `path`, with their scalars read by the dataclass `block`.

    `rule` says how keys that have no rule of their own may change in mid-run.
    """
    keys = keys_of(block)
    read_values = {}
    for name, value in values.items():
        # A key that the schema does not have is refused later, unless it is LLM Foundry's and is dropped.
        key = keys.get(SYNONYMS.get(name, name))
        hint: Any = Any
        setting = Setting()
        rule_of_key = rule
        if key is not None:
            hint = key.hint
            setting = key.setting
            rule_of_key = setting.rule or rule
            has_other_type_in_yaml = setting.written is not None and setting.parse is None
            if has_other_type_in_yaml:
                # Lists of tasks and models, and a gauntlet. Their texts are names and paths, which may change freely.
                hint = setting.written
                rule_of_key = "freely"
        read_values[name] = _read(hint, value, join_key(path, name), rule_of_key, setting)
    return read_values


def _read(hint: Any, value: Any, path: str, rule: Rule, setting: Setting) -> Any:
    """Return `value`, which stands at the dotted key `path`, with its scalars read by the type `hint`.

    `rule` and `setting` are those of the key that holds the value, also if the value is within a list or a block.
    """
    accepted_types = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if isinstance(value, dict):
        for accepted_type in accepted_types:
            if dataclasses.is_dataclass(accepted_type):
                return _read_block(typing.cast(type, accepted_type), value, path, rule)
        item_type = _item_type_of(accepted_types, dict)
        return {name: _read(item_type, item, f"{path}.{name}", rule, setting) for name, item in value.items()}
    if isinstance(value, list):
        item_type = _item_type_of(accepted_types, list)
        return [_read(item_type, item, f"{path}[{index}]", rule, setting) for index, item in enumerate(value)]

    # A scalar without quotes is text only if the key takes text and does not take the number.
    if isinstance(value, PlainScalar):
        is_text = str in accepted_types and not _accepts_number(accepted_types, value.value)
        return str(value) if is_text else value.value
    if not isinstance(value, str):
        return value

    if is_masked(value):
        raise ConfigError(f"{path}: {value}: credentials are not recorded; give them here, by ${{oc.env:NAME}}")
    remember_url_secrets(value)
    if setting.is_path_or_url:
        value = expand_home(value)
    if isinstance(value, FromEnvironment):
        return _read_variable(accepted_types, value, path, rule, setting)
    return value


def _read_variable(
    accepted_types: tuple[Any, ...], value: FromEnvironment, path: str, rule: Rule, setting: Setting
) -> str:
    """Return text from the environment: as a `FromEnvironment` if the run records it as written, else as plain text.

    The arguments are as in `_read`. If the text is a secret, it is remembered, so that messages mask it.
    """
    variables = VARIABLE.findall(value.written)
    is_secret = is_secret_name(path) or any(is_secret_name(variable) for variable in variables)
    if is_secret:
        remember_secret(value)
    accepts_text = str in accepted_types or Any in accepted_types
    if not accepts_text:
        return value  # `build.py` refuses it, and quotes it as it was written

    # Choices, and text where a number may stand, decide what is trained whatever the key's rule is.
    is_free_text = not setting.choices and not {int, float, bool} & set(accepted_types)
    is_recorded_as_written = is_free_text and (rule == "freely" or is_secret)
    return value if is_recorded_as_written else str(value)


def _accepts_number(accepted_types: tuple[Any, ...], value: bool | int | float) -> bool:
    """Return whether a key of these types takes a number or truth value without loss: 2.0 is accepted as an int."""
    if type(value) in accepted_types:
        return True
    if type(value) is int:
        return float in accepted_types
    return isinstance(value, float) and value.is_integer() and int in accepted_types


def _item_type_of(accepted_types: tuple[Any, ...], container: type) -> Any:
    """Return the type of the values of the dict, or the items of the list, among the types that a key accepts.

    For the types (`dict[str, float]`, None) and the container dict, this is float. Returns Any if none is a container.
    """
    for accepted_type in accepted_types:
        if typing.get_origin(accepted_type) is container:
            return typing.get_args(accepted_type)[-1]
    return Any
