"""Multi-head attention: masks, biases, rotary positions, and five implementations of the same mathematics.

`reference` is the definition in fp32. `sdpa` is PyTorch's scaled_dot_product_attention, `flex` its FlexAttention
(ALiBi, windows and documents without a bias of t*s numbers). `blocked` multiplies matrices block by block of queries,
and `flash` is the flash-attn package. `Mask` is built once per forward pass; each block calls its `attend`.

Legend: b batch, t position of a query, s position of a key, h heads, g heads of keys and values, k head dimension.
"""

import functools
import importlib.util
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import config as inductor_config
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from llmfoundry_lite.config.model_schema import AttentionConfig, ModelConfig
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.models.blocked_attention import blocked_attention

# ------------------------------------------------------------------------------------------- which implementation


FLEX_BLOCK = 128
"""Queries or keys in a block of FlexAttention's mask (torch's default)."""

FLEX_SHAPES = 64
"""Limit of compiled shapes. torch compiles a kernel of its own for each size of 1, and one more for each size that has
changed: of rows, queries, keys or blocks, with and without a gradient. `auto`, an evaluation and decoding reached 9."""

FLASH_HEAD_DIM = 256
"""The widest head that flash-attn's kernels support, by its README."""


def choose_implementation(model: ModelConfig, device_type: str, precision: torch.dtype) -> tuple[str, str]:
    """Return (implementation, reason) for training on that device: the one `attn_impl` names, or the fastest for auto.

    `precision` is that of matrix products. LLM Foundry's files name `flash` throughout, so that without flash-attn it
    means auto. Raises ConfigError for what this device cannot do; `config.check` refuses what no device can.
    """
    options, wish = model.attn_config, model.attn_config.attn_impl
    in_half = precision in (torch.bfloat16, torch.float16)
    has_flash = (
        device_type == "cuda"
        and in_half
        and model.head_dim <= FLASH_HEAD_DIM
        and importlib.util.find_spec("flash_attn") is not None
    )
    if wish == "torch":
        return "sdpa", "LLM Foundry's torch"
    if wish == "flash" and has_flash:
        return "flash", "asked for"
    if wish == "flex" and device_type != "cuda":
        raise ConfigError(f"model.attn_config.attn_impl: flex cannot be trained on a {device_type}; use auto or sdpa")
    if wish not in ("auto", "flash"):
        return wish, "asked for"
    reason = "flash-attn cannot be used here; " if wish == "flash" else ""
    if device_type == "cpu" and precision == torch.bfloat16 and not options.attn_pdrop:
        return "blocked", f"{reason}the fastest on a cpu in bf16"
    if device_type != "cuda":
        return "sdpa", f"{reason}the fastest on a {device_type}"
    if model.has_plain_attention:
        return "sdpa", f"{reason}plain causal attention has its own kernels there"
    if has_flash:
        return "flash", "flash-attn is installed and in it a bias costs no memory"
    if refusal := model.flex_refusal:
        return "sdpa", reason + refusal
    return "flex", f"{reason}a bias or a mask costs no memory in it"


# --------------------------------------------------------------------------------------------------- masks and biases


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """Mask and bias of attention, in the form that `implementation` takes."""

    implementation: str
    bias_bhts: Tensor | None = None
    """reference, sdpa, blocked: added to scores, -inf where masked; b and h may be 1. None: plain causal."""
    has_more_keys: bool = False
    """sdpa on a GPU: the queries stand at the last keys' positions; causal, without a bias."""
    block_mask: BlockMask | None = None
    """flex: the blocks of scores that are computed."""
    slopes_h: Tensor | None = None
    """flex, flash: slopes of ALiBi."""
    window: int = -1
    """blocked, flash: keys before its own that a query attends to; -1 for all."""
    query_documents: "DocumentBounds | None" = None
    """flash: where the documents of the queries begin."""
    key_documents: "DocumentBounds | None" = None
    """flash: where the documents of the keys begin."""

    def to(self, dtype: torch.dtype) -> "Mask":
        """Cast the bias to the precision that scores are computed in; reference keeps fp32."""
        if self.bias_bhts is None or self.implementation == "reference":
            return self
        return replace(self, bias_bhts=self.bias_bhts.to(dtype))

    def attend(
        self, q_bthk: Tensor, k_bsgk: Tensor, v_bsgk: Tensor, scale: float | None = None, dropout_p: float = 0.0
    ) -> Tensor:
        """softmax(q k^T * scale + bias) v, [b, t, h, k]; head i of q reads head i // (h / g) of k and v."""
        return IMPLEMENTATIONS[self.implementation](q_bthk, k_bsgk, v_bsgk, self, scale, dropout_p)


