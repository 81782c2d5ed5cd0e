"""Attention over heads: who sees whom, at what bias, and five implementations of the same mathematics.

`reference` is the definition, written out in fp32: the yardstick. `sdpa` is PyTorch's
scaled_dot_product_attention, `blocked` our products over blocks of queries, `flex` PyTorch's FlexAttention (ALiBi,
windows and documents without a bias of t*s numbers), `flash` the flash-attn package. `Mask` is made once for all
blocks of a forward pass; its `attend` is called in each.

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
from torch._inductor import config as inductor_config
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from llmfoundry_lite.config.model_schema import FLEX_HEAD_DIM, AttentionConfig, ModelConfig
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.models.blocked_attention import blocked_attention

# ------------------------------------------------------------------------------------------- which implementation


FLEX_BLOCK = 128
"""Queries or keys of a block of FlexAttention's mask: torch's default."""

FLEX_SHAPES = 64
"""A dimension of 1 is compiled apart, one that has changed for any size: in rows, queries, keys and their blocks, with
a gradient and without. `auto`, an evaluation and decoding have been seen to reach 9."""

FLASH_HEAD_DIM = 256
"""The widest head that flash-attn's kernels have, by its README."""


def choose_implementation(model: ModelConfig, device_type: str, precision: torch.dtype) -> tuple[str, str]:
    """(implementation, why) for training this model there: what `attn_impl` names, or for auto the fastest that can.
    `precision` is that of matrix products.

    LLM Foundry's files name `flash` throughout: without flash-attn it is the wish for what auto would choose. Raises
    ConfigError for what the device cannot do; what no device can, `config.check` has refused.
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
    if not (options.alibi or options.sliding_window_size >= 0 or options.attn_uses_sequence_id):
        return "sdpa", f"{reason}plain causal attention has its own kernels there"
    if has_flash:
        return "flash", "flash-attn is installed and in it a bias costs no memory"
    if options.attn_pdrop:
        return "sdpa", f"{reason}flex has no dropout"
    if model.head_dim < FLEX_HEAD_DIM:
        return "sdpa", f"{reason}flex has no kernel for heads of fewer than {FLEX_HEAD_DIM} dimensions"
    return "flex", f"{reason}a bias or a mask costs no memory in it"


# --------------------------------------------------------------------------------------------------- who sees whom


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """Which keys each query sees and at what bias, in the form `implementation` wants it.

    Not a tuple or a dict, so that FSDP does not look inside for tensors to cast.
    """

    implementation: str
    bias_bhts: torch.Tensor | None = None
    """reference, sdpa, blocked: added to scores, -inf where nothing is seen; b and h may be 1. None: plain causal."""
    has_more_keys: bool = False
    """sdpa on a GPU: the queries are the last of the keys, each sees those before it, and no bias says so."""
    block_mask: BlockMask | None = None
    """flex: which blocks of scores are computed at all."""
    slopes_h: torch.Tensor | None = None
    """flex, flash: ALiBi's."""
    window: int = -1
    """blocked, flash: a query sees so many keys before its own; -1 for all."""
    query_documents: "DocumentBounds | None" = None
    """flash: of the queries, and of the keys."""
    key_documents: "DocumentBounds | None" = None

    def to(self, dtype: torch.dtype) -> "Mask":
        """The precision scores are computed in; reference keeps fp32."""
        if self.bias_bhts is None or self.implementation == "reference":
            return self
        return replace(self, bias_bhts=self.bias_bhts.to(dtype))

    def attend(
        self,
        q_bthk: torch.Tensor,
        k_bsgk: torch.Tensor,
        v_bsgk: torch.Tensor,
        *,
        softmax_scale: float | None = None,
        dropout_p: float = 0.0,
    ) -> torch.Tensor:
        """softmax(q k^T * scale + bias) v, [b, t, h, k]; head i of q reads head i // (h / g) of k and v."""
        return IMPLEMENTATIONS[self.implementation](q_bthk, k_bsgk, v_bsgk, self, softmax_scale, dropout_p)


