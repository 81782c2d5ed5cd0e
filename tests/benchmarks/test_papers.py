"""The papers' runs by the planner."""

from benchmarks.papers import frontier


def test_frontiers_runs_stand_beside_what_was_published(tmp_path):
    report = frontier.run(tmp_path)
    rates = {row["model"]: row for row in report["models"]}
    # The paper counts nominal parameters: 0.308, 2.45 and 14 TB.
    assert [round(row["state_tb"], 2) for row in rates.values()] == [0.31, 2.44, 14.11]
    # Strong scaling: each count of devices leaves less of the first one's rate.
    for model in frontier.COUNTS:
        left = [row["left"] for row in report["scaling"] if row["model"] == model]
        assert left[0] == 1 and left == sorted(left, reverse=True) and left[-1] < left[0]
    assert report["scaling"][-1]["batch_size"] == 7998  # six copies do not divide 8,000
    assert (tmp_path / "frontier.png").stat().st_size > 10_000
