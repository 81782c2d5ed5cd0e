"""The table type of every room: on a console, as Markdown, CSV and JSON. Names and numbers stay text in all of them."""

import csv
import html
import io
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a tenth of a second, for what prints Markdown alone
    from rich.console import Console
    from rich.table import Table as RichTable

from llmfoundry_lite.errors import printable


@dataclass(frozen=True, slots=True)
class Table:
    """Columns of text under a title."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Collection[int] | None = None
    """Columns set to the right; None: all but the first."""
    num_keys: int = 1
    """The first so many columns say which row it is. The others were measured."""

    def print(self, console: "Console", *, keeps_words: bool = False, unbroken: Collection[int] | None = None) -> None:
        """Print the rows without the title.

        `keeps_words` prefers a long line to a word or number cut in two. With `unbroken`, cells may have several lines,
        columns stand close together, and those named in it are never folded.
        """
        print_table(console, self.columns, self.rows, self.right, keeps_words=keeps_words, unbroken=unbroken)

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
            columns = [[cells[i] for i in (0, *block)] for cells in (self.columns, *self.rows)]
            print_table(console, columns[0], columns[1:], unbroken=block and range(1, len(block) + 1))

    def markdown(self) -> list[str]:
        """Return the lines of a Markdown table, without the title."""
        return markdown_table([self.columns, *self.rows], self.right)

    def csv(self) -> str:
        content = io.StringIO(newline="")
        csv.writer(content).writerows([self.columns, *self.rows])
        return content.getvalue()

    def json(self) -> dict[str, Any]:
        rows = [list(row) for row in self.rows]
        return {"title": self.title, "columns": list(self.columns), "rows": rows, "num_keys": self.num_keys}


def markdown_table(rows: Sequence[Sequence[str]], right: Collection[int] | None = None) -> list[str]:
    """The first row is the header. Numbers are to the right: the columns `right`, by default all but the first."""
    rule = ["---:" if _is_right(i, right) else "---" for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(map(markdown_text, row)) + " |" for row in rows]
    return [lines[0], f"|{'|'.join(rule)}|", *lines[1:]]


def markdown_list(texts: Sequence[str]) -> list[str]:
    return [f"- {markdown_text(text)}" for text in texts]


def markdown_text(text: str) -> str:
    """Text that stays text in a cell or a line: no HTML, no links, no further columns or lines."""
    # A backslash before one of these would take away what is put there to make it text.
    return re.sub(r"(\\*)([|\[])", r"\1\1\\\2", html.escape(printable(text), quote=False))


def lean_table(title: str | None = None, gap: int = 0) -> "RichTable":
    """A line under the header alone, and `gap` more than one space between columns."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    return Table(
        title=title and Text(title, style="table.title"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, gap, 0, 0),
    )


def print_table(
    console: "Console",
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Collection[int] | None = None,
    *,
    keeps_words: bool = False,
    unbroken: Collection[int] | None = None,
) -> None:
    """Print a table as `Table.print` describes it."""
    from rich.console import Console
    from rich.text import Text

    table, keep = lean_table(gap=0 if unbroken is not None else 1), "" if unbroken is None else "\n"
    for i, heading in enumerate(columns):
        words = " ".join([heading, *(row[i] for row in rows)]).split()
        table.add_column(
            Text(printable(heading, keep=keep)),
            justify="right" if _is_right(i, right) else "left",
            overflow="fold",
            no_wrap=i in (unbroken or ()),
            min_width=max(map(len, words), default=0) if keeps_words else None,
        )
    for row in rows:
        table.add_row(*(Text(printable(cell, keep=keep)) for cell in row))
    if keeps_words:
        # What rich measures leaves out the padding at the edges.
        least = Console(width=1000).measure(table).minimum + len(columns)
        console = console if least <= console.width else Console(width=least, file=console.file, highlight=False)
    console.print(table)


def _is_right(column: int, right: Collection[int] | None) -> bool:
    return column > 0 if right is None else column in right
