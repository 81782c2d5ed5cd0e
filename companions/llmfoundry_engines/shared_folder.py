"""The folder of work in progress that all parts of a preparation share: OUT/.partial.

    request.json                 the request, the state of its input, and the releases of the programs
    objects.gz                   the list of objects, if the source is in a bucket, see `stored_list.py`
    tokenizer                    the tokenizer, which the first part puts there
    units                        the token files of all parts
    parts/000003-of-000016       progress and report of a part, see `reports.py`
    joined/000002-of-000004      the shards that a part of `data join` has written, see `join.py`
    train, val                   shards

Folders and files appear whole or not at all, by a rename. So it does not matter which part comes first, and parts need
no other way to talk to each other than a file system that all machines share, such as NFS or Lustre.
"""

import importlib.metadata
import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from llmfoundry_engines.part import Part
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.files import lock_folder, rename_unless_present, write_atomically
from llmfoundry_lite.prepare.listing import read_json_object
from llmfoundry_lite.prepare.out_folder import (
    PARTIAL,
    PARTIAL_VERSION,
    REQUEST_FILE,
    check_no_other_content,
    describe_difference,
    record_of_partial,
)
from llmfoundry_lite.prepare.prepare import OpenedInput
from llmfoundry_lite.prepare.request import PrepareRequest
from llmfoundry_lite.release import read_release

PARTS = "parts"
"""Folder in `.partial` with a folder for each part."""
JOINED = "joined"
"""Folder in `.partial` with a folder for each part of `data join`."""
SHARDS_FILE = "shards.json"
"""File in the folder of a part of `data join` with the records of the shards that it has written."""
RELEASES = "releases"
"""Key of the request file: the releases that decide which tokens a text becomes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedRequest:
    """The request that parts share, as it is stored."""

    request: PrepareRequest
    record: dict[str, Any]
    """The request and the state of its input, as `summary.json` has it."""


def current_releases() -> dict[str, str]:
    """Return the releases of this package and of the library `tokenizers`, which all parts must have in common."""
    return {"llmfoundry-lite": read_release().version, "tokenizers": importlib.metadata.version("tokenizers")}


def open_shared(out: Path, opened: OpenedInput) -> Path:
    """Open the folder of work in progress for a part. The first part creates it; the others must have the same request.

    Returns its path. Raises DataError, which names the difference, if parts of another request, input, tokenizer or
    release have begun there.
    """
    partial = out / PARTIAL
    record = record_of_partial(opened.record, opened.existing_tokenizer) | {RELEASES: current_releases()}
    if not os.path.lexists(partial):
        # Create the folder under a name of this process, so that it never exists without its request.
        check_no_other_content(out)
        unfinished = out / f"{PARTIAL}.{socket.gethostname()}-{os.getpid()}.unfinished"
        (unfinished / "units").mkdir(parents=True, exist_ok=True)
        (unfinished / PARTS).mkdir(exist_ok=True)
        write_atomically(unfinished / REQUEST_FILE, json.dumps(record, indent=2))
        rename_unless_present(unfinished, partial)

    # Compare the request with what the first part has stored.
    if not (partial / REQUEST_FILE).is_file():
        raise DataError(f"{partial} is not of this command: it has no {REQUEST_FILE}; choose another --out")
    stored = read_json_object(partial / REQUEST_FILE)
    changed = describe_difference(stored, record) if stored else f"{REQUEST_FILE} is damaged"
    if changed and stored and RELEASES not in stored:
        raise DataError(
            f"{partial} holds an unfinished preparation without --part; finish it without --part, choose another "
            "--out, or remove that folder to begin anew"
        )
    if changed:
        raise DataError(
            f"{partial} holds parts of another preparation: {changed}; choose another --out, or remove that folder to "
            "begin anew"
        )
    (partial / "units").mkdir(exist_ok=True)  # if somebody has removed the folder to tokenise anew
    return partial


def load_shared(partial: Path) -> SharedRequest:
    """Load the request that parts have stored. Raises DataError if there is none, or it is of another release."""
    request_file = partial / REQUEST_FILE
    stored = read_json_object(request_file)
    if not stored and request_file.exists():
        raise DataError(damaged_request(request_file))
    if RELEASES not in stored:
        raise DataError(
            f"{partial.parent} has no parts to join; prepare them there first, with `data prepare … --part 1/N`"
        )
    changed = describe_difference(stored, {"layout": PARTIAL_VERSION, RELEASES: current_releases()})
    if changed:
        raise DataError(f"{partial.parent} cannot be joined here: {changed}; join it with the release of its parts")

    record = {key: value for key, value in stored.items() if key not in ("layout", "eos_token", RELEASES)}
    if not isinstance(record.get("input"), dict):
        raise DataError(damaged_request(request_file))
    try:
        return SharedRequest(request=request_of(stored), record=record)
    except (DataError, TypeError, ValueError, AttributeError) as error:
        raise DataError(damaged_request(request_file)) from error


def request_of(record: dict[str, Any]) -> PrepareRequest:
    """Return the request that a stored record describes. Raises DataError, TypeError, ValueError or AttributeError."""
    values = {}
    for field in fields(PrepareRequest):
        if field.name in record:
            value = record[field.name]
            values[field.name] = tuple(value) if isinstance(value, list) else value  # JSON has lists for tuples
    return PrepareRequest(**values)


def damaged_request(request_file: Path) -> str:
    """Return the message about a stored request that this command has not written."""
    return f"{request_file} is damaged; remove {request_file.parent} and run all parts again"


@contextmanager
def only_this_part(folder: Path, part: Part) -> Iterator[None]:
    """Context manager: create the folder of a part, and hold a lock on it while its work is done.

    The kernel frees the lock when the process ends. Raises DataError if another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = lock_folder(folder)  # where locks do nothing, both write the same files, and each appears whole
    except BlockingIOError as error:
        raise DataError(f"part {part} is running already, in {folder.parent.parent.parent}; wait for it") from error
    try:
        yield
    finally:
        os.close(lock)


def remove_leftovers(out: Path) -> None:
    """Remove folders that parts have begun to create beside `.partial`, and that a kill has left there."""
    for folder in out.glob(f"{PARTIAL}.*.unfinished"):
        shutil.rmtree(folder, ignore_errors=True)
