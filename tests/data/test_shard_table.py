"""index.json as columns: what every layout of it says, and what may not be in it."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from streaming.base.format import reader_from_json
from streaming.base.util import merge_index

from llmfoundry_lite.data.index_files import find_local_indexes
from llmfoundry_lite.data.shard_table import ShardTable, read_indexes
from llmfoundry_lite.errors import DataError
from tests.helpers.mds_writer import MDSWriter


def write_mds(folder: Path, num_samples: int = 300, **options) -> Path:
    with MDSWriter(out=str(folder), columns={"tokens": "bytes"}, size_limit=400, **options) as writer:
        for number in range(num_samples):
            writer.write({"tokens": bytes(number % 7 * 8)})
    return folder


def read_table(*folders: Path, hash_name: str | None = None, **options) -> ShardTable:
    return ShardTable(
        *read_indexes([find_local_indexes(folder) for folder in folders], [hash_name] * len(folders), **options)
    )


def readers_of(table: ShardTable, folder: Path) -> list:
    return [table.reader(shard, str(folder)) for shard in range(len(table))]


def reader_fields(reader) -> dict:
    fields = {name: getattr(reader, name) for name in ("column_names", "column_encodings", "column_sizes", "samples")}
    return fields | {"raw": reader.raw_data, "zip": reader.zip_data, "compression": reader.compression}


@pytest.mark.parametrize(
    "options",
    [{}, {"hashes": ["xxh64"]}, {"compression": "zstd", "hashes": ["xxh3_64"]}],
    ids=["plain", "hash", "zstd"],
)
def test_readers_are_those_that_streamingdataset_makes(tmp_path, options):
    a, b = write_mds(tmp_path / "a", **options), write_mds(tmp_path / "b", 90, **options)
    table = read_table(a, b)
    expected = [
        reader_from_json(str(folder), "", record)
        for folder in (a, b)
        for record in json.loads((folder / "index.json").read_text())["shards"]
    ]
    assert list(map(reader_fields, readers_of(table, a))) == list(map(reader_fields, expected))
    assert [table.stream_of(shard) for shard in (0, table.stream_bounds[1] - 1, table.stream_bounds[1])] == [0, 0, 1]


def test_a_merged_index_with_folders_in_it_is_read(tmp_path):
    write_mds(tmp_path / "all" / "a", 40)
    write_mds(tmp_path / "all" / "größe", 40, hashes=["xxh64"])
    merge_index(str(tmp_path / "all"), keep_local=True)
    table = read_table(tmp_path / "all", allow_unhashed_shards=True)
    assert {table.name(shard).split("/")[0] for shard in range(len(table))} == {"a", "größe"}
    assert table.rows["samples"].sum() == 80
    assert [schema["hash_name"] for schema in table.schemas] == ["", "xxh64"]


@contextmanager
def rewritten(folder: Path) -> Iterator[list[Any]]:
    """The records of the index, written back after the caller has changed them."""
    content = json.loads((folder / "index.json").read_text())
    yield content["shards"]
    (folder / "index.json").write_text(json.dumps(content, sort_keys=True))


def change_hashes(folder: Path, shard: int, change) -> Path:
    """The index again, with `change` of one shard's hashes."""
    with rewritten(folder) as records:
        records[shard]["raw_data"]["hashes"] = change(records[shard]["raw_data"]["hashes"])
    return folder


@pytest.mark.parametrize("change", [lambda _: {}, lambda known: dict.fromkeys(known, "")], ids=["none", "empty"])
def test_one_shard_without_a_hash_among_others_is_refused_unless_told(tmp_path, change):
    folder = write_mds(tmp_path / "a", hashes=["xxh64"])
    before = read_table(folder).content_digests[0]
    change_hashes(folder, 2, change)
    with pytest.raises(DataError, match=r"shard.00002.mds has no hash, .* load it all the same: allow_unhashed_shards"):
        read_table(folder)
    table = read_table(folder, allow_unhashed_shards=True)
    readers = readers_of(table, folder)
    assert [bool(readers[i].raw_data.hashes) for i in range(4)] == [True, True, False, True]
    assert table.content_digests[0].startswith("mixed:") and table.content_digests[0] != before


def test_shards_of_different_algorithms_are_each_checked_by_their_own(tmp_path):
    folder = write_mds(tmp_path / "a", hashes=["xxh64"])
    changed = change_hashes(folder, 2, lambda known: {"sha1": known["xxh64"]})
    table = read_table(changed)
    readers = readers_of(table, folder)
    assert [list(readers[i].raw_data.hashes) for i in range(4)] == [["xxh64"], ["xxh64"], ["sha1"], ["xxh64"]]
    digests = {table.content_digests[0]}
    for change in (lambda known: {"md5": known["sha1"]}, lambda known: {"md5": known["md5"][::-1]}):
        digests.add(read_table(change_hashes(folder, 2, change)).content_digests[0])
    assert len(digests) == 3, "algorithm and value are both part of what the data is"
    with pytest.raises(DataError, match=r"validate_hash is xxh64, but .* has md5; leave validate_hash out"):
        read_table(folder, hash_name="xxh64")


