"""Collectives among real ranks against computed answers, and their bandwidth.

One rank per device over NCCL or RCCL, or two ranks over gloo on CPUs, started here. Every rank contributes small
integers that depend on its rank and the index, so that sums are exact in any order. No stretch of them repeats, so that
elements in the wrong place are not the right ones, however far they have moved. The ranks' clocks are compared too.
"""

import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkContext, ForkServerContext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from llmfoundry_lite.devices import device_type, vendor
from llmfoundry_lite.doctor.alone import PRELOAD, describe_end, forkserver, last_words, reason, start
from llmfoundry_lite.doctor.clock import SET_CLOCK
from llmfoundry_lite.doctor.finding import Finding, Machine, Status, shorten
from llmfoundry_lite.doctor.timing import measure_seconds
from llmfoundry_lite.hardware import MIB

Sabotage = Callable[[int], None]
"""Called with the rank when its process group stands; tests break something there."""

Context = ForkContext | ForkServerContext

READY = "process group"
CLOCKS = "clocks of the ranks"
MOST_APART_SECONDS = 1.0
"""Of two ranks' clocks, which are read right after a barrier."""
SPREAD = 2654435761
"""Odd, and near 2^32 over the golden ratio: products with it, modulo 2^32, are spread evenly (Knuth, volume 3, 6.4)."""
OTHER_FIX = {
    "nvidia": "run again with NCCL_DEBUG=INFO; then with NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1 to find the link",
    "amd": "run again with NCCL_DEBUG=INFO; then with NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1 (RCCL reads them too)",
    "cpu": "run again with GLOO_SOCKET_IFNAME=lo; if it helps, set it to the right network interface (`ip address`)",
}


class Report(NamedTuple):
    """What one rank says of one collective."""

    name: str
    problem: str = ""
    unsupported: str = ""
    bytes_per_second: float = 0.0
    clock: float = 0.0
    """What the wall clock shows, in seconds."""
    host: str = ""


def check(machine: Machine, sabotage: Sabotage | None = None) -> Iterator[Finding]:
    """One finding for each collective; the first that does not come back ends the check."""
    most = torch.cuda.device_count() if device_type() == "cuda" else None
    num_ranks = machine.num_ranks or most or 2
    if most is not None and num_ranks > most:
        detail = f"{num_ranks} ranks need a device each, and torch sees {most}"
        yield Finding(check=READY, status=Status.FAIL, detail=detail, fix=f"--num-ranks {most}, or leave it out")
        return
    size = (1 if machine.quick else 16) * MIB * (4 if device_type() == "cuda" else 1)
    with tempfile.TemporaryDirectory(prefix="doctor_") as folder:
        group = Group(num_ranks, size, folder, machine.ranks_limit_seconds, sabotage)
        context = _context()
        ranks = [_Rank(group, rank, context) for rank in range(num_ranks)]
        deadline = time.monotonic() + machine.ranks_limit_seconds
        try:
            for name in (READY, CLOCKS, *COLLECTIVES):
                reports, dead = _collect(ranks, deadline)
                finding = _judge(name, reports, dead, group)
                if name == CLOCKS and finding.status is Status.PASS:
                    finding = judge_clocks(reports)
                yield finding
                if len(reports) < num_ranks or (name == READY and finding.status is Status.FAIL):
                    return
        finally:
            for rank in ranks:
                rank.process.kill()
                rank.process.join(5)


def _context() -> Context:
    """How ranks begin: a fork is quick, but CUDA cannot be used in forks of a process that has looked for devices."""
    if device_type() == "cpu":
        return multiprocessing.get_context("fork")
    forkserver.set_forkserver_preload(PRELOAD)  # of this process's own server
    return forkserver


class Group(NamedTuple):
    """What the ranks have in common."""

    num_ranks: int
    size_bytes: int
    """Of the larger messages."""
    folder: str
    """Where they find each other, and print."""
    limit_seconds: float
    sabotage: Sabotage | None


class _Rank:
    """The far end of one rank's process."""

    def __init__(self, group: Group, rank: int, context: Context):
        self.output = f"{group.folder}/rank{rank}.txt"
        self.receiver, sender = context.Pipe(duplex=False)
        self.process = start(_run_rank, (group, rank, sender), group.limit_seconds, self.output, context)
        sender.close()


