"""Loading of models to evaluate, with their tokenizers: from a checkpoint, a run, an exported folder or the Hub.

Portable checkpoints, and folders in a layout that convert/ knows, become our MPT, which shares prefixes. Such a folder
is refused if it has unknown options, since transformers' models of these types would ignore them. A companion runs
causal language models of other types with transformers. Code in a folder is never run.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from llmfoundry_lite import companions
from llmfoundry_lite.checkpoint import restore
from llmfoundry_lite.checkpoint.full_tensors import load_full_tensors
from llmfoundry_lite.checkpoint.manifest import Manifest
from llmfoundry_lite.checkpoint.store import (
    Checkpoint,
    CheckpointStore,
    is_checkpoint,
    kind_of,
    open_checkpoint,
    refuse_newer,
)
from llmfoundry_lite.checkpoint.verify import check_structure
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.yaml_text import block_in
from llmfoundry_lite.convert.checkpoint_model import misfit, read_model, shapes_in
from llmfoundry_lite.convert.files import check_no_adapter
from llmfoundry_lite.convert.huggingface import KINDS, import_model, layout_named, read_hf_config
from llmfoundry_lite.convert.layout import check_keys
from llmfoundry_lite.convert.tokenizer import find_tokenizer, name_of_tokenizer
from llmfoundry_lite.data.tokenizer import Tokenizer, load_tokenizer
from llmfoundry_lite.errors import CheckpointError, ConfigError, DamagedCheckpointError, DataError
from llmfoundry_lite.evaluation.packing import Separator
from llmfoundry_lite.evaluation.scoring import Inputs, Scores, Wanted, score_hidden
from llmfoundry_lite.files import check_url_spelling
from llmfoundry_lite.models.generate import generate
from llmfoundry_lite.models.mpt import MPT
from llmfoundry_lite.models.parameters import find_misfit
from llmfoundry_lite.ranks.codec import shorten

MAX_TOKEN_IDS = 1 << 31
"""Limit of the ids that a recorded configuration may name."""
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Shard = Callable[[nn.Module], None]
"""Function that shards a model over all ranks, in place."""


class Placement(NamedTuple):
    dtype: torch.dtype
    device: torch.device
    shard: Shard | None


@dataclass(kw_only=True)
class Subject:
    """A model to be evaluated. It is found first, and loaded later."""

    source: str
    save_id: str | None  # the checkpoint's; for a folder a hash of its files' sizes and times
    num_tokens_trained: int | None
    load: Callable[[], Any]  # reads the weights and gives something Scorable
    tokenizer: Tokenizer
    manifest: Manifest | None = None  # a checkpoint's
    notes: list[str] = field(default_factory=list)  # lines for the user on how it was found
    model: Any = None  # the loaded model, once `load_subject` has read it


def find_checkpoint(where: str) -> tuple[Checkpoint | None, list[str]]:
    """Return the checkpoint at `where`, or the newest intact one of a run or folder, with a line for each newer one.

    Raises DamagedCheckpointError when none is intact.
    """
    notes: list[str] = []
    for url in _places_of(where):
        if is_checkpoint(url):
            return open_checkpoint(url), []
        found = CheckpointStore(url).newest_intact(check_structure)
        notes += found.notes
        if found.checkpoint is not None:
            return found.checkpoint, found.notes
    if notes:
        raise DamagedCheckpointError(f"models: {where} has no intact checkpoint: {notes[0]}")
    return None, []


def find_all_checkpoints(where: str) -> tuple[list[Checkpoint], list[str]]:
    """Return a run's checkpoints whose manifest can be read, in order of batch, and a line for each of the others."""
    stores = (CheckpointStore(url) for url in _places_of(where))
    candidates = next((found for store in stores if (found := store.candidates())), [])
    refuse_newer(candidates)
    checkpoints = [candidate.checkpoint for candidate in candidates if candidate.checkpoint is not None]
    errors = [candidate.error for candidate in candidates if candidate.error]
    notes = [f"passed over {kind_of(error)} checkpoint: {error}" for error in errors]
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.manifest.timestamp.batch), notes


