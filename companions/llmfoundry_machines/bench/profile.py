"""Time of a training step by what it went into: a table from a trace of torch's profiler, which adds up to the step.

llmfoundry-lite bench profile mpt-125m variables.data=data/c4 --out results
llmfoundry-lite bench profile runs/mpt-1b/traces/rank0.ba6.json

`training/monitor.py` makes the trace. Each moment of a step counts for one kind:

    computing      what the device computes; on a CPU, the operation of the main thread
    exposed        nothing is computed, and a collective is under way
    data           neither of these, and the main thread waits for the loader
    host           none of these

Hidden collectives run beside the computing. The table names them below the sum.
"""

import json
import re
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmfoundry_lite.errors import DataError
from llmfoundry_lite.report.log import SECONDS
from llmfoundry_lite.report.reading import read_run
from llmfoundry_lite.tables import Table
from llmfoundry_machines.bench.frame import describe_conditions, drawn, measured_table, tell
from llmfoundry_machines.bench.steps import train_on_ranks

OPTIMIZER, ATTENTION, PRODUCTS, REST = "optimizer", "attention", "matrix products", "norms and the rest"
EXPOSED, DATA, HOST, HIDDEN = "collectives, exposed", "waiting for data", "host", "collectives, hidden"
PARTS = (PRODUCTS, ATTENTION, REST, OPTIMIZER, EXPOSED, DATA, HOST)
"""In the order of the table; together they are the step."""
COLOURS = ("#4c72b0", "#8172b3", "#55a868", "#937860", "#c44e52", "#dd8452", "#8c8c8c")
COMPUTING = (OPTIMIZER, ATTENTION, PRODUCTS, REST)
"""Where one is within another, the first of these counts."""
COLLECTIVE = "collective"

STEP = re.compile(r"ProfilerStep#\d+")
KINDS = {
    COLLECTIVE: re.compile(r"^(gloo|nccl|rccl|c10d|_c10d_functional)(:|Dev|Kernel)", re.IGNORECASE),
    DATA: re.compile(r"^enumerate\(DataLoader\)"),
    OPTIMIZER: re.compile(r"^Optimizer\.step#"),
    ATTENTION: re.compile(r"attention|flash_fwd|flash_bwd|fmha", re.IGNORECASE),
    PRODUCTS: re.compile(
        r"^(aten|llmfoundry_lite|mkldnn|mkl)::"
        r"(_?mm|addmm\w*|bmm|baddbmm|linear|matmul|product|_scaled_mm|_?\w*linear\w*)$"
    ),
    # Operations of torch or a library, without the wrappers around them.
    REST: re.compile(r"^(?!autograd::|torch::autograd::|FSDP::)\w+::\w+|^Torch-Compiled Region"),
}
"""Names of calls; the first that fits counts."""
IS_PRODUCT_KERNEL = re.compile(r"gemm|cutlass|nvjet|Cijk_|splitK|wgmma", re.IGNORECASE)

Interval = tuple[float, float]
"""Begin and end, in microseconds."""
Steps = list[dict[str, float]]
"""Part -> seconds, for each step of a trace."""


def run(arguments: Sequence[str], num_ranks: int = 1, active: int = 3, out: Path | None = None) -> None:
    """Print a table of each trace, or of a training run that is started here and traced for `active` batches.

    Writes profile.json, .md and .png to `out`, beside the traces of a run that was started.
    Raises DataError for traces that hold no step, and for a run that fails.
    """
    traces = [Path(name) for name in arguments if name.endswith(".json") and Path(name).is_file()]
    unprofiled = None
    with tempfile.TemporaryDirectory() as scratch:
        if not traces:
            folder = out or Path(scratch)
            unprofiled = trace_run(arguments, num_ranks, active, Path(scratch) / "run", folder)
            traces = sorted(folder.glob("rank*.ba*.json"))
        found = {path.name: break_down(read_trace(path)) for path in traces}
    names = [Path(argument).name if Path(argument).is_file() else argument for argument in arguments]
    report = describe_conditions() | {
        "arguments": names,
        "num_ranks": num_ranks,
        "unprofiled_seconds": unprofiled,
        "traces": found,
    }
    notes = []
    if unprofiled is not None:
        slower = statistics.fmean(map(mean_step, found.values())) / unprofiled - 1
        step = f"Without the profiler, a step of the same run took {unprofiled:.4f} s (the median)"
        notes = [f"{step}: tracing took {slower:+.0%}."]
    ranks = f" --num-ranks {num_ranks}" if unprofiled is not None else ""
    tell(
        report,
        *(build_table(name, steps) for name, steps in found.items()),
        notes,
        name="profile",
        heading="Where a step's time goes",
        command=f"llmfoundry-lite bench profile {' '.join(names)}{ranks}",
        asked=["num_ranks"],
        plot=plot,
        out=out,
    )


