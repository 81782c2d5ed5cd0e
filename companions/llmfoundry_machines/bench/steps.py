"""Training steps of known models, each side in a process of its own: the Trainer, a plain model, matrix products.

`python -m llmfoundry_machines.bench.steps SETTINGS` prints {"step_seconds": [...], "peak_bytes": ...} as JSON.
Settings are side ("trainer bf16"), shape, seq_len, batch_size, num_steps and overrides.
"""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from llmfoundry_lite.companions import search_path
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.devices import device_type, keep_freed_memory, peak_memory_bytes
from llmfoundry_lite.models.flops import count_flops_per_token
from llmfoundry_lite.models.products import matmul_transposed
from llmfoundry_lite.ranks.start import use_loopback
from llmfoundry_machines.bench.turns import READY, STEPS, TIMED, WARM_UP, Mark

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 512},
    "10m": {"d_model": 256, "n_heads": 4, "n_layers": 7, "vocab_size": 16384},
    "40m": {"d_model": 512, "n_heads": 8, "n_layers": 7, "vocab_size": 32768},
    "125m": {"d_model": 768, "n_heads": 12, "n_layers": 12, "vocab_size": 50368},
    "350m": {"d_model": 1024, "n_heads": 16, "n_layers": 24, "vocab_size": 50368},
    "1b": {"d_model": 2048, "n_heads": 16, "n_layers": 24, "vocab_size": 50368},
    "gpt2-xl": {"d_model": 1600, "n_heads": 25, "n_layers": 48, "vocab_size": 50257},
    "3b": {"d_model": 2560, "n_heads": 20, "n_layers": 32, "vocab_size": 50368},
    "7b": {"d_model": 4096, "n_heads": 32, "n_layers": 32, "vocab_size": 50368},
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def model_of(shape: str, max_seq_len: int, **changes: Any) -> ModelConfig:
    return ModelConfig(**{"max_seq_len": max_seq_len, "no_bias": True, **SHAPES[shape], **changes})


def count_step_flops(shape: str, seq_len: int, batch_size: int) -> int:
    """Count model FLOPs of a training step."""
    return count_flops_per_token(model_of(shape, seq_len), seq_len) * batch_size * seq_len


def write_run(folder: Path, settings: dict[str, Any], dtype: str) -> Path:
    """Write data and a YAML for a run of `num_steps` + 2 steps; return the YAML's path.

    `settings`: shape, seq_len, batch_size, num_steps. The run folder is `folder`/run.
    """
    from streaming import MDSWriter

    seq_len, shape = settings["seq_len"], SHAPES[settings["shape"]]
    num_batches = settings["num_steps"] + 2
    with MDSWriter(out=f"{folder}/train", columns={"tokens": "ndarray:uint16"}) as writer:
        for row in random_tokens(num_batches * settings["batch_size"], seq_len, shape["vocab_size"]):
            writer.write({"tokens": row.astype(np.uint16)})
    config = {
        "model": {"name": "mpt_causal_lm", "no_bias": True, "max_seq_len": seq_len, **shape},
        "tokenizer": {"name": "none/none"},
        "train_loader": {"dataset": {"local": str(folder), "split": "train"}},
        "optimizer": {"name": "adamw", "lr": 1e-4},
        "scheduler": {"name": "constant_with_warmup"},
        "algorithms": {"gradient_clipping": {"clipping_type": "norm", "clipping_threshold": 1.0}},
        "max_seq_len": seq_len,
        "max_duration": f"{num_batches}ba",
        "global_train_batch_size": settings["batch_size"],
        "precision": "fp32" if dtype == "fp32" else f"amp_{dtype}",
        "log_to_console": False,
        "export_at_end": False,
        "run_folder": f"{folder}/run",
    }
    path = folder / "bench.yaml"
    path.write_text(json.dumps(config))
    return path


def random_tokens(num_samples: int, seq_len: int, vocab_size: int) -> np.ndarray:
    return np.random.default_rng(0).integers(vocab_size, size=(num_samples, seq_len))


