"""Check that our answers are those of lm-evaluation-harness, item by item, on files of the public tasks.

    python -m benchmarks eval-parity --data data/eval --model runs/x/huggingface --peer-python ~/lm-eval/bin/python

Both sides make zero-shot prompts from the same rows, under `tokenization: joint`: ours by the task's YAML, the peer by
a template that says the same. Compared are the choices by summed and by per-character log-probability, the
log-probabilities themselves, and LAMBADA's accuracy and perplexity. Multiple choice is also asked by letters, with the
template of lm-eval's MMLU. lm-eval has no bits per byte of a right answer. Ours is compared with a count of the peer's
own log-probabilities and of the bytes of the text that it has scored. LAMBADA's rows, forty to a document, are also
predicted as held-out text in windows; the perplexity of these is per byte.

Differences that are not counted as such:

- Where two options are closer to each other than the two sides are, rounding decides. Such items are counted
  separately.
- An item whose answer is longer than the model's context is left out. Ours skips and counts it, the peer fails on it.
- For schemas (Winograd), the peer divides by the length of the context rather than of the answer. Its own schema tasks
  leave that metric out, and so does this benchmark.
"""

import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.eval.eval import peer_of
from llmfoundry_lite.config.eval_schema import LETTERS, TaskConfig, result_name
from llmfoundry_lite.config.load_tasks import load_tasks
from llmfoundry_lite.config.task_types import MULTIPLE_CHOICE
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.harness import evaluate
from llmfoundry_lite.evaluation.models import locate_and_load_model
from llmfoundry_lite.evaluation.result_files import ResultFiles
from llmfoundry_lite.evaluation.results import Results
from llmfoundry_lite.evaluation.task_files import read_rows
from llmfoundry_lite.tables import Table
from llmfoundry_machines.bench.frame import Column, describe_conditions, open_console, tabulate, tell

TEXT, ROWS_OF_A_TEXT = "lambada_openai", 40
"""The task whose rows become documents, and the number of rows in one: longer than a window of tokens."""
TASKS = ("arc_easy", "piqa", "copa", "winograd", "lambada_openai")
TOLERANCE_NATS, TOLERANCE_SHARE = 1e-4, 1e-6
"""Tolerance of a summed log-probability, whichever is larger. Long answers have thousands of nats, summed in fp32."""

TOLERANCE_BITS = 1e-4
"""Tolerance of the bits per byte of an answer, as a share of them. They are made of one log-probability in fp32, and of
bytes, which are counted exactly."""

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
    """Let both sides answer all tasks, print a table, and return the report. Its `is_same` says whether they agree.

    `model` is a folder that both sides can load, `data` the folder with the tasks' files, and `limit` the largest
    number of rows of each. Raises DataError when a file is missing or a side fails.
    """
    console = open_console()
    report: Record = describe_conditions() | {"model": Path(model).name, "limit": limit, "tasks": {}}
    with tempfile.TemporaryDirectory() as scratch, peer_of(peer_python, model) as ask_peer:
        for task in load_tasks(TASKS, task_folder):
            task_files = sorted(data.glob(f"{task.label}*.jsonl"))
            if not task_files:
                raise DataError(f"--parity {data}: no {task.label}*.jsonl; `python scripts/fetch_tasks.py` fetches it")
            console.print(f"{task.label}: {task_files[0]}", highlight=False)
            rows = read_rows(replace(task, dataset_uri=str(task_files[0])))[:limit]

            items = Path(scratch) / f"{task.label}.jsonl"
            task = replace(task, dataset_uri=str(items), tokenization="joint", num_fewshot=[0])
            theirs, comparison = ask_both(model, task, rows, ask_peer)
            report["peer"] = theirs["versions"]
            report["tasks"][task.label] = comparison
            if task.icl_task_type == MULTIPLE_CHOICE:
                by_letters = replace(task, form=LETTERS, letter_prefix="", continuation_delimiter="\nAnswer: ")
                _, report["tasks"][f"{task.label}, letters"] = ask_both(model, by_letters, rows, ask_peer)

            if task.label == TEXT:
                write_rows(documents_of(rows), items)
                text = TaskConfig(label="text", icl_task_type="perplexity", dataset_uri=str(items))
                theirs = ask_peer(items=str(items), kind="perplexity")
                comparison = compare(ask_ours(model, text, Path(scratch)), theirs, "perplexity")
                report["tasks"]["held-out text"] = comparison | {"num_skipped": 0}

    report["is_same"] = all(is_same(comparison) for comparison in report["tasks"].values())
    verdict = "the same answers" if report["is_same"] else "NOT the same answers"
    notes = [f"{verdict} (log-probabilities to {TOLERANCE_NATS:g} nats or {TOLERANCE_SHARE:g} of them)"]
    heading, command = "The same answers as lm-evaluation-harness", f"python -m benchmarks eval-parity --data {data}"
    tell(report, table_of(report), notes, name="eval-parity", heading=heading, command=command, out=out)
    return report


