"""A model and its optimizer as named tensors and plain numbers, and back.

This module reads DTensors and `optimizer.state` themselves. torch's `get_/set_*_state_dict` are not used, because they
take a dummy optimizer step to create missing slots, which leaves AdamW at step 1; they fail with KeyError after a
forward pass without gradients; and they name tied weights differently in model and optimizer.

A checkpoint's tensors have keys: `model/<name>` for parameters and buffers, and `optim/<name>/<slot>` for the state
that an optimizer keeps for a parameter, such as `exp_avg`. A slot without dimensions, such as `step`, is kept as a
number.

`read_state` collects what a save writes. A restore uses `optimizer_targets` and `check_optimizer` to match a checkpoint
with an optimizer, and `write_optimizer` to replace the optimizer's state. Nothing here is collective.
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
"""First letter of a dtype in safetensors -> the word that torch puts before the number of bits."""
IRREGULAR_DTYPES = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "BOOL": "bool"}
"""dtypes that torch does not spell in this way."""
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
    """Collect the part of a model and its optimizer that a checkpoint keeps, on this rank.

    Tensors are not copied: the result changes when training goes on. Numbers of the optimizer, such as `step`, are
    copied from the device, which waits for it. FSDP modules are resharded. Raises CheckpointError if the optimizer
    updates a tensor that is not a parameter of the model.
    """
    # A tied tensor is stored under the first of its names.
    tensors: Tensors = {}
    aliases: dict[str, str] = {}
    first_keys: dict[int, str] = {}  # id of a tensor -> its first key
    for name, tensor in itertools.chain(*_parameters_and_buffers(model)):
        key = f"model/{name}"
        first_key = first_keys.setdefault(id(tensor), key)
        if first_key == key:
            tensors[key] = tensor
        else:
            aliases[key] = first_key

    optimizer_record = None
    if optimizer is not None:
        slots, optimizer_record = _read_optimizer(parameter_names(model, optimizer), optimizer)
        tensors |= slots
    return State(tensors, aliases, optimizer_record, row_orders(model, tensors))


def row_orders(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, RowRanges]:
    """Find the tensors whose rows the ranks hold in another order than the tensor's own, and return that order by key.

    Tensor parallelism stacks the query, key and value weights so that each rank has its own heads. Modules with such
    parameters have an attribute `row_order`, ranges of the tensor's own rows ([first row, number of rows]) in the order
    in which ranks hold them. It applies to the module's parameters and to optimizer slots of a parameter's shape.
    `tensors` are those to look for, by key.
    """
    shape_and_order: dict[str, tuple[torch.Size, RowRanges]] = {}  # by parameter name
    for module_name, module in model.named_modules():
        order = getattr(module, "row_order", None)
        if order is None:
            continue
        for name, parameter in module._parameters.items():
            if parameter is not None:
                shape_and_order[clean_name(f"{module_name}.") + name] = parameter.shape, order
    if not shape_and_order:
        return {}

    orders = {}
    for key, tensor in tensors.items():
        parameter_shape, order = shape_and_order.get(_parameter_of(key), (None, ()))
        if tensor.shape == parameter_shape:
            orders[key] = order
    return orders


def _parameter_of(key: str) -> str:
    """Return the name of the parameter or buffer that a key belongs to: `wte.weight` for `model/wte.weight` and for
    `optim/wte.weight/exp_avg`."""
    prefix, _, name = key.partition("/")
    return name.rsplit("/", 1)[0] if prefix == "optim" else name


def parameter_names(model: nn.Module, optimizer: Optimizer) -> dict[int, str]:
    """Return the name of each parameter by its `id`: of the model's parameters, and of all that the optimizer updates.

    The optimizer has tensors without names, and this is how its slots get keys. A tied parameter has its first name.
    Raises CheckpointError if the optimizer updates a tensor that is not a parameter of the model, as it does when it
    was built before the model was sharded.
    """
    names: dict[int, str] = {}
    parameters, _ = _parameters_and_buffers(model)
    for name, parameter in parameters:
        names.setdefault(id(parameter), name)

    for group_index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            # With ZeRO-1, the optimizer updates some rows of each parameter, which are separate tensors.
            whole_parameter = getattr(parameter, "share_of", parameter)
            if id(whole_parameter) not in names:
                raise CheckpointError(
                    f"the optimizer's group {group_index} updates a tensor of shape {tuple(parameter.shape)} that is "
                    "not a parameter of the model; build the optimizer from the model as it is trained (after sharding "
                    "it)"
                )
            names[id(parameter)] = names[id(whole_parameter)]
    return names


def _parameters_and_buffers(model: nn.Module) -> tuple[NamedTensors, NamedTensors]:
    """Return a model's named parameters, and its named buffers that a state dict would hold.

    A parameter or buffer that several modules share is listed under each of its names. Changes the model: it reshards
    all FSDP modules, so that the parameters are DTensors.
    """
    modules = list(model.named_modules(remove_duplicate=False))
    for _, module in modules:
        # After a forward pass without gradients, the root module still has whole tensors as parameters.
        if isinstance(module, FSDPModule):
            module.reshard()

    # The tensors come from the modules, because `named_parameters` would leave out all but the first of tied names.
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
    """Return this rank's part of a tensor, without a copy and detached from autograd's graph. For a tensor that is not
    a DTensor, that is all of it."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():  # otherwise autograd records `to_local`
        return tensor.to_local().detach()


