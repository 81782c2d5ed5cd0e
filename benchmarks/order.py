"""Measure the order of samples: how well it mixes, beside StreamingDataset's, and what opening a large data set costs.

    python -m benchmarks order --num-shards 1560000

Mixing. A batch drawn at random contains samples of a domain with the variance of a binomial distribution. The measure
is the variance over that one. A ratio below 1 means that batches are more even than random; a ratio above 1 means that
domains come in waves.

Opening. A data set of any number of shards is opened in a process of its own, which reads one batch.

Arrays name their axes: `_bl` is [batches, samples of a batch].
"""

import json
import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from llmfoundry_lite.data.order import SampleOrder
from llmfoundry_lite.tables import Table
from llmfoundry_machines.bench.frame import describe_conditions, measured_table, tell

NUM_DOMAINS, SHARDS_PER_DOMAIN, SAMPLES_PER_SHARD, BATCH_SIZE = 8, 50, 1_000, 256
"""Data set of the measurement of mixing. The shards of a domain follow one another."""
WINDOWS = (4_096, 65_536, 262_144)
"""Values of shuffle_block_size: the number of samples from which batches are drawn at any time."""
PEERS = (("py1e", 1), ("py1e", 64), ("py1br", 1), ("py1br", 64))
"""StreamingDataset's current and previous default algorithm, with one canonical node (its default) and with many."""

WANTED_SECONDS, WANTED_MB = 20, 400
"""Targets of opening a data set."""
SCALE_BATCH, SCALE_TOKENS = 64, 8
"""Samples of the batch that is read, and tokens of a sample."""


def run(*, num_shards: int = 1_560_000, num_workers: int = 2, out: Path | None = None) -> dict[str, Any]:
    """Measure mixing and opening, print the tables, and return the report. `out` gets shuffle.md and shuffle.json.

    `num_shards` is the size of the data set that is opened, with `num_workers` loader workers.
    """
    report = describe_conditions() | {
        "mixing": measure_mixing(),
        "opening": measure_opening(num_shards, num_workers),
    }
    parts = HOW, table_of_mixing(report), WINDOW, table_of_opening(report), [opening_in_words(report)]
    command = f"python -m benchmarks order --num-shards {num_shards}"
    tell(report, *parts, name="shuffle", heading="How well the order mixes", command=command, out=out)
    return report


HOW = (
    f"{NUM_DOMAINS} domains of {SHARDS_PER_DOMAIN} shards of {SAMPLES_PER_SHARD:,} samples, in batches of "
    f"{BATCH_SIZE}. The table has the variance of the number of a domain's samples in a batch, divided by that of "
    "a binomial distribution. 1 means that batches mix like independent draws; a higher value means that domains "
    "come in waves."
)
WINDOW = "The window is `shuffle_block_size`: the number of samples from which batches are drawn at any time."


def table_of_mixing(report: dict[str, Any]) -> Table:
    """Return a table with one row for each order and one column for each window."""
    rows = [[name, *(f"{ratio:.2f}" for ratio in ratios)] for name, ratios in report["mixing"].items()]
    return measured_table("how well the order mixes", ["order", *(f"window {window:,}" for window in WINDOWS)], rows)


def table_of_opening(report: dict[str, Any]) -> Table:
    """Return a table of the seconds and memory that opening takes, beside the targets."""
    opening = report["opening"]
    headings = ["shards", "loader workers", "seconds to the first batch", "wanted", "MB, workers included", "wanted"]
    row = [
        *(f"{opening['num_shards']:,}", str(opening["num_workers"])),
        *(f"{opening['seconds']:.1f}", f"{WANTED_SECONDS}", f"{opening['megabytes']:.0f}", f"{WANTED_MB}"),
    ]
    return measured_table("what opening a data set costs", headings, [row])


