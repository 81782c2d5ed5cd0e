"""Who writes what of a save, and where in which file it lies: DCP's plan, agreed on as JSON, and the layout it implies.

Every rank computes the plans of all ranks from the same exchange, and thus every file's layout; nothing is sent back.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from llmfoundry_lite.checkpoint import exchange
from llmfoundry_lite.checkpoint.exchange import Group
from llmfoundry_lite.checkpoint.manifest import ITEM_BYTES, Slice, TensorRecord
from llmfoundry_lite.checkpoint.shards import Entry, build_header, file_order
from llmfoundry_lite.checkpoint.state import DTYPE_NAMES, DTYPES, Tensors
from llmfoundry_lite.errors import CheckpointError


class Box(NamedTuple):
    """What a rank writes of a tensor. This, as JSON, is what ranks tell each other of their plans."""

    name: str
    is_shard: bool
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def entry(self) -> Entry:
        num_bytes = math.prod(self.lengths) * ITEM_BYTES[self.dtype]
        return Entry(f"{self.name}@{','.join(map(str, self.offset))}", self.dtype, self.lengths, num_bytes)


class StagedPlanner(DefaultSavePlanner):
    """DCP's plan for a save, without empty slices, resolving to the staged copies instead of the live tensors."""

    def __init__(self, tensors: Tensors, is_coordinator: bool):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.set_up_planner(tensors, None, is_coordinator)
        self.staged: dict[str, torch.Tensor] = {}
        """By key in the file."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return replace(plan, items=[item for item in plan.items if math.prod(box_of(item).lengths)])

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self.staged[box_of(write_item).entry.key]


def agree_on_plans(planner: StagedPlanner, group: Group) -> list[list[Box]]:
    """What each rank writes. Every rank computes this for all, from the same plans, so nothing need be sent back."""
    mine = [box_of(item) for item in planner.create_local_plan().items]
    plans = [
        SavePlan([_write_item(Box(*_tuples(box))) for box in boxes]) for boxes in exchange.gather_json(mine, group)
    ]
    final, _ = planner.create_global_plan(plans)
    planner.finish_plan(final[exchange.rank_and_size(group)[0]])
    return [[box_of(item) for item in plan.items] for plan in final]


def box_of(item: WriteItem) -> Box:
    data = item.tensor_data
    if data is None:
        raise CheckpointError(f"{item.index.fqn}: not a tensor; numbers belong into the manifest")
    dtype = DTYPE_NAMES.get(data.properties.dtype)
    if dtype is None:
        raise CheckpointError(f"{item.index.fqn}: {data.properties.dtype} has no name in safetensors")
    is_shard = item.type == WriteItemType.SHARD
    return Box(item.index.fqn, is_shard, dtype, tuple(data.size), tuple(data.chunk.offsets), tuple(data.chunk.sizes))


def _write_item(box: Box) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(box.name, box.offset),
        type=WriteItemType.SHARD if box.is_shard else WriteItemType.TENSOR,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.lengths)),
            properties=TensorProperties(dtype=DTYPES[box.dtype]),
            size=torch.Size(box.shape),
        ),
    )


def _tuples(box: Sequence[Any]) -> list[Any]:
    return [tuple(value) if isinstance(value, list) else value for value in box]


def file_name(rank: int) -> str:
    return f"shard-{rank:05d}.safetensors"


def layout(boxes: Sequence[Box], save_id: str) -> tuple[bytes, list[tuple[Box, int, int]]]:
    """A rank's file: its header, and where each box lies."""
    by_key = {box.entry.key: box for box in boxes}
    entries = file_order(box.entry for box in boxes)
    header, ranges = build_header(entries, {"save_id": save_id})
    return header, [(by_key[entry.key], *span) for entry, span in zip(entries, ranges, strict=True)]


def tensor_records(plans: Sequence[Sequence[Box]], save_id: str, tensors: Tensors) -> dict[str, TensorRecord]:
    slices: dict[str, list[Slice]] = {name: [] for name in tensors}
    for rank, boxes in enumerate(plans):
        for box, begin, end in layout(boxes, save_id)[1]:
            slices[box.name].append(Slice(rank, begin, end, box.offset, box.lengths))
    return {
        name: TensorRecord(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), tuple(slices[name]))
        for name, tensor in tensors.items()
    }
