"""Figures of runs and evaluations, drawn from numbers into files: PNG, PDF or SVG by their suffix.

    plot_run(path, curve, spans, title=…)          loss and throughput, shaded where the hardware changed
    plot_comparison(path, curves, differences, …)  several losses, and how far each is from the first
    plot_differences(panels, path, title=…)        how far models are from a first one, with their intervals

Curves of more than MAX_POINTS are thinned to the lowest and the highest value of each stretch. `Axis` places batches
along the figure by number, tokens or FLOPs.
"""

import io
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmfoundry_lite.errors import printable
from llmfoundry_lite.files import write_atomically
from llmfoundry_lite.report.canvas import EngFormatter, LogFormatter, Patch, Text, our_settings, plt

TRAIN, VALIDATION, REFERENCE = "#4c72b0", "#c44e52", "#8c8c8c"
CURVES = ("#4c72b0", "#dd8452", "#55a868", "#8172b3", "#937860", "#da8bc3")
SHADES = ("#dfe8f3", "#fbe7d3", "#d5ead2", "#eae3f1", "#f8d9d9", "#f3efd2", "#d3eeee", "#e3e3e3", "#f3d3e8", "#e6dccb")
MAX_POINTS = 4000
"""Points drawn of one curve; a figure is a quarter as many pixels wide."""
MAX_CHANGE_CHARACTERS = 60
MAX_DISTINCT_POINTS = 400
"""Points of one curve that can still be told apart."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Axis:
    """The place of a batch along the figure: its number, or how much had been trained after it."""

    label: str = "batch"
    batches: Ints | None = None
    """Ascending; None places every batch by its number."""
    totals: Floats | None = None
    """Tokens or FLOPs after each of `batches`."""

    def place(self, batches: Any) -> Any:
        """Return the place of each batch. Batches without a total are interpolated, from 0 where the run began.

        Batches after the last one, of dead branches, are placed by the run's mean pace.
        """
        if self.batches is None or self.totals is None:
            return batches
        known = np.isfinite(self.totals)
        at, totals = self.batches[known], self.totals[known]
        return np.interp(batches, [0, *at, 2 * at[-1]], [0.0, *totals, 2 * totals[-1]])

    def draw(self, axes: Any, batches: Ints, values: Floats, **look: Any) -> None:
        batches, values = thin(batches, values)
        axes.plot(self.place(batches), values, **look)

    def draw_with_mean(
        self, axes: Any, batches: Ints, values: Floats, reach: int | None, *, linewidth: float, label: str, **look: Any
    ) -> None:
        """Draw each value; where they are too many to be told apart, draw a running mean over them."""
        if reach == 0 or (reach is None and len(values) <= MAX_DISTINCT_POINTS):
            self.draw(axes, batches, values, linewidth=linewidth, label=label, **look)
            return
        self.draw(axes, batches, values, color=look["color"], linewidth=0.6, alpha=0.35)
        look["marker"] = None
        self.draw(axes, batches, smooth(values, reach), linewidth=linewidth, label=label, **look)


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
    """Batches whose loss was not finite."""
    dead: Sequence[tuple[Ints, Floats]] = ()
    """Batches and losses of branches that a later launch voided."""
    changes: Sequence[tuple[int, str]] = ()
    """The first batch with other settings, and which."""
    axis: Axis = Axis()


@dataclass(frozen=True, slots=True)
class Span:
    """Batches that ran on one kind of hardware; spans with equal labels get the same shade."""

    first_batch: int
    last_batch: int
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Absolute differences of a run's losses from the first run's, at the batches that both have."""

    name: str
    batches: Ints
    absolute: Floats
    digests_part_at: int | None = None


