"""Arguments of the user's own parts in a YAML, which have no schema: a part gets its own, and none of another part.

`load_train.py` calls these functions with the merged values of a launch, before the dataclasses are built.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmfoundry_lite.config.data_schema import OF_THE_MODEL, LoaderConfig, TokenizerConfig
from llmfoundry_lite.config.fields import keys_of
from llmfoundry_lite.config.layers import ConfigLayer, find_value, source_of
from llmfoundry_lite.config.model_schema import AttentionConfig, FFNConfig
from llmfoundry_lite.config.optimizer_schema import OptimizerConfig, ParameterGroupConfig, SchedulerConfig
from llmfoundry_lite.errors import ConfigError, find_nearest
from llmfoundry_lite.own_code import is_own


@dataclass(slots=True, frozen=True)
class NamedPart:
    """A key of a YAML that may name a part of the user's own, and the keys beside it that belong to the part."""

    block: str
    """Dotted key of the block."""
    name_key: str
    """Key in it that has the name."""
    other_keys: Collection[str] = ()
    """Keys of the block that are not the part's, perhaps dotted: they keep their meaning whatever the name is."""
    only_key: str | None = None
    """The one key that has the part's arguments, if the rest of the block is not about the part. Misspelt keys of the
    rest must then stay, so that they are refused."""
    schema: type | None = None
    """The dataclass of the block if parts of ours have keys in it, by which misspelt keys are recognised."""

    def has(self, path: Sequence[Any]) -> bool:
        """Return whether a value in the block, by its path there, is an argument of the part."""
        if self.only_key is not None:
            return path[0] == self.only_key
        if path[0] == self.name_key or path[0] in self.other_keys:
            return False
        return ".".join(map(str, path)) not in self.other_keys


def find_named_parts(values: Mapping[str, Any]) -> Iterator[NamedPart]:
    """Yield each place of a configuration that may name a part with arguments. Callbacks and loggers are no such place.

    Their key is the name itself. `values` say which loaders there are.
    """
    # Groups of parameters go with the optimizer, because their settings are arguments of it.
    yield NamedPart("optimizer", "name", other_keys={"lr"}, schema=OptimizerConfig)
    yield NamedPart("scheduler", "name", schema=SchedulerConfig)
    yield NamedPart("tokenizer", "name", schema=TokenizerConfig)
    yield NamedPart("model.ffn_config", "ffn_type", schema=FFNConfig)

    # Attention gets the whole block `model`. The arguments of norms and of the loss are in keys of their own.
    keys_of_attention = keys_of(AttentionConfig).keys() - {"kwargs"}
    yield NamedPart("model.attn_config", "attn_type", other_keys=keys_of_attention, schema=AttentionConfig)
    yield NamedPart("model", "norm_type", only_key="norm_kwargs")
    yield NamedPart("model", "loss_fn", only_key="loss_kwargs")
    yield NamedPart("model.attn_config", "norm_type", only_key="norm_kwargs")

    # Keys of a loader may come from a hardware overlay. Its data set is a loader's own, but for what the model reads.
    of_every_loader = keys_of(LoaderConfig).keys() - {"kwargs", "dataset"}
    of_the_model = {f"dataset.{key}" for key in OF_THE_MODEL}
    for block in _loader_blocks(values):
        yield NamedPart(block, "name", other_keys=of_every_loader | of_the_model, schema=LoaderConfig)


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
        names = _find_names(part, layers)
        name = block.get(part.name_key)
        if not is_own(name) and not any(map(is_own, names)):
            continue

        # Two parts of ours share a schema, so what a file sets beside one of them is kept for another one.
        if is_own(name):
            is_for_part = [name_of_layer == names[-1] for name_of_layer in names]
        else:
            is_for_part = [not is_own(name_of_layer) for name_of_layer in names]

        blocks_of_layers = [find_value(layer.values, part.block)[1] for layer in layers]
        dropped: list[str] = []
        for path in [*_find_foreign(block, blocks_of_layers, is_for_part)]:
            if not part.has(path):
                continue
            if not any(is_own(name_of_layer) for name_of_layer in names if name_of_layer != name):
                _refuse_misspelt_key(part, str(path[0]), layers)
            _remove(block, path)
            for layer_block in blocks_of_layers:
                _remove(layer_block, path)
            dropped.append(".".join(map(str, path)))
        if dropped:
            keys = ", ".join(dropped)
            source = layers[_find_naming(names)].source
            notes.append(
                f"{source}: {part.block}.{part.name_key}: {name} is not given {keys}, which an "
                "earlier file sets for another one; to pass them, give them with the name"
            )
    return notes


def _refuse_misspelt_key(part: NamedPart, key: str, layers: Sequence[ConfigLayer]) -> None:
    """Raise ConfigError for a key that no part of ours has, and that is spelt like one that some part has.

    Call this for a key that a file sets beside the name of a part of ours. Dropping it would hide the mistake.
    """
    if part.schema is None or key in keys_of(part.schema):
        return
    nearest = find_nearest(key, keys_of(part.schema), cutoff=0.8)
    if nearest:
        dotted_key = f"{part.block}.{key}"
        raise ConfigError(
            f"{source_of(dotted_key, layers)}: {dotted_key}: unknown key; did you mean {part.block}.{nearest}?"
        )


