"""Options that mean nothing beside another one are refused, instead of ignored."""

from collections.abc import Collection
from typing import Any

import typer

from llmfoundry_lite.errors import ConfigError


def refuse_beside(
    context: typer.Context, option: str, why: str, *, only: Collection[str] = (), but: Collection[str] = ()
) -> None:
    """Raises ConfigError, which says `why`, where the command line gives what means nothing beside `option`: one
    of the parameters `only`; or, where that is empty, any that is not in `but`.
    """
    given = [
        _words(context, parameter)
        for parameter in context.command.params
        if parameter.name not in but and option not in parameter.opts and (not only or parameter.name in only)
        if _is_given(context, parameter)
    ]
    if given:
        raise ConfigError(f"{option}: {why}; leave out {', '.join(given)}")


def _is_given(context: typer.Context, parameter: Any) -> bool:
    source = context.get_parameter_source(parameter.name)
    return source is not None and source.name == "COMMANDLINE"


def _words(context: typer.Context, parameter: Any) -> str:
    """An option's name, or the arguments as they were given."""
    return parameter.opts[0] if parameter.opts[0].startswith("-") else " ".join(context.params[parameter.name])
