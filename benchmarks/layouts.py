"""The layouts that ship: each large model over the fewest devices that hold it, and over more. Predicted, not measured.

    python -m benchmarks layouts --out yamls/layouts               two minutes

A layout serves as many counts of devices as it can at no more than SLOWER times the fastest step that `llmfoundry-lite
plan` finds for each count and kind of device. Among several layouts the worst case decides. Parts of layers and stages
count as slower than they are (CARE), because more can go wrong with them. MPT-1T's is not made here.
"""

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from llmfoundry_lite.config.check import check_together
from llmfoundry_lite.config.layout import Layout, layout_of
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.config.sharding_schema import PipelineConfig, TensorParallelConfig
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.estimate.memory import estimate_training_memory
from llmfoundry_lite.hardware import GIB
from llmfoundry_lite.models.flops import count_parameters
from llmfoundry_lite.tables import Table
from llmfoundry_machines.bench.frame import check_names, describe_conditions, open_console, show
from llmfoundry_planner.plan.report import CHECKPOINTING, three_digits
from llmfoundry_planner.plan.search import AS_FAST, find_sizes, search_layouts, usable_bytes
from llmfoundry_planner.plan.step import accelerator_named, find_hardware, step_time

MODELS = ("mpt-7b", "mpt-13b", "mpt-22b", "mpt-30b", "mpt-70b", "mpt-175b")
COUNTS = (8, 64, 512)
PER_NODE = 8
OVERLAYS = {40: ("a100-40gb-8",), 64: ("mi250-4",), 80: ("a100-80gb-8", "h100-8"), 192: ("mi300x-8",)}
"""GB of a device -> overlays of such devices."""
DEVICES = {40: "A100 of 40 GB", 64: "halves of an MI250, 64 GB each", 80: "A100 or H100 of 80 GB", 192: "MI300X"}
STATE_BYTES = 16
"""Bytes of a parameter, its gradient and two moments, in fp32."""
SLOWER = 1.2
"""Longest step of a layout, over that of the fastest."""
CARE = {"tensor": 0.05, "stages": 0.1}
DEGREES = {"shard": (2, 4, 8, 16, 32, 64, 128, 256, 512), "tensor": (1, 2, 4, 8), "stages": (1, 2, 4, 8, 16)}
RECOMPUTED = {
    False: "All activations fit, so nothing is computed twice.",
    "selective": "Keeps matrix products and computes all else again. Otherwise fewer samples would fit, or none.",
    True: "Computes every block again. Otherwise fewer samples would fit, or none.",
}


class Choice(NamedTuple):
    """How a run is divided; the rest are copies."""

    shard: int
    tensor: int
    stages: int
    recomputed: bool | str

    @property
    def care(self) -> float:
        return CARE["tensor"] * (self.tensor > 1) + CARE["stages"] * (self.stages > 1)

    def divide(self, config: TrainConfig) -> TrainConfig:
        """Divide a run so. Raises ConfigError for what a launch refuses."""
        settings: dict[str, Any] = {"sharding_strategy": "HYBRID_SHARD", "data_parallel_shard_degree": self.shard}
        tensor = TensorParallelConfig(tensor_parallel_degree=self.tensor, sequence_parallel=self.tensor > 1)
        divided = replace(
            config,
            fsdp_config=replace(config.sharding, **settings, activation_checkpointing=self.recomputed),
            tp_config=tensor if self.tensor > 1 else None,
            pp_config=PipelineConfig(pipeline_parallel_degree=self.stages) if self.stages > 1 else None,
        )
        check_together(divided)
        return divided


class Prediction(NamedTuple):
    """A layout on so many devices of one kind."""

    slower: float
    """Step over that of the fastest layout of all."""
    microbatch_size: int
    num_bytes: int

    def line(self, count: int) -> str:
        than = "as fast as" if self.slower < 1 + AS_FAST else f"{100 * (self.slower - 1):.0f} % slower than"
        samples = f"{self.microbatch_size} sample{'s' if self.microbatch_size > 1 else ''} at a time"
        return f"# {count} devices, {samples}: {self.num_bytes / GIB:.1f} GiB; {than} the fastest layout of all."


