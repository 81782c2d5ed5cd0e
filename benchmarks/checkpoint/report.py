"""Targets and tables of `python -m benchmarks checkpoint`.

The functions take the report that `checkpoint.run` has put together, and return Tables. The names of the sides are keys
of that report. The first round is cold, and only `table_of_sides` shows it; every other figure is of the warm rounds.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.checkpoint.interval import SAVES
from llmfoundry_lite.checkpoint.save_interval import MAX_SAVE_FRACTION
from llmfoundry_lite.hardware import GIB
from llmfoundry_lite.tables import Table
from llmfoundry_machines.bench.frame import measured_table, ratios

OURS, SAVE, ASYNC_SAVE, COMPOSER = "ours", "dcp.save", "dcp.async_save", "Composer"
SIDES = (OURS, ASYNC_SAVE, SAVE, COMPOSER)
"""In the order of their turns."""
MIN_BATCH_SECONDS_WITH_TARGET = 30
"""The target for saving after every batch holds for batches at least this long. Shorter ones save less often."""


def judge(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare the measurements with the targets, and return a row of the report for each target.

    A ratio is calculated within each warm round, because both of its parts were measured at about the same time. The
    median of the rounds is what has to meet the target. Memory is the largest of all rounds, the first included.
    """
    rounds = report["rounds"][1:]
    copy, write, verified_load, unverified_load = (
        [figures[f"{name}_seconds"] for figures in rounds]
        for name in ("copy", "write", "load_verified", "load_unverified")
    )
    stall, durable = ([figures[OURS][f"{name}_seconds"] for figures in rounds] for name in ("stall", "durable"))
    their_stall = [figures[ASYNC_SAVE]["stall_seconds"] for figures in rounds]
    # Our bytes are written after the stall, so the bandwidth is counted from its end.
    write_after_stall = [
        durable_seconds - stall_seconds for durable_seconds, stall_seconds in zip(durable, stall, strict=True)
    ]
    bandwidth_target = "durable write, hashes included / plain write+fsync (bandwidth, after the stall)"
    extra_bytes = max(figures[OURS]["extra_bytes"] for figures in report["rounds"])

    targets = [
        ("stall / copying the local state in memory", ratios(stall, copy).median, "<=", 1.3),
        ("stall / async_save's", ratios(stall, their_stall).median, "<=", 1.0),
        (bandwidth_target, ratios(write, write_after_stall).median, ">=", 0.8),
        ("the same, counted from the beginning of the save", ratios(write, durable).median, ">=", 0.8),
        ("verified load / unverified load, cold (seconds)", ratios(verified_load, unverified_load).median, "<=", 1.3),
        ("peak extra memory / local state", extra_bytes / max(report["local_bytes"]), "<=", 1.05),
    ]
    return [
        {
            "what": what,
            "measured": value,
            "sign": sign,
            "target": target,
            "met": value <= target if sign == "<=" else value >= target,
        }
        for what, value, sign, target in targets
    ]


def table_of_sides(report: dict[str, Any]) -> Table:
    """Return a table with a row for each saver, for each limit of the machine, and for our loads."""
    total_bytes = sum(report["local_bytes"])
    first, warm = report["rounds"][0], report["rounds"][1:]

    def spread(values: Sequence[float]) -> str:
        """Format as "minimum / median"."""
        return f"{min(values):.3f} / {statistics.median(values):.3f}"

    def rate(seconds: Sequence[float]) -> str:
        """Format the GiB per second at the median."""
        return f"{total_bytes / GIB / statistics.median(seconds):.2f}"

    rows = []
    for side in SIDES:
        stall, durable = ([figures[side][key] for figures in warm] for key in ("stall_seconds", "durable_seconds"))
        extra_bytes = max(figures[side]["extra_bytes"] for figures in report["rounds"])
        first_seconds = [f"{first[side]['stall_seconds']:.3f}", f"{first[side]['durable_seconds']:.3f}"]
        rows.append([side, *first_seconds, spread(stall), spread(durable), rate(durable), f"{extra_bytes / GIB:.2f}"])

    # A limit or a load has one time each, which stands in the columns of the durable save.
    limits = (
        ("limit: copy in memory", "copy_seconds"),
        ("limit: write + fsync", "write_seconds"),
        ("limit: cold read", "read_seconds"),
        ("our load, cold, verified", "load_verified_seconds"),
        ("our load, cold, unverified", "load_unverified_seconds"),
    )
    for label, key in limits:
        seconds = [figures[key] for figures in warm]
        rows.append([label, "", f"{first[key]:.3f}", "", spread(seconds), rate(seconds), ""])

    title = (
        f"{report['parameters']:,} parameters, {total_bytes / GIB:.2f} GiB with AdamW's state on {report['num_ranks']} "
        f"ranks, {max(report['local_bytes']) / GIB:.2f} GiB on one; times in seconds, over {len(warm)} warm rounds. "
        "Before each load, the files were dropped from the page cache (posix_fadvise), in which "
        f"{report['resident_after_drop']:.1%} of them were left (mincore)"
    )
    headings = ["", "first stall", "first durable", "stall: min / median", "durable: min / median"]
    headings += ["GiB/s", "extra GiB a rank"]
    return measured_table(title, headings, rows)


