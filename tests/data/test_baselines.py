"""What counting alone achieves, against counts by hand."""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from streaming import MDSWriter

from llmfoundry_lite.data.baselines import measure_baselines

VOCAB_SIZE = 5
TRAIN, VALIDATION = [[0, 1, 2, 1], [1, 2, 3, 0], [2, 2, 1, 4]], [[0, 1, 2, 2], [3, 0, 1, 4]]


def test_baselines_are_those_of_counts_smoothed_by_one(tmp_path):
    for name, rows in (("train", TRAIN), ("val", VALIDATION)):
        with MDSWriter(out=str(tmp_path / name), columns={"tokens": "ndarray:uint16"}) as writer:
            for row in rows:
                writer.write({"tokens": np.array(row, np.uint16)})
    found = measure_baselines(tmp_path / "train", tmp_path / "val", VOCAB_SIZE)
    counts = Counter(token for row in TRAIN for token in row)
    pairs = Counter(pair for row in TRAIN for pair in pairwise(row))  # none from the end of a sample to the next
    firsts = Counter(pair[0] for pair in pairs.elements())
    unigram = [(counts[token] + 1) / (12 + VOCAB_SIZE) for row in VALIDATION for token in row[1:]]
    bigram = [(pairs[a, b] + 1) / (firsts[a] + VOCAB_SIZE) for row in VALIDATION for a, b in pairwise(row)]
    assert found == pytest.approx([-sum(map(math.log, shares)) / len(shares) for shares in (unigram, bigram)])
