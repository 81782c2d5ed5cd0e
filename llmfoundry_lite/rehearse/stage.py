"""A stage: one process that has imported the training code on a CUDA that is not there.

Owns that process, its environment and its end. Each rehearsal is a fork of it, since the imports take longer than a
small rehearsal. No torch is imported here.
"""

import contextlib
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from llmfoundry_lite.errors import EXIT_BUG, EXIT_DONE, EXIT_USER
from llmfoundry_lite.hardware import Accelerator
from llmfoundry_lite.rehearse.build import NAME, build_library
from llmfoundry_lite.rehearse.device import describe_device

CUDA_RELEASE = 13000
"""As CUDA counts, where no package says it."""


TOO_SHORT = (
    "error: rehearse: the run ends before enough batches were measured; give it a longer one: max_duration=100ba\n"
)


class Outcome(NamedTuple):
    exit_code: int
    said: str
    """What the rank wrote to standard error."""
    found: dict[str, Any]
    """What was measured, until it ended."""
    seconds: float


class Stage:
    """`with Stage() as stage: stage.rehearse(...)`. Leaves nothing behind, however this process ends."""

    def __enter__(self) -> "Stage":
        self.library = build_library()
        self._place = tempfile.TemporaryDirectory(prefix="rehearse-", ignore_cleanup_errors=True)
        self.folder = Path(self._place.name)
        self._num_rehearsals = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "llmfoundry_lite.rehearse.child", str(os.getpid()), str(self.folder)],
            env={**without_choice_of_devices(), **self.environment()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process, which then ends that one
        )
        return self

    def __exit__(self, *error: Any) -> None:
        with_forks = self._process.pid  # leads its session
        with contextlib.suppress(ProcessLookupError):
            os.killpg(with_forks, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._place.cleanup()

    def environment(self) -> dict[str, str]:
        """What makes torch take our library for CUDA's, and keeps compilers' caches in `folder`."""
        return {
            **preload(self.library),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # processes of its own would outlive a fork
        }

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
        """One rank of a run, to its end. `spare_bytes` of the device are out of its reach."""
        began = time.monotonic()
        self._num_rehearsals += 1
        folder = self.folder / str(self._num_rehearsals)
        folder.mkdir()
        environment = {
            **describe_device(device, per_node, cuda_release(), spare_bytes),
            **place_in_launch(rank, num_devices, per_node),
        }
        write_request(
            folder,
            arguments,
            environment,
            num_devices=num_devices,
            per_node=per_node,
            num_batches=num_batches,
            counts_operations=counts_operations,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(f"{folder}\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        said = folder / "stderr.txt"
        text = said.read_text(errors="replace") if said.is_file() else ""
        if answer.strip():
            code = int(answer)
        else:  # the stage itself is gone, with its reason on our standard error
            code = self._process.wait() or EXIT_BUG
        last = "collectives" if counts_operations else "allocated_bytes"
        return read_outcome(folder, code, text, time.monotonic() - began, last)


def run_for_real(arguments: list[str]) -> Outcome:
    """The same measurement on this machine's own device, alone."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="measure-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        write_request(
            folder,
            arguments,
            place_in_launch(0, 1, 1),
            num_devices=1,
            per_node=1,
            num_batches=2,
            counts_operations=False,
        )
        command = [sys.executable, "-m", "llmfoundry_lite.rehearse.child", str(folder)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        return read_outcome(folder, done.returncode, done.stderr, time.monotonic() - began)


def place_in_launch(rank: int, num_devices: int, per_node: int) -> dict[str, str]:
    """As a launcher would say it."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_devices),
        "LOCAL_RANK": str(rank % per_node),
        "LOCAL_WORLD_SIZE": str(per_node),
        "NODE_RANK": str(rank // per_node),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }


def write_request(folder: Path, arguments: list[str], environment: dict[str, str], **options: Any) -> None:
    """`options`: num_devices, per_node, num_batches, counts_operations. Compilers keep their caches in `folder`."""
    caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
    request = {"arguments": arguments, "environment": {**environment, **caches}, **options}
    (folder / "request.json").write_text(json.dumps(request))


def read_outcome(folder: Path, code: int, said: str, seconds: float, last: str = "allocated_bytes") -> Outcome:
    """`last`: what a run that is long enough has found."""
    if code < 0:
        said += describe_killed(-code)
        code = EXIT_BUG
    result = folder / "result.json"
    found = json.loads(result.read_text()) if result.is_file() else {}
    if code == EXIT_DONE and last not in found:
        code, said = EXIT_USER, said + TOO_SHORT
    return Outcome(code, said, found, seconds)


def without_choice_of_devices() -> dict[str, str]:
    """This machine's are not those that are rehearsed."""
    return {name: value for name, value in os.environ.items() if not name.endswith("_VISIBLE_DEVICES")}


def preload(library: Path) -> dict[str, str]:
    """The environment of a process that takes `library` for CUDA. `describe_device` says which device it finds."""
    return {
        "LD_PRELOAD": " ".join(filter(None, [str(library / NAME), os.environ.get("LD_PRELOAD")])),
        "TRITON_LIBCUDA_PATH": str(library),
        "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC": "0",  # would ask NVIDIA's management library
    }


def describe_killed(number: int) -> str:
    reason = "; this machine may be out of memory" if number == signal.SIGKILL else ""
    return f"error: rehearse: the process was killed by {signal.Signals(number).name}{reason}\n"


def cuda_release() -> int:
    """As CUDA counts: 13000 for 13.0, of the release that torch was built for."""
    for name in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"):
        try:
            major, minor, *_ = importlib.metadata.version(name).split(".")
            return int(major) * 1000 + int(minor) * 10
        except importlib.metadata.PackageNotFoundError:
            continue
    return CUDA_RELEASE
