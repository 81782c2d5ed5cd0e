"""The examination of all nodes of a launch together: links between nodes, rates, clocks and versions.

    srun --ntasks-per-node=1 llmfoundry-lite doctor --json doctor.json
    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-endpoint HOST:29500 -m llmfoundry_lite.cli.main doctor

Every rank calls `examine_nodes`, which measures this rank, gathers all ranks' measurements, and compares them, so that
the slow or different node is named. Then ranks of different nodes measure the links between them, pair by pair.
Products must be exact, and data must arrive as it was sent. All ranks have the same findings; only rank 0 prints them.
"""

import os
import re
import socket
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
from llmfoundry_machines.doctor.collectives import BACKENDS, COLLECTIVES, LINK_FIXES, compare_clocks, make_input
from llmfoundry_machines.doctor.examine import check_json_file, exit_code, find_versions, report
from llmfoundry_machines.doctor.finding import CheckOptions, Finding, Status, make_finding
from llmfoundry_machines.doctor.speed import (
    BROKEN_FIX,
    NUM_TERMS,
    THROTTLED_FIX,
    Product,
    describe_wrong_sums,
    measure_product_flops,
    measure_seconds,
)

MIN_RATE_SHARE = 0.85
"""Share of the median rank's rate of products: devices of one kind are within a few percent of each other."""
MIN_BANDWIDTH_SHARE = 0.6
"""Share of the median link's bandwidth."""
MAX_LATENCY_RATIO = 3.0
"""Times the median link's latency."""
FAILURE_WAIT = timedelta(seconds=5)
"""Time that the other ranks have to fail too, after one has failed."""
NUM_PINGS = 20
"""Number of round trips of a small message that measure a link's latency."""
MAX_SHOWN_LINKS = 10
"""Number of links in the table that pass, the slowest; the JSON has all."""
MAX_ERROR_LENGTH = 300
"""Characters of the backend's error that are printed."""
RENDEZVOUS_FIX = (
    "a rank that is missing or has died says why in its own output; if none does, name the network between the nodes "
    "with GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME on GPUs), as `ip address` lists it"
)
VERSIONS_FIX = "install the same versions on every node, from one image or one lock file"


class RankInfo(NamedTuple):
    """One rank's measurements and versions."""

    rank: int
    node: str
    versions: dict[str, str]
    device: str
    flops_per_second: float
    problem: str
    """What is wrong with its products; empty if they are exact."""
    clock: float
    """Its wall clock in seconds, read right after a barrier."""


class Link(NamedTuple):
    """The measured link between two ranks, of which the first has the lower number."""

    first_rank: int
    second_rank: int
    bytes_per_second: float = 0.0
    latency_seconds: float = 0.0
    """Time of a small message one way."""
    problem: str = ""
    """How the data that arrived differs from the data that was sent; empty if it does not."""


def examine_nodes(options: CheckOptions, json_file: Path | None = None) -> int:
    """Examine all nodes of a launch. Collective; rank 0 prints the table and writes the JSON.

    Returns 2 if a check failed, else 0, on every rank. Raises UserError if the ranks cannot connect to each other, and
    for a JSON file that cannot be written; ConfigError, on all ranks of a node, if the node has fewer devices than
    ranks.
    """
    rank = this_rank().rank
    if rank == 0:
        check_json_file(json_file)
    device = choose_device(device_type())

    try:
        start_process_group(device_type(), options.ranks_limit_seconds, EXIT_USER)
        findings = list(examine_ranks(options, device))
    except ConfigError:
        raise  # a ValueError too, but its text is complete
    except (RuntimeError, ValueError) as error:  # torch's DistError is a RuntimeError
        message = shorten_backend_error(error)
        silent_ranks = find_silent_ranks(message)
        if silent_ranks:
            message += f"; nothing was heard of rank {', '.join(map(str, silent_ranks))}"
        raise UserError(f"doctor: rank {rank} on {node_name()}: {message}; {RENDEZVOUS_FIX}") from None

    if rank == 0:
        passed_links = [one for one in findings if one.check == "link" and one.status is Status.PASS]
        hidden = passed_links[MAX_SHOWN_LINKS:]
        report(findings, [finding for finding in findings if finding not in hidden], json_file)
    dist.destroy_process_group()
    return exit_code(findings)


