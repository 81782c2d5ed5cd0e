from pathlib import Path

import numpy as np
import pytest

from llmfoundry_lite.checkpoint import places
from llmfoundry_lite.checkpoint.places import LocalPlace
from llmfoundry_lite.checkpoint.shards import CHUNK_BYTES, write_shard


def test_the_disk_is_asked_to_begin_with_every_byte_before_the_fsync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(
        places, "SYNC_FILE_RANGE", lambda fd, offset, size, flags: asked.append((offset.value, size.value))
    )
    write_shard(LocalPlace(tmp_path), "shard", [np.zeros(2 * CHUNK_BYTES + 5, np.uint8)])
    assert sorted(asked) == [(0, CHUNK_BYTES), (CHUNK_BYTES, CHUNK_BYTES), (2 * CHUNK_BYTES, 5)]


def test_a_system_that_cannot_be_asked_writes_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "SYNC_FILE_RANGE", None)
    content = np.arange(100_000, dtype=np.uint8)
    write_shard(LocalPlace(tmp_path), "shard", [content])
    assert (tmp_path / "shard").read_bytes() == content.tobytes()
