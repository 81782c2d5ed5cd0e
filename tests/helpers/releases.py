"""Environments with other releases of torch than ours, and runs in them."""

import json
import os
import shutil
import subprocess
import sys
import tomllib

import pytest

from tests.helpers.environments import find_uv
from tests.helpers.launch import ROOT
from tests.helpers.tiny import read_metrics, values

PINS = {"oldest": ("torch==2.11.0", "torchvision==0.26.0"), "newest": ("torch", "torchvision")}
"""The newest is that of the day on which the project fixes its dependencies (`exclude-newer`)."""
RELEASES = ["ours", *PINS]
TRAIN = """
import json, sys
from pathlib import Path
from tests.helpers.launch import train

for arguments in json.loads(sys.argv[1]):
    train(arguments, Path.cwd(), 2).check()
"""


def call(*command, **options):
    result = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def interpreters(tmp_path_factory):
    """Release -> its Python. An environment is links into uv's cache, and gone afterwards."""
    uv = find_uv()
    folder = tmp_path_factory.mktemp("environments")
    day = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["exclude-newer"]
    found = {"ours": sys.executable}
    try:
        for release, pins in PINS.items():
            python = folder / release / "bin/python"
            call(uv, "venv", "--quiet", "--python", sys.executable, folder / release)
            # Elsewhere than in the repository, where uv would apply the project's own override of torch.
            install = (uv, "pip", "install", "--quiet", "--python", python, "--exclude-newer", day)
            call(*install, *pins, cwd=folder)
            call(*install, "--no-deps", "-r", ROOT / "requirements-without-torch.txt", cwd=folder)
            found[release] = str(python)
        yield found
    finally:
        shutil.rmtree(folder)


def train(interpreter, folder, *launches):
    """Each of `launches` on 2 ranks, one after the other, for one import of Composer."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    call(interpreter, "-c", TRAIN, json.dumps(launches), cwd=folder, env=environment)


def losses(folder, name):
    return values(read_metrics(folder / "runs" / name), "loss/train/total")
