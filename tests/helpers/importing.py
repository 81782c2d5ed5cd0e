"""Weights from elsewhere, to be imported."""

from pathlib import Path

import pytest

from llmfoundry_lite.cli import main
from llmfoundry_lite.convert.huggingface import export_model
from llmfoundry_lite.convert.to_checkpoint import import_checkpoint
from llmfoundry_lite.errors import CheckpointError, ExportError
from tests.helpers.models import ALIBI, random_model
from tests.helpers.tiny import build_tokenizer


def run(capsys, *arguments):
    code = main.run(["checkpoint", *map(str, arguments)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def folder_of(path, config=ALIBI, dtype="fp32"):
    build_tokenizer(path.parent / "tokenizer")
    model = random_model(config)
    export_model(model.state_dict(), config, path, tokenizer_folder=path.parent / "tokenizer", dtype=dtype)
    return model


def refusal(source, out, **options):
    with pytest.raises((CheckpointError, ExportError)) as error:
        import_checkpoint(str(source), str(out), **options)
    assert "\n" not in str(error.value)
    assert not (Path(out) / "ba0").exists()
    return str(error.value)
