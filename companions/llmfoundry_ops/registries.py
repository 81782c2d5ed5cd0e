"""LLM Foundry's registries: which keys name a part from each, and how such a part is used here.

`REGISTRIES` is the only table of them. `from_yaml.py` reports the parts that a YAML takes from a registry, and
docs/coming-from-llm-foundry.md shows the table, which a test compares with this one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from llmfoundry_lite.companions import PART_KEYS
from llmfoundry_lite.config.fields import keys_of, settings_along
from llmfoundry_lite.config.foundry import LEFT_OUT, WITHOUT_EFFECT
from llmfoundry_lite.config.part_names import find_names, names_of_ours
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.own_code import is_own

Path = tuple[str | int, ...]
"""Keys and indices that lead to a value: ("icl_tasks", 0, "icl_task_type")."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Registry:
    """A registry of LLM Foundry."""

    name: str
    """Its name, such as norms, which LLM Foundry calls `llmfoundry.norms`."""
    keys: tuple[str, ...] = ()
    """Dotted keys of a YAML whose value names a part. `*` stands for any key. If it is at the end, the keys of the
    block are the names. Empty if no key names one, or `companions.PART_KEYS` has them."""
    here: str = "nothing"
    """The key that names such a part here, in Markdown; "nothing" if no key does."""
    call: str
    """Whether a class or function that was written for the registry works unchanged, and what to adapt or use
    instead."""
    theirs: tuple[str, ...] = ()
    """Names of LLM Foundry's own parts that this package does not have, and `foundry.table` does not list."""

    is_required: bool = True
    """Whether a launch refuses a name from it that it does not know, and does not only note it."""

    @property
    def has_counterpart(self) -> bool:
        """Whether a part of the user's own can be named here."""
        return self.here != "nothing"

    @property
    def advice(self) -> str:
        """The sentence of `call` as a clause without Markdown: `works unchanged, with …`, or `to adapt: …`."""
        call = self.call.replace("`", "")
        if not self.has_counterpart:
            return call
        if call.startswith("yes"):
            return f"works unchanged{call.removeprefix('yes')}"
        return f"to adapt{call.removeprefix('no')}"


@dataclass(kw_only=True, slots=True, frozen=True)
class RegistryPart:
    """A name in a YAML that neither this package nor an installed companion has."""

    path: Path
    """Place of the value that is the name, or of the block whose key is the name."""
    name: str
    registry: Registry
    is_key: bool
    """Whether the key of a block is the name, as of a callback."""

    @property
    def key(self) -> str:
        """The dotted key."""
        return dotted(self.path)

    @property
    def is_needed(self) -> bool:
        """Whether a launch is refused until the part is named in another way."""
        is_shown_metric = self.path[-1] == "metric"
        return self.registry.has_counterpart and (self.registry.is_required or is_shown_metric)

    @property
    def is_theirs(self) -> bool:
        """Whether the part is LLM Foundry's own, and not one that somebody has registered."""
        return self.name in self.registry.theirs

    def __str__(self) -> str:
        """The key with the name, as the YAML has them: `model.norm_type: scalenorm`, `callbacks.weight_watcher`."""
        return self.key if self.is_key else f"{self.key}: {self.name}"


REGISTRIES = (
    Registry(
        name="norms",
        here="`model.norm_type: python:package.module:Thing`",
        call="yes, with the width by position, not as `normalized_shape=`",
        theirs=("triton_rmsnorm",),
    ),
    Registry(
        name="ffns",
        here="`model.ffn_config.ffn_type`",
        call="yes",
        theirs=("torch_dmoe", "te_ln_mlp", "mb_moe", "mb_dmoe"),
    ),
    Registry(
        name="attention_classes",
        here="`model.attn_config.attn_type`",
        call="no: `Thing(config, **kwargs)`, where `config` is the block `model`",
    ),
    Registry(
        name="attention_implementations",
        here="`model.attn_config.attn_impl`",
        call="yes, without a cache or a padding mask; `is_causal` is false beside an `attn_bias`, which then hides "
        "later keys, too",
    ),
    Registry(name="schedulers", here="`scheduler.name`", call="yes"),
    Registry(
        name="optimizers",
        here="`optimizer.name`",
        call="yes",
        theirs=("adalr_lion", "clip_lion", "no_op"),
    ),
    Registry(
        name="tokenizers",
        here="`tokenizer.name`; its `kwargs` are the arguments",
        call="yes, if `save_pretrained` writes a `tokenizer.json`",
    ),
    Registry(name="callbacks", here="a key of `callbacks`", call="yes"),
    Registry(
        name="callbacks_with_config",
        here="a key of `callbacks`",
        call="no: it is not given the configuration, but only its arguments",
    ),
    Registry(name="loggers", here="a key of `loggers`", call="yes"),
    Registry(
        name="dataloaders",
        here="`train_loader.name`, `eval_loader.name`",
        call="no: by `device_batch_size` and its arguments",
        theirs=("contrastive_pairs",),
    ),
    Registry(
        name="icl_datasets",
        here="`icl_task_type: python:package.module:Thing` in a task",
        call="no: `Thing(task, **kwargs)` reads rows",
    ),
    Registry(
        name="metrics",
        here="`metric_names` of a task",
        call="no: `function(outcome, **metric_kwargs)`",
        is_required=False,
        theirs=(
            "LanguageCrossEntropy",
            "LanguagePerplexity",
            "InContextLearningLMExpectedCalibrationError",
            "InContextLearningMCExpectedCalibrationError",
        ),
    ),
    Registry(
        name="param_init_fns",
        keys=("model.init_config.name",),
        call="a part of your own has the method `initial_distribution`",
    ),
    Registry(name="module_init_fns", call="a part of your own has the method `initial_distribution`"),
    Registry(
        name="algorithms",
        keys=("algorithms.*",),
        call="write it as a callback, whose methods are the events that it matches",
    ),
    Registry(
        name="models",
        call="the model is an MPT, whose norms, feed-forward layers and attention may be your own",
    ),
    Registry(name="ffns_with_norm", call="a feed-forward layer gets what the block's norm returns"),
    Registry(name="ffns_with_megablocks", call="there is no mixture of experts"),
    Registry(
        name="fcs",
        keys=("model.fc_type", "model.attn_config.fc_type", "model.ffn_config.fc_type"),
        call="linear layers are torch's; an attention or feed-forward layer of your own may have others",
    ),
    Registry(name="config_transforms", call="change the YAML by another file or by arguments"),
    Registry(name="collators", call="a loader of your own returns whole batches"),
    Registry(name="data_specs", call="a loader of your own returns whole batches"),
    Registry(
        name="dataset_replication_validators", call="`tp_config` and `cp_config` decide which ranks read the same"
    ),
    Registry(name="load_planners", call="checkpoints have one format"),
    Registry(name="save_planners", call="checkpoints have one format"),
    Registry(name="tp_strategies", call="`tp_config` divides attention and feed-forward layers"),
)
"""The registries of LLM Foundry 0.22 (llmfoundry/registry.py and llmfoundry/layers_registry.py)."""

