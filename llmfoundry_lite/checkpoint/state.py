"""A model and its optimizer as named tensors and plain numbers, and back.

Works on the DTensors and `optimizer.state` themselves rather than through torch's `get_/set_*_state_dict`: those take
a dummy optimizer step to create missing slots, which leaves AdamW at step 1, fail with KeyError after a forward pass
without gradients, and name tied weights differently in model and optimizer.
"""

import fnmatch
import itertools
import re
from collections.abc import Collection, Mapping, Sequence
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
"""How this machine computes a step, not what the step is: neither saved nor restored."""

KINDS = {"F": "float", "I": "int", "U": "uint"}
OTHERS = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "BOOL": "bool"}
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, OTHERS.get(name) or KINDS[name[0]] + name[1:]) for name in ITEM_BYTES
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Tensors = dict[str, torch.Tensor]
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


class State(NamedTuple):
    """The part of a model and its optimizer that a checkpoint keeps."""

    tensors: Tensors
    """`model/<fqn>` and `optim/<fqn>/<slot>`, parameters as they are; DTensors stay sharded."""
    aliases: dict[str, str]
    """Tied parameters and buffers: second name -> first."""
    optimizer: dict[str, Any] | None
    """Class, groups by parameter name, and slots that are one number."""
    row_orders: dict[str, RowRanges]
    """Tensors whose rows ranks have in another order."""


Named = list[tuple[str, torch.Tensor]]
"""In the order of the modules, each tensor under every name that it has."""


def read_state(model: nn.Module, optimizer: Optimizer | None = None) -> State:
    """Collect the state without a copy: tensors are those of the model and the optimizer."""
    tensors: Tensors = {}
    aliases: dict[str, str] = {}
    first_keys: dict[int, str] = {}
    for name, tensor in itertools.chain(*_members(model)):
        key = f"model/{name}"
        if (first := first_keys.setdefault(id(tensor), key)) == key:
            tensors[key] = tensor
        else:
            aliases[key] = first
    numbers = None
    if optimizer is not None:
        slots, numbers = _read_optimizer(parameter_names(model, optimizer), optimizer)
        tensors |= slots
    return State(tensors, aliases, numbers, row_orders(model, tensors))


def row_orders(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, RowRanges]:
    """Return tensor -> the `row_order` of its module, for parameters and for optimizer slots of their shape."""
    orders: dict[str, tuple[torch.Size, RowRanges]] = {}
    for prefix, module in model.named_modules():
        order = getattr(module, "row_order", None)
        if order is not None:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    orders[clean_name(f"{prefix}.") + name] = parameter.shape, order
    found = {}
    for key, tensor in tensors.items() if orders else ():
        kind, _, rest = key.partition("/")
        shape, order = orders.get(rest.rsplit("/", 1)[0] if kind == "optim" else rest, (None, ()))
        if tensor.shape == shape:
            found[key] = order
    return found


def parameter_names(model: nn.Module, optimizer: Optimizer) -> dict[int, str]:
    """Return id(parameter) -> name, for all that the optimizer updates. Raises CheckpointError if one is not the
    model's."""
    names: dict[int, str] = {}
    for name, parameter in _members(model)[0]:
        names.setdefault(id(parameter), name)
    for i, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            # With ZeRO-1 an optimizer has rows of a parameter, and the state of these.
            whole = getattr(parameter, "share_of", parameter)
            if id(whole) not in names:
                raise CheckpointError(
                    f"the optimizer's group {i} updates a tensor of shape {tuple(parameter.shape)} that is not a "
                    "parameter of the model; build the optimizer from the model as it is trained (after sharding it)"
                )
            names[id(parameter)] = names[id(whole)]
    return names


def _members(model: nn.Module) -> tuple[Named, Named]:
    """Return the parameters, and the buffers that a state dict holds, by one walk over the modules."""
    modules = list(model.named_modules(remove_duplicate=False))
    for _, module in modules:  # after a forward pass without gradients the root's parameters are other, whole tensors
        if isinstance(module, FSDPModule):
            module.reshard()
    parameters, buffers = [], []
    for prefix, module in modules:
        start = clean_name(f"{prefix}.") if prefix else ""
        passing = module._non_persistent_buffers_set
        parameters += [(start + name, p) for name, p in module._parameters.items() if p is not None]
        buffers += [(start + name, b) for name, b in module._buffers.items() if b is not None and name not in passing]
    return parameters, buffers


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, outside of autograd's graph and in the memory that training uses."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():  # else autograd would record to_local
        return tensor.to_local().detach()


