"""Sizes of the ladder's models, and the launches that train one of them.

A run moves between three sites, A, B and C, which divide the work in different ways. The YAML files beside this one are
the run and its sites.
"""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import last_lines, with_root
from llmfoundry_lite.errors import UserError

HERE = Path(__file__).parent
TOKENS_PER_PARAMETER = 20
"""As in Hoffmann et al., arXiv 2203.15556."""
BATCH, SEQ_LEN, VOCAB_SIZE, HEAD = 8, 256, 1024, 16
"""Samples in a batch, tokens in a sample, tokens of the vocabulary, and width of an attention head."""
NUM_SAVES = 20
NUM_RANKS = {"A": 1, "B": 2, "C": 1}
"""Ranks at each site."""
LAUNCHES = (("A", 0.7), ("B", 0.8), ("C", 1.0))
"""Launches of a run: site, and the share of the batches after which it stops."""


class Shape(NamedTuple):
    """Width and depth of a model. Its text is WIDTHxLAYERS, such as 64x3."""

    d_model: int
    n_layers: int

    @property
    def num_parameters(self) -> int:
        """All parameters: the tied embedding, the last norm, and for each block matrices of 12 d x d and two norms."""
        d = self.d_model
        return VOCAB_SIZE * d + self.n_layers * (12 * d * d + 2 * d) + d

    @property
    def num_batches(self) -> int:
        """Batches of a run with TOKENS_PER_PARAMETER."""
        return round(TOKENS_PER_PARAMETER * self.num_parameters / (BATCH * SEQ_LEN))

    def __str__(self) -> str:
        return f"{self.d_model}x{self.n_layers}"


def parse_shapes(sizes: Sequence[str]) -> list[Shape]:
    """Parse sizes such as "64x3", width x layers.

    Raises UserError unless there are four or more, in increasing order, whose widths are multiples of HEAD.
    """
    shapes = [parse_shape(size, "--sizes") for size in sizes]
    parameter_counts = [shape.num_parameters for shape in shapes]
    if len(shapes) < 4 or parameter_counts != sorted({*parameter_counts}):
        raise UserError(f"--sizes: {','.join(sizes)} given, expected four or more, each larger than the one before")
    return shapes


def parse_shape(size: str, option: str) -> Shape:
    """Parse a size such as "64x3", width x layers. Raises UserError with the name of the `option` that has it."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", size)
    if not match or int(match[1]) % HEAD:
        raise UserError(f"{option}: {size!r} given, expected a width of {HEAD}s x layers, such as 64x3")
    return Shape(int(match[1]), int(match[2]))


def launches_of(num_batches: int, done: int = 0) -> list[tuple[str, int, int]]:
    """Return (site, first batch, last batch) of the launches that remain of a run after batch `done`.

    For example, of 100 batches with 75 done, they are ("B", 76, 80) and ("C", 81, 100).
    """
    ends = [0, *(round(share * num_batches) for _, share in LAUNCHES)]
    launches = [(site, max(ends[i], done) + 1, ends[i + 1]) for i, (site, _) in enumerate(LAUNCHES)]
    return [launch for launch in launches if launch[1] <= launch[2]]


def train(keep: Path, shape: Shape, lr: float, *, name: str = "", seed: int = 17) -> None:
    """Train a run to its end, from wherever an earlier call stopped. A run with a `name` stays at one site.

    The run's folder is keep/runs/NAME, or WIDTHxLAYERS without a name. Raises UserError with the last lines of a
    launch's output if it does not save its last batch.
    """
    folder = keep / "runs" / (name or str(shape))
    options = [f"{key}={value}" for key, value in options_of(shape, lr, seed, folder.name).items()]
    # Go on after the last batch that an earlier call has saved.
    saved = [int(path.name[2:]) for path in folder.glob("checkpoints/ba*") if path.name[2:].isdigit()]
    launches = launches_of(shape.num_batches, max(saved, default=0))
    if name and launches:
        first_missing_batch = launches[0][1]
        launches = [("A", first_missing_batch, shape.num_batches)]

    for site, first, last in launches:
        files = [str(HERE / "run.yaml"), str(HERE / f"{site}.yaml")]
        command = ["train", "-n", str(NUM_RANKS[site]), *files, f"stop_after={last - first + 1}ba"]
        output = call(keep, *command, *options)
        if not (folder / "checkpoints" / f"ba{last}").exists():
            raise UserError(f"{folder.name} at {site}: {last_lines(output)}")


def options_of(shape: Shape, lr: float, seed: int, name: str) -> dict[str, Any]:
    """Return the run's settings that depend on its size, learning rate and seed. The others are in run.yaml."""
    every = f"{max(1, shape.num_batches // NUM_SAVES)}ba"
    return {
        "run_name": name,
        "seed": seed,
        "model.d_model": shape.d_model,
        "model.n_heads": shape.d_model // HEAD,
        "model.n_layers": shape.n_layers,
        "optimizer.lr": lr,
        "optimizer.adamw_lr": lr / 2,
        "max_duration": f"{shape.num_batches}ba",
        **dict.fromkeys(("eval_interval", "save_interval", "console_log_interval"), every),
    }


def call(folder: Path, *arguments: str) -> str:
    """Run `llmfoundry-lite` in a folder, on CPUs only, and return its output. Its exit code is not checked."""
    environment = with_root(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", WANDB_MODE="disabled")
    command = [sys.executable, "-m", "llmfoundry_lite", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    ).stdout
