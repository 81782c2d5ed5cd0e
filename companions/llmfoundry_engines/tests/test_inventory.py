"""`data ls`: what is in a folder or bucket, and what is missing, damaged or unfinished there."""

import json
import os
import shutil
from pathlib import Path

import boto3
import fsspec
import pytest
from streaming.base.util import merge_index

from llmfoundry_engines.inventory import COMPLETE, DataFolder, find_data
from llmfoundry_engines.part import Part
from llmfoundry_engines.prepare_part import prepare_part
from llmfoundry_lite.cli import main
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.prepare.prepare import prepare
from llmfoundry_lite.prepare.summary import load_summary
from tests.checkpoint.s3_server import s3_server
from tests.helpers.data import make_documents
from tests.helpers.mds_writer import MDSWriter
from tests.helpers.numbered import numbers_of, open_data, write_shards
from tests.helpers.preparing import SEQ_LEN, request, write_jsonl


@pytest.fixture
def root(tmp_path: Path, tokenizer_folder: Path) -> Path:
    """A prepared data set, and one of other tools."""
    write_jsonl(tmp_path / "web.jsonl", make_documents(120))
    wanted = request(tmp_path / "web.jsonl", tokenizer_folder, val_fraction=0.1, size_limit_bytes=6000)
    prepare(wanted, tmp_path / "data/web", num_workers=1)
    write_shards(tmp_path / "data/others/mds", hashes=["xxh64"], compression="zstd")
    return tmp_path / "data"


def states_of(url: Path | str) -> dict[str, str]:
    return {found.path: found.state for found in find_data(str(url))}


def upload(folder: Path, name: str) -> str:
    """Copy a folder into a file system of this process that is reached by a URL."""
    fsspec.filesystem("memory").put(str(folder), f"/{name}", recursive=True)
    return f"memory://{name}"


def test_every_split_is_listed_with_what_it_holds(root):
    others, train, val = find_data(str(root))
    summary = load_summary(root / "web")
    split = summary.splits["train"]
    assert train == DataFolder(
        path="web/train",
        state=COMPLETE,
        samples=split.samples,
        tokens=split.tokens,
        columns=(f"tokens ndarray:{summary.token_dtype}:{SEQ_LEN}",),
        max_seq_len=SEQ_LEN,
        shards=split.shards,
        num_bytes=sum(path.stat().st_size for path in (root / "web/train").glob("*.mds")),
        compression="none",
        tokenizer=summary.tokenizer.fingerprint,
        digest=open_data(root / "web/train", max_seq_len=SEQ_LEN).cache.table.content_digests[0],
    )
    assert (val.path, val.samples) == ("web/val", summary.splits["val"].samples)
    assert (others.path, others.samples, others.tokens, others.compression) == ("others/mds", 100, None, "zstd")


def test_padding_is_not_listed_as_tokens(root, tmp_path, tokenizer_folder):
    wanted = request(root.parent / "web.jsonl", tokenizer_folder, val_fraction=0, pack="best-fit")
    split = prepare(wanted, tmp_path / "packed", num_workers=1).splits["train"]
    assert split.tokens < split.samples * SEQ_LEN
    assert [found.tokens for found in find_data(str(tmp_path / "packed"))] == [split.tokens]
    (tmp_path / "packed/summary.json").unlink()
    assert [found.tokens for found in find_data(str(tmp_path / "packed"))] == [None]


def test_a_bucket_is_listed_like_a_folder(root):
    assert find_data(upload(root, "bucket-of-data")) == find_data(str(root))


