"""The model as estimates count it: with a layer of ours for each part of the user's own that says which it is like.

class Gated(torch.nn.Module):
    like = "mptglu"  # as many parameters and FLOPs, and as much memory and time

Nothing of a part is run. Its class is read, as `own_facts` does. The configuration of a run keeps the part itself. Only
what counts takes the model of `counted_model`, for example `count_parameters(counted_model(config.model))`.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

from llmfoundry_lite.config.model_schema import ATTENTION_TYPES, FFN_TYPES, NORMS, ModelConfig
from llmfoundry_lite.own_code import PREFIX
from llmfoundry_lite.own_facts import read_class_facts

LAYERS = {
    "norm_type": NORMS,
    "attn_config.attn_type": ATTENTION_TYPES,
    "attn_config.norm_type": NORMS,
    "ffn_config.ffn_type": FFN_TYPES,
}
"""Key in the block `model` -> the names that it takes, for the parts that may say what they are like."""


class ToldLayer(NamedTuple):
    """Layer of ours that a part of the user's own says it is like."""

    layer: str | None
    """Name of the layer, such as `mptglu`; None if the part says nothing that can be read."""
    explanation: str
    """Why nothing is known, for messages; empty if the layer is known."""


def read_told_layer(key: str, name: str) -> ToldLayer:
    """Return what the class of a part, `python:package.module:Thing`, says that it is like.

    `key` is the key in the block `model` that names the part. A function that computes attention says nothing.
    """
    if key not in LAYERS:
        return ToldLayer(None, "a function does not say what it is like")
    facts = read_class_facts(name, ("like",))
    if facts.problem:
        return ToldLayer(None, facts.problem)
    if "like" not in facts.values:
        return ToldLayer(None, "its class does not say with `like` which layer of ours is as large")

    layer = facts.values["like"]
    names_of_ours = [choice for choice in LAYERS[key].split() if choice != PREFIX]
    if layer not in names_of_ours:
        return ToldLayer(None, f"its like is none of {', '.join(names_of_ours)}")
    return ToldLayer(layer, "")


def find_told_layers(model: ModelConfig) -> dict[str, str]:
    """Return the key in the block `model` -> the layer of ours, for each part that says what it is like."""
    told = {key: read_told_layer(key, name).layer for key, name in model.own_parts.items()}
    return {key: layer for key, layer in told.items() if layer is not None}


def counted_model(model: ModelConfig, *, without: Collection[str] = ()) -> ModelConfig:
    """Return a model in which parts of the user's own are replaced by the layers of ours that they say they are like.

    Parts that say nothing stay, and so do those whose keys are in `without`. Counts take such a part as nothing.
    """
    if not model.own_parts:
        return model
    counted = model
    for key, layer in find_told_layers(model).items():
        if key in without:
            continue
        block_name, _, key_in_block = key.rpartition(".")
        if block_name:
            block = replace(getattr(counted, block_name), **{key_in_block: layer})
            counted = replace(counted, **{block_name: block})
        else:
            counted = replace(counted, **{key_in_block: layer})
    return counted


def describe_unknown_parts(model: ModelConfig) -> str:
    """Return which parts of a model no estimate knows, because they are the user's own code; empty if there are none.

    For example, "python:mine.norms:ScaleNorm (model.norm_type)". Estimates count them as nothing.
    """
    unknown_parts = counted_model(model).own_parts
    return ", ".join(f"{name} (model.{key})" for key, name in unknown_parts.items())


def describe_told_parts(model: ModelConfig) -> str:
    """Return which parts of the user's own are counted like which layers of ours; empty if there are none.

    For example, "python:mine.ffns:Gated (model.ffn_config.ffn_type) like mptglu of width 4096".
    """
    counted = counted_model(model)
    descriptions: list[str] = []
    for key, layer in find_told_layers(model).items():
        width = f" of width {counted.ffn_dim}" if key == "ffn_config.ffn_type" else ""
        descriptions.append(f"{model.own_parts[key]} (model.{key}) like {layer}{width}")
    return ", ".join(descriptions)
