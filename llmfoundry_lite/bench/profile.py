"""Where the time of a training step goes: one table from a trace of torch's profiler, which adds up to the step.

llmfoundry-lite bench profile mpt-125m variables.data=data/c4 --out results
llmfoundry-lite bench profile runs/mpt-1b/traces/rank0.ba6.json

Owns the table. Leaves the tracing to `training/monitor.py`. At each moment of a step one thing alone is counted:

    computing      what the device computes; on a CPU, the operation of the main thread
    exposed        nothing is computed, and a collective is under way
    data           none of the two, and the main thread waits for the loader
    host           none of the three

Hidden collectives run beside the computing. They are told, and are no part of the sum.
"""

import json
import re
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from llmfoundry_lite.bench.frame import describe_conditions, measured_table, save_figure, tell
from llmfoundry_lite.bench.steps import train_on_ranks
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.report.reading import SECONDS, read_run
from llmfoundry_lite.report.tables import Table

OPTIMIZER, ATTENTION, PRODUCTS, REST = "optimizer", "attention", "matrix products", "norms and the rest"
EXPOSED, DATA, HOST, HIDDEN = "collectives, exposed", "waiting for data", "host", "collectives, hidden"
PARTS = (PRODUCTS, ATTENTION, REST, OPTIMIZER, EXPOSED, DATA, HOST)
"""In the order of the table; together they are the step."""
COLOURS = ("#4c72b0", "#8172b3", "#55a868", "#937860", "#c44e52", "#dd8452", "#8c8c8c")
COMPUTING = (OPTIMIZER, ATTENTION, PRODUCTS, REST)
"""Where one is within another, the first of these counts."""
COLLECTIVE = "collective"

STEP = re.compile(r"ProfilerStep#\d+")
IS_COLLECTIVE = re.compile(r"^(gloo|nccl|rccl|c10d|_c10d_functional)(:|Dev|Kernel)", re.IGNORECASE)
IS_DATA = re.compile(r"^enumerate\(DataLoader\)")
IS_OPTIMIZER = re.compile(r"^Optimizer\.step#")
IS_ATTENTION = re.compile(r"attention|flash_fwd|flash_bwd|fmha", re.IGNORECASE)
IS_PRODUCT = re.compile(
    r"^(aten|llmfoundry_lite|mkldnn|mkl)::(_?mm|addmm\w*|bmm|baddbmm|linear|matmul|product|_scaled_mm|_?\w*linear\w*)$"
)
IS_PRODUCT_KERNEL = re.compile(r"gemm|cutlass|nvjet|Cijk_|splitK|wgmma", re.IGNORECASE)
IS_OPERATION = re.compile(r"^(?!autograd::|torch::autograd::|FSDP::)\w+::\w+|^Torch-Compiled Region")
"""Operations of torch or a library, without the wrappers around them."""

Interval = tuple[float, float]


class Breakdown(NamedTuple):
    """Seconds of each step of one trace."""

    steps: list[dict[str, float]]
    """Every part of each step, and what was hidden."""

    @property
    def step_seconds(self) -> float:
        return sum(self.mean(part) for part in PARTS)

    def mean(self, part: str) -> float:
        return statistics.fmean(step[part] for step in self.steps)


def run(
    arguments: Sequence[str], num_ranks: int = 1, active: int = 3, out: Path | None = None
) -> list[tuple[str, Breakdown]]:
    """Tables of traces, or of a training run that is started here and traced for `active` batches.

    Prints each, writes profile.json, .md and .png to `out`, beside the traces of a run that was started.
    Raises DataError for traces that hold no step, and for a run that fails.
    """
    traces = [Path(name) for name in arguments if name.endswith(".json") and Path(name).is_file()]
    if traces:
        found, unprofiled = [(path.name, break_down(read_trace(path))) for path in traces], None
    else:
        with tempfile.TemporaryDirectory() as scratch:
            folder = out or Path(scratch)
            unprofiled = trace_run(arguments, num_ranks, active, Path(scratch) / "run", folder)
            paths = sorted(folder.glob("rank*.ba*.json"))
            found = [(path.name, break_down(read_trace(path))) for path in paths]
    tell_breakdowns(found, unprofiled, arguments, num_ranks, out)
    return found


