"""The folders and remotes from which the data of a recorded run is read again. Imports no torch.

The run may be somebody else's, so a folder that it recorded is read but never written to. If the folder has all shards
uncompressed, they are read there. Otherwise they are copied or downloaded to a new folder. A remote that the run
recorded is used only if the user permits it.

`find_data_locations` finds what the user has named on the command line; `DataLocations.choose_for` then chooses.
"""

import json
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmfoundry_lite.bounded import MAX_INDEX_BYTES, TooLargeError, read_at_most
from llmfoundry_lite.config.data_schema import StreamConfig, TextDatasetConfig
from llmfoundry_lite.config.data_stages import own_streams, streams_of_stages
from llmfoundry_lite.config.layers import find_value
from llmfoundry_lite.data.index_files import search_local_folder
from llmfoundry_lite.errors import DataError

BLOCK = "train_loader.dataset"
WHOLE = "whole"
"""State of a folder that has all shards uncompressed."""
COMPRESSED = "compressed"
"""State of a folder that has all shards, but some only compressed."""


@dataclass(kw_only=True)
class DataLocations:
    """Chooses for each stream of a recorded run the folder and the remote to read it from."""

    download_folder: Path
    """The folder for copies and downloads, created when first needed. Each source gets a subfolder."""
    named_by_user: Collection[str]
    """Folders and remotes that the user has named on the command line, and thereby trusts."""
    uses_recorded_remote: bool = False
    """Whether the user permits downloads from remotes that the run recorded."""
    advice: str = ""
    """How to permit recorded remotes, as the end of an error; empty if the command has no option for it."""
    _chosen: dict[StreamConfig, StreamConfig] = field(default_factory=dict)
    """Recorded folder, remote and split -> chosen folder and remote. Streams with the same source share a download."""

    def choose_for(self, dataset: TextDatasetConfig) -> TextDatasetConfig:
        """Return a copy of a recorded data set's configuration, with the folders and remotes to read it from.

        Raises DataError for a stream whose data is not on this machine and may not be downloaded.
        """
        # The streams of the stages.
        stages = []
        for index, (stage, streams) in enumerate(zip(dataset.stages, streams_of_stages(dataset), strict=False)):
            chosen_streams = {}
            for name in stage.streams:
                key = f"{BLOCK}.stages[{index}].streams.{name}"
                chosen_streams[name] = self._choose_for_stream(key, streams[name], dataset)
            stages.append(replace(stage, streams=chosen_streams))
        dataset = replace(dataset, stages=stages)

        # A stage without streams of its own reads those of the data set. If there is no such stage, they are not
        # needed.
        is_every_stage_complete = bool(stages) and all(stage.streams for stage in stages)
        if is_every_stage_complete:
            return dataset
        if dataset.streams:
            chosen_streams = {}
            for name, stream in dataset.streams.items():
                chosen_streams[name] = self._choose_for_stream(f"{BLOCK}.streams.{name}", stream, dataset)
            return replace(dataset, streams=chosen_streams)
        chosen = self._choose_for_stream(BLOCK, own_streams(dataset)[""], dataset)
        return replace(dataset, local=chosen.local, remote=chosen.remote)

    def _choose_for_stream(self, key: str, stream: StreamConfig, dataset: TextDatasetConfig) -> StreamConfig:
        """Return a copy of a stream with its chosen folder and remote. `key` is its key in the YAML, for errors."""
        split = dataset.split if stream.split is None else stream.split
        recorded = StreamConfig(local=stream.local, remote=stream.remote, split=split)
        if recorded not in self._chosen:
            new_folder = str(self.download_folder / str(len(self._chosen)))
            local, remote = self._choose_source(key, recorded, new_folder)
            self._chosen[recorded] = StreamConfig(local=local, remote=remote)
        chosen = self._chosen[recorded]
        return replace(stream, local=chosen.local, remote=chosen.remote)

    def _choose_source(self, key: str, recorded: StreamConfig, new_folder: str) -> tuple[str | None, str | None]:
        """Choose the folder and the remote to read a stream from. Returns both; no remote means no download.

        The first of these is chosen: a remote that the user has named, the recorded folder if it has the data, the
        recorded remote if the user permits that. Downloads go into `new_folder`. Raises DataError if there is no
        choice; `key` is the stream's key in the YAML, for the error.
        """
        # A remote that the user has named.
        if recorded.remote and recorded.remote in self.named_by_user:
            local = recorded.local if recorded.local in self.named_by_user else new_folder
            return local, recorded.remote

        # The recorded folder.
        folder = Path(recorded.local, recorded.split or "") if recorded.local else None
        state = shard_state(folder) if folder else None
        if state == WHOLE:
            return recorded.local, None
        if state == COMPRESSED:  # decompressing would write into the run's folder, so copy from it
            return new_folder, recorded.local

        # The recorded remote.
        if recorded.remote and self.uses_recorded_remote:
            return new_folder, recorded.remote

        # There is no choice.
        if recorded.remote:
            remedy = f"{key}.remote={recorded.remote} to fetch it from where the run did{self.advice}"
        else:
            remedy = f"{key}.remote=URL to fetch it"
        raise DataError(
            f"{key}: {folder or 'no folder'} does not hold its data here; give {key}.local=FOLDER, or {remedy}"
        )


