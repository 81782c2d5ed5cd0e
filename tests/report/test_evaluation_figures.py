"""Figures of evaluations, looked at through matplotlib's own objects."""

from typing import Any
from xml.etree import ElementTree

from llmfoundry_lite.report.evaluation_figures import Panel, plot_curves, plot_differences
from llmfoundry_lite.report.run_figures import plot_relay

LEG = {"began_hours": 0, "hours": 1, "first_batch": 1, "last_batch": 2}


def test_learning_curves_have_axis_labels_and_what_guessing_reaches(tmp_path, drawn):
    points: dict[str, Any] = {name: [(100, 0.3, 0.02), (200, 0.4, 0.02)] for name in "ab"}
    panels = [
        Panel(title="choice/0-shot", y_label="accuracy (acc)", points=points, chance=0.25),
        Panel(title="text/0-shot", y_label="bits per byte", points=points),
    ]
    plot_curves(panels, tmp_path / "learning.png", x_label="batch")
    choice, text, *_ = drawn[0].axes
    assert [(axes.get_xlabel(), axes.get_ylabel()) for axes in (choice, text)] == [
        ("batch", "accuracy (acc)"),
        ("batch", "bits per byte"),
    ]
    assert [note.get_text() for note in choice.texts] == ["chance, 0.25"] and not text.texts
    assert choice.get_ylim()[0] < 0.25
    assert [label.get_text() for label in drawn[0].legends[0].get_texts()] == ["a", "b"]


def test_names_are_drawn_as_text_and_not_as_formulas(tmp_path):
    points: dict[str, Any] = {"$\\frac{": [(1.0, 0.5, 0.1)], "$": [(1.0, 0.4, 0.1)]}
    plot_curves([Panel(title="a $ b $x_{", y_label="$", points=points)], tmp_path / "a.png", x_label="b")
    plot_relay(tmp_path / "b.png", [{"place": "$x_{", **LEG}], title="$\\frac{ of $")
    assert (tmp_path / "a.png").stat().st_size and (tmp_path / "b.png").stat().st_size


def test_names_with_control_characters_are_escaped_in_every_text(tmp_path):
    name = "a\x1b[31m\x00\ud800b"
    panel = Panel(title=name, y_label=name, points={name: [(1, 2, 0.1)], "b": [(1, 2, 0.1)]})
    leg = {"place": name, **LEG}
    plot_differences({name: {name: {name: (0.1, 0, 0.2, True)}}}, tmp_path / "a.svg", title=name)
    plot_curves([panel], tmp_path / "b.svg", x_label="batch")
    plot_relay(tmp_path / "c.svg", [leg], title=name)
    for path in tmp_path.glob("*.svg"):
        ElementTree.parse(path)
        assert "a\\x1b[31m\\x00\\ud800b" in path.read_text()
