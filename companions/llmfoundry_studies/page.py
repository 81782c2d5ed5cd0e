"""A comparison of models as one HTML page, which needs no server and no network: `compare … --html FILE`.

`write_page` gathers facts and writes the page. `pictures.py` draws its pictures, `page_items.py` collects the items of
its list, and the folder `page_parts` has the template, the style sheet and the script of the page.

Names, questions and answers come from other people. The template escapes all texts. Items are data that the script puts
into the page as text. The page's content security policy allows this one script, by its hash, and no connection.
"""

import base64
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from llmfoundry_lite.errors import ConfigError, printable
from llmfoundry_lite.evaluation.metrics import by_metrics, choose_metrics
from llmfoundry_lite.evaluation.pairs import Comparison, MetricComparison, legend
from llmfoundry_lite.evaluation.records import is_accuracy
from llmfoundry_lite.evaluation.results import Results
from llmfoundry_lite.evaluation.tables import Cell, average_error, notes, records_by_task, score_cell
from llmfoundry_lite.files import check_is_path, open_regular, write_atomically
from llmfoundry_lite.release import read_release
from llmfoundry_studies.curves import BITS_METRICS, GatheredCurves, gather_curves
from llmfoundry_studies.page_items import ItemList, collect_items
from llmfoundry_studies.pictures import Picture, draw_curves, draw_differences
from llmfoundry_studies.ranking import LEGEND as LEGEND_OF_RANKS
from llmfoundry_studies.ranking import AllPairs, ranking_table

PARTS = Path(__file__).with_name("page_parts")
FIRST_LINE = "<!DOCTYPE html><!-- llmfoundry-lite compare -->"
"""First line of every page, by which an earlier page is recognised."""

MAX_NAME_CHARACTERS = 120
MAX_ROWS = 400
"""Most rows of a table on the page."""
MAX_PICTURES = 20
"""Most models that get a picture of their differences from the first one."""
MAX_NOTES = 60
Z_95 = 1.96
"""Standard errors on either side of a score in its 95 % interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreCell:
    """A model's score on a task, as the page's table shows it."""

    score: str
    interval: str
    direction: str = ""
    """better or worse, if a difference from the first model is detected; else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSection:
    """The comparison of one model with the first, as the page shows it."""

    title: str
    sentence: str
    picture: Picture | None
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    directions: Sequence[str]
    """better, worse or an empty text, for each row."""
    right: Sequence[int]
    """Indices of columns that are aligned to the right."""
    mean_index: int
    """Index of the row of the mean; -1 if there is none."""
    notes: Sequence[str]


def check_page_path(path: Path) -> None:
    """Raise ConfigError unless a page can be written to this path: a new file, or an earlier page, in a folder.

    Call this before anything is computed. A file that is not a page of this command is never replaced.
    """
    check_is_path(path)
    if path.is_symlink():
        raise ConfigError(f"--html: {path} is a link, which would be written through; name another file, or remove it")
    if path.is_dir():
        raise ConfigError(f"--html: {path} is a folder, expected a file such as {path / 'compare.html'}")
    if path.exists() and not _is_page(path):
        raise ConfigError(
            f"--html: {path} exists and is not a page that this command has written; name another file, or remove it"
        )

    # Find the innermost folder of the path that exists. The others will be created in it.
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise ConfigError(f"--html: {folder} is a file, expected a folder")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"--html: {folder} cannot be written; name a file in another folder")


