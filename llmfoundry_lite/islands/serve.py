"""The coordinator's process: connections of ranks -> events of `Coordinator`, and its messages back to them.

    LLMFOUNDRY_LITE_ISLANDS_TOKEN=… llmfoundry-lite islands coordinate --listen 10.0.0.1:7070 --islands 2

One thread, by asyncio. A connection that sends anything malformed, too long or foreign is closed, and nothing else
happens. Ranks and the coordinator beat for each other. After an error of its own the coordinator ends: all islands then
save and leave, where they might wait for ever.
"""

import asyncio
import itertools
import signal
import time

from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.islands.coordinator import Coordinator
from llmfoundry_lite.islands.messages import (
    HANDSHAKE_SECONDS,
    HEADER,
    MAX_BYTES,
    MAX_STRANGER_BYTES,
    BadMessageError,
    Message,
    challenge,
    check_proof,
    format_address,
    pack,
    prove,
    size_of,
    text_of,
    unpack,
)

TICK_SECONDS = 0.25
ALONE_SECONDS = 10.0
"""Time for an island to be launched again before the coordinator ends."""
SECONDS_TO_SPEAK = 30.0
"""Longest time between two beats of a rank that builds its model."""
LONGEST_BACKLOG = 1 << 28
"""Bytes that may wait for a rank that does not read."""
BEAT = pack({"kind": "beat"})


def serve(
    address: tuple[str, int], token: bytes, num_founders: int, silence_seconds: float, *, until_alone: bool = False
) -> None:
    """Coordinate until SIGTERM or Ctrl-C, or until nobody is left. Raises ConfigError for an unusable address."""
    coordinator = Coordinator(num_founders, silence_seconds, say)
    try:
        asyncio.run(Server(token, coordinator, until_alone=until_alone).run(address))
    except (OSError, UnicodeError) as error:  # the latter: no name of a host
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--listen: {format_address(address)}: {reason}") from error


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


class Server:
    def __init__(
        self, token: bytes, coordinator: Coordinator, *, until_alone: bool = False, handles_signals: bool = True
    ):
        self.token = token
        self.handles_signals = handles_signals
        """False outside of the main thread."""
        self.coordinator = coordinator
        self.until_alone = until_alone
        self.attended: set[int] = set()
        """Connections, including ranks that are building the model before their hello."""
        self.alone_since = time.monotonic()
        self.writers: dict[int, asyncio.StreamWriter] = {}
        self.numbers = itertools.count()
        self.stopped = asyncio.Event()
        self.failure: Exception | None = None
        """The coordinator's own error."""

    async def run(self, address: tuple[str, int]) -> None:
        server = await asyncio.start_server(self.attend, *address)
        where = format_address(server.sockets[0].getsockname()[:2])
        say(f"coordinating at {where}, beginning with {self.coordinator.num_founders} islands")
        for number in (signal.SIGTERM, signal.SIGINT) if self.handles_signals else ():
            asyncio.get_running_loop().add_signal_handler(number, self.stopped.set)
        while not self.stopped.is_set():
            if self.until_alone and not self.attended and time.monotonic() - self.alone_since > ALONE_SECONDS:
                say("nobody is left")
                break
            self.coordinator.tick(time.monotonic())
            self.deliver()
            self.beat()
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
        self.attended.add(number)
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                await self.welcome(reader, writer)
            self.writers[number] = writer
            self.coordinator.greet(number)
            hello = {"kind": "beat"}
            while hello["kind"] == "beat":
                async with asyncio.timeout(SECONDS_TO_SPEAK):
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
            peer = writer.get_extra_info("peername") or ("?",)
            say(f"closed a connection from {peer[0]}: {error}")
        except (OSError, EOFError, TimeoutError):
            pass
        except Exception as error:
            self.fail(error)
        finally:
            self.attended.discard(number)
            self.alone_since = time.monotonic()
            self.writers.pop(number, None)
            self.end(writer)
            try:
                self.coordinator.lose(number)
                self.deliver()
            except Exception as error:
                self.fail(error)

    def fail(self, error: Exception) -> None:
        self.failure = self.failure or error
        self.stopped.set()

    def end(self, writer: asyncio.StreamWriter) -> None:
        """Close it in time, even if the other end no longer reads."""
        writer.close()
        asyncio.get_running_loop().call_later(HANDSHAKE_SECONDS, writer.transport.abort)

    def beat(self) -> None:
        """Send a beat to all that know the token and read."""
        for writer in self.writers.values():
            if writer.transport.get_write_buffer_size() == 0:
                writer.write(BEAT)

    async def welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mine = challenge()
        writer.write(pack({"kind": "challenge", "challenge": mine}))
        answer = await receive(reader, MAX_STRANGER_BYTES)
        theirs = text_of(answer, "challenge")
        check_proof(self.token, "client", mine, theirs, answer)
        writer.write(pack({"kind": "proof", "proof": prove(self.token, "server", mine, theirs)}))

    async def introduce(self, hello: Message) -> Message:
        """Return the hello that other islands receive; benchmarks put proxies into it."""
        return hello

    def deliver(self) -> None:
        """Send the coordinator's messages; never waits for a reader."""
        outbox, self.coordinator.outbox = self.coordinator.outbox, []
        dropped, self.coordinator.dropped = self.coordinator.dropped, []
        packed: tuple[Message | None, bytes] = (None, b"")
        for number, message in outbox:
            writer = self.writers.get(number)
            if writer is None:
                continue
            if writer.transport.get_write_buffer_size() > LONGEST_BACKLOG:
                writer.transport.abort()
                continue
            if packed[0] is not message:  # once for all its receivers: no beat is sent meanwhile
                packed = (message, pack(message))
            writer.write(packed[1])
        for number in dropped:
            writer = self.writers.pop(number, None)
            if writer is not None:
                self.end(writer)


def host_of(writer: asyncio.StreamWriter) -> str:
    """Return the address that the other end dials from; empty for this host."""
    there, here = ((writer.get_extra_info(name) or ("",))[0] for name in ("peername", "sockname"))
    return "" if there == here else there


async def receive(reader: asyncio.StreamReader, limit: int = MAX_BYTES) -> Message:
    """Return the next message. Raises BadMessageError, or EOFError at the connection's end."""
    size = size_of(await reader.readexactly(HEADER.size), limit)
    return unpack(await reader.readexactly(size))
