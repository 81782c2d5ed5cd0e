"""What is measured while a run runs: the data it saw, its speed, its memory, the time it still needs."""

import hashlib
import time
from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist
from composer.core import Callback, State
from composer.loggers import Logger

from llmfoundry_lite import devices
from llmfoundry_lite.config.layout import Coordinates, DataRanks
from llmfoundry_lite.config.schema import Duration
from llmfoundry_lite.data.loader import format_digest
from llmfoundry_lite.training.adapter import LanguageModel
from llmfoundry_lite.training.agreement import Agreement
from llmfoundry_lite.training.gradients import GradientStep
from llmfoundry_lite.training.schedule import progress_of


class DataDigest(Callback):
    """`data/digest`: two runs that print the same ones saw the same data in the same batches."""

    def __init__(self, gradient_step: GradientStep, agreement: Agreement):
        self.gradient_step = gradient_step
        self.agreement = agreement

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Not before: a batch that several islands train may have to be divided again."""
        text = format_digest(self.agreement.current.digest)
        self.gradient_step.digest = text
        logger.log_metrics({"data/digest": text})  # pyright: ignore[reportArgumentType]


class DropoutSeed(Callback):
    """Dropout as a function of (seed, batch), and of the row: no generator's state needs to be saved.

    That of attention is drawn inside its kernels, by (seed, batch, rank). Ranks that divide layers among them then have
    the same seed (`parallel` tells their heads apart), stages and ranks with other tokens of a sequence another one.
    """

    def __init__(self, seed: int, model: LanguageModel, ranks: DataRanks, place: Coordinates, *, has_runs: bool):
        """`has_runs`: ranks of a tensor group have other tokens (sequence parallelism)."""
        self.seed = seed
        self.model = model
        self.ranks = ranks
        parts = {"": place.pipeline, "context ": place.context, "run ": place.tensor if has_runs else 0}
        self.part = "".join(f"/{name}{index}" for name, index in parts.items() if index)

    def batch_start(self, state: State, logger: Logger) -> None:
        batch = f"{self.seed}/{int(state.timestamp.batch)}"
        self.model.drop_seed = _number_of(batch) % (1 << 31)
        torch.manual_seed(_number_of(f"{batch}/{self.ranks.rank}{self.part}"))


def _number_of(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")


class RunMonitor(Callback):
    """Throughput, MFU, memory, elapsed and remaining time.

    Rates are of tokens really consumed over the wall-clock time between ends of batches, evaluation left out.
    """

    def __init__(
        self,
        window_size: int,
        flops_per_token: int,
        max_duration: Duration,
        compute_dtype: str,
        tokens_elsewhere: Callable[[], int] = lambda: 0,
    ):
        """`tokens_elsewhere`: how many of the run's tokens devices of other islands have trained."""
        self.tokens_elsewhere = tokens_elsewhere
        self.flops_per_token = flops_per_token
        self.max_duration = max_duration
        self.history: deque[tuple[int, int, float]] = deque(maxlen=window_size + 1)
        accelerator = devices.accelerator()
        self.peak_flops = accelerator.peak_flops(compute_dtype) if accelerator else None

    def fit_start(self, state: State, logger: Logger) -> None:
        self.launched_at = time.monotonic()
        self.first_progress = progress_of(state, self.max_duration)
        self.history.append(self._mark(state))
        if self.peak_flops is None and dist.get_rank() == 0 and devices.device_type() == "cuda":
            print(f"{devices.device_name()} is not in the table of accelerators: no MFU is reported", flush=True)

    def batch_end(self, state: State, logger: Logger) -> None:
        self.history.append(self._mark(state))
        tokens, tokens_here, seconds = (
            last - first for first, last in zip(self.history[0], self.history[-1], strict=True)
        )
        rate, rate_here = tokens / max(seconds, 1e-9), tokens_here / max(seconds, 1e-9)
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

    def _mark(self, state: State) -> tuple[int, int, float]:
        """Tokens of the run, those of them that were trained here, seconds."""
        tokens = int(state.timestamp.token)
        return tokens, tokens - self.tokens_elsewhere(), state.timestamp.total_wct.total_seconds()
