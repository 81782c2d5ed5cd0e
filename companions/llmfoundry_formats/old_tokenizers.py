"""Tokenizers without `tokenizer.json`: SentencePiece and older layouts, as transformers converts them."""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llmfoundry_lite.bounded import MAX_TOKENIZER_BYTES, parse_json, read_at_most
from llmfoundry_lite.data.tokenizer import (
    GENERATION_FILE,
    TOKENIZER_FILE,
    Tokenizer,
    read_folder,
    tokenizer_from_files,
)
from llmfoundry_lite.data.tokenizer_bounds import MAX_IDS, is_panic, problems_of_ids
from llmfoundry_lite.errors import DataError

READ_FILES = ("*.json", "*.txt", "*.model*", "*.tiktoken", "*.jinja", "*.bpe", "*.vocab")
"""Files of a folder that transformers' tokenizers read."""
ID_FILES = ("vocab.json", "added_tokens.json")
"""Files that map each token to its id."""


def convert_with_transformers(name: str, read: Mapping[str, bytes]) -> Tokenizer:
    """Let `transformers` convert a tokenizer without `tokenizer.json` (SentencePiece and older layouts).

    transformers leaves GENERATION_FILE out, so that is taken from the files that were `read`.
    """
    if os.path.isdir(name):
        check_folder(Path(name), name)
    try:
        from transformers import AutoTokenizer

        with tempfile.TemporaryDirectory() as folder:
            AutoTokenizer.from_pretrained(name, trust_remote_code=False).save_pretrained(folder)
            files = read_folder(Path(folder))
    except BaseException as error:  # it raises almost anything for a folder that holds no tokenizer
        if not isinstance(error, Exception) and not is_panic(error):
            raise
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


def check_folder(folder: Path, name: str) -> None:
    """Raise DataError for files that are too large to be a tokenizer's, or that name ids that are too large.

    transformers reads whole files, and makes lists up to the largest id. A file that cannot be read is left to it.
    """
    for path in sorted({path for pattern in READ_FILES for path in folder.glob(pattern)}):
        if path.is_dir():
            continue
        try:
            content = read_at_most(path, MAX_TOKENIZER_BYTES, "a tokenizer")
        except OSError as error:
            raise DataError(f"tokenizer {name}: {path.name} cannot be read ({error})") from error
        if path.suffix == ".txt" and content.count(b"\n") > MAX_IDS:
            raise DataError(f"tokenizer {name}: {path.name} has more than {MAX_IDS:,} lines; choose another tokenizer")
        if path.suffix == ".json":
            for problem in problems_of_ids(_ids_in(path.name, content)):
                raise DataError(f"tokenizer {name}: {path.name}: {problem}; choose another tokenizer")


def _ids_in(file: str, content: bytes) -> Iterator[int]:
    """Yield the ids that a file names, if it can be read."""
    with contextlib.suppress(ValueError):
        values: Any = parse_json(content)
        if not isinstance(values, dict):
            return
        if file in ID_FILES:
            yield from (value for value in values.values() if isinstance(value, int))
        decoder = values.get("added_tokens_decoder")
        yield from (int(key) for key in decoder if key.isdecimal()) if isinstance(decoder, dict) else ()
