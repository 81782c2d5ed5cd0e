"""Why tries of `train -n` have failed, as the launcher knows it, recorded in the run folder. No torch.

A rank that is killed or frozen says nothing. Rank 0 then writes that it has lost contact, or is ended by the launcher
before it can write anything. `FaultRecord` corrects `status.json` in these cases, and adds a line to launches.jsonl,
which the observer reads. A reason that rank 0 knows by itself, such as an error of its own, stays.
"""

import json
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmfoundry_lite.bounded import MAX_NOTE_BYTES, parse_json, read_lines_at_most
from llmfoundry_lite.files import open_no_link
from llmfoundry_lite.ranks.ending import LOST_CONTACT
from llmfoundry_lite.ranks.identity import boot_id, uptime
from llmfoundry_lite.ranks.status import LAUNCHES, SAVES, TRY_AGAIN, read_status, write_status

LAUNCHER = "launcher"
"""Key of a line of launches.jsonl by the launcher: why a try has failed; null if rank 0 has recorded that itself."""
RESTARTS = "restarts"
"""Key of the same line: whether the launcher starts the ranks again."""
WAS_KILLED = "was_killed"
"""Key of the same line: whether a rank was ended by SIGKILL, as the kernel does when memory runs out."""


class FaultRecord:
    """The launcher's record in a run folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._num_bytes_before = 0
        """Bytes of launches.jsonl before the present try."""

    def begin_try(self) -> None:
        """Note where the lines of the next try begin."""
        self._num_bytes_before = 0
        with suppress(OSError):
            self._num_bytes_before = (self.folder / LAUNCHES).stat().st_size

    def note(self, fault: str, *, restarts: bool, was_killed: bool = False) -> None:
        """Record how a try has failed whose ranks have ended. A disk that cannot be written changes nothing.

        fault: the first thing that went wrong, as the launcher has seen it.
        restarts: whether the ranks start again.
        was_killed: whether a rank was ended by SIGKILL, and not by the launcher.
        """
        with suppress(OSError):
            reason = fault if fault and self._correct_status(fault) else None
            if not self.folder.is_dir():
                return  # nothing has begun
            line: dict[str, Any] = {"time": time.time(), "boot": boot_id(), "uptime": uptime()}
            line |= {LAUNCHER: reason, RESTARTS: restarts, WAS_KILLED: was_killed, "host": socket.gethostname()}
            with open(self.folder / LAUNCHES, "a", opener=open_no_link) as file:
                file.write(json.dumps(line) + "\n")

    def _correct_status(self, fault: str) -> bool:
        """Write `fault` to status.json if rank 0 has not recorded why this try has ended.

        Returns whether it has not. A status that an earlier launch has left stays.
        """
        line = self._read_last_line()
        if line is None:
            return True  # rank 0 has not begun
        content = read_status(self.folder) or {}
        if content.get("status") != "failed":
            return False

        if line["status"] == "running":  # rank 0 has written no end, so this is the end of its launch
            more = {key: content[key] for key in (*SAVES, TRY_AGAIN) if key in content}
            write_status(self.folder, "failed", content["batch"], fault, **more)
            return True
        if LOST_CONTACT not in (content.get("reason") or ""):
            return False
        more = {key: value for key, value in content.items() if key not in ("status", "batch", "reason")}
        write_status(self.folder, "failed", content["batch"], fault, is_update=True, **more)
        return True

    def _read_last_line(self) -> dict[str, Any] | None:
        """Return the newest line of launches.jsonl that rank 0 has written in this try; None if there is none."""
        last_line = None
        with suppress(OSError):
            path = self.folder / LAUNCHES
            for line in read_lines_at_most(path, MAX_NOTE_BYTES, LAUNCHES, begin=self._num_bytes_before):
                with suppress(ValueError):
                    content = parse_json(line)
                    if isinstance(content, dict) and "status" in content:
                        last_line = content
        return last_line
