"""A run on made-up tokens, for benches that train: shards and a YAML in a folder, the rest is the real code's."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from llmfoundry_lite.bench.shapes import SHAPES


def write_run(folder: Path, settings: dict[str, Any], dtype: str) -> Path:
    """`settings`: shape, seq_len, batch_size, num_steps; two steps more are trained. Returns the YAML's path.

    The run leaves its record in `folder`/run.
    """
    from streaming import MDSWriter

    seq_len, shape = settings["seq_len"], SHAPES[settings["shape"]]
    num_batches = settings["num_steps"] + 2
    with MDSWriter(out=f"{folder}/train", columns={"tokens": "ndarray:uint16"}) as writer:
        for row in random_tokens(num_batches * settings["batch_size"], seq_len, shape["vocab_size"]):
            writer.write({"tokens": row.astype(np.uint16)})
    config = {
        "model": {"name": "mpt_causal_lm", "no_bias": True, "max_seq_len": seq_len, **shape},
        "tokenizer": {"name": "none/none"},
        "train_loader": {"dataset": {"local": str(folder), "split": "train"}},
        "optimizer": {"name": "adamw", "lr": 1e-4},
        "scheduler": {"name": "constant_with_warmup"},
        "algorithms": {"gradient_clipping": {"clipping_type": "norm", "clipping_threshold": 1.0}},
        "max_seq_len": seq_len,
        "max_duration": f"{num_batches}ba",
        "global_train_batch_size": settings["batch_size"],
        "precision": "fp32" if dtype == "fp32" else f"amp_{dtype}",
        "log_to_console": False,
        "export_at_end": False,
        "run_folder": f"{folder}/run",
    }
    path = folder / "bench.yaml"
    path.write_text(json.dumps(config))
    return path


def random_tokens(num_samples: int, seq_len: int, vocab_size: int) -> np.ndarray:
    return np.random.default_rng(0).integers(vocab_size, size=(num_samples, seq_len))
