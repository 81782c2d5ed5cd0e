"""Decoding of samples: the columns of a sample -> a row of token ids, or an error that says what is wrong with them.

`dataset.py` builds one `RowReader` and passes it each sample. The functions beside it check what an index says about
all samples, before any is read. Shapes: t = max_seq_len.
"""

import re
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llmfoundry_lite.errors import DataError

TOKEN_TYPES = ("int64", "int32", "uint16", "uint8")
"""Number types that tokens in rows of bytes may have, the widest first."""

MAX_VOCAB_SIZE = 1 << 24
"""Limit of token ids where the vocabulary is not known."""

MAX_IDS_OVER_NARROW_TYPE = 8
"""Ids that a known vocabulary may have, in multiples of the narrow type's range, for bytes to pass as a wider type."""

PAD_TOKEN = -100
"""Value where there is no token: it is neither an input nor a target. (The number is cross-entropy's ignore_index.)"""


class Tokenizer(Protocol):
    """Tokenizer for shards of text."""

    def encode(self, text: str) -> list[int]: ...


def tokens_per_sample(encoding: str) -> int | None:
    """Return how many tokens each sample has by the type of its column, such as 2048 for `ndarray:uint16:2048`.

    Returns None for a type that leaves the length open, such as `ndarray:uint16` or `bytes`.
    """
    match = re.fullmatch(r"ndarray:\w+:(\d+)", encoding)
    return int(match[1]) if match else None


def check_length(num_tokens: int, max_seq_len: int, subject: str, *, allow_truncation: bool) -> None:
    """Raise DataError for samples shorter than `max_seq_len`, and for longer ones unless truncation is allowed.

    `subject` begins the error, up to the number of tokens: "the sample has".
    """
    if num_tokens < max_seq_len:
        raise DataError(
            f"{subject} {num_tokens} tokens, but max_seq_len is {max_seq_len}; set max_seq_len={num_tokens}, or "
            f"prepare the data again with --max-seq-len {max_seq_len}"
        )
    if num_tokens > max_seq_len and not allow_truncation:
        left_out = percent_left_out(num_tokens, max_seq_len)
        raise DataError(
            f"{subject} {num_tokens} tokens, and max_seq_len {max_seq_len} leaves {left_out} of the text out; set "
            f"max_seq_len={num_tokens}, prepare the data again with --max-seq-len {max_seq_len}, or set "
            "allow_truncation: true in the loader's dataset"
        )


def percent_left_out(num_tokens: int, max_seq_len: int) -> str:
    """Return the share of a sample's tokens that lies behind the first `max_seq_len`, such as "25 %"."""
    return f"{100 * (1 - max_seq_len / num_tokens):.3g} %"


class RowReader:
    """Decoder of samples into rows of one length."""

    def __init__(
        self,
        max_seq_len: int,
        vocab_size: int | None,
        tokenizer: Tokenizer | None,
        token_type: str,
        allow_truncation: bool = False,
    ) -> None:
        """Take what all rows have in common.

        `vocab_size` is None where no model limits the ids. `tokenizer` is for a column `text`, and `token_type` for a
        column `tokens` of plain bytes. `allow_truncation` cuts tokens beyond `max_seq_len` off.
        """
        self.max_seq_len = max_seq_len
        self.allow_truncation = allow_truncation
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.token_dtype = np.dtype(token_type)

    def read(self, sample: dict[str, Any]) -> NDArray[np.int64]:
        """Return the token ids of a sample [t], from its column `tokens` or else `text`.

        A text is cut after `max_seq_len` tokens, or filled up with `PAD_TOKEN`. Raises DataError for tokens of another
        length, of no integer type, or outside the vocabulary.
        """
        if "tokens" not in sample:
            return self._encode_text(sample["text"])

        tokens = sample["tokens"]
        if isinstance(tokens, bytes):
            tokens = self._decode_bytes(tokens)
        check_whole_numbers(tokens)
        check_length(len(tokens), self.max_seq_len, "the sample has", allow_truncation=self.allow_truncation)
        tokens = tokens[: self.max_seq_len].astype(np.int64)
        self._check_vocabulary(tokens)
        return tokens

    def _encode_text(self, text: str) -> NDArray[np.int64]:
        """Tokenize a text, cut or filled up to `max_seq_len`."""
        assert self.tokenizer is not None
        tokens = np.asarray(self.tokenizer.encode(text)[: self.max_seq_len], np.int64)
        self._check_vocabulary(tokens)
        return np.pad(tokens, (0, self.max_seq_len - len(tokens)), constant_values=PAD_TOKEN)

    def _decode_bytes(self, raw: bytes) -> NDArray[np.integer]:
        """Read the bytes of a row as `token_dtype`.

        Bytes carry no type, and a wrong one would train on wrong tokens. So this raises DataError where the numbers
        show that the type is wrong, and names the right one if the bytes fit it. Two mistakes show: most numbers lie
        outside the vocabulary, or a wider type fits so well that it cannot be chance.
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
            fitting = [name for name in TOKEN_TYPES if _could_be(raw, name, vocab_size, self.max_seq_len)]
        else:
            # Two narrow numbers read as a wide one are hardly ever all below the narrow type's range, since for that
            # every second number has to be 0.
            narrow_range = 1 << 8 * dtype.itemsize
            most_ids = min(vocab_size, (MAX_IDS_OVER_NARROW_TYPE if self.vocab_size else 1) * narrow_range)
            wider_types = [name for name in TOKEN_TYPES if np.dtype(name).itemsize > dtype.itemsize]
            fitting = [name for name in wider_types if _could_be(raw, name, most_ids, min_tokens=2)]

        if fitting:
            prefix = f"{problem}: " if problem else ""
            raise DataError(
                f"{prefix}the bytes of a row are {fitting[0]} numbers, and are read as {dtype}; set "
                f"token_encoding_type: {fitting[0]} in the loader's dataset"
            )
        if tokens is None:
            raise DataError(f"{problem}; set token_encoding_type to the type they were written with")
        return tokens

    def _check_vocabulary(self, tokens: NDArray[np.int64]) -> None:
        """Raise DataError for an id outside the vocabulary. A negative one would train as padding, without a loss."""
        if self.vocab_size is None or not len(tokens):
            return
        for token_id in (int(tokens.max()), int(tokens.min())):
            if not 0 <= token_id < self.vocab_size:
                raise DataError(
                    f"token id {token_id} is outside the vocabulary of {self.vocab_size}: the tokenizer does not "
                    "match the one the data was prepared with, or the shard is damaged"
                )


def check_whole_numbers(tokens: Any) -> None:
    """Raise DataError unless a column `tokens` holds an array of one dimension and an integer type."""
    is_row_of_integers = isinstance(tokens, np.ndarray) and tokens.ndim == 1 and tokens.dtype.kind in "iu"
    if not is_row_of_integers:
        raise DataError(f"column tokens holds {type(tokens).__name__}, not a row of whole numbers")


def _could_be(raw: bytes, token_type: str, vocab_size: int, min_tokens: int) -> bool:
    """Return whether a row's bytes may be token ids of a type: `min_tokens` or more, and at most half of them zero.

    Narrow numbers read as wide ones are too large, and wide numbers read as narrow ones are mostly zeros.
    """
    if len(raw) % np.dtype(token_type).itemsize:
        return False
    tokens = np.frombuffer(raw, token_type)
    if len(tokens) < min_tokens or int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
        return False
    return 2 * int(np.count_nonzero(tokens)) > len(tokens)
