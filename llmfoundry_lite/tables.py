"""Tables of text, which can be printed on a console and written as Markdown, LaTeX, CSV and JSON.

`Table` is the table of every command and report. Cells are text, also numbers, so that they look the same everywhere.
Names in cells may come from other people, so each output escapes what would be active in it: control characters on a
console, HTML and links in Markdown, commands in LaTeX, formulas in CSV.
"""

import csv
import html
import io
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # importing rich takes a tenth of a second, which a command that prints Markdown does not need
    from rich.console import Console

from llmfoundry_lite.errors import printable

PIPE_WIDTH = 160
"""Width in characters of output to a file or a pipe, which have no width of their own."""
MIN_KEY_WIDTH = 12
"""Smallest width in characters to which `Table.print_blocks` folds the first column."""
FORMULA_SIGNS = ("=", "+", "-", "@", "\t", "\r", "\n")
"""Characters with which a formula begins in spreadsheets, some of which skip white space before it."""
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?%?")
"""A number such as `-1.5`, `+2e-3` or `40%`, which begins like a formula but is harmless."""


LATEX_TEXTS = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "''",
    "±": r"$\pm$",
    **{character: rf"\{character}" for character in "&%$#_{}"},
}
"""Character that LaTeX reads as a command, or that not every font has -> how to write it in a text."""
SIGN_OF_NUMBER = re.compile(r"(?<![\w.])[-+](?=\.?\d)")
"""The sign of a number, such as that of `-0.5`. The hyphen of `icl-0` is none."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text under a title, which can be shown on a console and as Markdown, LaTeX, CSV and JSON."""

    title: str
    columns: Sequence[str]
    """Heading of each column."""
    rows: Sequence[Sequence[str]]
    """Cells of each row, one for each column."""
    right: Collection[int] | None = None
    """Indices of the columns that are aligned to the right; None: all but the first."""
    num_keys: int = 1
    """Number of leading columns that identify a row. The others were measured."""

    def is_right(self, column: int) -> bool:
        """Return whether the column of this index is aligned to the right."""
        if self.right is None:
            return column > 0
        return column in self.right

    def print(self, console: "Console", unbroken: Collection[int] | None = None) -> None:
        """Print the headings and rows, without the title. Control characters and credentials are not printed.

        By default, long cells are folded between words, and lines become wider than the console if a single word or
        number would not fit. With `unbroken`, cells may have several lines, the columns stand closer together, and only
        the columns with an index in `unbroken` keep their lines whole.
        """
        from rich import box  # imported late, because it takes a tenth of a second
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text

        # Cells of a table with `unbroken` may have line ends, which `printable` would otherwise escape.
        keeps_words_whole = unbroken is None
        line_ends = "" if keeps_words_whole else "\n"
        gap = 1 if keeps_words_whole else 0
        table = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap, 0, 0))
        for index, heading in enumerate(self.columns):
            # A column is at least as wide as its longest word.
            min_width = None
            if keeps_words_whole:
                cells = [heading, *(row[index] for row in self.rows)]
                words = " ".join(cells).split()
                min_width = max(map(len, words), default=0)
            table.add_column(
                Text(printable(heading, keep=line_ends)),
                justify="right" if self.is_right(index) else "left",
                overflow="fold",
                no_wrap=index in (unbroken or ()),
                min_width=min_width,
            )
        for row in self.rows:
            table.add_row(*(Text(printable(cell, keep=line_ends)) for cell in row))

        # Print on a wider console if the widest words do not fit.
        if keeps_words_whole:
            # Rich does not measure more than the console's width, so that of a very wide one is measured. The padding
            # at the edges is not part of the measure.
            needed_width = Console(width=1000).measure(table).minimum + len(self.columns)
            if needed_width > console.width:
                console = Console(width=needed_width, file=console.file, highlight=False)
        console.print(table)

    def print_blocks(self, console: "Console") -> None:
        """Print the title and the table, in several blocks of columns if it is wider than the console.

        Each block has as many columns as fit, and repeats the first column, which names the rows. With five columns of
        which two fit beside the first, the blocks are columns 0 1 2 and columns 0 3 4. Cells may have several lines.
        """
        from rich.text import Text

        # The width of each column is that of its longest line.
        widths = []
        for cells in zip(self.columns, *self.rows, strict=True):
            widths.append(max(len(line) for cell in cells for line in cell.split("\n")))
        # A long first column is folded to a third of the console, so that each block has room for others.
        first_column_width = min(widths[0], max(MIN_KEY_WIDTH, console.width // 3))
        available_width = console.width - first_column_width

        # Put each further column into the last block, or into a new one if that is full.
        blocks: list[list[int]] = [[]]  # indices of columns
        block_width = 0
        for index, width in enumerate(widths[1:], start=1):
            width_with_gap = 1 + width
            is_full = block_width + width_with_gap > available_width
            if blocks[-1] and is_full:
                blocks.append([])
                block_width = 0
            blocks[-1].append(index)
            block_width += width_with_gap

        console.print(Text(printable(self.title), style="italic"))
        for number, block in enumerate(blocks):
            if number > 0:
                console.print()
            indices = [0, *block]
            headings = [self.columns[index] for index in indices]
            rows = [[row[index] for index in indices] for row in self.rows]
            # Only the first column is folded. Without any further column, it is printed like a plain table.
            Table("", headings, rows).print(console, block and range(1, len(indices)))

    def markdown(self) -> list[str]:
        """Return the lines of a Markdown table, without the title.

        | task | accuracy |
        |---|---:|
        | arc_easy | 0.41 |
        """
        lines = []
        for cells in (self.columns, *self.rows):
            escaped = [markdown_text(cell) for cell in cells]
            lines.append(f"| {' | '.join(escaped)} |")
        heading, *rows = lines
        rules = ["---:" if self.is_right(index) else "---" for index in range(len(self.columns))]
        return [heading, f"|{'|'.join(rules)}|", *rows]

    def latex(self, caption: str) -> list[str]:
        """Return the lines of a LaTeX table with a caption, for the package booktabs.

        A table that is wider than the line is scaled down to it, if the document also uses the package graphicx.

        \\begin{table}
        \\centering
        \\small
        \\setlength{\\tabcolsep}{4pt}
        \\providecommand{\\resizebox}[3]{#3}
        \\caption{Zero-shot accuracy.}
        \\resizebox{\\ifdim\\width>\\linewidth\\linewidth\\else\\width\\fi}{!}{%
        \\begin{tabular}{lr}
        \\toprule
        task & accuracy \\\\
        \\midrule
        arc\\_easy & 0.41 \\\\
        \\bottomrule
        \\end{tabular}}
        \\end{table}
        """
        alignment = "".join("r" if self.is_right(index) else "l" for index in range(len(self.columns)))
        lines = []
        for cells in (self.columns, *self.rows):
            line = " & ".join(latex_text(cell) for cell in cells)
            # After the end of a row, LaTeX reads * and [ as arguments of the command that ends it.
            if line.startswith(("*", "[")):
                line = "{}" + line
            lines.append(rf"{line} \\")
        heading, *rows = lines
        return [
            r"\begin{table}",
            r"\centering",
            r"\small",
            r"\setlength{\tabcolsep}{4pt}",
            r"\providecommand{\resizebox}[3]{#3}",  # without graphicx, the table keeps its width
            rf"\caption{{{latex_text(caption)}}}",
            r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
            rf"\begin{{tabular}}{{{alignment}}}",
            r"\toprule",
            heading,
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}}",
            r"\end{table}",
        ]

    def without(self, dropped: Collection[str]) -> "Table":
        """Return the table without the columns of these headings."""
        kept = [index for index, heading in enumerate(self.columns) if heading not in dropped]
        columns = [self.columns[index] for index in kept]
        rows = [[row[index] for index in kept] for row in self.rows]
        right = [new_index for new_index, index in enumerate(kept) if self.is_right(index)]
        return Table(self.title, columns, rows, right)

    def transposed(self, first_heading: str) -> "Table":
        """Return the table with its columns as rows, below `first_heading` and the cells of the first column."""
        columns = [first_heading, *(row[0] for row in self.rows)]
        rows: list[list[str]] = []
        for index, heading in enumerate(self.columns[1:], start=1):
            rows.append([heading, *(row[index] for row in self.rows)])
        return Table(self.title, columns, rows)

    def csv(self) -> str:
        """Return the headings and rows as CSV, in which no cell can be run as a spreadsheet's formula."""
        content = io.StringIO(newline="")
        writer = csv.writer(content)
        for row in (self.columns, *self.rows):
            writer.writerow([csv_text(cell) for cell in row])
        return content.getvalue()

    def json(self) -> dict[str, Any]:
        """Return a JSON record of the table: its `title`, `columns`, `rows` and `num_keys`."""
        record = asdict(self)
        del record["right"]  # only of use to print the table
        return record


