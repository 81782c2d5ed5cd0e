"""The scores of a run's checkpoints in `llmfoundry-lite report`: a table, a figure over tokens, and the points as JSON.

`Curves` is what the core's report calls. It looks for results of the runs' checkpoints in a folder of results, and in
the folder `results` of each run. The loss and the validation loss of the training are the core's figure, not this one.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from llmfoundry_lite.checkpoint.store import CheckpointStore
from llmfoundry_lite.errors import CheckpointError, join_with_and, mask_urls
from llmfoundry_lite.evaluation.metrics import by_metrics, choose_metrics
from llmfoundry_lite.evaluation.results import Results
from llmfoundry_lite.report.page import Additions, Facts, Section
from llmfoundry_lite.report.reading import Run
from llmfoundry_lite.tables import Table
from llmfoundry_studies.curve_figure import MAX_PANELS, group_by_panel, plot_curves
from llmfoundry_studies.curves import LearningCurve, build_curves, folder_of_checkpoint, read_folder, smooth, tokens_of

NUM_AVERAGED = 5
"""Checkpoints whose mean is shown beside the last one, because single checkpoints scatter."""
MAX_ROWS = 30
"""Rows of the table. All curves are in report.json."""


class Curves(Additions):
    """Adds the learning curves of runs whose checkpoints were evaluated."""

    def __init__(self, runs: Sequence[Run], names: Sequence[str], image_format: str, results_folder: Path):
        """Find the results of the runs' checkpoints, and build their curves."""
        all_results = read_all_results(runs, results_folder)
        all_results = by_metrics(all_results, choose_metrics(all_results))
        results_of_run = {name: find_results_of(run, all_results) for run, name in zip(runs, names, strict=True)}
        gathered = build_curves(results_of_run)
        self.curves = gathered.curves
        self.notes = gathered.notes
        self.title = join_with_and(names)

        figure_name = f"curves.{image_format}"
        self.file_names = [figure_name]
        self.facts = {"curves_figure": figure_name if self.curves else None}
        self.run_facts = [{"curves": [asdict(curve) for curve in self._curves_of(name)]} for name in names]

    def _curves_of(self, name: str) -> list[LearningCurve]:
        """Return the curves of the run with this name."""
        return [curve for curve in self.curves if curve.run == name]

    def add_sections(self, run: Facts, sections: list[Section]) -> list[Section]:
        """Return a run's sections with its scores, if it has any. The first run that has some shows the figure."""
        curves = self._curves_of(run["name"])
        if not curves:
            return sections
        is_first = curves[0] is self.curves[0]
        figure = f"![scores of checkpoints]({self.facts['curves_figure']})" if is_first else ""
        notes = [note for note in self.notes if f" {run['name']}: " in note]
        num_panels = len(group_by_panel(self.curves))
        if is_first and num_panels > MAX_PANELS:
            notes.append(f"the figure has the first {MAX_PANELS} of {num_panels} curves of a task by a metric")
        return [*sections, build_scores_section(run["name"], curves, notes, figure)]

    def draw(self, folder: Path) -> list[Path]:
        """Draw the curves of all runs into `folder`, if there are any. Returns the paths of figures."""
        if not self.curves:
            return []
        path = folder / self.file_names[0]
        plot_curves(path, self.curves, title=f"{self.title}: evaluated checkpoints")
        return [path]


def build_scores_section(name: str, curves: Sequence[LearningCurve], notes: Sequence[str], figure: str) -> Section:
    """Show the first and the last score of each curve of a run, and the mean over its last checkpoints."""
    rows: list[Sequence[str]] = []
    for curve in curves[:MAX_ROWS]:
        first = curve.points[0]
        last = curve.points[-1]
        mean = ""
        if len(curve.points) >= NUM_AVERAGED:
            mean = f"{smooth(curve, NUM_AVERAGED).points[-1].score:.{curve.digits}f}"
        rows.append(
            (
                curve.task,
                "bits per byte" if curve.is_in_bits else curve.metric,
                f"{len(curve.points)}",
                f"{first.score:.{curve.digits}f} at {first.num_tokens:,}",
                f"{format_score(curve)} at {last.num_tokens:,}",
                mean,
            )
        )
    columns = ("task", "metric", "checkpoints", "first, at tokens", "last, at tokens", f"mean of last {NUM_AVERAGED}")
    lines = ["± is one standard error", *notes]
    if len(curves) > MAX_ROWS:
        lines.append(f"{len(curves) - MAX_ROWS} more are in report.json")
    return Section(Table(f"Evaluated checkpoints of {name}", columns, rows, right={2, 3, 4, 5}), lines, figure=figure)


def format_score(curve: LearningCurve) -> str:
    """Format the last score of a curve with its standard error, if that is known: `0.412 ± 0.006`."""
    last = curve.points[-1]
    text = f"{last.score:.{curve.digits}f}"
    return text if last.error is None else f"{text} ± {last.error:.{curve.digits}f}"


# ------------------------------------------------------------------------------------------------- finding results


def read_all_results(runs: Sequence[Run], results_folder: Path) -> list[Results]:
    """Read the results of checkpoints in all suites of a folder, and of the folder `results` of each run.

    Results of other models, and files that cannot be read, are left out: a folder of results has many that are not of
    these runs.
    """
    folders = [results_folder]
    for run in runs:
        run_folder = run.folder.path_here
        if run_folder is not None:
            folders.append(run_folder / "results")

    all_results: list[Results] = []
    for folder in dict.fromkeys(folder.resolve() for folder in folders):
        suites = sorted(path for path in folder.glob("*") if path.is_dir())
        for suite in suites:
            found, _ = read_folder(suite)
            all_results += [results for results in found if tokens_of(results) is not None]
    return all_results


def find_results_of(run: Run, all_results: Sequence[Results]) -> list[Results]:
    """Return the results of a run's checkpoints.

    A result belongs to the run if it was made from a checkpoint in the folder where the run saves. That folder may have
    been named by another path when it was evaluated. So every folder counts of which one result has the id of a save
    that the run still has.
    """
    if run.saved_in is None:
        return []
    save_ids = read_save_ids(run.saved_in)
    folders = {mask_urls(run.saved_in.rstrip("/"))}
    for results in all_results:
        if results.save_id in save_ids:
            folders.add(folder_of_checkpoint(results))
    return [results for results in all_results if folder_of_checkpoint(results) in folders]


def read_save_ids(folder: str) -> set[str]:
    """Return the ids of the saves in a folder on this machine; none for a URL, where each would be a request."""
    if "://" in folder:
        return set()
    try:
        candidates = CheckpointStore(folder).candidates()
    except CheckpointError:
        return set()
    return {candidate.head.save_id for candidate in candidates if candidate.head is not None}
