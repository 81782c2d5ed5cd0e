"""`llmfoundry-lite bench` and `doctor`: how fast is this machine, and is it fit for a run?"""

from pathlib import Path
from typing import Annotated

import typer

from llmfoundry_lite import companions
from llmfoundry_lite.cli.options import expand_home, out_folder, refuse_beside
from llmfoundry_lite.errors import ConfigError

bench = typer.Typer(help="Measure this machine.", no_args_is_help=True, rich_markup_mode=None)


Shape = Annotated[str, typer.Option(help="Choose tiny, 10m, 40m, 125m, 350m, 1b, gpt2-xl, 3b or 7b.")]
Dtype = Annotated[str, typer.Option(help="Choose fp32 or bf16.")]
SampleTokens = Annotated[int, typer.Option(min=2, help="Set the tokens in a sample.")]
Minutes = Annotated[float, typer.Option(help="Begin nothing after this long.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Set key=value for the runs.")]
LayerDtypes = Annotated[str, typer.Option(help="Choose among fp32, fp16, bf16.")]
LayerAttention = Annotated[str, typer.Option(help="Choose implementations [all that this device has].")]
LayerWidth = Annotated[int, typer.Option(min=1, help="Set the width of the residual stream.")]
LayerHeads = Annotated[int, typer.Option(min=1)]
LayerRepeats = Annotated[int, typer.Option(min=1, help="Time so many repeats, after one that is not timed.")]


