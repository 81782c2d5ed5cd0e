"""Readers of files that the user has written: each turns a file of some suffix into the texts of documents.

`--reader .xml=python:package.module:function` names one. Installed companions may have readers for suffixes of their
own, which need no option. `docs/own-parts.md` is the page for users.
"""

import glob
import os
import traceback
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import BinaryIO, Protocol

from llmfoundry_lite.config.part_names import find_names_beside
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.own_code import import_object
from llmfoundry_lite.prepare.contents import COMPRESSED_SUFFIXES, InputFile, UnreadableText, open_content
from llmfoundry_lite.prepare.listing import SUFFIXES, Listing, expand_source, file_kind

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


@cache
def find_registered_readers() -> dict[str, str]:
    """Return suffix -> import path for the readers of installed companions.

    Suffixes of files that this package reads by itself are left out, with a warning.
    """
    suffixes_of_ours = {suffix for suffixes in SUFFIXES.values() for suffix in suffixes}
    return find_names_beside("readers", suffixes_of_ours | {*COMPRESSED_SUFFIXES})


def find_readers_for(sources: Iterable[str], given: Iterable[str]) -> list[str]:
    """Return the readers of installed companions for files of some sources, as values of `--reader`.

    given: the values of `--reader` on the command line, which win.

    Only suffixes that occur are in the result, because it is a part of the request. URLs are not listed here, so all
    readers are returned if a source is one.
    """
    given_suffixes = {reader.partition("=")[0] for reader in given}
    readers = {suffix: path for suffix, path in find_registered_readers().items() if suffix not in given_suffixes}
    names = {suffix: suffix for suffix in readers}  # so that the kind of a file is its suffix
    used_suffixes: set[str | None] = set()
    for source in sources if readers else ():
        if "://" in source:
            used_suffixes |= {*readers}
        elif os.path.exists(os.path.expanduser(source)) or glob.has_magic(source):
            files = expand_source(source, Listing(on_error="skip"))
            used_suffixes |= {file_kind(file, names) for file in files}
    return [f"{suffix}={path}" for suffix, path in readers.items() if suffix in used_suffixes]


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
