"""The Hugging Face model formats: what each can express, its config.json, and the names of its tensors.

A run's model is exported in one of the six, depending on its configuration (`choose_format`). MPT folders can also be
imported here; a companion imports the others.

GPT-2: transformers' `GPT2LMHeadModel`, for models with learned positions or none. Biases and positions that the model
does not have are written as zeros.

MPT: transformers' `MptForCausalLM`, for models with ALiBi; and the folders that LLM Foundry writes for its own code.
Both say model_type mpt and use our tensors' names. transformers' model fixes or ignores most options (read at 5.23:
modeling_mpt.py), LLM Foundry's has them all; so more can be read than written.

Llama and three formats like it, for models with RoPE, RMSNorm and gated feed-forward layers. Mistral has a sliding
window, Qwen2 biases of q, k and v alone, Qwen3 norms of each head of q and of k. Read at transformers 5.23:
modeling_llama.py, modeling_mistral.py, modeling_qwen2.py, modeling_qwen3.py.
"""

import json
from collections.abc import Callable
from typing import Any

from llmfoundry_lite.config.model_schema import LLAMA3_KEYS, FFNActivation, ModelConfig, RopeScaling
from llmfoundry_lite.convert.hf_format import (
    ConfigField,
    HFConfig,
    HFFormat,
    Options,
    ReadableHFFormat,
    State,
    TensorSource,
    Values,
    activation_name,
    check_values,
    common_attention_options,
    multihead_attention_types,
    qkv_names,
    read_positive_integer,
    split_keys,
)
from llmfoundry_lite.errors import ExportError

# ------------------------------------------------------------------------------------------------------------- GPT-2


def gpt2_options(config: ModelConfig) -> Options:
    """Return the values that GPT-2 can express of each option that it restricts, for a model of this configuration."""
    return {
        **common_attention_options(config),
        "attn_config.clip_qkv": (None,),
        # 1.0 is scale_attn_weights: false, which transformers 5 heeds, and 4 only with attn_implementation="eager".
        "attn_config.softmax_scale": (None, config.head_dim**-0.5, 1.0),
        "attn_config.attn_type": multihead_attention_types(config),
        "ffn_config.ffn_type": ("mptmlp",),
        "norm_type": ("low_precision_layernorm", "layernorm"),
        "logit_scale": (None,),
    }


GPT2_FIELDS: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": ConfigField("d_model"),
    "n_head": ConfigField("n_heads"),
    "n_layer": ConfigField("n_layers"),
    "n_inner": lambda config: config.ffn_dim,
    "n_positions": ConfigField("max_seq_len"),
    "vocab_size": ConfigField("vocab_size"),
    "activation_function": activation_name,
    "layer_norm_epsilon": ConfigField("norm_eps", 1e-5),
    "scale_attn_weights": lambda config: config.attn_config.softmax_scale != 1.0,
    "attn_pdrop": ConfigField("attn_config.attn_pdrop", 0.1),
    "resid_pdrop": ConfigField("resid_pdrop", 0.1),
    "embd_pdrop": ConfigField("emb_pdrop", 0.1),
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": ConfigField("tie_word_embeddings", True),
    "use_cache": True,
    # transformers does not read these. The first two say which of its tensors are zeros that the export has added.
    "no_bias": lambda config: config.no_bias,
    "learned_pos_emb": lambda config: config.uses_learned_positions,
    "norm_type": ConfigField("norm_type", "low_precision_layernorm"),
    "attn_uses_sequence_id": ConfigField("attn_config.attn_uses_sequence_id", False),
}
GPT2_BLOCK = {
    "ln_1": "norm_1",
    "attn.c_attn": "attn.Wqkv",
    "attn.c_proj": "attn.out_proj",
    "ln_2": "norm_2",
    "mlp.c_fc": "ffn.up_proj",
    "mlp.c_proj": "ffn.down_proj",
}


