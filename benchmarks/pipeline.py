"""Waiting of pipeline stages: every schedule played by ranks that sleep instead of computing.

python -m benchmarks pipeline --stages 2,4 --microbatches 4,8,16 --out results

Forward pass, gradient of the inputs and gradient of the weights of a microbatch take one sleep each on every stage. So
what a step takes beyond them is waiting: for other stages, and a little for messages and Python. Beside it stand the
formula's share and that of the played schedule (`llmfoundry_planner/plan/bubble.py`). Messages are four numbers; no
bandwidth is measured.
"""

import itertools
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from llmfoundry_lite.config.schema import PipelineConfig
from llmfoundry_lite.config.stages import takes_microbatches
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.parallel.pipeline import SCHEDULES, TAKES_ONE_STAGE
from llmfoundry_lite.report.tables import Table
from llmfoundry_machines.bench import frame
from llmfoundry_machines.bench.steps import measure_on_ranks
from llmfoundry_planner.plan.bubble import simulate_bubble

COLUMNS: list[frame.Column] = [
    ("schedule", "{schedule}"),
    ("stages", "{num_stages}"),
    ("microbatches", "{num_microbatches}"),
    ("runs of blocks", "{virtual_stages}"),
    ("measured", "{measured[median]:.1%} ({measured[least]:.1%} to {measured[most]:.1%})"),
    ("formula", "{formula:.1%}"),
    ("played", "{played:.1%}"),
    ("step, s", "{seconds:.3f}"),
]
COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#8172b3", "#937860")
NOTES = (
    "measured: torch's schedules, messages and Python among what a device waits",
    "formula and played: `llmfoundry_planner/plan/bubble.py`, without time for messages",
    "zbv has no formula",
)
WITH_FORMULA = ("gpipe", "1f1b", "interleaved", "zero_bubble")
NUM_PASSES = 3
"""Parts of a microbatch: forward, inputs' gradient, weights' gradient."""


def run(
    stages: Sequence[int] = (2, 4),
    microbatches: Sequence[int] = (4, 8, 16),
    schedules: Sequence[str] = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"),
    milliseconds: float = 100,
    num_repeats: int = 2,
    out: Path | None = None,
) -> dict[str, Any]:
    """Measure all schedules on so many stages, print a table, write pipeline.json, .md and .png to `out`.

    `milliseconds`: a pass through all blocks of a device. Raises ConfigError for an unknown schedule and for one stage.
    """
    frame.check_names("--schedules", schedules, SCHEDULES)
    if min(stages) < 2:
        raise ConfigError(f"--stages: {min(stages)} given, expected 2 or more")
    console = frame.open_console()
    report: dict[str, Any] = frame.describe_conditions() | {
        "milliseconds": milliseconds,
        "num_repeats": num_repeats,
        "rows": [],
        "left_out": [],
    }
    for degree in stages:
        pipelines = [PipelineConfig(pipeline_parallel_degree=degree, schedule=name) for name in schedules]
        pairs = [(pipeline, count) for count in microbatches for pipeline in pipelines]
        taken = [[p.schedule, p.num_runs, count] for p, count in pairs if is_alike(p, count)]
        report["left_out"] += [
            f"{p.schedule}: {count} microbatches do not suit {degree} stages"
            for p, count in pairs
            if not is_alike(p, count)
        ]
        console.print(f"{degree} stages: {len(taken)} schedules")
        for (schedule, num_runs, count), seconds in zip(
            taken, measure(degree, taken, milliseconds / 1e3, num_repeats), strict=True
        ):
            report["rows"].append(row_of(schedule, degree, count, num_runs, seconds, milliseconds / 1e3))
    lists = {"stages": stages, "microbatches": microbatches, "schedules": schedules}
    options = {"milliseconds": milliseconds, "num_repeats": num_repeats}
    frame.tell(
        report,
        table_of(report),
        [*report["left_out"], *NOTES],
        name="pipeline",
        heading="What stages wait",
        command=frame.format_command("python -m benchmarks pipeline", **lists, **options),
        asked=("milliseconds",),
        plot=plot,
        out=out,
    )
    return report


def bubble(schedule: str, num_stages: int, num_microbatches: int, virtual_stages: int = 1) -> float:
    """Return time that a device waits over time that it computes, by the formulas of `plan/bubble.py`."""
    share = (num_stages - 1) / num_microbatches
    return share / {"interleaved": virtual_stages, "zero_bubble": 3}.get(schedule, 1)


def is_alike(pipeline: PipelineConfig, count: int) -> bool:
    """Return whether schedule and formula take so many microbatches.

    torch's interleaved schedule alone also takes counts that are no multiple of the stages.
    """
    in_rounds = pipeline.schedule != "interleaved" or count % pipeline.pipeline_parallel_degree == 0
    return in_rounds and takes_microbatches(pipeline, count)


