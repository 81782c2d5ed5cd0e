"""The numbers of a run in Prometheus' text format, by its client library. No torch.

`RunCollector` makes metrics of a run's state whenever Prometheus asks, and `serve` answers at a port.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from llmfoundry_lite.checkpoint.run_log import Record, number_of
from llmfoundry_ops.rank_times import RankTime

STATES = ("waiting", "running", "restarting", "done", "stopped", "preempted", "failed", "unknown")
"""States of a run. waiting: a launch has been started, and has not begun to train. restarting: the launcher starts
ranks again that have failed, or has not decided yet."""


@dataclass(frozen=True, slots=True)
class LoggedMetric:
    """A metric that is a number of the log."""

    key: str
    """Its key in metrics.jsonl."""
    text: str
    is_counter: bool = False
    """It only grows, so that Prometheus' `rate` applies. Its name ends with `_total`."""


LOGGED = {
    "llmfoundry_loss": LoggedMetric("loss/train/total", "Training loss of the newest batch."),
    "llmfoundry_learning_rate": LoggedMetric("lr", "Learning rate of the newest batch."),
    "llmfoundry_gradient_norm": LoggedMetric("grad_norm", "Norm of the gradient of the newest batch."),
    "llmfoundry_tokens": LoggedMetric("time/token", "Tokens that the run has trained.", is_counter=True),
    "llmfoundry_tokens_per_second": LoggedMetric(
        "throughput/tokens_per_sec", "Tokens trained per second, by all devices, over the last batches."
    ),
    "llmfoundry_mfu_ratio": LoggedMetric(
        "throughput/device/mfu", "Model FLOP/s over the peak of the device, from 0 to 1."
    ),
    "llmfoundry_device_memory_peak_bytes": LoggedMetric("memory/peak_bytes", "Peak memory of rank 0's device."),
    "llmfoundry_batch_duration_seconds": LoggedMetric("time/batch_seconds", "Time that the newest batch took."),
    "llmfoundry_remaining_seconds": LoggedMetric("time/remaining_seconds", "Time until the run is done, estimated."),
    "llmfoundry_save_duration_seconds": LoggedMetric(
        "checkpoint/durable_seconds", "Time from the beginning of the last save to its publication."
    ),
    "llmfoundry_save_stall_seconds": LoggedMetric(
        "checkpoint/stall_seconds", "Time for which training waited for the last save."
    ),
    "llmfoundry_save_size_bytes": LoggedMetric("checkpoint/bytes", "Bytes of the last save."),
}
"""Name of a metric, without the `_total` of counters -> where its number comes from. Those that the log lacks are left
out."""


@dataclass
class Numbers:
    """Facts about a run from which the metrics are made. The observer keeps them."""

    run_name: str
    run_folder: str
    host: str
    state: str = "waiting"
    """One of STATES."""
    launch: int | None = None
    batch: int = 0
    failed_saves: int = 0
    """Saves that have failed since the last one that did not."""
    saved_at: float | None = None
    """When the newest checkpoint was published, in seconds since 1970."""
    is_saved_in_second: bool = False
    """Whether it is in `save_fallback`, and not in `save_folder`."""
    idle_seconds: float = 0.0
    """Time since the newest batch."""
    logged: dict[str, float] = field(default_factory=dict)
    """Key of the log -> its newest number. What a save cost is only in the records of some batches, and stays."""
    validation: dict[str, float] = field(default_factory=dict)
    """Label of a validation set -> its newest loss."""
    rank_times: list[RankTime] | None = None
    """Times of the slowest ranks; None if no batch of this launch was measured."""
    num_slow_ranks: int = 0

    def take(self, record: Record) -> None:
        """Take the numbers of a record of the log."""
        for metric in LOGGED.values():
            number = number_of(record.get(metric.key))
            if number is not None:
                self.logged[metric.key] = number


