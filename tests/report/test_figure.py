"""Figures have no numbers to compare; what is drawn is looked at through matplotlib's own objects."""

import os
import subprocess
import sys
from xml.etree import ElementTree

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest

from llmfoundry_lite.evaluation.pairs import DifferencePoint
from llmfoundry_lite.report.difference_figure import plot_differences
from llmfoundry_lite.report.figure import (
    Axis,
    Curve,
    Difference,
    Span,
    plot_comparison,
    plot_run,
    running_mean,
    thin_curve,
)
from tests.helpers.launch import ROOT

NUM_BATCHES = 100
BATCHES = np.arange(1, NUM_BATCHES + 1)


def make_curve(name="run", **fields):
    """A run of 100 batches. `fields` are other fields of `Curve`."""
    return Curve(
        name=name,
        batches=BATCHES,
        losses=5 / BATCHES,
        tokens_per_second=np.full(NUM_BATCHES, 900.0),
        **fields,
    )


def keep_open(plot, *arguments, **options):
    """Call a function that writes one figure, and return the figure, which it has not closed."""
    figures = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(plt, "close", figures.append)
        plot(*arguments, **options)
    (figure,) = figures
    return figure


def labels_of(legend):
    return [text.get_text() for text in legend.get_texts()]


def lines_by_label(panel):
    return {line.get_label(): line for line in panel.lines}


def x_of(line):
    return list(line.get_xdata())


# ------------------------------------------------------------------------------------------ settings of matplotlib

FOREIGN_SETTINGS = {
    "text.usetex": True,
    "savefig.dpi": 5000,
    "figure.dpi": 2000,
    "font.size": 40,
    "text.parse_math": True,
}
"""A `matplotlibrc`, or the program around a call, may have set these: TeX, or a figure of gigabytes."""


def plot_run_named_like_a_formula(path):
    plot_run(path, make_curve(name="a_$x"), title="a_$x")


def plot_two_runs(path):
    difference = Difference(name="b", batches=BATCHES, absolute=np.full(NUM_BATCHES, 1e-5))
    plot_comparison(path, [make_curve(name="a_$x"), make_curve(name="b")], [difference], title="both")


@pytest.mark.parametrize("plot", [plot_run_named_like_a_formula, plot_two_runs])
def test_a_figure_obeys_no_settings_but_ours(tmp_path, plot):
    plot(tmp_path / "ours.png")
    with matplotlib.rc_context(FOREIGN_SETTINGS):
        plot(tmp_path / "foreign.png")
        assert matplotlib.rcParams["font.size"] == 40, "the program has its own settings back"
    assert (tmp_path / "foreign.png").read_bytes() == (tmp_path / "ours.png").read_bytes()


PROGRAM = """
import numpy as np
from pathlib import Path
from llmfoundry_lite.report.figure import Curve, plot_run
batches = np.arange(1, 9)
plot_run(Path("loss.svg"), Curve(name="a", batches=batches, losses=1 / batches, tokens_per_second=batches), title="a")
"""


def test_a_file_of_settings_in_the_working_directory_is_not_even_opened(tmp_path):
    """Here it is a pipe, at which matplotlib would wait for ever. Its backend would be imported from beside it."""
    os.mkfifo(tmp_path / "matplotlibrc")
    command = [sys.executable, "-P", "-c", PROGRAM]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=60)
    assert (tmp_path / "loss.svg").exists()


# ----------------------------------------------------------------------------------------------------- hardware


def test_each_kind_of_hardware_has_a_shade_and_its_name_below(tmp_path, drawn):
    """Ten spans of ten batches, on two kinds in turn."""
    kinds = ["8 x H100-80GB · FULL_SHARD · amp_bf16 PURE", "4 x MI250 · HYBRID_SHARD · amp_bf16 PURE"]
    spans = []
    for i in range(10):
        first_batch = 10 * i + 1
        spans.append(Span(first_batch, first_batch + 9, kinds[i % 2]))
    plot_run(tmp_path / "loss.png", make_curve(), spans, title="run")

    loss_panel, speed_panel = drawn[0].axes
    assert len(loss_panel.patches) == 10
    assert len(speed_panel.patches) == 10
    assert len({patch.get_facecolor() for patch in loss_panel.patches}) == 2
    (legend,) = drawn[0].legends
    assert labels_of(legend) == kinds


