"""Two reports of one bench side by side: two machines, or two software stacks on one machine.

llmfoundry-lite bench compare there/scaling.json here/scaling.json

Reads what `frame.tell` wrote, of any bench: rows that have the same keys, and the numbers that both print.
Refuses what cannot be compared, and says why.
"""

import re
from pathlib import Path
from typing import Any

from llmfoundry_lite.bounded import read_json
from llmfoundry_lite.errors import DataError, join_with_or
from llmfoundry_lite.hardware import REPORT_SCHEMA
from llmfoundry_lite.tables import Table
from llmfoundry_machines.bench.frame import describe_conditions, measured_table, tell

CONDITIONS = {
    "machine": "machine",
    "device": "device",
    "num_threads": "threads",
    "python": "Python",
    "torch": "torch",
    "load_average": "load average",
}
"""Key of a report -> its name in the text."""


def run(first: Path, second: Path, out: Path | None = None) -> list[Table]:
    """Print each table of the bench for both, then the differing conditions; write compare-BENCH.json and .md.

    Raises DataError for files that cannot be compared.
    """
    a, b = read(first), read(second)
    check_comparable(a, b, (str(first), str(second)))
    tables = [table for pair in zip(a["tables"], b["tables"], strict=True) if (table := beside(*pair))]
    if not tables:
        raise DataError(f"{first} and {second}: no row of one is in the other; measure the same points on both")
    notes = [*describe_differences(a, b), *left_over(a, b)]
    report = describe_conditions() | {"of": a["bench"], "first": a, "second": b}
    heading, command = f"`bench {a['bench']}` twice, side by side", f"llmfoundry-lite bench compare {first} {second}"
    tell(report, *tables, notes, name=f"compare-{a['bench']}", heading=heading, command=command, out=out)
    return tables


def read(path: Path) -> dict[str, Any]:
    """Read a report. Raises DataError for a file that is none, and for one of another schema."""
    try:
        report = read_json(path, "a report")
    except (OSError, ValueError) as error:
        reason = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else "is not JSON"
        raise DataError(f"{path}: {reason}; give the JSON that a bench wrote with --out") from None
    name = str(report.get("bench", path.stem)) if isinstance(report, dict) else path.stem
    again = f"measure {name.removeprefix('compare-')} again, with --out FOLDER"
    if not isinstance(report, dict):
        raise DataError(f"{path}: is not a bench report; {again}")
    missing = [key for key in ("schema", "bench", "asked", "tables") if key not in report]
    if missing:
        raise DataError(f"{path}: an older release's report, or none: it has no {join_with_or(missing)}; {again}")
    if report["schema"] != REPORT_SCHEMA:
        raise DataError(f"{path}: has schema {report['schema']}, this release reads {REPORT_SCHEMA}; {again}")
    tables = report["tables"]
    are_tables = isinstance(tables, list) and all(
        isinstance(one, dict) and {"title", "columns", "rows", "num_keys"} <= {*one} for one in tables
    )
    is_named = re.fullmatch(r"[\w-]+", name) is not None  # the name is part of a file's name
    if not are_tables or not is_named or not isinstance(report["asked"], dict):
        raise DataError(f"{path}: is not a bench report; {again}")
    return report


def check_comparable(a: dict[str, Any], b: dict[str, Any], names: tuple[str, str]) -> None:
    """Raise DataError unless both reports are of one bench with the same settings."""
    if a["bench"] != b["bench"]:
        raise DataError(f"{names[0]} is of bench {a['bench']}, {names[1]} of bench {b['bench']}; compare one bench's")
    for key in dict.fromkeys([*a["asked"], *b["asked"]]):
        mine, theirs = (report["asked"].get(key) for report in (a, b))
        if mine != theirs:
            raise DataError(f"{key} is {mine} in {names[0]} and {theirs} in {names[1]}; measure one of them again")
    if len(a["tables"]) != len(b["tables"]):
        raise DataError(f"{names[0]} has {len(a['tables'])} tables and {names[1]} {len(b['tables'])}; measure again")


def beside(a: dict[str, Any], b: dict[str, Any]) -> Table | None:
    """Build a table of numbers that share row and column, and the second over the first. None without any."""
    num_keys, others = a["num_keys"], rows_of(b)
    rows = []
    for key, row in rows_of(a).items():
        for heading, mine in zip(a["columns"][num_keys:], row[num_keys:], strict=True):
            theirs = dict(zip(b["columns"], others.get(key, ()), strict=False)).get(heading, "")
            numbers = number_of(mine), number_of(theirs)
            if None in numbers:
                continue
            ratio = f"{numbers[1] / numbers[0]:.2f}" if numbers[0] and numbers[1] is not None else ""
            rows.append([*key, heading, mine, theirs, ratio])
    columns = [*a["columns"][:num_keys], "what", "first", "second", "second over first"]
    return measured_table(a["title"], columns, rows, num_keys + 1) if rows else None


def rows_of(table: dict[str, Any]) -> dict[tuple[str, ...], list[str]]:
    return {tuple(row[: table["num_keys"]]): row for row in table["rows"]}


def number_of(cell: str) -> float | None:
    """Parse `1,234.5`, `12.3%`, and the median of `1.50 (1.20 to 1.80)`; None for what is no number."""
    found = re.match(r"[+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?(?=$|%|\s)", cell)
    return float(found[0].replace(",", "")) if found else None


def describe_differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Return a line for each condition in which the two differ."""
    lines = [
        f"{name}: {a.get(key, 'not told')} and {b.get(key, 'not told')}"
        for key, name in CONDITIONS.items()
        if a.get(key) != b.get(key)
    ]
    return lines or ["measured under the same conditions: one machine, the same versions"]


def left_over(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Return a line for each table that has rows which the other report lacks."""
    lines = []
    for name, here, there in (("first", a, b), ("second", b, a)):
        for mine, theirs in zip(here["tables"], there["tables"], strict=True):
            missing = [", ".join(filter(None, key)) for key in rows_of(mine) if key not in rows_of(theirs)]
            lines += [f"in the {name} alone: {'; '.join(missing)}"] if missing else []
    return lines
