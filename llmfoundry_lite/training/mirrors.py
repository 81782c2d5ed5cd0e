"""Mirrors of metrics.jsonl: console, progress bar, wandb and TensorBoard."""

import errno
import math
import os
import secrets
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from llmfoundry_lite.bounded import MAX_NOTE_BYTES
from llmfoundry_lite.checkpoint.run_log import Record, console_line, read_lines, validation_losses
from llmfoundry_lite.config.callbacks_schema import TensorboardConfig, WandbConfig
from llmfoundry_lite.config.schema import TrainConfig, as_dict
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.config.wandb_init import RUN_ID, describe_unused_variables, init_arguments
from llmfoundry_lite.errors import ConfigError, TransientError, mask_urls, printable
from llmfoundry_lite.files import open_no_link, write_atomically

WANDB_ID = "wandb_id"


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


class Mirror:
    """One destination of the log. A launch calls `begin`, then the mirror itself with each record, then `close`."""

    named: Callable[[Record], Record] = staticmethod(lambda record: numbers_of(record))
    """A record -> the numbers that are written, by name."""

    def begin(self, log: Path, missed: list[Record]) -> None:
        """Prepare for the first record, given the log of earlier launches, and those of its records that came with the
        checkpoint from another machine, in order of batch."""

    def __call__(self, record: Record) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


def build_mirrors(config: TrainConfig, progress: Callable[[], float]) -> list[Mirror]:
    """Build the mirrors of a run. `progress` returns the fraction of the run that is done."""
    folder, max_duration = Path(config.run_folder), config.max_duration
    mirrors: list[Mirror] = []
    names = {"ours": numbers_of, "llm_foundry": partial(foundry_names, optimizer=config.optimizer.name)}
    if config.progress_bar and has_width(sys.stdout):
        mirrors.append(ProgressBar(max_duration, progress))
    elif config.log_to_console or config.progress_bar:
        mirrors.append(ConsoleLine(max_duration, config.console_log_interval))
    if config.loggers.wandb is not None:
        mirrors.append(WandbMirror(config.loggers.wandb, config.run_name, folder, as_dict(config)))
        mirrors[-1].named = names[config.loggers.wandb.names]
    if config.loggers.tensorboard is not None:
        mirrors.append(TensorboardMirror(config.loggers.tensorboard, folder))
        mirrors[-1].named = names[config.loggers.tensorboard.names]
    return mirrors


@dataclass
class ConsoleLine(Mirror):
    """One line each `interval`: where the run is, its loss, its speed, the time it still needs."""

    max_duration: Duration
    interval: Duration
    last_epoch: int = -1

    def __call__(self, record: Record) -> None:
        due = record["batch"] % int(self.interval.value) == 0
        if self.interval.unit == "ep":
            due, self.last_epoch = record["time/epoch"] != self.last_epoch, record["time/epoch"]
        if due or validation_losses(record):
            print(console_line(record, self.max_duration), flush=True)


def has_width(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal of a known width."""
    try:
        return stream is not None and os.get_terminal_size(stream.fileno()).columns > 0
    except (AttributeError, OSError, ValueError):  # another kind of stream, no terminal, or a closed one
        return False


class ProgressBar(Mirror):
    """The console line as a bar on standard output that stays in place, below lines that are printed meanwhile."""

    def __init__(self, max_duration: Duration, progress: Callable[[], float]):
        from tqdm import tqdm

        self.max_duration = max_duration
        self.progress = progress
        # tqdm puts a comma before what it calls the postfix, and a colon behind a description in l_bar.
        form = "{percentage:3.0f}%|{bar}| {desc}"
        look = {"bar_format": form, "desc": "first batch", "dynamic_ncols": True}
        self.output = sys.stdout
        self.bar = tqdm(total=1.0, initial=progress(), file=self.output, **look)

    def begin(self, log: Path, missed: list[Record]) -> None:
        from tqdm.contrib import DummyTqdmFile

        sys.stdout = DummyTqdmFile(self.output)  # clears the bar before a line, and draws it again

    def __call__(self, record: Record) -> None:
        self.bar.n = self.progress()
        self.bar.set_description_str(console_line(record, self.max_duration))

    def close(self) -> None:
        sys.stdout = self.output
        self.bar.close()


class TensorboardMirror(Mirror):
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


class WandbMirror(Mirror):
    """One wandb run across launches: its id is in the run directory, and in checkpoints for other machines.

    wandb takes no step twice: of a batch that is trained again after a restore, it keeps the first record. And it
    writes and sends every 15 seconds only: what a killed launch had logged after that is logged again from our log.
    """

    def __init__(self, config: WandbConfig, run_name: str, run_folder: Path, settings: dict[str, Any]):
        import wandb

        known_id = wandb_run_id(run_folder)
        arguments = init_arguments(config, run_name, str(run_folder), known_id)
        arguments["id"] = arguments["id"] or known_id or secrets.token_hex(4)
        write_atomically(run_folder / WANDB_ID, arguments["id"] + "\n")
        unused = dict(describe_unused_variables(arguments))
        if RUN_ID in unused:  # preflight has told of the others
            print(printable(unused[RUN_ID]), flush=True)
        sys.argv[1:] = map(mask_urls, sys.argv[1:])  # wandb records them
        # Else wandb reads wandb/settings in the working directory. That may be somebody else's folder, and a `base_url`
        # there would get this user's API key. The user's own settings in ~/.config/wandb and the environment stay.
        wandb.Settings.settings_workspace = property(lambda self: os.devnull)  # type: ignore[assignment]
        try:
            self.run = wandb.init(**{"config": settings, **arguments})
        except (wandb.Error, TypeError, ValueError) as error:  # the last two are of an argument's value
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


def wandb_run_id(run_folder: Path) -> str | None:
    """Return the id in the run's folder; None if there is none.

    A link counts as none, because what it leads to would be sent to wandb and kept in checkpoints.
    """
    try:
        with open(run_folder / WANDB_ID, opener=open_no_link, encoding="utf-8", errors="replace") as file:
            return file.read(MAX_NOTE_BYTES).strip()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.EISDIR):
            return None
        raise


def numbers_of(record: Record) -> Record:
    return {key: v for key, v in record.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}


def in_order(records: Iterable[Record]) -> list[Record]:
    """Keep the last record of each batch, in order of batch."""
    latest = {record["batch"]: record for record in records}
    return [latest[batch] for batch in sorted(latest)]
