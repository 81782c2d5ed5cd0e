"""Import of checkpoints of Composer's Trainer (LLM Foundry) and of torch.distributed.checkpoint (DCP).

`import_pickled` is the entrance. It tells three kinds of source apart:

- a file of Composer's Trainer, and a folder in which Composer has let DCP write the same state: the weights, the
  model's configuration and the tokenizer are imported, as `ba0`. The optimizer and the rest of the state are left out.
- any other folder of DCP (`.metadata`, `*.distcp`): every tensor and every plain value is imported.

`dcp.py` writes the portable files. Nothing in the pickles is run: see `pickles.py`.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from llmfoundry_formats.dcp import ChunkInMemory, WrittenChunk, chunk_in_memory, publish, write_chunks
from llmfoundry_formats.pickles import STOOD_IN, read_dcp_metadata, read_torch_file
from llmfoundry_lite.checkpoint.manifest import DCP_STATE
from llmfoundry_lite.checkpoint.save import file_name as shard_name
from llmfoundry_lite.checkpoint.state import clean_name
from llmfoundry_lite.checkpoint.store import Checkpoint, CheckpointStore
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.convert.huggingface import check_tensors, convert_from_hugging_face, without_tied_head
from llmfoundry_lite.convert.to_checkpoint import METADATA, Imported, Weights, publish_weights
from llmfoundry_lite.data import tokenizer_files
from llmfoundry_lite.errors import CheckpointError
from llmfoundry_lite.files import open_regular
from llmfoundry_lite.models.parameters import parameter_shapes
from llmfoundry_lite.own_code import trust_code
from llmfoundry_lite.ranks.codec import encode_value

FILE_BYTES = 4 << 30
"""Bytes of tensors after which an import from DCP begins a new file. The tensors of a file are in memory together."""


def import_pickled(path: Path, store: CheckpointStore, out: str, trust_pickle: bool, config: Sequence[str]) -> Imported:
    """Import a file or folder of Composer's Trainer, or a folder of torch.distributed.checkpoint.

    store, out: the folder of the new checkpoint, opened, and as the user named it.
    trust_pickle: whether the user allows reading pickles.
    config: YAML files and `key=value` arguments that describe the model, for checkpoints that do not.

    Composer's file contains {"state": {"model": {name: tensor}, "integrations": …}, "rng": …}. Raises CheckpointError,
    ExportError or ConfigError, and then nothing is published.
    """
    require_trust(path / METADATA if path.is_dir() else path, trust_pickle)
    if path.is_file():
        unpickled = read_torch_file(path, str(path), is_trusted=True)
        weights = weights_of_composer(path, _get(unpickled.content, "state"), config, [unpickled.describe(path.name)])
        return publish_weights(weights, str(path), store, out)

    metadata = read_dcp_metadata(path / METADATA)
    # DCP flattens nested dictionaries, and keeps where each value was: key -> ("state", "model", …).
    state_paths = metadata.planner_data.values() if isinstance(metadata.planner_data, dict) else ()
    is_from_composer = any(isinstance(keys, tuple) and keys[:2] == ("state", "model") for keys in state_paths)
    if is_from_composer:
        weights = read_composer_folder(path, metadata, config)
        return publish_weights(weights, str(path), store, out)
    return import_plain_dcp(path, metadata, store, config)


def import_plain_dcp(folder: Path, metadata: Metadata, store: CheckpointStore, config: Sequence[str]) -> Imported:
    """Import every tensor and value of a folder of torch.distributed.checkpoint. Raises CheckpointError.

    `config` must be empty, because no model is built from such a state. It is a parameter to refuse it by name.
    """
    if config:
        raise CheckpointError(f"{folder}: every tensor is imported under its own name; leave out --config")
    origin = {"kind": DCP_STATE, "source": str(folder.resolve())}
    checkpoint, notes = import_state(folder, metadata, store, origin)
    num_elements = sum(math.prod(record.shape) for record in checkpoint.manifest.tensors.values())
    return Imported(checkpoint, DCP_STATE, num_elements, [f"{folder.name} was {STOOD_IN}", *notes])


def require_trust(path: Path, trust_pickle: bool) -> None:
    """Raise CheckpointError, which names the option, unless the user has allowed reading pickles."""
    if not trust_pickle:
        raise CheckpointError(
            f"{path}: a pickle, which can run code when it is read; if you trust where it comes from, add "
            "--trust-pickle"
        )


def read_composer_folder(folder: Path, metadata: Metadata, config: Sequence[str]) -> Weights:
    """Read a folder such as `ep0-ba10/`: the state of Composer's Trainer, which DCP has flattened into several files.

    Only the model's tensors and what Composer stores about the Hugging Face model are read. `config` is as in
    `import_pickled`. Raises CheckpointError, ExportError or ConfigError.
    """
    state: dict[Any, Any] = {}
    try:
        for key, state_path in metadata.planner_data.items():
            if state_path[:2] == ("state", "model"):
                parameter_name = ".".join(state_path[2:])
                _set(state, ("model", parameter_name), read_tensor(folder, metadata, key))
            elif state_path[:3] == ("state", "integrations", "huggingface"):
                _set(state, state_path[1:], read_item(folder, metadata, MetadataIndex(key)))
    except CheckpointError:
        raise
    except Exception as error:
        raise damaged(folder, error) from None
    return weights_of_composer(folder, _restore_lists(state), config, [f"{folder.name} was {STOOD_IN}"])


def weights_of_composer(path: Path, state: Any, config: Sequence[str], notes: list[str]) -> Weights:
    """Take model, weights and tokenizer from the state of Composer's Trainer.

    The model is what `config` describes, if the user has given one, and otherwise what the state says. `path` names the
    source in errors, and `notes` are passed on. Raises CheckpointError, ExportError or ConfigError.
    """
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
    hf_config = _get(hugging_face, "model", "config", "content")
    if config:
        model_config = load_train_config(list(config)).config.model
        trust_code(model_config.own_parts.values())  # like a launch's, this configuration is its user's
        tensors = fit_weights(tensors, model_config, str(path))
    elif isinstance(hf_config, dict):
        model_config, tensors = convert_from_hugging_face(tensors, hf_config, str(path))
    else:
        raise CheckpointError(f"{path}: does not say what model it is; add --config and the YAML it was trained with")

    # The tokenizer's files are JSON, which Composer has stored as Python objects.
    tokenizer: dict[str, bytes] = {}
    for file in tokenizer_files.FILES:
        content = _get(hugging_face, "tokenizer", file, "content")
        if isinstance(content, dict):
            tokenizer[file] = json.dumps(_restore_special_tokens(content)).encode()
    generation_settings = tokenizer_files.generation_settings_of(hf_config) if tokenizer else None
    if generation_settings:
        tokenizer[tokenizer_files.GENERATION_FILE] = json.dumps(generation_settings).encode()
    return Weights("LLM Foundry / Composer", model_config, tensors, tokenizer, notes)


def fit_weights(state: Mapping[str, torch.Tensor], config: ModelConfig, location: str) -> dict[str, torch.Tensor]:
    """Return the tensors under MPT's names, without a copy of tied weights.

    Raises ExportError, with `location` in front, that names the tensors which do not fit the configuration.
    """
    weights = without_tied_head(state, "transformer.wte.weight", config, location)
    check_tensors(weights, parameter_shapes(config), location)
    return weights


def _get(tree: Any, *keys: str) -> Any:
    """Return the value under nested keys; None if a key is missing or something on the way is not a dictionary."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _set(tree: dict[Any, Any], keys: Sequence[Any], value: Any) -> None:
    """Set the value under nested keys, and create the dictionaries on the way."""
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
    tree[keys[-1]] = value


