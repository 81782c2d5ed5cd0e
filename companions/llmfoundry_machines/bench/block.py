"""One transformer layer, forward and backward apart: dtypes x batches or lengths x attention implementations.

llmfoundry-lite bench block --batches 8,16,32,64 --out results
llmfoundry-lite bench seqlen --lengths 1024,4096,16384,65536 --out results

Both benches measure GPT-2 XL's layer by default, without data and optimizer. `run` measures each point (samples and
tokens), dtype, number of devices and attention in turn (`measure_on`, `measure`) until the time is up, and names the
points that it had no time for.

Rates are of model FLOPs. They are compared with the rate of the layer's own matrix products, which are measured in
turns with it. The attention `none` is the layer without attention: its projections alone. Several devices divide the
tokens of each sample, as `cp_config` does. Rates are then per device, and times are the slowest device's.

Suffixes of tensors are their dimensions: b samples, t tokens of a sample (or a device's share of them), d the model's
width, i and o the inputs and outputs of a linear layer.
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
"""The layer without attention, beside the implementations of attention."""
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
"""Columns that identify a row."""
STYLES = {"fp32": "-", "fp16": ":", "bf16": "--"}
"""dtype -> matplotlib's style of its lines."""


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
    """Measure one layer at `points` until all is done or `minutes` have passed, print a table, and return the report.

    A point is a number of samples and of tokens in each. It is measured for each of `dtypes`, of `implementations` of
    attention (by default all that are available) and NONE, and of `devices`, which are numbers of devices that divide
    each sample. `name` is block or seqlen, by what the figure has along its axis: samples or tokens.

    With `out`, writes NAME.json, .md and .png there. Raises ConfigError for a dtype or an implementation that is not
    available, for heads that do not divide the width, and for more devices than this machine has.
    """
    keep_freed_memory()
    implementations = list(implementations or available())
    frame.check_names("--dtypes", dtypes, DTYPES)
    frame.check_names("--attention", implementations, [*available(), NONE])
    if d_model % n_heads:
        raise ConfigError(f"--heads: {n_heads} do not divide a width of {d_model}")
    most_devices = max(devices)
    if device_type() == "cuda" and most_devices > torch.cuda.device_count():
        raise ConfigError(f"--devices: {most_devices} given, there are {torch.cuda.device_count()}")
    if most_devices > 1:
        companions.require("llmfoundry_layouts", f"--devices {most_devices}")

    cases = []
    for (batch_size, seq_len), dtype, num_devices, attention in product(
        points, dtypes, devices, [*implementations, NONE]
    ):
        devices_of_case = f", {num_devices} devices" if num_devices > 1 else ""
        name_of_case = f"{dtype}, {batch_size} x {seq_len}{devices_of_case}, {attention}"
        keys = {
            "dtype": dtype,
            "batch_size": batch_size,
            "seq_len": seq_len,
            "num_devices": num_devices,
            "attention": attention,
        }
        cases.append((name_of_case, keys))

    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    for keys, _ in frame.within_minutes(minutes, cases, frame.open_console(), left_out):
        model = model_of(d_model, n_heads, keys["seq_len"])
        arguments = (keys["batch_size"], keys["dtype"], keys["attention"], num_repeats)
        rows.append(keys | measure_on(keys["num_devices"], model, *arguments))

    # The options that measure the same again. Each command has its own for samples, tokens and devices.
    batch_sizes = list(dict.fromkeys(batch_size for batch_size, _ in points))
    lengths = list(dict.fromkeys(seq_len for _, seq_len in points))
    options: dict[str, Any] = {"batches": batch_sizes, "seq_len": lengths}
    if name == "seqlen":
        options = {"lengths": lengths, "batch_size": batch_sizes}
    options |= {"dtypes": dtypes, "attention": implementations}
    if name == "seqlen":
        options["devices"] = devices
    options |= {"width": d_model, "heads": n_heads, "num_repeats": num_repeats}

    report = frame.describe_conditions() | {"d_model": d_model, "n_heads": n_heads, "num_repeats": num_repeats}
    report |= {"rows": rows, "left_out": left_out}
    frame.tell(
        report,
        build_table(report),
        frame.note_left_out(left_out),
        name=name,
        heading="One transformer layer, forward and backward",
        command=frame.format_command(f"llmfoundry-lite bench {name}", **options),
        asked=("d_model", "n_heads"),
        plot=partial(plot, name),
        out=out if rows else None,
    )
    return report


def available() -> list[str]:
    """Return the implementations of attention that can train on this device, the usual one first."""
    if device_type() == "cpu":
        return ["sdpa", "blocked", "reference"]
    flash = ["flash"] if importlib.util.find_spec("flash_attn") else []
    return ["sdpa", "flex", *flash, "reference"]


def all_devices() -> list[int]:
    """Return 1 and the number of this machine's devices, which are the default numbers of devices of `seqlen`."""
    return sorted({1, max(1, torch.cuda.device_count())})


def model_of(d_model: int, n_heads: int, seq_len: int) -> ModelConfig:
    """Return the configuration of a model with one layer. Its vocabulary, GPT-2's, is never allocated."""
    return ModelConfig(d_model=d_model, n_heads=n_heads, n_layers=1, max_seq_len=seq_len, vocab_size=50257)


