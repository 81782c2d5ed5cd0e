"""Checks of options before any work: those that mean nothing beside another one, and folders that cannot be written."""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import typer

from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.files import check_result_replaceable


def refuse_beside(
    context: typer.Context, option: str, why: str, *, only: Collection[str] = (), but: Collection[str] = ()
) -> None:
    """Raise ConfigError with `why` where the command line gives a parameter that means nothing beside `option`: one of
    `only`, or if that is empty, any that is not in `but`."""
    given = [
        _words(context, parameter)
        for parameter in context.command.params
        if parameter.name not in but and option not in parameter.opts and (not only or parameter.name in only)
        if _is_given(context, parameter)
    ]
    if given:
        raise ConfigError(f"{option}: {why}; leave out {', '.join(given)}")


def parse_counts(text: str, option: str = "--devices") -> list[int]:
    """Parse `64,128` as [64, 128]. Raises ConfigError."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(f"{option}: {text!r} given, expected a number, or several such as 64,128,256")
    return [int(part) for part in parts]


def out_folder(help: str) -> Any:
    """Make an option for a folder that is written when all is done."""
    return typer.Option(help=help, callback=_check_folder)


def expand_home(path: Path | None) -> Path | None:
    """Return a path with the user's home folder for `~`, which shells leave alone in `--option=~/folder`."""
    return None if path is None else path.expanduser()


def _check_folder(context: typer.Context, path: Path | None) -> Path | None:
    """Raise ConfigError for one that cannot be made or written, or where somebody's own file has an answer's name."""
    path = expand_home(path)
    if path is None:
        return None
    place = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    if not place.is_dir():
        raise ConfigError(f"--out: {place} is a file, expected a folder")
    if not os.access(place, os.W_OK):
        raise ConfigError(f"--out: {place} cannot be written; name another folder")
    check_result_replaceable(path, context.info_name or "")
    return path


def _is_given(context: typer.Context, parameter: Any) -> bool:
    source = context.get_parameter_source(parameter.name)
    return source is not None and source.name == "COMMANDLINE"


def _words(context: typer.Context, parameter: Any) -> str:
    """Return an option's name, or the arguments as they were given."""
    return parameter.opts[0] if parameter.opts[0].startswith("-") else " ".join(context.params[parameter.name])
