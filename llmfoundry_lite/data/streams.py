"""The folders and remotes of a data set: checks, downloads and removal of their files.

A download gets its final name only after it has been checked against `index.json`. Only copies of the remote are ever
removed. `cache.py` decides which shard is downloaded or removed, and when. `index_files.py` finds the indexes, and
`shard_table.py` reads them.

`build_stages` makes the folders of a configuration. A `ShardFolder` then fetches its index files, and shards
one by one.
"""

import filecmp
import hashlib
import os
import re
import secrets
import socket
import time
from concurrent.futures import ThreadPoolExecutor
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

from llmfoundry_lite import companions
from llmfoundry_lite.bounded import unpack_at_most
from llmfoundry_lite.config.data_schema import StreamConfig, TextDatasetConfig
from llmfoundry_lite.config.data_stages import streams_of_stages
from llmfoundry_lite.data.index_files import (
    INDEX,
    LISTINGS_AT_ONCE,
    FoundIndexes,
    IndexFiles,
    choose_indexes,
    find_indexes,
    find_local_indexes,
    search_local_folder,
)
from llmfoundry_lite.errors import DataError, UserError, is_transient, one_line, remember_url_secrets
from llmfoundry_lite.files import open_regular, write_atomically

ORIGIN = "downloaded-from.txt"
"""File that identifies the remote of a folder. It is written only if the folder had no shards before its first
download."""
PART = ".part"
"""Suffix of files that are being downloaded."""
PART_NAME = re.compile(r".+\.\d+\.[0-9a-f]{8}\.part(\.tmp)?", re.DOTALL)
"""Names that `make_download_name` returns, to which the transport may add `.tmp`. A user's `film.part` does not
match."""
MAX_PART_AGE_SECONDS = 24 * 3600
"""Time without a write after which a download counts as interrupted."""
NOT_IN_A_REMOTE = "?#\n\r\t"
"""Characters that a remote's URL must not have. The transport cuts the URL at the first two and drops the others, so it
would read another folder."""
READ_BYTES = 1 << 20
"""Size of the pieces in which a file is read and hashed."""