def run(*, models: Sequence[str] = MODELS, out: Path | None = None) -> dict[str, Any]:
    """Choose the layouts of each model and size of device, and print them. With `out`, a folder, write their files
    there, and remove those of these models that are no longer chosen. Raises ConfigError."""
    check_names("--models", models, MODELS)
    if out is not None and not (out.is_dir() and os.access(out, os.W_OK)):
        raise ConfigError(f"--out: {out} given, expected a folder that exists and is writable")
    report, rows, texts = describe_conditions(), [], {}
    for model, size in itertools.product(models, OVERLAYS):
        counts = [count for count in COUNTS if count >= fewest_devices(model, size)]
        while counts:
            choice, predictions = choose(model, size, counts)
            name = name_of(model, counts[0], size)
            for count, found in predictions.items():
                ways = [str(choice.shard), str(choice.tensor), str(choice.stages), CHECKPOINTING[choice.recomputed]]
                facts = [str(found.microbatch_size), f"{found.num_bytes / GIB:.1f}", f"{found.slower:.2f}"]
                rows.append([name, str(count), *ways, *facts])
            texts[name] = text_of(name, model, size, choice, predictions)
            counts = counts[len(predictions) :]
    columns = ["layout", "devices", "shards", "tensor", "stages", "recomputed", "samples", "GiB", "step / fastest"]
    show(open_console(), Table("layouts", columns, rows))
    if out is not None:
        for one in itertools.product(models, COUNTS, OVERLAYS):
            if name_of(*one) not in texts:
                (out / f"{name_of(*one)}.yaml").unlink(missing_ok=True)
        for name, text in texts.items():
            (out / f"{name}.yaml").write_text(text)
    return report | {"layouts": rows}


def name_of(model: str, count: int, size: int) -> str:
    """Return the name of a layout for `count` devices or more, of `size` GB."""
    return f"{model}-{count}x{size}gb"


def fewest_devices(model: str, size: int) -> int:
    """Return the fewest of COUNTS devices of so many GB that hold a model's state."""
    num_bytes = STATE_BYTES * count_parameters(run_of(model).model)
    return next(count for count in COUNTS if count * size * GIB >= num_bytes)


def choose(model: str, size: int, counts: Sequence[int]) -> tuple[Choice, dict[int, Prediction]]:
    """Return a layout for as many of the first counts as possible, and what it does on each of those."""
    for end in range(len(counts), 0, -1):
        found: list[tuple[float, Choice, dict[int, Prediction]]] = []
        for choice in choices(counts[0]):
            worst = {count: predict_worst(model, size, count, choice) for count in counts[:end]}
            predictions = {count: one for count, one in worst.items() if one is not None and one.slower < SLOWER}
            if len(predictions) == end:
                slowest = max(one.slower for one in predictions.values())
                found.append((slowest + choice.care, choice, predictions))
        if found:
            return min(found, key=lambda one: one[0])[1:]
    raise ConfigError(f"{model}: no layout of {counts[0]} devices of {size} GB is near the fastest")


def choices(count: int) -> Iterator[Choice]:
    """Yield the layouts of which `count` devices hold a copy."""
    for degrees in itertools.product(DEGREES["shard"], DEGREES["tensor"], DEGREES["stages"]):
        if count % (degrees[0] * degrees[1] * degrees[2]) == 0:
            yield from (Choice(*degrees, recomputed) for recomputed in RECOMPUTED)


def predict_worst(model: str, size: int, count: int, choice: Choice) -> Prediction | None:
    """Predict a layout on the devices of this size on which it does worst; None if it does not fit on one of them."""
    worst: Prediction | None = None
    for overlay in OVERLAYS[size]:
        try:
            divided = choice.divide(run_of(model, overlay))
            layout = layout_of(divided, count, PER_NODE)
            found = predict(divided, layout, overlay, fastest_seconds(model, overlay, count))
        except ConfigError:
            return None
        if found is None:
            return None
        worst = max(worst or found, found)
    return worst


