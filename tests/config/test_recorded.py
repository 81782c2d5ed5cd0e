"""A configuration that an earlier release recorded means what it meant then."""

import copy
from pathlib import Path

import pytest

from llmfoundry_lite.config.changes import find_changes, find_model_changes, refuse_changes
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.recorded import translate_recorded
from llmfoundry_lite.config.schema import as_dict
from llmfoundry_lite.errors import CheckpointError

YAML = str(Path(__file__).resolve().parents[2] / "yamls/pretrain/mpt-125m.yaml")
RMS = ("model.norm_type=rmsnorm", "model.norm_eps=1e-6")
NORM_KEYS = ("norm_type", "norm_eps")


def resolved(*arguments):
    return as_dict(load_train_config([YAML, *arguments]).config)


def earlier(*arguments, **attention):
    """As a release before `attn_config.norm_type` recorded it."""
    config = resolved(*arguments)
    for key in NORM_KEYS:
        del config["model"]["attn_config"][key]
    config["model"]["attn_config"] |= attention
    return config


def norm_of(config):
    return tuple(config["model"]["attn_config"].get(key) for key in NORM_KEYS)


@pytest.mark.parametrize("key", ["qk_ln", "qk_gn"])
def test_the_norms_of_q_and_k_were_the_models(key):
    there = earlier(*RMS, f"model.attn_config.{key}=true")
    assert norm_of(translate_recorded(copy.deepcopy(there))) == ("rmsnorm", 1e-6)
    assert norm_of(translate_recorded(there, is_imported=True)) == (None, None), "LLM Foundry's never were"


def test_a_run_without_such_norms_has_not_changed():
    assert not any(find_changes(translate_recorded(earlier(*RMS)), resolved(*RMS)).values())


def test_a_run_with_them_goes_on_when_its_yaml_says_which_they_are():
    there = translate_recorded(earlier(*RMS, "model.attn_config.qk_ln=true"))
    here = (*RMS, "model.attn_config.qk_ln=true")
    with pytest.raises(CheckpointError) as caught:
        refuse_changes(find_changes(there, resolved(*here))["never"])
    said = [word.rstrip(",") for word in str(caught.value).split("set ")[1].split() if "=" in word][:2]
    assert said == ["model.attn_config.norm_type=rmsnorm", "model.attn_config.norm_eps=1e-06"]
    assert not any(find_changes(there, resolved(*here, *said)).values())


def test_weights_alone_of_such_a_run_are_said_to_be_of_another_model():
    there = translate_recorded(earlier(*RMS, "model.attn_config.qk_ln=true"))
    here = resolved(
        "model.attn_config.qk_ln=true", *RMS, "optimizer.lr=1", "seed=3", "model.init_config.emb_init_std=1"
    )
    assert list(map(str, find_model_changes(there, here))) == [
        "model.attn_config.norm_type rmsnorm -> low_precision_layernorm",
        "model.attn_config.norm_eps 1e-06 -> 1e-05",
    ]
    assert find_model_changes({"model": there["model"]}, here), "of an import, the model alone is recorded"
    assert not find_model_changes({}, here)


def test_todays_records_mean_what_they_say():
    there = resolved(*RMS, "model.attn_config.qk_ln=true", "scheduler.t_warmup=0.00005dur")
    assert translate_recorded(copy.deepcopy(there)) == there


def test_positions_were_scaled_whatever_rope_impl_said():
    rope = ("model.attn_config.rope=true", "model.attn_config.rope_hf_config={type: linear, factor: 2}")
    there = translate_recorded(earlier(*rope, "model.attn_config.rope_impl=hf", rope_impl="dail"))
    changes = find_changes(there, resolved(*rope))["never"]
    assert [change.key.rpartition(".")[2] for change in changes] == ["rope_impl", "type", "factor"]
    assert not any(find_changes(there, resolved(*rope, "model.attn_config.rope_impl=hf")).values())


@pytest.mark.parametrize(
    "config",
    [
        *(None, 3, [], {}, {"model": 3}, {"model": {"attn_config": []}}),
        {"model": {"attn_config": {"rope": True, "rope_hf_config": 3}}},
    ],
)
def test_what_is_not_understood_stays_as_it_is(config):
    assert translate_recorded(copy.deepcopy(config)) == config
