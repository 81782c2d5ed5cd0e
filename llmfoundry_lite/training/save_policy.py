"""When a run saves, and whether it leaves after that batch. Knows nothing of what is saved, or where."""

import time
from pathlib import Path
from typing import NamedTuple

from composer.core import State, Timestamp

from llmfoundry_lite.config.schema import Duration, SaveInterval, TrainConfig
from llmfoundry_lite.launch.status import seconds_between_failures
from llmfoundry_lite.training.agreement import Agreement
from llmfoundry_lite.training.preemption import REASONS, Preemption
from llmfoundry_lite.training.save_timer import SaveTimer
from llmfoundry_lite.training.schedule import elapsed, is_evaluation_due


class Decision(NamedTuple):
    saves: bool
    preempted_by: str
    """Why the run leaves before its end; empty if it does not."""
    stops: bool
    """This launch has trained what it should, the run has not."""
    owes_evaluation: bool
    """The run leaves without the evaluation that is due."""


class SavePolicy:
    """A save at every `save_interval`, by spans of training or by the clock; after the last batch of the run or the
    launch; and before leaving early."""

    def __init__(self, config: TrainConfig, preemption: Preemption, agreement: Agreement):
        self.config = config
        self.preemption = preemption
        self.agreement = agreement
        interval = SaveInterval.parse(config.save_interval)
        self.span = interval.span
        self._batch_ended_at = time.monotonic()
        """Or the launch began. Composer measures batches by the wall clock, which may step."""
        self.timer: SaveTimer | None = None
        """Of rank 0 is the one that counts."""
        if self.span is None:
            self.timer = SaveTimer(interval.seconds, seconds_between_failures(Path(config.run_folder)))
            agreement.wants_save = self._is_time
        self.end = Duration.parse(config.max_duration)
        self.stop_after = Duration.parse(config.stop_after) if config.stop_after is not None else None

    def start(self, at: Timestamp) -> None:
        """This launch begins `at` that time of the run."""
        self.started_at = at
        self._batch_ended_at = time.monotonic()
        if self.timer is not None:
            self.timer.note_begun()

    def decide(self, state: State) -> Decision:
        """After each batch; the same on every rank."""
        is_last = elapsed(state, self.end.unit) >= self.end.value
        is_launch_over = self.stop_after is not None and self._elapsed_in_launch(state) >= self.stop_after.value
        agreed = REASONS[self.preemption.agreed]
        owes_evaluation = bool(agreed) and is_evaluation_due(self.config, state)
        preempted_by = agreed if not is_last or owes_evaluation else ""
        return Decision(
            saves=self._is_due(state) or is_last or is_launch_over or bool(preempted_by),
            preempted_by=preempted_by,
            stops=is_launch_over and not is_last and not preempted_by,
            owes_evaluation=owes_evaluation,
        )

    def _is_due(self, state: State) -> bool:
        if self.span is None:
            return self.agreement.save_is_due
        before = elapsed(state, self.span.unit, state.previous_timestamp) // self.span.value
        return elapsed(state, self.span.unit) // self.span.value > before

    def _is_time(self, state: State) -> bool:
        assert self.timer is not None
        before, self._batch_ended_at = self._batch_ended_at, time.monotonic()
        self.timer.note_batch(self._batch_ended_at - before, self.agreement.is_saving())
        return self.timer.is_due()

    def _elapsed_in_launch(self, state: State) -> float:
        assert self.stop_after is not None
        return elapsed(state, self.stop_after.unit) - elapsed(state, self.stop_after.unit, self.started_at)