def build_mask(
    options: AttentionConfig,
    implementation: str,
    slopes_h: Tensor | None,
    positions_bt: Tensor,
    num_keys: int,
    attention_mask_bts: Tensor | None = None,
    documents_bs: Tensor | None = None,
) -> Mask:
    """Build the mask of one forward pass.

    Keys stand at positions 0 to `num_keys`, queries at the last of them: `positions_bt`, where b may be 1. Attention is
    causal, or where `attention_mask_bts` (bool) is true: for rows that are not plain text, with as many queries as keys
    at the same positions. It becomes a bias in every implementation. `documents_bs` numbers the document of each key;
    tokens do not attend to other documents.
    """
    num_queries, window = positions_bt.size(1), options.sliding_window_size
    if attention_mask_bts is not None or (implementation == "blocked" and num_queries != num_keys):
        implementation = "reference" if implementation == "reference" else "sdpa"
    if implementation in ("reference", "sdpa", "blocked"):
        is_plain = slopes_h is None and window < 0 and attention_mask_bts is None and documents_bs is None
        if is_plain and num_queries == num_keys:
            return Mask(implementation=implementation)
        if is_plain and implementation == "sdpa" and positions_bt.is_cuda:
            return Mask(implementation=implementation, has_more_keys=True)
        bias_bhts = _bias(slopes_h, window, positions_bt, num_keys, attention_mask_bts, documents_bs)
        return Mask(implementation=implementation, bias_bhts=bias_bhts, window=window)
    if implementation == "flex":
        _raise_recompile_limit()
        if documents_bs is None:
            block_mask = _block_mask(window, num_keys - num_queries, num_queries, num_keys, positions_bt.device)
        else:
            block_mask = _document_block_mask(documents_bs, window, num_queries)
        return Mask(implementation="flex", block_mask=block_mask, slopes_h=slopes_h)
    queries, keys = (None, None) if documents_bs is None else _document_bounds(documents_bs, num_queries)
    return Mask(implementation="flash", slopes_h=slopes_h, window=window, query_documents=queries, key_documents=keys)


def _bias(
    slopes_h: Tensor | None,
    window: int,
    positions_bt: Tensor,
    num_keys: int,
    attention_mask_bts: Tensor | None,
    documents_bs: Tensor | None,
) -> Tensor:
    """Compute what is added to scores, [b, h, t, s], where b and h may be 1; -inf where masked."""
    device, mask_bts, key_positions_bs = positions_bt.device, attention_mask_bts, positions_bt
    if mask_bts is None:
        key_positions_bs = torch.arange(num_keys, device=device)[None]
        mask_bts = key_positions_bs[:, None, :] <= positions_bt[:, :, None]
    distance_bts = positions_bt[:, :, None] - key_positions_bs[:, None, :]
    if window >= 0:
        mask_bts = mask_bts & (distance_bts <= window)
    if documents_bs is not None:
        mask_bts = mask_bts & (documents_bs[:, -positions_bt.size(1) :, None] == documents_bs[:, None, :])
    # Four dimensions, because with three torch falls back to keeping all scores.
    slopes = torch.zeros((), device=device) if slopes_h is None else slopes_h[:, None, None]
    return (-slopes * distance_bts[:, None]).masked_fill(~mask_bts[:, None], float("-inf"))


