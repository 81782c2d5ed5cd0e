"""Builders of a parallel model: stages of a pipeline, and an optimizer that replicas share."""

from llmfoundry_lite.companions import Companion

COMPANION = Companion(
    builders={
        "pp_config.pipeline_parallel_degree": "llmfoundry_layouts.pipeline:build_pipeline",
        "fsdp_config.sharding_strategy: ZERO_1": "llmfoundry_layouts.zero:share_optimizer",
        "memory of a pipeline's ranks": "llmfoundry_layouts.stage_memory:estimate_rank",
    },
)