def row_of(
    schedule: str, degree: int, count: int, num_runs: int, seconds: Sequence[float], pass_seconds: float
) -> dict[str, Any]:
    """Return a row of the report. Shares are of the time that a device computes."""
    busy = count * NUM_PASSES * pass_seconds
    return {
        "schedule": schedule,
        "num_stages": degree,
        "num_microbatches": count,
        "virtual_stages": num_runs,
        "seconds": frame.spread(seconds).median,
        "measured": frame.spread(one / busy - 1 for one in seconds)._asdict(),
        "formula": bubble(schedule, degree, count, num_runs) if schedule in WITH_FORMULA else None,
        "played": simulate_bubble(schedule, degree, count, num_runs),
    }


# ------------------------------------------------------------------------------------------------------- the ranks


def measure(degree: int, cases: Sequence[Sequence[Any]], pass_seconds: float, num_repeats: int) -> list[list[float]]:
    """Time the steps of each (schedule, runs of blocks, microbatches) on `degree` processes, in seconds."""
    return measure_on_ranks(degree, partial(play, degree, cases, pass_seconds, num_repeats))


def play(degree: int, cases: Sequence[Sequence[Any]], pass_seconds: float, num_repeats: int) -> list[list[float]]:
    """Play this rank of each case. A step lasts as long as the slowest rank's."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    found = []
    for name, num_runs, count in cases:
        schedule = build_schedule(name, rank, degree, num_runs, count, pass_seconds / num_runs)
        held, last = indices_of(name, rank, degree, num_runs), degree * num_runs - 1
        seconds = []
        for _ in range(num_repeats + 1):
            dist.barrier()
            began = time.perf_counter()
            schedule.step(
                *((torch.zeros(count, 4),) if 0 in held else ()),
                target=torch.zeros(count, 4) if last in held else None,
                losses=[] if last in held else None,
                return_outputs=False,
            )
            longest = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
            dist.all_reduce(longest, dist.ReduceOp.MAX)
            seconds.append(longest.item())
        found.append(seconds[1:])  # the first one sets up
    return found


def indices_of(schedule: str, rank: int, degree: int, num_runs: int) -> list[int]:
    """Return a rank's stages, counted through the model, as `config/stages.py` assigns them."""
    if schedule == "zbv":
        return [rank, 2 * degree - 1 - rank]
    return list(range(rank, degree * num_runs, degree))


def build_schedule(name: str, rank: int, degree: int, num_runs: int, count: int, seconds: float) -> Any:
    numbers = torch.empty(1, 4, device="meta", requires_grad=True)
    stages = [
        PipelineStage(
            SleepingStage(seconds),
            index,
            degree * num_runs,
            torch.device("cpu"),
            input_args=numbers if index else torch.empty(1, 4, device="meta"),
            output_args=numbers,
        )
        for index in indices_of(name, rank, degree, num_runs)
    ]
    return SCHEDULES[name](
        stages[0] if name in TAKES_ONE_STAGE else stages, count, loss_fn=lambda output, _: output.sum()
    )


class SleepingStage(nn.Module):
    """A stage that sleeps. Gradients of inputs and weight can be computed apart, as zero-bubble schedules do."""

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds = seconds
        self.embedding = nn.Parameter(torch.zeros(4))  # so that the first stage's inputs have a gradient, too
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        if not x.requires_grad:
            x = x + self.embedding
        return _SleepBackward.apply(x, self.seconds) + _SleepBackward.apply(self.weight, self.seconds)


class _SleepBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[override]
        time.sleep(ctx.seconds)
        return gradient.contiguous(), None  # a sum's gradient is one number, seen four times


# ------------------------------------------------------------------------------------------------------ the report


def table_of(report: dict[str, Any]) -> Table:
    title = f"waiting over computing, {report['milliseconds']:g} ms a pass, the median of {report['num_repeats']} steps"
    return frame.tabulate(title, COLUMNS, report["rows"], num_keys=4)


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw a panel for each number of stages: measured as points, played as lines."""
    stages = sorted({row["num_stages"] for row in report["rows"]})
    names = list(dict.fromkeys(row["schedule"] for row in report["rows"]))
    ticks = sorted({row["num_microbatches"] for row in report["rows"]})
    with frame.drawn(path, len(stages), (1.5 + 4 * len(stages), 3.8), sharey=True) as panels:
        for axes, degree in zip(panels, stages, strict=True):
            for name, colour in zip(names, itertools.cycle(COLOURS), strict=False):
                rows = [row for row in report["rows"] if (row["schedule"], row["num_stages"]) == (name, degree)]
                x = [row["num_microbatches"] for row in rows]
                axes.plot(x, [100 * row["played"] for row in rows], "-", color=colour, lw=1)
                axes.plot(x, [100 * row["measured"]["median"] for row in rows], "o", color=colour, ms=5, label=name)
            frame.label_axes(axes, ticks, "microbatches", from_zero=False)
            axes.set_title(f"{degree} stages", fontsize=10)
        panels[0].set_ylim(bottom=0)  # when all panels are drawn: it fixes the upper end for all of them
        panels[0].set_ylabel("waiting over computing, %")
        place: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}
        title = "points: measured\nlines: played"
        panels[-1].legend(frameon=False, fontsize=8, title=title, title_fontsize=8, **place)
