"""Finds and loads models to evaluate, with their tokenizers: from a checkpoint, a run, an exported folder or the Hub.

`locate_model` finds a model without reading its weights, so that mistakes show early. The `load` of its result reads
them, and returns something `Scorable`.

Portable checkpoints, and folders in a format that convert/ knows, are loaded into our MPT, which shares prefixes. Such
a folder is refused if it has unknown options, because transformers' models of these types would ignore them. A
companion runs causal language models of other types with transformers. Code in a folder is never run.
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
from llmfoundry_lite.convert.hf_format import check_keys
from llmfoundry_lite.convert.huggingface import MODEL_TYPES, find_readable_format, import_model, read_hf_config
from llmfoundry_lite.convert.tokenizer import find_tokenizer, name_of_tokenizer
from llmfoundry_lite.data.tokenizer import Tokenizer, load_tokenizer
from llmfoundry_lite.errors import CheckpointError, ConfigError, DamagedCheckpointError, DataError
from llmfoundry_lite.evaluation.packing import Separator
from llmfoundry_lite.evaluation.scoring import AnswerTokens, Inputs, Scores, score_hidden
from llmfoundry_lite.files import check_url_spelling, exists
from llmfoundry_lite.models.generate import generate
from llmfoundry_lite.models.mpt import MPT
from llmfoundry_lite.models.parameters import find_mismatch
from llmfoundry_lite.ranks.codec import shorten

MAX_TOKEN_IDS = 1 << 31
"""Token ids in a recorded configuration must be below this."""
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Shard = Callable[[nn.Module], None]
"""Function that shards a model over all ranks, in place."""


class Placement(NamedTuple):
    """Form in which a model's weights are kept: in which dtype, and on which devices."""

    dtype: torch.dtype
    device: torch.device
    shard: Shard | None
    """None: the whole model is on this rank's device."""


@dataclass(kw_only=True)
class LocatedModel:
    """A model that has been found, with its tokenizer. Its weights are loaded later, when its turn comes."""

    source: str
    """The checkpoint, folder or name on the Hub that it is read from."""
    save_id: str | None
    """The id that the checkpoint was saved under. For a folder, a hash of its files' sizes and times."""
    num_tokens_trained: int | None
    load: Callable[[], Any]
    """Reads the weights and returns something Scorable."""
    tokenizer: Tokenizer
    manifest: Manifest | None = None
    """The checkpoint's; None for a folder."""
    max_seq_len: int | None = None
    """Tokens of the longest row, as its configuration has it; None if that does not say. The loaded model knows it."""
    notes: list[str] = field(default_factory=list)
    """Lines for the user on how it was found."""
    model: Any = None
    """The loaded model, set by `locate_and_load_model`; None before."""


# -------------------------------------------------------------------------------------------------------- checkpoints


def find_checkpoint(source: str) -> tuple[Checkpoint | None, list[str]]:
    """Find the checkpoint to read: `source` itself, or the newest intact checkpoint of a run or of a folder.

    Returns the checkpoint, or None if there is none, and a line for the user about each newer checkpoint that was
    skipped because it is damaged. Raises DamagedCheckpointError if there are checkpoints and none is intact.
    """
    notes: list[str] = []
    for url in urls_to_try(source):
        # The user named this checkpoint, so it is opened even if it may be damaged; loading verifies it.
        if is_checkpoint(url):
            return open_checkpoint(url), []

        newest = CheckpointStore(url).newest_intact(check_structure)
        notes += newest.notes
        if newest.checkpoint is not None:
            return newest.checkpoint, newest.notes

    # There are notes only if there are checkpoints.
    if notes:
        raise DamagedCheckpointError(f"models: {source} has no intact checkpoint: {notes[0]}")
    return None, []


def find_all_checkpoints(source: str) -> tuple[list[Checkpoint], list[str]]:
    """Return a run's checkpoints in order of batch, and a line for each checkpoint that is left out, with the reason.

    `source` is a run or a folder of checkpoints. Only manifests are read, so weights may still prove damaged. Raises
    CheckpointError for a checkpoint that a newer release has written, and if the folder cannot be read.
    """
    candidates: list[Candidate] = []
    for url in urls_to_try(source):
        candidates = CheckpointStore(url).candidates()
        if candidates:
            break
    refuse_newer(candidates)

    # Reading the manifest of a candidate gives either a checkpoint or an error.
    checkpoints: list[Checkpoint] = []
    notes: list[str] = []
    for candidate in candidates:
        if candidate.checkpoint is not None:
            checkpoints.append(candidate.checkpoint)
        if candidate.error:
            notes.append(f"passed over {condition_of(candidate.error)} checkpoint: {candidate.error}")
    checkpoints.sort(key=lambda checkpoint: checkpoint.manifest.timestamp.batch)
    return checkpoints, notes


