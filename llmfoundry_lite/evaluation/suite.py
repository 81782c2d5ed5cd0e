"""Evaluates a suite: every model of a configuration on every task, and prints the tables that compare them.

`run_suite` is the whole story. It finds all models and reads all tasks before the first model is loaded, so that
mistakes show early. `harness.py` evaluates one model, `models.py` loads it, and `tables.py` makes the tables.
"""

import datetime
import sys
import time
from collections.abc import Mapping, Sequence
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
from llmfoundry_lite.evaluation.models import DTYPES, LocatedModel, Shard, find_all_checkpoints, locate_model
from llmfoundry_lite.evaluation.result_files import Outline, ResultFiles, lock_folder, outline_tasks
from llmfoundry_lite.evaluation.results import Results, read_others
from llmfoundry_lite.evaluation.tables import gauntlet_table, print_results, write_tables
from llmfoundry_lite.ranks.exchange import broadcast_json, user_errors_on_all_ranks
from llmfoundry_lite.ranks.rank import this_rank
from llmfoundry_lite.ranks.start import choose_device, start_process_group

BATCH_TOKENS = {"cpu": 2048, "cuda": 32768}
"""Type of device -> tokens of a forward pass, padding included, unless `device_batch_tokens` is set."""


@dataclass(kw_only=True)
class ModelToEvaluate:
    """A model that has been found but not loaded, its results so far, and the files that will hold them."""

    located: LocatedModel
    results: Results
    files: ResultFiles


def run_suite(config: EvalConfig, tasks: Sequence[TaskConfig], notes: Sequence[str] = ()) -> list[Results]:
    """Evaluate all models of a configuration, print the tables and write the result files.

    config: the models, the folder of the results, and how to evaluate.
    tasks: the tasks that every model is evaluated on.
    notes: lines to print first.

    Returns the results of each model, in order. With `all_checkpoints`, the suite skips checkpoints that are damaged,
    and those that a running training removes in the meantime; it prints a line about each.

    Collective; rank 0 prints and writes. Raises DataError if no checkpoint is left, and the errors of finding, loading
    and evaluating a model.
    """
    # Find everything before the first model is loaded, which may take minutes.
    print_on_rank_0(notes)
    device = start_device(config)
    outlines = outline_all(config, tasks)
    models = find_models(config, find_sources(config), outlines, device)

    all_results = evaluate_models(config, tasks, outlines, models)
    if not all_results:
        raise DataError(f"models: no checkpoint of {', '.join(config.models.values())} is intact")
    if this_rank().rank == 0:
        print_and_write_tables(config, all_results)
    return all_results


def find_sources(config: EvalConfig) -> dict[str, str]:
    """Return the models to evaluate, as a dict from a model's name to its path or URL; see `expand_models`.

    Collective. While a run is training, ranks may see different checkpoints of it. All take those that rank 0 has seen.
    """
    with user_errors_on_all_ranks():
        sources = expand_models(config)
    return broadcast_json(sources)


def evaluate_models(
    config: EvalConfig,
    tasks: Sequence[TaskConfig],
    outlines: Sequence[Outline],
    models: list[ModelToEvaluate],
) -> list[Results]:
    """Evaluate one model after another, and return their results, without those that `run_suite` skips.

    `models` is emptied: each is popped, so that its memory is freed before the next one is loaded. Collective.
    """
    all_results: list[Results] = []
    while models:
        model = models.pop(0)
        try:
            all_results.append(evaluate_one(config, tasks, model))
        except CheckpointError as error:
            name = model.results.model
            if was_removed(config, name, model.located.source):
                continue
            # One damaged checkpoint of many is skipped. A model that the user named must be readable.
            is_damaged = isinstance(error, DamagedCheckpointError | IncompleteCheckpointError)
            if not (config.all_checkpoints and is_damaged):
                raise
            print_on_rank_0([f"models.{name}: passed over {condition_of(error)} checkpoint: {error}"])
            continue
        print_kept_tasks(model, outlines)
    return all_results


