"""The folders and downloads that a data set is read from: what is wrong with them, told before they are opened."""

import json
import os
from collections.abc import Mapping
from typing import Any

from streaming import Stream

from llmfoundry_lite.errors import DataError


def build_streams(described: Mapping[str, Mapping[str, Any]]) -> list[Stream]:
    """StreamingDataset's streams, after checking what it would report late, obscurely or not at all."""
    streams, names_by_folder = [], {}
    for name, description in described.items():
        where = f"stream {name}: " if name else ""
        local, remote = description.get("local"), description.get("remote")
        if not local:
            raise DataError(f"{where}`local` is not set; name the folder that {remote or 'the data'} is to be kept in")
        if remote == local:
            description = {**description, "remote": None}
        try:
            stream = Stream(**description)
        except (TypeError, ValueError) as error:
            raise DataError(f"{where}{one_line(error)}") from error
        if not stream.remote:
            _check_local_folder(folder_of(stream), where)
        other = names_by_folder.setdefault(os.path.realpath(folder_of(stream)), name)
        if other != name:
            raise DataError(f"streams {other} and {name} both use the folder {folder_of(stream)}; give each its own")
        streams.append(stream)
    return streams


def _check_local_folder(folder: str, where: str) -> None:
    index = os.path.join(folder, "index.json")
    if not os.path.isdir(folder):
        raise DataError(
            f"{where}there is no data folder {folder}; make it with `llmfoundry-lite data prepare --out …`, "
            "or correct `local` and `split`, or set `remote` to download it"
        )
    if not os.path.exists(index):
        splits = sorted(entry.name for entry in os.scandir(folder) if os.path.exists(f"{entry.path}/index.json"))
        raise DataError(
            f"{where}{folder} has no index.json, so it is not a finished MDS data set; "
            + (f"set `split` to one of: {', '.join(splits)}" if splits else "prepare the data again")
        )
    try:
        with open(index, encoding="utf-8") as file:
            content = json.load(file)
    except ValueError as error:
        raise DataError(f"{where}{index} is not JSON ({one_line(error)}); prepare the data again") from error
    if not isinstance(content, dict) or content.get("version") != 2 or not content.get("shards"):
        raise DataError(f"{where}{index} lists no shards of MDS version 2; prepare the data again")


def folder_of(stream: Stream) -> str:
    return os.path.join(stream.local, stream.split) if stream.split else stream.local


def remedy(stream: Stream) -> str:
    return "delete it, and it is downloaded again" if stream.remote else "prepare the data again"


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
