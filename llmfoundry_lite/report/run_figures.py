"""Figures of runs. Owns how things are drawn; what is drawn comes as plain arrays.

    plot_run(path, curve, spans, title=…)          loss and throughput, shaded where the hardware changed
    plot_comparison(path, curves, differences, …)  several losses, and how far each is from the first
    plot_relay(path, legs, title=…)                which place had a run when, and how far it came

A hundred thousand batches are thinned before they are drawn: of each stretch its lowest and its highest value.
Batches are placed by `Axis`: tokens or FLOPs may stand along it as well.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter
from numpy.typing import NDArray

from llmfoundry_lite.errors import printable
from llmfoundry_lite.report.figure import CURVES, REFERENCE, TRAIN, VALIDATION, escape_texts, plt, write

SHADES = ("#dfe8f3", "#fbe7d3", "#e2efe0", "#eae3f1", "#f8e1e1", "#f3efd2")
MAX_POINTS = 4000
"""Drawn of one curve; a figure is a quarter as many pixels wide."""

CROWD = 400
"""Points of one curve that can still be told apart."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Place = Callable[[Any], Any]
"""Of `Axis`."""


@dataclass(frozen=True, slots=True)
class Axis:
    """Where along the figure a batch stands: by its number, or by how much had been trained after it."""

    label: str = "batch"
    batches: Ints | None = None
    """Ascending; None places every batch by its number."""
    totals: Floats | None = None
    """After each of `batches`: tokens, FLOPs."""

    def place(self, batches: Any) -> Any:
        """Batches without a total stand between their neighbours; 0 is where the run began, and dead branches go on at
        the run's mean pace behind its last batch."""
        if self.batches is None or self.totals is None:
            return batches
        known = np.isfinite(self.totals)
        at, totals = self.batches[known], self.totals[known]
        return np.interp(batches, [0, *at, 2 * at[-1]], [0.0, *totals, 2 * totals[-1]])


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
    dead: Sequence[tuple[Ints, Floats]] = ()
    """Batches and losses of branches that no later state comes from."""
    axis: Axis = Axis()


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
    reach: int | None = None,
) -> None:
    """Loss, with validation and baselines, above throughput; written to `path`.

    `reach` is that of `smooth`; 0 draws no mean.
    """
    strips = 1 if spans else 0
    place = curve.axis.place
    figure, (*strip, loss, speed) = _stack(strips, 0.32, (3, 1))
    for i, (batches, losses) in enumerate(curve.dead):
        label = "dead branches" if len(curve.dead) > 1 else "dead branch"
        _draw(loss, place, batches, losses, color=REFERENCE, linewidth=0.9, label="" if i else label)
    if reach == 0:
        _draw(loss, place, curve.batches, curve.losses, color=TRAIN, linewidth=1.2, label="training")
    else:
        mean, label = (
            smooth(curve.losses, reach),
            f"training (mean of {2 * reach_of(len(curve.losses), reach) + 1} batches)",
        )
        _draw(loss, place, curve.batches, curve.losses, color=TRAIN, linewidth=1, alpha=0.35)
        _draw(loss, place, curve.batches, mean, color=TRAIN, linewidth=1.8, label=label)
    if len(curve.eval_losses):
        dots = "o" if len(curve.eval_losses) <= 100 else None
        label = f"validation, {curve.eval_losses[-1]:.3f} at batch {curve.eval_batches[-1]:,}"
        look = {"color": VALIDATION, "linewidth": 1.5, "marker": dots, "markersize": 4, "label": label}
        _draw(loss, place, curve.eval_batches, curve.eval_losses, **look)
        _mark_last_validation(loss, curve, VALIDATION)
    for style, (name, value) in zip(("--", ":", "-."), (baselines or {}).items(), strict=False):
        loss.axhline(value, color=REFERENCE, linestyle=style, linewidth=1.2, label=f"{name} model, {value:.2f}")
    _mark_not_finite(loss, curve)
    loss.set_ylabel("loss, nats per token")
    loss.legend(frameon=False, fontsize=9, loc="upper right")
    _draw(speed, place, curve.batches, curve.tokens_per_second, color=TRAIN, linewidth=1.2)
    speed.set_ylim(bottom=0)
    speed.set_ylabel("tokens/s")
    speed.yaxis.set_major_formatter("{x:,.0f}")
    _finish_axes((loss, speed), [curve])
    if spans:
        _shade((loss, speed), spans, curve.axis)
        _label_strips(figure, strip, [spans], [""], [curve.axis])
    figure.axes[0].set_title(title, fontsize=11)
    write(figure, path)


