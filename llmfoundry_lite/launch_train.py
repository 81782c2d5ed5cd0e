"""Train a model, as one rank of a launch.

    composer -n 8 -m llmfoundry_lite.launch_train mpt-1b h100-8 variables.data=data/c4  # installed
    composer -n 2 scripts/train.py yamls/pretrain/mpt-quickstart.yaml                   # in a clone
    llmfoundry-lite train mpt-125m --dry-run

`launch` is the story: load and check the configuration (`check`), set the environment variables, import torch and
Composer, and train (`training/train.py`). torch is imported last, because it reads the environment, and so that a wrong
key is reported in less than a second.
"""

if __name__ == "__main__":
    # Before the imports below, which take a moment: a signal that arrives meanwhile ends the process with code 75, by
    # which a scheduler knows that the job has to be started again.
    from llmfoundry_lite.ranks.signals import leave_with_75_when_asked

    leave_with_75_when_asked()

import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from llmfoundry_lite import companions, dry_run, preflight
from llmfoundry_lite.checkpoint import remote_folder
from llmfoundry_lite.checkpoint.start import check_access, publish_early_end
from llmfoundry_lite.config.layout import Layout, layout_here
from llmfoundry_lite.config.load_tasks import load_tasks
from llmfoundry_lite.config.load_train import (
    DRY_RUNS,
    LoadedTrain,
    MergedFiles,
    Observed,
    find_observed,
    find_run_folder,
    is_console_json,
    load_train_config,
    merge_files,
    read_unchecked,
)
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.errors import EXIT_MEANINGS, CheckpointError, ConfigError, chain_of_causes, printable
from llmfoundry_lite.ranks import signals, status
from llmfoundry_lite.ranks.ending import (
    RANK_LOGS,
    Preempted,
    claim_first_error,
    describe_error,
    ignore_leaving_signals,
    leaving_during_imports,
    run_and_exit,
    sigterm_delayed,
)
from llmfoundry_lite.ranks.lean_imports import FULL_IMPORTS, HEAVY, import_lean
from llmfoundry_lite.ranks.output import say
from llmfoundry_lite.ranks.rank import check_launch, set_environment, this_rank
from llmfoundry_lite.ranks.status import refusals_recorded, watch_for_failures_on_other_nodes
from llmfoundry_lite.retry import NoAnswerError

EXIT_CODES = "\n".join(f"{code:5}  {meaning}" for code, meaning in EXIT_MEANINGS.items())
HELP = f"""\
usage: composer -n RANKS -m llmfoundry_lite.launch_train YAML [YAML ...] [key=value ...] [--dry-run[=here|full]]
       llmfoundry-lite train [-n RANKS] YAML [YAML ...] [key=value ...] [--dry-run[=here|full]]

Train a model from YAML files and key=value settings.

YAML                a file, or the name of one that comes with the package, such as mpt-1b or h100-8; later files
                    override earlier ones
key=value           overrides all files: max_duration=1000ba model.d_model=256
hardware=auto       use the overlay for the devices of this machine; hardware=h100-8 names one
-n RANKS            number of ranks to start on this machine, one for each device
--max-restarts N    when a rank dies or freezes, restart all ranks from the newest checkpoint, at most N times; 3 by
                    default with -n
--log-dir FOLDER    folder for the output of ranks 1 and up, with -n; by default, logs in the run's folder
--dry-run           print what would happen and exit: model, data, batches, memory, saves, and what was not checked
--dry-run=here      also check data, tokenizer and this machine's memory, and exit with 2 if one of them does not fit
--dry-run=full      the same as --dry-run, after the resolved configuration as YAML

-n, --max-restarts and --log-dir are options of llmfoundry-lite train only.

Exit codes:
{EXIT_CODES}

Example: llmfoundry-lite train -n 8 mpt-1b h100-8 variables.data=data/mine
"""


OBSERVED = "LLMFOUNDRY_LITE_OBSERVED"
"""Environment variable of ranks whose launcher has started the process that observes the launch."""


class CheckedLaunch(NamedTuple):
    """A launch whose configuration and data have been checked."""

    invocation: LoadedTrain
    """The configuration, the kind of dry run if it is one, and lines to print."""
    layout: Layout
    """Division of the model and the samples among the ranks."""
    preflight_result: preflight.Preflight
    """Findings of the checks about data and tokenizer."""


def main(arguments: Sequence[str]) -> None:
    """Train as the arguments of the command line say. With -h or --help, rank 0 prints the help instead."""
    if {"-h", "--help"} & set(arguments):
        if this_rank().rank == 0:
            print(HELP, end="")
        return
    launch(arguments, is_command=True)


