"""Fold the multipliers of muP into weights, for formats that do not have them.

A model with muP multiplies its embeddings, the scores of attention and its logits (`config/mup.py`). The same is
computed by a plain model with other weights: each multiplier moves into the matrix or the norm before it. The results
are equal to the last bit if the multipliers are powers of 2, and up to rounding otherwise.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from llmfoundry_lite.config.model_schema import ModelConfig

State = Mapping[str, torch.Tensor]
EMBEDDINGS = ("transformer.wte.weight", "transformer.wpe.weight")


def without_multipliers(config: ModelConfig) -> ModelConfig:
    """Return the configuration of the plain model that `fold_multipliers` makes; the same one without muP."""
    if config.mup is None:
        return config
    softmax_scale = None if _folds_scores(config) else config.softmax_scale
    attention = replace(config.attn_config, softmax_scale=softmax_scale)
    return replace(config, mup=None, logit_scale=None, attn_config=attention)


def fold_multipliers(state_dict: State, config: ModelConfig) -> State:
    """Return the tensors of the plain model that computes what `config` computes with `state_dict`.

    Both have the names of `MPT.state_dict()`. Tensors without a multiplier are not copied, and without muP none is.
    """
    if config.mup is None:
        return state_dict
    embedding_factor = config.embedding_multiplier
    logit_factor = config.logit_multiplier or 1.0
    if config.tie_word_embeddings:
        logit_factor /= embedding_factor  # the output embedding has the input's factor, too

    folded = dict(state_dict)
    for name in EMBEDDINGS:
        if name in folded and embedding_factor != 1:
            folded[name] = folded[name] * embedding_factor
    # Logits are linear in the output of the last norm, and that is linear in its weight and bias.
    for name in ("transformer.norm_f.weight", "transformer.norm_f.bias"):
        if name in folded and logit_factor != 1:
            folded[name] = folded[name] * logit_factor
    if _folds_scores(config):
        _scale_queries(folded, config)
    return folded


def _folds_scores(config: ModelConfig) -> bool:
    """Return whether the scale of attention's scores moves into the queries.

    MPT, the format of models with ALiBi, has a key for the scale, and `clip_qkv` limits queries before they are scaled.
    """
    is_scaled = config.softmax_scale not in (None, config.head_dim**-0.5)
    return is_scaled and not config.attn_config.alibi and config.attn_config.clip_qkv is None


def _scale_queries(tensors: dict[str, torch.Tensor], config: ModelConfig) -> None:
    """Multiply the queries of all blocks, in place of the scale of their scores over the usual one."""
    assert config.softmax_scale is not None, "there is a scale to fold"
    factor = config.softmax_scale * config.head_dim**0.5
    has_norm = config.attn_config.qk_ln or config.attn_config.qk_gn
    query = "q_ln" if has_norm else "Wqkv" if config.attn_config.fused_qkv else "Wq"
    for block in range(config.n_layers):
        for part in ("weight", "bias"):
            name = f"transformer.blocks.{block}.attn.{query}.{part}"
            if name not in tensors:
                continue
            tensor = tensors[name].clone()
            num_rows = config.q_dim if query == "Wqkv" else tensor.size(0)
            tensor[:num_rows] *= factor
            tensors[name] = tensor
