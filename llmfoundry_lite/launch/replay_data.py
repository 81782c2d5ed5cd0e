"""The places that a replay reads a run's data from. No torch.

A recorded folder is read and never written: it is used in place where it holds whole shards. All else is copied or
fetched into the replay's own folder, and from a recorded remote only if the user says so.
"""

import json
import os
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmfoundry_lite.config.data_schema import StreamConfig, TextDatasetConfig
from llmfoundry_lite.config.data_stages import own_streams, streams_of_stages
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.files import open_regular

BLOCK = "train_loader.dataset"
WHOLE, PACKED = "whole", "packed"


@dataclass(kw_only=True)
class Places:
    cache: Path
    """The replay's own folder for data."""
    given: Collection[str]
    """Folders and remotes that stand on the command line."""
    uses_recorded_remote: bool
    _found: dict[tuple[Any, ...], tuple[str, str | None]] = field(default_factory=dict)

    def fill_in(self, dataset: TextDatasetConfig, values: dict[str, Any]) -> None:
        """Replace the folders and remotes in `values`, which `dataset` was made of. Raises DataError."""
        stages = streams_of_stages(dataset)
        is_own_used = not dataset.stages or not all(stage.streams for stage in dataset.stages)
        for name, stream in own_streams(dataset).items() if is_own_used else ():
            block = values["streams"][name] if name else values
            key = f"{BLOCK}.streams.{name}" if name else BLOCK
            block["local"], block["remote"] = self._find(key, stream, dataset.split)
        for number, stage in enumerate(dataset.stages):
            for name in stage.streams:
                stream = stages[number][name]  # with what it takes from the stages before
                local, remote = self._find(f"{BLOCK}.stages[{number}].streams.{name}", stream, dataset.split)
                values["stages"][number]["streams"][name] |= {"local": local, "remote": remote, "split": stream.split}

    def _find(self, key: str, stream: StreamConfig, split: str | None) -> tuple[str, str | None]:
        """Return the folder and the remote to read a stream with."""
        place = (stream.local, stream.remote, stream.split or split or "")
        if place not in self._found:
            own = str(self.cache / str(len(self._found)))
            self._found[place] = self._choose(key, stream, split, own)
        return self._found[place]

    def _choose(self, key: str, stream: StreamConfig, split: str | None, own: str) -> tuple[str, str | None]:
        local, remote = stream.local, stream.remote
        if remote in self.given:
            return (local if local and local in self.given else own), remote
        state = state_of(Path(local, stream.split or split or "")) if local else None
        if local and state is not None:
            return (local, None) if state == WHOLE else (own, local)
        if remote and self.uses_recorded_remote:
            return own, remote
        there = f", and the run fetched it from {remote}" if remote else ""
        fetch = "; or fetch it from there with --use-recorded-remote" if remote else ""
        raise DataError(
            f"replay: {key}: {local or 'no folder'} does not hold its data here{there}; give {key}.local=…{fetch}"
        )


def state_of(folder: Path) -> str | None:
    """Return whether a folder holds all its shards, whole or packed; None if it does not. Raises DataError."""
    index = folder / "index.json"
    if not index.is_file():
        return None
    try:
        with open(index, encoding="utf-8", opener=open_regular) as file:
            shards = json.load(file)["shards"]
        raw = [folder / shard["raw_data"]["basename"] for shard in shards]
        packed = [folder / shard["zip_data"]["basename"] for shard in shards if shard.get("zip_data")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"replay: {index} is not an MDS index ({error!r}); give the run's own data") from None
    if all(map(os.path.isfile, raw)):
        return WHOLE
    return PACKED if len(packed) == len(raw) and all(map(os.path.isfile, packed)) else None
