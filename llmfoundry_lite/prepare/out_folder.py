"""The output folder of `data prepare`: its lock, checks of earlier content, work in progress, and publication.

If `summary.json` exists, everything else is complete. Work in progress is in `.partial`. `prepare` holds the lock
(`only_preparation_in`), looks for a finished preparation (`find_finished`), opens the work in progress (`open_partial`)
and finally publishes it (`publish`). A launch may be killed at any moment. From `.partial/request.json`, the mark
`.partial/publishing` and `summary.json`, the next launch knows how far it came.
"""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from llmfoundry_lite.data.tokenizer import Tokenizer
from llmfoundry_lite.errors import DataError, mask_urls
from llmfoundry_lite.files import lock_folder, sync_folder, write_atomically
from llmfoundry_lite.prepare.listing import count_files, read_json_object, split_glob
from llmfoundry_lite.prepare.request import PrepareRequest
from llmfoundry_lite.prepare.sources import HUB_PREFIX, Source
from llmfoundry_lite.prepare.summary import FORMAT_VERSION, SPLITS, SUMMARY_FILE, Summary, load_summary

PARTIAL = ".partial"
STREAMS = "streams"
"""Folder for what was added to the data set later: a preparation for each stream, with the same tokenizer."""
PARTIAL_VERSION = 6
"""Version of the files in `.partial`. It is raised when units or token files change. Results do not contain it."""
PUBLISHED_FILES = (
    SUMMARY_FILE,
    *(f"{split}/{name}" for split in SPLITS for name in ("index.json", "shard.00000.mds", "shard.00000.mds.zstd")),
    *(f"tokenizer/{name}" for name in ("tokenizer.json", "tokenizer_config.json", "merges.txt", "vocab.json")),
)
"""Some of the files that a preparation writes, to find out whether a glob matches them."""
DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk."""
UNUSABLE_PATH_ERRORS = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EEXIST,
    # Removed or unmounted in the meantime:
    errno.ENOENT,
    errno.ESTALE,
    errno.EIO,
)
"""Error numbers of an input or output path that are reported in one sentence, instead of a traceback."""
REQUEST_FILE = "request.json"
"""File in `.partial` with the request that the work in progress belongs to."""
PUBLISHING = "publishing"
"""File in `.partial` which says that the content of the output folder was written by this command, so that it may be
replaced or removed."""
OVERWRITE = "pass --overwrite"
OVERWRITE_AGAIN = "run the same command again with --overwrite"
"""Advice in errors of a command that has the option."""


def build_request_record(
    request: PrepareRequest, source: Source, existing_tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Return the request as JSON-compatible data, with the current state of its input and tokenizer.

    Two launches with equal records make the same data. The record is stored, and compared by the next launch.
    Credentials in the URLs of sources are masked.
    `existing_tokenizer` is the tokenizer of the request; None if it is to be trained.
    """
    record = asdict(request)
    record["sources"] = [mask_urls(source) for source in request.sources]
    record["input"] = source.describe_state()
    record["tokenizer_fingerprint"] = existing_tokenizer.fingerprint if existing_tokenizer else None
    record["format_version"] = FORMAT_VERSION
    return json.loads(json.dumps(record))  # tuples become lists, as in a stored record


def describe_difference(stored: dict[str, Any], current: dict[str, Any]) -> str | None:
    """Describe the first difference between a stored and the current record of a request; None if there is none.

    An example is "max_seq_len was 1024 and is 2048 now". Only the keys of `current` are compared. "layout" is the
    version of the work in progress, PARTIAL_VERSION. A record that was stored before a field of the request existed has
    its default.
    """
    defaults: dict[str, Any] = {}
    for field in fields(PrepareRequest):
        defaults[field.name] = [*field.default] if isinstance(field.default, tuple) else field.default  # as JSON has it
    for key, value in current.items():
        stored_value = stored.get(key, defaults.get(key))
        if stored_value == value:
            continue
        if key == "input":
            return f"the input has changed ({_describe_input(stored_value)} then, {_describe_input(value)} now)"
        if key == "layout":
            return "it was begun by another release, which keeps unfinished work in another way"
        return f"{key} was {stored_value!r} and is {value!r} now"
    return None


