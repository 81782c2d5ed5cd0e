"""The type of every table that is shown: on a console, as Markdown, CSV and JSON. Names and numbers stay text."""

import csv
import html
import io
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a tenth of a second, for what prints Markdown alone
    from rich.console import Console

from llmfoundry_lite.errors import printable

PIPE_WIDTH = 160
"""Columns of a line that goes to a file or pipe, where nothing says how wide it may be."""


FORMULA_SIGNS = ("=", "+", "-", "@", "\t", "\r", "\n")
"""Characters with which a formula begins in spreadsheets, some of which skip white space before it."""
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?%?")


@dataclass(frozen=True, slots=True)
class Table:
    """Columns of text under a title."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Collection[int] | None = None
    """Columns set to the right; None: all but the first."""
    num_keys: int = 1
    """Leading columns that identify a row. The others were measured."""

    def is_right(self, column: int) -> bool:
        return column > 0 if self.right is None else column in self.right

    def print(self, console: "Console", unbroken: Collection[int] | None = None) -> None:
        """Print the rows without the title, in long lines rather than with a word or number cut in two.

        With `unbroken`, cells may have several lines, columns stand close together, and those named in it alone are
        never folded.
        """
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text

        keep, gap = ("", 1) if unbroken is None else ("\n", 0)
        table = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap, 0, 0))
        for i, heading in enumerate(self.columns):
            words = " ".join([heading, *(row[i] for row in self.rows)]).split()
            table.add_column(
                Text(printable(heading, keep=keep)),
                justify="right" if self.is_right(i) else "left",
                overflow="fold",
                no_wrap=i in (unbroken or ()),
                min_width=max(map(len, words), default=0) if unbroken is None else None,
            )
        for row in self.rows:
            table.add_row(*(Text(printable(cell, keep=keep)) for cell in row))
        if unbroken is None:
            # Rich's measure leaves out the padding at the edges.
            least = Console(width=1000).measure(table).minimum + len(self.columns)
            console = console if least <= console.width else Console(width=least, file=console.file, highlight=False)
        console.print(table)

    def print_blocks(self, console: "Console") -> None:
        """Print the title, and the columns that fit; the others follow below, with the first column repeated."""
        from rich.text import Text

        columns = zip(self.columns, *self.rows, strict=True)
        widths = [max(len(line) for cell in cells for line in cell.split("\n")) for cells in columns]
        room = console.width - min(widths[0], max(12, console.width // 3))
        blocks: list[list[int]] = [[]]
        for i, width in enumerate(widths[1:], start=1):
            if blocks[-1] and sum(1 + widths[j] for j in blocks[-1]) + 1 + width > room:
                blocks.append([])
            blocks[-1].append(i)
        console.print(Text(printable(self.title), style="italic"))
        for number, block in enumerate(blocks):
            if number:
                console.print()
            columns, *rows = [[cells[i] for i in (0, *block)] for cells in (self.columns, *self.rows)]
            Table("", columns, rows).print(console, block and range(1, len(block) + 1))

    def markdown(self) -> list[str]:
        """Return the lines of a Markdown table, without the title."""
        rule = ["---:" if self.is_right(i) else "---" for i in range(len(self.columns))]
        lines = ["| " + " | ".join(map(markdown_text, row)) + " |" for row in (self.columns, *self.rows)]
        return [lines[0], f"|{'|'.join(rule)}|", *lines[1:]]

    def csv(self) -> str:
        content = io.StringIO(newline="")
        csv.writer(content).writerows([csv_text(cell) for cell in row] for row in (self.columns, *self.rows))
        return content.getvalue()

    def json(self) -> dict[str, Any]:
        facts = asdict(self)
        del facts["right"]
        return facts


def console() -> "Console":
    """Return standard output as a console: as wide as its terminal, or PIPE_WIDTH."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)


def csv_text(text: str) -> str:
    """Return text for a cell of a CSV file. What a spreadsheet would run as a formula begins with an apostrophe, which
    makes it text. Names may come from anybody. Numbers stay numbers."""
    return f"'{text}" if text.startswith(FORMULA_SIGNS) and not NUMBER.fullmatch(text) else text


def markdown_list(texts: Sequence[str]) -> list[str]:
    return [f"- {markdown_text(text)}" for text in texts]


def markdown_text(text: str) -> str:
    """Escape text for a cell or a line: no HTML, no links, no further columns or lines."""
    # A backslash before one of these would take away what is put there to make it text.
    return re.sub(r"(\\*)([|\[])", r"\1\1\\\2", html.escape(printable(text), quote=False))
