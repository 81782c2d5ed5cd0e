"""What StreamingDataset keeps in arrays with a number for every sample, worked out here as it is asked for."""

from bisect import bisect_right
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from llmfoundry_lite.data.order import EpochOrder


class WorkerSampleIds:
    """The sample ids that one worker yields in an epoch: an array in all but memory.

    StreamingDataset's three threads index it, each a little ahead of the next, so the last few pieces are kept. A run
    resumes at once wherever it stands, and no process ever holds the order of a whole epoch.
    """

    _NUM_PIECES_KEPT = 4

    def __init__(self, epoch_order: EpochOrder, lanes: range, steps: range) -> None:
        self._epoch_order, self._lanes, self._steps = epoch_order, lanes, steps
        # One shuffled block is the least that can be worked out, unless that is very little or very much.
        steps_per_block = epoch_order.order.block_samples // steps.step
        self._steps_per_piece = min(max(steps_per_block, (1 << 14) // len(lanes), 1), -(-(1 << 20) // len(lanes)))
        self._pieces: dict[int, NDArray[np.int64]] = {}
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._steps) * len(self._lanes)

    def __getitem__(self, index: int) -> int:
        piece, index_in_piece = divmod(index, self._steps_per_piece * len(self._lanes))
        with self._lock:
            if piece not in self._pieces:
                first_step = piece * self._steps_per_piece
                steps = self._steps[first_step : first_step + self._steps_per_piece]
                self._pieces[piece] = self._epoch_order.sample_ids(self._lanes, steps).ravel()
                if len(self._pieces) > self._NUM_PIECES_KEPT:
                    del self._pieces[min(self._pieces)]
            return int(self._pieces[piece][index_in_piece])

    def forget(self) -> None:
        """Free the memory. (Whoever still asks gets the same answers, worked out anew.)"""
        with self._lock:
            self._pieces.clear()


class ShardBounds:
    """Sample id -> (shard, sample in shard), by bisection.

    StreamingDataset's Spanner does the same by way of an array of all samples: for C4 (170 M samples in 42,000 shards),
    4 s and 1.4 GB in every rank.
    """

    def __init__(self, shard_sizes: NDArray[np.int64]) -> None:
        self._bounds = [0, *np.cumsum(shard_sizes).tolist()]

    def __getitem__(self, sample_id: int) -> tuple[int, int]:
        if not 0 <= sample_id < self._bounds[-1]:
            raise IndexError(f"sample {sample_id} of {self._bounds[-1]}")
        shard = bisect_right(self._bounds, sample_id) - 1
        return shard, int(sample_id) - self._bounds[shard]
