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
    Candidate,
    Checkpoint,
    CheckpointStore,
    condition_of,
    is_checkpoint,
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
from llmfoundry_lite.evaluation.scoring import AnswerTokens, Inputs, Scores, score_hidden
from llmfoundry_lite.files import check_url_spelling
from llmfoundry_lite.models.generate import generate
from llmfoundry_lite.models.mpt import MPT
from llmfoundry_lite.models.parameters import find_mismatch
from llmfoundry_lite.ranks.codec import shorten

MAX_TOKEN_IDS = 1 << 31
"""Limit of the ids that a recorded configuration may name."""
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Shard = Callable[[nn.Module], None]
"""Function that shards a model over all ranks, in place."""


class Placement(NamedTuple):
    """How a model's weights are kept."""

    dtype: torch.dtype
    device: torch.device
    shard: Shard | None
    """None: the whole model is on this rank's device."""


@dataclass(kw_only=True)
class Subject:
    """A model to be evaluated. It is found first, and its weights are loaded later."""

    source: str
    """The checkpoint, folder or name on the Hub that it is read from."""
    save_id: str | None
    """The checkpoint's. For a folder, a hash of its files' sizes and times."""
    num_tokens_trained: int | None
    load: Callable[[], Any]
    """Reads the weights and returns something Scorable."""
    tokenizer: Tokenizer
    manifest: Manifest | None = None
    """The checkpoint's; None for a folder."""
    notes: list[str] = field(default_factory=list)
    """Lines for the user on how it was found."""
    model: Any = None
    """The loaded model, once `load_subject` has read it."""


# -------------------------------------------------------------------------------------------------------- checkpoints


def find_checkpoint(source: str) -> tuple[Checkpoint | None, list[str]]:
    """Return the checkpoint at `source`, or the newest intact one of a run or folder, with a line for each newer one.

    The checkpoint is None where there is none. Raises DamagedCheckpointError when none of several is intact.
    """
    notes: list[str] = []
    for url in _urls_to_try(source):
        if is_checkpoint(url):
            return open_checkpoint(url), []
        newest = CheckpointStore(url).newest_intact(check_structure)
        notes += newest.notes
        if newest.checkpoint is not None:
            return newest.checkpoint, newest.notes
    if notes:
        raise DamagedCheckpointError(f"models: {source} has no intact checkpoint: {notes[0]}")
    return None, []


def find_all_checkpoints(source: str) -> tuple[list[Checkpoint], list[str]]:
    """Return a run's checkpoints in order of batch, and a line for each checkpoint that is left out, with the reason.

    Only manifests are read, so weights may still prove damaged. Raises CheckpointError for a checkpoint that a newer
    release has written, and if the folder cannot be read.
    """
    candidates: list[Candidate] = []
    for url in _urls_to_try(source):
        candidates = CheckpointStore(url).candidates()
        if candidates:
            break
    refuse_newer(candidates)

    checkpoints: list[Checkpoint] = []
    notes: list[str] = []
    for candidate in candidates:
        if candidate.checkpoint is not None:
            checkpoints.append(candidate.checkpoint)
        if candidate.error:
            notes.append(f"passed over {condition_of(candidate.error)} checkpoint: {candidate.error}")
    checkpoints.sort(key=lambda checkpoint: checkpoint.manifest.timestamp.batch)
    return checkpoints, notes


def _urls_to_try(source: str) -> tuple[str, str]:
    """Return where checkpoints may be: in the folder itself, or in the folder of a run."""
    return source, f"{source.rstrip('/')}/checkpoints"


# ------------------------------------------------------------------------------------------------------ find and load


def load_subject(source: str, **options: Any) -> Subject:
    """Find a model as `find_subject` does, and load it. Raises CheckpointError for weights that do not verify."""
    subject = find_subject(source, **options)
    subject.model = subject.load()
    return subject


