"""Measure a rehearsed run from inside: memory at its peak by category, then the operations of one more batch.

`Measure` is a callback of the run. Memory is measured first and nothing else meanwhile, because the dispatch mode that
sees operations, `Watch`, would change it. The allocator's history says which line of Python asked for each allocation,
and from that line follows its category, such as parameters or activations. `Watch` then sees FLOPs, collectives,
attention kernels and the reads for which the host waits. What torch.compile made is read from its own counters and
caches.
"""

import inspect
import json
import os
import re
import sys
import time
import warnings
from collections import Counter, defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch._ops import HigherOrderOperator
from torch.distributed import pipelining
from torch.distributed.fsdp import FSDPModule, _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from llmfoundry_lite import models
from llmfoundry_lite.parallel import one_device
from llmfoundry_lite.training.gradient_step import GradientStep
from llmfoundry_lite.training.loss import _ChunkedCrossEntropy, cross_entropy_sum, next_token_labels, row_weights
from llmfoundry_lite.training.monitor import Callback, Logger, State
from llmfoundry_lite.training.trainer import ParallelTrainer

HISTORY_ENTRIES = 20_000_000
"""Allocations, and compilations, that are remembered: more than any rehearsal makes."""
NUM_LARGEST = 5
"""Lines of code that are listed for the memory that they hold at the peak."""
PACKAGE = Path(models.__file__).parent.parent

BACKWARD = "the backward pass"
"""Place of allocations and reads without Python frames: autograd runs them in a thread of its own."""
ATTENTION = {
    "_scaled_dot_product_flash_attention": "flash, of scaled_dot_product_attention",
    "_scaled_dot_product_efficient_attention": "memory-efficient, of scaled_dot_product_attention",
    "_efficient_attention_forward": "memory-efficient, of scaled_dot_product_attention",
    "_scaled_dot_product_cudnn_attention": "cuDNN, of scaled_dot_product_attention",
    "_scaled_dot_product_attention_math": "unfused, of scaled_dot_product_attention",
    "flex_attention": "FlexAttention",
}
"""Operation of torch -> its name in the report."""


class Measure(Callback):
    """Fills `measurements`: with memory after batch `num_batches`, and with operations after the one that follows."""

    measurements: dict[str, Any] = {}  # noqa: RUF012 - of the only run of this process, read by child.py

    def __init__(self, num_batches: int, devices_per_node: int):
        self.num_batches = num_batches
        self.watch = Watch(devices_per_node)

    def batch_start(self, state: State, logger: Logger) -> None:
        """Begin to measure at the first batch. Sizes that `auto` has tried before do not count."""
        if int(state.timestamp.batch) == 0:
            torch.cuda.reset_peak_memory_stats()
            self.start_us = time.time_ns() // 1000
            self.num_compilations_before = len(torch._dynamo.utils.get_compilation_metrics())
            self.num_graphs_before = count_graphs()

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """Begin to watch operations when the batch after the measured ones is read."""
        if int(state.timestamp.batch) == self.num_batches:
            self.watch.__enter__()

    def batch_end(self, state: State, logger: Logger) -> None:
        """Store what was measured in the batches so far."""
        num_batches_done = int(state.timestamp.batch)
        if num_batches_done == self.num_batches:
            self.measurements["allocated_bytes"] = torch.cuda.max_memory_allocated()
            self.measurements["reserved_bytes"] = torch.cuda.max_memory_reserved()
            self.measurements["workspaces_bytes"] = measure_workspaces()
            self.measurements["microbatch_size"] = state.device_train_microbatch_size
            snapshot = cast(Any, torch.cuda.memory._snapshot())
            torch.cuda.memory._record_memory_history(enabled=None)
            trace = snapshot["device_traces"][torch.cuda.current_device()]
            self.measurements.update(replay(trace, self.start_us)._asdict())
        elif num_batches_done > self.num_batches:
            self.watch.__exit__(None, None, None)
            self.measurements.update(self.watch.results())
            self.measurements["compiled"] = describe_compiled(self.num_compilations_before, self.num_graphs_before)