def measure_in_a_process(
    settings: dict[str, Any], program: Sequence[str] = (sys.executable, "-P", "-m", __name__)
) -> dict[str, Any]:
    """Measure one side in a process of its own. Raises RuntimeError with its output if it fails."""
    pipe, environment = subprocess.PIPE, {**os.environ, **search_path()}
    command = [*program, json.dumps(settings)]
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True, env=environment)
    try:
        output, errors = process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode == -signal.SIGKILL:
        raise RuntimeError(f"{settings['side']}: killed, usually for lack of memory")
    if process.returncode != 0:
        raise RuntimeError(f"{settings['side']} failed:\n{output}\n{errors}")
    return json.loads(output.splitlines()[-1])


def measure_on_ranks(num_ranks: int, measure: Callable[[], Any]) -> Any:
    """Return what `measure` returns on the first of so many processes of one group, which share out cores or devices.

    Raises RuntimeError with the last line of the first that fails. None outlives this process.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.spawn(be_rank, (num_ranks, measure, folder), num_ranks, daemon=True)
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise RuntimeError(str(error).strip().splitlines()[-1]) from None
        return json.loads(Path(folder, "found.json").read_text())


def be_rank(rank: int, num_ranks: int, measure: Callable[[], Any], folder: str) -> None:
    keep_freed_memory()
    backend = "gloo"
    if device_type() == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.device_count() >= num_ranks else "gloo"
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // num_ranks))
    use_loopback()
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timedelta(minutes=10))
    dist.barrier()  # else one that fails at once would end the others while they connect
    found = measure()
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def train_on_ranks(num_ranks: int, arguments: Sequence[str]) -> None:
    """Train on so many ranks of this machine. Raises RuntimeError with the first error that a rank printed."""
    # By torchrun: Composer's launcher would import Composer once more, for nothing.
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command += ["-m", "llmfoundry_lite.launch_train", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = [line[7:] for line in done.stderr.splitlines() if line.startswith("error: ")][:1]
        raise RuntimeError("\n".join(said) or f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}")


# -------------------------------------------------------------------------------------------------------- the sides


def measure(settings: dict[str, Any], mark: Mark = lambda stage: None) -> dict[str, Any]:
    """Measure one side in this process. It tells `mark` of each stage, and goes on when that returns."""
    side, dtype = settings["side"].split()
    if side != "plain":
        keep_freed_memory()
    measure_side = {"matmul": measure_products, "plain": measure_plain, "trainer": measure_trainer}[side]
    return {**measure_side(settings, dtype, mark), "peak_bytes": peak_memory_bytes()}


def measure_products(settings: dict[str, Any], dtype: str, mark: Mark) -> dict[str, Any]:
    """Time one step's matrix products of activations and weights, three of each: forward, and both gradients."""
    for stage in (READY, STEPS, TIMED):
        mark(stage)
    device, num_tokens = device_type(), settings["batch_size"] * settings["seq_len"]
    d, layers = SHAPES[settings["shape"]]["d_model"], SHAPES[settings["shape"]]["n_layers"]
    weights = {(3 * d, d): layers, (d, d): layers, (4 * d, d): layers, (d, 4 * d): layers}
    weights[SHAPES[settings["shape"]]["vocab_size"], d] = 1
    flops, seconds = 0, [0.0] * settings["num_steps"]
    for (rows, columns), count in weights.items():
        weight = torch.randn(rows, columns, device=device, dtype=DTYPES[dtype])
        x, gradient = (torch.randn(num_tokens, n, device=device, dtype=DTYPES[dtype]) for n in (columns, rows))
        flops += count * 3 * 2 * num_tokens * rows * columns
        found = time_calls(partial(_multiply_thrice, x, weight, gradient), settings["num_steps"] + WARM_UP)
        seconds = [total + count * one for total, one in zip(seconds, found[WARM_UP:], strict=True)]
    return {"step_seconds": seconds, "flops": flops}


