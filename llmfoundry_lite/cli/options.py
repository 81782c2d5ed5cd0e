"""Check the options of a command before it does any work.

`refuse_conflicting` refuses options that have no effect beside another one. `out_folder` is an option `--out` whose
folder is checked at once, so that a long command does not fail at its end.
"""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import typer

from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.files import check_result_replaceable


def refuse_conflicting(
    context: typer.Context, option: str, reason: str, *, only: Collection[str] = (), allowed: Collection[str] = ()
) -> None:
    """Raise ConfigError if the command line has parameters that have no effect together with `option`.

    These are the parameters in `only`, or, if that is empty, all except `option` and those in `allowed`. Both have
    names of the command function's parameters. `reason` says in the message why they have no effect: `--option: reason;
    leave out --other`.
    """
    conflicting = []
    for parameter in context.command.params:
        may_conflict = parameter.name in only if only else parameter.name not in allowed
        is_option_itself = option in parameter.opts
        if may_conflict and not is_option_itself and _is_given(context, parameter):
            conflicting.append(_display_name(context, parameter))
    if conflicting:
        raise ConfigError(f"{option}: {reason}; leave out {', '.join(conflicting)}")


def parse_counts(text: str, option: str = "--devices") -> list[int]:
    """Parse the value of an option as a list of counts: `64,128` gives [64, 128].

    Raises ConfigError, which names the option, unless all parts are whole numbers above 0.
    """
    parts = text.split(",")
    are_counts = all(part.isdecimal() and int(part) > 0 for part in parts)
    if not are_counts:
        raise ConfigError(f"{option}: {text!r} given, expected a number, or several such as 64,128,256")
    return [int(part) for part in parts]


def out_folder(help: str) -> Any:
    """Return a typer option `--out` for a folder of results, which are written at the end of a command.

    That the folder can be written is checked first, so that a long command does not fail at its end.
    """
    return typer.Option(help=help, callback=_check_out_folder)


def expand_home(path: Path | None) -> Path | None:
    """Return a path with the user's home folder for `~`, which shells leave alone in `--option=~/folder`."""
    return None if path is None else path.expanduser()


def _check_out_folder(context: typer.Context, path: Path | None) -> Path | None:
    """Check the value of an option `--out`, and return it with the user's home folder for `~`. Typer calls this.

    Raises ConfigError if the folder cannot be created or written, or if it has a file with the name of a result, such
    as report.json, that is not an earlier result.
    """
    path = expand_home(path)
    if path is None:
        return None

    # Find the innermost folder of the path that exists. The others will be created in it.
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise ConfigError(f"--out: {existing} is a file, expected a folder")
    if not os.access(existing, os.W_OK):
        raise ConfigError(f"--out: {existing} cannot be written; name another folder")
    check_result_replaceable(path, context.info_name or "")
    return path


def _is_given(context: typer.Context, parameter: Any) -> bool:
    """Return whether the command line gives this parameter of a command, so that its value is not the default."""
    source = context.get_parameter_source(parameter.name)
    return source is not None and source.name == "COMMANDLINE"


def _display_name(context: typer.Context, parameter: Any) -> str:
    """Return a parameter's name for a message: `--option`, or the values of positional arguments."""
    name = parameter.opts[0]
    if name.startswith("-"):
        return name
    return " ".join(context.params[parameter.name])
