"""The answers of lm-evaluation-harness, item by item, on the public tasks' own files under `tokenization: joint`.

python -m benchmarks eval-parity --data data/eval --model runs/x/huggingface --peer-python ~/lm-eval/bin/python

Each side makes its prompts from the same rows, zero-shot: ours by the task's YAML, the peer by a template of its own
that says the same. Compared are the choice by summed and by per-character log-probability, the log-probabilities
themselves, and LAMBADA's accuracy and perplexity. Its rows, forty to a document, are also predicted as held-out text in
windows; of these the perplexity is per byte. Where two options are closer to each other than the two sides are,
rounding decides; such items are counted apart. An item whose answer is longer than the model is left out: ours skips
and counts it, the peer ends there. Of schemas (Winograd) the peer divides by the length of the context rather than of
the answer, and its own schema tasks leave that number out; so does this.
"""

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.eval.eval import peer_of
from llmfoundry_lite.config.eval_schema import TaskConfig
from llmfoundry_lite.config.load_eval import load_tasks
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.harness import evaluate
from llmfoundry_lite.evaluation.models import locate_and_load_model
from llmfoundry_lite.evaluation.result_files import ResultFiles
from llmfoundry_lite.evaluation.results import Results
from llmfoundry_lite.evaluation.task_files import read_rows
from llmfoundry_lite.tables import Table
from llmfoundry_machines.bench.frame import Column, describe_conditions, open_console, tabulate, tell

TEXT, ROWS_OF_A_TEXT = "lambada_openai", 40
"""The task whose rows become documents, and how many become one: more than a window of tokens."""
TASKS = ("arc_easy", "piqa", "copa", "winograd", "lambada_openai")
TOLERANCE_NATS, TOLERANCE_SHARE = 1e-4, 1e-6
"""Tolerance of a summed log-probability, whichever is more: a long answer's is thousands of nats in fp32."""

Record = dict[str, Any]


def run(
    *,
    peer_python: str,
    model: str,
    data: Path,
    limit: int | None = None,
    out: Path | None = None,
    task_folder: str = "evals",
) -> Record:
    """Ask both sides, print a table, return it. Raises DataError when a file is missing or a side fails."""
    console = open_console()
    report: Record = describe_conditions() | {"model": Path(model).name, "limit": limit, "tasks": {}}
    with tempfile.TemporaryDirectory() as scratch, peer_of(peer_python, model) as ask_peer:
        for task in load_tasks(TASKS, task_folder):
            found = sorted(data.glob(f"{task.label}*.jsonl"))
            if not found:
                raise DataError(f"--parity {data}: no {task.label}*.jsonl; `python scripts/fetch_tasks.py` fetches it")
            console.print(f"{task.label}: {found[0]}", highlight=False)
            rows = read_rows(replace(task, dataset_uri=str(found[0])))[:limit]
            items = Path(scratch) / f"{task.label}.jsonl"
            write_rows(rows, items)
            task = replace(task, dataset_uri=str(items), tokenization="joint", num_fewshot=[0])
            ours = ask_ours(model, task, Path(scratch))
            write_rows([rows[index] for index in ours["index"]], items)
            theirs = ask_peer(items=str(items), kind=task.icl_task_type, delimiter=task.continuation_delimiter)
            report["peer"] = theirs["versions"]
            report["tasks"][task.label] = compare(ours, theirs, task.icl_task_type) | {
                "num_skipped": len(rows) - len(ours["index"])
            }
            if task.label == TEXT:
                write_rows(documents_of(rows), items)
                text = TaskConfig(label="text", icl_task_type="perplexity", dataset_uri=str(items))
                theirs = ask_peer(items=str(items), kind="perplexity")
                found = compare(ask_ours(model, text, Path(scratch)), theirs, "perplexity")
                report["tasks"]["held-out text"] = found | {"num_skipped": 0}
    report["is_same"] = all(is_same(found) for found in report["tasks"].values())
    verdict = "the same answers" if report["is_same"] else "NOT the same answers"
    notes = [f"{verdict} (log-probabilities to {TOLERANCE_NATS:g} nats or {TOLERANCE_SHARE:g} of them)"]
    heading, command = "The same answers as lm-evaluation-harness", f"python -m benchmarks eval-parity --data {data}"
    tell(report, table_of(report), notes, name="eval-parity", heading=heading, command=command, out=out)
    return report


