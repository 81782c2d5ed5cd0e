"""A suite: every model of a configuration on every task, and the tables that compare them."""

import datetime
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from llmfoundry_lite import devices
from llmfoundry_lite.checkpoint.store import is_checkpoint, kind_of
from llmfoundry_lite.config.eval_schema import EvalConfig, GauntletConfig, TaskConfig
from llmfoundry_lite.config.layout import divide_devices
from llmfoundry_lite.config.schema import FSDPConfig
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
from llmfoundry_lite.evaluation.results import Outline, ResultFiles, Results, lock_folder, outline_tasks, read_others
from llmfoundry_lite.evaluation.tables import gauntlet_table, print_results, write_tables
from llmfoundry_lite.ranks.exchange import broadcast_json, user_errors_on_all_ranks
from llmfoundry_lite.ranks.rank import this_rank
from llmfoundry_lite.ranks.start import choose_device, start_process_group

BATCH_TOKENS = {"cpu": 2048, "cuda": 32768}


def run_suite(config: EvalConfig, tasks: Sequence[TaskConfig], notes: Sequence[str] = ()) -> list[Results]:
    """Evaluate all models, print the tables, write the files. Every rank of a launch must call this; rank 0 prints."""
    tell(notes)
    device = start(config)
    folder = Path(config.results_folder) / config.suite
    asked = outline_all(config, tasks)
    found = find_models(config, asked, device)
    all_results: list[Results] = []
    while found:
        subject, results, files = found.pop(0)  # popped, so that its memory is freed when it is done
        try:
            all_results.append(evaluate_one(config, tasks, subject, results, files))
            if kept := [name for name in results.tasks if name not in [task.name for task in asked]]:
                tell([f"{files.path}: keeps what it has of the same model besides: {', '.join(kept)}"])
        except CheckpointError as error:
            if was_removed(config, results.model, subject.source):
                continue
            if not (config.all_checkpoints and isinstance(error, DamagedCheckpointError | IncompleteCheckpointError)):
                raise
            tell([f"models.{results.model}: passed over {kind_of(error)} checkpoint: {error}"])
    if not all_results:
        raise DataError(f"models: no checkpoint of {', '.join(config.models.values())} is intact")
    if this_rank().rank == 0:
        show(config, all_results, folder)
    return all_results


def show(config: EvalConfig, all_results: Sequence[Results], folder: Path) -> None:
    """Print the tables, write them, and name the files."""
    console, gauntlet = Console(), config.eval_gauntlet
    print_results(all_results, console)
    if gauntlet:
        console.print()
        gauntlet_table(gauntlet, all_results).print(console)
    for path in write_suite(all_results, folder, gauntlet):
        print(printable(str(path)))


def outline_all(config: EvalConfig, tasks: Sequence[TaskConfig]) -> list[Outline]:
    """Outline the tasks. Raises DataError on all ranks unless all have the same tasks."""
    with user_errors_on_all_ranks():
        skips_empty = config.eval_gauntlet is not None
        asked = outline_tasks(tasks, config.tokenization, config.limit, skips_empty=skips_empty)
    names = [outline.name for outline in asked]
    with user_errors_on_all_ranks():
        if (of_rank_0 := broadcast_json(names)) != names:  # no YAML names the tasks, and machines have different data
            raise DataError(f"rank {this_rank().rank} has the tasks {', '.join(names)}, rank 0 {', '.join(of_rank_0)}")
    return asked


def find_models(
    config: EvalConfig, asked: Sequence[Outline], device: torch.device
) -> list[tuple[Subject, Results, ResultFiles]]:
    """Find all models and their result files. Raises on all ranks any error that shows without reading weights."""
    found: list[tuple[Subject, Results, ResultFiles]] = []
    shard = build_shard(config, device) if config.fsdp else None
    tokenizers = {}
    with user_errors_on_all_ranks():
        models = expand_models(config)
    for name, where in broadcast_json(models).items():  # ranks may see a live run's checkpoints at different times
        try:
            with user_errors_on_all_ranks():
                subject = find_subject(
                    where, tokenizer=config.tokenizer, precision=config.precision, device=device, shard=shard
                )
                like = (subject.tokenizer.fingerprint, subject.tokenizer.eos_token_id, *subject.tokenizer.beginning)
                subject.tokenizer = tokenizers.setdefault(like, subject.tokenizer)  # a learning curve needs it once
                files = ResultFiles(Path(config.results_folder), config.suite, name, redo=config.redo)
                results = Results(
                    model=name,
                    suite=config.suite,
                    source=mask_urls(subject.source),
                    save_id=subject.save_id,
                    num_tokens_trained=subject.num_tokens_trained,
                    tokenizer=subject.tokenizer.fingerprint,
                    precision=devices.computed_precision(config.precision),
                    path=files.path,
                )
                files.refuse_to_replace(results, asked)
        except UserError:
            if not was_removed(config, name, where):
                raise
            continue
        tell([f"models.{name}: {note}; {subject.source} is evaluated" for note in subject.notes])
        found.append((subject, results, files))
    return found