def for_any_width() -> AbstractContextManager[Any]:
    """Exclude cuDNN's attention, which plans anew for each row length: for evaluation and decoding."""
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def document_numbers(tokens_bt: Tensor, separator: int, *, begins: bool = False) -> Tensor:
    """Number the documents of each row, [b, t]; the separator ends a document, or with `begins` begins it."""
    is_separator_bt = (tokens_bt == separator).long()
    numbers_bt = is_separator_bt.cumsum(dim=1)
    return numbers_bt if begins else numbers_bt - is_separator_bt


# -------------------------------------------------------------------------------------------------- the computation


def _reference(q_bthk, k_bsgk, v_bsgk, mask: Mask, scale, dropout_p) -> Tensor:
    scale = scale or 1.0 / math.sqrt(q_bthk.size(-1))
    repeats = q_bthk.size(2) // k_bsgk.size(2)
    k_bshk, v_bshk = (x.repeat_interleave(repeats, dim=2).float() for x in (k_bsgk, v_bsgk))
    scores_bhts = torch.einsum("bthk,bshk->bhts", q_bthk.float(), k_bshk) * scale
    if mask.bias_bhts is None:
        hidden_ts = torch.ones_like(scores_bhts[0, 0], dtype=torch.bool).triu(1)
        scores_bhts = scores_bhts.masked_fill(hidden_ts, float("-inf"))
    else:
        scores_bhts = scores_bhts + mask.bias_bhts
    weights_bhts = F.dropout(scores_bhts.softmax(dim=-1), dropout_p)
    return torch.einsum("bhts,bshk->bthk", weights_bhts, v_bshk).to(q_bthk.dtype)


def _sdpa(q_bthk, k_bsgk, v_bsgk, mask: Mask, scale, dropout_p) -> Tensor:
    q_bhtk, k_bgsk, v_bgsk = (x.transpose(1, 2) for x in (q_bthk, k_bsgk, v_bsgk))
    if mask.has_more_keys:
        return _sdpa_of_last_queries(q_bhtk, k_bgsk, v_bgsk, scale, dropout_p).transpose(1, 2)
    return F.scaled_dot_product_attention(
        q_bhtk,
        k_bgsk,
        v_bgsk,
        attn_mask=None if mask.bias_bhts is None else mask.bias_bhts.to(q_bthk.dtype),
        is_causal=mask.bias_bhts is None,
        dropout_p=dropout_p,
        scale=scale,
        enable_gqa=q_bthk.size(2) != k_bsgk.size(2),
    ).transpose(1, 2)


@torch.compiler.allow_in_graph  # the compiler cannot ask which kernels there are, but compiles what runs
def _sdpa_of_last_queries(q_bhtk, k_bgsk, v_bgsk, scale, dropout_p) -> Tensor:
    """Call kernels with a causal mask aligned to the lower right corner, which scaled_dot_product_attention lacks.

    torch.nn.attention.bias.CausalBias has it, but its objects survive no dispatch mode.
    """
    num_queries, num_keys, repeats = q_bhtk.size(2), k_bgsk.size(2), q_bhtk.size(1) // k_bgsk.size(1)
    if q_bhtk.size(-1) % 8 == 0 and can_use_flash_attention(
        SDPAParams(q_bhtk, k_bgsk, v_bgsk, None, dropout_p, False, repeats > 1)
    ):
        attend: Any = torch.ops.aten._scaled_dot_product_flash_attention
        return attend(q_bhtk, k_bgsk, v_bgsk, dropout_p, True, scale=scale)[0]
    k_bhsk, v_bhsk = (x if repeats == 1 else x.repeat_interleave(repeats, dim=1) for x in (k_bgsk, v_bgsk))
    if can_use_efficient_attention(SDPAParams(q_bhtk, k_bhsk, v_bhsk, None, dropout_p, False, False)):
        out_bthk, *_ = torch.ops.aten._efficient_attention_forward(
            *(x.transpose(1, 2) for x in (q_bhtk, k_bhsk, v_bhsk)),
            *(None, None, None, None, None),  # bias, and where sequences of several lengths begin
            dropout_p,
            LOWER_RIGHT,
            any(x.requires_grad for x in (q_bhtk, k_bhsk, v_bhsk)),  # whether to keep what the backward pass needs
            scale=scale,
        )
        return out_bthk.transpose(1, 2)
    seen_ts = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q_bhtk.device).tril(num_keys - num_queries)
    return F.scaled_dot_product_attention(q_bhtk, k_bhsk, v_bhsk, attn_mask=seen_ts, dropout_p=dropout_p, scale=scale)


