"""Decoding of samples: the columns of a sample -> a row of token ids, or an error that says what is wrong with them.

`dataset.py` builds one `RowReader` and passes it each sample. `tokens_per_sample` and `check_length` check what an
index says about all samples, before any is read.
"""

import re
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llmfoundry_lite.errors import DataError

TOKEN_TYPES = ("int64", "int32", "uint16", "uint8")
"""Number types that token ids in a column of plain bytes may have, the widest first."""

MAX_VOCAB_SIZE = 1 << 24
"""Upper bound of token ids if the vocabulary is not known."""

MAX_IDS_OVER_NARROW_TYPE = 8
"""Largest id, in multiples of the configured type's range, up to which bytes may prove that a wider type is right."""

UNPADDED_LENGTH = "unpadded_length"
"""Column with the number of tokens of a sample. The rest of its column `tokens` is padding. Samples without this column
have none. `data prepare --pack best-fit` writes it (`prepare/shards.py`)."""

PAD_TOKEN = -100
"""Value at positions without a token, which are neither input nor target. It is the ignore_index of cross-entropy."""


class Tokenizer(Protocol):
    """Interface of a tokenizer, which is needed to read shards of text."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        ...


def tokens_per_sample(encoding: str) -> int | None:
    """Return how many tokens each sample has according to its column's type: 2048 for `ndarray:uint16:2048`.

    Returns None for a type without a fixed length, such as `ndarray:uint16` or `bytes`.
    """
    match = re.fullmatch(r"ndarray:\w+:(\d{1,10})", encoding)
    return int(match[1]) if match else None


def check_length(num_tokens: int, max_seq_len: int, subject: str, *, allow_truncation: bool) -> None:
    """Raise DataError if samples are shorter than `max_seq_len`, or longer without `allow_truncation`.

    `num_tokens` is the length of a sample. `subject` is the beginning of the error, such as "the sample has".
    """
    if num_tokens < max_seq_len:
        raise DataError(
            f"{subject} {num_tokens} tokens, but max_seq_len is {max_seq_len}; set max_seq_len={num_tokens}, or "
            f"prepare the data again with --max-seq-len {max_seq_len}"
        )
    if num_tokens > max_seq_len and not allow_truncation:
        truncated_percent = percent_truncated(num_tokens, max_seq_len)
        raise DataError(
            f"{subject} {num_tokens} tokens, and max_seq_len {max_seq_len} leaves {truncated_percent} of the text out; "
            f"set max_seq_len={num_tokens}, prepare the data again with --max-seq-len {max_seq_len}, or set "
            "allow_truncation: true in the loader's dataset"
        )


def percent_truncated(num_tokens: int, max_seq_len: int) -> str:
    """Return which part of a sample is lost if it is truncated to `max_seq_len` tokens, such as "25 %"."""
    return f"{100 * (1 - max_seq_len / num_tokens):.3g} %"


class RowReader:
    """Decoder that converts samples to token ids, all of the same length."""

    def __init__(
        self,
        max_seq_len: int,
        vocab_size: int | None,
        tokenizer: Tokenizer | None,
        token_type: str,
        allow_truncation: bool = False,
    ) -> None:
        """Set how samples are decoded.

        Token ids must be below `vocab_size`, unless it is None. `tokenizer` encodes samples that are text; None if
        there are none. `token_type` is the number type of samples that are plain bytes. `allow_truncation` permits
        samples longer than `max_seq_len`, which are then cut.
        """
        self.max_seq_len = max_seq_len
        self.allow_truncation = allow_truncation
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.token_dtype = np.dtype(token_type)

    def read(self, sample: dict[str, Any]) -> NDArray[np.int64]:
        """Return the `max_seq_len` token ids of a sample, from its column `tokens`, or else from `text`.

        `sample` has the columns by name. A text is truncated to `max_seq_len` tokens, or filled up with `PAD_TOKEN`.
        Padding of stored tokens is replaced by `PAD_TOKEN`, whatever its ids are. Raises DataError for tokens that are
        not integers, or outside the vocabulary, or of the wrong length.
        """
        if "tokens" not in sample:
            return self._encode_text(sample["text"])

        tokens = sample["tokens"]
        if isinstance(tokens, bytes):
            tokens = self._decode_bytes(tokens)
        check_whole_numbers(tokens)
        check_length(len(tokens), self.max_seq_len, "the sample has", allow_truncation=self.allow_truncation)
        length = unpadded_length(sample, len(tokens))
        tokens = tokens[: self.max_seq_len].astype(np.int64)
        self._check_vocabulary(tokens)
        tokens[length:] = PAD_TOKEN
        return tokens

    def _encode_text(self, text: str) -> NDArray[np.int64]:
        """Tokenize a text, and truncate or pad the ids to `max_seq_len`."""
        assert self.tokenizer is not None
        tokens = np.asarray(self.tokenizer.encode(text)[: self.max_seq_len], np.int64)
        self._check_vocabulary(tokens)
        return np.pad(tokens, (0, self.max_seq_len - len(tokens)), constant_values=PAD_TOKEN)

    def _decode_bytes(self, raw: bytes) -> NDArray[np.integer]:
        """Convert the bytes of a sample to numbers of the configured type.

        Bytes do not say which type they have, and the model would train on wrong tokens if the configured one were
        wrong. So this raises DataError if the numbers show that it is: most of them are outside the vocabulary, or a
        wider type fits so well that it cannot be by chance. The error names the type that fits, if there is one.
        """
        dtype = self.token_dtype
        vocab_size = self.vocab_size or MAX_VOCAB_SIZE
        tokens = None
        problem = ""
        if len(raw) % dtype.itemsize:
            problem = f"{len(raw)} bytes of tokens are not whole {dtype} numbers"
        else:
            tokens = np.frombuffer(raw, dtype)
            outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
            # If the type is wrong, most ids are outside. `_check_vocabulary` finds a single damaged id.
            if 2 * len(outside) > len(tokens):
                problem = f"token id {outside[0]} is outside the vocabulary"

        if problem:
            fitting_types = [name for name in TOKEN_TYPES if _could_be_tokens(raw, name, vocab_size, self.max_seq_len)]
        else:
            fitting_types = self._wider_types_that_fit(raw)
        if fitting_types:
            prefix = f"{problem}: " if problem else ""
            raise DataError(
                f"{prefix}the bytes of a row are {fitting_types[0]} numbers, and are read as {dtype}; set "
                f"token_encoding_type: {fitting_types[0]} in the loader's dataset"
            )
        if tokens is None:
            raise DataError(f"{problem}; set token_encoding_type to the type they were written with")
        return tokens

    def _wider_types_that_fit(self, raw: bytes) -> list[str]:
        """Return the number types, wider than the configured one, that the bytes of a sample almost certainly have.

        Two narrow numbers that are read as a wide one are hardly ever all below the range of the narrow type, because
        every second narrow number would have to be 0. So if all wide numbers are that small, the bytes are wide
        numbers.
        """
        narrow_bytes = self.token_dtype.itemsize
        narrow_range = 1 << 8 * narrow_bytes
        max_multiple = MAX_IDS_OVER_NARROW_TYPE if self.vocab_size else 1
        max_id = min(self.vocab_size or MAX_VOCAB_SIZE, max_multiple * narrow_range)
        wider_types = [name for name in TOKEN_TYPES if np.dtype(name).itemsize > narrow_bytes]
        return [name for name in wider_types if _could_be_tokens(raw, name, max_id, min_tokens=2)]

    def _check_vocabulary(self, tokens: NDArray[np.int64]) -> None:
        """Raise DataError for an id outside the vocabulary, if it is known.

        Negative ids are errors too, because the model would take them for padding.
        """
        if self.vocab_size is None or not len(tokens):
            return
        for token_id in (int(tokens.max()), int(tokens.min())):
            if not 0 <= token_id < self.vocab_size:
                raise DataError(
                    f"token id {token_id} is outside the vocabulary of {self.vocab_size}: the tokenizer does not "
                    "match the one the data was prepared with, or the shard is damaged"
                )


def check_whole_numbers(tokens: Any) -> None:
    """Raise DataError unless a sample's column `tokens` is an array with one dimension and an integer type."""
    is_row_of_integers = isinstance(tokens, np.ndarray) and tokens.ndim == 1 and tokens.dtype.kind in "iu"
    if not is_row_of_integers:
        raise DataError(f"column tokens holds {type(tokens).__name__}, not a row of whole numbers")


def unpadded_length(sample: dict[str, Any], num_tokens: int) -> int:
    """Return how many of the `num_tokens` tokens of a sample are not padding, by its column UNPADDED_LENGTH.

    `sample` has the columns by name. Raises DataError for a length that is not possible.
    """
    length = sample.get(UNPADDED_LENGTH, num_tokens)
    is_possible = isinstance(length, int | np.integer) and 0 < length <= num_tokens
    if not is_possible:
        raise DataError(f"column {UNPADDED_LENGTH} holds {length!r}, expected a number from 1 to {num_tokens}")
    return int(length)


def _could_be_tokens(raw: bytes, token_type: str, vocab_size: int, min_tokens: int) -> bool:
    """Return whether the bytes of a sample may be token ids of a number type.

    They may if they are at least `min_tokens` numbers, all of them valid ids below `vocab_size`, and more than half of
    them not 0. Narrow numbers that are read as wide ones are too large, and wide numbers that are read as narrow ones
    are mostly zeros.
    """
    if len(raw) % np.dtype(token_type).itemsize:
        return False
    tokens = np.frombuffer(raw, token_type)
    if len(tokens) < min_tokens or int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
        return False
    return 2 * int(np.count_nonzero(tokens)) > len(tokens)
