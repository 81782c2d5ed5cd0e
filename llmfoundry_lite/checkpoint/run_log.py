"""A run's log: the lines of metrics.jsonl, and copies of them beside the run's checkpoints. No torch.

The first half reads, merges and prints lines. The file is append-only: a launch that carries on from batch 100 appends
batch 101, and earlier lines of batches above 100 no longer count. So the order of lines decides which of them count,
and a merge must keep it.

The second half reads and writes the copies. Each save writes what is new in the log as a part, `log/<save_id>.jsonl`,
and its manifest lists all parts, which checkpoints share. The log is not state: if a part is lost, the others are
read, and the next launch that has the whole log writes it again.
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
"""Key in the record of the batch after which a save was found to be published: the bytes of its files."""
FAILED_SAVES, UNSAVED_BATCHES = "checkpoint/failed_saves", "checkpoint/unsaved_batches"
"""Keys in the records of batches while saves fail: the number of failures in a row, and of batches that no save has."""
POSITIONS = {"ba": "batch", "ep": "time/epoch", "sp": "time/sample", "tok": "time/token"}
"""Unit of a duration (batches, epochs, samples, tokens) -> key of a record that has how many are done."""
MAX_NUMBER = 2**128
"""Numbers of a log are below it; it is just above the range of fp32."""
METRICS_ON_CONSOLE = {
    "eval/loss": "validation {:.4f}",
    "lr": "lr {:.2e}",
    "grad_norm": "grad {:.2f}",
    "throughput/tokens_per_sec": "{:,.0f} tokens/s",
    "throughput/device/mfu": "MFU {:.1%}",
}
"""Key of a record -> how `console_line` writes its value. These follow the losses, in this order."""


# --------------------------------------------------------------------------------------------------------------- lines


def read_lines(content: bytes | Iterable[bytes]) -> Iterator[tuple[bytes, Record]]:
    """Parse the lines of a log. `content` is the file's bytes, or its lines.

    Yields each line, as bytes with its newline, and its record: a JSON object with a batch number. Lines that are not
    one are skipped, such as a line that a crash has cut off.
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
    """Return a value of a record as a float, or None if it is not a finite number in the range of fp32.

    A log may come from anybody, and its sums and figures must stay finite.
    """
    return float(value) if isinstance(value, int | float) and abs(value) < MAX_NUMBER else None


def validation_losses(record: Record) -> dict[str, Any]:
    """Return the validation losses in a record, by the label of their validation set and in the order of the sets.

    `eval/books/loss` has the label `books`. If a run has a single set, its key is `eval/loss` and its label is empty.
    Losses of in-context tasks (`eval/icl/…`) are left out.
    """
    losses = {}
    for key, value in record.items():
        is_in_context = key.startswith("eval/icl/")
        is_loss = key.startswith("eval/") and key.endswith("/loss")
        if is_loss and not is_in_context:
            label = key[len("eval/") : -len("/loss")]
            losses[label] = value
    return losses


def missing_lines(lines: Iterable[bytes], checkpoint_lines: Sequence[bytes]) -> list[bytes]:
    """Return the end of a checkpoint's log that a run's log lacks: its lines from the first one on that is not in
    `lines`. Empty if all of them are.

    A launch that carries the checkpoint on appends them to its log. Batches that were trained here, and from which the
    checkpoint does not descend, no longer count then. If the log has batches 1, 2, 3 and 4, and the checkpoint another
    batch 3, the checkpoint's lines from batch 3 on are returned.
    """
    known_lines = set(lines)
    for i, line in enumerate(checkpoint_lines):
        if line not in known_lines:
            return list(checkpoint_lines[i:])
    return []


def merge_logs(log: bytes, checkpoint_log: bytes) -> list[bytes]:
    """Return the lines of a run's log, with the lines of the newest checkpoint's log that it lacks.

    Both are bytes of metrics.jsonl. The missing lines are inserted behind the checkpoint's last line if the log has it,
    because what follows was trained from that checkpoint; otherwise they come last.
    """
    lines = log.splitlines(keepends=True)
    checkpoint_lines = [line for line, _ in read_lines(checkpoint_log)]
    lines_to_insert = missing_lines(lines, checkpoint_lines)
    if not lines_to_insert:
        return lines

    insert_at = len(lines)
    for i in reversed(range(len(lines))):
        if lines[i] == checkpoint_lines[-1]:
            insert_at = i + 1
            break
    return [*lines[:insert_at], *lines_to_insert, *lines[insert_at:]]


