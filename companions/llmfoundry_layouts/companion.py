"""What stages of a pipeline and shared optimizers add to the core: builders of a parallel model."""

from llmfoundry_lite.companions import Companion

COMPANION = Companion(
    builders={
        "pp_config.pipeline_parallel_degree": "llmfoundry_layouts.pipeline:build_pipeline",
        "fsdp_config.sharding_strategy: ZERO_1": "llmfoundry_layouts.zero:share_optimizer",
    },
)
