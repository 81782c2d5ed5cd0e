"""Counts of a built model: its FLOPs, with those of the user's own parts, and the parameters that these parts have.

`models/flops.py` counts layers of ours by arithmetic. Here the model exists, so parts of the user's own can be asked.
"""

import torch

from llmfoundry_lite.config.batch_schedule import PerBatch, Step
from llmfoundry_lite.config.counted_model import counted_model, find_told_layers
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.models.flops import count_flops_per_token, count_parameters
from llmfoundry_lite.models.own_parts import MARK, find_own_parts, mark_of
from llmfoundry_lite.own_code import import_object, is_own


def find_flops_of_batches(config: TrainConfig, model: torch.nn.Module) -> PerBatch | None:
    """Return the FLOPs of training on one token of each batch, forward and backward; None if they are not known.

    They depend on the length of the batch's rows.
    """
    steps: list[Step] = []
    for first_batch, seq_len in config.seq_lens.steps:
        flops = find_flops_per_token(config, model, seq_len)
        if flops is None:
            return None
        steps.append(Step(first_batch, flops))
    return PerBatch(tuple(steps))


def find_flops_per_token(config: TrainConfig, model: torch.nn.Module, seq_len: int) -> int | None:
    """Return the FLOPs of training on one token, forward and backward; None if a part of the user's own does not say.

    `seq_len` is the number of tokens of a row. A part says so by its attribute `flops_per_token`, or counts like the
    layer of ours that its class names. A norm that does not say it counts like ours, by 6 for each parameter.
    """
    # Parts that are asked below are left out of the arithmetic.
    parts = list(find_own_parts(model))
    asked_keys = {mark_of(part).key for part in parts if hasattr(part, "flops_per_token") or mark_of(part).is_norm}
    asked_keys_in_model = {key.removeprefix("model.") for key in asked_keys}
    counted = counted_model(config.model, without=asked_keys_in_model)
    total = count_flops_per_token(counted, seq_len)

    for part in parts:
        flops = getattr(part, "flops_per_token", None)
        if flops is None and mark_of(part).is_norm:
            flops = 6 * count_elements(part)
        is_counted = mark_of(part).key.removeprefix("model.") not in counted.own_parts
        if flops is None and is_counted:
            continue
        if flops is None:
            return None
        total += int(flops)

    # Our layer of attention may call a function of the user's own. A layer of the user's own has counted what it calls.
    attention = config.model.attn_config
    if is_own(attention.attn_impl) and not is_own(attention.attn_type):
        function = import_object(attention.attn_impl, "model.attn_config.attn_impl")
        flops = getattr(function, "flops_per_token", None)
        if flops is None:
            return None
        total += int(flops) * config.model.n_layers
    return total


def describe_own_parts(config: ModelConfig, model: torch.nn.Module) -> list[str]:
    """Return lines about the parameters of the user's own parts, for the output of a launch; none without such parts.

    The first line has their number. A line follows for each norm whose bias `no_bias` has removed. Another follows for
    each part that has another number of parameters than the layer of ours that its class says it is like, because
    estimates have counted that layer.
    """
    if not config.own_parts:
        return []
    num_by_key: dict[str, int] = {}
    for part in find_own_parts(model):
        key = mark_of(part).key.removeprefix("model.")
        num_by_key[key] = num_by_key.get(key, 0) + count_elements(part)
    lines = [f"own parts: {sum(num_by_key.values()):,} of the model's {count_elements(model):,} parameters"]

    marks = [getattr(module, MARK) for module in model.modules() if hasattr(module, MARK)]
    without_bias = {(mark.key, mark.name) for mark in marks if mark.has_lost_bias}
    for key, name in sorted(without_bias):
        lines.append(f"{key}: {name}: its bias is removed, because of model.no_bias")

    num_counted = count_parameters(counted_model(config))
    for key, layer in find_told_layers(config).items():
        if key not in num_by_key:
            continue  # inside another part, which has counted it
        num_expected = num_counted - count_parameters(counted_model(config, without={key}))
        if num_by_key[key] != num_expected:
            lines.append(
                f"model.{key}: {config.own_parts[key]} has {num_by_key[key]:,} parameters, and {layer}, which its "
                f"class says it is like, has {num_expected:,}, by which memory was estimated; correct `like` there"
            )
    return lines


def count_elements(module: torch.nn.Module) -> int:
    """Count the elements of a module's parameters, over all ranks that divide them."""
    return sum(parameter.numel() for parameter in module.parameters())