def urls_to_try(source: str) -> tuple[str, str]:
    """Return the two places where checkpoints may be: `source` itself, and its folder `checkpoints` if it is a run."""
    return source, f"{source.rstrip('/')}/checkpoints"


# ------------------------------------------------------------------------------------------------------ find and load


def locate_and_load_model(source: str, **options: Any) -> LocatedModel:
    """Find a model as `locate_model` does, with the same options, and load its weights.

    Raises CheckpointError if the weights do not match their checksums, and the errors of `locate_model`.
    """
    located = locate_model(source, **options)
    located.model = located.load()
    return located


def locate_model(
    source: str,
    *,
    tokenizer: str | None = None,
    precision: str = "fp32",
    device: torch.device,
    shard: Shard | None = None,
    trusts_code: bool = False,
) -> LocatedModel:
    """Find a model and its tokenizer without reading its weights.

    source: a run, a checkpoint, an exported folder in Hugging Face's format, or hf:NAME for a model on the Hub.
    tokenizer: a path or name to use in place of the model's own tokenizer.
    precision: fp32, tf32, bf16 or fp16, which decides the dtype of the weights.
    device: this rank's device, on which the weights will be.
    shard: function that shards the model over all ranks; None keeps the whole model on each rank.
    trusts_code: run code that a checkpoint names for parts of its model.

    Returns the model with its tokenizer loaded; calling its `load` reads the weights.

    Raises CheckpointError if no checkpoint is intact, DataError if there is no model or no tokenizer, and ConfigError
    if a companion package is needed and missing.
    """
    placement = Placement(DTYPES[precision], device, shard)

    # A companion fetches a model on the Hub into a local folder.
    if source.startswith("hf:"):
        fetch = companions.load("llmfoundry_formats.hub_models:fetch_to_evaluate", f"models: {source}")
        return _find_folder(source, fetch(source.removeprefix("hf:")), tokenizer, placement)

    # A config.json marks a folder in Hugging Face's format. Only local folders can have that format.
    check_url_spelling(source)
    is_local = "://" not in source
    if is_local:
        folder = Path(source)
        if not exists(folder):
            raise DataError(
                f"models: {source} does not exist; expected a run, a checkpoint, an exported folder or hf:NAME"
            )
        if (folder / "config.json").is_file():
            return _find_folder(source, folder, tokenizer, placement)
    return _find_in_run(source, tokenizer, placement, trusts_code=trusts_code)


def _find_in_run(source: str, tokenizer_name: str | None, placement: Placement, *, trusts_code: bool) -> LocatedModel:
    """Return the model of a checkpoint, or of the newest intact checkpoint of a run, with its tokenizer.

    source: path or URL of the checkpoint or the run.
    tokenizer_name: a tokenizer to use in place of the one that the run recorded; None for the recorded one.
    trusts_code: run code that the checkpoint names for parts of its model.

    Lines about newer checkpoints that are damaged become notes of the model. Raises DataError if there is no checkpoint
    or no tokenizer, and CheckpointError if the checkpoint is damaged.
    """
    checkpoint, notes = find_checkpoint(source)
    if checkpoint is None:
        raise DataError(f"models: {source} holds neither a checkpoint nor the config.json of a Hugging Face model")
    manifest = checkpoint.manifest
    config = model_config_of(checkpoint, trusts_code=trusts_code)

    # The recorded tokenizer may have been on another machine.
    tokenizer = find_tokenizer(manifest.config, checkpoint, f"models: {source}", tokenizer_name)
    if tokenizer is None:
        name = name_of_tokenizer(manifest.config, f"models: {source}")
        raise DataError(
            f"models: {source}: its tokenizer {name} is not on this machine; name another place: tokenizer=…"
        )
    return LocatedModel(
        source=checkpoint.url,
        save_id=manifest.save_id,
        num_tokens_trained=manifest.timestamp.token or None,
        load=lambda: load_checkpoint(checkpoint, config, placement),
        tokenizer=tokenizer,
        manifest=manifest,
        max_seq_len=config.max_seq_len,
        notes=notes,
    )


def model_config_of(checkpoint: Checkpoint, *, trusts_code: bool = False) -> ModelConfig:
    """Return the model configuration that a checkpoint records, once its tensors are known to fit it.

    `trusts_code` lets code that the checkpoint names for parts of its model run; it runs here already. Raises DataError
    if the checkpoint was not saved by this library's trainer, or names code that is not trusted, and CheckpointError if
    the names or shapes of its tensors are not those of the recorded model.
    """
    config = read_model(checkpoint, trusts_code=trusts_code)
    problem = find_mismatch(config, shapes_in(checkpoint))
    if problem:
        raise misfit(checkpoint, problem)
    return config


