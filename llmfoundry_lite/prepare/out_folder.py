"""The output folder of `data prepare`: its lock, checks of earlier content, work in progress, and publication.

If `summary.json` exists, the rest is complete. Work in progress is in `.partial`. `prepare` holds the lock
(`only_preparation_in`), looks for a finished preparation (`find_finished`), opens the work in progress (`open_partial`)
and publishes it in the end (`publish`). A launch may be killed between any two steps of these; the next one finds out
from `.partial/request.json`, the mark `.partial/publishing` and `summary.json` how far it came.
"""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmfoundry_lite.data.tokenizer import Tokenizer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.files import lock_folder, sync_folder, write_atomically
from llmfoundry_lite.prepare.listing import count_files, read_object
from llmfoundry_lite.prepare.request import PrepareRequest
from llmfoundry_lite.prepare.sources import HUB_PREFIX, Source
from llmfoundry_lite.prepare.summary import FORMAT_VERSION, SPLITS, SUMMARY_FILE, Summary, load_summary

PARTIAL = ".partial"
LAYOUT = 4
"""Version of `.partial`, raised when units are cut or their tokens stored in another way. Results do not contain it."""
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk."""
UNUSABLE = (
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
"""Errors of an input or output folder that are reported in one sentence."""
REQUEST_FILE = "request.json"
"""File in `.partial` with the request that the work is for."""
PUBLISHING = "publishing"
"""File in `.partial` that marks the content of the output folder as this preparation's."""


def record_of(request: PrepareRequest, source: Source, given: Tokenizer | None) -> dict[str, Any]:
    """Return the request with the state of its input and tokenizer, in the form that is stored and compared.

    `given` is the tokenizer of the request; None for one that is to be trained.
    """
    record = asdict(request)
    record["input"] = source.identify()
    record["tokenizer_fingerprint"] = given.fingerprint if given else None
    record["format_version"] = FORMAT_VERSION
    return json.loads(json.dumps(record))  # tuples become lists, as in a record that is read


def difference(stored: dict[str, Any], now: dict[str, Any]) -> str | None:
    """Describe in a sentence the first difference of two requests; None if they are the same.

    Only the keys of `now` are compared.
    """
    for key, value in now.items():
        stored_value = stored.get(key)
        if stored_value == value:
            continue
        if key == "input":
            return f"the input has changed ({_describe_input(stored_value)} then, {_describe_input(value)} now)"
        if key == "layout":
            return "it was begun by another release, which keeps unfinished work in another way"
        return f"{key} was {stored_value!r} and is {value!r} now"
    return None


def _describe_input(state: Any) -> str:
    """Describe the state of an input, such as "files 3, bytes 4096, digest 0f3a"."""
    if not isinstance(state, dict):
        return "unknown"
    return ", ".join(f"{name} {value}" for name, value in state.items())


def check_unchanged(source: Source, record: dict[str, Any]) -> None:
    """Raise DataError if the input has changed in the meantime, because the result may be a mixture."""
    changed = difference({"input": record["input"]}, {"input": source.identify()})
    if changed:
        raise DataError(
            f"{changed}: it was written to while it was read, so nothing is published; when it is complete, run the "
            "same command again with --overwrite"
        )


def find_finished(out: Path, record: dict[str, Any], given: Tokenizer | None) -> Summary | None:
    """Return the summary in `out` if the same request is finished there. Raises DataError if another one is."""
    if not (out / SUMMARY_FILE).is_file():
        return None
    summary = load_summary(out)
    changed = difference(summary.request, record)
    if given and not changed:
        changed = difference({"eos_token": summary.tokenizer.eos_token}, {"eos_token": given.eos_token})
    if changed:
        raise DataError(f"{out} holds another preparation: {changed}; choose another --out, or pass --overwrite")
    shutil.rmtree(out / PARTIAL, ignore_errors=True)  # a launch was killed after writing the summary
    return summary


def open_partial(out: Path, record: dict[str, Any], given: Tokenizer | None, notify: Callable[[str], None]) -> Path:
    """Open the folder of work in progress: a new one, or that of a killed launch of the same request.

    Raises DataError where units of another request are finished there, and for files that are not this command's.
    `notify` gets a sentence about work that is carried on or thrown away.
    """
    partial = out / PARTIAL
    request_file = partial / REQUEST_FILE
    record = record | {"layout": LAYOUT, "eos_token": given.eos_token if given else None}
    content = json.dumps(record, indent=2)
    if request_file.is_file() and _can_carry_on(partial, record, notify):
        write_atomically(request_file, content)
        return partial

    # From here on the work begins anew.
    was_begun = request_file.is_file()
    if (partial / PUBLISHING).is_file() and not was_begun:
        discard(out)  # a launch with --overwrite was killed while it removed an earlier preparation
    refuse_others(out)
    if partial.exists():
        if not was_begun and count_files(partial):
            raise DataError(f"{partial} is not of this command: it has no {REQUEST_FILE}; choose another --out")
        shutil.rmtree(partial)
    (partial / "units").mkdir(parents=True)
    write_atomically(request_file, content)
    return partial


