"""What counting alone achieves, against counts by hand."""

import json
import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from streaming import MDSWriter

from llmfoundry_lite.data.baselines import measure_baselines, read_tokens

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


def test_a_small_folder_takes_no_more_memory_than_its_index_says(tmp_path):
    with MDSWriter(out=str(tmp_path), columns={"tokens": "bytes"}) as writer:
        for _ in range(64):
            writer.write({"tokens": b"\x7f" * 400})
    with pytest.raises(ValueError, match=r"a vocabulary of 1,000,000,000,000, expected at most 16,777,216"):
        measure_baselines(tmp_path, tmp_path, 10**12)
    shard, index = tmp_path / "shard.00000.mds", tmp_path / "index.json"
    content = bytearray(shard.read_bytes())
    begin = int.from_bytes(content[4:8], "little")
    content[4:264] = np.array([begin, begin + 12] * 33, "<u4")[:65].tobytes()  # each second one ends before it begins
    shard.write_bytes(content)
    with np.errstate(over="ignore"), pytest.raises(ValueError, match=r"00000\.mds is damaged: its samples overlap"):
        read_tokens(tmp_path)
    facts = json.loads(index.read_text())
    facts["shards"][0]["raw_data"]["bytes"] = 1 << 31
    index.write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=r"its shards have 2,147,483,648 bytes, expected at most 1,073,741,824"):
        read_tokens(tmp_path)
