"""Multi-head attention: masks, biases, and five implementations of the same mathematics.

`reference` is the definition, in fp32. The others compute the same faster:

- `sdpa`: PyTorch's `scaled_dot_product_attention`, which needs a bias of t*s numbers for anything but plain causal text
- `flex`: PyTorch's FlexAttention, which computes ALiBi, windows and documents without such a bias
  (`flex_attention.py`)
- `blocked`: matrix products over blocks of queries, for CPUs (`blocked_attention.py`)
- `flash`: the package flash-attn

A user may name a function of their own, which `add_implementation` adds.

`choose_implementation` decides which one a training run uses. In each forward pass `build_mask` builds one `Mask`, and
every block of the model calls its `attend`. Loss, parallelism and the projections around attention live elsewhere.

ALiBi's slopes and rotary positions are in `positions.py`.

Legend: b batch, t position of a query, s position of a key, h heads, g heads of keys and values, k head dimension.
"""

import importlib.util
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask

from llmfoundry_lite.config.model_schema import AttentionConfig, ModelConfig
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.models.blocked_attention import blocked_attention
from llmfoundry_lite.models.flex_attention import (
    attend_by_blocks,
    causal_block_mask,
    document_block_mask,
    raise_recompile_limit,
)
from llmfoundry_lite.models.own_parts import check_output
from llmfoundry_lite.own_code import import_object, is_own

# ------------------------------------------------------------------------------------------- which implementation

MAX_FLASH_HEAD_DIM = 256
"""The widest head that flash-attn's kernels support, according to its README."""


def choose_implementation(model: ModelConfig, device_type: str, precision: torch.dtype) -> tuple[str, str]:
    """Choose the implementation of attention for training on a device.

    Returns its name, such as "flex", and the reason in words for the user. It is the one that `attn_impl` names, or the
    fastest one for `auto`. `flash` means `auto` where flash-attn is not installed, because LLM Foundry's files name it
    throughout. `precision` is the dtype of matrix products.

    Raises ConfigError for an implementation that cannot train on this device. `config.check` has refused those that
    cannot train this model on any device.
    """
    requested = model.attn_config.attn_impl
    if is_own(requested):
        return requested, "your own"
    is_16_bit = precision in (torch.bfloat16, torch.float16)
    can_use_flash = (
        device_type == "cuda"
        and is_16_bit
        and model.head_dim <= MAX_FLASH_HEAD_DIM
        and importlib.util.find_spec("flash_attn") is not None
    )

    # The user has asked for one.
    if requested == "torch":
        return "sdpa", "LLM Foundry's torch"
    if requested == "flash" and can_use_flash:
        return "flash", "asked for"
    if requested == "flex" and device_type != "cuda":
        raise ConfigError(
            f"model.attn_config.attn_impl: flex cannot be used for training on a {device_type}; use auto or sdpa"
        )
    if requested not in ("auto", "flash"):
        return requested, "asked for"

    # Otherwise take the fastest one that can compute this model here.
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
    """Keys that queries may attend to, and the bias of their scores, in the form that one implementation takes.

    Fields that `implementation` has no use for keep their defaults.
    """

    implementation: str
    """reference, sdpa, blocked, flex or flash, or the import path of the user's own function."""
    bias_bhts: Tensor | None = None
    """reference, sdpa, blocked, own: added to the scores, -inf where masked; b and h may be 1. None: causal, without a
    bias."""
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
    is_training: bool = False
    """own: whether the model is training, for functions that do something else then."""

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
    takes_any_bias = implementation == "reference" or is_own(implementation)
    if not takes_any_bias and (attention_mask_bts is not None or is_blocked_decoding):
        implementation = "sdpa"

    if implementation == "flex":
        raise_recompile_limit()
        if documents_bs is None:
            block_mask = causal_block_mask(window, num_keys - num_queries, num_queries, num_keys, positions_bt.device)
        else:
            block_mask = document_block_mask(documents_bs, window, num_queries)
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

    # The others compute plain causal attention without a bias, sdpa also while decoding on a GPU. Everything else is
    # put into one.
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
    """Compute what is added to the scores of attention: ALiBi's bias, and -inf where a query must not see a key.

    Returns [b, h, t, s], where b and h may be 1. A query sees the keys at or before its own position, or those that
    `attention_mask_bts` (bool) names; of these, those that are at most `window` positions before it, unless `window`
    is below 0; and of these, those with the same document number in `documents_bs`. `slopes_h` are ALiBi's, or None.
    The queries are the last of the `num_keys` keys, at `positions_bt`.
    """
    # Without an explicit mask, keys stand at positions 0, 1, ..., and attention is causal.
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
    """Compute attention by its definition, softmax(q k^T * scale + bias) v, in fp32 and with all scores in memory.

    It is what tests compare the other implementations with. The arguments and the result [b, t, h, k] are those of
    `Mask.attend`.
    """
    scale = scale or 1.0 / math.sqrt(q_bthk.size(-1))
    num_sharing = q_bthk.size(2) // k_bsgk.size(2)  # heads of queries for each head of keys and values
    k_bshk = k_bsgk.repeat_interleave(num_sharing, dim=2).float()
    v_bshk = v_bsgk.repeat_interleave(num_sharing, dim=2).float()

    scores_bhts = torch.einsum("bthk,bshk->bhts", q_bthk.float(), k_bshk) * scale
    if mask.bias_bhts is None:  # causal
        is_hidden_ts = torch.ones_like(scores_bhts[0, 0], dtype=torch.bool).triu(1)
        scores_bhts = scores_bhts.masked_fill(is_hidden_ts, float("-inf"))
    else:
        scores_bhts = scores_bhts + mask.bias_bhts
    weights_bhts = F.dropout(scores_bhts.softmax(dim=-1), dropout_p)
    return torch.einsum("bhts,bshk->bthk", weights_bhts, v_bshk).to(q_bthk.dtype)


