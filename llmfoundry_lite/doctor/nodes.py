"""All nodes of a launch at once: their links, pair by pair, rates, clocks and versions; the slow node is named.

    srun --ntasks-per-node=1 llmfoundry-lite doctor --json doctor.json
    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-endpoint HOST:29500 -m llmfoundry_lite.cli.main doctor

Owns what only several nodes show. Leaves one machine's own checks to `examine.py`, which run where no launcher has
started this process, or with --alone. Every answer is computed: products are exact, and what arrives over a link must
be what was sent. Nothing but rank 0 prints.
"""

import json
import os
import platform
import re
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console

from llmfoundry_lite.devices import device_name, device_type, vendor
from llmfoundry_lite.doctor.bandwidth import THROTTLED, measure_flops
from llmfoundry_lite.doctor.collectives import OTHER_FIX, Report, judge_clocks
from llmfoundry_lite.doctor.examine import as_dict, check_json_file, exit_code, print_table
from llmfoundry_lite.doctor.finding import Finding, Machine, Status, shorten
from llmfoundry_lite.doctor.gemm import BROKEN, LENGTH, Product, first_wrong
from llmfoundry_lite.errors import EXIT_USER, ConfigError, UserError
from llmfoundry_lite.hardware import MIB
from llmfoundry_lite.ranks.exchange import all_gather_json, broadcast_json
from llmfoundry_lite.ranks.rank import this_rank
from llmfoundry_lite.ranks.start import choose_device, start_process_group

Sabotage = Callable[[int], None]
"""Called with the rank when the process group stands; tests break something there."""

SLOW_RATE = 0.85
"""Of the median rank's rate of products: devices of one kind are within a few percent of each other."""
SLOW_LINK = 0.6
"""Of the median pair's bandwidth."""
SLOW_ANSWER = 3.0
"""Times the median pair's latency."""
PATIENCE = timedelta(seconds=5)
"""For other ranks to fail too."""
PINGS = 20
MOST_SHOWN = 10
"""Pairs in the table, the slowest; the JSON has all."""
APART_FIX = (
    "a rank that is missing or has died says why in its own output; if none does, name the network between the nodes "
    "with GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME on GPUs), as `ip address` lists it"
)
SAME = "install the same versions on every node, from one image or one lock file"


class Member(NamedTuple):
    """What one rank says of itself."""

    rank: int
    node: str
    versions: dict[str, str]
    device: str
    flops_per_second: float
    problem: str
    """What its products got wrong."""
    clock: float


class Pair(NamedTuple):
    first: int
    second: int
    bytes_per_second: float = 0.0
    latency_seconds: float = 0.0
    problem: str = ""


def examine_nodes(machine: Machine, json_file: Path | None = None, sabotage: Sabotage | None = None) -> int:
    """On every rank of a launch. Rank 0 prints the table and writes the JSON. Returns 0 when nothing failed, else 2.

    Raises UserError where the ranks do not find each other, and for a JSON file that cannot be. ConfigError: on all
    ranks of a node alike.
    """
    here, kind = this_rank(), device_type()
    if here.rank == 0:
        check_json_file(json_file)
    device = choose_device(kind)
    try:
        start_process_group(kind, machine.ranks_limit_seconds, EXIT_USER)
        if sabotage is not None:
            sabotage(here.rank)
        findings = list(examine_ranks(machine, device))
    except ConfigError:
        raise
    except (RuntimeError, ValueError) as error:  # torch's DistError is one of the first
        words = re.sub(r"^\[\S+\] ", "", " ".join(str(error).split()))  # gloo's own file and line
        words = words.partition(". This is typically")[0][:300]
        if silent := find_silent_ranks(words):
            words += f"; nothing was heard of rank {', '.join(map(str, silent))}"
        raise UserError(f"doctor: rank {here.rank} on {node_name()}: {words}; {APART_FIX}") from None
    if here.rank == 0:
        shown = [finding for finding in findings if finding.check != "link" or finding.status is not Status.PASS]
        links = [finding for finding in findings if finding.check == "link" and finding.status is Status.PASS]
        print_table([*shown, *links[:MOST_SHOWN]], Console())
        if json_file is not None:
            json_file.write_text(json.dumps(as_dict(findings), indent=1) + "\n")
    dist.destroy_process_group()
    return exit_code(findings)


def examine_ranks(machine: Machine, device: torch.device) -> Iterator[Finding]:
    """The same findings on every rank."""
    members = [Member(*member) for member in all_gather_json(look_at_this_rank(machine, device))]
    yield judge_versions(members)
    yield judge_products(members)
    yield judge_rates(members)
    yield judge_clocks({m.rank: Report("", clock=m.clock, host=m.node) for m in members})
    speakers = speakers_of(members)
    pairs = measure_pairs(speakers, (4 if machine.quick else 32) * MIB, device)
    yield from judge_pairs(pairs, members)