def print_kept_tasks(model: ModelToEvaluate, outlines: Sequence[Outline]) -> None:
    """Print which tasks in a model's results come from earlier launches and are not part of this configuration.

    `outlines` are those of the tasks that the configuration has. Prints nothing if there are no other tasks.
    """
    current_tasks = {outline.name for outline in outlines}
    kept_tasks = [task for task in model.results.tasks if task not in current_tasks]
    if kept_tasks:
        print_on_rank_0([f"{model.files.path}: keeps what it has of the same model besides: {', '.join(kept_tasks)}"])


def print_and_write_tables(config: EvalConfig, all_results: Sequence[Results]) -> None:
    """Print the tables of results and of the gauntlet, write them, and print the names of the files.

    Only rank 0 calls this. Raises DataError if the files cannot be written.
    """
    console = Console()
    gauntlet = config.eval_gauntlet
    folder = Path(config.results_folder) / config.suite
    # Models that earlier launches evaluated are not printed, but the files have them, too, by the same metrics.
    others, _ = read_others(folder, [results.model for results in all_results])
    print_results(all_results, console, config.metric, others)
    if gauntlet:
        console.print()
        gauntlet_table(gauntlet, all_results, config.metric, others).print(console)
    for path in write_suite(all_results, folder, gauntlet, config.metric):
        print(printable(str(path)))


def outline_all(config: EvalConfig, tasks: Sequence[TaskConfig]) -> list[Outline]:
    """Return an outline of each task: its name and settings, which are known before any model is loaded.

    Collective. Raises DataError on all ranks if a task's file cannot be read, or if the ranks have different tasks.
    """
    with user_errors_on_all_ranks():
        skips_empty = config.eval_gauntlet is not None  # a gauntlet leaves such a task out and reports it
        outlines = outline_tasks(tasks, config.tokenization, config.limit, skips_empty=skips_empty)

    names = [outline.name for outline in outlines]
    with user_errors_on_all_ranks():
        names_on_rank_0 = broadcast_json(names)
        if names_on_rank_0 != names:  # possible if tasks are all files of a folder, which differs between machines
            raise DataError(
                f"rank {this_rank().rank} has the tasks {', '.join(names)}, but rank 0 has "
                f"{', '.join(names_on_rank_0)}; give every machine the same files of tasks"
            )
    return outlines


def find_models(
    config: EvalConfig, sources: Mapping[str, str], outlines: Sequence[Outline], device: torch.device
) -> list[ModelToEvaluate]:
    """Find models and their result files, without reading weights. `sources` are as `find_sources` returns them.

    Mistakes show here, before the first model is loaded: a model that does not exist or has no tokenizer, or finished
    results that this evaluation would replace. `outlines` are those of the tasks that are to be run. With
    `all_checkpoints`, checkpoints that were removed in the meantime are left out.

    Collective: every rank raises the error that any rank meets.
    """
    shard = build_shard(config, device) if config.fsdp else None
    models: list[ModelToEvaluate] = []
    tokenizers = {}
    """Facts that tell tokenizers apart -> the first tokenizer with these facts. Equal ones are kept in memory once,
    because with `all_checkpoints` there may be hundreds of models."""

    for name, source in sources.items():
        try:
            with user_errors_on_all_ranks():
                located = locate_model(
                    source,
                    tokenizer=config.tokenizer,
                    precision=config.precision,
                    device=device,
                    shard=shard,
                    trusts_code=config.trust_code,
                )
                tokenizer = located.tokenizer
                tokenizer_key = (tokenizer.fingerprint, tokenizer.eos_token_id, *tokenizer.beginning)
                located.tokenizer = tokenizers.setdefault(tokenizer_key, tokenizer)

                files = ResultFiles(Path(config.results_folder), config.suite, name, redo=config.redo)
                results = start_results(config, name, located, files)
                files.refuse_to_replace(results, outlines)
        except UserError:
            if not was_removed(config, name, source):
                raise
            continue
        # Notes say for instance which newer checkpoint is damaged.
        print_on_rank_0([f"models.{name}: {note}; {located.source} is evaluated" for note in located.notes])
        models.append(ModelToEvaluate(located=located, results=results, files=files))
    return models


