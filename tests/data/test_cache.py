"""The limit of the cache: which files it counts. What a read says that has to wait."""

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmfoundry_lite.data import cache as module
from llmfoundry_lite.data.cache import ABSENT, PRESENT, ShardCache


def test_packed_shards_count_where_they_are_kept_and_a_folder_without_a_remote_never():
    rows = {"raw_bytes": np.array([5, 6]), "zip_bytes": np.array([2, 3])}
    kinds = [(True, "s3://b"), (False, "s3://b"), (True, None)]
    cache: Any = ShardCache.__new__(ShardCache)
    cache.folders = [SimpleNamespace(stream=SimpleNamespace(keep_zip=keep), remote=remote) for keep, remote in kinds]
    cache.table = SimpleNamespace(rows_of_stream=lambda number: rows)
    assert cache._bytes_in_cache.tolist() == [7, 9, 5, 6, 0, 0]


@pytest.mark.parametrize("is_late", [True, False])
def test_a_read_says_which_shard_it_waits_for_and_a_quick_one_says_nothing(monkeypatch, is_late):
    said, has_spoken = [], threading.Event()
    monkeypatch.setattr(module, "WAIT_MESSAGE_SECONDS", 0.01 if is_late else 60.0)
    monkeypatch.setattr(module, "print", lambda text, flush: (said.append(text), has_spoken.set()), raising=False)
    cache: Any = ShardCache.__new__(ShardCache)
    cache.table = SimpleNamespace(name=lambda shard: "shard.00003.mds")
    cache._folder = lambda shard: SimpleNamespace(remote="s3://user:secret-word@bucket/data", path="/data")
    cache._state = {0: ABSENT}
    cache._reader = lambda shard: {7: {"tokens": 1}}

    def arrive(shard):
        assert not is_late or has_spoken.wait(60)
        cache._state[shard] = PRESENT

    cache.ensure_present = arrive
    assert cache.read(0, 7) == {"tokens": 1}
    expected = ["waiting for s3://user:***@bucket/data: shard.00003.mds is not here after 0 s"] if is_late else []
    assert said == expected


def test_a_read_that_waits_on_says_so_again_and_slow_reads_do_not_fill_the_log(monkeypatch):
    said, has_spoken = [], threading.Event()
    monkeypatch.setattr(module, "WAIT_MESSAGE_SECONDS", 0.05)
    monkeypatch.setattr(module, "MAX_WAIT_MESSAGE_SECONDS", 60.0)

    def note(text, flush):
        said.append(text)
        if len(said) == 3:
            has_spoken.set()

    monkeypatch.setattr(module, "print", note, raising=False)
    cache: Any = ShardCache.__new__(ShardCache)
    cache.table = SimpleNamespace(name=lambda shard: f"shard.{shard:05}.mds")
    cache._folder = lambda shard: SimpleNamespace(remote="s3://bucket/data", path="/data")
    with cache.reporting_a_long_wait(3):
        assert has_spoken.wait(60)
    assert said[2].startswith("waiting for s3://bucket/data: shard.00003.mds is not here after ")

    monkeypatch.setattr(module, "WAIT_MESSAGE_SECONDS", 10.0)
    monkeypatch.setattr(module, "monotonic", lambda: 1e9)
    cache._next_wait_message_at, num_before, waits = 1e9 + 40.0, len(said), []
    has_ended = SimpleNamespace(wait=lambda seconds: waits.append(seconds) or len(waits) > 3)
    cache._report_wait(4, has_ended)
    assert waits == [40.0, 60.0, 60.0, 60.0] and len(said) == num_before + 3
