"""Learning curves of the results of a run's checkpoints."""

import pytest

from llmfoundry_studies.curves import LearningCurve, gather_curves, group_by_run, read_folder, smooth
from tests.helpers.results import choice, text, write_result

QUIZ = "quiz/0-shot"
HELD_OUT = "held_out/0-shot"


def write_checkpoint(folder, name: str, batch: int, tasks, *, epoch: int = 1, run: str = "runs/base") -> None:
    """Write the result of a checkpoint that has 100 tokens a batch."""
    facts = {
        "source": f"{run}/checkpoints/ba{batch}",
        "save_id": f"e{epoch}-ba{batch}-0123456789ab",
        "num_tokens_trained": 100 * batch or None,
    }
    write_result(folder, name, tasks, **facts)


def gather(folder):
    """Gather the curves of all results in a folder, and the notes."""
    all_results, notes = read_folder(folder)
    assert notes == []
    return gather_curves(all_results)


def scores_of(curve: LearningCurve) -> list[tuple[int, float]]:
    """Return the tokens and the score of each point."""
    return [(point.num_tokens, point.score) for point in curve.points]


def test_points_are_in_order_of_tokens_and_not_of_names(tmp_path):
    for batch, answers in ((1000, [1, 1]), (200, [1, 0]), (0, [0, 0])):
        write_checkpoint(tmp_path, f"base-ba{batch}", batch, {QUIZ: answers})
    [curve] = gather(tmp_path).curves
    assert (curve.run, curve.task, curve.metric, curve.chance) == ("base", QUIZ, "acc_per_token", 0.25)
    assert scores_of(curve) == [(0, 0.0), (20_000, 0.5), (100_000, 1.0)]
    assert [point.model for point in curve.points] == ["base-ba0", "base-ba200", "base-ba1000"]


def test_a_point_has_the_standard_error_of_its_record(tmp_path):
    for batch in (1, 2):
        write_checkpoint(tmp_path, f"base-ba{batch}", batch, {QUIZ: [1, 0, 1, 0]})
    results, _ = read_folder(tmp_path)
    [curve] = gather_curves(results).curves
    assert curve.points[0].error == results[0].tasks[QUIZ]["acc_per_token_stderr"] > 0


def test_a_task_with_bits_per_byte_beside_its_score_has_two_curves(tmp_path):
    for batch in (1, 2):
        questions = choice([1, 0], bpb=3.0 - batch, bpb_stderr=0.1)
        tasks = {QUIZ: questions, HELD_OUT: text([[(400.0 / batch, 100)]])}
        write_checkpoint(tmp_path, f"base-ba{batch}", batch, tasks)
    score, bits, held_out = gather(tmp_path).curves
    assert [score.metric, bits.metric, held_out.metric] == ["acc_per_token", "bpb", "bits_per_byte"]
    assert [score.is_in_bits, bits.is_in_bits, held_out.is_in_bits] == [False, True, True]
    assert scores_of(bits) == [(100, 2.0), (200, 1.0)]
    assert bits.points[0].error == 0.1
    assert bits.chance is None
    assert held_out.points[0].error is None


@pytest.mark.parametrize("name", ["again", "later"])  # read before and after the other result
def test_a_save_of_a_later_launch_replaces_one_of_the_same_batch(tmp_path, name):
    write_checkpoint(tmp_path, "base-ba1", 1, {QUIZ: [1, 0]})
    write_checkpoint(tmp_path, "base-ba2", 2, {QUIZ: [0, 0]}, epoch=3)
    write_checkpoint(tmp_path, name, 2, {QUIZ: [1, 1]}, epoch=12)
    [curve] = gather(tmp_path).curves
    assert scores_of(curve) == [(100, 0.5), (200, 1.0)]


def test_a_checkpoint_that_was_asked_otherwise_is_left_out_and_named(tmp_path):
    for batch in (1, 2):
        write_checkpoint(tmp_path, f"base-ba{batch}", batch, {QUIZ: [1, 0]})
    write_checkpoint(tmp_path, "base-ba3", 3, {QUIZ: choice([1], fingerprint="sha256:trial")})
    gathered = gather(tmp_path)
    assert scores_of(gathered.curves[0]) == [(100, 0.5), (200, 0.5)]
    assert gathered.notes == [
        "warning: base: quiz/0-shot: base-ba3 not asked the same as the others; left out",
    ]


def test_runs_are_told_apart_and_other_models_are_left_out(tmp_path):
    for batch in (1, 2):
        write_checkpoint(tmp_path, f"a-ba{batch}", batch, {QUIZ: [1]}, run="runs/a")
        write_checkpoint(tmp_path, f"b-ba{batch}", batch, {QUIZ: [0]}, run="runs/b")
    write_checkpoint(tmp_path, "newest", 3, {QUIZ: [1]}, run="runs/b")
    write_checkpoint(tmp_path, "alone", 3, {QUIZ: [1]}, run="runs/c")
    write_result(tmp_path, "exported", {QUIZ: [1]}, save_id="sha256:1", num_tokens_trained=5)
    results, _ = read_folder(tmp_path)
    names_of_run = {run: [one.model for one in group] for run, group in group_by_run(results).items()}
    assert names_of_run == {"a": ["a-ba1", "a-ba2"], "c": ["alone"], "b": ["b-ba1", "b-ba2", "newest"]}
    assert [curve.run for curve in gather_curves(results).curves] == ["a", "b"]


def test_smoothing_takes_the_mean_of_the_last_checkpoints(tmp_path):
    for batch, bits in ((1, 1.0), (2, 2.0), (3, 6.0), (4, 3.0)):
        tasks = {HELD_OUT: text([[(1.0, 1)]], bits_per_byte=bits, bits_per_byte_stderr=bits / 10)}
        write_checkpoint(tmp_path, f"base-ba{batch}", batch, tasks)
    [curve] = gather(tmp_path).curves
    smoothed = smooth(curve, 2)
    assert [point.score for point in smoothed.points] == [1.0, 1.5, 4.0, 4.5]
    assert [point.error for point in smoothed.points] == pytest.approx([0.1, 0.15, 0.4, 0.45])
    assert [point.num_tokens for point in smoothed.points] == [100, 200, 300, 400]
    assert (curve.num_averaged, smoothed.num_averaged) == (1, 2)
