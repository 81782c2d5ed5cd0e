"""Parts that all benches share: conditions, rounds in turns, ratios, a report on the console and in files.

A bench describes the machine (`describe_conditions`), measures its cases in rounds (`take_turns`) or until the time is
up (`within_minutes`), builds tables from its rows (`tabulate`), and passes report and tables to `tell`, which prints
them and writes NAME.json, NAME.md and NAME.png. Figures are drawn within `drawn`. The measuring itself is in `steps.py`
and in each bench.
"""

import datetime
import json
import os
import platform
import re
import statistics
import string
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil
import torch
from rich.console import Console

from llmfoundry_lite.devices import device_name
from llmfoundry_lite.errors import ConfigError, printable
from llmfoundry_lite.files import check_result_replaceable, write_atomically
from llmfoundry_lite.hardware import GIB, REPORT_SCHEMA
from llmfoundry_lite.tables import Table, markdown_list

T = TypeVar("T")
PIPE_WIDTH = 140
"""Characters of a line if the output is not a terminal, such as a pipe or a file."""


class Spread(NamedTuple):
    """Least, median and largest of several rounds."""

    least: float
    median: float
    most: float

    def __format__(self, spec: str) -> str:
        """Format as `1.50 (1.20 to 1.80)`, or as one number if all three are equal. `spec` formats each of them."""
        least, median, most = (format(number, spec or ".2f") for number in self)
        return median if self.least == self.most else f"{median} ({least} to {most})"

    def __str__(self) -> str:
        return format(self)


