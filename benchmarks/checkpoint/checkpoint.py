"""Measure how long saves stall training, when they are durable, and how long loads take, beside other tools.

    python -m benchmarks checkpoint --folder /data/scratch --out .

Two real ranks hold one 125M MPT with AdamW's state, sharded by `parallel`. Three savers take turns with it: our
`Saver`, torch's `dcp.save` and `dcp.async_save`, and what Composer's CheckpointSaver calls for sharded state. Every
round also measures this machine's limits on the same bytes: a copy of the local state in memory, a plain write + fsync
of one file per rank, and a plain read. Then our side alone is measured from 10M to 350M parameters, and real training
with a save after every batch (`interval.py`).

How it is measured:

- Stall is the time that the slowest rank spends in the call that starts a save, including collecting the state.
- Durable is the time from the same moment until all bytes are synced. The peers' files and folders get an additional
  fsync, because ours have had theirs. torch syncs its data files itself, so this costs the peers next to nothing.
- The first save of each side allocates its buffers, so it is reported separately. `async_save` is given a stager that
  lives as long as ours does, so that its buffers are reused too.
- Loads start with a cold page cache: the files are dropped with posix_fadvise after an fsync, and mincore checks that
  they are gone. A host's cache below a virtual disk cannot be dropped from here.
- "Unverified" is our own `load` without its hashing.
- Before every measurement of every side, the ranks touch and free the memory it will need, see `meters.warm_up`.

Nothing is left in `--folder` unless this process is killed with SIGKILL.

This file starts the ranks (`rank_program.py`) in order. They save through `sides.py` and measure with `meters.py`;
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
"""Warm saves of each size. Two are enough to see how the time grows with the size."""
INTERVAL_ROUNDS = 2
"""Rounds of training with saves. Only two, because a batch takes more than a minute on two cores."""
BYTES_PER_PARAMETER = 12
"""Bytes of a checkpoint: the weight and AdamW's two moments, fp32."""


def run(
    *,
    num_rounds: int = 3,
    sizes: Sequence[str] = ("10m", "40m", "125m", "350m"),
    folder: Path = Path("."),
    quick: bool = False,
    out: Path | None = None,
) -> dict[str, Any]:
    """Measure everything in `folder`, print the tables, write them into `out`, and return the report.

    `num_rounds` warm rounds follow a first, cold one. `sizes` are the models of which only our side is measured.
    `quick` uses a tiny model throughout.

    Raises UserError for a size that is not in SHAPES, and for a disk that is too small or cannot be written.
    """
    console = open_console()
    folder = folder.absolute()
    sizes = ("tiny",) if quick else tuple(sizes)
    size = "tiny" if quick else "125m"
    _check(sizes, num_rounds)
    _check_disk(folder, max(size_bytes(name) for name in (size, *sizes)))

    # Check all that can be refused before the first rank starts, because the measurement takes long.
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
            """Say what is measured now, and measure it with at most `most_rounds` warm rounds."""
            console.print(f"{what}: {size}")
            return _measure_on_ranks(what, size, min(num_rounds, most_rounds), work)

        report |= measure("sides", size)
        report["targets"] = judge(report)
        report |= measure("interval", size, INTERVAL_ROUNDS)
        for name in sizes:
            # A size that would not fit into memory is reported with the reason instead of being killed.
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
    """Make SIGTERM end the block with SystemExit, as Ctrl-C does, so that ranks and files are cleaned up.

    On leaving the block, in any way, the rank processes are killed and the previous handler is restored.
    """
    previous_handler = signal.signal(signal.SIGTERM, lambda signal_number, frame: sys.exit(128 + signal_number))
    try:
        yield
    finally:
        for rank in multiprocessing.active_children():
            rank.kill()
            rank.join()
        signal.signal(signal.SIGTERM, previous_handler)


def size_bytes(size: str) -> int:
    """Return the bytes of one checkpoint of the model with this size's name, such as "125m"."""
    return count_parameters(model_config(size)) * BYTES_PER_PARAMETER


def _check(sizes: Sequence[str], num_rounds: int) -> None:
    """Raise UserError for a size without a shape, or for fewer than one round."""
    check_names("--sizes", sizes, SHAPES)
    if num_rounds < 1:
        raise UserError(f"--num-rounds: {num_rounds} is fewer than 1")


def _check_disk(folder: Path, largest_bytes: int) -> None:
    """Raise UserError if `folder` cannot be written or has no room for two of the largest checkpoints."""
    _make_folder(folder, "--folder")
    # Two, because the next save is written before the previous one is removed.
    needed, free = 2 * largest_bytes, shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"--folder: {folder} has {free / GIB:.1f} GiB free and {needed / GIB:.1f} are needed; "
            "name another disk, or smaller --sizes"
        )


def _make_folder(folder: Path, option: str) -> None:
    """Create the folder that a command line option names. Raises UserError if it cannot be written into."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"{option}: {folder} cannot be written: {error.strerror or error}") from None


def _missing_memory(size: str) -> str | None:
    """Return why this size cannot be measured on this machine, or None if the memory suffices.

    Needed are the state, one more copy of it (a staged save or the buffers of a load), and room for the page cache.
    """
    needed, available = int(2.5 * size_bytes(size)) + 2 * GIB, available_bytes()
    if available >= needed:
        return None
    return f"needs about {needed / GIB:.0f} GiB of memory, {available / GIB:.0f} are available"


def _measure_on_ranks(what: str, size: str, num_rounds: int, work: str) -> dict[str, Any]:
    """Run one part of the measurement on NUM_RANKS new processes, and return what rank 0 returned.

    `what` is "sides", "growth" or "interval", see `rank_program.measure`. Raises DataError with the message of a rank
    that failed.
    """
    try:
        return measure_on_ranks(NUM_RANKS, partial(rank_program.measure, what, size, num_rounds, work))
    except RuntimeError as error:
        # A rank that Linux killed leaves no message of its own.
        out_of_memory_hint = "; Linux does so where memory runs out; free some, or name smaller --sizes"
        raise DataError(f"a rank failed: {error}{out_of_memory_hint if 'SIGKILL' in str(error) else ''}") from None
