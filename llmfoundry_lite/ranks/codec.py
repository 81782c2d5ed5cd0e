"""Typed values <-> JSON, so that every number that is not an array survives a save exactly.

`encode_value` and `decode_value` take None, bool, str, int, float (nan and infinities too), bytes, list, tuple and dict
with str keys. Nothing is guessed: a numpy number or a tensor is refused with its place. The result is plain JSON where
JSON is unambiguous. Where it is not, it is an object with a tag as its only key:

    {"$tuple": [...]}
    {"$float": "nan"}         nan and infinities
    {"$int": "..."}           beyond 2^53, which other readers would round
    {"$bytes": "<base64>"}
    {"$dict": {...}}          a dict with a key that begins with "$", like a tag

`parse_json` and `write_json` convert between JSON and bytes. `Item` reads the parts of a manifest, and names the place
of a value that is missing or has a wrong type.
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
"""Most containers around a value, so that reading a file with deep nesting does not exhaust Python's stack."""
EXACT_IN_A_DOUBLE = 2**53
"""Largest whole number up to which a 64-bit float represents every one."""
INTEGER_LIMIT = 2**63
"""Whole numbers in a manifest are below it, as they are read into 64-bit integers."""
TYPE_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a string",
    dict: "an object",
    list: "a list",
    NoneType: "null",
}
"""Type -> its name in errors."""