def _multiply_thrice(x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute a layer's output, and the gradients of its input and its weight."""
    return matmul_transposed(x, weight), matmul_transposed(gradient, weight.T), matmul_transposed(gradient.T, x.T)


def time_calls(work: Callable[[], object], num_calls: int) -> list[float]:
    """Return the seconds of each call. On a GPU all are enqueued between events of its own clock. Waiting for each
    would add the host's round trip to it, and make what it is compared with look faster."""
    if device_type() == "cpu":
        marks = [time.perf_counter()]
        for _ in range(num_calls):
            work()
            marks.append(time.perf_counter())
        return [after - before for before, after in itertools.pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_calls + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    events[-1].synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(events)]


def measure_trainer(settings: dict[str, Any], dtype: str, mark: Mark) -> dict[str, Any]:
    """Time the steps of a real run: shards, loader, Composer's loop, metrics; return its configuration too.

    Nothing is saved: a model of 7 billion parameters would take 74 GiB. Its weights are drawn on the device.
    """
    from llmfoundry_lite.config.load_train import load_train_config
    from llmfoundry_lite.config.schema import as_dict
    from llmfoundry_lite.parallel import fsdp
    from llmfoundry_lite.training.train import train
    from llmfoundry_machines.bench.trainer import Measured, draw_on_device

    fsdp.initialise_weights = draw_on_device  # this process is for one measurement
    with tempfile.TemporaryDirectory() as folder:
        path = write_run(Path(folder), settings, dtype)
        config = load_train_config([str(path), *settings.get("overrides", ())]).config
        partners = Measured(mark)
        train(config, partners)
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    seconds = {record["batch"]: record["time/batch_seconds"] for record in map(json.loads, lines)}
    size = partners.microbatch_size
    planned = replace(config, device_train_microbatch_size=size, environment={}, run_folder="")
    return {
        "step_seconds": [seconds[batch] for batch in sorted(seconds)][WARM_UP:],
        "microbatch_size": size,
        "config": as_dict(planned),
    }


def measure_plain(settings: dict[str, Any], dtype: str, mark: Mark) -> dict[str, Any]:
    """Time the steps of a hand-written GPT with a plain loss; bf16 is autocast."""
    mark(READY)
    with torch.device(device_type()):
        model: nn.Module = BareGPT(seq_len=settings["seq_len"], **SHAPES[settings["shape"]])
    if settings.get("compiled"):
        model.compile()

    def compute_loss(tokens_bt: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device_type(), torch.bfloat16, enabled=dtype == "bf16"):
            logits = model(tokens_bt)[:, :-1]
            return F.cross_entropy(logits.flatten(0, 1), tokens_bt[:, 1:].flatten())

    def marked() -> Iterator[torch.Tensor]:
        for number, tokens_bt in enumerate(random_batches(settings)):
            if number < WARM_UP:
                mark((STEPS, TIMED)[number])
            yield tokens_bt

    return {"step_seconds": run_steps(model, compute_loss, marked())[WARM_UP:]}


def run_steps(
    model: torch.nn.Module, compute_loss: Callable[[torch.Tensor], torch.Tensor], batches: Iterable[torch.Tensor]
) -> list[float]:
    """Return seconds of each step of the loop that every bare side runs. Reading the loss waits for the device."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    seconds = []
    for tokens_bt in batches:
        started = time.perf_counter()
        loss = compute_loss(tokens_bt)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        seconds.append(time.perf_counter() - started)
    return seconds


def random_batches(settings: dict[str, Any]) -> Sequence[torch.Tensor]:
    batch_size, num_steps = settings["batch_size"], settings["num_steps"] + 2
    vocab_size = SHAPES[settings["shape"]]["vocab_size"]
    tokens = torch.from_numpy(random_tokens(num_steps * batch_size, settings["seq_len"], vocab_size))
    return tokens.to(device_type()).split(batch_size)


class BareGPT(nn.Module):
    """A pre-norm GPT without dropout and biases."""

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
