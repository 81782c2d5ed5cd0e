"""Which settings would save the most memory, by the estimate of `memory.py`. No torch."""

import dataclasses
from typing import Any

from llmfoundry_lite.config.layout import Layout, layout_of
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.hardware import GIB
from llmfoundry_lite.plan.memory import estimate_training_memory


def advise_less_memory(config: TrainConfig, layout: Layout, device_type: str, microbatch_size: int = 1) -> str:
    """The three settings that by the estimate save the most, the best first, with what they save."""

    def estimate_bytes(config: TrainConfig, times: int = 1) -> int:
        of_config = layout_of(config, times * layout.world_size, layout.node_size)
        return estimate_training_memory(config, of_config).total_bytes

    config = dataclasses.replace(config, device_train_microbatch_size=microbatch_size)
    now = estimate_training_memory(config, layout)
    changes: dict[str, dict[str, Any]] = {
        "fsdp_config.sharding_strategy: FULL_SHARD": {"sharding_strategy": "FULL_SHARD"},
        "fsdp_config.activation_checkpointing: true": {"activation_checkpointing": True},
        "fsdp_config.reduce_every_microbatch: true": {"reduce_every_microbatch": True},
        "fsdp_config.mixed_precision: PURE": {"mixed_precision": "PURE"},
    }
    if layout.pipeline > 1 and config.pipeline.splits_backward:
        del changes["fsdp_config.activation_checkpointing: true"]
    options = {
        text: dataclasses.replace(config, fsdp_config=dataclasses.replace(config.sharding, **change))
        for text, change in changes.items()
    }
    options["precision: amp_bf16"] = dataclasses.replace(config, precision="amp_bf16")
    if microbatch_size > 1:
        half = microbatch_size // 2
        smaller = dataclasses.replace(config, device_train_microbatch_size=half)
        options[f"device_train_microbatch_size: {half}"] = smaller
    saved = {text: now.total_bytes - estimate_bytes(option) for text, option in options.items()}
    saved["twice as many devices"] = now.total_bytes - estimate_bytes(config, times=2)
    if device_type == "cuda" and not config.sharding.offload_optimizer and layout.pipeline == 1:
        saved["fsdp_config.offload_optimizer: true"] = now.parameters_bytes + now.optimizer_bytes
    best = sorted((text for text in saved if saved[text] > 0), key=lambda text: -saved[text])[:3]
    words = [f"{text} (saves about {saved[text] / GIB:.2f} GiB)" for text in best]
    return f"; what helps most: {', '.join(words)}" if words else ""
