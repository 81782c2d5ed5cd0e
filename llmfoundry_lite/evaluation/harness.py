"""Evaluates one model on tasks, on one rank or several.

`evaluate` prepares all tasks, then runs them one by one and writes its files after each, so that an evaluation that is
started again repeats no finished task. `run_task` asks about each item of a task; `score_all` and `generate_answers`
divide its items among the ranks.
"""

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple

from llmfoundry_lite.config.eval_schema import TaskConfig
from llmfoundry_lite.data.tokenizer import Tokenizer
from llmfoundry_lite.errors import DataError, NonFiniteError
from llmfoundry_lite.evaluation.documents import prepare_text
from llmfoundry_lite.evaluation.items import GENERATION, SEPARATE, NothingToAsk, Prepared, Request
from llmfoundry_lite.evaluation.packing import Separator
from llmfoundry_lite.evaluation.prompts import is_right
from llmfoundry_lite.evaluation.records import Record, generated_item, hash_of, scored_item, summarise
from llmfoundry_lite.evaluation.result_files import ResultFiles
from llmfoundry_lite.evaluation.results import Results, code_version
from llmfoundry_lite.evaluation.scoring import Scorable, Score, check_tokens, score, text_separator
from llmfoundry_lite.evaluation.task_files import read_rows
from llmfoundry_lite.evaluation.tasks import prepare_task
from llmfoundry_lite.ranks.exchange import (
    all_gather_json,
    all_reduce_max,
    broadcast_json,
    raise_on_all_ranks,
    rank_and_size,
    user_errors_on_all_ranks,
)

Progress = Callable[[str, int, int], None]
"""Called with (name of the task, items done, items in all)."""


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
    """Run all `tasks`, except those that `files` has finished, and return `results` with their records.

    Collective: all ranks call this and get the same results; only rank 0 writes. `share` is (rank, number of ranks) for
    dividing the items; it differs from the ranks of the process group where several ranks compute as one.

    With `on_nothing`, a task without any item that can be asked is left out, and `on_nothing` is called with the
    reason.

    Raises DataError before anything is computed for a task that cannot be read, that has tokens which the model does
    not know, or that would replace a finished one in `files`. Raises DataError later for a model whose outputs are NaN
    or infinite.
    """
    longest = min(max_seq_len or model.max_seq_len, model.max_seq_len)
    prepared_tasks: list[Prepared] = []
    with user_errors_on_all_ranks():  # a file may be missing on one machine alone
        for config in tasks:
            if config.icl_task_type == "perplexity":
                with _leaving_out_empty_tasks(on_nothing):
                    prepared_tasks.append(prepare_text(config, tokenizer, max_seq_len=longest, limit=limit))
            else:
                prepared_tasks += _prepare_with_examples(config, tokenizer, on_nothing, tokenization, longest, limit)
        if tasks and not prepared_tasks:
            raise DataError(f"no task has an item that can be asked of a model of {longest} tokens; name others")
        if files is not None:
            files.refuse_to_replace(results, prepared_tasks)
        for task in prepared_tasks:
            check_tokens(model, _tokens_of(task), task.label)

    asker = Asker(model, tokenizer, max_batch_tokens, share or rank_and_size(None), on_progress)
    for task in prepared_tasks:
        # Rank 0 decides for all whether the task is finished, because it alone may see the files.
        finished = broadcast_json(files.finished_record(task, results)) if files is not None else None
        if finished is not None:
            results.tasks[task.name] = finished
            continue
        results.tasks[task.name], items = run_task(asker, task)
        if files is not None:
            with user_errors_on_all_ranks():  # only rank 0 writes, and the others wait for it
                files.add(results, task, items)

    if files is not None:
        earlier_records = broadcast_json(files.kept(results))
        for name, record in earlier_records.items():
            results.tasks.setdefault(name, record)
    return results


