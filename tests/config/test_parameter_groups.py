"""`optimizer.param_groups`: which parameter is in which group, and what a YAML is told of its groups."""

import re
from dataclasses import replace

import pytest
from torch import nn

from llmfoundry_lite.config.changes import find_changes, refuse_changes
from llmfoundry_lite.config.layout import Layout
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.model_schema import AttentionConfig, FFNConfig, ModelConfig
from llmfoundry_lite.config.optimizer_schema import OptimizerConfig, ParameterGroupConfig
from llmfoundry_lite.config.parameter_groups import (
    Factors,
    check_groups,
    describe_overlaps,
    divide_parameters,
    refuse_slow_expressions,
)
from llmfoundry_lite.config.schema import as_dict
from llmfoundry_lite.dry_run import describe_launch
from llmfoundry_lite.errors import CheckpointError, ConfigError
from llmfoundry_lite.models.mpt import MPT
from llmfoundry_lite.models.names import list_parameters
from llmfoundry_lite.preflight import Preflight, check
from tests.helpers.tiny import tiny_config, write_config

SMALL = ModelConfig(d_model=32, n_heads=4, n_layers=2, max_seq_len=32, vocab_size=95)
NORM = ParameterGroupConfig(param_str_match="norm", lr=0.5)
BIAS = ParameterGroupConfig(param_str_match="bias", weight_decay=0.0)


def optimizer_of(*groups: ParameterGroupConfig, name: str = "decoupled_adamw", **settings) -> OptimizerConfig:
    return OptimizerConfig(name=name, lr=0.1, weight_decay=0.2, param_groups=list(groups), **settings)


def config_with(tmp_path, *arguments: str):
    yaml = write_config(tmp_path / "run.yaml", tiny_config(tmp_path / "data"))
    return load_train_config([yaml, *arguments]).config


# --------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    "model",
    [
        SMALL,
        replace(SMALL, no_bias=True, norm_type="rmsnorm", tie_word_embeddings=False),
        replace(SMALL, ffn_config=FFNConfig(ffn_type="mptglu"), learned_pos_emb=False),
        replace(SMALL, attn_config=AttentionConfig(fused_qkv=False, qk_ln=True)),
        replace(
            SMALL,
            attn_config=AttentionConfig(attn_type="grouped_query_attention", kv_n_heads=2, fused_qkv=False, qk_gn=True),
        ),
        replace(SMALL, attn_config=AttentionConfig(alibi=True, attn_type="multiquery_attention")),
    ],
)
def test_names_and_shapes_are_those_of_the_model_that_is_built(model):
    built = {name: tuple(parameter.shape) for name, parameter in MPT(model).named_parameters()}
    assert list_parameters(model) == built
    assert [*list_parameters(model)] == [*built]


def divide_as_llm_foundry_does(module: nn.Module, patterns: list[str]) -> list[list[str]]:
    """The rule of llmfoundry.utils.builders: each pattern takes what is left and matches; the rest comes first."""
    left = [name for name, _ in module.named_parameters()]
    groups = []
    for pattern in patterns:
        groups.append([name for name in left if re.search(pattern, name)])
        left = [name for name in left if name not in groups[-1]]
    return [left, *groups]


@pytest.mark.parametrize(
    "patterns",
    [
        ["norm", "bias"],
        ["bias", "norm"],
        [r"no.*\.bias"],
        [r"^model\.transformer\.w[tp]e"],
        [r"blocks\.1\.", "attn", "."],
    ],
)
def test_a_parameter_is_in_the_first_group_that_matches_it_as_in_llm_foundry(patterns):
    module = nn.Module()
    module.model = MPT(SMALL)  # as an attribute of Composer's model
    optimizer = optimizer_of(*[ParameterGroupConfig(param_str_match=pattern) for pattern in patterns])
    groups = divide_parameters(list_parameters(SMALL), optimizer)
    ours = [[f"model.{name}" for name in group.names] for group in groups]
    assert ours == divide_as_llm_foundry_does(module, patterns)


# --------------------------------------------------------------------------------------------------- settings


