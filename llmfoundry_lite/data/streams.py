"""The folders and remotes of a data set: checks, downloads and removal of their files.

A download gets its final name only after it has been checked against `index.json`. Only copies of the remote are ever
removed. `cache.py` decides which shard is brought or removed, and when.
"""

import filecmp
import hashlib
import os
import re
import secrets
import socket
import time
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray
from streaming import Stream
from streaming.base.format import FileInfo
from streaming.base.format.mds import MDSReader
from streaming.base.storage import CloudDownloader
from streaming.base.util import retry

from llmfoundry_lite.bounded import unpack_at_most
from llmfoundry_lite.config.data_schema import StreamConfig, TextDatasetConfig
from llmfoundry_lite.config.data_stages import streams_of_stages
from llmfoundry_lite.errors import DataError, learn_credentials, one_line
from llmfoundry_lite.files import open_regular, write_atomically

INDEX = "index.json"
ORIGIN = "downloaded-from.txt"
"""File that names the remote of a folder that held no shard before its first download."""
PART = ".part"
"""Suffix of files that are being downloaded."""
PART_NAME = re.compile(r".+\.\d+\.[0-9a-f]{8}\.part(\.tmp)?", re.DOTALL)
"""Names that `part_name` makes, to which the transport adds `.tmp`. A user's own `film.part` does not match."""
NOT_IN_A_REMOTE = "?#\n\r\t"
"""Characters refused in a URL: the transport cuts it at the first two and drops the others, so reads another folder."""


