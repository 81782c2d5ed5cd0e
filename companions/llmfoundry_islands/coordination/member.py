"""One rank's connection to the coordinator: its hello, heartbeats and decisions. No torch.

One thread sends heartbeats, another receives. A silent coordinator counts as gone: a frozen process or a dead link
sends no reset. Rank 0 receives and broadcasts the decisions of the island. Every rank receives newer views and its
eviction itself, so that none waits for a peer that is gone.
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
LOOK_SECONDS = 0.1
"""Interval at which a starting coordinator is polled."""
SILENCE_SECONDS = 4.0
"""Silence after which the coordinator counts as gone. It sends four heartbeats a second."""
CHUNK_BYTES = 1 << 16
SECONDS_TO_START = 60.0
"""Time that a coordinator has to start, on a busy machine."""
SECONDS_TO_LEAVE = 3.0
"""Time that an evicted rank's main thread has to leave. It may hang in a collective that no other rank joins."""


class Lost(NamedTuple):
    """The end of the connection."""

    reason: str
    kind: str
    """gone (the coordinator), evicted or refused (this island)."""


class View(NamedTuple):
    """The members of an epoch and their rows of a batch."""

    epoch: int
    batch: int
    """Number of committed batches."""
    members: dict[str, str]
    """Name -> launch, in order of names."""
    row_indices: dict[str, range]
    """Name -> the rows of each batch that this island trains on, by their index in the batch."""
    leader: str
    """The island that saves."""
    source: str
    """The island that sends its state to the joiners; empty if there are none."""
    joiners: list[str]
    shares: dict[str, int]
    """Name -> the part of each tensor's rows that this island adds up, see `owners`; empty if all swap."""
    is_whole: bool = False
    """With local steps: the next exchange is of all weights, not of a fragment."""

    @classmethod
    def of(cls, message: Message) -> "View":
        row_indices = {name: range(*bounds) for name, bounds in message["row_indices"].items()}
        return cls(**{**{key: message[key] for key in cls._fields}, "row_indices": row_indices})

    def as_message(self) -> Message:
        bounds = {name: [indices.start, indices.stop] for name, indices in self.row_indices.items()}
        return {"kind": "view", **self._asdict(), "row_indices": bounds}


def start_coordinator_if_absent(address: tuple[str, int], num_islands: int, output: Path) -> None:
    """Start a coordinator unless one answers there. It outlives this launch, and ends when no island is connected.

    Raises ConfigError.
    """
    where = format_address(address)
    command = [sys.executable, "-P", "-m", "llmfoundry_lite", "islands", "coordinate", "--until-alone"]
    command += ["--listen", where, "--islands", str(num_islands)]
    # Not a child of this rank: launchers kill the children of one that hangs.
    detached = ["sh", "-c", '"$@" &', "sh", *command]
    started_at = None
    while not answers(address):
        if started_at is None:
            started_at = time.monotonic()
            output.parent.mkdir(parents=True, exist_ok=True)
            output.unlink(missing_ok=True)  # a link would be written through
            with output.open("wb") as file:
                silent = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
                environment = {**os.environ, **search_path()}
                subprocess.run(detached, start_new_session=True, check=True, env=environment, **silent)
        last = (output.read_text(errors="replace").splitlines() or ["no output"])[-1]
        has_failed = last.startswith("error: ") or time.monotonic() - started_at > SECONDS_TO_START
        if has_failed and not answers(address):  # else another island has started one
            raise ConfigError(
                f"islands.begin_with: no coordinator starts at {where}: {last}; start it there with "
                "`llmfoundry-lite islands coordinate`, or give islands.coordinator an address of this host"
            )
        time.sleep(LOOK_SECONDS)


def reach(address: tuple[str, int], token: bytes, on_waiting: Callable[[str], None]) -> socket.socket:
    """Connect to the coordinator, waiting up to SECONDS_TO_START for it to start. Raises ConfigError."""
    where, give_up_at = format_address(address), time.monotonic() + SECONDS_TO_START
    is_reported = False
    while True:
        try:
            return dial(address, token)
        except (BadMessageError, UnicodeError) as error:
            raise ConfigError(f"islands.coordinator: {where}: {error}") from None
        except OSError as error:
            if time.monotonic() > give_up_at:
                raise ConfigError(
                    f"islands.coordinator: {where} does not answer ({error.strerror or error}); start it with "
                    "`llmfoundry-lite islands coordinate`"
                ) from error
            if not is_reported:
                on_waiting(f"{where} does not answer ({error.strerror or error}); for {SECONDS_TO_START:.0f} s at most")
            is_reported = True
            time.sleep(LOOK_SECONDS)


def answers(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=HANDSHAKE_SECONDS).close()
    except (OSError, UnicodeError):  # UnicodeError: not a host name
        return False
    return True


