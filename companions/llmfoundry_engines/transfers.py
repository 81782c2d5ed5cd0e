"""Whole files between this machine and a bucket, with retries. Little of a large file is in memory."""

import contextlib
import zipfile
from pathlib import Path
from typing import BinaryIO

from llmfoundry_lite.checkpoint.folder import Folder, Source
from llmfoundry_lite.checkpoint.remote_folder import REMOTE_PART_BYTES, part_bytes
from llmfoundry_lite.retry import retry_transient_errors

END_BYTES = 128 << 10
"""Bytes at the end of a token file that are read first, to see where its tokens end. A document takes 24 of them."""

ZIP_SIGNATURE = b"PK\3\4"
"""First bytes of a zip archive, by which numpy tells it from a single array."""


def upload(path: Path, folder: Folder) -> None:
    """Write a file into a folder of a bucket under its own name. Raises OSError."""
    num_bytes = path.stat().st_size
    if num_bytes <= REMOTE_PART_BYTES:
        folder.put(path.name, path.read_bytes())
        return

    def upload_in_parts() -> None:
        """Upload the file from its beginning. Called again after an error that may pass."""
        num_part_bytes = part_bytes(num_bytes)
        sink = folder.sink(path.name, num_bytes)
        try:
            with path.open("rb") as file:
                for offset in range(0, num_bytes, num_part_bytes):
                    sink.write_at(offset, [memoryview(file.read(num_part_bytes))])
            sink.close()
        except BaseException:
            sink.abandon()
            raise

    retry_transient_errors(upload_in_parts)


def download(folder: Folder, path: Path) -> None:
    """Read the file of the path's name in a folder of a bucket. It appears whole. Raises OSError."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    source = folder.source(path.name)
    with unfinished.open("wb") as file:
        copy_range(source, file, 0, source.num_bytes)
    source.close()
    unfinished.rename(path)


def download_without_tokens(folder: Folder, path: Path) -> None:
    """Read a token file in a folder of a bucket, except for its tokens, in whose place the file has a hole.

    A token file is a zip archive. Its tokens come first and take most of its bytes; its directory is at its end.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    source = folder.source(path.name)
    start = max(0, source.num_bytes - END_BYTES)
    with unfinished.open("wb") as file:
        file.write(ZIP_SIGNATURE)
        file.truncate(source.num_bytes)
        copy_range(source, file, start, source.num_bytes)

    # Other members than the tokens may begin before what was read. A damaged file is noticed by its reader.
    first_needed = start
    with contextlib.suppress(zipfile.BadZipFile), zipfile.ZipFile(unfinished) as archive:
        offsets = [member.header_offset for member in archive.infolist() if member.filename != "tokens.npy"]
        first_needed = max(0, min(offsets, default=start))
    if first_needed < start:
        with unfinished.open("r+b") as file:
            copy_range(source, file, first_needed, start)
    source.close()
    unfinished.rename(path)


def copy_range(source: Source, file: BinaryIO, start: int, end: int) -> None:
    """Copy the bytes [start, end) of a file in a bucket to the same place in a file of this machine."""
    file.seek(start)
    for offset in range(start, end, REMOTE_PART_BYTES):
        buffer = bytearray(min(REMOTE_PART_BYTES, end - offset))
        source.read_into(offset, [buffer])
        file.write(buffer)


def put_unless_present(folder: Folder, name: str, data: bytes, max_bytes: int) -> bytes:
    """Write a small file unless there is one of this name, and return what is there in the end. Raises OSError.

    Of several machines that do this at the same time, all get the content of the same one.
    """

    def put_and_read() -> bytes:
        """Try once. If the answer to a put was lost, the next attempt finds the file."""
        with contextlib.suppress(FileExistsError):
            folder.put(name, data, only_if_new=True)
        return folder.read(name, max_bytes)

    return retry_transient_errors(put_and_read)
