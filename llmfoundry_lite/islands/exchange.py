"""Tensors between islands: over plain sockets, between ranks that hold parts of the same tensors.

There is no process group across islands, so that releases of torch, vendors and shardings may differ. A rank knows the
boxes of all ranks of all islands. It sends what its own have in common with a peer's, in fp32 from host memory, and
receives the same box of the peer's tensor. Ranks of an island that hold copies divide them first, so that every number
travels between two islands once each way.

Closing a rank's connections is how an exchange ends early. Leaves who takes part to `member`, and the weights and the
verdict to training.
"""

import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from llmfoundry_lite.islands.messages import BadMessageError, dial, pack, receive, receive_exactly, welcome

CONNECT_SECONDS = 5.0
CHUNK_BYTES = 1 << 18
"""Between two counts of what has been sent: at 1 Mbit/s, 2 s."""
HEADING = struct.Struct("!4sQQd")
"""Before tensors: a mark, the label, the number of bytes, the weight."""
MAGIC = b"isle"
MOST_STRANGERS = 64
"""Connections that have not proved the token yet."""


class Box(NamedTuple):
    """A part of a tensor."""

    offset: tuple[int, ...]
    lengths: tuple[int, ...]

    def common(self, other: "Box") -> "Box | None":
        begins = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        ends = [
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.lengths, other.offset, other.lengths, strict=True)
        ]
        lengths = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        return Box(begins, lengths) if all(length > 0 for length in lengths) else None

    def within(self, other: "Box") -> tuple[slice, ...]:
        """Where this box lies in a tensor that is that of `other`."""
        begins = [mine - theirs for mine, theirs in zip(self.offset, other.offset, strict=True)]
        return tuple(slice(begin, begin + n) for begin, n in zip(begins, self.lengths, strict=True))

    @property
    def size(self) -> int:
        return int(np.prod(self.lengths))


Boxes = dict[str, Box]
Tensors = dict[str, torch.Tensor]


class Peer(NamedTuple):
    island: str
    rank: int


class Ranks(NamedTuple):
    """Of another island, in order."""

    addresses: Sequence[tuple[str, int]]
    pieces: Sequence[Boxes]


class Swapped(NamedTuple):
    weights: dict[str, float]
    """Of the other islands' gradients."""
    tensors: dict[str, Tensors]
    """Island -> name -> that island's numbers for this rank's piece, fp32 in host memory."""


