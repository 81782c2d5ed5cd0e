"""Exchanges between ranks, without a process group."""

from llmfoundry_lite.ranks import exchange
from llmfoundry_lite.ranks.exchange import all_gather_distinct


def test_each_distinct_value_is_told_by_a_rank_that_has_it(monkeypatch):
    """Ranks 0 and 2 pass 1, rank 1 passes 7."""
    values = [1, 7, 1]
    monkeypatch.setattr(exchange, "all_gather_bytes", lambda raw: [bytes([value]) for value in values])
    monkeypatch.setattr(exchange, "broadcast_json", lambda value, *, source: values[source])
    assert all_gather_distinct(1) == [(1, [0, 2]), (7, [1])]