class ShardFolder:
    """Folder of a stream's shards, and the remote from which its files are downloaded, if there is one.

    Files are renamed into place when they are complete, so several nodes may share the folder.
    """

    def __init__(self, name: str, stream: Stream) -> None:
        """Take the folder and remote of a stream.

        `name` is the name of the stream in the configuration; empty if the data set has no `streams`. From now on,
        credentials in the remote's URL are hidden in every error and log of this process.
        """
        self.name = name
        self.stream = stream
        self.remote = stream.remote
        remember_url_secrets(self.remote or "")
        self.path = _folder_of_split(stream.local, stream.split)
        self._downloader = CloudDownloader.get(stream.remote)

    @property
    def remedy(self) -> str:
        """Advice on a damaged shard, with which an error ends."""
        return "delete it, and it is downloaded again" if self.remote else "prepare the data again"

    @property
    def _digest_of_remote(self) -> str:
        """Content of the file `ORIGIN`. It is a hash, because the remote's URL may contain a password."""
        return xxhash.xxh3_128_hexdigest(f"{self.remote} {self.stream.split}".encode())

    @cached_property
    def holds_only_downloads(self) -> bool:
        """Whether all shards in the folder have been downloaded from the remote, by this launch or an earlier one.

        Only then may this launch remove compressed files that it has not downloaded itself. The answer is in the file
        `ORIGIN`, which `fetch_indexes` writes, so call that first.
        """
        if not self.remote:
            return False
        with suppress(OSError), open(os.path.join(self.path, ORIGIN), "rb", opener=open_regular) as file:
            return file.read(64) == self._digest_of_remote.encode()
        return False

    def fetch_indexes(self) -> IndexFiles:
        """Find the index files of the folder, after downloading the remote's if there is a remote.

        Raises DataError if there is none or the remote cannot be read, and if the folder holds shards that belong to
        another index.
        """
        if not self.remote:
            return self._find_own_indexes()
        _check_url(self.remote)
        _remove_interrupted_downloads(self.path)
        downloads = self._download_indexes()
        names = tuple(downloads)

        holds_shards = any(".mds" in name for name in self._list_files())
        if not holds_shards:
            for stale in search_local_folder(self.path).names:
                os.remove(os.path.join(self.path, stale))
            for name, downloaded in downloads.items():
                os.replace(downloaded, os.path.join(self.path, name))
            write_atomically(Path(self.path, ORIGIN), self._digest_of_remote)
            return IndexFiles(folder=Path(self.path), names=names)

        # The folder keeps its shards, so they must be those of the remote's indexes.
        own_names = search_local_folder(self.path).names
        differing = [name for name in names if not _is_same_file(os.path.join(self.path, name), downloads[name])]
        differing += sorted({*own_names} - {*names})
        for downloaded in downloads.values():
            os.remove(downloaded)
        if not own_names:
            raise DataError(f"{self.path} holds shards without the {INDEX} they belong to; remove the folder")
        if differing:
            raise DataError(
                f"{os.path.join(self.path, differing[0])} is not the {INDEX} of {self.remote}, so old and new samples "
                f"would be mixed: the data has been prepared again, or {self.path} holds something else; remove the "
                "folder, or give another `local`"
            )
        return IndexFiles(folder=Path(self.path), names=names)

    def _find_own_indexes(self) -> IndexFiles:
        """Find the index files of a folder without a remote. Raises DataError, which names the stream."""
        try:
            return find_local_indexes(self.path)
        except DataError as error:
            error_prefix = f"stream {self.name}: " if self.name else ""
            raise DataError(f"{error_prefix}{error}") from error

    def _download_indexes(self) -> dict[str, str]:
        """Download the index of the remote, or those of the folders below it if it has none.

        Returns the path of each download, by the file's path relative to the remote. Raises DataError.
        """
        assert self.remote
        try:
            return {INDEX: self.download(INDEX)}
        except Exception as error:
            found = self._search_remote(error)
            if not found.names or found.names == [INDEX]:
                raise self._cannot_get_index(error) from error

        names = choose_indexes(found, self.remote)
        try:
            with ThreadPoolExecutor(LISTINGS_AT_ONCE, thread_name_prefix="fetch-index") as pool:
                return dict(zip(names, pool.map(self.download, names), strict=True))
        except Exception as error:
            raise self._cannot_get_index(error) from error

    def _cannot_get_index(self, error: Exception) -> DataError:
        """Return the error for an index that cannot be downloaded."""
        return DataError(
            f"cannot get {INDEX} of {self.remote}: {one_line(error)} (if {self.path} is complete, leave `remote` out)"
        )

    def _search_remote(self, error: Exception) -> FoundIndexes:
        """Search the remote for index files in folders below it. `error` is that of the remote's own index.

        Returns an empty result if the remote does not answer, if it cannot be listed, or if that needs a companion
        which is not installed.
        """
        assert self.remote
        found = FoundIndexes()
        if is_transient(error):
            return found
        with suppress(OSError, UserError):
            remote_folder = _local_path_of(self.remote)
            if remote_folder is not None:
                return search_local_folder(os.path.join(remote_folder, self.stream.split))
            list_remote_folder = companions.load_if_installed("llmfoundry_engines.remote_folders:list_remote_folder")
            if list_remote_folder is not None:
                return find_indexes(list_remote_folder(os.path.join(self.remote, self.stream.split)))
        return found

    def find_present_shards(self, rows: NDArray) -> NDArray[np.bool_]:
        """Find out which shards are in the folder, compressed or not. Only file names are compared.

        `rows` are the stream's rows of a `ShardTable`. Returns a flag for each of them [num_shards]. Without a remote,
        all shards count as present, because a missing one cannot be downloaded anyway.
        """
        if not self.remote:
            return np.ones(len(rows), bool)
        names = [name.encode() for name in self._list_files()]
        files = np.array(names or [b""])  # an empty list would get a number type
        has_raw = np.isin(rows["raw_name"], files)
        has_zip = np.isin(rows["zip_name"], files) & (rows["zip_name"] != b"")
        return has_raw | has_zip

    def _list_files(self) -> list[str]:
        """List the files at any depth, relative to the folder, except the index and unfinished downloads."""
        names = []
        for folder, _, files in os.walk(self.path):
            for file in files:
                if file != INDEX and not file.endswith(PART):
                    names.append(os.path.relpath(os.path.join(folder, file), self.path))
        return names

    def fetch_shard(self, reader: MDSReader, *, replace: bool = False) -> bool:
        """Download and decompress a shard, unless its uncompressed file is in the folder.

        With `replace`, an uncompressed file in the folder is replaced, because it is damaged. `reader` describes the
        shard's files. Returns whether a file was downloaded; a compressed file in the folder is only decompressed.
        Raises DataError, or the error of the transport, and then leaves earlier files as they were.
        """
        raw = reader.raw_data
        compressed = reader.zip_data
        raw_path = os.path.join(self.path, raw.basename)
        if os.path.isfile(raw_path) and not replace:
            return False
        if compressed is None:
            os.replace(self._download_checked(raw), raw_path)
            return True

        # Get the compressed file, unless it is there and sound.
        compressed_path = os.path.join(self.path, compressed.basename)
        damage = "it is not there"
        if os.path.isfile(compressed_path):
            damage = find_damage(compressed_path, compressed)
        if damage and not self.remote:
            raise DataError(f"{compressed_path} is damaged: {damage}; {self.remedy}")
        if damage:
            os.replace(self._download_checked(compressed), compressed_path)

        # Decompress it under a temporary name.
        unpacked_path = os.path.join(self.path, make_download_name(raw.basename))
        unpack_shard(compressed_path, reader, unpacked_path)
        os.replace(unpacked_path, raw_path)

        # Remove the compressed file, if it can be downloaded again and is not to be kept.
        was_downloaded = bool(damage)
        is_copy = was_downloaded or self.holds_only_downloads
        if self.remote and not self.stream.keep_zip and is_copy:
            _remove_file(compressed_path)
        return was_downloaded

    def download(self, name: str) -> str:
        """Download a file of the remote into the folder, under a temporary name. Returns its path.

        `name` is relative to the remote. The content is not checked. Tries as often as the stream's `download_retry`
        says, and then raises the error of the transport.
        """
        path = os.path.join(self.path, make_download_name(name))
        remote = os.path.join(self.remote, self.stream.split, name) if self.remote else None

        def download_once() -> None:
            self._downloader.download(remote, path, self.stream.download_timeout)

        with_retries = retry(clean_up_fn=self._downloader.clean_up, num_attempts=self.stream.download_retry)
        with_retries(download_once)()
        return path

    def _download_checked(self, info: FileInfo) -> str:
        """Download a file under a temporary name, and check its size and hashes. Returns its path.

        A file that arrives damaged is downloaded a second time. Raises DataError if that is damaged too.
        """
        damage = ""
        for _ in range(2):
            path = self.download(info.basename)
            damage = find_damage(path, info)
            if not damage:
                return path
            os.remove(path)
        raise DataError(f"it arrives damaged, twice: {damage}")

    def remote_has(self, reader: MDSReader) -> bool:
        """Return whether the remote still has a shard, so that the copy in this folder may be removed.

        If the remote is a folder of this machine, it must have a file of the right size that is not a link to the copy.
        A bucket is assumed to have the shard, and is not queried.
        """
        remote_folder = _local_path_of(self.remote) if self.remote else None
        if remote_folder is None:
            return True
        for info in filter(None, (reader.zip_data, reader.raw_data)):
            remote_path = os.path.join(remote_folder, self.stream.split, info.basename)
            path = os.path.join(self.path, info.basename)
            is_complete = os.path.isfile(remote_path) and os.path.getsize(remote_path) == info.bytes
            if is_complete and not are_same_location(remote_path, path):
                return True
        return False

    def remove_shard(self, reader: MDSReader) -> None:
        """Remove the files of a shard, which must be copies of the remote's."""
        assert self.remote, "the only copy of a shard is never removed"
        for info in filter(None, (reader.raw_data, reader.zip_data)):
            _remove_file(os.path.join(self.path, info.basename))


