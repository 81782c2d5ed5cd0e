"""Compare LLM Foundry's default of every key with ours: writing it into a YAML should change nothing.

uv venv --python 3.11 ~/foundry
VIRTUAL_ENV=~/foundry uv pip install llm-foundry==0.22.0 "setuptools<81"
python scripts/defaults_llm_foundry.py --peer-python ~/foundry/bin/python

The same file, run there with --peer (`their_defaults`), prints the defaults of LLM Foundry's and Composer's dataclasses
and signatures as JSON. Here (`compare`) each is added to a YAML that leaves the key out. The script prints every
default that is refused, or that changes the resolved configuration. The exit code is 1 if INTENDED lacks one of these,
or has another one.

A key is a dotted path, such as `model.attn_config.clip_qkv`. `optimizer[lion].lr` is a key that only holds for one kind
of optimizer. Keys that LLM Foundry's files must have are not compared, because they have no default.
"""

import argparse
import dataclasses
import importlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

INTENDED = {
    "device_train_microbatch_size": "the device's whole batch; a launch says so",
    "eval.precision": "rounding decides no score",
    **dict.fromkeys(
        ("model.attn_config.attn_impl", "model.loss_fn", "model.init_device"), "another way to the same numbers"
    ),
    "fsdp_config.activation_checkpointing_reentrant": "another way to the same numbers",
    **dict.fromkeys(("optimizer.betas", "train_loader.prefetch_factor"), "null stands for the same"),
    "run_name": "the YAML's name",
    **dict.fromkeys(("optimizer.lr", "global_train_batch_size", "eval.icl_tasks"), "no guess would be right"),
    **dict.fromkeys(
        ("train_loader.dataset.local", "train_loader.dataset.streams.web.local"), "no guess would be right"
    ),
    "expandable_segments": "the environment decides",
    "python_log_level": "only this package speaks",
}
"""Key -> why our default differs. `docs/coming-from-llm-foundry.md` lists them. Evaluations' keys begin with eval."""

NOT_IN_FILES = (
    *("model.device", "model.tokenizer", "model.attn_config", "model.ffn_config", "model.init_config"),
    *(f"model.attn_config.{key}" for key in ("device", "bias", "head_dim", "attention_bias", "reuse_kv_layer_idx")),
    *("model.attn_config.reuse_kv_x_layer_idx", "model.attn_config.fc_type"),
    *(f"model.ffn_config.{key}" for key in ("device", "bias", "act_fn", "fc_type")),
    *("fsdp_config._device_mesh", "tp_config.device_mesh", "tp_config.layer_plan", "train_loader.dataset.batch_size"),
    *("icl_tasks_str", "eval_gauntlet_str", "eval_loaders", "eval.eval_loaders", "eval.icl_tasks_str"),
    *("eval.eval_gauntlet_str", "fsdp_config", "tp_config"),
)
"""Arguments that LLM Foundry's own code fills in, and blocks whose keys are compared one by one."""

# Configurations that leave out every key that has a default.
BASE: dict[str, Any] = {
    "run_name": "defaults",
    "max_seq_len": 2048,
    "model": {"name": "mpt_causal_lm", "d_model": 2048, "n_heads": 16, "n_layers": 24, "max_seq_len": 2048},
    "tokenizer": {"name": "tokenizer"},
    "train_loader": {"name": "text", "dataset": {"local": "data"}},
    "optimizer": {"name": "decoupled_adamw", "lr": 1.0},
    "scheduler": {"name": "cosine_with_warmup", "t_warmup": "100ba"},
    "max_duration": "4800ba",
    "global_train_batch_size": 256,
}
EVAL_BASE: dict[str, Any] = {
    "models": {"a": "b"},
    "icl_tasks": [{"label": "t", "icl_task_type": "language_modeling", "dataset_uri": "t.jsonl"}],
}


