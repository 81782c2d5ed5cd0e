"""`llmfoundry-lite plan`: predict memory, speed and cost of a run on hardware that you do not have.

    llmfoundry-lite plan mpt-7b --hardware mi250 --devices 128

This file puts a plan together. `hardware_named` chooses devices and their rates. `make_plan` loads the run, has
`search.py` try every layout, and has `cost.py` compute days and cost of the best one. `report.py` prints the plan.
Nothing here imports torch, so that a plan takes less than a second.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from llmfoundry_lite.config.counted_model import counted_model
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.config.sharding_schema import PipelineConfig
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.models.flops import count_parameters
from llmfoundry_planner.plan.bubble import check_schedule
from llmfoundry_planner.plan.calibrate import calibrate
from llmfoundry_planner.plan.cost import DEVICE_HOURS_BETWEEN_FAILURES, Cost, cost_of, save_seconds
from llmfoundry_planner.plan.search import Candidate, Rejected, count_tokens, nearest_that_fits, search_layouts
from llmfoundry_planner.plan.step import (
    Hardware,
    accelerator_named,
    find_hardware,
    refuse_schedules,
    refuse_unknown_layers,
)

PLANNED = "# Planned for "
"""Beginning of every file of `plan --write`, by which the next `--write` recognises a file that it may overwrite."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Plan:
    """Result of planning a run on a number of devices: the layouts that fit, and the cost of the best one."""

    config: TrainConfig
    hardware: Hardware
    num_devices: int
    num_parameters: int
    num_tokens: float | None
    """Length of the run; None if it is in epochs, because the data is not read."""
    candidates: list[Candidate]
    """Layouts that fit: first the one to take, then the others by speed."""
    rejected: list[Rejected]
    """Layouts that do not fit, with the reason."""
    would_fit: int | None
    """If nothing fits: a number of devices on which some layout fits. None if something fits, or if no number helps."""
    cost: Cost | None
    """Cost of the first candidate; None without a candidate, or if the length of the run is not known."""

    @property
    def interval(self) -> tuple[float, float]:
        """Factors of the predicted tokens/s between which the real rate lies in nine cases of ten, as (0.94, 1.06)."""
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
    """Return hardware of the table, changed by the user's own numbers and measurements.

    name: of a device, such as `h100`, as `accelerator_named` understands it.
    per_node: devices in a node.
    link_gigabytes: bandwidth of a device to others in its node, in GB/s.
    adapter_gigabits: bandwidth of a node to other nodes, in Gbit/s.
    products_efficiency: share of the peak that matrix products reach. It overrides the table and `measured`.
    measured: files of reports for `calibrate`.

    Every number that is None stays as in the table. Raises ConfigError for unknown hardware and for a report of another
    device, DataError for a report that cannot be used.
    """
    known_hardware = find_hardware(accelerator_named(name))
    node_changes: dict[str, Any] = {}
    if per_node is not None:
        node_changes["num_devices"] = per_node
    if link_gigabytes is not None:
        node_changes["link_bytes_per_second"] = link_gigabytes * 1e9
    if adapter_gigabits is not None:
        node_changes["adapter_bytes_per_second"] = adapter_gigabits * 1e9 / 8

    hardware = calibrate(known_hardware, measured, node_changes)
    if products_efficiency is None:
        return hardware

    # The user's share replaces a fitted one, so the fit's era and errors do not apply. Attention keeps its share.
    efficiency = replace(
        hardware.efficiency,
        products=products_efficiency,
        era=None,
        source=f"products as given; attention by {hardware.efficiency.origin}",
        residuals=None,
        num_measured_devices=known_hardware.efficiency.num_measured_devices,
    )
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
    """Find the layouts that fit a run on a number of devices, and compute the cost of the best one.

    arguments: YAML files or names and `key=value` settings, as `train` takes them.
    pipeline: stages to plan with instead of the run's `pp_config`. Without either, every number of stages is tried.
    num_tokens: length of the run. None: its `max_duration`.
    stall_seconds: time for which a save stalls training. None: the time to copy a device's state to its host.

    Raises ConfigError for a number of devices that cannot be divided into nodes, stages or parts of samples, for layers
    of the user's own, and for batches of several sizes or lengths. If no layout fits the memory, the plan has no
    candidates, and `would_fit` says how many devices would do.
    """
    if num_tokens is not None and not math.isfinite(num_tokens):
        raise ConfigError(f"--tokens: {num_tokens} given, expected a number of tokens, such as 1e12")
    config = load_train_config(arguments).config
    refuse_unknown_layers(counted_model(config.model))
    refuse_schedules(config)
    pipeline = pipeline or config.pp_config
    check_devices(config, num_devices, hardware.node.num_devices, pipeline)

    def search(num_devices: int) -> tuple[list[Candidate], list[Rejected]]:
        return search_layouts(config, num_devices, hardware, pipeline, stall_seconds)

    def has_layout(num_devices: int) -> bool:
        candidates, _ = search(num_devices)
        return bool(candidates)

    candidates, rejected = search(num_devices)
    would_fit = None
    if not candidates:
        would_fit = nearest_that_fits(num_devices, has_layout)

    num_tokens = num_tokens or count_tokens(config.max_duration, config)
    cost = None
    if candidates and num_tokens:
        best = candidates[0]
        # cost_of counts saves among the lost time, so the rate must not count them too.
        time_without_saves = replace(best.time, saves=0.0)
        if stall_seconds is None:
            stall_seconds = save_seconds(best.memory)
        cost = cost_of(
            num_tokens,
            time_without_saves.tokens_per_second,
            num_devices,
            hardware.node,
            dollars_per_device_hour=dollars_per_device_hour,
            save_seconds=stall_seconds,
            device_hours_between_failures=device_hours_between_failures,
        )

    return Plan(
        config=config,
        hardware=hardware,
        num_devices=num_devices,
        num_parameters=count_parameters(counted_model(config.model)),
        num_tokens=num_tokens,
        candidates=candidates,
        rejected=rejected,
        would_fit=would_fit,
        cost=cost,
    )


