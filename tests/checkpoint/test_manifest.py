"""A manifest that decodes can be relied on; one that lies is refused with the item it lies about."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmfoundry_lite.checkpoint import manifest_json
from llmfoundry_lite.checkpoint.grid import Grid
from llmfoundry_lite.checkpoint.manifest import (
    FileRecord,
    LogPart,
    Manifest,
    Segment,
    TensorRecord,
    Timestamp,
)
from llmfoundry_lite.checkpoint.manifest_json import decode, encode
from llmfoundry_lite.errors import CheckpointError, DamagedCheckpointError


def file_record(name="shard-00000.safetensors", num_bytes=10_000):
    return FileRecord(name=name, num_bytes=num_bytes, block_bytes=4096, header_bytes=4096, digest="0" * 32)


LOG_PART = LogPart(name="log/e1-ba3.jsonl", num_bytes=10_000, block_bytes=4096, block_hashes="0" * 32 * 3)


def tensor_record(layout=Grid((2,), (0,), (1,)), shape=(4, 3)):  # noqa: B008
    return TensorRecord("F32", shape, layout)


def sound(**changes):
    return Manifest(
        **{
            "save_id": "e1-ba3-0123456789ab",
            "timestamp": Timestamp(batch=3, sample=24),
            "lease_epoch": 1,
            "segments": (
                Segment(first_batch=1, last_batch=3, vendor="nvidia", environment={"A": "b"}, compile_config={"c": 1}),
            ),
            "scalars": {"lr": 0.1, "order": (1, float("inf"))},
            "optimizer": {"class": "AdamW", "groups": [], "state": {}},
            "config": {"seed": 17},
            "fingerprints": {"model": "ab"},
            "aliases": {"model/head": "model/embed"},
            "tensors": {"model/embed": tensor_record()},
            "files": (file_record(), file_record("e1-ba3/shard-00001.safetensors")),
            "log": (LOG_PART,),
            **changes,
        }
    )


def unchecked(**changes):
    """Return JSON with false contents and a right checksum."""
    content = json.loads(encode(sound()))["manifest"] | changes
    inside = json.dumps(content).encode()
    return manifest_json._envelope_start(inside) + inside + b"}\n"


def test_a_manifest_comes_back_as_it_was():
    assert decode(encode(sound()), "m") == sound()


def test_it_is_json_that_other_tools_can_read():
    content = json.loads(encode(sound()))["manifest"]
    assert (content["version"], content["timestamp"]["batch"]) == (2, 3)


@pytest.mark.fault
@given(st.data())
def test_any_changed_byte_is_noticed(data):
    raw = bytearray(encode(sound()))
    position = data.draw(st.integers(0, len(raw) - 1))
    raw[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DamagedCheckpointError, match=r"^m: the checksum"):
        decode(bytes(raw), "m")


@pytest.mark.fault
@given(st.integers(0, 10_000))
def test_any_cut_is_noticed(length):
    raw = encode(sound())
    with pytest.raises(DamagedCheckpointError):
        decode(raw[: min(length, len(raw) - 1)], "m")


def log(**changes):
    return {"log": [{**manifest_json.encode_record(LOG_PART), **changes}]}


def named(name):
    return columns(names=[name, "b.safetensors"])


def tensor(**changes):
    return {"tensors": {"model/embed": {"dtype": "F32", "shape": [4, 3], "layout": 0, **changes}}}


def layout(**fields):
    return {"layouts": [fields]}


def columns(**changes):
    return {"files": {**json.loads(encode(sound()))["manifest"]["files"], **changes}}


LIES = {
    "fewer names than digests": (columns(names=["a.safetensors"]), "as many names as sizes"),
    "fewer sizes": (columns(num_bytes=[20_000]), "as many names as sizes"),
    "fewer headers": (columns(header_bytes=[4096]), "as many names as sizes"),
    "fewer digests": (columns(digests="0" * 32), "as many names as sizes"),
    "no header": (columns(header_bytes=[9, 4096]), "a header of 9 bytes"),
    "short digests": (columns(digests="0" * 63), "as many names as sizes"),
    "odd digests": (columns(digests="Z" * 64), "hexadecimal"),
    "a way out": (named("../a.safetensors"), "leads out"),
    "a name twice": (columns(names=["a.safetensors"] * 2), "listed twice"),
    "a header longer than its file": (columns(header_bytes=[4096, 9_990]), "a header of 9990 bytes"),
    "no such layout": (tensor(layout=1), "one of the 1 layouts"),
    "a file that is not there": (layout(chunks=[1], files=[0], strides=[1]), "file number 3"),
    "a file before the first": (layout(chunks=[2], files=[0], strides=[-1]), "file number -1"),
    "too few files": (layout(chunks=[1], files=[0, 1]), "2 files for 4 chunks"),
    "negative chunks": (layout(chunks=[-1], files=[0], strides=[0]), "whole number"),
    "cuts in disorder": (layout(chunks=[[2, 1]], files=[0], strides=[0]), "chunks"),
    "cuts outside": (layout(chunks=[[2, 4]], files=[0], strides=[0]), "reach out"),
    "more dimensions than there are": (layout(chunks=[1, 1, 1], files=[0], strides=[0, 0, 0]), "for shape"),
    "strides of another rank": (layout(chunks=[2], files=[0], strides=[1, 1]), "strides"),
    "cells beyond number": (
        {**tensor(shape=[2**40, 1]), **layout(chunks=[1], files=[0], strides=[0])},
        "chunks, cut in a way no run",
    ),
    "absolute path": (named("/etc/passwd.safetensors"), "leads out"),
    "parent path": (log(name="../../x.jsonl"), "leads out"),
    "backslash": (named("..\\x.safetensors"), "leads out"),
    "another kind of file": (named("weights.pkl"), "expected a .safetensors"),
    "negative size": (columns(num_bytes=[-1, 10_000]), "whole number"),
    "no room for a header": (columns(num_bytes=[20, 10_000]) | {"num_bytes": 10_020}, "a header of 4096 bytes in 20"),
    "a size that its hashes deny": (log(num_bytes=10**15), "block hashes for another size"),
    "unknown hash": (columns(algorithm="crc"), "hash algorithm"),
    "unknown hash of the log": (log(algorithm="crc"), "hash algorithm"),
    "tiny blocks": (columns(block_bytes=1), "blocks of 1"),
    "tiny blocks of the log": (log(block_bytes=0), "blocks of 0"),
    "unknown dtype": (tensor(dtype="object"), "unknown dtype"),
    "huge shape": (tensor(shape=[2**62, 2**62]), "cut in a way no run"),
    "float in a shape": (tensor(shape=[4.0, 3]), "list of whole numbers"),
    "bool as a number": ({"lease_epoch": True}, "whole number"),
    "alias of nothing": ({"aliases": {"model/head": "model/nothing"}}, "alias"),
    "wrong type": ({"tensors": []}, "expected an object"),
    "wrong scalars": ({"scalars": {"a": {"$code": 1}}}, "not a value this format knows"),
    "wrong segment": ({"segments": [{"first_batch": 1}]}, "no 'last_batch'"),
    "negative batch": ({"timestamp": {"epoch": 0, "batch": -1, "sample": 0, "token": 0}}, "whole number"),
    "another format": ({"format": "zip"}, "format"),
    "a version before the first": ({"version": 1}, "1 given, expected 2"),
    "another total": ({"num_bytes": 19_999}, "num_bytes is not the sum"),
    "more values than its files have": (
        {"layouts": [{"chunks": [], "files": [0]}], **tensor(shape=[2**62])},
        "bytes in files of 20,000",
    ),
}


HEADS = {
    "format": "zip",
    "version": 3,
    "save_id": "e1-ba3-0123456789az",
    "lease_epoch": "1",
    "num_bytes": 10**400,
    "written_at": 3,
}


@pytest.mark.fault
@pytest.mark.parametrize("name", HEADS)
def test_a_listing_believes_no_head_that_no_release_writes(name):
    assert manifest_json.read_head(encode(sound())) is not None
    content = json.loads(encode(sound()))["manifest"] | {name: HEADS[name]}
    lines = b",".join(b"\n" + json.dumps(key).encode() + b":" + json.dumps(content[key]).encode() for key in content)
    assert manifest_json.read_head(b"{" + lines + b"\n}") is None


@pytest.mark.fault
@pytest.mark.parametrize(("changes", "words"), LIES.values(), ids=LIES)
def test_lies_are_refused_by_name(changes, words):
    with pytest.raises(DamagedCheckpointError, match=f"^m.*({words})"):
        decode(unchecked(**changes), "m")


@pytest.mark.fault
@pytest.mark.parametrize("name", json.loads(encode(sound()))["manifest"])
def test_a_missing_item_is_named(name):
    content = json.loads(encode(sound()))["manifest"]
    del content[name]
    inside = json.dumps(content).encode()
    with pytest.raises(DamagedCheckpointError, match=f"m: no '{name}'"):
        decode(manifest_json._envelope_start(inside) + inside + b"}\n", "m")


def test_a_newer_format_is_not_damage():
    with pytest.raises(CheckpointError, match=r"written by a newer release \(format 99; this one") as caught:
        decode(unchecked(version=99), "m")
    assert not isinstance(caught.value, DamagedCheckpointError)


@pytest.mark.fault
def test_a_list_of_a_billion_is_refused_before_it_is_built():
    inside = b'{"format":[' + b"0," * 40_000_000 + b"0]}"
    with pytest.raises(DamagedCheckpointError, match="more than the 67,108,864"):
        decode(manifest_json._envelope_start(inside) + inside + b"}\n", "m")


@pytest.mark.fault
def test_deep_nesting_is_refused():
    inside = b'{"format":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}"
    with pytest.raises(DamagedCheckpointError, match="nested too deeply"):
        decode(manifest_json._envelope_start(inside) + inside + b"}\n", "m")


@pytest.mark.fault
def test_what_is_too_large_to_be_read_is_not_written(monkeypatch):
    raw = encode(sound())
    monkeypatch.setattr(manifest_json, "MAX_BYTES", 50)
    with pytest.raises(CheckpointError, match=r"more than the 50 that can be read back; save from fewer ranks") as said:
        encode(sound())
    assert not isinstance(said.value, DamagedCheckpointError)
    with pytest.raises(DamagedCheckpointError, match=r"more than the 50 a manifest may have"):
        decode(raw, "m")


@pytest.mark.fault
def test_what_would_not_be_read_is_not_written():
    with pytest.raises(CheckpointError, match="1 files for 2 chunks"):
        encode(sound(tensors={"model/embed": tensor_record(Grid((2,), (0,)))}))
    with pytest.raises(CheckpointError, match="scalars"):
        encode(sound(scalars={"x": {1, 2}}))
