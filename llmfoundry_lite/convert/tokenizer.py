"""The tokenizer of weights: the one that their configuration names, or the copy beside their checkpoint."""

from typing import Any

from llmfoundry_lite.checkpoint.paths import read_tokenizer
from llmfoundry_lite.checkpoint.store import Checkpoint
from llmfoundry_lite.data.tokenizer import (
    FILES,
    Tokenizer,
    is_local_or_cached,
    load_tokenizer,
    tokenizer_from_files,
)
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.ranks.codec import shorten

HOW_TO_NAME_IT = (
    "name the place of the right one: --tokenizer … to export, tokenizer=… to evaluate, tokenizer.name=… to show data"
)


def find_tokenizer(
    config: dict[str, Any], checkpoint: Checkpoint | None, location: str, name_by_user: str | None = None
) -> Tokenizer | None:
    """Find the tokenizer that a model was trained with.

    It is the one that the recorded `config` names, if that is on this machine, else the copy beside the checkpoint.
    If the user names one (`name_by_user`), it is that. A tokenizer must have the fingerprint that the checkpoint
    records; if it records none, the one that `config` or the user names is taken unchecked, and the copy is not.

    `location` names the weights in errors. Returns None if there is no tokenizer. Raises DataError if there are only
    others.
    """
    fingerprint = None
    if checkpoint is not None:
        fingerprint = checkpoint.manifest.fingerprints.get("tokenizer")
    others = []

    name = name_by_user or name_of_tokenizer(config, location)
    if name is not None and (name_by_user or is_local_or_cached(name)):
        tokenizer = load_tokenizer(name)
        if fingerprint in (None, tokenizer.fingerprint):
            return tokenizer
        others.append(f"{name} ({tokenizer.fingerprint})")

    if checkpoint is not None and not name_by_user:
        copied_files = read_tokenizer(checkpoint, FILES)
        if copied_files:
            tokenizer = tokenizer_from_files(copied_files, f"beside {location}")
            if fingerprint == tokenizer.fingerprint:
                return tokenizer
            others.append(f"the copy beside it ({tokenizer.fingerprint})")

    if others and fingerprint is not None:
        raise DataError(
            f"{location} was trained with another tokenizer ({fingerprint}) than {' and '.join(others)}; "
            f"{HOW_TO_NAME_IT}"
        )
    return None


def name_of_tokenizer(config: dict[str, Any], location: str) -> str | None:
    """Return the name of the tokenizer in a recorded configuration; None if it has none.

    Raises DataError, with `location` in front, if the name is not text: the record may be anybody's.
    """
    block = config.get("tokenizer")
    name = block.get("name") if isinstance(block, dict) else block
    if name is not None and (not isinstance(name, str) or "\0" in name):
        raise DataError(
            f"{location}: its configuration has {shorten(name)} for the tokenizer's name, expected text; "
            f"{HOW_TO_NAME_IT}"
        )
    return name
