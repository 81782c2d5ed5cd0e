"""`llmfoundry-lite bench`: measurements beside peers, on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from llmfoundry_lite.cli.options import out_folder, refuse_beside
from llmfoundry_lite.errors import EXIT_BUG, EXIT_DONE, UserError

bench = typer.Typer(help="Measure, beside peers, on this machine.", no_args_is_help=True, rich_markup_mode=None)


Shape = Annotated[str, typer.Option(help="tiny, 10m, 40m, 125m, 350m, 1b, 3b or 7b.")]
Dtype = Annotated[str, typer.Option(help="fp32 or bf16.")]
SampleTokens = Annotated[int, typer.Option(min=2, help="Tokens in a sample.")]
Minutes = Annotated[float, typer.Option(help="Begin nothing after this long.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value for the runs.")]
Counts = Annotated[str, typer.Option(help="Counts, with commas.")]
LayerDtypes = Annotated[str, typer.Option(help="Of fp32, fp16, bf16.")]
LayerAttention = Annotated[str, typer.Option(help="Implementations [all that this device has].")]
LayerWidth = Annotated[int, typer.Option(min=1, help="Of the residual stream.")]
LayerHeads = Annotated[int, typer.Option(min=1)]
LayerRepeats = Annotated[int, typer.Option(min=1, help="Timed, after one that is not.")]


@bench.command("train")
def bench_train(
    shape: Shape = "125m",
    seq_len: Annotated[int, typer.Option(help="Tokens in a sample.")] = 512,
    batch_size: Annotated[int, typer.Option(help="Samples.")] = 4,
    num_steps: Annotated[int, typer.Option(help="Timed steps in each process.")] = 3,
    num_rounds: Annotated[int, typer.Option(help="How often the processes take turns.")] = 2,
    peer_python: Annotated[
        str | None, typer.Option(help="The interpreter of an environment that has LLM Foundry.")
    ] = None,
    growth: Annotated[
        bool, typer.Option("--growth", help="Instead: how a step grows with parameters, sequence and batch.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="Of --growth: fp32 or bf16.")] = "bf16",
    out: Annotated[Path | None, out_folder("Also write the result to this folder, as JSON and Markdown.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value for the Trainer's side.")] = None,
) -> None:
    """A training step beside LLM Foundry's.

    Through the Trainer; also beside a bare loop and the matrix products it is made of.
    """
    if growth:
        from llmfoundry_lite.bench.train.growth import run_growth

        run_growth(dtype, num_steps, num_rounds, out)
        return
    from llmfoundry_lite.bench.train.train import run

    settings = (shape, seq_len, batch_size, num_steps, num_rounds)
    run(*settings, peer_python=peer_python, overrides=overrides or (), out=out)


@bench.command("mfu")
def bench_mfu(
    shapes: Annotated[str, typer.Option(help="Of tiny, 10m, 40m, 125m, 350m, 1b, 3b, 7b.")] = "125m,350m,1b,3b,7b",
    seq_len: Annotated[int, typer.Option(help="Tokens in a sample.")] = 2048,
    batch_size: Annotated[int, typer.Option(help="Samples in a batch; how many at a time is found out.")] = 16,
    num_steps: Annotated[int, typer.Option(help="Timed steps.")] = 3,
    minutes: Minutes = 60,
    out: Annotated[Path | None, out_folder("Also write mfu.json and mfu.md to this folder.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value for the Trainer.")] = None,
) -> None:
    """Model FLOPs utilisation of one device in bf16.

    Shapes, attention, compiled or not, beside a plain step.
    """
    from llmfoundry_lite.bench.train.mfu import run

    run(shapes.split(","), seq_len, batch_size, num_steps, minutes, overrides or (), out)


@bench.command("scaling")
def bench_scaling(
    context: typer.Context,
    devices: Annotated[str, typer.Option(help="Counts on this machine, with commas.")] = "1,2",
    runs: Annotated[str, typer.Option(help="Instead: finished runs, with commas. Nothing is started.")] = "",
    shape: Shape = "125m",
    seq_len: SampleTokens = 2048,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of all devices, in strong scaling.")] = 64,
    dtype: Dtype = "bf16",
    num_steps: Annotated[int, typer.Option(min=1, help="Timed steps of each launch.")] = 5,
    num_rounds: Annotated[int, typer.Option(min=1, help="How often the launches take turns.")] = 2,
    out: Annotated[Path | None, out_folder("Also write scaling.json, .md and .png to this folder.")] = None,
    overrides: Overrides = None,
) -> None:
    """Speed-up, efficiency and MFU over counts of devices.

    At a fixed batch (strong) and at a fixed share of it (weak).
    """
    if runs:
        refuse_beside(context, "--runs", "finished runs say what they were, nothing is launched", but=("out",))
    from llmfoundry_lite.bench.train.scaling import run, table_runs
    from llmfoundry_lite.plan.plan import parse_counts

    if runs:
        table_runs(runs.split(","), out)
        return
    run(parse_counts(devices), shape, seq_len, batch_size, dtype, num_steps, num_rounds, overrides or (), out)


@bench.command("compare")
def bench_compare(
    first: Annotated[Path, typer.Argument(help="The JSON that a bench wrote with --out.")],
    second: Annotated[Path, typer.Argument(help="The same bench's of another machine, or another torch.")],
    out: Annotated[Path | None, out_folder("Also write compare-BENCH.json and .md to this folder.")] = None,
) -> None:
    """Two machines or two software stacks side by side. Refuses what cannot be compared, and says why."""
    from llmfoundry_lite.bench.compare import run

    run(first, second, out)


@bench.command("profile")
def bench_profile(
    arguments: Annotated[
        list[str], typer.Argument(help="Traces of callbacks.profiler; or RUN.yaml [HARDWARE.yaml] [key=value ...].")
    ],
    num_ranks: Annotated[int, typer.Option("-n", "--num-ranks", min=1, help="Of a run.")] = 1,
    active: Annotated[int, typer.Option(min=1, help="Batches of a run that are traced.")] = 3,
    out: Annotated[Path | None, out_folder("Also write profile.json, .md and a run's traces here.")] = None,
) -> None:
    """Where a step's time goes, from a trace.

    One table that adds up. Given a run, a few of its batches are traced.
    """
    from llmfoundry_lite.bench.profile import run

    run(arguments, num_ranks, active, out)


@bench.command("block")
def bench_block(
    batches: Annotated[str, typer.Option(help="Samples, with commas.")] = "8,16,32,64",
    dtypes: LayerDtypes = "fp32,fp16,bf16",
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens in a sample.")] = 1024,
    attention: LayerAttention = "",
    width: LayerWidth = 1600,
    heads: LayerHeads = 25,
    num_repeats: LayerRepeats = 3,
    minutes: Minutes = 60,
    out: Annotated[Path | None, out_folder("Also write block.json, .md and .png to this folder.")] = None,
) -> None:
    """One transformer layer, forward and backward.

    GPT-2 XL's by default, in each dtype, batch and attention.
    """
    from llmfoundry_lite.bench.block import run
    from llmfoundry_lite.plan.plan import parse_counts

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
    lengths: Annotated[str, typer.Option(help="Tokens in a sample, with commas.")] = "1024,2048,4096,8192,16384,65536",
    dtypes: LayerDtypes = "bf16",
    batch_size: Annotated[int, typer.Option(min=1, help="Samples.")] = 1,
    attention: LayerAttention = "",
    devices: Annotated[
        str, typer.Option(help="Counts that divide each sample, with commas [one, and all that there are].")
    ] = "",
    width: LayerWidth = 1600,
    heads: LayerHeads = 25,
    num_repeats: LayerRepeats = 3,
    minutes: Minutes = 60,
    out: Annotated[Path | None, out_folder("Also write seqlen.json, .md and .png to this folder.")] = None,
) -> None:
    """The same layer over lengths of a sample.

    1K to 64K tokens, also divided where one device is too small.
    """
    from llmfoundry_lite.bench.block import all_devices, run
    from llmfoundry_lite.plan.plan import parse_counts

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
    microbatches: Counts = "1,2,4,8,16,32,64",
    shape: Shape = "125m",
    seq_len: SampleTokens = 2048,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of a step.")] = 64,
    dtype: Dtype = "bf16",
    num_steps: Annotated[int, typer.Option(min=1, help="Timed steps of each process.")] = 3,
    num_rounds: Annotated[int, typer.Option(min=1, help="How often the processes take turns.")] = 1,
    out: Annotated[Path | None, out_folder("Also write accumulation.json, .md and .png here.")] = None,
    overrides: Overrides = None,
) -> None:
    """One batch in 1 to 64 microbatches.

    Through the Trainer: what they cost, and the memory that they save.
    """
    from llmfoundry_lite.bench.train.accumulation import run
    from llmfoundry_lite.plan.plan import parse_counts

    counts = parse_counts(microbatches, "--microbatches")
    run(counts, shape, seq_len, batch_size, dtype, num_steps, num_rounds, overrides or (), out)


@bench.command("pipeline")
def bench_pipeline(
    stages: Counts = "2,4",
    microbatches: Counts = "4,8,16",
    schedules: Annotated[str, typer.Option(help="With commas.")] = "gpipe,1f1b,interleaved,zero_bubble,zbv",
    milliseconds: Annotated[float, typer.Option(min=1, help="Of a pass through a device's blocks.")] = 100,
    num_repeats: Annotated[int, typer.Option(min=1, help="Timed steps of each, after one that is not.")] = 2,
    out: Annotated[Path | None, out_folder("Also write pipeline.json, .md and .png to this folder.")] = None,
) -> None:
    """How long stages of a pipeline wait.

    By ranks that sleep instead of computing, beside the formula's share.
    """
    from llmfoundry_lite.bench.pipeline import run
    from llmfoundry_lite.plan.plan import parse_counts

    counts = parse_counts(stages, "--stages"), parse_counts(microbatches, "--microbatches")
    run(*counts, schedules.split(","), milliseconds, num_repeats, out)


@bench.command("memory")
def bench_memory(
    models: Annotated[str, typer.Option(help="Names of training runs, with commas [all that ship].")] = "",
    overlays: Annotated[str, typer.Option(help="Names of hardware overlays [all that ship, but cpu].")] = "",
    devices: Annotated[str, typer.Option(help="Counts; smallest: the fewest that one sample fits.")] = "smallest,1024",
    here: Annotated[bool, typer.Option("--here", help="Instead: the real run on this machine's GPU.")] = False,
    minutes: Minutes = 600,
    out: Annotated[
        Path | None, out_folder("A folder for memory.json and .md; what it has is not rehearsed again.")
    ] = None,
) -> None:
    """Memory of all that ships: the estimate beside the rehearsal. Exit code 2 where it is not 0 to 5 % above."""
    from llmfoundry_lite.bench.memory import run, run_here

    if here:
        raise typer.Exit(run_here(list(filter(None, models.split(","))), minutes, out))
    chosen = (list(filter(None, text.split(","))) for text in (models, overlays, devices))
    raise typer.Exit(run(*chosen, minutes=minutes, out=out))


@bench.command("prepare")
def bench_prepare(
    peer_command: Annotated[
        str | None, typer.Option(help="The llmfoundry program of an environment that has LLM Foundry.")
    ] = None,
    text_bytes: Annotated[int, typer.Option(min=1, help="Of the text to tokenise.")] = 256_000_000,
    max_seq_len: Annotated[int, typer.Option(min=1, help="Tokens in a sample.")] = 2048,
    num_cores: Annotated[int, typer.Option(min=1, help="Given to each side.")] = 2,
    num_rounds: Annotated[int, typer.Option(min=1, help="How often the two take turns.")] = 1,
    out: Annotated[Path | None, out_folder("A folder for prepare.json and .md.")] = None,
) -> None:
    """`data prepare` beside LLM Foundry's converter.

    On the same text.
    """
    from llmfoundry_lite.bench.prepare import run

    run(
        peer_command=peer_command,
        text_bytes=text_bytes,
        max_seq_len=max_seq_len,
        num_cores=num_cores,
        num_rounds=num_rounds,
        out=out,
    )


@bench.command("order")
def bench_order(
    num_shards: Annotated[int, typer.Option(min=1, help="Of the data set to open.")] = 1_560_000,
    num_workers: Annotated[int, typer.Option(min=0, help="Of its loader.")] = 2,
    out: Annotated[Path | None, out_folder("A folder for shuffle.json and .md.")] = None,
) -> None:
    """How well batches are mixed.

    Beside StreamingDataset's shuffles; and what it takes to open a data set of any size.
    """
    from llmfoundry_lite.bench.order import run

    run(num_shards=num_shards, num_workers=num_workers, out=out)


@bench.command("checkpoint")
def bench_checkpoint(
    num_rounds: Annotated[int, typer.Option(min=1, help="Warm saves of each side, after a first one.")] = 3,
    sizes: Annotated[str, typer.Option(help="Parameters, for how ours grows.")] = "10m,40m,125m,350m",
    folder: Annotated[Path, typer.Option(help="On the disk to test; left as it was.")] = Path("."),
    out: Annotated[
        Path | None, out_folder("A folder for checkpoint.json and .md, or checkpoint-plan.json and .md.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model: shows that it runs, not how fast.")] = False,
    plan: Annotated[
        Path | None, typer.Option(help="Do not save for real: walk a training YAML's run, with --num-ranks.")
    ] = None,
    num_ranks: Annotated[int, typer.Option(min=1, help="Of --plan.")] = 4096,
    sharding: Annotated[str | None, typer.Option(help="Of --plan [what the YAML says].")] = None,
) -> None:
    """Saves and loads beside torch's and Composer's.

    And beside this machine's limits.
    """
    if plan is not None:
        from llmfoundry_lite.bench.checkpoint.plan import run as walk

        walk(plan=plan, num_ranks=num_ranks, sharding=sharding, folder=folder, out=out)
        return
    from llmfoundry_lite.bench.checkpoint.checkpoint import run

    run(num_rounds=num_rounds, sizes=sizes.split(","), out=out, folder=folder, quick=quick)


@bench.command("start")
def bench_start(
    shape: Shape = "10m",
    seq_len: SampleTokens = 128,
    num_rounds: Annotated[int, typer.Option(min=1, help="How often the launchers take turns.")] = 5,
    out: Annotated[Path | None, out_folder("A folder for start.json and .md.")] = None,
) -> None:
    """Seconds from the command to the first batch.

    Of a run that is carried on, under each launcher.
    """
    from llmfoundry_lite.bench.start import run

    run(shape, seq_len, num_rounds, out)


@bench.command("recover")
def bench_recover(
    shape: Shape = "10m",
    seq_len: SampleTokens = 128,
    batch_size: Annotated[int, typer.Option(min=2, help="Samples of both ranks.")] = 8,
    num_faults: Annotated[int, typer.Option(min=0, help="Of ranks and of our launcher.")] = 50,
    peer_faults: Annotated[int, typer.Option(min=0, help="Of ranks under torchrun.")] = 6,
    seed: Annotated[int, typer.Option(help="Of what is done when.")] = 17,
    out: Annotated[Path | None, out_folder("A folder for recover.json and .md.")] = None,
) -> None:
    """What a fault costs.

    A run on two ranks; ranks and launcher are killed and frozen at random.
    """
    from llmfoundry_lite.bench.recover import run

    run(shape, seq_len, batch_size, num_faults, peer_faults, seed, out)


@bench.command("eval")
def bench_eval(
    peer_python: Annotated[
        str | None, typer.Option(help="The Python of an environment that has lm-evaluation-harness.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="An exported folder [random weights of --shape].")] = None,
    data: Annotated[Path | None, typer.Option(help="Multiple-choice items, JSONL [made up, in five shapes].")] = None,
    shape: Annotated[str, typer.Option(help="Of bench train's.")] = "125m",
    num_items: Annotated[int | None, typer.Option(min=2, help="Of each suite [60] or task [all].")] = None,
    num_rounds: Annotated[int, typer.Option(min=1, help="How often the two take turns.")] = 1,
    parity: Annotated[
        Path | None, typer.Option(help="Do not time: compare the answers to the public tasks in this folder.")
    ] = None,
    out: Annotated[Path | None, out_folder("A folder for eval.json and .md, or eval-parity.json and .md.")] = None,
) -> None:
    """Evaluation in context beside lm-evaluation-harness.

    The same prompts, item by item.
    """
    if parity is not None:
        from llmfoundry_lite.bench.eval.parity import run as compare_answers

        if peer_python is None or model is None:
            raise UserError("--parity compares an exported model's answers: give --model FOLDER and --peer-python")
        report = compare_answers(peer_python=peer_python, model=model, data=parity, limit=num_items, out=out)
        raise typer.Exit(EXIT_DONE if report["is_same"] else EXIT_BUG)

    from llmfoundry_lite.bench.eval.eval import run

    run(
        peer_python=peer_python,
        model=model,
        data=data,
        shape=shape,
        num_items=num_items or 60,
        num_rounds=num_rounds,
        out=out,
    )


@bench.command("intervals")
def bench_intervals(
    num_draws: Annotated[int, typer.Option(min=20, help="Simulated comparisons of each case.")] = 20_000,
    out: Annotated[Path | None, out_folder("A folder for intervals.json and .md.")] = None,
) -> None:
    """How often `compare`'s intervals cover, by simulation.

    And the size of its tests.
    """
    from llmfoundry_lite.bench.intervals import run

    run(num_draws=num_draws, out=out)


@bench.command("sequential")
def bench_sequential(
    results: Annotated[
        list[Path] | None, typer.Argument(metavar="[RESULT.json...]", help="Every two of them, besides.")
    ] = None,
    num_draws: Annotated[int, typer.Option(min=200, help="Simulated comparisons of each case.")] = 20_000,
    out: Annotated[Path | None, out_folder("A folder for sequential.json and .md.")] = None,
) -> None:
    """Errors of comparisons that stop when decided.

    Verdicts beside those of all items, and the share of the items asked.
    """
    from llmfoundry_lite.bench.sequential import run

    run(results or (), num_draws=num_draws, out=out)


@bench.command("switch")
def bench_switch(
    data_folder: Annotated[
        Path, typer.Option("--data", help="Of `data prepare`; the standard library's source if it is not there yet.")
    ] = Path("data/python-stdlib"),
    num_batches: Annotated[int, typer.Option(min=3, help="Of each run.")] = 100,
    every: Annotated[int, typer.Option(min=1, help="Batches from one switch to the next.")] = 20,
    precision: Annotated[str, typer.Option(help="fp32 or amp_bf16.")] = "fp32",
    seed: Annotated[int, typer.Option(help="Of weights and data.")] = 17,
    other_python: Annotated[
        str | None, typer.Option(help="The Python of an environment with another torch; cluster D is launched with it.")
    ] = None,
    layouts: Annotated[
        bool, typer.Option("--layouts", help="Instead: ways to divide it between devices, and nothing else.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time; those that are timed run alone.")] = 1,
    out: Annotated[Path | None, out_folder("A folder for switch.json (or switch-layouts.json), .md, .png.")] = None,
    keep: Annotated[Path | None, typer.Option(help="An empty folder for the runs themselves.")] = None,
) -> None:
    """Is a run that switches between clusters the same run?

    On several emulated "clusters". Exit code 1 if it is not.
    """
    from llmfoundry_lite.bench.switch.switch import run

    report = run(
        data=data_folder,
        num_batches=num_batches,
        every=every,
        precision=precision,
        seed=seed,
        other_python=other_python,
        layouts=layouts,
        jobs=jobs,
        out=out,
        keep=keep,
    )
    raise typer.Exit(EXIT_DONE if report["passed"] else EXIT_BUG)


@bench.command("islands")
def bench_islands(
    data_folder: Annotated[
        Path, typer.Option("--data", help="Of `data prepare`; the standard library's source if it is not there yet.")
    ] = Path("data/python-stdlib"),
    num_batches: Annotated[int, typer.Option(min=3, help="Of each run.")] = 120,
    kill_at: Annotated[int, typer.Option(min=1, help="Batches after which island B is killed.")] = 30,
    seed: Annotated[int, typer.Option(help="Of weights and data.")] = 17,
    other_python: Annotated[
        str | None, typer.Option(help="The Python of an environment with another torch; island B is launched with it.")
    ] = None,
    speed: Annotated[
        bool, typer.Option("--speed", help="Instead: what the exchange costs, over links of several rates.")
    ] = False,
    faults: Annotated[
        int, typer.Option(min=0, help="Instead: so many random faults of ranks, islands, links and the coordinator.")
    ] = 0,
    out: Annotated[
        Path | None, out_folder("A folder for islands.json, .md and .png; islands-speed.* or islands-faults.*.")
    ] = None,
    keep: Annotated[Path | None, typer.Option(help="An empty folder for the runs themselves.")] = None,
) -> None:
    """Is a run of two islands, one of which dies, one run?

    Beside one world's. Exit code 1 if it is not.
    """
    if faults:
        from llmfoundry_lite.bench.islands.faults import run as run_faults

        report = run_faults(num_faults=faults, seed=seed, out=out, keep=keep)
        raise typer.Exit(EXIT_DONE if report["passed"] else EXIT_BUG)
    if speed:
        from llmfoundry_lite.bench.islands.speed import run as run_speed

        run_speed(data=data_folder, seed=seed, other_python=other_python, out=out, keep=keep)
        return
    from llmfoundry_lite.bench.islands.islands import run

    report = run(
        data=data_folder,
        num_batches=num_batches,
        kill_at=kill_at,
        seed=seed,
        other_python=other_python,
        out=out,
        keep=keep,
    )
    raise typer.Exit(EXIT_DONE if report["passed"] else EXIT_BUG)
