"""A model's parameters in the groups of `optimizer.param_groups`, as an optimizer takes them.

`config/parameter_groups.py` decides by names which parameter is in which group. Here the names get their tensors.
"""

from typing import Any

import torch
from torch.optim import Optimizer

from llmfoundry_lite.checkpoint.state import clean_name
from llmfoundry_lite.config.optimizer_schema import OptimizerConfig
from llmfoundry_lite.config.parameter_groups import PREFIX, check_groups, divide_parameters
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.models.names import list_parameters
from llmfoundry_lite.training.mup import build_factors
from llmfoundry_lite.training.optimizers import OptimizerContext, ParameterGroup


def group_parameters(
    config: OptimizerConfig, parameters: dict[str, torch.nn.Parameter], context: OptimizerContext
) -> list[ParameterGroup]:
    """Divide this rank's parameters, which are given by name, into groups. Group 0 has those that no group matches.

    With muP, a group becomes several if its parameters have different learning rates. All ranks get the same groups.
    Some are empty on a rank of a pipeline, which has some of the blocks.

    Raises ConfigError, on all ranks, for a group without any parameter of the model.
    """
    names_here = {checkpoint_name(name): name for name in parameters}
    # Names of the user's own parts are not in the list. With these, every rank has the whole model.
    num_dimensions = {name: parameters[name_here].ndim for name, name_here in names_here.items()}
    num_dimensions |= {name: len(shape) for name, shape in list_parameters(context.model_config).items()}
    # The model's order, and then the user's own parts in theirs.
    names = [*list_parameters(context.model_config)]
    listed_names = set(names)
    names += [name for name in names_here if name not in listed_names]
    factors_of = build_factors(config, context, names_here, num_dimensions)
    named_groups = divide_parameters(names, config, factors_of)
    check_groups(named_groups)

    groups: list[ParameterGroup] = []
    for named_group in named_groups:
        members = set(named_group.names)
        parameters_of_group = {
            name: parameters[name] for checkpoint_name, name in names_here.items() if checkpoint_name in members
        }
        groups.append(ParameterGroup(parameters_of_group, named_group.settings))
    return groups


def checkpoint_name(name: str) -> str:
    """Return the name that checkpoints have for a parameter of the `LanguageModel`, whose model is its attribute."""
    return clean_name(name).removeprefix(PREFIX)


def own_groups(config: OptimizerConfig, groups: list[ParameterGroup]) -> list[Any]:
    """Return groups of parameters as an optimizer of the user's own takes them: tensors, or groups of torch's.

    Without `param_groups` these are tensors. Otherwise each group has the settings that the YAML gives it, and the
    optimizer's own arguments are the defaults.
    """
    if not config.param_groups:
        return list(groups[0].parameters.values())
    own_settings: list[dict[str, Any]] = [{}, *[group.own_settings for group in config.param_groups]]
    return [
        {**settings, "params": list(group.parameters.values())}
        for group, settings in zip(groups, own_settings, strict=True)
    ]


def refuse_unknown_settings(config: OptimizerConfig, optimizer: Optimizer) -> None:
    """Raise ConfigError if a group has a setting that the user's own optimizer does not have.

    torch keeps any key of a group, so an optimizer would not notice it. Its `defaults` are the settings that it has.
    """
    for index, group in enumerate(config.param_groups):
        unknown = [key for key in group.own_settings if key not in optimizer.defaults]
        if unknown:
            raise ConfigError(
                f"optimizer.param_groups[{index}].{unknown[0]}: {config.name} has no such setting, expected one of "
                f"{', '.join(map(str, optimizer.defaults))}, its defaults; remove it, or add it to them"
            )
