"""Packing of requests into rows of tokens that compute each shared prefix once. No torch.

The requests of an item share their context, and where a task fixes its examples, all items share those. A row holds the
prefix trees of its requests, in an order where each token comes after its parent. A token's position is its depth, and
it attends to its ancestors and itself. Short items are packed into one row, so there is next to no padding.
"""

import bisect
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from llmfoundry_lite.evaluation.tasks import Request

MIN_ROW_TOKENS = 128
"""Least number of tokens to fill a row with, besides the shared ones."""


class Separator(NamedTuple):
    """Token that divides documents which do not attend to each other."""

    token: int
    begins: bool = False  # it is the first token of a document, not the last


class Row:
    """Prefix trees of requests, as one row of tokens."""

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

        Padding attends to itself, because softmax would divide by 0 otherwise.
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
    """Put requests, in groups that share a context, into batches of up to about `max_batch_tokens` tokens.

    A batch is rows for one forward pass, padded to the length of the first. Batches depend on the arguments alone, so
    results are the same on any number of ranks. Requests are numbered in order. Long rows come first, so that memory
    runs out at the beginning if at all. Without `shares`, every request has a row of plain text to itself.
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
        # Once a batch is large enough to be efficient, it ends before padding costs more than another batch would.
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
    """Return the length of the prefix that all requests share."""
    contexts = [request.context for group in groups for request in group]
    if len(groups) < 2:
        return 0
    low, high = min(contexts), max(contexts)  # in sorted order, all between these two share their prefix
    return next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))


def _fill_rows(groups: list[list[Numbered]], shared: int, max_tokens: int) -> list[Row]:
    """Pack several groups into one row where they fit, which saves padding and computes the shared prefix once.

    The longest remaining group opens a row, and the longest groups that still fit fill it.
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
    """Return how many tokens a row should have besides the shared ones.

    A row of p shared and n other tokens costs about (p + n)(1 + (p + n)/c), and answers n tokens. Here c is the length
    at which attention costs as much as everything else: 6 times the model's width, some thousand tokens. The cost for
    each of the n tokens is least near n = sqrt(p (p + c)). Below MIN_ROW_TOKENS, attention costs next to nothing.
    """
    return max(MIN_ROW_TOKENS, int((shared * (shared + 4000)) ** 0.5))
