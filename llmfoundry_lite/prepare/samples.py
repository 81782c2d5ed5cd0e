"""Step 2 of `data prepare`: token files, in order -> samples and shards.

Which documents are held out, the samples and the MDS files depend only on the token files. `pack_samples` is the whole
step: `choose_threshold` decides which documents are held out, and a `SplitWriter` writes the shards of each split.

A document is held out for validation if its split key, a 64-bit hash of its text, is below the threshold. So a
threshold of 5 % of 2^64 holds out about 5 % of the documents, and equal texts are in the same split.
"""

import bz2
import gzip
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from rich.progress import Progress

from llmfoundry_lite.config.data_schema import HELD_OUT_TEXT
from llmfoundry_lite.data.tokenizer import Tokenizer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.files import sync_folder
from llmfoundry_lite.prepare.documents import SKIP_REASONS
from llmfoundry_lite.prepare.request import PrepareRequest
from llmfoundry_lite.prepare.summary import SPLITS, SplitSummary
from llmfoundry_lite.prepare.token_files import load_unit, token_dtype

SHARD_HASH = "xxh3_64"
"""Hash algorithm of the shards in index.json, by which readers detect damage."""

MAX_TEXT_BYTES = 1_000_000
"""Approximate limit of the file HELD_OUT_TEXT in bytes."""

OFFSET_BYTES = 4
"""Size of each offset in an MDS shard, and of its number of samples: uint32."""

MAX_SKIPPED_EXAMPLES = 20
"""Number of skipped documents that the summary names."""


class PackResult(NamedTuple):
    """The splits that `pack_samples` has written, and the documents that were skipped."""

    splits: dict[str, SplitSummary]
    """Split -> its summary, for splits with at least one document."""
    skipped: dict[str, int]
    """Reason in SKIP_REASONS -> number of skipped documents."""
    skipped_examples: list[str]
    """A sentence for each of the first MAX_SKIPPED_EXAMPLES skipped documents."""


def pack_samples(
    partial: Path, num_units: int, request: PrepareRequest, tokenizer: Tokenizer, bars: Progress
) -> PackResult:
    """Cut the tokens of all documents into samples, and write the shards of both splits into `partial`.

    partial: the folder of work in progress, with `num_units` token files in its folder `units`.
    tokenizer: the one that made the tokens. It gives their type, and decodes the held-out text.

    The documents of a split are concatenated in the order of the token files, and cut into samples of
    `request.max_seq_len` tokens. With 4 tokens, the documents 5 6 7 0 and 8 9 0 and 1 2 0 make the samples 5 6 7 0 and
    8 9 0 1, and 2 0 is left over.

    Raises DataError if the training split has less than one sample. After any error, the folders of both splits are
    removed.
    """
    # Decide which documents are held out, which needs a pass over all token files.
    paths = [partial / "units" / f"{number:08}.npz" for number in range(num_units)]
    threshold = choose_threshold(paths, request)

    # Pass the documents of each token file to the writers of their splits.
    num_skipped = np.zeros(len(SKIP_REASONS), np.int64)
    skipped_examples: list[str] = []
    writers = {split: SplitWriter(partial / split, request, token_dtype(tokenizer)) for split in SPLITS}
    held_out_text = HeldOutText()
    task = bars.add_task("writing shards", total=num_units)
    try:
        for path in paths:
            unit = load_unit(path)
            num_skipped += unit.skipped
            skipped_examples += unit.named.tolist()[: MAX_SKIPPED_EXAMPLES - len(skipped_examples)]

            is_held_out = unit.doc_keys < threshold
            for split, is_of_split in (("train", ~is_held_out), ("val", is_held_out)):
                if not is_of_split.any():
                    continue
                tokens = unit.tokens[np.repeat(is_of_split, unit.doc_tokens)]
                num_documents = int(is_of_split.sum())
                text_bytes = int(unit.doc_bytes[is_of_split].sum())
                writers[split].add(tokens, num_documents, text_bytes)
                if split == "val":
                    held_out_text.add(tokens, unit.doc_tokens[is_of_split], tokenizer)
            bars.advance(task)

        # Write what is left, and the indexes.
        skipped_counts: dict[str, int] = dict(zip(SKIP_REASONS, num_skipped.tolist(), strict=True))
        check_has_sample(request, writers["train"], skipped_counts)
        held_out_text.write(partial / "val" / HELD_OUT_TEXT)
        splits = {split: writer.finish() for split, writer in writers.items() if writer.documents}
        return PackResult(splits, skipped_counts, skipped_examples)
    except BaseException:
        for split in SPLITS:
            shutil.rmtree(partial / split, ignore_errors=True)
        raise


