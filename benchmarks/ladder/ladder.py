"""Converged models of several sizes: a scaling law, the next size predicted before it is trained, and comparisons.

    python -m benchmarks ladder --keep FOLDER --out docs/measurements        hours on one core
    python -m benchmarks ladder --keep FOLDER --sizes 80x3,128x4,208x5,320x8   0.3 to 10 M parameters

Each size is trained on 20 tokens a parameter, moved between unlike places (see `plan`). The learning rate is tuned at
the smallest size. Every size with three smaller ones is predicted by the law of those, before its training ends. What
was predicted is kept in FOLDER, with all runs: called again, the benchmark goes on where it stopped.
"""

import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from tokenizers import Tokenizer

from benchmarks import last_lines, with_root
from benchmarks.ladder import law
from benchmarks.ladder.data import DOMAIN, NUM_PIECES, SEQ_LEN, VOCAB_SIZE, collect
from benchmarks.ladder.figure import plot_ladder
from benchmarks.ladder.plan import BATCH, LEGS, PLACES, TOKENS_PER_PARAMETER, Shape, legs_of, parse_shapes, train
from benchmarks.recover import Log
from llmfoundry_lite.bench.frame import describe_conditions, format_command, open_console, tabulate, tell
from llmfoundry_lite.errors import UserError
from llmfoundry_lite.evaluation.compare import Paired, compare, p_text
from llmfoundry_lite.evaluation.records import by_document
from llmfoundry_lite.evaluation.results import Results, load_results
from llmfoundry_lite.evaluation.sequential import Rule
from llmfoundry_lite.prepare.prepare import prepare
from llmfoundry_lite.prepare.request import Request
from llmfoundry_lite.report.figure import thin
from llmfoundry_lite.report.tables import Table

Note = Callable[[str], None]
MAX_POINTS = 400
SIZES = ("32x2", "48x2", "64x3", "96x3", "128x3")
SEEDS = (17, 18, 19)
"""Of the smallest size, to see how far runs lie apart that differ by nothing else."""
TEXT = {"split": "held-out split", "domain": "held-out domain"}
TASKS = ("split_next_line", "split_identifier_recall", "domain_next_line", "domain_identifier_recall")


def run(
    *,
    sizes: Sequence[str] = SIZES,
    rates: Sequence[float] = (0.02, 0.04, 0.08),
    jobs: int = 1,
    keep: Path = Path("runs/ladder"),
    out: Path | None = None,
) -> dict[str, Any]:
    """Train, predict, evaluate, print; with `out`, write ladder.json, .md and .png there. Returns what the JSON holds.

    `sizes` are WIDTHxLAYERS. `jobs` runs train at a time. Raises UserError.
    """
    shapes, console, conditions = parse_shapes(sizes), open_console(), describe_conditions()
    keep = keep.resolve()
    note = partial(console.print, markup=False)
    num_bytes = gather(keep)
    with ThreadPoolExecutor(jobs) as pool:
        tuned = dict(zip(rates, pool.map(lambda lr: tune(keep, shapes[0], lr, note), rates), strict=True))
        lr = min(tuned, key=lambda rate: tuned[rate])
        seeds = list(pool.map(lambda seed: train_seed(keep, shapes[0], lr, seed, note), SEEDS[1:]))
        trained = [pool.submit(train_size, keep, shape, lr, note) for shape in shapes]
        try:
            for i, (shape, ended) in enumerate(zip(shapes, trained, strict=True)):
                if i >= 3:
                    announce(keep, shapes[:i], shape, seeds, note)
                ended.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    report = conditions | {
        "sizes": list(sizes),
        "rates": {f"{rate:g}": loss for rate, loss in tuned.items()},
        "rate": lr,
        "bytes": num_bytes,
        "tokens": json.loads((keep / "data" / "summary.json").read_text())["splits"]["train"]["tokens"],
        "bits_of_seeds": [bits_of(keep, str(shapes[0]), "split"), *seeds],
        "runs": [describe_run(keep, shape) for shape in shapes],
        "text": measure_text(keep, shapes),
        "tasks": tabulate_tasks(keep, shapes),
        "pairs": pair_neighbours(keep, shapes),
    }
    found = report["runs"][-1]
    report["passed"] = found["predicted"]["low"] <= found["bits"] <= found["predicted"]["high"]
    command = format_command("python -m benchmarks ladder", sizes=sizes)
    parts = (words_of(report), table_of_runs(report), table_of_law(report), notes_of(report), *tables(report))
    tell(
        report,
        *parts,
        name="ladder",
        heading="Converged models of several sizes",
        command=command,
        asked=("sizes",),
        plot=plot_ladder,
        out=out,
    )
    return report