def test_the_hardware_of_compared_runs_stands_beside_their_names(tmp_path, drawn):
    """The hardware of the second run is not known."""
    spans = [[Span(1, NUM_BATCHES, "2 x cpu · FULL_SHARD")], []]
    plot_comparison(tmp_path / "report.png", [make_curve(name="a"), make_curve(name="b")], [], spans, title="two")

    first_strip, second_strip, *_ = drawn[0].axes
    assert first_strip.get_ylabel() == "a"
    assert second_strip.get_ylabel() == "b"
    assert len(first_strip.patches) == 1
    assert len(second_strip.patches) == 0
    assert labels_of(drawn[0].legends[0]) == ["2 x cpu · FULL_SHARD"]


# ------------------------------------------------------------------------------------------------- what is marked


def test_losses_that_are_not_finite_leave_a_gap_and_a_mark(tmp_path, drawn):
    curve = make_curve(not_finite=[7])
    curve.losses[6] = np.nan
    plot_run(tmp_path / "loss.png", curve, title="run")

    loss_panel = drawn[0].axes[0]
    training_line = loss_panel.lines[0]
    assert np.isnan(training_line.get_ydata()[6])
    assert x_of(lines_by_label(loss_panel)["not finite: 1 of run"]) == [7]


def test_changed_settings_are_marked_from_their_first_batch_on(tmp_path, drawn):
    curve = make_curve(changes=[(51, "optimizer.lr 0.001 -> 0.0005")])
    plot_run(tmp_path / "a.png", curve, title="run")
    mark = lines_by_label(drawn[0].axes[0])["from batch 51: optimizer.lr 0.001 -> 0.0005"]
    assert mark.get_xdata()[0] == 50.5


def plot_single(path, curve):
    plot_run(path, curve, title="run")


def plot_twice(path, curve):
    plot_comparison(path, [curve, curve], [], title="two")


@pytest.mark.parametrize("plot", [plot_single, plot_twice])
def test_the_validation_after_the_last_batch_is_not_cut_in_half(tmp_path, drawn, plot):
    curve = make_curve(eval_batches=np.array([NUM_BATCHES]), eval_losses=np.array([2.0]))
    plot(tmp_path / "loss.png", curve)

    unclipped = [line for line in drawn[0].axes[0].lines if not line.get_clip_on()]
    assert unclipped
    for mark in unclipped:
        assert mark.get_xdata()[0] == NUM_BATCHES
        assert mark.get_ydata()[0] == 2.0


# ------------------------------------------------------------------------------------------- differences of runs


@pytest.fixture(scope="module")
def difference_panel(tmp_path_factory):
    """The panel of differences of four runs.

    From the first run, `b` is apart in the last 40 batches, `c` never, and `d` has no batch in common with it.
    """
    some_zero = np.where(BATCHES > 60, 1e-5, 0.0)
    differences = [
        Difference(name="b", batches=BATCHES, absolute=some_zero, first_different_data_batch=61),
        Difference(name="c", batches=BATCHES, absolute=np.zeros(NUM_BATCHES)),
        Difference(name="d", batches=np.empty(0, np.int64), absolute=np.empty(0)),
    ]
    curves = [make_curve(name=name) for name in "abcd"]
    path = tmp_path_factory.mktemp("differences") / "report.png"
    return keep_open(plot_comparison, path, curves, differences, title="four").axes[-1]


def test_differences_of_zero_are_counted_in_the_legend(difference_panel):
    assert labels_of(difference_panel.get_legend()) == [
        "b: zero at 60 of 100 batches",
        "b: other data from batch 61",
        "c: zero at 100 of 100 batches",
        "d: no common batch",
    ]


def test_differences_of_zero_are_not_drawn_on_the_scale(difference_panel):
    differences_of_b = difference_panel.lines[0].get_ydata()
    assert np.isfinite(differences_of_b).sum() == 40


def test_the_scale_of_differences_has_plain_numbers(difference_panel):
    assert difference_panel.get_yscale() == "log"
    for label in difference_panel.get_yticklabels():
        assert label.get_text() == f"{float(label.get_text()):g}"


# --------------------------------------------------------------------------------------------- thinning of curves

MAX_POINTS = 4000
LONG_BATCHES = np.arange(1, 100_001)


