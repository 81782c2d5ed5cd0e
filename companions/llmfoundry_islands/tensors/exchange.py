"""Exchange of tensors between islands: plain sockets between ranks that hold parts of the same tensors.

No process group spans islands, so they may differ in torch release, vendor and sharding. A rank knows the boxes of all
ranks of all islands. From host memory it sends overlaps of its boxes with a peer's, and receives such overlaps.
Replicas within an island divide their rows first, so that no element travels twice. Closing a rank's connections ends
an exchange early. `summing` adds up gradients over these connections.
"""

import math
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import torch

from llmfoundry_islands.coordination.messages import (
    FROM_PEER,
    HANDSHAKE_SECONDS,
    BadMessageError,
    check_message,
    dial,
    pack,
    receive,
    receive_exactly,
    welcome,
)
from llmfoundry_islands.coordination.strangers import Remarks, Strangers, describe_refusal
from llmfoundry_islands.tensors.boxes import Box, Boxes, Tensors, common_boxes

CHUNK_BYTES = 1 << 18
"""Bytes sent between two updates of `num_bytes`: 2 s at 1 Mbit/s."""
HEADING = struct.Struct("!4sQIQd")
"""Precedes numbers: magic, label, part, number of bytes, weight."""
MAGIC = b"isle"
MAX_STRANGERS = 256
"""Simultaneous handshakes. Each has a thread."""
ACCEPT_PAUSE_SECONDS = 0.5
"""Pause between two tries if no connection can be accepted."""
MAX_ARRIVED = 4096
"""Connections of peers that no exchange has used yet."""

Buffer = Any
"""Memory that sockets read or fill: bytes, or an array of numpy."""
T = TypeVar("T")


class Peer(NamedTuple):
    island: str
    rank: int


class Ranks(NamedTuple):
    """The ranks of another island, in order."""

    addresses: Sequence[tuple[str, int]]
    pieces: Sequence[Boxes]