class ShardFolder:
    """Folder of a stream, and the remote that its files come from. Files appear whole, so nodes may share it."""

    def __init__(self, name: str, stream: Stream) -> None:
        """Take the folder of a stream. `name` is the user's; empty for the only stream."""
        self.name = name
        self.stream = stream
        self.remote = stream.remote
        learn_credentials(self.remote or "")
        self.path = os.path.join(stream.local, stream.split) if stream.split else stream.local
        self._downloader = CloudDownloader.get(stream.remote)

    @property
    def remedy(self) -> str:
        return "delete it, and it is downloaded again" if self.remote else "prepare the data again"

    @property
    def _origin(self) -> str:
        """Hash of the remote, because its URL may have a password in it."""
        return xxhash.xxh3_128_hexdigest(f"{self.remote} {self.stream.split}".encode())

    @cached_property
    def has_downloads_alone(self) -> bool:
        """Whether all shards here have come from the remote, in this launch or an earlier one."""
        with suppress(OSError), open(os.path.join(self.path, ORIGIN), "rb", opener=open_regular) as file:
            return bool(self.remote) and file.read(64) == self._origin.encode()
        return False

    def fetch_index(self) -> Path:
        """Return the path of `index.json`, downloaded if there is a remote. Raises DataError if another one is here."""
        path = Path(self.path, INDEX)
        if not self.remote:
            return path
        is_url = "://" in self.remote and not self.remote.startswith("file://")
        if wrong := next((sign for sign in NOT_IN_A_REMOTE if is_url and sign in self.remote), None):
            raise DataError(f"remote {self.remote!r}: {wrong!r} is not possible in its URL; give the data another name")
        _remove_left_parts(self.path)
        try:
            arrived = self.download(INDEX)
        except Exception as error:
            raise DataError(
                f"cannot get {INDEX} of {self.remote}: {one_line(error)} "
                f"(if {self.path} is complete, leave `remote` out)"
            ) from error
        if not any(".mds" in name for name in self._list_files()):
            os.replace(arrived, path)
            write_atomically(Path(self.path, ORIGIN), self._origin)
            return path
        is_same = path.exists() and filecmp.cmp(arrived, path, shallow=False)
        os.remove(arrived)
        if not path.exists():
            raise DataError(f"{self.path} holds shards without the {INDEX} they belong to; remove the folder")
        if not is_same:
            raise DataError(
                f"{path} is not the {INDEX} of {self.remote}, so old and new samples would be mixed: the data has been "
                f"prepared again, or {self.path} holds something else; remove the folder, or give another `local`"
            )
        return path

    def find_present(self, rows: NDArray) -> NDArray[np.bool_]:
        """Find the shards in the folder, raw or compressed [num_shards]. Without a remote, all count as present."""
        if not self.remote:
            return np.ones(len(rows), bool)
        found = np.array([name.encode() for name in self._list_files()] or [b""])
        return np.isin(rows["raw_name"], found) | (np.isin(rows["zip_name"], found) & (rows["zip_name"] != b""))

    def _list_files(self) -> list[str]:
        return [
            os.path.relpath(os.path.join(place, file), self.path)
            for place, _, files in os.walk(self.path)
            for file in files
            if file != INDEX and not file.endswith(PART)
        ]

    def bring(self, reader: MDSReader, *, again: bool = False) -> bool:
        """Bring and decompress a shard, unless it is there, or `again`. Return whether it came from the remote.

        Raises DataError, or the transport's error, and then leaves earlier files as they were.
        """
        raw, zipped = reader.raw_data, reader.zip_data
        raw_path = os.path.join(self.path, raw.basename)
        if os.path.isfile(raw_path) and not again:
            return False
        if zipped is None:
            os.replace(self._download_whole(raw), raw_path)
            return True
        zip_path = os.path.join(self.path, zipped.basename)
        damage = find_damage(zip_path, zipped) if os.path.isfile(zip_path) else "it is not there"
        if damage and not self.remote:
            raise DataError(f"{zip_path} is damaged: {damage}; {self.remedy}")
        if damage:
            os.replace(self._download_whole(zipped), zip_path)
        part = os.path.join(self.path, part_name(raw.basename))
        unpack_shard(zip_path, reader, part)
        os.replace(part, raw_path)
        if self.remote and not self.stream.keep_zip and (damage or self.has_downloads_alone):
            _remove(zip_path)
        return bool(damage)

    def download(self, name: str) -> str:
        """Download a file of the remote under a new name, and return its path."""
        path = os.path.join(self.path, part_name(name))
        remote = os.path.join(self.remote, self.stream.split, name) if self.remote else None
        with_retries = retry(clean_up_fn=self._downloader.clean_up, num_attempts=self.stream.download_retry)
        with_retries(lambda: self._downloader.download(remote, path, self.stream.download_timeout))()
        return path

    def _download_whole(self, info: FileInfo) -> str:
        """Download a file and check it; one that arrives damaged is downloaded a second time."""
        damage = ""
        for _ in range(2):
            arrived = self.download(info.basename)
            if not (damage := find_damage(arrived, info)):
                return arrived
            os.remove(arrived)
        raise DataError(f"it arrives damaged, twice: {damage}")

    def remote_has(self, reader: MDSReader) -> bool:
        """Return whether a remote folder still has the shard, judged by its size, and not as a link to the copy here.

        A bucket is not asked; the answer is True.
        """
        remote = _path_of(self.remote) if self.remote else None
        if remote is None:
            return True
        for info in filter(None, (reader.zip_data, reader.raw_data)):
            there, here = os.path.join(remote, self.stream.split, info.basename), os.path.join(self.path, info.basename)
            if os.path.isfile(there) and os.path.getsize(there) == info.bytes and not are_one_place(there, here):
                return True
        return False

    def remove(self, reader: MDSReader) -> None:
        """Remove a shard, which must be a copy of the remote's."""
        assert self.remote, "the only copy of a shard is never removed"
        for info in filter(None, (reader.raw_data, reader.zip_data)):
            _remove(os.path.join(self.path, info.basename))


def build_folders(config: TextDatasetConfig) -> list[ShardFolder]:
    """Build the folders of a data set's streams, or its one folder. Raises DataError."""
    return build_stages(config)[0]