@our_settings()
def plot_run(
    path: Path,
    curve: Curve,
    spans: Sequence[Span] = (),
    *,
    title: str,
    baselines: Mapping[str, float] | None = None,
    reach: int | None = None,
) -> None:
    """Plot loss, with validation, baselines and changes, above throughput. `reach` is `smooth`'s; 0 draws no mean."""
    axis = curve.axis
    figure, (loss, speed) = stack((3, 1), (8, 6), sharex=True)
    for i, (batches, losses) in enumerate(curve.dead):
        label = "dead branches" if len(curve.dead) > 1 else "dead branch"
        axis.draw(loss, batches, losses, color=REFERENCE, linewidth=0.9, label="" if i else label)
    reach = reach_of(len(curve.losses), reach)
    label = f"training (mean of {2 * reach + 1} batches)" if reach else "training"
    axis.draw_with_mean(loss, curve.batches, curve.losses, reach, linewidth=1.8, label=label, color=TRAIN)
    if len(curve.eval_losses):
        label = f"validation, {curve.eval_losses[-1]:.3f} at batch {curve.eval_batches[-1]:,}"
        size = 4 if len(curve.eval_losses) <= 100 else 0
        _draw_validation(loss, curve, VALIDATION, linewidth=1.5, markersize=size, label=label)
    for style, (name, value) in zip(("--", ":", "-."), (baselines or {}).items(), strict=False):
        loss.axhline(value, color=REFERENCE, linestyle=style, linewidth=1.2, label=f"{name} model, {value:.2f}")
    for batch, words in curve.changes:
        cut = words if len(words) <= MAX_CHANGE_CHARACTERS else f"{words[: MAX_CHANGE_CHARACTERS - 1]}…"
        label = f"from batch {batch:,}: {cut}"
        for axes, name in ((loss, label), (speed, None)):
            axes.axvline(axis.place(batch - 0.5), color="#333333", linestyle=":", linewidth=1.2, label=name)
    _finish_loss(loss, [curve])
    axis.draw(speed, curve.batches, curve.tokens_per_second, color=TRAIN, linewidth=1.2)
    speed.set_ylim(bottom=0)
    speed.set_ylabel("tokens/s")
    speed.yaxis.set_major_formatter("{x:,.0f}")
    _finish_axes((loss, speed), [curve])
    _shade(figure, [((loss, speed), axis, spans)])
    loss.set_title(title, fontsize=11)
    write(figure, path)


@our_settings()
def plot_comparison(
    path: Path,
    curves: Sequence[Curve],
    differences: Sequence[Difference],
    spans: Sequence[Sequence[Span]] = (),
    *,
    title: str,
    reach: int | None = None,
) -> None:
    """Plot losses of several runs, and below, on a logarithmic scale, how far each is from the first one.

    `spans`, if any are known, are those of each curve: a strip for each above the losses. Differences of exactly zero
    have no place on the scale; the legend says how many there are. `reach` is that of `smooth`; 0 draws no means.
    """
    num_strips = len(curves) if any(spans) else 0
    figure, (*strips, loss, gap) = stack((*[0.2] * num_strips, 2.6, 1.4), (8, 6 + 0.4 * num_strips), sharex=True)
    for i, curve in enumerate(curves):
        look = {"color": color(i), "linestyle": "-" if i == 0 else "--"}
        width = 2.2 if i == 0 else 1.3
        curve.axis.draw_with_mean(loss, curve.batches, curve.losses, reach, linewidth=width, label=curve.name, **look)
        if len(curve.eval_losses):
            _draw_validation(loss, curve, color(i), "o" if i == 0 else "x", linestyle="", markersize=5)
    if any(len(curve.eval_losses) for curve in curves):
        loss.plot([], [], "o", color=REFERENCE, markersize=5, label="validation (x: other runs)")
    _finish_loss(loss, curves)
    for i, difference in enumerate(differences, start=1):
        _plot_difference(gap, curves[0].axis, difference, color(i), reach)
    gap.set_yscale("log")
    gap.yaxis.set_major_formatter(LogFormatter())  # the scale's own writes formulas, and texts are not parsed as such
    gap.yaxis.set_minor_formatter(LogFormatter())
    if not any((difference.absolute > 0).any() for difference in differences):
        gap.set_ylim(1e-7, 1)
    gap.set_ylabel(f"|difference| from\n{curves[0].name}")
    if differences:
        gap.legend(frameon=False, fontsize=8, loc="best")
    _finish_axes((loss, gap), curves)
    for axes, curve in zip(strips, curves, strict=False):
        axes.spines[:].set_visible(False)
        axes.tick_params(left=False, labelleft=False, bottom=False, labelbottom=False)
        axes.set_ylabel(curve.name, rotation=0, ha="right", va="center", fontsize=8)
    _shade(figure, [([axes], curve.axis, row) for axes, curve, row in zip(strips, curves, spans, strict=False)])
    figure.axes[0].set_title(title, fontsize=11)
    write(figure, path)


def _draw_validation(axes: Any, curve: Curve, color: str, marker: str = "o", **look: Any) -> None:
    """Draw all validation losses, the last one unclipped: it usually stands at the edge of the figure."""
    curve.axis.draw(axes, curve.eval_batches, curve.eval_losses, color=color, marker=marker, **look)
    edge = {"markeredgecolor": "white"} if marker == "o" else {}
    at = curve.axis.place(curve.eval_batches[-1:])
    axes.plot(at, curve.eval_losses[-1:], marker, color=color, markersize=7, clip_on=False, zorder=5, **edge)


