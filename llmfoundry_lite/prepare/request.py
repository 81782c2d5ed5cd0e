"""The request of `data prepare`: everything that decides its result. Building one checks it.

`WorkOptions` are the other options of the command, which do not decide the result.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from llmfoundry_lite.errors import DataError
from llmfoundry_lite.own_code import is_own

TRAIN_PREFIX = "train:"
CONCAT = "concat"
BEST_FIT = "best-fit"
PACK_METHODS = (CONCAT, BEST_FIT)
"""Ways to make samples of documents."""
COMPRESSION_LEVELS = {
    "br": range(12),
    "bz2": range(1, 10),
    "gz": range(10),
    "snappy": range(0),
    "zstd": range(1, 23),
}
"""Compression -> its levels in StreamingDataset 0.13. They are listed here because importing it takes seconds."""

SHARD_LIMIT_BYTES = 2**32
"""Size from which on MDS cannot address the bytes of a shard: offsets have 32 bits."""
SHARD_HEAD_BYTES = 4096
"""Upper bound of the bytes before the samples of an MDS shard."""
MAX_BYTES_PER_TOKEN = 8
"""Upper bound of bytes in a shard for each token: 4 of the token, and 4 of an offset if samples have one token."""
MAX_SEQ_LEN = (SHARD_LIMIT_BYTES - 1 - SHARD_HEAD_BYTES) // MAX_BYTES_PER_TOKEN


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareRequest:
    """A request for a preparation: everything that decides its result, and nothing else."""

    sources: tuple[str, ...]
    """`python-stdlib`, `hf:NAME[:CONFIG]`, or files, folders and globs, also by URLs; see `sources.open_source`."""
    tokenizer: str
    """A local folder, a Hub name, `train:VOCAB_SIZE`, or code of the user's own, `python:package.module:Thing`."""
    max_seq_len: int
    """Tokens in a sample."""
    text_key: str | tuple[str, ...] = "text"
    """The field of a JSON object, or the column of a table, that contains the document's text. `meta.text` is the field
    `text` in the object `meta`. The values of several keys are joined by blank lines."""
    split: str = "train"
    """The split to read of a data set from the Hub, or saved by `datasets`. Other sources ignore it."""
    encoding: str | None = None
    """Encoding of text, JSON lines and CSV, as Python names it; None is UTF-8."""
    on_error: str = "stop"
    """Policy for a document that cannot be read: `stop` with an error, or `skip` and count it."""
    val_fraction: float | None = None
    """Fraction of the documents (for the standard library, of the modules) that is held out for validation. None means
    0.05 for the standard library and 0.005 for other sources. More is held out if that gives less than one sample and
    there is enough data. 0 holds out nothing."""
    size_limit_bytes: int = 64 * 1024 * 1024
    """Maximum size of a shard before compression."""
    compression: str | None = None
    """Compression of the shards, as StreamingDataset names it: `zstd`, `zstd:9`, `gz`, …"""
    pack: str = CONCAT
    """How documents become samples: `concat` concatenates and cuts them, `best-fit` puts whole documents into samples
    and pads these; see `best_fit.py`."""

    readers: tuple[str, ...] = ()
    """Readers of the user's own for files of some suffixes: `.xml=python:package.module:function`."""

    def __post_init__(self) -> None:
        """Raise DataError for a value that is not valid. The error names the option of the command.

        Whether sources and tokenizer exist is not checked here, but when they are opened.
        """
        if not self.text_keys or not all(self.text_keys):
            raise DataError("--text-key is empty; expected the name of a field or column")
        if not 1 <= self.max_seq_len <= MAX_SEQ_LEN:
            raise DataError(
                f"--max-seq-len {self.max_seq_len}: expected a number of tokens, at least 1 and at most "
                f"{MAX_SEQ_LEN} (one sample has to fit in a shard of less than 4 GiB)"
            )
        if self.on_error not in ("stop", "skip"):
            raise DataError(f"--on-error {self.on_error}: expected stop or skip")
        if self.pack not in PACK_METHODS:
            raise DataError(f"--pack {self.pack}: expected {' or '.join(PACK_METHODS)}")
        if self.val_fraction is not None and not 0 <= self.val_fraction < 1:
            raise DataError(f"--val-fraction {self.val_fraction}: expected a fraction, at least 0 and below 1")

        # A shard must have room for one sample.
        min_limit = SHARD_HEAD_BYTES + MAX_BYTES_PER_TOKEN * self.max_seq_len
        if not min_limit <= self.size_limit_bytes < SHARD_LIMIT_BYTES:
            raise DataError(
                f"--size-limit {self.size_limit_bytes} bytes: expected at least {min_limit} (one sample of "
                f"{self.max_seq_len} tokens) and less than 4 GiB (what MDS can address)"
            )
        if self.compression is not None:
            check_compression(self.compression)
        if self.encoding is not None:
            check_encoding(self.encoding)
        for reader in self.readers:
            if not re.fullmatch(r"\.\w+=python:\w+(\.\w+)*:\w+", reader):
                raise DataError(
                    f"--reader {reader}: expected SUFFIX=python:package.module:function, such as .xml=python:mine:read"
                )
        if len(self.reader_of_suffix) < len(self.readers):
            raise DataError(f"--reader {' '.join(self.readers)}: expected one for each suffix")
        if self.tokenizer.startswith(TRAIN_PREFIX) and not self.tokenizer.removeprefix(TRAIN_PREFIX).isdecimal():
            raise DataError(f"--tokenizer {self.tokenizer}: expected train:VOCAB_SIZE, for example train:4096")

    @property
    def text_keys(self) -> tuple[str, ...]:
        """The keys of `text_key` as a tuple, also if it is a single key."""
        return (self.text_key,) if isinstance(self.text_key, str) else self.text_key

    @property
    def reader_of_suffix(self) -> dict[str, str]:
        """Suffix of a file, such as `.xml` -> import path of the user's own reader for it."""
        return dict(reader.split("=", 1) for reader in self.readers)

    @property
    def own_code(self) -> list[str]:
        """Import paths of the user's own readers and tokenizer."""
        names = [*self.reader_of_suffix.values(), self.tokenizer]
        return [name for name in names if is_own(name)]


