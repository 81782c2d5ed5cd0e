"""The seam: what companions of others may add, where the core uses ours, and what it says of a missing one."""

import ast
import importlib
import re
from dataclasses import dataclass
from importlib.metadata import EntryPoint

import pytest
import typer

from llmfoundry_lite import companions, preflight
from llmfoundry_lite.cli import main
from llmfoundry_lite.companions import Companion
from llmfoundry_lite.config.layout import layout_of
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.errors import ConfigError
from tests.helpers.launch import ROOT
from tests.helpers.present import leave_out_companions

GOOD = Companion(commands={"hello": "json:dumps", "lost": "no_such_module:x"})
TAKEN = Companion(commands={"hello": "json:loads", "bye": "json:load"}, parts={"norms": {"tilted": "json:dump"}})
NONE = "no companion"
NORMS = Companion(parts={"norms": {"tilted": "tiny.norms:Tilted"}, "nroms": {}})
NORMS_TOO = Companion(parts={"norms": {"tilted": "small.norms:Tilted"}})
NO_ADDRESS = Companion(parts={"ffns": {"mixed": "tiny.ffns", "whole": "tiny.ffns:Whole"}})
HIDDEN = Companion(commands={"hello": "json:loads"}, parts={"commands": {"report": "x:y"}, "norms": {"tilted": "x:y"}})
NO_NAME = Companion(parts={"callbacks": {"a.b": "tiny.callbacks:Beat"}})


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
    assert {name for name, _ in companions.parts("commands") if name in ("hello", "bye", "lost")} == {"hello", "bye"}
    assert companions.find_parts("norms") == {"tilted": "json:dump"}, "only the name is left out"
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": left out: ")[0] for line in lines] == [
        *("warning: companion NONE", "warning: companion NOWHERE", "warning: companion TAKEN"),
        "warning: companion lost",
    ]
    assert "its commands hello, which another companion has already" in lines[2]


def test_one_with_an_error_of_syntax_is_named_with_its_path_and_again(others, tmp_path, monkeypatch, capsys):
    (tmp_path / "unfinished.py").write_text("COMPANION = (\n")
    monkeypatch.syspath_prepend(tmp_path)
    point = EntryPoint("unfinished", "unfinished:COMPANION", companions.GROUP)
    others()
    assert companions.explain_unknown_name() == "a companion that is not installed may have it"
    monkeypatch.setattr(companions, "entry_points", lambda group: [point])
    companions.find_companions.cache_clear()
    assert companions.explain_unknown_name() == (
        "a companion that is not installed may have it, or unfinished, left out above"
    )
    expected = f"warning: companion unfinished: left out: '(' was never closed ({tmp_path}/unfinished.py, line 1)\n"
    assert capsys.readouterr().err == expected


def test_parts_that_would_hide_a_table_are_left_out(others, capsys):
    others("GOOD", "HIDDEN")
    assert dict(companions.parts("commands"))["hello"].__name__ == "dumps"
    assert (
        "companion HIDDEN: left out: its parts 'commands'; give them to Companion(commands" in capsys.readouterr().err
    )
    assert [*companions.find_parts("norms")] == ["tilted"]


def test_parts_that_nobody_can_ask_for_are_said_when_they_load(others, capsys):
    others("NORMS_TOO", "NO_NAME", "NO_ADDRESS", "NORMS")
    assert companions.find_parts("norms") == {"tilted": "tiny.norms:Tilted"}  # the same on every machine: by name
    assert companions.find_parts("ffns") == {"whole": "tiny.ffns:Whole"}
    assert companions.find_parts("callbacks") == {}
    assert capsys.readouterr().err.splitlines() == [
        "warning: companion NORMS: left out: its parts 'nroms', which are of no kind that this release knows; did you "
        "mean norms?",
        "warning: companion NORMS_TOO: left out: its norms tilted, which another companion has already",
        "warning: companion NO_ADDRESS: left out: its ffns mixed at 'tiny.ffns'; expected package.module:Thing",
        "warning: companion NO_NAME: left out: its callbacks 'a.b'; expected letters, digits, _ and -",
    ]


