"""Measured training steps of models of known shapes, for all benches that need them.

A *side* is what is measured, and a dtype: `trainer bf16` is a real run of the Trainer, `plain bf16` a hand-written GPT
in a bare loop, and `matmul bf16` the matrix products of one step alone. `measure` measures one side in this process,
and `measure_in_a_process` does so in a new one, whose memory and compiled code no other side shares. That process runs

    python -m llmfoundry_machines.bench.steps '{"side": "trainer bf16", "shape": "125m", "seq_len": 2048,
                                                "batch_size": 8, "num_steps": 5, "overrides": []}'

and prints {"step_seconds": [...], "peak_bytes": ...} as JSON. `measure_on_ranks` and `train_on_ranks` start several
ranks of this machine. Suffixes of tensors are their dimensions: b samples, t tokens in a sample, d the model's width,
n tokens of a whole batch, i and o the inputs and outputs of a linear layer.
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
"""Name of a shape -> the settings of the model that it stands for."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def model_of(shape: str, max_seq_len: int, **changes: Any) -> ModelConfig:
    """Return the configuration of an MPT model of a known shape, without biases. `changes` are other settings."""
    return ModelConfig(**{"max_seq_len": max_seq_len, "no_bias": True, **SHAPES[shape], **changes})


def count_step_flops(shape: str, seq_len: int, batch_size: int) -> int:
    """Count the model FLOPs of a training step with `batch_size` samples of `seq_len` tokens."""
    return count_flops_per_token(model_of(shape, seq_len), seq_len) * batch_size * seq_len


def write_run(folder: Path, settings: dict[str, Any], dtype: str) -> Path:
    """Write random training data and a configuration for a run, and return the path of the configuration.

    `settings` has the keys shape, seq_len, batch_size and num_steps. The run takes WARM_UP steps before those
    `num_steps`, saves its results in `folder`/run, and exports no model.
    """
    from streaming import MDSWriter

    seq_len = settings["seq_len"]
    shape = SHAPES[settings["shape"]]
    num_batches = settings["num_steps"] + WARM_UP
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
    path.write_text(json.dumps(config))  # JSON is also YAML
    return path


def random_tokens(num_samples: int, seq_len: int, vocab_size: int) -> np.ndarray:
    """Return token ids [num_samples, seq_len], the same in every call."""
    return np.random.default_rng(0).integers(vocab_size, size=(num_samples, seq_len))


