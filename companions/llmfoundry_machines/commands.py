"""The command lines of `llmfoundry-lite bench` and `doctor`.

    llmfoundry-lite bench mfu --out measured
    llmfoundry-lite doctor --folder /scratch

`bench` measures how fast this machine is, and `doctor` checks whether it is fit for a run. Each function is one
command: typer makes the options from its parameters and the help text from its docstring. A function only parses its
options; the work is done by `bench/` and `doctor/`. Those are imported inside the functions, because they import torch,
and `--help` should answer at once.
"""

from pathlib import Path
from typing import Annotated

import typer

from llmfoundry_lite import companions
from llmfoundry_lite.cli.options import expand_home, out_folder, refuse_conflicting
from llmfoundry_lite.errors import ConfigError

bench = typer.Typer(help="Measure the speed and memory of this machine.", no_args_is_help=True, rich_markup_mode=None)

# Options that several commands have. Those of `bench block` and `bench seqlen`, which measure one layer, begin with
# Layer.
Shape = Annotated[str, typer.Option(help="Size of the model: tiny, 10m, 40m, 125m, 350m, 1b, gpt2-xl, 3b or 7b.")]
Dtype = Annotated[str, typer.Option(help="Precision: fp32 or bf16.")]
SampleTokens = Annotated[int, typer.Option(min=2, help="Tokens per sample.")]
Minutes = Annotated[float, typer.Option(help="Stop starting measurements after this many minutes.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="key=value", help="Settings of the runs.")]
LayerDtypes = Annotated[str, typer.Option(help="Precisions to measure, separated by commas: fp32, fp16, bf16.")]
LayerAttention = Annotated[
    str, typer.Option(help="Attention implementations, separated by commas [default: all that this device has].")
]
LayerWidth = Annotated[int, typer.Option(min=1, help="Width of the residual stream.")]
LayerHeads = Annotated[int, typer.Option(min=1, help="Number of attention heads.")]
LayerRepeats = Annotated[int, typer.Option(min=1, help="Number of timed repeats, after one that is not timed.")]


@bench.command("mfu")
def bench_mfu(
    shapes: Annotated[
        str, typer.Option(help="Model sizes, separated by commas: tiny, 10m, 40m, 125m, 350m, 1b, gpt2-xl, 3b, 7b.")
    ] = "125m,350m,1b,3b,7b",
    seq_len: Annotated[int, typer.Option(help="Tokens per sample.")] = 2048,
    batch_size: Annotated[int, typer.Option(help="Samples in a batch; the microbatch is found automatically.")] = 16,
    num_steps: Annotated[int, typer.Option(help="Number of timed steps.")] = 3,
    minutes: Minutes = 60,
    out: Annotated[Path | None, out_folder("Folder for mfu.json and mfu.md.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="key=value", help="Settings of the Trainer's runs.")
    ] = None,
) -> None:
    """Measure model FLOPs utilisation of one device in bf16.

    Measures several model sizes, attention implementations and compilation, beside a plain training step.
    """
    from llmfoundry_machines.bench.mfu import run

    run(shapes.split(","), seq_len, batch_size, num_steps, minutes, overrides or (), out)


@bench.command("scaling")
def bench_scaling(
    context: typer.Context,
    devices: Annotated[str, typer.Option(help="Numbers of devices to launch on, separated by commas.")] = "1,2",
    runs: Annotated[
        str, typer.Option(help="Tabulate these finished runs instead, separated by commas. Nothing is started.")
    ] = "",
    shape: Shape = "125m",
    seq_len: SampleTokens = 2048,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Samples in the batch of all devices, in strong scaling.")
    ] = 64,
    dtype: Dtype = "bf16",
    num_steps: Annotated[int, typer.Option(min=1, help="Number of timed steps of each launch.")] = 5,
    num_rounds: Annotated[int, typer.Option(min=1, help="Number of rounds in which the launches take turns.")] = 2,
    out: Annotated[Path | None, out_folder("Folder for scaling.json, scaling.md and scaling.png.")] = None,
    overrides: Overrides = None,
) -> None:
    """Measure speed-up, efficiency and MFU by number of devices.

    Keeps the batch of all devices fixed (strong scaling), then the batch of each device (weak scaling).
    """
    # Finished runs have their own settings, so options that describe a launch would be ignored.
    if runs:
        refuse_conflicting(context, "--runs", "finished runs say what they were, nothing is launched", allowed=("out",))
    from llmfoundry_lite.cli.options import parse_counts
    from llmfoundry_machines.bench.scaling import run, table_runs

    if runs:
        table_runs(runs.split(","), out)
        return
    run(parse_counts(devices), shape, seq_len, batch_size, dtype, num_steps, num_rounds, overrides or (), out)


@bench.command("mup")
def bench_mup(
    arguments: Annotated[
        list[str], typer.Argument(metavar="RUN.yaml", help="A run: YAML files or names, then key=value.")
    ],
    widths: Annotated[str, typer.Option(help="Values of d_model, separated by commas.")] = "64,128,256,512",
    grow: Annotated[str, typer.Option(help="What grows with the width: heads, or head_dim.")] = "heads",
    num_steps: Annotated[int, typer.Option(min=1, help="Number of training steps.")] = 6,
    num_samples: Annotated[int, typer.Option(min=1, help="Samples in the batch.")] = 4,
    seq_len: SampleTokens = 64,
    num_seeds: Annotated[int, typer.Option(min=1, help="Seeds whose mean is reported.")] = 1,
    out: Annotated[Path | None, out_folder("Folder for mup.json, mup.md and mup.png.")] = None,
) -> None:
    """Check that activations do not grow with the width, with muP.

    Trains the run's model at several widths for a few steps on random tokens, on the CPU, with muP and without.
    """
    from llmfoundry_lite.cli.options import parse_counts
    from llmfoundry_machines.bench.mup import run

    run(arguments, parse_counts(widths), grow, num_steps, num_samples, seq_len, num_seeds, out)


@bench.command("compare")
def bench_compare(
    first: Annotated[Path, typer.Argument(metavar="FIRST", help="JSON file that a bench wrote with --out.")],
    second: Annotated[
        Path, typer.Argument(metavar="SECOND", help="JSON file of the same bench on another machine or another torch.")
    ],
    out: Annotated[Path | None, out_folder("Folder for compare-BENCH.json and compare-BENCH.md.")] = None,
) -> None:
    """Compare two machines or two software stacks. Refuses reports that measured different things, and says why."""
    from llmfoundry_machines.bench.compare import run

    run(first, second, out)


@bench.command("profile")
def bench_profile(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="TRACE|RUN.yaml",
            help="Traces of callbacks.profiler; or a run to trace: YAML files or names, then key=value.",
        ),
    ],
    num_ranks: Annotated[int, typer.Option("-n", "--num-ranks", min=1, help="Number of ranks of the run.")] = 1,
    active: Annotated[int, typer.Option(min=1, help="Number of batches of the run to trace.")] = 3,
    out: Annotated[Path | None, out_folder("Folder for profile.json, profile.md and the run's traces.")] = None,
) -> None:
    """Show where a step's time goes, from a trace.

    Prints a table whose parts add up to the step. If you give a run, a few of its batches are trained and traced.
    """
    from llmfoundry_machines.bench.profile import run

    run(arguments, num_ranks, active, out)


