"""The coordinator's process: passes messages between the ranks' connections and the `Coordinator`.

    LLMFOUNDRY_LITE_ISLANDS_TOKEN=… llmfoundry-lite islands coordinate --listen 10.0.0.1:7070 --islands 2

`serve` runs a `Server` in one asyncio thread, so that the `Coordinator`, which has the protocol, needs no lock. A
connection that sends a malformed or too long message, or has no token, is closed. Ranks and the coordinator send each
other heartbeats. An internal error ends the coordinator: all islands then save and leave, instead of waiting forever.
"""

import asyncio
import itertools
import time
from typing import Any

from llmfoundry_islands.coordination.coordinator import Coordinator
from llmfoundry_islands.coordination.messages import (
    HANDSHAKE_SECONDS,
    HEADER,
    MAX_BYTES,
    MAX_STRANGER_BYTES,
    BadMessageError,
    Message,
    answer_client,
    format_address,
    make_challenge,
    pack,
    size_of,
    unpack,
)
from llmfoundry_islands.coordination.strangers import Strangers, ThrottledLog, describe_refusal
from llmfoundry_lite.errors import ConfigError, printable
from llmfoundry_lite.ranks.signals import handled_leaving_signals

MAX_STRANGERS = 1024
"""Simultaneous handshakes. All ranks of an island come at once."""
TICK_SECONDS = 0.25
"""Interval at which silent ranks are looked for and heartbeats are sent."""
ALONE_SECONDS = 10.0
"""Time without connections after which the coordinator ends, with `until_alone`. An island may be launched again."""
MAX_HEARTBEAT_SECONDS = 30.0
"""Longest time between two heartbeats of a rank that builds its model."""
MAX_BACKLOG_BYTES = 1 << 28
"""Unsent bytes after which a rank that does not read is disconnected."""
HEARTBEAT = pack({"kind": "beat"})


def serve(
    address: tuple[str, int], token: bytes, num_founders: int, silence_seconds: float, *, until_alone: bool = False
) -> None:
    """Coordinate a run until a signal asks to leave or, with `until_alone`, until no rank is connected any more.

    The run begins with `num_founders` islands, and a rank that is silent for `silence_seconds` counts as dead. Raises
    ConfigError if `address` cannot be listened at.
    """
    coordinator = Coordinator(num_founders, silence_seconds, log)
    try:
        asyncio.run(Server(token, coordinator, until_alone=until_alone).run(address))
    except (OSError, UnicodeError) as error:  # UnicodeError: not a host name
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--listen: {format_address(address)}: {reason}") from error