class RunCollector(Collector):
    """Makes the metrics of a run. Each has the label `run`."""

    def __init__(self, numbers: Callable[[], Numbers]):
        """`numbers` returns the present ones. It is called by the server's thread."""
        self.numbers = numbers

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        numbers = self.numbers()

        def gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
            family = GaugeMetricFamily(name, text, labels=["run"])
            family.add_metric([numbers.run_name], value)
            return family

        info = InfoMetricFamily("llmfoundry_run", "The run, its folder, and the host of rank 0.", labels=["run"])
        info.add_metric([numbers.run_name], {"folder": numbers.run_folder, "host": numbers.host})
        yield info
        states = GaugeMetricFamily("llmfoundry_state", "1 for the present state of the run.", labels=["run", "state"])
        for state in STATES:
            states.add_metric([numbers.run_name, state], float(state == numbers.state))
        yield states

        yield gauge("llmfoundry_batch", "Number of batches that the run has trained.", numbers.batch)
        yield gauge("llmfoundry_idle_seconds", "Time since the newest batch.", numbers.idle_seconds)
        yield gauge(
            "llmfoundry_failed_saves", "Saves that have failed since the last one that did not.", numbers.failed_saves
        )
        in_second = float(numbers.is_saved_in_second)
        yield gauge("llmfoundry_save_in_fallback", "1 if the newest save is in save_fallback, else 0.", in_second)
        if numbers.launch is not None:
            yield gauge("llmfoundry_launch", "Number of the launch that trains the run.", numbers.launch)
        if numbers.saved_at is not None:
            age_seconds = max(0.0, time.time() - numbers.saved_at)
            yield gauge("llmfoundry_save_age_seconds", "Time since the newest checkpoint was published.", age_seconds)

        for name, metric in LOGGED.items():
            value = numbers.logged.get(metric.key)
            if value is None:
                continue
            if metric.is_counter:
                counter = CounterMetricFamily(name, metric.text, labels=["run"])
                counter.add_metric([numbers.run_name], value)
                yield counter
            else:
                yield gauge(name, metric.text, value)

        losses = GaugeMetricFamily(
            "llmfoundry_validation_loss", "Newest loss of a validation set.", labels=["run", "set"]
        )
        for label, loss in numbers.validation.items():
            losses.add_metric([numbers.run_name, label], loss)
        if numbers.validation:
            yield losses

        if numbers.rank_times is not None:
            yield from _rank_metrics(numbers.run_name, numbers.rank_times)
            yield gauge("llmfoundry_slow_ranks", "Number of ranks that are slow.", numbers.num_slow_ranks)


def _rank_metrics(run_name: str, times: list[RankTime]) -> Iterator[Metric]:
    """Yield the times of the slowest ranks in the newest batch that was measured, and the medians of their stages."""
    median = GaugeMetricFamily(
        "llmfoundry_rank_own_median_seconds",
        "Median, over the ranks of a pipeline stage, of the time that each needs by itself.",
        labels=["run", "stage"],
    )
    medians = {rank.stage: rank.median_seconds for rank in times}
    for stage, median_seconds in medians.items():
        median.add_metric([run_name, str(stage)], median_seconds)
    yield median

    labels = ["run", "rank", "host"]
    own = GaugeMetricFamily(
        "llmfoundry_rank_own_seconds", "Time that a rank needs by itself in a batch; the slowest ranks.", labels=labels
    )
    waiting = GaugeMetricFamily(
        "llmfoundry_rank_waiting_seconds", "Time for which a rank then waits for the slowest one.", labels=labels
    )
    for rank in times:
        own.add_metric([run_name, str(rank.rank), rank.host], rank.own_seconds)
        waiting.add_metric([run_name, str(rank.rank), rank.host], rank.waiting_seconds)
    yield own
    yield waiting


def serve(host: str, port: int, numbers: Callable[[], Numbers]) -> Any:
    """Answer Prometheus at a port, from threads of this process. Returns the server, which has `shutdown`.

    Raises OSError if the port is taken, or the address is not one of this machine.
    """
    registry = CollectorRegistry()
    registry.register(RunCollector(numbers))
    server, _ = start_http_server(port, addr=host, registry=registry)
    return server
