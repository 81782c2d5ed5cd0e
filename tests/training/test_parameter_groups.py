"""Groups of parameters in training: each steps with its own settings, and resumes on other ranks with the same bits."""

from typing import Any, ClassVar

import pytest
import torch

from llmfoundry_lite.checkpoint.store import open_checkpoint
from llmfoundry_lite.config.layout import Layout
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.mup import MupConfig
from llmfoundry_lite.config.optimizer_schema import OptimizerConfig, ParameterGroupConfig
from llmfoundry_lite.config.optimizers import OPTIMIZERS
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.own_code import trust_code
from llmfoundry_lite.training.mirrors import foundry_names
from llmfoundry_lite.training.mup import build_factors
from llmfoundry_lite.training.optimizers import OptimizerContext
from llmfoundry_lite.training.parameter_groups import checkpoint_name, own_groups
from tests.helpers.optimizers import build_small_optimizer
from tests.helpers.present import needs
from tests.helpers.runs import attempt, losses, metrics, run, saves
from tests.helpers.tiny import tiny_config, values

MATRIX = "model.transformer.blocks.0.ffn.up_proj.weight"
NORM = "model.transformer.norm_f.weight"
GROUPS = [ParameterGroupConfig(param_str_match="norm", lr=0.4, weight_decay=0.0)]


@pytest.fixture(autouse=True)
def any_names(monkeypatch):
    """The small models here have two parameters, so that the list of a whole model's would not match."""
    monkeypatch.setattr("llmfoundry_lite.training.parameter_groups.list_parameters", lambda model: {})


def two_parameters() -> dict[str, torch.nn.Parameter]:
    return {MATRIX: torch.nn.Parameter(torch.ones(4, 6)), NORM: torch.nn.Parameter(torch.ones(3))}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_group_shrinks_by_its_own_decay_at_its_own_rate(name):
    """With a gradient of zeros nothing else changes a weight. A schedule has halved every rate."""
    parameters = two_parameters()
    groups = [ParameterGroupConfig(param_str_match="norm", lr=0.4, weight_decay=0.5)]
    optimizer = build_small_optimizer(parameters, name=name, lr=0.1, weight_decay=0.2, param_groups=groups)
    for group in optimizer.param_groups:
        group["lr"] /= 2
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    follows_schedule = OPTIMIZERS[name].decay_follows_schedule
    matrix_share = 0.2 * (1 / 2 if follows_schedule else 0.05)
    norm_share = 0.5 * (1 / 2 if follows_schedule else 0.2)
    torch.testing.assert_close(parameters[MATRIX].detach(), torch.full((4, 6), 1 - matrix_share))
    torch.testing.assert_close(parameters[NORM].detach(), torch.full((3,), 1 - norm_share))


def test_muon_has_two_groups_for_each_the_matrices_first():
    parameters = two_parameters()
    optimizer = build_small_optimizer(parameters, name="muon", lr=0.1, adamw_lr=0.3, param_groups=GROUPS)
    members = [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
    assert members == [[id(parameters[MATRIX])], [], [], [id(parameters[NORM])]]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.4, 0.3, 0.4]


def test_muon_updates_each_matrix_with_the_options_of_its_group():
    """With a gradient of zeros, weight decay alone changes a matrix."""
    other = "model.transformer.blocks.1.ffn.up_proj.weight"
    parameters = {name: torch.nn.Parameter(torch.ones(4, 6)) for name in (MATRIX, other)}
    groups = [ParameterGroupConfig(param_str_match=r"blocks\.1", lr=0.4, weight_decay=0.5)]
    optimizer = build_small_optimizer(parameters, name="muon", lr=0.1, weight_decay=0.2, param_groups=groups)
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    shrunk = [1 - 0.1 * 0.2, 1 - 0.4 * 0.5]
    for parameter, expected in zip(parameters.values(), shrunk, strict=True):
        torch.testing.assert_close(parameter.detach(), torch.full((4, 6), expected))


