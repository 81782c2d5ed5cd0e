"""A model and its optimizer as named tensors and plain numbers, and back.

This module reads DTensors and `optimizer.state` themselves. torch's `get_/set_*_state_dict` are not used, because they
take a dummy optimizer step to create missing slots, which leaves AdamW at step 1; they fail with KeyError after a
forward pass without gradients; and they name tied weights differently in model and optimizer.

Keys of tensors are `model/<name>` for parameters and buffers, and `optim/<name>/<slot>` for the optimizer's slots of a
parameter, such as `exp_avg`.
"""

import fnmatch
import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from llmfoundry_lite.checkpoint.grid import ITEM_BYTES
from llmfoundry_lite.checkpoint.manifest import Manifest
from llmfoundry_lite.config.layout import RowRanges
from llmfoundry_lite.errors import CheckpointError

IMPLEMENTATION_OPTIONS = ("foreach", "fused", "capturable", "differentiable")
"""Options of an optimizer's group that say how this machine computes a step, and not what the step is. They are neither
saved nor restored."""

DTYPE_KINDS = {"F": "float", "I": "int", "U": "uint"}
IRREGULAR_DTYPES = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "BOOL": "bool"}
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, IRREGULAR_DTYPES.get(name) or DTYPE_KINDS[name[0]] + name[1:]) for name in ITEM_BYTES
}
"""dtype, as safetensors spells it -> torch's dtype."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Tensors = dict[str, torch.Tensor]
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""Parts of names that wrapper modules insert: of torch.compile, activation checkpointing, and FSDP1."""


class State(NamedTuple):
    """The part of a model and its optimizer that a checkpoint keeps."""

    tensors: Tensors
    """Parameters, buffers and slots by key. They are not copies, and DTensors stay sharded."""
    aliases: dict[str, str]
    """Tied parameters and buffers: key of the second name -> key of the first."""
    optimizer: dict[str, Any] | None
    """The optimizer's class, its groups by parameter name, and slots that are one number."""
    row_orders: dict[str, RowRanges]
    """For tensors whose rows the ranks hold in another order than the tensor's own: that order, by key."""


NamedTensors = list[tuple[str, torch.Tensor]]
"""Tensors with their names, in the order of the modules. A tied tensor is there under each of its names."""


def read_state(model: nn.Module, optimizer: Optimizer | None = None) -> State:
    """Collect the state of a model and its optimizer, without copying tensors.

    Numbers of the optimizer are copied from the device. Raises CheckpointError if the optimizer updates a tensor that
    is no parameter of the model.
    """
    tensors: Tensors = {}
    aliases: dict[str, str] = {}
    first_keys: dict[int, str] = {}
    for name, tensor in itertools.chain(*_parameters_and_buffers(model)):
        key = f"model/{name}"
        first_key = first_keys.setdefault(id(tensor), key)
        if first_key == key:
            tensors[key] = tensor
        else:
            aliases[key] = first_key

    numbers = None
    if optimizer is not None:
        slots, numbers = _read_optimizer(parameter_names(model, optimizer), optimizer)
        tensors |= slots
    return State(tensors, aliases, numbers, row_orders(model, tensors))


def row_orders(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, RowRanges]:
    """Return the order in which ranks hold the rows of a tensor, by key, for tensors where it is not the tensor's own.

    Modules with such parameters have an attribute `row_order`. It holds for their parameters, and for optimizer slots
    of a parameter's shape.
    """
    order_of_parameter: dict[str, tuple[torch.Size, RowRanges]] = {}
    for prefix, module in model.named_modules():
        order = getattr(module, "row_order", None)
        if order is None:
            continue
        for name, parameter in module._parameters.items():
            if parameter is not None:
                order_of_parameter[clean_name(f"{prefix}.") + name] = parameter.shape, order
    if not order_of_parameter:
        return {}

    orders = {}
    for key, tensor in tensors.items():
        shape, order = order_of_parameter.get(_parameter_of(key), (None, ()))
        if tensor.shape == shape:
            orders[key] = order
    return orders


def _parameter_of(key: str) -> str:
    """Return the name of the parameter or buffer in a key: that of `model/<name>`, or of `optim/<name>/<slot>`."""
    kind, _, name = key.partition("/")
    return name.rsplit("/", 1)[0] if kind == "optim" else name