def _is_page(path: Path) -> bool:
    """Return whether a file begins as our pages do."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            return file.read(len(FIRST_LINE)) == FIRST_LINE.encode()
    except OSError:
        return False


def write_page(
    all_results: Sequence[Results],
    comparisons: Sequence[Comparison],
    path: Path,
    *,
    metric: str | None = None,
    all_pairs: AllPairs | None = None,
) -> None:
    """Write the comparison of several models as an HTML page.

    all_results: the results of all models with their items, the first one first.
    comparisons: the comparisons of the others with the first one, or of each two, as `compare` returned them for these
        results.
    path: the file, whose folder is created if needed. `check_page_path` has checked it.
    metric: the metric that the user asked for, or None.
    all_pairs: the ranking, if each two were compared; else None.
    """
    metrics = choose_metrics(all_results, metric)
    shown_results = [replace(results, model=results.name) for results in by_metrics(all_results, metrics)]
    curves = gather_curves(all_results, metric)
    date = datetime.now(UTC).date().isoformat()
    html = render_page(shown_results, comparisons, curves, all_pairs, date=date)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, html)


def render_page(
    all_results: Sequence[Results],
    comparisons: Sequence[Comparison],
    gathered: GatheredCurves,
    all_pairs: AllPairs | None = None,
    *,
    date: str,
) -> str:
    """Return the page of several models.

    all_results: the results of all models, with the metrics by which they are shown and a name of its own for each.
    comparisons: those with the first model, or those of each two.
    gathered: the learning curves of runs of which several checkpoints are among the results.
    all_pairs: the ranking, if each two were compared.
    date: the day on which the page is written, such as 2026-11-30.
    """
    first = all_results[0]
    items = collect_items(all_results)
    script = (PARTS / "page.js").read_text()
    environment = Environment(
        loader=FileSystemLoader(PARTS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["name"] = short_name
    return environment.get_template("page.html.jinja").render(
        first_line=Markup(FIRST_LINE),
        style=Markup((PARTS / "page.css").read_text()),
        script=Markup(script),
        script_hash=_hash_for_policy(script),
        title=_title(all_results, is_ranking=all_pairs is not None),
        suite=first.suite,
        date=date,
        release=read_release().version,
        models=[_describe_model(results) for results in all_results],
        scores=_score_rows(all_results, comparisons),
        notes_on_scores=_limit_notes(notes(all_results)),
        pairs=[_pair_section(comparison, number) for number, comparison in enumerate(comparisons)],
        legend=legend(comparisons),
        ranks=None if all_pairs is None else ranking_table(all_pairs),
        legend_of_ranks=LEGEND_OF_RANKS,
        curves=draw_curves(gathered.curves, "curves") if gathered.curves else None,
        notes_on_curves=_limit_notes(gathered.notes),
        items=items,
        data=_as_script_data(items, all_results),
        max_rows=MAX_ROWS,
    )


def _title(all_results: Sequence[Results], *, is_ranking: bool) -> str:
    """Return the page's title, such as "ours against base"."""
    first, *others = all_results
    if is_ranking:
        return f"{len(all_results)} models, ranked"
    subject = short_name(others[0].name) if len(others) == 1 else f"{len(others)} models"
    return f"{subject} against {short_name(first.name)}"


def short_name(text: str) -> str:
    """Return a name in one line of at most MAX_NAME_CHARACTERS, without control characters and credentials."""
    name = printable(text)
    if len(name) <= MAX_NAME_CHARACTERS:
        return name
    half = MAX_NAME_CHARACTERS // 2
    return f"{name[: half - 1]}…{name[-half:]}"


def _limit_notes(all_notes: Sequence[str]) -> list[str]:
    """Return at most MAX_NOTES notes, with a last one that says how many are left out."""
    shown = [printable(note) for note in all_notes[:MAX_NOTES]]
    if len(all_notes) > MAX_NOTES:
        shown.append(f"{len(all_notes) - MAX_NOTES:,} more notes are left out here; the console has them.")
    return shown


# ------------------------------------------------------------------------------------------------- models and scores


def _describe_model(results: Results) -> Mapping[str, str]:
    """Return what the page says about a model. A fact that is not known is an empty text."""
    codes = dict.fromkeys(str(record.get("code", "")) for record in results.tasks.values())
    return {
        "name": results.name,
        "source": results.source,
        "save": results.save_id or "",
        "tokens": format_count(results.num_tokens_trained),
        "parameters": format_count(results.num_parameters),
        "tokenizer": results.tokenizer,
        "precision": results.precision,
        "code": ", ".join(code for code in codes if code),
        "file": str(results.path),
    }


def format_count(count: int | None) -> str:
    """Return a count in three digits with its unit: 1.32 B for 1,315,950,592; an empty text for None."""
    if count is None:
        return ""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:,}"


