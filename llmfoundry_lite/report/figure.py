"""Figures of runs, drawn from numbers into files: PNG, PDF or SVG by their suffix.

    plot_run(path, curve, spans, title=…)          loss and throughput, shaded where the hardware changed
    plot_comparison(path, curves, differences, …)  several losses, and how far each is from the first

Curves of more than MAX_POINTS are thinned to the lowest and the highest value of each stretch. `Axis` places batches
along the figure by number, tokens or FLOPs.

`Curve`, `Span` and `Difference` are the data of a figure; `report.py` builds them. The functions `plot_…` are complete
figures, and the others draw or finish a part of one. `canvas.py` creates the panels and saves the figure.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmfoundry_lite.report.canvas import (
    MARK_COLOR,
    REFERENCE_COLOR,
    TRAIN_COLOR,
    VALIDATION_COLOR,
    EngFormatter,
    Patch,
    PlainLogFormatter,
    create_stacked_panels,
    curve_color,
    fixed_settings,
    save_figure,
    style_panels,
)

SHADES = ("#dfe8f3", "#fbe7d3", "#d5ead2", "#eae3f1", "#f8d9d9", "#f3efd2", "#d3eeee", "#e3e3e3", "#f3d3e8", "#e6dccb")
MAX_POINTS = 4000
"""Most points that are drawn of one curve; a figure is about 1,000 pixels wide."""
MAX_CHANGE_CHARACTERS = 60
MAX_DISTINCT_POINTS = 400
"""Most points of one curve that can be told apart. A longer curve gets a running mean."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Axis:
    """The horizontal axis: batches stand at their number, or at the tokens or FLOPs that were trained after them."""

    label: str = "batch"
    batches: Ints | None = None
    """Ascending; None places every batch by its number."""
    totals: Floats | None = None
    """Tokens or FLOPs after each of `batches`."""

    def positions_of(self, batches: Any) -> Any:
        """Return the x coordinate of a batch number, or of an array of them.

        Batches without a total are interpolated, from 0 where the run began. A batch after the last one, as a dead
        branch may have, is placed as if it trained as much as the run's mean batch. With totals of 100 and 300 tokens
        after the batches 1 and 3, batch 2 is at 200, batch 2.5 at 250, and batch 4 at 400.
        """
        if self.batches is None or self.totals is None:
            return batches
        is_known = np.isfinite(self.totals)
        known_batches = self.batches[is_known]
        known_totals = self.totals[is_known]
        # A last point at twice the batches and twice the total extends the line from the origin.
        return np.interp(
            batches,
            [0, *known_batches, 2 * known_batches[-1]],
            [0.0, *known_totals, 2 * known_totals[-1]],
        )

    def draw(self, panel: Any, batches: Ints, values: Floats, **line_style: Any) -> None:
        """Draw a curve into a matplotlib panel, thinned to MAX_POINTS. `line_style` goes to matplotlib's `plot`."""
        batches, values = thin_curve(batches, values)
        panel.plot(self.positions_of(batches), values, **line_style)

    def draw_with_mean(
        self,
        panel: Any,
        batches: Ints,
        values: Floats,
        half_width: int | None,
        *,
        linewidth: float,
        label: str,
        **line_style: Any,
    ) -> None:
        """Draw a curve, and above it a running mean if there are too many points to tell apart.

        half_width: number of values that the mean covers on either side. 0 draws no mean. None draws one if the curve
            has more than MAX_DISTINCT_POINTS, and chooses its width.
        linewidth, label, line_style: style of the mean, above a faint curve, or of the curve if there is no mean.
            `line_style` must have a color.
        """
        is_short = len(values) <= MAX_DISTINCT_POINTS
        if half_width == 0 or (half_width is None and is_short):
            self.draw(panel, batches, values, linewidth=linewidth, label=label, **line_style)
            return

        self.draw(panel, batches, values, color=line_style["color"], linewidth=0.6, alpha=0.35)
        mean_style = {**line_style, "marker": None}
        self.draw(panel, batches, running_mean(values, half_width), linewidth=linewidth, label=label, **mean_style)


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
    dead_branches: Sequence[tuple[Ints, Floats]] = ()
    """Batches and losses that do not count, because a later launch trained these batches again."""
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
    first_different_data_batch: int | None = None
    """The first batch that the two runs trained on other data."""


