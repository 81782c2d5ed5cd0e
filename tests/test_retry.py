"""A budget of attempts is used up by their number, or by time."""

from llmfoundry_lite.retry import Budget


def test_so_many_attempts_with_their_pauses_and_no_more():
    budget = Budget((0.2, 0.6), attempts=3)
    assert [budget.pause() for _ in range(5)] == [0.2, 0.6, 0.6, None, None]
    assert Budget((), attempts=0).pause() is None


def test_time_cuts_the_last_pause_short():
    budget = Budget((1.0, 10.0), seconds=60.0, began=100.0)
    assert [budget.pause(now) for now in (100.0, 120.0, 155.0, 160.0)] == [1.0, 10.0, 5.0, None]
