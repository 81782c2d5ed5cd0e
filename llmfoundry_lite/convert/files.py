"""Folders of Hugging Face models: written whole or not at all, read without running any code."""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from llmfoundry_lite import bounded
from llmfoundry_lite.data.tokenizer import (
    CONFIG_FILE,
    GENERATION_FILE,
    TOKENIZER_FILE,
    Tokenizer,
    read_config,
    read_folder,
    read_generation_settings,
    token_text,
)
from llmfoundry_lite.errors import ExportError
from llmfoundry_lite.files import lock_folder, sync, sync_folder

T = TypeVar("T")

VOCABULARY_FILES = (
    *("tokenizer.json", "added_tokens.json", "special_tokens_map.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model"),
)
"""Files of a tokenizer that are copied unchanged; `data/tokenizer.py` reads the others."""
ADAPTER_FILE = "adapter_config.json"
LISTING = "export.json"
"""Name of the file with the hash of every other file: it tells an export from a folder of somebody else."""


@contextlib.contextmanager
def published(folder: Path) -> Iterator[Path]:
    """Yield a draft folder, then sync it and move it to `folder`, replacing an earlier export. Raises ExportError."""
    folder = folder.resolve()
    with contextlib.suppress(FileNotFoundError):  # the working folder may be gone
        if (here := Path.cwd()) in folder.parents:
            folder = folder.relative_to(here)
    # A fixed name, so that the next export restores or removes what a killed one leaves behind.
    work = folder.parent / f".{folder.name}.export"
    draft, replaced = work / "draft", work / "replaced"
    try:
        with _alone_in(work, folder):
            if not folder.exists() and _find_foreign(replaced) is None:  # killed between the renames below
                replaced.rename(folder)
            is_taken = folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))
            if is_taken and (foreign := _find_foreign(folder)) is not None:
                raise ExportError(
                    f"{folder}: exists and is not an earlier export: {foreign}; give another folder or remove it"
                )
            for leftover in (draft, replaced):
                shutil.rmtree(leftover, ignore_errors=True)
            draft.mkdir()
            yield draft
            write_json(draft / LISTING, {"files": {path.name: _hash(path) for path in sorted(draft.iterdir())}})
            sync_folder(draft)
            if folder.exists():
                folder.rename(replaced)
            draft.rename(folder)
            sync(folder.parent)
    except (OSError, SafetensorError) as error:
        raise ExportError(f"{folder}: cannot be written: {getattr(error, 'strerror', None) or error}") from error


@contextlib.contextmanager
def _alone_in(work: Path, folder: Path) -> Iterator[None]:
    """Exclude other exports, if the file system can lock, and restore `folder` after a failure. Raises ExportError."""
    while True:
        work.mkdir(parents=True, exist_ok=True)
        try:
            lock = lock_folder(work)
        except BlockingIOError:
            raise ExportError(
                f"{folder}: another export is writing it; wait for that one, or give another folder"
            ) from None
        with contextlib.suppress(FileNotFoundError):  # removed by another export that has just ended
            if os.path.samestat(os.fstat(lock), os.stat(work)):
                break
        os.close(lock)
    try:
        yield
    finally:
        if not folder.exists() and (work / "replaced").exists():
            (work / "replaced").rename(folder)
        shutil.rmtree(work, ignore_errors=True)
        os.close(lock)


def _find_foreign(folder: Path) -> str | None:
    """Describe the first file in `folder` that no export has written; None for an unchanged export."""
    try:
        hashes = bounded.read_json(folder / LISTING, "a listing")["files"]
        names = {path.name for path in folder.iterdir()} - {LISTING}
        for name in sorted(names | set(hashes)):
            path = folder / name
            if name not in names:
                return f"{name} is missing"
            if path.is_symlink() or not path.is_file() or hashes.get(name) != _hash(path):
                return f"{name} is not what an export wrote"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"it has no {LISTING} that can be read"
    return None


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def write_weights(
    sizes_bytes: Mapping[str, int], build_tensor: Callable[[str], torch.Tensor], folder: Path, max_shard_bytes: int
) -> None:
    """Write one file, or several and an index; only one shard's tensors are in memory at a time."""
    shards: list[list[str]] = [[]]
    for name, size_bytes in sizes_bytes.items():
        if shards[-1] and sum(sizes_bytes[other] for other in shards[-1]) + size_bytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(name)
    weight_map = {}
    for i, names in enumerate(shards):
        file = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        write_tensors({name: build_tensor(name) for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes_bytes.values())}, "weight_map": weight_map}
        write_json(folder / "model.safetensors.index.json", index)


