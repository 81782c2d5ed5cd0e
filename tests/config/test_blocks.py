"""Blocks that companions bring, without any of ours: a made-up one, and one that is missing."""

import importlib
import re
import sys
from dataclasses import dataclass

import pytest
from composer.core import Callback

from llmfoundry_lite import companions, dry_run, preflight
from llmfoundry_lite.companions import Companion
from llmfoundry_lite.config import blocks, fields
from llmfoundry_lite.config.blocks import RunBlock, SharedRun
from llmfoundry_lite.config.build import build_block, refuse_unknown_keys
from llmfoundry_lite.config.changes import find_changes
from llmfoundry_lite.config.eval_schema import EvalConfig
from llmfoundry_lite.config.fields import POSITIVE, REQUIRED, Setting, setting
from llmfoundry_lite.config.layers import is_for_hardware
from llmfoundry_lite.config.layout import layout_of
from llmfoundry_lite.config.load_train import find_run_folder, load_train_config
from llmfoundry_lite.config.schema import TrainConfig, as_dict
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.training import builders
from llmfoundry_lite.training.launch_role import LaunchRole, find_role
from tests.helpers.launch import ROOT


@dataclass(kw_only=True, slots=True, frozen=True)
class SwarmConfig:
    name: str = setting(REQUIRED)
    size: int = setting(1, POSITIVE, change="logged")


class Swarm(LaunchRole):
    def __init__(self, config: TrainConfig):
        self.size = config.blocks["swarm"].size


def check(config: TrainConfig) -> None:
    if config.exact_sums:
        raise ConfigError("swarm: does not go with exact_sums; remove one of them")


def check_here(config: TrainConfig) -> None:
    raise ConfigError("swarm: nobody is here")


BLOCK = RunBlock(
    schema=SwarmConfig,
    rules=Setting(hardware=True),
    check=check,
    check_here=check_here,
    describe=lambda config: f", one of {config.blocks['swarm'].size}",
    shared_run=SharedRun(role=f"{__name__}:Swarm", folder_key="name"),
)


@dataclass(kw_only=True, slots=True, frozen=True)
class PulseConfig:
    every: int = setting(REQUIRED, POSITIVE)


class Pulse(Callback):
    def __init__(self, config: TrainConfig):
        self.every = config.blocks["pulse"].every


PULSE = RunBlock(
    schema=PulseConfig,
    describe=lambda config: f"every {config.blocks['pulse'].every} batches",
    callback=f"{__name__}:Pulse",
)
EAGER = RunBlock(schema=PulseConfig, rules=Setting(replay="used"), callback=f"{__name__}:Pulse")
NO_CALLBACK = RunBlock(schema=PulseConfig, callback="builtins:str")


def forget() -> None:
    blocks.find_blocks.cache_clear()
    fields.keys_of.cache_clear()


@pytest.fixture(autouse=True)
def companion(monkeypatch):
    """None of ours, and one of somebody else's."""
    monkeypatch.setattr(
        companions,
        "find_companions",
        lambda: [
            Companion(blocks=dict.fromkeys(("swarm", "flock"), f"{__name__}:BLOCK")),
            Companion(blocks={"pulse": f"{__name__}:PULSE", "beat": f"{__name__}:NO_CALLBACK"}),
        ],
    )
    monkeypatch.setattr(companions, "find_spec", lambda name: None)
    forget()
    yield
    forget()


def load(*arguments):
    return load_train_config(["mpt-125m", *arguments], {}).config


SWARM = "swarm={name: a, size: 3}"


def test_a_block_is_checked_recorded_and_compared_as_one_of_ours(tmp_path):
    config = load(SWARM)
    unused = {"flock": None, "pulse": None, "beat": None}
    assert config.blocks == {"swarm": SwarmConfig(name="a", size=3), **unused} and not config.trains_alone
    assert as_dict(config)["swarm"] == {"name": "a", "size": 3} and "blocks" not in as_dict(config)
    assert config.run_folder == "runs/mpt-125m/a"
    assert is_for_hardware("swarm.size")
    changed = find_changes(as_dict(config), as_dict(load("swarm={name: b, size: 4}")))
    assert [str(one) for one in changed["logged"]] == ["swarm.size 3 -> 4"]
    assert [str(one) for one in changed["freely"]][-1] == "swarm.name a -> b"
    for given, refused in {
        "swarm.size=0": "swarm.size: 0 given, expected a number above 0",
        "swarm.sizes=2": "swarm.sizes: unknown key; did you mean swarm.size?",
        "flock={name: a}": "flock: does not go with swarm: both name the run's other launches; remove one",
        "exact_sums=true": "swarm: does not go with exact_sums; remove one of them",
        "blocks={}": "blocks: unknown key; did you mean pp_config.blocks?",
    }.items():
        with pytest.raises(ConfigError) as caught:
            load(SWARM, given)
        assert str(caught.value).removeprefix("command line: ") == refused


