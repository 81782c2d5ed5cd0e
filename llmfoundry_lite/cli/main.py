"""The program `llmfoundry-lite`: the commands of the core and of installed companions.

    llmfoundry-lite data prepare --source python-stdlib --out data/stdlib --tokenizer train:4096 --max-seq-len 256

An error that the user can correct is printed in one line on standard error, and the program exits with a code of
`errors.py`. Each command imports what it needs when it is called, so that `--help` answers at once.
"""

import errno
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
    OwnCodeError,
    UserError,
    printable,
)
from llmfoundry_lite.ranks.codec import shorten
from llmfoundry_lite.ranks.ending import describe_error
from llmfoundry_lite.ranks.output import OutputError, prepare_output, say
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
core_commands = {command.name for command in app.registered_commands}
core_commands |= {group.name for group in app.registered_groups}
for name, command in companions.parts("commands"):
    if name in core_commands:
        companions.leave_out(name, ValueError("the core has a command of this name"))
    elif isinstance(command, typer.Typer):
        app.add_typer(command, name=name)
    else:
        app.command(name)(command)
examples: list[str] = [*EXAMPLES]
for companion in companions.find_companions():
    examples += companion.examples
add_examples(app, examples)


@app.callback(invoke_without_command=True)
def about(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """Print the version, if that is asked for. Typer calls this before every command, with the options before it."""
    if version:
        print(f"llmfoundry-lite {read_release().version}")
        raise typer.Exit


def main() -> NoReturn:
    """Run the command line of `llmfoundry-lite` and exit with its exit code."""
    remote_folder.note_wait = lambda line: print(printable(line), file=sys.stderr, flush=True)
    remote_folder.patience_seconds = remote_folder.PATIENCE_SECONDS
    run_program(app, "llmfoundry-lite")


def run_program(program: typer.Typer, name: str) -> NoReturn:
    """Run the command line of a program and exit with its exit code, even if its output cannot be written.

    `name` is the name of the program in messages. An error of the output is reported at the end, unless the reader of a
    pipe has left, as `head` does.
    """
    output = prepare_output()
    try:
        exit_code = run(sys.argv[1:], program, name)
    except SystemExit as error:
        exit_code = error.code

    try:
        sys.stdout.flush()
    except OutputError as error:
        exit_code = exit_code or print_error(error)
    # A command that must finish its work drops lines that it cannot write, which is reported here.
    failure = output.failure if output is not None and output.drops else None
    if failure is not None and not isinstance(failure, BrokenPipeError):
        print(f"warning: standard output: {failure.strerror}; some lines were not written", file=sys.stderr)

    if exit_code == EXIT_INTERRUPTED:
        end_by_ctrl_c()
    sys.exit(exit_code)


def end_by_ctrl_c() -> NoReturn:
    """End this process by SIGINT itself, as Python does on Ctrl-C, but without a traceback.

    A shell reports exit code 130 for this. Exiting with 130 would not do, because a shell then assumes that the command
    has handled Ctrl-C, and continues a loop in which the command runs.
    """
    sys.excepthook = lambda *error: None
    raise KeyboardInterrupt


def print_error(error: UserError) -> int:
    """Print an error with its remedy in one line on standard error, and return its exit code.

    If the user's own code has caused it, its traceback comes before the line. Nothing is printed if the error is that
    the reader of the command's output has left.
    """
    if error.exit_code != EXIT_UNREAD:
        text = f"error: {printable(' '.join(str(error).split()))}{error.remedy}"
        if isinstance(error, OwnCodeError):
            text = describe_error(error)
        say(text, "ended", {"exit_code": error.exit_code}, file=sys.stderr)
    return error.exit_code


def run(arguments: list[str], program: typer.Typer = app, name: str = "llmfoundry-lite") -> int:
    """Run one command line and return its exit code.

    `arguments` are without the program's name. Errors that the user can act on are printed in one line. Other
    exceptions are bugs, and pass through with their traceback.
    """
    try:
        exit_code = program(arguments, prog_name=name, standalone_mode=False)
    except UserError as error:
        return print_error(error)
    except typer.TyperException as error:
        return print_usage_error(error, arguments)
    except ModuleNotFoundError as error:  # one companion may import another, which is not installed
        if error.name not in companions.PACKAGES:
            raise
        return print_error(companions.missing(error.name, needed_for=arguments[0]))
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:  # such a name can only come from the user, whichever command meets it
            raise
        return print_error(
            UserError(f"{shorten(error.filename)}: the name is too long for a file; check the arguments")
        )
    except typer.Abort:
        return EXIT_INTERRUPTED
    return exit_code if isinstance(exit_code, int) else EXIT_DONE


def print_usage_error(error: typer.TyperException, arguments: list[str]) -> int:
    """Print on standard error what is wrong with a command line that could not be parsed, and return the exit code.

    For a command of a companion that is not installed, the error names the companion. For a line without any arguments,
    such as `llmfoundry-lite data`, the help is printed.
    """
    companion_of_command = companions.find_missing("commands")
    if arguments and arguments[0] in companion_of_command:
        return print_error(companions.missing(companion_of_command[arguments[0]], needed_for=arguments[0]))

    context = getattr(error, "ctx", None)
    hint = ""
    if context is not None:
        # The command path is the program's name and the names of groups and command: `llmfoundry-lite data prepare`.
        num_names = len(context.command_path.split()) - 1
        has_arguments = len(arguments) > num_names
        if not has_arguments:
            print(context.get_help(), file=sys.stderr)
            return EXIT_USER
        hint = f"; see {context.command_path} --help"
    message = " ".join(error.format_message().split()).rstrip(".")
    print(f"error: {printable(message)}{hint}", file=sys.stderr)
    return EXIT_USER


if __name__ == "__main__":
    main()