def check_encoding(encoding: str) -> None:
    """Raise DataError unless Python has a text encoding of this name."""
    try:
        "text".encode(encoding)
    except (LookupError, ValueError) as error:
        raise DataError(
            f"--encoding {encoding}: Python knows no text encoding of this name; expected utf-8, utf-16, latin-1, "
            "cp1252, gb18030, shift_jis or another"
        ) from error


def check_compression(compression: str) -> None:
    """Raise DataError unless `compression` is a known algorithm, alone or with one of its levels.

    "zstd", "zstd:9" and "snappy" are valid. "zstd:23" and "snappy:1" are not: zstd has the levels 1 to 22, and snappy
    has none. The error lists all algorithms with their levels.
    """
    valid_names = set()
    descriptions = []
    for algorithm, levels in COMPRESSION_LEVELS.items():
        valid_names.add(algorithm)
        valid_names.update(f"{algorithm}:{level}" for level in levels)
        if levels:
            descriptions.append(f"{algorithm}, {algorithm}:{levels[0]} to {algorithm}:{levels[-1]}")
        else:
            descriptions.append(algorithm)
    if compression not in valid_names:
        raise DataError(f"--compression {compression}: expected one of {', '.join(descriptions)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkOptions:
    """Options of one launch of `data prepare`. They say how it works, and do not change the result."""

    num_workers: int | None
    """Number of processes that tokenise; None is one for each core."""
    max_lost_text: float
    """Fraction of characters that the tokenizer may lose."""
    overwrite: bool
    """Discard an earlier preparation in the output."""
    notify: Callable[[str], None]
    """Called with each sentence for the user."""
    scratch_folder: str | None
    """Folder for files on their way into a bucket; None is a temporary one."""
    scratch_limit: str | None
    """Maximum size of these files, such as 2gb."""
