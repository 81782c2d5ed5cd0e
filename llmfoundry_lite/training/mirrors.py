"""Mirrors of metrics.jsonl on rank 0: console, progress bar, wandb and TensorBoard."""

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
from llmfoundry_lite.config.optimizers import OPTIMIZERS
from llmfoundry_lite.config.schema import TrainConfig, as_dict
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.config.wandb_init import RUN_ID, describe_unused_variables, init_arguments
from llmfoundry_lite.errors import ConfigError, TransientError, mask_urls, printable
from llmfoundry_lite.files import open_no_link, write_atomically
from llmfoundry_lite.ranks.output import say

WANDB_ID = "wandb_id"
"""File in the run folder with the id of the run at wandb."""

FOUNDRY_NAMES = {
    "lr": ("lr-{optimizer}/group0", 1),
    "grad_norm": ("l2_norm/grad/global", 1),
    "batch": ("time/batch", 1),
    "memory/peak_bytes": ("memory/peak_allocated_mem", 1e9),
    "time/elapsed_seconds": ("time/total", 3600),
    "time/remaining_seconds": ("time/remaining_estimate", 3600),
    "eval/loss": ("metrics/eval/LanguageCrossEntropy", 1),
}
"""Our name of a metric -> LLM Foundry's, and how many of our units make one of its. Other metrics have the same
name."""
GROUP_RATES = "lr/group"
"""Beginning of our names of the learning rates of `param_groups`."""
MAX_EXPONENT = 700.0
"""Losses above this many nats have the perplexity of this loss; exp() overflows at 710."""


def foundry_names(record: Record, optimizer: str) -> Record:
    """Return the numbers of a record under LLM Foundry's names and in its units, with its perplexities.

    `optimizer` is our name of the run's optimizer, which is a part of some names. For example, with "decoupled_adamw"
    the metric "lr" becomes "lr-DecoupledAdamW/group0", and "eval/c4/loss" becomes
    "metrics/eval/c4/LanguageCrossEntropy" and "metrics/eval/c4/LanguagePerplexity". A metric that LLM Foundry does not
    have keeps its name.
    """
    row = OPTIMIZERS.get(optimizer)
    optimizer_name = optimizer
    if row is not None and row.foundry is not None:
        optimizer_name = row.foundry.class_name
    named: Record = {}
    for key, value in numbers_of(record).items():
        name, unit = FOUNDRY_NAMES.get(key, (key, 1))
        if key.startswith(GROUP_RATES):
            name = f"lr-{{optimizer}}/{key.removeprefix('lr/')}"
        is_validation_loss = key.startswith("eval/") and key.endswith("/loss") and not key.startswith("eval/icl/")
        if is_validation_loss:
            label = key.removesuffix("/loss")
            name = f"metrics/{label}/LanguageCrossEntropy"
            named[f"metrics/{label}/LanguagePerplexity"] = math.exp(min(value, MAX_EXPONENT))
        named[name.format(optimizer=optimizer_name)] = value if unit == 1 else value / unit  # an integer stays one
    return named


class Mirror:
    """A destination of the log's records. A launch calls `begin`, the mirror itself with each record, and `close`."""

    named: Callable[[Record], Record] = staticmethod(lambda record: numbers_of(record))
    """Converts a record to the numbers that are written, by name."""

    def begin(self, log: Path, missed: list[Record]) -> None:
        """Prepare for the first record of this launch.

        `log` is the run's log so far, and `missed` those of its records that the checkpoint has brought from another
        machine, in order of batch.
        """

    def __call__(self, record: Record) -> None:
        """Write a record."""
        raise NotImplementedError

    def close(self) -> None:
        """Write what has not been written yet."""


