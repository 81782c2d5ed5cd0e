"""Merge nested dictionaries and resolve their references `${…}`, by OmegaConf.

Text from an environment variable (`${oc.env:DATA}`) is marked as `FromEnvironment`, which remembers how it was written,
because it may be a secret, and differs from machine to machine. OmegaConf does not tell which text a variable is part
of, so everything is resolved twice: once with the values of variables and once with references to variables kept as
they are. A text that differs between the two depends on a variable.
"""

import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException
from omegaconf.resolvers import oc

from llmfoundry_lite.config.scalars import VARIABLE, FromEnvironment

OBJECTS = {"allow_objects": True}
"""OmegaConf's flag for values of classes that it does not know. Scalars of a YAML are our PlainScalar."""


def resolve_as_written(values: dict[str, Any]) -> Any:
    """Resolve the references to other keys in nested dictionaries, and leave `${oc.env:…}` as it is written.

    No environment variable is read. Raises OmegaConfBaseException for a reference to nothing, also if its key has a
    variable in it.
    """
    with _variables_as_written(()):
        return OmegaConf.to_container(OmegaConf.create(values, flags=OBJECTS), resolve=True)


def merge_and_resolve(mappings: Sequence[dict[str, Any]]) -> Any:
    """Merge nested dictionaries, of which later ones override earlier ones, and resolve their references `${…}`.

    For example, with the variable DISK=/scratch, `{"d": 8, "data": "${oc.env:DISK}/d${d}"}` and `{"d": 16}` give
    `{"d": 16, "data": "/scratch/d16"}`. Text that came from an environment variable is a `FromEnvironment`, whose
    `written` is `${oc.env:DISK}/d16` here.

    Raises OmegaConfBaseException for a reference to nothing, and for a variable that is not set.
    """
    merged = OmegaConf.merge(*(OmegaConf.create(values, flags=OBJECTS) for values in mappings))
    resolved = OmegaConf.to_container(merged, resolve=True)
    has_variables = re.search(r"\$\{\s*oc\.", str(mappings))
    if has_variables:
        resolved = _mark_variables(resolved, _resolve_as_written(merged))
    return resolved


def _mark_variables(resolved: Any, written: Any) -> Any:
    """Return `resolved` with every text that came from an environment variable as a `FromEnvironment`.

    `resolved` and `written` are the same values at any depth, with variables resolved and with variables as they were
    written. Text that differs between the two came from a variable. A single text in `written` may stand for a whole
    block or list, such as `${oc.decode:${oc.env:LIST}}`. Then every text within has this as its `written`.
    """
    if isinstance(resolved, dict):
        written_by_key = written if isinstance(written, dict) else dict.fromkeys(resolved, written)
        return {key: _mark_variables(value, written_by_key.get(key)) for key, value in resolved.items()}
    if isinstance(resolved, list):
        written_items = written if isinstance(written, list) else [written] * len(resolved)
        pairs = zip(resolved, written_items, strict=True)
        return [_mark_variables(item, written_item) for item, written_item in pairs]
    if isinstance(resolved, str) and resolved != written:
        return FromEnvironment(resolved, str(written))
    return resolved


def _resolve_as_written(merged: Any) -> Any:
    """Resolve every reference of OmegaConf's configuration `merged` except `${oc.env:…}`, which stays as written.

    A variable that is part of a key, as in `${paths.${oc.env:CLUSTER}}`, has to be resolved all the same, because there
    is no key of the name `${oc.env:CLUSTER}`. OmegaConf's error about the missing key names such variables, so they are
    found by trying again until there is no error.
    """
    variables_in_keys: set[str] = set()
    while True:
        try:
            with _variables_as_written(variables_in_keys):
                return OmegaConf.to_container(merged, resolve=True)
        except OmegaConfBaseException as error:
            further_variables = set(VARIABLE.findall(str(error))) - variables_in_keys
            if not further_variables:
                raise
            variables_in_keys |= further_variables


@contextlib.contextmanager
def _variables_as_written(resolved_variables: Collection[str]) -> Iterator[None]:
    """Make `${oc.env:…}`, and `${oc.decode:…}` around it, resolve to themselves inside this context.

    Variables in `resolved_variables` are resolved to their values all the same. OmegaConf has one table of resolvers
    for the whole process, so its own resolvers are replaced, and restored at the end.
    """
    register = getattr(OmegaConf, "register_resolver", OmegaConf.register_new_resolver)

    def resolve_to_itself(name: str) -> Callable[..., str | None]:
        """Return a resolver that replaces `oc.env` or `oc.decode` (`name` is env or decode)."""

        def resolve(*arguments: Any) -> str | None:
            if name == "env" and arguments[0] in resolved_variables:
                return oc.env(*arguments)
            written_arguments = ",".join(map(_write_argument, arguments))
            return f"${{oc.{name}:{written_arguments}}}"

        return resolve

    def select(key: str, *default: Any, _parent_: Any) -> Any:
        """Resolve `${oc.select:KEY,DEFAULT}`, which would return its default for a key with a variable in it.

        Raises the error of other references instead, which names the variable, so that it is resolved at the next try.
        """
        if "${oc." in key:
            raise InterpolationKeyError(f"oc.select: {key}")
        return oc.select(key, *default, _parent_=_parent_)

    try:
        for name in ("env", "decode"):
            register(f"oc.{name}", resolve_to_itself(name), replace=True)
        register("oc.select", select, replace=True)
        yield
    finally:
        for name in ("env", "decode", "select"):
            register(f"oc.{name}", getattr(oc, name), replace=True)


def _write_argument(value: Any) -> str:
    """Return an argument of a resolver in OmegaConf's grammar: `null`, `abc`, or `'a, b'` in quotes if necessary."""
    if value is None:
        return "null"
    text = str(value)
    needs_no_quotes = text.startswith("${oc.") or re.fullmatch(r"[\w./:@%+-]*", text)
    if needs_no_quotes:
        return text
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
