"""Importing the package costs nothing, and a missing package is named with what to install."""

import ast
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

import llmfoundry_lite as lf
from tests.helpers.launch import ROOT

pytestmark = pytest.mark.multiprocess

SUBMODULES = {path.stem for path in Path(lf.__file__).parent.iterdir()}
PROGRAM = """
import json, sys
import llmfoundry_lite as lf
first = sorted({"torch", "numpy", "streaming", "rich"} & {*sys.modules})
sys.modules |= {"torch": None, "streaming": None}
pair = lf.compare("results/base.json", "results/ours.json")
known = [pair.sentence, repr(lf.read_run("runs/tiny")), lf.runs.__name__]
refused = {}
for name in ("load", "batches", "open_dataset"):
    try:
        getattr(lf, name)
    except ImportError as error:
        refused[name] = str(error)
print(json.dumps([first, known, refused]))
"""


def test_without_torch_runs_and_results_are_read_and_the_rest_says_what_to_install(here):
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    command = [sys.executable, "-c", PROGRAM]
    output = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, check=False)
    assert output.returncode == 0, output.stderr
    first, known, refused = json.loads(output.stdout)
    assert first == []
    assert known[0].startswith("ours is better") and "1 to 6" in known[1] and known[2] == "runs"
    second = "`pip install 'llmfoundry-lite[train]'`, then `pip install --no-deps mosaicml=="
    for name, remedy in (("load", "`pip install llmfoundry-lite`"), ("batches", second), ("open_dataset", second)):
        assert f"llmfoundry_lite.{name} needs torch, which is not installed; {remedy}" in refused[name]


def test_there_are_at_most_twelve_names_and_no_others():
    assert len(lf.__all__) <= 12
    assert {*lf.__all__} <= {*dir(lf)}
    with pytest.raises(AttributeError, match="has no attribute 'lode'"):
        lf.lode  # noqa: B018


def test_the_version_is_that_of_what_is_installed():
    assert lf.__version__ == importlib.metadata.version("llmfoundry-lite")


def test_what_completes_is_what_is_public_and_a_star_brings_it():
    assert dir(lf) == sorted(lf.__all__)
    assert {name for name in vars(lf) if not name.startswith("_")} <= {*lf.__all__, *SUBMODULES}
    brought: dict = {}
    exec("from llmfoundry_lite import *", brought)
    assert brought.keys() - {"__builtins__"} == {*lf.__all__}


def test_type_checkers_are_told_the_same_names_as_are_brought():
    tree = ast.parse(Path(lf.__file__).read_text())
    told = {
        alias.asname or alias.name: (node.module.removeprefix("llmfoundry_lite."), alias.name)
        for node in next(
            one for one in tree.body if isinstance(one, ast.If) and "TYPE_CHECKING" in ast.unparse(one.test)
        ).body
        for alias in node.names
    }
    assert told == lf._HOMES and sorted(told) == sorted(lf.__all__)
    assert Path(lf.__file__).with_name("py.typed").is_file()
