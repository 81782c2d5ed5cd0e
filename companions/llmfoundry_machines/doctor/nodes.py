"""All nodes of a launch at once: links pair by pair, rates, clocks and versions; the slow node is named.

    srun --ntasks-per-node=1 llmfoundry-lite doctor --json doctor.json
    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-endpoint HOST:29500 -m llmfoundry_lite.cli.main doctor

Products must be exact, and what arrives over a link must be what was sent. Only rank 0 prints.
"""

import os
import re
import socket
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from llmfoundry_lite.devices import device_name, device_type, synchronize, vendor
from llmfoundry_lite.errors import EXIT_USER, ConfigError, UserError
from llmfoundry_lite.hardware import MIB
from llmfoundry_lite.ranks.exchange import all_gather_json, broadcast_json
from llmfoundry_lite.ranks.rank import this_rank
from llmfoundry_lite.ranks.start import choose_device, start_process_group
from llmfoundry_machines.doctor.collectives import BACKENDS, COLLECTIVES, OTHER_FIX, contribution, judge_clocks
from llmfoundry_machines.doctor.examine import check_json_file, exit_code, find_versions, report
from llmfoundry_machines.doctor.finding import CheckOptions, Finding, Status, make_finding
from llmfoundry_machines.doctor.speed import (
    BROKEN,
    NUM_TERMS,
    THROTTLED,
    Product,
    find_wrong,
    measure_flops,
    measure_seconds,
)

SLOW_RATE = 0.85
"""Share of the median rank's rate of products: devices of one kind are within a few percent of each other."""
SLOW_LINK = 0.6
"""Share of the median pair's bandwidth."""
SLOW_ANSWER = 3.0
"""Times the median pair's latency."""
PATIENCE = timedelta(seconds=5)
"""Time for other ranks to fail too."""
PINGS = 20
MAX_SHOWN = 10
"""Sound pairs in the table, the slowest; the JSON has all."""
APART_FIX = (
    "a rank that is missing or has died says why in its own output; if none does, name the network between the nodes "
    "with GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME on GPUs), as `ip address` lists it"
)
SAME = "install the same versions on every node, from one image or one lock file"


class Member(NamedTuple):
    """One rank's description of itself."""

    rank: int
    node: str
    versions: dict[str, str]
    device: str
    flops_per_second: float
    problem: str
    """The error of its products."""
    clock: float


class Pair(NamedTuple):
    first: int
    second: int
    bytes_per_second: float = 0.0
    latency_seconds: float = 0.0
    problem: str = ""


def examine_nodes(machine: CheckOptions, json_file: Path | None = None) -> int:
    """Examine all nodes, on every rank of a launch; rank 0 prints. Returns 0 when nothing failed, else 2.

    Raises UserError where the ranks do not find each other and for a JSON file that cannot be written; ConfigError on
    all ranks of a node.
    """
    here, kind = this_rank(), device_type()
    if here.rank == 0:
        check_json_file(json_file)
    device = choose_device(kind)
    try:
        start_process_group(kind, machine.ranks_limit_seconds, EXIT_USER)
        findings = list(examine_ranks(machine, device))
    except ConfigError:
        raise
    except (RuntimeError, ValueError) as error:  # torch's DistError is a RuntimeError
        words = re.sub(r"^\[\S+\] ", "", " ".join(str(error).split()))  # gloo's own file and line
        words = words.partition(". This is typically")[0][:300]
        if silent := find_silent_ranks(words):
            words += f"; nothing was heard of rank {', '.join(map(str, silent))}"
        raise UserError(f"doctor: rank {here.rank} on {node_name()}: {words}; {APART_FIX}") from None
    if here.rank == 0:
        links = [finding for finding in findings if finding.check == "link" and finding.status is Status.PASS]
        hidden = links[MAX_SHOWN:]
        report(findings, [finding for finding in findings if finding not in hidden], json_file)
    dist.destroy_process_group()
    return exit_code(findings)


def examine_ranks(machine: CheckOptions, device: torch.device) -> Iterator[Finding]:
    """Yield the same findings on every rank."""
    members = [Member(*member) for member in all_gather_json(measure_rank(machine, device))]
    kinds = Counter(member.device for member in members)
    detail = ", ".join(f"{count} x {name}" for name, count in kinds.items())
    yield Finding("devices", Status.PASS, f"{len(members)}", detail=detail)
    yield judge_versions(members)
    problems = [f"rank {m.rank} on {m.node}: {m.problem}" for m in members if m.problem]
    yield make_finding("products", problems, BROKEN, pass_detail=f"exact on {len(members)} ranks")
    yield judge_rates(members)
    yield judge_clocks({m.rank: (m.node, m.clock) for m in members})
    num_bytes = (4 if machine.quick else 32) * MIB
    yield measure_gather(members, 2 * num_bytes, device)
    pairs = measure_pairs(find_speakers(members), num_bytes, device)
    yield from judge_pairs(pairs, members)


