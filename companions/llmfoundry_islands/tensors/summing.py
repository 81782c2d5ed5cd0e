"""The sum of a batch's gradient over islands, while the backward pass that computes it still runs.

The gradient is sent in buckets, one for each block and one for each other tensor, as soon as a bucket is complete. Two
islands send each other their gradients, and both add them up. With more islands, each row of a tensor has an owner
(`coordination.owners`): the others send it their rows, and it adds them up and sends the sums back. Either way, numbers
are added in the order of the islands' names, so that all islands get the same bits.

`SumPlan` says, for each bucket, what one rank sends, receives and adds up. It stays the same until the islands or the
owners change. `Summing` carries it out for one batch. Its threads are:

- the caller's, which calls `put` and `wait`
- a worker, which copies buckets to the host, packs exact sums and adds up
- for each peer, one that sends and one that receives
"""

import math
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from llmfoundry_islands.coordination.messages import BadMessageError
from llmfoundry_islands.coordination.owners import divide_rows
from llmfoundry_islands.tensors.boxes import Boxes, Tensors
from llmfoundry_islands.tensors.exchange import Buffer, Exchange, Peer, gather, scatter
from llmfoundry_islands.tensors.packing import most_bytes, pack_sums, unpack_sums
from llmfoundry_lite.parallel.exact import GRID_BITS

MEASURED_BYTES = 1 << 20
"""Smaller messages fit into the sockets' buffers, so that their time does not tell the rate of a link."""
FP32_BYTES = 4


class Bucket(NamedTuple):
    """Tensors that are sent together, seen from one rank."""

    names: frozenset[str]
    """Keys of this rank's pieces in the bucket."""
    owned: Boxes
    """The parts that this rank adds up."""
    summed_by_peer: dict[Peer, Boxes]
    """What this rank sends to each peer, which adds it up."""
    summed_here: dict[Peer, Boxes]
    """What each peer sends to this rank, which adds it up."""


class SumPlan(NamedTuple):
    """What one rank sends, receives and adds up for each batch of a view."""

    island: str
    """The rank's own island."""
    pieces: Boxes
    """The rank's pieces."""
    buckets: Sequence[Bucket]
    has_owners: bool
    """Each row is added up by its owner, which sends the sums back. Otherwise every island adds up all rows."""

    @classmethod
    def of(
        cls, island: str, pieces: Boxes, overlaps: dict[Peer, Boxes], rows: dict[str, range], shares: dict[str, int]
    ) -> "SumPlan":
        """Make the plan of a rank of `island` that has these pieces.

        `overlaps` are those of the pieces with the pieces of each peer, and `rows` the rows of each whole tensor.
        `shares` are the owners' shares of the rows; if it is empty, there are no owners.
        """
        rows_of_owners = {key: divide_rows(rows[key], shares) for key in rows}

        def limit_to_owner(boxes: Boxes, owner: str) -> Boxes:
            """Return the parts of the boxes that `owner` adds up, without empty ones."""
            owned = {}
            for key, box in boxes.items():
                part = box.limit_rows(rows_of_owners[key][owner]) if shares else box
                if part.size:
                    owned[key] = part
            return owned

        buckets = []
        for keys in divide_into_buckets(rows):
            own_pieces = {key: pieces[key] for key in keys if key in pieces}
            summed_by_peer = {}
            summed_here = {}
            for peer, boxes in overlaps.items():
                in_bucket = {key: boxes[key] for key in keys if key in boxes}
                owned_by_peer = limit_to_owner(in_bucket, peer.island)
                owned_here = limit_to_owner(in_bucket, island)
                if owned_by_peer:
                    summed_by_peer[peer] = owned_by_peer
                if owned_here:
                    summed_here[peer] = owned_here
            owned = limit_to_owner(own_pieces, island)
            buckets.append(Bucket(frozenset(own_pieces), owned, summed_by_peer, summed_here))
        return cls(island, pieces, buckets, has_owners=bool(shares))


def divide_into_buckets(keys: Iterable[str]) -> list[list[str]]:
    """Group tensors into buckets, in about the order in which a backward pass computes their gradients.

    Each block is a bucket, and the last block comes first. Every other tensor is a bucket of its own, after the blocks.
    The result depends only on the keys, so that it is the same on all islands.

    For example, the keys `wte`, `blocks.0.w`, `blocks.1.w` and `blocks.1.b` become
    `[[blocks.1.b, blocks.1.w], [blocks.0.w], [wte]]`.
    """
    buckets: dict[tuple[int, str], list[str]] = {}  # by a key that sorts the buckets
    for key in sorted(keys):
        block = re.search(r"\bblocks\.(\d+)\.", key)
        position = (-int(block[1]), "") if block else (1, key)
        buckets.setdefault(position, []).append(key)
    return [buckets[position] for position in sorted(buckets)]


