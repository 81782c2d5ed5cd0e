"""Pictures of a page as SVG to be placed inline in HTML, drawn with matplotlib. `page.py` places them.

`draw_differences` draws how far a model is from the first one, task by task, with intervals, and `draw_curves` draws
learning curves. A picture has no colours of its own: its parts refer to the page's CSS variables, so that it follows a
light or dark theme. Texts are texts, in the page's font. Equal numbers give equal bytes.
"""

import io
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from llmfoundry_lite.errors import printable
from llmfoundry_lite.evaluation.records import BITS_METRICS
from llmfoundry_lite.report.canvas import CURVE_COLORS, MARK_COLOR, curve_color, escape_texts, fixed_settings, plt
from llmfoundry_studies.curve_figure import (
    MAX_COLUMNS,
    MAX_PANELS,
    PANEL_INCHES,
    draw_curve,
    draw_legend,
    finish_panel,
    group_by_panel,
)
from llmfoundry_studies.curves import LearningCurve
from llmfoundry_studies.gauntlet import GAUNTLET
from llmfoundry_studies.ranking import Difference

SVG = "http://www.w3.org/2000/svg"
LINK = "{http://www.w3.org/1999/xlink}href"

INK, PAPER = "#000000", "#ffffff"  # matplotlib's own colours of lines and grounds
MUTED, LINE = "#010101", "#010102"
BETTER, WORSE, UNDECIDED = "#010103", "#010104", "#010105"
VARIABLES: Mapping[str, str] = {
    INK: "var(--ink)",
    PAPER: "var(--paper)",
    MARK_COLOR: "var(--muted)",
    MUTED: "var(--muted)",
    LINE: "var(--line)",
    BETTER: "var(--better)",
    WORSE: "var(--worse)",
    UNDECIDED: "var(--undecided)",
    **{color: f"var(--curve-{number})" for number, color in enumerate(CURVE_COLORS, start=1)},
}
"""Colours that stand for a variable of the page's style sheet while matplotlib draws, and that variable."""

WIDTH_INCHES = 8.0
ROW_INCHES = 0.27
MARGIN_INCHES = 0.75
"""Height of a panel's axis and the space around it."""
MAX_ROWS = 150
"""Most rows that a panel has. More would be taller than a reader looks at, and the table has them all."""
MAX_LABEL_CHARACTERS = 42
LEGEND_INCHES = 0.5
MEAN = "mean of "
"""Beginning of the name of the mean of several tasks."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture, with what a reader hears who does not see it."""

    svg: str
    description: str
    note: str = ""
    """A sentence on what the picture leaves out; empty if it leaves nothing out."""