def _describe_input(state: Any) -> str:
    """Format the recorded state of an input: "files 3, bytes 4096, digest 0f3a"."""
    if not isinstance(state, dict):
        return "unknown"
    return ", ".join(f"{name} {value}" for name, value in state.items())


def check_unchanged(source: Source, record: dict[str, Any], remedy: str = OVERWRITE_AGAIN) -> None:
    """Raise DataError if the input has changed since `record` was built, so that the result may be a mixture.

    `remedy` is the end of the message: what to do when the input is complete.
    """
    changed = describe_difference({"input": record["input"]}, {"input": source.describe_state()})
    if changed:
        raise DataError(
            f"{changed}: it was written to while it was read, so nothing is published; when it is complete, {remedy}"
        )


def find_finished(
    out: Path, record: dict[str, Any], existing_tokenizer: Tokenizer | None, remedy: str = OVERWRITE
) -> Summary | None:
    """Return the summary of a finished preparation in `out`; None if there is none.

    record: the current request, as `build_request_record` returns it.
    existing_tokenizer: its tokenizer; None if it is to be trained.
    remedy: what to do about another preparation there, for the message.

    Removes work in progress beside a finished preparation. Raises DataError if that is the preparation of another
    request.
    """
    if not (out / SUMMARY_FILE).is_file():
        return None

    # Compare the requests. The end-of-text token is not in the record, but in the summary of the tokenizer.
    summary = load_summary(out)
    changed = describe_difference(summary.request, record)
    if existing_tokenizer and not changed:
        stored_token = {"eos_token": summary.tokenizer.eos_token}
        changed = describe_difference(stored_token, {"eos_token": existing_tokenizer.eos_token})
    if changed:
        raise DataError(f"{out} holds another preparation: {changed}; choose another --out, or {remedy}")
    shutil.rmtree(out / PARTIAL, ignore_errors=True)  # a launch was killed after writing the summary
    return summary


def open_partial(
    out: Path, record: dict[str, Any], existing_tokenizer: Tokenizer | None, notify: Callable[[str], None]
) -> Path:
    """Open the folder of work in progress: that of an earlier launch with the same request, or a new one.

    record: the current request, as `build_request_record` returns it.
    existing_tokenizer: its tokenizer; None if it is to be trained.
    notify: called with a sentence if earlier work is resumed or discarded.

    Returns the path of the folder, `.partial`, which has a request file, and the folder `units` of token files. Raises
    DataError if it contains finished units of another request, and if `out` contains files that this command has not
    written.
    """
    # Resume the work of an earlier launch, if it is of the same request.
    partial = out / PARTIAL
    request_file = partial / REQUEST_FILE
    record = record_of_partial(record, existing_tokenizer)
    content = json.dumps(record, indent=2)
    if request_file.is_file() and _can_resume(partial, record, notify):
        write_atomically(request_file, content)
        return partial

    # Nothing can be resumed, so the work starts from the beginning. Remove only what this command has written.
    has_request = request_file.is_file()
    if (partial / PUBLISHING).is_file() and not has_request:
        discard_preparation(out)  # a launch with --overwrite was killed while it was doing this
    check_no_other_content(out)
    if partial.exists():
        if not has_request and count_files(partial):
            raise DataError(f"{partial} is not of this command: it has no {REQUEST_FILE}; choose another --out")
        shutil.rmtree(partial)
    (partial / "units").mkdir(parents=True)
    write_atomically(request_file, content)
    return partial


