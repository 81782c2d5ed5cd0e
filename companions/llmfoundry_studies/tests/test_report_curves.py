"""Scores of a run's checkpoints in `llmfoundry-lite report`."""

import json

import pytest

from llmfoundry_lite.checkpoint.store import CheckpointStore
from llmfoundry_lite.report.report import report
from tests.helpers.reported import on_cpu, record, write_run
from tests.helpers.results import choice, text, write_result

HELD_OUT = "held_out/0-shot"
QUIZ = "quiz/0-shot"


def write_checkpoint(folder, name: str, source: str, batch: int, *, save_id: str = "", bits: float = 2.0) -> None:
    """Write the result of a checkpoint after `batch` batches of 1,000 tokens."""
    held_out = text([[(1.0, 1)]], bits_per_byte=bits, bits_per_byte_stderr=0.05)
    facts = {
        "source": source,
        "save_id": save_id or f"e1-ba{batch}-0123456789ab",
        "num_tokens_trained": 1000 * batch,
    }
    write_result(folder, name, {HELD_OUT: held_out, QUIZ: choice([1, 0, 1, 1])}, **facts)


@pytest.fixture
def run(tmp_path, monkeypatch) -> str:
    """A run of ten batches, and results of six of its checkpoints in the working directory."""
    monkeypatch.chdir(tmp_path)
    location = write_run(tmp_path / "runs/base", [record(batch) for batch in range(1, 11)], [on_cpu(1, 10)])
    folder = f"{location}/checkpoints"
    for batch in range(5, 11):
        write_checkpoint(tmp_path / "results/s", f"base-ba{batch}", f"{folder}/ba{batch}", batch, bits=3 - batch / 10)
    write_checkpoint(tmp_path / "results/s", "other-ba5", "runs/other/checkpoints/ba5", 5)
    return location


def test_scores_of_checkpoints_are_shown_and_drawn(run, tmp_path, capsys):
    facts = report([run], image_format="svg")
    written = capsys.readouterr().out
    assert "Evaluated checkpoints of base" in written
    assert f"plot: {run}/curves.svg" in written
    [row] = [line for line in written.splitlines() if line.startswith(HELD_OUT)]
    assert row.split() == [
        *(HELD_OUT, "bits", "per", "byte", "6"),
        *("2.5000", "at", "5,000", "2.0000", "±", "0.0500", "at", "10,000"),
        "2.2000",
    ]
    figure = (tmp_path / "runs/base/curves.svg").read_text()
    assert "training tokens" in figure
    assert "base: evaluated checkpoints" in figure
    assert "![scores of checkpoints](curves.svg)" in (tmp_path / "runs/base/report.md").read_text()

    curves = json.loads((tmp_path / "runs/base/report.json").read_text())["runs"][0]["curves"]
    assert curves == facts["runs"][0]["curves"]
    assert [(curve["task"], len(curve["points"])) for curve in curves] == [(HELD_OUT, 6), (QUIZ, 6)]
    report([run], image_format="svg")  # again: the figure is one that a report wrote


def test_a_run_without_results_has_no_such_section(run, tmp_path, capsys):
    facts = report([run], results_folder=tmp_path / "none", out=tmp_path / "out")
    assert "Evaluated checkpoints" not in capsys.readouterr().out
    assert facts["curves_figure"] is None
    assert not (tmp_path / "out/curves.png").exists()


def test_results_that_were_made_by_another_path_are_found_by_a_save_that_is_still_there(run, tmp_path):
    [candidate] = CheckpointStore(f"{run}/checkpoints").candidates()
    assert candidate.head is not None
    folder = tmp_path / "elsewhere/s"
    for batch, save_id in ((9, ""), (10, candidate.head.save_id)):
        write_checkpoint(folder, f"m-ba{batch}", f"../runs/base/checkpoints/ba{batch}", batch, save_id=save_id)
    facts = report([run], results_folder=tmp_path / "elsewhere", out=tmp_path / "out")
    [held_out, _] = facts["runs"][0]["curves"]
    assert [point["model"] for point in held_out["points"]] == ["m-ba9", "m-ba10"]


def test_results_in_the_run_folder_are_found(run, tmp_path):
    (tmp_path / "results").rename(tmp_path / "runs/base/results")
    facts = report([run], out=tmp_path / "out")
    assert len(facts["runs"][0]["curves"]) == 2
