"""Callbacks that send a rank of a real launch a signal at a moment of the run."""

import os
import signal
import threading

from composer.core import Callback


class Signal(Callback):
    """Sends one rank a signal at the beginning of a batch."""

    def __init__(self, rank: int, batch: int, name: str = "SIGTERM"):
        self.rank, self.batch, self.number = rank, batch, signal.Signals[name]

    def is_here(self, state) -> bool:
        return int(os.environ["RANK"]) == self.rank and int(state.timestamp.batch) + 1 == self.batch

    def batch_start(self, state, logger):
        if self.is_here(state):
            os.kill(os.getpid(), self.number)


class SignalInEvaluation(Signal):
    """In the evaluation before that batch."""

    def batch_start(self, state, logger):
        pass

    def eval_batch_end(self, state, logger):
        if self.is_here(state):
            os.kill(os.getpid(), self.number)
            threading.Event().wait(0.2)  # until its thread has been told; the evaluation goes on for far longer
