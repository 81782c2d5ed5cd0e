"""Predict Frontier's runs (arXiv 2312.12705) of 22, 175 and 1,000 billion parameters, beside what was published.

    python -m benchmarks frontier --out results

The planner predicts; nothing is measured. One table has memory and rate of each model, the other strong scaling with
8,000 samples in a batch. `published.py` uses `predict` for its table of papers.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmfoundry_lite.config.layout import layout_of
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.models.flops import count_parameters
from llmfoundry_machines.bench import frame
from llmfoundry_planner.plan.step import accelerator_named, find_hardware, step_time

DEVICE, PER_NODE, BATCH_SIZE = "MI250X", 8, 8000
LAYOUTS = {"mpt-22b": (2, 4, 64), "mpt-175b": (4, 16, 1024), "mpt-1t": (8, 64, 1024)}
"""Model -> tensor parallel degree, pipeline stages, devices. The paper does not give the layout of 22B; this one is the
planner's fastest with ZERO_1."""
PUBLISHED = {"mpt-22b": 73.5, "mpt-175b": 69.2, "mpt-1t": 61.2}
"""TFLOP/s of a device, which is half a card."""
# Numbers of devices in the strong scaling.
COUNTS = {"mpt-175b": (128, 256, 512, 1024), "mpt-1t": (512, 1024, 2048, 3072)}
LEFT = {"mpt-175b": 0.8993, "mpt-1t": 0.8705}
"""Published scaling efficiency: a device's rate on the last of COUNTS, as a share of its rate on the first."""
BYTES = 14
"""State of a parameter as the paper counts it, with only one of Adam's two moments."""
RATES: list[frame.Column] = [
    ("model", "{model}"),
    ("devices", "{num_devices:,}"),
    ("parts of a layer", "{tensor}"),
    ("stages", "{stages}"),
    ("state, TB", "{state_tb:.2f}"),
    ("TFLOP/s, predicted", "{predicted:.1f}"),
    ("published", "{published:.1f}"),
    ("difference", "{difference:+.1%}"),
]
SCALING: list[frame.Column] = [
    ("model", "{model}"),
    ("devices", "{num_devices:,}"),
    ("samples", "{batch_size:,}"),
    ("TFLOP/s, predicted", "{predicted:.1f}"),
    ("left, predicted", "{left:.1%}"),
    ("published", "{published:.1%}"),
    ("difference, points", "{points:+.1f}"),
]


def run(out: Path | None = None) -> dict[str, Any]:
    """Predict all runs, print both tables, and return the report. `out` gets frontier.json, .md and .png."""
    models, scaling = [], list[dict[str, Any]]()

    # Memory and rate of each model.
    for model, (tensor, stages, num_devices) in LAYOUTS.items():
        row: dict[str, Any] = {"model": model, "num_devices": num_devices, "tensor": tensor, "stages": stages}
        row |= predict(model, num_devices) | {"published": PUBLISHED[model]}
        models.append(row | {"difference": row["predicted"] / row["published"] - 1})

    # Strong scaling: the same batch on more devices. The paper gives the efficiency on the last count.
    for model, counts in COUNTS.items():
        rows = [{"model": model, "num_devices": count} | predict(model, count) for count in counts]
        for row in rows:
            row["left"] = row["predicted"] / rows[0]["predicted"]
        rows[-1] |= {"published": LEFT[model], "points": 100 * (rows[-1]["left"] - LEFT[model])}
        scaling += rows

    report = frame.describe_conditions() | {"models": models, "scaling": scaling}
    rates = f"{DEVICE} (half a card), fp16, one sample a microbatch, blocks computed again; {BYTES} bytes a parameter"
    frame.tell(
        report,
        frame.tabulate(rates, RATES, models, num_keys=4),
        frame.tabulate(f"strong scaling, about {BATCH_SIZE:,} samples a batch", SCALING, scaling, num_keys=2),
        [
            "The predictions are of model FLOPs. The rate of products and the jitter of nodes are fitted to the 175 "
            "billion.",
            "The batch is the largest one that the copies of the model divide.",
            "The paper does not give the layout of its 22 billion; the planner's choice with ZERO_1 was taken.",
        ],
        name="frontier",
        heading="Frontier's runs, predicted",
        command="python -m benchmarks frontier",
        plot=plot,
        out=out,
    )
    return report


def predict(model: str, num_devices: int, batch_size: int = BATCH_SIZE, *changes: str) -> dict[str, Any]:
    """Predict the TFLOP/s of one device, and the terabytes of the model's whole state.

    The layout of the model is that of LAYOUTS; all remaining devices hold copies, which share the optimizer's state.
    The batch is reduced to a multiple of the copies. `changes` are further key=value settings of the run.
    """
    tensor, stages, _ = LAYOUTS[model]
    num_copies = num_devices // (tensor * stages)
    batch_size = batch_size // num_copies * num_copies
    overrides: Sequence[str] = [
        f"global_train_batch_size={batch_size}",
        "device_train_microbatch_size=1",
        "precision=amp_fp16",
        "fsdp_config.sharding_strategy=ZERO_1",
        f"tp_config.tensor_parallel_degree={tensor}",
        f"pp_config.pipeline_parallel_degree={stages}",
    ]

    config = load_train_config([model, *overrides, *changes]).config
    layout, device = layout_of(config, num_devices, PER_NODE), accelerator_named(DEVICE)
    mfu = step_time(config, layout, find_hardware(device)).mfu(config, layout, device)
    return {
        "batch_size": batch_size,
        "predicted": mfu * device.peak_teraflops["fp16"],
        "state_tb": BYTES * count_parameters(config.model) / 1e12,
    }


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw each model's rate beside the published one (left), and the scaling efficiency on more devices (right)."""
    with frame.drawn(path, 2, (10, 3.8), f"Frontier, {DEVICE}: predicted, beside published") as (
        rate_axes,
        scaling_axes,
    ):
        # Left: two bars for each model, side by side.
        for shift, key in ((-0.2, "predicted"), (0.2, "published")):
            positions = [index + shift for index in range(len(report["models"]))]
            rate_axes.bar(positions, [row[key] for row in report["models"]], 0.4, label=key)
        rate_axes.set_xticks(range(len(report["models"])), [row["model"] for row in report["models"]])
        rate_axes.set_ylabel("TFLOP/s of a device")
        rate_axes.spines[["top", "right"]].set_visible(False)

        # Right: only the last count has a published figure.
        for model, colour in zip(COUNTS, ("#4c72b0", "#dd8452"), strict=True):
            rows = [row for row in report["scaling"] if row["model"] == model]
            counts = [row["num_devices"] for row in rows]
            scaling_axes.plot(
                counts, [100 * row["left"] for row in rows], "o-", color=colour, label=f"{model}, predicted"
            )
            scaling_axes.plot(
                counts[-1:], [100 * LEFT[model]], "s", mfc="none", color=colour, label=f"{model}, published"
            )

        ticks = sorted({row["num_devices"] for row in report["scaling"]})
        frame.label_axes(scaling_axes, ticks, "devices", "efficiency, %", from_zero=False)
        scaling_axes.set_ylim(80, 101)
        for axes in (rate_axes, scaling_axes):
            axes.legend(frameon=False, fontsize=8)
