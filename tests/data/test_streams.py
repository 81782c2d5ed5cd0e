"""Folders of streams: their settings, and what shows that a file is damaged."""

import hashlib

import pytest
import xxhash
from streaming.base.format import FileInfo

from llmfoundry_lite.config.data_schema import StreamConfig, TextDatasetConfig
from llmfoundry_lite.data.streams import build_folders, find_damage
from llmfoundry_lite.errors import DataError


def test_what_a_stream_says_goes_before_what_the_data_set_says(tmp_path):
    own = {"download_retry": 0, "download_timeout": 7.0, "validate_hash": "md5", "keep_zip": False, "split": ""}
    every = {"download_retry": 5, "download_timeout": 9.0, "validate_hash": "sha1", "keep_zip": True, "split": "val"}
    streams = {
        name: StreamConfig(local=str(tmp_path / name), remote="s3://bucket/data", **settings)
        for name, settings in {"own": own, "plain": {}}.items()
    }
    folders = build_folders(TextDatasetConfig(streams=streams, **every))
    for folder, expected in zip(folders, (own, every), strict=True):
        assert {name: getattr(folder.stream, name) for name in own} == expected


def test_a_client_that_quotes_a_password_without_its_url_is_quoted_without_it(tmp_path, monkeypatch):
    stream = StreamConfig(local=str(tmp_path), remote="s3://user:hunter2@bucket/data")
    (folder,) = build_folders(TextDatasetConfig(streams={"x": stream}))

    def download(name):
        raise ValueError('Invalid bucket name "user:hunter2@bucket"')

    monkeypatch.setattr(folder, "download", download)
    with pytest.raises(DataError, match=r'get index.json of s3://user:\*\*\*@bucket/data: .* "user:\*\*\*@bucket" \('):
        folder.fetch_indexes()


@pytest.mark.parametrize("wrong", ["", "md5", "xxh64"])
def test_every_hash_of_a_file_is_compared_from_its_first_byte(tmp_path, wrong):
    content = b"a shard" * 1000
    hashes = {"md5": hashlib.md5(content).hexdigest(), "xxh64": xxhash.xxh64(content).hexdigest()}
    hashes |= {wrong: "0" * 16} if wrong else {}
    path = tmp_path / "shard"
    path.write_bytes(content)
    found = find_damage(str(path), FileInfo(basename="shard", bytes=len(content), hashes=hashes))
    assert found == (f"its {wrong} is not the one in index.json" if wrong else "")
