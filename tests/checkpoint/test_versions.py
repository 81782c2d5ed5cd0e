"""The files of the present format stay readable, and what a later release has saved is left alone."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import xxhash

from llmfoundry_lite.checkpoint.full_tensors import load_full_tensors
from llmfoundry_lite.checkpoint.manifest import MANIFEST, VERSION, Manifest, Timestamp
from llmfoundry_lite.checkpoint.manifest_json import decode, encode
from llmfoundry_lite.checkpoint.restore import load
from llmfoundry_lite.checkpoint.retention import prune
from llmfoundry_lite.checkpoint.run_log import read_log
from llmfoundry_lite.checkpoint.shards import hash_buffers
from llmfoundry_lite.checkpoint.store import open_checkpoint
from llmfoundry_lite.checkpoint.verify import verify_checkpoint
from llmfoundry_lite.errors import CheckpointError, NewerFormatError
from tests.checkpoint.ranks import build, whole_state
from tests.checkpoint.saves import saved, write_draft

FIXTURES = sorted((Path(__file__).parent / "fixtures").glob("format-*/*-ranks"))
SCALARS = {"pair": (1, 2), "large": 2**60, "infinite": float("inf"), "raw": b"\x00\xff", "$odd": {"$x": None}}


def rewrite(folder: Path, change) -> None:
    """The manifest with another content and a right checksum."""
    content = json.loads((folder / MANIFEST).read_bytes())["manifest"]
    change(content)
    inside = json.dumps(content).encode()
    checksum = xxhash.xxh3_128_hexdigest(inside).encode()
    (folder / MANIFEST).write_bytes(b'{"checksum":"xxh3_128:%s","manifest":%s}\n' % (checksum, inside))


def test_there_are_files_of_the_present_format():
    assert [path.parent.name for path in FIXTURES] == 2 * [f"format-{VERSION}"]


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_save_that_was_written_before_is_restored_bit_for_bit(fixture):
    checkpoint = open_checkpoint(fixture / "ba3")
    verify_checkpoint(checkpoint)
    model, optimizer = build("plain", seed=9)
    manifest = load(fixture / "ba3", model, optimizer)
    digests = {
        name: f"{tensor.dtype} {list(tensor.shape)} "
        + hash_buffers([tensor.contiguous().reshape(-1).view(torch.uint8).numpy()]).hex()
        for name, tensor in whole_state(model, optimizer).items()
    }
    assert digests == json.loads((fixture / "expected.json").read_text())
    assert (manifest.lease_epoch, manifest.parent_save_id) == (1, "e1-ba2-000000000000")
    assert manifest.timestamp == Timestamp(epoch=1, batch=3, sample=24, token=168)
    assert manifest.scalars == SCALARS
    assert [segment.span for segment in manifest.segments] == ["1-2", "3-3"]
    assert read_log(checkpoint).content == b'{"batch": 1}\n{"batch": 2}\n{"batch": 3}\n'
    assert set(load_full_tensors(fixture / "ba3")) >= {"embed.weight", "head.weight", "count"}


def test_a_manifest_of_this_format_can_be_written_again():
    manifest = open_checkpoint(FIXTURES[-1] / "ba3").manifest
    assert decode(encode(manifest), "m") == manifest


# ---------------------------------------------------------------------------------------------------- the version rule


@pytest.fixture
def folder(tmp_path):
    """ba1 of this release, ba2 to be changed."""
    _store, _lease = saved(tmp_path, 1, 2)
    return tmp_path


@pytest.mark.fault
def test_a_checkpoint_of_a_newer_release_is_neither_damaged_nor_renamed_nor_passed_over(folder):
    rewrite(folder / "ba2", lambda content: content.update(version=VERSION + 1, files={"laid out": "otherwise"}))
    before = sorted(path.name for path in folder.iterdir())
    store, lease = saved(folder)
    text = rf"ba2/manifest.json: written by a newer release \(format {VERSION + 1}; this one reads up to {VERSION}\)"
    with pytest.raises(NewerFormatError, match=f"{text}: install a newer release"):
        store.newest_intact(quarantine=lease)
    with pytest.raises(CheckpointError, match=r"not published: .*newer release"):
        store.publish(write_draft(store, lease, 2), lease)
    assert prune(store, lease, keep_newest=1) == []
    assert sorted(path.name for path in folder.iterdir() if not path.name.startswith(".tmp")) == before


def test_a_manifest_of_a_newer_release_may_be_of_any_size(folder, monkeypatch):
    rewrite(folder / "ba2", lambda content: content.update(version=VERSION + 1, more=[0] * 1000))
    monkeypatch.setattr("llmfoundry_lite.checkpoint.manifest_json.MAX_BYTES", 2000)
    with pytest.raises(NewerFormatError):
        open_checkpoint(folder / "ba2")


@pytest.mark.fault
def test_fields_that_a_later_release_adds_are_kept_and_written_again(folder):
    added = {"colour": ["blue", {"$unknown": 1}]}

    def add(content):
        records = (content, content["timestamp"], *content["segments"], content["files"])
        for record in (*records, *content["log"], *content["layouts"], *content["tensors"].values()):
            record.update(added)

    shutil.copytree(FIXTURES[-1] / "ba3", folder / "ba3")
    rewrite(folder / "ba3", add)
    checkpoint = open_checkpoint(folder / "ba3")
    verify_checkpoint(checkpoint)
    again = decode(encode(checkpoint.manifest), "m")
    assert again == checkpoint.manifest
    tensors = again.tensors.values()
    records = (again, again.timestamp, *again.segments, *again.log, *tensors)
    assert all(record.extra == added for record in (*records, *(tensor.grid for tensor in tensors)))
    assert again.files_extra == added
    following = Manifest(save_id="e1-ba4-00", timestamp=again.timestamp, segments=again.segments)
    assert decode(encode(following), "m").segments[0].extra == added


def test_the_reader_in_the_format_s_description_reads_a_tensor(monkeypatch):
    text = (Path(__file__).parents[2] / "docs/checkpoint-format.md").read_text()
    code = text.rpartition("```python\n")[2].partition("```")[0]
    fixture = FIXTURES[-1]
    monkeypatch.chdir(fixture)
    found = {}
    exec(code.replace("ba200", "ba3").replace("model/w", "model/embed.weight"), found)
    expected = load_full_tensors(fixture / "ba3")["embed.weight"]
    assert found["whole"].tolist() == expected.tolist()
