"""Measurements from inside a rehearsed run: memory at its peak by category, then one more batch's operations.

Memory is measured while nothing watches: the dispatch mode that sees operations belongs to the batch after those.
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
NUM_LARGEST = 5
PACKAGE = Path(models.__file__).parent.parent

BACKWARD = "the backward pass"
ATTENTION = {
    "_scaled_dot_product_flash_attention": "flash, of scaled_dot_product_attention",
    "_scaled_dot_product_efficient_attention": "memory-efficient, of scaled_dot_product_attention",
    "_efficient_attention_forward": "memory-efficient, of scaled_dot_product_attention",
    "_scaled_dot_product_cudnn_attention": "cuDNN, of scaled_dot_product_attention",
    "_scaled_dot_product_attention_math": "unfused, of scaled_dot_product_attention",
    "flex_attention": "FlexAttention",
}


class Measure(Callback):
    """Fills `found` during batches 1 to `num_batches` (memory) and the one after them (operations)."""

    found: dict[str, Any] = {}  # noqa: RUF012 - the one result of this process

    def __init__(self, num_batches: int, devices_per_node: int):
        self.num_batches = num_batches
        self.watch = Watch(devices_per_node)

    def batch_start(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) == 0:  # what `auto` has tried does not count
            torch.cuda.reset_peak_memory_stats()
            self.began_us = time.time_ns() // 1000
            self.compiled_before = len(torch._dynamo.utils.get_compilation_metrics()), count_graphs()

    def before_dataloader(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) == self.num_batches:
            self.watch.__enter__()

    def batch_end(self, state: State, logger: Logger) -> None:
        batch = int(state.timestamp.batch)
        if batch == self.num_batches:
            self.found["allocated_bytes"] = torch.cuda.max_memory_allocated()
            self.found["reserved_bytes"] = torch.cuda.max_memory_reserved()
            self.found["workspaces_bytes"] = measure_workspaces()
            self.found["microbatch_size"] = state.device_train_microbatch_size
            trace = cast(Any, torch.cuda.memory._snapshot())["device_traces"][torch.cuda.current_device()]
            torch.cuda.memory._record_memory_history(enabled=None)
            self.found.update(replay(trace, self.began_us)._asdict())
        elif batch > self.num_batches:
            self.watch.__exit__(None, None, None)
            self.found.update(self.watch.results())
            self.found["compiled"] = describe_compiled(*self.compiled_before)


# ------------------------------------------------------------------------------------------------------- memory


def record() -> None:
    """Record every allocation with the Python lines that asked for it, and every compilation."""
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=HISTORY_ENTRIES)
    torch._dynamo.utils.set_compilation_metrics_limit(HISTORY_ENTRIES)


def measure_workspaces() -> int:
    """Measure bytes that cuBLAS keeps, from the allocator too. It takes them again when it needs them."""
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated()


class Peak(NamedTuple):
    """The moment when the allocator had given out the most."""

    at_peak_bytes: dict[str, int]
    """Category -> bytes."""
    largest_bytes: dict[str, int]
    """The lines that had asked for the most -> bytes."""
    peak_at: str
    """The line whose request made the peak."""


def replay(trace: list[dict[str, Any]], since_us: int) -> Peak:
    """Replay the allocator's history; a peak before `since_us`, in microseconds of the clock, does not count."""
    live: dict[int, tuple[tuple[str, str], int]] = {}
    now: Counter[tuple[str, str]] = Counter()
    total, peak, at_peak, asked_last = 0, 0, {}, ""
    known: dict[tuple, tuple[str, str]] = {}
    for entry in trace:
        if entry["action"] == "alloc":
            frames = entry["frames"]
            key = tuple((frame["filename"], frame["line"]) for frame in frames)
            if key not in known:
                known[key] = categorise(frames), place_of(frames)
            live[entry["addr"]] = known[key], entry["size"]
            now[known[key]] += entry["size"]
            total += entry["size"]
            if total > peak and entry["time_us"] >= since_us:
                peak, at_peak, asked_last = total, dict(now), known[key][1]
        elif entry["action"] == "free_requested" and entry["addr"] in live:
            key, size = live.pop(entry["addr"])
            now[key] -= size
            total -= size
    if all(category != "activations" for category, _ in known.values()):
        raise RuntimeError(
            f"no allocation came from {CODE_OF_CATEGORIES['activations'].folders}: memory has no categories"
        )
    by_category: Counter[str] = Counter()
    by_place: Counter[str] = Counter()
    for (category, place), size in at_peak.items():
        by_category[category] += size
        by_place[f"{place} ({category})"] += size
    return Peak(+by_category, dict(by_place.most_common(NUM_LARGEST)), asked_last)


