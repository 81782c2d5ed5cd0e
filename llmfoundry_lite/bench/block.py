"""One transformer layer, forward and backward apart: dtypes x batches or lengths x attention implementations.

llmfoundry-lite bench block --batches 8,16,32,64 --out results
llmfoundry-lite bench seqlen --lengths 1024,4096,16384,65536 --out results

GPT-2 XL's layer by default. Rates are of model FLOPs, beside the rate of the layer's own matrix products, measured in
the same run. `none` is the layer without attention: its projections, and nothing between them. One device, no data, no
optimizer. What the time does not suffice for is named.
"""

import importlib.util
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
from torch import nn

from llmfoundry_lite.bench.frame import Table, describe_conditions, open_console, show, spread, write_report
from llmfoundry_lite.config.schema import AttentionConfig, ModelConfig
from llmfoundry_lite.devices import device_type, keep_freed_memory
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.models.attention import build_mask
from llmfoundry_lite.models.mpt import Block
from llmfoundry_lite.models.products import multiply

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
NONE = "none"
HEADINGS = [
    *("dtype", "samples", "tokens", "attention", "forward, s", "backward, s", "forward, TFLOP/s", "backward, TFLOP/s"),
    *("products, TFLOP/s", "of the products"),
]
COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#8172b3", "#937860")
STYLES = {"fp32": "-", "fp16": ":", "bf16": "--"}


def run(
    name: str,
    points: Sequence[tuple[int, int]],
    dtypes: Sequence[str],
    *,
    d_model: int = 1600,
    n_heads: int = 25,
    implementations: Sequence[str] | None = None,
    num_repeats: int = 3,
    minutes: float = 60,
    out: Path | None = None,
) -> dict[str, Any]:
    """Measure `points` (samples, tokens in each) until all is done or `minutes` have passed.

    `name` is block or seqlen, by what the figure has along its axis. Prints a table, writes NAME.json, .md and .png to
    `out`, and returns the report. Raises ConfigError for a dtype or an implementation that is not there.
    """
    keep_freed_memory()
    implementations = list(implementations or available())
    check("--dtypes", dtypes, DTYPES)
    check("--attention", implementations, [*available(), NONE])
    if d_model % n_heads:
        raise ConfigError(f"--heads: {n_heads} do not divide a width of {d_model}")
    console, deadline = open_console(), time.monotonic() + 60 * minutes
    report: dict[str, Any] = describe_conditions() | {
        "d_model": d_model,
        "n_heads": n_heads,
        "num_repeats": num_repeats,
        "rows": [],
        "left_out": [],
    }
    for batch_size, seq_len in points:
        for dtype in dtypes:
            products: float | None = None
            for implementation in [*implementations, NONE]:
                title = f"{dtype}, {batch_size} x {seq_len}, {implementation}"
                if time.monotonic() > deadline:
                    report["left_out"].append(title)
                    continue
                console.print(title)
                model = model_of(d_model, n_heads, seq_len)
                row = {"dtype": dtype, "batch_size": batch_size, "seq_len": seq_len, "attention": implementation}
                try:
                    products = products or measure_products(model, batch_size, DTYPES[dtype], num_repeats)
                    row |= measure(model, batch_size, DTYPES[dtype], implementation, num_repeats)
                    row["products_flops_per_sec"] = products
                except RuntimeError as error:  # out of memory; a dtype that the device does not have
                    row["error"] = str(error).strip().splitlines()[0]
                report["rows"].append(row)
    table = table_of(report, name)
    notes = [f"no time for: {'; '.join(report['left_out'])}"] if report["left_out"] else []
    show(console, table, notes=notes)
    if out is not None and report["rows"]:
        heading = "One transformer layer, forward and backward"
        figure = f"![the figure]({name}.png)"
        asked = ("d_model", "n_heads")
        write_report(out, name, heading, f"llmfoundry-lite bench {name}", report, table, notes, figure, asked=asked)
        plot(report, name, out / f"{name}.png")
    return report


def check(option: str, given: Iterable[str], known: Iterable[str]) -> None:
    for name in given:
        if name not in known:
            raise ConfigError(f"{option}: {name!r} given, expected some of {', '.join(known)}")


def available() -> list[str]:
    """Attention implementations that can be trained with on this device."""
    if device_type() == "cpu":
        return ["sdpa", "blocked", "reference"]
    flash = ["flash"] if importlib.util.find_spec("flash_attn") else []
    return ["sdpa", "flex", *flash, "reference"]


def model_of(d_model: int, n_heads: int, seq_len: int) -> ModelConfig:
    return ModelConfig(d_model=d_model, n_heads=n_heads, n_layers=1, max_seq_len=seq_len, vocab_size=50257)


class WithoutAttention(nn.Module):
    """A layer whose tokens do not see each other: values go where attention's results would."""

    def __init__(self, block: Block):
        super().__init__()
        self.block = block

    def forward(self, x_btd: torch.Tensor) -> torch.Tensor:
        block = self.block
        values_btd = block.attn.Wqkv(block.norm_1(x_btd))[..., -x_btd.size(-1) :]
        x_btd = x_btd + block.attn.out_proj(values_btd)
        return x_btd + block.ffn(block.norm_2(x_btd))