def was_removed(config: EvalConfig, name: str, where: str) -> bool:
    """Return whether a checkpoint has been removed since it was listed, and print that: a live run keeps few."""

    def is_gone() -> bool:
        try:
            return ("://" not in where and not Path(where).exists()) or not is_checkpoint(where)
        except CheckpointError:  # unreadable is not known to be removed
            return False

    if not (config.all_checkpoints and broadcast_json(is_gone())):
        return False
    tell([f"models.{name}: passed over {where}, which was removed meanwhile"])
    return True


def evaluate_one(
    config: EvalConfig, tasks: Sequence[TaskConfig], subject: Subject, results: Results, files: ResultFiles
) -> Results:
    with user_errors_on_all_ranks():
        model = subject.load()  # no other reference, so one model at a time takes memory
    results.num_parameters = sum(parameter.numel() for parameter in model.model.parameters())
    progress = ProgressLine(results.model)
    leave_out = lambda why: tell([f"{results.model}: left out of the gauntlet: {why}"])  # noqa: E731
    evaluated = evaluate(
        model,
        subject.tokenizer,
        tasks,
        results,
        files,
        tokenization=config.tokenization,
        max_batch_tokens=config.device_batch_tokens or BATCH_TOKENS[model.device.type],
        max_seq_len=config.max_seq_len,
        limit=config.limit,
        on_progress=progress,
        on_nothing=leave_out if config.eval_gauntlet else None,
    )
    if not progress.task:
        tell([f"{results.model}: nothing was run, {files.path} has every task; redo=true asks again"])
    return evaluated


def write_suite(all_results: Sequence[Results], folder: Path, gauntlet: GauntletConfig | None) -> list[Path]:
    """Write the tables: these models, then those that earlier launches evaluated on this suite. Raises DataError."""
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
    """Return the models to evaluate; with all_checkpoints, each run's checkpoints in order of batch."""
    if not config.all_checkpoints:
        return config.models
    models = {}
    for name, where in config.models.items():
        found, notes = find_all_checkpoints(where)
        if not found and "://" not in where and not Path(where).exists():
            raise DataError(f"models: {where} does not exist; expected a run or a folder of checkpoints")
        if not found:
            raise DataError(f"models: {where} holds no checkpoint to be seen{''.join(f'; {note}' for note in notes)}")
        tell([f"models.{name}: {note}" for note in notes])
        models |= {f"{name}-{checkpoint.name}": checkpoint.url for checkpoint in found}
    return models


def tell(lines: Sequence[str]) -> None:
    if this_rank().rank == 0:
        for line in lines:
            print(printable(line), file=sys.stderr)


def start(config: EvalConfig) -> torch.device:
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

    def shard(model: nn.Module) -> None:
        shard_model(model, fsdp, Precision(parameters=dtype, reduction=dtype), mesh)  # type: ignore[arg-type]

    return shard


class ProgressLine:
    """Progress: one line that is rewritten on a terminal; without a terminal, a line for each finished task."""

    def __init__(self, model: str):
        self.model = model
        self.task, self.started, self.is_done = "", 0.0, False
        self.is_terminal = sys.stderr.isatty()

    def __call__(self, task: str, done: int, total: int) -> None:
        if task != self.task:
            self.task, self.started, self.is_done = task, time.monotonic(), False
        if self.is_done or this_rank().rank != 0:  # several ranks report the last items twice
            return
        self.is_done = done == total
        seconds = time.monotonic() - self.started
        filled = 20 * done // max(total, 1)
        bar = f" {'━' * filled}{'─' * (20 - filled)}" if self.is_terminal else " ·"
        text = f"{self.model} · {task}{bar} {done:,}/{total:,}"
        if done == total:
            text += f" · {total / max(seconds, 1e-9):.1f} items/s · {seconds:.0f} s"
        elif done:
            text += f" · ETA {datetime.timedelta(seconds=round(seconds * (total - done) / done))}"
        begin, end = ("\r\033[K", "\n" if self.is_done else "") if self.is_terminal else ("", "\n")
        if self.is_terminal or self.is_done:
            print(f"{begin}{printable(text)}", end=end, file=sys.stderr, flush=True)