FOUNDRYS_LINEAR_LAYER = "torch"
"""The name of torch's linear layers in the registry fcs, which foundry.table accepts."""


def find_parts_from_registries(values: dict[str, Any]) -> list[RegistryPart]:
    """Return the names in a YAML's values that neither this package nor an installed companion has.

    LLM Foundry's own names that `foundry.table` lists are left out, because they have advice of their own there. So are
    tokenizers, whose names cannot be told from those of the Hub.

    Raises ConfigError for a name that depends on the environment, because it could be that of any code.
    """
    found: dict[Path, RegistryPart] = {}
    for registry in REGISTRIES:
        if registry.name == "tokenizers":
            continue
        is_kind = registry.name in PART_KEYS
        names_of_companions = find_names(registry.name) if is_kind else {}
        for pattern in PART_KEYS[registry.name] if is_kind else registry.keys:
            names_here = names_of_ours(registry.name) if is_kind else _names_at_key(pattern)
            known_names = {*names_here, *names_of_companions}
            if not registry.is_required:
                known_names |= {*registry.theirs}
            for path, name in _names_at(values, pattern.split(".")):
                if "${" in name:
                    raise ConfigError(
                        f"{dotted(path)}: {name} given, which depends on the environment, expected the name of a part; "
                        "write the name itself"
                    )
                is_listed = pattern.endswith("*") and dotted(path) in {*LEFT_OUT, *WITHOUT_EFFECT}
                if name not in known_names and not is_own(name) and not is_listed:
                    part = RegistryPart(path=path, name=name, registry=registry, is_key=pattern.endswith("*"))
                    found.setdefault(path, part)
    return list(found.values())


def _names_at_key(key: str) -> set[str]:
    """Return the names that this package has for a key that `companions.PART_KEYS` does not have."""
    block, _, name = key.rpartition(".")
    if name == "fc_type":
        return {FOUNDRYS_LINEAR_LAYER}
    if name == "*":
        return {*keys_of(cast(type, keys_of(TrainConfig)[block].block))}
    return {*settings_along(TrainConfig, key)[-1].choices}


def _names_at(value: Any, pattern: list[str], path: Path = ()) -> Iterator[tuple[Path, str]]:
    """Yield the path and the name of each part that a pattern of `Registry.keys`, split at its points, leads to."""
    if not pattern:
        # LLM Foundry also takes `fc_type: {name: torch}`, and a task has a list of metrics.
        if isinstance(value, list):
            for index, item in enumerate(value):
                yield from _names_at(item, [], (*path, index))
        name = value.get("name") if isinstance(value, dict) else value
        if isinstance(name, str):
            yield path, name
        return

    first, *others = pattern
    if isinstance(value, list) and first == "*":
        for index, item in enumerate(value):
            yield from _names_at(item, others, (*path, index))
    elif not isinstance(value, dict):
        return
    elif first == "*" and not others:
        for name in value:
            yield (*path, name), name
    else:
        names = list(value) if first == "*" else [first]
        for name in names:
            yield from _names_at(value.get(name), others, (*path, name))


def dotted(path: Path) -> str:
    """Return the dotted key of a path: `icl_tasks[0].icl_task_type`."""
    key = ""
    for part in path:
        if isinstance(part, int):
            key += f"[{part}]"
        else:
            key += f".{part}" if key else part
    return key
