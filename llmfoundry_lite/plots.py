"""Figures of a run."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Record = dict[str, Any]

TRAIN, VALIDATION, REFERENCE = "#4c72b0", "#c44e52", "#8c8c8c"


def plot_run(records: list[Record], path: Path, *, title: str, baselines: dict[str, float] | None = None) -> None:
    """Loss against batch, with validation and baselines, above throughput; written to `path` as PNG."""
    figure, (loss, speed) = plt.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 1), layout="constrained", dpi=130
    )
    batches, losses = _series(records, "loss/train/total")
    loss.plot(batches, losses, color=TRAIN, linewidth=1, alpha=0.35)
    loss.plot(batches, _smooth(losses), color=TRAIN, linewidth=1.8, label="training (smoothed)")
    eval_batches, eval_losses = _series(records, "eval/loss")
    if eval_losses:
        loss.plot(eval_batches, eval_losses, "o-", color=VALIDATION, linewidth=1.5, markersize=4, label="validation")
        loss.annotate(
            f"{eval_losses[-1]:.3f}",
            (eval_batches[-1], eval_losses[-1]),
            (6, -3),
            textcoords="offset points",
            fontsize=9,
        )
    for style, (name, value) in zip(("--", ":", "-."), (baselines or {}).items(), strict=False):
        loss.axhline(value, color=REFERENCE, linestyle=style, linewidth=1.2, label=f"{name} model, {value:.2f}")
    loss.set_ylabel("loss, nats per token")
    loss.set_title(title, fontsize=11)
    loss.legend(frameon=False, fontsize=9)
    batches, rates = _series(records, "throughput/tokens_per_sec")
    speed.plot(batches, rates, color=TRAIN, linewidth=1.2)
    speed.set_ylim(bottom=0)
    speed.set_ylabel("tokens/s")
    speed.set_xlabel("batch")
    for axes in (loss, speed):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
    figure.savefig(path)
    plt.close(figure)


def _series(records: list[Record], key: str) -> tuple[list[int], list[float]]:
    points = [(record["batch"], record[key]) for record in records if record.get(key) is not None]
    return [batch for batch, _ in points], [value for _, value in points]


def _smooth(values: list[float], weight: float = 0.9) -> list[float]:
    """Exponential moving average, corrected for its start."""
    smoothed, average = [], 0.0
    for i, value in enumerate(values, start=1):
        average = weight * average + (1 - weight) * value
        smoothed.append(average / (1 - weight**i))
    return smoothed
