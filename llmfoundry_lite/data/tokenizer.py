"""Tokenizers: loading, training, encoding, and a fingerprint of what they do.

Everything goes through the `tokenizers` library and `tokenizer.json`. A companion converts a tokenizer that has no
`tokenizer.json` yet. `tokenizer_bounds.py` refuses a tokenizer that could fill the memory.

`load_tokenizer` and `train_tokenizer` make a `Tokenizer`. The functions that read its files follow, and those that ask
the Hugging Face Hub are at the end.
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
from llmfoundry_lite.bounded import MAX_TOKENIZER_BYTES, read_at_most
from llmfoundry_lite.data.tokenizer_bounds import check_bounds, is_panic
from llmfoundry_lite.errors import ConfigError, DataError

END_OF_TEXT = "<|endoftext|>"
"""The one special token of a tokenizer trained here. It is also GPT-2's, whose own files do not name it."""

MIN_VOCAB_SIZE = 257
"""256 byte values and the end of text: below this, byte-level BPE cannot spell every document."""

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
"""File of the chat template in transformers 5. It is kept in tokenizer_config.json, which every release reads."""
NAMED_TEMPLATES = "additional_chat_templates/"
"""Folder of further chat templates, `NAME.jinja`, which are kept in the same key."""
GENERATION_FILE = "generation_config.json"
"""File that names the tokens at which a model stops. It is kept with the tokenizer, because it holds ids."""
FILES = (TOKENIZER_FILE, CONFIG_FILE, SPECIAL_TOKENS_FILE, CHAT_TEMPLATE_FILE, GENERATION_FILE)
"""Files of a tokenizer in the Hugging Face layout, besides those in NAMED_TEMPLATES."""
OPTIONAL_FILES = (CHAT_TEMPLATE_FILE, GENERATION_FILE)
"""Files that most tokenizers lack, and that caches of older releases do not know of."""
MODEL_FILE = "config.json"
GENERATION_KEYS = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "max_length",
    "min_length",
    "max_new_tokens",
    "do_sample",
    "early_stopping",
    "num_beams",
    "num_beam_groups",
    "diversity_penalty",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "repetition_penalty",
    "length_penalty",
    "no_repeat_ngram_size",
    "num_return_sequences",
    "encoder_no_repeat_ngram_size",
    "bad_words_ids",
    "output_scores",
    "suppress_tokens",
    "return_dict_in_generate",
    "remove_invalid_values",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "exponential_decay_length_penalty",
    "begin_suppress_tokens",
)
"""Keys of config.json that say how to generate, where there is no generation_config.json."""
TOKEN_ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of generation_config.json that hold ids of tokens."""
MAX_GENERATION_BYTES = 1 << 20
"""Limit of generation_config.json, which is copied into every checkpoint and export."""

PART_CHARACTERS = 1_000_000
"""Length above which texts are encoded in parts, where that is exact: the library takes 114 bytes for a character."""
BEFORE_A_SPACE = re.compile("[A-Za-z](?= )")
"""Point to cut at: no alternative of GPT-2's regular expression joins a letter and the space after it."""

MAX_QUOTED = 60
"""Characters of a bad value that an error quotes."""
HUB_TIMEOUT_SECONDS = 20

VOCABULARY_FILES = (TOKENIZER_FILE, "vocab.json", "vocab.txt", "*.model", "*.tiktoken", "tekken.json")
"""Files of a vocabulary, in the layouts that we and `transformers` read."""


def find_fingerprints(name: str) -> dict[str, str]:
    """Return the tokenizer's fingerprint as checkpoints record it; empty if it is not on this machine."""
    if not is_local_or_cached(name):
        return {}
    return {"tokenizer": load_tokenizer(name).fingerprint}


def load_tokenizer(name_or_folder: str | Path) -> "Tokenizer":
    """Load a tokenizer from a local folder in Hugging Face layout, or from the Hub by name.

    A folder that exists wins over a Hub name. Raises DataError when there is no such tokenizer, when it cannot be
    read, when the Hub cannot be reached, and when it has no end-of-text token to put between documents.
    """
    name = str(name_or_folder)
    if os.path.isdir(name):
        check_has_vocabulary(Path(name))
        files = read_folder(Path(name))
    elif looks_like_a_path(name):
        raise DataError(f"tokenizer folder {name} does not exist; give a folder with a {TOKENIZER_FILE}, or a Hub name")
    else:
        files = {file: _read_file(path) for file, path in download_from_hub(name).items()}

    if TOKENIZER_FILE in files:
        return tokenizer_from_files(files, name)
    try:
        needed_for = f"tokenizers without {TOKENIZER_FILE}"
        convert = companions.load("llmfoundry_formats.old_tokenizers:convert_with_transformers", needed_for)
    except ConfigError as error:
        raise DataError(f"tokenizer {name}: {error}") from error
    return convert(name, files)


