"""LLM Foundry's `hf_checkpointer` and `generate_callback`: jobs for published checkpoints, beside the training.

Rank 0 starts a process that reads the checkpoint's files on the CPU, and checks after each batch whether it has ended.
One job runs at a time. Checkpoints that wait for theirs are not removed. The process ends with rank 0.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
from composer.core import Callback, State
from composer.loggers import Logger

from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.convert.huggingface import describe_export_problem
from llmfoundry_lite.errors import ConfigError, printable
from llmfoundry_lite.ranks.rank import rank_variables
from llmfoundry_lite.training.checkpointing import Checkpointing
from llmfoundry_lite.training.schedule import has_passed
from llmfoundry_ops.processes import JOB

GENERATIONS = "generations.jsonl"
MAX_WAITING = 3
"""Checkpoints that wait to be read, and are kept for it. Further ones are passed over, in one line."""
NICENESS = 10
"""Niceness of the process, so that the training's ranks go first on shared cores."""
DTYPES = {"float32": "fp32", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A function of `one_checkpoint`, its arguments, and the lines that report its end."""

    name: str
    """Name of the checkpoint."""
    function: str
    arguments: dict[str, Any]
    done: str
    missed: str
    """Beginning of the line that reports a failure; its reason follows."""
    remedy: str


class AfterSaves(Callback):
    """Runs a job for the first checkpoint published at or after each multiple of `interval`, and for the run's last."""

    def __init__(self, interval: Duration, checkpointing: Checkpointing, job_of: Callable[[str, str], Job]):
        self.span = interval
        self.checkpointing = checkpointing
        self.job_of = job_of
        """Name and URL of a checkpoint -> its job."""
        self.due: list[int] = []
        """Batches that are multiples of the interval, and have no job yet."""
        self.last_batch = -1
        """Batch of the newest checkpoint that has a job."""
        self.jobs: list[Job] = []
        """The first one runs, the others wait."""
        self.child: subprocess.Popen | None = None

    def after_load(self, state: State, logger: Logger) -> None:
        self.last_batch = self.checkpointing.published_batch

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        if dist.get_rank() != 0:
            return
        if has_passed(state, self.span):
            self.due.append(int(state.timestamp.batch))
        if self.due and self.checkpointing.published_batch >= self.due[0]:
            self._add()
        self._advance()

    def close(self, state: State, logger: Logger) -> None:
        """Wait for the last job, or give up if this launch leaves early."""
        if dist.get_rank() != 0:
            return
        there = self.checkpointing
        is_over = there.policy.stop_reason or not (there.was_stopped or there.was_preempted_by)
        if there.published_batch > self.last_batch and (self.due or is_over):
            self._add(max_waiting=len(self.jobs))
        if there.was_preempted_by:
            if self.child is not None:
                self.child.kill()
                self.child.wait()
            for job in self.jobs:
                self._tell(job, "this launch leaves")
            return
        if self.jobs:
            names = ", ".join(job.name for job in self.jobs)
            print(printable(f"waiting for {self.jobs[0].function} of {names}"), flush=True)
        while self.jobs:
            self._advance(wait=True)
        if there.saver.lease is not None:
            there.remove_old(there.saver.lease)  # checkpoints that were kept for their jobs

    def _add(self, max_waiting: int = MAX_WAITING) -> None:
        """Queue a job for the newest checkpoint, or report that too many wait."""
        self.last_batch = self.checkpointing.published_batch
        self.due = [batch for batch in self.due if batch > self.last_batch]
        name = f"ba{self.last_batch}"
        job = self.job_of(name, f"{self.checkpointing.store.root.url}/{name}")
        if len(self.jobs) > max_waiting:
            self._tell(job, f"{self.jobs[0].name} is still being read")
            return
        self.checkpointing.in_use.add(name)
        self.jobs.append(job)

    def _advance(self, *, wait: bool = False) -> None:
        """Report how the process has ended, if it has (`wait`: once it has), and start the next one."""
        if self.child is not None and (wait or self.child.poll() is not None):
            code, child, self.child, job = self.child.wait(), self.child, None, self.jobs.pop(0)
            assert child.stdin is not None
            child.stdin.close()
            self.output.seek(0)
            said = [line for line in self.output.read().split("\n") if line]
            self.output.close()
            self.checkpointing.in_use.discard(job.name)
            self._tell(job, "" if code == 0 else said[-1] if said else f"its process ended with {code}")
        if self.child is None and self.jobs:
            self._start(self.jobs[0])

    def _start(self, job: Job) -> None:
        environment = {key: value for key, value in os.environ.items() if key not in rank_variables(0, 1)}
        environment |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
        # Not as arguments, which every user of the machine can read: a URL may have credentials.
        environment[JOB] = json.dumps([job.function, job.arguments])
        code = f"import sys; sys.path[:] = {sys.path!r}; from llmfoundry_ops.one_checkpoint import main; main()"
        self.output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with its process
        self.child = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.PIPE,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        os.setpriority(os.PRIO_PROCESS, self.child.pid, NICENESS)

    def _tell(self, job: Job, why: str) -> None:
        """Print that a job is done, or why it is not and what makes up for it."""
        print(printable(f"{job.missed}: {why}; {job.remedy}" if why else job.done), flush=True)


def build_hf_checkpointer(config: TrainConfig, checkpointing: Checkpointing) -> AfterSaves:
    block = config.callbacks.hf_checkpointer
    assert block is not None
    target = (block.save_folder or config.checkpoint_folder).rstrip("/")
    dtype, reason = DTYPES[block.precision], describe_export_problem(config.model)
    if reason is not None:
        raise ConfigError(f"callbacks.hf_checkpointer: {reason}; or remove it")

    def job_of(name: str, url: str) -> Job:
        folder = f"{target}/huggingface/{name}"
        tokenizer = None if checkpointing.start.fingerprints else "none"
        return Job(
            name=name,
            function="export",
            arguments={"url": url, "folder": folder, "dtype": dtype, "tokenizer": tokenizer},
            done=f"exported {name} to {folder}",
            missed=f"{name} was not exported",
            remedy=f"`llmfoundry-lite checkpoint export {url} OUT` makes up for it",
        )

    return AfterSaves(block.save_interval, checkpointing, job_of)


def build_generate(config: TrainConfig, checkpointing: Checkpointing) -> AfterSaves:
    block, out = config.callbacks.generate_callback, f"{config.run_folder}/{GENERATIONS}"
    assert block is not None
    options = asdict(block)
    del options["interval"]
    if not options.pop("do_sample"):
        options["temperature"] = 0.0

    def job_of(name: str, url: str) -> Job:
        return Job(
            name=name,
            function="generate",
            arguments={"url": url, "out": out, "batch": int(name[2:]), "tokenizer": config.tokenizer.name, **options},
            done=f"texts of {name} are in {out}",
            missed=f"no texts of {name}",
            remedy=f"`llmfoundry-lite generate {url}` writes some",
        )

    return AfterSaves(block.interval, checkpointing, job_of)
