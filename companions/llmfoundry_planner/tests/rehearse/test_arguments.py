"""`llmfoundry-lite rehearse`: what is refused before a compiler or a process starts."""

import importlib.util
import os
import re

import pytest

from llmfoundry_lite.cli.main import run
from llmfoundry_lite.config.layout import divisors
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.hardware import ACCELERATORS
from llmfoundry_planner.rehearse import build
from llmfoundry_planner.rehearse.device import choose_kernels, describe_device, device_name, find_device
from llmfoundry_planner.rehearse.search import bisect, short_batch

RUN = ["yamls/pretrain/mpt-125m.yaml", "yamls/hardware/h100-8.yaml"]


def refusal(capfd, *arguments: str) -> str:
    assert run(["rehearse", *arguments]) == 2
    text = capfd.readouterr().err
    assert text.count("\n") == 1
    return text


EIGHT = [*RUN, "--devices", "8"]
TABLE = "For a new device, copy the row of one like it in llmfoundry_lite/hardware.py"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*EIGHT, "--hardware", "H1000"], f"hardware 'H1000' is not in the table.* H100-80GB.*{TABLE}"),
        ([RUN[0], "--devices", "8"], "name it with --hardware"),
        ([RUN[0], "a100.yaml", "--devices", "8"], "hardware 'a100' may be A100-40GB and A100-80GB; name one of them"),
        ([*RUN, "--devices", "12"], "not a whole number of nodes of 8.*the nearest counts that fit: 8 and 16\n"),
        ([*RUN, "--devices", "24"], "the nearest counts that fit: 16 and 32\n"),
        ([*EIGHT, "--rank", "8"], "--rank: 8 given, expected 0 to 7"),
        ([*EIGHT, "--search", "--all-kinds", "--batches", "3"], "--search: it rehearses one rank, for two batches"),
        ([*EIGHT, "--rank", "1", "--all-kinds"], "--rank: it is the only one that is rehearsed; leave out --all-kinds"),
        ([*EIGHT, "--batches", "1"], "Invalid value for '--batches'"),  # without the optimizer's state
    ],
)
def test_what_cannot_be_meant_is_refused_in_a_line(capfd, arguments, words):
    assert re.search(words, refusal(capfd, *arguments))


def test_without_a_c_compiler_one_line_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no C compiler on PATH"):
        build.build_library()
    assert not list(tmp_path.rglob("libcuda*"))


def test_a_cache_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    words = r"file/llmfoundry_lite/rehearse/torch-\S+ cannot be written \(.*\); set XDG_CACHE_HOME"
    with pytest.raises(ConfigError, match=words):
        build.build_library()


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31)
    with pytest.raises(ConfigError, match="this user has no home; set XDG_CACHE_HOME"):
        build.cache_folder()


def test_a_torch_without_cuda_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: type("", (), {"origin": f"{tmp_path}/x.py"}))
    with pytest.raises(ConfigError, match="was built without CUDA"):
        build.find_torch()


def test_an_environment_without_composer_is_told_how_to_get_it(capfd, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "composer" else find(name, *more)
    )
    assert "composer not installed, which training needs" in refusal(capfd, *RUN, "--devices", "8")


@pytest.mark.parametrize("row", ACCELERATORS.values(), ids=lambda row: row.name)
def test_each_device_of_the_table_can_be_played(row):
    assert re.fullmatch(row.pattern, device_name(row))
    facts = describe_device(row, 8, 13000)
    assert int(facts["REHEARSED_SHARED_PER_BLOCK"]) and int(facts["REHEARSED_UNITS"]) == row.num_compute_units


def test_a_device_runs_the_kernels_of_its_generation_or_is_refused():
    built_for = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120"
    kernels = {}
    for name in ("A100-80GB", "L4", "H100-80GB", "B200", "MI250"):
        facts = describe_device(ACCELERATORS[name], 8, 13000)
        kernels[name] = choose_kernels(built_for, facts)["REHEARSED_KERNELS"]
    assert kernels == {"A100-80GB": "80", "L4": "86", "H100-80GB": "90", "B200": "100", "MI250": "90"}
    words = r"no kernels for .*V100.* \(sm_70\): it was built for sm_75 sm_80"
    with pytest.raises(ConfigError, match=words):
        choose_kernels(built_for, describe_device(ACCELERATORS["V100-16GB"], 8, 13000))


@pytest.mark.parametrize(
    ("overlay", "name"),
    [("h100-8", "H100-80GB"), ("a100-40gb-8", "A100-40GB"), ("mi250-4", "MI250"), ("mi300x-8", "MI300X")],
)
def test_an_overlay_is_named_after_its_device(overlay, name):
    assert find_device([RUN[0], f"yamls/hardware/{overlay}.yaml"], None).name == name
    assert find_device(["mpt-125m", overlay, "seed=1"], None).name == name
    assert find_device(["mpt-125m", f"hardware={overlay}"], None).name == name


@pytest.mark.parametrize("largest", [0, 1, 4, 16, 48])
@pytest.mark.parametrize("first", [1, 8, 48])
def test_the_search_needs_few_rehearsals(largest, first):
    tried = []

    def attempt(size):
        tried.append(size)
        return size <= largest

    sizes = divisors(48)
    assert bisect(sizes, first, attempt) == max((size for size in sizes if size <= largest), default=0)
    assert len(tried) == len(set(tried)) <= 6


@pytest.mark.parametrize(("largest", "tried_first"), [(8, [8, 12]), (6, [8, 6])])
def test_the_search_looks_beside_the_estimate_first(largest, tried_first):
    tried = []
    bisect(divisors(48), 8, lambda size: tried.append(size) or size <= largest)
    assert tried[:2] == tried_first
    assert bisect([1, 2, 4], 2, lambda size: None) is None, "a rehearsal that fails in another way"
    assert short_batch(4, 16, 3) == ["device_train_microbatch_size=4", "global_train_batch_size=24"]
    assert short_batch(16, 16, 3) == ["device_train_microbatch_size=16", "global_train_batch_size=48"]