def test_a_group_has_the_settings_of_the_block_that_it_does_not_set_itself():
    others, norms, biases = divide_parameters(list_parameters(SMALL), optimizer_of(NORM, BIAS))
    assert [(group.settings.lr, group.settings.decay) for group in (others, norms, biases)] == [
        (0.1, 0.2),
        (0.5, 0.2),
        (0.1, 0.0),
    ]


def test_a_rate_of_a_group_is_that_of_all_its_parameters_with_muon_too():
    both = ParameterGroupConfig(param_str_match="bias", lr=0.5, adamw_lr=0.7)
    groups = divide_parameters([], optimizer_of(NORM, both, BIAS, name="muon", adamw_lr=0.3))
    assert [group.settings.adamw_lr for group in groups] == [0.3, None, 0.7, 0.3]


def test_factors_multiply_the_settings_of_each_group_and_divide_it():
    def factors_of(name: str) -> Factors:
        return Factors(lr=0.25, weight_decay=4.0) if "blocks" in name else Factors()

    groups = divide_parameters(list_parameters(SMALL), optimizer_of(NORM, name="muon", adamw_lr=0.4), factors_of)
    settings = [(group.settings.lr, group.settings.adamw_lr, group.settings.decay) for group in groups]
    assert settings == [(0.1, 0.4, 0.2), (0.025, 0.1, 0.8), (0.125, None, 0.8), (0.5, None, 0.2)]
    assert {name for group in groups for name in group.names} == {*list_parameters(SMALL)}
    assert groups[3].names == ["transformer.norm_f.weight", "transformer.norm_f.bias"]


# --------------------------------------------------------------------------------------------------- what is said


def test_a_group_that_matches_nothing_is_refused_with_names_that_it_could_match():
    groups = divide_parameters(list_parameters(SMALL), optimizer_of(ParameterGroupConfig(param_str_match="nrom")))
    with pytest.raises(ConfigError, match=r"param_groups\[0\].param_str_match: 'nrom' matches no .*model\.transformer"):
        check_groups(groups)


def test_a_group_whose_parameters_earlier_groups_have_is_refused():
    late = ParameterGroupConfig(param_str_match="norm_1")
    groups = divide_parameters(list_parameters(SMALL), optimizer_of(NORM, late))
    with pytest.raises(ConfigError, match=r"param_groups\[1\].*'norm_1' matches 4 parameters, and earlier groups have"):
        check_groups(groups)


@pytest.mark.parametrize("pattern", ["(.*)*!", ".*" * 40 + "!"])
def test_an_expression_that_never_ends_is_refused_before_it_is_searched(pattern):
    groups = [ParameterGroupConfig(param_str_match="norm"), ParameterGroupConfig(param_str_match=pattern)]
    with pytest.raises(ConfigError) as error:
        refuse_slow_expressions(list_parameters(SMALL), optimizer_of(*groups), max_seconds=0.2)
    assert str(error.value) == (
        "optimizer.param_groups: searching 2 recorded regular expressions in the names of all parameters takes more "
        "than 0.2 seconds; a run with such expressions is not replayed"
    )


def test_usual_expressions_are_searched_in_time():
    groups = [ParameterGroupConfig(param_str_match=pattern) for pattern in (r"blocks\.\d+\..*(q|k|v)", ".*norm.*")]
    refuse_slow_expressions(list_parameters(SMALL), optimizer_of(*groups))


def test_an_overlap_is_said():
    groups = divide_parameters(list_parameters(SMALL), optimizer_of(NORM, BIAS))
    check_groups(groups)
    (note,) = describe_overlaps(groups)
    assert "param_groups[1]: 5 of the 13 parameters that 'bias' matches are in earlier groups" in note


