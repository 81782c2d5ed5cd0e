"""The rank's side of the connection to the coordinator: its hello, heartbeats and decisions.

A `Member` has two background threads: one sends heartbeats, the other receives. A silent coordinator counts as gone,
because a frozen process or a dead link sends no reset. Rank 0 receives the decisions of its island, and broadcasts them
(`training.islands`). Every rank receives newer views and its eviction itself, so that none waits for a peer that is
gone. `View` is the main decision: the islands that train together, and their rows.

`start_coordinator_if_absent` starts the coordinator for `islands.begin_with`. This file does not import torch.
"""

import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from llmfoundry_islands.coordination.messages import (
    FROM_COORDINATOR,
    HANDSHAKE_SECONDS,
    BadMessageError,
    Message,
    check_message,
    dial,
    format_address,
    pack,
    receive,
)
from llmfoundry_lite.companions import search_path
from llmfoundry_lite.errors import EXIT_PREEMPTED, ConfigError

HEARTBEAT_SECONDS = 0.5
POLL_SECONDS = 0.1
"""Interval at which a starting coordinator is polled."""
SILENCE_SECONDS = 4.0
"""Silence after which the coordinator counts as gone. It sends four heartbeats a second."""
CHUNK_BYTES = 1 << 16
"""Bytes that are sent in one call, each of which may take SILENCE_SECONDS."""
SECONDS_TO_START = 60.0
"""Time that a coordinator has to start, on a busy machine."""
SECONDS_TO_LEAVE = 3.0
"""Time that an evicted rank's main thread has to leave. It may hang in a collective that no other rank joins."""
DESCRIPTION_SECONDS = 30.0
"""Time that the coordinator has to describe an island of a view. It sends the description before the view."""


class Disconnection(NamedTuple):
    """Why the connection to the coordinator has ended."""

    reason: str
    kind: str
    """`gone`: the coordinator cannot be reached. `evicted` or `refused`: it has sent this island away."""


class View(NamedTuple):
    """The islands that train together in an epoch, and their rows of each batch."""

    epoch: int
    """Number of the view. It grows whenever members or rows change."""
    batch: int
    """Number of batches that were committed before."""
    members: dict[str, str]
    """Island -> its launch, in order of names."""
    row_indices: dict[str, range]
    """Island -> the rows of each batch that it trains on, by their index in the batch."""
    leader: str
    """The island that saves."""
    source: str
    """The island that sends its state to the joiners. Empty if there are none."""
    joiners: list[str]
    """Members that receive the source's state before their first batch."""
    shares: dict[str, int]
    """Island -> the share of each tensor's rows that it adds up, see `owners`. Empty if islands swap gradients."""
    is_whole: bool = False
    """With local steps: the next exchange is of all weights, not of a fragment."""

    @classmethod
    def from_message(cls, message: Message) -> "View":
        """Decode a view from the message that `as_message` returns."""
        fields = {key: message[key] for key in cls._fields}
        fields["row_indices"] = {name: range(*bounds) for name, bounds in message["row_indices"].items()}
        return cls(**fields)

    def as_message(self) -> Message:
        """Encode the view as a message, in which ranges are [start, stop]."""
        bounds = {name: [indices.start, indices.stop] for name, indices in self.row_indices.items()}
        return {"kind": "view", **self._asdict(), "row_indices": bounds}


def start_coordinator_if_absent(address: tuple[str, int], num_islands: int, output: Path) -> None:
    """Start a coordinator at `address`, on this host, unless one is listening there. Returns once one is.

    It begins the run with `num_islands`, and writes to the file `output`. It outlives this launch, and ends when no
    island is connected. Raises ConfigError if none can be started.
    """
    host_and_port = format_address(address)
    started_at = None
    while not is_listening(address):
        if started_at is None:
            started_at = time.monotonic()
            _start_coordinator(host_and_port, num_islands, output)
        output_lines = output.read_text(errors="replace").splitlines()
        last_line = output_lines[-1] if output_lines else "no output"
        is_overdue = time.monotonic() - started_at > SECONDS_TO_START
        has_failed = last_line.startswith("error: ") or is_overdue
        # If another island was faster, this coordinator fails because the port is taken.
        if has_failed and not is_listening(address):
            raise ConfigError(
                f"islands.begin_with: no coordinator starts at {host_and_port}: {last_line}; start it there with "
                "`llmfoundry-lite islands coordinate`, or give islands.coordinator an address of this host"
            )
        time.sleep(POLL_SECONDS)


