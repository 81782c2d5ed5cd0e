"""A suite: every model of a configuration on every task, and the tables that compare them."""

import datetime
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from llmfoundry_lite import devices
from llmfoundry_lite.checkpoint.store import condition_of, is_checkpoint
from llmfoundry_lite.config.eval_schema import EvalConfig, GauntletConfig, TaskConfig
from llmfoundry_lite.config.layout import divide_devices
from llmfoundry_lite.config.sharding_schema import FSDPConfig
from llmfoundry_lite.errors import (
    CheckpointError,
    DamagedCheckpointError,
    DataError,
    IncompleteCheckpointError,
    UserError,
    mask_urls,
    printable,
)
from llmfoundry_lite.evaluation.harness import evaluate
from llmfoundry_lite.evaluation.models import DTYPES, Shard, Subject, find_all_checkpoints, find_subject
from llmfoundry_lite.evaluation.result_files import Outline, ResultFiles, lock_folder, outline_tasks
from llmfoundry_lite.evaluation.results import Results, read_others
from llmfoundry_lite.evaluation.tables import gauntlet_table, print_results, write_tables
from llmfoundry_lite.ranks.exchange import broadcast_json, user_errors_on_all_ranks
from llmfoundry_lite.ranks.rank import this_rank
from llmfoundry_lite.ranks.start import choose_device, start_process_group

BATCH_TOKENS = {"cpu": 2048, "cuda": 32768}
"""Kind of device -> tokens of a forward pass, unless `device_batch_tokens` is set."""


@dataclass(kw_only=True)
class ModelToEvaluate:
    """A model that has been found, its results so far, and the files that will hold them."""

    subject: Subject
    results: Results
    files: ResultFiles


def run_suite(config: EvalConfig, tasks: Sequence[TaskConfig], notes: Sequence[str] = ()) -> list[Results]:
    """Evaluate all models, print the tables and write the files. Collective; rank 0 prints and writes.

    With `all_checkpoints`, checkpoints that are damaged, or that a live run has removed meanwhile, are passed over.
    """
    tell(notes)
    device = start(config)
    outlines = outline_all(config, tasks)
    models = find_models(config, outlines, device)

    all_results: list[Results] = []
    while models:
        model = models.pop(0)  # popped, so that its memory is freed before the next one is loaded
        try:
            all_results.append(evaluate_one(config, tasks, model))
        except CheckpointError as error:
            if was_removed(config, model.results.model, model.subject.source):
                continue
            is_damaged = isinstance(error, DamagedCheckpointError | IncompleteCheckpointError)
            if not (config.all_checkpoints and is_damaged):
                raise
            tell([f"models.{model.results.model}: passed over {condition_of(error)} checkpoint: {error}"])
            continue
        tell_kept_tasks(model, outlines)

    if not all_results:
        raise DataError(f"models: no checkpoint of {', '.join(config.models.values())} is intact")
    if this_rank().rank == 0:
        show(config, all_results)
    return all_results


def tell_kept_tasks(model: ModelToEvaluate, outlines: Sequence[Outline]) -> None:
    """Name the tasks in a model's results that earlier launches have run and that nobody asked for now."""
    asked = {outline.name for outline in outlines}
    kept = [name for name in model.results.tasks if name not in asked]
    if kept:
        tell([f"{model.files.path}: keeps what it has of the same model besides: {', '.join(kept)}"])


def show(config: EvalConfig, all_results: Sequence[Results]) -> None:
    """Print the tables, write them, and name the files. On rank 0."""
    console = Console()
    gauntlet = config.eval_gauntlet
    print_results(all_results, console)
    if gauntlet:
        console.print()
        gauntlet_table(gauntlet, all_results).print(console)
    for path in write_suite(all_results, Path(config.results_folder) / config.suite, gauntlet):
        print(printable(str(path)))


def outline_all(config: EvalConfig, tasks: Sequence[TaskConfig]) -> list[Outline]:
    """Outline the tasks. Collective. Raises DataError on all ranks unless all have the same tasks."""
    with user_errors_on_all_ranks():
        skips_empty = config.eval_gauntlet is not None
        outlines = outline_tasks(tasks, config.tokenization, config.limit, skips_empty=skips_empty)

    names = [outline.name for outline in outlines]
    with user_errors_on_all_ranks():
        names_on_rank_0 = broadcast_json(names)
        if names_on_rank_0 != names:  # no YAML names the tasks, and machines have different data
            raise DataError(
                f"rank {this_rank().rank} has the tasks {', '.join(names)}, rank 0 {', '.join(names_on_rank_0)}"
            )
    return outlines