@fixed_settings()
def plot_run(
    path: Path,
    curve: Curve,
    spans: Sequence[Span] = (),
    *,
    title: str,
    baselines: Mapping[str, float] | None = None,
    half_width: int | None = None,
) -> None:
    """Write a figure of one run: losses in an upper panel, tokens per second in a lower one.

    The upper panel also has validation losses, dead branches, changes of settings, and a horizontal line for each of
    `baselines`, which maps a model's name to its loss in nats per token. The background is shaded by `spans`.
    `half_width` is the number of batches that the running mean covers on either side: 0 draws no mean, None chooses.
    """
    axis = curve.axis
    figure, (loss_panel, speed_panel) = create_stacked_panels((3, 1), (8, 6), sharex=True)

    # Dead branches come first, so that they lie below the other curves.
    for i, (batches, losses) in enumerate(curve.dead_branches):
        name = "dead branches" if len(curve.dead_branches) > 1 else "dead branch"
        label = name if i == 0 else ""  # one line in the legend for all
        axis.draw(loss_panel, batches, losses, color=REFERENCE_COLOR, linewidth=0.9, label=label)

    # Training loss.
    half_width = choose_half_width(len(curve.losses), half_width)
    label = f"training (mean of {2 * half_width + 1} batches)" if half_width else "training"
    axis.draw_with_mean(
        loss_panel, curve.batches, curve.losses, half_width, linewidth=1.8, label=label, color=TRAIN_COLOR
    )

    # Validation loss, baselines, and changes of settings.
    if len(curve.eval_losses):
        label = f"validation, {curve.eval_losses[-1]:.3f} at batch {curve.eval_batches[-1]:,}"
        marker_size = 4 if len(curve.eval_losses) <= 100 else 0  # more markers would cover the line
        _draw_validation(loss_panel, curve, VALIDATION_COLOR, linewidth=1.5, markersize=marker_size, label=label)
    for line_style, (name, loss) in zip(("--", ":", "-."), (baselines or {}).items(), strict=False):
        label = f"{name} model, {loss:.2f}"
        loss_panel.axhline(loss, color=REFERENCE_COLOR, linestyle=line_style, linewidth=1.2, label=label)
    _draw_changes(loss_panel, speed_panel, curve)
    _finish_loss_panel(loss_panel, [curve])

    # Speed.
    axis.draw(speed_panel, curve.batches, curve.tokens_per_second, color=TRAIN_COLOR, linewidth=1.2)
    speed_panel.set_ylim(bottom=0)
    speed_panel.set_ylabel("tokens/s")
    speed_panel.yaxis.set_major_formatter("{x:,.0f}")

    # The horizontal axis, and the hardware in the background of both panels.
    _finish_batch_axis((loss_panel, speed_panel), [curve])
    shades: dict[str, str] = {}
    for panel in (loss_panel, speed_panel):
        shades = _shade(panel, axis, spans, shades)
    _draw_shade_legend(figure, shades)
    loss_panel.set_title(title, fontsize=11)
    save_figure(figure, path)


