"""Check of the collectives: their results among real ranks, their bandwidth, and the ranks' clocks.

`check_collectives` starts one rank per device, which use NCCL (RCCL on AMD), or two ranks on the CPU, which use gloo.
Each rank runs `run_rank` and writes a line of JSON for each step into its own file: first for the process group, then
for the clocks, then for each collective. `summarise_step` makes one finding from the ranks' results of a step.

The inputs are small integers, so that sums are exact in any order and the right result is known to the last bit. They
depend on the rank and the index without a short period, so that elements in a wrong place are noticed.
"""

import json
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
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
from llmfoundry_machines.doctor.examine import (
    EXIT_SECONDS,
    PRELOAD,
    describe_end,
    describe_error,
    forkserver,
    start_process,
)
from llmfoundry_machines.doctor.finding import CheckOptions, Finding, Status, make_finding, shorten
from llmfoundry_machines.doctor.folder import CLOCK_FIX
from llmfoundry_machines.doctor.speed import measure_seconds

READY = "process group"
CLOCKS = "clocks of the ranks"
MAX_APART_SECONDS = 1.0
"""Largest difference of two ranks' clocks, which are read right after a barrier."""
SECONDS_AFTER_DEATH = 2.0
"""Time that the other ranks have, after one has died, to report their errors. They cannot go on without it."""
SPREAD = 2654435761
"""Odd, and near 2^32 over the golden ratio: its multiples, modulo 2^32, are spread evenly (Knuth, volume 3, 6.4)."""
BYTES_PER_ELEMENT = 4
"""Collectives are tested in fp32."""
NCCL_FIX = "run again with NCCL_DEBUG=INFO; then with NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1"
LINK_FIXES = {
    "nvidia": f"{NCCL_FIX} to find the link",
    "amd": f"{NCCL_FIX} (RCCL reads them too)",
    "cpu": "run again with GLOO_SOCKET_IFNAME=lo; if it helps, set it to the right network interface (`ip address`)",
}
"""Vendor of the devices -> the remedy."""
BACKENDS = {"nvidia": "NCCL", "amd": "RCCL", "cpu": "gloo"}


class RankResult(NamedTuple):
    """One rank's result of one step. A rank that has found a problem sets nothing else."""

    problem: str = ""
    bytes_per_second: float = 0.0
    """Bus bandwidth of a collective; 0 if it was not measured."""
    clock: float = 0.0
    """The wall clock, in seconds."""
    host: str = ""


def check_collectives(options: CheckOptions) -> Iterator[Finding]:
    """Yield findings for the process group, the clocks and each collective. The first step that a rank lacks is the
    last.

    This process is not a rank. It starts the ranks and reads what they have written.
    """
    is_cpu = device_type() == "cpu"
    num_devices = None if is_cpu else torch.cuda.device_count()
    num_ranks = options.num_ranks or num_devices or 2
    if num_devices is not None and num_ranks > num_devices:
        detail = f"{num_ranks} ranks need a device each, and torch sees {num_devices}"
        yield Finding(READY, Status.FAIL, detail=detail, fix=f"--num-ranks {num_devices}, or leave it out")
        return

    num_bytes = (1 if options.quick else 16) * MIB
    if not is_cpu:
        num_bytes *= 4
    limit_seconds = options.ranks_limit_seconds
    results, deaths = run_ranks(num_ranks, num_bytes, limit_seconds)

    for step, name in enumerate((READY, CLOCKS, *COLLECTIVES)):
        step_results = {rank: of_rank[step] for rank, of_rank in enumerate(results) if len(of_rank) > step}
        yield summarise_step(name, step_results, deaths, num_ranks, num_bytes, limit_seconds)

        # Later steps would only repeat the problem.
        is_incomplete = len(step_results) < num_ranks
        has_problem = any(result.problem for result in step_results.values())
        if is_incomplete or (name == READY and has_problem):
            return


def run_ranks(num_ranks: int, num_bytes: int, limit_seconds: float) -> tuple[list[list[RankResult]], dict[int, str]]:
    """Start the ranks, wait until they have ended or the time is up, and kill those that are left.

    Returns each rank's results, one for each step that it has reached, and {rank: how it ended} for those that ended
    with an error. A rank that hung is in neither: its results are just fewer.
    """
    # A fork is quick, but CUDA cannot be used in forks of a process that has looked for devices.
    context = multiprocessing.get_context("fork") if device_type() == "cpu" else forkserver
    forkserver.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="doctor_") as folder:
        processes = []
        for rank in range(num_ranks):
            arguments = (rank, num_ranks, num_bytes, folder, limit_seconds)
            processes.append(start_process(run_rank, arguments, limit_seconds, f"{folder}/{rank}.txt", context))
        wait_for_ranks(processes, limit_seconds)

        # Before the killing, which would give every rank an exit code.
        deaths = {}
        for rank, process in enumerate(processes):
            if process.exitcode:
                deaths[rank] = describe_end(process, f"{folder}/{rank}.txt")
        for process in processes:
            process.kill()
            process.join(EXIT_SECONDS)

        results = []
        for rank in range(num_ranks):
            file = Path(folder, f"{rank}.json")
            lines = file.read_text().splitlines() if file.exists() else []
            results.append([RankResult(*json.loads(line)) for line in lines])
    return results, deaths