def find_models(config: EvalConfig, outlines: Sequence[Outline], device: torch.device) -> list[ModelToEvaluate]:
    """Find all models and their result files, without reading weights.

    Collective: raises on all ranks any error that shows by then, such as a missing model or finished results that would
    be replaced.
    """
    shard = build_shard(config, device) if config.fsdp else None
    found: list[ModelToEvaluate] = []
    tokenizers = {}
    """One tokenizer for each kind, so that a learning curve of many checkpoints holds it once."""

    with user_errors_on_all_ranks():
        sources = expand_models(config)
    sources = broadcast_json(sources)  # ranks may see a live run's checkpoints at different times
    for name, source in sources.items():
        try:
            with user_errors_on_all_ranks():
                subject = find_subject(
                    source, tokenizer=config.tokenizer, precision=config.precision, device=device, shard=shard
                )
                tokenizer = subject.tokenizer
                kind = (tokenizer.fingerprint, tokenizer.eos_token_id, *tokenizer.beginning)
                subject.tokenizer = tokenizers.setdefault(kind, tokenizer)

                files = ResultFiles(Path(config.results_folder), config.suite, name, redo=config.redo)
                results = new_results(config, name, subject, files)
                files.refuse_to_replace(results, outlines)
        except UserError:
            if not was_removed(config, name, source):
                raise
            continue
        tell([f"models.{name}: {note}; {subject.source} is evaluated" for note in subject.notes])
        found.append(ModelToEvaluate(subject=subject, results=results, files=files))
    return found


def new_results(config: EvalConfig, name: str, subject: Subject, files: ResultFiles) -> Results:
    """Return the results of a model before any task is run."""
    return Results(
        model=name,
        suite=config.suite,
        source=mask_urls(subject.source),
        save_id=subject.save_id,
        num_tokens_trained=subject.num_tokens_trained,
        tokenizer=subject.tokenizer.fingerprint,
        precision=devices.computed_precision(config.precision),
        path=files.path,
    )


def was_removed(config: EvalConfig, name: str, source: str) -> bool:
    """Return whether a listed checkpoint is gone by now, and print that.

    A live run removes old checkpoints while they are evaluated. Collective: rank 0 looks.
    """
    if not config.all_checkpoints:
        return False
    if not broadcast_json(_is_gone(source)):
        return False
    tell([f"models.{name}: passed over {source}, which was removed meanwhile"])
    return True


def _is_gone(checkpoint_url: str) -> bool:
    """Return whether a checkpoint is known not to exist any more."""
    is_local = "://" not in checkpoint_url
    if is_local and not Path(checkpoint_url).exists():
        return True
    try:
        return not is_checkpoint(checkpoint_url)
    except CheckpointError:  # what cannot be read is not known to be removed
        return False


def evaluate_one(config: EvalConfig, tasks: Sequence[TaskConfig], entry: ModelToEvaluate) -> Results:
    """Load one model and run the tasks on it. Collective."""
    results = entry.results
    with user_errors_on_all_ranks():
        model = entry.subject.load()  # no other reference, so that only one model at a time takes memory
    results.num_parameters = sum(parameter.numel() for parameter in model.model.parameters())

    def leave_out(reason: str) -> None:
        """Tell the user that a task is left out."""
        tell([f"{results.model}: left out of the gauntlet: {reason}"])

    progress = ProgressLine(results.model)
    evaluated = evaluate(
        model,
        entry.subject.tokenizer,
        tasks,
        results,
        entry.files,
        tokenization=config.tokenization,
        max_batch_tokens=config.device_batch_tokens or BATCH_TOKENS[model.device.type],
        max_seq_len=config.max_seq_len,
        limit=config.limit,
        on_progress=progress,
        on_nothing=leave_out if config.eval_gauntlet else None,
    )
    if not progress.task:
        tell([f"{results.model}: nothing was run, {entry.files.path} has every task; redo=true asks again"])
    return evaluated