def share_out(boxes_of_ranks: Sequence[Boxes]) -> list[Boxes]:
    """The part of each rank's boxes that it exchanges: ranks with the same box take rows of it in turn."""
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
        """Sent and received, so far."""
        self.on_transfer: Callable[[bool], None] = lambda is_transferring: None
        """Called before sockets may wait for other islands, and after. Tensors are gathered outside, for as long as
        that takes this host."""
        family, *_, where = min(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM))  # IPv4, of a name with both
        self._listener = socket.create_server(where[:2], family=family, backlog=256)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._arrived: dict[tuple[int, str, int], socket.socket] = {}
        self._connections: dict[Peer, socket.socket] = {}
        self._cuts: dict[Peer, dict[str, Box]] = {}
        self._epoch = 0
        self._newest_epoch: float = 0
        self._broken: OSError | None = None
        self._news = threading.Condition()
        self._strangers = threading.Semaphore(MOST_STRANGERS)
        threading.Thread(target=self._listen, name="islands-listen", daemon=True).start()

    # ------------------------------------------------------------------------------------------------ connections

    def meet(self, epoch: int, pieces: Boxes, others: Mapping[str, Ranks]) -> None:
        """Dial those ranks of `others` whose pieces meet this rank's, if they come earlier by name of island; the
        rest dial us.

        An error is kept for the first transfer, which raises it.
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
                    self._dial(peer, others[peer.island].addresses[peer.rank])
                except OSError as error:
                    self._broken = error

    def _dial(self, peer: Peer, address: tuple[str, int]) -> None:
        connection = dial(address, self.token, CONNECT_SECONDS)
        connection.settimeout(None)
        connection.sendall(pack({"kind": "peer", "epoch": self._epoch, "island": self.island, "rank": self.rank}))
        with self._news:
            self._connections[peer] = connection

    def _connection_to(self, peer: Peer) -> socket.socket:
        """Waits for a rank that has to dial us, until the epoch is over."""
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
        """From any thread: whatever belongs to an earlier epoch ends now; infinity ends everything."""
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
            self._listener.shutdown(socket.SHUT_RDWR)  # or the thread would go on to accept
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
        """Strangers, and what is malformed, are closed and forgotten."""
        try:
            welcome(connection, self.token)
            hello = receive(connection, 4096)
            epoch, island, rank = hello.get("epoch"), hello.get("island"), hello.get("rank")
            if hello["kind"] != "peer" or not (type(epoch) is int and type(island) is str and type(rank) is int):
                raise BadMessageError("no peer")
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._news:
                if epoch < self._epoch or len(self._arrived) >= 4096:
                    raise BadMessageError("of an earlier epoch")
                self._arrived[epoch, island, rank] = connection
                self._news.notify_all()
        except OSError:
            connection.close()
        finally:
            self._strangers.release()

    # ---------------------------------------------------------------------------------------------------- tensors

    def swap(self, tensors: Tensors, pieces: Boxes, label: int, weight: float) -> Swapped:
        """Both ways, with all other islands. `tensors` are the pieces; `label` must be the same on both ends, and
        `weight` is told. Raises OSError."""
        sending = {peer: _gather(tensors, pieces, cuts) for peer, cuts in self._cuts.items()}
        sizes = {peer: _size(cuts) for peer, cuts in self._cuts.items()}
        swapped = Swapped({}, {})
        for peer, (their_weight, flat) in self._transfer(sending, sizes, label, weight).items():
            theirs = swapped.tensors.setdefault(peer.island, {})
            _scatter(flat, theirs, pieces, self._cuts[peer])
            swapped.weights[peer.island] = their_weight
        return swapped

    def give(self, tensors: Tensors, pieces: Boxes, islands: Sequence[str], label: int) -> None:
        """One way, to these islands. Raises OSError."""
        peers = {peer: cuts for peer, cuts in self._cuts.items() if peer.island in islands}
        self._transfer({peer: _gather(tensors, pieces, cuts) for peer, cuts in peers.items()}, {}, label, 0.0)

    def take(self, pieces: Boxes, island: str, label: int) -> Tensors:
        """The other end of `give`; empty pieces are left out. Raises OSError."""
        peers = {peer: cuts for peer, cuts in self._cuts.items() if peer.island == island}
        tensors: Tensors = {}
        for peer, (_, flat) in self._transfer({}, {p: _size(cuts) for p, cuts in peers.items()}, label, 0.0).items():
            _scatter(flat, tensors, pieces, peers[peer])
        return tensors

    def _transfer(
        self, sending: Mapping[Peer, torch.Tensor], receiving: Mapping[Peer, int], label: int, weight: float
    ) -> dict[Peer, tuple[float, torch.Tensor]]:
        """Everything at once, both ways. Raises the first OSError when all threads have ended."""
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
                    arrived[peer] = self._receive(self._connection_to(peer), receiving[peer], label)
            except OSError as error:
                errors.append(error)
                self.abort(self._epoch + 1)  # the others wait for nothing now

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

    def _receive(self, connection: socket.socket, size: int, label: int) -> tuple[float, torch.Tensor]:
        flat = np.empty(size, np.float32)
        raw = memoryview(cast(Any, flat)).cast("B")
        heading = bytearray(HEADING.size)
        receive_exactly(connection, memoryview(heading))
        *found, weight = HEADING.unpack(heading)
        if found != [MAGIC, label, len(raw)]:
            raise BadMessageError("the other end sends something else")
        for begin in range(0, len(raw), CHUNK_BYTES):
            chunk = raw[begin : begin + CHUNK_BYTES]
            receive_exactly(connection, chunk)
            self.num_bytes += len(chunk)
        return weight, torch.from_numpy(flat)


def _size(cuts: Mapping[str, Box]) -> int:
    return sum(cut.size for cut in cuts.values())


def _gather(tensors: Tensors, pieces: Boxes, cuts: Mapping[str, Box]) -> torch.Tensor:
    """What a peer gets: its cuts of the pieces, one after another."""
    parts = [tensors[name][cut.within(pieces[name])].reshape(-1).float() for name, cut in cuts.items()]
    return torch.cat(parts).cpu()


def _scatter(flat: torch.Tensor, tensors: Tensors, pieces: Boxes, cuts: Mapping[str, Box]) -> None:
    """Cuts of a peer -> their places in this rank's pieces, which are allocated by the first of them."""
    sizes = [cut.size for cut in cuts.values()]
    for (name, cut), values in zip(cuts.items(), flat.split(sizes), strict=True):
        if name not in tensors:
            tensors[name] = torch.empty(pieces[name].lengths, dtype=torch.float32)
        tensors[name][cut.within(pieces[name])] = values.view(cut.lengths)


