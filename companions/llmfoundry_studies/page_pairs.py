"""Sections of a page that compare two models, or two recipes with several runs: a picture, a table and notes.

`section_of_models` and `section_of_recipes` build them for `page.py`, from what `compare` and `compare_sides` return.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from llmfoundry_lite.errors import printable
from llmfoundry_lite.evaluation.pairs import Comparison
from llmfoundry_lite.tables import Table
from llmfoundry_studies.page_texts import limit_notes, short_name
from llmfoundry_studies.pictures import MEAN, Picture, draw_differences
from llmfoundry_studies.ranking import Difference, difference_of
from llmfoundry_studies.recipes import notes_on_sides, table_of_sides
from llmfoundry_studies.seeds import SidePair

MAX_ROWS = 400
"""Most rows of a table on the page."""
MAX_PICTURES = 20
"""Most sections that have a picture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSection:
    """The comparison of one model or recipe with another, as the page shows it."""

    title: str
    sentence: str
    differences: Sequence[Difference]
    """Those of the tasks, of a gauntlet's scores, and of the mean."""
    picture: Picture | None
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    directions: Sequence[str]
    """better, worse or an empty text, for each of the rows that have a difference here."""
    right: Sequence[int]
    """Indices of columns that are aligned to the right."""
    notes: Sequence[str]

    def direction_of_row(self, index: int) -> str:
        """Return better or worse for a row with a detected difference, and an empty text for any other."""
        return self.directions[index] if index < len(self.directions) else ""

    def is_mean(self, index: int) -> bool:
        """Return whether a row is that of the mean of several tasks."""
        return self.rows[index][0].startswith(MEAN)


def section_of_models(comparison: Comparison, number: int) -> PairSection:
    """Return the section of two models. `number` counts the page's sections, and names the ids of the picture."""
    differences = [
        difference_of(comparison.first, comparison.other, row, row.difference)
        for row in [*comparison.rows, *comparison.other_metrics]
    ]
    num_shown = len(comparison.rows)
    return _section(
        differences[:num_shown],
        comparison.table(),
        number,
        sentence=comparison.sentence,
        notes=comparison.notes,
        directions=[direction_of(difference) for difference in differences],
    )


def section_of_recipes(pair: SidePair, number: int) -> PairSection:
    """Return the section of two recipes. The argument `number` is that of `section_of_models`."""
    differences = [difference_of(pair.first.name, pair.other.name, row, row.estimate.difference) for row in pair.rows]
    return _section(
        differences,
        table_of_sides(pair),
        number,
        sentence=_describe_mean(differences),
        notes=notes_on_sides(pair),
        directions=[direction_of(difference) for difference in differences],
    )


def _section(
    differences: Sequence[Difference],
    table: Table,
    number: int,
    *,
    sentence: str,
    notes: Sequence[str],
    directions: Sequence[str],
) -> PairSection:
    """Return a section. `differences` are drawn, and `directions` has one for each row of the table."""
    picture = None
    if number < MAX_PICTURES:
        picture = draw_differences(differences, f"differences-{number}")
    return PairSection(
        title=f"{short_name(differences[0].other)} against {short_name(differences[0].first)}",
        sentence=printable(sentence),
        differences=differences,
        picture=picture,
        columns=table.columns,
        rows=table.rows[:MAX_ROWS],
        directions=directions,
        right=[index for index in range(len(table.columns)) if table.is_right(index)],
        notes=limit_notes(notes),
    )


def _describe_mean(differences: Sequence[Difference]) -> str:
    """Return the verdict on the mean of the tasks as a sentence; an empty text if there is no mean."""
    for difference in differences:
        if difference.task.startswith(MEAN):
            return f"{difference.other} against {difference.first}: {difference.verdict} on the {difference.task}"
    return ""


def direction_of(difference: Difference) -> str:
    """Return better or worse for a detected difference, and an empty text for any other."""
    if not difference.is_detected:
        return ""
    return "better" if difference.is_other_better else "worse"
