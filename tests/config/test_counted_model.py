"""Parts of the user's own that say which layer of ours they are like, for estimates that import nothing."""

import sys
from dataclasses import replace

import pytest

from llmfoundry_lite.config.counted_model import (
    counted_model,
    describe_told_parts,
    describe_unknown_parts,
    read_told_layer,
)
from llmfoundry_lite.config.layout import Layout
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.model_schema import AttentionConfig, FFNConfig, ModelConfig
from llmfoundry_lite.dry_run import describe_launch
from llmfoundry_lite.estimate.memory import estimate_training_memory
from llmfoundry_lite.models.flops import count_parameters
from llmfoundry_lite.own_facts import read_class_facts
from llmfoundry_lite.preflight import Preflight
from tests.helpers.tiny import tiny_config, write_config

SIZES = {"d_model": 32, "n_heads": 2, "n_layers": 2, "vocab_size": 64, "max_seq_len": 16}
OURS = ModelConfig(
    norm_type="rmsnorm",
    attn_config=AttentionConfig(attn_type="multiquery_attention"),
    ffn_config=FFNConfig(ffn_type="mptglu"),
    **SIZES,
)
OWN = ModelConfig(
    norm_type="python:alike.parts:Norm",
    attn_config=AttentionConfig(attn_type="python:alike.parts:Attention"),
    ffn_config=FFNConfig(ffn_type="python:alike.parts:Ffn"),
    **SIZES,
)


@pytest.fixture(autouse=True)
def write_parts(tmp_path, monkeypatch):
    """Return a function that writes the package `alike`, whose import would end the process."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "alike").mkdir()
    (tmp_path / "alike/__init__.py").write_text("raise SystemExit('imported')\n")

    def write(norm="like = 'rmsnorm'", attention="like = 'multiquery_attention'", ffn="like = 'mptglu'"):
        bodies = {"Norm": norm, "Attention": attention, "Ffn": ffn}
        classes = [f"class {name}:\n    {body}\n" for name, body in bodies.items()]
        (tmp_path / "alike/parts.py").write_text("raise SystemExit\n" + "".join(classes))
        read_class_facts.cache_clear()

    write()
    yield write
    read_class_facts.cache_clear()
    assert "alike" not in sys.modules


def load(tmp_path, *words):
    config = tiny_config(tmp_path / "data", model__ffn_config={"ffn_type": "mptglu"})
    return load_train_config([write_config(tmp_path / "run.yaml", config), *words]).config


def test_a_model_is_counted_with_the_layers_that_its_parts_are_like():
    assert counted_model(OWN) == OURS
    assert count_parameters(counted_model(OWN)) == count_parameters(OURS) > count_parameters(OWN)
    assert counted_model(OURS) is OURS
    assert describe_unknown_parts(OWN) == ""


def test_parts_are_described_with_their_layers_and_the_width():
    assert describe_told_parts(OWN) == (
        "python:alike.parts:Norm (model.norm_type) like rmsnorm, "
        "python:alike.parts:Attention (model.attn_config.attn_type) like multiquery_attention, "
        "python:alike.parts:Ffn (model.ffn_config.ffn_type) like mptglu of width 128"
    )
    assert describe_told_parts(OURS) == ""


def test_a_part_that_is_left_out_counts_as_nothing():
    counted = counted_model(OWN, without={"ffn_config.ffn_type"})
    assert counted == replace(OURS, ffn_config=OWN.ffn_config)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("x = 1", "its class does not say with `like` which layer of ours is as large"),
        ("like = 'mpt' + 'glu'", "its like is computed, and only literals can be read"),
        ("like = 'rmsnorm'", "its like is none of mptmlp, mptglu"),
        ("like = 'python:'", "its like is none of mptmlp, mptglu"),
        ("like = ['mptglu']", "its like is none of mptmlp, mptglu"),
    ],
)
def test_what_is_not_a_layer_of_ours_tells_nothing(write_parts, body, reason):
    write_parts(ffn=body)
    assert read_told_layer("ffn_config.ffn_type", "python:alike.parts:Ffn") == (None, reason)
    assert counted_model(OWN) == replace(OURS, ffn_config=OWN.ffn_config)
    assert describe_unknown_parts(OWN) == "python:alike.parts:Ffn (model.ffn_config.ffn_type)"


def test_a_function_of_attention_is_like_no_layer():
    own = replace(OURS, attn_config=AttentionConfig(attn_impl="python:alike.parts:Attention"))
    assert counted_model(own) == own
    assert describe_unknown_parts(own) == "python:alike.parts:Attention (model.attn_config.attn_impl)"


def test_memory_is_estimated_as_for_the_layer(tmp_path, write_parts):
    ours = load(tmp_path)
    own = load(tmp_path, "model.ffn_config.ffn_type=python:alike.parts:Ffn")
    assert estimate_training_memory(own, Layout()) == estimate_training_memory(ours, Layout())
    write_parts(ffn="x = 1")
    assert estimate_training_memory(own, Layout()).total_bytes < estimate_training_memory(ours, Layout()).total_bytes


def test_a_dry_run_counts_the_layer_and_says_so(tmp_path):
    own = load(tmp_path, "model.ffn_config.ffn_type=python:alike.parts:Ffn", "model.norm_type=python:alike.parts:Gone")
    text = describe_launch(own, Layout(), Preflight())
    counted = count_parameters(counted_model(own.model))
    assert f"model          {counted:,} parameters" in text
    assert (
        "\nown parts      counted as the class says: python:alike.parts:Ffn (model.ffn_config.ffn_type) like mptglu of "
        f"width {4 * own.model.d_model}\n" in text
    )
    assert "python:alike.parts:Gone (model.norm_type): not counted in parameters, FLOPs and memory, because " in text


def test_a_layer_of_known_size_is_copied_to_each_device_without_a_note(tmp_path, write_parts, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = [write_config(tmp_path / "run.yaml", tiny_config(tmp_path / "data"))]
    words += ["model.ffn_config.ffn_type=python:alike.parts:Ffn", "fsdp_config=null"]
    assert not any("is taken to be as large" in str(note) for note in load_train_config(words).notes)
    write_parts(ffn="x = 1")
    assert any("is taken to be as large" in str(note) for note in load_train_config(words).notes)
