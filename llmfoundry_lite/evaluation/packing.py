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
"""Row length in tokens at which attention costs about as much as everything else. Counting operations, that is 6 times
the width of a model, which is a few thousand tokens for the models that this library trains."""

MIN_EFFICIENT_DIVISOR = 4
"""A batch with 1/4 of the tokens that fit already uses a device well, so it may end there to avoid padding."""

MAX_PADDING = 0.08
"""Largest fraction of padding that a row may need in a batch that is large enough without it."""


class Separator(NamedTuple):
    """A token that divides documents, so that no token attends across it."""

    token: int
    begins: bool = False
    """The token is the first token of a document. Otherwise it is the last token."""


class Target(NamedTuple):
    """One answer token of a request, whose log-probability the model computes at a position of a row."""

    index: int
    """Index in the row of the position at which the token is predicted."""
    token: int
    """The token id whose log-probability is asked for."""
    request: int
    """Number of the request that asks for it."""


class NumberedRequest(NamedTuple):
    """A request with its number among all requests of a task, which identifies its score later."""

    number: int
    request: Request


class Row:
    """One row of tokens that holds the prefix trees of its requests, and is built up request by request with `add`."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        """Depth of each token in its tree."""
        self.parents: list[int] = []
        """Index in the row of the token before each token; -1 for the first token of a tree."""
        self.targets: list[Target] = []
        self._roots: dict[int, int] = {}
        """First token of a tree -> its index in the row."""
        self._children: list[dict[int, int]] = []
        """For each index in the row: next token -> its index."""

    def add(self, request: Request, number: int) -> None:
        """Add a request's tokens to the prefix trees, and a target for each token of its answer.

        number: the request's number, which its targets carry.

        Tokens that the row already has after the same prefix are shared. The last token of the answer is predicted but
        never read, so it takes no place in the row. After `A B -> D E`, the row has the tokens A, B and D; D is
        predicted at the position of B, and E at the position of D.
        """
        # Go down the tree along the context. `index` is the position of the last token so far; -1 is above the roots.
        index = -1
        for token in request.context:
            index = self._find_or_add(token, parent=index)

        # Each answer token is predicted at the position of the token before it.
        for token in request.continuation[:-1]:
            self.targets.append(Target(index, token, number))
            index = self._find_or_add(token, parent=index)
        self.targets.append(Target(index, request.continuation[-1], number))

    def _find_or_add(self, token: int, parent: int) -> int:
        """Return the index in the row of a token that follows a given prefix; add the token if it is not there yet.

        `parent` is the index of the prefix's last token, or -1 if the token begins a tree. Appends to `tokens`,
        `positions`, `parents` and `_children` together, so that these lists always have the same length.
        """
        # The tokens that follow the same prefix so far.
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
        """Return which tokens each token attends to: bool [length, length], [query, key].

        A token attends to itself and to its ancestors in the prefix tree. With a separator, it attends only to those
        in its own document. `length` is that of the padded row. Padding attends to itself, because softmax over nothing
        would divide by 0.
        """
        mask = np.eye(length, dtype=bool)
        # A parent comes before its children in the row, so its own line of the mask is already complete.
        for index, parent in enumerate(self.parents):
            if parent >= 0 and not self._begins_document(index, separator):
                mask[index] |= mask[parent]
        return mask

    def is_plain(self, separator: Separator | None = None) -> bool:
        """Return whether the row is ordinary text: one document without branches, which needs no attention mask."""
        for index, parent in enumerate(self.parents):
            if parent != index - 1:
                return False
            if parent >= 0 and self._begins_document(index, separator):
                return False
        return True

    def _begins_document(self, index: int, separator: Separator | None) -> bool:
        """Return whether a new document begins at the token at `index`, which must have a parent.

        That is the case if the token itself is the separator, or its parent is, for a separator that ends documents.
        """
        if separator is None:
            return False
        separator_index = index if separator.begins else self.parents[index]
        return self.tokens[separator_index] == separator.token


def pack(groups: Sequence[Sequence[Request]], max_batch_tokens: int, *, shares: bool = True) -> list[list[Row]]:
    """Put requests into batches of rows, and return the batches.

    groups: the requests of each item, which share a context. Requests are numbered in order over all groups.
    max_batch_tokens: the largest number of tokens in a batch, padding included. Only a single row may have more.
    shares: put a prefix that several requests have in common into a row only once. False gives every request a row of
        plain text of its own, for models that do not take an attention mask.

    The rows of a batch go through the model together, padded to its first row, which is the longest. Long rows come
    first, so that an evaluation that runs out of memory does so at the beginning. Batches depend on the arguments alone
    and not on the number of ranks, so that scores do not depend on it either.
    """
    # Number the requests over all groups, because rows hold them in another order.
    numbered_groups: list[list[NumberedRequest]] = []
    num_requests = 0
    for group in groups:
        numbered_groups.append([NumberedRequest(num_requests + i, request) for i, request in enumerate(group)])
        num_requests += len(group)

    if shares:
        rows = _fill_rows(numbered_groups, _shared_length(groups), max_batch_tokens)
    else:
        rows = [_build_row([request]) for group in numbered_groups for request in group]
    # Sort the longest rows first. Rows of equal length are ordered by their earliest request, so that the order is
    # always the same.
    rows.sort(key=lambda row: (-len(row), row.targets[0].request))

    # Divide the sorted rows into batches, so that rows of similar length are together and need little padding.
    batches: list[list[Row]] = []
    for row in rows:
        if not batches or _is_full(batches[-1], row, max_batch_tokens):
            batches.append([])
        batches[-1].append(row)
    return batches


def _is_full(batch: list[Row], next_row: Row, max_batch_tokens: int) -> bool:
    """Return whether `next_row` should begin another batch instead of joining this one.

    It should if it does not fit, or if the batch is large enough and the row would need much padding. The rows of a
    batch are padded to its first row, which is at least as long as `next_row`.
    """
    width = len(batch[0])
    if width * (len(batch) + 1) > max_batch_tokens:
        return True
    is_large_enough = width * len(batch) >= max_batch_tokens // MIN_EFFICIENT_DIVISOR
    needs_padding = len(next_row) < (1 - MAX_PADDING) * width
    return is_large_enough and needs_padding


def _build_row(requests: Sequence[NumberedRequest]) -> Row:
    """Return one row that holds all these requests, sharing the prefixes that they have in common."""
    row = Row()
    for numbered in requests:
        row.add(numbered.request, numbered.number)
    return row


def _shared_length(groups: Sequence[Sequence[Request]]) -> int:
    """Return the length in tokens of the longest prefix that the contexts of all requests have in common.

    A task with fixed examples has such a prefix. For a single group the result is 0, because nothing is shared with
    another one.
    """
    if len(groups) < 2:
        return 0
    contexts = [request.context for group in groups for request in group]
    # In lexicographic order, all contexts between the first and the last begin with what these two have in common.
    first_context = min(contexts)
    last_context = max(contexts)
    num_shared = 0
    for first_token, last_token in zip(first_context, last_context, strict=False):
        if first_token != last_token:
            break
        num_shared += 1
    return num_shared


def _fill_rows(groups: list[list[NumberedRequest]], shared_length: int, max_tokens: int) -> list[Row]:
    """Put the groups into rows, as many to a row as fit, and return the rows.

    groups: the requests of each item. All requests of a group come into the same row.
    shared_length: tokens that the contexts of all requests begin with. Each row has them once.
    max_tokens: tokens of the longest row, unless one group alone is longer.

    Sharing a row saves padding, and computes the prefix that all groups begin with only once. This is best-fit
    decreasing bin packing: the longest remaining group opens a row, then the longest groups that still fit are added to
    it. Groups of 90, 60, 40 and 10 tokens go into rows of 128 tokens as 90 + 10 and 60 + 40.
    """
    # Sizes and capacity count the tokens besides the shared prefix.
    capacity = min(_useful_length(shared_length), max_tokens - shared_length)
    sizes = [len(_build_row(group)) - shared_length for group in groups]
    # Shortest first, and of equal sizes the later group first, so that `pop` takes the longest and earliest.
    remaining = sorted(range(len(groups)), key=lambda group_number: (sizes[group_number], -group_number))

    rows: list[Row] = []
    while remaining:
        # Open a row with the longest group, even if that is longer than the capacity.
        group_numbers = [remaining.pop()]
        num_free_tokens = capacity - sizes[group_numbers[0]]

        # Add the longest group that fits, until none does. `remaining` is sorted by size, so bisection finds it.
        while True:
            num_fitting = bisect.bisect_right(remaining, num_free_tokens, key=sizes.__getitem__)
            if num_fitting == 0:
                break
            group_numbers.append(remaining.pop(num_fitting - 1))
            num_free_tokens -= sizes[group_numbers[-1]]
        rows.append(_build_row([request for group_number in group_numbers for request in groups[group_number]]))
    return rows


def _useful_length(shared_length: int) -> int:
    """Return how many tokens a row should have besides a shared prefix of `shared_length` tokens.

    A long row computes the prefix for more tokens, but pays more for attention. A row of p shared and n other tokens
    costs about (p + n)(1 + (p + n) / c), where c is `ATTENTION_LENGTH`, and scores n tokens. The cost for each of the n
    tokens is lowest near n = sqrt(p (p + c)).
    """
    cheapest = int((shared_length * (shared_length + ATTENTION_LENGTH)) ** 0.5)
    return max(MIN_ROW_TOKENS, cheapest)
