"""Sources in buckets: the bytes of local sources, by one machine and by parts, and errors that name the object."""

import gzip
import random
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest

from llmfoundry_engines import bucket_files, stored_list
from llmfoundry_engines.join import join
from llmfoundry_engines.tests.part_runs import prepare_parts
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.prepare.prepare import prepare
from tests.checkpoint.s3_server import ANSWER_CUT, RefusingProxy, s3_server
from tests.helpers.data import folder_bytes, make_documents
from tests.helpers.preparing import plain, request, texts_of, write_jsonl

s3fs = pytest.importorskip("s3fs")
pytest.importorskip("moto")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    with s3_server() as port:
        yield port


@pytest.fixture
def use_s3(server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Make a bucket with the files of a folder, and return its URL. Requests go to the server or to another port."""

    def bucket_of(folder: Path | None = None, port: int = server) -> str:
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        bucket_files._open_root.cache_clear()
        bucket = f"corpus-{uuid.uuid4().hex}"
        filesystem = s3fs.S3FileSystem(endpoint_url=f"http://127.0.0.1:{server}")
        filesystem.mkdir(bucket)
        for path in sorted(folder.rglob("*")) if folder else ():
            if path.is_file():
                filesystem.pipe_file(f"{bucket}/in/{path.relative_to(folder).as_posix()}", path.read_bytes())
        return f"s3://{bucket}/in"

    yield bucket_of
    s3fs.S3FileSystem.clear_instance_cache()
    bucket_files._open_root.cache_clear()


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of each kind, small text files, hidden files, and one of no kind that is read."""
    folder = tmp_path_factory.mktemp("mixed")
    documents = make_documents(200, words=40)
    for number, document in enumerate(documents[:20]):
        plain(folder / f"a/{number:02}.txt", document.encode() if number % 9 else b"")
    lines = write_jsonl(folder / "b.jsonl", documents[20:100])
    plain(folder / "c.jsonl.gz", gzip.compress(lines.read_bytes()))
    rows = "".join(f'{number},"{document}"\n' for number, document in enumerate(documents[100:140]))
    plain(folder / "d/rows.csv", f"n,text\n{rows}".encode())
    pq.write_table(pa.table({"text": documents[140:], "n": list(range(60))}), folder / "e.parquet", row_group_size=7)
    with pa.ipc.new_stream(str(folder / "f.arrow"), pa.schema([("text", pa.string())])) as file:
        file.write_table(pa.table({"text": documents[:30]}), max_chunksize=7)
    subprocess.run(["zstd", "-q", folder / "b.jsonl", "-o", folder / "g.jsonl.zst"], check=True)
    plain(folder / ".hidden.txt", b"hidden")
    plain(folder / "d/image.png", b"no text")
    return folder


def shards_of(out: Path) -> list[dict[str, bytes]]:
    """The published files of a preparation, without its summary."""
    return [folder_bytes(out / name) for name in ("train", "val", "tokenizer")]


def test_a_bucket_gives_the_bytes_of_a_local_folder(
    mixed: Path, use_s3: Callable[..., str], tokenizer_folder: Path, tmp_path: Path, small_units: None
) -> None:
    url = use_s3(mixed)
    local = prepare(request(mixed, tokenizer_folder, val_fraction=0.1), tmp_path / "local", num_workers=1)
    wanted = request(url, tokenizer_folder, val_fraction=0.1)
    remote = prepare(wanted, tmp_path / "one", num_workers=1)
    assert remote.splits == local.splits
    assert remote.ignored_files == local.ignored_files == 1
    assert remote.text_digest == local.text_digest
    assert {**remote.request["input"], "digest": ""} == {**local.request["input"], "digest": ""}

    prepare(wanted, tmp_path / "two", num_workers=2)
    prepare_parts(wanted, tmp_path / "parts", [3, 1, 2], 3)
    join(tmp_path / "parts")
    for out in ("one", "two", "parts"):
        assert shards_of(tmp_path / out) == shards_of(tmp_path / "local")


@pytest.mark.parametrize("pattern", ["", "/", "/*.jsonl", "/d*", "/**", "/**/*.csv", "/a/0[1-3].txt", "/.*", "/?.*"])
def test_globs_and_folders_mean_the_same_as_on_a_disk(mixed: Path, pattern: str) -> None:
    filesystem = fsspec.filesystem("memory")
    for path in mixed.rglob("*"):
        if path.is_file():
            filesystem.pipe_file(f"/globs/{path.relative_to(mixed)}", path.read_bytes())
    assert texts_of(f"memory://globs{pattern}") == texts_of(f"{mixed}{pattern}")
    filesystem.rm("/globs", recursive=True)


def test_urls_with_nothing_to_read_are_named(use_s3: Callable[..., str], mixed: Path) -> None:
    url = use_s3(mixed)
    for source, message in (
        (f"{url}/nothing/", f"{url}/nothing/: no such object, and no folder with any"),
        (f"{url}/*.nothing", f"{url}/*.nothing: no object matches"),
        (f"{url}/d/image.png", f"{url}/d/image.png: nothing here can be read; expected"),
        (url.replace("s3://", "s3:/"), f"did you mean {url}"),
        (f"file://{mixed}", f"for files of this machine, give {mixed}"),
        ("s3://no-such-bucket-here/x", "s3://no-such-bucket-here/x/ cannot be listed: there is no such bucket"),
    ):
        with pytest.raises(DataError) as caught:
            texts_of(source)
        assert message in str(caught.value)
    with pytest.raises(DataError, match="cannot be prepared together with other sources"):
        texts_of(url, mixed)


def test_a_changed_or_missing_object_is_named(
    use_s3: Callable[..., str], mixed: Path, tokenizer_folder: Path, tmp_path: Path, small_units: None
) -> None:
    url = use_s3(mixed)
    wanted = request(url, tokenizer_folder)
    filesystem = s3fs.S3FileSystem()

    def change_after_listing(change: Callable[[], None]) -> str:
        """Read the source, which changes between listing and reading, and return the error."""
        from llmfoundry_lite.prepare.documents import Skipped, read_documents
        from llmfoundry_lite.prepare.sources import open_source

        source = open_source(wanted)
        change()
        with pytest.raises(DataError) as caught:
            for unit in source.units():
                list(read_documents(unit, wanted, Skipped()))
        return str(caught.value)

    original = (mixed / "b.jsonl").read_bytes()
    longer = original + original
    assert f"{url}/b.jsonl has changed since" in change_after_listing(lambda: filesystem.pipe(f"{url}/b.jsonl", longer))
    assert f"{url}/a/04.txt is not there any more since" in change_after_listing(
        lambda: filesystem.rm(f"{url}/a/04.txt")
    )


def test_credentials_in_urls_are_not_recorded(
    mixed: Path, tokenizer_folder: Path, tmp_path: Path, small_units: None
) -> None:
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe_file("/user:password@corpus/b.jsonl", (mixed / "b.jsonl").read_bytes() + b"{\n")
    url = "memory://user:password@corpus"
    prepare(request(url, tokenizer_folder, on_error="skip"), tmp_path / "out", num_workers=1)
    prepare_parts(request(url, tokenizer_folder, on_error="skip"), tmp_path / "parts", [1], 2)
    records = [*tmp_path.glob("out/summary.json"), *(tmp_path / "parts/.partial").rglob("*.json")]
    assert len(records) >= 3
    for record in records:
        assert "password" not in record.read_text()
    assert "memory://user:***@corpus" in records[0].read_text()
    filesystem.rm("/user:password@corpus", recursive=True)


@pytest.fixture
def proxy(server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[RefusingProxy]:
    """A proxy that refuses requests for objects, as a test says. Pauses between attempts take no time."""
    monkeypatch.setattr(bucket_files, "PAUSES_SECONDS", (0.0, 0.0))
    proxy = RefusingProxy(server)
    yield proxy
    proxy.close()


def test_faults_that_pass_are_tried_again_and_others_are_named(
    mixed: Path, use_s3: Callable[..., str], proxy: RefusingProxy
) -> None:
    url = use_s3(mixed, proxy.port)
    expected = texts_of(mixed)
    codes = {"b.jsonl": ["InternalError", "SlowDown"], "c.jsonl.gz": [ANSWER_CUT], "e.parquet": ["SlowDown"]}

    def refuse_some(method: str, path: str, headers: dict[str, str]) -> str | None:
        waiting = codes.get(path.rpartition("/")[2].partition("?")[0], [])
        return waiting.pop() if method == "GET" and waiting else None

    proxy.refuses = refuse_some
    assert texts_of(url) == expected
    assert not any(codes.values())

    proxy.refuses = lambda method, path, headers: "InternalError" if "b.jsonl" in path else None
    with pytest.raises(
        DataError, match=rf"{url}/b.jsonl cannot be read: .*this may pass: run the same command"
    ) as caught:
        texts_of(f"{url}/")
    assert caught.value.exit_code == 75


def test_an_object_that_is_refused_stops_or_is_skipped_and_named(
    mixed: Path, use_s3: Callable[..., str], proxy: RefusingProxy, tokenizer_folder: Path, tmp_path: Path
) -> None:
    url = use_s3(mixed, proxy.port)
    refused = ("04.txt", "b.jsonl", "c.jsonl.gz", "rows.csv", "e.parquet")
    proxy.refuses = lambda method, path, headers: "AccessDenied" if path.split("?")[0].endswith(refused) else None
    with pytest.raises(DataError, match=rf"{url}/a/04.txt cannot be read: .*ask for access.*--on-error skip") as caught:
        texts_of(url)
    assert caught.value.exit_code == 2
    wanted = request(url, tokenizer_folder, on_error="skip", val_fraction=0.1)
    summary = prepare(wanted, tmp_path / "out", num_workers=1)
    assert summary.skipped["unreadable"] >= len(refused), "each range of lines counts"
    assert {sentence.split(" ")[0].strip(",") for sentence in summary.skipped_examples} == {
        f"{url}/{name}" for name in ("a/04.txt", "b.jsonl", "c.jsonl.gz", "d/rows.csv", "e.parquet")
    }


def test_only_the_wanted_column_and_the_range_are_requested(
    use_s3: Callable[..., str], proxy: RefusingProxy, tmp_path: Path
) -> None:
    rng = random.Random(1)
    documents = make_documents(400, words=40)
    table = pa.table({"text": documents, "image": [rng.randbytes(20_000) for _ in documents]})
    (tmp_path / "in").mkdir()
    pq.write_table(table, tmp_path / "in/large.parquet", row_group_size=100)
    file_bytes = (tmp_path / "in/large.parquet").stat().st_size
    url = use_s3(tmp_path / "in", proxy.port)
    ranges: list[int] = []

    def count(method: str, path: str, headers: dict[str, str]) -> None:
        if "Range" in headers:
            begin, end = headers["Range"].removeprefix("bytes=").split("-")
            ranges.append(int(end) - int(begin) + 1)

    proxy.refuses = count
    assert texts_of(url) == documents
    assert file_bytes > 8_000_000 and sum(ranges) < file_bytes / 10


def test_parts_list_a_bucket_once(
    mixed: Path,
    use_s3: Callable[..., str],
    proxy: RefusingProxy,
    tokenizer_folder: Path,
    tmp_path: Path,
    small_units: None,
) -> None:
    """The first part lists it at its beginning and its end. The list is hashed, so a damaged one is named."""
    url = use_s3(mixed, proxy.port)
    lists: list[str] = []

    def count(method: str, path: str, headers: dict[str, str]) -> None:
        if "list-type=2" in path:
            lists.append(path)

    proxy.refuses = count
    wanted = request(url, tokenizer_folder, val_fraction=0.1)
    prepare_parts(wanted, tmp_path / "out", [2], 3)
    assert len(lists) == 2
    stored = tmp_path / "out/.partial" / stored_list.OBJECTS_FILE
    whole = stored.read_bytes()
    prepare_parts(wanted, tmp_path / "out", [1], 3)
    assert len(lists) == 2

    for damaged in (whole[:-20], gzip.compress(gzip.decompress(whole).replace(b"a/04.txt", b"a/99.txt")), b"{}"):
        stored.write_bytes(damaged)
        with pytest.raises(DataError, match=r"objects\.gz is damaged; remove it, and this part lists the bucket again"):
            prepare_parts(wanted, tmp_path / "out", [3], 3)
    stored.write_bytes(whole)
    with pytest.raises(DataError, match="holds parts of another preparation: on_error was 'stop' and is 'skip' now"):
        prepare_parts(request(url, tokenizer_folder, val_fraction=0.1, on_error="skip"), tmp_path / "out", [3], 3)
    s3fs.S3FileSystem().pipe(f"{url}/g.jsonl.zst", b"other")
    with pytest.raises(DataError, match=rf"{url}/g.jsonl.zst has changed since it was listed"):
        prepare_parts(wanted, tmp_path / "out", [3], 3)