def trace_run(arguments: Sequence[str], num_ranks: int, active: int, run_folder: Path, traces: Path) -> float:
    """Train a few batches with a trace of each rank. Return the median seconds of the batches before the traced ones.

    Whatever the YAML says, nothing is exported and the run's folder is `run_folder`. Raises DataError if it fails.
    """
    before = 3
    changes = [
        f"callbacks.profiler={{wait: {before}, warmup: 1, active: {active}, all_ranks: true, folder: {traces}}}",
        f"max_duration={before + 1 + active + 1}ba",  # one more, since a batch ends with fetching the next
        f"run_folder={run_folder}",
        "export_at_end=false",
        "eval_interval=0",
        "log_to_console=false",
    ]
    try:
        train_on_ranks(num_ranks, [*arguments, *changes])
    except RuntimeError as error:
        raise DataError(f"bench profile: the run failed: {str(error).splitlines()[0]}") from None
    log = read_run(str(run_folder)).log
    return float(statistics.median(log.numbers(SECONDS)[1:before].tolist()))


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Read the events that have a duration. Raises DataError for a file that is no trace."""
    try:
        events = json.loads(path.read_text())["traceEvents"]
        return [event for event in events if event.get("ph") == "X" and {"name", "dur"} <= event.keys()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise DataError(f"{path}: is not a trace of torch's profiler (export_chrome_trace)") from None


def break_down(events: Sequence[dict[str, Any]]) -> Steps:
    """Divide each step into its parts. Raises DataError for events without a step."""
    spans = [event for event in events if STEP.fullmatch(event["name"]) and event.get("cat") == "user_annotation"]
    if not spans:
        raise DataError("the trace has no ProfilerStep: call the profiler's step() after each batch")
    intervals = classify(events, (spans[0]["pid"], spans[0]["tid"]))
    return [divide(intervals, interval_of(span)) for span in spans]


def mean(steps: Steps, part: str) -> float:
    return statistics.fmean(step[part] for step in steps)


def mean_step(steps: Steps) -> float:
    return sum(mean(steps, part) for part in PARTS)


# ------------------------------------------------------------------------------------------ events -> intervals


def classify(events: Sequence[dict[str, Any]], main: tuple[Any, Any]) -> dict[str, list[Interval]]:
    """Return kind -> intervals. With kernels of a device in the trace, these compute; else the main thread."""
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    found: dict[str, list[Interval]] = {kind: [] for kind in (*COMPUTING, COLLECTIVE, DATA)}
    kinds = dict[Any, str | None]()
    for thread in {(event["pid"], event["tid"]) for event in events}:
        calls = [e for e in events if (e["pid"], e["tid"]) == thread and e.get("cat") in ("cpu_op", "user_annotation")]
        for event, kind in with_kinds(calls):
            kinds[event.get("args", {}).get("External id")] = kind
            is_counted = {DATA: thread == main, COLLECTIVE: not kernels}
            if kind is not None and is_counted.get(kind, thread == main and not kernels):
                found[kind].append(interval_of(event))
    for kernel in kernels:
        kind = kind_of_kernel(kernel["name"], kinds.get(kernel.get("args", {}).get("External id")))
        found[kind].append(interval_of(kernel))
    return found


def with_kinds(calls: Iterable[dict[str, Any]]) -> Iterable[tuple[dict[str, Any], str | None]]:
    """Yield each call of a thread with its kind, or with its caller's kind if that comes first in COMPUTING."""
    above: list[tuple[float, str | None]] = []
    for event in sorted(calls, key=lambda event: (event["ts"], -event["dur"])):
        while above and above[-1][0] <= event["ts"]:
            above.pop()
        own, outer = kind_of_call(event["name"]), above[-1][1] if above else None
        kind = min((k for k in (own, outer) if k in COMPUTING), key=COMPUTING.index, default=own or outer)
        if own == COLLECTIVE:  # it may end long after its caller, and calls nothing
            yield event, COLLECTIVE
            continue
        above.append((event["ts"] + event["dur"], kind))
        yield event, kind


