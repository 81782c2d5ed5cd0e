"""The server of rehearsals: a process that imports the training code on a CUDA that is absent, and forks. No torch."""

import contextlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from llmfoundry_lite.companions import search_path
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.errors import EXIT_DONE, EXIT_FAILURE, EXIT_USER
from llmfoundry_lite.hardware import Accelerator
from llmfoundry_lite.ranks.rank import rank_variables, rendezvous
from llmfoundry_planner.rehearse.build import NAME, build_library
from llmfoundry_planner.rehearse.device import describe_device

CUDA_RELEASE = 13000
"""CUDA's release by its own count, if no package says it."""

TOO_SHORT = (
    "error: rehearse: the run ends before enough batches were measured; give it a longer one: max_duration=100ba\n"
)


class Job(NamedTuple):
    """A rehearsal that has been checked."""

    arguments: list[str]
    config: TrainConfig
    device: Accelerator
    num_devices: int
    per_node: int


class Outcome(NamedTuple):
    exit_code: int
    said: str
    """The rank's standard error."""
    found: dict[str, Any]
    """Measurements of `measure.py` until the rehearsal ended."""
    seconds: float


class ForkServer:
    """`with ForkServer() as server: server.rehearse(...)`. Leaves nothing behind, however this process ends.

    The server of llmfoundry_ops does not fit: Linux kills it with this process, and folders would stay.
    """

    def __enter__(self) -> "ForkServer":
        self._place = tempfile.TemporaryDirectory(prefix="rehearse-", ignore_cleanup_errors=True)
        self.folder = Path(self._place.name)
        self._num_rehearsals = 0
        # This machine's devices are not those that are rehearsed.
        inherited = {name: value for name, value in os.environ.items() if not name.endswith("_VISIBLE_DEVICES")}
        # Compiling processes of its own would outlive a fork.
        own = {**preload(build_library()), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "llmfoundry_planner.rehearse.child", str(os.getpid()), str(self.folder)],
            env={**inherited, **search_path(), **own},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process, which then ends that one
        )
        return self

    def __exit__(self, *error: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # with its forks
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._place.cleanup()

    def rehearse(
        self,
        arguments: list[str],
        device: Accelerator,
        *,
        num_devices: int,
        per_node: int,
        rank: int = 0,
        num_batches: int = 2,
        counts_operations: bool = True,
        spare_bytes: int = 0,
    ) -> Outcome:
        """Run one rank to its end. `spare_bytes` of the device are out of its reach."""
        began = time.monotonic()
        self._num_rehearsals += 1
        folder = self.folder / str(self._num_rehearsals)
        folder.mkdir()
        write_request(
            folder,
            arguments,
            describe_device(device, per_node, cuda_release(), spare_bytes)
            | rank_variables(rank, num_devices, per_node)
            | rendezvous(),
            num_devices=num_devices,
            per_node=per_node,
            num_batches=num_batches,
            counts_operations=counts_operations,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        answer = ""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{folder}\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        said = folder / "stderr.txt"
        text = said.read_text(errors="replace") if said.is_file() else ""
        # Without an answer the server itself is gone, with its reason on our standard error.
        code = int(answer) if answer.strip() else self._process.wait() or EXIT_FAILURE
        last = "collectives" if counts_operations else "allocated_bytes"
        return read_outcome(folder, code, text, time.monotonic() - began, last)


def run_for_real(arguments: list[str]) -> Outcome:
    """Measure the same on this machine's own device, as a single rank."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="measure-", ignore_cleanup_errors=True) as name:
        options = {"num_devices": 1, "per_node": 1, "num_batches": 2, "counts_operations": False}
        write_request(Path(name), arguments, rank_variables(0, 1) | rendezvous(), **options)
        command = [sys.executable, "-P", "-m", "llmfoundry_planner.rehearse.child", name]
        done = subprocess.run(
            command, env={**os.environ, **search_path()}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        return read_outcome(Path(name), done.returncode, done.stderr, time.monotonic() - began)


def write_request(folder: Path, arguments: list[str], environment: dict[str, str], **options: Any) -> None:
    """Write `request.json`. `options`: num_devices, per_node, num_batches, counts_operations."""
    caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
    request = {"arguments": arguments, "environment": {**environment, **caches}, **options}
    (folder / "request.json").write_text(json.dumps(request))


def read_outcome(folder: Path, code: int, said: str, seconds: float, last: str = "allocated_bytes") -> Outcome:
    """Read a rehearsal's result.json. `last`: the last measurement of a run that is long enough."""
    if code < 0:
        reason = "; this machine may be out of memory" if code == -signal.SIGKILL else ""
        said += f"error: rehearse: the process was killed by {signal.Signals(-code).name}{reason}\n"
        code = EXIT_FAILURE
    result = folder / "result.json"
    found = json.loads(result.read_text()) if result.is_file() else {}
    if code == EXIT_DONE and last not in found:
        code, said = EXIT_USER, said + TOO_SHORT
    return Outcome(code, said, found, seconds)


def preload(library: Path) -> dict[str, str]:
    """Return the environment of a process that takes `library` for CUDA. `describe_device` adds the device."""
    return {
        "LD_PRELOAD": " ".join(filter(None, [str(library / NAME), os.environ.get("LD_PRELOAD")])),
        "TRITON_LIBCUDA_PATH": str(library),
        "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC": "0",  # would ask NVIDIA's management library
    }


def cuda_release() -> int:
    """Return the release that torch was built for: 13000 for 13.0."""
    for name in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"):
        try:
            major, minor, *_ = importlib.metadata.version(name).split(".")
            return int(major) * 1000 + int(minor) * 10
        except importlib.metadata.PackageNotFoundError:
            continue
    return CUDA_RELEASE
