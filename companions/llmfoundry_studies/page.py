"""A comparison of models as one HTML page, which needs no server and no network: `compare … --html FILE`.

`write_page` gathers facts and writes the page. `pictures.py` draws its pictures, `page_items.py` collects the items of
its list, and the folder `page_parts` has the template, the style sheet and the script of the page.

Names, questions and answers come from other people. The template escapes all texts. Items are data that the script puts
into the page as text. The page's content security policy allows this one script, by its hash, and no connection.
"""

import base64
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from llmfoundry_lite.config.task_types import BPB, TEXT
from llmfoundry_lite.errors import ConfigError, DataError
from llmfoundry_lite.evaluation.metrics import by_metrics, choose_metrics
from llmfoundry_lite.evaluation.pairs import Comparison, legend
from llmfoundry_lite.evaluation.records import BITS_METRICS, Record, is_accuracy
from llmfoundry_lite.evaluation.results import Results
from llmfoundry_lite.evaluation.tables import Cell, average_cells, have_accuracies, notes, records_by_task, score_cell
from llmfoundry_lite.files import check_is_path, open_regular, write_atomically
from llmfoundry_lite.release import read_release
from llmfoundry_studies.curves import GatheredCurves, gather_curves
from llmfoundry_studies.gauntlet import GAUNTLET
from llmfoundry_studies.page_items import ItemList, collect_items
from llmfoundry_studies.page_pairs import MAX_ROWS, PairSection, direction_of, section_of_models, section_of_recipes
from llmfoundry_studies.page_texts import label_of_metric, limit_notes, short_name
from llmfoundry_studies.pictures import MEAN, draw_curves
from llmfoundry_studies.ranking import LEGEND as LEGEND_OF_RANKS
from llmfoundry_studies.ranking import AllPairs, Difference, ranking_table
from llmfoundry_studies.recipes import LEGEND as LEGEND_OF_RECIPES
from llmfoundry_studies.seeds import Side, SidePair

PARTS = Path(__file__).with_name("page_parts")
FIRST_LINE = "<!DOCTYPE html><!-- llmfoundry-lite compare -->"
"""First line of every page, by which an earlier page is recognised."""

Z_95 = 1.96
"""Standard errors on either side of a score in its 95 % interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageContent:
    """Content of a page."""

    title: str
    first: str
    """Name of the model or recipe that the others are compared with."""
    all_results: Sequence[Results]
    """The results of all models, with the metrics by which they are shown and a name of its own for each."""
    sections: Sequence[PairSection]
    """The comparisons with the first, or those of each two."""
    legend: str
    """Text below the comparisons."""
    gathered: GatheredCurves
    """The learning curves of runs of which several checkpoints are among the results."""
    all_pairs: AllPairs | None
    """The ranking, if each two were compared."""
    date: str
    """The day on which the page is written, such as 2026-11-30."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreCell:
    """A model's score on a task, as the page's table shows it."""

    score: str
    interval: str
    direction: str = ""
    """better or worse, if a difference from the first model is detected; else empty."""


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
    _write(content_of_models(all_results, comparisons, metric=metric, all_pairs=all_pairs, date=_today()), path)


def write_page_of_recipes(
    sides: Sequence[Side],
    pairs: Sequence[SidePair],
    path: Path,
    *,
    metric: str | None = None,
    all_pairs: AllPairs | None = None,
) -> None:
    """Write the comparison of several recipes as an HTML page, on which each of their runs is a model.

    The arguments are those of `write_page`, with `sides` in place of results.
    """
    all_results = [
        replace(results, name=f"{side.name}: {results.name}") for side in sides for results in side.all_results
    ]
    names = [side.name for side in sides]
    content = PageContent(
        title=_title(names, "recipes", is_ranking=all_pairs is not None),
        first=names[0],
        all_results=_shown(all_results, metric),
        sections=[section_of_recipes(pair, number) for number, pair in enumerate(pairs)],
        legend=LEGEND_OF_RECIPES,
        gathered=gather_curves(all_results, metric),
        all_pairs=all_pairs,
        date=_today(),
    )
    _write(content, path)


def content_of_models(
    all_results: Sequence[Results],
    comparisons: Sequence[Comparison],
    *,
    date: str,
    metric: str | None = None,
    all_pairs: AllPairs | None = None,
) -> PageContent:
    """Return the content of the page of several models. The arguments are those of `write_page`."""
    names = [results.name for results in all_results]
    return PageContent(
        title=_title(names, "models", is_ranking=all_pairs is not None),
        first=names[0],
        all_results=_shown(all_results, metric),
        sections=[section_of_models(comparison, number) for number, comparison in enumerate(comparisons)],
        legend=legend(comparisons),
        gathered=gather_curves(all_results, metric),
        all_pairs=all_pairs,
        date=date,
    )


def _today() -> str:
    """Return today's date in UTC, such as 2026-11-30."""
    return datetime.now(UTC).date().isoformat()


def _shown(all_results: Sequence[Results], metric: str | None) -> list[Results]:
    """Return results with the metrics by which they are shown. Their models have the distinct names of the results."""
    metrics = choose_metrics(all_results, metric)
    return [replace(results, model=results.name) for results in by_metrics(all_results, metrics)]


