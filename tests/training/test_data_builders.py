"""Arguments with which loaders and evaluators are built, without building them."""

from types import SimpleNamespace

from llmfoundry_lite.config.layout import layout_of
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.training import data_builders
from tests.helpers.tiny import tiny_config, write_config


def test_a_subset_for_evaluation_is_of_samples_and_for_ones_own_loader_of_whole_batches(tmp_path, monkeypatch):
    told, asked = [], []
    monkeypatch.setattr(data_builders, "TextDataset", lambda *_, **options: told.append(options["max_samples"]))
    monkeypatch.setattr(data_builders, "build_text_loader", lambda *_, **__: [])
    monkeypatch.setattr(data_builders, "call_object", lambda *_, **__: [])
    monkeypatch.setattr(data_builders, "Evaluator", SimpleNamespace)
    monkeypatch.setattr(data_builders, "this_rank", lambda: SimpleNamespace(rank=0))
    loaders = {"text": {"dataset": {"local": "x"}}, "own": {"name": "python:a:b"}}
    shape = {"eval_loader": None, "eval_interval": "1ba", "global_train_batch_size": 10, "device_eval_batch_size": 4}
    for subset in (-1, 3):
        values = tiny_config(tmp_path, eval_loaders=loaders, eval_subset_num_batches=subset, **shape)
        config = load_train_config([write_config(tmp_path / "run.yaml", values)]).config
        layout = layout_of(config, 2)
        asked += [one.subset_num_batches for one in data_builders.build_evaluators(config, layout)]
        data_builders.build_data("train_loader", config.train_loader, config, 10, layout)
    assert told == [None, None, 30, None]
    assert asked == [-1, -1, -1, 4]
