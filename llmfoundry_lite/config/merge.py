"""Merge the layers of a configuration into its values: later layers override earlier ones, and `${…}` is resolved.

`layers.py` reads the layers. Resolving itself is in `resolve.py`, and `scalars.py` reads text and numbers by the
schema. No dataclass is built here: `build.py` does that.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from omegaconf.errors import OmegaConfBaseException

from llmfoundry_lite.config.layers import (
    COMMAND_LINE,
    UNFILLED,
    ConfigLayer,
    describe_yaml_error,
    find_value,
    leaf_keys,
    naming_source,
    source_of,
)
from llmfoundry_lite.config.resolve import merge_and_resolve, resolve_as_written
from llmfoundry_lite.config.scalars import map_texts, read_scalars
from llmfoundry_lite.errors import ConfigError, find_nearest

VARIABLES_OF_OURS = ("tokens_per_second",)
"""Variables that have an effect without a reference: the planner reads the speed that `init --hours` has measured."""


def merge_layers(layers: Sequence[ConfigLayer], block: type) -> dict[str, Any]:
    """Merge layers into the values of one configuration, as nested dictionaries. Later layers override earlier ones.

    For example, `optimizer: {lr: 1e-3, eps: 1e-8}` in a file and `optimizer.lr=2e-3` on the command line give
    `{"optimizer": {"lr": 0.002, "eps": 1e-8}}`. Lists are replaced as a whole. References `${…}` are resolved. `block`
    is the configuration's dataclass, by whose types a scalar is read as text or as a number.

    Raises ConfigError for a reference to a key that does not exist, for a value `???` that no layer gives, and for a
    variable of the command line that nothing uses.
    """
    _refuse_unfilled(layers)
    _refuse_unused_variables(layers)

    # OmegaConf refuses to merge a list with a block, so remove what a later layer replaces by the other type.
    mappings = [layer.values for layer in layers]
    for index in range(len(mappings)):
        for later in mappings[index + 1 :]:
            mappings[index] = _without_replaced_collections(mappings[index], later)

    with _naming_unresolved(layers):
        resolved = merge_and_resolve(mappings)
    with naming_source(layers):
        return read_scalars(block, resolved)


def resolve_layer(layer: ConfigLayer, block: type) -> dict[str, Any]:
    """Return the values of one layer for writing them into another YAML: `${oc.env:…}` stays as it is written.

    References to other keys are resolved, and `???` becomes null. No environment variable is read. `block` is as in
    `merge_layers`. Raises ConfigError for a reference to a key that does not exist.
    """
    without_unfilled = map_texts(layer.values, lambda text: None if text == UNFILLED else text)
    with _naming_unresolved([layer]):
        resolved = resolve_as_written(without_unfilled)
    with naming_source([layer]):
        return read_scalars(block, resolved)


@contextlib.contextmanager
def _naming_unresolved(layers: Sequence[ConfigLayer]) -> Iterator[None]:
    """Turn OmegaConf's error about a reference that it could not resolve into a ConfigError that names its key."""
    try:
        yield
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or ""
        problem = _describe_unresolved(error, layers)
        raise ConfigError(f"{source_of(key, layers)}: {key or 'configuration'}: {problem}") from None


def _describe_unresolved(error: OmegaConfBaseException, layers: Sequence[ConfigLayer]) -> str:
    """Return, for a message, why OmegaConf could not resolve a reference `${…}`, and what may have been meant.

    For a misspelt key this is `${max_seqlen} names nothing; did you mean ${max_seq_len}?`.
    """
    missing_key = re.search(r"Interpolation key '(.+)' not found", str(error))
    if missing_key:
        known_keys = sorted({key for layer in layers for key in leaf_keys(layer.values)})
        near = find_nearest(missing_key[1], known_keys)
        hint = f"; did you mean ${{{near}}}?" if near else ""
        return f"${{{missing_key[1]}}} names nothing{hint}"
    unset_variable = re.search(r"Environment variable '(.+)' not found", str(error))
    if unset_variable:
        return f"the environment variable {unset_variable[1]} is not set; export it"
    return describe_yaml_error(error)