def predict(config: TrainConfig, layout: Layout, overlay: str, fastest: float) -> Prediction | None:
    """Predict a run with the largest microbatch that fits, as `auto` takes it, or with its own; None if none fits."""
    device, own = accelerator_named(overlay), config.device_train_microbatch_size
    per_rank, rest = divmod(config.global_train_batch_size, layout.num_data_ranks)
    best: tuple[TrainConfig, int] | None = None
    for size in () if rest else find_sizes(config, per_rank) if own == "auto" else [own]:
        sized = replace(config, device_train_microbatch_size=size)
        num_bytes = estimate_training_memory(sized, layout).total_bytes
        if num_bytes >= usable_bytes(device):
            break
        best = sized, num_bytes
    if best is None:
        return None
    sized, num_bytes = best
    assert isinstance(sized.device_train_microbatch_size, int)
    slower = step_time(sized, layout, find_hardware(device)).seconds / fastest
    return Prediction(slower, sized.device_train_microbatch_size, num_bytes)


@cache
def run_of(model: str, overlay: str | None = None) -> TrainConfig:
    return load_train_config([model] if overlay is None else [model, overlay]).config


@cache
def fastest_seconds(model: str, overlay: str, count: int) -> float:
    """Return the step of the fastest layout of all."""
    found, _ = search_layouts(run_of(model), count, find_hardware(accelerator_named(overlay)))
    return min(candidate.time.seconds for candidate in found)


def text_of(name: str, model: str, size: int, choice: Choice, predictions: dict[int, Prediction]) -> str:
    """Return the file of a layout: what it is for, what it costs, its settings and why."""
    first, overlay = min(predictions), OVERLAYS[size][-1]
    launcher = "llmfoundry-lite train -n 8"
    if first > PER_NODE:
        launcher = f"srun -N {first // PER_NODE} --ntasks-per-node {PER_NODE} python -m llmfoundry_lite.launch_train"
    more = ", and on more" if len(predictions) > 1 else ""
    lines = [
        f"# {model.upper()} on {first} {DEVICES[size]}{more}. Use it on top of the run and the devices' overlay.",
        f"# {launcher} {model} {overlay} {name}",
        "#",
    ]
    if first == fewest_devices(model, size):
        num_parameters = three_digits(count_parameters(run_of(model).model) / 1e9)
        lines.append(
            "# For the smallest of 8, 64 and 512 devices that hold 16 bytes for each of "
            f"{num_parameters} billion parameters."
        )
    lines += [found.line(count) for count, found in predictions.items()]
    spanned = choice.shard * choice.tensor * choice.stages
    copies = "in each node" if spanned == PER_NODE else f"on every {spanned} devices"
    if spanned < PER_NODE:
        copies += " of a node"
    lines += [
        "# Chosen by the predictions of `llmfoundry-lite plan`; not run on this hardware yet.",
        "",
        "overlay: hardware",
        "",
        "# auto: as many samples as fit. Measured before the first batch.",
        "device_train_microbatch_size: auto",
        "",
        "fsdp_config:",
        f"  # A copy of the model {copies}. Only gradients are exchanged between copies.",
        "  sharding_strategy: HYBRID_SHARD",
        f"  data_parallel_shard_degree: {choice.shard}",
        f"  # {RECOMPUTED[choice.recomputed]}",
        f"  activation_checkpointing: {str(choice.recomputed).lower()}",
    ]
    if choice.tensor > 1:
        lines += [
            "",
            "tp_config:",
            "  # Divides each layer within a node, so that each device has only its part of a sample's activations.",
            f"  tensor_parallel_degree: {choice.tensor}",
            "  sequence_parallel: true",
        ]
    if choice.stages > 1:
        lines += [
            "",
            "pp_config:",
            "  # With stages, parameters are gathered once per batch instead of for each microbatch.",
            f"  pipeline_parallel_degree: {choice.stages}",
            f"  schedule: {PipelineConfig().schedule}",
        ]
    return "\n".join([*lines, ""])
