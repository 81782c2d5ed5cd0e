"""Context parallelism: each sample's tokens are divided among the ranks of a group.

Only attention needs other ranks' tokens. Positions, labels and documents are computed on whole rows.

Legend: b batch, t this rank's tokens, s all tokens, h heads, g heads of keys and values, k head dimension, n ranks.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from llmfoundry_layouts.pieces import count_pieces, pieces_of
from llmfoundry_layouts.tensor import collectives, make_autograd_function
from llmfoundry_lite.config.layout import Layout
from llmfoundry_lite.config.model_schema import AttentionConfig
from llmfoundry_lite.config.sharding_schema import ContextParallelConfig
from llmfoundry_lite.models.attention import Mask, build_mask
from llmfoundry_lite.parallel.mesh import make_mesh

# torch 2.13 renamed it and warns when the old name is used.
_all_gather: Any = getattr(functional, "all_gather_single_autograd", None) or functional.all_gather_tensor_autograd


def build_context(config: ContextParallelConfig, layout: Layout, device_type: str) -> "Context":
    """Build this rank's context. Collective: every rank of the launch calls this together."""
    group = build_context_group(layout, device_type)
    return Context(config=config, group=group, rank=dist.get_rank(group))


def build_context_group(layout: Layout, device_type: str) -> dist.ProcessGroup:
    """Build the group of ranks that divide the same samples. Collective: every rank of the launch calls this together.

    Ranks of one context group are as far apart as a tensor group is large, because tensor groups are neighbours.
    """
    num_outer = layout.world_size // (layout.context * layout.tensor)
    mesh = make_mesh(device_type, (num_outer, layout.context, layout.tensor), ("outer", "context", "inner"))
    return mesh.get_group("context")


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The ranks that divide the tokens of each sample, from the view of one of them."""

    config: ContextParallelConfig
    """The settings of `cp_config`."""
    group: dist.ProcessGroup
    """The ranks that divide the same samples."""
    rank: int
    """This rank's index in the group."""

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return self.config.context_parallel_degree

    @property
    def pieces(self) -> list[int]:
        """The indices of the pieces of each sample that this rank has."""
        return pieces_of(self.config, self.rank)

    def part(self, x_bs: Tensor) -> Tensor:
        """Return the tokens of this rank, [batch, tokens of this rank], out of whole samples, [batch, tokens]."""
        pieces = x_bs.chunk(count_pieces(self.config), dim=1)
        return torch.cat([pieces[index] for index in self.pieces], dim=1)

    def options(self, num_tokens: int, device: torch.device) -> dict[str, Any]:
        """Return the options with which the model's forward pass computes this rank's tokens.

        They are the positions of these tokens in whole samples, which have `num_tokens` each, and a function that
        builds the attention mask.
        """
        positions_1s = torch.arange(num_tokens, device=device)[None]
        return {"positions_bt": self.part(positions_1s), "build_mask": self.build_mask}

    def build_mask(
        self,
        options: AttentionConfig,
        implementation: str,
        slopes_h: Tensor | None,
        positions_1t: Tensor,
        num_tokens: int,
        attention_mask_bts: None = None,
        documents_bs: Tensor | None = None,
    ) -> Mask:
        """Build the attention mask of this rank's tokens, in place of `models.attention.build_mask`.

        slopes_h: ALiBi's slope of each head, or None without ALiBi.
        positions_1t: positions of this rank's tokens in the whole sample.
        num_tokens: number of this rank's tokens in each sample.
        documents_bs: for each token of whole samples, the number of its document.
        """
        if self.config.kind == "heads":
            num_keys = num_tokens * self.size
            positions_1s = torch.arange(num_keys, device=positions_1t.device)[None]
            if slopes_h is not None:
                slopes_h = slopes_h.chunk(self.size)[self.rank]
            mask = build_mask(options, implementation, slopes_h, positions_1s, num_keys, None, documents_bs)
            return HeadsMask(context=self, **{field.name: getattr(mask, field.name) for field in fields(mask)})

        # Each of the rank's two pieces has a mask of its own, over the keys up to the piece's end, because no query of
        # the piece sees a later key.
        masks: dict[int, Mask] = {}
        for index, piece_positions_1t in zip(self.pieces, positions_1t.chunk(2, dim=1), strict=True):
            num_keys = (index + 1) * piece_positions_1t.size(1)
            documents = None if documents_bs is None else documents_bs[:, :num_keys]
            masks[num_keys] = build_mask(
                options, implementation, slopes_h, piece_positions_1t, num_keys, None, documents
            )
        return GatheredMask(context=self, implementation=implementation, masks=masks)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsMask(Mask):
    """The mask of whole samples for the heads that this rank computes (Jacobs et al. 2023, "DeepSpeed Ulysses").

    Before attention, each rank sends some heads of its tokens to every other rank, and receives all tokens of its own
    heads. After attention the ranks exchange the outputs back. In between, attention is that of a model with fewer
    heads, so every implementation works.
    """

    context: Context
    """The ranks that exchange heads."""

    def attend(
        self, q_bthk: Tensor, k_btgk: Tensor, v_btgk: Tensor, scale: float | None = None, dropout_p: float = 0.0
    ) -> Tensor:
        """Return attention's output for this rank's tokens and all heads, [b, t, h, k]. Collective over the context.

        Dimensions: b batch, t tokens of this rank, s all tokens, h heads of queries, g heads of keys and values, k head
        dimension, n ranks, H the queries', keys' and values' heads of one rank together.
        """
        size = self.context.size
        group = self.context.group.group_name

        # One all-to-all serves all three tensors. For that, the heads that go to one rank are put side by side.
        qkv_by_rank = [x.unflatten(2, (size, -1)).movedim(2, 0) for x in (q_bthk, k_btgk, v_btgk)]
        num_heads = [x_nbtHk.size(3) for x_nbtHk in qkv_by_rank]
        qkv_nbtHk = cast(Tensor, _AllToAll.apply(torch.cat(qkv_by_rank, dim=3), group, size))
        qkv_bsHk = qkv_nbtHk.movedim(0, 1).flatten(1, 2)
        q_bshk, k_bsgk, v_bsgk = qkv_bsHk.split(num_heads, dim=2)

        out_bshk = Mask.attend(self, q_bshk, k_bsgk, v_bsgk, scale, dropout_p)

        out_by_rank = out_bshk.unflatten(1, (size, -1)).movedim(1, 0)
        out_nbthk = cast(Tensor, _AllToAll.apply(out_by_rank, group, size))
        return out_nbthk.movedim(0, 2).flatten(2, 3)


