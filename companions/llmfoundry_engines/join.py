"""`data join OUT`: make shards of what all parts of a preparation have tokenised, and publish them.

The plan of the shards follows from the reports of the parts alone, see `prepare/samples.py` in the core. So several
machines can write shards at the same time: `join_shards` writes the share of one of them, and leaves a record of each
shard with its size and hash. `join` takes the shards whose files are as recorded, writes the others, and publishes.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from llmfoundry_engines.part import Part, choose_items
from llmfoundry_engines.reports import PartReport
from llmfoundry_engines.shared_folder import JOINED, SharedRequest, load_shared, only_this_part, remove_leftovers
from llmfoundry_engines.status import find_complete
from llmfoundry_lite.bounded import MAX_INDEX_BYTES, parse_json, read_at_most
from llmfoundry_lite.data.tokenizer import Tokenizer, load_tokenizer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.files import sync, write_atomically
from llmfoundry_lite.prepare.out_folder import (
    PARTIAL,
    REQUEST_FILE,
    disk_errors_as_data_errors,
    only_preparation_in,
    publish,
)
from llmfoundry_lite.prepare.prepare import build_summary, progress_bars
from llmfoundry_lite.prepare.samples import SplitPlan, finish_split, pack_result, plan_splits, write_shards
from llmfoundry_lite.prepare.shards import ShardFormat, file_description
from llmfoundry_lite.prepare.summary import SPLITS, SUMMARY_FILE, Summary, load_summary
from llmfoundry_lite.prepare.token_files import MAX_LOST_TEXT, check_lost_text, token_dtype, tokenizer_identity
from llmfoundry_lite.prepare.token_unit import UnitTable

SHARDS_FILE = "shards.json"
"""File in the folder of a part of `data join` with the records of the shards that it has written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinPlan:
    """The complete parts of a preparation, and the plan of their shards."""

    partial: Path
    shared: SharedRequest
    reports: list[PartReport]
    table: UnitTable
    tokenizer: Tokenizer
    shard_format: ShardFormat
    splits: list[SplitPlan]

    @property
    def units_folder(self) -> Path:
        """The folder of the token files."""
        return self.partial / "units"

    @property
    def num_shards(self) -> int:
        """Number of shards of all splits."""
        return sum(plan.num_shards for plan in self.splits)

    def digest(self) -> str:
        """Return a hash of the plan, which says that shards were written by the same one.

        It contains the tokenizer, and whether the fast encoder was used, because other tokens may have the same counts.
        """
        is_fast = [report.is_fast for report in self.reports]
        digest = xxhash.xxh3_128(f"{tokenizer_identity(self.tokenizer)} {is_fast}".encode())
        for plan in self.splits:
            digest.update(f"{plan.split} {plan.threshold} {plan.sample_tokens} {plan.samples_per_shard}".encode())
            digest.update(np.ascontiguousarray(plan.units).tobytes())
            digest.update(np.ascontiguousarray(plan.ends).tobytes())
            if plan.windows is not None:
                digest.update(plan.windows.samples.tobytes())
        return digest.hexdigest()


def join(
    out: str | Path,
    *,
    max_lost_text: float = MAX_LOST_TEXT,
    show_progress: bool = False,
    notify: Callable[[str], None] = lambda line: None,
) -> Summary:
    """Write the shards of all parts that are not there yet, and publish the preparation in `out`.

    max_lost_text: fraction of characters that the tokenizer may lose.
    notify: called with a sentence when work is skipped.

    Returns the summary, which is also in `out`. Raises DataError, which names them, if parts are not complete.
    """
    started = time.monotonic()
    out = Path(out).expanduser()
    check_has_parts(out)
    with disk_errors_as_data_errors(out), only_preparation_in(out):
        # Return if a join has finished before, and remove what it has left.
        partial = out / PARTIAL
        remove_leftovers(out)
        if (out / SUMMARY_FILE).is_file():
            summary = load_summary(out)
            notify(f"{out} is complete: its parts were joined before")
            if (partial / REQUEST_FILE).is_file():
                shutil.rmtree(partial, ignore_errors=True)
            return summary

        # Write the shards that are missing, and publish.
        plan = plan_join(partial)
        check_lost_text(plan.table.loss, plan.shared.request, max_lost_text)
        written = load_written(plan)
        with progress_bars(show_progress) as bars:
            task = bars.add_task("writing shards", total=plan.num_shards)
            for split in SPLITS:
                if split not in [split_plan.split for split_plan in plan.splits]:
                    shutil.rmtree(partial / split, ignore_errors=True)
            for split_plan in plan.splits:
                records = []
                for record in complete_shards(plan, split_plan, written):
                    records.append(record)
                    bars.advance(task)
                remove_other_files(partial / split_plan.split, records)
                finish_split(split_plan, records, plan.units_folder, partial / split_plan.split, plan.tokenizer)
        summary = build_summary(
            plan.shared.record,
            plan.shared.request,
            plan.tokenizer,
            plan.reports[0].listing(),
            pack_result(plan.splits, plan.table, plan.units_folder),
            plan.table.loss,
            seconds=time.monotonic() - started + sum(report.seconds for report in plan.reports),
            documents=sum(report.new_documents for report in plan.reports),
            text_bytes=sum(report.new_text_bytes for report in plan.reports),
        )
        publish(partial, out, summary)
    return summary


