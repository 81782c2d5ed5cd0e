"""Figure of `python -m benchmarks islands`: the loss, which island computed which rows, and the deviation."""

from pathlib import Path
from typing import Any

from benchmarks.switch.figure import COLOURS, INK, QUIET, sign
from llmfoundry_lite.report.canvas import fixed_settings, plt, save_figure

# Controls whose deviation is drawn -> their names in words.
WRONG = {"weights": "a share weighted twice", "lost": "a batch lost at a repeat", "stale": "an old gradient counted"}
WRONG_COLOURS = ("#c44e52", "#da8bc3", "#ccb974")


@fixed_settings()
def plot_islands(report: dict[str, Any], path: Path) -> None:
    """Draw the loss by batch, the rows of each island below it, and the deviation against the band, as a PNG."""
    figure = plt.figure(figsize=(11, 7.2), layout="constrained", dpi=150)
    top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=(1.8, 0.7, 1.2))
    batches, story = range(1, report["num_batches"] + 1), report["islands"]
    first_world = next(iter(report["worlds"].values()))
    top.plot(
        batches, first_world["losses"], color=COLOURS[2], linewidth=4, alpha=0.45, label="one world, never disturbed"
    )
    top.plot(batches, story["losses"], color=INK, linewidth=1.2, label="two islands, one of which dies and comes back")

    # Mark when B was killed and when it was back, in all three panels.
    for batch, label, side in (
        (story["killed_after"], "B is killed", "right"),
        (story["back_from"] - 1, "B is back", "left"),
    ):
        for axes in (top, middle, bottom):
            axes.axvline(batch + 0.5, color=QUIET, linewidth=0.8, linestyle=":")
        place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "ha": side}
        top.annotate(label, (batch + 0.5, 0.62), (-6 if side == "right" else 6, 0), **place, color=INK)

    top.set_ylabel("loss, nats per token")
    top.legend(frameon=False, fontsize=9.5, loc="upper right")
    same = report["verdicts"]["islands"]["first_other_digest"] is None
    data_note = "every batch has the data of one world, by its digest" if same else "NOT the same data"
    top.set_title(f"One run on two clusters at once: {data_note}", fontsize=11)
    _draw_rows(middle, report)
    _draw_deviations(bottom, report)
    bottom.set_xlabel("batch")
    for axes in (top, middle, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(0.5, report["num_batches"] + 0.5)
    sign(figure, report, report["clusters"][:2], "fp32", "B is emulated")
    save_figure(figure, path)


def _draw_rows(axes: Any, report: dict[str, Any]) -> None:
    """Draw how many rows of each batch each island computed: A's at the bottom, B's on top."""
    rows_of_a, batches = report["rows"], range(1, report["num_batches"] + 1)
    # A batch's rows are divided between A and B; while B is away, A has all of them.
    rows_of_b = [max(rows_of_a) - rows for rows in rows_of_a]
    for rows, below, name, colour, cluster in zip(
        (rows_of_a, rows_of_b), ([0] * len(rows_of_a), rows_of_a), "AB", COLOURS, report["clusters"], strict=False
    ):
        axes.bar(batches, rows, 1.0, bottom=below, color=colour, alpha=0.75, lw=0)
        ranks = f"{cluster['num_ranks']} rank{'s' if cluster['num_ranks'] > 1 else ''}, {cluster['sharding']}"
        label = f"{name}: {ranks},\n{cluster['instructions']}, torch {cluster['torch'].split('+')[0]}"
        position = (1.005, below[0] + rows[0] / 2)
        axes.annotate(label, position, xycoords=("axes fraction", "data"), color=colour, fontsize=8.5, va="center")
    axes.set_ylabel("rows of\neach batch")
    axes.set_yticks([0, max(rows_of_a)])


def _draw_deviations(axes: Any, report: dict[str, Any]) -> None:
    """Draw how far the islands' run and the controls are from a single world, on a logarithmic axis."""
    band, batches = report["band"], range(1, report["num_batches"] + 1)
    floor = min(band) / 5
    axes.fill_between(batches, floor, band, color="#bbbbbb", alpha=0.6, lw=0)
    ratio = report["verdicts"]["islands"]["largest_ratio"]
    axes.plot(batches, report["deviation"]["islands"], color=INK, linewidth=2)
    notes = [(f"A and B, {ratio:.1f} x the band", report["deviation"]["islands"][-1], INK)]
    for (name, words), colour in zip(WRONG.items(), WRONG_COLOURS, strict=True):
        values = report["deviation"][name]
        axes.plot(range(1, len(values) + 1), [max(value, floor) for value in values], color=colour, linewidth=1.3)
        axes.plot(len(values), values[-1], "o", color=colour, markersize=3.5)
        notes.append((words, values[-1], colour))
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}")  # figures take no mathematics in labels
    axes.set_ylim(bottom=floor)
    axes.set_ylabel("distance from one world,\nnats per token")
    axes.annotate(
        notes[0][0], (1.005, notes[0][1]), xycoords=("axes fraction", "data"), color=INK, fontsize=9, va="center"
    )
    axes.annotate(
        f"the band of {len(report['worlds'])} single worlds", (0.99, floor * 1.6), xycoords=("axes fraction", "data"),
        color=QUIET, fontsize=9, ha="right",
    )  # fmt: skip

    # The labels of the controls stand in a list, in the order of their curves.
    controls = sorted(notes[1:], key=lambda note: -note[1])
    style: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "fontsize": 9, "va": "center"}
    for index, (words, _, colour) in enumerate(controls):
        position = (len(report["deviation"]["weights"]) + 2, 0.93 - 0.12 * index)
        axes.annotate(f"{words}: caught", position, color=colour, **style)
    axes.grid(alpha=0.25, linewidth=0.6)
