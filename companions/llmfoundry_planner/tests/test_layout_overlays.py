"""yamls/layouts: a large model divided over so many devices of so much memory, and over more of them."""

import re

import pytest
import yaml

from benchmarks.layouts import COUNTS, MODELS, OVERLAYS, SLOWER, fastest_seconds, fewest_devices, predict
from benchmarks.memory import MAX_EXCESS, compare, difference, find_case
from llmfoundry_lite.config.layers import is_for_hardware, leaf_keys
from llmfoundry_lite.config.layout import layout_of
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.estimate.memory import estimate_training_memory
from llmfoundry_planner.plan.search import usable_bytes
from llmfoundry_planner.plan.step import accelerator_named
from llmfoundry_planner.rehearse.fork_server import ForkServer
from tests.helpers.launch import ROOT

LARGEST = ("mpt-1t", 3072, 64)
"""The largest model, the number of devices that it is divided over, and GB of a device."""
NAMES = sorted(path.stem for path in (ROOT / "yamls/layouts").glob("*.yaml"))


def parts_of(name: str) -> tuple[str, int, int]:
    """Return (model, devices, GB of a device)."""
    found = re.fullmatch(r"(mpt-\d+[bt])-(\d+)x(\d+)gb", name)
    assert found, name
    return found[1], int(found[2]), int(found[3])


def tier_of(name: str) -> pytest.MarkDecorator:
    """Return the mark of the second tier for devices of 80 GB, and that of the third one for others."""
    _, _, size = parts_of(name)
    return pytest.mark.slow if size == 80 else pytest.mark.long


def counts_of(name: str) -> list[int]:
    """Return counts from its own number of devices to the one that the model's next layout begins with."""
    model, first, size = parts_of(name)
    if (model, first, size) == LARGEST:
        return [first]
    firsts = [parts_of(other)[1] for other in NAMES if parts_of(other)[::2] == (model, size)]
    end = min((other for other in firsts if other > first), default=COUNTS[-1] + 1)
    return [count for count in COUNTS if first <= count < end]


def load(name: str, overlay: str, *arguments: str):
    return load_train_config([parts_of(name)[0], overlay, name, *arguments]).config


def test_every_large_model_has_a_layout_from_the_smallest_count_that_holds_it():
    firsts: dict[tuple[str, int], int] = {}
    for name in NAMES:
        model, count, size = parts_of(name)
        firsts[model, size] = min(count, firsts.get((model, size), count))
    expected = {}
    for model in MODELS:
        for size in OVERLAYS:
            expected[model, size] = fewest_devices(model, size)
    expected[LARGEST[0], LARGEST[2]] = LARGEST[1]
    assert firsts == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_layout_sets_what_hardware_decides_and_says_why(name):
    text = (ROOT / f"yamls/layouts/{name}.yaml").read_text()
    settings = yaml.safe_load(text)
    assert settings.pop("overlay") == "hardware"
    for key in leaf_keys(settings):
        assert is_for_hardware(key)
    assert "not run on this hardware yet" in text
    model, count, size = parts_of(name)
    launcher = "llmfoundry-lite train -n 8"
    if count > 8:
        launcher = f"srun -N {count // 8} --ntasks-per-node 8 python -m llmfoundry_lite.launch_train"
    command = re.search(rf"^# {launcher} (\S+) (\S+) (\S+)$", text, re.MULTILINE)
    assert command and command[1] == model and command[2] in OVERLAYS[size] and command[3] == name


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_fits_at_every_count(name):
    for overlay in OVERLAYS[parts_of(name)[2]]:
        config = load(name, overlay)
        # A trillion's stages wait for each other the less, the smaller the microbatches are.
        assert config.device_train_microbatch_size == (1 if parts_of(name) == LARGEST else "auto")
        for count in counts_of(name):
            needed = estimate_training_memory(config, layout_of(config, count, 8)).total_bytes
            assert needed < usable_bytes(accelerator_named(overlay)), (overlay, count)


@pytest.mark.parametrize("name", [pytest.param(name, marks=tier_of(name)) for name in NAMES])
def test_it_is_nearly_as_fast_as_the_fastest_that_the_planner_finds_and_says_so(name):
    model, _, size = parts_of(name)
    text = (ROOT / f"yamls/layouts/{name}.yaml").read_text()
    for count in counts_of(name):
        found = []
        for overlay in OVERLAYS[size]:
            config = load(name, overlay)
            found.append(predict(config, layout_of(config, count, 8), overlay, fastest_seconds(model, overlay, count)))
        assert max(found).slower < SLOWER
        assert max(found).line(count) in text.splitlines()


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_its_fullest_rank_is_rehearsed_at_its_first_count(monkeypatch, name):
    """The microbatch is the largest for which the estimate finds room."""
    monkeypatch.chdir(ROOT)
    model, count, size = parts_of(name)
    overlay = f"{OVERLAYS[size][-1]} + {name}"
    case = find_case(model, overlay, accelerator_named(OVERLAYS[size][-1]), load(name, OVERLAYS[size][-1]), count)
    assert case is not None
    with ForkServer() as server:
        row = compare(server, case)
    assert not row["error"]
    assert 0 <= difference(row) <= MAX_EXCESS, row["rehearsed"]["at_peak_bytes"]
