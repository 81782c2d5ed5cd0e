"""Scores requests: the log-probability of each answer, many requests in one forward pass.

`score` goes through the batches of `packing.py`. `score_tokens` asks the model about one batch. `score_hidden` and
`score_logits` compute log-probabilities, only at the positions that predict an answer's tokens. Whatever the model's
dtype, logits are computed from its hidden states in fp32.

Legend: b rows, t tokens of a row, n answer tokens of a batch, u the positions that predict them, d model width,
v vocabulary, w a part of the vocabulary.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.items import Request
from llmfoundry_lite.evaluation.packing import Row, Separator, pack
from llmfoundry_lite.models.attention import without_cudnn
from llmfoundry_lite.models.products import logits_in_parts


class Inputs(NamedTuple):
    """A batch of rows for the model."""

    tokens_bt: torch.Tensor
    positions_bt: torch.Tensor | None
    """None: the rows are plain text, padded on the right."""
    attention_mask_bts: torch.Tensor | None
    """Which tokens (s) each token (t) attends to, for rows with branches or several documents."""


class AnswerTokens(NamedTuple):
    """The tokens of a batch whose log-probability is asked for.

    Several answers can share a position: the first tokens of all choices are predicted after the same context.
    """

    rows_u: torch.Tensor
    columns_u: torch.Tensor
    """Row and column in the batch of each predicting position."""
    position_n: torch.Tensor
    """For each answer token, the predicting position, as an index into u."""
    token_n: torch.Tensor


class Scores(NamedTuple):
    """A model's answer about each token."""

    log_probability_n: torch.Tensor
    """fp32, in nats."""
    is_argmax_n: torch.Tensor
    """bool: the token is the likeliest at its position."""


class Scorable(Protocol):
    """Interface of a model that can be evaluated."""

    max_seq_len: int
    vocab_size: int
    shares_prefixes: bool
    """Rows may be trees of prefixes. Otherwise each row is plain text."""
    separates_documents: bool
    """The model was trained with attention within documents only."""
    separator: Separator | None
    """The token between its documents. None: the tokenizer's end of text."""

    @property
    def device(self) -> torch.device: ...

    def score(self, inputs: Inputs, answers: AnswerTokens) -> Scores: ...

    def generate(self, context: Sequence[int], max_new_tokens: int) -> Iterator[int]:
        """Yield the likeliest next token, up to `max_new_tokens` times."""
        ...


class Score(NamedTuple):
    """The score of a request."""

    log_probability: float
    """Log-probability of the whole answer, in nats."""
    is_greedy: bool
    """Each token of the answer is the likeliest one."""


class TokenScore(NamedTuple):
    """The score of one token of a request's answer."""

    request: int
    """Number of the request."""
    log_probability: float
    is_argmax: bool


def score(
    model: Scorable,
    groups: Sequence[Sequence[Request]],
    max_batch_tokens: int,
    rank: int = 0,
    world_size: int = 1,
    *,
    separator: Separator | None = None,
) -> Iterator[dict[int, Score]]:
    """Yield the scores of this rank's batches, one batch at a time, as a dict from the request's number to its score.

    Requests are numbered in order over all groups. With a `separator`, a token attends to its own document only.

    Collective for a sharded model: batches are dealt out in rounds, and in each round every rank computes one. Where
    the last round has fewer batches than ranks, the remaining ranks compute the last batch again and yield no scores.
    """
    batches = pack(groups, max_batch_tokens, shares=model.shares_prefixes)
    for first_of_round in range(0, len(batches), world_size):
        number = first_of_round + rank
        has_batch = number < len(batches)
        batch = batches[number] if has_batch else batches[-1]

        scores: dict[int, Score] = {}
        for token in score_tokens(model, batch, separator):
            so_far = scores.get(token.request, Score(0.0, True))
            scores[token.request] = Score(
                so_far.log_probability + token.log_probability, so_far.is_greedy and token.is_argmax
            )
        yield scores if has_batch else {}


def check_tokens(model: Scorable, tokens: Iterable[int], source: str) -> None:
    """Raise DataError for a token id beyond the model's vocabulary, because the tokenizer is then another model's.

    `source` names what was tokenised, for the error.
    """
    largest = max(tokens, default=-1)
    if largest >= model.vocab_size:
        raise DataError(
            f"{source}: the tokenizer gives token {largest}, and the model has {model.vocab_size:,}; give the model's "
            "own tokenizer: tokenizer=…"
        )


def text_separator(model: Scorable, eos_token_id: int) -> Separator | None:
    """Return the token that divides documents in running text, or None if tokens attend to all text before them."""
    if not model.separates_documents:
        return None
    return model.separator or Separator(eos_token_id)


@torch.no_grad()
def score_tokens(model: Scorable, batch: Sequence[Row], separator: Separator | None = None) -> Iterator[TokenScore]:
    """Yield the score of each answer token of a batch. The tokens of a request come in their order."""
    inputs = _build_inputs(batch, separator, model.device)
    answers, requests = _build_answer_tokens(batch, model.device)
    with without_cudnn():
        scores = model.score(inputs, answers)

    log_probabilities = scores.log_probability_n.tolist()
    is_argmax = scores.is_argmax_n.tolist()
    return map(TokenScore, requests, log_probabilities, is_argmax)