def is_ignored(key: str, patterns: Sequence[str]) -> bool:
    """Return whether a key matches one of the patterns, such as `model/transformer.wpe.*`."""
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


# ------------------------------------------------------------------------------------------------------- optimizer


def _read_optimizer(names: Mapping[int, str], optimizer: Optimizer) -> tuple[Tensors, dict[str, Any]]:
    """Split an optimizer's state into tensors for the shard files and a record for the manifest.

    names: the name of each parameter by its `id`.

    Returns the slots that are tensors, by key, without copying them; and the manifest's `optimizer`, such as

        {"class": "AdamW",
         "groups": [{"params": ["wte.weight"], "options": {"lr": 0.001}}],
         "state": {"wte.weight": {"step": {"value": 200.0, "dtype": "F32"}}}}

    `state` has the slots that are a single number. One that is a tensor without dimensions has its dtype there, too.
    """
    slot_tensors: Tensors = {}
    numbers_by_parameter: dict[str, dict[str, Any]] = {}
    number_records: list[dict[str, Any]] = []  # the same records, for `_copy_to_host`
    for parameter, slots in optimizer.state.items():
        name = names[id(parameter)]
        for slot, value in slots.items():
            if value is None:
                continue
            if isinstance(value, torch.Tensor) and value.ndim:
                slot_tensors[f"optim/{name}/{slot}"] = value.detach() if value.requires_grad else value
                continue
            record = {"value": value}
            if isinstance(value, torch.Tensor):
                record["dtype"] = DTYPE_NAMES[value.dtype]
            numbers_by_parameter.setdefault(name, {})[slot] = record
            number_records.append(record)
    _copy_to_host(number_records)

    groups = []
    for group in optimizer.param_groups:
        options = {}
        for option, value in group.items():
            if option == "params" or option in IMPLEMENTATION_OPTIONS:
                continue
            options[option] = local_tensor(value).item() if isinstance(value, torch.Tensor) else value
        group_names = [names[id(parameter)] for parameter in group["params"]]
        groups.append({"params": group_names, "options": options})
    return slot_tensors, {"class": type(optimizer).__name__, "groups": groups, "state": numbers_by_parameter}


def _copy_to_host(records: Sequence[dict[str, Any]]) -> None:
    """Replace tensors without dimensions by Python numbers in records of an optimizer's numbers, in place.

    A record `{"value": <tensor>, "dtype": "F32"}` is changed. One without a dtype has a Python value and stays. All
    numbers of one device and dtype are copied by one transfer, because each transfer waits for the device.
    """
    records_by_device_and_dtype: dict[Any, list[dict[str, Any]]] = {}
    for record in records:
        if "dtype" in record:
            device_and_dtype = record["value"].device, record["dtype"]
            records_by_device_and_dtype.setdefault(device_and_dtype, []).append(record)
    for similar_records in records_by_device_and_dtype.values():
        numbers = torch.stack([local_tensor(record["value"]) for record in similar_records]).tolist()
        for record, number in zip(similar_records, numbers, strict=True):
            record["value"] = number


