"""Sections of a report, as console text and as Markdown, built from the facts in report.json."""

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

UNKNOWN = "-"
SAMPLES_WIDTH = 117
KEEP: dict[str, Any] = {"drop_whitespace": False, "replace_whitespace": False}


@dataclass(slots=True)
class Section:
    """A table, lines below it, verbatim text, and in Markdown a figure."""

    table: Table
    lines: Sequence[str] = ()
    text: str = ""
    figure: str = ""
    """`![what it shows](file)`."""


class Additions:
    """Facts, sections and figures that a companion adds to a report; without one, none."""

    def __init__(self, runs: Sequence[Run], form: str):
        self.answers: list[str] = []
        """Names of files that it may write."""
        self.facts: Facts = {}
        """Facts of the report; `of_runs` has those of each run."""
        self.of_runs: list[Facts] = [{} for _ in runs]

    def around(self, run: Facts, sections: list[Section]) -> list[Section]:
        """Return the sections of a run, with those that are added."""
        return sections

    def draw(self, folder: Path) -> list[Path]:
        """Draw figures into `folder`, and return their paths."""
        return []


def build_sections(facts: Facts, added: Additions) -> list[Section]:
    """Build the sections of every run, with those that are added, then comparisons and samples."""
    sections = []
    for run in facts["runs"]:
        own = [losses(run)]
        if run["segments"]:
            own.append(segments(run, with_cost=bool(facts["prices_per_device_hour"])))
        sections += added.around(run, own)
    if facts["comparisons"]:
        sections.append(comparisons(facts["comparisons"]))
    sections[0].figure = f"![loss]({facts['figure']})"
    for sample in facts["samples"]:
        title = f"Text after {sample['prompt']!r}, temperature {sample['temperature']:g}, top-k {sample['top_k']}"
        sections.append(Section(Table(title, (), ()), text=side_by_side(sample["texts"])))
    return sections


def side_by_side(texts: Sequence[Facts], width: int = SAMPLES_WIDTH) -> str:
    """Set texts of several batches in columns, each below its batch."""
    if len(texts) == 1:
        return texts[0]["text"]
    room = (width + 3) // len(texts) - 3
    columns = [
        [f"batch {text['batch']:,}", "-" * room]
        + [
            part
            for line in text["text"].expandtabs(4).splitlines()
            for part in textwrap.wrap(line, room, **KEEP) or [""]
        ]
        for text in texts
    ]
    rows = zip_longest(*columns, fillvalue="")
    return "\n".join(" | ".join(cell.ljust(room) for cell in row).rstrip() for row in rows)


def losses(run: Facts) -> Section:
    """Show training and validation loss beside those of the baselines, and how much was trained."""
    tail = run["training_loss_batches"]
    rows: list[Sequence[str]] = [
        (name, f"{nats:.4f}", f"{nats / math.log(2) / per_byte:.3f}" if per_byte else "")
        for name, nats, per_byte in (
            (f"training loss, last {tail} batches", run["training_loss"], run["training_bytes_per_token"]),
            ("validation loss", run["validation_loss"], run["bytes_per_token"]),
            *((f"{name} model", nats, run["bytes_per_token"]) for name, nats in (run["baselines"] or {}).items()),
        )
        if nats is not None
    ]
    done = f"{run['num_batches']:,} batches"
    if run["first_batch"] > 1:
        done += f" ({run['first_batch']:,} to {run['last_batch']:,})"
    if run["tokens"] is not None:
        done += f", {run['tokens']:,} tokens"
    if run["tokens_per_second"] is not None:
        done += f", {run['tokens_per_second']:,.0f} tokens/s"
    num = run["num_launches"]
    lines = [f"{done}, in {num} launch{'' if num == 1 else 'es'}"]
    lines += [f"from batch {batch:,} on: {words}" for batch, words in changes_of(run["segments"])]
    if run["state_digest"]:
        lines.append(f"state/digest {run['state_digest']} of {run['segments_from'].rsplit('/', 1)[-1]}")
    if run["baselines"]:
        lines.append("baselines are counted with add-one smoothing on the training tokens")
    if run["not_finite"]:
        lines.append(f"loss not finite: {listed(run['not_finite'])}; in no figure here")
    return Section(Table(run["run"], ("", "nats per token", "bits per byte"), rows), lines + run["notes"])


def segments(run: Facts, *, with_cost: bool) -> Section:
    """Show devices, speed, time and energy of each span of batches, and their cost where prices are given."""
    facts = run["segments"]
    has_energy = any(fact["energy_kwh"] is not None for fact in facts)
    rows = [
        (
            span(fact["first_batch"], fact["last_batch"]),
            f"{shown(fact['num_devices'])} x {fact['device']}" if fact["device"] else "not known: since the last save",
            " ".join(word for word in (fact["sharding"], short_precision(fact["precision"])) if word) or UNKNOWN,
            *(shown(fact["tokens"]), shown(fact["tokens_per_second_per_device"]), shown(fact["mfu"], "{:.1%}")),
            *resources(fact),
        )
        for fact in facts
    ]
    if len(facts) > 1:
        rows.append(("total", "", "", shown(run["total"]["tokens"]), "", "", *resources(run["total"])))
    columns = ("batches", "devices", "how", "tokens", "tokens/s per device", "MFU", *RESOURCES)
    has_column = {"kWh": has_energy, "J/token": has_energy, "cost": with_cost, "cost/M tokens": with_cost}
    kept = [i for i, column in enumerate(columns) if has_column.get(column, True)]
    lines = [
        f"{fact['first_batch']:,}-{fact['last_batch']:,}: {', '.join(fact['computed_with'])}"
        for fact in facts
        if fact["computed_with"]
    ]
    lines += ["time is that of training, evaluation and saves, without start-up"]
    if any(fact["mfu"] is None for fact in facts):
        lines.append("a device whose peak is not known has no MFU and no rated energy")
    sources = {fact["energy_source"] for fact in facts}
    lines += [f"{source}: {meaning}" for source, meaning in ENERGY.items() if source in sources]
    if with_cost:
        lines.append("cost is devices x time x the price given")
    table = Table(
        f"Where {run['name']} ran, by {run['segments_from']}",
        [columns[i] for i in kept],
        [[row[i] for i in kept] for row in rows],
        range(3, len(kept)),
    )
    return Section(table, lines)