def load_checkpoint(checkpoint: Checkpoint, config: ModelConfig, placement: Placement) -> "TreeModel":
    """Build a checkpoint's model and load its weights.

    Collective if the model is sharded: each rank then reads only its own part. Raises CheckpointError if the weights do
    not match their checksums.
    """
    model = _build_empty(config, placement)
    if placement.shard is None:
        _fill(model, load_full_tensors(checkpoint.url), placement)
    else:
        restore.load(checkpoint.url, model, cast=True)
    return TreeModel(model, placement.device, separator=separator_of(checkpoint.manifest.config))


def separator_of(config: dict[str, Any]) -> Separator | None:
    """Return the token that divided documents in training, or None if the run's loader did not set one.

    `config` is the configuration that a checkpoint records, of which `train_loader.dataset.bos_token_id` and
    `eos_token_id` are read. At most one of them is expected; the first counts. A token of the former begins a document,
    and one of the latter ends it. Raises DataError if the recorded value is not a token id.
    """
    dataset_config = block_in(block_in(config, "train_loader"), "dataset")
    for key in ("bos_token_id", "eos_token_id"):
        token_id = dataset_config.get(key)
        if token_id is None:
            continue
        # The value comes from a file. `type` excludes a bool, which Python counts as an int.
        is_token_id = type(token_id) is int and 0 <= token_id < MAX_TOKEN_IDS
        if not is_token_id:
            raise DataError(
                f"models: train_loader.dataset.{key} is {shorten(token_id)}, expected the number of a token"
            )
        return Separator(token_id, begins=key == "bos_token_id")
    return None


# ------------------------------------------------------------------------------------------------------------ folders


def _find_folder(source: str, folder: Path, tokenizer_name: str | None, placement: Placement) -> LocatedModel:
    """Return the model of a folder in Hugging Face's format, after checking its config.json and tokenizer.

    source: the folder's path or hf:NAME, as the user wrote it.
    tokenizer_name: the tokenizer to use; None takes the folder's own.

    Raises ExportError or DataError for a model that cannot be read, and DataError if the folder has a tokenizer of its
    own that differs from the named one.
    """
    hf_config = read_hf_config(folder)
    check_no_adapter(folder)
    load = _choose_loader(source, folder, hf_config, placement)

    # With a different tokenizer the token ids would mean nothing to the model, and its scores would only look bad.
    tokenizer = load_tokenizer(tokenizer_name or folder)
    notes: list[str] = []
    if tokenizer_name:
        own_tokenizer = _load_own_tokenizer(folder, notes)
        if own_tokenizer is not None and own_tokenizer.fingerprint != tokenizer.fingerprint:
            raise DataError(
                f"models: {source} has another tokenizer of its own ({own_tokenizer.fingerprint}) than "
                f"{tokenizer_name} ({tokenizer.fingerprint}); leave tokenizer=… out"
            )
    return LocatedModel(
        source=source,
        save_id=_identify(folder),
        num_tokens_trained=None,
        load=lambda: load(placement),
        tokenizer=tokenizer,
        max_seq_len=_read_max_seq_len(hf_config),
        notes=notes,
    )


def _read_max_seq_len(hf_config: dict[str, Any]) -> int | None:
    """Return the number of tokens of the longest row from the content of a config.json, or None if it has none."""
    for key in ("max_seq_len", "n_positions", "max_position_embeddings"):
        value = hf_config.get(key)
        if type(value) is int and value > 0:  # the file may hold anything
            return value
    return None


def _choose_loader(
    source: str, folder: Path, hf_config: dict[str, Any], placement: Placement
) -> Callable[[Placement], Any]:
    """Return the function that loads a folder's weights, given their placement.

    `hf_config` is the content of the folder's config.json, whose `model_type` decides. Types that convert/ knows are
    loaded into our MPT. A companion runs other causal models with transformers. Raises DataError for a type that
    neither can load, for a type that would have to be sharded and cannot be, and if the companion is missing.
    """
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str):
        raise DataError(f"models: {source}: config.json has no model_type, which says what the weights are of")

    # Most types are loaded into our MPT.
    if model_type in MODEL_TYPES:
        check_keys(hf_config, find_readable_format(hf_config, str(folder)), str(folder))
        return partial(_load_folder, folder)

    # A companion runs other types with transformers, and only as a whole.
    if placement.shard is not None:
        raise DataError(
            f"models: {source} can only be evaluated whole: its model_type is {model_type!r}, not "
            f"{', '.join(MODEL_TYPES)}; set fsdp=false"
        )
    try:
        open_plain = companions.load("llmfoundry_formats.plain_models:open_plain", "causal models of other types")
        return open_plain(folder)
    except ConfigError as error:
        raise DataError(
            f"models: {source}: its model_type is {model_type!r}, not {', '.join(MODEL_TYPES)}; {error}"
        ) from error


