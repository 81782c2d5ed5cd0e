"""Code that a configuration names by its import path, `python:package.module:Thing`, and who has allowed it to run.

A launch runs the code that its user's YAML names. A record that somebody else may have written (a checkpoint, a run, a
config.json) names code too, and naming it must not run it. So `import_object` imports only names that this process has
been told to trust by `trust_code`. A place that builds something from a record and forgets to ask runs no code.
"""

import contextlib
import importlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from llmfoundry_lite.errors import ConfigError, OwnCodeError, UserError, find_nearest, one_line
from llmfoundry_lite.ranks.ending import is_lost_peer
from llmfoundry_lite.search_path import allow_working_directory_for

PREFIX = "python:"
"""Beginning of the name of an object of the user's own."""

KINDS_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
"""Kinds of parameters that can be given by their names."""

_trusted_names: set[str] = set()
"""Names that `import_object` imports in this process."""


def is_own(name: Any) -> bool:
    """Return whether the value of a key names code by its import path."""
    return isinstance(name, str) and name.startswith(PREFIX)


def trust_code(names: Iterable[str]) -> None:
    """Let `import_object` import these names from now on, because the user of this process has said so.

    The user has written them into the configuration of a launch, or has given the option `--trust-code` for the record
    that they come from.
    """
    _trusted_names.update(names)


def is_trusted(name: str) -> bool:
    """Return whether `import_object` would import a name in this process."""
    return name in _trusted_names


@contextlib.contextmanager
def errors_named(place: str) -> Iterator[None]:
    """Raise OwnCodeError in place of an error that the user's own code raises in the block.

    `place` names the key and the code, such as `callbacks: python:mine:Beep`. An error that is for the user already is
    raised as it is. So are those that are not the code's fault: lost contact with another rank, lack of memory, and
    errors of files, which may pass.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        is_out_of_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
        if is_lost_peer(error) or is_out_of_memory or isinstance(error, OSError):
            raise
        raise OwnCodeError(f"{place} raises {type(error).__name__}: {one_line(error)}") from error


def import_object(name: str, key: str) -> Any:
    """Import one of the user's own objects, which the key `key` of a configuration names.

    `name` has the form `python:package.module:Thing`. Raises ConfigError if nobody has trusted it, if the name has
    another form, if the module or its attribute is missing, or if it cannot be called, and OwnCodeError for errors that
    the user's own module raises.
    """
    module_name, _, attribute = name.removeprefix(PREFIX).partition(":")
    if not attribute:
        raise ConfigError(f"{key}: {name!r} given, expected python:package.module:Thing")
    if not is_trusted(name):
        raise ConfigError(f"{key}: {name} is code that is not trusted here, so it is not imported")

    allow_working_directory_for(module_name)
    with errors_named(f"{key}: {name}: its module"):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            is_missing_itself = f"{module_name}.".startswith(f"{error.name}.")
            if not is_missing_itself:
                raise ConfigError(f"{key}: {name}: its module imports another, and fails: {error}") from error
            raise ConfigError(f"{key}: {name}: {error}; is its folder on PYTHONPATH?") from None
    if not hasattr(module, attribute):
        raise ConfigError(f"{key}: {name}: module {module_name} has no {attribute}")
    own_object = getattr(module, attribute)
    if not callable(own_object):
        raise ConfigError(f"{key}: {name} is a {type(own_object).__name__}, expected a class or a function")
    return own_object


def call_object(name: str, key: str, block: str, kwargs: Mapping[str, Any], /, *arguments: Any, **options: Any) -> Any:
    """Import one of the user's own objects and call it. Returns its result.

    `key` is the dotted key that has the name, and `block` the one that has the arguments `kwargs`, both for errors.
    `arguments` and `options` are what every object in this place gets. For example,
    `call_object("python:mine.callbacks:Beep", "callbacks", "callbacks", {"every": 5})` returns
    `mine.callbacks.Beep(every=5)`.

    Raises the errors of `import_object`, and ConfigError if the object does not take these keys, or if `kwargs` has one
    of the `options`. Raises OwnCodeError for errors that the object itself raises.
    """
    own_object = import_object(name, key)
    given_twice = [option for option in options if option in kwargs]
    if given_twice:
        raise ConfigError(
            f"{block}: {', '.join(given_twice)} given, which {name} gets in any case, by other keys; remove it here"
        )
    _check_arguments(own_object, f"{block}: {name}", kwargs, arguments, options)
    with errors_named(f"{key}: {name}"):
        return own_object(*arguments, **options, **kwargs)


def _check_arguments(
    own_object: Any, place: str, kwargs: Mapping[str, Any], arguments: Sequence[Any], options: Mapping[str, Any]
) -> None:
    """Raise ConfigError unless an object takes these arguments, by its signature.

    `place` begins the message. `kwargs` are the user's arguments, and the others are what every object in this place
    gets. Nothing is called, so that a TypeError inside the user's own code is not taken for one of its arguments.
    """
    try:
        signature = inspect.signature(own_object)
    except ValueError:  # some objects that are written in C have none
        return
    try:
        signature.bind(*arguments, **options, **kwargs)
    except TypeError as error:
        parameters = list(signature.parameters.values())[len(arguments) :]
        keys = [parameter.name for parameter in parameters if parameter.kind in KINDS_BY_NAME]
        hint = _suggest_key(kwargs, [key for key in keys if key not in options])
        raise ConfigError(f"{place} does not take these keys: {error}; {hint}") from None


def _suggest_key(kwargs: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Return, for an error, the keys that an object takes, and which of them an unknown one probably means."""
    listed_keys = f"it takes {', '.join(keys) or 'no keys'}"
    for key in kwargs:
        nearest = find_nearest(key, keys)
        if key not in keys and nearest:
            return f"did you mean {nearest}? ({listed_keys})"
    return listed_keys
