"""Fixtures that tests of data sets and of their preparation share."""

import pytest

from tests.helpers.data import downloads, tokenizer, tokenizer_folder  # noqa: F401


@pytest.fixture
def as_rank(monkeypatch):
    """Make this process one rank of a larger world, each rank on a machine of its own, without the other ranks."""

    def become(rank: int, world_size: int) -> None:
        for name, value in {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}.items():
            monkeypatch.setenv(name, str(value))

    return become
