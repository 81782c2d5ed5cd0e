"""The line by which a preparation says early how long it takes."""

from types import SimpleNamespace

import pytest

from llmfoundry_lite.prepare import speed
from llmfoundry_lite.prepare.prepare import prepare
from llmfoundry_lite.prepare.speed import EarlyEstimate
from tests.helpers.data import make_documents
from tests.helpers.preparing import request, write_jsonl


def unit(megabytes: int, *, is_new: bool = True) -> SimpleNamespace:
    return SimpleNamespace(unit=SimpleNamespace(num_bytes=megabytes * 10**6), counts=object() if is_new else None)


def tell(total_bytes: int | None, *units: tuple[float, SimpleNamespace]) -> list[str]:
    """What is said about units that are complete at these seconds, by two workers."""
    now, sentences = [0.0], []
    estimate = EarlyEstimate(total_bytes, 2, sentences.append, lambda: now[0])
    for now[0], finished in units:
        estimate.add(finished)
    return sentences


def test_after_a_minute_the_time_of_the_rest_is_told_once():
    """Units of an earlier launch are done, but say nothing about the speed."""
    units = [(0.1, unit(1000, is_new=False)), (30.0, unit(100)), (60.0, unit(140)), (90.0, unit(140))]
    assert tell(3400 * 10**6, *units) == [
        "1,240 of 3,400 MB tokenised: 2.00 MB/s a core; 0.30 core-hours left, 0.15 hours on the 2 cores that work now"
    ]


@pytest.mark.parametrize(
    ("total_bytes", "finished"),
    [(None, (61.0, unit(9))), (10**9, (59.0, unit(9))), (10**9, (61.0, unit(9, is_new=False)))],
    ids=["stream", "early", "nothing new"],
)
def test_nothing_is_told_of_a_stream_or_before_anything_is_measured(total_bytes, finished):
    assert tell(total_bytes, finished) == []


def test_a_preparation_tells_it(tmp_path, tokenizer_folder, monkeypatch):
    monkeypatch.setattr(speed, "EARLY_SECONDS", 0.0)
    sentences = []
    source = write_jsonl(tmp_path / "in.jsonl", make_documents(60))
    prepare(request(source, tokenizer_folder), tmp_path / "out", num_workers=1, notify=sentences.append)
    assert [sentence for sentence in sentences if "MB/s a core; " in sentence and "1 cores that work" in sentence]