def examine_ranks(options: CheckOptions, device: torch.device) -> Iterator[Finding]:
    """Measure this rank and the links, and yield findings about all ranks, the same on every rank. Collective."""
    ranks = [RankInfo(*fields) for fields in all_gather_json(measure_rank(options, device))]
    num_devices = Counter(rank.device for rank in ranks)
    detail = ", ".join(f"{count} x {name}" for name, count in num_devices.items())
    yield Finding("devices", Status.PASS, f"{len(ranks)}", detail=detail)

    yield compare_versions(ranks)
    problems = [f"rank {rank.rank} on {rank.node}: {rank.problem}" for rank in ranks if rank.problem]
    yield make_finding("products", problems, BROKEN_FIX, pass_detail=f"exact on {len(ranks)} ranks")
    yield compare_product_rates(ranks)
    yield compare_clocks({rank.rank: (rank.node, rank.clock) for rank in ranks})

    message_bytes = (4 if options.quick else 32) * MIB
    yield measure_all_gather(ranks, 2 * message_bytes, device)
    links = measure_links(choose_link_ranks(ranks), message_bytes, device)
    yield from compare_links(links, ranks)


def shorten_backend_error(error: Exception) -> str:
    """Return an error of torch.distributed as one line, without gloo's file and line, and without its advice."""
    line = " ".join(str(error).split())
    without_source = re.sub(r"^\[\S+\] ", "", line)
    message, _, _ = without_source.partition(". This is typically")
    return message[:MAX_ERROR_LENGTH]


def find_silent_ranks(message: str) -> list[int]:
    """Return the ranks that have frozen: those that have not failed, although another rank has timed out.

    Every rank that has failed calls this with its error's message, and writes it into the process group's store. Only
    rank 0 reads the messages. The others return an empty list, but wait first until rank 0 has read them, because a
    launcher kills all ranks when the first one ends. They do not ask rank 0 itself, which may have frozen.
    """
    if not dist.is_initialized():  # the ranks have not connected, so there is no store
        return []
    this = this_rank()
    store = dist.distributed_c10d._get_default_store()
    keys = [f"doctor/failed/{rank}" for rank in range(this.world_size)]
    store.set(keys[this.rank], message)
    if this.rank != 0:
        time.sleep(2 * FAILURE_WAIT.total_seconds())
        return []

    # Only rank 0 goes on here.
    with suppress(RuntimeError):  # raised if the wait times out, which it does if a rank has frozen
        store.wait(keys, FAILURE_WAIT)
    messages = {rank: store.get(key) for rank, key in enumerate(keys) if store.check([key])}
    has_timed_out = any(b"Timed out" in text for text in messages.values())
    if not has_timed_out:
        return []
    return [rank for rank in range(this.world_size) if rank not in messages]


def node_name() -> str:
    """Return the host's name with the node's number, which distinguishes containers on one host."""
    number = os.environ.get("NODE_RANK") or os.environ.get("GROUP_RANK") or "0"
    return f"{socket.gethostname()} (node {number})"


def measure_rank(options: CheckOptions, device: torch.device) -> RankInfo:
    """Measure this rank's products, and read its versions and clock. Collective: all clocks are read after a
    barrier."""
    signs = Product.of_signs(256, NUM_TERMS, 256, torch.bfloat16)
    problem = describe_wrong_sums(signs, device)

    size = 8192
    if device.type == "cpu":
        size = 512 if options.quick else 1024
    flops_per_second = measure_product_flops(device, size, 3 if options.quick else 10)

    versions = {name: version or "missing" for name, version in find_versions().items()}
    versions["torch build"] = torch.version.cuda or torch.version.hip or "CPU"

    rank = this_rank().rank
    all_gather_json(rank)  # a barrier
    return RankInfo(rank, node_name(), versions, device_name(), flops_per_second, problem, time.time())


