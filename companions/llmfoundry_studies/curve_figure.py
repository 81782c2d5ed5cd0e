"""A figure of learning curves: a panel for each task and metric, in which each run has its colour.

    plot_curves(Path("curves.png"), gather_curves(all_results).curves, title="mpt-1b")

Panels of scores come first, then those of bits per byte. Around each curve, a band shows one standard error on either
side.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmfoundry_lite.report.canvas import (
    MARK_COLOR,
    REFERENCE_COLOR,
    EngFormatter,
    Patch,
    curve_color,
    fixed_settings,
    plt,
    save_figure,
    style_panels,
)
from llmfoundry_studies.curves import LearningCurve

MAX_COLUMNS = 3
MAX_PANELS = 30
"""Panels of a figure; more of them would be too small to read."""
PANEL_INCHES = (3.1, 2.3)
"""Width and height of a panel."""
MAX_MARKERS = 40
"""Most points of a curve that get a marker each; more would cover the line."""
Panels = Mapping[tuple[str, str], Sequence[LearningCurve]]
"""(task, metric) -> the curves of its panel, one for each run."""


@fixed_settings()
def plot_curves(path: Path, curves: Sequence[LearningCurve], *, title: str) -> list[str]:
    """Write a figure of learning curves, of at least one, as png, pdf or svg by the path's suffix.

    Returns a note for the reader if there are more panels than MAX_PANELS, of which only the first are drawn.
    """
    panels = group_by_panel(curves)
    shown = dict(list(panels.items())[:MAX_PANELS])
    colors = {run: curve_color(i) for i, run in enumerate(dict.fromkeys(curve.run for curve in curves))}

    # A grid of panels. The last row may have empty places, which are removed.
    num_columns = min(MAX_COLUMNS, len(shown))
    num_rows = -(-len(shown) // num_columns)
    width = max(PANEL_INCHES[0] * num_columns, 5)
    figure, grid = plt.subplots(
        num_rows,
        num_columns,
        figsize=(width, PANEL_INCHES[1] * num_rows + 0.8),
        squeeze=False,
        layout="constrained",
        dpi=130,
    )
    for empty_panel in grid.flat[len(shown) :]:
        empty_panel.remove()

    for panel, ((task, metric), panel_curves) in zip(grid.flat, shown.items(), strict=False):
        for curve in panel_curves:
            draw_curve(panel, curve, colors[curve.run])
        finish_panel(panel, task, metric, panel_curves)
    draw_legend(figure, colors, [curve for panel_curves in shown.values() for curve in panel_curves])
    figure.suptitle(title, fontsize=11)
    save_figure(figure, path)

    if len(panels) > len(shown):
        return [f"{path.name} has the first {len(shown)} of {len(panels)} curves of a task by a metric"]
    return []


def group_by_panel(curves: Sequence[LearningCurve]) -> dict[tuple[str, str], list[LearningCurve]]:
    """Group curves by (task, metric), with scores before bits per byte, and otherwise in their order."""
    panels: dict[tuple[str, str], list[LearningCurve]] = {}
    for curve in sorted(curves, key=lambda curve: curve.is_in_bits):  # a stable sort, which keeps the order otherwise
        panels.setdefault((curve.task, curve.metric), []).append(curve)
    return panels


def draw_curve(panel: Any, curve: LearningCurve, color: str) -> None:
    """Draw a curve into a matplotlib panel, with a band of one standard error on either side where it is known."""
    num_tokens = np.array([point.num_tokens for point in curve.points], float)
    scores = np.array([point.score for point in curve.points])
    errors = np.array([np.nan if point.error is None else point.error for point in curve.points])
    panel.fill_between(num_tokens, scores - errors, scores + errors, color=color, alpha=0.18, linewidth=0)
    marker = "o" if len(scores) <= MAX_MARKERS else ""
    panel.plot(num_tokens, scores, color=color, linewidth=1.5, marker=marker, markersize=3)


def finish_panel(panel: Any, task: str, metric: str, curves: Sequence[LearningCurve]) -> None:
    """Draw the line of guessing, and set title, labels and number formats of a panel."""
    chances = {curve.chance for curve in curves if curve.chance is not None}
    for chance in chances:
        panel.axhline(chance, color=REFERENCE_COLOR, linestyle="--", linewidth=1)

    panel.set_title(task, fontsize=9)
    label = "bits per byte" if curves[0].is_in_bits else metric.replace("_", " ")
    panel.set_ylabel(label, fontsize=8)
    panel.set_xlabel("training tokens", fontsize=8)
    panel.xaxis.set_major_formatter(EngFormatter(sep=""))
    panel.xaxis.set_major_locator(plt.MaxNLocator(5))
    panel.tick_params(labelsize=8)
    style_panels([panel])


def draw_legend(figure: Any, colors: Mapping[str, str], curves: Sequence[LearningCurve]) -> None:
    """Name the runs' colours, if there are several, and the meaning of bands and dashed lines, below the figure."""
    handles: list[Any] = []
    if len(colors) > 1:
        handles += [
            plt.Line2D([], [], color=color, marker="o", markersize=3, label=run) for run, color in colors.items()
        ]

    band_color = MARK_COLOR if len(colors) > 1 else next(iter(colors.values()))
    num_averaged = max(curve.num_averaged for curve in curves)
    if num_averaged > 1:
        label = f"mean of the last {num_averaged} checkpoints"
        handles.append(plt.Line2D([], [], color=band_color, label=label))
    if any(point.error is not None for curve in curves for point in curve.points):
        handles.append(Patch(color=band_color, alpha=0.18, linewidth=0, label="± standard error"))
    if any(curve.chance is not None for curve in curves):
        handles.append(plt.Line2D([], [], color=REFERENCE_COLOR, linestyle="--", linewidth=1, label="guessing"))
    if handles:
        figure.legend(
            handles=handles, loc="outside lower center", ncols=min(4, len(handles)), frameon=False, fontsize=8
        )
