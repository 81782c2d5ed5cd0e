"""A manifest that decodes can be relied on; one that lies is refused with the item it lies about."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmfoundry_lite.checkpoint import manifest as manifests
from llmfoundry_lite.checkpoint.layouts import Grid
from llmfoundry_lite.checkpoint.manifest import FileRecord, Manifest, Segment, TensorRecord, Timestamp, decode, encode
from llmfoundry_lite.errors import CheckpointError, DamagedCheckpointError


def file_record(name="shard-00000.safetensors", num_bytes=10_000):
    return FileRecord(name=name, num_bytes=num_bytes, block_bytes=4096, header_bytes=4096, digest="0" * 32)


def listed_file(name="shard-00000.safetensors", num_bytes=10_000):
    hashes = "0" * 32 * -(-num_bytes // 4096)
    return FileRecord(name=name, num_bytes=num_bytes, block_bytes=4096, block_hashes=hashes)


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
            "attachments": (listed_file("notes.txt"),),
            "log": (listed_file("log/e1-ba3.jsonl"),),
            **changes,
        }
    )


def unchecked(**changes):
    """The JSON a liar would write, checksum and all."""
    content = json.loads(encode(sound()))["manifest"]
    if changes.get("version") == 1:
        content |= {"files": FILES_1, "tensors": {"model/embed": TENSOR_1}}
    content.update(changes)
    inside = json.dumps(content).encode()
    return manifests._envelope(inside) + inside + b"}\n"


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


FIRST, SECOND = [0, 4096, 4120, [0, 0], [2, 3]], [1, 8, 32, [2, 0], [2, 3]]
TENSOR_1 = {"dtype": "F32", "shape": [4, 3], "slices": [FIRST, SECOND]}
FILES_1 = [
    manifests._plain(listed_file(name), manifests.LISTED_FILE)
    for name in ("shard-00000.safetensors", "e1-ba3/shard-00001.safetensors")
]


def liar(**changes):
    return {"version": 1, "tensors": {"model/embed": {**TENSOR_1, **changes}}}


def slices(*rows):
    return liar(slices=list(rows))


def files(**changes):
    return {"version": 1, "files": [{**FILES_1[0], **changes}, FILES_1[1]]}


def tensor(**changes):
    return {"tensors": {"model/embed": {"dtype": "F32", "shape": [4, 3], "layout": 0, **changes}}}


def layout(**fields):
    return {"layouts": [fields]}


def columns(**changes):
    return {"files": {**json.loads(encode(sound()))["manifest"]["files"], **changes}}


LIES = {
    "fewer names than digests": (columns(names=["a.safetensors"]), "as many names as sizes"),
    "short digests": (columns(digests="0" * 63), "as many names as sizes"),
    "odd digests": (columns(digests="Z" * 64), "not hexadecimal"),
    "a way out": (columns(names=["../a.safetensors", "b.safetensors"]), "leads out"),
    "a name twice": (columns(names=["a.safetensors"] * 2), "listed twice"),
    "a header longer than its file": (columns(header_bytes=[4096, 9_990]), "a header of 9990 bytes"),
    "no such layout": (tensor(layout=1), "one of the 1 layouts"),
    "a file that is not there": (layout(chunks=[1], files=[0], strides=[1]), "file number 3"),
    "a file before the first": (layout(chunks=[2], files=[0], strides=[-1]), "file number -1"),
    "too few files": (layout(chunks=[1], files=[0, 1]), "2 files for 4 slices"),
    "negative chunks": (layout(chunks=[-1], files=[0], strides=[0]), "whole number"),
    "cuts in disorder": (layout(chunks=[[2, 1]], files=[0], strides=[0]), "chunks"),
    "cuts outside": (layout(chunks=[[2, 4]], files=[0], strides=[0]), "reach out"),
    "more dimensions than there are": (layout(chunks=[1, 1, 1], files=[0], strides=[0, 0, 0]), "for shape"),
    "strides of another rank": (layout(chunks=[2], files=[0], strides=[1, 1]), "strides"),
    "cells beyond number": (
        {**tensor(shape=[2**40, 1]), **layout(chunks=[1], files=[0], strides=[0])},
        "slices, cut in a way no run",
    ),
    "absolute path": (files(name="/etc/passwd.safetensors"), "leads out"),
    "parent path": (files(name="../../x.safetensors"), "leads out"),
    "backslash": (files(name="..\\x.safetensors"), "leads out"),
    "another kind of file": (files(name="weights.pkl"), "expected a .safetensors"),
    "same file twice": (files(name="e1-ba3/shard-00001.safetensors"), "listed twice"),
    "negative size": (files(num_bytes=-1), "whole number"),
    "a size that its hashes deny": (files(num_bytes=10**15), "block hashes for another size"),
    "unknown hash": (files(algorithm="crc"), "hash algorithm"),
    "tiny blocks": (files(block_bytes=1), "blocks of 1"),
    "slice outside the tensor": (slices(FIRST, [1, 8, 32, [3, 0], [2, 3]]), "reaches out"),
    "slice in no file": (slices([7, 4096, 4120, [0, 0], [2, 3]], SECOND), "file number 7"),
    "slice of another rank": (slices([0, 4096, 4120, [0], [6]], SECOND), "slice at"),
    "empty slice": (slices(FIRST, [1, 8, 8, [2, 0], [0, 3]]), "reaches out"),
    "missing slice": (slices(FIRST), "6 of its 12 values"),
    "slice twice": (slices(FIRST, FIRST, SECOND), "overlap"),
    "overlap": (slices(FIRST, [1, 8, 32, [1, 0], [2, 3]]), "overlap"),
    "unknown dtype in format 2": (tensor(dtype="object"), "unknown dtype"),
    "huge shape": (liar(shape=[2**62, 2**62]), "values are there"),
    "float in a shape": (liar(shape=[4.0, 3]), "list of whole numbers"),
    "bool as a number": ({"lease_epoch": True}, "whole number"),
    "alias of nothing": ({"aliases": {"model/head": "model/nothing"}}, "alias"),
    "wrong type": ({"tensors": []}, "expected an object"),
    "wrong scalars": ({"scalars": {"a": {"$code": 1}}}, "not a value this format knows"),
    "wrong segment": ({"segments": [{"first_batch": 1}]}, "no 'last_batch'"),
    "negative batch": ({"timestamp": {"epoch": 0, "batch": -1, "sample": 0, "token": 0}}, "whole number"),
    "another format": ({"format": "zip"}, "format"),
    "a format before the first": ({"version": 0}, "1 or more"),
    "more values than its files have": (
        {"layouts": [{"chunks": [], "files": [0]}], **tensor(shape=[2**62])},
        "bytes in files of 20,000",
    ),
}


HEADS = {
    "save_id": "e1-ba3-0123456789az",
    "lease_epoch": "1",
    "num_bytes": 10**400,
    "written_at": 3,
}


@pytest.mark.fault
@pytest.mark.parametrize("name", HEADS)
def test_a_listing_believes_no_head_that_no_release_writes(name):
    assert manifests.read_head(encode(sound())) is not None
    content = json.loads(encode(sound()))["manifest"] | {name: HEADS[name]}
    lines = b",".join(b"\n" + json.dumps(key).encode() + b":" + json.dumps(content[key]).encode() for key in content)
    assert manifests.read_head(b"{" + lines + b"\n}") is None


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
        decode(manifests._envelope(inside) + inside + b"}\n", "m")


def test_slices_that_format_2_lists_are_read_as_a_grid():
    listed = [[0, [0, 0], [2, 3]], [1, [2, 0], [2, 3]]]
    found = decode(unchecked(**layout(boxes=listed)), "m").tensors["model/embed"]
    slices = found.overlapping((0, 0), found.shape)
    assert [[one.file, [*one.offset], [*one.shape]] for one in slices] == listed
    with pytest.raises(DamagedCheckpointError, match="a slice is missing"):
        decode(unchecked(**layout(boxes=listed[:1])), "m")


def test_a_newer_format_is_not_damage():
    with pytest.raises(CheckpointError, match=r"written by a newer release \(format 99; this one") as caught:
        decode(unchecked(version=99), "m")
    assert not isinstance(caught.value, DamagedCheckpointError)


@pytest.mark.fault
def test_a_list_of_a_billion_is_refused_before_it_is_built():
    inside = b'{"format":[' + b"0," * 81_000_000 + b"0]}"
    with pytest.raises(DamagedCheckpointError, match="more than the 80,000,000"):
        decode(manifests._envelope(inside) + inside + b"}\n", "m")


@pytest.mark.fault
def test_deep_nesting_is_refused():
    inside = b'{"format":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}"
    with pytest.raises(DamagedCheckpointError, match="nested too deeply"):
        decode(manifests._envelope(inside) + inside + b"}\n", "m")


@pytest.mark.fault
@pytest.mark.parametrize("limit", ["MAX_VALUES", "MAX_BYTES"])
def test_what_is_too_large_to_be_read_is_not_written(monkeypatch, limit):
    raw = encode(sound())
    monkeypatch.setattr(manifests, limit, 50)
    with pytest.raises(CheckpointError, match=r"more than the 50 that can be read back; save from fewer ranks") as said:
        encode(sound())
    assert not isinstance(said.value, DamagedCheckpointError)
    with pytest.raises(DamagedCheckpointError, match=r"more than the 50 a manifest may have"):
        decode(raw, "m")


@pytest.mark.fault
def test_what_would_not_be_read_is_not_written():
    with pytest.raises(CheckpointError, match="1 files for 2 slices"):
        encode(sound(tensors={"model/embed": tensor_record(Grid((2,), (0,)))}))
    with pytest.raises(CheckpointError, match="scalars"):
        encode(sound(scalars={"x": {1, 2}}))


@pytest.mark.parametrize(("scalars", "norm_type"), [({}, "rmsnorm"), ({"imported_from": {"kind": "x"}}, None)])
def test_a_model_that_an_earlier_release_recorded_is_the_model_that_it_trained(scalars, norm_type):
    """Its norms of q and k were the model's; those of weights from LLM Foundry never were."""
    recorded = {"model": {"norm_type": "rmsnorm", "norm_eps": 1e-6, "attn_config": {"qk_ln": True}}}
    manifest = sound(config=recorded, scalars=scalars)
    assert decode(encode(manifest), "m").config["model"]["attn_config"].get("norm_type") == norm_type