def plot_comparison(
    path: Path,
    curves: Sequence[Curve],
    differences: Sequence[Difference],
    spans: Sequence[Sequence[Span]] = (),
    *,
    title: str,
    reach: int | None = None,
) -> None:
    """The losses of several runs, and below, on a logarithmic scale, how far each is from the first one.

    `spans`, where any are known, are those of each curve. Differences of exactly zero have no place on the scale; the
    legend says how many there are. `reach` is that of `smooth`; 0 draws no means.
    """
    strips = len(curves) if any(spans) else 0
    figure, (*strip, loss, gap) = _stack(strips, 0.2, (2.6, 1.4))
    for i, curve in enumerate(curves):
        look = {"color": CURVES[i % len(CURVES)], "linestyle": "-" if i == 0 else "--"}
        width = 2.2 if i == 0 else 1.3
        _plot_with_mean(loss, curve.axis.place, curve.batches, curve.losses, width, curve.name, reach, **look)
        if len(curve.eval_losses):
            marks = {"color": look["color"], "linestyle": "", "marker": "o" if i == 0 else "x", "markersize": 5}
            _draw(loss, curve.axis.place, curve.eval_batches, curve.eval_losses, **marks)
            _mark_last_validation(loss, curve, look["color"], marker=marks["marker"])
        _mark_not_finite(loss, curve)
    if any(len(curve.eval_losses) for curve in curves):
        loss.plot([], [], "o", color=REFERENCE, markersize=5, label="validation (x: other runs)")
    loss.set_ylabel("loss, nats per token")
    loss.legend(frameon=False, fontsize=9, loc="upper right")
    for i, difference in enumerate(differences, start=1):
        _plot_difference(gap, curves[0].axis.place, difference, CURVES[i % len(CURVES)], reach)
    gap.set_yscale("log")
    if not gap.lines:
        gap.set_ylim(1e-7, 1)
    gap.set_ylabel(f"|difference| from\n{curves[0].name}")
    if differences:
        gap.legend(frameon=False, fontsize=8, loc="best")
    _finish_axes((loss, gap), curves)
    if strips:
        axes = [curve.axis for curve in curves]
        _label_strips(figure, strip, spans, [curve.name for curve in curves], axes)
    figure.axes[0].set_title(title, fontsize=11)
    write(figure, path)


def plot_relay(path: Path, legs: Sequence[Mapping[str, Any]], *, title: str) -> None:
    """Plot batches over hours since the first leg began, and below which place had the run.

    A leg: place, began_hours, hours, first_batch, last_batch.
    """
    places = list(dict.fromkeys(leg["place"] for leg in legs))
    colors = {place: CURVES[i % len(CURVES)] for i, place in enumerate(places)}
    unit, per_hour = ("hours", 1) if max(leg["began_hours"] + leg["hours"] for leg in legs) >= 1 else ("seconds", 3600)
    figure, (progress, rows) = plt.subplots(
        *(2, 1),
        sharex=True,
        figsize=(8, 3.4 + 0.4 * len(places)),
        height_ratios=(3, 0.4 * len(places) + 0.4),
        layout="constrained",
        dpi=130,
    )
    for leg in legs:
        start, end = leg["began_hours"] * per_hour, (leg["began_hours"] + leg["hours"]) * per_hour
        look = {"color": colors[leg["place"]], "linewidth": 2.2, "solid_capstyle": "butt"}
        progress.plot([start, end], [leg["first_batch"] - 1, leg["last_batch"]], **look)
        rows.barh(places.index(leg["place"]), end - start, left=start, color=colors[leg["place"]], height=0.7)
    progress.set_ylabel("batch")
    progress.grid(alpha=0.25, linewidth=0.6)
    rows.set_yticks(range(len(places)), list(map(printable, places)))
    rows.invert_yaxis()
    rows.set_xlabel(f"{unit} since the first launch")
    for axes in (progress, rows):
        axes.spines[["top", "right"]].set_visible(False)
    progress.set_title(title, fontsize=11)
    write(figure, path)


