"""`llmfoundry-lite init --like`: a YAML and a starting checkpoint from the folder of a Hugging Face model.

The model has every setting of the folder's. The data must have been prepared with the folder's tokenizer.
"""

import os
from dataclasses import asdict
from pathlib import Path

from llmfoundry_lite.checkpoint.lease import FOLDER as LEASES
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.convert.to_checkpoint import HUB, open_empty_store, publish_weights, read_hugging_face_source
from llmfoundry_lite.data.tokenizer import load_tokenizer
from llmfoundry_lite.errors import ConfigError, DataError, printable
from llmfoundry_ops.starter import (
    Facts,
    as_yaml,
    check_places,
    fill_template,
    fitting_batch,
    note_on_validation,
    write_yaml,
    yaml_word,
)

OPTIMIZER = {"name": "decoupled_adamw", "lr": 5e-5, "betas": [0.9, 0.95], "weight_decay": 0.0}
"""Optimizer for training on. The rate is the default of transformers' Trainer."""
BATCH_SIZE = 32
MIN_BATCHES = 20
"""Fewest batches in an epoch. Where there would be fewer, the batch is made smaller."""
LOAD = """\
# The weights of {like} in this package's format. The first launch starts with them.
load_path: {weights}
load_weights_only: true

"""


def write_like(data: Path, like: str, out: Path | None, *, trust_pickle: bool = False) -> tuple[Path, Path, str]:
    """Write a YAML and, beside it, the weights of `like` (a folder, or hf:NAME) as a checkpoint.

    Returns the YAML's path, the checkpoint's folder, and a sentence on how long the YAML trains. Raises DataError for
    data of another tokenizer or of longer samples, ConfigError if a place is taken, and as `import_checkpoint` does.
    """
    out = out or Path(f"{name_of(like)}-{data.resolve().name}.yaml")
    facts = check_places(data, out)
    if like == HUB or (not like.startswith(HUB) and not (Path(like) / "config.json").is_file()):
        raise DataError(f"--like: {like} has no config.json; expected the folder of a Hugging Face model, or hf:NAME")
    check_tokenizer(data, like, facts)
    folder = out.with_name(f"{out.stem}-weights")
    if folder.is_dir() and (names := os.listdir(folder)) and LEASES not in names:
        raise ConfigError(f"{folder}: already exists, and holds no checkpoints; choose another name with --out")
    store = open_empty_store(str(folder))
    weights = read_hugging_face_source(like, trust_pickle)
    if facts.vocab_size > weights.config.vocab_size:
        raise DataError(
            f"{like} has embeddings of {weights.config.vocab_size} ids, and its tokenizer has {facts.vocab_size}; give "
            "it more with transformers' resize_token_embeddings"
        )
    if facts.max_seq_len > weights.config.max_seq_len:
        raise DataError(
            f"{data} has samples of {facts.max_seq_len} tokens, and {like} takes {weights.config.max_seq_len}; prepare "
            f"the data with --max-seq-len {weights.config.max_seq_len}"
        )
    imported = publish_weights(weights, like, store, str(folder))
    text, note = describe(data, like, out, facts, weights.config, imported.checkpoint.url)
    write_yaml(out, text)
    return out, folder, "; ".join([note, *imported.notes])


def name_of(like: str) -> str:
    """Return the model's name: the last part of its path."""
    return Path(os.path.abspath(like.removeprefix(HUB))).name


def check_tokenizer(data: Path, like: str, facts: Facts) -> None:
    name = like.removeprefix(HUB)
    theirs = load_tokenizer(name).fingerprint
    if facts.fingerprint != theirs:
        raise DataError(
            f"{data} was prepared with another tokenizer ({facts.fingerprint}) than that of {like} ({theirs}); prepare "
            f"it again with --tokenizer {name}"
        )


def describe(data: Path, like: str, out: Path, facts: Facts, model: ModelConfig, url: str) -> tuple[str, str]:
    """Return the YAML's text, and a sentence on how long it trains: one epoch."""
    batch_size = fitting_batch(BATCH_SIZE, max(1, facts.num_train // MIN_BATCHES))
    num_batches = facts.num_train // batch_size
    note = f"1 epoch of {num_batches:,} batches"
    text = fill_template(
        data,
        out,
        facts,
        title=name_of(like),
        model=as_yaml(differing(asdict(model), asdict(ModelConfig()))),
        load=LOAD.format(like=printable(like), weights=yaml_word(url)),
        optimizer=as_yaml(OPTIMIZER),
        batches=(num_batches, batch_size, note),
    )
    return text, note + note_on_validation(facts)


def differing(values: dict, defaults: dict) -> dict:
    """Return the keys, at any depth, that are not the defaults; a model's name is always given."""
    found = {"name": values["name"]} if values.get("name") == "mpt_causal_lm" else {}
    for key, value in values.items():
        if value != defaults[key]:
            found[key] = differing(value, defaults[key]) if isinstance(value, dict) else value
    return found
