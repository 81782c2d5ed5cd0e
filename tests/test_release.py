"""Version and facts that the package states, installed or only on the path."""

import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from llmfoundry_lite import release

ROOT = Path(__file__).parents[1]


@pytest.fixture
def not_installed(monkeypatch):
    def missing(name: str):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(release, "metadata", missing)


def test_the_metadata_of_an_installed_package_is_what_pyproject_says():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = release.read_release()
    assert found.version == project["version"]
    assert len(found.requirements) > len(project["dependencies"])  # extras among them


def test_a_source_tree_on_the_path_knows_its_release(not_installed):
    found = release.read_release()
    assert found.version[0].isdigit() and "3.11" in found.python
    assert any(text.startswith("safetensors") for text in found.requirements)


@pytest.mark.parametrize("content", [None, "[project", "[tool]", '[project]\nname = "theirs"\nversion = "7"'])
def test_a_bare_copy_says_that_it_does_not_know(content, not_installed, monkeypatch, tmp_path):
    path = tmp_path / "pyproject.toml"
    monkeypatch.setattr(release, "PYPROJECT", path)
    if content is not None:
        path.write_text(content)
    assert release.read_release() == ("unknown", "", [])


def test_nothing_but_this_module_asks_for_our_metadata():
    """Where the package is not installed, `version("llmfoundry-lite")` is a traceback."""
    found = [
        str(path)
        for path in (ROOT / "llmfoundry_lite").rglob("*.py")
        if path.name != "release.py" and 'version("llmfoundry-lite")' in path.read_text().replace("'", '"')
    ]
    assert not found
