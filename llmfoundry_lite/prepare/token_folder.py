"""The folder of token files, as the process sees it that divides the work: on a disk of this machine.

A companion has a `TokenFolder` that keeps the files in a bucket. There, only the files that are worked on are on this
machine. Both steps of `prepare.py` say when they need a file and when they are done with it.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from llmfoundry_lite.prepare.token_unit import UnitNumber


class TokenFolder:
    """The token files of a preparation, in a folder of this machine."""

    def __init__(self, path: Path) -> None:
        """Take the path of the folder."""
        self.path = path

    def names(self) -> set[str]:
        """Return the names of all token files that exist."""
        return {path.name for path in self.path.glob("*.npz")}

    def fetch(self, number: UnitNumber) -> None:
        """Bring a token file that exists to this machine, at least what it has beside its tokens."""

    def begin(self, number: UnitNumber) -> None:
        """Prepare for a token file that will be written, perhaps instead of an earlier one."""

    def finish(self, number: UnitNumber) -> None:
        """Store a token file that has been written and counted, or that was fetched and is not needed any more."""

    def has_room(self) -> bool:
        """Return whether another token file may be fetched or written now."""
        return True

    def wait_for_room(self) -> None:
        """Wait until another token file may be fetched or written, because others have been stored."""

    def flush(self) -> None:
        """Wait until all files that were written are stored."""

    def paths(self, units: np.ndarray, *, without_tokens: bool = False) -> Iterator[Path]:
        """Yield the paths of the token files of some units, rows with the numbers `piece` and `unit`, in order.

        A file is needed only until the next one is asked for. With `without_tokens`, its tokens are not needed.
        """
        for row in units:
            yield self.path / UnitNumber(int(row["piece"]), int(row["unit"])).file_name