def encode_value(value: Any, path: str = "value", depth: int = 0) -> Any:
    """Turn a Python value into a JSON value from which `decode_value` restores it, types included.

    {"betas": (0.9, 0.95), "best": inf} becomes {"betas": {"$tuple": [0.9, 0.95]}, "best": {"$float": "inf"}}.

    path: the place of the value, for errors, such as `optimizer.betas[0]`.
    depth: number of containers that the value is in.

    Raises CheckpointError that names an item which is of another type, has a key that is not a str, or is in more than
    MAX_DEPTH containers.
    """
    if depth > MAX_DEPTH:
        raise CheckpointError(f"{path}: nested deeper than {MAX_DEPTH}; keep checkpointed state flat")

    # Scalars.
    value_type = type(value)  # not isinstance: an item of a subclass would come back as another type
    if value is None or value_type in (bool, str):
        return value
    if value_type is int:
        return value if abs(value) <= EXACT_IN_A_DOUBLE else {"$int": str(value)}
    if value_type is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if value_type is bytes:
        return {"$bytes": base64.b64encode(value).decode()}

    # Containers, whose items are encoded in the same way.
    if value_type in (list, tuple):
        items = [encode_value(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
        return items if value_type is list else {"$tuple": items}
    if value_type is dict:
        for key in value:
            if type(key) is not str:
                raise CheckpointError(f"{path}: key {key!r} given, expected a str; convert it before saving")
        items = {key: encode_value(item, f"{path}.{key}", depth + 1) for key, item in value.items()}
        looks_like_tag = any(key.startswith("$") for key in value)
        return {"$dict": items} if looks_like_tag else items
    raise CheckpointError(
        f"{path}: {value_type.__module__}.{value_type.__qualname__} given, expected None, bool, int, float, str, "
        "bytes, list, tuple or dict; convert it before saving"
    )


def decode_value(value: Any, path: str = "value", depth: int = 0) -> Any:
    """Restore the Python value that `encode_value` has turned into this JSON value.

    [1, {"$tuple": [0.9, {"$float": "inf"}]}] becomes [1, (0.9, inf)].

    path: the place of the value, for errors, such as `optimizer.betas[0]`.
    depth: number of JSON containers that the value is in. `encode_value` makes up to two for each container of Python.

    Raises DamagedCheckpointError that names an item which `encode_value` does not write, such as an unknown tag.
    """
    if depth > 2 * MAX_DEPTH + 2:
        raise DamagedCheckpointError(f"{path}: nested deeper than {MAX_DEPTH}")

    # Plain JSON.
    if isinstance(value, list):
        return [decode_value(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    is_tagged = any(key.startswith("$") for key in value)
    if not is_tagged:
        return {key: decode_value(item, f"{path}.{key}", depth + 1) for key, item in value.items()}

    # An object with a tag as its only key. Keys in a `$dict` may look like tags, but are not.
    if len(value) == 1:
        ((tag, content),) = value.items()
        if tag == "$tuple" and isinstance(content, list):
            return tuple(decode_value(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(content))
        if tag == "$dict" and isinstance(content, dict):
            return {key: decode_value(item, f"{path}.{key}", depth + 1) for key, item in content.items()}
        if tag == "$float" and content in ("nan", "inf", "-inf"):
            return float(content)
        try:
            if tag == "$int" and isinstance(content, str):
                return int(content)
            if tag == "$bytes" and isinstance(content, str):
                return base64.b64decode(content, validate=True)
        except (ValueError, binascii.Error):
            pass  # refused below, as an unknown tag is
    raise DamagedCheckpointError(f"{path}: {shorten(value)} is not a value this format knows")


def parse_json(raw: bytes, path: str) -> Any:
    """Parse strict JSON: NaN and infinities are refused, and objects with the same key twice.

    Raises DamagedCheckpointError, which begins with `path`. The caller limits the size of `raw`.
    """
    try:
        return json.loads(raw, object_pairs_hook=_build_object, parse_constant=_refuse_constant)
    except RecursionError:
        raise DamagedCheckpointError(f"{path}: nested too deeply") from None
    except ValueError as error:
        raise DamagedCheckpointError(f"{path}: not valid JSON: {error}") from None


def write_json(value: Any) -> bytes:
    """Write compact JSON in ASCII. Non-ASCII text is escaped, so that unpaired surrogates in a str survive.

    Raises ValueError for NaN and infinities.
    """
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


class Item:
    """A JSON value of a manifest together with its path in it, so that an error can name the place.

    Methods that return a part of the value, or the value as a certain type, raise DamagedCheckpointError if there is no
    such part, or if the value is of another type:

    >>> manifest = Item({"files": [{"bytes": "12"}]}, "manifest.json")
    >>> manifest.get("files").items()[0].get("bytes").integer()
    DamagedCheckpointError: manifest.json: files[0]: bytes: "12" given, expected a whole number
    """

    def __init__(self, value: Any, path: str):
        self.value = value
        self.path = path

    def get(self, key: str) -> "Item":
        """Return the item under a key of this object."""
        if not isinstance(self.value, dict) or key not in self.value:
            raise DamagedCheckpointError(f"{self.path}: no {key!r}")
        return Item(self.value[key], f"{self.path}: {key}")

    def besides(self, *known: str) -> dict[str, Any]:
        """Return the fields of this object besides the `known` ones: a later release has added them."""
        return {key: value for key, value in self.object().items() if key not in known}

    def object(self) -> dict[str, Any]:
        """Return the value as a JSON object."""
        return self.expect(isinstance(self.value, dict), "an object")

    def entries(self) -> list[tuple[str, "Item"]]:
        """Return the keys of this object with their items."""
        return [(key, Item(value, f"{self.path} {shorten(key)}")) for key, value in self.object().items()]

    def items(self) -> list["Item"]:
        """Return the elements of this list."""
        self.expect(isinstance(self.value, list), "a list")
        return [Item(value, f"{self.path}[{i}]") for i, value in enumerate(self.value)]

    def fields(self, record_type: Any, names: Sequence[str] = ()) -> dict[str, Any]:
        """Decode fields of a dataclass from this object, and check each against its annotation.

        record_type: the dataclass.
        names: the fields to decode, which the object must have. Without them, the object must have every field that has
            no default, and others are decoded if they are there, except `extra`, which collects unknown fields.

        Returns a dictionary from a field's name to its value, from which the caller builds the record.
        """
        decoded = {}
        for field in dataclasses.fields(record_type):
            if names:
                is_decoded = field.name in names
            else:
                is_required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
                is_decoded = is_required or (field.name != "extra" and field.name in self.object())
            if is_decoded:
                item = self.get(field.name)
                value = decode_value(item.value, item.path)
                decoded[field.name] = Item(value, item.path).expect(fits(value, field.type), _describe_type(field.type))
        return decoded

    def string(self) -> str:
        """Return the value as a string."""
        return self.expect(isinstance(self.value, str), "a string")

    def integer(self) -> int:
        """Return the value as a whole number from 0 to 2**63 - 1."""
        return self.expect(_is_whole_number(self.value), "a whole number")

    def integers(self) -> tuple[int, ...]:
        """Return the value, a list of whole numbers from 0 to 2**63 - 1, as a tuple."""
        is_valid = isinstance(self.value, list) and all(_is_whole_number(number) for number in self.value)
        return tuple(self.expect(is_valid, "a list of whole numbers"))

    def expect(self, is_valid: bool, expected: str) -> Any:
        """Return the value if it `is_valid`. Otherwise raise DamagedCheckpointError, which says what was `expected`."""
        if not is_valid:
            raise DamagedCheckpointError(f"{self.path}: {shorten(self.value)} given, expected {expected}")
        return self.value


def fits(value: Any, annotation: Any) -> bool:
    """Return whether a decoded value is of the type of an annotation, such as `int | None` or `dict[str, float]`.

    `int` takes whole numbers from 0 to 2**63 - 1, and no bool; `float` takes int too. Values of a dict are checked,
    elements of other containers are not: {"a": 1} fits `dict[str, float]`, {"a": "1"} does not, and ["a"] fits
    `list[int]`.
    """
    if annotation is Any:
        return True
    if isinstance(annotation, UnionType):
        return any(fits(value, member) for member in get_args(annotation))
    plain_type = get_origin(annotation) or annotation
    if plain_type is int:
        return _is_whole_number(value)
    if plain_type is float:
        return type(value) in (int, float)
    if plain_type is dict:
        _, value_annotation = get_args(annotation)
        return isinstance(value, dict) and all(fits(item, value_annotation) for item in value.values())
    return isinstance(value, plain_type)


def _describe_type(annotation: Any) -> str:
    """Return the words for an annotation's type in an error, such as `a whole number or null`."""
    members = get_args(annotation) if isinstance(annotation, UnionType) else [annotation]
    return " or ".join(TYPE_NAMES.get(get_origin(member) or member, "") for member in members)


def _is_whole_number(value: Any) -> bool:
    """Return whether a value is an int, and no bool, from 0 to 2**63 - 1."""
    return type(value) is int and 0 <= value < INTEGER_LIMIT


def shorten(value: Any, limit: int = 80) -> str:
    """Return a value as text for an error: its first `limit` characters, and an ellipsis if it is longer.

    Strings, lists and objects are written as JSON, other values as in Python.
    """
    is_json = isinstance(value, (dict, list, str))
    text = json.dumps(value)[: limit + 1] if is_json else repr(value)
    return text if len(text) <= limit else text[:limit] + "…"


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object from its keys and values, as a hook of `json.loads`. Raises ValueError if a key occurs twice."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return result


def _refuse_constant(name: str) -> None:
    """Raise ValueError for NaN, Infinity or -Infinity, as a hook of `json.loads`: they are not JSON."""
    raise ValueError(f"{name} is not JSON")
