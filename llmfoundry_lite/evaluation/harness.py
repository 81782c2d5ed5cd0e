"""Evaluation of one model on tasks, on one rank or several.

Files are written after every task, so that an evaluation that was killed repeats no finished task.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from llmfoundry_lite.config.eval_schema import TaskConfig
from llmfoundry_lite.data.tokenizer import Tokenizer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.generation import generate_answers, is_right, prompts_of
from llmfoundry_lite.evaluation.packing import Separator
from llmfoundry_lite.evaluation.records import Record, generated_item, hash_of, scored_item, summarise
from llmfoundry_lite.evaluation.reference import Reference, ask_until_decided
from llmfoundry_lite.evaluation.results import ResultFiles, Results, code_version, outline
from llmfoundry_lite.evaluation.scoring import Scorable, Score, check_tokens, score, text_separator
from llmfoundry_lite.evaluation.tasks import GENERATION, Prepared, Request, prepare, prepare_text, read_rows
from llmfoundry_lite.ranks.exchange import (
    all_gather_json,
    broadcast_json,
    raise_on_all_ranks,
    rank_and_size,
    user_errors_on_all_ranks,
)

Progress = Callable[[str, int, int], None]
"""(task, items done, items)"""


# 12 parameters: what is joined, and the settings of a suite, each with a default.
def evaluate(
    model: Scorable,
    tokenizer: Tokenizer,
    tasks: Sequence[TaskConfig],
    results: Results,
    files: ResultFiles | None = None,
    *,
    tokenization: str = "separate",
    max_batch_tokens: int = 2048,
    max_seq_len: int | None = None,
    limit: int | None = None,
    on_progress: Progress = lambda task, done, total: None,
    share: tuple[int, int] | None = None,
    reference: Reference | None = None,
) -> Results:
    """Ask all `tasks`, or those that `files` does not have yet; with a `reference`, until a difference is decided.

    All ranks must call this; all get the same Results, and rank 0 writes. `share` is (rank, ranks) that divide the
    items, where several ranks compute as one.

    Raises DataError for a task that cannot be read, has tokens that the model does not know, or would replace a
    finished one in `files`, before anything is computed, and for a model whose outputs are NaN or infinite.
    """
    longest = min(max_seq_len or model.max_seq_len, model.max_seq_len)
    prepared: list[Prepared] = []
    with user_errors_on_all_ranks():  # a file missing on one machine is an error on all ranks
        for config in tasks:
            prepared += _prepare_task(config, tokenizer, longest, tokenization, limit)
        for task in prepared:
            if reference is not None:
                reference.refuse(task, results)
        if files is not None:
            files.refuse_to_replace(results, [outline(task) for task in prepared])
        for task in prepared:
            largest = (max(*r.context, *r.continuation, -1) for item in task.items for r in item.requests)
            check_tokens(model, largest, task.label)
    asker = Asker(
        model=model,
        tokenizer=tokenizer,
        max_batch_tokens=max_batch_tokens,
        share=share or rank_and_size(None),
        on_progress=on_progress,
    )
    for task in prepared:
        plan = None if reference is None else reference.describe_plan(task)
        # Rank 0's word, because it alone may see the files.
        if files is not None and (known := broadcast_json(files.find(task, results, plan))) is not None:
            results.tasks[task.name] = known
            continue
        results.tasks[task.name], items = run_task(asker, task, results, reference)
        if files is not None:
            with user_errors_on_all_ranks():  # rank 0 alone writes, and the others would wait for it at the next task
                files.add(results, outline(task), items)
    if files is not None:
        results.tasks |= {k: v for k, v in broadcast_json(files.kept(results)).items() if k not in results.tasks}
    return results


def _prepare_task(
    config: TaskConfig, tokenizer: Tokenizer, max_seq_len: int, tokenization: str, limit: int | None
) -> list[Prepared]:
    if config.icl_task_type == "perplexity":
        return [prepare_text(config, tokenizer, max_seq_len=max_seq_len, limit=limit)]
    rows = read_rows(config)
    return [
        prepare(config, rows, shots, tokenizer, max_seq_len=max_seq_len, tokenization=tokenization, limit=limit)
        for shots in config.num_fewshot
    ]


def run_task(
    asker: "Asker", task: Prepared, results: Results, reference: Reference | None = None
) -> tuple[Record, list[Record]]:
    """Return (the task's record, one for each item that was asked)."""
    started, total, more = time.monotonic(), len(task.items), {}
    asker.on_progress(task.name, 0, total)

    def ask_part(part: Prepared, num_before: int) -> list[Record]:
        # Not reported as done while another look may follow.
        return asker.ask(part, lambda name, done, _: asker.on_progress(name, min(num_before + done, total - 1), total))

    if reference is None:
        items = asker.ask(task)
    else:
        task, items, more["sequential"] = ask_until_decided(task, reference, results, ask_part)
        asker.on_progress(task.name, len(items), len(items))
    record = summarise(task, items, time.monotonic() - started) | more
    return record | {"code": code_version(), "items_hash": hash_of(items)}, items


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    """A model that is asked a task's items."""

    model: Scorable
    tokenizer: Tokenizer
    max_batch_tokens: int
    share: tuple[int, int]
    on_progress: Progress

    def ask(self, task: Prepared, on_progress: Progress | None = None) -> list[Record]:
        """Return a record for each item."""
        progress = partial(on_progress or self.on_progress, task.name)
        if task.kind in GENERATION:
            texts = generate_answers(self.model, self.tokenizer, task.name, prompts_of(task), self.share, progress)
            return [
                generated_item(task, item, text, is_right=is_right(task.config, text, item.answers))
                for item, text in zip(task.items, texts, strict=True)
            ]
        # As in training and eval/loss; prompts are one document, whatever tokens they have.
        is_text = task.kind == "perplexity"
        separator = text_separator(self.model, self.tokenizer.eos_token_id) if is_text else None
        groups = [item.requests for item in task.items]
        scores = score_all(self.model, task.name, groups, self.max_batch_tokens, self.share, progress, separator)
        items, number = [], 0
        for item in task.items:
            items.append(scored_item(task, item, scores[number : number + len(item.requests)]))
            number += len(item.requests)
        return items


def score_all(
    model: Scorable,
    name: str,
    groups: Sequence[Sequence[Request]],
    max_batch_tokens: int,
    share: tuple[int, int],
    on_progress: Callable[[int, int], None],
    separator: Separator | None = None,
) -> list[Score]:
    """Return the scores of all requests of the task `name`, in order; `share` is (rank, ranks) that divide them.

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
