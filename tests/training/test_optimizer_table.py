"""The tables of optimizers and schedules: every name is built, steps as its row says, and is on the pages.

The last tests add a row, as a contributor would, and find it wherever the table is read.
"""

import json
import re
import subprocess
import sys
from typing import Any

import composer.optim
import pytest
import torch

from llmfoundry_lite.config.build import build_block
from llmfoundry_lite.config.fields import keys_of
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.optimizer_schema import OptimizerConfig, SchedulerConfig
from llmfoundry_lite.config.optimizers import OPTIMIZERS
from llmfoundry_lite.config.schedules import SCHEDULES
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.training.schedule import learning_rate_multiplier
from tests.golden.lab import CASES
from tests.helpers.launch import ROOT
from tests.helpers.markdown import section
from tests.helpers.optimizers import build_small_optimizer
from tests.helpers.tiny import tiny_config, write_config, write_data

NOT_IN_A_GOLDEN_RUN = {
    "lion": "compared with its paper in test_optimizers.py; it takes no sum over ranks whose order could change",
    "decoupled_lionw": "as lion",
    "constant_with_warmup": "a formula of one line; test_schedule.py compares it",
    "linear_decay_with_warmup": "a formula of one line; test_schedule.py compares it",
    "inv_sqrt_with_warmup": "test_schedule.py compares it with LLM Foundry's",
}
"""Optimizers and schedules that no run of the golden record has -> why."""
MATRIX = "transformer.blocks.0.ffn.up_proj.weight"
VECTOR = "transformer.norm_f.weight"


def first_rows(page: str, heading: str) -> dict[str, list[str]]:
    """Return the rows of the tables in a section, by the name in the first cell."""
    rows: dict[str, list[str]] = {}
    for line in section(page, heading).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for name in re.findall(r"`(\w+)`", cells[0]):
            rows[name] = cells
    return rows


