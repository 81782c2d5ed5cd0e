"""Parts that all benches share: conditions, rounds in turns, ratios, a report on the console and in files."""

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
"""Characters of a line where there is no terminal."""


class Spread(NamedTuple):
    """Least, median and largest of several rounds."""

    least: float
    median: float
    most: float

    def __format__(self, spec: str) -> str:
        """Format as `1.50 (1.20 to 1.80)`; one number if all are equal."""
        least, median, most = (format(value, spec or ".2f") for value in self)
        return median if self.least == self.most else f"{median} ({least} to {most})"

    def __str__(self) -> str:
        return format(self)


def describe_conditions() -> dict[str, Any]:
    """Describe date, machine, versions and the machine's load."""
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
    """Name processor, cores and memory."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = facts.get("model name", platform.machine())
    if "cpu family" in facts:  # clouds cut names short: "AMD EPYC" is of any year
        name += f" (family {facts['cpu family']}, model {facts.get('model', '?')})"
    memory = psutil.virtual_memory().total / GIB
    return f"{name}, {os.cpu_count()} cores, {memory:.0f} GiB"


def check_names(option: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigError for a name that is not known."""
    for name in given:
        if name not in known:
            raise ConfigError(f"{option}: {name!r} given, expected one of {', '.join(known)}")


def format_command(command: str, more: Sequence[str] = (), **options: Any) -> str:
    """Return the command line that measures the same again. Lists get commas, names dashes; `more` comes last."""
    words = [command]
    for name, value in options.items():
        values = [value] if isinstance(value, str | int | float) else value
        text = ",".join(f"{one:g}" if isinstance(one, float) else str(one) for one in values)
        words.append(f"--{name.replace('_', '-')} {text}")
    return " ".join([*words, *more])


# --------------------------------------------------------------------------------------------------------- rounds


def take_turns(
    sides: Mapping[str, Callable[[], T]], num_rounds: int, console: Console
) -> tuple[dict[str, list[T]], dict[str, str]]:
    """Measure every side once in each round, so that a slow moment of the machine meets all of them.

    Returns each side's results, and the reason for each side that raised RuntimeError and was not run again.
    """
    found: dict[str, list[T]] = {name: [] for name in sides}
    failed: dict[str, str] = {}
    for number in range(1, num_rounds + 1):
        for name, measure in sides.items():
            if name in failed:
                continue
            console.print(f"round {number}/{num_rounds}: {name}", highlight=False)
            try:
                found[name].append(measure())
            except RuntimeError as error:
                failed[name] = str(error).strip().splitlines()[-1]
    return found, failed


def within_minutes(
    minutes: float, cases: Iterable[tuple[str, T]], console: Console, left_out: list[str]
) -> Iterator[tuple[T, float]]:
    """Yield each case, after its name is printed, and the seconds left. Cases that get no time go to `left_out`."""
    deadline = time.monotonic() + 60 * minutes
    for name, case in cases:
        if (left := deadline - time.monotonic()) > 0:
            console.print(name, markup=False)
            yield case, left
        else:
            left_out.append(name)


def note_left_out(names: Sequence[str]) -> list[str]:
    return [f"no time for: {'; '.join(names)}"] if names else []


def spread(values: Iterable[float]) -> Spread:
    values = list(values)
    return Spread(min(values), statistics.median(values), max(values))


def ratios(above: Iterable[float], below: Iterable[float]) -> Spread:
    """Divide two sides within each round that both have."""
    return spread(a / b for a, b in zip(above, below, strict=False))


# -------------------------------------------------------------------------------------------------------- reports

Column = tuple[str, str | Callable[[Mapping[str, Any]], str]]
"""A heading, and the format of a cell, such as `{seconds:.3f}`, or a function that returns the cell of a row."""


