"""The process beside a launch that sends its alerts and serves its metrics. No torch.

`observer.py` starts it as `python -m llmfoundry_ops.observer_process`, and sends it a description of the launch as a
line of JSON on its standard input. The process reads the run folder, and writes nothing there but its record of alerts.
The launch has ended when there is more to read from standard input, when that is closed, or when the launch's process
is gone. This process then sends the last alert, and ends about END_SECONDS later at most.
"""

import json
import os
import select
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from llmfoundry_lite.config.callbacks_schema import AlertsConfig
from llmfoundry_lite.errors import remember_secret
from llmfoundry_lite.ranks.identity import is_alive
from llmfoundry_lite.ranks.signals import LEAVING_SIGNALS
from llmfoundry_ops.alerts import Alert
from llmfoundry_ops.launch_observer import LOOK_SECONDS, LaunchObserver
from llmfoundry_ops.metrics_port import MetricsPort
from llmfoundry_ops.receivers import COMMAND_SECONDS, Receiver, notify, post, run_command

END_SECONDS = 60.0
"""How long the last alerts are tried after the launch has ended. This process then ends."""
NICENESS = 10
"""The ranks go first on shared cores."""


def main() -> None:
    """Observe the launch that standard input describes, until it has ended and its last message is delivered."""
    # This process ends by itself. A handler, unlike SIG_IGN, is not inherited by the user's program.
    for number in LEAVING_SIGNALS:
        signal.signal(number, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEAVING_SIGNALS)
    os.nice(NICENESS)
    description = json.loads(_read_line())

    receivers: list[Receiver] = []

    def send(alert: Alert) -> None:
        for receiver in receivers:
            receiver.put(alert)

    observer = LaunchObserver(description, send)
    if description["alerts"] is not None:
        receivers += build_receivers(AlertsConfig(**description["alerts"]), observer.messages.record)
    observer.begin()

    # Look at the run until its launch has ended.
    metrics = MetricsPort(description, observer)
    while not _is_over(description["process"]):
        metrics.open()
        observer.look()
    metrics.close()  # the next launch wants the port
    observer.end(_read_reason_to_leave())

    # Wait for the last messages, but not for long.
    deadline = time.monotonic() + END_SECONDS
    for receiver in receivers:
        receiver.close(deadline)
    for receiver in receivers:
        receiver.join(deadline + COMMAND_SECONDS - time.monotonic())  # an attempt may have begun just before
    os._exit(0)  # not waiting for a thread whose server does not answer


def build_receivers(alerts: AlertsConfig, note: Callable[[dict[str, Any]], None]) -> list[Receiver]:
    """Return the receivers that the YAML names. `note` gets an entry for the record after each message."""
    addresses = [alerts.webhook, *alerts.apprise]
    for address in addresses:
        if address is not None:
            remember_secret(address)  # every text masks it from now on

    receivers = []
    if alerts.webhook is not None:
        receivers.append(Receiver("webhook", partial(post, alerts.webhook), note))
    if alerts.command is not None:
        receivers.append(Receiver("command", partial(run_command, alerts.command), note))
    for index, address in enumerate(alerts.apprise):
        receivers.append(Receiver(f"apprise[{index}]", partial(notify, address), note))
    return receivers


def _read_line() -> bytes:
    """Read a line from standard input, and nothing after it."""
    content = b""
    while not content.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            break
        content += byte
    return content


def _read_reason_to_leave() -> str | None:
    """Return why the launch was asked to leave, empty if it was not, or None if it ended without sending that."""
    can_read, _, _ = select.select([0], [], [], 0)
    line = _read_line() if can_read else b""
    return json.loads(line) if line else None


def _is_over(process: dict[str, Any]) -> bool:
    """Wait until the next look, and return whether the launch, which `process` has started, has ended meanwhile."""
    can_read, _, _ = select.select([0], [], [], LOOK_SECONDS)
    # A worker of the data loader may still hold the pipe of a process that was killed.
    return bool(can_read) or is_alive(process) is False


if __name__ == "__main__":
    main()
