"""LLM Foundry's `hf_checkpointer` and `generate_callback`: jobs that read published checkpoints beside the training.

`JobsAfterSaves` is the callback of both. Rank 0 starts a process (`one_checkpoint.py`) that reads the checkpoint's
files on the CPU, and checks after each batch whether it has ended. One job runs at a time. Checkpoints that wait for
their job are not removed. The process ends with rank 0.
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
"""Number of checkpoints that wait to be read, and are kept for it. Further ones get no job, which a line reports."""
NICENESS = 10
"""Niceness of the process, so that the training's ranks go first on shared cores."""
DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
"""LLM Foundry's name of a dtype -> the name that `checkpoint export` takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A function of `one_checkpoint`, its arguments, and the lines that report its end."""

    name: str
    """Name of the checkpoint."""
    function: str
    """`export` or `generate`."""
    arguments: dict[str, Any]
    done: str
    """The line that reports success."""
    missed: str
    """Beginning of the line that reports a failure; its reason follows."""
    remedy: str
    """End of that line: what the user can do instead."""


class JobsAfterSaves(Callback):
    """Runs a job for the first checkpoint published at or after each multiple of `interval`, and for the run's last.

    Only rank 0 has jobs. On the other ranks, the callback does nothing.
    """

    def __init__(self, interval: Duration, checkpointing: Checkpointing, job_of: Callable[[str, str], Job]):
        self.interval = interval
        self.checkpointing = checkpointing
        self.job_of = job_of
        """Function that returns the job of a checkpoint, from its name and URL."""
        self.due: list[int] = []
        """Batches that are multiples of the interval, and have no job yet."""
        self.last_batch = -1
        """Batch of the newest checkpoint that has, or could have had, a job."""
        self.jobs: list[Job] = []
        """The first one runs, the others wait."""
        self.process: subprocess.Popen | None = None
        """The process of the first job."""

    def after_load(self, state: State, logger: Logger) -> None:
        """Leave out the checkpoint from which the run resumes: it belongs to an earlier launch."""
        self.last_batch = self.checkpointing.published_batch

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Queue a job if a checkpoint is due and published, and see whether the running one has ended."""
        if dist.get_rank() != 0:
            return
        if has_passed(state, self.interval):
            self.due.append(int(state.timestamp.batch))
        if self.due and self.checkpointing.published_batch >= self.due[0]:
            self._add()
        self._advance()

    def close(self, state: State, logger: Logger) -> None:
        """Wait for the jobs that are left, or kill the running one if this launch was preempted."""
        if dist.get_rank() != 0:
            return
        checkpointing = self.checkpointing

        # A finished run's last checkpoint gets a job, whether or not it is due.
        was_interrupted = checkpointing.was_stopped or checkpointing.was_preempted_by
        is_run_over = checkpointing.policy.stop_reason or not was_interrupted
        if checkpointing.published_batch > self.last_batch and (self.due or is_run_over):
            self._add(max_waiting=len(self.jobs))

        if checkpointing.was_preempted_by:
            if self.process is not None:
                self.process.kill()
                self.process.wait()
            for job in self.jobs:
                self._report(job, "this launch leaves")
            return

        if self.jobs:
            names = ", ".join(job.name for job in self.jobs)
            print(printable(f"waiting for {self.jobs[0].function} of {names}"), flush=True)
        while self.jobs:
            self._advance(wait=True)
        saver = checkpointing.saver
        if saver.lease is not None:
            checkpointing.after_save.remove_kept(saver.lease, first_answers=saver.first_answers)

    def _add(self, max_waiting: int = MAX_WAITING) -> None:
        """Queue a job for the newest checkpoint, or report that more than `max_waiting` jobs are there already.

        Also marks the checkpoint as in use, so that it is kept, and all multiples of the interval up to it as done.
        """
        self.last_batch = self.checkpointing.published_batch
        self.due = [batch for batch in self.due if batch > self.last_batch]
        name = f"ba{self.last_batch}"
        job = self.job_of(name, str(self.checkpointing.newest_url))
        if len(self.jobs) > max_waiting:
            self._report(job, f"{self.jobs[0].name} is still being read")
            return
        self.checkpointing.in_use.add(name)
        self.jobs.append(job)

    def _advance(self, *, wait: bool = False) -> None:
        """Report the end of the running job, if it has ended, and start the next one. With `wait`, wait for the end."""
        if self.process is not None and (wait or self.process.poll() is not None):
            self._finish(self.process)
        if self.process is None and self.jobs:
            self._start(self.jobs[0])

    def _finish(self, process: subprocess.Popen) -> None:
        """Wait for the end of the first job's process, take the job from the queue, and report how it ended."""
        exit_code = process.wait()
        self.process = None
        job = self.jobs.pop(0)
        assert process.stdin is not None
        process.stdin.close()
        self.output.seek(0)
        lines = [line for line in self.output.read().split("\n") if line]
        self.output.close()
        self.checkpointing.in_use.discard(job.name)

        # The last line of a process that fails is its reason.
        problem = ""
        if exit_code != 0:
            problem = lines[-1] if lines else f"its process ended with {exit_code}"
        self._report(job, problem)

    def _start(self, job: Job) -> None:
        """Start the process of a job, which sees no accelerator and none of the variables of a rank."""
        variables_of_rank = rank_variables(0, 1)
        environment = {key: value for key, value in os.environ.items() if key not in variables_of_rank}
        environment |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
        # Not as arguments, which every user of the machine can read: a URL may have credentials.
        environment[JOB] = json.dumps([job.function, job.arguments])
        code = f"import sys; sys.path[:] = {sys.path!r}; from llmfoundry_ops.one_checkpoint import main; main()"
        self.output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with its process
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.PIPE,  # never written: the process ends when rank 0 closes it, or is gone
            stdout=self.output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        os.setpriority(os.PRIO_PROCESS, self.process.pid, NICENESS)

    def _report(self, job: Job, problem: str) -> None:
        """Print that a job is done or, if there is a problem, why it is not and what the user can do instead."""
        line = f"{job.missed}: {problem}; {job.remedy}" if problem else job.done
        print(printable(line), flush=True)


