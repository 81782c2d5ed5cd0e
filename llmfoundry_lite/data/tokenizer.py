"""Tokenizers: loading, training, encoding, and a fingerprint of what they do.

Everything goes through the `tokenizers` library and `tokenizer.json`. A companion converts a tokenizer that has no
`tokenizer.json` yet. `tokenizer_files.py` finds and reads the files, and `tokenizer_bounds.py` refuses a tokenizer that
could fill the memory.

`load_tokenizer` and `train_tokenizer` build a `Tokenizer`.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from llmfoundry_lite import companions
from llmfoundry_lite.config.data_schema import TokenizerConfig
from llmfoundry_lite.data.own_tokenizer import build_own_files
from llmfoundry_lite.data.tokenizer_bounds import check_bounds, is_panic
from llmfoundry_lite.data.tokenizer_files import (
    CONFIG_FILE,
    END_OF_TEXT,
    GENERATION_FILE,
    SPECIAL_TOKENS_FILE,
    TOKENIZER_FILE,
    as_list,
    check_has_vocabulary,
    download_from_hub,
    is_local_or_cached,
    looks_like_a_path,
    read_config,
    read_file,
    read_folder,
    read_generation_settings,
    token_text,
)
from llmfoundry_lite.errors import ConfigError, DataError
from llmfoundry_lite.own_code import is_own

MIN_VOCAB_SIZE = 257
"""256 byte values and the end-of-text token. With fewer ids, byte-level BPE cannot encode every document."""

PART_CHARACTERS = 1_000_000
"""Length of the parts in which a long text is encoded where that changes no token. The library takes 114 bytes of
memory for each character."""
LETTER_BEFORE_SPACE = re.compile("[A-Za-z](?= )")
"""Point at which a text may be cut: no alternative of GPT-2's regular expression joins a letter and a space after
it."""


def find_fingerprints(config: TokenizerConfig) -> dict[str, str]:
    """Return `{"tokenizer": fingerprint}`, as checkpoints record it; empty if the tokenizer is not on this machine.

    `config` is the block of a run. The network is not used.
    """
    if not is_local_or_cached(config.name):
        return {}
    return {"tokenizer": load_configured_tokenizer(config).fingerprint}


def load_configured_tokenizer(config: TokenizerConfig) -> "Tokenizer":
    """Load the tokenizer of a run, by the block of its configuration. Raises the errors of `load_tokenizer`."""
    return load_tokenizer(config.name, config.kwargs)


def load_tokenizer(name_or_folder: str | Path, kwargs: Mapping[str, Any] | None = None) -> "Tokenizer":
    """Load a tokenizer from a local folder in Hugging Face layout, from the Hub by name, or by code of the user's own.

    A folder that exists wins over a Hub name. Code, `python:package.module:Thing`, runs only if this process trusts it,
    with the arguments `kwargs`, which other tokenizers do not get.

    Raises DataError when there is no such tokenizer, when it cannot be read, when the Hub cannot be reached, and when
    it has no end-of-text token to put between documents; for code, also the errors of `build_own_files`.
    """
    # Read the files.
    name = str(name_or_folder)
    if os.path.isdir(name):
        check_has_vocabulary(Path(name))
        files = read_folder(Path(name))
    elif is_own(name):
        files = build_own_files(name, kwargs or {})
    elif looks_like_a_path(name):
        raise DataError(f"tokenizer folder {name} does not exist; give a folder with a {TOKENIZER_FILE}, or a Hub name")
    else:
        files = {file: read_file(path) for file, path in download_from_hub(name).items()}

    # Build the tokenizer. A companion converts older formats.
    if TOKENIZER_FILE in files:
        return tokenizer_from_files(files, name)
    try:
        needed_for = f"tokenizers without {TOKENIZER_FILE}"
        convert = companions.load("llmfoundry_formats.old_tokenizers:convert_with_transformers", needed_for)
    except ConfigError as error:
        raise DataError(f"tokenizer {name}: {error}") from error
    return convert(name, files)


def tokenizer_from_files(files: Mapping[str, bytes], name: str) -> "Tokenizer":
    """Build a tokenizer from its files.

    `files` are their contents by file name, with at least tokenizer.json. `name` is the tokenizer's folder or Hub name.
    Raises DataError, which begins with `name`, for damaged files and for a tokenizer that exceeds a bound.
    """
    try:
        backend = tokenizers.Tokenizer.from_buffer(files[TOKENIZER_FILE])
        check_bounds(backend, name)
    except DataError:
        raise
    except BaseException as error:
        # If anything is wrong with the file, the library raises a bare Exception, or its Rust code panics.
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise DataError(f"tokenizer {name}: {TOKENIZER_FILE} cannot be read ({error})") from error
    return build_tokenizer(name, backend, read_config(files, name), read_generation_settings(files, name))


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> "Tokenizer":
    """Train a byte-level BPE tokenizer with one special token, `<|endoftext|>`, which gets id 0.

    The same documents give the same fingerprint with any number of threads. `vocab_size` counts all ids; the tokenizer
    has fewer if the documents have no more pairs to merge. Raises DataError for a vocabulary below 257.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise DataError(
            f"train:{vocab_size} is too small a vocabulary: 256 byte values and {END_OF_TEXT} need at least "
            f"train:{MIN_VOCAB_SIZE}"
        )

    # GPT-2's kind of tokenizer: every byte is a character of the alphabet, so that every text can be encoded.
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(documents, trainer)
    return build_tokenizer(f"train:{vocab_size}", backend, {"eos_token": END_OF_TEXT})


