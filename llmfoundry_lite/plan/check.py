"""The planner beside what was measured: a finished run, and a device's own rate of matrix products. No torch."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from llmfoundry_lite.config.layout import divide_devices
from llmfoundry_lite.config.schema import ContextParallelConfig, PipelineConfig, TrainConfig
from llmfoundry_lite.errors import ConfigError, DataError
from llmfoundry_lite.hardware import Accelerator, find_accelerator
from llmfoundry_lite.plan.network import find_node
from llmfoundry_lite.plan.search import work_of
from llmfoundry_lite.plan.step import Shares, step_time

REPORT_SCHEMA = 1
"""As `bench.frame.SCHEMA`, which needs torch."""
PRODUCTS = "matrix products"
"""The name of those rows in the report of `bench mfu`."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Measured:
    """A span of batches of a run, as its checkpoint and its log tell."""

    batches: str
    accelerator: Accelerator
    num_devices: int
    strategy: str
    shard_degree: int | None
    """HYBRID_SHARD: devices that share one copy."""
    tensor: int
    microbatch_size: int
    tokens_per_second: float
    """Of each device."""
    pipeline: PipelineConfig | None = None
    context: ContextParallelConfig | None = None


def stages_told(words: str | None, config: TrainConfig) -> PipelineConfig | None:
    """`4 stages, 1f1b`, as a checkpoint tells of a span: the run's own stages where they are the same."""
    if words is None:
        return None
    degree, schedule = words.split(" stages, ")
    same = (config.pipeline.pipeline_parallel_degree, config.pipeline.schedule) == (int(degree), schedule)
    return config.pipeline if same else PipelineConfig(pipeline_parallel_degree=int(degree), schedule=schedule)


def parts_told(words: str | None) -> ContextParallelConfig | None:
    """`2, heads`"""
    if words is None:
        return None
    degree, kind = words.split(", ")
    return ContextParallelConfig(context_parallel_degree=int(degree), kind=kind)


def predict(config: TrainConfig, measured: Measured) -> float:
    """Tokens per second of each device, as `plan` would say it for this span. Raises ConfigError."""
    node = find_node(measured.accelerator.name)
    fsdp = replace(
        config.sharding, sharding_strategy=measured.strategy, data_parallel_shard_degree=measured.shard_degree
    )
    config = replace(config, pp_config=measured.pipeline, cp_config=measured.context)
    layout = divide_devices(
        *(fsdp, measured.num_devices, node.num_devices, measured.tensor),
        pipeline=config.pipeline.pipeline_parallel_degree,
        context=config.context.context_parallel_degree,
    )
    work = work_of(config, measured.strategy, measured.microbatch_size, config.sharding.activation_checkpointing)
    return step_time(work, layout, measured.accelerator, node).tokens_per_second / measured.num_devices


def describe_check(config: TrainConfig, spans: Sequence[Measured], left_out: Sequence[str]) -> str:
    """One line for each span, the prediction beside the measurement, and a line for each that has no prediction."""
    lines = [f"{config.run_name}: tokens/s of each device", "   batches  devices             measured  predicted"]
    for span in spans:
        try:
            predicted = predict(config, span)
        except ConfigError as error:
            lines.append(f"{span.batches}: no prediction: {error}")
            continue
        devices = f"{span.num_devices} x {span.accelerator.name}"
        lines.append(
            f"{span.batches:>10}  {devices:<18}{span.tokens_per_second:>10,.0f}{predicted:>11,.0f}  "
            f"{predicted / span.tokens_per_second - 1:+.1%}"
        )
    return "\n".join([*lines, *left_out])


def calibrate(shares: Shares, path: Path, accelerator: Accelerator) -> Shares:
    """The shares, with the rate of matrix products that `llmfoundry-lite bench mfu --out` has measured on this device.

    Raises DataError for a file that is no such report, ConfigError for a device whose peak is not known, and for
    another one.
    """
    try:
        report = json.loads(path.read_text())
        schema = report.get("schema", REPORT_SCHEMA)
        rates = [
            float(row["flops_per_sec"]) for row in report["rows"] if row["step"] == PRODUCTS and "error" not in row
        ]
        peak, device = report["peak_flops"], report["device"]
    except OSError as error:
        raise DataError(f"--calibrate: {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError(f"--calibrate: {path} is no report of `llmfoundry-lite bench mfu` (mfu.json)") from None
    if not peak:
        raise ConfigError(f"--calibrate: {path} was measured on {device}, whose peak is not in the table")
    if schema != REPORT_SCHEMA:
        raise DataError(
            f"--calibrate: {path} has schema {schema}, this release reads {REPORT_SCHEMA}; measure again: "
            "llmfoundry-lite bench mfu --out FOLDER"
        )
    if (row := find_accelerator(device)) is not None and row.name != accelerator.name:
        raise ConfigError(f"--calibrate: {path} was measured on {row.name}, --hardware says {accelerator.name}")
    if not rates:
        raise DataError(f"--calibrate: {path} has no rate of matrix products")
    products = median(rates) / peak
    if not 0 < products <= 1:
        raise DataError(
            f"--calibrate: {path}: matrix products at {products:.0%} of the peak of {device}; measure again"
        )
    return replace(shares, products=products, source=f"products measured on {device}, {path.name}")