def sum_weighted(
    mine: torch.Tensor, own: str, theirs: Mapping[str, torch.Tensor], weights: Mapping[str, float]
) -> torch.Tensor:
    """The weighted sum over islands, in order of their names: the same bits on all of them.

    Products and sums are rounded each on its own, as IEEE 754 has them: a fused multiply-add rounds once, and not every
    processor has it. In fp32, in host memory.
    """
    total = None
    for name in sorted({own, *theirs}):
        values = mine.float().cpu() if name == own else theirs[name]
        weighted = values * torch.tensor(weights[name], dtype=torch.float32)
        total = weighted if total is None else total + weighted
    assert total is not None
    return total


def complete(tensors: Mapping[str, torch.Tensor], locals_: Tensors, pieces: Boxes, boxes: Boxes) -> None:
    """Give each other, within the island, the rows that copies have divided among them; in place.

    `tensors` are as the model has them, `locals_` this rank's parts of them, of which the `pieces` are as they should
    be. Every rank must call this together.
    """
    groups: dict[str, tuple[dist.ProcessGroup, list[str]]] = {}
    for name, tensor in tensors.items():
        group = _group_of_copies(tensor)
        if group is not None:
            groups.setdefault(group.group_name, (group, []))[1].append(name)
    for group, names in groups.values():
        for name in names:
            whole, inside = locals_[name], pieces[name].within(boxes[name])
            kept = whole[inside].clone()
            whole.zero_()
            whole[inside] = kept
        # Offloaded parameters lie on the host, and a group exchanges what lies on its devices.
        device = cast(DTensor, tensors[names[0]]).device_mesh.device_type
        flat = torch.cat([locals_[name].reshape(-1) for name in names]).to(device)
        dist.all_reduce(flat, group=group)  # of one number and zeros: exact
        for name, values in zip(names, flat.split([locals_[name].numel() for name in names]), strict=True):
            locals_[name].copy_(values.view_as(locals_[name]))


def _group_of_copies(tensor: torch.Tensor) -> dist.ProcessGroup | None:
    """The ranks that hold what this rank holds of it; None if no other does."""
    if not isinstance(tensor, DTensor):
        return None
    mesh = tensor.device_mesh
    copies = [i for i, kind in enumerate(tensor.placements) if kind.is_replicate() and mesh.size(i) > 1]
    assert len(copies) <= 1, tensor.placements
    return mesh.get_group(copies[0]) if copies else None


def digest_of_parts(parts: Tensors, pieces: Boxes, boxes: Boxes, shapes: Mapping[str, Sequence[int]]) -> int:
    """A number whose sum over an island's ranks, modulo 2**64, is the same for the same tensors however they are
    divided, and another for others: each fp32's bits times an odd number that its place decides.
    """
    total = 0
    for number, name in enumerate(sorted(pieces)):
        piece = pieces[name]
        if not piece.size:
            continue
        values = parts[name][piece.within(boxes[name])].float().cpu().contiguous().numpy().view(np.uint32)
        places = np.zeros(piece.lengths, np.uint64)
        for dim, (begin, length) in enumerate(zip(piece.offset, piece.lengths, strict=True)):
            axis = np.arange(begin, begin + length, dtype=np.uint64) * np.uint64(int(np.prod(shapes[name][dim + 1 :])))
            places += axis.reshape([-1 if other == dim else 1 for other in range(len(piece.lengths))])
        factors = (places + np.uint64(number << 40)) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(0xD1B54A32D192ED03)
        total += int(((values.astype(np.uint64) + np.uint64(1)) * (factors | np.uint64(1))).sum(dtype=np.uint64))
    return total % (1 << 64)
