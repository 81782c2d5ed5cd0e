"""Evaluates one model on tasks, on one rank or several.

`evaluate` prepares all tasks, then runs them one by one and writes its files after each, so that an evaluation that is
started again repeats no finished task. `run_task` runs the model on each item of a task. `score_all` and
`generate_answers` divide the items among the ranks, and gather the results.
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
from llmfoundry_lite.evaluation.items import SEPARATE, EmptyTaskError, PreparedTask, Request
from llmfoundry_lite.evaluation.packing import Separator
from llmfoundry_lite.evaluation.prompts import is_correct
from llmfoundry_lite.evaluation.records import Record
from llmfoundry_lite.evaluation.result_files import ResultFiles
from llmfoundry_lite.evaluation.results import Results, code_version
from llmfoundry_lite.evaluation.scoring import Scorable, Score, check_tokens, score, text_separator
from llmfoundry_lite.evaluation.summaries import generated_item, hash_of, scored_item, summarise
from llmfoundry_lite.evaluation.task_files import read_rows
from llmfoundry_lite.evaluation.tasks import prepare_task
from llmfoundry_lite.evaluation.token_texts import TokenTexts, prompt_tokens
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
    keep_prompts: bool = False,
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
    keep_prompts: record the prompt of each item in tokens, too (`token_texts.prompt_tokens`).
    data_rank: this rank's place among the ranks that divide the items. By default that is its rank in the process
        group. It differs if several ranks hold one model together, such as the stages of a pipeline.
    on_progress: called with the task's name, the number of items done and the number of all items.
    on_empty_task: called with a reason for each task that has no item for this model; the task is then left out. None
        raises the error instead.

    Raises DataError before anything is computed if a task cannot be read, has tokens that the model does not know, or
    would replace a finished task in `files`. Raises DataError later if the model's outputs are NaN or infinite.
    """
    max_seq_len = min(max_seq_len or model.max_seq_len, model.max_seq_len)

    # Prepare and check all tasks first, so that mistakes show before the model computes anything.
    prepared_tasks: list[PreparedTask] = []
    with user_errors_on_all_ranks():  # a file may be missing on one machine alone
        for config in tasks:
            if config.task_type.answer == "text":
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

    if data_rank is None:
        data_rank = DataRank(*rank_and_size(None))
    runner = TaskRunner(model, tokenizer, max_batch_tokens, data_rank, on_progress, keep_prompts)
    for task in prepared_tasks:
        # Rank 0 decides for all whether an earlier launch finished the task, because it alone may see the files.
        finished_record = None
        if files is not None:
            finished_record = broadcast_json(files.finished_record(task, results))
        if finished_record is not None:
            results.tasks[task.name] = finished_record
            continue

        results.tasks[task.name], items = run_task(runner, task)
        if files is not None:
            with user_errors_on_all_ranks():  # only rank 0 writes, and the others wait for it
                files.add(results, task, items)

    # Tasks of earlier launches that are not asked for now come after those of this launch.
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
    """Prepare a task of questions once for each number of few-shot examples that it lists, such as 0 and 5.

    Returns a PreparedTask for each number, in order. Raises DataError if the task's file cannot be used. A task without
    items is left out and reported to `on_empty_task`, or raises EmptyTaskError if that is None.
    """
    prepared: list[PreparedTask] = []
    # A file without rows leaves out the task for all numbers of examples. Prompts that are too long for the model may
    # leave it out only for the larger numbers.
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
        requests = item.requests
        if item.gold_request is not None:
            requests = (*requests, item.gold_request)
        for request in requests:
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
    keep_prompts: bool = False
    """Record the prompt of each item in tokens."""


def run_task(runner: TaskRunner, task: PreparedTask) -> tuple[Record, list[Record]]:
    """Run the model on all items of a task, and return the task's record and a record for each item.

    Collective: the ranks divide the items, and all return the same records. The task's record has the scores with their
    standard errors, the version of the code, and a hash of the items' records, which ties the two files together.
    """
    started_at = time.monotonic()
    on_progress = partial(runner.on_progress, task.name)
    on_progress(0, len(task.items))

    if task.answer == "generation":
        items = _generate_items(runner, task, on_progress)
    else:
        items = _score_items(runner, task, on_progress)
    if runner.keep_prompts:
        token_texts = TokenTexts(runner.tokenizer)
        for item, item_record in zip(task.items, items, strict=True):
            item_record["prompt_tokens"] = prompt_tokens(item, token_texts)

    # Reduce the items to scores.
    with user_errors_on_all_ranks():
        record = summarise(task, items, seconds=time.monotonic() - started_at)
    record["code"] = code_version()
    record["items_hash"] = hash_of(items)
    return record, items


