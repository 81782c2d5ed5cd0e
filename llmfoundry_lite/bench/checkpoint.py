"""What does saving cost the training loop, and how fast is it durable and back, beside peers and this machine's limits?

    llmfoundry-lite bench checkpoint --folder /data/scratch --out .

Two real ranks hold one 125M MPT with AdamW's state, sharded by `parallel`, and save it in turns: our `Saver`, torch's
`dcp.save` and `dcp.async_save`, and what Composer's CheckpointSaver calls for sharded state. Every round also measures
the limits on the same bytes: a copy of the local state in memory, a plain write + fsync of one
file per rank, a plain read. Then our side alone, from 10M to 350M parameters.

How it is counted. Stall: the slowest rank's time in the call that starts a save, collecting the state included.
Durable: from there until all bytes are synced; peers' files and folders get an fsync more, because ours have had
theirs (torch syncs its data files itself, so this costs the peers next to nothing). The first save of each side, which
makes its buffers, is reported apart. `async_save` is given a stager that lives as long as ours does, so that its
buffers are reused too. Loads start from a page cache from which the files were dropped (posix_fadvise after fsync),
checked with mincore; a host's cache below a virtual disk cannot be dropped from here. "Unverified" is our own `load`
with its hashing left out (`verify=False`, of the Python function only). Before each measurement, whosever it is, the
ranks touch and free the memory it will need, see `warm_up`.

Nothing is left in `--folder` unless this process is killed with SIGKILL.
"""

import ctypes
import gc
import json
import mmap
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict

from llmfoundry_lite.checkpoint import exchange
from llmfoundry_lite.checkpoint.format import About, as_bytes, open_saver
from llmfoundry_lite.checkpoint.manifest import Timestamp
from llmfoundry_lite.checkpoint.places import LocalPlace
from llmfoundry_lite.checkpoint.restore import load
from llmfoundry_lite.checkpoint.state import local_part, read_state
from llmfoundry_lite.checkpoint.store import CheckpointStore
from llmfoundry_lite.config.schema import FSDPConfig, ModelConfig
from llmfoundry_lite.devices import device_type
from llmfoundry_lite.errors import DataError, UserError
from llmfoundry_lite.models.flops import count_parameters

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 512},
    "10m": {"d_model": 256, "n_heads": 4, "n_layers": 7, "vocab_size": 16384},
    "40m": {"d_model": 512, "n_heads": 8, "n_layers": 7, "vocab_size": 32768},
    "125m": {"d_model": 768, "n_heads": 12, "n_layers": 12, "vocab_size": 50368},
    "350m": {"d_model": 1024, "n_heads": 16, "n_layers": 24, "vocab_size": 50368},
}
NUM_RANKS = 2
GROWTH_ROUNDS = 2
"""Warm saves of each size are enough to see how it grows."""
BYTES_PER_PARAMETER = 12
"""The weights and AdamW's two moments, fp32."""
GIB = 1 << 30
CHUNK_BYTES = 8 << 20
OURS, SAVE, ASYNC_SAVE, COMPOSER = "ours", "dcp.save", "dcp.async_save", "Composer"
SIDES = (OURS, ASYNC_SAVE, SAVE, COMPOSER)
LIMITS = "limits"
MARK = "@@"
"""Begins a line of a rank that is meant for the process that started it."""

Finish = Callable[[], Any]
Start = Callable[[Path, int], Finish]
"""(folder, batch) -> what waits until all of it is written; how long the first call takes is the stall."""


