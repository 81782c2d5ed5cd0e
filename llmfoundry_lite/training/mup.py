"""Learning rates, weight decay and eps of a model with muP: they depend on the kind of a parameter and on the width.

`config/mup.py` has the rules. An optimizer is built for the base model, and its groups are scaled here.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.mup import Kind, learning_rate_factor
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.models.mup import kind_of
from llmfoundry_lite.models.own_parts import find_owner
from llmfoundry_lite.training.muon import Muon


def scale_groups(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], model: nn.Module, config: ModelConfig
) -> None:
    """Scale the options of an optimizer's groups by muP, in place. Changes nothing at the base width.

    parameters: the optimizer's parameters, by their names in `model`.
    config: the model's configuration, which has `mup`.

    A group whose parameters have different learning rates is divided: those with the rate of the base model come first.
    Both parts keep all other options. So a group becomes one or two, which are the same on all ranks, also on those of
    a pipeline that have no parameter of one kind.

    Raises ConfigError for muon with a matrix of the user's own that is no hidden one.
    """
    if config.width_mult == 1:
        return
    kinds: dict[int, Kind] = {}
    for name, parameter in parameters.items():
        # A pipeline has other names than its modules, and no parts of the user's own.
        owner = find_owner(model, name) if config.own_parts else None
        kinds[id(parameter)] = kind_of(name, parameter, owner)
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        if _is_of_muon(group):
            _scale_matrices(group, kinds, config.width_mult)
            groups.append(group)
        else:
            groups += _divide(group, kinds, config.width_mult)

    optimizer.param_groups[:] = groups
    if isinstance(optimizer, Muon):
        optimizer.adamw.param_groups[:] = [group for group in groups if not _is_of_muon(group)]


def _is_of_muon(group: dict[str, Any]) -> bool:
    """Return whether Muon updates the parameters of a group itself, and not by AdamW."""
    return "ns_steps" in group


def _divide(group: dict[str, Any], kinds: Mapping[int, Kind], width_mult: float) -> list[dict[str, Any]]:
    """Return a group's two parts: parameters with the base model's learning rate, and hidden matrices."""
    base_group = {**group, "params": []}
    hidden_group = {**group, "params": []}
    for parameter in group["params"]:
        part = hidden_group if kinds[id(parameter)] == "hidden" else base_group
        part["params"].append(parameter)

    _scale_rate(hidden_group, learning_rate_factor("hidden", width_mult))
    for part in (base_group, hidden_group):
        if "eps" in part:
            part["eps"] /= width_mult
    return [base_group, hidden_group]


def _scale_matrices(group: dict[str, Any], kinds: Mapping[int, Kind], width_mult: float) -> None:
    """Scale the options of the group that Muon updates itself, in place."""
    if any(kinds[id(parameter)] != "hidden" for parameter in group["params"]):
        raise ConfigError(
            "model.mup: muon has one learning rate for all matrices of the blocks, and mup_kind of a part of your own "
            "says that one of them is no hidden matrix; use decoupled_adamw, or leave mup out"
        )
    _scale_rate(group, learning_rate_factor("hidden", width_mult, group["adjust_lr_fn"]))


def _scale_rate(group: dict[str, Any], factor: float) -> None:
    """Multiply a group's learning rate. Its weight decay, which torch multiplies by the rate, has the same effect."""
    group["lr"] *= factor
    group["weight_decay"] /= factor
