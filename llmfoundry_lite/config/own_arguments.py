"""Arguments of the user's own parts in a YAML, which have no schema: a part gets its own, and none of another part.

`load_train.py` calls these functions with the merged values of a launch, before the dataclasses are built.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from llmfoundry_lite.config.data_schema import OF_THE_MODEL, LoaderConfig
from llmfoundry_lite.config.fields import keys_of
from llmfoundry_lite.config.layers import ConfigLayer, find_value
from llmfoundry_lite.config.model_schema import AttentionConfig, FFNConfig, ModelConfig
from llmfoundry_lite.own_code import is_own


@dataclass(slots=True, frozen=True)
class NamedPart:
    """A key of a YAML that may name a part of the user's own, and the keys beside it that belong to the part."""

    block: str
    """Dotted key of the block."""
    name_key: str
    """Key in it that has the name."""
    other_keys: Collection[str]
    """Keys of the block that are not the part's, perhaps dotted: they keep their meaning whatever the name is."""


def find_named_parts(values: Mapping[str, Any]) -> Iterator[NamedPart]:
    """Yield each place of a configuration that may name a part with arguments. Callbacks and loggers are no such place.

    Their key is the name itself. `values` say which loaders there are.
    """
    yield NamedPart("optimizer", "name", {"lr", "param_groups"})
    yield NamedPart("scheduler", "name", ())
    yield NamedPart("model.ffn_config", "ffn_type", ())

    # Attention gets the whole block `model`. The arguments of norms and of the loss are in keys of their own.
    yield NamedPart("model.attn_config", "attn_type", keys_of(AttentionConfig).keys() - {"kwargs"})
    yield NamedPart("model", "norm_type", keys_of(ModelConfig).keys() - {"norm_kwargs"})
    yield NamedPart("model", "loss_fn", keys_of(ModelConfig).keys() - {"loss_kwargs"})
    yield NamedPart("model.attn_config", "norm_type", _all_but(values, "model.attn_config", "norm_kwargs"))
    # Keys of a loader may come from a hardware overlay. Its data set is a loader's own, but for what the model reads.
    of_every_loader = keys_of(LoaderConfig).keys() - {"kwargs", "dataset"}
    of_the_model = {f"dataset.{key}" for key in OF_THE_MODEL}
    for block in _loader_blocks(values):
        yield NamedPart(block, "name", of_every_loader | of_the_model)


def _all_but(values: Mapping[str, Any], block_key: str, key: str) -> set[str]:
    """Return the keys that a block of `values` has, without `key`."""
    _, block = find_value(values, block_key)
    return {*block} - {key} if isinstance(block, dict) else set()


