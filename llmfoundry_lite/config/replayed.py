"""A configuration that a run recorded -> the part of it that `replay` trains with. No torch.

The run may be anybody's, so its record is data. Keys that decide arithmetic or data are used (`replay` in the schema).
No variable in their text is resolved, and code that they name runs only if the user trusts its author.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from llmfoundry_lite.config.data_schema import OF_THE_MODEL
from llmfoundry_lite.config.fields import join_key, keys_of
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.errors import ConfigError, is_masked

CODE = "python:"
PLAIN_COMPILE_KEYS = ("backend", "dynamic", "fullgraph", "mode")
"""Arguments of torch.compile that are safe to use: its `options` may name compilers, by their paths."""
KEYS_OF_CODE = ("name", "lr", "num_workers", "drop_last", "kwargs")
"""Keys of a user's own optimizer or loader. `schema.as_dict` records others too, which must not be passed to it."""
MAX_QUOTED = 60


def select_recorded(config: Mapping[str, Any], given: Collection[str], *, trusts_code: bool) -> dict[str, Any]:
    """Return the keys that a replay uses, except those `given` on the command line.

    Raises ConfigError for code that is not trusted, and for text with `${` in it.
    """
    used = [name for name, key in keys_of(TrainConfig).items() if key.setting.replay != "left out"]
    values = without(given, {name: config[name] for name in used if name in config})
    code = [*find_code(values)]
    if code and not trusts_code:
        alternative = "; or leave the variables out: environment={}" if values.get("environment") else ""
        raise ConfigError(
            f"replay: the run's configuration brings code of its author: {', '.join(code)}; if you trust it, let it "
            f"run with --trust-code{alternative}"
        )
    if trusts_code:
        values["callbacks"] = {"extra": find_callbacks(config)}
    return as_given(refuse_unresolved(values, "replay"))


def without(keys: Collection[str], value: Any, path: str = "") -> Any:
    """Return `value`, which stands at `path`, without some dotted keys, at any depth."""
    if not isinstance(value, dict):
        return value
    kept = {}
    for name, inner in value.items():
        key = join_key(path, name)
        if key not in keys:
            kept[name] = without(keys, inner, key)
    return kept


def refuse_unresolved(values: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return recorded values without remotes whose URL is incomplete, since a folder here may have the data.

    Raises ConfigError for other text with `${` in it, because variables are not resolved in somebody's record. `what`
    begins its message.
    """
    known = dict(values)
    if "train_loader" in values:
        known["train_loader"] = _without_partial_remotes(values["train_loader"])
    unresolved = {path: text for path, text in _texts(known) if "${" in text}
    if unresolved:
        recorded = ", ".join(f"{path} is {_quoted(text)}" for path, text in unresolved.items())
        keys = dict.fromkeys(f"{path.partition('[')[0]}=…" for path in unresolved)
        raise ConfigError(f"{what}: {recorded} in the run, which is not resolved here; give {' '.join(keys)}")
    return known


def _without_partial_remotes(value: Any) -> Any:
    """Return `value`, at any depth with null for a remote that has `${` or masked credentials in it."""
    if isinstance(value, list):
        return [_without_partial_remotes(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    complete = {key: _without_partial_remotes(inner) for key, inner in value.items()}
    remote = value.get("remote")
    if isinstance(remote, str) and ("${" in remote or is_masked(remote)):
        complete["remote"] = None
    return complete


def find_callbacks(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `python:` callbacks of a recorded configuration, and their arguments."""
    callbacks = config.get("callbacks")
    extra = callbacks.get("extra") if isinstance(callbacks, dict) else None
    return extra if isinstance(extra, dict) else {}


def as_given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration as a YAML has them: a user's own objects lose the keys that we added."""
    return {name: _without_our_keys(block) for name, block in values.items()}


def _without_our_keys(block: Any) -> Any:
    """Return the block of a user's own optimizer or loader as its YAML has it, and any other value as it is."""
    if not isinstance(block, dict) or not str(block.get("name")).startswith(CODE) or "kwargs" not in block:
        return block
    kept = {key: block[key] for key in KEYS_OF_CODE if key in block}
    dataset = block.get("dataset")
    if isinstance(dataset, dict):
        kept["dataset"] = {key: value for key, value in dataset.items() if key in OF_THE_MODEL}
    return kept


def find_code(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield a description of each part that names code."""
    for name in find_callbacks(values):
        yield _quoted(str(name))
    for path, text in _texts(values):
        if text.startswith(CODE):
            yield f"{path} {_quoted(text)}"

    # Variables may name a library to load, and torch.compile may be told to run a compiler.
    environment = values.get("environment")
    if isinstance(environment, dict) and environment:  # the schema refuses other types
        yield f"environment {', '.join(_quoted(str(name)) for name in environment)}"
    compile_config = values.get("compile_config")
    if isinstance(compile_config, dict):
        for key in compile_config:
            if key not in PLAIN_COMPILE_KEYS:
                yield f"compile_config.{_quoted(str(key))}"


def _texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and the value of each text."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts(inner, join_key(path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _texts(inner, f"{path}[{index}]")


def _quoted(text: str) -> str:
    """Return text of somebody's record for a message, cut after MAX_QUOTED characters."""
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}…"
