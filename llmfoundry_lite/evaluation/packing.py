"""Packs requests into rows of tokens, so that a prefix shared by several requests is computed once. No torch.

The requests of an item share their context, and where a task has fixed examples, all its items share those. A row
therefore holds its requests as a tree of prefixes, written out so that each token comes after its parent. A token's
position is its depth in the tree, and it attends to its ancestors and itself. Several short items share a row, because
a batch is padded to its longest row.

For example, the requests `A B -> C` and `A B -> D E` become one row, because they share `A B`:

    index       0   1   2            `C` and `E` are predicted and never read, so they are not in the row.
    token       A   B   D
    parent     -1   0   1
    targets    (1, C, request 0), (1, D, request 1), (2, E, request 1)
"""

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from llmfoundry_lite.evaluation.items import Request

MIN_ROW_TOKENS = 128
"""Tokens that a row should have at least besides the shared prefix. Below this length attention costs next to nothing
compared with the rest of the model."""

ATTENTION_LENGTH = 4000
"""Row length at which attention costs about as much as everything else: 6 times the width of a model, by the count of
operations, which is some thousand tokens for the models that this library trains."""

EFFICIENT_FRACTION = 4
"""A batch with 1/4 of the tokens that fit uses a device well enough, so that it may end there."""

MAX_PADDING = 0.08
"""Share of padding in a row from which another batch is cheaper than a longer one."""


class Separator(NamedTuple):
    """A token that divides documents, so that no token attends across it."""

    token: int
    begins: bool = False
    """The token is the first one of a document. Otherwise it is the last one."""


class Target(NamedTuple):
    """One token whose probability a row answers."""

    index: int
    """Index in the row of the token that predicts it."""
    token: int
    request: int
    """Number of the request that asks for it."""


class NumberedRequest(NamedTuple):
    """A request with its number among all requests of a task, by which its score is found again."""

    number: int
    request: Request


