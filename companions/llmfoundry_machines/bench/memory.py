"""Memory of a training run on this machine's GPU, beside its rehearsal and the estimate.

llmfoundry-lite bench memory --minutes 2 --out runs/gpu-check

A rehearsal (`llmfoundry_planner`) runs the training code without a GPU, and counts what it would allocate. The estimate
is computed from the configuration alone. This bench shows how close both are to the memory of a short real run.
"""

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from llmfoundry_lite.config.layout import Layout, layout_of
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.devices import accelerator, device_name
from llmfoundry_lite.errors import EXIT_DONE, EXIT_FAILURE, ConfigError
from llmfoundry_lite.estimate.memory import estimate_training_memory
from llmfoundry_lite.hardware import GIB, Accelerator
from llmfoundry_machines.bench.frame import (
    Column,
    describe_conditions,
    note_left_out,
    open_console,
    tabulate,
    tell,
    within_minutes,
)
from llmfoundry_planner.rehearse.fork_server import ForkServer, run_for_real
from llmfoundry_planner.rehearse.search import UNREHEARSED_BYTES, short_batch

PER_NODE = 8
"""Devices of a node, for the layout of a run on several devices."""
MODELS = ("mpt-125m", "mpt-350m", "mpt-1b")
VARIANTS = {"": [], "ALiBi": ["model.attn_config.alibi=true"], "compiled": ["compile_config={}"]}
COLUMNS: list[Column] = [
    ("model", "{model}"),
    ("microbatch", "{microbatch_size}"),
    ("real, GiB", lambda row: f"{row['real']['allocated_bytes'] / GIB:.2f}"),
    ("rehearsed, GiB", lambda row: f"{row['rehearsed']['allocated_bytes'] / GIB:.2f}"),
    ("difference", lambda row: f"{row['rehearsed']['allocated_bytes'] / row['real']['allocated_bytes'] - 1:+.2%}"),
    ("estimate, GiB", lambda row: f"{row['estimated_bytes'] / GIB:.2f}"),
    (
        "reserved, GiB",
        lambda row: " and ".join(f"{row[side]['reserved_bytes'] / GIB:.2f}" for side in ("real", "rehearsed")),
    ),
]


def run(models: Sequence[str] = (), minutes: float = 3, most: int = 8, out: Path | None = None) -> int:
    """Run each model for real and rehearsed, and print a table and the cases that there was no time for.

    `models` are configurations, by default MODELS. Each is run with each of VARIANTS, and with microbatches of the most
    samples that fit: 1, 2, 4 or 8, but no more than `most`. With `out`, writes memory.json and .md there.

    Returns the exit code, which is EXIT_FAILURE if a run failed. Raises ConfigError if the GPU is not in the hardware
    table.
    """
    device = accelerator()
    if device is None:
        raise ConfigError(
            f"bench memory: {device_name()} is not a GPU in the hardware table; `llmfoundry-lite rehearse` needs none"
        )

    cases = []
    # Variants are the outer loop, so that all models are measured without changes before the time is up.
    for variant, overrides in VARIANTS.items():
        for model in models or MODELS:
            config = load_train_config([model]).config
            microbatch_size = 1
            for size in (2, 4, 8):
                if size <= most and fits(config, device, size, 1):
                    microbatch_size = size
            name = f"{model} {variant}".strip()
            # A batch of two microbatches takes as much memory as a batch of many.
            arguments = [model, *overrides, *short_batch(microbatch_size, 2 * microbatch_size, 1)]
            cases.append((name, (name, arguments, device, microbatch_size)))

    left_out = list[str]()
    with ForkServer() as server:
        rows = [compare(server, *case) for case, _ in within_minutes(minutes, cases, open_console(), left_out)]
    tell(
        describe_conditions() | {"rows": rows, "left_out": left_out},
        tabulate(f"memory on one {device.name}", COLUMNS, rows, num_keys=2),
        note_left_out(left_out),
        name="memory",
        heading=f"Memory on one {device.name}",
        command="llmfoundry-lite bench memory",
        out=out,
    )
    return EXIT_FAILURE if any(row["error"] for row in rows) else EXIT_DONE


def fits(config: TrainConfig, device: Accelerator, microbatch_size: int, num_devices: int) -> bool:
    """Estimate whether microbatches of a size fit into a device's memory, with room for what a rehearsal cannot count.

    `microbatch_size` is in samples of each device.
    """
    config = dataclasses.replace(config, device_train_microbatch_size=microbatch_size)
    layout = layout_of(config, num_devices, min(PER_NODE, num_devices))
    estimated_bytes = estimate_training_memory(config, layout, device).total_bytes
    return estimated_bytes <= device.free_bytes - UNREHEARSED_BYTES


def compare(
    server: ForkServer, name: str, arguments: list[str], device: Accelerator, microbatch_size: int
) -> dict[str, Any]:
    """Run a configuration for real and rehearsed at once, and return its row. `error` is empty if both succeed.

    `arguments` are those of a training run, and `name` is what the table calls it.
    """
    # The real run needs the device, and the rehearsal a core, so they do not disturb each other.
    with ThreadPoolExecutor(1) as pool:
        real_run = pool.submit(run_for_real, arguments)
        rehearsed = server.rehearse(arguments, device, num_devices=1, per_node=1, counts_operations=False)
    real = real_run.result()

    error = ""
    for outcome in (rehearsed, real):
        if outcome.exit_code != EXIT_DONE:
            error = outcome.stderr.strip().splitlines()[-1]
    estimate = estimate_training_memory(load_train_config(arguments).config, Layout(), device)
    return {
        "model": name,
        "microbatch_size": microbatch_size,
        "estimated_bytes": estimate.total_bytes,
        "real": real.measurements,
        "rehearsed": rehearsed.measurements,
        "error": error,
    }
