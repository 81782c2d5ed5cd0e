"""The limit of the cache: which files it counts."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from llmfoundry_lite.data.cache import ShardCache


def test_packed_shards_count_where_they_are_kept_and_a_folder_without_a_remote_never():
    rows = {"raw_bytes": np.array([5, 6]), "zip_bytes": np.array([2, 3])}
    kinds = [(True, "s3://b"), (False, "s3://b"), (True, None)]
    cache: Any = ShardCache.__new__(ShardCache)
    cache.folders = [SimpleNamespace(stream=SimpleNamespace(keep_zip=keep), remote=remote) for keep, remote in kinds]
    cache.table = SimpleNamespace(rows_of_stream=lambda number: rows)
    assert cache._limited_bytes.tolist() == [7, 9, 5, 6, 0, 0]
