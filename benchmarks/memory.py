"""Compare the planner's estimate of memory with the rehearsal, for all models, devices and layouts that ship.

    python -m benchmarks memory --models mpt-125m,mpt-1b --out results

A rehearsal runs a step without a GPU and counts what is allocated. The estimate must never be below it, and not far
above.

A `Case` is one run to rehearse. `find_cases` makes them from models x overlays x numbers of devices, `compare`
rehearses one, and `describe` makes its row of the report. Rows of a run that `--out` has already are not rehearsed
again; only their estimate is made anew.
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
"""Number of devices on which the last rank is rehearsed instead of the first."""
COMMON = "h100-8"
"""Overlay whose cases are rehearsed first."""
COUNTS = [1, 2, 4, *range(8, 1025, 8)]
"""Numbers of devices that are tried for `smallest`."""
MAX_EXCESS = 0.05
"""Share of the rehearsal by which the estimate may exceed it. It must never be below it."""
MAX_EXCESS_BYTES = 8 * MIB
"""An excess that is always allowed, because 5 % of a small model, such as one of 50 MiB, is next to nothing."""
HEADINGS = ["model", "hardware", "devices", "microbatch", "rehearsed, GiB", "estimate, GiB", "difference"]


class Case(NamedTuple):
    """One run to rehearse: a model on a number of devices, with the largest microbatch that fits by the estimate."""

    model: str
    overlays: list[str]
    """All that lead to the same run. Each is a device's overlay, or `DEVICE + LAYOUT`."""
    device: Accelerator
    """The device of the last overlay, which is the one that is rehearsed."""
    arguments: list[str]
    """Arguments of `llmfoundry-lite train`."""
    num_devices: int
    microbatch_size: int
    run: str = ""
    """Digest of the run with all its settings. A rehearsal with another digest is one of another run."""


def find_cases(models: Sequence[str], overlays: Sequence[str], devices: Sequence[str]) -> list[Case]:
    """Return the cases of each model x overlay x number of devices that can be run, those of common overlays first.

    `devices` are numbers, or `smallest`: the fewest devices on which one sample fits. Batches are short, with two
    microbatches. Overlays that lead to the same run are put together in one case. Raises ConfigError.
    """
    cases: dict[str, Case] = {}
    for model in models:
        for overlay in overlays:
            device = find_device(overlay.split(" + "), None)
            config = load_train_config([model, *overlay.split(" + ")]).config
            counts = [smallest_count(config, device) if count == "smallest" else int(count) for count in devices]
            for num_devices in dict.fromkeys(filter(None, counts)):
                case = find_case(model, overlay, device, config, num_devices)
                if case is None:
                    continue

                # Two runs are the same if they differ only in what has no influence on memory.
                sized = load_train_config(case.arguments).config
                comparable = dataclasses.replace(sized, environment={}, run_name="", run_folder="")
                run_text = json.dumps([as_dict(comparable), num_devices], default=str)
                known_overlays = cases[run_text].overlays if run_text in cases else []
                digest = hashlib.sha256(run_text.encode()).hexdigest()[:16]
                cases[run_text] = case._replace(overlays=[*known_overlays, overlay], run=digest)
    return sorted(cases.values(), key=turn_of)


def turn_of(case: Case) -> tuple[bool, bool]:
    """Return the sort key of a case: layouts last, and the common overlay first among the others."""
    return any(" + " in overlay for overlay in case.overlays), COMMON not in case.overlays


def with_layouts(model: str, overlays: Sequence[str]) -> list[str]:
    """Return the overlays, and after them each overlay with the model's own layouts for devices of this size."""
    combinations = list(overlays)
    for overlay in overlays:
        size = find_device([overlay], None).memory_bytes // GIB
        layouts = (name for name in shipped("layouts") if re.fullmatch(rf"{model}-\d+x{size}gb", name))
        combinations += [f"{overlay} + {name}" for name in layouts]
    return combinations


