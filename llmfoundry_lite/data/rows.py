"""Decoding of samples: columns -> a row of token ids. Shapes: t = max_seq_len."""

import re
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llmfoundry_lite.errors import DataError

TOKEN_TYPES = ("int64", "int32", "uint16", "uint8")
"""Number types that tokens in rows of bytes may have, the widest first."""

MAX_VOCAB_SIZE = 1 << 24
"""Limit of token ids where the vocabulary is not known."""

PAD_TOKEN = -100
"""Value where there is no token: it is neither an input nor a target. (The number is cross-entropy's ignore_index.)"""


class Tokenizer(Protocol):
    """Tokenizer for shards of text."""

    def encode(self, text: str) -> list[int]: ...


def length_in(encoding: str) -> int | None:
    """Return the tokens of each sample if the type of the column says so, as `ndarray:uint16:2048` does; else None."""
    found = re.fullmatch(r"ndarray:\w+:(\d+)", encoding)
    return int(found[1]) if found else None


def check_length(num_tokens: int, max_seq_len: int, what: str, *, allow_truncation: bool) -> None:
    """Raise DataError for samples shorter than `max_seq_len`, and for longer ones unless truncation is allowed."""
    if num_tokens < max_seq_len:
        raise DataError(
            f"{what} {num_tokens} tokens, but max_seq_len is {max_seq_len}; set max_seq_len={num_tokens}, or prepare "
            f"the data again with --max-seq-len {max_seq_len}"
        )
    if num_tokens > max_seq_len and not allow_truncation:
        left_out = share_left_out(num_tokens, max_seq_len)
        raise DataError(
            f"{what} {num_tokens} tokens, and max_seq_len {max_seq_len} leaves {left_out} of the text out; set "
            f"max_seq_len={num_tokens}, prepare the data again with --max-seq-len {max_seq_len}, or set "
            "allow_truncation: true in the loader's dataset"
        )


def share_left_out(num_tokens: int, max_seq_len: int) -> str:
    return f"{100 * (1 - max_seq_len / num_tokens):.3g} %"


class RowReader:
    """Decoder of rows of one length. Raises DataError for a row of another length or with impossible ids."""

    def __init__(
        self,
        max_seq_len: int,
        vocab_size: int | None,
        tokenizer: Tokenizer | None,
        token_type: str,
        allow_truncation: bool = False,
    ) -> None:
        self.max_seq_len = max_seq_len
        self.allow_truncation = allow_truncation
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.token_dtype = np.dtype(token_type)
        """The type of a column `tokens` of plain bytes."""

    def read(self, sample: dict[str, Any]) -> NDArray[np.int64]:
        """Return the token ids of a sample [t]; `PAD_TOKEN` behind a text that is too short."""
        if "tokens" not in sample:
            assert self.tokenizer is not None
            tokens = np.asarray(self.tokenizer.encode(sample["text"])[: self.max_seq_len], np.int64)
            self._check_vocabulary(tokens)
            return np.pad(tokens, (0, self.max_seq_len - len(tokens)), constant_values=PAD_TOKEN)

        tokens = sample["tokens"]
        if isinstance(tokens, bytes):
            tokens = self._numbers_of(tokens)
        check_whole_numbers(tokens)
        check_length(len(tokens), self.max_seq_len, "the sample has", allow_truncation=self.allow_truncation)
        tokens = tokens[: self.max_seq_len].astype(np.int64)
        self._check_vocabulary(tokens)
        return tokens

    def _numbers_of(self, raw: bytes) -> NDArray[np.integer]:
        """Read bytes as `token_dtype`. Bytes carry no type: DataError names the right one where a row shows it."""
        dtype, vocab_size = self.token_dtype, self.vocab_size or MAX_VOCAB_SIZE
        if len(raw) % dtype.itemsize:
            found, tokens = f"{len(raw)} bytes of tokens are not whole {dtype} numbers", None
        else:
            tokens = np.frombuffer(raw, dtype)
            outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
            # If the type is wrong, most ids are outside. `_check_vocabulary` finds a single damaged id.
            found = f"token id {outside[0]} is outside the vocabulary" if 2 * len(outside) > len(tokens) else ""
        if found:
            fitting = [name for name in TOKEN_TYPES if _could_be(raw, name, vocab_size, self.max_seq_len)]
        else:
            # Pairs of narrow numbers read as wide ones are hardly ever all so small.
            most = min(vocab_size, (8 if self.vocab_size else 1) << 8 * dtype.itemsize)
            wider = [name for name in TOKEN_TYPES if np.dtype(name).itemsize > dtype.itemsize]
            fitting = [name for name in wider if _could_be(raw, name, most, 2)]
        if fitting:
            found = f"{found}: " if found else ""
            raise DataError(
                f"{found}the bytes of a row are {fitting[0]} numbers, and are read as {dtype}; set "
                f"token_encoding_type: {fitting[0]} in the loader's dataset"
            )
        if tokens is None:
            raise DataError(f"{found}; set token_encoding_type to the type they were written with")
        return tokens

    def _check_vocabulary(self, tokens: NDArray[np.int64]) -> None:
        if self.vocab_size is None or not len(tokens):
            return
        for token_id in (int(tokens.max()), int(tokens.min())):
            if not 0 <= token_id < self.vocab_size:
                raise DataError(
                    f"token id {token_id} is outside the vocabulary of {self.vocab_size}: the tokenizer does not "
                    "match the one the data was prepared with, or the shard is damaged"
                )


def check_whole_numbers(tokens: Any) -> None:
    if not (isinstance(tokens, np.ndarray) and tokens.ndim == 1 and tokens.dtype.kind in "iu"):
        raise DataError(f"column tokens holds {type(tokens).__name__}, not a row of whole numbers")


def _could_be(raw: bytes, name: str, vocab_size: int, least: int) -> bool:
    """Return whether a row's bytes may be token ids of this type: `least` or more, and not mostly zeros."""
    if len(raw) % np.dtype(name).itemsize:
        return False
    tokens = np.frombuffer(raw, name)
    if len(tokens) < least or int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
        return False
    return 2 * int(np.count_nonzero(tokens)) > len(tokens)
