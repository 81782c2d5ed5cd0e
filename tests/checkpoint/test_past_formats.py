"""What a past release has saved is restored bit for bit, and what a later one has saved is left alone."""

import json
import shutil
from pathlib import Path

import pytest
import xxhash

from llmfoundry_lite.checkpoint.full_tensors import load_full_tensors
from llmfoundry_lite.checkpoint.log_parts import read_log
from llmfoundry_lite.checkpoint.manifest import MANIFEST, VERSION, Manifest, decode, encode
from llmfoundry_lite.checkpoint.restore import load
from llmfoundry_lite.checkpoint.store import CheckpointStore, open_checkpoint
from llmfoundry_lite.checkpoint.verify import verify_checkpoint
from llmfoundry_lite.errors import CheckpointError, NewerFormatError
from tests.checkpoint.make_fixture import ABOUT, LOG, digests_of
from tests.checkpoint.ranks import build, whole_state
from tests.checkpoint.saves import names, saved, write_draft

FIXTURES = sorted((Path(__file__).parent / "fixtures").glob("format-*/*-ranks"))


def rewrite(folder: Path, change) -> None:
    """The manifest with another content and a right checksum."""
    content = json.loads((folder / MANIFEST).read_bytes())["manifest"]
    change(content)
    inside = json.dumps(content).encode()
    checksum = xxhash.xxh3_128_hexdigest(inside).encode()
    (folder / MANIFEST).write_bytes(b'{"checksum":"xxh3_128:%s","manifest":%s}\n' % (checksum, inside))


def test_there_are_files_of_every_format_up_to_the_present_one():
    assert {path.parent.name for path in FIXTURES} >= {f"format-{version}" for version in range(1, VERSION + 1)}


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_past_save_is_restored_bit_for_bit(fixture):
    checkpoint = open_checkpoint(fixture / "ba3")
    verify_checkpoint(checkpoint)
    model, optimizer = build("plain", seed=9)
    manifest = load(fixture / "ba3", model, optimizer)
    assert digests_of(whole_state(model, optimizer)) == json.loads((fixture / "expected.json").read_text())
    for name in ("timestamp", "run_name", "fingerprints", "config", "segments", "scalars"):
        assert getattr(manifest, name) == getattr(ABOUT, name), name
    assert manifest.parent_save_id == "e1-ba2-000000000000"
    assert manifest.lease_epoch == 1
    assert read_log(checkpoint).content == LOG
    assert set(load_full_tensors(fixture / "ba3")) >= {"embed.weight", "head.weight", "count"}


def test_a_manifest_of_this_format_can_be_written_again():
    manifest = open_checkpoint(FIXTURES[-1] / "ba3").manifest
    assert manifest.version == VERSION
    assert decode(encode(manifest), "m") == manifest


@pytest.mark.fault
def test_a_past_save_of_a_later_lease_is_newer_than_a_later_batch(tmp_path):
    fixture = next(path for path in FIXTURES if path.parent.name == "format-1")
    for epoch, batch in ((1, 5), (2, 3)):
        change = {"save_id": f"e{epoch}-ba{batch}-0123456789ab", "lease_epoch": epoch}
        stamp = {"epoch": 1, "batch": batch, "sample": 24, "token": 168}
        folder = shutil.copytree(fixture / "ba3", tmp_path / f"ba{batch}")
        rewrite(folder, lambda manifest, new=change | {"timestamp": stamp}: manifest.update(new))
    assert names(CheckpointStore(tmp_path)) == ["ba3", "ba5"]


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
    assert store.prune(lease, keep_newest=1) == []
    assert sorted(path.name for path in folder.iterdir() if not path.name.startswith(".tmp")) == before


def test_a_manifest_of_a_newer_release_may_be_of_any_size(folder, monkeypatch):
    rewrite(folder / "ba2", lambda content: content.update(version=VERSION + 1, more=[0] * 1000))
    monkeypatch.setattr("llmfoundry_lite.checkpoint.manifest.MAX_BYTES", 2000)
    with pytest.raises(NewerFormatError):
        open_checkpoint(folder / "ba2")


@pytest.mark.fault
def test_fields_that_a_later_release_adds_are_kept_and_written_again(folder):
    added = {"colour": ["blue", {"$unknown": 1}]}

    def add(content):
        records = (content, content["timestamp"], *content["segments"], *content["attachments"], content["files"])
        for record in (*records, *content["log"], *content["layouts"], *content["tensors"].values()):
            record.update(added)

    shutil.copytree(FIXTURES[-1] / "ba3", folder / "ba3")
    rewrite(folder / "ba3", add)
    checkpoint = open_checkpoint(folder / "ba3")
    verify_checkpoint(checkpoint)
    again = decode(encode(checkpoint.manifest), "m")
    assert again == checkpoint.manifest
    tensors = again.tensors.values()
    records = (again, again.timestamp, *again.segments, *again.attachments, *again.log, *tensors)
    assert all(record.extra == added for record in (*records, *(tensor.layout for tensor in tensors)))
    assert again.files_extra == added
    following = Manifest(save_id="e1-ba4-00", timestamp=again.timestamp, segments=again.segments)
    assert decode(encode(following), "m").segments[0].extra == added


def test_the_reader_in_the_format_s_description_reads_a_tensor(monkeypatch):
    text = (Path(__file__).parents[2] / "docs/checkpoint-format.md").read_text()
    code = text.rpartition("```python\n")[2].partition("```")[0]
    fixture = next(path for path in FIXTURES if path.parent.name == f"format-{VERSION}" and path.name == "2-ranks")
    monkeypatch.chdir(fixture)
    found = {}
    exec(code.replace("ba200", "ba3").replace("model/w", "model/embed.weight"), found)
    expected = load_full_tensors(fixture / "ba3")["embed.weight"]
    assert found["whole"].tolist() == expected.tolist()
