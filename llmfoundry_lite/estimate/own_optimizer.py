"""How much an optimizer of the user's own keeps for each parameter, as far as its class says so. Nothing of it is run.

class Slow(torch.optim.Optimizer):
    slots = ("exp_avg", "exp_avg_sq", "slow")  # or slots = 3, or bytes_per_parameter = 12
"""

from typing import Any, NamedTuple

from llmfoundry_lite.config.fields import is_number
from llmfoundry_lite.estimate.portion import FP32_BYTES
from llmfoundry_lite.own_facts import read_class_facts

MAX_BYTES_PER_PARAMETER = 1024
"""Largest answer that is believed. AdamW keeps 8 bytes."""


class ToldState(NamedTuple):
    """Facts that the class of an optimizer tells of its state."""

    bytes_per_parameter: float | None
    """None if it says nothing that can be read."""
    explanation: str
    """The attribute that says it, or why nothing is known, for messages."""


def read_told_state(name: str) -> ToldState:
    """Return what the class of an optimizer, `python:package.module:Thing`, says of its state.

    `bytes_per_parameter` is a number of bytes. `slots` are the names, or the number, of the tensors of a parameter's
    shape that the optimizer keeps for each, in fp32. The bytes take precedence.
    """
    facts = read_class_facts(name, ("slots", "bytes_per_parameter"))
    if facts.problem:
        return ToldState(None, facts.problem)
    if "bytes_per_parameter" in facts.values:
        return _checked("bytes_per_parameter", facts.values["bytes_per_parameter"], 1)
    if "slots" in facts.values:
        slots = facts.values["slots"]
        num_slots = len(slots) if isinstance(slots, tuple | list) else slots
        return _checked("slots", num_slots, FP32_BYTES)
    return ToldState(None, "its class has neither slots nor bytes_per_parameter")


def _checked(attribute: str, number: Any, unit_bytes: int) -> ToldState:
    """Return the state that an attribute tells. A value that is not a plausible number tells nothing."""
    if not is_number(number) or not 0 <= number * unit_bytes <= MAX_BYTES_PER_PARAMETER:
        return ToldState(None, f"its {attribute} is no number from 0 to {MAX_BYTES_PER_PARAMETER // unit_bytes}")
    return ToldState(number * unit_bytes, f"its class says so with {attribute}")
