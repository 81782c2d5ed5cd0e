"""Checkpoints of Composer's Trainer (LLM Foundry's) and of torch.distributed.checkpoint (DCP) -> portable ones.

From Composer's come the weights, the model's configuration and the tokenizer. Any other folder of DCP (`.metadata`,
`*.distcp`) is imported whole. Nothing in their pickles is run: see `pickles.py`.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from llmfoundry_formats.dcp import Held, hold, publish, write_chunks
from llmfoundry_formats.pickles import STOOD_IN, read_dcp_metadata, read_torch_file
from llmfoundry_lite.checkpoint.manifest import DCP_STATE
from llmfoundry_lite.checkpoint.save import file_name
from llmfoundry_lite.checkpoint.state import clean_name
from llmfoundry_lite.checkpoint.store import Checkpoint, CheckpointStore
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.convert.huggingface import check_tensors, convert_from_hugging_face, without_tied_head
from llmfoundry_lite.convert.to_checkpoint import METADATA, Imported, Weights, publish_weights
from llmfoundry_lite.data import tokenizer as tokenizers
from llmfoundry_lite.errors import CheckpointError
from llmfoundry_lite.files import open_regular
from llmfoundry_lite.models.parameters import parameter_shapes
from llmfoundry_lite.ranks.codec import encode_value

FILE_BYTES = 4 << 30
"""Bytes of tensors after which an import from DCP begins a new file. A file's tensors are in memory together."""


def import_pickled(path: Path, store: CheckpointStore, out: str, trust_pickle: bool, config: Sequence[str]) -> Imported:
    """Import a file or folder of Composer's Trainer, or a folder of torch.distributed.checkpoint.

    A file has {"state": {"model": {name: tensor}, "integrations": …}, "rng": …}. Raises CheckpointError, ExportError or
    ConfigError, and then nothing is published.
    """
    require_trust(path / METADATA if path.is_dir() else path, trust_pickle)
    if path.is_file():
        found = read_torch_file(path, str(path), is_trusted=True)
        weights = _from_composer(path, _get(found.content, "state"), config, [found.describe(path.name)])
        return publish_weights(weights, str(path), store, out)
    metadata = read_dcp_metadata(path / METADATA)
    paths = metadata.planner_data.values() if isinstance(metadata.planner_data, dict) else ()
    if any(isinstance(names, tuple) and names[:2] == ("state", "model") for names in paths):
        return publish_weights(read_composer_folder(path, metadata, config), str(path), store, out)
    return import_plain_dcp(path, metadata, store, config)


def import_plain_dcp(path: Path, metadata: Metadata, store: CheckpointStore, config: Sequence[str]) -> Imported:
    """Import a folder of torch.distributed.checkpoint with all that is in it."""
    if config:
        raise CheckpointError(f"{path}: every tensor is imported under its own name; leave out --config")
    origin = {"kind": DCP_STATE, "source": str(path.resolve())}
    checkpoint, notes = import_state(path, metadata, store, origin)
    num_elements = sum(math.prod(record.shape) for record in checkpoint.manifest.tensors.values())
    return Imported(checkpoint, DCP_STATE, num_elements, [f"{path.name} was {STOOD_IN}", *notes])


def require_trust(path: Path, trust_pickle: bool) -> None:
    if not trust_pickle:
        raise CheckpointError(
            f"{path}: a pickle, which can run code when it is read; if you trust where it comes from, add "
            "--trust-pickle"
        )


def read_composer_folder(folder: Path, metadata: Metadata, config: Sequence[str]) -> Weights:
    """Read `ep0-ba10/`: Composer's dictionary, which DCP has flattened into several files."""
    state: dict[Any, Any] = {}
    try:
        for key, path in metadata.planner_data.items():
            if path[:2] == ("state", "model"):
                _set(state, ("model", ".".join(path[2:])), read_tensor(folder, metadata, key))
            elif path[:3] == ("state", "integrations", "huggingface"):
                _set(state, path[1:], read_item(folder, metadata, MetadataIndex(key)))
    except CheckpointError:
        raise
    except Exception as error:
        raise damaged(folder, error) from None
    return _from_composer(folder, _restore_lists(state), config, [f"{folder.name} was {STOOD_IN}"])


def _from_composer(path: Path, state: Any, config: Sequence[str], notes: list[str]) -> Weights:
    """Find model, weights and tokenizer in the state of Composer's Trainer. Raises CheckpointError."""
    model = _get(state, "model")
    if not isinstance(model, dict) or not model:
        raise CheckpointError(f"{path}: no state/model in it; expected a checkpoint of Composer's Trainer")
    # Strip the prefixes of wrappers, and of the attribute in which HuggingFaceModel keeps its model.
    tensors = {
        clean_name(str(name)).removeprefix("module.").removeprefix("model."): tensor
        for name, tensor in model.items()
        if isinstance(tensor, torch.Tensor)
    }
    hugging_face = _get(state, "integrations", "huggingface")
    stored = _get(hugging_face, "model", "config", "content")
    if config:
        model_config = load_train_config(list(config)).config.model
        tensors = fit_weights(tensors, model_config, str(path))
    elif isinstance(stored, dict):
        model_config, tensors = convert_from_hugging_face(tensors, stored, str(path))
    else:
        raise CheckpointError(f"{path}: does not say what model it is; add --config and the YAML it was trained with")
    contents = {name: _get(hugging_face, "tokenizer", name, "content") for name in tokenizers.FILES}
    tokenizer = {
        name: json.dumps(_restore_special_tokens(value)).encode()
        for name, value in contents.items()
        if isinstance(value, dict)
    }
    if tokenizer and (generation := tokenizers.generation_settings_of(stored)):
        tokenizer[tokenizers.GENERATION_FILE] = json.dumps(generation).encode()
    return Weights("LLM Foundry / Composer", model_config, tensors, tokenizer, notes)


