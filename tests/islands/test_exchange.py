"""Tensors between ranks of islands with unlike sharding, in threads of one process."""

import math
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate

from llmfoundry_lite.checkpoint.state_digest import sum_keyed
from llmfoundry_lite.islands import exchange as exchange_module
from llmfoundry_lite.islands.boxes import Box, complete, share_out
from llmfoundry_lite.islands.exchange import Exchange, Ranks, sum_weighted
from tests.helpers.devices import offloaded

SECRET = b"0123456789abcdef"
WHOLE = {"w": Box((0, 0), (7, 3)), "b": Box((0,), (5,))}
SHARDED = [
    {"w": Box((0, 0), (4, 3)), "b": Box((0,), (3,))},
    {"w": Box((4, 0), (3, 3)), "b": Box((3,), (2,))},
]
BOXES = {"a": SHARDED, "b": [WHOLE], "c": [WHOLE, WHOLE]}
"""Islands of two shards, of one rank, and of two copies."""


class Rank:
    def __init__(self, island, rank, host="127.0.0.1"):
        self.island, self.rank = island, rank
        self.exchange = Exchange(island, rank, host, SECRET)
        self.pieces = share_out(BOXES[island])[rank]

    def meet(self, epoch, ranks):
        others = {}
        for name in sorted({other.island for other in ranks} - {self.island}):
            addresses = [other.exchange.address for other in ranks if other.island == name]
            others[name] = Ranks(addresses, share_out(BOXES[name]))
        self.exchange.meet(epoch, self.pieces, others)

    def cut(self, tensors):
        return {name: tensors[name][piece.within(WHOLE[name])] for name, piece in self.pieces.items()}


@pytest.fixture
def ranks():
    ranks = [Rank(island, rank) for island, boxes in BOXES.items() for rank in range(len(boxes))]
    yield ranks
    for rank in ranks:
        rank.exchange.close()


def at_once(function, ranks):
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [future.result(30) for future in [pool.submit(function, rank) for rank in ranks]]


def gradients(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(box.lengths, generator=generator) for name, box in WHOLE.items()}


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
            return rank.exchange.swap(sent, rank.pieces, 64, 1.0).tensors

        first, second = at_once(work, pair)
    assert first["b"]["w"].unique().tolist() == [2.0] and second["a"]["w"].unique().tolist() == [1.0]
    for rank in pair:
        rank.exchange.close()


def test_copies_divide_a_box_and_shards_keep_theirs():
    assert share_out(SHARDED) == SHARDED
    first, second = share_out([WHOLE, WHOLE])
    assert (first["w"], second["w"]) == (Box((0, 0), (3, 3)), Box((3, 0), (4, 3)))
    assert share_out([WHOLE] * 9)[0]["b"].size == 0, "fewer rows than copies"


def test_all_islands_come_to_the_same_bits(ranks):
    of_island = {"a": gradients(1), "b": gradients(2), "c": gradients(3)}
    tokens = {"a": 1000.0, "b": 37.0, "c": 501.0}
    shares = {name: count / sum(tokens.values()) for name, count in tokens.items()}

    def work(rank):
        rank.meet(1, ranks)
        mine = rank.cut(of_island[rank.island])
        swapped = rank.exchange.swap(mine, rank.pieces, 64, tokens[rank.island])
        assert {**swapped.weights, rank.island: tokens[rank.island]} == tokens
        return {
            name: sum_weighted(
                values, rank.island, {other: swapped.tensors[other][name] for other in swapped.tensors}, shares
            )
            for name, values in mine.items()
        }

    found = at_once(work, ranks)
    for name in WHOLE:
        parts = [(of_island[i][name] * torch.tensor(shares[i], dtype=torch.float32)) for i in ("a", "b", "c")]
        expected = (parts[0] + parts[1]) + parts[2]
        for rank, sums in zip(ranks, found, strict=True):
            assert torch.equal(sums[name], expected[rank.pieces[name].within(WHOLE[name])])


def test_each_number_travels_once_each_way_between_two_islands(ranks):
    def work(rank):
        rank.meet(1, ranks)
        rank.exchange.swap(rank.cut(gradients(0)), rank.pieces, 0, 1.0)

    at_once(work, ranks)
    size = sum(box.size for box in WHOLE.values())
    pairs = math.comb(3, 2)
    assert sum(rank.exchange.num_bytes for rank in ranks) == pairs * 2 * 2 * 4 * size, "sent and received"


