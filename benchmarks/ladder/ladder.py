"""Train models of several sizes, fit a scaling law, and predict each next size before it is trained.

    python -m benchmarks ladder --keep FOLDER --out docs/measurements
    python -m benchmarks ladder --keep FOLDER --sizes 80x3,128x4,208x5,320x8    0.3 to 10 M parameters

Each size is trained on 20 tokens per parameter, and moves between sites that divide it in different ways (see
`plan.py`). The learning rate is tuned at the second size, because a run of the first is too short. Every size with
three smaller ones is predicted by their law before it is trained. Each size is also evaluated on tasks, and compared
with the size before.

FOLDER keeps all predictions and runs. Called again, the benchmark continues where it stopped.
"""

import itertools
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tokenizers import Tokenizer

from benchmarks import Log, last_lines
from benchmarks.ladder import law, plan
from benchmarks.ladder.data import DOMAIN, NUM_PIECES, gather
from benchmarks.ladder.figure import plot_ladder
from benchmarks.ladder.plan import Shape
from llmfoundry_lite.checkpoint.manifest import Segment
from llmfoundry_lite.errors import UserError
from llmfoundry_lite.evaluation.compare import compare
from llmfoundry_lite.evaluation.means import by_document
from llmfoundry_lite.evaluation.pairs import format_p
from llmfoundry_lite.evaluation.results import Results, load_results
from llmfoundry_lite.report.reading import read_run
from llmfoundry_lite.tables import Table
from llmfoundry_machines.bench.frame import describe_conditions, open_console, tabulate, tell

SEEDS = (17, 18, 19)
"""Seeds of the second size, which show how far apart runs are that differ in nothing else."""
TIE = 0.01
"""Losses that differ by less, in nats, count as equal when the learning rate is chosen. The lower rate is then taken,
because larger sizes train longer."""
MAX_POINTS = 80
"""Points of a loss curve in the report. Each is a mean over consecutive batches."""
SPLIT = "split_text/0-shot"
# Held-out texts: their tasks -> their names in tables.
TEXT = {SPLIT: "held-out split", "domain_text/0-shot": "held-out domain"}


def run(
    *,
    sizes: Sequence[str] = ("16x2", "32x2", "48x2", "64x3", "96x3"),
    untrained: Sequence[str] = ("128x4", "208x5", "320x8"),
    rates: Sequence[float] = (0.02, 0.04, 0.08),
    keep: Path = Path("runs/ladder"),
    out: Path | None = None,
) -> dict[str, Any]:
    """Train, predict, evaluate, print the tables, and return the report. `out` gets ladder.json, .md and .png.

    `sizes` are WIDTHxLAYERS. The `untrained` sizes are only predicted. `rates` are the learning rates to choose from.
    `keep` is the folder of all runs. Raises UserError.
    """
    larger = plan.parse_shapes([*sizes, *untrained])[len(sizes) :]
    shapes, conditions, keep = plan.parse_shapes(sizes), describe_conditions(), keep.resolve()
    note = partial(open_console().print, markup=False)
    num_bytes = gather(keep)

    # Choose the learning rate: the lowest one whose loss is as good as the best.
    losses = [tune(keep, shapes[1], lr) for lr in rates]
    lr = min(rate for rate, loss in zip(rates, losses, strict=True) if loss < min(losses) + TIE)

    # The same size with other seeds.
    for seed in SEEDS[1:]:
        plan.train(keep, shapes[1], lr, name=f"{shapes[1]}-seed-{seed}", seed=seed)
        evaluate(keep, f"{shapes[1]}-seed-{seed}", "text.yaml")

    # From the fourth size on, the prediction is written down before the size is trained.
    for i, shape in enumerate(shapes):
        if i >= 3:
            prediction = predict(keep, shapes[:i], shape)
            note(f"predicted for {shape}: {prediction['bits']:.4f} ({interval('bits', prediction)}) bits per byte")
        note(f"training {shape}: {shape.num_parameters:,} parameters, {shape.num_batches:,} batches")
        plan.train(keep, shape, lr)
        evaluate(keep, str(shape), "tasks.yaml")

    report = conditions | {
        "sizes": list(sizes),
        "rates": dict(zip(rates, losses, strict=True)),
        "rate": lr,
        "bytes": num_bytes,
        "tokens": json.loads((keep / "data" / "summary.json").read_text())["splits"]["train"]["tokens"],
        "seeds": bits_of_seeds(keep, shapes[1]),
        "runs": [describe_run(keep, shapes[:i], shape) for i, shape in enumerate(shapes)],
        "untrained": [
            {"name": str(shape), "parameters": shape.num_parameters, "predicted": predict(keep, shapes, shape)}
            for shape in larger
        ],
        "text": measure_text(keep, shapes),
        "tasks": [row_of(results) for results in results_of(keep, *map(str, shapes))],
        "pairs": pair_neighbours(keep, shapes),
    }

    tell(
        report,
        *(words_of(report), *tables_of_runs(report), notes_of(report), *tables_of_tasks(report)),
        name="ladder",
        heading="Converged models of several sizes",
        command=f"python -m benchmarks ladder --sizes {','.join(sizes)}",
        asked=("sizes",),
        plot=plot_ladder,
        out=out,
    )
    return report


