"""Compare the configuration in a checkpoint with the configuration of the launch that resumes from it.

Each key has a rule in the schema (`fields.Rule`): it may change freely, its change is logged, or it may never change.
Only the values in the YAML are compared here. Whether the tokenizer and the data are still the same is decided by their
fingerprints, elsewhere.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from llmfoundry_lite.config.batch_schedule import PerBatch, Steps
from llmfoundry_lite.config.blocks import missing_blocks
from llmfoundry_lite.config.fields import REQUIRED, Rule, join_key, keys_of, settings_along, without_our_keys
from llmfoundry_lite.config.layers import find_value, leaf_keys
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.errors import CheckpointError
from llmfoundry_lite.own_code import is_own


class Change(NamedTuple):
    """A key whose value differs between a checkpoint and the launch that resumes from it."""

    key: str
    """Dotted key, such as optimizer.lr."""
    before: Any
    """Value in the checkpoint."""
    after: Any
    """Value in the launch. None for a block that the launch leaves out."""

    def __str__(self) -> str:
        if self.after is None and isinstance(self.before, Mapping):
            return f"{self.key} left out"
        return f"{self.key} {in_words(self.before)} -> {in_words(self.after)}"


def find_changes(recorded: Mapping[str, Any], config: Mapping[str, Any]) -> dict[Rule, list[Change]]:
    """Return the keys that differ between the configuration of a checkpoint and that of a launch, by their rules.

    Both configurations are as `schema.as_dict` returns them. `{"optimizer": {"lr": 0.1, …}, …}` against a launch with
    `optimizer.lr=0.2` gives `{"freely": [], "logged": [Change("optimizer.lr", 0.1, 0.2)], "never": []}`.

    `recorded` may come from another release. A key that it lacks counts as the default. A key that is unknown to this
    release is ignored, except for the block of a companion that is not installed. That is a change, because the launch
    goes on without the block.
    """
    changes: dict[Rule, list[Change]] = {"freely": [], "logged": [], "never": []}
    changes["freely"] += [Change(name, recorded[name], None) for name in missing_blocks(recorded)]

    # Earlier releases recorded keys that a user's own optimizer does not get.
    optimizer = recorded.get("optimizer")
    if isinstance(optimizer, dict):
        recorded = {**recorded, "optimizer": without_our_keys(optimizer)}

    _, attention_dropout = find_value(config, "model.attn_config.attn_pdrop")
    for change in _compare(TrainConfig, recorded, config, ""):
        # Some keys change freely unless the model has attention dropout, because they change its random masks.
        settings = settings_along(TrainConfig, change.key)
        shapes_dropout = any(setting.shapes_dropout for setting in settings)
        rule = "logged" if attention_dropout and shapes_dropout else rule_of(change.key)
        if _changes_model_code(change):
            rule = "never"
        changes[rule].append(change)
    return changes


def find_changes_to_record(recorded: Mapping[str, Any], config: Mapping[str, Any]) -> list[Change]:
    """Return the changes that a launch prints and records: those of the rule "logged", and those of own callbacks.

    A callback of the user's own may do anything to the run, so the record says which ones came, went, or got other
    arguments. It may nevertheless change freely. Both configurations are as `schema.as_dict` returns them.
    """
    changes = find_changes(recorded, config)
    own_callbacks = [change for change in changes["freely"] if change.key.startswith("callbacks.extra.")]
    return changes["logged"] + own_callbacks


def find_model_changes(recorded: Mapping[str, Any], config: Mapping[str, Any]) -> list[Change]:
    """Return the changes of the `model` block that may never be made: the same weights would compute something else.

    The loss is no such key. Both configurations are as `schema.as_dict` returns them. Returns [] if one of them has no
    `model` block.
    """
    recorded_model = recorded.get("model")
    model = config.get("model")
    if not isinstance(recorded_model, Mapping) or not isinstance(model, Mapping):
        return []
    changes = _compare(ModelConfig, recorded_model, model, "model")
    changes = [change for change in changes if not change.key.startswith("model.loss_")]
    return [change for change in changes if rule_of(change.key) == "never" or _changes_model_code(change)]


def _changes_model_code(change: Change) -> bool:
    """Return whether a change puts code of the user's own into the model, or takes it out.

    `attn_impl` may change between implementations of ours, which compute the same. Nobody knows that of the user's own.
    """
    is_of_model = change.key.startswith("model.")
    return is_of_model and (is_own(change.before) or is_own(change.after))


def refuse_changes(changes: list[Change]) -> None:
    """Raise CheckpointError if there are any `changes`, which are those of keys that may never change.

    The message lists them all, and the arguments with which the launch would have the values of the checkpoint.
    """
    if not changes:
        return
    differences = ", ".join(
        f"{change.key} is {as_text(change.after)} here and {as_text(change.before)} in the checkpoint"
        for change in changes
    )
    arguments = " ".join(f"{change.key}={as_text(change.before)}" for change in changes)
    raise CheckpointError(
        f"{differences}; a run must resume with the values in its checkpoint: set {arguments}, or begin a new run "
        "with its weights (another run_name, load_path and load_weights_only=true)"
    )


def refuse_another_past(recorded: Mapping[str, Any], config: TrainConfig, num_batches: int) -> None:
    """Raise CheckpointError if a schedule by batches differs for batches that the run has trained. The rest may change.

    `recorded` is the configuration of a checkpoint, as `schema.as_dict` returns it, and `num_batches` counts what the
    run has trained there.
    """
    here = {
        "batch_size_schedule": (config.global_train_batch_size, config.batch_sizes, "samples"),
        "seq_len_schedule": (config.max_seq_len, config.seq_lens, "tokens in a row"),
    }
    for key, (value_without_schedule, values, words) in here.items():
        try:
            schedule = Steps.parse(recorded.get(key) or {})
        except ValueError as error:
            raise CheckpointError(f"{key}: {recorded[key]!r} in the checkpoint, expected {error}") from None
        values_before = PerBatch.build(value_without_schedule, schedule)
        batch = values.first_difference(values_before, num_batches)
        if batch is None:
            continue

        if schedule.steps:
            remedy = f"begin with the checkpoint's {as_text(schedule.written)}, and add or change entries"
        else:
            remedy = f"remove the entries before {num_batches}ba, and add or change them"
        raise CheckpointError(
            f"{key}: batch {batch + 1} has {values.of(batch)} {words} here and {values_before.of(batch)} in the "
            f"checkpoint, which has trained {num_batches} batches; only later ones may change: "
            f"{remedy} from {num_batches}ba on"
        )


def trained_values(config: Mapping[str, Any]) -> dict[str, str]:
    """Return dotted key -> value as text, for every key that may not change freely: `{"optimizer.lr": "0.1", …}`.

    Launches that train one run together must agree in these values. `config` is as `schema.as_dict` returns it.
    """
    keys = [key for key in leaf_keys(dict(config)) if rule_of(key) != "freely"]
    return {key: as_text(find_value(config, key)[1]) for key in keys}


def rule_of(key: str) -> Rule:
    """Return how a dotted key may change: by its own rule, or by the rule of the innermost block around it with one.

    Raises KeyError for a key that the schema does not have.
    """
    # The arguments of a user's own optimizer have no schema. This one has the rule of optimizer.weight_decay.
    if key == "optimizer.kwargs.weight_decay":
        return "logged"
    rules: list[Rule | None] = [setting.rule for setting in settings_along(TrainConfig, key)]
    for rule in reversed(rules):
        if rule is not None:
            return rule
    raise KeyError(key)


def as_text(value: Any) -> str:
    """Return a value as a user writes it after `key=` on a command line: `100ba`, `0.1`, `null`, `{"a": 1}`."""
    return str(value) if isinstance(value, str) else json.dumps(value)


def in_words(value: Any) -> str:
    """Return a value as text for a message, like `as_text`, without the keys of blocks that are null or empty."""
    return as_text(_without_empty_keys(value))


def _without_empty_keys(value: Any) -> Any:
    """Return `value` without the keys, at any depth, whose values are null or empty dictionaries."""
    if isinstance(value, Mapping):
        return {key: _without_empty_keys(inner) for key, inner in value.items() if inner is not None and inner != {}}
    if isinstance(value, list):
        return [_without_empty_keys(item) for item in value]
    return value


def _compare(block: type | None, before: Any, after: Any, path: str) -> Iterator[Change]:
    """Yield the changes between two values of the dotted key `path`, down to the single keys of blocks.

    `block` is the dataclass of the values if they are blocks of the schema. It is None for other values, such as the
    arguments of torch.compile, whose keys are compared too.
    """
    if before == after:
        return
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        yield Change(path, before, after)
        return

    # Dictionaries that the schema does not describe: compare the keys of both.
    if block is None:
        for name in {**before, **after}:
            yield from _compare(None, before.get(name), after.get(name), join_key(path, name))
        return

    # Blocks: compare the keys of the schema. A key that one of them lacks has its default there.
    for name, key in keys_of(block).items():
        default = None if key.default is REQUIRED else key.default
        value_before = before.get(name, default)
        value_after = after.get(name, default)
        inner_path = join_key(path, name)
        if key.container and isinstance(value_before, Mapping) and isinstance(value_after, Mapping):
            # Several blocks by label, such as eval_loaders.
            for label in {**value_before, **value_after}:
                yield from _compare(key.block, value_before.get(label), value_after.get(label), f"{inner_path}.{label}")
        elif key.container is list and key.block is not None and _may_change_inside(key.block):
            yield from _compare_lists(key.block, list(value_before or []), list(value_after or []), inner_path)
        else:
            yield from _compare(key.block, value_before, value_after, inner_path)


def _may_change_inside(block: type) -> bool:
    """Return whether keys of a block have rules of their own for changes in mid-run."""
    return any(key.setting.rule is not None for key in keys_of(block).values())


def _compare_lists(block: type, before: list[Any], after: list[Any], path: str) -> Iterator[Change]:
    """Yield the changes between two lists of blocks, such as `optimizer.param_groups`.

    Those of single keys are yielded if each of them may change; otherwise the whole list is, which is what a user would
    have to set.
    """
    changes: list[Change] = []
    if len(before) == len(after):
        for index, (block_before, block_after) in enumerate(zip(before, after, strict=True)):
            changes += _compare(block, block_before, block_after, f"{path}[{index}]")
    is_allowed = len(before) == len(after) and all(rule_of(change.key) != "never" for change in changes)
    if is_allowed:
        yield from changes
    elif before != after:
        yield Change(path, before, after)
