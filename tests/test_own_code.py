"""Code of the user's own: errors of its name and its keys are one line, and its own errors keep their traceback."""

import re
import sys
from pathlib import Path

import pytest

from llmfoundry_lite import own_code
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.own_code import call_object, trust_code

CODE = """
class Thing:
    def __init__(self, first, *, every=1):
        self.every = every + 1


def bare(first):
    return first


def __getattr__(name):
    raise AttributeError(name)
"""


@pytest.fixture(autouse=True)
def _mine(tmp_path, monkeypatch):
    """Put modules into the search path, of which one works."""
    monkeypatch.setattr(own_code, "_trusted_names", set())
    (tmp_path / "mine.py").write_text(CODE)
    (tmp_path / "broken.py").write_text("import sys\n\nsys.no_such_thing\n")
    (tmp_path / "needs_more.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("mine", "broken", "needs_more"):
        sys.modules.pop(name, None)


def call(thing, **kwargs):
    """Call an object as a place in the configuration does, with one argument of the place."""
    name = f"python:{thing}"
    trust_code([name])
    return call_object(name, "place.name", "place", kwargs, "first")


def test_it_is_called_with_the_arguments_of_the_place_and_the_keys_of_the_block():
    assert call("mine:Thing", every=5).every == 6


@pytest.mark.parametrize(
    ("thing", "kwargs", "message"),
    [
        (
            "mine:Thing",
            {"often": 5},
            r"place: python:mine:Thing does not take these keys: .*argument 'often'; it takes every$",
        ),
        ("mine:Thing", {"evry": 5}, r"unexpected keyword argument 'evry'; did you mean every\? \(it takes every\)$"),
        ("mine:bare", {"evry": 5}, r"unexpected keyword argument 'evry'; it takes no keys$"),
        ("mine:Missing", {}, r"place\.name: python:mine:Missing: module mine has no Missing"),
        ("mine:__doc__", {}, r"place\.name: python:mine:__doc__ is a NoneType, expected a class or a function"),
        (
            "mine.inner:Thing",
            {},
            r"No module named 'mine\.inner'; 'mine' is not a package; is its folder on PYTHONPATH",
        ),
        ("not_here:Thing", {}, r"place\.name: python:not_here:Thing: No module named 'not_here'; is its folder on"),
        ("needs_more:Thing", {}, r"its module imports another, and fails: No module named 'not_installed_anywhere'"),
    ],
)
def test_a_wrong_name_or_key_is_one_line(thing, kwargs, message):
    with pytest.raises(ConfigError) as error:
        call(thing, **kwargs)
    assert re.search(message, str(error.value)) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("thing", "error_class", "line"), [("mine:Thing", TypeError, 4), ("broken:Thing", AttributeError, 3)]
)
def test_an_error_in_the_code_itself_keeps_its_traceback(thing, error_class, line):
    with pytest.raises(error_class) as error:
        call(thing, **({"every": None} if thing == "mine:Thing" else {}))
    assert error.traceback[-1].lineno + 1 == line and Path(error.traceback[-1].path).stem == thing.partition(":")[0]
