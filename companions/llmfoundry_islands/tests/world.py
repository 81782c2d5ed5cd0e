"""Islands for tests: a coordinator and several launches at once, on this machine."""

import multiprocessing
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from llmfoundry_islands.coordination.messages import TOKEN
from tests.helpers.launch import Launch, free_port, train
from tests.helpers.tiny import read_metrics, tiny_config, write_config

SECRET = "a-secret-of-this-test"
HELLO = {"island": "a", "launch": "1", "rank": 0, "size": 1, "address": ["127.0.0.1", 1], "boxes": {"w": [[0], [2]]}}
HELLO |= {"fingerprints": {"seed": "17"}, "machine": {}, "batch": 0, "rows": 8, "microbatch": 1, "weight": 1.0}
HELLO |= {"unit": 1, "data_ranks": 1}
PREPARED = {"kind": "prepared", "epoch": 1, "batch": 0, "ok": True, "leaving": False, "bad": 0, "seconds": 1.0}
PREPARED |= {"weight": 8, "samples": 8, "tokens": 8, "losses": 8, "digest": 1, "loss": 1.0, "norm": 1.0, "weights": ""}
PREPARED |= {"out_of_range": False, "link": 0, "steps": 1, "again": 0, "asks_for_whole": False}
STATE = {"kinds": {}, "optimizer": {}, "scalars": {}, "segments": []}

ONE = (1, {})
SHARDS = (2, {})
STAGES = (2, {"pp_config": {"pipeline_parallel_degree": 2}})
LAYERS = (2, {"tp_config": {"tensor_parallel_degree": 2}})
SAMPLES = (2, {"cp_config": {"context_parallel_degree": 2}})
COPIES = (2, {"fsdp_config": {"sharding_strategy": "ZERO_1"}})
"""Layouts of islands: ranks, and settings."""
MUON = {"optimizer": {"name": "muon", "lr": 1e-3, "ns_dtype": "fp32"}}

_processes = multiprocessing.get_context("forkserver")


def _coordinate(port: int, output: str, num_islands: int, silence: float) -> None:
    sys.stdout = open(output, "a", buffering=1)  # noqa: SIM115 - until the process ends
    from llmfoundry_islands.coordination.serve import serve

    serve(("127.0.0.1", port), SECRET.encode(), num_islands, silence)


class Coordination:
    """A coordinator that runs."""

    def __init__(self, folder: Path, num_islands: int, silence: float):
        self.port = free_port()
        self.output = folder / f"coordinator-{self.port}.txt"
        self.arguments = (self.port, str(self.output), num_islands, silence)
        self.start()

    def start(self) -> None:
        self.process = _processes.Process(target=_coordinate, args=self.arguments)
        self.process.start()
        while not self.answers():
            assert self.process.is_alive()
            time.sleep(0.02)

    def answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            return True
        except OSError:
            return False

    @property
    def lines(self) -> str:
        return self.output.read_text()

    def wait_for(self, words: str, times: int = 1) -> None:
        """Wait until the coordinator has printed these words."""
        self._wait(lambda: self.lines.count(words) >= times)

    def wait_for_file(self, path: Path) -> None:
        self._wait(path.exists)

    def wait_for_batch(self, log: Path, batch: int) -> None:
        """Wait until an island has recorded this batch."""
        self._wait(lambda: log.exists() and f'"batch": {batch},' in log.read_text())

    def _wait(self, condition: Callable[[], bool], seconds: float = 240) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.lines
            time.sleep(0.02)

    def freeze(self) -> None:
        self.send(signal.SIGSTOP)
        while psutil.Process(self.process.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)

    def thaw(self) -> None:
        self.send(signal.SIGCONT)

    def send(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self.process.is_alive():
            self.send(number)
            self.send(signal.SIGCONT)  # it may be frozen
        self.process.join(10)


@contextmanager
def coordination(folder: Path, num_islands: int = 2, silence: float = 4.0) -> Iterator[Coordination]:
    running = Coordination(folder, num_islands, silence)
    try:
        yield running
    finally:
        running.stop()


@contextmanager
def no_more_files() -> Iterator[socket.socket]:
    """Let this process open no file but the socket that it yields."""
    spare = socket.socket()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, before[1]))
    try:
        yield spare
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        spare.close()


