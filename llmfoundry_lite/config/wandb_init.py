"""Decide the arguments of `wandb.init` from the block `loggers.wandb` of a YAML and wandb's environment variables.

A value in the YAML takes precedence over a variable. The id of the run's first launch takes precedence over both, so
that all launches of a run are one run in wandb. Nothing here imports torch; wandb is only imported to check the names
in `init_kwargs`.
"""

import importlib.util
import inspect
import os
from collections.abc import Iterator, Mapping
from typing import Any

from llmfoundry_lite.config.callbacks_schema import WandbConfig
from llmfoundry_lite.errors import ConfigError, find_nearest, list_names

RUN_ID = "WANDB_RUN_ID"
VARIABLES = {
    "WANDB_PROJECT": "project",
    "WANDB_ENTITY": "entity",
    "WANDB_RUN_GROUP": "group",
    "WANDB_NAME": "name",
    "WANDB_TAGS": "tags",
    "WANDB_DIR": "dir",
    RUN_ID: "id",
    "WANDB_RESUME": "resume",
}
"""Environment variable -> the argument of `wandb.init` for which it gives a default. wandb has further variables, such
as WANDB_MODE, which stand for no argument here."""


def init_arguments(
    config: WandbConfig, run_name: str, run_folder: str, known_id: str | None, environ: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Return the arguments of `wandb.init` for a launch, except the configuration of the run.

    `known_id` is the id under which earlier launches of the run have logged; None for the first launch. For an argument
    that is None, wandb reads its own variable, such as WANDB_PROJECT. `init_kwargs` in the YAML override all others.
    """
    arguments = {
        "project": config.project,
        "entity": config.entity,
        "group": config.group,
        "name": config.name or environ.get("WANDB_NAME") or run_name,
        "tags": config.tags or None,
        "dir": environ.get("WANDB_DIR") or run_folder,
        "id": known_id or environ.get(RUN_ID) or None,
        "resume": "allow",  # each launch but the first resumes the run
    }
    return arguments | config.init_kwargs


def describe_unused_variables(
    arguments: Mapping[str, Any], environ: Mapping[str, str] = os.environ
) -> Iterator[tuple[str, str]]:
    """Yield (variable, warning) for each of wandb's variables that is set and is overridden by an argument.

    `arguments` are those of `init_arguments`. With WANDB_PROJECT=a and the project b in the YAML, the warning is
    `loggers.wandb: WANDB_PROJECT=a has no effect: project is b`.
    """
    for variable, argument_name in VARIABLES.items():
        value = environ.get(variable)
        used_value = arguments.get(argument_name)
        if not value or used_value is None:
            continue
        used_text = ",".join(used_value) if isinstance(used_value, list) else str(used_value)
        if value != used_text:
            yield variable, f"loggers.wandb: {variable}={value} has no effect: {argument_name} is {used_text}"


def check_wandb(config: WandbConfig) -> None:
    """Raise ConfigError if wandb is not installed, or if `init_kwargs` has an argument that `wandb.init` does not."""
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError("loggers.wandb: wandb is not installed; pip install wandb, or loggers.wandb=null")
    if not config.init_kwargs:
        return
    import wandb  # slow, and needed only here

    known = [*inspect.signature(wandb.init).parameters]
    for name in config.init_kwargs:
        if name not in known:
            near = find_nearest(name, known)
            hint = f"did you mean {near}?" if near else f"it has {list_names(known)}"
            raise ConfigError(f"loggers.wandb.init_kwargs.{name}: wandb.init has no such argument; {hint}")