class HeldOutText:
    """The first held-out documents as text, to evaluate models with any tokenizer. At most MAX_TEXT_BYTES."""

    def __init__(self) -> None:
        """Start without documents."""
        self.rows: list[str] = []
        """Lines of JSON, one for each document."""
        self.bytes_left = MAX_TEXT_BYTES

    def add(self, tokens: np.ndarray, lengths: np.ndarray, tokenizer: Tokenizer) -> None:
        """Decode documents and add their texts, until MAX_TEXT_BYTES are reached. The last text may be cut.

        tokens: the concatenated documents.
        lengths: the number of tokens of each document, with its end-of-text token, which is not decoded.

        Texts are decoded because token files do not contain them. Adds to `rows`, and reduces `bytes_left`.
        """
        start = 0
        for length in lengths.tolist():
            if self.bytes_left <= 0:
                return
            document_tokens = tokens[start : start + length - 1]
            start += length

            # Only as many tokens are decoded as could be needed if each were a single byte.
            text = tokenizer.decode(document_tokens[:MAX_TEXT_BYTES].tolist())
            kept_text = text.encode()[: self.bytes_left].decode(errors="ignore")  # without half a character
            self.bytes_left -= len(kept_text.encode()) + 1  # and a line end
            self.rows.append(json.dumps({"text": kept_text}, ensure_ascii=False))

    def write(self, path: Path) -> None:
        """Write the texts as lines of JSON. If there is none, no file is written."""
        if not self.rows:
            return
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"{row}\n" for row in self.rows), encoding="utf-8")