def place_of(frames: list[dict[str, Any]]) -> str:
    """Name the innermost line of ours, or without one, of torch's."""
    ours = [frame for frame in frames if frame["filename"].startswith(str(PACKAGE))] or frames
    return f"{shorten(ours[0]['filename'])}:{ours[0]['line']}" if ours else BACKWARD


class Code(NamedTuple):
    """Source folders, and ranges of lines of files, in which a stack frame may lie."""

    folders: tuple[str, ...] = ()
    ranges: tuple[tuple[str, int, int], ...] = ()
    """File, first line, the line after the last."""

    def has(self, frame: dict[str, Any]) -> bool:
        file, line = frame["filename"], frame["line"]
        return file.startswith(self.folders) or any(
            file == name and first <= line < end for name, first, end in self.ranges
        )


def packages(*modules: ModuleType) -> Code:
    return Code(folders=tuple(f"{Path(str(module.__file__)).parent}{os.sep}" for module in modules))


def functions(*objects: Any) -> Code:
    """Return where the source of functions and classes lies."""
    ranges = []
    for each in map(inspect.unwrap, objects):  # a decorator's file is not the function's
        lines, first = inspect.getsourcelines(each)
        ranges.append((str(inspect.getsourcefile(each)), first, first + len(lines)))
    return Code(ranges=tuple(ranges))


LOSS_CODE = functions(_ChunkedCrossEntropy, cross_entropy_sum, next_token_labels, row_weights)
FSDP_CODE = packages(_fully_shard)
FSDP_SETUP = functions(
    *(FSDPParam.reset_sharded_param, FSDPParam._init_sharded_param, FSDPParamGroup.lazy_init, FSDPState._lazy_init),
    FSDPModule._apply,
)
CODE_OF_CATEGORIES = {
    "rest": functions(ParallelTrainer._train_microbatches),  # the optimizer calls it
    "optimizer": packages(torch.optim),
    "parameters": functions(torch.nn.Module.to_empty),
    "unsharded": functions(one_device.ParameterCopies, one_device._cast),
    "gradients": functions(GradientStep, one_device._UseCopies),
    "activations": packages(models, pipelining),  # pipelining's are buffers for what stages send each other
}
"""Named by object, so that a rename fails at import: by file name, allocations would silently change category."""


def categorise(frames: list[dict[str, Any]]) -> str:
    """Return the category of the innermost frame that has one. Autograd's own thread has no Python frames."""
    if not frames:
        return "backward"
    if any(LOSS_CODE.has(frame) for frame in frames):
        return "logits"  # its products are those of `models`
    for frame in frames:
        if FSDP_CODE.has(frame):
            return categorise_sharded([frame for frame in frames if FSDP_CODE.has(frame)])
        for category, code in CODE_OF_CATEGORIES.items():
            if code.has(frame):
                return category
    return "rest"


def categorise_sharded(frames: list[dict[str, Any]]) -> str:
    """Return the category of a stack's frames in FSDP. It has many functions of gradients, all with such names."""
    if any(re.search("reduce|accumulate|grad", frame["name"]) for frame in frames):
        return "gradients"
    return "parameters" if any(FSDP_SETUP.has(frame) for frame in frames) else "unsharded"


# --------------------------------------------------------------------------------------------------- operations