# ------------------------------------------------------------------------------------------------------- memory


def record_history() -> None:
    """Make torch record every allocation with the Python lines that asked for it, and every compilation."""
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=HISTORY_ENTRIES)
    torch._dynamo.utils.set_compilation_metrics_limit(HISTORY_ENTRIES)


def measure_workspaces() -> int:
    """Return the bytes of the workspaces that cuBLAS keeps. Frees them; cuBLAS allocates them again when needed."""
    allocated_before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return allocated_before - torch.cuda.memory_allocated()


class Peak(NamedTuple):
    """The moment when the most memory was allocated. Keys of `result.json`."""

    at_peak_bytes: dict[str, int]
    """Category -> bytes."""
    largest_bytes: dict[str, int]
    """Line of code and category -> bytes, for the NUM_LARGEST lines that hold the most."""
    peak_at: str
    """Line of code whose allocation made the peak."""


class Origin(NamedTuple):
    """Where an allocation comes from."""

    category: str
    place: str
    """Line of code, as `place_of` names it."""


def replay(trace: list[dict[str, Any]], since_us: int) -> Peak:
    """Replay the allocator's history, and return what was allocated at the peak.

    trace: entries as torch's memory snapshot has them: "action" with "addr", and for an "alloc" also "size", "frames",
        innermost first, and "time_us".
    since_us: time in microseconds since 1970. An earlier peak does not count; what was allocated before and not freed
        does.

    Raises RuntimeError if no allocation is an activation: then the code has moved, and categories are wrong.
    """
    # What is allocated at the present entry of the history.
    live: dict[int, tuple[Origin, int]] = {}  # by address: where it comes from, and its bytes
    live_bytes: Counter[Origin] = Counter()
    total_bytes = 0
    # What was allocated at the highest peak so far.
    peak_bytes = 0
    bytes_at_peak: dict[Origin, int] = {}
    place_of_peak = ""
    origins: dict[tuple, Origin] = {}  # by stack, since most stacks come many times
    for entry in trace:
        if entry["action"] == "alloc":
            frames = entry["frames"]
            stack = tuple((frame["filename"], frame["line"]) for frame in frames)
            if stack not in origins:
                origins[stack] = Origin(categorise(frames), place_of(frames))
            origin = origins[stack]
            size = entry["size"]
            live[entry["addr"]] = origin, size
            live_bytes[origin] += size
            total_bytes += size
            if total_bytes > peak_bytes and entry["time_us"] >= since_us:
                peak_bytes = total_bytes
                bytes_at_peak = dict(live_bytes)
                place_of_peak = origin.place
        elif entry["action"] == "free_requested" and entry["addr"] in live:
            origin, size = live.pop(entry["addr"])
            live_bytes[origin] -= size
            total_bytes -= size

    has_activations = any(origin.category == "activations" for origin in origins.values())
    if not has_activations:
        raise RuntimeError(
            f"no allocation came from {CODE_OF_CATEGORIES['activations'].folders}: "
            "memory cannot be divided into categories"
        )

    # Sum up the peak by category, and by line of code.
    bytes_of_categories: Counter[str] = Counter()
    bytes_of_lines: Counter[str] = Counter()
    for origin, size in bytes_at_peak.items():
        bytes_of_categories[origin.category] += size
        bytes_of_lines[f"{origin.place} ({origin.category})"] += size
    return Peak(+bytes_of_categories, dict(bytes_of_lines.most_common(NUM_LARGEST)), place_of_peak)


def place_of(frames: list[dict[str, Any]]) -> str:
    """Return the innermost line of our package in a stack, as `llmfoundry_lite/models/mpt.py:120`.

    Without one it is the innermost line of all, and without frames BACKWARD.
    """
    frames_of_package = [frame for frame in frames if frame["filename"].startswith(str(PACKAGE))]
    named_frames = frames_of_package or frames
    if not named_frames:
        return BACKWARD
    return f"{shorten(named_frames[0]['filename'])}:{named_frames[0]['line']}"