def find_silent_ranks(words: str) -> list[int]:
    """On every rank that has failed, with its error: those that have not, if one has timed out. They have frozen.

    Rank 0 hears of them. The others stay until it has, lest a launcher end it before; they ask nothing of it, for it
    may have frozen.
    """
    if not dist.is_initialized():  # they have not even met
        return []
    here, store = this_rank(), dist.distributed_c10d._get_default_store()
    keys = [f"doctor/failed/{rank}" for rank in range(here.world_size)]
    store.set(keys[here.rank], words)
    if here.rank != 0:
        time.sleep(2 * PATIENCE.total_seconds())
        return []
    with suppress(RuntimeError):
        store.wait(keys, PATIENCE)
    told = {rank: store.get(key) for rank, key in enumerate(keys) if store.check([key])}
    has_timed_out = any(b"Timed out" in text for text in told.values())
    return [rank for rank in range(here.world_size) if rank not in told] if has_timed_out else []


def node_name() -> str:
    """The host; where several nodes of a launch have one name, containers on one host, their number too."""
    number = os.environ.get("NODE_RANK") or os.environ.get("GROUP_RANK") or "0"
    return f"{socket.gethostname()} (node {number})"


def look_at_this_rank(machine: Machine, device: torch.device) -> Member:
    """Its versions, its rate and its clock, which all ranks read right after a barrier."""
    here = this_rank()
    signs = Product.of_signs(256, LENGTH, 256, torch.bfloat16)
    problem = first_wrong(signs, torch.matmul, device)
    size = (512 if machine.quick else 1024) if device.type == "cpu" else 8192
    rate = measure_flops(device, size, 3 if machine.quick else 10)
    all_gather_json(here.rank)
    return Member(here.rank, node_name(), versions_here(), device_name(), rate, problem, time.time())


def versions_here() -> dict[str, str]:
    """What must be the same on all nodes of a run."""
    build = torch.version.cuda or torch.version.hip or "CPU"
    return {
        **{name: version or "missing" for name, version in as_dict([])["versions"].items() if name != "kernel"},
        "torch build": build,
        "python": platform.python_version(),
    }


# ----------------------------------------------------------------------------------------------------------- pairs


def speakers_of(members: Sequence[Member]) -> list[int]:
    """One rank for each node; all ranks where there is one node alone."""
    first = dict[str, int]()
    for member in members:
        first.setdefault(member.node, member.rank)
    return list(first.values()) if len(first) > 1 else [member.rank for member in members]


