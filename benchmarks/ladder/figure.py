"""Figure of the ladder: losses over tokens, with the moves, and the law beside predictions and results."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import EngFormatter

from benchmarks.ladder.law import Law
from llmfoundry_lite.report.canvas import curve_color, style_panels
from llmfoundry_machines.bench.frame import drawn


def plot_ladder(report: dict[str, Any], path: Path) -> None:
    """Draw the loss curves of all sizes, and their bits per byte beside the law, as a PNG.

    The law that is drawn is the one that predicted the largest size, so it was fitted to all others.
    """
    runs, grey = report["runs"], "#777777"
    with drawn(path, 2, (13, 5.2)) as (curves, law):
        for i, run in enumerate(runs):
            batches, means = np.array(run["losses"]).T
            tokens = batches * run["tokens"] / run["batches"]
            curves.plot(tokens, means, color=curve_color(i), linewidth=1.4, label=f"{run['parameters']:,} parameters")
            move_points = np.searchsorted(batches, [last for last, _ in run["sites"][:-1]])
            curves.plot(
                tokens[move_points],
                means[move_points],
                "|",
                color="#222222",
                markersize=13,
                markeredgewidth=1.6,
                zorder=5,
            )
            law.plot(run["parameters"], run["bits"], "o", color=curve_color(i), markersize=7, zorder=4)

        # Entries of the legends.
        curves.plot([], [], "|", color="#222222", markersize=11, label="moves to another site")
        law.plot([], [], "o", color=grey, label="measured")
        for run in filter(lambda run: run["predicted"], runs):
            prediction, label = run["predicted"], "predicted, 95 % interval" if run is runs[-1] else None
            ends = [[prediction["bits"] - prediction["bits_low"]], [prediction["bits_high"] - prediction["bits"]]]
            style = {"color": "#222222", "capsize": 6, "markersize": 8, "zorder": 3, "linewidth": 1.2}
            law.errorbar(run["parameters"], prediction["bits"], yerr=ends, fmt="x", label=label, **style)

        sizes, last = np.array([run["parameters"] for run in runs]), runs[-1]["predicted"]
        fitted, grid = Law(last["floor"], last["scale"], last["exponent"]), np.geomspace(sizes[0], sizes[-1], 100)
        label_of_law = (
            f"{fitted.floor:.2f} + {fitted.scale:.3g} N^-{fitted.exponent:.2f}, fitted to the first {len(runs) - 1}"
        )
        law.plot(grid, fitted.at(grid), color=grey, linewidth=1.2, zorder=1, label=label_of_law)

        for axes, x_label, y_label in (
            (curves, "tokens trained on", "training loss, nats per token"),
            (law, "parameters, embedding included", "bits per byte of the held-out split"),
        ):
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # figures take no mathematics in labels
            axes.set_xlabel(x_label)
            axes.set_ylabel(y_label)
            axes.legend(frameon=False, fontsize=9)
        law.set_xticks(sizes, [f"{size / 1e6:.2f} M" for size in sizes])
        law.minorticks_off()
        style_panels([curves, law])