@dataclass(kw_only=True)
class Tokenizer:
    """Tokenizer with an end-of-text token. `encode` applies no template, so it adds no beginning-of-text token."""

    name: str
    """The folder or Hub name it was loaded from, or `train:SIZE`."""
    eos_token: str
    eos_token_id: int
    vocab_size: int
    """The largest id plus one, added tokens included. This is the smallest size of a model's embedding."""
    backend: tokenizers.Tokenizer = field(repr=False)
    pad_token: str | None = None
    """The padding token that the files name. Training and evaluation do not use it."""
    config: dict[str, Any] = field(default_factory=dict, repr=False)
    """The content of `tokenizer_config.json`, with all special tokens and chat templates; kept for `save`."""
    generation: dict[str, Any] = field(default_factory=dict, repr=False)
    """The content of `generation_config.json`. Only its stop tokens are used; the rest is kept for `save`."""

    @property
    def bos_token_id(self) -> int | None:
        """Id of the beginning-of-text token, or None."""
        token = token_text(self.config.get("bos_token"))
        return None if token is None else self.backend.token_to_id(token)

    @cached_property
    def stop_token_ids(self) -> frozenset[int]:
        """Ids at which generation stops: the end-of-text token, and those that generation_config.json adds."""
        return frozenset([self.eos_token_id, *as_list(self.generation.get("eos_token_id"))])

    @cached_property
    def unk_token_id(self) -> int | None:
        """Id of the token for unknown characters, or None. The files or the tokenizer's model name it."""
        model = json.loads(self.backend.to_str())["model"]
        token = token_text(self.config.get("unk_token")) or model.get("unk_token")
        if token is None:
            return model.get("unk_id")  # Unigram models name it by its id
        return self.backend.token_to_id(token)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text. The name of a special token in the text is encoded as ordinary text.

        Raises DataError if the library cannot encode the text.
        """
        with self.failures_as_data_errors():
            return self.backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of several texts. Faster than `encode`, because no character offsets are computed."""
        with self.failures_as_data_errors():
            return [encoding.ids for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False)]

    @contextlib.contextmanager
    def failures_as_data_errors(self) -> Iterator[None]:
        """Context manager: turn failures of the `tokenizers` library on a text into DataError.

        The library raises a bare Exception if a character has no token and there is no unknown token. Its Rust code
        panics, for example, if a regular expression of the tokenizer takes too long.
        """
        try:
            yield
        except BaseException as error:
            if is_panic(error):
                reason = str(error).splitlines()[0]
                raise DataError(
                    f"tokenizer {self.name} fails on a text ({reason}); choose another tokenizer"
                ) from error
            if type(error) is not Exception:  # such as a TypeError for a number
                raise
            raise DataError(
                f"tokenizer {self.name} cannot encode a text ({error}); name its unknown token in {TOKENIZER_FILE}, or "
                "choose a tokenizer that spells every text"
            ) from error

    def encode_to_array(self, text: str) -> np.ndarray:
        """Return the token ids of a text as a uint32 array [tokens].

        A long text is encoded in parts where possible, so that the memory does not grow with its length.
        """
        arrays = [np.array(self.encode_batch([part])[0], np.uint32) for part in self._split_long_text(text)]
        return np.concatenate(arrays)

    def _split_long_text(self, text: str) -> Iterator[str]:
        """Split a text into parts of at least PART_CHARACTERS, at points that no token spans.

        Such points are known only if the tokenizer splits words as GPT-2's does. Otherwise the text is a single part.
        """
        start = 0
        while self._splits_like_gpt2:
            match = LETTER_BEFORE_SPACE.search(text, start + PART_CHARACTERS)
            if match is None:
                break
            yield text[start : match.end()]
            start = match.end()
        yield text[start:]

    @cached_property
    def _splits_like_gpt2(self) -> bool:
        """Whether the tokenizer splits words as GPT-2's does, so that no token contains a letter and a space after it.

        That is not certain with a normaliser, or with an added token that may contain a space.
        """
        splitter = self.backend.pre_tokenizer
        is_byte_level = isinstance(splitter, pre_tokenizers.ByteLevel) and splitter.use_regex
        if not is_byte_level or splitter.add_prefix_space or self.backend.normalizer:
            return False
        return all(token.special for token in self.backend.get_added_tokens_decoder().values())

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, including the names of special tokens."""
        with self.failures_as_data_errors():
            return self.backend.decode(ids, skip_special_tokens=False)

    @property
    def prefix_token_id(self) -> int:
        """Id of the beginning-of-text token, or else of the end-of-text token, as in lm-evaluation-harness."""
        return self.eos_token_id if self.bos_token_id is None else self.bos_token_id

    @property
    def beginning(self) -> list[int]:
        """Ids that the tokenizer's template puts before every text, such as Llama's `<s>`; often none.

        `encode` does not add them. Evaluation puts them before each prompt, as other harnesses do.
        """
        with self.failures_as_data_errors():
            ids_with_template = self.backend.encode("a", add_special_tokens=True).ids
            ids = self.backend.encode("a", add_special_tokens=False).ids
        for start in range(len(ids_with_template)):
            if ids_with_template[start : start + len(ids)] == ids:
                return ids_with_template[:start]
        return []

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that decides which ids a text is encoded to: `sha256:` and 16 hex digits.

        That is the vocabulary, merges, normalizer, pre-tokenizer and added tokens. The name, the format of the files,
        padding, truncation and the decoder are not part of it.
        """
        # Take the parts that decide ids, in a form that is the same for all releases of the library.
        stored = json.loads(self.backend.to_str())
        model = stored["model"]
        if "merges" in model:  # older files write each merge as one string with a space
            model["merges"] = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"]]
        added_tokens = sorted(stored.get("added_tokens") or [], key=lambda token: token["id"])
        encoding_parts = {
            "model": model,
            "normalizer": stored.get("normalizer"),
            "pre_tokenizer": stored.get("pre_tokenizer"),
            "added_tokens": added_tokens,
        }
        canonical = json.dumps(
            drop_null_and_false(encoding_parts), sort_keys=True, separators=(",", ":"), ensure_ascii=True
        )
        return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer into a folder in the Hugging Face layout.

        `transformers.AutoTokenizer` encodes texts to the same ids with these files.
        """
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, content in self.files().items():
            (Path(folder) / name).write_bytes(content)

    def files(self) -> dict[str, bytes]:
        """Return the contents of the tokenizer's files in the Hugging Face layout, by name.

        These are three files, and generation_config.json if the tokenizer was loaded with one.
        """
        # Other tokenizer classes of transformers may override tokenizer.json. Custom code (auto_map) is not copied.
        plain_class = "PreTrainedTokenizerFast"
        config = {"tokenizer_class": plain_class, "clean_up_tokenization_spaces": False, **self.config}
        config["tokenizer_class"] = plain_class
        config["eos_token"] = self.eos_token
        config.pop("auto_map", None)

        # Write them as JSON.
        contents = {CONFIG_FILE: config, SPECIAL_TOKENS_FILE: {"eos_token": self.eos_token}}
        if self.generation:
            contents[GENERATION_FILE] = self.generation
        files = {TOKENIZER_FILE: self.backend.to_str(pretty=True).encode()}
        for name, content in contents.items():
            text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            files[name] = text.encode()
        return files


class LazyTokenizer:
    """Tokenizer that is loaded when it first encodes a text, because shards of token ids do not need it."""

    def __init__(self, config: TokenizerConfig):
        """Take the block of a run's configuration, as for `load_configured_tokenizer`."""
        self.config = config

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text. The first call loads the tokenizer, and raises DataError if that fails."""
        return self.tokenizer.encode(text)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, loaded at the first access."""
        return load_configured_tokenizer(self.config)


