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
from llmfoundry_lite.evaluation.items import GENERATION, SEPARATE, EmptyTaskError, PreparedTask, Request
from llmfoundry_lite.evaluation.packing import Separator
from llmfoundry_lite.evaluation.prompts import is_correct
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
    data_rank: "DataRank | None" = None,
    on_empty_task: Callable[[str], None] | None = None,
) -> Results:
    """Evaluate one model on `tasks`, and return `results` with a record for each task.

    Collective: all ranks call this together and get the same results. Only rank 0 writes.

    files: the result files of this model. Tasks that they hold already are not run again, and each new result is
        written as soon as its task has finished. None writes nothing.
    tokenization: "separate" or "joint", for tasks that do not set it themselves.
    max_seq_len: the longest prompt in tokens, if that is less than the model takes.
    limit: the largest number of items in each task.
    data_rank: this rank's place among the ranks that divide the items. By default that is its rank in the process
        group. It differs if several ranks hold one model together, such as the stages of a pipeline.
    on_empty_task: called with a reason for each task that has no item for this model; the task is then left out. None
        raises the error instead.

    Raises DataError before anything is computed if a task cannot be read, has tokens that the model does not know, or
    would replace a finished task in `files`. Raises DataError later if the model's outputs are NaN or infinite.
    """
    max_seq_len = min(max_seq_len or model.max_seq_len, model.max_seq_len)
    prepared_tasks: list[PreparedTask] = []
    with user_errors_on_all_ranks():  # a file may be missing on one machine alone
        for config in tasks:
            if config.icl_task_type == "perplexity":
                with _skipping_empty_tasks(on_empty_task):
                    prepared_tasks.append(prepare_text(config, tokenizer, max_seq_len=max_seq_len, limit=limit))
            else:
                prepared_tasks += _prepare_for_each_shot_count(
                    config, tokenizer, on_empty_task, tokenization, max_seq_len, limit
                )
        if tasks and not prepared_tasks:
            raise DataError(f"no task has an item that can be asked of a model of {max_seq_len} tokens; name others")
        if files is not None:
            files.refuse_to_replace(results, prepared_tasks)
        for task in prepared_tasks:
            check_tokens(model, _iterate_token_ids(task), task.label)

    runner = TaskRunner(model, tokenizer, max_batch_tokens, data_rank or DataRank(*rank_and_size(None)), on_progress)
    for task in prepared_tasks:
        # Rank 0 decides for all whether the task is finished, because it alone may see the files.
        finished = broadcast_json(files.finished_record(task, results)) if files is not None else None
        if finished is not None:
            results.tasks[task.name] = finished
            continue
        results.tasks[task.name], items = run_task(runner, task)
        if files is not None:
            with user_errors_on_all_ranks():  # only rank 0 writes, and the others wait for it
                files.add(results, task, items)

    if files is not None:
        earlier_records = broadcast_json(files.records_of_same_model(results))
        for name, record in earlier_records.items():
            results.tasks.setdefault(name, record)
    return results


def _prepare_for_each_shot_count(
    config: TaskConfig,
    tokenizer: Tokenizer,
    on_empty_task: Callable[[str], None] | None,
    tokenization: str,
    max_seq_len: int,
    limit: int | None,
) -> list[PreparedTask]:
    """Prepare a task once for each number of few-shot examples that it lists, such as 0 and 5.

    Raises DataError if the task's file cannot be used. A task without items is left out and reported to
    `on_empty_task`, or raises EmptyTaskError if that is None.
    """
    prepared: list[PreparedTask] = []
    with _skipping_empty_tasks(on_empty_task):
        rows = read_rows(config)
        for num_fewshot in config.num_fewshot:
            with _skipping_empty_tasks(on_empty_task):
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
def _skipping_empty_tasks(on_empty_task: Callable[[str], None] | None) -> Iterator[None]:
    """Turn an EmptyTaskError that the block raises into a call of `on_empty_task` with its message.

    The rest of the block is then skipped. If `on_empty_task` is None, the error is raised.
    """
    try:
        yield
    except EmptyTaskError as error:
        if on_empty_task is None:
            raise
        on_empty_task(str(error))


