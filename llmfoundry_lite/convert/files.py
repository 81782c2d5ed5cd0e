"""Reads and writes folders of Hugging Face models: weights, tokenizer and JSON files.

A folder is written as a whole or not at all (`published`), and is read without running any of its code. The content of
config.json, and how tensors are converted, is left to `hf_format.py`.
"""

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
from llmfoundry_lite.data.tokenizer import Tokenizer
from llmfoundry_lite.data.tokenizer_files import (
    CONFIG_FILE,
    GENERATION_FILE,
    TOKENIZER_FILE,
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
"""Files of a tokenizer that are copied unchanged; `data/tokenizer_files.py` reads the others."""
ADAPTER_FILE = "adapter_config.json"
LISTING = "export.json"
"""Name of the file with the hash of every other file. It distinguishes an export, which may be replaced, from a folder
of the user's."""


@contextlib.contextmanager
def published(folder: Path) -> Iterator[Path]:
    """Yield an empty draft folder for an export, and move it to `folder` at the end of the block, unless that raises.

    The export appears under its name in one step, once all its files are on disk, and replaces an earlier export. If
    the process is killed while it moves the folders, the next export restores the earlier one. Besides the files that
    the block has written, the export has a listing of their hashes.

    Raises ExportError if something cannot be written, if `folder` has files that no export wrote, or if another
    process is exporting to it.
    """
    # Show paths relative to the working directory in errors, which may have been removed.
    folder = folder.resolve()
    with contextlib.suppress(FileNotFoundError):
        working_directory = Path.cwd()
        if working_directory in folder.parents:
            folder = folder.relative_to(working_directory)

    # The name is fixed, so that the next export finds what a killed one has left.
    work = folder.parent / f".{folder.name}.export"
    draft = work / "draft"
    replaced = work / "replaced"
    try:
        with _exclusive_work_folder(work, folder):
            # Restore the earlier export, if the last one was killed between the two renames below.
            if not folder.exists() and _find_foreign_file(replaced) is None:
                replaced.rename(folder)

            # Only an empty folder or an export is replaced.
            is_empty_folder = folder.is_dir() and not any(folder.iterdir())
            if folder.exists() and not is_empty_folder:
                foreign_file = _find_foreign_file(folder)
                if foreign_file is not None:
                    raise ExportError(
                        f"{folder}: exists and is not an earlier export, because {foreign_file}; give another folder "
                        "or remove this one"
                    )
            for leftover in (draft, replaced):
                shutil.rmtree(leftover, ignore_errors=True)

            # The block writes the draft. Its files are on disk before it gets its name.
            draft.mkdir()
            yield draft
            hashes = {path.name: _hash(path) for path in sorted(draft.iterdir())}
            write_json(draft / LISTING, {"files": hashes})
            sync_folder(draft)

            # Exchange the folders. Between the two renames, there is no export under the name.
            if folder.exists():
                folder.rename(replaced)
            draft.rename(folder)
            sync(folder.parent)
    except (OSError, SafetensorError) as error:
        raise ExportError(f"{folder}: cannot be written: {getattr(error, 'strerror', None) or error}") from error


@contextlib.contextmanager
def _exclusive_work_folder(work: Path, folder: Path) -> Iterator[None]:
    """Create and lock the folder `work` while a block runs, and remove it at the end.

    work: a hidden folder beside `folder`, for drafts.
    folder: the folder that is exported to. If the block has moved it to `work / "replaced"` and failed, it is moved
        back.

    Raises ExportError if another process holds the lock. On a file system without locks, nothing keeps another process
    from exporting at the same time.
    """
    # An export that has just ended may have removed the folder between its creation and its lock here, so that the lock
    # is on a folder that has no name any more. Then the folder is created again.
    has_lock = False
    while not has_lock:
        work.mkdir(parents=True, exist_ok=True)
        try:
            lock = lock_folder(work)
        except BlockingIOError:
            raise ExportError(
                f"{folder}: another export is writing it; wait for that one, or give another folder"
            ) from None
        with contextlib.suppress(FileNotFoundError):
            has_lock = os.path.samestat(os.fstat(lock), os.stat(work))
        if not has_lock:
            os.close(lock)
    try:
        yield
    finally:
        replaced = work / "replaced"
        if not folder.exists() and replaced.exists():
            replaced.rename(folder)
        shutil.rmtree(work, ignore_errors=True)
        os.close(lock)


def _find_foreign_file(folder: Path) -> str | None:
    """Describe the first file in `folder` that is missing, changed, or not written by an export.

    Returns a phrase such as "notes.txt is not what an export wrote", or None if the folder is an unchanged export. An
    export lists the hash of each of its files in LISTING. A folder without a listing that can be read is not an export.
    """
    try:
        hashes = bounded.read_json(folder / LISTING, "a listing")["files"]
        names_in_folder = {path.name for path in folder.iterdir()} - {LISTING}
        for name in sorted(names_in_folder | set(hashes)):
            path = folder / name
            if name not in names_in_folder:
                return f"{name} is missing"
            is_plain_file = path.is_file() and not path.is_symlink()
            if not is_plain_file or hashes.get(name) != _hash(path):
                return f"{name} is not what an export wrote"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # the listing may have any content
        return f"it has no {LISTING} that can be read"
    return None


def _hash(path: Path) -> str:
    """Return the hash of a file's content, as LISTING has it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def write_weights(
    sizes_bytes: Mapping[str, int], build_tensor: Callable[[str], torch.Tensor], folder: Path, max_shard_bytes: int
) -> None:
    """Write tensors into one safetensors file, or into several with an index.

    sizes_bytes: the size of each tensor, by name, in the order in which they are written.
    build_tensor: function that returns a tensor by its name. Only the tensors of one file are in memory at a time.
    max_shard_bytes: the largest size of a file, unless a single tensor is larger.

    The names are those that transformers expects: `model.safetensors`, or `model-00001-of-00003.safetensors` and so on,
    with `model.safetensors.index.json`, which maps each tensor to its file.
    """
    # Divide the names into files before any tensor is built, because each file's name has the number of all files.
    shards: list[list[str]] = [[]]
    shard_bytes = 0
    for name, size_bytes in sizes_bytes.items():
        if shards[-1] and shard_bytes + size_bytes > max_shard_bytes:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(name)
        shard_bytes += size_bytes

    is_single = len(shards) == 1
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file_name = "model.safetensors" if is_single else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors({name: build_tensor(name) for name in names}, folder / file_name)
        weight_map |= dict.fromkeys(names, file_name)

    if not is_single:
        index = {"metadata": {"total_size": sum(sizes_bytes.values())}, "weight_map": weight_map}
        write_json(folder / "model.safetensors.index.json", index)


def write_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file with the permissions that the umask gives to new files.

    The library would create a file that only its owner can read. Raises OSError, with the system's error number, if the
    file cannot be written.
    """
    # An empty file shows which permissions new files get.
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        # The library reports a full disk, for instance, as text: "... (os error 28)".
        os_error = re.search(r"\(os error (\d+)\)", str(error))
        if os_error is None:
            raise
        error_number = int(os_error[1])
        raise OSError(error_number, os.strerror(error_number), str(path)) from error
    path.chmod(mode)


def read_weights(
    folder: Path, read_pickle: Callable[[Path], dict[str, torch.Tensor]] | None
) -> dict[str, torch.Tensor]:
    """Read all tensors of a Hugging Face folder, by name, from safetensors files, or if it has none, from pickles.

    `read_pickle` is a function that reads a pickle. None refuses pickles, because they can run code. Raises ExportError
    if there are no weights, if they cannot be read, or if only refused pickles are there.
    """
    check_no_adapter(folder)
    files = _weight_files(folder, "model", "safetensors")
    if files is not None:
        return _read_all(folder, files, _read_tensors)

    # Without safetensors, name any pickle that is there, even one that could not be read either.
    pickles: list[str] = []
    for pattern in ("*.bin", "*.pt", "*.pth"):
        pickles += sorted(path.name for path in folder.glob(pattern))
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
    """Raise ExportError for a folder with an adapter (LoRA). transformers would load it, and this package does not."""
    if (folder / ADAPTER_FILE).is_file():
        raise ExportError(
            f"{folder}: {ADAPTER_FILE} says that an adapter belongs to the model, which is not read here; merge it "
            "into the weights (merge_and_unload() of peft), or remove it"
        )


def read_dtypes(folder: Path) -> dict[str, str]:
    """Return the dtype of each tensor of a folder, such as "BF16", which is how safetensors names it.

    The tensors are not read. The result is empty if the folder only has pickles. Raises ExportError as `read_weights`
    does.
    """
    files = _weight_files(folder, "model", "safetensors") or []
    return _read_all(folder, files, _read_tensor_dtypes)


def _read_all(folder: Path, files: list[str], read: Callable[[Path], dict[str, T]]) -> dict[str, T]:
    """Read several files of weights, and return the contents of all of them, by tensor name.

    `read` returns the contents of one file, such as its tensors or their dtypes. Raises ExportError for a tensor that
    two files have.
    """
    contents: dict[str, T] = {}
    for file in files:
        contents_of_file = read(folder / file)
        repeated_names = sorted(contents.keys() & contents_of_file.keys())
        if repeated_names:
            raise ExportError(
                f"{folder}: {repeated_names[0]} is in {file} and in another file; it is not clear which of them counts"
            )
        contents |= contents_of_file
    return contents


def _weight_files(folder: Path, stem: str, suffix: str) -> list[str] | None:
    """List the names of a folder's files of weights: `<stem>.<suffix>`, or the files named in its index.

    The index is `<stem>.<suffix>.index.json`. Returns None if there is neither. Raises ExportError if the index is
    malformed, names a file that is missing or in another folder, or leaves out the single file that is there too.
    """
    single_file = f"{stem}.{suffix}"
    has_single_file = (folder / single_file).is_file()
    index = folder / f"{single_file}.index.json"
    if not index.is_file():
        return [single_file] if has_single_file else None

    # The index maps the name of each tensor to the file that has it.
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ExportError(f"{index}: weight_map gives no file for each tensor; copy the file again from its source")
    files = sorted(set(weight_map.values()))
    if has_single_file and single_file not in files:
        raise ExportError(
            f"{folder}: holds {single_file} and {index.name}, which names other files; remove those that are not the "
            "model's"
        )

    # A name with a folder in it could lead to any file of the machine.
    for file in files:
        is_plain_name = Path(file).name == file
        if not is_plain_name or not (folder / file).is_file():
            raise ExportError(f"{folder}: {file}, named in {index.name}, is not in the folder")
    return files


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a safetensors file, by name. Raises ExportError if it is damaged."""
    return _read_safetensors(path, lambda reader, name: reader.get_tensor(name))


def _read_tensor_dtypes(path: Path) -> dict[str, str]:
    """Read the dtypes of the tensors in a safetensors file, by name. Raises ExportError if it is damaged."""
    return _read_safetensors(path, lambda reader, name: reader.get_slice(name).get_dtype())


def _read_safetensors(path: Path, read: Callable[[Any, str], T]) -> dict[str, T]:
    """Return `read(reader, name)` for each tensor of a safetensors file. Raises ExportError if it is damaged."""
    try:
        with safe_open(path, framework="pt") as reader:
            return {name: read(reader, name) for name in reader.keys()}  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        raise ExportError(f"{path}: damaged: {error}") from None


def write_tokenizer(folder: Path, draft: Path, model_max_length: int) -> dict[str, Any]:
    """Copy a tokenizer from `folder` to `draft`, with generation_config.json.

    model_max_length: the model's context length. It is written into the tokenizer's configuration, because evaluation
        harnesses otherwise assume 2,048 tokens for MPT.

    Returns the ids of the special tokens for config.json, such as {"bos_token_id": 0, "eos_token_id": [0, 7]}. Ids in
    generation_config.json take precedence over the tokenizer's own, because a chat model may stop at several tokens.
    Raises ExportError, and DataError for files that cannot be read.
    """
    # Copy the vocabulary, and write the configuration.
    files = read_folder(folder)
    config = read_config(files, str(folder))
    generation = read_generation_settings(files, str(folder))
    for name in VOCABULARY_FILES:
        if (folder / name).is_file():
            content = bounded.read_at_most(folder / name, bounded.MAX_TOKENIZER_BYTES, "a tokenizer")
            (draft / name).write_bytes(content)
    write_json(draft / CONFIG_FILE, config | {"model_max_length": model_max_length})

    # The configuration names special tokens by their texts, which the vocabulary maps to ids.
    token_ids = _read_token_ids(folder / TOKENIZER_FILE)
    special_ids: dict[str, Any] = {}
    for token_name in ("bos_token", "eos_token", "pad_token"):
        id_in_vocabulary = token_ids.get(token_text(config.get(token_name)))
        token_id = generation.get(f"{token_name}_id", id_in_vocabulary)
        if token_id is not None:
            special_ids[f"{token_name}_id"] = token_id

    # transformers reads the ids from here when it generates text.
    if special_ids or generation:
        write_json(draft / GENERATION_FILE, special_ids | generation)
    return special_ids


def write_for_plain_class(draft: Path, tokenizer: Tokenizer) -> None:
    """Rewrite the tokenizer in `draft` for the class of transformers that does not change tokenizer.json.

    Other classes replace parts of it, such as the pre-tokenizer. The `model_max_length` that `write_tokenizer` has
    written stays.
    """
    files = tokenizer.files()
    model_max_length = read_json(draft / CONFIG_FILE)["model_max_length"]
    (draft / TOKENIZER_FILE).write_bytes(files[TOKENIZER_FILE])
    config = json.loads(files[CONFIG_FILE])
    write_json(draft / CONFIG_FILE, {**config, "model_max_length": model_max_length})


def _read_token_ids(path: Path) -> dict[str | None, int]:
    """Return the id of each token in a tokenizer.json, by the token's text. Without the file, the result is empty.

    It has the tokens of the vocabulary and the added tokens, which include special tokens.
    """
    if not path.is_file():
        return {}
    tokenizer = read_json(path)
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, list):
        # A unigram model has [token, score] pairs in the order of their ids.
        token_ids = {token: token_id for token_id, (token, _) in enumerate(vocabulary)}
    else:
        token_ids = dict(vocabulary)

    added_tokens = tokenizer.get("added_tokens", [])
    return token_ids | {token["content"]: token["id"] for token in added_tokens}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ExportError if the file cannot be read or is something else."""
    try:
        value = bounded.read_json(path, "a JSON file")
    except (OSError, ValueError) as error:
        raise ExportError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ExportError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON object with the indentation that transformers uses."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
