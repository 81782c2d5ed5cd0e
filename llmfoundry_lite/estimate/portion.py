"""The part of a run that one device computes, as counts and sizes that follow from its configuration. No torch.

The estimates of memory and of time ask a `Portion` how many tokens, parameters and bytes of precision a device has, so
that rules such as "FULL_SHARD frees a block's parameters after its forward pass" stand in one place.
"""

from dataclasses import dataclass
from functools import cached_property

from llmfoundry_lite.config.counted_model import counted_model
from llmfoundry_lite.config.layout import Layout
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.config.sharding_schema import FSDPConfig

FP32_BYTES = 4


@dataclass(frozen=True)
class Portion:
    """One device's part of a run, if `layout` divides the run among devices.

    Sizes are in bytes, or in elements of tensors. Composer's terms: a batch is divided among data ranks, and each data
    rank computes its samples in microbatches.
    """

    config: TrainConfig
    layout: Layout

    @cached_property
    def model(self) -> ModelConfig:
        """The whole model as it is counted. A pipeline's companion replaces it by the blocks of one rank."""
        return counted_model(self.config.model)

    @cached_property
    def fsdp(self) -> FSDPConfig:
        """The settings of sharding, with defaults filled in."""
        return self.config.sharding

    # ------------------------------------------------------------------------------------ samples and tokens

    @cached_property
    def device_batch_size(self) -> int:
        """Samples of a batch on each data rank."""
        return -(-self.config.global_train_batch_size // self.layout.num_data_ranks)

    @cached_property
    def microbatch_size(self) -> int:
        """Samples that a data rank computes at a time."""
        return self.config.first_microbatch_size(self.device_batch_size)

    @property
    def has_one_microbatch(self) -> bool:
        """Whether a batch is one microbatch, so that no gradients exist before its backward pass."""
        is_whole = self.microbatch_size == self.device_batch_size
        return is_whole and self.config.parts_of_largest_batch == 1

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of a microbatch on this device."""
        return self.microbatch_size * self.config.max_seq_len // self.layout.context

    @cached_property
    def num_stream_parts(self) -> int:
        """Devices among which sequence parallelism divides the residual stream between layers."""
        return self.layout.tensor if self.config.sequence_parallel else 1

    # ------------------------------------------------------------------------------------------- parameters

    @cached_property
    def shard_degree(self) -> int:
        """Devices that share one copy of parameters, gradients and optimizer state."""
        return self.layout.of_parameters.shard

    @property
    def has_fsdp(self) -> bool:
        """Whether FSDP2 holds the parameters. Without it they are plain tensors, and gradients are summed in place.

        This repeats the decision of `parallel.fsdp.shard_model`.
        """
        is_alone = self.layout.world_size == self.layout.pipeline
        casts_exactly = self.config.exact_sums and self.stream_bytes < FP32_BYTES
        shards_compiled = self.config.compile_config is not None and not self.casts_once
        return not is_alone or casts_exactly or shards_compiled or self.fsdp.offload_optimizer

    @property
    def casts_once(self) -> bool:
        """Whether, without FSDP2, 16-bit copies of parameters serve all microbatches of a batch."""
        recomputes_compiled = self.config.compile_config is not None and bool(self.fsdp.activation_checkpointing)
        return self.fsdp.plain_on_one_device and self.layout.pipeline == 1 and not recomputes_compiled

    @property
    def is_sharded(self) -> bool:
        """Whether devices share one copy of the parameters. If not, they add up their gradients once a step."""
        return not self.shares_optimizer and self.fsdp.sharding_strategy != "NO_SHARD"

    @property
    def shares_optimizer(self) -> bool:
        """Whether devices with whole copies divide the optimizer's step, and gather the new parameters (ZeRO-1)."""
        return self.fsdp.sharding_strategy == "ZERO_1"

    @property
    def reshards(self) -> bool:
        """Whether a block's parameters are freed after its forward pass, and gathered again for its backward pass."""
        return self.fsdp.sharding_strategy in ("FULL_SHARD", "HYBRID_SHARD") and self.layout.pipeline == 1

    @property
    def num_vocab_rows(self) -> int:
        """Rows of the embedding on this device."""
        return -(-self.model.vocab_size // self.layout.tensor)

    @property
    def num_embedding_elements(self) -> int:
        """Elements of the embedding on this device."""
        return self.num_vocab_rows * self.model.d_model

    @property
    def num_up_matrices(self) -> int:
        """Matrices that widen the stream in a feed-forward layer: a gated one has two."""
        return 2 if self.model.ffn_config.ffn_type == "mptglu" else 1

    # --------------------------------------------------------------------------------------------- precision

    @property
    def dtype(self) -> str:
        """Dtype of matrix products, by the name that the table of accelerators has for it."""
        return self.config.precision.removeprefix("amp_")

    @property
    def is_fp32(self) -> bool:
        """Whether matrix products read fp32, so that no 16-bit copies exist. TF32 is rounded within the products."""
        return self.config.precision in ("fp32", "tf32")

    @property
    def has_autocast(self) -> bool:
        """Whether parameters and residual stream stay fp32, and autocast casts what enters a matrix product."""
        return not self.is_fp32 and self.fsdp.mixed_precision == "FULL"

    @property
    def compute_bytes(self) -> int:
        """Bytes of an element in matrix products."""
        return FP32_BYTES if self.is_fp32 else 2

    @property
    def stream_bytes(self) -> int:
        """Bytes of an element in the residual stream, and in gathered parameters."""
        return FP32_BYTES if self.has_autocast else self.compute_bytes

    @property
    def reduction_bytes(self) -> int:
        """Bytes of an element while gradients are added up over devices."""
        if self.config.exact_sums:
            return self.sum_bytes
        return self.compute_bytes if self.fsdp.mixed_precision == "PURE" else FP32_BYTES

    @property
    def sum_bytes(self) -> int:
        """Bytes of an element in the gradient that microbatches are added to: float64 for exact sums."""
        return 2 * FP32_BYTES if self.config.exact_sums else FP32_BYTES
