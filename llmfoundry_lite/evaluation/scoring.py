"""Scores requests: computes the log-probability of each answer, for many requests in one forward pass.

`score` goes through the batches of `packing.py`, and adds up the scores of each answer's tokens. `score_tokens` runs
the model on one batch. The model calls `score_hidden`, which computes log-probabilities only at the positions that
predict an answer's tokens. Whatever the model's dtype, logits are computed from its hidden states in fp32.

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
    """The tokens of a batch whose log-probability is asked for, and the positions at which they are predicted.

    Several answers can share a position: the first tokens of all choices are predicted after the same context. If the
    row `A B` of a batch is asked for the answers C and D, there is one position, at B, and two answer tokens:

        rows_u [0]    columns_u [1]    position_n [0, 0]    token_n [C, D]
    """

    rows_u: torch.Tensor
    columns_u: torch.Tensor
    """Row and column in the batch of each predicting position."""
    position_n: torch.Tensor
    """For each answer token, the predicting position, as an index into u."""
    token_n: torch.Tensor
    """Token id of each answer token."""


class Scores(NamedTuple):
    """Scores that a model gives to the answer tokens of a batch, one for each."""

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
    def device(self) -> torch.device:
        """The device that `score` expects its tensors on."""
        ...

    def score(self, inputs: Inputs, answers: AnswerTokens) -> Scores:
        """Run the model on a batch, and return the score of each answer token."""
        ...

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

    groups: the requests of each item. Requests are numbered in order over all groups.
    max_batch_tokens: the largest number of tokens in a forward pass, padding included.
    rank, world_size: this rank's place among the ranks that divide the batches.
    separator: the token that divides documents; a token then attends to its own document only. None if a row of text is
        one document.

    The score of a request is the sum over the tokens of its answer: if they have log-probabilities -0.5 and -1.5, the
    answer has -2.0. It is greedy if every one of its tokens is the likeliest at its position.

    Collective for a sharded model: batches are assigned in rounds, and in each round every rank computes one. If the
    last round has fewer batches than ranks, the remaining ranks compute the last batch again and yield no scores.
    """
    batches = pack(groups, max_batch_tokens, shares=model.shares_prefixes)
    for first_batch_of_round in range(0, len(batches), world_size):
        batch_number = first_batch_of_round + rank
        has_batch = batch_number < len(batches)
        batch = batches[batch_number] if has_batch else batches[-1]

        # Add up the tokens of each answer. An answer without tokens so far is certain, and is greedy.
        scores: dict[int, Score] = {}
        for token in score_tokens(model, batch, separator):
            so_far = scores.get(token.request, Score(0.0, True))
            scores[token.request] = Score(
                so_far.log_probability + token.log_probability, so_far.is_greedy and token.is_argmax
            )
        yield scores if has_batch else {}


def check_tokens(model: Scorable, tokens: Iterable[int], source: str) -> None:
    """Raise DataError for a token id beyond the model's vocabulary, which means that the tokenizer is not the model's.

    `source` names what was tokenised, for the error.
    """
    largest_id = max(tokens, default=-1)
    if largest_id >= model.vocab_size:
        raise DataError(
            f"{source}: the tokenizer gives token {largest_id}, and the model has {model.vocab_size:,}; give the "
            "model's own tokenizer: tokenizer=…"
        )


def text_separator(model: Scorable, eos_token_id: int) -> Separator | None:
    """Return the token that divides documents in running text, or None if tokens attend to all text before them.

    That follows from how the model was trained. `eos_token_id` is the tokenizer's end of text, for a model that does
    not record its separator.
    """
    if not model.separates_documents:
        return None
    return model.separator or Separator(eos_token_id)


@torch.no_grad()
def score_tokens(model: Scorable, batch: Sequence[Row], separator: Separator | None = None) -> Iterator[TokenScore]:
    """Run the model on one batch, and return an iterator over the scores of its answer tokens.

    The forward pass happens in the call, before the first score is taken. The tokens of a request come in the order of
    its answer. With a `separator`, a token attends to its own document only.
    """
    # Build the tensors, and run the model.
    inputs = _build_inputs(batch, separator, model.device)
    answers, request_numbers = _build_answer_tokens(batch, model.device)
    with without_cudnn():
        scores = model.score(inputs, answers)

    # Copy the results from the device, in one transfer each.
    log_probabilities = scores.log_probability_n.tolist()
    is_argmax = scores.is_argmax_n.tolist()
    return map(TokenScore, request_numbers, log_probabilities, is_argmax)


