"""A run whose norm, feed-forward layer and attention are the user's own: on other ranks, resumed, replayed."""

import re

import pytest
import torch

from llmfoundry_lite.checkpoint.full_tensors import load_full_tensors, open_checkpoint
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.launch.replay import compare_replay, plan_replay, write_replay
from llmfoundry_lite.launch_replay import main
from tests.helpers.launch import ROOT, launch
from tests.helpers.runs import attempt, losses, metrics, run, saves
from tests.helpers.tiny import tiny_config, values, write_data

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

PARTS = "python:tests.helpers.own_parts"
OWN_PARTS = {
    "model__norm_type": f"{PARTS}:ScaleNorm",
    "model__norm_kwargs": {"tilt": 0.1},
    "model__ffn_config": {"ffn_type": f"{PARTS}:SquaredReLU", "power": 2},
    "model__attn_config": {
        "attn_type": f"{PARTS}:GatedAttention",
        "attn_impl": f"{PARTS}:softcap_attention",
        "gate_bias": 0.5,
    },
}
SCHEDULE = {"name": f"{PARTS}:Triangle", "peak": 0.4}
SHARDED = {"fsdp_config": {"sharding_strategy": "FULL_SHARD"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with `whole`, a run of 6 batches on one rank."""
    folder = tmp_path_factory.mktemp("runs")
    write_data(folder / "data")
    run(folder, config(folder), "whole")
    return folder


def config(folder):
    batches = {"global_train_batch_size": 12, "device_train_microbatch_size": 1, "max_duration": "6ba"}
    saves = {"save_interval": "2ba", "autoresume": True}
    return tiny_config(folder / "data", exact_sums=True, scheduler=SCHEDULE, **batches, **saves, **OWN_PARTS)


def weights(folder, name, batch=6):
    return load_full_tensors(str(saves(folder, name) / f"ba{batch}"))


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1)], ids=["1 then 2", "2 then 1"])
def test_it_carries_on_on_other_ranks_bit_equal(folder, ranks):
    name = f"on-{ranks[0]}-then-{ranks[1]}"
    first = run(folder, config(folder), name, ranks[0], stop_at="4ba", **SHARDED)
    # 5 norms of 33, 2 layers of 8,480 with their scale, and 2 of attention of 5,280 with their gate.
    assert "own parts: 27,685 of the model's 31,781 parameters" in first.output
    run(folder, config(folder), name, ranks[1], **SHARDED)
    assert losses(folder, name) == losses(folder, "whole") and len(losses(folder, name)) == 6
    factors = [0, 1 / 2.4, 2 / 2.4, 3 / 3.6, 2 / 3.6, 1 / 3.6]  # with the peak after 2.4 of 6 batches
    assert values(metrics(folder, name), "lr") == pytest.approx([1e-2 * factor for factor in factors])
    expected = weights(folder, "whole")
    found = weights(folder, name)
    assert [key for key in expected if not torch.equal(expected[key], found[key])] == []

    manifest = open_checkpoint(saves(folder, name) / "ba6").manifest
    recorded = manifest.config["model"]
    assert recorded["norm_type"] == f"{PARTS}:ScaleNorm" and recorded["norm_kwargs"] == {"tilt": 0.1}
    assert recorded["ffn_config"]["kwargs"] == {"power": 2}
    assert recorded["attn_config"]["kwargs"] == {"gate_bias": 0.5}
    assert manifest.config["scheduler"] == {"name": f"{PARTS}:Triangle", "kwargs": {"peak": 0.4}}


def test_a_loss_of_ones_own_is_bit_equal_on_other_ranks(folder):
    loss = {"loss_fn": "python:torch.nn:CrossEntropyLoss", "loss_kwargs": {"reduction": "none", "label_smoothing": 0.2}}
    smoothed = config(folder)
    smoothed["model"] |= loss
    run(folder, smoothed, "smoothed")
    run(folder, smoothed, "smoothed-elsewhere", 2, stop_at="3ba", **SHARDED)
    run(folder, smoothed, "smoothed-elsewhere", 1)
    assert losses(folder, "smoothed-elsewhere") == losses(folder, "smoothed") != losses(folder, "whole")
    expected = weights(folder, "smoothed")
    found = weights(folder, "smoothed-elsewhere")
    assert [key for key in expected if not torch.equal(expected[key], found[key])] == []


def test_a_logger_of_ones_own_gets_what_the_log_has(folder):
    path = folder / "losses.txt"
    run(folder, config(folder), "logged", 2, loggers={f"{PARTS}:Tail": {"path": str(path)}}, max_duration="2ba")
    name, *lines = path.read_text().splitlines()
    assert name == "logged"
    assert [float(line.split()[1]) for line in lines] == losses(folder, "logged")
    assert [line.split()[0] for line in lines] == ["1", "2"], "the numbers of the batches"


def test_the_page_s_callback_has_the_same_state_on_other_ranks(folder):
    """It averages the loss of the whole batch, which it finds where the page says."""
    page = (ROOT / "docs/own-parts.md").read_text()
    section = page.partition("\n## Callbacks\n")[2]
    code, *_ = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (folder / "averages.py").write_text(code)
    averaged = {**config(folder), "callbacks": {"python:averages:LossAverage": {"beta": 0.5}}}
    run(folder, averaged, "averaged", 2, stop_at="3ba", **SHARDED)
    averaged["callbacks"] = {"python:averages:LossAverage": {"beta": 0.25}}
    resumed = run(folder, averaged, "averaged", max_duration="4ba")
    assert "callbacks.extra.python:averages:LossAverage.beta 0.5 -> 0.25" in resumed.output

    first, *others = losses(folder, "averaged")
    averages = [first]
    for beta, loss in zip((0.5, 0.5, 0.25), others, strict=True):
        averages.append(beta * averages[-1] + (1 - beta) * loss)
    assert values(metrics(folder, "averaged"), "loss/average") == averages and len(averages) == 4


def test_another_argument_in_mid_run_is_refused(folder):
    name = "changed"
    run(folder, config(folder), name, stop_at="2ba")
    changed = config(folder)
    changed["model"]["norm_kwargs"] = {"tilt": 0.2}
    refused = attempt(folder, changed, name)
    assert refused.exit_codes == [2]
    assert "model.norm_kwargs.tilt is 0.2 here and 0.1 in the checkpoint" in refused.output


def test_a_replay_is_bit_equal_and_needs_trust(folder):
    place = str(folder / "runs" / "whole")
    with pytest.raises(
        ConfigError, match=r"brings code of its author: .*model\.norm_type python:.*, scheduler\.name python:"
    ):
        plan_replay(place, "ba2..ba6")

    plan = plan_replay(place, "ba2..ba6", trusts_code=True)
    path = write_replay(plan, folder / "replay", 2, trusts_code=True)
    launch(main, ([path],), folder, 2).check()
    outcome = compare_replay(plan, folder / "replay")
    assert outcome.is_equal, outcome.text


def test_a_layer_that_cannot_be_trained_is_refused_before_training(folder):
    broken = config(folder)
    broken["model"]["norm_type"] = "python:torch.nn:BatchNorm1d"
    broken["model"]["norm_kwargs"] = {}
    refused = attempt(folder, broken, "broken", 2)
    assert set(refused.exit_codes) == {2}
    assert "model.norm_type: python:torch.nn:BatchNorm1d has a buffer, running_mean" in refused.output
