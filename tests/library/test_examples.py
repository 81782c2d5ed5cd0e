"""The examples in the docstrings of the public names print what they say."""

import doctest
import shutil
from typing import Any

import pytest

import llmfoundry_lite as lf
from llmfoundry_lite import programs
from llmfoundry_lite.evaluation.loaded import LoadedModel
from tests.helpers.present import needs

pytestmark = pytest.mark.multiprocess

NAMES = {name: getattr(lf, name) for name in lf.__all__} | {"train": programs.train}
EXAMPLES: dict[str, Any] = {
    **NAMES,
    "call": LoadedModel.__call__,
    "logprobs": LoadedModel.logprobs,
    "generate": LoadedModel.generate,
}


OF_COMPANIONS = {"runs": needs("llmfoundry_ops")}


@pytest.mark.parametrize("name", [pytest.param(name, marks=OF_COMPANIONS.get(name, ())) for name in EXAMPLES])
def test_an_example_prints_what_it_says(name, world, tmp_path, monkeypatch, capsys):
    """In a copy of the folder, because the example of `lf.train` leaves a run there."""
    shutil.copytree(world, tmp_path / "world")
    monkeypatch.chdir(tmp_path / "world")
    found = doctest.DocTestFinder(recurse=False).find(EXAMPLES[name], name, globs={"lf": lf})
    assert found and found[0].examples
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    with capsys.disabled():
        said: list[str] = []
        failed = runner.run(found[0], out=said.append).failed
    assert not failed, "".join(said)
