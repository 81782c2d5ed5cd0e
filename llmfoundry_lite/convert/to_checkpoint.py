"""Import of weights that other programs wrote into a portable checkpoint, which every tool here reads.

    import_checkpoint("mpt-folder", "imported/mpt")                             Hugging Face: MPT, GPT-2, Llama
    import_checkpoint("hf:owner/name", "imported/mpt")                          the same from the Hub or its cache
    import_checkpoint("ep0-ba10-rank0.pt", "imported/mpt", trust_pickle=True)   LLM Foundry / Composer, one file
    import_checkpoint("ep0-ba10", "imported/mpt", trust_pickle=True)            the same, sharded
    import_checkpoint("step-1000", "imported/llama", trust_pickle=True)         torchtitan, or any other user of DCP

Only weights are imported. A position in the data or an optimizer's state means nothing without its run. The last three
kinds are pickles. A companion reads them, and folders of other types than MPT.
"""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from llmfoundry_lite import companions
from llmfoundry_lite.bounded import MAX_TOKENIZER_BYTES, read_at_most
from llmfoundry_lite.checkpoint.commit import DAMAGED, HINT, REPLACED
from llmfoundry_lite.checkpoint.folder import Folder
from llmfoundry_lite.checkpoint.manifest import MANIFEST, Timestamp
from llmfoundry_lite.checkpoint.paths import TOKENIZER, check_outside_checkpoints
from llmfoundry_lite.checkpoint.save import SaveMetadata, Saver
from llmfoundry_lite.checkpoint.state import Tensors
from llmfoundry_lite.checkpoint.store import Checkpoint, CheckpointStore, is_checkpoint, open_checkpoint
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.convert.files import VOCABULARY_FILES, read_json, write_json
from llmfoundry_lite.convert.huggingface import import_model
from llmfoundry_lite.data import tokenizer as tokenizers
from llmfoundry_lite.errors import CheckpointError, DataError
from llmfoundry_lite.models.mpt import MPT

HUB = "hf:"
METADATA = ".metadata"
"""File that marks a checkpoint in several files, by Composer or another user of DCP."""
NARROW = (torch.bfloat16, torch.float16)


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
    """Lines about anything that the user might not expect."""


def import_checkpoint(source: str, out: str, *, trust_pickle: bool = False, config: Sequence[str] = ()) -> Imported:
    """Publish the weights of `source` as `<out>/ba0`, fp32, with the model's configuration in the manifest.

    `out` is a folder (or fsspec URL) that holds no checkpoints yet. `config` are YAML files and `key=value` arguments,
    for checkpoints that do not say what model they are. Raises CheckpointError, ExportError or ConfigError, and then
    nothing is published.
    """
    store, path = open_empty_store(out), Path(source)
    if (path / METADATA).is_file() or (path.is_file() and path.suffix != ".safetensors"):
        needed_for = f"{source}: checkpoints of Composer and DCP"
        import_pickled = companions.load("llmfoundry_formats.checkpoints:import_pickled", needed_for)
        return import_pickled(path, store, out, trust_pickle, config)
    check_source(source)
    return publish_weights(read_hugging_face_source(source, trust_pickle, config), source, store, out)


def publish_weights(weights: Weights, source: str, store: CheckpointStore, out: str) -> Imported:
    """Publish weights of `source` in an empty store, at `out`. Raises CheckpointError for NaN."""
    notes = list(weights.notes)
    origin = source if source.startswith(HUB) else str(Path(source).resolve())
    about = SaveMetadata(  # only what is known: no data, no optimizer, no hardware, batch 0
        timestamp=Timestamp(batch=0),
        config={"model": asdict(weights.config)},
        scalars={"imported_from": {"kind": weights.kind, "source": origin}},
    )
    narrow = sorted({str(t.dtype).removeprefix("torch.") for t in weights.tensors.values() if t.dtype in NARROW})
    if narrow:
        notes.append(f"{' and '.join(narrow)} weights became fp32, which holds each of them exactly")
    model = build_model(weights)
    saver = Saver(store)
    saver.take_lease()
    if weights.tokenizer and (problem := keep_tokenizer(weights.tokenizer, store.root, about)):
        notes.append(problem)
    saver.save(model, None, about)
    saver.wait()
    saver.release_lease()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return Imported(open_checkpoint(f"{out.rstrip('/')}/ba0"), weights.kind, num_parameters, notes)


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


