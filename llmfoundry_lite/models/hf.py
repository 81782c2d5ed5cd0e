"""MPT weights <-> the two Hugging Face layouts that plain `transformers` runs without remote code.

ALiBi models travel as MPT (`MptForCausalLM`), the others as GPT-2 (`GPT2LMHeadModel`). Owns what each layout can
express, the names and shapes of its tensors, its config.json, and folders that appear whole or not at all. Reads
and writes safetensors; a pickle is refused unless the caller brings its own reader. Gathering the tensors of a
sharded model is its caller's work.

`transformers` itself is not imported: the layouts are facts, and tests hold them against it.
"""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from llmfoundry_lite.config.schema import AttentionConfig, ModelConfig
from llmfoundry_lite.errors import ExportError
from llmfoundry_lite.models.mpt import MPT

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MAX_SHARD_BYTES = 5_000_000_000

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "chat_template.jinja"),
)

HFConfig = dict[str, Any]
"""What config.json holds."""


class Source(NamedTuple):
    """Where a tensor of a layout comes from."""

    name: str
    """Ours; if the model has no such tensor, zeros stand for it."""
    is_transposed: bool = False
    """GPT-2's Conv1D keeps [in, out] where a linear layer keeps [out, in]."""


def export_model(
    state_dict: Mapping[str, torch.Tensor],
    config: ModelConfig,
    folder: str | Path,
    *,
    tokenizer_folder: str | Path | None = None,
    dtype: str = "fp32",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` loads, with the logits of our model.

    `state_dict` holds whole CPU tensors under the names of `MPT.state_dict()`; `dtype` is fp32 or bf16. An earlier
    export in `folder` is replaced at once when the new one is complete. Dropout, which MPT's layout can only
    write as a whole number, is not carried to it. Raises ExportError.
    """
    reason = can_export(config)
    if reason is not None:
        raise ExportError(f"{folder}: {reason}")
    if dtype not in DTYPES:
        raise ExportError(f"{folder}: dtype {dtype!r} given, expected {' or '.join(DTYPES)}")
    _check_tensors(state_dict, config, str(folder))
    special_tokens = read_special_tokens(tokenizer_folder)
    with _published(Path(folder)) as draft:
        _write_weights(state_dict, config, draft, DTYPES[dtype], max_shard_bytes)
        _write_json(draft / "config.json", {**build_hf_config(config), **special_tokens, "dtype": _long_name(dtype)})
        if special_tokens:
            _write_json(draft / "generation_config.json", special_tokens)
        if tokenizer_folder is not None:
            for name in TOKENIZER_FILES:
                if (Path(tokenizer_folder) / name).is_file():
                    shutil.copyfile(Path(tokenizer_folder) / name, draft / name)


def import_model(
    folder: str | Path, read_pickle: Callable[[Path], Any] | None = None
) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Read a Hugging Face folder in MPT or GPT-2 layout: the model it describes, and its weights as stored.

    MPT folders written by LLM Foundry, with biases or learned positions, are read as well. `read_pickle` reads
    pytorch_model.bin files where there is no safetensors; without it they are refused. Raises ExportError.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ExportError(f"{folder}: no config.json; expected the folder of a Hugging Face model")
    hf_config = _read_json(folder / "config.json")
    return from_hugging_face(_read_weights(folder, read_pickle), hf_config, str(folder))


# ----------------------------------------------------------------------------------- what a layout can express


def can_export(config: ModelConfig) -> str | None:
    """Why plain `transformers` could not run this model, and what to do about it; None when it can."""
    is_mpt = config.attn_config.alibi
    layout = "MPT, the layout for ALiBi models" if is_mpt else "GPT-2, the layout without ALiBi"
    for key, expressible in (_mpt_can_be(config) if is_mpt else _gpt2_can_be(config)).items():
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part)
        if value not in expressible:
            instead = expressible[0]
            return _refusal(key, value, layout, "without" if instead in (None, False, -1) else f"with {_yaml(instead)}")
    if is_mpt and config.ffn_dim != 4 * config.d_model:
        width = config.ffn_config.ffn_hidden_size
        if width is not None:
            return _refusal("ffn_config.ffn_hidden_size", width, layout, f"with {4 * config.d_model}")
        return _refusal("expansion_ratio", config.expansion_ratio, layout, "with 4")
    return None


LAYERNORMS = ("low_precision_layernorm", "layernorm")


def _in_no_layout(config: ModelConfig) -> dict[str, tuple[Any, ...]]:
    return {
        "attn_config.rope": (False,),
        "attn_config.sliding_window_size": (-1,),
        "attn_config.qk_ln": (False,),
        "attn_config.qk_gn": (False,),
        "attn_config.fused_qkv": (True,),
        "num_kv_heads": (config.n_heads,),
        "ffn_config.ffn_type": ("mptmlp",),
        "ffn_config.ffn_act_fn.name": ("gelu",),
        "ffn_config.ffn_act_fn.approximate": ("none",),
        "norm_type": LAYERNORMS,
        "tie_word_embeddings": (True,),
        "logit_scale": (None,),
    }


def _mpt_can_be(config: ModelConfig) -> dict[str, tuple[Any, ...]]:
    """Of every option that transformers' modeling_mpt.py ignores or fixes (read at 5.23), what it can be."""
    return {"no_bias": (True,), "attn_config.alibi_bias_max": (8,), **_in_no_layout(config)}


def _gpt2_can_be(config: ModelConfig) -> dict[str, tuple[Any, ...]]:
    scales = (None, config.head_dim**-0.5, 1.0)
    return {"attn_config.clip_qkv": (None,), "attn_config.softmax_scale": scales, **_in_no_layout(config)}


def _refusal(option: str, value: Any, layout: str, instead: str) -> str:
    return (
        f"model.{option}: {_yaml(value)} cannot be expressed in transformers' {layout}; "
        f"train {instead}, or keep the training checkpoint, which holds everything"
    )


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def build_hf_config(config: ModelConfig) -> HFConfig:
    """The model as config.json describes it, without dtype and special tokens."""
    attention = config.attn_config
    if attention.alibi:
        return {
            "architectures": ["MptForCausalLM"],
            "model_type": "mpt",
            "d_model": config.d_model,
            "n_heads": config.n_heads,
            "n_layers": config.n_layers,
            "expansion_ratio": 4,
            "max_seq_len": config.max_seq_len,
            "vocab_size": config.vocab_size,
            "layer_norm_epsilon": config.norm_eps,
            "norm_type": config.norm_type,
            "learned_pos_emb": config.learned_pos_emb,
            "no_bias": True,
            "logit_scale": None,
            "attn_config": {
                "attn_type": "multihead_attention",
                "attn_impl": "torch",
                "attn_pdrop": 0,
                "alibi": True,
                "alibi_bias_max": attention.alibi_bias_max,
                "clip_qkv": attention.clip_qkv,
                "softmax_scale": attention.softmax_scale,
                "qk_ln": False,
                "prefix_lm": False,
            },
            "tie_word_embeddings": True,
            "use_cache": True,
        }
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": config.d_model,
        "n_head": config.n_heads,
        "n_layer": config.n_layers,
        "n_inner": config.ffn_dim,
        "n_positions": config.max_seq_len,
        "vocab_size": config.vocab_size,
        # transformers calls the exact GELU "gelu" and GPT-2's own approximation "gelu_new".
        "activation_function": "gelu",
        "layer_norm_epsilon": config.norm_eps,
        "scale_attn_weights": attention.softmax_scale != 1.0,
        "attn_pdrop": attention.attn_pdrop,
        "resid_pdrop": config.resid_pdrop,
        "embd_pdrop": config.emb_pdrop,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        # GPT-2 knows neither of these two; they say which of its tensors are zeros that we added.
        "no_bias": config.no_bias,
        "learned_pos_emb": config.uses_learned_positions,
    }


# --------------------------------------------------------------------------------------------- names and shapes


def to_hugging_face(state_dict: Mapping[str, torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    """Our tensors under the names, and in the orientation, of the layout that fits `config`."""
    return {name: _layout_tensor(state_dict, config, source) for name, source in layout_sources(config).items()}


def from_hugging_face(
    hf_state: Mapping[str, torch.Tensor], hf_config: HFConfig, where: str = "the model"
) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """A layout's config and tensors as ours. Raises ExportError, naming what cannot be read."""
    kind = hf_config.get("model_type")
    if kind not in ("mpt", "gpt2"):
        raise ExportError(f"{where}: model_type {kind!r} cannot be read; expected mpt or gpt2")
    hf_state = _without_extras(hf_state, kind, where)
    config = _config_from_mpt(hf_config, where) if kind == "mpt" else _config_from_gpt2(hf_config, hf_state, where)
    sources = {name: Source(name) for name in _expected_shapes(config)} if kind == "mpt" else _gpt2_sources(config)
    unknown = sorted(hf_state.keys() - sources.keys())
    if unknown:
        raise ExportError(
            f"{where}: tensor {unknown[0]} has no place in the model that its config.json describes"
            f"{_likewise(unknown[1:])}"
        )
    expected = _expected_shapes(config)
    state_dict = {
        source.name: (hf_state[name].t().contiguous() if source.is_transposed else hf_state[name])
        for name, source in sources.items()
        if name in hf_state and source.name in expected
    }
    _check_tensors(state_dict, config, where)
    return config, state_dict


def fit_weights(state: Mapping[str, torch.Tensor], config: ModelConfig, where: str) -> dict[str, torch.Tensor]:
    """Tensors under MPT's names, less those that repeat others. Raises ExportError, naming what does not fit."""
    weights = _without_extras(state, "mpt", where)
    _check_tensors(weights, config, where)
    return weights


def layout_sources(config: ModelConfig) -> dict[str, Source]:
    """For every tensor of the layout, in order, where it comes from."""
    if config.attn_config.alibi:
        return {name: Source(name) for name in _expected_shapes(config)}
    return _gpt2_sources(config)


def _gpt2_sources(config: ModelConfig) -> dict[str, Source]:
    sources = {
        "transformer.wte.weight": Source("transformer.wte.weight"),
        "transformer.wpe.weight": Source("transformer.wpe.weight"),
    }
    modules = {
        "ln_1": "norm_1",
        "attn.c_attn": "attn.Wqkv",
        "attn.c_proj": "attn.out_proj",
        "ln_2": "norm_2",
        "mlp.c_fc": "ffn.up_proj",
        "mlp.c_proj": "ffn.down_proj",
    }
    for i in range(config.n_layers):
        for theirs, ours in modules.items():
            is_conv1d = not theirs.startswith("ln")
            sources[f"transformer.h.{i}.{theirs}.weight"] = Source(f"transformer.blocks.{i}.{ours}.weight", is_conv1d)
            sources[f"transformer.h.{i}.{theirs}.bias"] = Source(f"transformer.blocks.{i}.{ours}.bias")
    for part in ("weight", "bias"):
        sources[f"transformer.ln_f.{part}"] = Source(f"transformer.norm_f.{part}")
    return sources


def _layout_tensor(state_dict: Mapping[str, torch.Tensor], config: ModelConfig, source: Source) -> torch.Tensor:
    tensor = state_dict.get(source.name)
    if tensor is None:
        if source.name == "transformer.wpe.weight":
            return torch.zeros(config.max_seq_len, config.d_model)
        return torch.zeros(state_dict[source.name.removesuffix("bias") + "weight"].shape[0])
    return tensor.t().contiguous() if source.is_transposed else tensor


def _expected_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in MPT(config).state_dict().items()}


def _check_tensors(state_dict: Mapping[str, torch.Tensor], config: ModelConfig, where: str) -> None:
    expected = _expected_shapes(config)
    missing = [name for name in expected if name not in state_dict]
    if missing:
        raise ExportError(
            f"{where}: tensor {missing[0]} is missing; the model's configuration asks for it{_likewise(missing[1:])}"
        )
    misshapen = [name for name, shape in expected.items() if state_dict[name].shape != shape]
    if misshapen:
        first = misshapen[0]
        raise ExportError(
            f"{where}: tensor {first} has shape {list(state_dict[first].shape)}, the model's configuration says "
            f"{list(expected[first])}{_likewise(misshapen[1:])}"
        )
    unknown = [name for name in state_dict if name not in expected]
    if unknown:
        raise ExportError(
            f"{where}: tensor {unknown[0]} has no place in the model's configuration{_likewise(unknown[1:])}"
        )


def _likewise(names: Sequence[str], limit: int = 8) -> str:
    """The others of which the same is true."""
    if not names:
        return ""
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"; likewise {', '.join(names[:limit])}{rest}"


def _without_extras(hf_state: Mapping[str, torch.Tensor], kind: str, where: str) -> dict[str, torch.Tensor]:
    """Drop what repeats other tensors: the tied output embedding, GPT-2's masks; add the prefix old files lack."""
    state = dict(hf_state)
    if kind == "gpt2":
        state = {k if k.startswith(("transformer.", "lm_head.")) else f"transformer.{k}": v for k, v in state.items()}
        state = {k: v for k, v in state.items() if not k.endswith((".attn.bias", ".attn.masked_bias"))}
    head = state.pop("lm_head.weight", None)
    embedding = state.get("transformer.wte.weight")
    if head is not None and embedding is not None and not torch.equal(head, embedding):
        raise ExportError(f"{where}: lm_head.weight differs from the input embedding; here they are one matrix")
    return state


# ------------------------------------------------------------------------------------ config.json -> ModelConfig


MPT_MUST_BE = {
    "attn_config.attn_type": ("multihead_attention",),
    "attn_config.prefix_lm": (False,),
    "attn_config.rope": (False,),
    "attn_config.qk_gn": (False,),
    "attn_config.attn_uses_sequence_id": (False,),
    "attn_config.sliding_window_size": (-1,),
    "attn_config.fused_qkv": (True,),
    "ffn_config.ffn_type": ("mptmlp",),
    "norm_type": ("low_precision_layernorm", "layernorm"),
    "final_logit_softcapping": (None,),
    "block_overrides": (None,),
    "tie_word_embeddings": (True,),
}

GPT2_MUST_BE = {
    "activation_function": ("gelu",),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}


def _config_from_mpt(hf_config: HFConfig, where: str) -> ModelConfig:
    _check_values(hf_config, MPT_MUST_BE, where)
    attention = hf_config.get("attn_config") or {}
    return ModelConfig(
        d_model=_needed(hf_config, "d_model", where),
        n_heads=_needed(hf_config, "n_heads", where),
        n_layers=_needed(hf_config, "n_layers", where),
        expansion_ratio=hf_config.get("expansion_ratio", 4),
        max_seq_len=_needed(hf_config, "max_seq_len", where),
        vocab_size=_needed(hf_config, "vocab_size", where),
        resid_pdrop=hf_config.get("resid_pdrop", 0.0),
        emb_pdrop=hf_config.get("emb_pdrop", 0.0),
        learned_pos_emb=hf_config.get("learned_pos_emb", True),
        attn_config=AttentionConfig(
            attn_pdrop=attention.get("attn_pdrop", 0.0),
            qk_ln=attention.get("qk_ln", False),
            clip_qkv=attention.get("clip_qkv"),
            softmax_scale=attention.get("softmax_scale"),
            alibi=attention.get("alibi", False),
            alibi_bias_max=attention.get("alibi_bias_max", 8),
        ),
        logit_scale=hf_config.get("logit_scale"),
        no_bias=hf_config.get("no_bias", False),
        norm_type=hf_config.get("norm_type", "low_precision_layernorm"),
        norm_eps=hf_config.get("layer_norm_epsilon", hf_config.get("norm_eps", 1e-5)),
    )


def _config_from_gpt2(hf_config: HFConfig, state: Mapping[str, torch.Tensor], where: str) -> ModelConfig:
    # What config.json leaves out is transformers' default, and its default activation is not ours.
    _check_values({"activation_function": "gelu_new", **hf_config}, GPT2_MUST_BE, where)
    d_model = _needed(hf_config, "n_embd", where)
    ffn_dim = hf_config.get("n_inner") or 4 * d_model
    ratio = ffn_dim // d_model if ffn_dim % d_model == 0 else ffn_dim / d_model
    if int(ratio * d_model) < ffn_dim:
        ratio = math.nextafter(ratio, math.inf)
    wpe = state.get("transformer.wpe.weight")
    # Believe the two marks of our export only while the zeros they speak of are still zeros.
    no_bias = bool(hf_config.get("no_bias")) and not any(v.any() for k, v in state.items() if k.endswith(".bias"))
    has_positions = hf_config.get("learned_pos_emb", True) or (wpe is not None and bool(wpe.any()))
    return ModelConfig(
        d_model=d_model,
        n_heads=_needed(hf_config, "n_head", where),
        n_layers=_needed(hf_config, "n_layer", where),
        expansion_ratio=ratio,
        max_seq_len=_needed(hf_config, "n_positions", where),
        vocab_size=_needed(hf_config, "vocab_size", where),
        resid_pdrop=hf_config.get("resid_pdrop", 0.1),
        emb_pdrop=hf_config.get("embd_pdrop", 0.1),
        learned_pos_emb=has_positions,
        attn_config=AttentionConfig(
            attn_pdrop=hf_config.get("attn_pdrop", 0.1),
            softmax_scale=None if hf_config.get("scale_attn_weights", True) else 1.0,
        ),
        no_bias=no_bias,
        norm_eps=hf_config.get("layer_norm_epsilon", 1e-5),
    )


def _check_values(hf_config: HFConfig, must_be: Mapping[str, tuple[Any, ...]], where: str) -> None:
    for key, allowed in must_be.items():
        value: Any = hf_config
        for part in key.split("."):
            value = value.get(part, allowed[0]) if isinstance(value, dict) else allowed[0]
        if value not in allowed:
            expected = " or ".join(json.dumps(option) for option in allowed)
            raise ExportError(f"{where}: {key} is {json.dumps(value)} in config.json; this model only has {expected}")


def _needed(hf_config: HFConfig, key: str, where: str) -> int:
    value = hf_config.get(key)
    if not isinstance(value, int):
        raise ExportError(f"{where}: {key} is {json.dumps(value)} in config.json; expected a whole number")
    return value


# ------------------------------------------------------------------------------------------------------- files


@contextlib.contextmanager
def _published(folder: Path) -> Iterator[Path]:
    """A draft beside `folder` that takes its place once everything in it is on disk."""
    folder = folder.resolve()
    if folder.exists() and not (folder.is_dir() and _is_replaceable(folder)):
        raise ExportError(f"{folder}: exists and is not an earlier export; give another folder or remove it")
    # Fixed names: what a killed export leaves behind is cleared away by the next one.
    draft = folder.with_name(f".{folder.name}.draft")
    replaced = folder.with_name(f".{folder.name}.replaced")
    try:
        for leftover in (draft, replaced):
            shutil.rmtree(leftover, ignore_errors=True)
        draft.mkdir(parents=True)
        yield draft
        for path in (*draft.iterdir(), draft):
            _flush(path)
        if folder.exists():
            folder.rename(replaced)
        draft.rename(folder)
        _flush(folder.parent)
    except (OSError, SafetensorError) as error:
        raise ExportError(f"{folder}: cannot be written: {getattr(error, 'strerror', None) or error}") from None
    finally:
        if not folder.exists() and replaced.exists():
            replaced.rename(folder)
        shutil.rmtree(draft, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


def _is_replaceable(folder: Path) -> bool:
    names = {path.name for path in folder.iterdir()}
    known = {"config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"}
    return not names or (
        "config.json" in names
        and all(n in known or n in TOKENIZER_FILES or (n[:6] == "model-" and n[-12:] == ".safetensors") for n in names)
    )


def _write_weights(
    state_dict: Mapping[str, torch.Tensor], config: ModelConfig, folder: Path, dtype: torch.dtype, max_shard_bytes: int
) -> None:
    """One file, or several and an index; only one shard's tensors are copied at a time."""
    sources = layout_sources(config)
    sizes = {name: _layout_numel(state_dict, config, source) * dtype.itemsize for name, source in sources.items()}
    shards: list[list[str]] = [[]]
    for name, size_bytes in sizes.items():
        if shards[-1] and sum(sizes[other] for other in shards[-1]) + size_bytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(name)
    weight_map = {}
    for i, names in enumerate(shards):
        file = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: _layout_tensor(state_dict, config, sources[name]).to(dtype).contiguous() for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)


def _layout_numel(state_dict: Mapping[str, torch.Tensor], config: ModelConfig, source: Source) -> int:
    if source.name in state_dict:
        return state_dict[source.name].numel()
    return _layout_tensor(state_dict, config, source).numel()


def _read_weights(folder: Path, read_pickle: Callable[[Path], Any] | None) -> dict[str, torch.Tensor]:
    files = _weight_files(folder, "model", "safetensors")
    if files is not None:
        return {name: tensor for file in files for name, tensor in _read_safetensors(folder / file).items()}
    pickles = [p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in sorted(folder.glob(pattern))]
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
    state = {}
    for file in files:
        content = read_pickle(folder / file)
        if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
            raise ExportError(f"{folder / file}: expected tensors by name and nothing else")
        state |= content
    return state


def _weight_files(folder: Path, stem: str, suffix: str) -> list[str] | None:
    """One file, or those of an index, all of which are there; None if there is neither."""
    index = folder / f"{stem}.{suffix}.index.json"
    if not index.is_file():
        return [f"{stem}.{suffix}"] if (folder / f"{stem}.{suffix}").is_file() else None
    files = sorted(set(_read_json(index).get("weight_map", {}).values()))
    for file in files:
        if Path(file).name != file or not (folder / file).is_file():
            raise ExportError(f"{folder}: {file}, named in {index.name}, is not in the folder")
    return files


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt") as reader:
            return {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        raise ExportError(f"{path}: damaged: {error}") from None


def read_special_tokens(tokenizer_folder: str | Path | None) -> dict[str, int]:
    """bos_token_id and eos_token_id, as far as the tokenizer's files name them."""
    if tokenizer_folder is None:
        return {}
    folder = Path(tokenizer_folder)
    if not (folder / "tokenizer_config.json").is_file() or not (folder / "tokenizer.json").is_file():
        return {}
    names, tokenizer = _read_json(folder / "tokenizer_config.json"), _read_json(folder / "tokenizer.json")
    vocab = tokenizer.get("model", {}).get("vocab", {})
    # Unigram models keep [token, score] pairs in the order of their ids.
    ids = {token: i for i, (token, _) in enumerate(vocab)} if isinstance(vocab, list) else dict(vocab)
    ids |= {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}
    special_tokens = {}
    for kind in ("bos_token", "eos_token"):
        token = names.get(kind)
        token = token.get("content") if isinstance(token, dict) else token
        if token in ids:
            special_tokens[f"{kind}_id"] = ids[token]
    return special_tokens


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ExportError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ExportError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _long_name(dtype: str) -> str:
    return str(DTYPES[dtype]).removeprefix("torch.")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