def launch(
    arguments: Sequence[str], given: Mapping[str, Any] | None = None, *, is_command: bool = False
) -> TrainConfig | None:
    """Check the configuration, then train as one rank of a launch, or print what a dry run prints.

    Collective: every rank calls it with the same arguments. `arguments` are those of the command line, and `given` is
    the configuration of a program that calls the library, which they override. Only a command (`is_command`) has the
    console for itself, so that `console_format` holds.

    Returns the configuration, or None after a dry run. Raises UserError for what the user can fix, and what `train`
    raises.
    """
    with observed(arguments, given, is_command=is_command) as merged:
        return _launch(arguments, given, merged)


def _launch(
    arguments: Sequence[str], given: Mapping[str, Any] | None, merged: MergedFiles | None
) -> TrainConfig | None:
    """Check, then train or print what a dry run prints, as `launch` describes. `merged` is as in `check`."""
    # A launch has more patience with a server that does not answer than a command, which may run it in its own process
    # and have set a limit.
    is_main = this_rank().rank == 0
    remote_folder.patience_seconds = None
    if is_main:
        remote_folder.note_wait = lambda line: print(printable(line), flush=True)

    # If the checks fail on one rank, the launcher sends SIGTERM to the others. It is delayed, so that they report the
    # same error instead of a preemption.
    with sigterm_delayed():
        checked = check(arguments, given, merged)
        invocation = checked.invocation
        config = invocation.config
        watch_for_failures_on_other_nodes(Path(config.run_folder))
    if is_main:
        for note in invocation.notes:
            print(printable(note))

    if invocation.dry_run:
        if is_main:
            is_for_here = invocation.dry_run == "here"
            with_yaml = invocation.dry_run == "full"
            description = dry_run.describe_launch(
                config, checked.layout, checked.preflight_result, is_for_here=is_for_here, with_yaml=with_yaml
            )
            print(description)
        return None

    # Import torch and Composer only now, because they read the environment, and take seconds.
    prepare_environment(config)
    if RANK_LOGS not in os.environ:  # our launcher has asked
        check_access_to_saves(config)
    publish = partial(publish_early_end, config)
    with refusals_recorded(lambda: Path(config.run_folder), publish), leaving_during_imports():
        import_lean(*HEAVY)
        from llmfoundry_lite.training.train import train

    train(config)
    return config


@contextlib.contextmanager
def observed(
    arguments: Sequence[str],
    given: Mapping[str, Any] | None = None,
    *,
    is_launcher: bool = False,
    is_command: bool = False,
) -> Iterator[MergedFiles | None]:
    """Let a process beside this one observe the launch in the block, if the run has `alerts` or `metrics_port`.

    The arguments are those of `launch`. Rank 0 starts that process, or the launcher that restarts the ranks
    (`is_launcher`). It reads the run folder alone. At the end of the block, this one waits some seconds until the last
    alert is delivered, because a container or a job ends with its main process.

    A launcher or a command (`is_command`) prints JSON from here on, also after the block, if the run has
    `console_format: json`. Yields the files and arguments as far as they were read, for `check`; None if they were not.
    """
    is_only_printed = bool({"-h", "--help", *DRY_RUNS} & set(arguments))
    if is_only_printed:
        yield None
        return
    merged = None
    with contextlib.suppress(ConfigError):  # `check` meets the error again, and records it
        merged = merge_files(arguments, given)
    values = read_unchecked(arguments, given=given, merged=merged)
    is_possible = companions.is_installed("llmfoundry_ops")  # without it, `check` refuses the run
    if values is None or not is_possible:
        yield merged
        return

    launch = find_observed(values)
    with contextlib.ExitStack() as at_end:
        # The process prints too, so it has to find the console as it stays.
        if is_console_json(values) and (is_launcher or is_command):
            finish_console = use_json_console(values["run_name"], is_launcher=is_launcher)
            at_end.callback(finish_console)
        if launch is None:
            yield merged
            return

        starts_it = this_rank().rank == 0 and OBSERVED not in os.environ
        status.is_observed = True
        observer = contextlib.nullcontext()
        if starts_it:
            observer = _observer_of(launch, is_launcher=is_launcher)
        try:
            with observer:
                yield merged
        finally:
            status.is_observed = False


def use_json_console(run_name: str, *, is_launcher: bool) -> Callable[[], None]:
    """Let each line that this process prints from now on be a JSON object.

    Returns a function for a launcher to call at its end, which waits some seconds until the lines of its ranks are
    printed. A rank waits when it exits, because its libraries may print until then.
    """
    use_json = companions.load("llmfoundry_ops.console:use_json", "console_format")
    if is_launcher:
        return use_json({"run": run_name})
    finish_console = use_json({"run": run_name, "rank": this_rank().rank})
    # Exit handlers run in the reverse order, so this one runs after those of torch, which is not imported yet.
    atexit.register(finish_console)
    return lambda: None


