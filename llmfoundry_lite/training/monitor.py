"""Callbacks of a batch: the seed of its dropout, its speed and memory, and torch's profiler."""

import hashlib
import shlex
import time
from collections import deque
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from composer.core import Callback, State
from composer.loggers import Logger
from torch.profiler import ProfilerActivity, profile, schedule

from llmfoundry_lite import devices
from llmfoundry_lite.config.batch_schedule import PerBatch
from llmfoundry_lite.config.callbacks_schema import ProfilerConfig
from llmfoundry_lite.config.layout import Coordinates, DataRanks
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.training.adapter import LanguageModel
from llmfoundry_lite.training.launch_role import LaunchRole
from llmfoundry_lite.training.schedule import progress_of

MIN_SECONDS = 1e-9
"""Least time that a number of tokens is divided by."""


@dataclass(eq=False)
class DropoutSeed(Callback):
    """Makes dropout a function of seed, batch and sample, so that no random generator's state needs to be saved.

    Attention draws its own dropout inside kernels, from torch's generator, which is seeded by seed, batch and rank.
    Ranks that divide layers share that seed, and `parallel` tells their heads apart. Ranks of different pipeline
    stages, and ranks with different tokens of a sample, have different seeds.
    """

    seed: int
    model: LanguageModel
    ranks: DataRanks
    place: Coordinates
    """Where this rank is in the layout."""
    sequence_parallel: bool
    """The ranks of a tensor-parallel group have different tokens."""

    def batch_start(self, state: State, logger: Logger) -> None:
        """Seed this batch's dropout, on every rank, so that a restored run drops the same values.

        Sets `model.dropout_seed`, with which the model drops values of the residual stream by sample, and seeds torch's
        generator, from which attention draws. The first is the same on all ranks. The second differs between ranks that
        compute different values, because each draws for its own.
        """
        batch_name = f"{self.seed}/{int(state.timestamp.batch)}"
        self.model.dropout_seed = _hash_name(batch_name) % (1 << 31)

        # These names are hashed, so changing one would change the dropout of every run. Ranks that hold different heads
        # of the same samples (tensor parallelism) share a name, because `parallel` tells their heads apart.
        name = f"{batch_name}/{self.ranks.rank}"
        if self.place.pipeline:
            name += f"/{self.place.pipeline}"
        if self.place.context:
            name += f"/context {self.place.context}"
        if self.sequence_parallel and self.place.tensor:
            name += f"/run {self.place.tensor}"
        torch.manual_seed(_hash_name(name))


def _hash_name(name: str) -> int:
    """Return a number of 56 bits that is a function of `name`, the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")


class Progress(NamedTuple):
    """Tokens and time of a run by the end of a batch."""

    tokens: int
    """Tokens of the run."""
    tokens_here: int
    """Those of them that this launch has trained, and no other launch beside it."""
    seconds: float
    """Wall-clock time of the run as Composer counts it: without the evaluation of validation sets."""


@dataclass(eq=False)
class RunMonitor(Callback):
    """Logs throughput, MFU, memory, elapsed and remaining time.

    Rates are real tokens, without padding, over the wall-clock time between ends of batches, without the evaluation of
    validation sets.
    """

    window_size: int
    """Number of batches over which rates are averaged."""
    flops_per_token: PerBatch | None
    """Those of each batch, forward and backward; None for a model with a part of the user's own that does not say how
    many it needs."""
    max_duration: Duration
    compute_dtype: str
    """Precision in which matrices are multiplied, as the table of accelerators names it."""
    role: LaunchRole
    batch_sizes: PerBatch

    def __post_init__(self) -> None:
        """Find the device's peak rate, None if it is not in the table of accelerators."""
        self.history: deque[Progress] = deque(maxlen=self.window_size + 1)
        accelerator = devices.accelerator()
        self.peak_flops = accelerator.peak_flops(self.compute_dtype) if accelerator else None

    def fit_start(self, state: State, logger: Logger) -> None:
        """Start the clocks of rates and of the remaining time. Rank 0 prints if a GPU's peak rate is not known.

        Sets `launched_at` and `first_work`, and adds the point before the first batch to `history`.
        """
        self.launched_at = time.monotonic()
        self.first_work = self._measure_work(state)
        self.history.append(self._measure_progress(state))
        is_unknown_gpu = self.peak_flops is None and devices.device_type() == "cuda"
        if is_unknown_gpu and dist.get_rank() == 0:
            print(f"{devices.device_name()} is not in the table of accelerators: no MFU is reported", flush=True)
        if self.flops_per_token is None and dist.get_rank() == 0:
            print("no FLOPs and no MFU are reported: a part of your own has no flops_per_token", flush=True)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log the rates over the last `window_size` batches, and the run's elapsed and remaining time.

        Tokens per second of the whole run include those that other launches have trained. Rates of a device, and MFU,
        count the tokens of this launch alone, because they are divided by its number of devices. MFU is model FLOP/s
        over the device's peak; it is not logged for a device that is not in the table of accelerators.
        """
        # `history` has one more point than the window has batches.
        self.history.append(self._measure_progress(state))
        first, before, last = self.history[0], self.history[-2], self.history[-1]
        seconds = max(last.seconds - first.seconds, MIN_SECONDS)
        tokens_per_second_here = (last.tokens_here - first.tokens_here) / seconds
        world_size = dist.get_world_size()
        elapsed_seconds = time.monotonic() - self.launched_at
        metrics = {
            "throughput/tokens_per_sec": (last.tokens - first.tokens) / seconds,
            "throughput/device/tokens_per_sec": tokens_per_second_here / world_size,
            "memory/peak_bytes": devices.peak_memory_bytes(),
            "time/batch_seconds": last.seconds - before.seconds,
            "time/elapsed_seconds": elapsed_seconds,
        }
        if self.flops_per_token is not None:
            last_batch = int(state.timestamp.batch) - 1  # those before it in the window may have had other rows
            flops_per_device = tokens_per_second_here * self.flops_per_token.of(last_batch) / world_size
            metrics["throughput/device/flops_per_sec"] = flops_per_device
            if self.peak_flops is not None:
                metrics["throughput/device/mfu"] = flops_per_device / self.peak_flops

        # The rest takes as long, in proportion, as what this launch has trained.
        work = self._measure_work(state)
        if work > self.first_work:
            remaining_seconds = elapsed_seconds * (1 - work) / (work - self.first_work)
            metrics["time/remaining_seconds"] = max(0.0, remaining_seconds)
        logger.log_metrics(metrics)

    def _measure_work(self, state: State) -> float:
        """Return the fraction of the run's computing that is done: its progress, in which larger batches count more."""
        if self.max_duration.unit != "ba":
            return progress_of(state, self.max_duration)
        num_samples = self.batch_sizes.sum_before(int(state.timestamp.batch))
        return num_samples / self.batch_sizes.sum_before(int(self.max_duration.value))

    def _measure_progress(self, state: State) -> Progress:
        """Return what has been trained until now."""
        tokens = int(state.timestamp.token)
        return Progress(
            tokens=tokens,
            tokens_here=tokens - self.role.tokens_elsewhere,
            seconds=state.timestamp.total_wct.total_seconds(),
        )


