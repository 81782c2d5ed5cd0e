"""Data of a recorded run: its folders are read and never written, its remotes are not asked unless the user says so."""

import json
import re

import numpy as np
import pytest

from llmfoundry_lite.config.build import build_block
from llmfoundry_lite.config.data_schema import TextDatasetConfig
from llmfoundry_lite.data.dataset import TextDataset
from llmfoundry_lite.data.recorded import COMPRESSED, WHOLE, DataLocations, find_data_locations, shard_state
from llmfoundry_lite.errors import ConfigError, DataError
from tests.helpers.mds_writer import MDSWriter

BLOCK = "train_loader.dataset"
NUM_SAMPLES = 40
ALL_SAMPLES = list(range(NUM_SAMPLES))
UNREACHABLE = "s3://theirs"
ADVICE = ", or --so"
"""What a command adds to an error that asks for data."""


def write_shards(folder, **options):
    """Several shards of samples that repeat their own number."""
    with MDSWriter(out=str(folder), columns={"tokens": "ndarray:uint16"}, size_limit=600, **options) as writer:
        for number in ALL_SAMPLES:
            writer.write({"tokens": np.full(8, number, np.uint16)})
    return folder


def file_contents(folder):
    """Path -> content of every file below a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def read_sample_numbers(dataset):
    opened = TextDataset(dataset, max_seq_len=8, global_batch_size=4)
    return sorted(int(row[0]) for row in opened)


@pytest.fixture
def own_folder(tmp_path):
    """Where data is put that is not read in place; it does not exist yet."""
    return tmp_path / "own"


@pytest.fixture
def choose(own_folder):
    """A function that takes a recorded data set's settings and chooses where to read it from."""

    def choose_locations(recorded, *, named_by_user=(), uses_recorded_remote=False):
        locations = DataLocations(
            download_folder=own_folder,
            named_by_user=named_by_user,
            uses_recorded_remote=uses_recorded_remote,
            advice=ADVICE,
        )
        return locations.choose_for(build_block(TextDatasetConfig, recorded, BLOCK))

    return choose_locations


# --------------------------------------------------------------------------------------- data that is in its folder


@pytest.mark.parametrize("remote", [{}, {"remote": UNREACHABLE}])
def test_whole_shards_are_read_in_place(tmp_path, choose, remote):
    local = tmp_path / "data"
    write_shards(local / "train")
    contents_before = file_contents(tmp_path)

    chosen = choose({"local": str(local), "split": "train", **remote})
    assert chosen.local == str(local)
    assert chosen.split == "train"
    assert chosen.remote is None
    assert read_sample_numbers(chosen) == ALL_SAMPLES
    assert file_contents(tmp_path) == contents_before


def test_packed_shards_are_unpacked_in_a_folder_of_our_own(tmp_path, choose, own_folder):
    """The recorded folder takes the place of a remote."""
    folder = write_shards(tmp_path / "data", compression="zstd")
    contents_before = file_contents(folder)

    chosen = choose({"local": str(folder)})
    assert chosen.local == str(own_folder / "0")
    assert chosen.remote == str(folder)
    assert read_sample_numbers(chosen) == ALL_SAMPLES
    assert file_contents(folder) == contents_before
    unpacked_shards = list((own_folder / "0").glob("*.mds"))
    assert len(unpacked_shards) > 1


@pytest.mark.parametrize(("compression", "state"), [(None, WHOLE), ("zstd", COMPRESSED)])
def test_the_state_of_a_folder_says_whether_its_shards_are_compressed(tmp_path, compression, state):
    assert shard_state(write_shards(tmp_path, compression=compression)) == state


@pytest.mark.parametrize("content", ["{", "[]", '{"shards": [{}]}', '{"shards": [{"raw_data": {"basename": 1}}]}'])
def test_an_index_that_is_none_is_named(tmp_path, content):
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(DataError, match=r"index\.json is not an MDS index .*; give the data of the run"):
        shard_state(tmp_path)


# ---------------------------------------------------------------------------------- data that is not in its folder


@pytest.fixture(params=["folder", "index", "shard"])
def incomplete_folder(request, tmp_path):
    """A recorded folder that is gone, or has no index, or lacks one of its shards."""
    folder = tmp_path / "data"
    if request.param == "index":
        write_shards(folder)
        (folder / "index.json").unlink()
    elif request.param == "shard":
        write_shards(folder)
        (folder / "shard.00001.mds").unlink()
    return folder


@pytest.fixture
def remote(tmp_path):
    return str(write_shards(tmp_path / "remote"))


def test_a_recorded_remote_is_asked_only_if_the_user_says_so(incomplete_folder, remote, choose, own_folder):
    recorded = {"local": str(incomplete_folder), "remote": remote}
    message = (
        f"{BLOCK}: {incomplete_folder} does not hold its data here; give {BLOCK}.local=FOLDER, "
        f"or {BLOCK}.remote={remote} to fetch it from where the run did{ADVICE}"
    )
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        choose(recorded)

    chosen = choose(recorded, uses_recorded_remote=True)
    assert chosen.local == str(own_folder / "0")
    assert chosen.remote == remote


def test_a_recorded_remote_is_asked_if_the_user_names_it(incomplete_folder, remote, choose, own_folder):
    chosen = choose({"local": str(incomplete_folder), "remote": remote}, named_by_user=[remote])
    assert chosen.local == str(own_folder / "0")
    assert chosen.remote == remote


def test_where_no_remote_is_recorded_the_user_is_asked_for_one(incomplete_folder, choose):
    message = r"does not hold its data here; give .*\.local=FOLDER, or .*\.remote=URL to fetch it$"
    with pytest.raises(DataError, match=message):
        choose({"local": str(incomplete_folder)})