def build(model: ModelConfig, dtype: torch.dtype, implementation: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """x [b, t, d] -> the layer's output."""
    torch.manual_seed(0)
    block = Block(model)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02)
    block = block.to(device_type(), dtype)
    if implementation == NONE:
        return WithoutAttention(block)
    positions_bt = torch.arange(model.max_seq_len, device=device_type())[None]
    mask = build_mask(AttentionConfig(), implementation, None, positions_bt, model.max_seq_len).to(dtype)
    return lambda x_btd: block(x_btd, mask, None)


def measure(
    model: ModelConfig, batch_size: int, dtype: torch.dtype, implementation: str, num_repeats: int
) -> dict[str, float]:
    """Medians of forward and backward, and their rates. Once more goes before, unmeasured."""
    layer = build(model, dtype, implementation)
    x_btd = torch.randn(batch_size, model.max_seq_len, model.d_model, device=device_type(), dtype=dtype)
    x_btd.requires_grad_()
    gradient_btd = torch.randn_like(x_btd)
    times = []
    for _ in range(num_repeats + 1):
        began = now()
        y_btd = layer(x_btd)
        middle = now()
        y_btd.backward(gradient_btd)
        times.append((middle - began, now() - middle))
    forward, backward = (spread(column).median for column in zip(*times[1:], strict=True))
    flops = count_forward_flops(model, batch_size, with_attention=implementation != NONE)
    return {
        "forward_seconds": forward,
        "backward_seconds": backward,
        "forward_flops_per_sec": flops / forward,
        "backward_flops_per_sec": 2 * flops / backward,
        "flops_per_sec": 3 * flops / (forward + backward),
    }


def count_forward_flops(model: ModelConfig, batch_size: int, *, with_attention: bool) -> int:
    """Of one layer: 2 for each of 12 d^2 weights and token, and 4 d for each pair of tokens, the whole square."""
    d, num_tokens = model.d_model, batch_size * model.max_seq_len
    return num_tokens * (2 * 12 * d * d + (4 * d * model.max_seq_len if with_attention else 0))


def measure_products(model: ModelConfig, batch_size: int, dtype: torch.dtype, num_repeats: int) -> float:
    """FLOP/s of the layer's products alone: forward, and both gradients."""
    d, num_tokens, flops, seconds = model.d_model, batch_size * model.max_seq_len, 0, 0.0
    for rows, columns in ((3 * d, d), (d, d), (4 * d, d), (d, 4 * d)):
        weight = torch.randn(rows, columns, device=device_type()).to(dtype)
        x, gradient = (torch.randn(num_tokens, n, device=device_type()).to(dtype) for n in (columns, rows))
        times = []
        for _ in range(num_repeats + 1):
            began = now()
            multiply(x, weight), multiply(gradient, weight.T), multiply(gradient.T, x.T)
            times.append(now() - began)
        flops += 3 * 2 * num_tokens * rows * columns
        seconds += spread(times[1:]).median
    return flops / seconds


def now() -> float:
    """When all that was asked of the device is done."""
    if device_type() == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


# ------------------------------------------------------------------------------------------------------ the report


def title_of(report: dict[str, Any]) -> str:
    return f"a layer of width {report['d_model']:,}, {report['n_heads']} heads, {report['device']}"


def table_of(report: dict[str, Any], name: str) -> Table:
    rows = []
    for row in report["rows"]:
        keys = [row["dtype"], f"{row['batch_size']}", f"{row['seq_len']:,}", row["attention"]]
        if "error" in row:
            rows.append([*keys, row["error"], *[""] * (len(HEADINGS) - len(keys) - 1)])
            continue
        rates = (row[f"{part}flops_per_sec"] for part in ("forward_", "backward_", "products_"))
        rows.append(
            [
                *(*keys, f"{row['forward_seconds']:.4f}", f"{row['backward_seconds']:.4f}"),
                *(f"{rate / 1e12:.3f}" for rate in rates),
                f"{row['flops_per_sec'] / row['products_flops_per_sec']:.1%}",
            ]
        )
    threads = f", {report['num_threads']} threads" if device_type() == "cpu" else ""
    return Table(f"{title_of(report)}{threads}, the median of {report['num_repeats']}", HEADINGS, rows, num_keys=4)


def plot(report: dict[str, Any], name: str, path: Path) -> None:
    """Forward and backward rates along samples (block) or tokens (seqlen), a line for each dtype and attention."""
    key, label = ("batch_size", "samples") if name == "block" else ("seq_len", "tokens in a sample")
    rows = [row for row in report["rows"] if "error" not in row]
    figure, panels = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", dpi=150, sharey=True)
    names = list(dict.fromkeys(row["attention"] for row in rows))
    for axes, part in zip(panels, ("forward", "backward"), strict=True):
        for dtype in dict.fromkeys(row["dtype"] for row in rows):
            for attention in names:
                line = [row for row in rows if (row["dtype"], row["attention"]) == (dtype, attention)]
                x, y = [row[key] for row in line], [row[f"{part}_flops_per_sec"] / 1e12 for row in line]
                colour = COLOURS[names.index(attention) % len(COLOURS)]
                text = f"{attention}, {dtype}"
                axes.plot(x, y, STYLES[dtype], color=colour, marker="o", ms=4, label=text)
        ticks = sorted({row[key] for row in rows})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.set_xlabel(label)
        axes.set_title(part, fontsize=10)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("model TFLOP/s")
    panels[1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.suptitle(title_of(report), fontsize=10)
    figure.savefig(path)
    plt.close(figure)
