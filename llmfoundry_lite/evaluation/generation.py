"""Answers the model writes itself: greedy decoding, and when a text counts as right."""

import re
from collections.abc import Callable, Iterator, Sequence

from llmfoundry_lite.config.schema import TaskConfig
from llmfoundry_lite.errors import DataError, NonFiniteError
from llmfoundry_lite.evaluation.scoring import Scorable
from llmfoundry_lite.evaluation.tasks import Encoder, Prepared, clean
from llmfoundry_lite.ranks.exchange import all_gather_json, max_of, raise_on_all_ranks


def answer_all(
    model: Scorable,
    tokenizer: Encoder,
    task: Prepared,
    max_batch_tokens: int,
    rank: int,
    world_size: int,
    on_progress: Callable[[str, int, int], None],
) -> list[str]:
    """The model's answer to each item, in order; the items are shared by the ranks. Raises DataError, on all of them,
    where the model gives no numbers."""
    assert task.config.max_new_tokens is not None, "tasks.prepare fills it in"
    found: list[tuple[int, str]] = []
    for start in range(0, len(task.items), world_size):
        number = min(start + rank, len(task.items) - 1)  # a rank without one repeats the last, for sharded models
        context = task.items[number].requests[0].context
        text = write(model, tokenizer, context, task.config.max_new_tokens, task.config)
        raise_on_all_ranks(
            DataError(f"{task.name}: the model gives NaN or infinity in its answer to item {number}; nothing is kept")
            if text is None
            else None
        )
        assert text is not None
        if start + rank < len(task.items):
            found.append((number, text))
        on_progress(task.name, min(start + world_size, len(task.items)), len(task.items))
    return [text for _, text in sorted({(n, t) for share in all_gather_json(found) for n, t in share})]


def write(
    model: Scorable, tokenizer: Encoder, context: Sequence[int], num_tokens: int, config: TaskConfig
) -> str | None:
    """The likeliest continuation, to the end of text, a stopping text or `num_tokens`; None where the model gives no
    numbers.

    Ranks go on until all are done or one has failed, because those of a sharded model can only compute together.
    """
    tokens: Iterator[int] | None = model.write(context, num_tokens)
    written: list[int] = []
    answer: str | None = None
    for _ in range(num_tokens):
        is_open, has_failed = max_of([answer is None, tokens is None])
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
    """Whether the text begins with one of the answers, after the clean-up LLM Foundry takes from TriviaQA."""
    if config.cot_delimiter:
        text = text.split(config.cot_delimiter)[-1]
    text = clean(config, text)
    return any(text.startswith(wanted) for answer in answers if (wanted := clean(config, answer)))
