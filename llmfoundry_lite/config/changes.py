"""What may change in the middle of a run: a table with a rule for every key of the configuration.

Owns the rules, and the comparison of the configuration in a checkpoint with that of the launch that carries it on.
Whether tokenizer and data are still the same, their fingerprints tell elsewhere. No torch.
"""

import dataclasses
import functools
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from llmfoundry_lite.config.layers import HARDWARE_KEYS, get, leaf_keys
from llmfoundry_lite.config.schema import ModelConfig, TrainConfig
from llmfoundry_lite.errors import CheckpointError

FREELY = (
    *HARDWARE_KEYS,
    *("run_name", "run_folder", "save_folder", "save_num_checkpoints_to_keep", "save_keep_every_batches"),
    *("autoresume", "load_path", "load_weights_only", "load_ignore_keys", "load_cast", "stop_after"),
    *("callbacks", "loggers", "progress_bar", "log_to_console", "console_log_interval", "python_log_level"),
    *("export_at_end", "variables", "metadata", "deterministic", "max_skipped_batches"),
    *("tokenizer", "icl_task_folder", "eval_first", "model.init_config", "model.loss_fn"),
    *("train_loader.dataset.validate_hash", "train_loader.dataset.keep_zip"),
    *(
        f"{loader}.dataset.streams.*.{key}"
        for loader in ("train_loader", "eval_loader", "eval_loaders.*")
        for key in ("local", "remote", "download_retry", "download_timeout", "validate_hash", "keep_zip")
    ),
    *(f"train_loader.dataset.override_{token}_token_id_mismatch_error" for token in ("eos", "bos")),
    "train_loader.dataset.allow_unhashed_shards",
)
"""The machine's choices and the user's: how, where and how loudly the run is computed."""

ALLOWED_AND_LOGGED = (
    *("max_duration", "optimizer.lr", "optimizer.weight_decay", "optimizer.kwargs.weight_decay", "scheduler"),
    *("optimizer.adamw_lr", "optimizer.ns_dtype"),
    *("algorithms", "on_non_finite", "save_interval", "train_loader.kwargs"),
    *("eval_loader", "eval_loaders", "eval_interval", "eval_subset_num_batches", "icl_tasks", "icl_limit"),
)
"""Takes effect, is named when the run carries on, and is recorded in the new segment."""

NEVER = (
    *("model", "max_seq_len", "seed", "global_train_batch_size", "accumulate_train_batch_on_tokens"),
    *("optimizer.name", "optimizer.betas", "optimizer.eps", "optimizer.kwargs"),
    *("optimizer.momentum", "optimizer.ns_steps", "optimizer.adjust_lr_fn"),
    *("train_loader.name", "train_loader.drop_last", "train_loader.dataset"),
)
"""Another value makes it another run."""

WITH_ATTENTION_DROPOUT = (
    *("device_train_microbatch_size", "tp_config", "cp_config", "pp_config", "model.attn_config.attn_impl"),
)
"""Said in a run with attn_pdrop: attention's kernels draw masks for the heads and rows that they are given."""

Rule = Literal["freely", "by being said", "never"]
RULES: dict[str, Rule] = {
    **dict.fromkeys(FREELY, "freely"),
    **dict.fromkeys(ALLOWED_AND_LOGGED, "by being said"),
    **dict.fromkeys(NEVER, "never"),
}
"""Key, or block of keys -> rule. The longest key that fits decides."""


class Change(NamedTuple):
    key: str
    there: Any
    """In the checkpoint."""
    here: Any

    def __str__(self) -> str:
        return f"{self.key} {in_words(self.there)} -> {in_words(self.here)}"


def find_changes(there: Mapping[str, Any], here: Mapping[str, Any]) -> dict[Rule, list[Change]]:
    """All keys of two configurations (as `schema.as_dict` gives them) that differ, by the rule that holds for them.

    `there` may come from another release: a key that it lacks had the default, a key unknown here is passed over.
    """
    found: dict[Rule, list[Change]] = {"freely": [], "by being said": [], "never": []}
    draws = bool(get(here, "model.attn_config.attn_pdrop")[1])
    for change in _compare(TrainConfig, there, here, ""):
        is_drawn = draws and any(
            change.key == key or change.key.startswith(f"{key}.") for key in WITH_ATTENTION_DROPOUT
        )
        found["by being said" if is_drawn else rule_of(change.key)].append(change)
    return found


