"""Links between islands that can be slowed, cut and frozen: a coordinator that puts a proxy before every rank.

    LLMFOUNDRY_LITE_ISLANDS_TOKEN=… python -m benchmarks.islands.links 0 2 4 links.json

The arguments are the port (0: any), the number of islands, the seconds of silence, and a JSON file that describes the
links, for example {"bits_per_second": 1e8, "state": "open", "delay_seconds": null}. The file is read again all the
time, so whoever writes it changes the links. Its keys are:

- state: open; cut (connections are reset, new ones too); frozen (connections stay open, but nothing passes); or half
  (nothing passes back to the rank that dialled).
- bits_per_second: the rate of each direction, shared by all its connections. null: as fast as the machine.
- delay_seconds: bytes arrive this much later, and each connection has the rate for itself. null: no delay.

Coordination itself is that of `coordination.serve`. The proxy is in `Links`; `ProxyingServer` gives the islands its
addresses instead of their own.
"""

import asyncio
import json
import sys
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmfoundry_islands.coordination.coordinator import Coordinator
from llmfoundry_islands.coordination.messages import Message, find_token
from llmfoundry_islands.coordination.serve import Server, log

POLL_SECONDS = 0.05
"""Time between two looks at the file, or at a frozen state."""
CHUNK_BYTES = 1 << 16
"""Largest number of bytes that are passed on at once."""


def set_links(
    path: Path, state: str = "open", bits_per_second: float | None = None, delay_seconds: float | None = None
) -> None:
    """Write the file that describes the links. See the module's docstring for the values."""
    settings = {"state": state, "bits_per_second": bits_per_second, "delay_seconds": delay_seconds}
    path.write_text(json.dumps(settings))


class Direction:
    """The line of one direction, which all connections share: it is busy until `free_at` (time of the event loop)."""

    def __init__(self) -> None:
        """The line is free at first."""
        self.free_at = 0.0

    async def pace(self, num_bytes: int, bits_per_second: float | None) -> None:
        """Wait until a line of this rate has sent these bytes, after everything that was passed to it before."""
        now = asyncio.get_running_loop().time()
        self.free_at = max(self.free_at, now)
        if bits_per_second:
            self.free_at += 8 * num_bytes / bits_per_second
            await asyncio.sleep(self.free_at - now)


class Links:
    """Proxies for any number of addresses, all of which follow one file. Runs in an event loop.

    `through` gives the proxy's address for another one. `watch` has to run as a task, or the file is read only once.
    """

    def __init__(self, path: Path):
        """Read the file at `path`. No proxy is started yet."""
        self.path = path
        self.ports: dict[tuple[str, int], int] = {}
        self.open_now: set[asyncio.StreamWriter] = set()
        self.there, self.back = Direction(), Direction()
        self.tasks: set[asyncio.Task[None]] = set()
        self.read()

    def read(self) -> None:
        """Read the file into `bits_per_second`, `state` and `delay_seconds`."""
        settings = json.loads(self.path.read_text())
        self.bits_per_second, self.state = settings["bits_per_second"], settings["state"]
        self.delay_seconds = settings["delay_seconds"]

    async def watch(self) -> None:
        """Follow the file without end, and reset all open connections while the state is cut."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            with suppress(ValueError, OSError):  # the file is just being written
                self.read()
            if self.state == "cut":
                for writer in list(self.open_now):
                    writer.transport.abort()

    async def through(self, host: str, port: int) -> tuple[str, int]:
        """Return the address of a proxy for this address. The proxy is started by the first call."""
        if (host, port) not in self.ports:

            async def attend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await self.join(reader, writer, host, port)

            server = await asyncio.start_server(attend, host, 0)
            self.ports[host, port] = server.sockets[0].getsockname()[1]
        return host, self.ports[host, port]

    async def join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int) -> None:
        """Connect an accepted connection with a new one to `host` and `port`, and pass bytes on both ways.

        Returns when both directions have ended.
        """
        if self.state == "cut":
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection(host, port)
        except OSError:
            writer.close()
            return
        self.open_now |= {writer, far_writer}
        try:
            # With a delay, each connection has a line of its own.
            directions = (self.there, self.back) if self.delay_seconds is None else (Direction(), Direction())
            await asyncio.gather(
                self.pass_on(reader, far_writer, directions[0]),
                self.pass_on(far_reader, writer, directions[1], is_back=True),
            )
        except (OSError, asyncio.CancelledError):  # cancelled when the process ends
            pass
        finally:
            self.open_now -= {writer, far_writer}
            writer.close()
            far_writer.close()

    async def pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction, *, is_back: bool = False
    ) -> None:
        """Pass bytes on from one connection to the other until the reader ends, and end the writer then.

        `is_back` says that this is the direction to the rank that dialled, in which nothing passes while the state is
        half.
        """
        while data := await reader.read(CHUNK_BYTES):
            while self.state == "frozen" or (self.state == "half" and is_back):
                await asyncio.sleep(POLL_SECONDS)
            await direction.pace(len(data), self.bits_per_second)
            # With a delay, the next bytes are read before these have arrived, as on a long line.
            if self.delay_seconds:
                asyncio.get_running_loop().call_later(self.delay_seconds, writer.write, data)
            else:
                writer.write(data)
                await writer.drain()
        await asyncio.sleep(self.delay_seconds or 0.0)
        if not writer.is_closing():
            writer.write_eof()

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task, and keep a reference to it, because asyncio itself keeps none."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


class ProxyingServer(Server):
    """A coordinator that tells islands the addresses of proxies, so that ranks reach each other through `links`."""

    def __init__(self, token: bytes, coordinator: Coordinator, links: Links):
        super().__init__(token, coordinator)
        self.links = links

    async def run(self, address: tuple[str, int]) -> None:
        """Serve at this address, and follow the links' file meanwhile."""
        self.links.begin(self.links.watch())
        await super().run(address)

    async def introduce(self, hello: Message) -> Message:
        """Replace the address in a rank's greeting by that of its proxy, which the other islands then dial."""
        return {**hello, "address": list(await self.links.through(*hello["address"]))}


def serve_with_links(port: int, num_islands: int, silence_seconds: float, path: Path) -> None:
    """Serve like `coordination.serve.serve` on loopback, with links that follow the file at `path`."""
    coordinator = Coordinator(num_islands, silence_seconds, log)
    asyncio.run(ProxyingServer(find_token(), coordinator, Links(path)).run(("127.0.0.1", port)))


if __name__ == "__main__":
    serve_with_links(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4]))
