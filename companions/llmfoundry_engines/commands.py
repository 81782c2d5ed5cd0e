"""Functions that the core's `data` commands call: `prepare --part`, `--engine` and `--status`, others."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from llmfoundry_engines.append import SourceOptions, append, print_streams
from llmfoundry_engines.index_shards import index_folders
from llmfoundry_engines.join import join, join_shards
from llmfoundry_engines.part import parse_part
from llmfoundry_engines.prepare_bucket import prepare_in_bucket
from llmfoundry_engines.prepare_part import prepare_part
from llmfoundry_engines.ray_engine import prepare_with_ray
from llmfoundry_engines.scratch import parse_scratch
from llmfoundry_engines.status import describe_join, print_status
from llmfoundry_lite.errors import ConfigError, DataError, mask_urls
from llmfoundry_lite.files import check_is_path
from llmfoundry_lite.prepare.request import PrepareRequest, WorkOptions
from llmfoundry_lite.prepare.summary import print_summary
from llmfoundry_lite.ranks.lean_imports import import_lean
from llmfoundry_lite.tables import console


def run_part(request: PrepareRequest, out: str, part_text: str, work: WorkOptions) -> None:
    """Tokenise one part, and print what it has. `part_text` is the value of `--part`."""
    part = parse_part(part_text)
    refuse_overwrite(work.overwrite, f"--part {part}", out)
    report = prepare_part(
        request,
        out,
        part,
        num_workers=work.num_workers,
        max_lost_text=work.max_lost_text,
        show_progress=True,
        notify=work.notify,
        scratch=parse_scratch(work.scratch_folder, work.scratch_limit),
    )
    if report is not None:
        tokens = report.train_tokens + report.val_tokens
        work.notify(
            f"part {report.part}: {report.documents:,} documents, {tokens:,} tokens, "
            f"{report.num_bytes / 1e6:,.1f} MB; when all parts are complete: {describe_join(out)}"
        )


def run_engine(request: PrepareRequest, out: str, engine: str, part_text: str | None, work: WorkOptions) -> None:
    """Prepare a corpus by an engine, and print the summary. The only engine is Ray."""
    for option, value in (("--part", part_text), ("--num-workers", work.num_workers)):
        if value is not None:
            raise ConfigError(f"--engine {engine} with {option}: Ray divides the work; leave {option} out")
    refuse_overwrite(work.overwrite, f"--engine {engine}", out)
    summary = prepare_with_ray(
        request,
        out,
        max_lost_text=work.max_lost_text,
        show_progress=True,
        notify=work.notify,
        scratch=parse_scratch(work.scratch_folder, work.scratch_limit),
    )
    print_summary(summary, out)


def run_bucket(request: PrepareRequest, out: str, work: WorkOptions) -> None:
    """Prepare a corpus into a bucket on this machine, and print the summary."""
    summary = prepare_in_bucket(
        request,
        out,
        num_workers=work.num_workers,
        max_lost_text=work.max_lost_text,
        overwrite=work.overwrite,
        show_progress=True,
        notify=work.notify,
        scratch=parse_scratch(work.scratch_folder, work.scratch_limit),
    )
    print_summary(summary, out)


def refuse_overwrite(overwrite: bool, option: str, out: str) -> None:
    """Raise ConfigError for `--overwrite` beside an option by which other processes may work in the same folder."""
    if overwrite:
        raise ConfigError(
            f"--overwrite with {option}: it would discard the work of other parts; remove {out} before the first"
        )


def run_join(
    out: str,
    part_text: str | None,
    *,
    max_lost_text: float,
    notify: Callable[[str], None],
    scratch_folder: str | None,
    scratch_limit: str | None,
) -> None:
    """Join all parts, or write one share of the shards, and print the result."""
    scratch = parse_scratch(scratch_folder, scratch_limit)
    if part_text is not None:
        part = parse_part(part_text)
        num_shards = join_shards(out, part, show_progress=True, notify=notify, scratch=scratch)
        notify(f"part {part} of the shards: {num_shards:,} are there; at the end: {describe_join(out)}")
        return
    summary = join(out, max_lost_text=max_lost_text, show_progress=True, notify=notify, scratch=scratch)
    print_summary(summary, out)


def run_status(out: str) -> None:
    """Print what the parts of a preparation have done."""
    print_status(out, console())


def run_append(
    out: str,
    sources: Sequence[str],
    name: str | None,
    options: dict[str, Any],
    *,
    num_workers: int | None,
    max_lost_text: float,
    notify: Callable[[str], None],
) -> None:
    """Add a stream to a prepared data set, and print it and the blocks that train on all streams.

    `options` are the fields of `SourceOptions`.
    """
    if "://" in out:
        raise ConfigError(
            f"data append {mask_urls(out)}: adds to a folder of this machine, and a bucket was given; copy its "
            "summary.json and tokenizer into a folder, append there, and copy the folder `streams` back"
        )
    check_is_path(out)
    stream = append(
        out,
        sources,
        name=name,
        options=SourceOptions(**options),
        num_workers=num_workers,
        max_lost_text=max_lost_text,
        show_progress=True,
        notify=notify,
    )
    print_summary(stream.summary, stream.folder)
    print_streams(out, stream.name, console(), notify)


def run_list(url: str, *, prints_json: bool) -> None:
    """Print the data sets in a folder or bucket as a table, or as JSON."""
    import_lean("streaming")
    from llmfoundry_engines.inventory import as_json, find_data, table_of  # imports mosaicml-streaming

    data = find_data(url)
    if prints_json:
        print(json.dumps(as_json(data, url), indent=2))
        return
    if not data:
        raise DataError(f"{url} has no MDS shards, and no unfinished preparation; give a folder with data in it")
    table_of(data, url).print(console())


def run_index(folder: str, *, notify: Callable[[str], None]) -> None:
    """Write the indexes that folders of shards lack, and print what they hold."""
    written = index_folders(folder, notify)
    if not written:
        notify(f"{folder}: all of its shards have an index.json, nothing is written")
