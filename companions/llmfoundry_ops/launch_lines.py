"""Lines of launches.jsonl: those that were there before a launch, and those that it adds. No torch."""

import contextlib
from pathlib import Path
from typing import Any

from llmfoundry_lite.bounded import MAX_NOTE_BYTES, parse_json, read_lines_at_most
from llmfoundry_lite.ranks.status import LAUNCHES
from llmfoundry_ops.faults import LAUNCHER

MAX_HISTORY_BYTES = 1 << 20
"""Bytes before a launch's own lines that are searched for the launch before it."""


class LaunchLines:
    """Reads launches.jsonl of a run folder, from a position on."""

    def __init__(self, folder: Path, num_bytes_before: int):
        """`num_bytes_before` is the size of the file when the launch began, so its own lines follow there."""
        self._path = folder / LAUNCHES
        self._num_bytes_read = num_bytes_before

    def read_last_begun(self) -> dict[str, Any]:
        """Return the newest line, before the present position, of a launch that has begun to train; empty without one.

        Its status is `running` if that launch has recorded no end.
        """
        last_line: dict[str, Any] = {}
        begin = max(0, self._num_bytes_read - MAX_HISTORY_BYTES)  # the first line may be cut off, and does not count
        with contextlib.suppress(OSError):
            for line in read_lines_at_most(self._path, 2 * MAX_HISTORY_BYTES, LAUNCHES, begin=begin):
                begin += len(line)
                if begin > self._num_bytes_read:
                    break
                with contextlib.suppress(ValueError):
                    content = parse_json(line)
                    if isinstance(content, dict) and content.get("has_begun") is True:
                        last_line = content
        return last_line

    def read_new(self) -> list[dict[str, Any]]:
        """Return the lines of launches.jsonl since the last look: beginnings and ends, and lines of the launcher."""
        lines = []
        with contextlib.suppress(OSError):
            for line in read_lines_at_most(self._path, MAX_NOTE_BYTES, LAUNCHES, begin=self._num_bytes_read):
                if not line.endswith(b"\n"):
                    break
                self._num_bytes_read += len(line)
                with contextlib.suppress(ValueError):
                    content = parse_json(line)
                    if isinstance(content, dict) and ({"status", "batch"} <= content.keys() or LAUNCHER in content):
                        lines.append(content)
        return lines
