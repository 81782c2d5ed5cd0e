"""Retention over many runs, for `llmfoundry-lite runs prune`: what goes, and the bytes that this frees. No torch.

The core's `plan_removal` (`checkpoint/retention.py`) decides for each run, by sizes and headers. `verify_plans` then
decides again for the runs that lose something, by the hashes of the newest save that stays. `carry_out` removes the
saves that were planned, what earlier removals have left behind, and parts of the log that no save refers to any more.
It may run beside a launch that trains the run, as `checkpoint prune` may: it keeps the newest intact checkpoint, from
which a launch would resume, and compares each save's id once more before it removes it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from llmfoundry_lite.checkpoint.commit import Checkpoint
from llmfoundry_lite.checkpoint.folder import Folder
from llmfoundry_lite.checkpoint.open_folder import open_folder
from llmfoundry_lite.checkpoint.paths import INSIDE_A_RUN
from llmfoundry_lite.checkpoint.retention import Removal, carry_out_removal, list_files, plan_removal
from llmfoundry_lite.checkpoint.store import Candidate, CheckpointStore, condition_of
from llmfoundry_lite.checkpoint.verify import check_present, check_structure
from llmfoundry_lite.errors import CheckpointError, DataError
from llmfoundry_lite.report.reading import read_recorded
from llmfoundry_lite.tables import Table
from llmfoundry_ops.index import FoundRun, find_run_folders, is_link, is_run_folder, name_below, read_in_parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Which checkpoints of a run stay."""

    keep_last: int
    """Number of newest checkpoints."""
    keep_every_batches: int | None = None
    """Checkpoints whose batch is a multiple of it stay."""
    keep_best: int = 0
    """Number of checkpoints with the best values of `by` that stay."""
    by: str | None = None
    """Name of the number in the log, such as `eval/loss`."""
    highest_is_best: bool = False
    removes_set_aside: bool = False
    """Remove all saves that were set aside as damaged, not only those that are older than what stays."""


@dataclass(slots=True, kw_only=True)
class RunPlan:
    """Checkpoints of one run that retention removes."""

    run: str
    found: FoundRun
    store: CheckpointStore | None = None
    removal: Removal = field(default_factory=Removal)
    files: dict[str, int] = field(default_factory=dict)
    """Path and bytes of each file to remove."""
    notes: list[str] = field(default_factory=list)
    """Why nothing is removed, what stays for a person, and who trains the run now."""

    @property
    def folder(self) -> str:
        """Path or URL of the folder of its checkpoints; empty if it is elsewhere."""
        return "" if self.store is None else self.store.root.url

    @property
    def num_bytes(self) -> int:
        """Bytes of all files to remove."""
        return sum(self.files.values())


def plan_runs(location: str, retention: Retention) -> list[RunPlan]:
    """Plan the removals of all runs below a path or URL, without removing anything, and without reading whole saves.

    A run that cannot be read has a note. Links to folders of runs or of checkpoints are not followed. Raises
    DataError if there is no run.
    """
    root = open_folder(location)
    found = find_run_folders(root, follows_links=False)
    if not found:
        raise DataError(f"{root.url}: no runs here, nor up to two levels below; expected run folders or checkpoints")
    return read_in_parallel(lambda run: plan_run(run, root, retention), found)


def check_without_reading_all(checkpoint: Checkpoint) -> None:
    """Check that all files of a checkpoint are there, and that their headers are intact. Raises CheckpointError."""
    check_present(checkpoint)
    check_structure(checkpoint)


def plan_run(
    run: FoundRun,
    root: Folder,
    retention: Retention,
    verify: Callable[[Checkpoint], None] = check_without_reading_all,
) -> RunPlan:
    """Plan the removals of one run below `root`. What goes wrong becomes a note, and nothing of the run is removed.

    `verify` raises CheckpointError for a checkpoint that is not intact. One that passes stays.
    """
    plan = RunPlan(run=name_below(run.folder, root), found=run)
    folder = run.folder
    if is_run_folder(run.names):
        if INSIDE_A_RUN not in run.names:
            plan.notes.append("its checkpoints are elsewhere; name their folder")
            return plan
        folder = folder.child(INSIDE_A_RUN)
        if is_link(folder):
            plan.notes.append("its checkpoints are behind a link; name the folder that it leads to")
            return plan

    plan.store = CheckpointStore(folder.url)
    try:
        keep_names = find_best(run.folder, plan.store.candidates(), retention)
        plan.removal = plan_removal(
            plan.store,
            keep_newest=retention.keep_last,
            keep_every_batches=retention.keep_every_batches,
            keep_names=keep_names,
            removes_set_aside=retention.removes_set_aside,
            verify=verify,
            on_unsound=lambda name, error: plan.notes.append(f"{name} is {condition_of(error)}"),
        )
        plan.files = list_files(plan.store, plan.removal)
        plan.notes += describe_rest(plan.store, plan.removal)
    except (CheckpointError, DataError, OSError) as error:
        plan.removal = Removal()
        plan.files = {}
        plan.notes.append(f"nothing is removed: {error}")
    return plan


