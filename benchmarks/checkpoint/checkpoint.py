"""Stall, durable write and load of checkpoints, beside peers and this machine's limits.

    python -m benchmarks checkpoint --folder /data/scratch --out .

Two real ranks hold one 125M MPT with AdamW's state, sharded by `parallel`, and save it in turns: our `Saver`, torch's
`dcp.save` and `dcp.async_save`, and what Composer's CheckpointSaver calls for sharded state. Every round also measures
the limits on the same bytes: a copy of the local state in memory, a plain write + fsync of one file per rank, a plain
read. Then our side alone, from 10M to 350M parameters.

How it is counted. Stall: the slowest rank's time in the call that starts a save, collecting the state included.
Durable: from there until all bytes are synced; peers' files and folders get an fsync more, because ours have had
theirs (torch syncs its data files itself, so this costs the peers next to nothing). The first save of each side, which
makes its buffers, is reported apart. `async_save` is given a stager that lives as long as ours does, so that its
buffers are reused too. Loads start from a page cache from which the files were dropped (posix_fadvise after fsync),
checked with mincore; a host's cache below a virtual disk cannot be dropped from here. "Unverified" is our own `load`
with its hashing left out. Before each measurement, whosever it is, the
ranks touch and free the memory it will need, see `meters.warm_up`.

Nothing is left in `--folder` unless this process is killed with SIGKILL.

A save after every batch: real training, with saves and without in turns (`interval.py`).

This file starts the ranks (`rank_program.py`) in order. They measure with `meters.py` how `sides.py` saves;
`report.py` has the targets and tables.
"""

import multiprocessing
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import rank_program
from benchmarks.checkpoint.meters import available_bytes
from benchmarks.checkpoint.rank_program import NUM_RANKS, model_config
from benchmarks.checkpoint.report import (
    judge,
    table_of_growth,
    table_of_intervals,
    table_of_sides,
    table_of_targets,
)
from llmfoundry_lite.errors import DataError, UserError
from llmfoundry_lite.hardware import GIB
from llmfoundry_lite.models.flops import count_parameters
from llmfoundry_machines.bench.frame import check_names, describe_conditions, open_console, tell
from llmfoundry_machines.bench.steps import SHAPES, measure_on_ranks

GROWTH_ROUNDS = 2
"""Warm saves of each size are enough to see how it grows."""
INTERVAL_ROUNDS = 2
"""Sizes whose batches take more than a minute on two cores."""
BYTES_PER_PARAMETER = 12
"""The weights and AdamW's two moments, fp32."""


def run(
    *,
    num_rounds: int = 3,
    sizes: Sequence[str] = ("10m", "40m", "125m", "350m"),
    folder: Path = Path("."),
    quick: bool = False,
    out: Path | None = None,
) -> dict[str, Any]:
    """Measure everything in `folder`, print the tables, write them into `out`, and return the report.

    `num_rounds` warm rounds follow a first one. `quick` takes a tiny model throughout. Raises UserError for a size
    that is not in SHAPES, and for a disk that is too small or cannot be written.
    """
    console = open_console()
    folder = folder.absolute()
    sizes = ("tiny",) if quick else tuple(sizes)
    size = "tiny" if quick else "125m"
    _check(sizes, num_rounds)
    _check_disk(folder, max(size_bytes(name) for name in (size, *sizes)))
    if out is not None:
        _make_folder(out, "--out")
    report: dict[str, Any] = {
        **describe_conditions(),
        "composer": version("mosaicml"),
        "num_ranks": NUM_RANKS,
        "num_rounds": num_rounds,
        "growth": {},
    }
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=folder) as work, _ended_by_sigterm():

        def measure(what: str, size: str, most_rounds: int = num_rounds) -> dict[str, Any]:
            console.print(f"{what}: {size}")
            return _measure_on_ranks(what, size, min(num_rounds, most_rounds), work)

        report |= measure("sides", size)
        report["targets"] = judge(report)
        report |= measure("interval", size, INTERVAL_ROUNDS)
        for name in sizes:
            missing = _missing_memory(name)
            report["growth"][name] = {"left_out": missing} if missing else measure("growth", name, GROWTH_ROUNDS)
    tables = table_of_sides(report), table_of_targets(report), table_of_intervals(report), table_of_growth(report)
    about = {
        "heading": "Saves and loads, compared with other tools and with this machine's limits",
        "asked": ["num_ranks"],
    }
    tell(report, *tables, name="checkpoint", command="python -m benchmarks checkpoint", **about, out=out)
    return report


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM raise, as Ctrl-C does, so that the ranks and the files go with this process."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        for rank in multiprocessing.active_children():
            rank.kill()
            rank.join()
        signal.signal(signal.SIGTERM, before)


def size_bytes(size: str) -> int:
    """Bytes of one checkpoint."""
    return count_parameters(model_config(size)) * BYTES_PER_PARAMETER


def _check(sizes: Sequence[str], num_rounds: int) -> None:
    check_names("--sizes", sizes, SHAPES)
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


def _measure_on_ranks(what: str, size: str, num_rounds: int, work: str) -> dict[str, Any]:
    """Return what rank 0 found. Raises DataError with a rank's last words."""
    try:
        return measure_on_ranks(NUM_RANKS, partial(rank_program.measure, what, size, num_rounds, work))
    except RuntimeError as error:
        killed = "; Linux does so where memory runs out; free some, or name smaller --sizes"
        raise DataError(f"a rank failed: {error}{killed if 'SIGKILL' in str(error) else ''}") from None
