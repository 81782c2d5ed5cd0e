"""Files of a tokenizer in the Hugging Face layout: finding them in a folder or on the Hub, and reading what they say.

`tokenizer.json` is not parsed here: `tokenizer.py` builds a `Tokenizer` from it. The constants name the files, the
functions after them read the other files, and those that query the Hugging Face Hub are at the end.
"""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmfoundry_lite.bounded import MAX_TOKENIZER_BYTES, read_at_most
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.own_code import is_own, is_trusted

END_OF_TEXT = "<|endoftext|>"
"""The only special token of a tokenizer that `tokenizer.train_tokenizer` makes. It is also GPT-2's, whose files do not
name it."""
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
MAX_QUOTED = 60
"""Characters of a bad value that an error quotes."""
HUB_TIMEOUT_SECONDS = 20
VOCABULARY_FILES = (TOKENIZER_FILE, "vocab.json", "vocab.txt", "*.model", "*.tiktoken", "tekken.json")
"""Patterns of the files that may hold a vocabulary, in the formats that we and `transformers` read."""


def read_folder(folder: Path) -> dict[str, bytes]:
    """Read the files of a tokenizer in the Hugging Face layout. Returns their contents by name, without missing files.

    Without a generation_config.json, the generation settings of the model's config.json take its place.
    """
    named_templates = sorted((folder / NAMED_TEMPLATES).glob("*.jinja"))
    names = [*FILES, *(f"{NAMED_TEMPLATES}{path.name}" for path in named_templates)]
    files = {name: read_file(folder / name) for name in names if (folder / name).is_file()}

    if GENERATION_FILE not in files and (folder / MODEL_FILE).is_file():
        with contextlib.suppress(ValueError, RecursionError):  # the model's reader reports a damaged one
            settings = generation_settings_of(json.loads(read_file(folder / MODEL_FILE)))
            if settings:
                files[GENERATION_FILE] = json.dumps(settings).encode()
    return files


def read_file(path: Path) -> bytes:
    """Read a file of a tokenizer. Raises TooLargeError above MAX_TOKENIZER_BYTES, since anybody may have written it."""
    return read_at_most(path, MAX_TOKENIZER_BYTES, "a tokenizer")


def generation_settings_of(hf_config: Any) -> dict[str, Any]:
    """Return the generation settings in the content of a model's config.json; empty if it has none, or is no object."""
    if not isinstance(hf_config, dict):
        return {}
    return {key: hf_config[key] for key in GENERATION_KEYS if hf_config.get(key) is not None}