def _draw(axes: Any, place: Place, batches: Ints, values: Floats, **look: Any) -> None:
    batches, values = thin(batches, values)
    axes.plot(place(batches), values, **look)


def _mark_last_validation(axes: Any, curve: Curve, color: str, marker: str = "o") -> None:
    """The last one stands at the edge of the figure as a rule, where half of it would be cut off."""
    look = {"markeredgecolor": "white", "zorder": 5} if marker == "o" else {"zorder": 5}
    at = curve.axis.place(curve.eval_batches[-1:])
    axes.plot(at, curve.eval_losses[-1:], marker, color=color, markersize=7, clip_on=False, **look)


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


def _plot_difference(axes: Any, place: Place, difference: Difference, color: str, reach: int | None) -> None:
    known = difference.absolute[np.isfinite(difference.absolute)]
    num_zero = int((known == 0).sum())
    label = difference.name
    if not len(known):
        label += ": no common batch"
    elif num_zero:
        label += f": zero at {num_zero:,} of {len(known):,} batches"
    above = np.where(difference.absolute > 0, difference.absolute, np.nan)
    if np.isfinite(above).any():
        look = {"color": color, "marker": ".", "markersize": 2}
        _plot_with_mean(axes, place, difference.batches, above, 1.3, label, reach, **look)
    else:
        axes.plot([], [], color=color, linewidth=1, label=label)
    if difference.digests_part_at is not None:
        at = difference.digests_part_at
        label = f"{difference.name}: other data from batch {at:,}"
        axes.axvline(place(at), color="#333333", linestyle=":", label=label)


def _plot_with_mean(
    axes: Any,
    place: Place,
    batches: Ints,
    values: Floats,
    linewidth: float,
    label: str,
    reach: int | None,
    **look: Any,
) -> None:
    """Each value, and where they are too many to be told apart, the mean of neighbours over them."""
    if reach == 0 or (reach is None and len(values) <= CROWD):
        _draw(axes, place, batches, values, linewidth=linewidth, label=label, **look)
        return
    _draw(axes, place, batches, values, color=look["color"], linewidth=0.6, alpha=0.35)
    mean = smooth(values, reach)
    _draw(axes, place, batches, mean, linewidth=linewidth, label=label, **look | {"marker": None})


def _mark_not_finite(axes: Any, curve: Curve) -> None:
    if curve.not_finite:
        places, heights = curve.axis.place(curve.not_finite), np.zeros(len(curve.not_finite))
        label, at_the_foot = f"not finite: {len(curve.not_finite):,} of {curve.name}", axes.get_xaxis_transform()
        (marks,) = axes.plot(places, heights, "|", color=VALIDATION, label=label, transform=at_the_foot)
        marks.set(markersize=10, clip_on=False)


def _finish_axes(panels: Sequence[Any], curves: Sequence[Curve]) -> None:
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
    first = min(curve.axis.place(curve.batches[0] - 0.5) for curve in curves)
    last = max(curve.axis.place(_last_batch(curve) + 0.5) for curve in curves)
    panels[-1].set_xlim(first, last)
    panels[-1].set_xlabel(curves[0].axis.label)
    if curves[0].axis.totals is None:
        panels[-1].xaxis.set_major_formatter("{x:,.0f}")
    else:
        panels[-1].xaxis.set_major_formatter(EngFormatter(sep=""))