@bench.command("mfu")
def bench_mfu(
    shapes: Annotated[
        str, typer.Option(help="Choose among tiny, 10m, 40m, 125m, 350m, 1b, gpt2-xl, 3b, 7b.")
    ] = "125m,350m,1b,3b,7b",
    seq_len: Annotated[int, typer.Option(help="Set the tokens in a sample.")] = 2048,
    batch_size: Annotated[int, typer.Option(help="Set the samples in a batch; how many at a time is found out.")] = 16,
    num_steps: Annotated[int, typer.Option(help="Time so many steps.")] = 3,
    minutes: Minutes = 60,
    out: Annotated[Path | None, out_folder("Also write mfu.json and mfu.md to this folder.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="Set key=value for the Trainer.")] = None,
) -> None:
    """Measure model FLOPs utilisation of one device in bf16.

    Varies shapes, attention and compilation, beside a plain step.
    """
    from llmfoundry_machines.bench.mfu import run

    run(shapes.split(","), seq_len, batch_size, num_steps, minutes, overrides or (), out)


# A parameter for each option: typer makes the command from them.
@bench.command("scaling")
def bench_scaling(
    context: typer.Context,
    devices: Annotated[str, typer.Option(help="Launch on these numbers of devices, with commas.")] = "1,2",
    runs: Annotated[str, typer.Option(help="Tabulate finished runs instead, with commas. Nothing is started.")] = "",
    shape: Shape = "125m",
    seq_len: SampleTokens = 2048,
    batch_size: Annotated[int, typer.Option(min=1, help="Set the samples of all devices, in strong scaling.")] = 64,
    dtype: Dtype = "bf16",
    num_steps: Annotated[int, typer.Option(min=1, help="Time so many steps of each launch.")] = 5,
    num_rounds: Annotated[int, typer.Option(min=1, help="Set how often the launches take turns.")] = 2,
    out: Annotated[Path | None, out_folder("Also write scaling.json, .md and .png to this folder.")] = None,
    overrides: Overrides = None,
) -> None:
    """Measure speed-up, efficiency and MFU over counts of devices.

    Keeps the batch fixed (strong), and then each device's share of it (weak).
    """
    if runs:
        refuse_beside(context, "--runs", "finished runs say what they were, nothing is launched", but=("out",))
    from llmfoundry_lite.cli.options import parse_counts
    from llmfoundry_machines.bench.scaling import run, table_runs

    if runs:
        table_runs(runs.split(","), out)
        return
    run(parse_counts(devices), shape, seq_len, batch_size, dtype, num_steps, num_rounds, overrides or (), out)


@bench.command("compare")
def bench_compare(
    first: Annotated[Path, typer.Argument(help="Read the JSON that a bench wrote with --out.")],
    second: Annotated[Path, typer.Argument(help="Read that of the same bench on another machine, or another torch.")],
    out: Annotated[Path | None, out_folder("Also write compare-BENCH.json and .md to this folder.")] = None,
) -> None:
    """Compare two machines or two software stacks. Refuses what cannot be compared, and says why."""
    from llmfoundry_machines.bench.compare import run

    run(first, second, out)


@bench.command("profile")
def bench_profile(
    arguments: Annotated[
        list[str],
        typer.Argument(help="Read callbacks.profiler's traces, or run RUN.yaml [HARDWARE.yaml] [key=value]."),
    ],
    num_ranks: Annotated[int, typer.Option("-n", "--num-ranks", min=1, help="Start a run on so many ranks.")] = 1,
    active: Annotated[int, typer.Option(min=1, help="Trace so many batches of a run.")] = 3,
    out: Annotated[Path | None, out_folder("Also write profile.json, .md and a run's traces here.")] = None,
) -> None:
    """Show where a step's time goes, from a trace.

    Prints one table that adds up. Given a run, traces a few of its batches.
    """
    from llmfoundry_machines.bench.profile import run

    run(arguments, num_ranks, active, out)


@bench.command("block")
def bench_block(
    batches: Annotated[str, typer.Option(help="Measure these numbers of samples, with commas.")] = "8,16,32,64",
    dtypes: LayerDtypes = "fp32,fp16,bf16",
    seq_len: Annotated[int, typer.Option(min=1, help="Set the tokens in a sample.")] = 1024,
    attention: LayerAttention = "",
    width: LayerWidth = 1600,
    heads: LayerHeads = 25,
    num_repeats: LayerRepeats = 3,
    minutes: Minutes = 60,
    out: Annotated[Path | None, out_folder("Also write block.json, .md and .png to this folder.")] = None,
) -> None:
    """Measure one transformer layer, forward and backward.

    Takes GPT-2 XL's by default, in each dtype, batch and attention.
    """
    from llmfoundry_lite.cli.options import parse_counts
    from llmfoundry_machines.bench.block import run

    run(
        "block",
        [(batch_size, seq_len) for batch_size in parse_counts(batches, "--batches")],
        dtypes.split(","),
        d_model=width,
        n_heads=heads,
        implementations=list(filter(None, attention.split(","))),
        num_repeats=num_repeats,
        minutes=minutes,
        out=out,
    )


@bench.command("seqlen")
def bench_seqlen(
    lengths: Annotated[str, typer.Option(help="Measure these lengths, in tokens.")] = "1024,2048,4096,8192,16384,65536",
    dtypes: LayerDtypes = "bf16",
    batch_size: Annotated[int, typer.Option(min=1, help="Set the samples.")] = 1,
    attention: LayerAttention = "",
    devices: Annotated[
        str, typer.Option(help="Divide each sample among these numbers, with commas [one, and all that there are].")
    ] = "",
    width: LayerWidth = 1600,
    heads: LayerHeads = 25,
    num_repeats: LayerRepeats = 3,
    minutes: Minutes = 60,
    out: Annotated[Path | None, out_folder("Also write seqlen.json, .md and .png to this folder.")] = None,
) -> None:
    """Measure the same layer over lengths of a sample.

    Takes 1K to 64K tokens, also divided where one device is too small.
    """
    from llmfoundry_lite.cli.options import parse_counts
    from llmfoundry_machines.bench.block import all_devices, run

    run(
        "seqlen",
        [(batch_size, seq_len) for seq_len in parse_counts(lengths, "--lengths")],
        dtypes.split(","),
        d_model=width,
        n_heads=heads,
        implementations=list(filter(None, attention.split(","))),
        devices=parse_counts(devices, "--devices") if devices else all_devices(),
        num_repeats=num_repeats,
        minutes=minutes,
        out=out,
    )


@bench.command("accumulation")
def bench_accumulation(
    microbatches: Annotated[str, typer.Option(help="Measure these counts, with commas.")] = "1,2,4,8,16,32,64",
    shape: Shape = "125m",
    seq_len: SampleTokens = 2048,
    batch_size: Annotated[int, typer.Option(min=1, help="Set the samples of a step.")] = 64,
    dtype: Dtype = "bf16",
    num_steps: Annotated[int, typer.Option(min=1, help="Time so many steps of each process.")] = 3,
    num_rounds: Annotated[int, typer.Option(min=1, help="Set how often the processes take turns.")] = 1,
    out: Annotated[Path | None, out_folder("Also write accumulation.json, .md and .png here.")] = None,
    overrides: Overrides = None,
) -> None:
    """Measure one batch in 1 to 64 microbatches.

    Uses the Trainer. Shows what microbatches cost, and the memory that they save.
    """
    from llmfoundry_lite.cli.options import parse_counts
    from llmfoundry_machines.bench.accumulation import run

    counts = parse_counts(microbatches, "--microbatches")
    run(counts, shape, seq_len, batch_size, dtype, num_steps, num_rounds, overrides or (), out)


@bench.command("memory")
def bench_memory(
    models: Annotated[str, typer.Option(help="Measure these training runs, by name.")] = "mpt-125m,mpt-350m,mpt-1b",
    minutes: Minutes = 3,
    most: Annotated[int, typer.Option(min=1, help="Set the most samples in a microbatch.")] = 8,
    out: Annotated[Path | None, out_folder("Also write memory.json and .md to this folder.")] = None,
) -> None:
    """Measure memory of real runs on this GPU.

    Shows it beside the rehearsal and the estimate.
    """
    companions.require("llmfoundry_planner", "rehearse")
    from llmfoundry_machines.bench.memory import run

    raise typer.Exit(run(list(filter(None, models.split(","))), minutes, most, out))


def doctor_command(
    context: typer.Context,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the findings there too, for fleets.", callback=expand_home)
    ] = None,
    folder: Annotated[str, typer.Option(help="Check the folder where checkpoints will go; may be a URL.")] = ".",
    num_ranks: Annotated[int | None, typer.Option(min=1, help="Run so many ranks [one per device; CPU: 2].")] = None,
    alone: Annotated[bool, typer.Option("--alone", help="Check this machine alone, in a launch too.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Measure less: under 10 s without a GPU.")] = False,
) -> None:
    """Check this machine before a run is trusted to it. Exit code 2 when something failed.

    Under torchrun or srun, checks all nodes together: each pair's link, each node's rate, clocks and versions.
    """
    from llmfoundry_lite.checkpoint.open_folder import open_folder
    from llmfoundry_lite.ranks.rank import adopt_srun, this_rank
    from llmfoundry_machines.doctor.examine import doctor, leave_without_waiting
    from llmfoundry_machines.doctor.finding import Machine

    place = open_folder(folder)
    machine = Machine(folder=place.path_here or place.url, num_ranks=num_ranks, quick=quick)
    if not alone:
        import llmfoundry_lite.ranks.ending  # noqa: F401 - before torch, of whose words in C++ it leaves the errors

        try:
            adopt_srun()
            if this_rank().world_size > 1:
                from llmfoundry_machines.doctor.nodes import examine_nodes

                why = "it compares the launch's ranks, --alone examines this machine"
                refuse_beside(context, "doctor in a launch", why, only=("folder", "num_ranks"))
                raise typer.Exit(examine_nodes(machine, json_file))
        except ConfigError as error:
            if this_rank().local_rank > 0:  # its node's first rank has the same error
                raise typer.Exit(error.exit_code) from None
            raise
    code = doctor(machine, json_file)
    leave_without_waiting(code)
    raise typer.Exit(code)
