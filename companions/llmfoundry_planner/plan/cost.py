"""Cost of a run in days, energy and money, and what failures and saves take from it. Arithmetic, no torch."""

import math
from dataclasses import dataclass

from llmfoundry_lite.checkpoint.save_interval import suggest_save_interval
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.estimate.model_memory import MemoryEstimate
from llmfoundry_lite.models.flops import TOKENS_PER_PARAMETER
from llmfoundry_planner.plan.network import Node

DEVICE_HOURS_BETWEEN_FAILURES = 50_000.0
"""Llama 3's training: 419 unplanned interruptions in 54 days on 16,384 H100, one in 50,700 device-hours.
arXiv 2407.21783, section 3.3.4."""
RESTART_SECONDS = 300.0
"""From a failure to the next batch, with a spare node at hand: HyperPod says under two minutes, a queue takes more."""
PUBLISHED_RUN, PUBLISHED_DAYS, PREDICTED_DAYS = "MPT-7B on 440 A100-40GB", 9.5, 6.6
"""A run's whole time beside the days that are predicted for its 1 trillion tokens, in batches of 1,760 samples.
MosaicML, "Introducing MPT-7B", 5 May 2023. Nothing is published of what the rest of the time went into."""
COPY_BYTES_PER_SECOND = 10e9
"""From a device to its host, while a save holds training up: half of PCIe 4.0's rate."""
MIN_SAVE_SECONDS = 0.1
MAX_LOST_SHARE = 0.99
"""Largest share of time that may be lost; more is an error."""


def save_seconds(memory: MemoryEstimate) -> float:
    """Return the time that a save stalls training: a device copies its share of parameters and optimizer state."""
    return max(MIN_SAVE_SECONDS, (memory.parameters_bytes + memory.optimizer_bytes) / COPY_BYTES_PER_SECOND)


@dataclass(kw_only=True, slots=True, frozen=True)
class Cost:
    days: float
    """Time of steps, saves and failures. Evaluation, queues and people's time come on top."""
    device_hours: float
    energy_kwh: float
    """Upper limit: every node draws its maximum."""
    dollars: float | None
    lost_share: float
    """Share of the time that saves, failures and restarts take."""
    save_every_seconds: float
    hours_between_failures: float


def cost_of(
    num_tokens: float,
    tokens_per_second: float,
    num_devices: int,
    node: Node,
    *,
    dollars_per_device_hour: float | None = None,
    save_seconds: float,
    device_hours_between_failures: float = DEVICE_HOURS_BETWEEN_FAILURES,
) -> Cost:
    """Return a run's cost; saves stall it by `save_seconds`. Raises ConfigError if failures leave no time to train."""
    between = device_hours_between_failures / num_devices * 3600
    every = suggest_save_interval(save_seconds, between)
    lost = lost_share(every, save_seconds, between, RESTART_SECONDS)
    if lost > MAX_LOST_SHARE:
        raise ConfigError(
            f"--mtbf: a failure every {between:.3g} s on {num_devices} devices, each of which costs "
            f"{RESTART_SECONDS:g} s: the run would make no progress"
        )
    hours = num_tokens / tokens_per_second / 3600 / (1 - lost)
    watts = node.power_watts / node.num_devices
    return Cost(
        days=hours / 24,
        device_hours=hours * num_devices,
        energy_kwh=hours * num_devices * watts / 1000,
        dollars=None if dollars_per_device_hour is None else hours * num_devices * dollars_per_device_hour,
        lost_share=lost,
        save_every_seconds=every,
        hours_between_failures=between / 3600,
    )


def lost_share(every: float, save_seconds: float, between: float, restart_seconds: float) -> float:
    """Return the share of time that is not training's: Daly 2006, equation 20, solved for the share.

    Failures come as a Poisson process, in saves and restarts too.
    """
    try:
        spent = math.expm1((every + save_seconds) / between) * between * math.exp(restart_seconds / between)
    except OverflowError:
        return 1.0
    return 1 - every / spent


def compute_optimal(flops: float) -> tuple[float, float]:
    """Return (parameters, tokens) that `flops` train best: C = 6 N D and D = 20 N (Hoffmann et al. 2022)."""
    num_parameters = math.sqrt(flops / (6 * TOKENS_PER_PARAMETER))
    return num_parameters, TOKENS_PER_PARAMETER * num_parameters


STATE_BYTES = {"published": 6 + 4 + 4, "adam": 6 + 4 + 8}
"""Bytes a parameter takes in mixed-precision training: weights (fp32 and 16 bits), gradients, optimizer. `published`
is arXiv 2312.12705's count, with one moment of Adam's two; `adam` counts both."""
