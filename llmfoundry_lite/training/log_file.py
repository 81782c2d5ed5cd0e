"""metrics.jsonl as rank 0 appends to it. It notices if somebody removes, replaces or cuts off the file during the
run."""

import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from llmfoundry_lite.checkpoint.run_log import missing_lines, read_lines
from llmfoundry_lite.files import open_no_link


class LogFile:
    """A file that is open for appending. All methods raise OSError."""

    def __init__(self, path: Path):
        """Open the file at `path`, or create it."""
        self.path = path
        self.has_lost_folder = False
        """The file's folder was not there at the last look, and that has been reported."""
        self.file: BinaryIO = open(path, "a+b", opener=open_no_link)  # noqa: SIM115 (closed by close)
        self.num_bytes = self._size()
        """Size of the file after our last line."""

    def append(self, line: str) -> None:
        """Append a line, and pass it to the operating system."""
        self.file.write(line.encode() + b"\n")
        self.file.flush()
        self.num_bytes = self._size()

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def _size(self) -> int:
        """Return the size in bytes of the file that is open, whatever its name is by now."""
        return os.fstat(self.file.fileno()).st_size

    def mend(self) -> str:
        """Make sure that the next line goes into the file at `path`, after all lines that were appended before.

        Somebody may have removed, renamed or replaced the file while it is open, or put a link in its place. Then this
        opens the file at `path`, or creates it, and writes all lines again. A removed file can be read as long as it is
        open, so none of its lines are lost. Lines that were cut off the open file are lost.

        Call it before `append`. Returns a sentence for the user about what was wrong; empty if nothing was.
        """
        if self.path.is_symlink():  # records would go through it, perhaps into any file of this user
            return self._write_again("replaced by a link")
        try:
            is_open_file = os.path.samestat(os.stat(self.path), os.fstat(self.file.fileno()))
        except FileNotFoundError:
            return self._write_again("removed or renamed")
        if not is_open_file:
            return self._write_again("replaced")

        # The file is the same one. It can only have become shorter.
        num_bytes_cut = self.num_bytes - self._size()
        if num_bytes_cut <= 0:
            return ""
        self.num_bytes -= num_bytes_cut
        return f"{self.path}: {num_bytes_cut:,} bytes were cut off while the run trained; their records are lost"

    def _write_again(self, what_happened: str) -> str:
        """Open the file at `path` instead of the one that is open, and append the lines of that one that it lacks.

        The file is created if it is not there, and a link in its place is removed. `what_happened` to the old file is
        "replaced", "replaced by a link" or "removed or renamed", for the message. Changes `file`, `num_bytes` and
        `has_lost_folder`.

        Returns a sentence for the user. It is empty if the file there has all lines already, or if the folder is still
        gone, which was reported before.
        """
        try:
            self.path.parent.mkdir(exist_ok=True)
        except FileNotFoundError:
            # The folder's parent is gone too: perhaps an unmounted disk, in whose place nothing must be written.
            is_reported = self.has_lost_folder
            self.has_lost_folder = True
            return "" if is_reported else f"{self.path}: its folder is gone; records are written when it is back"

        # Read our lines from the old file, which the operating system keeps while it is open.
        try:
            self.file.seek(0)
            our_lines = [line for line, _ in read_lines(self.file.read())]
            outcome = f"{len(our_lines):,} records were written again"
        except OSError:  # a server does not keep a file that another machine has removed
            our_lines = []
            outcome = "its records are lost"

        # Go on with the new file. The old one is closed only after that, because it may have the only copy.
        if self.path.is_symlink():
            self.path.unlink()
        old_file = self.file
        self.file, num_missing = self._open_with(our_lines)
        with suppress(OSError):
            old_file.close()
        self.num_bytes = self._size()
        self.has_lost_folder = False

        # The file may be a copy of ours, or the file system may have given our file another number.
        is_same = what_happened == "replaced" and num_missing == 0
        return "" if is_same else f"{self.path} was {what_happened} while the run trained; {outcome}"

    def _open_with(self, our_lines: list[bytes]) -> tuple[BinaryIO, int]:
        """Open the file at `path` for appending, and append those of `our_lines` that it lacks.

        Returns the new file and the number of lines that it lacked. Does not change `self.file`. If this fails, the
        file at `path` is cut off to its length before, and OSError is raised. The next attempt can then read all lines
        again from `self.file`, which is still open.
        """
        file = open(self.path, "a+b", opener=open_no_link)  # noqa: SIM115 (becomes self.file)
        original_size = os.fstat(file.fileno()).st_size
        try:
            file.seek(0)
            missing = missing_lines(file.read().splitlines(keepends=True), our_lines)
            file.writelines(missing)
            file.flush()
        except OSError:  # the disk is full, for example
            with suppress(OSError):
                file.close()
            with suppress(OSError):
                os.truncate(self.path, original_size)
            raise
        return file, len(missing)
