"""The seam: what others' companions may do, and what a missing one of ours is answered with."""

import importlib
from importlib.metadata import EntryPoint
from importlib.util import find_spec

import pytest
import typer

from llmfoundry_lite import companions, preflight
from llmfoundry_lite.cli import main
from llmfoundry_lite.companions import Companion
from llmfoundry_lite.config.layout import layout_of
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.errors import ConfigError

GOOD = Companion(commands={"hello": "json:dumps", "lost": "no_such_module:x"})
TAKEN = Companion(commands={"hello": "json:loads"})
NONE = "no companion"


@pytest.fixture
def others(monkeypatch):
    """Announce companions of others by entry points, as if they were installed."""

    def announce(*names):
        points = [EntryPoint(name, f"{__name__}:{name}", companions.GROUP) for name in names]
        monkeypatch.setattr(companions, "entry_points", lambda group: points)
        companions.find_companions.cache_clear()

    yield announce
    companions.find_companions.cache_clear()


def test_one_of_others_is_found_and_a_broken_one_is_left_out_with_a_line(others, capsys):
    others("NOWHERE", "NONE", "GOOD", "TAKEN")
    assert dict(companions.parts("commands", lambda name: name in ("hello", "lost"))).keys() == {"hello"}
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": left out: ")[0] for line in lines] == [
        *("warning: companion NOWHERE", "warning: companion NONE", "warning: companion TAKEN"),
        "warning: companion lost",
    ]
    assert "its commands hello are another's already" in lines[2]


def test_ours_are_listed_with_the_names_that_they_have():
    for package, slots in companions.OURS.items():
        if find_spec(package):
            here = importlib.import_module(f"{package}.companion").COMPANION
            found = {slot: tuple(names) for slot in companions.SLOTS if (names := getattr(here, slot))}
            assert {slot: {*names} for slot, names in found.items()} == {s: {*n} for s, n in slots.items()}, package


def test_a_companion_that_another_needs_is_named(monkeypatch, capsys):
    def ask() -> None:
        raise ModuleNotFoundError("No module named 'llmfoundry_layouts'", name="llmfoundry_layouts")

    program = typer.Typer()
    program.command("plan")(ask)
    program.callback()(lambda: None)
    assert main.run(["plan"], program) == 2
    assert capsys.readouterr().err == "error: plan: needs the companion llmfoundry_layouts\n"


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ("tp_config.tensor_parallel_degree=2", "tp_config.tensor_parallel_degree"),
        ("cp_config.context_parallel_degree=2", "cp_config.context_parallel_degree"),
        ("pp_config.pipeline_parallel_degree=2", "pp_config.pipeline_parallel_degree"),
        ("fsdp_config.sharding_strategy=ZERO_1", "fsdp_config.sharding_strategy: ZERO_1"),
        ("callbacks.early_stopper={monitor: loss, dataloader_label: eval}", "callbacks.early_stopper"),
    ],
)
def test_a_missing_one_is_named_by_a_dry_run_too(monkeypatch, changes, part):
    config = load_train_config(["mpt-125m", changes]).config
    monkeypatch.setattr(companions, "list_missing", lambda *slots: [part])
    with pytest.raises(ConfigError, match=rf"^{part}: needs the companion llmfoundry_(layouts|ops)$"):
        preflight.check(config, layout_of(config, 2), must_exist=False)
