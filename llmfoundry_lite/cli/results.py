"""`llmfoundry-lite watch`, `report` and `compare`: where a run is, what runs and evaluations came to."""

import contextlib
from pathlib import Path
from typing import Annotated, Literal

import typer

from llmfoundry_lite.cli.options import out_folder
from llmfoundry_lite.errors import UserError, printable


def watch_run(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory on this disk.")]) -> None:
    """Show a run live, until it ends. Batch, loss, rate, remaining time, last checkpoint; Ctrl-C leaves it alone."""
    from llmfoundry_lite.report.watch import watch

    with contextlib.suppress(KeyboardInterrupt):
        watch(run)


def report_runs(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run directories, or URLs of such.")],
    out: Annotated[Path | None, out_folder("The folder for figure, report.md and report.json [the run].")] = None,
    price: Annotated[
        list[str] | None, typer.Option(metavar="DEVICE=PRICE", help="Of a device-hour; repeat for other devices.")
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="What a sample of text starts with; repeat for others [words of the validation data]."),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, help="Of the samples; 0 takes the likeliest token.")] = 0.7,
    top_k: Annotated[int, typer.Option(min=1, help="Samples are drawn among the k likeliest tokens.")] = 40,
    form: Annotated[Literal["png", "pdf", "svg"], typer.Option("--format", help="Of the figure.")] = "png",
    x: Annotated[
        Literal["batch", "tokens", "flops"], typer.Option("--x", help="What stands along the figure.")
    ] = "batch",
    smooth: Annotated[
        int | None, typer.Option(min=1, help="Batches in the running mean; 1: none [9, or a fiftieth of many].")
    ] = None,
    with_csv: Annotated[
        bool, typer.Option("--csv", help="Also write report.csv: a row for each batch and run, repeats removed.")
    ] = False,
) -> None:
    """Show runs: losses, launches, what they took, a sample, a plot. Several runs are also compared, batch by batch."""
    from llmfoundry_lite.report.report import report

    sampling = {"prompts": prompt or (), "temperature": temperature, "top_k": top_k}
    options = {"form": form, "x": x, "smooth_batches": smooth, "with_csv": with_csv}
    report(runs, out=out, prices=price or (), **sampling, **options)


def compare_results(
    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="RESULT...", help="Ours, or logs of lm-eval or Inspect. The first is what others are against."
        ),
    ],
    out: Annotated[Path | None, out_folder("A folder for compare.md, .json and .png.")] = None,
    all_metrics: Annotated[bool, typer.Option("--all-metrics", help="Not only each task's main one.")] = False,
    skip: Annotated[list[str] | None, typer.Option(metavar="TASK", help="Leave it out; repeat for others.")] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="FIELD", help="In logs of other tools, the field that related rows share."),
    ] = None,
    published: Annotated[bool, typer.Option("--published", help="Also beside published results.")] = False,
    sequential: Annotated[
        bool, typer.Option("--sequential", help="Stop a task when it is decided: what fewer items would have said.")
    ] = False,
    spending: Annotated[
        Literal["obrien_fleming", "pocock"], typer.Option(help="Of --sequential: when its error is spent.")
    ] = "obrien_fleming",
    margin: Annotated[
        float | None, typer.Option(min=0, help="Of --sequential: stop also when no difference is as large as this.")
    ] = None,
) -> None:
    """Compare models item by item: differences, intervals, tests. It also says when nothing can be told."""
    from rich.console import Console

    from llmfoundry_lite.evaluation.compare import compare
    from llmfoundry_lite.evaluation.foreign import load_any
    from llmfoundry_lite.evaluation.sequential import Rule
    from llmfoundry_lite.evaluation.tables import panels, print_comparison, published_table, write_comparison

    if len(results) < 2 and not published:
        raise UserError(f"{results[0]} alone: name another result to compare it with, or --published")
    if sequential and all_metrics:
        raise UserError("--all-metrics: a --sequential comparison stops by the main metric alone; remove one of them")
    if not sequential and margin is not None:
        raise UserError("--margin: it is for a comparison that is --sequential; add that")
    loaded = load_any(results, cluster)
    rule = Rule(spending=spending, margin=margin) if sequential else None
    pairs = compare(loaded, skip=skip or (), all_metrics=all_metrics, sequential=rule)
    console, beside = Console(), published_table(loaded) if published else None
    if beside is not None:
        beside.print(console)
        console.print()
    if pairs:
        print_comparison(pairs, console)
    if out is None:
        return
    written = write_comparison(loaded, pairs, out, beside.markdown() if beside else "")
    if pairs:
        from llmfoundry_lite.report.figure import plot_differences

        others = ", ".join(result.name for result in loaded[1:]) if len(loaded) < 4 else f"{len(loaded) - 1} models"
        written.append(out / "compare.png")
        plot_differences(panels(pairs), written[-1], title=f"{others} against {loaded[0].name}, 95 % intervals")
    for path in written:
        print(printable(str(path)))