def test_muon_is_refused_for_a_matrix_that_is_not_hidden_for_mup(monkeypatch):
    monkeypatch.setattr("llmfoundry_lite.training.mup.kind_of", lambda *_: "input")
    model_config = ModelConfig(d_model=32, n_heads=4, n_layers=1, mup=MupConfig(base_width=16))
    context = OptimizerContext(model=torch.nn.Module(), model_config=model_config, layout=Layout())
    names = {"transformer.blocks.0.ffn.up.weight": 2, "transformer.wte.weight": 2}
    factors_of = build_factors(OptimizerConfig(name="muon", lr=0.1), context, {}, names)
    assert factors_of is not None and factors_of("transformer.wte.weight").lr == 1
    with pytest.raises(ConfigError, match=r"says that transformer\.blocks\.0\.ffn\.up\.weight is no hidden"):
        factors_of("transformer.blocks.0.ffn.up.weight")


def test_a_group_without_parameters_is_refused():
    groups = [ParameterGroupConfig(param_str_match="bias")]
    with pytest.raises(ConfigError, match="'bias' matches no parameter"):
        build_small_optimizer(two_parameters(), name="adamw", lr=0.1, param_groups=groups)


def test_an_optimizer_of_ones_own_gets_the_settings_that_each_group_is_given():
    from llmfoundry_lite.training.optimizers import ParameterGroup

    parameters = two_parameters()
    config = OptimizerConfig(name="python:mine:Thing", lr=0.1, param_groups=GROUPS)
    groups = [
        ParameterGroup({MATRIX: parameters[MATRIX]}, config),
        ParameterGroup({NORM: parameters[NORM]}, config),
    ]
    first, second = own_groups(config, groups)
    assert [*first] == ["params"]
    assert (second["lr"], second["weight_decay"]) == (0.4, 0.0)


@pytest.mark.parametrize(
    ("group", "unknown"),
    [
        ({"weight_decay": 0.5}, None),
        ({"kwargs": {"nesterov": True}, "momentum": 0.5}, None),
        ({"betas": (0.5, 0.6)}, "betas"),
        ({"weight_decay": 0.5, "kwargs": {"nestrov": True}}, "nestrov"),
        ({"kwargs": {"params": []}}, "params"),
    ],
)
def test_a_setting_that_an_optimizer_of_ones_own_does_not_have_is_refused(group, unknown):
    trust_code(["python:torch.optim:SGD"])
    groups = [ParameterGroupConfig(param_str_match="norm", **group)]
    settings = {"name": "python:torch.optim:SGD", "lr": 0.1, "kwargs": {"momentum": 0.9}, "param_groups": groups}
    if unknown is None:
        optimizer = build_small_optimizer(two_parameters(), **settings)
        assert groups[0].own_settings.items() <= optimizer.param_groups[1].items()
        assert optimizer.param_groups[0]["momentum"] == 0.9 and not optimizer.param_groups[0]["nesterov"]
        return
    with pytest.raises(ConfigError, match=rf"param_groups\[0\]\.{unknown}: python:torch.optim:SGD has no such setting"):
        build_small_optimizer(two_parameters(), **settings)


def test_wrappers_are_no_part_of_a_name():
    name = "model.transformer.blocks.0._checkpoint_wrapped_module.norm_1.weight"
    assert checkpoint_name(name) == "transformer.blocks.0.norm_1.weight"


def test_rates_of_groups_have_llm_foundrys_names():
    named = foundry_names({"lr": 0.1, "lr/group1": 0.2}, "decoupled_adamw")
    assert named == {"lr-DecoupledAdamW/group0": 0.1, "lr-DecoupledAdamW/group1": 0.2}


# ------------------------------------------------------------------------------------------------------- runs

YAML_GROUPS = [
    {"param_str_match": r"norm|bias", "weight_decay": 0.0},
    {"param_str_match": r"blocks\.1\..*proj", "lr": 3e-3, "betas": [0.8, 0.9]},
]
ZERO: dict[str, Any] = {"fsdp_config": {"sharding_strategy": "ZERO_1"}}
FULL: dict[str, Any] = {"fsdp_config": {"sharding_strategy": "FULL_SHARD", "activation_checkpointing": True}}
STAGES: dict[str, Any] = {"pp_config": {"pipeline_parallel_degree": 2}}


