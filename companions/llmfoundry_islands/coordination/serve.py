"""The coordinator's process: passes messages between the ranks' connections and the `Coordinator`.

    LLMFOUNDRY_LITE_ISLANDS_TOKEN=… llmfoundry-lite islands coordinate --listen 10.0.0.1:7070 --islands 2

One asyncio thread. A connection that sends a malformed or too long message, or has no token, is closed. Ranks and the
coordinator send each other heartbeats. An internal error ends the coordinator: all islands then save and leave, rather
than wait for ever.
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
    answer,
    challenge,
    format_address,
    pack,
    size_of,
    unpack,
)
from llmfoundry_islands.coordination.strangers import Remarks, Strangers, describe_refusal
from llmfoundry_lite.errors import ConfigError, printable
from llmfoundry_lite.ranks.signals import handled_leaving_signals

MAX_STRANGERS = 1024
"""Simultaneous handshakes. All ranks of an island come at once."""
TICK_SECONDS = 0.25
ALONE_SECONDS = 10.0
"""Time without connections after which the coordinator ends: an island may be launched again."""
MAX_HEARTBEAT_SECONDS = 30.0
"""Longest time between two heartbeats of a rank that builds its model."""
MAX_BACKLOG_BYTES = 1 << 28
"""Unsent bytes after which a rank that does not read is disconnected."""
HEARTBEAT = pack({"kind": "beat"})


def serve(
    address: tuple[str, int], token: bytes, num_founders: int, silence_seconds: float, *, until_alone: bool = False
) -> None:
    """Coordinate until a signal asks to leave, or until nobody is left. Raises ConfigError for an unusable address."""
    coordinator = Coordinator(num_founders, silence_seconds, log)
    try:
        asyncio.run(Server(token, coordinator, until_alone=until_alone).run(address))
    except (OSError, UnicodeError) as error:  # UnicodeError: not a host name
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--listen: {format_address(address)}: {reason}") from error


def log(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {printable(line)}", flush=True)


class Server:
    """The ranks' connections. All of it runs in one event loop, so that the coordinator needs no lock."""

    def __init__(
        self, token: bytes, coordinator: Coordinator, *, until_alone: bool = False, handles_signals: bool = True
    ):
        self.token = token
        self.handles_signals = handles_signals
        """False if this is not the main thread."""
        self.coordinator = coordinator
        self.until_alone = until_alone
        self.attended: set[int] = set()
        """Connections that know the token. Ranks that build their model have sent no hello yet."""
        self.alone_since = time.monotonic()
        self.strangers = Strangers[asyncio.StreamWriter](MAX_STRANGERS)
        self.remark_on_strangers, self.remark_on_refusal = Remarks(log), Remarks(log)
        self.writers: dict[int, asyncio.StreamWriter] = {}
        self.numbers = itertools.count()
        self.stopped = asyncio.Event()
        self.failure: Exception | None = None
        """The internal error that ends the coordinator."""

    async def run(self, address: tuple[str, int]) -> None:
        asyncio.get_running_loop().set_exception_handler(self.note_loop_error)
        server = await asyncio.start_server(self.attend, *address)
        where = format_address(server.sockets[0].getsockname()[:2])
        log(f"coordinating at {where}, beginning with {self.coordinator.num_founders} islands")
        for number in handled_leaving_signals() if self.handles_signals else ():
            asyncio.get_running_loop().add_signal_handler(number, self.stopped.set)
        while not self.stopped.is_set():
            if self.until_alone and not self.attended and time.monotonic() - self.alone_since > ALONE_SECONDS:
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
        """Serve one connection until its end."""
        number = next(self.numbers)
        host = (writer.get_extra_info("peername") or ("?",))[0]
        dropped = self.strangers.add(writer, host)
        if dropped is not None:
            dropped.transport.abort()
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                mine, asking = challenge()
                writer.write(asking)
                writer.write(answer(self.token, mine, await receive(reader, MAX_STRANGER_BYTES)))
            if not self.strangers.remove(writer):
                return
            self.attended.add(number)
            self.writers[number] = writer
            self.coordinator.greet(number)
            hello = {"kind": "beat"}
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
        except BadMessageError as error:
            say = self.remark_on_strangers if self.strangers.remove(writer) else log
            say(f"closed a connection from {host}: {error}")
        except (OSError, EOFError, TimeoutError):
            pass
        except Exception as error:
            self.fail(error)
        finally:
            self.strangers.remove(writer)
            if number in self.attended:
                self.attended.remove(number)
                self.alone_since = time.monotonic()
            self.writers.pop(number, None)
            self.end(writer)
            try:
                self.coordinator.lose(number)
                self.deliver()
            except Exception as error:
                self.fail(error)

    def note_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Print now and then that no connection can be accepted; asyncio then pauses for a second. Print nothing for
        connections that are open at the end: asyncio would print a traceback for each."""
        error = context.get("exception")
        if isinstance(error, OSError) and "socket" in context:
            self.remark_on_refusal(describe_refusal(error))
        elif not isinstance(error, asyncio.CancelledError):
            loop.default_exception_handler(context)

    def fail(self, error: Exception) -> None:
        self.failure = self.failure or error
        self.stopped.set()

    def end(self, writer: asyncio.StreamWriter) -> None:
        """Close a connection after HANDSHAKE_SECONDS at most, even if the other end no longer reads."""
        writer.close()
        asyncio.get_running_loop().call_later(HANDSHAKE_SECONDS, writer.transport.abort)

    def send_heartbeats(self) -> None:
        """Send a heartbeat on every authenticated connection that has nothing unsent."""
        for writer in self.writers.values():
            if writer.transport.get_write_buffer_size() == 0:
                writer.write(HEARTBEAT)

    async def introduce(self, hello: Message) -> Message:
        """Return the hello that other islands receive; benchmarks put proxies into it."""
        return hello

    def deliver(self) -> None:
        """Send the coordinator's messages, without waiting for receivers."""
        outbox, self.coordinator.outbox = self.coordinator.outbox, []
        dropped, self.coordinator.dropped = self.coordinator.dropped, []
        packed: tuple[Message | None, bytes] = (None, b"")
        for number, message in outbox:
            writer = self.writers.get(number)
            if writer is None:
                continue
            if writer.transport.get_write_buffer_size() > MAX_BACKLOG_BYTES:
                writer.transport.abort()
                continue
            if packed[0] is not message:  # once for all receivers: packing delays heartbeats
                packed = (message, pack(message))
            writer.write(packed[1])
        for number in dropped:
            writer = self.writers.pop(number, None)
            if writer is not None:
                self.end(writer)


def host_of(writer: asyncio.StreamWriter) -> str:
    """Return the address of the other end; empty for this host."""
    there, here = ((writer.get_extra_info(name) or ("",))[0] for name in ("peername", "sockname"))
    return "" if there == here else there


async def receive(reader: asyncio.StreamReader, limit: int = MAX_BYTES) -> Message:
    """Return the next message. Raises BadMessageError, or EOFError at the connection's end."""
    size = size_of(await reader.readexactly(HEADER.size), limit)
    return unpack(await reader.readexactly(size))
