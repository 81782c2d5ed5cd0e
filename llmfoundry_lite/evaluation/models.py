"""Loading of models to evaluate, with their tokenizer: from a checkpoint, a run, an exported folder, the Hub.

Portable checkpoints and folders of the layouts that convert/ knows become our MPT, which shares prefixes, or are
refused: transformers' models of these types ignore what they do not know. A causal language model of another type runs
as transformers has it, row by row, and is refused where a folder is not what it says: options that transformers
ignores, weights that are missing or packed, tokens that see later ones. Code that a folder brings is never run.
"""

import dataclasses
import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from llmfoundry_lite.config.build import build_block
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.convert.files import check_no_adapter, read_dtypes
from llmfoundry_lite.convert.huggingface import LAYOUTS, import_model, read_hf_config
from llmfoundry_lite.convert.layout import check_keys
from llmfoundry_lite.convert.tokenizer import find_tokenizer
from llmfoundry_lite.data.tokenizer import Tokenizer, load_tokenizer
from llmfoundry_lite.errors import CheckpointError, DamagedCheckpointError, DataError
from llmfoundry_lite.evaluation.packing import Separator
from llmfoundry_lite.evaluation.scoring import Inputs, Scores, Wanted, score_hidden, score_logits
from llmfoundry_lite.models.attention import for_any_width
from llmfoundry_lite.models.generate import check_finite, generate
from llmfoundry_lite.models.mpt import MPT

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

DECISIVE_OPTIONS = (
    *("final_logit_softcapping", "attn_logit_softcapping", "logit_scale", "logits_scaling", "query_pre_attn_scalar"),
    *("embedding_multiplier", "residual_multiplier", "attention_multiplier", "sliding_window", "qk_ln", "qk_norm"),
)
"""Keys of config.json that change logits. transformers ignores those that a model's class does not declare."""
FAULTS = {
    "missing_keys": "lacks weights of its model",  # which transformers draws at random
    "unexpected_keys": "has weights that its model has no place for",
    "mismatched_keys": "has weights of other shapes than its model",
}
FLOATS = ("F32", "BF16", "F16", "F64")
MAX_PROBED_TOKENS = 1024
"""Beyond these a model may attend to later tokens unnoticed; five such rows cost less than a small task."""

Shard = Callable[[nn.Module], None]
"""Spreads a model over all ranks, in place."""


class Placement(NamedTuple):
    dtype: torch.dtype
    device: torch.device
    shard: Shard | None