class Code(NamedTuple):
    """A set of lines of source code: whole folders, or ranges of lines in files."""

    folders: tuple[str, ...] = ()
    ranges: tuple[tuple[str, int, int], ...] = ()
    """File, first line, and the line after the last."""

    def has(self, frame: dict[str, Any]) -> bool:
        """Return whether a stack frame is in this code."""
        if frame["filename"].startswith(self.folders):
            return True
        for file, first_line, end_line in self.ranges:
            if frame["filename"] == file and first_line <= frame["line"] < end_line:
                return True
        return False


def code_of_packages(*packages: ModuleType) -> Code:
    """Return the code of packages, given their modules `__init__`."""
    return Code(folders=tuple(f"{Path(str(package.__file__)).parent}{os.sep}" for package in packages))


def code_of(*objects: Any) -> Code:
    """Return the code of functions and classes."""
    ranges = []
    for function_or_class in map(inspect.unwrap, objects):  # without decorators, which may be in another file
        lines, first_line = inspect.getsourcelines(function_or_class)
        ranges.append((str(inspect.getsourcefile(function_or_class)), first_line, first_line + len(lines)))
    return Code(ranges=tuple(ranges))


LOSS_CODE = code_of(_ChunkedCrossEntropy, cross_entropy_sum, next_token_labels, row_weights)
FSDP_CODE = code_of_packages(_fully_shard)
FSDP_SETUP = code_of(
    FSDPParam.reset_sharded_param,
    FSDPParam._init_sharded_param,
    FSDPParamGroup.lazy_init,
    FSDPState._lazy_init,
    FSDPModule._apply,
)
"""Code of FSDP that allocates parameters, rather than gathered copies of them."""
CODE_OF_CATEGORIES = {
    "rest": code_of(ParallelTrainer._train_microbatches),  # the optimizer calls it
    "optimizer": code_of_packages(torch.optim),
    "parameters": code_of(torch.nn.Module.to_empty),
    "unsharded": code_of(one_device.ParameterCopies, one_device._cast),
    "gradients": code_of(GradientStep, one_device._UseCopies),
    "activations": code_of_packages(models, pipelining),  # pipelining has buffers for what stages send each other
}
"""Category -> code that allocates memory of it. Functions are named as objects, not by file and name, so that one that
has been renamed fails at import, where its allocations would otherwise change their category silently."""


def categorise(frames: list[dict[str, Any]]) -> str:
    """Return the category of an allocation: that of the innermost frame which belongs to one.

    "backward" are allocations without Python frames, which autograd's own thread makes. "rest" are all others.
    """
    if not frames:
        return "backward"
    # Matrix products of the loss are in `models`, so the loss comes first.
    if any(LOSS_CODE.has(frame) for frame in frames):
        return "logits"

    for frame in frames:
        if FSDP_CODE.has(frame):
            return categorise_sharded([frame for frame in frames if FSDP_CODE.has(frame)])
        for category, code in CODE_OF_CATEGORIES.items():
            if code.has(frame):
                return category
    return "rest"


def categorise_sharded(frames: list[dict[str, Any]]) -> str:
    """Return the category of an allocation of FSDP, from its frames in FSDP's code.

    Gradients are recognised by the names of functions, because many functions of FSDP allocate them.
    """
    if any(re.search("reduce|accumulate|grad", frame["name"]) for frame in frames):
        return "gradients"
    is_setup = any(FSDP_SETUP.has(frame) for frame in frames)
    return "parameters" if is_setup else "unsharded"


# --------------------------------------------------------------------------------------------------- operations