class Row:
    """One row of tokens that holds the prefix trees of its requests."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        """Depth of each token in its tree."""
        self.parents: list[int] = []
        """Index in the row of the token before each token; -1 for the first token of a tree."""
        self.targets: list[Target] = []
        self._roots: dict[int, int] = {}
        """First token of a tree -> its index."""
        self._children: list[dict[int, int]] = []
        """For each index: next token -> its index."""

    def add(self, request: Request, number: int) -> None:
        """Add a request. Its last token is predicted but never read, so it takes no place in the row."""
        index = -1
        for token in request.context:
            index = self._find_or_add(token, parent=index)

        for token in request.continuation[:-1]:
            self.targets.append(Target(index, token, number))
            index = self._find_or_add(token, parent=index)
        self.targets.append(Target(index, request.continuation[-1], number))

    def _find_or_add(self, token: int, parent: int) -> int:
        """Return the index of `token` after `parent`, adding it to the row if it is not there yet."""
        siblings = self._roots if parent < 0 else self._children[parent]
        if token not in siblings:
            siblings[token] = len(self.tokens)
            self.tokens.append(token)
            self.positions.append(0 if parent < 0 else self.positions[parent] + 1)
            self.parents.append(parent)
            self._children.append({})
        return siblings[token]

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.tokens)

    def attention_mask(self, length: int, separator: Separator | None = None) -> np.ndarray:
        """Return which tokens each token attends to: bool [length, length].

        With a separator, a token attends to its own document only. `length` is that of the padded row. Padding
        attends to itself, because softmax over nothing would divide by 0.
        """
        mask = np.eye(length, dtype=bool)
        for index, parent in enumerate(self.parents):
            if parent >= 0 and not self._begins_document(index, separator):
                mask[index] |= mask[parent]
        return mask

    def is_plain(self, separator: Separator | None = None) -> bool:
        """Return whether the row is ordinary text: one document, without branches."""
        for index, parent in enumerate(self.parents):
            if parent != index - 1:
                return False
            if parent >= 0 and self._begins_document(index, separator):
                return False
        return True

    def _begins_document(self, index: int, separator: Separator | None) -> bool:
        """Return whether the separator stands between the token at `index` and its parent."""
        if separator is None:
            return False
        dividing = index if separator.begins else self.parents[index]
        return self.tokens[dividing] == separator.token


def pack(groups: Sequence[Sequence[Request]], max_batch_tokens: int, *, shares: bool = True) -> list[list[Row]]:
    """Put requests into batches of rows, and return the batches.

    `groups` holds the requests of each item, which share a context. Requests are numbered in order over all groups.
    With `shares`, a prefix that several requests have in common is in a row once. Otherwise every request has a row of
    plain text to itself, for models that do not take an attention mask.

    The rows of a batch go through the model together, padded to its first row, which is the longest. A batch has about
    `max_batch_tokens` tokens with padding, and more only if a single row does. Long rows come first, so that memory, if
    it runs out, does so at the beginning. Batches depend on the arguments alone and not on the number of ranks.
    """
    numbered_groups: list[list[NumberedRequest]] = []
    num_requests = 0
    for group in groups:
        numbered_groups.append([NumberedRequest(num_requests + i, request) for i, request in enumerate(group)])
        num_requests += len(group)

    if shares:
        rows = _fill_rows(numbered_groups, _shared_length(groups), max_batch_tokens)
    else:
        rows = [_build_row([request]) for group in numbered_groups for request in group]
    # Longest first. Of equally long rows, the one with the earliest request, so that the order is always the same.
    rows.sort(key=lambda row: (-len(row), row.targets[0].request))

    batches: list[list[Row]] = []
    for row in rows:
        if not batches or _is_full(batches[-1], row, max_batch_tokens):
            batches.append([])
        batches[-1].append(row)
    return batches


def _is_full(batch: list[Row], next_row: Row, max_batch_tokens: int) -> bool:
    """Return whether `next_row` should begin another batch: it does not fit, or would be padded for too much."""
    width = len(batch[0])
    if width * (len(batch) + 1) > max_batch_tokens:
        return True
    is_large_enough = width * len(batch) >= max_batch_tokens // EFFICIENT_FRACTION
    needs_padding = len(next_row) < (1 - MAX_PADDING) * width
    return is_large_enough and needs_padding


def _build_row(requests: Sequence[NumberedRequest]) -> Row:
    """Return one row that holds all these requests, sharing the prefixes that they have in common."""
    row = Row()
    for numbered in requests:
        row.add(numbered.request, numbered.number)
    return row


def _shared_length(groups: Sequence[Sequence[Request]]) -> int:
    """Return the number of tokens with which the contexts of all requests begin alike."""
    if len(groups) < 2:
        return 0
    contexts = [request.context for group in groups for request in group]
    # In sorted order, all contexts between the first and the last share what these two share.
    first, last = min(contexts), max(contexts)
    shared = 0
    for token, other in zip(first, last, strict=False):
        if token != other:
            break
        shared += 1
    return shared


def _fill_rows(groups: list[list[NumberedRequest]], shared_length: int, max_tokens: int) -> list[Row]:
    """Put the groups into rows, several to a row where they fit, and return the rows.

    Sharing a row saves padding, and the prefix that all groups begin with is computed once. This is best-fit decreasing
    bin packing: the longest remaining group opens a row, then the longest groups that still fit are added to it.

    groups: the requests of each item.
    shared_length: tokens that all requests begin with.
    max_tokens: tokens of the longest row, unless one group alone is longer.
    """
    capacity = min(_useful_length(shared_length), max_tokens - shared_length)
    sizes = [len(_build_row(group)) - shared_length for group in groups]
    # Shortest first, and of equal sizes the later group first, so that `pop` takes the longest and earliest.
    remaining = sorted(range(len(groups)), key=lambda number: (sizes[number], -number))

    rows: list[Row] = []
    while remaining:
        members = [remaining.pop()]
        free = capacity - sizes[members[0]]
        while True:
            num_fitting = bisect.bisect_right(remaining, free, key=sizes.__getitem__)
            if num_fitting == 0:
                break
            members.append(remaining.pop(num_fitting - 1))
            free -= sizes[members[-1]]
        rows.append(_build_row([request for member in members for request in groups[member]]))
    return rows


def _useful_length(shared_length: int) -> int:
    """Return how many tokens a row should have besides the shared prefix.

    A row of p shared and n other tokens costs about (p + n)(1 + (p + n) / c), where c is `ATTENTION_LENGTH`, and
    answers n tokens. The cost for each of the n tokens is lowest near n = sqrt(p (p + c)).
    """
    cheapest = int((shared_length * (shared_length + ATTENTION_LENGTH)) ** 0.5)
    return max(MIN_ROW_TOKENS, cheapest)
