"""`llmfoundry-lite`: every command, each group in a file of its own.

    llmfoundry-lite data prepare --source python-stdlib --out data/stdlib --tokenizer train:4096 --max-seq-len 256

A failure is one line on standard error and an exit code of `errors.py`. Each command imports what it needs when it is
called, so that `--help` answers at once.
"""

import importlib.metadata
import os
import select
import sys
from typing import Annotated

import typer

from llmfoundry_lite.cli.bench import bench
from llmfoundry_lite.cli.checkpoint import checkpoint
from llmfoundry_lite.cli.data import data
from llmfoundry_lite.cli.doctor import doctor_command
from llmfoundry_lite.cli.islands import islands
from llmfoundry_lite.cli.listing import list_command
from llmfoundry_lite.cli.plan import fabric_command, plan_command
from llmfoundry_lite.cli.rehearse import rehearse_command
from llmfoundry_lite.cli.relay import relay_command
from llmfoundry_lite.cli.replay import replay_command
from llmfoundry_lite.cli.results import compare_results, report_runs, watch_run
from llmfoundry_lite.cli.run import PASSED_ON, evaluate, generate, init, train
from llmfoundry_lite.errors import EXIT_BUG, EXIT_DONE, EXIT_INTERRUPTED, EXIT_UNREAD, EXIT_USER, UserError, printable

app = typer.Typer(
    help="Train MPT models, move their runs between machines, evaluate and compare them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("list")(list_command)
app.command("init")(init)
app.command("train", context_settings=PASSED_ON)(train)
app.command("eval", context_settings=PASSED_ON)(evaluate)
app.command("generate")(generate)
app.add_typer(data, name="data")
app.add_typer(checkpoint, name="checkpoint")
app.add_typer(bench, name="bench")
app.command("watch")(watch_run)
app.command("report")(report_runs)
app.command("compare")(compare_results)
app.command("doctor")(doctor_command)
app.command("plan")(plan_command)
app.command("fabric")(fabric_command)
app.command("rehearse")(rehearse_command)
app.command("relay")(relay_command)
app.command("replay")(replay_command)
app.add_typer(islands, name="islands")


@app.callback(invoke_without_command=True)
def about(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(f"llmfoundry-lite {importlib.metadata.version('llmfoundry-lite')}")
        raise typer.Exit


def main() -> None:
    """Run the `llmfoundry-lite` program."""
    try:
        code = run(sys.argv[1:])
        if sys.stdout is not None:  # `>&-` closes it
            sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as error:  # typer makes the second of the first, with code 1
        if is_output_read() or getattr(error, "code", EXIT_BUG) != EXIT_BUG:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is still in the buffer
        code = EXIT_UNREAD
    sys.exit(code)


def is_output_read() -> bool:
    """Return whether standard output has a reader; a pipe may have lost it."""
    if sys.stdout is None:
        return True
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    return not output.poll(0)


def run(arguments: list[str], program: typer.Typer = app, name: str = "llmfoundry-lite") -> int:
    """Run one command line and return its exit code. Bugs escape with their traceback."""
    try:
        code = program(arguments, prog_name=name, standalone_mode=False)
    except UserError as error:
        print(f"error: {printable(' '.join(str(error).split()))}", file=sys.stderr)
        return error.exit_code
    except typer.TyperException as error:  # a command line that does not parse
        context = getattr(error, "ctx", None)
        if context is not None and not arguments[len(context.command_path.split()) - 1 :]:
            print(context.get_help(), file=sys.stderr)  # nothing but the name of a group of commands
            return EXIT_USER
        hint = f"; see {context.command_path} --help" if context is not None else ""
        message = " ".join(error.format_message().split()).rstrip(".")
        print(f"error: {printable(message)}{hint}", file=sys.stderr)
        return EXIT_USER
    except typer.Abort:
        return EXIT_INTERRUPTED
    return code if isinstance(code, int) else EXIT_DONE


if __name__ == "__main__":
    main()