def join_shards(
    out: str | Path, part: Part, *, show_progress: bool = False, notify: Callable[[str], None] = lambda line: None
) -> int:
    """Write one share of the shards, which a later `join` takes. Shards that are there already are kept.

    `part` is the share, such as the second of four; it need not be one of the parts that were tokenised. Returns the
    number of shards in it. Raises DataError, which names them, if tokenised parts are not complete.
    """
    out = Path(out).expanduser()
    check_has_parts(out)
    with disk_errors_as_data_errors(out), only_preparation_in(out, is_shared=True):
        if (out / SUMMARY_FILE).is_file():
            notify(f"{out} is complete: its parts were joined before")
            return 0
        plan = plan_join(out / PARTIAL)
        share = choose_items(plan.num_shards, part)
        folder = plan.partial / JOINED / part.folder_name
        with only_this_part(folder, part), progress_bars(show_progress) as bars:
            task = bars.add_task("writing shards", total=len(share))
            written = load_written(plan)
            records = []
            num_before = 0  # shards of earlier splits
            for split_plan in plan.splits:
                start = max(share.start - num_before, 0)
                stop = min(share.stop - num_before, split_plan.num_shards)
                for index, record in enumerate(complete_shards(plan, split_plan, written, range(start, stop)), start):
                    sync(plan.partial / split_plan.split / file_of(record)["basename"])
                    records.append([split_plan.split, index, record])
                    bars.advance(task)
                num_before += split_plan.num_shards
            write_atomically(folder / SHARDS_FILE, json.dumps({"plan": plan.digest(), "shards": records}))
    return len(records)


def check_has_parts(out: Path) -> None:
    """Raise DataError unless there is a folder with work in progress, or with a finished preparation."""
    if not (out / PARTIAL).is_dir() and not (out / SUMMARY_FILE).is_file():
        raise DataError(f"{out} has no parts to join; prepare them there first, with `data prepare … --part 1/N`")


def plan_join(partial: Path) -> JoinPlan:
    """Read the reports of all parts, and plan the shards. Raises DataError if a part is not complete."""
    shared = load_shared(partial)
    complete = find_complete(partial)
    table = UnitTable()
    for report, rows in complete:
        table.append(rows, np.array(report.skipped, np.int64), report.skipped_examples, report.lost_text())
    tokenizer = load_tokenizer(partial / "tokenizer")
    shard_format = ShardFormat(shared.request, token_dtype(tokenizer), tokenizer.eos_token_id)
    return JoinPlan(
        partial=partial,
        shared=shared,
        reports=[report for report, _ in complete],
        table=table,
        tokenizer=tokenizer,
        shard_format=shard_format,
        splits=plan_splits(table, partial / "units", shared.request, shard_format),
    )


# Shards that are there


def load_written(plan: JoinPlan) -> dict[tuple[str, int], dict[str, Any]]:
    """Load the records of the shards that `join_shards` has written by the same plan, by split and number."""
    digest = plan.digest()
    written: dict[tuple[str, int], dict[str, Any]] = {}
    folder = plan.partial / JOINED
    for path in folder.iterdir() if folder.is_dir() else ():
        try:
            content = parse_json(read_at_most(path / SHARDS_FILE, MAX_INDEX_BYTES, "a list of shards"))
            if content["plan"] == digest:
                written |= {(split, index): record for split, index, record in content["shards"]}
        except (OSError, ValueError, TypeError, KeyError):
            continue  # that part is not complete, or its file is damaged
    return written


def complete_shards(
    plan: JoinPlan,
    split_plan: SplitPlan,
    written: dict[tuple[str, int], dict[str, Any]],
    shards: range | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the records of consecutive shards of a split, in order. Shards that are not as recorded are written.

    `shards` None is all shards of the split.
    """
    folder = plan.partial / split_plan.split
    index = 0 if shards is None else shards.start
    stop = split_plan.num_shards if shards is None else shards.stop
    while index < stop:
        record = written.get((split_plan.split, index))
        if record is not None and is_intact(folder, index, record, split_plan, plan.shard_format):
            yield record
            index += 1
            continue

        # Write all shards up to the next one that is recorded, in one pass over the token files.
        end = index + 1
        while end < stop and (split_plan.split, end) not in written:
            end += 1
        yield from write_shards(split_plan, range(index, end), plan.units_folder, folder, plan.shard_format)
        index = end


def is_intact(
    folder: Path, index: int, record: dict[str, Any], split_plan: SplitPlan, shard_format: ShardFormat
) -> bool:
    """Return whether the record of a shard is of the plan, and its file has the size and hash of the record."""
    planned = {"samples": split_plan.samples_of_shard(index)} | shard_format.description
    try:
        files = {"raw_data": record["raw_data"], "zip_data": record["zip_data"]}
        if record != planned | files:
            return False
        name = shard_format.file_name(index)
        return file_of(record) == file_description(name, (folder / name).read_bytes())
    except (OSError, KeyError, TypeError):
        return False


def file_of(record: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a shard's file in its record: the compressed one, if shards are compressed."""
    return record["zip_data"] or record["raw_data"]


def remove_other_files(folder: Path, records: list[dict[str, Any]]) -> None:
    """Remove files that are not shards of the plan, such as those of a join by another plan."""
    folder.mkdir(exist_ok=True)
    names = {file_of(record)["basename"] for record in records}
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink()
