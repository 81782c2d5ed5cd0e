"""(prepared model, tokenizer, tasks) -> Results, on one rank or several.

Owns the metrics and the files: `<suite>/<model>.json` and `.items.jsonl`, written after every task, so that an
evaluation that was killed does not do a finished task again, and no finished task is lost to another evaluation.
"""

import contextlib
import fcntl
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from llmfoundry_lite.checkpoint.exchange import agree, gather_json, rank_and_size, tell_all
from llmfoundry_lite.config.schema import TaskConfig
from llmfoundry_lite.errors import DataError, UserError
from llmfoundry_lite.evaluation.generation import answer_all, is_right
from llmfoundry_lite.evaluation.perplexity import prepare_text
from llmfoundry_lite.evaluation.reading import bits_per_byte_error, cut_at, read_facts
from llmfoundry_lite.evaluation.scoring import Scorable, Score, score
from llmfoundry_lite.evaluation.tasks import (
    GENERATION,
    Encoder,
    Item,
    Prepared,
    fingerprint,
    prepare,
    read_rows,
    settings_of,
)
from llmfoundry_lite.files import write_atomically

Record = dict[str, Any]

METRICS = {
    "multiple_choice": ("acc_per_token", "acc", "acc_norm"),
    "schema": ("acc_per_token", "acc", "acc_norm"),
    "language_modeling": ("acc",),
    "generation_task_with_answers": ("acc",),
    "perplexity": (),
}
MAIN_METRIC = {"multiple_choice": "acc_per_token", "schema": "acc_per_token"}
"""What goes into tables and the average, as in LLM Foundry; `acc` for the others."""

Progress = Callable[[str, int, int], None]
"""(task, items done, items)"""


@dataclass(kw_only=True)
class Results:
    """What one model did on a suite; `tasks` are those asked for, in that order, then those of earlier launches."""

    model: str
    suite: str
    source: str
    save_id: str | None = None
    num_tokens_trained: int | None = None
    num_parameters: int | None = None
    tokenizer: str = ""
    precision: str = "fp32"
    tasks: dict[str, Record] = field(default_factory=dict)

    @property
    def average(self) -> float | None:
        """The mean of the tasks' accuracies, each counting the same."""
        values = [task[task["metric"]] for task in self.tasks.values() if task["metric"].startswith("acc")]
        return sum(values) / len(values) if values else None

    def as_json(self) -> Record:
        return {
            "model": self.model,
            "suite": self.suite,
            "source": self.source,
            "save_id": self.save_id,
            "num_tokens_trained": self.num_tokens_trained,
            "num_parameters": self.num_parameters,
            "tokenizer": self.tokenizer,
            "precision": self.precision,
            "average": self.average,
            "tasks": self.tasks,
        }


