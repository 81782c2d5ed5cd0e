"""Memory of all that ships: the estimate of `plan` beside the rehearsal.

python -m benchmarks memory --models mpt-125m,mpt-1b --out results
"""

import dataclasses
import hashlib
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llmfoundry_lite.config.layout import layout_of
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.schema import TrainConfig, as_dict
from llmfoundry_lite.config.shipped import shipped_folder
from llmfoundry_lite.errors import EXIT_DONE, EXIT_USER, ConfigError
from llmfoundry_lite.estimate.memory import estimate_training_memory
from llmfoundry_lite.files import write_atomically
from llmfoundry_lite.hardware import GIB, MIB, Accelerator
from llmfoundry_lite.models.flops import count_parameters
from llmfoundry_lite.tables import Table
from llmfoundry_machines.bench.memory import PER_NODE, fits
from llmfoundry_planner.plan.search import find_sizes
from llmfoundry_planner.rehearse.device import find_device
from llmfoundry_planner.rehearse.fork_server import ForkServer
from llmfoundry_planner.rehearse.rehearse import rank_of_fullest
from llmfoundry_planner.rehearse.search import sized_batch

LARGE = 1024
COMMON = "h100-8"
"""Overlay whose rows come first."""
COUNTS = [1, 2, 4, *range(8, 1025, 8)]
MAX_EXCESS = 0.05
"""By which the estimate may exceed the rehearsal. It is never below it."""
MAX_EXCESS_BYTES = 8 * MIB
"""Or by so much, where that is more: of a model that takes 50 MiB."""
HEADINGS = ["model", "hardware", "devices", "microbatch", "rehearsed, GiB", "estimate, GiB", "difference"]


class Case(NamedTuple):
    model: str
    overlays: list[str]
    """Those that lead to the same run, each a device's or `DEVICE + LAYOUT`; the last one's device is rehearsed."""
    device: Accelerator
    arguments: list[str]
    num_devices: int
    microbatch_size: int
    run: str = ""
    """A digest of the run with all its settings: a rehearsal of another is none of this."""


def find_cases(models: Sequence[str], overlays: Sequence[str], devices: Sequence[str]) -> list[Case]:
    """Each model x overlay x count, with the largest microbatch that the estimate gives room for. Raises ConfigError.

    `devices`: numbers, or `smallest`, the fewest on which one sample fits. Batches are short: two microbatches.
    """
    found: dict[str, Case] = {}
    for model in models:
        for overlay in overlays:
            device = find_device(overlay.split(" + "), None)
            config = load_train_config([model, *overlay.split(" + ")]).config
            counts = [smallest_count(config, device) if count == "smallest" else int(count) for count in devices]
            for num_devices in dict.fromkeys(filter(None, counts)):
                case = find_case(model, overlay, device, config, num_devices)
                if case is None:
                    continue
                sized = load_train_config(case.arguments).config
                same = dataclasses.replace(sized, environment={}, run_name="", run_folder="")
                kind = json.dumps([as_dict(same), num_devices], default=str)
                known = found[kind].overlays if kind in found else []
                digest = hashlib.sha256(kind.encode()).hexdigest()[:16]
                found[kind] = case._replace(overlays=[*known, overlay], run=digest)
    return sorted(found.values(), key=turn_of)


def turn_of(case: Case) -> tuple[bool, bool]:
    """Sort the commonest overlay first, layouts last."""
    return any(" + " in overlay for overlay in case.overlays), COMMON not in case.overlays


def with_layouts(model: str, overlays: Sequence[str]) -> list[str]:
    """Return the overlays, and each with the model's own layouts for devices of so much memory."""
    found = list(overlays)
    for overlay in overlays:
        size = find_device([overlay], None).memory_bytes // GIB
        layouts = (name for name in shipped("layouts") if re.fullmatch(rf"{model}-\d+x{size}gb", name))
        found += [f"{overlay} + {name}" for name in layouts]
    return found