def tabulate(title: str, columns: Sequence[Column], rows: Iterable[Mapping[str, Any]], num_keys: int = 1) -> Table:
    """Build a table of rows by name. A cell is empty where the row lacks a value or has None.

    A row with an `error` has it after its keys, in the place of what was to be measured.
    """
    cells = []
    for row in rows:
        failed = [row["error"], *[""] * (len(columns) - num_keys - 1)] if row.get("error") else None
        shown = columns if failed is None else columns[:num_keys]
        cells.append([*(fill(show, row) for _, show in shown), *(failed or ())])
    return measured_table(title, [heading for heading, _ in columns], cells, num_keys)


def fill(show: str | Callable[[Mapping[str, Any]], str], row: Mapping[str, Any]) -> str:
    if callable(show):
        return show(row)
    names = [name.partition("[")[0] for _, name, _, _ in string.Formatter().parse(show) if name]
    return "" if any(row.get(name) is None for name in names) else show.format_map(row)


def measured_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], num_keys: int = 1) -> Table:
    """Build a table whose columns of numbers are set to the right."""
    right = [i for i in range(len(columns)) if not any(re.match(r"[^\W\d]", row[i]) for row in rows)]
    return Table(title, columns, rows, right, num_keys)


def open_console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=PIPE_WIDTH, highlight=False)


def show(console: Console, *parts: Table | Sequence[str] | str) -> None:
    """Print tables and lists of notes; paragraphs are for files alone."""
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
    """Show the parts: tables, paragraphs, lists of notes. With `out`, write NAME.json, .md and what `plot` draws, .png.

    The JSON holds the report and the tables. `asked` names keys of the report that the caller chose: reports that
    differ in one of them cannot be compared (`compare.py`).
    """
    try:
        if out is not None:
            tables = [part.json() for part in parts if isinstance(part, Table)]
            chosen = {key: report[key] for key in asked}
            frame = {"schema": REPORT_SCHEMA, "bench": name, "asked": chosen, "tables": tables}
            figure = f"![the figure]({name}.png)" if plot is not None else ()
            conditions = f"`{command}`, {report['date']}, {report['machine']}, torch {report['torch']}"
            conditions += f"; load average before the run {report['load_average']:.1f}."

            out.mkdir(parents=True, exist_ok=True)
            check_result_replaceable(out, name)
            # The record first: by it the next bench knows that the other files are its own.
            write_atomically(out / f"{name}.json", json.dumps(frame | report) + "\n")
            write_atomically(out / f"{name}.md", markdown_page(f"# {heading}", conditions, *parts, figure))
            if plot is not None:
                plot(report, out / f"{name}.png")
    finally:  # what was measured is shown, whether or not it can be written
        show(open_console(), *parts)


def markdown_page(*parts: Table | Sequence[str] | str) -> str:
    """Return tables, paragraphs and lists of notes as a page in Markdown."""
    blocks = []
    for part in parts:
        if isinstance(part, Table):
            blocks += [f"{part.title[:1].upper()}{part.title[1:]}:"] if part.title else []
            lines = part.markdown()
        else:
            lines = [part] if isinstance(part, str) else markdown_list(part)
        blocks += ["\n".join(lines)] if lines else []
    return "\n\n".join(blocks) + "\n"


@contextmanager
def drawn(path: Path, num_panels: int, size: tuple[float, float], title: str = "", **options: Any) -> Iterator[Any]:
    """Write a figure of so many panels side by side after the caller has drawn into them."""
    from llmfoundry_lite.report.canvas import fixed_settings, plt
    from llmfoundry_lite.report.figure import save_figure

    look = {"figsize": size, "layout": "constrained", "dpi": 150, "squeeze": False, **options}
    with fixed_settings():
        figure, panels = plt.subplots(1, num_panels, **look)
        yield panels[0]
        if title:
            figure.suptitle(title, fontsize=10)
        save_figure(figure, path)


def label_axes(axes: Any, ticks: Sequence[int], xlabel: str, ylabel: str = "", *, from_zero: bool = True) -> None:
    """Draw powers of two along x, a light grid and no frame."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    if from_zero:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
