"""Token files: the tokens and documents of one unit, which step 1 of `data prepare` writes and step 2 reads.

A token file is `.partial/units/PPPPPPPP-UUUUUUUU.npz`, with the numbers of its piece and of the unit in that piece. So
names in alphabetical order are in the order of the text, and several machines can write token files without knowing of
each other. `count_splits` and `UnitTable` count what each file has for each split, by which step 2 plans the shards.
"""

import contextlib
import os
import struct
import zipfile
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llmfoundry_lite.data.spelling import LostText, load_lost_text
from llmfoundry_lite.errors import DataError, one_line
from llmfoundry_lite.prepare.documents import SKIP_REASONS
from llmfoundry_lite.prepare.summary import SPLITS

MAX_SKIPPED_EXAMPLES = 20
"""Number of skipped documents that a summary names."""

TEXT_HASH_BITS = 128
TEXT_DIGEST_PREFIX = "xxh3-128-sum:"
"""Beginning of a digest of texts, which says how it is computed: the sum of the XXH3 hashes of the texts in UTF-8."""

FEW_DOCUMENTS = 0.25
"""Fraction of the documents of a token file below which they are read one by one instead of with all others."""
ZIP_HEADER_BYTES = 30
"""Size of the fixed part of a local header in a zip archive (APPNOTE.TXT of PKWARE, 4.3.7)."""

COUNTS = ("documents", "tokens", "text_bytes")
"""Numbers that are counted for each split. Tokens include the end-of-text token of each document."""

UNIT_ROW = np.dtype(
    [(name, np.int64) for name in ("piece", "unit", *(f"{split}_{c}" for split in SPLITS for c in COUNTS))]
)
"""A row of a `UnitTable`: the number of a unit, and its counts for each split, such as `train_tokens`."""


class UnitNumber(NamedTuple):
    """The place of a unit in its source. Numbers are ordered like the text."""

    piece: int
    """Number of its piece in the source; the first one is 0."""
    unit: int
    """Number of the unit in its piece; the first one is 0."""

    @property
    def file_name(self) -> str:
        """The name of its token file."""
        return f"{self.piece:08}-{self.unit:08}.npz"


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenUnit:
    """The tokens of one unit of text: the content of a token file."""

    tokens: np.ndarray = field(repr=False)
    """Tokens of all documents, each followed by the end-of-text token."""
    doc_tokens: np.ndarray
    """Tokens of each document, its end-of-text token included; int64."""
    doc_bytes: np.ndarray
    """UTF-8 bytes of each document; int64."""
    doc_keys: np.ndarray
    """The split key of each document; uint64."""
    skipped: np.ndarray
    """Number of skipped documents for each of SKIP_REASONS; int64."""
    named: np.ndarray
    """A sentence for each of the first skipped documents; str."""
    made_of: np.ndarray
    """One str that identifies the text and the tokenizer: a token file with another one is made again."""
    loss: np.ndarray
    """One str: the lost text at the beginning of the unit, as `LostText.as_text` serializes it."""
    text_digest: np.ndarray
    """One str: the `add_text_hashes` of all documents, as `format_text_digest` formats it."""


def add_text_hashes(first: int, second: int) -> int:
    """Add hashes of texts. The sum says which texts there are, in whatever order and however they are divided.

    It is a number of 128 bits. The sum of no texts is 0.
    """
    return (first + second) % 2**TEXT_HASH_BITS


def format_text_digest(text_hash: int) -> str:
    """Format a sum of the hashes of texts: "xxh3-128-sum:" and 32 digits."""
    return f"{TEXT_DIGEST_PREFIX}{text_hash:032x}"


def parse_text_digest(text: str) -> int:
    """Return the number that `format_text_digest` has formatted. Raises ValueError for any other text."""
    digits = text.removeprefix(TEXT_DIGEST_PREFIX)
    text_hash = int(digits, 16)
    if format_text_digest(text_hash) != text:
        raise ValueError(f"{text!r} is not a digest of texts")
    return text_hash


@contextlib.contextmanager
def damage_as_data_error(path: Path) -> Iterator[None]:
    """Context manager: turn the errors of a token file that is damaged, or of another form, into a DataError."""
    try:
        yield
    except (ValueError, KeyError, IndexError, TypeError, EOFError, struct.error, zipfile.BadZipFile) as error:
        # For a file of other bytes, numpy advises to allow pickles, which would run code from it.
        is_other_file = "pickle" in str(error)
        damage = "it is not a file of tokens" if is_other_file else one_line(error)
        raise DataError(
            f"{path} is damaged ({damage}); remove it and run the command that tokenises again, which makes it anew"
        ) from error