def read_config(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Return the content of tokenizer_config.json, with the special tokens and chat templates of other files added.

    As in transformers, special_tokens_map.json takes precedence, unless tokenizer_config.json defines the added tokens.
    `files` are contents by file name, and `name` is the tokenizer's, for errors. Raises DataError for a damaged file.
    """
    # Combine both files. A key that is null in one is taken from the other.
    config = _read_json(files, CONFIG_FILE, name)
    special_tokens = {}
    for key, value in _read_json(files, SPECIAL_TOKENS_FILE, name).items():
        if value is not None:
            special_tokens[key] = _as_config_token(value)
    if "added_tokens_decoder" in config:
        config_values = {key: value for key, value in config.items() if value is not None}
        config |= special_tokens | config_values
    else:
        config |= special_tokens

    # Add the chat templates, in the form that tokenizer_config.json has for one or for several.
    templates = _read_chat_templates(files, name)
    if list(templates) == ["default"]:
        config["chat_template"] = templates["default"]
    elif templates:
        config["chat_template"] = [{"name": key, "template": text} for key, text in templates.items()]
    return config


def _read_chat_templates(files: Mapping[str, bytes], name: str) -> dict[str, str]:
    """Return the chat templates that are separate files, by name. The one in chat_template.jinja is named `default`.

    Raises DataError for a template that is not UTF-8.
    """
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
    """Convert a token of special_tokens_map.json, or a list of tokens, to the form that tokenizer_config.json uses."""
    if isinstance(value, list):
        return [_as_config_token(token) for token in value]
    if isinstance(value, dict) and "content" in value:
        return {"__type": "AddedToken", **value}
    return value


def read_generation_settings(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Return the content of generation_config.json; empty if `files` has none. `name` is the tokenizer's, for errors.

    Raises DataError if the file is damaged or too large, or if special tokens in it are not token ids.
    """
    num_bytes = len(files.get(GENERATION_FILE, b""))
    if num_bytes > MAX_GENERATION_BYTES:
        raise DataError(
            f"tokenizer {name}: {GENERATION_FILE} has {num_bytes:,} bytes, expected at most "
            f"{MAX_GENERATION_BYTES:,}; remove it"
        )
    settings = _read_json(files, GENERATION_FILE, name)
    for key in TOKEN_ID_KEYS:
        value = settings.get(key)
        has_valid_ids = all(type(token_id) is int and token_id >= 0 for token_id in as_list(value))
        if not has_valid_ids:
            raise DataError(
                f"tokenizer {name}: {GENERATION_FILE}: {key} is {json.dumps(value)[:MAX_QUOTED]}, expected the number "
                "of a token, or a list of them; repair it"
            )
    return settings


def as_list(value: Any) -> list[Any]:
    """Return a list of the values of a key that may have one value, a list of values, or None."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _read_json(files: Mapping[str, bytes], file: str, name: str) -> dict[str, Any]:
    """Parse the JSON object in a file; empty if `files` does not have it. Raises DataError for damage."""
    try:
        return dict(json.loads(files.get(file, b"{}")))
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"tokenizer {name}: {file} cannot be read ({error})") from error


def token_text(value: Any) -> str | None:
    """Return the text of a token in a configuration file, where it is a string or an object with `content`.

    Returns None for an empty text, and for any other value.
    """
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def check_has_vocabulary(folder: Path) -> None:
    """Raise DataError for a folder without a vocabulary file.

    Without this check, `transformers` 5 would build an empty tokenizer from `config.json` alone.
    """
    if has_vocabulary(folder):
        return
    raise DataError(
        f"tokenizer folder {folder} holds no vocabulary, expected one of {', '.join(VOCABULARY_FILES)}; copy the "
        "tokenizer's files there, or give another folder or a Hub name"
    )


def has_vocabulary(folder: Path) -> bool:
    """Return whether a folder contains one of VOCABULARY_FILES."""
    return any(path.is_file() for pattern in VOCABULARY_FILES for path in folder.glob(pattern))


def is_local_or_cached(name: str | Path) -> bool:
    """Return whether `load_tokenizer(name)` would find the tokenizer without the network. Does not use the network.

    Code of the user's own counts if this process trusts it.
    """
    if os.path.isdir(name):  # false, and no error, for a name that is too long for a file system
        return (Path(name) / TOKENIZER_FILE).is_file()
    if is_own(name):
        return is_trusted(str(name))
    if looks_like_a_path(str(name)):
        return False
    cached_file = cached_files(str(name))[TOKENIZER_FILE]
    return isinstance(cached_file, Path)


def looks_like_a_path(name: str) -> bool:
    """Return whether a name can only be a local folder, because it is neither `name` nor `owner/name`."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def download_from_hub(name: str) -> dict[str, Path]:
    """Find the files of a tokenizer in the Hub's local cache, or download them.

    The Hub is queried only if the cache does not say whether one of the required files exists. Returns the paths by
    file name, without files that the repository does not have. Raises DataError if there is no such repository, and if
    the Hub cannot be reached while the cache has no tokenizer.json.
    """
    import huggingface_hub
    from huggingface_hub import errors

    # Look into the cache. Caches that older releases filled have no entry for optional files, whether the repository
    # has them or not.
    cached = cached_files(name)
    cached_paths = {file: path for file, path in cached.items() if isinstance(path, Path)}
    unknown_files = [file for file, path in cached.items() if path is None and file not in OPTIONAL_FILES]
    if not unknown_files:
        return cached_paths

    # Ask the Hub.
    try:
        # This comes first because it fails at once without a network. A download would retry for half a minute.
        info = huggingface_hub.HfApi().model_info(name, timeout=HUB_TIMEOUT_SECONDS)
        hub_files = [entry.rfilename for entry in info.siblings or []]
        wanted = [file for file in hub_files if file in FILES or file.startswith(NAMED_TEMPLATES)]
        return {file: Path(huggingface_hub.hf_hub_download(name, file)) for file in wanted}
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise DataError(
            f"tokenizer {name} is neither a local folder nor a repository on the Hugging Face Hub that you may read; "
            f"check the spelling, or give a folder with a {TOKENIZER_FILE}"
        ) from error
    except Exception as error:  # the HTTP clients' errors have no common base class
        if TOKENIZER_FILE in cached_paths:
            return cached_paths
        # If the Hub answered with an error, such as 503, a retry may succeed. The cause tells callers so.
        has_answered = any(getattr(cause, "response", None) is not None for cause in (error, error.__cause__))
        raise DataError(
            f"tokenizer {name} is not in the local cache and the Hugging Face Hub cannot be reached "
            f"({type(error).__name__}); give a local folder with a {TOKENIZER_FILE} instead"
        ) from (error if has_answered else None)


def cached_files(name: str) -> dict[str, Path | bool | None]:
    """Look up each of FILES of a Hub repository in the local cache.

    Returns for each file name its path; False if the repository does not have it; or None if the cache does not know.
    """
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