def verify_plans(
    location: str, plans: Sequence[RunPlan], retention: Retention, verify: Callable[[str, Checkpoint], None]
) -> list[RunPlan]:
    """Plan again the runs that lose saves, one after the other, with the newest save that stays read as a whole.

    verify: called with the name of a run and a checkpoint of it; raises CheckpointError if a byte of it is damaged. The
        newest is read first. If it is damaged, it stays for a person, and the next one is read, until one passes.

    Returns all plans. Nothing is removed from a run without a checkpoint that passes.
    """
    root = open_folder(location)
    verified = []
    for plan in plans:
        if plan.removal.names:
            verified.append(plan_run(plan.found, root, retention, partial(verify, plan.run)))
        else:
            verified.append(plan)
    return verified


def find_best(folder: Folder, candidates: Sequence[Candidate], retention: Retention) -> list[str]:
    """Return the names of the checkpoints that have the best values of `retention.by` in the run's log.

    `folder` is the run folder, or the folder of checkpoints. A checkpoint has the value of its own batch. Raises
    DataError if none has one, because then all of them would go.
    """
    if not retention.keep_best or not candidates:
        return []
    assert retention.by is not None
    log = read_recorded(folder.url, allowed_protocols=()).log
    values = log.numbers(retention.by)

    value_of_name: dict[str, float] = {}
    for candidate in candidates:
        for value in values[log.batch == candidate.batch]:
            if math.isfinite(value):
                value_of_name[candidate.name] = float(value)
    if not value_of_name:
        raise DataError(f"no checkpoint has a {retention.by} of its batch in the log")
    names = sorted(value_of_name, key=lambda name: value_of_name[name], reverse=retention.highest_is_best)
    return names[: retention.keep_best]


def describe_rest(store: CheckpointStore, removal: Removal) -> list[str]:
    """Return notes on saves that stay for a person, and on a launch that trains the run now.

    Raises CheckpointError and OSError.
    """
    notes = []
    unreadable = [candidate.name for candidate in removal.kept if candidate.head is None]
    if unreadable:
        notes.append(f"cannot be read, and stay: {', '.join(unreadable)}")

    set_aside = [name for name in store.set_aside_saves() if name not in removal.set_aside_names]
    if set_aside:
        num_bytes = sum(sum(store.root.child(name).tree_sizes().values()) for name in set_aside)
        notes.append(f"set aside: {', '.join(set_aside)} ({format_size(num_bytes)}); --set-aside removes them")

    holder = store.leases.current_holder()
    if holder is not None and not holder.is_released:
        notes.append(f"leased to {holder.describe()}")
    return notes


def carry_out(plans: Sequence[RunPlan]) -> list[str]:
    """Remove what the plans say, run by run. Returns a line for each run of which something could not be removed."""
    failures = []
    for plan in plans:
        if plan.store is None:
            continue
        try:
            carry_out_removal(plan.store, plan.removal)
        except CheckpointError as error:
            failures.append(f"{plan.run}: {error}")
    return failures


# --------------------------------------------------------------------------------------------------------- the output


def build_table(plans: Sequence[RunPlan]) -> Table:
    """Build the table of what goes and what stays, a row for each run."""
    rows = []
    for plan in plans:
        kept = [candidate.name for candidate in plan.removal.kept if candidate.head is not None]
        rows.append(
            (
                plan.run,
                " ".join(plan.removal.names),
                " ".join(kept),
                format_size(plan.num_bytes),
                "; ".join(plan.notes),
            )
        )
    return Table("Space", ("run", "removes", "keeps", "frees", "notes"), rows, right=(3,))


def describe_total(plans: Sequence[RunPlan], verb: str) -> str:
    """Return the last line of the output, such as `would free 12.3 GB: 40 saves of 8 runs`."""
    num_saves = sum(len(plan.removal.names) for plan in plans)
    num_runs = sum(bool(plan.files) for plan in plans)
    num_bytes = sum(plan.num_bytes for plan in plans)
    return f"{verb} {format_size(num_bytes)}: {num_saves} saves of {num_runs} runs"


def format_size(num_bytes: int) -> str:
    """Format a number of bytes in decimal units, as buckets are billed: `0 B`, `12.3 MB`, `1.5 TB`."""
    if num_bytes < 1000:
        return f"{num_bytes} B"
    exponent = min((len(str(num_bytes)) - 1) // 3, 4)
    return f"{num_bytes / 1000**exponent:,.1f} {('', 'kB', 'MB', 'GB', 'TB')[exponent]}"
