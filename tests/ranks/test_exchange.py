"""Exchanges between ranks, with and without a process group."""

import json

import pytest

from llmfoundry_lite.errors import CheckpointError, ConfigError, DataError, TransientError, UserError
from llmfoundry_lite.ranks import exchange
from llmfoundry_lite.ranks.exchange import all_gather_distinct, raise_on_all_ranks, rank_and_size
from llmfoundry_lite.ranks.start import start_process_group
from tests.helpers.launch import launch


def test_each_distinct_value_is_told_by_a_rank_that_has_it(monkeypatch):
    """Ranks 0 and 2 pass 1, rank 1 passes 7."""
    values = [1, 7, 1]
    monkeypatch.setattr(exchange, "all_gather_bytes", lambda raw: [bytes([value]) for value in values])
    monkeypatch.setattr(exchange, "broadcast_json", lambda value, *, source: values[source])
    assert all_gather_distinct(1) == [(1, [0, 2]), (7, [1])]


@pytest.mark.parametrize("code", ["ExpiredToken", "AccessDenied", "EACCES"])
def test_refused_credentials_of_one_rank_are_known_to_all(monkeypatch, code):
    """Else one rank would go on after a failed save, and another would end. EACCES is this machine's refusal."""
    answer = PermissionError("refused") if code == "EACCES" else OSError("refused")
    if code != "EACCES":
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
    assert (caught.value.needs_credentials, caught.value.lacks_permission) == (code != "EACCES", code == "EACCES")
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


def transient(kind, text):
    error = kind(text)
    error.__cause__ = TransientError(text)
    return error


FAULTS = {
    "nowhere": {},
    "may pass": {1: transient(CheckpointError, "a disk is full")},
    "lasts": {1: ConfigError("a key is misspelt")},
    "a bug": {1: KeyError("loss")},
    "on two ranks": {1: CheckpointError("ba4 is damaged"), 2: transient(CheckpointError, "ba4 cannot be read")},
    "another on a later rank": {1: transient(CheckpointError, "a disk is full"), 2: DataError("a shard is missing")},
    "an error of a library": {2: type("BucketError", (UserError,), {})("no such bucket")},
}
"""Where an error is met -> the errors, by rank."""
EXPECTED = {
    "nowhere": [None] * 3,
    "may pass": [["CheckpointError", "a disk is full", True]] * 3,
    "lasts": [["ConfigError", "a key is misspelt", False]] * 3,
    "a bug": [
        ["CheckpointError", "rank 1: KeyError: 'loss'", False],
        ["KeyError", "'loss'", None],
        ["CheckpointError", "rank 1: KeyError: 'loss'", False],
    ],
    "on two ranks": [["CheckpointError", "ba4 is damaged", False]] * 3,
    "another on a later rank": [
        *[["CheckpointError", "a disk is full", True]] * 2,
        ["DataError", "a shard is missing", False],
    ],
    "an error of a library": [
        *[["CheckpointError", "rank 2: BucketError: no such bucket", False]] * 2,
        ["BucketError", "no such bucket", False],
    ],
}
"""What each of three ranks raises: its class, its text, and whether it may pass."""


def tell_each_other() -> None:
    start_process_group("cpu", 60.0)
    raised = {}
    for name, errors in FAULTS.items():
        try:
            raise_on_all_ranks(errors.get(rank_and_size()[0]))
            raised[name] = None
        except Exception as error:
            raised[name] = [type(error).__name__, str(error), getattr(error, "is_transient", None)]
    print(json.dumps(raised))


@pytest.mark.multiprocess
def test_all_ranks_raise_the_first_rank_s_error_and_know_whether_it_may_pass(tmp_path):
    """One rank that retries while another ends would wait for it."""
    outputs = launch(tell_each_other, (), tmp_path, 3).check().outputs
    raised = [json.loads(output) for output in outputs]
    assert {name: [rank[name] for rank in raised] for name in FAULTS} == EXPECTED
