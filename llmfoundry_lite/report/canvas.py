"""matplotlib as every figure of this package uses it: without a screen, with fixed settings, and saved whole.

matplotlib reads `matplotlibrc` in the working directory before the user's own. That folder may be somebody else's, and
its settings can start TeX or make a figure of gigabytes. So that file is not read, and no settings but those below have
an effect while a figure is drawn.

The functions after the settings create, style and save the panels of a figure. A panel is an `Axes` object of
matplotlib.
"""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmfoundry_lite.errors import printable
from llmfoundry_lite.files import write_atomically
from llmfoundry_lite.ranks.lean_imports import without_matplotlibrc_of_working_directory

with without_matplotlibrc_of_working_directory():
    import matplotlib

matplotlib.use("Agg")  # pyplot without a screen
import matplotlib.pyplot as plt
import matplotlib.style
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import EngFormatter, LogFormatter

__all__ = [
    "CURVE_COLORS",
    "MARK_COLOR",
    "REFERENCE_COLOR",
    "TRAIN_COLOR",
    "VALIDATION_COLOR",
    "EngFormatter",
    "Patch",
    "PlainLogFormatter",
    "create_stacked_panels",
    "curve_color",
    "escape_texts",
    "fixed_settings",
    "plt",
    "save_figure",
    "style_panels",
]

TRAIN_COLOR, VALIDATION_COLOR, REFERENCE_COLOR, MARK_COLOR = "#4c72b0", "#c44e52", "#8c8c8c", "#333333"
CURVE_COLORS = ("#4c72b0", "#dd8452", "#55a868", "#8172b3", "#937860", "#da8bc3")

SETTINGS: dict[Any, Any] = {
    "text.parse_math": False,  # "$" in a name does not start a formula
    "svg.fonttype": "none",  # SVG has texts rather than outlines of letters
    "pdf.fonttype": 42,  # PDF has TrueType fonts, whose texts can be searched
    "svg.hashsalt": "llmfoundry-lite",  # ids in an SVG are the same each time, so equal figures are equal bytes
}


class PlainLogFormatter(LogFormatter):
    """Labels of a logarithmic axis as plain numbers, such as 1, 0.1 and 0.01 in place of 1, 1e-01 and 1e-02."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        """Return the label of a tick at `x`, which is empty if the axis has too many ticks to label them all."""
        return f"{x:g}" if super().__call__(x, pos) else ""


@contextmanager
def fixed_settings() -> Iterator[None]:
    """Draw with matplotlib's defaults and SETTINGS, and restore the program's own settings afterwards.

    A file of settings or the calling program may have set others. Works as a context manager and as a decorator.
    """
    with matplotlib.style.context("default"), matplotlib.rc_context(SETTINGS):
        yield


def curve_color(index: int) -> str:
    """Return the colour of a figure's curve number `index`, counted from 0. Colours repeat after the sixth."""
    return CURVE_COLORS[index % len(CURVE_COLORS)]


def create_stacked_panels(heights: Sequence[float], size: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    """Create a matplotlib figure with panels below each other.

    heights: relative heights of the panels, from top to bottom.
    size: width and height of the figure in inches.
    options: further arguments of `plt.subplots`, such as `sharex=True`.

    Returns the figure and an iterator of the panels that can also be indexed.
    """
    figure, grid = plt.subplots(
        len(heights), 1, figsize=size, height_ratios=heights, squeeze=False, layout="constrained", dpi=130, **options
    )
    return figure, grid.flat


def style_panels(panels: Sequence[Any], *, grid: str = "both", hidden_spines: Sequence[str] = ("top", "right")) -> None:
    """Hide parts of the panels' frames (spines), and draw a faint grid along "x", "y" or "both"."""
    for panel in panels:
        panel.spines[list(hidden_spines)].set_visible(False)
        panel.grid(axis=grid, alpha=0.25, linewidth=0.6)


def escape_texts(figure: Any) -> None:
    """Escape control characters in all texts of a figure, because an SVG with one is no valid XML.

    Names of runs may be written by anybody. Tick labels are not covered: their formatter sets them again while the
    figure is drawn.
    """
    for text in figure.findobj(Text):
        text.set_text(printable(text.get_text(), keep="\n"))


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure in the format of the path's suffix, png, pdf or svg, and close it.

    The file has no date in it, so equal figures are equal bytes. It appears under its name only once it is whole.
    """
    escape_texts(figure)
    metadata_without_date = {"png": None, "pdf": {"CreationDate": None}, "svg": {"Date": None}}
    image_format = path.suffix.removeprefix(".")
    content = io.BytesIO()
    figure.savefig(content, format=image_format, metadata=metadata_without_date[image_format])
    write_atomically(path, content.getbuffer())
    plt.close(figure)