# --------------------------------------------------------------------------------------------------- optimizers


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_built_and_keeps_the_slots_of_its_row(name):
    parameters = {MATRIX: torch.nn.Parameter(torch.ones(4, 6)), VECTOR: torch.nn.Parameter(torch.ones(3))}
    optimizer = build_small_optimizer(parameters, name=name, lr=0.1)
    before = {key: parameter.detach().clone() for key, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()

    row = OPTIMIZERS[name]
    expected_slots = {MATRIX: row.slots_of_matrices or row.slots, VECTOR: row.slots}
    for key, parameter in parameters.items():
        assert not torch.equal(parameter, before[key])
        slots = [slot for slot, value in optimizer.state[parameter].items() if value.ndim]
        assert slots == list(expected_slots[key])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_takes_the_keys_of_its_row_and_refuses_others(tmp_path, name):
    tried = {"betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.5, "adamw_lr": 0.5, "momentum": 0.5}
    tried |= {"ns_steps": 3, "ns_dtype": "fp32", "adjust_lr_fn": "match_rms_adamw"}
    assert {*tried, "name", "lr", "param_groups", "kwargs"} == {*keys_of(OptimizerConfig)}
    for key, value in tried.items():
        options = {"name": name, "lr": 0.1, key: value}
        yaml = write_config(tmp_path / "run.yaml", tiny_config(tmp_path / "data", optimizer=options))
        if key in OPTIMIZERS[name].keys:
            notes = load_train_config([yaml]).notes
            assert not any(f"optimizer.{key} has no effect" in note for note in notes)
        elif key == "eps":  # LLM Foundry's YAMLs set it beside Lion, too
            assert any("optimizer.eps has no effect" in note for note in load_train_config([yaml]).notes)
        else:
            with pytest.raises(ConfigError, match=f"optimizer.{key}: only "):
                load_train_config([yaml])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weight_decay_shrinks_weights_as_the_row_says(name):
    """With a gradient of zeros, nothing but weight decay changes a weight, at half of the initial learning rate."""
    initial_lr, decay = 0.1, 0.2
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = build_small_optimizer([parameter], name=name, lr=initial_lr, weight_decay=decay)
    parameter.grad = torch.zeros(3)
    for group in optimizer.param_groups:
        group["lr"] = initial_lr / 2
    optimizer.step()
    multiplier = 1 / 2 if OPTIMIZERS[name].decay_follows_schedule else initial_lr / 2
    torch.testing.assert_close(parameter.detach(), torch.full((3,), 1 - decay * multiplier))


def test_optimizers_that_llm_foundry_has_are_classes_of_composer_or_its_own():
    of_llm_foundry = {"DecoupledLionW"}
    theirs = {row.foundry.class_name for row in OPTIMIZERS.values() if row.foundry} - of_llm_foundry
    assert theirs and all(issubclass(getattr(composer.optim, name), torch.optim.Optimizer) for name in theirs)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_page_has_the_facts_of_each_optimizer(name):
    row = OPTIMIZERS[name]
    cells = first_rows((ROOT / "docs/training.md").read_text(), "Optimizers and schedules")[name]
    _, keys, slots, betas, decay, shrinks_by = cells
    assert re.findall(r"`(\w+)`", keys) == list(row.keys)
    counts = [len(row.slots)] if row.slots_of_matrices is None else [len(row.slots_of_matrices), len(row.slots)]
    assert [int(number) for number in re.findall(r"\d+", slots)] == counts
    assert betas == (f"`{list(row.betas)}`" if row.betas else "")
    assert decay == f"`{row.weight_decay}`"
    assert ("initial lr" in shrinks_by) == row.decay_follows_schedule
    assert row.sums_exactly  # the page says so of all


# --------------------------------------------------------------------------------------------------- schedules


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_has_a_formula_and_uses_the_keys_of_its_row(name):
    """A key of the row changes the factor at some time; a key that is not there changes it never."""
    tried: dict[str, Any] = {"t_max": "80ba", "alpha_i": 0.9, "alpha_f": 0.3, "t_decay": "40ba", "decay": "cosine"}
    tried |= {"t_scale": "7ba", "t_cooldown": "20ba", "alpha_f_decay": 0.2, "alpha_f_cooldown": 0.1}
    assert {*tried, "name", "t_warmup", "kwargs"} == {*keys_of(SchedulerConfig)}
    base = {"name": name, "t_warmup": "10ba", "t_decay": "30ba", "t_cooldown": "10ba", "t_scale": "5ba"}
    for key, value in tried.items():
        factors = []
        for options in (base, {**base, key: value}):
            schedule = build_block(SchedulerConfig, options)
            run = Duration.parse("100ba")
            factors.append([learning_rate_multiplier(schedule, run, lambda unit, t=t: t) for t in range(101)])
        assert (factors[0] != factors[1]) == (key in SCHEDULES[name].keys), key


def test_schedules_that_llm_foundry_has_are_classes_of_composer_or_its_own():
    of_llm_foundry = {"InverseSquareRootWithWarmupScheduler"}
    theirs = {row.foundry_class for row in SCHEDULES.values() if row.foundry_class} - of_llm_foundry
    assert theirs and all(hasattr(composer.optim, name) for name in theirs)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_page_has_the_keys_of_each_schedule(name):
    cells = first_rows((ROOT / "docs/training.md").read_text(), "Optimizers and schedules")[name]
    assert re.findall(r"`(\w+)`", cells[1]) == list(SCHEDULES[name].keys)
    assert SCHEDULES[name].has_end or "no end" in cells[2]


# --------------------------------------------------------------------------------------------------- both


def test_the_page_for_llm_foundry_has_each_name_and_their_class():
    rows = first_rows((ROOT / "docs/coming-from-llm-foundry.md").read_text(), "Optimizers and schedules")
    assert {*rows} == {*OPTIMIZERS, *SCHEDULES}
    for name, row in OPTIMIZERS.items():
        assert rows[name][1] == (f"`{row.foundry.class_name}`, of the same name" if row.foundry else "none")
        assert row.foundry is None or row.foundry.name == name
    for name, row in SCHEDULES.items():
        assert rows[name][1] == (f"`{row.foundry_class}`, of the same name" if row.foundry_class else "none")


def test_each_name_is_in_a_golden_run_or_the_reason_is_given():
    words = set(re.findall(r"\w+", str(CASES["runs"]) + str(CASES["base"])))
    missing = {*OPTIMIZERS, *SCHEDULES} - words
    assert missing == {*NOT_IN_A_GOLDEN_RUN}


# --------------------------------------------------------------------------------------------------- one row more

TOYS = {"optimizer": {"name": "toy", "lr": 0.5}, "scheduler": {"name": "half_rate"}}


def run_with_toys(tmp_path, *arguments, **changes) -> tuple[int, str]:
    """Run a command of llmfoundry-lite with the toys' rows. Returns its exit code and what it prints."""
    config = {**tiny_config(write_data(tmp_path / "data"), max_duration="2ba"), **TOYS, **changes}
    yaml = write_config(tmp_path / "run.yaml", config)
    command = [sys.executable, "-m", "tests.helpers.toy_optimizer", "train", str(yaml), *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout + ended.stderr


def optimizer_mebibytes(printed: str) -> float:
    found = re.search(r"parameters ([\d.]+), .*optimizer ([\d.]+)", printed)
    assert found is not None, printed
    return float(found[2]) / float(found[1])


def test_a_dry_run_knows_an_optimizer_and_a_schedule_by_their_rows(tmp_path):
    code, printed = run_with_toys(tmp_path, "--dry-run")
    assert code == 0, printed
    assert "toy, lr 0.5, weight decay 0.25, half_rate" in printed
    assert optimizer_mebibytes(printed) == pytest.approx(3, rel=0.1)
    assert "is not known" not in printed


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"optimizer": {"name": "toys", "lr": 0.5}}, "optimizer.name: 'toys' is not known; did you mean toy?"),
        ({"optimizer": {"name": "plaything", "lr": 0.5}}, "did you mean toy?"),
        ({"optimizer": {"name": "sgd", "lr": 0.5}}, "lion, decoupled_lionw, muon, toy or python:"),
        ({"optimizer": {"name": "toy", "lr": 0.5, "momentum": 0.9}}, "only muon uses it, and optimizer.name is toy"),
        ({"scheduler": {"name": "half_rate", "t_max": "1ba"}}, "scheduler.t_max has no effect: half_rate has no end"),
        ({"exact_sums": True, "device_train_microbatch_size": 1}, "exact_sums: does not go with optimizer.name"),
    ],
)
def test_the_schema_and_its_checks_read_the_rows(tmp_path, changes, error):
    _, printed = run_with_toys(tmp_path, "--dry-run", **changes)
    assert error in printed


@pytest.mark.slow
def test_a_run_is_trained_by_an_optimizer_and_a_schedule_with_a_function_and_a_row_each(tmp_path):
    code, printed = run_with_toys(tmp_path, f"run_folder={tmp_path}/run")
    assert code == 0, printed
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert {record["lr"] for record in records} == {0.25}
    assert records[-1]["loss/train/total"] < records[0]["loss/train/total"]