def _attend_sdpa(
    q_bthk: Tensor, k_bsgk: Tensor, v_bsgk: Tensor, mask: Mask, scale: float | None, dropout_p: float
) -> Tensor:
    """Compute attention by PyTorch's `scaled_dot_product_attention`, which chooses the fastest kernel it has.

    The arguments and the result [b, t, h, k] are those of `Mask.attend`. PyTorch takes heads before positions.
    """
    q_bhtk = q_bthk.transpose(1, 2)
    k_bgsk = k_bsgk.transpose(1, 2)
    v_bgsk = v_bsgk.transpose(1, 2)
    if mask.is_lower_right_causal:  # decoding: fewer queries than keys
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
    """Compute causal attention for queries that stand at the positions of the last keys, as in decoding.

    With 2 queries and 5 keys, the first query sees 4 keys and the second one all 5. Returns [b, h, t, k].

    `scaled_dot_product_attention` aligns its causal mask to the upper left corner, where the first query sees one key.
    The kernels behind it can align it to the lower right one, so this calls the first kernel that supports these
    tensors. `torch.nn.attention.bias` has `CausalBias` for the same purpose, but its objects do not survive a dispatch
    mode.
    """
    num_queries, num_keys = q_bhtk.size(2), k_bgsk.size(2)
    num_sharing = q_bhtk.size(1) // k_bgsk.size(1)  # heads of queries for each head of keys and values

    # The flash kernel, which takes fewer heads of keys and values than of queries.
    flash_params = SDPAParams(q_bhtk, k_bgsk, v_bgsk, None, dropout_p, False, num_sharing > 1)
    is_multiple_of_8 = q_bhtk.size(-1) % 8 == 0  # the operation asks for it; only sdpa pads other widths
    if is_multiple_of_8 and can_use_flash_attention(flash_params):
        flash_attention: Any = torch.ops.aten._scaled_dot_product_flash_attention
        return flash_attention(q_bhtk, k_bgsk, v_bgsk, dropout_p, True, scale=scale)[0]

    # The memory-efficient kernel. It and the one after it take as many heads of keys and values as of queries.
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

    # Any other kernel, with a mask in memory.
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
    """Compute attention by FlexAttention (`flex_attention.py`)."""
    assert not dropout_p, "refused when the configuration is checked"
    return attend_by_blocks(q_bthk, k_bsgk, v_bsgk, mask.slopes_h, mask.block_mask, scale)


