"""Emulated clusters of the switch benchmark, and launches on them: the real launcher, an overlay each.

A cluster is a way to compute one and the same run: ranks, sharding, microbatch, attention, precision of the
communication, instruction set, interpreter. What differs is what its overlay says. One machine can have several; an
instruction set below the machine's own stands for another vendor, and is called emulated wherever it is shown.
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
"""Variables that hold torch's own kernels and oneDNN's to an instruction set."""
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}

PROBE = """
import json, torch
from llmfoundry_lite import devices
isa = torch.backends.cpu.get_cpu_capability() if devices.device_type() == "cpu" else ""
print(json.dumps({"torch": torch.__version__, "device": devices.device_name(), "isa": isa}))
"""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    letter: str
    num_ranks: int
    overlay: dict[str, Any]
    """A hardware overlay, as in yamls/hardware."""
    python: str = sys.executable

    @property
    def environment(self) -> dict[str, str]:
        return self.overlay.get("environment", {})


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts that torch reports of a cluster."""

    torch: str
    device: str
    isa: str


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch, from its command to its end."""

    cluster: str
    first_batch: int
    last_batch: int
    seconds_to_restore: float | None = None
    """From the command to the line that names the checkpoint it carries on from; None without one."""
    seconds_to_first_batch: float | None = None
    """None for a relay's allocations, whose output is not watched."""
    seconds: float
    exit_code: int | None


@dataclass(frozen=True, kw_only=True)
class Workshop:
    """A folder with the run's YAML and a hardware overlay for each cluster, in which launches happen."""

    folder: Path
    config: dict[str, Any] = field(repr=False)
    clusters: Sequence[Cluster]

    def prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "run.yaml").write_text(yaml.safe_dump(self.config, sort_keys=False))
        for cluster in self.clusters:
            overlay = {"overlay": "hardware", **cluster.overlay}
            (self.folder / f"{cluster.letter}.yaml").write_text(yaml.safe_dump(overlay, sort_keys=False))

    def run_folder(self, name: str) -> Path:
        return self.folder / "runs" / name

    def records(self, name: str) -> dict[int, dict[str, Any]]:
        """Return the last record of each batch."""
        return Log(self.run_folder(name) / "metrics.jsonl").last_of_each_batch()

    def launch(self, name: str, cluster: Cluster, *arguments: str) -> Launch:
        """`llmfoundry-lite train -n … run.yaml <cluster>.yaml run_name=<name> …`, to its end.

        Raises UserError with the end of its output when it does not end well.
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
            code = process.wait()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        # A launcher's code may be its own affair; status.json is what scripts are to read.
        status = self.run_folder(name) / "status.json"
        ended = json.loads(status.read_text())["status"] if status.exists() else "nothing"
        if ended not in ("done", "stopped") or first_batch_at is None:
            raise UserError(f"{' '.join(command)}: exit code {code}\n{''.join(lines[-20:])}")
        return Launch(
            cluster=cluster.letter,
            first_batch=batches[0],
            last_batch=batches[-1],
            seconds_to_restore=restored_at - started if restored_at else None,
            seconds_to_first_batch=first_batch_at - started,
            seconds=time.monotonic() - started,
            exit_code=code,
        )

    def relay(self, name: str, every: int) -> list[Launch]:
        """`llmfoundry-lite relay <name>.yaml`: the same launches in turn, `every` batches each, to the run's end.

        Raises UserError with the end of its output when it does not end well.
        """
        sites = {}
        for cluster in self.clusters:
            hidden = [f"-u {variable}" for variable in sorted(os.environ.keys() - environment_for(cluster).keys())]
            shown = [f"{variable}={value}" for variable, value in cluster.environment.items()]
            launch = ["env", *hidden, *shown, *command_for(cluster, name, "{arguments}")]
            sites[cluster.letter] = {"launch": " ".join(launch)}
        relay = {"run": f"runs/{name}", "policy": {"every": f"{every}ba"}, "sites": sites}
        (self.folder / f"{name}.yaml").write_text(yaml.safe_dump(relay, sort_keys=False))
        command = [sys.executable, "-m", "llmfoundry_lite", "relay", f"{name}.yaml"]
        environment = with_root(WANDB_MODE="disabled")
        result = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)
        allocations = read_allocations(self.run_folder(name))
        if result.returncode != 0 or any(one.ended not in ("done", "stopped") for one in allocations):
            words = last_lines(result.stdout + result.stderr)
            raise UserError(f"{' '.join(command)}: exit code {result.returncode}\n{words}")
        return [
            Launch(
                cluster=one.site,
                first_batch=one.from_batch + 1,
                last_batch=one.to_batch or 0,
                seconds=(one.over or one.began) - one.began,
                exit_code=one.code,
            )
            for one in allocations
        ]


def command_for(cluster: Cluster, name: str, *arguments: str) -> list[str]:
    """Return the command of a launch. It imports torch once, whatever the number of ranks."""
    command = [cluster.python, "-m", "llmfoundry_lite", "train", "-n", str(cluster.num_ranks)]
    return [*command, "run.yaml", f"{cluster.letter}.yaml", f"run_name={name}", *arguments]


def probe(cluster: Cluster) -> Machine:
    """Ask torch, where the launches will ask it. Raises UserError when that interpreter cannot."""
    command = [cluster.python, "-c", PROBE]
    result = subprocess.run(
        command, env={**environment_for(cluster), **cluster.environment}, capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        last = (result.stderr.splitlines() or ["no output"])[-1]
        raise UserError(f"{cluster.python} cannot train: {last}; make an environment as docs/hardware.md says")
    return Machine(**json.loads(result.stdout.splitlines()[-1]))


def environment_for(cluster: Cluster) -> dict[str, str]:
    """The shell's, less what overlays set; the package's own folder for interpreters in which it is not installed."""
    names = {name for variables in (*INSTRUCTION_SETS.values(), NO_GPU) for name in variables}
    return {
        name: value
        for name, value in with_root(WANDB_MODE="disabled").items()
        if name not in cluster.environment and (name not in names or name in NO_GPU)
    }
