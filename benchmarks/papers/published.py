"""Compare the planner with published figures: rows that it was fitted to, rows held out, and figures of papers.

    python -m benchmarks published --out benchmarks/results
    python -m benchmarks published --fit        fits the constants of plan/rates.py anew: 1 minute

LLM Foundry's README publishes the throughput of MPT on A100 and H100. A row of that table is held out by a hash of what
was run; the other half fits the planner's constants. No cell is written by hand: misses are printed beside hits.

The order of this file: the published rows, the benchmark, the fit and its errors, the errors after `plan --calibrate`,
the papers, and the tables.
"""

import hashlib
import itertools
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

from benchmarks.papers import frontier
from llmfoundry_lite.config.layout import Layout, layout_of
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.schema import TrainConfig, as_dict
from llmfoundry_lite.files import write_atomically
from llmfoundry_lite.hardware import ACCELERATORS, REPORT_SCHEMA
from llmfoundry_lite.tables import Table
from llmfoundry_machines.bench.frame import describe_conditions, measured_table, tell
from llmfoundry_planner.plan import rates, step
from llmfoundry_planner.plan.calibrate import calibrate, minimise
from llmfoundry_planner.plan.network import NODES
from llmfoundry_planner.plan.step import Hardware, find_hardware, step_time

TABLE = """
H100-80GB 70b recomputed: 2048x256x8x1=1035 2048x128x8x1=1058 2048x32x2x16=882
H100-80GB 30b recomputed: 2048x256x8x1=2148 2048x128x8x1=2199 8192x8x1x21=1384 2048x32x14x3=2308 2048x16x10x3=2263
  1024x8x6x21=2084
H100-80GB 13b recomputed: 2048x256x16x1=4989 2048x128x16x1=5080 32768x8x1x3=1976 4096x8x10x3=4717
H100-80GB 7b plain: 2048x256x6x1=10119 2048x128x6x1=10475 2048x8x6x1=10643
H100-80GB 3b grad-op: 2048x256x8x1=22772 2048x128x8x1=23422
H100-80GB 1b grad-op: 2048x256x12x1=42555 2048x128x12x1=44123
H100-80GB 13b plain: 2048x64x2x1=4800 2048x16x2x1=4767 2048x8x2x1=4792
H100-80GB 7b recomputed: 65536x8x1x2=1956 32768x8x2x2=3318 4096x8x16x2=8611
H100-80GB 3b recomputed: 65536x8x1x2=3262 32768x8x3x6=5873
H100-80GB 3b plain: 8192x8x3x6=16578 4096x8x5x6=20964 2048x32x6x3=23021 2048x16x10x3=24142 512x8x40x6=27965
H100-80GB 1b recomputed: 65536x8x1x2=5506
H100-80GB 1b plain: 16384x8x2x4=19649 8192x8x3x4=29157 2048x64x20x1=44402 2048x32x20x1=45130 2048x8x14x1=45455
  1024x8x18x4=48910
H100-80GB 760m plain: 32768x8x1x2=16291 16384x8x3x2=27815 4096x8x12x2=55459 2048x32x24x1=67971 2048x8x24x2=63147
  1024x8x48x2=78581
H100-80GB 3b recomputed fp8: 32768x8x3x6=5856
H100-80GB 3b fp8: 8192x8x3x6=19146 512x8x40x6=36527
H100-80GB 1b fp8: 32768x8x1x4=12580 512x8x56x4=70315
A100-80GB 70b recomputed pure: 2048x64x8x4=410
A100-80GB 30b recomputed: 8192x8x1x21=574 4096x8x1x21=814 1024x8x6x21=946 512x8x12x21=967
A100-80GB 13b recomputed: 16384x8x3x3=1431 8192x8x5x3=1795 1024x8x40x3=2330
A100-80GB 13b plain: 2048x8x2x3=2262
A100-80GB 7b recomputed: 32768x8x2x2=1672 16384x8x4x2=2453 4096x8x16x2=3684
A100-80GB 7b plain: 2048x8x6x2=4641
A100-80GB 3b recomputed: 65536x8x1x2=1767 32768x8x3x6=3029
A100-80GB 3b plain: 8192x8x3x6=7695 4096x8x5x6=9457 1024x8x20x6=11580 512x8x40x6=12127
A100-80GB 1b plain: 32768x8x1x4=6275 16384x8x2x4=9956 4096x8x7x4=17807 2048x8x14x4=20513 512x8x56x4=23148
A100-80GB 760m recomputed: 65536x8x1x2=4143
A100-80GB 760m plain: 16384x8x3x2=14274 8192x8x6x2=20933 2048x8x24x2=32434 1024x8x48x2=29765
A100-80GB 350m plain: 65536x8x1x2=7524 32768x8x2x2=13652 8192x8x8x2=36569 4096x8x16x2=49555 1024x8x64x2=64813
  512x8x128x2=69330
A100-80GB 125m plain: 32768x8x2x2=36407 16384x8x4x2=60040 4096x8x16x2=118396 2048x8x40x2=142830 1024x8x64x2=156468
  512x8x128x2=165681
A100-40GB 70b recomputed pure: 2048x64x2x1=276
A100-40GB 30b recomputed pure: 2048x128x6x1=865
A100-40GB 13b recomputed pure: 8192x8x1x16=1407 4096x8x2x16=1603 2048x64x16x1=1976 2048x32x14x1=1998 2048x8x4x16=1668
  1024x8x8x16=1727
A100-40GB 7b recomputed pure: 16384x8x1x4=2249 8192x8x3x4=2887 2048x128x18x1=3623 2048x64x18x1=3665 2048x16x16x1=3645
  2048x8x12x4=3679 512x8x48x4=3895
A100-40GB 3b recomputed pure: 32768x8x1x4=2955
A100-40GB 3b pure: 8192x8x1x8=7149 4096x8x2x8=8777 2048x64x6x1=9736 2048x32x6x1=9914 2048x8x5x8=10065 1024x8x10x8=10731
A100-40GB 1b recomputed pure: 32768x8x1x4=5095
A100-40GB 1b pure: 16384x8x1x8=9715 4096x8x4x8=16856 2048x128x10x1=18647 2048x32x10x1=15555 2048x16x8x1=19085
  1024x8x16x8=20959 512x8x32x8=21782
A100-40GB 760m pure: 16384x8x1x4=13914 8192x8x3x4=20106 2048x128x12x1=28940 2048x64x12x1=29344 2048x16x12x1=29607
  2048x8x12x4=30173 512x8x48x4=34938
A100-40GB 350m pure: 32768x8x1x4=13416 8192x8x4x4=34933 4096x8x8x4=46833 2048x64x18x1=52689 2048x32x18x1=53811
  2048x8x16x4=55995 1024x8x32x4=62523
A100-40GB 125m pure: 32768x8x1x4=32651 16384x8x2x3=55484 4096x8x13x3=115162 2048x128x26x1=123936 2048x32x26x1=127122
  2048x16x26x1=130535 1024x8x52x3=148289 512x8x104x3=156735
"""
"""Before the colon: device, model, and how it was run (a key of WAYS). Behind it, for each row: sequence length x
devices x microbatch size x number of microbatches = tokens per second of one device. For example, `2048x256x8x1=1035`
is a sequence of 2048 on 256 devices with one microbatch of 8, at 1,035 tokens per second and device.

Source: mosaicml/llm-foundry, scripts/train/benchmarking/README.md at commit 8c8dd48; two of every three rows."""

