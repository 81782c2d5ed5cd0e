"""Evaluates the checkpoints of runs that are training, each as it appears: `eval follow=true models.m=RUN`.

`follow_runs` is the story, which all ranks run. Rank 0 looks at the runs (`Follower`) and decides what comes next
(`Step`): evaluate a checkpoint, wait, or end. `followed_run.py` has what is known of one run, and when it has ended.

The results are those of `all_checkpoints`, one file for each checkpoint, so that a launch which was stopped carries on
where it was: a checkpoint whose results are complete is not loaded again.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from llmfoundry_lite.checkpoint.store import condition_of
from llmfoundry_lite.config.eval_schema import EvalConfig, TaskConfig
from llmfoundry_lite.errors import (
    EXIT_FAILURE,
    DamagedCheckpointError,
    DataError,
    IncompleteCheckpointError,
    mask_urls,
    printable,
)
from llmfoundry_lite.evaluation.metrics import by_metrics, choose_metrics
from llmfoundry_lite.evaluation.records import is_accuracy, score_of
from llmfoundry_lite.evaluation.result_files import Outline
from llmfoundry_lite.evaluation.results import Results, read_results
from llmfoundry_lite.evaluation.suite import (
    evaluate_models,
    find_models,
    outline_all,
    print_and_write_tables,
    print_on_rank_0,
    start_device,
    write_suite,
)
from llmfoundry_lite.evaluation.tables import average_error
from llmfoundry_lite.ranks.exchange import broadcast_json, user_errors_on_all_ranks
from llmfoundry_lite.ranks.rank import this_rank
from llmfoundry_studies.followed_run import CheckpointToEvaluate, FollowedRun

MAX_SHOWN_SCORES = 3
"""Scores in the line about an evaluated checkpoint, besides the average. The table at the end has all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Next step of all ranks: evaluate the checkpoint at `url`, end if `has_ended`, and otherwise wait."""

    model: str = ""
    """The checkpoint's name in the results, such as `base-ba200`."""
    url: str = ""
    """Empty: no checkpoint is there to evaluate."""
    is_saved_again: bool = False
    """Whether a later launch of the run has replaced the checkpoint since it was evaluated."""
    has_ended: bool = False
    failure: str = ""
    """With `has_ended`: why the results are not those of a whole training. Empty if they are."""


def follow_runs(config: EvalConfig, tasks: Sequence[TaskConfig], notes: Sequence[str] = ()) -> list[Results]:
    """Evaluate every checkpoint of the runs in `config.models`, in order of batch, until their training ends.

    The tables are written after each checkpoint and printed at the end. Checkpoints that are damaged, or that their run
    removes before or during their evaluation, are named and passed over. `notes` are lines to print first.

    Returns the results of all checkpoints, also of those that earlier launches evaluated.

    Collective; rank 0 looks at the runs, prints and writes. Raises DataError with exit code EXIT_FAILURE if a run seems
    to have died before its end, and with EXIT_USER if it never had a checkpoint.
    """
    print_on_rank_0(notes)
    device = start_device(config)
    outlines = outline_all(config, tasks)
    follower = Follower(config)

    results_of_model: dict[str, Results] = {}
    while True:
        with user_errors_on_all_ranks():
            step = follower.next_step() if this_rank().rank == 0 else Step()
        step = Step(**broadcast_json(asdict(step)))
        if step.has_ended:
            break
        if not step.url:
            time.sleep(config.follow_interval.seconds)
            continue

        results = evaluate_checkpoint(config, tasks, outlines, device, step)
        if results is not None:
            results_of_model[results.model] = results
            if this_rank().rank == 0:
                folder = Path(config.results_folder) / config.suite
                write_suite([*results_of_model.values()], folder, config.eval_gauntlet, config.metric)

    all_results = [*results_of_model.values()]
    if all_results and this_rank().rank == 0:
        print_and_write_tables(config, all_results)
    if step.failure:
        error = DataError(step.failure)
        if all_results:
            error.exit_code = EXIT_FAILURE
        raise error
    return all_results


def evaluate_checkpoint(
    config: EvalConfig, tasks: Sequence[TaskConfig], outlines: Sequence[Outline], device: torch.device, step: Step
) -> Results | None:
    """Evaluate one checkpoint, unless its results are complete, and write its results.

    Returns the results. None if the checkpoint is passed over, because it is damaged or was removed.

    Collective; rank 0 prints and writes. Raises the errors of finding, loading and evaluating a model.
    """
    config = replace(config, all_checkpoints=True, redo=config.redo or step.is_saved_again)
    try:
        models = find_models(config, {step.model: step.url}, outlines, device)
    except (DamagedCheckpointError, IncompleteCheckpointError) as error:
        print_on_rank_0([f"models.{step.model}: passed over {condition_of(error)} checkpoint: {error}"])
        return None
    if not models:
        return None  # it was removed

    # An earlier launch may have evaluated it. Only rank 0 sees the files.
    model = models[0]
    if broadcast_json(model.files.has_finished(model.results, outlines)):
        path = model.files.path
        return read_results(path) if this_rank().rank == 0 else model.results

    if step.is_saved_again:
        print_on_rank_0([f"models.{step.model}: a later launch has saved it again; its results are replaced"])
    evaluated = evaluate_models(config, tasks, outlines, models)
    if not evaluated:
        return None  # it turned out to be damaged, or was removed meanwhile
    [results] = evaluated
    print_on_rank_0([describe_scores(results, config.metric)])
    return results


