"""Multi-head attention: masks, biases, rotary positions, and five implementations of the same mathematics.

`reference` is the definition, in fp32. The others compute the same faster:

- `sdpa`: PyTorch's `scaled_dot_product_attention`, which needs a bias of t*s numbers for anything but plain causal text
- `flex`: PyTorch's FlexAttention, which computes ALiBi, windows and documents without such a bias
- `blocked`: matrix products over blocks of queries, for CPUs (`blocked_attention.py`)
- `flash`: the package flash-attn

`choose_implementation` decides which one a training run uses. In each forward pass `build_mask` builds one `Mask`, and
every block of the model calls its `attend`. Loss, parallelism and the projections around attention live elsewhere.

Legend: b batch, t position of a query, s position of a key, h heads, g heads of keys and values, k head dimension. In
the section on FlexAttention's block masks, t and s count blocks of queries and blocks of keys.
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

MAX_FLASH_HEAD_DIM = 256
"""The widest head that flash-attn's kernels support, according to its README."""


def choose_implementation(model: ModelConfig, device_type: str, precision: torch.dtype) -> tuple[str, str]:
    """Choose the implementation for training on a device. Returns its name and the reason, in words for the user.

    That is the one that `attn_impl` names, or the fastest one for `auto`. `flash` means `auto` where flash-attn is not
    installed, because LLM Foundry's files name it throughout. `precision` is the dtype of matrix products.

    Raises ConfigError for an implementation that cannot train on this device. `config.check` has refused those that
    cannot train this model on any device.
    """
    requested = model.attn_config.attn_impl
    is_16_bit = precision in (torch.bfloat16, torch.float16)
    can_use_flash = (
        device_type == "cuda"
        and is_16_bit
        and model.head_dim <= MAX_FLASH_HEAD_DIM
        and importlib.util.find_spec("flash_attn") is not None
    )

    if requested == "torch":
        return "sdpa", "LLM Foundry's torch"
    if requested == "flash" and can_use_flash:
        return "flash", "asked for"
    if requested == "flex" and device_type != "cuda":
        raise ConfigError(f"model.attn_config.attn_impl: flex cannot be trained on a {device_type}; use auto or sdpa")
    if requested not in ("auto", "flash"):
        return requested, "asked for"

    prefix = "flash-attn cannot be used here; " if requested == "flash" else ""
    if device_type == "cpu" and precision == torch.bfloat16 and not model.attn_config.attn_pdrop:
        return "blocked", f"{prefix}the fastest on a cpu in bf16"
    if device_type != "cuda":
        return "sdpa", f"{prefix}the fastest on a {device_type}"
    if model.has_plain_attention:
        return "sdpa", f"{prefix}plain causal attention has its own kernels there"
    if can_use_flash:
        return "flash", "flash-attn is installed and in it a bias costs no memory"
    if model.flex_refusal:
        return "sdpa", prefix + model.flex_refusal
    return "flex", f"{prefix}a bias or a mask costs no memory in it"


# --------------------------------------------------------------------------------------------------- masks and biases


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """What queries may attend to, and with which bias, in the form that one implementation takes.

    Fields that `implementation` has no use for keep their defaults.
    """

    implementation: str
    """reference, sdpa, blocked, flex or flash."""
    bias_bhts: Tensor | None = None
    """reference, sdpa, blocked: added to the scores, -inf where masked; b and h may be 1. None: causal, no bias."""
    is_lower_right_causal: bool = False
    """sdpa on a GPU: causal without a bias, though there are more keys than queries. The queries stand at the positions
    of the last keys, so that the diagonal of the mask ends in its lower right corner."""
    block_mask: BlockMask | None = None
    """flex: the blocks of scores that are computed."""
    slopes_h: Tensor | None = None
    """flex, flash: ALiBi's slopes. In the other implementations they are part of the bias."""
    window: int = -1
    """blocked, flash: a query attends to this many keys before its own; -1 for all of them."""
    query_documents: "DocumentBounds | None" = None
    """flash: where the documents of the queries begin."""
    key_documents: "DocumentBounds | None" = None
    """flash: where the documents of the keys begin."""

    def to(self, dtype: torch.dtype) -> "Mask":
        """Cast the bias to the dtype that scores are computed in. The bias of `reference` stays fp32."""
        if self.bias_bhts is None or self.implementation == "reference":
            return self
        return replace(self, bias_bhts=self.bias_bhts.to(dtype))

    def attend(
        self, q_bthk: Tensor, k_bsgk: Tensor, v_bsgk: Tensor, scale: float | None = None, dropout_p: float = 0.0
    ) -> Tensor:
        """Compute softmax(q k^T * scale + bias) v, [b, t, h, k], in the dtype of q.

        Head i of the queries attends to head i // (h / g) of keys and values. `scale` is 1 / sqrt(k) by default.
        `dropout_p` is the fraction of attention weights to drop; pass 0 when the model is not training.
        """
        return IMPLEMENTATIONS[self.implementation](q_bthk, k_bsgk, v_bsgk, self, scale, dropout_p)


