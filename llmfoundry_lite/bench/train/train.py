"""A training step through our Trainer path beside what it is made of and beside its peers.

llmfoundry-lite bench train --seq-len 512 --batch-size 4 --peer-python foundry/bin/python --out results

Every measurement is a process of its own, and the processes take turns, so that a machine that is slow for a while
is slow for all of them. Reported is the median step. What the steps are held against is the rate of matrix products
of the model's own shapes, forward and backward, measured in the same turns.
"""

import datetime
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

from llmfoundry_lite.bench.train import peer
from llmfoundry_lite.config.schema import ModelConfig
from llmfoundry_lite.devices import device_name, device_type, keep_freed_memory, peak_memory_bytes
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.evaluation.tables import markdown_table
from llmfoundry_lite.hardware import GIB
from llmfoundry_lite.models.flops import count_flops_per_token, count_parameters
from llmfoundry_lite.models.products import multiply

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 512},
    "10m": {"d_model": 256, "n_heads": 4, "n_layers": 6, "vocab_size": 16384},
    "40m": {"d_model": 512, "n_heads": 8, "n_layers": 8, "vocab_size": 32768},
    "124m": {"d_model": 768, "n_heads": 12, "n_layers": 12, "vocab_size": 50368},
    "350m": {"d_model": 1024, "n_heads": 16, "n_layers": 24, "vocab_size": 50368},
    "1b": {"d_model": 2048, "n_heads": 16, "n_layers": 24, "vocab_size": 50368},
    "3b": {"d_model": 2560, "n_heads": 20, "n_layers": 32, "vocab_size": 50368},
    "7b": {"d_model": 4096, "n_heads": 32, "n_layers": 32, "vocab_size": 50368},
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SIDES = {
    "matmul": "matrix products of the model's shapes",
    "foundry": "LLM Foundry's MPT, bare loop",
    "plain": "a plain SDPA model, bare loop",
    "bare": "our model, bare loop",
    "trainer": "our model, Trainer",
}
"""In the order of the table. LLM Foundry's and the plain model's bf16 is autocast."""

HEADINGS = ["step", "seconds", "tokens/s", "GFLOP/s", "peak memory, GiB"]


