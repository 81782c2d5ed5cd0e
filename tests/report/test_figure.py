"""Figures have no numbers to compare; what is drawn is looked at through matplotlib's own objects."""

import os
import subprocess
import sys
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest

from llmfoundry_lite.report.figure import (
    Axis,
    Curve,
    Difference,
    Span,
    plot_comparison,
    plot_differences,
    plot_run,
    running_mean,
    thin_curve,
)
from tests.helpers.launch import ROOT


def curve(num=100, name="run", **more):
    batches = np.arange(1, num + 1)
    return Curve(name=name, batches=batches, losses=5 / batches, tokens_per_second=np.full(num, 900.0), **more)


THEIRS = {"text.usetex": True, "savefig.dpi": 5000, "figure.dpi": 2000, "font.size": 40, "text.parse_math": True}


def test_a_figure_obeys_no_settings_but_ours(tmp_path):
    """A `matplotlibrc`, or the program around a call, may have set others: TeX, or a figure of gigabytes."""
    first, second = curve(name="a_$x"), curve(name="b")
    apart = Difference(name="b", batches=first.batches, absolute=np.full(100, 1e-5))
    plots = {
        "run.png": lambda path: plot_run(path, first, title="a_$x"),
        "comparison.png": lambda path: plot_comparison(path, [first, second], [apart], title="both"),
    }
    for name, plot in plots.items():
        plot(tmp_path / name)
        with matplotlib.rc_context(THEIRS):
            plot(tmp_path / f"theirs-{name}")
            assert matplotlib.rcParams["font.size"] == 40, "the program has its own back"
        assert (tmp_path / name).read_bytes() == (tmp_path / f"theirs-{name}").read_bytes()


DRAW = """
import numpy as np
from pathlib import Path
from llmfoundry_lite.report.figure import Curve, plot_run
batches = np.arange(1, 9)
plot_run(Path("loss.svg"), Curve(name="a", batches=batches, losses=1 / batches, tokens_per_second=batches), title="a")
"""


def test_a_file_of_settings_in_the_working_directory_is_not_even_opened(tmp_path):
    """Here it is a pipe, at which matplotlib would wait for ever. Its backend would be imported from beside it."""
    os.mkfifo(tmp_path / "matplotlibrc")
    command = [sys.executable, "-P", "-c", DRAW]
    subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, timeout=60)
    assert (tmp_path / "loss.svg").exists()


def test_each_kind_of_hardware_has_a_shade_and_its_name_below(tmp_path, drawn):
    kinds = ["8 x H100-80GB · FULL_SHARD · amp_bf16 PURE", "4 x MI250 · HYBRID_SHARD · amp_bf16 PURE"]
    spans = [Span(first, first + 9, kinds[i % 2]) for i, first in enumerate(range(1, 100, 10))]
    plot_run(tmp_path / "loss.png", curve(), spans, title="run")
    loss, speed = drawn[0].axes
    assert len(loss.patches) == len(speed.patches) == 10
    assert len({patch.get_facecolor() for patch in loss.patches}) == 2
    (legend,) = drawn[0].legends
    assert [text.get_text() for text in legend.get_texts()] == kinds


def test_losses_that_are_not_finite_leave_a_gap_and_a_mark(tmp_path, drawn):
    broken = curve(not_finite=[7])
    broken.losses[6] = np.nan
    plot_run(tmp_path / "loss.png", broken, title="run")
    lines = {line.get_label(): line for line in drawn[0].axes[0].lines}
    assert list(lines["not finite: 1 of run"].get_xdata()) == [7]
    assert np.isnan(drawn[0].axes[0].lines[0].get_ydata()[6])


