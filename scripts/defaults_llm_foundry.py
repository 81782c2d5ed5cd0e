"""Compare LLM Foundry's default of every key with ours: writing it into a YAML should change nothing.

uv venv --python 3.11 ~/foundry
VIRTUAL_ENV=~/foundry uv pip install llm-foundry==0.22.0 "setuptools<81"
python scripts/defaults_llm_foundry.py --peer-python ~/foundry/bin/python

The same file, run there with --peer, prints the defaults of LLM Foundry's and Composer's dataclasses and signatures as
JSON. Here each is added to a YAML that leaves the key out. The script prints every default that is refused, or that
changes the resolved configuration. Exit code 1 if INTENDED lacks one of these, or has another one.

Keys that LLM Foundry's files must have are not compared, because they have no default.
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
from collections.abc import Callable, Mapping
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
"""Key -> why our default differs. `docs/coming-from-llm-foundry.md` lists them. An evaluation's begin with eval."""

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
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    arguments.add_argument("--peer-python", help="python of an environment with llm-foundry")
    arguments.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.peer:
        print(json.dumps(their_defaults(), default=str))
        return
    if not given.peer_python:
        arguments.error("--peer-python: missing; expected the python of an environment with llm-foundry")
    found = compare(ask_peer(given.peer_python))
    unlisted = print_differences(found)
    sys.exit(1 if unlisted else 0)