def build_folders(config: TextDatasetConfig) -> list[ShardFolder]:
    """Build the folders of all streams of a data set, or its only folder if it has no streams. Raises DataError."""
    return build_stages(config)[0]


def build_stages(config: TextDatasetConfig) -> tuple[list[ShardFolder], list[dict[int, Stream]]]:
    """Build the folders that a data set reads, and the streams of each of its stages.

    Returns the folders, each once however many stages read it; and for each stage its streams, by the index of their
    folder. If stage 0 reads `web`, and stage 1 `web` and `code`, the folders are those of `web` and `code`, and the
    streams are `[{0: web}, {0: web, 1: code}]`. The two streams named `web` are two objects, because each stage has its
    own proportions. Raises DataError for a configuration that contradicts itself, and for missing local data.
    """
    _check_has_one_source(config)
    folders: list[ShardFolder] = []
    streams_of_all_stages: list[dict[int, Stream]] = []
    for stream_configs in streams_of_stages(config):
        streams: dict[int, Stream] = {}
        for name, stream_config in stream_configs.items():
            stream = _build_stream(config, stream_config, error_prefix=f"stream {name}: " if name else "")
            folder = ShardFolder(name, stream)

            # Find the folder among those of earlier streams and stages, or add it.
            index = _find_folder(folders, folder.path)
            if index is None:
                index = len(folders)
                folders.append(folder)
            elif index in streams:
                raise DataError(
                    f"streams {folders[index].name} and {name} both use the folder {folder.path}; give each its own"
                )
            elif folders[index].remote != folder.remote:
                raise DataError(
                    f"stream {name}: its folder {folder.path} is filled from {folder.remote} in one stage and from "
                    f"{folders[index].remote} in another; give one remote"
                )
            streams[index] = stream
        streams_of_all_stages.append(streams)
    return folders, streams_of_all_stages


