"""(prepared model, tokenizer, tasks) -> Results, on one rank or several.

Owns the order of things and the metrics. After every task it hands over to `results`, which has the files, so that an
evaluation that was killed does not do a finished task again.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence

from llmfoundry_lite.config.schema import TaskConfig
from llmfoundry_lite.errors import DataError, UserError
from llmfoundry_lite.evaluation.against import Against, ask_until_decided
from llmfoundry_lite.evaluation.generation import answer_all, is_right
from llmfoundry_lite.evaluation.packing import Separator
from llmfoundry_lite.evaluation.perplexity import prepare_text
from llmfoundry_lite.evaluation.reading import (
    Record,
    bits_per_byte_error,
    document_of,
    has_categories,
    hash_of,
    mean_and_error,
    ratio_error,
)
from llmfoundry_lite.evaluation.results import ResultFiles, Results, code_version, outline
from llmfoundry_lite.evaluation.rows import GENERATION, read_rows
from llmfoundry_lite.evaluation.scoring import Scorable, Score, score
from llmfoundry_lite.evaluation.tasks import Encoder, Item, Prepared, prepare
from llmfoundry_lite.ranks.exchange import all_gather_json, broadcast_json, raise_on_all_ranks, rank_and_size

METRICS = {
    "multiple_choice": ("acc_per_token", "acc", "acc_norm"),
    "schema": ("acc_per_token", "acc", "acc_norm"),
    "language_modeling": ("acc",),
    "generation_task_with_answers": ("acc",),
    "perplexity": (),
}
Progress = Callable[[str, int, int], None]
"""(task, items done, items)"""


def evaluate(
    model: Scorable,
    tokenizer: Encoder,
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
    against: Against | None = None,
) -> Results:
    """Ask all `tasks`, or those that `files` does not have yet; `against` a stored result, until the difference to it
    is decided. With several ranks all must call this; all get the
    same Results, and rank 0 writes.

    `share` is (rank, ranks) of those among whom the items are divided, where several ranks compute as one; the
    default is one share for each rank.

    Raises DataError for a task that cannot be read, has tokens that the model does not know, or would replace a
    finished one in `files`, before anything is computed, and for a model that gives no numbers (NaN).
    """
    longest = min(max_seq_len or model.max_seq_len, model.max_seq_len)
    prepared, error = [], None
    try:
        for config in tasks:
            prepared += prepare_task(config, tokenizer, longest, tokenization, limit)
        if against is not None:
            for task in prepared:
                against.refuse(task, results)
        if files is not None:
            files.refuse_to_replace(results, [outline(task) for task in prepared])
    except UserError as caught:
        error = caught
    error = error or _find_unknown_token(model, prepared)
    raise_on_all_ranks(error)  # of a file that one machine alone lacks, the others hear now, not when they wait for it
    for task in prepared:
        # Rank 0's word, because it alone may see the files.
        told = None if against is None else against.told(task.name, against.plan(task))
        if files is not None and (known := broadcast_json(files.find(task, results, told))) is not None:
            results.tasks[task.name] = known
            continue
        how = (max_batch_tokens, on_progress, share or rank_and_size(None))
        record, items = run_task(model, tokenizer, task, *how, against, results)
        results.tasks[task.name] = record
        if files is not None:
            try:
                files.add(results, task.name, items)
            except UserError as caught:
                error = caught
            raise_on_all_ranks(error)  # rank 0 alone writes, and the others would wait for it at the next task
    if files is not None:
        results.tasks |= {
            name: record for name, record in broadcast_json(files.kept(results)).items() if name not in results.tasks
        }
    return results


def _find_unknown_token(model: Scorable, prepared: Sequence[Prepared]) -> DataError | None:
    """The tokenizer is another model's, if it has tokens beyond the vocabulary."""
    for task in prepared:
        ids = (max(*request.context, *request.continuation, -1) for item in task.items for request in item.requests)
        if (largest := max(ids)) >= model.vocab_size:
            return DataError(
                f"{task.label}: the tokenizer gives token {largest}, and the model has {model.vocab_size:,}; evaluate "
                "it with its own tokenizer: tokenizer=…"
            )
    return None


