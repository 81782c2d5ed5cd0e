"""The commands `llmfoundry-lite report`, about training runs, and `llmfoundry-lite compare`, about evaluations."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from llmfoundry_lite import companions
from llmfoundry_lite.cli.options import expand_home, out_folder
from llmfoundry_lite.errors import UserError, printable
from llmfoundry_lite.files import exists

if TYPE_CHECKING:  # reading results imports numpy, which help texts do not need
    from llmfoundry_lite.evaluation.pairs import Comparison
    from llmfoundry_lite.evaluation.results import Results

MAX_NAMED_MODELS = 2
"""Maximum number of models, besides the first, that the title of a comparison's figure names."""


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


def is_recipe(argument: str) -> bool:
    """Return whether an argument of `compare` is a recipe with its runs, NAME=RESULT,RESULT,…, and not a file."""
    return re.match(r"[\w.\-]+=", argument) is not None and not exists(argument)


def _refuse_options(options: Mapping[str, object], reason: str) -> None:
    """Raise UserError, with the reason, for the first of these options of `compare` that is given."""
    for option, value in options.items():
        if value:
            raise UserError(f"compare: {option} {reason}")


def _write_with_figure(results: "Sequence[Results]", pairs: "Sequence[Comparison]", out: Path) -> list[Path]:
    """Write comparisons of results with the first of them, and their figure, to a folder, and return the paths."""
    from llmfoundry_lite.evaluation.pairs import panels, write_comparison
    from llmfoundry_lite.report.figure import plot_differences

    figure = out / "compare.png"
    written = [*write_comparison(results, pairs, out), figure]
    first, *others = results
    are_few = len(others) <= MAX_NAMED_MODELS
    subject = ", ".join(result.name for result in others) if are_few else f"{len(others)} models"
    title = f"{subject} against {first.name}, intervals at the level that decides"
    plot_differences(panels(pairs), figure, title=title)
    return written


def compare_results(
    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="RESULT",
            help="Results of eval, or logs of lm-eval or Inspect. Each is compared with the first. Recipes that were "
            "trained several times are given as NAME=RESULT,RESULT,…",
        ),
    ],
    out: Annotated[Path | None, out_folder("Folder for compare.md, .json, .csv, .tex and .png.")] = None,
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
        list[str] | None, typer.Option(metavar="TASK", help="Task to leave out; repeat for others.")
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
    from rich.console import Console

    from llmfoundry_lite.evaluation.changed_items import (
        find_changed_items,
        find_task,
        print_changed_items,
        write_changed_items,
    )
    from llmfoundry_lite.evaluation.compare import compare
    from llmfoundry_lite.evaluation.pairs import print_comparison
    from llmfoundry_lite.evaluation.results import load_any

    if gauntlet is not None:
        from llmfoundry_lite.config.load_eval import load_gauntlet

        load_gauntlet(gauntlet)  # so that a mistake in the file shows before anything is compared
    html = expand_home(html)
    if html is not None:
        check_page_path = companions.load("llmfoundry_studies.page:check_page_path", "compare --html")
        check_page_path(html)
    if all_pairs:
        _refuse_options(
            {"--all-metrics": all_metrics, "--overlap": overlap, "--items": items},
            "compares with the first result; leave it out with --all-pairs",
        )

    recipes = [str(result) for result in results if is_recipe(str(result))]
    if recipes:
        if len(recipes) < len(results):
            raise UserError("compare: results of single models and recipes of several runs given; compare them apart")
        compare_recipes = companions.load("llmfoundry_studies.commands:compare_recipes", "compare of several runs")
        unused = {"--all-metrics": all_metrics, "--cluster": cluster, "--overlap": overlap}
        unused["--items"] = items
        _refuse_options(unused, "is for results of single models; leave it out for recipes")
        options = {"metric": metric, "skip": skip or (), "all_pairs": all_pairs, "gauntlet": gauntlet, "html": html}
        compare_recipes(recipes, out, **options)
        return
    if len(results) < 2:
        raise UserError(f"only {results[0]} is given; name another result to compare it with")
    loaded = load_any(results, cluster)
    if all_pairs:
        compare_all_pairs = companions.load("llmfoundry_studies.commands:compare_all_pairs", "compare --all-pairs")
        compare_all_pairs(loaded, out, skip=skip or (), metric=metric, gauntlet=gauntlet, html=html)
        return
    task_of_items = None if items is None else find_task(loaded, items, skip or ())
    pairs = compare(loaded, skip=skip or (), all_metrics=all_metrics, metric=metric)
    if gauntlet is not None:
        add_gauntlet = companions.load("llmfoundry_studies.gauntlet:add_gauntlet", "compare --gauntlet")
        add_gauntlet(gauntlet, loaded, pairs, metric)

    written = [] if out is None else _write_with_figure(loaded, pairs, out)
    print_comparison(pairs, Console())
    if overlap is not None:
        print_parts = companions.load("llmfoundry_studies.commands:print_parts", "compare --overlap")
        print_parts(loaded, overlap, skip=skip or (), all_metrics=all_metrics, metric=metric)
    if html is not None:
        write_html = companions.load("llmfoundry_studies.commands:write_html", "compare --html")
        write_html(loaded, pairs, html, skip=skip or (), metric=metric)
        written.append(html)
    if task_of_items is not None:
        changed = [
            find_changed_items(pair, task_of_items, loaded[0], other_results)
            for pair, other_results in zip(pairs, loaded[1:], strict=True)
        ]
        print_changed_items(changed, Console(), max_items)
        if out is not None:
            written.append(write_changed_items(changed, out))
    for path in written:
        print(printable(str(path)))
