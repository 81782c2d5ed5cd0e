"""The cost of `exact_sums`: time of a step and memory, beside the same run without it, step by step in turns.

python -m benchmarks exact-sums --out docs/measurements

Both runs live at the same time and pass each other the turn, so that a slow moment of the machine meets both. Each
ratio is of two neighbouring steps. The microbatch is the device's whole batch.
"""

import json
import os
import select
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from composer.core import Callback

from llmfoundry_lite.config.layout import layout_of
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.devices import peak_memory_bytes
from llmfoundry_lite.estimate.memory import estimate_training_memory
from llmfoundry_lite.hardware import GIB
from llmfoundry_machines.bench.frame import describe_conditions, measured_table, ratios, tell
from llmfoundry_machines.bench.steps import DTYPES, train_on_ranks, write_run

SIDES = {"false": "without", "true": "exact_sums"}
AIMS = {"fp32": 1.10, "bf16": 1.15}
"""Times a step without."""
MEMORY = (
    "The plan counts tensors on an accelerator. A process on a CPU has besides: Python with its libraries, gloo's copy "
    "of each buffer that is reduced, whole and in float64, and freed memory that it keeps."
)
EDGES = 1
"""Steps left out at both ends; beside the last one the other run saves."""
LONGEST_TURN_SECONDS = 7200


class TakeTurns(Callback):
    """Trains a batch when the other run has trained one; writes each batch's seconds, the processors' seconds of all
    ranks, and this rank's memory."""

    def __init__(self, mine: str, other: str) -> None:
        self.mine, self.other = (os.open(path, os.O_RDWR) for path in (mine, other))
        self.path, self.seconds = Path(f"{mine}.json"), []

    def batch_start(self, state: Any, logger: Any) -> None:
        if dist.get_rank() == 0:
            if not select.select([self.mine], [], [], LONGEST_TURN_SECONDS)[0]:
                raise RuntimeError("the other run has not passed the turn")
            os.read(self.mine, 1)
        dist.barrier()
        self.started = time.perf_counter(), time.process_time()

    def batch_end(self, state: Any, logger: Any) -> None:
        processor_seconds = torch.tensor(time.process_time() - self.started[1])
        dist.all_reduce(processor_seconds)
        self.seconds.append((time.perf_counter() - self.started[0], processor_seconds.item()))
        if dist.get_rank() == 0:
            self.path.write_text(json.dumps({"seconds": self.seconds, "peak_bytes": peak_memory_bytes()}))
            os.write(self.other, b".")


def run(
    shape: str = "125m",
    seq_len: int = 512,
    batch_size: int = 8,
    num_steps: int = 12,
    num_ranks: int = 2,
    *,
    sharding: str = "FULL_SHARD",
    out: Path | None = None,
) -> dict[str, Any]:
    """Train both sides in each precision, print a table, write exact-sums.json and .md to `out`, return the report."""
    settings = {"shape": shape, "seq_len": seq_len, "batch_size": batch_size, "num_steps": num_steps}
    report = describe_conditions() | settings | {"num_ranks": num_ranks, "sharding": sharding}
    report["sides"] = {dtype: measure(settings, dtype, num_ranks, sharding) for dtype in DTYPES}
    rows, notes, report["passed"] = [], [], True
    for dtype, (plain, exact) in report["sides"].items():
        times, processor_times = (ratios(exact[key], plain[key]) for key in ("seconds", "processor_seconds"))
        for name, side in zip(SIDES.values(), (plain, exact), strict=True):
            memory = [f"{side[key] / GIB:.2f}" for key in ("peak_bytes", "planned_bytes")]
            seconds = [f"{statistics.median(side[key]):.3f}" for key in ("seconds", "processor_seconds")]
            rows.append([f"{dtype}, {name}", *seconds, *memory])
        more = [(exact[key] - plain[key]) / GIB for key in ("peak_bytes", "planned_bytes")]
        notes += [
            f"a step with exact sums, {dtype}: {times} times one without (at most {AIMS[dtype]:.2f}); "
            f"of the processors' time {processor_times}",
            f"memory with exact sums, {dtype}: {more[0]:+.2f} GiB of a process, {more[1]:+.2f} of tensors by the plan",
        ]
        report["passed"] &= times.median <= AIMS[dtype]
    tell(
        report,
        measured_table(
            f"{shape}, {num_ranks} ranks, {sharding}, {batch_size} x {seq_len} tokens, {report['device']}, "
            f"the median of {num_steps} steps",
            ["run", "seconds", "processor seconds", "peak of a process, GiB", "planned, GiB"],
            rows,
        ),
        [*notes, MEMORY],
        name="exact-sums",
        heading="What exact sums cost",
        command="python -m benchmarks exact-sums",
        asked=("shape", "seq_len", "batch_size", "num_ranks", "sharding"),
        out=out,
    )
    return report


def measure(settings: dict[str, Any], dtype: str, num_ranks: int, sharding: str) -> list[dict[str, Any]]:
    """Train without and with exact sums, a batch each in turn."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        path = write_run(Path(folder), settings, dtype)
        pipes = {side: f"{folder}/{side}" for side in SIDES}
        for pipe in pipes.values():
            os.mkfifo(pipe)
        ends = {side: os.open(pipe, os.O_RDWR) for side, pipe in pipes.items()}
        os.write(ends["false"], b".")
        arguments = {
            side: [
                str(path),
                f"exact_sums={side}",
                f"run_folder={folder}/run-{side}",
                f"device_train_microbatch_size={settings['batch_size'] // num_ranks}",
                f"fsdp_config.sharding_strategy={sharding}",
                "loss_chunk_mib=64",  # both runs at once fit in 24 GiB
                f"dist_timeout={LONGEST_TURN_SECONDS}",
                f"callbacks={{'python:{__name__}:TakeTurns': {{mine: {pipes[side]}, other: {pipes[other]}}}}}",
            ]
            for side, other in (("false", "true"), ("true", "false"))
        }

        def train(side: str) -> None:
            try:
                train_on_ranks(num_ranks, arguments[side])
            finally:  # a run that ends, or dies, keeps the other one waiting no longer
                for end in ends.values():
                    os.write(end, b"." * (settings["num_steps"] + 2 * EDGES))

        list(pool.map(train, arguments))
        found = [json.loads(Path(f"{pipes[side]}.json").read_text()) for side in SIDES]
        for side, one in zip(SIDES, found, strict=True):
            config = load_train_config(arguments[side]).config
            estimate = estimate_training_memory(config, layout_of(config, num_ranks))
            one["seconds"], one["processor_seconds"] = zip(*one["seconds"][EDGES:-EDGES], strict=True)
            one["planned_bytes"] = estimate.total_bytes
    return found