def _check_has_one_source(config: TextDatasetConfig) -> None:
    """Raise DataError if a data set has both `streams` and a folder, or needs one of them and has neither."""
    has_folder = bool(config.local or config.remote)
    has_source = bool(config.streams) or has_folder
    # A stage without streams reads those of the data set.
    needs_source = not config.stages or not all(stage.streams for stage in config.stages)
    has_both = bool(config.streams) and has_folder
    if has_both or (needs_source and not has_source):
        raise DataError(
            "a data set is either `streams` or one folder (`local`, and `remote` if it is to be downloaded); "
            + ("both are set" if has_source else "neither is set")
        )


def _find_folder(folders: list[ShardFolder], path: str) -> int | None:
    """Return the index of the folder that `path` refers to, after resolving links; None if there is none."""
    real_path = os.path.realpath(path)
    for index, folder in enumerate(folders):
        if os.path.realpath(folder.path) == real_path:
            return index
    return None


def _build_stream(config: TextDatasetConfig, stream_config: StreamConfig, error_prefix: str) -> Stream:
    """Build mosaicml-streaming's `Stream`, with the options of the stream, or else those of the data set.

    A remote that is the same folder as `local` is ignored, because there is nothing to download. Raises DataError for
    options that are not valid, and if there is neither a remote nor data in `local`. Errors begin with `error_prefix`.
    """
    if not stream_config.local:
        data = stream_config.remote or "the data"
        raise DataError(f"{error_prefix}`local` is not set; name the folder that {data} is to be kept in")

    # Ignore a remote that is the folder itself.
    split = config.split if stream_config.split is None else stream_config.split
    remote = stream_config.remote
    remote_folder = _local_path_of(remote) if remote else None
    if remote_folder is not None:
        local_of_split = _folder_of_split(stream_config.local, split)
        remote_of_split = _folder_of_split(remote_folder, split)
        remote = None if are_same_location(local_of_split, remote_of_split) else remote_folder

    # Take the stream's options, or the data set's. Only streams have weights.
    options = {}
    for name in ("download_retry", "download_timeout", "validate_hash", "keep_zip"):
        stream_option = getattr(stream_config, name)
        options[name] = getattr(config, name) if stream_option is None else stream_option
    for name in ("proportion", "repeat", "choose"):
        options[name] = getattr(stream_config, name)

    try:
        stream = Stream(local=stream_config.local, remote=remote, split=split, **options)
    except (TypeError, ValueError) as error:
        raise DataError(f"{error_prefix}{one_line(error)}") from error
    if not stream.remote:
        _check_local_folder(_folder_of_split(stream.local, stream.split), error_prefix)
    return stream