@fixed_settings()
def draw_differences(rows: Sequence[Difference], name: str) -> Picture:
    """Draw the differences of two models or recipes, a row for each task, with the intervals that decide.

    rows: at least one difference, in the order from top to bottom.
    name: word by which the picture's ids differ from those of other pictures on the page.

    Accuracies, scores of a gauntlet and bits per byte have a panel each, because their units differ. A difference that
    is detected is a filled point in the colour of its sign, one that is not detected a grey ring, and one that was not
    tested a grey cross.
    """
    panels = _divide_into_panels(rows)
    num_left_out = sum(max(len(panel_rows) - MAX_ROWS, 0) for _, panel_rows in panels)
    panels = [(label, panel_rows[:MAX_ROWS]) for label, panel_rows in panels]

    heights = [len(panel_rows) * ROW_INCHES + MARGIN_INCHES for _, panel_rows in panels]
    figure, all_axes = plt.subplots(
        len(panels),
        figsize=(WIDTH_INCHES, sum(heights)),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for axes, (label, panel_rows) in zip(all_axes[:, 0], panels, strict=True):
        _draw_panel(axes, label, panel_rows)
    svg = as_inline_svg(figure, name, _describe(rows))
    plt.close(figure)

    note = f"The picture leaves out {num_left_out:,} tasks, which the table has." if num_left_out else ""
    return Picture(svg, _describe(rows), note)


def _divide_into_panels(rows: Sequence[Difference]) -> list[tuple[str, list[Difference]]]:
    """Divide rows by the unit of their differences. Returns the label and the rows of each panel that has any."""
    rows_of_panel: dict[str, list[Difference]] = {}
    subtraction = f"{_shorten(rows[0].other)} minus {_shorten(rows[0].first)}"
    labels = {
        "accuracy": f"difference in accuracy, {subtraction}",
        "gauntlet": f"difference in the gauntlet's scores, {subtraction}",
        "bits": f"difference in bits per byte, {subtraction} (left is better)",
    }
    for row in rows:
        panel = "accuracy"
        if row.metric in BITS_METRICS:
            panel = "bits"
        elif row.metric == GAUNTLET:
            panel = "gauntlet"
        rows_of_panel.setdefault(panel, []).append(row)
    return [(label, rows_of_panel[panel]) for panel, label in labels.items() if panel in rows_of_panel]


def _draw_panel(axes: Any, label: str, rows: Sequence[Difference]) -> None:
    """Draw a point with its interval for each row into a matplotlib panel, the first row at the top."""
    positions = range(len(rows))
    axes.axvline(0, color=MUTED, linewidth=0.8, zorder=1)
    for position, row in zip(positions, rows, strict=True):
        color = UNDECIDED
        if row.is_detected:
            color = BETTER if row.is_other_better else WORSE
        if row.low is not None and row.high is not None:
            axes.plot([row.low, row.high], [position, position], color=color, linewidth=2, zorder=2)
        marker = "D" if row.task.startswith(MEAN) else "o"
        if not row.is_tested:
            marker = "x"
        axes.plot(
            [row.difference],
            [position],
            marker=marker,
            markersize=7,
            markeredgewidth=1.8,
            color=color,
            markerfacecolor=color if row.is_detected else PAPER,
            zorder=3,
        )

    axes.set_yticks(positions, [_shorten(row.task) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel(label, color=MUTED, fontsize=10)
    axes.margins(x=0.06)
    axes.grid(axis="x", color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_facecolor("none")
    axes.tick_params(axis="y", length=0, labelsize=10, labelcolor=INK)
    axes.tick_params(axis="x", length=0, labelsize=9, labelcolor=MUTED)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _describe(rows: Sequence[Difference]) -> str:
    """Return a sentence for readers who do not see the picture."""
    num_better = sum(row.is_detected and row.is_other_better for row in rows)
    num_worse = sum(row.is_detected and not row.is_other_better for row in rows)
    num_not_tested = sum(not row.is_tested for row in rows)
    num_others = len(rows) - num_better - num_worse - num_not_tested
    not_tested = f", {num_not_tested} not tested" if num_not_tested else ""
    return printable(
        f"Differences of {rows[0].other} from {rows[0].first} with their intervals: {num_better} better, "
        f"{num_worse} worse, {num_others} without a detected difference{not_tested}. The table below has the numbers."
    )


def _shorten(text: str) -> str:
    """Return a label in at most MAX_LABEL_CHARACTERS, without control characters."""
    label = printable(text)
    if len(label) <= MAX_LABEL_CHARACTERS:
        return label
    return label[: MAX_LABEL_CHARACTERS - 1] + "…"


# ---------------------------------------------------------------------------------------------------- learning curves


@fixed_settings()
def draw_curves(curves: Sequence[LearningCurve], name: str) -> Picture:
    """Draw learning curves, at least one: a panel for each task and metric, a colour for each run.

    `name` is the word by which the picture's ids differ from those of other pictures on the page.
    """
    all_panels = list(group_by_panel(curves).items())
    panels = all_panels[:MAX_PANELS]
    runs = dict.fromkeys(curve.run for curve in curves)
    colors = {run: curve_color(number) for number, run in enumerate(runs)}

    num_rows = -(-len(panels) // MAX_COLUMNS)
    figure, grid = plt.subplots(
        num_rows,
        MAX_COLUMNS,
        figsize=(PANEL_INCHES[0] * MAX_COLUMNS, PANEL_INCHES[1] * num_rows + LEGEND_INCHES),
        squeeze=False,
        layout="constrained",
    )
    for empty_axes in grid.flat[len(panels) :]:
        empty_axes.remove()
    for axes, ((task, metric), curves_of_panel) in zip(grid.flat, panels, strict=False):
        for curve in curves_of_panel:
            draw_curve(axes, curve, colors[curve.run])
        finish_panel(axes, _shorten(task), metric, curves_of_panel)
        axes.set_facecolor("none")
    draw_legend(figure, {_shorten(run): color for run, color in colors.items()}, curves)
    escape_texts(figure)

    description = f"Scores of {printable(', '.join(runs))} over the tokens trained, a panel for each task and metric."
    svg = as_inline_svg(figure, name, description)
    plt.close(figure)
    num_left_out = len(all_panels) - len(panels)
    note = f"The picture leaves out {num_left_out:,} more tasks and metrics." if num_left_out else ""
    return Picture(svg, description, note)


# -------------------------------------------------------------------------------------------------------- inline SVG


def as_inline_svg(figure: Any, name: str, description: str) -> str:
    """Return a matplotlib figure as an `<svg>` element for an HTML page.

    Ids get the prefix `name`, because several pictures on a page would otherwise have the same ones. matplotlib's style
    sheet is removed, which would apply to the whole page, and so are its metadata.
    """
    content = io.StringIO()
    figure.patch.set_visible(False)
    with warnings.catch_warnings():
        # Characters that matplotlib's font lacks are drawn by the browser, which has other fonts.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(content, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(content.getvalue())

    for parent in root.iter():
        for child in list(parent):
            if child.tag in (f"{{{SVG}}}metadata", f"{{{SVG}}}style"):
                parent.remove(child)
    for element in root.iter():
        _adapt_attributes(element, name)

    # The page decides the size, and keeps the ratio by the viewBox.
    del root.attrib["width"], root.attrib["height"]
    root.set("role", "img")
    root.set("aria-label", description)
    return _without_prefixes(root)


def _adapt_attributes(element: ElementTree.Element, name: str) -> None:
    """Give an element's ids their prefix, and let its colours and font be those of the page."""
    for key, value in list(element.attrib.items()):
        if key == "id":
            element.set(key, f"{name}-{value}")
        elif key == LINK:
            # `href` alone is known to every browser, and needs no namespace.
            del element.attrib[key]
            element.set("href", f"#{name}-{value.removeprefix('#')}")
        elif key == "clip-path":
            element.set(key, value.replace("url(#", f"url(#{name}-"))
        elif key == "style":
            without_font = re.sub(r"font-family:[^;]*;? ?", "", value)
            element.set(key, _with_variables(without_font))


def _with_variables(style: str) -> str:
    """Return a style with the page's CSS variables in place of the colours that stand for them."""
    for color, variable in VARIABLES.items():
        style = style.replace(color, variable)
    return style


def _without_prefixes(root: ElementTree.Element) -> str:
    """Return an SVG element as text, with tags as HTML expects them: `<svg>` instead of `<ns0:svg>`."""
    for element in root.iter():
        element.tag = element.tag.removeprefix(f"{{{SVG}}}")
    return ElementTree.tostring(root, encoding="unicode", short_empty_elements=False)