def _attend_flash(
    q_bthk: Tensor, k_bsgk: Tensor, v_bsgk: Tensor, mask: Mask, scale: float | None, dropout_p: float
) -> Tensor:
    """Compute attention by the package flash-attn, which needs no bias in memory for ALiBi, windows and documents.

    The arguments and the result [b, t, h, k] are those of `Mask.attend`. If tokens attend to their own documents only,
    the rows of the batch are joined, and each document is passed as a sequence of its own.
    """
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

    out_nhk = flash_attn_varlen_func(  # n tokens of all rows
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


IMPLEMENTATIONS: dict[str, Callable[..., Tensor]] = {
    "reference": _attend_reference,
    "sdpa": _attend_sdpa,
    "blocked": _attend_blocked,
    "flex": _attend_flex,
    "flash": _attend_flash,
}

# ------------------------------------------------------------------------------------ a function of the user's own


class OwnAttention(Protocol):
    """A function of the user's own, with the arguments with which LLM Foundry calls its implementations."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        n_heads: int,
        kv_n_heads: int,
        past_key_value: None,
        softmax_scale: float,
        attn_bias: Tensor | None,
        key_padding_mask: None,
        is_causal: bool,
        dropout_p: float,
        training: bool,
        needs_weights: bool,
    ) -> Any:
        """Compute attention. Returns [b, t, h*k] in the dtype of `query`, or a tuple that begins with it.

        query: [b, t, h*k], and `key` and `value` [b, s, g*k], which have the keys of a cache already.
        attn_bias: [b, h, t, s], where b and h may be 1, added to the scores; -inf where a query must not see a key.
        is_causal: whether there is no bias and a query sees the keys at or before it; t and s are equal then.
        """


def add_implementation(name: str) -> None:
    """Add the user's own function to IMPLEMENTATIONS, under its import path `name`.

    Raises ConfigError if the function cannot be imported, or its code is not trusted.
    """
    with torch.device("cpu"):  # the model may be built on the meta device, where the module's tensors have no values
        function: OwnAttention = import_object(name, "model.attn_config.attn_impl")
    IMPLEMENTATIONS[name] = partial(_attend_own, function, name)


def _attend_own(
    function: OwnAttention,
    name: str,
    q_bthk: Tensor,
    k_bsgk: Tensor,
    v_bsgk: Tensor,
    mask: Mask,
    scale: float | None,
    dropout_p: float,
) -> Tensor:
    """Compute attention by the user's own function, whose import path is `name`.

    The other arguments and the result are those of `Mask.attend`. Raises ConfigError if the function returns another
    shape or dtype than that of its queries.
    """
    query_btd = q_bthk.flatten(-2)
    found = function(
        query_btd,
        k_bsgk.flatten(-2),
        v_bsgk.flatten(-2),
        n_heads=q_bthk.size(2),
        kv_n_heads=k_bsgk.size(2),
        past_key_value=None,
        softmax_scale=scale or 1.0 / math.sqrt(q_bthk.size(-1)),
        attn_bias=mask.bias_bhts,
        key_padding_mask=None,
        is_causal=mask.bias_bhts is None,
        dropout_p=dropout_p,
        training=mask.is_training,
        needs_weights=False,
    )
    out_btd = found[0] if isinstance(found, tuple) else found
    check_output(out_btd, query_btd, name, "model.attn_config.attn_impl")
    return out_btd.unflatten(-1, q_bthk.shape[2:])


# ------------------------------------------------------------------------------------------- flash-attn: documents


@dataclass(frozen=True, slots=True)
class DocumentBounds:
    """Where documents begin in a batch whose rows are joined to one sequence, as flash-attn takes it."""

    starts_n: Tensor
    """int32: where each document begins, and where the last one ends (`cu_seqlens`)."""
    max_length: int
    """Tokens of the longest document."""


def _find_document_bounds(documents_bs: Tensor, num_queries: int) -> tuple[DocumentBounds, DocumentBounds]:
    """Find where documents begin in a batch whose rows are joined, among its queries and among its keys.

    `documents_bs` numbers the document of each key. The queries are the last `num_queries` tokens of each row. Returns
    the bounds among the queries, and among the keys. Both list the same documents in the same order; a document that
    ends before the first query has no queries, and a length of 0 there.

    For example, the row 0, 0, 0, 1, 1 with 3 queries has keys from 0, 3 to 5, and queries from 0, 1 to 3.
    """
    num_keys = documents_bs.size(1)
    is_key_bs = torch.ones_like(documents_bs, dtype=torch.bool)
    is_query_s = torch.arange(num_keys, device=documents_bs.device) >= num_keys - num_queries

    begins_document_bs = torch.ones_like(is_key_bs)  # at the first token of each row in any case
    begins_document_bs[:, 1:] = documents_bs[:, 1:] != documents_bs[:, :-1]
    first_tokens_n = begins_document_bs.flatten().nonzero().flatten()  # of each of n documents, in the joined rows

    def bounds_among(is_counted_bs: Tensor) -> DocumentBounds:
        """Count the tokens of one kind, queries or keys, before the first token of each document."""
        num_before = F.pad(is_counted_bs.flatten().cumsum(0), (1, 0))  # of each token, and of the end
        starts_n = torch.cat([num_before[first_tokens_n], num_before[-1:]]).int()
        return DocumentBounds(starts_n, int(starts_n.diff().max()))

    return bounds_among(is_query_s.expand_as(documents_bs)), bounds_among(is_key_bs)
