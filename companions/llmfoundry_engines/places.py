"""The output of a preparation: a folder that all machines share, or a bucket.

`open_place` opens either. A `Place` is a folder: everything is there, and locks protect it. A `BucketPlace` has a
scratch folder of this machine, in which the functions for folders work: a file OUT/name in the bucket has the same name
below that folder. Small files are copied both ways, and token files by `bucket_tokens.py`.

    OUT/.partial/request.json        the first part to put it decides (`share`)
    OUT/.partial/tokenizer.json      all files of the tokenizer in one, for the same reason
    OUT/.partial/units, parts, joined, publishing      as in a folder

There are no locks in a bucket. Two launches of a part put the same bytes under the same names. Of a finished
preparation, `summary.json` appears last.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from llmfoundry_engines.bucket_tokens import BucketTokens
from llmfoundry_engines.part import Part, part_of_folder
from llmfoundry_engines.reports import MAX_ROWS_BYTES, PROGRESS_FILE, REPORT_FILE, ROWS_FILE
from llmfoundry_engines.scratch import Scratch, Space, scratch_folder
from llmfoundry_engines.shared_folder import JOINED, PARTS, SHARDS_FILE
from llmfoundry_engines.transfers import put_unless_present, upload
from llmfoundry_lite.bounded import MAX_TOKENIZER_BYTES, parse_json, too_large
from llmfoundry_lite.checkpoint.folder import Folder
from llmfoundry_lite.checkpoint.open_folder import open_folder
from llmfoundry_lite.errors import ConfigError, DataError, UserError, mask_credentials
from llmfoundry_lite.files import check_is_path
from llmfoundry_lite.prepare.listing import read_json_object
from llmfoundry_lite.prepare.out_folder import (
    DISK_FULL_ERRORS,
    PARTIAL,
    PUBLISHING,
    REQUEST_FILE,
    STREAMS,
    discard_preparation,
    disk_errors_as_data_errors,
    only_preparation_in,
)
from llmfoundry_lite.prepare.summary import SPLITS, SUMMARY_FILE
from llmfoundry_lite.prepare.token_files import DISTRUST_FILE
from llmfoundry_lite.prepare.token_folder import TokenFolder
from llmfoundry_lite.retry import as_os_errors, first_line

TOKENIZER_BUNDLE = "tokenizer.json"
"""Object in `.partial` with all files of the tokenizer, a JSON object of their texts by name."""
READS_AT_ONCE = 16
"""Small files that are read at the same time."""


def is_url(out: str | Path) -> bool:
    """Return whether an output is behind a URL instead of in a folder."""
    return "://" in str(out)


class Place:
    """An output folder that all parts see under the same path."""

    is_bucket = False

    def __init__(self, out: Path) -> None:
        """Take the path of the folder."""
        self.out = out
        self.tokens = TokenFolder(out / PARTIAL / "units")

    @contextmanager
    def in_use(self, *, is_shared: bool = False) -> Iterator[None]:
        """Context manager: hold a lock on the folder, and turn errors of the disk into errors of one sentence."""
        with disk_errors_as_data_errors(self.out), only_preparation_in(self.out, is_shared=is_shared):
            yield

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Context manager: turn errors of the disk into errors of one sentence, without a lock."""
        with disk_errors_as_data_errors(self.out):
            yield

    def text(self, sentence: str) -> str:
        """Return a sentence for the user, with the names that a user knows."""
        return sentence

    def pull(self, part: Part | None = None) -> None:
        """Copy the records of a part, or of all parts, to this machine."""

    def share(self, name: str) -> bool:
        """Put a file of the work in progress where all machines see it, unless it is there. Returns whether it was."""
        return False

    def share_tokenizer(self) -> bool:
        """Put the tokenizer where all machines see it, unless there is one. Then take that one, and return True."""
        return False

    def store(self, path: Path) -> None:
        """Put a file where all machines see it."""

    def share_if_present(self, name: str) -> None:
        """Put a file of the work in progress where all machines see it, if this one has it. Otherwise, take theirs."""

    def discard(self) -> None:
        """Remove an earlier preparation, finished or not, if this command has written it. `pull` comes before."""
        discard_preparation(self.out)

    def remove_partial(self) -> None:
        """Remove the work in progress of a finished preparation."""


