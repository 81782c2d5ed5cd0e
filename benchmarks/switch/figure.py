"""Figure of the switch benchmark. Three panels of losses: on one cluster, on another, and switching between all of
them. Below them, one panel shows how far the switching run and the controls are from the uninterrupted runs.

`sign` and the colours are also used by the figures of the islands benchmarks.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmfoundry_lite.report.canvas import fixed_settings, plt, save_figure

COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#8172b3", "#937860", "#64b5cd")
"""One for each cluster, in order of their letters."""
INK, QUIET, VALIDATION = "#222222", "#777777", "#c44e52"
"""Colours of the run in question, of what accompanies it, and of validation losses."""


@fixed_settings()
def plot_switch(names: Mapping[str, str], report: dict[str, Any], path: Path) -> None:
    """Draw the report of the switch benchmark as a PNG: losses of three runs, and deviations against the band.

    `names` maps a control to its name in words. The background of the third panel shows which cluster trained each
    batch.
    """
    colours = {
        cluster["letter"]: colour for cluster, colour in zip(report["clusters"], itertools.cycle(COLOURS), strict=False)
    }
    figure = plt.figure(figsize=(13, 6.6), layout="constrained", dpi=150)
    grid = figure.add_gridspec(2, 3, height_ratios=(1.7, 1))

    # The first two clusters, one panel each.
    left = figure.add_subplot(grid[0, 0])
    panels = [left, *(figure.add_subplot(grid[0, column], sharey=left) for column in (1, 2))]
    for axes, cluster in zip(panels, report["clusters"][:2], strict=False):
        letter = cluster["letter"]
        _draw_losses(axes, report["uninterrupted"][letter], colours[letter])
        ranks = f"{cluster['num_ranks']} rank{'s' if cluster['num_ranks'] > 1 else ''}"
        axes.set_title(
            f"cluster {letter} alone\n{ranks}, {cluster['sharding']}, {cluster['instructions']}", fontsize=10
        )

    # The switching run, on a background that changes colour with the cluster.
    axes = panels[2]
    for launch in report["launches"]["switching"]:
        axes.axvspan(
            launch["first_batch"] - 0.5, launch["last_batch"] + 0.5, color=colours[launch["cluster"]], alpha=0.16, lw=0
        )
        style: dict[str, Any] = {"ha": "center", "va": "top", "color": colours[launch["cluster"]], "weight": "bold"}
        middle = (launch["first_batch"] + launch["last_batch"]) / 2
        axes.text(middle, 0.97, launch["cluster"], transform=axes.get_xaxis_transform(), **style)
    _draw_losses(axes, report["switching"], INK)
    same = report["verdicts"]["switching"]["first_other_digest"] is None
    axes.set_title(
        f"one run, switching every {report['every']} batches\n"
        + ("every batch the same data, by its digest" if same else "NOT the same data"),
        fontsize=10,
    )

    left.set_ylabel("loss, nats per token")
    _draw_deviations(figure.add_subplot(grid[1, :]), report, names)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(0.5, report["num_batches"] + 0.5)
        axes.set_xlabel("batch", fontsize=9)

    emulated = "emulated" if any(cluster["emulated"] for cluster in report["clusters"]) else ""
    sign(figure, report, report["clusters"], report["precision"], emulated)
    save_figure(figure, path)


def sign(
    figure: Any, report: dict[str, Any], clusters: Sequence[dict[str, Any]], precision: str, emulated: str
) -> None:
    """Write below the figure where and when it was measured. `emulated` says what is emulated, and may be empty."""
    releases = dict.fromkeys(cluster["torch"] for cluster in clusters)
    words = f"{report['machine']}, torch {' and '.join(releases)}, {precision}, {report['date']}"
    if emulated:
        words += f"\n{emulated}: held to an instruction set below the machine's own, standing for another vendor"
    figure.supxlabel(words, fontsize=8, color=QUIET)


def _draw_losses(axes: Any, series: dict[str, Any], colour: str) -> None:
    """Draw training losses as a line, and validation losses as points, with the last of them as a number."""
    batches = range(1, len(series["losses"]) + 1)
    axes.plot(batches, series["losses"], color=colour, linewidth=1.3, label="training")
    points = [(int(batch), loss) for batch, loss in series["validation"].items()]
    label = f"validation, {points[-1][1]:.4f} at the end"
    axes.plot(*zip(*points, strict=True), "o", color=VALIDATION, markersize=4.5, clip_on=False, zorder=5, label=label)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.legend(frameon=False, fontsize=9, loc="upper right", bbox_to_anchor=(1, 0.9))


def _draw_deviations(axes: Any, report: dict[str, Any], names: Mapping[str, str]) -> None:
    """Draw how far the switching run and the controls are from the mean of the uninterrupted runs (logarithmic).

    Deviations below `floor`, a fifth of the narrowest band, are drawn at it, because a logarithmic axis has no 0. The
    labels stand to the right of the lines' ends, moved upwards where they would overlap.
    """
    batches = range(1, report["num_batches"] + 1)
    floor = min(report["band"]) / 5
    axes.fill_between(batches, floor, [max(value, floor) for value in report["band"]], color="#bbbbbb", alpha=0.6, lw=0)
    switching = [max(value, floor) for value in report["deviation"]["switching"]]
    axes.plot(batches, switching, color=INK, linewidth=2, zorder=5)
    end_heights = {
        "the band": report["band"][-1] ** 0.5 * floor**0.5,
        "switching": report["deviation"]["switching"][-1],
    }
    ratio, num_runs = report["verdicts"]["switching"]["largest_ratio"], len(report["uninterrupted"])

    # A label is (text, height in nats, colour). With exact sums, the band's width is 0.
    if report.get("exact_sums"):
        labels = [(f"switching: {max(report['deviation']['switching']):.2g}", floor, INK)]
        labels.append(("the distance of two fp32 numbers", end_heights["the band"], QUIET))
    else:
        labels = [(f"switching, {_rounded(ratio)} x the band", end_heights["switching"], INK)]
        labels.append((f"the band of {num_runs} uninterrupted runs", end_heights["the band"], QUIET))

    # The controls leave the switching run at the checkpoint that was tampered with.
    tampered_at = report["tampered_at"]
    controls = [name for name in report["deviation"] if name not in ("switching", "untouched")]
    for name, colour in zip(controls, ("#c44e52", "#da8bc3", "#ccb974", "#937860", "#8172b3", "#64b5cd"), strict=False):
        values = report["deviation"][name]
        axes.plot(batches[tampered_at:], values[tampered_at:], color=colour, linewidth=1.3)
        ratio = report["verdicts"][name]["largest_ratio"]
        labels.append((f"{names[name]}, {_rounded(ratio)} x", values[-1], colour))
    axes.axvline(tampered_at + 0.5, color=QUIET, linewidth=0.8, linestyle=":")
    style: dict[str, Any] = {"textcoords": "offset points", "ha": "right", "va": "top", "color": "#555555"}
    note = "controls: this checkpoint\ntampered with"
    axes.annotate(note, (tampered_at, 1), (-6, -4), xycoords=("data", "axes fraction"), fontsize=8.5, **style)

    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}")  # figures take no mathematics in labels
    axes.set_ylim(bottom=floor)
    axes.set_ylabel("distance from the mean of the\nuninterrupted runs, nats per token")
    axes.grid(alpha=0.25, linewidth=0.6)

    # Place the labels from the bottom up, each at least a tenth of the axis above the one below it.
    low, high = (math.log10(limit) for limit in axes.get_ylim())
    label_height = low
    for text, value, colour in sorted(labels, key=lambda label: label[1]):
        label_height = max(label_height + (high - low) * 0.105, math.log10(max(value, 10**low)))
        axes.annotate(
            text,
            (1.005, (label_height - low) / (high - low)),
            xycoords="axes fraction",
            color=colour,
            fontsize=9,
            va="center",
        )


def _rounded(ratio: float) -> str:
    """Format a ratio with two significant digits: "0.8", "9.9", "120", "15,000". (Below 10, with one decimal.)"""
    return f"{ratio:.1f}" if ratio < 10 else f"{float(f'{ratio:.2g}'):,.0f}"
