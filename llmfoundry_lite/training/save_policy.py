"""When a run saves, and whether it leaves after that batch. Knows nothing of what is saved, or where."""

from typing import NamedTuple

from composer.core import State, Timestamp

from llmfoundry_lite.config.schema import Duration, TrainConfig
from llmfoundry_lite.training.preemption import REASONS, Preemption
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
    """A save at every `save_interval`, after the last batch of the run or the launch, and before leaving early."""

    def __init__(self, config: TrainConfig, preemption: Preemption):
        self.config = config
        self.preemption = preemption
        self.interval = Duration.parse(config.save_interval)
        self.end = Duration.parse(config.max_duration)
        self.stop_after = Duration.parse(config.stop_after) if config.stop_after is not None else None

    def start(self, at: Timestamp) -> None:
        """This launch begins `at` that time of the run."""
        self.started_at = at

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
        before = elapsed(state, self.interval.unit, state.previous_timestamp) // self.interval.value
        return elapsed(state, self.interval.unit) // self.interval.value > before

    def _elapsed_in_launch(self, state: State) -> float:
        assert self.stop_after is not None
        return elapsed(state, self.stop_after.unit) - elapsed(state, self.stop_after.unit, self.started_at)
