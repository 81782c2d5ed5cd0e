"""`llmfoundry-lite`: everything that needs no launcher.

    llmfoundry-lite data prepare --source python-stdlib --out data/stdlib --tokenizer train:4096 --max-seq-len 256

Owns the commands, their options, and what a failure looks like: one line on standard error and the exit codes of
`errors.py`. Leaves the work to the packages; each command imports what it needs when it is called, so that `--help`
answers at once.
"""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from llmfoundry_lite.cli_checkpoint import checkpoint
from llmfoundry_lite.errors import EXIT_BUG, EXIT_DONE, EXIT_USER, UserError, printable

EXIT_INTERRUPTED = 130
"""What shells report for a program ended by Ctrl-C."""

app = typer.Typer(
    help="Data, checkpoints and results of MPT training runs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
data = typer.Typer(help="Prepare training data.", no_args_is_help=True, rich_markup_mode=None)
bench = typer.Typer(help="Measure, beside peers, on this machine.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data, name="data")
app.add_typer(checkpoint, name="checkpoint")
app.add_typer(bench, name="bench")


class OnError(StrEnum):
    """What to do with a document that cannot be read."""

    stop = "stop"
    skip = "skip"


class FigureFormat(StrEnum):
    """A file that a figure can be."""

    png = "png"
    pdf = "pdf"
    svg = "svg"


class FigureAxis(StrEnum):
    """What batches are placed by."""

    batch = "batch"
    tokens = "tokens"
    flops = "flops"


@data.callback()
def data_commands() -> None:
    """Prepare training data."""


@data.command("prepare")
def data_prepare(
    out: Annotated[Path, typer.Option(help="The folder for train, val, tokenizer and summary.json.")],
    tokenizer: Annotated[str, typer.Option(help="A Hub name, a local folder, or train:VOCAB_SIZE.")],
    max_seq_len: Annotated[int, typer.Option(help="Tokens in a sample.")],
    sources: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SOURCES]...", help="python-stdlib, hf:NAME[:CONFIG], or files, folders and globs."),
    ] = None,
    source: Annotated[list[str] | None, typer.Option(help="The same, before the others.")] = None,
    text_key: Annotated[
        list[str] | None,
        typer.Option(help="The field or column that holds the text, such as meta.text; several are joined [text]."),
    ] = None,
    split: Annotated[str, typer.Option(help="The split of a Hub data set, or of a saved one, to read.")] = "train",
    encoding: Annotated[
        str | None, typer.Option(help="Of text, JSON lines and CSV: latin-1, utf-16, … [utf-8]")
    ] = None,
    val_fraction: Annotated[
        float | None, typer.Option(help="Share held out for validation [0.005; python-stdlib: 0.05].")
    ] = None,
    num_workers: Annotated[int | None, typer.Option(min=1, help="Processes [one per core].")] = None,
    on_error: Annotated[OnError, typer.Option(help="At a document that cannot be read.")] = OnError.stop,
    size_limit: Annotated[int, typer.Option(help="Bytes of a shard.")] = 64 * 1024 * 1024,
    compression: Annotated[str | None, typer.Option(help="Of the shards: zstd, zstd:9, gz, …")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Discard an earlier preparation in OUT.")] = False,
) -> None:
    """Turn text into tokenised MDS shards. Killed and started again, it carries on."""
    from llmfoundry_lite.data.prepare import prepare
    from llmfoundry_lite.data.request import Request
    from llmfoundry_lite.data.summary import print_summary

    request = Request(
        sources=(*(source or ()), *(sources or ())),
        tokenizer=tokenizer,
        max_seq_len=max_seq_len,
        text_key=tuple(text_key) if text_key and len(text_key) > 1 else (text_key or ["text"])[0],
        split=split,
        encoding=encoding,
        on_error=on_error.value,
        val_fraction=val_fraction,
        size_limit_bytes=size_limit,
        compression=compression,
    )
    try:
        summary = prepare(
            request, out, num_workers=num_workers, overwrite=overwrite, show_progress=True, notify=typer.echo
        )
    except KeyboardInterrupt:
        print("interrupted: the same command carries on where this one stopped", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    print_summary(summary, out)


@data.command("fetch-tasks")
def data_fetch_tasks(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAMES]", help="Such as arc_easy [all].")] = None,
    out: Annotated[Path, typer.Option(help="The folder for <name>.jsonl.")] = Path("data/eval"),
    force: Annotated[bool, typer.Option("--force", help="Fetch again what is there.")] = False,
) -> None:
    """Download the public evaluation tasks' data from the Hugging Face Hub."""
    from llmfoundry_lite.data.fetch_tasks import fetch_tasks

    fetch_tasks(names or (), out, force=force, notify=typer.echo)


@data.command("make-tasks")
def data_make_tasks(
    out: Annotated[Path, typer.Option(help="The folder for <name>.jsonl.")] = Path("data/eval"),
) -> None:
    """Make evaluation tasks from the modules that `data prepare --source python-stdlib` holds out."""
    from llmfoundry_lite.data.make_tasks import make_tasks

    make_tasks(out, notify=typer.echo)


@bench.command("train")
def bench_train(
    shape: Annotated[str, typer.Option(help="tiny, 10m, 40m, 124m, 350m, 1b, 3b or 7b.")] = "124m",
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
    out: Annotated[
        Path | None, typer.Option(help="Also write the result to this folder, as JSON and Markdown.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value for the Trainer's side.")] = None,
) -> None:
    """A training step through the Trainer beside LLM Foundry's, a bare loop and the matrix products it is made of."""
    from llmfoundry_lite.bench import growth as bench_growth
    from llmfoundry_lite.bench import train

    if growth:
        report = bench_growth.run_growth(dtype, num_steps, num_rounds)
    else:
        report = train.run(
            *(shape, seq_len, batch_size, num_steps, num_rounds), peer_python=peer_python, overrides=overrides or ()
        )
    if out is not None:
        (bench_growth if growth else train).write_report(report, out)


@bench.command("mfu")
def bench_mfu(
    shapes: Annotated[str, typer.Option(help="Of tiny, 10m, 40m, 124m, 350m, 1b, 3b, 7b.")] = "124m,350m,1b,3b,7b",
    seq_len: Annotated[int, typer.Option(help="Tokens in a sample.")] = 2048,
    batch_size: Annotated[int, typer.Option(help="Samples in a batch; how many at a time is found out.")] = 16,
    num_steps: Annotated[int, typer.Option(help="Timed steps.")] = 3,
    minutes: Annotated[float, typer.Option(help="Begin nothing after this long.")] = 60,
    out: Annotated[Path | None, typer.Option(help="Also write mfu.json and mfu.md to this folder.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value for the Trainer.")] = None,
) -> None:
    """Model FLOPs utilisation of one device in bf16: shapes, attention, compiled or not, beside a plain step."""
    from llmfoundry_lite.bench.mfu import run, write_report

    report = run(shapes.split(","), seq_len, batch_size, num_steps, minutes, overrides or ())
    if out is not None:
        write_report(report, out)


@bench.command("prepare")
def bench_prepare(
    peer_command: Annotated[
        str | None, typer.Option(help="The llmfoundry program of an environment that has LLM Foundry.")
    ] = None,
    text_bytes: Annotated[int, typer.Option(min=1, help="Of the text to tokenise.")] = 256_000_000,
    max_seq_len: Annotated[int, typer.Option(min=1, help="Tokens in a sample.")] = 2048,
    num_cores: Annotated[int, typer.Option(min=1, help="Given to each side.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="The fastest counts.")] = 1,
) -> None:
    """`data prepare` beside LLM Foundry's converter, on the same text."""
    from llmfoundry_lite.bench.prepare import print_report, run

    print_report(
        run(
            peer_command=peer_command,
            text_bytes=text_bytes,
            max_seq_len=max_seq_len,
            num_cores=num_cores,
            repeats=repeats,
        )
    )


@bench.command("order")
def bench_order(
    num_shards: Annotated[int, typer.Option(min=1, help="Of the data set to open.")] = 1_560_000,
    num_workers: Annotated[int, typer.Option(min=0, help="Of its loader.")] = 2,
    out: Annotated[Path | None, typer.Option(help="A folder for shuffle.json and .md.")] = None,
) -> None:
    """How well batches are mixed, beside StreamingDataset's shuffles; what it takes to open a data set of any size."""
    from llmfoundry_lite.bench.order import run

    run(num_shards=num_shards, num_workers=num_workers, out=out)


@bench.command("checkpoint")
def bench_checkpoint(
    num_rounds: Annotated[int, typer.Option(min=1, help="Warm saves of each side, after a first one.")] = 3,
    sizes: Annotated[str, typer.Option(help="Parameters, for how ours grows.")] = "10m,40m,125m,350m",
    folder: Annotated[Path, typer.Option(help="On the disk to test; left as it was.")] = Path("."),
    out: Annotated[Path | None, typer.Option(help="A folder for bench-checkpoint.json and .md.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model: shows that it runs, not how fast.")] = False,
    plan: Annotated[
        Path | None, typer.Option(help="Do not save for real: walk a training YAML's run, with --num-ranks.")
    ] = None,
    num_ranks: Annotated[int, typer.Option(min=1, help="Of --plan.")] = 4096,
    sharding: Annotated[str | None, typer.Option(help="Of --plan [what the YAML says].")] = None,
) -> None:
    """Saves and loads beside torch's, Composer's and this machine's limits."""
    if plan is not None:
        from llmfoundry_lite.bench.checkpoint_plan import run as walk

        walk(plan=plan, num_ranks=num_ranks, sharding=sharding, folder=folder, out=out)
        return
    from llmfoundry_lite.bench.checkpoint import run

    run(num_rounds=num_rounds, sizes=sizes.split(","), out=out, folder=folder, quick=quick)


@bench.command("eval")
def bench_eval(
    peer_python: Annotated[
        str | None, typer.Option(help="The Python of an environment that has lm-evaluation-harness.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="An exported folder [random weights of --shape].")] = None,
    data: Annotated[Path | None, typer.Option(help="Multiple-choice items, JSONL [made up, in five shapes].")] = None,
    shape: Annotated[str, typer.Option(help="125m or tiny.")] = "125m",
    num_items: Annotated[int | None, typer.Option(min=2, help="Of each suite [60] or task [all].")] = None,
    num_rounds: Annotated[int, typer.Option(min=1, help="How often the two take turns.")] = 1,
    parity: Annotated[
        Path | None, typer.Option(help="Do not time: compare the answers to the public tasks in this folder.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="A folder for eval.json and .md, or eval-parity.json and .md.")
    ] = None,
) -> None:
    """Evaluation in context beside lm-evaluation-harness: the same prompts, item by item."""
    if parity is not None:
        from llmfoundry_lite.bench.eval_parity import run as compare_answers

        if peer_python is None or model is None:
            raise UserError("--parity compares an exported model's answers: give --model FOLDER and --peer-python")
        report = compare_answers(peer_python=peer_python, model=model, data=parity, limit=num_items, out=out)
        raise typer.Exit(EXIT_DONE if report["is_same"] else EXIT_BUG)

    from llmfoundry_lite.bench.eval import run

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
    out: Annotated[Path | None, typer.Option(help="A folder for intervals.md.")] = None,
) -> None:
    """Coverage of `compare`'s intervals and size of its tests, by simulation."""
    from llmfoundry_lite.bench.intervals import run

    run(num_draws=num_draws, out=out)


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
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time; those that are timed run alone.")] = 1,
    out: Annotated[Path | None, typer.Option(help="A folder for switch.json, .md and .png.")] = None,
    keep: Annotated[Path | None, typer.Option(help="An empty folder for the runs themselves.")] = None,
) -> None:
    """One run on several "clusters" and switching between them: is it the same run? Exit code 1 if not."""
    from llmfoundry_lite.bench.switch import run

    report = run(
        data=data_folder,
        num_batches=num_batches,
        every=every,
        precision=precision,
        seed=seed,
        other_python=other_python,
        jobs=jobs,
        out=out,
        keep=keep,
    )
    raise typer.Exit(EXIT_DONE if report["passed"] else EXIT_BUG)


@app.command("report")
def report_runs(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run directories, or URLs of such.")],
    out: Annotated[
        Path | None, typer.Option(help="The folder for figure, report.md and report.json [the run].")
    ] = None,
    price: Annotated[
        list[str] | None, typer.Option(metavar="DEVICE=PRICE", help="Of a device-hour; repeat for other devices.")
    ] = None,
    prompt: Annotated[str, typer.Option(help="What the sample of generated text starts with.")] = "def ",
    form: Annotated[FigureFormat, typer.Option("--format", help="Of the figure.")] = FigureFormat.png,
    x: Annotated[FigureAxis, typer.Option("--x", help="What stands along the figure.")] = FigureAxis.batch,
    smooth: Annotated[
        int | None, typer.Option(min=1, help="Batches in the running mean; 1: none [9, or a fiftieth of many].")
    ] = None,
    with_csv: Annotated[
        bool, typer.Option("--csv", help="Also write report.csv: a row for each batch and run, repeats removed.")
    ] = False,
) -> None:
    """Show a run: losses beside baselines, how launches ended, where it ran and what that took, a sample, a plot.
    Several: how far they are apart, batch by batch."""
    from llmfoundry_lite.report.report import report

    options = {"form": form.value, "x": x.value, "smooth_batches": smooth, "with_csv": with_csv}
    report(runs, out=out, prices=price or (), prompt=prompt, **options)


@app.command("compare")
def compare_results(
    results: Annotated[
        list[Path], typer.Argument(metavar="RESULT.json...", help="The first is what others are against.")
    ],
    out: Annotated[Path | None, typer.Option(help="A folder for compare.md, .json and .png.")] = None,
    all_metrics: Annotated[bool, typer.Option("--all-metrics", help="Not only each task's main one.")] = False,
    skip: Annotated[list[str] | None, typer.Option(metavar="TASK", help="Leave it out; repeat for others.")] = None,
    published: Annotated[bool, typer.Option("--published", help="Also beside published results.")] = False,
) -> None:
    """Are models equally good? Item by item: differences, intervals, tests; or that nothing can be told."""
    from rich.console import Console

    from llmfoundry_lite.evaluation.compare import compare
    from llmfoundry_lite.evaluation.published import print_published, published_markdown
    from llmfoundry_lite.evaluation.reading import load_results
    from llmfoundry_lite.evaluation.verdicts import panels, print_comparison, write_comparison

    if len(results) < 2 and not published:
        raise UserError(f"{results[0]} alone: name another result to compare it with, or --published")
    loaded = load_results(results)
    pairs = compare(loaded, skip=skip or (), all_metrics=all_metrics)
    console = Console()
    if published:
        print_published(loaded, console)
    if pairs:
        print_comparison(pairs, console)
    if out is not None:
        for path in write_comparison(loaded, pairs, out, published_markdown(loaded) if published else ""):
            print(path)
        if pairs:
            from llmfoundry_lite.plots import plot_differences

            others = ", ".join(result.name for result in loaded[1:]) if len(loaded) < 4 else f"{len(loaded) - 1} models"
            plot_differences(
                panels(pairs), out / "compare.png", title=f"{others} against {loaded[0].name}, 95 % intervals"
            )
            print(out / "compare.png")


@app.command("doctor")
def doctor_command(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the findings there too, for fleets.")] = None,
    folder: Annotated[Path, typer.Option(help="Where checkpoints will go.")] = Path("."),
    num_ranks: Annotated[int | None, typer.Option(min=1, help="Of the collectives [one per device; CPU: 2].")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Less of everything: under 10 s without a GPU.")] = False,
) -> None:
    """Check this machine before a run is trusted to it; exit code 2 when something failed."""
    from llmfoundry_lite.doctor.examine import doctor, leave_without_waiting
    from llmfoundry_lite.doctor.finding import Machine

    code = doctor(Machine(folder=folder, num_ranks=num_ranks, quick=quick), json_file)
    leave_without_waiting(code)
    raise typer.Exit(code)


def main() -> None:
    """The `llmfoundry-lite` program."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code. Bugs escape with their traceback."""
    try:
        code = app(arguments, prog_name="llmfoundry-lite", standalone_mode=False)
    except UserError as error:
        print(f"error: {printable(' '.join(str(error).split()))}", file=sys.stderr)
        return error.exit_code
    except typer.TyperException as error:  # a command line that does not parse
        context = getattr(error, "ctx", None)
        if context is not None and not arguments[len(context.command_path.split()) - 1 :]:
            print(context.get_help(), file=sys.stderr)  # nothing but the name of a group of commands
            return EXIT_USER
        hint = f"; see {context.command_path} --help" if context is not None else ""
        message = " ".join(error.format_message().split()).rstrip(".")
        print(f"error: {printable(message)}{hint}", file=sys.stderr)
        return EXIT_USER
    except typer.Abort:
        return EXIT_INTERRUPTED
    return code if isinstance(code, int) else EXIT_DONE


if __name__ == "__main__":
    main()