@dataclass(kw_only=True)
class Subject:
    """A model to be evaluated, found but not loaded."""

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

    Raises CheckpointError where no checkpoint is whole, DataError when there is none, or no tokenizer.
    """
    at = Placement(DTYPES[precision], device, shard)
    if where.startswith("hf:"):
        return _find_folder(where, _fetch(where.removeprefix("hf:")), tokenizer, at)
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
        name = (manifest.config.get("tokenizer") or {}).get("name")
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
    """Return what model a checkpoint holds. Raises DataError for one that another program has saved."""
    config = checkpoint.manifest.config
    if not isinstance(config, dict) or "model" not in config:
        raise DataError(f"models: {checkpoint.url} does not say what model it is; expected a checkpoint of a run")
    return build_block(ModelConfig, config["model"], "model")


def load_checkpoint(checkpoint: Checkpoint, config: ModelConfig, at: Placement) -> "TreeModel":
    """Load weights. Raises CheckpointError for those that do not verify."""
    model = _build_empty(config, at)
    if at.shard is None:
        _fill(model, load_full_tensors(checkpoint.url), at)
    else:
        restore.load(checkpoint.url, model, cast=True)  # each rank reads its part alone
    return TreeModel(model, at.device, separator=separator_of(checkpoint.manifest.config))


def separator_of(config: dict[str, Any]) -> Separator | None:
    """Return the token that training took for the end or the beginning of a document, where the loader named one."""
    dataset = (config.get("train_loader") or {}).get("dataset") or {}
    if dataset.get("bos_token_id") is not None:
        return Separator(dataset["bos_token_id"], begins=True)
    return None if dataset.get("eos_token_id") is None else Separator(dataset["eos_token_id"])


def _find_folder(where: str, folder: Path, tokenizer: str | None, at: Placement) -> Subject:
    _check_description(where, folder, at.shard)
    found = load_tokenizer(tokenizer or folder)
    own = _own_tokenizer(folder) if tokenizer else None
    if own is not None and own.fingerprint != found.fingerprint:
        raise DataError(
            f"models: {where} has another tokenizer of its own ({own.fingerprint}) than {tokenizer} "
            f"({found.fingerprint}); leave tokenizer=… out"
        )
    load = lambda: _load_folder(folder, at)  # noqa: E731
    return Subject(source=where, save_id=_identify(folder), num_tokens_trained=None, load=load, tokenizer=found)


def _check_description(where: str, folder: Path, shard: Shard | None) -> None:
    """Check what config.json tells before weights are read. Raises ExportError or DataError."""
    hf_config = read_hf_config(folder)
    check_no_adapter(folder)
    kind = hf_config.get("model_type")
    if not isinstance(kind, str):
        raise DataError(f"models: {where}: config.json has no model_type, which says what the weights are of")
    if kind in LAYOUTS:
        check_keys(hf_config, LAYOUTS[kind], str(folder))
    elif shard is not None:
        raise DataError(
            f"models: {where} can only be evaluated whole: its model_type is {kind!r}, not {', '.join(LAYOUTS)}; "
            "set fsdp=false"
        )
    else:
        read_plain_config(folder)


def _own_tokenizer(folder: Path) -> Tokenizer | None:
    try:
        return load_tokenizer(folder)
    except DataError:  # there is none, or none that can be read: why another is named
        return None


def _load_folder(folder: Path, at: Placement) -> Any:
    if read_hf_config(folder).get("model_type") not in LAYOUTS:
        return load_plain(folder, at.dtype, at.device)
    config, weights = import_model(
        folder, lambda path: companions.find("readers", "pytorch_model.bin")(path, is_trusted=False)[0]
    )
    model = _build_empty(config, at)
    _fill(model, weights, at)
    return TreeModel(model, at.device)


def _identify(folder: Path) -> str:
    """Hash the names, sizes and times of the files, so that results of other weights are told apart."""
    stats = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
    text = json.dumps([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])
    return f"files:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _fetch(name: str) -> Path:
    """Download what is read here from the Hub, not all that a repository may hold, such as ONNX or GGUF."""
    if Path(name).is_dir():
        return Path(name)
    import huggingface_hub

    def fetch(*weights: str) -> Path:
        patterns = ["*.json", "*.txt", "*.model", *weights]  # configuration and tokenizer
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*"]))

    try:
        folder = fetch("model.safetensors", "model-*.safetensors")
        if not any(folder.glob("model*.safetensors")):  # older models have pickles alone
            folder = fetch("pytorch_model.bin", "pytorch_model-*.bin")
        return folder
    except Exception as error:  # whatever the Hub or the network raise
        raise DataError(f"models: hf:{name} cannot be had: {(str(error) or repr(error)).splitlines()[0]}") from error


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
    """Our MPT, ready to be scored."""

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


# -------------------------------------------------------------------------------------- models of transformers alone


def read_plain_config(folder: Path) -> Any:
    """Return transformers' description of the model. Raises DataError."""
    from transformers import AutoConfig

    with _refuse_what_fails(folder):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    declared = {field.name for field in dataclasses.fields(config)} | set(config.attribute_map)
    hf_config = read_hf_config(folder)
    for key in DECISIVE_OPTIONS:
        if hf_config.get(key) is not None and key not in declared:
            raise DataError(
                f"models: {folder}: {key} is {json.dumps(hf_config[key])} in config.json, and transformers' "
                f"{config.model_type} ignores it; expected a model that has it"
            )
    return config


@contextmanager
def _refuse_what_fails(folder: Path) -> Iterator[None]:
    """Turn whatever transformers, its readers and such models raise into a DataError."""
    try:
        yield
    except Exception as error:
        if "trust_remote_code" in str(error):
            code = ", ".join(map(str, (read_hf_config(folder).get("auto_map") or {}).values()))
            raise DataError(
                f"models: {folder} needs code of its own ({code or 'auto_map'}), which is not run; expected a model "
                "that transformers has itself"
            ) from error
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"models: {folder} is no causal language model that transformers loads: {reason}") from error


def load_plain(folder: Path, dtype: torch.dtype, device: torch.device) -> "PlainModel":
    """Load a model of transformers. Raises DataError or ExportError unless it is the causal model that it claims."""
    from transformers import AutoModelForCausalLM

    config, dtypes = read_plain_config(folder), read_dtypes(folder)
    # transformers takes packed weights for the numbers they are packed in, unless it is told how to unpack them.
    packed = [name for name, of in dtypes.items() if name.endswith(".weight") and of not in FLOATS]
    if packed and not read_hf_config(folder).get("quantization_config"):
        raise DataError(
            f"models: {folder}: tensor {packed[0]} is {dtypes[packed[0]]}, and config.json has no quantization_config; "
            f"expected {', '.join(FLOATS)}"
        )
    with _refuse_what_fails(folder):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, output_loading_info=True, trust_remote_code=False
        )
    model, found = loaded
    for kind, fault in FAULTS.items():
        if names := sorted(map(str, found[kind])):
            raise DataError(f"models: {folder} {fault}: {names[0]} and {len(names) - 1} more")
    with _refuse_what_fails(folder):  # such a model may not compute what its config.json promises
        plain = PlainModel(model.to(device).eval(), device)
        sees_ahead = _sees_ahead(plain)
    if sees_ahead:
        raise DataError(
            f"models: {folder}: later tokens change its earlier logits, so it is no causal language model; its "
            f"model_type is {config.model_type!r}"
        )
    return plain