def find_silent_ranks(words: str) -> list[int]:
    """Return, on rank 0, the frozen ranks: those that have not failed although one has timed out.

    Every rank that has failed calls it with its error. Ranks other than 0 stay until rank 0 has heard of them, before a
    launcher ends it. They do not ask rank 0 itself, which may be frozen.
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
    """Return the host with the node's number, which differs for containers on one host."""
    number = os.environ.get("NODE_RANK") or os.environ.get("GROUP_RANK") or "0"
    return f"{socket.gethostname()} (node {number})"


def measure_rank(machine: CheckOptions, device: torch.device) -> Member:
    """Measure this rank; all ranks read their clocks right after a barrier."""
    here = this_rank()
    problem = find_wrong(Product.of_signs(256, NUM_TERMS, 256, torch.bfloat16), device)
    size = (512 if machine.quick else 1024) if device.type == "cpu" else 8192
    rate = measure_flops(device, size, 3 if machine.quick else 10)
    versions = {name: version or "missing" for name, version in find_versions().items()}
    versions["torch build"] = torch.version.cuda or torch.version.hip or "CPU"
    all_gather_json(here.rank)
    return Member(here.rank, node_name(), versions, device_name(), rate, problem, time.time())


def measure_gather(members: Sequence[Member], num_bytes: int, device: torch.device) -> Finding:
    """Time an all-gather of all ranks, which loads all adapters of their nodes at once."""
    num_ranks, num_nodes = len(members), len({member.node for member in members})
    mine = torch.zeros(num_bytes // 4 // num_ranks, device=device)
    got = torch.empty(num_ranks * len(mine), device=device)
    gather = COLLECTIVES["all_gather"]
    seconds = measure_seconds(lambda: gather.run(got, mine), device, 3)
    rate = min(all_gather_json(gather.bus_share(num_ranks) * mine.nbytes / seconds))
    place = f"{num_ranks} ranks on {num_nodes} node{'s' * (num_nodes > 1)} over {BACKENDS[vendor()]}"
    detail = f"{place}, bus bandwidth at {num_bytes / MIB:.0f} MiB"
    return Finding("all_gather", Status.PASS, rate / 1e9, "GB/s", detail)


# ----------------------------------------------------------------------------------------------------------- pairs


def find_speakers(members: Sequence[Member]) -> list[int]:
    """Return one rank for each node; all ranks where there is only one node."""
    first = dict[str, int]()
    for member in members:
        first.setdefault(member.node, member.rank)
    return list(first.values()) if len(first) > 1 else [member.rank for member in members]


def rounds_of(speakers: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Yield every pair once, in rounds in which no rank is in two pairs: a round-robin tournament's circle method."""
    ring: list[int | None] = [*speakers, *([None] if len(speakers) % 2 else [])]
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        ring = [ring[0], ring[-1], *ring[1:-1]]


def measure_pairs(speakers: Sequence[int], num_bytes: int, device: torch.device) -> list[Pair]:
    """Measure all pairs, those of one round at the same time; returns them on every rank."""
    mine: list[Pair] = []
    for pairs in rounds_of(speakers):
        for first, second in pairs:
            if this_rank().rank in (first, second):
                mine.append(measure_pair(first, second, num_bytes, device))
        broadcast_json(None)  # the next round begins when this one has ended
    found = [Pair(*pair) for pairs in all_gather_json(mine) for pair in pairs]
    measured: dict[tuple[int, int], Pair] = {}
    for pair in sorted(found, key=lambda pair: bool(pair.problem)):  # a problem that one end has found comes last
        if pair.problem or pair[:2] not in measured:
            measured[pair[:2]] = pair
    return sorted(measured.values())


def measure_pair(first: int, second: int, num_bytes: int, device: torch.device) -> Pair:
    """Send there and back: small messages for the latency, large ones for the bandwidth, which are compared."""
    rank = this_rank().rank
    other = second if rank == first else first
    small, large = (contribution(first, count, device) for count in (1, num_bytes // 4))
    latency, _ = bounce(small, rank == first, other, PINGS)
    seconds, received = bounce(large, rank == first, other, 3)
    wrong = int((received != large).sum())
    problem = f"rank {rank} got {wrong} of {len(large)} elements from rank {other} that were not sent" if wrong else ""
    return Pair(first, second, 2 * num_bytes / seconds, latency / 2, problem)


def bounce(values: torch.Tensor, begins: bool, other: int, repeats: int) -> tuple[float, torch.Tensor]:
    """Return the seconds of one way there and back, the fastest of `repeats` after one more, and what arrived."""
    seconds, buffer = [], torch.empty_like(values)
    for _ in range(repeats + 1):
        synchronize()
        began = time.perf_counter()
        if begins:
            dist.send(values, other)
            dist.recv(buffer, other)
        else:
            dist.recv(buffer, other)
            dist.send(buffer, other)
        synchronize()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:]), buffer


# -------------------------------------------------------------------------------------------------------- findings


def judge_versions(members: Sequence[Member]) -> Finding:
    """Compare each rank's versions with those of most ranks."""
    problems = []
    for name in members[0].versions:
        values = [member.versions[name] for member in members]
        usual = max(values, key=values.count)
        for other in sorted(set(values) - {usual}):
            nodes = dict.fromkeys(member.node for member in members if member.versions[name] == other)
            problems.append(f"{name} is {other} on {', '.join(nodes)}, {usual} on the others")
    severity = Status.FAIL if any(text.startswith("torch ") for text in problems) else Status.WARN
    sound = ", ".join(f"{name} {value}" for name, value in members[0].versions.items())
    return make_finding("versions", problems, SAME, severity, value=f"{len(members)} ranks", pass_detail=sound)


def judge_rates(members: Sequence[Member]) -> Finding:
    """Report the slowest rank, and name each node that is slower than most."""
    median = statistics.median(member.flops_per_second for member in members)
    slowest = min(members, key=lambda member: member.flops_per_second)
    slow = [member for member in members if member.flops_per_second < SLOW_RATE * median]
    kinds = sorted({member.device for member in members})
    problems = [f"devices of {len(kinds)} kinds: {', '.join(kinds)}"] if len(kinds) > 1 else []
    problems += [f"{m.node} is slow: rank {m.rank} has {m.flops_per_second / median:.0%} of the median" for m in slow]
    sound = f"rank {slowest.rank} on {slowest.node}, the slowest; the median is {median / 1e12:.3g}"
    value = slowest.flops_per_second / 1e12
    return make_finding(
        "rate of products", problems, THROTTLED, Status.WARN, value=value, unit="TFLOP/s", pass_detail=sound
    )


def judge_pairs(pairs: Sequence[Pair], members: Sequence[Member]) -> Iterator[Finding]:
    """Yield one finding for all links, then one for each, the slowest first. Names a node whose links are all slow."""
    if not pairs:
        yield Finding("links", Status.SKIP, detail="one rank alone has no link")
        return
    fix = OTHER_FIX[vendor()]
    nodes = {member.rank: member.node for member in members}
    median = statistics.median(pair.bytes_per_second for pair in pairs)
    answer = statistics.median(pair.latency_seconds for pair in pairs)
    bad = {
        pair
        for pair in pairs
        if pair.bytes_per_second < SLOW_LINK * median or pair.latency_seconds > SLOW_ANSWER * answer
    }
    problems = wrong = [pair.problem for pair in pairs if pair.problem]
    for rank in dict.fromkeys(rank for pair in pairs for rank in pair[:2]):
        own = [pair for pair in pairs if rank in pair[:2]]
        if len(own) > 1 and bad.issuperset(own):
            problems = [*problems, f"{nodes[rank]} is slow in all its {len(own)} links"]
    if bad and not problems:
        problems = [f"{len(bad)} of {len(pairs)} links are slower than the others"]
    latency = f"{answer * 1e6:,.0f} us"
    sound = f"the median of {len(pairs)} pairs, {latency}; none is far from it"
    sound = sound if len(pairs) > 1 else f"the only pair, {latency}"
    severity = Status.FAIL if wrong else Status.WARN
    yield make_finding("links", problems, fix, severity, value=median / 1e9, unit="GB/s", pass_detail=sound)
    for pair in sorted(pairs, key=lambda pair: pair.bytes_per_second):
        names = f"rank {pair.first} on {nodes[pair.first]} and rank {pair.second} on {nodes[pair.second]}"
        detail = f"{names}: {pair.latency_seconds * 1e6:,.0f} us"
        problems = [pair.problem] if pair.problem or pair in bad else []
        severity = Status.FAIL if pair.problem else Status.WARN
        yield make_finding(
            "link", problems, fix, severity, value=pair.bytes_per_second / 1e9, unit="GB/s", detail=detail
        )