# How a row was run -> arguments of a run of ours.
WAYS = {
    "recomputed": ["fsdp_config.activation_checkpointing=true"],
    "pure": ["fsdp_config.mixed_precision=PURE"],
    "grad-op": ["fsdp_config.sharding_strategy=SHARD_GRAD_OP"],
    "fp8": [],  # only the products are in fp8; the memory is that of bf16
    "plain": [],
}
# A size for which no YAML ships -> arguments that make it from MPT-1B.
WITHOUT_FILE = {"760m": ["model.d_model=1536", "model.n_layers=24", "model.n_heads=12"]}
NODE_SIZE = 8
TORCH_NAMES = {
    "A100-40GB": "NVIDIA A100-SXM4-40GB",
    "A100-80GB": "NVIDIA A100-SXM4-80GB",
    "H100-80GB": "NVIDIA H100 80GB HBM3",
}


class Published(NamedTuple):
    """One row of the table: what was run, as arguments of a run of ours, and how fast it was."""

    device: str
    model: str
    num_devices: int
    arguments: list[str]
    """Arguments of `llmfoundry-lite train` for the same run."""
    tokens_per_second: int
    """Rate of one device."""
    is_fp8: bool
    is_held_out: bool
    """Whether the row is left out of the fit, and used to measure its error."""

    @property
    def is_plain_7b(self) -> bool:
        """Whether this is MPT-7B with its usual sequence length."""
        return self.model == "7b" and "max_seq_len=2048" in self.arguments

    @property
    def name(self) -> str:
        """Device, number of devices and arguments, to identify the row in a test's message."""
        return " ".join([self.device, str(self.num_devices), *self.arguments])


