"""The manifest of a portable checkpoint: everything but the arrays, and how each array lies in the files. No torch.

The dataclasses are the content. `check_manifest` makes sure of what all other code relies on: the chunks of every
tensor cover it once, and lie in files that the manifest names. It runs before every write and after every read.

`manifest_json` writes a manifest and reads it back. This module does no I/O.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from llmfoundry_lite.checkpoint.grid import ITEM_BYTES, Chunk, Extra, Grid
from llmfoundry_lite.config.changes import Change
from llmfoundry_lite.errors import DamagedCheckpointError
from llmfoundry_lite.ranks.codec import shorten

FORMAT = "llmfoundry_lite checkpoint"
VERSION = 2
"""The major version of the format that this release writes."""
MANIFEST = "manifest.json"
HIDDEN = "***"
"""Text in the place of a secret."""
DCP_STATE = "torch.distributed.checkpoint"
"""Key of `scalars` in checkpoints that torch.distributed.checkpoint (DCP) has saved. It has the `values` that are not
tensors, and the `paths` of all values in the nested state dict, both by name."""
NO_STATE: dict[str, Any] = {"values": {}, "paths": {}}
"""Value of `DCP_STATE` for a checkpoint without such values."""
HEAD_BYTES = 4096
"""A listing reads this many bytes from the beginning of each manifest."""
MAX_BYTES = 64 << 20
"""The largest manifest that is read or written: a hundred times the size for MPT-70B on 4,096 ranks. Parsing it takes
at most 1.6 GB of memory."""
MAX_DIMENSIONS = 32
"""The most dimensions that a tensor may have."""
MIN_BLOCK_BYTES = 4096
"""The smallest block that a file may be hashed in, so that hashes take at most 0.4 % of a file."""
MAX_BLOCK_BYTES = 1 << 30
"""The largest block that a file may be hashed in. A reader holds a whole block in memory."""
MIN_HEADER_BYTES = 10
"""The shortest safetensors header: its length in 8 bytes, and `{}`."""

ALGORITHM = "xxh3_128"
"""The hash of blocks, headers and manifests: XXH3 with 128 bits."""
HASH_BYTES = 16
HASH_CHARACTERS = 2 * HASH_BYTES
"""Length of a hash in hexadecimal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timestamp:
    """How far a run had come: the epoch that it is in, and the batches, samples and tokens that it has trained."""

    epoch: int = 0
    batch: int
    sample: int = 0
    token: int = 0
    extra: Extra = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Where one span of batches ran, and how they were computed.

    Each launch of a run adds a segment, so a run's history is a list that only ever grows. Fields that a launch does
    not know are None.
    """

    first_batch: int
    last_batch: int
    """Inclusive. Both count from 1."""
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
    """Devices that divide each layer among them. None: one device has the whole layer."""
    context: str | None = None
    """How many devices divide each sample's tokens among them, and how. None: each device has whole samples."""
    pipeline: str | None = None
    """How many stages divide the blocks among them, and their schedule. None: all blocks are on each device."""
    device_train_microbatch_size: int | None = None
    precision: str | None = None
    attention: str | None = None
    reduction: str | None = None
    """When devices sum gradients: `each microbatch`, `each batch` or, for exact sums at any time, `each batch,
    exactly`."""
    compile_config: dict[str, Any] | None = None
    """None: not compiled."""
    num_threads: int | None = None
    """Threads of each rank, on a CPU."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that the hardware overlay sets, such as NCCL's, as the processes had them."""
    tokens_per_second: float | None = None
    save_interval_seconds: float | None = None
    """The last interval of a run that saves by time. `save_interval: auto` chose it, or the user set it."""
    changes: dict[str, list[Any]] = field(default_factory=dict)
    """Key of the configuration -> [before this segment, in it], for keys whose changes are allowed and logged."""
    islands: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The islands that trained these batches, each with its device, number of devices, torch release and rows."""
    sync: str | None = None
    """`local steps, every 100`: islands trained alone between exchanges of weights. None: as one world trains."""
    extra: Extra = field(default_factory=dict)

    @property
    def span(self) -> str:
        """First and last batch, such as `1-200`."""
        return f"{self.first_batch}-{self.last_batch}"

    @property
    def sharding_in_words(self) -> str | None:
        """How devices divided the model, such as `HYBRID_SHARD of 8, tensor parallel over 2`."""
        words = self.sharding
        if self.shard_degree:
            words = f"{words} of {self.shard_degree}"
        if self.tensor_parallel_degree:
            words = f"{words}, tensor parallel over {self.tensor_parallel_degree}"
        if self.context:
            words = f"{words}, context parallel over {self.context}"
        if self.pipeline:
            words = f"{words}, pipeline of {self.pipeline}"
        return words

    @property
    def computed_with(self) -> list[str]:
        """Facts that a report shows because the numbers may depend on them, such as `torch 2.9.1` or `microbatch 4`.

        In this order: local steps, changed configuration keys, releases and kernels, environment variables. Facts that
        are not known are left out.
        """
        runtime_label = {"nvidia": "CUDA ", "amd": "ROCm "}.get(self.vendor or "", "")
        compile_options = None
        if self.compile_config is not None:
            compile_options = str(self.compile_config or "")  # without options, only the label is shown
        labelled_facts = {
            "torch ": self.torch,
            runtime_label: self.runtime,
            "driver ": self.driver,
            "attention ": self.attention,
            "gradients summed after ": self.reduction,
            "compiled ": compile_options,
            "microbatch ": self.device_train_microbatch_size,
        }

        facts = []
        if self.sync:
            facts.append(self.sync)
        for key, before_and_after in self.changes.items():
            facts.append(str(Change(key, *before_and_after)))
        for label, fact in labelled_facts.items():
            if fact is not None:
                facts.append(f"{label}{fact}".strip())
        for variable, text in self.environment.items():
            facts.append(f"{variable}={text}")
        return facts


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A tensor's dtype, shape and chunks."""

    dtype: str
    """A key of ITEM_BYTES."""
    shape: tuple[int, ...]
    grid: Grid
    """Shared by tensors that are cut alike."""
    extra: Extra = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """The tensor's size in all its files together."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def num_chunks(self) -> int:
        """The number of its chunks. A tensor without elements has none."""
        return self.grid.num_chunks(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A shard file: its size, and the digest from which all its bytes can be verified.

    The file ends with a hash of each of its blocks, and `digest` covers these hashes.
    """

    name: str
    """Path relative to the manifest."""
    num_bytes: int
    algorithm: str = ALGORITHM
    block_bytes: int
    header_bytes: int
    """Bytes before the file's first tensor."""
    digest: str
    """Hash of the file's header followed by the hashes at its end, in hexadecimal."""

    @property
    def num_blocks(self) -> int:
        """The number of hashed blocks, from the file's size: each block has `block_bytes` (the last may have fewer) and
        adds a hash at the end of the file."""
        return -(-self.num_bytes // (self.block_bytes + HASH_BYTES))

    @property
    def hashed_bytes(self) -> int:
        """The number of bytes before the hashes."""
        return self.num_bytes - HASH_BYTES * self.num_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPart:
    """A file that holds a part of the run's log. The log of a checkpoint is its parts, one after the other."""

    name: str
    """Path relative to the folder that the checkpoint is in."""
    num_bytes: int
    algorithm: str = ALGORITHM
    block_bytes: int
    block_hashes: str
    """HASH_CHARACTERS for each block. The last block may be short."""
    extra: Extra = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint without its arrays.

    Rank 0 makes it when all ranks have written their shard files, and a restore on any number of ranks starts from it.
    """

    save_id: str
    """Unique name of this save: `e<lease_epoch>-ba<batch>-<hex digits>`."""
    parent_save_id: str | None = None
    """The save before this one, or the one that the run was restored from."""
    lease_epoch: int = 0
    run_name: str | None = None
    timestamp: Timestamp
    written_at: str | None = None
    """Wall clock, for people. Nothing is ever ordered by it."""
    state_digest: str | None = None
    """Digest of all tensors, however they are divided: see `state_digest.py`. None: saved by an earlier release."""
    fingerprints: dict[str, str] = field(default_factory=dict)
    """Such as the tokenizer's, which must not change in a run unless the user says so."""
    config: Any = None
    """The resolved configuration."""
    segments: tuple[Segment, ...] = ()
    scalars: dict[str, Any] = field(default_factory=dict)
    """Run state without arrays and optimizer: clocks, place in the data, loss scaler, seed, callbacks."""
    optimizer: dict[str, Any] | None = None
    """The optimizer's class, parameter groups by parameter name, and the slots that are single numbers."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Second names of tied tensors -> the name they are stored under."""
    tensors: dict[str, TensorRecord] = field(default_factory=dict)
    files: tuple[FileRecord, ...] = ()
    """The shard files. All have the same block size."""
    log: tuple[LogPart, ...] = ()
    """The run's log so far, in parts that later checkpoints share."""
    files_extra: Extra = field(default_factory=dict)
    extra: Extra = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of all shard files together."""
        return sum(file.num_bytes for file in self.files)

    def overlapping(self, tensor: str, offset: Sequence[int], lengths: Sequence[int]) -> Iterator[tuple[int, Chunk]]:
        """Yield the chunks of a tensor that have elements in common with a box, each with the index of its file in
        `files`. `tensor` is the tensor's name; the box begins at `offset` and has `lengths`."""
        record = self.tensors[tensor]
        for file, box in record.grid.overlapping(record.shape, offset, lengths):
            yield file, Chunk(tensor, record.dtype, *box)

    @property
    def dcp_state(self) -> dict[str, Any] | None:
        """The `values` and `paths` described at DCP_STATE if torch.distributed.checkpoint has saved this checkpoint;
        else None."""
        return self.scalars.get(DCP_STATE)

    @property
    def head(self) -> "Head":
        """The facts that a listing shows."""
        return Head(
            save_id=self.save_id,
            lease_epoch=self.lease_epoch,
            batch=self.timestamp.batch,
            num_tokens=self.timestamp.token,
            written_at=self.written_at,
            num_bytes=self.num_bytes,
        )


class Head(NamedTuple):
    """Facts of a manifest that a listing shows. They are in the first HEAD_BYTES of the file."""

    save_id: str
    lease_epoch: int
    batch: int
    num_tokens: int
    written_at: str | None
    num_bytes: int


# ------------------------------------------------------------------------------------------------ what must hold


def check_manifest(manifest: Manifest, source: str) -> None:
    """Raise DamagedCheckpointError if a manifest contradicts itself. `source` names it in errors.

    Afterwards other code may rely on this: names, sizes and numbers are possible, the chunks of every tensor cover it
    once, and they lie in files that are listed once, inside the checkpoint's folder.
    """
    problem = next(_find_problems(manifest), None)
    if problem is not None:
        raise DamagedCheckpointError(f"{source}: {problem}")


def _find_problems(manifest: Manifest) -> Iterator[str]:
    """Yield what is impossible in a manifest, as text for an error.

    A check may assume that the checks before it found nothing, so callers must stop at the first problem.
    """
    # Files: the shards, and the parts of the log.
    for files in (manifest.files, manifest.log):
        names = [file.name for file in files]
        if len(set(names)) != len(names):
            yield "a file is listed twice"
        for file in files:
            for problem in _find_problems_of_file(file):
                yield f"file {shorten(file.name)}: {problem}"

    # The state dict of torch.distributed.checkpoint, if there is one.
    dcp_state = manifest.dcp_state or NO_STATE
    if not isinstance(dcp_state, dict) or not all(isinstance(dcp_state.get(key), dict) for key in NO_STATE):
        yield f"scalars: {DCP_STATE}: expected values and paths"

    # Tensors, each alone and then all together.
    yield from _find_problems_of_tensors(manifest)
    tensor_bytes = sum(tensor.num_bytes for tensor in manifest.tensors.values())
    if tensor_bytes > manifest.num_bytes:
        yield f"tensors of {tensor_bytes:,} bytes in files of {manifest.num_bytes:,}"

    # A tied tensor is stored under exactly one of its names.
    for alias, stored_name in manifest.aliases.items():
        if stored_name not in manifest.tensors or alias in manifest.tensors:
            yield f"alias {alias} of {stored_name}, which is not there or is stored as well"


def _find_problems_of_tensors(manifest: Manifest) -> Iterator[str]:
    """Yield what is impossible in the dtypes, shapes and grids of a manifest's tensors, as text for an error."""
    checked_grids: set[Any] = set()
    for name, tensor in manifest.tensors.items():
        if tensor.dtype not in ITEM_BYTES:
            yield f"tensor {name}: unknown dtype {tensor.dtype!r}"
        has_negative_length = any(length < 0 for length in tensor.shape)
        if has_negative_length or len(tensor.shape) > MAX_DIMENSIONS:
            yield f"tensor {name}: shape {tensor.shape}"

        # Most tensors share their grid and shape with others, for which the grid's check need not run again.
        grid_and_shape = (id(tensor.grid), tensor.shape)
        if grid_and_shape in checked_grids:
            continue
        checked_grids.add(grid_and_shape)
        problem = tensor.grid.problem(tensor.shape, len(manifest.files))
        if problem:
            yield f"tensor {name}: {problem}"


def _find_problems_of_file(file: FileRecord | LogPart) -> Iterator[str]:
    """Yield what is impossible in the record of a shard file or of a part of the log, as text for an error."""
    # A name such as `../../x`, `C:x` or `a//b` could make a reader open a file outside of the checkpoint's folder.
    has_odd_part = any(part in ("", ".", "..") for part in file.name.split("/"))
    has_odd_character = any(character in file.name for character in "\\:\0")
    if has_odd_part or has_odd_character:
        yield "the name leads out of the checkpoint's folder"

    # Later checks divide by the size of a block.
    if file.algorithm != ALGORITHM:
        yield f"hash algorithm {file.algorithm!r}, expected {ALGORITHM!r}"
    if not MIN_BLOCK_BYTES <= file.block_bytes <= MAX_BLOCK_BYTES:
        yield f"{file.num_bytes} bytes in blocks of {file.block_bytes}"
        return

    if isinstance(file, LogPart):
        num_blocks = -(-file.num_bytes // file.block_bytes)
        if len(file.block_hashes) != num_blocks * HASH_CHARACTERS:
            yield f"block hashes for another size than {file.num_bytes} bytes"
    elif not file.name.endswith(".safetensors"):
        yield "expected a .safetensors file"
    elif not MIN_HEADER_BYTES <= file.header_bytes <= file.hashed_bytes:
        yield f"a header of {file.header_bytes} bytes in {file.num_bytes:,}"