def fit_weights(state: Mapping[str, torch.Tensor], config: ModelConfig, where: str) -> dict[str, torch.Tensor]:
    """Return tensors under MPT's names, without duplicates. Raises ExportError, which names tensors that do not fit."""
    weights = without_tied_head(state, "transformer.wte.weight", config, where)
    check_tensors(weights, parameter_shapes(config), where)
    return weights


def _get(value: Any, *keys: str) -> Any:
    """Return the value under nested keys; None if there is none."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _set(tree: dict[Any, Any], path: Sequence[Any], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _restore_lists(tree: Any) -> Any:
    """Turn dictionaries whose keys are numbers back into the lists that DCP flattened."""
    if not isinstance(tree, dict):
        return tree
    if tree and all(isinstance(key, int) for key in tree):
        return [_restore_lists(tree[key]) for key in sorted(tree)]
    return {key: _restore_lists(value) for key, value in tree.items()}


def _restore_special_tokens(value: Any) -> Any:
    """Add the empty `special_tokens` that flattening dropped: `tokenizers` reads no template without it."""
    if isinstance(value, list):
        return [_restore_special_tokens(item) for item in value]
    if not isinstance(value, dict):
        return value
    added = {"special_tokens": {}} if value.get("type") == "TemplateProcessing" else {}
    return added | {key: _restore_special_tokens(item) for key, item in value.items()}


def import_state(
    folder: Path, metadata: Metadata, store: CheckpointStore, origin: dict[str, str]
) -> tuple[Checkpoint, list[str]]:
    """Publish every tensor and value as `ba0`. Returns a line for each value that is not carried.

    Raises CheckpointError, and then nothing is published.
    """
    lease = store.acquire()
    save_id = store.new_save_id(lease, 0)
    held: list[Held] = []
    pieces, values, notes = [], {}, []

    def write() -> None:
        files = {piece.file.name for piece in pieces}
        pieces.extend(write_chunks(store, save_id, file_name(len(files)), held))
        held.clear()

    try:
        for key, record in metadata.state_dict_metadata.items():
            if isinstance(record, TensorStorageMetadata):
                tensor = read_tensor(folder, metadata, key)
                held.append(hold(key, tensor, (0,) * tensor.ndim, tensor.shape))
                if sum(one.tensor.nbytes for one in held) >= FILE_BYTES:
                    write()
                continue
            value = read_item(folder, metadata, MetadataIndex(key))
            try:
                encode_value(value, key)
                values[key] = value
            except CheckpointError:
                notes.append(f"{key} is not carried: it holds more than plain values")
        if held:
            write()
        paths = {key: list(path) for key, path in (metadata.planner_data or {}).items()}
        scalars = {"imported_from": origin, DCP_STATE: {"values": values, "paths": paths}}
        checkpoint = publish(store, lease, save_id, pieces, scalars)
        store.release(lease)
        return checkpoint, notes
    except BaseException as error:
        store.abandon(save_id)
        if isinstance(error, CheckpointError) or not isinstance(error, Exception):
            raise
        raise damaged(folder, error) from None


def damaged(folder: Path, error: Exception) -> CheckpointError:
    """Return the error for metadata so damaged that torch or Python raised `error`, of any kind."""
    words = str(error).split("\n")[0]
    return CheckpointError(f"{folder}: damaged: {type(error).__name__} {words}")


def read_tensor(folder: Path, metadata: Metadata, key: str) -> Any:
    """Read a tensor from its pieces; None if the key is no tensor. Raises CheckpointError if values are missing."""
    record = metadata.state_dict_metadata[key]
    if not isinstance(record, TensorStorageMetadata):
        return None
    tensor = torch.empty(record.size, dtype=record.properties.dtype)
    num_read = 0
    for chunk in record.chunks:
        box = tensor
        for dim, (offset, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            box = box.narrow(dim, offset, length)
        piece = read_item(folder, metadata, MetadataIndex(key, chunk.offsets))
        if not isinstance(piece, torch.Tensor) or (piece.shape, piece.dtype) != (box.shape, box.dtype):
            raise CheckpointError(f"{folder}: {key}: the piece at {list(chunk.offsets)} is not a tensor of its shape")
        box.copy_(piece)
        num_read += math.prod(chunk.sizes)
    if num_read != tensor.numel():
        raise CheckpointError(f"{folder}: {key}: {num_read:,} of its {tensor.numel():,} values are there")
    return tensor


def read_item(folder: Path, metadata: Metadata, index: MetadataIndex) -> Any:
    """Read a piece of a tensor, or a value. Raises CheckpointError."""
    place = metadata.storage_data[index]
    name = place.relative_path
    if getattr(place, "transform_descriptors", None):
        raise CheckpointError(f"{folder}/{name}: compressed by an extension; save it without, or as one file")
    if Path(name).name != name or not (folder / name).is_file():
        raise CheckpointError(f"{folder}/{name}: missing; all files of the checkpoint must be in one folder")
    with open(folder / name, "rb", opener=open_regular) as file:
        if place.length > os.fstat(file.fileno()).st_size:
            raise EOFError(f"{name} has fewer than {place.length:,} bytes")
        file.seek(place.offset)
        raw = file.read(place.length)  # os.pread would stop at 2 GiB
    return read_torch_file(raw, f"{folder}/{name}: {index.fqn}", is_trusted=True).content