def check_devices(config: TrainConfig, num_devices: int, per_node: int, pipeline: PipelineConfig | None) -> None:
    """Raise ConfigError for a number of devices that cannot be divided as the run and the hardware ask.

    More than one node must be whole nodes of `per_node` devices. The stages of `pipeline`, and within a stage the
    context parallel degree of the run, must divide the devices. The error names the nearest numbers of whole nodes.
    """
    is_part_of_nodes = num_devices > per_node and num_devices % per_node != 0
    if is_part_of_nodes:
        below = num_devices // per_node * per_node
        raise ConfigError(
            f"--devices: {num_devices} are not a whole number of nodes of {per_node}; the nearest counts are "
            f"{below} and {below + per_node} (--per-node says how many a node has)"
        )

    num_stages = pipeline.pipeline_parallel_degree if pipeline else 1
    if num_devices % num_stages:
        raise ConfigError(f"--pipeline: {num_stages} stages do not divide {num_devices} devices")

    context_degree = config.context.context_parallel_degree
    if num_devices % (num_stages * context_degree):
        raise ConfigError(
            f"cp_config.context_parallel_degree: {context_degree} does not divide {num_devices // num_stages} devices"
        )

    if pipeline:
        # Any number of microbatches does here: the search tries them.
        check_schedule(pipeline.schedule, num_stages, num_stages, pipeline.num_runs)


def parse_cluster(text: str) -> tuple[str, int]:
    """Parse the value of `--join`: `mi250:64` is ("mi250", 64).

    Raises ConfigError for another form, for 0 devices, and for hardware that is not in the table.
    """
    hardware_name, _, count = text.rpartition(":")
    is_count = count.isdecimal() and int(count) > 0
    if not hardware_name or not is_count:
        raise ConfigError(f"--join: {text!r} given, expected HARDWARE:DEVICES, such as mi250:64")

    accelerator_named(hardware_name)  # raises the error for unknown hardware
    return hardware_name, int(count)


def write_overlay(plan: Plan, path: Path) -> None:
    """Write the first candidate as a YAML overlay, which follows the run's own YAML on the command line of `train`.

    The plan must have a candidate. A file that an earlier `plan --write` wrote is overwritten, and so is an empty one.
    Raises ConfigError for any other file, and if the file cannot be written.
    """
    header = f"{PLANNED}{plan.num_devices} x {plan.hardware.accelerator.name}; predicted, not measured.\n"
    overlay = plan.candidates[0].overlay(plan.config)
    try:
        has_content = path.is_file() and path.stat().st_size > 0
        if has_content and not path.read_bytes().startswith(PLANNED.encode()):
            raise ConfigError(f"--write: {path} exists and was not written by `plan --write`; choose another file")
        path.write_text(header + yaml.safe_dump(overlay, sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--write: {path}: {error.strerror}; choose another file") from None
