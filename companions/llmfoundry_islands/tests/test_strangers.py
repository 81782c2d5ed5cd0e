"""How many connections without a token a listener keeps, and how often it speaks of them."""

from llmfoundry_islands.coordination import strangers
from llmfoundry_islands.coordination.strangers import Strangers, ThrottledLog


def test_one_too_many_drops_the_oldest_of_the_host_that_has_most():
    here = Strangers[int](3)
    assert [here.add(number, host) for number, host in enumerate(["peer", "crowd", "crowd"])] == [None] * 3
    assert [here.add(number, "crowd") for number in (3, 4)] == [1, 2]
    assert here.remove(0) and not here.remove(1)


def test_a_process_that_may_open_few_files_keeps_fewer(monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda kind: (8, 8))
    assert Strangers[int](1024).max_connections == 4


def test_a_flood_is_one_line_and_then_a_count(monkeypatch):
    said: list[str] = []
    now = [0.0]
    monkeypatch.setattr(strangers.time, "monotonic", lambda: now[0])
    remark = ThrottledLog(said.append)
    for _ in range(1000):
        remark("refused")
    now[0] = strangers.REMARK_SECONDS
    remark("refused")
    assert said == ["refused", "refused (and 999 more since the last such line)"]
