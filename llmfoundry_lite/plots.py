"""Figures of runs. Owns how things are drawn; what is drawn comes as plain arrays.

    plot_run(path, curve, spans, title=…)          loss and throughput, shaded where the hardware changed
    plot_comparison(path, curves, differences, …)  several losses, and how far each is from the first

A hundred thousand batches are thinned before they are drawn: of each stretch its lowest and its highest value.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from numpy.typing import NDArray

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

matplotlib.rcParams["text.parse_math"] = False  # names are text: "$" is no formula

TRAIN, VALIDATION, REFERENCE = "#4c72b0", "#c44e52", "#8c8c8c"
CURVES = ("#4c72b0", "#dd8452", "#55a868", "#8172b3", "#937860", "#da8bc3")
SHADES = ("#dfe8f3", "#fbe7d3", "#e2efe0", "#eae3f1", "#f8e1e1", "#f3efd2")
MAX_POINTS = 4000
"""Drawn of one curve; a figure is a quarter as many pixels wide."""

CROWD = 400
"""Points of one curve that can still be told apart."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One run. Batches ascend; a loss that was not finite is NaN."""

    name: str
    batches: Ints
    losses: Floats
    tokens_per_second: Floats
    eval_batches: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    eval_losses: Floats = field(default_factory=lambda: np.empty(0))
    not_finite: Sequence[int] = ()
    """The batches to mark."""


@dataclass(frozen=True, slots=True)
class Span:
    """Batches that ran on one kind of hardware; spans with equal labels get the same shade."""

    first_batch: int
    last_batch: int
    label: str
    """Parts are joined by ` · `: where there is room they stand below each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far a run is from the first one, at the batches that both have."""

    name: str
    batches: Ints
    absolute: Floats
    digests_part_at: int | None = None


def plot_run(
    path: Path,
    curve: Curve,
    spans: Sequence[Span] = (),
    *,
    title: str,
    baselines: Mapping[str, float] | None = None,
) -> None:
    """Loss against batch, with validation and baselines, above throughput; written to `path` as PNG."""
    strips = 1 if spans else 0
    figure, (*strip, loss, speed) = _stack(strips, 0.32, (3, 1))
    loss.plot(*thin(curve.batches, curve.losses), color=TRAIN, linewidth=1, alpha=0.35)
    loss.plot(*thin(curve.batches, smooth(curve.losses)), color=TRAIN, linewidth=1.8, label="training (smoothed)")
    if len(curve.eval_losses):
        dots = "o-" if len(curve.eval_losses) <= 100 else "-"
        points = thin(curve.eval_batches, curve.eval_losses)
        label = f"validation, {curve.eval_losses[-1]:.3f} at batch {curve.eval_batches[-1]:,}"
        loss.plot(*points, dots, color=VALIDATION, linewidth=1.5, markersize=4, label=label)
    for style, (name, value) in zip(("--", ":", "-."), (baselines or {}).items(), strict=False):
        loss.axhline(value, color=REFERENCE, linestyle=style, linewidth=1.2, label=f"{name} model, {value:.2f}")
    _mark_not_finite(loss, curve)
    loss.set_ylabel("loss, nats per token")
    loss.legend(frameon=False, fontsize=9, loc="upper right")
    speed.plot(*thin(curve.batches, curve.tokens_per_second), color=TRAIN, linewidth=1.2)
    speed.set_ylim(bottom=0)
    speed.set_ylabel("tokens/s")
    speed.yaxis.set_major_formatter("{x:,.0f}")
    _finish_axes((loss, speed), [curve])
    if spans:
        _shade((loss, speed), spans)
        _label_strips(figure, strip, [spans], [""])
    figure.axes[0].set_title(title, fontsize=11)
    figure.savefig(path)
    plt.close(figure)