def measure_in_a_process(
    settings: dict[str, Any], program: Sequence[str] = (sys.executable, "-P", "-m", __name__)
) -> dict[str, Any]:
    """Measure one side in a new process, and return what `measure` returned there.

    `program` is the command that takes the settings as JSON in its last argument, and prints the measurements as JSON
    in its last line. The process and its children have ended when this returns. Raises RuntimeError with the process's
    output if it fails.
    """
    process = subprocess.Popen(
        [*program, json.dumps(settings)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a process group that can be killed as a whole
        env={**os.environ, **search_path()},
    )
    try:
        output, errors = process.communicate()
    finally:
        # Children, such as the loader's workers, may still run. Without any process left, the group does not exist.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode == -signal.SIGKILL:
        raise RuntimeError(f"{settings['side']}: killed, usually for lack of memory")
    if process.returncode != 0:
        raise RuntimeError(f"{settings['side']} failed:\n{output}\n{errors}")
    return json.loads(output.splitlines()[-1])


def measure_on_ranks(num_ranks: int, measure: Callable[[], Any]) -> Any:
    """Call `measure` on `num_ranks` new processes of one process group, and return what rank 0 returned.

    The ranks share this machine's devices, or the threads of its CPU. `measure` must be picklable, and what it returns
    must be representable as JSON. The ranks end with this process. Raises RuntimeError with the last line of the error
    of the first rank that fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.spawn(run_rank, (num_ranks, measure, folder), num_ranks, daemon=True)
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise RuntimeError(str(error).strip().splitlines()[-1]) from None
        return json.loads(Path(folder, "result.json").read_text())


def run_rank(rank: int, num_ranks: int, measure: Callable[[], Any], folder: str) -> None:
    """Join the process group in this new process, and call `measure`. Rank 0 writes its result to `folder`/result.json.

    Collective. Tensors on the CPU are exchanged by gloo. Those on GPUs are exchanged by NCCL if each rank has a GPU,
    and else by gloo too, because NCCL refuses two ranks on one device.
    """
    keep_freed_memory()
    backend = "gloo"
    if device_type() == "cuda":
        num_gpus = torch.cuda.device_count()
        torch.cuda.set_device(rank % num_gpus)
        if num_gpus >= num_ranks:
            backend = "cpu:gloo,cuda:nccl"
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // num_ranks))

    use_loopback()
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timedelta(minutes=10))
    # Without this barrier, a rank whose `measure` fails at once would end the others while they still connect.
    dist.barrier()

    result = measure()
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def train_on_ranks(num_ranks: int, arguments: Sequence[str]) -> None:
    """Run the training command with `arguments` on `num_ranks` ranks of this machine, and wait for its end.

    Raises RuntimeError if it fails: with the first error that a rank printed, or with all output if there is none.
    """
    # torchrun starts faster than Composer's launcher, which would import Composer in one more process.
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command += ["-m", "llmfoundry_lite.launch_train", *arguments]
    launch = subprocess.run(command, capture_output=True, text=True, check=False)
    if launch.returncode == 0:
        return

    for line in launch.stderr.splitlines():
        if line.startswith("error: "):
            raise RuntimeError(line.removeprefix("error: "))
    raise RuntimeError(f"exit code {launch.returncode}\n{launch.stdout}\n{launch.stderr}")


# -------------------------------------------------------------------------------------------------------- the sides


def measure(settings: dict[str, Any], mark: Mark = lambda stage: None) -> dict[str, Any]:
    """Measure one side in this process. Return `step_seconds`, the seconds of each timed step, `peak_bytes` and more.

    `settings["side"]` is a side and a dtype, such as `trainer bf16`. `mark` is called with each stage of the
    measurement, and may wait before it returns (`turns.py`).
    """
    side, dtype = settings["side"].split()
    if side != "plain":
        keep_freed_memory()
    measure_side = {"matmul": measure_products, "plain": measure_plain, "trainer": measure_trainer}[side]
    return {**measure_side(settings, dtype, mark), "peak_bytes": peak_memory_bytes()}


def measure_products(settings: dict[str, Any], dtype: str, mark: Mark) -> dict[str, Any]:
    """Time the matrix products of one training step without the rest of the model.

    These are the products of activations and weights: each layer's attention and feed-forward projections, and the
    output layer. Attention's own products are left out. Each distinct weight shape is timed once for each step, and
    counts as often as the model has weights of that shape.

    Returns `step_seconds`, the sum over all weights for each timed step, and `flops`, the FLOPs of one step.
    """
    # Products need no preparation that another measurement could run beside, so all stages pass before they begin.
    for stage in (READY, STEPS, TIMED):
        mark(stage)

    shape = SHAPES[settings["shape"]]
    d_model = shape["d_model"]
    num_layers = shape["n_layers"]
    num_tokens = settings["batch_size"] * settings["seq_len"]
    # (outputs, inputs) of a weight -> the number of such weights: query, key and value; attention's output; the
    # feed-forward network's two weights; and the model's output layer.
    weight_counts = {
        (3 * d_model, d_model): num_layers,
        (d_model, d_model): num_layers,
        (4 * d_model, d_model): num_layers,
        (d_model, 4 * d_model): num_layers,
    }
    weight_counts[shape["vocab_size"], d_model] = 1

    flops = 0
    step_seconds = [0.0] * settings["num_steps"]
    options: dict[str, Any] = {"device": device_type(), "dtype": DTYPES[dtype]}
    for (num_outputs, num_inputs), count in weight_counts.items():
        weight_oi = torch.randn(num_outputs, num_inputs, **options)
        x_ni = torch.randn(num_tokens, num_inputs, **options)
        gradient_no = torch.randn(num_tokens, num_outputs, **options)
        multiply = partial(multiply_three_times, x_ni, weight_oi, gradient_no)
        seconds = time_calls(multiply, settings["num_steps"] + WARM_UP)[WARM_UP:]
        for step, seconds_of_one in enumerate(seconds):
            step_seconds[step] += count * seconds_of_one
        # Three products, with a multiplication and an addition for each term.
        flops += count * 3 * 2 * num_tokens * num_outputs * num_inputs
    return {"step_seconds": step_seconds, "flops": flops}


def multiply_three_times(
    x_ni: torch.Tensor, weight_oi: torch.Tensor, gradient_no: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return a linear layer's output [n, o], the gradient of its input [n, i], and that of its weight [o, i]."""
    output_no = matmul_transposed(x_ni, weight_oi)
    input_gradient_ni = matmul_transposed(gradient_no, weight_oi.T)
    weight_gradient_oi = matmul_transposed(gradient_no.T, x_ni.T)
    return output_no, input_gradient_ni, weight_gradient_oi


def time_calls(work: Callable[[], object], num_calls: int) -> list[float]:
    """Return the seconds of each of `num_calls` calls of `work`.

    On a GPU, all calls are enqueued at once, with events of the GPU's own clock between them. If the host waited for
    each call, its round trip would be part of the seconds, and a training step would look faster in comparison.
    """
    if device_type() == "cpu":
        times = [time.perf_counter()]
        for _ in range(num_calls):
            work()
            times.append(time.perf_counter())
        return [after - before for before, after in itertools.pairwise(times)]

    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_calls + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    events[-1].synchronize()
    # `elapsed_time` is in milliseconds.
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(events)]


