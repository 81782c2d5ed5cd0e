"""Exchange of tensors between islands: plain sockets between ranks that hold parts of the same tensors.

No process group spans islands, so they may differ in torch release, vendor and sharding. A rank knows the boxes of all
ranks of all islands. From host memory, it sends the overlaps of its pieces with a peer's, and receives the same
overlaps. Replicas within an island divide their rows first (`boxes.divide_replicas`), so that no element is sent twice.

`Exchange` owns the listening socket and the connections of one rank. `summing.py` adds up gradients over them, and
`changes.py` exchanges weight changes. `Exchange.abort`, which any thread may call, ends transfers of earlier epochs: it
shuts their connections down, so that threads which wait for them fail.
"""

import math
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import torch

from llmfoundry_islands.coordination.messages import (
    FROM_PEER,
    HANDSHAKE_SECONDS,
    BadMessageError,
    check_message,
    dial,
    handshake_as_server,
    pack,
    receive,
    receive_exactly,
)
from llmfoundry_islands.coordination.strangers import Strangers, ThrottledLog, describe_refusal
from llmfoundry_islands.tensors.boxes import Box, Boxes, Tensors, overlapping_boxes

CHUNK_BYTES = 1 << 18
"""Bytes sent between two updates of `num_bytes`: 2 s at 1 Mbit/s."""
HEADING = struct.Struct("!4sQIQd")
"""Precedes the numbers of a message: magic bytes, label, part, number of bytes, weight."""
MAGIC = b"isle"
MAX_STRANGERS = 256
"""Simultaneous handshakes. Each has a thread."""
BACKLOG = 256
"""Connections that the system queues until they are accepted. All ranks of an island may connect at once."""
ACCEPT_PAUSE_SECONDS = 0.5
"""Pause before the next try if no connection can be accepted."""
MAX_ARRIVED = 4096
"""Largest number of connections of peers that no transfer has used yet."""
MAX_PEER_HELLO_BYTES = 4096
"""Limit for the message by which a peer says who it is."""

Buffer = Any
"""Memory that sockets read or fill: bytes, or a numpy array."""
T = TypeVar("T")


class Peer(NamedTuple):
    """A rank of another island."""

    island: str
    rank: int


class Ranks(NamedTuple):
    """The ranks of another island, in order."""

    addresses: Sequence[tuple[str, int]]
    pieces: Sequence[Boxes]


class Heading(NamedTuple):
    """What precedes the numbers of a message."""

    label: int
    """Identifies the batch, and what is transferred. Both ends must expect the same one."""
    part: int
    """Number of the message among those with this label."""
    num_bytes: int
    weight: float
    """Weight of the numbers in a sum."""


