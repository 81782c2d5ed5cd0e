"""Tensors between ranks of islands with unlike sharding, in threads of one process."""

import socket
import struct
import time
from contextlib import ExitStack, suppress

import numpy as np
import pytest
import torch
import torch.distributed as dist

from llmfoundry_islands.tensors import exchange
from llmfoundry_islands.tensors.boxes import Box, Redistribution, divide_replicas
from llmfoundry_islands.tensors.exchange import Exchange
from llmfoundry_islands.tests.ranks import BOXES, SECRET, SHARDED, WHOLE, Rank, at_once, gradients
from llmfoundry_islands.tests.world import no_more_files
from llmfoundry_lite import devices
from llmfoundry_lite.checkpoint.state_digest import sum_keyed


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
    assert divide_replicas(SHARDED) == SHARDED
    first, second = divide_replicas([WHOLE, WHOLE])
    assert (first["blocks.0.w"], second["blocks.0.w"]) == (Box((0, 0), (3, 3)), Box((3, 0), (4, 3)))
    assert divide_replicas([WHOLE] * 9)[0]["b"].size == 0, "fewer rows than copies"


def test_the_digest_of_pieces_is_that_of_the_whole():
    def digest(boxes_of_ranks):
        pieces = [(name, piece) for boxes in divide_replicas(boxes_of_ranks) for name, piece in boxes.items()]
        parts = [(name, tensors[name][piece.slices_in(WHOLE[name])], piece.offset) for name, piece in pieces]
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
            rank.exchange.send_pieces(rank.cut(gradients(5)), rank.pieces, ["c"], 1)
        elif rank.island == "c":
            return rank, rank.exchange.receive_pieces(rank.pieces, "b", 1)
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


def meet(listening, dialling) -> None:
    """Rank b, the later by name, dials rank a."""

    def work(rank):
        rank.pieces = WHOLE
        rank.meet(1, [listening, dialling])
        rank.exchange._connection_to(next(iter(rank.exchange.overlaps)))

    at_once(work, [listening, dialling])


@pytest.fixture
def pair(monkeypatch):
    monkeypatch.setitem(BOXES, "a", [WHOLE])
    pair = [Rank("a", 0), Rank("b", 0)]
    yield pair
    for rank in pair:
        rank.exchange.close()


def test_a_crowd_of_slow_strangers_keeps_no_peer_out(pair, monkeypatch):
    """They come from this host, as the peer does: the oldest are dropped."""
    monkeypatch.setattr(pair[0].exchange._strangers, "max_connections", 4)
    with ExitStack() as stack:
        crowd = [stack.enter_context(socket.create_connection(pair[0].exchange.address)) for _ in range(12)]
        meet(*pair)
        for slow in crowd[:8]:
            while slow.recv(4096):
                pass  # the challenge, then the end


def test_a_handshake_has_one_deadline_however_slowly_its_bytes_come():
    listening = Exchange("a", 0, "127.0.0.1", SECRET, handshake_seconds=0.3)
    with socket.create_connection(listening.address) as slow:
        assert slow.recv(4096), "the challenge"
        slow.settimeout(0.02)
        num_sent = 0
        with suppress(ConnectionError):
            for byte in struct.pack("!I", 200) + b"x" * 200:
                slow.sendall(bytes([byte]))
                num_sent += 1
                with suppress(TimeoutError):
                    if not slow.recv(4096):
                        break
        assert num_sent < 100, "one in 0.02 s, for 0.3 s"
    listening.close()


def test_a_listener_outlives_a_time_without_files_and_says_so_once(pair, monkeypatch, capfd):
    tries: list[OSError] = []
    describe = exchange.describe_refusal
    monkeypatch.setattr(exchange, "describe_refusal", lambda error: (tries.append(error), describe(error))[1])
    monkeypatch.setattr(exchange, "ACCEPT_PAUSE_SECONDS", 0.01)
    with no_more_files() as refused:
        refused.connect(pair[0].exchange.address)
        said = ""
        while "cannot accept connections" not in said:
            said += capfd.readouterr().err
        tried = len(tries)
        while len(tries) < tried + 10:
            time.sleep(0.01)
    meet(*pair)
    assert "islands: cannot accept connections: Too many open files; those that are open go on" in said
    assert len((said + capfd.readouterr().err).splitlines()) <= 2, "one of each rank"


def test_copies_of_an_offloaded_parameter_are_completed_on_their_devices(monkeypatch):
    """NCCL takes nothing that lies on a host."""
    sent = []
    monkeypatch.setattr(devices, "device_type", lambda: "meta")
    monkeypatch.setattr(dist, "all_to_all_single", lambda received, flat, *_: sent.append((flat.device, len(flat))))
    monkeypatch.setattr(torch.Tensor, "copy_", lambda place, values: place)  # nothing is copied back
    whole = [{"w": WHOLE["blocks.0.w"]}] * 2
    pieces = divide_replicas(whole)
    part = {"w": torch.zeros(3, 3)}
    Redistribution(pieces, whole, rank=0).apply(part, {"w": torch.zeros(7, 3)}, torch.float32)
    assert sent == [(torch.device("meta"), 9)]
