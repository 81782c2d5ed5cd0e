"""The options of `llmfoundry-lite report`, about training runs, and of `llmfoundry-lite compare`, about evaluations.

`report/report.py` and `cli/comparison.py` do the work. They are imported late, because they import numpy, which help
texts do not need.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from llmfoundry_lite.cli.options import expand_home, out_folder


def report_runs(
    runs: Annotated[list[str], typer.Argument(metavar="RUN", help="Run folders or their URLs.")],
    out: Annotated[Path | None, out_folder("Folder for the figure and the report [default: the run's folder].")] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DEVICE=PRICE", help="Price of a device-hour, such as A100-80GB=2.5; repeat for other devices."
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="Prompt of a sample text; repeat for more [default: words of the validation data]."
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature of the texts; 0 always takes the most likely token.")
    ] = 0.7,
    top_k: Annotated[int, typer.Option(min=1, help="Sample the texts only from the k most likely tokens.")] = 40,
    form: Annotated[Literal["png", "pdf", "svg"], typer.Option("--format", help="File format of the figure.")] = "png",
    x: Annotated[
        Literal["batch", "tokens", "flops"], typer.Option("--x", help="Quantity on the horizontal axis.")
    ] = "batch",
    smooth: Annotated[
        int | None,
        typer.Option(min=1, help="Average N batches; 1 disables it [default: 9, or a fiftieth of a long run]."),
    ] = None,
    with_csv: Annotated[
        bool,
        typer.Option(
            "--csv", help="Also write report.csv, with one row for each batch of each run and without repeated batches."
        ),
    ] = False,
    results: Annotated[
        Path,
        typer.Option(
            help="Folder with results of eval; those of the runs' checkpoints are drawn as curves.",
            callback=expand_home,
        ),
    ] = Path("results"),
) -> None:
    """Report losses, devices, time and cost of runs, with a plot. Compares several runs batch by batch."""
    from llmfoundry_lite.report.report import report

    sampling = {"prompts": prompt or (), "temperature": temperature, "top_k": top_k}
    options = {"image_format": form, "x_axis": x, "smooth_batches": smooth, "with_csv": with_csv}
    options["results_folder"] = results
    report(runs, out=out, prices=price or (), **sampling, **options)


def compare_results(
    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="RESULT",
            help="Results of eval, or logs of lm-eval or Inspect. Each is compared with the first. Recipes that were "
            "trained several times are given as NAME=RESULT,RESULT,…",
        ),
    ],
    out: Annotated[
        Path | None,
        out_folder("Folder for compare.md, .json, .csv and .tex; .png too, unless recipes or all pairs are compared."),
    ] = None,
    all_metrics: Annotated[
        bool, typer.Option("--all-metrics", help="Compare every metric, not only the main metric of each task.")
    ] = False,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC",
            help="Compare tasks by acc_per_token, acc, acc_norm, acc_per_byte or bpb where they have it "
            "[default: as in the tables].",
        ),
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option(metavar="TASK", help="Task to leave out, such as arc_easy or arc_easy/0-shot; repeat for others."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD", help="Field whose equal values mark related rows, in logs of lm-eval or Inspect."
        ),
    ] = None,
    overlap: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Output of data overlap: also compare clean and marked items apart."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="FILE", help="Also write one page with tables, pictures, and items to search and open."
        ),
    ] = None,
    gauntlet: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="YAML of an Eval Gauntlet: also compare its categories and averages."),
    ] = None,
    all_pairs: Annotated[
        bool, typer.Option("--all-pairs", help="Compare each two models or recipes, and rank them.")
    ] = False,
    items: Annotated[
        str | None,
        typer.Option(metavar="TASK", help="Also print the items of a task that were won and lost, with all scores."),
    ] = None,
    max_items: Annotated[
        int,
        typer.Option(min=1, help="Items won, and items lost, that --items prints at most; --out has all of them."),
    ] = 10,
) -> None:
    """Compare models item by item: differences, intervals, tests. Says so if no difference is detectable."""
    from llmfoundry_lite.cli.comparison import ComparisonOptions, run_comparison

    options = ComparisonOptions(
        out=out,
        all_metrics=all_metrics,
        metric=metric,
        skip=skip or (),
        cluster=cluster,
        overlap=overlap,
        html=expand_home(html),
        gauntlet=gauntlet,
        all_pairs=all_pairs,
        items=items,
        max_items=max_items,
    )
    run_comparison(results, options)
