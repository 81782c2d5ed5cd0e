"""Fixtures of parts, and those that the core's tests of `data prepare` have, too."""

import gzip
import json
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmfoundry_engines.tests.buckets import use_server
from llmfoundry_lite.prepare import sources
from llmfoundry_lite.prepare.prepare import prepare
from llmfoundry_lite.prepare.request import PrepareRequest
from tests.checkpoint.s3_server import s3_server
from tests.helpers.data import make_documents, tokenizer, tokenizer_folder
from tests.helpers.preparing import plain, request, write_jsonl

__all__ = ["tokenizer", "tokenizer_folder"]

UNIT_BYTES = 6000
"""Size of units in tests that run in this process, so that a few documents are many units."""


@pytest.fixture(scope="module")
def small_units() -> Iterator[None]:
    """Make units so small that a few documents are many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "MIN_UNIT_BYTES", UNIT_BYTES)
        yield


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text files, lines and compressed lines, with empty documents, and one that is larger than many units."""
    folder = tmp_path_factory.mktemp("corpus")
    documents = make_documents(160, words=40)
    for number, document in enumerate(documents[:40]):
        plain(folder / f"a/{number:02}.txt", document.encode() if number % 9 else b"")
    write_jsonl(folder / "b.jsonl", ["", *documents[40:80], "", "huge " * 4000, *documents[80:100], ""])
    lines = "".join(json.dumps({"text": document}) + "\n" for document in documents[100:])
    plain(folder / "c.jsonl.gz", gzip.compress(lines.encode()))
    plain(folder / "d.jsonl", b"")
    return folder


@pytest.fixture(scope="module")
def wanted(corpus: Path, tokenizer_folder: Path, small_units: None) -> PrepareRequest:
    """A request whose result has several shards."""
    return request(corpus, tokenizer_folder, val_fraction=0.1, size_limit_bytes=5000)


@pytest.fixture(scope="module")
def expected(wanted: PrepareRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result of one machine."""
    out = tmp_path_factory.mktemp("expected")
    prepare(wanted, out, num_workers=1)
    return out


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    """The port of a local S3 server."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    with s3_server() as port:
        yield port


@pytest.fixture
def out(s3_port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The URL of an output in a new bucket. Scratch folders are in `tmp_path`."""
    import s3fs

    use_server(monkeypatch, s3_port)
    bucket = f"data-{uuid.uuid4().hex}"
    s3fs.S3FileSystem().mkdir(bucket)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield f"s3://{bucket}/big"
    s3fs.S3FileSystem.clear_instance_cache()