def tell_breakdowns(
    found: Sequence[tuple[str, Breakdown]],
    unprofiled: float | None,
    arguments: Sequence[str],
    num_ranks: int,
    out: Path | None,
) -> None:
    names = [Path(argument).name if Path(argument).is_file() else argument for argument in arguments]
    report = describe_conditions() | {
        "arguments": names,
        "num_ranks": num_ranks,
        "unprofiled_seconds": unprofiled,
        "traces": {name: breakdown.steps for name, breakdown in found},
    }
    ranks = f" --num-ranks {num_ranks}" if unprofiled is not None else ""
    tell(
        report,
        *(build_table(name, breakdown) for name, breakdown in found),
        notes=build_notes(found, unprofiled),
        name="profile",
        heading="Where a step's time goes",
        command=f"llmfoundry-lite bench profile {' '.join(names)}{ranks}",
        asked=["num_ranks"],
        plot=partial(plot, found),
        out=out,
    )


def trace_run(arguments: Sequence[str], num_ranks: int, active: int, run_folder: Path, traces: Path) -> float:
    """A short run through the real code with a trace of each rank. Returns the median of its batches before that.

    The run is its own, whatever the YAML says: nothing is exported, and its folder is a scratch folder.
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
    return float(statistics.median(log[SECONDS][1:before].tolist()))


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events with a duration. Raises DataError for what is no trace."""
    try:
        text = path.read_text()
        events = json.loads(text)["traceEvents"]
        return [event for event in events if event.get("ph") == "X" and {"name", "dur"} <= event.keys()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise DataError(f"{path}: is no trace of torch's profiler (export_chrome_trace)") from None


def break_down(events: Sequence[dict[str, Any]]) -> Breakdown:
    """Raises DataError where there is no step in it."""
    spans = [event for event in events if STEP.fullmatch(event["name"]) and event.get("cat") == "user_annotation"]
    if not spans:
        raise DataError("the trace has no ProfilerStep: call the profiler's step() after each batch")
    intervals = classify(events, (spans[0]["pid"], spans[0]["tid"]))
    return Breakdown([divide(intervals, (span["ts"], span["ts"] + span["dur"])) for span in spans])


# ------------------------------------------------------------------------------------------ events -> intervals


def classify(events: Sequence[dict[str, Any]], main: tuple[Any, Any]) -> dict[str, list[Interval]]:
    """Kind -> intervals in microseconds. With kernels of a device in the trace, these compute; else the main thread."""
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    found: dict[str, list[Interval]] = {kind: [] for kind in (*COMPUTING, COLLECTIVE, DATA)}
    kinds = dict[Any, str | None]()
    for thread in {(event["pid"], event["tid"]) for event in events}:
        calls = [e for e in events if (e["pid"], e["tid"]) == thread and e.get("cat") in ("cpu_op", "user_annotation")]
        for event, kind in with_kinds(calls):
            kinds[event.get("args", {}).get("External id")] = kind
            if kind == DATA and thread == main:
                found[DATA].append(interval_of(event))
            elif kind == COLLECTIVE and not kernels:
                found[COLLECTIVE].append(interval_of(event))
            elif kind in COMPUTING and not kernels and thread == main:
                found[kind].append(interval_of(event))
    for kernel in kernels:
        kind = kind_of_kernel(kernel["name"], kinds.get(kernel.get("args", {}).get("External id")))
        found[kind].append(interval_of(kernel))
    return {kind: union(intervals) for kind, intervals in found.items()}


def with_kinds(calls: Iterable[dict[str, Any]]) -> Iterable[tuple[dict[str, Any], str | None]]:
    """Each call of a thread with its kind, or that of what it was called by where this says more."""
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
    for kind, pattern in (
        (COLLECTIVE, IS_COLLECTIVE),
        (DATA, IS_DATA),
        (OPTIMIZER, IS_OPTIMIZER),
        (ATTENTION, IS_ATTENTION),
        (PRODUCTS, IS_PRODUCT),
        (REST, IS_OPERATION),
    ):
        if pattern.search(name):
            return kind
    return None


def kind_of_kernel(name: str, launched_by: str | None) -> str:
    """By its own name where this says it, else by the call that launched it."""
    if IS_COLLECTIVE.search(name):
        return COLLECTIVE
    if launched_by in (OPTIMIZER, ATTENTION, PRODUCTS):
        return launched_by
    return ATTENTION if IS_ATTENTION.search(name) else PRODUCTS if IS_PRODUCT_KERNEL.search(name) else REST


def interval_of(event: dict[str, Any]) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


# ------------------------------------------------------------------------------------------ intervals -> seconds


def divide(intervals: dict[str, list[Interval]], span: Interval) -> dict[str, float]:
    """Seconds of each part of one step. All but the hidden collectives add up to the span."""
    left, parts = [span], dict[str, float]()
    for kind, part in (*((kind, kind) for kind in COMPUTING), (COLLECTIVE, EXPOSED), (DATA, DATA)):
        rest = subtract(left, intervals[kind])
        parts[part] = (length(left) - length(rest)) / 1e6
        left = rest
    parts[HOST] = length(left) / 1e6
    inside = length(subtract([span], subtract([span], intervals[COLLECTIVE]))) / 1e6
    parts[HIDDEN] = inside - parts[EXPOSED]
    return parts


def union(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def subtract(intervals: Sequence[Interval], taken: Sequence[Interval]) -> list[Interval]:
    """Both sorted and without overlaps."""
    left, first = list[Interval](), 0
    for begin, end in intervals:
        while first < len(taken) and taken[first][1] <= begin:
            first += 1
        for other_begin, other_end in taken[first:]:
            if other_begin >= end:
                break
            if other_begin > begin:
                left.append((begin, other_begin))
            begin = max(begin, other_end)
        if begin < end:
            left.append((begin, end))
    return left


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


# ------------------------------------------------------------------------------------------------------ the report


def build_table(name: str, breakdown: Breakdown) -> Table:
    total = breakdown.step_seconds
    rows = [[part, *cells_of(breakdown.mean(part), total)] for part in PARTS]
    rows.append(["a step", *cells_of(total, total)])
    rows.append([f"{HIDDEN}: beside the computing", *cells_of(breakdown.mean(HIDDEN), total)])
    return measured_table(f"{name}, the mean of {len(breakdown.steps)} steps", ["part", "seconds", "share"], rows)


def cells_of(seconds: float, total: float) -> tuple[str, str]:
    return f"{seconds:.4f}", f"{seconds / total:.1%}"


def build_notes(found: Sequence[tuple[str, Breakdown]], unprofiled: float | None) -> list[str]:
    if unprofiled is None:
        return []
    traced = statistics.fmean(breakdown.step_seconds for _, breakdown in found)
    return [
        f"Without the profiler, a step of the same run took {unprofiled:.4f} s (the median): "
        f"tracing took {traced / unprofiled - 1:+.0%}."
    ]


def plot(found: Sequence[tuple[str, Breakdown]], path: Path) -> None:
    """A bar for each trace, its parts one after the other."""
    from llmfoundry_lite.report.figure import plt

    figure, axes = plt.subplots(figsize=(9, 1.4 + 0.6 * len(found)), layout="constrained", dpi=150)
    left = [0.0] * len(found)
    for part, colour in zip(PARTS, COLOURS, strict=True):
        widths = [breakdown.mean(part) for _, breakdown in found]
        axes.barh([name.removesuffix(".json") for name, _ in found], widths, 0.6, left, color=colour, label=part)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a step")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, fontsize=8, loc="outside upper center", ncols=4)
    save_figure(figure, path)
