"""Exchanges between ranks, without a process group."""

import pytest

from llmfoundry_lite.errors import CheckpointError, ConfigError
from llmfoundry_lite.ranks import exchange
from llmfoundry_lite.ranks.exchange import all_gather_distinct


def test_each_distinct_value_is_told_by_a_rank_that_has_it(monkeypatch):
    """Ranks 0 and 2 pass 1, rank 1 passes 7."""
    values = [1, 7, 1]
    monkeypatch.setattr(exchange, "all_gather_bytes", lambda raw: [bytes([value]) for value in values])
    monkeypatch.setattr(exchange, "broadcast_json", lambda value, *, source: values[source])
    assert all_gather_distinct(1) == [(1, [0, 2]), (7, [1])]


@pytest.mark.parametrize("code", ["ExpiredToken", "AccessDenied"])
def test_refused_credentials_of_one_rank_are_known_to_all(monkeypatch, code):
    """Else one rank would go on after a failed save, and another would end."""
    answer = OSError("refused")
    answer.response = {"Error": {"Code": code}}  # type: ignore[attr-defined]
    theirs = CheckpointError("s3://b/ba4: not written")
    theirs.__cause__ = answer
    told = []
    monkeypatch.setattr(exchange, "all_reduce_max", lambda values: [1])
    monkeypatch.setattr(exchange, "rank_and_size", lambda: (1, 2))
    monkeypatch.setattr(exchange, "all_gather_json", lambda report: told.append(report) or [None, report])
    with pytest.raises(CheckpointError):
        exchange.raise_on_all_ranks(theirs)
    monkeypatch.setattr(exchange, "rank_and_size", lambda: (0, 2))
    monkeypatch.setattr(exchange, "all_gather_json", lambda report: [report, told[0]])
    with pytest.raises(CheckpointError) as caught:
        exchange.raise_on_all_ranks(None)
    assert caught.value.needs_credentials
    assert (str(caught.value), caught.value.is_transient) == (str(theirs), theirs.is_transient)


@pytest.mark.parametrize(
    ("own_error", "raised"),
    [
        (None, "rank 0 cannot read it"),
        (CheckpointError("rank 1 cannot read it either"), "rank 0 cannot read it"),
        (ConfigError("rank 1 has another configuration"), "rank 1 has another configuration"),
    ],
)
def test_a_checkpoint_error_of_the_first_rank_is_raised_in_the_same_words(monkeypatch, own_error, raised):
    """So it is printed once. An error of another kind is a rank's own."""
    told = []
    monkeypatch.setattr(exchange, "all_reduce_max", lambda values: [1])
    monkeypatch.setattr(exchange, "rank_and_size", lambda: (0, 2))
    monkeypatch.setattr(exchange, "all_gather_json", lambda report: told.append(report) or [report, None])
    with pytest.raises(CheckpointError):
        exchange.raise_on_all_ranks(CheckpointError("rank 0 cannot read it"))
    monkeypatch.setattr(exchange, "rank_and_size", lambda: (1, 2))
    monkeypatch.setattr(exchange, "all_gather_json", lambda report: [told[0], report])
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        exchange.raise_on_all_ranks(own_error)
    assert str(caught.value) == raised
