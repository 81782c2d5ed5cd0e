"""Lines of a dry run on a division: the tokens and the blocks of each rank, and groups across nodes. No torch."""

from llmfoundry_layouts.pieces import count_pieces, pieces_of
from llmfoundry_layouts.stage_memory import estimate_stages
from llmfoundry_layouts.stages import describe_stages
from llmfoundry_lite.config.layout import Layout
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.hardware import format_bytes
from llmfoundry_lite.preflight import MAX_LISTED


def _describe_parts(config: TrainConfig, layout: Layout) -> list[str]:
    """List the tokens of a sample that each rank of a context group has. If there are many, list the first and last."""
    context = config.context
    if layout.context == 1:
        return []
    num_heads, size = config.model.n_heads // layout.tensor, config.max_seq_len // count_pieces(context)
    has = f"{num_heads // layout.context} of {num_heads} heads of all tokens"
    if context.kind == "gather":
        has = "the keys and values of all tokens, gathered"
    lines = [f"in attention each rank has {has}"]
    for number, rank in enumerate(layout.group(0, "context")):
        if number < MAX_LISTED - 1 or number == layout.context - 1:
            spans = [f"{piece * size}-{(piece + 1) * size - 1}" for piece in pieces_of(context, number)]
            lines.append(f"rank {rank}: tokens {' and '.join(spans)} of each sample")
    return lines


def _describe_stages(config: TrainConfig, layout: Layout) -> list[str]:
    """List each stage of a pipeline with its devices, part of the model and memory. If there are many, list the ends
    and the fullest one."""
    if layout.pipeline == 1:
        return []
    num_devices, parts = layout.world_size // layout.pipeline, estimate_stages(config, layout)
    fullest = max(range(len(parts)), key=lambda rank: parts[rank][1].total_bytes)
    lines = [config.pipeline.schedule]
    for rank, (stages, estimate) in enumerate(parts):
        if len(parts) <= MAX_LISTED or rank in (0, fullest, len(parts) - 1):
            first, last = rank * num_devices, (rank + 1) * num_devices - 1
            ranks = f"ranks {first}-{last}" if num_devices > 1 else f"rank {rank}"
            word = "the fullest: " if rank == fullest else ""
            lines.append(
                f"{ranks}: {describe_stages(stages)}; {word}about {format_bytes(estimate.total_bytes)} per device"
            )
    return lines


def _describe_slow_groups(config: TrainConfig, layout: Layout) -> list[str]:
    """Warn of groups that span nodes and exchange in every block. `llmfoundry-lite plan` tells the cost."""
    lines, context, tensor = list[str](), layout.context, layout.tensor
    slow = f"devices span nodes of {layout.node_size}: every block exchanges over the network"
    if layout.spans_nodes("context"):
        among = f"{context} x {tensor} (tp_config)" if tensor > 1 else str(context)
        stays = f"a group whose size divides {layout.node_size} stays in a node"
        lines.append(f"cp_config.context_parallel_degree: groups of {among} {slow}; {stays}")
    if layout.spans_nodes("tensor"):
        stays = f"a degree that divides {layout.node_size} stays in a node"
        lines.append(f"tp_config.tensor_parallel_degree: groups of {tensor} {slow}; {stays}")
    return lines


DESCRIPTIONS = {"samples": _describe_parts, "stages": _describe_stages, "warning": _describe_slow_groups}
"""Heading of a dry run's lines -> a function of (config, layout) that returns them."""