class Watch(TorchDispatchMode):
    """Sees every operation of one batch, in the backward pass too."""

    supports_higher_order_operators = True
    """FlexAttention's compiled code comes as one."""

    def __init__(self, devices_per_node: int):
        super().__init__()
        self.devices_per_node = devices_per_node
        self.collectives: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
        self.flops: Counter[str] = Counter()
        self.attention: set[str] = set()
        self.reads: Counter[str] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled code compiled. This sees nothing of its inside."""
        return True

    def __enter__(self) -> "Watch":
        self.quiet = warnings.catch_warnings()
        self.quiet.__enter__()
        warnings.simplefilter("always")
        warnings.showwarning = self._note_read
        torch.cuda.set_sync_debug_mode("warn")
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.cuda.set_sync_debug_mode("default")
        self.quiet.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if isinstance(func, HigherOrderOperator):
            return result
        packet = func._overloadpacket
        name = packet.__name__
        if packet in flop_registry:
            if name.startswith("_efficient_attention"):  # torch's formula takes its tokens for heads
                args = tuple(x.transpose(1, 2) if isinstance(x, torch.Tensor) and x.ndim == 4 else x for x in args)
            self.flops[name] += int(flop_registry[packet](*args, **kwargs, out_val=result))
        if name in ATTENTION:
            self.attention.add(ATTENTION[name])
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note_collective(func.namespace, name, args, result)
        return result

    def _note_collective(self, namespace: str, name: str, args: tuple, result: Any) -> None:
        group = find_group(args)
        if group is None:
            return
        tensors = list(flatten(args)) + (list(flatten(result)) if namespace == "_c10d_functional" else [])
        if not tensors:
            return
        largest = max(tensors, key=lambda tensor: tensor.nbytes)
        kind = re.sub("_(base|into_tensor|tensor|coalesced|single)", "", name.strip("_"))
        kind = re.sub("^all(?=gather|reduce|to)", "all_", kind).replace("toall", "to_all")
        found = self.collectives[kind, describe_group(group, self.devices_per_node), str(largest.dtype)[6:]]
        found[0] += 1
        found[1] += largest.nbytes

    def _note_read(self, message: Any, *args: Any, **kwargs: Any) -> None:
        place = where_asked() if "synchroniz" in str(message) else None
        if place is not None:
            self.reads[place] += 1

    def results(self) -> dict[str, Any]:
        return {
            "collectives": [[*key, *counts] for key, counts in self.collectives.items()],
            "flops": dict(self.flops),
            "attention": sorted(self.attention),
            "reads": dict(self.reads),
        }


def count_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def describe_compiled(num_entries_before: int, num_graphs_before: int) -> dict[str, Any]:
    """Describe what torch.compile made of the run's own code, or of FlexAttention's."""
    functions, again = Counter(), Counter()
    for place, made in enumerate(torch._dynamo.utils.get_compilation_metrics()):
        if made.co_name is None:  # a backward pass, another entry of its forward pass's graph
            continue
        name = f"{made.co_name} ({shorten(made.co_filename or '')}:{made.co_firstlineno})"
        functions[name] += 1
        if place >= num_entries_before and made.recompile_reason:
            again[f"{name}: {one_line(made.recompile_reason)}"] += 1
    kernels, attention = read_compilers_caches()
    breaks = torch._dynamo.utils.counters["graph_break"]
    return {
        "num_graphs": count_graphs(),
        "num_before": num_graphs_before,  # before the first batch, while `auto` tried sizes
        "functions": list(functions),
        "again": dict(again),  # function and reason -> compilations in a batch
        "breaks": {one_line(reason): count for reason, count in breaks.items()},
        "kernels": kernels,  # target, such as sm_90 -> Triton kernels built for it
        "attention": attention,
    }


def read_compilers_caches() -> tuple[dict[str, int], list[str]]:
    """Return (target -> Triton kernels, attention kernels that the generated code names)."""
    kernels, attention = Counter(), set()
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        folder = Path(os.environ[name])
        for binary in folder.rglob("*.cubin"):
            target = json.loads(binary.with_suffix(".json").read_text())["target"]
            kernels[f"sm_{target['arch']}"] += 1
        for source in folder.rglob("*.py"):
            text = source.read_text()
            attention |= {words for kernel, words in ATTENTION.items() if f"{kernel}." in text or f"{kernel}_" in text}
    return dict(kernels), sorted(attention)


def one_line(text: str) -> str:
    """Return the first line that is not empty."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def find_group(args: tuple) -> list[int] | None:
    """Return the ranks of the process group among a collective's arguments."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.get_process_group_ranks(dist.ProcessGroup.unbox(argument))
    for argument in args:
        if isinstance(argument, str):
            try:
                group = dist.distributed_c10d._resolve_process_group(argument)  # pyright: ignore[reportArgumentType]
            except (RuntimeError, ValueError):
                continue
            return dist.get_process_group_ranks(group)
    return None


def describe_group(ranks: list[int], devices_per_node: int) -> str:
    num_nodes = len({rank // devices_per_node for rank in ranks})
    count = "1 rank" if len(ranks) == 1 else f"{len(ranks)} ranks"
    return f"{count} within a node" if num_nodes == 1 else f"{count} across {num_nodes} nodes"


def flatten(value: Any):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from flatten(item)


def where_asked() -> str | None:
    """Return the innermost Python line outside torch and this file; None for reads of `Measure` itself."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file == __file__ and frame.f_code.co_name in ("batch_start", "before_dataloader", "batch_end"):
            return None
        if "/torch/" not in file and file != __file__ and not file.endswith("warnings.py"):
            return f"{shorten(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return BACKWARD


def shorten(file: str) -> str:
    name = str(Path(file).relative_to(PACKAGE.parent)) if file.startswith(str(PACKAGE)) else file
    return name.rsplit("site-packages/", 1)[-1]