def _build_inputs(batch: Sequence[Row], separator: Separator | None, device: torch.device) -> Inputs:
    """Return the rows of a batch as tensors on the model's device, padded with zeros to the longest row.

    Positions and attention mask are None if all rows are plain text, because the model's own causal attention is right
    for them: padding comes after all tokens, so none attends to it.
    """
    width = max(map(len, batch))

    def pad(rows: Sequence[list[int]]) -> torch.Tensor:
        """Return lists of numbers as a tensor int64 [rows, width]."""
        padded_rows = [numbers + [0] * (width - len(numbers)) for numbers in rows]
        return torch.as_tensor(np.array(padded_rows, np.int64)).to(device)

    tokens_bt = pad([row.tokens for row in batch])
    if all(row.is_plain(separator) for row in batch):
        return Inputs(tokens_bt, None, None)

    # In a prefix tree, a token's position is its depth, and it does not attend to the branches beside it.
    positions_bt = pad([row.positions for row in batch])
    masks = [row.attention_mask(width, separator) for row in batch]
    return Inputs(tokens_bt, positions_bt, torch.as_tensor(np.stack(masks)).to(device))


def _build_answer_tokens(batch: Sequence[Row], device: torch.device) -> tuple[AnswerTokens, list[int]]:
    """Return the answer tokens of a batch as tensors, and for each of them the number of its request.

    Several answers may follow the same context, and their first tokens are then predicted at the same position. Logits
    are computed once for each predicting position (u), so each answer token (n) refers to its position by an index. If
    the answers `C` and `D E` follow `A B` in row 0, there are two positions, (0, 1) at B and (0, 2) at D, and the
    answer tokens C, D, E refer to the positions 0, 0, 1.
    """
    # Go through the targets of all rows, and give each predicting position a number when it is first met.
    number_of_position: dict[tuple[int, int], int] = {}
    """(row, column) of a predicting position -> its number."""
    positions_of_tokens: list[int] = []
    token_ids: list[int] = []
    request_numbers: list[int] = []
    for row_number, row in enumerate(batch):
        for target in row.targets:
            position = (row_number, target.index)
            position_number = number_of_position.setdefault(position, len(number_of_position))
            positions_of_tokens.append(position_number)
            token_ids.append(target.token)
            request_numbers.append(target.request)

    # A dict keeps its order, so these lists are in the order of the positions' numbers.
    rows = [row for row, _ in number_of_position]
    columns = [column for _, column in number_of_position]
    answers = AnswerTokens(
        rows_u=torch.as_tensor(rows).to(device),
        columns_u=torch.as_tensor(columns).to(device),
        position_n=torch.as_tensor(positions_of_tokens).to(device),
        token_n=torch.as_tensor(token_ids).to(device),
    )
    return answers, request_numbers


def score_hidden(hidden_btd: torch.Tensor, unembedding_vd: torch.Tensor, answers: AnswerTokens) -> Scores:
    """Compute the scores of answer tokens from the model's last hidden states and its unembedding matrix.

    Logits are computed in fp32, only at the predicting positions, and for a part of the vocabulary at a time, because
    the logits of a whole batch would take more memory than the model.
    """
    hidden_ud = hidden_btd[answers.rows_u, answers.columns_u].float()
    with torch.autocast(hidden_ud.device.type, enabled=False):
        return score_logits(logits_in_parts(hidden_ud, unembedding_vd), answers)


def score_logits(parts_uw: Iterable[torch.Tensor], answers: AnswerTokens) -> Scores:
    """Compute the scores of answer tokens from logits that come in consecutive parts of the vocabulary.

    Each part is fp32 [u predicting positions, w tokens of the vocabulary], and is overwritten. The n answer tokens are
    predicted at these positions. Returns their log-probabilities [n], and whether each is the likeliest token [n].

    The log-probability of a token is its logit less the logarithm of the sum of exp(logit) over the vocabulary. The sum
    is kept relative to the highest logit so far, and rescaled when a part has a higher one (the online softmax of
    Milakov and Gimelshein, 2018, arXiv 1805.02867).
    """
    # Running values: for each position, of the parts of the vocabulary so far; for each answer token, its own logit.
    num_positions = len(answers.rows_u)
    device = answers.rows_u.device
    highest_u = torch.full((num_positions,), -torch.inf, device=device)
    exp_sum_u = torch.zeros(num_positions, device=device)
    argmax_u = torch.zeros(num_positions, dtype=torch.int64, device=device)
    answer_logit_n = torch.full((len(answers.token_n),), -torch.inf, device=device)
    start = 0  # id of the first token of this part
    for logits_uw in parts_uw:
        end = start + logits_uw.size(1)

        # Take the logits of the answer tokens in this part. For the others, the clamped column is any valid one.
        is_in_part_n = (answers.token_n >= start) & (answers.token_n < end)
        column_n = (answers.token_n - start).clamp(0, end - start - 1)
        answer_logit_n = torch.where(is_in_part_n, logits_uw[answers.position_n, column_n], answer_logit_n)

        # Update the likeliest token of each position. Among equal logits, the first token counts.
        part_highest_u, part_argmax_u = logits_uw.max(dim=-1)
        argmax_u = torch.where(part_highest_u > highest_u, part_argmax_u + start, argmax_u)

        # Rescale the sum so far to the new highest logit, and add this part. The part is overwritten from here on.
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