def find_case(model: str, overlay: str, device: Accelerator, config: TrainConfig, num_devices: int) -> Case | None:
    """Find the largest microbatch by the estimate; None where not even one sample fits."""
    if not can_be_divided(config, num_devices):
        return None
    num_ranks = layout_of(config, num_devices, min(PER_NODE, num_devices)).num_data_ranks
    batch = max(config.global_train_batch_size, num_ranks) // num_ranks * num_ranks
    fitting = [
        size
        for size in find_sizes(config, batch // num_ranks)
        if fits(dataclasses.replace(config, global_train_batch_size=batch), device, size, num_devices)
    ]
    if not fitting:
        return None
    size = max(fitting)
    arguments = [model, *overlay.split(" + "), *sized_batch(config, size, batch // num_ranks, num_ranks)]
    return Case(model, [overlay], device, arguments, num_devices, size)


def smallest_count(config: TrainConfig, device: Accelerator) -> int | None:
    batch = config.global_train_batch_size
    counts = (n for n in COUNTS if batch % n == 0 and can_be_divided(config, n))
    return next((n for n in counts if fits(config, device, 1, n)), None)


def can_be_divided(config: TrainConfig, num_devices: int) -> bool:
    try:
        layout_of(config, num_devices, min(PER_NODE, num_devices))
    except ConfigError:
        return False
    return True


def run(
    models: Sequence[str] = (),
    overlays: Sequence[str] = (),
    devices: Sequence[str] = ("smallest", "1024"),
    minutes: float = 600,
    out: Path | None = None,
) -> int:
    """Rehearse all cases but those that `out` has already, and print each as it is done.

    Returns exit code 2 when an estimate is below its rehearsal or more than 5 % above it. Raises ConfigError for a bad
    count.
    """
    for count in devices:
        if count != "smallest" and not (count.isdecimal() and int(count)):
            raise ConfigError(f"--devices: {count!r} given, expected numbers, or smallest")
    models, overlays = models or shipped("pretrain"), overlays or [n for n in shipped("hardware") if n != "cpu"]
    deadline, left_out, rows = time.monotonic() + 60 * minutes, [], []
    known = measured_before(out)
    print(*HEADINGS, sep="  ", flush=True)
    with ForkServer() as server:
        cases = [case for model in models for case in find_cases([model], with_layouts(model, overlays), devices)]
        for case in sorted(cases, key=turn_of):
            row = known.get(case.run)
            if row is None and time.monotonic() > deadline:
                left_out.append(f"{case.model} on {case.num_devices} x {', '.join(case.overlays)}")
                continue
            rows.append(describe(case, row["rehearsed"]) if row else compare(server, case))
            print(*cells(rows[-1]), sep="  ", flush=True)
            if out is not None:
                write_report(rows, out)
    if left_out:
        print(f"no time for: {'; '.join(left_out)}", flush=True)
    return EXIT_DONE if all(is_sound(row) for row in rows) else EXIT_USER


def compare(server: ForkServer, case: Case) -> dict[str, Any]:
    config = load_train_config(case.arguments).config
    layout = layout_of(config, case.num_devices, min(PER_NODE, case.num_devices))
    rank = case.num_devices - 1 if case.num_devices == LARGE else 0
    if layout.pipeline > 1:
        rank = rank_of_fullest(config, layout)
    outcome = server.rehearse(
        case.arguments,
        case.device,
        num_devices=case.num_devices,
        per_node=min(PER_NODE, case.num_devices),
        rank=rank,
        counts_operations=False,
    )
    error = "" if outcome.exit_code == EXIT_DONE else outcome.stderr.strip().splitlines()[-1]
    return describe(case, {**outcome.measurements, "seconds": outcome.seconds}, error)


def describe(case: Case, rehearsed: dict[str, Any], error: str = "") -> dict[str, Any]:
    config = load_train_config(case.arguments).config
    layout = layout_of(config, case.num_devices, min(PER_NODE, case.num_devices))
    estimate = estimate_training_memory(config, layout, case.device)
    return {
        "model": case.model,
        "overlays": sorted(case.overlays),
        "num_devices": case.num_devices,
        "microbatch_size": case.microbatch_size,
        "run": case.run,
        "num_parameters": count_parameters(config.model),
        "estimated_bytes": estimate.total_bytes,
        "estimate": dataclasses.asdict(estimate),
        "rehearsed": rehearsed,
        "error": error,
    }


def is_sound(row: dict[str, Any]) -> bool:
    if row["error"]:
        return False
    rehearsed_bytes = row["rehearsed"]["allocated_bytes"]
    return 0 <= row["estimated_bytes"] - rehearsed_bytes <= max(MAX_EXCESS * rehearsed_bytes, MAX_EXCESS_BYTES)


def difference(row: dict[str, Any]) -> float:
    return row["estimated_bytes"] / row["rehearsed"]["allocated_bytes"] - 1


def cells(row: dict[str, Any]) -> list[str]:
    first = [row["model"], ", ".join(row["overlays"]), f"{row['num_devices']:,}", str(row["microbatch_size"])]
    if row["error"]:
        return [*first, row["error"], f"{row['estimated_bytes'] / GIB:.2f}", ""]
    sizes = (row["rehearsed"]["allocated_bytes"], row["estimated_bytes"])
    return [*first, *(f"{size / GIB:.2f}" for size in sizes), f"{difference(row):+.1%}"]


def shipped(kind: str) -> list[str]:
    return sorted(path.stem for path in (shipped_folder("yamls") / kind).glob("*.yaml"))


def read_report(folder: Path | None) -> list[dict[str, Any]]:
    path = folder / "memory.json" if folder is not None else None
    return json.loads(path.read_text())["rows"] if path is not None and path.is_file() else []


def measured_before(folder: Path | None) -> dict[str, dict[str, Any]]:
    """Return digest of a run -> its row, without failed rehearsals."""
    return {row["run"]: row for row in read_report(folder) if not row["error"]}


def write_report(rows: list[dict[str, Any]], folder: Path) -> None:
    """Write memory.json and memory.md. Earlier rows of other models, overlays or counts stay."""
    folder.mkdir(parents=True, exist_ok=True)
    new = {combination for row in rows for combination in combinations_of(row)}
    old = [row for row in read_report(folder) if not new & combinations_of(row)]
    keys = ("num_parameters", "model", "num_devices", "overlays")
    rows = sorted([*old, *rows], key=lambda row: [row[key] for key in keys])
    lines = ",\n".join(json.dumps(row) for row in rows)  # a line for each, so that a diff of two can be read
    write_atomically(folder / "memory.json", f'{{"rows": [\n{lines}\n]}}\n')
    lines = [
        "# Memory: the estimate compared with the rehearsal",
        "",
        "`python -m benchmarks memory --out results`, without a GPU. Each run has the largest microbatch that fits",
        "by the estimate: on the fewest devices on which one sample fits (rank 0), and on 1,024 devices (the last",
        "rank). Of a pipeline, the first rank of the fullest stage is rehearsed. `+` adds a file of",
        "`yamls/layouts`. If several overlays lead to the same run, the last one's device is rehearsed. The",
        "estimate must never be below the rehearsal, and at most 5 % above it, or 8 MiB if that is more. AMD's",
        "memory sizes are rehearsed on NVIDIA's runtime.",
        "",
        *Table("", HEADINGS, [cells(row) for row in rows]).markdown(),
    ]
    write_atomically(folder / "memory.md", "\n".join(lines) + "\n")


def combinations_of(row: dict[str, Any]) -> set[tuple[str, int, str]]:
    return {(row["model"], row["num_devices"], overlay) for overlay in row["overlays"]}
