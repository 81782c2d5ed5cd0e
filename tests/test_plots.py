"""Figures have no numbers to compare; what is drawn is looked at through matplotlib's own objects."""

import matplotlib.pyplot as plt
import numpy as np
import pytest

from llmfoundry_lite import plots
from llmfoundry_lite.plots import Curve, Difference, Span, smooth, thin


@pytest.fixture
def drawn(monkeypatch):
    """The figures, kept open."""
    figures = []
    monkeypatch.setattr(plt, "close", figures.append)
    yield figures
    monkeypatch.undo()
    plt.close("all")


def curve(num=100, name="run", **more):
    batches = np.arange(1, num + 1)
    return Curve(name=name, batches=batches, losses=5 / batches, tokens_per_second=np.full(num, 900.0), **more)


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_wide_segments_bear_their_labels_where_none_overlap(tmp_path, drawn):
    spans = [Span(1, 50, "2 x cpu · FULL_SHARD · fp32"), Span(51, 100, "1 x cpu · NO_SHARD · fp32")]
    plots.plot_run(tmp_path / "loss.png", curve(), spans, title="run")
    strip, loss, speed = drawn[0].axes
    assert texts(strip) == ["2 x cpu\nFULL_SHARD · fp32", "1 x cpu\nNO_SHARD · fp32"]
    boxes = [text.get_window_extent() for text in strip.texts]
    assert boxes[0].x1 < boxes[1].x0
    assert len(loss.patches) == len(speed.patches) == 2
    assert not drawn[0].legends


def test_narrow_segments_get_numbers_and_a_legend_and_one_shade_for_each_kind(tmp_path, drawn):
    kinds = ["8 x H100-80GB · FULL_SHARD · amp_bf16 PURE", "4 x MI250 · HYBRID_SHARD · amp_bf16 PURE"]
    spans = [Span(first, first + 9, kinds[i % 2]) for i, first in enumerate(range(1, 100, 10))]
    plots.plot_run(tmp_path / "loss.png", curve(), spans, title="run")
    strip, loss, _ = drawn[0].axes
    assert texts(strip) == ["1", "2"] * 5
    (legend,) = drawn[0].legends
    assert [text.get_text() for text in legend.get_texts()] == [f"1  {kinds[0]}", f"2  {kinds[1]}"]
    assert len({patch.get_facecolor() for patch in loss.patches}) == 2


def test_a_thousand_segments_are_shaded_without_a_word_too_many(tmp_path, drawn):
    spans = [Span(batch, batch, f"{1 + batch % 2} x cpu") for batch in range(1, 1001)]
    plots.plot_run(tmp_path / "loss.png", curve(1000), spans, title="run")
    assert texts(drawn[0].axes[0]) == []


def test_losses_that_are_not_finite_leave_a_gap_and_a_mark(tmp_path, drawn):
    broken = curve(not_finite=[7])
    broken.losses[6] = np.nan
    plots.plot_run(tmp_path / "loss.png", broken, title="run")
    lines = {line.get_label(): line for line in drawn[0].axes[0].lines}
    assert list(lines["not finite: 1 of run"].get_xdata()) == [7]
    assert np.isnan(drawn[0].axes[0].lines[0].get_ydata()[6])


def test_differences_of_zero_are_counted_and_not_drawn_on_the_scale(tmp_path, drawn):
    batches = np.arange(1, 101)
    absolute = np.where(batches > 60, 1e-5, 0.0)
    apart = Difference(name="b", batches=batches, absolute=absolute, digests_part_at=61)
    equal = Difference(name="c", batches=batches, absolute=np.zeros(100))
    none = Difference(name="d", batches=np.empty(0, np.int64), absolute=np.empty(0))
    curves = [curve(name=name) for name in "abcd"]
    plots.plot_comparison(tmp_path / "report.png", curves, [apart, equal, none], title="four")
    gap = drawn[0].axes[-1]
    labels = [text.get_text() for text in gap.get_legend().get_texts()]
    assert labels == [
        "b: zero at 60 of 100 batches",
        "b: other data from batch 61",
        "c: zero at 100 of 100 batches",
        "d: no common batch",
    ]
    assert gap.get_yscale() == "log"
    assert np.nansum(np.isfinite(gap.lines[0].get_ydata())) == 40


def test_the_hardware_of_compared_runs_stands_beside_their_names(tmp_path, drawn):
    spans = [[Span(1, 100, "2 x cpu · FULL_SHARD")], []]
    plots.plot_comparison(tmp_path / "report.png", [curve(name="a"), curve(name="b")], [], spans, title="two")
    first, second, *_ = drawn[0].axes
    assert (first.get_ylabel(), texts(first)) == ("a", ["2 x cpu · FULL_SHARD"])
    assert (second.get_ylabel(), texts(second)) == ("b", [])


def test_thinning_keeps_every_peak_and_trough():
    batches, values = np.arange(1, 100_001), np.sin(np.arange(100_000) / 50)
    values[54_321], values[65_432], values[70_000:70_010] = 9.0, -9.0, np.nan
    thin_batches, thin_values = thin(batches, values, 4000)
    assert len(thin_values) <= 4000
    assert (thin_batches[np.nanargmax(thin_values)], thin_batches[np.nanargmin(thin_values)]) == (54_322, 65_433)
    assert np.all(np.diff(thin_batches) > 0)
    assert thin(batches[:10], values[:10])[1] is not None and len(thin(batches[:10], values[:10])[1]) == 10


def test_smoothing_lags_behind_nothing_and_passes_over_what_is_not_finite():
    line = np.arange(100.0)
    assert smooth(line) == pytest.approx(line)
    line[50] = np.nan
    assert smooth(line)[50] == pytest.approx(50)
    assert np.isnan(smooth(np.array([np.nan]))[0])


def test_names_are_drawn_as_text_and_not_as_formulas(tmp_path):
    plots.plot_curves(
        {"a $ b $x_{": {"$\\frac{": [(1.0, 0.5, 0.1)], "$": [(1.0, 0.4, 0.1)]}}, tmp_path / "a.png", x_label="b"
    )
    plots.plot_run(tmp_path / "b.png", curve(), [Span(1, 100, "$x_{")], title="$\\frac{ of $")
    assert (tmp_path / "a.png").stat().st_size and (tmp_path / "b.png").stat().st_size
