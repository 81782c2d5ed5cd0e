"""What counting alone achieves, against counts by hand."""

import json
import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from llmfoundry_lite.data.baselines import measure_baselines, read_tokens
from tests.helpers.mds_writer import MDSWriter

VOCAB_SIZE = 5
TRAIN_ROWS = [[0, 1, 2, 1], [1, 2, 3, 0], [2, 2, 1, 4]]
EVAL_ROWS = [[0, 1, 2, 2], [3, 0, 1, 4]]


def write_rows(folder, rows):
    with MDSWriter(out=str(folder), columns={"tokens": "ndarray:uint16"}) as writer:
        for row in rows:
            writer.write({"tokens": np.array(row, np.uint16)})


def cross_entropy(probabilities) -> float:
    """The mean loss of tokens to which a model gave these probabilities."""
    losses = [-math.log(probability) for probability in probabilities]
    return sum(losses) / len(losses)


@pytest.fixture
def baselines(tmp_path):
    write_rows(tmp_path / "train", TRAIN_ROWS)
    write_rows(tmp_path / "eval", EVAL_ROWS)
    return measure_baselines(tmp_path / "train", tmp_path / "eval", VOCAB_SIZE)


def test_the_unigram_model_has_counts_smoothed_by_one(baselines):
    counts = Counter()
    for row in TRAIN_ROWS:
        counts.update(row)

    probabilities = []
    for row in EVAL_ROWS:
        for token in row[1:]:  # the first token of a sample has no loss
            probabilities.append((counts[token] + 1) / (counts.total() + VOCAB_SIZE))
    assert baselines.unigram == pytest.approx(cross_entropy(probabilities))


def test_the_bigram_model_has_counts_smoothed_by_one(baselines):
    pair_counts = Counter()
    first_counts = Counter()
    for row in TRAIN_ROWS:
        pair_counts.update(pairwise(row))  # no pair from the end of a sample to the next
        first_counts.update(row[:-1])

    probabilities = []
    for row in EVAL_ROWS:
        for first, second in pairwise(row):
            probabilities.append((pair_counts[first, second] + 1) / (first_counts[first] + VOCAB_SIZE))
    assert baselines.bigram == pytest.approx(cross_entropy(probabilities))


# ------------------------------------------------------------------------------- folders that would take much memory


NUM_SAMPLES = 64


@pytest.fixture
def folder_of_bytes(tmp_path):
    """One shard of samples of 400 bytes each."""
    with MDSWriter(out=str(tmp_path), columns={"tokens": "bytes"}) as writer:
        for _ in range(NUM_SAMPLES):
            writer.write({"tokens": b"\x7f" * 400})
    return tmp_path


def test_a_vocabulary_that_takes_too_much_memory_is_refused(folder_of_bytes):
    message = r"a vocabulary of 1,000,000,000,000, expected at most 16,777,216"
    with pytest.raises(ValueError, match=message):
        measure_baselines(folder_of_bytes, folder_of_bytes, 10**12)


def test_a_shard_whose_samples_overlap_is_refused(folder_of_bytes):
    """An MDS shard begins with the number of samples, then the offset of each sample and of the end, as uint32.

    Here the offsets alternate between two, so that every other sample ends before it begins.
    """
    shard = folder_of_bytes / "shard.00000.mds"
    content = bytearray(shard.read_bytes())
    offsets = np.frombuffer(content, "<u4", count=NUM_SAMPLES + 1, offset=4)
    first_offset = offsets[0]
    offsets[0::2] = first_offset
    offsets[1::2] = first_offset + 12
    shard.write_bytes(content)

    message = r"00000\.mds is damaged: its samples overlap"
    with np.errstate(over="ignore"), pytest.raises(ValueError, match=message):
        read_tokens(folder_of_bytes)


def test_shards_that_have_too_many_bytes_by_the_index_are_refused(folder_of_bytes):
    index = folder_of_bytes / "index.json"
    content = json.loads(index.read_text())
    content["shards"][0]["raw_data"]["bytes"] = 1 << 31
    index.write_text(json.dumps(content))

    message = r"its shards have 2,147,483,648 bytes, expected at most 1,073,741,824"
    with pytest.raises(ValueError, match=message):
        read_tokens(folder_of_bytes)