def _places_of(where: str) -> tuple[str, str]:
    return where, f"{where.rstrip('/')}/checkpoints"


def load_subject(where: str, **options: Any) -> Subject:
    """Find a model as `find_subject` does, and load it. Raises CheckpointError for weights that do not verify."""
    subject = find_subject(where, **options)
    subject.model = subject.load()
    return subject


def find_subject(
    where: str,
    *,
    tokenizer: str | None = None,
    precision: str = "fp32",
    device: torch.device,
    shard: Shard | None = None,
) -> Subject:
    """Find a model without reading its weights.

    Raises CheckpointError where no checkpoint is whole, DataError when there is none, or no tokenizer,
    ConfigError where a companion is missing.
    """
    at = Placement(DTYPES[precision], device, shard)
    if where.startswith("hf:"):
        fetch = companions.load("llmfoundry_formats.hub_models:fetch_to_evaluate", f"models: {where}")
        return _find_folder(where, fetch(where.removeprefix("hf:")), tokenizer, at)
    check_url_spelling(where)
    if "://" not in where and not Path(where).exists():
        raise DataError(f"models: {where} does not exist; expected a run, a checkpoint, an exported folder or hf:NAME")
    if "://" not in where and (Path(where) / "config.json").is_file():
        return _find_folder(where, Path(where), tokenizer, at)
    checkpoint, notes = find_checkpoint(where)
    if checkpoint is None:
        raise DataError(f"models: {where} holds neither a checkpoint nor the config.json of a Hugging Face model")
    manifest, config = checkpoint.manifest, model_config_of(checkpoint)
    found = find_tokenizer(manifest.config, checkpoint, f"models: {where}", tokenizer)
    if found is None:
        name = name_of_tokenizer(manifest.config, f"models: {where}")
        raise DataError(
            f"models: {where}: its tokenizer {name} is not on this machine; name another place: tokenizer=…"
        )
    return Subject(
        source=checkpoint.url,
        save_id=manifest.save_id,
        num_tokens_trained=manifest.timestamp.token or None,
        load=lambda: load_checkpoint(checkpoint, config, at),
        tokenizer=found,
        manifest=manifest,
        notes=notes,
    )


def model_config_of(checkpoint: Checkpoint) -> ModelConfig:
    """Return the configuration of a checkpoint's model, whose parameters are the checkpoint's tensors.

    Raises DataError if another program has saved it, CheckpointError if it describes another model than it holds.
    """
    config = read_model(checkpoint)
    if problem := find_misfit(config, shapes_in(checkpoint)):
        raise misfit(checkpoint, problem)
    return config


def load_checkpoint(checkpoint: Checkpoint, config: ModelConfig, at: Placement) -> "TreeModel":
    """Load a checkpoint's weights. Raises CheckpointError if they do not verify."""
    model = _build_empty(config, at)
    if at.shard is None:
        _fill(model, load_full_tensors(checkpoint.url), at)
    else:
        restore.load(checkpoint.url, model, cast=True)  # each rank reads only its part
    return TreeModel(model, at.device, separator=separator_of(checkpoint.manifest.config))


def separator_of(config: dict[str, Any]) -> Separator | None:
    """Return the token by which training divided documents, if the loader named one. Raises DataError for no id."""
    dataset = block_in(block_in(config, "train_loader"), "dataset")
    for key in ("bos_token_id", "eos_token_id"):
        token_id = dataset.get(key)
        if token_id is None:
            continue
        if type(token_id) is not int or not 0 <= token_id < MAX_TOKEN_IDS:
            raise DataError(
                f"models: train_loader.dataset.{key} is {shorten(token_id)}, expected the number of a token"
            )
        return Separator(token_id, begins=key == "bos_token_id")
    return None


