"""The plan of `data join`: which parts are complete, which shards they make, and which of these are recorded.

The plan follows from the reports of the parts alone, see `prepare/samples.py` in the core. `join.py` writes the shards
into a folder, and `bucket_join.py` into a bucket.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from llmfoundry_engines.reports import PartReport
from llmfoundry_engines.shared_folder import JOINED, SHARDS_FILE, SharedRequest, load_shared
from llmfoundry_engines.status import find_complete
from llmfoundry_lite.bounded import MAX_INDEX_BYTES, parse_json, read_at_most
from llmfoundry_lite.data.tokenizer import Tokenizer, load_tokenizer
from llmfoundry_lite.prepare.prepare import build_summary
from llmfoundry_lite.prepare.samples import SplitPlan, pack_result, plan_splits
from llmfoundry_lite.prepare.shards import ShardFormat
from llmfoundry_lite.prepare.summary import Summary
from llmfoundry_lite.prepare.token_files import token_dtype, tokenizer_identity
from llmfoundry_lite.prepare.token_folder import TokenFolder
from llmfoundry_lite.prepare.token_unit import UnitTable, parse_text_digest


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
    units_folder: TokenFolder
    """The folder of the token files."""

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


def plan_join(partial: Path, units_folder: TokenFolder) -> JoinPlan:
    """Read the reports of all parts, and plan the shards. Raises DataError if a part is not complete."""
    shared = load_shared(partial)
    complete = find_complete(partial, units_folder.names())
    table = UnitTable()
    for report, rows in complete:
        table.append(
            rows,
            np.array(report.skipped, np.int64),
            report.skipped_examples,
            report.lost_text(),
            parse_text_digest(report.text_digest),
        )
    tokenizer = load_tokenizer(partial / "tokenizer")
    shard_format = ShardFormat(shared.request, token_dtype(tokenizer), tokenizer.eos_token_id)
    return JoinPlan(
        partial=partial,
        shared=shared,
        reports=[report for report, _ in complete],
        table=table,
        tokenizer=tokenizer,
        shard_format=shard_format,
        splits=plan_splits(table, units_folder, shared.request, shard_format),
        units_folder=units_folder,
    )


def build_joined_summary(plan: JoinPlan, seconds: float) -> Summary:
    """Build the summary of a preparation in parts. `seconds` is the duration of the join."""
    return build_summary(
        plan.shared.record,
        plan.shared.request,
        plan.tokenizer,
        plan.reports[0].listing(),
        pack_result(plan.splits, plan.table, plan.units_folder),
        plan.table.loss,
        seconds=seconds + sum(report.seconds for report in plan.reports),
        documents=sum(report.new_documents for report in plan.reports),
        text_bytes=sum(report.new_text_bytes for report in plan.reports),
    )


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


def is_of_plan(index: int, record: dict[str, Any], split_plan: SplitPlan, shard_format: ShardFormat) -> bool:
    """Return whether the record of a shard is one that the plan has, and names the shard's file."""
    planned = {"samples": split_plan.samples_of_shard(index)} | shard_format.description
    try:
        files = {"raw_data": record["raw_data"], "zip_data": record["zip_data"]}
        file = file_of(record)
        has_description = type(file["bytes"]) is int and isinstance(file["hashes"], dict)
        return record == planned | files and has_description and file["basename"] == shard_format.file_name(index)
    except (KeyError, TypeError):
        return False


def file_of(record: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a shard's file in its record: the compressed one, if shards are compressed."""
    return record["zip_data"] or record["raw_data"]