def test_the_command_prints_a_table_and_json(root, capsys):
    assert main.run(["data", "ls", str(root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in (lines[0], *lines[2:])] == ["folder", "others/mds", "web/train", "web/val", "3"]
    assert main.run(["data", "ls", str(root), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [found["path"] for found in record["data"]] == ["others/mds", "web/train", "web/val"]
    assert main.run(["data", "ls", str(root / "no")]) == 2
    assert f"{root}/no is not a folder; expected prepared data" in capsys.readouterr().err


def test_missing_and_changed_shards_are_counted(root):
    others = root / "others/mds"
    (others / "shard.00001.mds.zstd").unlink()
    with open(others / "shard.00002.mds.zstd", "ab") as file:
        file.write(b"more")
    num_shards = len(list(others.glob("*.mds.zstd"))) + 1
    expected = f"1 of {num_shards} shards missing; 1 shards of another size than in the index"
    assert states_of(root)["others/mds"] == expected
    (others / "index.json").unlink()
    assert states_of(root)["others/mds"] == "no index.json"


def test_a_merged_index_is_one_data_set_and_a_cache_says_what_it_lacks(tmp_path):
    for name in ("0", "1"):
        write_shards(tmp_path / "mds" / name, 20)
    merge_index(str(tmp_path / "mds"), keep_local=True)
    assert states_of(tmp_path / "mds") == {".": COMPLETE}
    open_data(tmp_path / "cache", remote=str(tmp_path / "mds"))
    assert states_of(tmp_path / "cache") == {".": "cache: 4 of 4 shards not downloaded"}
    shutil.rmtree(tmp_path / "mds/1")
    assert states_of(tmp_path / "mds") == {".": "2 of 4 shards missing"}


def test_unfinished_work_is_listed(tmp_path, wanted):
    prepare_part(wanted, tmp_path / "data/new", Part(1, 3), num_workers=1)
    (found,) = find_data(str(tmp_path / "data"))
    assert (found.path, found.max_seq_len) == ("new/.partial", SEQ_LEN)
    num_units = len(list((tmp_path / "data/new/.partial/units").glob("*.npz")))
    assert found.state == f"unfinished: {num_units} pieces tokenized, 1 parts begun"
    assert find_data(upload(tmp_path / "data", "bucket-of-parts")) == [found]


@pytest.mark.parametrize("url", ["folder", "bucket"])
def test_what_a_stranger_wrote_is_named_and_not_run(tmp_path, url):
    with MDSWriter(out=str(tmp_path / "data/a"), columns={"tokens": "pkl"}) as writer:
        writer.write({"tokens": [1]})
    write_shards(tmp_path / "data/b")
    index = tmp_path / "data/b/index.json"
    index.write_text(index.read_text().replace("shard.00000.mds", "../../secret.mds"))
    source = str(tmp_path / "data") if url == "folder" else upload(tmp_path / "data", "strange")
    states = states_of(source)
    assert "column tokens is of type pkl, which may run code when it is read" in states["a"]
    assert "index.json names a shard '../../secret.mds', expected a file beside it" in states["b"]
    assert all(state.startswith(f"damaged: {source}/") for state in states.values())


def test_bad_values_in_an_index_or_folder_do_not_end_the_listing(tmp_path):
    values = {
        "names": ("column_names", [["tokens"]], "column_names is no list of texts"),
        "types": ("column_encodings", [7], "column_encodings is no list of texts"),
        "digits": ("column_encodings", ["ndarray:uint16:" + "9" * 5000], COMPLETE),
        "path": ("raw_data", {"basename": "x" * 300 + "/a.mds", "bytes": 1, "hashes": {}}, "File name too long"),
    }
    for folder, (key, value, _) in values.items():
        write_shards(tmp_path / folder)
        index = json.loads((tmp_path / folder / "index.json").read_text())
        for shard in index["shards"][:1]:
            shard[key] = value
        (tmp_path / folder / "index.json").write_text(json.dumps(index))
    (tmp_path / "circle").symlink_to("circle")
    states = states_of(tmp_path)
    assert states.keys() == values.keys()
    for folder, (_, _, expected) in values.items():
        assert expected in states[folder]


def test_a_folder_without_permission_has_a_row(root, monkeypatch):
    def scan(path: str) -> object:
        if str(path).endswith("others"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    scandir = os.scandir
    monkeypatch.setattr("llmfoundry_lite.data.index_files.os.scandir", scan)
    states = states_of(root)
    assert states.keys() == {"others", "web/train", "web/val"}
    assert states["others"] == f"cannot be listed: [Errno 13] Permission denied: '{root}/others'"


def test_an_index_that_is_too_large_is_not_read(root, monkeypatch):
    monkeypatch.setattr("llmfoundry_engines.inventory.MAX_INDEX_BYTES", 100)
    states = states_of(upload(root, "large"))
    assert "has more than 100 bytes, the most that are read" in states["web/train"]


def test_each_folder_is_listed_once(root, monkeypatch):
    listed: list[str] = []
    filesystem = fsspec.filesystem("memory")
    url = upload(root, "once")
    ls = type(filesystem).ls

    def count(self: object, path: str, **options: object) -> object:
        listed.append(path)
        return ls(self, path, **options)

    monkeypatch.setattr(type(filesystem), "ls", count)
    find_data(url)
    assert len(listed) == len(set(listed)) == 7


@pytest.mark.slow
def test_folders_of_a_bucket_train_and_are_listed(tmp_path, monkeypatch):
    for index, name in enumerate(("0", "2", "10")):
        write_shards(tmp_path / "mds" / name, 20, first=20 * index, hashes=["xxh64"])
    with s3_server() as port:
        endpoint = f"http://127.0.0.1:{port}"
        credentials = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
        for name, value in {**credentials, "AWS_ENDPOINT_URL": endpoint}.items():
            monkeypatch.setenv(name, value)
        bucket = boto3.resource("s3").create_bucket(Bucket="bucket")
        for path in (tmp_path / "mds").rglob("*.*"):
            bucket.upload_file(str(path), f"mds/{path.relative_to(tmp_path / 'mds')}")
        assert find_data("s3://bucket/mds") == find_data(str(tmp_path / "mds"))
        dataset = open_data(tmp_path / "cache", remote="s3://bucket/mds", download_retry=1)
        assert numbers_of(dataset) == numbers_of(open_data(tmp_path / "mds"))
        bucket.Object("mds/2/index.json").delete()
        with pytest.raises(DataError, match=r"^s3://bucket/mds has shards without index.json, in 2"):
            open_data(tmp_path / "other", remote="s3://bucket/mds", download_retry=1)
