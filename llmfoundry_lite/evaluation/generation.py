"""Text generation: greedy answers to a task's items, and samples after a prompt."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from llmfoundry_lite.config.eval_schema import TaskConfig
from llmfoundry_lite.data.tokenizer import Tokenizer
from llmfoundry_lite.errors import DataError, NonFiniteError
from llmfoundry_lite.evaluation.models import Subject, TreeModel
from llmfoundry_lite.evaluation.scoring import Scorable
from llmfoundry_lite.evaluation.tasks import Prepared, clean
from llmfoundry_lite.models.generate import generate
from llmfoundry_lite.models.mpt import MPT
from llmfoundry_lite.ranks.exchange import all_gather_json, all_reduce_max, raise_on_all_ranks

INCOMPLETE = "\ufffd"
"""A decoder's stand-in for a character whose bytes have not all arrived."""


def generate_answers(
    model: Scorable,
    tokenizer: Tokenizer,
    task: Prepared,
    share: tuple[int, int],
    on_progress: Callable[[str, int, int], None],
) -> list[str]:
    """Generate the answer to each item; `share` is (rank, ranks) that divide them.

    Raises DataError on all ranks where the model's logits are NaN or infinite.
    """
    (rank, world_size), num_items = share, len(task.items)
    found: list[tuple[int, str]] = []
    for start in range(0, num_items, world_size):
        number = min(start + rank, num_items - 1)  # a rank without one repeats the last, for sharded models
        text = generate_answer(model, tokenizer, task.items[number].requests[0].context, task.config)
        raise_on_all_ranks(
            DataError(f"{task.name}: the model gives NaN or infinity in its answer to item {number}; nothing is kept")
            if text is None
            else None
        )
        assert text is not None
        if start + rank < num_items:
            found.append((number, text))
        on_progress(task.name, min(start + world_size, num_items), num_items)
    answers = {number: text for part in all_gather_json(found) for number, text in part}  # some ranks share a part
    return [answers[number] for number in sorted(answers)]


def generate_answer(model: Scorable, tokenizer: Tokenizer, context: Sequence[int], config: TaskConfig) -> str | None:
    """Generate greedily up to the end of text, a stop sequence or `max_new_tokens`; None for logits of NaN or infinity.

    Ranks go on until all are done or one has failed: those of a sharded model compute together.
    """
    assert config.max_new_tokens is not None, "tasks.prepare fills it in"
    tokens: Iterator[int] | None = model.generate(context, config.max_new_tokens)
    written: list[int] = []
    answer: str | None = None
    for _ in range(config.max_new_tokens):
        is_open, has_failed = all_reduce_max([answer is None, tokens is None])
        if has_failed or not is_open:
            break
        assert tokens is not None
        try:
            token = next(tokens)
        except NonFiniteError:
            tokens = None
            continue
        if answer is not None:
            continue
        if token == tokenizer.eos_token_id:
            answer = tokenizer.decode(written)
            continue
        written.append(token)
        text = tokenizer.decode(written)
        if any(stop in text for stop in config.early_stopping_criteria):
            answer = re.split("|".join(map(re.escape, config.early_stopping_criteria)), text)[0]
    if tokens is None:
        return None
    return tokenizer.decode(written) if answer is None else answer


def is_right(config: TaskConfig, text: str, answers: Sequence[str]) -> bool:
    """Return whether the text begins with one of the answers, after the clean-up LLM Foundry takes from TriviaQA."""
    if config.cot_delimiter:
        text = text.split(config.cot_delimiter)[-1]
    text = clean(config, text)
    return any(text.startswith(wanted) for answer in answers if (wanted := clean(config, answer)))


def model_of(subject: Subject) -> MPT:
    """Return the model of a loaded subject. Raises DataError for one that only transformers can run."""
    if not isinstance(subject.model, TreeModel):
        raise DataError(
            f"{subject.source}: text is written by models in MPT's, GPT-2's and Llama's layouts; this one can only be "
            "evaluated. Use transformers' own generate()"
        )
    return subject.model.model


def generate_text(
    model: MPT,
    tokenizer: Tokenizer,
    prompt: str,
    num_tokens: int,
    *,
    device: torch.device | None = None,
    **sampling: Any,
) -> Iterator[str]:
    """Yield pieces of text that follow `prompt`, up to `num_tokens` tokens or the end of text.

    `sampling` is for `models.generate`: temperature, top_k, top_p and seed.
    """
    asked = tokenizer.encode(prompt) or [tokenizer.eos_token_id]
    written: list[int] = []
    shown = ""
    for token in generate(model, torch.tensor(asked, device=device), num_tokens, **sampling):
        if token == tokenizer.eos_token_id:
            break
        written.append(token)
        text = tokenizer.decode(written)
        if not text.endswith(INCOMPLETE):
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(written)[len(shown) :]
