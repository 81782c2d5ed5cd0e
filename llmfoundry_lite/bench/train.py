"""A training step through our Trainer path beside a bare hand-written loop of the same shape.

llmfoundry-lite bench train --seq-len 512 --batch-size 4

Every measurement is a process of its own, and the processes take turns, so that a machine that is slow for a while
is slow for all of them. Reported is the median step.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

from llmfoundry_lite.config.schema import ModelConfig
from llmfoundry_lite.devices import device_type, peak_memory_bytes
from llmfoundry_lite.models.flops import count_flops_per_token, count_parameters

SHAPES: dict[str, dict[str, Any]] = {
    "124m": {"d_model": 768, "n_heads": 12, "n_layers": 12, "vocab_size": 50368},
    "tiny": {"d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 512},
}
VARIANTS = ("bare fp32", "trainer fp32", "bare bf16", "trainer bf16")


def run(shape: str, seq_len: int, batch_size: int, num_steps: int, num_rounds: int) -> dict[str, Any]:
    """Measure all variants, print a table, return it as a dictionary."""
    console = Console()
    settings = {"shape": shape, "seq_len": seq_len, "batch_size": batch_size, "num_steps": num_steps}
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    peak_bytes: dict[str, int] = {}
    for round_number in range(num_rounds):
        for variant in VARIANTS:
            console.print(f"round {round_number + 1}/{num_rounds}: {variant}")
            result = _measure_in_a_process({"variant": variant, **settings})
            seconds[variant] += result["step_seconds"]
            peak_bytes[variant] = result["peak_bytes"]
    medians = {variant: statistics.median(values) for variant, values in seconds.items()}
    report = {
        **settings,
        "torch": torch.__version__,
        "num_threads": torch.get_num_threads(),
        "tokens_per_sec": {variant: batch_size * seq_len / value for variant, value in medians.items()},
        "trainer_over_bare": {kind: medians[f"trainer {kind}"] / medians[f"bare {kind}"] for kind in ("fp32", "bf16")},
        "bf16_over_fp32": medians["trainer fp32"] / medians["trainer bf16"],
        "peak_bytes": peak_bytes,
    }
    _print(report, console)
    return report


def _print(report: dict[str, Any], console: Console) -> None:
    model = ModelConfig(max_seq_len=report["seq_len"], **SHAPES[report["shape"]])
    flops = count_flops_per_token(model, report["seq_len"])
    table = Table(title=f"{count_parameters(model):,} parameters, {report['batch_size']} x {report['seq_len']} tokens")
    table.add_column("step")
    for heading in ("tokens/s", "model GFLOP/s", "peak memory, GiB"):
        table.add_column(heading, justify="right")
    for variant, rate in report["tokens_per_sec"].items():
        memory = report["peak_bytes"][variant] / (1 << 30)
        table.add_row(variant, f"{rate:,.0f}", f"{rate * flops / 1e9:,.0f}", f"{memory:.2f}")
    console.print(table)
    for kind, ratio in report["trainer_over_bare"].items():
        console.print(f"a step through the Trainer takes {ratio:.2f} of the bare loop's time, {kind}")
    console.print(f"bf16 is {report['bf16_over_fp32']:.2f} times as fast as fp32 through the Trainer")


def _measure_in_a_process(settings: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "llmfoundry_lite.bench.train", json.dumps(settings)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{settings['variant']} failed:\n{result.stdout}\n{result.stderr}")
    return json.loads(result.stdout.splitlines()[-1])


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """One variant in this process: {step_seconds, peak_bytes}. The first two steps are left out."""
    kind, dtype = settings["variant"].split()
    steps = (measure_bare if kind == "bare" else measure_trainer)(settings, dtype)
    return {"step_seconds": steps[2:], "peak_bytes": peak_memory_bytes()}


def measure_trainer(settings: dict[str, Any], dtype: str) -> list[float]:
    """Seconds of each step of a real run: shards, loader, Composer's loop, metrics."""
    from streaming import MDSWriter

    from llmfoundry_lite.config.load import load_train_config
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
        train(load_train_config([str(path)]).config)
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    seconds = {record["batch"]: record["time/batch_seconds"] for record in map(json.loads, lines)}
    return [seconds[batch] for batch in sorted(seconds)]


def measure_bare(settings: dict[str, Any], dtype: str) -> list[float]:
    """Seconds of each step of the plainest loop one would write by hand, bf16 under autocast."""
    seq_len, shape, device = settings["seq_len"], SHAPES[settings["shape"]], device_type()
    num_steps, batch_size = settings["num_steps"] + 2, settings["batch_size"]
    model = BareGPT(seq_len=seq_len, **shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    tokens = torch.from_numpy(random_tokens(num_steps * batch_size, seq_len, shape["vocab_size"]))
    seconds = []
    for batch in tokens.to(device).split(batch_size):
        started = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bf16"):
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return seconds


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