def plot_comparison(
    path: Path,
    curves: Sequence[Curve],
    differences: Sequence[Difference],
    spans: Sequence[Sequence[Span]] = (),
    *,
    title: str,
) -> None:
    """The losses of several runs, and below, on a logarithmic scale, how far each is from the first one.

    `spans`, where any are known, are those of each curve. Differences of exactly zero have no place on the scale; the
    legend says how many there are.
    """
    strips = len(curves) if any(spans) else 0
    figure, (*strip, loss, gap) = _stack(strips, 0.2, (2.6, 1.4))
    for i, curve in enumerate(curves):
        look = {"color": CURVES[i % len(CURVES)], "linestyle": "-" if i == 0 else "--"}
        _plot_with_mean(loss, curve.batches, curve.losses, 2.2 if i == 0 else 1.3, curve.name, **look)
        if len(curve.eval_losses):
            loss.plot(curve.eval_batches, curve.eval_losses, "o" if i == 0 else "x", color=look["color"], markersize=5)
        _mark_not_finite(loss, curve)
    if any(len(curve.eval_losses) for curve in curves):
        loss.plot([], [], "o", color=REFERENCE, markersize=5, label="validation (x: other runs)")
    loss.set_ylabel("loss, nats per token")
    loss.legend(frameon=False, fontsize=9, loc="upper right")
    for i, difference in enumerate(differences, start=1):
        _plot_difference(gap, difference, CURVES[i % len(CURVES)])
    gap.set_yscale("log")
    if not gap.lines:
        gap.set_ylim(1e-7, 1)
    gap.set_ylabel(f"|difference| from\n{curves[0].name}")
    if differences:
        gap.legend(frameon=False, fontsize=8, loc="best")
    _finish_axes((loss, gap), curves)
    if strips:
        _label_strips(figure, strip, spans, [curve.name for curve in curves])
    figure.axes[0].set_title(title, fontsize=11)
    figure.savefig(path)
    plt.close(figure)


def _stack(num_strips: int, strip_height: float, heights: tuple[float, float]) -> tuple[Any, Any]:
    """Two panels over one axis of batches, below as many strips of hardware."""
    return plt.subplots(
        2 + num_strips,
        1,
        figsize=(8, 6 + 0.4 * num_strips),
        sharex=True,
        height_ratios=(*[strip_height] * num_strips, *heights),
        layout="constrained",
        dpi=130,
    )


def _plot_difference(axes: Any, difference: Difference, color: str) -> None:
    known = difference.absolute[np.isfinite(difference.absolute)]
    num_zero = int((known == 0).sum())
    label = difference.name
    if not len(known):
        label += ": no common batch"
    elif num_zero:
        label += f": zero at {num_zero:,} of {len(known):,} batches"
    above = np.where(difference.absolute > 0, difference.absolute, np.nan)
    if np.isfinite(above).any():
        _plot_with_mean(axes, difference.batches, above, 1.3, label, color=color, marker=".", markersize=2)
    else:
        axes.plot([], [], color=color, linewidth=1, label=label)
    if difference.digests_part_at is not None:
        at = difference.digests_part_at
        axes.axvline(at, color="#333333", linestyle=":", label=f"{difference.name}: other data from batch {at:,}")


def _plot_with_mean(axes: Any, batches: Ints, values: Floats, linewidth: float, label: str, **look: Any) -> None:
    """Each value, and where they are too many to be told apart, the mean of neighbours over them."""
    if len(values) <= CROWD:
        axes.plot(batches, values, linewidth=linewidth, label=label, **look)
        return
    axes.plot(*thin(batches, values), color=look["color"], linewidth=0.6, alpha=0.35)
    axes.plot(*thin(batches, smooth(values)), linewidth=linewidth, label=label, **look | {"marker": None})


def _mark_not_finite(axes: Any, curve: Curve) -> None:
    if curve.not_finite:
        heights = np.zeros(len(curve.not_finite))
        label = f"not finite: {len(curve.not_finite):,} of {curve.name}"
        label, at_the_foot = f"not finite: {len(curve.not_finite):,} of {curve.name}", axes.get_xaxis_transform()
        (marks,) = axes.plot(curve.not_finite, heights, "|", color=VALIDATION, label=label, transform=at_the_foot)
        marks.set(markersize=10, clip_on=False)


def _finish_axes(panels: Sequence[Any], curves: Sequence[Curve]) -> None:
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
    first = min(int(curve.batches[0]) for curve in curves)
    last = max(int(curve.batches[-1]) for curve in curves)
    panels[-1].set_xlim(first - 0.5, last + 0.5)
    panels[-1].set_xlabel("batch")
    panels[-1].xaxis.set_major_formatter("{x:,.0f}")