def check_source(source: str) -> None:
    """Raise CheckpointError for a source that is no Hugging Face model."""
    if source.startswith(HUB):
        return
    if "://" in source:
        raise CheckpointError(f"{source}: copy it to a local disk first; only local sources and {HUB}NAME are read")
    path = Path(source)
    if path.is_file():
        raise CheckpointError(f"{path}: does not say what model it is; give the folder that has its config.json")
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such file or folder; for a model of the Hub write {HUB}{source}")
    if (path / MANIFEST).is_file():
        raise CheckpointError(f"{path}: a portable checkpoint already; use it as it is")
    if (path / "config.json").is_file():
        return
    batches = [(int(match[1]), one) for one in path.glob("ep*-ba*") if (match := re.search(r"-ba(\d+)", one.name))]
    suggestion = f"; did you mean {max(batches)[1]}?" if batches else ""
    raise CheckpointError(
        f"{path}: neither a Hugging Face folder (config.json) nor a checkpoint of Composer (ep0-ba10-rank0.pt, or a "
        f"folder with .metadata){suggestion}"
    )


# -------------------------------------------------------------------------------------------------- Hugging Face


def read_hugging_face_source(source: str, trust_pickle: bool = False, config: Sequence[str] = ()) -> Weights:
    """Read a folder, or a model of the Hub. Raises CheckpointError, ExportError and ConfigError."""
    name = source.removeprefix(HUB)
    if name == source:
        return read_hugging_face(Path(source), source, trust_pickle, config)
    fetch = companions.load("llmfoundry_formats.hub_models:fetch_to_import", source)
    return read_hugging_face(fetch(name, trust_pickle), source, trust_pickle, config)


def read_hugging_face(folder: Path, source: str, trust_pickle: bool, config: Sequence[str]) -> Weights:
    if config:
        raise CheckpointError(f"{source}: its config.json says what model it is; leave out --config")
    notes: list[str] = []

    def read_pickle(path: Path) -> Tensors:
        read_weights_file = companions.load("llmfoundry_formats.pickles:read_weights_file", "pytorch_model.bin")
        tensors, note = read_weights_file(path, is_trusted=True)
        notes.append(note)
        return tensors

    model_config, tensors = import_model(folder, read_pickle if trust_pickle else None)
    files = [folder / name for name in VOCABULARY_FILES if (folder / name).is_file()]
    tokenizer = {path.name: read_at_most(path, MAX_TOKENIZER_BYTES, "a tokenizer") for path in files}
    generation = tokenizers.read_folder(folder)
    notes += describe_generation(read_json(folder / "config.json"), generation, has_tokenizer=bool(tokenizer))
    return Weights("Hugging Face", model_config, tensors, tokenizer | (generation if tokenizer else {}), notes)


def describe_generation(hf_config: dict[str, Any], files: Mapping[str, bytes], *, has_tokenizer: bool) -> list[str]:
    """Return a note on settings of generation in a folder that the import leaves behind. Raises DataError."""
    file, found = tokenizers.GENERATION_FILE, tokenizers.read_generation_settings(files, "to import")
    if found and not has_tokenizer:
        return [f"{file} and the stop tokens are not carried, as they lie with a tokenizer and there is none"]
    others = tokenizers.generation_settings_of(hf_config)
    return [
        f"{key} is {json.dumps(value)[:60]} in config.json and {json.dumps(found.get(key))[:60]} in {file}, which is "
        "what generate obeys; config.json's is not carried"
        for key, value in others.items()
        if found.get(key) != value
    ]


# ------------------------------------------------------------------------------------------------------- writing


def build_model(weights: Weights) -> MPT:
    """Build a model whose parameters are the given tensors, so that a memory-mapped file is not copied."""
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


def keep_tokenizer(files: dict[str, bytes], out: Folder, about: SaveMetadata) -> str:
    """Write a tokenizer's files beside the checkpoint, and note it in `about`. Returns why it failed; empty if done."""
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
    # One file with all special tokens and chat templates, as a run keeps them, instead of several.
    shutil.rmtree(folder / tokenizers.NAMED_TEMPLATES)
    (folder / tokenizers.CHAT_TEMPLATE_FILE).unlink(missing_ok=True)
    for name, content in ((tokenizers.CONFIG_FILE, loaded.config), (tokenizers.GENERATION_FILE, loaded.generation)):
        if content:
            write_json(folder / name, content)
    about.fingerprints["tokenizer"] = loaded.fingerprint
    about.config["tokenizer"] = {"name": str(folder)}
    return ""