@pytest.fixture
def wave():
    """100,000 values between -1 and 1, which are thinned by stretches of 50."""
    return np.sin(np.arange(100_000) / 50)


def test_thinning_keeps_every_peak_and_trough(wave):
    wave[54_321] = 9.0
    wave[65_432] = -9.0
    batches, values = thin_curve(LONG_BATCHES, wave, MAX_POINTS)
    assert batches[values.argmax()] == 54_322
    assert batches[values.argmin()] == 65_433


def test_thinning_leaves_few_points_in_their_order(wave):
    batches, values = thin_curve(LONG_BATCHES, wave, MAX_POINTS)
    assert len(values) <= MAX_POINTS
    assert len(batches) == len(values)
    assert np.all(np.diff(batches) > 0)


def test_a_short_curve_is_not_thinned(wave):
    batches, values = thin_curve(LONG_BATCHES[:10], wave[:10])
    assert len(batches) == 10
    assert len(values) == 10


def test_after_thinning_a_gap_stays_only_where_nothing_else_is(wave):
    """Two whole stretches are NaN, and every seventh value elsewhere."""
    wave[70_000:70_100] = np.nan
    wave[::7] = np.nan
    _, values = thin_curve(LONG_BATCHES, wave, MAX_POINTS)
    assert np.isnan(values).sum() == 2


# ------------------------------------------------------------------------------------------------- running means


@pytest.fixture
def decay():
    """200 losses that fall towards 2.5. Their mean covers 4 neighbours on either side."""
    return 2.5 + 5 * np.exp(-np.arange(200) / 40)


def test_the_mean_of_a_straight_line_lags_behind_nothing():
    line = np.arange(100.0)
    assert running_mean(line) == pytest.approx(line)


def test_the_mean_passes_over_what_is_not_finite():
    line = np.arange(100.0)
    line[50] = np.nan
    assert running_mean(line)[50] == pytest.approx(50)
    assert running_mean(line, 0)[49] == 49


def test_the_mean_of_nothing_is_not_finite():
    assert np.isnan(running_mean(np.array([np.nan]))[0])


def test_the_last_means_lie_on_the_line_through_the_last_values():
    """The mean of 3, 6 and 0 is 3, and the least-squares line through all four values rises by 0.3."""
    assert running_mean(np.array([0.0, 3.0, 6.0, 0.0]), 1) == pytest.approx([0, 3, 3, 3.3])


def test_the_last_mean_is_never_below_the_last_values():
    assert running_mean(np.array([9.0, 4.0, 2.0, 1.0, 1.0]))[-1] == 1


def test_the_last_means_follow_a_curve_that_levels_off(decay):
    assert running_mean(decay)[-4:] == pytest.approx(decay[-4:], abs=0.01)


def test_the_mean_does_not_end_with_the_noise_of_the_last_batches(decay):
    """It has no bias, and at most half of the noise of one value, whose standard deviation is 1."""
    noises = np.random.default_rng(1).standard_normal((300, 200))
    errors = np.array([running_mean(decay + noise)[-1] - decay[-1] for noise in noises])
    assert abs(errors.mean()) < 0.05
    assert errors.std() < 0.5


def test_the_mean_ends_with_what_is_known(decay):
    decay[-3:] = np.nan
    is_known = np.isfinite(running_mean(decay))
    assert is_known[:-3].all()
    assert not is_known[-3:].any()


def test_if_few_of_the_last_values_are_known_no_line_is_drawn(decay):
    """Of the last nine, four are known."""
    decay[-6:-1] = np.nan
    decay[-1] = 2.5
    assert running_mean(decay)[-1] == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("half_width", "label"),
    [
        pytest.param(2, "training (mean of 5 batches)", id="as asked"),
        pytest.param(0, "training", id="no mean"),
        pytest.param(50, "training (mean of 21 batches)", id="a tenth on either side at most"),
    ],
)
def test_the_mean_is_as_wide_as_asked_and_left_out_at_one_batch(tmp_path, drawn, half_width, label):
    plot_run(tmp_path / "loss.png", make_curve(), title="run", half_width=half_width)
    assert labels_of(drawn[0].axes[0].get_legend()) == [label]


