"""One of the parts into which a preparation is divided: its name `3/16`, and its share of pieces and of shards."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from llmfoundry_lite.errors import DataError
from llmfoundry_lite.prepare.sources import Piece
from llmfoundry_lite.prepare.token_files import PieceRange

MAX_PARTS = 100_000
"""Maximum number of parts. Every part has a folder, and `data join` reads all of them."""
FOLDER_NAME = re.compile(r"(\d{6})-of-(\d{6})", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """A part: the third of sixteen has the number 3 and the count 16."""

    number: int
    count: int

    def __str__(self) -> str:
        """Return the part as options have it: `3/16`."""
        return f"{self.number}/{self.count}"

    @property
    def folder_name(self) -> str:
        """The name of its folder in the folder of work in progress."""
        return f"{self.number:06}-of-{self.count:06}"


def parse_part(text: str) -> Part:
    """Parse the value of the option `--part`, such as `3/16`. Raises DataError."""
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text.strip(), re.ASCII)
    part = part_of_match(match)
    if part is not None:
        return part
    raise DataError(
        f"--part {text}: expected the number of a part and the number of parts, such as 3/16 for the third of sixteen"
    )


def part_of_folder(name: str) -> Part | None:
    """Return the part that a folder belongs to, by the folder's name; None if that is not a folder of a part."""
    return part_of_match(FOLDER_NAME.fullmatch(name))


def part_of_match(match: re.Match[str] | None) -> Part | None:
    """Return the part whose number and count a pattern has found; None if it found none, or there is no such part."""
    if match is None:
        return None
    part = Part(int(match[1]), int(match[2]))
    return part if 1 <= part.number <= part.count <= MAX_PARTS else None


def choose_pieces(pieces: Iterable[Piece], total_bytes: int, part: Part) -> PieceRange:
    """Return the pieces of a source that belong to a part.

    Pieces of a part are consecutive, and all parts have about the same number of bytes: a piece belongs to the part in
    which its middle lies. Of pieces with 4, 4, 1 and 9 bytes, the first of two parts has the first three. A source
    whose size is unknown (`total_bytes` 0) has all its pieces in the first part.
    """
    first = 0
    end = 0
    num_bytes = 0
    bytes_before = 0
    for piece in pieces:
        owner = 1
        if total_bytes:
            twice_the_middle = 2 * bytes_before + piece.num_bytes
            owner = min(part.count, twice_the_middle * part.count // (2 * total_bytes) + 1)
        bytes_before += piece.num_bytes
        if owner < part.number:
            first += 1
        if owner <= part.number:
            end += 1
        if owner == part.number:
            num_bytes += piece.num_bytes
    return PieceRange(first=first, end=end, num_bytes=num_bytes)


def choose_items(num_items: int, part: Part) -> range:
    """Return the share of a part in numbered things of one size, such as shards. Shares differ by at most one."""
    start = num_items * (part.number - 1) // part.count
    stop = num_items * part.number // part.count
    return range(start, stop)
