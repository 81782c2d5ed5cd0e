"""Import of weights that other programs wrote: into a portable checkpoint, which every tool reads like any other.

    import_checkpoint("mpt-folder", "imported/mpt")                             Hugging Face: MPT, GPT-2, Llama
    import_checkpoint("hf:owner/name", "imported/mpt")                          the same from the Hub or its cache
    import_checkpoint("ep0-ba10-rank0.pt", "imported/mpt", trust_pickle=True)   LLM Foundry / Composer, one file
    import_checkpoint("ep0-ba10", "imported/mpt", trust_pickle=True)            the same, sharded
    import_checkpoint("step-1000", "imported/llama", trust_pickle=True)         torchtitan, or any other user of DCP

Only weights are imported. A position in the data or an optimizer's state means nothing without its run. A folder of
torch.distributed.checkpoint (DCP: `.metadata`, `*.distcp`) is imported whole. Nothing in its pickles is run: see
`pickles.py`.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from llmfoundry_formats.dcp import Held, hold, publish, write_pieces
from llmfoundry_formats.pickles import read_dcp_metadata, read_torch_file
from llmfoundry_lite.bounded import MAX_TOKENIZER_BYTES, read_at_most
from llmfoundry_lite.checkpoint.commit import DAMAGED, HINT, REPLACED
from llmfoundry_lite.checkpoint.manifest import DCP_STATE, MANIFEST, Timestamp
from llmfoundry_lite.checkpoint.open_folder import Folder
from llmfoundry_lite.checkpoint.paths import TOKENIZER, check_outside_checkpoints
from llmfoundry_lite.checkpoint.save import About, Saver, file_name
from llmfoundry_lite.checkpoint.state import Tensors, clean_name
from llmfoundry_lite.checkpoint.store import Checkpoint, CheckpointStore, is_checkpoint, open_checkpoint
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.convert.files import VOCABULARY_FILES, read_json, write_json
from llmfoundry_lite.convert.huggingface import fit_weights, from_hugging_face, import_model
from llmfoundry_lite.data import tokenizer as tokenizers
from llmfoundry_lite.errors import CheckpointError, DataError
from llmfoundry_lite.files import open_regular
from llmfoundry_lite.models.mpt import MPT
from llmfoundry_lite.ranks.codec import encode_value

HUB = "hf:"
METADATA = ".metadata"
FILE_BYTES = 4 << 30
"""Tensors of one file of an import from DCP, more for a larger tensor. They are in memory together."""
NARROW = (torch.bfloat16, torch.float16)
STOOD_IN = "read with stand-ins for everything but tensors and plain values; nothing in it was run"


class Weights(NamedTuple):
    """Model, weights and tokenizer of a source."""

    kind: str
    config: ModelConfig
    tensors: Tensors
    tokenizer: dict[str, bytes]
    """File name -> content; empty if there is none."""
    notes: list[str]


class Imported(NamedTuple):
    """The published checkpoint, and facts about its source."""

    checkpoint: Checkpoint
    kind: str
    num_parameters: int
    notes: list[str]
    """A line for everything that the user might not expect."""


def import_checkpoint(source: str, out: str, *, trust_pickle: bool = False, config: Sequence[str] = ()) -> Imported:
    """Publish the weights of `source` as `<out>/ba0`, fp32, with the model's configuration in the manifest.

    `out` is a folder (or fsspec URL) that holds no checkpoints yet. `config` are YAML files and `key=value` arguments,
    for checkpoints that do not say what model they are. Raises CheckpointError, ExportError or ConfigError, and then
    nothing is published.
    """
    store = open_empty_store(out)
    if imported := import_plain_dcp(Path(source), store, trust_pickle, config):
        return imported
    return publish_weights(read_source(source, trust_pickle, config), source, store, out)


def publish_weights(weights: Weights, source: str, store: CheckpointStore, out: str) -> Imported:
    """Publish weights of `source` in an empty store, at `out`. Raises CheckpointError for NaN."""
    notes = list(weights.notes)
    origin = source if source.startswith(HUB) else str(Path(source).resolve())
    about = About(  # only what is known: no data, no optimizer, no hardware, batch 0
        timestamp=Timestamp(batch=0),
        config={"model": asdict(weights.config)},
        scalars={"imported_from": {"kind": weights.kind, "source": origin}},
    )
    narrow = sorted({str(t.dtype).removeprefix("torch.") for t in weights.tensors.values() if t.dtype in NARROW})
    if narrow:
        notes.append(f"{' and '.join(narrow)} weights became fp32, which holds each of them exactly")
    model = build_model(weights)
    saver = Saver(store)
    if weights.tokenizer and (problem := keep_tokenizer(weights.tokenizer, store.root, about)):
        notes.append(problem)
    saver.save(model, None, about)
    saver.wait()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return Imported(open_checkpoint(f"{out.rstrip('/')}/ba0"), weights.kind, num_parameters, notes)


def import_plain_dcp(path: Path, store: CheckpointStore, trust_pickle: bool, config: Sequence[str]) -> Imported | None:
    """Import a folder of torch.distributed.checkpoint with all that is in it; None if it is another source."""
    if not (path / METADATA).is_file():
        return None
    require_trust(path / METADATA, trust_pickle)
    metadata = read_dcp_metadata(path / METADATA)
    paths = metadata.planner_data.values() if isinstance(metadata.planner_data, dict) else ()
    if any(isinstance(names, tuple) and names[:2] == ("state", "model") for names in paths):
        return None  # of Composer's Trainer
    if config:
        raise CheckpointError(f"{path}: every tensor is imported under its own name; leave out --config")
    origin = {"kind": DCP_STATE, "source": str(path.resolve())}
    checkpoint, notes = import_state(path, metadata, store, origin)
    num_elements = sum(math.prod(record.shape) for record in checkpoint.manifest.tensors.values())
    return Imported(checkpoint, DCP_STATE, num_elements, [f"{path.name} was {STOOD_IN}", *notes])


def open_empty_store(out: str) -> CheckpointStore:
    """Open the store at `out`. Raises CheckpointError unless it is empty: the import must not be resumed by a run."""
    store = CheckpointStore(out)
    path = store.root.path_here
    if path is not None and path.exists() and not path.is_dir():
        raise CheckpointError(f"{out}: a file; give a folder for the imported checkpoint")
    if is_checkpoint(out):
        raise CheckpointError(f"{out}: a checkpoint itself; give another folder for the imported one")
    if path is not None:
        check_outside_checkpoints(path)
    for candidate in store.candidates():
        raise CheckpointError(f"{store.root.url}: already holds {candidate.name}; give another folder, or remove it")
    names = store.root.names()
    if leftover := next((name for name in names if name.startswith((DAMAGED, REPLACED))), None):
        raise CheckpointError(
            f"{store.root.url}: holds {leftover}, which may be all that is left of a run; give another folder"
        )
    if replaced := next((name for name in ("ba0", TOKENIZER, HINT) if name in names), None):
        raise CheckpointError(
            f"{store.root.url}: already holds {replaced}, which the import would replace; give another folder, or "
            "remove it"
        )
    return store


def read_source(source: str, trust_pickle: bool, config: Sequence[str]) -> Weights:
    """Find out what `source` is, and read it. Raises CheckpointError, ExportError or ConfigError."""
    if source.startswith(HUB):
        return read_hugging_face_source(source, trust_pickle, config)
    if "://" in source:
        raise CheckpointError(f"{source}: copy it to a local disk first; only local sources and {HUB}NAME are read")
    path = Path(source)
    if path.is_file():
        if path.suffix == ".safetensors":
            raise CheckpointError(f"{path}: does not say what model it is; give the folder that has its config.json")
        require_trust(
            path, trust_pickle
        )  # a file has {"state": {"model": {name: tensor}, "integrations": …}, "rng": …}
        content, refused = read_torch_file(path, str(path), is_trusted=True)
        return _from_composer(path, _get(content, "state"), config, [_describe_reader(path.name, refused)])
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such file or folder; for a model of the Hub write {HUB}{source}")
    if (path / MANIFEST).is_file():
        raise CheckpointError(f"{path}: a portable checkpoint already; use it as it is")
    if (path / METADATA).is_file():
        require_trust(path / METADATA, trust_pickle)
        return read_composer_folder(path, config)
    if (path / "config.json").is_file():
        return read_hugging_face_source(source, trust_pickle, config)
    batches = [(int(match[1]), one) for one in path.glob("ep*-ba*") if (match := re.search(r"-ba(\d+)", one.name))]
    suggestion = f"; did you mean {max(batches)[1]}?" if batches else ""
    raise CheckpointError(
        f"{path}: neither a Hugging Face folder (config.json) nor a checkpoint of Composer (ep0-ba10-rank0.pt, or a "
        f"folder with .metadata){suggestion}"
    )


def require_trust(path: Path, trust_pickle: bool) -> None:
    if not trust_pickle:
        raise CheckpointError(
            f"{path}: a pickle, which can run code when it is read; if you trust where it comes from, add "
            "--trust-pickle"
        )


# -------------------------------------------------------------------------------------------------- Hugging Face


def read_hugging_face_source(source: str, trust_pickle: bool = False, config: Sequence[str] = ()) -> Weights:
    """Read a folder, or a model of the Hub. Raises CheckpointError and ExportError."""
    name = source.removeprefix(HUB)
    folder = Path(source) if name == source else download(name, trust_pickle)
    return read_hugging_face(folder, source, trust_pickle, config)


def read_hugging_face(folder: Path, source: str, trust_pickle: bool, config: Sequence[str]) -> Weights:
    if config:
        raise CheckpointError(f"{source}: its config.json says what model it is; leave out --config")
    notes: list[str] = []

    def read_pickle(path: Path) -> Any:
        unpickled = read_torch_file(path, str(path), is_trusted=True)
        notes.append(_describe_reader(path.name, unpickled.refused))
        return unpickled.content

    model_config, tensors = import_model(folder, read_pickle if trust_pickle else None)
    files = [folder / name for name in VOCABULARY_FILES if (folder / name).is_file()]
    tokenizer = {path.name: read_at_most(path, MAX_TOKENIZER_BYTES, "a tokenizer") for path in files}
    generation = tokenizers.read_folder(folder)
    notes += describe_generation(read_json(folder / "config.json"), generation, has_tokenizer=bool(tokenizer))
    return Weights("Hugging Face", model_config, tensors, tokenizer | (generation if tokenizer else {}), notes)


def describe_generation(hf_config: dict[str, Any], files: Mapping[str, bytes], *, has_tokenizer: bool) -> list[str]:
    """Name what of a folder says how to generate, and is not carried. Raises DataError."""
    file, found = tokenizers.GENERATION_FILE, tokenizers.read_generation(files, "to import")
    if found and not has_tokenizer:
        return [f"{file} and the stop tokens are not carried, as they lie with a tokenizer and there is none"]
    others = tokenizers.generation_of(hf_config)
    return [
        f"{key} is {json.dumps(value)[:60]} in config.json and {json.dumps(found.get(key))[:60]} in {file}, which is "
        "what generate obeys; config.json's is not carried"
        for key, value in others.items()
        if found.get(key) != value
    ]


def download(name: str, trust_pickle: bool) -> Path:
    """Download a repository's files, or take them from the cache without a network. Raises CheckpointError."""
    import huggingface_hub
    from huggingface_hub import errors

    patterns = ["config.json", "*.safetensors", "*.safetensors.index.json", *VOCABULARY_FILES]
    patterns += [*tokenizers.FILES, f"{tokenizers.NAMED_TEMPLATES}*.jinja"]
    try:
        # Asked first because it fails at once without a network, where a download tries for half a minute.
        files = [entry.rfilename for entry in huggingface_hub.HfApi().model_info(name, timeout=20).siblings or []]
        if trust_pickle and not any(file.endswith(".safetensors") for file in files):
            patterns += ["pytorch_model*.bin", "pytorch_model.bin.index.json"]
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise CheckpointError(f"{HUB}{name}: no such model on the Hugging Face Hub, or not one you may read") from None
    except Exception as error:  # the HTTP client's own errors have no common ancestor that is ours to name
        try:
            return Path(huggingface_hub.snapshot_download(name, local_files_only=True))
        except Exception:
            raise CheckpointError(
                f"{HUB}{name}: not in the local cache, and the Hugging Face Hub cannot be reached "
                f"({type(error).__name__}); give a local folder"
            ) from None