def describe_scores(results: Results, metric: str | None) -> str:
    """Return a line with the scores of a checkpoint: `base-ba200: 1.3G tokens · average 0.412 ± 0.006 · …`.

    `metric` is the one that the user asks for, or None.
    """
    [shown] = by_metrics([results], choose_metrics([results], metric))
    parts = []
    if shown.num_tokens_trained is not None:
        parts.append(f"{shown.num_tokens_trained:,} tokens")
    if len(shown.averaged) > 1 and shown.average is not None:
        parts.append(f"average {shown.average:.3f} ± {average_error(shown.tasks, shown.averaged):.3f}")
    for task, record in list(shown.tasks.items())[:MAX_SHOWN_SCORES]:
        score, error = score_of(record)
        digits = 3 if is_accuracy(record) else 4
        text = f"{task} {record['metric']} {score:.{digits}f}"
        parts.append(text if error is None else f"{text} ± {error:.{digits}f}")
    if len(shown.tasks) > MAX_SHOWN_SCORES:
        parts.append(f"{len(shown.tasks) - MAX_SHOWN_SCORES} more")
    return f"{results.model}: {' · '.join(parts)}"


class Follower:
    """Looks at the runs and decides on the next step. Only rank 0 calls `next_step`."""

    def __init__(self, config: EvalConfig):
        self.config = config
        self.runs = [
            FollowedRun(name, source, config.follow_patience.seconds) for name, source in config.models.items()
        ]
        self.line = WaitingLine()

    def next_step(self) -> Step:
        """Look at the runs, print what has happened to them, and return the next step.

        The next checkpoint is the earliest one of the first run that has any left. Raises DataError, ConfigError or
        CheckpointError if a run cannot be followed.
        """
        for run in self.runs:
            self.line.print_above(run.look())
        for run in self.runs:
            checkpoint = run.next_checkpoint()
            self.line.print_above(run.take_notes())
            if checkpoint is not None:
                self.line.clear()
                return Step(model=checkpoint.model, url=checkpoint.url, is_saved_again=self._is_saved_again(checkpoint))

        if all(run.has_ended for run in self.runs):
            self.line.print_above([run.describe_end() for run in self.runs])
            failures = [run.failure for run in self.runs if run.failure]
            return Step(has_ended=True, failure="; ".join(failures))
        self.line.show([run.describe_wait() for run in self.runs if not run.has_ended])
        return Step()

    def _is_saved_again(self, checkpoint: CheckpointToEvaluate) -> bool:
        """Return whether there are results of another save that was in the place of this checkpoint before.

        That is so where a run went back to an earlier checkpoint and saved the batch again. Results of another run, or
        of a file that cannot be read, are left for `find_models` to refuse.
        """
        path = Path(self.config.results_folder) / self.config.suite / f"{checkpoint.model}.json"
        if not path.exists():
            return False
        try:
            results = read_results(path)
        except DataError:
            return False
        return results.source == mask_urls(checkpoint.url) and results.save_id != checkpoint.save_id


class WaitingLine:
    """Shows on standard error what is waited for.

    On a terminal, one line is rewritten at each look. Elsewhere a line is printed when the reason has changed.
    """

    def __init__(self) -> None:
        self.is_terminal = sys.stderr.isatty()
        self.reasons: list[str] = []
        """Reasons that were shown last, without their numbers of seconds."""

    def show(self, waits: Sequence[tuple[str, str]]) -> None:
        """Show what is waited for: (reason, how long already) for each run that has not ended."""
        text = printable(" · ".join(f"{reason}{duration}" for reason, duration in waits))
        reasons = [reason for reason, _ in waits]
        if self.is_terminal:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
        elif reasons != self.reasons:
            print(text, file=sys.stderr, flush=True)
        self.reasons = reasons

    def print_above(self, lines: Sequence[str]) -> None:
        """Print lines, in place of the line that is shown on a terminal."""
        if lines:
            self.clear()
        print_on_rank_0(lines)

    def clear(self) -> None:
        """Clear the line on a terminal, because something else is printed."""
        if self.is_terminal and self.reasons:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        self.reasons = []