def main() -> None:
    """Parse the command line, and run one of the two halves. Exits with 1 if the differences are not as listed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--peer-python", help="python of an environment with llm-foundry")
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--optimizers", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--schedules", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        print(json.dumps(their_defaults(options.optimizers, options.schedules), default=str))
        return
    if not options.peer_python:
        parser.error("--peer-python: missing; expected the python of an environment with llm-foundry")
    differences = compare(ask_peer(options.peer_python))
    wrongly_listed = print_differences(differences)
    sys.exit(1 if wrongly_listed else 0)


def ask_peer(python: str) -> dict[str, Any]:
    """Run this file in LLM Foundry's environment, and return its defaults: key -> default. Exits if it fails.

    The peer, which has no package of ours, is told the optimizers and schedules that LLM Foundry has too.
    """
    from llmfoundry_lite.config.optimizers import OPTIMIZERS
    from llmfoundry_lite.config.schedules import SCHEDULES

    optimizers = [row.foundry.name for row in OPTIMIZERS.values() if row.foundry is not None]
    schedules = [name for name, row in SCHEDULES.items() if row.foundry_class is not None]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"}
    command = [python, str(Path(__file__).resolve()), "--peer"]
    command += ["--optimizers", *optimizers, "--schedules", *schedules]
    peer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if peer.returncode:
        sys.exit(f"{python}: the peer ended with code {peer.returncode}:\n{peer.stderr[-3000:]}")
    # Imports may have printed lines before it.
    return json.loads(peer.stdout.splitlines()[-1])


def compare(their_defaults: Mapping[str, Any]) -> dict[str, str]:
    """Return the effect of each of LLM Foundry's defaults that has one here: key -> the effect in words.

    A default has an effect if a YAML that says it is refused, or if its resolved configuration is not the same as that
    of a YAML which leaves it out. Keys of one kind of optimizer or scheduler are returned without the kind.
    """
    effects: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for key, default in their_defaults.items():
            if key in NOT_IN_FILES:
                continue

            # Both YAMLs have the block that the key is in, since a block may have an effect of its own.
            resolve, base, path = _yaml_for(key)
            yaml_without_key = _with_value(base, path.rpartition(".")[0], {})
            yaml_with_key = _with_value(base, path, default)
            if "[" in key:
                key = f"{key.partition('[')[0]}.{key.rpartition('.')[2]}"
            try:
                resolved_without_key = resolve(yaml_without_key, folder)
                resolved_with_key = resolve(yaml_with_key, folder)
            except ValueError as error:
                reason = str(error).partition("run.yaml: ")[2]
                effects[key] = f"{_as_json(default)} is refused: {reason}"
                continue

            changes = []
            for setting in {**resolved_without_key, **resolved_with_key}:
                our_value = resolved_without_key.get(setting)
                if our_value != resolved_with_key.get(setting):
                    changes.append(f"{setting} is {_as_json(our_value)} here")
            if changes:
                effects[key] = f"{_as_json(default)} there; {', '.join(changes)}"
    return effects


def print_differences(effects: Mapping[str, str]) -> list[str]:
    """Print each difference and the reason for it in INTENDED.

    Returns the keys of differences without a reason, and of reasons without a difference.
    """
    for key, effect in effects.items():
        print(f"{key}: {effect}\n    {INTENDED.get(key, 'UNLISTED')}")
    unlisted = [key for key in effects if key not in INTENDED]
    obsolete = [key for key in INTENDED if key not in effects]
    wrong = unlisted + obsolete
    verdict = f"not as listed: {', '.join(wrong)}" if wrong else "all are listed"
    print(f"\n{len(effects)} defaults differ; {verdict}")
    return wrong


# ------------------------------------------------------------------------------------------------------- our half


def _yaml_for(key: str) -> tuple[Callable[[Any, Path], dict[str, Any]], dict[str, Any], str]:
    """Choose how to try a key. Return the function that resolves a YAML, a YAML without the key, and its path there.

    For `scheduler[inv_sqrt_with_warmup].alpha_f_decay`, the YAML has a scheduler of this kind, and the path is
    `scheduler.alpha_f_decay`.
    """
    if key.startswith("eval."):
        return _resolve_evaluation, EVAL_BASE, key.removeprefix("eval.")

    base = json.loads(json.dumps(BASE))  # a deep copy
    block, _, kind_and_setting = key.partition("[")
    kind, _, setting = kind_and_setting.partition("].")
    # Each kind of optimizer and scheduler has keys that it must have.
    if block == "optimizer" and kind:
        base["optimizer"] = {"name": kind, "lr": 1.0}
    if block == "scheduler" and kind:
        base["scheduler"] = {"name": kind, "t_warmup": "100ba"}
        if kind == "inv_sqrt_with_warmup":
            base["scheduler"]["t_scale"] = "100ba"
    if ".streams." in key:
        base["train_loader"]["dataset"] = {"streams": {"web": {"local": "data"}}}
    return _resolve_training, base, f"{block}.{setting}" if kind else key


def _resolve_training(yaml: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the resolved configuration of a training run: dotted path -> value. Raises ValueError if it is refused."""
    from llmfoundry_lite.config.load_train import load_train_config
    from llmfoundry_lite.config.schema import as_dict

    return _flatten(as_dict(load_train_config([_write(yaml, folder)], {}).config))


