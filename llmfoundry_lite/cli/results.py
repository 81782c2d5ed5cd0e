"""`llmfoundry-lite report` and `compare`: results of runs and of evaluations."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from llmfoundry_lite.cli.options import out_folder
from llmfoundry_lite.errors import UserError, printable


def report_runs(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run directories, or URLs of such.")],
    out: Annotated[Path | None, out_folder("Write figure and report into this folder [the run].")] = None,
    price: Annotated[
        list[str] | None, typer.Option(metavar="DEVICE=PRICE", help="Price a device-hour; repeat for other devices.")
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Start a sample of text with this; repeat for others [words of the validation data]."),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, help="Sample at this temperature; 0 takes the likeliest.")] = 0.7,
    top_k: Annotated[int, typer.Option(min=1, help="Draw samples among the k likeliest tokens.")] = 40,
    form: Annotated[Literal["png", "pdf", "svg"], typer.Option("--format", help="Choose the figure's format.")] = "png",
    x: Annotated[
        Literal["batch", "tokens", "flops"], typer.Option("--x", help="Choose what stands along the figure.")
    ] = "batch",
    smooth: Annotated[
        int | None, typer.Option(min=1, help="Average so many batches; 1 draws no mean [9, or a fiftieth of many].")
    ] = None,
    with_csv: Annotated[
        bool, typer.Option("--csv", help="Write report.csv too: a row for each batch and run, repeats removed.")
    ] = False,
) -> None:
    """Show runs: losses, devices, what they took, a sample, a plot. Several runs are also compared, batch by batch."""
    from llmfoundry_lite.report.report import report

    sampling = {"prompts": prompt or (), "temperature": temperature, "top_k": top_k}
    options = {"form": form, "x": x, "smooth_batches": smooth, "with_csv": with_csv}
    report(runs, out=out, prices=price or (), **sampling, **options)


def compare_results(
    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="RESULT...", help="Our results, or logs of lm-eval or Inspect. Others are compared with the first."
        ),
    ],
    out: Annotated[Path | None, out_folder("Write compare.md, .json and .png into this folder.")] = None,
    all_metrics: Annotated[
        bool, typer.Option("--all-metrics", help="Compare every metric, not only the main one.")
    ] = False,
    skip: Annotated[list[str] | None, typer.Option(metavar="TASK", help="Leave a task out; repeat for others.")] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="FIELD", help="Take rows with an equal field as related, in logs of other tools."),
    ] = None,
) -> None:
    """Compare models item by item: differences, intervals, tests. It also says when nothing can be told."""
    from rich.console import Console

    from llmfoundry_lite.evaluation.compare import compare
    from llmfoundry_lite.evaluation.pairs import panels, print_comparison, write_comparison
    from llmfoundry_lite.evaluation.results import load_any

    if len(results) < 2:
        raise UserError(f"{results[0]} alone: name another result to compare it with")
    loaded = load_any(results, cluster)
    pairs = compare(loaded, skip=skip or (), all_metrics=all_metrics)
    written: list[Path] = []
    if out is not None:
        from llmfoundry_lite.report.figure import plot_differences

        written = [*write_comparison(loaded, pairs, out), out / "compare.png"]
        others = ", ".join(result.name for result in loaded[1:]) if len(loaded) < 4 else f"{len(loaded) - 1} models"
        plot_differences(
            panels(pairs), written[-1], title=f"{others} against {loaded[0].name}, intervals at the level that decides"
        )
    print_comparison(pairs, Console())
    for path in written:
        print(printable(str(path)))
