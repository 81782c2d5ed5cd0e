"""Times that an island tells the coordinator, which divides rows by them."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmfoundry_islands.coordination.member import Disconnection, View
from llmfoundry_islands.tensors.summing import SumPlan
from llmfoundry_islands.training.islands import Islands
from llmfoundry_lite.ranks.codec import encode_value
from llmfoundry_lite.ranks.ending import Preempted
from llmfoundry_lite.training.agreement import BatchCounts

SECONDS = 0.2
"""Time that a device needs for a batch, after the host has launched all of it."""


@pytest.fixture
def device_behind_the_host(monkeypatch):
    """Behave like a GPU: kernels launch at once, and end when somebody waits for them."""
    busy_until = [0.0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: time.sleep(max(0.0, busy_until[0] - time.monotonic())))
    return busy_until


def test_an_island_s_seconds_are_its_device_s_and_not_those_of_launching(device_behind_the_host):
    sent: list[dict[str, Any]] = []
    view = View(1, 0, {"a": "x"}, {"a": range(2)}, "a", "", [], {})
    islands: Any = object.__new__(Islands)
    islands.__dict__.update(
        run=SimpleNamespace(
            counts=BatchCounts(True, 2, 20, 18, 2, 7), batch=0, is_exact=False, drop_gradient=lambda: None
        ),
        by_tokens=True,
        exchange=SimpleNamespace(overlaps={}, num_bytes=0),
        plan=SumPlan("a", {}, [], False),
        rank=0,
        view=view,
        num_repeats=0,
        weights_digest="",
        member=SimpleNamespace(send=sent.append, phase="compute"),
        _exchange=lambda *_: ({"ok": True}, 0),
        _receive_decision=lambda: {**view.as_message(), "epoch": 2},
        _begin_view=lambda *_: None,
    )
    device_behind_the_host[0] = time.monotonic() + SECONDS / 2  # the batch before
    islands.begin_batch()
    device_behind_the_host[0] = time.monotonic() + SECONDS
    assert not islands.exchange_gradient(torch.zeros(()))
    assert SECONDS / 2 < sent[0]["seconds"] < 50 * SECONDS
    assert sent[0]["seconds"] >= 0.99 * SECONDS
    assert sent[0]["weight"] == 18, "tokens with a loss, not rows"


def test_an_island_that_is_lost_at_a_batch_s_end_leaves_after_that_batch_is_recorded():
    """A save before would carry a log that lacks it."""

    def describe(name, launch):
        raise ConnectionError("nothing is known")

    view = View(1, 0, {"a": "x"}, {"a": range(2)}, "a", "", [], {})
    islands: Any = object.__new__(Islands)
    islands.__dict__.update(
        name="a",
        rank=0,
        view=view,
        next_view=view._replace(epoch=2, members={"a": "x", "b": "y"}),
        member=SimpleNamespace(describe=describe, disconnection=Disconnection("the coordinator is gone", "gone")),
        _save_before_leaving=lambda reason: f"{reason}; saved",
    )
    assert islands.end_batch() is None and islands.view == view and islands.writes_checkpoints
    with pytest.raises(Preempted, match="the coordinator is gone; saved"):
        islands._begin_view(islands.next_view)


def test_an_island_that_puts_a_state_in_place_computes_and_waits_for_nobody():
    """That may take a host longer than a link may be silent."""
    phases, member = [], SimpleNamespace(phase="compute")
    islands: Any = object.__new__(Islands)

    def take(*_):
        member.phase = "compute"  # as `_note_transfer` leaves it
        return {}

    told = {"kinds": {"": []}, "optimizer": encode_value({}), "scalars": encode_value({}), "segments": []}
    islands.__dict__.update(
        member=member,
        view=View(2, 1, {"a": "x", "b": "y"}, {}, "a", "a", ["b"], {}),
        held=SimpleNamespace(pieces_with=lambda _: {}, write_state=lambda *_: phases.append(member.phase)),
        exchange=SimpleNamespace(receive_pieces=take),
        run=SimpleNamespace(restore_state=lambda _: phases.append(member.phase)),
        _receive_decision=lambda: {"kind": "state", "state": told},
    )
    islands._receive_state()
    assert phases == ["compute"] * 2