@pytest.mark.parametrize(
    ("group", "error"),
    [
        ("{param_str_match: '('}", "a regular expression; Python's re says"),
        ("{param_str_match: 'a{99999999999}'}", "a regular expression; Python's re says"),
        (f"{{param_str_match: '{480 * '('}a{480 * ')'}'}}", "a regular expression; Python's re says"),
        (f"{{param_str_match: '{1001 * 'a'}'}}", "a regular expression of at most 1000 characters"),
        ("{param_str_match: norm, kwargs: {a: 1}}", "kwargs: decoupled_adamw is no optimizer of your own; remove it"),
        ("{lr: 0.1}", "param_str_match: missing"),
        ("{param_str_match: norm, lr: 0}", "expected a number above 0"),
        ("{param_str_match: norm, rate: 1}", "param_groups[0].rate"),
        ("{param_str_match: norm, momentum: 0.5}", "momentum: decoupled_adamw does not take it; remove it"),
    ],
)
def test_a_group_with_a_mistake_is_refused(tmp_path, group, error):
    with pytest.raises(ConfigError, match=re.escape(error)):
        config_with(tmp_path, f"optimizer.param_groups=[{group}]")


def test_a_group_has_arguments_of_an_optimizer_of_ones_own(tmp_path):
    optimizer = "{name: 'python:mine:A', lr: 0.1, param_groups: [{param_str_match: norm, eps: 0.5, nesterov: true}]}"
    run = tiny_config(tmp_path / "data")
    del run["optimizer"]
    config = load_train_config([write_config(tmp_path / "run.yaml", run), f"optimizer={optimizer}"]).config
    (group,) = config.optimizer.param_groups
    assert group.own_settings == {"eps": 0.5, "nesterov": True}
    assert "lr 0.1, eps 0.5, nesterov True\n" in describe_launch(config, Layout(), Preflight())

    # A record is read as it was written.
    recorded = write_config(tmp_path / "recorded.yaml", as_dict(config))
    assert load_train_config([recorded]).config.optimizer == config.optimizer


def test_a_launch_is_refused_for_an_empty_group_before_anything_heavy(tmp_path):
    """The data are not even there."""
    config = config_with(tmp_path, "optimizer.param_groups=[{param_str_match: nrom, lr: 1}]")
    with pytest.raises(ConfigError, match="'nrom' matches no parameter"):
        check(config, Layout(), must_exist=False)


def test_a_dry_run_shows_each_group_with_its_size(tmp_path):
    config = config_with(tmp_path, "optimizer.param_groups=[{param_str_match: norm|bias, weight_decay: 0}]")
    printed = describe_launch(config, Layout(), Preflight())
    sizes = {group.pattern: 0 for group in divide_parameters([], config.optimizer)}
    for group in divide_parameters(list_parameters(config.model), config.optimizer):
        shapes = [list_parameters(config.model)[name] for name in group.names]
        sizes[group.pattern] = sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes)
    assert re.search(rf"groups +0  the others +{sizes[None]:,} parameters", printed)
    assert re.search(rf"1  'norm\|bias' +{sizes['norm|bias']:,} parameters .*weight decay 0\n", printed)


# --------------------------------------------------------------------------------------------------- in mid-run


def changes_between(tmp_path, before: str, after: str):
    records = [as_dict(config_with(tmp_path, f"optimizer.param_groups={groups}")) for groups in (before, after)]
    return find_changes(*records)


def test_a_rate_and_a_decay_of_a_group_may_change_and_are_logged(tmp_path):
    changes = changes_between(
        tmp_path, "[{param_str_match: norm, lr: 0.1}]", "[{param_str_match: norm, lr: 0.2, weight_decay: 0}]"
    )
    assert [str(change) for change in changes["logged"]] == [
        "optimizer.param_groups[0].lr 0.1 -> 0.2",
        "optimizer.param_groups[0].weight_decay null -> 0.0",
    ]
    assert not changes["never"]


@pytest.mark.parametrize(
    "after",
    [
        "[]",
        "[{param_str_match: bias, lr: 0.1}]",
        "[{param_str_match: norm, lr: 0.1, betas: [0.5, 0.6]}]",
        "[{param_str_match: norm, lr: 0.1},{param_str_match: bias}]",
    ],
)
def test_which_parameters_a_group_has_may_not_change(tmp_path, after):
    changes = changes_between(tmp_path, "[{param_str_match: norm, lr: 0.1}]", after)
    with pytest.raises(CheckpointError, match=r"optimizer\.param_groups is "):
        refuse_changes(changes["never"])


def test_a_run_without_groups_is_recorded_as_before(tmp_path):
    assert "param_groups" not in as_dict(config_with(tmp_path))["optimizer"]
