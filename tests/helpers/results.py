"""Results and items files as the harness writes them, from answers made up."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmfoundry_lite.evaluation.means import mean_and_error
from llmfoundry_lite.evaluation.summaries import hash_of


def write_result(folder: Path, model: str, tasks: Mapping[str, Any], **facts: Any) -> Path:
    """`tasks`: name -> answers (0 or 1 of each item), or a whole (record, items) as `choice` and `text` give."""
    records, lines = {}, []
    for name, task in tasks.items():
        record, items = task if isinstance(task, tuple) else choice(task)
        items = [{"task": name, **item} for item in items]
        records[name] = {"items_hash": hash_of(items), **record}
        lines += [json.dumps(item) for item in items]
    whole = {"model": model, "suite": "s", "source": model, "save_id": None, "num_tokens_trained": None}
    whole |= {"num_parameters": None, "tokenizer": "sha256:1", "precision": "fp32", "average": None, "tasks": records}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{model}.items.jsonl").write_text("".join(line + "\n" for line in lines))
    path = folder / f"{model}.json"
    path.write_text(json.dumps({**whole, **facts}))
    return path


def choice(answers: Sequence[int], *, per_character: Sequence[int] | None = None, **changes: Any) -> tuple[Any, Any]:
    """A multiple-choice task, by two metrics."""
    answers = [int(answer) for answer in answers]
    scores = {"acc_per_token": answers, "acc_norm": list(map(int, answers if per_character is None else per_character))}
    items = [{"index": i, **{name: values[i] for name, values in scores.items()}} for i in range(len(answers))]
    settings = {"icl_task_type": "multiple_choice", "prompt_string": "", "limit": None}
    record = {"type": "multiple_choice", "n": len(answers), "num_fewshot": 0, "tokenization": "separate"}
    record |= {"fingerprint": "sha256:a", "data_fingerprint": "sha256:d", "settings": settings}
    record |= {"metric": "acc_per_token", "chance": 0.25, "code": "0.1.0"}
    for name in scores:
        record[name], record[f"{name}_stderr"] = mean_and_error(items, name)
    return {**record, **changes}, items


def text(documents: Sequence[Sequence[tuple[float, int]]], **changes: Any) -> tuple[Any, Any]:
    """A text: of each document its windows' (nats, bytes)."""
    items = [
        {"index": i, "log_probability": [-nats], "num_tokens": [4], "num_characters": [size]}
        for i, windows in enumerate(documents)
        for nats, size in windows
    ]
    nats, sizes = np.array([window for windows in documents for window in windows], float).sum(axis=0)
    settings = {"icl_task_type": "perplexity", "max_seq_len": 64, "limit": None}
    record = {"type": "perplexity", "n": len(items), "num_fewshot": 0, "tokenization": None, "fingerprint": "sha256:a"}
    record |= {"data_fingerprint": "sha256:d", "settings": settings, "metric": "bits_per_byte", "code": "0.1.0"}
    return {**record, "bits_per_byte": nats / sizes / np.log(2), **changes}, items
