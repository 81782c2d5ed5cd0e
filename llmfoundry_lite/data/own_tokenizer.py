"""Tokenizers that code of the user's own builds, `python:package.module:Thing`: the files of what it returns.

Only a launch whose YAML names the code, and `data prepare --tokenizer`, run it. They take the files of the tokenizer.
Data sets and checkpoints carry these, so reading one needs no code.
"""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from llmfoundry_lite.data.tokenizer_files import END_OF_TEXT, TOKENIZER_FILE, read_folder
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.own_code import call_object, errors_named, is_trusted

HOW_TO_HAVE_FILES = (
    "return a tokenizers.Tokenizer, or a PreTrainedTokenizerFast of transformers around one (tokenizer_object=…)"
)

_files_by_call: dict[tuple[str, str], dict[str, bytes]] = {}
"""Files of the tokenizers that this process has built, by name and arguments."""


def build_own_files(name: str, kwargs: Mapping[str, Any]) -> dict[str, bytes]:
    """Call code of the user's own, `Thing(**kwargs)`, and return the files of the tokenizer that it builds, by name.

    It is called once for each name and arguments in a process. Its result is a tokenizer of transformers whose
    `save_pretrained` writes a tokenizer.json, or a `tokenizers.Tokenizer`.

    Raises DataError if the name is not trusted in this process, or for another result, and the errors of `call_object`
    for code that is missing, takes other arguments or fails itself.
    """
    if not is_trusted(name):
        raise DataError(
            f"tokenizer {name} is code, which only a launch whose YAML names it and `data prepare --tokenizer` import; "
            f"give a folder with its {TOKENIZER_FILE}, such as the folder `tokenizer` of the data set"
        )
    call = (name, json.dumps(kwargs, sort_keys=True, default=str))
    if call not in _files_by_call:
        built = call_object(name, "tokenizer", "tokenizer", kwargs)
        with tempfile.TemporaryDirectory() as folder:
            _save(built, name, Path(folder))
            _files_by_call[call] = read_folder(Path(folder))
    return _files_by_call[call]


def _save(built: Any, name: str, folder: Path) -> None:
    """Write the files of a tokenizer into a folder. `name` is that of the code that has built it, for errors.

    Raises DataError for an object that is no tokenizer, or that writes no tokenizer.json.
    """
    if isinstance(built, tokenizers.Tokenizer):
        if built.token_to_id(END_OF_TEXT) is None:
            raise DataError(
                f"tokenizer {name} returns a tokenizers.Tokenizer without {END_OF_TEXT}, which separates documents; "
                "add that special token, or return a PreTrainedTokenizerFast of transformers with its eos_token"
            )
        built.save(os.fspath(folder / TOKENIZER_FILE))
        return
    if not hasattr(built, "save_pretrained"):
        raise DataError(
            f"tokenizer {name} returns a {type(built).__name__}, which is no tokenizer; {HOW_TO_HAVE_FILES}"
        )
    with errors_named(f"tokenizer.name: {name}: save_pretrained"):
        built.save_pretrained(os.fspath(folder))
    if not (folder / TOKENIZER_FILE).is_file():
        raise DataError(
            f"tokenizer {name} returns a {type(built).__name__}, whose save_pretrained writes no {TOKENIZER_FILE}, as "
            f"those of slow tokenizers; {HOW_TO_HAVE_FILES}"
        )