def parameter_names(model: nn.Module, optimizer: Optimizer) -> dict[int, str]:
    """Return the name of each parameter by its id, for the model's parameters and for all that the optimizer updates.

    Raises CheckpointError if the optimizer updates a tensor that is no parameter of the model.
    """
    names: dict[int, str] = {}
    parameters, _ = _parameters_and_buffers(model)
    for name, parameter in parameters:
        names.setdefault(id(parameter), name)
    for i, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            # With ZeRO-1, the optimizer has some rows of each parameter, as tensors of their own.
            whole_parameter = getattr(parameter, "share_of", parameter)
            if id(whole_parameter) not in names:
                raise CheckpointError(
                    f"the optimizer's group {i} updates a tensor of shape {tuple(parameter.shape)} that is not a "
                    "parameter of the model; build the optimizer from the model as it is trained (after sharding it)"
                )
            names[id(parameter)] = names[id(whole_parameter)]
    return names


def _parameters_and_buffers(model: nn.Module) -> tuple[NamedTensors, NamedTensors]:
    """Return a model's parameters, and the buffers that a state dict holds, by one walk over its modules."""
    modules = list(model.named_modules(remove_duplicate=False))
    for _, module in modules:
        # After a forward pass without gradients, FSDP leaves whole tensors in the place of the root's parameters.
        if isinstance(module, FSDPModule):
            module.reshard()

    parameters: NamedTensors = []
    buffers: NamedTensors = []
    for module_name, module in modules:
        prefix = clean_name(f"{module_name}.") if module_name else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                parameters.append((prefix + name, parameter))
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                buffers.append((prefix + name, buffer))
    return parameters, buffers


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, outside of autograd's graph and in the memory that training uses."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():  # else autograd would record to_local
        return tensor.to_local().detach()


def is_ignored(key: str, patterns: Sequence[str]) -> bool:
    """Return whether a key matches one of the patterns, such as `model/transformer.wpe.*`."""
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


# ------------------------------------------------------------------------------------------------------- optimizer


def _read_optimizer(names: Mapping[int, str], optimizer: Optimizer) -> tuple[Tensors, dict[str, Any]]:
    """Return an optimizer's slots by key, and its class, groups and numbers as the manifest has them. `names` are
    parameter names by id.

    A slot that is a tensor with dimensions stays a tensor. One that is a single number, such as `step`, is copied.
    """
    tensors: Tensors = {}
    numbers: dict[str, dict[str, Any]] = {}
    for parameter, slots in optimizer.state.items():
        name = names[id(parameter)]
        for slot, value in slots.items():
            if not isinstance(value, torch.Tensor):
                if value is not None:
                    numbers.setdefault(name, {})[slot] = {"value": value}
            elif value.ndim:
                tensors[f"optim/{name}/{slot}"] = value.detach() if value.requires_grad else value
            else:
                numbers.setdefault(name, {})[slot] = {"value": value, "dtype": DTYPE_NAMES[value.dtype]}
    _copy_to_host([number for slots in numbers.values() for number in slots.values()])

    groups = []
    for group in optimizer.param_groups:
        options = {}
        for key, value in group.items():
            if key == "params" or key in IMPLEMENTATION_OPTIONS:
                continue
            options[key] = local_tensor(value).item() if isinstance(value, torch.Tensor) else value
        groups.append({"params": [names[id(parameter)] for parameter in group["params"]], "options": options})
    return tensors, {"class": type(optimizer).__name__, "groups": groups, "state": numbers}


def _copy_to_host(numbers: Sequence[dict[str, Any]]) -> None:
    """Replace each `value` that is a tensor by a Python number, in place. One transfer copies all of a device and
    dtype, because each transfer waits for the device."""
    by_device_and_dtype: dict[Any, list[dict[str, Any]]] = {}
    for number in numbers:
        if "dtype" in number:
            by_device_and_dtype.setdefault((number["value"].device, number["dtype"]), []).append(number)
    for alike in by_device_and_dtype.values():
        values = torch.stack([local_tensor(number["value"]) for number in alike]).tolist()
        for number, value in zip(alike, values, strict=True):
            number["value"] = value


