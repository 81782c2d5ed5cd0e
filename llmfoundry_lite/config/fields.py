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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from typing import Any, Literal

from llmfoundry_lite.config.batch_schedule import Steps
from llmfoundry_lite.config.spans import TIME_UNITS, Duration, Parsed, Scalar, describe_span
from llmfoundry_lite.errors import REFERENCE, find_nearest
from llmfoundry_lite.files import guess_url
from llmfoundry_lite.own_code import is_own

Rule = Literal["freely", "logged", "never"]
"""How a key may change between two launches of a run. never: the launch is refused. logged: the change takes effect, is
printed, and is recorded in the new segment of the log. freely: it takes effect."""

Replay = Literal["used", "trusted", "left out"]
"""How `replay` treats the key of a recorded run. used: it decides arithmetic or data. trusted: it runs code."""

REQUIRED = MISSING
"""Default of a key that must be given."""

Check = Callable[[Any], Any]
"""Function that raises ValueError, whose text says what was expected."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Use:
    """Condition under which a key has an effect, for a key that is without effect in some configurations.

    For example, `max_skipped_batches` is only used if `on_non_finite` is `skip`. If a user sets such a key elsewhere,
    the launch notes it. It refuses the key (`is_refused`) if the run would not be the one that the user asks for,
    unless checkpoints bind runs to the key's value, or LLM Foundry's own YAMLs set it there.
    """

    has_effect: Callable[[Any, Any], Any]
    """Function of the key's block and the whole configuration, which returns whether the key has an effect."""
    reason: str
    """Why the key has no effect otherwise. `{block.name}` and `{run.precision}` stand for their values, `{path}` for
    the block's dotted key, and `{key}` for the key's name in it."""
    is_refused: bool = False
    even_default: bool = False
    """Whether a user who writes the default expects an effect too, so that it is noted."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Setting:
    """The rules of a key, which are stored in the metadata of its field."""

    checks: Sequence[Check] = ()
    """Functions that raise ValueError for a bad value. They get the value as the YAML has it, before it is parsed."""
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
    """Rule for changes in mid-run. Default: the rule of the block around the key. Ignored beside `hardware=True`."""
    uses: Sequence[Use] = ()
    """Conditions that must all hold if the key is to have an effect."""
    uses_inside: Mapping[str, Use] = field(default_factory=dict)
    """Dotted key within the block -> condition that holds for the block in this place only."""
    shapes_dropout: bool = False
    """Log a change in a run with attn_pdrop, because the masks depend on which heads and rows a kernel is given."""
    is_path_or_url: bool = False
    """Whether the value is a path or a URL, in which `~` stands for the user's home folder."""
    hardware: bool = False
    """Whether a hardware overlay may set the key. Such a key may change freely in mid-run, because it says how and
    where the run is computed, and not what is trained."""

    replay: Replay = "left out"
    """How `replay` treats the key. Blocks are taken whole."""

    keys: "Callable[[], dict[str, Key]] | None" = None
    """Set for a field that is not a key itself. It holds the values of these keys, which companions add beside it."""

    @property
    def rule(self) -> Rule | None:
        """The key's own rule for changes in mid-run; None if the rule of the block around it applies."""
        return "freely" if self.hardware else self.change


# ------------------------------------------------------------------------------------------- fields of a schema


def setting(default: Any = MISSING, *checks: Check, choices: str = "", **metadata: Any) -> Any:
    """Return a dataclass field for a key of the configuration, with the rules for its values.

    `default` is the value of a key that a YAML leaves out; a callable, such as `dict`, is called for a new value each
    time. Without a default, the key must be given. `checks` are functions that raise ValueError for a bad value.
    `choices` are the allowed values, separated by spaces. `metadata` are other fields of `Setting`.

        precision: str = setting("amp_bf16", choices="fp32 amp_bf16", hardware=True)
        lr: float = setting(REQUIRED, POSITIVE, change="logged")
    """
    rules = {"setting": Setting(checks=checks, choices=choices.split(), **metadata)}
    if default is MISSING:
        return field(metadata=rules)
    if callable(default):
        # Dictionaries and lists have no hash. Without them, a block still has one, by which results for it are kept.
        has_no_hash = isinstance(default(), dict | list)
        return field(default_factory=default, metadata=rules, hash=False if has_no_hash else None)
    return field(default=default, metadata=rules)