def build_mask(
    options: AttentionConfig,
    implementation: str,
    slopes_h: torch.Tensor | None,
    positions_bt: torch.Tensor,
    num_keys: int,
    may_see_bts: torch.Tensor | None = None,
    documents_bs: torch.Tensor | None = None,
) -> Mask:
    """Keys stand at positions 0 to `num_keys`, queries at the last of them, unless `may_see_bts` says who sees whom.

    `positions_bt` (b may be 1) are the queries'. `may_see_bts` (bool) is for rows that are not plain text: as many
    queries as keys, at the same positions, computed through a bias whatever the implementation. `documents_bs`
    numbers the document each key belongs to; tokens of different documents do not see each other.
    """
    num_queries, device, window = positions_bt.size(1), positions_bt.device, options.sliding_window_size
    if implementation == "blocked" and (may_see_bts is not None or num_queries != num_keys):
        implementation = "sdpa"
    if may_see_bts is not None or implementation in ("reference", "sdpa", "blocked"):
        name = implementation if implementation in ("reference", "blocked") else "sdpa"
        is_plain = slopes_h is None and window < 0 and may_see_bts is None and documents_bs is None
        if is_plain and num_queries == num_keys:
            return Mask(implementation=name)
        if is_plain and name == "sdpa" and device.type == "cuda":
            return Mask(implementation=name, has_more_keys=True)
        key_positions_bs = positions_bt
        if may_see_bts is None:
            key_positions_bs = torch.arange(num_keys, device=device)[None]
            may_see_bts = key_positions_bs[:, None, :] <= positions_bt[:, :, None]
        distance_bts = positions_bt[:, :, None] - key_positions_bs[:, None, :]
        if window >= 0:
            may_see_bts = may_see_bts & (distance_bts <= window)
        if documents_bs is not None:
            may_see_bts = may_see_bts & (documents_bs[:, -num_queries:, None] == documents_bs[:, None, :])
        # Four dimensions, because with three torch falls back to keeping all scores.
        bias_bhts = torch.zeros((), device=device) if slopes_h is None else slopes_h[:, None, None]
        bias_bhts = (-bias_bhts * distance_bts[:, None]).masked_fill(~may_see_bts[:, None], float("-inf"))
        return Mask(implementation=name, bias_bhts=bias_bhts, window=window)
    if implementation == "flex":
        _expect_shapes()
        offset = num_keys - num_queries
        if documents_bs is None:
            block_mask = _block_mask(window, offset, num_queries, num_keys, device)
        else:
            block_mask = _document_block_mask(documents_bs, window, num_queries)
        return Mask(implementation="flex", block_mask=block_mask, slopes_h=slopes_h)
    mask = Mask(implementation="flash", slopes_h=slopes_h, window=window)
    if documents_bs is None:
        return mask
    query_documents, key_documents = _document_bounds(documents_bs, num_queries)
    return replace(mask, query_documents=query_documents, key_documents=key_documents)


def for_any_width() -> AbstractContextManager[Any]:
    """For rows of many widths, as in an evaluation: not cuDNN's attention, which plans anew for each width."""
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def document_numbers(tokens_bt: torch.Tensor, separator: int, *, begins: bool = False) -> torch.Tensor:
    """Which document of its row each token belongs to, [b, t]; the separator is the last token of one, or its first."""
    is_separator_bt = (tokens_bt == separator).long()
    numbers_bt = is_separator_bt.cumsum(dim=1)
    return numbers_bt if begins else numbers_bt - is_separator_bt


# -------------------------------------------------------------------------------------------------- the computation


def _reference(q_bthk, k_bsgk, v_bsgk, mask: Mask, softmax_scale, dropout_p) -> torch.Tensor:
    scale = softmax_scale or 1.0 / math.sqrt(q_bthk.size(-1))
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


def _sdpa(q_bthk, k_bsgk, v_bsgk, mask: Mask, softmax_scale, dropout_p) -> torch.Tensor:
    q_bhtk, k_bgsk, v_bgsk = (x.transpose(1, 2) for x in (q_bthk, k_bsgk, v_bsgk))
    if mask.has_more_keys:
        return _sdpa_of_last_queries(q_bhtk, k_bgsk, v_bgsk, softmax_scale, dropout_p).transpose(1, 2)
    return F.scaled_dot_product_attention(
        q_bhtk,
        k_bgsk,
        v_bgsk,
        attn_mask=None if mask.bias_bhts is None else mask.bias_bhts.to(q_bthk.dtype),
        is_causal=mask.bias_bhts is None,
        dropout_p=dropout_p,
        scale=softmax_scale,
        enable_gqa=q_bthk.size(2) != k_bsgk.size(2),
    ).transpose(1, 2)


@torch.compiler.allow_in_graph  # the compiler cannot ask which kernels there are, but compiles what runs
def _sdpa_of_last_queries(q_bhtk, k_bgsk, v_bgsk, scale, dropout_p) -> torch.Tensor:
    """A causal mask that ends in the lower right corner, which kernels know and scaled_dot_product_attention cannot be
    asked for. As torch.nn.attention.bias.CausalBias does, whose objects survive no dispatch mode."""
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


def _blocked(q_bthk, k_bsgk, v_bsgk, mask: Mask, softmax_scale, dropout_p) -> torch.Tensor:
    assert not dropout_p, "refused when the configuration is checked"
    bias_bhts = None if mask.bias_bhts is None else mask.bias_bhts.to(q_bthk.dtype)
    scale = softmax_scale or 1.0 / math.sqrt(q_bthk.size(-1))
    return blocked_attention(q_bthk, k_bsgk, v_bsgk, bias_bhts, scale, mask.window)


