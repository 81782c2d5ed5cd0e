"""Sum of a batch's gradient over islands, while the backward pass that makes it still runs.

The gradient travels in buckets, one for each block and one for each other tensor, as soon as a bucket is whole. Two
islands send each other theirs, and both add up. With more, each row of a tensor has an owner (`owners`): the others
send it their rows, it adds up and sends the sums back. Sums are in order of the islands' names, so that the bits are
the same either way. A background thread copies to the host, packs exact sums and adds up; each peer has a thread that
sends and one that receives.
"""

import math
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from llmfoundry_islands.coordination.messages import BadMessageError
from llmfoundry_islands.coordination.owners import divide_rows
from llmfoundry_islands.tensors.boxes import Boxes, Tensors
from llmfoundry_islands.tensors.exchange import Exchange, Peer, gather, scatter
from llmfoundry_islands.tensors.packing import most_bytes, pack_sums, unpack_sums
from llmfoundry_lite.parallel.exact import GRID_BITS

MEASURED_BYTES = 1 << 20
"""Smaller messages fit into sockets' buffers and say nothing of a link's rate."""


class Bucket(NamedTuple):
    """Tensors that travel together, seen from one rank."""

    names: frozenset[str]
    owned: Boxes
    """The parts that this rank adds up."""
    give: dict[Peer, Boxes]
    """The parts that go to a peer, which adds them up."""
    take: dict[Peer, Boxes]
    """The parts that come from a peer, to be added up here."""


class SumPlan(NamedTuple):
    """Boxes of a view's exchange, seen from one rank."""

    island: str
    pieces: Boxes
    buckets: Sequence[Bucket]
    has_owners: bool
    """Sums are sent back."""

    @classmethod
    def of(
        cls, island: str, pieces: Boxes, cuts: dict[Peer, Boxes], rows: dict[str, range], shares: dict[str, int]
    ) -> "SumPlan":
        """Make the plan of a rank from the overlaps with its peers, each tensor's rows, and owners' shares."""
        owners = {name: divide_rows(rows[name], shares) for name in rows}

        def owned(boxes: Boxes, owner: str) -> Boxes:
            if not shares:
                return {name: box for name, box in boxes.items() if box.size}
            found = {name: box.rows_in(owners[name][owner]) for name, box in boxes.items()}
            return {name: box for name, box in found.items() if box.size}

        buckets = []
        for names in divide_into_buckets(rows):
            mine = {name: pieces[name] for name in names if name in pieces}
            shared = {peer: {name: boxes[name] for name in names if name in boxes} for peer, boxes in cuts.items()}
            give = {peer: owned(boxes, peer.island) for peer, boxes in shared.items()}
            take = {peer: owned(boxes, island) for peer, boxes in shared.items()}
            both = ({peer: boxes for peer, boxes in way.items() if boxes} for way in (give, take))
            buckets.append(Bucket(frozenset(mine), owned(mine, island), *both))
        return cls(island, pieces, buckets, bool(shares))


def divide_into_buckets(names: Iterable[str]) -> list[list[str]]:
    """Group parameters by block, the last one first, as backward passes go; others are on their own. The same on all
    islands."""
    buckets: dict[tuple[int, str], list[str]] = {}
    for name in sorted(names):
        block = re.search(r"\bblocks\.(\d+)\.", name)
        buckets.setdefault((-int(block[1]), "") if block else (1, name), []).append(name)
    return [buckets[key] for key in sorted(buckets)]


