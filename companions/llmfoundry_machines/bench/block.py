"""One transformer layer, forward and backward apart: dtypes x batches or lengths x attention implementations.

llmfoundry-lite bench block --batches 8,16,32,64 --out results
llmfoundry-lite bench seqlen --lengths 1024,4096,16384,65536 --out results

GPT-2 XL's layer by default. Rates are of model FLOPs, beside the rate of the layer's own matrix products, measured in
turns with it. `none` is the layer without attention: its projections alone. No data, no optimizer. Several devices
divide the tokens of each sample, as `cp_config` does: rates are per device, times the slowest device's. Points for
which no time was left are named.
"""

import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from llmfoundry_lite import companions
from llmfoundry_lite.config.layout import Layout
from llmfoundry_lite.config.model_schema import AttentionConfig, ModelConfig
from llmfoundry_lite.config.sharding_schema import ContextParallelConfig
from llmfoundry_lite.devices import device_type, keep_freed_memory
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.models.attention import build_mask
from llmfoundry_lite.models.mpt import Block
from llmfoundry_lite.models.products import Linear
from llmfoundry_lite.tables import Table
from llmfoundry_machines.bench import frame
from llmfoundry_machines.bench.steps import measure_on_ranks

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
NONE = "none"
COLUMNS: list[frame.Column] = [
    ("dtype", "{dtype}"),
    ("samples", "{batch_size:,}"),
    ("tokens", "{seq_len:,}"),
    ("devices", "{num_devices:,}"),
    ("attention", "{attention}"),
    ("forward, s", lambda row: show_seconds(row, 0)),
    ("backward, s", lambda row: show_seconds(row, 1)),
    ("forward, TFLOP/s", lambda row: f"{row['forward_flops_per_sec'] / 1e12:.3f}"),
    ("backward, TFLOP/s", lambda row: f"{row['backward_flops_per_sec'] / 1e12:.3f}"),
    ("products, TFLOP/s", lambda row: f"{row['products_flops_per_sec'] / 1e12:.3f}"),
    ("of the products", lambda row: f"{row['flops_per_sec'] / row['products_flops_per_sec']:.1%}"),
]
NUM_KEYS = 5
STYLES = {"fp32": "-", "fp16": ":", "bf16": "--"}


def run(
    name: str,
    points: Sequence[tuple[int, int]],
    dtypes: Sequence[str],
    *,
    d_model: int = 1600,
    n_heads: int = 25,
    implementations: Sequence[str] | None = None,
    devices: Sequence[int] = (1,),
    num_repeats: int = 3,
    minutes: float = 60,
    out: Path | None = None,
) -> dict[str, Any]:
    """Measure `points` (samples, tokens in each) until all is done or `minutes` have passed.

    `name` is block or seqlen, by what the figure has along its axis; `devices` are counts that divide each sample.
    Prints a table, writes NAME.json, .md and .png to `out`, and returns the report. Raises ConfigError for a dtype or
    an implementation that is not there, and for more devices than there are.
    """
    keep_freed_memory()
    implementations = list(implementations or available())
    frame.check_names("--dtypes", dtypes, DTYPES)
    frame.check_names("--attention", implementations, [*available(), NONE])
    if d_model % n_heads:
        raise ConfigError(f"--heads: {n_heads} do not divide a width of {d_model}")
    if device_type() == "cuda" and max(devices) > torch.cuda.device_count():
        raise ConfigError(f"--devices: {max(devices)} given, there are {torch.cuda.device_count()}")
    if max(devices) > 1:
        companions.require("llmfoundry_layouts", f"--devices {max(devices)}")
    cases = []
    for (batch_size, seq_len), dtype, num_devices, implementation in product(
        points, dtypes, devices, [*implementations, NONE]
    ):
        divided = f", {num_devices} devices" if num_devices > 1 else ""
        row = {"dtype": dtype, "batch_size": batch_size, "seq_len": seq_len, "num_devices": num_devices}
        name_of_case = f"{dtype}, {batch_size} x {seq_len}{divided}, {implementation}"
        cases.append((name_of_case, row | {"attention": implementation}))
    rows, left_out = list[dict[str, Any]](), list[str]()
    for row, _ in frame.within_minutes(minutes, cases, frame.open_console(), left_out):
        model = model_of(d_model, n_heads, row["seq_len"])
        case = (row["batch_size"], row["dtype"], row["attention"], num_repeats)
        rows.append(row | measure_on(row["num_devices"], model, *case))
    report = frame.describe_conditions() | {"d_model": d_model, "n_heads": n_heads, "num_repeats": num_repeats}
    report |= {"rows": rows, "left_out": left_out}
    batches, lengths = (list(dict.fromkeys(column)) for column in zip(*points, strict=True))
    asked: dict[str, Any] = {"dtypes": dtypes, "attention": implementations}
    at = {"batches": batches, "seq_len": lengths} if name == "block" else {"lengths": lengths, "batch_size": batches}
    asked = at | asked | ({} if name == "block" else {"devices": devices})
    asked |= {"width": d_model, "heads": n_heads, "num_repeats": num_repeats}
    frame.tell(
        report,
        build_table(report),
        frame.note_left_out(left_out),
        name=name,
        heading="One transformer layer, forward and backward",
        command=frame.format_command(f"llmfoundry-lite bench {name}", **asked),
        asked=("d_model", "n_heads"),
        plot=partial(plot, name),
        out=out if rows else None,
    )
    return report


