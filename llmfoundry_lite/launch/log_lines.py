"""The lines of metrics.jsonl, which are only ever appended: which of them are whole, what a carried log adds,
and how one reads on a console.

A launch that carries on from batch 100 writes batch 101 behind all that stands in the file. The lines of batches above
100 that stand before it are a dead branch: no later state comes from them. So the order of the lines decides what
counts, and whoever adds lines from elsewhere must keep that order.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from llmfoundry_lite.config.schema import Duration

Record = dict[str, Any]

LARGEST = 2**128
"""Beyond what fp32 holds."""


def read_lines(content: bytes | Iterable[bytes]) -> Iterator[tuple[bytes, Record]]:
    """Each whole line, with its newline, and what it says; a line that a crash has made unreadable is passed over."""
    for line in content.splitlines(keepends=True) if isinstance(content, bytes) else content:
        try:
            record = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            continue
        if not isinstance(record, dict):
            continue
        batch = record.get("batch")
        if type(batch) is int and 0 <= batch < 2**53:
            yield line, record


def number_of(value: Any) -> float | None:
    """None for what is no number that fp32 holds: what sums and figures take from a log stays finite."""
    return float(value) if isinstance(value, int | float) and abs(value) < LARGEST else None


def validation_losses(record: Record) -> dict[str, Any]:
    """Label -> validation loss, in the order of the loaders; a single one has no label."""
    return {
        key[len("eval/") : -len("/loss")]: value
        for key, value in record.items()
        if key.startswith("eval/") and key.endswith("/loss") and not key.startswith("eval/icl/")
    }


def missing_lines(here: Iterable[bytes], carried: Sequence[bytes]) -> list[bytes]:
    """The lines of a log that came with a checkpoint, from the first one on that is not here.

    Appended, they void the branch that was trained here from that batch on: the checkpoint does not come from it.
    """
    known = set(here)
    first = next((i for i, line in enumerate(carried) if line not in known), len(carried))
    return list(carried[first:])


def merge_logs(here: bytes, carried: bytes) -> list[bytes]:
    """The lines here and those that came with the newest checkpoint, in the order that `missing_lines` asks for.

    Lines written here after that checkpoint stay behind it: the run carried on from it here.
    """
    ours = here.splitlines(keepends=True)
    theirs = [line for line, _ in read_lines(carried)]
    missing = missing_lines(ours, theirs)
    if not missing:
        return ours
    end = next((i for i in range(len(ours), 0, -1) if ours[i - 1] == theirs[-1]), len(ours))
    return [*ours[:end], *missing, *ours[end:]]


def console_line(record: Record, max_duration: Duration) -> str:
    """`batch 20/800 · loss 4.1234 · …`"""
    total = f"/{int(max_duration.value)}" if max_duration.unit == "ba" else ""
    parts = [f"batch {record['batch']}{total}"]
    if max_duration.unit != "ba":
        key = {"ep": "time/epoch", "sp": "time/sample", "tok": "time/token"}[max_duration.unit]
        parts.append(f"{record.get(key, 0)}/{max_duration}")
    for key, form in (
        ("loss/train/total", "loss {:.4f}"),
        *((f"eval/{label}/loss", f"validation {label} {{:.4f}}") for label in validation_losses(record) if label),
        ("eval/loss", "validation {:.4f}"),
        ("lr", "lr {:.2e}"),
        ("grad_norm", "grad {:.2f}"),
        ("throughput/tokens_per_sec", "{:,.0f} tokens/s"),
        ("throughput/device/mfu", "MFU {:.1%}"),
    ):
        if record.get(key) is not None:
            parts.append(form.format(record[key]))
    if "time/remaining_seconds" in record:
        parts.append("ETA " + duration_text(record["time/remaining_seconds"]))
    return " · ".join(parts)


def duration_text(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
