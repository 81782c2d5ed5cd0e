"""MPT: token ids -> hidden states -> logits. Tensors in, tensors out.

What is special about this family: pre-norm blocks; one matrix for q, k and v; ALiBi, learned, rotary or no positions;
queries that may share heads of keys and values; optional norms and clamping of q, k, v; a plain or gated feed-forward
layer; one matrix for input and output embeddings unless they are untied. Parameter names are those of LLM Foundry and
of MPT in Hugging Face. Loss, precision, sharding and devices live elsewhere.

Legend: b batch, t time (s for keys), d model width, f feed-forward width, h heads, g heads of keys and values,
k head dimension, v vocabulary.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmfoundry_lite.config.model_schema import AttentionConfig, FFNActivation, ModelConfig
from llmfoundry_lite.models.attention import Mask, Rotation, alibi_slopes, build_mask, build_rotation, rotate
from llmfoundry_lite.models.dropout import drop, drop_keys_of_site, place_keys
from llmfoundry_lite.models.products import Linear, linear

Head = Callable[[Tensor, Tensor], Any]
"""(hidden_btd, unembedding_vd) -> logits, a loss, or log-probabilities."""


class MPT(nn.Module):
    """The language model; weights are uninitialised until `models.initialise` or a checkpoint fills them.

    `attn_impl` is reference, sdpa, blocked, flex or flash, which changes how the model is computed, not its function.
    """

    def __init__(self, config: ModelConfig, attn_impl: str = "sdpa"):
        super().__init__()
        self.config = config
        self.transformer = Transformer(config, attn_impl)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.d_model, config.vocab_size, bias=False)
        scale = config.logit_scale
        self.logit_scale = 1.0 / math.sqrt(config.d_model) if isinstance(scale, str) else scale

    def forward(self, tokens_bt: Tensor, *, head: Head | None = None, **options: Any) -> Any:
        """Compute logits [b, t, v] of tokens_bt (int64), or what `head` makes of hidden states and output embedding.

        Other options are those of `Transformer`. The head runs inside the forward pass, because only there a sharded
        embedding is whole.
        """
        hidden_btd = self.transformer(tokens_bt, **options)
        if self.logit_scale is not None:
            hidden_btd = hidden_btd * self.logit_scale
        output = self.transformer.wte if self.config.tie_word_embeddings else self.lm_head
        return (head or linear)(hidden_btd, output.weight)


class Transformer(nn.Module):
    def __init__(self, config: ModelConfig, attn_impl: str):
        super().__init__()
        self.config = config
        self.attn_impl = attn_impl
        self.wte = nn.Embedding(config.vocab_size, config.d_model)
        if config.uses_learned_positions:
            self.wpe = nn.Embedding(config.max_seq_len, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.first_block = 0
        """Number of the first block; a stage of a pipeline has later ones."""
        self.norm_f = Norm(config.d_model, config, has_bias=not config.no_bias)
        options = config.attn_config
        self.slopes = alibi_slopes(config.n_heads, options.alibi_bias_max) if options.alibi else None
        self._slopes_h: Tensor | None = None

    def forward(
        self,
        tokens_bt: Tensor,
        positions_bt: Tensor | None = None,
        attention_mask_bts: Tensor | None = None,
        documents_bt: Tensor | None = None,
        cache: "KeyValueCache | None" = None,
        build_mask: Callable[..., Mask] = build_mask,
        drop_keys_b: Tensor | None = None,
    ) -> Tensor:
        """Compute hidden_btd of tokens_bt (int64).

        Rows that are not plain text, such as several continuations of one context, give their tokens' positions and an
        attention mask (bool). `documents_bt` numbers documents, which do not attend to each other. With a cache, the
        tokens follow those it holds, and join them. Where the tokens are a part of their rows, `build_mask` knows the
        others (context parallelism), and documents are those of whole rows. In training, `drop_keys_b` seed what each
        row drops (`models/dropout.py`); without them torch's generator does.
        """
        config, num_past = self.config, 0 if cache is None else cache.length
        num_keys = num_past + (tokens_bt if positions_bt is None else positions_bt).size(1)
        if positions_bt is None:
            positions_bt = torch.arange(num_past, num_keys, device=tokens_bt.device)[None]
        drop_keys_bt = None if drop_keys_b is None else self.stream_part(place_keys(drop_keys_b, positions_bt))
        x_btd = self.embed(tokens_bt, positions_bt, drop_keys_bt)

        # One of each for all blocks: a bias is h*t*s numbers kept for the backward pass, and per block it would add up.
        mask = build_mask(
            config.attn_config,
            self.attn_impl,
            self.slopes_on(x_btd.device),
            positions_bt,
            num_keys,
            attention_mask_bts,
            documents_bt,
        ).to(x_btd.dtype)
        rotation = None
        if config.attn_config.rope:
            rotation = build_rotation(config.attn_config, config.head_dim, config.max_seq_len, positions_bt)
        for layer, block in enumerate(self.blocks, self.first_block):
            extend = None if cache is None else partial(cache.extend, layer)
            keys = () if drop_keys_bt is None else (drop_keys_of_site(drop_keys_bt, layer + 1),)
            x_btd = block(x_btd, mask, rotation, extend, *keys)
        if cache is not None:
            cache.length = num_keys
        return self.norm_f(x_btd)

    def embed(self, tokens_bt: Tensor, positions_bt: Tensor, drop_keys_bt: Tensor | None) -> Tensor:
        config = self.config
        x_btd = self.wte(tokens_bt)
        if config.uses_learned_positions:
            x_btd = x_btd + self.wpe(positions_bt)
        if config.embedding_fraction != 1.0:
            # Shrinks the embeddings' gradient alone (Zeng et al. 2022, GLM-130B).
            x_btd = x_btd * config.embedding_fraction + x_btd.detach() * (1.0 - config.embedding_fraction)
        return drop(x_btd, config.emb_pdrop, self.training, drop_keys_bt)

    def stream_part(self, x_bt: Tensor) -> Tensor:
        """Take this rank's tokens of the residual stream, which tensor parallelism may divide."""
        return x_bt

    def slopes_on(self, device: torch.device) -> Tensor | None:
        """Return ALiBi's slopes, copied once: a copy waits for the device, and a buffer would be saved and moved."""
        if self.slopes is None:
            return None
        if self._slopes_h is None or self._slopes_h.device != device:
            self._slopes_h = torch.tensor(self.slopes, device=device)
        return self._slopes_h