def _iterate_token_ids(task: PreparedTask) -> Iterator[int]:
    """Yield every token id in the prompts and answers of a task."""
    for item in task.items:
        for request in item.requests:
            yield from request.context
            yield from request.continuation


class DataRank(NamedTuple):
    """A rank's place among the ranks that divide the items of a task. Ranks that hold one model together share it."""

    rank: int
    num_ranks: int


@dataclass(frozen=True, slots=True)
class TaskRunner:
    """A model, and all that is needed to run tasks on it."""

    model: Scorable
    tokenizer: Tokenizer
    max_batch_tokens: int
    """Tokens of a forward pass, padding included."""
    data_rank: DataRank
    on_progress: Progress


def run_task(runner: TaskRunner, task: PreparedTask) -> tuple[Record, list[Record]]:
    """Run a task on all of its items. Collective. Returns the task's record, and a record for each item."""
    started = time.monotonic()
    on_progress = partial(runner.on_progress, task.name)
    on_progress(0, len(task.items))

    if task.kind in GENERATION:
        items = _generate_items(runner, task, on_progress)
    else:
        items = _score_items(runner, task, on_progress)

    record = summarise(task, items, time.monotonic() - started)
    record["code"] = code_version()
    record["items_hash"] = hash_of(items)
    return record, items


def _generate_items(runner: TaskRunner, task: PreparedTask, on_progress: Callable[[int, int], None]) -> list[Record]:
    """Generate an answer to each item of a task, and return a record for each item. Collective."""
    max_new_tokens = task.config.max_new_tokens
    assert max_new_tokens is not None, "tasks.prepare_task fills it in"
    stops = task.config.early_stopping_criteria
    prompts = [Prompt(item.requests[0].context, max_new_tokens, stops) for item in task.items]

    texts = generate_answers(runner.model, runner.tokenizer, task.name, prompts, runner.data_rank, on_progress)
    records: list[Record] = []
    for item, text in zip(task.items, texts, strict=True):
        records.append(generated_item(task, item, text, is_correct=is_correct(task.config, text, item.answers)))
    return records


def _score_items(runner: TaskRunner, task: PreparedTask, on_progress: Callable[[int, int], None]) -> list[Record]:
    """Score every option of every item of a task, and return a record for each item. Collective."""
    separator = None
    if task.kind == "perplexity":  # running text has documents, as in training; a prompt is one document
        separator = text_separator(runner.model, runner.tokenizer.eos_token_id)
    groups = [item.requests for item in task.items]

    scores = score_all(
        runner.model, task.name, groups, runner.max_batch_tokens, runner.data_rank, on_progress, separator
    )
    records: list[Record] = []
    num_used = 0
    for item in task.items:  # the scores are in the order of the items, one for each request
        scores_of_item = scores[num_used : num_used + len(item.requests)]
        num_used += len(item.requests)
        records.append(scored_item(task, item, scores_of_item))
    return records


