"""Baselines for a trained model: the cross-entropy of a unigram and a bigram model on the same tokens.

`measure_baselines` fits and scores both models. `read_shards` reads the tokens of a local folder. Since anybody may
have written the folder, it checks what it reads. Suffixes of array names: n samples, t tokens of a sample, v
vocabulary.
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
from llmfoundry_lite.data.index_files import find_local_indexes
from llmfoundry_lite.data.rows import (
    MAX_VOCAB_SIZE,
    PAD_TOKEN,
    TOKEN_TYPES,
    UNPADDED_LENGTH,
    check_whole_numbers,
    unpadded_length,
)
from llmfoundry_lite.data.shard_table import ShardTable, read_indexes
from llmfoundry_lite.data.streams import find_damage, unpack_shard

MAX_BYTES = 1 << 30
"""Limit of bytes in memory at once: those of an uncompressed shard, or of all shards of a small data set."""

COLUMNS = ("tokens", UNPADDED_LENGTH)
"""Columns that are read."""


class Baselines(NamedTuple):
    """Cross-entropy of the two models in nats per token."""

    unigram: float
    bigram: float


def measure_baselines(train_folder: Path, eval_folder: Path, vocab_size: int) -> Baselines:
    """Fit a unigram and a bigram model on the training tokens, and score them on the validation tokens.

    Both have add-one smoothing: the probability of token b after token a is (count(a b) + 1) / (count(a) + V), with V
    the vocabulary size. As in the loss of a language model, the first token of each sample is not scored.

    All samples are in memory at once, so the data must be small. Raises the errors of `read_tokens`, and ValueError for
    a `vocab_size` out of range. Suffixes of array names: n samples, t tokens of a sample, v vocabulary.
    """
    if not 0 < vocab_size <= MAX_VOCAB_SIZE:
        raise ValueError(f"a vocabulary of {vocab_size:,}, expected at most {MAX_VOCAB_SIZE:,}")
    train_nt = read_tokens(train_folder, vocab_size)
    eval_nt = read_tokens(eval_folder, vocab_size)

    # The unigram model: the loss of each token.
    counts_v = np.bincount(train_nt[train_nt >= 0], minlength=vocab_size)
    unigram_losses_v = -np.log((counts_v + 1) / (counts_v.sum() + vocab_size))
    scored_tokens = eval_nt[:, 1:][eval_nt[:, 1:] >= 0]

    # The bigram model: how often each validation bigram occurs in training. Only the bigrams that occur are counted,
    # because V * V are possible.
    train_bigrams = _bigram_ids(train_nt, vocab_size)
    bigrams, bigram_counts = np.unique(train_bigrams, return_counts=True)
    eval_bigrams = _bigram_ids(eval_nt, vocab_size)
    positions = np.minimum(np.searchsorted(bigrams, eval_bigrams), len(bigrams) - 1)
    occurs_in_training = bigrams[positions] == eval_bigrams
    eval_bigram_counts = np.where(occurs_in_training, bigram_counts[positions], 0)

    # The loss of each validation bigram.
    context_counts_v = np.bincount(train_bigrams // vocab_size, minlength=vocab_size)
    eval_context_counts = context_counts_v[eval_bigrams // vocab_size]
    bigram_losses = -np.log((eval_bigram_counts + 1) / (eval_context_counts + vocab_size))
    return Baselines(unigram=float(unigram_losses_v[scored_tokens].mean()), bigram=float(bigram_losses.mean()))


def _bigram_ids(tokens_nt: NDArray[np.int64], vocab_size: int) -> NDArray[np.int64]:
    """Return a number a * vocab_size + b for every two consecutive tokens a and b of a sample.

    `tokens_nt` are n samples of t tokens. The result is flat, [n * (t - 1)] if there is no padding, which has no
    numbers. With a vocabulary of 10, the samples 3 1 4 and 1 5 9 have the numbers 31, 14, 15 and 59.
    """
    bigrams_nt = tokens_nt[:, :-1] * vocab_size + tokens_nt[:, 1:]
    return bigrams_nt[tokens_nt[:, 1:] >= 0]  # padding is only at the end of a sample


def read_tokens(folder: Path, vocab_size: int = MAX_VOCAB_SIZE) -> NDArray[np.int64]:
    """Read all samples of a small MDS folder as an array [samples, tokens of a sample], in which padding is PAD_TOKEN.

    Raises the errors of `read_shards`, and ValueError if the shards have more than MAX_BYTES together.
    """
    table = _read_table(folder)
    num_bytes = int(table.rows["raw_bytes"].sum(dtype=np.int64))
    if num_bytes > MAX_BYTES:
        raise ValueError(f"its shards have {num_bytes:,} bytes, expected at most {MAX_BYTES:,}")
    return np.concatenate(list(read_shards(folder, vocab_size)))


def read_shards(folder: Path, vocab_size: int = MAX_VOCAB_SIZE) -> Iterator[NDArray[np.int64]]:
    """Yield the token ids of each shard of a local MDS folder, as an array [samples, tokens of a sample].

    Padding is PAD_TOKEN, which is below 0. Shards may be compressed. Each is checked against the index. If samples are
    plain bytes, they are read as the widest number type that gives valid token ids for the first such shard.

    Raises OSError, LookupError or ValueError if the folder has no complete shards of tokens, and TooLargeError for a
    shard of more than MAX_BYTES.
    """
    table = _read_table(folder)
    token_type = None  # the number type of plain bytes, found in the first shard that has them
    for shard in range(len(table)):
        samples = _read_shard(table, shard, folder)
        raw_samples = [sample["tokens"] for sample in samples if isinstance(sample["tokens"], bytes)]
        if raw_samples:
            token_type = _find_token_type(raw_samples, vocab_size, known_type=token_type)
        if samples:
            yield np.stack([_as_token_ids(sample, token_type) for sample in samples])


def _read_table(folder: Path) -> ShardTable:
    """Read the index files of a local folder of shards. Raises DataError."""
    return ShardTable(*read_indexes([find_local_indexes(folder)], [None], allow_unhashed_shards=True))


def _read_shard(table: ShardTable, shard: int, folder: Path) -> list[dict[str, Any]]:
    """Return the columns COLUMNS of each sample of a shard by their names. `tokens` is an array or plain bytes.

    A compressed shard is decompressed into a temporary folder. Both files are checked against the index. Raises
    TooLargeError, or ValueError for a damaged file.
    """
    if table.rows["raw_bytes"][shard] > MAX_BYTES:
        remedy = "write the data again in smaller shards (size_limit)"
        raise too_large(folder / table.name(shard), MAX_BYTES, "a shard", remedy)

    with TemporaryDirectory() as scratch_folder:
        # Decompress the shard, if only its compressed file is there.
        reader = table.reader(shard, str(folder))
        has_raw_file = (folder / reader.raw_data.basename).exists()
        if reader.zip_data is not None and not has_raw_file:
            compressed_path = folder / reader.zip_data.basename
            _check_file(compressed_path, reader.zip_data)
            reader = table.reader(shard, scratch_folder)
            raw_path = Path(scratch_folder, reader.raw_data.basename)
            raw_path.parent.mkdir(parents=True, exist_ok=True)
            unpack_shard(compressed_path, reader, raw_path)
        _check_file(Path(reader.dirname, reader.raw_data.basename), reader.raw_data)
        return _read_samples(reader)


def _read_samples(reader: MDSReader) -> list[dict[str, Any]]:
    """Return the columns COLUMNS of each sample of a shard by their names, as far as it has them.

    Raises ValueError if the column `tokens` of all samples has more bytes than the shard's file. In a malicious file,
    all samples could point to the same bytes, and reading them would fill the memory.
    """
    samples = []
    bytes_left = reader.raw_data.bytes
    for index in range(reader.samples):
        columns = reader[index]
        sample = {name: columns[name] for name in COLUMNS if name in columns}
        samples.append(sample)
        bytes_left -= np.asarray(sample["tokens"]).nbytes
        if bytes_left < 0:
            raise ValueError(f"{reader.raw_data.basename} is damaged: its samples overlap")
    return samples


def _check_file(path: Path, info: FileInfo) -> None:
    """Raise ValueError unless a file has the size and hashes that `info`, from the index, says."""
    damage = find_damage(str(path), info)
    if damage:
        raise ValueError(f"{path.name} is damaged: {damage}")


def _find_token_type(raw_samples: list[bytes], vocab_size: int, known_type: str | None) -> str:
    """Find the number type as which samples of plain bytes are token ids below `vocab_size`.

    Returns `known_type`, the type of earlier shards, if there is one, and otherwise the widest type that fits. Raises
    ValueError if it does not fit, or none does.
    """
    candidates = TOKEN_TYPES if known_type is None else (known_type,)
    for token_type in candidates:
        if _could_be_tokens(raw_samples, token_type, vocab_size, is_known=known_type is not None):
            return token_type
    raise ValueError(f"its rows are bytes of no numbers below {vocab_size:,}: neither {', '.join(candidates)}")


def _could_be_tokens(raw_samples: list[bytes], token_type: str, vocab_size: int, *, is_known: bool) -> bool:
    """Return whether samples of plain bytes may be token ids of this number type, all below `vocab_size`.

    If numbers of a wider type are read as a narrower one, at least half of them are zeros. So this also returns False
    if a quarter or more are zeros, unless the type `is_known` from earlier shards, or is the widest.
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


def _as_token_ids(sample: dict[str, Any], token_type: str | None) -> NDArray[np.int64]:
    """Convert a sample to int64 token ids [tokens]. Its column `tokens` is an array, or plain bytes of `token_type`.

    Raises DataError if it is no array of integers, and ValueError for a number that cannot be a token id.
    """
    tokens = sample["tokens"]
    if isinstance(tokens, bytes):
        tokens = np.frombuffer(tokens, token_type)
    check_whole_numbers(tokens)
    token_ids = tokens.astype(np.int64)
    for token_id in (int(token_ids.min()), int(token_ids.max())):
        if not 0 <= token_id < MAX_VOCAB_SIZE:
            raise ValueError(f"{token_id} is no token")
    token_ids[unpadded_length(sample, len(token_ids)) :] = PAD_TOKEN
    return token_ids
