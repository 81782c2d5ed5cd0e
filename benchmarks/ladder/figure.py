"""The ladder's figure: losses over tokens with the moves, and the law with what it predicted and what came."""

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.ladder.law import Law
from benchmarks.ladder.plan import PLACES
from llmfoundry_lite.bench.frame import drawn
from llmfoundry_lite.report.figure import clean, color, smooth


def plot_ladder(report: dict[str, Any], path: Path) -> None:
    """Draw the curves of all sizes, and the law. As PNG."""
    with drawn(path, 2, (13, 5.2)) as (curves, law):
        for i, one in enumerate(report["runs"]):
            draw_curve(curves, one, color(i))
        draw_law(law, report["runs"])
        curves.set_xscale("log")
        curves.set_xlabel("tokens trained on")
        curves.set_ylabel("loss, nats per token")
        curves.set_title("20 tokens a parameter; │ a move to the next place", fontsize=10)
        curves.legend(frameon=False, fontsize=9, title="parameters, places in turn", title_fontsize=9)
        clean([curves, law])


def draw_curve(axes: Any, one: dict[str, Any], shade: str) -> None:
    batches, losses = (np.array(values, float) for values in one["losses"])
    tokens = batches * one["tokens"] / one["batches"]
    label = f"{one['parameters']:,}: {' '.join(place for place, _, _ in one['legs'])}"
    axes.plot(tokens, smooth(losses, 4), color=shade, linewidth=1.4, label=label)
    for _, first, _ in one["legs"][1:]:
        at = int(np.searchsorted(batches, first))
        axes.plot(tokens[at], smooth(losses, 4)[at], "|", color=shade, markersize=14, markeredgewidth=2)


def draw_law(axes: Any, runs: list[dict[str, Any]]) -> None:
    sizes = np.array([one["parameters"] for one in runs], float)
    last = runs[-1]["predicted"]
    for i, one in enumerate(runs):
        axes.plot(one["parameters"], one["bits"], "o", color=color(i), markersize=7, zorder=4)
    if last:
        fitted, grid = Law(**last["law"]), np.geomspace(sizes[0] * 0.9, sizes[-1] * 1.1, 100)
        words = f"{fitted.floor:.3f} + {fitted.scale:.3g} N^-{fitted.exponent:.3f}, of {len(runs) - 1} sizes"
        axes.plot(grid, fitted.at(grid), color="#777777", linewidth=1.2, zorder=1, label=words)
    for i, one in enumerate(runs):
        if found := one["predicted"]:
            ends = [[found["expected"] - found["low"]], [found["high"] - found["expected"]]]
            look = {"color": "#222222", "capsize": 5, "zorder": 3, "markersize": 8}
            label = "predicted, 95 % interval" if one is runs[-1] else None
            axes.errorbar(one["parameters"], found["expected"], yerr=ends, fmt="x", label=label, **look)
    axes.plot([], [], "o", color="#777777", label="measured")
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size / 1e6:.2f} M" for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("parameters N, embedding included")
    axes.set_ylabel("bits per byte of the held-out split")
    axes.set_title("the law, fitted before the largest was trained", fontsize=10)
    axes.legend(frameon=False, fontsize=9)