def run(
    shape: str,
    seq_len: int,
    batch_size: int,
    num_steps: int,
    num_rounds: int,
    *,
    peer_python: str | None = None,
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """Measure all sides, print a table, return it as a dictionary. `overrides` (key=value) go to the Trainer's side."""
    if shape not in SHAPES:
        raise ConfigError(f"--shape {shape}: expected one of {', '.join(SHAPES)}")
    console, load_average = Console(), os.getloadavg()[0]
    settings = {"shape": shape, "seq_len": seq_len, "batch_size": batch_size, "num_steps": num_steps}
    sides = [f"{side} {dtype}" for dtype in DTYPES for side in SIDES if side != "foundry" or peer_python]
    results: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    failed: dict[str, str] = {}
    for round_number in range(num_rounds):
        for side in sides:
            console.print(f"round {round_number + 1}/{num_rounds}: {side}")
            task = {"side": side, "overrides": list(overrides), **settings}
            try:
                results[side].append(measure_in_a_process(task, peer_python))
            except RuntimeError as error:
                failed[side] = str(error).strip().splitlines()[-1]
    model = ModelConfig(max_seq_len=seq_len, no_bias=True, **SHAPES[shape])
    flops = count_flops_per_token(model, seq_len) * batch_size * seq_len
    report: dict[str, Any] = {
        **settings,
        "num_rounds": num_rounds,
        "date": datetime.date.today().isoformat(),
        "load_average": load_average,
        "device": device_name(),
        "torch": torch.__version__,
        "num_threads": torch.get_num_threads(),
        "num_parameters": count_parameters(model),
        "model_flops_per_step": flops,
        "sides": {},
        "failed": failed,
    }
    for side, rounds in results.items():
        if not rounds:
            continue
        seconds = statistics.median([value for result in rounds for value in result["step_seconds"]])
        done = rounds[0].get("flops", flops)
        report["sides"][side] = {
            "step_seconds": seconds,
            "tokens_per_sec": None if side.startswith("matmul") else batch_size * seq_len / seconds,
            "flops_per_sec": done / seconds,
            "peak_bytes": max(result["peak_bytes"] for result in rounds),
        }
    _print(report, console)
    return report


def compare(report: dict[str, Any]) -> list[tuple[str, float, str]]:
    """(what, how many times or what share, the aim): what the table says in numbers that travel between machines."""
    sides, found = report["sides"], []

    def ratio(what: str, key: str, above: str, below: str, aim: str) -> None:
        if above in sides and below in sides:
            found.append((what, sides[above][key] / sides[below][key], aim))

    rate, memory = "flops_per_sec", "peak_bytes"
    for dtype, faster, share in (("fp32", "1.3", "0.85"), ("bf16", "2.0", "0.70")):
        ratio(f"Trainer over LLM Foundry, {dtype}", rate, f"trainer {dtype}", f"foundry {dtype}", f"at least {faster}")
        ratio(
            f"Trainer over matrix products, {dtype}", rate, f"trainer {dtype}", f"matmul {dtype}", f"at least {share}"
        )
        ratio(f"Trainer over our bare loop, {dtype}", rate, f"trainer {dtype}", f"bare {dtype}", "at least 0.98")
        ratio(f"Trainer over a plain SDPA model, {dtype}", rate, f"trainer {dtype}", f"plain {dtype}", "")
        ratio(f"memory over LLM Foundry's, {dtype}", memory, f"trainer {dtype}", f"foundry {dtype}", "at most 0.6")
    ratio("Trainer in bf16 over LLM Foundry in fp32", rate, "trainer bf16", "foundry fp32", "at least 3.5")
    ratio("Trainer in bf16 over fp32", rate, "trainer bf16", "trainer fp32", "")
    return found


def _print(report: dict[str, Any], console: Console) -> None:
    table = Table(title=title_of(report))
    table.add_column(HEADINGS[0])
    for heading in HEADINGS[1:]:
        table.add_column(heading, justify="right")
    for row in rows_of(report):
        table.add_row(*row)
    console.print(table)
    for line in ratios_of(report):
        console.print(line, highlight=False)


def write_report(report: dict[str, Any], folder: Path) -> None:
    """train-SHAPE-LENGTH.json (everything) and .md (the table), named for what was measured."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"train-{report['shape']}-{report['seq_len']}"
    (folder / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    lines = [
        "# A training step, beside its peers and its own matrix products",
        "",
        f"`llmfoundry-lite bench train`, {report['date']}, torch {report['torch']}: {title_of(report)}; the median of "
        f"{report['num_rounds']} x {report['num_steps']} steps; load average before it {report['load_average']:.1f}.",
        "",
        *markdown_table([HEADINGS, *rows_of(report)]),
        "",
        *(f"- {line}" for line in ratios_of(report)),
    ]
    (folder / f"{name}.md").write_text("\n".join(lines) + "\n")


def title_of(report: dict[str, Any]) -> str:
    tokens = f"{report['num_parameters']:,} parameters, {report['batch_size']} x {report['seq_len']} tokens"
    return f"{tokens}, {report['device']}, {report['num_threads']} threads"


def rows_of(report: dict[str, Any]) -> list[list[str]]:
    rows = []
    for side, result in report["sides"].items():
        name, dtype = side.split()
        tokens = result["tokens_per_sec"]
        is_products = tokens is None
        rows.append(
            [
                f"{SIDES[name]}, {dtype}",
                f"{result['step_seconds']:.3f}",
                "" if is_products else f"{tokens:,.0f}",
                f"{result['flops_per_sec'] / 1e9:,.0f}",
                "" if is_products else f"{result['peak_bytes'] / GIB:.2f}",
            ]
        )
    return rows


def ratios_of(report: dict[str, Any]) -> list[str]:
    lines = [f"{what}: {value:.2f}{f' ({aim})' if aim else ''}" for what, value, aim in compare(report)]
    return [*lines, *(f"not measured: {reason}" for reason in report["failed"].values())]


# ---------------------------------------------------------------------------------------------- one side, one process


def measure_in_a_process(settings: dict[str, Any], peer_python: str | None) -> dict[str, Any]:
    if settings["side"].startswith("foundry"):
        assert peer_python is not None
        dtype = settings["side"].split()[1]
        task = {**settings, "dtype": dtype, "model": SHAPES[settings["shape"]]}
        command = [peer_python, peer.__file__, json.dumps(task)]
    else:
        command = [sys.executable, "-m", "llmfoundry_lite.bench.train.train", json.dumps(settings)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode == -signal.SIGKILL:
        raise RuntimeError(f"{settings['side']}: killed, for want of memory as a rule")
    if result.returncode != 0:
        raise RuntimeError(f"{settings['side']} failed:\n{result.stdout}\n{result.stderr}")
    measured = json.loads(result.stdout.splitlines()[-1])
    if found := re.search(r"^device_train_microbatch_size: auto is (\d+)", result.stdout, re.MULTILINE):
        measured["microbatch_size"] = int(found[1])
    return measured


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """One side in this process: {step_seconds, peak_bytes}, and flops where they are not the model's. The first two
    steps are left out."""
    side, dtype = settings["side"].split()
    if side != "plain":
        keep_freed_memory()
    if side == "matmul":
        return measure_products(settings, dtype)
    steps = {"plain": measure_plain, "bare": measure_bare, "trainer": measure_trainer}[side](settings, dtype)
    return {"step_seconds": steps[2:], "peak_bytes": peak_memory_bytes()}


def measure_products(settings: dict[str, Any], dtype: str) -> dict[str, Any]:
    """One step's matrix products between activations and weights, three of each: forward, and both gradients."""
    device, num_tokens = device_type(), settings["batch_size"] * settings["seq_len"]
    d, layers = SHAPES[settings["shape"]]["d_model"], SHAPES[settings["shape"]]["n_layers"]
    weights = {(3 * d, d): layers, (d, d): layers, (4 * d, d): layers, (d, 4 * d): layers}
    weights[SHAPES[settings["shape"]]["vocab_size"], d] = 1
    flops, seconds = 0, [0.0] * settings["num_steps"]
    for (rows, columns), count in weights.items():
        weight = torch.randn(rows, columns, device=device, dtype=DTYPES[dtype])
        x, gradient = (torch.randn(num_tokens, n, device=device, dtype=DTYPES[dtype]) for n in (columns, rows))
        flops += count * 3 * 2 * num_tokens * rows * columns
        for step in range(-2, settings["num_steps"]):
            started = time.perf_counter()
            _, _, last = multiply(x, weight), multiply(gradient, weight.T), multiply(gradient.T, x.T)
            last.flatten()[0].item()
            if step >= 0:
                seconds[step] += count * (time.perf_counter() - started)
    return {"step_seconds": seconds, "flops": flops, "peak_bytes": peak_memory_bytes()}


def measure_trainer(settings: dict[str, Any], dtype: str) -> list[float]:
    """Seconds of each step of a real run: shards, loader, Composer's loop, metrics."""
    from streaming import MDSWriter

    from llmfoundry_lite.config.load_train import load_train_config
    from llmfoundry_lite.training.train import train

    seq_len, shape = settings["seq_len"], SHAPES[settings["shape"]]
    num_batches = settings["num_steps"] + 2
    with tempfile.TemporaryDirectory() as folder:
        with MDSWriter(out=f"{folder}/train", columns={"tokens": "ndarray:uint16"}) as writer:
            for row in random_tokens(num_batches * settings["batch_size"], seq_len, shape["vocab_size"]):
                writer.write({"tokens": row.astype(np.uint16)})
        config = {
            "model": {"name": "mpt_causal_lm", "no_bias": True, "max_seq_len": seq_len, **shape},
            "tokenizer": {"name": "none/none"},
            "train_loader": {"dataset": {"local": folder, "split": "train"}},
            "optimizer": {"name": "adamw", "lr": 1e-4},
            "scheduler": {"name": "constant_with_warmup"},
            "algorithms": {"gradient_clipping": {"clipping_type": "norm", "clipping_threshold": 1.0}},
            "max_seq_len": seq_len,
            "max_duration": f"{num_batches}ba",
            "global_train_batch_size": settings["batch_size"],
            "precision": "fp32" if dtype == "fp32" else "amp_bf16",
            "log_to_console": False,
            "export_at_end": False,
            "run_folder": f"{folder}/run",
        }
        path = Path(folder, "bench.yaml")
        path.write_text(json.dumps(config))
        train(load_train_config([str(path), *settings.get("overrides", ())]).config)
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    seconds = {record["batch"]: record["time/batch_seconds"] for record in map(json.loads, lines)}
    return [seconds[batch] for batch in sorted(seconds)]


def measure_bare(settings: dict[str, Any], dtype: str) -> list[float]:
    """Seconds of each step of our model and our loss, without Composer."""
    import torch.distributed as dist

    from llmfoundry_lite.config.layout import Layout
    from llmfoundry_lite.config.schema import FSDPConfig
    from llmfoundry_lite.parallel.fsdp import build_parallel_model
    from llmfoundry_lite.parallel.mesh import build_mesh
    from llmfoundry_lite.parallel.precision import PRECISIONS
    from llmfoundry_lite.training.loss import cross_entropy_sum, next_token_labels

    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    fsdp = FSDPConfig(sharding_strategy="NO_SHARD")
    precision = PRECISIONS["fp32" if dtype == "fp32" else "amp_bf16", fsdp.mixed_precision]
    config = ModelConfig(no_bias=True, max_seq_len=settings["seq_len"], **SHAPES[settings["shape"]])
    model = build_parallel_model(config, fsdp, precision, build_mesh(Layout(), device_type()), seed=17)

    def compute_loss(tokens_bt: torch.Tensor) -> torch.Tensor:
        labels_bt = next_token_labels(tokens_bt)
        return model(tokens_bt, head=partial(cross_entropy_sum, labels_bt=labels_bt)) / labels_bt.numel()

    return peer.run_steps(model, compute_loss, _batches(settings))


def measure_plain(settings: dict[str, Any], dtype: str) -> list[float]:
    """Seconds of each step of the plainest model and loss one would write by hand, bf16 under autocast."""
    model: nn.Module = BareGPT(seq_len=settings["seq_len"], **SHAPES[settings["shape"]]).to(device_type())
    if settings.get("compiled"):
        model.compile()

    def compute_loss(tokens_bt: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device_type(), torch.bfloat16, enabled=dtype == "bf16"):
            logits = model(tokens_bt)[:, :-1]
            return F.cross_entropy(logits.flatten(0, 1), tokens_bt[:, 1:].flatten())

    return peer.run_steps(model, compute_loss, _batches(settings))


def _batches(settings: dict[str, Any]) -> Sequence[torch.Tensor]:
    batch_size, num_steps = settings["batch_size"], settings["num_steps"] + 2
    vocab_size = SHAPES[settings["shape"]]["vocab_size"]
    tokens = torch.from_numpy(random_tokens(num_steps * batch_size, settings["seq_len"], vocab_size))
    return tokens.to(device_type()).split(batch_size)


def random_tokens(num_samples: int, seq_len: int, vocab_size: int) -> np.ndarray:
    return np.random.default_rng(0).integers(vocab_size, size=(num_samples, seq_len))


class BareGPT(nn.Module):
    """A pre-norm GPT in as few lines as it takes."""

    def __init__(self, d_model: int, n_heads: int, n_layers: int, vocab_size: int, seq_len: int):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, d_model)
        self.position = nn.Embedding(seq_len, d_model)
        self.blocks = nn.ModuleList(BareBlock(d_model, n_heads) for _ in range(n_layers))
        self.norm = nn.LayerNorm(d_model, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position.weight[: tokens.size(1)]
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.embed.weight.T


class BareBlock(nn.Module):
    def __init__(self, d_model: int, n_heads: int):
        super().__init__()
        self.n_heads = n_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(d_model, bias=False), nn.LayerNorm(d_model, bias=False)
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model, bias=False), nn.Linear(d_model, d_model, bias=False)
        self.up, self.down = nn.Linear(d_model, 4 * d_model, bias=False), nn.Linear(4 * d_model, d_model, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
