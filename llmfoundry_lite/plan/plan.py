"""`llmfoundry-lite plan`: what a run would take on hardware that nobody has booked. No torch, under a second.

    llmfoundry-lite plan mpt-7b --hardware mi250 --devices 128

Owns the request and the answer. Leaves time to `step`, memory to `memory`, layouts to `search`, money and failures to
`cost`, words to `report`.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.schema import PipelineConfig, TrainConfig
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.hardware import Accelerator, accelerator_named
from llmfoundry_lite.models.flops import count_parameters
from llmfoundry_lite.plan.check import calibrate
from llmfoundry_lite.plan.cost import Cost, Joined, cost_of, join_clusters, save_seconds
from llmfoundry_lite.plan.network import Node, find_node
from llmfoundry_lite.plan.schedule import check_schedule
from llmfoundry_lite.plan.search import Candidate, Rejected, nearest_that_fits, search_layouts
from llmfoundry_lite.plan.step import FP32_BYTES, Shares, find_shares


@dataclass(kw_only=True, slots=True, frozen=True)
class Plan:
    config: TrainConfig
    accelerator: Accelerator
    node: Node
    shares: Shares
    num_devices: int
    num_parameters: int
    num_tokens: float | None
    """Of the run; None where its length is counted in epochs, of data that is not looked at."""
    candidates: list[Candidate]
    rejected: list[Rejected]
    would_fit: int | None
    """Where nothing fits: a number of devices that something fits on."""
    cost: Cost | None
    """Of the first candidate."""


def make_plan(
    arguments: Sequence[str],
    *,
    hardware: str,
    num_devices: int,
    per_node: int | None = None,
    link_gigabytes: float | None = None,
    adapter_gigabits: float | None = None,
    products_share: float | None = None,
    measured: Path | None = None,
    pipeline: PipelineConfig | None = None,
    num_tokens: float | None = None,
    dollars_per_device_hour: float | None = None,
    device_hours_between_failures: float | None = None,
    stall_seconds: float | None = None,
) -> Plan:
    """`measured`: mfu.json of `bench mfu`, on such a device. `pipeline`: another one than the run's pp_config; without
    either, stages are searched as all else is. `stall_seconds`: how long a save holds training up; without it, by what
    a device copies.

    Raises ConfigError for unknown hardware and counts that fit no layout, naming those that do."""
    accelerator = accelerator_named(hardware)
    if num_tokens is not None and not math.isfinite(num_tokens):
        raise ConfigError(f"--tokens: {num_tokens} given, expected a number of tokens, such as 1e12")
    config = load_train_config(arguments).config
    node = find_node(accelerator.name)
    changes = {
        "num_devices": per_node,
        "link_bytes_per_second": link_gigabytes and link_gigabytes * 1e9,
        "adapter_bytes_per_second": adapter_gigabits and adapter_gigabits * 1e9 / 8,
    }
    node = dataclasses.replace(node, **{name: value for name, value in changes.items() if value is not None})
    shares = find_shares(accelerator)
    if measured is not None:
        shares = calibrate(shares, measured, accelerator)
    if products_share is not None:
        shares = dataclasses.replace(shares, products=products_share, source="as given")
    if num_devices > node.num_devices and num_devices % node.num_devices:
        below = num_devices // node.num_devices * node.num_devices
        raise ConfigError(
            f"--devices: {num_devices} are no whole number of nodes of {node.num_devices}; the nearest counts are "
            f"{below} and {below + node.num_devices} (--per-node says how many a node has)"
        )
    pipeline = pipeline or config.pp_config
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

    def search(count: int) -> tuple[list[Candidate], list[Rejected]]:
        return search_layouts(config, count, accelerator, node, shares, pipeline, stall_seconds)

    candidates, rejected = search(num_devices)
    num_tokens = num_tokens or count_run_tokens(config)
    cost = None
    if candidates and num_tokens:
        best = candidates[0]
        kwargs = {}
        if device_hours_between_failures is not None:
            kwargs["device_hours_between_failures"] = device_hours_between_failures
        cost = cost_of(
            num_tokens,
            dataclasses.replace(best.time, saves=0.0).tokens_per_second,  # they are in what is lost
            num_devices,
            node,
            dollars_per_device_hour=dollars_per_device_hour,
            save_seconds=save_seconds(best.memory) if stall_seconds is None else stall_seconds,
            **kwargs,
        )
    return Plan(
        config=config,
        accelerator=accelerator,
        node=node,
        shares=shares,
        num_devices=num_devices,
        num_parameters=count_parameters(config.model),
        num_tokens=num_tokens,
        candidates=candidates,
        rejected=rejected,
        would_fit=None if candidates else nearest_that_fits(num_devices, lambda count: bool(search(count)[0])),
        cost=cost,
    )


def parse_counts(text: str, option: str = "--devices") -> list[int]:
    """`64,128` -> [64, 128]. Raises ConfigError."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(f"{option}: {text!r} given, expected a number, or several such as 64,128,256")
    return [int(part) for part in parts]


def parse_cluster(text: str) -> tuple[str, int]:
    """`mi250:64` -> its two parts. Raises ConfigError, for hardware that is not in the table too."""
    name, _, number = text.rpartition(":")
    if not name or not number.isdecimal() or not int(number):
        raise ConfigError(f"--join: {text!r} given, expected HARDWARE:DEVICES, such as mi250:64")
    accelerator_named(name)
    return name, int(number)


def join(first: Plan, second: Plan, link_gigabits: float, steps_between_exchanges: int = 1) -> Joined:
    """Both clusters train the first plan's run, their gradients in fp32 over a link.

    Raises ConfigError where it does not fit on one of them.
    """
    for plan in (first, second):
        if not plan.candidates:
            raise ConfigError(f"--join: the run does not fit on {plan.num_devices} x {plan.accelerator.name}")
    return join_clusters(
        first.candidates[0].time.tokens_per_second,
        second.candidates[0].time.tokens_per_second,
        batch_tokens=first.candidates[0].time.num_tokens,
        gradient_bytes=FP32_BYTES * first.num_parameters,
        link_bytes_per_second=link_gigabits * 1e9 / 8,
        steps_between_exchanges=steps_between_exchanges,
    )


def count_run_tokens(config: TrainConfig) -> float | None:
    """Tokens of a whole run; None where its length is in epochs."""
    span = Duration.parse(config.max_duration)
    per_batch = config.global_train_batch_size * config.max_seq_len
    each = {"ba": per_batch, "tok": 1, "sp": config.max_seq_len}
    return span.value * each[span.unit] if span.unit in each else None


PLANNED = "# Planned for "


def write_overlay(plan: Plan, path: Path) -> None:
    """The first candidate as a YAML to lay over the run. Raises ConfigError where nothing fits."""
    if not plan.candidates:
        raise ConfigError(f"--write: no layout of {plan.num_devices} {plan.accelerator.name} fits, nothing to write")
    head = f"{PLANNED}{plan.num_devices} x {plan.accelerator.name}; predicted, not measured.\n"
    overlay = plan.candidates[0].overlay(plan.config)
    try:
        if path.is_file() and path.stat().st_size and not path.read_bytes().startswith(PLANNED.encode()):
            raise ConfigError(f"--write: {path} exists and is no plan that was written before; choose another file")
        path.write_text(head + yaml.safe_dump(overlay, sort_keys=False))
    except OSError as error:
        raise ConfigError(f"--write: {path}: {error.strerror}; choose another file") from None
