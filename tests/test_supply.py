"""Third parties of this project: declared packages, pinned actions, known advisories."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator

import pytest
import yaml

from llmfoundry_lite.companions import PACKAGES, is_installed
from tests.helpers.environments import find_uv
from tests.helpers.launch import ROOT

PYPROJECT = (ROOT / "pyproject.toml").read_text()
PROJECT = tomllib.loads(PYPROJECT)["project"]
EXTRAS = PROJECT["optional-dependencies"]
MODULES = {"pyyaml": "yaml", "python-snappy": "snappy", "mosaicml": "composer", "mosaicml-streaming": "streaming"}
"""Distributions whose module has another name."""
OF_THE_MACHINE = {"amdsmi", "botocore", "flash_attn", "lm_eval"}
"""ROCm brings amdsmi, and s3fs botocore; the others are used where a user has them."""
BY_OTHERS = {"s3fs", "tensorboard", "zstandard"}
"""fsspec imports the first, for s3://, torch the second, datasets the third."""
FOR_COMPOSER = "# Composer and mosaicml-streaming import these when they are imported; nothing here does.\n"


def module_of(requirement: str) -> str:
    name = re.split(r"[\[<>=~! ]", requirement)[0].lower()
    return MODULES.get(name, name.replace("-", "_"))


def imported() -> set[str]:
    def names(tree: ast.AST) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module

    companions = [path for path in (ROOT / "companions").glob("*/**/*.py") if "tests" not in path.parts]
    files = [*(ROOT / "llmfoundry_lite").rglob("*.py"), *companions]
    found = {name.split(".")[0] for path in files for name in names(ast.parse(path.read_text()))}
    return found - {*sys.stdlib_module_names, "llmfoundry_lite", *PACKAGES}


def declared() -> set[str]:
    group = tomllib.loads(PYPROJECT)["dependency-groups"]["composer"]
    return {
        module_of(one) for one in (*PROJECT["dependencies"], *(r for extra in EXTRAS.values() for r in extra), *group)
    }


def test_a_package_that_is_imported_is_declared():
    assert imported() - declared() - OF_THE_MACHINE == set()


@pytest.mark.skipif(not all(map(is_installed, PACKAGES)), reason="a companion needs what the core does not")
def test_a_package_that_is_declared_is_imported_or_said_to_be_composer_s():
    others = re.findall(r'"([^"]+)"', PYPROJECT.partition(FOR_COMPOSER)[2].partition("]")[0])
    unused = declared() - imported() - BY_OTHERS
    assert unused == {module_of(one) for one in others}


def test_an_action_is_pinned_by_its_commit_and_may_only_read():
    for path in (ROOT / ".github/workflows").iterdir():
        workflow = yaml.safe_load(path.read_text())
        assert workflow["permissions"] == {"contents": "read"}
        used = re.findall(r"uses: (.+)", path.read_text())
        assert used and all(re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}  # v[\d.]+", one) for one in used), used


@pytest.mark.long
def test_no_package_has_a_known_vulnerability(tmp_path):
    """Checks the releases that were tested together, those of the tests included."""
    for name in ("pyproject.toml", "README.md", "scripts"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    found = subprocess.run([find_uv(), "audit"], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    said = found.stdout + found.stderr
    if "error sending request" in said:
        pytest.skip("offline: the advisory service (https://api.osv.dev) cannot be reached")
    if "unrecognized subcommand" in said:
        pytest.skip(f"{found.args[0]} has no `audit`: a newer uv has it")
    assert found.returncode == 0, said