# ------------------------------------------------------------------------------------------ LLM Foundry / Composer


def read_composer_folder(folder: Path, config: Sequence[str]) -> Weights:
    """Read `ep0-ba10/`: the dictionary of Composer's one file as DCP flattens it into several."""
    metadata = read_dcp_metadata(folder / METADATA)
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
    # Without what wrappers put in, and the attribute in which HuggingFaceModel keeps its model.
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
        model_config, tensors = from_hugging_face(tensors, stored, str(path))
    else:
        raise CheckpointError(f"{path}: does not say what model it is; add --config and the YAML it was trained with")
    contents = {name: _get(hugging_face, "tokenizer", name, "content") for name in tokenizers.FILES}
    tokenizer = {
        name: json.dumps(_restore_special_tokens(value)).encode()
        for name, value in contents.items()
        if isinstance(value, dict)
    }
    if tokenizer and (generation := tokenizers.generation_of(stored)):
        tokenizer[tokenizers.GENERATION_FILE] = json.dumps(generation).encode()
    return Weights("LLM Foundry / Composer", model_config, tensors, tokenizer, notes)


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
    """Turn dictionaries with numbers as keys into lists: flattening turned lists into those."""
    if not isinstance(tree, dict):
        return tree
    if tree and all(isinstance(key, int) for key in tree):
        return [_restore_lists(tree[key]) for key in sorted(tree)]
    return {key: _restore_lists(value) for key, value in tree.items()}


