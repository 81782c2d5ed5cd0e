"""How the cost of a training step grows with the number of parameters, with the sequence and with the batch.

    python -m benchmarks growth --out results

Each point is compared with a line: the seconds that it would take if they were proportional to the model's FLOPs,
starting from the first point of its kind. Where a point is more than 10 % off the line, the matrix products of the same
shapes, timed in the same turns, tell how much of the difference they account for. The rest of a step is attention,
softmax over the vocabulary, norms, activations and the optimizer.
"""

import statistics
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from llmfoundry_lite.errors import DataError
from llmfoundry_lite.models.flops import count_parameters
from llmfoundry_lite.report.canvas import style_panels
from llmfoundry_lite.tables import Table
from llmfoundry_machines.bench import frame
from llmfoundry_machines.bench.steps import count_step_flops, measure_in_a_process, model_of

Point = tuple[str, int, int]
"""Model shape, tokens in a sample, and samples in a batch."""

GROWTH: dict[str, list[Point]] = {
    "parameters": [("10m", 512, 4), ("40m", 512, 4), ("125m", 512, 4), ("350m", 512, 4)],
    "sequence": [("40m", 256, 4), ("40m", 512, 4), ("40m", 1024, 4), ("40m", 2048, 4)],
    "batch": [("40m", 512, 1), ("40m", 512, 2), ("40m", 512, 4), ("40m", 512, 8)],
}
"""Quantity that grows -> points. The line goes through the first of them."""

COLUMNS: list[frame.Column] = [
    ("grows", "{grows}"),
    ("model", "{shape}"),
    ("tokens", "{batch_size} x {seq_len}"),
    ("seconds", "{seconds:.3f}"),
    ("by model FLOPs", "{line_seconds:.3f}"),
    ("of the line", lambda row: f"{row['seconds'] / row['line_seconds']:.2f}"),
    ("products alone", "{products_seconds:.3f}"),
    ("why", lambda row: explain(row)),
]


def run(dtype: str = "bf16", num_steps: int = 3, num_rounds: int = 2, out: Path | None = None) -> dict[str, Any]:
    """Time a step at all points in turns, print a table, and return the report, which `out` also gets.

    The files are growth-DTYPE.json, .md and .png. Each point is measured by `num_steps` steps in each round, through
    the Trainer and as matrix products alone. Raises DataError if a point could not be measured.
    """
    console, report = frame.open_console(), frame.describe_conditions()
    points = list(dict.fromkeys(point for quantity in GROWTH.values() for point in quantity))

    tasks = {
        _name(side, point): {
            "side": f"{side} {dtype}",
            **dict(zip(("shape", "seq_len", "batch_size"), point, strict=True)),
            "num_steps": num_steps,
        }
        for point in points
        for side in ("trainer", "matmul")
    }
    measures = {name: partial(measure_in_a_process, task) for name, task in tasks.items()}
    results, failed = frame.take_turns(measures, num_rounds, console)
    if failed:
        raise DataError(f"growth: {next(iter(failed.values()))}")

    # The median of all steps in all rounds.
    seconds = {
        name: statistics.median(value for result in rounds for value in result["step_seconds"])
        for name, rounds in results.items()
    }
    report |= {
        "dtype": dtype,
        "num_steps": num_steps,
        "num_rounds": num_rounds,
        "rows": [
            row
            for quantity, points_of_quantity in GROWTH.items()
            for row in _rows(quantity, points_of_quantity, seconds)
        ],
    }

    frame.tell(
        report,
        table_of(report),
        [LINE],
        name=f"growth-{dtype}",
        heading="How the cost of a step grows",
        command=f"python -m benchmarks growth --dtype {dtype}",
        asked=["dtype"],
        plot=plot_growth,
        out=out,
    )
    return report


LINE = (
    "The line goes through the smallest point, in which work that does not grow with the FLOPs has the largest "
    "share: the optimizer's passes over all parameters, the embedding's gradient, the loop itself. Larger points "
    "therefore lie below the line."
)


