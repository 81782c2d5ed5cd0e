"""Targets and tables of `python -m benchmarks checkpoint`. The names of the sides are keys of the report."""

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
JUDGED_SECONDS = 30
SIDES = (OURS, ASYNC_SAVE, SAVE, COMPOSER)


def judge(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Hold measurements against the targets. Ratios are medians, over the warm rounds, of ratios within a round."""
    rounds = report["rounds"][1:]
    copy, write, verified, unverified = (
        [one[f"{name}_seconds"] for one in rounds] for name in ("copy", "write", "load_verified", "load_unverified")
    )
    stall, durable = ([one[OURS][f"{name}_seconds"] for one in rounds] for name in ("stall", "durable"))
    their_stall = [one[ASYNC_SAVE]["stall_seconds"] for one in rounds]
    behind = [end - begin for end, begin in zip(durable, stall, strict=True)]
    bandwidth = "durable write, hashes included / plain write+fsync (bandwidth, after the stall)"
    extra_bytes = max(one[OURS]["extra_bytes"] for one in report["rounds"])
    targets = [
        ("stall / copying the local state in memory", ratios(stall, copy).median, "<=", 1.3),
        ("stall / async_save's", ratios(stall, their_stall).median, "<=", 1.0),
        (bandwidth, ratios(write, behind).median, ">=", 0.8),
        ("the same, counted from the beginning of the save", ratios(write, durable).median, ">=", 0.8),
        ("verified load / unverified load, cold (seconds)", ratios(verified, unverified).median, "<=", 1.3),
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
    total = sum(report["local_bytes"])
    first, warm = report["rounds"][0], report["rounds"][1:]

    def spread(values: Sequence[float]) -> str:
        return f"{min(values):.3f} / {statistics.median(values):.3f}"

    def rate(seconds: Sequence[float]) -> str:
        return f"{total / GIB / statistics.median(seconds):.2f}"

    rows = []
    for side in SIDES:
        stall, durable = ([one[side][key] for one in warm] for key in ("stall_seconds", "durable_seconds"))
        extra = max(one[side]["extra_bytes"] for one in report["rounds"])
        first_seconds = [f"{first[side]['stall_seconds']:.3f}", f"{first[side]['durable_seconds']:.3f}"]
        rows.append([side, *first_seconds, spread(stall), spread(durable), rate(durable), f"{extra / GIB:.2f}"])
    limits = (
        ("limit: copy in memory", "copy_seconds"),
        ("limit: write + fsync", "write_seconds"),
        ("limit: cold read", "read_seconds"),
        ("our load, cold, verified", "load_verified_seconds"),
        ("our load, cold, unverified", "load_unverified_seconds"),
    )
    for name, key in limits:
        seconds = [one[key] for one in warm]
        rows.append([name, "", f"{first[key]:.3f}", "", spread(seconds), rate(seconds), ""])
    title = (
        f"{report['parameters']:,} parameters, {total / GIB:.2f} GiB with AdamW's state on {report['num_ranks']} "
        f"ranks, {max(report['local_bytes']) / GIB:.2f} GiB on one; times in seconds, over {len(warm)} warm rounds. "
        "Before each load, the files were dropped from the page cache (posix_fadvise), in which "
        f"{report['resident_after_drop']:.1%} of them were left (mincore)"
    )
    headings = ["", "first stall", "first durable", "stall: min / median", "durable: min / median"]
    headings += ["GiB/s", "extra GiB a rank"]
    return measured_table(title, headings, rows)


def table_of_targets(report: dict[str, Any]) -> Table:
    rows = [
        [row["what"], f"{row['measured']:.2f}", f"{row['sign']} {row['target']:g}", "met" if row["met"] else "MISSED"]
        for row in report["targets"]
    ]
    return measured_table("targets (medians of the warm rounds' ratios)", ["", "measured", "target", ""], rows)


def table_of_intervals(report: dict[str, Any]) -> Table:
    """Return a save's cost for training: the larger median of time lost and of processor time."""
    rows = []
    for shape, rounds in report["batches"].items():
        batch_seconds = statistics.median(one["plain"] for one in rounds) / (SAVES + 1)
        lost = [(one["saving"] - one["plain"]) / SAVES for one in rounds]
        processor = [one["processor"] for one in rounds]
        share = max(statistics.median(lost), statistics.median(processor)) / batch_seconds
        fewest = max(1, math.ceil(share / MAX_SAVE_FRACTION))
        verdict = "not judged"
        if batch_seconds >= JUDGED_SECONDS:
            verdict = "met" if share <= MAX_SAVE_FRACTION else "MISSED"
        rows.append(
            [
                *(shape, f"{batch_seconds:.2f}", f"{min(lost):.2f} / {statistics.median(lost):.2f}"),
                *(f"{min(processor):.2f} / {statistics.median(processor):.2f}", f"{share:.1%}"),
                *(f"<= {MAX_SAVE_FRACTION:.0%} from {JUDGED_SECONDS} s a batch", verdict, f"{fewest}ba"),
            ]
        )
    headings = ["batch", "seconds", "lost to a save, s: min / median", "its processor time, s: min / median"]
    headings += ["after every batch", "target", "", "smallest interval"]
    return measured_table(f"a save after every batch, at most {MAX_SAVE_FRACTION:.0%} of training", headings, rows)


def table_of_growth(report: dict[str, Any]) -> Table:
    rows = []
    for size, found in report["growth"].items():
        if "left_out" in found:
            rows.append([size, f"left out: {found['left_out']}", "", "", "", "", ""])
            continue
        warm = found["rounds"][1:]
        stall, durable, load = (
            statistics.median(one[f"{key}_seconds"] for one in warm) for key in ("stall", "durable", "load_verified")
        )
        total = sum(found["local_bytes"])
        extra = max(one["extra_bytes"] for one in found["rounds"])
        rows.append(
            [
                *(f"{found['parameters']:,}", f"{total / GIB:.2f}", f"{stall:.3f}", f"{durable:.3f}"),
                *(f"{total / GIB / durable:.2f}", f"{load:.3f}", f"{extra / max(found['local_bytes']):.2f}"),
            ]
        )
    headings = ["parameters", "GiB", "stall, s", "durable, s", "GiB/s", "cold verified load, s"]
    headings += ["extra memory / local state"]
    return measured_table("growth, ours (medians of the warm saves)", headings, rows)
