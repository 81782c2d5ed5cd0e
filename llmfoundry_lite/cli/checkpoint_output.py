"""Output of the commands `llmfoundry-lite checkpoint`: lists of checkpoints, facts about one, progress. No torch."""

import math
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TextIO

from llmfoundry_lite.checkpoint.manifest import DCP_STATE, Manifest, Segment
from llmfoundry_lite.checkpoint.open_folder import open_folder
from llmfoundry_lite.checkpoint.store import READS_AT_ONCE, Candidate, Checkpoint, CheckpointStore, condition_of
from llmfoundry_lite.errors import CheckpointError, printable

PROGRESS_BYTES = 1 << 28
"""Size below which a checkpoint is verified without a bar."""


# ---------------------------------------------------------------------------------------------------------------- lists


def print_candidates(store: CheckpointStore, candidates: Sequence[Candidate]) -> None:
    """Print the checkpoints of a store: those that are complete as a table, and a line for each other one."""
    with ThreadPoolExecutor(READS_AT_ONCE, thread_name_prefix="checkpoint-look") as pool:
        faults = list(pool.map(find_fault, candidates))
    print_line(store.root.url)

    rows = []
    for candidate, fault in zip(candidates, faults, strict=True):
        row = describe_row(candidate)
        if fault is None and row is not None:
            rows.append((candidate.name, *row))
    if rows:
        print_columns(("checkpoint", "batch", "tokens", "size", "written"), rows, right=(1, 2, 3))
    for candidate, fault in zip(candidates, faults, strict=True):
        if fault is not None:
            print_line(f"{candidate.name} is {condition_of(fault)}: {fault}")
    for name in store.set_aside_saves():
        print_line(
            f"{name} was set aside as damaged; `checkpoint prune` removes it once all saves that it keeps are newer"
        )
    for name in store.renamed_saves():
        print_line(
            f"{name} is a checkpoint by another name: runs pass it over; give its own path, or rename it to ba<batch>"
        )


def print_second_place(location: str, candidates: Sequence[Candidate]) -> bool:
    """Print the checkpoints in a run's `save_fallback`, or why they are not known. Returns whether there are any.

    location: the run folder, or the folder of checkpoints.
    candidates: the checkpoints there, whose newest manifest has the configuration where the run folder is not at hand.
    """
    from llmfoundry_lite.report.reading import read_config_if_there, read_second_place

    folder = open_folder(location)
    config = read_config_if_there(folder)
    for candidate in candidates:
        if config is None and candidate.checkpoint is not None:
            config = candidate.checkpoint.manifest.config
    place = read_second_place(folder, config if isinstance(config, dict) else None)
    if place is None:
        return False
    print_line()
    if place.problem:
        print_line(f"saves in save_fallback are not known: {place.location} is {place.problem}")
        return False
    if not place.candidates:
        print_line(f"no saves in save_fallback {place.location}")
        return False
    print_line("save_fallback")
    print_candidates(CheckpointStore(place.location), place.candidates)
    return True


def find_fault(candidate: Candidate) -> CheckpointError | None:
    """Return the error of a checkpoint whose manifest cannot be read, or whose files are missing or of another size.

    Returns None for a complete one. Files are listed but not read.
    """
    from llmfoundry_lite.checkpoint.verify import check_present

    try:
        check_present(candidate.open())
    except CheckpointError as error:
        return error
    return None


def describe_row(candidate: Candidate) -> tuple[str, str, str, str] | None:
    """Return the row of a checkpoint in the list: its batch, tokens, size and date as text.

    Returns None if its manifest cannot be read.
    """
    head = candidate.head
    if head is None:
        return None
    written = (head.written_at or "").replace("+00:00", "Z")
    return f"{head.batch:,}", f"{head.num_tokens:,}", format_megabytes(head.num_bytes), written


# ------------------------------------------------------------------------------------------------------- one checkpoint


