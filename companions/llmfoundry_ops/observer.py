"""Starts the process that observes a launch (`observer_process.py`), and lets it go when the launch has ended.

The process has a session of its own, so that a `kill -9` of rank 0 does not end it. It gets what it needs through a
pipe, because every user of the machine can read arguments, and an address of `alerts` is a secret. The launch is over
when `close` writes another line, or when the pipe closes because this process has ended.
"""

import json
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmfoundry_lite.checkpoint.run_log import number_of
from llmfoundry_lite.config.fields import as_yaml
from llmfoundry_lite.config.load_train import Observed
from llmfoundry_lite.config.surprises import ALERT_SECONDS
from llmfoundry_lite.ranks.identity import describe_this_process
from llmfoundry_lite.ranks.output import say
from llmfoundry_lite.ranks.status import LAUNCHES, read_status
from llmfoundry_ops.alerts import ALERTS, STARTED, append_record, name_of_save, new_observer_id, read_record
from llmfoundry_ops.processes import start_module

MAX_DESCRIPTION_BYTES = 1 << 16
"""Bytes that a pipe holds on Linux. A longer description would make the launch wait until the process reads it."""
MAX_STATUS_CHARACTERS = 1000
"""Characters that are kept of a text in the status of the launch before."""


class Observer:
    """The process beside a launch, as the launch sees it."""

    def __init__(self, launch: Observed):
        """Start the process. If that fails, a line says so, and the launch goes on."""
        self._process: subprocess.Popen[bytes] | None = None
        self._record = launch.run_folder / ALERTS
        self._num_record_bytes = 0
        """Bytes of the record of messages before this launch."""
        with suppress(OSError):
            self._num_record_bytes = self._record.stat().st_size
        try:
            observer_id = new_observer_id()
            self._process = _start(_describe(launch, observer_id))
            if launch.alerts is not None:
                # The process takes seconds to import on a busy machine, and may end with the launch before that.
                append_record(launch.run_folder, {"time": time.time(), "event": STARTED, "observer": observer_id})
        except OSError as error:
            print(f"warning: no alerts and no metrics: {error.strerror or error}", file=sys.stderr, flush=True)

    def close(self, reason_to_leave: str = "") -> None:
        """Tell the process that the launch has ended, and wait some seconds until it has sent the last alert.

        `reason_to_leave` says why the launch was asked to leave before its end; empty if it was not.
        """
        process = self._process
        if process is None:
            return
        self._process = None  # a signal that interrupts the wait may call this again
        assert process.stdin is not None
        # Closing alone would not do: workers of the data loader are forks, and may hold the pipe open.
        with suppress(OSError):
            process.stdin.write(json.dumps(reason_to_leave).encode() + b"\n")
            process.stdin.close()
        is_late = False
        try:
            process.wait(ALERT_SECONDS)
        except subprocess.TimeoutExpired:
            is_late = True
        warning = describe_undelivered(self._record, self._num_record_bytes, is_late=is_late)
        if warning:
            with suppress(OSError, RuntimeError):  # RuntimeError: a signal has interrupted another print
                say(f"warning: {warning}", file=sys.stderr)


def describe_undelivered(record: Path, num_bytes_before: int, *, is_late: bool) -> str:
    """Return a text about messages of a launch that were not delivered; empty if all were.

    record: the run's record of messages, which has no addresses. It is read from `num_bytes_before` on.
    is_late: whether messages are still being tried.
    """
    num_messages: Counter[str] = Counter()
    errors: dict[str, list[str]] = {}
    for entry in read_record(record, num_bytes_before):
        receiver, error = entry.get("receiver"), entry.get("error")
        if not isinstance(receiver, str):
            continue
        num_messages[receiver] += 1
        if isinstance(error, str):
            errors.setdefault(receiver, []).append(error)

    parts = []
    for receiver, texts in errors.items():
        parts.append(f"{len(texts)} of {num_messages[receiver]} messages to {receiver} not delivered: {texts[-1]}")
    if is_late:
        parts.append("the last message is not delivered yet, and is tried for another minute")
    return f"alerts: {'; '.join(parts)}; see {record}" if parts else ""


def _describe(launch: Observed, observer_id: str = "") -> bytes:
    """Return what the process has to know, as a line of JSON: the launch, and the run folder as it is before it.

    Raises OSError if that is too long.
    """
    launches = launch.run_folder / LAUNCHES
    num_launch_bytes = 0
    with suppress(OSError):
        num_launch_bytes = launches.stat().st_size
    description = {
        "run_name": launch.run_name,
        "run_folder": str(launch.run_folder.absolute()),
        "alerts": as_yaml(launch.alerts),
        "metrics_port": launch.metrics_port,
        "metrics_host": launch.metrics_host,
        "process": describe_this_process(),
        "observer": observer_id,
        "status_before": _read_status_before(launch.run_folder),
        "num_launch_bytes": num_launch_bytes,
    }
    line = json.dumps(description).encode() + b"\n"
    if len(line) > MAX_DESCRIPTION_BYTES:
        raise OSError(f"alerts: the block has {len(line):,} bytes as JSON, expected at most {MAX_DESCRIPTION_BYTES:,}")
    return line


def _read_status_before(folder: Path) -> dict[str, Any] | None:
    """Return those keys of the status before this launch that the process uses; None if there is no status.

    Anybody may have written the file, which may have a megabyte. So texts are cut off, and a value that no launch
    writes counts as absent.
    """
    content = read_status(folder)
    if content is None:
        return None
    return {
        "status": content["status"][:MAX_STATUS_CHARACTERS],
        "batch": content["batch"],
        "reason": (content.get("reason") or "")[:MAX_STATUS_CHARACTERS] or None,
        "last_saved": name_of_save(content.get("last_saved")),
        "saved_at": number_of(content.get("saved_at")),
    }


def _start(description: bytes) -> subprocess.Popen[bytes]:
    """Start the process and send it the description. Its standard input stays open. Raises OSError."""
    # It has a session of its own, and ends by itself after the last alert.
    process = start_module(
        ["llmfoundry_ops.observer_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(description)
    process.stdin.flush()
    return process