def _plot_difference(axes: Any, axis: Axis, difference: Difference, color: str, reach: int | None) -> None:
    known = difference.absolute[np.isfinite(difference.absolute)]
    num_zero = int((known == 0).sum())
    label = difference.name
    if not len(known):
        label += ": no common batch"
    elif num_zero:
        label += f": zero at {num_zero:,} of {len(known):,} batches"
    above = np.where(difference.absolute > 0, difference.absolute, np.nan)
    if np.isfinite(above).any():
        look = {"color": color, "marker": ".", "markersize": 2, "linewidth": 1.3, "label": label}
        axis.draw_with_mean(axes, difference.batches, above, reach, **look)
    else:
        axes.plot([], [], color=color, linewidth=1, label=label)
    if (at := difference.digests_part_at) is not None:
        label = f"{difference.name}: other data from batch {at:,}"
        axes.axvline(axis.place(at), color="#333333", linestyle=":", label=label)


def _finish_loss(axes: Any, curves: Sequence[Curve]) -> None:
    """Mark losses that are not finite at the foot, and name the curves."""
    for curve in curves:
        if curve.not_finite:
            look = {"label": f"not finite: {len(curve.not_finite):,} of {curve.name}", "markersize": 10}
            look |= {"transform": axes.get_xaxis_transform(), "color": VALIDATION, "clip_on": False}
            axes.plot(curve.axis.place(curve.not_finite), np.zeros(len(curve.not_finite)), "|", **look)
    axes.set_ylabel("loss, nats per token")
    axes.legend(frameon=False, fontsize=9, loc="upper right")


def _finish_axes(panels: Sequence[Any], curves: Sequence[Curve]) -> None:
    clean(panels)
    first = min(curve.axis.place(curve.batches[0] - 0.5) for curve in curves)
    # Dead branches may end after the newest batch.
    last = max(
        curve.axis.place(max(int(batches[-1]) for batches in (curve.batches, *(dead for dead, _ in curve.dead))) + 0.5)
        for curve in curves
    )
    panels[-1].set_xlim(first, last)
    panels[-1].set_xlabel(curves[0].axis.label)
    panels[-1].xaxis.set_major_formatter("{x:,.0f}" if curves[0].axis.totals is None else EngFormatter(sep=""))


# ------------------------------------------------------------------------------------------------ hardware


def _shade(figure: Any, rows: Sequence[tuple[Sequence[Any], Axis, Sequence[Span]]]) -> None:
    """Shade the panels of each row by its hardware, and name the shades below the figure."""
    shades: dict[str, str] = {}
    for panels, axis, spans in rows:
        for panel, span in itertools.product(panels, spans):
            shade = shades.setdefault(span.label, SHADES[len(shades) % len(SHADES)])
            ends = axis.place(span.first_batch - 0.5), axis.place(span.last_batch + 0.5)
            panel.axvspan(*ends, color=shade, linewidth=0, zorder=0)
    handles = [Patch(color=shade, label=label) for label, shade in shades.items()]
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=1 if len(handles) < 3 else 2, fontsize=8)


# ------------------------------------------------------------------------------------------------- numbers


