"""Cost of a large run's checkpoints on thousands of ranks. The real code; one process plays all ranks.

    python -m benchmarks checkpoint-plan --plan yamls/pretrain/mpt-70b.yaml --num-ranks 4096 --folder /data/scratch

The model is built and sharded as in a launch, over torch's fake process group: this rank's tensors are real, the other
ranks' are not there. Rank 0 saves with the real `Saver` and really writes its file. The other ranks' files have real
headers and hash tables over holes, so that they take no disk. Then the checkpoints are listed, one is restored, old
ones are pruned. These figures leave out what collectives cost between machines, and copying and writing the data. The
main thread's time is what it computes, whatever else this machine is doing.
"""

import json
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem

from llmfoundry_lite.checkpoint.grid import Chunk, Grid
from llmfoundry_lite.checkpoint.manifest import MANIFEST, Manifest, TensorRecord, Timestamp, decode
from llmfoundry_lite.checkpoint.planning import chunks_of_rank, describe_sharding, make_plan
from llmfoundry_lite.checkpoint.restore import find_reads, gather_names, read_tensors
from llmfoundry_lite.checkpoint.save import REPORT, SaveMetadata, Saver, file_name
from llmfoundry_lite.checkpoint.shards import BLOCK_BYTES, build_header, hash_buffers, open_shard, write_shard
from llmfoundry_lite.checkpoint.state import read_state
from llmfoundry_lite.checkpoint.store import CheckpointStore, open_checkpoint
from llmfoundry_lite.checkpoint.verify import check_present
from llmfoundry_lite.config.layout import divide_devices
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.config.sharding_schema import FSDPConfig
from llmfoundry_lite.errors import UserError
from llmfoundry_lite.models.flops import count_parameters
from llmfoundry_lite.ranks import exchange
from llmfoundry_lite.tables import Table
from llmfoundry_machines.bench.frame import describe_conditions, measured_table, tell

MEGABYTE = 1_000_000
DEVICES_OF_A_NODE = 8
NUM_SAVES = 4
WANTED = {
    "manifest": ("MB", 4.0),
    "first plan": ("s", 3.0),
    "later save, main thread": ("s", 0.05),
    "resume, metadata of a rank": ("s", 1.0),
    "resume, memory of a rank's metadata": ("MB", 200.0),
    "requests of a save, beside one a file": ("", 10.0),
}


def run(
    *,
    plan: Path,
    num_ranks: int = 4096,
    sharding: str | None = None,
    folder: Path = Path("."),
    out: Path | None = None,
) -> dict[str, Any]:
    """Print the table, write it into `out`, and return the report. Raises UserError."""
    arguments = [str(plan)] + ([f"fsdp_config.sharding_strategy={sharding}"] if sharding else [])
    config = load_train_config(arguments).config
    if dist.is_initialized():
        raise UserError("checkpoint-plan plays all ranks itself; start it as one process")
    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-plan-", dir=folder) as work, _rank_of(0, num_ranks):
        model, optimizer = build(config, num_ranks)
        measure_plan(figures, model, optimizer, num_ranks)
        measure_saves(figures, model, optimizer, Path(work), num_ranks)
        measure_resume(figures, model, optimizer, Path(work))
        measure_housekeeping(figures, Path(work))
    measure_requests(figures, num_ranks)
    report = describe_conditions() | {
        "plan": str(plan),
        "num_ranks": num_ranks,
        "sharding": config.fsdp_config.sharding_strategy if config.fsdp_config else None,
        "parameters": count_parameters(config.model),
        "figures": figures,
    }
    tell(
        report,
        _table(report),
        name="checkpoint-plan",
        heading="A checkpoint of many ranks, walked through in one process",
        command=f"python -m benchmarks checkpoint-plan --plan {plan}",
        asked=("num_ranks", "sharding", "parameters"),
        out=out,
    )
    return report