def find_subject(
    source: str,
    *,
    tokenizer: str | None = None,
    precision: str = "fp32",
    device: torch.device,
    shard: Shard | None = None,
) -> Subject:
    """Find a model without reading its weights: `source` is a run, a checkpoint, a folder or hf:NAME.

    Raises CheckpointError where no checkpoint is whole, DataError when there is none, or no tokenizer, ConfigError
    where a companion is missing.
    """
    placement = Placement(DTYPES[precision], device, shard)
    if source.startswith("hf:"):
        fetch = companions.load("llmfoundry_formats.hub_models:fetch_to_evaluate", f"models: {source}")
        return _find_folder(source, fetch(source.removeprefix("hf:")), tokenizer, placement)

    check_url_spelling(source)
    if "://" not in source:
        folder = Path(source)
        if not folder.exists():
            raise DataError(
                f"models: {source} does not exist; expected a run, a checkpoint, an exported folder or hf:NAME"
            )
        if (folder / "config.json").is_file():
            return _find_folder(source, folder, tokenizer, placement)
    return _find_in_run(source, tokenizer, placement)


def _find_in_run(source: str, tokenizer_name: str | None, placement: Placement) -> Subject:
    """Find the model of a checkpoint, or of a run's newest one."""
    checkpoint, notes = find_checkpoint(source)
    if checkpoint is None:
        raise DataError(f"models: {source} holds neither a checkpoint nor the config.json of a Hugging Face model")
    manifest = checkpoint.manifest
    config = model_config_of(checkpoint)
    tokenizer = find_tokenizer(manifest.config, checkpoint, f"models: {source}", tokenizer_name)
    if tokenizer is None:
        name = name_of_tokenizer(manifest.config, f"models: {source}")
        raise DataError(
            f"models: {source}: its tokenizer {name} is not on this machine; name another place: tokenizer=…"
        )
    return Subject(
        source=checkpoint.url,
        save_id=manifest.save_id,
        num_tokens_trained=manifest.timestamp.token or None,
        load=lambda: load_checkpoint(checkpoint, config, placement),
        tokenizer=tokenizer,
        manifest=manifest,
        notes=notes,
    )


def model_config_of(checkpoint: Checkpoint) -> ModelConfig:
    """Return the configuration of a checkpoint's model, whose parameters are the checkpoint's tensors.

    Raises DataError if another program has saved it, CheckpointError if it describes another model than it holds.
    """
    config = read_model(checkpoint)
    problem = find_mismatch(config, shapes_in(checkpoint))
    if problem:
        raise misfit(checkpoint, problem)
    return config


def load_checkpoint(checkpoint: Checkpoint, config: ModelConfig, placement: Placement) -> "TreeModel":
    """Load a checkpoint's weights. Collective where the model is sharded; each rank then reads only its part.

    Raises CheckpointError if they do not verify.
    """
    model = _build_empty(config, placement)
    if placement.shard is None:
        _fill(model, load_full_tensors(checkpoint.url), placement)
    else:
        restore.load(checkpoint.url, model, cast=True)
    return TreeModel(model, placement.device, separator=separator_of(checkpoint.manifest.config))


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


# ------------------------------------------------------------------------------------------------------------ folders


def _find_folder(source: str, folder: Path, tokenizer_name: str | None, placement: Placement) -> Subject:
    """Find a folder's model, and check its config.json before weights are read. Raises ExportError or DataError."""
    hf_config = read_hf_config(folder)
    check_no_adapter(folder)
    load = _choose_loader(source, folder, hf_config, placement)

    tokenizer = load_tokenizer(tokenizer_name or folder)
    notes: list[str] = []
    if tokenizer_name:
        own_tokenizer = _load_own_tokenizer(folder, notes)
        if own_tokenizer is not None and own_tokenizer.fingerprint != tokenizer.fingerprint:
            raise DataError(
                f"models: {source} has another tokenizer of its own ({own_tokenizer.fingerprint}) than "
                f"{tokenizer_name} ({tokenizer.fingerprint}); leave tokenizer=… out"
            )
    return Subject(
        source=source,
        save_id=_identify(folder),
        num_tokens_trained=None,
        load=lambda: load(placement),
        tokenizer=tokenizer,
        notes=notes,
    )


