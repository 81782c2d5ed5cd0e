"""Choose the layouts that ship: each large model on the fewest devices that hold it, and on more.

    python -m benchmarks layouts --out yamls/layouts               two minutes

Everything is predicted, nothing is measured. A layout says how a model is divided over devices; all other devices hold
copies. One layout serves as many numbers of devices as it can, with a step at most SLOWER times the fastest one that
`llmfoundry-lite plan` finds for each number and kind of device. Among several layouts, the one whose worst case is best
is taken. Tensor parallelism and pipeline stages count as slower than predicted (CARE), because more can go wrong with
them. The layout of MPT-1T is not made here.

The order of this file: `run` goes through models and device sizes, `choose` finds a layout, `predict_worst` and
`predict` rate one, and `text_of` writes its file.
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
"""GB of a device -> hardware overlays of such devices."""
DEVICES = {40: "A100 of 40 GB", 64: "halves of an MI250, 64 GB each", 80: "A100 or H100 of 80 GB", 192: "MI300X"}
STATE_BYTES = 16
"""Bytes of a parameter, its gradient and AdamW's two moments, in fp32."""
SLOWER = 1.2
"""Longest step that a layout may have, as a multiple of the fastest layout's."""
CARE = {"tensor": 0.05, "stages": 0.1}
"""Added to that multiple when layouts are compared, for parallelism with which more can go wrong."""
DEGREES = {"shard": (2, 4, 8, 16, 32, 64, 128, 256, 512), "tensor": (1, 2, 4, 8), "stages": (1, 2, 4, 8, 16)}
# activation_checkpointing -> why, as a comment in the layout's file.
RECOMPUTED = {
    False: "All activations fit, so nothing is computed twice.",
    "selective": "Keeps matrix products and computes all else again. Otherwise fewer samples would fit, or none.",
    True: "Computes every block again. Otherwise fewer samples would fit, or none.",
}


class Choice(NamedTuple):
    """How a model is divided: the product of the three degrees is the number of devices of one copy."""

    shard: int
    tensor: int
    stages: int
    recomputed: bool | str

    @property
    def care(self) -> float:
        """What is added to this choice's relative step when choices are compared."""
        return CARE["tensor"] * (self.tensor > 1) + CARE["stages"] * (self.stages > 1)

    def divide(self, config: TrainConfig) -> TrainConfig:
        """Return the run with this layout. Raises ConfigError for a combination that a launch refuses."""
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
    """A layout on a given number of devices of one kind. Predictions compare by `slower`."""

    slower: float
    """Its step as a multiple of the fastest layout's."""
    microbatch_size: int
    """The largest one that fits."""
    num_bytes: int

    def line(self, count: int) -> str:
        """Format as a comment of the layout's file."""
        than = "as fast as" if self.slower < 1 + AS_FAST else f"{100 * (self.slower - 1):.0f} % slower than"
        samples = f"{self.microbatch_size} sample{'s' if self.microbatch_size > 1 else ''} at a time"
        return f"# {count} devices, {samples}: {self.num_bytes / GIB:.1f} GiB; {than} the fastest layout of all."


def run(*, models: Sequence[str] = MODELS, out: Path | None = None) -> dict[str, Any]:
    """Choose the layouts of each model and size of device, print them, and return the report.

    With `out`, an existing folder, the layouts' files are written there, and those of these models that are no longer
    chosen are removed. Raises ConfigError.
    """
    check_names("--models", models, MODELS)
    if out is not None and not (out.is_dir() and os.access(out, os.W_OK)):
        raise ConfigError(f"--out: {out} given, expected a folder that exists and is writable")
    report, rows, texts = describe_conditions(), [], {}
    for model, device_gigabytes in itertools.product(models, OVERLAYS):
        counts = [count for count in COUNTS if count >= fewest_devices(model, device_gigabytes)]
        # Each layout serves the first of the remaining counts, and as many after it as possible.
        while counts:
            choice, predictions = choose(model, device_gigabytes, counts)
            name = name_of(model, counts[0], device_gigabytes)
            for count, prediction in predictions.items():
                degrees = [str(choice.shard), str(choice.tensor), str(choice.stages), CHECKPOINTING[choice.recomputed]]
                predicted_cells = [
                    str(prediction.microbatch_size),
                    f"{prediction.num_bytes / GIB:.1f}",
                    f"{prediction.slower:.2f}",
                ]
                rows.append([name, str(count), *degrees, *predicted_cells])
            texts[name] = text_of(name, model, device_gigabytes, choice, predictions)
            counts = counts[len(predictions) :]

    columns = ["layout", "devices", "shards", "tensor", "stages", "recomputed", "samples", "GiB", "step / fastest"]
    show(open_console(), Table("layouts", columns, rows))
    if out is not None:
        # Only names that this program could have written are removed. Other files stay.
        for combination in itertools.product(models, COUNTS, OVERLAYS):
            if name_of(*combination) not in texts:
                (out / f"{name_of(*combination)}.yaml").unlink(missing_ok=True)
        for name, text in texts.items():
            (out / f"{name}.yaml").write_text(text)
    return report | {"layouts": rows}


def name_of(model: str, count: int, size: int) -> str:
    """Return the name of a layout for `count` devices or more, of `size` GB each, such as "mpt-7b-8x80gb"."""
    return f"{model}-{count}x{size}gb"


def fewest_devices(model: str, size: int) -> int:
    """Return the smallest of COUNTS whose devices of `size` GB hold the model's state together."""
    num_bytes = STATE_BYTES * count_parameters(run_of(model).model)
    return next(count for count in COUNTS if count * size * GIB >= num_bytes)


