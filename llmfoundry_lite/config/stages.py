"""Stages of a pipeline: runs of consecutive blocks. Arithmetic, without torch.

The companion llmfoundry_layouts divides a model into them.
"""

from dataclasses import dataclass

from llmfoundry_lite.config.schema import PipelineConfig


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


def takes_microbatches(pipeline: PipelineConfig, count: int) -> bool:
    """Return whether the schedule runs with `count` microbatches: at least one for each stage, in equal rounds."""
    degree = pipeline.pipeline_parallel_degree
    if pipeline.schedule == "gpipe":
        return count >= 1
    has_rounds = pipeline.schedule in ("interleaved", "zero_bubble")
    return count >= degree and not (has_rounds and count % (count // degree))
