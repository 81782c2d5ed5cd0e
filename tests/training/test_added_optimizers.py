"""Optimizers that companions bring, without any of ours: made-up ones, and one that is missing."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint

import pytest
import torch

from llmfoundry_lite import companions, preflight
from llmfoundry_lite.companions import GROUP, Companion
from llmfoundry_lite.config import blocks, fields, optimizers
from llmfoundry_lite.config.changes import find_changes
from llmfoundry_lite.config.fields import POSITIVE, PROBABILITY, setting
from llmfoundry_lite.config.layers import is_for_hardware
from llmfoundry_lite.config.layout import layout_of
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.optimizers import AddedOptimizer
from llmfoundry_lite.config.replayed import select_recorded
from llmfoundry_lite.config.schema import as_dict
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.estimate.memory import advise_less_memory
from llmfoundry_lite.estimate.model_memory import slots_of
from llmfoundry_lite.training.builders import build_optimizer
from tests.helpers.tiny import tiny_config, write_config


@dataclass(kw_only=True, slots=True, frozen=True)
class ToyConfig:
    momentum: float = setting(0.5, PROBABILITY)
    bias_lr: float | None = setting(None, POSITIVE, change="logged")

    def problems(self) -> Iterator[str]:
        if self.bias_lr and not self.momentum:
            yield "bias_lr: needs momentum; remove one of them"


def build_toy(named, config, model, group, row_orders, *, fused):
    biases = [p for name, p in named.items() if name.endswith("bias")]
    others = [p for name, p in named.items() if not name.endswith("bias")]
    groups = [{"params": others}, {"params": biases, "lr": config.settings.bias_lr or config.lr}]
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.settings.momentum, weight_decay=config.decay)


TOY = AddedOptimizer(
    settings=ToyConfig,
    build=f"{__name__}:build_toy",
    slots=(1,),
    problems=ToyConfig.problems,
    refuses_offload="toy is slow on a host",
)
OTHER = replace(TOY, problems=lambda settings: iter(()), refuses_offload="")
COMPANION = Companion(
    builders={f"optimizer.name: {name}": f"{__name__}:{part}" for name, part in (("toy", "TOY"), ("other", "OTHER"))}
    | {"optimizer.name: broken": f"{__name__}:build_toy"}
)


def forget() -> None:
    for remembered in (companions.find_companions, blocks.find_blocks, optimizers.find_optimizers, fields.keys_of):
        remembered.cache_clear()


@pytest.fixture(autouse=True)
def companion(monkeypatch):
    """None of ours, and one of somebody else's, found by its entry point."""
    monkeypatch.setattr(companions, "find_spec", lambda name: None)
    monkeypatch.setattr(companions, "entry_points", lambda group: [EntryPoint("toys", f"{__name__}:COMPANION", GROUP)])
    forget()
    yield
    forget()


def load(*arguments):
    return load_train_config(["mpt-125m", *arguments], {}).config


TOYS = "optimizer={name: toy, lr: 0.1, betas: null, momentum: 0.9, bias_lr: 0.2}"


def test_its_keys_are_checked_recorded_and_compared_as_those_of_ours():
    config = load(TOYS)
    assert config.optimizer.settings == ToyConfig(momentum=0.9, bias_lr=0.2)
    assert load("optimizer.name=toy").optimizer.settings == ToyConfig()
    recorded = as_dict(config)
    plain = {"name": "toy", "lr": 0.1, "betas": None, "eps": 1e-8, "weight_decay": 0.0, "kwargs": {}}
    assert recorded["optimizer"] == plain | {"momentum": 0.9, "bias_lr": 0.2}
    assert "momentum" not in as_dict(load())["optimizer"]
    assert select_recorded(recorded, (), trusts_code=False)["optimizer"] == recorded["optimizer"]
    assert not is_for_hardware("optimizer.bias_lr")
    changed = find_changes(recorded, as_dict(load(TOYS, "optimizer.bias_lr=0.3", "optimizer.momentum=0.8")))
    assert [str(one) for one in changed["logged"]] == ["optimizer.bias_lr 0.2 -> 0.3"]
    assert [str(one) for one in changed["never"]] == ["optimizer.momentum 0.9 -> 0.8"]


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        ("optimizer.momentum=1.5", "momentum: 1.5 given, expected a probability, 0 <= p < 1"),
        ("optimizer.momentun=0.5", "momentun: unknown key; did you mean optimizer.momentum?"),
        ("optimizer.momentum=0.0", "bias_lr: needs momentum; remove one of them"),
        ("optimizer.name=adamw", "momentum: only toy or other uses it, and optimizer.name is adamw; remove it"),
        ("optimizer.name=toyy", "name: 'toyy' is not known; did you mean toy?"),
        (
            "optimizer.name=sgd",
            "name: 'sgd' is not known; expected decoupled_adamw, adamw, lion, decoupled_lionw, toy, other or "
            "python:package.module:Thing",
        ),
        ("optimizer.name=muon", "name: muon: needs the companion llmfoundry_muon"),
    ],
)
def test_a_mistake_is_answered_in_one_line(arguments, refused):
    with pytest.raises(ConfigError) as caught:
        load(TOYS, *arguments.split())
    assert str(caught.value) == f"command line: optimizer.{refused}"


def test_one_that_is_no_optimizer_is_left_out_with_a_line(capsys):
    load(TOYS)
    said = capsys.readouterr().err
    assert "warning: companion optimizer.name: broken: left out: <function build_toy" in said
    assert said.endswith(" is no AddedOptimizer\n")


def test_a_dry_run_and_the_estimate_know_it():
    config = load(TOYS)
    layout = layout_of(config, 4)
    told = preflight.describe(config, layout, preflight.check(config, layout, must_exist=False))
    assert "optimizer      toy, lr 0.1, bias_lr 0.2, weight decay 0, " in told
    assert slots_of(config) == (1,) and slots_of(load()) == (2,)
    offload = ["fsdp_config={sharding_strategy: FULL_SHARD, offload_optimizer: true}", "compile_config=null"]
    with pytest.raises(ConfigError, match="offload_optimizer: toy is slow on a host; use FULL_SHARD without it, or"):
        load(TOYS, *offload)
    load(TOYS, "optimizer.name=other", *offload)
    advice = (
        advise_less_memory(load(TOYS, name, "model.n_layers=2"), layout, "cuda")
        for name in ("optimizer.name=toy", "optimizer.name=other")
    )
    assert ["offload_optimizer" in one for one in advice] == [False, True]


def test_a_checked_yaml_trains_with_it(tmp_path):
    given = {"name": "toy", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}
    yaml = write_config(tmp_path / "run.yaml", tiny_config(tmp_path, optimizer=given))
    config = load_train_config([yaml], {}).config
    model = torch.nn.Linear(2, 2)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model(torch.ones(1, 2)).sum().backward()
    build_optimizer(config, model, layout_of(config, 1)).step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name] - 0.1)