def choose(model: str, size: int, counts: Sequence[int]) -> tuple[Choice, dict[int, Prediction]]:
    """Choose a layout for the first of `counts`, and for as many of the following ones as it is fast enough on.

    Returns the layout and its predictions, count -> Prediction. Raises ConfigError if no layout is fast enough on the
    first count.
    """
    # Try all counts first, then leave out the last ones.
    for end in range(len(counts), 0, -1):
        candidates: list[tuple[float, Choice, dict[int, Prediction]]] = []
        for choice in choices(counts[0]):
            worst_predictions = {count: predict_worst(model, size, count, choice) for count in counts[:end]}
            predictions = {
                count: prediction
                for count, prediction in worst_predictions.items()
                if prediction is not None and prediction.slower < SLOWER
            }
            if len(predictions) == end:
                slowest = max(prediction.slower for prediction in predictions.values())
                candidates.append((slowest + choice.care, choice, predictions))

        if candidates:
            _, choice, predictions = min(candidates, key=lambda candidate: candidate[0])
            return choice, predictions
    raise ConfigError(f"{model}: no layout of {counts[0]} devices of {size} GB is near the fastest")


def choices(count: int) -> Iterator[Choice]:
    """Yield all layouts whose copy of the model takes a number of devices that divides `count`."""
    for degrees in itertools.product(DEGREES["shard"], DEGREES["tensor"], DEGREES["stages"]):
        if count % (degrees[0] * degrees[1] * degrees[2]) == 0:
            yield from (Choice(*degrees, recomputed) for recomputed in RECOMPUTED)


def predict_worst(model: str, size: int, count: int, choice: Choice) -> Prediction | None:
    """Predict a layout on each kind of device of this size, and return the slowest prediction.

    Returns None if a launch would refuse the layout, or if it does not fit on one of the kinds.
    """
    worst: Prediction | None = None
    for overlay in OVERLAYS[size]:
        try:
            divided = choice.divide(run_of(model, overlay))
            layout = layout_of(divided, count, PER_NODE)
            prediction = predict(divided, layout, overlay, fastest_seconds(model, overlay, count))
        except ConfigError:
            return None
        if prediction is None:
            return None
        worst = max(worst or prediction, prediction)
    return worst


def predict(config: TrainConfig, layout: Layout, overlay: str, fastest: float) -> Prediction | None:
    """Predict a run with the largest microbatch that fits, or with its own if it is not `auto`.

    `fastest` is the step of the fastest layout in seconds. Returns None if no microbatch fits, or if the batch cannot
    be divided by the ranks.
    """
    device, configured_size = accelerator_named(overlay), config.device_train_microbatch_size
    samples_per_rank, remainder = divmod(config.global_train_batch_size, layout.num_data_ranks)
    largest_fitting: tuple[TrainConfig, int] | None = None
    if remainder:
        return None
    sizes = find_sizes(config, samples_per_rank) if configured_size == "auto" else [configured_size]

    # Sizes are in increasing order, so the first one that does not fit ends the search.
    for size in sizes:
        sized = replace(config, device_train_microbatch_size=size)
        num_bytes = estimate_training_memory(sized, layout).total_bytes
        if num_bytes >= usable_bytes(device):
            break
        largest_fitting = sized, num_bytes
    if largest_fitting is None:
        return None
    sized, num_bytes = largest_fitting
    assert isinstance(sized.device_train_microbatch_size, int)
    slower = step_time(sized, layout, find_hardware(device)).seconds / fastest
    return Prediction(slower, sized.device_train_microbatch_size, num_bytes)


@cache
def run_of(model: str, overlay: str | None = None) -> TrainConfig:
    """Return the configuration of a model, on the devices of an overlay."""
    return load_train_config([model] if overlay is None else [model, overlay]).config


@cache
def fastest_seconds(model: str, overlay: str, count: int) -> float:
    """Return the seconds of a step of the fastest layout that the planner finds for this number of devices."""
    candidates, _ = search_layouts(run_of(model), count, find_hardware(accelerator_named(overlay)))
    return min(candidate.time.seconds for candidate in candidates)


def text_of(name: str, model: str, device_gigabytes: int, choice: Choice, predictions: dict[int, Prediction]) -> str:
    """Return the YAML of a layout, whose comments say what it is for, what it costs, and why it is so."""
    smallest_count, overlay = min(predictions), OVERLAYS[device_gigabytes][-1]
    launcher = "llmfoundry-lite train -n 8"
    if smallest_count > PER_NODE:
        launcher = (
            f"srun -N {smallest_count // PER_NODE} --ntasks-per-node {PER_NODE} python -m llmfoundry_lite.launch_train"
        )
    on_more = ", and on more" if len(predictions) > 1 else ""
    lines = [
        f"# {model.upper()} on {smallest_count} {DEVICES[device_gigabytes]}{on_more}. "
        "Use it on top of the run and the devices' overlay.",
        f"# {launcher} {model} {overlay} {name}",
        "#",
    ]

    if smallest_count == fewest_devices(model, device_gigabytes):
        num_parameters = three_digits(count_parameters(run_of(model).model) / 1e9)
        lines.append(
            "# For the smallest of 8, 64 and 512 devices that hold 16 bytes for each of "
            f"{num_parameters} billion parameters."
        )
    lines += [prediction.line(count) for count, prediction in predictions.items()]

    # Say where the copies of the model are.
    devices_per_copy = choice.shard * choice.tensor * choice.stages
    copies = "in each node" if devices_per_copy == PER_NODE else f"on every {devices_per_copy} devices"
    if devices_per_copy < PER_NODE:
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