@fixed_settings()
def plot_comparison(
    path: Path,
    curves: Sequence[Curve],
    differences: Sequence[Difference],
    spans: Sequence[Sequence[Span]] = (),
    *,
    title: str,
    half_width: int | None = None,
) -> None:
    """Write a figure of several runs: their losses, and on a logarithmic scale below, how far each is from the first.

    `differences` are those of every curve but the first. One that is exactly zero cannot be drawn on a logarithmic
    scale; the legend counts them. `spans` has a sequence for each curve: above the losses, each run gets a strip that
    is shaded by its hardware, unless no spans are known. `half_width` is the number of batches that a running mean
    covers on either side: 0 draws no mean, None chooses.
    """
    # From top to bottom: a strip for each run's hardware, the losses, and the differences.
    num_strips = len(curves) if any(spans) else 0
    heights = (*[0.2] * num_strips, 2.6, 1.4)
    figure, panels = create_stacked_panels(heights, (8, 6 + 0.4 * num_strips), sharex=True)
    *strips, loss_panel, difference_panel = panels

    # Losses. The first run has a wide solid line, on which the dashed lines of the others can be seen.
    for i, curve in enumerate(curves):
        is_first = i == 0
        curve.axis.draw_with_mean(
            loss_panel,
            curve.batches,
            curve.losses,
            half_width,
            linewidth=2.2 if is_first else 1.3,
            label=curve.name,
            color=curve_color(i),
            linestyle="-" if is_first else "--",
        )
        if len(curve.eval_losses):
            marker = "o" if is_first else "x"
            _draw_validation(loss_panel, curve, curve_color(i), marker, linestyle="", markersize=5)
    if any(len(curve.eval_losses) for curve in curves):
        label = "validation (x: other runs)"
        loss_panel.plot([], [], "o", color=REFERENCE_COLOR, markersize=5, label=label)  # for the legend alone
    _finish_loss_panel(loss_panel, curves)

    # Differences, each in the colour of its run.
    for i, difference in enumerate(differences, start=1):
        _draw_difference(difference_panel, curves[0].axis, difference, curve_color(i), half_width)
    _finish_difference_panel(difference_panel, curves[0].name, differences)

    # The horizontal axis, and the strips, which have the name of the run instead of an axis.
    _finish_batch_axis((loss_panel, difference_panel), curves)
    shades: dict[str, str] = {}
    for strip, curve, curve_spans in zip(strips, curves, spans, strict=False):
        strip.spines[:].set_visible(False)
        strip.tick_params(left=False, labelleft=False, bottom=False, labelbottom=False)
        strip.set_ylabel(curve.name, rotation=0, ha="right", va="center", fontsize=8)
        shades = _shade(strip, curve.axis, curve_spans, shades)
    _draw_shade_legend(figure, shades)
    figure.axes[0].set_title(title, fontsize=11)
    save_figure(figure, path)


def _draw_validation(panel: Any, curve: Curve, color: str, marker: str = "o", **line_style: Any) -> None:
    """Draw the validation losses of a run, of which there must be at least one.

    The last one gets a larger marker, which is not clipped, because it usually lies on the panel's right edge.
    `line_style` goes to matplotlib's `plot` for the other ones.
    """
    curve.axis.draw(panel, curve.eval_batches, curve.eval_losses, color=color, marker=marker, **line_style)
    edge_style = {"markeredgecolor": "white"} if marker == "o" else {}
    last_position = curve.axis.positions_of(curve.eval_batches[-1:])
    panel.plot(
        last_position, curve.eval_losses[-1:], marker, color=color, markersize=7, clip_on=False, zorder=5, **edge_style
    )


def _draw_changes(loss_panel: Any, speed_panel: Any, curve: Curve) -> None:
    """Mark each batch from which on the run had other settings by a vertical line in both panels.

    The legend of `loss_panel` describes the change, shortened to MAX_CHANGE_CHARACTERS. The line is half a batch to the
    left, between the last batch with the earlier settings and the first with the new ones.
    """
    for batch, description in curve.changes:
        if len(description) > MAX_CHANGE_CHARACTERS:
            description = f"{description[: MAX_CHANGE_CHARACTERS - 1]}…"
        position = curve.axis.positions_of(batch - 0.5)
        line_style: dict[str, Any] = {"color": MARK_COLOR, "linestyle": ":", "linewidth": 1.2}
        loss_panel.axvline(position, label=f"from batch {batch:,}: {description}", **line_style)
        speed_panel.axvline(position, **line_style)


def _draw_difference(panel: Any, axis: Axis, difference: Difference, color: str, half_width: int | None) -> None:
    """Draw how far a run's losses are from the first run's, on a logarithmic scale, without those that are zero.

    The legend says how many are zero, or that the runs have no batch in common. A vertical line marks the first batch
    that the two trained on other data. `half_width` is the number of batches that a running mean covers on either side:
    0 draws no mean, None chooses.
    """
    # The legend's text.
    is_finite = np.isfinite(difference.absolute)
    num_zero = int((difference.absolute[is_finite] == 0).sum())
    label = difference.name
    if not is_finite.any():
        label += ": no common batch"
    elif num_zero:
        label += f": zero at {num_zero:,} of {is_finite.sum():,} batches"

    # The curve, with gaps where the difference is zero.
    positive = np.where(difference.absolute > 0, difference.absolute, np.nan)
    if np.isfinite(positive).any():
        axis.draw_with_mean(
            panel,
            difference.batches,
            positive,
            half_width,
            linewidth=1.3,
            label=label,
            color=color,
            marker=".",
            markersize=2,
        )
    else:
        panel.plot([], [], color=color, linewidth=1, label=label)  # for the legend alone

    batch = difference.first_different_data_batch
    if batch is not None:
        label = f"{difference.name}: other data from batch {batch:,}"
        panel.axvline(axis.positions_of(batch), color=MARK_COLOR, linestyle=":", label=label)


