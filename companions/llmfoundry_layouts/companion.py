"""Builders of a parallel model: parts of layers, of samples and of the blocks, and a shared optimizer."""

from llmfoundry_lite.companions import Companion

COMPANION = Companion(
    builders={
        "tp_config.tensor_parallel_degree": "llmfoundry_layouts.tensor:divide_layers",
        "tp_config.tensor_parallel_degree: the loss": "llmfoundry_layouts.tensor:divide_vocabulary",
        "cp_config.context_parallel_degree": "llmfoundry_layouts.context:build_context",
        "pp_config.pipeline_parallel_degree": "llmfoundry_layouts.language_model:build_language_model",
        "fsdp_config.sharding_strategy: ZERO_1": "llmfoundry_layouts.zero:share_optimizer",
        "checks of tp_config, cp_config and pp_config": "llmfoundry_layouts.checks:check_division",
        "check of a pipeline's microbatches": "llmfoundry_layouts.checks:check_microbatches",
        "dry run of tp_config, cp_config and pp_config": "llmfoundry_layouts.description:DESCRIPTIONS",
        "memory of a pipeline's ranks": "llmfoundry_layouts.stage_memory:estimate_fullest",
    },
)