def published() -> list[Published]:
    """Parse TABLE into rows, with the arguments of a run of ours."""
    rows = []
    for line in TABLE.strip().replace("\n  ", " ").splitlines():
        description, row_texts = line.split(": ")
        device, model, *way_names = description.split()
        for row_text in row_texts.split():
            sizes, rate = row_text.split("=")
            seq_len, num_devices, microbatch_size, num_microbatches = map(int, sizes.split("x"))
            arguments = [
                f"mpt-{'1b' if model in WITHOUT_FILE else model}",
                *WITHOUT_FILE.get(model, ()),
                *(
                    "fsdp_config={sharding_strategy: FULL_SHARD, reduce_every_microbatch: true}",
                    "fsdp_config.activation_checkpointing=false",
                    "precision=amp_bf16",
                    "model.vocab_size=50368",
                    "model.no_bias=false",
                    "train_loader.num_workers=8",  # as LLM Foundry's YAMLs have it
                ),
                *(f"max_seq_len={seq_len}", f"model.max_seq_len={seq_len}"),
                f"device_train_microbatch_size={microbatch_size}",
                f"global_train_batch_size={num_devices * microbatch_size * num_microbatches}",
                *(override for way in way_names for override in WAYS[way]),
            ]

            # The hash depends on what was run alone, so that correcting a rate does not move a row to the other half.
            is_held_out = hashlib.sha256(f"{description} {sizes}".encode()).digest()[0] % 2 == 1
            rows.append(Published(device, model, num_devices, arguments, int(rate), "fp8" in way_names, is_held_out))
    return rows


class Row(NamedTuple):
    """A published row together with what the planner needs to predict it."""

    published: Published
    config: TrainConfig
    layout: Layout
    hardware: Hardware

    def error(self, hardware: Hardware | None = None) -> float:
        """Return the relative error of the prediction: predicted rate / published rate - 1.

        `hardware` replaces the row's own, for example with rates that are being fitted.
        """
        predicted_tokens_per_second = step_time(self.config, self.layout, hardware or self.hardware).tokens_per_second
        return predicted_tokens_per_second / self.published.num_devices / self.published.tokens_per_second - 1


def read_rows() -> list[Row]:
    """Return the rows in bf16, ready to be predicted. The planner does not predict the rate of fp8."""
    rows = []
    for published_row in published():
        if not published_row.is_fp8:
            config = load_train_config(published_row.arguments).config
            layout = layout_of(config, published_row.num_devices, NODE_SIZE)
            rows.append(
                Row(published_row, config, layout, find_hardware(ACCELERATORS[published_row.device], published=True))
            )
    return rows


def run(*, fit: bool = False, out: Path | None = None) -> dict[str, Any]:
    """Predict every published figure, print the tables, and return the report, which `out` also gets.

    With `fit`, the constants are fitted first and printed. They are not used for the predictions: those come from
    plan/rates.py. `passed` is true if at least 80 % of each family's held-out rows are inside the interval that `plan`
    prints.
    """
    rows = read_rows()
    report: dict[str, Any] = describe_conditions() | {
        "rows": len(rows),
        "held_out": sum(row.published.is_held_out for row in rows),
    }
    if fit:
        report["fitted"] = {name: round(value, 4) for name, value in fit_rates(rows).items()}
        print("\n".join(f"{name} {value}" for name, value in report["fitted"].items()))

    # Predict: the held-out rows, rows with more devices than were measured, and the papers.
    report["errors"] = list(errors_by_kind(rows))
    report["far"] = list(errors_on_more_devices(rows))
    report["papers"] = [list(figure) for figure in figures()]
    report["passed"] = all(kind["within"] >= 0.8 for kind in report["errors"] if kind["kind"] in FAMILIES)

    parts = HOW, table_of_errors(report), FAR, table_of_far(report), PAPERS, table_of_papers(report)
    heading, command = "The planner, compared with published figures", "python -m benchmarks published"
    tell(report, *parts, name="published", heading=heading, command=command, out=out)
    return report