def _all_to_all(x_n: Tensor, group: str, size: int) -> Tensor:
    """Send index i of the first dimension to rank i of a group, and return what the ranks have sent to this one.

    The result has the shape of x_n, and is complete. torch's functional collectives return tensors that are still
    awaited. With one sample, queries, keys and values would stay views of such a tensor, on which the compiler, and so
    FlexAttention, fails.
    """
    sizes = [1] * size
    return collectives.wait_tensor(collectives.all_to_all_single(x_n.contiguous(), sizes, sizes, group))


_AllToAll = make_autograd_function(_all_to_all, _all_to_all)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredMask(Mask):
    """The masks of this rank's two pieces of queries, each over the keys up to its end.

    Keys and values are gathered from all ranks. Their gradients are reduce-scattered.
    """

    context: Context
    """The ranks that gather keys and values."""
    masks: dict[int, Mask]
    """Number of keys -> the mask of the queries that see these first keys, in the order of the pieces."""

    def to(self, dtype: torch.dtype) -> "GatheredMask":
        """Return the same masks with biases of this dtype."""
        return replace(self, masks={num_keys: mask.to(dtype) for num_keys, mask in self.masks.items()})

    def attend(
        self, q_bthk: Tensor, k_btgk: Tensor, v_btgk: Tensor, scale: float | None = None, dropout_p: float = 0.0
    ) -> Tensor:
        """Return attention's output for this rank's tokens, [b, t, h, k]. Collective over the context.

        Dimensions: b batch, t tokens of this rank, s all tokens, c tokens of a piece, h heads of queries, g heads of
        keys and values, k head dimension, n ranks, G the keys' and values' heads together.
        """
        kv_btGk = torch.cat([k_btgk, v_btgk], dim=2)
        kv_nbtGk = _all_gather(kv_btGk[None], 0, self.context.group)

        # Rank 0 has the first piece and the last, rank 1 the second and the last but one, and so on.
        early_nbcGk, late_nbcGk = kv_nbtGk.chunk(2, dim=2)
        pieces_in_order = [*early_nbcGk.unbind(), *reversed(late_nbcGk.unbind())]
        k_bsgk, v_bsgk = torch.cat(pieces_in_order, dim=1).chunk(2, dim=2)

        outputs: list[Tensor] = []
        for (num_keys, mask), q_bchk in zip(self.masks.items(), q_bthk.chunk(2, dim=1), strict=True):
            outputs.append(mask.attend(q_bchk, k_bsgk[:, :num_keys], v_bsgk[:, :num_keys], scale, dropout_p))
        return torch.cat(outputs, dim=1)