def _choose_loader(
    source: str, folder: Path, hf_config: dict[str, Any], placement: Placement
) -> Callable[[Placement], Any]:
    """Return what loads a folder's weights: our MPT for the layouts that we convert, a companion for other types.

    Raises DataError for a type that nobody loads, or that cannot be sharded.
    """
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str):
        raise DataError(f"models: {source}: config.json has no model_type, which says what the weights are of")
    if model_type in KINDS:
        check_keys(hf_config, layout_named(hf_config, str(folder)), str(folder))
        return partial(_load_folder, folder)
    if placement.shard is not None:
        raise DataError(
            f"models: {source} can only be evaluated whole: its model_type is {model_type!r}, not {', '.join(KINDS)}; "
            "set fsdp=false"
        )
    try:
        open_plain = companions.load("llmfoundry_formats.plain_models:open_plain", "causal models of other types")
        return open_plain(folder)
    except ConfigError as error:
        raise DataError(
            f"models: {source}: its model_type is {model_type!r}, not {', '.join(KINDS)}; {error}"
        ) from error


def _load_own_tokenizer(folder: Path, notes: list[str]) -> Tokenizer | None:
    """Return a folder's tokenizer, or None if it has none that can be read, which is why the user names one."""
    try:
        return load_tokenizer(folder)
    except DataError as error:
        if isinstance(error.__cause__, ConfigError):  # a companion could read it
            notes.append(f"passed over the model's own {error}")
        return None


def _load_folder(folder: Path, placement: Placement) -> "TreeModel":
    """Load a folder's weights into our MPT. Files that contain pickles are read by a companion, which runs nothing."""

    def read_pickled(path: Path) -> Any:
        """Return the tensors of a pickled file by name."""
        read_weights_file = companions.load("llmfoundry_formats.pickles:read_weights_file", "pytorch_model.bin")
        tensors, _ = read_weights_file(path, is_trusted=False)
        return tensors

    config, weights = import_model(folder, read_pickled)
    model = _build_empty(config, placement)
    _fill(model, weights, placement)
    return TreeModel(model, placement.device)


def _identify(folder: Path) -> str:
    """Hash the names, sizes and times of the files, so that results of other weights differ."""
    facts: list[tuple[str, int, int]] = []
    for path in sorted(folder.iterdir()):
        if path.is_file():
            stat = path.stat()
            facts.append((path.name, stat.st_size, stat.st_mtime_ns))
    return f"files:{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}"


# ---------------------------------------------------------------------------------------------------------- our model


def _build_empty(config: ModelConfig, placement: Placement) -> MPT:
    """Build a model without weights: on the meta device, or, if it is sharded, with memory for this rank's part."""
    with torch.device("meta"):
        model = MPT(config)
    model = model.to(placement.dtype).eval().requires_grad_(False)
    if placement.shard is not None:
        placement.shard(model)
        model.to_empty(device=placement.device)
    return model


def _fill(model: MPT, weights: dict[str, torch.Tensor], placement: Placement) -> None:
    """Put full weights into a model, by name. Raises CheckpointError if they are another model's."""
    different_names = sorted(model.state_dict().keys() ^ weights.keys())
    if different_names:
        raise CheckpointError(
            f"the weights are not those of the model they name: {different_names[0]} and {len(different_names) - 1} "
            "more"
        )
    if placement.shard is None:
        moved = {name: tensor.to(placement.device, placement.dtype) for name, tensor in weights.items()}
        model.load_state_dict(moved, assign=True)
    else:
        converted: dict[str, Any] = {name: tensor.to(placement.dtype) for name, tensor in weights.items()}
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

    def score(self, inputs: Inputs, answers: AnswerTokens) -> Scores:
        """Return the log-probabilities of the answer tokens. Logits are computed only where they are predicted."""
        scores = self.model(
            inputs.tokens_bt,
            positions_bt=inputs.positions_bt,
            attention_mask_bts=inputs.attention_mask_bts,
            head=partial(score_hidden, answers=answers),
        )
        return Scores(*scores)  # a model in pipeline stages sends its tensors to other ranks as a plain tuple

    def generate(self, context: Sequence[int], max_new_tokens: int) -> Iterator[int]:
        """Yield the likeliest next token after the context, `max_new_tokens` times. Raises NonFiniteError."""
        return generate(self.model, torch.tensor(context, device=self.device), max_new_tokens, temperature=0)
