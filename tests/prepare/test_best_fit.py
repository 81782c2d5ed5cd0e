"""Best-fit packing: which documents share a sample, and how its samples are stored, trained on and read."""

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmfoundry_lite.data.baselines import measure_baselines, read_tokens
from llmfoundry_lite.data.rows import PAD_TOKEN, UNPADDED_LENGTH, RowReader
from llmfoundry_lite.data.tokenizer import Tokenizer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.prepare import best_fit
from llmfoundry_lite.prepare.best_fit import assign_samples, cut_documents, divide_into_windows, pack_documents
from llmfoundry_lite.prepare.prepare import prepare
from llmfoundry_lite.prepare.request import PrepareRequest
from llmfoundry_lite.prepare.summary import load_summary, print_summary
from llmfoundry_lite.report.batch import read_batch, read_batches
from tests.helpers.by_hand import assert_is_by_hand, train_by_hand
from tests.helpers.data import make_documents
from tests.helpers.launch import train
from tests.helpers.preparing import SEQ_LEN, joined_tokens, request, write_jsonl
from tests.helpers.tiny import read_metrics, tiny_config, values, write_config


@pytest.fixture(scope="module")
def documents() -> list[str]:
    return make_documents(150, seed=4, words=8)


@pytest.fixture(scope="module")
def wanted(documents: list[str], tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> PrepareRequest:
    source = write_jsonl(tmp_path_factory.mktemp("source") / "documents.jsonl", documents)
    return request(source, tokenizer_folder, val_fraction=0.2, pack="best-fit", size_limit_bytes=6_000)


@pytest.fixture(scope="module")
def packed(wanted: PrepareRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed")
    prepare(wanted, out, num_workers=1)
    return out


# The method


def test_documents_are_cut_into_full_samples_and_a_rest() -> None:
    assert cut_documents(np.array([4, 23, 10, 20, 1]), 10).tolist() == [4, 10, 10, 3, 10, 10, 10, 1]


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([6, 5, 4, 3, 2], [0, 1, 0, 1, 1]),  # 4 fits exactly beside 6, although 5 has room for it, too
        ([5, 5, 5], [0, 0, 1]),
        ([1, 10, 9], [1, 0, 1]),
        ([7, 7, 3, 3], [0, 1, 0, 1]),  # of two samples with the same room, the first one is chosen
        ([2, 3, 4, 8, 9], [1, 0, 0, 1, 2]),
        ([], []),
    ],
)
def test_each_piece_goes_into_the_fullest_sample_with_room(pieces: list[int], expected: list[int]) -> None:
    assert assign_samples(np.array(pieces, np.int64), 10).tolist() == expected


def pack_naively(pieces: list[int], sample_tokens: int) -> list[int]:
    """Best-fit decreasing by its definition, comparing every piece with every sample."""
    samples: list[list[int]] = []
    for piece in sorted(range(len(pieces)), key=lambda piece: (-pieces[piece], piece)):
        rooms = [sample_tokens - sum(pieces[other] for other in sample) for sample in samples]
        possible = [(room, number) for number, room in enumerate(rooms) if room >= pieces[piece]]
        if possible:
            samples[min(possible)[1]].append(piece)
        else:
            samples.append([piece])
    samples.sort(key=lambda sample: sample[0])
    return [next(n for n, sample in enumerate(samples) if piece in sample) for piece in range(len(pieces))]


def test_the_result_is_that_of_a_naive_best_fit_for_any_lengths() -> None:
    generator = np.random.default_rng(5)
    for _ in range(150):
        sample_tokens = int(generator.integers(1, 40))
        pieces = generator.integers(1, sample_tokens + 1, generator.integers(1, 60))
        assert assign_samples(pieces, sample_tokens).tolist() == pack_naively(pieces.tolist(), sample_tokens)


def test_a_window_is_laid_out_by_sample_and_in_it_by_text() -> None:
    packing = pack_documents(np.array([4, 23, 5, 2]), 10)
    samples_nt = packing.arrange(np.arange(34), 10, padding=-1)
    assert packing.sample_lengths.tolist() == [10, 10, 5, 9]
    assert samples_nt.tolist() == [
        list(range(4, 14)),
        list(range(14, 24)),
        [24, 25, 26, 32, 33, -1, -1, -1, -1, -1],
        [0, 1, 2, 3, 27, 28, 29, 30, 31, -1],
    ]


def test_windows_end_with_the_unit_that_completes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_fit, "WINDOW_TOKENS", 10)
    monkeypatch.setattr(best_fit, "WINDOW_SAMPLES", 2)
    ends = np.array([6, 12, 14, 22, 25])
    assert divide_into_windows(ends, 4).tolist() == [2, 4, 5]
    assert divide_into_windows(ends, 10).tolist() == [4, 5], "20 tokens have room for two samples"


# The preparation


