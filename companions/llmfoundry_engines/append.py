"""`data append`: add sources to a prepared data set as a new stream.

    OUT/train, OUT/val, OUT/tokenizer, OUT/summary.json     as `data prepare` has published them; never changed
    OUT/streams/NAME                                        a preparation of its own, with OUT's tokenizer and options

What a run has recorded of OUT stays true, because none of its files change. A run reads the new stream beside the old
one as soon as its YAML says so: from the beginning, or from a stage on (docs/data.md).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from llmfoundry_engines.shared_folder import request_of
from llmfoundry_lite.data.tokenizer import load_tokenizer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.prepare.out_folder import (
    STREAMS,
    describe_difference,
    disk_errors_as_data_errors,
    only_preparation_in,
)
from llmfoundry_lite.prepare.prepare import open_input, prepare
from llmfoundry_lite.prepare.request import PrepareRequest
from llmfoundry_lite.prepare.sources import HUB_PREFIX
from llmfoundry_lite.prepare.summary import SUMMARY_FILE, Summary, load_summary
from llmfoundry_lite.prepare.token_files import MAX_LOST_TEXT
from llmfoundry_lite.tables import Table

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Name of a stream, which is a folder and a key of a YAML."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """A stream of a prepared data set."""

    name: str
    folder: Path
    summary: Summary


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceOptions:
    """Options about new sources. None takes those of the data set."""

    text_key: str | tuple[str, ...] | None = None
    split: str | None = None
    encoding: str | None = None
    on_error: str | None = None
    val_fraction: float | None = None
    readers: tuple[str, ...] = ()
    """Readers of the user's own. Those of the data set are not taken, because naming code must not run it."""


def append(
    out: str | Path,
    sources: Sequence[str],
    *,
    name: str | None = None,
    options: SourceOptions | None = None,
    num_workers: int | None = None,
    max_lost_text: float = MAX_LOST_TEXT,
    show_progress: bool = False,
    notify: Callable[[str], None] = lambda line: None,
) -> Stream:
    """Prepare sources as a new stream of the data set in `out`. Resumes the work of a launch that was killed.

    out: folder of a finished preparation.
    name: name of the stream, by default that of the first source.
    options: how to read the sources.

    Returns the new stream, or an earlier one of the same sources and name. Raises DataError if `out` is not a finished
    preparation, if the name is taken, and as `prepare` does. Nothing in `out` changes but the folder of the stream.
    """
    out = Path(out).expanduser()
    name = name or default_name(sources)
    if not NAME.fullmatch(name):
        raise DataError(f"--name {name!r}: expected letters, digits, '.', '_' and '-', at most 64")
    summary = load_summary(out)
    folder = out / STREAMS / name
    request = build_request(out, summary, sources, options or SourceOptions())

    with disk_errors_as_data_errors(out), only_preparation_in(out, is_shared=True):
        opened = open_input(request, folder)
        check_name_is_free(folder, name, opened.record)
        others = [stream for stream in find_streams(out) if stream.name != name]
        warn_of_repeated_sources(opened.record, others, notify)
        new_summary = prepare(
            request,
            folder,
            num_workers=num_workers,
            max_lost_text=max_lost_text,
            show_progress=show_progress,
            notify=notify,
        )
    return Stream(name=name, folder=folder, summary=new_summary)


def default_name(sources: Sequence[str]) -> str:
    """Return the name of a stream by its first source: `news` for `raw/news.jsonl.zst`, `raw/news/` and `raw/news/*`.

    Raises DataError if there is no source, or no name in it.
    """
    if not sources:
        raise DataError("no SOURCE given; expected files, folders or globs to add")
    parts = re.split(r"[/:]", sources[0].removeprefix(HUB_PREFIX))
    for part in reversed(parts):
        stem = part.partition(".")[0]
        name = re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-_")[:64]
        is_pattern = any(character in part for character in "*?[")
        if name and not is_pattern:
            return name
    raise DataError(f"{sources[0]} has no name for the new stream; give --name")