def _build_inputs(batch: Sequence[Row], separator: Separator | None, device: torch.device) -> Inputs:
    """Pad rows to the longest one, on the model's device."""
    width = max(map(len, batch))

    def padded(lists: Sequence[list[int]]) -> torch.Tensor:
        rows = [numbers + [0] * (width - len(numbers)) for numbers in lists]
        return torch.as_tensor(np.array(rows, np.int64)).to(device)

    tokens_bt = padded([row.tokens for row in batch])
    if all(row.is_plain(separator) for row in batch):
        return Inputs(tokens_bt, None, None)
    positions_bt = padded([row.positions for row in batch])
    masks = [row.attention_mask(width, separator) for row in batch]
    return Inputs(tokens_bt, positions_bt, torch.as_tensor(np.stack(masks)).to(device))


def _build_answer_tokens(batch: Sequence[Row], device: torch.device) -> tuple[AnswerTokens, list[int]]:
    """Return the answer tokens of a batch as tensors, and for each of them the number of its request.

    Several answers may follow the same context, and their first tokens are then predicted at the same position. Logits
    are computed once for each predicting position (u), so each answer token (n) refers to its position by an index.
    """
    number_of_position: dict[tuple[int, int], int] = {}
    """(row, column) of a predicting position -> its number, in the order in which positions were met."""
    positions_of_tokens: list[int] = []
    tokens: list[int] = []
    requests: list[int] = []
    for row_number, row in enumerate(batch):
        for target in row.targets:
            position = (row_number, target.index)
            number = number_of_position.setdefault(position, len(number_of_position))
            positions_of_tokens.append(number)
            tokens.append(target.token)
            requests.append(target.request)

    rows = [row for row, _ in number_of_position]
    columns = [column for _, column in number_of_position]
    answers = AnswerTokens(
        rows_u=torch.as_tensor(rows).to(device),
        columns_u=torch.as_tensor(columns).to(device),
        position_n=torch.as_tensor(positions_of_tokens).to(device),
        token_n=torch.as_tensor(tokens).to(device),
    )
    return answers, requests


def score_hidden(hidden_btd: torch.Tensor, unembedding_vd: torch.Tensor, answers: AnswerTokens) -> Scores:
    """Compute scores from the model's last hidden states.

    Logits are computed in fp32, only at the predicting positions, and for a part of the vocabulary at a time, because
    those of a whole batch would take more memory than the model.
    """
    hidden_ud = hidden_btd[answers.rows_u, answers.columns_u].float()
    with torch.autocast(hidden_ud.device.type, enabled=False):
        return score_logits(logits_in_parts(hidden_ud, unembedding_vd), answers)


def score_logits(parts_uw: Iterable[torch.Tensor], answers: AnswerTokens) -> Scores:
    """Compute scores from logits that come in consecutive parts of the vocabulary.

    Each part is fp32 [u predicting positions, w tokens of the vocabulary], and is overwritten. The n answer tokens are
    predicted at these positions. Returns their log-probabilities [n], and whether each is the likeliest [n].

    The sum of exponentials is kept relative to the highest logit so far, and rescaled when a part has a higher one (the
    online softmax of Milakov and Gimelshein, 2018, arXiv 1805.02867).
    """
    num_positions = len(answers.rows_u)
    device = answers.rows_u.device
    highest_u = torch.full((num_positions,), -torch.inf, device=device)
    exp_sum_u = torch.zeros(num_positions, device=device)
    argmax_u = torch.zeros(num_positions, dtype=torch.int64, device=device)
    answer_logit_n = torch.full((len(answers.token_n),), -torch.inf, device=device)
    start = 0  # the first token of this part
    for logits_uw in parts_uw:
        end = start + logits_uw.size(1)
        is_in_part_n = (answers.token_n >= start) & (answers.token_n < end)
        column_n = (answers.token_n - start).clamp(0, end - start - 1)
        answer_logit_n = torch.where(is_in_part_n, logits_uw[answers.position_n, column_n], answer_logit_n)

        part_highest_u, part_argmax_u = logits_uw.max(dim=-1)
        argmax_u = torch.where(part_highest_u > highest_u, part_argmax_u + start, argmax_u)
        new_highest_u = torch.maximum(highest_u, part_highest_u)
        part_exp_sum_u = logits_uw.sub_(new_highest_u[:, None]).exp_().sum(dim=-1)
        exp_sum_u = exp_sum_u * (highest_u - new_highest_u).exp() + part_exp_sum_u
        highest_u = new_highest_u
        start = end

    log_normaliser_u = highest_u + exp_sum_u.log()
    return Scores(
        log_probability_n=answer_logit_n - log_normaliser_u[answers.position_n],
        is_argmax_n=argmax_u[answers.position_n] == answers.token_n,
    )
