"""Sections of a report, as console text and as Markdown, built from the facts in report.json.

`build_sections` makes a `Section` of each part of the report: losses and segments of each run, comparisons, and sampled
texts. The `build_..._section` functions choose rows and notes, and the `format_...` functions write numbers.
`print_sections` and `markdown` render the same sections for the terminal and for report.md.
"""

import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from llmfoundry_lite.errors import printable
from llmfoundry_lite.report.reading import Run
from llmfoundry_lite.report.segments import changes_of, short_precision
from llmfoundry_lite.tables import Table, console, markdown_list, markdown_text

Facts = dict[str, Any]
"""Part of report.json. None stands for an unknown value."""

UNKNOWN = "-"
SAMPLES_WIDTH = 117
"""Characters of a line in which texts stand side by side."""


@dataclass(slots=True)
class Section:
    """A table, lines below it, verbatim text, and in Markdown a figure."""

    table: Table
    lines: Sequence[str] = ()
    text: str = ""
    figure: str = ""
    """`![what it shows](file)`."""


class Additions:
    """Facts, sections and figures that a companion adds to a report. This base class adds none."""

    def __init__(self, runs: Sequence[Run], names: Sequence[str], image_format: str, results_folder: Path):
        """Collect the additions for `runs`.

        names: the runs' names in the report.
        image_format: png, pdf or svg, for the figures.
        results_folder: folder with results of evaluations, which need not exist.
        """
        self.file_names: list[str] = []
        """Names of files that `draw` may write."""
        self.facts: Facts = {}
        """Facts that are added to the report as a whole."""
        self.run_facts: list[Facts] = [{} for _ in runs]
        """Facts that are added to each run."""

    def add_sections(self, run: Facts, sections: list[Section]) -> list[Section]:
        """Return the sections of a run, with those that are added. `run` has its facts."""
        return sections

    def draw(self, folder: Path) -> list[Path]:
        """Draw figures into `folder`, and return their paths."""
        return []


def build_sections(facts: Facts, all_additions: Sequence[Additions] = ()) -> list[Section]:
    """Build the sections of a report: of each run, with companions' additions, then comparisons and sampled texts.

    `facts` is the content of report.json. The first section has the figure, which only Markdown shows.
    """
    # The sections of each run: its losses, where it ran, and what a companion adds.
    sections: list[Section] = []
    for run in facts["runs"]:
        run_sections = [build_losses_section(run)]
        if run["segments"]:
            with_cost = bool(facts["prices_per_device_hour"])
            run_sections.append(build_segments_section(run, with_cost=with_cost))
        for additions in all_additions:
            run_sections = additions.add_sections(run, run_sections)
        sections += run_sections

    # The sections of the report as a whole.
    if facts["comparisons"]:
        sections.append(build_comparisons_section(facts["comparisons"]))
    sections[0].figure = f"![loss]({facts['figure']})"
    for sample in facts["samples"]:
        title = f"Text after {sample['prompt']!r}, temperature {sample['temperature']:g}, top-k {sample['top_k']}"
        sections.append(Section(Table(title, (), ()), text=set_side_by_side(sample["texts"])))
    return sections


def set_side_by_side(texts: Sequence[Facts], width: int = SAMPLES_WIDTH) -> str:
    """Set texts in columns beside each other, each with the batch after which a model wrote it as heading.

    `texts` has dictionaries with `batch` and `text`. Lines are wrapped so that all columns fit into `width`
    characters. Two texts in a width of 23 look like this:

        batch 0    | batch 60
        ---------- | ----------
        import     | import os
        qxze       |

    A single text is returned unchanged, without a heading.
    """
    if len(texts) == 1:
        return texts[0]["text"]

    # Wrap each text into a column of its own. Separators stand between columns, so there is one less than columns.
    separator = " | "
    column_width = (width + len(separator)) // len(texts) - len(separator)
    columns = []
    for text in texts:
        column = [f"batch {text['batch']:,}", "-" * column_width]
        for line in text["text"].expandtabs(4).splitlines():
            wrapped_lines = textwrap.wrap(line, column_width, drop_whitespace=False, replace_whitespace=False)
            column += wrapped_lines or [""]  # an empty line stays
        columns.append(column)

    # Join the columns line by line. Shorter ones are filled up with empty cells.
    lines = []
    for cells in zip_longest(*columns, fillvalue=""):
        padded_cells = [cell.ljust(column_width) for cell in cells]
        lines.append(separator.join(padded_cells).rstrip())
    return "\n".join(lines)