def build_stages(config: TextDatasetConfig) -> tuple[list[ShardFolder], list[dict[int, Stream]]]:
    """Build the folders of all stages, and for each stage folder index -> stream. Raises DataError.

    A folder appears once, however many stages read it.
    """
    has_own = bool(config.streams or config.local or config.remote)
    is_own_used = not all(stage.streams for stage in config.stages) or not config.stages
    if (is_own_used and not has_own) or (config.streams and (config.local or config.remote)):
        raise DataError(
            "a data set is either `streams` or one folder (`local`, and `remote` if it is to be downloaded); "
            + ("both are set" if has_own else "neither is set")
        )
    folders: list[ShardFolder] = []
    stages: list[dict[int, Stream]] = []
    for streams in streams_of_stages(config):
        stages.append({})
        for name, described in streams.items():
            stream = _build_stream(config, described, where=f"stream {name}: " if name else "")
            folder = ShardFolder(name, stream)
            place = os.path.realpath(folder.path)
            index = next((i for i, other in enumerate(folders) if os.path.realpath(other.path) == place), len(folders))
            if index in stages[-1]:
                raise DataError(
                    f"streams {folders[index].name} and {name} both use the folder {folder.path}; give each its own"
                )
            if index == len(folders):
                folders.append(folder)
            elif folders[index].remote != folder.remote:
                raise DataError(
                    f"stream {name}: its folder {folder.path} is filled from {folder.remote} in one stage and from "
                    f"{folders[index].remote} in another; give one remote"
                )
            stages[-1][index] = stream
    return folders, stages


def _build_stream(config: TextDatasetConfig, described: StreamConfig, where: str) -> Stream:
    """Build mosaicml-streaming's object for a stream, with the data set's defaults. Raises DataError."""
    if not described.local:
        raise DataError(
            f"{where}`local` is not set; name the folder that {described.remote or 'the data'} is to be kept in"
        )
    remote, split = described.remote, config.split if described.split is None else described.split
    if remote and (path := _path_of(remote)) is not None:
        here, there = os.path.join(described.local, split or ""), os.path.join(path, split or "")
        remote = None if are_one_place(here, there) else path
    options = {
        name: getattr(config, name) if getattr(described, name) is None else getattr(described, name)
        for name in ("download_retry", "download_timeout", "validate_hash", "keep_zip")
    }
    options |= {name: getattr(described, name) for name in ("proportion", "repeat", "choose")}
    try:
        stream = Stream(local=described.local, remote=remote, split=split, **options)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}{one_line(error)}") from error
    if not stream.remote:
        _check_local_folder(os.path.join(stream.local, stream.split) if stream.split else stream.local, where)
    return stream


def are_one_place(one: str, other: str) -> bool:
    """Return whether two paths lead to the same folder, through any links, slashes or mounts."""
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    with suppress(OSError):
        return os.path.samefile(one, other)
    return False


def _path_of(remote: str) -> str | None:
    """Return the path of a remote that is a folder of this machine; None for other transports."""
    path = remote.removeprefix("file://")
    return None if "://" in path or path.startswith("dbfs:") else path


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
    """Describe how a file differs from `index.json`; empty if it does not. Raises FileNotFoundError."""
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


def unpack_shard(zip_path: str | Path, reader: MDSReader, path: str | Path) -> None:
    """Unpack a shard into a new file and check it by `index.json`. Raises DataError, or OSError for damage."""
    assert reader.compression
    unpack_at_most(zip_path, reader.compression, path, reader.raw_data.bytes)
    if damage := find_damage(str(path), reader.raw_data):
        os.remove(path)
        raise DataError(f"{zip_path} unpacks to something else: {damage}")


def part_name(name: str) -> str:
    """Make a new name for a download, because the transport takes an existing file for a finished download."""
    return f"{name}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}{PART}"


def _remove_left_parts(folder: str) -> None:
    """Remove interrupted downloads, which have not been written to for a day."""
    for entry in os.scandir(folder):
        if PART_NAME.fullmatch(entry.name):
            with suppress(FileNotFoundError):
                if entry.stat().st_mtime < time.time() - 24 * 3600:
                    os.remove(entry.path)


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):  # another node may have removed it
        os.remove(path)
