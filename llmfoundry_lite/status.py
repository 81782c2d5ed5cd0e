"""status.json in the run directory: how the last launch ended, for scripts, whatever their launcher does to exit codes.
launches.jsonl beside it: a line for each beginning and each end of a launch, of which `report` counts failures.

`running | done | stopped | preempted | failed`, the last batch, and the reason in words. While a run runs, it also says
which process that is: what such a launch has written, another one that is refused must not touch.
"""

import json
import socket
import time
from pathlib import Path
from typing import Any

import psutil

from llmfoundry_lite.files import write_atomically

STATUS = "status.json"
LAUNCHES = "launches.jsonl"
"""{"time": seconds since 1970, "status", "batch", "reason", "has_begun", "host"}. A killed launch has no line for its
end; `has_begun` is false where a launch ended before it carried on."""


def write_status(folder: Path, status: str, batch: int, reason: str | None = None, *, has_begun: bool = True) -> None:
    content: dict[str, Any] = {"status": status, "batch": batch, "reason": reason}
    event = {"time": time.time(), **content, "has_begun": has_begun, "host": socket.gethostname()}
    is_known = False
    if status == "running":
        me = psutil.Process()
        content["process"] = {"host": socket.gethostname(), "pid": me.pid, "started": me.create_time()}
        is_known = (read_status(folder) or {}).get("process") == content["process"]
    write_atomically(folder / STATUS, json.dumps(content) + "\n")
    if not is_known:
        with (folder / LAUNCHES).open("a") as file:
            file.write(json.dumps(event) + "\n")


def read_status(folder: Path) -> dict[str, Any] | None:
    try:
        return json.loads((folder / STATUS).read_text())
    except (OSError, ValueError):
        return None


def write_ended_early(folder: Path, status: str, reason: str) -> None:
    """Of a launch that ended before it carried on: the batch stays what it was.

    A script that reads `preempted` would otherwise launch a run again for ever that is refused each time. The status
    of another launch that still runs stays, and so does `done`, which a mistake in a later launch does not undo.
    """
    before = read_status(folder) or {}
    if is_running(before) or (before.get("status") == "done" and status == "failed"):
        return
    write_status(folder, status, before.get("batch", 0), reason, has_begun=False)


def is_running(content: dict[str, Any]) -> bool:
    """Whether the process that wrote it lives; on another machine it is believed to."""
    process = content.get("process")
    if process is None or process["host"] != socket.gethostname():
        return process is not None
    try:
        return abs(psutil.Process(process["pid"]).create_time() - process["started"]) < 1
    except psutil.Error:
        return False
