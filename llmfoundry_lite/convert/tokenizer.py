"""Finds the tokenizer that a model was trained with: the one that its configuration names, or the copy beside its
checkpoint."""

from typing import Any

from llmfoundry_lite.checkpoint.paths import read_tokenizer
from llmfoundry_lite.checkpoint.store import Checkpoint
from llmfoundry_lite.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_files
from llmfoundry_lite.data.tokenizer_files import FILES, is_local_or_cached
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.own_code import is_own
from llmfoundry_lite.ranks.codec import shorten

HOW_TO_NAME_IT = (
    "name the place of the right one: --tokenizer … to export, tokenizer=… to evaluate, tokenizer.name=… to show data"
)


def find_tokenizer(
    config: dict[str, Any], checkpoint: Checkpoint | None, location: str, name_by_user: str | None = None
) -> Tokenizer | None:
    """Find the tokenizer that a model was trained with.

    config: the recorded configuration, which may name a tokenizer.
    checkpoint: the model's checkpoint, which may record the tokenizer's fingerprint and have a copy beside it; None if
        there is none.
    location: the weights, for errors.
    name_by_user: a tokenizer that the user names, in place of all others.

    Tokenizers are tried in this order: the one that the user names, the one that `config` names, if it is on this
    machine, and the copy beside the checkpoint. The first with the recorded fingerprint is returned. If no fingerprint
    is recorded, a named tokenizer is taken unchecked, and the copy is not taken. Code that `config` names is never run.

    Returns None if there is no tokenizer. Raises DataError if there are only tokenizers with other fingerprints.
    """
    fingerprint = None
    if checkpoint is not None:
        fingerprint = checkpoint.manifest.fingerprints.get("tokenizer")
    different_tokenizers: list[str] = []

    # Try the tokenizer that the user or the configuration names. Only the user's may be downloaded.
    name = name_by_user or name_of_tokenizer(config, location)
    is_at_hand = name is not None and not is_own(name) and is_local_or_cached(name)
    if name is not None and (name_by_user or is_at_hand):
        tokenizer = load_tokenizer(name)
        if fingerprint in (None, tokenizer.fingerprint):
            return tokenizer
        different_tokenizers.append(f"{name} ({tokenizer.fingerprint})")

    # Try the copy beside the checkpoint.
    if checkpoint is not None and not name_by_user:
        copied_files = read_tokenizer(checkpoint, FILES)
        if copied_files:
            tokenizer = tokenizer_from_files(copied_files, f"beside {location}")
            if fingerprint == tokenizer.fingerprint:
                return tokenizer
            different_tokenizers.append(f"the copy beside it ({tokenizer.fingerprint})")

    if different_tokenizers and fingerprint is not None:
        raise DataError(
            f"{location} was trained with another tokenizer ({fingerprint}) than {' and '.join(different_tokenizers)}; "
            f"{HOW_TO_NAME_IT}"
        )
    return None


def name_of_tokenizer(config: dict[str, Any], location: str) -> str | None:
    """Return the name of the tokenizer in a recorded configuration, or None if it has none.

    The configuration has either a block `tokenizer` with a key `name`, or the name itself under `tokenizer`. Raises
    DataError if the name is not text, because the record may come from a stranger. `location` names the weights in the
    error.
    """
    block = config.get("tokenizer")
    name = block.get("name") if isinstance(block, dict) else block
    if name is None:
        return None
    is_text = isinstance(name, str) and "\0" not in name  # no path has a NUL character
    if not is_text:
        raise DataError(
            f"{location}: its configuration has {shorten(name)} for the tokenizer's name, expected text; "
            f"{HOW_TO_NAME_IT}"
        )
    return name