RESOURCES = ("time", "kWh", "J/token", "cost", "cost/M tokens")
ENERGY = {
    "rated": "kWh at the board's rated power: devices alone, at full draw all the time",
    "measured": "kWh by the devices' counters; of CPUs, packages and DRAM with all that runs there",
}


def resources(fact: Facts) -> tuple[str, ...]:
    """Format the columns of RESOURCES."""
    energy = f"{small(fact['energy_kwh'])} {fact['energy_source'] or ''}".rstrip()
    each = small(fact["joules_per_token"]), small(fact["cost"]), small(fact["cost_per_million_tokens"])
    return clock(fact["hours"]), energy, *each


def comparisons(facts: Sequence[Facts]) -> Section:
    """Show how far the losses of other runs are from those of the first."""
    rows, lines = [], []
    for pair in facts:
        rows.append(
            (
                pair["other"],
                f"{pair['num_common']:,}",
                shown(pair["max_absolute"], "{:.3e}", pair["max_absolute_batch"]),
                shown(pair["mean_absolute"], "{:.3e}"),
                shown(pair["final_difference"], "{:+.3e}", pair["final_batch"]),
                shown(pair["validation_difference"], "{:+.3e}", pair["validation_batch"]),
                digests(pair),
            )
        )
        lines += remarks(pair)
    means = ("largest |difference|", "mean", "final loss", "validation loss")
    columns = ("run", "common batches", *means, "data digests")
    title = f"Losses beside those of {facts[0]['first']}, batch by batch"
    return Section(Table(title, columns, rows, range(1, 6)), lines)


def digests(pair: Facts) -> str:
    """Say whether two runs saw the same data."""
    if not pair["num_digests"]:
        return "none to compare"
    if pair["digests_part_at"] is None:
        return f"equal in all {pair['num_digests']:,}"
    return f"part at batch {pair['digests_part_at']:,}"


def remarks(pair: Facts) -> list[str]:
    """Say what the numbers of a pair of runs leave out."""
    other, first = pair["other"], pair["first"]
    if not pair["num_common"]:
        return [f"{other} and {first} have no batch in common: nothing can be said of their difference"]
    lines = []
    if pair["num_equal"] == pair["num_compared"] > 0:
        lines.append(f"{other}: every loss equals that of {first} to the last bit")
    if pair["not_finite_in_one"]:
        lines.append(f"{other}: loss not finite in one of the two alone: {listed(pair['not_finite_in_one'])}")
    if not pair["num_compared"]:
        lines.append(f"{other}: no batch has a finite loss in both")
    if 0 < pair["num_digests"] < pair["num_common"]:
        lines.append(f"{other}: {pair['num_digests']:,} of {pair['num_common']:,} common batches have both digests")
    return lines


# ---------------------------------------------------------------------------------------------------- numbers


def listed(batches: Sequence[int], most: int = 8) -> str:
    """Format `batches 1, 2 and 7 more`."""
    text = ", ".join(f"{batch:,}" for batch in batches[:most])
    more = f" and {len(batches) - most:,} more" if len(batches) > most else ""
    return f"batch{'' if len(batches) == 1 else 'es'} {text}{more}"


def shown(value: float | None, form: str = "{:,.0f}", batch: int | None = None) -> str:
    """Format a number and the batch it was measured at; UNKNOWN for None."""
    if value is None:
        return UNKNOWN
    return form.format(value) + ("" if batch is None else f" at {batch:,}")


def span(first_batch: int | None, last_batch: int | None) -> str:
    """Format `1-100`; UNKNOWN for no batches."""
    is_known = first_batch is not None and last_batch is not None and first_batch <= last_batch
    return f"{first_batch:,}-{last_batch:,}" if is_known else UNKNOWN


def small(value: float | None) -> str:
    """Format with two decimals, or three digits of numbers below one."""
    if value is None:
        return UNKNOWN
    return f"{value:,.2f}" if value >= 1 or value == 0 else f"{value:.3g}"


def clock(hours: float | None) -> str:
    """Format hours as `1:02:03`."""
    if hours is None:
        return UNKNOWN
    minutes, seconds = divmod(round(hours * 3600), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


# --------------------------------------------------------------------------------------------------- renderings


def print_sections(sections: Sequence[Section]) -> None:
    """Print sections on standard output."""
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
    """Render sections in GitHub's dialect."""
    blocks = []
    for section in sections:
        blocks.append(f"## {markdown_text(section.table.title)}")
        if section.table.rows:
            blocks.append("\n".join(section.table.markdown()))
        blocks.append("\n".join(markdown_list(section.lines)))
        if section.text:
            fence = "`" * max(4, 1 + max(map(len, re.findall("`+", section.text)), default=0))
            blocks.append("\n".join((f"{fence}text", printable(section.text, keep="\n"), fence)))
        blocks.append(section.figure)
    return "\n\n".join(block for block in blocks if block) + "\n"
