"""The places that the data of a recorded run is read from. No torch.

The run may be anybody's, so a folder that it recorded is read and never written. It is used where it lies if it holds
whole shards. Otherwise data are copied or downloaded into our own folder, from a recorded remote only if the user
permits it.
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
WHOLE, PACKED = "whole", "packed"


@dataclass(kw_only=True)
class Places:
    own: Path
    """The folder for copies and downloads, which is created for the first one."""
    given: Collection[str]
    """Folders and remotes that the user has named. They are used as in training."""
    uses_recorded_remote: bool = False
    advice: str = ""
    """Sentence on how to permit recorded remotes; empty where that is impossible."""
    _found: dict[StreamConfig, StreamConfig] = field(default_factory=dict)

    def place(self, dataset: TextDatasetConfig) -> TextDatasetConfig:
        """Return the data set with the folders and remotes to read it from. Raises DataError."""
        stages, has_own = [], False
        for number, (stage, streams) in enumerate(zip(dataset.stages, streams_of_stages(dataset), strict=False)):
            key = f"{BLOCK}.stages[{number}].streams"
            has_own |= not stage.streams
            placed = {name: self._find(f"{key}.{name}", streams[name], dataset) for name in stage.streams}
            stages.append(replace(stage, streams=placed))
        dataset = replace(dataset, stages=stages)
        if stages and not has_own:
            return dataset
        if dataset.streams:
            own = {name: self._find(f"{BLOCK}.streams.{name}", one, dataset) for name, one in dataset.streams.items()}
            return replace(dataset, streams=own)
        single = self._find(BLOCK, own_streams(dataset)[""], dataset)
        return replace(dataset, local=single.local, remote=single.remote)

    def _find(self, key: str, stream: StreamConfig, dataset: TextDatasetConfig) -> StreamConfig:
        split = dataset.split if stream.split is None else stream.split
        place = StreamConfig(local=stream.local, remote=stream.remote, split=split)
        if place not in self._found:
            local, remote = self._choose(key, place, str(self.own / str(len(self._found))))
            self._found[place] = StreamConfig(local=local, remote=remote)
        return replace(stream, local=self._found[place].local, remote=self._found[place].remote)

    def _choose(self, key: str, place: StreamConfig, own: str) -> tuple[str | None, str | None]:
        local, remote = place.local, place.remote
        if remote and remote in self.given:
            return (local if local in self.given else own), remote
        folder = Path(local, place.split or "") if local else None
        state = state_of(folder) if folder else None
        if state is not None:
            return (local, None) if state == WHOLE else (own, local)
        if remote and self.uses_recorded_remote:
            return own, remote
        fetch = f"{key}.remote={remote} to fetch it from where the run did{self.advice}"
        fetch = fetch if remote else f"{key}.remote=URL to fetch it"
        raise DataError(
            f"{key}: {folder or 'no folder'} does not hold its data here; give {key}.local=FOLDER, or {fetch}"
        )


def state_of(folder: Path) -> str | None:
    """Return how a folder holds its shards, raw or packed; None if it lacks one.

    Raises DataError for an index that cannot be read.
    """
    index = folder / "index.json"
    if not index.is_file():
        return None
    try:
        shards = json.loads(read_at_most(index, MAX_INDEX_BYTES, "an index"), object_hook=_names_of_shard)["shards"]
        raw = [folder / name for name, _ in shards]
        packed = [folder / name for _, name in shards if name]
    except TooLargeError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{index} is not an MDS index ({error!r}); give the data of the run") from None
    if all(map(os.path.isfile, raw)):
        return WHOLE
    return PACKED if len(packed) == len(raw) and all(map(os.path.isfile, packed)) else None


def _names_of_shard(record: dict[str, Any]) -> Any:
    """Keep only the names of a shard's files, because a large index takes gigabytes as dictionaries."""
    if "raw_data" not in record:
        return record
    return record["raw_data"]["basename"], record["zip_data"] and record["zip_data"]["basename"]


def given_places(values: dict[str, Any], keys: Collection[str]) -> set[str]:
    """Return the folders and remotes of data in a configuration that stand at or below the keys that a user gave."""
    return {text for key in keys for text in _places_in(get(values, key)[1], key.rpartition(".")[2])}


def _places_in(value: Any, name: str) -> Iterator[str]:
    if isinstance(value, str) and name in ("local", "remote"):
        yield value
    for inner in value if isinstance(value, list) else ():
        yield from _places_in(inner, name)
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield from _places_in(inner, key)