def _finish_loss_panel(panel: Any, curves: Sequence[Curve]) -> None:
    """Mark losses that are not finite at the panel's lower edge, label the vertical axis, and add the legend.

    Must be called after everything else is drawn, because the legend shows what has been drawn before.
    """
    for curve in curves:
        if curve.not_finite:
            panel.plot(
                curve.axis.positions_of(curve.not_finite),
                np.zeros(len(curve.not_finite)),
                "|",
                label=f"not finite: {len(curve.not_finite):,} of {curve.name}",
                markersize=10,
                transform=panel.get_xaxis_transform(),  # y is a fraction of the panel's height
                color=VALIDATION_COLOR,
                clip_on=False,
            )
    panel.set_ylabel("loss, nats per token")
    panel.legend(frameon=False, fontsize=9, loc="upper right")


def _finish_difference_panel(panel: Any, first_name: str, differences: Sequence[Difference]) -> None:
    """Give the panel of differences its logarithmic scale, its label with the first run's name, and its legend.

    Must be called after the differences are drawn, because the legend shows what has been drawn before.
    """
    panel.set_yscale("log")
    # The scale's own formatter writes formulas such as $10^{-5}$, which would be shown as text, unparsed.
    panel.yaxis.set_major_formatter(PlainLogFormatter())
    panel.yaxis.set_minor_formatter(PlainLogFormatter())
    if not any((difference.absolute > 0).any() for difference in differences):
        panel.set_ylim(1e-7, 1)  # without any value, matplotlib has no limits to choose
    panel.set_ylabel(f"|difference| from\n{first_name}")
    if differences:
        panel.legend(frameon=False, fontsize=8, loc="best")


def _finish_batch_axis(panels: Sequence[Any], curves: Sequence[Curve]) -> None:
    """Remove the panels' frames, and set limits, label and number format of the axis along which batches lie.

    The limits span all batches of all curves, dead branches included: one may end after the newest batch that counts.
    There is half a batch of room at both ends. `panels` share their x axis, and the last one is the lowest, which shows
    it.
    """
    style_panels(panels)
    starts = []
    ends = []
    for curve in curves:
        last_batches = [curve.batches[-1], *(batches[-1] for batches, _ in curve.dead_branches)]
        starts.append(curve.axis.positions_of(curve.batches[0] - 0.5))
        ends.append(curve.axis.positions_of(max(last_batches) + 0.5))

    lowest_panel = panels[-1]
    axis = curves[0].axis
    lowest_panel.set_xlim(min(starts), max(ends))
    lowest_panel.set_xlabel(axis.label)
    lowest_panel.xaxis.set_major_formatter("{x:,.0f}" if axis.totals is None else EngFormatter(sep=""))


# ------------------------------------------------------------------------------------------------ hardware


def _shade(panel: Any, axis: Axis, spans: Sequence[Span], shades: Mapping[str, str]) -> dict[str, str]:
    """Shade a panel's background by the hardware that each span of batches ran on.

    `shades` maps the labels that other panels have shaded to their colours. The same label gets the same colour here.
    Returns a new dictionary that also has the labels of this panel.
    """
    shades = dict(shades)
    for span in spans:
        next_shade = SHADES[len(shades) % len(SHADES)]
        shade = shades.setdefault(span.label, next_shade)
        start = axis.positions_of(span.first_batch - 0.5)
        end = axis.positions_of(span.last_batch + 0.5)
        panel.axvspan(start, end, color=shade, linewidth=0, zorder=0)
    return shades


def _draw_shade_legend(figure: Any, shades: Mapping[str, str]) -> None:
    """Name the shades of the hardware below the figure. `shades` maps a label to its shade."""
    handles = [Patch(color=shade, label=label) for label, shade in shades.items()]
    if handles:
        num_columns = 1 if len(handles) < 3 else 2
        figure.legend(handles=handles, loc="outside lower center", ncols=num_columns, fontsize=8)