def build_losses_section(run: Facts) -> Section:
    """Show a run's training and validation loss beside those of simple baselines, how much was trained, and its notes.

    `run` has the run's facts, as `describe_run` in `report.py` returns them. A loss is in nats per token. If the data
    set says how many bytes a token has, it is in bits per byte too: 3.0 nats per token of 4 bytes are 3.0 / ln 2 / 4 =
    1.082 bits per byte. A loss that is unknown has no row.
    """
    # The table: (label, nats per token, bytes per token of the split on which the loss was measured).
    training_label = f"training loss, last {run['training_loss_batches']} batches"
    losses = [
        (training_label, run["training_loss"], run["training_bytes_per_token"]),
        ("validation loss", run["validation_loss"], run["bytes_per_token"]),
    ]
    for name, loss in (run["baselines"] or {}).items():
        losses.append((f"{name} model", loss, run["bytes_per_token"]))
    rows: list[Sequence[str]] = []
    for label, nats_per_token, bytes_per_token in losses:
        if nats_per_token is None:
            continue
        bits_per_byte = ""
        if bytes_per_token:
            bits_per_byte = f"{nats_per_token / math.log(2) / bytes_per_token:.3f}"
        rows.append((label, f"{nats_per_token:.4f}", bits_per_byte))

    # The first line below it: "60 batches, 491,520 tokens, 8,123 tokens/s, in 2 launches".
    extent = f"{run['num_batches']:,} batches"
    if run["first_batch"] > 1:
        extent += f" ({run['first_batch']:,} to {run['last_batch']:,})"
    if run["tokens"] is not None:
        extent += f", {run['tokens']:,} tokens"
    if run["tokens_per_second"] is not None:
        extent += f", {run['tokens_per_second']:,.0f} tokens/s"
    num_launches = run["num_launches"]
    lines = [f"{extent}, in {num_launches} launch{'' if num_launches == 1 else 'es'}"]

    # Further lines, each only if there is something to say.
    for batch, changes in changes_of(run["segments"]):
        lines.append(f"from batch {batch:,} on: {changes}")
    if run["state_digest"]:
        checkpoint_name = run["segments_from"].rsplit("/", 1)[-1]
        lines.append(f"state/digest {run['state_digest']} of {checkpoint_name}")
    if run["baselines"]:
        lines.append("baselines are counted with add-one smoothing on the training tokens")
    if run["not_finite"]:
        lines.append(f"loss not finite: {format_batches(run['not_finite'])}; in no figure here")
    return Section(Table(run["run"], ("", "nats per token", "bits per byte"), rows), lines + run["notes"])


COST_COLUMNS = ("cost", "cost/M tokens")
ENERGY_COLUMNS = ("kWh", "J/token")
SEGMENT_COLUMNS = (
    *("batches", "devices", "how", "tokens", "tokens/s per device", "MFU", "time"),
    *ENERGY_COLUMNS,
    *COST_COLUMNS,
)
FIRST_NUMBER_COLUMN = SEGMENT_COLUMNS.index("tokens")
ENERGY_SOURCES = {
    "rated": "kWh at the board's rated power: devices alone, at full draw all the time",
    "measured": "kWh by the devices' counters; of CPUs, packages and DRAM with all that runs there",
}


