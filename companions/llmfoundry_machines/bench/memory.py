"""Memory of a training run on this machine's GPU, beside its rehearsal and the estimate.

llmfoundry-lite bench memory --minutes 2 --out runs/gpu-check
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
    """Run each model for real and rehearsed; print a table and what is left out; write memory.json and .md to `out`.

    A microbatch has as many samples as fit: 1, 2, 4 or 8, and not above `most`. Returns exit code 1 when a run fails.
    Raises ConfigError without a GPU of the hardware table.
    """
    device = accelerator()
    if device is None:
        raise ConfigError(
            f"bench memory: {device_name()} is not a GPU in the hardware table; `llmfoundry-lite rehearse` needs none"
        )
    cases = []
    for variant, overrides in VARIANTS.items():  # each model as it is, before any other
        for model in models or MODELS:
            config = load_train_config([model]).config
            size = max(n for n in (1, 2, 4, 8) if n == 1 or (n <= most and fits(config, device, n, 1)))
            name = f"{model} {variant}".strip()
            cases.append((name, (name, [model, *overrides, *short_batch(size, 2 * size, 1)], device, size)))
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


def fits(config: TrainConfig, device: Accelerator, size: int, num_devices: int) -> bool:
    """Estimate whether a microbatch of `size` leaves the device the room that a rehearsal does not count."""
    sized = dataclasses.replace(config, device_train_microbatch_size=size)
    layout = layout_of(sized, num_devices, min(PER_NODE, num_devices))
    needed = estimate_training_memory(sized, layout, device).total_bytes
    return needed <= device.free_bytes - UNREHEARSED_BYTES


def compare(server: ForkServer, name: str, arguments: list[str], device: Accelerator, size: int) -> dict[str, Any]:
    with ThreadPoolExecutor(1) as pool:  # one needs the device, the other a core
        started = pool.submit(run_for_real, arguments)
        rehearsed = server.rehearse(arguments, device, num_devices=1, per_node=1, counts_operations=False)
    real = started.result()
    failed = next((outcome for outcome in (real, rehearsed) if outcome.exit_code != EXIT_DONE), None)
    return {
        "model": name,
        "microbatch_size": size,
        "estimated_bytes": estimate_training_memory(load_train_config(arguments).config, Layout(), device).total_bytes,
        "real": real.measurements,
        "rehearsed": rehearsed.measurements,
        "error": failed.stderr.strip().splitlines()[-1] if failed else "",
    }
