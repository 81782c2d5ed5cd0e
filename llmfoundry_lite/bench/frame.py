"""Parts that all benches share: conditions, rounds in turns, ratios, a report on the console and in files."""

import datetime
import json
import os
import platform
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil
import torch
from rich.console import Console

from llmfoundry_lite.devices import device_name
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.files import check_answer_replaceable
from llmfoundry_lite.hardware import GIB
from llmfoundry_lite.report.tables import Table

T = TypeVar("T")
PIPE_WIDTH = 140
"""Characters of a line where there is no terminal."""
SCHEMA = 2
"""Version of the JSON: raised when older reports can no longer be compared."""


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
    """Raises ConfigError for a name that is not known."""
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


def spread(values: Iterable[float]) -> Spread:
    values = list(values)
    return Spread(min(values), statistics.median(values), max(values))


def ratios(above: Iterable[float], below: Iterable[float]) -> Spread:
    """Divide two sides within each round that both have."""
    return spread(a / b for a, b in zip(above, below, strict=False))


# -------------------------------------------------------------------------------------------------------- reports


def measured_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], num_keys: int = 1) -> Table:
    """Build a table whose columns of numbers are set to the right."""
    right = [i for i in range(len(columns)) if not any(re.match(r"[^\W\d]", row[i]) for row in rows)]
    return Table(title, columns, rows, right, num_keys)


def open_console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=PIPE_WIDTH, highlight=False)


def show(console: Console, *tables: Table, notes: Sequence[str] = ()) -> None:
    for table in tables:
        console.print(f"\n{table.title}", markup=False, style="italic")
        table.print(console, keeps_words=True)
    for note in notes:
        console.print(note, markup=False)


def write_report(
    folder: Path,
    name: str,
    heading: str,
    command: str,
    report: dict[str, Any],
    *parts: Table | Sequence[str] | str,
    asked: Sequence[str] = (),
) -> None:
    """Write NAME.json, which holds everything, and NAME.md, which people read.

    `parts` are tables, paragraphs or lists of notes. `asked` names keys of `report` that the caller chose: reports
    that differ in one of them cannot be compared (`compare.py`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    check_answer_replaceable(folder, name)
    tables = [part.json() for part in parts if isinstance(part, Table)]
    frame = {"schema": SCHEMA, "bench": name, "asked": {key: report[key] for key in asked}, "tables": tables}
    (folder / f"{name}.json").write_text(json.dumps(frame | report) + "\n")
    conditions = f"`{command}`, {report['date']}, {report['machine']}, torch {report['torch']}"
    blocks = [f"# {heading}", f"{conditions}; load average before it {report['load_average']:.1f}."]
    for part in parts:
        if isinstance(part, Table):
            blocks += [f"{part.title[:1].upper()}{part.title[1:]}:"] if part.title else []
            lines = part.markdown()
        else:
            lines = [part] if isinstance(part, str) else [f"- {note}" for note in part]
        blocks += ["\n".join(lines)] if lines else []
    (folder / f"{name}.md").write_text("\n\n".join(blocks) + "\n")


def tell(
    report: dict[str, Any],
    *tables: Table,
    notes: Sequence[str] = (),
    name: str,
    heading: str,
    command: str,
    asked: Sequence[str] = (),
    plot: Callable[[dict[str, Any], Path], None] | None = None,
    out: Path | None = None,
) -> None:
    """Show the tables and notes; with `out`, write NAME.json, .md and, if there is something to plot, NAME.png."""
    show(open_console(), *tables, notes=notes)
    if out is None:
        return
    figure = [f"![the figure]({name}.png)"] if plot is not None else []
    write_report(out, name, heading, command, report, *tables, notes, *figure, asked=asked)
    if plot is not None:
        plot(report, out / f"{name}.png")


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


def save_figure(figure: Any, path: Path, title: str = "") -> None:
    from llmfoundry_lite.report.figure import write

    if title:
        figure.suptitle(title, fontsize=10)
    write(figure, path)
