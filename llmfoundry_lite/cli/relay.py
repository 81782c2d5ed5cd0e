"""`llmfoundry-lite relay`: one run, several places, in turn."""

from typing import Annotated

import typer


def relay_command(
    path: Annotated[str, typer.Argument(metavar="RELAY.yaml", help="The run, its places, and when it moves.")],
) -> None:
    """Move a run between places until it is done. It moves every so many batches, or when a place preempts it.

    May be killed and started again at any time. Exit code 75 when asked to leave: start it again to carry on.
    """
    from llmfoundry_lite.launch.places import load_relay
    from llmfoundry_lite.launch.relay import run
    from llmfoundry_lite.ranks.output import ignore_output_errors

    ignore_output_errors()
    raise typer.Exit(run(load_relay(path)))