def read_folder(folder: Path) -> dict[str, bytes]:
    """Return name and content of a tokenizer's files in the Hugging Face layout. Files that it lacks are left out.

    Without a GENERATION_FILE, the part of the model's config.json that says how to generate takes its place.
    """
    named_templates = sorted((folder / NAMED_TEMPLATES).glob("*.jinja"))
    names = [*FILES, *(f"{NAMED_TEMPLATES}{path.name}" for path in named_templates)]
    files = {name: _read_file(folder / name) for name in names if (folder / name).is_file()}

    if GENERATION_FILE not in files and (folder / MODEL_FILE).is_file():
        with contextlib.suppress(ValueError, RecursionError):  # the model's reader reports a damaged one
            generation = generation_of(json.loads(_read_file(folder / MODEL_FILE)))
            if generation:
                files[GENERATION_FILE] = json.dumps(generation).encode()
    return files


def _read_file(path: Path) -> bytes:
    """Read a file of a tokenizer, which anybody may have written, up to MAX_TOKENIZER_BYTES."""
    return read_at_most(path, MAX_TOKENIZER_BYTES, "a tokenizer")


def generation_of(hf_config: Any) -> dict[str, Any]:
    """Return the part of a config.json that says how to generate; empty if it has none, or is no object."""
    if not isinstance(hf_config, dict):
        return {}
    return {key: hf_config[key] for key in GENERATION_KEYS if hf_config.get(key) is not None}


def tokenizer_from_files(files: Mapping[str, bytes], name: str) -> "Tokenizer":
    """Make a tokenizer from the contents of its files. Raises DataError."""
    try:
        backend = tokenizers.Tokenizer.from_buffer(files[TOKENIZER_FILE])
        check_bounds(backend, name)
    except DataError:
        raise
    except BaseException as error:
        # For whatever is wrong with the file, the library raises a bare Exception, or its Rust code panics.
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise DataError(f"tokenizer {name}: {TOKENIZER_FILE} cannot be read ({error})") from error
    return build_tokenizer(name, backend, read_config(files, name), read_generation(files, name))