def opening_in_words(report: dict[str, Any]) -> str:
    """Return the paragraph below that table: processor time and load, which explain the seconds."""
    opening = report["opening"]
    return (
        f"Opening took {opening['open_seconds']:.1f} s of that time. Processor time was {opening['cpu_seconds']:.1f} "
        f"s in the rank and {opening['workers_cpu_seconds']:.1f} s in its workers together; before, the load average "
        f"was {opening['load_average']:.1f} on {opening['num_cores']} cores. Memory is what rank and workers use "
        "beyond what the rank used before; shared pages are counted once."
    )


# Mixing ---------------------------------------------------------------------------------------------------------------


def measure_mixing() -> dict[str, list[float]]:
    """Return order -> for each of WINDOWS, the variance of the domains over that of a binomial."""
    mixing = {"ours": [variance_over_binomial(domains_of(our_batches(window))) for window in WINDOWS]}
    for name, num_nodes in PEERS:
        mixing[f"{name}, {num_nodes} canonical node{'s' if num_nodes > 1 else ''}"] = [
            variance_over_binomial(domains_of(streaming_batches(name, num_nodes, window))) for window in WINDOWS
        ]
    return mixing


def variance_over_binomial(domains_bl: NDArray[np.int64]) -> float:
    """Return the variance of how often a domain occurs in a batch over that of a binomial, the mean over domains.

    `domains_bl` has the domain of each sample. A domain with share p of the samples has the variance batch_size p (1 -
    p) if batches are drawn at random.
    """
    batch_size = domains_bl.shape[1]
    ratios = []
    for domain in np.unique(domains_bl):
        is_domain_bl = domains_bl == domain
        share = float(is_domain_bl.mean())
        binomial_variance = batch_size * share * (1 - share)
        ratios.append(float(is_domain_bl.sum(axis=1).var()) / binomial_variance)
    return float(np.mean(ratios))


def our_batches(window_samples: int, epoch: int = 0) -> NDArray[np.int64]:
    """Return the sample ids of all batches in our order, [batches, samples of a batch]."""
    order = SampleOrder(
        shard_sizes_per_stream=[_shard_sizes()],
        epoch_samples_per_stream=[int(_shard_sizes().sum())],
        batch_size=BATCH_SIZE,
        seed=9176,
        shuffle=True,
        window_samples=window_samples,
    )
    return order.build_epoch(epoch).sample_ids(range(BATCH_SIZE), range(order.num_batches))