def _find_names(part: NamedPart, layers: Sequence[ConfigLayer]) -> list[Any]:
    """Return the name of the part as it is after each layer; None until a layer names it."""
    names: list[Any] = []
    name = None
    for layer in layers:
        is_named, name_in_layer = find_value(layer.values, f"{part.block}.{part.name_key}")
        if is_named:
            name = name_in_layer
        names.append(name)
    return names


def _find_naming(names: Sequence[Any]) -> int:
    """Return the index of the layer since which the part has had its last name. `names` has its name in each layer."""
    index = len(names) - 1
    while index > 0 and names[index - 1] == names[-1]:
        index -= 1
    return index


def _find_foreign(
    block: dict[Any, Any], blocks_of_layers: Sequence[Any], is_for_part: Sequence[bool]
) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value in a merged block that a layer has set for another part. An empty block is a value.

    The last layer that sets a value decides. `blocks_of_layers` has the same block in each layer, and `is_for_part`
    says of each layer whether it sets the block for the part. A block that is no dictionary, such as a reference
    `${...}`, sets all keys, and None sets none.
    """
    for key, value in block.items():
        if isinstance(value, dict) and value:
            inner_blocks = [
                layer_block.get(key) if isinstance(layer_block, dict) else layer_block
                for layer_block in blocks_of_layers
            ]
            for path in _find_foreign(value, inner_blocks, is_for_part):
                yield (key, *path)
            continue
        setting_layers = [
            index
            for index, layer_block in enumerate(blocks_of_layers)
            if layer_block is not None and (not isinstance(layer_block, dict) or key in layer_block)
        ]
        if setting_layers and not is_for_part[setting_layers[-1]]:
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

    The objects are the optimizer, the schedule, the tokenizer, loaders, callbacks and loggers. Changes `values`:

        optimizer: {name: python:my.module:Sgd, lr: 0.1, nesterov: true}      # becomes
        optimizer: {name: python:my.module:Sgd, lr: 0.1, kwargs: {nesterov: true}}

        param_groups: [{param_str_match: norm, nesterov: false}]              # of such an optimizer, becomes
        param_groups: [{param_str_match: norm, kwargs: {nesterov: false}}]

        callbacks: {python:my.module:Log: {every: 10}}                        # becomes
        callbacks: {extra: {python:my.module:Log: {every: 10}}}
    """
    # The user's optimizer or schedule may have an argument of the same name as a key of ours, such as `betas`, so only
    # the first keys stay. All keys of a loader stay, because they may come from a hardware overlay.
    optimizer = values.get("optimizer")
    move_arguments(optimizer, "name", {"name", "lr", "param_groups", "kwargs"})
    if isinstance(optimizer, dict) and is_own(optimizer.get("name")):
        groups = optimizer.get("param_groups")
        if isinstance(groups, list):  # the schema refuses anything else
            # The layers have the same groups, so these are changed in copies.
            optimizer["param_groups"] = [dict(group) if isinstance(group, dict) else group for group in groups]
            for group in optimizer["param_groups"]:
                _move_keys(group, keys_of(ParameterGroupConfig))
    move_arguments(values.get("scheduler"), "name", {"name", "kwargs"})
    move_arguments(values.get("tokenizer"), "name", {"name", "kwargs"})
    for block_key in _loader_blocks(values):
        _, loader = find_value(values, block_key)
        move_arguments(loader, "name", keys_of(LoaderConfig))

    # The key of a callback or a logger is its import path, and its value is the block of its arguments, or null.
    for block_key in ("callbacks", "loggers"):
        block = values.get(block_key)
        if not isinstance(block, dict):
            continue
        import_paths = [key for key in block if is_own(key)]
        for path in import_paths:
            if isinstance(block.get("extra"), dict) and path in block["extra"]:
                raise ConfigError(f"{block_key}: {path} is given twice, also in {block_key}.extra; keep one of them")
        if import_paths and isinstance(block.get("extra") or {}, dict):  # the schema refuses another `extra`
            own_objects = {path: block.pop(path) or {} for path in import_paths}
            block["extra"] = {**(block.get("extra") or {}), **own_objects}


def move_arguments(block: Any, name_key: str, known_keys: Collection[str]) -> None:
    """Move the keys of a block that are not in `known_keys` into its `kwargs`, if it names a user's own object.

    `name_key` is the key of the name. Changes the block in place. Blocks of our own objects, and values that are not
    blocks, are left alone.
    """
    if isinstance(block, dict) and is_own(block.get(name_key)):
        _move_keys(block, known_keys)


def _move_keys(block: Any, known_keys: Collection[str]) -> None:
    """Move the keys of a block that are not in `known_keys` into its `kwargs`. The schema refuses what is no block."""
    if not isinstance(block, dict):
        return
    kwargs = block.get("kwargs") or {}
    if not isinstance(kwargs, dict):
        return
    arguments = {key: block.pop(key) for key in list(block) if key not in known_keys}
    if arguments or "kwargs" in block:
        block["kwargs"] = {**kwargs, **arguments}
