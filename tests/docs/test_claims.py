"""Every sentence of "What you can rely on" has tests behind it that `docs/claims.md` names, and they are there."""

import ast
import functools
import re

import pytest

from tests.helpers.launch import ROOT
from tests.helpers.markdown import section

CLAIMS_PAGE = (ROOT / "docs/claims.md").read_text()
CHECKPOINTS_PAGE = (ROOT / "docs/checkpoints.md").read_text()


def claims(heading: str) -> dict[str, list[str]]:
    """Sentence -> the tests that would fail if it were not so."""
    rows = re.findall(r"^\| (.+?) \| (`.+`) \|$", section(CLAIMS_PAGE, heading), re.M)
    return {sentence: re.findall(r"`([^`]+)`", tests) for sentence, tests in rows}


CHECKPOINTS, OTHERS = claims("Checkpoints"), claims("Data, training, evaluation")
TESTS = sorted({test for tests in (*CHECKPOINTS.values(), *OTHERS.values()) for test in tests})


@functools.cache
def functions_of(file: str) -> set[str]:
    place = ROOT if file.startswith("companions/") else ROOT / "tests"
    tree = ast.parse((place / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_sentence_about_checkpoints_has_tests_and_no_other_is_claimed():
    sentences = re.findall(r"^- (.+)$", section(CHECKPOINTS_PAGE, "What you can rely on"), re.M)
    assert sentences == list(CHECKPOINTS)
    assert all(CHECKPOINTS.values())


def test_the_claims_that_have_stood_so_far_still_stand():
    assert len(CHECKPOINTS) >= 31
    assert len(OTHERS) >= 15


@pytest.mark.parametrize("name", TESTS)
def test_the_test_is_there(name):
    file, function = name.split("::")
    if not (ROOT / "companions").exists() and file.startswith("companions/"):
        pytest.skip("no companions here")
    assert function in functions_of(file)