def build_tokenizer(
    name: str, backend: tokenizers.Tokenizer, config: dict[str, Any], generation: dict[str, Any] | None = None
) -> Tokenizer:
    """Build a Tokenizer from a loaded backend, and from the results of `read_config` and `read_generation_settings`.

    Changes the backend's settings, so that it encodes the whole text, and the same text always to the same ids. Raises
    DataError for a tokenizer without an end-of-text token, or without a vocabulary.
    """
    # The file may contain padding and truncation settings, which must not change documents.
    backend.no_padding()
    backend.no_truncation()
    if getattr(backend.model, "dropout", None):  # it would leave out merges at random
        backend.model.dropout = None
    # Otherwise the text "<|endoftext|>" in a document would become the end-of-text token.
    backend.encode_special_tokens = True

    # It must have a vocabulary besides special tokens.
    added_tokens = backend.get_added_tokens_decoder()
    model_ids = set(backend.get_vocab(with_added_tokens=False).values())
    if model_ids <= added_tokens.keys():
        raise DataError(
            f"tokenizer {name} has no ids but those of special and added tokens, so no text can be spelled with it; "
            "is its vocabulary file missing?"
        )

    # Find the end-of-text token. GPT-2's files do not name it.
    eos_token = token_text(config.get("eos_token"))
    has_end_of_text = any(token.content == END_OF_TEXT and token.special for token in added_tokens.values())
    if eos_token is None and has_end_of_text:
        eos_token = END_OF_TEXT
    if eos_token is None:
        raise DataError(
            f"tokenizer {name} names no eos_token, which is what separates documents; "
            f'add "eos_token" to its {CONFIG_FILE}, or choose another tokenizer'
        )
    eos_token_id = backend.token_to_id(eos_token)
    if eos_token_id is None:
        raise DataError(f"tokenizer {name}: its eos_token {eos_token!r} is not in its vocabulary; repair {CONFIG_FILE}")
    return Tokenizer(
        name=name,
        eos_token=eos_token,
        eos_token_id=eos_token_id,
        vocab_size=max(backend.get_vocab(with_added_tokens=True).values()) + 1,
        backend=backend,
        pad_token=token_text(config.get("pad_token")),
        config=config,
        generation=generation or {},
    )


def drop_null_and_false(value: Any) -> Any:
    """Remove null and false values from nested dictionaries and lists, for the fingerprint.

    A newer release of the library may write such values as new defaults, which must not change the fingerprint.
    """
    if isinstance(value, dict):
        kept = {key: drop_null_and_false(item) for key, item in value.items()}
        return {key: item for key, item in kept.items() if item is not None and item is not False}
    if isinstance(value, list):
        return [drop_null_and_false(item) for item in value]
    return value