def _find_folder(where: str, folder: Path, tokenizer: str | None, at: Placement) -> Subject:
    """Find a folder's model, and check its config.json before weights are read. Raises ExportError or DataError."""
    hf_config = read_hf_config(folder)
    check_no_adapter(folder)
    kind = hf_config.get("model_type")
    if not isinstance(kind, str):
        raise DataError(f"models: {where}: config.json has no model_type, which says what the weights are of")
    if kind in KINDS:
        check_keys(hf_config, layout_named(hf_config, str(folder)), str(folder))
        load = partial(_load_folder, folder)
    elif at.shard is not None:
        raise DataError(
            f"models: {where} can only be evaluated whole: its model_type is {kind!r}, not {', '.join(KINDS)}; "
            "set fsdp=false"
        )
    else:
        try:
            open_plain = companions.load("llmfoundry_formats.plain_models:open_plain", "causal models of other types")
            load = open_plain(folder)
        except ConfigError as error:
            raise DataError(f"models: {where}: its model_type is {kind!r}, not {', '.join(KINDS)}; {error}") from error
    found = load_tokenizer(tokenizer or folder)
    notes: list[str] = []
    own = _own_tokenizer(folder, notes) if tokenizer else None
    if own is not None and own.fingerprint != found.fingerprint:
        raise DataError(
            f"models: {where} has another tokenizer of its own ({own.fingerprint}) than {tokenizer} "
            f"({found.fingerprint}); leave tokenizer=… out"
        )
    return Subject(
        source=where,
        save_id=_identify(folder),
        num_tokens_trained=None,
        load=lambda: load(at),
        tokenizer=found,
        notes=notes,
    )


def _own_tokenizer(folder: Path, notes: list[str]) -> Tokenizer | None:
    try:
        return load_tokenizer(folder)
    except DataError as error:  # the folder has none that can be read, which is why the user names one
        if isinstance(error.__cause__, ConfigError):  # a companion could read it
            notes.append(f"passed over the model's own {error}")
        return None


def _read_pickle(path: Path) -> dict[str, torch.Tensor]:
    """Read a `pytorch_model.bin` without running anything in it."""
    read_weights_file = companions.load("llmfoundry_formats.pickles:read_weights_file", "pytorch_model.bin")
    tensors, _ = read_weights_file(path, is_trusted=False)
    return tensors


def _load_folder(folder: Path, at: Placement) -> Any:
    config, weights = import_model(folder, _read_pickle)
    model = _build_empty(config, at)
    _fill(model, weights, at)
    return TreeModel(model, at.device)


def _identify(folder: Path) -> str:
    """Hash the names, sizes and times of the files, so that results of other weights differ."""
    stats = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
    text = json.dumps([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])
    return f"files:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _build_empty(config: ModelConfig, at: Placement) -> MPT:
    with torch.device("meta"):
        model = MPT(config)
    model = model.to(at.dtype).eval().requires_grad_(False)
    if at.shard is not None:
        at.shard(model)
        model.to_empty(device=at.device)
    return model


def _fill(model: MPT, weights: dict[str, torch.Tensor], at: Placement) -> None:
    if names := sorted(model.state_dict().keys() ^ weights.keys()):
        raise CheckpointError(f"the weights are not those of the model they name: {names[0]} and {len(names) - 1} more")
    if at.shard is None:
        model.load_state_dict({name: tensor.to(at.device, at.dtype) for name, tensor in weights.items()}, assign=True)
    else:
        converted: dict[str, Any] = {name: tensor.to(at.dtype) for name, tensor in weights.items()}
        set_model_state_dict(model, converted, options=StateDictOptions(full_state_dict=True))


class TreeModel:
    """Our MPT as a `Scorable`, which takes rows with branches."""

    shares_prefixes = True

    def __init__(self, model: MPT, device: torch.device, separator: Separator | None = None):
        self.model = model
        self.device = device
        self.separator = separator
        self.max_seq_len = model.config.max_seq_len
        self.vocab_size = model.config.vocab_size
        self.separates_documents = model.config.attn_config.attn_uses_sequence_id

    def score(self, inputs: Inputs, wanted: Wanted) -> Scores:
        return self.model(
            inputs.tokens_bt,
            positions_bt=inputs.positions_bt,
            attention_mask_bts=inputs.attention_mask_bts,
            head=partial(score_hidden, wanted=wanted),
        )

    def generate(self, context: Sequence[int], max_new_tokens: int) -> Iterator[int]:
        return generate(self.model, torch.tensor(context, device=self.device), max_new_tokens, temperature=0)