def test_the_digest_of_shards_with_one_algorithm_is_this_one_for_ever(tmp_path):
    """Checkpoints keep it."""
    hashed, plain = write_mds(tmp_path / "a", hashes=["xxh64"]), write_mds(tmp_path / "b")
    contents = [read_table(folder).content_digests[0] for folder in (hashed, plain)]
    assert contents == ["xxh64:c0de21416b8955a2c712774c86bbe0a6", "sizes:2cfa14b5dabe97ca3fb48aca8db7cc41"]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("format", "csv", "describes shards of csv version 2, not MDS version 2"),
        ("column_encodings", ["pkl"], "column tokens is of type pkl, which may run code"),
    ],
)
def test_an_index_that_could_do_harm_is_refused(tmp_path, key, value, words):
    folder = write_mds(tmp_path / "a")
    with rewritten(folder) as records:
        records[5][key] = value
    with pytest.raises(DataError, match=words):
        read_table(folder)


NAMES = [
    *("authorized_keys", "../x.mds", "a/../../x.mds", "/etc/x.mds", "a//x.mds", "./x.mds", ".ssh/x.mds", ".x.mds"),
    *("x.mds\0", "x.mds\n", "x.mds/", "x.mds.sh", "x.mds.part", ""),
]


@pytest.mark.parametrize("name", NAMES, ids=repr)
@pytest.mark.parametrize("kind", ["raw_data", "zip_data"])
def test_a_shard_has_the_name_of_one_and_lies_beside_its_index(tmp_path, name, kind):
    folder = write_mds(tmp_path / "a", compression="zstd" if kind == "zip_data" else None)
    with rewritten(folder) as records:
        records[5][kind]["basename"] = name + (".zstd" if kind == "zip_data" and name.endswith(".mds") else "")
    with pytest.raises(
        DataError, match=r"names a shard .*, expected a file beside it that ends in \.mds, or in \.mds and"
    ):
        read_table(folder)


@pytest.mark.parametrize("value", [-5, 10.0, "10", True], ids=repr)
def test_a_number_of_samples_that_cannot_be_is_refused(tmp_path, value):
    folder = write_mds(tmp_path / "a")
    with rewritten(folder) as records:
        records[2]["samples"] = value
    with pytest.raises(DataError, match=rf"samples is {re.escape(repr(value))}, expected a whole number of"):
        read_table(folder)


@pytest.mark.parametrize("change", [{"raw_data": {}}, {"raw_data": None}, {"column_sizes": ...}, ...], ids=repr)
def test_a_record_that_lacks_what_every_shard_has_is_refused(tmp_path, change):
    folder = write_mds(tmp_path / "a")
    with rewritten(folder) as records:
        if change is ...:
            records[0] = 0
        for record in records[1:]:
            for key, value in {} if change is ... else change.items():
                record[key] = value
                if value is ...:
                    del record[key]
    with pytest.raises(DataError, match=r"is not an index of MDS version 2"):
        read_table(folder)


def test_a_shard_that_is_listed_twice_is_refused(tmp_path):
    folder = write_mds(tmp_path / "a")
    with rewritten(folder) as records:
        records.append(records[3])
    with pytest.raises(DataError, match=r"lists shard.00003.mds twice, so that its samples would be read twice"):
        read_table(folder)


def test_the_content_digest_knows_samples_and_bytes_but_not_names(tmp_path):
    folder = write_mds(tmp_path / "a", hashes=["xxh64"])
    digest = read_table(folder).content_digests[0]
    index = folder / "index.json"
    regular = index.read_text()
    index.write_text(regular.replace("shard.", "piece."))
    assert read_table(folder).content_digests[0] == digest
    some_hash = json.loads(regular)["shards"][3]["raw_data"]["hashes"]["xxh64"]
    index.write_text(regular.replace(some_hash, some_hash[::-1]))
    assert read_table(folder).content_digests[0] != digest


def test_of_several_hashes_the_fastest_is_checked(tmp_path):
    names = [["sha1", "xxh64"], ["xxh32", "xxh3_64"], ["md5", "sha256"]]
    folders = [write_mds(tmp_path / str(i), 9, hashes=hashes) for i, hashes in enumerate(names)]
    assert [schema["hash_name"] for schema in read_table(*folders).schemas] == ["xxh64", "xxh3_64", "md5"]
