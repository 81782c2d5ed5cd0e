"""Emulated clusters of the switch and islands benchmarks, and launches of one run on them with the real launcher.

A cluster is one way to compute the same run: number of ranks, sharding, microbatch, attention, precision of the
communication, instruction set, interpreter. Its hardware overlay holds what distinguishes it from the others. One
machine can have several clusters. A cluster that is limited to an older instruction set stands for another vendor, and
is called emulated wherever it is shown.

A `Workshop` is the folder in which the launches happen; `Launch` says how one of them went.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks import Log, last_lines, with_root
from llmfoundry_lite.errors import UserError
from llmfoundry_ops.journal import read_allocations

INSTRUCTION_SETS = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "sse": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
}
"""Environment variables that limit torch's own kernels and oneDNN's to an instruction set."""
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
"""Environment variables that hide all GPUs from torch."""

# Program that prints what `Machine` holds. It runs in a cluster's interpreter and environment.
PROBE = """
import json, torch
from llmfoundry_lite import devices
isa = torch.backends.cpu.get_cpu_capability() if devices.device_type() == "cpu" else ""
print(json.dumps({"torch": torch.__version__, "device": devices.device_name(), "isa": isa}))
"""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """One way to compute the run: `num_ranks` processes of the interpreter `python`, configured by an overlay."""

    letter: str
    num_ranks: int
    overlay: dict[str, Any]
    """Keys that replace those of the run's YAML, as in yamls/hardware, and `environment`."""
    python: str = sys.executable

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that the overlay sets for the ranks."""
        return self.overlay.get("environment", {})


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What torch reports about itself and its device in a cluster's environment."""

    torch: str
    device: str
    isa: str
    """Instruction set that torch's CPU kernels use, such as "AVX512" or "DEFAULT"; empty on a GPU."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch, from its command to its end. Times are wall-clock seconds from the start of the command."""

    cluster: str
    first_batch: int
    last_batch: int
    seconds_to_restore: float | None = None
    """Until the line that names the checkpoint it continues from. None if it started without one."""
    seconds_to_first_batch: float | None = None
    """Until the line of its first batch. None for the allocations of a relay, whose output is not watched."""
    seconds: float
    exit_code: int | None