class SplitWriter:
    """Writer of one split: concatenates its documents, cuts samples, and writes MDS shards and their index.

    The files equal byte for byte those of StreamingDataset's writer, which is not used because its import takes seconds
    and most of a gigabyte. A shard consists of the number of samples, the offset of each sample and of the end (all
    uint32), a description in JSON, and the samples:

        number   offsets of samples   offset of the end   description            samples
        2        212, 8404            16596               {"column_encodings"…   8,192 bytes, 8,192 bytes

    Call `add` for each part of the split, and `finish` once at the end. Numbers of tokens and documents are counted
    over all calls, also of tokens that are not written because they are too few for a sample.
    """

    def __init__(self, folder: Path, request: PrepareRequest, dtype: np.dtype) -> None:
        """Prepare to write shards into `folder`, and remove its content.

        The request gives the length of samples, the size limit of shards and their compression. `dtype` is the type of
        tokens in shards.
        """
        self.folder = folder
        self.compression = request.compression
        self.sample_tokens = request.max_seq_len
        self.sample_bytes = self.sample_tokens * dtype.itemsize
        self.description = {
            "version": 2,
            "format": "mds",
            "compression": request.compression,
            "hashes": [SHARD_HASH],
            "size_limit": request.size_limit_bytes,
            "column_names": ["tokens"],
            "column_encodings": [f"ndarray:{dtype.name}:{self.sample_tokens}"],
            "column_sizes": [self.sample_bytes],
        }
        """The part of a shard's record in the index that is the same for all shards."""
        self.header = json.dumps(self.description, sort_keys=True).encode()

        # Compute how many samples fit. A shard has the number of samples, the offset of the end and the header, and for
        # each sample, an offset and its bytes.
        bytes_for_samples = request.size_limit_bytes - 2 * OFFSET_BYTES - len(self.header)
        self.tokens_per_shard = bytes_for_samples // (self.sample_bytes + OFFSET_BYTES) * self.sample_tokens

        # The state, which `add`, `write_shard` and `finish` change.
        self.unwritten = [np.empty(0, dtype)]
        """Arrays of the tokens that are not in a shard yet."""
        self.num_unwritten = 0
        """Number of tokens in all arrays of `unwritten`."""
        self.tokens = 0
        self.documents = 0
        self.text_bytes = 0
        self.shards: list[dict[str, Any]] = []
        """Records of the shards that have been written, for the index."""
        shutil.rmtree(folder, ignore_errors=True)

    def add(self, tokens: np.ndarray, documents: int, text_bytes: int) -> None:
        """Append documents, and write a shard whenever there are enough tokens for it.

        `tokens` are those of `documents` whole documents with end-of-text tokens, whose UTF-8 text has `text_bytes`.
        """
        self.unwritten.append(tokens)
        self.num_unwritten += len(tokens)
        self.tokens += len(tokens)
        self.documents += documents
        self.text_bytes += text_bytes

        # Like StreamingDataset's writer, write a full shard only when there is another sample for the next one. Arrays
        # are joined only then, because joining copies all tokens.
        enough_tokens = self.tokens_per_shard + self.sample_tokens
        if self.num_unwritten >= enough_tokens:
            joined = np.concatenate(self.unwritten)
            while len(joined) >= enough_tokens:
                self.write_shard(joined[: self.tokens_per_shard])
                joined = joined[self.tokens_per_shard :]
            self.unwritten = [joined]
            self.num_unwritten = len(joined)

    def write_shard(self, tokens: np.ndarray) -> None:
        """Write the next shard, compressed if the request says so, and append its record to `shards`.

        `tokens` are the concatenated tokens of all its samples, which all have the same length.
        """
        # Lay out the content as the class describes it.
        num_samples = len(tokens) // self.sample_tokens
        first_offset = OFFSET_BYTES + OFFSET_BYTES * (num_samples + 1) + len(self.header)
        offsets = np.arange(num_samples + 1, dtype=np.uint32) * np.uint32(self.sample_bytes)
        offsets += np.uint32(first_offset)
        content = b"".join([np.uint32(num_samples).tobytes(), offsets.tobytes(), self.header, tokens.tobytes()])

        # Compress it, and write the file. The index has sizes and hashes of both forms.
        name = f"shard.{len(self.shards):05}.mds"
        shard = {"samples": num_samples, "raw_data": file_description(name, content), "zip_data": None}
        if self.compression:
            algorithm, _, _ = self.compression.partition(":")
            name = f"{name}.{algorithm}"
            content = compress(self.compression, content)
            shard["zip_data"] = file_description(name, content)
        self.folder.mkdir(exist_ok=True)
        (self.folder / name).write_bytes(content)
        self.shards.append(shard | self.description)

    def finish(self) -> SplitSummary:
        """Write the last shard and the index, and sync all files to disk. Returns the summary of the split.

        Remaining tokens, too few for a sample, are dropped, and counted as `remainder_tokens`.
        """
        # Write the last shard. All shards before it have whole samples, so the remainder is at its end.
        num_samples, num_remaining = divmod(self.tokens, self.sample_tokens)
        joined = np.concatenate(self.unwritten)
        if len(joined) > num_remaining:
            self.write_shard(joined[: len(joined) - num_remaining])

        # Write the index.
        self.folder.mkdir(exist_ok=True)
        index = json.dumps({"version": 2, "shards": self.shards}, sort_keys=True)
        (self.folder / "index.json").write_text(index, encoding="utf-8")
        sync_folder(self.folder)
        return SplitSummary(
            documents=self.documents,
            samples=num_samples,
            tokens=num_samples * self.sample_tokens,
            remainder_tokens=num_remaining,
            text_bytes=self.text_bytes,
            shards=len(self.shards),
        )


def file_description(name: str, content: bytes) -> dict[str, Any]:
    """Return the record of a shard's file for the index: its name, size and hash."""
    return {"basename": name, "bytes": len(content), "hashes": {SHARD_HASH: xxhash.xxh3_64_hexdigest(content)}}


def compress(compression: str, content: bytes) -> bytes:
    """Compress a shard to the same bytes as StreamingDataset does, with the same libraries.

    `compression` is an algorithm, alone or with a level, such as `zstd:9`. The default levels are StreamingDataset's.
    Libraries outside the standard library are imported only if they are needed.
    """
    name, _, level = compression.partition(":")
    match name:
        case "br":
            import brotli

            return brotli.compress(content, quality=int(level or 11))
        case "bz2":
            return bz2.compress(content, int(level or 9))
        case "gz":
            return gzip.compress(content, int(level or 9), mtime=0)
        case "snappy":
            import snappy

            return snappy.compress(content)
        case "zstd":
            import zstd

            return zstd.compress(content, int(level or 3))
    raise AssertionError(f"{compression}: PrepareRequest accepts no other")


