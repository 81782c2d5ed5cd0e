"""Stages of a pipeline: which blocks each has, and which device holds it. Arithmetic, without torch.

Blocks stay in order. A stage is a run of consecutive ones; interleaved schedules give each device several stages.
"""

from dataclasses import dataclass

from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.sharding_schema import PipelineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    index: int
    """Place in the model, from 0."""
    num_stages: int
    blocks: range

    @property
    def is_first(self) -> bool:
        """Whether the stage has the embeddings."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage has the last norm, the head and the loss."""
        return self.index == self.num_stages - 1


def stages_of(model: ModelConfig, pipeline: PipelineConfig) -> list[list[Stage]]:
    """Return the stages of each rank of a pipeline, in the model's order.

    Rank r of p has stages r, r + p, ...; with zbv, r and 2p - 1 - r, so that one rank has the first and the last.
    """
    degree, num_stages = pipeline.pipeline_parallel_degree, pipeline.pipeline_parallel_degree * pipeline.num_runs
    end, stages = 0, []
    for index, count in enumerate(pipeline.blocks or divide_blocks(model, num_stages)):
        stages.append(Stage(index=index, num_stages=num_stages, blocks=range(end, end := end + count)))
    if pipeline.schedule == "zbv":
        return [[stages[rank], stages[-1 - rank]] for rank in range(degree)]
    return [stages[rank::degree] for rank in range(degree)]


def describe_stages(stages: list[Stage]) -> str:
    """Name the parts of the model that a rank holds."""
    held = ["embeddings"] if stages[0].is_first else []
    for blocks in (stage.blocks for stage in stages):
        held.append(f"blocks {blocks[0]}-{blocks[-1]}" if len(blocks) > 1 else f"block {blocks[0]}")
    return ", ".join([*held, "last norm, head and loss"] if stages[-1].is_last else held)


def divide_blocks(model: ModelConfig, num_stages: int) -> list[int]:
    """Return the number of blocks of each stage, at least one, such that the costliest stage is as cheap as possible.

    The cost is parameters. The first stage has the embedding and the last one the head, even if they are one matrix.
    Among equals the later stage gets more blocks, since earlier ones keep the activations of more microbatches.
    """
    block, head = block_and_head(model)
    costs, counts = [block] * num_stages, [1] * num_stages
    costs[0] += head
    costs[-1] += head
    for _ in range(model.n_layers - num_stages):
        cheapest = min(range(num_stages), key=lambda i: (costs[i], -i))
        costs[cheapest] += block
        counts[cheapest] += 1
    return counts


def block_and_head(model: ModelConfig) -> tuple[int, int]:
    """Return the number of parameters in a block's matrices, and in the head."""
    d = model.d_model
    attention = 2 * d * (model.q_dim + model.kv_dim)
    feed_forward = d * model.ffn_dim * (3 if model.ffn_config.ffn_type == "mptglu" else 2)
    return attention + feed_forward, model.vocab_size * d
