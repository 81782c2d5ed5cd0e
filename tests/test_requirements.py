"""The exported requirements, put into an environment that brought its own torch, as images on GPU clusters do."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.helpers.launch import ROOT
from tests.helpers.tiny import tiny_config, write_config, write_data

pytestmark = pytest.mark.slow

OTHER_TORCH = ("torch==2.11.0", "torchvision==0.26.0")


@pytest.fixture(scope="module")
def uv():
    found = shutil.which("uv") or str(ROOT / ".tools/bin/uv")
    if not os.access(found, os.X_OK):
        pytest.skip("uv is neither on the PATH nor in .tools")
    return found


def call(*command, **options):
    result = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def test_an_environment_keeps_its_torch_and_trains_the_same_run(tmp_path, uv):
    python = tmp_path / "venv/bin/python"
    call(uv, "venv", "--quiet", "--python", sys.executable, tmp_path / "venv")
    # Elsewhere than in the repository, where uv would apply the project's own override of torch.
    install = (uv, "pip", "install", "--quiet", "--python", python)
    call(*install, *OTHER_TORCH, cwd=tmp_path)
    call(*install, "--no-deps", "-r", ROOT / "requirements-without-torch.txt", cwd=tmp_path)
    version = call(python, "-c", "import torch; print(torch.__version__)")
    assert version.startswith("2.11.0")

    path = write_config(tmp_path / "tiny.yaml", tiny_config(write_data(tmp_path / "data"), export_at_end=True))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    losses = {}
    for name, interpreter in (("theirs", python), ("ours", sys.executable)):
        call(interpreter, ROOT / "scripts/train.py", path, f"run_name={name}", cwd=tmp_path, env=environment)
        lines = (tmp_path / f"runs/{name}/metrics.jsonl").read_text().splitlines()
        losses[name] = [json.loads(line)["loss/train/total"] for line in lines]
    assert losses["theirs"] == pytest.approx(losses["ours"], abs=1e-4)