@contextmanager
def _rank_of(rank: int, world_size: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def build(config: TrainConfig, num_ranks: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Build rank 0's share of the model, and an AdamW with its slots."""
    from llmfoundry_lite.models.mpt import MPT
    from llmfoundry_lite.parallel.fsdp import shard_model
    from llmfoundry_lite.parallel.mesh import build_mesh
    from llmfoundry_lite.parallel.precision import PRECISIONS

    fsdp = config.fsdp_config or FSDPConfig()
    layout = divide_devices(fsdp, num_ranks, DEVICES_OF_A_NODE, config.tensor_parallel_degree)
    mesh = build_mesh(layout, "cpu")
    with torch.device("meta"):
        model = MPT(config.model, "sdpa")
    shard_model(model, fsdp, PRECISIONS["fp32", "DEFAULT"], mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        slots = {name: torch.zeros_like(parameter, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **slots}
    return model, optimizer


# ------------------------------------------------------------------------------------------------ what is measured


def measure_plan(figures: dict[str, float], model: Any, optimizer: Any, num_ranks: int) -> None:
    """Time the plan from tensors to all layouts and this rank's boxes."""
    found = read_state(model, optimizer)

    def plan() -> dict[str, float]:
        tables = exchange.all_gather_distinct(describe_sharding(found.tensors, found.row_orders))
        make_plan([(table, list(range(num_ranks))) for table, _ in tables], 0, num_ranks)
        return {}

    with _no_others():
        seconds, megabytes, _ = _in_child(plan)
    figures |= {"tensors": len(found.tensors), "first plan": seconds, "first plan, memory": megabytes}


def measure_saves(figures: dict[str, float], model: Any, optimizer: Any, folder: Path, num_ranks: int) -> None:
    """Time rank 0's saves. Before each is published, the other ranks' files and reports are put in place."""
    planned: list[float] = []
    store = CheckpointStore(
        folder, on_phase=lambda phase: planned.append(time.thread_time()) if phase == "planned" else None
    )
    on_main_thread = []
    first: list[bytes] = []
    with _no_others():
        saver = Saver(store)
        saver.take_lease()
        for batch in range(1, NUM_SAVES + 1):
            started = time.thread_time()
            saver.save(model, optimizer, SaveMetadata(timestamp=Timestamp(batch=batch), run_name="bench"))
            spent = planned[-1] - started
            assert saver._in_flight is not None and saver._plan is not None
            saver._in_flight.background_task.result()
            draft = store.commits.draft(saver._in_flight.save_id)[0]
            assert draft.path_here is not None
            if not first:
                write_others(figures, saver, draft.path_here, num_ranks, first)
            else:
                for rank in range(1, num_ranks):
                    os.link(folder / "ba1" / file_name(rank), draft.path_here / file_name(rank))
            with mock.patch.object(exchange, "all_gather_bytes", lambda raw, group=None: [raw, *first]):
                started = time.thread_time()
                saver.poll()
                spent += time.thread_time() - started
            started = time.perf_counter()
            assert saver._in_flight.manifest is not None
            saver._in_flight.background_task.result()
            figures["publishing, in the background"] = time.perf_counter() - started
            started = time.thread_time()
            saver.poll()
            on_main_thread.append(spent + time.thread_time() - started)
    figures["first save, main thread"] = on_main_thread[0]
    figures["later save, main thread"] = max(on_main_thread[1:])
    figures["manifest"] = (folder / f"ba{NUM_SAVES}" / MANIFEST).stat().st_size / MEGABYTE
    figures["state"] = open_checkpoint(folder / f"ba{NUM_SAVES}").manifest.num_bytes / MEGABYTE


def write_others(figures: dict[str, float], saver: Saver, folder: Path, num_ranks: int, reports: list[bytes]) -> None:
    """Write sparse files of all ranks but rank 0."""
    assert saver._plan is not None
    numbers = saver._in_flight.background_task.result().optimizer_digest  # type: ignore[union-attr]
    zeros, seen, header_bytes = bytes(BLOCK_BYTES), {}, 0
    hash_of_zeros = hash_buffers([zeros])
    started = time.perf_counter()
    for rank in range(1, num_ranks):
        entries = chunks_of_rank(saver._plan.tensors, rank, seen)
        header = build_header(entries, {"save_id": saver._in_flight.save_id}, block_bytes=BLOCK_BYTES)  # type: ignore[union-attr]
        header_bytes = max(header_bytes, len(header))
        size = len(header) + sum(entry.num_bytes for entry in entries.values())
        hashes = []
        for begin in range(0, size, BLOCK_BYTES):
            part = header[begin : begin + BLOCK_BYTES]
            rest = min(size - begin, BLOCK_BYTES) - len(part)
            whole = rest == BLOCK_BYTES
            hashes.append(hash_of_zeros if whole else hash_buffers([part, zeros[:rest]]))
        table = b"".join(hashes)
        with open(folder / file_name(rank), "wb") as file:
            file.write(header)
            file.truncate(size)
            file.seek(size)
            file.write(table)
        digest = hash_buffers([header, table])
        reports.append(REPORT.pack(size + len(table), len(header), digest, numbers, 0))
    figures["a rank's header, making and writing"] = (time.perf_counter() - started) / max(num_ranks - 1, 1)
    figures["a rank's header"] = header_bytes / MEGABYTE


def measure_resume(figures: dict[str, float], model: Any, optimizer: Any, folder: Path) -> None:
    """Time a restore on one of as many ranks as saved: from the manifest's bytes to the byte ranges to read."""
    checkpoint = open_checkpoint(folder / f"ba{NUM_SAVES}")
    tensors = read_state(model, optimizer).tensors

    def prepare() -> dict[str, float]:
        started = time.perf_counter()
        manifest = decode(checkpoint.manifest_bytes, "manifest")
        decoded = time.perf_counter()
        _, by_file = find_reads(manifest, tensors)
        for index, reads in by_file.items():
            with open_shard(checkpoint.folder, manifest.files[index]) as shard:
                for one in reads:
                    shard.begin_of(one.chunk)
        with _no_others():
            gather_names(model, optimizer)
        return {"decode": decoded - started, "files": len(by_file)}

    seconds, megabytes, found = _in_child(prepare)
    figures["resume, metadata of a rank"] = seconds
    figures["resume, memory of a rank's metadata"] = megabytes
    figures["resume, decoding alone"] = found["decode"]
    figures["resume, files a rank opens"] = found["files"]
    started = time.perf_counter()
    loaded = read_tensors(checkpoint, tensors)
    figures["resume, reading and verifying this rank's part"] = time.perf_counter() - started
    assert all(not tensor.any() for tensor in loaded.values()), "not what was saved"


def measure_housekeeping(figures: dict[str, float], folder: Path) -> None:
    store = CheckpointStore(folder)
    figures["listing, one checkpoint"] = _timed(store.candidates) / NUM_SAVES
    figures["search for the newest, files and sizes looked at"] = _timed(lambda: store.newest_intact(check_present))
    figures["pruning two"] = _timed(lambda: store.prune(None, keep_newest=NUM_SAVES - 2, verify=check_present))


class CountingFiles(MemoryFileSystem):
    """An object store in memory that counts what would be requests to a server."""

    protocol = "counting"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    num_requests = 0

    is_inside = False

    def __getattribute__(self, name: str) -> Any:
        method = super().__getattribute__(name)
        if CountingFiles.is_inside or name not in ("ls", "info", "cat_file", "pipe_file", "rm_file", "rm", "open"):
            return method

        def counted(*args: Any, **kwargs: Any) -> Any:
            CountingFiles.num_requests += 1
            CountingFiles.is_inside = True
            try:
                return method(*args, **kwargs)
            finally:
                CountingFiles.is_inside = False

        return counted


def measure_requests(figures: dict[str, float], num_ranks: int) -> None:
    """Count the requests of all ranks for a save on an object store that holds three others.

    Shards are small, as many as there are ranks. A large shard goes in parts, each of them one more request.
    """
    with mock.patch("fsspec.core.url_to_fs", lambda url: (CountingFiles(), "/" + url.partition("://")[2])):
        store = CheckpointStore("counting://run/checkpoints")
        lease = store.acquire()
        for batch in range(1, 5):
            CountingFiles.num_requests = 0
            save_id = store.new_save_id(lease, batch)
            folder, prefix = store.commits.draft(save_id)
            files = []
            for rank in range(num_ranks):
                entry = Chunk("model/w", "U8", (rank,), (1,))
                header = build_header({entry.key: entry}, {}, block_bytes=BLOCK_BYTES)
                record = write_shard(folder, file_name(rank), header, [bytes(1)])
                files.append(replace(record, name=prefix + record.name))
            tensors = {"model/w": TensorRecord("U8", (num_ranks,), Grid((1,), (0,), (1,)))}
            store.publish(
                Manifest(
                    save_id=save_id,
                    lease_epoch=lease.epoch,
                    timestamp=Timestamp(batch=batch),
                    tensors=tensors,
                    files=tuple(files),
                ),
                lease,
            )
        figures["requests of a save, beside one a file"] = CountingFiles.num_requests - num_ranks
        CountingFiles.num_requests = 0
        store.prune(lease, keep_newest=3, verify=check_present)
        figures["requests of pruning, 4 checkpoints there"] = CountingFiles.num_requests


def _timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@contextmanager
def _no_others() -> Iterator[None]:
    """Let collectives return this rank's own values: the fake group's leave their results as they were. All ranks have
    this one's tables."""

    def all_alike(value: Any) -> list[tuple[Any, list[int]]]:
        return [(json.loads(json.dumps(value)), list(range(exchange.rank_and_size()[1])))]

    with (
        mock.patch.object(exchange, "all_gather_distinct", all_alike),
        mock.patch.object(exchange, "all_gather_bytes", lambda raw, group=None: [raw]),
        mock.patch.object(exchange, "all_reduce_max", lambda values, group=None: [int(value) for value in values]),
    ):
        yield


def _in_child(work: Callable[[], dict[str, float]]) -> tuple[float, float, dict[str, float]]:
    """Work in a process of its own; return seconds, the megabytes by which it grew at most, and the result."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            started = time.perf_counter()
            found = work()
            seconds = time.perf_counter() - started
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / MEGABYTE
            os.write(writer, json.dumps([seconds, grown, found]).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as said:
        text = said.read()
    os.waitpid(child, 0)
    seconds, grown, found = json.loads(text)
    return seconds, grown, found


def _table(report: dict[str, Any]) -> Table:
    rows = []
    for name, value in report["figures"].items():
        unit, wanted = WANTED.get(name, (_unit(name), None))
        aim = [] if wanted is None else [f"at most {wanted:g} {unit}".strip(), "met" if value <= wanted else "missed"]
        rows.append([name, f"{value:,.3f} {unit}".strip(), *(aim or ["", ""])])
    title = f"{Path(report['plan']).stem} on {report['num_ranks']:,} ranks, {report['sharding'] or 'FULL_SHARD'}"
    return measured_table(title, ["figure", "measured", "wanted", ""], rows)


def _unit(name: str) -> str:
    if name in ("tensors", "resume, files a rank opens", "requests of pruning, 4 checkpoints there"):
        return ""
    return "MB" if name in ("first plan, memory", "state", "a rank's header") else "s"
