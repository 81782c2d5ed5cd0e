"""Images on GPU clusters bring their own torch, and a switch of clusters is a switch of torch releases.

An environment for each of the oldest and the newest release, made as docs/hardware.md says: their torch first, then
everything else from the exported requirements. Composer's own metadata permits no torch newer than 2.7, so these are
installed with `--no-deps`; torchvision, which Composer imports, is the release made for that torch.
"""

from itertools import product

import pytest

from llmfoundry_lite.checkpoint.store import open_checkpoint
from llmfoundry_lite.checkpoint.verify import verify_checkpoint
from tests.helpers import releases
from tests.helpers.releases import PINS, RELEASES, losses, train
from tests.helpers.resave import assert_same_state, resave_into
from tests.helpers.runs import copy_save
from tests.helpers.tiny import tiny_config, write_config, write_data

pytestmark = [pytest.mark.long, pytest.mark.multiprocess]

interpreters = releases.interpreters


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
            copy_save(folder, there, 4, name)
            resaved = resave_into(folder / f"resaved/{name}")
            write_config(folder / f"{name}.yaml", {**config, "run_name": name, "callbacks": resaved})
        train(interpreter, folder, *([f"{name}.yaml"] for name in names))
    return folder


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