def log(line: str) -> None:
    """Print a line with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {printable(line)}", flush=True)


class Server:
    """The ranks' connections. Everything runs in one event loop.

    Connections are numbered in the order of arrival. The coordinator knows them by these numbers.
    """

    def __init__(
        self, token: bytes, coordinator: Coordinator, *, until_alone: bool = False, handles_signals: bool = True
    ):
        """Prepare a server, which `run` starts. Outside of the main thread, `handles_signals` must be False."""
        self.token = token
        self.handles_signals = handles_signals
        self.coordinator = coordinator
        self.until_alone = until_alone
        self.attended: set[int] = set()
        """Connections that have proved the token. A rank that is building its model has not sent its hello yet."""
        self.alone_since = time.monotonic()
        """Time at which the last attended connection ended."""
        self.strangers = Strangers[asyncio.StreamWriter](MAX_STRANGERS)
        self.log_stranger = ThrottledLog(log)
        self.log_refusal = ThrottledLog(log)
        self.writers: dict[int, asyncio.StreamWriter] = {}
        """Connections that have proved the token, and that the coordinator has not dropped."""
        self.numbers = itertools.count()
        self.stopped = asyncio.Event()
        self.failure: Exception | None = None
        """The internal error that ends the coordinator."""

    async def run(self, address: tuple[str, int]) -> None:
        """Serve until `stopped` is set, or nobody is left. Raises RuntimeError after an internal error."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self.handle_loop_error)
        server = await asyncio.start_server(self.attend, *address)
        host_and_port = format_address(server.sockets[0].getsockname()[:2])
        log(f"coordinating at {host_and_port}, beginning with {self.coordinator.num_founders} islands")
        if self.handles_signals:
            for signal_number in handled_leaving_signals():
                loop.add_signal_handler(signal_number, self.stopped.set)

        while not self.stopped.is_set():
            is_alone = not self.attended and time.monotonic() - self.alone_since > ALONE_SECONDS
            if self.until_alone and is_alone:
                log("nobody is left")
                break
            self.coordinator.tick(time.monotonic())
            self.deliver()
            self.send_heartbeats()
            try:
                await asyncio.wait_for(self.stopped.wait(), TICK_SECONDS)
            except TimeoutError:
                continue

        server.close()
        for writer in self.writers.values():
            writer.close()
        if self.failure is not None:
            raise RuntimeError("the coordinator ends; all islands save and leave") from self.failure

    async def attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until its end. asyncio calls this for each connection.

        Errors of the connection end it. Other errors are the coordinator's own, and end the process.
        """
        number = next(self.numbers)
        host = (writer.get_extra_info("peername") or ("?",))[0]
        dropped = self.strangers.add(writer, host)
        if dropped is not None:
            dropped.transport.abort()
        try:
            await self._serve_connection(number, reader, writer)
        except BadMessageError as error:
            is_stranger = self.strangers.remove(writer)
            log_line = self.log_stranger if is_stranger else log
            log_line(f"closed a connection from {host}: {error}")
        except (OSError, EOFError, TimeoutError):
            pass  # the connection has ended
        except Exception as error:
            self.fail(error)
        finally:
            self.strangers.remove(writer)
            if number in self.attended:
                self.attended.remove(number)
                self.alone_since = time.monotonic()
            self.writers.pop(number, None)
            self.close_soon(writer)
            try:
                self.coordinator.lose(number)
                self.deliver()
            except Exception as error:
                self.fail(error)

    async def _serve_connection(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Run the handshake, wait for the hello, and pass messages to the coordinator.

        Returns if the other end leaves before its hello, or was dropped as a stranger. Raises BadMessageError for
        anything malformed, and OSError, EOFError or TimeoutError when the connection ends.
        """
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            server_challenge, message = make_challenge()
            writer.write(message)
            reply = await receive(reader, MAX_STRANGER_BYTES)
            writer.write(answer_client(self.token, server_challenge, reply))
        if not self.strangers.remove(writer):
            return
        self.attended.add(number)
        self.writers[number] = writer
        self.coordinator.note_connection(number)

        # A rank sends heartbeats while it builds its model.
        hello: Message = {"kind": "beat"}
        while hello["kind"] == "beat":
            async with asyncio.timeout(MAX_HEARTBEAT_SECONDS):
                hello = await receive(reader)
        if hello["kind"] == "leave":
            return
        if hello["kind"] != "hello":
            raise BadMessageError(f"{hello['kind'][:40]!r} before hello")
        hello["host"] = host_of(writer)
        self.coordinator.hello(number, await self.introduce(hello), time.monotonic())
        self.deliver()

        while True:
            message = await receive(reader)
            self.coordinator.receive(number, message, time.monotonic())
            self.deliver()

    def handle_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an error that asyncio met outside of `attend`.

        If no connection can be accepted, prints that now and then; asyncio pauses for a second. Prints nothing for
        connections that are open at the end, for each of which asyncio would print a traceback.
        """
        error = context.get("exception")
        if isinstance(error, OSError) and "socket" in context:
            self.log_refusal(describe_refusal(error))
        elif not isinstance(error, asyncio.CancelledError):
            loop.default_exception_handler(context)

    def fail(self, error: Exception) -> None:
        """End the coordinator because of an internal error. The first one is reported."""
        self.failure = self.failure or error
        self.stopped.set()

    def close_soon(self, writer: asyncio.StreamWriter) -> None:
        """Close a connection after HANDSHAKE_SECONDS at most, even if the other end no longer reads."""
        writer.close()
        asyncio.get_running_loop().call_later(HANDSHAKE_SECONDS, writer.transport.abort)

    def send_heartbeats(self) -> None:
        """Send a heartbeat on every authenticated connection that has nothing unsent."""
        for writer in self.writers.values():
            if writer.transport.get_write_buffer_size() == 0:
                writer.write(HEARTBEAT)

    async def introduce(self, hello: Message) -> Message:
        """Return the hello that other islands receive. Benchmarks override this, to put proxies into it."""
        return hello

    def deliver(self) -> None:
        """Send the coordinator's messages without waiting for receivers, and close the connections that it drops.

        Empties the coordinator's `outbox` and `dropped`.
        """
        outbox, self.coordinator.outbox = self.coordinator.outbox, []
        dropped, self.coordinator.dropped = self.coordinator.dropped, []
        packed_message: Message | None = None
        packed = b""
        for number, message in outbox:
            writer = self.writers.get(number)
            if writer is None:
                continue
            if writer.transport.get_write_buffer_size() > MAX_BACKLOG_BYTES:
                writer.transport.abort()
                continue
            # Packing delays heartbeats, so a message for several ranks is packed once.
            if message is not packed_message:
                packed_message = message
                packed = pack(message)
            writer.write(packed)
        for number in dropped:
            writer = self.writers.pop(number, None)
            if writer is not None:
                self.close_soon(writer)


def host_of(writer: asyncio.StreamWriter) -> str:
    """Return the address of the other end's host. It is empty if both ends are on one host."""
    other_host = (writer.get_extra_info("peername") or ("",))[0]
    own_host = (writer.get_extra_info("sockname") or ("",))[0]
    return "" if other_host == own_host else other_host


async def receive(reader: asyncio.StreamReader, limit: int = MAX_BYTES) -> Message:
    """Return the next message. Raises BadMessageError, or EOFError at the connection's end."""
    size = size_of(await reader.readexactly(HEADER.size), limit)
    return unpack(await reader.readexactly(size))
