"""Launch real ranks for tests, without paying for `import composer` in each of them.

A fork server imports the training code once; each rank is a fork of it with its own environment, as a launcher
would set it, and runs `scripts/train.py` or any function. Output goes to files, so that nothing can block.
"""

import atexit
import importlib
import itertools
import multiprocessing
import os
import random
import re
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PATHS = f"{ROOT}:{ROOT / 'companions'}"
"""PYTHONPATH of a process that runs a module of a companion, or of its tests."""

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(
    [
        "llmfoundry_lite.ranks.preload",
        "llmfoundry_lite.training.train",
        "tests.helpers.launch",
        "tests.helpers.preloaded",
    ]
)

_first_port = 10_000 + 1_000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
_ports = itertools.cycle(random.Random().sample(range(_first_port, _first_port + 1_000), 1_000))


FAILURE = re.compile("^error: |^Traceback", re.MULTILINE)
NEEDED = re.compile(r"^error: (.+: needs the companion \w+)$", re.MULTILINE)


@dataclass
class Launch:
    exit_codes: list[int]
    outputs: list[str]
    """stdout and stderr of each rank, in order."""

    @property
    def output(self) -> str:
        """Output of rank 0, with that of a rank that failed where rank 0 says nothing of it."""
        first, *failed = [self.outputs[0], *filter(FAILURE.search, self.outputs[1:])]
        return first if FAILURE.search(first) or not failed else first + failed[0]

    def check(self) -> "Launch":
        """Expect that all ranks ended well. A run that needs a companion which is not here is skipped."""
        if needed := NEEDED.search(self.output):
            pytest.skip(needed[1])
        assert set(self.exit_codes) == {0}, f"exit codes {self.exit_codes}\n" + "\n".join(self.outputs)
        return self


def train(
    arguments: Sequence[str],
    tmp_path: Path,
    num_ranks: int = 1,
    *,
    local_world_size: int | None = None,
    env: dict[str, str] | None = None,
    timeout_seconds: float = 300,
) -> Launch:
    """`composer -n NUM_RANKS scripts/train.py ARGUMENTS`, less the launcher."""
    return launch(_train, (list(arguments),), tmp_path, num_ranks, local_world_size, env, timeout_seconds)


def launch(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    tmp_path: Path,
    num_ranks: int = 1,
    local_world_size: int | None = None,
    env: dict[str, str] | None = None,
    timeout_seconds: float = 300,
) -> Launch:
    """Run `function(*arguments)` on `num_ranks` ranks; kill them all when the time is up."""
    started = start(function, arguments, tmp_path, num_ranks, local_world_size, env)
    deadline = time.monotonic() + timeout_seconds
    for process in started.processes:
        process.join(max(0.0, deadline - time.monotonic()))
    late = [process for process in started.processes if process.is_alive()]
    for process in late:
        process.kill()
        process.join()
    outputs = [path.read_text() for path in started.outputs]
    assert not late, f"{len(late)} ranks still ran after {timeout_seconds} s\n" + "\n".join(outputs)
    return Launch([process.exitcode or 0 for process in started.processes], outputs)


@dataclass
class Started:
    """A launch that runs. Whoever asked for it ends it."""

    processes: list[Any]
    outputs: list[Path]


def start(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    tmp_path: Path,
    num_ranks: int,
    local_world_size: int | None,
    env: dict[str, str] | None,
) -> Started:
    local = local_world_size or num_ranks
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    folder = tmp_path / f"launch-{time.monotonic_ns()}"
    folder.mkdir(parents=True)
    started = Started([], [])
    for rank in range(num_ranks):
        place = {
            "RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_RANK": str(rank % local),
            "LOCAL_WORLD_SIZE": str(local),
            "NODE_RANK": str(rank // local),
        }
        environment = {**address, **place, "OMP_NUM_THREADS": "1", **(env or {})}
        output = folder / f"rank{rank}.txt"
        output.touch()
        process = _server.Process(target=_rank, args=(environment, output, tmp_path, function, arguments))
        started.processes.append(process)
        started.outputs.append(output)
    for process in started.processes:
        process.start()
    return started


def _rank(
    environment: dict[str, str], output: Path, folder: Path, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    multiprocessing.set_start_method("fork", force=True)  # as in a process of a launcher, not the server's own way
    os.chdir(folder)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    if "REHEARSED_NAME" in os.environ and torch.cuda.is_available():  # the planner's `test_gpu_tests.py`
        importlib.import_module("llmfoundry_planner.rehearse.child").replace_the_world()
    try:
        function(*arguments)
    finally:
        atexit._run_exitfuncs()  # a process of multiprocessing leaves without them, a rank of a launcher does not
        sys.stdout.flush()


def _train(arguments: list[str]) -> None:
    from llmfoundry_lite.launch_train import main
    from llmfoundry_lite.ranks.ending import run_and_exit

    sys.argv = ["scripts/train.py", *arguments]
    run_and_exit(main)


def free_port() -> int:
    """A port that nobody listens on. Each worker of a parallel test run looks in a range of its own, below the ports
    that the system hands out, and goes round it: nobody else is told the same one before it is taken."""
    for _ in range(100):
        port = next(_ports)
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no free port among 100")
