"""`llmfoundry-lite doctor`: is this machine fit for a run?"""

from pathlib import Path
from typing import Annotated

import typer

from llmfoundry_lite.cli.options import refuse_beside
from llmfoundry_lite.errors import ConfigError

IN_A_LAUNCH = "it compares the launch's ranks, --alone examines this machine"


def doctor_command(
    context: typer.Context,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the findings there too, for fleets.")] = None,
    folder: Annotated[Path, typer.Option(help="Where checkpoints will go.")] = Path("."),
    num_ranks: Annotated[int | None, typer.Option(min=1, help="Of the collectives [one per device; CPU: 2].")] = None,
    alone: Annotated[bool, typer.Option("--alone", help="In a launch too: this machine, and not its links.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Less of everything: under 10 s without a GPU.")] = False,
    verified: Annotated[
        bool, typer.Option("--verified", help="Instead: the table of the FILES that scripts/gpu_check.py wrote.")
    ] = False,
    files: Annotated[list[Path] | None, typer.Argument(help="With --verified.", show_default=False)] = None,
) -> None:
    """Check this machine before a run is trusted to it. Exit code 2 when something failed.

    Under torchrun or srun, all nodes together: each pair's link, each node's rate, clocks and versions.
    """
    if verified or files:
        from llmfoundry_lite.doctor.verified import describe_proofs

        if not (verified and files):
            raise ConfigError("doctor: --verified and the files of scripts/gpu_check.py belong together; give both")
        refuse_beside(context, "--verified", "nothing is examined", but=("files",))
        print(*describe_proofs(files), sep="\n")
        return
    from llmfoundry_lite.doctor.examine import doctor, leave_without_waiting
    from llmfoundry_lite.doctor.finding import Machine
    from llmfoundry_lite.ranks.rank import adopt_srun, this_rank

    machine = Machine(folder=folder, num_ranks=num_ranks, quick=quick)
    if not alone:
        import llmfoundry_lite.ranks.ending  # noqa: F401 - before torch, of whose words in C++ it leaves the errors

        try:
            adopt_srun()
            if this_rank().world_size > 1:
                from llmfoundry_lite.doctor.nodes import examine_nodes

                refuse_beside(context, "doctor in a launch", IN_A_LAUNCH, only=("folder", "num_ranks"))
                raise typer.Exit(examine_nodes(machine, json_file))
        except ConfigError as error:
            if this_rank().local_rank > 0:  # its node's first rank has the same error
                raise typer.Exit(error.exit_code) from None
            raise
    code = doctor(machine, json_file)
    leave_without_waiting(code)
    raise typer.Exit(code)