def _restore_lists(tree: Any) -> Any:
    """Turn dictionaries whose keys are all numbers back into the lists that DCP has flattened, at any depth.

    {"a": {1: "y", 0: "x"}} becomes {"a": ["x", "y"]}.
    """
    if not isinstance(tree, dict):
        return tree
    is_list = bool(tree) and all(isinstance(key, int) for key in tree)
    if is_list:
        return [_restore_lists(tree[index]) for index in sorted(tree)]
    return {key: _restore_lists(child) for key, child in tree.items()}


def _restore_special_tokens(tree: Any) -> Any:
    """Add the empty `special_tokens` to each TemplateProcessing of a tokenizer.json, at any depth.

    DCP drops empty dictionaries when it flattens a state, and `tokenizers` does not load a template without this one.
    """
    if isinstance(tree, list):
        return [_restore_special_tokens(item) for item in tree]
    if not isinstance(tree, dict):
        return tree

    restored = {key: _restore_special_tokens(child) for key, child in tree.items()}
    if tree.get("type") == "TemplateProcessing":
        restored = {"special_tokens": {}, **restored}
    return restored


def import_state(
    folder: Path, metadata: Metadata, store: CheckpointStore, origin: dict[str, str]
) -> tuple[Checkpoint, list[str]]:
    """Publish every tensor and every plain value of a DCP folder as `ba0`.

    `origin` goes into the manifest, as the source of the import. Returns the checkpoint, and a line for each value that
    is left out because it is more than JSON can hold. Raises CheckpointError, and then nothing is published.
    """
    lease = store.acquire()
    save_id = store.new_save_id(lease, 0)
    chunks_in_memory: list[ChunkInMemory] = []
    written_chunks: list[WrittenChunk] = []
    values = {}
    notes = []

    def write_file() -> None:
        num_files = len({chunk.file.name for chunk in written_chunks})
        written_chunks.extend(write_chunks(store, save_id, shard_name(num_files), chunks_in_memory))
        chunks_in_memory.clear()

    try:
        for key, record in metadata.state_dict_metadata.items():
            if isinstance(record, TensorStorageMetadata):
                tensor = read_tensor(folder, metadata, key)
                chunks_in_memory.append(chunk_in_memory(key, tensor, (0,) * tensor.ndim, tensor.shape))
                if sum(chunk.tensor.nbytes for chunk in chunks_in_memory) >= FILE_BYTES:
                    write_file()
                continue

            value = read_item(folder, metadata, MetadataIndex(key))
            try:
                encode_value(value, key)
                values[key] = value
            except CheckpointError:
                notes.append(f"{key} is not carried: it holds more than plain values")
        if chunks_in_memory:
            write_file()

        state_paths = {key: list(keys) for key, keys in (metadata.planner_data or {}).items()}
        scalars = {"imported_from": origin, DCP_STATE: {"values": values, "paths": state_paths}}
        checkpoint = publish(store, lease, save_id, written_chunks, scalars)
        store.release(lease)
        return checkpoint, notes
    except BaseException as error:
        # Ctrl-C and SystemExit leave no draft behind either, but they pass unchanged.
        store.abandon(save_id)
        if isinstance(error, CheckpointError) or not isinstance(error, Exception):
            raise
        raise damaged(folder, error) from None


