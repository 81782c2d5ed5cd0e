"""A run's log: the lines of metrics.jsonl, and the parts of it that lie beside checkpoints. No torch.

Lines are read, merged and printed. The file is append-only. A launch that carries on from batch 100 appends batch 101;
earlier lines of batches above 100 are then a branch that was given up. So the order of lines decides which count, and a
merge must keep it.

Parts, `log/<save_id>.jsonl`, are shared by checkpoints. The log is not state: if a part is lost, the others are read,
and the next launch that has the whole log writes it again.
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
from llmfoundry_lite.ranks.codec import EXACT_IN_A_DOUBLE

Record = dict[str, Any]
"""Content of a line: metrics by name, and `batch`."""

METRICS = "metrics.jsonl"
SAVED = "checkpoint/bytes"
"""Key in the record of the batch after which a save was found to be published."""
FAILED_SAVES, UNSAVED_BATCHES = "checkpoint/failed_saves", "checkpoint/unsaved_batches"
"""Keys in the records of batches while saves fail: the number of failures in a row, and of batches that no save has."""
POSITIONS = {"ba": "batch", "ep": "time/epoch", "sp": "time/sample", "tok": "time/token"}
"""Unit of a duration -> key of how many are done."""
MAX_NUMBER = 2**128
"""Limit of numbers, above the range of fp32."""
METRICS_ON_CONSOLE = {
    "eval/loss": "validation {:.4f}",
    "lr": "lr {:.2e}",
    "grad_norm": "grad {:.2f}",
    "throughput/tokens_per_sec": "{:,.0f} tokens/s",
    "throughput/device/mfu": "MFU {:.1%}",
}
"""Key -> how `console_line` writes it, for those after the losses."""


# --------------------------------------------------------------------------------------------------------------- lines


def read_lines(content: bytes | Iterable[bytes]) -> Iterator[tuple[bytes, Record]]:
    """Yield each whole line of a log, with its newline, and its record. `content` is the file's bytes, or its lines.

    Lines that are no record are skipped, such as one that a crash has cut off.
    """
    lines = content.splitlines(keepends=True) if isinstance(content, bytes) else content
    for line in lines:
        if not line.endswith(b"\n"):
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(record, dict):
            continue
        batch = record.get("batch")
        if type(batch) is int and 0 <= batch < EXACT_IN_A_DOUBLE:
            yield line, record


def number_of(value: Any) -> float | None:
    """Return a value of a record as a float, or None if it is no number that fp32 holds.

    Sums and figures of a log then stay finite, whoever wrote it.
    """
    return float(value) if isinstance(value, int | float) and abs(value) < MAX_NUMBER else None


def validation_losses(record: Record) -> dict[str, Any]:
    """Return label -> validation loss, in the order of the validation sets. A single set has the label ""."""
    losses = {}
    for key, value in record.items():
        is_loss = key.startswith("eval/") and key.endswith("/loss") and not key.startswith("eval/icl/")
        if is_loss:
            losses[key[len("eval/") : -len("/loss")]] = value
    return losses


def missing_lines(lines: Iterable[bytes], checkpoint_lines: Sequence[bytes]) -> list[bytes]:
    """Return the lines of a checkpoint's log from the first one on that `lines` lack.

    A launch appends them to its log when it carries the checkpoint on. That voids the batches from there on that were
    trained here, and from which the checkpoint does not descend.
    """
    known = set(lines)
    for i, line in enumerate(checkpoint_lines):
        if line not in known:
            return list(checkpoint_lines[i:])
    return []


def merge_logs(log: bytes, checkpoint_log: bytes) -> list[bytes]:
    """Return the lines of a log, with those of the newest checkpoint's log that it lacks.

    Lines that were written here after that checkpoint come last, because the run carried on from it here.
    """
    lines = log.splitlines(keepends=True)
    checkpoint_lines = [line for line, _ in read_lines(checkpoint_log)]
    missing = missing_lines(lines, checkpoint_lines)
    if not missing:
        return lines
    end = len(lines)
    for i in reversed(range(len(lines))):
        if lines[i] == checkpoint_lines[-1]:
            end = i + 1
            break
    return [*lines[:end], *missing, *lines[end:]]


def console_line(record: Record, max_duration: Duration) -> str:
    """Write a record for the console, as `batch 20/800 · loss 4.1234 · …`. Metrics that it lacks are left out."""
    position = POSITIONS[max_duration.unit]
    if position == "batch":
        parts = [f"batch {record['batch']}/{int(max_duration.value)}"]
    else:
        parts = [f"batch {record['batch']} · {record.get(position, 0)}/{max_duration}"]

    templates = {"loss/train/total": "loss {:.4f}"}
    for label in validation_losses(record):
        if label:
            templates[f"eval/{label}/loss"] = f"validation {label} {{:.4f}}"
    for key, template in (templates | METRICS_ON_CONSOLE).items():
        if record.get(key) is not None:
            parts.append(template.format(record[key]))

    if "time/remaining_seconds" in record:
        parts.append("ETA " + duration_text(record["time/remaining_seconds"]))
    if record.get(FAILED_SAVES):
        parts.append(f"failed saves {record[FAILED_SAVES]:.0f}")
        parts.append(f"unsaved batches {record.get(UNSAVED_BATCHES, 0):.0f}")
    return " · ".join(parts)


def duration_text(seconds: float) -> str:
    """Write a duration as `1:02:03`, or as `2:03` below an hour."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