def measure_trainer(settings: dict[str, Any], dtype: str, mark: Mark) -> dict[str, Any]:
    """Time the steps of a real training run, with its shards, loader, Composer's loop and metrics.

    The run saves no checkpoint: one of a model with 7 billion parameters would take 74 GiB. Its weights are drawn on
    the device, which is faster than the usual draw. `settings["overrides"]` are changes of the configuration, such as
    `compile_config={}`.

    Returns `step_seconds` of the timed steps, `microbatch_size` (samples, as chosen by the run if it is `auto`), and
    `config`: the configuration that was trained, which `plan --calibrate` reads. Replaces a function of `parallel.fsdp`
    for the rest of this process.
    """
    # These imports take seconds, and the other sides do without them.
    from llmfoundry_lite.config.load_train import load_train_config
    from llmfoundry_lite.config.schema import as_dict
    from llmfoundry_lite.parallel import fsdp
    from llmfoundry_lite.training.train import train
    from llmfoundry_machines.bench.trainer import MeasuredRole, draw_on_device

    fsdp.initialise_weights = draw_on_device  # never undone: a process measures one side only
    with tempfile.TemporaryDirectory() as folder:
        path = write_run(Path(folder), settings, dtype)
        config = load_train_config([str(path), *settings.get("overrides", ())]).config
        role = MeasuredRole(mark)
        train(config, role)
        metrics_lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()

    # A batch that has several records counts with its last one.
    records = map(json.loads, metrics_lines)
    seconds_by_batch = {record["batch"]: record["time/batch_seconds"] for record in records}
    step_seconds = [seconds_by_batch[batch] for batch in sorted(seconds_by_batch)]
    microbatch_size = role.microbatch_size
    # Two runs of one configuration should not differ in this machine's environment and in the temporary folder.
    trained = replace(config, device_train_microbatch_size=microbatch_size, environment={}, run_folder="")
    return {
        "step_seconds": step_seconds[WARM_UP:],
        "microbatch_size": microbatch_size,
        "config": as_dict(trained),
    }


