"""Shards whose samples begin with their own number, and what a loader makes of them."""

from dataclasses import fields
from pathlib import Path

import numpy as np

from llmfoundry_lite.config.data_schema import StageConfig, StreamConfig, TextDatasetConfig
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.data.dataset import TextDataset
from llmfoundry_lite.data.loader import TextLoader, build_text_loader
from tests.helpers.mds_writer import MDSWriter

SEQ_LEN = 8


def write_shards(folder: Path, num_samples: int = 100, size_limit: int = 1_000, first: int = 0, **options) -> Path:
    """Samples that begin with their own number: [n, n + 1, …]; about ten in a shard."""
    with MDSWriter(out=str(folder), columns={"tokens": "bytes"}, size_limit=size_limit, **options) as writer:
        for number in range(first, first + num_samples):
            writer.write({"tokens": np.arange(number, number + SEQ_LEN).tobytes()})
    return folder


def _streams(described: dict) -> dict[str, StreamConfig]:
    return {name: StreamConfig(**stream) for name, stream in described.items()}


def _span(text: str | None) -> Duration | None:
    return None if text is None else Duration.parse(text)


def open_data(folder: Path | None, **settings) -> TextDataset:
    """`settings` are those of the YAML's block and those of `TextDataset`; streams and stages as plain dictionaries."""
    settings = {"max_seq_len": SEQ_LEN, "global_batch_size": 12, "shuffle": True, "shuffle_seed": 3} | settings
    if folder:
        settings["local"] = str(folder)
    settings["stages"] = [
        StageConfig(until=_span(stage.get("until")), streams=_streams(stage.get("streams", {})))
        for stage in settings.get("stages", [])
    ]
    settings["max_duration"] = _span(settings.get("max_duration"))
    settings["streams"] = _streams(settings.get("streams", {}))
    names = {field.name for field in fields(TextDatasetConfig)} - {"max_seq_len"}
    config = TextDatasetConfig(**{name: value for name, value in settings.items() if name in names})
    return TextDataset(config, **{name: value for name, value in settings.items() if name not in names})


def numbers(loader: TextLoader) -> list[list[int]]:
    """The sample numbers of every batch that is left in the epoch."""
    return [batch["input_ids"][:, 0].tolist() for batch in loader]


def numbers_of(dataset: TextDataset, num_workers: int = 0, **options) -> list[list[int]]:
    return numbers(build_text_loader(dataset, num_workers=num_workers, **options))
