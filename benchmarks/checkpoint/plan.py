"""What the checkpoints of a run on thousands of ranks cost, measured in one process that plays all ranks.

    python -m benchmarks checkpoint-plan --plan yamls/pretrain/mpt-70b.yaml --num-ranks 4096 --folder /data/scratch

The code is that of a real run. The model is built and sharded as in a launch, but over torch's fake process group: the
tensors of rank 0 are real, those of the other ranks do not exist. Rank 0 saves with the real `Saver` and writes its
file. The files of the other ranks have real headers and hash tables, with a hole in between, so that they take no disk
space. Then the checkpoints are listed, one of them is restored, and old ones are pruned.

The figures leave out what collectives cost between machines, and copying and writing the data. Times of the main thread
are its processor time, so they do not depend on what else this machine is doing.

Each `measure_` function adds its results to `figures`, a dictionary of the table's row name -> number, whose units are
in WANTED and `_unit`.
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
from llmfoundry_lite.checkpoint.manifest import MANIFEST, Manifest, TensorRecord, Timestamp
from llmfoundry_lite.checkpoint.manifest_json import decode
from llmfoundry_lite.checkpoint.planning import chunks_of_rank, describe_sharding, make_plan
from llmfoundry_lite.checkpoint.restore import find_reads, gather_names, read_tensors
from llmfoundry_lite.checkpoint.retention import prune
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
"""Checkpoints ba1 to ba4. The first save makes the plan, the later ones reuse it."""
# Row of the table -> (unit, largest number that meets the target).
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
    """Measure a checkpoint of the run that the YAML `plan` describes, on `num_ranks` ranks, and return the report.

    `sharding` replaces the YAML's fsdp_config.sharding_strategy. `folder` is a scratch disk. The table is printed, and
    written into `out`. Raises UserError, also when this process is one of several ranks.
    """
    arguments = [str(plan)]
    if sharding:
        arguments.append(f"fsdp_config.sharding_strategy={sharding}")
    config = load_train_config(arguments).config
    if dist.is_initialized():
        raise UserError("checkpoint-plan plays all ranks itself; start it as one process")

    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-plan-", dir=folder) as work, _rank_of(0, num_ranks):
        # Each step needs the previous one: restoring and pruning use the checkpoints that were saved.
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
    """Make this process one rank of a fake process group, in which no other ranks exist, until the block ends."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def build(config: TrainConfig, num_ranks: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Build rank 0's share of the model, and an AdamW whose moments exist, without ever holding the whole model."""
    from llmfoundry_lite.models.mpt import MPT
    from llmfoundry_lite.parallel.fsdp import shard_model
    from llmfoundry_lite.parallel.mesh import build_mesh
    from llmfoundry_lite.parallel.precision import PRECISIONS

    fsdp = config.fsdp_config or FSDPConfig()
    layout = divide_devices(fsdp, num_ranks, DEVICES_OF_A_NODE, config.tensor_parallel_degree)
    mesh = build_mesh(layout, "cpu")

    # Shard on the meta device, then allocate only this rank's part.
    with torch.device("meta"):
        model = MPT(config.model, "sdpa")
    shard_model(model, fsdp, PRECISIONS["fp32", "DEFAULT"], mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()

    # The fake group cannot run a step, so the optimizer's state is put in place by hand.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        slots = {name: torch.zeros_like(parameter, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **slots}
    return model, optimizer


# ------------------------------------------------------------------------------------------------ what is measured


def measure_plan(figures: dict[str, float], model: Any, optimizer: Any, num_ranks: int) -> None:
    """Time the plan of a checkpoint: from the tensors to the layout of all ranks and the boxes that this rank saves.

    Adds the seconds and megabytes of the plan, which is made in a child process, and the number of tensors.
    """
    state = read_state(model, optimizer)

    def plan() -> dict[str, float]:
        """Make the plan as the first save does. Every rank is given this rank's description of its tensors."""
        tables = exchange.all_gather_distinct(describe_sharding(state.tensors, state.row_orders))
        make_plan([(table, list(range(num_ranks))) for table, _ in tables], 0, num_ranks)
        return {}

    with _no_others():
        seconds, megabytes, _ = _in_child(plan)
    figures |= {"tensors": len(state.tensors), "first plan": seconds, "first plan, memory": megabytes}


def measure_saves(figures: dict[str, float], model: Any, optimizer: Any, folder: Path, num_ranks: int) -> None:
    """Time rank 0's saves on its main thread, and the publication in the background.

    The other ranks do not exist, so before each save is published, their files and reports are put in place: they are
    written for the first save, and linked for later ones. This work is not part of the times.

    Adds the processor seconds of the first and the slowest later save, the seconds of publishing, and the sizes of the
    manifest and of the state.
    """
    planned_at: list[float] = []
    store = CheckpointStore(
        folder, on_phase=lambda phase: planned_at.append(time.thread_time()) if phase == "planned" else None
    )
    seconds_of_saves = []
    reports_of_others: list[bytes] = []
    with _no_others():
        saver = Saver(store)
        saver.take_lease()
        for batch in range(1, NUM_SAVES + 1):
            # The stall on the main thread ends when the save is planned; staging the data is not of interest here.
            started = time.thread_time()
            saver.save(model, optimizer, SaveMetadata(timestamp=Timestamp(batch=batch), run_name="bench"))
            main_thread_seconds = planned_at[-1] - started

            # Rank 0's own file has to be finished before the others' are put beside it.
            assert saver._in_flight is not None and saver._plan is not None
            saver._in_flight.background_task.result()
            draft = store.commits.draft(saver._in_flight.save_id)[0]
            assert draft.path_here is not None
            if not reports_of_others:
                write_others(figures, saver, draft.path_here, num_ranks, reports_of_others)
            else:
                for rank in range(1, num_ranks):
                    os.link(folder / "ba1" / file_name(rank), draft.path_here / file_name(rank))

            # The next poll exchanges the ranks' reports and begins to publish.
            with mock.patch.object(exchange, "all_gather_bytes", lambda raw, group=None: [raw, *reports_of_others]):
                started = time.thread_time()
                saver.poll()
                main_thread_seconds += time.thread_time() - started

            # Wait for the publication in the background.
            started = time.perf_counter()
            assert saver._in_flight.manifest is not None
            saver._in_flight.background_task.result()
            figures["publishing, in the background"] = time.perf_counter() - started
            started = time.thread_time()
            saver.poll()

            # Store what the main thread spent on this save in all.
            seconds_of_saves.append(main_thread_seconds + time.thread_time() - started)

    figures["first save, main thread"] = seconds_of_saves[0]
    figures["later save, main thread"] = max(seconds_of_saves[1:])
    figures["manifest"] = (folder / f"ba{NUM_SAVES}" / MANIFEST).stat().st_size / MEGABYTE
    figures["state"] = open_checkpoint(folder / f"ba{NUM_SAVES}").manifest.num_bytes / MEGABYTE


def write_others(figures: dict[str, float], saver: Saver, folder: Path, num_ranks: int, reports: list[bytes]) -> None:
    """Write the files of all ranks except rank 0 into the draft of a checkpoint, and append their reports to `reports`.

    A file has a real header and a real hash table, and a hole where its data would be, so it takes almost no disk
    space. It passes verification, because the hashes are those of zeros, which is what a hole is read as.

    Adds the seconds that one rank's header takes, and the size of the largest one.
    """
    assert saver._plan is not None
    optimizer_digest = saver._in_flight.background_task.result().optimizer_digest  # type: ignore[union-attr]
    zeros = bytes(BLOCK_BYTES)
    chunks_seen = {}
    header_bytes = 0
    hash_of_zeros = hash_buffers([zeros])
    started = time.perf_counter()
    for rank in range(1, num_ranks):
        chunks = chunks_of_rank(saver._plan.tensors, rank, chunks_seen)
        header = build_header(chunks, {"save_id": saver._in_flight.save_id}, block_bytes=BLOCK_BYTES)  # type: ignore[union-attr]
        header_bytes = max(header_bytes, len(header))
        data_end = len(header) + sum(chunk.num_bytes for chunk in chunks.values())

        # Hash the file block by block. Blocks that lie entirely in the hole all have the same hash.
        hashes = []
        for begin in range(0, data_end, BLOCK_BYTES):
            part = header[begin : begin + BLOCK_BYTES]
            num_zeros = min(data_end - begin, BLOCK_BYTES) - len(part)
            is_hole = num_zeros == BLOCK_BYTES
            hashes.append(hash_of_zeros if is_hole else hash_buffers([part, zeros[:num_zeros]]))

        # Truncating to a larger size leaves a hole between the header and the table.
        table = b"".join(hashes)
        with open(folder / file_name(rank), "wb") as file:
            file.write(header)
            file.truncate(data_end)
            file.seek(data_end)
            file.write(table)

        # This is what the rank would send to rank 0 when its file is written.
        digest = hash_buffers([header, table])
        reports.append(REPORT.pack(data_end + len(table), len(header), digest, optimizer_digest, 0))
    figures["a rank's header, making and writing"] = (time.perf_counter() - started) / max(num_ranks - 1, 1)
    figures["a rank's header"] = header_bytes / MEGABYTE


def measure_resume(figures: dict[str, float], model: Any, optimizer: Any, folder: Path) -> None:
    """Time a restore by one rank of as many as have saved: from the manifest's bytes to the byte ranges that it has to
    read.

    That part runs in a child process, so that its memory can be measured. Adds its seconds and megabytes, the seconds
    of decoding the manifest alone, the number of files opened, and the seconds in which this rank's data is read and
    verified.
    """
    checkpoint = open_checkpoint(folder / f"ba{NUM_SAVES}")
    tensors = read_state(model, optimizer).tensors

    def prepare() -> dict[str, float]:
        """Do what a restore does before it reads data, and return the details that the child process reports."""
        started = time.perf_counter()
        manifest = decode(checkpoint.manifest_bytes, "manifest")
        decoded = time.perf_counter()
        _, by_file = find_reads(manifest, tensors)
        for index, reads in by_file.items():
            with open_shard(checkpoint.folder, manifest.files[index]) as shard:
                for chunk_read in reads:
                    shard.begin_of(chunk_read.chunk)
        with _no_others():
            gather_names(model, optimizer)
        return {"decode": decoded - started, "files": len(by_file)}

    seconds, megabytes, details = _in_child(prepare)
    figures["resume, metadata of a rank"] = seconds
    figures["resume, memory of a rank's metadata"] = megabytes
    figures["resume, decoding alone"] = details["decode"]
    figures["resume, files a rank opens"] = details["files"]

    # Reading the data needs no child process: only its time is of interest.
    started = time.perf_counter()
    loaded = read_tensors(checkpoint, tensors)
    figures["resume, reading and verifying this rank's part"] = time.perf_counter() - started
    assert all(not tensor.any() for tensor in loaded.values()), "not what was saved"


def measure_housekeeping(figures: dict[str, float], folder: Path) -> None:
    """Add the seconds of listing checkpoints, searching for the newest intact one, and pruning two of them."""
    store = CheckpointStore(folder)
    figures["listing, one checkpoint"] = _timed(store.candidates) / NUM_SAVES
    figures["search for the newest, files and sizes looked at"] = _timed(lambda: store.newest_intact(check_present))
    figures["pruning two"] = _timed(lambda: prune(store, None, keep_newest=NUM_SAVES - 2, verify=check_present))


class CountingFiles(MemoryFileSystem):
    """An object store in memory that counts the calls which would be requests to a server.

    `num_requests` counts for all instances. A counted method may call others of the same object; these are part of the
    same request, so they are not counted while `is_inside` is true.
    """

    protocol = "counting"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    num_requests = 0

    is_inside = False

    def __getattribute__(self, name: str) -> Any:
        """Return a method that counts, for methods that make a request."""
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
    """Count the requests that all ranks together make for one save on an object store that holds three other
    checkpoints.

    Shards are small, and there are as many as ranks. A large shard would be sent in parts, each of them one more
    request. Adds the requests beyond one for each rank's file, and those of pruning one of four checkpoints.
    """
    with mock.patch("fsspec.core.url_to_fs", lambda url: (CountingFiles(), "/" + url.partition("://")[2])):
        store = CheckpointStore("counting://run/checkpoints")
        lease = store.acquire()
        # The count is reset for every save, so the last one remains: the one that finds three others.
        for batch in range(1, 5):
            CountingFiles.num_requests = 0
            save_id = store.new_save_id(lease, batch)
            folder, prefix = store.commits.draft(save_id)
            # Every rank writes its shard.
            files = []
            for rank in range(num_ranks):
                entry = Chunk("model/w", "U8", (rank,), (1,))
                header = build_header({entry.key: entry}, {}, block_bytes=BLOCK_BYTES)
                record = write_shard(folder, file_name(rank), header, [bytes(1)])
                files.append(replace(record, name=prefix + record.name))
            # Rank 0 publishes the manifest.
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
        prune(store, lease, keep_newest=3, verify=check_present)
        figures["requests of pruning, 4 checkpoints there"] = CountingFiles.num_requests


def _timed(work: Callable[[], Any]) -> float:
    """Return the seconds that a call takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@contextmanager
def _no_others() -> Iterator[None]:
    """Let collectives return what they would if every rank had this rank's values.

    The collectives of the fake group leave the result unchanged, so those that our code uses are replaced in this
    block.
    """

    def all_alike(value: Any) -> list[tuple[Any, list[int]]]:
        """Return this rank's value as the only distinct one, which all ranks have. JSON turns tuples into lists, as
        sending would."""
        return [(json.loads(json.dumps(value)), list(range(exchange.rank_and_size()[1])))]

    with (
        mock.patch.object(exchange, "all_gather_distinct", all_alike),
        mock.patch.object(exchange, "all_gather_bytes", lambda raw, group=None: [raw]),
        mock.patch.object(exchange, "all_reduce_max", lambda values, group=None: [int(value) for value in values]),
    ):
        yield


def _in_child(work: Callable[[], dict[str, float]]) -> tuple[float, float, dict[str, float]]:
    """Run `work` in a forked process. Returns its seconds, the megabytes by which its peak memory grew, and its result.

    The child starts with this process's tensors, but its memory peak is its own. `work` must return what JSON can hold.
    """
    reader, writer = os.pipe()
    child = os.fork()
    # The child writes its result as JSON, and ends without the cleanup of this process.
    if child == 0:
        try:
            peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            started = time.perf_counter()
            result = work()
            seconds = time.perf_counter() - started
            grown_megabytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_before) * 1024 / MEGABYTE
            os.write(writer, json.dumps([seconds, grown_megabytes, result]).encode())
        finally:
            os._exit(0)

    # Closed here too, so that reading ends when the child ends.
    os.close(writer)
    with open(reader) as stream:
        text = stream.read()
    os.waitpid(child, 0)
    seconds, grown_megabytes, result = json.loads(text)
    return seconds, grown_megabytes, result


def _table(report: dict[str, Any]) -> Table:
    """Return a table of the figures, with the target and whether it was met where there is one."""
    rows = []
    for name, value in report["figures"].items():
        unit, wanted = WANTED.get(name, (_unit(name), None))
        measured = f"{value:,.3f} {unit}".strip()
        if wanted is None:
            rows.append([name, measured, "", ""])
        else:
            rows.append([name, measured, f"at most {wanted:g} {unit}".strip(), "met" if value <= wanted else "missed"])
    title = f"{Path(report['plan']).stem} on {report['num_ranks']:,} ranks, {report['sharding'] or 'FULL_SHARD'}"
    return measured_table(title, ["figure", "measured", "wanted", ""], rows)


def _unit(name: str) -> str:
    """Return the unit of a figure that has no target."""
    if name in ("tensors", "resume, files a rank opens", "requests of pruning, 4 checkpoints there"):
        return ""
    return "MB" if name in ("first plan, memory", "state", "a rank's header") else "s"