def read_config(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Return tokenizer_config.json with the special tokens and chat templates of the other files. Raises DataError.

    As in transformers, special_tokens_map.json takes precedence, unless tokenizer_config.json has the tokens itself.
    """
    config = _read_json(files, CONFIG_FILE, name)
    special_tokens = {}
    for key, value in _read_json(files, SPECIAL_TOKENS_FILE, name).items():
        if value is not None:
            special_tokens[key] = _as_config_token(value)
    if "added_tokens_decoder" in config:
        own_values = {key: value for key, value in config.items() if value is not None}
        config |= special_tokens | own_values
    else:
        config |= special_tokens

    templates = _read_chat_templates(files, name)
    if list(templates) == ["default"]:
        config["chat_template"] = templates["default"]
    elif templates:
        config["chat_template"] = [{"name": key, "template": text} for key, text in templates.items()]
    return config


def _read_chat_templates(files: Mapping[str, bytes], name: str) -> dict[str, str]:
    """Return the chat templates that have files of their own, by name: that of CHAT_TEMPLATE_FILE is `default`."""
    contents = {}
    for file, content in files.items():
        if file == CHAT_TEMPLATE_FILE:
            contents["default"] = content
        elif file.startswith(NAMED_TEMPLATES):
            key = file.removeprefix(NAMED_TEMPLATES).removesuffix(".jinja")
            contents[key] = content
    try:
        return {key: content.decode() for key, content in contents.items()}
    except UnicodeDecodeError as error:
        raise DataError(f"tokenizer {name}: a chat template is not UTF-8 ({error})") from error


def _as_config_token(value: Any) -> Any:
    """Write a token of special_tokens_map.json, or a list of them, as tokenizer_config.json has it."""
    if isinstance(value, list):
        return [_as_config_token(token) for token in value]
    if isinstance(value, dict) and "content" in value:
        return {"__type": "AddedToken", **value}
    return value


def read_generation(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Return the content of generation_config.json. Raises DataError if it is damaged or its stop tokens are no ids."""
    num_bytes = len(files.get(GENERATION_FILE, b""))
    if num_bytes > MAX_GENERATION_BYTES:
        raise DataError(
            f"tokenizer {name}: {GENERATION_FILE} has {num_bytes:,} bytes, expected at most "
            f"{MAX_GENERATION_BYTES:,}; remove it"
        )
    generation = _read_json(files, GENERATION_FILE, name)
    for key in TOKEN_ID_KEYS:
        value = generation.get(key)
        are_ids = all(type(token_id) is int and token_id >= 0 for token_id in _as_list(value))
        if not are_ids:
            raise DataError(
                f"tokenizer {name}: {GENERATION_FILE}: {key} is {json.dumps(value)[:MAX_QUOTED]}, expected the number "
                "of a token, or a list of them; repair it"
            )
    return generation


def _as_list(value: Any) -> list[Any]:
    """Return what a key holds that may have one value, a list of them, or none."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _read_json(files: Mapping[str, bytes], file: str, name: str) -> dict[str, Any]:
    """Return the object that a file holds; empty without that file. Raises DataError."""
    try:
        return dict(json.loads(files.get(file, b"{}")))
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"tokenizer {name}: {file} cannot be read ({error})") from error


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> "Tokenizer":
    """Train a byte-level BPE tokenizer with one special token, `<|endoftext|>`, which gets id 0.

    The same documents give the same fingerprint, whatever the number of threads. `vocab_size` counts every id; the
    result has fewer when the documents run out of pairs to merge. Raises DataError for a vocabulary below 257.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise DataError(
            f"train:{vocab_size} is too small a vocabulary: 256 byte values and {END_OF_TEXT} need at least "
            f"train:{MIN_VOCAB_SIZE}"
        )
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


def is_local_or_cached(name: str | Path) -> bool:
    """Return whether `load_tokenizer(name)` would succeed without the network. Never touches the network itself."""
    if os.path.isdir(name):  # false, and no error, for a name that is too long for a file system
        return (Path(name) / TOKENIZER_FILE).is_file()
    if looks_like_a_path(str(name)):
        return False
    cached_file = cached_files(str(name))[TOKENIZER_FILE]
    return isinstance(cached_file, Path)


@dataclass(kw_only=True)
class Tokenizer:
    """Tokenizer and its end-of-text token. `encode` applies no template: it adds no beginning-of-text token."""

    name: str
    """The folder or Hub name it was loaded from, or `train:SIZE`."""
    eos_token: str
    eos_token_id: int
    vocab_size: int
    """The largest id plus one, added tokens included: the smallest embedding table that fits."""
    backend: tokenizers.Tokenizer = field(repr=False)
    pad_token: str | None = None
    """The padding token that the files name. Nothing is padded with it here."""
    config: dict[str, Any] = field(default_factory=dict, repr=False)
    """The content of `tokenizer_config.json`, with all special tokens and chat templates; kept for `save`."""
    generation: dict[str, Any] = field(default_factory=dict, repr=False)
    """The content of `generation_config.json`; only its stop tokens count here."""

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a text, where there is one."""
        token = token_text(self.config.get("bos_token"))
        return None if token is None else self.backend.token_to_id(token)

    @cached_property
    def stop_token_ids(self) -> frozenset[int]:
        """Ids that end a text when a model generates them: the end of text, and a chat model's further ones."""
        return frozenset([self.eos_token_id, *_as_list(self.generation.get("eos_token_id"))])

    @cached_property
    def unk_token_id(self) -> int | None:
        """Id of the token for unknown characters, where the files or the model name one."""
        model = json.loads(self.backend.to_str())["model"]
        token = token_text(self.config.get("unk_token")) or model.get("unk_token")
        if token is None:
            return model.get("unk_id")  # Unigram models name it by its id
        return self.backend.token_to_id(token)

    def encode(self, text: str) -> list[int]:
        """Return token ids of one text. A special token spelled out in the text becomes ordinary tokens."""
        with self.failures_as_data_errors():
            return self.backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return token ids of several texts; the same as `encode`, without the cost of tracking character offsets."""
        with self.failures_as_data_errors():
            return [encoding.ids for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False)]

    @contextlib.contextmanager
    def failures_as_data_errors(self) -> Iterator[None]:
        """Raise DataError where the library fails on a text.

        It raises a bare Exception for text without a token if there is no unknown token either. It panics for example
        where a regular expression of the tokenizer takes too long.
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
        """Return token ids of one text as uint32, in little memory however long the text is."""
        arrays = [np.array(self.encode_batch([part])[0], np.uint32) for part in self._cut(text)]
        return np.concatenate(arrays)

    def _cut(self, text: str) -> Iterator[str]:
        """Cut a long text where the tokenizer cuts anyway. Where that is unknown, the text is one part."""
        start = 0
        while self._splits_like_gpt2:
            match = BEFORE_A_SPACE.search(text, start + PART_CHARACTERS)
            if match is None:
                break
            yield text[start : match.end()]
            start = match.end()
        yield text[start:]

    @cached_property
    def _splits_like_gpt2(self) -> bool:
        """Whether texts are split as GPT-2 does, so that they may be cut at BEFORE_A_SPACE.

        A normaliser, or an added token with a space in it, could join what lies on both sides.
        """
        splitter = self.backend.pre_tokenizer
        is_byte_level = isinstance(splitter, pre_tokenizers.ByteLevel) and splitter.use_regex
        if not is_byte_level or splitter.add_prefix_space or self.backend.normalizer:
            return False
        return all(token.special for token in self.backend.get_added_tokens_decoder().values())

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        with self.failures_as_data_errors():
            return self.backend.decode(ids, skip_special_tokens=False)

    @property
    def prefix_token_id(self) -> int:
        """The beginning-of-text token, or the end-of-text token where there is none, as in lm-evaluation-harness."""
        return self.eos_token_id if self.bos_token_id is None else self.bos_token_id

    @property
    def beginning(self) -> list[int]:
        """Ids that the template puts before every text, such as Llama's `<s>`. Evaluation uses them, as others do."""
        with self.failures_as_data_errors():
            with_template = self.backend.encode("a", add_special_tokens=True).ids
            without = self.backend.encode("a", add_special_tokens=False).ids
        for start in range(len(with_template)):
            if with_template[start : start + len(without)] == without:
                return with_template[:start]
        return []

    @cached_property
    def fingerprint(self) -> str:
        """`sha256:` and 16 hex digits of everything that decides which ids a text becomes.

        That is vocabulary, merges, normalizer, pre-tokenizer and added tokens. The name, the layout of the files,
        padding and truncation, and the decoder do not count.
        """
        stored = json.loads(self.backend.to_str())
        model = stored["model"]
        if "merges" in model:  # older files write each merge as one string with a space
            model["merges"] = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"]]
        added_tokens = sorted(stored.get("added_tokens") or [], key=lambda token: token["id"])
        decisive = {
            "model": model,
            "normalizer": stored.get("normalizer"),
            "pre_tokenizer": stored.get("pre_tokenizer"),
            "added_tokens": added_tokens,
        }
        canonical = json.dumps(without_defaults(decisive), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def save(self, folder: str | Path) -> None:
        """Write the files of the Hugging Face layout; `transformers.AutoTokenizer` makes the same ids with them."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, content in self.files().items():
            (Path(folder) / name).write_bytes(content)

    def files(self) -> dict[str, bytes]:
        """Return name and content of those files: three, and GENERATION_FILE where there was one."""
        # Other classes of transformers may replace what tokenizer.json says, and code of one's own is not copied.
        plain_class = "PreTrainedTokenizerFast"
        config = {"tokenizer_class": plain_class, "clean_up_tokenization_spaces": False, **self.config}
        config["tokenizer_class"] = plain_class
        config["eos_token"] = self.eos_token
        config.pop("auto_map", None)

        contents = {CONFIG_FILE: config, SPECIAL_TOKENS_FILE: {"eos_token": self.eos_token}}
        if self.generation:
            contents[GENERATION_FILE] = self.generation
        files = {TOKENIZER_FILE: self.backend.to_str(pretty=True).encode()}
        for name, content in contents.items():
            text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            files[name] = text.encode()
        return files


class LazyTokenizer:
    """A tokenizer that is loaded when the first text comes, since shards of token ids do not need it."""

    def __init__(self, name: str):
        """Take a folder or a Hub name, as `load_tokenizer` does."""
        self.name = name

    def encode(self, text: str) -> list[int]:
        """Return token ids of one text, as `Tokenizer.encode` does. The first call may raise DataError for the name."""
        return self.tokenizer.encode(text)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The loaded tokenizer."""
        return load_tokenizer(self.name)


def build_tokenizer(
    name: str, backend: tokenizers.Tokenizer, config: dict[str, Any], generation: dict[str, Any] | None = None
) -> Tokenizer:
    """Build a Tokenizer from a loaded backend, `read_config` and `read_generation`.

    Changes the backend, so that it encodes all of a text, and always alike. Raises DataError for a tokenizer without an
    end-of-text token, or without any vocabulary.
    """
    # A file may carry the padding and truncation of its last user; neither may touch our documents.
    backend.no_padding()
    backend.no_truncation()
    if getattr(backend.model, "dropout", None):  # dropout merges at random, so tokens would vary
        backend.model.dropout = None
    # Otherwise a document that only quotes "<|endoftext|>" would end there.
    backend.encode_special_tokens = True

    added_tokens = backend.get_added_tokens_decoder()
    model_ids = set(backend.get_vocab(with_added_tokens=False).values())
    if model_ids <= added_tokens.keys():
        raise DataError(
            f"tokenizer {name} has no ids but those of special and added tokens, so no text can be spelled with it; "
            "is its vocabulary file missing?"
        )

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


def check_has_vocabulary(folder: Path) -> None:
    """Raise DataError for a folder without one. From `config.json` alone `transformers` 5 makes an empty tokenizer."""
    if has_vocabulary(folder):
        return
    raise DataError(
        f"tokenizer folder {folder} holds no vocabulary, expected one of {', '.join(VOCABULARY_FILES)}; copy the "
        "tokenizer's files there, or give another folder or a Hub name"
    )


def has_vocabulary(folder: Path) -> bool:
    """Return whether a folder has one of VOCABULARY_FILES."""
    return any(path.is_file() for pattern in VOCABULARY_FILES for path in folder.glob(pattern))


def download_from_hub(name: str) -> dict[str, Path]:
    """Return the paths of the tokenizer's files, cached or downloaded. Files that the repository lacks are left out.

    Asks the Hub only if the cache does not know about one of the files. Raises DataError if there is no such
    repository, and if the Hub cannot be reached while the cache has no TOKENIZER_FILE.
    """
    import huggingface_hub
    from huggingface_hub import errors

    cached = cached_files(name)
    cached_paths = {file: path for file, path in cached.items() if isinstance(path, Path)}
    # Caches of older releases lack the optional files, and do not say whether the repository has them.
    unknown_files = [file for file, path in cached.items() if path is None and file not in OPTIONAL_FILES]
    if not unknown_files:
        return cached_paths
    try:
        # Asked first because it fails at once without a network, where a download tries for half a minute.
        info = huggingface_hub.HfApi().model_info(name, timeout=HUB_TIMEOUT_SECONDS)
        hub_files = [entry.rfilename for entry in info.siblings or []]
        wanted = [file for file in hub_files if file in FILES or file.startswith(NAMED_TEMPLATES)]
        return {file: Path(huggingface_hub.hf_hub_download(name, file)) for file in wanted}
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise DataError(
            f"tokenizer {name} is neither a local folder nor a repository on the Hugging Face Hub that you may read; "
            f"check the spelling, or give a folder with a {TOKENIZER_FILE}"
        ) from error
    except Exception as error:  # the HTTP client's errors have no common class that we could name
        if TOKENIZER_FILE in cached_paths:
            return cached_paths
        # A fault that the Hub itself answers with, such as a 503, may pass; a missing network will not.
        has_answered = any(getattr(cause, "response", None) is not None for cause in (error, error.__cause__))
        raise DataError(
            f"tokenizer {name} is not in the local cache and the Hugging Face Hub cannot be reached "
            f"({type(error).__name__}); give a local folder with a {TOKENIZER_FILE} instead"
        ) from (error if has_answered else None)


def cached_files(name: str) -> dict[str, Path | bool | None]:
    """Return the path of each file in the Hub's cache; False if the Hub lacks the file, None if that is unknown."""
    import huggingface_hub

    cached: dict[str, Path | bool | None] = {}
    for file in FILES:
        try:
            entry = huggingface_hub.try_to_load_from_cache(name, file)
        except ValueError:  # not a well-formed Hub name
            entry = None
        if isinstance(entry, str):
            cached[file] = Path(entry)
        elif entry is None:
            cached[file] = None
        else:  # the cache's mark for a file that the repository does not have
            cached[file] = False
    return cached


def looks_like_a_path(name: str) -> bool:
    """Return whether a name can only be a local folder, since Hub names are `name` or `owner/name`."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def token_text(value: Any) -> str | None:
    """Return the text of a token in a configuration file: a string, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def without_defaults(value: Any) -> Any:
    """Drop values that are null or false, so that a library version that writes one more default changes nothing."""
    if isinstance(value, dict):
        kept = {key: without_defaults(item) for key, item in value.items()}
        return {key: item for key, item in kept.items() if item is not None and item is not False}
    if isinstance(value, list):
        return [without_defaults(item) for item in value]
    return value
