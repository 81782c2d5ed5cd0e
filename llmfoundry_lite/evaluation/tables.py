"""Results of several models as one table: tasks as columns, models as rows, the average last."""

import csv
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from llmfoundry_lite.evaluation.harness import Record, Results


def columns(all_results: Sequence[Results]) -> list[str]:
    """Every task that any model has, in order."""
    return list(dict.fromkeys(task for results in all_results for task in results.tasks))


def cell(record: Record | None) -> tuple[str, str]:
    """(number, its standard error), as text."""
    if record is None:
        return "", ""
    metric = record["metric"]
    error = record.get(f"{metric}_stderr")
    return f"{record[metric]:.3f}", "" if error is None else f"{error:.3f}"


def print_table(all_results: Sequence[Results], console: Console) -> None:
    table = Table(title=f"{all_results[0].suite}, accuracy ± standard error", title_justify="left")
    table.add_column("model")
    names = columns(all_results)
    for name in [*names, "average"]:
        table.add_column(name.replace("/", "\n"), justify="right")
    for results in all_results:
        cells = ["\n±".join(part for part in cell(results.tasks.get(name)) if part) for name in names]
        table.add_row(results.model, *cells, _average(results))
    if any("chance" in record for results in all_results for record in results.tasks.values()):
        table.add_section()
        table.add_row("chance", *(_chance(all_results, name) for name in names), "", style="dim")
    console.print(table)


def write_tables(all_results: Sequence[Results], folder: Path) -> list[Path]:
    """table.md and table.csv, with the same numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    names = columns(all_results)
    rows = [["model", *names, "average"]]
    for results in all_results:
        rows.append(
            [results.model, *(" ± ".join(filter(None, cell(results.tasks.get(n)))) for n in names), _average(results)]
        )
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|---|" + "---:|" * (len(names) + 1))
    markdown, plain = folder / "table.md", folder / "table.csv"
    markdown.write_text("\n".join(lines) + "\n")
    with plain.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["model", *(part for n in names for part in (n, f"{n} stderr")), "average"])
        for results in all_results:
            parts = (part for n in names for part in cell(results.tasks.get(n)))
            writer.writerow([results.model, *parts, _average(results)])
    return [markdown, plain]


def _average(results: Results) -> str:
    return "" if results.average is None else f"{results.average:.3f}"


def _chance(all_results: Sequence[Results], name: str) -> str:
    records = (results.tasks.get(name) for results in all_results)
    return next((f"{record['chance']:.3f}" for record in records if record and "chance" in record), "")