def ask_peer(python: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"}
    command = [python, str(Path(__file__).resolve()), "--peer"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{python}: the peer ended with code {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(theirs: Mapping[str, Any]) -> dict[str, str]:
    """Return key -> effect of LLM Foundry's default here, for defaults that have an effect."""
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        for key, value in theirs.items():
            if key in NOT_IN_FILES:
                continue
            load, base, path = _where_to_say(key)
            said = _laid_over(base, path, value)
            unsaid = _laid_over(base, path.rpartition(".")[0], {})
            key = f"{key.partition('[')[0]}.{key.rpartition('.')[2]}" if "[" in key else key
            try:
                before, after = load(unsaid, Path(name)), load(said, Path(name))
            except ValueError as error:
                found[key] = f"{_short(value)} is refused: {str(error).partition('run.yaml: ')[2]}"
                continue
            changed = [part for part in {**before, **after} if before.get(part) != after.get(part)]
            if changed:
                here = ", ".join(f"{part} is {_short(before.get(part))} here" for part in changed)
                found[key] = f"{_short(value)} there; {here}"
    return found


def print_differences(found: Mapping[str, str]) -> list[str]:
    """Print each difference and its reason. Returns differences without a reason, and reasons without a difference."""
    for key, what in found.items():
        print(f"{key}: {what}\n    {INTENDED.get(key, 'UNLISTED')}")
    wrong = [key for key in found if key not in INTENDED] + [key for key in INTENDED if key not in found]
    print(f"\n{len(found)} defaults differ; " + (f"not as listed: {', '.join(wrong)}" if wrong else "all are listed"))
    return wrong


# ------------------------------------------------------------------------------------------------------- our half


def _where_to_say(key: str) -> tuple[Callable[[Any, Path], dict[str, Any]], dict[str, Any], str]:
    """Return the function that reads a YAML, a YAML without the key, and the key's name in it."""
    if key.startswith("eval."):
        return _resolved_evaluation, EVAL_BASE, key.removeprefix("eval.")
    base = json.loads(json.dumps(BASE))
    block, _, kind = key.partition("[")
    kind, _, last = kind.partition("].")
    if block == "optimizer" and kind:
        base["optimizer"] = {"name": kind, "lr": 1.0}
    if block == "scheduler" and kind:
        base["scheduler"] = {"name": kind, "t_warmup": "100ba"}
        base["scheduler"] |= {"t_scale": "100ba"} if kind == "inv_sqrt_with_warmup" else {}
    if ".streams." in key:
        base["train_loader"]["dataset"] = {"streams": {"web": {"local": "data"}}}
    return _resolved, base, f"{block}.{last}" if kind else key


def _resolved(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    from llmfoundry_lite.config.load_train import load_train_config
    from llmfoundry_lite.config.schema import as_dict

    return _flat(as_dict(load_train_config([_write(values, folder)], {}).config))


def _resolved_evaluation(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    from llmfoundry_lite.config.load_eval import load_eval_config

    return _flat(dataclasses.asdict(load_eval_config([_write(values, folder)]).config))


def _write(values: dict[str, Any], folder: Path) -> str:
    path = folder / "run.yaml"
    path.write_text(json.dumps(values))  # JSON is YAML too
    return str(path)


def _laid_over(base: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return `base` with a value at `path`. An empty block, {}, leaves an existing one as it is."""
    values = json.loads(json.dumps(base))
    block, *keys = values, *filter(None, path.split("."))
    for key in keys[:-1]:
        block = block.setdefault(key, {})
    if keys and not (value == {} and isinstance(block.get(keys[-1]), dict)):
        block[keys[-1]] = value
    return values


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(values, dict) or not values:
        return {prefix.removesuffix("."): values}
    return {key: leaf for name, block in values.items() for key, leaf in _flat(block, f"{prefix}{name}.").items()}


def _short(value: Any) -> str:
    return json.dumps(value, default=str)


# ----------------------------------------------------------------------------------------------------- their half


def their_defaults() -> dict[str, Any]:
    """Return key -> default. `optimizer[lion].lr` is for one kind of optimizer."""
    found = {}
    for block, names in SOURCES.items():
        for name in names:
            for key, default in _defaults_of(_find(name)).items():
                found[f"{block}.{key}" if block else key] = default
    defaults = _find("llmfoundry.models.utils.config_defaults")
    for block in ("attn_config", "ffn_config", "init_config"):
        found |= {f"model.{block}.{key}": value for key, value in getattr(defaults, f"{block}_defaults").items()}
    found["model.ffn_config.ffn_act_fn"] = _find("llmfoundry.models.layers.ffn._FFN_ACT_FN_DEFAULT")
    registry = _find("llmfoundry.registry")
    for block, kinds, names in (
        ("optimizer", registry.optimizers, ("decoupled_adamw", "decoupled_lionw")),
        ("scheduler", registry.schedulers, SCHEDULES),
    ):
        for kind in names:
            found |= {f"{block}[{kind}].{key}": value for key, value in _defaults_of(kinds.get(kind)).items()}
    for block, kinds, names in (
        ("algorithms", registry.algorithms, ("gradient_clipping",)),
        ("callbacks", registry.callbacks, ("speed_monitor", "lr_monitor", "memory_monitor", "runtime_estimator")),
        ("loggers", registry.loggers, ("wandb", "tensorboard")),
    ):
        for kind in names:
            found |= {f"{block}.{kind}.{key}": value for key, value in _defaults_of(kinds.get(kind)).items()}
    return found


SCHEDULES = ("constant_with_warmup", "cosine_with_warmup", "linear_decay_with_warmup", "inv_sqrt_with_warmup")
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
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        return getattr(importlib.import_module(module), attribute)


def _defaults_of(source: Any) -> dict[str, Any]:
    """Return the defaults of a dataclass, class or function. Keys without a default are left out."""
    if dataclasses.is_dataclass(source):
        fields = dataclasses.fields(source)
        plain = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING and f.default != "???"}
        made = {f.name: f.default_factory() for f in fields if f.default_factory is not dataclasses.MISSING}
        return plain | made
    if inspect.isclass(source) and source.__name__ == "InverseSquareRootWithWarmupScheduler":
        source = source.__mro__[1]  # the class that the marker "experimental" wraps
    parameters = inspect.signature(source).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


if __name__ == "__main__":
    main()
