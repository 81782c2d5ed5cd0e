"""Code of the user's own: errors of its name and its keys are one line, which its own errors have below a traceback."""

import re
import sys

import pytest

from llmfoundry_lite import own_code
from llmfoundry_lite.errors import ConfigError, OwnCodeError
from llmfoundry_lite.own_code import call_object, errors_named, trust_code
from llmfoundry_lite.ranks.ending import describe_error, exit_code_of

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
        ("mine:Thing", {"evrey": 5}, r"unexpected keyword argument 'evrey'; did you mean every\? \(it takes every\)$"),
        ("mine:bare", {"evrey": 5}, r"unexpected keyword argument 'evrey'; it takes no keys$"),
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
    ("thing", "kwargs", "line", "message"),
    [
        (
            "mine:Thing",
            {"every": None},
            'mine.py", line 4',
            "python:mine:Thing raises TypeError: unsupported operand type(s) for +: 'NoneType' and 'int'",
        ),
        (
            "broken:Thing",
            {},
            'broken.py", line 3',
            "python:broken:Thing: its module raises AttributeError: module 'sys' has no attribute 'no_such_thing'",
        ),
    ],
)
def test_an_error_in_the_code_itself_has_a_traceback_and_names_the_key(thing, kwargs, line, message):
    with pytest.raises(OwnCodeError) as error:
        call(thing, **kwargs)
    first, *frames, _, last = describe_error(error.value).splitlines()
    assert first == "Traceback (most recent call last):"
    assert last == f"error: place.name: {message}" and exit_code_of(error.value) == 2
    assert line in [*filter(lambda text: text.startswith("  File"), frames)][-1]


def test_an_error_for_the_user_and_a_lost_rank_are_raised_as_they_are():
    for error in (ConfigError("beta: 2 given"), RuntimeError("Connection closed by peer"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as raised, errors_named("callbacks: mine"):
            raise error
        assert raised.value is error
