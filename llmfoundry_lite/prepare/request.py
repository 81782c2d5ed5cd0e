"""The request of `data prepare`: everything that decides its result. `__post_init__` checks it."""

from dataclasses import dataclass

from llmfoundry_lite.errors import DataError

TRAIN_PREFIX = "train:"
COMPRESSION_LEVELS = {
    "br": range(12),
    "bz2": range(1, 10),
    "gz": range(10),
    "snappy": range(0),
    "zstd": range(1, 23),
}
"""Levels that StreamingDataset 0.13 knows. Importing it to ask takes seconds, which is too long for an error."""

SHARD_LIMIT_BYTES = 2**32
"""Most bytes that MDS can address in a shard."""
SHARD_HEAD_BYTES = 4096
"""Upper limit of the bytes before the samples of an MDS shard."""
MAX_BYTES_PER_TOKEN = 8
"""Bytes in a shard for each token: at most 4 of the token, and the offset of a sample of one token."""
MAX_SEQ_LEN = (SHARD_LIMIT_BYTES - 1 - SHARD_HEAD_BYTES) // MAX_BYTES_PER_TOKEN


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareRequest:
    """A request for a preparation: everything that decides the result, and nothing else. Raises DataError."""

    sources: tuple[str, ...]
    """`python-stdlib`, `hf:NAME[:CONFIG]`, or files, folders and globs; see `sources.open_source`."""
    tokenizer: str
    """A local folder, a Hub name, or `train:VOCAB_SIZE`."""
    max_seq_len: int
    """Tokens in a sample."""
    text_key: str | tuple[str, ...] = "text"
    """The field of a JSON object, or the column of a table, that holds the document. `meta.text` is a field within a
    field. The values of several keys are joined by blank lines."""
    split: str = "train"
    """The split to read, for a data set of the Hub or one that `datasets` saved. Other sources ignore it."""
    encoding: str | None = None
    """Encoding of text, JSON lines and CSV, as Python names it; None is UTF-8."""
    on_error: str = "stop"
    """Policy for a document that cannot be read: `stop`, or `skip`, which counts it."""
    val_fraction: float | None = None
    """Share of the documents (of the modules, for the standard library) that is held out. None means 0.05 for the
    standard library and 0.005 elsewhere. It is raised until there is one validation sample, if the data allow that; 0
    holds out nothing."""
    size_limit_bytes: int = 64 * 1024 * 1024
    """Bytes of a shard, before compression."""
    compression: str | None = None
    """Compression of the shards, as StreamingDataset names it: `zstd`, `zstd:9`, `gz`, …"""

    def __post_init__(self) -> None:
        """Raise DataError for an impossible value, in the words of the command's options."""
        if not self.text_keys or not all(self.text_keys):
            raise DataError("--text-key is empty; expected the name of a field or column")
        if not 1 <= self.max_seq_len <= MAX_SEQ_LEN:
            raise DataError(
                f"--max-seq-len {self.max_seq_len}: expected a number of tokens, at least 1 and at most "
                f"{MAX_SEQ_LEN} (one sample has to fit in a shard of less than 4 GiB)"
            )
        if self.on_error not in ("stop", "skip"):
            raise DataError(f"--on-error {self.on_error}: expected stop or skip")
        if self.val_fraction is not None and not 0 <= self.val_fraction < 1:
            raise DataError(f"--val-fraction {self.val_fraction}: expected a fraction, at least 0 and below 1")
        smallest = SHARD_HEAD_BYTES + MAX_BYTES_PER_TOKEN * self.max_seq_len
        if not smallest <= self.size_limit_bytes < SHARD_LIMIT_BYTES:
            raise DataError(
                f"--size-limit {self.size_limit_bytes} bytes: expected at least {smallest} (one sample of "
                f"{self.max_seq_len} tokens) and less than 4 GiB (what MDS can address)"
            )
        if self.compression is not None:
            check_compression(self.compression)
        if self.encoding is not None:
            check_encoding(self.encoding)
        if self.tokenizer.startswith(TRAIN_PREFIX) and not self.tokenizer.removeprefix(TRAIN_PREFIX).isdecimal():
            raise DataError(f"--tokenizer {self.tokenizer}: expected train:VOCAB_SIZE, for example train:4096")

    @property
    def text_keys(self) -> tuple[str, ...]:
        """The keys of `text_key`, also where there is one."""
        return (self.text_key,) if isinstance(self.text_key, str) else self.text_key


def check_encoding(encoding: str) -> None:
    """Raise DataError unless Python knows an encoding of text by this name."""
    try:
        "text".encode(encoding)
    except (LookupError, ValueError) as error:
        raise DataError(
            f"--encoding {encoding}: Python knows no text encoding of this name; expected utf-8, utf-16, latin-1, "
            "cp1252, gb18030, shift_jis or another"
        ) from error


def check_compression(compression: str) -> None:
    """Raise DataError unless this is the name of a compression, alone or with one of its levels."""
    names = set()
    descriptions = []
    for name, levels in COMPRESSION_LEVELS.items():
        names.add(name)
        names.update(f"{name}:{level}" for level in levels)
        descriptions.append(f"{name}, {name}:{levels[0]} to {name}:{levels[-1]}" if levels else name)
    if compression not in names:
        raise DataError(f"--compression {compression}: expected one of {', '.join(descriptions)}")
