"""Figure of how far the scores of models are from those of a first one, with their confidence intervals.

    plot_differences(panels, path, title=…)

`evaluation/pairs.py` computes the points. The colours, and the format of the file by its suffix, are those of
`canvas.py`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmfoundry_lite.errors import printable
from llmfoundry_lite.evaluation.pairs import DifferencePoint
from llmfoundry_lite.report.canvas import (
    MARK_COLOR,
    REFERENCE_COLOR,
    create_stacked_panels,
    curve_color,
    fixed_settings,
    plt,
    save_figure,
    style_panels,
)


@fixed_settings()
def plot_differences(
    panels: Mapping[str, Mapping[str, Mapping[str, DifferencePoint]]], path: Path, *, title: str
) -> None:
    """Write a figure of how far the scores of models are from those of a first model, with confidence intervals.

    `panels` maps the label of a panel's x axis to its rows, a row's name (a task) to its models, and a model's name to
    its point:

        {"accuracy, ours minus base": {"arc_easy/0-shot": {"ours": DifferencePoint(…)}}}

    Rows go downwards; a row whose name starts with `mean` is set apart by a line. A difference that may be chance has a
    hollow marker, and one that was not tested a cross.
    """
    # Collect the models of all rows, in the order in which they first appear.
    models: list[str] = []
    for rows in panels.values():
        for points in rows.values():
            models += [model for model in points if model not in models]

    # A row has a height of at least 1, which is 0.38 inches in the figure. Each panel has room for its label.
    row_height = max(1, 0.55 * len(models))
    heights = [max(1, len(rows)) * row_height + 0.6 for rows in panels.values()]
    size = (8, 1.3 + 0.38 * sum(heights) + 0.3 * len(panels))
    figure, grid = create_stacked_panels(heights, size)

    has_untested = False
    for panel, (x_label, rows) in zip(grid, panels.items(), strict=True):
        panel.axvline(0, color=MARK_COLOR, linewidth=1, zorder=1)
        for row_number, (name, points) in enumerate(rows.items()):
            _draw_difference_row(panel, row_number, name, points, models)
        panel.set_yticks(range(len(rows)), [printable(name) for name in rows], fontsize=9)
        panel.set_ylim(len(rows) - 0.5, -0.5)

        # Choose limits that have zero in the middle, and 8 % of room beside the farthest end of an interval.
        distances: list[float] = []
        for points in rows.values():
            for point in points.values():
                distances += [abs(point.difference), abs(point.low), abs(point.high)]
                has_untested = has_untested or not point.is_tested
        half_range = 1.08 * max(distances, default=0) or 1
        panel.set_xlim(-half_range, half_range)
        panel.set_xlabel(x_label, fontsize=9)
        panel.tick_params(axis="y", length=0)
        style_panels([panel], grid="x", hidden_spines=("top", "right", "left"))

    _draw_differences_legend(figure, models, has_untested=has_untested)
    grid[0].set_title(title, fontsize=11)
    save_figure(figure, path)


def _draw_difference_row(
    panel: Any, row_number: int, name: str, points: Mapping[str, DifferencePoint], models: Sequence[str]
) -> None:
    """Draw one row of a panel of differences: for each model of the row, its interval and its marker.

    name: the row's name. If it starts with `mean`, markers are diamonds, and there is a line above the row.
    points: the row's models with their points.
    models: the models of all rows. They decide colours and heights, so that a model that is missing in a row leaves a
        gap.

    Models lie close to each other around y = `row_number`, together over 0.7 of a row's height.
    """
    is_mean = name.startswith("mean")
    if is_mean and row_number > 0:
        panel.axhline(row_number - 0.5, color=REFERENCE_COLOR, linewidth=0.8)

    step = 0.7 / max(1, len(models))
    for i, model in enumerate(models):
        if model not in points:
            continue
        point = points[model]
        color = curve_color(i)
        y = row_number + (i - (len(models) - 1) / 2) * step
        marker = "D" if is_mean else "o"
        if not point.is_tested:
            marker = "x"
        panel.plot([point.low, point.high], [y, y], solid_capstyle="butt", zorder=2, color=color, linewidth=1.6)
        panel.plot(
            point.difference,
            y,
            marker,
            zorder=3,
            color=color,
            linewidth=1.6,
            markerfacecolor=color if point.is_detected else "white",
            markersize=7,
        )


def _draw_differences_legend(figure: Any, models: Sequence[str], *, has_untested: bool) -> None:
    """Name the models' colours, if there are several, and the meaning of filled and hollow markers and of crosses."""
    markers = []  # (marker, colour of the edge, colour of the face, label)
    if len(models) > 1:
        markers = [("o", curve_color(i), curve_color(i), model) for i, model in enumerate(models)]
    markers.append(("o", "#555555", "#555555", "a difference (corrected p < 0.05)"))
    markers.append(("o", "#555555", "white", "no detectable difference"))
    if has_untested:
        markers.append(("x", "#555555", "#555555", "not tested: too few items"))

    line_style: dict[str, Any] = {"markersize": 6, "linewidth": 1.6}
    handles = [
        plt.Line2D([], [], marker=marker, color=edge, markerfacecolor=face, label=label, **line_style)
        for marker, edge, face, label in markers
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), frameon=False, fontsize=9)
