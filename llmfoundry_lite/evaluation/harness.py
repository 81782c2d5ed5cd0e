"""Evaluation of one model on tasks, on one rank or several.

Files are written after every task, so that an evaluation that is started again repeats no finished task.
"""

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from llmfoundry_lite.config.eval_schema import TaskConfig
from llmfoundry_lite.data.tokenizer import Tokenizer
from llmfoundry_lite.errors import DataError, NonFiniteError
from llmfoundry_lite.evaluation.packing import Separator
from llmfoundry_lite.evaluation.records import Record, generated_item, hash_of, scored_item, summarise
from llmfoundry_lite.evaluation.results import ResultFiles, Results, code_version
from llmfoundry_lite.evaluation.scoring import Scorable, Score, check_tokens, score, text_separator
from llmfoundry_lite.evaluation.tasks import (
    GENERATION,
    SEPARATE,
    NothingToAsk,
    Prepared,
    Request,
    is_right,
    prepare_task,
    prepare_text,
    read_rows,
)
from llmfoundry_lite.ranks.exchange import (
    all_gather_json,
    all_reduce_max,
    broadcast_json,
    raise_on_all_ranks,
    rank_and_size,
    user_errors_on_all_ranks,
)

Progress = Callable[[str, int, int], None]
"""Called with (task, number of items done, number of items)."""


# 12 parameters: the parts that this function joins, and the settings of a suite, each with a default.
def evaluate(
    model: Scorable,
    tokenizer: Tokenizer,
    tasks: Sequence[TaskConfig],
    results: Results,
    files: ResultFiles | None = None,
    *,
    tokenization: str = SEPARATE,
    max_batch_tokens: int = 2048,
    max_seq_len: int | None = None,
    limit: int | None = None,
    on_progress: Progress = lambda task, done, total: None,
    share: tuple[int, int] | None = None,
    on_nothing: Callable[[str], None] | None = None,
) -> Results:
    """Ask all `tasks`, or those that `files` does not have yet.

    With `on_nothing`, a task without any item that can be asked is left out, and `on_nothing` gets the reason.

    All ranks must call this. All get the same Results; rank 0 writes. `share` is (rank, number of ranks) for dividing
    the items, where several ranks compute as one.

    Raises DataError for a task that cannot be read, has tokens that the model does not know, or would replace a
    finished one in `files`, before anything is computed, and for a model whose outputs are NaN or infinite.
    """
    longest = min(max_seq_len or model.max_seq_len, model.max_seq_len)
    prepared: list[Prepared] = []
    with user_errors_on_all_ranks():  # a file may be missing on one machine alone
        for config in tasks:
            prepared += _prepare_task(config, tokenizer, on_nothing, tokenization, max_seq_len=longest, limit=limit)
        if tasks and not prepared:
            raise DataError(f"no task has an item that can be asked of a model of {longest} tokens; name others")
        if files is not None:
            files.refuse_to_replace(results, prepared)
        for task in prepared:
            largest = (max(*r.context, *r.continuation, -1) for item in task.items for r in item.requests)
            check_tokens(model, largest, task.label)
    asker = Asker(model, tokenizer, max_batch_tokens, share or rank_and_size(None), on_progress)
    for task in prepared:
        # Rank 0 decides, because it alone may see the files.
        if files is not None and (known := broadcast_json(files.finished_record(task, results))) is not None:
            results.tasks[task.name] = known
            continue
        results.tasks[task.name], items = run_task(asker, task)
        if files is not None:
            with user_errors_on_all_ranks():  # only rank 0 writes, and the others wait for it
                files.add(results, task, items)
    if files is not None:
        results.tasks |= {k: v for k, v in broadcast_json(files.kept(results)).items() if k not in results.tasks}
    return results


def _prepare_task(
    config: TaskConfig, tokenizer: Tokenizer, on_nothing: Callable[[str], None] | None, tokenization: str, **sizes: Any
) -> list[Prepared]:
    found: list[Prepared] = []
    with _leaving_out(on_nothing):
        if config.icl_task_type == "perplexity":
            return [prepare_text(config, tokenizer, **sizes)]
        rows = read_rows(config)
        for shots in config.num_fewshot:
            with _leaving_out(on_nothing):
                found.append(prepare_task(config, rows, shots, tokenizer, tokenization=tokenization, **sizes))
    return found


@contextmanager
def _leaving_out(on_nothing: Callable[[str], None] | None) -> Iterator[None]:
    try:
        yield
    except NothingToAsk as error:
        if on_nothing is None:
            raise
        on_nothing(str(error))


