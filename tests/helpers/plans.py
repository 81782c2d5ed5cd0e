"""Runs for the planner, as small changes of one."""

from dataclasses import fields, replace
from functools import cache
from typing import Any

from llmfoundry_lite.config.layout import Layout
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.config.sharding_schema import FSDPConfig
from llmfoundry_lite.estimate.model_memory import MemoryEstimate, estimate_moments
from llmfoundry_lite.estimate.portion import Portion

ALONE = Layout()


@cache
def load() -> TrainConfig:
    return load_train_config(["mpt-1b"]).config


def config_of(model: ModelConfig, num_workers: int = 0, **changes: Any) -> TrainConfig:
    """Return a run in amp_bf16 whose gradients are reduced after each microbatch. Fields of FSDPConfig go there."""
    run = load()
    names = {field.name for field in fields(FSDPConfig)} & set(changes)
    options: dict[str, Any] = {"reduce_every_microbatch": True} | {name: changes.pop(name) for name in names}
    fsdp = FSDPConfig(**options)
    loader = replace(run.train_loader, num_workers=num_workers)
    return replace(run, **{"model": model, "max_seq_len": 2048, "train_loader": loader, "fsdp_config": fsdp, **changes})


def moments_of(
    model: ModelConfig,
    *,
    seq_len: int,
    microbatch_size: int,
    num_microbatches: int = 2,
    has_fsdp: bool = True,
    layout: Layout = ALONE,
    **changes: Any,
) -> dict[str, MemoryEstimate]:
    changes |= {
        "max_seq_len": seq_len,
        "device_train_microbatch_size": microbatch_size,
        "global_train_batch_size": num_microbatches * microbatch_size * layout.num_data_ranks,
        "compile_config": {"backend": "eager"} if has_fsdp else None,
    }
    return estimate_moments(Portion(config_of(model, **changes), layout))


def estimate_memory(model: ModelConfig, **options: Any) -> MemoryEstimate:
    """Estimate the moment when one device holds the most. `options` are those of `moments_of`."""
    return max(moments_of(model, **options).values(), key=lambda moment: moment.total_bytes)
