"""Figures of evaluations, drawn from numbers.

plot_curves(panels, path, x_label=…)       a score along a run, in a panel for each task
plot_differences(panels, path, title=…)    how far models are from a first one, with their intervals
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.ticker import MaxNLocator

from llmfoundry_lite.errors import printable
from llmfoundry_lite.report.figure import REFERENCE, clean, color, plt, stack, write


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel of small multiples."""

    title: str
    y_label: str
    points: dict[str, list[tuple[float, float, float]]] = field(default_factory=dict)
    """Name -> (x, y, error of y)."""
    chance: float | None = None
    """Value of y by guessing."""


def plot_curves(panels: Sequence[Panel], path: Path, *, x_label: str) -> None:
    """Plot small multiples, at most three to a row."""
    num_columns = min(3, len(panels))
    num_rows = -(-len(panels) // num_columns)
    figure, grid = plt.subplots(
        num_rows, num_columns, figsize=(4 * num_columns, 3 * num_rows), squeeze=False, layout="constrained", dpi=130
    )
    for axes in grid.flat[len(panels) :]:
        axes.axis("off")
    for axes, panel in zip(grid.flat, panels, strict=False):
        for name, points in panel.points.items():
            x, y, error = zip(*points, strict=True)
            axes.errorbar(x, y, yerr=error, marker="o", markersize=4, linewidth=1.5, capsize=2, label=name)
        if panel.chance is not None:
            axes.axhline(panel.chance, color=REFERENCE, linestyle="--", linewidth=1.2, zorder=1)
            axes.annotate(
                *(f"chance, {panel.chance:.2f}", (1, panel.chance), (0, 2)),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                color="#555555",
                ha="right",
                va="bottom",
                fontsize=8,
            )
        axes.set_title(panel.title, fontsize=10)
        axes.set_xlabel(x_label)
        axes.set_ylabel(panel.y_label)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
        axes.xaxis.set_major_formatter("{x:,.0f}")
    clean(list(grid.flat[: len(panels)]))
    if any(len(panel.points) > 1 for panel in panels):
        handles, labels = grid.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    write(figure, path)


def plot_differences(
    panels: Mapping[str, Mapping[str, Mapping[str, tuple[float, float, float, bool]]]], path: Path, *, title: str
) -> None:
    """Plot differences from a first model: panel -> row -> model -> (difference, low, high, whether it is detected).

    Those that may be chance are hollow. Rows go downwards; one that starts with `mean` is set apart.
    """
    models = list(dict.fromkeys(model for rows in panels.values() for points in rows.values() for model in points))
    step = 0.7 / max(1, len(models))
    heights = [max(1, len(rows)) * max(1, 0.55 * len(models)) + 0.6 for rows in panels.values()]
    figure, grid = stack(heights, (8, 1.3 + 0.38 * sum(heights) + 0.3 * len(panels)))
    for axes, (x_label, rows) in zip(grid, panels.items(), strict=True):
        axes.axvline(0, color="#333333", linewidth=1, zorder=1)
        for row, (name, points) in enumerate(rows.items()):
            if name.startswith("mean") and row:
                axes.axhline(row - 0.5, color=REFERENCE, linewidth=0.8)
            for i, model in enumerate(models):
                if model in points:
                    place = row + (i - (len(models) - 1) / 2) * step
                    _plot_interval(axes, points[model], place, color(i), is_mean=name.startswith("mean"))
        axes.set_yticks(range(len(rows)), list(map(printable, rows)), fontsize=9)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        farthest = max(
            (abs(end) for points in rows.values() for point in points.values() for end in point[:3]), default=0
        )
        axes.set_xlim(-1.08 * farthest or -1, 1.08 * farthest or 1)
        axes.set_xlabel(x_label, fontsize=9)
        axes.tick_params(axis="y", length=0)
        clean([axes], grid="x", hidden=("top", "right", "left"))
    looks = [(color(i), color(i), model) for i, model in enumerate(models) if len(models) > 1]
    looks += [
        ("#555555", "#555555", "a difference (corrected p < 0.05)"),
        ("#555555", "white", "none to be told from chance"),
    ]
    handles = [
        plt.Line2D([], [], color=edge, marker="o", markerfacecolor=face, markersize=6, linewidth=1.6, label=label)
        for edge, face, label in looks
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), frameon=False, fontsize=9)
    grid[0].set_title(title, fontsize=11)
    write(figure, path)


def _plot_interval(axes: Any, point: tuple[float, float, float, bool], y: float, color: str, *, is_mean: bool) -> None:
    difference, low, high, is_detected = point
    axes.plot([low, high], [y, y], color=color, linewidth=2.4 if is_mean else 1.6, solid_capstyle="butt", zorder=2)
    axes.plot(
        [difference],
        [y],
        "D" if is_mean else "o",
        color=color,
        markerfacecolor=color if is_detected else "white",
        markeredgewidth=1.6,
        markersize=7,
        zorder=3,
    )
