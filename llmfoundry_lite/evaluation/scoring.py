"""Log-probabilities of requests: many in one forward pass, with logits only where answer tokens are predicted.

Whatever the model's dtype, logits are computed from its hidden states in fp32, and summed in fp32.

Legend: b rows, t tokens of a row, n answer tokens of a batch, u the positions that predict them, d model width,
v vocabulary, w a part of it.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.packing import Row, Separator, pack
from llmfoundry_lite.evaluation.tasks import Request
from llmfoundry_lite.models.attention import without_cudnn
from llmfoundry_lite.models.products import logits_in_parts


class Inputs(NamedTuple):
    """A batch. Rows are plain text, padded on the right, if there are no positions."""

    tokens_bt: torch.Tensor
    positions_bt: torch.Tensor | None
    attention_mask_bts: torch.Tensor | None


class Wanted(NamedTuple):
    """Tokens whose probability is wanted, and the positions that predict them. Choices may share a position."""

    rows_u: torch.Tensor
    columns_u: torch.Tensor
    which_n: torch.Tensor  # position that predicts each token
    expected_n: torch.Tensor


class Scores(NamedTuple):
    """A model's answer on the wanted tokens."""

    log_probability_n: torch.Tensor  # fp32, nats
    is_argmax_n: torch.Tensor  # bool


class Scorable(Protocol):
    """A model ready to be evaluated."""

    max_seq_len: int
    vocab_size: int
    shares_prefixes: bool  # whether a row may be a tree, not plain text alone
    separates_documents: bool  # whether it was trained with attention within documents only
    separator: Separator | None  # the token between them. None: the tokenizer's end of text.

    @property
    def device(self) -> torch.device: ...

    def score(self, inputs: Inputs, wanted: Wanted) -> Scores: ...

    def generate(self, context: Sequence[int], max_new_tokens: int) -> Iterator[int]:
        """Yield the likeliest next token, up to `max_new_tokens` times."""
        ...


class Score(NamedTuple):
    log_probability: float  # nats, of the whole answer
    is_greedy: bool  # every token of it is the likeliest


def score(
    model: Scorable,
    groups: Sequence[Sequence[Request]],
    max_batch_tokens: int,
    rank: int = 0,
    world_size: int = 1,
    *,
    separator: Separator | None = None,
) -> Iterator[dict[int, Score]]:
    """Yield the scores of this rank's share, batch by batch, by number of request (counted over all groups).

    All ranks yield equally often, so that a sharded model's ranks stay together. A rank without work computes the
    last batch of all, and yields nothing of it. With a `separator`, a token attends to its own document only.
    """
    batches = pack(groups, max_batch_tokens, shares=model.shares_prefixes)
    for start in range(0, len(batches), world_size):
        is_mine = start + rank < len(batches)
        found: dict[int, Score] = {}
        for number, value, likeliest in score_tokens(model, batches[start + rank if is_mine else -1], separator):
            before = found.get(number, Score(0.0, True))
            found[number] = Score(before.log_probability + value, before.is_greedy and likeliest)
        yield found if is_mine else {}


def check_tokens(model: Scorable, tokens: Iterable[int], where: str) -> None:
    """Raise DataError for a token beyond the vocabulary, because the tokenizer is then another model's."""
    largest = max(tokens, default=-1)
    if largest >= model.vocab_size:
        raise DataError(
            f"{where}: the tokenizer gives token {largest}, and the model has {model.vocab_size:,}; give the model's "
            "own tokenizer: tokenizer=…"
        )


def text_separator(model: Scorable, eos_token_id: int) -> Separator | None:
    """Return the token that divides documents in running text; None where tokens attend to all text before them."""
    return (model.separator or Separator(eos_token_id)) if model.separates_documents else None


@torch.no_grad()
def score_tokens(
    model: Scorable, batch: Sequence[Row], separator: Separator | None = None
) -> Iterator[tuple[int, float, bool]]:
    """Yield (number of request, log-probability, is the likeliest) for each token; those of a request in order."""
    width = max(map(len, batch))
    tokens_bt = np.array([row.tokens + [0] * (width - len(row)) for row in batch], np.int64)
    positions_bt = attention_mask_bts = None
    if not all(row.is_plain(separator) for row in batch):
        positions_bt = np.array([row.positions + [0] * (width - len(row)) for row in batch], np.int64)
        attention_mask_bts = np.stack([row.attention_mask(width, separator) for row in batch])
    targets = [((i, column), *rest) for i, row in enumerate(batch) for column, *rest in row.targets]
    positions, expected, numbers = zip(*targets, strict=True)
    index = {position: u for u, position in enumerate(dict.fromkeys(positions))}
    rows, columns = zip(*index, strict=True)
    which = [index[position] for position in positions]

    def on_device(array: Any) -> Any:
        return None if array is None else torch.as_tensor(array).to(model.device)

    inputs = Inputs(*map(on_device, (tokens_bt, positions_bt, attention_mask_bts)))
    with without_cudnn():
        scores = model.score(inputs, Wanted(*map(on_device, (rows, columns, which, expected))))
    return zip(numbers, *(column.tolist() for column in scores), strict=True)


def score_hidden(hidden_btd: torch.Tensor, unembedding_vd: torch.Tensor, wanted: Wanted) -> Scores:
    """Compute scores from fp32 logits of the wanted positions alone, a part of the vocabulary at a time."""
    hidden_ud = hidden_btd[wanted.rows_u, wanted.columns_u].float()
    with torch.autocast(hidden_ud.device.type, enabled=False):
        return score_logits(logits_in_parts(hidden_ud, unembedding_vd), wanted)


def score_logits(parts_uw: Iterable[torch.Tensor], wanted: Wanted) -> Scores:
    """Compute scores from fp32 logits of the positions, given by parts of the vocabulary, which are overwritten."""
    highest_u = total_u = likeliest_u = expected_logit_n = torch.zeros(())
    start = 0
    for logits_uw in parts_uw:
        end = start + logits_uw.size(1)
        inside_n = (wanted.expected_n >= start) & (wanted.expected_n < end)
        logit_n = logits_uw[wanted.which_n, (wanted.expected_n - start).clamp(0, end - start - 1)]
        part_highest_u, part_likeliest_u = logits_uw.max(dim=-1)
        if start == 0:
            highest_u, likeliest_u, expected_logit_n = part_highest_u, part_likeliest_u, logit_n
            total_u = torch.zeros_like(highest_u)
        likeliest_u = torch.where(part_highest_u > highest_u, part_likeliest_u + start, likeliest_u)
        expected_logit_n = torch.where(inside_n, logit_n, expected_logit_n)
        before_u, highest_u = highest_u, torch.maximum(highest_u, part_highest_u)
        total_u = total_u * (before_u - highest_u).exp() + logits_uw.sub_(highest_u[:, None]).exp_().sum(dim=-1)
        start = end
    log_probability_n = expected_logit_n - (highest_u + total_u.log())[wanted.which_n]
    return Scores(log_probability_n, likeliest_u[wanted.which_n] == wanted.expected_n)