# ------------------------------------------------------------------------------------------------------ what is run


def tune(keep: Path, shape: Shape, lr: float) -> float:
    """Train a size at this learning rate, at one site, and return its last validation loss."""
    name = f"{shape}-rate-{lr:g}"
    plan.train(keep, shape, lr, name=name)
    return records_of(keep, name)[shape.num_batches]["eval/loss"]


def evaluate(keep: Path, name: str, tasks: str) -> None:
    """Evaluate a run on the tasks of a file, unless keep/results has all their results already.

    Raises UserError with the last lines of the output if a result is missing afterwards.
    """
    path = keep / "results" / "ladder" / f"{name}.json"
    labels = {f"{task['label']}/0-shot" for task in yaml.safe_load((plan.HERE / tasks).read_text())["icl_tasks"]}
    is_done = lambda: path.exists() and labels <= json.loads(path.read_text())["tasks"].keys()  # noqa: E731
    if not is_done():
        arguments = [f"models.{name}=runs/{name}", "suite=ladder", "data_root=text"]
        output = plan.call(keep, "eval", str(plan.HERE / tasks), *arguments)
        if not is_done():
            raise UserError(f"evaluation of {name}: {last_lines(output)}")


def records_of(keep: Path, name: str) -> dict[int, dict[str, Any]]:
    """Return batch -> record of a run's metrics."""
    return Log(keep / "runs" / name / "metrics.jsonl").last_of_each_batch()


def results_of(keep: Path, *names: str) -> list[Results]:
    """Return the evaluation results of these runs."""
    return load_results([keep / "results" / "ladder" / f"{name}.json" for name in names])


def bits_of_seeds(keep: Path, shape: Shape) -> list[float]:
    """Return the bits per byte of the held-out split for each of SEEDS; the first is the size's main run."""
    names = (str(shape), *(f"{shape}-seed-{seed}" for seed in SEEDS[1:]))
    return [results.tasks[SPLIT]["bits_per_byte"] for results in results_of(keep, *names)]


def predict(keep: Path, smaller: Sequence[Shape], shape: Shape) -> dict[str, Any]:
    """Predict the bits per byte of a size from the smaller ones, and keep the prediction in a file of `keep`.

    A prediction that was made before is read from that file, so it cannot change after the size has been trained.
    `at_batch` is the batch that the size's run had reached when the prediction was made: 0 if it was made before the
    run.
    """
    path = keep / f"{'-'.join(map(str, (*smaller, shape)))}.json"
    if not path.exists():
        documents = [by_document(results.items[SPLIT]) for results in results_of(keep, *map(str, smaller))]
        deviation = statistics.stdev(bits_of_seeds(keep, smaller[1]))
        prediction = law.predict([size.num_parameters for size in smaller], documents, shape.num_parameters, deviation)

        log = keep / "runs" / str(shape) / "metrics.jsonl"
        at_batch = max(Log(log).last_of_each_batch(), default=0) if log.exists() else 0
        path.write_text(json.dumps({**prediction, "num_sizes": len(smaller), "at_batch": at_batch}))
    return json.loads(path.read_text())