class Exchange:
    """One rank's connections to ranks of other islands."""

    def __init__(self, island: str, rank: int, host: str, token: bytes, handshake_seconds: float = HANDSHAKE_SECONDS):
        self.island = island
        self.rank = rank
        self.token = token
        self.num_bytes = 0
        """Sent and received."""
        self.on_transfer: Callable[[bool], None] = lambda is_transferring: None
        """Called with True before a transfer, which may wait for other islands, and with False after it."""
        family, *_, where = min(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM))  # IPv4 if the name has both
        self._listener = socket.create_server(where[:2], family=family, backlog=256)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._arrived: dict[tuple[int, str, int], socket.socket] = {}
        self._connections: dict[Peer, socket.socket] = {}
        self.cuts: dict[Peer, Boxes] = {}
        """Overlaps of this rank's pieces with each peer's."""
        self.epoch = 0
        self._newest_epoch: float = 0
        self._broken: OSError | None = None
        self._news = threading.Condition()
        self._counting = threading.Lock()
        self._handshake_seconds = handshake_seconds
        self._strangers = Strangers[socket.socket](MAX_STRANGERS)
        self._is_closed = threading.Event()
        threading.Thread(target=self._listen, name="islands-listen", daemon=True).start()

    # ------------------------------------------------------------------------------------------------ connections

    def meet(self, epoch: int, pieces: Boxes, others: Mapping[str, Ranks]) -> None:
        """Connect to the ranks of other islands whose pieces overlap this rank's. Of two islands, the one whose name
        sorts last dials. If that fails, the first transfer raises the error."""
        self.part()
        with self._news:
            self.epoch = epoch
            self._broken = None
            for key in [key for key in self._arrived if key[0] < epoch]:
                self._arrived.pop(key).close()
        self.cuts = {}
        for island, ranks in others.items():
            for rank, theirs in enumerate(ranks.pieces):
                if cuts := common_boxes(pieces, theirs):
                    self.cuts[Peer(island, rank)] = cuts
        for peer in self.cuts:
            if peer.island < self.island and self._broken is None:
                try:
                    connection = dial(others[peer.island].addresses[peer.rank], self.token)
                    connection.settimeout(None)
                    connection.sendall(pack({"kind": "peer", "epoch": epoch, "island": self.island, "rank": self.rank}))
                    self._connections[peer] = connection
                except OSError as error:
                    self._broken = error

    def _connection_to(self, peer: Peer) -> socket.socket:
        """Return the connection to a peer. Waits for the peer to dial if it has to, until the epoch is over."""
        with self._news:
            key = (self.epoch, peer.island, peer.rank)
            self._news.wait_for(
                lambda: peer in self._connections or key in self._arrived or self._broken or self._is_over
            )
            self.check()
            if peer not in self._connections:
                self._connections[peer] = self._arrived.pop(key)
            return self._connections[peer]

    @property
    def _is_over(self) -> bool:
        return self._newest_epoch > self.epoch

    def abort(self, epoch: float) -> None:
        """End transfers of earlier epochs, from any thread. `epoch` = infinity ends all."""
        with self._news:
            self._newest_epoch = max(self._newest_epoch, epoch)
            over = [connection for key, connection in self._arrived.items() if key[0] < self._newest_epoch]
            for connection in (*over, *(self._connections.values() if self._is_over else ())):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._news.notify_all()

    def part(self) -> None:
        """Close the connections of this epoch."""
        with self._news:
            for connection in self._connections.values():
                connection.close()
            self._connections = {}

    def close(self) -> None:
        self.abort(math.inf)
        self._is_closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # else the thread would keep accepting
        self._listener.close()
        self.part()

    def _listen(self) -> None:
        remark = Remarks(lambda line: print(f"islands: {line}", file=sys.stderr, flush=True))
        while not self._is_closed.is_set():
            try:
                connection, (host, *_) = self._listener.accept()
            except OSError as error:
                if not self._is_closed.is_set():
                    remark(describe_refusal(error))
                    self._is_closed.wait(ACCEPT_PAUSE_SECONDS)
                continue
            dropped = self._strangers.add(connection, host)
            if dropped is not None:
                with suppress(OSError):
                    dropped.shutdown(socket.SHUT_RDWR)  # its thread closes it
            threading.Thread(target=self._admit, args=(connection,), name="islands-admit", daemon=True).start()

    def _admit(self, connection: socket.socket) -> None:
        """Accept a peer's connection. Closes it if the handshake fails or its first message is malformed."""
        end_by = time.monotonic() + self._handshake_seconds
        try:
            welcome(connection, self.token, end_by)
            hello = receive(connection, 4096, end_by)
            check_message(hello, FROM_PEER)
            if not self._strangers.remove(connection):
                raise BadMessageError("dropped")
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._news:
                if hello["epoch"] < max(self.epoch, self._newest_epoch) or len(self._arrived) >= MAX_ARRIVED:
                    raise BadMessageError("of an earlier epoch")
                self._arrived[hello["epoch"], hello["island"], hello["rank"]] = connection
                self._news.notify_all()
        except OSError:
            self._strangers.remove(connection)
            connection.close()

    # ---------------------------------------------------------------------------------------------------- tensors

    def give(self, tensors: Tensors, pieces: Boxes, islands: Sequence[str], label: int) -> None:
        """Send this rank's pieces, or those among `tensors`, to these islands. Raises OSError."""
        cuts = self.cuts_of(tensors, islands)
        sending = {peer: gather(tensors, pieces, cuts[peer]).numpy() for peer in cuts}
        self.transfer(sending, lambda peer: self.send(peer, sending[peer], label))

    def take(self, pieces: Boxes, island: str, label: int) -> Tensors:
        """Receive these pieces, less empty ones, which `island` sends with `give`. Raises OSError."""
        tensors: Tensors = {}

        def receive(peer: Peer) -> None:
            flat = torch.empty(sum(cut.size for cut in cuts[peer].values()))
            heading = self.receive_heading(peer)
            if heading[:3] != (label, 0, flat.nbytes):
                raise BadMessageError("the other end sends something else")
            self.receive_into(peer, flat.numpy())
            arrived[peer] = flat

        cuts = self.cuts_of(pieces, [island])
        arrived: dict[Peer, torch.Tensor] = {}
        self.transfer(cuts, receive)
        for peer, flat in arrived.items():
            scatter(flat, tensors, pieces, cuts[peer])
        return tensors

    def cuts_of(self, names: Container[str], islands: Sequence[str] | None = None) -> dict[Peer, Boxes]:
        """Return the cuts of these tensors with ranks of these islands, by default of all."""
        found = {peer: {n: c for n, c in cuts.items() if n in names} for peer, cuts in self.cuts.items()}
        return {peer: cuts for peer, cuts in found.items() if cuts and (islands is None or peer.island in islands)}

    def transfer(self, jobs: Iterable[T], run: Callable[[T], None]) -> None:
        """Send to peers, or receive from them, in parallel. Waits for all threads, then raises the first OSError."""
        errors: list[OSError] = []

        def work(job: T) -> None:
            try:
                run(job)
            except OSError as error:
                errors.append(error)
                self.abort(self.epoch + 1)  # else the other threads would wait in vain

        self.on_transfer(True)
        threads = [threading.Thread(target=work, args=(job,), daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.on_transfer(False)
        self.check(errors)

    def check(self, errors: Sequence[Exception] = ()) -> None:
        """Raise the first of `errors`, or OSError if a peer was not reached or the epoch is over."""
        for error in (*errors, self._broken):
            if error is not None:
                raise error
        if self._is_over:
            raise ConnectionError("there is a newer epoch")

    def send(self, peer: Peer, numbers: Buffer, label: int, part: int = 0, weight: float = 0.0) -> None:
        """Send one message of numbers. Raises OSError."""
        connection, raw = self._connection_to(peer), memoryview(numbers).cast("B")
        connection.sendall(HEADING.pack(MAGIC, label, part, len(raw), weight))
        for begin in range(0, len(raw), CHUNK_BYTES):
            chunk = raw[begin : begin + CHUNK_BYTES]
            connection.sendall(chunk)
            self._count(len(chunk))

    def receive_heading(self, peer: Peer) -> tuple[int, int, int, float]:
        """Return the next message's label, part, number of bytes and weight. Raises OSError."""
        heading = bytearray(HEADING.size)
        receive_exactly(self._connection_to(peer), memoryview(heading))
        magic, *found = HEADING.unpack(heading)
        if magic != MAGIC:
            raise BadMessageError("the other end sends something else")
        return tuple(found)

    def receive_into(self, peer: Peer, numbers: Buffer) -> None:
        """Fill `numbers` with what follows a heading. Raises OSError."""
        connection, raw = self._connection_to(peer), memoryview(numbers).cast("B")
        for begin in range(0, len(raw), CHUNK_BYTES):
            chunk = raw[begin : begin + CHUNK_BYTES]
            receive_exactly(connection, chunk)
            self._count(len(chunk))

    def _count(self, num_bytes: int) -> None:
        with self._counting:
            self.num_bytes += num_bytes


def gather(
    tensors: Tensors, pieces: Boxes, cuts: Mapping[str, Box], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return a peer's cuts of the pieces, concatenated, on the host."""
    parts = [tensors[name][cut.within(pieces[name])].reshape(-1).to(dtype) for name, cut in cuts.items()]
    return torch.cat(parts).cpu()


def scatter(flat: torch.Tensor, tensors: Tensors, pieces: Boxes, cuts: Mapping[str, Box]) -> None:
    """Write a peer's cuts into this rank's pieces. Allocates pieces that `tensors` lacks."""
    sizes = [cut.size for cut in cuts.values()]
    for (name, cut), values in zip(cuts.items(), flat.split(sizes), strict=True):
        if name not in tensors:
            tensors[name] = torch.empty(pieces[name].lengths, dtype=flat.dtype)
        tensors[name][cut.within(pieces[name])] = values.view(cut.lengths)
