"""Text and a small tokenizer for the data tests; a reader of MDS that is not ours."""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from llmfoundry_lite.data.order import SampleOrder, rows_and_steps_of_worker
from llmfoundry_lite.data.streams import ShardFolder
from llmfoundry_lite.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer


def make_documents(count: int, *, seed: int = 0, words: int = 60) -> list[str]:
    """Documents of different lengths, some with more than ASCII, all different."""
    generator = random.Random(seed)
    alphabet = "etaoinshrdlucmfwypvbgkqjxzéß漢"
    lexicon = ["".join(generator.choices(alphabet, k=generator.randint(1, 9))) for _ in range(800)]
    documents = []
    for index in range(count):
        length = generator.randint(1, 2 * words)
        documents.append(f"{index}: " + " ".join(generator.choices(lexicon, k=length)) + ".\n")
    return documents


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(make_documents(400, seed=1), 600).save(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return load_tokenizer(tokenizer_folder)


def read_samples(folder: Path) -> np.ndarray:
    """All samples of one split, as StreamingDataset's own reader sees them."""
    from streaming import LocalDataset

    dataset = LocalDataset(local=str(folder))
    return np.stack([dataset[index]["tokens"] for index in range(len(dataset))])


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def downloads(monkeypatch) -> list[str]:
    """The shards that this process has downloaded so far."""
    names, download = [], ShardFolder.download

    def download_and_note(self, name):
        if name != "index.json":
            names.append(name)
        return download(self, name)

    monkeypatch.setattr(ShardFolder, "download", download_and_note)
    return names


def slices_of_workers(
    order: SampleOrder,
    epoch: int,
    rank: int,
    world_size: int,
    num_workers: int,
    first_batch: int,
    num_batches: int | None = None,
) -> list[Iterator[np.ndarray]]:
    """Return the ids that each worker of a simulated rank reads: all its batches, or its share of `num_batches`."""
    slices, num_workers = [], max(1, num_workers)
    for worker in range(num_workers):
        row_indices, steps = rows_and_steps_of_worker(
            order, rank=rank, world_size=world_size, worker=worker, num_workers=num_workers, first_batch=first_batch
        )
        steps = steps if num_batches is None else steps[: -(-num_batches // num_workers)]
        slices.append(iter(order.build_epoch(epoch).sample_ids(row_indices, steps)))
    return slices