def thin(batches: Ints, values: Floats, max_points: int = MAX_POINTS) -> tuple[NDArray[Any], Floats]:
    """Keep at most `max_points`, among these the lowest and the highest of every stretch.

    A gap of NaN stays only where a whole stretch is NaN.
    """
    if len(values) <= max_points:
        return batches, values
    edges = np.linspace(0, len(values), max_points // 2 + 1).astype(int).tolist()
    low, high = (np.where(np.isnan(values), fill, values) for fill in (np.inf, -np.inf))
    stretches = [slice(*ends) for ends in itertools.pairwise(edges)]
    chosen = np.unique([at.start + f(of[at]) for at in stretches for f, of in ((np.argmin, low), (np.argmax, high))])
    return batches[chosen], values[chosen]


def reach_of(num: int, reach: int | None) -> int:
    """Return neighbours on either side that a mean takes in: by default four, or a hundredth of many.

    A tenth of the values is the most, because the last `reach` means are continued as a line.
    """
    return min(max(4, num // 100) if reach is None else reach, max(num // 10, int(num > 2)))


def smooth(values: Floats, reach: int | None = None) -> Floats:
    """Return the mean over `reach` neighbours on either side, over fewer at the beginning; NaN are left out.

    At the end, a mean over ever fewer values would be as noisy as the last value. Instead, the last `reach` means go on
    in a straight line: from the mean of the last 2 reach + 1 values, with the least-squares slope of twice as many. It
    is unbiased where values lie along a line, is clipped to the range of the last 2 reach + 1 values, and ends with the
    last value that is known.
    """
    num = len(values)
    reach = reach_of(num, reach)
    at = np.arange(num)
    half = np.minimum(reach, np.minimum(at, num - 1 - at))
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    total, count = sums[at + half + 1] - sums[at - half], counts[at + half + 1] - counts[at - half]
    means = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    window = 2 * reach + 1
    last, near = (np.flatnonzero(known & (at >= num - size)) for size in (window, 2 * window))
    if 0 < reach < len(last):  # more than half of the last values are known
        slope = np.polyfit(near, values[near], 1)[0]
        line = means[num - 1 - reach] + slope * np.arange(1, reach + 1)
        means[num - reach :] = np.clip(line, values[last].min(), values[last].max())
        means[last[-1] + 1 :] = np.nan
    return means


# ---------------------------------------------------------------------------------------------- evaluations


@our_settings()
def plot_differences(
    panels: Mapping[str, Mapping[str, Mapping[str, tuple[float, float, float, bool]]]], path: Path, *, title: str
) -> None:
    """Plot differences from a first model: panel -> row -> model -> (difference, low, high, whether it is detected).

    Those that may be chance are hollow. Rows go downwards; one that starts with `mean` is set apart.
    """
    models = list(dict.fromkeys(model for rows in panels.values() for points in rows.values() for model in points))
    step = 0.7 / max(1, len(models))
    heights = [max(1, len(rows)) * max(1, 0.55 * len(models)) + 0.6 for rows in panels.values()]
    figure, grid = stack(heights, (8, 1.3 + 0.38 * sum(heights) + 0.3 * len(panels)))
    for axes, (x_label, rows) in zip(grid, panels.items(), strict=True):
        axes.axvline(0, color="#333333", linewidth=1, zorder=1)
        for row, (name, points) in enumerate(rows.items()):
            is_mean = name.startswith("mean")
            if is_mean and row:
                axes.axhline(row - 0.5, color=REFERENCE, linewidth=0.8)
            for i, model in enumerate(models):
                if model in points:
                    difference, low, high, is_detected = points[model]
                    y, look = row + (i - (len(models) - 1) / 2) * step, {"color": color(i), "linewidth": 1.6}
                    axes.plot([low, high], [y, y], solid_capstyle="butt", zorder=2, **look)
                    look |= {"markerfacecolor": color(i) if is_detected else "white", "markersize": 7}
                    axes.plot(difference, y, "D" if is_mean else "o", zorder=3, **look)
        axes.set_yticks(range(len(rows)), list(map(printable, rows)), fontsize=9)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        farthest = max(
            (abs(end) for points in rows.values() for point in points.values() for end in point[:3]), default=0
        )
        axes.set_xlim(-1.08 * farthest or -1, 1.08 * farthest or 1)
        axes.set_xlabel(x_label, fontsize=9)
        axes.tick_params(axis="y", length=0)
        clean([axes], grid="x", hidden=("top", "right", "left"))
    looks = [(color(i), color(i), model) for i, model in enumerate(models) if len(models) > 1]
    looks += [
        ("#555555", "#555555", "a difference (corrected p < 0.05)"),
        ("#555555", "white", "none to be told from chance"),
    ]
    handles = [
        plt.Line2D([], [], color=edge, marker="o", markerfacecolor=face, markersize=6, linewidth=1.6, label=label)
        for edge, face, label in looks
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), frameon=False, fontsize=9)
    grid[0].set_title(title, fontsize=11)
    write(figure, path)


# ---------------------------------------------------------------------------------------------------- parts


def color(number: int) -> str:
    """Return the colour of a curve, counted from 0."""
    return CURVES[number % len(CURVES)]


def stack(heights: Sequence[float], size: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    """Return a figure and its panels, one below the other."""
    figure, grid = plt.subplots(
        len(heights), 1, figsize=size, height_ratios=heights, squeeze=False, layout="constrained", dpi=130, **options
    )
    return figure, grid.flat


def clean(panels: Sequence[Any], *, grid: str = "both", hidden: Sequence[str] = ("top", "right")) -> None:
    """Leave out frames and draw a faint grid."""
    for axes in panels:
        axes.spines[list(hidden)].set_visible(False)
        axes.grid(axis=grid, alpha=0.25, linewidth=0.6)


def escape_texts(figure: Any) -> None:
    """Escape control characters in all texts but labels of ticks, which their formatter makes anew.

    Names are untrusted, and an SVG with a control character is no XML.
    """
    for text in figure.findobj(Text):
        text.set_text(printable(text.get_text(), keep="\n"))


def write(figure: Any, path: Path) -> None:
    """Write and close a figure. Equal figures are equal bytes; text stays text in SVG and PDF."""
    escape_texts(figure)
    undated = {"png": None, "pdf": {"CreationDate": None}, "svg": {"Date": None}}
    form, content = path.suffix.removeprefix("."), io.BytesIO()
    figure.savefig(content, format=form, metadata=undated[form])
    write_atomically(path, content.getbuffer())
    plt.close(figure)