def _score_rows(all_results: Sequence[Results], comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Return a row of the table of scores for each task, and one for the average if there are several accuracies."""
    first_name = all_results[0].name
    with_first = [comparison for comparison in comparisons if comparison.first == first_name]
    direction_of: dict[tuple[str, str], str] = {}
    for comparison in with_first:
        for row in comparison.rows:
            direction_of[comparison.other, row.task] = _direction(row)

    rows: list[dict[str, Any]] = []
    for task, record in records_by_task(all_results).items():
        cells: list[ScoreCell] = []
        for results in all_results:
            own_record = results.tasks.get(task)
            cell = Cell() if own_record is None else score_cell(own_record)
            cells.append(_format_cell(cell, record["metric"], direction_of.get((results.name, task), "")))
        chance = record.get("chance")
        rows.append(
            {
                "task": task,
                "metric": record["metric"].replace("_", " "),
                "n": f"{record['n']:,}",
                "cells": cells,
                "chance": f"{chance:.3f}" if isinstance(chance, int | float) else "",
            }
        )

    rows += _composite_rows([results.name for results in all_results], with_first)
    if any(len(results.averaged) > 1 for results in all_results):
        means = {comparison.other: comparison.mean for comparison in with_first}
        cells = []
        for results in all_results:
            cell = Cell()
            metric = "mean"
            if results.average is not None:
                cell = Cell(results.average, average_error(results.tasks, results.averaged))
                first_record = results.tasks[results.averaged[0]]
                metric = "mean" if is_accuracy(first_record) else first_record["metric"]
            mean = means.get(results.name)
            cells.append(_format_cell(cell, metric, "" if mean is None else _direction(mean)))
        rows.append({"task": "average", "metric": "", "n": "", "cells": cells, "chance": ""})
    return rows


def _composite_rows(names: Sequence[str], comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Return a row for each category and average of a gauntlet. `comparisons` are those with the first model."""
    cells_of_score: dict[str, dict[str, ScoreCell]] = {}
    for comparison in comparisons:
        for row in comparison.composites:
            cells = cells_of_score.setdefault(row.task, {})
            cells.setdefault(comparison.first, _format_cell(Cell(row.first), row.metric, ""))
            cells[comparison.other] = _format_cell(Cell(row.other), row.metric, _direction(row))

    rows: list[dict[str, Any]] = []
    for score, cells in cells_of_score.items():
        shown = [cells.get(name, ScoreCell(score="", interval="")) for name in names]
        rows.append({"task": score, "metric": "", "n": "", "cells": shown, "chance": ""})
    return rows


def _direction(row: MetricComparison) -> str:
    """Return better or worse for a detected difference, and an empty text for any other."""
    if not row.is_detected:
        return ""
    return "better" if row.is_better else "worse"


def _format_cell(cell: Cell, metric: str, direction: str) -> ScoreCell:
    """Return a score and its 95 % interval as texts. An interval of an accuracy ends at 0 and 1."""
    if cell.number is None:
        return ScoreCell(score="", interval="")
    is_in_bits = metric in BITS_METRICS
    digits = 4 if is_in_bits else 3
    interval = ""
    if cell.error is not None:
        low = max(cell.number - Z_95 * cell.error, 0)
        high = cell.number + Z_95 * cell.error
        if not is_in_bits:
            high = min(high, 1)
        interval = f"{low:.{digits}f} to {high:.{digits}f}"
    return ScoreCell(score=f"{cell.number:.{digits}f}", interval=interval, direction=direction)


# ------------------------------------------------------------------------------------------------------- differences


def _pair_section(comparison: Comparison, number: int) -> PairSection:
    """Return the section of one comparison. `number` counts them, and names the ids of its picture."""
    picture = None
    rows = [row for row in comparison.rows if math.isfinite(row.difference)]
    if rows and number < MAX_PICTURES:
        picture = draw_differences(rows, f"differences-{number}", comparison.other, comparison.first)

    table = comparison.table()
    all_rows = [*comparison.rows, *comparison.other_metrics]
    return PairSection(
        title=f"{short_name(comparison.other)} against {short_name(comparison.first)}",
        sentence=printable(comparison.sentence),
        picture=picture,
        columns=table.columns,
        rows=table.rows[:MAX_ROWS],
        directions=[_direction(row) for row in all_rows[:MAX_ROWS]],
        right=[index for index in range(len(table.columns)) if table.is_right(index)],
        mean_index=-1 if comparison.mean is None else len(comparison.rows) - 1,
        notes=_limit_notes(comparison.notes),
    )


# --------------------------------------------------------------------------------------------------- script and data


def _hash_for_policy(script: str) -> Markup:
    """Return the source by which a content security policy allows an inline script: 'sha256-…'."""
    digest = hashlib.sha256(script.encode()).digest()
    return Markup(f"'sha256-{base64.b64encode(digest).decode()}'")


def _as_script_data(items: ItemList, all_results: Sequence[Results]) -> Markup:
    """Return the items as JSON that may stand in a `<script type="application/json">`.

    A script ends at `</script`, whatever surrounds it, and `<!--` changes how its end is found. So `<` is written as an
    escape, which JSON reads as the same character.
    """
    names = [short_name(results.name) for results in all_results]
    content = json.dumps({"models": names, "tasks": items.tasks}, allow_nan=False, separators=(",", ":"))
    return Markup(content.replace("<", "\\u003c"))