def wait_for_ranks(processes: Sequence[BaseProcess], limit_seconds: float) -> None:
    """Wait until all processes have ended or the time is up, which is SECONDS_AFTER_DEATH after one ends with an
    error."""
    deadline = time.monotonic() + limit_seconds
    while True:
        remaining_seconds = deadline - time.monotonic()
        running = [process.sentinel for process in processes if process.exitcode is None]
        if remaining_seconds <= 0 or not running:
            return
        wait(running, remaining_seconds)
        if any(process.exitcode for process in processes):
            deadline = min(deadline, time.monotonic() + SECONDS_AFTER_DEATH)


def summarise_step(
    name: str,
    results: Mapping[int, RankResult],
    deaths: Mapping[int, str],
    num_ranks: int,
    num_bytes: int,
    limit_seconds: float,
) -> Finding:
    """Make one finding from the ranks' results of one step: READY, CLOCKS, or a collective's name.

    `results` has the ranks that reached the step, and `deaths` how ranks ended that died at any step. A rank in neither
    has not answered within `limit_seconds`. The value of a collective is the slowest rank's bus bandwidth.
    """
    place = f"{num_ranks} ranks over {BACKENDS[vendor()]}"
    # A rank that died is named before those that failed because they waited for it.
    problems = [f"rank {rank} {end}" for rank, end in deaths.items() if rank not in results]
    problems += [f"rank {rank} {result.problem}" for rank, result in results.items() if result.problem]

    silent_ranks = [str(rank) for rank in range(num_ranks) if rank not in {*results, *deaths}]
    if silent_ranks and not problems:
        # A rank may complete this step and die in the next one, while others still wait for it here.
        problems = [f"rank {rank} {end}" for rank, end in deaths.items()]
    if silent_ranks and not problems:
        problems.append(f"no answer from rank {', '.join(silent_ranks)} within {limit_seconds:g} s")
    if problems:
        return Finding(name, Status.FAIL, detail=f"{place}: {shorten(problems)}", fix=LINK_FIXES[vendor()])

    if name == CLOCKS:
        return compare_clocks({rank: (result.host, result.clock) for rank, result in results.items()})
    slowest_rate = min(result.bytes_per_second for result in results.values())
    if not slowest_rate:
        return Finding(name, Status.PASS, detail=place)
    detail = f"{place}, bus bandwidth at {num_bytes / MIB:.0f} MiB"
    return Finding(name, Status.PASS, slowest_rate / 1e9, "GB/s", detail)


def compare_clocks(clocks: Mapping[int, tuple[str, float]]) -> Finding:
    """Warn if two ranks' clocks are more than MAX_APART_SECONDS apart.

    `clocks` has each rank's host and its time in seconds, which all ranks read right after a barrier.
    """
    earliest_rank = min(clocks, key=lambda rank: clocks[rank][1])
    latest_rank = max(clocks, key=lambda rank: clocks[rank][1])
    earliest_host, earliest_time = clocks[earliest_rank]
    latest_host, latest_time = clocks[latest_rank]
    apart_seconds = latest_time - earliest_time

    problems = []
    if apart_seconds > MAX_APART_SECONDS:
        ahead = f"{apart_seconds:,.1f} s ahead of rank {earliest_rank} on {earliest_host}"
        problems.append(f"rank {latest_rank} on {latest_host} is {ahead}")
    num_hosts = len({host for host, _ in clocks.values()})
    hosts = "host" if num_hosts == 1 else "hosts"
    return make_finding(
        CLOCKS,
        problems,
        CLOCK_FIX,
        Status.WARN,
        value=apart_seconds * 1e3,
        unit="ms",
        detail=f"{len(clocks)} ranks on {num_hosts} {hosts}, read right after a barrier",
    )


# ------------------------------------------------------------------------------------------------ in a rank


def run_rank(rank: int, num_ranks: int, num_bytes: int, folder: str, limit_seconds: float) -> None:
    """Run all steps as one rank, in a process of its own, and append each step's result to `folder`/`rank`.json.

    Each line is written before the next step begins, so that the results stay if that step hangs. The process exits
    here.
    """

    def write_result(result: RankResult) -> None:
        with open(f"{folder}/{rank}.json", "a") as file:
            print(json.dumps(result), file=file)

    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if device_type() == "cuda" else torch.device("cpu")
    group_options: dict[str, Any] = {
        "init_method": f"file://{folder}/rendezvous",
        "rank": rank,
        "world_size": num_ranks,
        "timeout": timedelta(seconds=limit_seconds),
    }
    use_loopback()
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
            dist.init_process_group("nccl", device_id=device, **group_options)
        else:
            dist.init_process_group("gloo", **group_options)
    except Exception as error:
        write_result(RankResult(problem=describe_error(error)))
        os._exit(1)
    write_result(RankResult())

    write_result(read_clock(device))
    for collective in COLLECTIVES.values():
        write_result(check_collective(collective, num_bytes, device))
    os._exit(0)  # the group's own clean-up may wait for a rank that has gone