def join_optimizers(parts: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Return the whole optimizer's class, groups and numbers, from those of ranks with different parameters.

    Returns None if the first rank has no optimizer. Raises CheckpointError if classes, numbers of groups or options
    differ.
    """
    first, *others = parts
    if first is None:
        return None
    groups = [dict(group) for group in first["groups"]]
    numbers = dict(first["state"])
    for other in others:
        if other is None or (other["class"], len(other["groups"])) != (first["class"], len(groups)):
            raise CheckpointError("not saved: ranks have optimizers of different kinds or numbers of groups")
        for group, other_group in zip(groups, other["groups"], strict=True):
            if group["options"] != other_group["options"]:
                raise CheckpointError("not saved: ranks have other options in the same optimizer group")
            new_names = [name for name in other_group["params"] if name not in group["params"]]
            group["params"] = [*group["params"], *new_names]
        numbers |= other["state"]
    for group in groups:
        group["params"] = _in_model_order(group["params"])
    return {"class": first["class"], "groups": groups, "state": numbers}


def _in_model_order(names: Sequence[str]) -> list[str]:
    """Sort parameter names as in the whole model: those before its blocks, those of the blocks, those after.

    A name with a number belongs to the block of that number. Names of one place keep their order.
    """
    block_numbers: dict[str, int] = {}
    for name in names:
        number = re.search(r"\d+", name)
        if number is not None:
            block_numbers[name] = int(number[0])
    first_of_blocks = next((i for i, name in enumerate(names) if name in block_numbers), len(names))
    before = names[:first_of_blocks]
    in_blocks = sorted(block_numbers, key=block_numbers.__getitem__)
    after = [name for name in names[first_of_blocks:] if name not in block_numbers]
    return [*before, *in_blocks, *after]


def parameters_without_state(manifest: Manifest, ignore: Sequence[str]) -> set[str]:
    """Return the names of parameters that start without optimizer state, if a load leaves out what matches `ignore`.

    That is every parameter of which a tensor is left out. Moments belong to the weights that they were saved with, and
    an optimizer creates either all slots of a parameter or none.
    """
    return {_parameter_of(key) for key in manifest.tensors if is_ignored(key, ignore)}


def optimizer_targets(
    model: nn.Module, optimizer: Optimizer, manifest: Manifest, left_out: Collection[str] = ()
) -> tuple[Tensors, dict[str, torch.nn.Parameter]]:
    """Return, by key, a tensor like each slot that this rank restores; and the optimizer's parameters by name.

    A slot of its parameter's shape is sharded as the parameter; any other is whole. Parameters in `left_out` get no
    slots. Nothing is allocated or changed.
    """
    parameters_by_id = {id(parameter): parameter for parameter in _parameters_of(optimizer)}
    parameters = {}
    for parameter_id, name in parameter_names(model, optimizer).items():
        if parameter_id in parameters_by_id:
            parameters[name] = parameters_by_id[parameter_id]

    targets: Tensors = {}
    for key, record in manifest.tensors.items():
        if not key.startswith("optim/"):
            continue
        name, slot = key.removeprefix("optim/").rsplit("/", 1)
        parameter = parameters.get(name)
        if parameter is None or name in left_out:
            continue
        present = optimizer.state.get(parameter, {}).get(slot)
        if isinstance(present, torch.Tensor) and present.shape == record.shape:
            targets[key] = present.detach()
        elif tuple(parameter.shape) == record.shape:
            targets[key] = parameter.detach()
        else:
            targets[key] = torch.empty(record.shape, dtype=DTYPES[record.dtype], device="meta")
    return targets, parameters


def _parameters_of(optimizer: Optimizer) -> Iterable[torch.nn.Parameter]:
    """Yield the parameters of all of an optimizer's groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


def check_optimizer(
    optimizer: Optimizer, groups: Sequence[set[str]], saved: Mapping[str, Any], checkpoint_url: str
) -> None:
    """Raise CheckpointError unless the checkpoint's optimizer has this one's class and the same parameters in its
    groups.

    `groups` are the parameter names of this run's groups, on all ranks; `saved` is the manifest's `optimizer`.
    """
    if saved["class"] != type(optimizer).__name__:
        raise CheckpointError(
            f"{checkpoint_url}: holds the state of {saved['class']}, this run uses {type(optimizer).__name__}; "
            "load_weights_only: true starts a new optimizer on its weights"
        )
    saved_groups = [set(group["params"]) for group in saved["groups"]]
    if list(groups) == saved_groups:
        return
    names = set().union(*groups)
    saved_names = set().union(*saved_groups)
    if names != saved_names:
        raise CheckpointError(f"{checkpoint_url}: optimizer: {describe_keys(saved_names - names, names - saved_names)}")
    raise CheckpointError(
        f"{checkpoint_url}: optimizer: parameters form other groups there ({len(saved_groups)}) than here "
        f"({len(groups)})"
    )


def write_optimizer(
    optimizer: Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    saved: Mapping[str, Any],
    slots: Mapping[str, torch.Tensor],
    like: Mapping[str, torch.Tensor],
) -> None:
    """Replace an optimizer's whole state by a checkpoint's.

    `parameters` are the optimizer's, by name; `saved` is the manifest's `optimizer`. `slots` has this rank's part of
    each slot, by key, and `like` tensors that are sharded as the slots have to be. Slots that have the right shape and
    dtype already keep their memory.
    """
    group_of_parameter = {}
    for group, saved_group in zip(optimizer.param_groups, saved["groups"], strict=True):
        for key, value in saved_group["options"].items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = value
        for parameter in group["params"]:
            group_of_parameter[id(parameter)] = group

    state: dict[torch.nn.Parameter, dict[str, Any]] = {}
    for name, numbers in saved["state"].items():
        parameter = parameters.get(name)
        if parameter is None:
            continue  # another stage of a pipeline has it
        group = group_of_parameter[id(parameter)]
        values = state.setdefault(parameter, {})
        for slot, number in numbers.items():
            values[slot] = _slot_value(slot, number, parameter, group)
    for key, local_part in slots.items():
        name, slot = key.removeprefix("optim/").rsplit("/", 1)
        parameter = parameters[name]
        target = optimizer.state.get(parameter, {}).get(slot)
        fits = isinstance(target, torch.Tensor) and target.shape == like[key].shape and target.dtype == local_part.dtype
        if not fits:
            target = _allocate(like[key], local_part, parameter.device)
        local_tensor(target).copy_(local_part)
        state.setdefault(parameter, {})[slot] = target

    optimizer.state.clear()
    for parameter, values in state.items():
        optimizer.state[parameter] = values


def _slot_value(slot: str, number: Mapping[str, Any], parameter: torch.Tensor, group: Mapping[str, Any]) -> Any:
    """Return a slot that is one number, as torch keeps it: as a plain number, or as a tensor without dimensions.

    `number` is its entry in the manifest, and `group` the parameter's group. The tensor is on the parameter's device,
    except for a `step` of an optimizer that is neither fused nor capturable.
    """
    if "dtype" not in number:
        return number["value"]
    is_on_device = slot != "step" or group.get("fused") or group.get("capturable")
    device = parameter.device if is_on_device else "cpu"
    return torch.tensor(number["value"], dtype=DTYPES[number["dtype"]], device=device)


def _allocate(like: torch.Tensor, local_part: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a new tensor on a device, sharded as `like`, whose local part has the shape and dtype of `local_part`. Its
    values are undefined."""
    memory = torch.empty(local_part.shape, dtype=local_part.dtype, device=device)
    if not isinstance(like, DTensor):
        return memory
    return DTensor.from_local(
        memory, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


# ----------------------------------------------------------------------------------------------------------- names


def describe_keys(only_in_checkpoint: set[str], only_in_run: set[str], limit: int = 3) -> str:
    """Say in one line how a checkpoint's names differ from a run's. Of each side, `limit` names are shown."""

    def list_names(names: set[str]) -> str:
        text = ", ".join(sorted(names)[:limit])
        if len(names) > limit:
            text += f" and {len(names) - limit} more"
        return text

    parts = []
    if only_in_run:
        parts.append(f"this run has {list_names(only_in_run)}, which the checkpoint lacks")
    if only_in_checkpoint:
        parts.append(f"the checkpoint has {list_names(only_in_checkpoint)}, which this run lacks")
    return "; ".join(parts)


def clean_name(name: str) -> str:
    """Return a name without the parts that wrapper modules insert."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name
