"""The tour leads where it says."""

import ast
import re
import tomllib

import pytest

from llmfoundry_lite.companions import PACKAGES
from tests.helpers.launch import ROOT

TOUR = (ROOT / "docs/tour.md").read_text()
BEHAVIOURS = re.findall(r"^\| (.+?) \| `([\w/]+\.py)` \| `(\w+)` \|$", TOUR, re.M)


DEFINITION = re.compile(r"^ *(?:async )?(?:def|class) (\w+)|^ *(\w+)(?:: [^=\n]+)? = ", re.M)
"""A line that defines a function, a class or a constant. To parse all files would take 5 s."""


def names_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


@pytest.mark.parametrize(("behaviour", "file", "name"), BEHAVIOURS)
def test_a_behaviour_is_where_the_tour_says(behaviour, file, name):
    assert name in names_of(ROOT / "llmfoundry_lite" / file), behaviour


def test_the_tour_has_twenty_behaviours_and_every_room():
    assert len(BEHAVIOURS) == 20
    rooms = {path.name for path in (ROOT / "llmfoundry_lite").iterdir() if (path / "__init__.py").is_file()}
    missing = {room for room in rooms if f" {room}/" not in TOUR}
    assert not missing


def test_the_tour_draws_the_floors_of_the_import_contract():
    """A room is drawn where its highest part is."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    floors: dict[str, int] = {}
    for number, layer in enumerate(next(one for one in contracts if one["name"].startswith("Floors"))["layers"]):
        for name in re.findall(r"llmfoundry_lite\.(\w+)", layer):
            floors.setdefault(name, number)
    picture = TOUR.split("```")[1]
    drawn = re.findall(r"(?:^  |; |(?<=\.py), )(\w+)(?:/|\.py)", picture, re.M)
    assert {*drawn} == {*floors, "__init__"}
    heights = [floors[name] for name in drawn if name in floors]
    assert heights == sorted(heights)


def test_files_that_the_tour_names_exist():
    for file in re.findall(r"`([\w/]+/\w+\.py)`", TOUR):
        root = ROOT if file.startswith("tests/") else ROOT / "llmfoundry_lite"
        assert (root / file).is_file(), file


def test_names_in_the_list_of_additions_exist():
    """Functions, classes and constants that "To add" names are defined in the package or in a companion."""
    defined = set()
    for folder in ("llmfoundry_lite", "companions", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            defined.update(*DEFINITION.findall(path.read_text()))
    additions = TOUR.split("**To add**")[1]
    names = {name for name in re.findall(r"`(\w+)`", additions) if name != name.lower() or "_" in name}
    not_code = {"root_packages", *PACKAGES}
    assert len(names) > 20
    assert names - not_code - defined == set()


def test_the_tour_names_every_companion():
    """And each says in one screen what it is for."""
    for package in PACKAGES:
        assert f"| `{package}` |" in TOUR
        if (folder := ROOT / "companions" / package).is_dir():
            assert 5 < len((folder / "README.md").read_text().splitlines()) < 40


def test_no_test_module_imports_from_another():
    """Shared code lies in tests/helpers, or beside the tests in a module without tests."""
    found = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line in path.read_text().splitlines()
        if re.match(r"\s*(from|import) tests\.([\w]+\.)*test_", line)
    ]
    assert not found
