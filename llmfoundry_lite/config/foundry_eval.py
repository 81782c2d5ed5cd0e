"""LLM Foundry's evaluation YAMLs in our words: models as a list, precision, the gauntlet's file. No torch."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmfoundry_lite.config.layers import Layer, read_layers, source_of
from llmfoundry_lite.errors import ConfigError

PRECISIONS = {"amp_bf16": "bf16", "amp_fp16": "fp16"}

EVAL_WITHOUT_EFFECT = {
    "seed": "nothing is random but the choice of examples, which is a task's: fewshot_random_seed",
    "device_eval_batch_size": "device_batch_tokens bounds a batch; no result depends on it",
    "fsdp_config": "each rank has the whole model; fsdp=true shards it, if it is an MPT, GPT-2 or Llama",
    "eval_subset_num_batches": "it counts batches of eval_loader",
    **dict.fromkeys(("python_log_level", "console_log_interval"), "there is nothing to log but progress"),
    **dict.fromkeys(("log_config", "metadata"), "results say what was evaluated"),
}
"""Accepted, ignored, and said so."""


def translate_evaluation(values: dict[str, Any], layers: Sequence[Layer]) -> list[str]:
    """Put LLM Foundry's words in `values` into ours, in place. Returns a note for each that has no effect.

    Raises ConfigError for a model that is not evaluated here.
    """
    notes = []
    for key, reason in EVAL_WITHOUT_EFFECT.items():
        if values.pop(key, None) is not None:
            notes.append(f"{source_of(key, layers)}: {key} has no effect: {reason}")
    for theirs, ours in (("icl_tasks_str", "icl_tasks"), ("eval_gauntlet_str", "eval_gauntlet")):
        if theirs in values and values.get(ours) is None:
            values[ours] = values.pop(theirs)
    if values.get("precision") in PRECISIONS:
        values["precision"] = PRECISIONS[values["precision"]]
    if isinstance(values.get("eval_gauntlet"), str):
        values["eval_gauntlet"] = _read_gauntlet(values["eval_gauntlet"])
    if isinstance(values.get("models"), list):
        for number, entry in enumerate(values["models"]):
            if other := _other_tokenizer(entry):
                where = f"{source_of('models', layers)}: models[{number}].tokenizer {other!r}"
                notes.append(f"{where} has no effect: a model has its own; tokenizer=PATH names one for all of them")
        values["models"] = _name_models(values["models"], layers)
    return notes


def _read_gauntlet(path: str) -> Any:
    """What a file of LLM Foundry's has under `eval_gauntlet`, as its task files have theirs under `icl_tasks`."""
    layer = read_layers([path])[0]
    return layer.values.get("eval_gauntlet", layer.values)


def _name_models(models: Sequence[Any], layers: Sequence[Layer]) -> dict[str, str]:
    """`[{model_name, model: {name, pretrained_model_name_or_path}, tokenizer, load_path}]` -> name -> where it is."""
    found: dict[str, str] = {}
    for number, entry in enumerate(models):
        path = f"models[{number}]"
        where = _find_model(entry)
        if where is None:
            name = entry.get("model_name") if isinstance(entry, dict) else entry
            raise ConfigError(
                f"{source_of('models', layers)}: {path}: {name!r} is not evaluated here; expected an MPT's load_path, "
                "or model.pretrained_model_name_or_path under hf_causal_lm, in no 8 bits and without adapters"
            )
        name = re.sub(r"[^\w.\-]", "_", str(entry.get("model_name") or where).rstrip("/").rsplit("/", 1)[-1])
        if name in found:
            raise ConfigError(f"{source_of('models', layers)}: {path}: there are two models named {name}; rename one")
        found[name] = where
    return found


def _other_tokenizer(entry: Any) -> str | None:
    """The tokenizer's name where it is not the model's own."""
    model, tokenizer = (entry.get(key) if isinstance(entry, dict) else None for key in ("model", "tokenizer"))
    if not isinstance(tokenizer, dict) or not tokenizer.get("name"):
        return None
    own = model.get("pretrained_model_name_or_path") if isinstance(model, dict) else None
    return None if tokenizer["name"] == own else str(tokenizer["name"])


def _find_model(entry: Any) -> str | None:
    model = entry.get("model") if isinstance(entry, dict) else None
    if not isinstance(model, dict):
        return None
    if entry.get("load_path"):
        return str(entry["load_path"])
    pretrained = model.get("pretrained_model_name_or_path")
    if model.get("name") != "hf_causal_lm" or not pretrained or model.get("peft_config") or model.get("load_in_8bit"):
        return None
    is_folder = re.match(r"[./~]|\w+:", str(pretrained)) or Path(str(pretrained)).is_dir()
    return str(pretrained) if is_folder else f"hf:{pretrained}"
