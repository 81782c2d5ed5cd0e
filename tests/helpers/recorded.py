"""A run as it was recorded, without training: configuration, log and checkpoints that can be loaded."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.optim import AdamW

from llmfoundry_lite.checkpoint.manifest import Segment, Timestamp
from llmfoundry_lite.checkpoint.manifest_json import encode
from llmfoundry_lite.checkpoint.save import SaveMetadata, Saver
from llmfoundry_lite.checkpoint.store import CheckpointStore, open_checkpoint
from llmfoundry_lite.config.build import build_block
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.models.initialise import initialise_weights
from llmfoundry_lite.models.mpt import MPT
from tests.helpers.tiny import write_config

HERE = Segment(
    first_batch=1, last_batch=10, world_size=1, num_devices=1, device_train_microbatch_size=2, torch="2.13.0"
)


def record_of(batch: int, **changes: Any) -> dict[str, Any]:
    """A line of the log; a change to None takes a number away."""
    record = {"batch": batch, "launch": 1, "loss/train/total": 4.0 - batch / 8, "grad_norm": 1.0 + batch, "lr": 0.01}
    record |= {"data/digest": f"d{batch}", "time/token": 256 * batch} | changes
    return {key: value for key, value in record.items() if value is not None}


def write_run(
    folder: Path,
    config: Mapping[str, Any],
    saves: Sequence[int] = (),
    *,
    records: Sequence[Mapping[str, Any]] = (),
    like: Path | None = None,
    **manifest: Any,
) -> Path:
    """A run directory of 6 batches. Checkpoints have the model of the configuration, and AdamW's state, or are copies
    of those of the run `like` with other manifests."""
    folder.mkdir(parents=True)
    write_config(folder / "config.yaml", dict(config))
    lines = records or [record_of(batch) for batch in range(1, 7)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "status.json").write_text(json.dumps({"status": "done", "batch": 6}))
    if saves and like is None:
        model = MPT(build_block(ModelConfig, dict(config["model"]), "model"))
        initialise_weights(model, 17)
        optimizer = AdamW(model.parameters())
        saver = Saver(CheckpointStore(folder / "checkpoints"))
        saver.take_lease()
        for batch in saves:
            stamp = Timestamp(batch=batch, sample=8 * batch, token=256 * batch)
            saver.save(model, optimizer, SaveMetadata(timestamp=stamp, run_name="recorded"))
            saver.wait()
    for batch in saves:
        if like is not None:
            shutil.copytree(like / "checkpoints" / f"ba{batch}", folder / "checkpoints" / f"ba{batch}")
        rewrite(folder, batch, **{"config": dict(config), "segments": (HERE,), **manifest})
    return folder


def rewrite(folder: Path, batch: int, **changes: Any) -> None:
    """Write the manifest of a save with other values."""
    checkpoint = folder / "checkpoints" / f"ba{batch}"
    (checkpoint / "manifest.json").write_bytes(encode(replace(open_checkpoint(checkpoint).manifest, **changes)))