def write_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write one file with the umask's permissions; safetensors itself would let only the owner read it.

    Raises OSError.
    """
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        if number := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
        raise
    path.chmod(mode)


def read_weights(
    folder: Path, read_pickle: Callable[[Path], dict[str, torch.Tensor]] | None
) -> dict[str, torch.Tensor]:
    """Read all tensors of a folder, from safetensors or else from pickles. Raises ExportError."""
    check_no_adapter(folder)
    files = _weight_files(folder, "model", "safetensors")
    if files is not None:
        return _read_all(
            folder, files, lambda path: _read_safetensors(path, lambda reader, name: reader.get_tensor(name))
        )
    pickles = [p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in sorted(folder.glob(pattern))]
    if not pickles:
        raise ExportError(f"{folder}: no model.safetensors; expected the folder of a Hugging Face model")
    if read_pickle is None:
        raise ExportError(
            f"{folder}: {pickles[0]} is a pickle, which can run code when it is read; if you trust where it comes "
            "from, add --trust-pickle"
        )
    files = _weight_files(folder, "pytorch_model", "bin")
    if files is None:
        raise ExportError(f"{folder}: holds {pickles[0]}; expected model.safetensors or pytorch_model.bin")
    return _read_all(folder, files, read_pickle)


def check_no_adapter(folder: Path) -> None:
    """Raise ExportError for a folder with an adapter, which transformers would load and this package does not."""
    if (folder / ADAPTER_FILE).is_file():
        raise ExportError(
            f"{folder}: {ADAPTER_FILE} says that an adapter belongs to the model, which is not read here; merge it "
            "into the weights (merge_and_unload() of peft), or remove it"
        )


def read_dtypes(folder: Path) -> dict[str, str]:
    """Read the dtype of each tensor as safetensors names it, such as BF16; empty where there are only pickles.

    Raises ExportError as `read_weights` does.
    """
    files = _weight_files(folder, "model", "safetensors") or []
    return _read_all(
        folder, files, lambda path: _read_safetensors(path, lambda reader, name: reader.get_slice(name).get_dtype())
    )


def _read_all(folder: Path, files: list[str], read: Callable[[Path], dict[str, T]]) -> dict[str, T]:
    """Read the tensors of all files. Raises ExportError for a tensor that two files have."""
    state: dict[str, T] = {}
    for file in files:
        content = read(folder / file)
        if repeated := sorted(state.keys() & content.keys()):
            raise ExportError(
                f"{folder}: {repeated[0]} is in {file} and in another file; it cannot be told which counts"
            )
        state |= content
    return state


def _weight_files(folder: Path, stem: str, suffix: str) -> list[str] | None:
    """List the one file, or the files of an index; None if there is neither. Raises ExportError if one is missing."""
    index, single = folder / f"{stem}.{suffix}.index.json", f"{stem}.{suffix}"
    if not index.is_file():
        return [single] if (folder / single).is_file() else None
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ExportError(f"{index}: weight_map gives no file for each tensor; copy the file again from its source")
    files = sorted(set(weight_map.values()))
    if (folder / single).is_file() and single not in files:
        raise ExportError(
            f"{folder}: holds {single} and {index.name}, which names other files; remove those that are not the model's"
        )
    for file in files:
        if Path(file).name != file or not (folder / file).is_file():
            raise ExportError(f"{folder}: {file}, named in {index.name}, is not in the folder")
    return files


def _read_safetensors(path: Path, read: Callable[[Any, str], T]) -> dict[str, T]:
    try:
        with safe_open(path, framework="pt") as reader:
            return {name: read(reader, name) for name in reader.keys()}  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        raise ExportError(f"{path}: damaged: {error}") from None


def write_tokenizer(folder: Path, draft: Path, model_max_length: int) -> dict[str, Any]:
    """Copy a tokenizer, with generation_config.json. Returns the ids of its special tokens, for config.json.

    Ids in generation_config.json take precedence over the tokenizer's own, because a chat model may stop at several.
    Raises ExportError, or DataError for files that cannot be read.
    """
    files = read_folder(folder)
    config, generation = read_config(files, str(folder)), read_generation_settings(files, str(folder))
    for name in VOCABULARY_FILES:
        if (folder / name).is_file():
            content = bounded.read_at_most(folder / name, bounded.MAX_TOKENIZER_BYTES, "a tokenizer")
            (draft / name).write_bytes(content)
    # Without the length, evaluation harnesses take 2,048 tokens for MPT.
    write_json(draft / CONFIG_FILE, config | {"model_max_length": model_max_length})
    ids, special = _ids_of(folder / TOKENIZER_FILE), {}
    for kind in ("bos_token", "eos_token", "pad_token"):
        found = generation.get(f"{kind}_id", ids.get(token_text(config.get(kind))))
        special |= {} if found is None else {f"{kind}_id": found}
    if special or generation:
        write_json(draft / GENERATION_FILE, special | generation)
    return special


def write_for_plain_class(draft: Path, tokenizer: Tokenizer) -> None:
    """Rewrite a draft's tokenizer for the class of transformers that takes tokenizer.json as it is."""
    files = tokenizer.files()
    settings = read_json(draft / CONFIG_FILE)
    (draft / TOKENIZER_FILE).write_bytes(files[TOKENIZER_FILE])
    write_json(
        draft / CONFIG_FILE, {**json.loads(files[CONFIG_FILE]), "model_max_length": settings["model_max_length"]}
    )


def _ids_of(path: Path) -> dict[str | None, int]:
    """Return token -> id, as a tokenizer.json has them; empty without the file."""
    if not path.is_file():
        return {}
    tokenizer = read_json(path)
    vocab = tokenizer.get("model", {}).get("vocab", {})
    # Unigram models keep [token, score] pairs in the order of their ids.
    ids = {token: i for i, (token, _) in enumerate(vocab)} if isinstance(vocab, list) else dict(vocab)
    return ids | {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ExportError."""
    try:
        value = bounded.read_json(path, "a JSON file")
    except (OSError, ValueError) as error:
        raise ExportError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ExportError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
