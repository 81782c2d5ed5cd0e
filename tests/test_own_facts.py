"""Facts of the user's own classes, which are read from their source: nothing is imported, and nothing is guessed."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmfoundry_lite.estimate.own_optimizer import read_told_state
from llmfoundry_lite.own_facts import MAX_SOURCE_BYTES, find_module, read_class_facts
from llmfoundry_lite.training.own_optimizer import (
    CompareOptimizerState,
    describe_difference,
    measure_bytes_per_parameter,
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Return the folder of the package `told`, whose import would end the process. It is on Python's path."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "told").mkdir()
    (tmp_path / "told/__init__.py").write_text("raise SystemExit('imported')\n")
    read_class_facts.cache_clear()
    yield tmp_path
    assert "told" not in sys.modules


def told(folder, body: str, name: str = "Own"):
    (folder / "told/optim.py").write_text(f"raise SystemExit\n\nclass Own:\n    lr = f()\n    {body}\n")
    return read_told_state(f"python:told.optim:{name}")


@pytest.mark.parametrize(
    ("body", "expected", "attribute"),
    [
        ("slots = ('exp_avg', 'exp_avg_sq', 'slow')", 12, "slots"),
        ("slots = ['exp_avg']", 4, "slots"),
        ("slots: int = 3", 12, "slots"),
        ("slots = 0", 0, "slots"),
        ("bytes_per_parameter = 2.5; slots = 3", 2.5, "bytes_per_parameter"),
        ("slots = 1\n    slots = 2", 8, "slots"),
        ("other = slots = 2", 8, "slots"),
        ("slots = 2\n    slots: int", 8, "slots"),
        ("slots = 2; text = '\\d'", 8, "slots"),  # Python warns of that escape
    ],
)
def test_literals_of_a_class_are_read(folder, body, expected, attribute):
    assert told(folder, body) == (expected, f"its class says so with {attribute}")


OTHER_BINDINGS = [
    "slots = 3; slots += 1",
    "slots = 3\n    if f():\n        slots = 4",
    "slots = 3\n    for slots in range(9):\n        pass",
    "slots = 3\n    slots, other = 4, 5",
    "slots = 3\n    (slots := 4)",
    "slots = 3\n    def slots(self): ...",
    "slots = 3\n    import os as slots",
    "slots = 3\n    with f() as slots: ...",
    "slots = 3\n    del slots",
]
NEITHER = "its class has neither slots nor bytes_per_parameter"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("slots = len('abc')", "its slots is computed, and only literals can be read"),
        *[(body, "its slots is computed, and only literals can be read") for body in OTHER_BINDINGS],
        ("slots = 'three'", "its slots is no number from 0 to 256"),
        ("slots = True", "its slots is no number from 0 to 256"),
        ("slots = -1", "its slots is no number from 0 to 256"),
        ("bytes_per_parameter = 1e999", "its bytes_per_parameter is no number from 0 to 1024"),
        ("slots: int", NEITHER),
        ("def step(self):\n        slots = 3", NEITHER),
        ("slots = " + "(" * 1000, "/told/optim.py is not Python that can be read"),
        ("slots = " + "-" * 100_000 + "1", "/told/optim.py is not Python that can be read"),
        (
            "x = '" + "x" * MAX_SOURCE_BYTES + "'",
            "has more than 1,048,576 bytes, the most that are read of a source file",
        ),
    ],
)
def test_other_attributes_tell_nothing_and_the_reason_is_said(folder, body, problem):
    bytes_per_parameter, explanation = told(folder, body)
    assert bytes_per_parameter is None and explanation.endswith(problem)


def test_a_class_that_is_not_there_tells_nothing(folder):
    told(folder, "slots = 3")
    assert read_told_state("python:told.optim:Other")[1].endswith(
        "/told/optim.py has no class Other at the top level of the file"
    )
    assert read_told_state("python:told.gone:Own") == (None, "there is no source of told.gone")
    assert read_told_state("python:sys:path") == (None, "there is no source of sys")
    assert find_module("told.gone").missing == "told.gone" and find_module("gone.gone").missing == "gone"


def test_a_built_optimizer_is_compared_with_what_its_class_says(folder):
    parameters = [torch.nn.Parameter(torch.zeros(100, 100)), torch.nn.Parameter(torch.zeros(100))]
    optimizer = torch.optim.AdamW(parameters)
    assert measure_bytes_per_parameter(optimizer) == 0
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = measure_bytes_per_parameter(optimizer)
    assert kept is not None and kept == pytest.approx(8, rel=1e-3)

    name = "python:told.optim:Own"
    for body, expected in {
        "slots = 2": "",
        "slots = 3": f"optimizer: {name} keeps 8 bytes for each parameter, and its class says 12, by which memory was "
        "estimated; correct it there",
        "slots = 0": f"optimizer: {name} keeps 8 bytes for each parameter, and its class says 0, by which memory was "
        "estimated; correct it there",
        "pass": f"optimizer: {name} keeps 8 bytes for each parameter; a dry run could know it: bytes_per_parameter = 8 "
        "in its class",
    }.items():
        read_class_facts.cache_clear()
        told(folder, body)
        assert describe_difference(name, kept) == expected


def test_an_optimizer_without_a_state_is_compared_after_its_first_step_and_once(folder, monkeypatch, capsys):
    told(folder, "slots = 1")
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    parameter = torch.nn.Parameter(torch.zeros(10))
    optimizer = torch.optim.SGD([parameter])
    state: Any = SimpleNamespace(optimizers=[optimizer])
    logger: Any = None
    callback = CompareOptimizerState("python:told.optim:Own")
    callback.fit_start(state, logger)

    optimizer.step()  # of a batch that was skipped: there is no gradient
    callback.batch_end(state, logger)
    assert capsys.readouterr().out == ""

    parameter.grad = torch.ones(10)
    for _ in range(2):
        optimizer.step()
        callback.batch_end(state, logger)
    assert capsys.readouterr().out.count("keeps 0 bytes for each parameter, and its class says 4") == 1
