"""What a checkpoint's manifest says: everything but the arrays, and how each array lies in the files. Types, no torch.

`manifest_json.py` writes and reads them: whoever holds a `Manifest` from its `decode` may rely on full, disjoint
coverage of every tensor by slices in the files it names.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from llmfoundry_lite.checkpoint.layouts import Extra, Layout, Slice

VERSION = 2
"""The major version of the format that this release writes."""
ALGORITHM = "xxh3_128"
HASH_BYTES = 16
HASH_CHARACTERS = 2 * HASH_BYTES

ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}
"""dtypes in safetensors' spelling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timestamp:
    """How far the run had come: batches done, and the epoch it is in."""

    epoch: int = 0
    batch: int
    sample: int = 0
    token: int = 0
    extra: Extra = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Where one span of batches ran. The history of a run is a list of these, only ever added to."""

    first_batch: int
    last_batch: int
    """Inclusive; both count from 1."""
    vendor: str | None = None
    device: str | None = None
    num_devices: int | None = None
    driver: str | None = None
    runtime: str | None = None
    """CUDA's or ROCm's release."""
    torch: str | None = None
    world_size: int | None = None
    sharding: str | None = None
    shard_degree: int | None = None
    """HYBRID_SHARD: devices that share one copy of the model."""
    tensor_parallel_degree: int | None = None
    """Devices that divide each layer among them; None: one has the whole layer."""
    context: str | None = None
    """How many devices divide each sample's tokens among them, and how; None: each has whole samples."""
    pipeline: str | None = None
    """How many stages divide the blocks among them, and their schedule; None: all blocks are on each device."""
    device_train_microbatch_size: int | None = None
    precision: str | None = None
    attention: str | None = None
    reduction: str | None = None
    """`each microbatch` or `each batch`: when gradients are summed over devices."""
    compile_config: dict[str, Any] | None = None
    """None: not compiled."""
    environment: dict[str, str] = field(default_factory=dict)
    """What the hardware overlay sets, such as NCCL's variables, as the processes had it."""
    tokens_per_second: float | None = None
    save_interval_seconds: float | None = None
    """Of a run that saves by time: the interval as it was last, chosen or asked for."""
    changes: dict[str, list[Any]] = field(default_factory=dict)
    """Key of the configuration -> [before this segment, in it], of those whose change is logged."""
    islands: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of several islands that trained it at once: the device, their number, torch's release and the rows of each."""
    extra: Extra = field(default_factory=dict)

    @property
    def span(self) -> str:
        return f"{self.first_batch}-{self.last_batch}"

    @property
    def sharding_in_words(self) -> str | None:
        words = f"{self.sharding} of {self.shard_degree}" if self.shard_degree else self.sharding
        words = f"{words}, tensor parallel over {self.tensor_parallel_degree}" if self.tensor_parallel_degree else words
        words = f"{words}, context parallel over {self.context}" if self.context else words
        return f"{words}, pipeline of {self.pipeline}" if self.pipeline else words

    @property
    def computed_with(self) -> list[str]:
        """In words: releases, kernels, environment."""
        brand = {"nvidia": "CUDA ", "amd": "ROCm "}.get(self.vendor or "", "")
        words = {
            "torch ": self.torch,
            brand: self.runtime,
            "driver ": self.driver,
            "attention ": self.attention,
            "gradients summed after ": self.reduction,
            "compiled ": None if self.compile_config is None else str(self.compile_config or ""),
            "microbatch ": self.device_train_microbatch_size,
        }
        known = [f"{name}{value}".strip() for name, value in words.items() if value is not None]
        changed = [f"{key} {before} -> {now}" for key, (before, now) in self.changes.items()]
        return changed + known + [f"{name}={value}" for name, value in self.environment.items()]


@dataclass(frozen=True, slots=True)
class TensorRecord:
    dtype: str
    """A key of ITEM_BYTES."""
    shape: tuple[int, ...]
    layout: Layout
    """Shared with the other tensors that are cut alike."""
    extra: Extra = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def num_slices(self) -> int:
        return self.layout.num_cells(self.shape)

    @property
    def slices(self) -> Iterator[Slice]:
        return self.layout.overlapping(self.shape, (0,) * len(self.shape), self.shape)

    def overlapping(self, offset: Sequence[int], lengths: Sequence[int]) -> Iterator[Slice]:
        """The slices that reach into a box of this tensor."""
        return self.layout.overlapping(self.shape, offset, lengths)


class Stored(NamedTuple):
    """A slice as its file has it."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    """From the beginning of the file."""
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    name: str
    """Relative to the manifest; of the log's parts, to the folder the checkpoint is in."""
    num_bytes: int
    algorithm: str = ALGORITHM
    block_bytes: int
    header_bytes: int = 0
    """Of a shard: where its tensors begin."""
    digest: str = ""
    """Of a shard's header and hash table, one after the other; "": the hashes are here."""
    block_hashes: str = ""
    """One after the other, HASH_CHARACTERS each, of a file without a table; the last block may be short."""
    contents: dict[str, Stored] | None = None
    """What its header says, where the manifest says it too: in format 1."""
    extra: Extra = field(default_factory=dict)

    @property
    def num_blocks(self) -> int:
        """Blocks that are hashed: of a shard, of all before the table, whose length follows from that of the whole."""
        return -(-self.num_bytes // (self.block_bytes + (HASH_BYTES if self.digest else 0)))

    @property
    def hashed_bytes(self) -> int:
        """How much of the file comes before its table."""
        return self.num_bytes - (HASH_BYTES * self.num_blocks if self.digest else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    save_id: str
    parent_save_id: str | None = None
    """The save this run was at when it made this one: the previous save, or the one it was restored from."""
    lease_epoch: int = 0
    run_name: str | None = None
    timestamp: Timestamp
    written_at: str | None = None
    """Wall clock, for people; nothing is ever ordered by it."""
    fingerprints: dict[str, str] = field(default_factory=dict)
    """Of model configuration, tokenizer, data set: what must not change under a run unasked."""
    config: Any = None
    """The resolved configuration."""
    segments: tuple[Segment, ...] = ()
    scalars: dict[str, Any] = field(default_factory=dict)
    """Everything to restore that is neither array nor optimizer: scheduler, data state, loss scaler, callbacks."""
    optimizer: dict[str, Any] | None = None
    """Its class, parameter groups by parameter name, and the slots that are single numbers."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Second names of tied tensors -> the name they are stored under."""
    tensors: dict[str, TensorRecord] = field(default_factory=dict)
    files: tuple[FileRecord, ...] = ()
    """Shards; in one list all have the same block size."""
    attachments: tuple[FileRecord, ...] = ()
    """Files without tensors that belong to this state; hashed like the others."""
    log: tuple[FileRecord, ...] = ()
    """The run's log so far, in parts that later checkpoints share."""
    version: int = VERSION
    """The format it was read from."""
    files_extra: Extra = field(default_factory=dict)
    extra: Extra = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in (*self.files, *self.attachments))

    @property
    def order(self) -> tuple[int, int]:
        """Newest is highest: by lease, then by batch. See `store` for why."""
        return self.lease_epoch, self.timestamp.batch