def _restore_special_tokens(value: Any) -> Any:
    """Add the empty `special_tokens` that flattening dropped: `tokenizers` reads no template without."""
    if isinstance(value, list):
        return [_restore_special_tokens(item) for item in value]
    if not isinstance(value, dict):
        return value
    added = {"special_tokens": {}} if value.get("type") == "TemplateProcessing" else {}
    return added | {key: _restore_special_tokens(item) for key, item in value.items()}


def _describe_reader(name: str, refused: str | None) -> str:
    if refused is None:
        return f"{name} was read by torch's weights-only reader"
    return f"{name} holds {refused}, so it was {STOOD_IN}"


# ----------------------------------------------------------------------------------- torch.distributed.checkpoint


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
        pieces.extend(write_pieces(store, save_id, file_name(len(files)), held))
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
        return publish(store, lease, save_id, pieces, scalars), notes
    except BaseException as error:
        store.abandon(save_id)
        if isinstance(error, CheckpointError) or not isinstance(error, Exception):
            raise
        raise damaged(folder, error) from None


def damaged(folder: Path, error: Exception) -> CheckpointError:
    """Return what to raise for metadata that makes torch or Python raise whatever they like."""
    words = str(error).split("\n")[0]
    return CheckpointError(f"{folder}: damaged: {type(error).__name__} {words}")