@dataclass(frozen=True, slots=True)
class Asker:
    """A model with everything needed to ask it."""

    model: Scorable
    tokenizer: Tokenizer
    max_batch_tokens: int
    share: tuple[int, int]
    on_progress: Progress


def run_task(asker: Asker, task: Prepared) -> tuple[Record, list[Record]]:
    """Return (the task's record, one for each item)."""
    started, progress = time.monotonic(), partial(asker.on_progress, task.name)
    progress(0, len(task.items))
    items = (_generate if task.kind in GENERATION else _score)(asker, task, progress)
    record = summarise(task, items, time.monotonic() - started)
    return record | {"code": code_version(), "items_hash": hash_of(items)}, items


def _generate(asker: Asker, task: Prepared, progress: Callable[[int, int], None]) -> list[Record]:
    max_new_tokens, stops = task.config.max_new_tokens, task.config.early_stopping_criteria
    assert max_new_tokens is not None, "tasks.prepare fills it in"
    prompts = [Prompt(item.requests[0].context, max_new_tokens, stops) for item in task.items]
    texts = generate_answers(asker.model, asker.tokenizer, task.name, prompts, asker.share, progress)
    return [
        generated_item(task, item, text, is_right=is_right(task.config, text, item.answers))
        for item, text in zip(task.items, texts, strict=True)
    ]


def _score(asker: Asker, task: Prepared, progress: Callable[[int, int], None]) -> list[Record]:
    # Text has documents as in training and eval/loss. A prompt is one document, whatever tokens it has.
    is_text = task.kind == "perplexity"
    separator = text_separator(asker.model, asker.tokenizer.eos_token_id) if is_text else None
    groups = [item.requests for item in task.items]
    scores = iter(score_all(asker.model, task.name, groups, asker.max_batch_tokens, asker.share, progress, separator))
    return [scored_item(task, item, list(islice(scores, len(item.requests)))) for item in task.items]


def score_all(
    model: Scorable,
    name: str,
    groups: Sequence[Sequence[Request]],
    max_batch_tokens: int,
    share: tuple[int, int],
    on_progress: Callable[[int, int], None],
    separator: Separator | None = None,
) -> list[Score]:
    """Return the scores of all requests of the task `name`, in order. `share` is (rank, number of ranks) dividing them.

    Raises DataError on all ranks where the model gives NaN or infinity.
    """
    found: dict[int, Score] = {}
    num_requests, num_groups = sum(map(len, groups)), len(groups)
    for scores in score(model, groups, max_batch_tokens, *share, separator=separator):
        found.update(scores)
        done = min(num_requests, len(found) * share[1])
        on_progress(num_groups * done // num_requests, num_groups)
    bad = sum(not math.isfinite(value.log_probability) for value in found.values())
    raise_on_all_ranks(
        DataError(f"{name}: the model gives NaN or infinity for {bad:,} of {len(found):,} answers; nothing is kept")
        if bad
        else None
    )
    shares = all_gather_json([[number, *value] for number, value in found.items()])
    by_number = {number: Score(*value) for part in shares for number, *value in part}  # some ranks share a part
    return [by_number[number] for number in sorted(by_number)]


class Prompt(NamedTuple):
    """Tokens to continue greedily, up to a number of new ones, the end of text or one of the texts `stops`."""

    context: Sequence[int]
    max_new_tokens: int
    stops: Sequence[str] = ()


def generate_answers(
    model: Scorable,
    tokenizer: Tokenizer,
    name: str,
    prompts: Sequence[Prompt],
    share: tuple[int, int],
    on_progress: Callable[[int, int], None],
) -> list[str]:
    """Generate the answer to each prompt of the task `name`. `share` is (rank, number of ranks) dividing them.

    Raises DataError on all ranks where the model's logits are NaN or infinite.
    """
    (rank, world_size), num_items = share, len(prompts)
    found: list[tuple[int, str]] = []
    for start in range(0, num_items, world_size):
        number = min(start + rank, num_items - 1)  # a rank without one repeats the last: a sharded model needs all
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
    """Generate the text after a prompt; None for logits of NaN or infinity.

    Ranks go on until all are done or one has failed, because a sharded model's ranks must compute equally many tokens.
    """
    tokens: Iterator[int] | None = islice(model.generate(prompt.context, prompt.max_new_tokens), prompt.max_new_tokens)
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
        if token is None or token in tokenizer.stop_token_ids:
            answer = tokenizer.decode(written)
            continue
        written.append(token)
        text = tokenizer.decode(written)
        if any(stop in text for stop in prompt.stops):
            answer = re.split("|".join(map(re.escape, prompt.stops)), text)[0]
    return None if tokens is None else answer
