"""Groups of parameters that the optimizer updates with settings of their own: which parameter is in which group.

`optimizer.param_groups` has LLM Foundry's form and meaning. A group's `param_str_match` is a regular expression that is
searched for in the names of parameters. A parameter belongs to the first group that matches it, and those that no group
matches form group 0, with the settings of the block `optimizer`.

Names alone decide, so that a dry run and every rank, whatever it holds, form the same groups. The names are LLM
Foundry's, which are those of checkpoints after `model.`: `model.transformer.blocks.0.norm_1.weight`.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from llmfoundry_lite.config.optimizer_schema import OptimizerConfig, ParameterGroupConfig
from llmfoundry_lite.errors import ConfigError

PREFIX = "model."
"""Beginning of all names that patterns are searched in: LLM Foundry's model is an attribute of Composer's."""
MAX_NAMES_SHOWN = 3
MAX_SEARCH_SECONDS = 10.0
"""Maximum time for searching the regular expressions of somebody else's record in all names."""
SEARCH = """
import json, re, sys
patterns, names = json.load(sys.stdin)
for pattern in patterns:
    expression = re.compile(pattern)
    for name in names:
        expression.search(name)
"""
"""Program that searches each pattern in each name, without a result."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Factors:
    """Numbers by which a parameter's settings are multiplied."""

    lr: float = 1.0
    weight_decay: float = 1.0
    eps: float = 1.0


FactorsOf = Callable[[str], Factors]
"""Name of a parameter, as checkpoints have it -> its factors."""


@dataclass(kw_only=True, slots=True, frozen=True)
class NamedGroup:
    """A group of parameters, by name."""

    settings: OptimizerConfig
    """Those of the run, with the group's own."""
    pattern: str | None
    """The group's `param_str_match`; None for the parameters that no group matches."""
    index: int = 0
    """Its place in `optimizer.param_groups`, counted from 1; 0 for the parameters that no group matches."""
    names: list[str] = field(default_factory=list)
    """Its parameters, as checkpoints name them, in the model's order."""
    names_elsewhere: list[str] = field(default_factory=list)
    """Parameters that its pattern matches too, and that an earlier group has."""

    def __str__(self) -> str:
        return "the others" if self.pattern is None else repr(self.pattern)


def divide_parameters(
    names: Iterable[str], optimizer: OptimizerConfig, factors_of: FactorsOf | None = None
) -> list[NamedGroup]:
    """Divide parameters into the groups of `optimizer.param_groups`, those that no group matches first.

    names: all parameters of the model, as checkpoints name them.
    factors_of: the factors of each parameter's settings, as muP has them. A group whose parameters have several
        factors becomes several, in the order in which they first occur.

    A group may be empty; `check_groups` refuses that.
    """
    groups = [NamedGroup(settings=optimizer, pattern=None)]
    for index, group in enumerate(optimizer.param_groups, 1):
        groups.append(NamedGroup(settings=settings_of(group, optimizer), pattern=group.param_str_match, index=index))
    expressions = [re.compile(group.param_str_match) for group in optimizer.param_groups]

    for name in names:
        matching = [index for index, expression in enumerate(expressions, 1) if expression.search(PREFIX + name)]
        first, *others = matching or [0]
        groups[first].names.append(name)
        for index in others:
            groups[index].names_elsewhere.append(name)

    if factors_of is None:
        return groups
    scaled_groups: list[NamedGroup] = []
    for group in groups:
        scaled_groups += _divide_by_factors(group, factors_of)
    return scaled_groups


def settings_of(group: ParameterGroupConfig, optimizer: OptimizerConfig) -> OptimizerConfig:
    """Return the settings of a group: those of the block `optimizer`, with those that the group sets itself.

    A learning rate of the group is that of all its parameters, so it replaces `adamw_lr`, too.
    """
    own_settings = group.our_settings
    if "lr" in own_settings:
        own_settings = {"adamw_lr": None, **own_settings}
    return replace(optimizer, **own_settings, kwargs={**optimizer.kwargs, **group.kwargs})


def _divide_by_factors(group: NamedGroup, factors_of: FactorsOf) -> list[NamedGroup]:
    """Divide a group by the factors of its parameters. A group without parameters stays as it is."""
    if not group.names:
        return [group]
    names_by_factors: dict[Factors, list[str]] = {}
    for name in group.names:
        names_by_factors.setdefault(factors_of(name), []).append(name)

    settings = group.settings
    scaled_groups: list[NamedGroup] = []
    for factors, names in names_by_factors.items():
        scaled_settings = replace(
            settings,
            lr=settings.lr * factors.lr,
            adamw_lr=None if settings.adamw_lr is None else settings.adamw_lr * factors.lr,
            weight_decay=settings.decay * factors.weight_decay,
            eps=settings.eps * factors.eps,
        )
        scaled_groups.append(replace(group, settings=scaled_settings, names=names))
    return scaled_groups


# ------------------------------------------------------------------------------------------------ checks and notes


def check_groups(groups: Sequence[NamedGroup]) -> None:
    """Raise ConfigError for a group of `optimizer.param_groups` that has no parameter."""
    for group in groups:
        if group.index == 0 or group.names:
            continue
        key = f"optimizer.param_groups[{group.index - 1}].param_str_match"
        if group.names_elsewhere:
            raise ConfigError(
                f"{key}: {group.pattern!r} matches {len(group.names_elsewhere)} parameters, and earlier groups have "
                "them all, because the first group that matches a parameter gets it; move this group up, or remove it"
            )
        all_names = [PREFIX + name for other in groups for name in other.names]
        raise ConfigError(
            f"{key}: {group.pattern!r} matches no parameter, expected a regular expression that is found in a name "
            f"such as {', '.join(sorted(all_names)[:MAX_NAMES_SHOWN])}; --dry-run shows the groups"
        )


def describe_overlaps(groups: Sequence[NamedGroup]) -> list[str]:
    """Return a note for each group whose pattern matches parameters of earlier groups, too."""
    notes: list[str] = []
    for group in groups:
        if group.names_elsewhere:
            num_matched = len(group.names) + len(group.names_elsewhere)
            notes.append(
                f"optimizer.param_groups[{group.index - 1}]: {len(group.names_elsewhere)} of the {num_matched} "
                f"parameters that {group.pattern!r} matches are in earlier groups, such as {group.names_elsewhere[0]}"
            )
    return notes


def refuse_slow_expressions(
    names: Iterable[str], optimizer: OptimizerConfig, max_seconds: float = MAX_SEARCH_SECONDS
) -> None:
    """Raise ConfigError if the expressions of `optimizer.param_groups` cannot be searched in all names in a short time.

    names: all parameters of the model, as checkpoints name them.

    An expression such as `(.*)*!` takes a time that grows exponentially with the length of a name, and Python's `re`
    has no limit. So another process searches first, which is ended after `max_seconds`. Expressions of a record that
    somebody else has written are checked by this before they are used. Those of the user's own YAML are trusted.
    """
    patterns = [group.param_str_match for group in optimizer.param_groups]
    if not patterns:
        return
    question = json.dumps([patterns, [PREFIX + name for name in names]])
    command = [sys.executable, "-P", "-I", "-S", "-c", SEARCH]
    try:
        subprocess.run(command, input=question, text=True, check=True, timeout=max_seconds)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"optimizer.param_groups: searching {len(patterns)} recorded regular expressions in the names of all "
            f"parameters takes more than {max_seconds:g} seconds; a run with such expressions is not replayed"
        ) from None
