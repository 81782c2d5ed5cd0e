"""`callbacks: {profiler: ...}`: torch's profiler over a few batches, a trace for chrome://tracing or Perfetto.

Owns when it records and where the traces go. Leaves what a trace says to `llmfoundry-lite bench profile TRACE`.
"""

from functools import partial
from pathlib import Path

import torch.distributed as dist
from composer.core import Callback, State
from composer.loggers import Logger
from torch.profiler import ProfilerActivity, profile, schedule

from llmfoundry_lite import devices
from llmfoundry_lite.config.schema import ProfilerConfig


class Profiler(Callback):
    """A batch is traced from the end of the one before it to its own: evaluation and saves in between included."""

    def __init__(self, config: ProfilerConfig, run_folder: Path):
        self.config = config
        self.folder = Path(config.folder) if config.folder is not None else run_folder / "traces"
        self.is_on = config.all_ranks or dist.get_rank() == 0
        self.profile: profile | None = None

    def fit_start(self, state: State, logger: Logger) -> None:
        if not self.is_on:
            return
        config = self.config
        activities = [ProfilerActivity.CPU]
        if devices.device_type() == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self.profile = profile(
            activities=activities,
            schedule=schedule(
                skip_first=config.skip_first,
                wait=config.wait,
                warmup=config.warmup,
                active=config.active,
                repeat=config.repeat,
            ),
            on_trace_ready=partial(self._write, state),
            record_shapes=config.record_shapes,
            profile_memory=config.profile_memory,
            with_stack=config.with_stack,
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
        """Named for its rank and the last batch in it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"rank{dist.get_rank()}.ba{int(state.timestamp.batch)}.json"
        profile.export_chrome_trace(str(path))
        if dist.get_rank() == 0:
            print(f"profiler: {path}; `llmfoundry-lite bench profile {path}` says where the time went", flush=True)