def _refuse_unfilled(layers: Sequence[ConfigLayer]) -> None:
    """Raise ConfigError for a value `???` that no later layer overrides.

    A YAML writes `remote: ???` for a value that its user has to give. OmegaConf would take the value of an earlier
    layer, or the text `???` itself.
    """
    for index, layer in enumerate(layers):
        later_layers = layers[index + 1 :]
        for key in leaf_keys(layer.values):
            _, value = find_value(layer.values, key)
            is_filled = any(_overrides(later.values, key) for later in later_layers)
            if value == UNFILLED and not is_filled:
                raise ConfigError(f"{layer.source}: {key}: {UNFILLED} stands for a value that must be given; give one")


def _refuse_unused_variables(layers: Sequence[ConfigLayer]) -> None:
    """Raise ConfigError for a variable on the command line, such as `variables.width=64`, that no reference names.

    Otherwise a sweep over it would train the same run each time. Unused variables in a YAML file are not a mistake,
    because several files may share their variables.
    """
    arguments = next((layer for layer in layers if layer.source == COMMAND_LINE), None)
    variables = find_value(arguments.values, "variables")[1] if arguments is not None else None
    if not isinstance(variables, dict):
        return

    texts_with_references = []
    for layer in layers:
        texts_with_references += [text for text in _scalars_as_text(layer.values) if "${" in text]
    # `${variables}` uses all of them.
    if any(re.search(r"\$\{\s*variables\s*\}", text) for text in texts_with_references):
        return

    # A reference may be relative, or end at a block around the variable, so one name in common is enough.
    words: set[str] = set()
    referenced_variables: list[str] = []
    for text in texts_with_references:
        words.update(re.findall(r"[\w-]+", text))
        referenced_variables += re.findall(r"variables\.([\w.-]+)", text)
    for key in leaf_keys(variables):
        is_referenced = not words.isdisjoint(key.split("."))
        if is_referenced or key in VARIABLES_OF_OURS:
            continue
        near = find_nearest(key, referenced_variables)
        hint = f"; did you mean variables.{near}?" if near else "; set the key itself"
        raise ConfigError(
            f"{COMMAND_LINE}: variables.{key}: no value names ${{variables.{key}}}, so it has no effect{hint}"
        )


def _scalars_as_text(values: Any) -> Iterator[str]:
    """Yield every scalar in nested dictionaries and lists, as text."""
    if isinstance(values, dict):
        for value in values.values():
            yield from _scalars_as_text(value)
    elif isinstance(values, list):
        for item in values:
            yield from _scalars_as_text(item)
    else:
        yield str(values)


def _overrides(values: dict[str, Any], key: str) -> bool:
    """Return whether merging `values` later overrides a dotted key: directly, or by a scalar or list for a block.

    `{"dataset": {"local": "x"}}` and `{"dataset": None}` override `dataset.local`, and `{"dataset": {}}` does not.
    """
    value: Any = values
    for part in key.split("."):
        if not isinstance(value, dict):
            return True
        if part not in value:
            return False
        value = value[part]
    return True


def _without_replaced_collections(values: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Return `values` without the blocks that `later` replaces by a list, and the lists that it replaces by a block.

    OmegaConf refuses to merge a block and a list.
    """
    kept = {}
    for key, value in values.items():
        later_value = later.get(key)
        are_collections = isinstance(value, dict | list) and isinstance(later_value, dict | list)
        if isinstance(value, dict) and isinstance(later_value, dict):
            kept[key] = _without_replaced_collections(value, later_value)
        elif are_collections and type(value) is not type(later_value):
            continue
        else:
            kept[key] = value
    return kept


def lay_over(values: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Merge two configurations, of which `later` overrides keys of `values`, without resolving references.

    `replay` uses it for the recorded configuration of a run, which somebody else may have made: its `${…}` must stay
    text, because a reference could read the environment variables of this user.
    """
    merged = {**values, **later}
    for key in values.keys() & later.keys():
        if isinstance(values[key], dict) and isinstance(later[key], dict):
            merged[key] = lay_over(values[key], later[key])
    return merged