def describe_manifest(manifest: Manifest) -> dict[str, str | None]:
    """Return heading -> text for the facts about a checkpoint that `inspect` prints, in their order.

    For example, `{"run": "mpt-1b", "position": "epoch 0, batch 200, …", …}`. A fact that is unknown is None.
    """
    position = manifest.timestamp
    tensors = manifest.tensors
    model_tensors = [tensor for name, tensor in tensors.items() if name.startswith("model/")]
    optimizer_bytes = sum(tensor.num_bytes for name, tensor in tensors.items() if name.startswith("optim/"))
    dtype_counts = Counter(tensor.dtype for tensor in tensors.values())
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in dtype_counts.items())
    files = "1 file" if len(manifest.files) == 1 else f"{len(manifest.files)} files"
    facts = {
        "run": manifest.run_name,
        "position": f"epoch {position.epoch}, batch {position.batch:,}, {position.sample:,} samples, "
        f"{position.token:,} tokens",
        "parameters": f"{count_parameters(manifest):,}",
        "model": format_megabytes(sum(tensor.num_bytes for tensor in model_tensors)),
        "optimizer": format_megabytes(optimizer_bytes) if manifest.optimizer is not None else "none",
        "tensors": f"{dtypes}; in {files}",
        "state digest": manifest.state_digest,
        "written": manifest.written_at,
        "save": manifest.save_id,
        "after": manifest.parent_save_id,
    }
    # An imported checkpoint has no position in the data.
    origin = manifest.scalars.get("imported_from")
    if isinstance(origin, dict):
        del facts["position"]
        facts = {"imported from": f"{origin.get('source')} ({origin.get('kind')})"} | facts
    averaged_from = manifest.scalars.get("averaged_from")
    if isinstance(averaged_from, list):
        save_ids = [str(origin.get("save_id")) for origin in averaged_from if isinstance(origin, dict)]
        facts = {"mean of": ", ".join(save_ids)} | facts
    if manifest.dcp_state:
        # An import from torch.distributed.checkpoint keeps its names, so the model's tensors cannot be told apart.
        size = format_megabytes(sum(tensor.num_bytes for tensor in tensors.values()))
        num_values = len(manifest.dcp_state["values"])
        facts["model"] = f"{len(tensors)} tensors ({size}) and {num_values} values of {DCP_STATE}"
        del facts["parameters"], facts["optimizer"]
    return facts


def count_parameters(manifest: Manifest) -> int:
    """Return the number of elements in the model's tensors."""
    model_tensors = [tensor for name, tensor in manifest.tensors.items() if name.startswith("model/")]
    return sum(math.prod(tensor.shape) for tensor in model_tensors)


def describe_segment(segment: Segment) -> tuple[str, ...]:
    """Return the row of a segment, a stretch of a run on the same devices, in the table of `inspect`.

    The row has its batches, device, number of ranks, sharding, precision and tokens per second, as text. Unknown facts
    are empty.
    """
    num_ranks = "" if segment.world_size is None else str(segment.world_size)
    tokens_per_second = "" if segment.tokens_per_second is None else f"{segment.tokens_per_second:,.0f}"
    return (
        segment.span,
        segment.device or "",
        num_ranks,
        segment.sharding_in_words or "",
        segment.precision or "",
        tokens_per_second,
    )


def verify_with_progress(opened: Checkpoint) -> None:
    """Hash every byte of a checkpoint, with a progress bar for a large one at a terminal.

    Raises DamagedCheckpointError, or another CheckpointError, if it is not intact.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from llmfoundry_lite.checkpoint.verify import verify_checkpoint

    console = Console(stderr=True)
    num_bytes = opened.manifest.num_bytes
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    is_quiet = not console.is_terminal or num_bytes < PROGRESS_BYTES
    with Progress(*columns, console=console, transient=True, disable=is_quiet) as progress:
        task = progress.add_task(printable(opened.name), total=num_bytes)
        verify_checkpoint(opened, lambda count: progress.advance(task, count))
        progress.update(task, completed=num_bytes)


# ----------------------------------------------------------------------------------------------------- lines and tables


def print_line(text: str = "", file: TextIO | None = None) -> None:
    """Print a line to a file, by default standard output, without control characters and credentials.

    Names in a checkpoint may come from other people.
    """
    print(printable(text), file=file)


def print_columns(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """Print a table with a heading for each column. `right` has the indices of the columns that are right-aligned."""
    from llmfoundry_lite.tables import Table, console

    Table("", columns, rows, right).print(console())


def print_facts(facts: dict[str, str | None]) -> None:
    """Print an indented line for each name and its value. Values that are None are left out."""
    for name, value in facts.items():
        if value is not None:
            print_line(f"  {name:<14}{value}")


def show_spinner(text: str) -> Any:
    """Return a context manager that shows a spinner with this text at a terminal, while its block runs."""
    from rich.console import Console

    return Console(stderr=True).status(printable(text).replace("[", r"\["))


def format_megabytes(num_bytes: int) -> str:
    """Return a number of bytes as text in MB (10^6 bytes): `1,234.5 MB`."""
    return f"{num_bytes / 1e6:,.1f} MB"