@bench.command("block")
def bench_block(
    batches: Annotated[str, typer.Option(help="Batch sizes to measure, separated by commas.")] = "8,16,32,64",
    dtypes: LayerDtypes = "fp32,fp16,bf16",
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens per sample.")] = 1024,
    attention: LayerAttention = "",
    width: LayerWidth = 1600,
    heads: LayerHeads = 25,
    num_repeats: LayerRepeats = 3,
    minutes: Minutes = 60,
    out: Annotated[Path | None, out_folder("Folder for block.json, block.md and block.png.")] = None,
) -> None:
    """Measure one transformer layer, forward and backward.

    Measures each combination of precision, batch size and attention. The default is a layer of GPT-2 XL.
    """
    from llmfoundry_lite.cli.options import parse_counts
    from llmfoundry_machines.bench.block import run

    batch_sizes = parse_counts(batches, "--batches")
    run(
        "block",
        [(batch_size, seq_len) for batch_size in batch_sizes],
        dtypes.split(","),
        d_model=width,
        n_heads=heads,
        implementations=_split_names(attention),
        num_repeats=num_repeats,
        minutes=minutes,
        out=out,
    )


@bench.command("seqlen")
def bench_seqlen(
    lengths: Annotated[
        str, typer.Option(help="Sample lengths to measure, in tokens, separated by commas.")
    ] = "1024,2048,4096,8192,16384,65536",
    dtypes: LayerDtypes = "bf16",
    batch_size: Annotated[int, typer.Option(min=1, help="Samples in a batch.")] = 1,
    attention: LayerAttention = "",
    devices: Annotated[
        str, typer.Option(help="Numbers of devices to divide a sample among, separated by commas [default: 1 and all].")
    ] = "",
    width: LayerWidth = 1600,
    heads: LayerHeads = 25,
    num_repeats: LayerRepeats = 3,
    minutes: Minutes = 60,
    out: Annotated[Path | None, out_folder("Folder for seqlen.json, seqlen.md and seqlen.png.")] = None,
) -> None:
    """Measure one layer over sample lengths.

    Measures samples of 1K to 64K tokens by default, on one device and divided among several.
    """
    from llmfoundry_lite.cli.options import parse_counts
    from llmfoundry_machines.bench.block import all_devices, run

    sample_lengths = parse_counts(lengths, "--lengths")
    run(
        "seqlen",
        [(batch_size, seq_len) for seq_len in sample_lengths],
        dtypes.split(","),
        d_model=width,
        n_heads=heads,
        implementations=_split_names(attention),
        devices=parse_counts(devices, "--devices") if devices else all_devices(),
        num_repeats=num_repeats,
        minutes=minutes,
        out=out,
    )