def measure_all_gather(ranks: Sequence[RankInfo], num_bytes: int, device: torch.device) -> Finding:
    """Time an all-gather of all ranks, which loads all network adapters of their nodes at once. Collective.

    `num_bytes` is the size of the gathered result. The finding has the slowest rank's bus bandwidth.
    """
    num_ranks = len(ranks)
    own_part = torch.zeros(num_bytes // 4 // num_ranks, device=device)
    gathered = torch.empty(num_ranks * len(own_part), device=device)
    all_gather = COLLECTIVES["all_gather"]
    seconds = measure_seconds(lambda: all_gather.run(gathered, own_part), device, 3)
    bus_bytes = all_gather.bus_factor(num_ranks) * own_part.nbytes
    slowest_rate = min(all_gather_json(bus_bytes / seconds))

    num_nodes = len({rank.node for rank in ranks})
    nodes = "nodes" if num_nodes > 1 else "node"
    place = f"{num_ranks} ranks on {num_nodes} {nodes} over {BACKENDS[vendor()]}"
    detail = f"{place}, bus bandwidth at {num_bytes / MIB:.0f} MiB"
    return Finding("all_gather", Status.PASS, slowest_rate / 1e9, "GB/s", detail)


# ----------------------------------------------------------------------------------------------------------- links


def choose_link_ranks(ranks: Sequence[RankInfo]) -> list[int]:
    """Return the ranks between which links are measured: the first rank of each node, or all ranks of a single node."""
    first_ranks = dict[str, int]()
    for rank in ranks:
        first_ranks.setdefault(rank.node, rank.rank)
    if len(first_ranks) == 1:
        return [rank.rank for rank in ranks]
    return list(first_ranks.values())


def round_robin(ranks: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of pairs of ranks, in which every pair occurs once and no rank is in two pairs of a round.

    This is the circle method of tournaments: the first rank keeps its place, and the others move on by one place in
    each round. [0, 1, 2, 3] gives [(0, 3), (1, 2)], [(0, 2), (1, 3)] and [(0, 1), (2, 3)], with the pairs in some
    order.
    """
    circle: list[int | None] = list(ranks)
    if len(ranks) % 2:
        circle.append(None)  # its partner has no pair in that round
    half = len(circle) // 2
    for _ in range(len(circle) - 1):
        opposite = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in opposite if a is not None and b is not None]
        circle = [circle[0], circle[-1], *circle[1:-1]]


def measure_links(link_ranks: Sequence[int], message_bytes: int, device: torch.device) -> list[Link]:
    """Measure the links between all pairs of `link_ranks`, sorted by their ranks. Collective.

    Pairs of one round are measured at the same time. Both ranks of a link measure it; what is returned is the
    measurement of one of them, on all ranks the same, and of one that has a problem if there is any.
    """
    own_links: list[Link] = []
    for pairs in round_robin(link_ranks):
        for first_rank, second_rank in pairs:
            if this_rank().rank in (first_rank, second_rank):
                own_links.append(measure_link(first_rank, second_rank, message_bytes, device))
        broadcast_json(None)  # a barrier: rounds do not overlap

    links: dict[tuple[int, int], Link] = {}
    for links_of_rank in all_gather_json(own_links):
        for fields in links_of_rank:
            link = Link(*fields)
            pair = (link.first_rank, link.second_rank)
            if link.problem or pair not in links:
                links[pair] = link
    return sorted(links.values())


def measure_link(first_rank: int, second_rank: int, message_bytes: int, device: torch.device) -> Link:
    """Send messages back and forth between two ranks, of which this is one. The other one calls it at the same time.

    A message of one number measures the latency. Large ones measure the bandwidth, and their content is compared.
    """
    rank = this_rank().rank
    is_first = rank == first_rank
    other_rank = second_rank if is_first else first_rank
    small_message = make_input(first_rank, 1, device)
    large_message = make_input(first_rank, message_bytes // 4, device)

    small_seconds, _ = time_round_trips(small_message, is_first, other_rank, NUM_PINGS)
    large_seconds, received = time_round_trips(large_message, is_first, other_rank, 3)

    num_wrong = int((received != large_message).sum())
    problem = ""
    if num_wrong:
        elements = f"{num_wrong} of {len(large_message)} elements from rank {other_rank}"
        problem = f"rank {rank} got {elements} that were not sent"
    return Link(first_rank, second_rank, 2 * message_bytes / large_seconds, small_seconds / 2, problem)


def time_round_trips(
    message: torch.Tensor, sends_first: bool, other_rank: int, repeats: int
) -> tuple[float, torch.Tensor]:
    """Send a message to the other rank and back, or return the other rank's message if not `sends_first`.

    Returns the seconds of the fastest of `repeats` round trips, after one that is not counted, and what arrived last.
    """
    seconds = []
    received = torch.empty_like(message)
    for _ in range(repeats + 1):
        synchronize()
        began = time.perf_counter()
        if sends_first:
            dist.send(message, other_rank)
            dist.recv(received, other_rank)
        else:
            dist.recv(received, other_rank)
            dist.send(received, other_rank)
        synchronize()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:]), received


# -------------------------------------------------------------------------------------------------------- findings


def compare_versions(ranks: Sequence[RankInfo]) -> Finding:
    """Name the nodes whose versions differ from those of most ranks. Another torch fails, the rest are warnings."""
    problems = []
    for package in ranks[0].versions:
        versions = [rank.versions[package] for rank in ranks]
        usual_version = max(versions, key=versions.count)
        for version in sorted(set(versions) - {usual_version}):
            nodes = [rank.node for rank in ranks if rank.versions[package] == version]
            distinct_nodes = ", ".join(dict.fromkeys(nodes))
            problems.append(f"{package} is {version} on {distinct_nodes}, {usual_version} on the others")

    differs_in_torch = any(problem.startswith("torch ") for problem in problems)
    common_versions = [f"{package} {version}" for package, version in ranks[0].versions.items()]
    return make_finding(
        "versions",
        problems,
        VERSIONS_FIX,
        Status.FAIL if differs_in_torch else Status.WARN,
        value=f"{len(ranks)} ranks",
        pass_detail=", ".join(common_versions),
    )


def compare_product_rates(ranks: Sequence[RankInfo]) -> Finding:
    """Report the slowest rank's rate of products, and warn of ranks below MIN_RATE_SHARE of the median.

    Devices of different kinds are a warning too.
    """
    median_rate = statistics.median(rank.flops_per_second for rank in ranks)
    slowest = min(ranks, key=lambda rank: rank.flops_per_second)

    problems = []
    device_names = sorted({rank.device for rank in ranks})
    if len(device_names) > 1:
        problems.append(f"devices of {len(device_names)} kinds: {', '.join(device_names)}")
    for rank in ranks:
        if rank.flops_per_second < MIN_RATE_SHARE * median_rate:
            share = rank.flops_per_second / median_rate
            problems.append(f"{rank.node} is slow: rank {rank.rank} has {share:.0%} of the median")

    return make_finding(
        "rate of products",
        problems,
        THROTTLED_FIX,
        Status.WARN,
        value=slowest.flops_per_second / 1e12,
        unit="TFLOP/s",
        pass_detail=f"rank {slowest.rank} on {slowest.node}, the slowest; the median is {median_rate / 1e12:.3g}",
    )


def compare_links(links: Sequence[Link], ranks: Sequence[RankInfo]) -> Iterator[Finding]:
    """Yield a finding for all links together, then one for each link, the slowest first.

    A link is slow if its bandwidth or latency is far from the median. The first finding names the nodes whose links are
    all slow, or else says how many links are. Data that arrived wrong fails; slow links are warnings.
    """
    if not links:
        yield Finding("links", Status.SKIP, detail="one rank alone has no link")
        return

    median_rate = statistics.median(link.bytes_per_second for link in links)
    median_latency = statistics.median(link.latency_seconds for link in links)
    slow_links = set()
    for link in links:
        has_low_bandwidth = link.bytes_per_second < MIN_BANDWIDTH_SHARE * median_rate
        has_high_latency = link.latency_seconds > MAX_LATENCY_RATIO * median_latency
        if has_low_bandwidth or has_high_latency:
            slow_links.add(link)

    fix = LINK_FIXES[vendor()]
    nodes = {rank.rank: rank.node for rank in ranks}
    wrong_data = [link.problem for link in links if link.problem]
    problems = [*wrong_data, *find_slow_nodes(links, slow_links, nodes)]
    if slow_links and not problems:
        problems = [f"{len(slow_links)} of {len(links)} links are slower than the others"]
    latency = f"{median_latency * 1e6:,.0f} us"
    if len(links) > 1:
        pass_detail = f"the median of {len(links)} pairs, {latency}; none is far from it"
    else:
        pass_detail = f"the only pair, {latency}"
    severity = Status.FAIL if wrong_data else Status.WARN
    yield make_finding("links", problems, fix, severity, value=median_rate / 1e9, unit="GB/s", pass_detail=pass_detail)

    for link in sorted(links, key=lambda link: link.bytes_per_second):
        first = f"rank {link.first_rank} on {nodes[link.first_rank]}"
        second = f"rank {link.second_rank} on {nodes[link.second_rank]}"
        yield make_finding(
            "link",
            # A slow link has an empty problem: its numbers say enough.
            [link.problem] if link.problem or link in slow_links else [],
            fix,
            Status.FAIL if link.problem else Status.WARN,
            value=link.bytes_per_second / 1e9,
            unit="GB/s",
            detail=f"{first} and {second}: {link.latency_seconds * 1e6:,.0f} us",
        )


def find_slow_nodes(links: Sequence[Link], slow_links: set[Link], nodes: Mapping[int, str]) -> list[str]:
    """Describe each node whose links are all slow, if it has more than one. `nodes` has the node of each rank."""
    links_of_rank: dict[int, list[Link]] = {}
    for link in links:
        links_of_rank.setdefault(link.first_rank, []).append(link)
        links_of_rank.setdefault(link.second_rank, []).append(link)

    problems = []
    for rank, own_links in links_of_rank.items():
        if len(own_links) > 1 and slow_links.issuperset(own_links):
            problems.append(f"{nodes[rank]} is slow in all its {len(own_links)} links")
    return problems
