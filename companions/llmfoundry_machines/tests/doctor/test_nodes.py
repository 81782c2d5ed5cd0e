"""Several nodes at once: who is slow, who differs, and what arrives wrong."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from llmfoundry_lite.errors import UserError
from llmfoundry_lite.ranks.rank import this_rank
from llmfoundry_machines.doctor import nodes
from llmfoundry_machines.doctor.finding import CheckOptions, Status
from llmfoundry_machines.doctor.nodes import Link, RankInfo
from llmfoundry_machines.tests.findings import by_name
from tests.helpers.launch import launch, start

VERSIONS = {"torch": "2.13.0", "python": "3.12.1"}


def members(number: int, **of_the_last) -> list[RankInfo]:
    found = [RankInfo(rank, f"host{rank}", VERSIONS, "H100", 5e14, "", 1000.0) for rank in range(number)]
    found[-1] = found[-1]._replace(**of_the_last)
    return found


def test_every_pair_meets_once_and_nobody_is_in_two_pairs_of_a_round():
    for number in range(2, 12):
        rounds = list(nodes.round_robin(range(number)))
        pairs = [pair for pairs in rounds for pair in pairs]
        assert sorted(pairs) == [(a, b) for a in range(number) for b in range(a + 1, number)]
        assert all(len({rank for pair in pairs for rank in pair}) == 2 * len(pairs) for pairs in rounds)


def test_one_rank_speaks_for_each_node_and_all_where_there_is_one_node():
    many = [m._replace(node=f"host{m.rank // 4}") for m in members(8)]
    assert nodes.choose_link_ranks(many) == [0, 4]
    assert nodes.choose_link_ranks([m._replace(node="host0") for m in many]) == list(range(8))


def test_versions_that_differ_are_named_with_their_node():
    found = nodes.compare_versions(members(4, versions={**VERSIONS, "torch": "2.12.0"}))
    assert found.status is Status.FAIL and "torch is 2.12.0 on host3, 2.13.0 on the others" in found.detail
    found = nodes.compare_versions(members(4, versions={**VERSIONS, "python": "3.11.9"}))
    assert found.status is Status.WARN and "python is 3.11.9 on host3" in found.detail
    assert nodes.compare_versions(members(4)).status is Status.PASS


def test_the_slow_node_is_named():
    found = nodes.compare_product_rates(members(4, flops_per_second=3e14))
    assert found.status is Status.WARN and "host3 is slow: rank 3 has 60% of the median" in found.detail
    assert nodes.compare_product_rates(members(4, flops_per_second=4.6e14)).status is Status.PASS


def pairs_of(number: int, slow: set[tuple[int, int]]) -> list[Link]:
    return [Link(a, b, 1e9 if (a, b) in slow else 2.5e10, 1e-5) for a in range(number) for b in range(a + 1, number)]


def test_a_node_whose_links_are_all_slow_is_named_and_a_single_link_as_a_link():
    all_slow = list(nodes.compare_links(pairs_of(5, {(0, 2), (1, 2), (2, 3), (2, 4)}), members(5)))
    assert all_slow[0].status is Status.WARN and all_slow[0].detail == "host2 is slow in all its 4 links"
    one_slow = list(nodes.compare_links(pairs_of(5, {(1, 3)}), members(5)))
    assert one_slow[0].detail == "1 of 10 links are slower than the others"
    assert [f.status for f in one_slow[1:]] == [Status.WARN] + [Status.PASS] * 9
    assert one_slow[1].detail.startswith("rank 1 on host1 and rank 3 on host3: 10 us")
    far = [pair._replace(latency_seconds=1e-3) if pair[:2] == (0, 1) else pair for pair in pairs_of(4, set())]
    assert sum(f.status is Status.WARN for f in nodes.compare_links(far, members(4))) == 2
    by_name([*all_slow, *one_slow])  # each has its fix


def examine(fault: str) -> None:
    """Examine as a rank of three nodes, with a fault on rank 2."""
    is_broken = this_rank().rank == 2
    if fault == "slow":  # set on every rank: three processes on two cores measure rates a factor of three apart
        nodes.measure_product_flops = lambda *arguments: 1e12 / 3 if is_broken else 1e12
    elif fault == "late" and is_broken:
        real = nodes.time.time
        nodes.time = type("late", (), {"time": lambda: real() + 60, "perf_counter": time.perf_counter})
    elif fault == "other version" and is_broken:
        mine = nodes.find_versions()
        nodes.find_versions = lambda: {**mine, "torch": "1.13.1"}
    elif fault == "other product" and is_broken:
        nodes.describe_wrong_sums = lambda *arguments: "3 of 9 sums are wrong"
    elif fault == "other data" and is_broken:
        send = dist.send

        def send_wrong(values: torch.Tensor, other: int) -> None:
            send(values + (torch.arange(len(values)) == 7) if len(values) > 1000 else values, other)

        dist.send = send_wrong

    code = nodes.examine_nodes(CheckOptions(quick=True), Path("doctor.json"))
    print(f"exit code {code}")


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("fault", "check", "status", "words"),
    [
        ("none", "links", Status.PASS, ""),
        ("late", "clocks of the ranks", Status.WARN, "s ahead of rank"),
        ("slow", "rate of products", Status.WARN, "(node 2) is slow: rank 2 has"),
        ("other version", "versions", Status.FAIL, "torch is 1.13.1 on"),
        ("other product", "products", Status.FAIL, "(node 2): 3 of 9 sums are wrong"),
        ("other data", "links", Status.FAIL, "elements from rank 2 that were not sent"),
    ],
)
def test_three_nodes_are_examined_and_a_fault_in_one_is_found(fault, check, status, words, tmp_path):
    done = launch(examine, (fault,), tmp_path, num_ranks=3, local_world_size=1)
    done.check()
    report = json.loads((tmp_path / "doctor.json").read_text())
    found = {finding["check"]: finding for finding in report["findings"] if finding["check"] != "link"}
    assert sum(finding["check"] == "link" for finding in report["findings"]) == 3
    assert words in found[check]["detail"]
    if fault != "none":
        assert found[check]["status"] == status
    assert {f"exit code {2 if status is Status.FAIL else 0}" in output for output in done.outputs} == {True}


def examine_with_one_that_freezes(frozen: int) -> None:
    if this_rank().rank == frozen:  # when all have met, for which a busy machine has as long
        nodes.measure_link = lambda *arguments: os.kill(os.getpid(), signal.SIGSTOP)
    try:
        nodes.examine_nodes(CheckOptions(quick=True, ranks_limit_seconds=10))
    except UserError as error:
        print(f"error: {error}")


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("frozen", [0, 2])
def test_a_rank_that_has_frozen_is_named_and_holds_up_nobody(frozen, tmp_path):
    """By rank 0, unless that is the one."""
    started = start(examine_with_one_that_freezes, (frozen,), tmp_path, 3, 1, None)
    others = [rank for rank in range(3) if rank != frozen]
    for rank in others:
        started.processes[rank].join(120)
    codes = [started.processes[rank].exitcode for rank in others]
    for process in started.processes:
        process.kill()
        process.join()
    outputs = [started.outputs[rank].read_text() for rank in others]
    assert codes == [0, 0], outputs
    assert all(f"error: doctor: rank {rank}" in text for rank, text in zip(others, outputs, strict=True)), outputs
    assert ["nothing was heard of rank 2; a rank" in text for text in outputs] == [frozen == 2, False], outputs