def _can_carry_on(partial: Path, record: dict[str, Any], notify: Callable[[str], None]) -> bool:
    """Return whether the work in `partial` is for the same request, or for another one and not begun.

    Units made with `on_error` stop count for skip too, because no document in them was bad. Raises DataError where
    units of another request are finished, and for a request that cannot be read.
    """
    stored = read_object(partial / REQUEST_FILE)
    if not stored:
        raise DataError(
            f"{partial / REQUEST_FILE} cannot be read, so it is unknown what was begun there; choose another --out, or "
            "pass --overwrite to discard it"
        )
    if stored.get("on_error") == "stop" and record["on_error"] == "skip":
        stored["on_error"] = "skip"

    num_finished = len(list((partial / "units").glob("*.npz")))
    changed = difference(stored, record)
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


def refuse_others(out: Path) -> None:
    """Raise DataError where the output folder has content under the names that this preparation will publish."""
    present = [name for name in (*SPLITS, "tokenizer") if os.path.lexists(out / name)]
    if present:
        raise DataError(
            f"{out} already contains {', '.join(present)}, not written by this command; choose another --out"
        )


def refuse_within_source(out: Path, sources: Sequence[str]) -> None:
    """Raise DataError for an `--out` within a source, because the next launch would read it as input."""
    for source in sources:
        folder = Path(source.removeprefix(HUB_PREFIX)).expanduser()
        if folder.is_dir() and out.resolve().is_relative_to(folder.resolve()):
            raise DataError(
                f"--out {out} lies in the source {source}, which is read again by every launch; choose another --out"
            )


def publish(partial: Path, out: Path, summary: Summary) -> None:
    """Move the finished parts into place, then write the summary, which marks them as complete.

    The tokenizer is copied, so that a launch that is killed here still finds it in `.partial` and carries on.
    """
    copy = partial / "tokenizer.copy"
    copy.mkdir(exist_ok=True)
    for path in (partial / "tokenizer").iterdir():  # `copytree` hides that the disk is full
        shutil.copy(path, copy)
    sync_folder(copy)
    mark = partial / PUBLISHING
    if not mark.exists():
        refuse_others(out)
        write_atomically(mark, b"")
    for source, target in (("train", "train"), ("val", "val"), ("tokenizer.copy", "tokenizer")):
        shutil.rmtree(out / target, ignore_errors=True)  # left by a launch that was killed here
        if (partial / source).is_dir():
            (partial / source).rename(out / target)
    write_atomically(out / SUMMARY_FILE, json.dumps(asdict(summary), indent=2) + "\n")
    shutil.rmtree(partial)


def discard(out: Path) -> None:
    """Remove an earlier preparation, finished or not. Anything that does not look like one stays."""
    partial = out / PARTIAL
    mark = partial / PUBLISHING
    is_finished = "format_version" in read_object(out / SUMMARY_FILE)
    if is_finished:
        # Without its summary a folder does not look finished, and by this mark a later launch knows it as ours.
        partial.mkdir(exist_ok=True)
        write_atomically(mark, b"")
        (out / SUMMARY_FILE).unlink()
    if mark.is_file():
        for name in (*SPLITS, "tokenizer"):
            shutil.rmtree(out / name, ignore_errors=True)
    if (partial / REQUEST_FILE).is_file() or mark.is_file():
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def only_preparation_in(out: Path) -> Iterator[None]:
    """Create the output folder and hold a lock on it, which ends with this process, however that ends.

    Raises DataError where it cannot be a folder, and where another preparation holds the lock.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in FULL:
            raise
        raise DataError(f"--out {out} is no folder and cannot become one: {error.strerror}; choose another") from error
    try:
        lock = lock_folder(out)  # without locks two launches would only waste work: all writes are atomic
    except BlockingIOError as error:
        raise DataError(f"another preparation is running in {out}; wait for it, or choose another --out") from error
    try:
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def disk_errors_as_data_errors(out: Path) -> Iterator[None]:
    """Raise DataError, in one sentence, for a full or unwritable disk. Other errors of the system pass."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise DataError(
                f"no space left for {out}; nothing there looks finished. Free some space and run the same command "
                f"again to carry on, or remove {out / PARTIAL}"
            ) from error
        if error.errno in UNUSABLE:
            raise DataError(f"{error.filename or out} cannot be read or written: {error.strerror}") from error
        raise