# The validation split


def choose_threshold(paths: list[Path], request: PrepareRequest) -> np.uint64:
    """Choose the threshold of split keys: documents with a key below it are held out for validation.

    `paths` are all token files. The threshold is the request's fraction of the range of keys, if both splits then have
    at least one sample. Otherwise it is raised until the validation split has one. Returns 0, so that nothing is held
    out, if there is not enough data for a sample in both splits.
    """
    threshold = initial_threshold(request)
    if threshold == 0:
        return threshold

    # Count the tokens of both splits, until both have enough for a sample.
    one_sample = request.max_seq_len
    train_tokens = 0
    val_tokens = 0
    for path in paths:
        unit = load_unit(path, without_tokens=True)
        is_held_out = unit.doc_keys < threshold
        val_tokens += int(unit.doc_tokens[is_held_out].sum())
        train_tokens += int(unit.doc_tokens[~is_held_out].sum())
        if val_tokens >= one_sample and train_tokens >= one_sample:
            return threshold

    # There is so little data that one split has less than one sample. If it is the training split, hold out nothing.
    if train_tokens < one_sample:
        return np.uint64(0)

    # Otherwise hold out more documents. These few fit into memory.
    units = [load_unit(path, without_tokens=True) for path in paths]
    keys = np.concatenate([unit.doc_keys for unit in units])
    tokens = np.concatenate([unit.doc_tokens for unit in units])
    threshold = raise_threshold(threshold, keys, tokens, one_sample)
    has_sample = tokens[keys < threshold].sum() >= one_sample
    return threshold if has_sample else np.uint64(0)


def initial_threshold(request: PrepareRequest) -> np.uint64:
    """Return the split key below which the request's validation fraction of all documents is expected.

    Split keys are hashes, and so uniformly distributed over 64 bits. A fraction of 0.25 has the threshold 2^62.
    """
    assert request.val_fraction is not None, "prepare sets the source's default"
    return np.uint64(int(request.val_fraction * 2**64))


def raise_threshold(threshold: np.uint64, keys: np.ndarray, sizes: np.ndarray, min_size: int) -> np.uint64:
    """Raise the threshold of split keys until the documents below it have `min_size` together, but at most half of all.

    keys: split keys of all documents.
    sizes: sizes of all documents, in the unit of `min_size`, which is tokens or bytes.

    Documents with equal keys are held out together. The keys 10, 20, 30 and 40 with sizes of 5 each, a threshold of 15
    and a `min_size` of 8 have the result 21, below which are two documents of together 10. Returns `threshold` if it
    need not be raised.
    """
    if not len(keys):
        return threshold

    # Sort the documents by key, and compute for each distinct key the size of all documents up to it.
    order = np.argsort(keys, kind="stable")
    sorted_keys = keys[order]
    is_last_of_key = np.append(sorted_keys[1:] != sorted_keys[:-1], True)  # equal texts have equal keys
    sizes_up_to_key = np.cumsum(sizes[order])[is_last_of_key]

    # Raise the threshold above one key after another.
    half_of_all = sizes.sum() / 2
    for key, size_up_to_key in zip(sorted_keys[is_last_of_key], sizes_up_to_key, strict=True):
        if key < threshold:
            continue
        is_enough = sizes[keys < threshold].sum() >= min_size
        exceeds_half = size_up_to_key > half_of_all
        is_largest_key = key == 2**64 - 1  # there is no threshold above it
        if is_enough or exceeds_half or is_largest_key:
            break
        threshold = np.uint64(key + np.uint64(1))
    return threshold


def check_has_sample(request: PrepareRequest, train: SplitWriter, skipped: dict[str, int]) -> None:
    """Raise DataError if the training split has less than one sample. The error counts skipped documents by reason."""
    if train.tokens >= request.max_seq_len:
        return
    reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.items() if count)
    raise DataError(
        f"{' '.join(request.sources)}: {train.documents} documents for training, {train.tokens} tokens in all, "
        f"which is less than one sample of --max-seq-len {request.max_seq_len}"
        + (f" (skipped: {reasons})" if reasons else "")
    )