# ------------------------------------------------------------------------------------------------- numbers


def thin_curve(batches: Ints, values: Floats, max_points: int = MAX_POINTS) -> tuple[NDArray[Any], Floats]:
    """Reduce a curve to at most `max_points`, so that it looks the same and is drawn quickly.

    The curve is cut into max_points / 2 stretches of equal length. Of each, the lowest and the highest value stay, so
    no peak is lost. A gap of NaN stays only where a whole stretch is NaN. With `max_points` 4, the values 3, 1, 2, 9,
    8, 7 have the stretches 3, 1, 2 and 9, 8, 7, and become 3, 1, 9, 7.

    Returns the batches and the values that stay, in their order.
    """
    num_values = len(values)
    if num_values <= max_points:
        return batches, values

    edges = np.linspace(0, num_values, max_points // 2 + 1).astype(int).tolist()
    # NaN is neither the lowest nor the highest value.
    values_for_min = np.where(np.isnan(values), np.inf, values)
    values_for_max = np.where(np.isnan(values), -np.inf, values)
    chosen = []
    for start, end in itertools.pairwise(edges):
        chosen.append(start + np.argmin(values_for_min[start:end]))
        chosen.append(start + np.argmax(values_for_max[start:end]))
    indices = np.unique(chosen)  # ascending; the lowest of a stretch may be its highest, too
    return batches[indices], values[indices]


def choose_half_width(num_values: int, half_width: int | None) -> int:
    """Return how many neighbours on either side a running mean of `num_values` values covers.

    half_width: the number that the user asks for. None chooses 4, or a hundredth of the values if that is more.

    At most a tenth of the values is returned, because `running_mean` extrapolates the last `half_width` means as a
    straight line. 1,000 values have 10 by default, and at most 100; up to 2 values have 0.
    """
    if half_width is None:
        half_width = max(4, num_values // 100)
    largest = max(num_values // 10, 1 if num_values > 2 else 0)
    return min(half_width, largest)


def running_mean(values: Floats, half_width: int | None = None) -> Floats:
    """Return, for each value, the mean over it and `half_width` neighbours on either side. NaN are left out.

    At the beginning, the mean is over fewer neighbours, as many as there are on the left. With a `half_width` of 2, a
    curve that begins with 6, 4, 5, 1, 4 has the means 6, (6 + 4 + 5) / 3 and (6 + 4 + 5 + 1 + 4) / 5 at its first
    three values.

    At the end, fewer neighbours would make the mean as noisy as the last value. Instead, the last `half_width` means
    lie on a straight line: it starts from the mean of the last 2 half_width + 1 values, has the least-squares slope of
    the last 4 half_width + 2, and is clipped to the range of the former. It ends at the last known value, with NaN
    after it. This is unbiased where the values themselves lie along a line. There is no such line if fewer than half of
    the last values are known.

    `half_width` is limited, and chosen if it is None, by `choose_half_width`.
    """
    # Each value has the same number of neighbours on both sides.
    num_values = len(values)
    half_width = choose_half_width(num_values, half_width)
    indices = np.arange(num_values)
    num_neighbours = np.minimum(half_width, np.minimum(indices, num_values - 1 - indices))

    # Compute the means. Differences of cumulative sums give each window's sum at once.
    is_known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(is_known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(is_known)])
    ends = indices + num_neighbours + 1
    starts = indices - num_neighbours
    window_sums = sums[ends] - sums[starts]
    window_counts = counts[ends] - counts[starts]
    means = np.where(window_counts > 0, window_sums / np.maximum(window_counts, 1), np.nan)

    # Replace the last means by the straight line. These are indices of known values: in the last complete window, and
    # in twice its length, to which the slope is fitted.
    window_length = 2 * half_width + 1
    in_last_window = np.flatnonzero(is_known & (indices >= num_values - window_length))
    fitted = np.flatnonzero(is_known & (indices >= num_values - 2 * window_length))
    if half_width > 0 and len(in_last_window) > half_width:
        slope = np.polyfit(fitted, values[fitted], 1)[0]
        line = means[num_values - 1 - half_width] + slope * np.arange(1, half_width + 1)
        last_values = values[in_last_window]
        means[num_values - half_width :] = np.clip(line, last_values.min(), last_values.max())
        means[in_last_window[-1] + 1 :] = np.nan
    return means