def build_mask(
    config: AttentionConfig,
    implementation: str,
    slopes_h: Tensor | None,
    positions_bt: Tensor,
    num_keys: int,
    attention_mask_bts: Tensor | None = None,
    documents_bs: Tensor | None = None,
) -> Mask:
    """Build the mask of one forward pass, which all blocks of the model share.

    config: gives the sliding window.
    slopes_h: ALiBi's slopes, or None without ALiBi.
    positions_bt: positions of the queries; b may be 1. The queries are the last of the `num_keys` keys, whose positions
        count up from 0.
    attention_mask_bts: bool, true where a query may attend to a key, for rows that are not plain text. There are as
        many queries as keys then, at the same positions. Without it attention is causal.
    documents_bs: the number of each key's document; tokens do not attend to other documents.
    """
    num_queries = positions_bt.size(1)
    window = config.sliding_window_size
    is_plain_causal = slopes_h is None and window < 0 and attention_mask_bts is None and documents_bs is None

    # flex, flash and blocked take no arbitrary mask, and blocked takes no cache: sdpa computes these by a bias.
    is_blocked_decoding = implementation == "blocked" and num_queries != num_keys
    if implementation != "reference" and (attention_mask_bts is not None or is_blocked_decoding):
        implementation = "sdpa"

    if implementation == "flex":
        _raise_recompile_limit()
        if documents_bs is None:
            block_mask = _causal_block_mask(window, num_keys - num_queries, num_queries, num_keys, positions_bt.device)
        else:
            block_mask = _document_block_mask(documents_bs, window, num_queries)
        return Mask(implementation="flex", block_mask=block_mask, slopes_h=slopes_h)

    if implementation == "flash":
        query_documents, key_documents = None, None
        if documents_bs is not None:
            query_documents, key_documents = _find_document_bounds(documents_bs, num_queries)
        return Mask(
            implementation="flash",
            slopes_h=slopes_h,
            window=window,
            query_documents=query_documents,
            key_documents=key_documents,
        )

    if is_plain_causal and num_queries == num_keys:
        return Mask(implementation=implementation)
    if is_plain_causal and implementation == "sdpa" and positions_bt.is_cuda:
        return Mask(implementation=implementation, is_lower_right_causal=True)
    bias_bhts = _build_bias(slopes_h, window, positions_bt, num_keys, attention_mask_bts, documents_bs)
    return Mask(implementation=implementation, bias_bhts=bias_bhts, window=window)


def _build_bias(
    slopes_h: Tensor | None,
    window: int,
    positions_bt: Tensor,
    num_keys: int,
    attention_mask_bts: Tensor | None,
    documents_bs: Tensor | None,
) -> Tensor:
    """Compute what is added to the scores: ALiBi's bias, and -inf where masked. [b, h, t, s], where b and h may be 1.

    The arguments are those of `build_mask`.
    """
    device = positions_bt.device
    if attention_mask_bts is None:
        key_positions_bs = torch.arange(num_keys, device=device)[None]
        is_visible_bts = key_positions_bs[:, None, :] <= positions_bt[:, :, None]
    else:
        key_positions_bs = positions_bt
        is_visible_bts = attention_mask_bts

    distance_bts = positions_bt[:, :, None] - key_positions_bs[:, None, :]
    if window >= 0:
        is_visible_bts = is_visible_bts & (distance_bts <= window)
    if documents_bs is not None:
        query_documents_bt = documents_bs[:, -positions_bt.size(1) :]
        is_visible_bts = is_visible_bts & (query_documents_bt[:, :, None] == documents_bs[:, None, :])

    # Without ALiBi the bias still has four dimensions. With three, sdpa falls back to a kernel that keeps all scores.
    slopes = torch.zeros((), device=device) if slopes_h is None else slopes_h[:, None, None]
    bias_bhts = -slopes * distance_bts[:, None]
    return bias_bhts.masked_fill(~is_visible_bts[:, None], float("-inf"))