def _flex(q_bthk, k_bsgk, v_bsgk, mask: Mask, softmax_scale, dropout_p) -> torch.Tensor:
    assert not dropout_p, "refused when the configuration is checked"
    q_bhtk, k_bgsk, v_bgsk = (x.transpose(1, 2) for x in (q_bthk, k_bsgk, v_bsgk))
    # Compiled, or it computes all scores. On a CPU it is there to be compared with, and needs no compiler.
    compute = _compiled_visibly(flex_attention) if q_bthk.is_cuda else flex_attention
    out_bhtk = compute(
        q_bhtk,
        k_bgsk,
        v_bgsk,
        score_mod=None if mask.slopes_h is None else _alibi_score(mask.slopes_h, k_bsgk.size(1) - q_bthk.size(1)),
        block_mask=mask.block_mask,
        scale=softmax_scale,
        enable_gqa=q_bthk.size(2) != k_bsgk.size(2),
    )
    return out_bhtk.transpose(1, 2)


def _flash(q_bthk, k_bsgk, v_bsgk, mask: Mask, softmax_scale, dropout_p) -> torch.Tensor:
    from flash_attn import flash_attn_func, flash_attn_varlen_func  # type: ignore[import-not-found]

    options = {
        "dropout_p": dropout_p,
        "softmax_scale": softmax_scale,
        "causal": True,
        "window_size": (mask.window, 0) if mask.window >= 0 else (-1, -1),
        "alibi_slopes": mask.slopes_h,
    }
    if mask.query_documents is None or mask.key_documents is None:
        return flash_attn_func(q_bthk, k_bsgk, v_bsgk, **options)
    out_nhk = flash_attn_varlen_func(
        *(x.flatten(0, 1) for x in (q_bthk, k_bsgk, v_bsgk)),
        cu_seqlens_q=mask.query_documents.starts_n,
        cu_seqlens_k=mask.key_documents.starts_n,
        max_seqlen_q=mask.query_documents.longest,
        max_seqlen_k=mask.key_documents.longest,
        **options,
    )
    return out_nhk.view_as(q_bthk)


IMPLEMENTATIONS = {"reference": _reference, "sdpa": _sdpa, "blocked": _blocked, "flex": _flex, "flash": _flash}


@functools.cache
def _compiled_visibly(function: Callable) -> Callable:
    """As one operation that selective checkpointing can keep: nothing else of what is compiled shows in eager code.
    Older releases of torch cannot do so, and compute it again.

    Past its limit of recompilations torch would run it eagerly, with all scores in memory, unseen: so the whole graph
    is asked for. `_expect_shapes` raises the limit.
    """
    option = "wrap_inductor_compiled_regions"
    options: Any = {option: True} if hasattr(inductor_config, option) else None
    return torch.compile(function, fullgraph=True, options=options)


@functools.cache
def _expect_shapes() -> None:
    """Raise torch's limit of recompilations beyond the shapes of a run with evaluations and decoding.

    Not where FlexAttention is called: a compiled block traces that, and would be compiled again for each limit.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, FLEX_SHAPES)


@functools.lru_cache(maxsize=16)
def _block_mask(window: int, offset: int, num_queries: int, num_keys: int, device: torch.device) -> BlockMask:
    """Causal, perhaps within a window; the same for every batch, so made once."""

    def sees(b, h, t, s):
        distance = t + offset - s
        return (distance >= 0) & (distance <= window) if window >= 0 else distance >= 0

    some_1ts, all_1ts = _blocks_seen(window, num_queries, num_keys, device)
    return _from_blocks(some_1ts, all_1ts, sees, num_queries, num_keys)


def _document_block_mask(documents_bs: torch.Tensor, window: int, num_queries: int) -> BlockMask:
    num_keys, device = documents_bs.size(1), documents_bs.device
    offset = num_keys - num_queries

    def sees(b, h, t, s):
        distance = t + offset - s
        seen = (distance >= 0) & (documents_bs[b, t + offset] == documents_bs[b, s])
        return seen & (distance <= window) if window >= 0 else seen

    # Numbers of documents only ever rise: two blocks have one in common if those of their ends overlap.
    (q_first_bt1, q_last_bt1), (k_first_b1s, k_last_b1s) = (
        [documents_bs[:, offset + end].unsqueeze(dim) for end in _ends_of_blocks(length, device)]
        for dim, offset, length in ((2, offset, num_queries), (1, 0, num_keys))
    )
    some_1ts, all_1ts = _blocks_seen(window, num_queries, num_keys, device)
    some_bts = some_1ts & (q_first_bt1 <= k_last_b1s) & (k_first_b1s <= q_last_bt1)
    all_bts = all_1ts & (q_first_bt1 == k_last_b1s) & (k_first_b1s == q_last_bt1)
    return _from_blocks(some_bts, all_bts, sees, num_queries, num_keys)


# torch's create_block_mask makes the whole mask first: b*t*s numbers, several times over. Here t and s count blocks.


def _ends_of_blocks(length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and the last position in each block; the last block may be short."""
    first = torch.arange(0, length, FLEX_BLOCK, device=device)
    return first, (first + FLEX_BLOCK - 1).clamp(max=length - 1)


