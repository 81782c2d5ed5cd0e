"""Imports weights that other programs wrote into a portable checkpoint, which every tool of this library reads.

    import_checkpoint("mpt-folder", "imported/mpt")                             Hugging Face: MPT, GPT-2, Llama
    import_checkpoint("hf:owner/name", "imported/mpt")                          the same from the Hub or its cache
    import_checkpoint("ep0-ba10-rank0.pt", "imported/mpt", trust_pickle=True)   LLM Foundry / Composer, one file
    import_checkpoint("ep0-ba10", "imported/mpt", trust_pickle=True)            the same, sharded
    import_checkpoint("step-1000", "imported/llama", trust_pickle=True)         torchtitan, or any other user of DCP

Only weights are imported. A position in the data or an optimizer's state means nothing without its run. The last three
sources are pickles. A companion reads them, and also Hugging Face folders of other types than MPT.
"""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
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
from llmfoundry_lite.config.model_schema import ModelConfig, as_record
from llmfoundry_lite.convert.files import VOCABULARY_FILES, read_json, write_json
from llmfoundry_lite.convert.huggingface import import_model
from llmfoundry_lite.data.tokenizer import load_tokenizer
from llmfoundry_lite.data.tokenizer_files import (
    CHAT_TEMPLATE_FILE,
    CONFIG_FILE,
    GENERATION_FILE,
    NAMED_TEMPLATES,
    generation_settings_of,
    read_folder,
    read_generation_settings,
)
from llmfoundry_lite.errors import CheckpointError, DataError
from llmfoundry_lite.files import exists, is_file
from llmfoundry_lite.models.mpt import MPT