def _start_coordinator(host_and_port: str, num_islands: int, output: Path) -> None:
    """Start a coordinator that does not end with this process, and return at once."""
    command = [sys.executable, "-P", "-m", "llmfoundry_lite", "islands", "coordinate", "--until-alone"]
    command += ["--listen", host_and_port, "--islands", str(num_islands)]
    # The shell ends at once, so that the coordinator is not a child of this rank. Launchers kill the children of a rank
    # that hangs.
    detached_command = ["sh", "-c", '"$@" &', "sh", *command]
    output.parent.mkdir(parents=True, exist_ok=True)
    output.unlink(missing_ok=True)  # opening a link would write to the file that it names
    with output.open("wb") as file:
        subprocess.run(
            detached_command,
            start_new_session=True,
            check=True,
            env={**os.environ, **search_path()},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )


def connect_to_coordinator(address: tuple[str, int], token: bytes, on_waiting: Callable[[str], None]) -> socket.socket:
    """Connect to the coordinator, waiting up to SECONDS_TO_START for it to start. Raises ConfigError.

    Calls `on_waiting` once with the reason if it has to wait.
    """
    host_and_port = format_address(address)
    give_up_at = time.monotonic() + SECONDS_TO_START
    has_reported = False
    while True:
        try:
            return dial(address, token)
        except (BadMessageError, UnicodeError) as error:  # UnicodeError: not a host name
            raise ConfigError(f"islands.coordinator: {host_and_port}: {error}") from None
        except OSError as error:
            reason = error.strerror or error
            if time.monotonic() > give_up_at:
                raise ConfigError(
                    f"islands.coordinator: {host_and_port} does not answer ({reason}); start it with "
                    "`llmfoundry-lite islands coordinate`"
                ) from error
            if not has_reported:
                on_waiting(f"{host_and_port} does not answer ({reason}); for {SECONDS_TO_START:.0f} s at most")
            has_reported = True
            time.sleep(POLL_SECONDS)


def is_listening(address: tuple[str, int]) -> bool:
    """Return whether a connection to this address is accepted."""
    try:
        socket.create_connection(address, timeout=HANDSHAKE_SECONDS).close()
    except (OSError, UnicodeError):  # UnicodeError: not a host name
        return False
    return True


