"""Stand-ins for what Composer imports and nobody uses."""

import json
import os
import subprocess
import sys

import pytest

from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.ranks import lean_imports
from llmfoundry_lite.ranks.lean_imports import FULL_IMPORTS, import_lean
from tests.helpers.launch import ROOT
from tests.helpers.tiny import tiny_config, write_config


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """`asking` imports from `huge.models`, which counts its imports."""
    (tmp_path / "huge").mkdir()
    (tmp_path / "huge/__init__.py").write_text("")
    (tmp_path / "huge/models.py").write_text("class Net:\n    is_real = True\n")
    lines = ("import huge.models", "from huge.models import Net", "class Mine(Net):", "    pass")
    (tmp_path / "asking.py").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(lean_imports, "LEFT_OUT", ("huge",))
    monkeypatch.delenv(FULL_IMPORTS, raising=False)
    yield
    for name in ("asking", "huge", "huge.models"):
        sys.modules.pop(name, None)


def test_a_package_that_is_left_out_is_real_for_whoever_asks_later(packages):
    import_lean("asking")
    assert not hasattr(sys.modules["asking"].Mine, "is_real")
    assert "huge" not in sys.modules
    import huge.models

    assert huge.models.Net.is_real


def test_a_package_that_somebody_has_imported_is_not_left_out(packages):
    import huge.models  # noqa: F401

    import_lean("asking")
    assert sys.modules["asking"].Mine.is_real


def test_nothing_is_left_out_when_told_so(packages, monkeypatch):
    monkeypatch.setenv(FULL_IMPORTS, "1")
    import_lean("asking")
    assert "asking" not in sys.modules


@pytest.mark.parametrize(
    ("changes", "is_own"),
    [
        ({}, False),
        ({"callbacks": {"python:mine:Thing": {}}}, True),
        ({"optimizer": {"name": "python:mine:Adam", "lr": 1e-3}}, True),
        ({"train_loader": {"name": "python:mine:load"}}, True),
    ],
    ids=["none", "callback", "optimizer", "loader"],
)
def test_a_component_of_the_users_own_may_need_everything(changes, is_own, tmp_path):
    path = write_config(tmp_path / "run.yaml", tiny_config(tmp_path / "data") | changes)
    assert bool(load_train_config([path]).config.own_code) is is_own


@pytest.mark.slow
def test_composer_is_imported_without_what_it_never_uses_here(monkeypatch):
    monkeypatch.delenv(FULL_IMPORTS, raising=False)  # another test may have built a run with components of its own
    program = """
import json, sys
from llmfoundry_lite.ranks.lean_imports import HEAVY, import_lean
import_lean(*HEAVY)
import llmfoundry_lite.training.train
from composer import Callback, Trainer
from torchmetrics import Metric
missing = [name for name in ("mcli", "torchvision", "transformers", "paramiko") if name in sys.modules]
import torchvision.models, torchmetrics.text
print(json.dumps([missing, torchvision.models.resnet18.__name__, Metric.__module__]))
"""
    output = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert json.loads(output.stdout) == [[], "resnet18", "torchmetrics.metric"], output.stderr


@pytest.mark.parametrize("variables", [{}, {FULL_IMPORTS: "1"}], ids=["lean", "full"])
def test_no_settings_of_figures_in_the_working_directory_are_opened(tmp_path, variables):
    """Here they are a pipe, at which matplotlib would wait for ever. Composer imports it, through torchmetrics."""
    os.mkfifo(tmp_path / "matplotlibrc")
    program = "from llmfoundry_lite.ranks.lean_imports import import_lean; import_lean('matplotlib'); import matplotlib"
    environment = {name: value for name, value in os.environ.items() if name != FULL_IMPORTS}
    environment |= {"PYTHONPATH": str(ROOT), **variables}
    subprocess.run([sys.executable, "-P", "-c", program], cwd=tmp_path, env=environment, check=True, timeout=60)