def find_other_model(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[Change]:
    """Changes by which weights, though they fit, are another function of the tokens."""
    then, now = there.get("model"), here.get("model")
    if not isinstance(then, Mapping) or not isinstance(now, Mapping):
        return []
    return [change for change in _compare(ModelConfig, then, now, "model") if rule_of(change.key) == "never"]


def refuse_changes(changes: list[Change]) -> None:
    """Raises CheckpointError if there is any: these keys may never change."""
    if not changes:
        return
    differ = ", ".join(f"{c.key} is {in_words(c.here)} here and {in_words(c.there)} in the checkpoint" for c in changes)
    back = " ".join(f"{c.key}={in_words(c.there)}" for c in changes)
    raise CheckpointError(
        f"{differ}; a run carries on as the run it was: set {back}, or begin a new run with its weights (another "
        "run_name, load_path and load_weights_only=true)"
    )


def what_is_trained(config: Mapping[str, Any]) -> dict[str, str]:
    """Of a configuration, as `schema.as_dict` gives it, every key that does not change freely, and its value in words:
    what launches that train one run together must have alike."""
    return {key: in_words(get(config, key)[1]) for key in leaf_keys(dict(config)) if rule_of(key) != "freely"}


def rule_of(key: str) -> Rule:
    """Raises KeyError for a key that is not in the table."""
    parts = re.sub(r"(\.streams|^eval_loaders)\.[^.]+", r"\1.*", key).split(".")
    for length in range(len(parts), 0, -1):
        if (rule := RULES.get(".".join(parts[:length]))) is not None:
            return rule
    raise KeyError(key)


def schema_keys(block: type = TrainConfig, prefix: str = "") -> Iterator[str]:
    """Every key that a training YAML may have; `*` stands for names of the user's choice."""
    for name, hint in _hints(block).items():
        inner, is_mapping = _inner_block(hint)
        if inner is None:
            yield prefix + name
            continue
        if is_mapping or type(None) in typing.get_args(hint):
            yield prefix + name
        yield from schema_keys(inner, f"{prefix}{name}.*." if is_mapping else f"{prefix}{name}.")


def in_words(value: Any) -> str:
    """As one would write it after `key=`."""
    return str(value) if isinstance(value, str) else json.dumps(value)


def _compare(block: type | None, there: Any, here: Any, key: str) -> Iterator[Change]:
    if there == here:
        return
    if not isinstance(there, Mapping) or not isinstance(here, Mapping):
        yield Change(key, there, here)
        return
    hints, before = (_hints(block), _defaults(block)) if block else (dict.fromkeys({**there, **here}), {})
    for name, hint in hints.items():
        inner, is_mapping = _inner_block(hint)
        then, now = (side.get(name, before.get(name)) for side in (there, here))
        path = f"{key}.{name}" if key else name
        if is_mapping and isinstance(then, Mapping) and isinstance(now, Mapping):
            for entry in {**then, **now}:
                yield from _compare(inner, then.get(entry), now.get(entry), f"{path}.{entry}")
        else:
            yield from _compare(inner, then, now, path)


def _inner_block(hint: Any) -> tuple[type | None, bool]:
    """The dataclass of a block (`Block` or `Block | None`), or that of each entry of `dict[str, Block]`."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        if dataclasses.is_dataclass(option):
            return typing.cast(type, option), False
        if typing.get_origin(option) is dict and dataclasses.is_dataclass(typing.get_args(option)[1]):
            return typing.get_args(option)[1], True
    return None, False


@functools.cache
def _hints(block: type) -> dict[str, Any]:
    return typing.get_type_hints(block)


@functools.cache
def _defaults(block: type) -> dict[str, Any]:
    defaults = {}
    for field in dataclasses.fields(block):
        value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if value is not dataclasses.MISSING:
            defaults[field.name] = dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]
    return defaults