def _folder_of_split(folder: str, split: str | None) -> str:
    """Return the folder of a split, such as `data/train`; the folder itself without a split."""
    return os.path.join(folder, split) if split else folder


def are_same_location(path: str, other: str) -> bool:
    """Return whether two paths refer to the same file or folder, after resolving links and mounts."""
    if os.path.realpath(path) == os.path.realpath(other):
        return True
    with suppress(OSError):  # one of them does not exist
        return os.path.samefile(path, other)
    return False


def _local_path_of(remote: str) -> str | None:
    """Return the path of a remote that is a folder of this machine; None for a remote with another transport."""
    path = remote.removeprefix("file://")
    if "://" in path or path.startswith("dbfs:"):
        return None
    return path


def _check_url(remote: str) -> None:
    """Raise DataError for a remote's URL with a character that the transport would misread."""
    is_url = "://" in remote and not remote.startswith("file://")
    if not is_url:
        return
    for character in NOT_IN_A_REMOTE:
        if character in remote:
            raise DataError(f"remote {remote!r}: {character!r} is not possible in its URL; give the data another name")


def _check_local_folder(folder: str, error_prefix: str) -> None:
    """Raise DataError unless there is a folder. Its index files are looked for when it is opened."""
    if not os.path.isdir(folder):
        raise DataError(
            f"{error_prefix}there is no data folder {folder}; make it with `llmfoundry-lite data prepare --out …`, "
            "or correct `local` and `split`, or set `remote` to download it"
        )


def _is_same_file(path: str, other: str) -> bool:
    """Return whether both files exist and have the same content."""
    return os.path.isfile(path) and filecmp.cmp(path, other, shallow=False)


def find_damage(path: str, info: FileInfo) -> str:
    """Compare a file with its size and hashes in `index.json`. Returns how it differs, or an empty string.

    An example is "it has 12 bytes, 16 according to its index.json". The file is read once for each hash; without any
    hash, only its size is compared. Raises FileNotFoundError.
    """
    with open(path, "rb", opener=open_regular) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes != info.bytes:
            return f"it has {num_bytes} bytes, {info.bytes} according to its index.json"

        for name, expected in info.hashes.items():
            if name in xxhash.algorithms_available:
                digest = getattr(xxhash, name)()
            else:
                digest = hashlib.new(name)
            while chunk := file.read(READ_BYTES):
                digest.update(chunk)
            if digest.hexdigest() != expected:
                return f"its {name} is not the one in index.json"
            file.seek(0)
    return ""


def unpack_shard(compressed_path: str | Path, reader: MDSReader, path: str | Path) -> None:
    """Decompress a shard into a new file at `path`, and compare it with `index.json`, as `reader` has read it.

    Raises DataError if the result is not the shard, and OSError if the compressed file is damaged.
    """
    assert reader.compression
    unpack_at_most(compressed_path, reader.compression, path, reader.raw_data.bytes)
    damage = find_damage(str(path), reader.raw_data)
    if damage:
        os.remove(path)
        raise DataError(f"{compressed_path} unpacks to something else: {damage}")


def make_download_name(name: str) -> str:
    """Return a temporary name, never used before, for a download of the file `name`.

    It must be new, because the transport takes an existing file for a finished download. It contains the host name, the
    process id and random digits, because several processes may download the same file into a shared folder:
    `shard.00000.mds.node-1.4711.0a1b2c3d.part`.
    """
    return f"{name}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}{PART}"


def _remove_interrupted_downloads(folder: str) -> None:
    """Remove temporary files of downloads that have not been written to for `MAX_PART_AGE_SECONDS`."""
    for entry in os.scandir(folder):
        if PART_NAME.fullmatch(entry.name):
            with suppress(FileNotFoundError):  # another node may have removed it
                if entry.stat().st_mtime < time.time() - MAX_PART_AGE_SECONDS:
                    os.remove(entry.path)


def _remove_file(path: str) -> None:
    """Remove a file, if it still exists."""
    with suppress(FileNotFoundError):  # another node may have removed it
        os.remove(path)
