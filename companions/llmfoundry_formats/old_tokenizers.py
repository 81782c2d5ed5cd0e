"""Tokenizers without `tokenizer.json`: SentencePiece and older layouts, as transformers converts them."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

from llmfoundry_lite.data.tokenizer import (
    GENERATION_FILE,
    TOKENIZER_FILE,
    Tokenizer,
    read_folder,
    tokenizer_from_files,
)
from llmfoundry_lite.errors import DataError


def convert_with_transformers(name: str, read: Mapping[str, bytes]) -> Tokenizer:
    """Let `transformers` convert a tokenizer without `tokenizer.json` (SentencePiece and older layouts).

    Of the files that were `read`, it leaves GENERATION_FILE out.
    """
    try:
        from transformers import AutoTokenizer

        with tempfile.TemporaryDirectory() as folder:
            AutoTokenizer.from_pretrained(name, trust_remote_code=False).save_pretrained(folder)
            files = read_folder(Path(folder))
    except Exception as error:  # it raises almost anything for a folder that holds no tokenizer
        if "trust_remote_code" in str(error):
            raise DataError(
                f"tokenizer {name} needs code of its own, which is not run; expected a folder with a {TOKENIZER_FILE}"
            ) from None
        reason = str(error).strip().split("\n")[0]
        raise DataError(
            f"tokenizer {name} has no {TOKENIZER_FILE} and transformers cannot load it: {reason}"
        ) from error
    if TOKENIZER_FILE not in files:
        raise DataError(
            f"tokenizer {name} has no {TOKENIZER_FILE}, and transformers writes none for its kind; choose a tokenizer "
            f"with a {TOKENIZER_FILE}"
        )
    files |= {file: content for file, content in read.items() if file == GENERATION_FILE}
    return tokenizer_from_files(files, name)