def read_clock(device: torch.device) -> RankResult:
    """Read this rank's wall clock at the same moment as the other ranks. Collective."""
    try:
        dist.all_reduce(torch.zeros(1, device=device))  # a barrier that every backend has
        if device.type == "cuda":
            torch.cuda.synchronize()
        return RankResult(clock=time.time(), host=socket.gethostname())
    except RuntimeError as error:
        return RankResult(problem=describe_error(error))


def check_collective(collective: "Collective", num_bytes: int, device: torch.device) -> RankResult:
    """Compare a collective's results with the right ones, and measure its bus bandwidth for `num_bytes`. Collective.

    It runs once with 16 elements per rank and once with all of `num_bytes`, because NCCL uses different protocols for
    small and large messages. Only the large one is measured. An error of the backend is returned as a problem.
    """
    rank = dist.get_rank()
    num_ranks = dist.get_world_size()
    num_small = num_ranks * 16
    num_large = num_bytes // BYTES_PER_ELEMENT // num_ranks * num_ranks  # divisible among the ranks
    bytes_per_second = 0.0
    try:
        for num_elements in (num_small, num_large):
            # Every rank can compute all inputs, and so the right result.
            inputs = [make_input(input_rank, num_elements, device) for input_rank in range(num_ranks)]
            expected = collective.compute_expected(inputs, rank).contiguous()
            output = torch.empty_like(expected)
            collective.run(output, inputs[rank])

            is_wrong = output != expected
            if is_wrong.any():
                wrong_indices = is_wrong.nonzero().flatten()
                first = int(wrong_indices[0])
                count = f"{len(wrong_indices)} of {len(expected)} elements wrong"
                elements = f"{output[first].item():g}, not {expected[first].item():g}"
                return RankResult(problem=f"got {count}, the first at {first}: {elements}")

            if num_elements > num_small and num_ranks > 1:
                seconds = measure_seconds(partial(collective.run, output, inputs[rank]), device, 3)
                bus_bytes = collective.bus_factor(num_ranks) * BYTES_PER_ELEMENT * num_elements
                bytes_per_second = bus_bytes / seconds
    except RuntimeError as error:
        return RankResult(problem=describe_error(error))
    return RankResult(bytes_per_second=bytes_per_second)


def make_input(rank: int, num_elements: int, device: torch.device) -> torch.Tensor:
    """Return a rank's input: integers from 1 to 251, times rank + 1, as fp32.

    Sums over the ranks are below 2^24, which fp32 holds exactly, for up to 360 ranks. The integers are the hashed
    indices (SPREAD), because a repeating sequence would look the same after a shift.
    """
    indices = torch.arange(num_elements, dtype=torch.int64, device=device)
    hashes = indices * SPREAD & (1 << 32) - 1
    integers = (hashes >> 8) % 251 + 1
    return integers.float() * (rank + 1)


class Collective(NamedTuple):
    """One collective operation of torch.distributed, with its right result."""

    run: Callable[[torch.Tensor, torch.Tensor], object]
    """(output, this rank's input): fills the output."""
    compute_expected: Callable[[list[torch.Tensor], int], torch.Tensor]
    """(inputs of all ranks, this rank) -> the right output."""
    bus_factor: Callable[[int], float]
    """Number of ranks -> bytes over one link for each byte of the input; the convention of nccl-tests,
    PERFORMANCE.md."""


COLLECTIVES = {
    "all_reduce": Collective(
        lambda output, own_input: dist.all_reduce(output.copy_(own_input)),
        lambda inputs, rank: torch.stack(inputs).sum(0),
        lambda n: 2 * (n - 1) / n,
    ),
    "reduce_scatter": Collective(
        lambda output, own_input: dist.reduce_scatter_tensor(output, own_input),
        lambda inputs, rank: torch.stack(inputs).sum(0).chunk(len(inputs))[rank],
        lambda n: (n - 1) / n,
    ),
    "all_gather": Collective(
        lambda output, own_input: all_gather_single(output, own_input),
        lambda inputs, rank: torch.cat(inputs),
        lambda n: n - 1,
    ),
    "broadcast": Collective(
        lambda output, own_input: dist.broadcast(output.copy_(own_input), src=dist.get_world_size() - 1),
        lambda inputs, rank: inputs[-1],
        lambda n: 1,
    ),
    "all_to_all": Collective(
        lambda output, own_input: dist.all_to_all_single(output, own_input),
        lambda inputs, rank: torch.cat([one_input.chunk(len(inputs))[rank] for one_input in inputs]),
        lambda n: (n - 1) / n,
    ),
}