def start_results(config: EvalConfig, name: str, located: LocatedModel, files: ResultFiles) -> Results:
    """Return the results of a model, with facts such as its source and tokenizer, but without any task yet."""
    return Results(
        model=name,
        suite=config.suite,
        source=mask_urls(located.source),
        save_id=located.save_id,
        num_tokens_trained=located.num_tokens_trained,
        tokenizer=located.tokenizer.fingerprint,
        precision=devices.computed_precision(config.precision),
        path=files.path.absolute(),
    )


def was_removed(config: EvalConfig, name: str, source: str) -> bool:
    """Return whether a checkpoint that was listed has been removed since then, and print a line if so.

    A run that is training removes old checkpoints while they are evaluated, which is not an error. Without
    `all_checkpoints` no checkpoints were listed, and the answer is always False.

    Collective: the answer is that of rank 0.
    """
    if not config.all_checkpoints:
        return False
    if not broadcast_json(_is_gone(source)):
        return False
    print_on_rank_0([f"models.{name}: passed over {source}, which was removed meanwhile"])
    return True


def _is_gone(checkpoint_url: str) -> bool:
    """Return whether a checkpoint is known not to exist any more. One that cannot be read may still exist."""
    is_local = "://" not in checkpoint_url
    if is_local and not Path(checkpoint_url).exists():
        return True
    try:
        return not is_checkpoint(checkpoint_url)
    except CheckpointError:  # it cannot be read, which does not mean that it was removed
        return False


def evaluate_one(config: EvalConfig, tasks: Sequence[TaskConfig], to_evaluate: ModelToEvaluate) -> Results:
    """Load one model, run the tasks on it, and return its results.

    `to_evaluate.results` is filled in and returned. The result files are written after each task. Only this function
    refers to the loaded model, so that its memory is freed when the function returns.

    Collective. Raises CheckpointError if the weights do not match their checksums, and the errors of `evaluate`.
    """
    results = to_evaluate.results
    # The weights may turn out to be damaged on one rank alone. Then all ranks raise its error.
    with user_errors_on_all_ranks():
        model = to_evaluate.located.load()
    results.num_parameters = sum(parameter.numel() for parameter in model.model.parameters())

    def print_left_out(reason: str) -> None:
        """Print that a task is left out of the gauntlet, and why."""
        print_on_rank_0([f"{results.model}: left out of the gauntlet: {reason}"])

    # Only a configuration with a gauntlet leaves out tasks without items. Otherwise such a task is an error.
    progress = ProgressLine(results.model)
    evaluated = evaluate(
        model,
        to_evaluate.located.tokenizer,
        tasks,
        results,
        to_evaluate.files,
        tokenization=config.tokenization,
        max_batch_tokens=config.device_batch_tokens or BATCH_TOKENS[model.device.type],
        max_seq_len=config.max_seq_len,
        limit=config.limit,
        keep_prompts=config.keep_prompts,
        on_progress=progress,
        on_empty_task=print_left_out if config.eval_gauntlet else None,
    )
    has_run_any_task = progress.task != ""
    if not has_run_any_task:
        path = to_evaluate.files.path
        print_on_rank_0([f"{results.model}: nothing was run, {path} has every task; redo=true asks again"])
    return evaluated


def write_suite(
    all_results: Sequence[Results], folder: Path, gauntlet: GauntletConfig | None, metric: str | None = None
) -> list[Path]:
    """Write the tables of these models, and of the models that earlier launches evaluated on the same suite.

    folder: the suite's folder, in which each model's results have been written before.
    gauntlet: the configuration of the gauntlet, whose tables are written too; None if there is none.
    metric: the metric that the user asks for; None for the one that `metrics.choose_metrics` chooses.

    Returns the paths of the files. Raises DataError if they cannot be written.
    """
    try:
        # The lock keeps another launch of the suite from writing its tables between reading and writing here.
        folder.mkdir(parents=True, exist_ok=True)
        with lock_folder(folder):
            others, notes = read_others(folder, [results.model for results in all_results])
            print_on_rank_0(notes)
            return write_tables([*all_results, *others], folder, gauntlet, metric)
    except OSError as error:
        raise DataError(
            f"results_folder: the tables in {folder} cannot be written: {error.strerror or error}; the results are "
            "there, and running the same command again repeats no finished task"
        ) from error