# ------------------------------------------------------------------------------------------------------ what came


def describe_run(keep: Path, smaller: Sequence[Shape], shape: Shape) -> dict[str, Any]:
    """Return a run's row of the report: size, sites, losses, time, bits per byte, and what was predicted."""
    name, records = str(shape), records_of(keep, str(shape))
    losses = np.array([records[batch]["loss/train/total"] for batch in sorted(records)])
    # The loss curve: means over at most MAX_POINTS stretches of consecutive batches.
    stretches = np.array_split(np.arange(len(losses)), min(len(losses), MAX_POINTS))
    task = results_of(keep, name)[0].tasks[SPLIT]
    seconds = sum(record["time/batch_seconds"] for record in records.values())
    return {
        "name": name,
        "parameters": results_of(keep, name)[0].num_parameters,
        "embedding": plan.VOCAB_SIZE * shape.d_model,
        "batches": shape.num_batches,
        "tokens": shape.num_batches * plan.BATCH * plan.SEQ_LEN,
        "hours": seconds / 3600,
        "fastest": float(np.quantile([record["throughput/tokens_per_sec"] for record in records.values()], 0.95)),
        "sites": [(segment.last_batch, site_of(segment)) for segment in read_run(keep / "runs" / name).segments],
        "losses": [(float(batches.mean()) + 1, round(losses[batches].mean(), 4)) for batches in stretches],
        "validation": {
            batch: record["eval/loss"] for batch, record in sorted(records.items()) if "eval/loss" in record
        },
        "bits": task["bits_per_byte"],
        "bits_stderr": task["bits_per_byte_stderr"],
        "predicted": predict(keep, smaller, shape) if len(smaller) >= 3 else None,
    }


def site_of(segment: Segment) -> str:
    """Describe the site of a segment of a run: ranks, sharding, and instruction set."""
    isa = segment.environment.get("ATEN_CPU_CAPABILITY", "").upper()
    return " ".join(filter(None, (f"{segment.world_size} x", segment.sharding, isa)))


def measure_text(keep: Path, shapes: Sequence[Shape]) -> list[dict[str, Any]]:
    """Return the bits per byte of both held-out texts by compressors and by an n-gram model.

    The n-gram model reads as many tokens of the training text as the largest size trains on.
    """

    def texts(name: str) -> Iterator[str]:
        """Yield the texts of a JSONL file in the folder."""
        with (keep / "text" / f"{name}.jsonl").open(encoding="utf-8") as file:
            yield from (json.loads(line)["text"] for line in file)

    encode = Tokenizer.from_file(str(keep / "data" / "tokenizer" / "tokenizer.json")).encode
    # Token 0 separates documents.
    documents = (np.array([0, *encode(text).ids]) for text in texts("train"))
    num_tokens, documents_read = shapes[-1].num_batches * plan.BATCH * plan.SEQ_LEN, []
    while sum(map(len, documents_read)) < num_tokens:
        documents_read.append(next(documents))

    ngram = law.NGram(np.concatenate(documents_read)[:num_tokens], plan.VOCAB_SIZE)

    rows_of_models: dict[str, dict[str, Any]] = {}
    for part in TEXT:
        pieces = list(texts(part.partition("/")[0]))
        total_nats = sum(ngram.nats(np.array([0, *encode(piece).ids])) for piece in pieces)
        bits = total_nats / sum(len(piece.encode()) for piece in pieces) / math.log(2)
        for model, value in {**law.compressed(pieces), f"n-gram of order {law.ORDER}": bits}.items():
            rows_of_models.setdefault(model, {"model": model})[part] = value
    return list(rows_of_models.values())