def _prepare_with_examples(
    config: TaskConfig,
    tokenizer: Tokenizer,
    on_nothing: Callable[[str], None] | None,
    tokenization: str,
    max_seq_len: int,
    limit: int | None,
) -> list[Prepared]:
    """Prepare a task once for each of its numbers of examples."""
    prepared: list[Prepared] = []
    with _leaving_out_empty_tasks(on_nothing):
        rows = read_rows(config)
        for num_fewshot in config.num_fewshot:
            with _leaving_out_empty_tasks(on_nothing):
                task = prepare_task(
                    config,
                    rows,
                    num_fewshot,
                    tokenizer,
                    max_seq_len=max_seq_len,
                    tokenization=tokenization,
                    limit=limit,
                )
                prepared.append(task)
    return prepared


@contextmanager
def _leaving_out_empty_tasks(on_nothing: Callable[[str], None] | None) -> Iterator[None]:
    """Leave the block when a task has nothing to ask, and tell `on_nothing` why. Without it, the error is raised."""
    try:
        yield
    except NothingToAsk as error:
        if on_nothing is None:
            raise
        on_nothing(str(error))


def _tokens_of(task: Prepared) -> Iterator[int]:
    """Yield every token id that a task asks about."""
    for item in task.items:
        for request in item.requests:
            yield from request.context
            yield from request.continuation


@dataclass(frozen=True, slots=True)
class Asker:
    """A model, and what is needed to ask it."""

    model: Scorable
    tokenizer: Tokenizer
    max_batch_tokens: int
    share: tuple[int, int]
    """(rank, number of ranks) that divide the items of a task."""
    on_progress: Progress


def run_task(asker: Asker, task: Prepared) -> tuple[Record, list[Record]]:
    """Ask about all items of a task. Returns the task's record, and one record for each item. Collective."""
    started = time.monotonic()
    on_progress = partial(asker.on_progress, task.name)
    on_progress(0, len(task.items))

    if task.kind in GENERATION:
        items = _generate_items(asker, task, on_progress)
    else:
        items = _score_items(asker, task, on_progress)

    record = summarise(task, items, time.monotonic() - started)
    record["code"] = code_version()
    record["items_hash"] = hash_of(items)
    return record, items


def _generate_items(asker: Asker, task: Prepared, on_progress: Callable[[int, int], None]) -> list[Record]:
    """Let the model write an answer to each item. Returns the items' records."""
    max_new_tokens = task.config.max_new_tokens
    assert max_new_tokens is not None, "tasks.prepare_task fills it in"
    stops = task.config.early_stopping_criteria
    prompts = [Prompt(item.requests[0].context, max_new_tokens, stops) for item in task.items]

    texts = generate_answers(asker.model, asker.tokenizer, task.name, prompts, asker.share, on_progress)
    records: list[Record] = []
    for item, text in zip(task.items, texts, strict=True):
        records.append(generated_item(task, item, text, is_right=is_right(task.config, text, item.answers)))
    return records


def _score_items(asker: Asker, task: Prepared, on_progress: Callable[[int, int], None]) -> list[Record]:
    """Score each option of each item. Returns the items' records."""
    separator = None
    if task.kind == "perplexity":  # running text has documents, as in training; a prompt is one document
        separator = text_separator(asker.model, asker.tokenizer.eos_token_id)
    groups = [item.requests for item in task.items]

    scores = score_all(asker.model, task.name, groups, asker.max_batch_tokens, asker.share, on_progress, separator)
    records: list[Record] = []
    first = 0
    for item in task.items:
        end = first + len(item.requests)
        records.append(scored_item(task, item, scores[first:end]))
        first = end
    return records


