"""Tensors between ranks of islands with unlike sharding, in threads of one process."""

import socket

import numpy as np
import pytest
import torch
import torch.distributed as dist

from llmfoundry_lite import devices
from llmfoundry_lite.checkpoint.state_digest import sum_keyed
from llmfoundry_lite.islands.boxes import Box, Redistribution, share_out
from tests.islands.ranks import BOXES, SHARDED, WHOLE, Rank, at_once, gradients


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_ranks_may_have_addresses_of_ipv6(monkeypatch):
    pair = [Rank("a", 0, "::1"), Rank("b", 0, "::1")]
    shapes = {name: box.lengths for name, box in WHOLE.items()}
    with monkeypatch.context() as patch:
        patch.setitem(BOXES, "a", [WHOLE])

        def work(rank):
            rank.pieces = WHOLE
            rank.meet(1, pair)
            sent = {name: torch.full(shape, 1.0 + (rank.island == "b")) for name, shape in shapes.items()}
            return rank.sum(sent).sums

        for sums in at_once(work, pair):
            assert sums["blocks.0.w"].unique().tolist() == [1.5]
    for rank in pair:
        rank.exchange.close()


def test_copies_divide_a_box_and_shards_keep_theirs():
    assert share_out(SHARDED) == SHARDED
    first, second = share_out([WHOLE, WHOLE])
    assert (first["blocks.0.w"], second["blocks.0.w"]) == (Box((0, 0), (3, 3)), Box((3, 0), (4, 3)))
    assert share_out([WHOLE] * 9)[0]["b"].size == 0, "fewer rows than copies"


def test_the_digest_of_pieces_is_that_of_the_whole():
    def digest(boxes_of_ranks):
        pieces = [(name, piece) for boxes in share_out(boxes_of_ranks) for name, piece in boxes.items()]
        parts = [(name, tensors[name][piece.within(WHOLE[name])], piece.offset) for name, piece in pieces]
        return sum(sum_keyed(*part, WHOLE[part[0]].lengths) for part in parts) % 2**64

    tensors = gradients(1)
    before = digest(BOXES["a"])
    assert {digest(boxes) for boxes in BOXES.values()} == {before}
    tensors["blocks.0.w"][6, 2] = torch.nextafter(tensors["blocks.0.w"][6, 2], torch.tensor(9.0))
    assert digest(BOXES["b"]) != before


def test_one_island_s_state_goes_to_another(ranks):
    def work(rank):
        rank.meet(3, ranks)
        if rank.island == "b":
            rank.exchange.give(rank.cut(gradients(5)), rank.pieces, ["c"], 1)
        elif rank.island == "c":
            return rank, rank.exchange.take(rank.pieces, "b", 1)
        return None

    found = list(filter(None, at_once(work, ranks)))
    assert found
    for rank, taken in found:
        whole = rank.cut(gradients(5))
        assert taken.keys() == whole.keys()
        assert all(torch.equal(values, whole[name]) for name, values in taken.items())


def test_noise_from_strangers_changes_nothing(ranks):
    chance = np.random.default_rng(0)
    for rank in ranks:
        for size in (0, 3, 50, 700):
            with socket.create_connection(rank.exchange.address) as stranger:
                stranger.sendall(chance.bytes(size))
    test_one_island_s_state_goes_to_another(ranks)


def test_copies_of_an_offloaded_parameter_are_completed_on_their_devices(monkeypatch):
    """NCCL takes nothing that lies on a host."""
    sent = []
    monkeypatch.setattr(devices, "device_type", lambda: "meta")
    monkeypatch.setattr(dist, "all_to_all_single", lambda received, flat, *_: sent.append((flat.device, len(flat))))
    monkeypatch.setattr(torch.Tensor, "copy_", lambda place, values: place)  # nothing comes back from there
    whole = [{"w": WHOLE["blocks.0.w"]}] * 2
    pieces = share_out(whole)
    part = {"w": torch.zeros(3, 3)}
    Redistribution(pieces, whole, rank=0).apply(part, {"w": torch.zeros(7, 3)}, torch.float32)
    assert sent == [(torch.device("meta"), 9)]