def without_cudnn() -> AbstractContextManager[Any]:
    """Exclude cuDNN from the kernels of sdpa. For evaluation and decoding, whose rows have many lengths.

    cuDNN makes a new execution plan for each length.
    """
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def number_documents(tokens_bt: Tensor, separator: int, *, begins: bool = False) -> Tensor:
    """Number the documents of each row from 0 on: [b, t].

    The separator token belongs to the document that it ends, or with `begins` to the document that it begins. For
    example, the tokens a, |, b, c, | have the numbers 0, 0, 1, 1, 1, and with `begins` 0, 1, 1, 1, 2.
    """
    is_separator_bt = (tokens_bt == separator).long()
    num_separators_bt = is_separator_bt.cumsum(dim=1)
    return num_separators_bt if begins else num_separators_bt - is_separator_bt


# -------------------------------------------------------------------------------------------------- the computation

# All implementations take the arguments of `Mask.attend`, and the mask.


def _attend_reference(
    q_bthk: Tensor, k_bsgk: Tensor, v_bsgk: Tensor, mask: Mask, scale: float | None, dropout_p: float
) -> Tensor:
    """Compute attention by its definition, in fp32, with all scores in memory."""
    scale = scale or 1.0 / math.sqrt(q_bthk.size(-1))
    num_sharing = q_bthk.size(2) // k_bsgk.size(2)  # heads of queries for each head of keys and values
    k_bshk = k_bsgk.repeat_interleave(num_sharing, dim=2).float()
    v_bshk = v_bsgk.repeat_interleave(num_sharing, dim=2).float()

    scores_bhts = torch.einsum("bthk,bshk->bhts", q_bthk.float(), k_bshk) * scale
    if mask.bias_bhts is None:
        is_hidden_ts = torch.ones_like(scores_bhts[0, 0], dtype=torch.bool).triu(1)
        scores_bhts = scores_bhts.masked_fill(is_hidden_ts, float("-inf"))
    else:
        scores_bhts = scores_bhts + mask.bias_bhts
    weights_bhts = F.dropout(scores_bhts.softmax(dim=-1), dropout_p)
    return torch.einsum("bhts,bshk->bthk", weights_bhts, v_bshk).to(q_bthk.dtype)


def _attend_sdpa(
    q_bthk: Tensor, k_bsgk: Tensor, v_bsgk: Tensor, mask: Mask, scale: float | None, dropout_p: float
) -> Tensor:
    """Compute attention by `scaled_dot_product_attention`, which takes heads before positions."""
    q_bhtk = q_bthk.transpose(1, 2)
    k_bgsk = k_bsgk.transpose(1, 2)
    v_bgsk = v_bsgk.transpose(1, 2)
    if mask.is_lower_right_causal:
        return _sdpa_lower_right_causal(q_bhtk, k_bgsk, v_bgsk, scale, dropout_p).transpose(1, 2)
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