def load_unit(path: Path, *, without_tokens: bool = False) -> TokenUnit:
    """Read a token file. With `without_tokens`, the tokens are not read, and `tokens` is empty.

    Raises DataError for a damaged file.
    """
    with damage_as_data_error(path), np.load(path) as stored:
        # numpy reads an array of an .npz file only when it is accessed.
        values = {name: stored[name] for name in TokenUnit.__slots__ if name != "tokens"}
        values["tokens"] = np.empty(0, np.uint16) if without_tokens else stored["tokens"]
        return TokenUnit(**values)


def load_documents(path: Path, doc_tokens: np.ndarray, is_wanted: np.ndarray) -> np.ndarray:
    """Read the tokens of some documents from a token file, one after the other.

    doc_tokens: number of tokens of each document in the file.
    is_wanted: whether to read each document.

    If few documents are wanted, such as those of the validation split, the rest of the file is not read. Raises
    DataError for a damaged file.
    """
    with damage_as_data_error(path):
        if is_wanted.mean() >= FEW_DOCUMENTS:
            with np.load(path) as stored:
                return stored["tokens"][np.repeat(is_wanted, doc_tokens)]
        tokens = map_tokens(path)
        ends = np.cumsum(doc_tokens)
        wanted = zip(ends[is_wanted], doc_tokens[is_wanted], strict=True)
        return np.concatenate([tokens[end - length : end] for end, length in wanted])


def map_tokens(path: Path) -> np.ndarray:
    """Map the tokens of a token file into memory, so that only the parts that are used are read from disk.

    numpy cannot map an array of an .npz file, which is a zip archive that does not compress. The content of a member
    begins after its local header: 30 bytes, the last four of which are the lengths of the name and of an extra field.
    """
    with zipfile.ZipFile(path) as archive:
        member = archive.getinfo("tokens.npy")
    with open(path, "rb") as file:
        file.seek(member.header_offset)
        name_length, extra_length = struct.unpack("<HH", file.read(ZIP_HEADER_BYTES)[-4:])
        file.seek(name_length + extra_length, os.SEEK_CUR)
        np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        return np.memmap(path, dtype, mode="r", offset=file.tell(), shape=shape)


def is_of_split(unit: TokenUnit, split: str, threshold: np.uint64) -> np.ndarray:
    """Return for each document of a unit whether it is in a split. Keys below the threshold are held out."""
    is_held_out = unit.doc_keys < threshold
    return is_held_out if split == "val" else ~is_held_out


def count_splits(unit: TokenUnit, threshold: np.uint64) -> list[int]:
    """Return the COUNTS of a unit for each of SPLITS, in the order of UNIT_ROW."""
    counts = []
    for split in SPLITS:
        is_counted = is_of_split(unit, split, threshold)
        counts.append(int(is_counted.sum()))
        counts.append(int(unit.doc_tokens[is_counted].sum()))
        counts.append(int(unit.doc_bytes[is_counted].sum()))
    return counts


class UnitTable:
    """Counts of the token files of a source, or of some of its pieces, in the order of the text.

    Units take 64 bytes each, so that a source of many small files fits into memory.
    """

    def __init__(self) -> None:
        """Start without units."""
        self._values = array("q")
        """The rows, one after the other, as 64-bit integers."""
        self.skipped = np.zeros(len(SKIP_REASONS), np.int64)
        """Number of skipped documents for each of SKIP_REASONS."""
        self.skipped_examples: list[str] = []
        """A sentence for each of the first MAX_SKIPPED_EXAMPLES skipped documents."""
        self.loss = LostText()
        """Lost text of all units."""
        self.text_hash = 0
        """Sum of the hashes of all texts, see `add_text_hashes`."""

    @property
    def rows(self) -> np.ndarray:
        """A row of UNIT_ROW for each unit."""
        return np.array(self._values, np.int64).view(UNIT_ROW)

    def add(self, number: UnitNumber, unit: TokenUnit, threshold: np.uint64) -> None:
        """Add the next unit. Its documents are divided into splits by the threshold; its tokens are not needed."""
        self._values.extend((*number, *count_splits(unit, threshold)))
        text_hash = parse_text_digest(str(unit.text_digest))
        self._add_sums(unit.skipped, unit.named.tolist(), load_lost_text(str(unit.loss)), text_hash)

    def append(
        self, rows: np.ndarray, skipped: np.ndarray, examples: Iterable[str], loss: LostText, text_hash: int
    ) -> None:
        """Add the content of the table of the following pieces."""
        self._values.frombytes(np.ascontiguousarray(rows).tobytes())
        self._add_sums(skipped, examples, loss, text_hash)

    def _add_sums(self, skipped: np.ndarray, examples: Iterable[str], loss: LostText, text_hash: int) -> None:
        """Add what is summed over all units."""
        self.text_hash = add_text_hashes(self.text_hash, text_hash)
        self.skipped += skipped
        self.skipped_examples = [*self.skipped_examples, *examples][:MAX_SKIPPED_EXAMPLES]
        self.loss += loss
