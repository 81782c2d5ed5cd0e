"""Measures, in one batch of every interval, the time that each rank needs by itself, and says which ranks are slow.

A slow rank cannot be found by how long a batch takes on it, because all ranks wait for the slowest one. So the parts of
a batch are measured in which a rank does not wait for others (`OwnTime`): the forward passes of the model's blocks, the
reading of the next batch, and the host's work between two collectives. Left out are

- the backward pass and the embeddings, because FSDP communicates in their midst; blocks wait for their parameters
  before their forward pass begins
- the optimizer, because Muon and ZERO_1 communicate in it
- evaluations and saves
- with tensor or context parallelism, the forward passes too, because their ranks wait for each other in every block

The ranks' times go into the sum that `Agreement` makes at the end of each batch: on measured batches its list has three
more numbers for each rank, of which every rank fills in its own. Other batches cost nothing.
"""

import socket
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from composer.core import Callback, State
from composer.loggers import Logger

from llmfoundry_lite import devices
from llmfoundry_lite.config.callbacks_schema import StragglersConfig
from llmfoundry_lite.config.layout import Layout
from llmfoundry_lite.errors import printable
from llmfoundry_lite.models.mpt import Block
from llmfoundry_lite.ranks.exchange import all_gather_distinct
from llmfoundry_lite.ranks.output import say
from llmfoundry_lite.training.agreement import Agreement
from llmfoundry_lite.training.run_folder import RunFolder
from llmfoundry_lite.training.slow_ranks import SLOW_RANK, OwnTime, SlowRanks, metrics_of

MICROSECONDS = 1_000_000
"""In a second. The sum over ranks is one of integers."""


@dataclass(eq=False)
class RankTimes(Callback):
    """Measures this rank's own time in some batches, and on rank 0 names the ranks that are slow.

    Composer must call it before all other callbacks, so that their time is in it.
    """

    config: StragglersConfig
    layout: Layout
    blocks: list[Block]
    """This rank's blocks whose forward passes are measured; none if ranks wait for each other in them."""
    agreement: Agreement
    run_folder: RunFolder
    slow_ranks: SlowRanks | None = None
    """On rank 0, from `fit_start` on."""
    _first_batch: int = 0
    """The first batch of this launch, which is not measured: kernels are compiled and memory is reserved in it."""
    _is_measuring: bool = False
    """The present batch is measured. The same on all ranks."""
    _hooks: list[Any] = field(default_factory=list)
    """Handles of the hooks on blocks, while there are any."""
    _marks: list[Any] = field(default_factory=list)
    """Beginnings and ends of forward passes, in turn: CUDA events, or seconds of the clock."""
    _began_at: float = 0.0
    """Time at which the batch began."""
    _forward_began_at: float | None = None
    """Time at which the batch's first forward pass began; None before."""
    _ended_at: float = 0.0
    """Time at which Composer had counted the batch."""

    def __post_init__(self) -> None:
        """Let the ranks' times take part in the sum at the end of a batch."""
        self.agreement.take_own_times = self.take
        self._hook: Any = torch.compiler.disable(self._mark)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Tell rank 0 the hosts of all ranks. Collective."""
        self._first_batch = int(state.timestamp.batch) + 1
        hosts = [""] * self.layout.world_size
        for host, ranks in all_gather_distinct(socket.gethostname()):
            for rank in ranks:
                hosts[rank] = host

        # Only rank 0 compares.
        if dist.get_rank() == 0:
            stages = [self.layout.coordinates(rank).pipeline for rank in range(self.layout.world_size)]
            self.slow_ranks = SlowRanks(hosts, stages, threshold=self.config.threshold, num_reports=self.config.reports)

    # ------------------------------------------------------------------------------------------------- measuring

    def batch_start(self, state: State, logger: Logger) -> None:
        """Begin to measure if it is time to, on all ranks alike."""
        batch = int(state.timestamp.batch) + 1
        is_due = batch % int(self.config.interval.value) == 0
        self._is_measuring = is_due and batch > self._first_batch
        if not self._is_measuring:
            return
        self._marks = []
        self._forward_began_at = None
        for block in self.blocks:
            # Between FSDP's hooks: its own comes first, and waits for the block's parameters.
            self._hooks.append(block.register_forward_pre_hook(self._hook))
            self._hooks.append(block.register_forward_hook(self._hook, prepend=True))
        self._began_at = time.perf_counter()

    def before_forward(self, state: State, logger: Logger) -> None:
        """Note that this rank's first forward pass begins."""
        if self._is_measuring and self._forward_began_at is None:
            self._forward_began_at = time.perf_counter()

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Remove the hooks. Forward passes of an evaluation are not measured."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def batch_end(self, state: State, logger: Logger) -> None:
        """Note that the callbacks of a batch's end begin."""
        self._ended_at = time.perf_counter()

    def _mark(self, *arguments: Any) -> None:
        """Note the time before or after a forward pass of a block, on the device if that runs by itself."""
        if devices.device_type() != "cuda":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def take(self) -> list[int]:
        """Return this batch's own time of this rank in the places of all ranks; nothing if it was not measured.

        Rank 1 of 3 returns [0, 0, 0, forward, data, host, 0, 0, 0], in microseconds. The device has finished the
        forward passes, because the host has read the gradient's norm since then.
        """
        if not self._is_measuring:
            return []
        self._is_measuring = False
        assert self._forward_began_at is not None
        host_seconds = self._forward_began_at - self._began_at + self.agreement.arrived_at - self._ended_at
        own = OwnTime(forward=self._forward_seconds(), data=self.agreement.read_seconds, host=host_seconds)

        microseconds = [0] * (len(own) * self.layout.world_size)
        begin = len(own) * dist.get_rank()
        microseconds[begin : begin + len(own)] = [round(MICROSECONDS * seconds) for seconds in own]
        return microseconds

    def _forward_seconds(self) -> float:
        """Return the time of all forward passes that were marked."""
        pairs = zip(self._marks[::2], self._marks[1::2], strict=True)
        if devices.device_type() != "cuda":
            return sum(end - begin for begin, end in pairs)
        return sum(begin.elapsed_time(end) for begin, end in pairs) / 1000  # of milliseconds

    # ------------------------------------------------------------------------------------------------- comparing

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Compare the ranks on rank 0, if this batch was measured. Logs, prints and records in status.json."""
        gathered = self.agreement.own_times
        if not gathered or self.slow_ranks is None:
            return
        num_parts = len(OwnTime._fields)
        own_times = []
        for begin in range(0, len(gathered), num_parts):
            parts = gathered[begin : begin + num_parts]
            own_times.append(OwnTime(*(part / MICROSECONDS for part in parts)))

        batch = int(state.timestamp.batch)
        slowest_read_seconds = max(own.data for own in own_times)
        batch_seconds = self.agreement.arrived_at - self._began_at + slowest_read_seconds
        reports = self.slow_ranks.compare(own_times)
        news = self.slow_ranks.note_reports(batch, reports, batch_seconds)
        for text, event in news:
            level = "warning" if event == SLOW_RANK else "info"
            say(printable(text), event, {"level": level})
        logger.log_metrics(metrics_of(reports[0]))
        self.run_folder.note_ranks(self.slow_ranks.facts(batch, reports), is_news=bool(news))