def parsed(default: Any, parse: Callable[[Any], Any], written: Any = str | int, **metadata: Any) -> Any:
    """Return a dataclass field for a key whose value is parsed, such as the text `5m` into a `Time` of 300 seconds.

    `parse` takes the value of the YAML, whose type is `written`, and returns the object that the field holds. It raises
    ValueError, whose text says what was expected. It is also applied to `default`, which is given as in a YAML, unless
    that is None. `metadata` are other fields of `Setting`.

        retry_for: Time = parsed("30m", Time.parse)
    """
    if default is not MISSING and default is not None:
        default = parse(default)
    return setting(default, parse=parse, written=written, **metadata)


def duration_setting(
    default: Any = MISSING, units: Sequence[str] = TIME_UNITS, *, may_be_zero: bool = False, **metadata
) -> Any:
    """Return a dataclass field for a key that says how long something lasts in training, such as `100ba`.

    The field holds a `Duration`. `units` are the units that the key accepts. `default` is given as in a YAML; without
    one, the key must be given. 0 is refused unless `may_be_zero`. `metadata` are other fields of `Setting`.

        stop_after: Duration | None = duration_setting(None, ("ba", "ep"))
    """

    def parse(written: Scalar) -> Duration:
        """Parse a duration. Raises ValueError, whose text says what was expected."""
        duration = Duration.parse(written, units)
        if duration.value == 0 and not may_be_zero:
            raise ValueError("more than 0")
        return duration

    return parsed(default, parse, expected=describe_span(units), **metadata)


def only_with(*names: str, is_refused: bool = True) -> Use:
    """Return the condition for a key that has an effect only if the `name` in its block is one of `names`.

    For example, `scheduler.t_decay` has `only_with("warmup_stable_decay")`, because no other schedule reads it. With
    `is_refused`, a YAML that sets the key beside another name raises an error; otherwise the key is noted.
    """
    *other_names, last_name = names
    owners = f"{', '.join(other_names)} and {last_name} use" if other_names else f"{last_name} uses"
    remedy = "; remove it" if is_refused else ""
    return Use(
        has_effect=lambda block, _: block.name in names,
        reason=f"only {owners} it, and {{path}}.name is {{block.name}}{remedy}",
        is_refused=is_refused,
    )


def only_with_own(part: str, key: str = "name") -> Use:
    """Return the condition for `kwargs`, which have an effect only if `key` beside them names code of the user's own.

    For example, `optimizer.kwargs` has `only_with_own("optimizer")`. `part` is a word for the part, for the error.
    """
    return Use(
        has_effect=lambda block, _: is_own(getattr(block, key)),
        reason=f"only a python: {part} is given them, and {{path}}.{key} is {{block.{key}}}; remove it",
        is_refused=True,
    )


NOT_GIVEN_TO_OWN = "remove it, or pass it with {path}.kwargs.{key}"
"""End of the reason why a key of ours has no effect beside code of the user's own, which is not given it."""
KEYS_OF_OWN_OBJECTS = ("name", "lr", "param_groups", "num_workers", "drop_last", "kwargs")
"""Keys that an optimizer, a schedule or a loader of the user's own has in a YAML. A configuration has keys of ours too,
with their defaults."""


def without_our_keys(block: Any) -> Any:
    """Return the block of a user's own optimizer, schedule or loader without the keys that only ours have.

    Its arguments are in `kwargs`, and it does not get our `betas` or `t_warmup`. Any other value is returned unchanged.
    """
    if not isinstance(block, dict) or not is_own(block.get("name")):
        return block
    return {key: block[key] for key in KEYS_OF_OWN_OBJECTS if key in block}


# ------------------------------------------------------------------------------------------------- checks


def validator(expected: str, is_valid: Callable[[Any], Any]) -> Check:
    """Return a check that raises ValueError with the text `expected` for a value for which `is_valid` is false.

    >>> check = validator("a number above 0", lambda value: value > 0)
    >>> check(-1)
    ValueError: a number above 0

    `build.py` makes the message for the user of it: `lr: -1 given, expected a number above 0`.
    """

    def check(value: Any) -> None:
        if not is_valid(value):
            raise ValueError(expected)

    return check


def is_number(value: Any) -> bool:
    """Return whether a value is a number. True and False are not, although bool is a subclass of int in Python."""
    return isinstance(value, int | float) and not isinstance(value, bool)


