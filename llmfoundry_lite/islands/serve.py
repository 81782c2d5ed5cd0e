"""The coordinator's process: connections of ranks -> events of `Coordinator`, and its messages back to them.

    LLMFOUNDRY_LITE_ISLANDS_TOKEN=… llmfoundry-lite islands coordinate --listen 10.0.0.1:7070 --islands 2

One thread, by asyncio. A connection that says anything malformed, too long or foreign is closed, and nothing else
happens.
"""

import asyncio
import itertools
import signal
import sys
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
    pack,
    prove,
    size_of,
    text_of,
    unpack,
)

TICK_SECONDS = 0.25
ALONE_SECONDS = 10.0
"""For an island that has ended by mistake and is launched again at once."""
LONGEST_BACKLOG = 1 << 28
"""Bytes that wait for a rank that does not read."""


def serve(
    address: tuple[str, int], token: bytes, num_founders: int, silence_seconds: float, *, until_alone: bool = False
) -> None:
    """Until SIGTERM or Ctrl-C, or nobody is left. Raises ConfigError when nobody can listen there."""
    coordinator = Coordinator(num_founders, silence_seconds, say)
    try:
        asyncio.run(Server(token, coordinator, until_alone=until_alone).run(address))
    except OSError as error:
        raise ConfigError(f"--listen: {address[0]}:{address[1]}: {error.strerror or error}") from error


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


class Server:
    def __init__(self, token: bytes, coordinator: Coordinator, *, until_alone: bool = False):
        self.token = token
        self.coordinator = coordinator
        self.until_alone = until_alone
        self.attended: set[int] = set()
        """Connections, of those that have not said hello yet too: their ranks are building the model."""
        self.alone_since = time.monotonic()
        self.writers: dict[int, asyncio.StreamWriter] = {}
        self.numbers = itertools.count()

    async def run(self, address: tuple[str, int]) -> None:
        server = await asyncio.start_server(self.attend, *address)
        host, port = server.sockets[0].getsockname()[:2]
        say(f"coordinating at {host}:{port}, beginning with {self.coordinator.num_founders} islands")
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        while not stopped.is_set():
            if self.until_alone and not self.attended and time.monotonic() - self.alone_since > ALONE_SECONDS:
                say("nobody is left")
                break
            self.coordinator.tick(time.monotonic())
            self.deliver()
            try:
                await asyncio.wait_for(stopped.wait(), TICK_SECONDS)
            except TimeoutError:
                continue
        server.close()
        for writer in self.writers.values():
            writer.close()
        sys.stdout.flush()

    async def attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until its end."""
        number = next(self.numbers)
        self.attended.add(number)
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                await self.welcome(reader, writer)
            hello = await receive(reader)
            if hello["kind"] != "hello":
                raise BadMessageError(f"{hello['kind'][:40]!r} before hello")
            self.writers[number] = writer
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
        finally:
            self.attended.discard(number)
            self.alone_since = time.monotonic()
            self.coordinator.lose(number, time.monotonic())
            self.writers.pop(number, None)
            self.deliver()
            writer.close()

    async def welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mine = challenge()
        writer.write(pack({"kind": "challenge", "challenge": mine}))
        answer = await receive(reader, MAX_STRANGER_BYTES)
        theirs = text_of(answer, "challenge")
        check_proof(self.token, "client", mine, theirs, answer)
        writer.write(pack({"kind": "proof", "proof": prove(self.token, "server", mine, theirs)}))

    async def introduce(self, hello: Message) -> Message:
        """What a rank says of itself -> what the others hear of it."""
        return hello

    def deliver(self) -> None:
        """What the coordinator has to say; never waits for a reader."""
        outbox, self.coordinator.outbox = self.coordinator.outbox, []
        dropped, self.coordinator.dropped = self.coordinator.dropped, []
        for number, message in outbox:
            writer = self.writers.get(number)
            if writer is None:
                continue
            if writer.transport.get_write_buffer_size() > LONGEST_BACKLOG:
                writer.transport.abort()
            else:
                writer.write(pack(message))
        for number in dropped:
            writer = self.writers.pop(number, None)
            if writer is not None:
                writer.close()


async def receive(reader: asyncio.StreamReader, limit: int = MAX_BYTES) -> Message:
    """The next message. Raises BadMessageError, or EOFError at the connection's end."""
    size = size_of(await reader.readexactly(HEADER.size), limit)
    return unpack(await reader.readexactly(size))