class Block(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.norm_1 = Norm(config.d_model, config, has_bias=not config.no_bias)
        self.attn = Attention(config)
        self.norm_2 = Norm(config.d_model, config, has_bias=not config.no_bias)
        self.ffn = GatedFeedForward(config) if config.ffn_config.ffn_type == "mptglu" else FeedForward(config)
        self.pdrop = config.resid_pdrop

    def forward(
        self,
        x_btd: Tensor,
        mask: Mask,
        rotation: Rotation | None,
        extend: Callable | None = None,
        drop_keys_bt: Tensor | None = None,
    ) -> Tensor:
        other_keys_bt = None if drop_keys_bt is None else drop_keys_of_site(drop_keys_bt, 1)
        attended_btd = self.attn(self.norm_1(x_btd), mask, rotation, extend)
        x_btd = x_btd + drop(attended_btd, self.pdrop, self.training, drop_keys_bt)
        return x_btd + drop(self.ffn(self.norm_2(x_btd)), self.pdrop, self.training, other_keys_bt)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        options, d, bias = config.attn_config, config.d_model, not config.no_bias
        self.head_dim, self.kv_dim, has_qkv_bias = config.head_dim, config.kv_dim, config.has_qkv_bias
        if options.fused_qkv:
            self.Wqkv = Linear(d, config.q_dim + 2 * self.kv_dim, bias=has_qkv_bias)
        else:
            self.Wq = Linear(d, config.q_dim, bias=has_qkv_bias)
            self.Wk = Linear(d, self.kv_dim, bias=has_qkv_bias)
            self.Wv = Linear(d, self.kv_dim, bias=has_qkv_bias)
        self.out_proj = Linear(config.q_dim, d, bias=bias)
        if options.qk_ln or options.qk_gn:
            widths = (config.q_dim, self.kv_dim) if options.qk_ln else (self.head_dim, self.head_dim)
            self.q_ln, self.k_ln = (Norm(width, options, has_bias=bias) for width in widths)
        self.options = options

    def forward(self, x_btd: Tensor, mask: Mask, rotation: Rotation | None, extend: Callable | None) -> Tensor:
        options = self.options
        if options.fused_qkv:
            qkv = self.clamp(self.Wqkv(x_btd))
            q, k, v = qkv.split([qkv.size(-1) - 2 * self.kv_dim, self.kv_dim, self.kv_dim], dim=-1)
        else:
            q, k, v = (self.clamp(project(x_btd)) for project in (self.Wq, self.Wk, self.Wv))
        if options.qk_ln:
            q, k = self.q_ln(q), self.k_ln(k)
        q_bthk, k_btgk, v_btgk = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        if options.qk_gn:
            q_bthk, k_btgk = self.q_ln(q_bthk), self.k_ln(k_btgk)
        if rotation is not None:
            q_bthk, k_btgk = rotate(q_bthk, rotation), rotate(k_btgk, rotation)
        k_bsgk, v_bsgk = (k_btgk, v_btgk) if extend is None else extend(k_btgk, v_btgk)
        dropout_p = options.attn_pdrop if self.training else 0.0
        out_bthk = mask.attend(q_bthk, k_bsgk, v_bsgk, options.softmax_scale, dropout_p)
        return self.out_proj(out_bthk.flatten(-2))

    def clamp(self, qkv: Tensor) -> Tensor:
        limit = self.options.clip_qkv
        return qkv if limit is None else qkv.clamp(-limit, limit)


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.up_proj = Linear(config.d_model, config.ffn_dim, bias=not config.no_bias)
        self.down_proj = Linear(config.ffn_dim, config.d_model, bias=not config.no_bias)
        self.activate = activation(config.ffn_config.ffn_act_fn)

    def forward(self, x_btd: Tensor) -> Tensor:
        return self.down_proj(self.activate(self.up_proj(x_btd)))


class GatedFeedForward(FeedForward):
    """Shazeer 2020, "GLU Variants Improve Transformer"."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.gate_proj = Linear(config.d_model, config.ffn_dim, bias=not config.no_bias)

    def forward(self, x_btd: Tensor) -> Tensor:
        return self.down_proj(self.activate(self.gate_proj(x_btd)) * self.up_proj(x_btd))


def activation(config: FFNActivation) -> Callable[[Tensor], Tensor]:
    if config.name == "gelu":
        return partial(F.gelu, approximate=config.approximate)
    if config.name == "quick_gelu":
        return lambda x: x * torch.sigmoid(1.702 * x)
    return {"relu": F.relu, "silu": F.silu}[config.name]


class Norm(nn.Module):
    """LayerNorm or RMSNorm in the precision of its input; without `low_precision_` in fp32 whatever the input is."""

    bias: Tensor | None

    def __init__(self, width: int, config: ModelConfig | AttentionConfig, *, has_bias: bool):
        """`has_bias`: a LayerNorm has one; RMSNorm never has."""
        super().__init__()
        self.is_rms = config.norm_type.endswith("rmsnorm")
        self.weight = nn.Parameter(torch.empty(width))
        self.register_parameter("bias", nn.Parameter(torch.empty(width)) if has_bias and not self.is_rms else None)
        self.eps = config.norm_eps
        self.in_fp32 = not config.norm_type.startswith("low_precision_")

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width]"""
        return self.normalise(x, self.weight, self.bias)

    def normalise(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        dtype = x.dtype
        if self.in_fp32:
            x, weight, bias = x.float(), weight.float(), None if bias is None else bias.float()
        if self.is_rms:
            return F.rms_norm(x, x.shape[-1:], weight, self.eps).to(dtype)
        return F.layer_norm(x, x.shape[-1:], weight, bias, self.eps).to(dtype)


class KeyValueCache:
    """Keys and values of earlier tokens, so that decoding computes each token once."""

    def __init__(self, model: MPT, batch_size: int, num_tokens: int):
        """Make room for `num_tokens` tokens of `batch_size` rows."""
        self.length = 0
        self._shape_lbs = (model.config.n_layers, batch_size, num_tokens)
        self._keys_lbsgk: Tensor | None = None

    def extend(self, layer: int, k_btgk: Tensor, v_btgk: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values, and return all. The model advances `length` after its last layer."""
        # Dtype and heads are known only now: a policy or autocast may change the dtype, tensor parallelism the heads.
        if self._keys_lbsgk is None or (layer == 0 and self.length == 0):
            shape_lbsgk = (*self._shape_lbs, *k_btgk.shape[2:])
            self._keys_lbsgk, self._values_lbsgk = k_btgk.new_empty(shape_lbsgk), v_btgk.new_empty(shape_lbsgk)
        end = self.length + k_btgk.size(1)
        self._keys_lbsgk[layer, :, self.length : end] = k_btgk
        self._values_lbsgk[layer, :, self.length : end] = v_btgk
        return self._keys_lbsgk[layer, :, :end], self._values_lbsgk[layer, :, :end]
