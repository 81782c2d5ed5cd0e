"""Attention by PyTorch's FlexAttention: ALiBi, sliding windows and documents, without a bias of t*s numbers.

FlexAttention divides the scores into blocks. It skips a block in which no query sees a key, computes a full block, in
which every query sees every key, without a mask, and asks `mask_mod` for each score of a partial block.

torch's `create_block_mask` finds the kinds of blocks from the whole mask: b*t*s numbers, several times over.
`causal_block_mask` and `document_block_mask` compare only the first and the last position of each block.

Legend: b batch, t position of a query, s position of a key, h heads, g heads of keys and values, k head dimension. In
the second section, t and s count blocks of queries and blocks of keys.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch.nn.attention.flex_attention import BlockMask, flex_attention


def attend_by_blocks(
    q_bthk: Tensor,
    k_bsgk: Tensor,
    v_bsgk: Tensor,
    slopes_h: Tensor | None,
    block_mask: BlockMask | None,
    scale: float | None,
) -> Tensor:
    """Compute softmax(q k^T * scale + ALiBi's bias) v, [b, t, h, k], for the scores that `block_mask` lets through.

    The queries stand at the positions of the last keys. `slopes_h` are ALiBi's, or None without ALiBi. `scale` is
    1 / sqrt(k) by default. FlexAttention takes heads before positions.
    """
    # Without a compiler FlexAttention computes all scores. On a CPU it serves comparisons only, and is not compiled.
    compute = compile_to_one_operation(flex_attention) if q_bthk.is_cuda else flex_attention
    score_mod = None
    if slopes_h is not None:
        score_mod = _alibi_score_mod(slopes_h, k_bsgk.size(1) - q_bthk.size(1))
    out_bhtk = compute(
        q_bthk.transpose(1, 2),
        k_bsgk.transpose(1, 2),
        v_bsgk.transpose(1, 2),
        score_mod=score_mod,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=q_bthk.size(2) != k_bsgk.size(2),
    )
    return out_bhtk.transpose(1, 2)


FLEX_RECOMPILE_LIMIT = 64
"""Shapes that FlexAttention may be compiled for.

torch compiles a kernel of its own for every size of 1, and one more for each size that has changed: of rows, queries,
keys or blocks, with and without a gradient. A run with `auto` microbatches, an evaluation and decoding reached 9."""


@functools.cache
def compile_to_one_operation(function: Callable) -> Callable:
    """Compile a function to one operation of the surrounding graph, whose result selective checkpointing can keep.

    Releases of torch without that option recompute the function in the backward pass.

    `fullgraph` makes it an error to reach torch's limit of recompilations. Without it torch would then run the function
    eagerly without a word, with all scores in memory.
    """
    option = "wrap_inductor_compiled_regions"
    options: Any = {option: True} if hasattr(inductor_config, option) else None
    return torch.compile(function, fullgraph=True, options=options)


@functools.cache
def raise_recompile_limit() -> None:
    """Raise torch's limit of recompilations to `FLEX_RECOMPILE_LIMIT`, once in a process.

    `build_mask` calls this, and not `attend_by_blocks`, which is traced as part of a compiled block: the block would be
    compiled again whenever the limit has changed.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, FLEX_RECOMPILE_LIMIT)


def _alibi_score_mod(slopes_h: Tensor, num_past: int) -> Callable:
    """Return the `score_mod` that subtracts ALiBi's bias. The first query stands at position `num_past`."""

    def subtract_bias(score, b, h, t, s):
        return score - slopes_h[h] * (t + num_past - s)

    return subtract_bias


# --------------------------------------------------------------------------------------------- which blocks to compute

FLEX_BLOCK = 128
"""Queries or keys in a block (torch's default)."""


@functools.lru_cache(maxsize=16)
def causal_block_mask(window: int, num_past: int, num_queries: int, num_keys: int, device: torch.device) -> BlockMask:
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


def document_block_mask(documents_bs: Tensor, window: int, num_queries: int) -> BlockMask:
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
    """Find the blocks of scores that a causal mask with an optional sliding window leaves visible.

    t counts blocks of queries, s blocks of keys. Returns two bool tensors [1, t, s]: whether some query of block t sees
    some key of block s, so that the block is computed, and whether every query sees every key, so that it is full.

    A query sees a key at a distance of 0 to `window` positions before it. Within a block, the distance is smallest
    between the first query and the last key, and largest between the last query and the first key. A block that the end
    of the row cuts short never counts as full, as in torch's create_block_mask.
    """
    q_first_t, q_last_t = _ends_of_blocks(num_queries, device)
    k_first_s, k_last_s = _ends_of_blocks(num_keys, device)
    num_past = num_keys - num_queries
    smallest_distance_ts = q_first_t[:, None] + num_past - k_last_s
    largest_distance_ts = q_last_t[:, None] + num_past - k_first_s

    # Some query sees some key if the largest distance is not in the future, and the smallest is not beyond the window.
    is_computed_ts = largest_distance_ts >= 0
    is_full_ts = smallest_distance_ts >= 0
    if window >= 0:
        is_computed_ts = is_computed_ts & (smallest_distance_ts <= window)
        is_full_ts = is_full_ts & (largest_distance_ts <= window)

    has_all_queries_t = q_last_t - q_first_t == FLEX_BLOCK - 1
    has_all_keys_s = k_last_s - k_first_s == FLEX_BLOCK - 1
    is_full_ts = is_full_ts & has_all_queries_t[:, None] & has_all_keys_s
    return is_computed_ts[None], is_full_ts[None]


def _ends_of_blocks(num_tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the first and the last position of each block; the last block may be short."""
    first = torch.arange(0, num_tokens, FLEX_BLOCK, device=device)
    last = (first + FLEX_BLOCK - 1).clamp(max=num_tokens - 1)
    return first, last


def _build_block_mask(
    is_computed_bts: Tensor, is_full_bts: Tensor, mask_mod: Callable, num_queries: int, num_keys: int
) -> BlockMask:
    """Build FlexAttention's mask from the blocks of scores that are computed, and from those of them that are full.

    is_computed_bts: for sample b, whether some query of block t sees some key of block s.
    is_full_bts: whether every query of block t sees every key of block s, so that `mask_mod` need not be asked.
    """
    partial_counts_b1t, partial_indices_b1ts = _count_and_sort_blocks(is_computed_bts & ~is_full_bts)
    full_counts_b1t, full_indices_b1ts = _count_and_sort_blocks(is_full_bts)
    return BlockMask.from_kv_blocks(
        partial_counts_b1t,
        partial_indices_b1ts,
        full_counts_b1t,
        full_indices_b1ts,
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(num_queries, num_keys),
    )


def _count_and_sort_blocks(is_wanted_bts: Tensor) -> tuple[Tensor, Tensor]:
    """Describe some blocks of scores as FlexAttention takes them. t counts blocks of queries, s blocks of keys.

    Returns, for each block of queries, how many blocks of keys are wanted (int32, [b, 1, t]), and the indices of all
    blocks of keys with the wanted ones first, in order (int32, [b, 1, t, s]). The dimension of 1 is that of heads.
    """
    is_wanted_b1ts = is_wanted_bts[:, None].int()
    counts_b1t = is_wanted_b1ts.sum(-1, dtype=torch.int32)
    indices_b1ts = is_wanted_b1ts.argsort(dim=-1, descending=True, stable=True).int()  # stable keeps them in order
    return counts_b1t, indices_b1ts