def damaged(folder: Path, error: Exception) -> CheckpointError:
    """Return the error to raise for a folder that is so damaged that torch or Python raised `error`, of any type."""
    first_line = str(error).split("\n")[0]
    return CheckpointError(f"{folder}: damaged: {type(error).__name__} {first_line}")


def read_tensor(folder: Path, metadata: Metadata, key: str) -> Any:
    """Assemble a tensor of a DCP folder from its chunks. Returns None if the key is not a tensor.

    Raises CheckpointError if the chunks in the files do not fill the tensor that the metadata describes.
    """
    record = metadata.state_dict_metadata[key]
    if not isinstance(record, TensorStorageMetadata):
        return None

    tensor = torch.empty(record.size, dtype=record.properties.dtype)
    num_elements_read = 0
    for chunk in record.chunks:
        # The view of the tensor that this chunk fills.
        target = tensor
        for dim, (offset, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            target = target.narrow(dim, offset, length)

        stored = read_item(folder, metadata, MetadataIndex(key, chunk.offsets))
        if not isinstance(stored, torch.Tensor) or (stored.shape, stored.dtype) != (target.shape, target.dtype):
            raise CheckpointError(f"{folder}: {key}: the piece at {list(chunk.offsets)} is not a tensor of its shape")
        target.copy_(stored)
        num_elements_read += math.prod(chunk.sizes)

    # The rest of `tensor` would be whatever was in memory.
    if num_elements_read != tensor.numel():
        raise CheckpointError(f"{folder}: {key}: {num_elements_read:,} of its {tensor.numel():,} values are there")
    return tensor


def read_item(folder: Path, metadata: Metadata, index: MetadataIndex) -> Any:
    """Read one entry of a DCP folder: a chunk of a tensor, or a value. Raises CheckpointError, or what torch raises.

    The metadata says in which file of the folder, and where in it, the entry is.
    """
    storage = metadata.storage_data[index]
    file_name = storage.relative_path
    if getattr(storage, "transform_descriptors", None):
        raise CheckpointError(f"{folder}/{file_name}: compressed by an extension; save it without, or as one file")
    # A name with a slash would lead out of the folder.
    if Path(file_name).name != file_name or not (folder / file_name).is_file():
        raise CheckpointError(f"{folder}/{file_name}: missing; all files of the checkpoint must be in one folder")

    with open(folder / file_name, "rb", opener=open_regular) as file:
        # The length comes from the metadata, so a damaged one must not decide how much memory is used.
        if storage.length > os.fstat(file.fileno()).st_size:
            raise EOFError(f"{file_name} has fewer than {storage.length:,} bytes")
        file.seek(storage.offset)
        raw = file.read(storage.length)  # os.pread would stop at 2 GiB
    return read_torch_file(raw, f"{folder}/{file_name}: {index.fqn}", is_trusted=True).content
