"""Lines of a dry run on a division: the tokens and the blocks of each rank, and groups across nodes. No torch."""

from llmfoundry_layouts.pieces import count_pieces, pieces_of
from llmfoundry_layouts.stage_memory import estimate_stages
from llmfoundry_layouts.stages import describe_stages
from llmfoundry_lite.config.layout import Layout
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.dry_run import MAX_LISTED
from llmfoundry_lite.hardware import format_bytes


def _describe_context(config: TrainConfig, layout: Layout) -> list[str]:
    """Describe context parallelism: what a rank has in attention, and which tokens of each sample each rank has.

    If a context group has many ranks, only the first ones and the last are listed. Returns no lines without cp_config.
    """
    context = config.context
    if layout.context == 1:
        return []

    num_heads = config.model.n_heads // layout.tensor
    in_attention = f"{num_heads // layout.context} of {num_heads} heads of all tokens"
    if context.kind == "gather":
        in_attention = "the keys and values of all tokens, gathered"
    lines = [f"in attention each rank has {in_attention}"]

    piece_len = config.max_seq_len // count_pieces(context)
    for index, rank in enumerate(layout.group(0, "context")):
        is_listed = index < MAX_LISTED - 1 or index == layout.context - 1
        if is_listed:
            spans = [f"{piece * piece_len}-{(piece + 1) * piece_len - 1}" for piece in pieces_of(context, index)]
            lines.append(f"rank {rank}: tokens {' and '.join(spans)} of each sample")
    return lines


def _describe_pipeline(config: TrainConfig, layout: Layout) -> list[str]:
    """Describe pipeline parallelism: the schedule, and the devices, part of the model and memory of each rank.

    If there are many ranks, only the first, the last and the one that needs the most memory are listed. Returns no
    lines without pp_config.
    """
    if layout.pipeline == 1:
        return []

    num_devices = layout.world_size // layout.pipeline
    ranks = estimate_stages(config, layout)
    fullest = max(range(len(ranks)), key=lambda index: ranks[index][1].total_bytes)
    lines = [config.pipeline.schedule]
    for index, (stages, estimate) in enumerate(ranks):
        is_listed = len(ranks) <= MAX_LISTED or index in (0, fullest, len(ranks) - 1)
        if not is_listed:
            continue

        devices = f"rank {index}"
        if num_devices > 1:
            devices = f"ranks {index * num_devices}-{(index + 1) * num_devices - 1}"
        memory = f"about {format_bytes(estimate.total_bytes)} per device"
        if index == fullest:
            memory = f"the fullest: {memory}"
        lines.append(f"{devices}: {describe_stages(stages)}; {memory}")
    return lines


def _warn_of_slow_groups(config: TrainConfig, layout: Layout) -> list[str]:
    """Warn of context and tensor groups with devices in several nodes, because they exchange in every block.

    `llmfoundry-lite plan` estimates how much time that costs.
    """
    lines: list[str] = []
    problem = f"devices span nodes of {layout.node_size}: every block exchanges over the network"
    if layout.spans_nodes("context"):
        size = str(layout.context)
        if layout.tensor > 1:
            size = f"{layout.context} x {layout.tensor} (tp_config)"
        remedy = f"a group whose size divides {layout.node_size} stays in a node"
        lines.append(f"cp_config.context_parallel_degree: groups of {size} {problem}; {remedy}")
    if layout.spans_nodes("tensor"):
        remedy = f"a degree that divides {layout.node_size} stays in a node"
        lines.append(f"tp_config.tensor_parallel_degree: groups of {layout.tensor} {problem}; {remedy}")
    return lines


DESCRIPTIONS = {"samples": _describe_context, "stages": _describe_pipeline, "warning": _warn_of_slow_groups}
"""Heading of a dry run's lines -> a function of (config, layout) that returns them."""