HUB = "hf:"
METADATA = ".metadata"
"""File that marks a checkpoint in several files, by Composer or another user of DCP."""
NARROW_DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes whose values can all be represented in fp32."""


class Weights(NamedTuple):
    """The model, weights and tokenizer that were read from a source."""

    kind: str
    """The kind of source, such as "Hugging Face"."""
    config: ModelConfig
    tensors: Tensors
    tokenizer: dict[str, bytes]
    """Name of a file -> its content; empty if there is no tokenizer."""
    notes: list[str]
    """Lines about anything that the user might not expect."""


class Imported(NamedTuple):
    """The published checkpoint, and facts about its source."""

    checkpoint: Checkpoint
    kind: str
    """The kind of source, such as "Hugging Face"."""
    num_parameters: int
    notes: list[str]
    """Lines about anything that the user might not expect."""


def import_checkpoint(source: str, out: str, *, trust_pickle: bool = False, config: Sequence[str] = ()) -> Imported:
    """Publish the weights of `source` as the checkpoint `<out>/ba0`, in fp32, with the model's configuration.

    source: a Hugging Face folder, `hf:` and the name of a model on the Hub, or a checkpoint of Composer or DCP.
    out: a folder or fsspec URL that has no checkpoints yet.
    trust_pickle: allow reading pickles, which can run code.
    config: YAML files and `key=value` arguments, for checkpoints that do not say what model they are.

    Raises CheckpointError, ExportError or ConfigError, and then nothing is published.
    """
    store = open_empty_store(out)

    # A companion reads pickled checkpoints.
    path = Path(source)
    is_dcp_folder = is_file(path / METADATA)
    is_pickle = is_file(path) and path.suffix != ".safetensors"
    if is_dcp_folder or is_pickle:
        needed_for = f"{source}: checkpoints of Composer and DCP"
        import_pickled = companions.load("llmfoundry_formats.checkpoints:import_pickled", needed_for)
        return import_pickled(path, store, out, trust_pickle, config)

    check_source(source)
    weights = read_hugging_face_source(source, trust_pickle, config)
    return publish_weights(weights, source, store, out)


def publish_weights(weights: Weights, source: str, store: CheckpointStore, out: str) -> Imported:
    """Save weights as the checkpoint `ba0` of an empty store, with their tokenizer beside it.

    source: where the weights come from, which the manifest records.
    out: the location of the store.

    Raises CheckpointError for weights that are not finite, and if the checkpoint cannot be written.
    """
    # The manifest records only the facts that are known: no data, no optimizer, no hardware, batch 0.
    notes = list(weights.notes)
    origin = source if source.startswith(HUB) else str(Path(source).resolve())
    metadata = SaveMetadata(
        timestamp=Timestamp(batch=0),
        config={"model": as_record(weights.config)},
        scalars={"imported_from": {"kind": weights.kind, "source": origin}},
    )
    dtypes = {tensor.dtype for tensor in weights.tensors.values()}
    narrow_dtypes = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes if dtype in NARROW_DTYPES)
    if narrow_dtypes:
        notes.append(f"{' and '.join(narrow_dtypes)} weights became fp32, which holds each of them exactly")

    # Save as a training run does, under a lease that keeps other processes from writing to the store. The tokenizer
    # comes first, because its fingerprint goes into the checkpoint's manifest.
    model = build_model(weights)
    saver = Saver(store)
    saver.take_lease()
    if weights.tokenizer:
        problem = keep_tokenizer(weights.tokenizer, store.root, metadata)
        if problem:
            notes.append(problem)
    saver.save(model, None, metadata)
    saver.wait()
    saver.release_lease()

    checkpoint = open_checkpoint(f"{out.rstrip('/')}/ba0")
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return Imported(checkpoint, weights.kind, num_parameters, notes)


def open_empty_store(out: str) -> CheckpointStore:
    """Open the store of checkpoints at `out`, which must be empty.

    Otherwise an import could be mistaken for a save of the run that has its checkpoints there. Raises CheckpointError
    if `out` is a file, is a checkpoint or lies in one, and if it has checkpoints or leftovers of some.
    """
    # Refuse a path that cannot be a store. On object storage there is no local path to check.
    store = CheckpointStore(out)
    path = store.root.path_here
    if path is not None and path.exists() and not path.is_dir():
        raise CheckpointError(f"{out}: a file; give a folder for the imported checkpoint")
    if is_checkpoint(out):
        raise CheckpointError(f"{out}: a checkpoint itself; give another folder for the imported one")
    if path is not None:
        check_outside_checkpoints(path)

    # Refuse a store that already has checkpoints, and name the first of them.
    for candidate in store.candidates():
        raise CheckpointError(f"{store.root.url}: already holds {candidate.name}; give another folder, or remove it")

    # Refuse leftovers: folders that a run has set aside, and files that the import would replace.
    names = store.root.names()
    leftovers = [name for name in names if name.startswith((DAMAGED, REPLACED))]
    if leftovers:
        raise CheckpointError(
            f"{store.root.url}: holds {leftovers[0]}, which may be all that is left of a run; give another folder"
        )
    for name in ("ba0", TOKENIZER, HINT):
        if name in names:
            raise CheckpointError(
                f"{store.root.url}: already holds {name}, which the import would replace; give another folder, or "
                "remove it"
            )
    return store


def check_source(source: str) -> None:
    """Raise CheckpointError for a source that is not a Hugging Face model, and say what to give instead.

    `source` is a folder, or `hf:` and the name of a model of the Hub, which is not looked up. For a folder that
    contains sharded checkpoints of Composer, the error suggests the newest of them.
    """
    if source.startswith(HUB):
        return
    if "://" in source:
        raise CheckpointError(f"{source}: copy it to a local disk first; only local sources and {HUB}NAME are read")

    # Refuse a local path that cannot be read as a Hugging Face folder.
    path = Path(source)
    if is_file(path):
        raise CheckpointError(f"{path}: does not say what model it is; give the folder that has its config.json")
    if not exists(path) or not path.is_dir():
        raise CheckpointError(f"{path}: no such file or folder; for a model of the Hub write {HUB}{source}")
    if (path / MANIFEST).is_file():
        raise CheckpointError(f"{path}: a portable checkpoint already; use it as it is")
    if (path / "config.json").is_file():
        return

    # The folder may have checkpoints of Composer.
    suggestion = ""
    checkpoints = [(batch_in_name(checkpoint), checkpoint) for checkpoint in path.glob("ep*-ba*")]
    last_batch, newest_checkpoint = max(checkpoints, default=(-1, path))
    if last_batch >= 0:
        suggestion = f"; did you mean {newest_checkpoint}?"
    raise CheckpointError(
        f"{path}: neither a Hugging Face folder (config.json) nor a checkpoint of Composer (ep0-ba10-rank0.pt, or a "
        f"folder with .metadata){suggestion}"
    )


def batch_in_name(path: Path) -> int:
    """Return the batch in the name of a checkpoint of Composer: 10 for ep0-ba10-rank0.pt, or -1 if it has none."""
    match = re.search(r"-ba(\d+)", path.name)
    return int(match[1]) if match else -1


# -------------------------------------------------------------------------------------------------- Hugging Face


def read_hugging_face_source(source: str, trust_pickle: bool = False, config: Sequence[str] = ()) -> Weights:
    """Read the weights of a Hugging Face folder, or of a model on the Hub if `source` begins with `hf:`.

    A companion downloads a model of the Hub, or finds it in the local cache. The other parameters are those of
    `import_checkpoint`. Raises CheckpointError, ExportError and ConfigError.
    """
    if not source.startswith(HUB):
        return read_hugging_face(Path(source), source, trust_pickle, config)
    fetch = companions.load("llmfoundry_formats.hub_models:fetch_to_import", source)
    folder = fetch(source.removeprefix(HUB), trust_pickle)
    return read_hugging_face(folder, source, trust_pickle, config)


def read_hugging_face(folder: Path, source: str, trust_pickle: bool, config: Sequence[str]) -> Weights:
    """Read the model, weights and tokenizer of a Hugging Face folder.

    source: the folder as the user named it, for errors.
    trust_pickle: read pickles if there are no safetensors.
    config: must be empty, because the folder's config.json says what model it is.

    Raises CheckpointError, ExportError, and ConfigError if a companion is missing.
    """
    if config:
        raise CheckpointError(f"{source}: its config.json says what model it is; leave out --config")
    notes: list[str] = []

    def read_pickle(path: Path) -> Tensors:
        """Read a file of pickled weights by a companion, and note that it was trusted."""
        read_weights_file = companions.load("llmfoundry_formats.pickles:read_weights_file", "pytorch_model.bin")
        tensors, note = read_weights_file(path, is_trusted=True)
        notes.append(note)
        return tensors

    model_config, tensors = import_model(folder, read_pickle if trust_pickle else None)

    # Read the tokenizer. Its other files, with special tokens and settings, are of no use without a vocabulary.
    tokenizer_files: dict[str, bytes] = {}
    for name in VOCABULARY_FILES:
        if (folder / name).is_file():
            tokenizer_files[name] = read_at_most(folder / name, MAX_TOKENIZER_BYTES, "a tokenizer")
    has_tokenizer = bool(tokenizer_files)
    other_files = read_folder(folder)
    notes += describe_generation(read_json(folder / "config.json"), other_files, has_tokenizer=has_tokenizer)
    if has_tokenizer:
        tokenizer_files |= other_files
    return Weights("Hugging Face", model_config, tensors, tokenizer_files, notes)


def describe_generation(hf_config: dict[str, Any], files: Mapping[str, bytes], *, has_tokenizer: bool) -> list[str]:
    """Return a note on each setting of text generation, such as the temperature, that an import does not take over.

    hf_config: the content of the folder's config.json. Older folders have such settings there, which are not imported.
    files: the tokenizer's files, by name. Settings in generation_config.json are imported with the tokenizer.
    has_tokenizer: whether the folder has a tokenizer.

    Raises DataError if `files` cannot be read.
    """
    file_name = GENERATION_FILE
    imported_settings = read_generation_settings(files, "to import")
    if imported_settings and not has_tokenizer:
        return [f"{file_name} and the stop tokens are not carried, as they lie with a tokenizer and there is none"]

    # Describe the settings in config.json that differ from the imported ones, or are missing there.
    notes: list[str] = []
    for key, setting in generation_settings_of(hf_config).items():
        imported_setting = imported_settings.get(key)
        if imported_setting != setting:
            text = json.dumps(setting)[:60]
            imported_text = json.dumps(imported_setting)[:60]
            notes.append(
                f"{key} is {text} in config.json and {imported_text} in {file_name}, which is what generate obeys; "
                "config.json's is not carried"
            )
    return notes


# ------------------------------------------------------------------------------------------------------- writing


def build_model(weights: Weights) -> MPT:
    """Build a model whose parameters are the tensors of `weights` themselves, so that a mapped file is not copied.

    bf16 and fp16 become fp32. Raises CheckpointError for a tensor that is not finite, or that is not a dense CPU
    tensor.
    """
    with torch.device("meta"):  # the model takes no memory until the tensors are assigned
        model = MPT(weights.config)

    tensors: Tensors = {}
    for name, tensor in weights.tensors.items():
        if tensor.dtype in NARROW_DTYPES:
            tensor = tensor.float()
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise CheckpointError(f"{name} is a tensor without values of its own ({tensor.layout}, {tensor.device})")
        if not tensor.isfinite().all():
            raise CheckpointError(
                f"{name} holds NaN or infinity, from which nothing can be computed; import other weights"
            )
        tensors[name] = tensor
    model.load_state_dict(tensors, assign=True)
    return model


def keep_tokenizer(files: dict[str, bytes], out: Folder, metadata: SaveMetadata) -> str:
    """Write a tokenizer's files beside an imported checkpoint, in the form in which a run keeps them.

    files: the tokenizer's files: name -> content.
    out: the folder of the store, in which the folder `tokenizer` is created.
    metadata: the checkpoint's metadata, to which the tokenizer's fingerprint and location are added.

    Returns why the tokenizer was left out, or an empty text if it was written.
    """
    if out.path_here is None:
        return "its tokenizer is not carried to a URL"

    # Write the files as they were read, and find out whether the tokenizer can be loaded.
    folder = out.path_here.resolve() / TOKENIZER
    templates = folder / NAMED_TEMPLATES
    templates.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    try:
        tokenizer = load_tokenizer(folder)
    except DataError as error:
        shutil.rmtree(folder)
        return f"its tokenizer is left out: {error}"

    # A run keeps all special tokens and chat templates in one file. Write that instead of the several files.
    shutil.rmtree(templates)
    (folder / CHAT_TEMPLATE_FILE).unlink(missing_ok=True)
    if tokenizer.config:
        write_json(folder / CONFIG_FILE, tokenizer.config)
    if tokenizer.generation:
        write_json(folder / GENERATION_FILE, tokenizer.generation)

    # Record it, as the manifest of a run's checkpoint does.
    metadata.fingerprints["tokenizer"] = tokenizer.fingerprint
    metadata.config["tokenizer"] = {"name": str(folder)}
    return ""