def pair_neighbours(keep: Path, shapes: Sequence[Shape]) -> list[dict[str, Any]]:
    """Return, for each size and task, whether the size differs significantly from the one before."""
    rows = []
    for names in itertools.pairwise(map(str, shapes)):
        for comparison in compare(results_of(keep, *names))[0].tasks:
            row = {"pair": f"{names[1]} over {names[0]}", "task": comparison.task, "verdict": comparison.verdict}
            rows.append(row | {"p": comparison.p_corrected})
    return rows


def row_of(results: Results) -> dict[str, Any]:
    """Return a model's row of the tables of tasks: its metric and standard error for each task."""
    row: dict[str, Any] = {"model": results.model}
    for name, task in results.tasks.items():
        row |= {name: task[task["metric"]], f"{name}_stderr": task[f"{task['metric']}_stderr"]}
    return row


# ------------------------------------------------------------------------------------------------------ what it says


def words_of(report: dict[str, Any]) -> str:
    """Return the paragraph that describes texts, models and training."""
    train_on, split, domain = (report["bytes"][part] / 1e6 for part in ("train", "split", "domain"))
    tokens, read = report["tokens"] / 1e6, report["runs"][-1]["tokens"] / report["tokens"]
    return (
        f"The texts are sources and prose of installed packages. The training data has {train_on:.0f} MB or "
        f"{tokens:.1f} M tokens, of which the largest model reads {read:.0%}. Two sets are held out: {split:.1f} MB "
        f"of files of the same packages (the split), and {domain:.0f} MB with {' or '.join(DOMAIN)} in the path (the "
        "domain). Near copies of a file may be on both sides of the split. Models: tied embeddings, RMSNorm, RoPE, "
        f"heads of {plan.HEAD}, an MLP of 4 d, {plan.VOCAB_SIZE:,} tokens; fp32, {plan.BATCH} x {plan.SEQ_LEN} tokens "
        f"a batch. Muon at {report['rate']:g} trains the blocks' matrices, AdamW at half that rate everything else; "
        "both rates fall to 0. Parameters include the embedding."
    )


def interval(name: str, row: Mapping[str, Any], digits: int = 4) -> str:
    """Format the interval of a predicted quantity, such as "1.9012 to 1.9530"."""
    return f"{row[f'{name}_low']:.{digits}f} to {row[f'{name}_high']:.{digits}f}"


def tables_of_runs(report: dict[str, Any]) -> list[Table]:
    """Return three tables: the runs, the predictions beside their results, and the predictions without a run."""
    # Column heading, and a format or a function of the row.
    run_columns = (
        ("width x layers", "{name}"),
        ("parameters", "{parameters:,}"),
        ("embedding", lambda row: f"{row['embedding'] / row['parameters']:.0%}"),
        ("tokens", lambda row: f"{row['tokens'] / 1e6:.1f} M"),
        ("batches", "{batches:,}"),
        ("up to which batch where", lambda row: "; ".join(f"{last:,} on {site}" for last, site in row["sites"])),
        ("hours", "{hours:.2f}"),
        ("tokens/s", lambda row: f"{row['tokens'] / row['hours'] / 3600:,.0f}"),
        ("validation, nats per token", lambda row: f"{[*row['validation'].values()][-1]:.3f}"),
    )

    law_columns = (
        ("predicted", "{name}"),
        ("from sizes", "{num_sizes}"),
        ("exponent", lambda row: f"{row['exponent']:.2f} ({interval('exponent', row, 2)})"),
        ("floor", lambda row: f"{row['floor']:.2f} ({interval('floor', row, 2)})"),
        ("expected", lambda row: f"{row['bits']:.4f} ({interval('bits', row)})"),
    )

    outcome_columns = (
        ("trained by then", lambda row: f"{row['at_batch'] / row['batches']:.0%}"),
        ("came", "{came:.4f}"),
        ("came - expected", lambda row: f"{row['came'] - row['bits']:+.4f}"),
        ("", lambda row: "hit" if row["bits_low"] <= row["came"] <= row["bits_high"] else "MISS"),
    )

    # A prediction's row has the figures of its run, overwritten by those of the prediction.
    rows = [{**run, "came": run["bits"], **run["predicted"]} for run in report["runs"] if run["predicted"]]
    title = "bits per byte of the held-out split, predicted by floor + scale N^-exponent (95 % intervals)"
    untrained = [{**run, **run["predicted"]} for run in report["untrained"]]
    untrained_columns = (law_columns[0], ("parameters", "{parameters:,}"), *law_columns[1:])
    untrained_title = "the same for sizes that were not trained"
    return [
        tabulate("the runs", run_columns, report["runs"]),
        tabulate(title, (*law_columns, *outcome_columns), rows),
        tabulate(untrained_title, untrained_columns, untrained),
    ]


