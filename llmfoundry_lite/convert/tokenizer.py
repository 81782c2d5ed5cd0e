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


def find_tokenizer(
    config: dict[str, Any], checkpoint: Checkpoint | None, where: str, asked_for: str | None = None
) -> Tokenizer | None:
    """Find the tokenizer that `config` names, if it is on this machine, else the copy beside the checkpoint.

    Returns None where there is neither. `asked_for` names one to load instead. Raises DataError when its fingerprint
    differs from the checkpoint's; without a fingerprint nothing is compared. `where` names the weights in errors.
    """
    trained_with = checkpoint.manifest.fingerprints.get("tokenizer") if checkpoint is not None else None
    name, others = asked_for or name_of_tokenizer(config, where), []
    if name is not None and (asked_for or is_local_or_cached(name)):
        found = load_tokenizer(name)
        if trained_with in (None, found.fingerprint):
            return found
        others.append(f"{name} ({found.fingerprint})")
    if checkpoint is not None and not asked_for and (copy := read_tokenizer(checkpoint, FILES)):
        found = tokenizer_from_files(copy, f"beside {where}")
        if trained_with == found.fingerprint:
            return found
        others.append(f"the copy beside it ({found.fingerprint})")
    if others and trained_with is not None:
        raise DataError(
            f"{where} was trained with another tokenizer ({trained_with}) than {' and '.join(others)}; name the place "
            "of the right one: --tokenizer … to export, tokenizer=… to evaluate, tokenizer.name=… to show data"
        )
    return None


def name_of_tokenizer(config: dict[str, Any], where: str) -> str | None:
    """Return the name in a recorded configuration; None without one. Raises DataError for what is no name."""
    block = config.get("tokenizer")
    name = block.get("name") if isinstance(block, dict) else block
    if name is not None and (not isinstance(name, str) or "\0" in name):
        raise DataError(
            f"{where}: its configuration has {shorten(name)} for the tokenizer's name, expected text; name the place "
            "of the right one: --tokenizer … to export, tokenizer=… to evaluate, tokenizer.name=… to show data"
        )
    return name
