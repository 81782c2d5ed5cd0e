"""Train a model, as one rank of a launch.

    composer -n 8 -m llmfoundry_lite.launch_train mpt-1b h100-8 variables.data=data/c4  # installed
    composer -n 2 scripts/train.py yamls/pretrain/mpt-quickstart.yaml                   # in a clone
    llmfoundry-lite train mpt-125m --dry-run

The order is configuration, preflight, environment, then the heavy imports. No torch before those.
"""

if __name__ == "__main__":  # before the imports below, which take a moment
    from llmfoundry_lite.ranks.signals import leave_with_75_when_asked

    leave_with_75_when_asked()

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmfoundry_lite import preflight
from llmfoundry_lite.checkpoint import remote_folder
from llmfoundry_lite.config.layout import Layout, layout_here
from llmfoundry_lite.config.load_train import DRY_RUNS, LoadedTrain, find_run_folder, load_train_config
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.errors import EXIT_MEANINGS, printable
from llmfoundry_lite.ranks.ending import leaving_during_imports, run_and_exit, sigterm_delayed
from llmfoundry_lite.ranks.lean_imports import FULL_IMPORTS, HEAVY, import_lean
from llmfoundry_lite.ranks.rank import check_launch, set_environment, this_rank
from llmfoundry_lite.ranks.status import refusals_recorded, watch_for_failures_on_other_nodes

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


def main(arguments: Sequence[str]) -> None:
    if {"-h", "--help"} & set(arguments):
        if this_rank().rank == 0:
            print(HELP, end="")
        return
    launch(arguments)


def launch(arguments: Sequence[str], given: Mapping[str, Any] | None = None) -> TrainConfig | None:
    """Check the configuration, then train as one rank. Returns the configuration; None after a dry run."""
    here = this_rank()
    if here.rank == 0:
        remote_folder.note_wait = lambda url: print(f"waiting for {printable(url)}", flush=True)
    with sigterm_delayed():
        invocation, layout, found = check(arguments, given)
        watch_for_failures_on_other_nodes(Path(invocation.config.run_folder))
    if here.rank == 0:
        for note in invocation.notes:
            print(printable(note))
    if invocation.dry_run:
        if here.rank == 0:
            is_for_here, with_yaml = invocation.dry_run == "here", invocation.dry_run == "full"
            print(preflight.describe(invocation.config, layout, found, is_for_here=is_for_here, with_yaml=with_yaml))
        return None

    prepare_environment(invocation.config)
    with refusals_recorded(lambda: Path(invocation.config.run_folder)), leaving_during_imports():
        import_lean(*HEAVY)
        from llmfoundry_lite.training.train import train

    train(invocation.config)
    return invocation.config


def check(
    arguments: Sequence[str], given: Mapping[str, Any] | None = None
) -> tuple[LoadedTrain, Layout, preflight.Preflight]:
    """Check all that needs no heavy import. Raises UserError, which is also recorded in an earlier launch's status."""
    is_dry = bool(DRY_RUNS.keys() & set(arguments))
    with refusals_recorded(lambda: None if is_dry else find_run_folder(arguments, given=given)):
        if not is_dry:  # WORLD_SIZE=16 with --dry-run asks how 16 ranks would divide the run
            check_launch()
        invocation = load_train_config(arguments, given=given)
        config = invocation.config
        must_exist = invocation.dry_run not in ("plan", "full")
        if must_exist:
            preflight.check_installed("composer", "streaming")
        layout = layout_here(config)
        found = preflight.check(config, layout, must_exist=must_exist)
        invocation.notes.extend(found.notes)
        if not invocation.dry_run:
            slow = preflight.describe_division("warning", config, layout)
            invocation.notes.extend(f"warning: {text}" for text in slow)
        if invocation.dry_run == "here":
            from llmfoundry_lite.devices import local_devices  # imports torch

            preflight.check_here(config, layout, local_devices())
    return invocation, layout, found


def prepare_environment(config: TrainConfig) -> None:
    """Set the variables that torch reads when it is imported, and one that asks for full imports."""
    set_environment(config.environment)
    if config.has_own_components:
        os.environ.setdefault(FULL_IMPORTS, "1")


if __name__ == "__main__":
    run_and_exit(main)