def shard_state(folder: Path) -> str | None:
    """Check which shard files a folder has. Returns WHOLE, COMPRESSED, or None if a shard or the index is missing.

    WHOLE means that all uncompressed files are there, and COMPRESSED that all compressed ones are, but not all of the
    others. The files are not read. Raises DataError for an index that cannot be read.
    """
    # Read the names of the files from the index, or from the indexes of the folders below.
    if not folder.is_dir():
        return None
    found = search_local_folder(folder)
    has_all_indexes = found.names and not found.without_index
    if not has_all_indexes:
        return None
    raw_paths: list[Path] = []
    compressed_paths: list[Path] = []
    for name in found.names:
        index = folder / name
        try:
            content = json.loads(read_at_most(index, MAX_INDEX_BYTES, "an index"), object_hook=_shard_file_names)
            shards = content["shards"]
            raw_paths += [index.parent / raw_name for raw_name, _ in shards]
            compressed_paths += [index.parent / compressed_name for _, compressed_name in shards if compressed_name]
        except TooLargeError:
            raise
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"{index} is not an MDS index ({error!r}); give the data of the run") from None

    # Look for them.
    if all(map(os.path.isfile, raw_paths)):
        return WHOLE
    is_every_shard_compressed = len(compressed_paths) == len(raw_paths)
    if is_every_shard_compressed and all(map(os.path.isfile, compressed_paths)):
        return COMPRESSED
    return None


def _shard_file_names(record: dict[str, Any]) -> Any:
    """Convert a shard's record in an index to the names of its uncompressed and compressed file (or None).

    The JSON parser calls this for every object; those that are no shard's record are returned unchanged. A large index
    would take gigabytes as dictionaries.
    """
    if "raw_data" not in record:
        return record
    compressed = record["zip_data"]
    compressed_name = compressed["basename"] if compressed else None
    return record["raw_data"]["basename"], compressed_name


def find_data_locations(values: dict[str, Any], keys: Collection[str]) -> set[str]:
    """Find all values of `local` and `remote` at or below some dotted keys of a configuration.

    With the keys that a user gave on the command line, these are the folders and remotes that the user has named.
    """
    locations = set()
    for key in keys:
        _, value = find_value(values, key)
        locations.update(_find_locations(value, name=key.rpartition(".")[2]))
    return locations


def _find_locations(value: Any, name: str) -> Iterator[str]:
    """Yield all values of `local` and `remote` in a part of a configuration, whose own key is `name`."""
    if isinstance(value, str) and name in ("local", "remote"):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _find_locations(item, name)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _find_locations(item, key)
