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
    """Build this rank's context. Every rank must call this together."""
    group = build_context_group(layout, device_type)
    return Context(config=config, group=group, rank=dist.get_rank(group))


def build_context_group(layout: Layout, device_type: str) -> dist.ProcessGroup:
    """Make the group of ranks that have parts of the same samples. Every rank must call this together."""
    inner = layout.tensor
    shape = (layout.world_size // (layout.context * inner), layout.context, inner)
    return make_mesh(device_type, shape, ("outer", "context", "inner")).get_group("context")


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The ranks that divide each sample, and this rank's place among them."""

    config: ContextParallelConfig
    group: dist.ProcessGroup
    rank: int

    @property
    def size(self) -> int:
        return self.config.context_parallel_degree

    @property
    def pieces(self) -> list[int]:
        return pieces_of(self.config, self.rank)

    def part(self, x_bs: Tensor) -> Tensor:
        """Return this rank's tokens of whole rows: [b, t]."""
        pieces = x_bs.chunk(count_pieces(self.config), dim=1)
        return torch.cat([pieces[number] for number in self.pieces], dim=1)

    def options(self, num_tokens: int, device: torch.device) -> dict[str, Any]:
        """Return options of the model's forward pass for this rank's part of rows of `num_tokens` tokens."""
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
        """Build the attention mask of this rank's tokens. `documents_bs` has the documents of whole rows."""
        if self.config.kind == "heads":
            num_keys = num_tokens * self.size
            slopes_h = None if slopes_h is None else slopes_h.chunk(self.size)[self.rank]
            positions_1s = torch.arange(num_keys, device=positions_1t.device)[None]
            mask = build_mask(options, implementation, slopes_h, positions_1s, num_keys, None, documents_bs)
            return HeadsMask(context=self, **{field.name: getattr(mask, field.name) for field in fields(mask)})
        pieces = {}
        for number, piece_1t in zip(self.pieces, positions_1t.chunk(2, dim=1), strict=True):
            num_keys = (number + 1) * piece_1t.size(1)  # the piece's last query sees no later key
            documents = None if documents_bs is None else documents_bs[:, :num_keys]
            pieces[num_keys] = build_mask(options, implementation, slopes_h, piece_1t, num_keys, None, documents)
        return GatheredMask(context=self, implementation=implementation, pieces=pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsMask(Mask):
    """The mask of whole rows for this rank's heads (Jacobs et al. 2023, "DeepSpeed Ulysses").

    Before attention, ranks exchange some tokens of all heads for all tokens of some heads; afterwards they exchange
    back. Attention in between is that of a model with fewer heads, so every implementation works.
    """

    context: Context

    def attend(
        self, q_bthk: Tensor, k_btgk: Tensor, v_btgk: Tensor, scale: float | None = None, dropout_p: float = 0.0
    ) -> Tensor:
        size, group = self.context.size, self.context.group.group_name
        # One all-to-all for all three tensors: the heads that go to one rank lie side by side.
        parts = [x.unflatten(2, (size, -1)).movedim(2, 0) for x in (q_bthk, k_btgk, v_btgk)]
        numbers_of_heads = [x_nbtHk.size(3) for x_nbtHk in parts]
        qkv_nbtHk = cast(Tensor, _Exchange.apply(torch.cat(parts, dim=3), group, size))
        qkv_bsHk = qkv_nbtHk.movedim(0, 1).flatten(1, 2)
        q_bshk, k_bsgk, v_bsgk = qkv_bsHk.split(numbers_of_heads, dim=2)
        out_bshk = Mask.attend(self, q_bshk, k_bsgk, v_bsgk, scale, dropout_p)
        out_nbthk = cast(Tensor, _Exchange.apply(out_bshk.unflatten(1, (size, -1)).movedim(1, 0), group, size))
        return out_nbthk.movedim(0, 2).flatten(2, 3)


def _exchange(x_n: Tensor, group: str, size: int) -> Tensor:
    """Exchange parts: part i of the first dimension goes to rank i.

    Waits for the result. torch's functional collectives return tensors that are still awaited. With one sample all
    three parts stay views of such a tensor, on which the compiler, and so FlexAttention, fails.
    """
    return collectives.wait_tensor(collectives.all_to_all_single(x_n.contiguous(), [1] * size, [1] * size, group))


_Exchange = make_autograd_function(_exchange, _exchange)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredMask(Mask):
    """The masks of this rank's two pieces of queries, each over the keys up to its end.

    Keys and values are gathered from all ranks. Their gradients are reduce-scattered.
    """

    context: Context
    pieces: dict[int, Mask]
    """Number of keys -> the mask of the queries that see that many."""

    def to(self, dtype: torch.dtype) -> "GatheredMask":
        return replace(self, pieces={num_keys: mask.to(dtype) for num_keys, mask in self.pieces.items()})

    def attend(
        self, q_bthk: Tensor, k_btgk: Tensor, v_btgk: Tensor, scale: float | None = None, dropout_p: float = 0.0
    ) -> Tensor:
        kv_btGk = torch.cat([k_btgk, v_btgk], dim=2)
        kv_nbtGk = _all_gather(kv_btGk[None], 0, self.context.group)
        early_nbcGk, late_nbcGk = kv_nbtGk.chunk(2, dim=2)
        in_order = [*early_nbcGk.unbind(), *reversed(late_nbcGk.unbind())]
        k_bsgk, v_bsgk = torch.cat(in_order, dim=1).chunk(2, dim=2)
        outputs = [
            mask.attend(q, k_bsgk[:, :keys], v_bsgk[:, :keys], scale, dropout_p)
            for (keys, mask), q in zip(self.pieces.items(), q_bthk.chunk(2, dim=1), strict=True)
        ]
        return torch.cat(outputs, dim=1)