def test_a_download_leaves_the_recorded_folder_as_it_is(incomplete_folder, remote, choose):
    existed_before = incomplete_folder.exists()
    contents_before = file_contents(incomplete_folder)
    remote_before = file_contents(incomplete_folder.parent / "remote")

    chosen = choose({"local": str(incomplete_folder), "remote": remote}, uses_recorded_remote=True)
    assert read_sample_numbers(chosen) == ALL_SAMPLES
    assert incomplete_folder.exists() == existed_before
    assert file_contents(incomplete_folder) == contents_before
    assert file_contents(incomplete_folder.parent / "remote") == remote_before


def test_a_folder_and_a_remote_of_the_user_are_used_as_in_training(tmp_path, remote, choose):
    local = str(tmp_path / "cache")
    chosen = choose({"local": local, "remote": remote}, named_by_user=[local, remote])
    assert chosen.local == local
    assert chosen.remote == remote


# ---------------------------------------------------------------------------------------------- streams and stages


def test_a_stream_of_a_stage_keeps_the_folder_of_an_earlier_stage(tmp_path, choose):
    """Its split is the data set's, and its folder has all shards, so that the remote of the last stage is not asked."""
    local = str(tmp_path / "web")
    write_shards(tmp_path / "web" / "train")
    first_stage = {"until": "2ba", "streams": {"web": {"local": local}}}
    last_stage = {"streams": {"web": {"remote": UNREACHABLE}}}

    chosen = choose({"split": "train", "stages": [first_stage, last_stage]})
    for stage in chosen.stages:
        assert stage.streams["web"].local == local
        assert stage.streams["web"].remote is None


def test_a_stream_of_a_stage_is_unpacked_in_a_folder_of_its_own(tmp_path, choose, own_folder):
    """Folders are numbered by the sources of the run: here the code is the third, after two of the web."""
    write_shards(tmp_path / "web" / "train")
    code = str(write_shards(tmp_path / "code", compression="zstd"))
    first_stage = {"until": "2ba", "streams": {"web": {"local": str(tmp_path / "web")}}}
    last_stage = {"streams": {"web": {"remote": UNREACHABLE}, "code": {"local": code, "split": ""}}}

    chosen = choose({"split": "train", "stages": [first_stage, last_stage]})
    chosen_code = chosen.stages[1].streams["code"]
    assert chosen_code.local == str(own_folder / "2")
    assert chosen_code.remote == code


@pytest.fixture
def streams_of_which_one_is_gone(tmp_path):
    return {"web": {"local": str(write_shards(tmp_path / "web"))}, "code": {"local": "gone"}}


def test_a_stream_without_data_is_named(streams_of_which_one_is_gone, choose):
    with pytest.raises(DataError, match=r"train_loader\.dataset\.streams\.code: gone does not hold"):
        choose({"streams": streams_of_which_one_is_gone})


def test_a_stream_that_no_stage_reads_needs_no_data(streams_of_which_one_is_gone, choose):
    only_stage = {"streams": {"web": {}}}
    chosen = choose({"streams": streams_of_which_one_is_gone, "stages": [only_stage]})
    assert chosen.streams["code"].local == "gone"


# ------------------------------------------------------------------------------------------- what the user has named


@pytest.mark.parametrize(
    ("keys", "locations"),
    [
        ([f"{BLOCK}.local", f"{BLOCK}.split"], {"a"}),
        ([f"{BLOCK}.streams", f"{BLOCK}.stages", "seed"], {"b", "c", "d", "f"}),
    ],
)
def test_what_the_user_gave_is_known_by_its_key_at_any_depth(keys, locations):
    dataset = {
        "local": "a",
        "streams": {"x": {"local": "b", "remote": "c"}, "y": {"remote": "d"}},
        "split": "e",
        "stages": [{"streams": {"z": {"local": "f"}}}],
    }
    assert find_data_locations({"train_loader": {"dataset": dataset}}, keys) == locations


@pytest.mark.parametrize("split", ["../x", "/etc", "a/../../b", "..", "a\0b"])
def test_a_split_lies_within_its_folder(split):
    with pytest.raises(ConfigError, match=r"train_loader\.dataset\.split: .* given, expected a folder within local"):
        build_block(TextDatasetConfig, {"local": "x", "split": split}, BLOCK)


# ------------------------------------------------------------------------------------------------ links in a cache


def shard_file_names(folder):
    """The names that the index has for files: of each shard, and of the compressed shard if there is one."""
    names = []
    for record in json.loads((folder / "index.json").read_text())["shards"]:
        names.append(record["raw_data"]["basename"])
        if record["zip_data"]:
            names.append(record["zip_data"]["basename"])
    return names


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_link_in_a_cache_is_replaced_and_not_written_through(tmp_path, compression):
    """All files of the cache are links to one file of the user's, when they are to be downloaded."""
    remote = write_shards(tmp_path / "remote", compression=compression)
    users_file = tmp_path / "mine"
    users_file.write_text("mine")
    cache = tmp_path / "cache"
    cache.mkdir()
    dataset = build_block(TextDatasetConfig, {"local": str(cache), "remote": str(remote)}, BLOCK)

    (cache / "index.json").symlink_to(users_file)
    TextDataset(dataset, max_seq_len=8, global_batch_size=4)  # downloads the index
    for name in shard_file_names(remote):
        (cache / name).symlink_to(users_file)

    assert read_sample_numbers(dataset) == ALL_SAMPLES
    assert users_file.read_text() == "mine"
