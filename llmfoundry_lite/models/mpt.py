"""MPT: token ids -> hidden states -> logits. Tensors in, tensors out.

What is special about this model: pre-norm blocks; one matrix for q, k and v; ALiBi or learned positions;
optional qk LayerNorm and clamping of q, k, v; exact GELU; one matrix for input and output embeddings.
Parameter names are those of MPT in Hugging Face. Loss, precision, sharding and devices live elsewhere.

Legend: b batch, t time (s for keys), d model width, f feed-forward width, h heads, k head dimension, v vocabulary.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from llmfoundry_lite.config.schema import ModelConfig
from llmfoundry_lite.models.attention import alibi_bias, alibi_slopes, attend, causal, mask_bias

Head = Callable[[torch.Tensor, torch.Tensor], Any]
"""(hidden_btd, unembedding_vd) -> whatever is wanted of them: logits, a loss, log-probabilities."""


class MPT(nn.Module):
    """The language model; weights are uninitialised until `models.initialise` or a checkpoint fills them."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.transformer = Transformer(config)
        scale = config.logit_scale
        self.logit_scale = 1.0 / math.sqrt(config.d_model) if isinstance(scale, str) else scale

    def forward(
        self,
        tokens_bt: torch.Tensor,
        *,
        positions_bt: torch.Tensor | None = None,
        may_see_bts: torch.Tensor | None = None,
        head: Head | None = None,
    ) -> Any:
        """tokens_bt int64 -> logits [b, t, v], or what `head` makes of hidden states and output embedding.

        A head is called inside the forward pass because that is where a sharded embedding is whole. Rows that are
        not plain text, such as several continuations of one context, say what their tokens' positions are and,
        for each, which others it may see (bool).
        """
        hidden_btd = self.transformer(tokens_bt, positions_bt, may_see_bts)
        if self.logit_scale is not None:
            hidden_btd = hidden_btd * self.logit_scale
        return (head or F.linear)(hidden_btd, self.transformer.wte.weight)


class Transformer(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.d_model)
        if config.uses_learned_positions:
            self.wpe = nn.Embedding(config.max_seq_len, config.d_model)
        self.emb_drop = nn.Dropout(config.emb_pdrop)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm_f = LayerNorm(config)
        options = config.attn_config
        self.slopes = alibi_slopes(config.n_heads, options.alibi_bias_max) if options.alibi else None

    def forward(
        self,
        tokens_bt: torch.Tensor,
        positions_bt: torch.Tensor | None = None,
        may_see_bts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x_btd = self.wte(tokens_bt)
        if positions_bt is None:
            positions_bt = torch.arange(tokens_bt.size(1), device=tokens_bt.device)[None]
        if hasattr(self, "wpe"):
            x_btd = x_btd + self.wpe(positions_bt)
        x_btd = self.emb_drop(x_btd)
        # One for all blocks: h*t*t numbers are kept for the backward pass, and per block they would add up.
        bias_bhts = None if may_see_bts is None else mask_bias(may_see_bts).to(x_btd.dtype)
        if self.slopes is not None:
            slopes_h = torch.tensor(self.slopes, device=x_btd.device)
            if may_see_bts is None:
                may_see_bts = causal(tokens_bt.size(1), tokens_bt.device)
            bias_bhts = alibi_bias(slopes_h, positions_bt, may_see_bts).to(x_btd.dtype)
        for block in self.blocks:
            x_btd = block(x_btd, bias_bhts)
        return self.norm_f(x_btd)


class Block(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.norm_1 = LayerNorm(config)
        self.attn = Attention(config)
        self.norm_2 = LayerNorm(config)
        self.ffn = FeedForward(config)
        self.resid_drop = nn.Dropout(config.resid_pdrop)

    def forward(self, x_btd: torch.Tensor, bias_bhts: torch.Tensor | None) -> torch.Tensor:
        x_btd = x_btd + self.resid_drop(self.attn(self.norm_1(x_btd), bias_bhts))
        return x_btd + self.resid_drop(self.ffn(self.norm_2(x_btd)))


class Attention(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        options, d, bias = config.attn_config, config.d_model, not config.no_bias
        self.Wqkv = nn.Linear(d, 3 * d, bias=bias)
        self.out_proj = nn.Linear(d, d, bias=bias)
        if options.qk_ln:
            self.q_ln = LayerNorm(config)
            self.k_ln = LayerNorm(config)
        self.num_heads = config.n_heads
        self.clip_qkv = options.clip_qkv
        self.softmax_scale = options.softmax_scale
        self.dropout_p = options.attn_pdrop

    def forward(self, x_btd: torch.Tensor, bias_bhts: torch.Tensor | None) -> torch.Tensor:
        qkv = self.Wqkv(x_btd)
        if self.clip_qkv is not None:
            qkv = qkv.clamp(-self.clip_qkv, self.clip_qkv)
        q, k, v = qkv.chunk(3, dim=-1)
        if hasattr(self, "q_ln"):
            q, k = self.q_ln(q), self.k_ln(k)
        q_bthk, k_bthk, v_bthk = (x.unflatten(-1, (self.num_heads, -1)) for x in (q, k, v))
        out_bthk = attend(
            q_bthk,
            k_bthk,
            v_bthk,
            bias_bhts=bias_bhts,
            softmax_scale=self.softmax_scale,
            dropout_p=self.dropout_p if self.training else 0.0,
        )
        return self.out_proj(out_bthk.flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.up_proj = nn.Linear(config.d_model, config.ffn_dim, bias=not config.no_bias)
        self.down_proj = nn.Linear(config.ffn_dim, config.d_model, bias=not config.no_bias)

    def forward(self, x_btd: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.gelu(self.up_proj(x_btd)))


class LayerNorm(nn.Module):
    """Layer normalisation in the precision of its input; `layernorm` asks for fp32 whatever the input is."""

    bias: torch.Tensor | None

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.d_model))
        self.register_parameter("bias", None if config.no_bias else nn.Parameter(torch.empty(config.d_model)))
        self.eps = config.norm_eps
        self.in_fp32 = config.norm_type == "layernorm"

    def forward(self, x_btd: torch.Tensor) -> torch.Tensor:
        if self.in_fp32:
            bias = None if self.bias is None else self.bias.float()
            return F.layer_norm(x_btd.float(), x_btd.shape[-1:], self.weight.float(), bias, self.eps).to(x_btd.dtype)
        return F.layer_norm(x_btd, x_btd.shape[-1:], self.weight, self.bias, self.eps)