def samples_of(folder: Path) -> list[tuple[list[int], int]]:
    """All samples of a split with their lengths without padding, as StreamingDataset's own reader sees them."""
    from streaming import LocalDataset

    dataset = LocalDataset(local=str(folder))
    samples = [dataset[index] for index in range(len(dataset))]
    return [(sample["tokens"].tolist(), int(sample[UNPADDED_LENGTH])) for sample in samples]


def pieces_of(tokens: list[int], end: int) -> list[tuple[int, ...]]:
    """Cut a sample after each end-of-text token."""
    pieces, piece = [], []
    for token in tokens:
        piece.append(token)
        if token == end:
            pieces.append(tuple(piece))
            piece = []
    return [*pieces, tuple(piece)] if piece else pieces


def test_every_document_is_whole_unless_it_is_longer_than_a_sample(packed: Path, tokenizer, documents) -> None:
    end = tokenizer.eos_token_id
    pieces = []
    num_cut = 0.0
    for split, counts in load_summary(packed).splits.items():
        samples = samples_of(packed / split)
        for tokens, length in samples:
            assert tokens[length:] == [end] * (SEQ_LEN - length), "padding is the end-of-text token"
            pieces += pieces_of(tokens[:length], end)
        assert counts.samples == len(samples)
        assert counts.tokens == sum(length for _, length in samples)
        assert counts.remainder_tokens == 0
        assert counts.padding_fraction == pytest.approx(1 - counts.tokens / (SEQ_LEN * counts.samples))
        num_cut += (counts.cut_fraction or 0) * counts.documents

    texts = [joined_tokens(tokenizer, [document]) for document in documents]
    assert 0 < sum(len(ids) > SEQ_LEN for ids in texts) < len(texts)
    assert num_cut == pytest.approx(sum(len(ids) > SEQ_LEN for ids in texts))
    expected = [tuple(ids[start : start + SEQ_LEN]) for ids in texts for start in range(0, len(ids), SEQ_LEN)]
    assert sorted(pieces) == sorted(expected)


def test_concatenation_counts_the_documents_that_it_cuts(
    wanted: PrepareRequest, tokenizer, documents, tmp_path
) -> None:
    summary = prepare(replace(wanted, pack="concat", val_fraction=0), tmp_path / "out", num_workers=1)
    ends = np.cumsum([len(joined_tokens(tokenizer, [document])) for document in documents]).tolist()
    begins = [0, *ends[:-1]]
    cuts = [begin // SEQ_LEN != (end - 1) // SEQ_LEN for begin, end in zip(begins, ends, strict=True)]
    assert summary.splits["train"].cut_fraction == pytest.approx(sum(cuts) / len(documents))
    assert summary.splits["train"].padding_fraction == 0


def test_shards_with_padding_are_those_of_the_librarys_own_writer(packed: Path, tmp_path: Path) -> None:
    from tests.helpers.mds_writer import MDSWriter

    columns = {"tokens": f"ndarray:uint16:{SEQ_LEN}", UNPADDED_LENGTH: "uint32"}
    with MDSWriter(columns=columns, out=str(tmp_path), hashes=["xxh3_64"], size_limit=6_000) as theirs:
        for tokens, length in samples_of(packed / "train"):
            theirs.write({"tokens": np.array(tokens, np.uint16), UNPADDED_LENGTH: length})
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) > 2
    assert names == sorted(path.name for path in (packed / "train").iterdir())
    for name in names:
        assert (tmp_path / name).read_bytes() == (packed / "train" / name).read_bytes()


def test_the_table_shows_cut_documents_and_padding(packed: Path, capsys: pytest.CaptureFixture) -> None:
    summary = load_summary(packed)
    print_summary(summary, packed)
    train = summary.splits["train"]
    assert train.cut_fraction is not None and train.padding_fraction is not None
    cut = f"train: {100 * train.cut_fraction:.1f} % of the documents are divided between samples"
    padding = f"{100 * train.padding_fraction:.2f} % of the tokens are padding"
    shown = " ".join(capsys.readouterr().out.split())  # a narrow terminal wraps the line
    assert f"{cut}, {padding} " in shown


def test_a_preparation_from_before_the_option_is_found_finished(wanted: PrepareRequest, tmp_path: Path) -> None:
    concatenated = replace(wanted, pack="concat")
    prepare(concatenated, tmp_path, num_workers=1)
    file = tmp_path / "summary.json"
    content = json.loads(file.read_text())
    del content["request"]["pack"]
    for split in content["splits"].values():
        del split["cut_fraction"], split["padding_fraction"]
    file.write_text(json.dumps(content))

    said: list[str] = []
    prepare(concatenated, tmp_path, num_workers=1, notify=said.append)
    assert said == [f"{tmp_path} is complete: the same preparation finished there before"]
    with pytest.raises(DataError, match="holds another preparation: pack was 'concat' and is 'best-fit' now"):
        prepare(wanted, tmp_path, num_workers=1)


def test_another_way_to_pack_is_refused() -> None:
    with pytest.raises(DataError, match="--pack first-fit: expected concat or best-fit"):
        request("text", "tokenizer", pack="first-fit")


# Reading


