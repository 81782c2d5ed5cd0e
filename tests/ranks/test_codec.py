"""Every number that is not an array survives exactly, and nothing else is let in."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmfoundry_lite.errors import CheckpointError, DamagedCheckpointError
from llmfoundry_lite.ranks.codec import MAX_DEPTH, decode_value, encode_value, parse_json, write_json

leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.sampled_from(["$int", "$"]), inner)
    ),
    max_leaves=20,
)


def same(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return a == b


@given(values)
def test_every_value_comes_back_with_its_type(value):
    assert same(decode_value(parse_json(write_json(encode_value(value)), "m")), value)


@pytest.mark.parametrize(
    "value", [float("nan"), float("-inf"), -0.0, 2**53 + 1, -(2**200), (), {"$dict": (1,)}, "\ud800"]
)
def test_the_awkward_ones_come_back(value):
    assert same(decode_value(parse_json(write_json(encode_value(value)), "m")), value)


def test_what_is_nested_as_deep_as_can_be_written_can_be_read():
    value: Any = 1
    for _ in range(MAX_DEPTH):
        value = {"$": value} if isinstance(value, tuple) else (value,)
    assert same(decode_value(encode_value(value)), value)


@pytest.mark.parametrize("value", [np.float32(1), {1, 2}, {1: 2}, object(), 1j, np.int64(3)])
def test_what_json_cannot_hold_is_refused_with_its_place(value):
    with pytest.raises(CheckpointError, match=r"scalars\.scheduler\[1\]: .*convert it before saving"):
        encode_value({"scheduler": [0, value]}, "scalars")


@pytest.mark.fault
@pytest.mark.parametrize(
    "raw",
    [b"[NaN]", b"[1e", b'{"a":1,"a":2}', b"[" * 100_000, b"\xff", b"9" * 5000],
    ids=["nan", "torn", "twice", "deep", "not utf-8", "a huge number"],
)
def test_hostile_json_is_refused(raw):
    with pytest.raises(DamagedCheckpointError, match="the manifest"):
        parse_json(raw, "the manifest")


@pytest.mark.fault
@pytest.mark.parametrize("value", [{"$int": "x"}, {"$float": "1"}, {"$bytes": "*"}, {"$object": {}}, {"$tuple": 3}])
def test_unknown_tags_are_refused(value):
    with pytest.raises(DamagedCheckpointError, match="not a value this format knows"):
        decode_value(value)


@pytest.mark.fault
def test_nesting_is_bounded_both_ways():
    value = []
    for _ in range(200):
        value = [value]
    with pytest.raises(CheckpointError, match="nested deeper"):
        encode_value(value)
    with pytest.raises(DamagedCheckpointError, match="nested deeper"):
        decode_value(value)