def available() -> list[str]:
    """List attention implementations that can train on this device."""
    if device_type() == "cpu":
        return ["sdpa", "blocked", "reference"]
    flash = ["flash"] if importlib.util.find_spec("flash_attn") else []
    return ["sdpa", "flex", *flash, "reference"]


def all_devices() -> list[int]:
    """Return 1, and the number of devices of this machine."""
    return sorted({1, max(1, torch.cuda.device_count())})


def model_of(d_model: int, n_heads: int, seq_len: int) -> ModelConfig:
    return ModelConfig(d_model=d_model, n_heads=n_heads, n_layers=1, max_seq_len=seq_len, vocab_size=50257)


def build(
    model: ModelConfig, dtype: torch.dtype, implementation: str, context: Any = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Build a layer, or this rank's part of one, as a function from x [b, t, d] to its output [b, t, d].

    `context`: the ranks that divide each sample, as `cp_config` does; None for one device.
    """
    torch.manual_seed(0)
    block = Block(model)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02)
    block = block.to(device_type(), dtype)

    def skip_attention(x_btd: torch.Tensor) -> torch.Tensor:
        """Use values as attention's output, so that tokens do not see each other."""
        x_btd = x_btd + block.attn.out_proj(block.attn.Wqkv(block.norm_1(x_btd))[..., -model.d_model :])
        return x_btd + block.ffn(block.norm_2(x_btd))

    if implementation == NONE:
        return skip_attention
    if context is None:
        positions_bt = torch.arange(model.max_seq_len, device=device_type())[None]
        mask = build_mask(AttentionConfig(), implementation, None, positions_bt, model.max_seq_len)
    else:
        positions_bt = context.options(model.max_seq_len, torch.device(device_type()))["positions_bt"]
        mask = context.build_mask(AttentionConfig(), implementation, None, positions_bt, positions_bt.size(1))
    mask = mask.to(dtype)
    return lambda x_btd: block(x_btd, mask, None)


def build_products(d: int, shape_bt: tuple[int, int], dtype: torch.dtype) -> Callable[[], None]:
    """Build the matrix products of a layer, forward and backward, each with an input of its own."""
    options: dict[str, Any] = {"device": device_type(), "dtype": dtype}
    cases = [
        (
            Linear(width, height, bias=False, **options),
            torch.randn(*shape_bt, width, **options).requires_grad_(),
            torch.randn(*shape_bt, height, **options),
        )
        for width, height in ((d, 3 * d), (d, d), (d, 4 * d), (4 * d, d))
    ]

    def multiply_all() -> None:
        for layer, x_bti, gradient_bto in cases:
            layer(x_bti).backward(gradient_bto)

    return multiply_all


def measure(
    model: ModelConfig,
    batch_size: int,
    dtype: str,
    implementation: str,
    num_repeats: int,
    context: Any = None,
) -> dict[str, Any]:
    """Time forward and backward of the slowest rank, after one pass that is not timed.

    Returns medians with the least and the most, and rates per rank by the medians.
    """
    layer = build(model, DTYPES[dtype], implementation, context)
    num_parts = 1 if context is None else context.size
    shape_bt = batch_size, model.max_seq_len // num_parts
    x_btd = torch.randn(*shape_bt, model.d_model, device=device_type(), dtype=DTYPES[dtype]).requires_grad_()
    gradient_btd = torch.randn_like(x_btd)
    products = build_products(model.d_model, shape_bt, DTYPES[dtype])
    times = []
    for _ in range(num_repeats + 1):
        began = now()
        y_btd = layer(x_btd)
        middle = now()
        y_btd.backward(gradient_btd)
        end = now()
        products()
        seconds = torch.tensor([middle - began, end - middle, now() - end], dtype=torch.float64)
        if context is not None:
            dist.all_reduce(seconds, dist.ReduceOp.MAX)  # over gloo; also a barrier before the next
        times.append(seconds.tolist())
    spreads = [frame.spread(column) for column in zip(*times[1:], strict=True)]
    forward, backward, alone = (one.median for one in spreads)
    flops = count_forward_flops(model, batch_size, with_attention=implementation != NONE) / num_parts
    products_flops = 3 * count_forward_flops(model, batch_size, with_attention=False) / num_parts
    return {
        "forward_seconds": forward,
        "backward_seconds": backward,
        "least_and_most_seconds": [(one.least, one.most) for one in spreads[:2]],
        "forward_flops_per_sec": flops / forward,
        "backward_flops_per_sec": 2 * flops / backward,
        "flops_per_sec": 3 * flops / (forward + backward),
        "products_flops_per_sec": products_flops / alone,
    }


def divide(model: ModelConfig, num_devices: int) -> ContextParallelConfig | None:
    """Divide by heads where they suffice, else by tokens; None for one device. Raises ConfigError if neither works."""
    if num_devices == 1:
        return None
    from llmfoundry_layouts.pieces import count_pieces  # only several devices need that companion

    kind = "heads" if model.n_heads % num_devices == 0 else "gather"
    config = ContextParallelConfig(context_parallel_degree=num_devices, kind=kind)
    if model.max_seq_len % (num_pieces := count_pieces(config)):
        raise ConfigError(f"{model.max_seq_len} tokens cannot be divided by {num_pieces}")
    return config


def measure_on(num_devices: int, model: ModelConfig, *case: Any) -> dict[str, Any]:
    """Run `measure` on as many processes as divide a sample. Returns {"error": …} if one fails."""
    try:
        config = divide(model, num_devices)
        if config is None:
            return measure(model, *case)
        return measure_on_ranks(num_devices, partial(measure_part, config, model, *case))
    # Out of memory; a dtype that the device does not have; more parts than there are tokens.
    except (RuntimeError, ConfigError) as error:
        return {"error": str(error).strip().splitlines()[0]}


def measure_part(config: ContextParallelConfig, *case: Any) -> dict[str, Any]:
    size = config.context_parallel_degree
    build_context = companions.load("llmfoundry_layouts.context:build_context", "--devices")
    return measure(*case, context=build_context(config, Layout(context=size, node_size=size), device_type()))


def count_forward_flops(model: ModelConfig, batch_size: int, *, with_attention: bool) -> int:
    """Count one layer's FLOPs: 2 for each token and each of 12 d^2 weights, 4 d for each pair of tokens."""
    d, num_tokens = model.d_model, batch_size * model.max_seq_len
    return num_tokens * (2 * 12 * d * d + (4 * d * model.max_seq_len if with_attention else 0))


def now() -> float:
    """Wait for the device and return the time in seconds."""
    if device_type() == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


# ------------------------------------------------------------------------------------------------------ the report


def build_title(report: dict[str, Any]) -> str:
    return f"a layer of width {report['d_model']:,}, {report['n_heads']} heads, {report['device']}"


def show_seconds(row: Mapping[str, Any], part: int) -> str:
    """Format the median of the forward pass (0) or the backward pass (1), with the least and the most."""
    least, most = row["least_and_most_seconds"][part]
    return f"{frame.Spread(least, row[('forward_seconds', 'backward_seconds')[part]], most):.4f}"


def build_table(report: dict[str, Any]) -> Table:
    number = report["num_threads"]
    threads = f", {number} thread{'s' if number > 1 else ''}" if device_type() == "cpu" else ""
    title = f"{build_title(report)}{threads}, the median of {report['num_repeats']}, with the least and the most"
    return frame.tabulate(title, COLUMNS, report["rows"], num_keys=NUM_KEYS)


def plot(name: str, report: dict[str, Any], path: Path) -> None:
    """Draw forward and backward rates over samples (block) or tokens (seqlen): a line for each dtype and attention."""
    from llmfoundry_lite.report.figure import curve_color

    key, label = ("batch_size", "samples") if name == "block" else ("seq_len", "tokens in a sample")
    lines: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for row in report["rows"]:
        if "error" not in row:
            lines.setdefault((row["dtype"], row["attention"], row["num_devices"]), []).append(row)
    colours = {kind: curve_color(index) for index, kind in enumerate(dict.fromkeys(kind[1:] for kind in lines))}
    ticks = sorted({row[key] for line in lines.values() for row in line})
    with frame.drawn(path, 2, (11, 4), build_title(report), sharey=True) as panels:
        for axes, part in zip(panels, ("forward", "backward"), strict=True):
            for (dtype, attention, num_devices), line in lines.items():
                x, y = [row[key] for row in line], [row[f"{part}_flops_per_sec"] / 1e12 for row in line]
                text = f"{attention}, {dtype}" + (f", {num_devices} devices" if num_devices > 1 else "")
                colour = colours[attention, num_devices]
                axes.plot(x, y, STYLES[dtype], color=colour, marker="o", ms=4, label=text)
            frame.label_axes(axes, ticks, label)
            axes.set_title(part, fontsize=10)
        panels[0].set_ylabel("model TFLOP/s of a device")
        panels[1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), handlelength=3.5)
