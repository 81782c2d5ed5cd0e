"""Exchange of tensors between islands: plain sockets between ranks that hold parts of the same tensors.

No process group spans islands, so they may differ in torch release, vendor and sharding. A rank knows the boxes of all
ranks of all islands. From host memory it sends overlaps of its boxes with a peer's, and receives such overlaps.
Replicas within an island divide their rows first, so that no element travels twice. Closing a rank's connections ends
an exchange early. `summing` adds up gradients over these connections.
"""

import math
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

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
HEADING = struct.Struct("!4sQIQd")
"""Precedes numbers: magic, label, part, number of bytes, weight."""
MAGIC = b"isle"
MAX_STRANGERS = 64
"""Simultaneous handshakes."""
MAX_ARRIVED = 4096
"""Connections of peers that no exchange has used yet."""


class Box(NamedTuple):
    """A rectangular part of a tensor."""

    offset: tuple[int, ...]
    lengths: tuple[int, ...]

    def common(self, other: "Box") -> "Box | None":
        """Return the overlap; None if it is empty."""
        begins = np.maximum(self.offset, other.offset)
        lengths = np.minimum(np.add(self.offset, self.lengths), np.add(other.offset, other.lengths)) - begins
        return Box(tuple(begins.tolist()), tuple(lengths.tolist())) if (lengths > 0).all() else None

    def within(self, other: "Box") -> tuple[slice, ...]:
        """Return the slices of this box in the tensor of `other`."""
        begins = np.subtract(self.offset, other.offset).tolist()
        return tuple(slice(begin, begin + n) for begin, n in zip(begins, self.lengths, strict=True))

    def rows_in(self, rows: range) -> "Box":
        """Return the part whose rows are among `rows`, which may be empty."""
        begin, stop = self.offset[0], self.offset[0] + self.lengths[0]
        first = min(max(begin, rows.start), stop)
        return Box((first, *self.offset[1:]), (max(min(stop, rows.stop) - first, 0), *self.lengths[1:]))

    @property
    def size(self) -> int:
        return int(np.prod(self.lengths))


Boxes = dict[str, Box]
Tensors = dict[str, torch.Tensor]
Buffer = Any
"""Memory that sockets read or fill: bytes, or an array of numpy."""


class Peer(NamedTuple):
    island: str
    rank: int


class Ranks(NamedTuple):
    """The ranks of another island, in order."""

    addresses: Sequence[tuple[str, int]]
    pieces: Sequence[Boxes]


