"""Exchange of tensors between islands: plain sockets between ranks that hold parts of the same tensors.

No process group spans islands, so they may differ in torch release, vendor and sharding. A rank knows the boxes of all
ranks of all islands. From host memory it sends the overlap of its boxes with a peer's, in fp32 (exact sums in float64),
and receives the same box of the peer's tensor. Replicas within an island divide their rows first, so each element
crosses between two islands once each way. Closing a rank's connections ends an exchange early.
"""

import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast

import torch

from llmfoundry_lite.islands.boxes import Box, Boxes, Tensors
from llmfoundry_lite.islands.messages import (
    BadMessageError,
    check_fields,
    dial,
    pack,
    receive,
    receive_exactly,
    welcome,
)

CHUNK_BYTES = 1 << 18
"""Bytes sent between two updates of `num_bytes`: 2 s at 1 Mbit/s."""
HEADING = struct.Struct("!4sQQd")
"""Precedes tensors: magic, label, number of bytes, weight."""
MAGIC = b"isle"
MAX_STRANGERS = 64
"""Simultaneous handshakes."""
MAX_ARRIVED = 4096
"""Connections of peers that no exchange has used yet."""


class Peer(NamedTuple):
    island: str
    rank: int


class Ranks(NamedTuple):
    """The ranks of another island, in order."""

    addresses: Sequence[tuple[str, int]]
    pieces: Sequence[Boxes]


class Swapped(NamedTuple):
    weights: dict[str, float]
    """Weights of the other islands' gradients."""
    tensors: dict[str, Tensors]
    """Island -> name -> that island's numbers for this rank's piece, in host memory."""