HOW = (
    "LLM Foundry's published throughput of MPT in bf16. Half of the rows, chosen by a hash, fitted the constants of "
    "`plan/rates.py`. The errors below are of the other half. `within`: the share of rows inside the interval that "
    "`plan` prints."
)
FAR = (
    "What `plan --calibrate` predicts after measuring a few devices. Some published rows are written as `bench "
    "scaling --out` writes its own; the planner takes its rates from that file and predicts the rows with more "
    "devices. `interval`: the interval that `plan` prints for the largest number of devices, as multiples of the "
    "predicted rate. `within`: the share of rows inside their interval. Constants that apply to all devices stay "
    "those that were fitted to half of all rows."
)
PAPERS = (
    "Figures of papers. A hit is within 5 %, or 5 points if the figure is a share. `fitted`: a constant was "
    "chosen by this figure, so it proves nothing. If a paper does not give a layout, the row says which one was "
    "taken. The rates are those of 2023's software, except on H200, which has the rates measured on one H100 in "
    "2026. KempnerForge's tensor parallelism is left out, because it gathers whole logits, unlike this package's."
)

# ------------------------------------------------------------------------------------------------------- the fit

FAMILIES = ("A100", "H100")
# Constants of plan/rates.py that apply to all devices and are fitted.
FITTED = ("STREAM_BYTES", "LOGIT_BYTES", "OVERLAP_COST", "JITTER")
LARGEST_ERROR = 0.25
"""A larger error counts as this much in the fit, because a few rows of the table differ from their neighbours."""


def fit_rates(rows: Sequence[Row]) -> dict[str, float]:
    """Fit the shares of peak of each family, and the constants of all devices, to the rows that are not held out.

    The search starts from the values in plan/rates.py. Returns constant -> fitted value, with keys such as "JITTER" and
    "A100.products".
    """
    rows = [row for row in rows if not row.published.is_held_out]
    start = {name: float(getattr(rates, name)) for name in FITTED}
    for family in FAMILIES:
        efficiency = rates.PUBLISHED[family]
        start |= {f"{family}.products": efficiency.products, f"{family}.attention": efficiency.attention}
    return minimise(start, partial(mean_error, rows))


def mean_error(rows: Sequence[Row], values: Mapping[str, float]) -> float:
    """Return the mean absolute error of the rows, in logarithms, if the planner had these constants.

    The fit minimises it. `values` has the keys that `fit_rates` returns. The constants of all devices are patched into
    the planner meanwhile.
    """
    constants = {name: values[name] for name in FITTED if name in values and hasattr(step, name)}

    # Constants that `step` does not use, such as the jitter, are part of the hardware.
    with patch.dict(vars(step), constants):
        errors = [math.log1p(row.error(with_values(row.hardware, values))) for row in rows]
    limited_errors = [min(abs(error), LARGEST_ERROR) for error in errors]
    return sum(limited_errors) / len(errors)


def with_values(hardware: Hardware, values: Mapping[str, float]) -> Hardware:
    """Return the hardware with the fitted shares of peak of its family, and the fitted jitter of its node."""
    family = hardware.accelerator.name.split("-")[0]
    products, attention = values[f"{family}.products"], values[f"{family}.attention"]
    efficiency = replace(hardware.efficiency, products=products, attention=attention)
    node = replace(hardware.node, jitter=values.get("JITTER", hardware.node.jitter))
    return replace(hardware, efficiency=efficiency, node=node)


def kinds(row: Row) -> Iterator[str]:
    """Yield the groups that a row's error counts towards: family, device, model size, number of devices."""
    published_row = row.published
    yield published_row.device.split("-")[0]
    yield published_row.device
    yield "up to 3b" if published_row.model in ("125m", "350m", "760m", "1b", "3b") else "7b and more"
    yield "up to 8 devices" if published_row.num_devices <= NODE_SIZE else "more than 8 devices"