# --------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_a_figure_is_what_its_suffix_says_and_the_same_each_time(tmp_path, suffix, start):
    first = tmp_path / f"first.{suffix}"
    second = tmp_path / f"second.{suffix}"
    plot_run(first, make_curve(), title="run")
    plot_run(second, make_curve(), title="run")
    assert first.read_bytes().startswith(start)
    assert first.read_bytes() == second.read_bytes()


def test_the_texts_of_an_svg_are_texts(tmp_path):
    plot_run(tmp_path / "loss.svg", make_curve(), title="run")
    assert ">loss, nats per token<" in (tmp_path / "loss.svg").read_text()


# --------------------------------------------------------------------------------------------- an axis of tokens


@pytest.fixture(scope="module")
def panels_by_tokens(tmp_path_factory):
    """The panels of loss and speed of a run along its tokens.

    Batches 1 to 50 have 10 tokens each, batches 51 to 100 have 1,000 each. So there are 500 tokens after batch 50,
    and 50,500 after batch 100, with a mean of 505. A dead branch trained the batches 101 to 105.
    """
    tokens_of_batches = np.where(BATCHES <= 50, 10.0, 1000.0)
    curve = make_curve(
        axis=Axis("training tokens", BATCHES, np.cumsum(tokens_of_batches)),
        eval_batches=np.array([50, 100]),
        eval_losses=np.array([2.0, 1.0]),
        not_finite=[50],
        dead_branches=[(np.arange(101, 106), np.full(5, 0.1))],
    )
    spans = [Span(1, 50, "2 x cpu"), Span(51, NUM_BATCHES, "1 x cpu")]
    path = tmp_path_factory.mktemp("tokens") / "loss.png"
    return keep_open(plot_run, path, curve, spans, title="run").axes


def test_an_axis_of_tokens_is_labelled(panels_by_tokens):
    _, speed_panel = panels_by_tokens
    assert speed_panel.get_xlabel() == "training tokens"


def test_validation_and_marks_stand_at_the_tokens_of_their_batches(panels_by_tokens):
    lines = lines_by_label(panels_by_tokens[0])
    assert x_of(lines["validation, 1.000 at batch 100"]) == [500, 50_500]
    assert x_of(lines["not finite: 1 of run"]) == [500]


def test_a_dead_branch_goes_on_with_the_mean_tokens_of_a_batch(panels_by_tokens):
    loss_panel, _ = panels_by_tokens
    dead_branch = lines_by_label(loss_panel)["dead branch"]
    assert x_of(dead_branch) == pytest.approx([51_005, 51_510, 52_015, 52_520, 53_025])
    assert loss_panel.get_xlim()[1] >= 53_025


def test_the_shade_of_a_span_ends_halfway_to_the_next_batch(panels_by_tokens):
    """From batch 50, at 500 tokens, to batch 51, at 1,500."""
    first_shade = panels_by_tokens[0].patches[0]
    assert first_shade.get_x() + first_shade.get_width() == pytest.approx(1000)


# ---------------------------------------------------------------------------------------------- names of anything


def test_names_are_drawn_as_text_and_not_as_formulas(tmp_path):
    """As formulas, these would be errors."""
    plot_run(tmp_path / "a.png", make_curve(name="$\\frac{"), [Span(1, 9, "$x_{")], title="a $ b $x_{")
    assert (tmp_path / "a.png").stat().st_size > 0


NAME_WITH_CONTROL_CHARACTERS = "a\x1b[31m\x00\ud800b"
ESCAPED_NAME = "a\\x1b[31m\\x00\\ud800b"


def test_control_characters_in_names_of_a_run_are_escaped(tmp_path):
    name = NAME_WITH_CONTROL_CHARACTERS
    plot_run(tmp_path / "run.svg", make_curve(name=name), [Span(1, 9, name)], title=name)
    ElementTree.parse(tmp_path / "run.svg")  # it is valid XML
    assert ESCAPED_NAME in (tmp_path / "run.svg").read_text()


def test_control_characters_in_names_of_models_and_tasks_are_escaped(tmp_path):
    name = NAME_WITH_CONTROL_CHARACTERS
    point = DifferencePoint(difference=0.1, low=0, high=0.2, is_detected=True, is_tested=True)
    panels = {name: {name: {name: point}}}
    plot_differences(panels, tmp_path / "differences.svg", title=name)
    ElementTree.parse(tmp_path / "differences.svg")
    assert ESCAPED_NAME in (tmp_path / "differences.svg").read_text()
