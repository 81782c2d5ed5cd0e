"""Start rehearsals and read their results. No torch in this process.

`ForkServer` starts one process of `child.py`, which imports the training code with CUDA replaced, and forks for each
rehearsal, so that only the first one waits for the import. `run_for_real` measures the same on a device that is there.
Both pass a rehearsal to `child.py` as a folder with `request.json`, and find `result.json` and `stderr.txt` in it.
"""

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
"""Release of CUDA, 13.0, if no installed package says it."""

TOO_SHORT = (
    "error: rehearse: the run ends before enough batches were measured; give it a longer one: max_duration=100ba\n"
)


class Job(NamedTuple):
    """A run to rehearse, after its checks."""

    arguments: list[str]
    """YAML files or names and `key=value` settings."""
    config: TrainConfig
    """The configuration that the arguments make."""
    device: Accelerator
    num_devices: int
    per_node: int
    """Devices in a node."""


class Outcome(NamedTuple):
    """Result of a rehearsal, whether it succeeded or not."""

    exit_code: int
    stderr: str
    """The rank's standard error."""
    measurements: dict[str, Any]
    """Measurements of `measure.py`, as far as the rehearsal came."""
    seconds: float
    """Time from the request to the result."""


class ForkServer:
    """A process that is ready to rehearse: `with ForkServer() as server: server.rehearse(...)`.

    All files are in `folder`, which is removed at the end. If this process is killed, its child notices, removes the
    folder and exits. (The fork server of llmfoundry_ops cannot be used: Linux kills it together with this process, so
    that folders would stay.)
    """

    def __enter__(self) -> "ForkServer":
        """Start the process. Sets `folder`."""
        self._temporary_folder = tempfile.TemporaryDirectory(prefix="rehearse-", ignore_cleanup_errors=True)
        self.folder = Path(self._temporary_folder.name)
        self._num_rehearsals = 0

        # Variables that hide some of this machine's devices do not concern the rehearsed ones.
        environment = {name: value for name, value in os.environ.items() if not name.endswith("_VISIBLE_DEVICES")}
        environment |= search_path()
        environment |= preload(build_library())
        # torch.compile would start processes, which would outlive a fork.
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "llmfoundry_planner.rehearse.child", str(os.getpid()), str(self.folder)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C interrupts this process only, which then ends the child
        )
        return self

    def __exit__(self, *error: Any) -> None:
        """Kill the process and its forks, and remove `folder`."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._temporary_folder.cleanup()

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
        """Rehearse one rank, wait until it ends, and return the outcome.

        num_batches: batches after which memory is measured.
        counts_operations: train one more batch, in which FLOPs and collectives are counted.
        spare_bytes: memory of the device that the run cannot have.
        """
        started_at = time.monotonic()
        self._num_rehearsals += 1
        folder = self.folder / str(self._num_rehearsals)
        folder.mkdir()
        environment = {
            **describe_device(device, per_node, cuda_release(), spare_bytes),
            **rank_variables(rank, num_devices, per_node),
            **rendezvous(),
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

        # The child answers with the exit code of the fork. Without an answer it has ended itself, and has printed the
        # reason on our standard error.
        assert self._process.stdin is not None and self._process.stdout is not None
        answer = ""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{folder}\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline().strip()
        exit_code = int(answer) if answer else self._process.wait() or EXIT_FAILURE

        stderr_file = folder / "stderr.txt"
        stderr = stderr_file.read_text(errors="replace") if stderr_file.is_file() else ""
        last_measurement = "collectives" if counts_operations else "allocated_bytes"
        return read_outcome(folder, exit_code, stderr, time.monotonic() - started_at, last_measurement)


def run_for_real(arguments: list[str]) -> Outcome:
    """Train and measure the same batches on this machine's own device, as a single rank. Operations are not counted."""
    started_at = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="measure-", ignore_cleanup_errors=True) as folder:
        write_request(
            Path(folder),
            arguments,
            {**rank_variables(0, 1), **rendezvous()},
            num_devices=1,
            per_node=1,
            num_batches=2,
            counts_operations=False,
        )
        process = subprocess.run(
            [sys.executable, "-P", "-m", "llmfoundry_planner.rehearse.child", folder],
            env={**os.environ, **search_path()},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        return read_outcome(Path(folder), process.returncode, process.stderr, time.monotonic() - started_at)


def write_request(folder: Path, arguments: list[str], environment: dict[str, str], **options: Any) -> None:
    """Write `request.json`, which `child.rehearse` reads.

    environment: variables to add to the child's. Compilers' caches in `folder` are added to them, so that each
    rehearsal compiles all of its kernels, and they can be counted.
    options: num_devices, per_node, num_batches and counts_operations, as in `ForkServer.rehearse`.
    """
    caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
    request = {"arguments": arguments, "environment": {**environment, **caches}, **options}
    (folder / "request.json").write_text(json.dumps(request))


def read_outcome(
    folder: Path, exit_code: int, stderr: str, seconds: float, last_measurement: str = "allocated_bytes"
) -> Outcome:
    """Return the outcome of a rehearsal that has ended, with the measurements of its `result.json`.

    exit_code: of the process; negative if a signal ended it, which becomes EXIT_FAILURE and a line of the error output.
    last_measurement: the one that is made last. If it is missing, the run was too short, which is the user's mistake.
    """
    if exit_code < 0:
        hint = "; this machine may be out of memory" if exit_code == -signal.SIGKILL else ""
        stderr += f"error: rehearse: the process was killed by {signal.Signals(-exit_code).name}{hint}\n"
        exit_code = EXIT_FAILURE

    result = folder / "result.json"
    measurements = json.loads(result.read_text()) if result.is_file() else {}
    if exit_code == EXIT_DONE and last_measurement not in measurements:
        exit_code = EXIT_USER
        stderr += TOO_SHORT
    return Outcome(exit_code, stderr, measurements, seconds)


def preload(library_folder: Path) -> dict[str, str]:
    """Return environment variables with which a process loads the library of `build_library` as CUDA.

    The process also needs the variables of `describe_device`, which say what device the library is.
    """
    libraries = [str(library_folder / NAME)]
    inherited = os.environ.get("LD_PRELOAD")
    if inherited:
        libraries.append(inherited)
    return {
        "LD_PRELOAD": " ".join(libraries),
        "TRITON_LIBCUDA_PATH": str(library_folder),
        "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC": "0",  # would ask NVIDIA's management library
    }


def cuda_release() -> int:
    """Return the release of CUDA that torch was built for, as CUDA counts it: 13000 for 13.0, 12060 for 12.6."""
    for package in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"):
        try:
            major, minor, *_ = importlib.metadata.version(package).split(".")
        except importlib.metadata.PackageNotFoundError:
            continue
        return int(major) * 1000 + int(minor) * 10
    return CUDA_RELEASE
