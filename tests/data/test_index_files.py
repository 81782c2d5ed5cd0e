"""Folders of folders of shards: as the merged index would describe them, and never less than all of them."""

import json
import os
import shutil
from pathlib import Path

import pytest
from streaming.base.util import merge_index

from llmfoundry_lite.data import index_files
from llmfoundry_lite.data.index_files import find_local_indexes
from llmfoundry_lite.data.recorded import COMPRESSED, WHOLE, shard_state
from llmfoundry_lite.errors import DataError
from tests.helpers.numbered import numbers_of, open_data, write_shards

FOLDERS = ("0", "2", "10", "10-b", "part-1")
"""Names whose sorted order is neither that of numbers nor that of writing."""


def write_folders(root: Path, names=FOLDERS, **options) -> Path:
    """Write a folder of 20 samples for each name, as Spark does for each partition."""
    for index, name in enumerate(names):
        write_shards(root / name, 20, first=20 * index, **{"hashes": ["xxh64"], **options})
    return root


def state_of(dataset) -> dict:
    return dataset.state_dict(36, True)


@pytest.fixture
def folders(tmp_path) -> Path:
    return write_folders(tmp_path / "nested")


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_folders_have_the_order_and_digests_of_their_merged_index(tmp_path, compression):
    nested = write_folders(tmp_path / "nested", compression=compression)
    merged = shutil.copytree(nested, tmp_path / "merged")
    merge_index(str(merged), keep_local=True)
    datasets = [open_data(nested), open_data(merged)]
    assert numbers_of(datasets[0]) == numbers_of(datasets[1])
    assert state_of(datasets[0]) == state_of(datasets[1])
    names = [[dataset.cache.table.name(shard) for shard in range(10)] for dataset in datasets]
    assert names[0] == names[1] and names[0][0].startswith("0/")


def test_a_run_resumes_after_its_folders_have_been_merged(folders):
    state = json.loads(json.dumps(state_of(open_data(folders))))
    merge_index(str(folders), keep_local=True)
    open_data(folders).load_state_dict(state)
    reordered = json.loads((folders / "index.json").read_text())
    reordered["shards"].reverse()
    (folders / "index.json").write_text(json.dumps(reordered))
    with pytest.raises(DataError, match="the data is not what the checkpoint was trained with"):
        open_data(folders).load_state_dict(state)


def test_an_index_describes_all_folders_below_it(folders):
    """Those of the folders below are not read beside it, at any depth; an empty partition adds nothing."""
    deep = folders / "deep" / "er"
    write_folders(deep, ("a", "b"))
    merge_index(str(deep), keep_local=True)
    write_shards(folders / "empty", 0)
    expected = [f"{name}/index.json" for name in ("0", "10-b", "10", "2", "deep/er", "empty", "part-1")]
    assert list(find_local_indexes(folders).names) == expected
    assert len({number for batch in numbers_of(open_data(folders, global_batch_size=20)) for number in batch}) == 100


def test_a_folder_with_an_index_of_its_own_is_not_listed(tmp_path, monkeypatch):
    """Listing 100,000 shards took a second at every start."""
    write_shards(tmp_path / "mds")
    monkeypatch.setattr(index_files, "list_local_folder", lambda root: 1 / 0)
    assert find_local_indexes(tmp_path / "mds").names == ("index.json",)
    assert shard_state(tmp_path / "mds") == WHOLE


def test_a_folder_without_an_index_among_others_is_named(folders):
    (folders / "2/index.json").unlink()
    with pytest.raises(DataError, match=rf"^stream a: {folders} has shards without index.json, in 2: .* data index "):
        open_data(None, streams={"a": {"local": str(folders)}})


def test_a_link_to_a_folder_is_named_and_not_followed(folders, tmp_path):
    shutil.move(folders / "2", tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", folders / "2")
    with pytest.raises(DataError, match=rf"{folders} has no index.json, and links to other folders, .*: 2; give each"):
        open_data(folders)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("train", "val"), "set `split` to one of: train, val$"),
        (("web/train", "web/validation-small"), "it holds the splits web/train, web/validation-small; give each"),
    ],
)
def test_splits_are_never_read_together(tmp_path, names, words):
    with pytest.raises(DataError, match=words):
        open_data(write_folders(tmp_path / "data", names))


def test_a_name_in_an_index_stays_within_its_own_folder(folders):
    index = folders / "2/index.json"
    index.write_text(index.read_text().replace("shard.00000.mds", "../0/shard.00000.mds"))
    with pytest.raises(DataError, match=rf"{index} names a shard '../0/shard.00000.mds', expected a file beside it"):
        open_data(folders)


def test_each_folder_is_listed_once(folders, monkeypatch):
    listed = []
    scandir = os.scandir
    monkeypatch.setattr(index_files.os, "scandir", lambda path: listed.append(str(path)) or scandir(path))
    find_local_indexes(folders)
    assert sorted(listed) == sorted([f"{folders}/", *(str(folders / name) for name in FOLDERS)])


@pytest.mark.parametrize(("compression", "state"), [(None, WHOLE), ("zstd", COMPRESSED)])
def test_the_state_of_recorded_folders_is_that_of_all_of_them(tmp_path, compression, state):
    nested = write_folders(tmp_path / "nested", compression=compression)
    assert shard_state(nested) == state
    next((nested / "2").glob("*.mds*")).unlink()
    assert shard_state(nested) is None


# Remotes ------------------------------------------------------------------------------------------------------------


def test_folders_of_a_remote_are_downloaded_and_found_again(folders, tmp_path, downloads):
    cache = tmp_path / "cache"
    expected = numbers_of(open_data(folders))
    assert numbers_of(open_data(cache, remote=str(folders))) == expected
    assert "10-b/shard.00000.mds" in downloads
    downloads.clear()
    assert numbers_of(open_data(cache, remote=str(folders))) == expected
    assert numbers_of(open_data(cache)) == expected
    assert {name for name in downloads if name.endswith(".mds")} == set()


def test_an_old_index_is_removed_from_a_cache_that_has_no_shards(folders, tmp_path):
    cache = tmp_path / "cache"
    merge_index(str(folders), keep_local=True)
    open_data(cache, remote=str(folders))
    (folders / "index.json").unlink()
    expected = numbers_of(open_data(folders))
    for _ in range(2):  # the second time, the cache has shards
        assert numbers_of(open_data(cache, remote=str(folders))) == expected
    assert not (cache / "index.json").exists()


@pytest.mark.parametrize("change", ["other", "more", "fewer"])
def test_a_cache_of_other_folders_than_the_remotes_is_refused(folders, tmp_path, change):
    cache = tmp_path / "cache"
    numbers_of(open_data(cache, remote=str(folders)))
    if change == "fewer":
        shutil.rmtree(folders / "2")
    else:
        shutil.rmtree(folders / "2")
        write_shards(folders / ("2" if change == "other" else "3"), 30, first=500, hashes=["xxh64"])
    with pytest.raises(DataError, match=rf"{cache}/[23]/index.json is not the index.json of {folders}, so old and new"):
        open_data(cache, remote=str(folders))