class Member:
    """A rank's connection to the coordinator.

    The receiving thread calls the functions `on_newer_view`, `on_disconnected`, `on_evicted` and `on_waiting`; the
    sending thread reads `phase` and calls `count_bytes`. The caller may replace all of them.
    """

    def __init__(
        self, address: tuple[str, int], token: bytes, name: str, on_waiting: Callable[[str], None] = lambda reason: None
    ):
        """Connect to the coordinator at `address`, and start the threads. Raises ConfigError.

        `name` is this island's. `on_waiting` is called with the reason why this island waits: that no coordinator
        answers or, on rank 0, what the coordinator says.
        """
        self.name = name
        self.on_newer_view: Callable[[int], None] = lambda epoch: None
        """Called with the epoch of each view, before the decision can be received."""
        self.on_disconnected: Callable[[], None] = lambda: None
        """Called when the connection has ended."""
        self.on_evicted: Callable[[str], None] = lambda reason: None
        """Called with the reason before the process exits although its main thread hangs."""
        self.on_waiting = on_waiting
        self.disconnection: Disconnection | None = None
        """Why the connection has ended. None while it lasts."""
        self.phase = "compute"
        """What this rank does, for heartbeats: `compute`, `exchange` or `wait`."""
        self.count_bytes: Callable[[], int] = lambda: 0
        """Returns the bytes that this rank has exchanged with other islands, for heartbeats."""
        self._decisions: queue.Queue[Message | Disconnection] = queue.Queue()
        self._described: dict[tuple[str, str], dict[int, Message]] = {}
        """(name, launch) of an island -> rank -> its description, in order of arrival."""
        self._changed = threading.Condition()
        """Notified when a description or a decision arrives. Guards `_described` and `_has_decision`."""
        self._has_decision = False
        """A first decision, or the end of the connection, has arrived."""
        self._sending = threading.Lock()
        self._is_closed = False
        self._connection = connect_to_coordinator(address, token, on_waiting)
        self._connection.settimeout(SILENCE_SECONDS)
        for function in (self._receive, self._send_heartbeats):
            threading.Thread(target=function, name="islands", daemon=True).start()

    def send(self, message: Message) -> None:
        """Send a message. Any thread may call this.

        Does nothing if the coordinator is gone. The next decision is then a Disconnection.
        """
        with suppress(OSError), self._sending:
            try:
                raw = pack(message)
                for begin in range(0, len(raw), CHUNK_BYTES):
                    self._connection.sendall(raw[begin : begin + CHUNK_BYTES])
            except TimeoutError:  # half of a message may have been sent, so that no other can follow
                self._shut_down()

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for this rank's first decision. Returns whether it has arrived."""
        with self._changed:
            return self._changed.wait_for(lambda: self._has_decision, seconds)

    def receive_decision(self) -> Message | Disconnection:
        """Wait for the next decision and return it: a view, a commit, a state or `left`; or why none will follow."""
        return self._decisions.get()

    def describe(self, name: str, launch: str, timeout: float = DESCRIPTION_SECONDS) -> list[Message]:
        """Return the descriptions of an island's ranks, in order of ranks. For rank 0 only.

        The coordinator sends them before the first view that has the island. Forgets earlier launches of the island.
        Raises ConnectionError if they do not come, or the connection has ended.
        """

        def is_complete() -> bool:
            descriptions = self._described.get((name, launch), {})
            return any(len(descriptions) == message["size"] for message in descriptions.values())

        with self._changed:
            has_answer = self._changed.wait_for(lambda: is_complete() or self.disconnection, timeout)
            if not has_answer or self.disconnection:
                raise ConnectionError(f"nothing is known of island {name}")
            launches = [key for key in self._described if key[0] == name]
            for earlier_launch in launches[: launches.index((name, launch))]:
                del self._described[earlier_launch]
            return [message for _, message in sorted(self._described[name, launch].items())]

    def close(self, *, has_finished: bool = False) -> None:
        """Leave the run and close the connection. `has_finished`: the run is over, for all islands."""
        self._is_closed = True
        self.send({"kind": "leave", "finished": has_finished})
        self._shut_down()
        self._connection.close()

    def _shut_down(self) -> None:
        """End the connection for both threads, which may be using it."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _receive(self) -> None:
        """Handle the coordinator's messages until the connection ends. The receiving thread.

        Sets `disconnection`, unless this side has closed the connection. An evicted rank gets some time to leave, and
        then this thread ends the process.
        """
        disconnection = self._receive_until_end()
        if self._is_closed:
            return
        self.disconnection = disconnection
        self._shut_down()
        self._put_decision(disconnection)
        self.on_disconnected()
        if disconnection.kind == "evicted":
            time.sleep(SECONDS_TO_LEAVE)
            with suppress(Exception):
                self.on_evicted(disconnection.reason)
            os._exit(EXIT_PREEMPTED)

    def _receive_until_end(self) -> Disconnection:
        """Handle messages until the connection ends, and return why it has ended."""
        try:
            while True:
                message = receive(self._connection)
                check_message(message, FROM_COORDINATOR)
                if message["kind"] in ("evicted", "refused"):
                    return Disconnection(message["reason"], message["kind"])
                self._handle(message)
        except TimeoutError:
            return Disconnection("the coordinator is silent", "gone")
        except BadMessageError as error:
            return Disconnection(f"the coordinator sent a malformed message ({error})", "gone")
        except OSError:
            return Disconnection("the coordinator is gone", "gone")

    def _handle(self, message: Message) -> None:
        """Handle a message that does not end the connection."""
        kind = message["kind"]
        if kind == "beat":
            return
        if kind == "waits":
            self.on_waiting(message["reason"])
        elif kind == "member":
            with self._changed:
                descriptions = self._described.setdefault((message["name"], message["launch"]), {})
                descriptions[message["rank"]] = message
                self._changed.notify_all()
        else:
            if kind == "view":
                # Before the main thread gets it, because that may wait for an island which is gone.
                self.on_newer_view(message["epoch"])
            self._put_decision(message)

    def _put_decision(self, decision: Message | Disconnection) -> None:
        """Pass a decision to `receive_decision`."""
        self._decisions.put(decision)
        with self._changed:
            self._has_decision = True
            self._changed.notify_all()

    def _send_heartbeats(self) -> None:
        """Send heartbeats until the connection ends. The sending thread."""
        while self.disconnection is None and not self._is_closed:
            self.send({"kind": "beat", "phase": self.phase, "bytes": self.count_bytes()})
            time.sleep(HEARTBEAT_SECONDS)
