"""Decides which ranks are slow, from the time that each rank needs by itself in a batch. No torch.

`rank_times.py` measures these times and gathers them. `SlowRanks` compares those of one batch with each other (a
report), and finds the ranks that are slow in several reports in a row.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

MIN_SHARE_OF_BATCH = 0.05
"""A rank is slow only if it needs this part of a batch's time more than others. A smaller part is not worth a node, and
times of a few milliseconds differ by chance."""
MAX_RANKS_LISTED = 16
"""Most ranks that status.json and the console describe. A launch may have thousands."""
PARTS = ("forward", "data", "host")
"""Parts of a rank's own time, as messages and metrics name them."""
CHECKS = {
    "forward": "check its device and other programs there (llmfoundry-lite doctor)",
    "data": "check the disk or network from which it reads the data",
    "host": "check other programs on its CPUs, and callbacks of your own",
}
"""Part that takes more time than on other ranks -> what to do about it."""
SLOW_RANK, RECOVERED = "slow_rank", "ranks_recovered"
"""Names of the events, as alerts have them."""


class OwnTime(NamedTuple):
    """Time that a rank needs by itself in one batch, without waiting for other ranks, in seconds."""

    forward: float
    """Forward passes of the model's blocks, of all microbatches."""
    data: float
    """Reading the next batch."""
    host: float
    """Callbacks, and dividing the batch into microbatches."""

    @property
    def total(self) -> float:
        """The sum of the parts."""
        return self.forward + self.data + self.host


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """The time of a rank in one batch, beside that of the ranks that it can be compared with."""

    rank: int
    host: str
    stage: int
    """Its pipeline stage. It is compared with the ranks that have the same one."""
    own: OwnTime
    median: OwnTime
    """The lower median of each part."""
    median_seconds: float
    """The lower median of the sums."""
    waiting_seconds: float
    """Time that the slowest of these ranks needs beyond this one's."""

    @property
    def ratio(self) -> float:
        """Multiple of the median that this rank needs."""
        return self.own.total / max(self.median_seconds, 1e-6)

    def as_json(self) -> dict[str, Any]:
        """Return what status.json has of this rank."""
        return {
            "rank": self.rank,
            "host": self.host,
            "stage": self.stage,
            "own_seconds": round(self.own.total, 6),
            "median_seconds": round(self.median_seconds, 6),
            "waiting_seconds": round(self.waiting_seconds, 6),
            "ratio": round(self.ratio, 3),
        }


class RankNews(NamedTuple):
    """A line to print about a rank."""

    text: str
    event: str
    """SLOW_RANK or RECOVERED."""