def expand_models(config: EvalConfig) -> dict[str, str]:
    """Return the models to evaluate, as a dict from a model's name to its path or URL.

    Without `all_checkpoints`, these are the models of the configuration. With it, each of them is a run, and is
    replaced by its checkpoints in order of batch, so that the table shows a learning curve:

        {"base": "runs/base"}  ->  {"base-ba100": "runs/base/checkpoints/ba100", "base-ba200": …}

    Raises DataError for a run that does not exist or has no readable checkpoint.
    """
    if not config.all_checkpoints:
        return config.models

    url_of_model: dict[str, str] = {}
    for run_name, source in config.models.items():
        checkpoints, notes = find_all_checkpoints(source)
        is_missing = "://" not in source and not Path(source).exists()
        if not checkpoints and is_missing:
            raise DataError(f"models: {source} does not exist; expected a run or a folder of checkpoints")
        if not checkpoints:
            reasons = "".join(f"; {note}" for note in notes)
            raise DataError(f"models: {source} holds no checkpoint that can be read{reasons}")

        # Checkpoints that cannot be read are left out, with a note.
        print_on_rank_0([f"models.{run_name}: {note}" for note in notes])
        for checkpoint in checkpoints:
            url_of_model[f"{run_name}-{checkpoint.name}"] = checkpoint.url
    return url_of_model


def print_on_rank_0(lines: Sequence[str]) -> None:
    """Print lines on rank 0, to standard error, so that standard output has only the tables."""
    if this_rank().rank == 0:
        for line in lines:
            print(printable(line), file=sys.stderr)


def start_device(config: EvalConfig) -> torch.device:
    """Choose this rank's device and return it. Called once, before anything is put on a device.

    This also starts the process group if there are several ranks or models are to be sharded, and sets PyTorch's global
    switch for TF32 to whether that is the precision.
    """
    devices.set_tf32(config.precision == "tf32")
    device = choose_device(devices.device_type())
    if this_rank().world_size > 1 or config.fsdp:
        start_process_group(devices.device_type(), config.dist_timeout)
    return device


def build_shard(config: EvalConfig, device: torch.device) -> Shard:
    """Return a function that shards a model over all ranks in place, with parameters in the configured precision."""
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
    """Shows the progress of tasks on standard error.

    On a terminal, one line per task is rewritten as it advances. Elsewhere a line is printed when a task has finished.
    """

    BAR_WIDTH = 20

    def __init__(self, model: str):
        self.model = model
        self.task = ""
        """The task that is shown; empty until one has begun."""
        self.started_at = 0.0
        self.is_done = False
        self.is_terminal = sys.stderr.isatty()

    def __call__(self, task: str, done: int, total: int) -> None:
        """Show on rank 0 that `done` of `total` items of a task are done.

        Another task than in the last call starts the clock for the rate and the remaining time. Changes `task`,
        `started_at` and `is_done`.
        """
        if task != self.task:
            self.task = task
            self.started_at = time.monotonic()
            self.is_done = False

        # With several ranks, the end of a task is reported more than once, and is shown once.
        if self.is_done or this_rank().rank != 0:
            return
        self.is_done = done == total

        text = printable(self._describe(done, total))
        if self.is_terminal:
            clear_line = "\r\033[K"
            print(clear_line + text, end="\n" if self.is_done else "", file=sys.stderr, flush=True)
        elif self.is_done:
            print(text, file=sys.stderr, flush=True)

    def _describe(self, done: int, total: int) -> str:
        """Return the line that shows the progress of the current task.

        It has the model, the task, a bar on a terminal, the count, and the rate at the end or the time that is left
        before that, such as

            base · arc_easy/0-shot ━━━━━━━━━━────────── 500/1,000 · ETA 0:00:12
            base · arc_easy/0-shot · 1,000/1,000 · 41.7 items/s · 24 s
        """
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
        elif done > 0:
            # The remaining items are assumed to take as long as those before them.
            remaining_seconds = round(seconds * (total - done) / done)
            text += f" · ETA {datetime.timedelta(seconds=remaining_seconds)}"
        return text