def _load_own_tokenizer(folder: Path, notes: list[str]) -> Tokenizer | None:
    """Return the tokenizer in a model's folder, or None if there is none that can be read.

    If it cannot be read because a companion package is missing, a line that says so is appended to `notes`.
    """
    try:
        return load_tokenizer(folder)
    except DataError as error:
        is_companion_missing = isinstance(error.__cause__, ConfigError)
        if is_companion_missing:
            notes.append(f"passed over the model's own {error}")
        return None


def _load_folder(folder: Path, placement: Placement) -> "TreeModel":
    """Load the weights of a folder in Hugging Face's format into our MPT.

    Weights in pickled files (pytorch_model.bin) are read by a companion that never executes what a pickle contains.
    Raises ExportError or DataError for weights that cannot be converted.
    """

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
    """Return an id for the weights in a folder, such as "files:91be02c7…", in place of a checkpoint's save id.

    It is a hash of the names, sizes and modification times of the folder's files, so that results of the same folder
    with other weights are not mixed up. The files themselves are too large to be hashed each time.
    """
    facts_of_files: list[tuple[str, int, int]] = []
    for path in sorted(folder.iterdir()):
        if path.is_file():
            stat = path.stat()
            facts_of_files.append((path.name, stat.st_size, stat.st_mtime_ns))
    return f"files:{hashlib.sha256(json.dumps(facts_of_files).encode()).hexdigest()[:16]}"


# ---------------------------------------------------------------------------------------------------------- our model


def _build_empty(config: ModelConfig, placement: Placement) -> MPT:
    """Build a model whose weights are still to be set, in evaluation mode and without gradients.

    A sharded model gets memory for this rank's part of the weights, with undefined content. Any other model stays on
    the meta device, without memory, until `_fill` gives it its tensors.
    """
    with torch.device("meta"):
        model = MPT(config)
    model = model.to(placement.dtype).eval().requires_grad_(False)
    if placement.shard is not None:
        placement.shard(model)
        model.to_empty(device=placement.device)
    return model


def _fill(model: MPT, weights: dict[str, torch.Tensor], placement: Placement) -> None:
    """Set the weights of a model that `_build_empty` has built, in place.

    `weights` maps the name of every parameter to its whole tensor, in any dtype. Collective if the model is sharded.
    Raises CheckpointError if the names are not those of the model.
    """
    # Names that only one of the two has.
    different_names = sorted(model.state_dict().keys() ^ weights.keys())
    if different_names:
        raise CheckpointError(
            f"the weights are not those of the model they name: {different_names[0]} and {len(different_names) - 1} "
            "more"
        )

    if placement.shard is None:
        # The model is on the meta device, so the tensors are assigned to it instead of being copied into it.
        moved = {name: tensor.to(placement.device, placement.dtype) for name, tensor in weights.items()}
        model.load_state_dict(moved, assign=True)
    else:
        # Each rank copies its part of every tensor.
        converted: dict[str, Any] = {name: tensor.to(placement.dtype) for name, tensor in weights.items()}
        set_model_state_dict(model, converted, options=StateDictOptions(full_state_dict=True))


class TreeModel:
    """Our MPT as a `Scorable`. Rows may be trees of prefixes, so that a shared prefix is computed once."""

    shares_prefixes = True

    def __init__(self, model: MPT, device: torch.device, separator: Separator | None = None):
        self.model = model
        self.device = device
        self.separator = separator
        self.max_seq_len = model.config.max_seq_len
        self.vocab_size = model.config.vocab_size
        self.separates_documents = model.config.attn_config.attn_uses_sequence_id

    def score(self, inputs: Inputs, answers: AnswerTokens) -> Scores:
        """Return the log-probability of each answer token. Logits are computed only at the positions before them."""
        # `head` replaces the model's own output layer, which would compute the logits of all positions.
        scores = self.model(
            inputs.tokens_bt,
            positions_bt=inputs.positions_bt,
            attention_mask_bts=inputs.attention_mask_bts,
            head=partial(score_hidden, answers=answers),
        )
        return Scores(*scores)  # a model in pipeline stages sends its tensors to other ranks as a plain tuple

    def generate(self, context: Sequence[int], max_new_tokens: int) -> Iterator[int]:
        """Yield the likeliest next token after the context, `max_new_tokens` times.

        Raises NonFiniteError if the model's logits are NaN or infinite.
        """
        return generate(self.model, torch.tensor(context, device=self.device), max_new_tokens, temperature=0)
