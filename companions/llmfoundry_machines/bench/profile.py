"""A table of what a training step's time went into, from a trace of torch's profiler. The parts add up to the step.

llmfoundry-lite bench profile mpt-125m variables.data=data/c4 --out results
llmfoundry-lite bench profile runs/mpt-1b/traces/rank0.ba6.json

`training/monitor.py` writes the trace, a JSON list of events. The time is divided in two stages:

1. Events become intervals of a *kind* (`collect_intervals`): one of the four kinds of computing, collectives, or
   waiting for data. The kind is read from the names of calls and kernels.
2. Each moment of a step counts for one *part* (`divide`), the first of these that fits:

    computing      the device computes, or on a CPU the main thread is within an operation; it has four parts
    exposed        a collective is under way
    data           the main thread waits for the loader
    host           none of these

Hidden collectives run while the device computes, so they cost no time. The table has them below the sum.
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
"""The parts of a step, in the order of the table. Together they are the whole step."""
COLOURS = ("#4c72b0", "#8172b3", "#55a868", "#937860", "#c44e52", "#dd8452", "#8c8c8c")
COMPUTING = (OPTIMIZER, ATTENTION, PRODUCTS, REST)
"""The kinds of computing. If a call of one kind is within a call of another, both count as the first of these."""
COLLECTIVE = "collective"

STEP = re.compile(r"ProfilerStep#\d+")
NUM_UNTRACED_BATCHES = 3
"""Batches of a run before the profiler starts, whose seconds show what tracing costs. The first of them is left out."""
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
"""Kind -> pattern of the names of calls. The first pattern that fits counts."""
PRODUCT_KERNEL = re.compile(r"gemm|cutlass|nvjet|Cijk_|splitK|wgmma", re.IGNORECASE)

Interval = tuple[float, float]
"""Begin and end, in microseconds."""
Steps = list[dict[str, float]]
"""Part -> seconds, for each step of a trace."""


def run(arguments: Sequence[str], num_ranks: int = 1, active: int = 3, out: Path | None = None) -> None:
    """Print a table for each trace, and how much time tracing took if the traces are made here.

    `arguments` are either paths of traces, or the arguments of a training run. Such a run is started here on
    `num_ranks` ranks, and `active` batches of each rank are traced.

    With `out`, writes profile.json, .md and .png there, beside the traces of a run that was started. Raises DataError
    for a trace without a step, and for a run that fails.
    """
    trace_paths = [Path(argument) for argument in arguments if argument.endswith(".json") and Path(argument).is_file()]
    unprofiled_seconds = None
    with tempfile.TemporaryDirectory() as scratch:
        if not trace_paths:
            trace_folder = out or Path(scratch)
            unprofiled_seconds = trace_run(arguments, num_ranks, active, Path(scratch) / "run", trace_folder)
            trace_paths = sorted(trace_folder.glob("rank*.ba*.json"))
        steps_by_trace = {path.name: break_down(read_trace(path)) for path in trace_paths}

    notes = []
    ranks_option = ""
    if unprofiled_seconds is not None:
        ranks_option = f" --num-ranks {num_ranks}"
        added_share = statistics.fmean(map(mean_step, steps_by_trace.values())) / unprofiled_seconds - 1
        sentence = f"Without the profiler, a step of the same run took {unprofiled_seconds:.4f} s (the median)"
        notes = [f"{sentence}: tracing took {added_share:+.0%}."]

    # Reports are published, so they do not tell the folders of this machine.
    argument_names = [Path(argument).name if Path(argument).is_file() else argument for argument in arguments]
    report = describe_conditions() | {
        "arguments": argument_names,
        "num_ranks": num_ranks,
        "unprofiled_seconds": unprofiled_seconds,
        "traces": steps_by_trace,
    }
    tell(
        report,
        *(build_table(trace_name, steps) for trace_name, steps in steps_by_trace.items()),
        notes,
        name="profile",
        heading="Where a step's time goes",
        command=f"llmfoundry-lite bench profile {' '.join(argument_names)}{ranks_option}",
        asked=["num_ranks"],
        plot=plot,
        out=out,
    )


def trace_run(arguments: Sequence[str], num_ranks: int, active: int, run_folder: Path, trace_folder: Path) -> float:
    """Train a few batches, and write a trace of `active` of them for each rank to `trace_folder`.

    Other settings of `arguments` are overridden: the run's folder is `run_folder`, and it neither exports nor evaluates
    the model. Returns the median seconds of the batches before the profiler starts. Raises DataError if the run fails.
    """
    schedule = f"wait: {NUM_UNTRACED_BATCHES}, warmup: 1, active: {active}"
    # The profiler discards the batch before the traced ones. One batch follows them, since a traced batch ends with
    # fetching the next.
    num_batches = NUM_UNTRACED_BATCHES + 1 + active + 1
    overrides = [
        f"callbacks.profiler={{{schedule}, all_ranks: true, folder: {trace_folder}}}",
        f"max_duration={num_batches}ba",
        f"run_folder={run_folder}",
        "export_at_end=false",
        "eval_interval=0",
        "log_to_console=false",
    ]
    try:
        train_on_ranks(num_ranks, [*arguments, *overrides])
    except RuntimeError as error:
        raise DataError(f"bench profile: the run failed: {str(error).splitlines()[0]}") from None

    batch_seconds = read_run(str(run_folder)).log.numbers(SECONDS)
    return float(statistics.median(batch_seconds[1:NUM_UNTRACED_BATCHES].tolist()))


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Read the events of a trace that have a duration. Raises DataError for a file that is not a trace.

    An event is a dict with its `name`, `cat` (category), `pid` and `tid` (process and thread, or a device's stream),
    `ts` (its begin) and `dur` (its duration), both in microseconds, and `args`.
    """
    try:
        events = json.loads(path.read_text())["traceEvents"]
        # "X" is the phase of complete events. The others are marks, names of threads, and arrows between events.
        return [event for event in events if event.get("ph") == "X" and {"name", "dur"} <= event.keys()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise DataError(f"{path}: is not a trace of torch's profiler (export_chrome_trace)") from None


def break_down(events: Sequence[dict[str, Any]]) -> Steps:
    """Return the seconds of each part, for each step of a trace. Raises DataError for events without a step."""
    step_events = [event for event in events if STEP.fullmatch(event["name"]) and event.get("cat") == "user_annotation"]
    if not step_events:
        raise DataError("the trace has no ProfilerStep: call the profiler's step() after each batch")

    # The thread that calls the profiler's step() is the one that trains.
    main_thread = step_events[0]["pid"], step_events[0]["tid"]
    intervals_by_kind = collect_intervals(events, main_thread)
    return [divide(intervals_by_kind, interval_of(event)) for event in step_events]


def mean(steps: Steps, part: str) -> float:
    """Return the mean seconds of a part over the steps of a trace."""
    return statistics.fmean(step[part] for step in steps)


def mean_step(steps: Steps) -> float:
    """Return the mean seconds of a whole step."""
    return sum(mean(steps, part) for part in PARTS)


# ------------------------------------------------------------------------------------------ events -> intervals


def collect_intervals(events: Sequence[dict[str, Any]], main_thread: tuple[Any, Any]) -> dict[str, list[Interval]]:
    """Return the intervals in which something of each kind was under way: kind -> intervals, in no order.

    `main_thread` is the process and the thread that train. If the trace has kernels, the device computes, and the calls
    on the host only tell which kind of call launched each kernel. Without kernels, the main thread's calls compute.
    """
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    intervals_by_kind: dict[str, list[Interval]] = {kind: [] for kind in (*COMPUTING, COLLECTIVE, DATA)}

    # Calls on the host. A kernel has the same "External id" as the call that launched it.
    kind_of_launch = dict[Any, str | None]()
    for thread in {(event["pid"], event["tid"]) for event in events}:
        calls = [
            event
            for event in events
            if (event["pid"], event["tid"]) == thread and event.get("cat") in ("cpu_op", "user_annotation")
        ]
        is_main = thread == main_thread
        for call, kind in classify_calls(calls):
            kind_of_launch[external_id(call)] = kind
            if kind == DATA:
                is_counted = is_main
            elif kind == COLLECTIVE:
                is_counted = not kernels  # gloo runs collectives in threads of its own
            else:
                is_counted = is_main and not kernels
            if kind is not None and is_counted:
                intervals_by_kind[kind].append(interval_of(call))

    for kernel in kernels:
        kind = classify_kernel(kernel["name"], kind_of_launch.get(external_id(kernel)))
        intervals_by_kind[kind].append(interval_of(kernel))
    return intervals_by_kind


def classify_calls(calls: Iterable[dict[str, Any]]) -> Iterable[tuple[dict[str, Any], str | None]]:
    """Yield each call of one thread with its kind, in the order in which they begin.

    A call within another call may take the outer call's kind (`choose_kind`), so that

        llmfoundry_lite::blocked_attention |--------------|         is attention,
        aten::bmm                             |------|              within it is attention too, and
        aten::mm                                              |--|  after it is a matrix product.

    The kind is None for calls that belong to no kind, such as those of autograd.
    """
    outer_calls: list[tuple[float, str | None]] = []  # end and kind of the calls under way, the innermost last
    # Of two calls that begin at once, the longer is the outer one.
    for call in sorted(calls, key=lambda call: (call["ts"], -call["dur"])):
        begin, end = interval_of(call)
        while outer_calls and outer_calls[-1][0] <= begin:
            outer_calls.pop()

        kind = classify_call(call["name"])
        if kind == COLLECTIVE:
            # It may end long after the call that started it, and calls nothing, so it is never an outer call.
            yield call, COLLECTIVE
            continue
        if outer_calls:
            kind = choose_kind(kind, outer_calls[-1][1])
        outer_calls.append((end, kind))
        yield call, kind


def choose_kind(kind: str | None, outer_kind: str | None) -> str | None:
    """Return the kind of a call within another call: the first of the two in COMPUTING, else whichever is known."""
    computing_kinds = [each_kind for each_kind in (kind, outer_kind) if each_kind in COMPUTING]
    if computing_kinds:
        return min(computing_kinds, key=COMPUTING.index)
    return kind or outer_kind


def classify_call(name: str) -> str | None:
    """Return the kind of a call by its name alone, or None if no pattern of KINDS fits."""
    return next((kind for kind, pattern in KINDS.items() if pattern.search(name)), None)


def classify_kernel(name: str, launching_kind: str | None) -> str:
    """Return a kernel's kind. `launching_kind` is the kind of the call that launched it, or None if that is unknown.

    Collectives are known by the kernel's name. For other kernels the launching call tells more: the kernel of a product
    in the optimizer is the optimizer's. Only if it says nothing, the kernel's name decides.
    """
    if KINDS[COLLECTIVE].search(name):
        return COLLECTIVE
    if launching_kind in (OPTIMIZER, ATTENTION, PRODUCTS):
        return launching_kind
    if KINDS[ATTENTION].search(name):
        return ATTENTION
    if PRODUCT_KERNEL.search(name):
        return PRODUCTS
    return REST


def external_id(event: dict[str, Any]) -> Any:
    """Return the id that a kernel shares with the call that launched it. None if the event has none."""
    return event.get("args", {}).get("External id")


def interval_of(event: dict[str, Any]) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


# ------------------------------------------------------------------------------------------ intervals -> seconds


def divide(intervals_by_kind: dict[str, list[Interval]], step: Interval) -> dict[str, float]:
    """Divide one step among its parts. Return the seconds of each of PARTS, which add up to the step, and of HIDDEN.

    Intervals of any kind may overlap, and may begin before the step or end after it. Where kinds overlap, the first of
    COMPUTING, COLLECTIVE and DATA counts. For example, in a step of 10 µs,

        step          0 |----------| 10
        product       0 |------| 6              6 µs are matrix products,
        collective        3 |-----| 8           2 µs are exposed, 3 µs are hidden,
                                                and the last 2 µs are the host's.
    """
    # Cut the step at every begin and end, so that each interval covers a piece wholly or not at all.
    times = list(step)
    for intervals in intervals_by_kind.values():
        for interval in intervals:
            times.extend(interval)
    edges = np.unique(np.clip(times, *step))
    piece_seconds = np.diff(edges) / 1e6  # from microseconds

    # Kinds take their pieces in order of precedence. A piece that is taken is no longer free for the next kinds.
    part_of_kind = {**{kind: kind for kind in COMPUTING}, COLLECTIVE: EXPOSED, DATA: DATA}
    is_free = np.ones(len(piece_seconds), bool)
    seconds_by_part = {}
    for kind, part in part_of_kind.items():
        is_covered = find_covered_pieces(intervals_by_kind[kind], edges)
        seconds_by_part[part] = float(piece_seconds[is_covered & is_free].sum())
        if kind == COLLECTIVE:
            seconds_by_part[HIDDEN] = float(piece_seconds[is_covered & ~is_free].sum())
        is_free &= ~is_covered
    seconds_by_part[HOST] = float(piece_seconds[is_free].sum())
    return seconds_by_part


def find_covered_pieces(intervals: Sequence[Interval], edges: np.ndarray) -> np.ndarray:
    """Return for each piece between two neighbouring edges whether any interval covers it: bool [len(edges) - 1].

    `edges` are sorted. Intervals are clipped to them, and their begins and ends must then be edges themselves.
    """
    clipped = np.clip(np.reshape(intervals, (-1, 2)), edges[0], edges[-1])
    begins, ends = np.searchsorted(edges, clipped).T  # as indices of edges

    # Intervals that have begun and not ended are open in the piece after an edge. No piece follows the last edge.
    num_begins = np.bincount(begins, minlength=len(edges))
    num_ends = np.bincount(ends, minlength=len(edges))
    num_open = np.cumsum(num_begins - num_ends)
    return num_open[:-1] > 0


# ------------------------------------------------------------------------------------------------------ the report


def build_table(trace_name: str, steps: Steps) -> Table:
    """Build the table of one trace: the mean seconds of each part, their sum, and the hidden collectives below it."""
    total_seconds = mean_step(steps)
    seconds_by_row = {part: mean(steps, part) for part in PARTS}
    seconds_by_row["a step"] = total_seconds
    seconds_by_row[f"{HIDDEN}: beside the computing"] = mean(steps, HIDDEN)
    rows = [[row, f"{seconds:.4f}", f"{seconds / total_seconds:.1%}"] for row, seconds in seconds_by_row.items()]
    return measured_table(f"{trace_name}, the mean of {len(steps)} steps", ["part", "seconds", "share"], rows)


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw a bar for each trace, with its parts one after the other."""
    steps_by_trace = report["traces"]
    trace_names = [trace_name.removesuffix(".json") for trace_name in steps_by_trace]
    num_traces = len(trace_names)
    ends = np.zeros(num_traces)  # in seconds, where the parts drawn so far end
    with drawn(path, 1, (9, 1.4 + 0.6 * num_traces)) as (axes,):
        for part, colour in zip(PARTS, COLOURS, strict=True):
            widths = np.array([mean(steps, part) for steps in steps_by_trace.values()])
            axes.barh(trace_names, widths, 0.6, ends, color=colour, label=part)
            ends += widths
        axes.invert_yaxis()
        axes.set_xlabel("seconds of a step")
        axes.spines[["top", "right"]].set_visible(False)
        axes.figure.legend(frameon=False, fontsize=8, loc="outside upper center", ncols=4)