class _Outgoing(NamedTuple):
    """A message that waits for the thread that sends it."""

    part: int
    """Number of the message, see `Summing`."""
    numbers: Buffer
    weight: float


class Summing:
    """The sum of one batch's gradient. Creating it begins to receive; its threads end with `wait`.

    Bucket i has two messages in each direction at most. Message 2i has a rank's own numbers, and the rank's weight.
    Message 2i + 1 has sums that an owner sends back, and the weight of all islands that it has added up.

    With `is_exact`, numbers are integers in float64 that are added without rounding, and are sent packed. Otherwise
    they are sent in fp32, and each island's are multiplied by its share of the weights.

    After `wait`, `sums`, `total_weight` and `link_rate` have the result.
    """

    def __init__(self, exchange: Exchange, plan: SumPlan, label: int, weight: float, *, is_exact: bool):
        """Begin the sum. `label` identifies the batch, and `weight` is this island's number of tokens or samples."""
        self.exchange = exchange
        self.plan = plan
        self.label = label
        self.is_exact = is_exact
        self.dtype = torch.float64 if is_exact else torch.float32
        self.weights = {plan.island: weight}
        """Weight of each island that this rank has heard of."""
        self.total_weight = weight
        """Sum of all islands' weights, as far as this rank has heard."""
        self.sums: Tensors = {}
        """This rank's pieces of the sum, on the host."""
        self.link_rate = 0.0
        """Bytes per second that arrived from all peers together. 0 if too few bytes arrived to tell."""
        self._bucket_of_key = {key: i for i, bucket in enumerate(plan.buckets) for key in bucket.names}

        # For each bucket: this rank's pieces, other islands' parts of what is added up here, and what is missing.
        self._parts: list[Tensors] = [{} for _ in plan.buckets]
        self._theirs: list[dict[str, Tensors]] = [{} for _ in plan.buckets]
        self._missing: list[set[Peer | None]] = [{*bucket.summed_here, None} for bucket in plan.buckets]
        """Peers whose part of a bucket has not arrived yet, and None for this rank's own part."""
        self._num_unsummed = sum(bool(bucket.names) for bucket in plan.buckets)
        """Buckets that have not been added up yet."""

        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        """Tasks of the worker. None ends it."""
        self._outgoing = {peer: queue.SimpleQueue[_Outgoing | None]() for peer in exchange.overlaps}
        """Messages for each peer. None ends the thread that sends them."""
        self._received: dict[Peer, tuple[int, float]] = {}
        """Bytes that have arrived from each peer in large messages, and the seconds that they took."""
        self._errors: list[Exception] = []
        self._lock = threading.RLock()
        self._num_busy = 0
        """Tasks of this host that are waiting or running."""
        self._is_waiting = False
        """The caller is in `wait`, so the backward pass is over."""

        functions: list[Callable[[], None]] = []
        if exchange.overlaps:
            functions.append(self._work)
        for peer in exchange.overlaps:
            functions.append(partial(self._send, peer))
            functions.append(partial(self._receive, peer))
        self._threads = [threading.Thread(target=self._run, args=(function,), daemon=True) for function in functions]
        for thread in self._threads:
            thread.start()

    def put(self, key: str, piece: torch.Tensor) -> None:
        """Add this rank's piece of a gradient that is final. The bucket is sent once all of its pieces are there.

        Any thread may call this, and kernels that compute the piece may still be queued. Raises RuntimeError if the
        piece has been put before.
        """
        bucket_index = self._bucket_of_key[key]
        with self._lock:
            parts = self._parts[bucket_index]
            if key in parts:
                raise RuntimeError(f"{key}: its gradient has been sent, and has changed since")
            parts[key] = piece
            is_complete = parts.keys() == self.plan.buckets[bucket_index].names
            if is_complete:
                event = torch.cuda.current_stream(piece.device).record_event() if piece.is_cuda else None
                self._begin(partial(self._gather, bucket_index, event))

    def wait(self, pieces: Tensors) -> None:
        """Put those of this rank's pieces that have not been put, and wait for the sums.

        Sets `sums`, `total_weight` and `link_rate`. Raises OSError if a link or another island has failed.
        """
        for key, piece in pieces.items():
            if key not in self._parts[self._bucket_of_key[key]]:
                self.put(key, piece)
        self._set_waiting(True)
        for thread in self._threads:
            thread.join()
        self._set_waiting(False)
        self.exchange.check(self._errors)
        self.total_weight = max(self.total_weight, sum(self.weights.values()))
        self.link_rate = sum(num_bytes / max(seconds, 1e-9) for num_bytes, seconds in self._received.values())

    # ------------------------------------------------------------------------- what the coordinator is told meanwhile

    def _set_waiting(self, is_waiting: bool) -> None:
        with self._lock:
            self._is_waiting = is_waiting
            self._note_transfer()

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """Mark a block as work of this host. Outside of such blocks, threads wait for sockets."""
        self._add_busy(1)
        try:
            yield
        finally:
            self._add_busy(-1)

    def _add_busy(self, count: int) -> None:
        with self._lock:
            self._num_busy += count
            self._note_transfer()

    def _note_transfer(self) -> None:
        """Report whether this rank waits for other islands only: neither the device nor the host works."""
        self.exchange.on_transfer(self._is_waiting and not self._num_busy)

    # ---------------------------------------------------------------------------------------------------- threads

    def _run(self, function: Callable[[], None]) -> None:
        """Run the function of a thread. If it fails, ends the epoch and the other threads."""
        try:
            function()
        except Exception as error:
            self._errors.append(error)
            self.exchange.abort(self.exchange.epoch + 1)  # otherwise the other threads would wait for peers
            self._end()

    def _end(self) -> None:
        """End the worker and the threads that send, once they have done what is queued."""
        self._tasks.put(None)
        for outgoing in self._outgoing.values():
            outgoing.put(None)

    def _begin(self, task: Callable[[], None]) -> None:
        """Queue a task for the worker."""
        self._add_busy(1)
        self._tasks.put(task)

    def _work(self) -> None:
        """Run tasks until the end. The worker's thread."""
        while (task := self._tasks.get()) is not None:
            try:
                task()
            finally:
                self._add_busy(-1)

    def _send(self, peer: Peer) -> None:
        """Send messages to a peer until the end. The peer's sending thread."""
        while (message := self._outgoing[peer].get()) is not None:
            self.exchange.send(peer, message.numbers, self.label, message.part, message.weight)

    def _receive(self, peer: Peer) -> None:
        """Receive all of a peer's messages of this batch. The peer's receiving thread. Raises OSError.

        Messages may come in any order, because gradients do not become final in the same order on all islands.
        """
        expected: dict[int, Boxes] = {}  # number of a message -> the boxes whose numbers it has
        for i, bucket in enumerate(self.plan.buckets):
            if peer in bucket.summed_here:
                expected[2 * i] = bucket.summed_here[peer]
            if self.plan.has_owners and peer in bucket.summed_by_peer:
                expected[2 * i + 1] = bucket.summed_by_peer[peer]
        while expected:
            heading = self.exchange.receive_heading(peer)
            boxes = expected.pop(heading.part, None)
            is_valid_weight = 0 <= heading.weight < math.inf
            if heading.label != self.label or boxes is None or not is_valid_weight:
                raise BadMessageError("the other end sends something else")
            count = sum(box.size for box in boxes.values())
            flat = self._receive_numbers(peer, count, heading.num_bytes)
            bucket_index, is_sum = divmod(heading.part, 2)
            with self._busy():
                if is_sum:
                    self._write(flat, boxes)
                    self.total_weight = max(self.total_weight, heading.weight)
                else:
                    self._note_part(bucket_index, peer, flat, heading.weight)

    def _receive_numbers(self, peer: Peer, count: int, num_bytes: int) -> torch.Tensor:
        """Receive `count` numbers that take `num_bytes` on the wire, and measure the link's rate. Raises OSError.

        The size is checked before memory is allocated for it.
        """
        if self.is_exact:
            is_valid_size = num_bytes <= most_bytes(count)
        else:
            is_valid_size = num_bytes == FP32_BYTES * count
        if not is_valid_size:
            raise BadMessageError(f"{num_bytes} bytes for {count} numbers")

        raw = np.empty(num_bytes, np.uint8)
        began_at = time.monotonic()
        self.exchange.receive_into(peer, raw)
        if num_bytes >= MEASURED_BYTES:
            seconds = time.monotonic() - began_at
            bytes_before, seconds_before = self._received.get(peer, (0, 0.0))
            self._received[peer] = bytes_before + num_bytes, seconds_before + seconds

        if not self.is_exact:
            return torch.from_numpy(raw.view(np.float32))
        with self._busy():
            return torch.from_numpy(unpack_sums(memoryview(cast(Any, raw)), count, GRID_BITS))

    # ------------------------------------------------------------------------------------------------- host work

    def _gather(self, bucket_index: int, event: Any) -> None:
        """Copy this rank's pieces of a bucket to the host, and send peers what they add up. A task of the worker.

        `event` is a CUDA event after the kernels that compute the pieces; None if they are on the host.
        """
        bucket = self.plan.buckets[bucket_index]
        parts = self._parts[bucket_index]
        if event is not None:
            # In a stream of its own. In the current stream, copies would wait for the whole backward pass.
            device = next(iter(parts.values())).device
            stream = torch.cuda.Stream(device)
            stream.wait_event(event)
            with torch.cuda.stream(stream):
                parts.update({key: piece.cpu() for key, piece in parts.items()})
        for peer, boxes in bucket.summed_by_peer.items():
            flat = gather(parts, self.plan.pieces, boxes, self.dtype)
            message = _Outgoing(2 * bucket_index, self._pack(flat), self.weights[self.plan.island])
            self._outgoing[peer].put(message)
        self._note_part(bucket_index, None)

    def _pack(self, flat: torch.Tensor) -> Buffer:
        """Return numbers as they are sent."""
        return pack_sums(flat.numpy(), GRID_BITS) if self.is_exact else flat.numpy()

    def _note_part(
        self, bucket_index: int, peer: Peer | None, flat: torch.Tensor | None = None, weight: float = 0.0
    ) -> None:
        """Note that a part of a bucket is there: a peer's numbers and weight, or this rank's own pieces (`peer` None).

        When nothing is missing any more, the worker adds the bucket up.
        """
        with self._lock:
            if peer is not None and flat is not None:
                bucket = self.plan.buckets[bucket_index]
                tensors = self._theirs[bucket_index].setdefault(peer.island, {})
                scatter(flat, tensors, bucket.owned, bucket.summed_here[peer])
                self.weights[peer.island] = weight
            self._missing[bucket_index].discard(peer)
            if not self._missing[bucket_index]:
                self._begin(partial(self._add_up, bucket_index))

    def _add_up(self, bucket_index: int) -> None:
        """Add up the parts of a bucket that this rank owns, and send the sums to peers. A task of the worker.

        The last bucket ends the threads.
        """
        bucket = self.plan.buckets[bucket_index]
        with self._lock:
            weights = dict(self.weights)
        total_weight = sum(weights.values())
        # The total is 0 if all rows are padding.
        shares = {island: weight / max(total_weight, 1.0) for island, weight in weights.items()}

        totals: Tensors = {}
        for key, box in bucket.owned.items():
            own_part = self._parts[bucket_index][key][box.slices_in(self.plan.pieces[key])]
            their_parts = {island: tensors[key] for island, tensors in self._theirs[bucket_index].items()}
            if self.is_exact:  # the order does not matter
                totals[key] = sum(their_parts.values(), own_part.cpu())
            else:
                totals[key] = sum_weighted(own_part, self.plan.island, their_parts, shares)
        if totals:
            self._write(torch.cat([total.reshape(-1) for total in totals.values()]), bucket.owned)

        if self.plan.has_owners:
            for peer, boxes in bucket.summed_here.items():
                flat = gather(totals, bucket.owned, boxes, self.dtype)
                self._outgoing[peer].put(_Outgoing(2 * bucket_index + 1, self._pack(flat), total_weight))
        self._theirs[bucket_index] = {}  # frees memory
        self._num_unsummed -= 1
        if not self._num_unsummed:
            self._end()

    def _write(self, flat: torch.Tensor, boxes: Boxes) -> None:
        """Write sums of these boxes into this rank's pieces of the sum."""
        with self._lock:
            scatter(flat, self.sums, self.plan.pieces, boxes)


def sum_weighted(
    own_part: torch.Tensor, own_island: str, their_parts: Mapping[str, torch.Tensor], weights: Mapping[str, float]
) -> torch.Tensor:
    """Return the weighted sum of a tensor over islands, in order of their names: the same bits on all islands.

    Each product is rounded to fp32 on the host before it is added, because only some processors can multiply and add in
    one step, which rounds once.
    """
    parts = {**their_parts, own_island: own_part.float().cpu()}
    products = [parts[island] * torch.tensor(weights[island], dtype=torch.float32) for island in sorted(parts)]
    total = products[0]
    for product in products[1:]:
        total = total + product
    return total