def console_line(record: Record, max_duration: Duration) -> str:
    """Format a record of a batch as a line for the console, such as `batch 20/800 · loss 4.1234 · lr 1.00e-03`.

    `max_duration` is the run's. If it is not in batches, its unit is shown as well: `batch 20 · 40960/1000000tok`.
    Metrics that the record lacks are left out.
    """
    position_key = POSITIONS[max_duration.unit]
    if position_key == "batch":
        parts = [f"batch {record['batch']}/{int(max_duration.value)}"]
    else:
        parts = [f"batch {record['batch']} · {record.get(position_key, 0)}/{max_duration}"]

    # Losses first, with a template for each labelled validation set.
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
    """Format a duration as hours, minutes and seconds, `1:02:03`, or below an hour as `2:03`. Fractions are cut off."""
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
    """Read the run's log as a checkpoint has it, from the parts that its manifest lists.

    Parts that are absent, damaged or unreadable are left out, with a note. Raises nothing, because a run can go on
    without its log.
    """
    if not checkpoint.manifest.log:
        return Log(None, (), [])
    run_folder = checkpoint.folder.parent()
    contents = []
    parts_before_loss = []
    notes = []
    for part in checkpoint.manifest.log:
        try:
            contents.append(_read_part(run_folder, part))
            if not notes:
                parts_before_loss.append(part)
        except CheckpointError as error:
            notes.append(f"a part of the log is lost: {error}")
    return Log(b"".join(contents), tuple(parts_before_loss), notes)


def _read_part(run_folder: Folder, part: LogPart) -> bytes:
    """Read a part of the log from the folder that the run's checkpoints are in, and verify it by its hashes.

    Raises UnsoundCheckpointError if it is absent, damaged or cannot be read.
    """

    def read_and_verify(source: Source) -> bytes:
        content = read_bytes(source, 0, part.num_bytes)
        if hash_blocks(content, part.block_bytes).hex() != part.block_hashes:
            raise DamagedCheckpointError(f"{run_folder.url}/{part.name}: its bytes are not what was written", part.name)
        return content

    return read_file(run_folder, part, read_and_verify)


def write_log(
    store: CheckpointStore, save_id: str, content: bytes, previous_parts: tuple[LogPart, ...]
) -> tuple[LogPart, ...]:
    """Write what a run's log has beyond the parts of the previous save, and return all parts for the manifest.

    save_id: the save that the log goes with. It names the new part.
    content: the whole log so far.
    previous_parts: the parts of the previous save, of which no bytes are written again if the log still begins with
        them.

    The new part takes up the parts before it that are not larger than itself. So parts get smaller from first to last,
    and a log of a million lines has at most twenty. Raises OSError.
    """
    # Keep the parts with which the log begins.
    kept_parts: list[LogPart] = []
    num_kept_bytes = 0
    for part in previous_parts:
        bytes_at_part = content[num_kept_bytes : num_kept_bytes + part.num_bytes]
        if hash_blocks(bytes_at_part, part.block_bytes).hex() != part.block_hashes:
            break
        kept_parts.append(part)
        num_kept_bytes += part.num_bytes

    # Take up small parts at the end.
    while kept_parts and kept_parts[-1].num_bytes <= len(content) - num_kept_bytes:
        num_kept_bytes -= kept_parts.pop().num_bytes

    new_content = content[num_kept_bytes:]
    if not new_content:
        return tuple(kept_parts)
    file_name = f"{save_id}.jsonl"
    folder = store.root.child(LOG)
    folder.make()
    folder.put(file_name, new_content)
    new_part = LogPart(
        name=f"{LOG}/{file_name}",
        num_bytes=len(new_content),
        block_bytes=BLOCK_BYTES,
        block_hashes=hash_blocks(new_content, BLOCK_BYTES).hex(),
    )
    return (*kept_parts, new_part)
