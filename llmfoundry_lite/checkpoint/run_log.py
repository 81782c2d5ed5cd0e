"""A run's log: the lines of metrics.jsonl, and the parts of it that lie beside checkpoints. No torch.

Lines are read, merged and printed. The file is append-only. A launch that carries on from batch 100 appends batch 101.
Earlier lines of batches above 100 are then a dead branch. So the order of lines decides what counts, and a merge must
keep it.

Parts, `log/<save_id>.jsonl`, are shared by checkpoints. A log is not state: if a part is lost, the others are read, and
the next launch that has the whole log writes it again.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from llmfoundry_lite.checkpoint.commit import LOG, Checkpoint
from llmfoundry_lite.checkpoint.folder import Folder, Source
from llmfoundry_lite.checkpoint.manifest import LogPart
from llmfoundry_lite.checkpoint.shards import BLOCK_BYTES, hash_blocks, read_bytes, read_file
from llmfoundry_lite.checkpoint.store import CheckpointStore
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.errors import CheckpointError, DamagedCheckpointError

Record = dict[str, Any]

METRICS = "metrics.jsonl"
SAVED = "checkpoint/bytes"
"""Key in the record of the batch after which a save was found to be published."""
FAILED_SAVES, UNSAVED_BATCHES = "checkpoint/failed_saves", "checkpoint/unsaved_batches"
"""Keys in the records of batches while saves fail: how many in a row, and how many batches no save holds."""
POSITIONS = {"ba": "batch", "ep": "time/epoch", "sp": "time/sample", "tok": "time/token"}
"""Unit of a duration -> key of how many are done."""
MAX_NUMBER = 2**128
"""Limit of numbers, above the range of fp32."""


# --------------------------------------------------------------------------------------------------------------- lines


def read_lines(content: bytes | Iterable[bytes]) -> Iterator[tuple[bytes, Record]]:
    """Yield each whole line, with its newline, and its record; skips lines that a crash has cut off."""
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
    """Return a number that fp32 holds, else None: sums and figures of a log stay finite."""
    return float(value) if isinstance(value, int | float) and abs(value) < MAX_NUMBER else None


def validation_losses(record: Record) -> dict[str, Any]:
    """Return label -> validation loss, in the order of the loaders; a single one has no label."""
    return {
        key[len("eval/") : -len("/loss")]: value
        for key, value in record.items()
        if key.startswith("eval/") and key.endswith("/loss") and not key.startswith("eval/icl/")
    }


def missing_lines(here: Iterable[bytes], carried: Sequence[bytes]) -> list[bytes]:
    """Return the lines of a checkpoint's log from its first line on that is missing here. Appending them voids the
    batches trained here from there on, from which the checkpoint does not descend."""
    known = set(here)
    first = next((i for i, line in enumerate(carried) if line not in known), len(carried))
    return list(carried[first:])


def merge_logs(here: bytes, carried: bytes) -> list[bytes]:
    """Return the lines here with the missing ones of the newest checkpoint's log. Lines written here after that
    checkpoint come after them, because the run carried on from it here."""
    ours = here.splitlines(keepends=True)
    theirs = [line for line, _ in read_lines(carried)]
    missing = missing_lines(ours, theirs)
    if not missing:
        return ours
    end = next((i for i in range(len(ours), 0, -1) if ours[i - 1] == theirs[-1]), len(ours))
    return [*ours[:end], *missing, *ours[end:]]


def console_line(record: Record, max_duration: Duration) -> str:
    """Write a record as `batch 20/800 · loss 4.1234 · …`."""
    key, batch = POSITIONS[max_duration.unit], f"batch {record['batch']}"
    parts = [
        f"{batch}/{int(max_duration.value)}" if key == "batch" else f"{batch} · {record.get(key, 0)}/{max_duration}"
    ]
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
    if record.get(FAILED_SAVES):
        parts.append(f"failed saves {record[FAILED_SAVES]:.0f}")
        parts.append(f"unsaved batches {record.get(UNSAVED_BATCHES, 0):.0f}")
    return " · ".join(parts)


def duration_text(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


# -------------------------------------------------------------------------------------------- parts beside checkpoints


class Log(NamedTuple):
    """A run's log as it was read."""

    content: bytes | None
    """None if the checkpoint has no log."""
    parts: tuple[LogPart, ...]
    """The intact parts at the beginning of the log."""
    notes: list[str]
    """A line for each damaged part."""


def read_log(checkpoint: Checkpoint) -> Log:
    """Read a checkpoint's log. Lost parts are noted."""
    if not checkpoint.manifest.log:
        return Log(None, (), [])
    found, whole, notes = [], [], []
    for part in checkpoint.manifest.log:
        try:
            found.append(_read_part(checkpoint.folder.parent(), part))
            if not notes:
                whole.append(part)
        except CheckpointError as error:
            notes.append(f"a part of the log is lost: {error}")
    return Log(b"".join(found), tuple(whole), notes)


def _read_part(folder: Folder, part: LogPart) -> bytes:
    def read(source: Source) -> bytes:
        content = read_bytes(source, 0, part.num_bytes)
        if hash_blocks(content, part.block_bytes).hex() != part.block_hashes:
            raise DamagedCheckpointError(f"{folder.url}/{part.name}: its bytes are not what was written", part.name)
        return content

    return read_file(folder, part, read)


def write_log(store: CheckpointStore, save_id: str, content: bytes, before: tuple[LogPart, ...]) -> tuple[LogPart, ...]:
    """Write the end of `content` that the parts `before` lack, and return all parts. Raises OSError. A new part absorbs
    those before it that are no longer than itself, so a million lines take at most twenty."""
    kept: list[LogPart] = []
    end = 0
    for part in before:
        if hash_blocks(content[end : end + part.num_bytes], part.block_bytes).hex() != part.block_hashes:
            break
        kept.append(part)
        end += part.num_bytes
    while kept and kept[-1].num_bytes <= len(content) - end:
        end -= kept.pop().num_bytes
    new = content[end:]
    if not new:
        return tuple(kept)
    name = f"{save_id}.jsonl"
    folder = store.root.child(LOG)
    folder.make()
    folder.put(name, new)
    hashes = hash_blocks(new, BLOCK_BYTES).hex()
    record = LogPart(name=f"{LOG}/{name}", num_bytes=len(new), block_bytes=BLOCK_BYTES, block_hashes=hashes)
    return (*kept, record)