class Exchange:
    """One rank's connections to ranks of other islands.

    `connect` begins an epoch, in which the members of the run stay the same. Transfers raise OSError as soon as the
    epoch is over. Methods that transfer may be called from several threads, for different peers.
    """

    def __init__(self, island: str, rank: int, host: str, token: bytes, handshake_seconds: float = HANDSHAKE_SECONDS):
        """Listen at `host`, at a free port. Raises OSError, or UnicodeError if `host` cannot be a host name."""
        self.island = island
        self.rank = rank
        self.token = token
        self.num_bytes = 0
        """Bytes sent and received so far."""
        self.on_transfer: Callable[[bool], None] = lambda is_transferring: None
        """Called with True before a transfer, which may wait for other islands, and with False after it."""
        family, *_, socket_address = min(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM))  # IPv4 if it has both
        self._listener = socket.create_server(socket_address[:2], family=family, backlog=BACKLOG)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._arrived: dict[tuple[int, str, int], socket.socket] = {}
        """(epoch, island, rank) -> a connection that this peer has made, and that no transfer has used yet."""
        self._connections: dict[Peer, socket.socket] = {}
        """Connections of this epoch that transfers use."""
        self.overlaps: dict[Peer, Boxes] = {}
        """Overlaps of this rank's pieces with the pieces of each peer. Peers without an overlap are left out."""
        self.epoch = 0
        self._newest_epoch: float = 0
        """The newest epoch that this rank knows of. If it is newer than `epoch`, transfers fail."""
        self._connect_error: OSError | None = None
        """The first error of `connect`, which the next transfer raises."""
        self._changed = threading.Condition()
        """Notified when a connection arrives or an epoch ends. Guards the connections and epochs."""
        self._num_bytes_lock = threading.Lock()
        self._handshake_seconds = handshake_seconds
        self._strangers = Strangers[socket.socket](MAX_STRANGERS)
        self._is_closed = threading.Event()
        threading.Thread(target=self._listen, name="islands-listen", daemon=True).start()

    # ------------------------------------------------------------------------------------------------ connections

    def connect(self, epoch: int, pieces: Boxes, others: Mapping[str, Ranks]) -> None:
        """Begin an epoch: connect to the ranks of other islands whose pieces overlap this rank's `pieces`.

        Of two islands, the one whose name sorts last dials. The other one gets the connection when a transfer needs it.
        If dialing fails, the first transfer raises the error. Sets `overlaps`.
        """
        self.disconnect()
        with self._changed:
            self.epoch = epoch
            self._connect_error = None
            for key in list(self._arrived):
                arrived_epoch, _, _ = key
                if arrived_epoch < epoch:
                    self._arrived.pop(key).close()

        self.overlaps = {}
        for island, ranks in others.items():
            for rank, their_pieces in enumerate(ranks.pieces):
                overlaps = overlapping_boxes(pieces, their_pieces)
                if overlaps:
                    self.overlaps[Peer(island, rank)] = overlaps

        hello = pack({"kind": "peer", "epoch": epoch, "island": self.island, "rank": self.rank})
        for peer in self.overlaps:
            if peer.island > self.island:
                continue  # it dials
            try:
                connection = dial(others[peer.island].addresses[peer.rank], self.token)
                connection.settimeout(None)
                connection.sendall(hello)
                self._connections[peer] = connection
            except OSError as error:
                self._connect_error = error
                return

    def _connection_to(self, peer: Peer) -> socket.socket:
        """Return the connection to a peer. If the peer has to dial, waits for it until the epoch is over.

        Raises OSError if the epoch is over, or a peer could not be dialed.
        """
        with self._changed:
            key = (self.epoch, peer.island, peer.rank)
            self._changed.wait_for(
                lambda: peer in self._connections or key in self._arrived or self._connect_error or self._is_over
            )
            self.check()
            if peer not in self._connections:
                self._connections[peer] = self._arrived.pop(key)
            return self._connections[peer]

    @property
    def _is_over(self) -> bool:
        """Whether this rank knows of an epoch after `epoch`."""
        return self._newest_epoch > self.epoch

    def abort(self, newest_epoch: float) -> None:
        """End transfers of epochs before `newest_epoch`; of all epochs if it is infinity. Any thread may call this."""
        with self._changed:
            self._newest_epoch = max(self._newest_epoch, newest_epoch)
            ended = [connection for key, connection in self._arrived.items() if key[0] < self._newest_epoch]
            if self._is_over:
                ended += self._connections.values()
            for connection in ended:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._changed.notify_all()

    def disconnect(self) -> None:
        """Close the connections of this epoch."""
        with self._changed:
            for connection in self._connections.values():
                connection.close()
            self._connections = {}

    def close(self) -> None:
        """End all transfers, stop listening and close all connections."""
        self.abort(math.inf)
        self._is_closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # otherwise the listening thread would keep accepting
        self._listener.close()
        self.disconnect()

    def _listen(self) -> None:
        """Accept connections until `close`, each in a thread of its own. Runs in a background thread."""
        print_throttled = ThrottledLog(lambda line: print(f"islands: {line}", file=sys.stderr, flush=True))
        while not self._is_closed.is_set():
            try:
                connection, (host, *_) = self._listener.accept()
            except OSError as error:
                if not self._is_closed.is_set():
                    print_throttled(describe_refusal(error))
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
            handshake_as_server(connection, self.token, end_by)
            hello = receive(connection, MAX_PEER_HELLO_BYTES, end_by)
            check_message(hello, FROM_PEER)
            if not self._strangers.remove(connection):
                raise BadMessageError("dropped")
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._changed:
                is_outdated = hello["epoch"] < max(self.epoch, self._newest_epoch)
                if is_outdated or len(self._arrived) >= MAX_ARRIVED:
                    raise BadMessageError("of an earlier epoch")
                self._arrived[hello["epoch"], hello["island"], hello["rank"]] = connection
                self._changed.notify_all()
        except OSError:
            self._strangers.remove(connection)
            connection.close()

    # ---------------------------------------------------------------------------------------------------- tensors

    def send_pieces(self, tensors: Tensors, pieces: Boxes, islands: Sequence[str], label: int) -> None:
        """Send this rank's pieces to these islands, which call `receive_pieces`. Raises OSError.

        `pieces` are the boxes of all of this rank's pieces. Those that are missing in `tensors` are not sent.
        """
        outgoing = {}
        for peer, overlaps in self.overlaps_of(tensors, islands).items():
            outgoing[peer] = gather(tensors, pieces, overlaps).numpy()
        self.transfer(outgoing, lambda peer: self.send(peer, outgoing[peer], label))

    def receive_pieces(self, pieces: Boxes, island: str, label: int) -> Tensors:
        """Receive these pieces, which `island` sends with `send_pieces`. Raises OSError.

        Returns the tensors by key, in fp32. Pieces without elements are left out.
        """
        overlaps_of_peers = self.overlaps_of(pieces, [island])
        arrived: dict[Peer, torch.Tensor] = {}

        def receive_from(peer: Peer) -> None:
            flat = torch.empty(sum(overlap.size for overlap in overlaps_of_peers[peer].values()))
            heading = self.receive_heading(peer)
            if (heading.label, heading.part, heading.num_bytes) != (label, 0, flat.nbytes):
                raise BadMessageError("the other end sends something else")
            self.receive_into(peer, flat.numpy())
            arrived[peer] = flat

        self.transfer(overlaps_of_peers, receive_from)
        tensors: Tensors = {}
        for peer, flat in arrived.items():
            scatter(flat, tensors, pieces, overlaps_of_peers[peer])
        return tensors

    def overlaps_of(self, keys: Container[str], islands: Sequence[str] | None = None) -> dict[Peer, Boxes]:
        """Return the overlaps of these tensors with ranks of these islands, by default of all islands.

        Peers without such an overlap are left out.
        """
        selected = {}
        for peer, overlaps in self.overlaps.items():
            if islands is not None and peer.island not in islands:
                continue
            overlaps_of_keys = {key: overlap for key, overlap in overlaps.items() if key in keys}
            if overlaps_of_keys:
                selected[peer] = overlaps_of_keys
        return selected

    def transfer(self, jobs: Iterable[T], run: Callable[[T], None]) -> None:
        """Call `run` for each job, which sends to a peer or receives from one, in parallel threads.

        Waits for all threads, and then raises the first OSError. The first error ends the epoch, because the other
        threads might otherwise wait for peers that have given up.
        """
        errors: list[OSError] = []

        def run_or_abort(job: T) -> None:
            try:
                run(job)
            except OSError as error:
                errors.append(error)
                self.abort(self.epoch + 1)

        self.on_transfer(True)
        threads = [threading.Thread(target=run_or_abort, args=(job,), daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.on_transfer(False)
        self.check(errors)

    def check(self, errors: Sequence[Exception] = ()) -> None:
        """Raise the first of `errors`. Without any, raise OSError if a peer was not reached or the epoch is over."""
        for error in (*errors, self._connect_error):
            if error is not None:
                raise error
        if self._is_over:
            raise ConnectionError("there is a newer epoch")

    def send(self, peer: Peer, numbers: Buffer, label: int, part: int = 0, weight: float = 0.0) -> None:
        """Send a message: a heading of label, part and weight (see `Heading`), and then the numbers. Raises OSError."""
        connection = self._connection_to(peer)
        raw = memoryview(numbers).cast("B")
        connection.sendall(HEADING.pack(MAGIC, label, part, len(raw), weight))
        for chunk in _chunks(raw):
            connection.sendall(chunk)
            self._count_bytes(len(chunk))

    def receive_heading(self, peer: Peer) -> Heading:
        """Return the heading of the next message, whose numbers `receive_into` receives. Raises OSError."""
        heading = bytearray(HEADING.size)
        receive_exactly(self._connection_to(peer), memoryview(heading))
        magic, *fields = HEADING.unpack(heading)
        if magic != MAGIC:
            raise BadMessageError("the other end sends something else")
        return Heading(*fields)

    def receive_into(self, peer: Peer, numbers: Buffer) -> None:
        """Fill `numbers` with the bytes that follow a heading. Raises OSError."""
        connection = self._connection_to(peer)
        for chunk in _chunks(memoryview(numbers).cast("B")):
            receive_exactly(connection, chunk)
            self._count_bytes(len(chunk))

    def _count_bytes(self, num_bytes: int) -> None:
        with self._num_bytes_lock:
            self.num_bytes += num_bytes


def _chunks(raw: memoryview) -> Iterator[memoryview]:
    """Divide memory into chunks of CHUNK_BYTES.

    Bytes are counted after each chunk, and heartbeats report them, so that a slow link is not taken for a dead one.
    """
    for begin in range(0, len(raw), CHUNK_BYTES):
        yield raw[begin : begin + CHUNK_BYTES]


def gather(
    tensors: Tensors, pieces: Boxes, overlaps: Mapping[str, Box], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return overlaps with a peer, one after the other in a flat tensor on the host.

    `tensors` are this rank's pieces, and `pieces` their boxes.
    """
    parts = []
    for key, overlap in overlaps.items():
        part = tensors[key][overlap.slices_in(pieces[key])]
        parts.append(part.reshape(-1).to(dtype))
    return torch.cat(parts).cpu()


def scatter(flat: torch.Tensor, tensors: Tensors, pieces: Boxes, overlaps: Mapping[str, Box]) -> None:
    """Write overlaps with a peer, which `gather` has put into a flat tensor, into this rank's pieces.

    `tensors` are the pieces, and `pieces` their boxes. Pieces that are missing in `tensors` are allocated.
    """
    sizes = [overlap.size for overlap in overlaps.values()]
    for (key, overlap), values in zip(overlaps.items(), flat.split(sizes), strict=True):
        if key not in tensors:
            tensors[key] = torch.empty(pieces[key].lengths, dtype=flat.dtype)
        tensors[key][overlap.slices_in(pieces[key])] = values.view(overlap.lengths)
