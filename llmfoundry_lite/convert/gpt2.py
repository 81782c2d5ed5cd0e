"""GPT-2: transformers' `GPT2LMHeadModel`, for models with learned positions or none.

What GPT-2 always has and the model may not, biases and positions, travels as zeros.
"""

from collections.abc import Mapping

import torch

from llmfoundry_lite.config.model_schema import AttentionConfig, ModelConfig
from llmfoundry_lite.convert.layout import (
    ACTIVATIONS,
    HFConfig,
    Layout,
    Options,
    Source,
    activation_name,
    attention_types,
    check_values,
    ffn_options,
    keys,
    needed,
    qkv_names,
)


def can_be(config: ModelConfig) -> Options:
    return {
        "attn_config.qk_ln": (False,),
        "attn_config.qk_gn": (False,),
        "attn_config.clip_qkv": (None,),
        # 1.0 is scale_attn_weights: false, which transformers 5 heeds, and 4 only with attn_implementation="eager".
        "attn_config.softmax_scale": (None, config.head_dim**-0.5, 1.0),
        "attn_config.sliding_window_size": (-1,),
        "attn_config.attn_type": attention_types(config),
        "ffn_config.ffn_type": ("mptmlp",),
        "norm_type": ("low_precision_layernorm", "layernorm"),
        "logit_scale": (None,),
    }


def describe(config: ModelConfig) -> HFConfig:
    attention = config.attn_config
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": config.d_model,
        "n_head": config.n_heads,
        "n_layer": config.n_layers,
        "n_inner": config.ffn_dim,
        "n_positions": config.max_seq_len,
        "vocab_size": config.vocab_size,
        "activation_function": activation_name(config),
        "layer_norm_epsilon": config.norm_eps,
        "scale_attn_weights": attention.softmax_scale != 1.0,
        "attn_pdrop": attention.attn_pdrop,
        "resid_pdrop": config.resid_pdrop,
        "embd_pdrop": config.emb_pdrop,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": config.tie_word_embeddings,
        "use_cache": True,
        # GPT-2 knows none of these; the first two say which of its tensors are zeros that we added.
        "no_bias": config.no_bias,
        "learned_pos_emb": config.uses_learned_positions,
        "norm_type": config.norm_type,
        "attn_uses_sequence_id": attention.attn_uses_sequence_id,
    }


def sources(config: ModelConfig) -> dict[str, Source]:
    found = {name: Source((name,)) for name in ("transformer.wte.weight", "transformer.wpe.weight")}
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
            for part in ("weight", "bias"):
                names = qkv_names(f"transformer.blocks.{i}.{ours}.{part}", config)
                is_conv1d = part == "weight" and not theirs.startswith("ln")
                found[f"transformer.h.{i}.{theirs}.{part}"] = Source(names, is_transposed=is_conv1d)
    for part in ("weight", "bias"):
        found[f"transformer.ln_f.{part}"] = Source((f"transformer.norm_f.{part}",))
    if not config.tie_word_embeddings:
        found["lm_head.weight"] = Source(("lm_head.weight",))
    return found


MUST_BE: Options = {
    "architectures": (None, ["GPT2LMHeadModel"], ["GPT2Model"]),
    # What config.json leaves out is transformers' default.
    "activation_function": ("gelu_new", *(name for name in ACTIVATIONS if name != "gelu_new")),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "norm_type": ("low_precision_layernorm", "layernorm"),
}


def read_config(hf_config: HFConfig, state: Mapping[str, torch.Tensor], where: str) -> ModelConfig:
    check_values(hf_config, MUST_BE, where)
    d_model = needed(hf_config, "n_embd", where)
    wpe = state.get("transformer.wpe.weight")
    # Believe the two marks of our export only while the zeros they speak of are still zeros.
    no_bias = bool(hf_config.get("no_bias")) and not any(v.any() for k, v in state.items() if k.endswith(".bias"))
    has_positions = hf_config.get("learned_pos_emb", True) or (wpe is not None and bool(wpe.any()))
    activation = ACTIVATIONS[hf_config.get("activation_function", "gelu_new")]
    return ModelConfig(
        d_model=d_model,
        n_heads=needed(hf_config, "n_head", where),
        n_layers=needed(hf_config, "n_layer", where),
        **ffn_options(hf_config.get("n_inner") or 4 * d_model, d_model, ffn_act_fn=activation),
        max_seq_len=needed(hf_config, "n_positions", where),
        vocab_size=needed(hf_config, "vocab_size", where),
        resid_pdrop=hf_config.get("resid_pdrop", 0.1),
        emb_pdrop=hf_config.get("embd_pdrop", 0.1),
        learned_pos_emb=has_positions,
        attn_config=AttentionConfig(
            attn_pdrop=hf_config.get("attn_pdrop", 0.1),
            attn_uses_sequence_id=hf_config.get("attn_uses_sequence_id", False),
            softmax_scale=None if hf_config.get("scale_attn_weights", True) else 1.0,
        ),
        no_bias=no_bias,
        norm_type=hf_config.get("norm_type", "low_precision_layernorm"),
        norm_eps=hf_config.get("layer_norm_epsilon", 1e-5),
        tie_word_embeddings=hf_config.get("tie_word_embeddings", True),
    )


LAYOUT = Layout(
    title="GPT-2, the layout without ALiBi and RoPE",
    can_be=can_be,
    describe=describe,
    sources=sources,
    read_config=read_config,
    known={
        "": keys(
            "n_embd n_head n_layer n_inner n_positions n_ctx vocab_size activation_function layer_norm_epsilon",
            "scale_attn_weights scale_attn_by_inverse_layer_idx reorder_and_upcast_attn",
            "attn_pdrop resid_pdrop embd_pdrop no_bias learned_pos_emb norm_type attn_uses_sequence_id",
            "summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout",
            "predict_special_tokens",
        )
    },
    prefix="transformer.",
    buffers=(".attn.bias", ".attn.masked_bias"),
)
