"""The part of a run that one device computes. No torch."""

from dataclasses import dataclass
from functools import cached_property

from llmfoundry_lite.config.layout import Layout
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.schema import FSDPConfig, TrainConfig

FP32_BYTES = 4


@dataclass(frozen=True)
class Portion:
    """One device's part of `config` on devices that are divided by `layout`."""

    config: TrainConfig
    layout: Layout

    @property
    def model(self) -> ModelConfig:
        return self.config.model

    @cached_property
    def fsdp(self) -> FSDPConfig:
        return self.config.sharding

    @cached_property
    def device_batch_size(self) -> int:
        """Samples of a data rank's batch."""
        return -(-self.config.global_train_batch_size // self.layout.num_data_ranks)

    @cached_property
    def microbatch_size(self) -> int:
        """Samples that a data rank computes at once."""
        return self.config.first_microbatch_size(self.device_batch_size)

    @property
    def has_one_microbatch(self) -> bool:
        """True: no gradients of earlier microbatches exist when the forward pass begins."""
        return self.microbatch_size == self.device_batch_size

    @cached_property
    def shard_degree(self) -> int:
        """Devices that share one copy of parameters, gradients and optimizer state."""
        return self.layout.of_parameters.shard

    @property
    def has_fsdp(self) -> bool:
        """False: as on one device, parameters are used and gradients summed in place."""
        is_alone = self.layout.world_size == self.layout.pipeline
        casts_exactly = self.config.exact_sums and self.stream_bytes < FP32_BYTES
        shards_compiled = self.config.compile_config is not None and not self.casts_once
        return not is_alone or casts_exactly or shards_compiled or self.fsdp.offload_optimizer

    @property
    def casts_once(self) -> bool:
        """True: without FSDP, copies of parameters in 16 bits stay for all microbatches."""
        recomputes_compiled = self.config.compile_config is not None and bool(self.fsdp.activation_checkpointing)
        return self.fsdp.plain_on_one_device and self.layout.pipeline == 1 and not recomputes_compiled

    @property
    def is_sharded(self) -> bool:
        """False: data ranks keep whole copies and add up gradients once a step."""
        return not self.shares_optimizer and self.fsdp.sharding_strategy != "NO_SHARD"

    @property
    def shares_optimizer(self) -> bool:
        """True: copies of the model divide the optimizer's step and gather the new parameters."""
        return self.fsdp.sharding_strategy == "ZERO_1"

    @property
    def reshards(self) -> bool:
        """True: blocks' parameters are freed after the forward pass and gathered again for the backward pass."""
        return self.fsdp.sharding_strategy in ("FULL_SHARD", "HYBRID_SHARD") and self.layout.pipeline == 1

    @property
    def dtype(self) -> str:
        """Type of matrix products: a column of the accelerators' peaks."""
        return self.config.precision.removeprefix("amp_")

    @property
    def is_fp32(self) -> bool:
        """True: matrix products read fp32, which tf32 rounds inside them. No copies in 16 bits exist."""
        return self.config.precision in ("fp32", "tf32")

    @property
    def has_autocast(self) -> bool:
        return not self.is_fp32 and self.fsdp.mixed_precision == "FULL"

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number in matrix products."""
        return FP32_BYTES if self.is_fp32 else 2

    @property
    def reduction_bytes(self) -> int:
        """Bytes of a number while gradients are added up over devices."""
        if self.config.exact_sums:
            return self.sum_bytes
        return self.compute_bytes if self.fsdp.mixed_precision == "PURE" else FP32_BYTES

    @property
    def sum_bytes(self) -> int:
        """Bytes of a number in a gradient that microbatches are added to."""
        return 2 * FP32_BYTES if self.config.exact_sums else FP32_BYTES

    @property
    def stream_bytes(self) -> int:
        """Bytes of a number in the residual stream and in gathered parameters."""
        return FP32_BYTES if self.has_autocast else self.compute_bytes

    @property
    def num_vocab_rows(self) -> int:
        """Rows of the vocabulary on this device."""
        return -(-self.model.vocab_size // self.layout.tensor)

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of a microbatch on this device."""
        return self.microbatch_size * self.config.max_seq_len // self.layout.context

    @cached_property
    def num_runs(self) -> int:
        """Devices that divide the residual stream between layers."""
        return self.layout.tensor if self.config.sequence_parallel else 1

    @property
    def num_up(self) -> int:
        """Matrices that widen the stream in a feed-forward layer."""
        return 2 if self.model.ffn_config.ffn_type == "mptglu" else 1

    @property
    def embedding(self) -> int:
        """Numbers of this device's rows of the embedding."""
        return self.num_vocab_rows * self.model.d_model
