"""Callbacks of a batch: the seed of its dropout, its speed and memory, and torch's profiler."""

import hashlib
import time
from collections import deque
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from composer.core import Callback, State
from composer.loggers import Logger
from torch.profiler import ProfilerActivity, profile, schedule

from llmfoundry_lite import devices
from llmfoundry_lite.config.callbacks_schema import ProfilerConfig
from llmfoundry_lite.config.layout import Coordinates, DataRanks
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.training.adapter import LanguageModel
from llmfoundry_lite.training.partners import Partners
from llmfoundry_lite.training.schedule import progress_of


@dataclass(eq=False)
class DropoutSeed(Callback):
    """Dropout as a function of (seed, batch), and of the row: no generator's state needs to be saved.

    Attention draws its own inside kernels, by (seed, batch, rank). Ranks that divide layers then share a seed
    (`parallel` tells their heads apart); stages and ranks with other tokens of a sequence have different ones.
    """

    seed: int
    model: LanguageModel
    ranks: DataRanks
    place: Coordinates
    sequence_parallel: bool
    """The ranks of a tensor group have different tokens."""

    def batch_start(self, state: State, logger: Logger) -> None:
        batch = f"{self.seed}/{int(state.timestamp.batch)}"
        self.model.dropout_seed = _number_of(batch) % (1 << 31)
        place = self.place
        tensor = place.tensor if self.sequence_parallel else 0
        parts = {"": place.pipeline, "context ": place.context, "run ": tensor}  # the names are part of the seed
        part = "".join(f"/{name}{index}" for name, index in parts.items() if index)
        torch.manual_seed(_number_of(f"{batch}/{self.ranks.rank}{part}"))


def _number_of(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")


@dataclass(eq=False)
class RunMonitor(Callback):
    """Throughput, MFU, memory, elapsed and remaining time. Rates are of tokens really consumed over the wall-clock time
    between ends of batches, without evaluation."""

    window_size: int
    flops_per_token: int
    max_duration: Duration
    compute_dtype: str
    partners: Partners

    def __post_init__(self) -> None:
        self.history: deque[tuple[int, int, float]] = deque(maxlen=self.window_size + 1)
        """Tokens of the run, those of them that were trained here, seconds."""
        accelerator = devices.accelerator()
        self.peak_flops = accelerator.peak_flops(self.compute_dtype) if accelerator else None

    def fit_start(self, state: State, logger: Logger) -> None:
        self.launched_at = time.monotonic()
        self.first_progress = progress_of(state, self.max_duration)
        self._mark(state)
        if self.peak_flops is None and dist.get_rank() == 0 and devices.device_type() == "cuda":
            print(f"{devices.device_name()} is not in the table of accelerators: no MFU is reported", flush=True)

    def batch_end(self, state: State, logger: Logger) -> None:
        self._mark(state)
        tokens, here, seconds = (last - first for first, last in zip(self.history[0], self.history[-1], strict=True))
        rate, rate_here = tokens / max(seconds, 1e-9), here / max(seconds, 1e-9)
        world_size = dist.get_world_size()
        metrics = {
            "throughput/tokens_per_sec": rate,
            "throughput/device/tokens_per_sec": rate_here / world_size,
            "throughput/device/flops_per_sec": rate_here * self.flops_per_token / world_size,
            "memory/peak_bytes": devices.peak_memory_bytes(),
            "time/batch_seconds": self.history[-1][-1] - self.history[-2][-1],
            "time/elapsed_seconds": time.monotonic() - self.launched_at,
        }
        if self.peak_flops is not None:
            metrics["throughput/device/mfu"] = rate_here * self.flops_per_token / world_size / self.peak_flops
        progress = progress_of(state, self.max_duration)
        if progress > self.first_progress:
            remaining = metrics["time/elapsed_seconds"] * (1 - progress) / (progress - self.first_progress)
            metrics["time/remaining_seconds"] = max(0.0, remaining)
        logger.log_metrics(metrics)

    def _mark(self, state: State) -> None:
        tokens = int(state.timestamp.token)
        here = tokens - self.partners.tokens_elsewhere
        self.history.append((tokens, here, state.timestamp.total_wct.total_seconds()))


class Profiler(Callback):
    """torch's profiler over a few batches: a trace for chrome://tracing or Perfetto. A batch is traced from the end of
    the one before it to its own: evaluation and saves in between included."""

    def __init__(self, config: ProfilerConfig, run_folder: Path):
        self.config = config
        self.folder = Path(config.folder) if config.folder is not None else run_folder / "traces"
        self.profile: profile | None = None

    def fit_start(self, state: State, logger: Logger) -> None:
        options = asdict(self.config)
        del options["folder"]
        if not options.pop("all_ranks") and dist.get_rank() != 0:
            return
        is_cuda = devices.device_type() == "cuda"
        names = ("record_shapes", "profile_memory", "with_stack")
        self.profile = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])],
            on_trace_ready=partial(self._write, state),
            **{name: options.pop(name) for name in names},
            schedule=schedule(**options),
        )
        self.profile.start()

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        if self.profile is not None:
            self.profile.step()

    def fit_end(self, state: State, logger: Logger) -> None:
        self.close(state, logger)

    def close(self, state: State, logger: Logger) -> None:
        if self.profile is not None:
            profile, self.profile = self.profile, None
            profile.stop()

    def _write(self, state: State, profile: profile) -> None:
        """Write a file named for its rank and the last batch in it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"rank{dist.get_rank()}.ba{int(state.timestamp.batch)}.json"
        path.unlink(missing_ok=True)  # a link would be written through
        profile.export_chrome_trace(str(path))
        if dist.get_rank() == 0:
            print(f"profiler: {path}; `llmfoundry-lite bench profile {path}` says where the time went", flush=True)