@torch.compiler.allow_in_graph  # a compiler cannot trace the questions about kernels, but compiles the one that runs
def _sdpa_lower_right_causal(
    q_bhtk: Tensor, k_bgsk: Tensor, v_bgsk: Tensor, scale: float | None, dropout_p: float
) -> Tensor:
    """Compute causal attention for queries that stand at the positions of the last keys.

    `scaled_dot_product_attention` aligns its causal mask to the upper left corner. The kernels behind it can align it
    to the lower right one, so this calls the first kernel that supports these tensors. `torch.nn.attention.bias` has
    `CausalBias` for the same purpose, but its objects do not survive a dispatch mode.
    """
    num_queries, num_keys = q_bhtk.size(2), k_bgsk.size(2)
    num_sharing = q_bhtk.size(1) // k_bgsk.size(1)  # heads of queries for each head of keys and values

    flash_params = SDPAParams(q_bhtk, k_bgsk, v_bgsk, None, dropout_p, False, num_sharing > 1)
    is_multiple_of_8 = q_bhtk.size(-1) % 8 == 0  # the operation asks for it; only sdpa pads other widths
    if is_multiple_of_8 and can_use_flash_attention(flash_params):
        flash_attention: Any = torch.ops.aten._scaled_dot_product_flash_attention
        return flash_attention(q_bhtk, k_bgsk, v_bgsk, dropout_p, True, scale=scale)[0]

    # The other kernels take as many heads of keys and values as of queries.
    k_bhsk = k_bgsk if num_sharing == 1 else k_bgsk.repeat_interleave(num_sharing, dim=1)
    v_bhsk = v_bgsk if num_sharing == 1 else v_bgsk.repeat_interleave(num_sharing, dim=1)
    if can_use_efficient_attention(SDPAParams(q_bhtk, k_bhsk, v_bhsk, None, dropout_p, False, False)):
        out_bthk, *_ = torch.ops.aten._efficient_attention_forward(
            *(x.transpose(1, 2) for x in (q_bhtk, k_bhsk, v_bhsk)),
            *(None, None, None, None, None),  # bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
            dropout_p,
            LOWER_RIGHT_CAUSAL,
            any(x.requires_grad for x in (q_bhtk, k_bhsk, v_bhsk)),  # compute_log_sumexp, for the backward pass
            scale=scale,
        )
        return out_bthk.transpose(1, 2)

    is_visible_ts = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q_bhtk.device)
    is_visible_ts = is_visible_ts.tril(num_keys - num_queries)
    return F.scaled_dot_product_attention(
        q_bhtk, k_bhsk, v_bhsk, attn_mask=is_visible_ts, dropout_p=dropout_p, scale=scale
    )


LOWER_RIGHT_CAUSAL = 2
"""The kernel's number for that mask: `torch.nn.attention.bias.CausalVariant.LOWER_RIGHT`."""


def _attend_blocked(
    q_bthk: Tensor, k_bsgk: Tensor, v_bsgk: Tensor, mask: Mask, scale: float | None, dropout_p: float
) -> Tensor:
    """Compute attention by matrix products over blocks of queries (`blocked_attention.py`)."""
    assert not dropout_p, "refused when the configuration is checked"
    bias_bhts = None if mask.bias_bhts is None else mask.bias_bhts.to(q_bthk.dtype)
    scale = scale or 1.0 / math.sqrt(q_bthk.size(-1))
    return blocked_attention(q_bthk, k_bsgk, v_bsgk, bias_bhts, scale, mask.window)


def _attend_flex(
    q_bthk: Tensor, k_bsgk: Tensor, v_bsgk: Tensor, mask: Mask, scale: float | None, dropout_p: float
) -> Tensor:
    """Compute attention by FlexAttention, which takes heads before positions."""
    assert not dropout_p, "refused when the configuration is checked"
    # Without a compiler FlexAttention computes all scores. On a CPU it serves comparisons only, and is not compiled.
    compute = _compile_to_one_operation(flex_attention) if q_bthk.is_cuda else flex_attention
    score_mod = None
    if mask.slopes_h is not None:
        score_mod = _alibi_score_mod(mask.slopes_h, k_bsgk.size(1) - q_bthk.size(1))
    out_bhtk = compute(
        q_bthk.transpose(1, 2),
        k_bsgk.transpose(1, 2),
        v_bsgk.transpose(1, 2),
        score_mod=score_mod,
        block_mask=mask.block_mask,
        scale=scale,
        enable_gqa=q_bthk.size(2) != k_bsgk.size(2),
    )
    return out_bhtk.transpose(1, 2)


