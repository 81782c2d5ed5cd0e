"""metrics.jsonl as rank 0 appends to it. It notices when somebody removes, replaces or cuts off the file in mid-run."""

import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from llmfoundry_lite.checkpoint.run_log import missing_lines, read_lines
from llmfoundry_lite.files import open_no_link


class LogFile:
    """A file that is open for appending. Methods raise OSError."""

    def __init__(self, path: Path):
        self.path = path
        self.has_lost_folder = False
        self.file: BinaryIO = open(path, "a+b", opener=open_no_link)  # noqa: SIM115 (closed by close)
        self.num_bytes = os.fstat(self.file.fileno()).st_size
        """Size of the file after our last line."""

    def append(self, line: str) -> None:
        self.file.write(line.encode() + b"\n")
        self.file.flush()
        self.num_bytes = os.fstat(self.file.fileno()).st_size

    def close(self) -> None:
        self.file.close()

    def mend(self) -> str:
        """Make sure that the next line goes into the file of this name, after all lines before it.

        Returns a sentence on what was wrong with the file; empty if nothing was. A removed file can be read as long as
        it is open, so nothing of it is lost.
        """
        try:
            is_ours = os.path.samestat(os.stat(self.path), os.fstat(self.file.fileno()))
        except FileNotFoundError:
            return self._write_again("removed or renamed")
        if not is_ours:
            return self._write_again("replaced")

        num_cut = self.num_bytes - os.fstat(self.file.fileno()).st_size
        if num_cut <= 0:
            return ""
        self.num_bytes -= num_cut
        return f"{self.path}: {num_cut:,} bytes were cut off while the run trained; their records are lost"

    def _write_again(self, what: str) -> str:
        """Write the lines that the file of this name lacks, into a new file if there is none."""
        try:
            self.path.parent.mkdir(exist_ok=True)
        except FileNotFoundError:  # perhaps an unmounted disk, in whose place nothing is to be written
            has_told, self.has_lost_folder = self.has_lost_folder, True
            return "" if has_told else f"{self.path}: its folder is gone; records are written when it is back"
        try:
            self.file.seek(0)
            ours = [line for line, _ in read_lines(self.file.read())]
            outcome = f"{len(ours):,} records were written again"
        except OSError:  # a server does not keep a file that another machine has removed
            ours = []
            outcome = "its records are lost"

        removed = self.file
        self.file, missing = self._open_with(ours)
        with suppress(OSError):
            removed.close()
        self.num_bytes = os.fstat(self.file.fileno()).st_size
        self.has_lost_folder = False
        if what == "replaced" and not missing:  # by a copy; or the file system gives a file another number in time
            return ""
        return f"{self.path} was {what} while the run trained; {outcome}"

    def _open_with(self, ours: list[bytes]) -> tuple[BinaryIO, list[bytes]]:
        """Open the file of this name, and append those of our lines that it lacks. Returns it, and these.

        If that fails, the file is left as it was, and ours stays open: the next attempt can read all lines again.
        """
        file = open(self.path, "a+b", opener=open_no_link)  # noqa: SIM115 (becomes self.file)
        size = os.fstat(file.fileno()).st_size
        try:
            file.seek(0)
            missing = missing_lines(file.read().splitlines(keepends=True), ours)
            file.writelines(missing)
            file.flush()
        except OSError:
            with suppress(OSError):
                file.close()
            with suppress(OSError):
                os.truncate(self.path, size)
            raise
        return file, missing