def score_all(
    model: Scorable,
    name: str,
    groups: Sequence[Sequence[Request]],
    max_batch_tokens: int,
    data_rank: DataRank,
    on_progress: Callable[[int, int], None],
    separator: Separator | None = None,
) -> list[Score]:
    """Return the score of every request, in order over all groups.

    Collective: the ranks divide the requests, as `data_rank` says, and exchange their scores, so that all ranks return
    the same list. `groups` holds the requests of each item. `name` is the task's, for error messages. `on_progress` is
    called with the number of finished items, which this rank estimates from its own requests, and the number of all.

    Raises DataError on all ranks if the model's log-probabilities are NaN or infinite on any rank.
    """
    rank, num_ranks = data_rank
    num_items = len(groups)
    num_requests = sum(len(group) for group in groups)
    own_scores: dict[int, Score] = {}
    """Index of a request -> its score, for the requests that this rank computes."""
    for batch_scores in score(model, groups, max_batch_tokens, rank, num_ranks, separator=separator):
        own_scores.update(batch_scores)
        # This rank assumes that the others have done as many requests.
        num_done = min(num_requests, len(own_scores) * num_ranks)
        on_progress(num_items * num_done // num_requests, num_items)

    num_not_finite = sum(not math.isfinite(value.log_probability) for value in own_scores.values())
    error = None
    if num_not_finite:
        counts = f"{num_not_finite:,} of {len(own_scores):,}"
        error = DataError(f"{name}: the model gives NaN or infinity for {counts} answers; nothing is kept")
    raise_on_all_ranks(error)

    own_rows = [[index, value.log_probability, value.is_greedy] for index, value in own_scores.items()]
    scores: dict[int, Score] = {}
    for rows_of_rank in all_gather_json(own_rows):
        for index, log_probability, is_greedy in rows_of_rank:
            scores[index] = Score(log_probability, is_greedy)
    return [scores[index] for index in sorted(scores)]


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
    data_rank: DataRank,
    on_progress: Callable[[int, int], None],
) -> list[str]:
    """Return the text that the model generates after each prompt, in order. `name` is the task's, for error messages.

    Collective: the ranks take prompts in rounds, one prompt each, as `data_rank` says. Because all ranks of a sharded
    model must compute together, a rank for which the last round has no prompt generates the last prompt's answer again.

    Raises DataError on all ranks if the model's logits are NaN or infinite on any rank.
    """
    rank, num_ranks = data_rank
    num_prompts = len(prompts)
    own_answers: list[tuple[int, str]] = []
    """(index of a prompt, its answer), for the prompts of this rank."""
    for round_start in range(0, num_prompts, num_ranks):
        has_prompt = round_start + rank < num_prompts
        index = round_start + rank if has_prompt else num_prompts - 1
        answer = generate_answer(model, tokenizer, prompts[index])

        error = None
        if answer is None:
            error = DataError(f"{name}: the model gives NaN or infinity in its answer to item {index}; nothing is kept")
        raise_on_all_ranks(error)
        assert answer is not None, "raise_on_all_ranks has raised the error"
        if has_prompt:
            own_answers.append((index, answer))
        on_progress(min(round_start + num_ranks, num_prompts), num_prompts)

    answers: dict[int, str] = {}
    for answers_of_rank in all_gather_json(own_answers):
        for index, answer in answers_of_rank:
            answers[index] = answer
    return [answers[index] for index in sorted(answers)]


def generate_answer(model: Scorable, tokenizer: Tokenizer, prompt: Prompt) -> str | None:
    """Return the text that the model generates after a prompt, or None if its logits are NaN or infinite.

    If the logits of another rank are, this rank may return None before its answer is complete. The answer ends before a
    stop token, before one of the prompt's stop texts, or after `max_new_tokens` tokens.

    Collective: the ranks of a sharded model must compute the same number of tokens. So a rank that has its answer keeps
    generating, and ignores the tokens, until every rank has its answer or one has failed.
    """
    tokens = islice(model.generate(prompt.context, prompt.max_new_tokens), prompt.max_new_tokens)
    answer_ids: list[int] = []
    answer: str | None = None
    has_failed = False
    while True:
        is_any_unfinished, is_any_failed = all_reduce_max([answer is None, has_failed])
        if is_any_failed:
            return None if has_failed else answer
        if not is_any_unfinished:
            return answer

        try:
            token = next(tokens, None)
        except NonFiniteError:
            has_failed = True
            continue
        if answer is not None:
            continue

        if token is None or token in tokenizer.stop_token_ids:
            answer = tokenizer.decode(answer_ids)
            continue
        answer_ids.append(token)
        text = tokenizer.decode(answer_ids)
        if any(stop in text for stop in prompt.stops):
            any_stop = "|".join(re.escape(stop) for stop in prompt.stops)
            answer = re.split(any_stop, text)[0]