def kind_of_call(name: str) -> str | None:
    return next((kind for kind, pattern in KINDS.items() if pattern.search(name)), None)


def kind_of_kernel(name: str, launched_by: str | None) -> str:
    """Return a kernel's kind: collective by its name, else its launching call's, else by its name."""
    if KINDS[COLLECTIVE].search(name):
        return COLLECTIVE
    if launched_by in (OPTIMIZER, ATTENTION, PRODUCTS):
        return launched_by
    return ATTENTION if KINDS[ATTENTION].search(name) else PRODUCTS if IS_PRODUCT_KERNEL.search(name) else REST


def interval_of(event: dict[str, Any]) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


# ------------------------------------------------------------------------------------------ intervals -> seconds


def divide(intervals: dict[str, list[Interval]], span: Interval) -> dict[str, float]:
    """Return seconds of each part of one step. All but the hidden collectives add up to the span."""
    times = [time for kind in intervals.values() for interval in kind for time in interval]
    edges = np.unique(np.clip([*span, *times], *span))
    seconds, is_free = np.diff(edges) / 1e6, np.ones(len(edges) - 1, bool)
    parts = {}
    for kind, part in (*((kind, kind) for kind in COMPUTING), (COLLECTIVE, EXPOSED), (DATA, DATA)):
        begins, ends = np.searchsorted(edges, np.clip(np.reshape(intervals[kind], (-1, 2)), *span)).T
        num_open = np.cumsum(np.bincount(begins, minlength=len(edges)) - np.bincount(ends, minlength=len(edges)))
        is_covered = num_open[:-1] > 0
        parts[part] = float(seconds[is_covered & is_free].sum())
        if kind == COLLECTIVE:
            parts[HIDDEN] = float(seconds[is_covered & ~is_free].sum())
        is_free &= ~is_covered
    return {**parts, HOST: float(seconds[is_free].sum())}


# ------------------------------------------------------------------------------------------------------ the report


def build_table(name: str, steps: Steps) -> Table:
    total = mean_step(steps)
    found = {part: mean(steps, part) for part in PARTS} | {"a step": total}
    found[f"{HIDDEN}: beside the computing"] = mean(steps, HIDDEN)
    rows = [[part, f"{seconds:.4f}", f"{seconds / total:.1%}"] for part, seconds in found.items()]
    return measured_table(f"{name}, the mean of {len(steps)} steps", ["part", "seconds", "share"], rows)


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw a bar for each trace, its parts one after the other."""
    found = report["traces"]
    left = np.zeros(len(found))
    with drawn(path, 1, (9, 1.4 + 0.6 * len(found))) as (axes,):
        for part, colour in zip(PARTS, COLOURS, strict=True):
            widths = np.array([mean(steps, part) for steps in found.values()])
            axes.barh([name.removesuffix(".json") for name in found], widths, 0.6, left, color=colour, label=part)
            left += widths
        axes.invert_yaxis()
        axes.set_xlabel("seconds of a step")
        axes.spines[["top", "right"]].set_visible(False)
        axes.figure.legend(frameon=False, fontsize=8, loc="outside upper center", ncols=4)
