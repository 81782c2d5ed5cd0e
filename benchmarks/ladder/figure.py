"""The ladder's figure: losses over tokens with the moves, and the law with what it predicted and what came."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import EngFormatter

from benchmarks.ladder.law import Law
from llmfoundry_lite.report.figure import curve_color, style_panels
from llmfoundry_machines.bench.frame import drawn


def plot_ladder(report: dict[str, Any], path: Path) -> None:
    """Draw the curves of all sizes, and the law. As PNG."""
    runs, grey = report["runs"], "#777777"
    with drawn(path, 2, (13, 5.2)) as (curves, law):
        for i, one in enumerate(runs):
            batches, means = np.array(one["losses"]).T
            tokens = batches * one["tokens"] / one["batches"]
            curves.plot(tokens, means, color=curve_color(i), linewidth=1.4, label=f"{one['parameters']:,} parameters")
            at = np.searchsorted(batches, [last for last, _ in one["sites"][:-1]])
            curves.plot(tokens[at], means[at], "|", color="#222222", markersize=13, markeredgewidth=1.6, zorder=5)
            law.plot(one["parameters"], one["bits"], "o", color=curve_color(i), markersize=7, zorder=4)
        curves.plot([], [], "|", color="#222222", markersize=11, label="moves to another site")
        law.plot([], [], "o", color=grey, label="measured")
        for one in filter(lambda one: one["predicted"], runs):
            found, label = one["predicted"], "predicted, 95 % interval" if one is runs[-1] else None
            ends = [[found["bits"] - found["bits_low"]], [found["bits_high"] - found["bits"]]]
            look = {"color": "#222222", "capsize": 6, "markersize": 8, "zorder": 3, "linewidth": 1.2}
            law.errorbar(one["parameters"], found["bits"], yerr=ends, fmt="x", label=label, **look)
        sizes, last = np.array([one["parameters"] for one in runs]), runs[-1]["predicted"]
        fitted, grid = Law(last["floor"], last["scale"], last["exponent"]), np.geomspace(sizes[0], sizes[-1], 100)
        words = f"{fitted.floor:.2f} + {fitted.scale:.3g} N^-{fitted.exponent:.2f}, fitted to the first {len(runs) - 1}"
        law.plot(grid, fitted.at(grid), color=grey, linewidth=1.2, zorder=1, label=words)
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
