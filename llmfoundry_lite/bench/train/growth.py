"""How the cost of a training step grows with parameters, with the sequence and with the batch.

llmfoundry-lite bench train --growth --out results

Held against the line that model FLOPs alone would draw through the first point of each kind. Where a point is more
than 10 % off the line, the matrix products of the same shapes, timed in the same turns, tell how much of that they
account for; the rest of a step is attention, softmax over the vocabulary, norms, activations and the optimizer.
"""

import datetime
import json
import os
import statistics
from pathlib import Path
from typing import Any

import matplotlib
import torch
from rich.console import Console
from rich.table import Table

from llmfoundry_lite.bench.train.train import SHAPES, measure_in_a_process
from llmfoundry_lite.config.schema import ModelConfig
from llmfoundry_lite.devices import device_name
from llmfoundry_lite.evaluation.tables import markdown_table
from llmfoundry_lite.models.flops import count_flops_per_token, count_parameters

matplotlib.use("Agg")
import matplotlib.pyplot as plt

GROWTH: dict[str, list[tuple[str, int, int]]] = {
    "parameters": [("10m", 512, 4), ("40m", 512, 4), ("124m", 512, 4), ("350m", 512, 4)],
    "sequence": [("40m", 256, 4), ("40m", 512, 4), ("40m", 1024, 4), ("40m", 2048, 4)],
    "batch": [("40m", 512, 1), ("40m", 512, 2), ("40m", 512, 4), ("40m", 512, 8)],
}
"""What grows -> (shape, tokens in a sample, samples)."""

HEADINGS = ["grows", "model", "tokens", "seconds", "by model FLOPs", "of the line", "products alone", "why"]


def run_growth(dtype: str, num_steps: int, num_rounds: int) -> dict[str, Any]:
    """Measure all points in turns, print a table, return the report."""
    console, load_average = Console(), os.getloadavg()[0]
    points = list(dict.fromkeys(point for kind in GROWTH.values() for point in kind))
    seconds: dict[tuple[str, int, int], dict[str, list[float]]] = {
        point: {"trainer": [], "matmul": []} for point in points
    }
    for round_number in range(num_rounds):
        for shape, seq_len, batch_size in points:
            console.print(f"round {round_number + 1}/{num_rounds}: {shape}, {batch_size} x {seq_len} tokens, {dtype}")
            task = {"shape": shape, "seq_len": seq_len, "batch_size": batch_size, "num_steps": num_steps}
            for side, found in seconds[shape, seq_len, batch_size].items():
                found += measure_in_a_process({"side": f"{side} {dtype}", **task}, None)["step_seconds"]
    medians = {point: {side: statistics.median(found) for side, found in seconds[point].items()} for point in points}
    report = {
        "date": datetime.date.today().isoformat(),
        "device": device_name(),
        "torch": torch.__version__,
        "load_average": load_average,
        "dtype": dtype,
        "num_steps": num_steps,
        "num_rounds": num_rounds,
        "rows": [row for kind, of_kind in GROWTH.items() for row in _rows(kind, of_kind, medians)],
    }
    table = Table(title=title_of(report))
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading in ("grows", "model", "why") else "right")
    for cells in cells_of(report):
        table.add_row(*cells)
    console.print(table)
    return report


def _rows(
    kind: str, points: list[tuple[str, int, int]], seconds: dict[tuple[str, int, int], dict[str, float]]
) -> list[dict[str, Any]]:
    first = seconds[points[0]]
    rows = []
    for shape, seq_len, batch_size in points:
        times = count_step_flops(shape, seq_len, batch_size) / count_step_flops(*points[0])
        here = seconds[shape, seq_len, batch_size]
        rows.append(
            {
                "grows": kind,
                "shape": shape,
                "seq_len": seq_len,
                "batch_size": batch_size,
                "num_parameters": count_parameters(_model(shape, seq_len)),
                "flops": count_step_flops(shape, seq_len, batch_size),
                "seconds": here["trainer"],
                "line_seconds": first["trainer"] * times,
                "products_seconds": here["matmul"],
                "products_line_seconds": first["matmul"] * times,
            }
        )
    return rows