def prepare_task(
    config: TaskConfig, tokenizer: Encoder, max_seq_len: int, tokenization: str, limit: int | None
) -> list[Prepared]:
    if config.icl_task_type == "perplexity":
        return [prepare_text(config, tokenizer, max_seq_len=max_seq_len, limit=limit)]
    rows = read_rows(config)
    return [
        prepare(config, rows, shots, tokenizer, max_seq_len=max_seq_len, tokenization=tokenization, limit=limit)
        for shots in config.num_fewshot
    ]


def run_task(
    model: Scorable,
    tokenizer: Encoder,
    task: Prepared,
    max_batch_tokens: int,
    on_progress: Progress,
    share: tuple[int, int],
    against: Against | None = None,
    results: Results | None = None,
) -> tuple[Record, list[Record]]:
    """(the task's line in Results, one record for each item); with `against`, of those that are asked until the
    difference of `results` to the stored one is decided."""
    started, total, more = time.monotonic(), len(task.items), {}
    on_progress(task.name, 0, total)

    def ask_part(part: Prepared, num_before: int) -> list[Record]:
        # Not told as done while another look may follow.
        def on_part(name: str, done: int, _: int) -> None:
            on_progress(name, min(num_before + done, total - 1), total)

        return ask(model, tokenizer, part, max_batch_tokens, on_part, share)

    if against is None:
        items = ask(model, tokenizer, task, max_batch_tokens, on_progress, share)
    else:
        assert results is not None
        task, items, more["sequential"] = ask_until_decided(task, against, results, ask_part)
        on_progress(task.name, len(items), len(items))
    record = summarise(task, items, time.monotonic() - started) | more
    return record | {"code": code_version(), "items_hash": hash_of([json.dumps(item) for item in items])}, items


def ask(
    model: Scorable,
    tokenizer: Encoder,
    task: Prepared,
    max_batch_tokens: int,
    on_progress: Progress,
    share: tuple[int, int],
) -> list[Record]:
    """One record for each item."""
    if task.kind in GENERATION:
        texts = answer_all(model, tokenizer, task, max_batch_tokens, *share, on_progress)
        return [_generation_record(task, item, text) for item, text in zip(task.items, texts, strict=True)]
    # As in training and eval/loss; prompts are one document, whatever tokens they have.
    is_separated = task.kind == "perplexity" and model.separates_documents
    separator = (model.separator or Separator(tokenizer.eos_token_id)) if is_separated else None
    scores = _score_all(model, task, max_batch_tokens, *share, on_progress, separator)
    return [_record(task, item, scores) for item in _numbered(task.items)]


