"""The arguments of `wandb.init`: names that a YAML may give, and environment variables that wandb reads for others.

The YAML has precedence over a variable, and what makes launches one run over both. No torch, and wandb only to check
`init_kwargs`.
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
"""Variable -> the argument that it stands for. wandb reads other variables itself, such as WANDB_MODE."""


def init_arguments(
    config: WandbConfig, run_name: str, run_folder: str, known_id: str | None, environ: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Return the arguments of a run, except its configuration. `known_id` is the id of earlier launches; without one, a
    variable may give it. An argument that is None is wandb's to choose, by its variable."""
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
    """Yield each variable that is set and that has no effect, with a line that says what is used instead."""
    for variable, name in VARIABLES.items():
        value, used = environ.get(variable), arguments.get(name)
        if not value or used is None:
            continue
        text = ",".join(used) if isinstance(used, list) else str(used)
        if value != text:
            yield variable, f"loggers.wandb: {variable}={value} has no effect: {name} is {text}"


def check_wandb(config: WandbConfig) -> None:
    """Raise ConfigError where wandb is not installed, and for a name in `init_kwargs` that `wandb.init` lacks."""
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