def table_of_targets(report: dict[str, Any]) -> Table:
    """Return a table of the targets, what was measured, and whether they were met."""
    rows = [
        [row["what"], f"{row['measured']:.2f}", f"{row['sign']} {row['target']:g}", "met" if row["met"] else "MISSED"]
        for row in report["targets"]
    ]
    return measured_table("targets (medians of the warm rounds' ratios)", ["", "measured", "target", ""], rows)


def table_of_intervals(report: dict[str, Any]) -> Table:
    """Return a table of what saving after every batch costs training, for each shape of batch.

    The cost of a save is the larger of two medians: the time that a block with saves took longer, and the processor
    time of a save alone. `share` is that cost relative to the seconds of a batch. The smallest interval is the number
    of batches between saves at which the cost stays below MAX_SAVE_FRACTION. For example, saves that cost 5 % of a
    batch need an interval of 3 batches for at most 2 %.
    """
    rows = []
    # Each block has SAVES saves and SAVES + 1 batches.
    for shape, rounds in report["batches"].items():
        batch_seconds = statistics.median(seconds["plain"] for seconds in rounds) / (SAVES + 1)
        lost_seconds = [(seconds["saving"] - seconds["plain"]) / SAVES for seconds in rounds]
        processor_seconds = [seconds["processor"] for seconds in rounds]
        save_fraction = max(statistics.median(lost_seconds), statistics.median(processor_seconds)) / batch_seconds
        min_interval_batches = max(1, math.ceil(save_fraction / MAX_SAVE_FRACTION))

        # Shorter batches have no target, only the interval that would meet it.
        verdict = "not judged"
        if batch_seconds >= MIN_BATCH_SECONDS_WITH_TARGET:
            verdict = "met" if save_fraction <= MAX_SAVE_FRACTION else "MISSED"
        rows.append(
            [
                shape,
                f"{batch_seconds:.2f}",
                f"{min(lost_seconds):.2f} / {statistics.median(lost_seconds):.2f}",
                f"{min(processor_seconds):.2f} / {statistics.median(processor_seconds):.2f}",
                f"{save_fraction:.1%}",
                f"<= {MAX_SAVE_FRACTION:.0%} from {MIN_BATCH_SECONDS_WITH_TARGET} s a batch",
                verdict,
                f"{min_interval_batches}ba",
            ]
        )
    headings = ["batch", "seconds", "lost to a save, s: min / median", "its processor time, s: min / median"]
    headings += ["after every batch", "target", "", "smallest interval"]
    return measured_table(f"a save after every batch, at most {MAX_SAVE_FRACTION:.0%} of training", headings, rows)


def table_of_growth(report: dict[str, Any]) -> Table:
    """Return a table of our saves and loads, with a row for each model size, or with the reason why a size was left
    out."""
    rows = []
    for size, figures in report["growth"].items():
        # Too large for the memory of this machine.
        if "left_out" in figures:
            rows.append([size, f"left out: {figures['left_out']}", "", "", "", "", ""])
            continue
        warm = figures["rounds"][1:]
        stall_seconds, durable_seconds, load_seconds = (
            statistics.median(round_figures[f"{key}_seconds"] for round_figures in warm)
            for key in ("stall", "durable", "load_verified")
        )

        # Rates are those of all ranks together; extra memory is that of the rank with the largest share.
        total_bytes = sum(figures["local_bytes"])
        extra_bytes = max(round_figures["extra_bytes"] for round_figures in figures["rounds"])
        rows.append(
            [
                f"{figures['parameters']:,}",
                f"{total_bytes / GIB:.2f}",
                f"{stall_seconds:.3f}",
                f"{durable_seconds:.3f}",
                f"{total_bytes / GIB / durable_seconds:.2f}",
                f"{load_seconds:.3f}",
                f"{extra_bytes / max(figures['local_bytes']):.2f}",
            ]
        )
    headings = ["parameters", "GiB", "stall, s", "durable, s", "GiB/s", "cold verified load, s"]
    headings += ["extra memory / local state"]
    return measured_table("growth, ours (medians of the warm saves)", headings, rows)