@pytest.mark.parametrize("length", [0, 5, -1, "3", 2.0])
def test_a_length_that_is_none_is_refused(length: object) -> None:
    sample = {"tokens": np.arange(4), UNPADDED_LENGTH: length}
    with pytest.raises(DataError, match=r"column unpadded_length holds .*, expected a number from 1 to 4"):
        RowReader(4, 10, None, "int64").read(sample)


def test_padding_is_read_as_no_token_also_in_a_row_that_is_truncated() -> None:
    sample = {"tokens": np.array([5, 6, 0, 0, 0, 0]), UNPADDED_LENGTH: np.uint32(2)}
    assert RowReader(6, 10, None, "int64").read(sample).tolist() == [5, 6, *[PAD_TOKEN] * 4]
    shortened = RowReader(3, 10, None, "int64", allow_truncation=True)
    assert shortened.read(sample).tolist() == [5, 6, PAD_TOKEN]


def test_baselines_do_not_count_padding(packed: Path, tmp_path: Path) -> None:
    """A model of pairs has the same probabilities as one of the texts that are in the samples."""
    rows = [[token for token in row if token >= 0] for row in read_tokens(packed / "train").tolist()]
    assert min(map(len, rows)) < SEQ_LEN
    counts = np.bincount([token for row in rows for token in row], minlength=600) + 1
    log_p = np.log(counts / counts.sum())
    expected = -np.mean([log_p[token] for row in rows for token in row[1:]])
    measured = measure_baselines(packed / "train", packed / "train", 600)
    assert measured.unigram == pytest.approx(expected)

    pairs = [pair for row in rows for pair in pairwise(row)]
    pair_counts, first_counts = Counter(pairs), Counter(first for first, _ in pairs)
    losses = [-np.log((pair_counts[pair] + 1) / (first_counts[pair[0]] + 600)) for pair in pairs]
    assert measured.bigram == pytest.approx(np.mean(losses))


# Training


def train_packed(folder: Path, config: dict[str, Any], name: str, num_ranks: int) -> list[dict[str, Any]]:
    path = write_config(folder / f"{name}.yaml", {**config, "run_name": name})
    train([path], folder, num_ranks).check()
    return read_metrics(folder / "runs" / name)


def packed_config(packed: Path, **changes: Any) -> dict[str, Any]:
    """A run of three batches. Every batch has padding."""
    data = {"tokenizer__name": str(packed / "tokenizer"), "model__vocab_size": 600}
    return tiny_config(packed, max_duration="3ba", eval_interval="3ba", **data, **changes)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"accumulate_train_batch_on_tokens": False}, marks=pytest.mark.slow),
        pytest.param({"sequence_ids": True}, marks=pytest.mark.slow),
    ],
)
def test_padding_has_no_part_in_training_and_validation(
    packed: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch, changes: dict[str, Any]
) -> None:
    separator = None
    if changes == {"sequence_ids": True}:
        separator = tokenizer.eos_token_id
        changes = {"model__attn_config": {"attn_uses_sequence_id": True}}
    config = packed_config(packed, **changes)
    expected = train_by_hand(tmp_path, config, 3, separator=separator)
    for num_ranks in (1, 2):
        records = train_packed(tmp_path, config, f"ranks-{num_ranks}", num_ranks)
        assert_is_by_hand(records, expected, relative=1e-4)

    # A negative control: with padding counted, both losses are others.
    monkeypatch.setattr("llmfoundry_lite.data.rows.unpadded_length", lambda sample, num_tokens: num_tokens)
    wrong = train_by_hand(tmp_path, config, 3, separator=separator)
    for key in ("loss/train/total", "eval/loss"):
        assert abs(values(wrong, key)[-1] - values(expected, key)[-1]) > 1e-3


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_run_with_padding_is_bit_equal_when_it_resumes_on_other_ranks(packed: Path, tmp_path: Path) -> None:
    """Its batches can be read and replayed, too: their digests are those in the log."""
    exact = {"exact_sums": True, "device_train_microbatch_size": 2}
    config = packed_config(packed, save_interval="1ba", **exact)
    whole = train_packed(tmp_path, config, "whole", 1)
    train_packed(tmp_path, config | {"stop_at": "1ba"}, "moved", 1)
    moved = train_packed(tmp_path, config | {"autoresume": True}, "moved", 2)
    for key in ("loss/train/total", "grad_norm", "data/digest", "time/token", "eval/loss"):
        assert values(moved, key) == values(whole, key), key

    tokens = values(whole, "time/token")
    batches = list(read_batches(tmp_path / "runs/whole", 1, 3))
    assert [batch.digest for batch in batches] == values(whole, "data/digest")
    assert np.diff(tokens, prepend=0).tolist() == [(batch.tokens_bt >= 0).sum() for batch in batches]
    assert tokens[-1] < 3 * 8 * SEQ_LEN
    shown = read_batch(str(tmp_path / "runs/whole"), 2)
    assert min(len(row.tokens_t) for row in shown.rows) < SEQ_LEN
