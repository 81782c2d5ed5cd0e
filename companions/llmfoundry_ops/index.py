"""A line about each run below a folder or in a bucket, for `llmfoundry-lite runs ls`. No torch.

`find_run_folders` looks for run folders and folders of checkpoints, up to two levels down. `describe_run` reads a few
small files of one: status.json and the end of the log in a run folder; the newest launch's record, and the first bytes
of the newest manifest, beside checkpoints. Neither reads a whole log or manifest, so a hundred runs take seconds.
"""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

from llmfoundry_lite.bounded import MAX_NOTE_BYTES, parse_json
from llmfoundry_lite.checkpoint.commit import COMMITTED, batch_of
from llmfoundry_lite.checkpoint.folder import Folder
from llmfoundry_lite.checkpoint.launch_record import EARLY_END, RECORDS, find_epochs
from llmfoundry_lite.checkpoint.lease import FOLDER as LEASES
from llmfoundry_lite.checkpoint.manifest import HEAD_BYTES, MANIFEST, Head
from llmfoundry_lite.checkpoint.manifest_json import read_head
from llmfoundry_lite.checkpoint.open_folder import open_folder
from llmfoundry_lite.checkpoint.run_log import METRICS, number_of, read_lines
from llmfoundry_lite.checkpoint.store import CheckpointStore
from llmfoundry_lite.config.spans import TIME_UNITS, Duration
from llmfoundry_lite.errors import CheckpointError, DataError, mask_credentials
from llmfoundry_lite.ranks.status import LAUNCHES, SAVED_IN, STATUS, is_sound, read_status
from llmfoundry_lite.report.log import LOSS, RATE
from llmfoundry_lite.report.reading import CONFIG, find_checkpoint_folder, read_config, read_recorded
from llmfoundry_lite.report.segments import segment_facts
from llmfoundry_lite.tables import Table
from llmfoundry_ops.published import (
    READS_AT_ONCE,
    RUNNING,
    LaunchRecord,
    NewestLaunch,
    Sighting,
    describe_early_end,
    describe_second_place,
    describe_silence,
    format_age,
    has_ended_early,
    look_for,
    read_newest_launch,
)

MAX_FOLDERS = 10_000
"""Number of folders that are listed in search of runs."""
TAIL_BYTES = 1 << 16
"""Bytes at the end of a log that are read for its last record, which has about a kilobyte."""
MAX_SAVES_LISTED = 8
"""Folders with the name of a checkpoint that are listed to find out whether they are checkpoints."""
SHARD_SUFFIX = ".safetensors"
T = TypeVar("T")
R = TypeVar("R")


@dataclass(slots=True, kw_only=True)
class RunLine:
    """Facts about a run that `runs ls` shows. None means that a fact is unknown."""

    run: str
    """Path below the folder that was listed."""
    url: str
    state: str = "unknown"
    """Status of the newest launch; `saved` if there are checkpoints alone, and `unreadable` if it cannot be read."""
    batch: int | None = None
    max_duration: str | None = None
    last_saved: str | None = None
    saved_at: float | None = None
    """When the newest checkpoint was written, in seconds since 1970."""
    loss: float | None = None
    tokens_per_second: float | None = None
    host: str | None = None
    """Host of the newest launch's rank 0."""
    reason: str | None = None
    """Why it has ended, why its saves fail, or for how long nothing was heard of it."""
    cost: float | None = None
    """Cost of all segments, if prices were given."""


# ------------------------------------------------------------------------------------------------ find the run folders


class FoundRun(NamedTuple):
    """A run folder, or a folder of checkpoints outside of a run folder."""

    folder: Folder
    names: list[str]
    """Names of the files and folders in it."""


def find_run_folders(root: Folder, *, follows_links: bool = True) -> list[FoundRun]:
    """Find run folders, and folders of checkpoints outside of run folders: `root` itself, or those up to two levels
    below it, by path.

    Folders that cannot be listed are passed over, except `root`. Without `follows_links`, links to folders are, too.
    Raises DataError if `root` cannot be listed, and if there are more than MAX_FOLDERS.
    """
    try:
        names = root.names()
        if is_run(root, names):
            return [FoundRun(root, names)]
        level = [root.child(name) for name in root.folders()]
    except OSError as error:
        raise DataError(f"{root.url}: cannot be read: {error.strerror or error}") from error

    found: list[FoundRun] = []
    for depth in range(2):
        if len(level) > MAX_FOLDERS:
            raise DataError(f"{root.url}: has more than {MAX_FOLDERS:,} folders; name one of them")
        if not follows_links:
            level = [folder for folder in level if not is_link(folder)]

        others = []
        for folder, names, is_run_here in read_in_parallel(_look_at, level):
            if is_run_here:
                found.append(FoundRun(folder, names))
            elif names and not folder.url.rsplit("/", 1)[-1].startswith("."):
                others.append(folder)
        if depth == 0:
            folder_names = read_in_parallel(_folders_or_none, others)
            level = [folder.child(name) for folder, names in zip(others, folder_names, strict=True) for name in names]
    return sorted(found, key=lambda run: run.folder.url)