@torch.no_grad()
def _sees_ahead(model: "PlainModel") -> bool:
    """Return whether other tokens from some place on change logits before it, and not by rounding alone.

    The places are odd, so that a block whose tokens all see each other is cut in two.
    """
    length = min(MAX_PROBED_TOKENS, model.max_seq_len)
    places = {place for place in (1, length // 4 | 1, length // 2 | 1, length - 1) if 0 < place < length}
    if not places:
        return False
    generator = torch.Generator().manual_seed(0)
    tokens_t = torch.randint(model.vocab_size, (length,), generator=generator)
    steps_t = torch.randint(1, max(2, model.vocab_size), (length,), generator=generator)
    others_t = (tokens_t + steps_t) % model.vocab_size
    columns_c = torch.tensor(sorted({*range(0, length, 8), *places, *(place - 1 for place in places)}))
    expected_cv = model.logits(tokens_t, columns_c)
    tolerance = 1e-4 if next(model.model.parameters()).dtype == torch.float32 else 1e-2
    for place in places:
        changed_t = torch.cat([tokens_t[:place], others_t[place:]])
        apart_c = (model.logits(changed_t, columns_c) - expected_cv).abs().amax(dim=-1).cpu()
        if apart_c[columns_c < place].max() > tolerance * apart_c[columns_c >= place].max():
            return True
    return False


class PlainModel:
    """Any causal language model of transformers. Padding is on the right, where causal attention never looks."""

    shares_prefixes = False
    separates_documents = False
    separator: Separator | None = None

    def __init__(self, model: Any, device: torch.device):
        self.model = model
        self.device = device
        _make_fp32_logits(model)
        self.keeps_columns = "logits_to_keep" in inspect.signature(model.forward).parameters
        config = getattr(model.config, "text_config", model.config)  # of a model that reads more than text
        self.vocab_size = int(config.vocab_size)
        names = ("max_position_embeddings", "n_positions", "max_seq_len")
        said = [int(value) for name in names if (value := getattr(config, name, None))]
        self.max_seq_len = next((value for value in said if value > 0), 2048)  # -1 where there is no limit
        for name, table in model.named_modules():  # a table of positions may begin behind that of padding: RoBERTa's
            if name.endswith("position_embeddings") and getattr(table, "padding_idx", None) is not None:
                self.max_seq_len = min(self.max_seq_len, table.num_embeddings - table.padding_idx - 1)

    def score(self, inputs: Inputs, wanted: Wanted) -> Scores:
        assert inputs.positions_bt is None, "rows are plain text"
        options: dict[str, Any] = {}
        columns_u = wanted.columns_u
        if self.keeps_columns:  # logits of the columns alone at which any row has an answer
            options["logits_to_keep"], columns_u = columns_u.unique(return_inverse=True)
        logits_btv = self.model(input_ids=inputs.tokens_bt, **options).logits
        return score_logits([logits_btv[wanted.rows_u, columns_u].float()], wanted)

    def logits(self, tokens_t: torch.Tensor, columns_c: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits of one row at these columns [c, v]."""
        columns_c = columns_c.to(self.device)
        options = {"logits_to_keep": columns_c} if self.keeps_columns else {}
        logits_cv = self.model(input_ids=tokens_t[None].to(self.device), **options).logits[0]
        return (logits_cv if self.keeps_columns else logits_cv[columns_c]).float()

    @torch.no_grad()
    def generate(self, context: Sequence[int], max_new_tokens: int) -> Iterator[int]:
        tokens_1t, past = torch.tensor([context], device=self.device), None
        for _ in range(max_new_tokens):
            with for_any_width():
                output = self.model(input_ids=tokens_1t, past_key_values=past, use_cache=True)
            logits_11v = output.logits[:, -1:].float()
            check_finite(logits_11v)
            next_11 = logits_11v.argmax(dim=-1)
            yield int(next_11)
            # The oldest models keep nothing, and recurrent ones something else: those read the whole text again.
            past = getattr(output, "past_key_values", None)
            tokens_1t = torch.cat([tokens_1t, next_11], dim=1) if past is None else next_11


def _make_fp32_logits(model: Any) -> None:
    """Let the last layer of a model in another precision compute in fp32, as ours does: rounded logits make ties."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(head, nn.Linear) and head.weight.dtype != torch.float32:

        def in_fp32(hidden_btd: torch.Tensor) -> torch.Tensor:
            bias = None if head.bias is None else head.bias.float()
            return nn.functional.linear(hidden_btd.float(), head.weight.float(), bias)

        module: Any = head
        module.forward = in_fp32