def share_out(boxes_of_ranks: Sequence[Boxes]) -> list[Boxes]:
    """Return each rank's part of its boxes to exchange: ranks with the same box divide its rows."""
    pieces: list[Boxes] = [{} for _ in boxes_of_ranks]
    for name in boxes_of_ranks[0]:
        holders: dict[Box, list[int]] = {}
        for rank, boxes in enumerate(boxes_of_ranks):
            holders.setdefault(boxes[name], []).append(rank)
        for (offset, lengths), ranks in holders.items():
            bounds = [lengths[0] * i // len(ranks) for i in range(len(ranks) + 1)]
            for i, rank in enumerate(ranks):
                first, last = bounds[i], bounds[i + 1]
                pieces[rank][name] = Box((offset[0] + first, *offset[1:]), (last - first, *lengths[1:]))
    return pieces


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
        self.cuts: dict[Peer, Boxes] = {}
        """Overlaps of this rank's pieces with each peer's."""
        self.epoch = 0
        self._newest_epoch: float = 0
        self._broken: OSError | None = None
        self._news = threading.Condition()
        self._counting = threading.Lock()
        self._strangers = threading.Semaphore(MAX_STRANGERS)
        threading.Thread(target=self._listen, name="islands-listen", daemon=True).start()

    # ------------------------------------------------------------------------------------------------ connections

    def meet(self, epoch: int, pieces: Boxes, others: Mapping[str, Ranks]) -> None:
        """Connect to the ranks of other islands whose pieces overlap this rank's. Of two islands, the later by name
        dials. If that fails, the first transfer raises the error.
        """
        self.part()
        with self._news:
            self.epoch = epoch
            self._broken = None
            for key in [key for key in self._arrived if key[0] < epoch]:
                self._arrived.pop(key).close()
        self.cuts = {}
        for island, ranks in others.items():
            for rank, theirs in enumerate(ranks.pieces):
                cuts = {name: cut for name in sorted(pieces) if (cut := pieces[name].common(theirs[name]))}
                if cuts:
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
                if hello["epoch"] < max(self.epoch, self._newest_epoch) or len(self._arrived) >= MAX_ARRIVED:
                    raise BadMessageError("of an earlier epoch")
                self._arrived[hello["epoch"], hello["island"], hello["rank"]] = connection
                self._news.notify_all()
        except OSError:
            connection.close()
        finally:
            self._strangers.release()

    # ---------------------------------------------------------------------------------------------------- tensors

    def give(self, tensors: Tensors, pieces: Boxes, islands: Sequence[str], label: int) -> None:
        """Send this rank's pieces to these islands. Raises OSError."""
        sending = {
            peer: gather(tensors, pieces, cuts).numpy() for peer, cuts in self.cuts.items() if peer.island in islands
        }
        self._transfer(sending, lambda peer: self.send(peer, sending[peer], label))

    def take(self, pieces: Boxes, island: str, label: int) -> Tensors:
        """Receive the pieces that `island` sends with `give`, less empty ones. Raises OSError."""
        tensors: Tensors = {}

        def receive(peer: Peer) -> None:
            flat = torch.empty(sum(cut.size for cut in self.cuts[peer].values()))
            heading = self.receive_heading(peer)
            if heading[:3] != (label, 0, flat.nbytes):
                raise BadMessageError("the other end sends something else")
            self.receive_into(peer, flat.numpy())
            arrived[peer] = flat

        arrived: dict[Peer, torch.Tensor] = {}
        self._transfer([peer for peer in self.cuts if peer.island == island], receive)
        for peer, flat in arrived.items():
            scatter(flat, tensors, pieces, self.cuts[peer])
        return tensors

    def _transfer(self, peers: Iterable[Peer], transfer: Callable[[Peer], None]) -> None:
        """Send to peers, or receive from them, in parallel. Waits for all threads, then raises the first OSError."""
        errors: list[OSError] = []

        def work(peer: Peer) -> None:
            try:
                transfer(peer)
            except OSError as error:
                errors.append(error)
                self.abort(self.epoch + 1)  # or the other threads would wait in vain

        self.on_transfer(True)
        threads = [threading.Thread(target=work, args=(peer,), daemon=True) for peer in peers]
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


def complete(tensors: Mapping[str, torch.Tensor], locals_: Tensors, pieces: Boxes, boxes: Boxes) -> None:
    """Gather, within the island, the rows that replicas have divided by `share_out`. Every rank must call it together.

    `tensors` are the model's, `locals_` this rank's parts of them: only their `pieces` are valid before, all of them
    after.
    """
    groups: dict[str, tuple[dist.ProcessGroup, list[str]]] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            continue
        mesh, kinds = tensor.device_mesh, tensor.placements
        copies = [i for i, kind in enumerate(kinds) if kind.is_replicate() and mesh.size(i) > 1]
        assert len(copies) <= 1, kinds
        if copies:  # other ranks hold the same part
            group = mesh.get_group(copies[0])
            groups.setdefault(group.group_name, (group, []))[1].append(name)
    for group, names in groups.values():
        for name in names:
            whole, inside = locals_[name], pieces[name].within(boxes[name])
            kept = whole[inside].clone()
            whole.zero_()
            whole[inside] = kept
        # Offloaded parameters are on the host, and a group exchanges only tensors on its devices.
        device = cast(DTensor, tensors[names[0]]).device_mesh.device_type
        flat = torch.cat([locals_[name].reshape(-1) for name in names]).to(device)
        dist.all_reduce(flat, group=group)  # each element is one value plus zeros: exact
        for name, values in zip(names, flat.split([locals_[name].numel() for name in names]), strict=True):
            locals_[name].copy_(values.view_as(locals_[name]))