def notes_of(report: dict[str, Any]) -> list[str]:
    """Return the notes below the tables: learning rates, moved and unmoved run, seeds, intervals, and speed."""
    largest, seeds = report["runs"][-1], report["seeds"]

    # The mean speed and the fastest one. A run of N parameters takes 6 * 20 N * N FLOPs.
    speeds = [
        6 * largest["parameters"] * rate for rate in (largest["tokens"] / largest["hours"] / 3600, largest["fastest"])
    ]
    flops = {f"{n / 1e6:g} M": 6 * plan.TOKENS_PER_PARAMETER * n * n for n in (3e5, 1e6, 3e6, 1e7)}
    hours = ", ".join(
        f"{size} {' to '.join(f'{n / rate / 3600:,.1f}' for rate in speeds[::-1])}" for size, n in flops.items()
    )
    losses_by_rate = ", ".join(f"{loss:.3f} at {rate}" for rate, loss in report["rates"].items())

    # The tuning run at the chosen rate stayed at one site; the second size's main run moved.
    moved_loss = [*report["runs"][1]["validation"].values()][-1]
    gap = abs(moved_loss - report["rates"][report["rate"]])
    return [
        f"validation loss of {report['sizes'][1]} by learning rate: {losses_by_rate}; if losses differ by at most "
        f"{TIE}, the lower rate is taken",
        f"the run of {report['sizes'][1]} that never moved ends {gap:.1e} nats from the one that moved",
        f"{report['sizes'][1]} with {len(SEEDS)} seeds: {', '.join(f'{bits:.4f}' for bits in seeds)} bits per byte",
        "intervals: include the choice of held-out files, and the deviation of every run from the law by its seed; "
        "they do not include that the law may have another form",
        f"{largest['name']} reached {speeds[0] / 1e9:.1f} GFLOP/s on a shared machine, in its fastest batches "
        f"{speeds[1] / 1e9:.0f}; hours that 120 N² FLOPs take at these rates, by N: {hours}",
    ]


def tables_of_tasks(report: dict[str, Any]) -> list[Table]:
    """Return three tables: held-out texts with their baselines, tasks, and comparisons of neighbouring sizes."""

    def shown(key: str, row: Mapping[str, Any]) -> str:
        """Format a figure with its standard error, if it has one."""
        return f"{row[key]:.3f}" + (f" ± {row[f'{key}_stderr']:.3f}" if f"{key}_stderr" in row else "")

    # The held-out texts have a table of their own.
    task_keys = [key for key in report["tasks"][0] if key.endswith("shot") and key not in TEXT]
    text_columns = [("", "{model}"), *((title, partial(shown, part)) for part, title in TEXT.items())]

    task_columns = [
        ("", "{model}"),
        *((key.partition("/")[0].replace("_", " "), partial(shown, key)) for key in task_keys),
    ]
    pair_columns = [
        ("", "{pair}"),
        ("task", "{task}"),
        ("verdict", "{verdict}"),
        ("p", lambda row: format_p(row["p"])),
    ]
    text_title = (
        f"bits per byte of {NUM_PIECES} beginnings of held-out files; the n-gram model has read as much as the largest"
    )
    return [
        tabulate(text_title, text_columns, [*report["text"], *report["tasks"]]),
        tabulate("accuracy on tasks from held-out files; guessing gives 0.250", task_columns, report["tasks"]),
        tabulate(
            "each size compared with the one before; p corrected by Holm over the tasks of a pair",
            pair_columns,
            report["pairs"],
            2,
        ),
    ]
