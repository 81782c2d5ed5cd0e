"""Stages of a pipeline: the blocks of each, and the device that holds it. Arithmetic, without torch.

Blocks stay in order. A stage is one run of them; interleaved schedules give each device several.
"""

from dataclasses import dataclass

from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.schema import PipelineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    index: int
    """Place in the model, from 0."""
    num_stages: int
    blocks: range

    @property
    def is_first(self) -> bool:
        """Has the embeddings."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Has the last norm, the head and the loss."""
        return self.index == self.num_stages - 1


def stages_of(model: ModelConfig, pipeline: PipelineConfig) -> list[list[Stage]]:
    """Return for each rank of a pipeline its stages, in the model's order.

    Rank r of p has the stages r, r + p, ...; with zbv r and 2p - 1 - r, so that the first and the last meet.
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


def takes_microbatches(pipeline: PipelineConfig, count: int) -> bool:
    """Return whether the schedule runs with `count` microbatches: at least one for each stage, in equal rounds."""
    degree = pipeline.pipeline_parallel_degree
    if pipeline.schedule == "gpipe":
        return count >= 1
    has_rounds = pipeline.schedule in ("interleaved", "zero_bubble")
    return count >= degree and not (has_rounds and count % (count // degree))


def divide_blocks(model: ModelConfig, num_stages: int) -> list[int]:
    """Return the number of blocks of each stage, at least one, so that the costliest stage costs least.

    Costs are parameters: the embedding is the first stage's and the head the last one's, whether or not they are one
    matrix. Among equals the later stage gets more, since the earlier ones keep more microbatches' activations.
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
    """Return the parameters of a block's matrices, and of the head."""
    d = model.d_model
    attention = 2 * d * (model.q_dim + model.kv_dim)
    feed_forward = d * model.ffn_dim * (3 if model.ffn_config.ffn_type == "mptglu" else 2)
    return attention + feed_forward, model.vocab_size * d
