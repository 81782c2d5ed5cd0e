"""Callbacks that send a rank of a real launch a signal at a moment of the run."""

import os
import signal
import threading

from composer.core import Callback

from llmfoundry_lite.training.checkpointing import Checkpointing


def wait_until_told(state) -> None:
    """Until this rank's thread has heard of a reason to leave: how soon that is, is the kernel's choice."""
    (preemption,) = (callback.preemption for callback in state.callbacks if isinstance(callback, Checkpointing))
    while not preemption.reason:
        threading.Event().wait(0.01)


class Signal(Callback):
    """Sends one rank a signal at the beginning of a batch."""

    def __init__(self, rank: int, batch: int, name: str = "SIGTERM"):
        self.rank, self.batch, self.number = rank, batch, signal.Signals[name]

    def is_here(self, state) -> bool:
        return int(os.environ["RANK"]) == self.rank and int(state.timestamp.batch) + 1 == self.batch

    def batch_start(self, state, logger):
        if self.is_here(state):
            os.kill(os.getpid(), self.number)
            wait_until_told(state)


class SignalInEvaluation(Signal):
    """In the evaluation before that batch."""

    def batch_start(self, state, logger):
        pass

    def eval_batch_end(self, state, logger):
        if self.is_here(state):
            os.kill(os.getpid(), self.number)
            wait_until_told(state)