LOWER_RIGHT = 2
"""torch.nn.attention.bias.CausalVariant's number."""


def _blocked(q_bthk, k_bsgk, v_bsgk, mask: Mask, scale, dropout_p) -> Tensor:
    assert not dropout_p, "refused when the configuration is checked"
    bias_bhts = None if mask.bias_bhts is None else mask.bias_bhts.to(q_bthk.dtype)
    scale = scale or 1.0 / math.sqrt(q_bthk.size(-1))
    return blocked_attention(q_bthk, k_bsgk, v_bsgk, bias_bhts, scale, mask.window)


def _flex(q_bthk, k_bsgk, v_bsgk, mask: Mask, scale, dropout_p) -> Tensor:
    assert not dropout_p, "refused when the configuration is checked"
    q_bhtk, k_bgsk, v_bgsk = (x.transpose(1, 2) for x in (q_bthk, k_bsgk, v_bsgk))
    # Without a compiler it computes all scores. On a CPU it serves comparisons only, and is not compiled.
    compute = _compiled_visibly(flex_attention) if q_bthk.is_cuda else flex_attention
    out_bhtk = compute(
        q_bhtk,
        k_bgsk,
        v_bgsk,
        score_mod=None if mask.slopes_h is None else _alibi_score(mask.slopes_h, k_bsgk.size(1) - q_bthk.size(1)),
        block_mask=mask.block_mask,
        scale=scale,
        enable_gqa=q_bthk.size(2) != k_bsgk.size(2),
    )
    return out_bhtk.transpose(1, 2)