def write_rows(rows: Sequence[Record], path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def documents_of(rows: Sequence[Record]) -> list[Record]:
    texts = [row["context"] + " " + row["continuation"] for row in rows]
    return [{"text": "\n".join(texts[i : i + ROWS_OF_A_TEXT])} for i in range(0, len(texts), ROWS_OF_A_TEXT)]


def ask_ours(model: str, task: TaskConfig, folder: Path) -> Record:
    located = locate_and_load_model(model, device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    files = ResultFiles(folder, "parity", task.label)
    results = evaluate(located.model, located.tokenizer, [task], Results(model="", suite="", source=""), files)
    items = [json.loads(line) for line in files.items_path.read_text().splitlines()]
    names = ("acc", "acc_norm") if task.icl_task_type == "multiple_choice" else ("acc",)
    (record,) = results.tasks.values()
    if task.icl_task_type == "perplexity":  # a document's windows are added up
        nats = {item["index"]: 0.0 for item in items}
        for item in items:
            nats[item["index"]] += item["log_probability"][0]
        return {"log_probability": [[value] for value in nats.values()], "perplexity": 2 ** record["bits_per_byte"]}
    return {
        **{name: [item[name] for item in items] for name in names},
        "log_probability": [item["log_probability"] for item in items],
        "num_characters": [item["num_characters"] for item in items],
        "index": [item["index"] for item in items],
        "perplexity": record.get("perplexity"),
    }


def compare(ours: Record, theirs: Record, kind: str) -> Record:
    pairs = [
        list(zip(x, y, strict=True)) for x, y in zip(ours["log_probability"], theirs["log_probability"], strict=True)
    ]
    distances = [max(abs(a - b) for a, b in item) for item in pairs]
    found: Record = {
        "n": len(distances),
        "largest_difference_nats": max(distances),
        "are_close": all(
            math.isclose(*pair, rel_tol=TOLERANCE_SHARE, abs_tol=TOLERANCE_NATS) for item in pairs for pair in item
        ),
    }
    for metric in ("acc", "acc_norm"):
        if metric not in ours or metric not in theirs:
            continue
        answers = list(zip(ours[metric], theirs[metric], strict=True))
        differ = [i for i, (a, b) in enumerate(answers) if a != b]
        ties = sum(_is_tie(ours, i, metric, 2 * distances[i]) for i in differ) if kind != "language_modeling" else 0
        found[metric] = sum(a for a, _ in answers) / len(answers)
        found[f"peer_{metric}"] = sum(b for _, b in answers) / len(answers)
        found[f"{metric}_differ"] = len(differ)
        found[f"{metric}_differ_by_rounding"] = ties
    if kind in ("language_modeling", "perplexity"):
        found |= {"perplexity": ours["perplexity"], "peer_perplexity": theirs["perplexity"]}
    return found


def _is_tie(ours: Record, item: int, metric: str, closer_than: float) -> bool:
    sums, sizes = ours["log_probability"][item], ours["num_characters"][item]
    rated = [s / n if metric == "acc_norm" else s for s, n in zip(sums, sizes, strict=True)]
    first, second = sorted(rated)[-1:-3:-1]
    return first - second <= closer_than


def is_same(found: Record) -> bool:
    metrics = [metric for metric in ("acc", "acc_norm") if metric in found]
    same_perplexity = "perplexity" not in found or math.isclose(
        found["perplexity"], found["peer_perplexity"], rel_tol=TOLERANCE_NATS
    )
    same_decisions = all(found[f"{metric}_differ"] == found[f"{metric}_differ_by_rounding"] for metric in metrics)
    return same_decisions and found["are_close"] and same_perplexity


COLUMNS: list[Column] = [
    ("task", "{name}"),
    ("items", lambda row: f"{row['n']:,}" + (f" ({row['num_skipped']} too long)" if row["num_skipped"] else "")),
    *(("acc", "{acc:.4f}"), ("lm-eval", "{peer_acc:.4f}"), ("differ", lambda row: _differ(row, "acc"))),
    *(
        ("acc_norm", "{acc_norm:.4f}"),
        ("lm-eval", "{peer_acc_norm:.4f}"),
        ("differ", lambda row: _differ(row, "acc_norm")),
    ),
    *(("perplexity", "{perplexity:.6g}"), ("lm-eval", "{peer_perplexity:.6g}")),
    ("largest difference, nats", "{largest_difference_nats:.1e}"),
]


def _differ(row: Mapping[str, Any], metric: str) -> str:
    differ, ties = row.get(f"{metric}_differ", ""), row.get(f"{metric}_differ_by_rounding")
    return f"{differ}, {ties} by rounding" if ties else str(differ)


def table_of(report: Record) -> Table:
    rows = [{"name": name, **found} for name, found in report["tasks"].items()]
    peer = ", ".join(f"{name} {version}" for name, version in report["peer"].items())
    return tabulate(f"{report['model']}, fp32, joint tokenization, zero-shot, beside {peer}", COLUMNS, rows)
