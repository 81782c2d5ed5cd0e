"""The `islands` block: its mistakes, what it goes with, and what may change in mid-run."""

import pytest

from llmfoundry_islands.block import IslandsConfig, settings_of
from llmfoundry_lite.config.changes import rule_of
from llmfoundry_lite.config.fields import schema_keys
from llmfoundry_lite.config.layers import hardware_keys
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.schema import as_dict
from llmfoundry_lite.errors import ConfigError

RULES = {
    "freely": "coordinator begin_with name address weight check_weights_every",
    "logged": "sync sync.every sync.lr sync.momentum sync.dtype sync.fragments sync.delay sync.alpha sync.lost_rows",
}


def load(*arguments):
    return load_train_config(["mpt-125m", "eval_loader=null", *arguments], {}).config


def refusal(*arguments):
    with pytest.raises(ConfigError) as error:
        load(*arguments)
    return str(error.value)


def test_every_key_has_the_rule_that_was_decided():
    decided = {f"islands.{key}": rule for rule, keys in RULES.items() for key in keys.split()}
    assert {key: rule_of(key) for key in schema_keys(IslandsConfig, "islands.")} == decided
    assert rule_of("islands") == "freely" and "islands" in hardware_keys()


def test_the_block_is_recorded_where_it_stands_and_null_without_one():
    assert as_dict(load())["islands"] is None
    assert as_dict(load(*ISLAND))["islands"]["name"] == "a"
    assert load(*ISLAND).run_folder == "runs/mpt-125m/a" and load().run_folder == "runs/mpt-125m"
    assert not load(*ISLAND).trains_alone and load().trains_alone


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ("address: 0.0.0.0", "address: '0.0.0.0' given, expected an address at which other islands reach this host"),
        ("weight: .inf", "weight: inf given, expected a finite number"),
        ("weight: 0", "weight: 0.0 given, expected a number from 1e-6 to 1e6"),
        ("weight: 1.0e+300", "weight: 1e+300 given, expected a number from 1e-6 to 1e6"),
    ],
)
def test_a_mistake_is_named_with_its_key_and_what_to_write_instead(given, refused):
    assert refusal(f"islands={{coordinator: 'h:1', name: a, {given}}}") == f"command line: islands.{refused}"


REFUSED_BY_ISLANDS = {
    "model.attn_config.attn_pdrop=0.1": "islands: does not go with model.attn_config.attn_pdrop: kernels draw it for "
    "each rank, so another division of rows is another run; remove one of them",
    "train_loader={name: 'python:mine:Loader'}": "islands: does not go with train_loader.name: rows move between "
    "islands, and a loader of yours has no order to find them by; remove one of them",
    "exact_sums=true device_train_microbatch_size=auto": "islands: does not go with device_train_microbatch_size: "
    "auto: exact_sums needs one size on all islands, and auto may find several; remove one of them",
    "device_train_microbatch_size=null": "device_train_microbatch_size: missing; islands divide rows by microbatches, "
    "so give a number or auto",
    "islands.sync.every=9ba fsdp_config.sharding_strategy=ZERO_1": "fsdp_config.sharding_strategy: ZERO_1 does not go "
    "with islands.sync: it divides the optimizer's state, with the momentum of outer steps, otherwise than the "
    "weights; use FULL_SHARD or NO_SHARD",
    "save_fallback=second": "save_fallback: launches that train one run together save in save_folder alone; remove it",
    "save_folder=null": "save_folder: missing; islands take turns to save, so name a folder or URL that all of them "
    "reach",
}
ISLAND = ("islands={name: a, coordinator: '127.0.0.1:7070'}", "device_train_microbatch_size=4", "save_folder=saves")


@pytest.mark.parametrize("argument", REFUSED_BY_ISLANDS)
def test_an_island_says_why_it_refuses_a_setting(argument):
    arguments = [argument] if "{" in argument else argument.split()
    assert refusal(*ISLAND, *arguments).removeprefix("command line: ") == REFUSED_BY_ISLANDS[argument]


@pytest.mark.parametrize(
    "argument",
    [
        "device_train_microbatch_size=auto",
        "precision=amp_fp16",
        "model.resid_pdrop=0.1",
        "fsdp_config.sharding_strategy=ZERO_1",
        "pp_config={pipeline_parallel_degree: 2}",
        "optimizer={name: muon, lr: 0.01}",
    ],
)
def test_an_island_takes_other_settings_than_its_rows(argument):
    assert settings_of(load(*ISLAND, argument)).name == "a"


@pytest.mark.parametrize(("delay", "is_noted"), [("0ba", True), ("2ba", False)])
def test_a_weight_beside_late_fragments_is_noted_where_none_is_late(delay, is_noted):
    sync = f"islands.sync={{every: 9ba, delay: {delay}, alpha: 0.3}}"
    notes = load_train_config(["mpt-125m", *ISLAND, sync], {}).notes
    note = "command line: islands.sync.alpha has no effect: islands.sync.delay is 0ba, in which nothing is trained"
    assert notes == ([note] if is_noted else [])
