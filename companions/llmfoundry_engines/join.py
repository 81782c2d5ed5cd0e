"""`data join OUT`: make shards of what all parts of a preparation have tokenised, and publish them.

The plan of the shards follows from the reports of the parts alone, see `prepare/samples.py` in the core. So several
machines can write shards at the same time: `join_shards` writes the share of one of them, and leaves a record of each
shard with its size and hash. `join` takes the shards whose files are as recorded, writes the others, and publishes.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llmfoundry_engines.bucket_join import join_in_bucket, join_shards_in_bucket
from llmfoundry_engines.join_plan import JoinPlan, build_joined_summary, file_of, is_of_plan, load_written, plan_join
from llmfoundry_engines.part import Part, choose_items
from llmfoundry_engines.places import BucketPlace, open_place
from llmfoundry_engines.scratch import Scratch
from llmfoundry_engines.shared_folder import JOINED, SHARDS_FILE, only_this_part, remove_leftovers
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.files import sync, write_atomically
from llmfoundry_lite.prepare.out_folder import (
    PARTIAL,
    REQUEST_FILE,
    disk_errors_as_data_errors,
    only_preparation_in,
    publish,
)
from llmfoundry_lite.prepare.prepare import progress_bars
from llmfoundry_lite.prepare.samples import SplitPlan, finish_split, write_shards
from llmfoundry_lite.prepare.shards import ShardFormat, file_description
from llmfoundry_lite.prepare.summary import SPLITS, SUMMARY_FILE, Summary, load_summary
from llmfoundry_lite.prepare.token_files import MAX_LOST_TEXT, check_lost_text
from llmfoundry_lite.prepare.token_folder import TokenFolder


def join(
    out: str | Path,
    *,
    max_lost_text: float = MAX_LOST_TEXT,
    show_progress: bool = False,
    notify: Callable[[str], None] = lambda line: None,
    scratch: Scratch | None = None,
) -> Summary:
    """Write the shards of all parts that are not there yet, and publish the preparation in `out`.

    out: folder of the parts, or its URL in a bucket.
    max_lost_text: fraction of characters that the tokenizer may lose.
    notify: called with a sentence when work is skipped.
    scratch: where files on their way from and into a bucket are, and how many bytes of them.

    Returns the summary, which is also in `out`. Raises DataError, which names them, if parts are not complete.
    """
    with open_place(out, scratch) as place:
        if isinstance(place, BucketPlace):
            return join_in_bucket(place, max_lost_text=max_lost_text, show_progress=show_progress, notify=notify)
        return join_in_folder(place.out, max_lost_text=max_lost_text, show_progress=show_progress, notify=notify)


def join_in_folder(out: Path, *, max_lost_text: float, show_progress: bool, notify: Callable[[str], None]) -> Summary:
    """Join the parts in a folder. The arguments and the result are those of `join`."""
    started = time.monotonic()
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
        plan = plan_join(partial, TokenFolder(partial / "units"))
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
        summary = build_joined_summary(plan, time.monotonic() - started)
        publish(partial, out, summary)
    return summary


def join_shards(
    out: str | Path,
    part: Part,
    *,
    show_progress: bool = False,
    notify: Callable[[str], None] = lambda line: None,
    scratch: Scratch | None = None,
) -> int:
    """Write one share of the shards, which a later `join` takes. Shards that are there already are kept.

    `part` is the share, such as the second of four; it need not be one of the parts that were tokenised. Returns the
    number of shards in it. Raises DataError, which names them, if tokenised parts are not complete.
    """
    with open_place(out, scratch) as place:
        if isinstance(place, BucketPlace):
            return join_shards_in_bucket(place, part, show_progress=show_progress, notify=notify)
        return join_shards_in_folder(place.out, part, show_progress=show_progress, notify=notify)


def join_shards_in_folder(out: Path, part: Part, *, show_progress: bool, notify: Callable[[str], None]) -> int:
    """Write one share of the shards into a folder. The arguments and the result are those of `join_shards`."""
    check_has_parts(out)
    with disk_errors_as_data_errors(out), only_preparation_in(out, is_shared=True):
        if (out / SUMMARY_FILE).is_file():
            notify(f"{out} is complete: its parts were joined before")
            return 0
        plan = plan_join(out / PARTIAL, TokenFolder(out / PARTIAL / "units"))
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


# Shards that are there


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
    if not is_of_plan(index, record, split_plan, shard_format):
        return False
    name = shard_format.file_name(index)
    try:
        return file_of(record) == file_description(name, (folder / name).read_bytes())
    except OSError:
        return False


def remove_other_files(folder: Path, records: list[dict[str, Any]]) -> None:
    """Remove files that are not shards of the plan, such as those of a join by another plan."""
    folder.mkdir(exist_ok=True)
    names = {file_of(record)["basename"] for record in records}
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink()