def build_segments_section(run: Facts, *, with_cost: bool) -> Section:
    """Show where a run was trained: a row for each segment, which is a span of batches on one kind of device.

    A row has the devices, the sharding and precision, tokens, speed, time and energy, and `with_cost` the cost.
    Columns of energy are left out if no segment's energy is known. The last row has the totals, if there are several
    segments.
    """
    # Build the rows, with a cell for each of SEGMENT_COLUMNS.
    segments = run["segments"]
    rows = []
    for segment in segments:
        devices = "not known: since the last save"
        if segment["device"]:
            devices = f"{format_number(segment['num_devices'])} x {segment['device']}"
        settings = [word for word in (segment["sharding"], short_precision(segment["precision"])) if word]
        rows.append(
            (
                format_span(segment["first_batch"], segment["last_batch"]),
                devices,
                " ".join(settings) or UNKNOWN,
                format_number(segment["tokens"]),
                format_number(segment["tokens_per_second_per_device"]),
                format_number(segment["mfu"], "{:.1%}"),
                *resource_cells(segment),
            )
        )
    if len(segments) > 1:
        rows.append(("total", "", "", format_number(run["total"]["tokens"]), "", "", *resource_cells(run["total"])))

    # Leave out columns that would be empty.
    hidden_columns: set[str] = set()
    if all(segment["energy_kwh"] is None for segment in segments):
        hidden_columns.update(ENERGY_COLUMNS)
    if not with_cost:
        hidden_columns.update(COST_COLUMNS)
    shown_indices = [i for i, column in enumerate(SEGMENT_COLUMNS) if column not in hidden_columns]
    table = Table(
        f"Where {run['name']} ran, by {run['segments_from']}",
        [SEGMENT_COLUMNS[i] for i in shown_indices],
        [[row[i] for i in shown_indices] for row in rows],
        right=range(FIRST_NUMBER_COLUMN, len(shown_indices)),
    )

    # Explain the numbers: with which software each segment was computed, and where time, energy and cost come from.
    lines = []
    for segment in segments:
        if segment["computed_with"]:
            span = f"{segment['first_batch']:,}-{segment['last_batch']:,}"
            lines.append(f"{span}: {', '.join(segment['computed_with'])}")
    lines.append("time is that of training, evaluation and saves, without start-up")
    if any(segment["mfu"] is None for segment in segments):
        lines.append("a device whose peak is not known has no MFU and no rated energy")
    sources = {segment["energy_source"] for segment in segments}
    lines += [f"{source}: {meaning}" for source, meaning in ENERGY_SOURCES.items() if source in sources]
    if with_cost:
        lines.append("cost is devices x time x the price given")
    return Section(table, lines)


def resource_cells(facts: Facts) -> tuple[str, ...]:
    """Format the time, energy and cost of a segment or of a whole run, in the order of the last SEGMENT_COLUMNS."""
    return (
        format_hours(facts["hours"]),
        f"{format_short(facts['energy_kwh'])} {facts['energy_source'] or ''}".rstrip(),
        format_short(facts["joules_per_token"]),
        format_short(facts["cost"]),
        format_short(facts["cost_per_million_tokens"]),
    )


def build_comparisons_section(comparisons: Sequence[Facts]) -> Section:
    """Show how far the losses of other runs are from those of the first run: a row for each comparison with it.

    `comparisons` are facts that `compare_runs` in `report.py` returns, at least one. Lines below the table say what the
    numbers of each comparison leave out.
    """
    rows = []
    lines = []
    for comparison in comparisons:
        rows.append(
            (
                comparison["other"],
                f"{comparison['num_common']:,}",
                format_number(comparison["max_absolute"], "{:.3e}", comparison["max_absolute_batch"]),
                format_number(comparison["mean_absolute"], "{:.3e}"),
                format_number(comparison["final_difference"], "{:+.3e}", comparison["final_batch"]),
                format_number(comparison["validation_difference"], "{:+.3e}", comparison["validation_batch"]),
                describe_digests(comparison),
            )
        )
        lines += describe_limits(comparison)

    columns = (
        *("run", "common batches", "largest |difference|", "mean"),
        *("final loss", "validation loss", "data digests"),
    )
    title = f"Losses beside those of {comparisons[0]['first']}, batch by batch"
    return Section(Table(title, columns, rows, right=range(1, 6)), lines)


def describe_digests(comparison: Facts) -> str:
    """Say whether two runs were trained on the same data, by the digests of the batches that both logs have."""
    if not comparison["num_digests"]:
        return "none to compare"
    if comparison["digests_part_at"] is None:
        return f"equal in all {comparison['num_digests']:,}"
    return f"part at batch {comparison['digests_part_at']:,}"


