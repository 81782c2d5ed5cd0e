"""Requests -> rows of tokens in which nothing that several of them begin with is computed twice.

The requests of an item share their context, and where a task fixes its examples all items share those. A row is the
prefix tree of its requests, laid out so that every token comes after the one it follows: its position is its depth,
and it may see its ancestors and itself. No torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmfoundry_lite.evaluation.tasks import Request


class Row:
    """One prefix tree."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.parents: list[int] = []
        """Index in the row of the token before; -1 at the beginning."""
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

    def may_see(self, length: int) -> np.ndarray:
        """Bool [length, length]; beyond the row's end a token sees itself, which keeps softmax from dividing by 0."""
        sight = np.eye(length, dtype=bool)
        for index, parent in enumerate(self.parents):
            if parent >= 0:
                sight[index] |= sight[parent]
        return sight

    @property
    def is_plain(self) -> bool:
        """No branches: plain text."""
        return all(parent == index - 1 for index, parent in enumerate(self.parents))


@dataclass(slots=True)
class Batch:
    """Rows computed in one forward pass, padded to the longest."""

    rows: list[Row]
    numbers: list[int]
    """Of the requests in it."""

    @property
    def width(self) -> int:
        return max(len(row) for row in self.rows)


def pack(groups: Sequence[Sequence[Request]], max_batch_tokens: int) -> list[Batch]:
    """Requests, grouped by what belongs together, into batches of up to about `max_batch_tokens` tokens.

    A function of its arguments alone: every rank makes the same batches, so that results do not depend on how many
    share them. Requests are numbered in order. Long rows come first, so that memory runs out at once if it does.
    """
    shared = _num_shared(groups)
    numbered, number = [], 0
    for group in groups:
        numbered.append((number, group))
        number += len(group)
    rows: list[Row] = []
    for bundle in _bundles(numbered, shared):
        row = Row()
        for first, group in bundle:
            for i, request in enumerate(group):
                row.add(request, first + i)
        rows.append(row)
    rows.sort(key=lambda row: (-len(row), row.targets[0][2]))
    batches: list[Batch] = []
    current: list[Row] = []
    for row in rows:
        if current and len(current[0]) * (len(current) + 1) > max_batch_tokens:
            batches.append(_batch(current))
            current = []
        current.append(row)
    return [*batches, _batch(current)] if current else batches


def _batch(rows: list[Row]) -> Batch:
    return Batch(rows, sorted({number for row in rows for _, _, number in row.targets}))


def _num_shared(groups: Sequence[Sequence[Request]]) -> int:
    """Tokens that all requests begin with."""
    contexts = [request.context for group in groups for request in group]
    if len(groups) < 2:
        return 0
    low, high = min(contexts), max(contexts)  # what these two share, all that lie between them share
    return next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))


Numbered = tuple[int, Sequence[Request]]


def _bundles(numbered: list[Numbered], shared: int) -> list[list[Numbered]]:
    """Which groups share a row: one each, or as many behind a long beginning that all share as pay for it.

    A row of p shared and n other tokens costs about (p + n)(1 + (p + n)/c) for n tokens' worth of answers, where c is
    the length at which attention costs as much as everything else (6 times the model's width, some thousand tokens);
    that is least near n = sqrt(p (p + c)).
    """
    if shared < 32:
        return [[group] for group in numbered]
    room = (shared * (shared + 4000)) ** 0.5
    bundles: list[list[Numbered]] = []
    filled = room
    for number, group in sorted(numbered, key=lambda pair: (-_own_tokens(pair[1], shared), pair[0])):
        own = _own_tokens(group, shared)
        if filled + own > room:
            bundles.append([])
            filled = 0
        bundles[-1].append((number, group))
        filled += own
    return bundles


def _own_tokens(group: Sequence[Request], shared: int) -> int:
    """About: the first context and all answers."""
    longest = max(len(request.context) for request in group)
    return longest - shared + sum(len(request.continuation) for request in group)