def run(*, num_rounds: int, sizes: Sequence[str], out: Path | None, folder: Path, quick: bool) -> dict[str, Any]:
    """Measure everything in `folder`, print the tables, write them into `out`, and return the report.

    `num_rounds` warm rounds follow a first one. `quick` takes a tiny model throughout. Raises UserError for a size
    that is not in SHAPES, and for a disk that is too small or cannot be written.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    folder = folder.absolute()
    sizes = ("tiny",) if quick else tuple(sizes)
    size = "tiny" if quick else "125m"
    _check(sizes, num_rounds)
    _check_disk(folder, max(size_bytes(name) for name in (size, *sizes)))
    if out is not None:
        _make_folder(out, "--out")
    report: dict[str, Any] = {
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "device": device_type(),
            "platform": platform.platform(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "composer": version("mosaicml"),
        },
        "num_ranks": NUM_RANKS,
        "num_rounds": num_rounds,
        "growth": {},
    }
    with _ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=folder) as work:
        settings = {"num_rounds": num_rounds, "folder": work}
        report |= _measure_on_ranks({"what": "sides", "size": size, **settings}, console)
        report["targets"] = judge(report)
        tables = [table_of_sides(report), table_of_targets(report)]
        for table in tables:
            _print_table(console, *table)
        settings["num_rounds"] = min(num_rounds, GROWTH_ROUNDS)
        for name in sizes:
            missing = _missing_memory(name)
            report["growth"][name] = (
                {"left_out": missing}
                if missing
                else _measure_on_ranks({"what": "growth", "size": name, **settings}, console)
            )
    tables.append(table_of_growth(report))
    _print_table(console, *tables[-1])
    if out is not None:
        (out / "bench-checkpoint.json").write_text(json.dumps(report, indent=1) + "\n")
        (out / "bench-checkpoint.md").write_text("\n".join(_markdown(*table) for table in tables))
        console.print(f"written: {out / 'bench-checkpoint.json'} and bench-checkpoint.md beside it")
    return report


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM raise, as Ctrl-C does, so that the ranks and the files go with this process."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def size_bytes(size: str) -> int:
    """Of one checkpoint."""
    return count_parameters(model_config(size)) * BYTES_PER_PARAMETER


def model_config(size: str) -> ModelConfig:
    return ModelConfig(max_seq_len=2048, no_bias=True, **SHAPES[size])


def _check(sizes: Sequence[str], num_rounds: int) -> None:
    if unknown := [name for name in sizes if name not in SHAPES]:
        raise UserError(f"--sizes: {unknown[0]} is not one of {', '.join(SHAPES)}")
    if num_rounds < 1:
        raise UserError(f"--num-rounds: {num_rounds} is fewer than 1")


def _check_disk(folder: Path, largest_bytes: int) -> None:
    _make_folder(folder, "--folder")
    needed, free = 2 * largest_bytes, shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"--folder: {folder} has {free / GIB:.1f} GiB free and {needed / GIB:.1f} are needed; "
            "name another disk, or smaller --sizes"
        )


def _make_folder(folder: Path, option: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"{option}: {folder} cannot be written: {error.strerror or error}") from None


def _missing_memory(size: str) -> str | None:
    """Why a size is left out: state, staged copy or read buffers, and room for the page cache."""
    needed, available = int(2.5 * size_bytes(size)) + 2 * GIB, available_bytes()
    if available >= needed:
        return None
    return f"needs about {needed / GIB:.0f} GiB of memory, {available / GIB:.0f} are available"


def available_bytes() -> int:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) << 10


# ------------------------------------------------------------------------------------------------------------- judging


def judge(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The targets: what was measured, what was wanted. Ratios are medians over the warm rounds of ratios within one."""
    rounds, local_bytes = report["rounds"][1:], max(report["local_bytes"])

    def ratio(above: Callable[[dict[str, Any]], float], below: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(above(one) / below(one) for one in rounds)

    wanted = [
        (
            "stall / copying the local state in memory",
            ratio(lambda r: r[OURS]["stall_seconds"], lambda r: r["copy_seconds"]),
            "<=",
            2.0,
        ),
        (
            "stall / async_save's",
            ratio(lambda r: r[OURS]["stall_seconds"], lambda r: r[ASYNC_SAVE]["stall_seconds"]),
            "<=",
            1.0,
        ),
        (
            "durable write, hashes included / plain write+fsync (bandwidth, after the stall)",
            ratio(
                lambda r: r["write_seconds"],
                lambda r: r[OURS]["durable_seconds"] - r[OURS]["stall_seconds"],
            ),
            ">=",
            0.8,
        ),
        (
            "the same, counted from the beginning of the save",
            ratio(lambda r: r["write_seconds"], lambda r: r[OURS]["durable_seconds"]),
            ">=",
            0.8,
        ),
        (
            "verified load / unverified load, cold (seconds)",
            ratio(lambda r: r["load_verified_seconds"], lambda r: r["load_unverified_seconds"]),
            "<=",
            1.3,
        ),
        (
            "peak extra memory / local state",
            max(r[OURS]["extra_bytes"] for r in report["rounds"]) / local_bytes,
            "<=",
            1.05,
        ),
    ]
    return [
        {"what": what, "measured": value, "sign": sign, "target": target, "met": _holds(value, sign, target)}
        for what, value, sign, target in wanted
    ]


def _holds(value: float, sign: str, target: float) -> bool:
    return value <= target if sign == "<=" else value >= target


TableRows = tuple[str, list[str], list[list[str]]]
"""Title, headings, rows."""


def table_of_sides(report: dict[str, Any]) -> TableRows:
    total = sum(report["local_bytes"])
    first, warm = report["rounds"][0], report["rounds"][1:]

    def spread(values: Sequence[float]) -> str:
        return f"{min(values):.3f} / {statistics.median(values):.3f}"

    def rate(seconds: Sequence[float]) -> str:
        return f"{total / GIB / statistics.median(seconds):.2f}"

    rows = []
    for side in SIDES:
        stall, durable = ([one[side][key] for one in warm] for key in ("stall_seconds", "durable_seconds"))
        extra = max(one[side]["extra_bytes"] for one in report["rounds"])
        first_seconds = [f"{first[side]['stall_seconds']:.3f}", f"{first[side]['durable_seconds']:.3f}"]
        rows.append([side, *first_seconds, spread(stall), spread(durable), rate(durable), f"{extra / GIB:.2f}"])
    limits = (
        ("limit: copy in memory", "copy_seconds"),
        ("limit: write + fsync", "write_seconds"),
        ("limit: cold read", "read_seconds"),
        ("our load, cold, verified", "load_verified_seconds"),
        ("our load, cold, unverified", "load_unverified_seconds"),
    )
    for name, key in limits:
        seconds = [one[key] for one in warm]
        rows.append([name, "", f"{first[key]:.3f}", "", spread(seconds), rate(seconds), ""])
    title = (
        f"{report['parameters']:,} parameters, {total / GIB:.2f} GiB with AdamW's state on {NUM_RANKS} ranks, "
        f"{max(report['local_bytes']) / GIB:.2f} GiB on one; seconds, {len(warm)} warm rounds; before loads "
        f"posix_fadvise dropped the files from the page cache, where mincore then found "
        f"{report['resident_after_drop']:.1%} of them"
    )
    headings = [
        "",
        "first stall",
        "first durable",
        "stall: min / median",
        "durable: min / median",
        "GiB/s",
        "extra GiB a rank",
    ]
    return title, headings, rows


def table_of_targets(report: dict[str, Any]) -> TableRows:
    rows = [
        [row["what"], f"{row['measured']:.2f}", f"{row['sign']} {row['target']:g}", "met" if row["met"] else "MISSED"]
        for row in report["targets"]
    ]
    return "targets (medians of the warm rounds' ratios)", ["", "measured", "target", ""], rows


def table_of_growth(report: dict[str, Any]) -> TableRows:
    rows = []
    for size, found in report["growth"].items():
        if "left_out" in found:
            rows.append([size, f"left out: {found['left_out']}", "", "", "", "", ""])
            continue
        warm = found["rounds"][1:]
        medians = {
            key: statistics.median(one[key] for one in warm)
            for key in ("stall_seconds", "durable_seconds", "load_verified_seconds")
        }
        total = sum(found["local_bytes"])
        extra = max(one["extra_bytes"] for one in found["rounds"])
        rows.append(
            [
                f"{found['parameters']:,}",
                f"{total / GIB:.2f}",
                f"{medians['stall_seconds']:.3f}",
                f"{medians['durable_seconds']:.3f}",
                f"{total / GIB / medians['durable_seconds']:.2f}",
                f"{medians['load_verified_seconds']:.3f}",
                f"{extra / max(found['local_bytes']):.2f}",
            ]
        )
    headings = [
        "parameters",
        "GiB",
        "stall, s",
        "durable, s",
        "GiB/s",
        "cold verified load, s",
        "extra memory / local state",
    ]
    return "growth, ours (medians of the warm saves)", headings, rows


def _print_table(console: Console, title: str, headings: list[str], rows: list[list[str]]) -> None:
    table = Table(title=title, title_justify="left")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _markdown(title: str, headings: list[str], rows: list[list[str]]) -> str:
    lines = [headings, ["---", *("---:" for _ in headings[1:])], *rows]
    return f"{title}\n\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


# --------------------------------------------------------------------------------------------------- starting the ranks


def _measure_on_ranks(settings: dict[str, Any], console: Console) -> dict[str, Any]:
    """Start the ranks, show what rank 0 says, return what it found. None of them outlives this call."""
    console.print(f"{settings['what']}: {settings['size']}")
    threads = max(1, len(os.sched_getaffinity(0)) // NUM_RANKS)
    processes = []
    with tempfile.TemporaryDirectory(prefix="ranks-", dir=settings["folder"]) as folder:
        rendezvous = Path(folder, "rendezvous")
        logs = [Path(folder, f"rank{rank}.txt") for rank in range(NUM_RANKS)]
        try:
            for rank, log in enumerate(logs):
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": NUM_RANKS, "LOCAL_WORLD_SIZE": NUM_RANKS}
                names = {**place, "NODE_RANK": 0, "OMP_NUM_THREADS": threads}  # Composer asks for all of them
                environment = {**os.environ, **{name: str(value) for name, value in names.items()}}
                command = [sys.executable, "-m", __name__, json.dumps(settings), str(rank), str(rendezvous)]
                with log.open("w") as stderr:
                    processes.append(
                        subprocess.Popen(
                            command,
                            stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                            stderr=stderr,
                            text=True,
                            env=environment,
                        )
                    )
            for process in processes:
                threading.Thread(target=_end_together, args=(process, processes), daemon=True).start()
            result = None
            assert processes[0].stdout is not None
            for line in processes[0].stdout:
                if line.startswith(MARK):
                    message = json.loads(line.removeprefix(MARK))
                    result = message.get("result", result)
                    if "progress" in message:
                        console.print(f"  {message['progress']}", highlight=False)
            codes = [process.wait() for process in processes]
            if any(codes) or result is None:
                raise DataError(f"a rank failed: {_last_words(logs)}")
            return result
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()


def _end_together(process: subprocess.Popen[str], processes: Sequence[subprocess.Popen[str]]) -> None:
    """When one rank fails, the others would wait for it."""
    if process.wait():
        for other in processes:
            other.kill()


def _last_words(logs: Sequence[Path]) -> str:
    lines = [log.read_text().strip().splitlines() for log in logs]
    return next((text[-1] for text in lines if text), "it said nothing")


def _say(**message: Any) -> None:
    if dist.get_rank() == 0:
        print(MARK + json.dumps(message), flush=True)


# --------------------------------------------------------------------------------------------------------- in a rank


def measure(settings: dict[str, Any], rank: int, rendezvous: str) -> None:
    """One rank's part; rank 0 tells the process that started it what was found."""
    is_cuda = device_type() == "cuda"
    if is_cuda:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    # async_save wants a CPU backend beside NCCL's.
    backend = "cpu:gloo,cuda:nccl" if is_cuda and torch.cuda.device_count() >= NUM_RANKS else "gloo"
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=NUM_RANKS)
    model, optimizer = build(settings["size"])
    work = Path(settings["folder"], f"{settings['what']}-{settings['size']}")
    found = (measure_sides if settings["what"] == "sides" else measure_growth)(
        model, optimizer, work, settings["num_rounds"]
    )
    local_bytes = sum(tensor.nbytes for tensor in local_tensors(model, optimizer))
    parameters = count_parameters(model_config(settings["size"]))
    _say(result={"parameters": parameters, "local_bytes": exchange.gather_json(local_bytes), **found})
    dist.destroy_process_group()


def build(size: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A sharded MPT and an AdamW that has taken a step."""
    from llmfoundry_lite.parallel import PRECISIONS, build_mesh, build_parallel_model

    fsdp = FSDPConfig()
    mesh = build_mesh(fsdp, device_type(), NUM_RANKS, NUM_RANKS)
    model = build_parallel_model(model_config(size), fsdp, PRECISIONS["fp32", "DEFAULT"], mesh, seed=17)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model, optimizer


def local_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [local_part(tensor) for tensor in read_state(model, optimizer).tensors.values()]


def measure_sides(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, work: Path, num_rounds: int
) -> dict[str, Any]:
    """All sides and limits in turns; in every other round in reverse, so that none always follows the same one."""
    starts = {
        OURS: our_save(model, optimizer, work / "ours"),
        SAVE: dcp_save(model, optimizer),
        ASYNC_SAVE: dcp_async_save(model, optimizer),
        COMPOSER: composer_save(model, optimizer),
    }
    limits = Limits(local_tensors(model, optimizer), work)
    local_bytes = sum(tensor.nbytes for tensor in local_tensors(model, optimizer))
    memory = {side: Memory(local_bytes) for side in SIDES}
    rounds, resident = [], 0.0
    for number in range(num_rounds + 1):
        found: dict[str, Any] = {}
        turns = (LIMITS, *SIDES)  # ours is compared with its neighbours, the limits and async_save
        for side in turns if number % 2 == 0 else reversed(turns):
            if side == LIMITS:
                found |= limits.measure()
                continue
            folder = work / side.replace(".", "-")
            saved = folder / f"ba{number}" if side == OURS else folder
            found[side] = measure_save(starts[side], folder, number, memory[side])
            if side == OURS:
                loads, stayed = measure_loads(model, optimizer, saved, number, 2 * local_bytes)
                found |= loads
                resident = max(resident, stayed)
            remove(saved)
        rounds.append(found)
        seconds = ", ".join(f"{side} {found[side]['durable_seconds']:.2f} s" for side in SIDES)
        _say(progress=f"round {number} of {num_rounds}: {seconds}")
    return {"rounds": rounds, "resident_after_drop": resident}


def measure_growth(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, work: Path, num_rounds: int
) -> dict[str, Any]:
    """Ours alone."""
    local_bytes = sum(tensor.nbytes for tensor in local_tensors(model, optimizer))
    start, memory, rounds = our_save(model, optimizer, work), Memory(local_bytes), []
    for number in range(num_rounds + 1):
        found = measure_save(start, work, number, memory)
        saved = work / f"ba{number}"
        drop_from_cache(saved)
        found["load_verified_seconds"] = timed(lambda saved=saved: load(saved, model, optimizer), 2 * local_bytes)
        remove(saved)
        rounds.append(found)
        _say(progress=f"save {number}/{num_rounds}: {found['durable_seconds']:.2f} s")
    return {"rounds": rounds}


def measure_save(start: Start, folder: Path, batch: int, memory: "Memory") -> dict[str, Any]:
    """{stall_seconds, durable_seconds, extra_bytes}, of the slowest or largest rank."""
    warm_up(2 * memory.local_bytes)  # pages for the file, and a copy at the first save
    with memory.watched():
        dist.barrier()
        started = time.perf_counter()
        finish = start(folder, batch)
        stall = time.perf_counter() - started
        finish()
        durable = time.perf_counter() - started
    return {
        "stall_seconds": slowest(stall),
        "durable_seconds": slowest(durable),
        "extra_bytes": exchange.max_of([memory.extra_bytes])[0],
    }


def measure_loads(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path, number: int, needs_bytes: int
) -> tuple[dict[str, Any], float]:
    """Verified and not, in turns who goes first; and the largest share of the files that was still cached."""
    found, resident = {}, 0.0
    for verify in (True, False) if number % 2 == 0 else (False, True):
        resident = max(resident, drop_from_cache(folder))
        key = "load_verified_seconds" if verify else "load_unverified_seconds"
        found[key] = timed(lambda verify=verify: load(folder, model, optimizer, verify=verify), needs_bytes)
    return found, resident


def timed(work: Callable[[], Any], needs_bytes: int) -> float:
    """All ranks at once; seconds of the slowest."""
    warm_up(needs_bytes)
    dist.barrier()
    started = time.perf_counter()
    work()
    return slowest(time.perf_counter() - started)


def slowest(seconds: float) -> float:
    return exchange.max_of([int(seconds * 1e6)])[0] / 1e6


def remove(folder: Path) -> None:
    """And have it done with: the file system frees the space when its journal commits, which must not fall into the
    next measurement."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
        LocalPlace(folder.parent).sync()
    dist.barrier()


# --------------------------------------------------------------------------------------------------------- the sides


def our_save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> Start:
    saver = open_saver(CheckpointStore(folder))

    def start(folder: Path, batch: int) -> Finish:
        saver.save(model, optimizer, About(timestamp=Timestamp(batch=batch)))
        return saver.wait

    return start


def dcp_save(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Start:
    def start(folder: Path, batch: int) -> Finish:
        dcp.save(_torch_state(model, optimizer), checkpoint_id=folder)
        return lambda: sync(folder)

    return start


def dcp_async_save(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Start:
    is_cuda = device_type() == "cuda"
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=is_cuda, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=is_cuda
        )
    )

    def start(folder: Path, batch: int) -> Finish:
        future: Any = dcp.async_save(_torch_state(model, optimizer), checkpoint_id=folder, async_stager=stager)

        def finish() -> None:
            future.result()
            sync(folder)

        return finish

    return start


def _torch_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, slots = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": slots}


def composer_save(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Start:
    """The function that Composer's CheckpointSaver calls, on a state that says: FSDP2, sharded."""
    from composer.core import State
    from composer.devices import DeviceCPU, DeviceGPU
    from composer.utils import checkpoint
    from composer.utils.parallelism import FSDP2Config, ParallelismConfig

    state = State(
        model=model,
        rank_zero_seed=17,
        run_name="bench",
        device=DeviceGPU() if device_type() == "cuda" else DeviceCPU(),
        optimizers=optimizer,
        parallelism_config=ParallelismConfig(fsdp2=FSDP2Config(state_dict_type="sharded")),
    )

    def start(folder: Path, batch: int) -> Finish:
        checkpoint.save_checkpoint(state, f"{folder}/rank{{rank}}")
        return lambda: sync(folder)

    return start


def sync(folder: Path) -> None:
    """fsync of everything in a folder, on rank 0; all ranks return when it is done."""
    dist.barrier()
    if dist.get_rank() == 0:
        for path in (*folder.rglob("*"), folder, folder.parent):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    dist.barrier()


# -------------------------------------------------------------------------------------------------------- the limits


class Limits:
    """What this machine can do with the bytes of the local state, all ranks at once, one file each."""

    def __init__(self, tensors: Sequence[torch.Tensor], folder: Path):
        self.tensors = tensors
        is_cuda = device_type() == "cuda"
        self.buffer = torch.zeros(sum(t.nbytes for t in tensors), dtype=torch.uint8, pin_memory=is_cuda)
        self.folder = folder / f"limits-{dist.get_rank()}"
        self.folder.mkdir(parents=True, exist_ok=True)

    def measure(self) -> dict[str, float]:
        """Seconds. Memory that is copied into has been touched before; the best of three copies counts."""
        path = self.folder / "bytes"
        found = {"copy_seconds": min(timed(self._copy, 0) for _ in range(3))}
        found["write_seconds"] = timed(lambda: self._write(path), self.buffer.numel())
        drop_from_cache(self.folder)
        found["read_seconds"] = timed(lambda: self._read(path), self.buffer.numel())
        path.unlink()
        LocalPlace(self.folder).sync()
        return found

    def _copy(self) -> None:
        begin = 0
        for tensor in self.tensors:
            target = self.buffer[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            target.copy_(tensor, non_blocking=True)
            begin += tensor.nbytes
        if device_type() == "cuda":
            torch.cuda.synchronize()

    def _write(self, path: Path) -> None:
        content: Any = memoryview(as_bytes(self.buffer))  # pyright: ignore[reportArgumentType]
        with path.open("wb", buffering=0) as file:
            for begin in range(0, len(content), CHUNK_BYTES):
                file.write(content[begin : begin + CHUNK_BYTES])
            os.fsync(file.fileno())

    def _read(self, path: Path) -> None:
        content: Any = memoryview(as_bytes(self.buffer))  # pyright: ignore[reportArgumentType]
        with path.open("rb", buffering=0) as file:
            for begin in range(0, len(content), CHUNK_BYTES):
                file.readinto(content[begin : begin + CHUNK_BYTES])


def drop_from_cache(folder: Path) -> float:
    """Have the page cache forget the files; the share of their pages that it kept nevertheless. They must be synced."""
    dist.barrier()
    kept = pages = 0
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dist.barrier()
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size:
            resident = resident_pages(path)
            kept, pages = kept + sum(resident), pages + len(resident)
    return exchange.max_of([kept * 1_000_000 // max(pages, 1)])[0] / 1e6


def resident_pages(path: Path) -> bytes:
    """A byte for each page of a file, 1 if it is in the page cache (mincore)."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        found = ctypes.create_string_buffer(-(-len(mapped) // mmap.PAGESIZE))
        first = ctypes.c_char.from_buffer(mapped)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(mapped)), found)
        del first
        if failed:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
        return bytes(byte & 1 for byte in found.raw)


def warm_up(num_bytes: int) -> None:
    """Touch and free as much memory as a measurement will take, before its clock starts.

    A virtual machine gives free memory back to its host, and getting it again takes longer than anything measured here.
    """
    num_bytes = min(num_bytes, available_bytes() // 2 // NUM_RANKS)
    if not num_bytes:
        return
    with mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        for page in range(0, num_bytes, mmap.PAGESIZE):
            memory[page] = 1


class Memory:
    """How much more of it a side takes at its highest than before its first save, what it keeps included."""

    def __init__(self, local_bytes: int) -> None:
        self.local_bytes = local_bytes
        self.kept_bytes = 0
        self.extra_bytes = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # or what others have freed would hide what is allocated now
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew (proc(5))
        before = _status_bytes("VmRSS")
        yield
        self.extra_bytes = self.kept_bytes + _status_bytes("VmHWM") - before
        self.kept_bytes += _status_bytes("VmRSS") - before


def _status_bytes(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) << 10


if __name__ == "__main__":
    measure(json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
