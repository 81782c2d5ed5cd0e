"""`llmfoundry-lite`: every command.

    llmfoundry-lite data prepare --source python-stdlib --out data/stdlib --tokenizer train:4096 --max-seq-len 256

A failure is one line on standard error and an exit code of `errors.py`. Each command imports what it needs when it is
called, so that `--help` answers at once.
"""

import sys
from typing import Annotated, NoReturn

import typer

from llmfoundry_lite import companions
from llmfoundry_lite.checkpoint import remote_folder
from llmfoundry_lite.cli import checkpoint, data, listing, results
from llmfoundry_lite.cli import run as runs
from llmfoundry_lite.cli.examples import EXAMPLES, add_examples
from llmfoundry_lite.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_UNREAD,
    EXIT_USER,
    UserError,
    printable,
)
from llmfoundry_lite.ranks.output import OutputError, prepare_output
from llmfoundry_lite.release import read_release

app = typer.Typer(
    help="Train MPT models, move runs between machines, and evaluate and compare models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("list")(listing.list_command)
app.command("train", context_settings=runs.PASSED_ON)(runs.train)
app.command("eval", context_settings=runs.PASSED_ON)(runs.evaluate)
app.command("generate")(runs.generate)
app.add_typer(data.data, name="data")
app.add_typer(checkpoint.checkpoint, name="checkpoint")
app.command("report")(results.report_runs)
app.command("compare")(results.compare_results)
app.command("replay")(runs.replay_command)
ours = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
for name, command in companions.parts("commands"):
    if name in ours:
        companions.leave_out(name, ValueError("the core has a command of this name"))
    elif isinstance(command, typer.Typer):
        app.add_typer(command, name=name)
    else:
        app.command(name)(command)
add_examples(app, [*EXAMPLES, *(line for one in companions.find_companions() for line in one.examples)])


@app.callback(invoke_without_command=True)
def about(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(f"llmfoundry-lite {read_release().version}")
        raise typer.Exit


def main() -> NoReturn:
    """Run the `llmfoundry-lite` program."""
    remote_folder.note_wait = lambda line: print(printable(line), file=sys.stderr, flush=True)
    remote_folder.patience_seconds = remote_folder.PATIENCE_SECONDS
    run_program(app, "llmfoundry-lite")


def run_program(program: typer.Typer, name: str) -> NoReturn:
    """Run a program's command line, on any console, and exit."""
    output = prepare_output()
    try:
        code = run(sys.argv[1:], program, name)
    except SystemExit as error:
        code = error.code
    try:
        sys.stdout.flush()
    except OutputError as error:
        code = code or tell(error)
    failure = output.failure if output is not None and output.drops else None
    if failure is not None and not isinstance(failure, BrokenPipeError):
        print(f"warning: standard output: {failure.strerror}; some lines were not written", file=sys.stderr)
    if code == EXIT_INTERRUPTED:
        end_by_ctrl_c()
    sys.exit(code)


def end_by_ctrl_c() -> NoReturn:
    """End this process as Python ends on Ctrl-C, by the signal itself, but without a traceback.

    A shell reports this as 130. It leaves a loop for no other end: of a command that exits with 130 it assumes that the
    command has dealt with Ctrl-C, and the loop goes on.
    """
    sys.excepthook = lambda *error: None
    raise KeyboardInterrupt


def tell(error: UserError) -> int:
    """Print a user's error in a line, unless the reader of the command's output has left. Returns the exit code."""
    if error.exit_code != EXIT_UNREAD:
        print(f"error: {printable(' '.join(str(error).split()))}{error.remedy}", file=sys.stderr)
    return error.exit_code


def run(arguments: list[str], program: typer.Typer = app, name: str = "llmfoundry-lite") -> int:
    """Run one command line and return its exit code. Bugs escape with their traceback."""
    try:
        code = program(arguments, prog_name=name, standalone_mode=False)
    except UserError as error:
        return tell(error)
    except typer.TyperException as error:  # a command line that does not parse
        missing = companions.find_missing("commands")
        if arguments and arguments[0] in missing:
            return tell(companions.missing(missing[arguments[0]], needed_for=arguments[0]))
        context = getattr(error, "ctx", None)
        if context is not None and not arguments[len(context.command_path.split()) - 1 :]:
            print(context.get_help(), file=sys.stderr)  # nothing but the name of a group of commands
            return EXIT_USER
        hint = f"; see {context.command_path} --help" if context is not None else ""
        message = " ".join(error.format_message().split()).rstrip(".")
        print(f"error: {printable(message)}{hint}", file=sys.stderr)
        return EXIT_USER
    except ModuleNotFoundError as error:  # one companion may import another, which is not installed
        if error.name not in companions.PACKAGES:
            raise
        return tell(companions.missing(error.name, needed_for=arguments[0]))
    except typer.Abort:
        return EXIT_INTERRUPTED
    return code if isinstance(code, int) else EXIT_DONE


if __name__ == "__main__":
    main()
