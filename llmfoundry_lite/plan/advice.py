"""Which settings would save the most memory, by the estimate of `memory.py`. No torch."""

import dataclasses
from typing import Any

from llmfoundry_lite.config.layout import Layout, layout_of
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.config.stages import takes_microbatches
from llmfoundry_lite.hardware import GIB
from llmfoundry_lite.plan.memory import estimate_training_memory


def advise_less_memory(config: TrainConfig, layout: Layout, device_type: str, microbatch_size: int = 1) -> str:
    """The three settings that by the estimate save the most, the best first, with what they save."""

    def estimate_bytes(config: TrainConfig, times: int = 1) -> int:
        of_config = layout_of(config, times * layout.world_size, layout.node_size)
        return estimate_training_memory(config, of_config).total_bytes

    config = dataclasses.replace(config, device_train_microbatch_size=microbatch_size)
    now, fsdp = estimate_training_memory(config, layout), config.sharding
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
    half = microbatch_size // 2
    text = _smaller_microbatch(config, layout, half) if half else None
    if text is not None:
        options[text] = dataclasses.replace(config, device_train_microbatch_size=half)
    saved = {text: now.total_bytes - estimate_bytes(option) for text, option in options.items()}
    saved["twice as many devices"] = now.total_bytes - estimate_bytes(config, times=2)
    refuses_offload = layout.pipeline > 1 or config.optimizer.name == "muon" or fsdp.sharding_strategy == "ZERO_1"
    if device_type == "cuda" and not fsdp.offload_optimizer and not refuses_offload:
        saved["fsdp_config.offload_optimizer: true"] = now.parameters_bytes + now.optimizer_bytes
    best = sorted((text for text in saved if saved[text] > 0), key=lambda text: -saved[text])[:3]
    words = [f"{text} (saves about {saved[text] / GIB:.2f} GiB)" for text in best]
    return f"; what helps most: {', '.join(words)}" if words else ""


def _smaller_microbatch(config: TrainConfig, layout: Layout, microbatch_size: int) -> str | None:
    """Microbatches of so many samples, by the key that the run has for them; None where its schedule does not take
    them."""
    num_samples = config.global_train_batch_size // layout.num_data_ranks
    count, pipeline = -(-num_samples // microbatch_size), config.pipeline
    if layout.pipeline > 1 and not takes_microbatches(pipeline, count):
        return None
    if layout.pipeline == 1 or pipeline.num_microbatches is None:
        return f"device_train_microbatch_size: {microbatch_size}"
    return None if num_samples % count else f"pp_config.num_microbatches: {count}"