def count_step_flops(shape: str, seq_len: int, batch_size: int) -> int:
    return count_flops_per_token(_model(shape, seq_len), seq_len) * batch_size * seq_len


def _model(shape: str, seq_len: int) -> ModelConfig:
    return ModelConfig(max_seq_len=seq_len, no_bias=True, **SHAPES[shape])


def explain(row: dict[str, Any]) -> str:
    """Where a point is more than 10 % off its line: how much of that products account for, and how much the rest."""
    off = row["seconds"] / row["line_seconds"] - 1
    if abs(off) <= 0.1:
        return ""
    by_products = (row["products_seconds"] - row["products_line_seconds"]) / row["line_seconds"]
    return f"{by_products:+.0%} the products' own rate, {off - by_products:+.0%} all else"


def title_of(report: dict[str, Any]) -> str:
    return f"seconds of a step through the Trainer, {report['dtype']}, {report['device']}"


def cells_of(report: dict[str, Any]) -> list[list[str]]:
    return [
        [
            *(row["grows"], row["shape"], f"{row['batch_size']} x {row['seq_len']}"),
            *(f"{row['seconds']:.3f}", f"{row['line_seconds']:.3f}", f"{row['seconds'] / row['line_seconds']:.2f}"),
            *(f"{row['products_seconds']:.3f}", explain(row)),
        ]
        for row in report["rows"]
    ]


def write_report(report: dict[str, Any], folder: Path) -> None:
    """growth-DTYPE.json (everything), .md (the table) and .png."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"growth-{report['dtype']}"
    (folder / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    lines = [
        "# How the cost of a step grows",
        "",
        f"`llmfoundry-lite bench train --growth --dtype {report['dtype']}`, {report['date']}, torch "
        f"{report['torch']}: {title_of(report)}; the median of {report['num_rounds']} x {report['num_steps']} steps; "
        f"load average before it {report['load_average']:.1f}.",
        "",
        *markdown_table([HEADINGS, *cells_of(report)]),
        "",
        "The line goes through the first, smallest point, which bears most of what does not grow with FLOPs (the "
        "optimizer's passes over all parameters, the embedding's gradient, the loop itself): larger points lie below.",
        "",
        f"![the figure]({name}.png)",
    ]
    (folder / f"{name}.md").write_text("\n".join(lines) + "\n")
    plot_growth(report, folder / f"{name}.png")


def plot_growth(report: dict[str, Any], path: Path) -> None:
    """Step time against what grows, with the line of model FLOPs and the products alone; both axes in logarithms."""
    kinds = list(dict.fromkeys(row["grows"] for row in report["rows"]))
    figure, panels = plt.subplots(1, len(kinds), figsize=(11, 3.6), layout="constrained", dpi=150, sharey=True)
    names = {"parameters": "num_parameters", "sequence": "seq_len", "batch": "batch_size"}
    words = {"parameters": "parameters", "sequence": "tokens in a sample", "batch": "samples in a batch"}
    for axes, kind in zip(panels, kinds, strict=True):
        rows = [row for row in report["rows"] if row["grows"] == kind]
        x = [row[names[kind]] for row in rows]
        axes.loglog(x, [row["line_seconds"] for row in rows], "--", color="#8c8c8c", label="by model FLOPs")
        axes.loglog(x, [row["products_seconds"] for row in rows], "s:", color="#dd8452", ms=4, label="products alone")
        axes.loglog(x, [row["seconds"] for row in rows], "o-", color="#4c72b0", ms=5, label="a step")
        axes.set_xlabel(words[kind])
        axes.set_xticks(x, [f"{value / 1e6:.0f}M" if kind == "parameters" else str(value) for value in x])
        axes.minorticks_off()
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("seconds")
    panels[0].legend(frameon=False, fontsize=9)
    figure.suptitle(title_of(report), fontsize=11)
    figure.savefig(path)
    plt.close(figure)
