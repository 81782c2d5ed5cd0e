"""Two reports of one bench side by side: two machines, or two software stacks on one machine.

llmfoundry-lite bench compare there/scaling.json here/scaling.json

A report is the JSON that `frame.tell` wrote for any bench. It holds the printed tables as text: a title, the column
headings, the rows, and the number of leading columns that identify a row (`num_keys`). `run` reads both reports and
refuses those that were not measured with the same settings. It matches the rows of their tables by key, and prints the
two numbers of each cell with their ratio. It then lists the conditions that differ, and rows that only one report has.
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
"""Conditions that may differ between two reports: the report's key -> the name that is printed."""


def run(first: Path, second: Path, out: Path | None = None) -> list[Table]:
    """Print each table of two reports side by side, then the conditions that differ, and return these tables.

    With `out`, also writes compare-BENCH.json and compare-BENCH.md into that folder. Raises DataError for files that
    cannot be compared.
    """
    first_report = read_report(first)
    second_report = read_report(second)
    check_comparable(first_report, second_report, str(first), str(second))

    tables = []
    for first_table, second_table in zip(first_report["tables"], second_report["tables"], strict=True):
        table = compare_tables(first_table, second_table)
        if table is not None:
            tables.append(table)
    if not tables:
        raise DataError(f"{first} and {second}: no row of one is in the other; measure the same points on both")

    differences = describe_differences(first_report, second_report)
    unmatched_rows = describe_unmatched_rows(first_report, second_report)
    bench = first_report["bench"]
    tell(
        describe_conditions() | {"of": bench, "first": first_report, "second": second_report},
        *tables,
        [*differences, *unmatched_rows],
        name=f"compare-{bench}",
        heading=f"`bench {bench}` twice, side by side",
        command=f"llmfoundry-lite bench compare {first} {second}",
        out=out,
    )
    return tables


def read_report(path: Path) -> dict[str, Any]:
    """Read a bench's report, and check that it has all that this module uses.

    Raises DataError for a file that cannot be read or is not JSON, for JSON that is not a bench report, and for a
    report of another schema. Each message says how to get a report that can be read.
    """
    try:
        report = read_json(path, "a report")
    except (OSError, ValueError) as error:
        reason = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else "is not JSON"
        raise DataError(f"{path}: {reason}; give the JSON that a bench wrote with --out") from None

    # The remedy names the bench to run again. An older report does not tell its bench, but is called after it.
    bench = str(report.get("bench", path.stem)) if isinstance(report, dict) else path.stem
    remedy = f"measure {bench.removeprefix('compare-')} again, with --out FOLDER"

    if not isinstance(report, dict):
        raise DataError(f"{path}: is not a bench report; {remedy}")
    missing_keys = [key for key in ("schema", "bench", "asked", "tables") if key not in report]
    if missing_keys:
        raise DataError(f"{path}: an older release's report, or none: it has no {join_with_or(missing_keys)}; {remedy}")
    if report["schema"] != REPORT_SCHEMA:
        raise DataError(f"{path}: has schema {report['schema']}, this release reads {REPORT_SCHEMA}; {remedy}")

    tables = report["tables"]
    has_tables = isinstance(tables, list) and all(
        isinstance(table, dict) and {"title", "columns", "rows", "num_keys"} <= {*table} for table in tables
    )
    # The bench becomes part of a file name, so it may not contain a slash.
    has_safe_name = re.fullmatch(r"[\w-]+", bench) is not None
    if not has_tables or not has_safe_name or not isinstance(report["asked"], dict):
        raise DataError(f"{path}: is not a bench report; {remedy}")
    return report


