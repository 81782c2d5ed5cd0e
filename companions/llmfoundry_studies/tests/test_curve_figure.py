"""The figure of learning curves, as the texts of an SVG."""

import re

from llmfoundry_studies import curve_figure
from llmfoundry_studies.curve_figure import plot_curves
from llmfoundry_studies.curves import LearningCurve, Point, smooth


def curve_of(run: str, task: str, metric: str, *, chance: float | None = None, error: float | None = 0.1):
    """Make up a curve of three checkpoints."""
    points = [Point(num_tokens=batch * 10**9, score=0.2 * batch, error=error, model="m") for batch in (1, 2, 3)]
    return LearningCurve(run=run, task=task, metric=metric, points=points, chance=chance)


def texts_of(path) -> list[str]:
    """Return the texts of an SVG, in their order."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


def test_panels_name_task_metric_and_units(tmp_path):
    path = tmp_path / "curves.svg"
    curves = [
        curve_of("base", "text/0-shot", "bits_per_byte"),
        curve_of("base", "quiz/0-shot", "acc_norm", chance=0.25),
    ]
    assert plot_curves(path, curves, title="base on icl") == []
    texts = texts_of(path)
    assert {"base on icl", "acc norm", "bits per byte", "training tokens", "2G"} <= {*texts}
    assert texts.index("quiz/0-shot") < texts.index("text/0-shot")
    assert {"± standard error", "guessing"} <= {*texts}
    assert "base" not in texts  # the title names the only run


def test_several_runs_are_named_and_smoothing_is_said(tmp_path):
    path = tmp_path / "curves.svg"
    curves = [smooth(curve_of(run, "quiz/0-shot", "acc", error=None), 2) for run in ("base", "ours")]
    plot_curves(path, curves, title="icl")
    texts = texts_of(path)
    assert texts.count("quiz/0-shot") == 1  # both in one panel
    assert {"base", "ours", "mean of the last 2 checkpoints"} <= {*texts}
    assert not {"± standard error", "guessing"} & {*texts}


def test_a_figure_with_too_many_panels_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(curve_figure, "MAX_PANELS", 1)
    curves = [curve_of("base", f"quiz{number}/0-shot", "acc") for number in (1, 2)]
    path = tmp_path / "curves.svg"
    assert plot_curves(path, curves, title="icl") == ["curves.svg has the first 1 of 2 curves of a task by a metric"]
    assert "quiz2/0-shot" not in texts_of(path)
