"""Importing the package costs nothing, and a missing package is named with what to install."""

import json
import subprocess
import sys

import pytest

import llmfoundry_lite as lf
from tests.helpers.launch import ROOT

pytestmark = pytest.mark.multiprocess

PROGRAM = """
import json, sys
import llmfoundry_lite as lf
first = sorted({"torch", "numpy", "streaming", "rich"} & {*sys.modules})
sys.modules |= {"torch": None, "streaming": None}
pair = lf.compare("results/base.json", "results/ours.json")
known = [repr(lf.runs("runs")), pair.sentence, repr(lf.read_run("runs/tiny"))]
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
    assert "done at batch 6" in known[0] and known[1].startswith("ours is better") and "1 to 6" in known[2]
    second = "`pip install 'llmfoundry-lite[train]'`, then `pip install --no-deps mosaicml=="
    for name, remedy in (("load", "`pip install llmfoundry-lite`"), ("batches", second), ("open_dataset", second)):
        assert f"llmfoundry_lite.{name} needs torch, which is not installed; {remedy}" in refused[name]


def test_there_are_at_most_twelve_names_and_no_others():
    assert len(lf.__all__) <= 12
    assert {*lf.__all__} <= {*dir(lf)}
    with pytest.raises(AttributeError, match="has no attribute 'lode'"):
        lf.lode  # noqa: B018
