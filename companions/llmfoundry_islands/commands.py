"""The command `llmfoundry-lite islands coordinate`, which starts the coordinator of a run of several islands.

    LLMFOUNDRY_LITE_ISLANDS_TOKEN=… llmfoundry-lite islands coordinate --listen 10.0.0.1:7070 --islands 2

This file only parses options. `coordination.serve` is the process that they start.
"""

from typing import Annotated

import typer

islands = typer.Typer(help="Train one run with several launches at once.", no_args_is_help=True)


@islands.callback()
def about_islands() -> None:
    """Make `coordinate` a subcommand of `islands`.

    Without a callback, typer treats the only command of a group as the group itself, and `islands coordinate` would not
    parse.
    """


@islands.command("coordinate")
def coordinate(
    listen: Annotated[str, typer.Option(help="host:port to listen at for islands.")] = "127.0.0.1:7070",
    num_islands: Annotated[
        int, typer.Option("--islands", min=1, help="Number of islands to wait for before training starts.")
    ] = 2,
    until_alone: Annotated[bool, typer.Option("--until-alone", help="End once no island is left.")] = False,
    silence: Annotated[
        float, typer.Option(min=1.0, help="Seconds without a message after which an island is left out.")
    ] = 4.0,
) -> None:
    """Assign rows to islands and decide which batches count.

    Runs until Ctrl-C. No tensors pass through the coordinator. Islands and coordinator prove to each other that they
    know the secret in LLMFOUNDRY_LITE_ISLANDS_TOKEN.
    """
    from llmfoundry_islands.coordination.messages import find_token, parse_address
    from llmfoundry_islands.coordination.serve import serve
    from llmfoundry_lite.ranks.output import ignore_output_errors

    ignore_output_errors()
    serve(parse_address(listen, "--listen"), find_token(), num_islands, silence, until_alone=until_alone)