def _score_all(
    model: Scorable,
    task: Prepared,
    max_batch_tokens: int,
    rank: int,
    world_size: int,
    on_progress: Progress,
    separator: Separator | None,
) -> dict[int, Score]:
    found: dict[int, Score] = {}
    num_requests = sum(len(item.requests) for item in task.items)
    groups = [item.requests for item in task.items]
    for scores in score(model, groups, max_batch_tokens, rank, world_size, separator=separator):
        found.update(scores)
        done = min(num_requests, len(found) * world_size)
        on_progress(task.name, len(task.items) * done // num_requests, len(task.items))
    bad = sum(not math.isfinite(value.log_probability) for value in found.values())
    raise_on_all_ranks(
        DataError(
            f"{task.name}: the model gives NaN or infinity for {bad:,} of {len(found):,} answers; nothing is kept"
        )
        if bad
        else None
    )
    shares = all_gather_json([[number, *value] for number, value in found.items()])
    return {number: Score(*value) for share in shares for number, *value in share}


def _numbered(items: Iterable[Item]) -> Iterable[tuple[int, Item]]:
    """Each item with the number of its first request."""
    number = 0
    for item in items:
        yield number, item
        number += len(item.requests)


# ---------------------------------------------------------------------------------------------------------- metrics


def _record(task: Prepared, numbered: tuple[int, Item], scores: dict[int, Score]) -> Record:
    first, item = numbered
    found = [scores[first + i] for i in range(len(item.requests))]
    sums = [value.log_probability for value in found]
    tokens = [len(request.continuation) for request in item.requests]
    characters = [request.num_characters for request in item.requests]
    record: Record = {
        "task": task.name,
        "index": item.index,
        "log_probability": sums,
        "num_tokens": tokens,
        "num_characters": characters,
        "num_trimmed": max(request.num_trimmed for request in item.requests),
    }
    record |= _groups(item)
    if task.kind == "language_modeling":
        record["acc"] = int(found[0].is_greedy)
    if task.kind in ("multiple_choice", "schema"):
        scales = {"acc_per_token": tokens, "acc": [1] * len(sums), "acc_norm": [max(n, 1) for n in characters]}
        rated = {name: [s / n for s, n in zip(sums, scale, strict=True)] for name, scale in scales.items()}
        record["gold"] = item.gold
        # On ties the first, as both other harnesses have it.
        record["chosen"] = {name: values.index(max(values)) for name, values in rated.items()}
        record |= {name: int(chosen == item.gold) for name, chosen in record["chosen"].items()}
        record["tie"] = {name: values.count(max(values)) > 1 for name, values in rated.items()}
        record["has_duplicates"] = item.has_duplicates
    return record


def _groups(item: Item) -> Record:
    named = {"category": item.category, "cluster": item.cluster}
    return {key: value for key, value in named.items() if value is not None}


def _generation_record(task: Prepared, item: Item, text: str) -> Record:
    record: Record = {"task": task.name, "index": item.index, "text": text, "answers": list(item.answers)}
    record["num_trimmed"] = item.requests[0].num_trimmed
    record |= _groups(item)
    return {**record, "acc": int(is_right(task.config, text, item.answers))}


def summarise(task: Prepared, items: Sequence[Record], seconds: float) -> Record:
    """The task's numbers: means with their standard errors, and counts of what was odd."""
    record: Record = {
        "type": task.kind,
        "n": len(items),
        "num_fewshot": task.num_fewshot,
        "tokenization": task.config.tokenization,
        "fingerprint": task.fingerprint,
        "data_fingerprint": task.data_fingerprint,
        "settings": task.settings,
        "metric": task.metric,
    }
    for name in METRICS[task.kind]:
        record[name], record[f"{name}_stderr"] = mean_and_error(items, name, has_categories(record))
    if task.kind != "perplexity" and any("cluster" in item for item in items):
        record["num_clusters"] = len({item["cluster"] for item in items})
    if task.kind in ("multiple_choice", "schema"):
        chances = [{**item, "chance": 1 / len(item["num_tokens"])} for item in items]
        record["chance"], _ = mean_and_error(chances, "chance", has_categories(record))
        record["num_ties"] = sum(item["tie"][record["metric"]] for item in items)
        record["num_duplicates"] = sum(item["has_duplicates"] for item in items)
    if task.kind == "language_modeling":
        answers = [{**item, "nats": -item["log_probability"][0]} for item in items]
        record |= _perplexity(*mean_and_error(answers, "nats"))
    if task.kind == "perplexity":
        rows = [(-item["log_probability"][0], item["num_tokens"][0]) for item in items]
        nats = sum(row[0] for row in rows)
        record |= _perplexity(nats / sum(row[1] for row in rows), ratio_error(items, rows))
        record["num_documents"] = len({document_of(item) for item in items})
        record["bits_per_byte"] = nats / math.log(2) / sum(item["num_characters"][0] for item in items)
        if (error := bits_per_byte_error(items)) is not None:
            record["bits_per_byte_stderr"] = error
    if has_categories(record):
        names = sorted({item["category"] for item in items})
        record["categories"] = {
            name: mean_and_error([item for item in items if item["category"] == name], record["metric"])[0]
            for name in names
        }
    trimmed = sum(1 for item in items if item.get("num_trimmed"))
    odd = {"num_trimmed": trimmed, "num_missing_examples": sum(bool(i.num_missing_examples) for i in task.items)}
    odd |= {"num_repeated": task.num_repeated, "skipped": task.skipped, "beginning": task.beginning}
    return {**record, **{key: value for key, value in odd.items() if value}, "seconds": round(seconds, 3)}


def _perplexity(nats: float, error: float | None) -> Record:
    """With its standard error, to first order: exp(x ± e) is exp(x) ± exp(x) e. Left out where no float can hold it:
    long answers of a model that has learnt little."""
    with contextlib.suppress(OverflowError):
        found = math.exp(nats)
        return {"perplexity": found, **({} if error is None else {"perplexity_stderr": found * error})}
    return {}