def join_optimizers(parts: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Join the optimizer records of ranks that train different parameters of one model, for the manifest.

    With pipeline parallelism, each stage has an optimizer for its own parameters. `parts` has the record of one rank of
    each stage, in the form of `State.optimizer`. A parameter that stages share is listed once.

    Returns the record of the whole optimizer, or None if the first rank has no optimizer. Raises CheckpointError if
    ranks differ in the optimizer's class, in the number of its groups or in a group's options.
    """
    first_part, *other_parts = parts
    if first_part is None:
        return None
    groups = [dict(group) for group in first_part["groups"]]
    numbers = dict(first_part["state"])
    for part in other_parts:
        if part is None or (part["class"], len(part["groups"])) != (first_part["class"], len(groups)):
            raise CheckpointError("not saved: ranks have optimizers of different kinds or numbers of groups")
        # Add the parameters of each of this rank's groups to the same group of the whole optimizer.
        for group, group_of_part in zip(groups, part["groups"], strict=True):
            if group["options"] != group_of_part["options"]:
                raise CheckpointError("not saved: ranks have other options in the same optimizer group")
            new_names = [name for name in group_of_part["params"] if name not in group["params"]]
            group["params"] = [*group["params"], *new_names]
        numbers |= part["state"]

    for group in groups:
        group["params"] = _in_model_order(group["params"])
    return {"class": first_part["class"], "groups": groups, "state": numbers}


def _in_model_order(names: Sequence[str]) -> list[str]:
    """Sort parameter names of several pipeline stages as a model without pipeline parallelism would list them.

    First come the names before the transformer's blocks, then those of the blocks, then those after. A name with a
    number belongs to the block of that number. Within these places, names keep their order:

        [wte, blocks.0.a, blocks.2.a, norm_f, blocks.1.a]  ->  [wte, blocks.0.a, blocks.1.a, blocks.2.a, norm_f]
    """
    block_numbers: dict[str, int] = {}  # name -> number of its block
    for name in names:
        digits = re.search(r"\d+", name)
        if digits is not None:
            block_numbers[name] = int(digits[0])

    num_before = 0
    while num_before < len(names) and names[num_before] not in block_numbers:
        num_before += 1
    names_before = names[:num_before]
    names_in_blocks = sorted(block_numbers, key=block_numbers.__getitem__)
    names_after = [name for name in names[num_before:] if name not in block_numbers]
    return [*names_before, *names_in_blocks, *names_after]


def parameters_without_state(manifest: Manifest, ignore: Sequence[str]) -> set[str]:
    """Return the names of the parameters that start without optimizer state, because a load leaves out some tensors.

    `ignore` has patterns for keys of the tensors that are left out. If a parameter's weights or any of its slots match,
    none of its slots are restored: moments belong to the weights that they were saved with, and an optimizer creates
    either all slots of a parameter or none.
    """
    return {_parameter_of(key) for key in manifest.tensors if is_ignored(key, ignore)}


def optimizer_targets(
    model: nn.Module, optimizer: Optimizer, manifest: Manifest, left_out: Collection[str] = ()
) -> tuple[Tensors, dict[str, torch.nn.Parameter]]:
    """Find the optimizer slots of a checkpoint that this rank restores, and how each has to be sharded.

    manifest: the checkpoint's, whose keys `optim/<name>/<slot>` say which slots there are.
    left_out: names of parameters that get no slots.

    Returns two dictionaries. The first has, by key, a tensor that has the shape and sharding of the slot; its values
    are not used, and it is on the meta device if nothing like it exists. The second has the optimizer's parameters by
    name. Nothing is allocated or changed.
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
            continue  # another pipeline stage has the parameter, or the load leaves it out

        # A slot is sharded as it is now or, in a new optimizer, as its parameter. Slots of other shapes are not
        # sharded.
        present_slot = optimizer.state.get(parameter, {}).get(slot)
        if isinstance(present_slot, torch.Tensor) and present_slot.shape == record.shape:
            targets[key] = present_slot.detach()
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
    """Raise CheckpointError unless a checkpoint's optimizer fits this run's: the same class, and the same parameters in
    each group.

    groups: the parameter names in each of this run's groups, over all ranks together.
    saved: the manifest's `optimizer`.
    checkpoint_url: names the checkpoint in errors.
    """
    if saved["class"] != type(optimizer).__name__:
        raise CheckpointError(
            f"{checkpoint_url}: holds the state of {saved['class']}, this run uses {type(optimizer).__name__}; "
            "load_weights_only: true starts a new optimizer on its weights"
        )
    saved_groups = [set(group["params"]) for group in saved["groups"]]
    if list(groups) == saved_groups:
        return

    # Name the parameters that only one side has. If there are none, the same parameters form other groups.
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
    """Replace an optimizer's options and state by a checkpoint's, in place.

    parameters: the optimizer's parameters by name.
    saved: the manifest's `optimizer`, whose groups are in the same order as the optimizer's.
    slots: this rank's part of each slot that is a tensor, by key, as read from the checkpoint.
    like: for each of these keys, a tensor that is sharded as the slot has to be.

    State that the checkpoint does not have is dropped. Slots that have the right shape and dtype keep their memory, so
    that a restore does not need twice as much.
    """
    # Options. One that is a tensor, such as the learning rate of a captured step, must stay the same tensor.
    group_of_parameter = {}
    for group, saved_group in zip(optimizer.param_groups, saved["groups"], strict=True):
        for option, value in saved_group["options"].items():
            if isinstance(group.get(option), torch.Tensor):
                group[option].fill_(value)
            else:
                group[option] = value
        for parameter in group["params"]:
            group_of_parameter[id(parameter)] = group

    # Slots that are single numbers.
    new_state: dict[torch.nn.Parameter, dict[str, Any]] = {}
    for name, records in saved["state"].items():
        parameter = parameters.get(name)
        if parameter is None:
            continue  # another pipeline stage has it
        group = group_of_parameter[id(parameter)]
        parameter_state = new_state.setdefault(parameter, {})
        for slot, record in records.items():
            parameter_state[slot] = _number_for_slot(slot, record, parameter, group)

    # Slots that are tensors.
    for key, local_part in slots.items():
        name, slot = key.removeprefix("optim/").rsplit("/", 1)
        parameter = parameters[name]
        slot_tensor = optimizer.state.get(parameter, {}).get(slot)
        is_tensor = isinstance(slot_tensor, torch.Tensor)
        if not is_tensor or slot_tensor.shape != like[key].shape or slot_tensor.dtype != local_part.dtype:
            slot_tensor = _allocate(like[key], local_part, parameter.device)
        local_tensor(slot_tensor).copy_(local_part)
        new_state.setdefault(parameter, {})[slot] = slot_tensor

    optimizer.state.clear()
    for parameter, parameter_state in new_state.items():
        optimizer.state[parameter] = parameter_state


def _number_for_slot(slot: str, record: Mapping[str, Any], parameter: torch.Tensor, group: Mapping[str, Any]) -> Any:
    """Return a number of an optimizer's state as torch keeps it: a Python number, or a tensor without dimensions.

    slot: the slot's name, such as `step`.
    record: its record in the manifest, such as `{"value": 200.0, "dtype": "F32"}`. Without a dtype it was a Python
        number.
    parameter, group: the parameter that the slot belongs to, and that parameter's group in the optimizer.
    """
    if "dtype" not in record:
        return record["value"]
    # torch keeps `step` on the CPU, except in fused and capturable optimizers, which read it on the device.
    is_on_device = slot != "step" or group.get("fused") or group.get("capturable")
    device = parameter.device if is_on_device else "cpu"
    return torch.tensor(record["value"], dtype=DTYPES[record["dtype"]], device=device)


def _allocate(like: torch.Tensor, local_part: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Allocate a tensor on a device for an optimizer slot. Its values are undefined.

    It has the global shape and sharding of `like`, and on this rank the shape and dtype of `local_part`.
    """
    memory = torch.empty(local_part.shape, dtype=local_part.dtype, device=device)
    if not isinstance(like, DTensor):
        return memory
    return DTensor.from_local(
        memory, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


# ----------------------------------------------------------------------------------------------------------- names


def describe_keys(only_in_checkpoint: set[str], only_in_run: set[str], limit: int = 3) -> str:
    """Describe in one line which names only a checkpoint has and which only a run, for an error.

    At most `limit` names of each side are shown, in alphabetical order. Empty if both sets are.
    """

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
    """Return a module's or parameter's name without the parts that wrapper modules insert: `_orig_mod.wte.weight`
    becomes `wte.weight`."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name
