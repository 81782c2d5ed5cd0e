"""Does the best learning rate of a narrow model stay the best one for wider models, with muP and without?

    llmfoundry-lite data prepare --source python-stdlib --out FOLDER --tokenizer train:1024 --max-seq-len 128
    python -m benchmarks mup --data FOLDER --keep runs/mup --out docs/measurements

Each width is trained from the same data with each learning rate, once with muP and once without. `mup.yaml` beside this
file is the run. What an ordinary launch does around a step (Composer, saves, ranks) is left out, so that dozens of runs
take minutes: model, initial weights, optimizer, schedule, clipping and the order of the data are the product's.

`--keep` has the losses of finished runs. Called again, the benchmark continues where it stopped. The coordinate check
is `llmfoundry-lite bench mup`.
"""

import json
import math
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.data.dataset import TextDataset
from llmfoundry_lite.data.loader import build_text_loader
from llmfoundry_lite.files import write_atomically
from llmfoundry_lite.models.initialise import initialise_weights
from llmfoundry_lite.models.mpt import MPT
from llmfoundry_lite.tables import Table
from llmfoundry_lite.training.schedule import learning_rate_multiplier
from llmfoundry_machines.bench.frame import describe_conditions, drawn, format_command, open_console, tabulate, tell
from llmfoundry_machines.bench.mup import SIDES, build_optimizer, scale_model

RUN = Path(__file__).parent / "mup.yaml"
NUM_VALIDATION_SAMPLES = 64
DIVERGED = 7.0
"""Loss above which a run has learned nothing: that of a uniform guess among 1,024 tokens is 6.93."""


class Case(NamedTuple):
    """A run of the benchmark."""

    side: str
    """One of SIDES."""
    width: int
    rate: float
    seed: int

    def __str__(self) -> str:
        return f"{self.side}-{self.width}-{self.rate:g}-{self.seed}"


def run(
    *,
    data: Path = Path("data/python-stdlib"),
    widths: Sequence[int] = (64, 128, 256),
    rates: Sequence[float] = (0.004, 0.008, 0.016, 0.032, 0.064),
    seeds: Sequence[int] = (17, 18, 19),
    num_processes: int = 2,
    keep: Path = Path("runs/mup"),
    out: Path | None = None,
) -> dict[str, Any]:
    """Train all widths with all rates and seeds, print the table of means over the seeds, and return the report.

    The first of `widths` is muP's base width. There are at least three `rates`. Each of `num_processes` trains a run
    with one thread. `out` gets mup-transfer.json, .md and .png.
    """
    conditions = describe_conditions()
    asked = {"widths": list(widths), "rates": list(rates), "seeds": list(seeds)}
    console = open_console()
    keep.mkdir(parents=True, exist_ok=True)
    # At the base width, a run with muP is the run without it.
    cases: list[Case] = []
    for seed, width, side in product(seeds, widths, SIDES):
        if width != widths[0] or side == "without":
            cases += [Case(side, width, rate, seed) for rate in rates]

    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        futures = {case: pool.submit(train, case, widths[0], str(data), str(keep)) for case in cases}
        losses: dict[Case, float] = {}
        for case, future in futures.items():
            losses[case] = future.result()
            console.print(f"{case}: {losses[case]:.4f}", markup=False, highlight=False)
            if case.width == widths[0]:
                losses[case._replace(side=SIDES[0])] = losses[case]

    rows = [describe_width(losses, side, width, rates, seeds) for side, width in product(SIDES, widths)]
    report = conditions | asked | {"rows": rows}
    tell(
        report,
        EXPLANATION,
        build_table(report),
        describe_transfer(report),
        name="mup-transfer",
        heading="The best learning rate, by width",
        command=format_command("python -m benchmarks mup", **asked),
        asked=tuple(asked),
        plot=plot,
        out=out,
    )
    return report


def train(case: Case, base_width: int, data: str, keep: str) -> float:
    """Train a run and return its validation loss; infinity if it diverges. A run that is in `keep` is not repeated."""
    path = Path(keep) / f"{case}.json"
    if path.exists():
        return float(json.loads(path.read_text())["loss"])
    torch.set_num_threads(1)
    arguments = [f"variables.data={data}", f"optimizer.lr={case.rate}", f"seed={case.seed}"]
    config = load_train_config([str(RUN), *arguments]).config
    model_config = scale_model(config.model, case.width, base_width, "heads", has_mup=case.side == "muP")
    model = MPT(model_config)
    initialise_weights(model, config.seed)
    optimizer = build_optimizer(config, model_config, model)
    initial_rates = [group["lr"] for group in optimizer.param_groups]

    dataset = open_data(config, "train")
    for batch, rows in enumerate(build_text_loader(dataset)):
        if batch == config.max_duration.value:
            break
        multiplier = learning_rate_multiplier(config.scheduler, config.max_duration, lambda _, batch=batch: batch)
        for group, rate in zip(optimizer.param_groups, initial_rates, strict=True):
            group["lr"] = rate * multiplier
        optimizer.zero_grad()
        loss_of(model, rows["input_ids"]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.algorithms.gradient_clipping.clipping_threshold)
        optimizer.step()

    loss = validate(config, model)
    write_atomically(path, json.dumps({"loss": loss}))
    return loss


