"""A training step through our Trainer path beside what it is made of and beside its peers.

llmfoundry-lite bench train --seq-len 512 --batch-size 4 --peer-python foundry/bin/python --out results

Every measurement is a process of its own, and the processes take turns, so that a machine that is slow for a while
is slow for all of them. Reported is the median step. What the steps are held against is the rate of matrix products
of the model's own shapes, forward and backward, measured in the same turns.
"""

import json
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

import torch
import torch.nn.functional as F
from torch import nn

from llmfoundry_lite.bench.frame import (
    Spread,
    Table,
    describe_conditions,
    open_console,
    ratios,
    show,
    take_turns,
    write_report,
)
from llmfoundry_lite.bench.shapes import SHAPES, check_shapes, count_step_flops, model_of
from llmfoundry_lite.bench.train import peer
from llmfoundry_lite.bench.train.made_up import random_tokens, write_run
from llmfoundry_lite.devices import device_type, keep_freed_memory, peak_memory_bytes
from llmfoundry_lite.hardware import GIB
from llmfoundry_lite.models.flops import count_parameters
from llmfoundry_lite.models.products import multiply

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SIDES = {
    "matmul": "matrix products of the model's shapes",
    "foundry": "LLM Foundry's MPT, bare loop",
    "plain": "a plain SDPA model, bare loop",
    "bare": "our model, bare loop",
    "trainer": "our model, Trainer",
}
"""In the order of the table. LLM Foundry's and the plain model's bf16 is autocast."""


def run(
    shape: str,
    seq_len: int,
    batch_size: int,
    num_steps: int,
    num_rounds: int,
    *,
    peer_python: str | None = None,
    overrides: Sequence[str] = (),
    out: Path | None = None,
) -> dict[str, Any]:
    """Measure all sides, print a table, write train-SHAPE-LENGTH.json and .md to `out`, and return what the JSON holds.

    `overrides` (key=value) go to the Trainer's side.
    """
    check_shapes("--shape", [shape])
    console, report = open_console(), describe_conditions()
    settings = {"shape": shape, "seq_len": seq_len, "batch_size": batch_size, "num_steps": num_steps}
    tasks = {
        f"{side} {dtype}": {"side": f"{side} {dtype}", "overrides": list(overrides), **settings}
        for dtype in DTYPES
        for side in SIDES
        if side != "foundry" or peer_python
    }
    measures = {side: partial(measure_in_a_process, task, peer_python) for side, task in tasks.items()}
    results, failed = take_turns(measures, num_rounds, console)
    flops = count_step_flops(shape, seq_len, batch_size)
    report |= {
        **settings,
        "num_rounds": num_rounds,
        "num_parameters": count_parameters(model_of(shape, seq_len)),
        "model_flops_per_step": flops,
        "sides": {
            side: summarise(rounds, flops, None if side.startswith("matmul") else batch_size * seq_len)
            for side, rounds in results.items()
            if rounds
        },
        "failed": failed,
    }
    show(console, table_of(report), notes=notes_of(report))
    if out is not None:
        name, heading = f"train-{shape}-{seq_len}", "A training step, beside its peers and its own matrix products"
        asked, command = ("shape", "seq_len", "batch_size"), "llmfoundry-lite bench train"
        write_report(out, name, heading, command, report, table_of(report), notes_of(report), asked=asked)
    return report


def summarise(rounds: Sequence[dict[str, Any]], flops: int, num_tokens: int | None) -> dict[str, Any]:
    """One side: medians of all its steps, and for ratios its rate and memory in each round."""
    seconds = statistics.median(value for result in rounds for value in result["step_seconds"])
    flops = rounds[0].get("flops", flops)
    return {
        "step_seconds": seconds,
        "tokens_per_sec": num_tokens and num_tokens / seconds,
        "flops_per_sec": flops / seconds,
        "peak_bytes": max(result["peak_bytes"] for result in rounds),
        "rounds": [
            {"flops_per_sec": flops / statistics.median(one["step_seconds"]), "peak_bytes": one["peak_bytes"]}
            for one in rounds
        ],
    }


def compare(report: dict[str, Any]) -> list[tuple[str, Spread, str]]:
    """(what, how many times or what share, the aim): what the table says in numbers that travel between machines."""
    sides, found = report["sides"], []

    def ratio(what: str, key: str, above: str, below: str, aim: str) -> None:
        if above in sides and below in sides:
            rounds = ([one[key] for one in sides[side]["rounds"]] for side in (above, below))
            found.append((what, ratios(*rounds), aim))

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


def table_of(report: dict[str, Any]) -> Table:
    rows = []
    for side, result in report["sides"].items():
        name, dtype = side.split()
        tokens = result["tokens_per_sec"]
        rows.append(
            [
                f"{SIDES[name]}, {dtype}",
                f"{result['step_seconds']:.3f}",
                "" if tokens is None else f"{tokens:,.0f}",
                f"{result['flops_per_sec'] / 1e9:,.0f}",
                "" if tokens is None else f"{result['peak_bytes'] / GIB:.2f}",
            ]
        )
    title = (
        f"{report['num_parameters']:,} parameters, {report['batch_size']} x {report['seq_len']} tokens, "
        f"{report['device']}, {report['num_threads']} threads, the median of {report['num_rounds']} x "
        f"{report['num_steps']} steps"
    )
    return Table(title, ["step", "seconds", "tokens/s", "GFLOP/s", "peak memory, GiB"], rows)


def notes_of(report: dict[str, Any]) -> list[str]:
    lines = [f"{what}: {value}{f' ({aim})' if aim else ''}" for what, value, aim in compare(report)]
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
    from llmfoundry_lite.config.load_train import load_train_config
    from llmfoundry_lite.training.train import train

    with tempfile.TemporaryDirectory() as folder:
        path = write_run(Path(folder), settings, dtype)
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
    config = model_of(settings["shape"], settings["seq_len"])
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