def check_comparable(
    first_report: dict[str, Any], second_report: dict[str, Any], first_name: str, second_name: str
) -> None:
    """Raise DataError unless both reports come from the same bench, with the same settings and number of tables.

    The settings are in `asked`: those that the caller of the bench chose. `first_name` and `second_name` are the
    reports' paths, for the message.
    """
    first_bench = first_report["bench"]
    second_bench = second_report["bench"]
    if first_bench != second_bench:
        raise DataError(
            f"{first_name} is of bench {first_bench}, {second_name} of bench {second_bench}; compare one bench's"
        )

    # A setting that a report lacks counts as None.
    first_settings = first_report["asked"]
    second_settings = second_report["asked"]
    for key in dict.fromkeys([*first_settings, *second_settings]):
        first_setting = first_settings.get(key)
        second_setting = second_settings.get(key)
        if first_setting != second_setting:
            raise DataError(
                f"{key} is {first_setting} in {first_name} and {second_setting} in {second_name}; "
                "measure one of them again"
            )

    num_first = len(first_report["tables"])
    num_second = len(second_report["tables"])
    if num_first != num_second:
        raise DataError(f"{first_name} has {num_first} tables and {second_name} {num_second}; measure again")


def compare_tables(first: dict[str, Any], second: dict[str, Any]) -> Table | None:
    """Build a table with a row for each number that both tables print. Return None if they share none.

    Cells belong together if they have the same row keys and the same column heading. With one key column,

        devices  seconds            devices  seconds            devices  what     first  second  second over first
        1        1.20        and    1        0.60       become  1        seconds  1.20   0.60    0.50
    """
    num_keys = first["num_keys"]
    second_rows = index_rows(second)
    rows = []
    for keys, first_cells in index_rows(first).items():
        second_cells = dict(zip(second["columns"], second_rows.get(keys, ()), strict=False))
        for heading, first_cell in zip(first["columns"][num_keys:], first_cells[num_keys:], strict=True):
            second_cell = second_cells.get(heading, "")
            first_number = parse_number(first_cell)
            second_number = parse_number(second_cell)
            if first_number is None or second_number is None:
                continue
            ratio = f"{second_number / first_number:.2f}" if first_number else ""
            rows.append([*keys, heading, first_cell, second_cell, ratio])

    if not rows:
        return None
    columns = [*first["columns"][:num_keys], "what", "first", "second", "second over first"]
    return measured_table(first["title"], columns, rows, num_keys + 1)


def index_rows(table: dict[str, Any]) -> dict[tuple[str, ...], list[str]]:
    """Return a table's rows by their keys, which are the cells of its first `num_keys` columns."""
    return {tuple(row[: table["num_keys"]]): row for row in table["rows"]}


def parse_number(cell: str) -> float | None:
    """Parse the number at the beginning of a cell. Return None if there is none.

    `1,234.5` is 1234.5, `12.3%` is 12.3, and `1.50 (1.20 to 1.80)`, a median with its range, is 1.5. Text that only
    begins with digits, such as `125m`, is not a number.
    """
    number = re.match(r"[+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?(?=$|%|\s)", cell)
    return float(number[0].replace(",", "")) if number else None


def describe_differences(first_report: dict[str, Any], second_report: dict[str, Any]) -> list[str]:
    """Return a line for each of CONDITIONS in which the reports differ, or one line which says that none does."""
    lines = [
        f"{name}: {first_report.get(key, 'not told')} and {second_report.get(key, 'not told')}"
        for key, name in CONDITIONS.items()
        if first_report.get(key) != second_report.get(key)
    ]
    return lines or ["measured under the same conditions: one machine, the same versions"]


def describe_unmatched_rows(first_report: dict[str, Any], second_report: dict[str, Any]) -> list[str]:
    """Return a line for each table with rows that the same table of the other report lacks; it names their keys."""
    lines = []
    for name, report, other_report in (
        ("first", first_report, second_report),
        ("second", second_report, first_report),
    ):
        for table, other_table in zip(report["tables"], other_report["tables"], strict=True):
            other_rows = index_rows(other_table)
            unmatched_keys = [keys for keys in index_rows(table) if keys not in other_rows]
            if unmatched_keys:
                row_names = [", ".join(filter(None, keys)) for keys in unmatched_keys]
                lines.append(f"in the {name} alone: {'; '.join(row_names)}")
    return lines
