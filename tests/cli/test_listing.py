"""`llmfoundry-lite list`: every file that comes with the package, by the name that commands take."""

import pytest

from llmfoundry_lite.cli import listing
from llmfoundry_lite.cli.listing import KINDS
from llmfoundry_lite.cli.main import run
from llmfoundry_lite.config import auto_hardware
from llmfoundry_lite.config.auto_hardware import DetectedDevices
from llmfoundry_lite.config.load_eval import load_eval_config
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.hardware import ACCELERATORS
from tests.helpers.launch import ROOT


@pytest.mark.parametrize("kind", KINDS)
def test_every_file_has_a_line_and_the_example_of_its_use_is_read(kind, capsys):
    assert run(["list", kind]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    described = dict(line.split(maxsplit=1) for line in lines)
    assert sorted(described) == sorted(path.stem for path in ROOT.glob(KINDS[kind].files))
    assert all(10 < len(text) < 90 for text in described.values()), described
    name, _, words = first.partition(": llmfoundry-lite ")
    assert name == kind
    if words.startswith("train -n 8 "):
        load_train_config(words.split()[3:], {})
    else:
        load_eval_config(words.split()[1:])


@pytest.mark.parametrize(
    ("found", "hardware", "layouts"),
    [
        (None, ["cpu"], ["mpt-7b-8x192gb", "mpt-7b-8x40gb"]),
        (
            DetectedDevices("NVIDIA H100 80GB HBM3", ACCELERATORS["H100-80GB"], 8),
            ["h100-8"],
            ["mpt-7b-8x80gb", "mpt-13b-8x80gb"],
        ),
    ],
)
def test_what_fits_this_machine_comes_first(found, hardware, layouts, monkeypatch, capsys):
    for module in (listing, auto_hardware):
        monkeypatch.setattr(module, "find_devices", lambda *_: found)
    first = {"hardware": hardware, "layouts": layouts, "models": ["mpt-quickstart", "mpt-125m", "mpt-350m", "mpt-1b"]}
    for kind, expected in first.items():
        assert run(["list", kind]) == 0
        lines = capsys.readouterr().out.splitlines()[1:]
        assert [line.split()[0] for line in lines][: len(expected)] == expected


def test_all_kinds_are_listed_and_another_is_refused(capsys):
    assert run(["list"]) == 0
    assert [text.partition(":")[0] for text in capsys.readouterr().out.split("\n\n")] == list(KINDS)
    assert run(["list", "model"]) == 2
    assert "'model' given, expected models, hardware, layouts, suites or tasks" in capsys.readouterr().err