def write_suite(all_results: Sequence[Results], folder: Path, gauntlet: GauntletConfig | None) -> list[Path]:
    """Write the tables of these models and of those that earlier launches evaluated on this suite.

    Returns the files. Raises DataError if they cannot be written; the results themselves are there by then.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with lock_folder(folder):
            others, notes = read_others(folder, [results.model for results in all_results])
            tell(notes)
            return write_tables([*all_results, *others], folder, gauntlet)
    except OSError as error:
        raise DataError(
            f"results_folder: the tables in {folder} cannot be written: {error.strerror or error}; the results are "
            "there, and the same command again asks nothing twice"
        ) from error


def expand_models(config: EvalConfig) -> dict[str, str]:
    """Return the models to evaluate, as a dict from a model's name to its path or URL.

    These are the configured ones. With `all_checkpoints`, a run stands for all its checkpoints in order of batch, named
    after the run and the checkpoint. Raises DataError for a run that does not exist or has no readable checkpoint.
    """
    if not config.all_checkpoints:
        return config.models

    checkpoints: dict[str, str] = {}
    for name, source in config.models.items():
        found, notes = find_all_checkpoints(source)
        is_missing = "://" not in source and not Path(source).exists()
        if not found and is_missing:
            raise DataError(f"models: {source} does not exist; expected a run or a folder of checkpoints")
        if not found:
            reasons = "".join(f"; {note}" for note in notes)
            raise DataError(f"models: {source} holds no checkpoint that can be read{reasons}")
        tell([f"models.{name}: {note}" for note in notes])
        for checkpoint in found:
            checkpoints[f"{name}-{checkpoint.name}"] = checkpoint.url
    return checkpoints


def tell(lines: Sequence[str]) -> None:
    """Print lines to standard error on rank 0, where they do not mix with tables."""
    if this_rank().rank == 0:
        for line in lines:
            print(printable(line), file=sys.stderr)


def start(config: EvalConfig) -> torch.device:
    """Choose this rank's device, and start the process group if there are several ranks or the model is sharded."""
    devices.set_tf32(config.precision == "tf32")
    device = choose_device(devices.device_type())
    if this_rank().world_size > 1 or config.fsdp:
        start_process_group(devices.device_type(), config.dist_timeout)
    return device


def build_shard(config: EvalConfig, device: torch.device) -> Shard:
    """Return a function that shards a model over all ranks."""
    from llmfoundry_lite.parallel.fsdp import shard_model
    from llmfoundry_lite.parallel.mesh import build_mesh
    from llmfoundry_lite.parallel.precision import Precision

    fsdp = FSDPConfig()
    mesh = build_mesh(divide_devices(fsdp, this_rank().world_size), device.type)
    dtype = DTYPES[config.precision]
    precision = Precision(parameters=dtype, reduction=dtype)

    def shard(model: nn.Module) -> None:
        """Shard a model in place."""
        shard_model(model, fsdp, precision, mesh)  # type: ignore[arg-type]

    return shard


class ProgressLine:
    """Shows how far a task is: one line that is rewritten on a terminal, elsewhere a line for each finished task."""

    BAR_WIDTH = 20

    def __init__(self, model: str):
        self.model = model
        self.task = ""
        """The task that is shown; empty until one has begun."""
        self.started_at = 0.0
        self.is_done = False
        self.is_terminal = sys.stderr.isatty()

    def __call__(self, task: str, done: int, total: int) -> None:
        """Show that `done` of `total` items of a task are done."""
        if task != self.task:
            self.task = task
            self.started_at = time.monotonic()
            self.is_done = False
        if self.is_done or this_rank().rank != 0:  # several ranks report the last items twice
            return

        self.is_done = done == total
        text = printable(self._describe(done, total))
        if self.is_terminal:
            clear_line = "\r\033[K"
            print(clear_line + text, end="\n" if self.is_done else "", file=sys.stderr, flush=True)
        elif self.is_done:
            print(text, file=sys.stderr, flush=True)

    def _describe(self, done: int, total: int) -> str:
        """Return the line: model, task, a bar on a terminal, the count, and the rate or the time that is left."""
        seconds = time.monotonic() - self.started_at
        text = f"{self.model} · {self.task}"
        if self.is_terminal:
            filled = self.BAR_WIDTH * done // max(total, 1)
            text += f" {'━' * filled}{'─' * (self.BAR_WIDTH - filled)}"
        else:
            text += " ·"
        text += f" {done:,}/{total:,}"

        if done == total:
            text += f" · {total / max(seconds, 1e-9):.1f} items/s · {seconds:.0f} s"
        elif done:
            remaining_seconds = round(seconds * (total - done) / done)
            text += f" · ETA {datetime.timedelta(seconds=remaining_seconds)}"
        return text
