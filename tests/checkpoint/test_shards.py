"""Bytes go to disk and come back hashed; whatever goes wrong on the way is heard of."""

import errno
import json
import os
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from llmfoundry_lite.checkpoint import local_folder, shards
from llmfoundry_lite.checkpoint.grid import Chunk, Grid
from llmfoundry_lite.checkpoint.local_folder import LocalFolder
from llmfoundry_lite.checkpoint.manifest import FileRecord, TensorRecord
from llmfoundry_lite.checkpoint.open_folder import open_folder
from llmfoundry_lite.checkpoint.shards import (
    HASHES,
    ReadRequest,
    Shard,
    build_header,
    file_order,
    open_shard,
    verify_file,
    write_shard,
)
from llmfoundry_lite.errors import DamagedCheckpointError, IncompleteCheckpointError
from tests.checkpoint.mounts import mounted
from tests.checkpoint.saves import flip

BLOCK = 4096


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(shards, "TRANSFER_BYTES", 3 * BLOCK)


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    sizes=st.lists(st.integers(0, 9_000), min_size=1, max_size=12),
    num_threads=st.integers(1, 3),
    remote=st.booleans(),
)
def test_any_ranges_come_back_however_bytes_are_cut(tmp_path_factory, data, sizes, num_threads, remote):
    chunk, shards.TRANSFER_BYTES = shards.TRANSFER_BYTES, 2 * BLOCK
    try:
        folder = open_folder("memory://shards") if remote else LocalFolder(tmp_path_factory.mktemp("shards"))
        pieces = [np.random.default_rng(i).integers(0, 256, n, np.uint8) for i, n in enumerate(sizes)]
        whole = np.concatenate(pieces)
        record = write(folder, "s", pieces, num_threads=num_threads)
        cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)), max_size=12)) | {0, len(whole)})
        ranges = [pair for pair in pairwise(cuts) if data.draw(st.booleans())]
        start = record.header_bytes
        requests = [
            ReadRequest(start + begin, start + end, np.zeros(end - begin, np.uint8), "t") for begin, end in ranges
        ]
        with open_shard(folder, record) as shard:
            shard.read(requests, num_threads=num_threads)
        for want in requests:
            assert np.array_equal(want.target, whole[want.begin - start : want.end - start])
        verify_file(folder, record)
    finally:
        shards.TRANSFER_BYTES = chunk


def write(folder, name, pieces, **options):
    entries = [Chunk(f"t{i:02}", "U8", (0,), (len(piece),)) for i, piece in enumerate(pieces)]
    header = build_header({entry.key: entry for entry in entries}, {}, block_bytes=BLOCK)
    return write_shard(folder, name, header, pieces, block_bytes=BLOCK, **options)


def write_one(folder, num_bytes=40_000, **options):
    content = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
    return content, write(LocalFolder(folder), "s", [content], **options)


@pytest.mark.fault
def test_only_the_blocks_that_are_read_are_verified(tmp_path):
    content, record = write_one(tmp_path)
    flip(tmp_path / "s", 5 * BLOCK + 1)
    requests = [ReadRequest(BLOCK, 5 * BLOCK, np.zeros(4 * BLOCK, np.uint8), "a")]
    with open_shard(LocalFolder(tmp_path), record) as shard:
        shard.read(requests)
        assert np.array_equal(requests[0].target, content[: 4 * BLOCK])
        requests = [ReadRequest(5 * BLOCK + 9, 5 * BLOCK + 10, np.zeros(1, np.uint8), "model/w")]
        text = r"s: bytes 20,480 to 24,576 are not what was written \(in model/w\)"
        with pytest.raises(DamagedCheckpointError, match=text):
            shard.read(requests)


@pytest.mark.fault
def test_a_second_look_at_damage_goes_past_the_cache(tmp_path, monkeypatch):
    _, record = write_one(tmp_path)
    flip(tmp_path / "s", 5 * BLOCK + 1)
    looks, source = [], LocalFolder.source

    def look(folder, name, *, bypass_cache=False):
        looks.append(bypass_cache)
        return source(folder, name, bypass_cache=bypass_cache)

    monkeypatch.setattr(LocalFolder, "source", look)
    with pytest.raises(DamagedCheckpointError):
        verify_file(LocalFolder(tmp_path), record)
    assert looks == [False, True]


@pytest.mark.fault
@pytest.mark.parametrize("position", [9, -1], ids=["header", "hashes"])
def test_a_header_or_a_hash_that_has_changed_is_not_believed(tmp_path, position):
    _, record = write_one(tmp_path)
    flip(tmp_path / "s", position)
    with (
        pytest.raises(DamagedCheckpointError, match="s: its header or its hashes are not what was written"),
        open_shard(LocalFolder(tmp_path), record),
    ):
        pass


