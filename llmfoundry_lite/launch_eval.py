"""Evaluate models on in-context tasks and held-out text, as one rank of a launch.

    llmfoundry-lite eval icl-zero-shot models.ours=runs/mpt-1b models.base=runs/other/checkpoints/ba400
    composer -n 8 -m llmfoundry_lite.launch_eval icl-zero-shot models.ours=runs/mpt-1b
    python scripts/eval.py --all-checkpoints runs/mpt-1b     # a learning curve, on the tasks whose data are here

`config/load_eval.py` checks the configuration, and `evaluation/suite.py` evaluates. torch is imported between the two,
because it reads environment variables that the configuration may set.
"""

if __name__ == "__main__":
    # Before the imports below, which take a moment: a signal that arrives meanwhile ends the process with code 75, by
    # which a scheduler knows that the job has to be started again.
    from llmfoundry_lite.ranks.signals import leave_with_75_when_asked

    leave_with_75_when_asked()

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmfoundry_lite import companions
from llmfoundry_lite.config.eval_schema import EvalConfig
from llmfoundry_lite.config.load_eval import load_eval_config
from llmfoundry_lite.config.load_tasks import trust_code_of
from llmfoundry_lite.ranks.ending import run_and_exit, sigterm_delayed
from llmfoundry_lite.ranks.rank import check_launch, set_environment, this_rank

if TYPE_CHECKING:
    from llmfoundry_lite.evaluation.results import Results

HELP = """\
usage: composer -n RANKS -m llmfoundry_lite.launch_eval [YAML ...] [key=value ...] [--all-checkpoints RUN ...]
       llmfoundry-lite eval [-n RANKS] [YAML ...] [key=value ...] [--all-checkpoints RUN ...] [--show N]

Evaluate models on in-context tasks and held-out text.

YAML                      a file, or the name of one that comes with the package; without one, every task whose data
                          file exists is run
key=value                 overrides all files: icl_tasks=[arc_easy] limit=100
models.NAME=MODEL         a run, a checkpoint, a Hugging Face folder, or hf:NAME; NAME is its name in the results
--all-checkpoints RUN     evaluate every checkpoint of these runs, for a learning curve
follow=true               evaluate each checkpoint of the runs as it appears, until their training ends
--show N                  print the first N prompts of each task, token by token, and exit; no weights are read
-n RANKS                  number of ranks to start on this machine, one for each device
--log-dir FOLDER          folder for the output of ranks 1 and up, with -n; by default, logs in the results folder

-n and --log-dir are options of llmfoundry-lite eval only.

Example: llmfoundry-lite eval -n 8 icl-zero-shot models.ours=runs/mpt-1b models.base=hf:mosaicml/mpt-7b
"""


def main(arguments: Sequence[str]) -> None:
    """Evaluate models as the arguments of the command line say. With -h or --help, rank 0 prints the help instead."""
    if {"-h", "--help"} & set(arguments):
        if this_rank().rank == 0:
            print(HELP, end="")
        return
    launch(arguments)


def launch(arguments: Sequence[str], given: Mapping[str, Any] | None = None) -> "list[Results]":
    """Check the configuration, then evaluate its models as one rank, and return the results of each model.

    With `--show`, rank 0 prints prompts instead, and the list of results is empty.

    Collective: every rank of a launch calls this with the same arguments. `arguments` are those of the command line:
    YAML files and `key=value` pairs. They override `given`, the configuration of a program that calls the library.

    Raises ConfigError, DataError or CheckpointError.
    """
    # If the checks fail on one rank, the launcher sends SIGTERM to the others. It is delayed, so that they report the
    # same error instead of a preemption.
    with sigterm_delayed():
        check_launch()
        config, tasks, notes, num_shown = load_eval_config(arguments, given)

    trust_code_of(tasks)  # the user of this process has named them

    # The modules below import torch, which reads the environment when it is imported.
    prepare_environment(config)
    if num_shown is not None:
        from llmfoundry_lite.evaluation.show import show_prompts

        if this_rank().rank == 0:
            show_prompts(config, tasks, num_shown, notes)
        return []
    if config.follow:
        follow_runs = companions.load("llmfoundry_studies.follow:follow_runs", "follow=true")
        return follow_runs(config, tasks, notes)
    from llmfoundry_lite.evaluation.suite import run_suite

    return run_suite(config, tasks, notes)


def prepare_environment(config: EvalConfig) -> None:
    """Set the configuration's environment variables. Call this before torch is imported, which reads some of them."""
    set_environment(config.environment)


if __name__ == "__main__":
    run_and_exit(main)