def rounds_of(speakers: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Every pair once, in rounds in which nobody is in two pairs: the circle method of round-robin tournaments."""
    ring: list[int | None] = [*speakers, *([None] if len(speakers) % 2 else [])]
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        ring = [ring[0], ring[-1], *ring[1:-1]]


def measure_pairs(speakers: Sequence[int], num_bytes: int, device: torch.device) -> list[Pair]:
    """All pairs, on every rank; pairs of one round talk at the same time."""
    mine: list[Pair] = []
    for pairs in rounds_of(speakers):
        for first, second in pairs:
            if this_rank().rank in (first, second):
                mine.append(measure_pair(first, second, num_bytes, device))
        broadcast_json(None)  # the next round begins when this one has ended
    found = [Pair(*pair) for pairs in all_gather_json(mine) for pair in pairs]
    wrong = {(pair.first, pair.second): pair for pair in found if pair.problem}
    alike = {(pair.first, pair.second): pair for pair in reversed(found)}  # the first rank's clock
    return sorted((alike | wrong).values())


def measure_pair(first: int, second: int, num_bytes: int, device: torch.device) -> Pair:
    """There and back: small messages for the latency, large ones for the bandwidth; what comes back is compared."""
    rank = this_rank().rank
    other = second if rank == first else first
    small, large = (contribution(first, count, device) for count in (1, num_bytes // 4))
    latency = bounce(small, rank == first, other, PINGS) / 2
    seconds = bounce(large, rank == first, other, 3) / 2
    received = torch.zeros_like(large)
    problem = ""
    if rank == first:
        dist.send(large, other)
        dist.recv(received, other)
    else:
        dist.recv(received, other)
        dist.send(received, other)
    wrong = int((received != large).sum())
    if wrong:
        problem = f"rank {rank} got {wrong} of {len(large)} elements from rank {other} that were not sent"
    return Pair(first, second, num_bytes / seconds, latency, problem)


def bounce(values: torch.Tensor, begins: bool, other: int, repeats: int) -> float:
    """Seconds of one way there and back, the fastest of `repeats`; once more goes before."""
    least, buffer = float("inf"), torch.empty_like(values)
    for number in range(repeats + 1):
        wait(values)
        began = time.perf_counter()
        if begins:
            dist.send(values, other)
            dist.recv(buffer, other)
        else:
            dist.recv(buffer, other)
            dist.send(buffer, other)
        wait(values)
        if number:
            least = min(least, time.perf_counter() - began)
    return least


def wait(values: torch.Tensor) -> None:
    if values.is_cuda:
        torch.cuda.synchronize()


def contribution(rank: int, count: int, device: torch.device) -> torch.Tensor:
    """No stretch of it repeats soon, so that elements in the wrong place are wrong ones."""
    spread = torch.arange(count, dtype=torch.int64, device=device) * 2654435761 & (1 << 32) - 1
    return ((spread >> 8) % 65_521 + 1).float() * (rank + 1)


# -------------------------------------------------------------------------------------------------------- verdicts


def judge_versions(members: Sequence[Member]) -> Finding:
    """Against what most ranks have."""
    problems = []
    for name in members[0].versions:
        values = [member.versions[name] for member in members]
        usual = max(values, key=values.count)
        for other in sorted(set(values) - {usual}):
            nodes = dict.fromkeys(member.node for member in members if member.versions[name] == other)
            problems.append(f"{name} is {other} on {', '.join(nodes)}, {usual} on the others")
    status = Status.FAIL if any(text.startswith("torch ") for text in problems) else Status.WARN
    return Finding(
        check="versions",
        status=status if problems else Status.PASS,
        value=f"{len(members)} ranks",
        detail=shorten(problems) or ", ".join(f"{name} {value}" for name, value in members[0].versions.items()),
        fix=SAME if problems else "",
    )


def judge_products(members: Sequence[Member]) -> Finding:
    problems = [f"rank {m.rank} on {m.node}: {m.problem}" for m in members if m.problem]
    return Finding(
        check="products",
        status=Status.FAIL if problems else Status.PASS,
        detail=shorten(problems) or f"exact on {len(members)} ranks",
        fix=BROKEN if problems else "",
    )


def judge_rates(members: Sequence[Member]) -> Finding:
    """The slowest rank, and every node that is slower than most."""
    median = statistics.median(member.flops_per_second for member in members)
    slowest = min(members, key=lambda member: member.flops_per_second)
    slow = [member for member in members if member.flops_per_second < SLOW_RATE * median]
    kinds = sorted({member.device for member in members})
    problems = [f"devices of {len(kinds)} kinds: {', '.join(kinds)}"] if len(kinds) > 1 else []
    problems += [f"{m.node} is slow: rank {m.rank} has {m.flops_per_second / median:.0%} of the median" for m in slow]
    return Finding(
        check="rate of products",
        status=Status.WARN if problems else Status.PASS,
        value=slowest.flops_per_second / 1e12,
        unit="TFLOP/s",
        detail=shorten(problems)
        or f"rank {slowest.rank} on {slowest.node}, the slowest; the median is {median / 1e12:.3g}",
        fix=THROTTLED if problems else "",
    )


def judge_pairs(pairs: Sequence[Pair], members: Sequence[Member]) -> Iterator[Finding]:
    """One finding for all links, and one for each, the slowest first. A node all of whose links are slow is named."""
    if not pairs:
        yield Finding(check="links", status=Status.SKIP, detail="one rank alone has no link")
        return
    nodes = {member.rank: member.node for member in members}
    median = statistics.median(pair.bytes_per_second for pair in pairs)
    answer = statistics.median(pair.latency_seconds for pair in pairs)
    bad = {
        pair
        for pair in pairs
        if pair.bytes_per_second < SLOW_LINK * median or pair.latency_seconds > SLOW_ANSWER * answer
    }
    wrong = [pair.problem for pair in pairs if pair.problem]
    slow = []
    for rank in dict.fromkeys(rank for pair in pairs for rank in pair[:2]):
        own = [pair for pair in pairs if rank in pair[:2]]
        if len(own) > 1 and all(pair in bad for pair in own):
            slow.append(f"{nodes[rank]} is slow in all its {len(own)} links")
    problems = [*wrong, *slow]
    if bad and not problems:
        problems = [f"{len(bad)} of {len(pairs)} links are slower than the others"]
    status = Status.FAIL if wrong else Status.WARN if problems else Status.PASS
    latency = f"{answer * 1e6:,.0f} us"
    sound = f"the median of {len(pairs)} pairs, {latency}; none is far from it"
    yield Finding(
        check="links",
        status=status,
        value=median / 1e9,
        unit="GB/s",
        detail=shorten(problems) or (sound if len(pairs) > 1 else f"the only pair, {latency}"),
        fix=OTHER_FIX[vendor()] if problems else "",
    )
    for pair in sorted(pairs, key=lambda pair: pair.bytes_per_second):
        names = f"rank {pair.first} on {nodes[pair.first]} and rank {pair.second} on {nodes[pair.second]}"
        is_bad = pair in bad or bool(pair.problem)
        yield Finding(
            check="link",
            status=Status.FAIL if pair.problem else Status.WARN if is_bad else Status.PASS,
            value=pair.bytes_per_second / 1e9,
            unit="GB/s",
            detail=f"{names}: {pair.latency_seconds * 1e6:,.0f} us" + (f"; {pair.problem}" if pair.problem else ""),
            fix=OTHER_FIX[vendor()] if is_bad else "",
        )
