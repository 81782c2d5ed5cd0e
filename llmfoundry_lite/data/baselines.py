"""What counting alone achieves: the cross-entropy of a unigram and a bigram model on the same tokens."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from streaming.base.compression import decompress
from streaming.base.format import FileInfo, get_index_basename, reader_from_json
from streaming.base.format.mds.encodings import is_mds_encoding_safe

from llmfoundry_lite.data.rows import MOST_TOKENS, TOKEN_TYPES, check_whole_numbers
from llmfoundry_lite.data.streams import find_damage


class Baselines(NamedTuple):
    """Cross-entropy in nats per token."""

    unigram: float
    bigram: float


def measure_baselines(train_folder: Path, eval_folder: Path, vocab_size: int) -> Baselines:
    """Fit on the training tokens, score the validation tokens that a language model is scored on.

    Both models are smoothed by adding one: p(b | a) = (count(a b) + 1) / (count(a) + V). Scored, as a model's loss
    is, on every token of a sample but the first. Samples are [n, t] in memory: for small data sets.
    """
    train_nt, eval_nt = read_tokens(train_folder, vocab_size), read_tokens(eval_folder, vocab_size)
    counts_v = np.bincount(train_nt.ravel(), minlength=vocab_size)
    unigram_v = -np.log((counts_v + 1) / (counts_v.sum() + vocab_size))
    pairs, pair_counts = np.unique(_pairs(train_nt, vocab_size), return_counts=True)
    firsts_v = np.bincount(train_nt[:, :-1].ravel(), minlength=vocab_size)
    wanted = _pairs(eval_nt, vocab_size)
    at = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    joint = np.where(pairs[at] == wanted, pair_counts[at], 0)
    bigram = -np.log((joint + 1) / (firsts_v[wanted // vocab_size] + vocab_size))
    return Baselines(unigram=float(unigram_v[eval_nt[:, 1:]].mean()), bigram=float(bigram.mean()))


def read_tokens(folder: Path, vocab_size: int = MOST_TOKENS) -> NDArray[np.int64]:
    """All samples of a local MDS folder, [n, t], compressed or not, each shard checked against the index. Rows of bytes
    are of the widest type that makes all of them tokens of the vocabulary. Raises OSError, KeyError or ValueError if it
    holds no whole token shards."""
    index = json.loads((folder / get_index_basename()).read_text())
    if not isinstance(index, dict):
        raise ValueError(f"{get_index_basename()} is no JSON object")
    rows = []
    with TemporaryDirectory() as scratch:
        for entry in index["shards"]:
            if code := next((name for name in entry["column_encodings"] if not is_mds_encoding_safe(name)), None):
                raise ValueError(f"a column is of type {code}, which may run code when it is read")
            shard: Any = reader_from_json(str(folder), None, entry)
            if shard.zip_data is not None and not (folder / shard.raw_data.basename).exists():
                _check(folder / shard.zip_data.basename, shard.zip_data)
                content = decompress(shard.compression, (folder / shard.zip_data.basename).read_bytes())
                shard = reader_from_json(scratch, None, entry)
                Path(scratch, shard.raw_data.basename).parent.mkdir(parents=True, exist_ok=True)
                Path(scratch, shard.raw_data.basename).write_bytes(content)
            raw = Path(shard.dirname, shard.raw_data.basename)
            _check(raw, shard.raw_data)
            rows += [shard[i]["tokens"] for i in range(shard.samples)]
            if shard.dirname == scratch:
                raw.unlink()
    raw = [row for row in rows if isinstance(row, bytes)]
    dtype = next((name for name in TOKEN_TYPES if _are_tokens(raw, name, vocab_size)), None)
    if dtype is None:
        raise ValueError(f"its rows are bytes of no numbers below {vocab_size:,}: neither {', '.join(TOKEN_TYPES)}")
    return np.stack([_row(row, dtype) for row in rows])


def _check(path: Path, info: FileInfo) -> None:
    if damage := find_damage(str(path), info):
        raise ValueError(f"{path.name} is damaged: {damage}")


def _are_tokens(raw: list[bytes], dtype: str, vocab_size: int) -> bool:
    """Whether all rows may be tokens of this type. Wider ones, read as narrow ones, are half zeros."""
    size = np.dtype(dtype).itemsize
    if any(len(row) % size for row in raw) or (dtype == "uint8" and vocab_size > 256):
        return False
    tokens = np.frombuffer(b"".join(raw), dtype)
    is_dense = size == 8 or bool(4 * np.count_nonzero(tokens) > 3 * len(tokens))
    return not raw or (is_dense and bool(((tokens >= 0) & (tokens < vocab_size)).all()))


def _row(tokens: Any, dtype: str) -> NDArray[np.int64]:
    row = np.frombuffer(tokens, dtype) if isinstance(tokens, bytes) else tokens
    check_whole_numbers(row)
    found = row.astype(np.int64)
    if outside := next((int(end) for end in (found.min(), found.max()) if not 0 <= end < MOST_TOKENS), None):
        raise ValueError(f"{outside} is no token")
    return found


def _pairs(tokens_nt: NDArray[np.int64], vocab_size: int) -> NDArray[np.int64]:
    return (tokens_nt[:, :-1] * vocab_size + tokens_nt[:, 1:]).ravel()
