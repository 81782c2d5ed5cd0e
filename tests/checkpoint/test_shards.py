"""Bytes go to disk and come back hashed; whatever goes wrong on the way is heard of."""

import errno
import os
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from llmfoundry_lite.checkpoint import places, shards
from llmfoundry_lite.checkpoint.places import LocalPlace, open_place
from llmfoundry_lite.checkpoint.shards import (
    Entry,
    Want,
    build_header,
    file_order,
    read_wanted,
    verify_file,
    write_shard,
)
from llmfoundry_lite.errors import DamagedCheckpointError, IncompleteCheckpointError
from tests.checkpoint.mounts import mounted
from tests.checkpoint.saves import flip

BLOCK = 4096


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(shards, "CHUNK_BYTES", 3 * BLOCK)


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    sizes=st.lists(st.integers(0, 9_000), min_size=1, max_size=12),
    num_threads=st.integers(1, 3),
    verify=st.booleans(),
    remote=st.booleans(),
)
def test_any_ranges_come_back_however_bytes_are_cut(tmp_path_factory, data, sizes, num_threads, verify, remote):
    chunk, shards.CHUNK_BYTES = shards.CHUNK_BYTES, 2 * BLOCK
    try:
        place = open_place("memory://shards") if remote else LocalPlace(tmp_path_factory.mktemp("shards"))
        pieces = [np.random.default_rng(i).integers(0, 256, n, np.uint8) for i, n in enumerate(sizes)]
        whole = np.concatenate(pieces)
        record = write_shard(place, "s", pieces, num_threads=num_threads, block_bytes=BLOCK)
        cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)), max_size=12)) | {0, len(whole)})
        ranges = [pair for pair in pairwise(cuts) if data.draw(st.booleans())]
        wants = [Want(begin, end, np.zeros(end - begin, np.uint8), "t") for begin, end in ranges]
        read_wanted(place, record, wants, verify=verify, num_threads=num_threads)
        for want in wants:
            assert np.array_equal(want.target, whole[want.begin : want.end])
        verify_file(place, record)
    finally:
        shards.CHUNK_BYTES = chunk


def write(folder, num_bytes=40_000, **options):
    content = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
    return content, write_shard(LocalPlace(folder), "s", [content], block_bytes=BLOCK, **options)


@pytest.mark.fault
def test_only_the_blocks_that_are_read_are_verified(tmp_path):
    content, record = write(tmp_path)
    flip(tmp_path / "s", 5 * BLOCK + 1)
    wants = [Want(0, 5 * BLOCK, np.zeros(5 * BLOCK, np.uint8), "a")]
    read_wanted(LocalPlace(tmp_path), record, wants)
    assert np.array_equal(wants[0].target, content[: 5 * BLOCK])
    wants = [Want(5 * BLOCK + 9, 5 * BLOCK + 10, np.zeros(1, np.uint8), "model/w")]
    with pytest.raises(
        DamagedCheckpointError, match=r"s: bytes 20,480 to 24,576 are not what was written \(in model/w\)"
    ):
        read_wanted(LocalPlace(tmp_path), record, wants)


@pytest.mark.fault
def test_a_file_cut_short_or_gone_is_named(tmp_path):
    _, record = write(tmp_path)
    os.truncate(tmp_path / "s", 39_999)
    with pytest.raises(DamagedCheckpointError, match="39,999 bytes, written were 40,000"):
        verify_file(LocalPlace(tmp_path), record)
    (tmp_path / "s").unlink()
    with pytest.raises(IncompleteCheckpointError, match="s: missing"):
        verify_file(LocalPlace(tmp_path), record)


@pytest.mark.fault
def test_an_exception_in_a_writer_thread_is_raised(tmp_path, small_chunks, monkeypatch):
    calls = []

    def fail_later(descriptor, pieces, offset):
        calls.append(offset)
        if offset:
            raise OSError(errno.EIO, "Input/output error")
        return os.pwritev(descriptor, pieces, offset)

    monkeypatch.setattr(places, "WRITE", fail_later)
    with pytest.raises(OSError, match="Input/output error"):
        write(tmp_path, num_bytes=100 * BLOCK, num_threads=3)
    assert len(calls) < 33, "the others stop too"


@pytest.mark.fault
def test_short_writes_are_completed(tmp_path, small_chunks, monkeypatch):
    def write_a_little(descriptor, pieces, offset):
        return os.pwrite(descriptor, pieces[0][:1000], offset)

    monkeypatch.setattr(places, "WRITE", write_a_little)
    content, _ = write(tmp_path, num_threads=2)
    assert (tmp_path / "s").read_bytes() == content.tobytes()


@pytest.mark.fault
def test_a_disk_that_takes_nothing_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(places, "WRITE", lambda descriptor, pieces, offset: 0)
    with pytest.raises(EOFError, match="took no more bytes"):
        write(tmp_path)


@pytest.mark.fault
def test_a_failing_sync_is_an_error(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        write(tmp_path)


@pytest.mark.fault
def test_a_full_disk_is_an_error(tmp_path, small_chunks):
    with mounted(tmp_path / "disk", "256k") as disk:
        with pytest.raises(OSError, match="No space left") as caught:
            write(disk.path, num_bytes=400_000, num_threads=3)
        assert caught.value.errno == errno.ENOSPC


def test_files_are_plain_safetensors_that_can_be_mapped(tmp_path):
    arrays = {"b": np.arange(7, dtype=np.uint8), "a": np.arange(6.0).reshape(2, 3), "c": np.array(3.5, np.float32)}
    names = {"b": "U8", "a": "F64", "c": "F32"}
    entries = file_order(Entry(k, names[k], v.shape, v.nbytes) for k, v in arrays.items())
    header, ranges = build_header(entries, {"save_id": "x"})
    pieces = [np.frombuffer(header, np.uint8), *(arrays[e.key].reshape(-1).view(np.uint8) for e in entries)]
    write_shard(LocalPlace(tmp_path), "s.safetensors", pieces)
    loaded = load_file(tmp_path / "s.safetensors")
    assert all(np.array_equal(loaded[key], arrays[key]) for key in arrays)
    assert len(header) % 4096 == 0
    assert all(begin % arrays[entry.key].itemsize == 0 for entry, (begin, _) in zip(entries, ranges, strict=True))
