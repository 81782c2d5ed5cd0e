"""Packing of requests into rows of tokens that compute each shared prefix once. No torch.

The requests of an item share their context, and where a task fixes its examples all items share those. A row holds the
prefix trees of its requests, in an order where each token follows its parent: its position is its depth, and it attends
to its ancestors and itself. Short items are packed into one row, so that there is next to no padding.
"""

import bisect
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from llmfoundry_lite.evaluation.tasks import Request

MIN_ROW_TOKENS = 128
"""Tokens that a row is filled up to at least, beside the shared ones."""


class Separator(NamedTuple):
    """A token between documents that do not attend to each other."""

    token: int
    begins: bool = False  # it is the first token of a document, not the last


class Row:
    """Prefix trees of requests."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.parents: list[int] = []  # index in the row of the token before; -1 at the beginning
        self.targets: list[tuple[int, int, int]] = []
        """(index of a token in the row, the token to predict after it, number of the request)"""
        self._children: list[dict[int, int]] = []
        self._first: dict[int, int] = {}

    def add(self, request: Request, number: int) -> None:
        node = -1
        for token in request.context:
            node = self._step(node, token)
        for token in request.continuation[:-1]:
            self.targets.append((node, token, number))
            node = self._step(node, token)
        self.targets.append((node, request.continuation[-1], number))

    def _step(self, node: int, token: int) -> int:
        children = self._first if node < 0 else self._children[node]
        if token not in children:
            children[token] = len(self.tokens)
            self.tokens.append(token)
            self.positions.append(self.positions[node] + 1 if node >= 0 else 0)
            self.parents.append(node)
            self._children.append({})
        return children[token]

    def __len__(self) -> int:
        return len(self.tokens)

    def attention_mask(self, length: int, separator: Separator | None = None) -> np.ndarray:
        """Return bool [length, length]. With a separator, a token attends to its own document only.

        Padding attends to itself, or softmax would divide by 0.
        """
        mask = np.eye(length, dtype=bool)
        for index, parent in enumerate(self.parents):
            if parent >= 0 and not self._divides(separator, parent, index):
                mask[index] |= mask[parent]
        return mask

    def is_plain(self, separator: Separator | None = None) -> bool:
        """Return whether the row has no branches, and one document."""
        return all(
            parent == index - 1 and (parent < 0 or not self._divides(separator, parent, index))
            for index, parent in enumerate(self.parents)
        )

    def _divides(self, separator: Separator | None, parent: int, index: int) -> bool:
        return separator is not None and self.tokens[index if separator.begins else parent] == separator.token


Numbered = tuple[int, Request]


def pack(groups: Sequence[Sequence[Request]], max_batch_tokens: int, *, shares: bool = True) -> list[list[Row]]:
    """Put requests, grouped by what belongs together, into batches of up to about `max_batch_tokens` tokens.

    A batch is rows that are computed in one forward pass, padded to its first. A function of its arguments alone: every
    rank makes the same batches, so that results do not depend on how many share them. Requests are numbered in order.
    Long rows come first, so that memory runs out at once if it does. Without `shares`, every request has a row of plain
    text to itself.
    """
    count = itertools.count()
    numbered = [[(next(count), request) for request in group] for group in groups]
    if shares:
        rows = _fill_rows(numbered, _num_shared(groups), max_batch_tokens)
    else:
        rows = [_row([one]) for group in numbered for one in group]
    rows.sort(key=lambda row: (-len(row), row.targets[0][2]))
    batches: list[list[Row]] = []
    for row in rows:
        last = batches[-1] if batches else []
        width = len(last[0]) if last else 0
        # A batch that is large enough to be computed well ends before padding costs more than another batch.
        is_enough = width * len(last) >= max_batch_tokens // 4 and len(row) < 0.92 * width
        if not last or is_enough or width * (len(last) + 1) > max_batch_tokens:
            batches.append([])
        batches[-1].append(row)
    return batches


def _row(requests: Iterable[Numbered]) -> Row:
    row = Row()
    for number, request in requests:
        row.add(request, number)
    return row


def _num_shared(groups: Sequence[Sequence[Request]]) -> int:
    """Return the length of the prefix of all requests."""
    contexts = [request.context for group in groups for request in group]
    if len(groups) < 2:
        return 0
    low, high = min(contexts), max(contexts)  # what these two share, all that lie between them share
    return next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))


def _fill_rows(groups: list[list[Numbered]], shared: int, max_tokens: int) -> list[Row]:
    """Pack several groups into a row where they fit: it needs no padding, and computes the shared prefix once.

    The longest group that is left opens a row, and the longest that fit fill it.
    """
    room = min(_room(shared), max_tokens - shared)
    sizes = [len(_row(group)) - shared for group in groups]
    left = sorted(range(len(groups)), key=lambda i: (sizes[i], -i))
    rows: list[Row] = []
    while left:
        members = [left.pop()]
        free = room - sizes[members[0]]
        while left and (at := bisect.bisect_right(left, free, key=sizes.__getitem__)):
            members.append(left.pop(at - 1))
            free -= sizes[members[-1]]
        rows.append(_row(one for i in members for one in groups[i]))
    return rows


def _room(shared: int) -> int:
    """Return the tokens of a row beside those that all share.

    A row of p shared and n other tokens costs about (p + n)(1 + (p + n)/c) for n tokens' worth of answers, where c is
    the length at which attention costs as much as everything else (6 times the model's width, some thousand tokens);
    that is least near n = sqrt(p (p + c)). Below MIN_ROW_TOKENS, attention costs next to nothing.
    """
    return max(MIN_ROW_TOKENS, int((shared * (shared + 4000)) ** 0.5))
