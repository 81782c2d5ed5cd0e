"""What one island of several refuses."""

import pytest

from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.errors import ConfigError

ISLAND = [
    "mpt-125m",
    "islands={name: a, coordinator: '127.0.0.1:7070'}",
    "device_train_microbatch_size=4",
    "save_folder=saves",
]


def test_an_island_without_dropout_is_taken():
    assert load_train_config(ISLAND).config.islands is not None


@pytest.mark.parametrize("key", ["resid_pdrop", "emb_pdrop", "attn_config.attn_pdrop"])
def test_an_island_refuses_each_kind_of_dropout(key):
    with pytest.raises(ConfigError, match="islands: an island does not go with dropout yet"):
        load_train_config([*ISLAND, f"model.{key}=0.1"])
