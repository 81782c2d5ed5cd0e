"""Requests -> log-probabilities: one forward pass for many of them, logits only where an answer stands.

Whatever the model's dtype, logits are made in fp32 from its hidden states and summed in fp32.

Legend: b rows, t tokens of a row, n answer tokens of a batch, c of a chunk, d model width, v vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from llmfoundry_lite.evaluation.packing import Batch, pack
from llmfoundry_lite.evaluation.tasks import Request

LOGITS_CHUNK_BYTES = 1 << 26
"""Of fp32 logits at a time."""


class Inputs(NamedTuple):
    """What a forward pass reads. Rows are plain text, padded on the right, if there are no positions."""

    tokens_bt: torch.Tensor
    positions_bt: torch.Tensor | None
    may_see_bts: torch.Tensor | None


class Wanted(NamedTuple):
    """The tokens whose probability is wanted, and where the hidden states are that predict them."""

    rows_n: torch.Tensor
    columns_n: torch.Tensor
    expected_n: torch.Tensor


class Scores(NamedTuple):
    """Of the wanted tokens."""

    log_probability_n: torch.Tensor
    """fp32, nats"""
    is_likeliest_n: torch.Tensor
    """bool"""


class Scorable(Protocol):
    """A prepared model; `models` makes them."""

    @property
    def device(self) -> torch.device: ...

    @property
    def max_seq_len(self) -> int: ...

    shares_prefixes: bool
    """Whether a row may be a tree; plain text is all there is otherwise."""

    def score(self, inputs: Inputs, wanted: Wanted) -> Scores: ...

    def likeliest(self, tokens_1t: torch.Tensor) -> int:
        """The token the model would write next."""
        ...


class Score(NamedTuple):
    log_probability: float
    """Of the whole answer, nats."""
    is_greedy: bool
    """Every token of it is the likeliest."""


def score(
    model: Scorable, groups: Sequence[Sequence[Request]], max_batch_tokens: int, rank: int = 0, world_size: int = 1
) -> Iterator[dict[int, Score]]:
    """Scores by number of request (in order over all groups), batch by batch: those of this rank's share.

    With several ranks each yields as many times as the others, so that a sharded model's ranks stay together; a rank
    without work left repeats the last batch and yields nothing of it.
    """
    if not model.shares_prefixes:
        groups = [[request] for group in groups for request in group]
    batches = pack(groups, max_batch_tokens)
    for start in range(0, len(batches), world_size):
        is_mine = start + rank < len(batches)
        found = score_batch(model, batches[start + rank if is_mine else -1])
        yield found if is_mine else {}


@torch.no_grad()
def score_batch(model: Scorable, batch: Batch) -> dict[int, Score]:
    width = batch.width
    tokens_bt = np.zeros((len(batch.rows), width), np.int64)
    for i, row in enumerate(batch.rows):
        tokens_bt[i, : len(row)] = row.tokens
    positions_bt = may_see_bts = None
    if not all(row.is_plain for row in batch.rows):
        positions_bt = np.zeros_like(tokens_bt)
        for i, row in enumerate(batch.rows):
            positions_bt[i, : len(row)] = row.positions
        may_see_bts = np.stack([row.may_see(width) for row in batch.rows])
    targets = [(i, *target) for i, row in enumerate(batch.rows) for target in row.targets]
    rows, columns, expected, numbers = zip(*targets, strict=True)

    def on_device(array: Any) -> Any:
        return None if array is None else torch.as_tensor(array).to(model.device)

    scores = model.score(
        Inputs(on_device(tokens_bt), on_device(positions_bt), on_device(may_see_bts)),
        Wanted(on_device(rows), on_device(columns), on_device(expected)),
    )
    sums: dict[int, float] = dict.fromkeys(batch.numbers, 0.0)
    greedy: dict[int, bool] = dict.fromkeys(batch.numbers, True)
    for number, value, likeliest in zip(numbers, *(column.tolist() for column in scores), strict=True):
        sums[number] += value
        greedy[number] &= likeliest
    return {number: Score(sums[number], greedy[number]) for number in batch.numbers}


def score_hidden(hidden_btd: torch.Tensor, unembedding_vd: torch.Tensor, wanted: Wanted) -> Scores:
    """Logits chunk by chunk, in fp32, of the wanted positions alone."""
    hidden_nd = hidden_btd[wanted.rows_n, wanted.columns_n]
    unembedding_dv = unembedding_vd.float().T
    chunk = max(16, LOGITS_CHUNK_BYTES // (4 * unembedding_vd.size(0)))
    parts = [
        score_logits(hidden_cd.float() @ unembedding_dv, expected_c)
        for hidden_cd, expected_c in zip(hidden_nd.split(chunk), wanted.expected_n.split(chunk), strict=True)
    ]
    return Scores(*(torch.cat(column) for column in zip(*parts, strict=True)))


def score_logits(logits_nv: torch.Tensor, expected_n: torch.Tensor) -> Scores:
    expected_logit_n = logits_nv.gather(1, expected_n[:, None])[:, 0]
    return Scores(expected_logit_n - logits_nv.logsumexp(dim=-1), logits_nv.argmax(dim=-1) == expected_n)