def test_differences_of_zero_are_counted_and_not_drawn_on_the_scale(tmp_path, drawn):
    batches = np.arange(1, 101)
    absolute = np.where(batches > 60, 1e-5, 0.0)
    apart = Difference(name="b", batches=batches, absolute=absolute, first_different_data_batch=61)
    equal = Difference(name="c", batches=batches, absolute=np.zeros(100))
    none = Difference(name="d", batches=np.empty(0, np.int64), absolute=np.empty(0))
    curves = [curve(name=name) for name in "abcd"]
    plot_comparison(tmp_path / "report.png", curves, [apart, equal, none], title="four")
    gap = drawn[0].axes[-1]
    labels = [text.get_text() for text in gap.get_legend().get_texts()]
    assert labels == [
        "b: zero at 60 of 100 batches",
        "b: other data from batch 61",
        "c: zero at 100 of 100 batches",
        "d: no common batch",
    ]
    assert gap.get_yscale() == "log"
    assert all(label.get_text()[:2] == "1e" for label in gap.get_yticklabels())
    assert np.nansum(np.isfinite(gap.lines[0].get_ydata())) == 40


def test_the_hardware_of_compared_runs_stands_beside_their_names(tmp_path, drawn):
    spans = [[Span(1, 100, "2 x cpu · FULL_SHARD")], []]
    plot_comparison(tmp_path / "report.png", [curve(name="a"), curve(name="b")], [], spans, title="two")
    first, second, *_ = drawn[0].axes
    assert [(axes.get_ylabel(), len(axes.patches)) for axes in (first, second)] == [("a", 1), ("b", 0)]
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["2 x cpu · FULL_SHARD"]


def test_thinning_keeps_every_peak_and_trough():
    batches, values = np.arange(1, 100_001), np.sin(np.arange(100_000) / 50)
    values[54_321], values[65_432], values[70_000:70_010] = 9.0, -9.0, np.nan
    thin_batches, thin_values = thin_curve(batches, values, 4000)
    assert len(thin_values) <= 4000
    assert (thin_batches[np.nanargmax(thin_values)], thin_batches[np.nanargmin(thin_values)]) == (54_322, 65_433)
    assert np.all(np.diff(thin_batches) > 0)
    assert len(thin_curve(batches[:10], values[:10])[1]) == 10
    values[::7] = np.nan
    assert np.isnan(thin_curve(batches, values, 4000)[1]).sum() <= 2, "a gap stays only where nothing else is"


def test_smoothing_lags_behind_nothing_and_passes_over_what_is_not_finite():
    line = np.arange(100.0)
    assert running_mean(line) == pytest.approx(line)
    line[50] = np.nan
    assert running_mean(line)[50] == pytest.approx(50)
    assert np.isnan(running_mean(np.array([np.nan]))[0])
    assert running_mean(line, 0)[49] == 49


def test_the_mean_does_not_end_with_the_noise_of_the_last_batches():
    assert running_mean(np.array([0.0, 3.0, 6.0, 0.0]), 1) == pytest.approx([0, 3, 3, 3.3])
    assert running_mean(np.array([9.0, 4.0, 2.0, 1.0, 1.0]))[-1] == 1, "never below the last values"
    decay = 2.5 + 5 * np.exp(-np.arange(200) / 40)
    assert running_mean(decay)[-4:] == pytest.approx(decay[-4:], abs=0.01)
    noise = np.random.default_rng(1).standard_normal((300, 200))
    ends = np.array([running_mean(decay + one)[-1] for one in noise]) - decay[-1]
    assert abs(ends.mean()) < 0.05 and ends.std() < 0.5, "without bias, half as noisy as one value at most"
    decay[-3:] = np.nan
    assert np.isfinite(running_mean(decay)).tolist() == [True] * 197 + [False] * 3, "it ends with what is known"
    decay[-6:-1], decay[-1] = np.nan, 2.5
    assert running_mean(decay)[-1] == pytest.approx(decay[-1]), "too few of the last values are known"


def test_changed_settings_are_marked_from_their_first_batch_on(tmp_path, drawn):
    plot_run(tmp_path / "a.png", curve(changes=[(51, "optimizer.lr 0.001 -> 0.0005")]), title="run")
    marks = {line.get_label(): line.get_xdata()[0] for line in drawn[0].axes[0].lines}
    assert marks["from batch 51: optimizer.lr 0.001 -> 0.0005"] == 50.5