def test_the_digest_of_pieces_is_that_of_the_whole():
    def digest(boxes_of_ranks):
        pieces = [(name, piece) for boxes in share_out(boxes_of_ranks) for name, piece in boxes.items()]
        parts = [(name, tensors[name][piece.within(WHOLE[name])], piece.offset) for name, piece in pieces]
        return sum(sum_keyed(*part, WHOLE[part[0]].lengths) for part in parts) % 2**64

    tensors = gradients(1)
    before = digest(BOXES["a"])
    assert {digest(boxes) for boxes in BOXES.values()} == {before}
    tensors["w"][6, 2] = torch.nextafter(tensors["w"][6, 2], torch.tensor(9.0))
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


def test_a_rank_that_waits_for_a_peer_is_freed_by_a_newer_epoch(ranks):
    waiting = ranks[0]
    waiting.meet(1, [ranks[0], ranks[1], ranks[2]])
    with ThreadPoolExecutor(1) as pool:
        swapped = pool.submit(waiting.exchange.swap, waiting.cut(gradients(1)), waiting.pieces, 0, 1.0)
        waiting.exchange.abort(2)
        with pytest.raises(OSError, match="newer epoch"):
            swapped.result(10)


def test_only_the_time_in_which_sockets_wait_for_a_peer_is_said_to_be_a_transfer(ranks, monkeypatch):
    """What the host does before and after may take longer than a link may be silent."""
    pair = ranks[2:4]
    first = pair[0]
    is_transferring, waits, during = {}, threading.Event(), []
    gather, scatter = exchange_module._gather, exchange_module._scatter

    def note(transfers):
        is_transferring[threading.get_ident()] = transfers
        if transfers:
            waits.set()

    def watched(work):
        def call(*arguments):
            during.append(is_transferring.get(threading.get_ident(), False))
            return work(*arguments)

        return call

    monkeypatch.setattr(exchange_module, "_gather", watched(gather))
    monkeypatch.setattr(exchange_module, "_scatter", watched(scatter))
    for rank in pair:
        rank.exchange.on_transfer = note
        rank.meet(1, ranks[2:])
    with ThreadPoolExecutor(2) as pool:
        swaps = [pool.submit(first.exchange.swap, first.cut(gradients(1)), first.pieces, 0, 1.0)]
        assert waits.wait(10)
        assert list(is_transferring.values()) == [True], "its peer has not begun"
        ranks[4].meet(1, ranks[2:])
        swaps += [pool.submit(rank.exchange.swap, rank.cut(gradients(2)), rank.pieces, 0, 1.0) for rank in ranks[3:]]
        assert all(swap.result(10).tensors for swap in swaps)
    assert len(during) >= 4 and not any(during)
    assert set(is_transferring.values()) == {False}


def test_another_batch_s_tensors_are_not_taken(ranks):
    def work(rank):
        rank.meet(1, ranks[:3])
        try:
            rank.exchange.swap(rank.cut(gradients(1)), rank.pieces, 64 * (rank.island == "b"), 1.0)
        except OSError as error:
            return error

    assert all(isinstance(error, OSError) for error in at_once(work, ranks[:3]))


def test_a_peer_that_does_not_answer_is_an_error_of_the_first_exchange(ranks):
    ranks[0].exchange.close()
    ranks[2].meet(1, ranks[:3])
    with pytest.raises(OSError):
        ranks[2].exchange.swap(ranks[2].cut(gradients(1)), ranks[2].pieces, 0, 1.0)


def test_noise_from_strangers_changes_nothing(ranks):
    chance = np.random.default_rng(0)
    for rank in ranks:
        for size in (0, 3, 50, 700):
            with socket.create_connection(rank.exchange.address) as stranger:
                stranger.sendall(chance.bytes(size))
    test_all_islands_come_to_the_same_bits(ranks)


def test_copies_of_an_offloaded_parameter_are_completed_on_their_devices(monkeypatch):
    """NCCL takes nothing that lies on a host."""
    devices = []
    monkeypatch.setattr(dist, "all_reduce", lambda flat, group: devices.append(flat.device.type))
    with offloaded((7, 3), Replicate()) as parameter:
        complete({"w": parameter}, {"w": parameter.to_local()}, {"w": Box((0, 0), (4, 3))}, {"w": WHOLE["w"]})
    assert devices == ["cuda"]


def test_exact_sums_travel_in_float64_and_with_every_bit(ranks):
    """An element that fp32 cannot hold: 2^6 and the grid's last bit."""
    sums = {name: torch.full(box.lengths, 2.0**6 + 2.0**-46, dtype=torch.float64) for name, box in WHOLE.items()}

    def work(rank):
        rank.meet(1, ranks)
        return rank.exchange.swap(rank.cut(sums), rank.pieces, 0, 1.0, torch.float64).tensors

    for rank, found in zip(ranks, at_once(work, ranks), strict=True):
        assert {*found} == {*BOXES} - {rank.island}
        for tensors in found.values():
            assert all(torch.equal(values, rank.cut(sums)[name]) for name, values in tensors.items())
