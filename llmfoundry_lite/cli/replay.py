"""`llmfoundry-lite replay`: batches of a run trained again here, and compared with what the run recorded."""

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from llmfoundry_lite.cli.run import Ranks
from llmfoundry_lite.errors import EXIT_DIFFERS, EXIT_DONE, ConfigError, printable


def replay_command(
    where: Annotated[str, typer.Argument(metavar="RUN", help="A run directory, or a folder of checkpoints.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[baN..baM] [key=value ...]", help="States; and what differs here, such as folders."),
    ] = None,
    num_ranks: Ranks = 1,
) -> None:
    """Train batches of a run again, and compare with its log.

    Data, losses, norms and the state are compared. From its checkpoint at baN or before, until baM; by default from the
    last checkpoint but one to the last. Nothing is saved. Exit code 0: bit-equal. 3: within a band that other devices
    or kernels explain, or it does not fit.
    """
    from llmfoundry_lite.config.changes import find_changes
    from llmfoundry_lite.config.schema import as_dict
    from llmfoundry_lite.launch.launcher import Launcher, Program, refuse_other_launchers
    from llmfoundry_lite.launch.processes import rank_variables
    from llmfoundry_lite.launch.replay import compare, plan_replay, write_replay
    from llmfoundry_lite.train import check, prepare_environment
    from llmfoundry_lite.training.lean_imports import HEAVY

    refuse_other_launchers()
    states = [argument for argument in arguments or () if argument.startswith("ba") and "=" not in argument]
    changes = [argument for argument in arguments or () if argument not in states]
    if len(states) > 1 or not all("=" in change for change in changes):
        raise ConfigError(f"replay: {' '.join(arguments or ())} given, expected baN..baM once, and key=value pairs")
    plan = plan_replay(where, *states) if states else plan_replay(where, None)
    os.environ.update(rank_variables(0, num_ranks))
    with tempfile.TemporaryDirectory(prefix="llmfoundry-lite-replay-") as temporary:
        folder = Path(temporary) / "run"
        path = write_replay(plan, folder, num_ranks)
        config = check([path, *changes])[0].config
        found = find_changes(as_dict(check([path])[0].config), as_dict(config)) if changes else {}
        if other := [change for rule in ("never", "logged") for change in found.get(rule, ())]:
            raise ConfigError(f"replay: {other[0]} would be another run; leave it out")
        prepare_environment(config)
        start = "its seed" if plan.start is None else plan.start.name
        print(printable(f"training batches {plan.first_batch} to {plan.last_batch} of {where} again, from {start}"))
        program = Program("llmfoundry_lite.training.replay", "llmfoundry_lite.training.train", HEAVY)
        code = Launcher(program, num_ranks, 0, Path(temporary) / "logs").run([path, *changes])
        if code != EXIT_DONE:
            raise typer.Exit(code)
        verdict = compare(plan, folder)
    print(printable(verdict.text))
    raise typer.Exit(EXIT_DONE if verdict.is_equal else EXIT_DIFFERS)
