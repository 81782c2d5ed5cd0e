"""What all figures have in common: pyplot without a screen, colours, and how they become files.

A figure is PNG, PDF or SVG, as the suffix of its path says.
"""

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


def escape_texts(figure: Any) -> None:
    """Escape control characters in all texts but labels of ticks, which are made anew from their formatter: names may
    come from anybody, and an SVG with one is no XML."""
    for text in figure.findobj(Text):
        text.set_text(printable(text.get_text(), keep="\n"))


def write(figure: Any, path: Path) -> None:
    """Text stays text in SVG and PDF, and the same figure is the same bytes."""
    escape_texts(figure)
    with matplotlib.rc_context({"svg.fonttype": "none", "pdf.fonttype": 42, "svg.hashsalt": "llmfoundry-lite"}):
        undated = {"png": None, "pdf": {"CreationDate": None}, "svg": {"Date": None}}
        figure.savefig(path, metadata=undated[path.suffix.removeprefix(".")])
    plt.close(figure)
