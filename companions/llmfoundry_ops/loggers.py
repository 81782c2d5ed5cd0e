"""Mirrors of metrics.jsonl for `loggers`: wandb and TensorBoard, under our names or LLM Foundry's."""

import math
import secrets
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from llmfoundry_lite.config.schema import TensorboardConfig, TrainConfig, WandbConfig, as_dict
from llmfoundry_lite.errors import ConfigError, TransientError, mask_credentials
from llmfoundry_lite.launch.log_lines import Record, read_lines
from llmfoundry_lite.training.mirrors import WANDB_ID, Mirror, in_order, wandb_run_id

FOUNDRY_NAMES = {
    "lr": ("lr-{optimizer}/group0", 1),
    "grad_norm": ("l2_norm/grad/global", 1),
    "batch": ("time/batch", 1),
    "memory/peak_bytes": ("memory/peak_allocated_mem", 1e9),
    "time/elapsed_seconds": ("time/total", 3600),
    "time/remaining_seconds": ("time/remaining_estimate", 3600),
    "eval/loss": ("metrics/eval/LanguageCrossEntropy", 1),
}
"""Our name of a metric -> LLM Foundry's, and how many of our units make one of its. Others have one name."""
OPTIMIZERS = {"decoupled_adamw": "DecoupledAdamW", "decoupled_lionw": "DecoupledLionW"}


def foundry_names(record: Record, optimizer: str) -> Record:
    """Return a record under LLM Foundry's names, with perplexities, which are its own."""
    named: Record = {}
    for key, value in numbers_of(record).items():
        name, unit = FOUNDRY_NAMES.get(key, (key, 1))
        if key.startswith("eval/") and key.endswith("/loss") and not key.startswith("eval/icl/"):
            name = f"metrics/{key.removesuffix('/loss')}/LanguageCrossEntropy"
            named[name.replace("CrossEntropy", "Perplexity")] = math.exp(min(value, 700.0))
        named[name.format(optimizer=OPTIMIZERS.get(optimizer, optimizer))] = value if unit == 1 else value / unit
    return named


class Named(Mirror):
    """A mirror that may have LLM Foundry's names."""

    named: Callable[[Record], Record] = staticmethod(lambda record: numbers_of(record))
    """A record -> the numbers that are written, by name."""


def build_wandb(config: TrainConfig) -> Mirror:
    block = config.loggers.wandb
    assert block is not None
    mirror = WandbMirror(block, config.run_name, Path(config.run_folder), as_dict(config))
    return with_names(mirror, block.names, config)


def build_tensorboard(config: TrainConfig) -> Mirror:
    block = config.loggers.tensorboard
    assert block is not None
    return with_names(TensorboardMirror(block, Path(config.run_folder)), block.names, config)


def with_names(mirror: Named, names: str, config: TrainConfig) -> Mirror:
    """Let a mirror write the names that its block asks for."""
    mirror.named = {"ours": numbers_of, "llm_foundry": partial(foundry_names, optimizer=config.optimizer.name)}[names]
    return mirror


class TensorboardMirror(Named):
    """TensorBoard, every step once: a launch voids what an earlier one wrote for batches that it trains again."""

    def __init__(self, config: TensorboardConfig, run_folder: Path):
        self.folder = config.log_dir or str(run_folder / "tensorboard")
        self.writer: Any = None

    def begin(self, log: Path, missed: list[Record]) -> None:
        for record in missed:
            self(record)
        self.close()  # the first record of this launch, too, may go back behind these

    def __call__(self, record: Record) -> None:
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(self.folder, purge_step=record["batch"])
        for key, value in self.named(record).items():
            if key != "batch":
                self.writer.add_scalar(key, value, global_step=record["batch"])
        # Else a killed launch would leave a hole before the batch that the next one goes back to.
        self.writer.flush()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None


class WandbMirror(Named):
    """One wandb run across launches: its id is in the run directory, and in checkpoints for other machines.

    wandb takes no step twice: of a batch that is trained again after a restore, it keeps the first record. And it
    writes and sends every 15 seconds only: what a killed launch had logged after that is logged again from our log.
    """

    def __init__(self, config: WandbConfig, run_name: str, run_folder: Path, settings: dict[str, Any]):
        import wandb

        run_id = wandb_run_id(run_folder) or secrets.token_hex(4)
        (run_folder / WANDB_ID).write_text(run_id + "\n")
        sys.argv[1:] = map(mask_credentials, sys.argv[1:])  # wandb records them
        try:
            self.run = wandb.init(
                project=config.project,
                entity=config.entity,
                group=config.group,
                name=config.name or run_name,
                tags=config.tags or None,
                dir=str(run_folder),
                config=settings,
                **{"id": run_id, "resume": "allow", **config.init_kwargs},
            )
        except wandb.Error as error:
            reason = " ".join(str(error).partition("\nConsider")[0].split()).rstrip(".")
            # wandb retries a failed link or a 5xx; any other answer of a server, such as 403, ends it at once.
            cause = TransientError(reason) if "while retrying" in reason else error
            raise ConfigError(
                f"loggers.wandb: {reason}; set WANDB_API_KEY, or WANDB_MODE=offline, or loggers.wandb=null"
            ) from cause
        self.last_step = -1
        self.lost: list[Record] = []

    def begin(self, log: Path, missed: list[Record]) -> None:
        """Find the records that wandb lacks. A server knows its next step. Offline, a launch's files begin with all
        that this machine has logged, another machine's have what it trained; `wandb sync` takes each step once."""
        self.last_step = self.run.step - 1
        elsewhere = {record["batch"] for record in missed} if self.run.offline else set()
        records = (record for _, record in read_lines(log.read_bytes() if log.exists() else b""))
        self.lost = in_order(r for r in records if r["batch"] > self.last_step and r["batch"] not in elsewhere)

    def __call__(self, record: Record) -> None:
        lost, self.lost = self.lost, []
        for known in (*(known for known in lost if known["batch"] < record["batch"]), record):
            if known["batch"] > self.last_step:
                self.run.log(self.named(known), step=known["batch"], commit=True)

    def close(self) -> None:
        self.run.finish()


def numbers_of(record: Record) -> Record:
    return {key: v for key, v in record.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