def _collect(ranks: list[_Rank], deadline: float) -> tuple[dict[int, Report], dict[int, str]]:
    """Each rank's next report, and how those ended that died first; the others gave no answer in time."""
    reports: dict[int, Report] = {}
    dead: dict[int, str] = {}
    while len(reports) + len(dead) < len(ranks):
        waiting: dict[Any, int] = {
            rank.receiver: number for number, rank in enumerate(ranks) if number not in reports | dead
        }
        # Once a rank is dead the others cannot go on; they have a moment to say something of their own.
        patience = 2.0 if dead else deadline - time.monotonic()
        ready = wait(list(waiting), max(0.0, patience))
        if not ready:
            break
        receiver: Any
        for receiver in ready:
            number = waiting[receiver]
            try:
                reports[number] = receiver.recv()
            except EOFError:
                ranks[number].process.join(5)
                dead[number] = f"{describe_end(ranks[number].process)}{last_words(ranks[number].output)}"
    return reports, dead


def _judge(name: str, reports: dict[int, Report], dead: dict[int, str], group: Group) -> Finding:
    place = f"{group.num_ranks} ranks over {_backend()}"
    # Who died comes before who waited for the dead one.
    problems = [f"rank {number} {words}" for number, words in sorted(dead.items())]
    problems += [f"rank {number} {report.problem}" for number, report in sorted(reports.items()) if report.problem]
    silent = [str(number) for number in range(group.num_ranks) if number not in reports | dead]
    if silent and not problems:
        problems.append(f"no answer from rank {', '.join(silent)} within {group.limit_seconds:g} s")
    unsupported = next((report.unsupported for report in reports.values() if report.unsupported), "")
    rates = [report.bytes_per_second for report in reports.values()]
    if problems:
        return Finding(check=name, status=Status.FAIL, detail=f"{place}: {shorten(problems)}", fix=OTHER_FIX[vendor()])
    if unsupported:
        return Finding(check=name, status=Status.SKIP, detail=f"{_backend()}: {unsupported}")
    if name == READY or not min(rates):
        return Finding(check=name, status=Status.PASS, detail=place)
    detail = f"{place}, bus bandwidth at {group.size_bytes / MIB:.0f} MiB"
    return Finding(check=name, status=Status.PASS, value=min(rates) / 1e9, unit="GB/s", detail=detail)


def judge_clocks(reports: dict[int, Report]) -> Finding:
    """The clocks of all ranks, which they have read at the same time."""
    clocks = {rank: report.clock for rank, report in reports.items()}
    first, last = min(clocks, key=clocks.__getitem__), max(clocks, key=clocks.__getitem__)
    apart = clocks[last] - clocks[first]
    hosts = {report.host for report in reports.values()}
    detail = f"{len(clocks)} ranks on {len(hosts)} host{'s' * (len(hosts) > 1)}, read right after a barrier"
    wrong = apart > MOST_APART_SECONDS
    if wrong:
        detail += f"; rank {last} on {reports[last].host} is {apart:,.1f} s ahead of rank {first} on "
        detail += reports[first].host
    return Finding(
        check=CLOCKS,
        status=Status.WARN if wrong else Status.PASS,
        value=apart * 1e3,
        unit="ms",
        detail=detail,
        fix=SET_CLOCK if wrong else "",
    )


def _backend() -> str:
    return {"nvidia": "NCCL", "amd": "RCCL", "cpu": "gloo"}[vendor()]


# ------------------------------------------------------------------------------------------------ in a rank


def _run_rank(group: Group, rank: int, sender: Connection) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if device_type() == "cuda" else torch.device("cpu")
    options: dict[str, Any] = {
        "init_method": f"file://{group.folder}/rendezvous",
        "rank": rank,
        "world_size": group.num_ranks,
        "timeout": timedelta(seconds=group.limit_seconds),
    }
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
            dist.init_process_group("nccl", device_id=device, **options)
        else:
            dist.init_process_group("gloo", **options)
    except Exception as error:
        sender.send(Report(READY, problem=reason(error)))
        os._exit(1)
    sender.send(Report(READY))
    if group.sabotage is not None:
        group.sabotage(rank)
    sender.send(_read_clock(device))
    for name, collective in COLLECTIVES.items():
        sender.send(_try(name, collective, group.size_bytes, device))
    os._exit(0)  # taking a process group down may wait for a rank that has gone