def streaming_batches(algorithm: str, num_canonical_nodes: int, window_samples: int) -> NDArray[np.int64]:
    """Return the sample ids of StreamingDataset's batches on one node of 8 ranks, with one loader worker each.

    A last batch that is not full is left out.
    """
    from streaming.base.partition import get_partitions
    from streaming.base.shuffle import get_shuffle

    sizes = _shard_sizes()
    partition = get_partitions("relaxed", int(sizes.sum()), num_canonical_nodes, 1, 8, 1, BATCH_SIZE // 8)[0, :, 0]
    shuffled_ids = get_shuffle(algorithm, sizes, num_canonical_nodes, 9176, 0, window_samples // num_canonical_nodes)
    # The partition is [ranks, batches, samples of a rank], and has -1 where a sample is missing.
    is_whole = (partition >= 0).all(axis=(0, 2))
    return shuffled_ids[partition].swapaxes(0, 1).reshape(-1, BATCH_SIZE)[is_whole]


def domains_of(ids_bl: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the domain of each sample."""
    return ids_bl // (SHARDS_PER_DOMAIN * SAMPLES_PER_SHARD)


def _shard_sizes() -> NDArray[np.int64]:
    """Return the number of samples of each shard, in order of the domains."""
    return np.full(NUM_DOMAINS * SHARDS_PER_DOMAIN, SAMPLES_PER_SHARD, np.int64)


# Opening --------------------------------------------------------------------------------------------------------------


def measure_opening(num_shards: int, num_workers: int) -> dict[str, Any]:
    """Open a data set of this many shards in a process of its own, and return what it took to read a batch."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        write_index(Path(folder), num_shards)
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_open_and_read, args=(Path(folder), num_workers, sender))
        process.start()
        sender.close()
        try:
            measured = receiver.recv()
        finally:
            process.join()
    return {"num_shards": num_shards, "num_workers": num_workers, **measured}


def write_index(folder: Path, num_shards: int) -> None:
    """Write the index of a data set of this many shards, of which only those exist that the first batches read.

    These are links to one real shard. The index is written as text, shard by shard, with this shard's record as the
    template.
    """
    from streaming import MDSWriter

    samples_per_shard = 16_384
    with MDSWriter(out=str(folder / "one"), columns={"tokens": "bytes"}, hashes=["xxh3_64"]) as writer:
        for _ in range(samples_per_shard):
            writer.write({"tokens": np.arange(SCALE_TOKENS, dtype=np.int64).tobytes()})
    [shard_record] = json.loads((folder / "one" / "index.json").read_text())["shards"]

    text_before_name, text_after_name = json.dumps(shard_record, sort_keys=True).split(
        shard_record["raw_data"]["basename"]
    )
    with open(folder / "index.json", "w") as file:
        file.write('{"shards": [')
        file.writelines(
            f"{', ' if shard else ''}{text_before_name}shard.{shard:05d}.mds{text_after_name}"
            for shard in range(num_shards)
        )
        file.write('], "version": 2}')

    # Find the shards of the first batches in the order that the reader will have.
    order = SampleOrder(
        shard_sizes_per_stream=[np.full(num_shards, samples_per_shard)],
        epoch_samples_per_stream=[num_shards * samples_per_shard],
        batch_size=SCALE_BATCH,
        seed=9176,
        shuffle=True,
    )
    steps = range(min(order.num_batches, order.block_samples))
    for shard in np.unique(order.build_epoch(0).sample_ids(range(SCALE_BATCH), steps) // samples_per_shard):
        (folder / f"shard.{shard:05d}.mds").symlink_to(folder / "one" / "shard.00000.mds")


def _open_and_read(folder: Path, num_workers: int, sender: Connection) -> None:
    """Open the data set, read one batch, and send seconds and memory to the parent process."""
    from llmfoundry_lite.config.data_schema import TextDatasetConfig
    from llmfoundry_lite.data.dataset import TextDataset
    from llmfoundry_lite.data.loader import build_text_loader

    multiprocessing.set_start_method("fork", force=True)  # for the loader's workers, as in a launched process
    load_average, bytes_before = os.getloadavg()[0], _own_bytes([os.getpid()])
    started, cpu_started = time.perf_counter(), time.process_time()

    config = TextDatasetConfig(local=str(folder), shuffle=True)
    dataset = TextDataset(config, max_seq_len=SCALE_TOKENS, global_batch_size=SCALE_BATCH)
    opened = time.perf_counter()
    batches = iter(build_text_loader(dataset, num_workers=num_workers))
    next(batches)
    seconds = time.perf_counter() - started
    cpu_seconds = time.process_time() - cpu_started

    # What the workers took has to be read while they are alive.
    children = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
    workers_cpu_seconds = sum(sum(psutil.Process(child).cpu_times()[:2]) for child in children)
    bytes_after = _own_bytes([os.getpid(), *children])
    sender.send(
        {
            "seconds": seconds,
            "open_seconds": opened - started,
            "cpu_seconds": cpu_seconds,
            "workers_cpu_seconds": workers_cpu_seconds,
            "megabytes": (bytes_after - bytes_before) / 1e6,
            "load_average": load_average,
            "num_cores": len(os.sched_getaffinity(0)),
        }
    )


def _own_bytes(pids: list[int]) -> int:
    """Return the processes' resident memory. A page that n of them share counts as 1/n in each (Linux)."""
    return sum(psutil.Process(pid).memory_full_info().pss for pid in pids)