class TestRuns:
    """Runs of several launches."""

    pytestmark: ClassVar = [pytest.mark.slow, pytest.mark.multiprocess]

    def config_of(self, data, name="decoupled_adamw") -> dict[str, Any]:
        optimizer = {"name": name, "lr": 1e-2, "weight_decay": 0.1, "param_groups": YAML_GROUPS}
        config = tiny_config(data, autoresume=True, max_duration="4ba", exact_sums=True, optimizer=optimizer)
        return {**config, "device_train_microbatch_size": 1, "save_interval": "1ba", "export_at_end": False}

    @needs("llmfoundry_layouts")
    @pytest.mark.parametrize("name", ["decoupled_adamw", "muon"])
    def test_a_run_with_groups_moves_between_layouts_with_the_same_bits(self, tmp_path, data, name):
        config = self.config_of(data, name)
        run(tmp_path, config, "whole")
        for num_ranks, layout in ((1, {}), (2, FULL), (2, ZERO), (2, STAGES)):
            run(tmp_path, config, "moved", num_ranks, stop_after="1ba", **layout)
        assert losses(tmp_path, "moved") == losses(tmp_path, "whole")
        digests = [values(metrics(tmp_path, run_name), "state/digest")[-1] for run_name in ("whole", "moved")]
        assert digests[0] == digests[1]
        rates = [values(metrics(tmp_path, "whole"), key) for key in ("lr", "lr/group2")]
        assert rates[0][-1] > 0
        # Muon's third group has the other parameters of the first.
        share = 1.0 if name == "muon" else 0.3
        index = 1 if name == "muon" else 2
        assert values(metrics(tmp_path, "whole"), f"lr/group{index}") == pytest.approx([share * lr for lr in rates[0]])

    def test_a_rate_of_a_group_that_is_changed_is_used_and_other_patterns_are_refused(self, tmp_path, data):
        config = self.config_of(data)
        run(tmp_path, config, "run", stop_after="2ba")
        optimizer = {**config["optimizer"], "param_groups": [YAML_GROUPS[0], {**YAML_GROUPS[1], "lr": 1e-4}]}
        result = run(tmp_path, config, "run", optimizer=optimizer, stop_after="1ba")
        assert "optimizer.param_groups[1].lr 0.003 -> 0.0001" in result.output
        saved_optimizer = open_checkpoint(saves(tmp_path, "run") / "ba3").manifest.optimizer
        assert saved_optimizer is not None
        options = saved_optimizer["groups"][2]["options"]
        assert options["initial_lr"] == 1e-4

        other = {**config["optimizer"], "param_groups": [YAML_GROUPS[0]]}
        refused = attempt(tmp_path, config, "run", optimizer=other)
        assert refused.exit_codes == [2]
        assert "optimizer.param_groups is " in refused.output

    def test_an_optimizer_of_ones_own_keeps_its_groups_on_other_ranks(self, tmp_path, data):
        group = {"param_str_match": "norm|bias", "lr": 0.05, "momentum": 0.5, "nesterov": True}
        optimizer = {"name": "python:torch.optim:SGD", "lr": 0.1, "momentum": 0.9, "param_groups": [group]}
        config = tiny_config(data, max_duration="4ba", autoresume=True, save_interval="1ba", optimizer=optimizer)
        config |= {"device_train_microbatch_size": 1, "export_at_end": False}
        run(tmp_path, config, "whole")
        run(tmp_path, config, "moved", stop_after="2ba")
        run(tmp_path, config, "moved", 2, **FULL)
        # Sums over ranks are rounded in another order, because exact sums take optimizers of ours alone.
        assert losses(tmp_path, "moved") == pytest.approx(losses(tmp_path, "whole"), rel=1e-5)
        rates = [values(metrics(tmp_path, "moved"), key) for key in ("lr", "lr/group1")]
        assert len(rates[0]) == 4 and rates[1] == pytest.approx([lr / 2 for lr in rates[0]])

        saved_optimizer = open_checkpoint(saves(tmp_path, "moved") / "ba4").manifest.optimizer
        assert saved_optimizer is not None
        others, chosen = saved_optimizer["groups"]
        assert [group["options"]["momentum"] for group in (others, chosen)] == [0.9, 0.5]
        assert [group["options"]["nesterov"] for group in (others, chosen)] == [False, True]
        assert not any("norm" in name for name in others["params"]) and len(chosen["params"]) > 0

        changed = {**optimizer, "param_groups": [{**group, "momentum": 0.6}]}
        refused = attempt(tmp_path, config, "moved", optimizer=changed, max_duration="5ba")
        assert refused.exit_codes == [2] and "optimizer.param_groups" in refused.output