def gpt2_tensor_sources(config: ModelConfig) -> dict[str, TensorSource]:
    """Return the source in our model of each tensor of GPT-2, by its name, in the order of transformers.

    For example, "transformer.h.0.mlp.c_fc.weight" is the transposed "transformer.blocks.0.ffn.up_proj.weight", because
    GPT-2's linear layers are Conv1D modules. Biases and positions that our model does not have become zeros.
    """
    # Token and position embeddings have the same names.
    sources = {name: TensorSource((name,)) for name in ("transformer.wte.weight", "transformer.wpe.weight")}

    # In blocks, GPT-2 has one matrix for q, k and v.
    for i in range(config.n_layers):
        for their_module, our_module in GPT2_BLOCK.items():
            for part in ("weight", "bias"):
                our_names = qkv_names(f"transformer.blocks.{i}.{our_module}.{part}", config)
                is_conv1d = part == "weight" and not their_module.startswith("ln")
                their_name = f"transformer.h.{i}.{their_module}.{part}"
                sources[their_name] = TensorSource(our_names, is_transposed=is_conv1d)

    # The last norm follows the blocks.
    for part in ("weight", "bias"):
        sources[f"transformer.ln_f.{part}"] = TensorSource((f"transformer.norm_f.{part}",))
    return sources


GPT2 = HFFormat(
    title="GPT-2, the format without ALiBi and RoPE",
    expressible_options=gpt2_options,
    fields=GPT2_FIELDS,
    tensor_sources=gpt2_tensor_sources,
)

# --------------------------------------------------------------------------------------------------------------- MPT


def mpt_options(config: ModelConfig) -> Options:
    """Return the values that transformers' MPT can express of each option that it restricts.

    Its feed-forward layers are four times as wide as the model. If the configuration sets the width itself
    (`ffn_hidden_size`), that must be this width, and `expansion_ratio` has no effect.
    """
    has_width = config.ffn_config.ffn_hidden_size is not None
    return {
        **TRANSFORMERS_MPT_VALUES,
        **common_attention_options(config),
        "attn_config.attn_type": multihead_attention_types(config),
        "expansion_ratio": (config.expansion_ratio if has_width else 4,),
        "ffn_config.ffn_hidden_size": (None, 4 * config.d_model),
    }


