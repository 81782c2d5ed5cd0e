"""The cross-entropy that counting achieves: a unigram and a bigram model on the same tokens.

`measure_baselines` counts; `read_shards` reads the tokens of a local folder, and checks them as it goes, since anybody
may have written the folder. Shapes: n samples, t tokens of a sample, v tokens of the vocabulary.
"""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from streaming.base.format import FileInfo
from streaming.base.format.mds import MDSReader

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
    train_nt = read_tokens(train_folder, vocab_size)
    eval_nt = read_tokens(eval_folder, vocab_size)

    counts_v = np.bincount(train_nt.ravel(), minlength=vocab_size)
    unigram_v = -np.log((counts_v + 1) / (counts_v.sum() + vocab_size))

    # A pair has the number a * V + b. Only the pairs that occur are counted, since there are V * V possible ones.
    pairs, pair_counts = np.unique(_pairs_of(train_nt, vocab_size), return_counts=True)
    eval_pairs = _pairs_of(eval_nt, vocab_size)
    positions = np.minimum(np.searchsorted(pairs, eval_pairs), len(pairs) - 1)
    is_known = pairs[positions] == eval_pairs
    eval_pair_counts = np.where(is_known, pair_counts[positions], 0)

    first_counts_v = np.bincount(train_nt[:, :-1].ravel(), minlength=vocab_size)
    eval_first_counts = first_counts_v[eval_pairs // vocab_size]
    bigram = -np.log((eval_pair_counts + 1) / (eval_first_counts + vocab_size))
    return Baselines(unigram=float(unigram_v[eval_nt[:, 1:]].mean()), bigram=float(bigram.mean()))


def _pairs_of(tokens_nt: NDArray[np.int64], vocab_size: int) -> NDArray[np.int64]:
    """Return the number a * V + b of each token a and the token b behind it, in the same sample [n * (t - 1)]."""
    return (tokens_nt[:, :-1] * vocab_size + tokens_nt[:, 1:]).ravel()


def read_tokens(folder: Path, vocab_size: int = MAX_VOCAB_SIZE) -> NDArray[np.int64]:
    """Read all samples of a small MDS folder: [n, t]. Raises as `read_shards` does, and for more than MAX_BYTES."""
    table = _read_table(folder)
    num_bytes = int(table.rows["raw_bytes"].sum(dtype=np.int64))
    if num_bytes > MAX_BYTES:
        raise ValueError(f"its shards have {num_bytes:,} bytes, expected at most {MAX_BYTES:,}")
    return np.concatenate(list(read_shards(folder, vocab_size)))


def read_shards(folder: Path, vocab_size: int = MAX_VOCAB_SIZE) -> Iterator[NDArray[np.int64]]:
    """Yield the samples of each shard of a local MDS folder, compressed or not: [n, t]. Checks it against the index.

    Plain bytes are read as the widest type that gives the first shard valid token ids. Raises OSError, LookupError or
    ValueError if the folder holds no whole token shards, and TooLargeError for a shard of more than MAX_BYTES.
    """
    table = _read_table(folder)
    token_type = None  # of plain bytes; the first shard that has such decides it
    for shard in range(len(table)):
        samples = _read_shard(table, shard, folder)
        raw_samples = [sample for sample in samples if isinstance(sample, bytes)]
        if raw_samples:
            token_type = _find_token_type(raw_samples, vocab_size, known_type=token_type)
        if samples:
            yield np.stack([_as_token_ids(sample, token_type) for sample in samples])


def _read_table(folder: Path) -> ShardTable:
    """Read the index of a folder."""
    return ShardTable(*read_indexes([folder / INDEX], [None], allow_unhashed_shards=True))


def _read_shard(table: ShardTable, shard: int, folder: Path) -> list[Any]:
    """Return the column `tokens` of each sample of a shard: arrays, or bytes where the column has no type.

    A packed shard is unpacked into a temporary folder. Both files are checked against the index.
    """
    if table.rows["raw_bytes"][shard] > MAX_BYTES:
        remedy = "write the data again in smaller shards (size_limit)"
        raise too_large(folder / table.name(shard), MAX_BYTES, "a shard", remedy)

    with TemporaryDirectory() as scratch_folder:
        reader = table.reader(shard, str(folder))
        is_raw_here = (folder / reader.raw_data.basename).exists()
        if reader.zip_data is not None and not is_raw_here:
            packed_path = folder / reader.zip_data.basename
            _check_file(packed_path, reader.zip_data)
            reader = table.reader(shard, scratch_folder)
            raw_path = Path(scratch_folder, reader.raw_data.basename)
            raw_path.parent.mkdir(parents=True, exist_ok=True)
            unpack_shard(packed_path, reader, raw_path)
        _check_file(Path(reader.dirname, reader.raw_data.basename), reader.raw_data)
        return _read_samples(reader)


def _read_samples(reader: MDSReader) -> list[Any]:
    """Return the column `tokens` of each sample. Raises ValueError where they are longer together than their file.

    A made-up file could have each sample point to the same bytes, and would fill the memory.
    """
    samples = []
    bytes_left = reader.raw_data.bytes
    for number in range(reader.samples):
        sample = reader[number]["tokens"]
        samples.append(sample)
        bytes_left -= np.asarray(sample).nbytes
        if bytes_left < 0:
            raise ValueError(f"{reader.raw_data.basename} is damaged: its samples overlap")
    return samples


def _check_file(path: Path, info: FileInfo) -> None:
    """Raise ValueError if a file is not the one that the index describes."""
    damage = find_damage(str(path), info)
    if damage:
        raise ValueError(f"{path.name} is damaged: {damage}")


def _find_token_type(raw_samples: list[bytes], vocab_size: int, known_type: str | None) -> str:
    """Return the number type of samples of plain bytes: that of earlier shards, or else the widest that fits.

    Raises ValueError if none fits.
    """
    token_types = TOKEN_TYPES if known_type is None else (known_type,)
    for token_type in token_types:
        if _could_be_tokens(raw_samples, token_type, vocab_size, is_known=known_type is not None):
            return token_type
    raise ValueError(f"its rows are bytes of no numbers below {vocab_size:,}: neither {', '.join(token_types)}")


def _could_be_tokens(raw_samples: list[bytes], token_type: str, vocab_size: int, *, is_known: bool) -> bool:
    """Return whether all samples may be tokens of this type.

    Wide tokens read as narrow ones are at least half zeros. So at most a quarter may be, unless the type `is_known`
    from earlier shards, or is the widest.
    """
    itemsize = np.dtype(token_type).itemsize
    if any(len(sample) % itemsize for sample in raw_samples):
        return False
    if token_type == "uint8" and vocab_size > 256:
        return False

    tokens = np.frombuffer(b"".join(raw_samples), token_type)
    is_widest = itemsize == 8
    has_few_zeros = bool(4 * np.count_nonzero(tokens) > 3 * len(tokens))
    if not (is_known or is_widest or has_few_zeros):
        return False
    return bool(((tokens >= 0) & (tokens < vocab_size)).all())


def _as_token_ids(sample: Any, token_type: str | None) -> NDArray[np.int64]:
    """Return the token ids of a sample [t]; bytes are read as `token_type`. Raises DataError or ValueError."""
    tokens = np.frombuffer(sample, token_type) if isinstance(sample, bytes) else sample
    check_whole_numbers(tokens)
    token_ids = tokens.astype(np.int64)
    for token_id in (int(token_ids.min()), int(token_ids.max())):
        if not 0 <= token_id < MAX_VOCAB_SIZE:
            raise ValueError(f"{token_id} is no token")
    return token_ids
