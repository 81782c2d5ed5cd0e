"""Readers of files that the user has written: each turns a file of some suffix into the texts of documents.

`--reader .xml=python:package.module:function` names one. `docs/own-parts.md` is the page for users.
"""

import traceback
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from llmfoundry_lite.errors import DataError
from llmfoundry_lite.own_code import import_object
from llmfoundry_lite.prepare.contents import InputFile, UnreadableText, open_content

OPTION = "--reader"


class Reader(Protocol):
    """A reader, called as `function(file, name)`."""

    def __call__(self, file: BinaryIO, name: str) -> Iterable[str]:
        """Yield the text of each document in a file, in an order that is always the same.

        `file` is open for reading, and decompressed if its suffix is .gz or .zst. `name` is its path or URL. Raises
        ValueError for a file that is not valid, which counts as one document that cannot be read. So do other errors,
        such as a parser's own.
        """
        ...


def import_readers(names: Iterable[str]) -> None:
    """Import readers, so that a mistake shows before anything is read. Raises ConfigError."""
    for name in names:
        import_object(name, OPTION)


def read_with(name: str, files: Sequence[InputFile]) -> Iterator[tuple[int, int, str | UnreadableText]]:
    """Yield each document in some files by the reader of a name: the file's number, its number in the file, its text.

    Numbers count from 0. An UnreadableText stands for the rest of a file for which the reader raises an error. Raises
    DataError if it yields something else than text, and for a compressed file that is damaged. Errors of the disk are
    raised unchanged.
    """
    read: Reader = import_object(name, OPTION)
    for file_number, file in enumerate(files):
        with open_content(file) as (content, _):
            number = -1
            try:
                for number, text in enumerate(read(content, str(file))):
                    if not isinstance(text, str):
                        raise DataError(f"{OPTION}: {name} yields a {type(text).__name__} for {file}, expected texts")
                    yield file_number, number, text
            except (DataError, OSError, EOFError, zlib.error, MemoryError):  # not what the reader thinks of the file
                raise
            except Exception as error:  # parsers have errors of their own, which need not be a ValueError
                description = f" cannot be read by {name}: {_describe(error)}"
                yield file_number, number + 1, UnreadableText("unreadable", description)


def _describe(error: Exception) -> str:
    """Describe an error of a reader: what it says and, unless the reader meant to raise it, where it came from."""
    if isinstance(error, ValueError):
        return str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name}, line {frame.lineno})"