def _resolve_evaluation(yaml: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the resolved configuration of an evaluation, as `_resolve_training` does."""
    from llmfoundry_lite.config.load_eval import load_eval_config

    return _flatten(dataclasses.asdict(load_eval_config([_write(yaml, folder)]).config))


def _write(yaml: dict[str, Any], folder: Path) -> str:
    """Write a YAML, over the last one, and return its path."""
    path = folder / "run.yaml"
    path.write_text(json.dumps(yaml))  # JSON is also YAML
    return str(path)


def _with_value(base: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a copy of `base` with a value at a dotted path, whose blocks are made if they are missing.

    The value {} makes an empty block, and leaves an existing one unchanged. The empty path changes nothing.
    """
    yaml = json.loads(json.dumps(base))
    block = yaml
    keys = [key for key in path.split(".") if key]
    for key in keys[:-1]:
        block = block.setdefault(key, {})
    if keys and not (value == {} and isinstance(block.get(keys[-1]), dict)):
        block[keys[-1]] = value
    return yaml


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested dicts by dotted path: {"a": {"b": 1}} is {"a.b": 1}. An empty dict is a leaf."""
    if not isinstance(value, dict) or not value:
        return {prefix.removesuffix("."): value}
    leaves: dict[str, Any] = {}
    for name, block in value.items():
        leaves |= _flatten(block, f"{prefix}{name}.")
    return leaves


def _as_json(value: Any) -> str:
    return json.dumps(value, default=str)


# ----------------------------------------------------------------------------------------------------- their half


def their_defaults(optimizers: Sequence[str], schedules: Sequence[str]) -> dict[str, Any]:
    """Return LLM Foundry's defaults: key -> default. `optimizer[lion].lr` is for one kind of optimizer.

    `optimizers` and `schedules` are the names of those to ask for.
    """
    their_default_by_key = {}

    # Arguments of dataclasses, classes and functions.
    for block, names in SOURCES.items():
        for name in names:
            for setting, default in _defaults_of(_find(name)).items():
                their_default_by_key[f"{block}.{setting}" if block else setting] = default

    # Dicts of defaults, which take precedence over the arguments that they are passed to.
    defaults_module = _find("llmfoundry.models.utils.config_defaults")
    for block in ("attn_config", "ffn_config", "init_config"):
        for setting, default in getattr(defaults_module, f"{block}_defaults").items():
            their_default_by_key[f"model.{block}.{setting}"] = default
    their_default_by_key["model.ffn_config.ffn_act_fn"] = _find("llmfoundry.models.layers.ffn._FFN_ACT_FN_DEFAULT")

    # Registries of kinds: format of a kind's block, registry, and names of kinds.
    registry = _find("llmfoundry.registry")
    for block_format, kinds, names in (
        ("optimizer[{}]", registry.optimizers, optimizers),
        ("scheduler[{}]", registry.schedulers, schedules),
        ("algorithms.{}", registry.algorithms, ("gradient_clipping",)),
        ("callbacks.{}", registry.callbacks, ("speed_monitor", "lr_monitor", "memory_monitor", "runtime_estimator")),
        ("loggers.{}", registry.loggers, ("wandb", "tensorboard")),
    ):
        for kind in names:
            for setting, default in _defaults_of(kinds.get(kind)).items():
                their_default_by_key[f"{block_format.format(kind)}.{setting}"] = default
    return their_default_by_key


SOURCES = {
    "": ("llmfoundry.utils.config_utils.TrainConfig",),
    "eval": ("llmfoundry.utils.config_utils.EvalConfig",),
    "model": ("llmfoundry.models.mpt.MPTConfig", "llmfoundry.models.mpt.ComposerMPTCausalLM"),
    "model.attn_config": ("llmfoundry.models.layers.attention.GroupedQueryAttention",),
    "model.ffn_config": ("llmfoundry.models.layers.ffn.MPTMLP",),
    "fsdp_config": ("composer.utils.FSDPConfig",),
    "tp_config": ("composer.utils.TPConfig",),
    "train_loader": ("llmfoundry.data.text_data.build_text_dataloader",),
    "train_loader.dataset": ("llmfoundry.data.text_data.StreamingTextDataset",),
    "train_loader.dataset.streams.web": ("streaming.Stream",),
}
"""Block of a YAML -> dataclasses, classes and functions whose arguments are its keys."""


def _find(name: str) -> Any:
    """Import a module, or an attribute of a module, by its dotted name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        return getattr(importlib.import_module(module), attribute)


def _defaults_of(source: Any) -> dict[str, Any]:
    """Return the defaults of a dataclass, class or function. Keys without a default are left out."""
    if dataclasses.is_dataclass(source):
        fields = dataclasses.fields(source)
        # OmegaConf's "???" is a key that a file must have.
        plain = {
            field.name: field.default
            for field in fields
            if field.default is not dataclasses.MISSING and field.default != "???"
        }
        made = {
            field.name: field.default_factory() for field in fields if field.default_factory is not dataclasses.MISSING
        }
        return plain | made
    if inspect.isclass(source) and source.__name__ == "InverseSquareRootWithWarmupScheduler":
        source = source.__mro__[1]  # the class that the marker "experimental" wraps
    parameters = inspect.signature(source).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty}


if __name__ == "__main__":
    main()