def is_ignored(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


# ------------------------------------------------------------------------------------------------------- optimizer


def _read_optimizer(names: Mapping[int, str], optimizer: Optimizer) -> tuple[Tensors, dict[str, Any]]:
    tensors: Tensors = {}
    numbers: dict[str, dict[str, Any]] = {}
    for parameter, slots in optimizer.state.items():
        name = names[id(parameter)]
        for slot, value in slots.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                tensors[f"optim/{name}/{slot}"] = value.detach() if value.requires_grad else value
            elif value is not None:
                dtype = {"dtype": DTYPE_NAMES[value.dtype]} if isinstance(value, torch.Tensor) else {}
                numbers.setdefault(name, {})[slot] = {"value": value, **dtype}
    _fetch([number for slots in numbers.values() for number in slots.values()])
    groups = []
    for group in optimizer.param_groups:
        options = {k: v for k, v in group.items() if k not in ("params", *IMPLEMENTATION_OPTIONS)}
        options |= {key: local_tensor(v).item() for key, v in options.items() if isinstance(v, torch.Tensor)}
        groups.append({"params": [names[id(parameter)] for parameter in group["params"]], "options": options})
    return tensors, {"class": type(optimizer).__name__, "groups": groups, "state": numbers}


def _fetch(numbers: Sequence[dict[str, Any]]) -> None:
    """Replace values that are tensors by numbers, with one transfer for each device and dtype."""
    kinds: dict[Any, list[dict[str, Any]]] = {}
    for number in numbers:
        if "dtype" in number:
            kinds.setdefault((number["value"].device, number["dtype"]), []).append(number)
    for same in kinds.values():
        values = torch.stack([local_tensor(number["value"]) for number in same]).tolist()
        for number, value in zip(same, values, strict=True):
            number["value"] = value


def join_optimizers(parts: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Merge the optimizers of ranks with different parameters. Raises CheckpointError if their options differ."""
    first, *others = parts
    if first is None:
        return None
    groups, numbers = [dict(group) for group in first["groups"]], dict(first["state"])
    for other in others:
        if other is None or (other["class"], len(other["groups"])) != (first["class"], len(groups)):
            raise CheckpointError("not saved: ranks have optimizers of different kinds or numbers of groups")
        for group, more in zip(groups, other["groups"], strict=True):
            if group["options"] != more["options"]:
                raise CheckpointError("not saved: ranks have other options in the same optimizer group")
            group["params"] = [*group["params"], *(name for name in more["params"] if name not in group["params"])]
        numbers |= other["state"]
    for group in groups:
        group["params"] = _in_order(group["params"])
    return {"class": first["class"], "groups": groups, "state": numbers}


def _in_order(names: Sequence[str]) -> list[str]:
    """Sort parameter names as in the whole model: those before its blocks, blocks by number, those after."""
    numbers = {name: int(found[0]) for name in names if (found := re.search(r"\d+", name))}
    first = next((i for i, name in enumerate(names) if name in numbers), len(names))
    after = [name for name in names[first:] if name not in numbers]
    return [*names[:first], *sorted(numbers, key=numbers.__getitem__), *after]


def without_slots(manifest: Manifest, ignore: Sequence[str]) -> set[str]:
    """Return the parameters that start without optimizer state when a load leaves `ignore` out. Moments belong to the
    weights that they were saved with, and an optimizer creates either all of a parameter's slots or none."""
    names = set()
    for key in manifest.tensors:
        kind, _, rest = key.partition("/")
        if is_ignored(key, ignore):
            names.add(rest.rsplit("/", 1)[0] if kind == "optim" else rest)
    return names


def optimizer_targets(
    model: nn.Module, optimizer: Optimizer, manifest: Manifest, left_out: Collection[str] = ()
) -> tuple[Tensors, dict[str, torch.nn.Parameter]]:
    """Return, for each slot in the checkpoint, a tensor like the one this rank must hold; and the parameters by name.

    Nothing is allocated or changed. Slots have their parameter's layout if they have its shape; parameters `left_out`
    get none.
    """
    by_id = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    parameters = {name: by_id[i] for i, name in parameter_names(model, optimizer).items() if i in by_id}
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


def check_optimizer(optimizer: Optimizer, groups: Sequence[set[str]], saved: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError unless the checkpoint's optimizer is of this class and updates these parameters."""
    if saved["class"] != type(optimizer).__name__:
        raise CheckpointError(
            f"{where}: holds the state of {saved['class']}, this run uses {type(optimizer).__name__}; "
            "load_weights_only: true starts a new optimizer on its weights"
        )
    saved_groups = [set(group["params"]) for group in saved["groups"]]
    if list(groups) == saved_groups:
        return
    here, there = set().union(*groups), set().union(*saved_groups)
    if here != there:
        raise CheckpointError(f"{where}: optimizer: {describe_keys(there - here, here - there)}")
    raise CheckpointError(
        f"{where}: optimizer: parameters form other groups there ({len(saved_groups)}) than here ({len(groups)})"
    )


def write_optimizer(
    optimizer: Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    saved: Mapping[str, Any],
    slots: Mapping[str, torch.Tensor],
    like: Mapping[str, torch.Tensor],
) -> None:
    """Replace the optimizer's whole state. `slots` are local tensors, by key; `like` has their placements."""
    state: dict[torch.nn.Parameter, dict[str, Any]] = {}
    options = {}
    for group, saved_group in zip(optimizer.param_groups, saved["groups"], strict=True):
        for key, value in saved_group["options"].items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = value
        options.update({id(parameter): group for parameter in group["params"]})
    for name, numbers in saved["state"].items():
        if (parameter := parameters.get(name)) is not None:
            group = options[id(parameter)]
            state.setdefault(parameter, {}).update(
                {slot: _write_number(slot, number, parameter, group) for slot, number in numbers.items()}
            )
    for key, local in slots.items():
        name, slot = key.removeprefix("optim/").rsplit("/", 1)
        parameter = parameters[name]
        present = optimizer.state.get(parameter, {}).get(slot)
        target = present if isinstance(present, torch.Tensor) and present.shape == like[key].shape else None
        if target is None or target.dtype != local.dtype:
            target = _allocate(like[key], local, parameter.device)
        local_tensor(target).copy_(local)
        state.setdefault(parameter, {})[slot] = target
    optimizer.state.clear()
    for parameter, values in state.items():
        optimizer.state[parameter] = values


def _write_number(slot: str, number: Mapping[str, Any], parameter: torch.Tensor, group: Mapping[str, Any]) -> Any:
    """Return a slot's number; `step` is on the device for fused or capturable optimizers only, as torch does."""
    if "dtype" not in number:
        return number["value"]
    on_device = slot != "step" or group.get("fused") or group.get("capturable")
    device = parameter.device if on_device else "cpu"
    return torch.tensor(number["value"], dtype=DTYPES[number["dtype"]], device=device)


def _allocate(like: torch.Tensor, local: torch.Tensor, device: torch.device) -> torch.Tensor:
    fresh = torch.empty(local.shape, dtype=local.dtype, device=device)
    if not isinstance(like, DTensor):
        return fresh
    return DTensor.from_local(
        fresh, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def describe_keys(only_there: set[str], only_here: set[str], limit: int = 3) -> str:
    """Say in one line how two sets of names differ that should be equal."""

    def some(names: set[str]) -> str:
        shown = ", ".join(sorted(names)[:limit])
        return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")

    parts = []
    if only_here:
        parts.append(f"this run has {some(only_here)}, which the checkpoint lacks")
    if only_there:
        parts.append(f"the checkpoint has {some(only_there)}, which this run lacks")
    return "; ".join(parts)


def clean_name(name: str) -> str:
    """Return a name without the parts that wrapper modules insert."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name
