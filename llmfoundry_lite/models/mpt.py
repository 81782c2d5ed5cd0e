"""MPT, a decoder-only transformer: token ids in, hidden states or logits out.

What is special about this family:

- Blocks normalise the input of each layer (pre-norm), and one more norm follows the last block.
- One matrix computes queries, keys and values, or three of them with `fused_qkv: false`.
- Positions come from ALiBi, from a learned embedding, from RoPE, or from nowhere.
- Several heads of queries may share one head of keys and values (grouped-query and multi-query attention).
- Queries, keys and values may be clamped; queries and keys may have norms of their own.
- The feed-forward layer is plain or gated.
- Input and output embeddings are one matrix unless they are untied.

Parameter names are those of LLM Foundry and of MPT in Hugging Face. This module maps tensors to tensors. The loss,
precision, sharding and devices live elsewhere (`training/loss.py`, `parallel/`), and `attention.py` computes attention
itself. Read from the top: the model, its blocks, the layers of a block.

Legend: b batch, t time (s for keys), d model width, f feed-forward width, h heads, g heads of keys and values,
k head dimension, v vocabulary, l layers.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmfoundry_lite.config.model_schema import AttentionConfig, FFNActivation, ModelConfig
from llmfoundry_lite.models import own_parts
from llmfoundry_lite.models.attention import Mask, add_implementation, build_mask
from llmfoundry_lite.models.dropout import dropout, seeds_of_site, seeds_of_tokens
from llmfoundry_lite.models.positions import Rotation, build_rotation, compute_alibi_slopes, rotate
from llmfoundry_lite.models.products import Linear, linear
from llmfoundry_lite.own_code import is_own

Head = Callable[[Tensor, Tensor], Any]
"""Maps (hidden_btd, unembedding_vd) to logits, to a loss, or to log-probabilities."""

AppendToCache = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Appends a layer's new keys and values to its cache, and returns all that the cache then holds."""


class MPT(nn.Module):
    """The language model.

    Its weights are uninitialised until `models.initialise` or a checkpoint fills them. `attn_impl` is reference, sdpa,
    blocked, flex or flash. It decides how attention is computed, and changes results by rounding only.
    """

    def __init__(self, config: ModelConfig, attn_impl: str = "sdpa"):
        """Build the modules that `config` describes, with uninitialised weights."""
        super().__init__()
        self.config = config
        self.transformer = Transformer(config, attn_impl)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.d_model, config.vocab_size, bias=False)

    def forward(self, tokens_bt: Tensor, *, head: Head | None = None, **options: Any) -> Any:
        """Compute the logits [b, t, v] of `tokens_bt` (int64), or whatever `head` makes of the hidden states.

        `head` gets the hidden states and the output embedding, and its result is returned. It has to run inside this
        forward pass because FSDP gathers a sharded embedding only for its duration. All other options are those of
        `Transformer.forward`.
        """
        hidden_btd = self.transformer(tokens_bt, **options)
        logit_multiplier = self.config.logit_multiplier
        if logit_multiplier is not None:
            # Logits are linear in the hidden states, and a head that returns a loss has no logits left to scale.
            hidden_btd = hidden_btd * logit_multiplier

        unembedding = self.transformer.wte if self.config.tie_word_embeddings else self.lm_head
        if head is None:
            head = linear
        return head(hidden_btd, unembedding.weight)


