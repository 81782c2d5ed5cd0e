"""Collectives among real ranks against computed answers, their bandwidth, and the ranks' clocks.

One rank per device over NCCL or RCCL, or two ranks over gloo on CPUs, started here. Each contributes small integers, so
that sums are exact in any order. They depend on the rank and the index, and no stretch repeats, so that an element in
the wrong place is noticed.
"""

import json
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from llmfoundry_lite.devices import device_type, vendor
from llmfoundry_lite.hardware import MIB
from llmfoundry_lite.ranks.exchange import all_gather_single
from llmfoundry_lite.ranks.start import use_loopback
from llmfoundry_machines.doctor.examine import PRELOAD, describe_end, describe_error, forkserver, start_process
from llmfoundry_machines.doctor.finding import CheckOptions, Finding, Status, make_finding, shorten
from llmfoundry_machines.doctor.folder import CLOCK_FIX
from llmfoundry_machines.doctor.speed import measure_seconds

READY = "process group"
CLOCKS = "clocks of the ranks"
MAX_APART_SECONDS = 1.0
"""Largest difference of two ranks' clocks, which are read right after a barrier."""
SPREAD = 2654435761
"""Odd, and near 2^32 over the golden ratio: its multiples, modulo 2^32, are spread evenly (Knuth, volume 3, 6.4)."""
NCCL_FIX = "run again with NCCL_DEBUG=INFO; then with NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1"
OTHER_FIX = {
    "nvidia": f"{NCCL_FIX} to find the link",
    "amd": f"{NCCL_FIX} (RCCL reads them too)",
    "cpu": "run again with GLOO_SOCKET_IFNAME=lo; if it helps, set it to the right network interface (`ip address`)",
}
BACKENDS = {"nvidia": "NCCL", "amd": "RCCL", "cpu": "gloo"}


class Report(NamedTuple):
    """One rank's result of one step."""

    problem: str = ""
    bytes_per_second: float = 0.0
    clock: float = 0.0
    """The wall clock, in seconds."""
    host: str = ""


def check_collectives(machine: CheckOptions) -> Iterator[Finding]:
    """Yield one finding for each collective; the first that hangs ends the check."""
    is_cpu = device_type() == "cpu"
    most = None if is_cpu else torch.cuda.device_count()
    num_ranks = machine.num_ranks or most or 2
    if most is not None and num_ranks > most:
        detail = f"{num_ranks} ranks need a device each, and torch sees {most}"
        yield Finding(READY, Status.FAIL, detail=detail, fix=f"--num-ranks {most}, or leave it out")
        return
    size = (1 if machine.quick else 16) * MIB * (1 if is_cpu else 4)
    # A fork is quick, but CUDA cannot be used in forks of a process that has looked for devices.
    context = multiprocessing.get_context("fork") if is_cpu else forkserver
    forkserver.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="doctor_") as folder:
        limit, ranks = machine.ranks_limit_seconds, range(num_ranks)
        given = (num_ranks, size, folder, limit)
        processes = [start_process(run_rank, (r, *given), limit, f"{folder}/{r}.txt", context) for r in ranks]
        wait_for(processes, limit)
        dead = {r: describe_end(processes[r], f"{folder}/{r}.txt") for r in ranks if processes[r].exitcode}
        for process in processes:
            process.kill()
            process.join(5)
        files = [Path(folder, f"{rank}.json") for rank in ranks]
        lines = [file.read_text().splitlines() if file.exists() else [] for file in files]
        reports = [[Report(*json.loads(line)) for line in of_rank] for of_rank in lines]
    for step, name in enumerate((READY, CLOCKS, *COLLECTIVES)):
        found = {rank: reports[rank][step] for rank in ranks if len(reports[rank]) > step}
        yield judge_step(name, found, dead, num_ranks, size, limit)
        if len(found) < num_ranks or (name == READY and any(report.problem for report in found.values())):
            return


def wait_for(processes: Sequence[BaseProcess], limit_seconds: float) -> None:
    """Wait until all have ended, or until 2 s after one has died: the others cannot go on, and report errors."""
    deadline = time.monotonic() + limit_seconds
    while (left := deadline - time.monotonic()) > 0:
        running = [process.sentinel for process in processes if process.exitcode is None]
        if not running:
            return
        wait(running, left)
        if any(process.exitcode for process in processes):
            deadline = min(deadline, time.monotonic() + 2.0)


def judge_step(
    name: str, reports: Mapping[int, Report], dead: Mapping[int, str], num_ranks: int, size: int, limit_seconds: float
) -> Finding:
    place = f"{num_ranks} ranks over {BACKENDS[vendor()]}"
    # A rank that died comes before those that waited for it.
    problems = [f"rank {rank} {words}" for rank, words in dead.items() if rank not in reports]
    problems += [f"rank {rank} {report.problem}" for rank, report in reports.items() if report.problem]
    silent = [str(rank) for rank in range(num_ranks) if rank not in {*reports, *dead}]
    if silent and not problems:  # the dead one may have gone further than those that still wait for it
        problems = [f"rank {rank} {words}" for rank, words in dead.items()]
    if silent and not problems:
        problems.append(f"no answer from rank {', '.join(silent)} within {limit_seconds:g} s")
    if problems:
        return Finding(name, Status.FAIL, detail=f"{place}: {shorten(problems)}", fix=OTHER_FIX[vendor()])
    if name == CLOCKS:
        return judge_clocks({rank: (report.host, report.clock) for rank, report in reports.items()})
    rate = min(report.bytes_per_second for report in reports.values())
    if not rate:
        return Finding(name, Status.PASS, detail=place)
    detail = f"{place}, bus bandwidth at {size / MIB:.0f} MiB"
    return Finding(name, Status.PASS, rate / 1e9, "GB/s", detail)