def record_of_partial(record: dict[str, Any], existing_tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return the record of a request as the request file of the work in progress has it.

    It also has the version of the files there, and the end-of-text token of the request's tokenizer.
    """
    eos_token = existing_tokenizer.eos_token if existing_tokenizer else None
    return record | {"layout": PARTIAL_VERSION, "eos_token": eos_token}


def _can_resume(partial: Path, record: dict[str, Any], notify: Callable[[str], None]) -> bool:
    """Return whether the work in `partial` belongs to the current request `record`, so that it can be resumed.

    Returns False if it belongs to another request, and no unit is finished, so that the caller may discard it. Raises
    DataError if units of another request are finished, or if the stored request cannot be read. `notify` is called with
    a sentence that says whether the work is resumed or discarded.
    """
    stored = read_json_object(partial / REQUEST_FILE)
    if not stored:
        raise DataError(
            f"{partial / REQUEST_FILE} cannot be read, so it is unknown what was begun there; choose another --out, or "
            "pass --overwrite to discard it"
        )
    # Units that were made with "stop" are valid for "skip" too, because no document in them was unreadable.
    if stored.get("on_error") == "stop" and record["on_error"] == "skip":
        stored["on_error"] = "skip"

    num_finished = len(list((partial / "units").glob("*.npz")))
    changed = describe_difference(stored, record)
    if not changed:
        notify(f"carrying on in {partial}: {num_finished} pieces of the input are tokenised already")
        return True
    if num_finished:
        raise DataError(
            f"{partial} holds an unfinished preparation of something else: {changed}; "
            "choose another --out, or pass --overwrite to discard it"
        )
    notify(f"beginning anew in {partial}: {changed}, and no piece of the input was tokenised yet")
    return False


def check_no_other_content(out: Path) -> None:
    """Raise DataError if the output folder already has one of the folders that a preparation publishes."""
    present = [name for name in (*SPLITS, "tokenizer") if os.path.lexists(out / name)]
    if present:
        raise DataError(
            f"{out} already contains {', '.join(present)}, not written by this command; choose another --out"
        )


def check_outside_sources(out: Path, sources: Sequence[str]) -> None:
    """Raise DataError if a source reads files of `--out`, because the next launch would read the output as input.

    That is so if `--out` lies in a source folder, or if a glob matches it, a folder around it, or files in it.
    """
    for source in sources:
        path = Path(source.removeprefix(HUB_PREFIX)).expanduser()
        is_read = path.is_dir() and out.resolve().is_relative_to(path.resolve())
        if is_read or _is_matched_by_glob(out, path):
            raise DataError(
                f"--out {out} lies in the source {source}, which is read again by every launch; choose another --out"
            )


def _is_matched_by_glob(out: Path, source: Path) -> bool:
    """Return whether a source, if it is a glob, reads files that a preparation writes into `out`."""
    if os.path.lexists(source):
        return False  # taken literally
    folder, pattern = split_glob(source)
    if not out.resolve().is_relative_to(folder.resolve()):
        return False
    names = out.resolve().relative_to(folder.resolve()).parts

    # A folder that is matched is read like one that is named, except by `**`.
    if "**" not in pattern:
        folders = [names[:depth] for depth in range(1, len(names) + 1)]
        if any(_is_matched(each, pattern) for each in folders):
            return True
    return any(_is_matched((*names, *file.split("/")), pattern) for file in PUBLISHED_FILES)


def _is_matched(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether the names of a path match the parts of a glob, of which `**` stands for any number of folders.

    As in `glob.glob`, names that begin with a dot are matched only by a part that does so too.
    """
    if not pattern:
        return not names
    if pattern[0] == "**" and _is_matched(names, pattern[1:]):  # it stands for no folder
        return True
    if not names:
        return False

    is_hidden = names[0].startswith(".") and not pattern[0].startswith(".")
    if is_hidden:
        return False
    if pattern[0] == "**":
        return _is_matched(names[1:], pattern)
    return fnmatchcase(names[0], pattern[0]) and _is_matched(names[1:], pattern[1:])


def publish(partial: Path, out: Path, summary: Summary) -> None:
    """Move the finished data from `.partial` into the output folder, and then write the summary.

    The summary marks the preparation as complete, so it comes last. If this process is killed at any point, the next
    launch can publish again: the token files and the tokenizer stay in `.partial` until the summary is written, so that
    it can write the shards again. The mark says that folders in `out` are of this command, and may be replaced.
    """
    # Raise before anything is replaced if another launch publishes at the same time, where locks do nothing.
    for split in summary.splits:
        if not (partial / split).is_dir():
            raise DataError(f"{partial / split} is gone: another process publishes {out}; wait for it")

    # Copy the tokenizer, so that it stays in `.partial`.
    copy = partial / "tokenizer.copy"
    copy.mkdir(exist_ok=True)
    for path in (partial / "tokenizer").iterdir():  # `copytree` would hide the error of a full disk
        shutil.copy(path, copy)
    sync_folder(copy)

    # Set the mark, unless an earlier launch has. Before that, `out` must not have other content.
    mark = partial / PUBLISHING
    if not mark.exists():
        check_no_other_content(out)
        write_atomically(mark, b"")

    # Move the folders, then declare the preparation complete.
    for source, target in (("train", "train"), ("val", "val"), ("tokenizer.copy", "tokenizer")):
        shutil.rmtree(out / target, ignore_errors=True)  # from a launch that was killed here
        if (partial / source).is_dir():
            (partial / source).rename(out / target)
    write_atomically(out / SUMMARY_FILE, json.dumps(asdict(summary), indent=2) + "\n")
    shutil.rmtree(partial)


def discard_preparation(out: Path) -> None:
    """Remove an earlier preparation from the output folder, whether it is finished or not.

    Only files that this command has written are removed: those beside its summary, request file or mark. If this
    process is killed, the next launch finds the mark, and removes the rest. Raises DataError if streams were added to
    the preparation, because they would be left with the tokenizer of another.
    """
    streams = out / STREAMS
    if streams.is_dir() and any(streams.iterdir()):
        raise DataError(f"{streams} was added to this data by `data append`; remove it first, or choose another --out")
    partial = out / PARTIAL
    mark = partial / PUBLISHING
    is_finished = "format_version" in read_json_object(out / SUMMARY_FILE)
    if is_finished:
        # Without a summary, the folder does not look finished. If this launch is killed, the mark tells the next one
        # that the content was written by this command.
        partial.mkdir(exist_ok=True)
        write_atomically(mark, b"")
        (out / SUMMARY_FILE).unlink()

    # Remove what was published, then the work in progress with the mark.
    if mark.is_file():
        for name in (*SPLITS, "tokenizer"):
            shutil.rmtree(out / name, ignore_errors=True)
    if (partial / REQUEST_FILE).is_file() or mark.is_file():
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def only_preparation_in(out: Path, *, is_shared: bool = False) -> Iterator[None]:
    """Context manager: create the output folder, and hold a lock on it, so that two preparations do not share it.

    Parts of one preparation hold a shared lock: other parts may run beside them, but nothing else. The kernel frees the
    lock when this process ends, also after a kill. Raises DataError if the folder cannot be created, or if another
    preparation holds the lock.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in DISK_FULL_ERRORS:
            raise
        raise DataError(
            f"--out {out} is not a folder and cannot become one: {error.strerror}; choose another"
        ) from error
    try:
        # Where locks do nothing, two launches only waste work: writes are atomic, and `publish` checks that it can.
        lock = lock_folder(out, is_shared=is_shared)
    except BlockingIOError as error:
        raise DataError(f"another preparation is running in {out}; wait for it, or choose another --out") from error
    try:
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def disk_errors_as_data_errors(out: Path) -> Iterator[None]:
    """Context manager: turn errors of a full, unreadable or unwritable disk into a DataError of one sentence.

    Other OSErrors are raised unchanged.
    """
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL_ERRORS:
            raise DataError(
                f"no space left for {out}; nothing there looks finished. Free some space and run the same command "
                f"again to carry on, or remove {out / PARTIAL}"
            ) from error
        if error.errno in UNUSABLE_PATH_ERRORS:
            raise DataError(f"{error.filename or out} cannot be read or written: {error.strerror}") from error
        raise
