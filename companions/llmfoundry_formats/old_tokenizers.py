"""Tokenizers without `tokenizer.json`, which transformers converts: SentencePiece and older formats.

The core reads a `tokenizer.json` itself. This module lets transformers make one, from files whose sizes are checked
first, because transformers reads whatever is there. Code in a tokenizer's folder is never run.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llmfoundry_lite.bounded import MAX_TOKENIZER_BYTES, parse_json, read_at_most
from llmfoundry_lite.data.tokenizer import Tokenizer, tokenizer_from_files
from llmfoundry_lite.data.tokenizer_bounds import MAX_IDS, is_panic, problems_of_ids
from llmfoundry_lite.data.tokenizer_files import GENERATION_FILE, TOKENIZER_FILE, read_folder
from llmfoundry_lite.errors import DataError

READ_FILES = ("*.json", "*.txt", "*.model*", "*.tiktoken", "*.jinja", "*.bpe", "*.vocab")
"""Files of a folder that transformers' tokenizers read."""
ID_FILES = ("vocab.json", "added_tokens.json")
"""Files that map each token to its id."""


def convert_with_transformers(name: str, read: Mapping[str, bytes]) -> Tokenizer:
    """Convert a tokenizer without `tokenizer.json` by loading it with transformers and saving it again.

    name: a local folder, or a name on the Hub.
    read: contents of the tokenizer's files that the caller has read already, by file name. GENERATION_FILE is taken
        from them, because transformers does not save it.

    Raises DataError if the files are too large, or if transformers cannot load or convert them.
    """
    if os.path.isdir(name):
        check_folder(Path(name), name)
    try:
        from transformers import AutoTokenizer

        with tempfile.TemporaryDirectory() as folder:
            AutoTokenizer.from_pretrained(name, trust_remote_code=False).save_pretrained(folder)
            files = read_folder(Path(folder))
    except BaseException as error:  # almost anything, for a folder without a tokenizer
        # A panic of the tokenizers library is not an Exception. Ctrl-C and SystemExit pass.
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        if "trust_remote_code" in str(error):
            raise DataError(
                f"tokenizer {name} needs its own code, which is not run; expected a folder with a {TOKENIZER_FILE}"
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
    if GENERATION_FILE in read:
        files[GENERATION_FILE] = read[GENERATION_FILE]
    return tokenizer_from_files(files, name)


def check_folder(folder: Path, name: str) -> None:
    """Raise DataError for files that would take too much memory: large ones, and those with large token ids.

    transformers reads whole files, and makes lists with an entry for each id up to the largest. A file that cannot be
    parsed is left to transformers to report. `name` is the tokenizer's, for errors.
    """
    paths: set[Path] = set()
    for pattern in READ_FILES:
        paths.update(folder.glob(pattern))

    for path in sorted(paths):
        if path.is_dir():
            continue
        try:
            content = read_at_most(path, MAX_TOKENIZER_BYTES, "a tokenizer")
        except OSError as error:
            raise DataError(f"tokenizer {name}: {path.name} cannot be read ({error})") from error
        # A vocab.txt has a token in each line.
        if path.suffix == ".txt" and content.count(b"\n") > MAX_IDS:
            raise DataError(f"tokenizer {name}: {path.name} has more than {MAX_IDS:,} lines; choose another tokenizer")
        if path.suffix == ".json":
            for problem in problems_of_ids(_token_ids_in(path.name, content)):
                raise DataError(f"tokenizer {name}: {path.name}: {problem}; choose another tokenizer")


def _token_ids_in(file_name: str, content: bytes) -> Iterator[int]:
    """Yield the token ids in a JSON file of a tokenizer. Yields nothing if it cannot be parsed or is not an object.

    A vocab.json is {"the": 262}. A tokenizer_config.json may have {"added_tokens_decoder": {"50256": {…}}}.
    """
    with contextlib.suppress(ValueError):
        settings: Any = parse_json(content)
        if not isinstance(settings, dict):
            return
        if file_name in ID_FILES:
            yield from (token_id for token_id in settings.values() if isinstance(token_id, int))
        added_tokens = settings.get("added_tokens_decoder")
        if isinstance(added_tokens, dict):
            yield from (int(key) for key in added_tokens if key.isdecimal())