MPT_FIELDS: dict[str, Any] = {
    "architectures": ["MptForCausalLM"],
    "model_type": "mpt",
    "d_model": ConfigField("d_model"),
    "n_heads": ConfigField("n_heads"),
    "n_layers": ConfigField("n_layers"),
    "expansion_ratio": 4,
    "max_seq_len": ConfigField("max_seq_len"),
    "vocab_size": ConfigField("vocab_size"),
    "layer_norm_epsilon": lambda config: config.norm_eps,
    "norm_type": ConfigField("norm_type", "low_precision_layernorm"),
    "learned_pos_emb": ConfigField("learned_pos_emb", True),
    "no_bias": True,
    "logit_scale": None,
    "attn_config.attn_type": "multihead_attention",
    "attn_config.attn_impl": "torch",
    "attn_config.attn_pdrop": 0,
    "attn_config.alibi": True,
    "attn_config.alibi_bias_max": ConfigField("attn_config.alibi_bias_max", 8),
    "attn_config.clip_qkv": ConfigField("attn_config.clip_qkv", None),
    "attn_config.softmax_scale": ConfigField("attn_config.softmax_scale", None),
    "attn_config.attn_uses_sequence_id": ConfigField("attn_config.attn_uses_sequence_id", False),
    "attn_config.qk_ln": False,
    "attn_config.prefix_lm": False,
    "tie_word_embeddings": ConfigField("tie_word_embeddings", True),
    "use_cache": True,
}
MPT_READ_ONLY_DEFAULTS = {
    "expansion_ratio": 4,
    "resid_pdrop": 0.0,
    "emb_pdrop": 0.0,
    "embedding_fraction": 1.0,
    "logit_scale": None,
    "attn_config.attn_type": "multihead_attention",
    "attn_config.attn_pdrop": 0.0,
    "attn_config.fused_qkv": True,
    "attn_config.qk_ln": False,
    "attn_config.qk_gn": False,
    "attn_config.norm_type": "low_precision_layernorm",
    "attn_config.norm_eps": 1e-5,
    "attn_config.sliding_window_size": -1,
    "ffn_config.ffn_type": "mptmlp",
    "ffn_config.ffn_hidden_size": None,
}
"""Options that transformers' MPT does not have, and LLM Foundry's does: the key, which is the same in config.json and
ModelConfig -> LLM Foundry's default."""
MPT_READABLE_VALUES: Options = {
    "architectures": (None, ["MptForCausalLM"], ["MPTForCausalLM"]),
    "attn_config.attn_type": ("multihead_attention", "grouped_query_attention", "multiquery_attention"),
    "attn_config.prefix_lm": (False,),
    "attn_config.attn_logit_softcapping": (None,),
    "attn_config.attn_temperature_tuning.attn_scale": (0.0,),
    "attn_config.kv_dim": (None,),
    "attn_config.nope": (False,),
    "attn_config.norm_type": ("low_precision_layernorm", "layernorm", "low_precision_rmsnorm", "rmsnorm"),
    "ffn_config.ffn_type": ("mptmlp", "mptglu"),
    "ffn_config.ffn_act_fn.name": ("gelu", "quick_gelu", "relu", "silu"),
    "norm_type": ("low_precision_layernorm", "layernorm", "low_precision_rmsnorm", "rmsnorm"),
    "final_logit_softcapping": (None,),
    "residual_modification": (None,),
    "block_overrides": (None,),
}
TRANSFORMERS_MPT_VALUES: Options = {
    "attn_config.alibi": (True,),
    "attn_config.alibi_bias_max": (8,),
    "attn_config.attn_type": ("multihead_attention",),
    "attn_config.rope": (False,),
    "attn_config.qk_ln": (False,),
    "attn_config.qk_gn": (False,),
    "attn_config.sliding_window_size": (-1,),
    "ffn_config.ffn_type": ("mptmlp",),
    "ffn_config.ffn_act_fn.name": ("gelu",),
    "ffn_config.ffn_act_fn.approximate": ("none",),
    "norm_type": ("low_precision_layernorm", "layernorm"),
    "no_bias": (True,),
    "logit_scale": (None,),
}
"""The only values that transformers' own MPT computes with, whatever else its config.json says."""
MPT_ROPE_VALUES: dict[str, Options] = {
    "hf": {"attn_config.rope_hf_config.type": ("no_scaling", "linear", "dynamic", "llama3")},
    "dail": {
        "attn_config.rope_dail_config.type": ("original",),
        "attn_config.rope_dail_config.pos_idx_in_fp32": (True,),
    },
}


def mpt_tensor_sources(config: ModelConfig) -> dict[str, TensorSource]:
    """Return the source in our model of each tensor of transformers' MPT, by its name, in the order of transformers.

    The names are the same as ours, except that MPT has one matrix for q, k and v. It has no biases.
    """
    modules = ("norm_1", "attn.Wqkv", "attn.out_proj", "norm_2", "ffn.up_proj", "ffn.down_proj")
    names = ["transformer.wte.weight"]
    for i in range(config.n_layers):
        names += [f"transformer.blocks.{i}.{module}.weight" for module in modules]
    names.append("transformer.norm_f.weight")
    return {name: TensorSource(qkv_names(name, config)) for name in names}