def describe_limits(comparison: Facts) -> list[str]:
    """Return lines on what a comparison's numbers do not show: exact equality, and batches that are left out.

    `comparison` has the facts that `compare_runs` in `report.py` returns. A common batch is compared if both runs have
    a finite loss. The list is empty if every common batch is compared and some losses differ.
    """
    other = comparison["other"]
    first = comparison["first"]
    num_common = comparison["num_common"]
    num_compared = comparison["num_compared"]
    if num_common == 0:
        return [f"{other} and {first} have no batch in common: nothing can be said of their difference"]

    lines = []
    if num_compared > 0 and comparison["num_equal"] == num_compared:
        lines.append(f"{other}: every loss equals that of {first} to the last bit")
    if comparison["not_finite_in_one"]:
        batches = format_batches(comparison["not_finite_in_one"])
        lines.append(f"{other}: loss not finite in one of the two alone: {batches}")
    if num_compared == 0:
        lines.append(f"{other}: no batch has a finite loss in both")
    if 0 < comparison["num_digests"] < num_common:
        lines.append(f"{other}: {comparison['num_digests']:,} of {num_common:,} common batches have both digests")
    return lines


# ---------------------------------------------------------------------------------------------------- numbers


def format_batches(batches: Sequence[int], max_batches: int = 8) -> str:
    """Format a list of batch numbers, of which at most `max_batches` are named, and the others counted.

    [7] is "batch 7", and [3, 5, 9] with a `max_batches` of 2 is "batches 3, 5 and 1 more".
    """
    noun = "batch" if len(batches) == 1 else "batches"
    text = ", ".join(f"{batch:,}" for batch in batches[:max_batches])
    if len(batches) > max_batches:
        text += f" and {len(batches) - max_batches:,} more"
    return f"{noun} {text}"


def format_number(value: float | None, number_format: str = "{:,.0f}", batch: int | None = None) -> str:
    """Format a number, and if it is given, the batch at which it was measured. Returns UNKNOWN for None.

    format_number(0.31, "{:.3e}", 50) is "3.100e-01 at 50", and format_number(8192) is "8,192".
    """
    if value is None:
        return UNKNOWN
    text = number_format.format(value)
    return text if batch is None else f"{text} at {batch:,}"


def format_span(first_batch: int | None, last_batch: int | None) -> str:
    """Format a span of batches as `1-100`. Returns UNKNOWN if an end is unknown or the span is empty."""
    if first_batch is None or last_batch is None or first_batch > last_batch:
        return UNKNOWN
    return f"{first_batch:,}-{last_batch:,}"


def format_short(value: float | None) -> str:
    """Format a number that is not negative: with two decimals, or below one, with three significant digits.

    1234.5 is "1,234.50", and 0.01234 is "0.0123". Returns UNKNOWN for None.
    """
    if value is None:
        return UNKNOWN
    return f"{value:,.2f}" if value >= 1 or value == 0 else f"{value:.3g}"


def format_hours(hours: float | None) -> str:
    """Format a duration in hours as `1:02:03` (hours, minutes, seconds). Returns UNKNOWN for None."""
    if hours is None:
        return UNKNOWN
    total_minutes, seconds = divmod(round(hours * 3600), 60)
    return f"{total_minutes // 60}:{total_minutes % 60:02}:{seconds:02}"


# --------------------------------------------------------------------------------------------------- renderings


def print_sections(sections: Sequence[Section]) -> None:
    """Print sections on standard output: title, table, lines and verbatim text of each, and an empty line after it.

    Control characters are escaped, because names in a run may be written by anybody, and could control the terminal.
    """
    output = console()
    for section in sections:
        output.print(printable(section.table.title), markup=False, style="bold")
        if section.table.rows:
            section.table.print(output)
        for line in section.lines:
            output.print(printable(line), markup=False)
        if section.text:
            output.print(printable(section.text, keep="\n"), markup=False, soft_wrap=True)
        output.print()


def markdown(sections: Sequence[Section]) -> str:
    """Render sections as GitHub Markdown: title, table, a list of the lines, and the figure of each.

    A section's verbatim text becomes a fenced block. Blocks are separated by empty lines, and empty ones are left out.
    """
    blocks = []
    for section in sections:
        blocks.append(f"## {markdown_text(section.table.title)}")
        if section.table.rows:
            blocks.append("\n".join(section.table.markdown()))
        blocks.append("\n".join(markdown_list(section.lines)))
        if section.text:
            # The fence must be longer than any sequence of backticks in the text, or the text could close it.
            num_backticks = max(map(len, re.findall("`+", section.text)), default=0)
            fence = "`" * max(4, num_backticks + 1)
            blocks.append("\n".join((f"{fence}text", printable(section.text, keep="\n"), fence)))
        blocks.append(section.figure)
    return "\n\n".join(block for block in blocks if block) + "\n"