@pytest.mark.parametrize("table", companions.TABLES)
def test_the_core_knows_what_each_of_ours_adds(table):
    """Else it could not name a companion that is missing."""
    installed = {package for package in companions.PACKAGES if companions.is_installed(package)}
    added = {}
    for package in sorted(installed & {*companions.TABLES[table].values()}):
        companion = importlib.import_module(f"{package}.companion").COMPANION
        added |= dict.fromkeys(getattr(companion, table), package)
    assert added == {name: package for name, package in companions.TABLES[table].items() if package in installed}


# Addresses: where the core uses a part of a companion, and what it is answered where the companion is missing


@dataclass(frozen=True)
class Use:
    """A call of `companions.load` or `companions.load_if_installed` in our sources."""

    place: str
    """File and line."""
    function: str
    address: str | None
    """None where the call does not spell it out, so that nobody could follow it."""


LOADS = ("companions.load", "companions.load_if_installed")


def find_uses() -> list[Use]:
    uses = []
    for folder in ("llmfoundry_lite", "companions"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            if "tests" in path.parts or not any(name in text for name in LOADS):  # parsing all of them takes 2 s
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in LOADS:
                    place = f"{path.relative_to(ROOT)}:{node.lineno}"
                    first = node.args[0]
                    address = first.value if isinstance(first, ast.Constant) else None
                    uses.append(Use(place, ast.unparse(node.func), address))
    return uses


USES = find_uses()
ADDRESSES = sorted({use.address for use in USES if use.address is not None})


def test_every_use_of_a_companion_spells_its_address_out():
    assert len(USES) >= 25
    assert [use.place for use in USES if not re.fullmatch(r"llmfoundry_\w+(\.\w+)+:\w+", use.address or "")] == []
    assert {address.partition(".")[0] for address in ADDRESSES} <= {*companions.PACKAGES}


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_leads_to_its_part(address):
    if not companions.is_installed(address.partition(".")[0]):
        pytest.skip("its companion is not installed")
    part = companions.load(address)
    assert part is companions.import_address(address) is companions.load_if_installed(address)
    assert callable(part) or isinstance(part, dict)


@pytest.mark.parametrize("address", ADDRESSES)
def test_without_companions_an_address_is_an_error_of_one_line(monkeypatch, address):
    leave_out_companions(monkeypatch)
    package = address.partition(".")[0]
    with pytest.raises(ConfigError, match=f"^a_key: needs the companion {package}$"):
        companions.load(address, needed_for="a_key")
    with pytest.raises(ConfigError, match=f"^{address}: needs the companion {package}$"):
        companions.load(address)
    assert companions.load_if_installed(address) is None


def test_without_companions_a_command_and_a_block_name_theirs(monkeypatch, capsys):
    leave_out_companions(monkeypatch)
    for table, packages in companions.TABLES.items():
        assert companions.find_missing(table) == packages
    program = typer.Typer()
    program.command("report")(lambda: None)
    program.callback()(lambda: None)
    assert main.run(["doctor", "--folder", "x"], program) == 2
    assert capsys.readouterr().err == "error: doctor: needs the companion llmfoundry_machines\n"


def test_a_companion_that_another_needs_is_named(monkeypatch, capsys):
    def ask() -> None:
        raise ModuleNotFoundError("No module named 'llmfoundry_layouts'", name="llmfoundry_layouts")

    program = typer.Typer()
    program.command("plan")(ask)
    program.callback()(lambda: None)
    assert main.run(["plan"], program) == 2
    assert capsys.readouterr().err == "error: plan: needs the companion llmfoundry_layouts\n"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ("tp_config.tensor_parallel_degree=2", "tp_config.tensor_parallel_degree"),
        ("cp_config.context_parallel_degree=2", "cp_config.context_parallel_degree"),
        ("pp_config.pipeline_parallel_degree=2", "pp_config.pipeline_parallel_degree"),
        ("fsdp_config.sharding_strategy=ZERO_1", "fsdp_config.sharding_strategy: ZERO_1"),
        ("callbacks.early_stopper={monitor: loss, dataloader_label: eval}", "callbacks.early_stopper"),
    ],
)
def test_a_missing_one_is_named_by_a_dry_run_too(monkeypatch, changes, key):
    config = load_train_config(["mpt-125m", changes]).config
    leave_out_companions(monkeypatch)
    with pytest.raises(ConfigError, match=rf"^{key}: needs the companion llmfoundry_(layouts|ops)$"):
        preflight.check(config, layout_of(config, 2), must_exist=False)
