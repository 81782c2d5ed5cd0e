"""The cross-entropy that counting achieves: a unigram and a bigram model on the same tokens."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from streaming.base.format import FileInfo

from llmfoundry_lite.bounded import too_large
from llmfoundry_lite.data.rows import MAX_VOCAB_SIZE, TOKEN_TYPES, check_whole_numbers
from llmfoundry_lite.data.shard_table import ShardTable, read_indexes
from llmfoundry_lite.data.streams import INDEX, find_damage, unpack_shard

MAX_BYTES = 1 << 30
"""Most bytes in memory at once: a shard or a small data set, unpacked, with eight bytes a token."""


class Baselines(NamedTuple):
    """Cross-entropy in nats per token."""

    unigram: float
    bigram: float


def measure_baselines(train_folder: Path, eval_folder: Path, vocab_size: int) -> Baselines:
    """Fit both models on the training tokens, and score them on the validation tokens.

    Both are smoothed by adding one: p(b | a) = (count(a b) + 1) / (count(a) + V). As in a model's loss, the first
    token of each sample is not scored. All samples [n, t] are in memory at once, so the data must be small. Raises as
    `read_tokens` does.
    """
    if not 0 < vocab_size <= MAX_VOCAB_SIZE:
        raise ValueError(f"a vocabulary of {vocab_size:,}, expected at most {MAX_VOCAB_SIZE:,}")
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


def read_tokens(folder: Path, vocab_size: int = MAX_VOCAB_SIZE) -> NDArray[np.int64]:
    """Read all samples of a small MDS folder: [n, t]. Raises as `read_shards` does, and for more than MAX_BYTES."""
    table = _table_of(folder)
    if (num_bytes := int(table.rows["raw_bytes"].sum(dtype=np.int64))) > MAX_BYTES:
        raise ValueError(f"its shards have {num_bytes:,} bytes, expected at most {MAX_BYTES:,}")
    return np.concatenate(list(read_shards(folder, vocab_size)))


def read_shards(folder: Path, vocab_size: int = MAX_VOCAB_SIZE) -> Iterator[NDArray[np.int64]]:
    """Yield the samples of each shard of a local MDS folder, compressed or not: [n, t]. Checks it against the index.

    Plain bytes are read as the widest type that gives the first shard valid token ids. Raises OSError, LookupError or
    ValueError if the folder holds no whole token shards, and TooLargeError for a shard of more than MAX_BYTES.
    """
    table, dtype = _table_of(folder), None
    for shard in range(len(table)):
        rows = _read_shard(table, shard, folder)
        raw = [row for row in rows if isinstance(row, bytes)]
        dtypes = TOKEN_TYPES if dtype is None else (dtype,)
        found = next((name for name in dtypes if _are_tokens(raw, name, vocab_size, is_known=dtype is not None)), None)
        if found is None:
            raise ValueError(f"its rows are bytes of no numbers below {vocab_size:,}: neither {', '.join(dtypes)}")
        dtype = found if raw else dtype
        if rows:
            yield np.stack([_row(row, found) for row in rows])


def _table_of(folder: Path) -> ShardTable:
    return ShardTable(*read_indexes([folder / INDEX], [None], allow_unhashed_shards=True))


def _read_shard(table: ShardTable, shard: int, folder: Path) -> list[Any]:
    if table.rows["raw_bytes"][shard] > MAX_BYTES:
        remedy = "write the data again in smaller shards (size_limit)"
        raise too_large(folder / table.name(shard), MAX_BYTES, "a shard", remedy)
    rows = []
    with TemporaryDirectory() as scratch:
        reader = table.reader(shard, str(folder))
        if reader.zip_data is not None and not (folder / reader.raw_data.basename).exists():
            zipped = folder / reader.zip_data.basename
            _check(zipped, reader.zip_data)
            reader = table.reader(shard, scratch)
            raw = Path(scratch, reader.raw_data.basename)
            raw.parent.mkdir(parents=True, exist_ok=True)
            unpack_shard(zipped, reader, raw)
        _check(Path(reader.dirname, reader.raw_data.basename), reader.raw_data)
        room = reader.raw_data.bytes
        for number in range(reader.samples):
            rows.append(row := reader[number]["tokens"])
            room -= np.asarray(row).nbytes
            if room < 0:
                raise ValueError(f"{reader.raw_data.basename} is damaged: its samples overlap")
    return rows


def _check(path: Path, info: FileInfo) -> None:
    if damage := find_damage(str(path), info):
        raise ValueError(f"{path.name} is damaged: {damage}")


def _are_tokens(raw: list[bytes], dtype: str, vocab_size: int, *, is_known: bool) -> bool:
    """Return whether all rows may be tokens of this type. Wide tokens read as narrow ones are at least half zeros."""
    size = np.dtype(dtype).itemsize
    if any(len(row) % size for row in raw) or (dtype == "uint8" and vocab_size > 256):
        return False
    tokens = np.frombuffer(b"".join(raw), dtype)
    is_dense = is_known or size == 8 or bool(4 * np.count_nonzero(tokens) > 3 * len(tokens))
    return not raw or (is_dense and bool(((tokens >= 0) & (tokens < vocab_size)).all()))


def _row(tokens: Any, dtype: str) -> NDArray[np.int64]:
    row = np.frombuffer(tokens, dtype) if isinstance(tokens, bytes) else tokens
    check_whole_numbers(row)
    found = row.astype(np.int64)
    if outside := next((int(end) for end in (found.min(), found.max()) if not 0 <= end < MAX_VOCAB_SIZE), None):
        raise ValueError(f"{outside} is no token")
    return found


def _pairs(tokens_nt: NDArray[np.int64], vocab_size: int) -> NDArray[np.int64]:
    return (tokens_nt[:, :-1] * vocab_size + tokens_nt[:, 1:]).ravel()
