"""Token files in a bucket. Those that are worked on are also in a folder of this machine, within a limit of bytes."""

import re
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from llmfoundry_engines.scratch import Space
from llmfoundry_engines.transfers import download, download_without_tokens, upload
from llmfoundry_lite.checkpoint.folder import Folder
from llmfoundry_lite.prepare.token_files import PieceRange
from llmfoundry_lite.prepare.token_folder import TokenFolder
from llmfoundry_lite.prepare.token_unit import UnitNumber

TOKEN_FILE_NAME = re.compile(r"(\d{8})-(\d{8})\.npz", re.ASCII)
TRANSFERS_AT_ONCE = 4
"""Files that are uploaded, and files that are downloaded, at the same time."""


class BucketTokens(TokenFolder):
    """The token files of a preparation in a bucket.

    The main process uses it. Downloads begin before a file is asked for, and uploads go on behind the work; `flush`
    waits for them. Space is reserved for a file from the beginning of its download, or of the work on it, until it is
    removed from this machine.
    """

    def __init__(self, folder: Folder, path: Path, space: Space) -> None:
        """Take the folder in the bucket, the path of the folder on this machine, and the space for it."""
        super().__init__(path)
        self.folder = folder
        self.space = space
        self.room_bytes = 0
        """Space to reserve for a token file whose size is unknown, and to leave free by downloads in advance."""
        self.pieces: PieceRange | None = None
        """The pieces that this process works on; None is all."""
        self._sizes: dict[str, int] = {}
        """Name -> bytes of each token file that `names` has found."""
        self._sorted_names: list[str] = []
        self._reserved: dict[str, int] = {}
        """Name -> bytes that are reserved for a file on this machine."""
        self._downloads: dict[str, Future[None]] = {}
        """Downloads that have begun, in order. The file has not been asked for."""
        self._new: set[str] = set()
        """Names of files that are written here, and so have to be uploaded."""
        self._uploads: deque[Future[None]] = deque()
        self._downloaders = ThreadPoolExecutor(TRANSFERS_AT_ONCE, thread_name_prefix="download")
        self._uploaders = ThreadPoolExecutor(TRANSFERS_AT_ONCE, thread_name_prefix="upload")

    def names(self) -> set[str]:
        """List the token files in the bucket. Returns the names of those that belong to `pieces`."""
        self._sizes = {}
        for name, num_bytes in self.folder.sizes().items():
            match = TOKEN_FILE_NAME.fullmatch(name)
            if match is None:
                continue
            if self.pieces is None or self.pieces.first <= int(match[1]) < self.pieces.end:
                self._sizes[name] = num_bytes
        self.room_bytes = max(self.room_bytes, self.largest_bytes)
        self._sorted_names = sorted(self._sizes)
        return set(self._sizes)

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest token file that `names` has found; 0 if there is none."""
        return max(self._sizes.values(), default=0)

    # Step 1: files are fetched, or written and stored

    def fetch(self, number: UnitNumber) -> None:
        """Download a token file without its tokens, and begin with those that follow it."""
        name = number.file_name
        for skipped in [earlier for earlier in self._downloads if earlier < name]:
            self._discard(skipped)  # a unit of an earlier release of the input
        following = self._sorted_names[bisect_right(self._sorted_names, name) :][:TRANSFERS_AT_ONCE]
        self._await_download(name, following, download_without_tokens)

    def begin(self, number: UnitNumber) -> None:
        """Reserve space for a token file. One that was fetched, and is not current, is removed from this machine."""
        name = number.file_name
        if name in self._reserved:
            self._discard(name)
        self.space.reserve(self.room_bytes)
        self._reserved[name] = self.room_bytes
        self._new.add(name)

    def finish(self, number: UnitNumber) -> None:
        """Upload a file that was written, in a thread, and remove it from this machine; a fetched one is removed."""
        name = number.file_name
        if name not in self._new:
            self._discard(name)
            return
        self._new.remove(name)
        num_bytes = (self.path / name).stat().st_size
        self.space.change(num_bytes - self._reserved[name])
        self._reserved[name] = num_bytes
        while self._uploads and self._uploads[0].done():
            self._uploads.popleft().result()
        self._uploads.append(self._uploaders.submit(self._store, name))

    def has_room(self) -> bool:
        """Return whether another token file may be fetched or written now."""
        return self.space.has_room(self.room_bytes)

    def wait_for_room(self) -> None:
        """Wait until another token file may be fetched or written, because others have been uploaded."""
        self.space.wait_for_room(self.room_bytes)

    def flush(self) -> None:
        """Wait until all files are in the bucket. Raises the first error."""
        while self._uploads:
            self._uploads.popleft().result()

    def close(self) -> None:
        """End the threads. What has not been uploaded is lost."""
        self._downloaders.shutdown(wait=True, cancel_futures=True)
        self._uploaders.shutdown(wait=True, cancel_futures=True)

    # Step 2: files are read in order

    def paths(self, units: np.ndarray, *, without_tokens: bool = False) -> Iterator[Path]:
        """Yield the paths of token files on this machine, in order. Those that follow are downloaded meanwhile."""
        function = download_without_tokens if without_tokens else download
        names = [UnitNumber(int(row["piece"]), int(row["unit"])).file_name for row in units]
        try:
            for position, name in enumerate(names):
                self._await_download(name, names[position + 1 : position + 1 + TRANSFERS_AT_ONCE], function)
                yield self.path / name
                self._discard(name)
        finally:
            for name in list(self._reserved):
                self._discard(name)

    # Single files

    def _await_download(self, name: str, following: list[str], function: Callable[[Folder, Path], None]) -> None:
        """Download a file, and begin to download some that follow it, if there is room for these.

        `function` is the one that downloads.
        """
        if name not in self._downloads:
            self.space.reserve(self._sizes[name])
            self._begin_download(name, function)
        for next_name in following:
            if next_name in self._downloads:
                continue
            if not self.space.has_room(self._sizes[next_name] + self.room_bytes):
                break
            self.space.change(self._sizes[next_name])
            self._begin_download(next_name, function)
        self._downloads.pop(name).result()

    def _begin_download(self, name: str, function: Callable[[Folder, Path], None]) -> None:
        """Begin to download a file, for which space has been reserved."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._reserved[name] = self._sizes[name]
        self._downloads[name] = self._downloaders.submit(function, self.folder, self.path / name)

    def _store(self, name: str) -> None:
        """Upload a file, and remove it from this machine. Runs in a thread."""
        try:
            upload(self.path / name, self.folder)
        except BaseException as error:
            self.space.fail(error)
            raise
        self._discard(name)

    def _discard(self, name: str) -> None:
        """Remove a file from this machine, and release its space."""
        begun = self._downloads.pop(name, None)
        if begun is not None and not begun.cancel():
            begun.exception()  # waits
        (self.path / name).unlink(missing_ok=True)
        self.space.change(-self._reserved.pop(name))
