"""Texts of a page that other people wrote, in a size and form that a page can show."""

import re
from collections.abc import Sequence

from llmfoundry_lite.config.task_types import BPB
from llmfoundry_lite.errors import printable

MAX_NAME_CHARACTERS = 120
MAX_TEXT_CHARACTERS = 4_000
"""Most characters of a question, an answer or a choice. A longer one is cut in its middle."""
MAX_NOTES = 60
SURROGATES = re.compile("[\ud800-\udfff]")


def short_name(text: str) -> str:
    """Return a name in one line of at most MAX_NAME_CHARACTERS, without control characters and credentials."""
    name = printable(text)
    if len(name) <= MAX_NAME_CHARACTERS:
        return name
    half = MAX_NAME_CHARACTERS // 2
    return f"{name[: half - 1]}…{name[-half:]}"


def label_of_metric(metric: str) -> str:
    """Return a metric's name as a reader sees it: "acc per token" for `acc_per_token`."""
    return "bits per byte of the right answer" if metric == BPB else metric.replace("_", " ")


def shorten(text: str) -> str:
    """Return a text in at most about MAX_TEXT_CHARACTERS, with a note in its middle of how much is left out.

    Halves of surrogate pairs, which JSON may have and HTML may not, become replacement characters.
    """
    text = SURROGATES.sub("\ufffd", text)
    num_left_out = len(text) - MAX_TEXT_CHARACTERS
    if num_left_out <= 0:
        return text
    half = MAX_TEXT_CHARACTERS // 2
    return f"{text[:half]} […{num_left_out:,} characters left out…] {text[-half:]}"


def limit_notes(all_notes: Sequence[str]) -> list[str]:
    """Return at most MAX_NOTES notes, with a last one that says how many are left out."""
    shown = [printable(note) for note in all_notes[:MAX_NOTES]]
    if len(all_notes) > MAX_NOTES:
        shown.append(f"{len(all_notes) - MAX_NOTES:,} more notes are left out here; the console has them.")
    return shown