def score_all(
    model: Scorable,
    name: str,
    groups: Sequence[Sequence[Request]],
    max_batch_tokens: int,
    share: tuple[int, int],
    on_progress: Callable[[int, int], None],
    separator: Separator | None = None,
) -> list[Score]:
    """Return the scores of all requests, in order over all groups.

    `groups` holds the requests of each item, and `name` is the task's, for errors. `on_progress` is called with the
    number of items done, estimated from this rank's requests, and the number of items in all.

    Collective: the ranks divide the requests and exchange their scores. `share` is (this rank, the number of ranks that
    divide them). Several ranks may have the same share, where they hold one model together.

    Raises DataError on all ranks if the model gives NaN or infinity.
    """
    rank, num_ranks = share
    num_items = len(groups)
    num_requests = sum(len(group) for group in groups)
    own_scores: dict[int, Score] = {}
    """Number of a request -> its score, for the requests that this rank computes."""
    for batch_scores in score(model, groups, max_batch_tokens, rank, num_ranks, separator=separator):
        own_scores.update(batch_scores)
        # The other ranks are assumed to have done as many.
        num_done = min(num_requests, len(own_scores) * num_ranks)
        on_progress(num_items * num_done // num_requests, num_items)

    num_bad = sum(not math.isfinite(value.log_probability) for value in own_scores.values())
    error = None
    if num_bad:
        counts = f"{num_bad:,} of {len(own_scores):,}"
        error = DataError(f"{name}: the model gives NaN or infinity for {counts} answers; nothing is kept")
    raise_on_all_ranks(error)

    own_rows = [[number, value.log_probability, value.is_greedy] for number, value in own_scores.items()]
    scores: dict[int, Score] = {}
    for rows_of_rank in all_gather_json(own_rows):
        for number, log_probability, is_greedy in rows_of_rank:
            scores[number] = Score(log_probability, is_greedy)
    return [scores[number] for number in sorted(scores)]


class Prompt(NamedTuple):
    """Tokens to continue greedily, until the end of text, one of the texts `stops`, or `max_new_tokens` tokens."""

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
    """Return the answer to each prompt of the task `name`, in order.

    Collective: the ranks divide the prompts as `share` (rank, number of ranks) says. A rank without a prompt repeats
    the last one, because all ranks of a sharded model must compute together.

    Raises DataError on all ranks if the model's logits are NaN or infinite.
    """
    rank, num_ranks = share
    num_prompts = len(prompts)
    own_answers: list[tuple[int, str]] = []
    """(number of a prompt, its answer), for the prompts of this rank."""
    for first_of_round in range(0, num_prompts, num_ranks):
        number = min(first_of_round + rank, num_prompts - 1)
        answer = generate_answer(model, tokenizer, prompts[number])

        error = None
        if answer is None:
            error = DataError(
                f"{name}: the model gives NaN or infinity in its answer to item {number}; nothing is kept"
            )
        raise_on_all_ranks(error)
        assert answer is not None, "raise_on_all_ranks has raised the error"
        if first_of_round + rank < num_prompts:
            own_answers.append((number, answer))
        on_progress(min(first_of_round + num_ranks, num_prompts), num_prompts)

    answers: dict[int, str] = {}
    for answers_of_rank in all_gather_json(own_answers):
        for number, answer in answers_of_rank:
            answers[number] = answer
    return [answers[number] for number in sorted(answers)]


def generate_answer(model: Scorable, tokenizer: Tokenizer, prompt: Prompt) -> str | None:
    """Return the text that the model writes after a prompt, or None if its logits are NaN or infinite.

    Collective: the ranks of a sharded model must compute equally many tokens. Each goes on until all have their answers
    or one has failed, and drops the tokens that it no longer needs.
    """
    tokens = islice(model.generate(prompt.context, prompt.max_new_tokens), prompt.max_new_tokens)
    written: list[int] = []
    answer: str | None = None
    has_failed = False
    while True:
        any_is_open, any_has_failed = all_reduce_max([answer is None, has_failed])
        if any_has_failed:
            return None if has_failed else answer
        if not any_is_open:
            return answer

        try:
            token = next(tokens, None)
        except NonFiniteError:
            has_failed = True
            continue
        if answer is not None:
            continue

        if token is None or token in tokenizer.stop_token_ids:
            answer = tokenizer.decode(written)
            continue
        written.append(token)
        text = tokenizer.decode(written)
        if any(stop in text for stop in prompt.stops):
            any_stop = "|".join(re.escape(stop) for stop in prompt.stops)
            answer = re.split(any_stop, text)[0]