class Member:
    """A rank's side of the connection. The reading thread calls the `on_…` functions."""

    def __init__(
        self, address: tuple[str, int], token: bytes, name: str, on_waiting: Callable[[str], None] = lambda reason: None
    ):
        self.name = name
        self.on_newer_view: Callable[[int], None] = lambda epoch: None
        self.on_lost: Callable[[], None] = lambda: None
        self.on_evicted: Callable[[str], None] = lambda reason: None
        """Called with the reason before the process exits although its main thread hangs."""
        self.on_waiting = on_waiting
        """Called with the reason why this island waits: the coordinator's (on rank 0), or that none answers."""
        self.lost: Lost | None = None
        self.phase = "compute"
        self.count_bytes: Callable[[], int] = lambda: 0
        self._inbox: queue.Queue[Message | Lost] = queue.Queue()
        self._described: dict[tuple[str, str], dict[int, Message]] = {}
        """(name, launch) of an island -> rank -> its description, in order of arrival."""
        self._news = threading.Condition()
        self._sending = threading.Lock()
        self._is_closed = self._has_received = False
        self._connection = reach(address, token, on_waiting)
        self._connection.settimeout(SILENCE_SECONDS)
        for work in (self._receive, self._send_heartbeats):
            threading.Thread(target=work, name="islands", daemon=True).start()

    def send(self, message: Message) -> None:
        """Send a message. Does nothing if the coordinator is gone: the next `receive_decision` returns Lost."""
        with suppress(OSError), self._sending:
            try:
                raw = pack(message)
                for begin in range(0, len(raw), CHUNK_BYTES):  # each may take SILENCE_SECONDS
                    self._connection.sendall(raw[begin : begin + CHUNK_BYTES])
            except TimeoutError:  # half of a message may have been sent
                self._hang_up()

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for this rank's first decision. Returns whether it has arrived."""
        with self._news:
            return self._news.wait_for(lambda: self._has_received, seconds)

    def receive_decision(self) -> Message | Lost:
        """Wait for the next decision and return it."""
        return self._inbox.get()

    def describe(self, name: str, launch: str, timeout: float = 30.0) -> list[Message]:
        """Return the addresses and boxes of an island's ranks, on rank 0. Forgets the island's earlier launches.

        The coordinator sends them before the first view that has the island. Raises ConnectionError.
        """

        def is_whole() -> bool:
            known = self._described.get((name, launch), {})
            return any(len(known) == message["size"] for message in known.values())

        with self._news:
            if not self._news.wait_for(lambda: is_whole() or self.lost, timeout) or self.lost:
                raise ConnectionError(f"nothing is known of island {name}")
            of_name = [key for key in self._described if key[0] == name]
            for earlier in of_name[: of_name.index((name, launch))]:
                del self._described[earlier]
            return [message for _, message in sorted(self._described[name, launch].items())]

    def close(self, *, has_finished: bool = False) -> None:
        """Leave the run. `has_finished`: the run is over, for all islands."""
        self._is_closed = True
        self.send({"kind": "leave", "finished": has_finished})
        self._hang_up()
        self._connection.close()

    def _hang_up(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _receive(self) -> None:
        lost = Lost("the coordinator is gone", "gone")
        try:
            while True:
                message = receive(self._connection)
                check_message(message, FROM_COORDINATOR)
                kind = message["kind"]
                if kind in ("evicted", "refused"):
                    lost = Lost(message["reason"], kind)
                    break
                if kind == "waits":
                    self.on_waiting(message["reason"])
                elif kind == "member":
                    with self._news:
                        known = self._described.setdefault((message["name"], message["launch"]), {})
                        known[message["rank"]] = message
                        self._news.notify_all()
                elif kind != "beat":
                    if kind == "view":
                        self.on_newer_view(message["epoch"])
                    self._put(message)
        except TimeoutError:
            lost = Lost("the coordinator is silent", "gone")
        except BadMessageError as error:
            lost = Lost(f"the coordinator sent a malformed message ({error})", "gone")
        except OSError:
            pass
        if self._is_closed:
            return
        self.lost = lost
        self._hang_up()
        self._put(lost)
        self.on_lost()
        if lost.kind == "evicted":
            time.sleep(SECONDS_TO_LEAVE)
            with suppress(Exception):
                self.on_evicted(lost.reason)
            os._exit(EXIT_PREEMPTED)

    def _put(self, decision: Message | Lost) -> None:
        self._inbox.put(decision)
        with self._news:
            self._has_received = True
            self._news.notify_all()

    def _send_heartbeats(self) -> None:
        while self.lost is None and not self._is_closed:
            self.send({"kind": "beat", "phase": self.phase, "bytes": self.count_bytes()})
            time.sleep(HEARTBEAT_SECONDS)