def _blocks_seen(
    window: int, num_queries: int, num_keys: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """(whether any query of a block sees any key of another, whether all see all), [1, t, s]; short blocks never are
    all."""
    (q_first_t, q_last_t), (k_first_s, k_last_s) = (_ends_of_blocks(n, device) for n in (num_queries, num_keys))
    offset = num_keys - num_queries
    nearest_ts = q_first_t[:, None] + offset - k_last_s
    furthest_ts = q_last_t[:, None] + offset - k_first_s
    some_ts, all_ts = furthest_ts >= 0, nearest_ts >= 0
    if window >= 0:
        some_ts, all_ts = some_ts & (nearest_ts <= window), all_ts & (furthest_ts <= window)
    is_whole_ts = (q_last_t - q_first_t)[:, None] + (k_last_s - k_first_s) == 2 * (FLEX_BLOCK - 1)
    return some_ts[None], (all_ts & is_whole_ts)[None]


def _from_blocks(
    some_bts: torch.Tensor, all_bts: torch.Tensor, sees: Callable, num_queries: int, num_keys: int
) -> BlockMask:
    """Which blocks are computed: with `sees` asked for each score, or without asking."""
    counts_and_indices = []
    for blocks_bts in (some_bts & ~all_bts, all_bts):
        ordered_bts = blocks_bts[:, None].int()
        counts_and_indices.append(ordered_bts.sum(-1, dtype=torch.int32))
        counts_and_indices.append(ordered_bts.argsort(dim=-1, descending=True, stable=True).int())
    return BlockMask.from_kv_blocks(
        *counts_and_indices, BLOCK_SIZE=FLEX_BLOCK, mask_mod=sees, seq_lengths=(num_queries, num_keys)
    )


def _alibi_score(slopes_h: torch.Tensor, offset: int) -> Callable:
    return lambda score, b, h, t, s: score - slopes_h[h] * (t + offset - s)


@dataclass(frozen=True, slots=True)
class DocumentBounds:
    """Documents of a flattened batch, as flash-attn wants them. Not a tuple, for the reason that Mask is none."""

    starts_n: torch.Tensor
    """int32, where each begins, and where the last one ends."""
    longest: int


def _document_bounds(documents_bs: torch.Tensor, num_queries: int) -> tuple[DocumentBounds, DocumentBounds]:
    """(of the last `num_queries` tokens of each row, of all tokens); a document may be over before the queries begin,
    and has none of them."""
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
    """One slope per head (Press et al. 2022, "Train Short, Test Long", with MPT's order of heads).

    For a number of heads that is no power of two, the slopes of the next power are taken: every second one
    first, then the others.
    """
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2.0 ** -(bias_max * (i + 1) / power) for i in range(power)]
    return slopes if power == num_heads else (slopes[1::2] + slopes[::2])[:num_heads]


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosine and sine of every angle, fp32 [b, t, 1, k/2]. Not a tuple, for the reason that Mask is none."""

    cos_bt1j: torch.Tensor
    sin_bt1j: torch.Tensor


def build_rotation(options: AttentionConfig, head_dim: int, max_seq_len: int, positions_bt: torch.Tensor) -> Rotation:
    """Angles of RoPE: position * theta^(-2j/k) (Su et al. 2021, "RoFormer").

    Scaling beyond the trained length: `linear` divides positions by the factor (Chen et al. 2023); `ntk` raises theta
    to theta * factor^(k/(k-2)), and `dynamic` does so by as much as the longest position exceeds `max_seq_len`
    (both from r/LocalLLaMA, as transformers has them); `llama3` divides the frequencies of few turns within the
    original length, and those of many not (The Llama 3 Herd of Models, 2024; Llama 3.1's reference code).
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


def rotate(x_bthk: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """RoPE: dimensions j and j + k/2 of each head are a pair, turned by their angle; in fp32, which angles need."""
    cos_bt1j, sin_bt1j = rotation.cos_bt1j, rotation.sin_bt1j
    first, second = x_bthk.float().chunk(2, dim=-1)
    turned = torch.cat([first * cos_bt1j - second * sin_bt1j, second * cos_bt1j + first * sin_bt1j], dim=-1)
    return turned.to(x_bthk.dtype)