def describe_conditions() -> dict[str, Any]:
    """Return the date, machine, device, threads, load, and versions, which begin every report.

    Call it before anything is measured, so that the load average is other programs'.
    """
    return {
        "date": datetime.date.today().isoformat(),
        "machine": describe_machine(),
        "device": device_name(),
        "num_threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def describe_machine() -> str:
    """Return processor, cores and memory, as in `AMD EPYC (family 25, model 1), 16 cores, 62 GiB`."""
    facts = {}
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        # Lines are `model name : AMD EPYC`, once for each core. The last core's count.
        for line in cpu_info.read_text().splitlines():
            key, _, fact = line.partition(":")
            facts[key.strip()] = fact.strip()

    processor = facts.get("model name", platform.machine())
    if "cpu family" in facts:
        # Clouds cut names short: "AMD EPYC" may be of any year.
        processor += f" (family {facts['cpu family']}, model {facts.get('model', '?')})"
    memory_gib = psutil.virtual_memory().total / GIB
    return f"{processor}, {os.cpu_count()} cores, {memory_gib:.0f} GiB"


def check_names(option: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigError, which begins with `option`, for the first of the `given` names that is not in `known`."""
    for name in given:
        if name not in known:
            raise ConfigError(f"{option}: {name!r} given, expected one of {', '.join(known)}")


def format_command(command: str, more: Sequence[str] = (), **options: Any) -> str:
    """Return the command line that measures the same again.

    Options are numbers, strings or lists of them. `more` are positional arguments, which come last. For example,

        format_command("bench scaling", ["precision=fp32"], devices=[1, 2], seq_len=64)

    is `bench scaling --devices 1,2 --seq-len 64 precision=fp32`.
    """
    words = [command]
    for name, setting in options.items():
        items = [setting] if isinstance(setting, str | int | float) else setting
        text = ",".join(f"{item:g}" if isinstance(item, float) else str(item) for item in items)
        words.append(f"--{name.replace('_', '-')} {text}")
    return " ".join([*words, *more])


# --------------------------------------------------------------------------------------------------------- rounds


def take_turns(
    sides: Mapping[str, Callable[[], T]], num_rounds: int, console: Console
) -> tuple[dict[str, list[T]], dict[str, str]]:
    """Measure every side once in each round, so that a slow moment of the machine affects all of them.

    `sides` maps the name of each side to the function that measures it. Returns each side's results, one for each round
    that it completed, and the reason for each side that raised RuntimeError. Such a side is not measured again.
    """
    results: dict[str, list[T]] = {name: [] for name in sides}
    failed: dict[str, str] = {}
    for round_number in range(1, num_rounds + 1):
        for name, measure in sides.items():
            if name in failed:
                continue
            console.print(f"round {round_number}/{num_rounds}: {name}", highlight=False)
            try:
                results[name].append(measure())
            except RuntimeError as error:
                failed[name] = str(error).strip().splitlines()[-1]
    return results, failed


def within_minutes(
    minutes: float, cases: Iterable[tuple[str, T]], console: Console, left_out: list[str]
) -> Iterator[tuple[T, float]]:
    """Print the name of each case, then yield the case and the seconds that are left, until `minutes` have passed.

    `cases` are pairs of a name and anything that the caller needs. A case that is yielded in time is not interrupted.
    The names of those that come too late are appended to `left_out`.
    """
    deadline = time.monotonic() + 60 * minutes
    for name, case in cases:
        left_seconds = deadline - time.monotonic()
        if left_seconds > 0:
            console.print(name, markup=False)
            yield case, left_seconds
        else:
            left_out.append(name)


def note_left_out(names: Sequence[str]) -> list[str]:
    """Return a note, as `tell` takes them, on the cases that were left out. Empty if there are none."""
    return [f"no time for: {'; '.join(names)}"] if names else []


def spread(values: Iterable[float]) -> Spread:
    """Return the least, the median and the largest of some numbers. There must be at least one."""
    numbers = list(values)
    return Spread(min(numbers), statistics.median(numbers), max(numbers))


def ratios(above: Iterable[float], below: Iterable[float]) -> Spread:
    """Return the spread of one side's results over the other's, divided within each round that both have."""
    return spread(numerator / denominator for numerator, denominator in zip(above, below, strict=False))


# -------------------------------------------------------------------------------------------------------- reports

Column = tuple[str, str | Callable[[Mapping[str, Any]], str]]
"""A heading, and how to make a cell from a row: a format, such as `{seconds:.3f}`, or a function of the row."""


def tabulate(title: str, columns: Sequence[Column], rows: Iterable[Mapping[str, Any]], num_keys: int = 1) -> Table:
    """Build a table from dicts. The first `num_keys` columns identify a row.

    A cell stays empty if the row lacks a value that the cell's format names, or has None for it. A row with an `error`
    has only its keys and, in the next column, the error in place of what could not be measured.
    """
    cells = []
    for row in rows:
        if row.get("error"):
            keys = [format_cell(cell_format, row) for _, cell_format in columns[:num_keys]]
            num_empty = len(columns) - num_keys - 1
            cells.append([*keys, row["error"], *[""] * num_empty])
        else:
            cells.append([format_cell(cell_format, row) for _, cell_format in columns])
    return measured_table(title, [heading for heading, _ in columns], cells, num_keys)


def format_cell(cell_format: str | Callable[[Mapping[str, Any]], str], row: Mapping[str, Any]) -> str:
    """Return the cell of a row. `cell_format` is the second part of a Column."""
    if callable(cell_format):
        return cell_format(row)
    # `{seconds:.3f}` names `seconds`, and `{seconds[0]}` does too.
    names = [name.partition("[")[0] for _, name, _, _ in string.Formatter().parse(cell_format) if name]
    if any(row.get(name) is None for name in names):
        return ""
    return cell_format.format_map(row)


def measured_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], num_keys: int = 1) -> Table:
    """Build a table of cells that are already text. Columns without a cell that begins with a letter are aligned to the
    right."""
    right_columns = [
        index for index in range(len(columns)) if not any(re.match(r"[^\W\d]", row[index]) for row in rows)
    ]
    return Table(title, columns, rows, right_columns, num_keys)


def open_console() -> Console:
    """Return a console as wide as the terminal, or PIPE_WIDTH wide if there is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=PIPE_WIDTH, highlight=False)


def show(console: Console, *parts: Table | Sequence[str] | str) -> None:
    """Print the parts of a report that belong on a console: tables, and lists of notes.

    Paragraphs, which are strings, are left out. They are for the page in Markdown.
    """
    for part in parts:
        if isinstance(part, Table):
            console.print(f"\n{printable(part.title)}", markup=False, style="italic")
            part.print(console)
        elif not isinstance(part, str):
            for note in part:
                console.print(printable(note), markup=False)


def tell(
    report: dict[str, Any],
    *parts: Table | Sequence[str] | str,
    name: str,
    heading: str,
    command: str,
    asked: Sequence[str] = (),
    plot: Callable[[dict[str, Any], Path], None] | None = None,
    out: Path | None = None,
) -> None:
    """Print a report. With `out`, also write it to that folder as NAME.json, NAME.md and, if `plot` is given, NAME.png.

    `report` is all that was measured, with the conditions. The parts are what is shown of it: tables, paragraphs
    (strings) and lists of notes. The JSON holds the report and the tables, the Markdown the heading, the conditions and
    the parts. `plot` draws the report to a path. `asked` names the keys of the report that the caller of the bench
    chose: `compare.py` refuses two reports that differ in one of them.

    Raises ConfigError if `out` has files of these names that no bench wrote. The parts are printed even then.
    """
    try:
        if out is not None:
            tables = [part.json() for part in parts if isinstance(part, Table)]
            chosen = {key: report[key] for key in asked}
            header = {"schema": REPORT_SCHEMA, "bench": name, "asked": chosen, "tables": tables}
            conditions = f"`{command}`, {report['date']}, {report['machine']}, torch {report['torch']}"
            conditions += f"; load average before the run {report['load_average']:.1f}."
            figure_link = f"![the figure]({name}.png)" if plot is not None else ()

            out.mkdir(parents=True, exist_ok=True)
            check_result_replaceable(out, name)
            # The JSON comes first, because by it the next bench knows that the other files are a bench's too.
            write_atomically(out / f"{name}.json", json.dumps(header | report) + "\n")
            write_atomically(out / f"{name}.md", markdown_page(f"# {heading}", conditions, *parts, figure_link))
            if plot is not None:
                plot(report, out / f"{name}.png")
    finally:
        # Measurements may have taken an hour, so they are printed even if they cannot be written.
        show(open_console(), *parts)


def markdown_page(*parts: Table | Sequence[str] | str) -> str:
    """Return tables, paragraphs (strings) and lists of notes as a page in Markdown. Empty parts are left out."""
    blocks = []
    for part in parts:
        if isinstance(part, Table):
            if part.title:
                blocks.append(f"{part.title[:1].upper()}{part.title[1:]}:")
            lines = part.markdown()
        elif isinstance(part, str):
            lines = [part]
        else:
            lines = markdown_list(part)
        if lines:
            blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


@contextmanager
def drawn(path: Path, num_panels: int, size: tuple[float, float], title: str = "", **options: Any) -> Iterator[Any]:
    """Give the caller `num_panels` axes side by side to draw into, then write the figure to `path`.

    `size` is in inches, and `options` are those of `plt.subplots`. Yields an array of axes:

        with drawn(path, 2, (9, 3.4), "a title") as (rates, memory):
            rates.plot(x, y)

    Nothing is written if the caller raises.
    """
    # matplotlib is slow to import, and benches without a figure do not need it.
    from llmfoundry_lite.report.canvas import fixed_settings, plt, save_figure

    settings = {"figsize": size, "layout": "constrained", "dpi": 150, "squeeze": False, **options}
    with fixed_settings():
        figure, axes_by_row = plt.subplots(1, num_panels, **settings)
        yield axes_by_row[0]
        if title:
            figure.suptitle(title, fontsize=10)
        save_figure(figure, path)


def label_axes(axes: Any, ticks: Sequence[int], xlabel: str, ylabel: str = "", *, from_zero: bool = True) -> None:
    """Label axes, with ticks on a logarithmic x axis, a light grid and no frame. `from_zero`: let y begin at 0."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    if from_zero:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
