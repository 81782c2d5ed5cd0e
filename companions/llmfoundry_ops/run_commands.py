"""The commands `llmfoundry-lite runs`: list runs on a disk or in a bucket, and remove their old checkpoints.

Each command imports what it needs when it runs, because a command line must answer quickly.
"""

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.errors import CheckpointError, UserError, printable
from llmfoundry_lite.ranks.output import ignore_output_errors

if TYPE_CHECKING:
    from llmfoundry_lite.checkpoint.commit import Checkpoint

runs = typer.Typer(
    help="List runs, and remove their old checkpoints.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Location = Annotated[
    str, typer.Argument(metavar="PATH", help="A folder or URL with runs up to two levels below it, or one run.")
]


@runs.command("ls")
def list_runs(
    location: Location = "runs",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object for each run.")] = False,
    price: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DEVICE=PRICE",
            help="Price of a device-hour, for the column cost, as in `report`. Reads the whole log of each run.",
        ),
    ] = None,
) -> None:
    """List runs, those with the newest checkpoint first: state, batch, last save, speed, host, reason.

    A run in a bucket is known by its checkpoints, and by the record that each launch keeps beside them. A record is
    written when a launch begins, after each save, and at its end; the batch is that of the record.
    """
    from llmfoundry_lite.report.segments import parse_prices
    from llmfoundry_lite.tables import console
    from llmfoundry_ops.index import build_records, build_table, list_run_lines

    lines = list_run_lines(location, parse_prices(price or []))
    if as_json:
        print(json.dumps(build_records(lines), indent=2))
        return
    build_table(lines).print(console())


@runs.command("prune")
def prune_runs(
    location: Location,
    keep_last: Annotated[int, typer.Option(min=1, help="Number of newest checkpoints to keep in each run.")],
    keep_every: Annotated[
        str | None, typer.Option(metavar="BATCHES", help="Also keep checkpoints of multiples of this: 10000ba.")
    ] = None,
    keep_best: Annotated[
        int, typer.Option(min=0, help="Number of checkpoints with the best values of --by to keep, too.")
    ] = 0,
    by: Annotated[
        str | None,
        typer.Option(metavar="NUMBER", help="Number in the run's log, such as eval/loss; the lowest is best."),
    ] = None,
    highest: Annotated[bool, typer.Option("--highest", help="The highest value of --by is the best.")] = False,
    set_aside: Annotated[
        bool, typer.Option("--set-aside", help="Also remove all saves that were set aside as damaged.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="List what would be removed, and remove nothing. Reads no whole checkpoint."),
    ] = False,
    yes: Annotated[
        bool,
        typer.Option("--yes", help="Read the newest checkpoint of each run, and if it is intact, remove old ones."),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="List each file with its bytes.")] = False,
) -> None:
    """Remove old checkpoints of all runs below a folder or in a bucket, and list the bytes that this frees.

    Removes nothing without --yes. The newest intact checkpoint of a run always stays, and nothing is removed from a run
    that has none. With --yes, intact means that every byte of it has the recorded hash. With --dry-run, only the sizes
    and headers of its files are checked. A removal that was killed is finished by the next one.
    """
    from llmfoundry_lite.tables import console
    from llmfoundry_ops.space import Retention, build_table, carry_out, describe_total, plan_runs, verify_plans

    if dry_run == yes:
        raise UserError("runs prune: expected either --dry-run, which lists, or --yes, which removes what it lists")
    if bool(keep_best) != (by is not None):
        raise UserError("runs prune: --keep-best and --by go together: --keep-best 3 --by eval/loss")
    retention = Retention(
        keep_last=keep_last,
        keep_every_batches=parse_batches(keep_every),
        keep_best=keep_best,
        by=by,
        highest_is_best=highest,
        removes_set_aside=set_aside,
    )
    if yes:
        ignore_output_errors()

    plans = plan_runs(location, retention)
    if yes:
        plans = verify_plans(location, plans, retention, verify_and_tell)
    build_table(plans).print(console())
    if verbose:
        for plan in plans:
            for path, num_bytes in plan.files.items():
                print(printable(f"{plan.folder}/{path}  {num_bytes:,} B"))
    if dry_run:
        print(describe_total(plans, "would free"))
        if any(plan.removal.names for plan in plans):
            print("the checkpoints that stay were not read, only their sizes and headers; --yes first reads the newest")
        return

    failures = carry_out(plans)
    if failures:
        raise CheckpointError(f"not everything was removed, the next prune goes on: {'; '.join(failures)}")
    print(describe_total(plans, "freed"))


def verify_and_tell(run: str, checkpoint: "Checkpoint") -> None:
    """Compare every byte of a checkpoint with its hash, and show the progress on standard error.

    A large checkpoint has a bar at a terminal. Raises CheckpointError if it is not intact.
    """
    from llmfoundry_lite.cli.checkpoint_output import verify_with_progress
    from llmfoundry_ops.space import format_size

    size = format_size(checkpoint.manifest.num_bytes)
    print(printable(f"verifying {checkpoint.name} of {run}, {size}"), file=sys.stderr, flush=True)
    verify_with_progress(checkpoint)


def parse_batches(text: str | None) -> int | None:
    """Parse the value of --keep-every, such as `10000ba`, as a number of batches. Raises UserError."""
    if text is None:
        return None
    try:
        span = Duration.parse(text, ("ba",))
    except ValueError:
        span = None
    if span is None or span.unit != "ba" or span.value < 1:
        raise UserError(f"--keep-every: {text} given, expected a number of batches such as 10000ba")
    return int(span.value)