def read_tensor(folder: Path, metadata: Metadata, key: str) -> Any:
    """Read a tensor from its pieces; None for what is no tensor. Raises CheckpointError if values are missing."""
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


# ------------------------------------------------------------------------------------------------------- writing


def build_model(weights: Weights) -> MPT:
    """Build a model whose parameters are the tensors themselves: a memory-mapped file is not copied."""
    with torch.device("meta"):
        model = MPT(weights.config)
    tensors = {name: t.float() if t.dtype in NARROW else t for name, t in weights.tensors.items()}
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise CheckpointError(f"{name} is a tensor without values of its own ({tensor.layout}, {tensor.device})")
        if not tensor.isfinite().all():
            raise CheckpointError(
                f"{name} holds NaN or infinity, of which nothing can be computed; import other weights"
            )
    model.load_state_dict(tensors, assign=True)
    return model


def keep_tokenizer(files: dict[str, bytes], out: Folder, about: About) -> str:
    """Write a tokenizer's files beside the checkpoint, and note it in `about`. Returns why not; empty if done."""
    if out.path_here is None:
        return "its tokenizer is not carried to a URL"
    folder = out.path_here.resolve() / TOKENIZER
    (folder / tokenizers.NAMED_TEMPLATES).mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    try:
        loaded = tokenizers.load_tokenizer(folder)
    except DataError as error:
        shutil.rmtree(folder)
        return f"its tokenizer is left out: {error}"
    # Special tokens and chat templates, which may stand in files of their own, all in one: as a run keeps them.
    shutil.rmtree(folder / tokenizers.NAMED_TEMPLATES)
    (folder / tokenizers.CHAT_TEMPLATE_FILE).unlink(missing_ok=True)
    for name, content in ((tokenizers.CONFIG_FILE, loaded.config), (tokenizers.GENERATION_FILE, loaded.generation)):
        if content:
            write_json(folder / name, content)
    about.fingerprints["tokenizer"] = loaded.fingerprint
    about.config["tokenizer"] = {"name": str(folder)}
    return ""