class Exchange:
    """One rank's connections to ranks of other islands."""

    def __init__(self, island: str, rank: int, host: str, token: bytes):
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
        self._cuts: dict[Peer, dict[str, Box]] = {}
        self._epoch = 0
        self._newest_epoch: float = 0
        self._broken: OSError | None = None
        self._news = threading.Condition()
        self._strangers = threading.Semaphore(MAX_STRANGERS)
        threading.Thread(target=self._listen, name="islands-listen", daemon=True).start()

    # ------------------------------------------------------------------------------------------------ connections

    def meet(self, epoch: int, pieces: Boxes, others: Mapping[str, Ranks]) -> None:
        """Connect to the ranks of other islands whose pieces overlap this rank's. Of two islands, the later by name
        dials. If that fails, the first transfer raises the error.
        """
        self.part()
        with self._news:
            self._epoch = epoch
            self._broken = None
            for key in [key for key in self._arrived if key[0] < epoch]:
                self._arrived.pop(key).close()
        self._cuts = {}
        for island, ranks in others.items():
            for rank, theirs in enumerate(ranks.pieces):
                cuts = {name: cut for name in sorted(pieces) if (cut := pieces[name].common(theirs[name]))}
                if cuts:
                    self._cuts[Peer(island, rank)] = cuts
        for peer in self._cuts:
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
            key = (self._epoch, peer.island, peer.rank)
            self._news.wait_for(lambda: peer in self._connections or key in self._arrived or self._is_over)
            if self._is_over:
                raise ConnectionError("there is a newer epoch")
            if peer not in self._connections:
                self._connections[peer] = self._arrived.pop(key)
            return self._connections[peer]

    @property
    def _is_over(self) -> bool:
        return self._newest_epoch > self._epoch

    def abort(self, epoch: float) -> None:
        """End transfers of earlier epochs, from any thread. `epoch` = infinity ends all."""
        with self._news:
            self._newest_epoch = max(self._newest_epoch, epoch)
            if self._is_over:
                for connection in self._connections.values():
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
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # else the thread would keep accepting
        self._listener.close()
        self.part()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if not self._strangers.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._admit, args=(connection,), name="islands-admit", daemon=True).start()

    def _admit(self, connection: socket.socket) -> None:
        """Accept a peer's connection. Closes it if the handshake fails or its first message is malformed."""
        try:
            welcome(connection, self.token)
            hello = receive(connection, 4096)
            check_fields(hello, {"epoch": int, "island": str, "rank": int})
            if hello["kind"] != "peer":
                raise BadMessageError("no peer")
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._news:
                if hello["epoch"] < self._epoch or len(self._arrived) >= MAX_ARRIVED:
                    raise BadMessageError("of an earlier epoch")
                self._arrived[hello["epoch"], hello["island"], hello["rank"]] = connection
                self._news.notify_all()
        except OSError:
            connection.close()
        finally:
            self._strangers.release()

    # ---------------------------------------------------------------------------------------------------- tensors

    def swap(
        self, tensors: Tensors, pieces: Boxes, label: int, weight: float, dtype: torch.dtype = torch.float32
    ) -> Swapped:
        """Send pieces to all other islands, as numbers of `dtype`, and receive theirs. Both ends need the same `label`
        and `dtype`. Raises OSError."""
        sending = {peer: _gather(tensors, pieces, cuts, dtype) for peer, cuts in self._cuts.items()}
        swapped = Swapped({}, {})
        for peer, (their_weight, flat) in self._transfer(sending, list(self._cuts), label, weight, dtype).items():
            theirs = swapped.tensors.setdefault(peer.island, {})
            _scatter(flat, theirs, pieces, self._cuts[peer])
            swapped.weights[peer.island] = their_weight
        return swapped

    def give(self, tensors: Tensors, pieces: Boxes, islands: Sequence[str], label: int) -> None:
        """Send this rank's pieces to these islands. Raises OSError."""
        cuts = {peer: cuts for peer, cuts in self._cuts.items() if peer.island in islands}
        self._transfer({peer: _gather(tensors, pieces, cuts[peer]) for peer in cuts}, [], label, 0.0)

    def take(self, pieces: Boxes, island: str, label: int) -> Tensors:
        """Receive the pieces that `island` sends with `give`, less empty ones. Raises OSError."""
        tensors: Tensors = {}
        peers = [peer for peer in self._cuts if peer.island == island]
        for peer, (_, flat) in self._transfer({}, peers, label, 0.0).items():
            _scatter(flat, tensors, pieces, self._cuts[peer])
        return tensors

    def _transfer(
        self,
        sending: Mapping[Peer, torch.Tensor],
        receiving: Sequence[Peer],
        label: int,
        weight: float,
        dtype: torch.dtype = torch.float32,
    ) -> dict[Peer, tuple[float, torch.Tensor]]:
        """Send and receive in parallel. Waits for all threads, then raises the first OSError."""
        arrived: dict[Peer, tuple[float, torch.Tensor]] = {}
        errors: list[OSError] = []
        if self._broken is not None:
            raise self._broken
        self.on_transfer(True)

        def work(peer: Peer, is_sender: bool) -> None:
            try:
                if is_sender:
                    self._send(self._connection_to(peer), sending[peer], label, weight)
                else:
                    size = sum(cut.size for cut in self._cuts[peer].values())
                    arrived[peer] = self._receive(self._connection_to(peer), torch.empty(size, dtype=dtype), label)
            except OSError as error:
                errors.append(error)
                self.abort(self._epoch + 1)  # or the other threads would wait in vain

        threads = [threading.Thread(target=work, args=(peer, True), daemon=True) for peer in sending]
        threads += [threading.Thread(target=work, args=(peer, False), daemon=True) for peer in receiving]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.on_transfer(False)
        if errors or self._is_over:
            raise errors[0] if errors else ConnectionError("there is a newer epoch")
        return arrived

    def _send(self, connection: socket.socket, flat: torch.Tensor, label: int, weight: float) -> None:
        raw = memoryview(cast(Any, flat.numpy())).cast("B")
        connection.sendall(HEADING.pack(MAGIC, label, len(raw), weight))
        for begin in range(0, len(raw), CHUNK_BYTES):
            chunk = raw[begin : begin + CHUNK_BYTES]
            connection.sendall(chunk)
            self.num_bytes += len(chunk)

    def _receive(self, connection: socket.socket, flat: torch.Tensor, label: int) -> tuple[float, torch.Tensor]:
        raw = memoryview(cast(Any, flat.numpy())).cast("B")
        heading = bytearray(HEADING.size)
        receive_exactly(connection, memoryview(heading))
        *found, weight = HEADING.unpack(heading)
        if found != [MAGIC, label, len(raw)]:
            raise BadMessageError("the other end sends something else")
        for begin in range(0, len(raw), CHUNK_BYTES):
            chunk = raw[begin : begin + CHUNK_BYTES]
            receive_exactly(connection, chunk)
            self.num_bytes += len(chunk)
        return weight, flat


def _gather(
    tensors: Tensors, pieces: Boxes, cuts: Mapping[str, Box], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return a peer's cuts of the pieces, concatenated, on the host."""
    parts = [tensors[name][cut.within(pieces[name])].reshape(-1).to(dtype) for name, cut in cuts.items()]
    return torch.cat(parts).cpu()


def _scatter(flat: torch.Tensor, tensors: Tensors, pieces: Boxes, cuts: Mapping[str, Box]) -> None:
    """Write a peer's cuts into this rank's pieces. Allocates pieces that `tensors` lacks."""
    sizes = [cut.size for cut in cuts.values()]
    for (name, cut), values in zip(cuts.items(), flat.split(sizes), strict=True):
        if name not in tensors:
            tensors[name] = torch.empty(pieces[name].lengths, dtype=flat.dtype)
        tensors[name][cut.within(pieces[name])] = values.view(cut.lengths)


def sum_weighted(
    mine: torch.Tensor, own: str, theirs: Mapping[str, torch.Tensor], weights: Mapping[str, float]
) -> torch.Tensor:
    """Return the weighted sum over islands, in order of their names: the same bits on all islands.

    Each product is rounded before it is added, in fp32 on the host: not every processor has a fused multiply-add.
    """
    values = {**theirs, own: mine.float().cpu()}
    weighted = [values[name] * torch.tensor(weights[name], dtype=torch.float32) for name in sorted(values)]
    total = weighted[0]
    for part in weighted[1:]:
        total = total + part
    return total