# ------------------------------------------------------------------------------------------------------ what is run


def gather(keep: Path) -> dict[str, int]:
    """Collect and prepare the text, unless it is there. Returns the bytes of each part."""
    counts = keep / "bytes.json"
    if not counts.exists():
        counts.parent.mkdir(parents=True, exist_ok=True)
        sizes = collect(keep / "text")
        counts.write_text(json.dumps(sizes))
    if not (keep / "data" / "summary.json").exists():
        source = str(keep / "text" / "train.jsonl")
        prepare(
            Request(sources=(source,), tokenizer=f"train:{VOCAB_SIZE}", max_seq_len=SEQ_LEN),
            keep / "data",
            show_progress=True,
        )
    return json.loads(counts.read_text())


def tune(keep: Path, shape: Shape, lr: float, note: Note) -> float:
    """Train the smallest size at this rate, in one place, and return its last validation loss."""
    folder = keep / f"tune-{lr:g}"
    train(folder, keep / "data", shape, lr, "tune", note, moves=False)
    return Log(folder / "runs" / "tune" / "metrics.jsonl").last_of_each_batch()[shape.num_batches]["eval/loss"]


def train_seed(keep: Path, shape: Shape, lr: float, seed: int, note: Note) -> float:
    """Train the smallest size with another seed, in one place, and return its bits per byte of the held-out split."""
    name = f"seed-{seed}"
    train(keep / name, keep / "data", shape, lr, name, note, moves=False, seed=seed)
    evaluate(keep, name, ("split_text",))
    return bits_of(keep, name, "split")


def train_size(keep: Path, shape: Shape, lr: float, note: Note) -> None:
    """Train a size with its moves, and evaluate it."""
    train(keep / str(shape), keep / "data", shape, lr, str(shape), note, moves=True)
    evaluate(keep, str(shape), (*(f"{part}_text" for part in TEXT), *TASKS))


