"""`llmfoundry-lite rehearse`: a run without its hardware."""

from typing import Annotated

import typer

from llmfoundry_lite.cli.options import refuse_beside


def rehearse_command(
    context: typer.Context,
    arguments: Annotated[list[str], typer.Argument(help="RUN.yaml HARDWARE.yaml [key=value ...]")],
    devices: Annotated[int, typer.Option(min=1, help="Devices of the run, in all nodes.")],
    per_node: Annotated[int, typer.Option(min=1, help="Devices of a node.")] = 8,
    rank: Annotated[
        int | None, typer.Option(help="Which of them is rehearsed. By default the first one of each stage.")
    ] = None,
    all_kinds: Annotated[
        bool, typer.Option("--all-kinds", help="The first and the last rank of each stage, in turn.")
    ] = False,
    batches: Annotated[
        int, typer.Option(min=2, help="Whose memory is measured; the optimizer's state is there from the second on.")
    ] = 2,
    searches: Annotated[
        bool, typer.Option("--search", help="Instead: find the largest microbatch that fits, by rehearsing.")
    ] = False,
    hardware: Annotated[str | None, typer.Option(help="The device, if no YAML is named after it.")] = None,
) -> None:
    """Run a rank's real training code on devices that are not there. Memory, FLOPs and collectives are measured.

    Exit code 2 when the run would be refused or run out of memory.
    """
    from llmfoundry_lite.rehearse.rehearse import rehearse

    if searches:
        refuse_beside(context, "--search", "it rehearses one rank, for two batches", only=("all_kinds", "batches"))
    if rank is not None:
        refuse_beside(context, "--rank", "it is the only one that is rehearsed", only=("all_kinds",))
    code = rehearse(
        arguments,
        num_devices=devices,
        per_node=per_node,
        rank=rank,
        all_kinds=all_kinds,
        num_batches=batches,
        hardware=hardware,
        searches=searches,
    )
    raise typer.Exit(code)
