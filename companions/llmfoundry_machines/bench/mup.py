"""Coordinate check of muP: does what each layer computes stay as large as it is while the model gets wider?

llmfoundry-lite bench mup mpt-quickstart --widths 64,128,256,512 --out results

A model is built at each width, with muP and without, and takes a few steps on one batch. If muP is right, the mean size
of each layer's outputs does not depend on the width, before these steps and after them. Without muP it grows, and the
learning rate that is best for a narrow model is too large for a wide one (Yang et al. 2022, "Tensor Programs V",
appendix D.1). It runs on a CPU, in one process.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from llmfoundry_lite.config.layout import divide_devices
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.mup import MupConfig
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.config.sharding_schema import FSDPConfig
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.models.attention import Mask, build_mask
from llmfoundry_lite.models.initialise import initialise_weights
from llmfoundry_lite.models.mpt import MPT
from llmfoundry_lite.own_code import is_own, trust_code
from llmfoundry_lite.tables import Table
from llmfoundry_lite.training.builders import build_optimizer_of
from llmfoundry_lite.training.optimizers import OptimizerContext
from llmfoundry_machines.bench import frame

SIDES = ("muP", "without")
GROWTH = ("heads", "head_dim")
KINDS = ("embeddings", "scores", "attention", "feed-forward", "last block", "logits")
"""What is measured: the input of the first block, the scores of attention before its softmax, what the layers add to
the residual stream, the residual stream after the last block, and the logits."""
FLAT = 0.1
"""Largest exponent of growth, over the widths, that counts as flat. Without muP, exponents of 0.5 and 1 are usual."""


def run(
    arguments: Sequence[str],
    widths: Sequence[int],
    grow: str = "heads",
    num_steps: int = 6,
    num_samples: int = 4,
    seq_len: int = 64,
    num_seeds: int = 1,
    out: Path | None = None,
) -> dict[str, Any]:
    """Measure all widths with muP and without, print a table, and return the report.

    arguments: YAML files and key=value of a run, whose model, optimizer and learning rate are used.
    widths: values of d_model. The first is muP's base width, unless the run has `model.mup`.
    grow: whether a wider model has more heads, or wider ones.
    num_steps: training steps on one batch of `num_samples` rows of `seq_len` random tokens.
    num_seeds: each width is measured with so many seeds, and the mean is reported.

    With `out`, writes mup.json, .md and .png there. Raises ConfigError.
    """
    frame.check_names("--grow", [grow], GROWTH)
    config = load_train_config(arguments).config
    trust_code(name for _, name in config.own_code)
    widths = sorted(set(widths))
    if len(widths) < 2:
        raise ConfigError("--widths: expected two or more, such as 64,128,256,512")

    console = frame.open_console()
    cells: list[dict[str, Any]] = []
    for width in widths:
        for side in SIDES:
            model = scale_model(config.model, width, widths[0], grow, has_mup=side == "muP")
            console.print(f"width {width}, {side}", highlight=False)
            sizes = [measure(config, model, num_steps, num_samples, seq_len, seed) for seed in range(num_seeds)]
            mean_sizes = np.mean([[[row[kind] for kind in KINDS] for row in rows] for rows in sizes], axis=0)
            for step, row in enumerate(mean_sizes):
                cells.append(
                    {"side": side, "width": width, "step": step, **dict(zip(KINDS, row.tolist(), strict=True))}
                )

    rows = [describe_kind(cells, kind, widths, num_steps) for kind in KINDS]
    options = {"widths": widths, "grow": grow, "num_steps": num_steps, "num_samples": num_samples}
    options |= {"seq_len": seq_len, "num_seeds": num_seeds}
    report = frame.describe_conditions() | options | {"arguments": list(arguments), "rows": rows, "cells": cells}
    report |= {"optimizer": config.optimizer.name, "lr": config.optimizer.lr}
    frame.tell(
        report,
        EXPLANATION,
        build_table(report),
        verdict(report),
        name="mup",
        heading="What each layer computes, by width",
        command=frame.format_command("llmfoundry-lite bench mup", arguments, **options),
        asked=("arguments", *options),
        plot=plot,
        out=out,
    )
    return report


# ------------------------------------------------------------------------------------------------------- what is run


def scale_model(model: ModelConfig, width: int, base_width: int, grow: str, *, has_mup: bool) -> ModelConfig:
    """Return a model's configuration at another width, with or without muP.

    Heads become more, or wider with `grow` head_dim. Heads of keys and values, and an explicit width of the
    feed-forward layer, keep their ratios. `base_width` is that of muP, unless the model has a `mup` of its own.

    Raises ConfigError if the width has no whole number of heads.
    """
    attention = model.attn_config
    ratio = width / model.d_model
    base_head_dim = None
    if grow == "heads":
        num_heads = width // model.head_dim
        if width % model.head_dim:
            raise ConfigError(f"--widths: {width} has no whole number of heads of {model.head_dim}")
        num_kv_heads = None
        if attention.kv_n_heads is not None:
            num_kv_heads = max(1, round(attention.kv_n_heads * num_heads / model.n_heads))
        attention = replace(attention, kv_n_heads=num_kv_heads)
    else:
        num_heads = model.n_heads
        if width % num_heads or base_width % num_heads:
            raise ConfigError(f"--widths: {width} has no heads of whole width; the model has {num_heads} of them")
        head_dim = None if attention.head_dim is None else round(attention.head_dim * ratio)
        attention = replace(attention, head_dim=head_dim)
        base_head_dim = base_width // num_heads

    ffn = model.ffn_config
    if ffn.ffn_hidden_size is not None:
        ffn = replace(ffn, ffn_hidden_size=round(ffn.ffn_hidden_size * ratio))
    mup = model.mup or MupConfig(base_width=base_width, base_head_dim=base_head_dim)
    return replace(
        model, d_model=width, n_heads=num_heads, attn_config=attention, ffn_config=ffn, mup=mup if has_mup else None
    )


def measure(
    config: TrainConfig, model_config: ModelConfig, num_steps: int, num_samples: int, seq_len: int, seed: int
) -> list[dict[str, float]]:
    """Train a model on one batch of random tokens, and return the mean size of what its layers compute.

    There is a row for the initial weights, and one after each step. It maps KINDS to the mean of |x| over tokens,
    channels and blocks. The learning rate is the run's, without its schedule.
    """
    model = MPT(model_config, attn_impl="sdpa")
    initialise_weights(model, seed)
    optimizer = build_optimizer(config, model_config, model)
    generator = torch.Generator().manual_seed(seed)
    tokens_bt = torch.randint(model_config.vocab_size, (num_samples, seq_len + 1), generator=generator)

    rows = []
    sizes = Sizes(model)
    for _ in range(num_steps + 1):
        sizes.clear()
        logits_btv = model(tokens_bt[:, :-1], build_mask=sizes.build_mask)
        sizes.add("logits", logits_btv)
        rows.append(sizes.means())
        loss = F.cross_entropy(logits_btv.float().flatten(0, 1), tokens_bt[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return rows


def build_optimizer(config: TrainConfig, model_config: ModelConfig, model: MPT) -> Optimizer:
    """Build the optimizer of a run for a whole model on this device, without a process group."""
    layout = divide_devices(FSDPConfig(), world_size=1)
    context = OptimizerContext(model=model, model_config=model_config, layout=layout)
    return build_optimizer_of(config.optimizer, dict(model.named_parameters()), context)


class Sizes:
    """Collects the mean of |x| of a model's activations, by KINDS, in its forward passes."""

    def __init__(self, model: MPT):
        """Watch the layers of a model from now on."""
        self._sizes: dict[str, list[float]] = {}
        transformer: Any = model.transformer
        transformer.blocks[0].register_forward_pre_hook(lambda _, inputs: self.add("embeddings", inputs[0]))
        transformer.norm_f.register_forward_pre_hook(lambda _, inputs: self.add("last block", inputs[0]))
        for block in transformer.blocks:
            self._watch(block.attn, "attention")
            self._watch(block.ffn, "feed-forward")
        self.sees_scores = not is_own(model.config.attn_config.attn_impl)

    def _watch(self, layer: nn.Module, kind: str) -> None:
        """Collect the outputs of a layer."""

        def add_output(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            self.add(kind, output)

        layer.register_forward_hook(add_output)

    def clear(self) -> None:
        """Forget the forward passes so far."""
        self._sizes.clear()

    def add(self, kind: str, x: Tensor) -> None:
        """Add an activation."""
        self._sizes.setdefault(kind, []).append(float(x.detach().float().abs().mean()))

    def means(self) -> dict[str, float]:
        """Return the mean over the blocks of each kind; NaN for scores that the user's own function computes."""
        return {kind: float(np.mean(self._sizes.get(kind, [math.nan]))) for kind in KINDS}

    def build_mask(self, *arguments: Any) -> Any:
        """Build the mask of a forward pass, which also collects the scores."""
        mask = build_mask(*arguments)
        return WatchedMask(mask, self.add) if self.sees_scores else mask


class WatchedMask:
    """A `Mask` that also passes the scores of attention to `add`, without biases and masks."""

    def __init__(self, mask: Mask, add: Callable[[str, Tensor], None]):
        self.mask = mask
        self.add = add

    def to(self, dtype: torch.dtype) -> "WatchedMask":
        """Cast the mask as `Mask.to` does."""
        return WatchedMask(self.mask.to(dtype), self.add)

    def attend(
        self, q_bthk: Tensor, k_bsgk: Tensor, v_bsgk: Tensor, scale: float | None = None, dropout_p: float = 0.0
    ) -> Tensor:
        """Compute attention as `Mask.attend` does."""
        num_sharing = q_bthk.size(2) // k_bsgk.size(2)
        k_bshk = k_bsgk.detach().repeat_interleave(num_sharing, dim=2)
        scores = torch.einsum("bthk,bshk->bhts", q_bthk.detach(), k_bshk)
        self.add("scores", scores * (scale or q_bthk.size(-1) ** -0.5))
        return self.mask.attend(q_bthk, k_bsgk, v_bsgk, scale, dropout_p)


# ------------------------------------------------------------------------------------------------------- what is shown

EXPLANATION = (
    "Models of several widths take a few steps on one batch of random tokens, at one learning rate. Shown is the mean "
    "of |x| of what layers compute, over tokens, channels, blocks and seeds. Growth is its exponent, fitted over the "
    "widths: 0 is flat, and with 0.5 a model of four times the width computes numbers of twice the size. With muP, the "
    "logits of initial weights shrink with the square root of the width, which is intended: they tend to 0, and "
    "learning makes up for it."
)


def describe_kind(cells: Sequence[dict[str, Any]], kind: str, widths: Sequence[int], num_steps: int) -> dict[str, Any]:
    """Return the row of a kind of layer: its growth with the width on both sides, before and after the steps."""
    row: dict[str, Any] = {"kind": kind}
    for side in SIDES:
        for step, when in ((0, "first"), (num_steps, "last")):
            sizes = [cell[kind] for cell in cells if cell["side"] == side and cell["step"] == step]
            row[f"{side} {when}"] = growth(widths, sizes)
    return row


def growth(widths: Sequence[int], sizes: Sequence[float]) -> float:
    """Return the exponent x of sizes that are proportional to width^x, by least squares of the logarithms."""
    return float(np.polyfit(np.log(widths), np.log(sizes), 1)[0])


def build_table(report: dict[str, Any]) -> Table:
    """Build the table of growth, with a row for each kind of layer."""
    num_steps = report["num_steps"]
    columns: list[frame.Column] = [("layer", "{kind}")]
    for side in SIDES:
        columns.append((f"{side}: at the start", f"{{{side} first:+.2f}}"))
        columns.append((f"{side}: after {num_steps} steps", f"{{{side} last:+.2f}}"))
    widths = ", ".join(map(str, report["widths"]))
    title = f"growth with the width, of {widths}: {report['optimizer']}, lr {report['lr']:g}"
    return frame.tabulate(title, columns, report["rows"])


def verdict(report: dict[str, Any]) -> list[str]:
    """Return a line that says what grows with muP after the last step, or that nothing does."""
    growing = [row["kind"] for row in report["rows"] if row["muP last"] > FLAT]
    if growing:
        return [f"with muP, these grow faster than width^{FLAT}: {', '.join(growing)}"]
    return [f"with muP, nothing grows faster than width^{FLAT} after {report['num_steps']} steps"]


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw the size of each kind over the width, a line for each step: with muP above, without it below."""
    from matplotlib.ticker import LogLocator

    from llmfoundry_lite.report.canvas import PlainLogFormatter, fixed_settings, plt, save_figure, style_panels

    num_steps = report["num_steps"]
    with fixed_settings():
        size = (2.4 * len(KINDS), 5.6)
        figure, grid = plt.subplots(
            2, len(KINDS), figsize=size, layout="constrained", dpi=150, sharex=True, sharey="col"
        )
        for axes_of_side, side in zip(grid, SIDES, strict=True):
            for axes, kind in zip(axes_of_side, KINDS, strict=True):
                for step in range(num_steps + 1):
                    cells = [cell for cell in report["cells"] if cell["side"] == side and cell["step"] == step]
                    axes.plot(
                        [cell["width"] for cell in cells],
                        [cell[kind] for cell in cells],
                        "o-",
                        color=plt.colormaps["viridis_r"](0.1 + 0.9 * step / num_steps),
                        markersize=3,
                        linewidth=1.2,
                        label=f"after {step} steps" if step in (0, num_steps) else None,
                    )
                axes.set_xscale("log", base=2)
                axes.set_yscale("log")
                axes.set_xticks(report["widths"], [str(width) for width in report["widths"]])
                axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axes.yaxis.set_major_formatter(PlainLogFormatter())
                axes.minorticks_off()
        for axes, kind in zip(grid[0], KINDS, strict=True):
            axes.set_title(kind, fontsize=10)
        for axes, label in zip(grid[:, 0], ("with muP: mean of |x|", "without: mean of |x|"), strict=True):
            axes.set_ylabel(label)
        for axes in grid[1]:
            axes.set_xlabel("width")
        grid[0, 0].legend(frameon=False, fontsize=8)
        style_panels(grid.flat)
        save_figure(figure, path)