@bench.command("accumulation")
def bench_accumulation(
    microbatches: Annotated[
        str, typer.Option(help="Numbers of microbatches to measure, separated by commas.")
    ] = "1,2,4,8,16,32,64",
    shape: Shape = "125m",
    seq_len: SampleTokens = 2048,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples in a step.")] = 64,
    dtype: Dtype = "bf16",
    num_steps: Annotated[int, typer.Option(min=1, help="Number of timed steps of each process.")] = 3,
    num_rounds: Annotated[int, typer.Option(min=1, help="Number of rounds in which the processes take turns.")] = 1,
    out: Annotated[
        Path | None, out_folder("Folder for accumulation.json, accumulation.md and accumulation.png.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Measure one batch in 1 to 64 microbatches.

    Shows how much time microbatches cost and how much memory they save, in steps of the Trainer.
    """
    from llmfoundry_lite.cli.options import parse_counts
    from llmfoundry_machines.bench.accumulation import run

    counts = parse_counts(microbatches, "--microbatches")
    run(counts, shape, seq_len, batch_size, dtype, num_steps, num_rounds, overrides or (), out)


@bench.command("memory")
def bench_memory(
    models: Annotated[
        str, typer.Option(help="Names of training YAMLs to measure, separated by commas.")
    ] = "mpt-125m,mpt-350m,mpt-1b",
    minutes: Minutes = 3,
    most: Annotated[int, typer.Option(min=1, help="Largest number of samples in a microbatch.")] = 8,
    out: Annotated[Path | None, out_folder("Folder for memory.json and memory.md.")] = None,
) -> None:
    """Measure the memory of real runs on this GPU.

    Compares it with the rehearsal and with the estimate.
    """
    companions.require("llmfoundry_planner", "rehearse")
    from llmfoundry_machines.bench.memory import run

    raise typer.Exit(run(_split_names(models), minutes, most, out))


def doctor_command(
    context: typer.Context,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the findings to this file, as JSON.", callback=expand_home)
    ] = None,
    folder: Annotated[
        str, typer.Option(help="Folder or URL where checkpoints will be saved, which is checked too.")
    ] = ".",
    num_ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Number of ranks that test collectives [default: one per device; 2 on CPUs]."),
    ] = None,
    alone: Annotated[bool, typer.Option("--alone", help="Check only this machine, even within a launch.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Measure less, which takes under 10 s without a GPU.")] = False,
) -> None:
    """Check this machine before you train on it. Exits with 2 if a check failed.

    Under torchrun or srun, it checks all nodes together: each pair's link, each node's rate, clocks and versions.
    """
    from llmfoundry_lite.checkpoint.open_folder import open_folder
    from llmfoundry_lite.ranks.rank import adopt_srun, this_rank
    from llmfoundry_machines.doctor.examine import doctor, leave_without_waiting
    from llmfoundry_machines.doctor.finding import CheckOptions

    checkpoint_folder = open_folder(folder)
    local_path = checkpoint_folder.path_here  # None for a URL
    machine = CheckOptions(folder=local_path or checkpoint_folder.url, num_ranks=num_ranks, quick=quick)

    if not alone:
        # This module sets the log level of torch's C++ code, which reads it when torch is first imported.
        import llmfoundry_lite.ranks.ending  # noqa: F401

        try:
            adopt_srun()
            if this_rank().world_size > 1:
                from llmfoundry_machines.doctor.nodes import examine_nodes

                reason = "it compares the launch's ranks, --alone examines this machine"
                refuse_conflicting(context, "doctor in a launch", reason, only=("folder", "num_ranks"))
                raise typer.Exit(examine_nodes(machine, json_file))
        except ConfigError as error:
            # All ranks of a node raise the same ConfigError, so only the node's first rank prints it.
            if this_rank().local_rank > 0:
                raise typer.Exit(error.exit_code) from None
            raise

    # Only a process outside a launch, or with --alone, goes on here.
    code = doctor(machine, json_file)
    leave_without_waiting(code)
    raise typer.Exit(code)


def _split_names(text: str) -> list[str]:
    """Split an option's names at their commas: `sdpa,flex` gives ["sdpa", "flex"], and an empty text gives []."""
    return [name for name in text.split(",") if name]
