"""Recipes with several runs: read from the arguments of `compare`, and shown as tables. `seeds.py` compares them."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from llmfoundry_lite.config.task_types import BITS
from llmfoundry_lite.errors import ConfigError, DataError
from llmfoundry_lite.evaluation import significance
from llmfoundry_lite.evaluation.pairs import CAPTION_ON_NOT_TESTED, NOT_TESTED, SIGNIFICANT, format_number, format_p
from llmfoundry_lite.evaluation.records import BITS_METRICS, lost_text_fraction
from llmfoundry_lite.evaluation.results import items_path_of, load_any
from llmfoundry_lite.evaluation.tables import caption_on_trials, name_tasks, trials_of
from llmfoundry_lite.files import write_atomically
from llmfoundry_lite.tables import Table, markdown_list, markdown_text
from llmfoundry_studies.seeds import MIN_DOCUMENTS, Run, Side, SideComparison, SidePair

MIN_RUNS_FOR_NOISE = 3
"""Runs of a side from which equal recipes are called different in at most 5 % of comparisons, as simulated."""
MIN_RUNS_FOR_MANY_TESTS = 5
MANY_TESTS = 10
"""With this many tests, fewer runs than MIN_RUNS_FOR_MANY_TESTS call equal recipes different more often than Holm's
smallest level allows, if seeds scatter far more than items (`python -m benchmarks seeds`)."""
LAST_CHECKPOINTS = re.compile(r"(?P<model>.+)@last(?P<number>\d{1,6})")
"""The last results of a run whose checkpoints were evaluated: `results/s/ours@last5`."""

METHOD = (
    "p: Student's t of the difference of means, with the variance among runs and among items together (Satterthwaite's "
    "degrees of freedom), corrected for the number of tests (Holm). Intervals are at the level that decides. sd of "
    "runs: standard deviation of the score among the runs of each side."
)
LEGEND = f"{METHOD} finds: the smallest difference that would be found four times in five."
"""Text below the tables."""


def read_sides(arguments: Sequence[str]) -> list[Side]:
    """Read the results of recipes. Each argument is `NAME=RUN,RUN,…`, and a run is a result.

    A run may also be several results joined by `+`, of its last checkpoints, whose item scores are averaged:
    `ours=s1-ba900.json+s1-ba1000.json,s2-ba900.json+s2-ba1000.json`. If `eval all_checkpoints=true` wrote them,
    `ours=s1@last2,s2@last2` names the same results.

    Raises ConfigError for another form, and DataError for results that do not exist or cannot be read.
    """
    runs_of_side: dict[str, list[list[Path]]] = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if not (name and equals and text) or name in runs_of_side:
            raise ConfigError(
                f"compare: {argument!r} given, expected a recipe with a name of its own, NAME=RESULT,RESULT,…"
            )
        runs_of_side[name] = [_paths_of_run(name, run) for run in text.split(",") if run]

    # Load all results at once, so that one that is given twice is noticed.
    all_paths = [path for runs in runs_of_side.values() for run in runs for path in run]
    loaded = iter(load_any(all_paths))
    sides: list[Side] = []
    for name, runs in runs_of_side.items():
        sides.append(Side(name, [Run([next(loaded) for _ in run]) for run in runs]))
    return sides


def _paths_of_run(name: str, text: str) -> list[Path]:
    """Return the results that `text` names as one run of the recipe `name`. Raises DataError if one does not exist."""
    last = LAST_CHECKPOINTS.fullmatch(text)
    if last is not None:
        return _find_last_checkpoints(Path(last["model"]), int(last["number"]))

    paths = [Path(path) for path in text.split("+") if path]
    for path in paths:
        if not path.exists():
            raise DataError(
                f"{name}: {path} does not exist; runs are separated by commas, and checkpoints of a run by +, so a "
                "path with one of these signs needs another name, such as a link"
            )
    return paths


def _find_last_checkpoints(model: Path, number: int) -> list[Path]:
    """Return the results of a run's last checkpoints, which `eval all_checkpoints=true` named MODEL-ba100.json.

    `model` is the path of such a result up to the model's name. Raises DataError if there are too few.
    """
    batch_of: dict[Path, int] = {}
    for path in model.parent.glob("*.json"):
        checkpoint = re.fullmatch(re.escape(model.name) + r"-ba(\d+)", path.stem)
        if checkpoint is not None and items_path_of(path).exists():
            batch_of[path] = int(checkpoint[1])
    if not 0 < number <= len(batch_of):
        raise DataError(
            f"{model}@last{number}: there are results of {len(batch_of)} checkpoints, {model}-ba*.json; evaluate more "
            "with all_checkpoints=true, or give another number"
        )
    return sorted(batch_of, key=batch_of.__getitem__)[-number:]


def table_of_sides(pair: SidePair, mark: str = "") -> Table:
    """Return the table of one side against the first. `mark` follows the values that differ significantly."""
    columns = (
        "task",
        "metric",
        "items",
        pair.first.name,
        pair.other.name,
        "sd of runs",
        "difference",
        "p",
        "verdict",
        "finds",
    )
    rows = []
    for row in pair.rows:
        digits = 4 if row.metric in BITS_METRICS else 3
        interval = ""
        if row.low is not None and row.high is not None:
            interval = f" [{format_number(row.low, digits, '+')}, {format_number(row.high, digits, '+')}]"
        rows.append(
            [
                row.task,
                "" if row.metric == "mean" else row.metric,
                f"{row.n:,}",
                f"{row.first:.{digits}f}",
                f"{row.other:.{digits}f}{mark if row.is_detected else ''}",
                f"{row.first_spread:.{digits}f}/{row.other_spread:.{digits}f}",
                f"{format_number(row.estimate.difference, digits, '+')}{interval}",
                format_p(row.p_corrected) if row.is_claimable else NOT_TESTED,
                row.verdict,
                NOT_TESTED if row.detectable is None else f"{row.detectable:.{digits}f}",
            ]
        )
    return Table(f"{pair.other.name} against {pair.first.name}", columns, rows, right={2, 3, 4, 5, 7, 9})


def notes_on_sides(pair: SidePair) -> list[str]:
    """Return notes on how many runs there are, on what so few can show, and on what limits the comparison."""
    notes = [_count_runs(pair)]
    num_runs = min(len(pair.first.runs), len(pair.other.runs))
    if num_runs < MIN_RUNS_FOR_NOISE:
        notes.append(
            "warning: two runs say little about the noise of seeds: equal recipes are called different in up to 6 % of "
            "comparisons, and only large differences are found; train three or more"
        )
    smallest_level = min(1 - row.confidence for row in pair.rows)
    has_many_tests = smallest_level < 1.001 * significance.LEVEL / MANY_TESTS  # the factor allows for rounding
    if has_many_tests and num_runs < MIN_RUNS_FOR_MANY_TESTS:
        notes.append(
            f"warning: with {MANY_TESTS} tests or more, fewer than {MIN_RUNS_FOR_MANY_TESTS} runs a side call equal "
            "recipes different too often, if seeds scatter far more than items; train more runs, or compare fewer tasks"
        )
    if any(len(run.checkpoints) > 1 for side in (pair.first, pair.other) for run in side.runs):
        notes.append("a run's score is the mean over several of its checkpoints")
    all_results = [*pair.first.all_results, *pair.other.all_results]
    notes += pair.notes_on_metrics
    for row in pair.rows:
        if not row.is_claimable:
            notes.append(_note_on_too_few(row))
        records = [results.tasks[row.task] for results in all_results if row.task in results.tasks]
        if row.metric == BITS and any(lost_text_fraction(record) for record in records):
            notes.append(
                f"warning: {row.task}: a tokenizer loses text, which may explain a difference in bits per byte"
            )
    trials = _trials_of(pair)
    if trials:
        notes.append(f"warning: {name_tasks(trials)}: only the first items (limit): a try, not a result")
    return notes


def _trials_of(pair: SidePair) -> list[str]:
    """Return the compared tasks of which only the first items were evaluated."""
    compared = {row.task for row in pair.rows}
    trials = trials_of([*pair.first.all_results, *pair.other.all_results])
    return [task for task in trials if task in compared]


def _note_on_too_few(row: SideComparison) -> str:
    """Return a note on a row that has too few independent items or documents for a test."""
    min_units = MIN_DOCUMENTS if row.metric in BITS_METRICS else significance.MIN_UNITS
    count = f"{row.num_units:,} {'documents' if row.metric == BITS else 'independent items'}"
    if row.num_units >= min_units:
        min_units = significance.MIN_UNITS
        count += f", of such different weight that they are worth {row.estimate.num_effective:.1f} equal ones"
    return f"{row.task}: {count}: no interval and no verdict below {min_units}"


def _count_runs(pair: SidePair) -> str:
    """Return the number of runs of both sides as a text: "3 runs a side", or "2 and 5 runs a side"."""
    num_runs = sorted({len(pair.first.runs), len(pair.other.runs)})
    return f"{' and '.join(map(str, num_runs))} runs a side"


def write_sides(pairs: Sequence[SidePair], out: Path) -> list[Path]:
    """Write compare.json, .md, .csv and .tex, and return their paths."""
    out.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    latex_lines: list[str] = []
    comparisons = []
    for pair in pairs:
        table = table_of_sides(pair)
        lines += [
            f"## {markdown_text(table.title)}",
            "",
            *table.markdown(),
            "",
            *markdown_list(notes_on_sides(pair)),
            "",
        ]
        caption = f"{table.title}, {_count_runs(pair)}. {SIGNIFICANT} marks differences that are significant. {METHOD}"
        caption += caption_on_trials(_trials_of(pair))
        if not all(row.is_claimable for row in pair.rows):
            caption += f" {CAPTION_ON_NOT_TESTED}"
        latex_lines += [*table_of_sides(pair, SIGNIFICANT).without(["items", "verdict", "finds"]).latex(caption), ""]
        rows = [describe_row(row) for row in pair.rows]
        comparisons.append({"first": pair.first.name, "other": pair.other.name, "rows": rows})
    paths = [out / f"compare.{suffix}" for suffix in ("json", "md", "csv", "tex")]
    results = paths_of_sides([pairs[0].first, *(pair.other for pair in pairs)])
    write_atomically(paths[0], json.dumps({"results": results, "comparisons": comparisons}, indent=1) + "\n")
    write_atomically(paths[1], "\n".join([*lines, LEGEND, ""]))
    write_atomically(paths[2], numbers_of_sides(pairs).csv())
    write_atomically(paths[3], "\n".join(latex_lines))
    return paths


def paths_of_sides(sides: Sequence[Side]) -> dict[str, list[str]]:
    """Return the paths of the results of each recipe, by its name, relative to the working folder."""
    return {side.name: [os.path.relpath(results.path) for results in side.all_results] for side in sides}


def numbers_of_sides(pairs: Sequence[SidePair]) -> Table:
    """Return a table of all comparisons, whose numbers have all their digits."""
    records: list[dict[str, object]] = []
    for pair in pairs:
        for row in pair.rows:
            facts = describe_row(row)
            error_and_df = {"error": row.estimate.error, "df": row.estimate.df}
            names = {"first_recipe": pair.first.name, "other_recipe": pair.other.name}
            records.append(names | {key: facts[key] for key in facts if key not in ("estimate", "runs")} | error_and_df)
    rows = [["" if value is None else str(value) for value in record.values()] for record in records]
    return Table("", list(records[0]), rows)


def describe_row(row: SideComparison) -> dict[str, object]:
    """Return a row of a comparison as compare.json has it. Without a test, p-values and interval are None."""
    computed = {"difference": row.estimate.difference, "p": row.p, "verdict": row.verdict, "finds": row.detectable}
    facts = asdict(row) | computed
    if not row.is_claimable:
        facts |= {"p": None, "p_corrected": None}
    return facts