def find_case(model: str, overlay: str, device: Accelerator, config: TrainConfig, num_devices: int) -> Case | None:
    """Return the case of a model on this many devices of this kind, or None if not even one sample fits.

    The global batch is reduced to a multiple of the ranks that hold data, or raised to one sample for each.
    """
    if not can_be_divided(config, num_devices):
        return None
    num_ranks = layout_of(config, num_devices, min(PER_NODE, num_devices)).num_data_ranks
    batch_size = max(config.global_train_batch_size, num_ranks) // num_ranks * num_ranks
    fitting_sizes = [
        size
        for size in find_sizes(config, batch_size // num_ranks)
        if fits(dataclasses.replace(config, global_train_batch_size=batch_size), device, size, num_devices)
    ]
    if not fitting_sizes:
        return None
    size = max(fitting_sizes)
    arguments = [model, *overlay.split(" + "), *sized_batch(config, size, batch_size // num_ranks, num_ranks)]
    return Case(model, [overlay], device, arguments, num_devices, size)


def smallest_count(config: TrainConfig, device: Accelerator) -> int | None:
    """Return the smallest of COUNTS on which one sample fits and which divides the global batch, or None."""
    batch_size = config.global_train_batch_size
    counts = (
        num_devices for num_devices in COUNTS if batch_size % num_devices == 0 and can_be_divided(config, num_devices)
    )
    return next((num_devices for num_devices in counts if fits(config, device, 1, num_devices)), None)


def can_be_divided(config: TrainConfig, num_devices: int) -> bool:
    """Return whether this run's layout can be placed on this number of devices."""
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
    """Rehearse all cases except those that `out` has already, and print each when it is done.

    `models` and `overlays` default to all that ship, except the CPU. `devices` are as in `find_cases`. No rehearsal
    starts after `minutes`; the cases left out are named, and a later call with the same `out` goes on from there.

    Returns exit code 2 if an estimate is below its rehearsal or too far above it, otherwise 0. Raises ConfigError for a
    bad number of devices.
    """
    for count in devices:
        if count != "smallest" and not (count.isdecimal() and int(count)):
            raise ConfigError(f"--devices: {count!r} given, expected numbers, or smallest")
    models = models or shipped("pretrain")
    overlays = overlays or [name for name in shipped("hardware") if name != "cpu"]

    deadline = time.monotonic() + 60 * minutes
    left_out, rows = [], []
    rows_by_run = measured_before(out)
    print(*HEADINGS, sep="  ", flush=True)
    with ForkServer() as server:
        cases = [case for model in models for case in find_cases([model], with_layouts(model, overlays), devices)]
        for case in sorted(cases, key=turn_of):
            row = rows_by_run.get(case.run)
            if row is None and time.monotonic() > deadline:
                left_out.append(f"{case.model} on {case.num_devices} x {', '.join(case.overlays)}")
                continue
            # The estimate is made anew in any case: it is what this benchmark checks.
            rows.append(describe(case, row["rehearsed"]) if row else compare(server, case))
            print(*cells(rows[-1]), sep="  ", flush=True)
            if out is not None:
                write_report(rows, out)

    if left_out:
        print(f"no time for: {'; '.join(left_out)}", flush=True)
    return EXIT_DONE if all(is_sound(row) for row in rows) else EXIT_USER


def compare(server: ForkServer, case: Case) -> dict[str, Any]:
    """Rehearse a case, and return its row of the report. If the rehearsal fails, the row has the error's last line.

    The fullest rank is rehearsed: in a pipeline that of the fullest stage. On LARGE devices it is the last rank,
    otherwise the first.
    """
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
    """Return the row of the report: the case, the estimate, and what the rehearsal measured."""
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
    """Return whether the estimate is at least the rehearsal, and above it by no more than is allowed."""
    if row["error"]:
        return False
    rehearsed_bytes = row["rehearsed"]["allocated_bytes"]
    return 0 <= row["estimated_bytes"] - rehearsed_bytes <= max(MAX_EXCESS * rehearsed_bytes, MAX_EXCESS_BYTES)


def difference(row: dict[str, Any]) -> float:
    """Return estimate / rehearsal - 1."""
    return row["estimated_bytes"] / row["rehearsed"]["allocated_bytes"] - 1


def cells(row: dict[str, Any]) -> list[str]:
    """Format a row of the report under HEADINGS."""
    first_cells = [row["model"], ", ".join(row["overlays"]), f"{row['num_devices']:,}", str(row["microbatch_size"])]
    if row["error"]:
        return [*first_cells, row["error"], f"{row['estimated_bytes'] / GIB:.2f}", ""]
    sizes = (row["rehearsed"]["allocated_bytes"], row["estimated_bytes"])
    return [*first_cells, *(f"{size / GIB:.2f}" for size in sizes), f"{difference(row):+.1%}"]


def shipped(kind: str) -> list[str]:
    """Return the names of the YAML files that ship in this folder of yamls/."""
    return sorted(path.stem for path in (shipped_folder("yamls") / kind).glob("*.yaml"))


def read_report(folder: Path | None) -> list[dict[str, Any]]:
    """Return the rows of memory.json in this folder, or no rows if there is none."""
    path = folder / "memory.json" if folder is not None else None
    return json.loads(path.read_text())["rows"] if path is not None and path.is_file() else []


def measured_before(folder: Path | None) -> dict[str, dict[str, Any]]:
    """Return digest of a run -> its row, without failed rehearsals."""
    return {row["run"]: row for row in read_report(folder) if not row["error"]}


def write_report(rows: list[dict[str, Any]], folder: Path) -> None:
    """Write memory.json and memory.md. Earlier rows of other models, overlays or numbers of devices stay."""
    folder.mkdir(parents=True, exist_ok=True)
    new_combinations = {combination for row in rows for combination in combinations_of(row)}
    kept_rows = [row for row in read_report(folder) if not new_combinations & combinations_of(row)]
    keys = ("num_parameters", "model", "num_devices", "overlays")
    rows = sorted([*kept_rows, *rows], key=lambda row: [row[key] for key in keys])

    # One line for each row, so that a diff of two reports can be read.
    json_rows = ",\n".join(json.dumps(row) for row in rows)
    write_atomically(folder / "memory.json", f'{{"rows": [\n{json_rows}\n]}}\n')

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
    """Return every (model, number of devices, overlay) that this row stands for."""
    return {(row["model"], row["num_devices"], overlay) for overlay in row["overlays"]}
