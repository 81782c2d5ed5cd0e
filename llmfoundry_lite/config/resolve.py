"""`${…}` in a configuration, by OmegaConf. Text of environment variables is marked with how it was written."""

import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException
from omegaconf.resolvers import oc

from llmfoundry_lite.config.scalars import VARIABLE, FromEnvironment

OBJECTS = {"allow_objects": True}
"""Flag that lets OmegaConf carry our PlainScalar."""


def merge_and_resolve(mappings: Sequence[dict[str, Any]]) -> Any:
    """Lay later mappings over earlier ones, and resolve `${…}`. Raises OmegaConfBaseException.

    Text that came from an environment variable becomes a `FromEnvironment`.
    """
    merged = OmegaConf.merge(*(OmegaConf.create(values, flags=OBJECTS) for values in mappings))
    resolved = OmegaConf.to_container(merged, resolve=True)
    if re.search(r"\$\{\s*oc\.", str(mappings)):
        resolved = _mark_variables(resolved, _resolve_as_written(merged))
    return resolved


def _mark_variables(resolved: Any, written: Any) -> Any:
    """Return `resolved` with text marked where it differs from `written`, which has variables as they were written.

    Where `written` has a single text for a whole block or list, such as `${oc.decode:${oc.env:LIST}}`, all text within
    gets that.
    """
    if isinstance(resolved, dict):
        parts = written if isinstance(written, dict) else dict.fromkeys(resolved, written)
        return {key: _mark_variables(value, parts.get(key)) for key, value in resolved.items()}
    if isinstance(resolved, list):
        items = written if isinstance(written, list) else [written] * len(resolved)
        return [_mark_variables(value, item) for value, item in zip(resolved, items, strict=True)]
    if isinstance(resolved, str) and resolved != written:
        return FromEnvironment(resolved, str(written))
    return resolved


def _resolve_as_written(merged: Any) -> Any:
    """Resolve everything except `${oc.env:…}`, which stays as it was written.

    A variable that chooses a key, as in `${paths.${oc.env:CLUSTER}}`, must be resolved. OmegaConf's error about a key
    that is not there names such variables, so they are found one after another.
    """
    choosing_keys: set[str] = set()
    while True:
        try:
            with _variables_as_written(choosing_keys):
                return OmegaConf.to_container(merged, resolve=True)
        except OmegaConfBaseException as error:
            variables = set(VARIABLE.findall(str(error))) - choosing_keys
            if not variables:
                raise
            choosing_keys |= variables


@contextlib.contextmanager
def _variables_as_written(resolved_variables: Collection[str]) -> Iterator[None]:
    """Let `${oc.env:…}`, and `${oc.decode:…}` around it, resolve to themselves, except for `resolved_variables`.

    OmegaConf's resolvers belong to the whole process, so they are replaced, and put back at the end.
    """
    register = getattr(OmegaConf, "register_resolver", OmegaConf.register_new_resolver)

    def as_written(name: str) -> Callable[..., str | None]:
        """Make the resolver that stands for `oc.env` or `oc.decode`, and returns the reference itself."""

        def resolve(*arguments: Any) -> str | None:
            if name == "env" and arguments[0] in resolved_variables:
                return oc.env(*arguments)
            return f"${{oc.{name}:{','.join(map(_write_argument, arguments))}}}"

        return resolve

    def select(key: str, *default: Any, _parent_: Any) -> Any:
        """Resolve `${oc.select:…}`, but raise the error about a key that a variable chooses."""
        if "${oc." in key:
            raise InterpolationKeyError(f"oc.select: {key}")
        return oc.select(key, *default, _parent_=_parent_)

    try:
        for name in ("env", "decode"):
            register(f"oc.{name}", as_written(name), replace=True)
        register("oc.select", select, replace=True)
        yield
    finally:
        for name in ("env", "decode", "select"):
            register(f"oc.{name}", getattr(oc, name), replace=True)


def _write_argument(value: Any) -> str:
    """Write the argument of a resolver as OmegaConf's grammar reads it, in quotes where it must be."""
    if value is None:
        return "null"
    text = str(value)
    if text.startswith("${oc.") or re.fullmatch(r"[\w./:@%+-]*", text):
        return text
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