def build_mirrors(config: TrainConfig, progress: Callable[[], float]) -> list[Mirror]:
    """Build what shows a run's records besides metrics.jsonl: a line or bar on the console, wandb and TensorBoard.

    Only rank 0 calls this. `progress` returns the fraction of the run that is done. Begins or continues the run at
    wandb, if it is configured; raises ConfigError if wandb cannot be reached.
    """
    run_folder = Path(config.run_folder)
    converters = {"ours": numbers_of, "llm_foundry": partial(foundry_names, optimizer=config.optimizer.name)}
    mirrors: list[Mirror] = []

    # A bar needs a terminal. Without one, lines take its place.
    if config.progress_bar and has_width(sys.stdout):
        mirrors.append(ProgressBar(config.max_duration, progress))
    elif config.log_to_console or config.progress_bar:
        mirrors.append(ConsoleLine(config.max_duration, config.console_log_interval))

    if config.loggers.wandb is not None:
        wandb_mirror = WandbMirror(config.loggers.wandb, config.run_name, run_folder, as_dict(config))
        wandb_mirror.named = converters[config.loggers.wandb.names]
        mirrors.append(wandb_mirror)
    if config.loggers.tensorboard is not None:
        tensorboard_mirror = TensorboardMirror(config.loggers.tensorboard, run_folder)
        tensorboard_mirror.named = converters[config.loggers.tensorboard.names]
        mirrors.append(tensorboard_mirror)
    return mirrors


@dataclass
class ConsoleLine(Mirror):
    """Prints a line for each `interval`: where the run is, its loss, its speed, and the time that it still needs."""

    max_duration: Duration
    interval: Duration
    last_epoch: int = -1

    def __call__(self, record: Record) -> None:
        """Print the line of a record at each multiple of the interval, and after each validation."""
        if self.interval.unit == "ep":
            is_due = record["time/epoch"] != self.last_epoch
            self.last_epoch = record["time/epoch"]
        else:
            is_due = record["batch"] % int(self.interval.value) == 0
        if is_due or validation_losses(record):
            event = "evaluated" if validation_losses(record) else "batch"
            say(console_line(record, self.max_duration), event, numbers_of(record))