def evaluate(keep: Path, name: str, tasks: Sequence[str]) -> None:
    """Ask a run the tasks, unless it was asked. Raises UserError with the end of the output when it fails."""
    asked = [
        {"label": task, "dataset_uri": f"text/{task}.jsonl", "icl_task_type": "perplexity"}
        if task.endswith("text")
        else {
            "label": task,
            "dataset_uri": f"text/{task}.jsonl",
            "icl_task_type": "multiple_choice",
            "metric": "acc",
            "num_fewshot": [0],
            "continuation_delimiter": "\n" if "line" in task else " ",
            "tokenization": "joint",
        }
        for task in tasks
    ]
    config = {
        "suite": "ladder",
        "models": {name: f"{name}/runs/{name}"},
        "icl_tasks": asked,
        "results_folder": "results",
    }
    (keep / f"{name}.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "llmfoundry_lite", "eval", f"{name}.yaml"]
    environment = with_root(OMP_NUM_THREADS="1", WANDB_MODE="disabled")
    if not (keep / "results" / "ladder" / f"{name}.json").exists():
        done = subprocess.run(command, cwd=keep, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UserError(
                f"{' '.join(command)}: exit code {done.returncode}\n{last_lines(done.stdout + done.stderr)}"
            )


def results_of(keep: Path, *names: str) -> list[Results]:
    return load_results([keep / "results" / "ladder" / f"{name}.json" for name in names])


def bits_of(keep: Path, name: str, part: str) -> float:
    return results_of(keep, name)[0].tasks[f"{part}_text"]["bits_per_byte"]


def announce(keep: Path, smaller: Sequence[Shape], shape: Shape, bits_of_seeds: Sequence[float], note: Note) -> None:
    """Print what the smaller sizes predict, and keep it, unless that was done before."""
    path = keep / f"{shape}.predicted.json"
    if not path.exists():
        deviation = statistics.stdev([bits_of(keep, str(smaller[0]), "split"), *bits_of_seeds])
        documents = [by_document(results.items["split_text"]) for results in results_of(keep, *map(str, smaller))]
        found = law.predict([size.num_parameters for size in smaller], documents, shape.num_parameters, deviation)
        log = Log(keep / str(shape) / "runs" / str(shape) / "metrics.jsonl").last_of_each_batch()
        facts = {"deviation": deviation, "law": found.law._asdict(), "at_batch": max(log, default=0)}
        path.write_text(json.dumps(found._asdict() | facts))
    found = json.loads(path.read_text())
    words = f"{found['expected']:.4f} bits per byte ({found['low']:.4f} to {found['high']:.4f}) of the held-out split"
    note(f"predicted for {shape} ({shape.num_parameters:,} parameters): {words}, after its batch {found['at_batch']:,}")


# ------------------------------------------------------------------------------------------------------- what it says


def describe_run(keep: Path, shape: Shape) -> dict[str, Any]:
    """Return a run's size, launches, losses, what was predicted and what came."""
    name = str(shape)
    folder = keep / name / "runs" / name
    records = Log(folder / "metrics.jsonl").last_of_each_batch()
    losses = np.array([records[batch]["loss/train/total"] for batch in sorted(records)])
    batches, values = thin(np.array(sorted(records)), losses, MAX_POINTS)
    result, predicted = results_of(keep, name)[0], keep / f"{name}.predicted.json"
    seconds = sum(record["time/batch_seconds"] for record in records.values())
    return {
        "name": name,
        "parameters": result.num_parameters,
        "embedding": VOCAB_SIZE * shape.d_model,
        "batches": shape.num_batches,
        "tokens": shape.num_batches * BATCH * SEQ_LEN,
        "hours": seconds / 3600,
        "tokens_per_second": shape.num_batches * BATCH * SEQ_LEN / seconds,
        "launches": len((folder / "launches.jsonl").read_text().splitlines()),
        "legs": legs_of(shape.num_batches),
        "losses": [batches.tolist(), values.round(4).tolist()],
        "validation": {batch: r["eval/loss"] for batch, r in sorted(records.items()) if "eval/loss" in r},
        "bits": result.tasks["split_text"]["bits_per_byte"],
        "bits_stderr": result.tasks["split_text"]["bits_per_byte_stderr"],
        "predicted": json.loads(predicted.read_text()) if predicted.exists() else None,
    }


def measure_text(keep: Path, shapes: Sequence[Shape]) -> list[dict[str, Any]]:
    """Return bits per byte of both held-out texts by compressors, an n-gram and each size."""
    texts = {
        part: [json.loads(line)["text"] for line in (keep / "text" / f"{part}_text.jsonl").open()] for part in TEXT
    }
    found = {part: law.compressed(pieces) for part, pieces in texts.items()}
    num_tokens = shapes[-1].num_batches * BATCH * SEQ_LEN
    tokenizer = Tokenizer.from_file(str(keep / "data" / "tokenizer" / "tokenizer.json"))
    model = law.NGram(read_tokens(keep / "text" / "train.jsonl", tokenizer, num_tokens), VOCAB_SIZE)
    rows = [{"model": name, **{part: found[part][name] for part in TEXT}} for name in found["split"]]
    row: dict[str, Any] = {"model": f"n-gram of order {law.ORDER}"}
    for part, pieces in texts.items():
        nats = sum(model.nats(np.array([0, *tokenizer.encode(piece).ids])) for piece in pieces)
        row[part] = nats / sum(len(piece.encode()) for piece in pieces) / np.log(2)
    rows.append(row)
    for results in results_of(keep, *map(str, shapes)):
        row = {"model": results.model}
        for part in TEXT:
            task = results.tasks[f"{part}_text"]
            row |= {part: task["bits_per_byte"], f"{part}_stderr": task["bits_per_byte_stderr"]}
        rows.append(row)
    return rows


def read_tokens(path: Path, tokenizer: Tokenizer, num_tokens: int) -> NDArray[np.int64]:
    """Return the first tokens of the training text, a 0 before each document."""
    found: list[int] = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            found += [0, *tokenizer.encode(json.loads(line)["text"]).ids]
            if len(found) >= num_tokens:
                break
    return np.array(found[:num_tokens], np.int64)


def tabulate_tasks(keep: Path, shapes: Sequence[Shape]) -> list[dict[str, Any]]:
    return [
        {
            "model": results.model,
            **{f"{task}{end}": results.tasks[task][f"acc{end}"] for task in TASKS for end in ("", "_stderr")},
        }
        for results in results_of(keep, *map(str, shapes))
    ]


def pair_neighbours(keep: Path, shapes: Sequence[Shape]) -> list[dict[str, Any]]:
    """Return what a test says of each size and the one before it, with all items and stopped when decided."""
    rows = []
    for one, other in itertools.pairwise(shapes):
        results = results_of(keep, str(one), str(other))
        whole, stopped = compare(results)[0], compare(results, sequential=Rule())[0]
        for paired, early in zip(whole.tasks, stopped.tasks, strict=True):
            assert early.stage is not None
            facts = {"pair": f"{other} over {one}", "task": paired.task, "p": paired.p_corrected}
            facts |= {"verdict": paired.verdict, "items": paired.n, "asked": early.stage.num_asked}
            rows.append(facts | {"early": early.verdict, "of": early.stage.plan.num_items})
    return rows


def words_of(report: dict[str, Any]) -> str:
    sizes = {part: f"{number / 1e6:.1f}" for part, number in report["bytes"].items()}
    return (
        f"Text: {sizes['train']} MB of sources and prose of installed packages to train on ({report['tokens']:,} tokens, "
        f"none seen twice), {sizes['split']} MB of files of the same packages held out, and {sizes['domain']} MB of files "
        f"with {' or '.join(DOMAIN)} in their path, held out as a domain. Near copies may be on both sides of the split. "
        f"The models: {VOCAB_SIZE:,} tokens, tied embeddings, RMSNorm, RoPE, an MLP of 4 d, fp32; Muon at "
        f"{report['rate']:g} for matrices of blocks, AdamW at half of it for the rest, falling to 0; "
        f"{BATCH} x {SEQ_LEN} tokens a batch at every size. N counts the embedding."
    )


def table_of_runs(report: dict[str, Any]) -> Table:
    columns = (
        ("width x layers", "{name}"),
        ("parameters", "{parameters:,}"),
        ("of them embedding", lambda row: f"{row['embedding'] / row['parameters']:.0%}"),
        ("batches", "{batches:,}"),
        ("tokens", lambda row: f"{row['tokens'] / 1e6:.1f} M"),
        ("moved after batches", lambda row: ", ".join(f"{last:,}" for _, _, last in row["legs"][:-1])),
        ("launches", "{launches}"),
        ("tokens/s", "{tokens_per_second:,.0f}"),
        ("hours of training", "{hours:.2f}"),
        ("validation, nats per token", lambda row: f"{[*row['validation'].values()][-1]:.3f}"),
    )
    return tabulate("the runs", columns, report["runs"])


def table_of_law(report: dict[str, Any]) -> Table:
    def ends(one: dict[str, Any]) -> str:
        return f"{one['low']:.4f} to {one['high']:.4f}"

    rows = []
    for i, one in enumerate(report["runs"]):
        if found := one["predicted"]:
            hit = "hit" if found["low"] <= one["bits"] <= found["high"] else "MISS"
            rows.append({**found, **one, "of": i, "interval": ends(found), "hit": hit, "error": None})
            rows[-1] |= {"gap": one["bits"] - found["expected"], "done": found["at_batch"] / one["batches"]}
    columns = (
        ("predicted", "{name}"),
        ("of sizes", "{of}"),
        ("exponent (95 %)", lambda row: "{:.3f} ({:.3f} to {:.3f})".format(row["law"]["exponent"], *row["exponents"])),
        ("floor (95 %)", lambda row: "{:.3f} ({:.3f} to {:.3f})".format(row["law"]["floor"], *row["floors"])),
        ("trained when predicted", "{done:.0%}"),
        ("expected", "{expected:.4f}"),
        ("95 % interval", "{interval}"),
        ("came", "{bits:.4f}"),
        ("came less expected", "{gap:+.4f}"),
        ("", "{hit}"),
    )
    return tabulate("the law L = floor + scale N^-exponent, bits per byte of the held-out split", columns, rows)


def notes_of(report: dict[str, Any]) -> list[str]:
    rates = ", ".join(f"{loss:.3f} at {rate}" for rate, loss in report["rates"].items())
    seeds = ", ".join(f"{bits:.4f}" for bits in report["bits_of_seeds"])
    rate = report["runs"][-1]["tokens_per_second"] * 6 * report["runs"][-1]["parameters"]
    hours = ", ".join(
        f"{size / 1e6:g} M {6 * TOKENS_PER_PARAMETER * size**2 / rate / 3600:,.1f}" for size in (0.3e6, 1e6, 3e6, 10e6)
    )
    places = "; ".join(f"{letter}: {words}" for letter, (*_, words) in PLACES.items())
    return [
        f"learning rates at the smallest size, validation loss: {rates}",
        f"the smallest size with {len(SEEDS)} seeds: {seeds} bits per byte",
        "the interval: documents drawn anew, and runs that differ by their seed as far as the smallest size's do",
        f"places: {places}; legs end at {', '.join(f'{share:.0%} at {place}' for place, share in LEGS)} of the batches",
        f"at the largest run's {rate / 1e9:.1f} GFLOP/s, 120 N² FLOPs take hours: {hours}",
    ]


def tables(report: dict[str, Any]) -> list[Table]:
    """Tabulate texts, tasks and pairs."""

    def shown(key: str, digits: int) -> Callable[[Mapping[str, Any]], str]:
        return lambda row: (
            f"{row[key]:.{digits}f}" + (f" ± {row[f'{key}_stderr']:.{digits}f}" if f"{key}_stderr" in row else "")
        )

    text = [("", "{model}"), *((words, shown(part, 3)) for part, words in TEXT.items())]
    tasks = [("", "{model}"), *((task.replace("_", " "), shown(task, 3)) for task in TASKS)]
    pairs = [
        ("", "{pair}"),
        ("task", "{task}"),
        ("all items", "{items:,}"),
        ("verdict", "{verdict}"),
        ("p", lambda row: p_text(row["p"])),
        ("asked until decided", lambda row: f"{row['asked']:,} of {row['of']:,}"),
        ("verdict then", "{early}"),
    ]
    return [
        tabulate(
            f"bits per byte of {NUM_PIECES} beginnings of held-out files; the n-gram has read as much text as the largest model",
            text,
            report["text"],
        ),
        tabulate("tasks from held-out files, accuracy; guessing has 0.25", tasks, report["tasks"]),
        tabulate(
            "each size beside the one before, tested in pairs (Holm over the tasks of a pair)",
            pairs,
            report["pairs"],
            num_keys=2,
        ),
    ]
