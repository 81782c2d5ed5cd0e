"""Folders of models as others export them: loaded, or refused in one line."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from llmfoundry_lite.errors import UserError
from llmfoundry_lite.evaluation.models import locate_and_load_model
from llmfoundry_lite.models.mpt import MPT

VOCAB = 320
OWN_CODE = """
from pathlib import Path
Path({path!r}).write_text("ran")
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast
class MyConfig(GPTNeoXConfig):
    model_type = "mine"
class MyModel(GPTNeoXForCausalLM):
    config_class = MyConfig
class MyTokenizer(PreTrainedTokenizerFast):
    pass
"""
"""A module that tells, in the file {path}, when it is imported."""


def write_foundry(folder: Path, model: MPT, **changes) -> None:
    """A folder as LLM Foundry writes it, with a config.json that names code of its own."""
    code = {"AutoConfig": "configuration_mpt.MPTConfig", "AutoModelForCausalLM": "modeling_mpt.MPTForCausalLM"}
    marks = {"model_type": "mpt", "architectures": ["MPTForCausalLM"], "auto_map": code, "init_device": "cpu"}
    content = asdict(model.config)
    for block in (content, content["attn_config"], content["ffn_config"]):
        for key in ("kwargs", "norm_kwargs", "loss_kwargs", "mup"):  # ours alone
            block.pop(key, None)
    (folder / "config.json").write_text(json.dumps({**content, **marks, **changes}))
    save_file(model.state_dict(), folder / "model.safetensors")


def edit_config(folder: Path, **changes) -> None:
    hf_config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**hf_config, **changes}))


def load(folder: Path):
    return locate_and_load_model(str(folder), device=torch.device("cpu")).model


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as error:
        load(folder)
    assert "\n" not in str(error.value)
    return str(error.value)
