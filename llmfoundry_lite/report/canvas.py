"""matplotlib as every figure of this package uses it: without a screen, and with fixed settings.

matplotlib reads `matplotlibrc` in the working directory before the user's own. That folder may be somebody else's, and
its settings can start TeX or make a figure of gigabytes. So that file is not read, and no settings but those below have
an effect while a figure is drawn.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llmfoundry_lite.ranks.lean_imports import without_matplotlibrc_of_working_directory

with without_matplotlibrc_of_working_directory():
    import matplotlib

matplotlib.use("Agg")  # pyplot without a screen
import matplotlib.pyplot as plt
import matplotlib.style
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import EngFormatter, LogFormatter

__all__ = ["EngFormatter", "Patch", "PlainLogFormatter", "Text", "fixed_settings", "plt"]

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