def open_data(config: TrainConfig, split: str) -> TextDataset:
    """Open a split of the run's data, in the order in which a launch on one rank reads it."""
    return TextDataset(
        replace(config.train_loader.dataset, split=split),
        max_seq_len=config.max_seq_len,
        global_batch_size=config.global_train_batch_size,
        evaluation=split == "val",
        vocab_size=config.model.vocab_size,
        max_duration=config.max_duration,
        max_samples=NUM_VALIDATION_SAMPLES if split == "val" else None,
    )


@torch.no_grad()
def validate(config: TrainConfig, model: MPT) -> float:
    """Return the mean loss on the first samples of the validation split; infinity if it is not finite."""
    losses = [float(loss_of(model, rows["input_ids"])) for rows in build_text_loader(open_data(config, "val"))]
    mean = sum(losses) / len(losses)
    return mean if math.isfinite(mean) else math.inf


def loss_of(model: MPT, tokens_bt: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of predicting each next token, in nats."""
    tokens_bt = tokens_bt.long()
    return F.cross_entropy(model(tokens_bt[:, :-1]).flatten(0, 1), tokens_bt[:, 1:].flatten())


# -------------------------------------------------------------------------------------------------- what is shown

EXPLANATION = (
    "Models of two blocks are trained for 120 batches of 1,024 tokens of Python's standard library, with decoupled "
    "AdamW, a cosine schedule and each learning rate. The table has the loss on the same held-out samples, in nats per "
    "token, as the mean over the seeds. At the narrowest width, the base of muP, both sides are the same run. A "
    "parabola through the best rate and its neighbours gives the best rate between those that were tried."
)


def describe_width(
    losses: dict[Case, float], side: str, width: int, rates: Sequence[float], seeds: Sequence[int]
) -> dict[str, Any]:
    """Return the row of a width on one side: its losses, as means over the seeds, and the best rate."""
    by_rate: dict[float, float] = {}
    for rate in rates:
        by_rate[rate] = sum(losses[Case(side, width, rate, seed)] for seed in seeds) / len(seeds)
    best = min(rates, key=lambda rate: by_rate[rate])
    row = {"side": side, "width": width, "losses": list(by_rate.values()), "best": best, "loss": by_rate[best]}
    return row | {"between": interpolate_best(rates, row["losses"])}


def interpolate_best(rates: Sequence[float], losses: Sequence[float]) -> float:
    """Return the rate with the least loss on a parabola through the best rate and its two neighbours.

    The parabola is one over the logarithm of the rate. At either end of `rates`, it goes through the last three.
    """
    best = min(range(len(rates)), key=lambda index: losses[index])
    first = min(max(best - 1, 0), len(rates) - 3)
    curvature, slope, _ = np.polyfit(np.log2(rates[first : first + 3]), losses[first : first + 3], 2)
    return float(2 ** (-slope / (2 * curvature)))


def build_table(report: dict[str, Any]) -> Table:
    """Build the table of losses, with a row for each width on each side."""
    columns: list[Any] = [("", "{side}"), ("width", "{width}")]
    for index, rate in enumerate(report["rates"]):
        columns.append((f"lr {rate:g}", f"{{losses[{index}]:.3f}}"))
    columns += [("best lr", "{best:g}"), ("best by a parabola", "{between:.2g}")]
    return tabulate("", columns, report["rows"], num_keys=2)


def describe_transfer(report: dict[str, Any]) -> list[str]:
    """Return a line for each side: what the widest model loses with the rate that is best for the narrowest one."""
    notes = []
    for side in SIDES:
        rows = [row for row in report["rows"] if row["side"] == side]
        narrow, wide = rows[0], rows[-1]
        loss = wide["losses"][report["rates"].index(narrow["best"])]
        steps = math.log2(wide["between"] / narrow["between"])
        notes.append(
            f"{side}: the best rate by a parabola moves by a factor of 2^{steps:+.1f} from width {narrow['width']} to "
            f"{wide['width']}; with the best rate of width {narrow['width']}, the widest model's loss is {loss:.3f}, "
            f"and with its own best {wide['loss']:.3f}"
        )
    return notes


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw the loss over the learning rate, a line for each width: with muP left, without it right."""
    from llmfoundry_lite.report.canvas import curve_color, style_panels

    with drawn(path, 2, (9, 3.8), sharey=True) as panels:
        for axes, side in zip(panels, SIDES, strict=True):
            for index, row in enumerate(row for row in report["rows"] if row["side"] == side):
                losses = [loss if loss < DIVERGED else math.nan for loss in row["losses"]]
                color = curve_color(index)
                axes.plot(report["rates"], losses, "o-", color=color, markersize=4, label=f"width {row['width']}")
                axes.plot(row["best"], row["loss"], "*", color=color, markersize=13)
            axes.set_xscale("log", base=2)
            axes.set_xticks(report["rates"], [f"{rate:g}" for rate in report["rates"]], fontsize=8)
            axes.minorticks_off()
            axes.set_title("with muP" if side == "muP" else "without muP", fontsize=10)
            axes.set_xlabel("learning rate (a star: the best)")
        panels[0].set_ylabel("validation loss, nats per token")
        panels[0].legend(frameon=False, fontsize=9)
        style_panels(panels)