def evaluate(
    model: Scorable,
    tokenizer: Encoder,
    tasks: Sequence[TaskConfig],
    results: Results,
    files: "ResultFiles | None" = None,
    *,
    tokenization: str = "separate",
    max_batch_tokens: int = 2048,
    max_seq_len: int | None = None,
    limit: int | None = None,
    on_progress: Progress = lambda task, done, total: None,
    share: tuple[int, int] | None = None,
) -> Results:
    """Ask all `tasks`, or those that `files` does not have yet. With several ranks all must call this; all get the
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
        if files is not None:
            files.refuse_to_replace(results, [outline(task) for task in prepared])
    except UserError as caught:
        error = caught
    error = error or _find_unknown_token(model, prepared)
    agree(error)  # of a file that one machine alone lacks, the others hear now, not when they wait for it
    for task in prepared:
        # Rank 0's word, because it alone may see the files.
        if files is not None and (known := tell_all(files.find(task, results))) is not None:
            results.tasks[task.name] = known
            continue
        record, items = run_task(model, tokenizer, task, max_batch_tokens, on_progress, share or rank_and_size(None))
        results.tasks[task.name] = record
        if files is not None:
            try:
                files.add(results, task.name, items)
            except UserError as caught:
                error = caught
            agree(error)  # rank 0 alone writes, and the others would wait for it at the next task
    if files is not None:
        results.tasks |= {
            name: record for name, record in tell_all(files.kept(results)).items() if name not in results.tasks
        }
    return results


class Outline(NamedTuple):
    """What a task asks, as far as it is known."""

    name: str
    settings: Record
    data_fingerprint: str | None
    prepared: Prepared | None = None


def outline_tasks(tasks: Sequence[TaskConfig], tokenization: str, limit: int | None) -> list[Outline]:
    """What can be told without a tokenizer, so that a launch that would be refused is refused before a model is loaded.

    Raises DataError for a file that cannot be read or lacks a column."""
    found = []
    for config in tasks:
        if config.icl_task_type == "perplexity":
            found.append(Outline(f"{config.label}/0-shot", {"icl_task_type": "perplexity", "limit": limit}, None))
            continue
        data = fingerprint(read_rows(config))
        for shots in config.num_fewshot:
            settings = settings_of(config, shots, tokenization, limit)
            found.append(Outline(f"{config.label}/{shots}-shot", settings, data))
    return found


def outline(task: Prepared) -> Outline:
    return Outline(task.name, task.settings, task.data_fingerprint, task)


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
) -> tuple[Record, list[Record]]:
    """(the task's line in Results, one record for each item)"""
    started = time.monotonic()
    on_progress(task.name, 0, len(task.items))
    if task.kind in GENERATION:
        texts = answer_all(model, tokenizer, task, max_batch_tokens, *share, on_progress)
        items = [_generation_record(task, item, text) for item, text in zip(task.items, texts, strict=True)]
    else:
        scores = _score_all(model, task, max_batch_tokens, *share, on_progress)
        items = [_record(task, item, scores) for item in _numbered(task.items)]
    return summarise(task, items, time.monotonic() - started), items


def _score_all(
    model: Scorable, task: Prepared, max_batch_tokens: int, rank: int, world_size: int, on_progress: Progress
) -> dict[int, Score]:
    found: dict[int, Score] = {}
    num_requests = sum(len(item.requests) for item in task.items)
    for scores in score(model, [item.requests for item in task.items], max_batch_tokens, rank, world_size):
        found.update(scores)
        done = min(num_requests, len(found) * world_size)
        on_progress(task.name, len(task.items) * done // num_requests, len(task.items))
    bad = sum(not math.isfinite(value.log_probability) for value in found.values())
    agree(
        DataError(
            f"{task.name}: the model gives NaN or infinity for {bad:,} of {len(found):,} answers; nothing is kept"
        )
        if bad
        else None
    )
    shares = gather_json([[number, *value] for number, value in found.items()])
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
    if item.category is not None:
        record["category"] = item.category
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


def _generation_record(task: Prepared, item: Item, text: str) -> Record:
    record: Record = {"task": task.name, "index": item.index, "text": text, "answers": list(item.answers)}
    record["num_trimmed"] = item.requests[0].num_trimmed
    if item.category is not None:
        record["category"] = item.category
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
        "metric": task.config.metric or MAIN_METRIC.get(task.kind, "acc"),
    }
    for name in METRICS[task.kind]:
        record[name], record[f"{name}_stderr"] = mean_and_error([item[name] for item in items])
    if task.kind in MAIN_METRIC:
        record["chance"] = sum(1 / len(item["num_tokens"]) for item in items) / len(items)
        record["num_ties"] = sum(item["tie"][record["metric"]] for item in items)
        record["num_duplicates"] = sum(item["has_duplicates"] for item in items)
    if task.kind == "language_modeling":
        record |= _perplexity(-sum(item["log_probability"][0] for item in items) / len(items))
    if task.kind == "perplexity":
        nats = -sum(item["log_probability"][0] for item in items)
        record |= _perplexity(nats / sum(item["num_tokens"][0] for item in items))
        record["bits_per_byte"] = nats / math.log(2) / sum(item["num_characters"][0] for item in items)
        if (error := bits_per_byte_error(items)) is not None:
            record["bits_per_byte_stderr"] = error
        record["metric"] = "bits_per_byte"
    categories = sorted({item["category"] for item in items if "category" in item})
    if categories:
        metric = record["metric"]
        record["categories"] = {
            name: mean_and_error([item[metric] for item in items if item.get("category") == name])[0]
            for name in categories
        }
    trimmed = sum(1 for item in items if item.get("num_trimmed"))
    odd = {"num_trimmed": trimmed, "skipped": task.skipped, "beginning": task.beginning}
    return {**record, **{key: value for key, value in odd.items() if value}, "seconds": round(seconds, 3)}


def _perplexity(nats: float) -> Record:
    """Left out where no float can hold it: long answers of a model that has learnt little."""
    with contextlib.suppress(OverflowError):
        return {"perplexity": math.exp(nats)}
    return {}


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error, sd / sqrt(n) with n - 1 in the variance; 0 for a single value."""
    n = len(values)
    mean = sum(values) / n
    variance = sum((value - mean) ** 2 for value in values) / (n - 1) if n > 1 else 0.0
    return mean, math.sqrt(variance / n)


# ------------------------------------------------------------------------------------------------------------ files


class ResultFiles:
    """`<folder>/<suite>/<model>.json` and `.items.jsonl`; rank 0's.

    Finished tasks that are not asked for now stay, those that are asked for in the same way are not done again, and
    those that would be replaced are refused, but with `redo`.
    """

    def __init__(self, folder: Path, suite: str, model: str, *, redo: bool = False):
        """Raises DataError where nothing can be written, or for a file that is there and no result."""
        self.path = folder / suite / f"{model}.json"
        self.items_path = folder / suite / f"{model}.items.jsonl"
        self.redo = redo
        self.is_main = rank_and_size(None)[0] == 0
        self.known: Record = {}
        self.num_lines: Counter[str] = Counter()
        if not self.is_main:
            return
        there = next(place for place in self.path.absolute().parents if place.exists())
        if not (there.is_dir() and os.access(there, os.W_OK)):  # known now, not after the first task
            raise DataError(f"results_folder: {there} is no folder that can be written to")
        self.known = self._read_known()
        self.num_lines = Counter(task for task, _ in self._read_lines())

    def _read_known(self) -> Record:
        if not self.path.exists():
            return {}
        try:
            return read_facts(self.path)
        except DataError as error:
            if self.redo:
                return {}
            raise DataError(f"{error}; it would be replaced: move it away, or say redo=true") from None

    def _read_lines(self) -> Iterator[tuple[str, str]]:
        """(task, line) of the items that are here and of a result."""
        if not self.known or not self.items_path.exists():
            return
        with self.items_path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                # A torn line belongs to a task that is done again.
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    yield json.loads(line)["task"], line.rstrip("\n")

    def refuse_to_replace(self, results: Results, asked: Sequence[Outline]) -> None:
        """Raises DataError, naming what is there and what is asked, where a finished task would be lost."""
        if not self.known or self.redo:
            return
        remedy = "name it otherwise, models.NAME=…, choose another results_folder, or replace {}: redo=true"
        finished = self._finished()
        if finished and (other := self._other_model(results)):
            count = len(finished)
            tasks = f"{count} finished task{'' if count == 1 else 's'}"
            raise DataError(f"{self.path} holds {tasks} of {other}; {remedy.format('them' if count > 1 else 'it')}")
        for task in asked:
            record = self.known["tasks"].get(task.name)
            if task.name in finished and self._is_whole(task.name) and (differs := _differences(record, task)):
                raise DataError(
                    f"{self.path} holds {task.name} with {'; '.join(differs)} asked for now; {remedy.format('it')}"
                )

    def _finished(self) -> set[str]:
        """Tasks that must not be lost. One with a `limit` is a try: whoever asks again would not have it kept."""
        tasks = self.known.get("tasks", {}).items()
        return {name for name, record in tasks if cut_at(record) is None}

    def _other_model(self, results: Results) -> str:
        """What the file is of, beside what is evaluated now, if that is another model."""
        keys = ("save_id", "tokenizer", "precision") if results.save_id else ("source", "tokenizer", "precision")
        for key in keys:
            if self.known.get(key) != getattr(results, key):
                of, now = self.known.get("source"), results.source
                if key == "source" or (key == "save_id" and of != now):
                    return f"{of}, and {now} is to be evaluated"
                told = f"{key.replace('save_id', 'save')} {self.known.get(key)}, not {getattr(results, key)}"
                return f"{of} with {told} as now"
        return ""

    def _is_whole(self, name: str) -> bool:
        return self.num_lines[name] == self.known["tasks"][name]["n"]

    def find(self, task: Prepared, results: Results) -> Record | None:
        """The finished result of this very task on this very model, if it is here."""
        record: Record | None = None if self.redo else self.kept(results).get(task.name)
        if record is None or not self._is_whole(task.name) or _differences(record, outline(task)):
            return None
        return record

    def kept(self, results: Results) -> dict[str, Record]:
        """What is here of the same model, asked for now or not."""
        return {} if not self.known or self._other_model(results) else self.known["tasks"]

    def add(self, results: Results, name: str, items: Sequence[Record]) -> None:
        """Raises DataError where it cannot be written, or another launch has meanwhile finished what would be lost."""
        if not self.is_main:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _alone_in(self.path.parent):
                self.known = self._read_known()  # other launches may have finished other tasks meanwhile
                self._write(results, name, items)
        except OSError as error:
            raise DataError(f"results_folder: {self.path} cannot be written: {error.strerror or error}") from error

    def _write(self, results: Results, name: str, items: Sequence[Record]) -> None:
        if not self.redo and self._finished() and (other := self._other_model(results)):
            raise DataError(f"{self.path} was written by another launch meanwhile, and is of {other}")
        tasks = {**results.tasks, **{k: v for k, v in self.kept(results).items() if k not in results.tasks}}
        lines: dict[str, list[str]] = {task: [] for task in tasks}
        for task, line in self._read_lines():
            lines.get(task, []).append(line)
        if not self.redo and name in self._finished():
            there = self.known["tasks"][name]
            if len(lines[name]) == there["n"] and there["fingerprint"] != results.tasks[name]["fingerprint"]:
                raise DataError(f"{self.path}: another launch finished {name} meanwhile, with other settings or data")
        lines[name] = [json.dumps(item) for item in items]
        # Items first: a task counts as finished when the JSON has it.
        write_atomically(self.items_path, "".join(line + "\n" for task in lines.values() for line in task))
        write_atomically(self.path, json.dumps(replace(results, tasks=tasks).as_json(), indent=1) + "\n")


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """One launch at a time, where the file system can lock."""
    place = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(place, fcntl.LOCK_EX)
        yield
    finally:
        os.close(place)


def _differences(record: Record, task: Outline) -> list[str]:
    """What of a finished task is not as `task` asks it; nothing for the same."""
    there = record.get("settings") or {}
    exact = task.prepared
    if exact and record["fingerprint"] == exact.fingerprint:
        same_start = record.get("beginning", []) == exact.beginning
        return [] if same_start else [f"texts that begin with {record.get('beginning', [])}, not {exact.beginning} as"]
    keys = [key for key in {**there, **task.settings} if exact or key != "max_seq_len"]  # unknown before tokenising
    found = [
        f"{key} {there.get(key)!r}, not {task.settings.get(key)!r} as"
        for key in keys
        if there.get(key) != task.settings.get(key)
    ]
    if task.data_fingerprint not in (None, record.get("data_fingerprint")):
        found.append("other data than")
    return found or (["another fingerprint than"] if exact else [])