def test_a_block_brings_the_other_launches_and_says_so_in_a_dry_run():
    config, alone = load(SWARM), load()
    role = find_role(config)
    assert isinstance(role, Swarm) and role.size == 3
    assert type(find_role(alone)) is LaunchRole
    assert as_dict(alone)["swarm"] is None and alone.trains_alone
    layout = layout_of(config, 1, 1)
    with pytest.raises(ConfigError, match="nobody is here"):
        preflight.check(config, layout, must_exist=True)
    told = dry_run.describe_launch(config, layout, preflight.check(config, layout, must_exist=False))
    assert told.startswith("run            mpt-125m in runs/mpt-125m/a, one of 3\n")


def test_a_block_without_other_launches_adds_its_callback_and_a_line(capsys):
    config = load(SWARM, "pulse.every=5")
    assert config.blocks["pulse"] == PulseConfig(every=5) and load("pulse.every=5").trains_alone
    assert config.run_folder == "runs/mpt-125m/a" and isinstance(find_role(config), Swarm)
    callbacks = builders.build_own_callbacks(config)
    assert {name: callback.every for name, callback in callbacks.items()} == {"pulse": 5}
    layout = layout_of(config, 1, 1)
    told = dry_run.describe_launch(config, layout, preflight.check(config, layout, must_exist=False))
    assert "\npulse          every 5 batches\n" in told
    changed = find_changes(as_dict(config), as_dict(load(SWARM, "pulse.every=6")))
    assert [str(one) for one in changed["logged"]] == ["pulse.every 5 -> 6"] and changed["never"] == []
    with pytest.raises(ConfigError, match=r"^beat returns str, expected a Composer Callback$"):
        builders.build_own_callbacks(load("beat.every=2"))


def test_a_replay_leaves_out_a_block_whatever_its_rules_say(monkeypatch):
    monkeypatch.setattr(companions, "find_companions", lambda: [Companion(blocks={"eager": f"{__name__}:EAGER"})])
    forget()
    assert blocks.keys_of_blocks()["eager"].setting.replay == "left out"


def test_a_block_whose_companion_is_missing_names_it(tmp_path):
    for given in (["islands.name=a"], ["islands={name: a}"]):
        with pytest.raises(ConfigError) as caught:
            load(*given)
        assert str(caught.value) == "command line: islands: needs the companion llmfoundry_islands"
    overlay = tmp_path / "here.yaml"
    overlay.write_text("overlay: hardware\nislands: {name: a}\n")
    with pytest.raises(ConfigError, match=r"here.yaml: islands: needs the companion llmfoundry_islands$"):
        load(str(overlay))


def test_a_run_of_a_missing_block_is_read_and_carried_on_with_a_word():
    here = as_dict(load("islands=null"))
    assert "islands" not in here and build_block(TrainConfig, here | {"islands": None}).trains_alone
    (change,) = find_changes(here | {"islands": {"name": "a"}}, here)["freely"]
    assert str(change) == "islands left out"
    assert find_run_folder(["mpt-125m"]) and not find_run_folder(["mpt-125m", "islands.name=a"])


@pytest.mark.parametrize(("block", "key"), [(EvalConfig, "islands"), (TrainConfig, "plan"), (TrainConfig, "bench")])
def test_only_a_run_s_blocks_are_looked_for_in_companions(monkeypatch, block, key):
    monkeypatch.setattr(companions, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=f"{key}: unknown key; "):
        refuse_unknown_keys(block, {key: {}})


def test_the_page_s_block_has_the_rules_that_the_page_says(tmp_path, monkeypatch):
    page = (ROOT / "docs/own-parts.md").read_text()
    section = page.partition("\nA key is a field with a type")[2]
    code, *_ = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (tmp_path / "page_block.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    schema = importlib.import_module("page_block").LossBudget

    block = build_block(schema, {"patience": 3, "window": {"batches": 20}}, "loss_budget")
    assert (block.total, block.when_spent, block.patience, block.window.batches) == (100.0, "stop", 3, 20)
    assert build_block(schema, {}, "loss_budget").window is None
    for values, message in (
        ({"window": {"batches": 0}}, "loss_budget.window.batches: 0 given, expected a number above 0"),
        ({"window": {}}, "loss_budget.window.batches"),
        ({"share": 1.5}, "loss_budget.share: 1.5 given, expected a number from 0 to 1"),
        ({"when_spent": "go"}, "loss_budget.when_spent: 'go' is not known"),
        ({"patience": -1}, "loss_budget.patience: -1 given, expected 0 or more"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            build_block(schema, values, "loss_budget")
    sys.modules.pop("page_block")
