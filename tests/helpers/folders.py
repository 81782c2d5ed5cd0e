"""Folders of models as others export them: loaded, or refused in one line."""

import json
from pathlib import Path

import pytest
import torch

from llmfoundry_lite.errors import UserError
from llmfoundry_lite.evaluation.models import load_subject

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


def edit_config(folder: Path, **changes) -> None:
    hf_config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**hf_config, **changes}))


def load(folder: Path):
    return load_subject(str(folder), device=torch.device("cpu")).model


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as error:
        load(folder)
    assert "\n" not in str(error.value)
    return str(error.value)