def _generate_items(runner: TaskRunner, task: PreparedTask, on_progress: Callable[[int, int], None]) -> list[Record]:
    """Generate an answer to each item of a generation task, and return a record for each item.

    Each record has the generated text, whether it begins with an accepted answer, and the bits per byte of the first
    accepted answer. Collective: the ranks divide the items, and all return the records of all items. `on_progress` is
    called with the numbers of items done and in all.
    """
    # Generate the answers. An item of a generation task has a single request, whose context is the prompt.
    max_new_tokens = task.config.max_new_tokens
    assert max_new_tokens is not None, "tasks.prepare_task fills it in"
    stop_texts = task.config.early_stopping_criteria
    prompts = [Prompt(item.requests[0].context, max_new_tokens, stop_texts) for item in task.items]
    answers = generate_answers(runner.model, runner.tokenizer, task.name, prompts, runner.data_rank, on_progress)

    # Grade the answers, and score the right ones. That takes little time beside generation, because a pass of the model
    # scores a whole batch, and not one token.
    gold_scores = _score_gold_answers(runner, task)
    records: list[Record] = []
    with user_errors_on_all_ranks():  # code of the user's own may fail on one rank alone
        for item, answer in zip(task.items, answers, strict=True):
            is_right = is_correct(task.config, answer, item.answers)
            records.append(generated_item(task, item, answer, gold_scores.get(item.index), is_correct=is_right))
    return records


def _score_gold_answers(runner: TaskRunner, task: PreparedTask) -> dict[int, Score]:
    """Return the score of the first right answer to each item of a generation task, by the item's index.

    Items whose answer cannot be asked for are left out. Collective: the ranks divide the items, and all return all
    scores.
    """
    gold_requests = {item.index: item.gold_request for item in task.items if item.gold_request is not None}
    if not gold_requests:
        return {}
    groups = [[request] for request in gold_requests.values()]

    def on_progress(num_done: int, num_items: int) -> None:
        """Report nothing, because the items have been counted when their answers were generated."""

    scores = score_all(runner.model, task.name, groups, runner.max_batch_tokens, runner.data_rank, on_progress)
    return dict(zip(gold_requests, scores, strict=True))