def _attend_flash(
    q_bthk: Tensor, k_bsgk: Tensor, v_bsgk: Tensor, mask: Mask, scale: float | None, dropout_p: float
) -> Tensor:
    """Compute attention by flash-attn. With documents, all rows become one sequence of documents of several lengths."""
    from flash_attn import flash_attn_func, flash_attn_varlen_func  # type: ignore[import-not-found]

    options = {
        "dropout_p": dropout_p,
        "softmax_scale": scale,
        "causal": True,  # flash-attn aligns the mask to the lower right corner
        "window_size": (mask.window, 0) if mask.window >= 0 else (-1, -1),
        "alibi_slopes": mask.slopes_h,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if mask.query_documents is None or mask.key_documents is None:
        return flash_attn_func(q_bthk, k_bsgk, v_bsgk, **options)

    out_nhk = flash_attn_varlen_func(
        q_bthk.flatten(0, 1),
        k_bsgk.flatten(0, 1),
        v_bsgk.flatten(0, 1),
        cu_seqlens_q=mask.query_documents.starts_n,
        cu_seqlens_k=mask.key_documents.starts_n,
        max_seqlen_q=mask.query_documents.max_length,
        max_seqlen_k=mask.key_documents.max_length,
        **options,
    )
    return out_nhk.view_as(q_bthk)


IMPLEMENTATIONS = {
    "reference": _attend_reference,
    "sdpa": _attend_sdpa,
    "blocked": _attend_blocked,
    "flex": _attend_flex,
    "flash": _attend_flash,
}

# ------------------------------------------------------------------------------------ FlexAttention: compiling

FLEX_RECOMPILE_LIMIT = 64
"""Shapes that FlexAttention may be compiled for.

torch compiles a kernel of its own for every size of 1, and one more for each size that has changed: of rows, queries,
keys or blocks, with and without a gradient. A run with `auto` microbatches, an evaluation and decoding reached 9."""


@functools.cache
def _compile_to_one_operation(function: Callable) -> Callable:
    """Compile a function to one operation of the surrounding graph, whose result selective checkpointing can keep.

    Releases of torch without that option recompute the function in the backward pass.

    `fullgraph` makes it an error to reach torch's limit of recompilations. Without it torch would then run the function
    eagerly without a word, with all scores in memory.
    """
    option = "wrap_inductor_compiled_regions"
    options: Any = {option: True} if hasattr(inductor_config, option) else None
    return torch.compile(function, fullgraph=True, options=options)


@functools.cache
def _raise_recompile_limit() -> None:
    """Raise torch's limit of recompilations to `FLEX_RECOMPILE_LIMIT`, once in a process.

    `build_mask` calls this, and not `_attend_flex`, which is traced as part of a compiled block: the block would be
    compiled again whenever the limit has changed.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, FLEX_RECOMPILE_LIMIT)


def _alibi_score_mod(slopes_h: Tensor, num_past: int) -> Callable:
    """Return the `score_mod` that subtracts ALiBi's bias. The first query stands at position `num_past`."""

    def subtract_bias(score, b, h, t, s):
        return score - slopes_h[h] * (t + num_past - s)

    return subtract_bias


# -------------------------------------------------------------------------- FlexAttention: which blocks to compute

# FlexAttention divides the scores into blocks. It skips a block in which no query sees a key, computes a full block, in
# which every query sees every key, without a mask, and asks `mask_mod` for each score of a partial block.
#
# torch's create_block_mask finds the kinds of blocks from the whole mask: b*t*s numbers, several times over. The
# functions below compare only the first and the last position of each block. From here on, t and s count blocks.

FLEX_BLOCK = 128
"""Queries or keys in a block (torch's default)."""


@functools.lru_cache(maxsize=16)
def _causal_block_mask(window: int, num_past: int, num_queries: int, num_keys: int, device: torch.device) -> BlockMask:
    """Build the blocks of a causal mask, with a sliding window unless `window` is below 0.

    The first query stands at position `num_past`. Masks are the same for every batch and therefore cached.
    """

    def mask_mod(b, h, t, s):
        distance = t + num_past - s
        if window < 0:
            return distance >= 0
        return (distance >= 0) & (distance <= window)

    is_computed_1ts, is_full_1ts = _find_causal_blocks(window, num_queries, num_keys, device)
    return _build_block_mask(is_computed_1ts, is_full_1ts, mask_mod, num_queries, num_keys)


def _document_block_mask(documents_bs: Tensor, window: int, num_queries: int) -> BlockMask:
    """Build the blocks of a causal mask in which tokens attend only to tokens of their own document.

    `documents_bs` are numbers that never fall within a row. The queries are the last `num_queries` tokens.
    """
    num_keys, device = documents_bs.size(1), documents_bs.device
    num_past = num_keys - num_queries

    def mask_mod(b, h, t, s):
        distance = t + num_past - s
        is_visible = (distance >= 0) & (documents_bs[b, t + num_past] == documents_bs[b, s])
        if window < 0:
            return is_visible
        return is_visible & (distance <= window)

    # The documents of a block are those from the one of its first token to that of its last.
    q_first_t, q_last_t = _ends_of_blocks(num_queries, device)
    k_first_s, k_last_s = _ends_of_blocks(num_keys, device)
    q_first_document_bt1 = documents_bs[:, num_past + q_first_t].unsqueeze(2)
    q_last_document_bt1 = documents_bs[:, num_past + q_last_t].unsqueeze(2)
    k_first_document_b1s = documents_bs[:, k_first_s].unsqueeze(1)
    k_last_document_b1s = documents_bs[:, k_last_s].unsqueeze(1)

    # Some pair of tokens shares a document if the two ranges overlap. Every pair does if all four documents are the
    # same, which these two equations imply because numbers never fall.
    shares_some_bts = (q_first_document_bt1 <= k_last_document_b1s) & (k_first_document_b1s <= q_last_document_bt1)
    shares_all_bts = (q_first_document_bt1 == k_last_document_b1s) & (k_first_document_b1s == q_last_document_bt1)

    is_computed_1ts, is_full_1ts = _find_causal_blocks(window, num_queries, num_keys, device)
    return _build_block_mask(
        is_computed_1ts & shares_some_bts, is_full_1ts & shares_all_bts, mask_mod, num_queries, num_keys
    )


def _find_causal_blocks(window: int, num_queries: int, num_keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Find the blocks in which some query sees some key, and those in which all see all: two of bool, [1, t, s].

    A block that the end of the row cuts short is never full, as in torch's create_block_mask.
    """
    q_first_t, q_last_t = _ends_of_blocks(num_queries, device)
    k_first_s, k_last_s = _ends_of_blocks(num_keys, device)
    num_past = num_keys - num_queries
    least_distance_ts = q_first_t[:, None] + num_past - k_last_s
    most_distance_ts = q_last_t[:, None] + num_past - k_first_s

    is_computed_ts = most_distance_ts >= 0
    is_full_ts = least_distance_ts >= 0
    if window >= 0:
        is_computed_ts = is_computed_ts & (least_distance_ts <= window)
        is_full_ts = is_full_ts & (most_distance_ts <= window)
    is_whole_ts = (q_last_t - q_first_t)[:, None] + (k_last_s - k_first_s) == 2 * (FLEX_BLOCK - 1)
    return is_computed_ts[None], (is_full_ts & is_whole_ts)[None]


def _ends_of_blocks(num_tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the first and the last position of each block; the last block may be short."""
    first = torch.arange(0, num_tokens, FLEX_BLOCK, device=device)
    last = (first + FLEX_BLOCK - 1).clamp(max=num_tokens - 1)
    return first, last


def _build_block_mask(
    is_computed_bts: Tensor, is_full_bts: Tensor, mask_mod: Callable, num_queries: int, num_keys: int
) -> BlockMask:
    """Build FlexAttention's mask from the blocks that are computed, and from those of them that are full.

    FlexAttention takes each kind of block as counts for each row of blocks, and as indices that begin with the blocks
    of this kind. Sorting descending puts them first, and a stable sort keeps them in order.
    """
    counts_and_indices = []
    for is_of_kind_bts in (is_computed_bts & ~is_full_bts, is_full_bts):  # partial ones, then full ones
        is_of_kind_b1ts = is_of_kind_bts[:, None].int()
        counts_and_indices.append(is_of_kind_b1ts.sum(-1, dtype=torch.int32))
        counts_and_indices.append(is_of_kind_b1ts.argsort(dim=-1, descending=True, stable=True).int())
    return BlockMask.from_kv_blocks(
        *counts_and_indices, BLOCK_SIZE=FLEX_BLOCK, mask_mod=mask_mod, seq_lengths=(num_queries, num_keys)
    )


# ------------------------------------------------------------------------------------------- flash-attn: documents


@dataclass(frozen=True, slots=True)
class DocumentBounds:
    """Where documents begin in a batch whose rows are joined to one sequence, as flash-attn takes it."""

    starts_n: Tensor
    """int32: where each document begins, and where the last one ends (`cu_seqlens`)."""
    max_length: int
    """Tokens of the longest document."""


def _find_document_bounds(documents_bs: Tensor, num_queries: int) -> tuple[DocumentBounds, DocumentBounds]:
    """Return the bounds of documents among the queries, the last `num_queries` tokens of each row, and among all keys.

    Both list the same documents in the same order. A document that ends before the first query has no queries.
    """
    num_keys = documents_bs.size(1)
    is_key_bs = torch.ones_like(documents_bs, dtype=torch.bool)
    is_query_s = torch.arange(num_keys, device=documents_bs.device) >= num_keys - num_queries

    begins_document_bs = torch.ones_like(is_key_bs)  # at the first token of each row in any case
    begins_document_bs[:, 1:] = documents_bs[:, 1:] != documents_bs[:, :-1]
    first_tokens_n = begins_document_bs.flatten().nonzero().flatten()

    def bounds_among(is_counted_bs: Tensor) -> DocumentBounds:
        num_before = F.pad(is_counted_bs.flatten().cumsum(0), (1, 0))  # of each token, and of the end
        starts_n = torch.cat([num_before[first_tokens_n], num_before[-1:]]).int()
        return DocumentBounds(starts_n, int(starts_n.diff().max()))

    return bounds_among(is_query_s.expand_as(documents_bs)), bounds_among(is_key_bs)


# -------------------------------------------------------------------------------------------------------- positions


def compute_alibi_slopes(num_heads: int, bias_max: int = 8) -> list[float]:
    """Return one slope for each head (Press et al. 2022, "Train Short, Test Long", with MPT's order of heads).

    Head i of n has the slope 2^(-bias_max * (i + 1) / n): 1/2, 1/4, ... 1/256 for eight heads. If the number of heads
    is not a power of two, the slopes of the next power are taken: every second one first, then the others.
    """
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2.0 ** -(bias_max * (i + 1) / power) for i in range(power)]
    if power == num_heads:
        return slopes
    return (slopes[1::2] + slopes[::2])[:num_heads]


@dataclass(frozen=True, slots=True)
class Rotation:
    """RoPE's angles of every position, by cosine and sine. fp32, also where activations have 16 bits.

    The dimension of 1 is that of heads; j counts the k/2 pairs of dimensions of a head.
    """

    cos_bt1j: Tensor
    sin_bt1j: Tensor


def build_rotation(config: AttentionConfig, head_dim: int, max_seq_len: int, positions_bt: Tensor) -> Rotation:
    """Compute RoPE's angles: position * theta^(-2j/k) (Su et al. 2021, "RoFormer").

    `rope_hf_config` scales them for rows longer than those of training:

    linear: positions are divided by the factor (Chen et al. 2023, "Extending Context Window").
    ntk: theta becomes theta * factor^(k/(k-2)), as proposed in r/LocalLLaMA and computed by transformers.
    dynamic: the same, with a factor that grows once the longest position exceeds `max_seq_len`.
    llama3: low frequencies, those with few turns within the original length, are divided by the factor; high ones are
        kept, and those between are blended (The Llama 3 Herd of Models, 2024; Llama 3.1's reference code).
    """
    scaling = config.rope_hf_config
    theta = config.rope_theta
    positions_bt = positions_bt.float()
    ntk_exponent = head_dim / (head_dim - 2) if head_dim > 2 else 1.0
    if scaling.type == "linear":
        positions_bt = positions_bt / scaling.factor
    elif scaling.type == "ntk":
        theta = theta * scaling.factor**ntk_exponent
    elif scaling.type == "dynamic":
        length = max(float(positions_bt.max()) + 1, float(max_seq_len))
        theta = theta * (scaling.factor * length / max_seq_len - (scaling.factor - 1)) ** ntk_exponent

    exponents_j = torch.arange(0, head_dim, 2, device=positions_bt.device).float() / head_dim
    frequencies_j = 1.0 / theta**exponents_j
    if scaling.type == "llama3":
        turns_j = scaling.original_max_position_embeddings * frequencies_j / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept_share_j = ((turns_j - low) / (high - low)).clamp(0, 1)
        frequencies_j = (kept_share_j + (1 - kept_share_j) / scaling.factor) * frequencies_j

    angles_btj = positions_bt[..., None] * frequencies_j
    return Rotation(angles_btj.cos()[:, :, None], angles_btj.sin()[:, :, None])


def rotate(x_bthk: Tensor, rotation: Rotation) -> Tensor:
    """Apply RoPE to queries or keys: turn each pair of dimensions j and j + k/2 by its angle, in fp32."""
    cos_bt1j, sin_bt1j = rotation.cos_bt1j, rotation.sin_bt1j
    first_bthj, second_bthj = x_bthk.float().chunk(2, dim=-1)
    turned_bthk = torch.cat(
        [
            first_bthj * cos_bt1j - second_bthj * sin_bt1j,
            second_bthj * cos_bt1j + first_bthj * sin_bt1j,
        ],
        dim=-1,
    )
    return turned_bthk.to(x_bthk.dtype)