class Transformer(nn.Module):
    """Embeddings, blocks and the last norm: everything of the model but the output embedding.

    Parallelism in the companion `llmfoundry_layouts` changes it from outside: a stage of a pipeline keeps some of the
    blocks and sets `first_block`, and tensor parallelism shortens `alibi_slopes` and replaces `embed` and
    `slice_stream`.
    """

    def __init__(self, config: ModelConfig, attn_impl: str):
        """Build all blocks of the model. `attn_impl` names the implementation of attention; see `MPT`."""
        super().__init__()
        self.config = config
        if is_own(config.attn_config.attn_impl):
            # A function of the user's own may compute something else than ours, so it is used wherever the model is.
            attn_impl = config.attn_config.attn_impl
            add_implementation(attn_impl)
        self.attn_impl = attn_impl
        self.wte = nn.Embedding(config.vocab_size, config.d_model)
        if config.uses_learned_positions:
            self.wpe = nn.Embedding(config.max_seq_len, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.first_block = 0
        """Number of the first block in the whole model; above 0 in the later stages of a pipeline."""
        self.norm_f = build_norm(config.d_model, config, has_bias=not config.no_bias)
        own_parts.refuse_shared_parameters(self)
        if config.mup is not None:
            own_parts.refuse_unknown_kinds(self)

        # A list and not a tensor, because the model may be built without memory, on the meta device.
        self.alibi_slopes: list[float] | None = None
        """One slope for each head of this rank; None without ALiBi."""
        if config.attn_config.alibi:
            self.alibi_slopes = compute_alibi_slopes(config.n_heads, config.attn_config.alibi_bias_max)
        self._alibi_slopes_h: Tensor | None = None
        """The slopes on the device of the last forward pass, set by `alibi_slopes_on`."""

    def forward(
        self,
        tokens_bt: Tensor,
        positions_bt: Tensor | None = None,
        attention_mask_bts: Tensor | None = None,
        documents_bt: Tensor | None = None,
        cache: "KeyValueCache | None" = None,
        build_mask: Callable[..., Mask] = build_mask,
        dropout_seeds_b: Tensor | None = None,
    ) -> Tensor:
        """Compute the hidden states [b, t, d] of `tokens_bt` (int64), normalised by the last norm.

        positions_bt: the tokens' positions, for rows that are not plain text, such as several continuations of one
            context. By default they count up from the number of tokens in the cache.
        attention_mask_bts: bool, true where a query may attend to a key. Such rows need it beside their positions.
        documents_bt: numbers of documents; tokens do not attend to other documents than their own.
        cache: holds the tokens that come before these ones. These tokens are appended to it.
        build_mask: replaces `attention.build_mask` where ranks divide the tokens of a row (context parallelism). It
            knows the tokens of the other ranks, and `documents_bt` are then those of whole rows.
        dropout_seeds_b: in training, decide what each row drops (`dropout.py`). Without them torch's generator does.
        """
        # Where these tokens stand in their rows, and how many keys they may attend to.
        config = self.config
        num_past_tokens = 0 if cache is None else cache.length
        if positions_bt is None:
            end = num_past_tokens + tokens_bt.size(1)
            positions_bt = torch.arange(num_past_tokens, end, device=tokens_bt.device)[None]
        num_keys = num_past_tokens + positions_bt.size(1)

        # Embed them. With sequence parallelism, this rank has only some of the tokens from here on.
        dropout_seeds_bt = None
        if dropout_seeds_b is not None:
            dropout_seeds_bt = self.slice_stream(seeds_of_tokens(dropout_seeds_b, positions_bt))
        x_btd = self.embed(tokens_bt, positions_bt, dropout_seeds_bt)

        # All blocks share one mask. Its bias has h*t*s elements, which autograd keeps for the backward pass. A mask for
        # each block would multiply this memory by their number.
        mask = build_mask(
            config.attn_config,
            self.attn_impl,
            self.alibi_slopes_on(x_btd.device),
            positions_bt,
            num_keys,
            attention_mask_bts,
            documents_bt,
        ).to(x_btd.dtype)
        if is_own(self.attn_impl):
            mask = replace(mask, is_training=self.training)
        rotation = None
        if config.attn_config.rope:
            rotation = build_rotation(config.attn_config, config.head_dim, config.max_seq_len, positions_bt)

        # The blocks, each of which adds to the residual stream `x_btd`.
        for layer, block in enumerate(self.blocks, self.first_block):
            append_to_cache = None if cache is None else partial(cache.append, layer)
            block_seeds_bt = seeds_of_site(dropout_seeds_bt, layer + 1)  # the embeddings used the seeds themselves
            x_btd = block(x_btd, mask, rotation, append_to_cache, block_seeds_bt)
        if cache is not None:
            cache.length = num_keys
        return self.norm_f(x_btd)

    def embed(self, tokens_bt: Tensor, positions_bt: Tensor, dropout_seeds_bt: Tensor | None) -> Tensor:
        """Return the input of the first block [b, t, d]: embeddings of tokens and positions, after dropout."""
        config = self.config
        x_btd = self.wte(tokens_bt)
        if config.uses_learned_positions:
            x_btd = x_btd + self.wpe(positions_bt)
        if config.embedding_multiplier != 1.0:
            x_btd = x_btd * config.embedding_multiplier
        fraction = config.embedding_fraction
        if fraction != 1.0:
            # The value stays the same, but only this fraction of the gradient reaches the embeddings, which makes
            # training more stable (Zeng et al. 2022, "GLM-130B", embedding gradient shrink).
            x_btd = x_btd * fraction + x_btd.detach() * (1.0 - fraction)
        return dropout(x_btd, config.emb_pdrop, self.training, dropout_seeds_bt)

    def slice_stream(self, x_bt: Tensor) -> Tensor:
        """Return the tokens of `x_bt` that this rank has in the residual stream: all of them.

        Sequence parallelism replaces this method with one that returns the rank's slice.
        """
        return x_bt

    def alibi_slopes_on(self, device: torch.device) -> Tensor | None:
        """Return ALiBi's slopes as a tensor on `device`, or None without ALiBi.

        The tensor is made once and kept, because copying it waits for the device. It is not a buffer, because
        checkpoints would then contain it and casts of the model would change its dtype.
        """
        if self.alibi_slopes is None:
            return None
        if self._alibi_slopes_h is None or self._alibi_slopes_h.device != device:
            self._alibi_slopes_h = torch.tensor(self.alibi_slopes, device=device)
        return self._alibi_slopes_h


class Block(nn.Module):
    """One layer of attention and one feed-forward layer, each added to the residual stream."""

    def __init__(self, config: ModelConfig):
        """Build the two layers and the norms of their inputs."""
        super().__init__()
        self.norm_1 = build_norm(config.d_model, config, has_bias=not config.no_bias)
        self.attn = build_attention(config)
        self.norm_2 = build_norm(config.d_model, config, has_bias=not config.no_bias)
        self.ffn = build_ffn(config)
        self.resid_pdrop = config.resid_pdrop

    def forward(
        self,
        x_btd: Tensor,
        mask: Mask,
        rotation: Rotation | None,
        append_to_cache: AppendToCache | None = None,
        dropout_seeds_bt: Tensor | None = None,
    ) -> Tensor:
        """Return the residual stream [b, t, d] after this block.

        `mask` and `rotation` are the same for all blocks of a forward pass. While decoding, `append_to_cache` belongs
        to this block. `dropout_seeds_bt` are this block's as well; None leaves dropout to torch's generator.
        """
        attended_btd = self.attn(self.norm_1(x_btd), mask, rotation, append_to_cache)
        x_btd = x_btd + dropout(attended_btd, self.resid_pdrop, self.training, dropout_seeds_bt)

        # Both layers write to the same channels. With equal seeds a channel would lose either both outputs or none.
        ffn_seeds_bt = seeds_of_site(dropout_seeds_bt, 1)
        return x_btd + dropout(self.ffn(self.norm_2(x_btd)), self.resid_pdrop, self.training, ffn_seeds_bt)


def build_attention(config: ModelConfig) -> nn.Module:
    """Build the layer of attention that `attn_type` names: ours, or one of the user's own."""
    if is_own(config.attn_config.attn_type):
        return own_parts.build_attention(config)
    return Attention(config)


def has_attention_of_ours(model: nn.Module) -> bool:
    """Return whether the blocks of a model have our attention, or a subclass of it that is the user's own.

    Its parameters then have the meaning that `ModelConfig.stacked_rows` gives them by their names.
    """
    return any(isinstance(module, Attention) for module in model.modules())


class Attention(nn.Module):
    """The projections, norms and positions around attention; `Mask.attend` computes attention itself."""

    def __init__(self, config: ModelConfig):
        """Build the projections, with queries, keys and values in one matrix or in three, and the norms of q and k."""
        super().__init__()
        self.attn_config = config.attn_config
        self.head_dim = config.head_dim
        self.softmax_scale = config.softmax_scale
        self.kv_dim = config.kv_dim
        """Width of all keys, and of all values. Tensor parallelism sets it to the width that this rank computes."""

        # The attributes' names are parameter names in checkpoints.
        if self.attn_config.fused_qkv:
            self.Wqkv = Linear(config.d_model, config.q_dim + 2 * config.kv_dim, bias=config.has_qkv_bias)
        else:
            self.Wq = Linear(config.d_model, config.q_dim, bias=config.has_qkv_bias)
            self.Wk = Linear(config.d_model, config.kv_dim, bias=config.has_qkv_bias)
            self.Wv = Linear(config.d_model, config.kv_dim, bias=config.has_qkv_bias)
        self.out_proj = Linear(config.q_dim, config.d_model, bias=not config.no_bias)

        if self.attn_config.qk_ln:  # over all heads together
            self.q_ln = build_norm(config.q_dim, self.attn_config, has_bias=not config.no_bias)
            self.k_ln = build_norm(config.kv_dim, self.attn_config, has_bias=not config.no_bias)
        elif self.attn_config.qk_gn:  # over each head, with weights that all heads share
            self.q_ln = build_norm(config.head_dim, self.attn_config, has_bias=not config.no_bias)
            self.k_ln = build_norm(config.head_dim, self.attn_config, has_bias=not config.no_bias)

    def forward(
        self, x_btd: Tensor, mask: Mask, rotation: Rotation | None, append_to_cache: AppendToCache | None
    ) -> Tensor:
        """Return attention's output [b, t, d] for normalised inputs [b, t, d] (batch, tokens, model width).

        `mask` says what each token attends to, and computes attention by the implementation that the run has chosen.
        `rotation` has RoPE's angles, or is None without RoPE. While decoding, `append_to_cache` adds the new keys and
        values to this layer's cache, and returns those of all tokens so far.
        """
        # Project, normalise all heads together if `qk_ln` asks for it, and divide the width into heads.
        q, k, v = self.project(x_btd)
        # LLM Foundry calls the norms q_ln and k_ln whether they normalise all heads together (qk_ln) or each (qk_gn).
        if self.attn_config.qk_ln:
            q = self.q_ln(q)
            k = self.k_ln(k)
        q_bthk = q.unflatten(-1, (-1, self.head_dim))
        k_btgk = k.unflatten(-1, (-1, self.head_dim))
        v_btgk = v.unflatten(-1, (-1, self.head_dim))

        # What is done to each head: its norm, and its rotation by position.
        if self.attn_config.qk_gn:
            q_bthk = self.q_ln(q_bthk)
            k_btgk = self.k_ln(k_btgk)
        if rotation is not None:
            q_bthk = rotate(q_bthk, rotation)
            k_btgk = rotate(k_btgk, rotation)

        # Attend to these tokens, and while decoding to those in the cache.
        k_bsgk, v_bsgk = k_btgk, v_btgk
        if append_to_cache is not None:
            k_bsgk, v_bsgk = append_to_cache(k_btgk, v_btgk)
        dropout_p = self.attn_config.attn_pdrop if self.training else 0.0
        out_bthk = mask.attend(q_bthk, k_bsgk, v_bsgk, self.softmax_scale, dropout_p)
        return self.out_proj(out_bthk.flatten(-2))

    def project(self, x_btd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries, keys and values, [b, t, width of all heads] each, clamped if `clip_qkv` is set."""
        if not self.attn_config.fused_qkv:
            q = self.clamp(self.Wq(x_btd))
            k = self.clamp(self.Wk(x_btd))
            v = self.clamp(self.Wv(x_btd))
            return q, k, v

        qkv = self.clamp(self.Wqkv(x_btd))
        # Not `config.q_dim`, because with tensor parallelism this rank's matrix has fewer rows.
        q_dim = qkv.size(-1) - 2 * self.kv_dim
        q, k, v = qkv.split([q_dim, self.kv_dim, self.kv_dim], dim=-1)
        return q, k, v

    def clamp(self, qkv: Tensor) -> Tensor:
        """Limit each element to the range from -clip_qkv to clip_qkv. Returns the input itself if no limit is set."""
        limit = self.attn_config.clip_qkv
        return qkv if limit is None else qkv.clamp(-limit, limit)


def build_ffn(config: ModelConfig) -> nn.Module:
    """Build the feed-forward layer that `ffn_type` names: plain, gated, or one of the user's own."""
    ffn_type = config.ffn_config.ffn_type
    if is_own(ffn_type):
        return own_parts.build_ffn(config)
    return GatedFeedForward(config) if ffn_type == "mptglu" else FeedForward(config)


class FeedForward(nn.Module):
    """The plain feed-forward layer: widen, apply the activation function, narrow."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.up_proj = Linear(config.d_model, config.ffn_dim, bias=not config.no_bias)
        self.down_proj = Linear(config.ffn_dim, config.d_model, bias=not config.no_bias)
        self.activation = choose_activation(config.ffn_config.ffn_act_fn)

    def forward(self, x_btd: Tensor) -> Tensor:
        """Return the output of normalised inputs, [b, t, d]."""
        hidden_btf = self.activation(self.up_proj(x_btd))
        return self.down_proj(hidden_btf)


class GatedFeedForward(FeedForward):
    """A feed-forward layer with a gate for each hidden unit (Shazeer 2020, "GLU Variants Improve Transformer")."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.gate_proj = Linear(config.d_model, config.ffn_dim, bias=not config.no_bias)

    def forward(self, x_btd: Tensor) -> Tensor:
        """Return the output of normalised inputs, [b, t, d]."""
        gate_btf = self.activation(self.gate_proj(x_btd))
        return self.down_proj(gate_btf * self.up_proj(x_btd))


def choose_activation(config: FFNActivation) -> Callable[[Tensor], Tensor]:
    """Return the activation function that `ffn_act_fn` names."""
    if config.name == "gelu":
        return partial(F.gelu, approximate=config.approximate)
    return {"quick_gelu": quick_gelu, "relu": F.relu, "silu": F.silu}[config.name]


def quick_gelu(x: Tensor) -> Tensor:
    """Approximate GELU by a sigmoid (Hendrycks and Gimpel 2016, "Gaussian Error Linear Units", section 2)."""
    return x * torch.sigmoid(1.702 * x)


def build_norm(width: int, config: ModelConfig | AttentionConfig, *, has_bias: bool) -> nn.Module:
    """Build the norm that `config.norm_type` names, for vectors of `width` elements: ours, or one of the user's own."""
    if is_own(config.norm_type):
        return own_parts.build_norm(config, width, has_bias=has_bias)
    return Norm(width, config, has_bias=has_bias)


class Norm(nn.Module):
    """LayerNorm or RMSNorm.

    Kinds whose name begins with `low_precision_` compute in the dtype of their input, all others in fp32. Either way
    the output has the input's dtype.
    """

    bias: Tensor | None

    def __init__(self, width: int, config: ModelConfig | AttentionConfig, *, has_bias: bool):
        """Make the norm that `config` describes for vectors of `width` elements. RMSNorm never has a bias."""
        super().__init__()
        self.is_rms = config.norm_type.endswith("rmsnorm")
        self.in_fp32 = not config.norm_type.startswith("low_precision_")
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.empty(width))
        bias = nn.Parameter(torch.empty(width)) if has_bias and not self.is_rms else None
        self.register_parameter("bias", bias)

    def initial_distribution(self, name: str) -> tuple[str, float]:
        """Return how the weight or the bias is first drawn, as `own_parts.initial_values` asks."""
        return ("constant", 1.0 if name == "weight" else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of x."""
        return self.normalise(x, self.weight, self.bias)

    def normalise(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Normalise the last dimension of x by the given weight and bias. Returns the dtype and shape of x.

        `forward` passes the norm's own parameters. Tensor parallelism calls this with local tensors instead, because
        its parameters are DTensors.
        """
        dtype = x.dtype
        if self.in_fp32:
            x = x.float()
            weight = weight.float()
            bias = None if bias is None else bias.float()

        width = x.shape[-1:]
        if self.is_rms:
            return F.rms_norm(x, width, weight, self.eps).to(dtype)
        return F.layer_norm(x, width, weight, bias, self.eps).to(dtype)


class KeyValueCache:
    """Keys and values of the tokens so far, so that decoding computes each token once."""

    def __init__(self, model: MPT, batch_size: int, num_tokens: int):
        """Make room for `num_tokens` tokens in each of `batch_size` rows. The first `append` allocates the memory."""
        self.length = 0
        """Tokens that every layer holds. `Transformer.forward` raises it after its last block; 0 empties the cache."""
        self._shape_lbs = (model.config.n_layers, batch_size, num_tokens)
        self._keys_lbsgk: Tensor | None = None
        self._values_lbsgk: Tensor

    def append(self, layer: int, k_btgk: Tensor, v_btgk: Tensor) -> tuple[Tensor, Tensor]:
        """Append a layer's keys and values of t new tokens, and return those of all tokens, [b, s, g, k] each.

        Does not change `length`, because the layers after this one append to the same place. The result is a view of
        the cache. The first layer of an empty cache allocates the memory of all layers.
        """
        # The dtype and the number of heads are not known before: autocast or a precision policy may change the dtype,
        # and tensor parallelism leaves this rank some of the heads. An emptied cache may be used in another dtype.
        is_empty = layer == 0 and self.length == 0
        if self._keys_lbsgk is None or is_empty:
            shape_lbsgk = (*self._shape_lbs, *k_btgk.shape[2:])
            self._keys_lbsgk = k_btgk.new_empty(shape_lbsgk)
            self._values_lbsgk = v_btgk.new_empty(shape_lbsgk)

        end = self.length + k_btgk.size(1)
        self._keys_lbsgk[layer, :, self.length : end] = k_btgk
        self._values_lbsgk[layer, :, self.length : end] = v_btgk
        return self._keys_lbsgk[layer, :, :end], self._values_lbsgk[layer, :, :end]
