"""`llmfoundry-lite plan`: memory, speed and cost of a run on hardware not at hand. No torch, under a second.

llmfoundry-lite plan mpt-7b --hardware mi250 --devices 128
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.config.sharding_schema import PipelineConfig
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.models.flops import count_parameters
from llmfoundry_planner.plan.bubble import check_schedule
from llmfoundry_planner.plan.calibrate import calibrate
from llmfoundry_planner.plan.cost import DEVICE_HOURS_BETWEEN_FAILURES, Cost, cost_of, save_seconds
from llmfoundry_planner.plan.search import Candidate, Rejected, count_tokens, nearest_that_fits, search_layouts
from llmfoundry_planner.plan.step import Hardware, accelerator_named, find_hardware

PLANNED = "# Planned for "


@dataclass(kw_only=True, slots=True, frozen=True)
class Plan:
    """Layouts of one run on a number of devices, and the cost of the best."""

    config: TrainConfig
    hardware: Hardware
    num_devices: int
    num_parameters: int
    num_tokens: float | None
    """Length of the run; None if it is in epochs, because the data is not read."""
    candidates: list[Candidate]
    rejected: list[Rejected]
    would_fit: int | None
    """If nothing fits: a number of devices on which some layout fits."""
    cost: Cost | None
    """Cost of the first candidate."""

    @property
    def interval(self) -> tuple[float, float]:
        """Factors of the predicted rates between which real rates lie, in nine cases of ten."""
        return self.hardware.interval(self.num_devices, compiled=self.config.compile_config is not None)


def hardware_named(
    name: str,
    *,
    per_node: int | None = None,
    link_gigabytes: float | None = None,
    adapter_gigabits: float | None = None,
    products_efficiency: float | None = None,
    measured: Sequence[Path] = (),
) -> Hardware:
    """Return hardware of the table, with the user's own values. Raises ConfigError for unknown hardware.

    `per_node`: devices of a node. `link_gigabytes`: GB/s of a device within its node. `adapter_gigabits`: Gbit/s of a
    node to others. `measured`: reports that `calibrate` reads.
    """
    hardware = known = find_hardware(accelerator_named(name))
    changes = {
        "num_devices": per_node,
        "link_bytes_per_second": link_gigabytes and link_gigabytes * 1e9,
        "adapter_bytes_per_second": adapter_gigabits and adapter_gigabits * 1e9 / 8,
    }
    hardware = calibrate(hardware, measured, {key: value for key, value in changes.items() if value is not None})
    if products_efficiency is None:
        return hardware
    source, products = f"products as given; attention by {hardware.efficiency.origin}", products_efficiency
    most = known.efficiency.num_measured_devices
    rates = replace(hardware.efficiency, products=products, era=None, source=source)
    efficiency = replace(rates, residuals=None, num_measured_devices=most)
    return replace(hardware, efficiency=efficiency)


def make_plan(
    arguments: Sequence[str],
    hardware: Hardware,
    num_devices: int,
    *,
    pipeline: PipelineConfig | None = None,
    num_tokens: float | None = None,
    dollars_per_device_hour: float | None = None,
    device_hours_between_failures: float = DEVICE_HOURS_BETWEEN_FAILURES,
    stall_seconds: float | None = None,
) -> Plan:
    """Plan the run of these arguments. Raises ConfigError for counts that fit no layout, naming those that do.

    `pipeline`: stages other than the run's pp_config; without either, stages are searched. `stall_seconds`: time that
    a save stalls training.
    """
    if num_tokens is not None and not math.isfinite(num_tokens):
        raise ConfigError(f"--tokens: {num_tokens} given, expected a number of tokens, such as 1e12")
    config = load_train_config(arguments).config
    pipeline = pipeline or config.pp_config
    check_devices(config, num_devices, hardware.node.num_devices, pipeline)

    def search(count: int) -> tuple[list[Candidate], list[Rejected]]:
        return search_layouts(config, count, hardware, pipeline, stall_seconds)

    candidates, rejected = search(num_devices)
    num_tokens = num_tokens or count_tokens(config.max_duration, config)
    cost = None
    if candidates and num_tokens:
        best = candidates[0]
        cost = cost_of(
            num_tokens,
            replace(best.time, saves=0.0).tokens_per_second,  # cost_of counts saves as lost time
            num_devices,
            hardware.node,
            dollars_per_device_hour=dollars_per_device_hour,
            save_seconds=save_seconds(best.memory) if stall_seconds is None else stall_seconds,
            device_hours_between_failures=device_hours_between_failures,
        )
    return Plan(
        config=config,
        hardware=hardware,
        num_devices=num_devices,
        num_parameters=count_parameters(config.model),
        num_tokens=num_tokens,
        candidates=candidates,
        rejected=rejected,
        would_fit=None if candidates else nearest_that_fits(num_devices, lambda count: bool(search(count)[0])),
        cost=cost,
    )


def check_devices(config: TrainConfig, num_devices: int, per_node: int, pipeline: PipelineConfig | None) -> None:
    """Raise ConfigError for a number of devices that nodes, stages or parts of samples do not divide."""
    if num_devices > per_node and num_devices % per_node:
        below = num_devices // per_node * per_node
        raise ConfigError(
            f"--devices: {num_devices} are not a whole number of nodes of {per_node}; the nearest counts are "
            f"{below} and {below + per_node} (--per-node says how many a node has)"
        )
    num_stages = pipeline.pipeline_parallel_degree if pipeline else 1
    if num_devices % num_stages:
        raise ConfigError(f"--pipeline: {num_stages} stages do not divide {num_devices} devices")
    num_parts = config.context.context_parallel_degree
    if num_devices % (num_stages * num_parts):
        raise ConfigError(
            f"cp_config.context_parallel_degree: {num_parts} does not divide {num_devices // num_stages} devices"
        )
    if pipeline:
        check_schedule(pipeline.schedule, num_stages, num_stages, pipeline.num_runs)


def parse_cluster(text: str) -> tuple[str, int]:
    """Parse `mi250:64`. Raises ConfigError, also for hardware that is not in the table."""
    name, _, number = text.rpartition(":")
    if not name or not number.isdecimal() or not int(number):
        raise ConfigError(f"--join: {text!r} given, expected HARDWARE:DEVICES, such as mi250:64")
    accelerator_named(name)
    return name, int(number)


def write_overlay(plan: Plan, path: Path) -> None:
    """Write the first candidate as a YAML to lay over the run. Raises ConfigError if nothing fits."""
    if not plan.candidates:
        raise ConfigError(
            f"--write: no layout of {plan.num_devices} {plan.hardware.accelerator.name} fits, nothing to write"
        )
    head = f"{PLANNED}{plan.num_devices} x {plan.hardware.accelerator.name}; predicted, not measured.\n"
    overlay = plan.candidates[0].overlay(plan.config)
    try:
        if path.is_file() and path.stat().st_size and not path.read_bytes().startswith(PLANNED.encode()):
            raise ConfigError(f"--write: {path} exists and was not written by `plan --write`; choose another file")
        path.write_text(head + yaml.safe_dump(overlay, sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--write: {path}: {error.strerror}; choose another file") from None