def is_run(folder: Folder, names: Sequence[str]) -> bool:
    """Return whether a folder is a run folder or a folder of checkpoints. `names` are those of its files and folders.

    The log of a run and the leases of its launches are signs by themselves. Other names may have been given by a user,
    because a run may be called `ba1`, and a folder of runs `launches`. So their content decides, which takes a request
    more.
    """
    if METRICS in names or LEASES in names:
        return True
    if STATUS in names and read_status_in(folder) is not None:
        return True
    if RECORDS in names:
        record_names = _names_or_none(folder.child(RECORDS))
        if find_epochs(record_names) or EARLY_END in record_names:
            return True
    names_of_saves = [name for name in names if COMMITTED.fullmatch(name)]
    return any(_is_save(folder.child(name)) for name in names_of_saves[:MAX_SAVES_LISTED])


def _is_save(folder: Folder) -> bool:
    """Return whether a folder that has the name of a checkpoint has a file of one."""
    return any(name == MANIFEST or name.endswith(SHARD_SUFFIX) for name in _names_or_none(folder))


def _look_at(folder: Folder) -> tuple[Folder, list[str], bool]:
    """Return a folder, the names in it, and whether it is a run. There are no names if it cannot be listed."""
    names = _names_or_none(folder)
    with contextlib.suppress(OSError):
        return folder, names, is_run(folder, names)
    return folder, names, False


