"""Delivers messages: to a URL as JSON, to a program, or by the package apprise. No torch.

Each receiver has a thread of its own, so that one which does not answer delays neither the others nor the observation
of the run. No receiver's address is part of any text here, because it is a secret.
"""

import os
import queue
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from llmfoundry_lite.ranks.rank import RANK_VARIABLES
from llmfoundry_lite.retry import Budget
from llmfoundry_lite.search_path import environment_of_user
from llmfoundry_ops.alerts import Alert

ATTEMPT_SECONDS = 10.0
"""Longest time of one attempt to reach a server."""
COMMAND_SECONDS = 30.0
"""Longest time that the user's program may run for one message. It is killed then."""
PAUSES_SECONDS = (1.0, 5.0, 15.0, 60.0)
"""Pauses before further attempts; the last one repeats."""
RETRY_SECONDS = 1800.0
"""How long a message is tried again while the launch goes on."""
MAX_UNANSWERED = 3
"""How often a message is sent that a server took and did not answer in time. It may have arrived each time."""
OLD_SECONDS = 30.0
"""How long messages before the last one are tried after the launch has ended. The last says how it has."""
LASTING_CODES = range(300, 500)
"""HTTP codes that another attempt would get again: the address is wrong or refused. 408 and 429 are exceptions."""
CODES_THAT_PASS = (408, 429)


class UndeliveredError(Exception):
    """A receiver did not take a message. The text has no address."""


class LastingError(UndeliveredError):
    """A receiver refuses a message, and would refuse it again."""


class UnansweredError(UndeliveredError):
    """A server took a message and did not answer in time, so that it may have arrived."""


class Receiver:
    """One address to which messages go, in the order of the events."""

    def __init__(self, name: str, send: Callable[[Alert], None], note: Callable[[dict[str, Any]], None]):
        """Start the thread. `name` is the key of the YAML. `note` gets an entry for the record after each message."""
        self.name = name
        self._send = send
        self._note = note
        self._queue: queue.SimpleQueue[Alert | None] = queue.SimpleQueue()
        self._is_closing = threading.Event()
        self._deadline = float("inf")
        """Monotonic time after which nothing is tried again."""
        self._old_deadline = float("inf")
        """The same for all messages but the last."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, alert: Alert) -> None:
        """Queue a message."""
        self._queue.put(alert)

    def close(self, deadline: float) -> None:
        """Let the thread end when all messages are delivered, or at a monotonic time `deadline`. Does not wait."""
        self._deadline = deadline
        self._old_deadline = min(deadline, time.monotonic() + OLD_SECONDS)
        self._queue.put(None)
        self._is_closing.set()  # ends a long pause: now is the last chance

    def join(self, seconds: float) -> None:
        """Wait for the thread."""
        self._thread.join(max(0.0, seconds))

    def _run(self) -> None:
        """Deliver messages until `close`."""
        while True:
            alert = self._queue.get()
            if alert is None:
                return
            error = self._deliver(alert)
            self._note({"time": time.time(), "receiver": self.name, "of": alert.event, "error": error})

    def _deliver(self, alert: Alert) -> str | None:
        """Deliver a message, with retries. Returns why it could not be delivered, or None."""
        num_unanswered = 0
        if self._is_too_late():
            return "the launch has ended, and the receiver was late; left out for the messages after it"
        budget = Budget(PAUSES_SECONDS, seconds=RETRY_SECONDS, began=time.monotonic())
        while True:
            try:
                self._send(alert)
                return None
            except LastingError as error:
                return str(error)
            except UnansweredError as error:
                num_unanswered += 1
                text = f"{error}, {num_unanswered} times; it may have arrived"
                if num_unanswered == MAX_UNANSWERED:
                    return text
            except Exception as error:  # of any client
                text = _describe(error)
            pause_seconds = budget.pause(time.monotonic())
            if pause_seconds is None or time.monotonic() >= self._deadline or self._is_too_late():
                return text
            if self._is_closing.is_set():
                time.sleep(min(pause_seconds, PAUSES_SECONDS[0]))
            else:
                self._is_closing.wait(pause_seconds)

    def _is_too_late(self) -> bool:
        """Return whether the message that is being delivered delays the last one for too long."""
        if not self._is_closing.is_set() or time.monotonic() < self._old_deadline:
            return False
        return self._queue.qsize() > 1  # the end of the queue counts as one


def _describe(error: Exception) -> str:
    """Return an error's kind and the system's reason, without the rest of its text, which may have the address."""
    if isinstance(error, UndeliveredError):
        return str(error)
    reason = getattr(error, "reason", error)
    text = getattr(reason, "strerror", None) or type(reason).__name__
    return f"{type(error).__name__}: {text}"


# --------------------------------------------------------------------------------------------------------- webhook


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, which urllib would follow with a GET that has no message."""

    def redirect_request(self, *arguments: Any, **options: Any) -> None:
        return None


def post(url: str, alert: Alert) -> None:
    """Post a message as JSON. Raises UndeliveredError for the answer of a server, and OSError if there is none."""
    request = urllib.request.Request(
        url, data=alert.as_json(), headers={"Content-Type": "application/json"}, method="POST"
    )
    opener = urllib.request.build_opener(_NoRedirects)
    try:
        with opener.open(request, timeout=ATTEMPT_SECONDS):
            pass
    except TimeoutError:  # urllib wraps one that comes before the message is sent
        raise UnansweredError(f"the server did not answer within {ATTEMPT_SECONDS:g} s") from None
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in LASTING_CODES and error.code not in CODES_THAT_PASS:
            raise LastingError(f"the server answered {error.code}") from None
        raise UndeliveredError(f"the server answered {error.code}") from None


# --------------------------------------------------------------------------------------------------------- program


def run_command(command: list[str], alert: Alert) -> None:
    """Run the user's program with a message: in its environment, and as JSON on its standard input.

    The variables are LLMFOUNDRY_ALERT_ and the name of a field in capitals, such as LLMFOUNDRY_ALERT_TEXT. No text of
    the run is an argument, and no shell reads it. Raises UndeliveredError if the program fails, and OSError if there is
    no such program.
    """
    environment = environment_of_user()
    for variable in RANK_VARIABLES:
        environment.pop(variable, None)
    environment |= variables_of(asdict(alert))
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )
    try:
        process.communicate(alert.as_json(), timeout=COMMAND_SECONDS)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise LastingError(f"it did not end within {COMMAND_SECONDS:g} s, and was killed") from None
    if process.returncode:
        raise UndeliveredError(f"it ended with {process.returncode}")


def variables_of(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables of a message, whose fields are given. None becomes empty text."""
    variables = {}
    for name, value in fields.items():
        text = "" if value is None else str(value)
        variables[f"LLMFOUNDRY_ALERT_{name.upper()}"] = text.replace("\0", "")
    return variables


# --------------------------------------------------------------------------------------------------------- apprise


def notify(address: str, alert: Alert) -> None:
    """Send a message by apprise, which knows Slack, mail and others by their addresses. Raises UndeliveredError."""
    import apprise  # pyright: ignore[reportMissingImports] - an optional dependency

    sender = apprise.Apprise()
    if not sender.add(address):
        raise LastingError("apprise does not know this kind of address")
    title = f"{alert.run}: {alert.event.replace('_', ' ')}"
    if not sender.notify(body=alert.text, title=title, body_format=apprise.NotifyFormat.TEXT):
        raise UndeliveredError("apprise could not deliver it")