def has_width(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal whose width is known."""
    try:
        return stream is not None and os.get_terminal_size(stream.fileno()).columns > 0
    except (AttributeError, OSError, ValueError):  # another kind of stream, no terminal, or a closed one
        return False


class ProgressBar(Mirror):
    """The console line as a bar on standard output. It stays in place, below lines that are printed meanwhile."""

    def __init__(self, max_duration: Duration, progress: Callable[[], float]):
        """Draw the bar. `progress` returns the fraction of the run that is done."""
        from tqdm import tqdm

        self.max_duration = max_duration
        self.progress = progress
        self.output = sys.stdout
        self.bar = tqdm(
            total=1.0,
            initial=progress(),
            file=self.output,
            # Not tqdm's own format, which puts a comma before a postfix and a colon after a description.
            bar_format="{percentage:3.0f}%|{bar}| {desc}",
            desc="first batch",
            dynamic_ncols=True,
        )

    def begin(self, log: Path, missed: list[Record]) -> None:
        """Replace standard output by a stream that clears the bar before a line, and draws it again after it."""
        from tqdm.contrib import DummyTqdmFile

        sys.stdout = DummyTqdmFile(self.output)

    def __call__(self, record: Record) -> None:
        """Draw the bar with the run's progress and the line of a record."""
        self.bar.n = self.progress()
        self.bar.set_description_str(console_line(record, self.max_duration))

    def close(self) -> None:
        """Leave the bar as it is, and give standard output back."""
        sys.stdout = self.output
        self.bar.close()


class TensorboardMirror(Mirror):
    """TensorBoard, with every step once: a launch voids what an earlier one wrote for batches that it trains again."""

    def __init__(self, config: TensorboardConfig, run_folder: Path):
        """Choose the folder: the configured one, or `tensorboard` in the run folder."""
        self.folder = config.log_dir or str(run_folder / "tensorboard")
        self.writer: Any = None
        """None until a record is written."""

    def begin(self, log: Path, missed: list[Record]) -> None:
        """Write the records that another machine has trained.

        This launch's first record gets a writer of its own, because it may be of an earlier batch, and only a new
        writer can void later ones.
        """
        for record in missed:
            self(record)
        self.close()

    def __call__(self, record: Record) -> None:
        """Write a record. The first one voids everything that was written for its batch and later ones."""
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(self.folder, purge_step=record["batch"])
        for key, value in self.named(record).items():
            if key != "batch":
                self.writer.add_scalar(key, value, global_step=record["batch"])
        # If a launch were killed before a flush, there would be a gap before the batch that the next one begins with.
        self.writer.flush()

    def close(self) -> None:
        """Close the file, if one is open."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None


class WandbMirror(Mirror):
    """One wandb run across launches. Its id is in the run folder, and in checkpoints for other machines.

    wandb accepts no step twice: for a batch that is trained again after a restore, it keeps the first record. It writes
    and sends only every 15 seconds, so what a killed launch has logged after that is logged again from our own log.
    """

    def __init__(self, config: WandbConfig, run_name: str, run_folder: Path, settings: dict[str, Any]):
        """Begin a run at wandb, or continue the one whose id is in the run folder. `settings` is shown as its config.

        Writes the id into the run folder. Raises ConfigError if wandb refuses the arguments or cannot be reached.
        """
        import wandb

        # The id is written before the run begins, so that a launch that is killed meanwhile continues the same run.
        known_id = wandb_run_id(run_folder)
        arguments = init_arguments(config, run_name, str(run_folder), known_id)
        arguments["id"] = arguments["id"] or known_id or secrets.token_hex(4)
        write_atomically(run_folder / WANDB_ID, arguments["id"] + "\n")
        unused = dict(describe_unused_variables(arguments))
        if RUN_ID in unused:  # preflight has printed the others
            print(printable(unused[RUN_ID]), flush=True)

        sys.argv[1:] = map(mask_urls, sys.argv[1:])  # wandb records them
        # wandb would read wandb/settings in the working directory. That may be somebody else's folder, and a `base_url`
        # there would receive this user's API key. The user's own settings in ~/.config/wandb and the environment stay.
        wandb.Settings.settings_workspace = property(lambda self: os.devnull)  # type: ignore[assignment]

        try:
            self.run = wandb.init(**{"config": settings, **arguments})
        except (wandb.Error, TypeError, ValueError) as error:  # the last two are of an argument's value
            message = str(error).partition("\nConsider")[0]
            reason = " ".join(message.split()).rstrip(".")
            # wandb retries a failed connection or a 5xx. Any other answer of a server, such as 403, ends it at once.
            is_transient = "while retrying" in reason
            raise ConfigError(
                f"loggers.wandb: {reason}; set WANDB_API_KEY, or WANDB_MODE=offline, or loggers.wandb=null"
            ) from (TransientError(reason) if is_transient else error)

        self.last_step = -1
        """The last step that wandb has from earlier launches; -1 if none."""
        self.lost: list[Record] = []
        """Records of earlier launches that wandb lacks, in order of batch."""

    def begin(self, log: Path, missed: list[Record]) -> None:
        """Find the records of earlier launches that wandb lacks, for the first call. Sets `last_step` and `lost`.

        `log` is metrics.jsonl, and `missed` are its records that another machine has trained. A server knows its next
        step, so wandb lacks all records from there on. Offline, a launch begins new files, which get all records that
        this machine has logged; the other machine's files have `missed`. `wandb sync` takes each step once.
        """
        # A new run at wandb, and every offline one, is at step 0.
        self.last_step = self.run.step - 1
        batches_elsewhere = {record["batch"] for record in missed} if self.run.offline else set()
        content = log.read_bytes() if log.exists() else b""
        lost: list[Record] = []
        for _, record in read_lines(content):
            if record["batch"] > self.last_step and record["batch"] not in batches_elsewhere:
                lost.append(record)
        self.lost = in_order(lost)

    def __call__(self, record: Record) -> None:
        """Log a record. Before this launch's first record, log those of earlier batches that wandb lacks.

        Lost records from this batch on were trained again, or will be, so they are dropped.
        """
        earlier = [lost for lost in self.lost if lost["batch"] < record["batch"]]
        self.lost = []
        for record_to_log in (*earlier, record):
            step = record_to_log["batch"]
            if step > self.last_step:
                self.run.log(self.named(record_to_log), step=step, commit=True)

    def close(self) -> None:
        """Send what has not been sent, and end the run at wandb until the next launch."""
        self.run.finish()


def wandb_run_id(run_folder: Path) -> str | None:
    """Return the id of the run at wandb, which the run folder holds; None if it holds none.

    A link counts as none, because the file that it leads to would be sent to wandb and kept in checkpoints.
    """
    try:
        with open(run_folder / WANDB_ID, opener=open_no_link, encoding="utf-8", errors="replace") as file:
            return file.read(MAX_NOTE_BYTES).strip()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.EISDIR):
            return None
        raise


def numbers_of(record: Record) -> Record:
    """Return the numbers of a record. Truth values are none."""
    return {
        key: value for key, value in record.items() if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def in_order(records: Iterable[Record]) -> list[Record]:
    """Return the last record of each batch, in order of batch."""
    latest = {record["batch"]: record for record in records}
    return [latest[batch] for batch in sorted(latest)]