def measure_plain(settings: dict[str, Any], dtype: str, mark: Mark) -> dict[str, Any]:
    """Time the steps of a hand-written GPT with a plain loss. With bf16 its weights stay fp32, and it is autocast.

    `settings["compiled"]` says whether the model is compiled; by default it is not.
    """
    mark(READY)
    with torch.device(device_type()):
        model: nn.Module = BareGPT(seq_len=settings["seq_len"], **SHAPES[settings["shape"]])
    if settings.get("compiled"):
        model.compile()

    def compute_loss(tokens_bt: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device_type(), torch.bfloat16, enabled=dtype == "bf16"):
            logits = model(tokens_bt)[:, :-1]
            return F.cross_entropy(logits.flatten(0, 1), tokens_bt[:, 1:].flatten())

    def mark_stages() -> Iterator[torch.Tensor]:
        """Yield the batches, and mark the stages that begin with the first and the last step of the warm-up."""
        for step, tokens_bt in enumerate(random_batches(settings)):
            if step == 0:
                mark(STEPS)
            elif step == WARM_UP - 1:
                mark(TIMED)
            yield tokens_bt

    return {"step_seconds": run_steps(model, compute_loss, mark_stages())[WARM_UP:]}


def run_steps(
    model: torch.nn.Module, compute_loss: Callable[[torch.Tensor], torch.Tensor], batches: Iterable[torch.Tensor]
) -> list[float]:
    """Train on `batches` [b, t] in the bare loop that all plain models share. Return the seconds of each step.

    Each step ends with reading the loss, which waits for the device.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    seconds = []
    for tokens_bt in batches:
        began = time.perf_counter()
        loss = compute_loss(tokens_bt)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        seconds.append(time.perf_counter() - began)
    return seconds


def random_batches(settings: dict[str, Any]) -> Sequence[torch.Tensor]:
    """Return the batches [b, t] of a plain model's steps, the warm-up's included, on the device."""
    batch_size = settings["batch_size"]
    num_steps = settings["num_steps"] + WARM_UP
    vocab_size = SHAPES[settings["shape"]]["vocab_size"]
    tokens = torch.from_numpy(random_tokens(num_steps * batch_size, settings["seq_len"], vocab_size))
    return tokens.to(device_type()).split(batch_size)


class BareGPT(nn.Module):
    """A pre-norm GPT without dropout and biases, with learned positions and one embedding for input and output."""

    def __init__(self, d_model: int, n_heads: int, n_layers: int, vocab_size: int, seq_len: int):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, d_model)
        self.position = nn.Embedding(seq_len, d_model)
        self.blocks = nn.ModuleList(BareBlock(d_model, n_heads) for _ in range(n_layers))
        self.norm = nn.LayerNorm(d_model, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens_bt: torch.Tensor) -> torch.Tensor:
        """Return the logits [b, t, vocabulary]."""
        x_btd = self.embed(tokens_bt) + self.position.weight[: tokens_bt.size(1)]
        for block in self.blocks:
            x_btd = block(x_btd)
        return self.norm(x_btd) @ self.embed.weight.T


class BareBlock(nn.Module):
    """A layer of BareGPT: causal attention, then a feed-forward network with GELU, each added to its input."""

    def __init__(self, d_model: int, n_heads: int):
        super().__init__()
        self.n_heads = n_heads
        self.norm_1 = nn.LayerNorm(d_model, bias=False)
        self.norm_2 = nn.LayerNorm(d_model, bias=False)
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)
        self.up = nn.Linear(d_model, 4 * d_model, bias=False)
        self.down = nn.Linear(4 * d_model, d_model, bias=False)

    def forward(self, x_btd: torch.Tensor) -> torch.Tensor:
        """Return the layer's output [b, t, d]."""
        # [b, t, 3d] -> queries, keys and values, each [b, heads, t, d / heads]
        qkv = self.qkv(self.norm_1(x_btd)).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*qkv.unbind(0), is_causal=True)
        x_btd = x_btd + self.out(attended.transpose(1, 2).flatten(-2))
        return x_btd + self.down(F.gelu(self.up(self.norm_2(x_btd))))


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