@contextlib.contextmanager
def _observer_of(launch: Observed, *, is_launcher: bool) -> Iterator[None]:
    """Start the process that observes the launch in the block, and let it go at the end of the block."""
    observer = companions.load("llmfoundry_ops.observer:Observer", "alerts")(launch)
    signals.before_leaving = observer.close
    if is_launcher:
        os.environ[OBSERVED] = "1"
    reason_to_leave = ""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Preempted):
            reason_to_leave = str(error)
        # A signal during the wait below would replace this error, and with it the exit code.
        ignore_leaving_signals()
        # Nor may another rank, which fails because this one has, count as the first.
        if isinstance(error, Exception):
            with contextlib.suppress(RuntimeError):
                claim_first_error(error)
        raise
    finally:
        observer.close(reason_to_leave)
        signals.before_leaving = lambda reason: None
        if is_launcher:
            del os.environ[OBSERVED]


def check(
    arguments: Sequence[str], given: Mapping[str, Any] | None = None, merged: MergedFiles | None = None
) -> CheckedLaunch:
    """Check the configuration, the installed packages, the data and the tokenizer, before torch is imported.

    Every rank does this without the others. `arguments` and `given` are as in `launch`, and `merged` is what `observed`
    has read of them; None to read them here. Lines to print are added to the `notes` of the invocation that is
    returned.

    Raises UserError. Unless this is a dry run, the error is also recorded in the run folder, if an earlier launch has
    created one, and beside checkpoints that are elsewhere, if all keys were valid.
    """
    is_dry_run = bool(DRY_RUNS.keys() & set(arguments))
    config: TrainConfig | None = None

    def publish(status: str, reason: str) -> None:
        """Record the refusal beside the checkpoints, once it is known where these are."""
        if config is not None:
            publish_early_end(config, status, reason)

    with refusals_recorded(lambda: None if is_dry_run else find_run_folder(arguments, given=given), publish):
        # A dry run may have a WORLD_SIZE without a launcher: WORLD_SIZE=16 shows how 16 ranks would divide the run.
        if not is_dry_run:
            check_launch()
        invocation = load_train_config(arguments, given=given, merged=merged)
        config = invocation.config

        # Dry runs of the kinds `plan` and `full` describe the launch for any machine, so they need no data and no
        # training packages. A launch and the kind `here` are for this one.
        is_for_this_machine = invocation.dry_run not in ("plan", "full")
        if is_for_this_machine:
            preflight.check_installed("composer", "streaming")
        layout = layout_here(config)
        findings = preflight.check(config, layout, must_exist=is_for_this_machine)
        invocation.notes.extend(findings.notes)
        if not invocation.dry_run:  # a dry run has lines for these warnings
            warnings = dry_run.describe_division("warning", config, layout)
            invocation.notes.extend(f"warning: {text}" for text in warnings)
        if invocation.dry_run == "here":
            from llmfoundry_lite.devices import local_devices  # imports torch

            preflight.check_here(config, layout, local_devices())
    return CheckedLaunch(invocation, layout, findings)


def check_access_to_saves(config: TrainConfig, *, is_launcher: bool = False) -> None:
    """Ask the server of the run's checkpoints for a listing, before torch is imported. Raises CheckpointError.

    Only rank 0 asks, or the launcher that restarts the ranks (`is_launcher`). That prints a fault that may pass, and
    goes on, because its ranks try again for `retry_for`. If there is no answer, rank 0 prints that and goes on too: it
    asks again, with more time, when it chooses where to start.
    """
    if this_rank().rank != 0:
        return
    publish = partial(publish_early_end, config)
    with refusals_recorded(lambda: Path(config.run_folder), publish, creates_folder=True):
        try:
            check_access(config)
        except CheckpointError as error:
            has_no_answer = any(isinstance(cause, NoAnswerError) for cause in chain_of_causes(error))
            is_asked_again = has_no_answer or (is_launcher and error.is_transient)
            if not is_asked_again:
                raise
            text = describe_error(error).removeprefix("error: ")
            if has_no_answer:
                text = f"{printable(str(error))}; the launch goes on, and asks again"
            say(f"warning: {text}", file=sys.stderr)


def prepare_environment(config: TrainConfig) -> None:
    """Set the environment variables that torch and our imports read. Call this before importing torch.

    `import_lean` leaves out modules that our code does not need. If the run uses code of the user, which may need them,
    the variable FULL_IMPORTS turns that off.
    """
    set_environment(config.environment)
    tasks = load_tasks(config.icl_tasks, config.icl_task_folder)
    if config.own_code or any(task.own_code for task in tasks):
        os.environ.setdefault(FULL_IMPORTS, "1")


if __name__ == "__main__":
    run_and_exit(main)
