"""Where a launch runs, as the segment of the checkpoints it writes; and what is another way to compute than before."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from llmfoundry_lite import devices
from llmfoundry_lite.checkpoint.manifest import Segment
from llmfoundry_lite.config.changes import Change
from llmfoundry_lite.config.layout import layout_here
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.training.adapter import LanguageModel


def build_segment(
    config: TrainConfig,
    model: LanguageModel,
    *,
    first_batch: int,
    last_batch: int,
    microbatch_size: int | None,
    tokens_per_second: float | None = None,
    save_interval_seconds: float | None = None,
    changes: Sequence[Change] = (),
    islands: Mapping[str, Mapping[str, Any]] | None = None,
) -> Segment:
    """Of this launch; with an environment as it is, where the shell has overruled the configuration."""
    fsdp, layout = config.sharding, layout_here(config)
    return Segment(
        first_batch=first_batch,
        last_batch=last_batch,
        vendor=devices.vendor(),
        device=devices.device_name(),
        num_devices=dist.get_world_size(),
        driver=devices.driver(),
        runtime=devices.runtime(),
        torch=str(torch.__version__),
        world_size=dist.get_world_size(),
        sharding=fsdp.sharding_strategy,
        shard_degree=layout.shard if fsdp.sharding_strategy == "HYBRID_SHARD" else None,
        tensor_parallel_degree=layout.tensor if layout.tensor > 1 else None,
        context=f"{layout.context}, {config.context.kind}" if layout.context > 1 else None,
        pipeline=f"{layout.pipeline} stages, {config.pipeline.schedule}" if layout.pipeline > 1 else None,
        device_train_microbatch_size=microbatch_size,
        precision=f"{devices.computed_precision(config.precision)} {fsdp.mixed_precision}",
        attention=model.attn_impl,
        reduction="each microbatch" if config.reduces_every_microbatch else "each batch",
        compile_config=config.compile_config,
        environment={name: os.environ.get(name, value) for name, value in config.environment.items()},
        tokens_per_second=tokens_per_second,
        save_interval_seconds=save_interval_seconds,
        changes={change.key: [change.there, change.here] for change in changes},
        islands={name: dict(one) for name, one in (islands or {}).items()},
    )


def find_differences(last: Segment, here: Segment) -> list[str]:
    """What may change digits, though not the mathematics, between two launches: `devices 8 -> 4`."""
    pairs: dict[str, tuple[Any, Any]] = {
        "device": (last.device, here.device),
        "devices": (last.num_devices, here.num_devices),
        "runtime": (last.runtime, here.runtime),
        "torch": (last.torch, here.torch),
        "sharding": (last.sharding, here.sharding),
        "shard degree": (last.shard_degree, here.shard_degree),
        "tensor parallel degree": (last.tensor_parallel_degree, here.tensor_parallel_degree),
        "context parallel": (last.context, here.context),
        "pipeline": (last.pipeline, here.pipeline),
        "microbatch": (last.device_train_microbatch_size, here.device_train_microbatch_size),
        "precision": (last.precision, here.precision),
        "attention": (last.attention, here.attention),
        "reduction after": (last.reduction, here.reduction),
        "compile_config": (last.compile_config, here.compile_config),
        **{
            name: (last.environment.get(name), here.environment.get(name))
            for name in sorted({*last.environment, *here.environment})
        },
    }
    if here.device_train_microbatch_size is None:  # not chosen yet
        del pairs["microbatch"]
    return [f"{name} {_say(before)} -> {_say(now)}" for name, (before, now) in pairs.items() if before != now]


def _say(value: Any) -> str:
    if value is None:
        return "none"
    return json.dumps(value) if isinstance(value, dict) else str(value)
