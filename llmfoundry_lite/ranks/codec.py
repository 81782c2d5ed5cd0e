"""Typed values <-> JSON, so that every number that is not an array survives a save exactly.

It takes None, bool, str, int, float (nan and infinities too), bytes, list, tuple and dict with str keys. Nothing is
guessed: a numpy number or a tensor is refused with its place. The result is plain JSON where JSON is unambiguous;
`{"$tuple": [...]}`, `{"$float": "nan"}`, `{"$int": "..."}` (beyond 2^53, which other readers would round),
`{"$bytes": "<base64>"}` and `{"$dict": {...}}` (for a dict whose keys look like these) where it is not.
"""

import base64
import binascii
import dataclasses
import json
import math
from collections.abc import Sequence
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from llmfoundry_lite.errors import CheckpointError, DamagedCheckpointError

MAX_DEPTH = 64
EXACT_IN_A_DOUBLE = 2**53
WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a string",
    dict: "an object",
    list: "a list",
    NoneType: "null",
}
"""Type -> its name in errors."""


def encode_value(value: Any, where: str = "value", depth: int = 0) -> Any:
    """Turn a value into JSON. Raises CheckpointError naming the item that has no place in a manifest."""
    if depth > MAX_DEPTH:
        raise CheckpointError(f"{where}: nested deeper than {MAX_DEPTH}; keep checkpointed state flat")
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if abs(value) <= EXACT_IN_A_DOUBLE else {"$int": str(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if kind in (list, tuple):
        items = [encode_value(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
        return items if kind is list else {"$tuple": items}
    if kind is dict:
        for key in value:
            if type(key) is not str:
                raise CheckpointError(f"{where}: key {key!r} given, expected a str; convert it before saving")
        items = {key: encode_value(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
        return {"$dict": items} if any(key.startswith("$") for key in value) else items
    raise CheckpointError(
        f"{where}: {kind.__module__}.{kind.__qualname__} given, expected None, bool, int, float, str, bytes, list, "
        "tuple or dict; convert it before saving"
    )


def decode_value(value: Any, where: str = "value", depth: int = 0) -> Any:
    """Undo `encode_value`. Raises DamagedCheckpointError naming the item."""
    if depth > 2 * MAX_DEPTH + 2:
        raise DamagedCheckpointError(f"{where}: nested deeper than {MAX_DEPTH}")
    if isinstance(value, list):
        return [decode_value(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if not any(key.startswith("$") for key in value):
        return {key: decode_value(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    if len(value) == 1:
        ((tag, inside),) = value.items()
        if tag == "$tuple" and isinstance(inside, list):
            return tuple(decode_value(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(inside))
        if tag == "$dict" and isinstance(inside, dict):
            return {key: decode_value(item, f"{where}.{key}", depth + 1) for key, item in inside.items()}
        if tag == "$float" and inside in ("nan", "inf", "-inf"):
            return float(inside)
        try:
            if tag == "$int" and isinstance(inside, str):
                return int(inside)
            if tag == "$bytes" and isinstance(inside, str):
                return base64.b64decode(inside, validate=True)
        except (ValueError, binascii.Error):
            pass
    raise DamagedCheckpointError(f"{where}: {shorten(value)} is not a value this format knows")


def parse_json(raw: bytes, where: str) -> Any:
    """Parse strict JSON: no NaN, no key twice. Raises DamagedCheckpointError. Callers bound its size."""
    try:
        return json.loads(raw, object_pairs_hook=_no_key_twice, parse_constant=_no_constant)
    except RecursionError:
        raise DamagedCheckpointError(f"{where}: nested too deeply") from None
    except ValueError as error:
        raise DamagedCheckpointError(f"{where}: not valid JSON: {error}") from None


def write_json(value: Any) -> bytes:
    """Write compact JSON in ASCII, so that unpaired surrogates in a str survive."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


class Item:
    """A JSON value and its place in the manifest, for errors that name it."""

    def __init__(self, value: Any, where: str):
        self.value = value
        self.where = where

    def get(self, key: str) -> "Item":
        if not isinstance(self.value, dict) or key not in self.value:
            raise DamagedCheckpointError(f"{self.where}: no {key!r}")
        return Item(self.value[key], f"{self.where}: {key}")

    def besides(self, *known: str) -> dict[str, Any]:
        """Return fields other than `known`, which a later release has added."""
        return {key: value for key, value in self.object().items() if key not in known}

    def object(self) -> dict[str, Any]:
        return self.expect(isinstance(self.value, dict), "an object")

    def entries(self) -> list[tuple[str, "Item"]]:
        return [(key, Item(value, f"{self.where} {shorten(key)}")) for key, value in self.object().items()]

    def items(self) -> list["Item"]:
        self.expect(isinstance(self.value, list), "a list")
        return [Item(value, f"{self.where}[{i}]") for i, value in enumerate(self.value)]

    def fields(self, kind: Any, names: Sequence[str] = ()) -> dict[str, Any]:
        """Decode fields of a dataclass, each checked against its annotation: `names`, or by default those without a
        default and the others that are there."""
        found = {}
        for one in dataclasses.fields(kind):
            is_needed = one.name in names or (not names and one.default is one.default_factory is dataclasses.MISSING)
            if is_needed or (not names and one.name != "extra" and one.name in self.object()):
                given = self.get(one.name)
                value = decode_value(given.value, given.where)
                kinds: Any = get_args(one.type) if isinstance(one.type, UnionType) else [one.type]
                words = " or ".join(WORDS.get(get_origin(kind) or kind, "") for kind in kinds)
                found[one.name] = Item(value, given.where).expect(fits(value, one.type), words)
        return found

    def string(self) -> str:
        return self.expect(isinstance(self.value, str), "a string")

    def integer(self) -> int:
        return self.expect(type(self.value) is int and 0 <= self.value < 2**63, "a whole number")

    def integers(self) -> tuple[int, ...]:
        ok = isinstance(self.value, list) and all(type(n) is int and 0 <= n < 2**63 for n in self.value)
        return tuple(self.expect(ok, "a list of whole numbers"))

    def expect(self, ok: bool, what: str) -> Any:
        if not ok:
            raise DamagedCheckpointError(f"{self.where}: {shorten(self.value)} given, expected {what}")
        return self.value


def fits(value: Any, kind: Any) -> bool:
    """Return whether a decoded value is of this annotation. Whole numbers are neither negative nor bool."""
    if kind is Any:
        return True
    if isinstance(kind, UnionType):
        return any(fits(value, one) for one in get_args(kind))
    origin, inside = get_origin(kind) or kind, get_args(kind)
    if origin is int:
        return type(value) is int and 0 <= value < 2**63
    if origin is float:
        return type(value) in (int, float)
    if origin is dict:
        return isinstance(value, dict) and all(fits(one, inside[1]) for one in value.values())
    return isinstance(value, origin)


def shorten(value: Any, limit: int = 80) -> str:
    text = repr(value) if not isinstance(value, (dict, list, str)) else json.dumps(value)[: limit + 1]
    return text if len(text) <= limit else text[:limit] + "…"


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return result


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
