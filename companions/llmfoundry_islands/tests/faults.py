"""Callbacks that break or note something at a chosen place, for runs of tests; named in their YAML."""

import json
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch
from composer.core import Callback

from llmfoundry_islands.tensors import summing
from llmfoundry_islands.tensors.exchange import HEADING, MAGIC, Exchange
from llmfoundry_islands.training import islands
from llmfoundry_islands.training.local_islands import LocalIslands
from llmfoundry_lite.checkpoint.state import local_tensor


class Signal(Callback):
    """One rank sends itself a signal in a batch: while it computes, or with half of its gradient sent."""

    def __init__(self, batch: int, rank: int = 0, number: int = signal.SIGKILL, where: str = "compute"):
        self.batch = batch
        self.is_here = int(os.environ["RANK"]) == rank
        self.number = number
        self.where = where

    def batch_start(self, state, logger):
        if self.is_here and int(state.timestamp.batch) + 1 == self.batch:
            if self.where == "compute":
                os.kill(os.getpid(), self.number)
            else:
                number = self.number
                Exchange.send = lambda *given: os.kill(os.getpid(), send_half(*given) or number)  # type: ignore[method-assign]


def send_half(exchange, peer, numbers, label, part=0, weight=0.0):
    raw = memoryview(numbers).cast("B")
    connection = exchange._connection_to(peer)
    connection.sendall(HEADING.pack(MAGIC, label, part, len(raw), weight))
    connection.sendall(raw[: len(raw) // 2])


class NoteLate(Callback):
    """Each rank notes all pieces of each gradient, and those that had not left when its backward pass ended."""

    def __init__(self, folder: str):
        wait = summing.Summing.wait

        def noting(one, pieces):
            late = sorted(set(pieces) - {name for parts in one._parts for name in parts})
            with Path(folder, f"late-{one.plan.island}.jsonl").open("a") as file:
                file.write(json.dumps([late, sorted(pieces)]) + "\n")
            wait(one, pieces)

        summing.Summing.wait = noting  # type: ignore[method-assign]


class DieInStream(Callback):
    """An island that gives its state to one that joins, or takes it, is killed when the weights have been sent."""

    def __init__(self, way: str):
        whole = getattr(Exchange, way)

        def half(exchange, *arguments):
            if arguments[-1] % islands.LABELS_PER_BATCH > 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return whole(exchange, *arguments)

        setattr(Exchange, way, half)


class SignalWhen(Callback):
    """One rank is sent a signal as soon as there is a file, whatever it does then."""

    def __init__(self, until: str, number: int = signal.SIGTERM):
        def work():
            while not Path(until).exists():
                time.sleep(0.01)
            os.kill(os.getpid(), number)

        if int(os.environ["RANK"]) == 1:
            threading.Thread(target=work, daemon=True).start()


class Hold(Callback):
    """Before a batch, or after it and before its save, wait until there is a file; another says that it waits."""

    def __init__(self, batch: int, until: str, after: bool = False, waits: str | None = None):
        self.batch = batch
        self.until = Path(until)
        self.after = after
        self.waits = waits

    def batch_start(self, state, logger):
        self.wait_after(self.batch - 1, state, after=False)

    def batch_end(self, state, logger):
        self.wait_after(self.batch, state, after=True)

    def wait_after(self, batch, state, *, after):
        if int(state.timestamp.batch) != batch or self.after != after:
            return
        if self.waits is not None:
            Path(self.waits).touch()
        while not self.until.exists():
            time.sleep(0.01)


class Drift(Callback):
    """After a batch, one weight is wrong."""

    def __init__(self, batch: int):
        self.batch = batch

    def batch_end(self, state, logger):
        if int(state.timestamp.batch) == self.batch:
            with torch.no_grad():
                local_tensor(next(state.model.parameters())).view(-1)[:1].add_(1e-4)


class Cut(Callback):
    """In some batches the connections between islands end with half of the gradient sent, once in each batch."""

    def __init__(self, batches: list[int]):
        self.batches = set(batches)

    def batch_start(self, state, logger):
        if int(state.timestamp.batch) + 1 in self.batches:
            whole = Exchange.send

            def send_half_and_cut(exchange, peer, *given):
                Exchange.send = whole  # type: ignore[method-assign]
                send_half(exchange, peer, *given)
                exchange._connection_to(peer).shutdown(socket.SHUT_RDWR)

            Exchange.send = send_half_and_cut  # type: ignore[method-assign]


class Rest(Callback):
    """After a batch, as an evaluation or a save does, this island does something else for a while."""

    def __init__(self, batch: int, seconds: float):
        self.batch, self.seconds = batch, seconds

    def batch_checkpoint(self, state, logger):
        if int(state.timestamp.batch) == self.batch:
            time.sleep(self.seconds)


class FloatWire(Callback):
    """Gradients travel in fp32, where exact sums need every bit."""

    def __init__(self):
        whole = summing.pack_sums
        summing.pack_sums = lambda values, bits: whole(values.astype("float32").astype("float64"), bits)


class Dump(Callback):
    """After each batch, and after its outer step if it has one, write the weights of an island of one rank. While it
    computes, no momentum of outer steps is on its device."""

    def __init__(self, folder: str):
        self.folder = Path(folder)
        self.folder.mkdir(exist_ok=True)

    def fit_start(self, state, logger):
        self.write(state, "after")

    def batch_end(self, state, logger):
        self.write(state, "before")

    def batch_checkpoint(self, state, logger):
        self.write(state, "after")

    def before_forward(self, state, logger):
        assert not any("outer_momentum" in slots for slots in state.optimizers[0].state.values())

    def write(self, state, when):
        parts = {name: local_tensor(p).clone() for name, p in state.model.named_parameters()}
        torch.save(parts, self.folder / f"{when}-{int(state.timestamp.batch)}.pt")


class Slow(Callback):
    """A batch takes some time."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def batch_start(self, state, logger):
        time.sleep(self.seconds)


class FreezeLink(Callback):
    """Drop every message after a batch, with both ends alive, until the coordinator begins a new epoch."""

    def __init__(self, batch: int):
        whole, is_frozen = Exchange.send, threading.Event()

        def send(exchange, peer, numbers, label, *more):
            if label // islands.LABELS_PER_BATCH == batch and not is_frozen.is_set():
                is_frozen.set()
                while not exchange._is_over:
                    time.sleep(0.01)
                raise ConnectionError("frozen")
            return whole(exchange, peer, numbers, label, *more)

        Exchange.send = send  # type: ignore[method-assign]


class EndCoordinator(Callback):
    """The coordinator is killed between the commit of a round and the view that follows it."""

    def __init__(self, pid: int, batch: int):
        begin = LocalIslands._begin_next_view

        def end_and_begin(self):
            if self.run.batch == batch:
                self.next_view = self.next_view or self.view
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                while self.member.disconnection is None:
                    time.sleep(0.01)
            return begin(self)

        LocalIslands._begin_next_view = end_and_begin  # type: ignore[method-assign]
