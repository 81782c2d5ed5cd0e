"""Parts of all figures: pyplot without a screen, panels, colours, and files (PNG, PDF or SVG by their suffix)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.text import Text

from llmfoundry_lite.errors import printable

matplotlib.rcParams["text.parse_math"] = False  # names are text: "$" is no formula

TRAIN, VALIDATION, REFERENCE = "#4c72b0", "#c44e52", "#8c8c8c"
CURVES = ("#4c72b0", "#dd8452", "#55a868", "#8172b3", "#937860", "#da8bc3")


def color(number: int) -> str:
    """Return the colour of a curve, counted from 0."""
    return CURVES[number % len(CURVES)]


def stack(heights: Sequence[float], size: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    """Return a figure and its panels, one below the other."""
    figure, grid = plt.subplots(
        len(heights), 1, figsize=size, height_ratios=heights, squeeze=False, layout="constrained", dpi=130, **options
    )
    return figure, grid.flat


def clean(panels: Sequence[Any], *, grid: str = "both", hidden: Sequence[str] = ("top", "right")) -> None:
    """Leave out frames and draw a faint grid."""
    for axes in panels:
        axes.spines[list(hidden)].set_visible(False)
        axes.grid(axis=grid, alpha=0.25, linewidth=0.6)


def escape_texts(figure: Any) -> None:
    """Escape control characters in all texts but labels of ticks, which their formatter makes anew.

    Names are untrusted, and an SVG with a control character is no XML.
    """
    for text in figure.findobj(Text):
        text.set_text(printable(text.get_text(), keep="\n"))


def write(figure: Any, path: Path) -> None:
    """Write and close a figure. Equal figures are equal bytes; text stays text in SVG and PDF."""
    escape_texts(figure)
    with matplotlib.rc_context({"svg.fonttype": "none", "pdf.fonttype": 42, "svg.hashsalt": "llmfoundry-lite"}):
        undated = {"png": None, "pdf": {"CreationDate": None}, "svg": {"Date": None}}
        figure.savefig(path, metadata=undated[path.suffix.removeprefix(".")])
    plt.close(figure)
