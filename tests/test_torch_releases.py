"""Images on GPU clusters bring their own torch, and a switch of clusters is a switch of torch releases.

An environment for each of the oldest and the newest release, made as docs/hardware.md says: their torch first, then
everything else from the exported requirements. Composer's own metadata permits no torch newer than 2.7, so these are
installed with `--no-deps`; torchvision, which Composer imports, is the release made for that torch.
"""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest

from llmfoundry_islands.coordination.messages import TOKEN
from llmfoundry_islands.tests.world import SECRET, coordination, metrics
from llmfoundry_lite.checkpoint.store import open_checkpoint
from llmfoundry_lite.checkpoint.verify import verify_checkpoint
from tests.helpers.environments import find_uv
from tests.helpers.launch import ROOT
from tests.helpers.resave import assert_same_state, resave_into
from tests.helpers.tiny import read_metrics, tiny_config, values, write_config, write_data

pytestmark = [pytest.mark.long, pytest.mark.multiprocess]

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


@pytest.fixture(scope="module")
def uv():
    return find_uv()


def call(*command, **options):
    result = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def interpreters(uv, tmp_path_factory):
    """Release -> its Python. An environment is links into uv's cache, and gone afterwards."""
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


@pytest.fixture(scope="module")
def folder(interpreters, tmp_path_factory):
    """The same run once under each release (`runs/<release>`), and one carried on by each from the save of each."""
    folder = tmp_path_factory.mktemp("runs")
    config = tiny_config(write_data(folder / "data"), max_duration="8ba", save_interval="4ba", autoresume=True)
    path = write_config(folder / "tiny.yaml", {**config, "export_at_end": True})
    for release, interpreter in interpreters.items():
        train(interpreter, folder, [path, f"run_name={release}"])
    for here, interpreter in interpreters.items():
        names = [f"{there}-{here}" for there in RELEASES]
        for there, name in zip(RELEASES, names, strict=True):
            shutil.copytree(folder / f"runs/{there}/checkpoints/ba4", folder / f"runs/{name}/checkpoints/ba4")
            resaved = resave_into(folder / f"resaved/{name}")
            write_config(folder / f"{name}.yaml", {**config, "run_name": name, "callbacks": resaved})
        train(interpreter, folder, *([f"{name}.yaml"] for name in names))
    return folder


def losses(folder, name):
    return values(read_metrics(folder / "runs" / name), "loss/train/total")


def torch_of(folder, name):
    return open_checkpoint(folder / f"runs/{name}/checkpoints/ba8").manifest.segments[-1].torch.split("+")[0]  # type: ignore[union-attr]


def test_the_environments_keep_the_torch_they_brought(folder):
    ours, oldest, newest = (torch_of(folder, release) for release in RELEASES)
    assert oldest == "2.11.0"
    assert tuple(map(int, newest.split("."))) > tuple(map(int, ours.split("."))) > (2, 11, 0)


@pytest.mark.parametrize("release", PINS)
def test_every_release_trains_the_same_run(folder, release):
    assert losses(folder, release) == pytest.approx(losses(folder, "ours"), abs=1e-5)


@pytest.mark.parametrize(("there", "here"), list(product(RELEASES, RELEASES)))
def test_a_save_of_one_release_is_the_same_state_under_another_and_trains_on(folder, there, here):
    name = f"{there}-{here}"
    verify_checkpoint(open_checkpoint(folder / f"runs/{there}/checkpoints/ba4"))
    assert_same_state(folder / f"runs/{there}/checkpoints/ba4", folder / f"resaved/{name}/ba4")
    carried_on, whole = losses(folder, name), losses(folder, there)[4:]
    assert carried_on == (whole if there == here else pytest.approx(whole, abs=1e-5))
    assert torch_of(folder, name) == torch_of(folder, here)
    if there == here:
        assert_same_state(*(folder / f"runs/{run}/checkpoints/ba8" for run in (name, here)))


STREAMING = {"every": "4ba", "fragments": 2, "delay": "1ba", "dtype": "int8"}


@pytest.mark.parametrize(
    ("way", "sync"),
    [({}, {}), ({"exact_sums": True}, {}), ({}, {"sync": STREAMING, "check_weights_every": 1})],
    ids=["gradients", "exact", "local steps"],
)
def test_islands_of_two_releases_train_one_run(interpreters, tmp_path, monkeypatch, way, sync):
    """With local steps: they have the same bits after each outer step."""
    monkeypatch.setenv(TOKEN, SECRET)
    config = tiny_config(write_data(tmp_path / "data"), max_duration="8ba", device_train_microbatch_size=1, **way)
    train(interpreters["ours"], tmp_path, [write_config(tmp_path / "alone.yaml", {**config, "run_name": "alone"})])
    releases = {"a": "ours", "b": "oldest"}
    with coordination(tmp_path) as running, ThreadPoolExecutor(2) as pool:
        shared = {**config, "run_name": "run", "save_folder": str(tmp_path / "saves")}
        launches = []
        for name, release in releases.items():
            islands = {"coordinator": f"127.0.0.1:{running.port}", "name": name, **sync}
            path = write_config(tmp_path / f"{name}.yaml", {**shared, "islands": islands})
            launches.append(pool.submit(train, interpreters[release], tmp_path, [path]))
        for launch in launches:
            launch.result()
    alone = read_metrics(tmp_path / "runs/alone")
    for name in releases:
        records = metrics(tmp_path, name)
        assert values(records, "islands/members") == [2] * 8
        assert values(records, "islands/drifts") == [0] * 8
        if not sync:
            assert values(records, "data/digest") == values(alone, "data/digest")
            assert losses(tmp_path, f"run/{name}") == pytest.approx(losses(tmp_path, "alone"), abs=1e-5)
    islands = open_checkpoint(tmp_path / "saves/ba8").manifest.segments[-1].islands
    assert islands["b"]["torch"].split("+")[0] == "2.11.0" != islands["a"]["torch"].split("+")[0]