def ask_both(
    model: str, task: TaskConfig, rows: Sequence[Record], ask_peer: Callable[..., Record]
) -> tuple[Record, Record]:
    """Let both sides answer the rows of a task, which are written to its file.

    Returns the peer's answers, and the result of `compare` with the number of rows that were skipped.
    """
    # Ours answers first, because the peer may only get the items that ours has not skipped.
    items = Path(task.dataset_uri)
    write_rows(rows, items)
    ours = ask_ours(model, task, items.parent)
    write_rows([rows[index] for index in ours["index"]], items)

    kind = "letters" if task.form == LETTERS else task.icl_task_type
    theirs = ask_peer(items=str(items), kind=kind, delimiter=task.continuation_delimiter)
    return theirs, compare(ours, theirs, kind) | {"num_skipped": len(rows) - len(ours["index"])}


def write_rows(rows: Sequence[Record], path: Path) -> None:
    """Write rows as JSONL."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def documents_of(rows: Sequence[Record]) -> list[Record]:
    """Join LAMBADA's rows to documents, ROWS_OF_A_TEXT of them in each."""
    texts = [row["context"] + " " + row["continuation"] for row in rows]
    return [{"text": "\n".join(texts[i : i + ROWS_OF_A_TEXT])} for i in range(0, len(texts), ROWS_OF_A_TEXT)]