def build_hf_checkpointer(config: TrainConfig, checkpointing: Checkpointing) -> JobsAfterSaves:
    """Build the callback that exports checkpoints as Hugging Face folders.

    Raises ConfigError if the model has no Hugging Face format.
    """
    block = config.callbacks.hf_checkpointer
    assert block is not None
    problem = describe_export_problem(config.model)
    if problem is not None:
        raise ConfigError(f"callbacks.hf_checkpointer: {problem}; or remove it")
    save_folder = (block.save_folder or config.checkpoint_folder).rstrip("/")
    dtype = DTYPES[block.precision]

    def job_of(name: str, url: str) -> Job:
        folder = f"{save_folder}/huggingface/{name}"
        # Without a fingerprint, the run has no tokenizer of its own to export.
        tokenizer = None if checkpointing.start.fingerprints else "none"
        return Job(
            name=name,
            function="export",
            arguments={"url": url, "folder": folder, "dtype": dtype, "tokenizer": tokenizer},
            done=f"exported {name} to {folder}",
            missed=f"{name} was not exported",
            remedy=f"`llmfoundry-lite checkpoint export {url} OUT` makes up for it",
        )

    return JobsAfterSaves(block.save_interval, checkpointing, job_of)


def build_generate(config: TrainConfig, checkpointing: Checkpointing) -> JobsAfterSaves:
    """Build the callback that generates texts with checkpoints, into GENERATIONS in the run folder."""
    block = config.callbacks.generate_callback
    assert block is not None
    out = f"{config.run_folder}/{GENERATIONS}"
    options = asdict(block)
    del options["interval"]
    if not options.pop("do_sample"):
        options["temperature"] = 0.0

    # The run's own checkpoints name the code that this launch trains, by its own configuration.
    has_own_parts = bool(config.model.own_parts)
    option = " --trust-code" if has_own_parts else ""

    def job_of(name: str, url: str) -> Job:
        batch = int(name.removeprefix("ba"))
        return Job(
            name=name,
            function="generate",
            arguments={
                "url": url,
                "out": out,
                "batch": batch,
                "tokenizer": config.tokenizer.name,
                "trust_code": has_own_parts,
                **options,
            },
            done=f"texts of {name} are in {out}",
            missed=f"no texts of {name}",
            remedy=f"`llmfoundry-lite generate {url}{option}` writes some",
        )

    return JobsAfterSaves(block.interval, checkpointing, job_of)
