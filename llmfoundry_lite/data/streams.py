"""The folders and downloads that a data set is read from: what is wrong with them, told before they are opened.

Owns the description of a stream, and bringing its files: nothing that is downloaded gets its name before it has been
checked against `index.json`, and nothing is removed before the remote has shown that it holds it too. Leaves which
shard is needed or given up, and when, to `shard_cache.py`; the transport itself is Stream's.
"""

import filecmp
import hashlib
import os
import re
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from streaming import Stream
from streaming.base.compression import decompress
from streaming.base.format import FileInfo, Reader

from llmfoundry_lite.data.agreement import one_line
from llmfoundry_lite.data.shard_table import ShardTable
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.files import open_regular

INDEX = "index.json"
PART = ".part"
"""Ends the names of files that are on their way."""
PART_NAME = re.compile(r".+\.\d+\.[0-9a-f]{8}\.part(\.tmp)?", re.DOTALL)
"""Names that `_part_name` makes. The transport adds `.tmp`. A user's own `film.part` does not match."""
NOT_IN_A_REMOTE = "?#\n\r\t"
"""The transport cuts an URL at the first two and leaves out the others: it would read another folder."""


class CheckedStream(Stream):
    """A stream that checks what arrives, and can share its folder with other nodes: files appear whole, at once."""

    name = ""
    """What the user calls it; empty if it is the only one."""

    def fetch_index(self) -> Path:
        """Path of `index.json`, which with a remote is the remote's, bit for bit. Raises DataError."""
        folder = folder_of(self)
        path = Path(folder, INDEX)
        if not self.remote:
            return path
        is_url = "://" in self.remote and not self.remote.startswith("file://")
        if wrong := next((sign for sign in NOT_IN_A_REMOTE if is_url and sign in self.remote), None):
            raise DataError(f"remote {self.remote!r}: {wrong!r} is not possible in its URL; give the data another name")
        os.makedirs(folder, exist_ok=True)
        _remove_left_parts(folder)
        try:
            arrived = self._download_file(INDEX, _part_name(INDEX))
        except Exception as error:
            raise DataError(
                f"cannot get {INDEX} of {self.remote}: {one_line(error)} (if {folder} is complete, leave `remote` out)"
            ) from error
        names = (name for _, _, names in os.walk(folder) for name in names)
        has_shards = any(".mds" in name and not name.endswith(PART) for name in names)
        if not path.exists() or not has_shards:
            if has_shards:
                os.remove(arrived)
                raise DataError(f"{folder} holds shards without the {INDEX} they belong to; remove the folder")
            os.replace(arrived, path)
        elif filecmp.cmp(arrived, path, shallow=False):
            os.remove(arrived)
        else:
            os.remove(arrived)
            raise DataError(
                f"{path} is not the {INDEX} of {self.remote}, so old and new samples would be mixed: the data has been "
                f"prepared again, or {folder} holds something else; remove the folder, or give another `local`"
            )
        return path

    def find_present(self, table: ShardTable, stream: int) -> NDArray[np.bool_]:
        """Which shards are in the folder [num_shards], raw or compressed; without a remote, all are said to be."""
        names, zips = table.of_stream(stream, "raw_name"), table.of_stream(stream, "zip_name")
        if not self.remote:
            return np.ones(len(names), bool)
        folder = folder_of(self)
        found = [
            os.path.relpath(os.path.join(place, file), folder).encode()
            for place, _, files in os.walk(folder)
            for file in files
            if file != INDEX and not file.endswith(PART)
        ]
        if not found:
            return np.zeros(len(names), bool)
        return np.isin(names, np.array(found)) | np.isin(zips, np.array(found))

    def prepare_shard(self, shard: Reader, again: bool = False) -> bool:
        """Bring and decompress a shard, unless it is there, or `again`: whether all of it came from the remote.

        Raises DataError, or what the transport raises; then the files that were there are there still.
        """
        has_come = True
        for raw, zipped in shard.file_pairs:
            raw_path = os.path.join(folder_of(self), raw.basename)
            if os.path.isfile(raw_path) and not again:
                has_come = False
                continue
            if zipped is None:
                self._bring(raw)
                continue
            zip_path = os.path.join(folder_of(self), zipped.basename)
            damage = find_damage(zip_path, zipped) if os.path.isfile(zip_path) else "it is not there"
            if damage and not self.remote:
                raise DataError(f"{zip_path} is damaged: {damage}; {remedy(self)}")
            if damage:
                self._bring(zipped)
            has_come = has_come and bool(damage)
            with open(zip_path, "rb") as file:
                content = decompress(shard.compression, file.read())  # pyright: ignore[reportArgumentType]
            part = os.path.join(folder_of(self), _part_name(raw.basename))
            with open(part, "wb") as file:
                file.write(content)
            os.replace(part, raw_path)
            if self.remote and not self.keep_zip and not self.why_only_copy(shard, has_come=bool(damage)):
                _remove(zip_path)
        return has_come

    def _bring(self, info: FileInfo) -> None:
        os.replace(self._download(info), os.path.join(folder_of(self), info.basename))

    def _download(self, info: FileInfo) -> str:
        """Where a file of the remote lies now, whole; one that arrives damaged is asked for a second time."""
        damage = ""
        for _ in range(2):
            arrived = self._download_file(info.basename, _part_name(info.basename))
            if not (damage := find_damage(arrived, info)):
                return arrived
            os.remove(arrived)
        raise DataError(f"it arrives damaged, twice: {damage}")

    def why_only_copy(self, shard: Reader, has_come: bool) -> str:
        """Why the files of a shard may be the only ones; empty if the remote has them too.

        A shard that has come from the remote in this launch is there. Any other is compared with the remote, which
        takes a download unless the remote is a folder.
        """
        assert self.remote, "the only copy of a shard is never removed"
        for raw, zipped in shard.file_pairs:
            info = zipped or raw
            if reason := self._why_not_there(info, has_come):
                return reason
        return ""

    def _why_not_there(self, info: FileInfo, has_come: bool) -> str:
        assert self.remote
        there = os.path.join(self.remote, self.split or "", info.basename)
        if _path_of(self.remote) is not None:
            here = os.path.join(folder_of(self), info.basename)
            if not os.path.isfile(there) or os.path.getsize(there) != info.bytes:
                return f"{there} is not there or not whole"
            if os.path.realpath(there) == os.path.realpath(here) and not os.path.islink(here):
                return f"{there} leads to {here}"
            return "" if has_come or not (damage := find_damage(there, info)) else f"{there} is damaged: {damage}"
        if has_come:
            return ""
        try:
            _remove(self._download(info))
        except Exception as error:
            return f"{there} cannot be compared with it ({one_line(error)})"
        return ""

    def check_elsewhere(self, shard: Reader, has_come: bool) -> None:
        """Raise DataError where removing a shard could lose it."""
        if reason := self.why_only_copy(shard, has_come):
            raise DataError(
                f"{reason}, so {folder_of(self)} may hold the only copy, and nothing is removed; complete the remote, "
                "or leave `remote` out"
            )

    def remove_shard(self, shard: Reader) -> None:
        """Only after `check_elsewhere`."""
        for info in (info for pair in shard.file_pairs for info in pair if info is not None):
            _remove(os.path.join(folder_of(self), info.basename))


