"""Times of ranks, as a run's status.json has them. No torch.

The training code measures and compares them (`training/rank_times.py`, `training/slow_ranks.py`). Anybody may have
written the file, so that entries of another form are skipped.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llmfoundry_lite.checkpoint.run_log import number_of
from llmfoundry_lite.training.slow_ranks import MAX_RANKS_LISTED

MAX_RANKS = MAX_RANKS_LISTED
"""Most ranks that are read. The training code writes no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTime:
    """The own time of a rank in the newest batch that was measured: how long it needs without waiting for others."""

    rank: int
    host: str
    own_seconds: float
    waiting_seconds: float
    """Time that the slowest of the ranks with which it is compared needs beyond this one's."""
    ratio: float
    """Multiple of the median."""
    text: str = ""
    """The line with which the rank was named, if it is slow."""

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} ({self.ratio:.1f} times the median)"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """The times of the slowest ranks in one batch."""

    batch: int
    median_seconds: float
    ranks: tuple[RankTime, ...]


def read_rank_times(status: Mapping[str, Any]) -> RankTimes | None:
    """Return the times of ranks in a status; None if no batch was measured."""
    times = status.get("rank_times")
    if not isinstance(times, dict):
        return None
    batch, median_seconds = times.get("batch"), number_of(times.get("median_seconds"))
    if type(batch) is not int or median_seconds is None:
        return None
    return RankTimes(batch=batch, median_seconds=median_seconds, ranks=tuple(_read_ranks(times.get("ranks"))))


def read_slow_ranks(status: Mapping[str, Any]) -> list[RankTime]:
    """Return the ranks that a status names as slow, the slowest first."""
    return [*_read_ranks(status.get("slow_ranks"))]


def _read_ranks(entries: Any) -> Iterator[RankTime]:
    """Yield the ranks of a list in status.json."""
    if not isinstance(entries, list):
        return
    for entry in entries[:MAX_RANKS]:
        if not isinstance(entry, dict):
            continue
        rank, host, text = entry.get("rank"), entry.get("host"), entry.get("text", "")
        own_seconds = number_of(entry.get("own_seconds"))
        waiting_seconds = number_of(entry.get("waiting_seconds"))
        ratio = number_of(entry.get("ratio"))

        if type(rank) is not int or not isinstance(host, str) or not isinstance(text, str):
            continue
        if own_seconds is None or waiting_seconds is None or ratio is None:
            continue
        yield RankTime(
            rank=rank, host=host, own_seconds=own_seconds, waiting_seconds=waiting_seconds, ratio=ratio, text=text
        )
