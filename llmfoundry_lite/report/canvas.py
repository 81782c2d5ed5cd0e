"""matplotlib as every figure of ours uses it: without a screen, and by our own settings alone.

matplotlib reads `matplotlibrc` in the working directory before the user's own. That folder may be somebody else's, and
its settings can start TeX or make a figure of gigabytes. So that file is not read, and no settings but ours have an
effect while a figure is drawn.
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

__all__ = ["EngFormatter", "LogFormatter", "Patch", "Text", "our_settings", "plt"]

SETTINGS: dict[Any, Any] = {
    "text.parse_math": False,  # names are text: "$" is no formula
    "svg.fonttype": "none",  # text stays text
    "pdf.fonttype": 42,
    "svg.hashsalt": "llmfoundry-lite",  # equal figures are equal bytes
}


@contextmanager
def our_settings() -> Iterator[None]:
    """Draw by matplotlib's defaults and SETTINGS, whatever a file or the program has set. It is a decorator, too."""
    with matplotlib.style.context("default"), matplotlib.rc_context(SETTINGS):
        yield
