"""Stages of a pipeline: which blocks each has, and which rank holds it. Arithmetic, without torch.

A stage is a series of consecutive blocks, and the stages follow each other in the model's order. Schedules with virtual
stages give several of them to each rank.
"""

from dataclasses import dataclass

from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.sharding_schema import PipelineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Consecutive blocks of the model that one rank of a pipeline computes."""

    index: int
    """Position among the model's stages, from 0."""
    num_stages: int
    """Number of stages of the whole model."""
    blocks: range
    """Indices of the stage's blocks in the model."""

    @property
    def is_first(self) -> bool:
        """Whether the stage has the embeddings."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage has the last norm, the head and the loss."""
        return self.index == self.num_stages - 1


def assign_stages(model: ModelConfig, pipeline: PipelineConfig) -> list[list[Stage]]:
    """Divide a model's blocks into stages, and assign the stages to the ranks of a pipeline.

    The number of blocks in each stage is that of `pp_config.blocks`, or of `divide_blocks` if the key is not set.

    Of p ranks, rank r gets the stages r, r + p, r + 2p, and so on. With the schedule zbv it gets the stages r and
    2p - 1 - r, so that rank 0 has both the first stage and the last.

    Returns a list for each rank, which holds its stages in the model's order.
    """
    num_ranks = pipeline.pipeline_parallel_degree
    num_stages = num_ranks * pipeline.num_runs
    num_blocks_per_stage = pipeline.blocks or divide_blocks(model, num_stages)

    stages: list[Stage] = []
    first_block = 0
    for index, num_blocks in enumerate(num_blocks_per_stage):
        blocks = range(first_block, first_block + num_blocks)
        stages.append(Stage(index=index, num_stages=num_stages, blocks=blocks))
        first_block += num_blocks

    if pipeline.schedule == "zbv":
        return [[stages[rank], stages[-1 - rank]] for rank in range(num_ranks)]
    return [stages[rank::num_ranks] for rank in range(num_ranks)]


def describe_stages(stages: list[Stage]) -> str:
    """Name the parts of the model in one rank's stages, such as "embeddings, blocks 0-7" or "block 8, block 12"."""
    parts: list[str] = []
    if stages[0].is_first:
        parts.append("embeddings")

    for stage in stages:
        first_block = stage.blocks[0]
        last_block = stage.blocks[-1]
        if first_block == last_block:
            parts.append(f"block {first_block}")
        else:
            parts.append(f"blocks {first_block}-{last_block}")

    if stages[-1].is_last:
        parts.append("last norm, head and loss")
    return ", ".join(parts)


def divide_blocks(model: ModelConfig, num_stages: int) -> list[int]:
    """Choose how many blocks each stage gets, at least one, so that the most expensive stage is as cheap as possible.

    The cost of a stage is the number of its parameters. The embedding counts in the first stage and the head in the
    last, also if they are tied. If two stages are equally cheap, the later one gets the next block, because earlier
    stages keep the activations of more microbatches.

    Returns the number of blocks of each stage. The model must have at least one block for each.
    """
    block_cost, head_cost = count_block_and_head_parameters(model)
    counts = [1] * num_stages
    costs = [block_cost] * num_stages
    costs[0] += head_cost
    costs[-1] += head_cost

    for _ in range(model.n_layers - num_stages):
        cheapest = min(range(num_stages), key=lambda index: (costs[index], -index))
        counts[cheapest] += 1
        costs[cheapest] += block_cost
    return counts


def count_block_and_head_parameters(model: ModelConfig) -> tuple[int, int]:
    """Return the number of parameters in one block's matrices, and in the output head, without norms and biases."""
    # The projections to queries and from the heads have q_dim, those to keys and values kv_dim.
    num_in_attention = 2 * model.d_model * (model.q_dim + model.kv_dim)

    # A gated feed-forward layer (mptglu) has three matrices: gate, up and down.
    num_matrices = 3 if model.ffn_config.ffn_type == "mptglu" else 2
    num_in_feed_forward = num_matrices * model.d_model * model.ffn_dim

    return num_in_attention + num_in_feed_forward, model.vocab_size * model.d_model
