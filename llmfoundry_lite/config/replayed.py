"""Select from the recorded configuration of a run the keys with which `replay` trains some of its batches again.

The run may be somebody else's, so its record is data that is not trusted. Only keys that decide arithmetic or data are
used (`replay` in the schema). References `${…}` in their text are not resolved, because they could read environment
variables of this user. Code that the record names (`python:` paths, compilers) runs only if the user trusts its author.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from llmfoundry_lite.config.data_schema import OF_THE_MODEL
from llmfoundry_lite.config.fields import join_key, keys_of, without_our_keys
from llmfoundry_lite.config.part_names import spell_out_names
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.errors import ConfigError, is_masked
from llmfoundry_lite.own_code import is_own

PLAIN_COMPILE_KEYS = ("backend", "dynamic", "fullgraph", "mode")
"""Arguments of torch.compile that are safe to use: its `options` may name compilers, by their paths."""
MAX_QUOTED = 60
"""Maximum number of characters of a recorded text in an error."""


def select_recorded(config: Mapping[str, Any], given: Collection[str], *, trusts_code: bool) -> dict[str, Any]:
    """Return the values of a recorded configuration that a replay uses, as a YAML would have them.

    `given` are the dotted keys on the command line of the replay, whose recorded values are left out. With
    `trusts_code`, the run's own `python:` callbacks are included.

    Raises ConfigError for code that is not trusted, and for text with an unresolved `${`.
    """
    used_keys = [name for name, key in keys_of(TrainConfig).items() if key.setting.replay != "left out"]
    values = without(given, {name: config[name] for name in used_keys if name in config})
    # A launch records import paths. A short name that somebody has written into the record names code all the same.
    values, _ = spell_out_names(values)

    if trusts_code:
        values["callbacks"] = {"extra": find_callbacks(config)}
    else:
        _refuse_code(values)
    return as_given(refuse_unresolved(values, "replay"))


def refuse_code_in_model(config: Mapping[str, Any]) -> None:
    """Raise ConfigError if a recorded model has parts that are code. The message names all code of the configuration.

    No key on the command line of a replay can take a part out of the model, unlike the loss, so this is known at once.
    """
    model = without(["model.loss_fn", "model.loss_kwargs"], {"model": config.get("model")})
    if any(find_code(model)):
        select_recorded(config, [], trusts_code=False)


def _refuse_code(values: Mapping[str, Any]) -> None:
    """Raise ConfigError if a recorded configuration would run code. The message names all of it."""
    code = [*find_code(values)]
    if not code:
        return
    alternative = "; or leave the variables out: environment={}" if values.get("environment") else ""
    raise ConfigError(
        f"replay: the run's configuration brings code of its author: {', '.join(code)}; if you trust it, let it "
        f"run with --trust-code{alternative}"
    )


def without(keys: Collection[str], value: Any, path: str = "") -> Any:
    """Return nested dictionaries without the dotted keys in `keys`. `path` is the dotted key of `value` itself.

    >>> without({"optimizer.lr"}, {"seed": 1, "optimizer": {"name": "lion", "lr": 0.1}})
    {'seed': 1, 'optimizer': {'name': 'lion'}}
    """
    if not isinstance(value, dict):
        return value
    kept = {}
    for name, inner in value.items():
        key = join_key(path, name)
        if key not in keys:
            kept[name] = without(keys, inner, key)
    return kept


def refuse_unresolved(values: Mapping[str, Any], command: str) -> dict[str, Any]:
    """Raise ConfigError for recorded text with `${` in it, which is never resolved here. Return the other values.

    An incomplete `remote` in the training data is replaced by null instead, because a folder on this machine may have
    the data. `command` is the command that reads the record; the message begins with it.
    """
    usable = dict(values)
    if "train_loader" in values:
        usable["train_loader"] = _without_incomplete_remotes(values["train_loader"])

    unresolved = {path: text for path, text in _texts(usable) if "${" in text}
    if unresolved:
        recorded = ", ".join(f"{path} is {_quoted(text)}" for path, text in unresolved.items())
        keys = dict.fromkeys(f"{path.partition('[')[0]}=…" for path in unresolved)
        raise ConfigError(f"{command}: {recorded} in the run, which is not resolved here; give {' '.join(keys)}")
    return usable


def _without_incomplete_remotes(value: Any) -> Any:
    """Return a loader's block, or a value in it, with null for each `remote` whose URL cannot be opened.

    Such a URL has a reference `${…}`, or credentials that were masked when it was recorded.
    """
    if isinstance(value, list):
        return [_without_incomplete_remotes(item) for item in value]
    if not isinstance(value, dict):
        return value
    usable = {key: _without_incomplete_remotes(inner) for key, inner in value.items()}
    remote = value.get("remote")
    if isinstance(remote, str) and ("${" in remote or is_masked(remote)):
        usable["remote"] = None
    return usable


def find_callbacks(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return import path -> arguments of the `python:` callbacks of a record, which may be malformed."""
    callbacks = config.get("callbacks")
    extra = callbacks.get("extra") if isinstance(callbacks, dict) else None
    return extra if isinstance(extra, dict) else {}


def as_given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return recorded values as a YAML has them, so that a launch accepts them.

    A record has every key of a block, and a launch refuses most of them beside a user's own optimizer or loader.
    """
    given: dict[str, Any] = {}
    for name, recorded in values.items():
        given[name] = without_our_keys(recorded)
        is_of_own_object = given[name] is not recorded
        if is_of_own_object and isinstance(recorded.get("dataset"), dict):
            dataset = recorded["dataset"]
            given[name]["dataset"] = {key: value for key, value in dataset.items() if key in OF_THE_MODEL}
    return given


def find_code(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield a description of each part of a recorded configuration that would run code, for an error.

    For example, `optimizer.name python:my.module:Optimizer` or `environment LD_PRELOAD`.
    """
    for name in find_callbacks(values):
        yield _quoted(str(name))
    for path, text in _texts(values):
        if is_own(text):
            yield f"{path} {_quoted(text)}"

    # An environment variable may name a library to load.
    environment = values.get("environment")
    if isinstance(environment, dict) and environment:  # the schema refuses other types
        yield f"environment {', '.join(_quoted(str(name)) for name in environment)}"

    # Some options of torch.compile name a compiler to run.
    compile_config = values.get("compile_config")
    if isinstance(compile_config, dict):
        for key in compile_config:
            if key not in PLAIN_COMPILE_KEYS:
                yield f"compile_config.{_quoted(str(key))}"


def _texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the value of each text in nested dictionaries and lists: ("optimizer.name", "lion")."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts(inner, join_key(path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _texts(inner, f"{path}[{index}]")


def _quoted(text: str) -> str:
    """Return recorded text for a message, cut after MAX_QUOTED characters."""
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}…"