def read_in_parallel(read: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Return `read(item)` of each item, several at a time."""
    with ThreadPoolExecutor(READS_AT_ONCE, thread_name_prefix="runs") as pool:
        return list(pool.map(read, items))


def _names_or_none(folder: Folder) -> list[str]:
    """Return the names in a folder; none if it cannot be listed."""
    with contextlib.suppress(OSError):
        return folder.names()
    return []


def _folders_or_none(folder: Folder) -> list[str]:
    """Return the names of the folders in a folder; none if it cannot be listed."""
    with contextlib.suppress(OSError):
        return folder.folders()
    return []


def is_link(folder: Folder) -> bool:
    """Return whether a folder of this machine is a symbolic link."""
    return folder.path_here is not None and folder.path_here.is_symlink()


# ------------------------------------------------------------------------------------------------- a line for each run


def list_run_lines(location: str | os.PathLike[str], prices: dict[str, float] | None = None) -> list[RunLine]:
    """Describe the runs below a path or URL, those with the newest checkpoint first.

    `prices` maps a device's name to its price per hour. With prices, the whole log of each run is read.

    Raises DataError if there is no such folder, or no run.
    """
    root = open_folder(location)
    if root.path_here is not None and not root.path_here.is_dir():
        raise DataError(f"{os.fspath(location)} is not a folder on this disk; expected one that contains runs")
    found = find_run_folders(root)
    if not found:
        raise DataError(f"{root.url}: no runs here, nor up to two levels below; expected run folders or checkpoints")

    def describe(run: FoundRun) -> RunLine:
        """Describe a run, with its cost if there are prices."""
        line = describe_run(run, root)
        if prices:
            line.cost = find_cost(run.folder, prices)
        return line

    lines = read_in_parallel(describe, found)
    return sorted(lines, key=lambda line: (-(line.saved_at or 0), line.run))


def describe_run(run: FoundRun, root: Folder) -> RunLine:
    """Describe a run below `root`. What cannot be read becomes the line's reason."""
    line = RunLine(run=name_below(run.folder, root), url=run.folder.url)
    try:
        if is_run_folder(run.names):
            _read_run_folder(line, run)
        else:
            _read_checkpoints(line, run)
    except (OSError, CheckpointError) as error:
        line.state = "unreadable"
        line.reason = str(getattr(error, "strerror", None) or error)
    return line


def name_below(folder: Folder, root: Folder) -> str:
    """Return the path of a run's folder below `root`, or the folder's own name if it is `root`."""
    path_below = folder.url.removeprefix(root.url).strip("/")
    return path_below or folder.url.rstrip("/").rsplit("/", 1)[-1]


def is_run_folder(names: Sequence[str]) -> bool:
    """Return whether a folder with these names is a run folder, and not a folder of checkpoints."""
    return STATUS in names or METRICS in names


def _read_run_folder(line: RunLine, run: FoundRun) -> None:
    """Fill the line of a run folder, from its status.json, its configuration, the end of its log and its checkpoints.

    Raises OSError and CheckpointError.
    """
    folder = run.folder
    status = read_status_in(folder) or {}
    line.state = status.get("status", "unknown")
    line.batch = status.get("batch")
    line.reason = status.get("reason")
    process = status.get("process") or {}
    line.host = process.get("host")
    if line.host is None and LAUNCHES in run.names:  # the launch has ended
        host = read_last_record(folder, LAUNCHES).get("host")
        line.host = host[:200] if isinstance(host, str) else None
    if status.get("failed_saves"):
        line.reason = _join(line.reason, f"failed saves {status['failed_saves']}: {status.get('save_error')}")

    # The newest record of the log.
    record = read_last_record(folder) if METRICS in run.names else {}
    line.loss = number_of(record.get(LOSS))
    line.tokens_per_second = number_of(record.get(RATE))
    if line.state == RUNNING or line.batch is None:
        line.batch = max(line.batch or 0, record.get("batch", 0))

    config = (read_config(folder) if CONFIG in run.names else None) or {}
    line.max_duration = _text_or_none(config.get("max_duration"))

    # The newest checkpoint. A bucket that the configuration names is not asked, because it may name any server.
    last_saved = status.get("last_saved")
    if isinstance(last_saved, str) and COMMITTED.fullmatch(last_saved):
        line.last_saved = last_saved
        line.saved_at = number_of(status.get("saved_at"))
    second_place = status.get(SAVED_IN)
    if isinstance(second_place, str) and second_place and line.last_saved is not None:
        line.reason = _join(line.reason, f"its newest save is in save_fallback, {second_place[:200]}")
        return
    checkpoint_folder = find_checkpoint_folder(folder, config, allowed_protocols=())
    if checkpoint_folder is not None:
        store = CheckpointStore(checkpoint_folder)
        head = find_newest_head(store, store.commits.names(), line.last_saved)
        line.last_saved = None if head is None else f"ba{head.batch}"
        line.saved_at = None if head is None else parse_time(head.written_at)


def _read_checkpoints(line: RunLine, run: FoundRun) -> None:
    """Fill the line of a folder of checkpoints, from the record of its newest launch and its newest checkpoint.

    Raises OSError and CheckpointError.
    """
    folder = run.folder
    record, early_end = read_newest_launch(folder) if RECORDS in run.names else NewestLaunch()
    checkpoint_names = [name for name in run.names if COMMITTED.fullmatch(name)]
    last_saved = record.last_saved if record else None
    head = find_newest_head(CheckpointStore(folder.url), checkpoint_names, last_saved)
    if head is not None:
        line.last_saved = f"ba{head.batch}"
        line.saved_at = parse_time(head.written_at)
        line.batch = head.batch
        line.state = "saved"

    sighting = None
    if record is not None:
        if line.saved_at is None and line.last_saved == record.last_saved:
            line.saved_at = record.saved_at
        line.batch = max(record.batch, line.batch or 0) if record.status == RUNNING else record.batch
        line.max_duration = record.max_duration
        line.loss = record.loss
        line.tokens_per_second = record.tokens_per_second
        line.host = record.host
        sighting = look_for(folder, record) if record.status == RUNNING else None
        line.state, line.reason = describe_state(record, sighting)
        if record.failed_saves:
            line.reason = _join(line.reason, f"failed saves {record.failed_saves}: {record.save_error}")

    if early_end is not None and has_ended_early(sighting, early_end):
        line.state = early_end.status
        line.host = early_end.host
        line.reason = describe_early_end(early_end)
    line.reason = _join(line.reason, describe_second_place(record, 0 if head is None else head.batch))


def describe_state(record: LaunchRecord, sighting: Sighting | None) -> tuple[str, str | None]:
    """Return the state of the newest launch, and the reason, from its record.

    `sighting` is what is known of a launch that its record calls running; None for any other.
    """
    if sighting is None:
        return record.status, record.reason
    if sighting.is_gone:
        return "failed", f"the process of rank 0, {record.process.get('pid')} on this machine, is gone without a word"
    if sighting.has_released:
        return "ended", "it has released this run; how it ended was not written"
    return RUNNING, _join(record.reason, describe_silence(record, sighting))


def find_newest_head(store: CheckpointStore, names: Sequence[str], last_saved: str | None) -> Head | None:
    """Return the facts about a run's newest checkpoint; None if there is none that can be read.

    names: the names of its checkpoints.
    last_saved: the newest one, as the last launch has recorded it. If it is there and can be read, no other is read.

    Raises OSError and CheckpointError.
    """
    if last_saved is not None and last_saved in names:
        with contextlib.suppress(FileNotFoundError):
            head = read_head(store.root.child(last_saved).read(MANIFEST, HEAD_BYTES))
            has_later_name = any(batch_of(name) > batch_of(last_saved) for name in names)
            if head is not None and not has_later_name:
                return head
    if not names:
        return None
    for candidate in store.candidates():
        if candidate.head is not None:
            return candidate.head
    return None


def find_cost(folder: Folder, prices: dict[str, float]) -> float | None:
    """Return the cost of a run's segments, as `report --price` adds it up; None if it has no log, or no such device."""
    try:
        run = read_recorded(folder.url, allowed_protocols=())
    except (DataError, CheckpointError):
        return None
    costs = [facts["cost"] for facts in segment_facts(run, prices) if facts["cost"] is not None]
    return sum(costs) if costs else None


# ------------------------------------------------------------------------------------------------------- small reads


def read_status_in(folder: Folder) -> dict[str, Any] | None:
    """Read status.json of a run folder, also of a copy behind a URL; None if there is none that a launch writes.

    On this machine, a launch whose process is gone has failed. Raises OSError.
    """
    if folder.path_here is not None:
        return read_status(folder.path_here)
    try:
        content = parse_json(folder.read(STATUS, MAX_NOTE_BYTES))
    except (FileNotFoundError, ValueError):
        return None
    return content if is_sound(content) else None


def read_last_record(folder: Folder, name: str = METRICS) -> dict[str, Any]:
    """Read the last whole record of a run's log, or of LAUNCHES, from the end of the file; empty if there is none.

    Raises OSError.
    """
    source = folder.source(name)
    try:
        num_bytes = min(source.num_bytes, TAIL_BYTES)
        tail = bytearray(num_bytes)
        with contextlib.suppress(EOFError):  # it was cut off just now
            source.read_into(source.num_bytes - num_bytes, [memoryview(tail)] if tail else [])
    finally:
        source.close()
    records = [record for _, record in read_lines(bytes(tail))]
    return records[-1] if records else {}


def parse_time(written_at: str | None) -> float | None:
    """Return the time in a manifest, such as `2026-11-30T09:15:00+00:00`, in seconds since 1970; None if it is none."""
    with contextlib.suppress(ValueError, TypeError, OverflowError, OSError):
        return datetime.fromisoformat(written_at or "").timestamp()
    return None


def _text_or_none(value: Any) -> str | None:
    """Return a value of a configuration as text; None if there is none, or it is a block."""
    return str(value)[:200] if isinstance(value, str | int | float) else None


def _join(first: str | None, second: str | None) -> str | None:
    """Join two reasons, either of which may be missing."""
    return "; ".join(reason for reason in (first, second) if reason) or None


# --------------------------------------------------------------------------------------------------------- the output


def build_table(lines: Sequence[RunLine]) -> Table:
    """Build the table of `runs ls`. The column of costs is left out where no run has one."""
    now = time.time()
    rows = []
    for line in lines:
        age = "" if line.saved_at is None else format_age(now - line.saved_at)
        rows.append(
            (
                line.run,
                line.state,
                format_progress(line),
                line.last_saved or "",
                age,
                "" if line.tokens_per_second is None else f"{line.tokens_per_second:,.0f}",
                "" if line.cost is None else f"{line.cost:,.2f}",
                line.host or "",
                line.reason or "",
            )
        )
    columns = ("run", "state", "batch", "last save", "age", "tokens/s", "cost", "host", "reason")
    table = Table("Runs", columns, rows, right=(2, 4, 5, 6))
    has_cost = any(line.cost is not None for line in lines)
    return table if has_cost else table.without(("cost",))


def format_progress(line: RunLine) -> str:
    """Format how far a run is: `40/800`, or `40` if the run's length is not in batches or not known."""
    if line.batch is None:
        return ""
    with contextlib.suppress(ValueError):
        duration = Duration.parse(line.max_duration or "", TIME_UNITS)
        if duration.unit == "ba":
            return f"{line.batch:,}/{int(duration.value):,}"
    return f"{line.batch:,}"


def build_records(lines: Sequence[RunLine]) -> list[dict[str, Any]]:
    """Return the facts of each line as JSON values, for `runs ls --json`. Credentials are masked, as in the table."""
    records = []
    for line in lines:
        record = asdict(line)
        for key, value in record.items():
            record[key] = mask_credentials(value) if isinstance(value, str) else value
        records.append(record)
    return records
