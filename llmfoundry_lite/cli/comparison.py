"""Runs `llmfoundry-lite compare`: reads results, compares them, prints tables, and writes the files that are asked for.

`run_comparison` is the top function. There are three kinds of comparison: of each model with the first one, of each two
models (`--all-pairs`), and of recipes, which have several runs. A companion does the latter two.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from llmfoundry_lite import companions
from llmfoundry_lite.config.load_eval import load_gauntlet
from llmfoundry_lite.errors import UserError, printable
from llmfoundry_lite.evaluation.changed_items import (
    find_changed_items,
    find_task,
    print_changed_items,
    write_changed_items,
)
from llmfoundry_lite.evaluation.compare import compare
from llmfoundry_lite.evaluation.pairs import Comparison, panels, print_comparison, write_comparison
from llmfoundry_lite.evaluation.results import Results, load_any
from llmfoundry_lite.files import exists

MAX_NAMED_MODELS = 2
"""Maximum number of models, besides the first, that the title of a comparison's figure names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonOptions:
    """The options of the command; its help says what each of them means."""

    out: Path | None
    all_metrics: bool
    metric: str | None
    skip: Sequence[str]
    cluster: str | None
    overlap: Path | None
    html: Path | None
    gauntlet: str | None
    all_pairs: bool
    items: str | None
    max_items: int


def run_comparison(arguments: Sequence[Path], options: ComparisonOptions) -> None:
    """Compare results, or recipes with several results each, as the options say.

    Raises UserError, before anything is read, for options that do not go together, and for a page or a gauntlet that
    cannot be used. Raises DataError for results that cannot be compared.
    """
    check_files(options)
    if options.all_pairs:
        refuse_options(
            {"--all-metrics": options.all_metrics, "--overlap": options.overlap, "--items": options.items},
            "compares with the first result; leave it out with --all-pairs",
        )

    recipes = [str(argument) for argument in arguments if is_recipe(str(argument))]
    if recipes:
        if len(recipes) < len(arguments):
            raise UserError("compare: results of single models and recipes of several runs given; compare them apart")
        run_recipes(recipes, options)
        return

    if len(arguments) < 2:
        raise UserError(f"only {arguments[0]} is given; name another result to compare it with")
    all_results = load_any(arguments, options.cluster)
    if options.all_pairs:
        run_all_pairs(all_results, options)
    else:
        run_against_first(all_results, options)


def check_files(options: ComparisonOptions) -> None:
    """Raise UserError if a gauntlet's file is wrong, or if a page cannot be written, before anything is compared."""
    if options.gauntlet is not None:
        load_gauntlet(options.gauntlet)
    if options.html is not None:
        check_page_path = companions.load("llmfoundry_studies.page:check_page_path", "compare --html")
        check_page_path(options.html)


def refuse_options(options: Mapping[str, object], reason: str) -> None:
    """Raise UserError, with the reason, for the first of these options that is given."""
    for option, value in options.items():
        if value:
            raise UserError(f"compare: {option} {reason}")


def is_recipe(argument: str) -> bool:
    """Return whether an argument is a recipe with its runs, NAME=RESULT,RESULT,…, and not a file."""
    return re.match(r"[\w.\-]+=", argument) is not None and not exists(argument)


# ---------------------------------------------------------------------------------------------- what a companion does


def run_recipes(recipes: Sequence[str], options: ComparisonOptions) -> None:
    """Compare recipes, each given as NAME=RESULT,RESULT,…, with the first one, or each two with `all_pairs`."""
    compare_recipes = companions.load("llmfoundry_studies.commands:compare_recipes", "compare of several runs")
    refuse_options(
        {
            "--all-metrics": options.all_metrics,
            "--cluster": options.cluster,
            "--overlap": options.overlap,
            "--items": options.items,
        },
        "is for results of single models; leave it out for recipes",
    )
    compare_recipes(
        recipes,
        options.out,
        metric=options.metric,
        skip=options.skip,
        all_pairs=options.all_pairs,
        gauntlet=options.gauntlet,
        html=options.html,
    )


def run_all_pairs(all_results: Sequence[Results], options: ComparisonOptions) -> None:
    """Compare each two results, and rank them."""
    compare_all_pairs = companions.load("llmfoundry_studies.commands:compare_all_pairs", "compare --all-pairs")
    compare_all_pairs(
        all_results,
        options.out,
        skip=options.skip,
        metric=options.metric,
        gauntlet=options.gauntlet,
        html=options.html,
    )


# ------------------------------------------------------------------------------------------- each model with the first


def run_against_first(all_results: Sequence[Results], options: ComparisonOptions) -> None:
    """Compare each result with the first one, print tables and items, and write the files that are asked for."""
    # A task of --items that does not exist is refused before anything is compared.
    task_of_items = None
    if options.items is not None:
        task_of_items = find_task(all_results, options.items, options.skip)

    pairs = compare(all_results, skip=options.skip, all_metrics=options.all_metrics, metric=options.metric)
    if options.gauntlet is not None:
        add_gauntlet = companions.load("llmfoundry_studies.gauntlet:add_gauntlet", "compare --gauntlet")
        add_gauntlet(options.gauntlet, all_results, pairs, options.metric)

    written: list[Path] = []
    if options.out is not None:
        written += write_with_figure(all_results, pairs, options.out)
    print_comparison(pairs, Console())
    if options.overlap is not None:
        print_parts = companions.load("llmfoundry_studies.commands:print_parts", "compare --overlap")
        print_parts(
            all_results,
            options.overlap,
            skip=options.skip,
            all_metrics=options.all_metrics,
            metric=options.metric,
        )
    if options.html is not None:
        write_html = companions.load("llmfoundry_studies.commands:write_html", "compare --html")
        write_html(all_results, pairs, options.html, skip=options.skip, metric=options.metric)
        written.append(options.html)
    if task_of_items is not None:
        written += show_items(task_of_items, all_results, pairs, options)

    for path in written:
        print(printable(str(path)))


def write_with_figure(all_results: Sequence[Results], pairs: Sequence[Comparison], out: Path) -> list[Path]:
    """Write comparisons with the first result, and their figure, to a folder, and return the paths."""
    from llmfoundry_lite.report.difference_figure import plot_differences  # imports matplotlib

    figure = out / "compare.png"
    written = [*write_comparison(all_results, pairs, out), figure]
    first, *others = all_results
    are_few = len(others) <= MAX_NAMED_MODELS
    subject = ", ".join(result.name for result in others) if are_few else f"{len(others)} models"
    title = f"{subject} against {first.name}, intervals at the level that decides"
    plot_differences(panels(pairs), figure, title=title)
    return written


def show_items(
    task: str, all_results: Sequence[Results], pairs: Sequence[Comparison], options: ComparisonOptions
) -> list[Path]:
    """Print the items of a task that were won and lost; write all of them to `out`, and return the paths of files."""
    first, *others = all_results
    all_changed = [find_changed_items(pair, task, first, other) for pair, other in zip(pairs, others, strict=True)]
    print_changed_items(all_changed, Console(), options.max_items)
    if options.out is None:
        return []
    return [write_changed_items(all_changed, options.out)]
