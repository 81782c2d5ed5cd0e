"""`llmfoundry-lite init --like`: writes a YAML and a starting checkpoint from a Hugging Face model.

The model has every setting of the folder's, and training continues from its weights. The data must have been prepared
with the folder's tokenizer. `write_like` is the story; the YAML's template is `starter.py`'s.
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
    yaml_scalar,
)

OPTIMIZER = {"name": "decoupled_adamw", "lr": 5e-5, "betas": [0.9, 0.95], "weight_decay": 0.0}
"""Optimizer that continues the training. The learning rate is the default of transformers' Trainer."""
BATCH_SIZE = 32
"""Samples in a batch, if the data has enough of them."""
MIN_BATCHES = 20
"""Fewest batches in an epoch. If there would be fewer, the batch is made smaller."""
LOAD = """\
# The weights of {like} in this package's format. The first launch starts with them.
load_path: {weights}
load_weights_only: true

"""


def write_like(data: Path, like: str, out: Path | None, *, trust_pickle: bool = False) -> tuple[Path, Path, str]:
    """Write a YAML that continues the training of a model, and beside it the model's weights as a checkpoint.

    data: a folder that `data prepare` has made.
    like: the folder of a Hugging Face model, or hf:NAME.
    out: the YAML's path, or None for the default name.
    trust_pickle: whether pytorch_model.bin, which is a pickle, may be read.

    Returns the YAML's path, the checkpoint's folder, and a sentence on how long the YAML trains. Raises DataError for
    data of another tokenizer or of longer samples than the model takes, ConfigError if there is something at one of the
    paths already, and what `import_checkpoint` raises.
    """
    out = out or Path(f"{name_of(like)}-{data.resolve().name}.yaml")
    facts = check_places(data, out)
    is_folder = not like.startswith(HUB) and (Path(like) / "config.json").is_file()
    is_on_hub = like.startswith(HUB) and like != HUB
    if not is_folder and not is_on_hub:
        raise DataError(
            f"--like: {like} has no config.json; expected the folder of a Hugging Face model, hf:NAME, or a .yaml file"
        )
    check_tokenizer(data, like, facts)

    # The folder of an earlier attempt that has published nothing may be there: it has the leases of its saves.
    folder = out.with_name(f"{out.stem}-weights")
    names = os.listdir(folder) if folder.is_dir() else []
    if names and LEASES not in names:
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
    text, note = build_yaml(data, like, out, facts, weights.config, imported.checkpoint.url)
    write_yaml(out, text)
    return out, folder, "; ".join([note, *imported.notes])


def name_of(like: str) -> str:
    """Return the model's name: the last part of its path or of its name on the Hub."""
    return Path(os.path.abspath(like.removeprefix(HUB))).name


def check_tokenizer(data: Path, like: str, facts: Facts) -> None:
    """Raise DataError if the data was prepared with another tokenizer than the model's."""
    name = like.removeprefix(HUB)
    fingerprint = load_tokenizer(name).fingerprint
    if facts.fingerprint != fingerprint:
        raise DataError(
            f"{data} was prepared with another tokenizer ({facts.fingerprint}) than that of {like} ({fingerprint}); "
            f"prepare it again with --tokenizer {name}"
        )


def build_yaml(
    data: Path, like: str, out: Path, facts: Facts, model: ModelConfig, checkpoint_url: str
) -> tuple[str, str]:
    """Return the YAML's text, and a sentence on how long it trains, which is one epoch.

    The paths are as in `write_like`, and `model` is the configuration of the weights in the checkpoint.
    """
    batch_size = fitting_batch(BATCH_SIZE, max(1, facts.num_train // MIN_BATCHES))
    num_batches = facts.num_train // batch_size
    note = f"1 epoch of {num_batches:,} batches"
    text = fill_template(
        data,
        out,
        facts,
        title=name_of(like),
        model=as_yaml(differing(asdict(model), asdict(ModelConfig()))),
        load=LOAD.format(like=printable(like), weights=yaml_scalar(checkpoint_url)),
        optimizer=as_yaml(OPTIMIZER),
        num_batches=num_batches,
        batch_size=batch_size,
        note=note,
    )
    return text, note + note_on_validation(facts)


def differing(settings: dict, defaults: dict) -> dict:
    """Return the settings, at any depth, that are not the defaults, for a YAML that is short.

    The `name` of the model is kept, because a YAML must have it.
    """
    changed = {}
    if settings.get("name") == "mpt_causal_lm":
        changed["name"] = settings["name"]
    for key, value in settings.items():
        if value == defaults[key]:
            continue
        changed[key] = differing(value, defaults[key]) if isinstance(value, dict) else value
    return changed
