import json

import pytest

from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.starter import write_starter


@pytest.mark.parametrize(("samples", "batch"), [(100_000, 256), (256, 256), (27, 16), (8, 8), (1, 1)])
def test_a_small_data_set_gets_a_batch_that_several_devices_can_share(tmp_path, samples, batch):
    summary = {"max_seq_len": 2048, "tokenizer": {"vocab_size": 7070}, "splits": {"train": {"samples": samples}}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    write_starter(tmp_path, "125m", tmp_path / "mine.yaml")
    assert load_train_config([str(tmp_path / "mine.yaml")], {}).config.global_train_batch_size == batch