class BucketPlace(Place):
    """An output in a bucket, and the scratch folder of this machine."""

    is_bucket = True

    def __init__(self, url: str, root: Folder, scratch_path: Path, space: Space) -> None:
        """Take the URL of the output, its folder, an empty scratch folder of this machine, and the space in it."""
        super().__init__(scratch_path / "out")
        self.out.mkdir()
        self.url = mask_credentials(url)
        self.root = root
        self.space = space
        self.scratch_path = scratch_path
        self.partial = root.child(PARTIAL)
        self.tokens: BucketTokens = BucketTokens(self.partial.child("units"), self.tokens.path, space)

    @contextmanager
    def in_use(self, *, is_shared: bool = False) -> Iterator[None]:
        """Context manager: turn errors of the bucket and the scratch disk into errors of one sentence."""
        with self.errors():
            yield

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Context manager: turn errors of the bucket and the scratch disk into errors of one sentence."""
        try:
            with as_os_errors():
                yield
        except UserError as error:
            error.args = (self.text(str(error)),)
            raise
        except OSError as error:
            raise DataError(self.describe_error(error)) from error
        finally:
            self.tokens.close()

    def describe_error(self, error: OSError) -> str:
        """Describe an error of the scratch disk or of the bucket, and what to do."""
        if error.errno in DISK_FULL_ERRORS:
            return (
                f"no space left for scratch files in {self.scratch_path.parent}; nothing in {self.url} is lost: free "
                "some, or give another --scratch or a smaller --scratch-limit, and run the same command again to resume"
            )
        reason = error.strerror or first_line(error)
        if error.filename:
            reason = f"{error.filename}: {reason}"
        return f"{self.url} cannot be read or written ({self.text(reason)}); the same command resumes what is there"

    def text(self, sentence: str) -> str:
        """Return a sentence with the URL in place of the path of the scratch folder."""
        return sentence.replace(str(self.out), self.url)

    def pull(self, part: Part | None = None) -> None:
        """Copy the records of a part, or those of all parts and shares, to this machine, and the summary.

        Folders of data are not copied, but made, so that it is known that they are there.
        """
        names = self.root.names()
        for name in (*SPLITS, "tokenizer"):
            if name in names:
                (self.out / name).mkdir(exist_ok=True)
        if SUMMARY_FILE in names:
            self._read(SUMMARY_FILE)
        if PARTIAL not in names:
            return
        (self.out / PARTIAL).mkdir(exist_ok=True)
        for name in (REQUEST_FILE, DISTRUST_FILE, PUBLISHING):
            self._read(f"{PARTIAL}/{name}")
        self._load_tokenizer()

        # The records of parts and of shares of the shards.
        files = (PROGRESS_FILE, REPORT_FILE, ROWS_FILE)
        folders = [part.folder_name] if part else self._part_folders(PARTS)
        paths = [f"{PARTIAL}/{PARTS}/{folder}/{name}" for folder in folders for name in files]
        if part is None:
            paths += [f"{PARTIAL}/{JOINED}/{folder}/{SHARDS_FILE}" for folder in self._part_folders(JOINED)]
        with ThreadPoolExecutor(READS_AT_ONCE, thread_name_prefix="read") as pool:
            list(pool.map(self._read, paths))

    def _part_folders(self, name: str) -> list[str]:
        """Return the names of the folders of parts in a folder of the work in progress."""
        return [folder for folder in self.partial.child(name).names() if part_of_folder(folder) is not None]

    def _read(self, path: str) -> None:
        """Copy a small file to this machine, if there is one. `path` is relative to the output."""
        try:
            content = self.root.read(path, MAX_ROWS_BYTES)
        except FileNotFoundError:
            return
        if len(content) > MAX_ROWS_BYTES:
            raise too_large(f"{self.url}/{path}", MAX_ROWS_BYTES, "a record", "remove it")
        (self.out / path).parent.mkdir(parents=True, exist_ok=True)
        (self.out / path).write_bytes(content)

    def share_if_present(self, name: str) -> None:
        """Put a file of the work in progress into the bucket, if this machine has it. Otherwise, take that one."""
        if (self.out / PARTIAL / name).exists():
            self.share(name)
        else:
            self._read(f"{PARTIAL}/{name}")

    def share(self, name: str) -> bool:
        """Put a file of the work in progress into the bucket, unless it is there. Then take that one.

        Returns whether another one was there.
        """
        path = self.out / PARTIAL / name
        content = path.read_bytes()
        stored = put_unless_present(self.partial, name, content, MAX_ROWS_BYTES)
        path.write_bytes(stored)
        return stored != content

    def share_tokenizer(self) -> bool:
        """Put the tokenizer into the bucket, unless there is another one. Then take that one, and return True."""
        folder = self.out / PARTIAL / "tokenizer"
        files = {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.iterdir())}
        bundle = json.dumps(files).encode()
        stored = put_unless_present(self.partial, TOKENIZER_BUNDLE, bundle, MAX_TOKENIZER_BYTES)
        if stored == bundle:
            return False
        self._load_tokenizer()
        return True

    def _load_tokenizer(self) -> None:
        """Unpack the tokenizer of the bucket, if there is one. Raises DataError for a damaged one."""
        try:
            bundle = self.partial.read(TOKENIZER_BUNDLE, MAX_TOKENIZER_BYTES)
        except FileNotFoundError:
            return
        folder = self.out / PARTIAL / "tokenizer"
        folder.mkdir(exist_ok=True)
        damaged = DataError(
            f"{self.partial.url}/{TOKENIZER_BUNDLE} is damaged; remove {self.partial.url} and run all parts again"
        )
        try:
            files = parse_json(bundle)
        except ValueError as error:
            raise damaged from error
        if not isinstance(files, dict):
            raise damaged
        for name, text in files.items():
            is_plain_name = name != "" and Path(name).name == name and not name.startswith(".")
            if not is_plain_name or not isinstance(text, str):
                raise damaged
            try:
                (folder / name).write_text(text, encoding="utf-8")
            except ValueError as error:  # a null character in the name, or half of a surrogate pair in the text
                raise damaged from error

    def store(self, path: Path) -> None:
        """Put a file into the bucket."""
        folder = self.root
        for name in path.relative_to(self.out).parent.parts:
            folder = folder.child(name)
        upload(path, folder)

    def discard(self) -> None:
        """Remove an earlier preparation, key by key, if this command has written it. `pull` comes before and after.

        As in a folder, the mark says that data folders are of this command, also after a kill in the middle.
        """
        if STREAMS in self.root.names():
            raise DataError(f"{self.url}/{STREAMS} was added to this data; remove it first, or choose another --out")
        mark = self.out / PARTIAL / PUBLISHING
        if "format_version" in read_json_object(self.out / SUMMARY_FILE):
            self.partial.put(PUBLISHING, b"")
            self.root.remove(SUMMARY_FILE)
        elif not mark.exists():
            if (self.out / PARTIAL / REQUEST_FILE).exists():
                self.remove_partial()
            self._forget()
            return
        for name in (*SPLITS, "tokenizer"):
            self.root.child(name).remove_all()
        self.remove_partial()
        self._forget()

    def _forget(self) -> None:
        """Remove what this machine has of the bucket."""
        shutil.rmtree(self.out)
        self.out.mkdir()

    def remove_partial(self) -> None:
        """Remove the work in progress of a finished preparation, key by key, the request last."""
        names = self.partial.names()
        for name in ("units", JOINED, PARTS, TOKENIZER_BUNDLE, DISTRUST_FILE, PUBLISHING, REQUEST_FILE):
            if name not in names:
                continue
            if name in ("units", JOINED, PARTS):
                self.partial.child(name).remove_all()
            else:
                self.partial.remove(name)


@contextmanager
def open_place(out: str | Path, scratch: Scratch | None = None) -> Iterator[Place]:
    """Context manager: open the output of a preparation, a folder or a URL.

    Raises ConfigError for scratch options beside a folder, and CheckpointError for a URL that cannot be opened.
    """
    if not is_url(out):
        check_is_path(str(out))
        if scratch not in (None, Scratch()):
            raise ConfigError(f"--scratch and --scratch-limit are for an --out in a bucket, and {out} is a folder")
        yield Place(Path(out).expanduser())
        return
    scratch = scratch or Scratch()
    root = open_folder(str(out).rstrip("/"))
    if root.path_here is not None:  # file://
        yield Place(root.path_here)
        return
    with scratch_folder(scratch.folder) as path:
        yield BucketPlace(str(out).rstrip("/"), root, path, Space(scratch.limit_bytes))


def naming(place: Place, notify: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that notifies the user of a sentence with the names that a user knows."""
    return lambda sentence: notify(place.text(sentence))
