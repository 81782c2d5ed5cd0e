"""Parts that tests of `data prepare` share: a request, its input, and checks of the result."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from llmfoundry_lite.data.tokenizer import Tokenizer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.prepare.documents import Skipped, read_documents
from llmfoundry_lite.prepare.request import PrepareRequest
from llmfoundry_lite.prepare.sources import open_source
from llmfoundry_lite.prepare.summary import Summary, load_summary
from tests.helpers.data import folder_bytes, read_samples

SEQ_LEN = 32
NESTED_ROWS = [{"title": "a", "meta": {"text": "b", "n": 1}}, {"title": "c", "meta": {"text": "d", "n": 2}}]


def request(source: Path | str, tokenizer: Path | str, **options: object) -> PrepareRequest:
    return PrepareRequest(**{"sources": (str(source),), "tokenizer": str(tokenizer), "max_seq_len": SEQ_LEN, **options})


def units_of(*paths: Path | str, **options: object) -> list[tuple[list[str], Skipped]]:
    """The texts of each unit, and what was skipped there."""
    wanted = request("", "", sources=tuple(map(str, paths)), **options)
    found = []
    for unit in open_source(wanted).units():
        skipped = Skipped()
        found.append(([document.text for document in read_documents(unit, wanted, skipped)], skipped))
    return found


def texts_of(*paths: Path | str, **options: object) -> list[str]:
    return [text for texts, _ in units_of(*paths, **options) for text in texts]


def assert_reads_nested(source: Path | str) -> None:
    """NESTED_ROWS, in whatever form: a key may be a field within a field, and several are joined."""
    assert texts_of(source, text_key="meta.text") == ["b", "d"]
    assert texts_of(source, text_key=("title", "meta.text")) == ["a\n\nb", "c\n\nd"]
    with pytest.raises(DataError, match=r"has no 'meta.body'; there are: title, meta.text, meta.n \(choose one with"):
        texts_of(source, text_key=("title", "meta.body"))
    with pytest.raises(DataError, match=r"meta.n is a int, expected a string"):
        texts_of(source, text_key="meta.n")


def write_jsonl(path: Path, documents: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": 1, key: document}) + "\n" for document in documents))
    return path


def joined_tokens(tokenizer: Tokenizer, documents: list[str]) -> list[int]:
    return [token for ids in tokenizer.encode_batch(documents) for token in (*ids, tokenizer.eos_token_id)]


def assert_holds(folder: Path, summary: Summary, tokenizer: Tokenizer, documents: list[str]) -> None:
    """The samples of a split are exactly these documents in this order, and its counts are right."""
    split = summary.splits[folder.name]
    expected = joined_tokens(tokenizer, documents)
    samples = read_samples(folder)
    assert samples.shape == (split.samples, summary.max_seq_len)
    assert samples.ravel().tolist() == expected[: split.tokens]
    assert split.tokens + split.remainder_tokens == len(expected)
    assert split.remainder_tokens < summary.max_seq_len
    assert split.documents == len(documents)
    assert split.text_bytes == sum(len(document.encode()) for document in documents)


def assert_same_result(out: Path, expected: Path) -> None:
    """Two preparations are equal byte for byte, except for the times in their summaries. Nothing else is left."""
    times = {"seconds": 0, "documents_per_second": 0, "text_bytes_per_second": 0}
    assert replace(load_summary(out), **times) == replace(load_summary(expected), **times)
    for name in ("train", "val", "tokenizer"):
        assert folder_bytes(out / name) == folder_bytes(expected / name)
    assert sorted(path.name for path in out.iterdir()) == ["summary.json", "tokenizer", "train", "val"]


def plain(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path
