"""State of runs that may still be written, for `lf.runs` and `watch`. No torch.

Reads status.json, config.yaml and, at each look, what metrics.jsonl has since the last one.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmfoundry_lite.bounded import MAX_LOG_BYTES, read_lines_at_most
from llmfoundry_lite.checkpoint.log_lines import POSITIONS, Record, number_of, read_lines, validation_losses
from llmfoundry_lite.checkpoint.open_folder import open_folder
from llmfoundry_lite.checkpoint.store import CheckpointStore
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.errors import CheckpointError, DataError
from llmfoundry_lite.ranks.status import STATUS, read_status
from llmfoundry_lite.report.reading import LOSS, METRICS, folder_of_checkpoints, read_config, what_to_give


class LiveRun:
    """State of a run: each `look` reads what has been written since the last one.

    `status` is what `status.json` has, `last` the newest line of the log, `config` the run's YAML.
    """

    def __init__(self, folder: Path):
        """Raises DataError if there is no run."""
        self.folder = folder
        self.config: dict[str, Any] = {}
        self.status: dict[str, Any] = {}
        self.last: Record = {}
        """Numbers in the newest line of the log."""
        self.validation: tuple[int, float] | None = None
        """(batch, loss)"""
        self.max_duration: Duration | None = None
        self._offset = 0
        self._opened = open_folder(str(folder))
        if not any((folder / name).is_file() for name in (STATUS, METRICS)):
            raise DataError(f"{folder}: no {STATUS} here; {what_to_give(folder)}")

    def look(self) -> None:
        """Read the status, and what the log has since the last look."""
        self.status = {"status": "unknown", "batch": 0, "reason": None, **(read_status(self.folder) or {})}
        if self.max_duration is None:
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # not written yet, or not by us
                self.config = read_config(self._opened, []) or {}
                self.max_duration = Duration.parse(self.config["max_duration"])
        with contextlib.suppress(OSError):
            for _, record in read_lines(self._new_lines()):
                self.last = {key: value for key, value in record.items() if number_of(value) is not None}
                if losses := [*validation_losses(self.last).values()]:
                    self.validation = (record["batch"], losses[0])

    def _new_lines(self) -> Iterator[bytes]:
        """Yield lines of the log since the last look. One that is being written is for the next."""
        for line in read_lines_at_most(self.folder / METRICS, MAX_LOG_BYTES, METRICS, begin=self._offset):
            if line.endswith(b"\n"):
                self._offset += len(line)
                yield line

    def __fspath__(self) -> str:
        return str(self.folder)

    def __repr__(self) -> str:
        facts = [f"{self.folder}: {self.ending}"]
        if self.loss is not None:
            facts.append(f"loss {self.loss:.4f}")
        if self.validation is not None:
            facts.append(f"validation {self.validation[1]:.4f} at batch {self.validation[0]:,}")
        if saved := self.last_checkpoint():
            facts.append(f"saved {saved}")
        return f"<{', '.join(facts)}>"

    @property
    def ending(self) -> str:
        """Return `done at batch 300` or `failed at batch 120: out of memory …`."""
        reason = f": {self.status['reason']}" if self.status.get("reason") else ""
        return f"{self.status['status']} at batch {self.batch}{reason}"

    @property
    def loss(self) -> float | None:
        """Training loss of the newest batch."""
        return self.last.get(LOSS)

    @property
    def has_ended(self) -> bool:
        return self.status["status"] != "running"

    @property
    def batch(self) -> int:
        return max(self.status["batch"], 0 if self.has_ended else self.last.get("batch", 0))

    @property
    def progress(self) -> float | None:
        """Return the share of the run that is done."""
        if self.status["status"] == "done":
            return 1.0
        if self.max_duration is None:
            return None
        key = POSITIONS[self.max_duration.unit]
        done = self.batch if key == "batch" else self.last.get(key, 0)
        return min(1.0, done / float(self.max_duration.value))

    def last_checkpoint(self) -> str | None:
        """Return `ba200`; None if there is none, or if they lie behind a URL."""
        where = folder_of_checkpoints(self._opened, self.config, opens=())
        with contextlib.suppress(CheckpointError):  # a disk that does not answer now
            candidates = CheckpointStore(where).candidates() if where is not None else []
            return next((f"ba{one.batch}" for one in candidates if one.head is not None), None)
        return None


def list_runs(folder: str | os.PathLike[str]) -> list[LiveRun]:
    """List the runs in a folder by name. Raises DataError if there is no such folder."""
    if not os.path.isdir(folder):
        raise DataError(f"{os.fspath(folder)} is no folder on this disk; expected one whose folders are runs")
    found = []
    for place in sorted(Path(folder).iterdir()):
        if any(os.path.isfile(place / name) for name in (STATUS, METRICS)):  # False where it may not look
            found.append(LiveRun(place))
            found[-1].look()
    return found