def test_the_mean_is_as_wide_as_asked_and_left_out_at_one_batch(tmp_path, drawn):
    plot_run(tmp_path / "a.png", curve(), title="run", half_width=2)
    plot_run(tmp_path / "b.png", curve(), title="run", half_width=0)
    plot_run(tmp_path / "c.png", curve(), title="run", half_width=50)
    wide, none, clipped = ([text.get_text() for text in figure.axes[0].get_legend().get_texts()] for figure in drawn)
    assert (wide, none) == (["training (mean of 5 batches)"], ["training"])
    assert clipped == ["training (mean of 21 batches)"], "a tenth of them on either side at most"


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_a_figure_is_what_its_suffix_says_and_the_same_each_time(tmp_path, suffix, start):
    paths = [tmp_path / f"{name}.{suffix}" for name in "ab"]
    for path in paths:
        plot_run(path, curve(), title="run")
    one, two = (path.read_bytes() for path in paths)
    assert one.startswith(start) and one == two
    assert suffix != "svg" or b">loss, nats per token<" in one


def test_tokens_stand_along_the_figure_with_everything_in_its_place(tmp_path, drawn):
    """The batch grows from 10 to 1,000 tokens after half of the batches."""
    totals = np.cumsum(np.where(np.arange(1, 101) <= 50, 10.0, 1000.0))
    axis = Axis("training tokens", np.arange(1, 101), totals)
    evaluated: dict[str, Any] = {"eval_batches": np.array([50, 100]), "eval_losses": np.array([2.0, 1.0])}
    lost = (np.arange(101, 106), np.full(5, 0.1))
    spans = [Span(1, 50, "2 x cpu"), Span(51, 100, "1 x cpu")]
    run = curve(axis=axis, not_finite=[50], dead_branches=[lost], **evaluated)
    plot_run(tmp_path / "loss.png", run, spans, title="run")
    loss, speed = drawn[0].axes
    lines = {line.get_label(): list(line.get_xdata()) for line in loss.lines}
    assert speed.get_xlabel() == "training tokens"
    assert lines["validation, 1.000 at batch 100"] == [500, 50_500]
    assert lines["not finite: 1 of run"] == [500]
    assert lines["dead branch"] == pytest.approx([50_500 + 505 * i for i in range(1, 6)])
    assert loss.patches[0].get_x() + loss.patches[0].get_width() == pytest.approx(1000)  # halfway to batch 51
    assert loss.get_xlim()[1] >= max(lines["dead branch"])


def test_the_validation_after_the_last_batch_is_not_cut_in_half(tmp_path, drawn):
    last = curve(eval_batches=np.array([100]), eval_losses=np.array([2.0]))
    plot_run(tmp_path / "loss.png", last, title="run")
    plot_comparison(tmp_path / "two.png", [last, last], [], title="two")
    for figure in drawn:
        marks = [line for line in figure.axes[0].lines if not line.get_clip_on()]
        assert marks and all((mark.get_xdata()[0], mark.get_ydata()[0]) == (100, 2.0) for mark in marks)


def test_names_are_drawn_as_text_and_not_as_formulas(tmp_path):
    plot_run(tmp_path / "a.png", curve(name="$\\frac{"), [Span(1, 9, "$x_{")], title="a $ b $x_{")
    assert (tmp_path / "a.png").stat().st_size


def test_names_with_control_characters_are_escaped_in_every_text(tmp_path):
    name = "a\x1b[31m\x00\ud800b"
    plot_differences({name: {name: {name: (0.1, 0, 0.2, True)}}}, tmp_path / "a.svg", title=name)
    plot_run(tmp_path / "b.svg", curve(name=name), [Span(1, 9, name)], title=name)
    for path in tmp_path.glob("*.svg"):
        ElementTree.parse(path)
        assert "a\\x1b[31m\\x00\\ud800b" in path.read_text()
