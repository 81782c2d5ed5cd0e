from pathlib import Path

import pytest

from llmfoundry_lite.data.tokenizer import load_tokenizer, train_tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["the cat sat on a mat"] * 3, 300).save(folder)
    return folder


@pytest.fixture
def folder(tmp_path, tokenizer_folder) -> Path:
    """With a tokenizer, and no model yet."""
    load_tokenizer(tokenizer_folder).save(tmp_path / "model")
    return tmp_path / "model"