def build_streams(described: Mapping[str, Mapping[str, Any]]) -> list[CheckedStream]:
    """The streams, after checking what StreamingDataset would report late, obscurely or not at all."""
    streams, names_by_folder = [], {}
    for name, description in described.items():
        where = f"stream {name}: " if name else ""
        local, remote = description.get("local"), description.get("remote")
        if not local:
            raise DataError(f"{where}`local` is not set; name the folder that {remote or 'the data'} is to be kept in")
        if remote and (path := _path_of(remote)) is not None:
            split = description.get("split") or ""
            is_here = are_one_place(os.path.join(path, split), os.path.join(local, split))
            description = {**description, "remote": None if is_here else path}
        try:
            stream = CheckedStream(**description)
        except (TypeError, ValueError) as error:
            raise DataError(f"{where}{one_line(error)}") from error
        stream.name = name
        if not stream.remote:
            _check_local_folder(folder_of(stream), where)
        other = names_by_folder.setdefault(os.path.realpath(folder_of(stream)), name)
        if other != name:
            raise DataError(f"streams {other} and {name} both use the folder {folder_of(stream)}; give each its own")
        streams.append(stream)
    return streams


def _path_of(remote: str) -> str | None:
    """The path of a remote that is a folder of this machine; None for other transports."""
    path = remote.removeprefix("file://")
    return None if "://" in path or path.startswith("dbfs:") else path


def are_one_place(one: str, other: str) -> bool:
    """Whether two paths lead to the same folder, by links, slashes or mounts of any kind."""
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    with suppress(OSError):
        return os.path.samefile(one, other)
    return False


def _check_local_folder(folder: str, where: str) -> None:
    if not os.path.isdir(folder):
        raise DataError(
            f"{where}there is no data folder {folder}; make it with `llmfoundry-lite data prepare --out …`, "
            "or correct `local` and `split`, or set `remote` to download it"
        )
    if not os.path.exists(os.path.join(folder, INDEX)):
        splits = sorted(entry.name for entry in os.scandir(folder) if os.path.exists(f"{entry.path}/{INDEX}"))
        raise DataError(
            f"{where}{folder} has no index.json, so it is not a finished MDS data set; "
            + (f"set `split` to one of: {', '.join(splits)}" if splits else "prepare the data again")
        )


def find_damage(path: str, info: FileInfo) -> str:
    """What a file has otherwise than `index.json` says; empty if nothing. Raises FileNotFoundError."""
    with open(path, "rb", opener=open_regular) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes != info.bytes:
            return f"it has {num_bytes} bytes, {info.bytes} according to its index.json"
        for name, expected in info.hashes.items():
            digest = getattr(xxhash, name)() if name in xxhash.algorithms_available else hashlib.new(name)
            while chunk := file.read(1 << 20):
                digest.update(chunk)
            if digest.hexdigest() != expected:
                return f"its {name} is not the one in index.json"
            file.seek(0)
    return ""


def _part_name(name: str) -> str:
    """Nobody else downloads under this name, nor has: the transport takes what it finds there for a download."""
    return f"{name}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}{PART}"


def _remove_left_parts(folder: str) -> None:
    """Downloads that ended in their middle: nothing has been written to them for a day."""
    for entry in os.scandir(folder):
        if PART_NAME.fullmatch(entry.name):
            with suppress(FileNotFoundError):
                if entry.stat().st_mtime < time.time() - 24 * 3600:
                    os.remove(entry.path)


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):  # another node that shares the folder may be faster
        os.remove(path)


def folder_of(stream: Stream) -> str:
    return os.path.join(stream.local, stream.split) if stream.split else stream.local


def remedy(stream: Stream) -> str:
    return "delete it, and it is downloaded again" if stream.remote else "prepare the data again"