def _score_items(runner: TaskRunner, task: PreparedTask, on_progress: Callable[[int, int], None]) -> list[Record]:
    """Score every option of every item of a task, and return a record for each item.

    Collective: the ranks divide the items, and all return the records of all items. `on_progress` is called with the
    numbers of items done and in all.
    """
    # Running text consists of documents, as in training. A prompt is one document, even if it has a separator in it.
    separator = None
    if task.answer == "text":
        separator = text_separator(runner.model, runner.tokenizer.eos_token_id)

    groups = [item.requests for item in task.items]
    scores = score_all(
        runner.model, task.name, groups, runner.max_batch_tokens, runner.data_rank, on_progress, separator
    )

    # The scores are in the order of the items, one for each request. Each item takes those of its own requests.
    records: list[Record] = []
    num_used = 0
    with user_errors_on_all_ranks():  # code of the user's own may fail on one rank alone
        for item in task.items:
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

    name: the task's name, for error messages.
    groups: the requests of each item.
    max_batch_tokens: the largest number of tokens in a forward pass, padding included.
    data_rank: this rank's place among the ranks that divide the requests.
    on_progress: called with the number of finished items, which is estimated, and the number of all items.
    separator: the token that divides documents in running text; None if each request is one document.

    Collective: the ranks divide the requests and exchange their scores, so that all ranks return the same list. Raises
    DataError on all ranks if the model's log-probabilities are NaN or infinite on any rank.
    """
    # Score this rank's part of the requests.
    rank, num_ranks = data_rank
    num_items = len(groups)
    num_requests = sum(len(group) for group in groups)
    scores_of_rank: dict[int, Score] = {}
    """Number of a request -> its score, for the requests that this rank computes."""
    for scores_of_batch in score(model, groups, max_batch_tokens, rank, num_ranks, separator=separator):
        scores_of_rank.update(scores_of_batch)
        # Estimate progress by assuming that the other ranks have done as many requests.
        num_done = min(num_requests, len(scores_of_rank) * num_ranks)
        on_progress(num_items * num_done // num_requests, num_items)

    # NaN must not reach the results, where it would look like a wrong answer.
    num_not_finite = sum(not math.isfinite(request_score.log_probability) for request_score in scores_of_rank.values())
    error = None
    if num_not_finite:
        counts = f"{num_not_finite:,} of {len(scores_of_rank):,}"
        error = DataError(f"{name}: the model gives NaN or infinity for {counts} answers; nothing is kept")
    raise_on_all_ranks(error)

    # Gather the scores of all ranks, and put them into the order of the requests.
    sent_scores: list[tuple[int, float, bool]] = []
    for number, (log_probability, is_greedy) in scores_of_rank.items():
        sent_scores.append((number, log_probability, is_greedy))
    all_scores: dict[int, Score] = {}
    for received_scores in all_gather_json(sent_scores):
        for number, log_probability, is_greedy in received_scores:
            all_scores[number] = Score(log_probability, is_greedy)
    return [all_scores[number] for number in sorted(all_scores)]


class Prompt(NamedTuple):
    """Token ids to continue greedily, until the end of text, one of the texts `stops`, or `max_new_tokens` tokens."""

    context: Sequence[int]
    max_new_tokens: int
    stops: Sequence[str] = ()
    """Texts that end the answer. They are not part of it."""


def generate_answers(
    model: Scorable,
    tokenizer: Tokenizer,
    name: str,
    prompts: Sequence[Prompt],
    data_rank: DataRank,
    on_progress: Callable[[int, int], None],
) -> list[str]:
    """Return the text that the model generates after each prompt, in the order of the prompts.

    name: the task's name, for error messages.
    data_rank: this rank's place among the ranks that divide the prompts.
    on_progress: called after each round with the number of prompts done and the number of all prompts.

    Collective: the ranks take prompts in rounds, one prompt each, and all ranks return all answers. Because all ranks
    of a sharded model must compute together, a rank for which the last round has no prompt generates the last prompt's
    answer again, and does not use it.

    Raises DataError on all ranks if the model's logits are NaN or infinite on any rank.
    """
    rank, num_ranks = data_rank
    num_prompts = len(prompts)
    answers_of_rank: list[tuple[int, str]] = []
    """(index of a prompt, its answer), for the prompts of this rank."""
    for round_start in range(0, num_prompts, num_ranks):
        has_prompt = round_start + rank < num_prompts
        index = round_start + rank if has_prompt else num_prompts - 1
        answer = generate_answer(model, tokenizer, prompts[index])

        # An answer of None means NaN or infinite logits. All ranks stop if any rank met them.
        error = None
        if answer is None:
            error = DataError(f"{name}: the model gives NaN or infinity in its answer to item {index}; nothing is kept")
        raise_on_all_ranks(error)
        assert answer is not None, "raise_on_all_ranks has raised the error"
        if has_prompt:
            answers_of_rank.append((index, answer))
        on_progress(min(round_start + num_ranks, num_prompts), num_prompts)

    # Gather the answers of all ranks, and put them into the order of the prompts.
    all_answers: dict[int, str] = {}
    for received_answers in all_gather_json(answers_of_rank):
        for index, answer in received_answers:
            all_answers[index] = answer
    return [all_answers[index] for index in sorted(all_answers)]


def generate_answer(model: Scorable, tokenizer: Tokenizer, prompt: Prompt) -> str | None:
    """Return the text that the model generates after a prompt, or None if its logits are NaN or infinite.

    The answer ends before a stop token, before one of the prompt's stop texts, or after `max_new_tokens` tokens. With
    the stop text "\\n", the generated text "Paris.\\nQuestion" gives the answer "Paris.".

    Collective: the ranks of a sharded model must compute the same number of tokens. So a rank that has its answer keeps
    generating, and ignores the tokens, until every rank has its answer or one has failed. If another rank has NaN or
    infinite logits, this rank may return None as well, before its answer is complete.
    """
    token_ids = islice(model.generate(prompt.context, prompt.max_new_tokens), prompt.max_new_tokens)
    answer_ids: list[int] = []
    answer: str | None = None  # None until the answer is complete
    has_failed = False
    while True:
        # Every rank takes part in this exchange before each token, so that all leave the loop together.
        is_any_unfinished, is_any_failed = all_reduce_max([answer is None, has_failed])
        if is_any_failed:
            return None if has_failed else answer
        if not is_any_unfinished:
            return answer

        # Compute a token, which is only for the other ranks if this rank has its answer.
        try:
            token_id = next(token_ids, None)
        except NonFiniteError:
            has_failed = True
            continue
        if answer is not None:
            continue

        if token_id is None or token_id in tokenizer.stop_token_ids:
            answer = tokenizer.decode(answer_ids)
            continue

        # A stop text may span several tokens, so it is searched for in the whole answer.
        answer_ids.append(token_id)
        text = tokenizer.decode(answer_ids)
        if any(stop in text for stop in prompt.stops):
            any_stop = "|".join(re.escape(stop) for stop in prompt.stops)
            answer = re.split(any_stop, text)[0]
