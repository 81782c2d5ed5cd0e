"""Cost of a run in days, energy and money, and the time that failures and saves take. Arithmetic, no torch.

`cost_of` is the entry. The interval between saves is the one that loses the least time (`checkpoint/save_interval.py`
in the core), and `lost_share` says how much that is.
"""

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
"""Time from a failure to the next batch with a spare node at hand. HyperPod promises under two minutes; waiting in a
queue takes longer."""
PUBLISHED_RUN = "MPT-7B on 440 A100-40GB"
PUBLISHED_DAYS = 9.5
PREDICTED_DAYS = 6.6
"""Whole time of a published run, and the days that are predicted for its 1 trillion tokens in batches of 1,760 samples.
MosaicML, "Introducing MPT-7B", 5 May 2023, which does not say how the rest of the time was spent."""
COPY_BYTES_PER_SECOND = 10e9
"""Rate of a copy from a device to its host, for which a save stalls training: half of PCIe 4.0's rate."""
MIN_SAVE_SECONDS = 0.1
"""Least time for which a save stalls training, however small the state is."""
MAX_LOST_SHARE = 0.99
"""Largest share of time that may be lost; more is an error."""
STATE_BYTES = {"published": 6 + 4 + 4, "adam": 6 + 4 + 8}
"""Bytes for each parameter in mixed-precision training: weights (4 in fp32 and 2 in 16 bits), gradients, optimizer.
`published` is the count of arXiv 2312.12705, with one of Adam's two moments. `adam` counts both."""


def save_seconds(memory: MemoryEstimate) -> float:
    """Return the seconds for which a save stalls training, while a device copies parameters and optimizer state.

    The host writes them to storage while training goes on.
    """
    state_bytes = memory.parameters_bytes + memory.optimizer_bytes
    return max(MIN_SAVE_SECONDS, state_bytes / COPY_BYTES_PER_SECOND)


@dataclass(kw_only=True, slots=True, frozen=True)
class Cost:
    """Cost of a whole run."""

    days: float
    """Time of steps, saves and failures. Evaluation, queues and people's time come on top."""
    device_hours: float
    energy_kwh: float
    """Upper limit: every node draws its maximum."""
    dollars: float | None
    """None without a price."""
    lost_share: float
    """Share of the time that saves, failures and restarts take."""
    save_every_seconds: float
    """Interval between saves with which the least time is lost."""
    hours_between_failures: float
    """Mean time between failures of all devices together."""


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
    """Return the cost of training `num_tokens` at a rate of all devices that counts neither saves nor failures.

    save_seconds: time for which one save stalls training.
    device_hours_between_failures: mean time between failures of one device.

    Raises ConfigError if failures come so often that nearly all time is lost.
    """
    seconds_between_failures = device_hours_between_failures / num_devices * 3600
    save_interval = suggest_save_interval(save_seconds, seconds_between_failures)
    lost = lost_share(save_interval, save_seconds, seconds_between_failures, RESTART_SECONDS)
    if lost > MAX_LOST_SHARE:
        raise ConfigError(
            f"--mtbf: a failure every {seconds_between_failures:.3g} s on {num_devices} devices, each of which costs "
            f"{RESTART_SECONDS:g} s: the run would make no progress"
        )

    hours = num_tokens / tokens_per_second / 3600 / (1 - lost)
    device_hours = hours * num_devices
    watts_per_device = node.power_watts / node.num_devices
    return Cost(
        days=hours / 24,
        device_hours=device_hours,
        energy_kwh=device_hours * watts_per_device / 1000,
        dollars=None if dollars_per_device_hour is None else device_hours * dollars_per_device_hour,
        lost_share=lost,
        save_every_seconds=save_interval,
        hours_between_failures=seconds_between_failures / 3600,
    )


def lost_share(
    save_interval: float, save_seconds: float, seconds_between_failures: float, restart_seconds: float
) -> float:
    """Return the share of a run's time in which it makes no progress. All arguments are in seconds.

    Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps", equation 20. With M
    between failures, R for a restart, t of training between saves and d for a save, training for t takes
    M exp(R / M) (exp((t + d) / M) - 1). Failures are a Poisson process, and also come during saves and restarts.
    """
    mean = seconds_between_failures
    try:
        spent = math.expm1((save_interval + save_seconds) / mean) * mean * math.exp(restart_seconds / mean)
    except OverflowError:
        return 1.0  # failures come far more often than saves
    return 1 - save_interval / spent


def compute_optimal(flops: float) -> tuple[float, float]:
    """Return the numbers of parameters and of training tokens on which a budget of FLOPs is best spent.

    Hoffmann et al. 2022, "Training Compute-Optimal Large Language Models": training N parameters on D tokens takes
    C = 6 N D FLOPs, and the loss is lowest for D = 20 N.
    """
    num_parameters = math.sqrt(flops / (6 * TOKENS_PER_PARAMETER))
    num_tokens = TOKENS_PER_PARAMETER * num_parameters
    return num_parameters, num_tokens