def errors_by_kind(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield the errors of the held-out rows for each group of `kinds`: median, 90th percentile, largest.

    `within` is the share of the rows whose published rate is inside the interval that `plan` prints.
    """
    errors_of_kinds: dict[str, list[tuple[float, bool]]] = {}
    for row in rows:
        if row.published.is_held_out:
            for kind in kinds(row):
                errors_of_kinds.setdefault(kind, []).append((row.error(), is_within(row, row.hardware)))
    for kind, errors_and_hits in sorted(errors_of_kinds.items()):
        errors = sorted(abs(error) for error, _ in errors_and_hits)
        yield {
            "kind": kind,
            "rows": len(errors),
            "median": median(errors),
            "ninth of ten": errors[math.ceil(0.9 * len(errors)) - 1],
            "largest": errors[-1],
            "within": sum(is_inside for _, is_inside in errors_and_hits) / len(errors_and_hits),
        }


# Which published rows `plan --calibrate` is given as if they had been measured.
CALIBRATIONS: Mapping[str, Callable[[Published], bool]] = {
    "MPT-7B on 8 devices, one row": lambda row: row.num_devices == NODE_SIZE and row.is_plain_7b,
    "8 devices": lambda row: row.num_devices == NODE_SIZE,
    "8 to 64 devices": lambda row: row.num_devices <= 64,
}


def errors_on_more_devices(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield what `plan --calibrate` predicts for many devices after it has measured a few.

    For each device and each of CALIBRATIONS, the rows with few devices calibrate the planner, and the errors are those
    of the rows with more devices. Cases with fewer than two such rows are left out.
    """
    for device, (calibration, is_measured) in itertools.product(TORCH_NAMES, CALIBRATIONS.items()):
        rows_of_device = [row for row in rows if row.published.device == device]
        measured_rows = [row for row in rows_of_device if is_measured(row.published)]
        max_measured_devices = max((row.published.num_devices for row in measured_rows), default=0)
        predicted_rows = [row for row in rows_of_device if row.published.num_devices > max_measured_devices]
        if not measured_rows or len(predicted_rows) < 2:
            continue

        # Calibrate as a user would, from a file that `bench scaling` has written.
        with tempfile.TemporaryDirectory() as folder:
            hardware = calibrate(measured_rows[0].hardware, [write_report(measured_rows, Path(folder))], {})
        errors_and_hits = [(abs(row.error(hardware)), is_within(row, hardware)) for row in predicted_rows]

        device_counts = sorted({row.published.num_devices for row in predicted_rows})
        low, high = hardware.interval(device_counts[-1])
        yield {
            "device": device,
            "measured": calibration,
            "steps": len(measured_rows),
            "predicted": " to ".join(
                str(device_count) for device_count in dict.fromkeys((device_counts[0], device_counts[-1]))
            ),
            "rows": len(predicted_rows),
            "median": median(error for error, _ in errors_and_hits),
            "largest": max(error for error, _ in errors_and_hits),
            "interval": f"{low:.2f} to {high:.2f}",
            "within": sum(is_inside for _, is_inside in errors_and_hits) / len(errors_and_hits),
        }


def write_report(rows: Sequence[Row], folder: Path) -> Path:
    """Write published rows to a file in the form that `bench scaling --out` writes, and return its path."""
    steps = []
    for row in rows:
        published_row, batch_tokens = row.published, row.config.global_train_batch_size * row.config.max_seq_len
        seconds = batch_tokens / published_row.tokens_per_second / published_row.num_devices
        steps.append({"num_devices": published_row.num_devices, "seconds": seconds, "config": as_dict(row.config)})
    report = {"schema": REPORT_SCHEMA, "bench": "scaling", "device_name": TORCH_NAMES[rows[0].published.device]}
    path = folder / "scaling.json"
    write_atomically(path, json.dumps(report | {"rows": steps}))
    return path


def is_within(row: Row, hardware: Hardware) -> bool:
    """Return whether the published rate is inside the interval that `plan` prints around its prediction."""
    low, high = hardware.interval(row.published.num_devices)
    return low <= 1 / (1 + row.error(hardware)) <= high


# ---------------------------------------------------------------------------------------------------- the papers


class Figure(NamedTuple):
    """A figure of a paper, and what the planner predicts for it."""

    about: str
    source: str
    published: float
    predicted: float
    unit: str
    is_fitted: bool = False

    @property
    def verdict(self) -> str:
        """One of hit (within 5 %, or 5 points for a share), MISS, and fitted (a constant was chosen by this figure)."""
        if self.is_fitted:
            return "fitted"
        one_percent = 1 if self.unit == "%" else self.published / 100
        is_hit = abs(self.predicted - self.published) <= 5 * one_percent
        return "hit" if is_hit else "MISS"


FRONTIER, MOSAIC, ALCF = "arXiv 2312.12705", "MosaicML 2023", "arXiv 2310.04607"
FMS, KEMPNER = "fms-fsdp at 0d31998", "KempnerForge, 2026-04-05"
MI250_CARD_PEAK = 362
"""TFLOP/s in 16 bits of a card, which is two devices."""


def figures() -> Iterator[Figure]:
    """Yield the figures of all papers, in the order of the table."""

    # Frontier. The first two figures chose the rate of products and the jitter of its nodes.
    teraflops_by_devices = {count: frontier.predict("mpt-175b", count)["predicted"] for count in (128, 1024)}
    yield Figure("Frontier, 175B on 1,024 devices", FRONTIER, 69.2, teraflops_by_devices[1024], "TFLOP/s", True)
    yield Figure(
        "Frontier, 175B: left of 128 devices' rate on 1,024",
        FRONTIER,
        89.93,
        share(teraflops_by_devices, 1024, 128),
        "%",
        True,
    )

    plain = frontier.predict("mpt-175b", 1024, frontier.BATCH_SIZE, "model.attn_config.attn_impl=reference")
    about = "Frontier: FlashAttention-2 gains over plain attention (taken: 175B on 1,024 devices)"
    yield Figure(about, FRONTIER, 30, 100 * teraflops_by_devices[1024] / plain["predicted"] - 100, "%")
    teraflops_by_devices = {count: frontier.predict("mpt-1t", count)["predicted"] for count in (512, 1024, 3072)}
    yield Figure("Frontier, 1T on 1,024 devices", FRONTIER, 61.2, teraflops_by_devices[1024], "TFLOP/s")
    yield Figure(
        "Frontier, 1T: left of 512 devices' rate on 3,072", FRONTIER, 87.05, share(teraflops_by_devices, 3072, 512), "%"
    )
    weak_scaling = {count: frontier.predict("mpt-1t", count, count * 25 // 8)["predicted"] for count in (1024, 3072)}
    yield Figure(
        "Frontier, 1T: weak scaling from 1,024 devices to 3,072", FRONTIER, 100, share(weak_scaling, 3072, 1024), "%"
    )
    small = frontier.predict("mpt-22b", 64)["predicted"]
    yield Figure("Frontier, 22B (layout by the planner: 2 parts, 4 stages)", FRONTIER, 73.5, small, "TFLOP/s")

    teraflops_by_stages = {count: staged(count) for count in (2, 16)}
    about = "Frontier, III.4: left with 16 stages of 2 stages' rate, 8 microbatches a stage (22B, 8 parts)"
    yield Figure(about, FRONTIER, 100, share(teraflops_by_stages, 16, 2), "%")

    # MosaicML's MI250.
    rate_by_cards = {count: mi250_card(count) for count in (4, 128)}
    yield Figure("MPT-7B on 4 MI250, of a card", MOSAIC, 166, rate_by_cards[4], "TFLOP/s", True)
    yield Figure("MPT-7B on 128 MI250, of a card", MOSAIC, 159, rate_by_cards[128], "TFLOP/s", True)
    for device, expected in (("A100-40GB", 85), ("A100-80GB", 77)):
        yield Figure(f"MI250 (a card) over {device}, mean of MPT sizes", MOSAIC, expected, over(device), "%")

    # GPT-2 XL at ALCF.
    rate_by_devices = {count: gpt2_xl(count, microbatch_size=16) for count in (4, 64)}
    about = "GPT-2 XL, A100: left of 4 devices' rate on 64 (taken: 16 samples at a time)"
    yield Figure(about, ALCF, 75.8, share(rate_by_devices, 64, 4), "%")
    for few_microbatches, many_microbatches in ((1, 4), (1, 32)):
        gain = gpt2_xl(64, num_microbatches=many_microbatches) / gpt2_xl(64, num_microbatches=few_microbatches)
        yield Figure(
            f"GPT-2 XL, 64 A100: {few_microbatches} to {many_microbatches} microbatches, times the rate",
            ALCF,
            1.74,
            gain,
            "x",
        )
    rate_by_cards = {count: gpt2_xl(2 * count, microbatch_size=8, device="MI250") for count in (1, 4)}
    about = "GPT-2 XL, MI250: left of 1 card's rate on 4 (taken: 8 samples at a time)"
    yield Figure(about, ALCF, 80, share(rate_by_cards, 4, 1), "%")
    gain = gpt2_xl(8, num_microbatches=4, device="MI250") / gpt2_xl(8, device="MI250")
    yield Figure("GPT-2 XL, 4 MI250: 1 to 4 microbatches, times the rate", ALCF, 1.2, gain, "x")
    yield from newer_figures()


def share(rate: Mapping[int, float], many: int, few: int) -> float:
    """Return a device's rate on `many` devices in % of its rate on `few`."""
    return 100 * rate[many] / rate[few]


def shape(d_model: int, n_layers: int, n_heads: int, vocab_size: int, seq_len: int = 2048) -> list[str]:
    """Return the arguments of a run whose model has these sizes. Everything else is as in MPT-1B."""
    sizes = f"d_model: {d_model}, n_layers: {n_layers}, n_heads: {n_heads}, vocab_size: {vocab_size}"
    return ["mpt-1b", f"model={{name: mpt_causal_lm, {sizes}, max_seq_len: {seq_len}}}", f"max_seq_len={seq_len}"]


def staged(num_stages: int) -> float:
    """Return the TFLOP/s of a device that trains one copy of 22B in this many stages, 8 microbatches for each."""
    config = load_train_config(
        [
            *("mpt-22b", f"global_train_batch_size={8 * num_stages}", "device_train_microbatch_size=1"),
            *("precision=amp_fp16", f"pp_config.pipeline_parallel_degree={num_stages}"),
            *("tp_config.tensor_parallel_degree=8", "fsdp_config.sharding_strategy=ZERO_1"),
        ]
    ).config
    return teraflops(config, 8 * num_stages, "MI250X", 191.5)


def teraflops(config: TrainConfig, num_devices: int, device: str, peak: float) -> float:
    """Predict the TFLOP/s of a device or card whose peak is `peak` TFLOP/s, counting the model's FLOPs."""
    layout, accelerator = layout_of(config, num_devices, NODE_SIZE), ACCELERATORS[device]
    return peak * step_time(config, layout, find_hardware(accelerator, published=True)).mfu(config, layout, accelerator)


def mi250_card(num_cards: int) -> float:
    """Return the TFLOP/s of a card that trains MPT-7B with FULL_SHARD, in batches of 1,536 samples."""
    config = load_train_config(
        [
            *("mpt-7b", "global_train_batch_size=1536", "device_train_microbatch_size=6", "train_loader.num_workers=8"),
            "fsdp_config={activation_checkpointing: false, reduce_every_microbatch: true}",
        ]
    ).config
    return teraflops(config, 2 * num_cards, "MI250", MI250_CARD_PEAK)


def over(device: str) -> float:
    """Return the rate of four MI250 cards in % of the rate of four of these devices, the mean of four MPT sizes."""
    percentages = []
    for size, microbatch_size in (("1b", 4), ("3b", 2), ("7b", 2), ("13b", 1)):
        config = load_train_config(
            [
                *(f"mpt-{size}", "global_train_batch_size=512", f"device_train_microbatch_size={microbatch_size}"),
                f"fsdp_config.activation_checkpointing={str(size == '13b').lower()}",
            ]
        ).config
        cards, others = (
            step_time(
                config, layout_of(config, count, NODE_SIZE), find_hardware(ACCELERATORS[name], published=True)
            ).tokens_per_second
            for name, count in (("MI250", 8), (device, 4))
        )
        percentages.append(100 * cards / others)
    return sum(percentages) / len(percentages)


POLARIS = replace(
    NODES["A100-40GB"],
    num_devices=4,
    adapter_bytes_per_second=50e9,
    jitter=rates.SLINGSHOT_JITTER,
    source="ALCF Polaris: four A100, two Slingshot adapters of 200 Gbit/s; Frontier's jitter",
)


def gpt2_xl(
    num_devices: int, *, microbatch_size: int = 1, num_microbatches: int = 1, device: str = "A100-40GB"
) -> float:
    """Return the tokens per second of a device that trains GPT-2 XL, with sequences of 1,024.

    Everything is in 16 bits, with ZeRO stage 1, and gradients are reduced once at the end of a batch.
    """
    batch_size = num_devices * microbatch_size * num_microbatches
    config = load_train_config(
        [
            *shape(1600, 48, 25, 50257, seq_len=1024),
            *(f"global_train_batch_size={batch_size}", "precision=amp_bf16"),
            f"device_train_microbatch_size={microbatch_size}",
            "fsdp_config={sharding_strategy: ZERO_1, mixed_precision: PURE, reduce_every_microbatch: false}",
        ]
    ).config
    node = POLARIS if device == "A100-40GB" else NODES[device]
    hardware = replace(find_hardware(ACCELERATORS[device], published=True), node=node)
    layout = layout_of(config, num_devices, node.num_devices)
    return step_time(config, layout, hardware).tokens_per_second / num_devices


LLAMA = {
    "2 7B": (shape(4096, 32, 32, 32000, seq_len=4096), 11008, 32),
    "3 8B": (shape(4096, 32, 32, 128256, seq_len=4096), 14336, 8),
    "3 15B": (shape(5120, 40, 40, 128256, seq_len=4096), 17920, 8),
}
"""Size -> arguments for its shape, width of the feed-forward layer, number of key and value heads."""


def newer_figures() -> Iterator[Figure]:
    """Yield figures measured with software newer than that of 2023, in thousands of tokens per second in all."""
    hybrid = "fsdp_config={sharding_strategy: HYBRID_SHARD, mixed_precision: PURE}"
    about = "Llama 2 7B on 128 A100-80GB, not compiled, software of 2024"
    a100 = find_hardware(ACCELERATORS["A100-80GB"])
    yield Figure(about, FMS, 128 * 3.760, llama("2 7B", 128, 2, 1, a100, hybrid), "k tokens/s")

    # KempnerForge's nodes have four H200.
    h200 = find_hardware(ACCELERATORS["H200"])
    h200 = replace(h200, node=replace(h200.node, num_devices=4, adapter_bytes_per_second=200e9))
    recomputed = (
        "fsdp_config={sharding_strategy: FULL_SHARD, activation_checkpointing: true, reduce_every_microbatch: false}"
    )
    for size, num_devices, microbatch_size, num_microbatches, published in (
        ("3 8B", 1, 2, 4, 10.471),
        ("3 8B", 2, 2, 4, 18.728),
        ("3 8B", 4, 4, 2, 38.983),
        ("3 15B", 8, 4, 4, 35.405),
    ):
        compiled = ["compile_config={}"] if num_devices <= 4 else []
        conditions = "compiled" if compiled else "not compiled (taken: 400 Gbit/s for each device)"
        predicted = llama(size, num_devices, microbatch_size, num_microbatches, h200, recomputed, *compiled)
        yield Figure(f"Llama {size} on {num_devices} H200, {conditions}", KEMPNER, published, predicted, "k tokens/s")


def llama(
    size: str, num_devices: int, microbatch_size: int, num_microbatches: int, hardware: Hardware, *arguments: str
) -> float:
    """Return the thousands of tokens per second of all devices that train this Llama, with sequences of 4,096."""
    shape_arguments, ffn_width, num_kv_heads = LLAMA[size]
    config = load_train_config(
        [
            *shape_arguments,
            "model.tie_word_embeddings=false",
            f"model.ffn_config={{ffn_type: mptglu, ffn_hidden_size: {ffn_width}}}",
            f"model.attn_config={{attn_type: grouped_query_attention, kv_n_heads: {num_kv_heads}}}",
            f"device_train_microbatch_size={microbatch_size}",
            f"global_train_batch_size={num_devices * microbatch_size * num_microbatches}",
            *arguments,
        ]
    ).config
    layout = layout_of(config, num_devices, min(hardware.node.num_devices, num_devices))
    return step_time(config, layout, hardware).tokens_per_second / 1000


# ---------------------------------------------------------------------------------------------------- the tables


def percent(number: float) -> str:
    """Format a share as a percentage."""
    return f"{100 * number:.1f}%"


def table_of_errors(report: dict[str, Any]) -> Table:
    """Return a table of the errors on held-out rows, one row for each group."""
    names = ("median", "ninth of ten", "largest", "within")
    rows = [[kind["kind"], str(kind["rows"]), *(percent(kind[name]) for name in names)] for kind in report["errors"]]
    return measured_table("errors on rows that were held out", ["rows of", "rows", *names], rows)


def table_of_far(report: dict[str, Any]) -> Table:
    """Return a table of the errors on more devices than were measured."""
    columns = ["device", "measured", "steps", "predicted", "rows", "median", "largest", "interval", "within"]
    shares = ("median", "largest", "within")
    rows = [[percent(far[name]) if name in shares else str(far[name]) for name in columns] for far in report["far"]]
    return measured_table("more devices than were measured", columns, rows)


def table_of_papers(report: dict[str, Any]) -> Table:
    """Return a table of the figures of papers."""
    paper_figures = [Figure(*figure) for figure in report["papers"]]
    rows = [
        [
            figure.about,
            figure.source,
            f"{figure.published:.4g} {figure.unit}",
            f"{figure.predicted:.3g} {figure.unit}",
            figure.verdict,
        ]
        for figure in paper_figures
    ]
    return Table("figures of papers", ["what", "source", "published", "predicted", ""], rows)
