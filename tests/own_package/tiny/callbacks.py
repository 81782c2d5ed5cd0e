"""Callbacks. Checkpoints keep what their `state_dict` returns."""

from composer.core import Callback


class Heartbeat(Callback):
    """Logs `heartbeat/beats`, one for every few batches of the whole run."""

    def __init__(self, every=2):
        self.every = every
        self.batches = 0
        self.beats = 0

    def state_dict(self):
        return {"batches": self.batches, "beats": self.beats}

    def load_state_dict(self, state):
        self.batches = state["batches"]
        self.beats = state["beats"]

    def batch_end(self, state, logger):
        self.batches += 1
        if self.batches % self.every == 0:
            self.beats += 1
            logger.log_metrics({"heartbeat/beats": self.beats})


class TokenBudget(Callback):
    """Logs how many tokens of a budget are left, and says once in a run that it is used up."""

    def __init__(self, total):
        self.total = total
        self.has_said_it = False

    def state_dict(self):
        return {"has_said_it": self.has_said_it}

    def load_state_dict(self, state):
        self.has_said_it = state["has_said_it"]

    def batch_end(self, state, logger):
        left = self.total - state.timestamp.token.value
        logger.log_metrics({"token_budget/left": left})
        if left <= 0 and not self.has_said_it:
            self.has_said_it = True
            print(f"token_budget: used up after batch {state.timestamp.batch.value}", flush=True)


def build_token_budget(config):
    """Return the callback of the block `token_budget`."""
    return TokenBudget(config.blocks["token_budget"].total)