def build(
    model: ModelConfig, dtype: torch.dtype, implementation: str, context: Any = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Build a layer on the device, as a function from its input x_btd to its output [b, t, d].

    `context` is the group of ranks that divide each sample, as `cp_config` does. The function then takes and returns
    this rank's tokens, and is collective. None is one device with whole samples.
    """
    torch.manual_seed(0)
    block = Block(model)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02)
    block = block.to(device_type(), dtype)
    attention: Any = block.attn  # ours, because shapes name no part of the user's own

    def skip_attention(x_btd: torch.Tensor) -> torch.Tensor:
        """Compute the layer with each token's own value as the output of attention, so that tokens do not mix."""
        # Wqkv returns queries, keys and values, [b, t, 3d].
        values_btd = attention.Wqkv(block.norm_1(x_btd))[..., -model.d_model :]
        x_btd = x_btd + attention.out_proj(values_btd)
        return x_btd + block.ffn(block.norm_2(x_btd))

    if implementation == NONE:
        return skip_attention

    # Each rank masks the tokens that it holds, by their positions in the whole sample.
    if context is None:
        positions_bt = torch.arange(model.max_seq_len, device=device_type())[None]
        mask = build_mask(AttentionConfig(), implementation, None, positions_bt, model.max_seq_len)
    else:
        positions_bt = context.options(model.max_seq_len, torch.device(device_type()))["positions_bt"]
        mask = context.build_mask(AttentionConfig(), implementation, None, positions_bt, positions_bt.size(1))
    mask = mask.to(dtype)
    return lambda x_btd: block(x_btd, mask, None)


def build_products(d_model: int, shape_bt: tuple[int, int], dtype: torch.dtype) -> Callable[[], None]:
    """Return a function that computes a layer's matrix products alone, forward and backward.

    `shape_bt` is the number of samples, and of the tokens of each on this device. Each product has its own input.
    """
    options: dict[str, Any] = {"device": device_type(), "dtype": dtype}
    products = []
    for num_inputs, num_outputs in (
        (d_model, 3 * d_model),  # queries, keys and values
        (d_model, d_model),  # attention's output
        (d_model, 4 * d_model),  # the feed-forward network
        (4 * d_model, d_model),
    ):
        layer = Linear(num_inputs, num_outputs, bias=False, **options)
        x_bti = torch.randn(*shape_bt, num_inputs, **options).requires_grad_()
        gradient_bto = torch.randn(*shape_bt, num_outputs, **options)
        products.append((layer, x_bti, gradient_bto))

    def multiply_all() -> None:
        for layer, x_bti, gradient_bto in products:
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
    """Time the forward and the backward pass of a layer, and then its matrix products, `num_repeats` times.

    One more pass at the beginning is not timed. With a `context`, this is collective: times are the slowest rank's, and
    rates are those of one rank, which has a share of each sample's tokens.

    Returns medians in seconds, with the least and the most, and rates by the medians in FLOP/s.
    """
    layer = build(model, DTYPES[dtype], implementation, context)
    num_parts = 1 if context is None else context.size
    shape_bt = batch_size, model.max_seq_len // num_parts
    x_btd = torch.randn(*shape_bt, model.d_model, device=device_type(), dtype=DTYPES[dtype]).requires_grad_()
    gradient_btd = torch.randn_like(x_btd)
    multiply_all = build_products(model.d_model, shape_bt, DTYPES[dtype])

    repeats = []
    for _ in range(num_repeats + 1):
        began = now()
        y_btd = layer(x_btd)
        forward_ended = now()
        y_btd.backward(gradient_btd)
        backward_ended = now()
        multiply_all()
        products_ended = now()

        seconds = torch.tensor(
            [forward_ended - began, backward_ended - forward_ended, products_ended - backward_ended],
            dtype=torch.float64,
        )
        if context is not None:
            # On the CPU, so over gloo. It is also a barrier before the next repeat.
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
        repeats.append(seconds.tolist())

    forward, backward, products = (frame.spread(column) for column in zip(*repeats[1:], strict=True))
    # A backward pass has twice the FLOPs of the forward pass: the gradients of inputs and of weights.
    flops = count_forward_flops(model, batch_size, with_attention=implementation != NONE) / num_parts
    products_flops = 3 * count_forward_flops(model, batch_size, with_attention=False) / num_parts
    return {
        "forward_seconds": forward.median,
        "backward_seconds": backward.median,
        "least_and_most_seconds": [(forward.least, forward.most), (backward.least, backward.most)],
        "forward_flops_per_sec": flops / forward.median,
        "backward_flops_per_sec": 2 * flops / backward.median,
        "flops_per_sec": 3 * flops / (forward.median + backward.median),
        "products_flops_per_sec": products_flops / products.median,
    }


def divide(model: ModelConfig, num_devices: int) -> ContextParallelConfig | None:
    """Choose how `num_devices` divide each sample: by heads if these divide evenly, and else by tokens.

    Returns None for one device. Raises ConfigError if the tokens do not divide into the pieces that this needs.
    """
    if num_devices == 1:
        return None
    from llmfoundry_layouts.pieces import count_pieces  # only several devices need that companion

    kind = "heads" if model.n_heads % num_devices == 0 else "gather"
    config = ContextParallelConfig(context_parallel_degree=num_devices, kind=kind)
    num_pieces = count_pieces(config)
    if model.max_seq_len % num_pieces:
        raise ConfigError(f"{model.max_seq_len} tokens cannot be divided by {num_pieces}")
    return config


def measure_on(num_devices: int, model: ModelConfig, *arguments: Any) -> dict[str, Any]:
    """Call `measure(model, *arguments)` here, or on as many processes as divide a sample.

    Returns what `measure` returned on the first rank, or {"error": a line} if it failed. It may run out of memory, lack
    the dtype on this device, or need more pieces than there are tokens.
    """
    try:
        config = divide(model, num_devices)
        if config is None:
            return measure(model, *arguments)
        return measure_on_ranks(num_devices, partial(measure_part, config, model, *arguments))
    except (RuntimeError, ConfigError) as error:
        return {"error": str(error).strip().splitlines()[0]}


def measure_part(config: ContextParallelConfig, *arguments: Any) -> dict[str, Any]:
    """Call `measure(*arguments)` on a rank that has a share of each sample. Collective: all ranks call it."""
    degree = config.context_parallel_degree
    build_context = companions.load("llmfoundry_layouts.context:build_context", "--devices")
    context = build_context(config, Layout(context=degree, node_size=degree), device_type())
    return measure(*arguments, context=context)


def count_forward_flops(model: ModelConfig, batch_size: int, *, with_attention: bool) -> int:
    """Count the FLOPs of one layer's forward pass, for all devices together.

    Each token takes 2 FLOPs for each of the layer's 12 d^2 weights. Attention adds 4 d for each pair of tokens, half of
    them for the scores and half for the sum of values. As is usual, pairs that the causal mask excludes count too.
    """
    d_model = model.d_model
    flops_per_token = 2 * 12 * d_model * d_model
    if with_attention:
        flops_per_token += 4 * d_model * model.max_seq_len
    return batch_size * model.max_seq_len * flops_per_token


def now() -> float:
    """Return the time in seconds, after the device has done all that was enqueued."""
    if device_type() == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


# ------------------------------------------------------------------------------------------------------ the report


def build_title(report: dict[str, Any]) -> str:
    """Return the layer and the device, as the title of the table and of the figure."""
    return f"a layer of width {report['d_model']:,}, {report['n_heads']} heads, {report['device']}"


def show_seconds(row: Mapping[str, Any], part: int) -> str:
    """Format the median of the forward pass (0) or the backward pass (1), with the least and the most."""
    median = row["backward_seconds" if part else "forward_seconds"]
    least, most = row["least_and_most_seconds"][part]
    return f"{frame.Spread(least, median, most):.4f}"


def build_table(report: dict[str, Any]) -> Table:
    """Build the table of all rows. Its title tells the number of threads if the device is a CPU."""
    threads = ""
    if device_type() == "cpu":
        num_threads = report["num_threads"]
        threads = f", {num_threads} thread{'s' if num_threads > 1 else ''}"
    title = f"{build_title(report)}{threads}, the median of {report['num_repeats']}, with the least and the most"
    return frame.tabulate(title, COLUMNS, report["rows"], num_keys=NUM_KEYS)


def plot(name: str, report: dict[str, Any], path: Path) -> None:
    """Draw the rates of the forward pass (left) and the backward pass (right), over samples (block) or tokens (seqlen).

    There is a line for each dtype, attention and number of devices. The dtype is its style, the other two its colour.
    """
    from llmfoundry_lite.report.canvas import curve_color

    x_key, x_label = ("batch_size", "samples") if name == "block" else ("seq_len", "tokens in a sample")
    measured_rows = [row for row in report["rows"] if "error" not in row]
    rows_by_line: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for row in measured_rows:
        line = (row["dtype"], row["attention"], row["num_devices"])
        rows_by_line.setdefault(line, []).append(row)

    colours: dict[tuple[str, int], str] = {}
    for _, attention, num_devices in rows_by_line:
        colours.setdefault((attention, num_devices), curve_color(len(colours)))

    ticks = sorted({row[x_key] for row in measured_rows})
    with frame.drawn(path, 2, (11, 4), build_title(report), sharey=True) as panels:
        for axes, part in zip(panels, ("forward", "backward"), strict=True):
            for (dtype, attention, num_devices), rows in rows_by_line.items():
                x = [row[x_key] for row in rows]
                y = [row[f"{part}_flops_per_sec"] / 1e12 for row in rows]
                label = f"{attention}, {dtype}"
                if num_devices > 1:
                    label += f", {num_devices} devices"
                axes.plot(x, y, STYLES[dtype], color=colours[attention, num_devices], marker="o", ms=4, label=label)
            frame.label_axes(axes, ticks, x_label)
            axes.set_title(part, fontsize=10)
        panels[0].set_ylabel("model TFLOP/s of a device")
        panels[1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), handlelength=3.5)