class SlowRanks:
    """Finds the ranks that are slow in several reports in a row. Rank 0 has one."""

    def __init__(self, hosts: Sequence[str], stages: Sequence[int], *, threshold: float, num_reports: int):
        """Begin without a report.

        hosts: the host of each rank.
        stages: the pipeline stage of each rank. Stages have different work, so a rank is compared within its own.
        threshold: multiple of the median above which a rank is slow.
        num_reports: reports in a row after which a rank is named, and after which it has recovered.
        """
        self.hosts = hosts
        self.stages = stages
        self.threshold = threshold
        self.num_reports = num_reports
        self.named: dict[int, RankReport] = {}
        """The ranks that are slow, each with its newest report."""
        self._lines: dict[int, str] = {}
        """Slow rank -> the line with which it was named."""
        self._named_at: dict[int, int] = {}
        """Slow rank -> batch of the report by which it was named."""
        self._first_slow_batch: dict[int, int] = {}
        """Rank -> first batch of its slow reports in a row."""
        self._num_slow: dict[int, int] = {}
        """Rank -> number of its slow reports in a row."""
        self._num_sound: dict[int, int] = {}
        """Slow rank -> number of its reports in a row that were not slow."""

    def compare(self, own_times: Sequence[OwnTime]) -> list[RankReport]:
        """Compare each rank with the others of its stage. Returns the ranks with the largest ratio first.

        A rank that is alone in its stage is left out.
        """
        ranks_by_stage: dict[int, list[int]] = {}
        for rank, stage in enumerate(self.stages):
            ranks_by_stage.setdefault(stage, []).append(rank)

        reports = []
        for stage, ranks in ranks_by_stage.items():
            if len(ranks) == 1:
                continue
            times = [own_times[rank] for rank in ranks]
            median = OwnTime(*map(statistics.median_low, zip(*times, strict=True)))
            median_seconds = statistics.median_low(time.total for time in times)
            longest_seconds = max(time.total for time in times)
            for rank in ranks:
                report = RankReport(
                    rank=rank,
                    host=self.hosts[rank],
                    stage=stage,
                    own=own_times[rank],
                    median=median,
                    median_seconds=median_seconds,
                    waiting_seconds=longest_seconds - own_times[rank].total,
                )
                reports.append(report)
        return sorted(reports, key=lambda report: report.ratio, reverse=True)

    def note_reports(self, batch: int, reports: Sequence[RankReport], batch_seconds: float) -> list[RankNews]:
        """Take the reports of a batch, and return what to print about ranks that have become slow, or have recovered.

        `batch_seconds` is the time that the batch took. Changes `named`.
        """
        became_slow = []
        recovered = []
        for report in reports:
            rank = report.rank
            excess_seconds = report.own.total - report.median_seconds
            is_slow = report.ratio > self.threshold and excess_seconds > MIN_SHARE_OF_BATCH * batch_seconds
            if is_slow:
                self._first_slow_batch.setdefault(rank, batch)
                self._num_slow[rank] = self._num_slow.get(rank, 0) + 1
                self._num_sound.pop(rank, None)
            else:
                self._first_slow_batch.pop(rank, None)
                self._num_slow.pop(rank, None)

            if rank in self.named:
                self.named[rank] = report
                if not is_slow:
                    self._num_sound[rank] = self._num_sound.get(rank, 0) + 1
                if self._num_sound.get(rank, 0) >= self.num_reports:
                    del self.named[rank], self._lines[rank], self._named_at[rank], self._num_sound[rank]
                    recovered.append(report)
            elif self._num_slow.get(rank, 0) >= self.num_reports:
                self.named[rank] = report
                self._lines[rank] = self._describe_slow(report)
                self._named_at[rank] = batch
                became_slow.append(report)

        news = [RankNews(self._lines[report.rank], SLOW_RANK) for report in became_slow[:MAX_RANKS_LISTED]]
        news += [RankNews(_describe_recovered(report), RECOVERED) for report in recovered[:MAX_RANKS_LISTED]]
        if len(became_slow) > MAX_RANKS_LISTED:
            news.append(RankNews(f"{len(became_slow) - MAX_RANKS_LISTED} more ranks are slow", SLOW_RANK))
        if len(recovered) > MAX_RANKS_LISTED:
            news.append(RankNews(f"{len(recovered) - MAX_RANKS_LISTED} more ranks are no longer slow", RECOVERED))
        return news

    def _describe_slow(self, report: RankReport) -> str:
        """Return a line about a slow rank: how slow, in which part, since when, and what to do next."""
        own, median = report.own, report.median
        excesses = [own_part - median_part for own_part, median_part in zip(own, median, strict=True)]
        slowest_part = PARTS[excesses.index(max(excesses))]
        next_step = CHECKS[slowest_part]
        if len({*self.hosts}) > 1:
            next_step += (
                f"; to leave the node out, run the same command again without it (srun --exclude={report.host})"
            )

        parts = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in zip(PARTS, own, strict=True))
        reports = "1 report" if self.num_reports == 1 else f"{self.num_reports} reports"
        since = f"in {reports} since batch {self._first_slow_batch[report.rank]}"
        return (
            f"rank {report.rank} on {report.host} is slow: {_describe_ratio(report, parts)} {since}; next: {next_step}"
        )

    def facts(self, batch: int, reports: Sequence[RankReport]) -> dict[str, Any]:
        """Return what status.json has of a report: the times of the slowest ranks, and the ranks that are slow.

        {"rank_times": {"batch": 900, "ranks": [{"rank": 5, "host": "gpu007", "own_seconds": 0.412, …}, …]},
         "slow_ranks": [{"rank": 5, "host": "gpu007", …, "text": "rank 5 on gpu007 is slow: …"}],
         "all_slow_ranks": [5]}

        The slow ranks that were named last come first, because a reader has not seen them yet. `all_slow_ranks` has
        the numbers of all, in order.
        """
        newest_first = sorted(self.named, key=lambda rank: self._named_at[rank], reverse=True)
        slow_ranks = []
        for rank in newest_first[:MAX_RANKS_LISTED]:
            slow_ranks.append({**self.named[rank].as_json(), "text": self._lines[rank]})
        return {
            "rank_times": {"batch": batch, "ranks": [report.as_json() for report in reports[:MAX_RANKS_LISTED]]},
            "slow_ranks": slow_ranks,
            "all_slow_ranks": sorted(self.named),
        }


def metrics_of(slowest: RankReport) -> dict[str, float]:
    """Return the metrics of a report: the rank with the largest ratio, and its times beside its stage's medians."""
    metrics: dict[str, float] = {"ranks/slowest": slowest.rank, "ranks/slowest_ratio": slowest.ratio}
    for name, own_part, median_part in zip(PARTS, slowest.own, slowest.median, strict=True):
        metrics[f"ranks/slowest_{name}_seconds"] = own_part
        metrics[f"ranks/median_{name}_seconds"] = median_part
    return metrics


def _describe_recovered(report: RankReport) -> str:
    """Return a line about a rank that is not slow any more."""
    return f"rank {report.rank} on {report.host} is no longer slow: {_describe_ratio(report)}"


def _describe_ratio(report: RankReport, parts: str = "") -> str:
    """Return how slow a rank is: `1.8 times the median (0.412 s, median 0.229 s)`. `parts` are those of its time."""
    times = f"{report.own.total:.3f} s, median {report.median_seconds:.3f} s"
    if parts:
        times += f"; {parts}"
    return f"{report.ratio:.1f} times the median ({times})"
