"""Proofs, and races beside peers: `python -m benchmarks NAME --help`. Not part of the wheel.

docs/claims.md says which claim rests on which benchmark. Raw reports of the measured ones lie in benchmarks/results.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from llmfoundry_lite.cli import main
from llmfoundry_lite.cli.bench import Counts, Minutes, SampleTokens, Shape
from llmfoundry_lite.cli.options import out_folder
from llmfoundry_lite.errors import EXIT_BUG, EXIT_DONE, UserError

bench = typer.Typer(help="Proofs, and races beside peers.", no_args_is_help=True, rich_markup_mode=None)


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
        from benchmarks.train.growth import run_growth

        run_growth(dtype, num_steps, num_rounds, out)
        return
    from benchmarks.train.train import run

    settings = (shape, seq_len, batch_size, num_steps, num_rounds)
    run(*settings, peer_python=peer_python, overrides=overrides or (), out=out)


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
    from benchmarks.pipeline import run
    from llmfoundry_lite.plan.plan import parse_counts

    counts = parse_counts(stages, "--stages"), parse_counts(microbatches, "--microbatches")
    run(*counts, schedules.split(","), milliseconds, num_repeats, out)


@bench.command("memory")
def bench_memory(
    models: Annotated[str, typer.Option(help="Names of training runs, with commas [all that ship].")] = "",
    overlays: Annotated[str, typer.Option(help="Names of hardware overlays [all that ship, but cpu].")] = "",
    devices: Annotated[str, typer.Option(help="Counts; smallest: the fewest that one sample fits.")] = "smallest,1024",
    minutes: Minutes = 600,
    out: Annotated[
        Path | None, out_folder("A folder for memory.json and .md; what it has is not rehearsed again.")
    ] = None,
) -> None:
    """Memory of all that ships: the estimate beside the rehearsal. Exit code 2 where it is not 0 to 5 % above."""
    from benchmarks.memory import run

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
    from benchmarks.prepare import run

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
    from benchmarks.order import run

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
        from benchmarks.checkpoint.plan import run as walk

        walk(plan=plan, num_ranks=num_ranks, sharding=sharding, folder=folder, out=out)
        return
    from benchmarks.checkpoint.checkpoint import run

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
    from benchmarks.start import run

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
    from benchmarks.recover import run

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
        from benchmarks.eval.parity import run as compare_answers

        if peer_python is None or model is None:
            raise UserError("--parity compares an exported model's answers: give --model FOLDER and --peer-python")
        report = compare_answers(peer_python=peer_python, model=model, data=parity, limit=num_items, out=out)
        raise typer.Exit(EXIT_DONE if report["is_same"] else EXIT_BUG)

    from benchmarks.eval.eval import run

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
    from benchmarks.intervals import run

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
    from benchmarks.sequential import run

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
    from benchmarks.switch.switch import run

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
        from benchmarks.islands.faults import run as run_faults

        report = run_faults(num_faults=faults, seed=seed, out=out, keep=keep)
        raise typer.Exit(EXIT_DONE if report["passed"] else EXIT_BUG)
    if speed:
        from benchmarks.islands.speed import run as run_speed

        run_speed(data=data_folder, seed=seed, other_python=other_python, out=out, keep=keep)
        return
    from benchmarks.islands.islands import run

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


def run_benchmark(arguments: list[str]) -> int:
    """Run one command line and return its exit code."""
    return main.run(arguments, bench, "python -m benchmarks")


if __name__ == "__main__":
    sys.exit(run_benchmark(sys.argv[1:]))