def console() -> "Console":
    """Return a console for standard output: as wide as its terminal, or PIPE_WIDTH if it goes to a file or a pipe."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(width=width, highlight=False)


def csv_text(text: str) -> str:
    """Return text for a cell of a CSV file that no spreadsheet runs as a formula.

    Names may come from other people, so text that begins like a formula gets an apostrophe before it, which makes it
    text to a spreadsheet: `=1+1` becomes `'=1+1`. Numbers, which may begin with a minus, are not changed.
    """
    may_be_formula = text.startswith(FORMULA_SIGNS)
    is_number = NUMBER.fullmatch(text) is not None
    return f"'{text}" if may_be_formula and not is_number else text


def latex_text(text: str) -> str:
    """Escape text for LaTeX, so that it cannot be a command, and write the signs of numbers as in formulas.

    `arc_easy` becomes `arc\\_easy`, and `-0.5` becomes `$-$0.5`. Letters outside of ASCII stay as they are.
    """
    characters = [LATEX_TEXTS.get(character, character) for character in printable(text)]
    return SIGN_OF_NUMBER.sub(lambda sign: f"${sign[0]}$", "".join(characters))


def markdown_list(texts: Sequence[str]) -> list[str]:
    """Return the lines of a Markdown list, `- text` for each text, escaped."""
    return [f"- {markdown_text(text)}" for text in texts]


def markdown_text(text: str) -> str:
    """Escape text for Markdown, so that it cannot make HTML, links, or further columns or lines of a table.

    `a|b` becomes `a\\|b`, and `<b>` becomes `&lt;b&gt;`.
    """
    escaped = html.escape(printable(text), quote=False)
    # `|` and `[` get a backslash. Backslashes right before them are doubled, because one would undo the other.
    return re.sub(r"(\\*)([|\[])", r"\1\1\\\2", escaped)