def ask_ours(model: str, task: TaskConfig, folder: Path) -> Record:
    """Evaluate one task with our harness, and return its answers in the form that the peer's have.

    `index` has the rows that were answered; the others were skipped because they are too long.
    """
    located = locate_and_load_model(model, device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    files = ResultFiles(folder, "parity", result_name(task.label, 0, task.form).replace("/", "-"))
    results = evaluate(located.model, located.tokenizer, [task], Results(model="", suite="", source=""), files)
    items = [json.loads(line) for line in files.items_path.read_text().splitlines()]
    has_lengths = task.icl_task_type == MULTIPLE_CHOICE and task.form != LETTERS
    metrics = ("acc", "acc_norm", "bpb") if has_lengths else ("acc", "bpb")
    (record,) = results.tasks.values()

    if task.icl_task_type == "perplexity":
        # An item is one window. The peer reports whole documents, so add their windows up.
        nats_of_documents = {item["index"]: 0.0 for item in items}
        for item in items:
            nats_of_documents[item["index"]] += item["log_probability"][0]
        return {
            "log_probability": [[nats] for nats in nats_of_documents.values()],
            "perplexity": 2 ** record["bits_per_byte"],
        }
    return {
        **{metric: [item[metric] for item in items] for metric in metrics},
        "log_probability": [item["log_probability"] for item in items],
        "num_characters": [item["num_characters"] for item in items],
        "index": [item["index"] for item in items],
        "perplexity": record.get("perplexity"),
    }


def compare(ours: Record, theirs: Record, kind: str) -> Record:
    """Compare the answers of both sides to the items of one task.

    Returns the largest difference of a log-probability and whether all are within the tolerance; for each metric, both
    accuracies, how many items differ, and how many of these by rounding; both bits per byte of the right answer, and
    their largest difference in an item; and both perplexities, where the task has them.
    """
    pairs = [
        list(zip(our_item, their_item, strict=True))
        for our_item, their_item in zip(ours["log_probability"], theirs["log_probability"], strict=True)
    ]
    distances = [max(abs(a - b) for a, b in item_pairs) for item_pairs in pairs]
    comparison: Record = {
        "n": len(distances),
        "largest_difference_nats": max(distances),
        "are_close": all(
            math.isclose(*pair, rel_tol=TOLERANCE_SHARE, abs_tol=TOLERANCE_NATS)
            for item_pairs in pairs
            for pair in item_pairs
        ),
    }

    for metric in ("acc", "acc_norm"):
        if metric not in ours or metric not in theirs:
            continue
        decisions = list(zip(ours[metric], theirs[metric], strict=True))

        # Rounding decides a choice between options. LAMBADA's accuracy has no second option.
        differing = [index for index, (a, b) in enumerate(decisions) if a != b]
        num_ties = (
            sum(_is_tie(ours, index, metric, 2 * distances[index]) for index in differing)
            if kind != "language_modeling"
            else 0
        )
        comparison[metric] = sum(a for a, _ in decisions) / len(decisions)
        comparison[f"peer_{metric}"] = sum(b for _, b in decisions) / len(decisions)
        comparison[f"{metric}_differ"] = len(differing)
        comparison[f"{metric}_differ_by_rounding"] = num_ties
    if "bpb" in ours and theirs.get("bpb") is not None:
        bits = list(zip(ours["bpb"], theirs["bpb"], strict=True))
        comparison["bpb"] = sum(a for a, _ in bits) / len(bits)
        comparison["peer_bpb"] = sum(b for _, b in bits) / len(bits)
        comparison["largest_difference_bpb"] = max(abs(a - b) for a, b in bits)
        comparison["are_bits_close"] = all(math.isclose(*pair, rel_tol=TOLERANCE_BITS) for pair in bits)
    if kind in ("language_modeling", "perplexity"):
        comparison |= {"perplexity": ours["perplexity"], "peer_perplexity": theirs["perplexity"]}
    return comparison


def _is_tie(ours: Record, item: int, metric: str, closer_than: float) -> bool:
    """Return whether our two best options of an item are so close that a difference of this size could swap them."""
    log_probabilities, num_characters = ours["log_probability"][item], ours["num_characters"][item]
    scores = [
        log_probability / length if metric == "acc_norm" else log_probability
        for log_probability, length in zip(log_probabilities, num_characters, strict=True)
    ]
    first, second = sorted(scores)[-1:-3:-1]
    return first - second <= closer_than


def is_same(comparison: Record) -> bool:
    """Return whether a comparison found no difference except ties: decisions, log-probabilities, bits, perplexity."""
    metrics = [metric for metric in ("acc", "acc_norm") if metric in comparison]
    same_perplexity = "perplexity" not in comparison or math.isclose(
        comparison["perplexity"], comparison["peer_perplexity"], rel_tol=TOLERANCE_NATS
    )
    same_decisions = all(
        comparison[f"{metric}_differ"] == comparison[f"{metric}_differ_by_rounding"] for metric in metrics
    )
    same_bits = comparison.get("are_bits_close", True)
    return same_decisions and comparison["are_close"] and same_perplexity and same_bits


COLUMNS: list[Column] = [
    ("task", "{name}"),
    ("items", lambda row: f"{row['n']:,}" + (f" ({row['num_skipped']} too long)" if row["num_skipped"] else "")),
    *(("acc", "{acc:.4f}"), ("lm-eval", "{peer_acc:.4f}"), ("differ", lambda row: _differ(row, "acc"))),
    *(
        ("acc_norm", "{acc_norm:.4f}"),
        ("lm-eval", "{peer_acc_norm:.4f}"),
        ("differ", lambda row: _differ(row, "acc_norm")),
    ),
    *(
        ("bpb", "{bpb:.5f}"),
        ("of lm-eval's nats", "{peer_bpb:.5f}"),
        ("largest difference, bpb", "{largest_difference_bpb:.1e}"),
    ),
    *(("perplexity", "{perplexity:.6g}"), ("lm-eval", "{peer_perplexity:.6g}")),
    ("largest difference, nats", "{largest_difference_nats:.1e}"),
]


def _differ(row: Mapping[str, Any], metric: str) -> str:
    """Format the number of different decisions of a metric, as "3, 2 by rounding"."""
    differ, ties = row.get(f"{metric}_differ", ""), row.get(f"{metric}_differ_by_rounding")
    return f"{differ}, {ties} by rounding" if ties else str(differ)


def table_of(report: Record) -> Table:
    """Return a table with one row for each task."""
    rows = [{"name": name, **comparison} for name, comparison in report["tasks"].items()]
    peer = ", ".join(f"{name} {version}" for name, version in report["peer"].items())
    return tabulate(f"{report['model']}, fp32, joint tokenization, zero-shot, beside {peer}", COLUMNS, rows)
