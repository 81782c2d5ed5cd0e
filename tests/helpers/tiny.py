"""A tiny data set and a tiny run, for tests that train."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tests.helpers.mds_writer import MDSWriter

VOCAB_SIZE = 96
SEQ_LEN = 32


def write_data(folder: Path, num_train: int = 500, num_val: int = 37, seq_len: int = SEQ_LEN) -> Path:
    """Token samples that can be learned (each token mostly decides the next), in several shards."""
    generator = np.random.default_rng(0)
    successors = generator.permutation(VOCAB_SIZE)
    for split, count in (("train", num_train), ("val", num_val)):
        with MDSWriter(out=str(folder / split), columns={"tokens": "ndarray:uint16"}, size_limit=1 << 13) as writer:
            for _ in range(count):
                row = [int(generator.integers(VOCAB_SIZE))]
                while len(row) < seq_len:
                    is_noise = generator.random() < 0.1
                    row.append(int(generator.integers(VOCAB_SIZE)) if is_noise else int(successors[row[-1]]))
                writer.write({"tokens": np.array(row, np.uint16)})
    return folder


def write_texts(folder: Path, num_texts: int = 20) -> Path:
    """Texts of 1 to 20 words, which make rows of unlike length, and a tokenizer of theirs. Both splits have all texts.

    The words are drawn, so that a run cannot learn much more than how often each occurs.
    """
    from llmfoundry_lite.data.tokenizer import train_tokenizer

    generator = np.random.default_rng(0)
    words = ["".join(generator.choice([*"abcdefgh"], size=3)) for _ in range(40)]
    texts = [" ".join(generator.choice(words, size=1 + (i * 11) % 20)) for i in range(num_texts)]
    folder.mkdir(exist_ok=True)
    train_tokenizer(texts, 300).save(folder / "tokenizer")
    for split in ("train", "val"):
        with MDSWriter(out=str(folder / split), columns={"text": "str"}) as writer:
            for text in texts:
                writer.write({"text": text})
    return folder


def reading_texts(folder: Path) -> dict[str, Any]:
    """Changes of a run (as `tiny_config` takes them) with which it reads `write_texts`."""
    return {"tokenizer__name": str(folder / "tokenizer"), "model__vocab_size": 320}


def tiny_config(data: Path, **changes: Any) -> dict[str, Any]:
    """A run of 10 batches of 8 samples; `changes` are dotted keys with `__` for the dot."""
    config: dict[str, Any] = {
        "run_name": "tiny",
        "max_seq_len": SEQ_LEN,
        "model": {
            "name": "mpt_causal_lm",
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": SEQ_LEN,
            "vocab_size": VOCAB_SIZE,
        },
        "tokenizer": {"name": "tests/not-on-this-disk"},
        "train_loader": {"dataset": {"local": str(data), "split": "train", "shuffle": True, "shuffle_seed": 3}},
        "eval_loader": {"dataset": {"local": str(data), "split": "val"}},
        "optimizer": {"name": "decoupled_adamw", "lr": 1e-2},
        "scheduler": {"name": "cosine_with_warmup", "t_warmup": "2ba", "alpha_f": 0.1},
        "algorithms": {"gradient_clipping": {"clipping_type": "norm", "clipping_threshold": 1.0}},
        "max_duration": "10ba",
        "eval_interval": 0,
        "global_train_batch_size": 8,
        "device_eval_batch_size": 4,
        "precision": "fp32",
        "fsdp_config": {"sharding_strategy": "FULL_SHARD"},
        "export_at_end": False,
    }
    for key, value in changes.items():
        block = config
        *parents, last = key.split("__")
        for parent in parents:
            block = block.setdefault(parent, {})
        block[last] = value
    return config


def write_config(path: Path, config: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return str(path)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the last line of each batch, in order."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for _, record in sorted({record["batch"]: record for record in lines}.items())]


def values(records: list[dict[str, Any]], key: str) -> list[Any]:
    return [record[key] for record in records if key in record]


def build_tokenizer(folder: Path) -> None:
    """Write a tokenizer of three words in transformers' files."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<end>": 2}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