# ------------------------------------------------------------------------------------------------ hardware


def _shade(panels: Sequence[Any], spans: Sequence[Span]) -> None:
    shades = _shades([spans])
    for axes in panels:
        for span in spans:
            axes.axvspan(span.first_batch - 0.5, span.last_batch + 0.5, color=shades[span.label], linewidth=0, zorder=0)


def _shades(spans: Sequence[Sequence[Span]]) -> dict[str, str]:
    labels = dict.fromkeys(span.label for row in spans for span in row)
    return {label: SHADES[i % len(SHADES)] for i, label in enumerate(labels)}


def _label_strips(figure: Any, strips: Sequence[Any], rows: Sequence[Sequence[Span]], names: Sequence[str]) -> None:
    """A bar for each run, with what each span ran on: written into it if all labels fit, else numbers and a legend."""
    shades = _shades(rows)
    numbers = {label: str(i) for i, label in enumerate(shades, start=1)}
    for axes, spans, name in zip(strips, rows, names, strict=True):
        for span in spans:
            axes.axvspan(span.first_batch - 0.5, span.last_batch + 0.5, color=shades[span.label], linewidth=0)
        for side in axes.spines.values():
            side.set_visible(False)
        axes.tick_params(left=False, labelleft=False, bottom=False, labelbottom=False)
        axes.set_ylim(0, 1)
        if name:
            axes.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
    figure.draw_without_rendering()  # which gives every panel its place
    is_tall = len(rows) == 1
    texts = {label: label.replace(" · ", "\n", 1) if is_tall else label for label in shades}
    wide = {text: _width(figure, text) for text in (*texts.values(), *numbers.values())}

    def fits(axes: Any, span: Span, text: str) -> bool:
        (left, _), (right, _) = axes.transData.transform([(span.first_batch - 0.5, 0), (span.last_batch + 0.5, 0)])
        return wide[text] + 6 < right - left

    spans_of_strips = [(axes, span) for axes, spans in zip(strips, rows, strict=True) for span in spans]
    all_fit = all(fits(axes, span, texts[span.label]) for axes, span in spans_of_strips)
    for axes, span in spans_of_strips:
        text = texts[span.label] if all_fit else numbers[span.label]
        if fits(axes, span, text):
            middle = (span.first_batch + span.last_batch) / 2
            axes.text(middle, 0.5, text, ha="center", va="center", fontsize=8, color="#333333")
    if not all_fit:
        handles = [Patch(color=shades[label], label=f"{numbers[label]}  {label}") for label in shades]
        figure.legend(handles=handles, loc="outside lower center", ncols=1 if len(handles) < 3 else 2, fontsize=8)


def _width(figure: Any, text: str) -> float:
    """In pixels."""
    drawn = figure.text(0, 0, text, fontsize=8)
    width = drawn.get_window_extent(figure.canvas.get_renderer()).width
    drawn.remove()
    return width


# ------------------------------------------------------------------------------------------------- numbers