class Watch(TorchDispatchMode):
    """Counts every operation of torch between `__enter__` and `__exit__`, also in the backward pass.

    The inside of compiled code is not seen.
    """

    supports_higher_order_operators = True
    """FlexAttention's compiled code is one of these."""

    def __init__(self, devices_per_node: int):
        super().__init__()
        self.devices_per_node = devices_per_node
        # (operation, group, dtype) -> [calls, bytes]
        self.collectives: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
        self.flops: Counter[str] = Counter()  # by operation
        self.attention: set[str] = set()  # kernels, by their names in ATTENTION
        self.reads: Counter[str] = Counter()  # times that the host waited for the device, by line of code

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell torch to keep compiled code compiled, although a dispatch mode is active."""
        return True

    def __enter__(self) -> "Watch":
        """Begin to count. Until `__exit__`, torch warns when the host waits for the device, for `_note_read`."""
        self.warning_filters = warnings.catch_warnings()
        self.warning_filters.__enter__()
        warnings.simplefilter("always")
        warnings.showwarning = self._note_read
        torch.cuda.set_sync_debug_mode("warn")
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.cuda.set_sync_debug_mode("default")
        self.warning_filters.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        """Run one operation, and count it. torch calls this for each operation."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if isinstance(func, HigherOrderOperator):
            return result

        packet = func._overloadpacket
        name = packet.__name__
        if packet in flop_registry:
            if name.startswith("_efficient_attention"):
                # torch's formula expects [batch, heads, tokens, width], but this operation has tokens before heads.
                args = tuple(x.transpose(1, 2) if isinstance(x, torch.Tensor) and x.ndim == 4 else x for x in args)
            self.flops[name] += int(flop_registry[packet](*args, **kwargs, out_val=result))
        if name in ATTENTION:
            self.attention.add(ATTENTION[name])
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note_collective(func.namespace, name, args, result)
        return result

    def _note_collective(self, namespace: str, name: str, args: tuple, result: Any) -> None:
        """Count a collective by its operation, group and dtype. Its bytes are those of the largest tensor.

        That tensor is the whole message: of an all-gather the result, of a reduce-scatter the input.
        """
        group_ranks = find_group(args)
        tensors = list(flatten(args))
        if namespace == "_c10d_functional":  # in c10d, results are among the arguments
            tensors += flatten(result)
        if group_ranks is None or not tensors:
            return

        # The same operation has several names: _allgather_base_, all_gather_into_tensor and so on become all_gather.
        operation = re.sub("_(base|into_tensor|tensor|coalesced|single)", "", name.strip("_"))
        operation = re.sub("^all(?=gather|reduce|to)", "all_", operation).replace("toall", "to_all")
        largest = max(tensors, key=lambda tensor: tensor.nbytes)
        dtype = str(largest.dtype).removeprefix("torch.")
        counts = self.collectives[operation, describe_group(group_ranks, self.devices_per_node), dtype]
        counts[0] += 1
        counts[1] += largest.nbytes

    def _note_read(self, message: Any, *args: Any, **kwargs: Any) -> None:
        """Count a warning if it says that the host waited for the device. Replaces `warnings.showwarning`."""
        if "synchroniz" in str(message):
            place = find_reading_line()
            if place is not None:
                self.reads[place] += 1

    def results(self) -> dict[str, Any]:
        """Return the counts as JSON values. A collective's row is [operation, group, dtype, calls, bytes]."""
        return {
            "collectives": [[*key, *counts] for key, counts in self.collectives.items()],
            "flops": dict(self.flops),
            "attention": sorted(self.attention),
            "reads": dict(self.reads),
        }