class Summing:
    """One batch's sum, from its first bucket to `wait`. Its threads end with `wait`."""

    def __init__(self, exchange: Exchange, plan: SumPlan, label: int, weight: float, *, is_exact: bool):
        self.exchange, self.plan, self.label, self.is_exact = exchange, plan, label, is_exact
        self.dtype = torch.float64 if is_exact else torch.float32
        self.weights = {plan.island: weight}
        self.total_weight = weight
        """Sum over islands, as far as this rank has heard."""
        self.sums: Tensors = {}
        """This rank's pieces of the sum, on the host."""
        self.link_rate = 0.0
        """Bytes per second at which peers' messages came, all peers at once; 0: too few came to tell."""
        self._numbers = {name: i for i, bucket in enumerate(plan.buckets) for name in bucket.names}
        self._parts: list[Tensors] = [{} for _ in plan.buckets]
        self._theirs: list[dict[str, Tensors]] = [{} for _ in plan.buckets]
        self._missing = [{*bucket.take, None} for bucket in plan.buckets]
        """Peers whose part of a bucket has not come yet; None for this rank's own."""
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._outgoing = {peer: queue.SimpleQueue[Any]() for peer in exchange.cuts}
        self._received: dict[Peer, tuple[int, float]] = {}
        self._errors: list[Exception] = []
        self._lock = threading.RLock()
        self._num_busy, self._is_waiting = 0, False
        self._num_left = sum(bool(bucket.names) for bucket in plan.buckets)
        works: list[Callable[[], None]] = [self._work] if exchange.cuts else []
        for peer in exchange.cuts:
            works += [lambda peer=peer: self._send(peer), lambda peer=peer: self._receive(peer)]
        self._threads = [threading.Thread(target=self._run, args=(work,), daemon=True) for work in works]
        for thread in self._threads:
            thread.start()

    def put(self, name: str, piece: torch.Tensor) -> None:
        """Pass this rank's piece of a final gradient, from any thread. Queued kernels may still compute it."""
        number = self._numbers[name]
        with self._lock:
            parts = self._parts[number]
            if name in parts:
                raise RuntimeError(f"{name}: its gradient has been sent, and has changed since")
            parts[name] = piece
            if parts.keys() == self.plan.buckets[number].names:
                event = torch.cuda.current_stream(piece.device).record_event() if piece.is_cuda else None
                self._begin(lambda: self._gather(number, event))

    def wait(self, pieces: Tensors) -> None:
        """Send those of this rank's pieces that were not `put`, and wait for the sums. Raises OSError."""
        for name, piece in pieces.items():
            if name not in self._parts[self._numbers[name]]:
                self.put(name, piece)
        with self._lock:
            self._is_waiting = True
            self._note()
        for thread in self._threads:
            thread.join()
        with self._lock:
            self._is_waiting = False
            self._note()
        self.exchange.check(self._errors)
        self.total_weight = max(self.total_weight, sum(self.weights.values()))
        self.link_rate = sum(size / max(seconds, 1e-9) for size, seconds in self._received.values())

    # ---------------------------------------------------------------------------------------------------- threads

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._errors.append(error)
            self.exchange.abort(self.exchange.epoch + 1)  # or the other threads would wait in vain
            self._end()

    def _end(self) -> None:
        for waiting in (self._tasks, *self._outgoing.values()):
            waiting.put(None)

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """Note host work. Time outside of such blocks is spent waiting for sockets."""
        self._add_busy(1)
        try:
            yield
        finally:
            self._add_busy(-1)

    def _add_busy(self, count: int) -> None:
        with self._lock:
            self._num_busy += count
            self._note()

    def _note(self) -> None:
        self.exchange.on_transfer(self._is_waiting and not self._num_busy)

    def _begin(self, task: Callable[[], None]) -> None:
        self._add_busy(1)
        self._tasks.put(task)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            finally:
                self._add_busy(-1)

    def _send(self, peer: Peer) -> None:
        while (message := self._outgoing[peer].get()) is not None:
            part, numbers, weight = message
            self.exchange.send(peer, numbers, self.label, part, weight)

    def _receive(self, peer: Peer) -> None:
        buckets = self.plan.buckets
        expected = {2 * i: one.take[peer] for i, one in enumerate(buckets) if peer in one.take}
        if self.plan.has_owners:
            expected |= {2 * i + 1: one.give[peer] for i, one in enumerate(buckets) if peer in one.give}
        while expected:
            label, part, size, weight = self.exchange.receive_heading(peer)
            boxes = expected.pop(part, None)
            if label != self.label or boxes is None or not 0 <= weight < math.inf:
                raise BadMessageError("the other end sends something else")
            flat = self._receive_numbers(peer, sum(box.size for box in boxes.values()), size)
            number, is_sum = divmod(part, 2)
            with self._busy():
                if is_sum:
                    self._write(flat, boxes)
                    self.total_weight = max(self.total_weight, weight)
                else:
                    self._note_part(number, peer, flat, weight)

    def _receive_numbers(self, peer: Peer, count: int, size: int) -> torch.Tensor:
        if size > (most_bytes(count) if self.is_exact else 4 * count) or (not self.is_exact and size < 4 * count):
            raise BadMessageError(f"{size} bytes for {count} numbers")
        raw = np.empty(size, np.uint8)
        begun = time.monotonic()
        self.exchange.receive_into(peer, raw)
        if size >= MEASURED_BYTES:
            before, seconds = self._received.get(peer, (0, 0.0))
            self._received[peer] = before + size, seconds + time.monotonic() - begun
        if not self.is_exact:
            return torch.from_numpy(raw.view(np.float32))
        with self._busy():
            return torch.from_numpy(unpack_sums(memoryview(cast(Any, raw)), count, GRID_BITS))

    # ------------------------------------------------------------------------------------------------- host work

    def _gather(self, number: int, event: Any) -> None:
        """Copy a bucket to the host, and send peers their parts."""
        bucket, parts = self.plan.buckets[number], self._parts[number]
        if event is not None:  # with a stream of its own: else copies would wait for the whole backward pass
            stream = torch.cuda.Stream(next(iter(parts.values())).device)
            stream.wait_event(event)
            with torch.cuda.stream(stream):
                parts.update({name: piece.cpu() for name, piece in parts.items()})
        for peer, boxes in bucket.give.items():
            flat = gather(parts, self.plan.pieces, boxes, self.dtype)
            self._outgoing[peer].put((2 * number, self._pack(flat), self.weights[self.plan.island]))
        self._note_part(number, None)

    def _pack(self, flat: torch.Tensor) -> Any:
        return pack_sums(flat.numpy(), GRID_BITS) if self.is_exact else flat.numpy()

    def _note_part(self, number: int, peer: Peer | None, flat: torch.Tensor | None = None, weight: float = 0.0) -> None:
        """Note a peer's part of a bucket, or this rank's own (None). The last one begins the addition."""
        with self._lock:
            if peer is not None and flat is not None:
                bucket = self.plan.buckets[number]
                scatter(flat, self._theirs[number].setdefault(peer.island, {}), bucket.owned, bucket.take[peer])
                self.weights[peer.island] = weight
            self._missing[number].discard(peer)
            if not self._missing[number]:
                self._begin(lambda: self._add_up(number))

    def _add_up(self, number: int) -> None:
        """Add up the parts that are this rank's to add, and send the sums to peers."""
        bucket, theirs = self.plan.buckets[number], self._theirs[number]
        totals: Tensors = {}
        with self._lock:
            weights = dict(self.weights)
        whole = sum(weights.values())
        shares = {island: weight / max(whole, 1.0) for island, weight in weights.items()}
        for name, box in bucket.owned.items():
            mine = self._parts[number][name][box.within(self.plan.pieces[name])]
            others = {island: tensors[name] for island, tensors in theirs.items()}
            if self.is_exact:  # in any order
                totals[name] = sum(others.values(), mine.cpu())
            else:
                totals[name] = sum_weighted(mine, self.plan.island, others, shares)
        if totals:
            self._write(torch.cat([total.reshape(-1) for total in totals.values()]), bucket.owned)
        for peer, boxes in bucket.take.items() if self.plan.has_owners else ():
            self._outgoing[peer].put(
                (2 * number + 1, self._pack(gather(totals, bucket.owned, boxes, self.dtype)), whole)
            )
        self._theirs[number] = {}
        self._num_left -= 1
        if not self._num_left:
            self._end()

    def _write(self, flat: torch.Tensor, boxes: Boxes) -> None:
        with self._lock:
            scatter(flat, self.sums, self.plan.pieces, boxes)


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
