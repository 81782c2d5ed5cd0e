"""`data index` writes the bytes that MDSWriter would have written, and believes no shard's word about its size."""

import json
from pathlib import Path

import numpy as np
import pytest

from llmfoundry_engines.index_shards import index_folders, write_index_of
from llmfoundry_lite.cli import main
from llmfoundry_lite.data.index_files import list_local_folder
from llmfoundry_lite.errors import DataError
from tests.helpers.data import folder_bytes
from tests.helpers.mds_writer import MDSWriter
from tests.helpers.numbered import numbers_of, open_data, write_shards


@pytest.mark.parametrize(
    "options",
    [{}, {"hashes": ["sha1", "xxh3_64"]}, {"compression": "zstd:7", "hashes": ["xxh64"]}, {"compression": "gz"}],
    ids=["plain", "hashes", "zstd", "gz"],
)
def test_the_index_has_the_bytes_of_the_writers_own(tmp_path, options):
    folder = write_shards(tmp_path / "mds", **options)
    before = folder_bytes(folder)
    (folder / "index.json").unlink()
    (written,) = index_folders(folder)
    assert (written.samples, written.shards, written.missing) == (100, len(before) - 1, [])
    assert folder_bytes(folder) == before


def test_columns_of_all_kinds_are_those_of_the_writer(tmp_path):
    columns = {"tokens": "ndarray:uint16:4", "text": "str", "number": "int"}
    with MDSWriter(out=str(tmp_path / "mds"), columns=columns, size_limit=None) as writer:
        for number in range(9):
            writer.write({"tokens": np.full(4, number, np.uint16), "text": "a" * number, "number": number})
    expected = (tmp_path / "mds/index.json").read_bytes()
    (tmp_path / "mds/index.json").unlink()
    index_folders(tmp_path)
    assert (tmp_path / "mds/index.json").read_bytes() == expected


def test_only_missing_indexes_are_written_and_then_the_folders_load(tmp_path, capsys):
    for number in range(3):
        write_shards(tmp_path / str(number), 20, first=20 * number)
    expected = numbers_of(open_data(tmp_path))
    kept = tmp_path / "0/index.json"
    kept.write_text(kept.read_text() + " ")
    (tmp_path / "2/index.json").unlink()
    with pytest.raises(DataError, match=rf"in 2: .* with `llmfoundry-lite data index {tmp_path}`$"):
        open_data(tmp_path)
    assert main.run(["data", "index", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/2/index.json: 20 samples in 2 shards\n"
    assert kept.read_text().endswith(" ")
    assert numbers_of(open_data(tmp_path)) == expected
    assert main.run(["data", "index", str(tmp_path)]) == 0
    assert "nothing is written" in capsys.readouterr().out


def test_a_shard_that_is_missing_between_others_is_named(tmp_path):
    folder = write_shards(tmp_path / "mds")
    (folder / "index.json").unlink()
    (folder / "shard.00001.mds").unlink()
    sentences: list[str] = []
    (written,) = index_folders(folder, sentences.append)
    assert written.missing == ["shard.00001.mds"]
    assert sentences[0].endswith("; shard.00001.mds not there")


def damage(content: bytes, change: str) -> bytes:
    """The content of a shard after a change."""
    if change == "truncated":
        return content[:-5]
    if change == "number":
        return b"\xff\xff\xff\xff" + content[4:]
    if change == "offsets":
        return content[:4] + b"\xff\xff\xff\x7f" + content[8:]
    replacements = {
        "hash": (b'["md5"]', b'["no!"]'),
        "format": (b'"mds"', b'"csv"'),
        "columns": (b'"column_encodings": ["bytes"]', b'"column_encodings": [1234567]'),
    }
    return content.replace(*replacements[change])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("truncated", r"it has [\d,]+ bytes, [\d,]+ by its own offsets"),
        ("number", "its number of samples does not fit its size"),
        ("offsets", "its offsets are not those of samples"),
        ("hash", "its hash 'no!' is none of md5 "),
        ("format", "its description is not of MDS version 2"),
        ("columns", "its description does not have a type for each column"),
    ],
)
def test_a_file_that_is_no_complete_shard_is_named(tmp_path, change, words):
    folder = write_shards(tmp_path / "mds", hashes=["md5"])
    (folder / "index.json").unlink()
    shard = folder / "shard.00002.mds"
    shard.write_bytes(damage(shard.read_bytes(), change))
    with pytest.raises(DataError, match=rf"^{shard} is not a complete MDS shard: {words}.*; remove it, or write it"):
        index_folders(folder)
    assert not (folder / "index.json").exists()


def test_an_index_that_another_process_has_written_meanwhile_stays(tmp_path):
    folder = write_shards(tmp_path / "mds")
    (folder / "index.json").write_text("theirs")
    with pytest.raises(DataError, match=r"index.json has been written meanwhile; run the command again"):
        write_index_of(folder, list_local_folder(folder)(""))
    assert (folder / "index.json").read_text() == "theirs"


def test_shards_whose_compressed_files_are_gone_are_not_compressed(tmp_path):
    folder = write_shards(tmp_path / "mds", compression="zstd")
    expected = numbers_of(open_data(folder))  # decompresses the shards
    for path in [folder / "index.json", *folder.glob("*.zstd")]:
        path.unlink()
    index_folders(folder)
    records = json.loads((folder / "index.json").read_text())["shards"]
    assert {(record["compression"], record["zip_data"]) for record in records} == {(None, None)}
    assert numbers_of(open_data(folder)) == expected


def test_a_link_that_leads_nowhere_is_named(tmp_path):
    folder = write_shards(tmp_path / "mds")
    (folder / "index.json").unlink()
    (folder / "shard.00000.mds").unlink()
    (folder / "shard.00000.mds").symlink_to("gone")
    with pytest.raises(DataError, match=r"shard.00000.mds is not a complete MDS shard: it is no regular file; remove"):
        index_folders(folder)


def test_a_shard_that_unpacks_to_something_else_is_named(tmp_path):
    folder = write_shards(tmp_path / "mds", compression="zstd")
    (folder / "index.json").unlink()
    (folder / "shard.00002.mds.zstd").write_bytes(b"no frame")
    with pytest.raises(DataError, match=r"shard.00002.mds.zstd is not a complete MDS shard: it cannot be decompressed"):
        index_folders(folder)


def test_what_is_no_folder_of_shards_is_named(tmp_path: Path):
    with pytest.raises(DataError, match=rf"^{tmp_path}/no is not a folder; expected a folder of MDS shards"):
        index_folders(tmp_path / "no")
    (tmp_path / "a.json").write_text(json.dumps({}))
    with pytest.raises(DataError, match=rf"^{tmp_path} has no MDS shards"):
        index_folders(tmp_path)
