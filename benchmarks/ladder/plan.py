"""Shapes, configurations and launches of the ladder."""

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import last_lines
from benchmarks.ladder.data import SEQ_LEN, VOCAB_SIZE
from benchmarks.switch.legs import INSTRUCTION_SETS, NO_GPU, Cluster, Workshop, environment_for
from llmfoundry_lite.errors import UserError
from llmfoundry_lite.launch.status import read_status

TOKENS_PER_PARAMETER = 20
BATCH, MICROBATCH, HEAD = 8, 8, 16
"""Samples of a batch and of a rank's microbatch; width of an attention head."""
NUM_SAVES = 20
CPU = {"OMP_NUM_THREADS": "1", **NO_GPU}
PLACES = {
    "A": (1, "NO_SHARD", CPU, "1 rank, unsharded"),
    "B": (2, "FULL_SHARD", CPU, "2 ranks, sharded"),
    "C": (1, "NO_SHARD", CPU | INSTRUCTION_SETS["avx2"], "1 rank, AVX2"),
}
"""Where runs are trained, in turn: ranks, sharding, environment, words."""
LEGS = (("A", 0.7), ("B", 0.8), ("C", 1.0))
"""Launches of a run: place, and the share of the batches after which it stops."""


class Shape(NamedTuple):
    d_model: int
    n_layers: int

    @property
    def num_parameters(self) -> int:
        """All of them: the tied embedding, and of each block four square matrices, an MLP of 4 d and two norms."""
        d = self.d_model
        return VOCAB_SIZE * d + self.n_layers * (12 * d * d + 2 * d) + d

    @property
    def num_batches(self) -> int:
        return round(TOKENS_PER_PARAMETER * self.num_parameters / (BATCH * SEQ_LEN))

    def __str__(self) -> str:
        return f"{self.d_model}x{self.n_layers}"


def parse_shapes(sizes: Sequence[str]) -> list[Shape]:
    """Read sizes such as 64x3, width x layers. Raises UserError."""
    shapes = []
    for size in sizes:
        match = re.fullmatch(r"(\d+)x(\d+)", size)
        if not match or int(match[1]) % HEAD or not int(match[1]) or not int(match[2]):
            raise UserError(
                f"--sizes: {size!r} given, expected WIDTHxLAYERS, such as 64x3, of a width divisible by {HEAD}"
            )
        shapes.append(Shape(int(match[1]), int(match[2])))
    if (
        len(shapes) < 4
        or sorted(shapes, key=lambda shape: shape.num_parameters) != shapes
        or len({*shapes}) < len(shapes)
    ):
        raise UserError(f"--sizes: {','.join(sizes)} given, expected four or more, each larger than the one before")
    return shapes


def legs_of(num_batches: int, done: int = 0) -> list[tuple[str, int, int]]:
    """Return (place, first batch, last batch) of the launches that are left of a run after batch `done`."""
    ends = [(place, round(share * num_batches)) for place, share in LEGS]
    starts = [0, *(end for _, end in ends[:-1])]
    return [(place, max(start, done) + 1, end) for (place, end), start in zip(ends, starts, strict=True) if end > done]


def clusters() -> list[Cluster]:
    made = []
    for letter, (num_ranks, sharding, environment, _) in PLACES.items():
        overlay = {
            "device_train_microbatch_size": min(MICROBATCH, BATCH // num_ranks),
            "device_eval_batch_size": BATCH // num_ranks,
            "fsdp_config": {"sharding_strategy": sharding},
            "environment": environment,
        }
        made.append(Cluster(letter=letter, num_ranks=num_ranks, overlay=overlay))
    return made


def configuration(data: Path, shape: Shape, lr: float, seed: int = 17) -> dict[str, Any]:
    """Return the YAML of a run."""

    def dataset(split: str, **more: Any) -> dict[str, Any]:
        return {"name": "text", "dataset": {"local": str(data), "split": split, **more}, "num_workers": 0}

    num_batches = shape.num_batches
    every = max(1, num_batches // NUM_SAVES)
    return {
        "run_name": "ladder",
        "seed": seed,
        "max_seq_len": SEQ_LEN,
        "model": {
            "name": "mpt_causal_lm",
            "d_model": shape.d_model,
            "n_heads": shape.d_model // HEAD,
            "n_layers": shape.n_layers,
            "max_seq_len": SEQ_LEN,
            "vocab_size": VOCAB_SIZE,
            "no_bias": True,
            "norm_type": "rmsnorm",
            "attn_config": {"rope": True, "fused_qkv": True},
        },
        "tokenizer": {"name": str(data / "tokenizer")},
        "train_loader": dataset("train", shuffle=True, shuffle_seed=seed),
        "eval_loader": dataset("val"),
        "optimizer": {
            "name": "muon",
            "lr": lr,
            "adjust_lr_fn": "original",
            "ns_dtype": "fp32",
            "adamw_lr": lr / 2,
            "weight_decay": 0.0,
        },
        "scheduler": {"name": "linear_decay_with_warmup", "t_warmup": "0ba", "alpha_f": 0.0},
        "algorithms": {"gradient_clipping": {"clipping_type": "norm", "clipping_threshold": 1.0}},
        "max_duration": f"{num_batches}ba",
        "eval_interval": f"{every}ba",
        "eval_subset_num_batches": 32,
        "global_train_batch_size": BATCH,
        "precision": "fp32",
        "save_interval": f"{every}ba",
        "save_num_checkpoints_to_keep": 1,
        "autoresume": True,
        "export_at_end": False,
        "console_log_interval": f"{every}ba",
    }


def train(
    folder: Path,
    data: Path,
    shape: Shape,
    lr: float,
    name: str,
    note: Callable[[str], None],
    *,
    moves: bool,
    seed: int = 17,
) -> None:
    """Train a run to its end, from wherever an earlier call left it; without `moves`, in one place.

    Raises UserError with the end of a launch's output when it fails.
    """
    shop = Workshop(folder=folder, config=configuration(data, shape, lr, seed), clusters=clusters())
    shop.prepare()
    places = {cluster.letter: cluster for cluster in shop.clusters}
    saved = (path.name.removeprefix("ba") for path in (shop.run_folder(name) / "checkpoints").glob("ba*"))
    done = max((int(number) for number in saved if number.isdigit()), default=0)
    legs = legs_of(shape.num_batches, done) if moves else [("A", done + 1, shape.num_batches)]
    for place, first, last in legs:
        if first <= last:
            note(f"{name} at {lr:g}: batches {first:,} to {last:,} of {shape.num_batches:,} at {place}")
            launch(shop, name, places[place], last - first + 1)


def launch(shop: Workshop, name: str, cluster: Cluster, num_batches: int) -> None:
    """`llmfoundry-lite train -n … run.yaml <place>.yaml stop_after=…`, to its end. Raises UserError."""
    command = [sys.executable, "-m", "llmfoundry_lite", "train", "-n", str(cluster.num_ranks), "run.yaml"]
    command += [f"{cluster.letter}.yaml", f"run_name={name}", f"stop_after={num_batches}ba"]
    done = subprocess.run(
        command, cwd=shop.folder, env=environment_for(cluster), capture_output=True, text=True, check=False
    )
    status = read_status(shop.run_folder(name)) or {}
    if status.get("status") not in ("done", "stopped"):
        words = last_lines(done.stdout + done.stderr)
        raise UserError(f"{' '.join(command)}: exit code {done.returncode}\n{words}")
