"""Times of ranks, as a run's status.json has them. No torch.

The training code measures and compares them (`training/rank_times.py`, `training/slow_ranks.py`). Anybody may have
written the file, so that entries of another form are skipped.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llmfoundry_lite.checkpoint.run_log import number_of
from llmfoundry_lite.training.slow_ranks import MAX_RANKS_LISTED


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTime:
    """The own time of a rank in the newest batch that was measured: how long it needs without waiting for others."""

    rank: int
    host: str
    stage: int
    """Its pipeline stage. It is compared with the ranks that have the same one."""
    own_seconds: float
    median_seconds: float
    """The median of the ranks with which it is compared."""
    waiting_seconds: float
    """Time that the slowest of these ranks needs beyond this one's."""
    ratio: float
    """Multiple of the median."""
    text: str = ""
    """The line with which the rank was named, if it is slow."""

    @property
    def name(self) -> str:
        """The rank with its host: `rank 5 on gpu007`."""
        return f"rank {self.rank} on {self.host}"

    def __str__(self) -> str:
        return f"{self.name} ({self.ratio:.1f} times the median)"


def read_rank_times(status: Mapping[str, Any]) -> list[RankTime] | None:
    """Return the times of the slowest ranks in the newest batch that was measured, the slowest first.

    None if no batch of the launch was measured.
    """
    times = status.get("rank_times")
    if not isinstance(times, dict) or type(times.get("batch")) is not int:
        return None
    return [*_read_ranks(times.get("ranks"))]


def read_slow_ranks(status: Mapping[str, Any]) -> list[RankTime]:
    """Return those ranks that a status describes as slow: MAX_RANKS_LISTED at most, the newest first."""
    return [*_read_ranks(status.get("slow_ranks"))]


def read_all_slow_ranks(status: Mapping[str, Any]) -> list[int]:
    """Return the numbers of all ranks that are slow, by a status."""
    numbers = status.get("all_slow_ranks")
    if not isinstance(numbers, list):
        return []
    return [number for number in numbers if type(number) is int]


def _read_ranks(entries: Any) -> Iterator[RankTime]:
    """Yield the ranks of a list in status.json, MAX_RANKS_LISTED at most. The training code writes no more."""
    if not isinstance(entries, list):
        return
    for entry in entries[:MAX_RANKS_LISTED]:
        if not isinstance(entry, dict):
            continue
        rank, stage = entry.get("rank"), entry.get("stage")
        host, text = entry.get("host"), entry.get("text", "")
        if type(rank) is not int or type(stage) is not int or not isinstance(host, str) or not isinstance(text, str):
            continue

        own_seconds = number_of(entry.get("own_seconds"))
        median_seconds = number_of(entry.get("median_seconds"))
        waiting_seconds = number_of(entry.get("waiting_seconds"))
        ratio = number_of(entry.get("ratio"))
        if own_seconds is None or median_seconds is None or waiting_seconds is None or ratio is None:
            continue
        yield RankTime(
            rank=rank,
            host=host,
            stage=stage,
            own_seconds=own_seconds,
            median_seconds=median_seconds,
            waiting_seconds=waiting_seconds,
            ratio=ratio,
            text=text,
        )