class Line:
    """A connection to the coordinator. Either direction can go dead, and then carries nothing at all."""

    def __init__(self, port):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        self.port = port
        self.is_dead = {"there": threading.Event(), "back": threading.Event()}
        self.is_left = threading.Event()
        """The rank has hung up."""
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        self.near, _ = self.listener.accept()
        self.far = socket.create_connection(("127.0.0.1", self.port))
        threading.Thread(target=self.carry, args=(self.near, self.far, "there"), daemon=True).start()
        self.carry(self.far, self.near, "back")

    def carry(self, source, target, way):
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if not self.is_dead[way].is_set():
                    target.sendall(data)
            if way == "there":
                self.is_left.set()
            if not self.is_dead[way].is_set():
                target.shutdown(socket.SHUT_WR)

    def close(self):
        for one in (self.listener, self.near, self.far):
            one.close()


@contextmanager
def line_to(port):
    line = Line(port)
    try:
        yield line
    finally:
        line.close()


def island(folder: Path, data: Path, running: Coordination, name: str, num_ranks: int, **changes: Any) -> Launch:
    """One launch of the run, until it ends."""
    block = {"coordinator": f"127.0.0.1:{running.port}", "name": name, **changes.pop("islands", {})}
    env = {TOKEN: SECRET, **changes.pop("env", {})}
    settings = {"device_train_microbatch_size": 1, "save_folder": str(folder / "saves"), "dist_timeout": 60, **changes}
    config = tiny_config(data, run_name="run", islands=block, **settings)
    path = write_config(folder / f"{name}.yaml", config)
    return train([path], folder, num_ranks, env=env, timeout_seconds=240)


def together(*launches: Any) -> list[Any]:
    """The results of functions, most of which return a Launch; all run at once."""
    with ThreadPoolExecutor(len(launches)) as pool:
        return [future.result() for future in [pool.submit(launch) for launch in launches]]


def islands(folder: Path, data: Path, running: Any, *others: Any, **ranks: Any) -> list[Any]:
    """Islands at once, `name=ranks` or `name=(ranks, changes)`, and other functions."""
    launches = []
    for name, given in ranks.items():
        num_ranks, changes = given if isinstance(given, tuple) else (given, {})
        launches.append(partial(island, folder, data, running, name, num_ranks, **changes))
    return together(*launches, *others)


def train_with_a_death(folder: Path, data: Path, killed_at: int, a: Any, b: Any) -> None:
    """Two islands, (ranks, changes) of each. b dies in a batch with half its gradient sent, and comes back four batches
    later. Both note what leaves late."""
    gate = folder / "b is back"
    note = {"python:llmfoundry_islands.tests.faults:NoteLate": {"folder": str(folder)}}
    hold = note | {"python:llmfoundry_islands.tests.faults:Hold": {"batch": killed_at + 3, "until": str(gate)}}
    kill = note | {"python:llmfoundry_islands.tests.faults:Signal": {"batch": killed_at, "where": "exchange"}}
    checks = {"islands": {"check_weights_every": 1}}
    num_ranks_of_b, of_b = b[0], b[1] | checks
    with coordination(folder) as running:

        def twice() -> Launch:
            first = island(folder, data, running, "b", num_ranks_of_b, callbacks=kill, **of_b)
            assert -9 in first.exit_codes, first.output
            return island(folder, data, running, "b", num_ranks_of_b, autoresume=True, callbacks=note, **of_b)

        def open_gate() -> None:
            running.wait_for("b is here", times=2)
            gate.touch()

        launches = islands(folder, data, running, twice, open_gate, a=(a[0], a[1] | checks | {"callbacks": hold}))
        assert f"batch {killed_at} is repeated: without b" in running.lines
    for launch in launches[:2]:
        launch.check()


def metrics_path(folder: Path, name: str) -> Path:
    return folder / "runs/run" / name / "metrics.jsonl"


def metrics(folder: Path, name: str) -> list[dict[str, Any]]:
    return read_metrics(folder / "runs/run" / name)
