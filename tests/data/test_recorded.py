"""Data of a recorded run: its folders are read and never written, its remotes are not asked unless the user says so."""

import json

import numpy as np
import pytest
from streaming import MDSWriter

from llmfoundry_lite.config.build import build_block
from llmfoundry_lite.config.data_schema import TextDatasetConfig
from llmfoundry_lite.data.dataset import TextDataset
from llmfoundry_lite.data.recorded import DataLocations, find_data_locations, shard_state
from llmfoundry_lite.errors import ConfigError, DataError


def write(folder, **options):
    with MDSWriter(out=str(folder), columns={"tokens": "ndarray:uint16"}, size_limit=600, **options) as writer:
        for number in range(40):
            writer.write({"tokens": np.full(8, number, np.uint16)})
    return folder


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def place(own, given=(), uses_recorded_remote=False, **words):
    dataset = build_block(TextDatasetConfig, words, "train_loader.dataset")
    locations = DataLocations(
        download_folder=own, named_by_user=given, uses_recorded_remote=uses_recorded_remote, advice=", or --so"
    )
    return locations.choose_for(dataset)


def read(dataset):
    opened = TextDataset(dataset, max_seq_len=8, global_batch_size=4)
    return sorted(int(row[0]) for row in opened)


@pytest.mark.parametrize("has_remote", [False, True])
def test_whole_shards_are_read_in_place(tmp_path, has_remote):
    folder = write(tmp_path / "data" / "train")
    before, remote = contents(tmp_path), {"remote": "s3://theirs"} if has_remote else {}
    found = place(tmp_path / "own", local=str(tmp_path / "data"), split="train", **remote)
    assert (found.local, found.remote, found.split) == (str(tmp_path / "data"), None, "train")
    assert read(found) == [*range(40)] and contents(tmp_path) == before and shard_state(folder) == "whole"


def test_packed_shards_are_unpacked_in_a_folder_of_our_own(tmp_path):
    folder = write(tmp_path / "data", compression="zstd")
    before = contents(folder)
    found = place(tmp_path / "own", local=str(folder))
    assert (found.local, found.remote) == (str(tmp_path / "own" / "0"), str(folder)) and shard_state(
        folder
    ) == "compressed"
    assert read(found) == [*range(40)] and contents(folder) == before
    assert len([*(tmp_path / "own" / "0").glob("*.mds")]) > 1


@pytest.mark.parametrize("lacks", ["folder", "index", "shard"])
def test_a_recorded_remote_is_asked_only_if_the_user_says_so(tmp_path, lacks):
    folder, remote = tmp_path / "data", str(write(tmp_path / "remote"))
    if lacks != "folder":
        write(folder)
        next(folder.glob("index.json" if lacks == "index" else "*.00001.mds")).unlink()
    before, recorded = contents(tmp_path), {"local": str(folder), "remote": remote}
    words = (
        rf"train_loader\.dataset: {folder} does not hold its data here; give train_loader\.dataset\.local=FOLDER, or "
    )
    with pytest.raises(DataError, match=rf"{words}.*\.remote={remote} to fetch it from where the run did, or --so$"):
        place(tmp_path / "own", **recorded)
    with pytest.raises(
        DataError, match=r"does not hold its data here; give .*\.local=FOLDER, or .*\.remote=URL to fetch it$"
    ):
        place(tmp_path / "own", local=str(folder))
    for options in ({"uses_recorded_remote": True}, {"given": [remote]}):
        found = place(tmp_path / "own", **recorded, **options)
        assert (found.local, found.remote) == (str(tmp_path / "own" / "0"), remote)
    assert (
        read(found) == [*range(40)]
        and contents(tmp_path).items() >= before.items()
        and not (lacks == "folder" and folder.exists())
    )


def test_a_folder_and_a_remote_that_the_user_gives_are_used_as_in_training(tmp_path):
    local, remote = str(tmp_path / "cache"), str(write(tmp_path / "remote"))
    found = place(tmp_path / "own", [local, remote], local=local, remote=remote)
    assert (found.local, found.remote) == (local, remote)


def test_streams_and_stages_are_placed_with_what_they_take_from_each_other(tmp_path):
    a, b = str(write(tmp_path / "a" / "x")), write(tmp_path / "b", compression="zstd")
    stages = [{"until": "2ba", "streams": {"a": {"local": f"{tmp_path}/a"}}}, {"streams": {"a": {"remote": "s3://x"}}}]
    stages[1]["streams"]["b"] = {"local": str(b), "split": ""}
    found = place(tmp_path / "own", stages=stages, split="x")
    first, last = (stage.streams for stage in found.stages)
    assert first["a"].local == last["a"].local == f"{tmp_path}/a" and first["a"].remote is last["a"].remote is None
    assert (last["b"].local, last["b"].remote) == (str(tmp_path / "own" / "2"), str(b)) and shard_state(
        tmp_path / "a" / "x"
    )
    streams = {"a": {"local": a}, "b": {"local": "gone"}}
    with pytest.raises(DataError, match=r"train_loader\.dataset\.streams\.b: gone does not hold"):
        place(tmp_path / "own", streams=streams)
    assert place(tmp_path / "own", streams=streams, stages=[{"streams": {"a": {}}}]).streams["b"].local == "gone", (
        "unused"
    )


def test_what_the_user_gave_is_known_by_its_key_at_any_depth():
    values = {"local": "a", "streams": {"x": {"local": "b", "remote": "c"}, "y": {"remote": "d"}}, "split": "e"}
    values = {"train_loader": {"dataset": values | {"stages": [{"streams": {"z": {"local": "f"}}}]}}}
    key = "train_loader.dataset"
    assert find_data_locations(values, [f"{key}.local", f"{key}.split"]) == {"a"}
    assert find_data_locations(values, [f"{key}.streams", f"{key}.stages", "seed"]) == {"b", "c", "d", "f"}


@pytest.mark.parametrize("content", ["{", "[]", '{"shards": [{}]}', '{"shards": [{"raw_data": {"basename": 1}}]}'])
def test_an_index_that_is_none_is_named(tmp_path, content):
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(DataError, match=r"index\.json is not an MDS index .*; give the data of the run"):
        shard_state(tmp_path)


@pytest.mark.parametrize("split", ["../x", "/etc", "a/../../b", "..", "a\0b"])
def test_a_split_lies_within_its_folder(split):
    with pytest.raises(ConfigError, match=r"train_loader\.dataset\.split: .* given, expected a folder within local"):
        build_block(TextDatasetConfig, {"local": "x", "split": split}, "train_loader.dataset")


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_link_in_a_cache_is_replaced_and_not_written_through(tmp_path, compression):
    remote, cache, mine = write(tmp_path / "remote", compression=compression), tmp_path / "cache", tmp_path / "mine"
    mine.write_text("mine")
    cache.mkdir()
    records = json.loads((remote / "index.json").read_text())["shards"]
    names = [
        "index.json",
        *(record[kind]["basename"] for record in records for kind in ("raw_data", "zip_data") if record[kind]),
    ]
    (cache / "index.json").symlink_to(mine)
    dataset = build_block(TextDatasetConfig, {"local": str(cache), "remote": str(remote)}, "d")
    TextDataset(dataset, max_seq_len=8, global_batch_size=4)  # brings the index
    for name in names[1:]:
        (cache / name).symlink_to(mine)
    assert read(dataset) == [*range(40)] and mine.read_text() == "mine"
