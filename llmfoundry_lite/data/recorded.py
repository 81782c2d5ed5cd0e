"""The places that the data of a recorded run is read from. No torch.

The run may be anybody's, so a folder that it recorded is read and never written. It is used where it lies if it holds
whole shards. Otherwise data are copied or downloaded into our own folder, from a recorded remote only if the user
permits it.

`locations_at` finds what the user has named on the command line; `DataLocations.choose_for` then chooses.
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
from llmfoundry_lite.config.layers import get
from llmfoundry_lite.errors import DataError

BLOCK = "train_loader.dataset"
WHOLE = "whole"
"""State of a folder whose raw shards are all there."""
PACKED = "packed"
"""State of a folder whose shards are all there, but some only compressed."""


@dataclass(kw_only=True)
class DataLocations:
    """Chooses for each stream of a recorded run the folder and the remote to read it from."""

    download_folder: Path
    """The folder for copies and downloads, which is created for the first one. Each source has a subfolder."""
    named_by_user: Collection[str]
    """Folders and remotes that the user has named. They are used as in training."""
    uses_recorded_remote: bool = False
    """Whether the user permits downloads from remotes that the run recorded."""
    advice: str = ""
    """Sentence on how to permit recorded remotes; empty where that is impossible."""
    _chosen: dict[StreamConfig, StreamConfig] = field(default_factory=dict)
    """Recorded folder, remote and split -> chosen folder and remote, so that streams of one source share a download."""

    def choose_for(self, dataset: TextDatasetConfig) -> TextDatasetConfig:
        """Return the data set with the folders and remotes to read it from.

        Raises DataError for a stream whose data is not here, and must not be downloaded.
        """
        stages = []
        for number, (stage, streams) in enumerate(zip(dataset.stages, streams_of_stages(dataset), strict=False)):
            chosen_streams = {}
            for name in stage.streams:
                key = f"{BLOCK}.stages[{number}].streams.{name}"
                chosen_streams[name] = self._choose_for_stream(key, streams[name], dataset)
            stages.append(replace(stage, streams=chosen_streams))
        dataset = replace(dataset, stages=stages)

        # A stage without streams reads those of the data set, which are not looked for if no stage does.
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
        """Return a stream with its chosen folder and remote. `key` is that of its block, for errors."""
        split = dataset.split if stream.split is None else stream.split
        recorded = StreamConfig(local=stream.local, remote=stream.remote, split=split)
        if recorded not in self._chosen:
            new_folder = str(self.download_folder / str(len(self._chosen)))
            local, remote = self._choose(key, recorded, new_folder)
            self._chosen[recorded] = StreamConfig(local=local, remote=remote)
        chosen = self._chosen[recorded]
        return replace(stream, local=chosen.local, remote=chosen.remote)

    def _choose(self, key: str, recorded: StreamConfig, new_folder: str) -> tuple[str | None, str | None]:
        """Return the folder and the remote for a recorded source; downloads go into `new_folder`. Raises DataError.

        In this order: a remote that the user has named, the recorded folder, the recorded remote.
        """
        if recorded.remote and recorded.remote in self.named_by_user:
            local = recorded.local if recorded.local in self.named_by_user else new_folder
            return local, recorded.remote

        folder = Path(recorded.local, recorded.split or "") if recorded.local else None
        state = shard_state(folder) if folder else None
        if state == WHOLE:
            return recorded.local, None
        if state == PACKED:  # unpacking would write into the run's folder, so it serves as the remote
            return new_folder, recorded.local
        if recorded.remote and self.uses_recorded_remote:
            return new_folder, recorded.remote

        if recorded.remote:
            remedy = f"{key}.remote={recorded.remote} to fetch it from where the run did{self.advice}"
        else:
            remedy = f"{key}.remote=URL to fetch it"
        raise DataError(
            f"{key}: {folder or 'no folder'} does not hold its data here; give {key}.local=FOLDER, or {remedy}"
        )


def shard_state(folder: Path) -> str | None:
    """Return how a folder holds its shards: WHOLE, PACKED, or None if a shard or the index is missing.

    Raises DataError for an index that cannot be read.
    """
    index = folder / "index.json"
    if not index.is_file():
        return None
    try:
        content = json.loads(read_at_most(index, MAX_INDEX_BYTES, "an index"), object_hook=_keep_names)
        shards = content["shards"]
        raw_paths = [folder / raw_name for raw_name, _ in shards]
        packed_paths = [folder / packed_name for _, packed_name in shards if packed_name]
    except TooLargeError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{index} is not an MDS index ({error!r}); give the data of the run") from None

    if all(map(os.path.isfile, raw_paths)):
        return WHOLE
    is_every_shard_compressed = len(packed_paths) == len(raw_paths)
    if is_every_shard_compressed and all(map(os.path.isfile, packed_paths)):
        return PACKED
    return None


def _keep_names(record: dict[str, Any]) -> Any:
    """Turn a shard's record into the names of its raw and its packed file; the second is None without compression.

    The JSON parser calls this for every object, because a large index takes gigabytes as dictionaries.
    """
    if "raw_data" not in record:
        return record
    packed = record["zip_data"]
    return record["raw_data"]["basename"], packed and packed["basename"]


def locations_at(values: dict[str, Any], keys: Collection[str]) -> set[str]:
    """Return the folders and remotes of data in a configuration that stand at or below some keys.

    With the keys that a user gave on the command line, these are the ones that the user has named.
    """
    locations = set()
    for key in keys:
        _, value = get(values, key)
        locations.update(_find_locations(value, name=key.rpartition(".")[2]))
    return locations


def _find_locations(value: Any, name: str) -> Iterator[str]:
    """Yield the values of all keys `local` and `remote` in a value of a configuration, whose own key is `name`."""
    if isinstance(value, str) and name in ("local", "remote"):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _find_locations(item, name)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _find_locations(item, key)
