"""LLM Foundry itself, in an environment of its own: no default means something else here, and no model is another."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.helpers.environments import find_uv
from tests.helpers.launch import ROOT

pytestmark = [pytest.mark.long, pytest.mark.multiprocess]

PINS = ("llm-foundry==0.22.0", "setuptools<81")


@pytest.fixture(scope="module")
def peer_python(tmp_path_factory):
    """Its Python; LLM_FOUNDRY_PYTHON names one that is there already."""
    if named := os.environ.get("LLM_FOUNDRY_PYTHON"):
        yield named
        return
    folder, uv = tmp_path_factory.mktemp("foundry"), find_uv()
    try:
        subprocess.run([uv, "venv", "--quiet", "--python", "3.11", folder / "venv"], check=True)
        python = str(folder / "venv/bin/python")
        subprocess.run([uv, "pip", "install", "--quiet", "--python", python, *PINS], check=True, cwd=folder)
        yield python
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("script", ["defaults", "parity"])
def test_nothing_means_something_else_here(script, peer_python):
    command = [sys.executable, f"scripts/{script}_llm_foundry.py", "--peer-python", peer_python]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