class Profiler(Callback):
    """torch's profiler over a few batches, which writes traces for chrome://tracing or Perfetto.

    A batch is traced from the end of the one before it to its own end, with evaluation and saves in between.
    """

    def __init__(self, config: ProfilerConfig, run_folder: Path):
        """Prepare. `fit_start` starts the profiler. Traces go into the configured folder, or into that of the run."""
        self.config = config
        self.folder = Path(config.folder) if config.folder is not None else run_folder / "traces"
        self.profile: profile | None = None
        """None unless this rank is being traced."""

    def fit_start(self, state: State, logger: Logger) -> None:
        """Start torch's profiler on rank 0, or with `all_ranks` on each rank. Sets `profile`.

        It waits until the batches that the configuration's schedule names: `skip_first`, `wait`, `warmup`, `active` and
        `repeat`, as in `torch.profiler.schedule`.
        """
        if not self.config.all_ranks and dist.get_rank() != 0:
            return
        activities = [ProfilerActivity.CPU]  # what is traced
        if devices.device_type() == "cuda":
            activities.append(ProfilerActivity.CUDA)

        # The configuration has torch's names. Three options are of the profile, and the others of its schedule.
        schedule_options = asdict(self.config)
        del schedule_options["folder"], schedule_options["all_ranks"]
        profile_options = {
            name: schedule_options.pop(name) for name in ("record_shapes", "profile_memory", "with_stack")
        }
        self.profile = profile(
            activities=activities,
            on_trace_ready=partial(self._write, state),
            schedule=schedule(**schedule_options),
            **profile_options,
        )
        self.profile.start()

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Tell the profiler that a batch has ended. It writes a trace when its schedule says so."""
        if self.profile is not None:
            self.profile.step()

    def fit_end(self, state: State, logger: Logger) -> None:
        """Stop the profiler at the end of training."""
        self.close(state, logger)

    def close(self, state: State, logger: Logger) -> None:
        """Stop the profiler if it still runs, because training has ended with an error."""
        if self.profile is not None:
            running = self.profile
            self.profile = None
            running.stop()

    def _write(self, state: State, finished: profile) -> None:
        """Write the trace of a finished profile to a file that is named for this rank and its last batch.

        torch calls this when its schedule ends a trace. For example, rank 0 writes `rank0.ba12.json` if batch 12 is the
        last one that has ended, and prints where.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"rank{dist.get_rank()}.ba{int(state.timestamp.batch)}.json"
        path.unlink(missing_ok=True)  # a link would be written through
        finished.export_chrome_trace(str(path))
        if dist.get_rank() == 0:
            print(
                f"profiler: {path}; `llmfoundry-lite bench profile {shlex.quote(str(path))}` says where the time went",
                flush=True,
            )