POSITIVE = validator("a number above 0", lambda value: value > 0)
NON_NEGATIVE = validator("0 or more", lambda value: value >= 0)
PROBABILITY = validator("a probability, 0 <= p < 1", lambda value: 0 <= value < 1)
RUN_NAME = "{run_name}"
"""Placeholder for the run's name in the folders of a run's YAML. There is no other placeholder."""


def check_path_or_url(value: str, kind: str = "a folder or a URL") -> None:
    """Check the path of a folder, or a URL, for mistakes that would create a folder with a strange name.

    Raises ValueError for a misspelt URL (`s3:/bucket`), which would be a relative path, and for a placeholder that
    nothing has replaced (`runs/{name}`). `kind` says in the error what was expected.
    """
    # The text of an environment variable may be a secret, so messages quote the value as the YAML has it.
    written = getattr(value, "written", value)
    url = guess_url(value)
    if url:
        suggested_url = url if written == value else f"{url.partition('://')[0]}://…"
        raise ValueError(f"{kind}; did you mean {suggested_url}? A folder of that name is given as ./{written}")

    # In text from an environment variable, `{run_name}` has been replaced in `value`, but not in `written`.
    text_without_references = re.sub(REFERENCE, "", written)
    for placeholder in re.findall(r"\{[^{}]*\}", text_without_references):
        is_replaced = placeholder not in value
        if is_replaced:
            continue
        # `{run-name}` and `{RUN_NAME}` are probably misspelt.
        word = re.sub(r"[\W_]", "", placeholder).lower()
        hint = ""
        if placeholder != RUN_NAME and find_nearest(word, ["runname"]):
            hint = f"; did you mean {RUN_NAME}?"
        raise ValueError(f"{kind}, in which nothing replaces {placeholder}{hint}")


def check_source_path_or_url(value: str) -> None:
    """Check the path or URL of something that is read, such as the checkpoint of `load_path`.

    Raises ValueError for a misspelt URL, and for a placeholder in braces that nothing replaces. A path that exists may
    have braces in its name.
    """
    if guess_url(value) or not os.path.exists(os.path.expanduser(value)):
        check_path_or_url(value)


def local_folder(url_key: str = "", *, is_read: bool = False) -> Check:
    """Return a check for a key that takes a folder on this machine and not a URL.

    `url_key` is another key that does take a URL. The error names it. With `is_read`, the folder is one that is only
    read, so an existing one may have braces in its name; otherwise `{run_name}` is the only text in braces allowed.
    """
    kind = "a folder of this machine"
    if url_key:
        kind += f"; {url_key} takes a URL"

    def check(value: str) -> None:
        if "://" in value:
            raise ValueError(kind)
        is_existing_input = is_read and os.path.exists(value) and not guess_url(value)
        if not is_existing_input:
            check_path_or_url(value, kind)

    return check


def matches(expected: str, pattern: str) -> Check:
    """Return a check for text that must match the regular expression `pattern` from beginning to end.

    `expected` is the text of the ValueError: `matches("a name without dots", "[^.]+")`.
    """
    return validator(expected, lambda value: re.fullmatch(pattern, value))


def not_empty(expected: str) -> Check:
    """Return a check for text that must not be empty or white space. `expected` is the text of the ValueError."""
    return validator(expected, lambda value: value.strip())


# ----------------------------------------------------------------------------------- reading a schema