def thin(batches: Ints, values: Floats, max_points: int = MAX_POINTS) -> tuple[NDArray[Any], Floats]:
    """At most `max_points` of them, among these the lowest and the highest of every stretch; NaN stays a gap only
    where a whole stretch is NaN."""
    if len(values) <= max_points:
        return batches, values
    edges = np.linspace(0, len(values), max_points // 2 + 1).astype(int)[:-1]
    stretch = np.repeat(np.arange(len(edges)), np.diff(np.append(edges, len(values))))
    kept = set()
    for fill, order in ((np.inf, 1), (-np.inf, -1)):
        ranked = np.lexsort((order * np.where(np.isnan(values), fill, values), stretch))
        kept.update(ranked[edges].tolist())
    chosen = np.array(sorted(kept))
    return batches[chosen], values[chosen]


def smooth(values: Floats) -> Floats:
    """Mean over some nine neighbours, or a fiftieth of many, as many on either side; NaN are passed over."""
    num = len(values)
    reach = max(4, num // 100)
    at = np.arange(num)
    half = np.minimum(reach, np.minimum(at, num - 1 - at))
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    total, count = sums[at + half + 1] - sums[at - half], counts[at + half + 1] - counts[at - half]
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def plot_curves(panels: dict[str, dict[str, list[tuple[float, float, float]]]], path: Path, *, x_label: str) -> None:
    """Small multiples: title -> name -> (x, y, error of y); written to `path` as PNG."""
    num_columns = min(3, len(panels))
    num_rows = -(-len(panels) // num_columns)
    figure, grid = plt.subplots(
        num_rows, num_columns, figsize=(4 * num_columns, 3 * num_rows), squeeze=False, layout="constrained", dpi=130
    )
    for axes in grid.flat[len(panels) :]:
        axes.axis("off")
    for axes, (title, curves) in zip(grid.flat, panels.items(), strict=False):
        for name, points in curves.items():
            x, y, error = zip(*points, strict=True)
            axes.errorbar(x, y, yerr=error, marker="o", markersize=4, linewidth=1.5, capsize=2, label=name)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(x_label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
    if any(len(curves) > 1 for curves in panels.values()):
        grid.flat[0].legend(frameon=False, fontsize=9)
    figure.savefig(path)
    plt.close(figure)


def plot_differences(
    panels: Mapping[str, Mapping[str, Mapping[str, tuple[float, float, float, bool]]]], path: Path, *, title: str
) -> None:
    """Differences from a first model, with their intervals: panel -> row -> model -> (difference, low, high, whether it
    is more than chance); written to `path` as PNG. Chance's are hollow. Rows go downwards; one that starts with `mean`
    is set apart."""
    models = list(dict.fromkeys(model for rows in panels.values() for points in rows.values() for model in points))
    step = 0.7 / max(1, len(models))
    heights = [max(1, len(rows)) * max(1, 0.55 * len(models)) + 0.6 for rows in panels.values()]
    figure, grid = plt.subplots(
        len(panels),
        1,
        figsize=(8, 1.3 + 0.38 * sum(heights) + 0.3 * len(panels)),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
        dpi=130,
    )
    for axes, (x_label, rows) in zip(grid.flat, panels.items(), strict=True):
        axes.axvline(0, color="#333333", linewidth=1, zorder=1)
        for row, (name, points) in enumerate(rows.items()):
            if name.startswith("mean") and row:
                axes.axhline(row - 0.5, color=REFERENCE, linewidth=0.8)
            for i, model in enumerate(models):
                if model in points:
                    place = row + (i - (len(models) - 1) / 2) * step
                    _plot_interval(axes, points[model], place, CURVES[i % len(CURVES)], is_mean=name.startswith("mean"))
        axes.set_yticks(range(len(rows)), list(rows), fontsize=9)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        farthest = max(
            (abs(end) for points in rows.values() for point in points.values() for end in point[:3]), default=0
        )
        axes.set_xlim(-1.08 * farthest or -1, 1.08 * farthest or 1)
        axes.set_xlabel(x_label, fontsize=9)
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.grid(axis="x", alpha=0.25, linewidth=0.6)
    looks = [(CURVES[i % len(CURVES)], CURVES[i % len(CURVES)], model) for i, model in enumerate(models)]
    looks = looks if len(models) > 1 else []
    looks += [
        ("#555555", "#555555", "a difference (corrected p < 0.05)"),
        ("#555555", "white", "none to be told from chance"),
    ]
    handles = [
        plt.Line2D([], [], color=edge, marker="o", markerfacecolor=face, markersize=6, linewidth=1.6, label=label)
        for edge, face, label in looks
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), frameon=False, fontsize=9)
    grid.flat[0].set_title(title, fontsize=11)
    figure.savefig(path)
    plt.close(figure)


def _plot_interval(axes: Any, point: tuple[float, float, float, bool], y: float, color: str, *, is_mean: bool) -> None:
    difference, low, high, is_detected = point
    axes.plot([low, high], [y, y], color=color, linewidth=2.4 if is_mean else 1.6, solid_capstyle="butt", zorder=2)
    axes.plot(
        [difference],
        [y],
        "D" if is_mean else "o",
        color=color,
        markerfacecolor=color if is_detected else "white",
        markeredgewidth=1.6,
        markersize=7,
        zorder=3,
    )
