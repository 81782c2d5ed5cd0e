"""`data join s3://…`: make shards of what all parts have put into a bucket, and publish them there.

Shards go to their final names, one after the other, and are removed from this machine. Then come the index of each
split, the tokenizer, and `summary.json`, which says that all is complete. The work in progress is removed last.

While shards are uploaded, their records are put into `.partial/joined` every RECORD_SECONDS. A join that was killed, or
a share of another machine, is taken from there: a shard that is recorded by the same plan, and has the recorded size in
the bucket, is not written again and not read. That trusts the bucket to keep an object as it was uploaded. Its hash in
`index.json` is that of the bytes that were uploaded, and is checked when a run reads the shard.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmfoundry_engines.bucket_tokens import TRANSFERS_AT_ONCE
from llmfoundry_engines.join_plan import JoinPlan, build_joined_summary, file_of, is_of_plan, load_written, plan_join
from llmfoundry_engines.part import Part, choose_items
from llmfoundry_engines.places import BucketPlace
from llmfoundry_engines.shared_folder import JOINED, SHARDS_FILE
from llmfoundry_engines.transfers import upload
from llmfoundry_lite.checkpoint.open_folder import check_files
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.files import write_atomically
from llmfoundry_lite.prepare.out_folder import PARTIAL, PUBLISHING, REQUEST_FILE, check_no_other_content
from llmfoundry_lite.prepare.prepare import progress_bars
from llmfoundry_lite.prepare.samples import SplitPlan, finish_split, write_shards
from llmfoundry_lite.prepare.summary import SUMMARY_FILE, Summary, load_summary
from llmfoundry_lite.prepare.token_files import check_lost_text

RECORD_SECONDS = 30.0
"""Time between two puts of the records of shards that are uploaded."""
MAX_SHARD_GROWTH = 1.01
"""Factor by which compression may make a shard larger than the limit of its uncompressed bytes."""


class ShardUploads:
    """Uploads of shards in threads, each of which removes its file from this machine, and the records of them."""

    def __init__(self, place: BucketPlace, plan: JoinPlan, part: Part) -> None:
        """Take the bucket, the plan, and the share of the shards whose records are put."""
        self.place = place
        self.digest = plan.digest()
        self.path = place.out / PARTIAL / JOINED / part.folder_name / SHARDS_FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.records: list[list[Any]] = []
        """Split, number and record of each shard that is in the bucket."""
        self._pending: deque[tuple[list[Any], Future[None]]] = deque()
        self._pool = ThreadPoolExecutor(TRANSFERS_AT_ONCE, thread_name_prefix="upload")
        self._recorded_at = time.monotonic()

    def add(self, split: str, index: int, record: dict[str, Any], reserved_bytes: int) -> None:
        """Begin to upload a shard. `reserved_bytes` of space become those that the file has."""
        path = self.place.out / PARTIAL / split / file_of(record)["basename"]
        num_bytes = path.stat().st_size
        self.place.space.change(num_bytes - reserved_bytes)
        future = self._pool.submit(self._store, path, split, num_bytes)
        self._pending.append(([split, index, record], future))
        self._take_finished()
        if time.monotonic() >= self._recorded_at + RECORD_SECONDS:
            self.put_records()

    def add_present(self, split: str, index: int, record: dict[str, Any]) -> None:
        """Add a shard that is in the bucket already."""
        self.records.append([split, index, record])

    def finish(self) -> None:
        """Wait for all uploads, and put the records. Raises the first error."""
        while self._pending:
            self._take_first()
        self.put_records()

    def put_records(self) -> None:
        """Put the records of the shards that are in the bucket."""
        write_atomically(self.path, json.dumps({"plan": self.digest, "shards": self.records}))
        self.place.store(self.path)
        self._recorded_at = time.monotonic()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _take_finished(self) -> None:
        """Record the uploads at the beginning of the queue that have ended. Raises the error of one that failed."""
        while self._pending and self._pending[0][1].done():
            self._take_first()

    def _take_first(self) -> None:
        """Wait for the first upload in the queue, and record its shard."""
        record, future = self._pending.popleft()
        future.result()
        self.records.append(record)

    def _store(self, path: Path, split: str, num_bytes: int) -> None:
        """Upload a shard, and remove it from this machine. Runs in a thread."""
        try:
            upload(path, self.place.root.child(split))
        except BaseException as error:
            self.place.space.fail(error)
            raise
        path.unlink()
        self.place.space.change(-num_bytes)


def join_in_bucket(
    place: BucketPlace, *, max_lost_text: float, show_progress: bool, notify: Callable[[str], None]
) -> Summary:
    """Write the shards of all parts that are not in the bucket yet, and publish the preparation. See `join`."""
    started = time.monotonic()
    with place.in_use():
        place.pull()
        finished = find_joined(place, notify)
        if finished is not None:
            return finished

        plan = plan_join_in_bucket(place)
        check_lost_text(plan.table.loss, plan.shared.request, max_lost_text)
        claim_output(place)
        num_shards = plan.num_shards
        written = write_missing_shards(place, plan, Part(1, 1), range(num_shards), show_progress)
        for split_plan in plan.splits:
            publish_split(place, plan, split_plan, written[split_plan.split])
        remove_other_splits(place, plan)

        # The tokenizer, and at last the summary.
        for path in sorted((plan.partial / "tokenizer").iterdir()):
            upload(path, place.root.child("tokenizer"))
        summary = build_joined_summary(plan, time.monotonic() - started)
        content = json.dumps(asdict(summary), indent=2) + "\n"
        place.root.put(SUMMARY_FILE, content.encode())
        place.remove_partial()
    return summary


def join_shards_in_bucket(place: BucketPlace, part: Part, *, show_progress: bool, notify: Callable[[str], None]) -> int:
    """Write one share of the shards into the bucket. See `join_shards`."""
    with place.in_use():
        place.pull()
        if find_joined(place, notify) is not None:
            return 0
        plan = plan_join_in_bucket(place)
        claim_output(place)
        share = choose_items(plan.num_shards, part)
        write_missing_shards(place, plan, part, share, show_progress)
    return len(share)


def find_joined(place: BucketPlace, notify: Callable[[str], None]) -> Summary | None:
    """Return the summary of a join that has finished, and remove what it has left; None if there is none."""
    partial = place.out / PARTIAL
    if not (place.out / SUMMARY_FILE).is_file():
        if not (partial / REQUEST_FILE).is_file():
            raise DataError(
                f"{place.url} has no parts to join; prepare them there first, with `data prepare … --part 1/N`"
            )
        return None
    summary = load_summary(place.out)
    notify(f"{place.url} is complete: its parts were joined before")
    place.remove_partial()
    return summary


def plan_join_in_bucket(place: BucketPlace) -> JoinPlan:
    """Plan the shards. Raises DataError if a part is not complete, or if scratch space is too small."""
    plan = plan_join(place.out / PARTIAL, place.tokens)
    limit_scratch(place, plan)
    return plan


def limit_scratch(place: BucketPlace, plan: JoinPlan) -> None:
    """Leave space for one shard besides token files. Raises DataError if the limit is below what is needed."""
    place.tokens.room_bytes = shard_bytes(plan)
    place.space.require(
        shard_bytes(plan) + place.tokens.largest_bytes, "a shard (--size-limit) and the largest token file"
    )


def shard_bytes(plan: JoinPlan) -> int:
    """Return the space that a shard may take."""
    return int(plan.shared.request.size_limit_bytes * MAX_SHARD_GROWTH)


def claim_output(place: BucketPlace) -> None:
    """Put the mark which says that data folders in the bucket are of this command, unless it is there.

    Raises DataError if there are such folders without the mark.
    """
    mark = place.out / PARTIAL / PUBLISHING
    if not mark.exists():
        check_no_other_content(place.out)
        mark.touch()
        place.partial.put(PUBLISHING, b"")


def write_missing_shards(
    place: BucketPlace, plan: JoinPlan, part: Part, share: range, show_progress: bool
) -> dict[str, list[dict[str, Any]]]:
    """Write some of the shards into the bucket, except those that are there by the same plan.

    part: the name under which the records of these shards are put.
    share: the shards, counted over all splits.

    Returns split -> the records of its shards, in order.
    """
    records: dict[str, list[dict[str, Any]]] = {}
    written = load_written(plan)
    uploads = ShardUploads(place, plan, part)
    try:
        with progress_bars(show_progress) as bars:
            task = bars.add_task("writing shards", total=len(share))
            num_before = 0  # shards of earlier splits
            for split_plan in plan.splits:
                start = max(share.start - num_before, 0)
                stop = min(share.stop - num_before, split_plan.num_shards)
                records[split_plan.split] = []
                for record in upload_shards(place, plan, split_plan, written, uploads, range(start, stop)):
                    records[split_plan.split].append(record)
                    bars.advance(task)
                num_before += split_plan.num_shards
        uploads.finish()
    finally:
        uploads.close()
    return records


def upload_shards(
    place: BucketPlace,
    plan: JoinPlan,
    split_plan: SplitPlan,
    written: dict[tuple[str, int], dict[str, Any]],
    uploads: ShardUploads,
    shards: range,
) -> Iterator[dict[str, Any]]:
    """Yield the records of consecutive shards of a split, in order. Those that are not in the bucket are written.

    written: the recorded shards of all splits, by split and number.
    """
    split = split_plan.split
    folder = plan.partial / split
    sizes = place.root.child(split).sizes()

    def is_present(index: int) -> bool:
        """Return whether a shard is recorded by this plan, and has the recorded size in the bucket."""
        record = written.get((split, index))
        if record is None or not is_of_plan(index, record, split_plan, plan.shard_format):
            return False
        file = file_of(record)
        return sizes.get(file["basename"]) == file["bytes"]

    index = shards.start
    while index < shards.stop:
        if is_present(index):
            record = written[split, index]
            uploads.add_present(split, index, record)
            yield record
            index += 1
            continue

        # Write all shards up to the next one that is there, in one pass over the token files.
        end = index + 1
        while end < shards.stop and not is_present(end):
            end += 1
        writing = write_shards(split_plan, range(index, end), plan.units_folder, folder, plan.shard_format)
        for number in range(index, end):
            place.space.reserve(shard_bytes(plan))
            record = next(writing)
            uploads.add(split, number, record, shard_bytes(plan))
            yield record
        next(writing, None)  # ends the generator, so that it releases its token files
        index = end


def publish_split(place: BucketPlace, plan: JoinPlan, split_plan: SplitPlan, records: list[dict[str, Any]]) -> None:
    """Upload what a split has beside its shards, the index last, and remove what does not belong to it.

    Raises DamagedCheckpointError or IncompleteCheckpointError if a shard is not in the bucket with its size.
    """
    # Write the files on this machine, where the folder has no shards any more.
    folder = plan.partial / split_plan.split
    folder.mkdir(exist_ok=True)
    finish_split(split_plan, records, plan.units_folder, folder, plan.tokenizer)
    paths = sorted(folder.iterdir(), key=lambda path: path.name == "index.json")

    # Remove other files, and upload these, once all shards are there.
    target = place.root.child(split_plan.split)
    sizes = {file_of(record)["basename"]: file_of(record)["bytes"] for record in records}
    check_files(target, sizes)
    names = {*sizes, *(path.name for path in paths)}
    for name in target.sizes():
        if name not in names:
            target.remove(name)
    for path in paths:
        upload(path, target)


def remove_other_splits(place: BucketPlace, plan: JoinPlan) -> None:
    """Remove the folder of a split that the plan does not have, from a join by another plan."""
    splits = {split_plan.split for split_plan in plan.splits}
    if "val" not in splits:
        place.root.child("val").remove_all()
