"""Text generation: greedy answers to a task's items, and samples after a prompt."""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

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


class Prompt(NamedTuple):
    """Tokens after which the model writes greedily: up to so many, the end of text or one of the texts `stops`."""

    context: Sequence[int]
    num_tokens: int
    stops: Sequence[str] = ()


def prompts_of(task: Prepared) -> list[Prompt]:
    num_tokens, stops = task.config.max_new_tokens, task.config.early_stopping_criteria
    assert num_tokens is not None, "tasks.prepare fills it in"
    return [Prompt(item.requests[0].context, num_tokens, stops) for item in task.items]


def generate_answers(
    model: Scorable,
    tokenizer: Tokenizer,
    name: str,
    prompts: Sequence[Prompt],
    share: tuple[int, int],
    on_progress: Callable[[int, int], None],
) -> list[str]:
    """Generate the answer to each prompt of the task `name`; `share` is (rank, ranks) that divide them.

    Raises DataError on all ranks where the model's logits are NaN or infinite.
    """
    (rank, world_size), num_items = share, len(prompts)
    found: list[tuple[int, str]] = []
    for start in range(0, num_items, world_size):
        number = min(start + rank, num_items - 1)  # a rank without one repeats the last, for sharded models
        text = generate_answer(model, tokenizer, prompts[number])
        raise_on_all_ranks(
            DataError(f"{name}: the model gives NaN or infinity in its answer to item {number}; nothing is kept")
            if text is None
            else None
        )
        assert text is not None
        if start + rank < num_items:
            found.append((number, text))
        on_progress(min(start + world_size, num_items), num_items)
    answers = {number: text for part in all_gather_json(found) for number, text in part}  # some ranks share a part
    return [answers[number] for number in sorted(answers)]


def generate_answer(model: Scorable, tokenizer: Tokenizer, prompt: Prompt) -> str | None:
    """Generate what follows a prompt; None for logits of NaN or infinity.

    Ranks go on until all are done or one has failed: those of a sharded model compute together, equally many tokens.
    """
    tokens: Iterator[int] | None = islice(model.generate(prompt.context, prompt.num_tokens), prompt.num_tokens)
    written: list[int] = []
    answer: str | None = None
    while True:
        is_open, has_failed = all_reduce_max([answer is None, tokens is None])
        if has_failed or not is_open:
            break
        assert tokens is not None
        try:
            token = next(tokens, None)
        except NonFiniteError:
            tokens = None
            continue
        if answer is not None:
            continue
        if token is None or token == tokenizer.eos_token_id:
            answer = tokenizer.decode(written)
            continue
        written.append(token)
        text = tokenizer.decode(written)
        if any(stop in text for stop in prompt.stops):
            answer = re.split("|".join(map(re.escape, prompt.stops)), text)[0]
    return None if tokens is None else answer


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