def _last_batch(curve: Curve) -> int:
    """Dead branches included, which may end after the newest batch."""
    return max(int(curve.batches[-1]), *(int(batches[-1]) for batches, _ in curve.dead), 0)


# ------------------------------------------------------------------------------------------------ hardware


def _shade(panels: Sequence[Any], spans: Sequence[Span], axis: Axis) -> None:
    shades = _shades([spans])
    for axes in panels:
        for span in spans:
            axes.axvspan(*_ends(span, axis), color=shades[span.label], linewidth=0, zorder=0)


def _ends(span: Span, axis: Axis) -> tuple[float, float]:
    return axis.place(span.first_batch - 0.5), axis.place(span.last_batch + 0.5)


def _shades(spans: Sequence[Sequence[Span]]) -> dict[str, str]:
    labels = dict.fromkeys(span.label for row in spans for span in row)
    return {label: SHADES[i % len(SHADES)] for i, label in enumerate(labels)}


def _label_strips(
    figure: Any,
    strips: Sequence[Any],
    rows: Sequence[Sequence[Span]],
    names: Sequence[str],
    scales: Sequence[Axis],
) -> None:
    """A bar for each run, with what each span ran on: written into it if all labels fit, else numbers and a legend."""
    shades = _shades(rows)
    numbers = {label: str(i) for i, label in enumerate(shades, start=1)}
    for axes, spans, name, scale in zip(strips, rows, names, scales, strict=True):
        for span in spans:
            axes.axvspan(*_ends(span, scale), color=shades[span.label], linewidth=0)
        for side in axes.spines.values():
            side.set_visible(False)
        axes.tick_params(left=False, labelleft=False, bottom=False, labelbottom=False)
        axes.set_ylim(0, 1)
        if name:
            axes.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
    escape_texts(figure)
    figure.draw_without_rendering()  # which gives every panel its place
    is_tall = len(rows) == 1
    texts = {label: label.replace(" · ", "\n", 1) if is_tall else label for label in shades}
    wide = {text: _width(figure, text) for text in (*texts.values(), *numbers.values())}

    def fits(axes: Any, ends: tuple[float, float], text: str) -> bool:
        (left, _), (right, _) = axes.transData.transform([(end, 0) for end in ends])
        return wide[text] + 6 < right - left

    bars = [
        (axes, _ends(span, scale), span.label)
        for axes, spans, scale in zip(strips, rows, scales, strict=True)
        for span in spans
    ]
    all_fit = all(fits(axes, ends, texts[label]) for axes, ends, label in bars)
    for axes, ends, label in bars:
        text = texts[label] if all_fit else numbers[label]
        if fits(axes, ends, text):
            middle = sum(ends) / 2
            axes.text(middle, 0.5, text, ha="center", va="center", fontsize=8, color="#333333")
    if not all_fit:
        handles = [Patch(color=shades[label], label=f"{numbers[label]}  {label}") for label in shades]
        figure.legend(handles=handles, loc="outside lower center", ncols=1 if len(handles) < 3 else 2, fontsize=8)


def _width(figure: Any, text: str) -> float:
    """In pixels."""
    drawn = figure.text(0, 0, printable(text, keep="\n"), fontsize=8)
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


def reach_of(num: int, reach: int | None) -> int:
    """How many neighbours on either side a mean takes in: four, or a hundredth of many, where nobody says."""
    return max(4, num // 100) if reach is None else reach


def smooth(values: Floats, reach: int | None = None) -> Floats:
    """Mean over `reach` neighbours on either side, fewer at the ends; NaN are passed over."""
    num = len(values)
    reach = reach_of(num, reach)
    at = np.arange(num)
    half = np.minimum(reach, np.minimum(at, num - 1 - at))
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    total, count = sums[at + half + 1] - sums[at - half], counts[at + half + 1] - counts[at - half]
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