def _loader_blocks(values: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys of the loaders in a configuration: `train_loader`, `eval_loaders.wiki`, ..."""
    blocks = ["train_loader", "eval_loader"]
    named_loaders = values.get("eval_loaders")
    if isinstance(named_loaders, dict):
        blocks += [f"eval_loaders.{label}" for label in named_loaders]
    return blocks


def drop_keys_of_other_parts(values: dict[str, Any], layers: Sequence[ConfigLayer]) -> list[str]:
    """Remove keys that files set for one part, before a later file or argument named another part in its place.

    They are settings of the other part, such as the warm-up of a base YAML's cosine, and no key of a later file or of
    the command line could remove them. This concerns parts of the user's own, and ours that replace one: two of ours
    have their keys in the same schema. Changes `values` in place, and the layers, so that no later check finds the keys
    there. Returns a note for each part that loses keys.
    """
    notes = []
    for part in [*find_named_parts(values)]:
        _, block = find_value(values, part.block)
        if not isinstance(block, dict):
            continue
        naming = _find_naming(part, layers)
        name = block.get(part.name_key)
        if not is_own(name) and not is_own(naming.replaced_name):
            continue

        blocks_of_layers = [find_value(layer.values, part.block)[1] for layer in layers]
        blocks_before = blocks_of_layers[: naming.index]
        dropped = []
        for path in [*_find_foreign(block, blocks_of_layers[naming.index :])]:
            is_of_part = (
                path[0] not in (part.name_key, *part.other_keys) and ".".join(map(str, path)) not in part.other_keys
            )
            if is_of_part:
                _remove(block, path)
                for layer_block in blocks_before:
                    _remove(layer_block, path)
                dropped.append(".".join(map(str, path)))
        if dropped:
            keys = ", ".join(dropped)
            notes.append(
                f"{layers[naming.index].source}: {part.block}.{part.name_key}: {name} is not given {keys}, which an "
                "earlier file sets for another one; to pass them, give them with the name"
            )
    return notes


class Naming(NamedTuple):
    """Where a part got its name."""

    index: int
    """Number of the layer that has named it, from 0."""
    replaced_name: Any
    """Name of the part before, which that layer has replaced; None if there was none."""


def _find_naming(part: NamedPart, layers: Sequence[ConfigLayer]) -> Naming:
    """Find the first of the last layers that give a part its name. It is the first of all if none names it."""
    first_with_part = 0
    name = None
    replaced_name = None
    for index, layer in enumerate(layers):
        is_named, name_in_layer = find_value(layer.values, f"{part.block}.{part.name_key}")
        if is_named and name_in_layer != name:
            first_with_part = index
            replaced_name = name
            name = name_in_layer
    return Naming(first_with_part, replaced_name)


def _find_foreign(block: dict[Any, Any], blocks_of_layers: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value in a merged block that none of the layers sets. An empty block counts as a value.

    `blocks_of_layers` has the same block in each layer. One that is no dictionary, such as a reference `${...}`, sets
    all keys, and None sets none.
    """
    given = [layer_block for layer_block in blocks_of_layers if layer_block is not None]
    if not all(isinstance(layer_block, dict) for layer_block in given):
        return
    for key, value in block.items():
        values_in_layers = [layer_block[key] for layer_block in given if key in layer_block]
        if isinstance(value, dict) and value:
            for path in _find_foreign(value, values_in_layers):
                yield (key, *path)
        elif not values_in_layers:
            yield (key,)


def _remove(block: Any, path: Sequence[Any]) -> None:
    """Remove the value at a path, if there is one, from nested dictionaries, and those that are empty without it."""
    key, *inner_path = path
    if not isinstance(block, dict) or key not in block:
        return
    if inner_path:
        _remove(block[key], inner_path)
    if not inner_path or not block[key]:
        del block[key]


def collect_part_arguments(values: dict[str, Any]) -> None:
    """Move the arguments of the user's own feed-forward layer and attention into `kwargs`. Changes `values` in place.

    ffn_config: {ffn_type: python:my.layers:Mixed, depth: 2}      # becomes
    ffn_config: {ffn_type: python:my.layers:Mixed, kwargs: {depth: 2}}
    """
    model = values.get("model")
    if isinstance(model, dict):
        move_arguments(model.get("ffn_config"), "ffn_type", keys_of(FFNConfig))
        move_arguments(model.get("attn_config"), "attn_type", keys_of(AttentionConfig))


def collect_own_arguments(values: dict[str, Any]) -> None:
    """Move the arguments of a user's own `python:` objects into `kwargs` or `extra`, whose keys are not checked.

    The objects are the optimizer, the schedule, loaders, callbacks and loggers. Changes `values` in place:

        optimizer: {name: python:my.module:Sgd, lr: 0.1, nesterov: true}      # becomes
        optimizer: {name: python:my.module:Sgd, lr: 0.1, kwargs: {nesterov: true}}

        callbacks: {python:my.module:Log: {every: 10}}                        # becomes
        callbacks: {extra: {python:my.module:Log: {every: 10}}}
    """
    # The user's optimizer or schedule may have an argument of the same name as a key of ours, such as `betas`, so only
    # the first keys stay. All keys of a loader stay, because they may come from a hardware overlay.
    move_arguments(values.get("optimizer"), "name", {"name", "lr", "param_groups", "kwargs"})
    move_arguments(values.get("scheduler"), "name", {"name", "kwargs"})
    for block_key in _loader_blocks(values):
        _, loader = find_value(values, block_key)
        move_arguments(loader, "name", keys_of(LoaderConfig))

    # The key of a callback or a logger is its import path, and its value is the block of its arguments, or null.
    for block in (values.get("callbacks"), values.get("loggers")):
        if not isinstance(block, dict):
            continue
        import_paths = [key for key in block if is_own(key)]
        if import_paths and isinstance(block.get("extra") or {}, dict):  # the schema refuses another `extra`
            own_objects = {path: block.pop(path) or {} for path in import_paths}
            block["extra"] = {**(block.get("extra") or {}), **own_objects}


def move_arguments(block: Any, name_key: str, known_keys: Collection[str]) -> None:
    """Move the keys of a block that are not in `known_keys` into its `kwargs`, if it names a user's own object.

    `name_key` is the key of the name. Changes the block in place. Blocks of our own objects, and values that are not
    blocks, are left alone.
    """
    if not isinstance(block, dict) or not is_own(block.get(name_key)):
        return
    kwargs = block.get("kwargs") or {}
    if not isinstance(kwargs, dict):
        return  # the schema refuses it
    arguments = {key: block.pop(key) for key in list(block) if key not in known_keys}
    block["kwargs"] = {**kwargs, **arguments}