def count_graphs() -> int:
    """Return how many graphs torch.compile has made in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def describe_compiled(num_compilations_before: int, num_graphs_before: int) -> dict[str, Any]:
    """Return, as JSON values, what torch.compile made of the run's own code or of FlexAttention's.

    The arguments are counts before the first batch, when `auto` had tried microbatch sizes.
    """
    functions: dict[str, None] = {}  # a set that keeps the order
    recompilations: Counter[str] = Counter()
    for index, compilation in enumerate(torch._dynamo.utils.get_compilation_metrics()):
        if compilation.co_name is None:  # a backward pass, whose forward pass has an entry of its own
            continue
        name = f"{compilation.co_name} ({shorten(compilation.co_filename or '')}:{compilation.co_firstlineno})"
        functions[name] = None
        if index >= num_compilations_before and compilation.recompile_reason:
            recompilations[f"{name}: {first_line(compilation.recompile_reason)}"] += 1

    kernels, attention = read_compilers_caches()
    graph_breaks = torch._dynamo.utils.counters["graph_break"]
    return {
        "num_graphs": count_graphs(),
        "num_before": num_graphs_before,
        "functions": list(functions),
        "again": dict(recompilations),  # function and reason -> compilations since the first batch
        "breaks": {first_line(reason): count for reason, count in graph_breaks.items()},
        "kernels": kernels,
        "attention": attention,
    }


def read_compilers_caches() -> tuple[dict[str, int], list[str]]:
    """Return how many Triton kernels were built for each target, such as sm_90, and which attention kernels are used.

    Both are read from the files that Triton and torch.compile have written in this rehearsal. Attention kernels are
    operations of torch that the generated Python code calls.
    """
    num_kernels: Counter[str] = Counter()
    attention: set[str] = set()
    for variable in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        folder = Path(os.environ[variable])
        for binary in folder.rglob("*.cubin"):
            target = json.loads(binary.with_suffix(".json").read_text())["target"]
            num_kernels[f"sm_{target['arch']}"] += 1
        for source in folder.rglob("*.py"):
            text = source.read_text()
            for operation, kernel in ATTENTION.items():
                if f"{operation}." in text or f"{operation}_" in text:
                    attention.add(kernel)
    return dict(num_kernels), sorted(attention)


def first_line(text: str) -> str:
    """Return the first line that is not empty, without surrounding spaces."""
    lines = text.strip().splitlines()
    return lines[0].strip() if lines else ""


def find_group(args: tuple) -> list[int] | None:
    """Return the ranks of the process group among a collective's arguments; None if there is no group.

    Operations of `c10d` get the group as an object, those of `_c10d_functional` by its name.
    """
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.get_process_group_ranks(dist.ProcessGroup.unbox(argument))
    for argument in args:
        if isinstance(argument, str):
            try:
                group = dist.distributed_c10d._resolve_process_group(argument)  # pyright: ignore[reportArgumentType]
            except (RuntimeError, ValueError):
                continue  # another text, such as the kind of a reduction
            return dist.get_process_group_ranks(group)
    return None


def describe_group(ranks: list[int], devices_per_node: int) -> str:
    """Return the size of a group and how it lies in the nodes: `8 ranks within a node`, `16 ranks across 2 nodes`."""
    num_nodes = len({rank // devices_per_node for rank in ranks})
    count = "1 rank" if len(ranks) == 1 else f"{len(ranks)} ranks"
    return f"{count} within a node" if num_nodes == 1 else f"{count} across {num_nodes} nodes"


def flatten(value: Any):
    """Yield all tensors in a value, which may be a tensor, or lists and tuples of values. Others are left out."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from flatten(item)


def find_reading_line() -> str | None:
    """Return the line of code that reads a value from the device, so that the host waits for it.

    It is the innermost line of the call stack outside of torch and this file, such as
    `llmfoundry_lite/training/monitor.py:120`. Returns None if the value is read by `Measure` itself, in one of its
    Composer events, and BACKWARD if the stack has no such line, as in the backward pass.
    """
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file == __file__ and frame.f_code.co_name in ("batch_start", "before_dataloader", "batch_end"):
            return None
        is_library = "/torch/" in file or file == __file__ or file.endswith("warnings.py")
        if not is_library:
            return f"{shorten(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return BACKWARD


def shorten(file: str) -> str:
    """Return a source file's path without the folder that our package, or the installed packages, are in."""
    if file.startswith(str(PACKAGE)):
        file = str(Path(file).relative_to(PACKAGE.parent))
    return file.rsplit("site-packages/", 1)[-1]