def _write(content: PageContent, path: Path) -> None:
    """Write a page, and create its folder if needed. Raises DataError if the disk is full, or cannot be written."""
    html = render_page(content)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, html)
    except OSError as error:
        raise DataError(f"--html: {path} cannot be written: {error.strerror or error}; name another file") from error


def render_page(content: PageContent) -> str:
    """Return a page as HTML."""
    items = collect_items(content.all_results)
    script = (PARTS / "page.js").read_text()
    curves = content.gathered.curves
    environment = Environment(
        loader=FileSystemLoader(PARTS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["name"] = short_name
    return environment.get_template("page.html.jinja").render(
        content=content,
        first_line=Markup(FIRST_LINE),
        style=Markup((PARTS / "page.css").read_text()),
        script=Markup(script),
        script_hash=_hash_for_policy(script),
        release=read_release().version,
        models=[_describe_model(results) for results in content.all_results],
        scores=_score_rows(content),
        notes_on_scores=limit_notes(notes(content.all_results)),
        ranks=None if content.all_pairs is None else ranking_table(content.all_pairs),
        legend_of_ranks=LEGEND_OF_RANKS,
        curves=draw_curves(curves, "curves") if curves else None,
        notes_on_curves=limit_notes(content.gathered.notes),
        items=items,
        data=_as_script_data(items, content.all_results),
        max_rows=MAX_ROWS,
    )


def _title(names: Sequence[str], noun: str, *, is_ranking: bool) -> str:
    """Return the page's title, such as "ours against base"."""
    first, *others = names
    if is_ranking:
        return f"{len(names)} {noun}, ranked"
    subject = short_name(others[0]) if len(others) == 1 else f"{len(others)} {noun}"
    return f"{subject} against {short_name(first)}"


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
        # 999,600,000 is 1,000 M in three digits, which is 1 B.
        if count >= 0.9995 * size:
            return f"{count / size:.3g} {unit}"
    return f"{count:,}"


def _score_rows(content: PageContent) -> list[dict[str, Any]]:
    """Return a row of the table of scores for each task, and one for the average if there are several accuracies."""
    all_results = content.all_results
    all_differences = [difference for section in content.sections for difference in section.differences]
    differences = [difference for difference in all_differences if difference.first == content.first]

    rows = [
        _row_of_task(task, record, all_results, differences) for task, record in records_by_task(all_results).items()
    ]
    rows += _composite_rows([results.name for results in all_results], differences)
    if any(len(results.averaged) > 1 for results in all_results):
        rows.append(_average_row(all_results, differences))
    return rows


def _row_of_task(
    task: str, record: Record, all_results: Sequence[Results], differences: Sequence[Difference]
) -> dict[str, Any]:
    """Return the row of a task. `record` is that of the first model which has it."""
    directions = {one.other: direction_of(one) for one in differences if one.task == task}
    cells: list[ScoreCell] = []
    for results in all_results:
        own_record = results.tasks.get(task)
        cell = Cell() if own_record is None else score_cell(own_record)
        cells.append(_format_cell(cell, record["metric"], directions.get(results.name, "")))
    chance = record.get("chance") if is_accuracy(record) else None
    return {
        "task": task,
        "metric": label_of_metric(record["metric"]),
        "n": _describe_size(record),
        "cells": cells,
        "chance": "" if chance is None else f"{chance:.3f}",
    }


def _average_row(all_results: Sequence[Results], differences: Sequence[Difference]) -> dict[str, Any]:
    """Return the row of the average over tasks. All of its cells are in one unit, as in tables."""
    directions = {one.other: direction_of(one) for one in differences if one.task.startswith(MEAN)}
    metric = "mean" if have_accuracies(all_results) else BPB
    cells: list[ScoreCell] = []
    for results, cell in zip(all_results, average_cells(all_results), strict=True):
        cells.append(_format_cell(cell, metric, directions.get(results.name, "")))
    return {"task": "average", "metric": "", "n": "", "cells": cells, "chance": ""}


def _describe_size(record: Record) -> str:
    """Return the number of a task's items. Those of a held-out text are windows, which compare joins to documents."""
    if record.get("type") != TEXT:
        return f"{record['n']:,}"
    windows = f"{record['n']:,} windows"
    num_documents = record.get("num_documents")
    return windows if num_documents is None else f"{windows} of {num_documents:,} documents"


def _composite_rows(names: Sequence[str], differences: Sequence[Difference]) -> list[dict[str, Any]]:
    """Return a row for each category and average of a gauntlet that the models of these names have.

    `differences` are those from the first. Those of recipes are about no model, because their runs are the models.
    """
    cells_of_score: dict[str, dict[str, ScoreCell]] = {}
    for one in differences:
        if one.metric == GAUNTLET and one.other in names:
            cells = cells_of_score.setdefault(one.task, {})
            cells.setdefault(one.first, _format_cell(Cell(one.first_value), one.metric, ""))
            cells[one.other] = _format_cell(Cell(one.other_value), one.metric, direction_of(one))

    rows: list[dict[str, Any]] = []
    for score, cells in cells_of_score.items():
        shown = [cells.get(name, ScoreCell(score="", interval="")) for name in names]
        rows.append({"task": score, "metric": "", "n": "", "cells": shown, "chance": ""})
    return rows


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