@pytest.mark.fault
@pytest.mark.parametrize(
    ("key", "offsets", "hashed_bytes"),
    [("w@0", offsets, 1 << 20) for offsets in ("[0, 1e999]", "[0, -1]", "[0]", '["a", 4]', "[4, 8]")]
    + [(key, "[0, 4]", 1 << 20) for key in ("w", "w@00", "w@x")]
    + [("w@0", "[0, 4]", 16)],
)
def test_a_header_that_no_shard_has_is_damage(key, offsets, hashed_bytes):
    def parse(key, offsets, hashed_bytes):
        text = b'{"%s":{"dtype":"F32","shape":[1],"data_offsets":%s}}' % (key.encode(), offsets.encode())
        shard: Any = SimpleNamespace(
            damage_error=DamagedCheckpointError, file=SimpleNamespace(hashed_bytes=hashed_bytes)
        )
        return Shard.parse_header(shard, len(text).to_bytes(8, "little") + text)

    assert [*parse("w@0", "[0, 4]", 1 << 20)] == [Chunk("w", "F32", (0,), (1,))]
    with pytest.raises(DamagedCheckpointError, match="not that of a safetensors file"):
        parse(key, offsets, hashed_bytes)


def test_the_last_tensor_has_the_hashes_of_all_blocks_before_it(tmp_path):
    _, record = write_one(tmp_path, num_bytes=2 * BLOCK + 7)
    raw = (tmp_path / "s").read_bytes()
    hashes = load_file(tmp_path / "s")[HASHES].tobytes()
    before = raw[: -len(hashes)]
    assert raw.endswith(hashes)
    blocks = [before[i : i + BLOCK] for i in range(0, len(before), BLOCK)]
    assert hashes == b"".join(xxhash.xxh3_128_digest(block) for block in blocks)
    assert record.digest == xxhash.xxh3_128_hexdigest(raw[: record.header_bytes] + hashes)
    assert (record.hashed_bytes, record.num_blocks) == (len(before), len(blocks))


@given(st.integers(1, 2_000_000), st.integers(1, 2_000))
def test_how_much_is_hashed_follows_from_the_size_of_the_file(hashed_bytes, block_bytes):
    num_blocks = -(-hashed_bytes // block_bytes)
    sizes = {"num_bytes": hashed_bytes + 16 * num_blocks, "block_bytes": block_bytes, "header_bytes": 0}
    record = FileRecord(name="s", digest="x", **sizes)
    assert (record.hashed_bytes, record.num_blocks) == (hashed_bytes, num_blocks)


@pytest.mark.fault
def test_a_file_cut_short_or_gone_is_named(tmp_path):
    _, record = write_one(tmp_path)
    os.truncate(tmp_path / "s", 39_999)
    with pytest.raises(DamagedCheckpointError, match="has 39,999 bytes, expected "):
        verify_file(LocalFolder(tmp_path), record)
    (tmp_path / "s").unlink()
    with pytest.raises(IncompleteCheckpointError, match="s: missing"):
        verify_file(LocalFolder(tmp_path), record)


@pytest.mark.fault
def test_an_exception_in_a_writer_thread_is_raised(tmp_path, small_chunks, monkeypatch):
    def fail_later(descriptor, pieces, offset):
        if offset:
            raise OSError(errno.EIO, "Input/output error")
        return os.pwritev(descriptor, pieces, offset)

    monkeypatch.setattr(local_folder, "WRITE", fail_later)
    with pytest.raises(OSError, match="Input/output error"):
        write_one(tmp_path, num_bytes=100 * BLOCK, num_threads=3)


@pytest.mark.fault
def test_short_writes_are_completed(tmp_path, small_chunks, monkeypatch):
    def write_a_little(descriptor, pieces, offset):
        return os.pwrite(descriptor, pieces[0][:1000], offset)

    monkeypatch.setattr(local_folder, "WRITE", write_a_little)
    content, _ = write_one(tmp_path, num_threads=2)
    assert load_file(tmp_path / "s")["t00@0"].tobytes() == content.tobytes()


@pytest.mark.fault
def test_a_disk_that_takes_nothing_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(local_folder, "WRITE", lambda descriptor, pieces, offset: 0)
    with pytest.raises(OSError, match="took no more bytes"):
        write_one(tmp_path)


@pytest.mark.fault
def test_a_failing_sync_is_an_error(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        write_one(tmp_path)


@pytest.mark.fault
def test_a_full_disk_is_an_error(tmp_path, small_chunks):
    with mounted(tmp_path / "disk", "256k") as disk:
        with pytest.raises(OSError, match="No space left") as caught:
            write_one(disk.path, num_bytes=400_000, num_threads=3)
        assert caught.value.errno == errno.ENOSPC


def test_files_are_plain_safetensors_that_can_be_mapped(tmp_path):
    arrays = {"b": np.arange(7, dtype=np.uint8), "a": np.arange(6.0).reshape(2, 3), "c": np.array(3.5, np.float32)}
    names = {"b": "U8", "a": "F64", "c": "F32"}
    entries = file_order({k: TensorRecord(names[k], v.shape, Grid((), (0,))) for k, v in arrays.items()})
    header = build_header(entries, {"save_id": "x"})
    (tmp_path / "s.safetensors").write_bytes(header + b"".join(arrays[key].tobytes() for key in entries))
    loaded = load_file(tmp_path / "s.safetensors")
    assert all(np.array_equal(loaded[key], arrays[key]) for key in arrays)
    assert len(header) % 4096 == 0
    begins = {key: entry["data_offsets"][0] for key, entry in json.loads(header[8:]).items() if key in arrays}
    assert all(begins[key] % arrays[key].itemsize == 0 for key in arrays)