def build_request(out: Path, summary: Summary, sources: Sequence[str], options: SourceOptions) -> PrepareRequest:
    """Build the request for new sources: that of the data set in `out`, with its tokenizer and other sources.

    Raises DataError if the tokenizer in `out` is not the one that its summary describes.
    """
    tokenizer_folder = out / "tokenizer"
    tokenizer = load_tokenizer(tokenizer_folder)
    if tokenizer.fingerprint != summary.tokenizer.fingerprint:
        raise DataError(
            f"{tokenizer_folder} is {tokenizer.fingerprint}, and {out / SUMMARY_FILE} names "
            f"{summary.tokenizer.fingerprint}; restore the tokenizer of the data"
        )
    try:
        request = request_of(summary.request)
    except (TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{out / SUMMARY_FILE} has no request of `data prepare` ({error})") from error

    values: dict[str, Any] = {"sources": tuple(sources), "tokenizer": str(tokenizer_folder)}
    for key in SourceOptions.__slots__:
        value = getattr(options, key)
        if value is not None:
            values[key] = value
    return replace(request, **values)


def check_name_is_free(folder: Path, name: str, record: dict[str, Any]) -> None:
    """Raise DataError if the folder of a stream holds a finished preparation of another request than `record`."""
    if not (folder / SUMMARY_FILE).is_file():
        return
    changed = describe_difference(load_summary(folder).request, record)
    if changed:
        raise DataError(
            f"{folder} is a stream already, of another preparation: {changed}; give another --name than {name}"
        )


def find_streams(out: Path) -> list[Stream]:
    """Return the finished streams of a data set: the one in `out` itself, then those that were appended, by name.

    Raises DataError for a summary that cannot be read.
    """
    streams = [Stream(name=out.resolve().name, folder=out, summary=load_summary(out))]
    for path in sorted((out / STREAMS).glob(f"*/{SUMMARY_FILE}")):
        streams.append(Stream(name=path.parent.name, folder=path.parent, summary=load_summary(path.parent)))
    # The data set's own name, that of its folder, may be one that somebody has given to a stream.
    names = {stream.name for stream in streams[1:]}
    while streams[0].name in names:
        streams[0] = replace(streams[0], name=f"{streams[0].name}-1")
    return streams


def warn_of_repeated_sources(record: dict[str, Any], streams: Sequence[Stream], notify: Callable[[str], None]) -> None:
    """Warn the user of sources that another stream of the data set has too, because they would be trained on twice.

    `record` is the request for the new stream, with the state of its input.
    """
    for stream in streams:
        same_sources = [source for source in record["sources"] if source in stream.summary.request.get("sources", ())]
        if record["input"] == stream.summary.request.get("input"):
            notify(f"warning: stream {stream.name} has the same files; a run would read them twice in an epoch")
        elif same_sources:
            notify(
                f"warning: stream {stream.name} was prepared from {', '.join(same_sources)}, too; what has not changed "
                "there would be read twice in an epoch"
            )


# How to train on it


def print_streams(out: str | Path, new_name: str, console: Console, notify: Callable[[str], None]) -> None:
    """Print the streams of a data set with their shares, and the YAML blocks that read all of them."""
    out = Path(out).expanduser()
    streams = [stream for stream in find_streams(out) if "train" in stream.summary.splits]
    total_tokens = sum(stream.summary.splits["train"].tokens for stream in streams)
    rows = []
    for stream in streams:
        split = stream.summary.splits["train"]
        rows.append(
            [stream.name, f"{split.samples:,}", f"{split.tokens:,}", f"{100 * split.tokens / total_tokens:.1f} %"]
        )
    Table("", ["stream", "samples", "tokens", "share"], rows).print(console)

    notify(f"\nA new run that reads each sample of all {len(streams)} streams once in an epoch:\n")
    notify(to_yaml({"local": None, "streams": blocks_of(streams)}))
    notify(
        f"\nA run of the streams before {new_name} goes on with all from a batch that it has not reached, such as 8000."
    )
    notify("Keep its data set as it is, and add a stage:\n")
    notify(to_yaml({"stages": [{"until": "8000ba"}, {"streams": blocks_of(streams)}]}))


def blocks_of(streams: Sequence[Stream]) -> dict[str, dict[str, str]]:
    """Return the block of each stream for a YAML.

    Without `proportion`, an epoch has each sample once, so that streams have the share of their tokens.
    """
    return {stream.name: {"local": str(stream.folder), "split": "train"} for stream in streams}


def to_yaml(dataset: dict[str, Any]) -> str:
    """Return the YAML of a training data set's block, without a line end."""
    return yaml.safe_dump({"train_loader": {"dataset": dataset}}, sort_keys=False, default_flow_style=None).rstrip()
