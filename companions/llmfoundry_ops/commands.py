"""`watch`, `relay`, and what `train -n` of the core calls."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer


def train_ranks(arguments: Sequence[str], num_ranks: int, max_restarts: int, log_dir: Path | None) -> int:
    """Train on ranks of this machine and return the launch's exit code. Raises UserError as a rank would."""
    from llmfoundry_lite.config.spans import parse_seconds
    from llmfoundry_lite.ranks.lean_imports import HEAVY
    from llmfoundry_lite.ranks.status import read_status
    from llmfoundry_lite.train import check, prepare_environment
    from llmfoundry_ops.launcher import Launcher, Program

    config = check(arguments)[0].config
    prepare_environment(config)
    program = Program("llmfoundry_lite.train", "llmfoundry_lite.training.train", HEAVY)
    logs = log_dir or Path(config.run_folder) / "logs"

    def batch() -> int:
        return (read_status(Path(config.run_folder)) or {}).get("batch", 0)

    return Launcher(program, num_ranks, max_restarts, logs, batch, parse_seconds(config.retry_for)).run(arguments)


def watch_command(run: Annotated[Path, typer.Argument(metavar="RUN", help="Watch a run on this disk.")]) -> None:
    """Show a run live, until it ends. Batch, loss, rate, remaining time, last checkpoint; Ctrl-C leaves it alone."""
    from llmfoundry_ops.watch import watch

    with contextlib.suppress(KeyboardInterrupt):
        watch(run)


def relay_command(
    path: Annotated[str, typer.Argument(metavar="RELAY.yaml", help="Read the run, its sites, and when it moves.")],
) -> None:
    """Move a run between sites until it is done. It moves every so many batches, or when a site preempts it.

    May be killed and started again at any time. Exit code 75 when asked to leave: start it again to carry on.
    """
    from llmfoundry_lite.ranks.output import ignore_output_errors
    from llmfoundry_ops.relay import run
    from llmfoundry_ops.sites import load_relay

    ignore_output_errors()
    raise typer.Exit(run(load_relay(path)))