def read_mpt_values(values: Values, hf_config: HFConfig, _state: State, location: str) -> Values:
    """Read the options of an MPT folder that do not simply follow from one key of its config.json.

    values: the options that have been read so far, by dotted keys of ModelConfig.
    location: the folder, for errors.

    transformers' MPT and LLM Foundry's have the same model_type, but different defaults, and compute different things
    from the same keys. Returns options to add to `values`. Raises ExportError for a model that cannot be read.
    """
    is_transformers = hf_config.get("architectures") == ["MptForCausalLM"]
    if is_transformers:
        check_values(hf_config, TRANSFORMERS_MPT_VALUES, location)
    check_no_other_code(hf_config, location)

    # Newer keys may only repeat the values of others.
    no_bias = hf_config.get("no_bias", is_transformers)
    redundant_keys = {
        "attention_bias": (None, not no_bias),
        "head_dim": (None, values["d_model"] // values["n_heads"]),
    }
    check_values(hf_config, redundant_keys, location)

    # transformers has layer_norm_epsilon, and LLM Foundry norm_eps. If both are there, they must be equal.
    default_eps = 1e-5 if is_transformers else hf_config.get("norm_eps", 1e-5)
    norm_eps = hf_config.get("layer_norm_epsilon", default_eps)
    check_values(hf_config, {"norm_eps": (norm_eps,)}, location)

    # Options whose default depends on the library, or that are in a block which may be absent or null.
    activation = (hf_config.get("ffn_config") or {}).get("ffn_act_fn") or {}
    attention = hf_config.get("attn_config") or {}
    other_values: Values = {
        "no_bias": no_bias,
        "norm_eps": norm_eps,
        "ffn_config.ffn_act_fn": FFNActivation(
            name=activation.get("name", "gelu"), approximate=activation.get("approximate", "none")
        ),
        "attn_config.alibi": attention.get("alibi", is_transformers),
    }

    # Options that are only there for some types of attention.
    if values["attn_config.attn_type"] == "grouped_query_attention":
        attention_location = f"{location}: attn_config"
        other_values["attn_config.kv_n_heads"] = read_positive_integer(attention, "kv_n_heads", attention_location)
    if attention.get("rope", False):
        other_values |= read_mpt_rope(hf_config, location)
    return other_values


def read_mpt_rope(hf_config: HFConfig, location: str) -> Values:
    """Read the settings of the rotary embedding (RoPE) from config.json of LLM Foundry's MPT.

    LLM Foundry has two implementations: "dail", and "hf", which can scale positions. "dail" ignores the settings of
    scaling, so they are not read with it. Returns options by dotted keys of ModelConfig. Raises ExportError for an
    implementation or a value that cannot be read.
    """
    attention = hf_config["attn_config"]
    implementation = attention.get("rope_impl", "dail")
    readable_values = {"attn_config.rope_impl": ("dail", "hf"), **MPT_ROPE_VALUES.get(implementation, {})}
    check_values(hf_config, readable_values, location)

    # A setting that is null counts as absent.
    scaling: dict[str, Any] = {}
    if implementation == "hf":
        scaling = attention.get("rope_hf_config") or {}
    scaling = {key: setting for key, setting in scaling.items() if setting is not None}
    return {
        "attn_config.rope": True,
        "attn_config.rope_impl": implementation,
        "attn_config.rope_hf_config": RopeScaling(**scaling),
        "attn_config.rope_theta": attention.get("rope_theta", 10_000),
    }


def check_no_other_code(hf_config: HFConfig, location: str) -> None:
    """Raise ExportError for a folder whose model is defined by code of its own, except LLM Foundry's, which is known.

    The code of a folder never runs here. `auto_map` in config.json maps a class of transformers to the class in the
    folder's code, such as "AutoConfig": "configuration_mpt.MPTConfig". Of these, only the names of LLM Foundry's MPT
    are accepted, because other code may compute anything. A tokenizer's class does not matter, because tokenizers are
    read from their files.
    """
    known_classes = ("MPTConfig", "MPTForCausalLM")
    auto_map = hf_config.get("auto_map") or {}
    if not isinstance(auto_map, dict):
        raise ExportError(f"{location}: auto_map is {json.dumps(auto_map)[:60]} in config.json; expected an object")

    for auto_class, reference in auto_map.items():
        class_name = str(reference).rpartition(".")[2]
        is_known = class_name in known_classes
        if not is_known and not auto_class.startswith("AutoTokenizer"):
            raise ExportError(
                f"{location}: auto_map.{auto_class} is {reference!r} in config.json; a folder's own code is not run, "
                f"and only LLM Foundry's {' and '.join(known_classes)} are known here"
            )


MPT = ReadableHFFormat(
    title="MPT, the format for ALiBi models",
    expressible_options=mpt_options,
    fields=MPT_FIELDS,
    read_only_fields={"layer_norm_epsilon": ConfigField("norm_eps", 1e-5)}
    | {key: ConfigField(key, default) for key, default in MPT_READ_ONLY_DEFAULTS.items()},
    readable_values=MPT_READABLE_VALUES,
    tensor_sources=mpt_tensor_sources,
    read_other_values=read_mpt_values,
    other_known_keys=split_keys(
        "head_dim attention_bias norm_eps residual_coeff auto_map",
        "attn_config.kv_n_heads attn_config.rope attn_config.rope_theta attn_config.rope_impl",
        *(f"attn_config.rope_hf_config.{key}" for key in ("type", "factor", *LLAMA3_KEYS)),
        *(f"attn_config.rope_dail_config.{key}" for key in ("type", "pos_idx_in_fp32", "xpos_scale_base")),
        "attn_config.attn_temperature_tuning.floor_scale",
        "ffn_config.ffn_act_fn.approximate ffn_config.ffn_act_fn.inplace",
        # How weights begin, and how LLM Foundry computes.
        "init_config init_device param_init_fn init_std fc_type use_pad_tok_in_ffn verbose loss_fn name",
        "attn_config.fc_type ffn_config.fc_type",
    ),
)

# ---------------------------------------------------------------------------------- what all formats with RoPE have


def rope_options(config: ModelConfig) -> Options:
    """Return the values that formats with RoPE can express of each option that they restrict.

    `config` is the model's configuration, on which some of the values depend.
    """
    return {
        **common_attention_options(config),
        "attn_config.head_dim": (config.attn_config.head_dim,),
        "attn_config.clip_qkv": (None,),
        "attn_config.softmax_scale": (None, config.head_dim**-0.5),
        "ffn_config.ffn_type": ("mptglu",),
        "norm_type": ("low_precision_rmsnorm", "rmsnorm"),
        "logit_scale": (None,),
    }


ROPE_TYPES = {"no_scaling": "default", "linear": "linear", "dynamic": "dynamic", "llama3": "llama3"}
"""Our name of a scaling of RoPE -> transformers' rope_type."""


def rope_parameters(config: ModelConfig) -> HFConfig:
    """Return a model's `rope_parameters` of config.json, which transformers 5 reads.

    For linear scaling, that is for instance {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}.
    """
    scaling = config.attn_config.rope_hf_config
    theta = float(config.attn_config.rope_theta)

    # transformers has no NTK scaling. It is the same as a larger theta without scaling (see
    # `attention.build_rotation`), so that is written.
    if scaling.type == "ntk":
        theta *= scaling.factor ** (config.head_dim / max(config.head_dim - 2, 1))
        scaling = RopeScaling()

    parameters: HFConfig = {"rope_type": ROPE_TYPES[scaling.type]}
    if scaling.type != "no_scaling":
        parameters["factor"] = scaling.factor
    if scaling.type == "llama3":
        parameters |= {key: getattr(scaling, key) for key in LLAMA3_KEYS}
    parameters["rope_theta"] = theta
    return parameters


def rope_scaling(config: ModelConfig) -> HFConfig | None:
    """Return a model's `rope_scaling` of config.json, which transformers 4 reads, or None without a scaling."""
    scaling = rope_parameters(config)
    del scaling["rope_theta"]
    return None if scaling["rope_type"] == "default" else scaling


ROPE_FIELDS: dict[str, Any] = {
    "hidden_size": ConfigField("d_model"),
    "num_attention_heads": ConfigField("n_heads"),
    "num_key_value_heads": lambda config: config.num_kv_heads,
    "head_dim": lambda config: config.head_dim,
    "num_hidden_layers": ConfigField("n_layers"),
    "intermediate_size": lambda config: config.ffn_dim,
    "max_position_embeddings": ConfigField("max_seq_len"),
    "vocab_size": ConfigField("vocab_size"),
    "hidden_act": activation_name,
    "rms_norm_eps": ConfigField("norm_eps", 1e-6),
    "rope_parameters": rope_parameters,
    "rope_theta": lambda config: rope_parameters(config)["rope_theta"],
    "rope_scaling": rope_scaling,
    "attention_dropout": ConfigField("attn_config.attn_pdrop", 0.0),
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": ConfigField("tie_word_embeddings", False),
    "use_cache": True,
    # transformers reads neither: its norm is in fp32, and a text is one document.
    "norm_type": ConfigField("norm_type", "rmsnorm"),
    "attn_uses_sequence_id": ConfigField("attn_config.attn_uses_sequence_id", False),
}
LLAMA_BLOCK = {
    "self_attn.o_proj": "attn.out_proj",
    "mlp.gate_proj": "ffn.gate_proj",
    "mlp.up_proj": "ffn.up_proj",
    "mlp.down_proj": "ffn.down_proj",
}


def rope_tensor_sources(config: ModelConfig) -> dict[str, TensorSource]:
    """Return the source in our model of each tensor of a format with RoPE, by its name, in the order of transformers.

    All formats with RoPE have separate matrices for q, k and v. If our model has them in one matrix, each is a range of
    its rows: "model.layers.0.self_attn.k_proj.weight" are the rows from `q_dim` to `q_dim + kv_dim` of
    "transformer.blocks.0.attn.Wqkv.weight".
    """
    sources = {"model.embed_tokens.weight": TensorSource(("transformer.wte.weight",))}
    for i in range(config.n_layers):
        theirs = f"model.layers.{i}"
        ours = f"transformer.blocks.{i}"
        sources[f"{theirs}.input_layernorm.weight"] = TensorSource((f"{ours}.norm_1.weight",))

        # Linear layers have all weights first, then all biases.
        for part in ("weight", "bias"):
            if part == "weight" or config.has_qkv_bias:
                for letter in "qkv":
                    sources[f"{theirs}.self_attn.{letter}_proj.{part}"] = _qkv_source(config, ours, letter, part)
            if part == "weight" or not config.no_bias:
                for their_module, our_module in LLAMA_BLOCK.items():
                    sources[f"{theirs}.{their_module}.{part}"] = TensorSource((f"{ours}.{our_module}.{part}",))

        # Norms of q and k, if any, and the norm before the feed-forward layer follow.
        if config.attn_config.qk_gn:
            for letter in "qk":
                sources[f"{theirs}.self_attn.{letter}_norm.weight"] = TensorSource((f"{ours}.attn.{letter}_ln.weight",))
        sources[f"{theirs}.post_attention_layernorm.weight"] = TensorSource((f"{ours}.norm_2.weight",))
    sources["model.norm.weight"] = TensorSource(("transformer.norm_f.weight",))
    return sources


def _qkv_source(config: ModelConfig, block: str, letter: str, part: str) -> TensorSource:
    """Return the source of the projection that makes queries, keys or values.

    block: the name of our block, such as "transformer.blocks.0".
    letter: "q", "k" or "v".
    part: "weight" or "bias".
    """
    if not config.attn_config.fused_qkv:
        return TensorSource((f"{block}.attn.W{letter}.{part}",))

    # The fused matrix has the rows of q, then those of k, then those of v.
    q_end = config.q_dim
    k_end = q_end + config.kv_dim
    rows = {"q": (0, q_end), "k": (q_end, k_end), "v": (k_end, k_end + config.kv_dim)}
    return TensorSource((f"{block}.attn.Wqkv.{part}",), rows[letter])


def build_rope_format(
    name: str,
    title: str,
    expressible_options: Callable[[ModelConfig], Options],
    tensor_sources: Callable[[ModelConfig], dict[str, TensorSource]] = rope_tensor_sources,
    **fields: Any,
) -> HFFormat:
    """Build the format of transformers' `<name>ForCausalLM`, a class like Llama's.

    title: the format's name in errors.
    expressible_options: function that returns the values that the format can express of each restricted option.
    tensor_sources: function that returns the source of each tensor.
    fields: keys of config.json that the format has besides ROPE_FIELDS.
    """
    classes = {"architectures": [f"{name}ForCausalLM"], "model_type": name.lower()}
    return HFFormat(
        title=title,
        expressible_options=expressible_options,
        fields={**classes, **ROPE_FIELDS, **fields},
        tensor_sources=tensor_sources,
    )


# -------------------------------------------------------------------------------- Llama, Mistral, Qwen2 and Qwen3


def llama_tensor_sources(config: ModelConfig) -> dict[str, TensorSource]:
    """Return the source in our model of each tensor of Llama, by its name.

    Llama has biases for q, k, v and the output, or for none of them. If our model has biases only for q, k and v, the
    output's is zeros.
    """
    sources = rope_tensor_sources(config)
    if config.no_bias and config.has_qkv_bias:
        for i in range(config.n_layers):
            name = f"transformer.blocks.{i}.attn.out_proj.bias"
            sources[f"model.layers.{i}.self_attn.o_proj.bias"] = TensorSource((name,))
    return sources


def mistral_options(config: ModelConfig) -> Options:
    """Return the values that Mistral can express of each option that it restricts: no biases, any sliding window."""
    return {
        **rope_options(config),
        "no_bias": (True,),
        "attn_config.sliding_window_size": (config.attn_config.sliding_window_size,),
    }


def mistral_window(config: ModelConfig) -> int | None:
    """Return `sliding_window` of config.json: the number of tokens that a token attends to, itself included.

    Our `sliding_window_size` does not count the token itself, and is -1 without a window, which becomes None.
    """
    return config.attn_config.sliding_window_size + 1 or None


def qwen2_options(config: ModelConfig) -> Options:
    """Return the values that Qwen2 can express of each option that it restricts: biases of q, k and v."""
    return {**rope_options(config), "attn_config.qkv_bias": (True,)}


def qwen3_options(config: ModelConfig) -> Options:
    """Return the values that Qwen3 can express of each option that it restricts.

    It has no biases, and its norms of q and k are like all other norms.
    """
    return {
        **rope_options(config),
        "no_bias": (True,),
        "attn_config.qk_gn": (True,),
        "attn_config.norm_type": (config.norm_type,),
        "attn_config.norm_eps": (config.norm_eps,),
    }


LLAMA = build_rope_format(
    "Llama",
    "Llama, the format for RoPE",
    rope_options,
    llama_tensor_sources,
    attention_bias=lambda config: config.has_qkv_bias,
    mlp_bias=lambda config: not config.no_bias,
)
MISTRAL = build_rope_format(
    "Mistral",
    "Mistral, the format for RoPE with a sliding window",
    mistral_options,
    sliding_window=mistral_window,
)
QWEN2 = build_rope_format(
    "Qwen2",
    "Qwen2, the format for RoPE with biases of q, k and v alone",
    qwen2_options,
    use_sliding_window=False,
)
QWEN3 = build_rope_format(
    "Qwen3",
    "Qwen3, the format for RoPE with norms of each head of q and k",
    qwen3_options,
    attention_bias=False,
    use_sliding_window=False,
)


def choose_format(config: ModelConfig) -> HFFormat:
    """Return the format in which a model is exported.

    It depends on how the model encodes positions, and with RoPE on biases, norms and windows of its attention. Whether
    the format can express all other options is checked later (`describe_inexpressible_option`).
    """
    attention = config.attn_config
    if attention.alibi:
        return MPT
    if not attention.rope:
        return GPT2
    if attention.qk_gn:
        return QWEN3
    if config.no_bias and attention.qkv_bias:
        return QWEN2
    return LLAMA if attention.sliding_window_size < 0 else MISTRAL
