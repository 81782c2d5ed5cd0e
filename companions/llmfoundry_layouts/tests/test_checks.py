"""Division of layers and of samples: what is refused, what a dry run says of it, and what it saves."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmfoundry_lite.config.check import check_batch
from llmfoundry_lite.config.layout import Layout, layout_of
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.model_schema import AttentionConfig, ModelConfig
from llmfoundry_lite.dry_run import describe_launch
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.estimate.memory import estimate_training_memory
from llmfoundry_lite.preflight import Preflight
from tests.helpers.plans import estimate_memory
from tests.helpers.tiny import tiny_config, write_config

LAYERS: dict[str, Any] = {"tp_config": {"tensor_parallel_degree": 2}, "model__attn_config__fused_qkv": True}
SAMPLES: dict[str, Any] = {
    "cp_config": {"context_parallel_degree": 2, "kind": "heads"},
    "model__attn_config__fused_qkv": False,
    "model__attn_config__alibi": True,
}


def load(tmp_path: Path, divided: dict[str, Any], *arguments: str) -> Any:
    return load_train_config([write_config(tmp_path / "run.yaml", tiny_config(tmp_path, **divided)), *arguments]).config


REFUSED_LAYERS = {
    "model.attn_config.qk_ln=true": (
        "model.attn_config.qk_ln: a norm over all heads, which tp_config divides among devices; use qk_gn: true, a "
        "norm over each head"
    ),
    "tp_config.tensor_parallel_degree=3": (
        "tp_config.tensor_parallel_degree: 3 does not divide model.n_heads, 4; use 1, 2 or 4"
    ),
    "tp_config.tensor_parallel_degree=0": ("tp_config.tensor_parallel_degree: 0 given, expected a number above 0"),
    "model.attn_config.attn_type=multiquery_attention": (
        "tp_config.tensor_parallel_degree: 2 does not divide the heads of keys and values, 1; use 1"
    ),
    "tp_config.sequence_parallel=true max_seq_len=31": (
        "tp_config.sequence_parallel: sequences of max_seq_len, 31, cannot be divided by 2; change the length or the "
        "degree, or remove it"
    ),
    "tp_config.sequence_parallel=true train_loader.dataset.max_seq_len=31": (
        "tp_config.sequence_parallel: sequences of train_loader.dataset.max_seq_len, 31, cannot be divided by 2; "
        "change the length or the degree, or remove it"
    ),
    "model.vocab_size=2 tp_config.tensor_parallel_degree=4": (
        "tp_config.tensor_parallel_degree: 4 devices cannot share model.vocab_size, 2"
    ),
    "model.ffn_config.ffn_hidden_size=81": (
        "tp_config.tensor_parallel_degree: 2 does not divide the width of the feed-forward layer, 81; use 1"
    ),
    "compile_config={} model.attn_config.attn_pdrop=0.1": (
        "model.attn_config.attn_pdrop: cannot be compiled where tp_config divides layers and not the stream; set it "
        "to 0, or tp_config.sequence_parallel to true, or use compile_config: null"
    ),
    "train_loader.name=python:my.module:load": (
        "train_loader.name: python:my.module:load cannot know that with tp_config neighbouring devices must read the "
        "same samples; use text, or no tp_config"
    ),
}
REFUSED_SAMPLES = {
    "cp_config.kind=head": "cp_config.kind: 'head' is not known; did you mean heads? (expected heads or gather)",
    "cp_config.context_parallel_degree=0": "cp_config.context_parallel_degree: 0 given, expected a number above 0",
    "cp_config.degree=2": "cp_config.degree: unknown key; valid keys here: context_parallel_degree, kind",
    "cp_config.context_parallel_degree=3": (
        "cp_config.context_parallel_degree: 3 does not divide max_seq_len, 32; use 2 or 4"
    ),
    "cp_config.context_parallel_degree=8": (
        "cp_config.context_parallel_degree: 8 does not divide model.n_heads, 4; use cp_config.kind: gather, or a "
        "degree of 2 or 4"
    ),
    "tp_config.tensor_parallel_degree=2 cp_config.context_parallel_degree=4": (
        "cp_config.context_parallel_degree: 4 x 2 of tp_config does not divide model.n_heads, 4; use cp_config.kind: "
        "gather, or a degree of 2"
    ),
    "model.attn_config.attn_type=multiquery_attention": (
        "cp_config.context_parallel_degree: 2 does not divide the heads of keys and values, 1; use cp_config.kind: "
        "gather"
    ),
    "cp_config.kind=gather cp_config.context_parallel_degree=32": (
        "cp_config.context_parallel_degree: 32, of which each has two pieces, does not divide max_seq_len, 32; use "
        "2, 4, 8 or 16"
    ),
    "eval_loader.dataset.max_seq_len=31": (
        "cp_config.context_parallel_degree: 2 does not divide eval_loader.dataset.max_seq_len, 31; use another length"
    ),
    "train_loader.name=python:my.module:load": (
        "train_loader.name: python:my.module:load cannot know that with cp_config the devices of a sample must read "
        "the same samples; use text, or no cp_config"
    ),
}
CASES = [(LAYERS, *case) for case in REFUSED_LAYERS.items()]
CASES += [(SAMPLES, *case) for case in REFUSED_SAMPLES.items()]


@pytest.mark.parametrize(("divided", "arguments", "words"), CASES)
def test_what_cannot_be_divided_is_refused_by_name(tmp_path, divided, arguments, words):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, divided, *arguments.split())
    assert str(error.value).split(": ", 1)[1] == words


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        (
            "pp_config.blocks=[1,3]",
            "pp_config.blocks: [1, 3] given, 4 in all, and model.n_layers is 2; change one of them",
        ),
        ("pp_config.blocks=[]", "pp_config.blocks: [] given, expected 1 or more for each"),
        ("pp_config.virtual_stages=3", "pp_config.virtual_stages: 3 given, 1f1b has 1; change it or the schedule"),
    ],
)
def test_blocks_of_a_pipeline_with_a_degree_of_1_are_checked_too(tmp_path, argument, words):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, {}, "model.n_layers=2", argument)
    assert str(error.value) == f"command line: {words}"


@pytest.mark.parametrize(
    ("divided", "world_size", "arguments", "message"),
    [
        (
            LAYERS,
            5,
            "",
            "tp_config.tensor_parallel_degree: 2 does not divide the 5 devices of this launch; start a multiple of 2",
        ),
        (LAYERS, 6, "", "global_train_batch_size: 8 cannot be shared evenly by 3 groups of 2 devices (tp_config)"),
        (
            LAYERS,
            16,
            "global_train_batch_size=4",
            "global_train_batch_size: 4 cannot be shared evenly by 8 groups of 2 devices (tp_config)",
        ),
        (
            SAMPLES,
            3,
            "",
            "cp_config.context_parallel_degree: 2 does not divide the 3 devices of this launch; start a multiple",
        ),
        (
            SAMPLES,
            6,
            "tp_config.tensor_parallel_degree=2",
            "cp_config.context_parallel_degree: 2 does not divide the 3 groups of 2 devices (tp_config) of this "
            "launch; start a multiple of 4, or change the degree",
        ),
        (SAMPLES, 6, "", "global_train_batch_size: 8 cannot be shared evenly by 3 groups of 2 devices (cp_config)"),
    ],
)
def test_devices_and_batch_must_suit_the_groups(tmp_path, divided, world_size, arguments, message):
    config = load(tmp_path, divided, *arguments.split())
    check_batch(config, layout_of(config, 4))
    with pytest.raises(ConfigError) as error:
        check_batch(config, layout_of(config, world_size))
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_a_hardware_overlay_may_divide_layers_and_a_strategy_has_no_effect(tmp_path):
    whole = write_config(tmp_path / "run.yaml", tiny_config(tmp_path, model__attn_config__fused_qkv=True))
    over = {"overlay": "hardware", "tp_config": {"tensor_parallel_degree": 4, "strategy": "ffn"}}
    found = load_train_config([whole, write_config(tmp_path / "hardware.yaml", over)])
    assert found.config.tensor_parallel_degree == 4
    assert layout_of(found.config, 8).num_data_ranks == 2
    (note,) = found.notes
    assert note.endswith("tp_config.strategy has no effect: attention and feed-forward layers are both divided")


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (
            "",
            [
                "in attention each rank has 2 of 4 heads of all tokens",
                "rank 0: tokens 0-15 of each sample",
                "rank 1: tokens 16-31 of each sample",
            ],
        ),
        (
            "cp_config.kind=gather tp_config.tensor_parallel_degree=2",
            [
                "in attention each rank has the keys and values of all tokens, gathered",
                "rank 0: tokens 0-7 and 24-31 of each sample",
                "rank 2: tokens 8-15 and 16-23 of each sample",
            ],
        ),
    ],
)
def test_a_dry_run_says_which_rank_has_which_tokens(tmp_path, arguments, lines):
    config = load(tmp_path, SAMPLES, *arguments.split())
    said = describe_launch(config, layout_of(config, 8, 8), Preflight())
    assert all(line in said for line in lines)
    assert "parts of a sample (context)" in said
    assert "cp_config.context_parallel_degree: groups" not in said


def test_a_group_across_nodes_is_warned_of(tmp_path):
    config = load(tmp_path, SAMPLES, "cp_config.context_parallel_degree=4")
    assert (
        "cp_config.context_parallel_degree: groups of 4 devices span nodes of 2: every block exchanges over the "
        "network; a group whose size divides 2 stays in a node"
    ) in describe_launch(config, layout_of(config, 8, 2), Preflight())


@pytest.mark.parametrize("kind", ["heads", "gather"])
def test_divided_samples_take_less_memory(tmp_path, kind):
    half, whole = (
        load(tmp_path, SAMPLES, *arguments) for arguments in ([f"cp_config.kind={kind}"], ["cp_config=null"])
    )
    ours, theirs = (estimate_training_memory(config, layout_of(config, 2)) for config in (half, whole))
    samples = replace(whole, global_train_batch_size=4)  # as many tokens for each device
    as_many = estimate_training_memory(samples, layout_of(samples, 1))
    assert ours.parameters_bytes == theirs.parameters_bytes < as_many.parameters_bytes
    assert ours.activations_bytes < 1.3 * as_many.activations_bytes


def test_layers_divided_take_less_on_each_device():
    model = ModelConfig(
        d_model=64, n_heads=4, n_layers=2, max_seq_len=32, vocab_size=96, attn_config=AttentionConfig(fused_qkv=False)
    )
    whole, half = (
        estimate_memory(model, seq_len=32, microbatch_size=1, layout=Layout(tensor=degree)) for degree in (1, 2)
    )
    assert half.parameters_bytes < 0.6 * whole.parameters_bytes
    assert half.activations_bytes < 0.75 * whole.activations_bytes
    assert half.logits_bytes < 0.7 * whole.logits_bytes
