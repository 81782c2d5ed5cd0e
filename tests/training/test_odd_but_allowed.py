"""Configurations that are unusual and right: each must train, and where it is only another way, to the same losses."""

import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.launch import train
from tests.helpers.tiny import VOCAB_SIZE, read_metrics, tiny_config, values, write_config

pytestmark = pytest.mark.multiprocess


def own_loader(device_batch_size, num_workers, drop_last, num_samples):
    rows = torch.arange(num_samples * 32).view(num_samples, 32) % VOCAB_SIZE
    return DataLoader(
        [{"input_ids": row} for row in rows], batch_size=device_batch_size, num_workers=num_workers, drop_last=drop_last
    )


def run(tmp_path, config, name, num_ranks=1):
    path = write_config(tmp_path / f"{name}.yaml", {**config, "run_name": name})
    train([path], tmp_path, num_ranks).check()
    return read_metrics(tmp_path / "runs" / name)


def losses(records):
    return values(records, "loss/train/total")


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {"model__vocab_size": 97, "model__d_model": 8, "model__n_heads": 2},  # norms smaller than four ranks' rows
        {"compile_config": {"backend": "aot_eager"}, "fsdp_config": {"activation_checkpointing": True}},
        {"fsdp_config": {"activation_checkpointing": True, "activation_checkpointing_reentrant": True}},
        {"model__attn_config": {"alibi": True, "qk_ln": True, "clip_qkv": 6.0}, "model__no_bias": True},
        {"algorithms": {"gradient_clipping": {"clipping_type": "value", "clipping_threshold": 0.01}}},
        {"optimizer": {"name": "lion", "lr": 1e-3}, "eval_loader": None, "eval_interval": "3ba"},
    ],
)
def test_on_one_rank_and_on_four(tmp_path, data, changes):
    config = tiny_config(data, **changes)
    plain = {**config, "compile_config": None, "fsdp_config": {}}
    assert losses(run(tmp_path, config, "four", 4)) == pytest.approx(losses(run(tmp_path, plain, "one")), abs=1e-4)


def test_dropout_is_the_same_with_activation_checkpointing(tmp_path, data):
    config = tiny_config(data, model__resid_pdrop=0.2)
    recomputed = tiny_config(data, model__resid_pdrop=0.2, fsdp_config={"activation_checkpointing": True})
    assert losses(run(tmp_path, recomputed, "recomputed")) == pytest.approx(
        losses(run(tmp_path, config, "kept")), abs=1e-6
    )


def test_streams_take_what_they_do_not_say_from_the_data_set(tmp_path, data):
    streams = {
        "a": {"local": str(data), "proportion": 0.5},
        "b": {"local": str(data), "split": "val", "proportion": 0.5},
    }
    config = tiny_config(data, max_duration="30ba")
    config["train_loader"]["dataset"] = {"split": "train", "shuffle": True, "shuffle_seed": 3, "streams": streams}
    one, two = run(tmp_path, config, "one"), run(tmp_path, config, "two", 2)
    assert values(one, "data/digest") == values(two, "data/digest")


def test_a_loader_and_an_optimizer_of_ones_own(tmp_path, data):
    loader = {"name": f"python:{__name__}:own_loader", "num_samples": 24}
    config = tiny_config(data, train_loader=loader, eval_loader=loader, eval_interval="2ba", max_duration="4ba")
    config["optimizer"] = {"name": "python:torch.optim:SGD", "lr": 0.1, "momentum": 0.9}
    records = run(tmp_path, config, "own")
    assert losses(records)[-1] < losses(records)[0]
    config["optimizer"]["momentun"] = 0.9
    path = write_config(tmp_path / "typo.yaml", {**config, "run_name": "typo"})
    result = train([path], tmp_path)
    assert result.exit_codes == [2]
    assert "optimizer: python:torch.optim:SGD does not take these keys" in result.output


def test_a_refused_launch_leaves_the_record_as_it_was(tmp_path, data):
    config = tiny_config(data, max_duration="2ba")
    run(tmp_path, config, "tiny")
    before = {path.name: path.read_bytes() for path in (tmp_path / "runs/tiny").iterdir() if path.is_file()}
    result = train([str(tmp_path / "tiny.yaml"), "model.d_model=64"], tmp_path)
    assert result.exit_codes == [2]
    assert {path.name: path.read_bytes() for path in (tmp_path / "runs/tiny").iterdir() if path.is_file()} == before


def test_a_run_directory_that_cannot_be_is_named(tmp_path, data):
    (tmp_path / "a-file").touch()
    path = write_config(tmp_path / "tiny.yaml", tiny_config(data, run_folder="a-file/run"))
    result = train([path], tmp_path)
    assert result.exit_codes == [2]
    assert result.output == "error: a-file/run cannot be written: Not a directory; make room, or set run_folder\n"


def test_a_launch_does_not_time_the_processor_to_name_it(monkeypatch):
    import cpuinfo
    from composer.utils import get_composer_env_dict

    import llmfoundry_lite.training.trainer  # noqa: F401

    monkeypatch.setattr(cpuinfo, "get_cpu_info", lambda: pytest.fail("asked"))
    assert get_composer_env_dict()["composer_version"]
