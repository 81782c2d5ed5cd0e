"""Best-fit packing: documents -> samples that contain whole documents, for `data prepare --pack best-fit`.

A document that is longer than a sample is cut into full samples and a rest. Rests and shorter documents are packed, the
longest first, each into the fullest sample that still has room for it. This is best-fit decreasing, as in Ding et al.
2024, "Fewer Truncations Improve Language Modeling" (arXiv 2404.10830).

Documents are packed in windows of consecutive units, so that memory is bounded and any machine can write any shards.
The result depends on the lengths of documents alone. `samples.py` plans and writes the shards.
"""

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

WINDOW_TOKENS = 1 << 22
"""Tokens from which on a window is complete. Windows four times as large save at most 0.4 percentage points of padding,
for a million documents of three distributions of lengths and samples of 256 to 8,192 tokens (docs/data.md)."""
WINDOW_SAMPLES = 512
"""Samples that a window must have room for, as it has with WINDOW_TOKENS and samples of 8,192 tokens."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Packing:
    """The samples of a window: which of its tokens go where.

    Pieces are documents, or parts of documents that are longer than a sample. The arrays have an element for each
    piece, in the order of the samples, and in a sample in the order of the text.
    """

    lengths: np.ndarray
    """Number of tokens of each piece."""
    sources: np.ndarray
    """Position of its first token among the tokens of the window."""
    targets: np.ndarray
    """Position of its first token among those of the samples, padding included."""
    sample_lengths: np.ndarray
    """Number of tokens of each sample, without padding."""

    def arrange(self, tokens: np.ndarray, sample_tokens: int, padding: int) -> np.ndarray:
        """Return the samples of a window with these tokens: n samples of t tokens, filled up with `padding`."""
        samples_nt = np.full((len(self.sample_lengths), sample_tokens), padding, tokens.dtype)
        arranged = samples_nt.reshape(-1)
        pieces = zip(self.lengths.tolist(), self.sources.tolist(), self.targets.tolist(), strict=True)
        for length, source, target in pieces:
            arranged[target : target + length] = tokens[source : source + length]
        return samples_nt


def pack_documents(doc_tokens: np.ndarray, sample_tokens: int) -> Packing:
    """Pack the documents of a window into samples.

    doc_tokens: number of tokens of each document, at least 1.
    sample_tokens: number of tokens of a sample.

    A sample stands where its longest piece is in the text, so that samples are not sorted by the lengths of their
    documents. With samples of 10 tokens, documents of 4, 23, 5 and 2 tokens make the pieces 4, 10, 10, 3, 5 and 2.
    Their samples are 10 and 10, then 3 and 2 with 5 tokens of padding, and 4 and 5 with 1.
    """
    pieces = cut_documents(doc_tokens, sample_tokens)
    sample_of_piece = assign_samples(pieces, sample_tokens)

    # Order the pieces by sample, and in a sample by text. The targets leave room for the padding of earlier samples.
    order = np.argsort(sample_of_piece, kind="stable")
    lengths = pieces[order]
    samples = sample_of_piece[order]
    num_samples = int(samples[-1]) + 1 if len(samples) else 0
    sample_lengths = np.bincount(samples, weights=lengths, minlength=num_samples).astype(np.int64)
    padding_before = np.cumsum(sample_tokens - sample_lengths) - (sample_tokens - sample_lengths)
    return Packing(
        lengths=lengths,
        sources=(np.cumsum(pieces) - pieces)[order],
        targets=np.cumsum(lengths) - lengths + padding_before[samples],
        sample_lengths=sample_lengths,
    )


def cut_documents(doc_tokens: np.ndarray, sample_tokens: int) -> np.ndarray:
    """Return the lengths of pieces: documents of at most one sample, and full samples and rests of longer documents.

    With samples of 10 tokens, documents of 4, 23 and 10 tokens have pieces of 4, 10, 10, 3 and 10 tokens.
    """
    num_pieces = -(-doc_tokens // sample_tokens)  # rounded up
    pieces = np.full(int(num_pieces.sum()), sample_tokens, np.int64)
    last_pieces = np.cumsum(num_pieces) - 1
    pieces[last_pieces] = doc_tokens - (num_pieces - 1) * sample_tokens
    return pieces


def assign_samples(pieces: np.ndarray, sample_tokens: int) -> np.ndarray:
    """Assign each piece to a sample by best-fit decreasing, and return the number of its sample.

    pieces: lengths of the pieces, at least 1 and at most `sample_tokens`.

    Pieces are taken from the longest to the shortest, and equally long ones in the order of the text. Each goes into
    the sample with the least room that is enough, or of several with the same room into the one that was begun first.
    If there is none, it begins a sample. Samples are numbered in the order of the pieces that began them, in the text.

    This takes O(log sample_tokens) for each piece, because samples with the same room are kept together: at most
    `sample_tokens` rooms are searched.
    """
    rooms: list[int] = []
    """Rooms that samples have, from the least to the largest, each once."""
    samples_with_room: dict[int, list[int]] = {}
    """Room -> heap of the samples that have it."""
    first_pieces: list[int] = []
    """The piece that began each sample."""
    sample_of_piece = np.empty(len(pieces), np.int64)

    longest_first = np.argsort(-pieces, kind="stable")
    for piece, length in zip(longest_first.tolist(), pieces[longest_first].tolist(), strict=True):
        # Choose the sample.
        index = bisect_left(rooms, length)
        if index == len(rooms):
            sample = len(first_pieces)
            first_pieces.append(piece)
            room = sample_tokens
        else:
            room = rooms[index]
            sample = heapq.heappop(samples_with_room[room])
            if not samples_with_room[room]:
                del rooms[index]
        sample_of_piece[piece] = sample

        # File it under the room that is left.
        room -= length
        if room:
            samples = samples_with_room.setdefault(room, [])
            if not samples:
                insort(rooms, room)
            heapq.heappush(samples, sample)

    # Number the samples by the text.
    number_of_sample = np.empty(len(first_pieces), np.int64)
    number_of_sample[np.argsort(first_pieces)] = np.arange(len(first_pieces))
    return number_of_sample[sample_of_piece]


def divide_into_windows(unit_ends: np.ndarray, sample_tokens: int) -> np.ndarray:
    """Divide consecutive units into windows of at least WINDOW_TOKENS and WINDOW_SAMPLES, except for the last one.

    unit_ends: number of tokens up to the end of each unit.
    sample_tokens: number of tokens of a sample.

    Returns for each window the number of units up to its end. With windows of 10 tokens, units that end at 6, 12, 14,
    22 and 25 make windows that end with 2, 4 and 5 units.
    """
    window_tokens = max(WINDOW_TOKENS, WINDOW_SAMPLES * sample_tokens)
    windows = []
    num_tokens = 0
    num_units = 0
    while num_units < len(unit_ends):
        last_unit = int(np.searchsorted(unit_ends, num_tokens + window_tokens))
        num_units = min(last_unit + 1, len(unit_ends))
        num_tokens = int(unit_ends[num_units - 1])
        windows.append(num_units)
    return np.array(windows, np.int64)