def _read_clock(device: torch.device) -> Report:
    try:
        dist.all_reduce(torch.zeros(1, device=device))  # a barrier, of the kind that was made for this backend
        if device.type == "cuda":
            torch.cuda.synchronize()
        return Report(CLOCKS, clock=time.time(), host=socket.gethostname())
    except RuntimeError as error:
        return Report(CLOCKS, problem=reason(error))


def _try(name: str, collective: "Collective", size: int, device: torch.device) -> Report:
    """The answers for a few elements and for many, which NCCL sends in different ways; then the clock."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    rate = 0.0
    try:
        for count in (num_ranks * 16, size // 4 // num_ranks * num_ranks):
            inputs = [_contribution(other, count, device) for other in range(num_ranks)]
            got = collective.run(inputs[rank].clone())
            problem = _compare(got, collective.answer(inputs, rank))
            if problem:
                return Report(name, problem=problem)
            if count > num_ranks * 16 and num_ranks > 1:
                seconds = measure_seconds(lambda mine=inputs[rank]: collective.run(mine), device, 3)
                rate = collective.bus_share(num_ranks) * 4 * count / seconds
    except (RuntimeError, NotImplementedError) as error:
        if "not support" in str(error) or isinstance(error, NotImplementedError):
            return Report(name, unsupported=reason(error))
        return Report(name, problem=reason(error))
    return Report(name, bytes_per_second=rate)


def _contribution(rank: int, count: int, device: torch.device) -> torch.Tensor:
    """Integers up to 251 (rank + 1): sums over ranks stay exact in fp32 for up to 360 ranks."""
    spread = torch.arange(count, dtype=torch.int64, device=device) * SPREAD & (1 << 32) - 1
    return ((spread >> 8) % 251 + 1).float() * (rank + 1)


def _compare(got: torch.Tensor, right: torch.Tensor) -> str:
    if torch.equal(got, right):
        return ""
    wrong = (got != right).nonzero().flatten()
    first = int(wrong[0])
    value, expected = got[first].item(), right[first].item()
    return f"got {len(wrong)} of {len(right)} elements wrong, the first at {first}: {value:g}, not {expected:g}"


class Collective(NamedTuple):
    run: Callable[[torch.Tensor], torch.Tensor]
    """What this rank gives -> what it gets; the input may be overwritten."""
    answer: Callable[[list[torch.Tensor], int], torch.Tensor]
    """(what all ranks give, this rank) -> what it must get."""
    bus_share: Callable[[int], float]
    """What one link carries for each byte of the input; the convention of nccl-tests, PERFORMANCE.md."""


def _all_reduce(mine: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(mine)
    return mine


def _reduce_scatter(mine: torch.Tensor) -> torch.Tensor:
    out = torch.empty(len(mine) // dist.get_world_size(), device=mine.device)
    dist.reduce_scatter_tensor(out, mine)
    return out


def _all_gather(mine: torch.Tensor) -> torch.Tensor:
    out = torch.empty(len(mine) * dist.get_world_size(), device=mine.device)
    dist.all_gather_into_tensor(out, mine)
    return out


def _broadcast(mine: torch.Tensor) -> torch.Tensor:
    dist.broadcast(mine, src=dist.get_world_size() - 1)
    return mine


def _all_to_all(mine: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(mine)
    dist.all_to_all_single(out, mine)
    return out


def _sum(inputs: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(inputs).sum(0)


def _chunk(values: torch.Tensor, index: int, count: int) -> torch.Tensor:
    return values.chunk(count)[index]


COLLECTIVES = {
    "all_reduce": Collective(_all_reduce, lambda inputs, rank: _sum(inputs), lambda n: 2 * (n - 1) / n),
    "reduce_scatter": Collective(
        _reduce_scatter, lambda inputs, rank: _chunk(_sum(inputs), rank, len(inputs)), lambda n: (n - 1) / n
    ),
    "all_gather": Collective(_all_gather, lambda inputs, rank: torch.cat(inputs), lambda n: n - 1),
    "broadcast": Collective(_broadcast, lambda inputs, rank: inputs[-1], lambda n: 1),
    "all_to_all": Collective(
        _all_to_all,
        lambda inputs, rank: torch.cat([_chunk(given, rank, len(inputs)) for given in inputs]),
        lambda n: (n - 1) / n,
    ),
}