@dataclass(slots=True, frozen=True)
class Key:
    """A key of a configuration's block, as its dataclass describes it.

    For example, `eval_loaders: dict[str, LoaderConfig]` has the block LoaderConfig and the container dict.
    """

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
        """Whether null is a value of the key. For other keys, null in a YAML asks for the default."""
        return self.hint is Any or type(None) in typing.get_args(self.hint)

    def blocks(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Yield the dotted key and the value of each block in `value`, the value of this key.

        `path` is the dotted key of this key. A field with a single block yields (`train_loader`, block), a dictionary
        of blocks (`eval_loaders.wiki`, block) for each name, and a list (`stages[0]`, block) for each item. Nothing is
        yielded if the schema has a plain value here.
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

    Blocks become dictionaries, and durations and times become the text or number that they were parsed from:
    `SchedulerConfig(t_warmup=Duration(100, "ba"), …)` becomes `{"t_warmup": "100ba", …}`.
    """
    if isinstance(value, Parsed | Steps):
        return value.written
    if dataclasses.is_dataclass(value):
        names = [schema_field.name for schema_field in dataclasses.fields(value)]
        return {name: as_yaml(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {key: as_yaml(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(as_yaml(item) for item in value)
    return value


def without_empty(values: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Return nested dictionaries without those of the dotted keys that hold an empty dictionary or None.

    >>> without_empty({"norm_type": "rmsnorm", "norm_kwargs": {}}, ["norm_kwargs", "ffn_config.kwargs"])
    {'norm_type': 'rmsnorm'}
    """
    kept = dict(values)
    for key in keys:
        name, _, inner_key = key.partition(".")
        value = kept.get(name)
        if inner_key and isinstance(value, dict):
            kept[name] = without_empty(value, [inner_key])
        elif not inner_key and value in ({}, None):
            kept.pop(name, None)
    return kept


def join_key(path: str, name: object) -> str:
    """Return the dotted key of `name` in the block at `path`: `optimizer.lr`, or `lr` if `path` is empty."""
    return f"{path}.{name}" if path else str(name)


@functools.cache
def keys_of(block: type) -> dict[str, Key]:
    """Return name -> description of the keys that a YAML may have in a block, in the order of the schema.

    `block` is the block's dataclass. The keys of installed companions are among those of TrainConfig.
    """
    hints = typing.get_type_hints(block)
    keys: dict[str, Key] = {}
    for schema_field in dataclasses.fields(block):
        name = schema_field.name
        rules = schema_field.metadata.get("setting", Setting())
        if rules.keys is not None:
            keys |= rules.keys()  # the field holds the blocks of companions, whose keys stand beside it in the YAML
        else:
            keys[name] = _key_of(schema_field, hints[name], rules)
    return keys


def _key_of(schema_field: dataclasses.Field, hint: Any, rules: Setting) -> Key:
    """Return the description of a dataclass field as a key of a YAML.

    `hint` is the type of the field, and `rules` is the `Setting` in its metadata.
    """
    default = schema_field.default
    if schema_field.default_factory is not MISSING:
        default = schema_field.default_factory()
    # A parsed field, such as a Duration, has another type in the YAML.
    if rules.parse is not None:
        allows_none = type(None) in typing.get_args(hint)
        hint = rules.written | None if allows_none else rules.written

    # Look for a dataclass in the type: `Block`, `Block | None`, `dict[str, Block]` or `list[Block]`.
    alternatives = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for alternative in alternatives:
        container = typing.get_origin(alternative)
        inner_type = typing.get_args(alternative)[-1] if container in (dict, list) else alternative
        if dataclasses.is_dataclass(inner_type):
            return Key(hint, as_yaml(default), rules, typing.cast(type, inner_type), container)
    return Key(hint, as_yaml(default), rules, None, None)


def schema_keys(block: type, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key that a YAML of the dataclass `block` may have: `seed`, `optimizer.lr`, …

    `*` stands for a name that the user chooses, or an index: `eval_loaders.*.num_workers`. A block is yielded itself if
    a YAML may set it as a whole, to null or to a list. `prefix` is the dotted key of the block with a final dot.
    """
    for name, key in keys_of(block).items():
        may_be_set_itself = key.block is None or key.container is not None or key.allows_none
        if may_be_set_itself:
            yield prefix + name
        if key.block is not None:
            prefix_inside = f"{prefix}{name}.*." if key.container else f"{prefix}{name}."
            yield from schema_keys(key.block, prefix_inside)


def settings_along(block: type, dotted_key: str) -> list[Setting]:
    """Return the rules of a dotted key and of the blocks around it, the outermost block first.

    For `train_loader.dataset.shuffle` these are the rules of `train_loader`, of its `dataset`, and of `shuffle`.
    `block` is the dataclass of the whole configuration. The list ends before the first name that the schema does not
    have.
    """
    settings: list[Setting] = []
    names = iter(dotted_key.split("."))
    for name in names:
        name_without_index = name.partition("[")[0]  # param_groups for param_groups[0]
        key = keys_of(block).get(name_without_index)
        if key is None:
            break
        settings.append(key.setting)
        if key.block is None:
            break
        block = key.block
        if key.container is not None and "[" not in name:
            next(names, None)  # skip the name of one of several blocks, such as `wiki` in eval_loaders.wiki.dataset
    return settings
