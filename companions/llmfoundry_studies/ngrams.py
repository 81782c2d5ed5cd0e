"""N-grams of words: from texts to 64-bit hashes, and a table in which many of them are looked up at once.

Two texts share an n-gram if n words in a row are equal after normalisation. Words are runs of letters and digits in
lower case, so that punctuation, line ends and capitals make no difference. This is the rule of the contamination study
of GPT-3 (Brown et al. 2020, appendix C), with n = 13.

A hash of an n-gram is a polynomial in the hashes of its words modulo 2^64, which numpy computes for all positions of a
text at once. Hashes only find candidates: a match counts when the words themselves are equal.
"""

import re
import unicodedata
from collections.abc import Iterable

import numpy as np
import xxhash
from numpy.typing import NDArray

Uint64s = NDArray[np.uint64]

WITHOUT_SPACES = r"\u0e00-\u0e7f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
"""Characters of scripts that are written without spaces between words: Thai, Japanese, Chinese."""
MARKS = r"\u0300-\u036f\u0900-\u0dff"
"""Marks that belong to the letter before them, and are no letters to Python. Indic scripts need them."""
WORD = re.compile(rf"[{WITHOUT_SPACES}]|(?:(?![{WITHOUT_SPACES}])[\w{MARKS}])+")
"""One character of a script without spaces, which counts as a word; or a run of other letters, digits and marks."""
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that multiplying by it loses no bits modulo 2^64. It is 2^64 divided by the golden ratio."""
MAX_CACHED_WORDS = 1 << 20
"""Words whose hashes are kept. The cache is emptied when it is full, so that its memory is bounded."""
FILTER_BITS = 24
"""Low bits of a hash by which most lookups are answered without a search: a filter of 16 MB."""


def split_words(text: str) -> list[str]:
    """Return the normalised words of a text: `It's 9 o'clock.` has the words it, s, 9, o and clock."""
    return WORD.findall(unicodedata.normalize("NFKC", text).lower())


class WordHasher:
    """Hashes of words, with a cache of the most recent ones."""

    def __init__(self) -> None:
        self._hash_of: dict[str, int] = {}

    def hash_words(self, words: list[str]) -> Uint64s:
        """Return a 64-bit hash for each word [num_words]."""
        if len(self._hash_of) > MAX_CACHED_WORDS:
            self._hash_of.clear()
        hash_of = self._hash_of
        hashes = []
        for word in words:
            word_hash = hash_of.get(word)
            if word_hash is None:
                word_hash = xxhash.xxh3_64_intdigest(word.encode(errors="surrogatepass"))
                hash_of[word] = word_hash
            hashes.append(word_hash)
        return np.array(hashes, np.uint64)


def hash_ngrams(word_hashes: Uint64s, length: int) -> Uint64s:
    """Return the hash of each n-gram of `length` words, [num_words - length + 1], or [0] for a shorter text.

    For words a b c d and length 3 these are a·M² + b·M + c and b·M² + c·M + d modulo 2^64, with M = MULTIPLIER.
    """
    num_ngrams = len(word_hashes) - length + 1
    if num_ngrams <= 0:
        return np.zeros(0, np.uint64)
    hashes = np.zeros(num_ngrams, np.uint64)
    for offset in range(length):
        hashes = hashes * MULTIPLIER + word_hashes[offset : offset + num_ngrams]
    return hashes


class NgramTable:
    """A set of n-gram hashes in which those of a text are looked up."""

    def __init__(self, hashes: Iterable[int]) -> None:
        self._sorted_hashes = np.unique(np.fromiter(hashes, np.uint64))
        self._filter = np.zeros(1 << FILTER_BITS, np.bool_)
        self._filter[self._filter_index(self._sorted_hashes)] = True

    @staticmethod
    def _filter_index(hashes: Uint64s) -> NDArray[np.int64]:
        """Return the place of each hash in the filter."""
        return (hashes & np.uint64((1 << FILTER_BITS) - 1)).astype(np.int64)

    def find(self, hashes: Uint64s) -> NDArray[np.int64]:
        """Return the positions in `hashes` of those that are in the table, ascending."""
        # Most n-grams of a training text are in no task. The filter excludes them without a binary search.
        positions = np.flatnonzero(self._filter[self._filter_index(hashes)])
        if not len(positions) or not len(self._sorted_hashes):
            return positions[:0]
        candidates = hashes[positions]
        places = np.searchsorted(self._sorted_hashes, candidates)
        places = np.minimum(places, len(self._sorted_hashes) - 1)
        return positions[self._sorted_hashes[places] == candidates]
