"""The sum of a gradient over islands of unlike sharding, all to all and with owners, in threads of one process."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch

from llmfoundry_islands.coordination.owners import PARTS, divide_rows
from llmfoundry_islands.tensors import summing as module
from llmfoundry_islands.tensors.packing import pack_sums
from llmfoundry_islands.tensors.summing import SumPlan, divide_into_buckets
from llmfoundry_islands.tests.ranks import WHOLE, at_once, gradients, make_ranks

OWNERS = [{}, {"a": 20, "b": 20, "c": 24}, {"a": PARTS, "b": 0, "c": 0}, {"a": 0, "b": 63, "c": 1}]
TOKENS = {"a": 1000.0, "b": 37.0, "c": 501.0}


@pytest.mark.parametrize("shares", OWNERS)
def test_all_islands_come_to_the_same_bits_whoever_adds_up(ranks, shares):
    of_island = {"a": gradients(1), "b": gradients(2), "c": gradients(3)}
    parts = {name: count / sum(TOKENS.values()) for name, count in TOKENS.items()}

    def work(rank):
        rank.meet(1, ranks, shares)
        return rank.sum(rank.cut(of_island[rank.island]), weight=TOKENS[rank.island])

    found = at_once(work, ranks)
    for name in WHOLE:
        products = [of_island[i][name] * torch.tensor(parts[i], dtype=torch.float32) for i in ("a", "b", "c")]
        expected = (products[0] + products[1]) + products[2]
        for rank, summing in zip(ranks, found, strict=True):
            assert torch.equal(summing.sums[name], expected[rank.pieces[name].slices_in(WHOLE[name])])
    assert {summing.total_weight for summing in found} == {sum(TOKENS.values())}


@pytest.mark.parametrize("shares", OWNERS)
def test_exact_sums_travel_with_every_bit(ranks, shares):
    """An element that fp32 cannot hold: 2^4 and the grid's last bit."""
    sums = {name: torch.full(box.lengths, 2.0**4 + 2.0**-46, dtype=torch.float64) for name, box in WHOLE.items()}

    def work(rank):
        rank.meet(1, ranks, shares)
        return rank.sum(rank.cut(sums), is_exact=True).sums

    for rank, found in zip(ranks, at_once(work, ranks), strict=True):
        assert all(torch.equal(values, 3 * rank.cut(sums)[name]) for name, values in found.items())


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("num_islands", [2, 3, 4])
def test_islands_send_what_the_formula_says(num_islands, is_exact):
    """Bytes sent by each island: its gradient to the owners, and the sums that it owns to the n - 1 others."""
    ranks = make_ranks({name: [WHOLE] * (1 + (name == "b")) for name in "abcd"[:num_islands]})
    islands = sorted({rank.island for rank in ranks})
    shares = {"a": 32, "b": 32, "c": 0, "d": 0} if num_islands > 2 else {}
    shares = {name: part for name, part in shares.items() if name in islands}
    values = {name: tensor.sign().mul(2.0**-28).double() for name, tensor in gradients(1).items()}

    def work(rank):
        rank.meet(1, ranks, shares)
        rank.sum(rank.cut(values), is_exact=is_exact)
        return rank.exchange.num_bytes

    found = dict.fromkeys(islands, 0)
    for rank, count in zip(ranks, at_once(work, ranks), strict=True):
        found[rank.island] += count
        rank.exchange.close()
    count = sum(box.size for box in WHOLE.values())
    for name in islands:
        rows = {key: divide_rows(range(box.lengths[0]), shares).get(name, range(0)) for key, box in WHOLE.items()}
        owned = sum(len(some) * (WHOLE[key].size // WHOLE[key].lengths[0]) for key, some in rows.items())
        sent = count - owned + (num_islands - 1) * owned if shares else (num_islands - 1) * count
        if not is_exact:
            assert found[name] == 2 * 4 * sent, "sent and received"
        else:  # 2^18 units take 3 bytes, and each message has a byte for each chunk
            assert 2 * 3 * sent < found[name] < 2 * 3 * sent + 40 * num_islands


def test_a_bucket_leaves_when_its_last_gradient_is_there_and_before_the_others(ranks):
    pair = ranks[2:4]  # b, and one of c's two copies
    added, whole = threading.Event(), gradients(1)
    for rank in pair:
        rank.meet(1, ranks[2:])
    ranks[4].meet(1, ranks[2:])
    first, *others = [rank.begin() for rank in ranks[2:]]
    write = first._write

    def note(flat, boxes):
        write(flat, boxes)
        if "blocks.1.w" in boxes:
            added.set()

    first._write = note
    for summing, rank in zip((first, *others), ranks[2:], strict=True):
        summing.put("blocks.1.w", rank.cut(whole)["blocks.1.w"])
    assert added.wait(10), "before any rank waits"
    at_once(lambda one: one[0].wait(one[1].cut(whole)), list(zip((first, *others), ranks[2:], strict=True)))
    assert first.sums.keys() == WHOLE.keys()


@pytest.mark.parametrize("shares", [{}, {"a": 30, "b": 30, "p": 4}])
def test_ranks_that_hold_some_tensors_alone_as_stages_of_a_pipeline_do_exchange_those(shares):
    stages = [{"blocks.0.w": WHOLE["blocks.0.w"], "b": WHOLE["b"]}, {"blocks.1.w": WHOLE["blocks.1.w"]}]
    ranks = make_ranks(
        {"a": [WHOLE], "b": [WHOLE], "p": stages} if shares else {"a": [WHOLE], "p": stages}, divide=list
    )

    def work(rank):
        rank.meet(1, ranks, shares)
        return rank.sum(rank.cut(gradients(1))).sums

    for rank, sums in zip(ranks, at_once(work, ranks), strict=True):
        torch.testing.assert_close(sums, rank.cut(gradients(1)))
        rank.exchange.close()


def test_a_gradient_that_changes_after_it_was_sent_is_an_error(ranks):
    ranks[2].meet(1, ranks[2:])
    summing = ranks[2].begin()
    summing.put("b", torch.zeros(5))
    with pytest.raises(RuntimeError, match="b: its gradient has been sent, and has changed since"):
        summing.put("b", torch.zeros(5))
    ranks[2].exchange.abort(2)


def test_buckets_are_the_same_on_all_islands_and_the_last_block_comes_first():
    names = ["transformer.wte.weight", "transformer.blocks.2.w", "transformer.blocks.10.w", "transformer.blocks.10.b"]
    buckets = [
        ["transformer.blocks.10.b", "transformer.blocks.10.w"],
        ["transformer.blocks.2.w"],
        ["transformer.wte.weight"],
    ]
    assert divide_into_buckets(names) == divide_into_buckets(names[::-1]) == buckets


@pytest.mark.parametrize("shares", OWNERS)
def test_a_rank_that_waits_for_a_peer_is_freed_by_a_newer_epoch_and_its_threads_end(ranks, shares):
    waiting = ranks[0]
    waiting.meet(1, ranks, shares)
    summing = waiting.begin()
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(summing.wait, waiting.cut(gradients(1)))
        waiting.exchange.abort(2)
        with pytest.raises(OSError, match="newer epoch"):
            waits.result(10)
    assert not any(thread.is_alive() for thread in summing._threads)


@pytest.mark.parametrize("shares", OWNERS[:2])
def test_an_error_of_one_rank_ends_all_and_the_next_epoch_sums_again(ranks, shares, monkeypatch):
    whole = gradients(1)
    cut = ranks[0].exchange

    def work(rank):
        rank.meet(1, ranks, shares)
        summing = rank.begin()
        summing.put("blocks.1.w", rank.cut(whole)["blocks.1.w"])
        if rank.exchange is cut:
            cut.abort(2)
        with pytest.raises(OSError):
            summing.wait(rank.cut(whole))
        assert not any(thread.is_alive() for thread in summing._threads)

    at_once(work, ranks)

    def again(rank):
        rank.meet(3, ranks, shares)
        return rank.sum(rank.cut(whole)).sums

    for rank, sums in zip(ranks, at_once(again, ranks), strict=True):
        torch.testing.assert_close(sums, rank.cut(whole))


def test_only_the_time_in_which_sockets_wait_with_nothing_left_to_compute_is_said_to_be_a_transfer(ranks, monkeypatch):
    """A host's work may take longer than a link may be silent, and the backward pass longer still."""
    first, others = ranks[2], ranks[3:]
    said, waits, during, threads = [False], threading.Event(), [], set()
    gather, scatter = module.gather, module.scatter

    def note(transfers):
        said[0] = transfers
        if transfers:
            waits.set()

    def watched(work):
        def call(*arguments):
            if threading.current_thread() in threads:
                during.append(said[0])
            return work(*arguments)

        return call

    monkeypatch.setattr(module, "gather", watched(gather))
    monkeypatch.setattr(module, "scatter", watched(scatter))
    first.exchange.on_transfer = note
    first.meet(1, ranks[2:])
    summing = first.begin()
    threads.update(summing._threads)
    summing.put("blocks.1.w", first.cut(gradients(1))["blocks.1.w"])
    with ThreadPoolExecutor(3) as pool:
        assert said == [False], "it computes"
        found = [pool.submit(summing.wait, first.cut(gradients(1)))]
        assert waits.wait(10) and said == [True], "its peers have not begun"
        for rank in others:
            rank.meet(1, ranks[2:])
        found += [pool.submit(rank.sum, rank.cut(gradients(2))) for rank in others]
        for one in found:
            one.result(10)
    assert len(during) >= 6 and not any(during)
    assert said == [False]


def test_another_batch_s_numbers_are_not_taken(ranks):
    def work(rank):
        rank.meet(1, ranks[:3])
        with pytest.raises(OSError):
            rank.sum(rank.cut(gradients(1)), label=64 * (rank.island == "b"))

    at_once(work, ranks[:3])


@pytest.mark.parametrize("weight", [-1.0, math.inf, math.nan])
def test_numbers_with_a_weight_that_none_can_have_are_not_taken(ranks, weight):
    def work(rank):
        rank.meet(1, ranks[:3])
        if rank.island == "b":
            with suppress(OSError):  # the others may end it first
                rank.sum(rank.cut(gradients(1)), weight=weight)
            return
        with pytest.raises(OSError):
            rank.sum(rank.cut(gradients(1)), weight=1.0)

    at_once(work, ranks[:3])


@pytest.mark.parametrize("numbers", [b"", bytes(4), bytes(1 << 20)])
@pytest.mark.parametrize("is_exact", [False, True])
def test_a_message_of_another_size_is_refused_before_memory_is_taken_for_it(ranks, numbers, is_exact):
    ranks[2].meet(1, ranks[:3])
    peer = ranks[0]
    peer.meet(1, ranks[:3])

    def send():
        for other in peer.exchange.overlaps:
            peer.exchange.send(other, numbers, 64, 0, 1.0)

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send)
        with pytest.raises(OSError, match=r"numbers|exact sums|closed"):
            ranks[2].sum(ranks[2].cut(gradients(1)), is_exact=is_exact)
        sending.exception(10)


def test_a_peer_that_does_not_answer_is_an_error_of_the_first_exchange(ranks):
    ranks[0].exchange.close()
    ranks[2].meet(1, ranks[:3])
    with pytest.raises(OSError):
        ranks[2].sum(ranks[2].cut(gradients(1)))


def test_a_gradient_that_is_not_finite_is_so_on_every_island(ranks):
    values = {name: torch.full(box.lengths, 2.0**-20, dtype=torch.float64) for name, box in WHOLE.items()}
    broken = {**values, "b": torch.full((5,), float("inf"), dtype=torch.float64)}

    def work(rank):
        rank.meet(1, ranks)
        return rank.sum(rank.cut(broken if rank.island == "a" else values), is_exact=True).sums

    for rank, sums in zip(ranks, at_once(work, ranks), strict=True):
        assert not torch.isfinite(sums["b"]).any() and torch.isfinite(sums["blocks.1.w"]).all(), rank.island


def test_a_plan_without_owners_sends_each_peer_every_common_part(ranks):
    ranks[0].meet(1, ranks)
    assert isinstance(ranks[0].plan, SumPlan) and not ranks[0].plan.has_owners
    for bucket in ranks[0].plan.buckets:
        assert bucket.summed_by_peer == bucket.summed_here
    assert pack_sums(torch.zeros(3).double().numpy(), 46) == b"\0"
