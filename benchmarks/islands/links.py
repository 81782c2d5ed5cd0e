"""Links between islands that can be slowed, cut and frozen: a coordinator that gives addresses of its own proxy.

    LLMFOUNDRY_LITE_ISLANDS_TOKEN=… python -m benchmarks.islands.links 0 2 4 links.json

A JSON file says how links are now, and is read again when it changes: {"bits_per_second": 1e8, "state": "open"}. The
state is open, cut (connections are reset, and new ones too), frozen (open, but nothing passes) or half (nothing passes
back). The rate is shared by all connections of a direction; null is as fast as the machine. With "delay_seconds" each
connection has the rate for itself, and bytes arrive so much later. Coordination itself is that of `coordination.serve`.
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

LOOK_SECONDS = 0.05
CHUNK_BYTES = 1 << 16


def set_links(
    path: Path, state: str = "open", bits_per_second: float | None = None, delay_seconds: float | None = None
) -> None:
    settings = {"state": state, "bits_per_second": bits_per_second, "delay_seconds": delay_seconds}
    path.write_text(json.dumps(settings))


class Direction:
    """Bytes of one way, all connections together."""

    def __init__(self) -> None:
        self.free_at = 0.0

    async def pace(self, num_bytes: int, bits_per_second: float | None) -> None:
        """Wait as long as a line of that rate is busy with what was sent before."""
        now = asyncio.get_running_loop().time()
        self.free_at = max(self.free_at, now)
        if bits_per_second:
            self.free_at += 8 * num_bytes / bits_per_second
            await asyncio.sleep(self.free_at - now)


class Links:
    def __init__(self, path: Path):
        self.path = path
        self.ports: dict[tuple[str, int], int] = {}
        self.open_now: set[asyncio.StreamWriter] = set()
        self.there, self.back = Direction(), Direction()
        self.tasks: set[asyncio.Task[None]] = set()
        self.read()

    def read(self) -> None:
        settings = json.loads(self.path.read_text())
        self.bits_per_second, self.state = settings["bits_per_second"], settings["state"]
        self.delay_seconds = settings["delay_seconds"]

    async def watch(self) -> None:
        """Follow the file."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            with suppress(ValueError, OSError):  # being written
                self.read()
            if self.state == "cut":
                for writer in list(self.open_now):
                    writer.transport.abort()

    async def through(self, host: str, port: int) -> tuple[str, int]:
        """The address by which to reach that one."""
        if (host, port) not in self.ports:

            async def attend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await self.join(reader, writer, host, port)

            server = await asyncio.start_server(attend, host, 0)
            self.ports[host, port] = server.sockets[0].getsockname()[1]
        return host, self.ports[host, port]

    async def join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int) -> None:
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
            ways = (self.there, self.back) if self.delay_seconds is None else (Direction(), Direction())
            await asyncio.gather(
                self.pass_on(reader, far_writer, ways[0]), self.pass_on(far_reader, writer, ways[1], is_back=True)
            )
        except (OSError, asyncio.CancelledError):  # cancelled when the process ends
            pass
        finally:
            self.open_now -= {writer, far_writer}
            writer.close()
            far_writer.close()

    async def pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Direction, *, is_back: bool = False
    ) -> None:
        while data := await reader.read(CHUNK_BYTES):
            while self.state == "frozen" or (self.state == "half" and is_back):
                await asyncio.sleep(LOOK_SECONDS)
            await way.pace(len(data), self.bits_per_second)
            if self.delay_seconds:
                asyncio.get_running_loop().call_later(self.delay_seconds, writer.write, data)
            else:
                writer.write(data)
                await writer.drain()
        await asyncio.sleep(self.delay_seconds or 0.0)
        if not writer.is_closing():
            writer.write_eof()

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


class ProxyingServer(Server):
    """Ranks that dial each other come through `links`."""

    def __init__(self, token: bytes, coordinator: Coordinator, links: Links):
        super().__init__(token, coordinator)
        self.links = links

    async def run(self, address: tuple[str, int]) -> None:
        self.links.begin(self.links.watch())
        await super().run(address)

    async def introduce(self, hello: Message) -> Message:
        return {**hello, "address": list(await self.links.through(*hello["address"]))}


def serve_with_links(port: int, num_islands: int, silence_seconds: float, path: Path) -> None:
    """Serve like `coordination.serve.serve`, on loopback."""
    coordinator = Coordinator(num_islands, silence_seconds, log)
    asyncio.run(ProxyingServer(find_token(), coordinator, Links(path)).run(("127.0.0.1", port)))


if __name__ == "__main__":
    serve_with_links(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4]))
