"""The mean of islands' changes, without islands."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmfoundry_islands.block import SyncConfig
from llmfoundry_islands.tensors.changes import ReceivedChanges
from llmfoundry_islands.tensors.encoding import encode
from llmfoundry_islands.training.outer_weights import FragmentExchange, OuterWeights
from llmfoundry_lite.config.spans import Duration


def test_each_fragment_s_mean_is_weighted_by_what_islands_have_trained_it_on():
    """An island that has joined since the first fragment's last exchange has trained that one less."""
    mine = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([4.0])}
    theirs = {"a": torch.tensor([5.0, 6.0]), "b": torch.tensor([8.0])}
    departure = FragmentExchange(
        fragment_indices=[0, 1],
        place_of_parameter={"a": 0, "b": 1},
        weights=[3, 1],
        label=0,
        changes=mine,
        parts=mine,
        pieces=mine,
        encoded={key: encode(values.clone(), "fp32") for key, values in mine.items()},
        rounding_errors={},
    )
    departure.transfer = SimpleNamespace(unpack=lambda: ReceivedChanges({"other": [1.0, 1.0]}, {"other": theirs}))  # type: ignore[assignment]
    parts = {key: SimpleNamespace(name=key) for key in mine}
    held: Any = SimpleNamespace(parts=parts, completion=SimpleNamespace(apply=lambda *_: None))
    assert departure.take_mean(held, "own") == 2.0**2 + 3.0**2 + 6.0**2
    assert mine["a"].tolist() == [2.0, 3.0] and mine["b"].tolist() == [6.0]


def test_what_was_trained_while_a_fragment_travelled_counts_in_its_next_exchange():
    outer = OuterWeights.__new__(OuterWeights)
    outer.sync, outer.rounding_errors = SyncConfig(every=Duration(4, "ba")), {}
    outer.fragments, outer.pending_weights = [{"a"}, {"b"}], [5, 7]
    departure: Any = SimpleNamespace(fragment_indices=[0], weights=[3], label=1, changes={}, rounding_errors={})
    assert not outer.finish_exchange(departure, label=2)
    assert outer.pending_weights == [2, 7]


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_what_rounding_drops_is_sent_with_later_changes(monkeypatch, dtype):
    """Of a change that rounding cuts off in every round, no more than one rounding is missing after 64 rounds."""
    monkeypatch.setattr(FragmentExchange, "begin", lambda *arguments: None)
    weights = torch.nn.Parameter(torch.zeros(2))
    change = torch.tensor([1.0, 1 / 1000])  # int8: the second is less than a step of 1 / 127
    change[0] += 2.0**-10  # bf16: less than half a step of 1 / 128
    outer = OuterWeights.__new__(OuterWeights)
    outer.sync = SyncConfig(every=Duration(1, "ba"), dtype=dtype, lr=1.0, momentum=0.0)
    outer.held = SimpleNamespace(parameters={"w": weights}, pieces={}, views=lambda changes: (changes, changes))  # type: ignore[assignment]
    outer.fragments, outer.rounding_errors, outer.velocity = [["w"]], {}, {"w": torch.zeros(2)}
    outer.copy_weights()

    sent = torch.zeros(2)
    for label in range(64):
        with torch.no_grad():
            weights -= change
        departure = outer.begin_exchange([0], None, label)  # type: ignore[arg-type]
        sent += departure.encoded["w"].values
        outer.finish_exchange(departure, label)

    step = {"bf16": 2.0**-7, "int8": 1.1 / 127}[dtype]
    assert (sent - 64 * change).abs().max() <= step / 2