# -------------------------------------------------------------------------------------------- parts beside checkpoints


class Log(NamedTuple):
    """A run's log as it was read from a checkpoint."""

    content: bytes | None
    """None if the checkpoint has no log."""
    parts: tuple[LogPart, ...]
    """The parts before the first lost one."""
    notes: list[str]
    """A line for each lost part."""


def read_log(checkpoint: Checkpoint) -> Log:
    """Read a checkpoint's log. Parts that are absent, damaged or cannot be read are left out, with a note."""
    if not checkpoint.manifest.log:
        return Log(None, (), [])
    contents = []
    parts_before_loss = []
    notes = []
    for part in checkpoint.manifest.log:
        try:
            contents.append(_read_part(checkpoint.folder.parent(), part))
            if not notes:
                parts_before_loss.append(part)
        except CheckpointError as error:
            notes.append(f"a part of the log is lost: {error}")
    return Log(b"".join(contents), tuple(parts_before_loss), notes)


def _read_part(folder: Folder, part: LogPart) -> bytes:
    """Return the bytes of a part of the log, from the run's folder. Raises UnsoundCheckpointError if it is absent,
    damaged or cannot be read."""

    def read(source: Source) -> bytes:
        content = read_bytes(source, 0, part.num_bytes)
        if hash_blocks(content, part.block_bytes).hex() != part.block_hashes:
            raise DamagedCheckpointError(f"{folder.url}/{part.name}: its bytes are not what was written", part.name)
        return content

    return read_file(folder, part, read)


def write_log(
    store: CheckpointStore, save_id: str, content: bytes, previous_parts: tuple[LogPart, ...]
) -> tuple[LogPart, ...]:
    """Write the end of a log, `content`, as a new part, and return all parts of the log.

    Parts of the previous save are used again as far as `content` begins with them. But the new part absorbs those
    before it that are not larger than itself, so that a log of a million lines has at most twenty parts. Raises
    OSError.
    """
    kept: list[LogPart] = []
    num_kept_bytes = 0
    for part in previous_parts:
        same_bytes = content[num_kept_bytes : num_kept_bytes + part.num_bytes]
        if hash_blocks(same_bytes, part.block_bytes).hex() != part.block_hashes:
            break
        kept.append(part)
        num_kept_bytes += part.num_bytes
    while kept and kept[-1].num_bytes <= len(content) - num_kept_bytes:
        num_kept_bytes -= kept.pop().num_bytes

    new_content = content[num_kept_bytes:]
    if not new_content:
        return tuple(kept)
    name = f"{save_id}.jsonl"
    folder = store.root.child(LOG)
    folder.make()
    folder.put(name, new_content)
    hashes = hash_blocks(new_content, BLOCK_BYTES).hex()
    new_part = LogPart(name=f"{LOG}/{name}", num_bytes=len(new_content), block_bytes=BLOCK_BYTES, block_hashes=hashes)
    return (*kept, new_part)