@dataclass(frozen=True, kw_only=True)
class Workshop:
    """A folder in which a run is launched: it has run.yaml, an overlay for each cluster, and runs/ with the run
    folders.

    All launches share the run's YAML and differ in their cluster's overlay, the run's name and further arguments.
    """

    folder: Path
    config: dict[str, Any] = field(repr=False)
    clusters: Sequence[Cluster]

    def prepare(self) -> None:
        """Create the folder and write the YAML files into it. Call this before the first launch."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "run.yaml").write_text(yaml.safe_dump(self.config, sort_keys=False))
        for cluster in self.clusters:
            overlay = {"overlay": "hardware", **cluster.overlay}
            (self.folder / f"{cluster.letter}.yaml").write_text(yaml.safe_dump(overlay, sort_keys=False))

    def run_folder(self, name: str) -> Path:
        """Return the folder of the run with this name. It exists once the run has been launched."""
        return self.folder / "runs" / name

    def records(self, name: str) -> dict[int, dict[str, Any]]:
        """Return batch number -> the newest record of the run's metrics."""
        return Log(self.run_folder(name) / "metrics.jsonl").last_of_each_batch()

    def launch(self, name: str, cluster: Cluster, *arguments: str) -> Launch:
        """Run `llmfoundry-lite train` on a cluster until it ends, and return how it went.

        The command is `train -n RANKS run.yaml CLUSTER.yaml run_name=NAME ARGUMENTS`. The times come from its output,
        which is read line by line. If this function is interrupted, the launcher and its ranks are killed.

        Raises UserError with the last lines of the output unless the run's status is done or stopped.
        """
        command = command_for(cluster, name, *arguments)
        batches: list[int] = []
        restored_at = first_batch_at = None
        lines = []
        started = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env={**environment_for(cluster), **cluster.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                if line.startswith("carrying on from"):
                    restored_at = time.monotonic()
                elif line.startswith("batch "):
                    first_batch_at = first_batch_at or time.monotonic()
                    batches.append(int(line.split()[1].split("/")[0]))
            exit_code = process.wait()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

        # Launchers give exit codes of their own, so the run's status.json decides whether it ended well.
        status_file = self.run_folder(name) / "status.json"
        run_status = json.loads(status_file.read_text())["status"] if status_file.exists() else "nothing"
        if run_status not in ("done", "stopped") or first_batch_at is None:
            raise UserError(f"{' '.join(command)}: exit code {exit_code}\n{''.join(lines[-20:])}")
        return Launch(
            cluster=cluster.letter,
            first_batch=batches[0],
            last_batch=batches[-1],
            seconds_to_restore=restored_at - started if restored_at else None,
            seconds_to_first_batch=first_batch_at - started,
            seconds=time.monotonic() - started,
            exit_code=exit_code,
        )

    def relay(self, name: str, every: int) -> list[Launch]:
        """Run `llmfoundry-lite relay`, which launches the run on each cluster in turn, `every` batches each, until its
        end.

        A relay starts each site's launch with a shell command. `env` gives that command the environment which `launch`
        would, because the relay runs in another one.

        Returns one Launch for each allocation. Raises UserError with the last lines of the output unless all
        allocations end well.
        """
        sites = {}
        for cluster in self.clusters:
            unset_variables = [
                f"-u {variable}" for variable in sorted(os.environ.keys() - environment_for(cluster).keys())
            ]
            set_variables = [f"{variable}={value}" for variable, value in cluster.environment.items()]
            # The relay replaces {arguments} by those of the allocation, such as the batch to stop after.
            launch_command = ["env", *unset_variables, *set_variables, *command_for(cluster, name, "{arguments}")]
            sites[cluster.letter] = {"launch": " ".join(launch_command)}
        relay_config = {"run": f"runs/{name}", "policy": {"every": f"{every}ba"}, "sites": sites}
        (self.folder / f"{name}.yaml").write_text(yaml.safe_dump(relay_config, sort_keys=False))

        command = [sys.executable, "-m", "llmfoundry_lite", "relay", f"{name}.yaml"]
        environment = with_root(WANDB_MODE="disabled")
        result = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)

        allocations = read_allocations(self.run_folder(name))
        if result.returncode != 0 or any(allocation.ended not in ("done", "stopped") for allocation in allocations):
            output = last_lines(result.stdout + result.stderr)
            raise UserError(f"{' '.join(command)}: exit code {result.returncode}\n{output}")
        return [
            Launch(
                cluster=allocation.site,
                first_batch=allocation.from_batch + 1,
                last_batch=allocation.to_batch or 0,
                seconds=(allocation.over or allocation.began) - allocation.began,
                exit_code=allocation.code,
            )
            for allocation in allocations
        ]


def command_for(cluster: Cluster, name: str, *arguments: str) -> list[str]:
    """Return the command that trains the run `name` on a cluster.

    `-n` makes one process start all ranks, so that torch is imported once, whatever the number of ranks.
    """
    command = [cluster.python, "-m", "llmfoundry_lite", "train", "-n", str(cluster.num_ranks)]
    return [*command, "run.yaml", f"{cluster.letter}.yaml", f"run_name={name}", *arguments]


def probe(cluster: Cluster) -> Machine:
    """Ask torch about itself and its device, with the interpreter and environment that the cluster's launches have.

    Raises UserError with the last line of stderr if that interpreter cannot import what is needed.
    """
    command = [cluster.python, "-c", PROBE]
    result = subprocess.run(
        command, env={**environment_for(cluster), **cluster.environment}, capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        last_line = (result.stderr.splitlines() or ["no output"])[-1]
        raise UserError(f"{cluster.python} cannot train: {last_line}; make an environment as docs/hardware.md says")
    return Machine(**json.loads(result.stdout.splitlines()[-1]))


def environment_for(cluster: Cluster) -> dict[str, str]:
    """Return this shell's environment without the variables that an overlay may set, so that no cluster inherits one.

    NO_GPU's variables stay unless this cluster sets them itself. The checkout is on PYTHONPATH, for interpreters in
    which the package is not installed.
    """
    overlay_variables = {name for variables in (*INSTRUCTION_SETS.values(), NO_GPU) for name in variables}
    return {
        name: value
        for name, value in with_root(WANDB_MODE="disabled").items()
        if name not in cluster.environment and (name not in overlay_variables or name in NO_GPU)
    }