def _name(side: str, point: Point) -> str:
    """Return the name of one measurement, as progress and errors show it."""
    shape, seq_len, batch_size = point
    return f"{shape}, {batch_size} x {seq_len} tokens, {side}"


def _rows(quantity: str, points: list[Point], seconds: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the report's rows of one quantity that grows.

    `seconds` maps the name of a measurement to the seconds of its step. `line_seconds` and `products_line_seconds` are
    what the step and the products alone would take on the line through the first point.
    """
    rows = []
    for point in points:
        shape, seq_len, batch_size = point
        flops_ratio = count_step_flops(*point) / count_step_flops(*points[0])
        rows.append(
            {
                "grows": quantity,
                "shape": shape,
                "seq_len": seq_len,
                "batch_size": batch_size,
                "num_parameters": count_parameters(model_of(shape, seq_len)),
                "flops": count_step_flops(*point),
                "seconds": seconds[_name("trainer", point)],
                "line_seconds": seconds[_name("trainer", points[0])] * flops_ratio,
                "products_seconds": seconds[_name("matmul", point)],
                "products_line_seconds": seconds[_name("matmul", points[0])] * flops_ratio,
            }
        )
    return rows


def explain(row: Mapping[str, Any]) -> str:
    """Explain a point more than 10 % off its line: how much is due to the matrix products, and how much to the rest.

    Both shares are relative to the line. For example, "-8% the products' own rate, -7% all else" is a step 15 % below
    its line. Returns an empty text for a point near the line.
    """
    deviation = row["seconds"] / row["line_seconds"] - 1
    if abs(deviation) <= 0.1:
        return ""
    by_products = (row["products_seconds"] - row["products_line_seconds"]) / row["line_seconds"]
    return f"{by_products:+.0%} the products' own rate, {deviation - by_products:+.0%} all else"


def title_of(report: dict[str, Any]) -> str:
    """Return what both the table and the figure show."""
    return f"seconds of a step through the Trainer, {report['dtype']}, {report['device']}"


def table_of(report: dict[str, Any]) -> Table:
    """Return a table of all points, beside their lines."""
    title = f"{title_of(report)}, the median of {report['num_rounds']} x {report['num_steps']} steps"
    return frame.tabulate(title, COLUMNS, report["rows"], num_keys=3)


def plot_growth(report: dict[str, Any], path: Path) -> None:
    """Draw the seconds of a step against each quantity that grows, beside its line and the products alone (log-log)."""
    quantities = list(dict.fromkeys(row["grows"] for row in report["rows"]))
    keys = {"parameters": "num_parameters", "sequence": "seq_len", "batch": "batch_size"}
    axis_labels = {"parameters": "parameters", "sequence": "tokens in a sample", "batch": "samples in a batch"}
    with frame.drawn(path, len(quantities), (11, 3.6), title_of(report), sharey=True) as panels:
        # One panel for each quantity, all with the same axis of seconds.
        for axes, quantity in zip(panels, quantities, strict=True):
            rows = [row for row in report["rows"] if row["grows"] == quantity]
            x = [row[keys[quantity]] for row in rows]
            axes.loglog(x, [row["line_seconds"] for row in rows], "--", color="#8c8c8c", label="by model FLOPs")
            axes.loglog(
                x, [row["products_seconds"] for row in rows], "s:", color="#dd8452", ms=4, label="products alone"
            )
            axes.loglog(x, [row["seconds"] for row in rows], "o-", color="#4c72b0", ms=5, label="a step")
            axes.set_xlabel(axis_labels[quantity])
            axes.set_xticks(x, [f"{value / 1e6:.0f}M" if quantity == "parameters" else str(value) for value in x])
            axes.minorticks_off()
        style_panels(panels)
        panels[0].set_ylabel("seconds")
        panels[0].legend(frameon=False, fontsize=9)