def _flash(q_bthk, k_bsgk, v_bsgk, mask: Mask, scale, dropout_p) -> Tensor:
    from flash_attn import flash_attn_func, flash_attn_varlen_func  # type: ignore[import-not-found]

    options = {
        "dropout_p": dropout_p,
        "softmax_scale": scale,
        "causal": True,
        "window_size": (mask.window, 0) if mask.window >= 0 else (-1, -1),
        "alibi_slopes": mask.slopes_h,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if mask.query_documents is None or mask.key_documents is None:
        return flash_attn_func(q_bthk, k_bsgk, v_bsgk, **options)
    out_nhk = flash_attn_varlen_func(
        *(x.flatten(0, 1) for x in (q_bthk, k_bsgk, v_bsgk)),
        cu_seqlens_q=mask.query_documents.starts_n,
        cu_seqlens_k=mask.key_documents.starts_n,
        max_seqlen_q=mask.query_documents.max_length,
        max_seqlen_k=mask.key_documents.max_length,
        **options,
    )
    return out_nhk.view_as(q_bthk)


IMPLEMENTATIONS = {"reference": _reference, "sdpa": _sdpa, "blocked": _blocked, "flex": _flex, "flash": _flash}


@functools.cache
def _compiled_visibly(function: Callable) -> Callable:
    """Compile a function to one operation, which selective checkpointing can keep; older releases of torch recompute.

    Past its limit of recompilations torch would silently run it eagerly, with all scores in memory: `fullgraph` makes
    that an error, and `_raise_recompile_limit` raises the limit.
    """
    option = "wrap_inductor_compiled_regions"
    options: Any = {option: True} if hasattr(inductor_config, option) else None
    return torch.compile(function, fullgraph=True, options=options)


@functools.cache
def _raise_recompile_limit() -> None:
    """Raise torch's limit of recompilations beyond the shapes of a run with evaluations and decoding.

    Not called within `_flex`: a compiled block traces that, and would be compiled again for each limit.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, FLEX_SHAPES)


@functools.lru_cache(maxsize=16)
def _block_mask(window: int, offset: int, num_queries: int, num_keys: int, device: torch.device) -> BlockMask:
    """Build the blocks of a causal mask, perhaps with a window. They are the same for every batch, so cached."""

    def sees(b, h, t, s):
        distance = t + offset - s
        return (distance >= 0) & (distance <= window) if window >= 0 else distance >= 0

    some_1ts, all_1ts = _blocks_seen(window, num_queries, num_keys, device)
    return _from_blocks(some_1ts, all_1ts, sees, num_queries, num_keys)


def _document_block_mask(documents_bs: Tensor, window: int, num_queries: int) -> BlockMask:
    num_keys, device = documents_bs.size(1), documents_bs.device
    offset = num_keys - num_queries

    def sees(b, h, t, s):
        distance = t + offset - s
        seen = (distance >= 0) & (documents_bs[b, t + offset] == documents_bs[b, s])
        return seen & (distance <= window) if window >= 0 else seen

    # Numbers of documents only rise: two blocks share a document if the ranges of their numbers overlap.
    (q_first_bt1, q_last_bt1), (k_first_b1s, k_last_b1s) = (
        [documents_bs[:, offset + end].unsqueeze(dim) for end in _ends_of_blocks(length, device)]
        for dim, offset, length in ((2, offset, num_queries), (1, 0, num_keys))
    )
    some_1ts, all_1ts = _blocks_seen(window, num_queries, num_keys, device)
    some_bts = some_1ts & (q_first_bt1 <= k_last_b1s) & (k_first_b1s <= q_last_bt1)
    all_bts = all_1ts & (q_first_bt1 == k_last_b1s) & (k_first_b1s == q_last_bt1)
    return _from_blocks(some_bts, all_bts, sees, num_queries, num_keys)


# torch's create_block_mask makes the whole mask first: b*t*s numbers, several times over. Here t and s count blocks.


def _ends_of_blocks(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the first and the last position in each block; the last block may be short."""
    first = torch.arange(0, length, FLEX_BLOCK, device=device)
    return first, (first + FLEX_BLOCK - 1).clamp(max=length - 1)


def _blocks_seen(window: int, num_queries: int, num_keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return whether any query of a block attends to any key of another, and whether all do to all: [1, t, s] each.

    A short block never counts as all.
    """
    (q_first_t, q_last_t), (k_first_s, k_last_s) = (_ends_of_blocks(n, device) for n in (num_queries, num_keys))
    offset = num_keys - num_queries
    nearest_ts = q_first_t[:, None] + offset - k_last_s
    furthest_ts = q_last_t[:, None] + offset - k_first_s
    some_ts, all_ts = furthest_ts >= 0, nearest_ts >= 0
    if window >= 0:
        some_ts, all_ts = some_ts & (nearest_ts <= window), all_ts & (furthest_ts <= window)
    is_whole_ts = (q_last_t - q_first_t)[:, None] + (k_last_s - k_first_s) == 2 * (FLEX_BLOCK - 1)
    return some_ts[None], (all_ts & is_whole_ts)[None]


def _from_blocks(some_bts: Tensor, all_bts: Tensor, sees: Callable, num_queries: int, num_keys: int) -> BlockMask:
    """Build a mask of the blocks that are computed: those in `all` whole, others by `sees` of each score."""
    counts_and_indices = []
    for blocks_bts in (some_bts & ~all_bts, all_bts):
        ordered_bts = blocks_bts[:, None].int()
        counts_and_indices.append(ordered_bts.sum(-1, dtype=torch.int32))
        counts_and_indices.append(ordered_bts.argsort(dim=-1, descending=True, stable=True).int())
    return BlockMask.from_kv_blocks(
        *counts_and_indices, BLOCK_SIZE=FLEX_BLOCK, mask_mod=sees, seq_lengths=(num_queries, num_keys)
    )


def _alibi_score(slopes_h: Tensor, offset: int) -> Callable:
    return lambda score, b, h, t, s: score - slopes_h[h] * (t + offset - s)


@dataclass(frozen=True, slots=True)
class DocumentBounds:
    """Documents of a flattened batch, as flash-attn takes them."""

    starts_n: Tensor
    """int32: where each begins, and where the last one ends."""
    max_length: int


def _document_bounds(documents_bs: Tensor, num_queries: int) -> tuple[DocumentBounds, DocumentBounds]:
    """Return bounds among the last `num_queries` tokens of each row, and among all tokens.

    A document may end before the queries begin: then it has none.
    """
    is_first_bs = torch.ones_like(documents_bs, dtype=torch.bool)
    is_first_bs[:, 1:] = documents_bs[:, 1:] != documents_bs[:, :-1]
    is_query_bs = torch.arange(documents_bs.size(1), device=documents_bs.device) >= documents_bs.size(1) - num_queries
    firsts_n = is_first_bs.flatten().nonzero().flatten()
    bounds = []
    for counted_bs in (is_query_bs.expand_as(documents_bs), torch.ones_like(is_first_bs)):
        counts = F.pad(counted_bs.flatten().cumsum(0), (1, 0))
        starts_n = torch.cat([counts[firsts_n], counts[-1:]]).int()
        bounds.append(DocumentBounds(starts_n, int(starts_n.diff().max())))
    return bounds[0], bounds[1]


# -------------------------------------------------------------------------------------------------------- positions


def alibi_slopes(num_heads: int, bias_max: int = 8) -> list[float]:
    """Return one slope per head (Press et al. 2022, "Train Short, Test Long", with MPT's order of heads).

    For a number of heads that is not a power of two, take the slopes of the next power: every second one first, then
    the others.
    """
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2.0 ** -(bias_max * (i + 1) / power) for i in range(power)]
    return slopes if power == num_heads else (slopes[1::2] + slopes[::2])[:num_heads]


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosine and sine of every angle, fp32 [b, t, 1, k/2], also where activations have 16 bits."""

    cos_bt1j: Tensor
    sin_bt1j: Tensor


def build_rotation(options: AttentionConfig, head_dim: int, max_seq_len: int, positions_bt: Tensor) -> Rotation:
    """Compute the angles of RoPE: position * theta^(-2j/k) (Su et al. 2021, "RoFormer").

    Scaling beyond the trained length: `linear` divides positions by the factor (Chen et al. 2023); `ntk` raises theta
    to theta * factor^(k/(k-2)), and `dynamic` does so by as much as the longest position exceeds `max_seq_len`
    (both from r/LocalLLaMA, as in transformers); `llama3` divides low frequencies, those with few turns within the
    original length, and keeps high ones (The Llama 3 Herd of Models, 2024; Llama 3.1's reference code).
    """
    scaling = options.rope_hf_config
    theta, factor = options.rope_theta, scaling.factor
    positions_bt = positions_bt.float()
    exponent = head_dim / (head_dim - 2) if head_dim > 2 else 1.0
    if scaling.type == "linear":
        positions_bt = positions_bt / factor
    elif scaling.type == "ntk":
        theta = theta * factor**exponent
    elif scaling.type == "dynamic":
        length = max(float(positions_bt.max()) + 1, float(max_seq_len))
        theta = theta * (factor * length / max_seq_len - (factor - 1)) ** exponent
    exponents_j = torch.arange(0, head_dim, 2, device=positions_bt.device).float() / head_dim
    frequencies_j = 1.0 / theta**exponents_j
    if scaling.type == "llama3":
        turns_j = scaling.original_max_position_embeddings * frequencies_j / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept_j = ((turns_j - low) / (high - low)).clamp(0, 1)
        frequencies_j = (kept_j + (1 - kept_j) / factor) * frequencies_j
    angles_btj = positions_bt[..., None] * frequencies_j
    return Rotation(angles_btj.cos()[:, :, None], angles_btj.sin()[:, :, None])


def rotate(x_bthk: Tensor, rotation: Rotation) -> Tensor:
    """Apply RoPE: turn each pair of dimensions j and j + k/2 by its angle, in fp32."""
    cos_bt1j, sin_bt1j = rotation.cos_bt1j, rotation.sin_bt1j
    first, second = x_bthk.float().chunk(2, dim=-1)
    turned = torch.cat([first * cos_bt1j - second * sin_bt1j, second * cos_bt1j + first * sin_bt1j], dim=-1)
    return turned.to(x_bthk.dtype)