def judge_clocks(clocks: Mapping[int, tuple[str, float]]) -> Finding:
    """Compare the ranks' (host, seconds), which they have read at the same time."""
    first, last = (pick(clocks, key=lambda rank: clocks[rank][1]) for pick in (min, max))
    (first_host, earliest), (last_host, latest) = clocks[first], clocks[last]
    num_hosts = len({host for host, _ in clocks.values()})
    detail = f"{len(clocks)} ranks on {num_hosts} host{'s' * (num_hosts > 1)}, read right after a barrier"
    apart = latest - earliest
    problems = [f"rank {last} on {last_host} is {apart:,.1f} s ahead of rank {first} on {first_host}"]
    problems = problems if apart > MAX_APART_SECONDS else []
    return make_finding(CLOCKS, problems, CLOCK_FIX, Status.WARN, value=apart * 1e3, unit="ms", detail=detail)


# ------------------------------------------------------------------------------------------------ in a rank


def run_rank(rank: int, num_ranks: int, size: int, folder: str, limit_seconds: float) -> None:
    def send(report: Report) -> None:
        with open(f"{folder}/{rank}.json", "a") as file:
            print(json.dumps(report), file=file)

    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if device_type() == "cuda" else torch.device("cpu")
    options: dict[str, Any] = {
        "init_method": f"file://{folder}/rendezvous",
        "rank": rank,
        "world_size": num_ranks,
        "timeout": timedelta(seconds=limit_seconds),
    }
    use_loopback()
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
            dist.init_process_group("nccl", device_id=device, **options)
        else:
            dist.init_process_group("gloo", **options)
    except Exception as error:
        send(Report(problem=describe_error(error)))
        os._exit(1)
    send(Report())
    send(read_clock(device))
    for collective in COLLECTIVES.values():
        send(try_collective(collective, size, device))
    os._exit(0)  # the group's own clean-up may wait for a rank that has gone


def read_clock(device: torch.device) -> Report:
    try:
        dist.all_reduce(torch.zeros(1, device=device))  # a barrier that every backend has
        if device.type == "cuda":
            torch.cuda.synchronize()
        return Report(clock=time.time(), host=socket.gethostname())
    except RuntimeError as error:
        return Report(problem=describe_error(error))


def try_collective(collective: "Collective", size: int, device: torch.device) -> Report:
    """Compare the results for a few elements and for many, which NCCL sends in different ways; then measure."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    rate = 0.0
    try:
        for count in (num_ranks * 16, size // 4 // num_ranks * num_ranks):
            inputs = [contribution(other, count, device) for other in range(num_ranks)]
            mine, right = inputs[rank], collective.answer(inputs, rank).contiguous()
            got = torch.empty_like(right)
            collective.run(got, mine)
            if not torch.equal(got, right):
                wrong = (got != right).nonzero().flatten()
                first = int(wrong[0])
                values = f"{got[first].item():g}, not {right[first].item():g}"
                where = f"{len(wrong)} of {len(right)} elements wrong, the first at {first}"
                return Report(problem=f"got {where}: {values}")
            if count > num_ranks * 16 and num_ranks > 1:
                seconds = measure_seconds(lambda out=got, mine=mine: collective.run(out, mine), device, 3)
                rate = collective.bus_share(num_ranks) * 4 * count / seconds
    except RuntimeError as error:
        return Report(problem=describe_error(error))
    return Report(bytes_per_second=rate)


def contribution(rank: int, count: int, device: torch.device) -> torch.Tensor:
    """Return integers up to 251 (rank + 1): sums over ranks stay exact in fp32 for up to 360 ranks."""
    spread = torch.arange(count, dtype=torch.int64, device=device) * SPREAD & (1 << 32) - 1
    return ((spread >> 8) % 251 + 1).float() * (rank + 1)


class Collective(NamedTuple):
    run: Callable[[torch.Tensor, torch.Tensor], object]
    """(output, this rank's input)"""
    answer: Callable[[list[torch.Tensor], int], torch.Tensor]
    """(inputs of all ranks, this rank) -> the right output."""
    bus_share: Callable[[int], float]
    """Bytes over one link for each byte of the input; the convention of nccl-tests, PERFORMANCE.md."""


COLLECTIVES = {
    "all_reduce": Collective(
        lambda out, mine: dist.all_reduce(out.copy_(mine)),
        lambda inputs, rank: torch.stack(inputs).sum(0),
        lambda n: 2 * (n - 1) / n,
    ),
    "reduce_scatter": Collective(
        lambda out, mine: dist.reduce_scatter_tensor(out, mine),
        lambda inputs, rank: torch.stack(inputs).sum(0).chunk(len(inputs))[rank],
        lambda n: (n - 1) / n,
    ),
    "all_gather": Collective(
        lambda out, mine: all_gather_single(out, mine),
        lambda inputs, rank: torch.cat(inputs),
        lambda n: n - 1,
    ),
    "broadcast": Collective(
        lambda out, mine: dist.broadcast(out.copy_(mine), src=dist.get_world_size() - 1),
        lambda inputs, rank: inputs[-1],
        lambda n: 1,
    ),
    "all_to_all": Collective(
        lambda out, mine: dist.all_to_all_single(out, mine),
        lambda inputs, rank: torch.cat([given.chunk(len(inputs))[rank] for given in inputs]),
        lambda n: (n - 1) / n,
    ),
}
