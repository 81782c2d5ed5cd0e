"""The blocks of a run's YAML that say how devices divide the model, the batch and the samples between them.

These are fsdp_config, tp_config, cp_config and pp_config. `layout.py` derives the layout of the devices from them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from llmfoundry_lite.config.fields import POSITIVE, Use, setting, validator


@dataclass(kw_only=True, slots=True, frozen=True)
class FSDPConfig:
    """How devices share the model, and what they keep in memory."""

    sharding_strategy: str = setting("FULL_SHARD", choices="FULL_SHARD SHARD_GRAD_OP HYBRID_SHARD NO_SHARD ZERO_1")
    """ZERO_1 shards the optimizer's state and keeps everything else whole."""
    mixed_precision: str = setting(
        "DEFAULT",
        choices="PURE DEFAULT FULL",
        uses=(
            Use(
                has_effect=lambda _, run: run.precision.startswith("amp_"),
                reason="precision is {run.precision}, in which all is computed and reduced",
            ),
        ),
    )
    """PURE: parameters, residual stream and gradient reduction in the compute precision. DEFAULT: gradients are
    reduced in fp32. FULL: parameters and residual stream in fp32, matrix products in the compute precision."""
    data_parallel_shard_degree: int | None = setting(None, POSITIVE)
    """HYBRID_SHARD: devices that share one copy of the model; default: the devices of a node."""
    reduce_every_microbatch: bool | None = None
    """true: sum gradients over devices after each microbatch, which takes memory for one block's whole gradient. false:
    only after the last one, which takes it for the whole model's. Default: false up to 1.5 billion parameters."""
    activation_checkpointing: bool | str = setting(
        False, validator("true, false or selective", (True, False, "selective").__contains__)
    )
    """true recomputes each block in the backward pass; selective recomputes all but matrix products and attention."""
    activation_checkpointing_reentrant: bool = setting(
        False,
        uses=(
            Use(has_effect=lambda fsdp, _: fsdp.activation_checkpointing, reason="activation_checkpointing is false"),
        ),
    )
    activation_cpu_offload: bool = False
    """Keep the activations that activation_checkpointing leaves in the host's memory."""
    offload_optimizer: bool = False
    """Keep parameters, gradients and optimizer state in the host's memory and update them there. For accelerators."""
    plain_on_one_device: bool = False
    """Where one device holds the whole model, do without FSDP2 in compiled blocks too, and cast parameters once a batch
    into copies that are kept. Without compilation each forward pass casts. Not measured on a GPU yet."""

    def problems(self) -> Iterator[str]:
        """Yield `key: what is wrong` for each key that does not go with another one."""
        if self.data_parallel_shard_degree is not None and self.sharding_strategy != "HYBRID_SHARD":
            yield (
                "data_parallel_shard_degree: only HYBRID_SHARD uses it, and sharding_strategy is "
                f"{self.sharding_strategy}; change that or remove this"
            )
        if self.activation_checkpointing == "selective" and self.activation_checkpointing_reentrant:
            yield "activation_checkpointing_reentrant: selective has no reentrant form; remove it"
        if self.activation_cpu_offload and not self.activation_checkpointing:
            yield (
                "activation_cpu_offload: offloads what activation_checkpointing keeps; add activation_checkpointing: "
                "true, or remove it"
            )
        if self.sharding_strategy == "ZERO_1" and self.offload_optimizer:
            yield (
                "offload_optimizer: ZERO_1 keeps the whole model on each device; use FULL_SHARD, or remove one of them"
            )


@dataclass(kw_only=True, slots=True, frozen=True)
class TensorParallelConfig:
    """Devices that divide each layer between them."""

    tensor_parallel_degree: int = setting(1, POSITIVE)
    """Number of neighbouring devices that divide each layer's heads and feed-forward width, and the vocabulary. They
    see the same samples. fsdp_config says how such groups share the model."""
    sequence_parallel: bool = False
    """Give each device only a part of every sequence between layers. That saves memory, for the same exchange."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ContextParallelConfig:
    """Devices that divide each sample between them."""

    context_parallel_degree: int = setting(1, POSITIVE)
    """Number of devices that divide the tokens of each sample. fsdp_config says how all devices share the model."""
    kind: str = setting("heads", choices="heads gather")
    """heads: in attention, each device computes some heads, for all tokens. gather: it computes all heads, for its own
    tokens, from all keys and values; for models with fewer heads than devices."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PipelineConfig:
    """Devices that divide the model's blocks between them."""

    pipeline_parallel_degree: int = setting(1, POSITIVE)
    """Number of stages. Each is a device or a group of them, and holds some of the blocks. All see the same samples,
    one after the other. fsdp_config and tp_config say how a stage is divided."""
    schedule: str = setting("1f1b", choices="gpipe 1f1b interleaved zero_bubble zbv")
    """Order of a stage's forward and backward passes. No schedule changes the gradient."""
    virtual_stages: int | None = setting(None, POSITIVE)
    """Runs of blocks on each device. Default: 2 for interleaved and zbv, else 1."""
    blocks: list[int] | None = None
    """Number of blocks in each run, in the model's order. Default: even by parameters, with embedding and head."""
    num_microbatches: int | None = setting(None, POSITIVE)
    """Default: what device_train_microbatch_size makes; without that, about 4 for each stage."""

    @property
    def num_runs(self) -> int:
        """Number of runs of blocks on each device."""
        if self.virtual_stages is not None:
            return self.virtual_stages
        return 2 if self.schedule in ("interleaved", "zbv") else 1

    @property
    def splits_backward(self) -> bool:
        """Whether the backward pass computes the gradients of inputs and those of weights in two separate steps."""
        return self.schedule in ("zero_bubble", "zbv")

    def takes_microbatches(self, count: int) -> bool:
        """Return whether the schedule can run with `count` microbatches in a batch.

        gpipe takes any number. Other schedules need at least one for each stage. interleaved and zero_bubble run them
        in rounds of about one for each stage, which must have equal numbers: with 4 stages, 8 and 10 microbatches make
        2 rounds, and 9 are refused.
        """
        if self.schedule == "gpipe":
            return count >= 1
        if count < self.pipeline_parallel_degree:
            return False
        has_rounds = self.schedule in ("interleaved", "zero_bubble")
        num_rounds = count // self.pipeline_parallel_degree
        return not has_rounds or count % num_rounds == 0

    def default_num_microbatches(self, device_batch_size: int) -> int:
        """Return the number of microbatches into which a pipeline divides a device's batch by default.

        Of the multiples of the number of stages that divide the batch, it is the smallest that gives each stage 4 or
        more microbatches, or else the largest. With 2 stages, a batch of 24 samples has 8 microbatches, and a batch of
        6 samples has 6. If no multiple divides the batch, each sample is a microbatch.
        """
        num_stages = self.pipeline_parallel_degree
        multiples = range(num_stages, device_batch_size + 1, num_stages)
        fitting = [multiple for multiple in multiples if device_batch_size % multiple == 0]
        for num_microbatches in fitting:
            if num_microbatches >= 4 * num_stages:
                return num_microbatches
        return fitting[-1] if fitting else device_batch_size
