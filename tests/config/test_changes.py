"""What may change in the middle of a run: every key has a rule, and nothing that may not change does."""

import copy
from pathlib import Path

import pytest

from llmfoundry_lite.config.changes import RULES, Change, find_changes, refuse_changes, rule_of, schema_keys
from llmfoundry_lite.config.layers import HARDWARE_KEYS
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.schema import as_dict
from llmfoundry_lite.errors import CheckpointError

YAML = str(Path(__file__).resolve().parents[2] / "yamls/pretrain/mpt-125m.yaml")


def resolved(*arguments):
    return as_dict(load_train_config([YAML, *arguments]).config)


def test_every_key_of_the_schema_has_a_rule():
    keys = list(schema_keys())
    assert {"optimizer.lr", "eval_loader", "model.attn_config.rope_hf_config.factor", "fsdp_config"} <= set(keys)
    assert "train_loader.dataset.streams.*.proportion" in keys
    without = []
    for key in keys:
        try:
            rule_of(key)
        except KeyError:
            without.append(key)
    assert not without, f"decide in config/changes.py whether these may change in the middle of a run: {without}"


def test_every_rule_is_about_a_key_that_exists():
    keys = [*schema_keys(), "optimizer.kwargs.weight_decay"]
    assert not [rule for rule in RULES if not any(key == rule or key.startswith(f"{rule}.") for key in keys)]


def test_whatever_an_overlay_may_set_changes_freely():
    assert {rule_of(key) for key in HARDWARE_KEYS} == {"freely"}


@pytest.mark.parametrize(
    ("argument", "rule", "text"),
    [
        ("optimizer.lr=1e-5", "by being said", "optimizer.lr 0.0006 -> 1e-05"),
        ("scheduler.alpha_f=0.5", "by being said", "scheduler.alpha_f 0.1 -> 0.5"),
        ("max_duration=9ba", "by being said", "max_duration 4800ba -> 9ba"),
        ("save_interval=7ba", "by being said", "save_interval 1000ba -> 7ba"),
        ("seed=4", "never", "seed 17 -> 4"),
        ("model.n_layers=3", "never", "model.n_layers 12 -> 3"),
        ("train_loader.dataset.local=/elsewhere", "freely", None),
        ("precision=fp32", "freely", None),
    ],
)
def test_a_change_is_found_and_judged(argument, rule, text):
    found = find_changes(resolved(), resolved(argument))
    assert [name for name, changes in found.items() if changes] == [rule]
    assert text is None or [str(change) for change in found[rule]] == [text]


def test_a_block_that_comes_or_goes_is_one_change():
    found = find_changes(resolved(), resolved("eval_loader=null", "fsdp_config=null"))
    assert [change.key for change in found["by being said"]] == ["eval_loader"]
    assert [change.key for change in found["freely"]] == ["fsdp_config"]


def test_a_stream_may_lie_elsewhere_but_not_weigh_more():
    there = resolved()
    stream = {"local": "/a", "remote": None, "split": None, "proportion": 0.5, "repeat": None, "choose": None}
    there["train_loader"]["dataset"]["streams"] = {"web": stream}
    here = copy.deepcopy(there)
    here["train_loader"]["dataset"]["streams"]["web"] |= {"local": "/b", "proportion": 0.75}
    found = find_changes(there, here)
    assert found["freely"] == [Change("train_loader.dataset.streams.web.local", "/a", "/b")]
    assert found["never"] == [Change("train_loader.dataset.streams.web.proportion", 0.5, 0.75)]
    here["train_loader"]["dataset"]["streams"]["code"] = stream
    assert "train_loader.dataset.streams.code" in [change.key for change in find_changes(there, here)["never"]]


def test_a_checkpoint_of_another_release_has_the_defaults_of_what_it_does_not_say():
    there = resolved()
    del there["seed"], there["model"]["attn_config"]["qk_gn"]
    there["no_longer_known"] = 3
    assert not any(find_changes(there, resolved()).values())
    assert [str(change) for change in find_changes(there, resolved("seed=4"))["never"]] == ["seed 17 -> 4"]


def test_what_may_never_change_is_refused_in_one_line_that_says_what_to_do():
    with pytest.raises(CheckpointError) as caught:
        refuse_changes(find_changes(resolved(), resolved("seed=4", "optimizer.eps=1e-6"))["never"])
    assert str(caught.value) == (
        "optimizer.eps is 1e-06 here and 1e-08 in the checkpoint, seed is 4 here and 17 in the checkpoint; a run "
        "carries on as the run it was: set optimizer.eps=1e-08 seed=17, or begin a new run with its weights (another "
        "run_name, load_path and load_weights_only=true)"
    )
